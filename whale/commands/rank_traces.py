"""Traces that ``torch.profiler`` exported on the ranks of a run: strict reading, and a summary of each.

Files are untrusted: what is no such trace, or too large, ends in an ``InputFileError``. A trace may be hundreds of
megabytes, so only a summary of it is kept. This module knows ranges by their names, no plans and no merging.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale.errors import InputFileError
from whale.ir.range_names import COMPARISON_SUM, FORWARD, LOSS_SUM, PREFIX, TRAIN_STEP, WAIT

__all__ = [
    "MAX_TRACE_BYTES",
    "RankTrace",
    "TraceFile",
    "nanoseconds",
    "parse_trace",
    "read_ranks",
    "read_trace",
    "summary",
]

MAX_TRACE_BYTES = 512 * 2**20
"""Largest trace, uncompressed. Its values take about eight times as much memory, for one trace at a time."""

_MAX_DEPTH = 16
_LATEST = 1e16  # microseconds: three centuries
_GPU_RANGE = "gpu_user_annotation"
_FORWARD = re.compile(re.escape(PREFIX) + FORWARD.replace("%d", "([0-9]{1,6})"))
_RANK_IN_NAME = re.compile(r"rank[-_ ]?([0-9]{1,6})(?![0-9])")

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """The content of a trace: its *events*, without the profiler's own, and *about*, the keys beside them."""

    path: Path
    events: Sequence[Event]
    about: Mapping[str, Any]

    @property
    def base(self) -> int:
        """The time, in nanoseconds of the host's clock, that the times of the events are relative to."""
        base = self.about.get("baseTimeNanoseconds", 0)
        return base if isinstance(base, int) and 0 <= base < 2**63 else 0

    def start(self, event: Event) -> int:
        """Start of an event in nanoseconds of the host's clock."""
        return self.base + nanoseconds(event["ts"])


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """Summary of the trace of a rank; times in nanoseconds of its host's clock.

    Attributes:
        path: of the file.
        rank, world_size: as the process group had them; 0 if the world's size is not in the trace.
        place: device and host, in words.
        stages: that the rank computed.
        first: the start of the first event.
        steps: starts of training steps, ascending.
        sums: over all ranks, by name: when the rank began each and when it had it, ascending.
    """

    path: Path
    rank: int
    world_size: int
    place: str
    stages: tuple[int, ...]
    first: int
    steps: tuple[int, ...]
    sums: Mapping[str, tuple[tuple[int, int], ...]]


def nanoseconds(microseconds: float) -> int:
    """A time or duration of a trace in nanoseconds, which is its resolution."""
    return round(microseconds * 1000)


def read_ranks(paths: Sequence[Path]) -> list[RankTrace]:
    """Summaries of traces, by rank.

    Raises:
        InputFileError: a file is no trace of a rank, or two are of one rank or of worlds of different sizes.
    """
    found: dict[int, RankTrace] = {}
    for path in paths:
        trace = summary(read_trace(path), alone=len(paths) == 1)
        if trace.rank in found:
            raise InputFileError(f"is of rank {trace.rank}, as {found[trace.rank].path} is", path=str(path))
        found[trace.rank] = trace
    sizes = {trace.world_size: trace for trace in found.values() if trace.world_size}
    if len(sizes) > 1:
        one, other = list(sizes.values())[:2]
        raise InputFileError(
            f"is of {other.world_size} ranks, but {one.path} is of {one.world_size}; give traces of one run",
            path=str(other.path),
        )
    return [found[rank] for rank in sorted(found)]


def summary(file: TraceFile, *, alone: bool) -> RankTrace:
    """Summary of a trace; its rank is 0 if it is *alone* and names none."""
    begins = [file.start(event) for event in file.events if event["ph"] != "M"]
    if not begins:
        raise InputFileError("has no events; export the profile after its with block", path=str(file.path))
    rank, size = _rank(file, alone)
    ranges = [event for event in file.events if event["ph"] == "X" and event["name"].startswith(PREFIX)]
    on_host = [event for event in ranges if event.get("cat") != _GPU_RANGE]
    forwards = [found for event in on_host if (found := _FORWARD.fullmatch(event["name"]))]
    return RankTrace(
        path=file.path,
        rank=rank,
        world_size=size,
        place=_place(file),
        stages=tuple(sorted({int(found[1]) for found in forwards})),
        first=min(begins),
        steps=tuple(sorted(file.start(event) for event in on_host if event["name"] == PREFIX + TRAIN_STEP)),
        sums={name: _sums(file, ranges, name) for name in (COMPARISON_SUM, LOSS_SUM)},
    )


def _sums(file: TraceFile, ranges: Sequence[Event], name: str) -> tuple[tuple[int, int], ...]:
    """When each sum of a name began, and when it was there: on a GPU by its kernel, as the process does not wait."""
    begun = sorted((e for e in ranges if e["name"] == PREFIX + name), key=file.start)
    kernels = [event for event in begun if event.get("cat") == _GPU_RANGE]
    if kernels:
        return tuple((file.start(event), _end(file, event)) for event in kernels)
    distributed = file.about.get("distributedInfo")
    on_gpus = isinstance(distributed, dict) and "nccl" in str(distributed.get("backend"))
    ends = sorted(_end(file, event) for event in ranges if event["name"] == PREFIX + WAIT + name)
    if on_gpus or len(ends) != len(begun):
        return ()
    return tuple(zip(map(file.start, begun), ends, strict=True))


def _end(file: TraceFile, event: Event) -> int:
    return file.start(event) + nanoseconds(event["dur"])


def _rank(file: TraceFile, alone: bool) -> tuple[int, int]:
    """Rank and size of the world; the rank by the file's name if the profiler knew no process group."""
    about = file.about.get("distributedInfo")
    if isinstance(about, dict) and "rank" in about:
        rank, size = about["rank"], about.get("world_size")
        if not (type(rank) is int and type(size) is int and 0 <= rank < size <= 10**6):
            raise InputFileError(f"distributedInfo has rank {rank!r} of {size!r}", path=str(file.path))
        return rank, size
    named = _RANK_IN_NAME.search(file.path.name)
    if named is None and not alone:
        raise InputFileError(
            "does not say of which rank it is, because it was profiled without a process group; name the file "
            "rank0.json if it is of rank 0",
            path=str(file.path),
        )
    return int(named[1]) if named else 0, 0


def _place(file: TraceFile) -> str:
    """The devices that computed, and the host."""
    names = {}
    listed = file.about.get("deviceProperties")
    for device in listed if isinstance(listed, list) else ():
        if isinstance(device, dict) and type(device.get("id")) is int and isinstance(device.get("name"), str):
            names[device["id"]] = device["name"]
    used = {
        event["args"]["device"]
        for event in file.events
        if event.get("cat") == "kernel" and type(event.get("args", {}).get("device")) is int
    }
    devices = [f"{names.get(index, 'GPU')} {index}" for index in sorted(used)] or ["cpu"]
    host = file.about.get("host_name")
    return ", ".join([*devices, *([host] if isinstance(host, str) and host else [])])


# Reading


def read_trace(path: Path) -> TraceFile:
    """Read a trace, plain or compressed by gzip.

    Raises:
        InputFileError: it cannot be read, is too large, or is no trace as ``export_chrome_trace`` writes it.
    """
    return parse_trace(_text(path), path)


def parse_trace(text: str, path: Path) -> TraceFile:
    """Parse the text of a trace; *path* is for errors, and may name the rank."""
    try:
        # torch writes the bandwidth of a copy that took no time as Infinity, which is no JSON.
        value = json.loads(text, parse_constant=lambda constant: None)
    except json.JSONDecodeError as error:
        raise InputFileError(f"not valid JSON: {error.msg}", path=str(path), line=error.lineno) from error
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"not valid JSON: {str(error)[:200]}", path=str(path)) from error
    events = value.get("traceEvents") if isinstance(value, dict) else None
    if not isinstance(events, list):
        raise InputFileError(
            "has no list 'traceEvents': give what torch.profiler's export_chrome_trace wrote", path=str(path)
        )
    for index, event in enumerate(events):
        problem = _problem(event)
        if problem is not None:
            raise InputFileError(f"traceEvents[{index}] {problem}", path=str(path))
    own = [event for event in events if isinstance(event["pid"], int) and isinstance(event["tid"], int)]
    return TraceFile(path=path, events=own, about={key: value[key] for key in value if key != "traceEvents"})


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            data = (gzip.GzipFile(fileobj=file) if compressed else file).read(MAX_TRACE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputFileError(f"is damaged: {error}", path=str(path)) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputFileError(f"cannot be read: {reason}", path=str(path)) from error
    if len(data) > MAX_TRACE_BYTES:
        raise InputFileError(
            f"is larger than {MAX_TRACE_BYTES >> 20} MB; profile fewer steps, without record_shapes and with_stack",
            path=str(path),
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")  # names of operators and threads are any bytes


def _problem(event: object) -> str | None:
    """The error in an event, in words; None if there is none."""
    if not isinstance(event, dict):
        return "is no object"
    phase = event.get("ph")
    if not (isinstance(phase, str) and len(phase) == 1):
        return f"has the phase {_shown(phase)}; 'ph' is a letter"
    if not isinstance(event.get("name", ""), str):
        return f"has the name {_shown(event['name'])}"
    event.setdefault("name", "")
    for key in ("pid", "tid"):
        if not isinstance(event.setdefault(key, 0), int | str):
            return f"has the {key} {_shown(event[key])}; it is a number or a name"
    start: Any = event.setdefault("ts", 0)
    duration: Any = event.get("dur", None if phase == "X" else 0)
    if not (_is_number(start) and abs(start) < _LATEST):
        return f"has the time {_shown(start)}; 'ts' is a number of microseconds"
    if not (_is_number(duration) and 0 <= duration < _LATEST):
        return f"has the duration {_shown(duration)}; 'dur' is a number of microseconds"
    if not isinstance(event.get("args", {}), dict):
        return "has 'args' that are no object"
    if not isinstance(event.get("id", 0), int | str):
        return f"has the id {_shown(event['id'])}"
    if not all(_depth_within(value, _MAX_DEPTH) for value in event.values() if isinstance(value, dict | list)):
        return f"is nested more than {_MAX_DEPTH} levels deep"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return repr(value)[:40]


def _depth_within(value: dict[str, Any] | list[Any], most: int) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return most > 0 and all(_depth_within(item, most - 1) for item in items if isinstance(item, dict | list))
