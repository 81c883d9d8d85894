"""A timeline as a trace for ui.perfetto.dev and chrome://tracing: one process per rank, one thread per stream.

The format is JSON of Chrome's "Trace Event Format", with times in microseconds to the nanosecond. Concurrent messages
of a rank are on separate threads, so events of a thread never overlap. This module knows no prices and no terminal.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Any

from whale.planner.simulation.timeline import Event, Timeline

__all__ = ["trace_of"]

_STREAMS = ("compute", "send", "receive", "reduce")
_LANES = 1000  # thread numbers for each stream


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as a value that JSON can hold.

    Tasks are named like ``2F0`` (stage, kind, micro-batch) and waits by their reason; arrows connect a send with its
    receive; the counter ``activations`` has the bytes of a rank's saved activations.
    """
    events: list[dict[str, Any]] = []
    messages: Counter[str] = Counter()  # ends of equal messages, in order
    for rank in timeline.ranks:
        own = timeline.of_rank(rank)
        events.append(_metadata("process_name", rank, 0, f"rank {rank}"))
        threads: dict[int, str] = {}
        for thread, event in _threads(own):
            lane = thread % _LANES
            stream = _STREAMS[thread // _LANES]
            threads[thread] = f"{stream} {lane + 1}" if lane else stream
            events.append(_slice(event, rank, thread))
            if event.kind in ("send", "receive"):
                events.append(_flow(event, rank, thread, messages))
        events += [_metadata("thread_name", rank, thread, name) for thread, name in sorted(threads.items())]
        for seconds, held in timeline.memory[rank]:
            counter = {"name": "activations", "ph": "C", "pid": rank, "ts": _microseconds(seconds)}
            events.append(counter | {"args": {"bytes": held}})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _threads(events: tuple[Event, ...]) -> Iterator[tuple[int, Event]]:
    """Assign each event to the first free thread of its stream."""
    ends: dict[int, list[tuple[float, int]]] = {stream: [] for stream in range(len(_STREAMS))}
    free: dict[int, list[int]] = {stream: [] for stream in ends}
    used = dict.fromkeys(ends, 0)
    for event in events:
        stream = _STREAMS.index(event.kind) if event.kind in _STREAMS else 0
        while ends[stream] and ends[stream][0][0] <= event.start:
            heapq.heappush(free[stream], heapq.heappop(ends[stream])[1])
        if free[stream]:
            lane = heapq.heappop(free[stream])
        else:
            lane = used[stream]
            used[stream] += 1
        heapq.heappush(ends[stream], (event.end, lane))
        yield stream * _LANES + lane, event


def _slice(event: Event, rank: int, thread: int) -> dict[str, Any]:
    start, end = _microseconds(event.start), _microseconds(event.end)
    arguments: dict[str, Any] = {}
    if event.stage >= 0:
        arguments = {"stage": event.stage, "micro_batch": event.micro_batch}
    if event.peer >= 0:
        arguments["waits_for" if event.kind == "idle" else "peer"] = event.peer
    name = f"wait: {event.reason}" if event.kind == "idle" else str(event)
    found = {"name": name, "cat": event.kind, "ph": "X", "pid": rank, "tid": thread, "ts": start}
    return {**found, "dur": round(end - start, 3), "args": arguments}


def _flow(event: Event, rank: int, thread: int, messages: Counter[str]) -> dict[str, Any]:
    """Return one end of a message's arrow; both ends have the same name, because messages between two ranks stay in
    order."""
    source, target = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
    key = f"{event.stage}m{event.micro_batch} {source}-{target}"
    messages[event.kind + key] += 1
    key += f" {messages[event.kind + key]}"
    found = {"name": "message", "cat": "message", "id": key, "pid": rank, "tid": thread}
    if event.kind == "send":
        return {**found, "ph": "s", "ts": _microseconds(event.start)}
    return {**found, "ph": "f", "bp": "e", "ts": _microseconds(event.end)}


def _metadata(name: str, rank: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": {"name": text}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
