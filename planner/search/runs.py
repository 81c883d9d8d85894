"""Grouped stages: deep pipelines of a few meshes, in the order with the fastest slowest stage.

Where all stages of a type of device have the same mesh, a pipeline is a sequence of types. What tells its places apart
(micro-batches in flight) changes slowly along it, so the stages of a type are taken to be next to each other, in any
order of the types; in the best of these orders also with a first or a last stage of another type, as the chain begins
and ends with other layers. In such a sequence every stage from the last one reaches back as far as a bound and its
memory let it, and the bound is bisected: O(stages x log parts) for each bound and order, whatever the number of
devices.

Other sequences are not looked at; of short pipelines `whale.planner.search.quota` looks at all. The cuts that are found
are not kept: `whale.planner.search.drafts` cuts what is wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import permutations
from math import inf
from typing import NamedTuple

from whale.planner.schedules.in_flight import in_flight
from whale.planner.search.chain import Chain
from whale.planner.search.costs import MeshCosts
from whale.planner.search.devices import Mesh

__all__ = ["Run", "Runs"]

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


class Run(NamedTuple):
    """Stages that may stand next to each other: what parts cost on their mesh, and how many there are at most."""

    costs: MeshCosts
    num: int


class Runs:
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
        runs: Sequence[Run],
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
        self.schedule = schedule
        self.most_held = in_flight(schedule, max_stages, 0, micro_batches)
        self.paces = {run.costs.mesh: run.costs.pace_lists(micro_batches) for run in runs}
        most = HIGHEST * least
        if micro_batches > 1:
            most = max(least, min(most, (within - even) / (micro_batches - 1)))
        found: dict[tuple[Mesh, ...], float] = {}

        def tried(order: Sequence[Run]) -> float:
            bound, sequence = self._best(order, least, most)
            if sequence:
                fewer = [(times * bound, self._within(order, times * bound)) for times in SLOWER]
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

    def _best(self, order: Sequence[Run], low: float, high: float) -> tuple[float, tuple[Mesh, ...]]:
        """The least bound in between that this order (last run first) keeps, and its meshes; none if it keeps none."""
        found = self._within(order, high)
        if found and (better := self._within(order, low)):
            return low, better
        while found and high - low > PRECISION * high:
            middle = (low + high) / 2
            better = self._within(order, middle)
            found, low, high = (better, low, middle) if better else (found, middle, high)
        return high, found

    def _all(self, order: Sequence[Run]) -> tuple[Mesh, ...]:
        """The meshes of as many stages as there can be."""
        found = [costs.mesh for costs, num in order for _ in range(num)]
        return tuple(reversed(found[: self.max_stages]))

    def _within(self, order: Sequence[Run], bound: float) -> tuple[Mesh, ...]:
        """The meshes of the stages that take the whole chain within a bound, of this order; none if they cannot."""
        found: list[Mesh] = []
        end, bound = len(self.chain), bound * (1 + 1e-9)
        for costs, num in order:
            sums, ends = self.paces[costs.mesh]
            hardest = costs.reach_list(self.most_held)
            for _ in range(min(num, self.max_stages - len(found))):
                first = bisect_left(sums, ends[end] - bound)
                if first < hardest[end]:
                    held = in_flight(self.schedule, len(found) + 1, 0, self.micro_batches)
                    first = max(first, costs.reach_list(held)[end])
                if first >= end:
                    break
                found.append(costs.mesh)
                end = first
                if not end:
                    return tuple(reversed(found))
        return ()


def _orders(runs: Sequence[Run]) -> Iterator[tuple[Run, ...]]:
    """Orders of runs, the last first."""
    places = range(len(runs))
    if len(runs) <= MOST_PERMUTED:
        orders = list(permutations(places))
    else:
        orders = [(*way[place:], *way[:place]) for way in (tuple(places), tuple(places)[::-1]) for place in places]
    for order in orders:
        yield tuple(runs[place] for place in order)


def _with_other_ends(order: Sequence[Run]) -> Iterator[tuple[Run, ...]]:
    """An order with a last stage of another type, or a first one."""
    for one in order[1:]:
        yield (one._replace(num=1), *(run._replace(num=run.num - (run is one)) for run in order))
    for one in order[:-1]:
        yield (*(run._replace(num=run.num - (run is one)) for run in order), one._replace(num=1))
