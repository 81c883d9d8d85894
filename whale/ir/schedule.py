"""A pipeline schedule as data: the tasks of all stages in one global order.

A task is one kind of work of one stage on one micro-batch. An order lists every task once, each after the tasks that
it needs, so it can be walked from left to right: the program of a rank, the timeline of the simulator and the picture
that a person reads are all projections of the same tuple. This file knows nothing of devices, costs or tensors; it
imports neither torch nor the planner that makes the orders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple, cast

from whale.errors import ScheduleError, UsageError

__all__ = ["SCHEDULES", "Kind", "Order", "Task", "check_devices", "check_order", "peak_in_flight"]

SCHEDULES = (
    "gpipe",
    "1f1b",
    "1f1b_deep",
    "interleaved",
    "zero_bubble",
    "zero_bubble_h2",
    "zero_bubble_1p",
    "zero_bubble_2p",
    "greedy",
)
"""The names of schedules, whose orders `whale.planner.schedules.orders` makes. ``zero_bubble`` is H1 of the paper
(`whale.planner.schedules.zero_bubble`); 1p and 2p search for an order with the given times and at most P, or 2 P,
micro-batches in flight on each of P stages."""

Kind = Literal["F", "B", "I", "W"]
"""F forward; B whole backward; I backward of the inputs only; W backward of the weights, after its I."""


class Task(NamedTuple):
    """One kind of work of one stage on one micro-batch; prints as ``2F0``.

    >>> print(Task("F", 2, 0))
    2F0
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[Task, ...]


def peak_in_flight(order: Iterable[Task]) -> dict[int, int]:
    """Return, for each stage, the largest number of micro-batches in flight.

    A micro-batch is in flight from its F until its B, or until its W if the backward is split.

    >>> peak_in_flight((Task("F", 0, 0), Task("F", 0, 1), Task("B", 0, 0), Task("B", 0, 1)))
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


def check_devices(schedule: str, devices_of_stage: Sequence[Collection[int]]) -> None:
    """Refuse devices of stages that a schedule has no order for. Stages may share devices under all of them.

    Raises:
        UsageError: stages of ``interleaved`` that do not go round the same sets of devices.

    >>> check_devices("interleaved", [(0,), (1,), (0,), (1,)])
    """
    sets = [frozenset(devices) for devices in devices_of_stage]
    num = len(set(sets))
    round_robin = all(devices == sets[stage % num] for stage, devices in enumerate(sets)) and len(sets) % num == 0
    if schedule == "interleaved" and not round_robin:
        raise UsageError(
            "schedule 'interleaved' needs stages assigned round-robin to equal device sets, stage s on the devices of "
            f"stage s % {num}, not {[sorted(devices) for devices in sets]}; use '1f1b' or 'greedy'"
        )


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
