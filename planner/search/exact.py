"""Small searches, to the end: every plan is scored, or cannot beat the best so far.

For few interchangeable devices and short chains all sequences of meshes and all cuts are walked through, from the last
stage backward, so that the micro-batches in flight are known. A branch ends when a bound of every plan in it reaches
the best step so far:

- a stage of c seconds for a micro-batch begins after the forwards of the stages before it, is busy for M c, and after
  it come its own sum and update, or the backwards of the stages before it;
- what is left of the chain takes at least its work divided among the devices that are left (`bound.work_of_parts`).

Exact over the space of `searching` with these conventions: a stage's tensor groups are its devices in the order of
their types, cut into groups (they may mix types here), and rows of a micro-batch are those with which its slowest slice
is done first. Exponential in stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from whale.planner.schedules.in_flight import in_flight
from whale.planner.search.bound import work_of_parts
from whale.planner.search.choices import Candidate
from whale.planner.search.devices import Mesh, Pool
from whale.planner.search.drafts import Draft
from whale.planner.search.layout import fastest_rows, laid_out
from whale.planner.search.meshes import Meshes

__all__ = ["is_small", "walk"]

MOST_DEVICES, MOST_TYPES, MOST_PARTS = 6, 3, 8
SLACK = 1e-9
"""A bound this much below the best, as a part of it, is no hope."""


def is_small(meshes: Meshes) -> bool:
    """Whether all plans may be walked through: few devices, of which those of a type may change places."""
    pools, cluster = meshes.pools, meshes.prices.cluster
    if len(cluster.devices) > MOST_DEVICES or len(pools) > MOST_TYPES or len(meshes.chain) > MOST_PARTS:
        return False
    if len(cluster.nodes) == 1:
        return True
    pure = all(len({cluster.devices[rank].type for rank in node.ranks}) == 1 for node in cluster.nodes)
    return pure and all(_interchangeable(meshes, pool) for pool in pools)


def _interchangeable(meshes: Meshes, pool: Pool) -> bool:
    nodes = [meshes.prices.cluster.node_of(node[0]) for node in pool.nodes]
    return pool.alike and len({(node.intra, node.inter) for node in nodes}) == 1


def walk(
    meshes: Meshes,
    batch: int,
    *,
    micro_batches: Sequence[int],
    schedules: Sequence[str],
    max_stages: int,
    best_seconds: float,
    found: Callable[[Candidate], None],
    stop: Callable[[], bool],
) -> bool:
    """Tell *found* of every plan that beats those before it; False if it was stopped before the end.

    Args:
        meshes: prices.
        batch: rows of a step.
        micro_batches: numbers that may be chosen.
        schedules: to be tried.
        max_stages: of a pipeline.
        best_seconds: of a plan that is known.
        found: is told of better ones.
        stop: whether to end early.
    """
    best = best_seconds
    for schedule, count in product(schedules, micro_batches):
        walker = _Walk(
            meshes=meshes,
            batch=batch,
            count=count,
            schedule=schedule,
            most=max_stages,
            best=best,
            found=found,
            stop=stop,
        )
        if not walker.descend((), (len(meshes.chain),)):
            return False
        best = walker.best
    return True


class _Cost(NamedTuple):
    """A stage: seconds of its busiest slice for a micro-batch, the least forward and backward of any slice that has
    rows, what comes once, and whether it fits."""

    busy: float
    forward: float
    backward: float
    once: float
    fits: bool


@dataclass
class _Walk:
    meshes: Meshes
    batch: int
    count: int
    schedule: str
    most: int
    best: float
    found: Callable[[Candidate], None]
    stop: Callable[[], bool]
    costs: dict[Any, _Cost] = field(default_factory=dict)
    rests: dict[Any, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.totals = tuple(len(pool.ranks) for pool in self.meshes.pools)
        self.choices = [
            Mesh(counts, *division)
            for counts in product(*(range(total + 1) for total in self.totals))
            for division in self.meshes.all_divisions
            if any(counts) and sum(counts) % prod(division) == 0
        ]
        self.work = work_of_parts(self.meshes, self.batch, [self.count])

    def descend(self, meshes: tuple[Mesh, ...], starts: tuple[int, ...]) -> bool:
        """All plans that end with these meshes, which begin at *starts* (the end of the chain last)."""
        if self.stop():
            return False
        end, chain = starts[0], self.meshes.chain
        if end == 0:
            self._score(meshes, starts[:-1])
            return True
        if len(meshes) == self.most:
            return True
        left = [total - sum(mesh.counts[pool] for mesh in meshes) for pool, total in enumerate(self.totals)]
        for mesh in self.choices:
            if any(count > rest for count, rest in zip(mesh.counts, left, strict=True)):
                continue
            floor = max(int(chain.last_start[end]), int(chain.allows(mesh)[end]))
            for first in range(end - 1, floor - 1, -1):
                cost = self._cost(mesh, first, end, len(meshes))
                if not cost.fits or self._hopeless(cost.busy * self.count + cost.once):
                    break  # with more layers neither gets better
                rest = tuple(rest - count for count, rest in zip(mesh.counts, left, strict=True))
                if first and self._hopeless(self._rest(rest, first)):
                    continue
                if not self.descend((mesh, *meshes), (first, *starts)):
                    return False
        return True

    def _hopeless(self, seconds: float) -> bool:
        return seconds + self.meshes.prices.step_overhead >= self.best * (1 - SLACK)

    def _score(self, meshes: tuple[Mesh, ...], starts: tuple[int, ...]) -> None:
        ends = (*starts[1:], len(self.meshes.chain))
        depth = len(meshes)
        costs = [
            self._cost(mesh, first, end, depth - 1 - stage)
            for stage, (mesh, first, end) in enumerate(zip(meshes, starts, ends, strict=True))
        ]
        ahead = back = least = 0.0
        for cost in costs:
            least = max(least, ahead + self.count * cost.busy + max(cost.once, back))
            ahead, back = ahead + cost.forward, back + cost.backward
        if self._hopeless(least):
            return
        draft = Draft(meshes=meshes, starts=starts, micro_batches=self.count, schedule=self.schedule)
        candidate = laid_out(self.meshes, draft, self.batch)
        if candidate.prediction.fits and candidate.prediction.step_seconds < self.best * (1 - SLACK):
            self.best = candidate.prediction.step_seconds
            self.found(candidate)

    def _rest(self, left: tuple[int, ...], first: int) -> float:
        """Seconds that the parts before *first* take on the devices that are left, at least."""
        key = (left, first)
        if key not in self.rests:
            self.rests[key] = self._divided(np.array(left, dtype=float), first)
        return self.rests[key]

    def _divided(self, nums: Any, parts: int) -> float:
        some = nums > 0
        if not some.any():
            return inf
        work, nums = self.work[:parts, some], nums[some]
        speeds = nums / work.sum(axis=0)
        return float((work * (speeds / speeds.sum() / nums)).min(axis=1).sum())

    def _cost(self, mesh: Mesh, first: int, end: int, after: int) -> _Cost:
        """Of parts [first, end) with so many stages after them."""
        held = in_flight(self.schedule, after + 1, 0, self.count)
        key = (mesh, first, end, held)
        if key not in self.costs:
            self.costs[key] = self._worked_out(mesh, first, end, held)
        return self.costs[key]

    def _worked_out(self, mesh: Mesh, first: int, end: int, held: int) -> _Cost:
        prices, bounds = self.meshes.prices, self.meshes.chain.bounds
        layers = range(bounds[first], bounds[end])
        samples, data_group = self.meshes.sample(mesh)
        degrees = mesh.tensor, mesh.expert
        groups = [group for group, num in samples for _ in range(num)]
        rows = fastest_rows(prices, layers, groups, self.meshes.rows(self.batch, self.count), self.count, held)
        busy = once = 0.0
        forward = backward = inf
        dense, experts = prices.parameters(layers, *degrees)
        state, fits = prices.state_of(layers, *degrees).total, True
        for group, share in dict.fromkeys(zip(groups, rows, strict=True)):
            cost = prices.stage(layers, group, share, self.count)
            busy, once = max(busy, cost.forward + cost.backward), max(once, cost.update)
            if share:
                forward, backward = min(forward, cost.forward), min(backward, cost.backward)
            need = state + (held * cost.kept + cost.working) * prices.waste
            overhead = max(prices.overhead_bytes[type_.name] for type_ in group.types)
            fits = fits and need + overhead <= group.memory_bytes
        tied = sum(shared / mesh.tensor for _, shared in prices.profile.tied)
        size = prices.gradient_bytes
        sync = prices.all_reduce(self.meshes.dense_group(mesh), mesh.tensor, max(0.0, dense - tied) * size)
        sync += prices.all_reduce(data_group, mesh.size, experts * size)
        return _Cost(busy, forward, backward, once, fits)
