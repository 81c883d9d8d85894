"""Strict reading of JSON: by the standard library, and by a reader that knows lines where something may be wrong.

Files are untrusted: see `whale.ir.document` for what is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import isfinite
from typing import Any, NoReturn

from whale.ir.reader import MAX_DEPTH, MAX_JSON_VALUES, Path, Reader

__all__ = ["parse_json"]


def parse_json(text: str, source: str) -> tuple[dict[str, Any], Mapping[Path, int]]:
    """The value of a JSON text, and the lines of its keys and items.

    Raises:
        InputFileError: it is no JSON object, or breaks a limit; names the line.
    """
    value = _plain_json(text)
    if value is not None:
        return value, _JsonLines(text, source)
    reader = _JsonReader(text, source)
    return reader.document(), reader.lines


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")

_MAX_DIGITS = 100


def _plain_json(text: str) -> dict[str, Any] | None:
    """Values of a text by the standard library's reader; None if something is or may be wrong, which `_JsonReader` then
    reports."""
    most_values = 1 + sum(map(text.count, ",[{"))
    may_have_surrogates = "\\u" in text or not text.isascii()
    if most_values > MAX_JSON_VALUES or (may_have_surrogates and _SURROGATE.search(text)):
        return None
    try:
        value = json.loads(
            text, object_pairs_hook=_table, parse_int=_integer, parse_float=_finite, parse_constant=_refuse
        )
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _depth_within(value, MAX_DEPTH) else None


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key is given twice")
    return table


def _integer(text: str) -> int:
    return int(text) if len(text) <= _MAX_DIGITS else _refuse(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if isfinite(number) and len(text) <= _MAX_DIGITS else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is too long, or not a finite number")


def _depth_within(value: dict[str, Any], most: int) -> bool:
    """Whether the nesting depth of a value is at most *most*."""
    containers: list[Any] = [value]
    for _ in range(most):
        items = (item for one in containers for item in (one.values() if isinstance(one, dict) else one))
        containers = [item for item in items if isinstance(item, dict | list)]
        if not containers:
            return True
    return False


class _JsonLines(Mapping[Path, int]):
    """The lines of a JSON text, computed on first use, because most files have no error."""

    def __init__(self, text: str, source: str) -> None:
        self._text, self._source = text, source

    @cached_property
    def _lines(self) -> dict[Path, int]:
        reader = _JsonReader(self._text, self._source)
        reader.document()
        return reader.lines

    def __getitem__(self, path: Path) -> int:
        return self._lines[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


class _JsonReader(Reader):
    """Builds plain values from one linear walk; an item of a list has a line where it is not that of the one before."""

    _SPACE = re.compile(r"[ \t\n\r]*")
    _NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
    _STRING = json.JSONDecoder()  # used where a quote opens a string
    _ROW = re.compile(r"\[[-+0-9.eE, ]{1,65536}\]")
    _CONSTANTS: tuple[tuple[str, bool | None], ...] = (("true", True), ("false", False), ("null", None))

    def next(self) -> str:
        """The next character that is no space; the empty string at the end."""
        found = self._SPACE.match(self.text, self.position)
        assert found is not None  # it matches nothing at all, too
        self.position = found.end()
        return self.text[self.position : self.position + 1]

    def document(self) -> dict[str, Any]:
        if self.next() != "{":
            self.fail("the file must be a JSON object")
        value = self.value(())
        if self.next():
            self.fail("not valid JSON: there is something after the end of the object")
        return value

    def value(self, path: Path) -> Any:
        self.num_values += 1
        if self.num_values > MAX_JSON_VALUES:
            self.fail(f"has more than {MAX_JSON_VALUES} values")
        if len(path) > MAX_DEPTH:
            self.fail(f"is nested more than {MAX_DEPTH} levels deep")
        match self.next():
            case "{":
                return self.table(path)
            case "[":
                return self.items(path)
            case '"':
                return self.string()
        for word, constant in self._CONSTANTS:
            if self.text.startswith(word, self.position):
                self.position += len(word)
                return constant
        return self.number()

    def table(self, path: Path) -> dict[str, Any]:
        table: dict[str, Any] = {}
        self.position += 1
        if self.next() == "}":
            self.position += 1
            return table
        while True:
            if self.next() != '"':
                self.fail("not valid JSON: expected a key in double quotes")
            line = self.line()
            key = self.string()
            if key in table:
                self.fail(f"the key {key!r} is given twice")
            if self.next() != ":":
                self.fail("not valid JSON: expected ':' after a key")
            self.position += 1
            self.lines[(*path, key)] = line
            table[key] = self.value((*path, key))
            if not self.more("}"):
                return table

    def items(self, path: Path) -> list[Any]:
        if (row := self.row()) is not None:
            return row
        items: list[Any] = []
        self.position += 1
        if self.next() == "]":
            self.position += 1
            return items
        line = 0
        while True:
            self.next()
            if (now := self.line()) != line:
                line = self.lines[(*path, len(items))] = now
            items.append(self.value((*path, len(items))))
            if not self.more("]"):
                return items

    def row(self) -> list[int | float] | None:
        """A list of numbers on one line, read at once; None if it is something else, or wrong."""
        found = self._ROW.match(self.text, self.position)
        try:
            row: list[int | float] | None = json.loads(found[0]) if found is not None else None
        except ValueError:
            return None
        if found is None or row is None or not all(abs(number) < 10**100 for number in row):
            return None
        self.num_values += len(row)
        if self.num_values > MAX_JSON_VALUES:
            self.fail(f"has more than {MAX_JSON_VALUES} values")
        self.position = found.end()
        return row

    def more(self, end: str) -> bool:
        """Step over a comma, or over *end*: then there is no more."""
        character = self.next()
        if character not in (",", end) or not character:
            self.fail(f"not valid JSON: expected ',' or {end!r}")
        self.position += 1
        return character == ","

    def string(self) -> str:
        value: str
        try:
            value, self.position = self._STRING.raw_decode(self.text, self.position)
        except json.JSONDecodeError as error:
            self.position = min(error.pos, len(self.text))
            self.fail(f"not valid JSON: {error.msg}")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            self.fail("a string holds half of a surrogate pair, which is no character")
        return value

    def number(self) -> int | float:
        found = self._NUMBER.match(self.text, self.position)
        if found is None:
            word = re.match(r"[-\w]{1,20}", self.text[self.position : self.position + 20])
            if word is not None and word[0] in ("NaN", "Infinity", "-Infinity"):
                self.fail(f"{word[0]} is not a finite number")
            self.fail("not valid JSON: expected a value")
        if len(found[0]) > _MAX_DIGITS:
            self.fail("a number of more than 100 digits is not allowed")
        self.position = found.end()
        if found[2] is None and found[3] is None:
            return int(found[1])
        number = float(found[0])
        if not isfinite(number):
            self.fail(f"{found[0]} is not a finite number")
        return number
