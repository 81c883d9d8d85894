"""JSON writer for readable files.

It knows no file's meaning; reading is `whale.ir.document`'s.
"""

from __future__ import annotations

import json
from typing import Any

from whale.errors import UsageError

__all__ = ["format_json"]


def format_json(value: Any, *, width: int = 120) -> str:
    """Write plain values as readable JSON: values that fit on a line are on one, and rows of scalars are never broken.

    The same bytes for the same value; the order of keys is kept.

    Raises:
        UsageError: a number is not finite.

    >>> print(format_json({"stages": [{"ranks": [0, 1]}], "note": "x" * 100}), end="")
    {
      "stages": [{"ranks": [0, 1]}],
      "note": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
    }
    """
    try:
        return _pretty(value, 0, 0, width) + "\n"
    except ValueError as error:
        raise UsageError(f"cannot be written as JSON: {error}") from error


def _pretty(value: Any, indent: int, used: int, width: int) -> str:
    """*used* is what stands before the value on its line."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    containers = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    row = isinstance(value, list | tuple) and not any(isinstance(item, dict | list | tuple) for item in value)
    if not containers or row or indent + used + len(flat) <= width:
        return flat
    space = " " * (indent + 2)
    if isinstance(value, dict):
        keys = [json.dumps(key, ensure_ascii=False) + ": " for key in value]
        lines = [
            key + _pretty(item, indent + 2, len(key) + 1, width) for key, item in zip(keys, value.values(), strict=True)
        ]
    else:
        lines = [_pretty(item, indent + 2, 1, width) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{space}" + f",\n{space}".join(lines) + f"\n{' ' * indent}{closing}"
