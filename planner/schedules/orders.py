"""Pipeline schedules as task orders: GPipe, 1F1B, interleaved, zero-bubble, and greedy for stages of different times.

All schedules use one list scheduler over *lines*. A line is a sequence of tasks in a fixed order; the scheduler
repeatedly starts the task, among the heads of all lines, that can start earliest. The classical schedules have one line
per stage or device. The greedy schedule has a line per stage and kind, and a limit on how far forwards run ahead. So
every order is topological by construction, and stages may differ in time and share devices. Times here decide only the
order; the simulator computes the step time. This module knows neither torch nor the programs of ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import chain
from math import ceil

from whale.errors import ScheduleError, UsageError
from whale.ir.schedule import SCHEDULES, Order, Task, check_devices
from whale.planner.schedules.zero_bubble import hand_made, searched

__all__ = [
    "FITTED",
    "SCHEDULES",
    "extra_warm_ups",
    "gpipe",
    "greedy",
    "interleaved",
    "list_schedule",
    "one_f_one_b",
    "schedule_order",
]

Devices = Sequence[frozenset[int]]
Seconds = Callable[[Task], float]
Line = Sequence[Task]

FITTED = ("1f1b_deep", "zero_bubble_1p", "zero_bubble_2p", "greedy")
"""Schedules whose order depends on task times; the others have a fixed form."""


def schedule_order(
    name: str,
    num_stages: int,
    micro_batches: int,
    devices_of_stage: Devices | None = None,
    seconds: Seconds | None = None,
    p2p_seconds: float | None = None,
) -> Order:
    """Return the task order of the schedule called ``name``.

    Args:
        name: one of `SCHEDULES`.
        num_stages: stages of the pipeline; for ``interleaved`` the stages of all devices together.
        micro_batches: at least 1; fewer than stages is allowed and leaves devices idle.
        devices_of_stage: the devices of each stage; by default every stage has its own device.
        seconds: time of a task, for schedules in `FITTED`. By default a backward takes two forwards.
        p2p_seconds: p2p time of a value from one stage to the next, for schedules in `FITTED` except ``greedy``.

    Raises:
        UsageError: unknown name, less than one stage or micro-batch, or devices that do not fit the schedule.

    >>> order = schedule_order("1f1b", 2, 3)
    >>> print(*(task for task in order if task.stage == 0))
    0F0 0F1 0B0 0F2 0B1 0B2
    >>> print(*(task for task in order if task.stage == 1))
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    if num_stages < 1 or micro_batches < 1:
        raise UsageError(
            "a schedule needs at least 1 stage and 1 micro-batch, "
            f"not {num_stages} stages and {micro_batches} micro-batches"
        )
    devices = devices_of_stage or tuple(frozenset({stage}) for stage in range(num_stages))
    if len(devices) != num_stages or not all(devices):
        raise UsageError(
            f"{num_stages} stages need {num_stages} device sets, none empty, not {[sorted(d) for d in devices]}"
        )
    match name:
        case "gpipe":
            return gpipe(micro_batches, devices)
        case "1f1b":
            return one_f_one_b(micro_batches, devices)
        case "1f1b_deep":
            return one_f_one_b(micro_batches, devices, extra_warm_ups(num_stages, seconds or _typical, p2p_seconds))
        case "interleaved":
            return interleaved(micro_batches, devices)
        case "zero_bubble" | "zero_bubble_h2":
            depth = 1 if name == "zero_bubble" else 2
            return list_schedule(hand_made(num_stages, micro_batches, depth), devices, _typical)
        case "zero_bubble_1p" | "zero_bubble_2p":
            cost, limit = seconds or _typical, num_stages * (1 if name == "zero_bubble_1p" else 2)
            lines = searched(num_stages, micro_batches, cost, p2p_seconds=p2p_seconds or 0.0, limit=limit)
            return list_schedule(lines, devices, cost)
    return greedy(micro_batches, devices, seconds or _typical)


def gpipe(micro_batches: int, devices_of_stage: Devices) -> Order:
    """All forwards, then all backwards: every micro-batch is in flight on every stage."""
    count = range(micro_batches)
    lines = [
        [Task("F", stage, m) for m in count] + [Task("B", stage, m) for m in count]
        for stage in range(len(devices_of_stage))
    ]
    return list_schedule(lines, devices_of_stage, _typical)


def one_f_one_b(micro_batches: int, devices_of_stage: Devices, extra: Sequence[int] = ()) -> Order:
    """1F1B: stage s of P starts with P - s forwards, then alternates, with at most P - s micro-batches in flight.

    The step takes as long as with GPipe, (M + P - 1)(f + b) without communication. Where p2p transfers are slow,
    ``extra`` warm-up forwards for each stage (`extra_warm_ups`) hide them, with that many more micro-batches in flight.
    """
    lines = []
    num_stages = len(devices_of_stage)
    for stage in range(num_stages):
        warm_up = min(micro_batches, num_stages - stage + (extra[stage] if extra else 0))
        line = [Task("F", stage, m) for m in range(warm_up)]
        for m in range(micro_batches):
            line.append(Task("B", stage, m))
            if m + warm_up < micro_batches:
                line.append(Task("F", stage, m + warm_up))
        lines.append(line)
    return list_schedule(lines, devices_of_stage, _typical)


def extra_warm_ups(num_stages: int, seconds: Seconds, p2p_seconds: float | None = None) -> list[int]:
    """Return the extra warm-up forwards of each 1F1B stage that hide p2p transfers.

    Between a stage's forward and its backward of the same micro-batch lie two p2p transfers for each later stage. Every
    additional micro-batch in flight covers the time of one micro-batch on the slowest stage. If the p2p time is
    unknown, each stage except the last gets one extra forward.

    >>> extra_warm_ups(4, lambda task: 2 if task.kind == "B" else 1, 0.5)
    [1, 1, 1, 0]
    """
    after = range(num_stages - 1, -1, -1)
    if p2p_seconds is None:
        return [min(1, number) for number in after]
    slowest = max(seconds(Task("F", stage, 0)) + seconds(Task("B", stage, 0)) for stage in range(num_stages))
    return [ceil(2 * p2p_seconds * number / slowest) if slowest else 0 for number in after]


def interleaved(micro_batches: int, devices_of_stage: Devices) -> Order:
    """Interleaved 1F1B: stages assigned round-robin to P device sets, V each, with 1/V of the bubble of 1F1B.

    A device set runs P micro-batches through all of its stages before the next P, as Megatron-LM does (Narayanan et
    al., SC 2021, section 2.2.2): (M V + P - 1)(f + b) for stages of f and b, if M is a multiple of P. Otherwise the
    order is made for the next multiple, and the micro-batches that do not exist are removed.

    Raises:
        UsageError: stage s is not on the devices of stage s % P.
    """
    check_devices("interleaved", devices_of_stage)
    num_sets = len(set(devices_of_stage))
    chunks = len(devices_of_stage) // num_sets
    padded = -(-micro_batches // num_sets) * num_sets
    # Position k of a set's forwards: round, then stage of the set, then micro-batch within the round. Backwards
    # mirror it.
    places = [
        (chunk, turn * num_sets + place)
        for turn in range(padded // num_sets)
        for chunk in range(chunks)
        for place in range(num_sets)
    ]
    lines = []
    for index in range(num_sets):
        warm_up = min(len(places), 2 * (num_sets - index - 1) + (chunks - 1) * num_sets + 1)
        forwards = [Task("F", chunk * num_sets + index, m) for chunk, m in places]
        backwards = [Task("B", (chunks - 1 - chunk) * num_sets + index, m) for chunk, m in places]
        steady = chain.from_iterable(zip(backwards, forwards[warm_up:], strict=False))
        line = [*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]]
        lines.append([task for task in line if task.micro_batch < micro_batches])
    return list_schedule(lines, devices_of_stage, _typical)


def greedy(
    micro_batches: int,
    devices_of_stage: Devices,
    seconds: Seconds,
    in_flight: Sequence[int] | None = None,
) -> Order:
    """Greedy order: start the task that can start earliest, backwards first, within a limit of micro-batches in flight.

    It suits stages of different times and overlapping device sets, for which no closed form is known. It is not
    optimal: it looks one task ahead.

    Args:
        micro_batches: number of micro-batches.
        devices_of_stage: the devices of each stage; sets may overlap.
        seconds: time of each F and B.
        in_flight: limit of micro-batches in flight for each stage, 1 or more; by default P - s, as in 1F1B.
    """
    stages = range(len(devices_of_stage))
    lines = [[Task(kind, stage, m) for m in range(micro_batches)] for stage in stages for kind in ("B", "F")]
    limits = tuple(in_flight) if in_flight is not None else tuple(len(stages) - stage for stage in stages)
    if len(limits) != len(stages) or min(limits) < 1:
        raise UsageError(f"in_flight needs a number of 1 or more for each of {len(stages)} stages, not {list(limits)}")
    return list_schedule(lines, devices_of_stage, seconds, limits)


def list_schedule(
    lines: Sequence[Line], devices_of_stage: Devices, seconds: Seconds, in_flight: Sequence[int] | None = None
) -> Order:
    """Merge lines into one order: repeatedly start the head that can start earliest; ties go to the backward of the
    last stage.

    A head waits for what it needs (`_needs`), for its devices, and, if it is an F, for its stage to have fewer than
    ``in_flight`` micro-batches. A heap holds the heads that could start. A time in it may be outdated, because
    devices were taken since, but only ever too early: such a head goes back with its new time. With limits, all of at
    least 1, the last stage that has a micro-batch in flight can always answer it, so the scheduler never stops short.

    Complexity: O(n log l) for n tasks in l lines.

    Raises:
        ScheduleError: the lines wait for each other; the message lists their heads.
    """
    last = len(devices_of_stage) - 1
    free = dict.fromkeys(frozenset().union(*devices_of_stage), 0.0)
    finish: dict[Task, float] = {}
    held = [0] * (last + 1)
    positions = [0] * len(lines)
    waiting: dict[Task | int, list[int]] = {}  # by what a line's head waits for: a task or a stage
    heap: list[tuple[float, int, int, Task, int]] = []
    order: list[Task] = []

    def offer(line: int) -> None:
        """Push the head of ``line`` on the heap, or register it with the one thing it waits for."""
        if positions[line] == len(lines[line]):
            return
        task = lines[line][positions[line]]
        needs = _needs(task, last)
        missing: list[Task | int] = [need for need in needs if need not in finish]
        if not missing and in_flight is not None and task.kind == "F" and held[task.stage] >= in_flight[task.stage]:
            missing = [task.stage]
        if missing:
            waiting.setdefault(missing[0], []).append(line)
        else:
            urgency = (task.stage - last) if task.kind == "F" else -1 - task.stage - last
            heapq.heappush(heap, (max((finish[need] for need in needs), default=0.0), urgency, line, task, line))

    for line in range(len(lines)):
        offer(line)
    while heap:
        time, urgency, key, task, line = heapq.heappop(heap)
        devices = devices_of_stage[task.stage]
        start = max(time, *(free[device] for device in devices))
        if start > time:
            heapq.heappush(heap, (start, urgency, key, task, line))
            continue
        finish[task] = end = start + seconds(task)
        for device in devices:
            free[device] = end
        order.append(task)
        positions[line] += 1
        woken = [line, *waiting.pop(task, ())]
        if task.kind == "F":
            held[task.stage] += 1
        elif task.kind != "I":
            held[task.stage] -= 1
            woken += waiting.pop(task.stage, ())
        for other in woken:
            offer(other)
    if any(position < len(line) for position, line in zip(positions, lines, strict=True)):
        heads = [str(line[position]) for position, line in zip(positions, lines, strict=True) if position < len(line)]
        raise ScheduleError(f"the lines of a schedule wait for each other: {', '.join(heads)}")
    return tuple(order)


def _needs(task: Task, last: int) -> tuple[Task, ...]:
    """Return the tasks whose results ``task`` reads, in a chain of stages up to ``last``."""
    kind, stage, micro_batch = task
    if kind == "F":
        return (Task("F", stage - 1, micro_batch),) if stage else ()
    if kind == "W":
        return (Task("I", stage, micro_batch),)
    own = Task("F", stage, micro_batch)
    return (own,) if stage == last else (own, Task(kind, stage + 1, micro_batch))


def _typical(task: Task) -> float:
    """Return the typical relative time: a backward is two forwards, half for inputs and half for weights."""
    return 2.0 if task.kind == "B" else 1.0
