"""The table of docs/gpus.md, from reports: the parts of ``whale doctor --gpu`` that passed, by GPUs.

python benchmarks/gpus.py           # writes the table
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from whale.cli.gpu import PARTS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpus.md"
REPORTS = "benchmarks/results/gpu_*.json"


def table(reports: dict[str, dict[str, Any]]) -> str:
    """The reports, by file, as a table in Markdown."""
    names = [part.name for part in PARTS]
    head = ["report", "GPUs", *names]
    rows = [_row(file, report, names) for file, report in sorted(reports.items())]
    rows = rows or [["none yet", *[""] * (len(names) + 1)]]
    return "\n".join([_line(head), "|" + "---|" * len(head), *map(_line, rows)])


def _line(cells: list[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _row(file: str, report: dict[str, Any], names: list[str]) -> list[str]:
    devices = Counter(device["name"] for device in report["machine"]["devices"])
    found = ["passed" if report["parts"].get(name, {}).get("passed") else "FAILED" for name in names]
    shown = ", ".join(f"{count} x {name}" for name, count in devices.items())
    return [f"[{file}](../benchmarks/results/{file})", shown, *found]


def with_table(page: str, made: str) -> str:
    """The page with another table of reports."""
    begin = page.index("| report |")
    end = page.index("\n\n", begin)
    return page[:begin] + made + page[end:]


def main() -> None:
    """Write the table into the page."""
    reports = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob(REPORTS))}
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(reports)), encoding="utf-8")


if __name__ == "__main__":
    main()
