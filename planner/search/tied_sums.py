"""Sums of the gradients of tied parameters over the stages that read them, and their gathers.

Such a sum begins when the last of its stages has finished its last backward: the first in the pipeline, because
backwards run from the last stage to the first. All of its stages update their parameters after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from whale.planner.search.space import Mesh
from whale.planner.search.table import MOST_SAMPLED, CostTable

__all__ = ["late_by_ties", "with_tied_sums"]

Placed = tuple[Mesh, tuple[int, ...]]
"""A mesh, and the position of its first device in each pool."""


def with_tied_sums(
    meshes: CostTable,
    stages: Sequence[tuple[Mesh, int, int]],
    once: Sequence[float],
    backward: Sequence[float],
    rows: int,
    micro_batches: int,
) -> tuple[float, ...]:
    """Seconds once per step of each of the *stages* (mesh, first part, part after the last one), with the sums of tied
    parameters that several of them read.

    Args:
        meshes: costs.
        stages: of a partial plan, in order.
        once: seconds once per step of each stage, as if no parameter were tied.
        backward: seconds of the last backward of each stage, with those of handing on to it.
        rows: of a micro-batch.
        micro_batches: of a step.
    """
    found = list(once)
    for where, elements, owners in _tied(meshes, stages):
        (seconds, _), updates = _exchanged(meshes, where, elements), []
        for at in owners:
            mesh, first, last = stages[at]
            updates.append(meshes.costs(mesh, rows, micro_batches).update_in(first, last))
        mesh, _, _ = stages[owners[0]]  # it ends last, and sums its own gradients before
        own = meshes.sum_seconds(mesh, elements / mesh.tensor)  # that it does not sum over its own replicas
        ready = max(0.0, found[owners[0]] - updates[0] - own)
        others = zip(owners[1:], updates[1:], strict=True)
        later = max(found[at] - update - sum(backward[owners[0] : at]) for at, update in others)
        found[owners[0]] = max(ready, later) + seconds + max(updates)
    return tuple(found)


def late_by_ties(meshes: CostTable, stages: Sequence[tuple[Mesh, int, int]]) -> list[float]:
    """Seconds by which the parameters of each stage are gathered later than by its replicas alone, because several
    stages share and divide some of them; negative where not all of these divide them."""
    found = [0.0] * len(stages)
    for where, elements, owners in _tied(meshes, stages):
        _, gather = _exchanged(meshes, where, elements)
        for at, (mesh, _) in zip(owners, where, strict=True):
            found[at] += gather - meshes.gather_seconds(mesh, elements / mesh.tensor)
    return found


def _tied(
    meshes: CostTable, stages: Sequence[tuple[Mesh, int, int]]
) -> Iterator[tuple[tuple[Placed, ...], float, list[int]]]:
    """Find parameters that several of the stages share: where these are, the elements, and their positions."""
    starts = [first for _, first, _ in stages]
    for parts, elements in meshes.tied:
        owners = sorted({bisect_right(starts, part) - 1 for part in parts})
        if len(owners) > 1:
            # Devices are assigned in the order of the stages, so stages far apart are on different nodes.
            places = ((stages[at][0], _devices_of(meshes, [mesh for mesh, *_ in stages[:at]])) for at in owners)
            yield tuple(places), elements, owners


def _devices_of(meshes: CostTable, sequence: Sequence[Mesh]) -> tuple[int, ...]:
    """Devices of each pool that some meshes have."""
    return tuple(sum(mesh.counts[place] for mesh in sequence) for place in range(len(meshes.pools)))


def _exchanged(meshes: CostTable, owners: tuple[Placed, ...], elements: float) -> tuple[float, float]:
    """Seconds of the sum of a tied parameter over stages on meshes that begin at positions of each pool, and of its
    gather before the first forward, if all of them divide it. Where these are not alike it is whole on every rank."""
    key = (owners, elements)
    if key not in meshes.tied_sums:
        first, _ = owners[0]
        degree = first.tensor if all(_are_alike(mesh, first) for mesh, _ in owners) else 1
        step = first.size if degree > 1 else 1
        ranks: list[int] = []
        for mesh, begins in owners:
            for pool, count, begin in zip(meshes.pools, mesh.counts, begins, strict=True):
                ranks += pool.ranks[begin : begin + count : step][:MOST_SAMPLED]
        prices, size = meshes.prices, elements / degree * meshes.prices.gradient_bytes
        divided = bool(prices.runs and prices.stack.zero) and all(mesh.data > 1 for mesh, _ in owners)
        gather = prices.over("all_gather", ranks, degree, size) if divided and meshes.gathers_once else 0.0
        meshes.tied_sums[key] = prices.tied_sum(ranks, degree, size, divided=divided), gather
    return meshes.tied_sums[key]


def _are_alike(mesh: Mesh, other: Mesh) -> bool:
    """Whether stages have as many data slices of the same degrees, with the same rows: one has all, and those of one
    type have equal ones."""
    if (mesh.data, mesh.division) != (other.data, other.division):
        return False
    return mesh.data == 1 or mesh == other or all(sum(map(bool, one.counts)) == 1 for one in (mesh, other))
