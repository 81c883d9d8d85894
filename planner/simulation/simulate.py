"""The simulator of a training step: it runs the executor's programs with the times of a `Workload`.

`simulate` makes the programs itself, from the workload's schedule, `simulate_alike` only those of ranks that differ.
Both give the same `Timeline`. This file knows neither devices nor how times came about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whale.errors import UsageError
from whale.ir.program import Edge, ReduceSpec, Send, Shape, StageSpec, Transfer, project
from whale.ir.schedule import Order, Task
from whale.ir.workload import Boundary, Workload
from whale.planner.schedules.orders import schedule_order
from whale.planner.simulation.engine import run_programs
from whale.planner.simulation.priced import Loads
from whale.planner.simulation.quotient import quotient
from whale.planner.simulation.timeline import Timeline

__all__ = [
    "check_workload",
    "p2p_seconds",
    "order_of",
    "programs_of",
    "simulate",
    "simulate_alike",
    "task_seconds",
]

MOST_TASKS = 4_000_000
"""Largest number of tasks in a simulation: some minutes and some GiB."""


def simulate(workload: Workload, *, order: Order | None = None) -> Timeline:
    """Simulate a step of ``workload``, with its schedule or in a given ``order``.

    Raises:
        UsageError: the workload is inconsistent, its schedule does not fit its stages (names the stage or rank), or it
            has too many tasks to simulate.

    >>> from whale.ir.workload import StageWork
    >>> stage = StageWork(ranks=(0,), forward=(1.0,), backward=(2.0,), weights=(1.0,), kept_bytes=(100,))
    >>> timeline = simulate(Workload(world_size=1, micro_batches=4, stages=(stage,)))
    >>> timeline.step_seconds, timeline.breakdown["compute"], timeline.peak_bytes(0)
    (12.0, 12.0, 100)
    """
    check_workload(workload)
    _require_end(workload)
    return _simulated(workload, order_of(workload) if order is None else order, {})


def simulate_alike(workload: Workload) -> Timeline:
    """Simulate a step with one rank of each kind of equal ranks.

    The result is that of `simulate` without the events of ranks that others represent (``members`` of the timeline),
    and takes as long for thousands of ranks as for a few.

    >>> from whale.ir.workload import StageWork
    >>> count = 4096
    >>> each = {"forward": (1.0,), "backward": (2.0,), "weights": (1.0,), "kept_bytes": (100,)}
    >>> stage = StageWork(ranks=tuple(range(count)), **{name: count * value for name, value in each.items()})
    >>> timeline = simulate_alike(Workload(world_size=count, micro_batches=4, stages=(stage,)))
    >>> timeline.step_seconds, timeline.ranks, timeline.peak_bytes(4095)
    (12.0, (0,), 100)
    """
    check_workload(workload)
    found = quotient(workload)
    _require_end(found.workload)
    timeline = _simulated(found.workload, order_of(found.workload), found.loads)
    return replace(timeline, members=found.members)


def _simulated(workload: Workload, order: Order, loads: Loads) -> Timeline:
    stages, edges, reduces = programs_of(workload)
    sizes: dict[tuple[int, str, int, int], int] = {}
    for index, boundary in enumerate(workload.boundaries):
        for direction, transfers in (("forward", boundary.forward), ("backward", boundary.backward)):
            for transfer in transfers:
                key = (index, direction, transfer.source, transfer.target)
                sizes[key] = sizes.get(key, 0) + transfer.bytes

    def bytes_of(rank: int, send: Send) -> float:
        share = workload.last_share if send.micro_batch == workload.micro_batches - 1 else 1.0
        return sizes[send.edge, send.direction, rank, send.peer] * share

    programs = project(order, stages, edges, reduces)
    return run_programs(programs, edges, workload, bytes_of, loads)


def _require_end(workload: Workload) -> None:
    ranks, count = sum(len(stage.ranks) for stage in workload.stages), workload.micro_batches
    if 2 * ranks * count > MOST_TASKS:
        raise UsageError(
            f"{count:,} micro-batches on {ranks:,} ranks are {2 * ranks * count:,} tasks to simulate, more than "
            f"{MOST_TASKS:,}; use at most {max(1, MOST_TASKS // (2 * ranks)):,} micro-batches: each one more takes as "
            "long as the one before"
        )


def order_of(workload: Workload) -> Order:
    """Return the task order of the workload's schedule for its stages, times and devices."""
    devices = [frozenset(stage.ranks) for stage in workload.stages]
    return schedule_order(
        workload.schedule,
        len(devices),
        workload.micro_batches,
        devices,
        task_seconds(workload),
        p2p_seconds(workload),
    )


def task_seconds(workload: Workload) -> Callable[[Task], float]:
    """Return the time of each task on the slowest of its ranks."""
    times: dict[tuple[str, int], float] = {}
    for index, stage in enumerate(workload.stages):
        inputs = [backward - weights for backward, weights in zip(stage.backward, stage.weights, strict=True)]
        for kind, seconds in (("F", stage.forward), ("B", stage.backward), ("I", inputs), ("W", stage.weights)):
            times[kind, index] = max(seconds)
    return lambda task: times[task.kind, task.stage]


def p2p_seconds(workload: Workload) -> float:
    """Return the p2p time of the slowest message between stages on idle links."""
    links = {(link.source, link.target): link for link in workload.links}
    transfers = [transfer for boundary in workload.boundaries for transfer in (*boundary.forward, *boundary.backward)]
    times = [0.0]
    for transfer in transfers:
        link = links.get((transfer.source, transfer.target))
        if link is not None:
            times.append(link.latency + transfer.bytes / link.bandwidth)
    return max(times)


def programs_of(workload: Workload) -> tuple[list[StageSpec], list[Edge], list[ReduceSpec]]:
    """Return the stages, edges and buckets of a workload, as inputs of the projection to programs.

    A value has one element for each transfer, so that transfers of no bytes are messages too.
    """
    stages = [StageSpec(index=index, ranks=stage.ranks) for index, stage in enumerate(workload.stages)]
    edges = [_edge(index, boundary, workload) for index, boundary in enumerate(workload.boundaries)]
    reduces = [
        ReduceSpec(index=index, ranks=reduction.ranks, stages=reduction.stages)
        for index, reduction in enumerate(workload.reductions)
    ]
    return stages, edges, reduces


def _edge(index: int, boundary: Boundary, workload: Workload) -> Edge:
    sources = dict.fromkeys(workload.stages[boundary.source_stage].ranks, 1)
    targets = dict.fromkeys(workload.stages[boundary.target_stage].ranks, 0)
    one = ((0, 1),)
    forward = []
    for source, target in dict.fromkeys((transfer.source, transfer.target) for transfer in boundary.forward):
        position = targets[target]
        targets[target] += 1
        forward.append(Transfer(source, target, one, ((position, position + 1),)))
    pairs = dict.fromkeys((transfer.source, transfer.target) for transfer in boundary.backward)
    backward = tuple(Transfer(source, target, one, one) for source, target in pairs)
    shapes: list[dict[int, Shape]] = [{rank: (size,) for rank, size in ends.items()} for ends in (sources, targets)]
    count = workload.micro_batches
    return Edge(
        index=index,
        value=f"boundary{index}",
        source_stage=boundary.source_stage,
        target_stage=boundary.target_stage,
        needs_grad=bool(backward),
        dtype="uint8",
        forward=(tuple(forward),) * count,
        backward=(backward,) * count,
        source_shapes=(shapes[0],) * count,
        target_shapes=(shapes[1],) * count,
    )


def check_workload(workload: Workload) -> None:
    """Check that the lists of a workload are consistent and that its ranks and stages exist.

    Raises:
        UsageError: the first contradiction.
    """
    ranks = range(workload.world_size)
    if not workload.stages:
        raise UsageError("the workload has no stages")
    for index, stage in enumerate(workload.stages):
        where = f"stage {index} of the workload"
        required = ("forward", "backward", "weights", "kept_bytes")
        for name in (*required, "communication", "forward_peak_bytes", "backward_peak_bytes", "gathered"):
            size = len(getattr(stage, name))
            if size != len(stage.ranks) and (size or name in required):
                raise UsageError(f"{where} has {len(stage.ranks)} ranks, but {size} entries in {name!r}")
        if not stage.ranks or len(set(stage.ranks)) != len(stage.ranks) or any(r not in ranks for r in stage.ranks):
            raise UsageError(f"{where} needs different ranks below {len(ranks)}, not {list(stage.ranks)}")
        together = [rank for group in stage.together for rank in group]
        if len(set(together)) != len(together) or not set(together) <= set(stage.ranks):
            raise UsageError(f"{where}: a rank is in two groups of 'together', or in one without being of the stage")
        if any(weights > backward for weights, backward in zip(stage.weights, stage.backward, strict=True)):
            raise UsageError(f"{where}: 'weights' is a part of 'backward' and cannot be longer")
    for index, boundary in enumerate(workload.boundaries):
        where = f"boundary {index} of the workload"
        if not boundary.source_stage < boundary.target_stage < len(workload.stages):
            raise UsageError(f"{where} goes from stage {boundary.source_stage} to stage {boundary.target_stage}")
        ends = [set(workload.stages[s].ranks) for s in (boundary.source_stage, boundary.target_stage)]
        for transfers, (sources, targets) in ((boundary.forward, ends), (boundary.backward, ends[::-1])):
            for transfer in transfers:
                if transfer.source not in sources or transfer.target not in targets:
                    raise UsageError(
                        f"{where} has a transfer from rank {transfer.source} to {transfer.target}, which are not of "
                        f"its stages in that direction"
                    )
    for index, reduction in enumerate(workload.reductions):
        if any(stage >= len(workload.stages) for stage in reduction.stages) or not reduction.stages:
            raise UsageError(f"reduction {index} of the workload is of stages {list(reduction.stages)}")
        owners = {rank for stage in reduction.stages for rank in workload.stages[stage].ranks}
        if not set(reduction.ranks) <= owners:
            others = sorted(set(reduction.ranks) - owners)
            raise UsageError(f"reduction {index} of the workload is over ranks {others}, which have none of its stages")
        if reduction.slowdown and len(reduction.slowdown) != len(reduction.ranks):
            raise UsageError(
                f"'slowdown' of reduction {index} needs an entry for each of its {len(reduction.ranks)} ranks"
            )
    if workload.update and len(workload.update) != workload.world_size:
        raise UsageError(f"'update' of the workload needs {workload.world_size} entries, not {len(workload.update)}")
