"""Shared code of the file readers: limits, paths to values, and a position in a text with its line."""

from __future__ import annotations

from typing import NoReturn

from whale.errors import InputFileError

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_JSON_VALUES", "MAX_VALUES", "Path", "Reader"]

Path = tuple[str | int, ...]
"""Keys and list positions from the top of a document to a value."""

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 32
MAX_VALUES = 50_000
MAX_JSON_VALUES = 300_000


class Reader:
    """A position in a text, whose line is counted when an error occurs."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.position = self.num_values = 0
        self.lines: dict[Path, int] = {}
        self._line, self._line_position = 1, 0

    def fail(self, message: str) -> NoReturn:
        """Raise an error at the current position."""
        raise InputFileError(message, path=self.source, line=self.line())

    def line(self) -> int:
        """Line of the current position, counted from the last call."""
        self._line += self.text.count("\n", self._line_position, self.position)
        self._line_position = self.position
        return self._line
