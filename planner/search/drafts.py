"""Plans in the making: meshes and cuts, not yet ranks, with what their step should take.

A draft is scored by the recurrence of its schedule over stages and micro-batches, one time for each stage: the same
order of tasks as the simulator runs, without the differences between slices. That is fast enough to compare thousands;
what is kept is laid out and simulated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from whale.errors import InfeasibleError
from whale.planner.cuts import CutProblem, Group, evenest_cut, fastest_cut
from whale.planner.estimate import STEP_OVERHEAD_SECONDS
from whale.planner.search.devices import Mesh
from whale.planner.search.meshes import MeshCosts, Meshes
from whale.planner.search.steps import SETTLING, in_flight, order_of_tasks

__all__ = ["Draft", "Scored", "allowed", "best_cuts", "drafted", "pipeline_ends", "quick_cuts", "score_draft"]

MOST_TABLED = 5_000_000
"""Stages x parts^2 up to which cuts are exact: what their tables hold."""

HALVINGS = 14
"""Of the bound on the slowest stage: to about a ten-thousandth of the chain."""

BARRED_SECONDS = 1e6
"""What a part takes on a mesh of other degrees than are decided for it: more than anything else."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a plan decides but for ranks and rows.

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

    @property
    def label(self) -> str:
        """In short: degrees of the stages, those that repeat with their number."""
        runs: list[list[object]] = []
        for mesh in self.meshes:
            text = f"{mesh.data}x{mesh.tensor}"
            if runs and runs[-1][0] == text:
                runs[-1][1] = int(str(runs[-1][1])) + 1
            else:
                runs.append([text, 1])
        shown = " | ".join(f"{text}" if count == 1 else f"{count} of {text}" for text, count in runs)
        return f"{shown}, {self.micro_batches} micro-batches"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A draft with its score.

    Attributes:
        seconds: of a step.
        fullness: of the fullest device, the part of its room that it takes.
        loads: of each stage, its seconds for all micro-batches and once a step: the largest bounds the step.
    """

    draft: Draft
    seconds: float
    fullness: float
    loads: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage holds its part."""
        return self.fullness <= 1


def score_draft(meshes: Meshes, draft: Draft, batch: int, *, below: float = inf) -> Scored:
    """Score a draft. O(stages^2) for the recurrence over as many micro-batches as fill the pipeline and some more.

    A draft whose busiest stage alone takes *below* seconds is given that time: what it takes beside matters to nobody.
    """
    count, depth = draft.micro_batches, len(draft.meshes)
    rows = meshes.rows(batch, count)
    costs = [meshes.costs(mesh, rows, count) for mesh in draft.meshes]
    parts = list(pairwise((*draft.starts, len(meshes.chain))))
    forward = [float(one.forward[last] - one.forward[first]) for one, (first, last) in zip(costs, parts, strict=True)]
    backward = [
        float(one.backward[last] - one.backward[first]) for one, (first, last) in zip(costs, parts, strict=True)
    ]
    hops = [float(one.hop[last]) / 2 for one, (_, last) in zip(costs, parts, strict=True)]
    once = [one.seconds_once(*part) for one, part in zip(costs, parts, strict=True)]
    share = batch / rows - count + 1  # of the last micro-batch, which may not be full
    loads = tuple(
        (count - 1 + share) * (ahead + back) + after for ahead, back, after in zip(forward, backward, once, strict=True)
    )
    seconds = max(loads)
    if seconds < below:
        ends = pipeline_ends(forward, backward, hops, count, draft.schedule, last_share=share)
        seconds = max(end + after for end, after in zip(ends, once, strict=True))
    held = [in_flight(draft.schedule, depth, stage, count) for stage in range(depth)]
    return Scored(
        draft=draft,
        seconds=seconds + STEP_OVERHEAD_SECONDS,
        fullness=max(one.fullness(*part, number) for one, part, number in zip(costs, parts, held, strict=True)),
        loads=loads,
    )


def pipeline_ends(
    forward: Sequence[float],
    backward: Sequence[float],
    hops: Sequence[float],
    micro_batches: int,
    schedule: str,
    *,
    last_share: float = 1.0,
) -> list[float]:
    """When each stage is done with its last backward.

    Args:
        forward, backward: seconds of each stage for a micro-batch.
        hops: seconds from each stage to the next, and back.
        micro_batches: of the step.
        schedule: ``1f1b`` or ``gpipe``.
        last_share: rows of the last micro-batch, as a share of those of the others.

    >>> pipeline_ends([1, 1], [2, 2], [0, 0], 4, "1f1b")
    [15.0, 13.0]
    """
    depth = len(forward)
    few, more = depth + SETTLING, depth + 3 * SETTLING
    if micro_batches <= more:
        return _ends(forward, backward, hops, micro_batches, schedule, last_share)
    one, other = (_ends(forward, backward, hops, count, schedule, last_share) for count in (few, more))
    times = (micro_batches - more) / (more - few)
    return [second + times * (second - first) for first, second in zip(one, other, strict=True)]


def _ends(
    forward: Sequence[float],
    backward: Sequence[float],
    hops: Sequence[float],
    micro_batches: int,
    schedule: str,
    last_share: float,
) -> list[float]:
    depth, last = len(forward), micro_batches - 1
    free = [0.0] * depth
    done = [[0.0] * depth for _ in range(micro_batches)]  # forwards; then backwards in their place
    for stage, micro_batch, ahead in order_of_tasks(depth, micro_batches, schedule):
        own = done[micro_batch]
        if ahead:
            ready = own[stage - 1] + hops[stage - 1] if stage else 0.0
            spent = forward[stage]
        else:
            ready = own[stage + 1] + hops[stage] if stage + 1 < depth else own[stage]
            spent = backward[stage]
        if micro_batch == last:
            spent *= last_share
        begin = free[stage]
        free[stage] = own[stage] = (ready if ready > begin else begin) + spent
    return free


# --- cuts -------------------------------------------------------------------------------------------------------------


def best_cuts(
    meshes: Meshes, sequence: Sequence[Mesh], batch: int, micro_batches: int, schedule: str
) -> tuple[int, ...] | None:
    """The first parts of stages on these meshes with which the step is shortest and memory suffices, by
    `whale.planner.cuts.fastest_cut`, or in very deep pipelines `quick_cuts`; None if nothing fits or the chain is too
    short."""
    if len(sequence) > len(meshes.chain):
        return None
    if len(sequence) * len(meshes.chain) ** 2 > MOST_TABLED:
        return quick_cuts(meshes, sequence, batch, micro_batches, schedule)
    try:
        starts = fastest_cut(_problem(meshes, sequence, batch, micro_batches, schedule)).starts
    except InfeasibleError:
        return None
    return starts if allowed(meshes, sequence, starts) else None


def quick_cuts(
    meshes: Meshes, sequence: Sequence[Mesh], batch: int, micro_batches: int, schedule: str
) -> tuple[int, ...] | None:
    """Cuts whose slowest stage is about the quickest that memory allows: every stage from the last reaches back as far
    as a bound lets it, and the bound is bisected. None if nothing fits."""
    depth, parts = len(sequence), len(meshes.chain)
    if depth > parts:
        return None
    costs = [meshes.costs(mesh, meshes.rows(batch, micro_batches), micro_batches) for mesh in sequence]
    limits = []
    for stage, one in enumerate(costs):
        memory = one.reach(in_flight(schedule, depth, stage, micro_batches))
        fixed = np.maximum(meshes.chain.last_start, meshes.chain.allows(one.mesh))
        limits.append(np.maximum(memory, fixed).astype(np.int64).tolist())
    sums = [(one.both + one.once / micro_batches).tolist() for one in costs]
    extra = [(one.hop + one.latency / micro_batches).tolist() for one in costs]

    def within(bound: float) -> tuple[int, ...] | None:
        starts, end = [], parts
        for stage in range(depth - 1, -1, -1):
            first = bisect_left(sums[stage], sums[stage][end] + extra[stage][end] - bound)
            first = max(first, limits[stage][end], stage)
            if first >= end:
                return None
            starts.append(first)
            end = first
        return tuple(reversed(starts)) if end == 0 else None

    high = max(own[-1] + max(more) for own, more in zip(sums, extra, strict=True))
    found, low = within(high), 0.0
    if found is None:
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        better = within(middle)
        found, low, high = (found, middle, high) if better is None else (better, low, middle)
    return found


def allowed(meshes: Meshes, sequence: Sequence[Mesh], starts: Sequence[int]) -> bool:
    """Whether what is decided allows these cuts."""
    chain = meshes.chain
    ends = (*starts[1:], len(chain))
    return all(
        first >= max(chain.last_start[end], chain.allows(mesh)[end])
        for mesh, first, end in zip(sequence, starts, ends, strict=True)
    )


def _problem(meshes: Meshes, sequence: Sequence[Mesh], batch: int, micro_batches: int, schedule: str) -> CutProblem:
    costs = [meshes.costs(mesh, meshes.rows(batch, micro_batches), micro_batches) for mesh in sequence]
    depth = len(sequence)
    groups = tuple(_group(meshes, one, micro_batches) for one in costs)
    hops = {group.name: one.hop for group, one in zip(groups, costs, strict=True)}
    return CutProblem(
        groups=groups,
        micro_batches=micro_batches,
        send=lambda part, source, target: float(hops[source.name][part + 1]),
        in_flight=tuple(in_flight(schedule, depth, stage, micro_batches) for stage in range(depth)),
        starts=tuple(sorted(meshes.chain.starts - {0})),
    )


def _group(meshes: Meshes, costs: MeshCosts, micro_batches: int) -> Group:
    """A mesh as the cuts see it: memory as parts of the room of whichever class has least for it."""
    fixed = (costs.fixed[1:] - costs.fixed[:-1]).tolist()
    rooms = [max(room, 1.0) for room in costs.room]
    seconds = costs.both + costs.once / micro_batches
    barred = meshes.chain.allows(costs.mesh)
    own = (seconds[1:] - seconds[:-1]).tolist()
    for part in range(len(own)):
        if barred[part + 1] == part + 1:
            own[part] = BARRED_SECONDS
    kept = [(one[1:] - one[:-1]) / room for one, room in zip(costs.kept, rooms, strict=True)]
    working = [one / room for one, room in zip(costs.working, rooms, strict=True)]
    return Group(
        name=f"{costs.mesh.counts} / {costs.mesh.tensor}",
        seconds=tuple(own),
        fixed_bytes=tuple(size / min(rooms) for size in fixed),
        kept_bytes=tuple(max(values) for values in zip(*(one.tolist() for one in kept), strict=True)),
        working_bytes=tuple(max(values) for values in zip(*(one.tolist() for one in working), strict=True)),
        capacity_bytes=1.0,
    )


def drafted(meshes: Meshes, sequence: Sequence[Mesh], batch: int, micro_batches: int, schedule: str) -> Scored | None:
    """The best draft on these meshes in their order, scored; where none fits the one that fills memory most evenly;
    None if the chain is too short, or not to be cut so."""
    starts = best_cuts(meshes, sequence, batch, micro_batches, schedule)
    if starts is None and len(sequence) * len(meshes.chain) ** 2 > MOST_TABLED:
        starts = tuple(len(meshes.chain) * stage // len(sequence) for stage in range(len(sequence)))
    elif starts is None:
        try:
            starts = evenest_cut(_problem(meshes, sequence, batch, micro_batches, schedule)).starts
        except InfeasibleError:
            return None
    if len(sequence) > len(meshes.chain) or not allowed(meshes, sequence, starts):
        return None
    draft = Draft(meshes=tuple(sequence), starts=starts, micro_batches=micro_batches, schedule=schedule)
    return score_draft(meshes, draft, batch)
