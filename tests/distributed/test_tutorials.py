"""The tutorials run as they are printed: files are written, commands run, and what they print is what the page shows.

A block whose first line is a comment with a file's name is that file. A block of commands runs; a block of text after
it is its output, in which `...` stands for anything, and a number with a point for any such number, but wherever the
page shows it again, for the same one. Commands of torchrun run on ranks that stay between tutorials;
those for several machines run as they are, once for each machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.distributed import scripts
from tests.distributed.harness import run_ranks
from tests.distributed.parity import Worlds, worlds
from whale.cli.app import app
from whale.runtime.launch import World

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|toml))\n")


@contextlib.contextmanager
def inside(folder: Path, arguments: list[str]) -> Iterator[io.StringIO]:
    """The state of a process started in the folder, and what it prints."""
    before, argv, path = Path.cwd(), sys.argv, list(sys.path)
    os.chdir(folder)
    sys.argv, sys.path = arguments, [str(folder), *path]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            yield printed
    finally:
        os.chdir(before)
        sys.argv, sys.path = argv, path
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(f"{folder}{os.sep}"):
                del sys.modules[name]


def run_script(world: World, folder: Path, arguments: list[str]) -> str:
    with inside(folder, arguments) as printed:
        runpy.run_path(arguments[0], run_name="__main__")
    return printed.getvalue()


def run_alone(world: World, folder: Path, arguments: list[str]) -> str:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return run_script(world, folder, arguments)


def run_on_every_machine(folder: Path, words: list[str]) -> str:
    """Run a command once for each of its machines, all of them this one; the output of the first."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    local = [word.replace("node0", "127.0.0.1").replace("29500", str(port)) for word in words]
    number = int(local[local.index("--nnodes") + 1])
    machines = [[str(rank) if word == "NODE_RANK" else word for word in local[1:]] for rank in range(number)]

    def run(words: list[str]) -> scripts.Ended:
        return scripts.run_script("-m", "torch.distributed.run", *words, folder=folder, forks_ranks=True)

    with ThreadPoolExecutor() as threads:
        done = list(threads.map(run, machines))
    assert [machine.returncode for machine in done] == [0] * number, done
    return done[0].stdout


def run_command(worlds: Worlds, folder: Path, words: list[str]) -> str:
    if words[0] == "torchrun" and "--nnodes" in words:
        return run_on_every_machine(folder, words)
    if words[0] == "torchrun":
        assert words[1:3] == ["--nproc-per-node", "2"]
        return "".join(worlds.run(2, run_script, folder, words[3:]))
    if words[0] == "python":
        return str(run_ranks(1, run_alone, folder, words[1:])[0])
    assert words[0] == "whale", f"a tutorial cannot run {words[0]}"
    with inside(folder, words):
        done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def check_output(shown: str, printed: str, numbers: dict[str, str]) -> None:
    """Check what was printed; *numbers* has, for each number shown so far, the number printed."""
    pattern = re.escape(" ".join(shown.split())).replace(r"\ ", r"\s+").replace(r"\.\.\.", ".*?")
    pattern = re.sub(r"\d+\\\.\d+", lambda _: r"(\d+\.\d+)", pattern)
    found = re.fullmatch(pattern, printed.strip(), flags=re.DOTALL)
    assert found, f"printed:\n{printed}\nshown:\n{shown}"
    for number, real in zip(re.findall(r"\d+\.\d+", shown), found.groups(), strict=True):
        assert numbers.setdefault(number, real) == real, f"{number} is {numbers[number]} and {real}"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Worlds]:
    with worlds() as made:
        yield made


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_does_what_it_says(ranks: Worlds, tutorial: Path, tmp_path: Path) -> None:
    printed, numbers = "", dict[str, str]()
    for language, text in BLOCK.findall(tutorial.read_text(encoding="utf-8")):
        named = FILE_NAME.match(text)
        if named:
            (tmp_path / named[1]).write_text(text, encoding="utf-8")
        elif language == "sh":
            commands = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
            printed = "".join(run_command(ranks, tmp_path, words) for words in commands if words)
        elif language == "text":
            check_output(text, printed, numbers)
