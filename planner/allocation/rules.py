"""Rules by which jobs share devices: the least sum of completion times, and two plain rules to compare with.

`LeastCompletion` minimises the weighted sum of the times until jobs are done, where devices may be given anew whenever
a job is done, which costs those that get others a restart. That problem is hard (already on alike devices, with jobs
that do not speed up in proportion), so it is solved in three steps:

1. of jobs that share the devices until all are done, the least sum is exact: a dynamic program over jobs and devices
   that are left, of jobs x options x states (`Shares.least`);
2. a policy lets the first k jobs share, of those that weigh most for what they take (Smith's rule), and favours short
   jobs by a power of their length, because long ones will have their devices; after each job that is done, again;
3. each policy is followed to the end, from each start; of up to three jobs all starts are tried where these are not
   too many, of four the start of the best is refined, one or two jobs at a time, as long as the sum falls. The last two
   jobs are given the best of all their options.

Heuristic: steps 2 and 3; the tests compare them with all allocations at all completions of small cases.

Sources: the dynamic program over jobs and devices is that of Saxena et al., "Effective elastic scaling of deep learning
workloads" (MASCOTS 2020); favouring short jobs by a power follows heSRPT (Berg, Vesilo, Harchol-Balter, 2020), which is
optimal for alike jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from whale.planner.allocation.timeline import NOTHING, Demand, simulate

__all__ = ["LeastCompletion", "Shares", "equal_shares", "first_come"]

Policy = Callable[[Sequence[Demand], tuple[int, ...]], list[int]]

POWERS = (1.0, 0.5, 0.0, -0.5)
"""Powers of the length of a job by which policies weigh it: 1 minimises the sum without later changes."""

FEW = 4
"""Number of jobs up to which starts of policies are tried after every job that is done, and starts are refined."""


REFINED = 100
"""Most starts of a few jobs that are tried besides those of policies, each with all that may follow."""

EVERY = 4_000
"""Most starts of up to three jobs of which all are tried; what follows the first that is done is then the best."""


class Shares:
    """The ways to give devices to jobs, by a dynamic program over the devices that are left."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self.counts = counts
        self._left: dict[tuple[int, ...], NDArray[np.int64]] = {}

    def least(self, costs: NDArray[np.float64], capacity: tuple[int, ...]) -> list[int]:
        """The options of the least sum of costs, of those that fit together.

        Args:
            costs: by job and option; those of waiting must be finite.
            capacity: devices by kind.

        >>> Shares(np.array([[0], [1], [2]])).least(np.array([[9.0, 4, 3], [9.0, 4, 1]]), (2,))
        [1, 1]
        """
        left = self._states_left(capacity)
        sums = np.zeros(len(left) + 1)
        sums[-1] = inf  # of a state that cannot be
        chosen = np.empty((len(costs), len(left)), dtype=np.int64)
        for job, own in enumerate(costs):
            found = sums[left] + own
            chosen[job] = found.argmin(axis=1)
            sums[:-1] = np.take_along_axis(found, chosen[job][:, None], axis=1)[:, 0]
        state, given = len(left) - 1, [NOTHING] * len(costs)
        for job in reversed(range(len(costs))):
            given[job] = int(chosen[job, state])
            state = int(left[state, given[job]])
        return given

    def fits(self, given: Sequence[int], capacity: tuple[int, ...]) -> bool:
        """Whether there are as many devices."""
        return bool((self.counts[list(given)].sum(axis=0) <= capacity).all())

    def _states_left(self, capacity: tuple[int, ...]) -> NDArray[np.int64]:
        """The state after an option, by state and option; -1 where there are not as many devices."""
        found = self._left.get(capacity)
        if found is None:
            shape = tuple(number + 1 for number in capacity)
            states = np.stack(np.unravel_index(np.arange(np.prod(shape)), shape), axis=1)
            rest = states[:, None, :] - self.counts[None, :, :]
            index = np.ravel_multi_index(tuple(np.maximum(rest, 0).transpose(2, 0, 1)), shape)
            found = self._left[capacity] = np.where((rest >= 0).all(axis=2), index, -1)
        return found


class LeastCompletion:
    """The rule of the least weighted sum of completion times, see the module.

    Args:
        counts: devices by option and kind.
        restart_seconds: for which a job makes no progress once its devices change.
    """

    def __init__(self, counts: NDArray[np.int64], restart_seconds: float = 0.0) -> None:
        self.shares = Shares(counts)
        self.restart_seconds = restart_seconds

    def __call__(self, jobs: Sequence[Demand], capacity: tuple[int, ...]) -> list[int]:
        """The option of each job from now on."""
        few = len(jobs) <= FEW
        best, given = inf, [NOTHING] * len(jobs)
        tried: set[tuple[int, ...]] = set()
        for policy in self._policies(len(jobs)):
            start = tuple(policy(jobs, capacity))
            if few and start in tried:
                continue
            tried.add(start)
            total = self._from(jobs, start, capacity) if few else self._followed(jobs, start, capacity, policy)
            if total < best:
                best, given = total, list(start)
        for start in self._every(jobs, capacity) if len(jobs) <= 3 else ():
            if start not in tried and (total := self._from(jobs, start, capacity)) < best * (1 - 1e-9):
                best, given = total, list(start)
        better, left = len(jobs) == FEW, REFINED
        while better:
            better = False
            for start in self._near(jobs, given, capacity):
                if start not in tried and left:
                    tried.add(start)
                    left -= 1
                    total = self._from(jobs, start, capacity)
                    if total < best * (1 - 1e-9):
                        best, given, better = total, list(start), True
                        break
        return given

    def _policies(self, num_jobs: int) -> list[Policy]:
        powers = POWERS if num_jobs <= FEW else POWERS[::2]
        return [self._policy(most, power) for most, power in product(_numbers(num_jobs), powers)]

    def _from(self, jobs: Sequence[Demand], start: Sequence[int], capacity: tuple[int, ...]) -> float:
        """The least weighted sum of completion times from a start, if every job that is done is followed by the start
        of a policy."""
        now = [job.given(option, self.restart_seconds) for job, option in zip(jobs, start, strict=True)]
        seconds = min((job.left_seconds for job in now), default=0.0)
        if seconds == inf:
            return inf if any(self._able(job, capacity) for job in jobs) else 0.0  # these wait for other devices
        sum_ = seconds * sum(job.weight for job in now)
        rest = [job.after(seconds) for job in now if job.left_seconds > seconds]
        if not rest:
            return sum_
        if len(rest) <= 2 and all(self._able(job, capacity) for job in rest):
            return sum_ + (
                self._last(rest[0], capacity) if len(rest) == 1 else self._last_two(rest[0], rest[1], capacity)
            )
        starts = {tuple(policy(rest, capacity)) for policy in self._policies(len(rest))}
        return sum_ + min(self._from(rest, start, capacity) for start in starts)

    def _last(self, job: Demand, capacity: tuple[int, ...]) -> float:
        """The least weighted time of a job alone."""
        return job.weight * float(job.seconds(self.restart_seconds)[_within(self.shares.counts, capacity)].min())

    def _last_two(self, one: Demand, other: Demand, capacity: tuple[int, ...]) -> float:
        """The least weighted sum of two jobs alone, over all their options; the last then has all devices, if that pays
        for its restart."""
        allowed = _within(self.shares.counts, capacity)
        fits = (self.shares.counts[:, None] + self.shares.counts[None, :] <= capacity).all(axis=2)
        times = [job.seconds(self.restart_seconds) for job in (one, other)]
        grids = [times[0][:, None], times[1][None, :]]
        first = np.minimum(*grids)
        sums = (one.weight + other.weight) * first
        for job, grid, axis in zip((one, other), grids, (0, 1), strict=True):
            speeds = job.speeds if axis == 1 else job.speeds[:, None]
            with np.errstate(invalid="ignore"):
                left = np.where(np.isfinite(grid), grid - first, inf)
                work = np.where(np.isfinite(grid), np.minimum(job.work, left * speeds), job.work)
            again = self.restart_seconds + work / job.speeds[allowed].max()
            sums = sums + job.weight * np.where(grid > first, np.minimum(left, again), 0.0)
        return float(np.where(fits & np.isfinite(first), sums, inf).min())

    def _able(self, job: Demand, capacity: tuple[int, ...]) -> bool:
        """Whether it runs on some of these devices."""
        return bool((job.speeds[(self.shares.counts <= capacity).all(axis=1)] > 0).any())

    def _policy(self, most: int, power: float) -> Policy:
        """Let at most *most* jobs share, of those that weigh most for their length; short ones by a power of it."""

        def rule(jobs: Sequence[Demand], capacity: tuple[int, ...]) -> list[int]:
            seconds = np.stack([job.seconds(self.restart_seconds) for job in jobs])
            seconds[:, (self.shares.counts > capacity).any(axis=1)] = inf
            least = seconds.min(axis=1)
            weights = np.array([job.weight for job in jobs])
            order = np.argsort(least / weights, kind="stable")
            able = [int(job) for job in order if least[job] < inf][:most]
            given = [NOTHING] * len(jobs)
            if not able:
                return given
            costs = seconds[able] * (weights[able] * np.maximum(least[able], 1e-12) ** (power - 1))[:, None]
            highest = costs[np.isfinite(costs)].max()
            costs[:, NOTHING] = 2.0 * highest * len(able) * np.arange(len(able), 0, -1)  # the last ones wait first
            for job, option in zip(able, self.shares.least(costs, capacity), strict=True):
                given[job] = option
            return given

        return rule

    def _followed(
        self,
        jobs: Sequence[Demand],
        start: Sequence[int],
        capacity: tuple[int, ...],
        policy: Policy,
    ) -> float:
        """The weighted sum of completion times of a start and a policy after it."""
        able = [self._able(job, capacity) for job in jobs]  # the others wait for devices that are not there
        first = [[option for option, can in zip(start, able, strict=True) if can]]
        if not any(first[0]):
            return inf

        def rule(here: Sequence[Demand], there: tuple[int, ...]) -> list[int]:
            return first.pop() if first else policy(here, there)

        now = [replace(job, arrival_seconds=0.0) for job, can in zip(jobs, able, strict=True) if can]
        return simulate(now, self.shares.counts, capacity, rule, restart_seconds=self.restart_seconds).total_seconds

    def _every(self, jobs: Sequence[Demand], capacity: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        """All ways to give devices to jobs; none if there are too many."""
        found: list[tuple[int, ...]] = [()]
        for job in jobs:
            options = [NOTHING, *map(int, np.flatnonzero(job.speeds > 0))]
            found = [
                (*start, option)
                for start, option in product(found, options)
                if self.shares.fits((*start, option), capacity)
            ]
            if len(found) > EVERY:
                return ()
        return found

    def _near(
        self, jobs: Sequence[Demand], given: Sequence[int], capacity: tuple[int, ...]
    ) -> Iterator[tuple[int, ...]]:
        """Starts in which a job has other devices, and another one the same, or those of the rest that are fastest."""
        counts = self.shares.counts
        for one, other in permutations(range(len(jobs)), 2):
            taken = counts[[option for job, option in enumerate(given) if job not in (one, other)]].sum(axis=0)
            for first in (NOTHING, *np.flatnonzero(jobs[one].speeds > 0)):
                start = list(given)
                start[one] = int(first)
                if self.shares.fits(start, capacity):
                    yield tuple(start)
                left = np.array(capacity) - taken - counts[first]
                if (left >= 0).all():
                    start[other] = _fastest(jobs[other], _within(counts, left))
                    yield tuple(start)


def equal_shares(counts: NDArray[np.int64]) -> Policy:
    """The rule that gives all jobs as many devices of each kind, the first ones one more where they do not come out
    even; each uses of its devices those with which it is fastest. Where none can run so, the last jobs wait."""

    def rule(jobs: Sequence[Demand], capacity: tuple[int, ...]) -> list[int]:
        given = [NOTHING] * len(jobs)
        for sharing in range(len(jobs), 0, -1):
            each = np.zeros((sharing, len(capacity)), dtype=np.int64)
            turn = 0
            for kind, number in enumerate(capacity):
                each[:, kind] = number // sharing
                each[(turn + np.arange(number % sharing)) % sharing, kind] += 1
                turn += number % sharing
            given[:sharing] = [_fastest(job, _within(counts, own)) for job, own in zip(jobs, each, strict=False)]
            if any(given):
                break
        return given

    return rule


def first_come(counts: NDArray[np.int64]) -> Policy:
    """The rule by which jobs keep what they have until they are done, and each that waits takes, in the order in which
    they came, what makes it fastest of the rest."""

    def rule(jobs: Sequence[Demand], capacity: tuple[int, ...]) -> list[int]:
        left = np.array(capacity)
        given = [NOTHING] * len(jobs)
        for index, job in enumerate(jobs):
            if job.held and (counts[job.held] <= left).all():
                given[index] = job.held
                left -= counts[job.held]
        for index, job in enumerate(jobs):
            if given[index] == NOTHING:
                given[index] = _fastest(job, _within(counts, left))
                left -= counts[given[index]]
        return given

    return rule


def _fastest(job: Demand, allowed: NDArray[np.bool_]) -> int:
    """The option of the highest speed, of those with the fewest devices; nothing where it runs on none."""
    speeds = np.where(allowed, job.speeds, 0.0)
    return int(speeds.argmax()) if speeds.max() > 0 else NOTHING


def _within(counts: NDArray[np.int64], devices: NDArray[np.int64] | tuple[int, ...]) -> NDArray[np.bool_]:
    """Mask of the options that take no more than these devices."""
    return np.asarray((counts <= devices).all(axis=1))


def _numbers(most: int) -> list[int]:
    """Numbers of jobs that share: any of few; of many, powers of two and all.

    >>> _numbers(3), _numbers(20)
    ([1, 2, 3], [1, 2, 4, 8, 16, 20])
    """
    if most <= FEW:
        return list(range(1, most + 1))
    return [*(1 << power for power in range((most - 1).bit_length())), most]
