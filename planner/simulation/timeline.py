"""Timeline of a simulated step: the events of every rank, the breakdown of each rank's time, and the critical path.

Data and views of it only: `whale.planner.simulation.simulate` makes it; the trace, the Gantt chart and the reports
read it. It knows no prices and no programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

__all__ = ["PARTS", "Event", "EventKind", "Part", "Timeline", "busiest"]

EventKind = Literal["F", "B", "I", "W", "send", "receive", "reduce", "update", "overhead", "idle"]
Part = Literal["compute", "communication", "pipeline", "transfer", "stall", "reduction", "update", "overhead"]

PARTS: tuple[Part, ...] = (
    "compute",
    "communication",
    "pipeline",
    "transfer",
    "stall",
    "reduction",
    "update",
    "overhead",
)
"""Parts of a breakdown, as in `whale.ir.workload.Prediction`."""


class Event(NamedTuple):
    """Something that a rank does from ``start`` to ``end``, in seconds from the start of the step.

    Attributes:
        kind: a task (F, B, I, W), a ``send`` and its ``receive`` (each from when the message starts to move until it
            has arrived), the ``reduce`` of a bucket, the ``update`` of parameters, the ``overhead``, or ``idle``.
        rank: whose it is.
        start, end: seconds.
        stage, micro_batch: of a task, or of the task that made what a message carries; -1 where there is none.
        peer: the rank at the other end of a message; for ``idle`` the rank that is waited for; -1 where there is none.
        bucket: of a ``reduce``; -1 elsewhere.
        reason: of ``idle``: what part of the breakdown it is.
        after: position in `Timeline.events` of what let this event start when it did; -1 for the start of the step.
    """

    kind: EventKind
    rank: int
    start: float
    end: float
    stage: int = -1
    micro_batch: int = -1
    peer: int = -1
    bucket: int = -1
    reason: Part | Literal[""] = ""
    after: int = -1

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start

    def __str__(self) -> str:
        match self.kind:
            case "F" | "B" | "I" | "W":
                return f"{self.stage}{self.kind}{self.micro_batch}"
            case "send":
                return f"send {self.stage}m{self.micro_batch} to {self.peer}"
            case "receive":
                return f"receive {self.stage}m{self.micro_batch} from {self.peer}"
            case "reduce":
                return f"reduce bucket {self.bucket}"
            case "idle":
                return f"idle ({self.reason})"
        return self.kind


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step.

    Attributes:
        events: of all ranks, in the order of the simulation; an event refers to others by their position here.
        step_seconds: from the first event to the end of the last.
        last_rank: the rank that ends last; the lowest of several.
        breakdowns: seconds by part for every rank; the parts of a rank sum to ``step_seconds``. A rank that ends before
            the last one waits for other stages (``pipeline``) until then.
        memory: for every rank, (seconds, bytes) at every change of the bytes of activations, including the buffers of
            the running task.
        in_flight: for every stage, the most micro-batches in flight.
        members: the ranks that a folded rank represents, including itself; empty if no ranks are folded.
    """

    events: tuple[Event, ...] = field(repr=False)
    step_seconds: float
    last_rank: int
    breakdowns: Mapping[int, Mapping[Part, float]] = field(repr=False)
    memory: Mapping[int, tuple[tuple[float, int], ...]] = field(repr=False)
    in_flight: Mapping[int, int]
    members: Mapping[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return tuple(self.breakdowns)

    @property
    def breakdown(self) -> Mapping[Part, float]:
        """The breakdown of the rank that ends last."""
        return self.breakdowns[self.last_rank]

    @cached_property
    def busiest_rank(self) -> int:
        """The rank whose breakdown is shown of the step; see `busiest`."""
        return busiest({rank: own["compute"] + own["communication"] for rank, own in self.breakdowns.items()})

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time in which they wait for other stages or for their messages."""
        if not self.step_seconds:
            return 0.0
        counts = {rank: len(self.members.get(rank, (rank,))) for rank in self.breakdowns}
        waits = sum(counts[rank] * (own["pipeline"] + own["transfer"]) for rank, own in self.breakdowns.items())
        return waits / (sum(counts.values()) * self.step_seconds)

    @property
    def span_seconds(self) -> float:
        """The longest time that a rank takes from its first event to its last.

        That is what a step takes in a loop of steps of which a rank begins the next one when it has ended its own
        part, before others have: less than ``step_seconds`` for schedules that end as skewed as they begin.
        """
        starts: dict[int, float] = {}
        ends: dict[int, float] = {}
        for event in self.events:
            if event.kind not in ("send", "receive", "idle"):
                starts[event.rank] = min(event.start, starts.get(event.rank, event.start))
                ends[event.rank] = max(event.end, ends.get(event.rank, event.end))
        return max((ends[rank] - starts[rank] for rank in starts), default=0.0)

    def of_rank(self, rank: int) -> tuple[Event, ...]:
        """The events of one rank, by their start."""
        return self._by_rank.get(rank, ())

    @cached_property
    def _by_rank(self) -> Mapping[int, tuple[Event, ...]]:
        found: dict[int, list[Event]] = {rank: [] for rank in self.ranks}
        for event in self.events:
            found[event.rank].append(event)
        return {rank: tuple(sorted(own, key=lambda event: event[2:4])) for rank, own in found.items()}

    def peak_bytes(self, rank: int) -> int:
        """The most bytes of activations and of what tasks need beside them."""
        return max((held for _, held in self.memory[self.stand_in(rank)]), default=0)

    def stand_in(self, rank: int) -> int:
        """The rank that stands for *rank*; itself where none does."""
        return self._stand_ins.get(rank, rank)

    @cached_property
    def _stand_ins(self) -> Mapping[int, int]:
        return {rank: one for one, members in self.members.items() for rank in members}

    def critical_path(self) -> tuple[Event, ...]:
        """The chain of events that ends last, first to last: each lets the next one start when it does.

        A rank that waits does so within the path of what it waits for, so no event of it is idle.
        """
        position = max(
            (position for position, event in enumerate(self.events) if event.kind != "idle"),
            key=lambda position: (self.events[position].end, self.events[position].rank == self.last_rank, position),
            default=-1,
        )
        path = []
        while position >= 0:
            path.append(self.events[position])
            position = self.events[position].after
        return tuple(reversed(path))


def busiest(seconds: Mapping[int, float]) -> int:
    """The rank that is at work longest, by its seconds of tasks: the lowest of those that differ by rounding alone.

    >>> busiest({0: 1.0, 1: 3.0, 2: 3.0000000000001})
    1
    """
    most = max(seconds.values())
    return min(rank for rank, own in seconds.items() if own >= most * (1 - 1e-9))
