"""Quantities with units, such as ``"16 GiB"`` or ``"100 Gbit/s"``, as plain numbers in base units, and numbers as text.

A quantity always has its unit; ``GB`` is 10**9 bytes and ``GiB`` 2**30. Bits are spelt ``bit``, because ``Gb`` and
``GB`` look too similar.
"""

from __future__ import annotations

import re
from decimal import Decimal
from math import isfinite
from typing import Literal

__all__ = ["PATTERNS", "Quantity", "bytes_text", "counted", "duration_text", "parse_quantity", "started", "time_text"]

Quantity = Literal["memory", "bandwidth", "latency", "duration", "speed"]
"""Read as bytes, bytes per second, seconds (twice) and FLOP per second."""

# Decimal, so that "15 us" is the float 15e-6 and not its neighbour.
_DECIMAL = {prefix: Decimal(10) ** (3 * power) for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E"))}
_BINARY = {prefix: Decimal(2) ** (10 * power) for power, prefix in enumerate(("Ki", "Mi", "Gi", "Ti"), start=1)}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()} | {"KB": Decimal(1000)}
_UNITS: dict[Quantity, dict[str, Decimal]] = {
    "memory": _BYTES,
    "bandwidth": {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
    "latency": {
        "s": Decimal(1),
        "ms": Decimal("1e-3"),
        "us": Decimal("1e-6"),
        "µs": Decimal("1e-6"),
        "ns": Decimal("1e-9"),
    },
    "duration": {
        "s": Decimal(1),
        "min": Decimal(60),
        "h": Decimal(3600),
        "d": Decimal(86400),
        "y": Decimal(31557600),
    },
    "speed": {f"{prefix}{unit}": factor for prefix, factor in _DECIMAL.items() for unit in ("FLOP/s", "FLOPS")},
}
_EXAMPLES: dict[Quantity, str] = {
    "memory": '"16 GiB"',
    "bandwidth": '"300 GB/s" or "100 Gbit/s"',
    "latency": '"15 us"',
    "duration": '"20 s" or "5 y"',
    "speed": '"9.3 TFLOP/s"',
}
_NUMBER = r"[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,3})?"
_WRITTEN = re.compile(rf"\s*({_NUMBER})\s*([A-Za-zµ/]*)\s*")

PATTERNS: dict[Quantity, str] = {
    quantity: rf"^\s*{_NUMBER}\s*({'|'.join(units)})\s*$" for quantity, units in _UNITS.items()
}
"""A regular expression for each quantity, for published schemas."""


def parse_quantity(given: object, quantity: Quantity) -> float:
    """Parse *given* to a number in base units.

    Raises:
        ValueError: *given* is no such quantity; the message shows how to write one.

    >>> parse_quantity("16 GiB", "memory") == 16 * 2**30
    True
    >>> parse_quantity("100 Gbit/s", "bandwidth")
    12500000000.0
    >>> parse_quantity("1.5 h", "duration")
    5400.0
    """
    example = _EXAMPLES[quantity]
    if not isinstance(given, str):
        raise ValueError(f"write a {quantity} as a number with its unit, in quotes, such as {example}, not {given!r}")
    found = _WRITTEN.fullmatch(given)
    if found is None:
        raise ValueError(f"{_short(given)} is no {quantity}; write a number with its unit, such as {example}")
    number, unit = Decimal(found[1]), found[2]
    factor = _UNITS[quantity].get(unit)
    if factor is None:
        what = f"unknown unit {_short(unit)}" if unit else "no unit"
        raise ValueError(f"{_short(given)} has {what} for a {quantity}; write it as {example}")
    value = float(number * factor)
    if not isfinite(value):
        raise ValueError(f"{_short(given)} is too large a {quantity}")
    if value == 0 and quantity not in ("latency", "duration"):
        raise ValueError(f"a {quantity} of {_short(given)} is useless; it must be positive")
    return value


def counted(number: int, noun: str, ending: str = "s") -> str:
    """A number of things, with the *ending* of their name if they are several.

    >>> counted(1, "row"), counted(0, "row"), counted(8, "micro-batch", "es")
    ('1 row', '0 rows', '8 micro-batches')
    """
    return f"{number} {noun}{ending if number != 1 else ''}"


def started(processes: int) -> str:
    """How many processes a launch has started.

    >>> started(1), started(2)
    ('1 process was started', '2 processes were started')
    """
    return f"{counted(processes, 'process', 'es')} {'was' if processes == 1 else 'were'} started"


def bytes_text(size: float) -> str:
    """Bytes for people, in the unit in which they are best read.

    >>> bytes_text(61.25 * 2**30), bytes_text(2**29), bytes_text(3 * 2**20), bytes_text(1536), bytes_text(0)
    ('61.2 GiB', '0.50 GiB', '3.0 MiB', '1.5 KiB', '0 B')
    >>> bytes_text(float("inf"))
    'unlimited memory'
    """
    if not isfinite(size):
        return "unlimited memory"
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        count = size / 2**power
        if count >= 0.1:
            return f"{count:.2f} {unit}" if unit == "GiB" and count < 10 else f"{count:.1f} {unit}"
    return f"{size:.0f} B"


def time_text(seconds: float, *, signed: bool = False) -> str:
    """Seconds of a step or of a part of it, in the unit in which they are best read; *signed*: with a plus too.

    >>> time_text(0.0123456), time_text(12.3456), time_text(134.89254), time_text(0.0000123)
    ('12.35 ms', '12.35 s', '134.89 s', '0.0123 ms')
    >>> time_text(0.5, signed=True), time_text(-12, signed=True)
    ('+500.00 ms', '-12.00 s')
    """
    sign, size = "+" if signed else "", abs(seconds)
    if size >= 10:
        return f"{seconds:{sign}.2f} s"
    return f"{seconds * 1e3:{sign}.{2 if size >= 1e-3 or not size else 4}f} ms"


def duration_text(seconds: float) -> str:
    """A time for people, in its two largest units.

    >>> duration_text(3.14), duration_text(200), duration_text(7384), duration_text(3600 * 50)
    ('3.1 s', '3 min 20 s', '2 h 3 min', '2 d 2 h')
    """
    if not isfinite(seconds):
        return "never"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, size, smaller, part in (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86400, "h", 3600)):
        whole, rest = divmod(round(seconds / part), size // part)
        if unit == "d" or seconds < {"min": 3600, "h": 86400}[unit]:
            return f"{whole} {unit} {rest} {smaller}"
    raise AssertionError  # days take all


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")
