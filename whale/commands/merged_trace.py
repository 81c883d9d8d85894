"""One trace for Perfetto of the traces of ranks, with their clocks aligned, and the predicted step beside them.

Clocks of hosts differ. No rank has a sum over all ranks (of the loss, of what is compared of a batch) before every rank
began it, so each limits how far the clock of a rank can be from that of the first rank, on both sides. A clock within
these limits is left as it is; another is moved to their middle. This module knows traces and timelines; it writes text,
not files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whale.commands.rank_traces import RankTrace, nanoseconds, read_trace
from whale.errors import InputFileError, PlanMismatchError, UsageError
from whale.ir.range_names import PREFIX
from whale.planner.simulation.timeline import Timeline
from whale.planner.simulation.trace import trace_of

__all__ = ["Clock", "align", "check_ranks", "merged"]

_NAMES_OF_THREADS = ("thread_name", "thread_sort_index")
_IDS = ("id", "bind_id")
_encode = json.JSONEncoder(allow_nan=False).encode


@dataclass(frozen=True, kw_only=True)
class Clock:
    """By how much the times of a rank are moved, in nanoseconds.

    Attributes:
        shift: what is added.
        leeway: by how much it may be wrong, by the sums alone; negative if they contradict each other, as when a clock
            is corrected meanwhile.
        num_sums: over all ranks, by which it is limited; 0 if there are none, so that nothing is known.
    """

    shift: int
    leeway: float
    num_sums: int


def align(traces: Sequence[RankTrace]) -> dict[int, Clock]:
    """The clock of every rank, to be that of the first one.

    Raises:
        UsageError: traces have other numbers of sums: they are not of the same steps.
    """
    first = traces[0]
    return {trace.rank: _clock(trace, first) for trace in traces}


def _clock(trace: RankTrace, first: RankTrace) -> Clock:
    pairs: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for name, sums in trace.sums.items():
        others = first.sums[name]
        if sums and others and len(sums) != len(others):
            raise UsageError(
                f"{first.path} has {len(others)} times '{PREFIX}{name}', and {trace.path} has it {len(sums)} times; "
                "profile the same steps on every rank"
            )
        pairs += zip(sums, others, strict=False)
    if not pairs:
        return Clock(shift=0, leeway=0.0, num_sums=0)
    least = max(their_start - end for (_, end), (their_start, _) in pairs)
    most = min(their_end - start for (start, _), (_, their_end) in pairs)
    shift = 0 if least <= 0 <= most else (least + most) // 2
    return Clock(shift=shift, leeway=(most - least) / 2, num_sums=len(pairs))


def check_ranks(traces: Sequence[RankTrace], timeline: Timeline) -> None:
    """Refuse a plan of another world than the traces'.

    Raises:
        PlanMismatchError: it has another number of ranks, or lacks one.
    """
    planned = len(timeline.ranks)
    size = max(trace.world_size for trace in traces)
    if size not in (0, planned):
        raise PlanMismatchError(f"the plan is of {planned} ranks, but the traces are of {size}; give the plan that ran")
    strange = [trace.rank for trace in traces if trace.rank not in timeline.ranks]
    if strange:
        raise PlanMismatchError(f"the plan has no rank {strange[0]}, of which there is a trace; give the plan that ran")


def merged(traces: Sequence[RankTrace], clocks: Mapping[int, Clock], timeline: Timeline | None) -> Iterator[str]:
    """The trace as pieces of JSON: a process for each rank, and one for each prediction, below it.

    The predicted step begins where the last training step begins. Traces are read again, one after the other.
    """
    origin = min(trace.first + clocks[trace.rank].shift for trace in traces)
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    before = ""
    for trace in traces:
        for event in _measured(trace, clocks[trace.rank].shift - origin):
            try:
                yield before + _encode(event)
            except ValueError as error:
                raise InputFileError("holds a number that is not finite", path=str(trace.path)) from error
            before = ",\n"
    if timeline is not None:
        begins = [trace.steps[-1] + clocks[trace.rank].shift for trace in traces if trace.steps]
        start = (min(begins) - origin) / 1000 if begins else 0.0
        for event in _predicted(timeline, {trace.rank for trace in traces}, start):
            yield before + _encode(event)
    yield "\n]}\n"


def _measured(trace: RankTrace, shift: int) -> Iterator[dict[str, Any]]:
    """The events of a rank as those of one process, in which the streams of its devices are threads, too."""
    process = 2 * trace.rank + 1
    stages = f"stage {' '.join(map(str, trace.stages))}, " if trace.stages else ""
    yield from _process(process, f"rank {trace.rank} ({stages}{trace.place})")
    threads: dict[tuple[int, int], int] = {}
    file = read_trace(trace.path)
    for event in file.events:
        names_thread = event["ph"] == "M"
        if names_thread and event["name"] not in _NAMES_OF_THREADS:
            continue
        thread = threads.setdefault((event["pid"], event["tid"]), len(threads) + 1)
        moved = {**event, "pid": process, "tid": thread, "ts": (file.base + nanoseconds(event["ts"]) + shift) / 1000}
        if names_thread:
            del moved["ts"]
        for key in _IDS:
            if key in moved:
                moved[key] = f"{trace.rank}.{moved[key]}"
        yield moved


def _predicted(timeline: Timeline, ranks: set[int], start: float) -> Iterator[dict[str, Any]]:
    for rank in sorted(ranks):
        yield from _process(2 * rank + 2, f"predicted rank {rank}")
    for event in trace_of(timeline)["traceEvents"]:
        if event["pid"] not in ranks or event["name"] == "process_name":
            continue
        moved = {**event, "pid": 2 * event["pid"] + 2}
        if "ts" in moved:
            moved["ts"] = round(start + moved["ts"], 3)
        if "id" in moved:
            moved["id"] = f"predicted {moved['id']}"
        yield moved


def _process(number: int, name: str) -> Iterator[dict[str, Any]]:
    for kind, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": number})):
        yield {"name": kind, "ph": "M", "pid": number, "tid": 0, "args": value}
