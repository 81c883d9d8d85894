"""The best plan of a small case, by trying every plan: what the search is measured against in tests and benchmarks.

All sequences of meshes and all cuts of the search's space are walked through, from the last stage backward, so that the
micro-batches in flight are known. A branch ends when a lower bound of every plan in it reaches the best step so far:

- a stage of c seconds for a micro-batch begins after the forwards of the stages before it, is busy for M c, and after
  it come its own sum and update, or the backwards of the stages before it;
- what is left of the chain takes at least its computation divided among the devices that are left (`bound.least_time`).

Devices of a type must be interchangeable (one node, or equal nodes of one each). A stage's tensor groups are its
devices in the order of their types, cut into groups, and rows of a micro-batch are those with which its slowest replica
is done first. Exponential in stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, product
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.planner.cost.overlap import Beside, overlap
from whale.planner.cost.stage import CostModel
from whale.planner.cost.step import overlap_slowdown
from whale.planner.schedules.in_flight import in_flight
from whale.planner.search.bound import least_time, work_of_kinds
from whale.planner.search.layout import fastest_rows, laid_out
from whale.planner.search.partial_plans import PartialPlan
from whale.planner.search.problem import Candidate, SearchSettings
from whale.planner.search.space import Chain, Mesh, pools_of
from whale.planner.search.table import CostTable

__all__ = ["best_plan"]

MOST_PRICED = 1_000_000
"""Replicas with numbers of rows that are priced: all."""

SLACK = 1e-9
"""A bound this much below the best, as a part of it, is no hope."""


def best_plan(
    profile: ModelProfile, cluster: Cluster, *, batch: int, settings: SearchSettings, known: float = inf
) -> Candidate | None:
    """The plan with the shortest step, if it takes less than *known* seconds; None where there is none.

    Small cases only: up to about six devices and eight layers.
    """
    prices = CostModel.of(profile, cluster, precision=settings.precision, optimizer=settings.optimizer, batch=batch)
    chain = Chain.of(profile.paths, len(profile.layers), settings.fixed)
    meshes = CostTable(prices=prices, pools=pools_of(cluster), chain=chain, most_exact=MOST_PRICED)
    counts = [settings.micro_batches] if settings.micro_batches else {-(-batch // rows) for rows in range(1, batch + 1)}
    most = min(len(chain), len(cluster.devices), settings.max_stages or len(chain))
    best, found = known, None
    for schedule, count in product(settings.priced, sorted(counts)):
        walk = _Walk(meshes=meshes, batch=batch, count=count, schedule=schedule, most=most, best=best)
        walk.descend((), (len(chain),))
        best, found = walk.best, walk.found or found
    return found


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
    meshes: CostTable
    batch: int
    count: int
    schedule: str
    most: int
    best: float
    found: Candidate | None = None
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
        self.work = self._work_of_parts()

    def _work_of_parts(self) -> Any:
        """Device-seconds of each part of the chain for the whole batch, on each type."""
        prices, bounds = self.meshes.prices, self.meshes.chain.bounds
        types = list(prices.num_of_types)
        order = [types.index(pool.type) for pool in self.meshes.pools]
        of_kinds = work_of_kinds(prices, self.batch)
        return np.array(
            [sum(of_kinds[prices.profile.layers[layer]] for layer in range(*part))[order] for part in pairwise(bounds)]
        )

    def descend(self, meshes: tuple[Mesh, ...], starts: tuple[int, ...]) -> None:
        """All plans that end with these meshes, which begin at *starts* (the end of the chain last)."""
        end, chain = starts[0], self.meshes.chain
        if end == 0:
            self._score(meshes, starts[:-1])
            return
        if len(meshes) == self.most:
            return
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
                self.descend((mesh, *meshes), (first, *starts))

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
        draft = PartialPlan(meshes=meshes, starts=starts, micro_batches=self.count, schedule=self.schedule)
        candidate = laid_out(self.meshes, draft, self.batch)
        if candidate.prediction.fits and candidate.prediction.step_seconds < self.best * (1 - SLACK):
            self.best, self.found = candidate.prediction.step_seconds, candidate

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
        return least_time(self.work[:parts, some], nums[some])

    def _cost(self, mesh: Mesh, first: int, end: int, after: int) -> _Cost:
        """Cost of parts [first, end) with *after* later stages."""
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
        busy = once = slowest = 0.0
        forward = backward = inf
        dense, experts = prices.parameters(layers, *degrees)
        state, fits = prices.state_of(layers, *degrees).total, True
        for group, share in dict.fromkeys(zip(groups, rows, strict=True)):
            cost = prices.stage(layers, group, share, self.count)
            busy, once = max(busy, cost.forward + cost.backward), max(once, cost.update)
            slowest = max(slowest, cost.backward)
            if share:
                forward, backward = min(forward, cost.forward), min(backward, cost.backward)
            need = state + (held * cost.kept + cost.working) * prices.waste
            overhead = max(prices.overhead_bytes[type_.name] for type_ in group.types)
            fits = fits and need + overhead <= group.memory_bytes
        tied = sum(shared / mesh.tensor for _, shared in prices.profile.tied)
        size = prices.gradient_bytes
        sync = prices.all_reduce(self.meshes.dense_group(mesh), mesh.tensor, max(0.0, dense - tied) * size, layers)
        sync += prices.all_reduce(data_group, mesh.size, experts * size, layers)
        beside = Beside(overlap_slowdown(prices.num_of_types))
        added = overlap(
            sync, sync - beside.rate * slowest, 0.0, beside, slowest
        ).added  # if the last backward hides all it can
        return _Cost(busy, forward, backward, added + once, fits)
