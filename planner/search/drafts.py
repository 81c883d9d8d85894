"""Plans in the making: meshes and cuts, not yet ranks, with what their step should take.

A draft is scored by the recurrence of its schedule over stages and micro-batches, one time for each stage: the same
order of tasks as the simulator runs, without the differences between slices. That is fast enough to compare thousands;
what is kept is laid out and simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from whale.errors import InfeasibleError
from whale.planner.cuts import CutProblem, Group, evenest_cut, fastest_cut
from whale.planner.estimate import STEP_OVERHEAD_SECONDS
from whale.planner.search.devices import Mesh
from whale.planner.search.evaluate import in_flight
from whale.planner.search.meshes import MeshCosts, Meshes

__all__ = ["Draft", "Scored", "allowed", "best_cuts", "drafted", "pipeline_ends", "score_draft"]

BARRED_SECONDS = 1e6
"""What a part takes on a mesh of other degrees than are decided for it: more than anything else."""

FILLS = 3
"""A pipeline that was filled so many times goes on evenly."""


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


def score_draft(meshes: Meshes, draft: Draft, batch: int) -> Scored:
    """Score a draft. O(stages^2) for the recurrence over as many micro-batches as fill the pipeline a few times."""
    count, depth = draft.micro_batches, len(draft.meshes)
    costs = [meshes.costs(mesh, meshes.rows(batch, count), count) for mesh in draft.meshes]
    parts = list(pairwise((*draft.starts, len(meshes.chain))))
    forward = [float(one.forward[last] - one.forward[first]) for one, (first, last) in zip(costs, parts, strict=True)]
    backward = [
        float(one.backward[last] - one.backward[first]) for one, (first, last) in zip(costs, parts, strict=True)
    ]
    hops = [float(one.hop[last]) / 2 for one, (_, last) in zip(costs, parts, strict=True)]
    once = [one.seconds_once(*part) for one, part in zip(costs, parts, strict=True)]
    ends = pipeline_ends(forward, backward, hops, count, draft.schedule)
    missing = count - batch / meshes.rows(batch, count)
    if missing and count > 1:  # the last micro-batch is not full
        fewer = pipeline_ends(forward, backward, hops, count - 1, draft.schedule)
        ends = [end - missing * (end - less) for end, less in zip(ends, fewer, strict=True)]
    held = [in_flight(draft.schedule, depth, stage, count) for stage in range(depth)]
    return Scored(
        draft=draft,
        seconds=max(end + after for end, after in zip(ends, once, strict=True)) + STEP_OVERHEAD_SECONDS,
        fullness=max(one.fullness(*part, number) for one, part, number in zip(costs, parts, held, strict=True)),
        loads=tuple(count * (ahead + back) + after for ahead, back, after in zip(forward, backward, once, strict=True)),
    )


def pipeline_ends(
    forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], micro_batches: int, schedule: str
) -> list[float]:
    """When each stage is done with its last backward.

    Args:
        forward, backward: seconds of each stage for a micro-batch.
        hops: seconds from each stage to the next, and back.
        micro_batches: of the step.
        schedule: ``1f1b`` or ``gpipe``.

    >>> pipeline_ends([1, 1], [2, 2], [0, 0], 4, "1f1b")
    [15.0, 13.0]
    """
    depth = len(forward)
    few, more = FILLS * depth, (FILLS + 1) * depth
    if micro_batches <= more + depth:
        return _ends(forward, backward, hops, micro_batches, schedule)
    one, other = (_ends(forward, backward, hops, count, schedule) for count in (few, more))
    times = (micro_batches - more) / depth
    return [second + times * (second - first) for first, second in zip(one, other, strict=True)]


def _ends(
    forward: Sequence[float], backward: Sequence[float], hops: Sequence[float], micro_batches: int, schedule: str
) -> list[float]:
    depth = len(forward)
    free = [0.0] * depth
    done = [[0.0] * depth for _ in range(micro_batches)]  # forwards; then backwards in their place
    for stage, micro_batch, ahead in _tasks(depth, micro_batches, schedule):
        own = done[micro_batch]
        if ahead:
            ready = own[stage - 1] + hops[stage - 1] if stage else 0.0
            spent = forward[stage]
        else:
            ready = own[stage + 1] + hops[stage] if stage + 1 < depth else own[stage]
            spent = backward[stage]
        begin = free[stage]
        free[stage] = own[stage] = (ready if ready > begin else begin) + spent
    return free


@lru_cache(maxsize=256)
def _tasks(depth: int, micro_batches: int, schedule: str) -> tuple[tuple[int, int, bool], ...]:
    """(stage, micro-batch, whether forward) in an order in which each comes after what it needs."""
    lines = []
    for stage in range(depth):
        warm_up = in_flight(schedule, depth, stage, micro_batches)
        line = [(stage, index, True) for index in range(warm_up)]
        for index in range(micro_batches):
            line.append((stage, index, False))
            if index + warm_up < micro_batches:
                line.append((stage, index + warm_up, True))
        lines.append(line)
    place = [0] * depth
    order: list[tuple[int, int, bool]] = []
    done: set[tuple[int, int, bool]] = set()
    while len(order) < 2 * depth * micro_batches:
        for stage, line in enumerate(lines):
            while place[stage] < len(line):
                _, index, ahead = task = line[place[stage]]
                need = (stage - 1, index, True) if ahead else (stage + 1, index, False)
                if 0 <= need[0] < depth and need not in done:
                    break
                done.add(task)
                order.append(task)
                place[stage] += 1
    return tuple(order)


# --- cuts -------------------------------------------------------------------------------------------------------------


def best_cuts(
    meshes: Meshes, sequence: Sequence[Mesh], batch: int, micro_batches: int, schedule: str
) -> tuple[int, ...] | None:
    """The first parts of stages on these meshes with which the step is shortest and memory suffices, by
    `whale.planner.cuts.fastest_cut`; None if nothing fits or the chain is too short."""
    if len(sequence) > len(meshes.chain):
        return None
    try:
        starts = fastest_cut(_problem(meshes, sequence, batch, micro_batches, schedule)).starts
    except InfeasibleError:
        return None
    return starts if allowed(meshes, sequence, starts) else None


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
    if starts is None:
        try:
            starts = evenest_cut(_problem(meshes, sequence, batch, micro_batches, schedule)).starts
        except InfeasibleError:
            return None
        if not allowed(meshes, sequence, starts):
            return None
    draft = Draft(meshes=tuple(sequence), starts=starts, micro_batches=micro_batches, schedule=schedule)
    return score_draft(meshes, draft, batch)
