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
    """For each number of stages the sequence that keeps the least of *bounds*, if any does; fewest stages first.

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


@dataclass
class _Program:
    options: Sequence[Option]
    quotas: Sequence[int]
    chain: Chain
    micro_batches: int
    schedule: str
    bounds: Array

    def solve(self, max_stages: int) -> list[Sequenced]:
        self._pair_up()
        nowhere = len(self.chain) + 1
        level = np.full((prod(quota + 1 for quota in self.quotas), len(self.bounds)), nowhere, dtype=np.int32)
        level[0] = len(self.chain)
        levels, reaches, found = [level], [], []
        by_time = np.stack([self._by_time(option.costs) for option in self.options])
        for depth in range(1, max_stages + 1):
            reaches.append(self._reached(by_time, depth))
            level = self._next(levels[-1], reaches[-1])
            if (level == nowhere).all():
                break
            levels.append(level)
            done = (level == 0).any(axis=0)
            if done.any():
                bound = int(done.argmax())
                state = int(np.flatnonzero(level[:, bound] == 0)[-1])
                found.append(self._traced(levels, reaches, state, bound))
        return found

    def _pair_up(self) -> None:
        """All (state before, option, state after), by the state after."""
        sizes = [quota + 1 for quota in self.quotas]
        states = np.stack(np.unravel_index(np.arange(prod(sizes)), sizes), axis=1)
        before, chosen, after = [], [], []
        for index, option in enumerate(self.options):
            units = np.array(option.units)
            fits = np.flatnonzero((states + units <= np.array(self.quotas)).all(axis=1))
            before.append(fits)
            chosen.append(np.full(len(fits), index))
            after.append(np.ravel_multi_index(tuple((states[fits] + units).T), sizes))
        order = np.argsort(np.concatenate(after), kind="stable")
        self.before = np.concatenate(before)[order]
        self.chosen = np.concatenate(chosen)[order]
        self.after = np.concatenate(after)[order]

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

    def _next(self, level: Parts, reached: Parts) -> Parts:
        nowhere = len(self.chain) + 1
        found = np.full_like(level, nowhere)
        live = (level != nowhere).any(axis=1)[self.before]
        before, chosen, after = self.before[live], self.chosen[live], self.after[live]
        if not len(before):
            return found
        values = reached[chosen[:, None], np.arange(level.shape[1])[None, :], level[before]]
        begins = np.flatnonzero(np.concatenate([[True], after[1:] != after[:-1]]))
        found[after[begins]] = np.minimum.reduceat(values, begins, axis=0)
        return found

    def _traced(self, levels: Sequence[Parts], reaches: Sequence[Parts], state: int, bound: int) -> Sequenced:
        """The stages that lead to a state, first to last."""
        stretches = []
        for depth in range(len(levels) - 1, 0, -1):
            low, high = np.searchsorted(self.after, [state, state + 1])
            before, chosen = self.before[low:high], self.chosen[low:high]
            values = reaches[depth - 1][chosen, bound, levels[depth - 1][before, bound]]
            pick = int(values.argmin())
            first, last = int(values[pick]), int(levels[depth - 1][before[pick], bound])
            stretches.append(Stretch(self.options[int(chosen[pick])].costs, first, last))
            state = int(before[pick])
        return Sequenced(tuple(stretches), float(self.bounds[bound]))
