"""Whatever a cluster file holds, reading it gives a cluster or an ``InputFileError``; and every good file is
understood."""

import math
import tomllib
from contextlib import suppress
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from whale.errors import InputFileError
from whale.ir.cluster import DTYPES, Cluster
from whale.ir.document import Format, parse_document
from whale.planner.catalog import device_types

GOOD = """\
[links]
intra_node = {bandwidth = "300 GB/s", latency = "5 us"}
inter_node = {bandwidth = "100 Gbit/s", latency = "15 us"}
[[nodes]]
count = 2
devices = 8
device = "T4"
[device_types.card]
speed = {float32 = "9.3 TFLOP/s"}
memory = "16 GiB"
memory_bandwidth = "732 GB/s"
"""
GOOD_YAML = yaml.safe_dump(tomllib.loads(GOOD))
KEYS = ["nodes", "links", "count", "devices", "device", "intra_node", "bandwidth", "latency", "speed", "memory"]
VALUES = [
    "T4",
    "card",
    "16 GiB",
    "5 us",
    "1 TFLOP/s",
    "nan",
    ".inf",
    "1e999",
    "-1",
    "9" * 50,
    "!!python/name:os.system",
]
SYNTAX = ["", " ", "\n", "- ", "[", "]", "{", "}", "=", ":", "'", '"', "&a", "*a", "\\", "#", "|", ">", "%", "<<"]
WORDS = st.sampled_from([*KEYS, *VALUES, *SYNTAX, "\x00", "\ud800"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)
FORMATS: Any = st.sampled_from(["toml", "yaml"])


def read(text: str, format: Format) -> None:
    with suppress(InputFileError):
        Cluster.parse(text, format, source="cluster", catalog=device_types())


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS | st.text(max_size=4), max_size=30), FORMATS)
def test_pieces_of_syntax_in_any_order_end_in_our_error(pieces: list[str], format: Format) -> None:
    read("".join(pieces), format)


@settings(max_examples=300, deadline=None)
@given(st.data(), FORMATS)
def test_a_good_file_with_a_few_changes_ends_in_our_error_or_a_cluster(data: st.DataObject, format: Format) -> None:
    text = GOOD if format == "toml" else GOOD_YAML
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 20)))
        text = text[:start] + data.draw(WORDS | st.text(max_size=3)) + text[end:]
    read(text, format)


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_any_tree_of_values_ends_in_our_error(tree: object) -> None:
    read(yaml.dump(tree, allow_unicode=True), "yaml")


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_toml(key)} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(character):08x}" for character in value) + '"'
    return repr(value)


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


@settings(max_examples=300, deadline=None)
@given(TOML_TREES)
def test_all_toml_that_the_standard_library_reads_is_read_the_same(tree: dict[str, object]) -> None:
    text = "\n".join(f"{as_toml(key)} = {as_toml(value)}" for key, value in tree.items())
    if is_finite(tree):
        assert parse_document(text, "toml").value == tomllib.loads(text) == tree
    else:
        read(text, "toml")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from(["T4", "card"])), min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(DTYPES), st.integers(1, 10**6), min_size=1),
    st.integers(1, 10**6),
)
def test_a_good_file_is_understood(entries: list[tuple[int, int, str]], speed: dict[str, int], memory: int) -> None:
    text = "".join(f'[[nodes]]\ncount = {n}\ndevices = {k}\ndevice = "{type_}"\n' for n, k, type_ in entries)
    rates = ", ".join(f'{dtype} = "{rate} GFLOP/s"' for dtype, rate in speed.items())
    text += GOOD.split("[[nodes]]")[0]
    text += f'[device_types.card]\nspeed = {{{rates}}}\nmemory = "{memory} MiB"\nmemory_bandwidth = "1 GB/s"\n'
    cluster = Cluster.parse(text, catalog=device_types())
    assert [device.type.name for device in cluster.devices] == [t for n, k, t in entries for _ in range(n * k)]
    for device in cluster.devices:
        if device.type.name == "card":
            assert device.memory_bytes == memory * 2**20
            assert all(device.speed(dtype) == rate * 1e9 for dtype, rate in speed.items())
