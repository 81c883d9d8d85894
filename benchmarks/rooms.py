"""Lines of Python by room (folder), at two commits.

    python benchmarks/rooms.py                       # before the rooms were made, and HEAD
    python benchmarks/rooms.py --before COMMIT --after COMMIT --write 2026-11-23

Files of commits before `MOVED` count in the room to which that commit moved them.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "7088efa"
MOVED = "f5034b2"
"""The commit that moved the loose modules into rooms, without other changes."""
TOPS = ("whale", "planner", "strategies", "examples", "benchmarks", "tests")
ONE_ROOM = ("examples", "benchmarks", "tests")


def git(*arguments: str) -> str:
    """The output of a git command in the repository."""
    ran = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return ran.stdout


def room_of(file: str) -> str:
    """The room of a file: its folder, down to the second level; examples, benchmarks and tests are one room each."""
    folders = file.split("/")[:-1]
    return folders[0] if folders[0] in ONE_ROOM else "/".join(folders[:2])


def lines_by_file(commit: str) -> dict[str, int]:
    """Lines of every Python file of a commit, symlinks excluded."""
    listed = git("grep", "--count", "", commit, "--", *(f"{top}/*.py" for top in TOPS))
    counted = (line.removeprefix(f"{commit}:").rpartition(":") for line in listed.splitlines())
    return {file: int(count) for file, _, count in counted}


def moves() -> dict[str, str]:
    """New names of the files that `MOVED` renamed, by their old names."""
    changes = git("diff", "--name-status", "--find-renames=40%", f"{MOVED}~1", MOVED).splitlines()
    renamed = (change.split("\t") for change in changes if change.startswith("R"))
    return {old: new for _, old, new in renamed}


def is_before_the_move(commit: str) -> bool:
    """Whether a commit does not have the rooms yet."""
    ran = subprocess.run(["git", "merge-base", "--is-ancestor", MOVED, commit], cwd=ROOT, check=False)
    return ran.returncode != 0


def lines_by_room(commit: str) -> dict[str, list[int]]:
    """Lines of the files of each room at a commit."""
    names = moves() if is_before_the_move(commit) else {}
    rooms = defaultdict(list)
    for file, lines in lines_by_file(commit).items():
        rooms[room_of(names.get(file, file))].append(lines)
    return rooms


def table(before: str, after: str) -> str:
    """A Markdown table of lines, files and the longest file of each room at both commits."""
    one, two = lines_by_room(before), lines_by_room(after)
    rows = ["| room | lines before | after | change | files before | after | longest file after |"]
    rows += ["|---|---|---|---|---|---|---|"]
    top = {room: TOPS.index(room.split("/")[0]) for room in {*one, *two}}
    product = [room for room in top if room not in ONE_ROOM]
    groups = [[room] for room in sorted(top, key=lambda room: (top[room], room))] + [product]
    for group in groups:
        old, new = ([lines for room in group for lines in counts.get(room, [])] for counts in (one, two))
        name = f"`{group[0]}`" if len(group) == 1 else "**all but examples, benchmarks, tests**"
        rows.append(
            f"| {name} | {sum(old):,} | {sum(new):,} | {sum(new) - sum(old):+,} | {len(old)} | {len(new)} | "
            f"{max(new, default=0)} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    """Print the table, or write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--after", default="HEAD")
    parser.add_argument("--write", metavar="DATE")
    options = parser.parse_args()
    before, after = (git("rev-parse", "--short", commit).strip() for commit in (options.before, options.after))
    made = table(before, after)
    print(made, end="")
    if options.write:
        text = (
            f"# Lines of Python by room\n\nCommits {before} (before) and {after} (after). Files before the rooms count "
            f"in the room to which they moved.\n\n{made}\nTo repeat: `python benchmarks/rooms.py --before {before} "
            f"--after {after}`\n"
        )
        (ROOT / "benchmarks" / "results" / f"rooms_{options.write}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
