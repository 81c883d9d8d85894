"""Strict reader of user-edited files: TOML, YAML and JSON as plain values with line numbers.

Files are untrusted. A syntax error, a repeated key, a number that is not finite, an alias, a tag, nesting over 32
levels, more than 50,000 values (300,000 in JSON, which we write ourselves) or over 4 MB end in an ``InputFileError``
with file and line. This file knows syntax only, not what any file means; nothing here builds anything but dicts, lists,
strings, numbers, booleans, None and TOML's dates.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from os import PathLike, fspath
from pathlib import PurePath
from typing import Any, Literal, NoReturn, get_args

import yaml

from whale.errors import InputFileError, UsageError
from whale.ir.json_reader import parse_json
from whale.ir.reader import MAX_BYTES, MAX_DEPTH, MAX_VALUES, Path, Reader

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_VALUES",
    "Document",
    "Format",
    "parse_document",
    "read_document",
]

Format = Literal["toml", "yaml", "json"]


@dataclass(frozen=True, kw_only=True)
class Document:
    """The content of a file.

    Attributes:
        value: of the whole file.
        lines: the line, from 1, of the key or item at each path.
        source: the path or name to show in errors.
    """

    value: dict[str, Any]
    lines: Mapping[Path, int] = field(repr=False)
    source: str

    def line_of(self, path: Path) -> int | None:
        """The line of *path*, or of the nearest thing around it that has one."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None

    def error(self, message: str, path: Path = ()) -> InputFileError:
        """An error at the line of *path*, to be raised by the caller."""
        return InputFileError(message, path=self.source, line=self.line_of(path))


def read_document(path: str | PathLike[str], format: Format | None = None) -> Document:
    """Read the file at *path*; without *format* its suffix says whether it is TOML, YAML or JSON."""
    source = fspath(path)
    formats: dict[str, Format] = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
    suffix = PurePath(source).suffix.lower()
    if format is None and suffix not in formats:
        raise InputFileError(f"unknown suffix {suffix!r}; name the file .toml, .yaml, .yml or .json", path=source)
    try:
        with open(source, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputFileError(f"cannot be read: {reason}", path=source) from error
    if len(data) > MAX_BYTES:
        raise InputFileError("is larger than 4 MB, which no such file needs", path=source)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputFileError(f"is not UTF-8: byte 0x{data[error.start]:02x}", path=source, line=line) from error
    return parse_document(text, format or formats[suffix], source=source)


def parse_document(text: str, format: Format, *, source: str = "<text>") -> Document:
    """Parse *text*; *source* is the name to show in errors."""
    if format not in get_args(Format):
        raise UsageError(f"unknown format {format!r}; use 'toml', 'yaml' or 'json'")
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise InputFileError("is larger than 4 MB, which no such file needs", path=source)
    if format == "json":
        value, lines = parse_json(text, source)
        return Document(value=value, lines=lines, source=source)
    return _parse_toml(text, source) if format == "toml" else _parse_yaml(text, source)


# --- TOML: the standard library parses; a scanner before it finds the lines and keeps the limits
# ------------------------


def _parse_toml(text: str, source: str) -> Document:
    text = text.replace("\r\n", "\n")
    lines = _TomlScanner(text, source).scan()
    try:
        value = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", str(error))
        line = int(found[1]) if found and found[1] else text.count("\n") + 1 if found else None
        message = str(error).replace(found[0], "") if found else str(error)
        raise InputFileError(f"not valid TOML: {message[:200]}", path=source, line=line) from error
    document = Document(value=value, lines=lines, source=source)
    _check_finite(document, value, ())
    return document


def _check_finite(document: Document, value: object, path: Path) -> None:
    if isinstance(value, float) and not isfinite(value):
        raise document.error(f"{value} is not a finite number", path)
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_finite(document, inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_finite(document, inner, (*path, index))


class _TomlScanner(Reader):
    """One linear walk over TOML text that notes the line of every key, and counts depth and values.

    It is more lenient than the parser that follows, which reports what is wrong inside a value or with repeated keys.
    """

    _SPACE = re.compile(r"[ \t]*")
    _BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
    _END_OF_LINE = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
    _BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
    _SCALAR = re.compile(r"[^\s,\[\]{}#\"'=]+(?: [0-9][^\s,\[\]{}#\"'=]*)?")
    _STRINGS = (
        re.compile(r'"""(?:[^"\\]|\\[\s\S]|"(?!""))*+"""(?:"{1,2}(?!"))?'),
        re.compile(r"'''(?:[^']|'(?!''))*+'''(?:'{1,2}(?!'))?"),
        re.compile(r'"(?!"")(?:[^"\\\n]|\\[^\n])*+"|""(?!")'),
        re.compile(r"'(?!'')[^'\n]*+'|''(?!')"),
    )

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text, source)
        self._array_lengths: Counter[Path] = Counter()

    def skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self.position)
        if found is not None:
            self.position = found.end()

    def take(self, literal: str) -> bool:
        taken = self.text.startswith(literal, self.position)
        if taken:
            self.position += len(literal)
        return taken

    def expect(self, literal: str) -> None:
        if not self.take(literal):
            self.fail(f"not valid TOML: expected {literal!r}")

    def note(self, path: Path) -> None:
        if len(path) > MAX_DEPTH:
            self.fail(f"is nested more than {MAX_DEPTH} levels deep")
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            self.fail(f"has more than {MAX_VALUES} values")
        self.lines.setdefault(path, self.line())

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        while True:
            self.skip(self._BLANK)
            if self.position >= len(self.text):
                return self.lines
            if self.take("[["):
                table = self.array_of_tables(self.key())
                self.expect("]]")
            elif self.take("["):
                table = self.resolve(self.key())
                self.note(table)
                self.expect("]")
            else:
                self.key_and_value(table)
            found = self._END_OF_LINE.match(self.text, self.position)
            if found is None:
                self.fail("not valid TOML: expected the end of the line")
            self.position = found.end()

    def key(self) -> tuple[str, ...]:
        parts: list[str] = []
        while True:
            self.skip(self._SPACE)
            bare = self._BARE_KEY.match(self.text, self.position)
            if bare is not None:
                self.position = bare.end()
                parts.append(bare[0])
            else:
                quoted = self.string()
                if quoted is None or quoted.startswith(('"""', "'''")):
                    self.fail("not valid TOML: expected a key")
                parts.append(_unquoted(quoted))
            if len(parts) > MAX_DEPTH:
                self.fail(f"is nested more than {MAX_DEPTH} levels deep")
            self.skip(self._SPACE)
            if not self.take("."):
                return tuple(parts)

    def resolve(self, key: tuple[str, ...]) -> Path:
        """The path that a table's header means: through an array of tables, its latest entry."""
        path: Path = ()
        for part in key:
            path = (*path, part)
            if path in self._array_lengths:
                path = (*path, self._array_lengths[path] - 1)
        return path

    def array_of_tables(self, key: tuple[str, ...]) -> Path:
        array = (*self.resolve(key[:-1]), key[-1])
        self.note(array)
        self._array_lengths[array] += 1
        entry = (*array, self._array_lengths[array] - 1)
        self.note(entry)
        return entry

    def key_and_value(self, table: Path) -> None:
        path = table
        for part in self.key():
            path = (*path, part)
            self.note(path)
        self.expect("=")
        self.skip(self._SPACE)
        self.value(path)

    def value(self, path: Path) -> None:
        if self.take("["):
            index = 0
            while True:
                self.skip(self._BLANK)
                if self.take("]"):
                    return
                self.note((*path, index))
                self.value((*path, index))
                index += 1
                self.skip(self._BLANK)
                if not self.take(","):
                    self.expect("]")
                    return
        if self.take("{"):
            self.skip(self._SPACE)
            if self.take("}"):
                return
            while True:
                self.key_and_value(path)
                self.skip(self._SPACE)
                if not self.take(","):
                    self.expect("}")
                    return
        if self.string() is None:
            scalar = self._SCALAR.match(self.text, self.position)
            if scalar is None:
                self.fail("not valid TOML: expected a value")
            self.position = scalar.end()

    def string(self) -> str | None:
        for pattern in self._STRINGS:
            found = pattern.match(self.text, self.position)
            if found is not None:
                self.position = found.end()
                return found[0]
        return None


def _unquoted(quoted: str) -> str:
    """The key inside quotes; escapes are left to the parser, so a line may be missing for a key that has them."""
    return quoted[1:-1]


# --- YAML: the events of the parser, resolved as YAML 1.2 does
# ----------------------------------------------------------

_YAML_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_YAML_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_YAML_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_YAML_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def _parse_yaml(text: str, source: str) -> Document:
    reader = _YamlReader(text, source)
    try:
        value = reader.document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "syntax error"
        raise InputFileError(
            f"not valid YAML: {problem}", path=source, line=None if mark is None else mark.line + 1
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"not valid YAML: {str(error)[:200]}", path=source) from error
    return Document(value=value, lines=reader.lines, source=source)


class _YamlReader:
    """Builds plain values from the parser's events; depth is limited by its own recursion's count."""

    def __init__(self, text: str, source: str) -> None:
        # The same events from either; the one in C reads 4 MB in a second, the other in eight.
        self.events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self.source = source
        self.lines: dict[Path, int] = {}
        self.num_values = 0

    def fail(self, message: str, event: yaml.Event) -> NoReturn:
        raise InputFileError(message, path=self.source, line=event.start_mark.line + 1)

    def next(self) -> yaml.Event:
        event = next(self.events)
        if isinstance(event, yaml.AliasEvent):
            self.fail(f"the alias *{event.anchor} is not allowed; write the value out", event)
        if getattr(event, "tag", None) is not None and event.tag != "!":
            self.fail(f"the tag {event.tag!r} is not allowed; write a plain value", event)
        return event

    def document(self) -> dict[str, Any]:
        self.next()  # the start of the stream
        event = self.next()
        if isinstance(event, yaml.StreamEndEvent):
            return {}
        event = self.next()
        value = self.value(event, ())
        self.next()  # the end of the document
        further = self.next()
        if not isinstance(further, yaml.StreamEndEvent):
            self.fail("holds more than one YAML document", further)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fail("the file must be a table of keys and values", event)
        return value

    def value(self, event: yaml.Event, path: Path) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            self.fail(f"has more than {MAX_VALUES} values", event)
        if len(path) > MAX_DEPTH:
            self.fail(f"is nested more than {MAX_DEPTH} levels deep", event)
        self.lines.setdefault(path, event.start_mark.line + 1)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := self.next(), yaml.SequenceEndEvent):
                items.append(self.value(event, (*path, len(items))))
            return items
        if isinstance(event, yaml.MappingStartEvent):
            table: dict[str, Any] = {}
            while not isinstance(event := self.next(), yaml.MappingEndEvent):
                if not isinstance(event, yaml.ScalarEvent) or not isinstance(key := self.scalar(event), str):
                    self.fail(
                        "a key must be a string; put it in quotes if it is a number or a word such as true", event
                    )
                if key in table:
                    self.fail(f"the key {key!r} is given twice", event)
                self.lines[(*path, key)] = event.start_mark.line + 1
                table[key] = self.value(self.next(), (*path, key))
            return table
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        self.fail("unexpected YAML", event)

    def scalar(self, event: yaml.ScalarEvent) -> str | int | float | bool | None:
        text: str = event.value
        if not event.implicit[0]:
            return text  # quoted
        if text in _YAML_CONSTANTS:
            return _YAML_CONSTANTS[text]
        if _YAML_NOT_FINITE.fullmatch(text):
            self.fail(f"{text} is not a finite number", event)
        if _YAML_INTEGER.fullmatch(text):
            if len(text) > 100:
                self.fail("an integer of more than 100 digits is not allowed", event)
            return int(text, 0) if text.startswith(("0o", "0x")) else int(text)
        if _YAML_FLOAT.fullmatch(text):
            if not isfinite(number := float(text)):
                self.fail(f"{text[:60]} is not a finite number", event)
            return number
        return text
