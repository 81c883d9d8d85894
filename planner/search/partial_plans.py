"""Plans in the making: meshes and cuts, not yet ranks, with what their step should take.

A partial plan is scored by a closed form below which its step cannot end. If it could be among the best, it is timed by
the recurrence of its schedule over stages and micro-batches, with one time per stage: the same order of tasks as in the
simulator, without differences between replicas. That is fast enough to compare thousands; the best are placed on ranks
and simulated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from math import inf
from operator import add
from typing import NamedTuple, TypeVar

from whale.errors import InfeasibleError
from whale.ir.units import counted
from whale.planner.balance.cuts import CutProblem, evenest_cut, fastest_cut
from whale.planner.schedules.in_flight import in_flight
from whale.planner.search.mesh_costs import MeshCosts
from whale.planner.search.space import Mesh, degrees_text
from whale.planner.search.table import CostTable
from whale.planner.search.tied_sums import late_by_ties, with_tied_sums
from whale.planner.search.timing import pipeline_bound, pipeline_ends

__all__ = [
    "PartialPlan",
    "Scored",
    "Times",
    "allowed",
    "best_cuts",
    "best_timed",
    "cut_exactly",
    "evenest_cuts",
    "exact_cuts",
    "likely_cuts",
    "quick_cuts",
    "score_partial",
    "seconds_of",
]

Key = TypeVar("Key")
Found = TypeVar("Found")

PATIENCE = 300
"""Number of consecutively timed stages without a new best, after which less promising partial plans are not timed."""

MOST_TABLED = 100_000
"""Stages x parts^2 up to which cuts are exact: what their tables hold."""

PRECISION = 1e-3
"""To which the bound on the slowest stage is bisected, as a part of it."""


@dataclass(frozen=True, kw_only=True)
class PartialPlan:
    """A partial plan: all decisions except ranks and rows.

    Attributes:
        meshes: of the stages.
        starts: the first part of each stage.
        micro_batches: of a step.
        schedule: by name.
    """

    meshes: tuple[Mesh, ...]
    starts: tuple[int, ...]
    micro_batches: int
    schedule: str

    @cached_property
    def _hash(self) -> int:
        return hash((self.meshes, self.starts, self.micro_batches, self.schedule))

    def __hash__(self) -> int:
        """Worked out once: plans are looked up often, and deep ones have many meshes."""
        return self._hash

    def stages(self, num_parts: int) -> Iterator[tuple[Mesh, int, int]]:
        """The mesh of each stage, and its range [first, last) of parts."""
        return zip(self.meshes, self.starts, (*self.starts[1:], num_parts), strict=True)

    @property
    def label(self) -> str:
        """In short: degrees of the stages, those that repeat with their number."""
        return f"{_degrees_of(self.meshes)}, {counted(self.micro_batches, 'micro-batch', 'es')}"


@lru_cache(maxsize=256)
def _degrees_of(meshes: tuple[Mesh, ...]) -> str:
    """The degrees of stages, those that repeat with their number."""
    runs: list[tuple[str, int]] = []
    for mesh, alike in groupby(meshes):
        inner, count = degrees_text(*mesh.division), len(list(alike))
        text = f"{mesh.data}x{inner}"
        if runs and runs[-1][0] == text:
            count += runs.pop()[1]
        runs.append((text, count))
    return " | ".join(text if count == 1 else f"{count} of {text}" for text, count in runs)


class Times(NamedTuple):
    """Seconds of the stages of a partial plan: forward and backward of a micro-batch, p2p time to the next stage (and
    as much back), once per step, and of that the optimizer's; the rows of the last micro-batch, relative to the others;
    the part of p2p times that is latency, and the time that messages of other hops have the same adapters; the part of
    forwards that needs nothing of other stages; from the beginning of the step until no forward waits for parameters
    any more; and of what comes once, by how much the last backward is slower."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hops: tuple[float, ...]
    once: tuple[float, ...]
    update: tuple[float, ...]
    last_share: float
    latencies: tuple[float, ...]
    others: tuple[float, ...]
    own: tuple[float, ...]
    gathered: tuple[float, ...]
    slowed: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A partial plan with its score.

    Attributes:
        times: of its stages.
        seconds: of a step; what the recurrence says if ``exact``, else a time before which it cannot end.
        fullness: of the fullest device, the part of its room that it takes.
        loads: of each stage, its seconds for all micro-batches and once a step: the largest bounds the step.
        overhead: seconds of the step that belong to no stage, part of ``seconds``.
    """

    draft: PartialPlan
    times: Times
    seconds: float
    fullness: float
    loads: tuple[float, ...]
    overhead: float
    exact: bool = False

    @property
    def fits(self) -> bool:
        """Whether every stage holds its part."""
        return self.fullness <= 1

    @cached_property
    def timed(self) -> Scored:
        """The step by the recurrence, if it fits: O(stages^2), over as many micro-batches as fill the pipeline and some
        more. Infeasible partial plans are not timed."""
        if self.exact or not self.fits:
            return self
        count, schedule, times = self.draft.micro_batches, self.draft.schedule, self.times
        ends = pipeline_ends(
            *times[:3],
            count,
            schedule,
            last_share=times.last_share,
            latencies=times.latencies,
            others=times.others,
            own=times.own,
            gathered=times.gathered,
            slowed=times.slowed,
        )
        steps = (
            max(own + once - slowed, sent + update)
            for own, sent, once, update, slowed in zip(*ends, times.once, times.update, times.slowed, strict=True)
        )
        return replace(self, seconds=max(self.seconds, max(steps) + self.overhead), exact=True)


def score_partial(meshes: CostTable, draft: PartialPlan, batch: int) -> Scored:
    """Score a partial plan by `pipeline_bound`, a fast approximation of `Scored.timed`."""
    count, depth = draft.micro_batches, len(draft.meshes)
    rows = meshes.rows(batch, count)
    share = batch / rows - count + 1  # of the last micro-batch, which may not be full
    parts = list(draft.stages(len(meshes.chain)))
    stages, updates, every, held, before = [], [], [], _held(draft.schedule, depth, count), None
    for stage, (mesh, first, last) in enumerate(parts):
        if mesh is not before:
            before, costs = mesh, meshes.costs(mesh, rows, count)
        every.append(costs)
        stages.append(meshes.stage_on(costs, rows, count, (first, last), held[stage]))
        updates.append(costs.update_in(first, last))
    forward, backward, once, fullness = zip(*stages, strict=True)
    near = meshes.near_hops(draft.meshes)
    ways = zip(draft.meshes, draft.meshes[1:], near, strict=False)
    sent = _for_each(ways, lambda way: meshes.ways(*way[:2], rows, count, way[2]))
    hops, latencies = (
        tuple(each[which][part] / 2 for each, part in zip(sent, draft.starts[1:], strict=True)) for which in (0, 1)
    )
    if meshes.prices.exchanges and meshes.prices.profile.skips:
        shares = _sent_beside(meshes, draft.starts, rows)
        hops = tuple(late + (hop - late) * own for hop, late, own in zip(hops, latencies, shares, strict=True))
    if meshes.tied and depth > 1:
        late = [share * (own + hop) for own, hop in zip(backward, (*hops, 0.0), strict=True)]
        once = with_tied_sums(meshes, parts, once, late, rows, count)
    gathered = [0.0] * depth
    if meshes.gathers_once:
        ties = late_by_ties(meshes, parts) if meshes.tied and depth > 1 else gathered
        spans = zip(every, parts, ties, strict=True)
        gathered = [max(0.0, costs.gathered_in(first, last) + tie) for costs, (_, first, last), tie in spans]
    others = _others([hop - late for hop, late in zip(hops, latencies, strict=True)], near, meshes.has_one_adapter)
    own = tuple(meshes.own_seconds(costs, first, last) for costs, (_, first, last) in zip(every, parts, strict=True))
    times = Times(
        forward=forward,
        backward=backward,
        hops=(*hops, 0.0),
        once=once,
        update=tuple(updates),
        last_share=share,
        latencies=(*latencies, 0.0),
        others=(*others, 0.0),
        own=own,
        gathered=tuple(gathered),
        slowed=tuple(
            costs.slowed_in(first, last, back)
            for costs, (_, first, last), back in zip(every, parts, backward, strict=True)
        ),
    )
    begins = accumulate(map(add, forward, hops), initial=0.0)
    loads = tuple(
        (count - 1 + share) * (ahead + back) + after + max(0.0, ready - begin)
        for ahead, back, after, ready, begin in zip(forward, backward, once, gathered, begins, strict=True)
    )
    least = pipeline_bound(*times[:4], count, draft.schedule, last_share=share, own=own, gathered=gathered)
    overhead = meshes.overhead(draft.meshes)
    return Scored(
        draft=draft, times=times, seconds=least + overhead, fullness=max(fullness), loads=loads, overhead=overhead
    )


def _others(links: Sequence[float], near: Sequence[bool], one_adapter: bool) -> list[float]:
    """For each hop the longest message of another one that leaves or enters the same device or node: a stage sends to
    the next one and back to the one before, and so does a node, through its one adapter."""
    found = []
    for at, inside in enumerate(near):
        most = 0.0
        for places in (range(at - 1, -1, -1), range(at + 1, len(near))):
            for place in places:
                if near[place] == inside:
                    most = max(most, links[place])
                if near[place] == inside or inside or not one_adapter:
                    break
        found.append(most)
    return found


def _sent_beside(meshes: CostTable, starts: Sequence[int], rows: int) -> list[float]:
    """For each stage but the last how long its messages to and from the next take, as a part of what hops are priced
    for, all that crosses the cut after the first layer like its last: what it sends to later stages goes another way,
    but leaves a device at the same time, and so do gradients to earlier ones. Messages that leave together have equal
    parts of the bandwidth."""
    stages = list(pairwise((*starts, len(meshes.chain))))
    sent = [[meshes.handed_bytes(one, other, rows) for other in stages[at + 1 :]] for at, one in enumerate(stages)]
    found = []
    for at, (_, part) in enumerate(stages[:-1]):
        whole, (own, *others) = meshes.priced_bytes(part, rows), sent[at]
        back = [sent[before][at - before] for before in range(at)]  # from the next stage
        beside = sum(min(own, size) for size in (*others, *back)) / 2
        found.append((own + beside) / whole if whole else 1.0)
    return found


@lru_cache(maxsize=1024)
def _held(schedule: str, depth: int, micro_batches: int) -> tuple[int, ...]:
    """`in_flight` of each stage."""
    return tuple(in_flight(schedule, depth, stage, micro_batches) for stage in range(depth))


def _for_each(keys: Iterable[Key], find: Callable[[Key], Found]) -> list[Found]:
    """Map over keys, reusing the result for equal neighbours."""
    found: list[Found] = []
    before: Key | None = None
    for key in keys:
        found.append(found[-1] if key == before else find(key))
        before = key
    return found


def best_timed(
    drafts: Iterable[Scored], count: int, key: Callable[[PartialPlan], Hashable] = lambda draft: draft.meshes
) -> list[Scored]:
    """The best partial plans that fit, one for each *key*: those that are timed already, and others in the order of
    their bounds, until none could be among them, or many in a row were not."""
    found: dict[Hashable, Scored] = {}
    leading: list[Scored] = []
    missed = 0
    for one in sorted(drafts, key=lambda one: (not one.exact, one.seconds)):
        full = len(leading) == count
        if full and not one.exact and (leading[-1].seconds <= one.seconds or missed >= PATIENCE):
            break
        known = found.get(key(one.draft))
        if (
            one.fits
            and (known is None or one.seconds < known.seconds)
            and not (full and leading[-1].seconds <= one.seconds)
        ):
            better = one.timed
            if known is None or better.seconds < known.seconds:
                found[key(one.draft)] = better
                leading = sorted(found.values(), key=seconds_of)[:count]
            missed = 0 if any(better is other for other in leading) else missed + len(one.draft.meshes)
    return leading


def seconds_of(scored: Scored) -> float:
    """Seconds of a step: a sort key."""
    return scored.seconds


# --- cuts -------------------------------------------------------------------------------------------------------------


def best_cuts(
    meshes: CostTable, sequence: Sequence[Mesh], batch: int, micro_batches: int, schedule: str
) -> tuple[int, ...] | None:
    """The first parts of stages on these meshes with the least step time within memory, by `exact_cuts`, or by
    `quick_cuts` if these do not fit or pipelines are deep; None if nothing fits or the chain is too short. One stage
    has the whole chain, even if it does not fit."""
    if len(sequence) == 1:
        return (0,) if allowed(meshes, sequence, (0,)) else None
    quick = next(iter(quick_cuts(meshes, sequence, batch, micro_batches, schedule)), None)
    return quick and (exact_cuts(meshes, sequence, batch, micro_batches, schedule) or quick)


def exact_cuts(
    meshes: CostTable, sequence: Sequence[Mesh], batch: int, micro_batches: int, schedule: str
) -> tuple[int, ...] | None:
    """Cuts like `best_cuts`, by `whale.planner.balance.cuts.fastest_cut`; None if that does not fit, for deep
    pipelines, and if there is nothing to cut."""
    if len(sequence) == 1 or len(sequence) * len(meshes.chain) ** 2 > MOST_TABLED:
        return None
    try:
        starts = fastest_cut(_problem(meshes, sequence, batch, micro_batches, schedule)).starts
    except InfeasibleError:  # fits, but not where the slice with least room for anything counts for everything
        return None
    draft = PartialPlan(meshes=tuple(sequence), starts=starts, micro_batches=micro_batches, schedule=schedule)
    return starts if allowed(meshes, sequence, starts) and _fullness(meshes, draft, batch) <= 1 + 1e-6 else None


def likely_cuts(
    meshes: CostTable,
    sequence: Sequence[Mesh],
    batch: int,
    micro_batches: int,
    schedule: str,
    *,
    within: float = inf,
) -> list[tuple[int, ...]]:
    """Cuts like `quick_cuts`; for micro-batches that do not fill the pipeline, whose step is not that of the slowest
    stage alone, also the cuts by `exact_cuts`."""
    found = quick_cuts(meshes, sequence, batch, micro_batches, schedule, within=within)
    if found and micro_batches <= len(sequence):
        exact = exact_cuts(meshes, sequence, batch, micro_batches, schedule)
        return found if exact is None or exact in found else [*found, exact]
    return found


def _fullness(meshes: CostTable, draft: PartialPlan, batch: int) -> float:
    """Fraction of memory that the fullest device takes, because cuts do not count all of a stage's memory."""
    count, depth = draft.micro_batches, len(draft.meshes)
    rows = meshes.rows(batch, count)
    return max(
        meshes.costs(mesh, rows, count).stage(first, last, in_flight(draft.schedule, depth, stage, count))[-1]
        for stage, (mesh, first, last) in enumerate(draft.stages(len(meshes.chain)))
    )


def quick_cuts(
    meshes: CostTable,
    sequence: Sequence[Mesh],
    batch: int,
    micro_batches: int,
    schedule: str,
    *,
    within: float = inf,
) -> list[tuple[int, ...]]:
    """Cuts whose slowest stage is about as fast as memory allows, with the remainder at the first stages or at the
    last; none if nothing fits, or if the slowest stage takes more than *within* seconds per micro-batch.

    Every stage from the last reaches back as far as a bound lets it, and the bound is bisected between the times that
    stages can take. Rows of mixed replicas are by speed; if nothing fits, they are limited by memory.
    """
    if len(sequence) > len(meshes.chain):
        return []
    rows = meshes.rows(batch, micro_batches)
    costs = {mesh: meshes.costs(mesh, rows, micro_batches) for mesh in dict.fromkeys(sequence)}

    def by_speed(own: MeshCosts, end: int, held: int) -> int:
        return own.reach_list(held)[end]

    def unlimited(own: MeshCosts, end: int, held: int) -> int:
        return by_speed(own, end, held) if len(own.slices) == 1 else int(own.allowed[end])

    def by_memory(own: MeshCosts, end: int, held: int) -> int:
        mixed = len(own.slices) > 1
        return meshes.first_held(own.mesh, rows, micro_batches, end, held) if mixed else by_speed(own, end, held)

    def cuts(reach: Callable[[MeshCosts, int, int], int]) -> list[tuple[int, ...]]:
        return _cuts_within(meshes, sequence, costs, micro_batches, schedule, within, reach)

    found = cuts(by_speed)
    if found or all(len(own.slices) == 1 for own in costs.values()):
        return found
    return cuts(by_memory) if cuts(unlimited) else []


def _cuts_within(
    meshes: CostTable,
    sequence: Sequence[Mesh],
    costs: Mapping[Mesh, MeshCosts],
    micro_batches: int,
    schedule: str,
    within: float,
    reach: Callable[[MeshCosts, int, int], int],
) -> list[tuple[int, ...]]:
    """`quick_cuts`, where *reach* says the first part that a stage up to an end reaches back to in memory."""
    depth, parts = len(sequence), len(meshes.chain)
    paces = {mesh: own.pace_lists(micro_batches) for mesh, own in costs.items()}
    most = min(within, max(own.longest(micro_batches) for own in costs.values()))
    speeds = {mesh: 1 / max(pace[0][-1], 1e-12) for mesh, pace in paces.items()}
    even = 1 / sum(map(speeds.__getitem__, sequence))  # about: layers may suit unlike meshes
    hardest: dict[Mesh, list[int]] = {}  # what the first stage on a mesh can reach, which has most in flight
    stages, shortest, before = [], [], None
    for stage, (mesh, held) in enumerate(zip(sequence, _held(schedule, depth, micro_batches), strict=True)):
        if mesh is not before:
            before, own = mesh, costs[mesh]
            if mesh not in hardest:
                hardest[mesh] = own.reach_list(held)
            least = hardest[mesh]
        ahead = schedule == "1f1b" and held == micro_batches
        pace = own.pace_lists(micro_batches, ahead) if ahead else paces[mesh]
        stages.append((*pace, least, own, held, stage))
        shortest.append(own.shortest_ends(micro_batches, ahead))
    backward = list(zip(stages[::-1], (*shortest[-2::-1], range(parts + 1)), strict=True))

    def cut(bound: float) -> tuple[tuple[int, ...] | None, float]:
        """The first parts within a bound, with the time of the slowest stage; or none, with a bound below which there
        are none either."""
        starts, end, slowest, more = [], parts, 0.0, inf
        for (sums, ends, least, own, held, stage), shortest_end in backward:
            first = bisect_left(sums, ends[end] - bound)
            if first < least[end] and first < (reached := reach(own, end, held)):
                first = reached
            elif first > stage:
                more = min(more, ends[end] - sums[first - 1])
            if first < stage:
                first = stage
            if first >= end:
                return None, more
            if first < shortest_end[first] < end:  # the stage before hands on less there
                first = shortest_end[first]
            slowest = max(slowest, ends[end] - sums[first])
            starts.append(first)
            end = first
        return (None, more) if end else (tuple(reversed(starts)), slowest)

    found, low, high = None, 0.0, min(most, 1.5 * even)
    while found is None:
        found, bound = cut(high)
        if found is None and (high >= most or bound > most):
            return []
        low, high = (low, bound) if found else (bound, min(most, max(2 * high, bound)))
    likely = 0.9 * even
    while high - low > PRECISION * high:
        better, bound = cut(likely if low < likely < high else (low + high) / 2)
        found, low, high = (found, bound, high) if better is None else (better, low, bound)
    starts = [0]  # now every stage from the first goes on as far as the bound lets it
    for sums, ends, least, own, held, stage in stages[:-1]:
        first, end = starts[-1], max(found[stage + 1], starts[-1] + 1)
        while end < parts - depth + stage + 1 and ends[end + 1] - sums[first] <= high:
            if least[end + 1] > first and reach(own, end + 1, held) > first:
                break
            end += 1
        starts.append(end)
    return list(dict.fromkeys((found, tuple(starts))))


def cut_exactly(meshes: CostTable, scored: Scored, batch: int, score: Callable[[PartialPlan], Scored]) -> Scored:
    """The partial plan with its exact cuts, timed, if they are better than its own."""
    draft = scored.draft
    starts = exact_cuts(meshes, draft.meshes, batch, draft.micro_batches, draft.schedule)
    if starts is None or starts == draft.starts:
        return scored
    exact = score(replace(draft, starts=starts))
    if not exact.fits or exact.seconds >= scored.seconds:
        return scored
    return exact.timed if exact.timed.seconds < scored.seconds else scored


def allowed(meshes: CostTable, sequence: Sequence[Mesh], starts: Sequence[int]) -> bool:
    """Whether what is decided allows these cuts."""
    ends = (*starts[1:], len(meshes.chain))
    return all(first >= meshes.chain.allows(mesh)[end] for mesh, first, end in zip(sequence, starts, ends, strict=True))


def _problem(meshes: CostTable, sequence: Sequence[Mesh], batch: int, micro_batches: int, schedule: str) -> CutProblem:
    rows, depth = meshes.rows(batch, micro_batches), len(sequence)
    costs = {mesh: meshes.costs(mesh, rows, micro_batches) for mesh in dict.fromkeys(sequence)}
    groups = {mesh: own.group(micro_batches) for mesh, own in costs.items()}
    hops = {
        (groups[one].name, groups[other].name): meshes.hops(one, other, rows, micro_batches, near)
        for one, other, near in zip(sequence, sequence[1:], meshes.near_hops(tuple(sequence)), strict=False)
    }
    return CutProblem(
        groups=tuple(groups[mesh] for mesh in sequence),
        micro_batches=micro_batches,
        send=lambda part, source, target: hops[source.name, target.name][part + 1],
        in_flight=tuple(in_flight(schedule, depth, stage, micro_batches) for stage in range(depth)),
        starts=tuple(sorted(meshes.chain.starts - {0})),
    )


def evenest_cuts(
    meshes: CostTable, sequence: Sequence[Mesh], batch: int, micro_batches: int, schedule: str
) -> tuple[int, ...] | None:
    """The cuts that fill memory most evenly, whether they fit or not; None if the chain is too short, or not to be cut
    so."""
    depth, parts = len(sequence), len(meshes.chain)
    if depth > parts:
        return None
    if depth == 1 or depth * parts**2 > MOST_TABLED:
        starts = tuple(parts * stage // depth for stage in range(depth))
    else:
        try:
            starts = evenest_cut(_problem(meshes, sequence, batch, micro_batches, schedule)).starts
        except InfeasibleError:
            return None
    return starts if allowed(meshes, sequence, starts) else None
