"""Which meshes follow each other in a pipeline so that the slowest stage is quick, and what is left of each pool.

Let S_r[n] be the first part of the chain that the last r stages can reach back to with exactly n devices of each pool,
every stage taking at most a bound for one micro-batch and fitting in memory with the micro-batches that it has in
flight. Then S_0[0] is the end of the chain and S_r[n] the least, over the meshes o that n allows, of how far a stage on
o reaches back from S_(r-1)[n - o]: reaching further back is never worse, because a stage that may end later may also
end earlier. Since r counts from the last stage, 1F1B's memory (min(r, M) in flight) is exact. A pipeline of r stages
that keeps the bound exists if S_r[n] = 0 for some n. Exact for the meshes given, up to two things: what a stage hands
on is not equally much after each part, and bounds are tried on a grid.

Counts are in units of each pool, so the work depends on the number of units and not on that of devices:
O(stages x pairs of (state, mesh) x bounds), in numpy. The quota program of this project's search; Sailor (Strati et
al., SOSP 2025) enumerates counts for each stage, Whale's Algorithm 1 (Jia et al., USENIX ATC 2022) takes them as given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from whale.planner.search.devices import Mesh
from whale.planner.search.meshes import Array, Chain, MeshCosts

__all__ = ["Option", "Sequenced", "Stretch", "quota_sequences"]

Integers = np.ndarray[Any, np.dtype[np.int64]]
Parts = np.ndarray[Any, np.dtype[np.int32]]


MOST_TRACED = 3
"""Numbers of stages for which a sequence is given."""


class Option(NamedTuple):
    """A mesh that a stage may have: units of each pool that it takes, and what parts cost there."""

    units: tuple[int, ...]
    costs: MeshCosts


class Stretch(NamedTuple):
    """A stage: its mesh's costs and its parts [first, last)."""

    costs: MeshCosts
    first: int
    last: int


class Sequenced(NamedTuple):
    """Stages whose slowest takes at most ``bound`` seconds for a micro-batch."""

    stretches: tuple[Stretch, ...]
    bound: float

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Of the stages."""
        return tuple(stretch.costs.mesh for stretch in self.stretches)

    @property
    def seconds(self) -> float:
        """A micro-batch through all stages."""
        return sum(float(one.costs.both[one.last] - one.costs.both[one.first]) for one in self.stretches)


def quota_sequences(
    options: Sequence[Option],
    quotas: Sequence[int],
    chain: Chain,
    *,
    micro_batches: int,
    schedule: str,
    bounds: Sequence[float],
    max_stages: int,
) -> list[Sequenced]:
    """For some numbers of stages the sequence that keeps the least of *bounds*: those that promise the shortest step.

    Args:
        options: for stages.
        quotas: units of each pool.
        chain: what is cut.
        micro_batches: of a step.
        schedule: ``1f1b`` or ``gpipe``, for what is in flight.
        bounds: ascending seconds that the slowest stage may take for a micro-batch, with its part of what comes once a
            step.
        max_stages: to be tried.
    """
    if not options:
        return []
    return _Program(options, quotas, chain, micro_batches, schedule, np.array(bounds)).solve(max_stages)


class _Level(NamedTuple):
    """What so many stages reach: states (ascending) with for each bound the first part."""

    states: Integers
    values: Parts

    def of(self, states: Integers) -> Parts:
        """The values of states that it has."""
        found: Parts = self.values[np.searchsorted(self.states, states)]
        return found


@dataclass
class _Program:
    options: Sequence[Option]
    quotas: Sequence[int]
    chain: Chain
    micro_batches: int
    schedule: str
    bounds: Array

    def solve(self, max_stages: int) -> list[Sequenced]:
        sizes = [quota + 1 for quota in self.quotas]
        self.coordinates = np.stack(np.unravel_index(np.arange(prod(sizes)), sizes), axis=1)
        self.units = np.array([option.units for option in self.options])
        self.steps = np.ravel_multi_index(tuple(self.units.T), sizes)
        by_time = np.stack([self._by_time(option.costs) for option in self.options])
        whole = np.full((1, len(self.bounds)), len(self.chain), dtype=np.int32)
        levels, reaches, done = [_Level(np.zeros(1, dtype=np.int64), whole)], [], []
        for depth in range(1, max_stages + 1):
            reaches.append(self._reached(by_time, depth))
            level = self._next(levels[-1], reaches[-1])
            if not len(level.states):
                break
            levels.append(level)
            ended = (level.values == 0).any(axis=0)
            if ended.any():
                bound = int(ended.argmax())
                done.append(((self.micro_batches - 1 + depth) * self.bounds[bound], depth, bound))
        found = []
        for _, depth, bound in sorted(done)[:MOST_TRACED]:
            level = levels[depth]
            state = int(level.states[np.flatnonzero(level.values[:, bound] == 0)[-1]])
            found.append(self._traced(levels[: depth + 1], reaches, state, bound))
        return found

    def _by_time(self, costs: MeshCosts) -> Parts:
        """For each bound and end of a stage the first part that it reaches back to in time."""
        whole = costs.both + costs.once / self.micro_batches
        ends = whole + costs.hop + costs.latency / self.micro_batches
        wanted = ends[None, :] - self.bounds[:, None] * (1 + 1e-9)
        first = np.searchsorted(whole, wanted.ravel(), side="left").reshape(wanted.shape)
        first = np.maximum(first, self.chain.last_start)
        return np.maximum(first, self.chain.allows(costs.mesh)).astype(np.int32)

    def _reached(self, by_time: Parts, depth: int) -> Parts:
        """As `_by_time` for all options, within memory; a further column for what cannot be reached."""
        held = self.micro_batches if self.schedule == "gpipe" else min(depth, self.micro_batches)
        memory = np.stack([option.costs.reach(held) for option in self.options]).astype(np.int32)
        first = np.maximum(by_time, memory[:, None, :])
        nowhere = len(self.chain) + 1
        first = np.where(first < np.arange(nowhere), first, nowhere)
        never = np.full((*first.shape[:2], 1), nowhere)
        return np.concatenate([first, never], axis=2).astype(np.int32)

    def _next(self, level: _Level, reached: Parts) -> _Level:
        """One stage more: the least over all options, of states from which something can still be reached."""
        fits = (self.coordinates[level.states][:, None, :] + self.units <= np.array(self.quotas)).all(axis=2)
        before, chosen = np.nonzero(fits)
        after = level.states[before] + self.steps[chosen]
        order = np.argsort(after, kind="stable")
        before, chosen, after = before[order], chosen[order], after[order]
        if not len(after):
            return _Level(after, level.values[:0])
        values = reached[chosen[:, None], np.arange(len(self.bounds))[None, :], level.values[before]]
        begins = np.flatnonzero(np.concatenate([[True], after[1:] != after[:-1]]))
        least = np.minimum.reduceat(values, begins, axis=0)
        live = (least <= len(self.chain)).any(axis=1)
        return _Level(after[begins][live], least[live])

    def _traced(self, levels: Sequence[_Level], reaches: Sequence[Parts], state: int, bound: int) -> Sequenced:
        """The stages that lead to a state, first to last."""
        stretches = []
        for depth in range(len(levels) - 1, 0, -1):
            before = levels[depth - 1]
            possible = (self.units <= self.coordinates[state]).all(axis=1)
            possible &= np.isin(state - self.steps, before.states)
            chosen = np.flatnonzero(possible)
            lasts = before.of(state - self.steps[chosen])[:, bound]
            values = reaches[depth - 1][chosen, bound, lasts]
            pick = int(values.argmin())
            stretches.append(Stretch(self.options[int(chosen[pick])].costs, int(values[pick]), int(lasts[pick])))
            state -= int(self.steps[chosen[pick]])
        return Sequenced(tuple(stretches), float(self.bounds[bound]))
