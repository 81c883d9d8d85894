"""Refinement of a partial plan by local moves at its bottleneck.

The stage with the most work per step is the bottleneck. Moves take work from it (a part to a neighbour, a device from
another stage or an idle one), change its degrees, swap it with a neighbour, join, split or add stages, or change the
number of micro-batches. Moves to other meshes are ranked by their step if stages took equally long, and the first are
cut and scored; one whose slowest stage alone takes longer than the best step is dropped before it is cut. The best one
gets its exact cuts. A move that helps much is taken at once, the best one if none does, as long as one helps. A
heuristic; never worse than its start, and it ends at a partial plan that no likely move improves, where an earlier
descent has been, or when it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf, prod
from random import Random

from whale.planner.search.families import fit_divisions
from whale.planner.search.partial_plans import (
    PartialPlan,
    Scored,
    allowed,
    best_timed,
    cut_exactly,
    likely_cuts,
    quick_cuts,
    seconds_of,
)
from whale.planner.search.space import Mesh
from whale.planner.search.table import CostTable

__all__ = ["disturbed", "redivided", "refined", "shifted", "with_moved_cuts"]

NEAR = 1.03
"""Moves that come so near the best step are scored, and kept as other plans."""

MOST_SHIFTED = 24
"""Stages whose cuts are moved, those that have most to do first."""

MOST_REMESHED = 6
"""Stages of which other degrees are tried, those that have most to do first."""

MOST_BOUND = 3
"""Stages whose devices are changed, and that are exchanged, joined or split, those that have most to do first: with few
micro-batches every stage is on the critical path."""

STAGES_LOOKED_AT = 128
"""Total stages of the sequences of meshes next to that of a partial plan which are cut and scored, those first that
would be best if stages took equally long: the best move is rarely far down that list."""

PLACES = 4
"""Along a pipeline, where another stage is tried."""

DISTURBANCES = 2
"""Random moves before another descent."""

FAR = 1.25
"""Ratio to the step of the start above which no descent begins: almost none from so far ends at a better plan."""

ENOUGH = 0.02
"""Relative improvement of a move that is taken without a look at the others: these are tried from there."""

GAIN = 1e-6
"""Smallest relative improvement of a move."""


def refined(
    meshes: CostTable,
    start: Scored,
    batch: int,
    *,
    micro_batches: Sequence[int],
    max_stages: int,
    score: Callable[[PartialPlan], Scored],
    tried: Callable[[Scored], None],
    kept: Callable[[Scored], None],
    stop: Callable[[], bool],
    left: set[PartialPlan],
) -> Scored:
    """The end of a descent from *start*, or where it meets an earlier one.

    Args:
        meshes: prices.
        start: a partial plan that fits.
        batch: rows of a step.
        micro_batches: numbers that may be chosen, ascending.
        max_stages: that a pipeline may have.
        score: scores a partial plan.
        tried: called for every partial plan that is scored.
        kept: called for those that are timed.
        stop: whether to end early.
        left: partial plans whose likely moves were all tried, by any descent; those of this one are added.
    """
    best, known = start.timed, {start.draft}
    reached = {best.draft.meshes: best.seconds}  # with these meshes; what comes to no less is not looked at closely
    while best.draft not in left:
        found: list[Scored] = []
        for draft in _moves(meshes, best, batch, micro_batches, max_stages):
            if stop():
                return min([best, *best_timed(found, 1)], key=seconds_of)
            if draft in known:
                continue
            known.add(draft)
            scored = score(draft)
            tried(scored)
            if scored.fits and scored.seconds < min(NEAR * best.seconds, reached.get(draft.meshes, inf)):
                found.append(scored)
                enough = best.seconds * (1 - ENOUGH)
                if scored.seconds <= enough and scored.timed.seconds <= enough:
                    break
        else:
            left.add(best.draft)
        if not (leading := best_timed(found, 1)):
            break
        better = cut_exactly(meshes, leading[0], batch, score)
        reached[better.draft.meshes] = min(better.seconds, reached.get(better.draft.meshes, inf))
        kept(better)
        if better.seconds >= best.seconds * (1 - GAIN):
            break
        best = better
    return best


def disturbed(
    meshes: CostTable, start: Scored, batch: int, max_stages: int, draw: Random, score: Callable[[PartialPlan], Scored]
) -> Scored:
    """A partial plan some random moves away, for another descent; unchanged if no move is possible."""
    scored = start
    for _ in range(DISTURBANCES):
        sequences = _neighbours(meshes, scored, max_stages)
        drafts = (_recut(meshes, scored.draft, sequence, batch) for sequence in draw.sample(sequences, len(sequences)))
        others = (score(draft) for draft in drafts if draft is not None)
        scored = next((other for other in others if other.fits and other.seconds < FAR * start.seconds), scored)
    return scored


def _recut(meshes: CostTable, draft: PartialPlan, sequence: tuple[Mesh, ...], batch: int) -> PartialPlan | None:
    """The partial plan on other meshes, if they are possible."""
    if not _is_legal(meshes, sequence, batch, draft.micro_batches):
        return None
    cuts = quick_cuts(meshes, sequence, batch, draft.micro_batches, draft.schedule)
    return replace(draft, meshes=sequence, starts=cuts[0]) if cuts else None


def _is_legal(meshes: CostTable, sequence: Sequence[Mesh], batch: int, micro_batches: int) -> bool:
    rows = meshes.rows(batch, micro_batches)
    return all(sum(mesh.counts) % mesh.size == 0 and meshes.takes(mesh, rows) for mesh in set(sequence))


def _moves(
    meshes: CostTable, scored: Scored, batch: int, micro_batches: Sequence[int], max_stages: int
) -> Iterator[PartialPlan]:
    draft = scored.draft
    yield from shifted(meshes, scored, batch)
    place = micro_batches.index(draft.micro_batches)
    fewer, more = micro_batches[max(0, place - 1) : place], micro_batches[place + 1 : place + 2]
    others: list[tuple[tuple[Mesh, ...], int]] = []
    for sequence in _neighbours(meshes, scored, max_stages):
        deeper = len(sequence) - len(draft.meshes)  # a longer pipeline wants more micro-batches
        for count in (draft.micro_batches, *(more if deeper > 0 else fewer if deeper < 0 else ())):
            others.append((sequence, count))
    for count in (*fewer, *more):
        others.append((draft.meshes, count))
        if _is_legal(meshes, draft.meshes, batch, count):
            yield replace(draft, micro_batches=count)
    hidden = max(1.0, _slowest(meshes, draft, batch) * batch / meshes.rows(batch, draft.micro_batches) / scored.seconds)
    looked = 0
    for sequence, count in _by_evenness(meshes, others, batch):
        within = NEAR * hidden * scored.seconds * meshes.rows(batch, count) / batch
        cuts = likely_cuts(meshes, sequence, batch, count, draft.schedule, within=within)
        for starts in cuts:
            yield PartialPlan(meshes=sequence, starts=starts, micro_batches=count, schedule=draft.schedule)
        looked += len(sequence) if cuts else 0
        if looked >= STAGES_LOOKED_AT:
            break
    yield from redivided(meshes, scored, batch)
    yield from _without_a_slice(meshes, scored)


def _by_evenness(
    meshes: CostTable, sequences: Sequence[tuple[tuple[Mesh, ...], int]], batch: int
) -> list[tuple[tuple[Mesh, ...], int]]:
    """The possible ones of some sequences with numbers of micro-batches, those first whose step is shortest if all
    stages take equally long."""
    found = []
    paces: dict[int, dict[Mesh, tuple[float, float] | None]] = {}
    for sequence, count in sequences:
        paces.setdefault(count, {}).update(dict.fromkeys(sequence))
    for count, own in paces.items():
        _find_speeds(meshes, own, batch, count)
    for sequence, count in sequences:
        each = [paces[count][mesh] for mesh in sequence]
        speed = sent = 0.0
        for pace in each:
            if pace is None:
                break
            speed, sent = speed + pace[0], sent + pace[1]
        else:
            found.append(((count - 1 + len(sequence)) / speed + sent, sequence, count))
    found.sort(key=lambda one: one[0])
    return [(sequence, count) for _, sequence, count in found]


def _find_speeds(
    meshes: CostTable, paces: dict[Mesh, tuple[float, float] | None], batch: int, micro_batches: int
) -> None:
    """Chains a second that each mesh takes, and its p2p time; None of those that are not possible."""
    rows = meshes.rows(batch, micro_batches)
    possible = [mesh for mesh in paces if sum(mesh.counts) % mesh.size == 0 and meshes.takes(mesh, rows)]
    meshes.find_paces(possible, rows, micro_batches)
    for mesh in possible:
        pace = meshes.paces(mesh, rows, micro_batches)
        paces[mesh] = 1 / max(pace.of_chain, 1e-12), pace.hop


def _neighbours(meshes: CostTable, scored: Scored, max_stages: int) -> list[tuple[Mesh, ...]]:
    """Other meshes at the bottleneck of the partial plan."""
    draft = scored.draft
    found: list[tuple[Mesh, ...]] = []
    order = sorted(range(len(draft.meshes)), key=lambda stage: -scored.loads[stage])
    for stage in order[:MOST_REMESHED]:
        found += _other_degrees(meshes, draft, stage)
    for stage in order[:MOST_BOUND]:
        found += _given_devices(meshes, scored, stage)
        found += _exchanged(draft, stage)
        found += _joined(meshes, draft, stage)
        found += _fewer_devices(meshes, draft, stage)
        if len(draft.meshes) < max_stages:
            found += _split(meshes, draft, stage)
    if len(draft.meshes) < max_stages:
        found += _added(meshes, draft, order[0])
    return [sequence for sequence in dict.fromkeys(found) if sequence != draft.meshes]


def _slowest(meshes: CostTable, draft: PartialPlan, batch: int) -> float:
    """Seconds of the slowest stage for a micro-batch with what it hands on, as cuts are made by; messages are hidden in
    a step, so that it may be longer than a step's part."""
    rows = meshes.rows(batch, draft.micro_batches)
    found = 0.0
    for mesh, first, last in draft.stages(len(meshes.chain)):
        sums, ends = meshes.costs(mesh, rows, draft.micro_batches).pace(draft.micro_batches)
        found = max(found, float(ends[last] - sums[first]))
    return found


def shifted(meshes: CostTable, scored: Scored, batch: int) -> Iterator[PartialPlan]:
    """Cuts at the stages that have most to do moved by one part, but to stages that would have more to do than the step
    takes."""
    draft = scored.draft
    count, rows = draft.micro_batches, meshes.rows(batch, draft.micro_batches)

    def load(stage: int, first: int, last: int) -> float:
        ahead, back, once = meshes.costs(draft.meshes[stage], rows, count).seconds(first, last)
        return batch / rows * (ahead + back) + once

    ends = (*draft.starts[1:], len(meshes.chain))
    busiest = sorted(range(len(draft.meshes)), key=lambda stage: -scored.loads[stage])[:MOST_SHIFTED]
    for stage in sorted({stage + side for stage in busiest for side in (0, 1)} & set(range(1, len(draft.starts)))):
        before, start, end = draft.starts[stage - 1], draft.starts[stage], ends[stage]
        for moved, taker, parts in ((start - 1, stage, (start - 1, end)), (start + 1, stage - 1, (before, start + 1))):
            if before < moved < end and load(taker, *parts) < scored.seconds:
                starts = (*draft.starts[:stage], moved, *draft.starts[stage + 1 :])
                if allowed(meshes, draft.meshes, starts):
                    yield replace(draft, starts=starts)


def with_moved_cuts(meshes: CostTable, scored: Scored, batch: int, score: Callable[[PartialPlan], Scored]) -> Scored:
    """The partial plan, which fits, with cuts moved by a part as long as that helps: cuts are made as if stages waited
    for what they hand on, and that may be hidden."""
    best = scored.timed
    while True:
        better = best_timed(map(score, shifted(meshes, best, batch)), 1)
        if not better or better[0].seconds >= best.seconds:
            return best
        best = better[0]


def redivided(meshes: CostTable, scored: Scored, batch: int) -> Iterator[PartialPlan]:
    """The same cuts with a stage at another degree, at which its tasks take less time: what a stage of few parameters
    gains by more replicas does not show where meshes are compared by the whole chain."""
    draft = scored.draft
    count, rows = draft.micro_batches, meshes.rows(batch, draft.micro_batches)
    every = list(draft.stages(len(meshes.chain)))
    for stage in sorted(range(len(every)), key=lambda stage: -scored.loads[stage])[:MOST_REMESHED]:
        mesh, first, last = every[stage]
        spent = scored.times.forward[stage] + scored.times.backward[stage]
        for division in fit_divisions(meshes, mesh.counts):
            changed = Mesh(mesh.counts, *division)
            sequence = _put(draft.meshes, {stage: changed})
            if changed != mesh and meshes.takes(changed, rows) and allowed(meshes, sequence, draft.starts):
                ahead, back, _ = meshes.costs(changed, rows, count).seconds(first, last)
                if ahead + back < spent:
                    yield replace(draft, meshes=sequence)


def _without_a_slice(meshes: CostTable, scored: Scored) -> Iterator[PartialPlan]:
    """The same cuts with a stage without the devices of one data slice, where others divide the rows more evenly."""
    draft = scored.draft
    for stage in sorted(range(len(draft.meshes)), key=lambda stage: -scored.loads[stage])[:MOST_REMESHED]:
        mesh = draft.meshes[stage]
        for pool, count in enumerate(mesh.counts) if mesh.data > 1 else ():
            sequence = _put(draft.meshes, {stage: _with(mesh, pool, -mesh.size)})
            if mesh.size <= count and allowed(meshes, sequence, draft.starts):
                yield replace(draft, meshes=sequence)


def _given_devices(meshes: CostTable, scored: Scored, stage: int) -> Iterator[tuple[Mesh, ...]]:
    """A data slice's devices more for a stage, from those left over or from another stage (of those with equal meshes
    the one that has least to do); all that are left over; or of another type instead."""
    draft = scored.draft
    mesh = draft.meshes[stage]
    by_load = sorted(range(len(draft.meshes)), key=lambda other: -scored.loads[other])
    givers = {draft.meshes[other]: other for other in by_load if other != stage}
    used = [sum(other.counts[pool] for other in draft.meshes) for pool in range(len(meshes.pools))]
    left = [len(own.ranks) - count for own, count in zip(meshes.pools, used, strict=True)]
    whole = tuple(a + b for a, b in zip(mesh.counts, left, strict=True))
    yield _put(draft.meshes, {stage: mesh._replace(counts=whole)})
    for giver, count in enumerate(mesh.counts):
        for taker, free in enumerate(left):
            for size in dict.fromkeys((1, mesh.size, min(count, free))):
                if giver != taker and 0 < size <= min(count, free):
                    yield _put(draft.meshes, {stage: _with(_with(mesh, giver, -size), taker, size)})
            for other, place in givers.items() if giver != taker else ():
                for size in dict.fromkeys((1, mesh.size, other.size)):
                    if size <= min(count, other.counts[taker]):
                        mine = _with(_with(mesh, giver, -size), taker, size)
                        theirs = _with(_with(other, taker, -size), giver, size)
                        yield _put(draft.meshes, {stage: mine, place: theirs})
    for pool, own in enumerate(meshes.pools):
        for size in dict.fromkeys((mesh.size, _even_share(mesh, pool))):
            if not size:
                continue
            more = _with(mesh, pool, size)
            if used[pool] + size <= len(own.ranks):
                yield _put(draft.meshes, {stage: more})
            for other, giver in givers.items():
                if other.counts[pool] > size and (other.counts[pool] - size) % other.size == 0:
                    yield _put(draft.meshes, {stage: more, giver: _with(other, pool, -size)})


def _even_share(mesh: Mesh, pool: int) -> int:
    """A quarter more of the devices of a pool that a mesh has, in whole data slices."""
    return mesh.counts[pool] // 4 // mesh.size * mesh.size


def _other_degrees(meshes: CostTable, draft: PartialPlan, stage: int) -> Iterator[tuple[Mesh, ...]]:
    mesh = draft.meshes[stage]
    for division in fit_divisions(meshes, mesh.counts):
        changed = Mesh(mesh.counts, *division)
        if changed != mesh:
            yield _put(draft.meshes, {stage: changed})
            alike = {index: changed for index, other in enumerate(draft.meshes) if other == mesh}
            yield _put(draft.meshes, alike)


def _exchanged(draft: PartialPlan, stage: int) -> Iterator[tuple[Mesh, ...]]:
    """A stage in the place of the nearest one of each other mesh, before it and after it, and that in its place."""
    for others in (range(stage - 1, -1, -1), range(stage + 1, len(draft.meshes))):
        nearest = {draft.meshes[other]: other for other in reversed(others)}
        for mesh, other in nearest.items():
            yield _put(draft.meshes, {stage: mesh, other: draft.meshes[stage]})


def _joined(meshes: CostTable, draft: PartialPlan, stage: int) -> Iterator[tuple[Mesh, ...]]:
    """A stage with the next one as one, at any degree."""
    if stage + 1 == len(draft.meshes):
        return
    one, other = draft.meshes[stage : stage + 2]
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    for division in fit_divisions(meshes, counts):
        yield (*draft.meshes[:stage], Mesh(counts, *division), *draft.meshes[stage + 2 :])


def _added(meshes: CostTable, draft: PartialPlan, stage: int) -> Iterator[tuple[Mesh, ...]]:
    """A stage more, of all devices that are left over before or after a stage; or of one type with as many data slices
    as that has, at some places: what later stages have in flight grows with it, and its own the earlier it is."""
    used = [sum(mesh.counts[pool] for mesh in draft.meshes) for pool in range(len(meshes.pools))]
    left = tuple(len(own.ranks) - count for own, count in zip(meshes.pools, used, strict=True))
    all_left = [Mesh(left, *division) for division in fit_divisions(meshes, left)] if any(left) else []
    data, depth = draft.meshes[stage].data, len(draft.meshes)
    some = []
    for pool, count in enumerate(left):
        divisions = [one for one in meshes.divisions(meshes.pools[pool]) if data * prod(one) <= count]
        largest = [one for one in divisions if one[1:] == (1, 1)][-1:] + divisions[-1:]
        for division in sorted({draft.meshes[stage][1:], *largest}.intersection(divisions)):
            some.append(_with(Mesh((0,) * len(left), *division), pool, data * prod(division)))
    for mesh in dict.fromkeys((*all_left, *some)):
        places = (stage, stage + 1, *(depth * part // PLACES for part in range(PLACES))) if mesh in some else ()
        for place in dict.fromkeys(places or (stage, stage + 1)):
            yield (*draft.meshes[:place], mesh, *draft.meshes[place:])


def _split(meshes: CostTable, draft: PartialPlan, stage: int) -> Iterator[tuple[Mesh, ...]]:
    """A stage as two: its replicas in halves, its devices in halves at another degree, or its types."""
    mesh = draft.meshes[stage]
    for half in (_half(mesh, mesh.size), _half(mesh, 1)):
        rest = tuple(count - part for count, part in zip(mesh.counts, half, strict=True))
        yield from _as_two(draft, stage, mesh._replace(counts=half), mesh._replace(counts=rest))
        for division in fit_divisions(meshes, half) if any(half) and half == rest else ():
            both = Mesh(half, *division)
            yield from _as_two(draft, stage, both, both)
    for pool, count in enumerate(mesh.counts):
        own = tuple(count if index == pool else 0 for index in range(len(mesh.counts)))
        rest = tuple(whole - part for whole, part in zip(mesh.counts, own, strict=True))
        for one, other in ((own, rest), (rest, own)):
            yield from _as_two(draft, stage, mesh._replace(counts=one), mesh._replace(counts=other))


def _half(mesh: Mesh, size: int) -> tuple[int, ...]:
    """Half of the devices of a mesh, in groups of *size*."""
    return tuple(count // 2 // size * size for count in mesh.counts)


def _as_two(draft: PartialPlan, stage: int, one: Mesh, other: Mesh) -> Iterator[tuple[Mesh, ...]]:
    if any(one.counts) and any(other.counts):
        yield (*draft.meshes[:stage], one, other, *draft.meshes[stage + 1 :])


def _fewer_devices(meshes: CostTable, draft: PartialPlan, stage: int) -> Iterator[tuple[Mesh, ...]]:
    """A stage with half of its devices, at any degree, or not at all: on slow networks fewer devices are faster."""
    mesh = draft.meshes[stage]
    half = _half(mesh, 1)
    for division in fit_divisions(meshes, half) if any(half) else ():
        yield _put(draft.meshes, {stage: Mesh(half, *division)})
    if len(draft.meshes) > 1:
        yield (*draft.meshes[:stage], *draft.meshes[stage + 1 :])


def _with(mesh: Mesh, pool: int, size: int) -> Mesh:
    counts = tuple(count + size if index == pool else count for index, count in enumerate(mesh.counts))
    return mesh._replace(counts=counts)


def _put(meshes: Sequence[Mesh], changes: dict[int, Mesh]) -> tuple[Mesh, ...]:
    found = list(meshes)
    for index, mesh in changes.items():
        found[index] = mesh
    return tuple(found)
