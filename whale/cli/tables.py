"""Tables as plain text, for stdout and for files: aligned, never wrapped, without colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["cell_text", "text_table"]


def text_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table under its title; columns of numbers (with their units) are aligned right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title.replace("_", " "), title_justify="left", box=None, pad_edge=False)
    texts = [[cell_text(value) for value in row] for row in rows]
    for index, column in enumerate(columns):
        numbers = index > 0 and all(row[index][:1] in "0123456789-+." for row in texts)
        table.add_column(column.replace("_", " "), justify="right" if numbers else "left", no_wrap=True)
    for row in texts:
        table.add_row(*row)
    console = Console(width=1000, no_color=True, force_terminal=False, markup=False)  # may go into a file: never wrap
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def cell_text(value: Any) -> str:
    """A value as a table shows it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
