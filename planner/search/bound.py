"""A step time below which no plan of the space lies, whatever its stages.

Objective: as large a bound as can be proven in some hundredths of a second. It is a relaxation: devices have prices,
one for each type, in place of numbers, rows may take different ways through the stages, and messages cost nothing.

What every plan pays. A step has mu = batch / R micro-batches of R rows; the last of these M counts with its share,
sigma. Follow a row through the pipeline, on a slice in each stage. That of stage s waits for the forwards f_i of the
stages before it and works, mu times C_s = f_s + b_s. Under 1F1B it waits for its first backward too, which comes after
forward and backward of all k later stages; meanwhile it can do one forward for each of these (but M - 1 at most). Under
GPipe all of its forwards come before, and its last one goes through the later stages before a backward comes back. At
the end it sums its gradients and updates (once_s), or its last backward goes back to the first stage, which then does
so. So with T the step without its overhead::

    T >= own_s = mu C_s + sum f_i (i before s) + wait_s + end_s
    wait_s = sum C_j (j after s) - min(k, M - 1) f_s                      (GPipe: sum (sigma f_j + b_j))
    end_s  = (1 - rho) once_s + rho (sum sigma b_i (i before s) + once_1)    for any rho from 0 to 1

What devices cost. Let all devices of type k together have a price v_k, the sum of which is 1. A slice of t devices with
r of the R rows charges each of these w = v_k t (R / r) / N_k: over all rows that is on average what the stage's devices
are worth. So there is a row whose charges w_s have a sum of 1 at most. If T < x, then on the way of that row each stage
has own_s < x, and its layers fit in memory with the micro-batches that it keeps: k + 1 under 1F1B (but M at most).

With weights u_s = w_s / sum w, whose sum is 1, T is at least the mean of all own_s. With e_s = f_s + rho sigma b_s, a_s
what the wait_i of earlier stages have of s (C_s, or sigma f_s + b_s), U_s the sum of the weights before s, and G >= 0
of one's choice, the mean is::

    sum u_s (mu C_s + (1 - rho) once_s + k G - min(k, M - 1) f_s) + rho once_1 + sum e_s (1 - u_s) + (a_s - e_s - G) U_s

because the sum of all k u_s is that of all U_s. There U_1 is 0, and for others (a_s - e_s - G) U_s is at least min(0,
a_s - e_s - G) (1 - u_s). So it is a sum over stages of something and u_s times something else, q_s. For any y, sum u_s
q_s = y + sum u_s (q_s - y); and u_s (q_s - y) is at least w_s (q_s - y) where that is positive, as u_s >= w_s, else q_s
- y, as u_s <= 1. The least that a chain of stages pays is a shortest path over cuts and the number of stages after
them; if it is not less than x, no plan takes less than x. Any v, y, rho and G are valid (weak duality); they are moved
while that helps.

A kind of slices that stands for several numbers of rows takes what the fewest take and charges what the most would:
with less of either T is no longer (what goes off are M - 1 forwards at most, and all M count). Of more than `DEPTH`
later stages it is only known that there are so many: then k is the one with which k G - min(k, M - 1) f_s is least.

Complexity: O(stretches x slices x `DEPTH`) for each x and move, where stretches of the same layers count once, and some
moves for each number of rows that can be the best; the number of devices does not matter. Taken for granted is what
`slices` says of its prices, and that rows are divided by speed, so that those of a slice tell how many there are at
least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, inf
from operator import add
from typing import Any, NamedTuple

import numpy as np

from whale.planner.schedules.in_flight import in_flight
from whale.planner.search.meshes import Array, Meshes
from whale.planner.search.slices import NEVER, NUMBERS, Integers, Slices

__all__ = [
    "SLACK",
    "TRIES",
    "Case",
    "Duals",
    "best_prices",
    "bound_seconds",
    "cases_of",
    "least_seconds",
    "least_work",
    "moved_prices",
    "work_of",
    "work_of_parts",
]

ROUNDS = 40
"""Of improving the prices in `least_work`; each halves a step."""

HIGHEST = 4.0
"""Times the work alone, above which no bound is looked for, where no plan is known."""

STEPS, ENOUGH = 5, 0.005
"""Times that a larger bound is looked for, for a number of rows; and the share of it that is not."""

START, LOOK = 1.3, 0.85
"""Times the work alone, and a plan that is known: there numbers of rows are compared, those with the least to show for
it come first."""

TRIES = 32
"""Of prices, for a number of rows and a step."""

HOPE = 2.0
"""Times as much as the last round of tries has gained each one that is left is expected to gain, at most; prices that
would not do even so are given up."""

DEPTH = 6
"""Stages after a stage that are told apart; of more it is known that there are at least so many."""

SLACK = 1e-9
"""Of a device's room: bytes are rounded where plans are scored."""


class Duals(NamedTuple):
    """What may be chosen: v; y in units of x; rho; G in units of x / mu."""

    types: tuple[float, ...]
    level: float
    ends: float
    later: float

    def moved(self, index: int, size: float) -> Iterator[Duals]:
        """With one of them moved either way; of the types all in turn."""
        if index == 0:
            yield from (self._replace(types=types) for types in moved_prices(self.types, size))
        elif index == 1:
            yield from (self._replace(level=self.level + part) for part in (size, -size))
        elif index == 2:
            yield from (self._replace(ends=min(1.0, max(0.0, self.ends + part))) for part in (size, -size))
        else:
            yield from (self._replace(later=max(0.0, self.later + part)) for part in (size, -size))


def moved_prices(prices: Sequence[float], size: float) -> Iterator[tuple[float, ...]]:
    """Prices of the types, with one of them more or less, and the others in turn."""
    for place, part in product(range(len(prices)), (size, -size)):
        moved = [max(0.0, price * (1 - part)) for price in prices]
        moved[place] = max(0.0, moved[place] + part)
        yield tuple(price / sum(moved) for price in moved)


SIZES = (0.03, 0.2, 0.2, 0.1)
"""Of the moves at first."""

SMALLEST = 0.004

FIRST = (-0.3, 0.3, 0.5)
"""Of the level, the ends and what is later, before they are moved."""


def bound_seconds(
    meshes: Meshes,
    batch: int,
    micro_batches: Sequence[int],
    schedules: Sequence[str] = ("1f1b",),
    known: float = inf,
    tries: int = TRIES,
) -> float:
    """No plan with one of these numbers of micro-batches, and of these schedules, takes less.

    Args:
        meshes: prices.
        batch: rows of a step.
        micro_batches: numbers that may be chosen.
        schedules: that may be chosen.
        known: seconds of a step of a plan: the bound is looked for up to there.
        tries: of prices, for a number of rows and a step.
    """
    slices = Slices.of(meshes, -(-batch // min(micro_batches)))
    work = work_of(slices, batch)
    least = least_work(work, slices.nums)
    bound = min(least * HIGHEST, known - meshes.prices.step_overhead)
    first = Duals(tuple(best_prices(work, slices.nums).tolist()), *FIRST)
    cases = cases_of(meshes, slices, batch, micro_batches, schedules, bound)
    look = bound * LOOK if known < inf else min(bound, least * START)
    shown = {case: case.shown(look, first) for case in cases}
    found = [first]
    for case in sorted(cases, key=lambda case: shown[case]):
        bound, last = case.bound(min(least, bound), bound, found, tries)
        found = [first, last]
    return bound + meshes.prices.step_overhead


def cases_of(
    meshes: Meshes, slices: Slices, batch: int, micro_batches: Sequence[int], schedules: Sequence[str], most: float
) -> list[Case]:
    """Of a bound, each of which holds for the plans of one number of micro-batches and one schedule."""
    stretches = _Stretches.of(slices.order, len(slices.work))
    return [
        Case(
            slices=slices,
            stretches=stretches,
            batch=batch,
            rows=meshes.rows(batch, count),
            schedule=schedule,
            most=most,
        )
        for schedule, count in product(schedules, sorted(set(micro_batches)))
    ]


# --- work alone -------------------------------------------------------------------------------------------------------


def work_of_parts(meshes: Meshes, batch: int, micro_batches: Sequence[int]) -> Array:
    """Device-seconds of each part of the chain for the whole batch, on each type at its best."""
    slices = Slices.of(meshes, -(-batch // min(micro_batches)))
    return work_of(slices, batch)


def least_seconds(meshes: Meshes, batch: int, micro_batches: Sequence[int]) -> float:
    """No plan takes less than its work, divided among all devices: a bound that is there at once."""
    slices = Slices.of(meshes, -(-batch // min(micro_batches)))
    return least_work(work_of(slices, batch), slices.nums) + meshes.prices.step_overhead


def work_of(slices: Slices, batch: int) -> Array:
    """As `work_of_parts`."""
    found: Array = batch * least_of_types(slices)[np.array(slices.order)]
    return found


def least_of_types(slices: Slices) -> Array:
    """Device-seconds of a row in each of the parts that are unlike, on each type at its best."""
    return np.stack([slices.work[:, slices.type == type_].min(axis=1) for type_ in range(len(slices.nums))], axis=1)


def least_work(work: Array, nums: Array) -> float:
    """The least time in which devices do all work, divided as finely as one likes, from below: of the linear program
    min T, sum_k x_lk = 1, sum_l w_lk x_lk <= N_k T, any prices v_k >= 0 with sum 1 tell sum_l min_k v_k w_lk / N_k.

    Args:
        work: device-seconds of each part (first axis) on each type (second).
        nums: devices of each type.

    >>> least_work(np.array([[2.0, 4.0], [4.0, 8.0]]), np.array([1.0, 2.0]))
    3.0
    """
    return _priced(work, nums, best_prices(work, nums))


def best_prices(work: Array, nums: Array) -> Array:
    """The prices of the types with which `least_work` is most, by bisection towards each of them."""
    corners = np.eye(len(nums))
    speeds = nums / work.sum(axis=0)
    best: Array = max([*corners, speeds / speeds.sum()], key=lambda one: _priced(work, nums, one))
    step = 0.5
    for _ in range(ROUNDS):
        found = max(((1 - step) * best + step * one for one in corners), key=lambda one: _priced(work, nums, one))
        if _priced(work, nums, found) > _priced(work, nums, best):
            best = found
        else:
            step /= 2
    return best


def _priced(work: Array, nums: Array, prices: Array) -> float:
    return float((work * (prices / nums)).min(axis=1).sum())


# --- all that a plan pays ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stretches:
    """What a stage may have of the chain.

    Attributes:
        counts: of a stretch, how often it has each of the parts that are unlike (from 32 on a little less often:
            fewer never take more); stretches of the same ones are one.
        between: the stretch from each part (rows) up to each part (columns); one more than there are where none is.
        later: parts after a stretch, at most.
        longest: parts of a stretch, at most.
    """

    counts: Array
    between: Integers
    later: Array
    longest: Integers

    @classmethod
    def of(cls, order: Sequence[int], num: int) -> _Stretches:
        """Of a chain of parts."""
        upto = np.concatenate([np.zeros((1, num)), np.cumsum(np.eye(num)[list(order)], axis=0)])
        last = np.repeat(np.arange(1, len(order) + 1), np.arange(1, len(order) + 1))
        first = np.concatenate([np.arange(end) for end in range(1, len(order) + 1)])
        length = upto[last] - upto[first]
        coarse = 2.0 ** np.maximum(0, np.floor(np.log2(np.maximum(length, 1))) - 4)
        counts, which = np.unique(length // coarse * coarse, axis=0, return_inverse=True)
        which = which.reshape(-1)
        later = np.zeros(len(counts))
        np.maximum.at(later, which, len(order) - last)
        longest = np.zeros(len(counts), dtype=np.int64)
        np.maximum.at(longest, which, last - first)
        between = np.full((len(order) + 1, len(order) + 1), len(counts))
        between[first, last] = which
        return cls(counts=counts, between=between, later=later, longest=longest)


class Pairs(NamedTuple):
    """Stretches of the chain, ascending, with a kind of slices each on which they fit and are done in time.

    Attributes:
        stretch, type: their positions.
        devices: of a stage that has only such slices, as a share of those of their type.
        forward, backward: seconds of a micro-batch; ``work``: of all of them.
        once: seconds of sums of gradients and updates.
        state, kept: shares of a device's room, as `whale.planner.search.slices.Slices` has them.
    """

    stretch: Integers
    type: Integers
    devices: Array
    forward: Array
    backward: Array
    work: Array
    once: Array
    state: Array
    kept: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Plans whose micro-batches have so many rows; of interest are those that take less than *most* seconds."""

    slices: Slices
    stretches: _Stretches
    batch: int
    rows: int
    schedule: str
    most: float

    def bound(self, least: float, wanted: float, known: Sequence[Duals], tries: int) -> tuple[float, Duals]:
        """The largest bound up to *wanted* that is shown by prices that are known or better ones, and those; *least*
        holds."""
        shown, prices = max((self.shown(wanted, one), one) for one in known)
        step, high = wanted, wanted
        for _ in range(STEPS):
            if shown < 0:
                shown, prices = self._improved(step, prices, tries)
            if shown >= 0:
                least = step
            else:
                least, high = max(least, step + shown), step
            if high - least < ENOUGH * high:
                break
            step = (least + high) / 2
            shown = self.shown(step, prices)
        return least, prices

    def _improved(self, step: float, prices: Duals, tries: int) -> tuple[float, Duals]:
        """What is shown of a step by prices that are moved while that is too little, and those; one number of them
        after the other, by more where that helped and by less where it did not."""
        shown, sizes, each = self.shown(step, prices), list(SIZES), 2 * len(SIZES)
        while shown < 0 and tries > 0 and max(sizes) > SMALLEST:
            before = shown
            for index, size in enumerate(sizes):
                moved = max((self.shown(step, one), one) for one in prices.moved(index, size))
                sizes[index] *= 1.5 if moved[0] > shown else 0.4
                shown, prices = max((shown, prices), moved)
                if shown >= 0:
                    break
            tries -= each
            if shown + HOPE * (shown - before) * tries / each < 0:
                break
        return shown, prices

    def shown(self, step: float, prices: Duals) -> float:
        """By how much the cheapest chain of stages takes more than a step of so many seconds: if it does none takes
        less, else none takes less than the chain. Worked out once."""
        if (step, prices) not in self._known:
            self._known[step, prices] = self._beyond(step, prices) if len(self._type) else NEVER
        return self._known[step, prices]

    @cached_property
    def _known(self) -> dict[tuple[float, Duals], float]:
        return {}

    def _beyond(self, step: float, prices: Duals) -> float:
        charge = np.array(prices.types)[self._type] * self._devices
        can = self._fits & (self._work + self._once < step) & (charge <= 1)
        ends = self._forward + prices.ends * self.last * self._backward
        usual = prices.later * step * self.rows / self.batch
        beyond = np.minimum(0.0, self._waits - ends - usual)
        pays = self._excess(usual) + (self._work + (1 - prices.ends) * self._once - ends - prices.level * step)
        begin = self._begin
        own, start = pays[:, begin], ends[begin] + prices.ends * self._once[begin]
        firsts = np.where(can[:, begin], start + np.minimum(charge[begin] * own, own), NEVER)
        pays -= beyond
        others = np.where(can, ends + beyond + np.minimum(charge * pays, pays), NEVER)
        cheapest = self._shortest(self._least(firsts, self._begins), self._least(others, self._starts))
        return min(cheapest + (prices.level - 1) * step, NEVER)

    def _least(self, values: Array, starts: tuple[Integers, Integers]) -> Array:
        """The least of the values (by stages after it, and pair) for each of the stretches, of which these are and
        begin there, and one that there is not."""
        found = np.full((DEPTH + 1, len(self.stretches.counts) + 1), NEVER)
        stretch, places = starts
        if len(places):
            found[:, stretch] = np.minimum.reduceat(values, places, axis=1)
        return found

    def _shortest(self, first: Array, later: Array) -> float:
        """What the cheapest chain pays; by stages after it (first axis) and stretch, what the first stage and others
        pay."""
        ends, stretch = self._ahead
        left = np.full((DEPTH + 1, ends.shape[1] + 1), NEVER)  # by stages and their first part
        left[0, -1] = 0.0
        few = later[:DEPTH].take(stretch, axis=1)
        for after in range(DEPTH):
            few[after] += left[after].take(ends)
            np.minimum.reduce(few[after], axis=0, out=left[after + 1, :-1])
        more, many = later[DEPTH][stretch.T].tolist(), left[DEPTH].tolist()
        for part in range(len(more) - 1, -1, -1):
            many[part] = min(many[part], *map(add, more[part], many[part + 1 : part + 1 + len(stretch)]))
        left[DEPTH] = many
        return float((first[:, stretch[:, 0]] + left[:, ends[:, 0]]).min())

    @cached_property
    def _ahead(self) -> tuple[Integers, Integers]:
        """Of each part (columns) the ends of stretches that begin there and are as long as one of a pair at most, the
        shortest first, and which these are; beyond the end of the chain one that there is not."""
        between, longest = self.stretches.between, int(self.stretches.longest[self._pairs[0]].max())
        first = np.arange(len(between) - 1)
        ends = first + np.arange(1, longest + 1)[:, None]
        within = np.minimum(ends, len(first))
        return within, np.where(ends > within, len(self.stretches.counts), between[first, within])

    def pairs(self) -> Pairs:
        """All that may be a stage."""
        return Pairs(
            stretch=self._pairs[0],
            type=self._type,
            devices=self._devices,
            forward=self._forward,
            backward=self._backward,
            work=self._work,
            once=self._once,
            state=self._over(self.slices.state),
            kept=self._over(self.slices.kept),
        )

    def held(self, later: int) -> int:
        """Micro-batches of which a stage with so many later ones keeps what their gradients need."""
        return in_flight(self.schedule, later + 1, 0, self.num)

    # By pair of a stretch and a slice on which it fits and is done in time

    @cached_property
    def _pairs(self) -> tuple[Integers, Integers]:
        """Stretches, ascending, and slices."""
        slices = self.slices
        chosen = np.flatnonzero(slices.fewest <= self.rows)
        worked, held = (
            self.stretches.counts @ np.minimum(parts[:, chosen], NEVER)
            for parts in (slices.forward + slices.backward, slices.state + slices.kept)
        )
        able = (worked * self.batch < self.most * self.rows) & (held <= 1 + SLACK)
        stretch, place = np.nonzero(able)
        return stretch, chosen[place]

    @cached_property
    def _begin(self) -> Integers:
        """The pairs whose stretch begins the chain."""
        return np.flatnonzero(np.isin(self._pairs[0], self.stretches.between[0, 1:]))

    @cached_property
    def _starts(self) -> tuple[Integers, Integers]:
        """The stretches that pairs have, and the first pair of each."""
        return np.unique(self._pairs[0], return_index=True)

    @cached_property
    def _begins(self) -> tuple[Integers, Integers]:
        """The same of the pairs that begin the chain."""
        return np.unique(self._pairs[0][self._begin], return_index=True)

    def _over(self, parts: Array) -> Array:
        stretch, place = self._pairs
        found: Array = (self.stretches.counts @ np.minimum(parts, NEVER))[stretch, place]
        return found

    @cached_property
    def _type(self) -> Integers:
        return self.slices.type[self._pairs[1]]

    @cached_property
    def _most(self) -> Integers:
        """Rows."""
        return np.minimum(self.slices.most[self._pairs[1]], self.rows)

    @cached_property
    def _devices(self) -> Array:
        """Of a stage that has only such slices, as a share of those of their type."""
        found: Array = self.slices.degree[self._pairs[1]] * self.rows / self._most / self.slices.nums[self._type]
        return found

    @cached_property
    def _fits(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """By the stages after it, and pair."""
        state, kept = self._over(self.slices.state), self._over(self.slices.kept)
        held = np.array([self.held(after) for after in range(DEPTH + 1)])
        found: np.ndarray[Any, np.dtype[np.bool_]] = state + held[:, None] * kept <= 1 + SLACK
        return found

    @cached_property
    def _work(self) -> Array:
        """Seconds of a step's micro-batches."""
        found: Array = self.batch / self.rows * (self._forward + self._backward)
        return found

    @cached_property
    def _once(self) -> Array:
        """Seconds of sums of gradients and updates."""
        return self._over(self.slices.gradients) * self._pace + self._over(self.slices.update)

    @cached_property
    def _pace(self) -> Array:
        """Seconds a byte of the sum over as many slices as there are at least, or the next lower number that is
        priced."""
        slices = self.slices
        most = np.minimum(slices.most, self.rows)
        number = np.ceil(self.rows / (most + 1) / slices.slower - 1e-9)
        number = np.maximum(number, 1.0 + (most < self.rows))
        paces = np.concatenate([np.zeros((1, len(most))), slices.paces])
        found: Array = paces[np.searchsorted(np.array(NUMBERS), number, side="right"), np.arange(len(most))]
        return found[self._pairs[1]]

    @cached_property
    def _forward(self) -> Array:
        """Seconds of a micro-batch; of a range of rows with the fewest of them."""
        return self._over(self.slices.forward)

    @cached_property
    def _backward(self) -> Array:
        """Of a micro-batch."""
        return self._over(self.slices.backward)

    @cached_property
    def _waits(self) -> Array:
        """What each earlier stage waits for a stage."""
        return self._backward + (self.last if self.schedule == "gpipe" else 1.0) * self._forward

    def _excess(self, usual: float) -> Array:
        """What is usual of each later stage without the forwards that are done meanwhile, at least; by the number of
        later stages, and pair."""
        found: Array = self._later * usual - self._meanwhile
        if self.schedule == "1f1b":
            # The last are more stages too. The least is where there are fewest, or as many as micro-batches, at most.
            most, meanwhile = self._many
            np.minimum(found[-1], most * usual - meanwhile, out=found[-1])
        return found

    @cached_property
    def _later(self) -> Array:
        """Numbers of later stages, as a column."""
        return np.arange(DEPTH + 1.0)[:, None]

    @cached_property
    def _meanwhile(self) -> Array:
        """Seconds of the forwards that a pair does while so many later stages work on a micro-batch."""
        if self.schedule == "gpipe":
            return np.zeros((1, len(self._type)))
        found: Array = np.minimum(self._later, self.num - 1) * self._forward
        return found

    @cached_property
    def _many(self) -> tuple[Array, Array]:
        """The most later stages with which more forwards are done meanwhile, and seconds of these."""
        most = np.clip(self.num - 1, DEPTH, np.maximum(self.stretches.later[self._pairs[0]], DEPTH))
        return most, np.minimum(most, self.num - 1) * self._forward

    @property
    def num(self) -> int:
        """Micro-batches."""
        return ceil(self.batch / self.rows - 1e-9)

    @property
    def last(self) -> float:
        """The share of the rows of a micro-batch that the last one has."""
        return self.batch / self.rows - self.num + 1
