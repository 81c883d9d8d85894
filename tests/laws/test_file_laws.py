"""Reading any file ends in a value or an ``InputFileError``; every valid cluster file is understood."""

import math
import tomllib
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hostile_files import KINDS, MANNERS, FileKind, as_toml, read, written
from whale.errors import InputFileError
from whale.ir.cluster import DTYPES, Cluster
from whale.ir.document import Format, parse_document
from whale.ir.json_reader import _JsonReader, _plain_json
from whale.planner.catalog import device_types


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_hostile_file_ends_in_our_error_or_is_read(kind: FileKind, manner: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(MANNERS[manner](kind))
    def reading_ends_well(text: tuple[str, Format]) -> None:
        read(kind, *text)

    reading_ends_well()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_good_example_of_each_kind_of_file_is_read_in_every_syntax(kind: FileKind) -> None:
    values = [kind.parse(written(kind.good, format), format) for format in kind.formats]
    assert all(value == values[0] for value in values)


LINKS = """\
[links]
intra_node = {bandwidth = "300 GB/s", latency = "5 us"}
inter_node = {bandwidth = "100 Gbit/s", latency = "15 us"}
"""
TOML_TREES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.recursive(
        st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=5)
        ),
        max_leaves=20,
    ),
    max_size=5,
)


def is_finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


@settings(max_examples=100, deadline=None)
@given(TOML_TREES)
def test_all_toml_that_the_standard_library_reads_is_read_the_same(tree: dict[str, object]) -> None:
    text = "\n".join(f"{as_toml(key)} = {as_toml(value)}" for key, value in tree.items())
    if is_finite(tree):
        assert parse_document(text, "toml").value == tomllib.loads(text) == tree
    else:
        with suppress(InputFileError):
            Cluster.parse(text)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from(["T4", "card"])), min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(DTYPES), st.integers(1, 10**6), min_size=1),
    st.integers(1, 10**6),
)
def test_a_good_file_is_understood(entries: list[tuple[int, int, str]], speed: dict[str, int], memory: int) -> None:
    text = "".join(f'[[nodes]]\ncount = {n}\ndevices = {k}\ndevice = "{type_}"\n' for n, k, type_ in entries)
    rates = ", ".join(f'{dtype} = "{rate} GFLOP/s"' for dtype, rate in speed.items())
    text += LINKS
    text += f'[device_types.card]\nspeed = {{{rates}}}\nmemory = "{memory} MiB"\nmemory_bandwidth = "1 GB/s"\n'
    cluster = Cluster.parse(text, catalog=device_types())
    assert [device.type.name for device in cluster.devices] == [t for n, k, t in entries for _ in range(n * k)]
    for device in cluster.devices:
        if device.type.name == "card":
            assert device.memory_bytes == memory * 2**20
            assert all(device.speed(dtype) == rate * 1e9 for dtype, rate in speed.items())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "json" in kind.formats], ids=lambda kind: kind.name)
@pytest.mark.parametrize("manner", MANNERS)
def test_what_the_standard_library_reads_is_what_the_reader_of_lines_does(kind: FileKind, manner: str) -> None:
    @settings(max_examples=50, deadline=None)
    @given(MANNERS[manner](kind))
    def read_alike(text: tuple[str, Format]) -> None:
        plain = _plain_json(text[0])
        assert plain is None or plain == _JsonReader(text[0], "x").document()

    read_alike()
    good = written(kind.good, "json")
    assert _plain_json(good) == _JsonReader(good, "x").document()


def test_what_might_break_a_limit_is_left_to_the_reader_of_lines() -> None:
    for text in (
        '{"a": "\\ud800"}', '{"a": 1, "a": 1}', '{"a": NaN}', '{"a": [1e999]}', '{"a": ' + "9" * 101 + "}",
        '{"a": ' + "[" * 32 + "{}" + "]" * 32 + "}", '{"a": [' + "0," * 300_000 + "0]}", "[1]", "{} x",
        '{"a": ' + "[" * 100_000 + "}",
    ):  # fmt: skip
        assert _plain_json(text) is None, text[:40]
