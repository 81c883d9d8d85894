"""Records: frozen data with strict types, read from strictly parsed documents with errors that name the line.

This module knows the shape of no file.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from whale.ir.document import Document, Path, parse_document, read_document
from whale.ir.file_kinds import said_of_another_kind

__all__ = ["FileRecord", "Record", "read_record"]

RecordT = TypeVar("RecordT", bound=BaseModel)


class Record(BaseModel):
    """Frozen data: unknown fields, other types and numbers that are not finite are refused."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )  # pydantic before 2.10 protects all names that begin with "model_"


class FileRecord(Record):
    """A record with a JSON file of its own."""

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read the file, in JSON whatever its name.

        Raises:
            InputFileError: whatever is wrong with it, with the line.
        """
        return cls.of_document(read_document(path, "json"))

    @classmethod
    def parse(cls, text: str, *, source: str = "<text>") -> Self:
        """Parse text; *source* is its name in errors."""
        return cls.of_document(parse_document(text, "json", source=source))

    @classmethod
    def of_document(cls, document: Document) -> Self:
        """Convert a parsed document."""
        return read_record(cls, document)


def read_record(record: type[RecordT], document: Document) -> RecordT:
    """Convert the values of a document to a record.

    Raises:
        InputFileError: with the line of the first finding; a misspelt key comes before the one it leaves missing.
    """
    try:
        return record.model_validate_json(json.dumps(document.value, default=str))
    except ValidationError as error:
        findings = error.errors(include_url=False, include_context=True)
    if said := said_of_another_kind(document.value, record.__name__):
        raise document.error(said)
    wrong = [finding["loc"] for finding in findings]
    placed = [
        (finding, _place(finding, document))
        for finding in findings
        if finding["type"] != "too_short" or not any(_is_in(other, finding["loc"]) for other in wrong)
    ]
    placed.sort(key=lambda found: (found[0]["type"] != "extra_forbidden", document.line_of(found[1]) or 0))
    first, place = placed[0]
    more = f" (and {len(placed) - 1} more)" if len(placed) > 1 else ""
    raise document.error(_message(first, place, record) + more, place)


def _is_in(place: Path, other: Path) -> bool:
    """Whether a place is a part of another: a list counts as too short, too, if one of its entries is wrong."""
    return len(other) < len(place) and place[: len(other)] == other


def _place(finding: ErrorDetails, document: Document) -> Path:
    """The part of an error's location that is in the file: pydantic adds names of alternatives, and ``[key]``.

    Errors about parts of a record begin with the path of the part, as in ``stages.0.ranks: ...``.
    """
    place: list[int | str] = []
    value: Any = document.value
    inner = _text(finding).partition(": ")[0].split(".") if finding["type"] == "value_error" else []
    loc = (*finding["loc"], *(int(part) if part.isdecimal() else part for part in inner))
    missing = finding["type"] == "missing"
    for position, part in enumerate(loc):
        if (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        ):
            value = value[part]  # type: ignore[index]
        elif not (missing and position == len(loc) - 1):
            continue
        place.append(part)
    return tuple(place)


def _text(finding: ErrorDetails) -> str:
    return str(finding["msg"]).removeprefix("Value error, ")


def _message(finding: ErrorDetails, place: Path, record: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in place)
    match finding["type"]:
        case "extra_forbidden":
            known = list(dict.fromkeys(_keys(record, place[:-1])))
            near = difflib.get_close_matches(str(place[-1]), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            return f"unknown key {str(place[-1])[:80]!r}; {hint}"
        case "missing":
            return f"the key {str(place[-1])!r} is missing"
        case "value_error":
            where = ".".join(str(part) for part in finding["loc"] if part != "[key]")
            joint = "." if re.match(r"[\w.]+: ", _text(finding)) else ": "
            return f"{where}{joint}{_text(finding)}" if where else _text(finding)
    return f"{where}: {in_words(finding['msg'])}, not {repr(finding['input'])[:80]}"


_WORDS = (
    (r"(Input|String|List|Tuple|Dictionary|Value) should ", "must "),
    (r"be greater than or equal to ", "be at least "),
    (r"be less than or equal to ", "be at most "),
    (r"have at (least|most) 1 item after validation, not \d+", r"have at \1 one entry"),
    (r"have at (least|most) (\d+) items after validation, not \d+", r"have at \1 \2 entries"),
    (r"be a valid dictionary.*|be an object.*", "be a table of names and values"),
    (r"be a valid (list|tuple|array)", "be a list"),
    (r"be a valid integer", "be a whole number"),
    (r"be a valid number", "be a number"),
    (r"be a valid string", "be text"),
    (r"be a valid boolean", "be true or false"),
)


def in_words(message: str) -> str:
    """Rephrase what pydantic says of a value in the words of the other errors of files.

    >>> in_words("Input should be greater than or equal to 1"), in_words("Input should be a valid list")
    ('must be at least 1', 'must be a list')
    """
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return re.sub(r"\d{16,}", lambda digits: f"{float(digits[0]):.4g}", message)


def _keys(annotation: Any, place: Sequence[int | str]) -> Iterator[str]:
    """The keys of a record at a location, as far as types show."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not place:
            yield from annotation.model_fields
        elif (field := annotation.model_fields.get(str(place[0]))) is not None:
            yield from _keys(field.annotation, place[1:])
        return
    through = place[1:] if str(getattr(annotation, "__origin__", annotation)) in _CONTAINERS else place
    for inner in get_args(annotation):
        if inner is not Ellipsis:
            yield from _keys(inner, through)


_CONTAINERS = {str(container) for container in (tuple, list, dict)}
