"""Files as an enemy or a tired user would write them, for each kind of file that Whale reads.

A kind of file is a good example of it in each syntax, words that mean something in it, and the function that reads it.
From these follow texts of four manners: pieces of syntax in any order, a good file with places overwritten, a good
file with values exchanged, and any tree of values. Whatever the text, reading must end in a value or in an
``InputFileError``. Add a kind to ``KINDS``: the laws and ``benchmarks/fuzz_files.py`` take it from there.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from whale.checkpoint.format import Index, Manifest, index_of, manifest_of
from whale.checkpoint.hugging_face import entries_of, weight_map_of
from whale.checkpoint.values import decoded
from whale.commands.rank_traces import parse_trace, summary
from whale.errors import CheckpointError, InputFileError
from whale.ir.cluster import Cluster
from whale.ir.document import Format
from whale.ir.jobs import Jobs
from whale.ir.plan import Plan
from whale.ir.profile import ModelProfile
from whale.ir.search_record import SearchRecord
from whale.planner.catalog import device_types

__all__ = ["KINDS", "MANNERS", "FileKind", "Text", "as_toml", "read"]

Text = tuple[str, Format]


@dataclass(frozen=True)
class FileKind:
    """A file format: its syntaxes, and a valid example with all keys."""

    name: str
    formats: tuple[Format, ...]
    good: Mapping[str, Any]
    words: tuple[str, ...]
    parse: Callable[[str, Format], object]

    def __str__(self) -> str:
        return self.name


def as_toml(value: object) -> str:
    """A value as inline TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_toml(str(key))} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(character):08x}" for character in value) + '"'
    return "''" if value is None else repr(value)


def written(value: object, format: Format) -> str:
    """A tree of values in a syntax; TOML and JSON take what they cannot hold as something near."""
    if format == "yaml":
        return yaml.dump(value, allow_unicode=True, sort_keys=False)
    if format == "json":
        return json.dumps(value, indent=2, skipkeys=True)
    return "\n".join(f"{as_toml(str(key))} = {as_toml(inner)}" for key, inner in as_table(value).items())


def as_table(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {"value": value}


def read(kind: FileKind, text: str, format: Format) -> None:
    """Read a text; an ``InputFileError`` is an answer, anything else that is raised is a fault."""
    with suppress(InputFileError):
        kind.parse(text, format)


GOOD_CLUSTER = """\
format_version = 1
[links]
intra_node = {bandwidth = "300 GB/s", latency = "5 us"}
inter_node = {bandwidth = "100 Gbit/s", latency = "15 us", adapters = 2, network = "tcp"}
[[nodes]]
count = 2
devices = 8
device = "T4"
name = "left"
[[nodes]]
devices = 1
device = "card"
[nodes.links]
inter_node = {bandwidth = "1 GB/s", latency = "1 ms"}
[device_types.card]
speed = {float32 = "9.3 TFLOP/s", float16 = "18.7 TFLOP/s"}
memory = "16 GiB"
memory_bandwidth = "732 GB/s"
"""
GOOD_PLAN = """{
  "version": 1, "world_size": 8, "batch": 16, "micro_batches": 2, "schedule": "1f1b",
  "annotations": {"h.[0-5]": "stage()", "h.6": ["stage(4)", "split()"]},
  "stages": [
    {"ranks": ["0-3"], "axes": [{"name": "replicate", "size": 4, "role": "replicate", "shares": [3, 3, 1, 1]}]},
    {"ranks": ["4-7"], "axes": [{"name": "split", "size": 4, "role": "split", "shares": [1.5, 1, 1, 1]}]}
  ]
}"""
GOOD_JOBS = """\
format_version = 1
restart_seconds = 30.5
[[jobs]]
name = "pretrain"
model = "models/gpt.py:gpt"
set = {layers = 4, dropout = 0.1, causal = true, attention = "sdpa"}
batch = [32, 128]
rows = 4_000_000
noise_scale = 256.0
precision = "bf16"
optimizer = "sgd"
devices = {T4 = 2}
[[jobs]]
name = "probe"
profile = "probe.json"
batch = 32
rows = 100
weight = 4.0
max_devices = 1
"""
GOOD_PROFILE = """{
  "format_version": 1, "name": "model", "layers": [0, 0], "paths": ["h.0", "h.1"], "precision": "float32",
  "kinds": [{
    "name": "h.0", "output": {"elements": [0, 64]}, "parameters": 4096,
    "variants": [{
      "tensor_degree": 1, "parameters": 4096,
      "forward": [{"name": "aten.mm", "kind": "matmul", "flops": [0, 128], "read": {"elements": [64, 8]}}],
      "forward_communications": [{"kind": "all_reduce", "size": {"elements": [0, 64], "bytes": [0, 1]}}],
      "saved": [{"origin": "mm", "size": {"elements": [0, 64]}}]
    }],
    "measured": [{"device_type": "T4", "tensor_degree": 1, "rows": [1, 2], "forward": [1, 2], "backward": [2, 3],
                  "update": [0, 0]}]
  }],
  "device_types": {"T4": {"memory_bytes": 17179869184}},
  "links": [{"source": "T4", "target": "T4", "devices": 2, "within": "node", "sizes": [1, 2], "bandwidths": [1, 2]}],
  "tied": [[[0, 1], 64]]
}"""
GOOD_SEARCH_RECORD = """{
  "version": 1, "plan": "sha256:0", "bound_seconds": 0.5, "tried": 10, "seconds": 0.1,
  "candidates": [{
    "label": "T4 x8", "seconds": 0.6, "memory": 0.9, "bubble": 0.1, "mfu": 0.4,
    "micro_batches": 8, "schedule": "1f1b", "why": ""
  }],
  "points": [{"seconds": 0.7, "memory": 1.5, "label": "tensor 8", "reason": "needs 61 GiB"}],
  "dropped": [{"family": "tensor 8", "reason": "needs 61 GiB", "count": 3}]
}"""

GOOD_TRACE = {
    "deviceProperties": [{"id": 0, "name": "T4"}],
    "distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 2},
    "host_name": "one",
    "baseTimeNanoseconds": 1_790_857_026_000_000_000,
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "ts": 1.5, "pid": 7, "tid": 9, "args": {"name": "python"}},
        {"ph": "X", "cat": "user_annotation", "name": "whale: train step", "ts": 2.5, "dur": 9.0, "pid": 7, "tid": 9},
        {"ph": "X", "name": "whale: all-reduce loss", "ts": 4.5, "dur": 1.0, "pid": 7, "tid": 9, "args": {"op": [1]}},
        {"ph": "X", "name": "whale: wait for all-reduce loss", "ts": 6, "dur": 1.0, "pid": 7, "tid": 9},
        {"ph": "X", "cat": "kernel", "name": "sum", "ts": 6, "dur": 1.0, "pid": 0, "tid": 7, "args": {"device": 0}},
        {"ph": "s", "id": 3, "name": "fwdbwd", "ts": 4.5, "pid": 7, "tid": 9},
    ],
}

GOOD_MANIFEST: dict[str, Any] = {
    "format": "whale-checkpoint",
    "version": 1,
    "sha256": "",
    "content": {
        "step": 2,
        "indexes": ["0" * 64],
        "names": {"model": {"head.weight": "embed.weight", "embed.weight": "embed.weight"}},
        "optimizers": {"optimizer": "AdamW"},
        "objects": {"scheduler": {"milestones": {"$counter": [[1, 1]]}, "best": {"$float": "inf"}}},
        "loss_scaler": {"scale": 65536.0},
        "versions": {"torch": "2.13"},
    },
}
GOOD_INDEX: dict[str, Any] = {
    "bytes": 200,
    "parts": [
        {"of": "model", "name": "embed.weight", "dtype": "F32", "shape": [4, 6], "at": "0-2;0-3,5-6", "offset": 64,
         "rows": 1, "sha256": "01" * 64},
        {"of": "optimizer", "state": "step", "name": "embed.weight", "dtype": "F32", "shape": [], "at": "",
         "offset": 96, "rows": 1, "sha256": "23" * 32},
    ],
    "groups": {"optimizer": [{"names": ["embed.weight"], "options": {"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}}}]},
    "values": {"optimizer": {"embed.weight": {"momentum": None, "odd": {"$dict": [[1, {"$bytes": "AA=="}]]}}}},
}  # fmt: skip


def signed(text: str) -> bytes:
    """A manifest with the digest of its content, as an enemy gives it, if there is any content."""
    with suppress(LookupError, ValueError, TypeError, RecursionError):
        outer = json.loads(text)
        content = json.dumps(outer["content"], sort_keys=True, separators=(",", ":"), allow_nan=False)
        text = json.dumps(outer | {"sha256": hashlib.sha256(content.encode()).hexdigest()})
    return text.encode("utf-8", "replace")


def checkpoint_of(parse: Callable[[bytes], Manifest | Index], content: bytes) -> object:
    """A manifest or an index, and the values in it."""
    try:
        found = parse(content)
        if isinstance(found, Manifest):
            return found, decoded(found.objects, lambda number: number)
        options = [decoded(group.options, lambda number: number) for own in found.groups.values() for group in own]
        return found, options, [decoded(value, lambda number: number) for value in found.values.values()]
    except CheckpointError as error:
        raise InputFileError(str(error)) from error


GOOD_HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "head.weight": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]},
    "head.bias": {"dtype": "BF16", "shape": [4], "data_offsets": [96, 104]},
    "scale": {"dtype": "F64", "shape": [], "data_offsets": [104, 112]},
}
GOOD_WEIGHT_MAP: dict[str, Any] = {
    "metadata": {"total_size": 112},
    "weight_map": {"head.weight": "model-00001-of-00002.safetensors", "scale": "model-00002-of-00002.safetensors"},
}


def weights_of(parse: Callable[[bytes], object], text: str) -> object:
    """The content of a header or an index of weights."""
    try:
        return parse(text.encode("utf-8", "replace"))
    except CheckpointError as error:
        raise InputFileError(str(error)) from error


KINDS = (
    FileKind(
        name="cluster",
        formats=("toml", "yaml"),
        good=tomllib.loads(GOOD_CLUSTER),
        words=("T4", "card", "16 GiB", "5 us", "1 TFLOP/s", "100 Gbit/s", "tcp", "float16"),
        parse=lambda text, format: Cluster.parse(text, format, source="cluster", catalog=device_types()),
    ),
    FileKind(
        name="jobs",
        formats=("toml", "yaml", "json"),
        good=tomllib.loads(GOOD_JOBS),
        words=("T4", "hf:gpt2", "../../secret.py:main", "/etc/passwd", "bf16", "sgd", "a b"),
        parse=lambda text, format: Jobs.parse(text, format=format, source="jobs"),
    ),
    FileKind(
        name="plan",
        formats=("json",),
        good=json.loads(GOOD_PLAN),
        words=("0-3", "4-", "stage()", "split(4)", "replicate", "1f1b", "gpipe"),
        parse=lambda text, format: Plan.parse(text, source="plan"),
    ),
    FileKind(
        name="profile",
        formats=("json",),
        good=json.loads(GOOD_PROFILE),
        words=("matmul", "send", "node", "T4", "all_reduce", "tensor"),
        parse=lambda text, format: ModelProfile.parse(text, source="profile"),
    ),
    FileKind(
        name="search record",
        formats=("json",),
        good=json.loads(GOOD_SEARCH_RECORD),
        words=("1f1b", "sha256:", "tensor 8"),
        parse=lambda text, format: SearchRecord.parse(text, source="search"),
    ),
    FileKind(
        name="trace",
        formats=("json",),
        good=GOOD_TRACE,
        words=("whale: train step", "whale: all-reduce loss", "kernel", "gpu_user_annotation", "nccl", "M", "X"),
        parse=lambda text, format: summary(parse_trace(text, Path("rank0.json")), alone=True),
    ),
    FileKind(
        name="checkpoint manifest",
        formats=("json",),
        good=GOOD_MANIFEST,
        words=("$tensor", "$dict", "$tuple", "$bytes", "$float", "whale-checkpoint", "../..", "0" * 64),
        parse=lambda text, format: checkpoint_of(lambda c: manifest_of(c, Path("manifest.json")), signed(text)),
    ),
    FileKind(
        name="checkpoint index",
        formats=("json",),
        good=GOOD_INDEX,
        words=("$tensor", "$dict", "$tuple", "0-4", "0-2,1-3", ";", "F64", "BOOL", "0" * 64),
        parse=lambda text, format: checkpoint_of(
            lambda c: index_of(c, Path("rank-00000.json")), text.encode("utf-8", "replace")
        ),
    ),
    FileKind(
        name="weights header",
        formats=("json",),
        good=GOOD_HEADER,
        words=("__metadata__", "F64", "BOOL", "I4", "dtype", "data_offsets"),
        parse=lambda text, format: weights_of(lambda c: entries_of(c, 112, Path("model.safetensors")), text),
    ),
    FileKind(
        name="weights index",
        formats=("json",),
        good=GOOD_WEIGHT_MAP,
        words=("../../secret.safetensors", "/etc/passwd", "a.safetensors", ".safetensors", "weight_map"),
        parse=lambda text, format: weights_of(lambda c: weight_map_of(c, Path("model.safetensors.index.json")), text),
    ),
)

SYNTAX = [
    "",
    " ",
    "\n",
    "- ",
    "[",
    "]",
    "{",
    "}",
    "=",
    ":",
    "'",
    '"',
    "&a",
    "*a",
    "\\",
    "#",
    "|",
    ">",
    "%",
    "<<",
    ",",
    "//",
]
ODD = [
    "nan",
    "NaN",
    ".inf",
    "1e999",
    "-1",
    "0",
    "9" * 50,
    "1_000",
    "0x10",
    "!!python/name:os.system",
    "\x00",
    "\ud800",
    "é",
]
ODD_VALUES: Any = st.sampled_from(
    [None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, "", [], {}, "x" * 300]
)


def keys_of(value: object) -> list[str]:
    """Every key in a tree."""
    if isinstance(value, dict):
        return [str(key) for key in value] + [key for inner in value.values() for key in keys_of(inner)]
    return [key for inner in value for key in keys_of(inner)] if isinstance(value, list) else []


def words_of(kind: FileKind) -> st.SearchStrategy[str]:
    return st.sampled_from(sorted({*keys_of(kind.good), *kind.words, *SYNTAX, *ODD}))


def trees_of(kind: FileKind) -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | words_of(kind)
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(words_of(kind) | st.text(max_size=5), inner, max_size=5)
        ),
        max_leaves=10,
    )


@st.composite
def pieces(draw: st.DrawFn, kind: FileKind) -> Text:
    """Pieces of syntax in any order."""
    parts = draw(st.lists(words_of(kind) | st.text(max_size=4), max_size=30))
    return "".join(parts), draw(st.sampled_from(kind.formats))


@st.composite
def overwritten(draw: st.DrawFn, kind: FileKind) -> Text:
    """A good file with a few places overwritten."""
    format = draw(st.sampled_from(kind.formats))
    text = written(kind.good, format)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 20)))
        text = text[:start] + draw(words_of(kind) | st.text(max_size=3)) + text[end:]
    return text, format


@st.composite
def exchanged(draw: st.DrawFn, kind: FileKind) -> Text:
    """A good file in which values are replaced, removed, repeated or put under another key."""
    value: Any = copy.deepcopy(dict(kind.good))
    for _ in range(draw(st.integers(1, 3))):
        holder = value
        while True:
            places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not places:
                break
            place = draw(st.sampled_from(places))
            inner = holder[place]
            if isinstance(inner, dict | list) and inner and draw(st.integers(0, 3)):
                holder = inner
                continue
            match draw(st.sampled_from(["replace", "replace", "tree", "remove", "repeat"])):
                case "replace":
                    holder[place] = draw(ODD_VALUES | words_of(kind) | st.floats() | st.integers())
                case "tree":
                    holder[place] = draw(trees_of(kind))
                case "remove":
                    del holder[place]
                case "repeat" if isinstance(holder, list):
                    holder.insert(place, copy.deepcopy(inner))
                case _:
                    holder[draw(words_of(kind)) if isinstance(holder, dict) else place] = copy.deepcopy(inner)
            break
    format = draw(st.sampled_from(kind.formats))
    return written(value, format), format


@st.composite
def any_tree(draw: st.DrawFn, kind: FileKind) -> Text:
    """Any tree of values."""
    format = draw(st.sampled_from(kind.formats))
    return written(draw(trees_of(kind)), format), format


MANNERS: Mapping[str, Callable[[FileKind], st.SearchStrategy[Text]]] = {
    "pieces": pieces,
    "overwritten": overwritten,
    "exchanged": exchanged,
    "any_tree": any_tree,
}
