"""Quantities with units: what is read, and how a mistake is answered."""

import re

import pytest

from whale.ir.units import PATTERNS, Quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "quantity", "value"),
    [
        ("16 GiB", "memory", 16 * 2**30),
        ("16GB", "memory", 16e9),
        (" 0.5 kB ", "memory", 500),
        ("300 GB/s", "bandwidth", 300e9),
        ("100 Gbit/s", "bandwidth", 12.5e9),
        ("732e9 B/s", "bandwidth", 732e9),
        ("15 us", "latency", 15e-6),
        ("500KB", "memory", 500e3),
        ("15 µs", "latency", 15e-6),
        ("0 s", "latency", 0),
        ("9.3 TFLOP/s", "speed", 9.3e12),
        ("2 PFLOPS", "speed", 2e15),
    ],
)
def test_a_number_with_a_unit_is_read_in_base_units(text: str, quantity: Quantity, value: float) -> None:
    assert parse_quantity(text, quantity) == value
    assert re.search(PATTERNS[quantity], text)


@pytest.mark.parametrize(
    ("given", "quantity", "message"),
    [
        (16, "memory", 'in quotes, such as "16 GiB", not 16'),
        (None, "latency", "in quotes"),
        ("16", "memory", "no unit"),
        ("16 gb", "memory", "unknown unit 'gb'"),
        ("100 Gb/s", "bandwidth", "Gbit/s"),
        ("GB", "memory", "no memory"),
        ("-1 GB", "memory", "no memory"),
        ("inf GB", "memory", "no memory"),
        ("1e999 GB", "memory", "too large"),
        ("0 GB", "memory", "must be positive"),
        ("9.3 TFLOP/s", "bandwidth", "unknown unit 'TFLOP/s'"),
        ("1" * 10_000, "memory", "no memory"),
    ],
)
def test_what_is_no_quantity_is_refused_with_an_example(given: object, quantity: Quantity, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_quantity(given, quantity)
