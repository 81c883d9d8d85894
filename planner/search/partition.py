"""Partition of the devices among the stages of a pipeline: sequences of meshes whose slowest stage is fast.

`DeviceCountProgram`, for pipelines of few stages, is a dynamic program over the remaining devices of each pool. Let
S_r[n] be the first part of the chain that the last r stages can reach back to with exactly n devices of each pool,
every stage taking at most a bound for one micro-batch and fitting in memory with the micro-batches that it has in
flight. Then S_0[0] is the end of the chain and S_r[n] the least, over the meshes o that n allows, of how far a stage on
o reaches back from S_(r-1)[n - o]: reaching further back is never worse, because a stage that may end later may also
end earlier. Since r counts from the last stage, 1F1B's memory (min(r, M) in flight) is exact. A pipeline of r stages
that keeps the bound exists if S_r[n] = 0 for some n. Exact for the meshes given, except that what a stage hands on
depends on the part after which it is cut, and that bounds are tried on a grid. Counts are in units of each pool, so the
work depends on the number of units and not on that of devices: O(stages x pairs of (state, mesh) x bounds), in numpy.
PipeDream (Narayanan et al., SOSP 2019) and Alpa (Zheng et al., OSDI 2022) have such programs for one type of device;
Sailor (Strati et al., SOSP 2025) enumerates the counts of each stage.

`GroupedStages`, for deep pipelines, is its grouped case. Where all stages of a type of device have the same mesh, a
pipeline is a sequence of types. What tells its places apart (micro-batches in flight) changes slowly along it, so the
stages of a type are taken to be next to each other, in any order of the types; in the best of these orders also with a
first or a last stage of another type, as the chain begins and ends with other layers. In such a sequence every stage
from the last one reaches back as far as a bound and its memory let it, and the bound is bisected: O(stages x log parts)
for each bound and order, whatever the number of devices. Other sequences are not tried.

Both return sequences of meshes; `whale.planner.search.partial_plans` cuts the chain for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import permutations
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from whale.planner.schedules.in_flight import in_flight
from whale.planner.search.mesh_costs import Integers, MeshCosts
from whale.planner.search.space import Chain, Mesh

__all__ = ["DeviceCountProgram", "GroupedStages", "Option", "StageGroup"]

Parts = np.ndarray[Any, np.dtype[np.int32]]
Bounds = np.ndarray[Any, np.dtype[np.float64]]


MOST_TRACED = 3
"""Numbers of stages for which sequences are given."""

COARSE, FINER = 1.05, 6
"""Ratio of bounds above which an interval is divided once more, and the number of parts, where sequences are traced."""


class Option(NamedTuple):
    """A mesh that a stage may have: units of each pool that it takes, and what parts cost there."""

    units: tuple[int, ...]
    costs: MeshCosts


class _Level(NamedTuple):
    """How far some numbers of stages reach back.

    Attributes:
        states: numbers of units that are taken (as positions), from which something can still be reached; ascending.
        first: for each state (first axis) and bound the first part.
    """

    states: Integers
    first: Parts


class DeviceCountProgram:
    """Sequences of meshes for some numbers of stages whose slowest stage meets the least of some bounds: the most
    promising ones. `promises` lists them, and `at` traces one.

    Args:
        options: for stages; at least one.
        quotas: units of each pool.
        chain: what is cut.
        micro_batches: of a step.
        schedule: ``1f1b`` or ``gpipe``, for what is in flight.
        bounds: ascending seconds that the slowest stage may take for a micro-batch, with its part of what comes once a
            step.
        even: seconds that a stage takes for a micro-batch at least, on average.
        within: approximate limit of a step in seconds; slower ones are omitted.
        max_stages: to be tried.
    """

    def __init__(
        self,
        options: Sequence[Option],
        quotas: Sequence[int],
        chain: Chain,
        *,
        micro_batches: int,
        schedule: str,
        bounds: Sequence[float],
        even: float,
        within: float,
        max_stages: int,
    ) -> None:
        self.chain, self.micro_batches, self.schedule = chain, micro_batches, schedule
        self.quotas = quotas
        kept = [bound for bound in bounds if (micro_batches - 1) * bound + even <= within] or [bounds[0]]
        self.bounds, self.even, self.within = np.array(kept), even, within
        sizes = [quota + 1 for quota in quotas]
        self.coordinates = np.stack(np.unravel_index(np.arange(prod(sizes)), sizes), axis=1)
        self.options = sorted(options, key=lambda option: option.units)
        units = [option.units for option in self.options]
        self.begins = [at for at, own in enumerate(units) if not at or own != units[at - 1]]
        self.units = np.array([units[at] for at in self.begins])
        self.steps = np.ravel_multi_index(tuple(self.units.T), sizes)
        self.group = np.repeat(np.arange(len(self.begins)), np.diff([*self.begins, len(units)]))
        room = (self.coordinates + self.units[:, None, :] <= np.array(quotas)).all(axis=2)
        takes, sources = np.nonzero(room)  # one line for each state and what a further stage may take
        order = np.argsort(sources + self.steps[takes], kind="stable")
        self.takes, self.sources = takes[order], sources[order]
        self.targets = self.sources + self.steps[self.takes]
        start = np.full((1, len(self.bounds)), len(chain), dtype=np.int32)
        self.levels = [_Level(np.zeros(1, dtype=np.int64), start)]
        self.by_time = np.stack([self._by_time(option.costs) for option in self.options])
        self.tight = self._tight(max_stages)
        self._solve(max_stages)

    def _solve(self, max_stages: int) -> None:
        done: list[tuple[float, int, int]] = []
        columns = len(self.bounds)
        for depth in range(1, max_stages + 1):
            if (self.micro_batches - 1) * self.bounds[0] + depth * self.even > self.within:
                break
            level = self._next(self.levels[-1], self._reached_by_units(columns, depth))
            if not len(level.states):
                break
            self.levels.append(level)
            ended = (level.first == 0).any(axis=0)
            if ended.any():
                bound = int(ended.argmax())
                done.append(((self.micro_batches - 1 + depth) * float(self.bounds[bound]), depth, bound))
                columns = bound + 1  # more stages that take longer are of no use
        self._done = sorted(done)[:MOST_TRACED]

    @property
    def promises(self) -> list[float]:
        """Approximate step times, ascending, one for each number of stages."""
        return [seconds for seconds, _, _ in self._done]

    def at(self, place: int) -> list[tuple[Mesh, ...]]:
        """The meshes behind a promise: where meshes reach equally far, the first or the last of them."""
        if place not in self._sequences:
            self._sequences[place] = self._sequences_at(place)
        return self._sequences[place]

    @cached_property
    def _sequences(self) -> dict[int, list[tuple[Mesh, ...]]]:
        return {}

    def _sequences_at(self, place: int) -> list[tuple[Mesh, ...]]:
        _, depth, bound = self._done[place]
        low, high = self.bounds[max(0, bound - 1)], self.bounds[bound]
        if high > COARSE * low:
            return self._with_bounds(np.geomspace(low, high, FINER + 1)[1:], depth).at(0)
        level = self.levels[depth]
        state = int(level.states[np.flatnonzero(level.first[:, bound] == 0)[-1]])
        reached = [self._reached(slice(bound, bound + 1), later)[:, 0] for later in range(1, depth + 1)]
        return list(dict.fromkeys(self._traced(reached, state, bound, last) for last in (0, -1)))

    def _with_bounds(self, bounds: Bounds, max_stages: int) -> DeviceCountProgram:
        """The same program for other bounds, none of which is above those of this one."""
        found = copy(self)
        for known in ("_sequences", "_in_time", "_loose"):
            found.__dict__.pop(known, None)
        found.bounds, found.within = bounds, inf
        found.levels = [_Level(self.levels[0].states, self.levels[0].first[:, :1].repeat(len(bounds), axis=1))]
        found.by_time = np.stack([found._by_time(option.costs) for option in self.options])
        found._solve(max_stages)
        return found

    def _by_time(self, costs: MeshCosts) -> Parts:
        """For each bound and end of a stage the first part that it reaches back to in time."""
        sums, ends = costs.pace(self.micro_batches)
        wanted = ends[None, :] - self.bounds[:, None] * (1 + 1e-9)
        return np.searchsorted(sums, wanted.ravel(), side="left").reshape(wanted.shape).astype(np.int32)

    def _tight(self, max_stages: int) -> Integers:
        """The options whose memory may hold less than they can do in time, with as much in flight as there can be."""
        held = in_flight(self.schedule, max_stages, 0, self.micro_batches)
        memory = np.stack([option.costs.reach(held) for option in self.options])
        return np.flatnonzero((memory > self.by_time[:, -1]).any(axis=1))

    def _reached(self, columns: slice, depth: int) -> Parts:
        """`_by_time` of all options for some bounds, within memory and constraints; a last column means unreachable."""
        found = self._in_time[:, columns]
        if len(self.tight):
            found = found.copy()
            found[self.tight, :, : len(self.chain) + 1] = self._held(columns, depth)
        return found

    def _reached_by_units(self, columns: int, depth: int) -> Parts:
        """The least of `_reached` over the options that take the same units, for the first bounds."""
        found = self._loose[:, :columns]
        if len(self.tight):
            begins = np.flatnonzero(np.diff(self.group[self.tight], prepend=-1))
            own, nowhere = self.group[self.tight[begins]], len(self.chain) + 1
            held = np.minimum.reduceat(self._held(slice(columns), depth), begins, axis=0)
            found = found.copy()
            found[own, :, :nowhere] = np.minimum(found[own, :, :nowhere], held)
        return found

    def _held(self, columns: slice, depth: int) -> Parts:
        """`_reached` of the options that memory may limit, without the last column."""
        nowhere, held = len(self.chain) + 1, in_flight(self.schedule, depth, 0, self.micro_batches)
        if held not in self._memory:
            memory = [self.options[place].costs.reach(held) for place in self.tight]
            self._memory[held] = np.stack(memory).astype(np.int32)[:, None, :]
        first = np.maximum(self.by_time[self.tight, columns], self._memory[held])
        found: Parts = np.where(first < np.arange(nowhere, dtype=np.int32), first, np.int32(nowhere))
        return found

    @cached_property
    def _loose(self) -> Parts:
        """The least of `_in_time` over the options that take the same units, of those that memory does not limit."""
        found = self._in_time.copy()
        found[self.tight] = len(self.chain) + 1
        least: Parts = np.minimum.reduceat(found, self.begins, axis=0)
        return least

    @cached_property
    def _in_time(self) -> Parts:
        """`_by_time` of all options, with a last column, without those limits."""
        nowhere = len(self.chain) + 1
        found = np.full((*self.by_time.shape[:2], nowhere + 1), nowhere, dtype=np.int32)
        np.copyto(found[:, :, :nowhere], self.by_time, where=self.by_time < np.arange(nowhere))
        return found

    @cached_property
    def _memory(self) -> dict[int, Parts]:
        """Limits by memory of `tight` options, by the micro-batches in flight."""
        return {}

    def _next(self, level: _Level, reached: Parts) -> _Level:
        """One stage more: the least over all units that it may take, and the states from which something can still be
        reached; *reached* is `_reached_by_units`."""
        columns, places = np.arange(reached.shape[1]), np.full(len(self.coordinates), -1)
        places[level.states] = np.arange(len(level.states))
        before = places[self.sources]
        possible = np.flatnonzero(before >= 0)
        if not len(possible):
            return _Level(level.states[:0], level.first[:0])
        first = level.first[before[possible], : len(columns)]
        values = reached[self.takes[possible, None], columns, first]
        targets = self.targets[possible]
        begins = np.flatnonzero(np.diff(targets, prepend=-1))
        first, states = np.minimum.reduceat(values, begins, axis=0), targets[begins]
        some = (first <= len(self.chain)).any(axis=1)
        return _Level(states[some], first[some])

    def _traced(self, reached: Sequence[Parts], state: int, bound: int, tie: int) -> tuple[Mesh, ...]:
        """The stages that lead to a state, first to last; of equal options that at *tie*."""
        nowhere = len(self.chain) + 1
        found: list[Mesh] = []
        for before, own in zip(self.levels[len(reached) - 1 :: -1], reached[::-1], strict=True):
            possible = (self.units <= self.coordinates[state]).all(axis=1)
            chosen = np.flatnonzero(possible[self.group])
            states = state - self.steps[self.group[chosen]]
            places = np.minimum(np.searchsorted(before.states, states), len(before.states) - 1)
            ends = np.where(before.states[places] == states, before.first[places, bound], nowhere)
            values = own[chosen, ends]
            pick = np.flatnonzero(values == values.min())[tie]
            found.append(self.options[int(chosen[pick])].costs.mesh)
            state = int(states[pick])
        return tuple(found)


# --- grouped stages ---------------------------------------------------------------------------------------------------

MOST_PERMUTED = 3
"""Types of devices up to which all their orders are tried; of more the rotations of one, both ways round."""

MOST_TOLD = 4
"""Number of sequences to return."""

SLOWER = (1.04, 1.1, 1.2)
"""Times the least bound, which fewer stages may keep: few micro-batches wait less for these."""

PRECISION = 1e-3
"""To which bounds are bisected, as a part of them."""

HIGHEST = 10.0
"""Times the least that a bound can be."""

NEAR = 1.03
"""Ratio to the slowest stage of the best order, above which an order is dropped."""


class StageGroup(NamedTuple):
    """Stages that may stand next to each other: what parts cost on their mesh, and how many there are at most."""

    costs: MeshCosts
    num: int


class GroupedStages:
    """Sequences of runs of equal stages whose slowest stage meets the least bound: the most promising ones. `promises`
    lists them, and `at` expands one.

    Args:
        runs: one for each type of device.
        chain: what is cut.
        micro_batches: of a step.
        schedule: ``1f1b`` or ``gpipe``, for what is in flight.
        least: seconds that the slowest stage takes for a micro-batch at least, with its part of what comes once a step.
        even: seconds that a stage takes for a micro-batch at least, on average.
        within: approximate limit of a step in seconds; slower ones are omitted.
        max_stages: of a pipeline.
    """

    def __init__(
        self,
        runs: Sequence[StageGroup],
        chain: Chain,
        *,
        micro_batches: int,
        schedule: str,
        least: float,
        even: float,
        within: float,
        max_stages: int,
    ) -> None:
        self.chain, self.micro_batches, self.max_stages = chain, micro_batches, max_stages
        self.held = [in_flight(schedule, stages, 0, micro_batches) for stages in range(1, max_stages + 1)]
        self.paces = {run.costs.mesh: run.costs.pace_lists(micro_batches) for run in runs}
        most = HIGHEST * least
        if micro_batches > 1:
            most = max(least, min(most, (within - even) / (micro_batches - 1)))
        found: dict[tuple[Mesh, ...], float] = {}

        def tried(order: Sequence[StageGroup]) -> float:
            bound, sequence = self._best(order, least, most)
            if sequence:
                fewer = [(times * bound, self._within(order, times * bound)[0]) for times in SLOWER]
                for seconds, one in ((bound, sequence), (bound, self._all(order)), *fewer):
                    if one:
                        found[one] = min(seconds, found.get(one, seconds))
            return bound if sequence else inf

        best, bound = tuple(runs), inf
        for order in _orders(runs):
            if (own := tried(order)) < bound:
                best, bound = order, own
                most = min(most, NEAR * bound)
        for order in _with_other_ends(best) if bound < inf else ():
            most = min(most, NEAR * tried(order))
        steps = [((micro_batches - 1 + len(sequence)) * bound, sequence) for sequence, bound in found.items()]
        self._told = sorted(steps, key=lambda one: one[0])[:MOST_TOLD]

    @property
    def promises(self) -> list[float]:
        """Approximate step times, ascending, one for each sequence."""
        return [seconds for seconds, _ in self._told]

    def at(self, place: int) -> list[tuple[Mesh, ...]]:
        """The meshes behind a promise."""
        return [self._told[place][1]]

    def _best(self, order: Sequence[StageGroup], low: float, high: float) -> tuple[float, tuple[Mesh, ...]]:
        """The least bound in between that this order (last run first) keeps, and its meshes; none if it keeps none."""
        found, high = self._within(order, high)
        bound = low
        while found and high - low > PRECISION * high:
            better, bound = self._within(order, bound)
            found, low, high = (better, low, bound) if better else (found, bound, high)
            bound = (low + high) / 2
        return high, found

    def _all(self, order: Sequence[StageGroup]) -> tuple[Mesh, ...]:
        """The meshes of as many stages as there can be."""
        found = [costs.mesh for costs, num in order for _ in range(num)]
        return tuple(reversed(found[: self.max_stages]))

    def _within(self, order: Sequence[StageGroup], bound: float) -> tuple[tuple[Mesh, ...], float]:
        """The meshes of the stages that take the whole chain within a bound, of this order, and the time of the slowest
        stage; or none, with a bound below which there are none either."""
        found: list[Mesh] = []
        end, slowest, more, bound = len(self.chain), 0.0, inf, bound * (1 + 1e-9)
        for costs, num in order:
            sums, ends = self.paces[costs.mesh]
            hardest = costs.reach_list(self.held[-1])
            for _ in range(min(num, self.max_stages - len(found))):
                first = bisect_left(sums, ends[end] - bound)
                if first < hardest[end] and first < (held := costs.reach_list(self.held[len(found)])[end]):
                    first = held
                elif first:
                    more = min(more, ends[end] - sums[first - 1])
                if first >= end:
                    break
                found.append(costs.mesh)
                slowest = max(slowest, ends[end] - sums[first])
                end = first
                if not end:
                    return tuple(reversed(found)), slowest
        return (), more


def _orders(runs: Sequence[StageGroup]) -> Iterator[tuple[StageGroup, ...]]:
    """Orders of runs, the last first."""
    places = range(len(runs))
    if len(runs) <= MOST_PERMUTED:
        orders = list(permutations(places))
    else:
        orders = [(*way[place:], *way[:place]) for way in (tuple(places), tuple(places)[::-1]) for place in places]
    for order in orders:
        yield tuple(runs[place] for place in order)


def _with_other_ends(order: Sequence[StageGroup]) -> Iterator[tuple[StageGroup, ...]]:
    """An order with a last stage of another type, or a first one."""
    for one in order[1:]:
        yield (one._replace(num=1), *(run._replace(num=run.num - (run is one)) for run in order))
    for one in order[:-1]:
        yield (*(run._replace(num=run.num - (run is one)) for run in order), one._replace(num=1))
