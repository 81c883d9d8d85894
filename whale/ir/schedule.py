"""A pipeline schedule as data: the tasks of all stages in one global order.

A task is one kind of work of one stage on one micro-batch. An order lists every task once, each after the tasks that
it needs, so it can be walked from left to right: the program of a rank, the timeline of the simulator and the picture
that a person reads are all projections of the same tuple. This file knows nothing of devices, costs or tensors; it
imports neither torch nor the planner that makes the orders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, cast

from whale.errors import ScheduleError, UsageError

__all__ = ["Kind", "Order", "Task", "check_order", "format_order", "format_stages", "parse_order", "peak_in_flight"]

Kind = Literal["F", "B", "I", "W"]
"""F forward; B whole backward; I backward of the inputs only; W backward of the weights, after its I."""

_TASK = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)


class Task(NamedTuple):
    """One kind of work of one stage on one micro-batch; prints as ``2F0`` and parses back.

    >>> str(Task("F", 2, 0)), Task.parse("2F0") == Task("F", 2, 0)
    ('2F0', True)
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read what ``str`` wrote; anything else is a `UsageError`."""
        match = _TASK.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not a task: write stage, kind (F, B, I or W) and micro-batch, as in 2F0")
        return cls(cast(Kind, match[2]), int(match[1]), int(match[3]))


Order = tuple[Task, ...]


def format_order(order: Order) -> str:
    """Write the order on one line, which `parse_order` reads back.

    >>> format_order((Task("F", 0, 0), Task("B", 0, 0)))
    '0F0 0B0'
    """
    return " ".join(map(str, order))


def parse_order(text: str) -> Order:
    """Read an order that `format_order` wrote; line breaks count as spaces."""
    return tuple(Task.parse(word) for word in text.split())


def format_stages(order: Order) -> str:
    """Write one line per stage, for a reader; each line parses with `parse_order`, but the order between lines is lost.

    >>> print(format_stages(parse_order("0F0 1F0 1B0 0B0")))
    0F0 0B0
    1F0 1B0
    """
    lines: dict[int, list[str]] = {}
    for task in order:
        lines.setdefault(task.stage, []).append(str(task))
    return "\n".join(" ".join(lines[stage]) for stage in sorted(lines))


def peak_in_flight(order: Iterable[Task]) -> dict[int, int]:
    """Return, for each stage, the largest number of micro-batches in flight.

    A micro-batch is in flight from its F until its B, or until its W if the backward is split.

    >>> peak_in_flight(parse_order("0F0 0F1 0B0 0B1"))
    {0: 2}
    """
    current: dict[int, int] = {}
    peak: dict[int, int] = {}
    for kind, stage, _ in order:
        if kind == "F":
            current[stage] = current.get(stage, 0) + 1
            peak[stage] = max(peak.get(stage, 0), current[stage])
        elif kind != "I":
            current[stage] -= 1
    return peak


def check_order(order: Order, num_stages: int, micro_batches: int) -> None:
    """Check that every task of a training step is there once and comes after what it needs.

    A stage's F needs the F of the stage before it, its B or I the same stage's F and the B or I of the stage after
    it, and a W its I. One stage may split its backward while another does not, but not differently from one
    micro-batch to the next.

    Raises:
        ScheduleError: a task is missing, repeated, unknown or too early; the message names it.
    """
    done: set[Task] = set()

    def need(task: Task, *alternatives: Task) -> None:
        if not any(other in done for other in alternatives):
            raise ScheduleError(f"task {task} comes before {alternatives[0]}, which it needs")

    split: dict[int, bool] = {}
    for task in order:
        kind, stage, micro_batch = task
        if task in done:
            raise ScheduleError(f"task {task} is in the order twice")
        if not (0 <= stage < num_stages and 0 <= micro_batch < micro_batches):
            raise ScheduleError(f"task {task} is outside of {num_stages} stages and {micro_batches} micro-batches")
        if kind == "F" and stage > 0:
            need(task, Task("F", stage - 1, micro_batch))
        if kind in "BI":
            need(task, Task("F", stage, micro_batch))
            if stage < num_stages - 1:
                need(task, Task("B", stage + 1, micro_batch), Task("I", stage + 1, micro_batch))
            if split.setdefault(stage, kind == "I") != (kind == "I"):
                raise ScheduleError(f"task {task}: stage {stage} mixes whole and split backwards")
        if kind == "W":
            need(task, Task("I", stage, micro_batch))
        done.add(task)
    for stage in range(num_stages):
        for kind in cast("tuple[Kind, ...]", ("F", "I", "W") if split.get(stage) else ("F", "B")):
            for micro_batch in range(micro_batches):
                if Task(kind, stage, micro_batch) not in done:
                    raise ScheduleError(f"task {Task(kind, stage, micro_batch)} is missing from the order")
