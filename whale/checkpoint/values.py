"""States of objects as plain JSON, and back: numbers, texts, lists, dicts and what is made of them, and nothing that
runs. Tensors are put elsewhere, and have a number here."""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, TypeVar

import numpy as np

from whale.checkpoint.format import empty_of_form
from whale.errors import CheckpointError, UsageError

__all__ = ["decoded", "encoded"]

MAX_DEPTH = 24
"""Levels of lists and dicts; files of JSON have 32."""

MAX_DIGITS = 99
"""Digits of a number; files of JSON have 100, with the sign."""

_TensorT = TypeVar("_TensorT")


def encoded(value: Any, where: str, tensor: Callable[[Any], dict[str, Any] | None], depth: int = 0) -> Any:
    """A value as JSON.

    Args:
        value: of which.
        where: what it is, for errors.
        tensor: takes a tensor, and returns ``{"$tensor": N}`` with its number, or the form of one without elements;
            None for what is none.

    Raises:
        UsageError: it has something else, or too many levels.

    >>> encoded({"lr": (0.1, float("inf")), 3: None}, "scheduler", lambda x: None)
    {'$dict': [['lr', {'$tuple': [0.1, {'$float': 'inf'}]}], [3, None]]}
    """
    if depth > MAX_DEPTH:
        raise UsageError(f"{where} has more than {MAX_DEPTH} levels, which a checkpoint cannot hold")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return {"$float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        _check_readable(value, where)
        return value if type(value) in (bool, int, float, str, type(None)) else _plain(value)
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if (put := tensor(value)) is not None:
        return put

    def each(inner: Any, name: object) -> Any:
        return encoded(inner, f"{where}[{name!r}]", tensor, depth + 1)

    if isinstance(value, (list, tuple)):
        items = [each(item, place) for place, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        if isinstance(value, Counter):
            return {"$counter": [[each(key, key), count] for key, count in value.items()]}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            for key in value:
                _check_readable(key, f"the key {key!r} of {where}")
            return {key: each(item, key) for key, item in value.items()}
        return {"$dict": [[each(key, key), each(item, key)] for key, item in value.items()]}
    raise UsageError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: give numbers, texts, bytes, lists, "
        "dicts and tensors"
    )


def _check_readable(value: Any, where: str) -> None:
    """Refuse what a file could hold, and no reader takes from it."""
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(
            f"{where} is {value[:80]!r}, which has half of a surrogate pair and is no text: give bytes, such as those "
            "of os.fsencode for a name of a file"
        )
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise UsageError(f"{where} is a number of more than {MAX_DIGITS} digits, which a checkpoint cannot hold")


def _plain(value: Any) -> Any:
    """A number or text of a class of its own as a plain one."""
    return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))


def decoded(value: Any, tensor: Callable[[int | tuple[str, tuple[int, ...]]], _TensorT]) -> Any:
    """The value of JSON that `encoded` has made.

    Args:
        value: of JSON.
        tensor: the tensor with a number, or the one without elements that has a dtype and a shape.

    Raises:
        CheckpointError: it is not such JSON.

    >>> decoded({"$dict": [["lr", {"$tuple": [0.1, {"$float": "inf"}]}], [3, None]]}, lambda number: None)
    {'lr': (0.1, inf), 3: None}
    """
    if isinstance(value, list):
        return [decoded(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next((key for key in value if key.startswith("$")), None)
    if kind is None:
        return {key: decoded(item, tensor) for key, item in value.items()}
    inner = value[kind]
    try:
        match kind:
            case "$float":
                return {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}[inner]
            case "$bytes":
                return base64.b64decode(inner, validate=True)
            case "$tuple":
                return tuple(decoded(item, tensor) for item in inner)
            case "$counter":
                return Counter({decoded(key, tensor): int(count) for key, count in inner})
            case "$dict":
                return {decoded(key, tensor): decoded(item, tensor) for key, item in inner}
            case "$tensor" if isinstance(inner, int):
                return tensor(inner)
            case "$empty" if (form := empty_of_form(value)) is not None:
                return tensor(form)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise CheckpointError(f"a state has {kind}: {str(inner)[:80]}, which is no such value") from error
    raise CheckpointError(f"a state has {kind}: {str(inner)[:80]}, which this Whale does not know")
