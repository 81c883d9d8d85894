"""Layout: from a partial plan to a plan: its meshes on ranks, and the rows of a micro-batch for each replica.

Rows are exact: those with which the slowest slice of a stage is done first and every device holds its part
(`whale.planner.balance.shares.fastest_shares`). Where they do not fit they are those by speed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whale.errors import InfeasibleError
from whale.ir.state import StateSharding
from whale.planner.balance.shares import Worker, fastest_shares, memory_between
from whale.planner.cost.groups import TensorGroup
from whale.planner.cost.stage import CostModel
from whale.planner.schedules.in_flight import in_flight
from whale.planner.search.evaluate import fitted
from whale.planner.search.partial_plans import PartialPlan
from whale.planner.search.problem import Candidate, StageChoice
from whale.planner.search.space import Mesh, layouts
from whale.planner.search.table import CostTable

__all__ = ["fastest_rows", "laid_out"]


def laid_out(meshes: CostTable, draft: PartialPlan, batch: int) -> Candidate:
    """Place the partial plan on ranks and simulate it: stages within nodes, or one after the other on their devices,
    whichever takes less."""
    bounds, ends = meshes.chain.bounds, (*draft.starts[1:], len(meshes.chain))
    layers = [range(bounds[first], bounds[end]) for first, end in zip(draft.starts, ends, strict=True)]
    chosen = [_needed(meshes.prices, mesh, own) for mesh, own in zip(draft.meshes, layers, strict=True)]
    draft = replace(draft, meshes=tuple(chosen))
    found = [_placed(meshes, draft, batch, layers, placed) for placed in layouts(meshes.pools, chosen)]
    return min(found, key=lambda one: (not one.prediction.fits, one.prediction.step_seconds))


def _placed(
    meshes: CostTable,
    draft: PartialPlan,
    batch: int,
    every: Sequence[range],
    placed: Sequence[Sequence[tuple[int, ...]]],
) -> Candidate:
    """The partial plan with the layers of its stages, and the ranks of their data slices, simulated."""
    stages, parts = [], draft.stages(len(meshes.chain))
    for stage, (mesh, layers, groups, (_, *part)) in enumerate(zip(draft.meshes, every, placed, parts, strict=True)):
        held = in_flight(draft.schedule, len(draft.meshes), stage, draft.micro_batches)
        priced = [meshes.prices.group(ranks, mesh.data, mesh.expert, mesh.context) for ranks in groups]
        rows = fastest_rows(
            meshes.prices, layers, priced, meshes.rows(batch, draft.micro_batches), draft.micro_batches, held
        )
        if meshes.prices.stack.zero or not _may_be_fewer(meshes, mesh, rows, *part):
            rows = _none_without(rows)
        # A replica without rows would only sum gradients with the others, unless it owns states or a group's experts.
        used = [index for index, count in enumerate(rows) if count or mesh.expert > 1 or meshes.gathers_once]
        stages.append(
            StageChoice(
                first=layers.start,
                last=layers.stop,
                ranks=tuple(rank for index in used for rank in groups[index]),
                data=len(used),
                tensor=mesh.tensor,
                rows=tuple(rows[index] for index in used),
                expert=mesh.expert,
                context=mesh.context,
                recompute=meshes.prices.stack.recompute,
                state=StateSharding(meshes.prices.stack.zero) if meshes.prices.stack.zero else None,
                offload=meshes.prices.stack.offload,
            )
        )
    return fitted(meshes.prices, stages, micro_batches=draft.micro_batches, schedule=draft.schedule, batch=batch)


def _needed(prices: CostModel, mesh: Mesh, layers: range) -> Mesh:
    """The mesh of a stage; without experts there is nothing that expert groups would split."""
    experts = prices.profile.experts
    return mesh if mesh.expert == 1 or any(experts[layer] for layer in layers) else mesh._replace(expert=1)


def _may_be_fewer(meshes: CostTable, mesh: Mesh, rows: Sequence[int], first: int, last: int) -> bool:
    """Whether the replicas with rows alone may be a stage of the parts [first, last), by what is decided."""
    others = Mesh((mesh.size * sum(map(bool, rows)),), *mesh.division)
    return first >= int(meshes.chain.allows(others)[last])


def _none_without(rows: Sequence[int]) -> tuple[int, ...]:
    """Rows of which each replica has one, if there are as many: one without would own no state, or keep that of tasks
    from being gathered for these.

    >>> _none_without((3, 0, 1)), _none_without((1, 0))
    ((2, 1, 1), (1, 0))
    """
    found = list(rows)
    while 0 in found and max(found) > 1:
        found[found.index(max(found))] -= 1
        found[found.index(0)] += 1
    return tuple(found)


def fastest_rows(
    prices: CostModel, layers: range, groups: Sequence[TensorGroup], rows: int, micro_batches: int, held: int
) -> tuple[int, ...]:
    """Rows of a micro-batch for each of a stage's data slices.

    Args:
        prices: of layers.
        layers: of the stage.
        groups: in the order of its data slices.
        rows: of a micro-batch.
        micro_batches: of a step.
        held: how many of them are in flight.
    """
    if len(set(groups)) == 1:
        share, rest = divmod(rows, len(groups))
        return tuple(share + (index < rest) for index in range(len(groups)))
    first = groups[0]
    shards = len(groups) * first.positions if prices.stack.zero else 1
    state = prices.state_of(layers, first.tensor, first.expert, shards=shards, zero=prices.stack.zero).total
    known: dict[TensorGroup, Worker] = {}
    for group in groups:
        if group not in known:
            known[group] = _worker(prices, layers, group, micro_batches, held, state, rows)
    workers = [known[group] for group in groups]
    try:
        return fastest_shares(rows, workers).units
    except InfeasibleError:
        return fastest_shares(rows, [Worker(name=one.name, seconds=one.seconds) for one in workers]).units


def _worker(
    prices: CostModel, layers: range, group: TensorGroup, micro_batches: int, held: int, state: float, rows: int
) -> Worker:
    known: dict[int, float] = {0: 0.0}

    def seconds(count: int) -> float:
        if count not in known:
            cost = prices.stage(layers, group, count, micro_batches)
            known[count] = cost.forward + cost.backward
        return known[count]

    def activations(count: float) -> float:
        cost = prices.stage(layers, group, count, micro_batches)
        return (held * cost.kept + cost.working) * prices.waste

    overhead = max(prices.overhead_bytes[type_.name] for type_ in group.types)
    return Worker(
        name=group.types[0].name,
        seconds=seconds,
        memory=memory_between(activations, 1, rows, fixed=state + overhead),
        capacity_bytes=group.memory_bytes,
    )
