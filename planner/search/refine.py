"""Improve a draft step by step, where it is bound.

The stage whose work for a step is most is the bottleneck. Moves take work from it (a part to a neighbour, a device from
another stage or from those left over), change its degrees, exchange it with a neighbour, join or split stages, or
change the number of micro-batches. Steepest descent: of all moves the best is taken as long as one helps. A heuristic;
never worse than where it starts, and it ends at a draft that no move improves, or when it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from whale.planner.search.devices import Mesh
from whale.planner.search.drafts import Draft, Scored, allowed, best_cuts, quick_cuts, score_draft
from whale.planner.search.families import fit_tensor_degrees
from whale.planner.search.meshes import Meshes

__all__ = ["refined"]

EXACTLY_CUT = 128
"""Stages x parts up to which every draft gets its exact cuts; else only those that a descent takes."""

MOST_REMESHED = 6
"""Stages of which other tensor degrees are tried, those that have most to do first."""

GAIN = 1e-6
"""A move helps if it takes so much of the step away."""


def refined(
    meshes: Meshes,
    start: Scored,
    batch: int,
    *,
    micro_batches: Sequence[int],
    max_stages: int,
    tried: Callable[[Scored], None],
    stop: Callable[[], bool],
) -> Scored:
    """The end of a descent from *start*.

    Args:
        meshes: prices.
        start: a draft that fits.
        batch: rows of a step.
        micro_batches: numbers that may be chosen, ascending.
        max_stages: that a pipeline may have.
        tried: is told of every draft that is scored.
        stop: whether to end early.
    """
    best, known = start, {start.draft}
    while True:
        found = best
        for draft in _moves(meshes, best, batch, micro_batches, max_stages):
            if stop():
                return min(best, found, key=lambda one: one.seconds)
            if draft in known:
                continue
            known.add(draft)
            scored = score_draft(meshes, draft, batch, below=found.seconds)
            tried(scored)
            if scored.fits and scored.seconds < found.seconds * (1 - GAIN):
                found = scored
        if found is best:
            return best
        best = _cut_exactly(meshes, found, batch, tried)


def _cut_exactly(meshes: Meshes, scored: Scored, batch: int, tried: Callable[[Scored], None]) -> Scored:
    """The draft with its exact cuts, if they are better than those that it has."""
    draft = scored.draft
    starts = best_cuts(meshes, draft.meshes, batch, draft.micro_batches, draft.schedule)
    if starts is None or starts == draft.starts:
        return scored
    exact = score_draft(meshes, replace(draft, starts=starts), batch)
    tried(exact)
    return exact if exact.fits and exact.seconds < scored.seconds else scored


def _moves(
    meshes: Meshes, scored: Scored, batch: int, micro_batches: Sequence[int], max_stages: int
) -> Iterator[Draft]:
    draft = scored.draft
    order = sorted(range(len(draft.meshes)), key=lambda stage: -scored.loads[stage])
    bound = order[0]
    yield from _shifted(meshes, draft)
    others: list[tuple[Mesh, ...]] = []
    for stage in order[:MOST_REMESHED]:
        others += _other_degrees(meshes, draft, stage)
    for stage in order[:2]:
        others += _given_devices(meshes, draft, stage)
        others += _exchanged(draft, stage)
        others += _joined(draft, stage)
    if len(draft.meshes) < max_stages:
        others += _split(meshes, draft, bound)
    for sequence in dict.fromkeys(others):
        yield from _recut(meshes, sequence, draft.micro_batches, batch, draft.schedule)
    place = micro_batches.index(draft.micro_batches)
    for count in (*micro_batches[max(0, place - 1) : place], *micro_batches[place + 1 : place + 2]):
        if all(mesh.data <= meshes.rows(batch, count) for mesh in draft.meshes):
            yield replace(draft, micro_batches=count)
            yield from _recut(meshes, draft.meshes, count, batch, draft.schedule)


def _recut(meshes: Meshes, sequence: Sequence[Mesh], micro_batches: int, batch: int, schedule: str) -> Iterator[Draft]:
    rows = meshes.rows(batch, micro_batches)
    if any(sum(mesh.counts) % mesh.tensor or mesh.data > rows for mesh in sequence):
        return
    small = len(sequence) * len(meshes.chain) <= EXACTLY_CUT
    starts = (best_cuts if small else quick_cuts)(meshes, sequence, batch, micro_batches, schedule)
    if starts is not None:
        yield Draft(meshes=tuple(sequence), starts=starts, micro_batches=micro_batches, schedule=schedule)


def _shifted(meshes: Meshes, draft: Draft) -> Iterator[Draft]:
    """Cuts moved by one part."""
    ends = (*draft.starts[1:], len(meshes.chain))
    for stage in range(1, len(draft.starts)):
        for start in (draft.starts[stage] - 1, draft.starts[stage] + 1):
            starts = (*draft.starts[:stage], start, *draft.starts[stage + 1 :])
            if draft.starts[stage - 1] < start < ends[stage] and allowed(meshes, draft.meshes, starts):
                yield replace(draft, starts=starts)


def _given_devices(meshes: Meshes, draft: Draft, stage: int) -> Iterator[tuple[Mesh, ...]]:
    """A tensor group's devices more for a stage, from those left over or from another stage; all that are left over; or
    of another type instead."""
    mesh = draft.meshes[stage]
    used = [sum(other.counts[pool] for other in draft.meshes) for pool in range(len(meshes.pools))]
    left = [len(own.ranks) - count for own, count in zip(meshes.pools, used, strict=True)]
    yield _put(draft.meshes, {stage: Mesh(tuple(a + b for a, b in zip(mesh.counts, left, strict=True)), mesh.tensor)})
    for giver, count in enumerate(mesh.counts):
        for taker, free in enumerate(left):
            for size in dict.fromkeys((1, mesh.tensor, min(count, free))):
                if giver != taker and 0 < size <= min(count, free):
                    yield _put(draft.meshes, {stage: _with(_with(mesh, giver, -size), taker, size)})
    for pool, own in enumerate(meshes.pools):
        for size in dict.fromkeys((mesh.tensor, _even_share(mesh, pool))):
            if not size:
                continue
            more = _with(mesh, pool, size)
            if used[pool] + size <= len(own.ranks):
                yield _put(draft.meshes, {stage: more})
            for giver, other in enumerate(draft.meshes):
                if giver != stage and other.counts[pool] > size and (other.counts[pool] - size) % other.tensor == 0:
                    yield _put(draft.meshes, {stage: more, giver: _with(other, pool, -size)})


def _even_share(mesh: Mesh, pool: int) -> int:
    """A quarter more of the devices of a pool that a mesh has, in whole tensor groups."""
    return mesh.counts[pool] // 4 // mesh.tensor * mesh.tensor


def _other_degrees(meshes: Meshes, draft: Draft, stage: int) -> Iterator[tuple[Mesh, ...]]:
    mesh = draft.meshes[stage]
    for degree in fit_tensor_degrees(meshes, mesh.counts):
        if degree != mesh.tensor:
            yield _put(draft.meshes, {stage: Mesh(mesh.counts, degree)})
            alike = {index: Mesh(mesh.counts, degree) for index, other in enumerate(draft.meshes) if other == mesh}
            yield _put(draft.meshes, alike)


def _exchanged(draft: Draft, stage: int) -> Iterator[tuple[Mesh, ...]]:
    for other in (stage - 1, stage + 1):
        if 0 <= other < len(draft.meshes):
            yield _put(draft.meshes, {stage: draft.meshes[other], other: draft.meshes[stage]})


def _joined(draft: Draft, stage: int) -> Iterator[tuple[Mesh, ...]]:
    """A stage with the next one as one, at the degree of either."""
    if stage + 1 == len(draft.meshes):
        return
    one, other = draft.meshes[stage : stage + 2]
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    for degree in dict.fromkeys((one.tensor, other.tensor)):
        if all(count % degree == 0 for count in counts):
            yield (*draft.meshes[:stage], Mesh(counts, degree), *draft.meshes[stage + 2 :])


def _split(meshes: Meshes, draft: Draft, stage: int) -> Iterator[tuple[Mesh, ...]]:
    """A stage as two: in halves, or by types."""
    mesh = draft.meshes[stage]
    half = tuple(count // 2 // mesh.tensor * mesh.tensor for count in mesh.counts)
    parts = [(half, tuple(count - part for count, part in zip(mesh.counts, half, strict=True)))]
    for pool, count in enumerate(mesh.counts):
        own = tuple(count if index == pool else 0 for index in range(len(mesh.counts)))
        rest = tuple(whole - part for whole, part in zip(mesh.counts, own, strict=True))
        parts += [(own, rest), (rest, own)]
    for one, other in parts:
        if any(one) and any(other):
            yield (
                *draft.meshes[:stage],
                Mesh(one, mesh.tensor),
                Mesh(other, mesh.tensor),
                *draft.meshes[stage + 1 :],
            )


def _with(mesh: Mesh, pool: int, size: int) -> Mesh:
    counts = tuple(count + size if index == pool else count for index, count in enumerate(mesh.counts))
    return Mesh(counts, mesh.tensor)


def _put(meshes: Sequence[Mesh], changes: dict[int, Mesh]) -> tuple[Mesh, ...]:
    return tuple(changes.get(index, mesh) for index, mesh in enumerate(meshes))
