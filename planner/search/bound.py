"""A step time below which no plan of the space lies, whatever its stages.

Objective: as large a bound as can be proven in some hundredths of a second. It is a relaxation: devices have prices,
one for each type, in place of numbers, rows may take different ways through the stages, and messages cost nothing.

What every plan pays. A step has mu = batch / R micro-batches of R rows (the last one counts with its share). Follow a
row through the pipeline, on a slice in each stage. That of stage s waits for the forwards f_i of the stages before it;
works, mu times f_s + b_s; under 1F1B waits for its first backward, which comes after forward and backward of all later
stages, and can meanwhile do one forward for each of these; and sums its gradients and updates at the end. So with T the
step without its overhead::

    T >= own_s = busy_s + sum f_i (i before s) + sum (f_j + b_j - f_s) (j after s),   busy_s = mu (f_s + b_s) + once_s

(Under GPipe, where all forwards come first: b_j for later stages.)

What devices cost. Let all devices of type k together have a price v_k, the sum of which is 1. A slice of t devices with
r of the R rows charges each of these w = v_k t (R / r) / N_k: over all rows that is on average what the stage's devices
are worth. So there is a row whose charges w_s have a sum of 1 at most. If T < x, then on the way of that row

- each stage is busy for less than x, and its layers fit in memory;
- sum w_s <= 1;
- sum w_s own_s <= x sum w_s, the mean.

eta / x times the last, with (1 - sum w_s) sum f_i added on both sides, and the one before it make::

    sum w_s (1 - eta + eta (busy_s + E) / x) + eta / x sum (f_s (1 - w_s) + d_s W_s) <= 1 + eta E / x

where W_s is the sum of the charges before s, d_s = b_s - F, F what a stage's forward takes (where it takes more, w_s
times that for each later stage goes off), and E the most that all forwards take in x. Only W_s is no matter of stage s
alone. For any beta >= 0 and m_s = min(beta w_s, d_s)::

    sum d_s W_s >= sum (m_s - w_s d_s / 2) - beta / 2

because d_s (W_s + w_s / 2) >= m_s - m_s (1 - W_s - w_s / 2) >= m_s - beta w_s (1 - W_s - w_s / 2), and these last terms
without beta add up to an integral of 1 - y within [0, 1]. (For the first stage, whose W_s is 0, any d_s will do.) So
the least that a chain of stages pays is a shortest path over cuts; if it is more than the right side, no plan takes
less than x. Any v, eta, beta and F are valid (weak duality); they are moved while that helps.

A kind of slices that stands for several numbers of rows takes what the fewest take and charges what the most would:
with less of either T is no longer (what goes off are M - 1 forwards at most, and all M count).

Complexity: O(stretches x slices) for each x and move, where stretches of the same layers count once, and some moves for
each number of rows that can be the best; the number of devices does not matter. Taken for granted is what `slices` says
of its prices, and that rows are divided by speed, so that those of a slice tell how many there are at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from whale.planner.estimate import STEP_OVERHEAD_SECONDS
from whale.planner.search.meshes import Array, Meshes
from whale.planner.search.slices import NEVER, NUMBERS, Integers, Slices

__all__ = ["bound_seconds", "least_work", "work_of_parts"]

ROUNDS = 40
"""Of improving the prices in `least_work`; each halves a step."""

HIGHEST = 4.0
"""Times the work alone, above which no bound is looked for."""

HALVINGS = 6
"""Of what lies between a bound that holds and one that is not shown to."""

GAIN = 1.015
"""Times the bound, to which a move of the prices must lead."""

START = 1.3
"""Times the work alone: there numbers of rows are compared, those with the least to show for it come first."""

MOST_MOVES = 4
"""Of the prices, for a number of rows."""


MOST_CELLS = 1_500_000
"""Numbers of rows x stretches x slices x moves: of large searches the prices are moved less."""


class _Prices(NamedTuple):
    """What may be chosen: v, eta; beta and F in units of x / mu."""

    types: tuple[float, ...]
    mean: float
    waiting: float
    forward: float


def bound_seconds(
    meshes: Meshes, batch: int, micro_batches: Sequence[int], schedules: Sequence[str] = ("1f1b",)
) -> float:
    """No plan with one of these numbers of micro-batches, and of these schedules, takes less."""
    slices = Slices.of(meshes, -(-batch // min(micro_batches)))
    stretches = _Stretches.of(slices.order, len(slices.work))
    work = batch * least_of_types(slices)[np.array(slices.order)]
    prices = _Prices(tuple(best_prices(work, slices.nums).tolist()), 0.8, 1.0, _usual_forward(slices))
    least = least_work(work, slices.nums)
    cases = [
        _Case(slices=slices, stretches=stretches, batch=batch, rows=meshes.rows(batch, count), schedule=schedule)
        for schedule in schedules
        for count in sorted(set(micro_batches))
    ]
    shown = {case: case.shown(least * START, prices) for case in cases}
    cases.sort(key=lambda case: shown[case])
    bound, known = least * HIGHEST, [prices]
    moves = min(MOST_MOVES, MOST_CELLS // (len(cases) * len(stretches.counts) * len(slices.type)))
    for case in cases:
        bound, found = case.bound(least, bound, known, moves)
        known = [prices, found]
    return bound + STEP_OVERHEAD_SECONDS


def _usual_forward(slices: Slices) -> float:
    """The share of the forward in what the chain takes, on the best slices of the type that has most of it."""
    order = list(slices.order)
    work, forward, backward = (one[order].sum(axis=0) for one in (slices.work, slices.forward, slices.backward))
    best = [np.where(slices.type == type_, work, np.inf).argmin() for type_ in range(len(slices.nums))]
    return float(max(forward[one] / max(forward[one] + backward[one], 1e-12) for one in best))


# --- work alone -------------------------------------------------------------------------------------------------------


def work_of_parts(meshes: Meshes, batch: int, micro_batches: Sequence[int]) -> Array:
    """Device-seconds of each part of the chain for the whole batch, on each type at its best."""
    slices = Slices.of(meshes, -(-batch // min(micro_batches)))
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
        ending: for each part the stretches that end with it, by their first part.
        later: parts after a stretch, at most.
    """

    counts: Array
    ending: tuple[Integers, ...]
    later: Array

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
        ends = np.cumsum(np.arange(1, len(order) + 1))
        return cls(counts=counts, ending=tuple(np.split(which, ends[:-1])), later=later[:, None])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Case:
    """Plans whose micro-batches have so many rows."""

    slices: Slices
    stretches: _Stretches
    batch: int
    rows: int
    schedule: str

    def bound(self, least: float, wanted: float, known: Sequence[_Prices], moves: int) -> tuple[float, _Prices]:
        """The largest bound up to *wanted* that is shown by prices that are known or better ones, and those; *least*
        holds."""
        for prices in known:
            if self.shown(wanted, prices) > 0:
                return wanted, prices
        found, prices = max((self._between(least, wanted, prices), prices) for prices in known)
        for _ in range(moves):
            aim = min(wanted, found * GAIN)
            shown, moved = max((self.shown(aim, one), one) for one in self._moved(prices))
            if shown <= 0:
                break
            found, prices = aim, moved
        return found, prices

    def _between(self, low: float, high: float, prices: _Prices) -> float:
        """The largest bound of these that is shown; the lower one holds."""
        if self.shown(high, prices) > 0:
            return high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.shown(middle, prices) > 0 else (low, middle)
        return low

    def _moved(self, prices: _Prices) -> Iterator[_Prices]:
        yield prices
        for index in range(len(prices.types) if len(prices.types) > 1 else 0):
            for part in (0.04, -0.04):
                moved = [max(0.0, price * (1 - part)) for price in prices.types]
                moved[index] = max(0.0, moved[index] + part)
                yield prices._replace(types=tuple(price / sum(moved) for price in moved))
        for times in (0.8, 1.25):
            yield prices._replace(mean=prices.mean * times)
        for times in (0.6, 1.6):
            yield prices._replace(waiting=prices.waiting * times)
        for forward in (prices.forward - 0.03, prices.forward + 0.03):
            yield prices._replace(forward=max(0.0, forward))

    def shown(self, step: float, prices: _Prices) -> float:
        """By how much the cheapest chain of stages pays more than it may in a step of so many seconds; then none takes
        less."""
        unit, scale = step * self.rows / self.batch, prices.mean / step
        charge = np.array(prices.types)[self._type] * self._devices
        behind, waiting = prices.forward * unit * self._does_forwards, prices.waiting * unit * charge
        latest = self._most_forward(step)
        held = charge * (1 - prices.mean + scale * latest)
        pays = charge * self._own
        pays += np.minimum(waiting + behind, self._back)
        pays *= scale
        pays += held + scale * behind * (charge / 2 - 1) + scale * self._forward
        if self._does_forwards:
            pays -= scale * charge * np.maximum(0.0, self._forward - behind) * self._most_forwards
        fits = self._fits & (self._busy < step) & (charge <= 1)
        begin = self._begin
        first = charge * (self._busy - self._forward)[begin] + self._forward[begin] + waiting * (1 - charge / 2)
        if self._does_forwards:
            first -= charge * np.maximum(0.0, self._forward[begin] - behind) * self._most_forwards[begin]
        best = np.where(fits, pays, NEVER).min(axis=1)
        firsts = np.where(fits[begin], held + scale * first, NEVER).min(axis=1)
        reached = np.zeros(len(begin) + 1)
        for place, ending in enumerate(self.stretches.ending):
            reached[place + 1] = firsts[place]
            if place:
                reached[place + 1] = min(firsts[place], (best[ending[1:]] + reached[1 : place + 1]).min())
        return float(reached[-1] - 1 - scale * (latest + prices.waiting * unit / 2))

    # By slice, of which there are those that a micro-batch may have

    @cached_property
    def _chosen(self) -> Integers:
        return np.flatnonzero(self.slices.fewest <= self.rows)

    @cached_property
    def _type(self) -> Integers:
        return self.slices.type[self._chosen]

    @cached_property
    def _most(self) -> Integers:
        """Rows."""
        return np.minimum(self.slices.most[self._chosen], self.rows)

    @cached_property
    def _devices(self) -> Array:
        """Of a stage that has only such slices, as a share of those of their type."""
        found: Array = self.slices.degree[self._chosen] * self.rows / self._most / self.slices.nums[self._type]
        return found

    # By stretch and slice

    def _over(self, parts: Array) -> Array:
        found: Array = self.stretches.counts @ np.minimum(parts[:, self._chosen], NEVER)
        return found

    @cached_property
    def _fits(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return (self._over(self.slices.memory) <= 1) & (self._over(self.slices.forward) < NEVER)

    @cached_property
    def _busy(self) -> Array:
        """Seconds of a step: work, sums of gradients, updates; of a range of rows with the fewest of them."""
        slices = self.slices
        worked: Array = self.batch / self.rows * (self._forward + self._over(slices.backward))
        return worked + self._over(slices.gradients) * self._pace + self._over(slices.update)

    @cached_property
    def _pace(self) -> Array:
        """Seconds a byte of the sum over as many slices as there are at least; between two numbers that are priced it
        is on the line, by the share that is sent (a ring sends 1 - 1 / number of the bytes twice)."""
        number = np.ceil(self.rows / (self._most + 1) / self.slices.slower[self._chosen] - 1e-9)
        number = np.maximum(number, 1.0 + (self._most < self.rows))
        paces = np.concatenate([np.zeros((1, len(self._type))), self.slices.paces[:, self._chosen]])
        sent, known = 1 - 1 / number, 1 - 1 / np.array([1.0, *NUMBERS])
        place = np.clip(np.searchsorted(known, sent, side="right") - 1, 0, len(known) - 2)
        part = np.clip((sent - known[place]) / (known[place + 1] - known[place]), 0.0, 1.0)
        column = np.arange(len(self._type))
        found: Array = paces[place, column] * (1 - part) + paces[place + 1, column] * part
        return found

    @cached_property
    def _forward(self) -> Array:
        """Of a micro-batch."""
        return self._over(self.slices.forward)

    @cached_property
    def _back(self) -> Array:
        """What a later stage makes an earlier one wait for, beyond what that makes it wait for."""
        back = self._over(self.slices.backward)
        return back - self._forward if self.schedule == "gpipe" else back

    @cached_property
    def _own(self) -> Array:
        """What a stage pays for each of its devices, but for what it holds."""
        found: Array = self._busy - self._forward - self._back / 2
        return found

    @cached_property
    def _begin(self) -> Integers:
        """The stretches that begin the chain, by their end."""
        return np.array([ending[0] for ending in self.stretches.ending])

    @property
    def _does_forwards(self) -> bool:
        """Whether a stage that waits for its first backward has forwards to do."""
        return self.schedule != "gpipe" and self.rows < self.batch

    @cached_property
    def _most_forwards(self) -> Array:
        """How many, for each stretch."""
        return np.minimum(self.stretches.later, -(-self.batch // self.rows) - 1) * self._does_forwards

    def _most_forward(self, step: float) -> float:
        """The most that the forwards of a micro-batch can take, which with its backwards takes less than *step*: a
        share that most parts keep, and what the others take beyond it, on slices that are done in time."""
        forward, whole = self._of_parts
        forward = np.where(whole * self.batch <= step * self.rows, forward, 0.0)
        shares = np.divide(forward, whole, out=np.zeros_like(forward), where=whole > 0).max(axis=1)
        beyond = np.maximum(0.0, forward - shares[:, None, None] * whole).max(axis=2)[:, list(self.slices.order)]
        return float(min(step, (shares * step + beyond.sum(axis=1)).min()))

    @cached_property
    def _of_parts(self) -> tuple[Array, Array]:
        """Forward, and forward and backward, of the parts that are unlike."""
        forward, backward = (one[:, self._chosen] for one in (self.slices.forward, self.slices.backward))
        return forward, forward + backward
