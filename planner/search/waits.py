"""A larger bound than that of `bound`, for some seconds: of every stage it knows how long it waits for the later ones.

Objective: the largest step for which it is proven that no plan takes less. As there, a row is followed whose slices
charge 1 at most by any prices of the types. But no mean of the stages is taken. A step of less than x seconds needs a
chain of stages each of which is done before x and fits in memory; the least that such a chain charges is worked out,
and if that is more than 1 there is no such plan. So stages of whole layers and rows count as they are.

What a stage waits. Let W be what a micro-batch takes through all k later stages and back, with messages: the turn.
Under 1F1B a stage does F_1 .. F_k+1, then B_1, F_k+2, B_2, F_k+3 and so on. Between F_i and B_i there is a turn;
meanwhile it does k forwards if i is 1, k backwards if i is M, the last of all micro-batches, else both. So of turns of
which none begins before the last one ended, as those of 1, k + 2, 2 k + 3 and so on and finally M are, each makes the
stage wait for W less what it does meanwhile. With mu, C, f, b, once and sigma as in `bound`, it is not done before::

    F + mu C + (W - min(k, M - 1) f) + J (W - k C) + (sigma W - k b) + max(once, sigma B)

where F and B are forward and backward of all that comes before, and J is (M - 1) // (k + 1) - 1 or 0; J and the last
turn count if M >= k + 2. In place of M the last turn may be that of M - 1, which has all its rows: W - k b - sigma f.
Under GPipe W is made of the last one's forwards and whole backwards, and a stage is not done before F + mu C + W +
max(once, sigma B).

What comes before is that of the quickest slices for each part. Slices that are quick charge more: for any rate r the
cheapest chain of earlier stages comes to Z with r times its forwards. So if those that are chosen already charge u, F
is at least (Z - (1 - u)) / r. (That is used with the first turn alone.)

Messages. A row goes from the first device of a slice to that of the next one. If nodes have P devices at most, those of
k + 1 stages lie on (k + 1) / P nodes, rounded up, and so many less 1 times a row goes to another node, and its gradient
back: so long W is at least besides.

Method: a shortest path by charges from the last stage to the first, over the cut, k and W (in parts of x, rounded
down). The prices are moved while the least charge is 1 or less.

Complexity: O(cuts x cuts x slices x `GRID`) for each number of later stages, x and prices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations, product
from math import inf
from typing import Any

import numpy as np

from whale.planner.search.bound import SLACK, Case, best_prices, cases_of, moved_prices, work_of
from whale.planner.search.meshes import Array, Meshes
from whale.planner.search.slices import NEVER, Integers, Slices

__all__ = ["Waits", "least_message", "raised_seconds"]

GRID = 512
"""Parts of a step, to which what is waited is rounded down."""

ENOUGH = 0.005
"""Share of a bound by which no larger one is looked for."""

MOST = 1 + 1e-9
"""Charges, as far as they are rounded."""

RATE = 8.0
"""Of forwards before a stage, in charges for as many seconds as a step."""

SIZES = (0.04, 0.02)
"""Of moves of the prices, one after the other."""

Prices = tuple[float, ...]


def raised_seconds(
    meshes: Meshes,
    batch: int,
    micro_batches: Sequence[int],
    schedules: Sequence[str],
    *,
    least: float,
    known: float,
    over: Callable[[], bool] = lambda: False,
) -> float:
    """No plan takes less, if none takes less than *least*; as `whale.planner.search.bound.bound_seconds`.

    Args:
        meshes, batch, micro_batches, schedules: as there.
        least: seconds of a step that are a bound.
        known: seconds of a step of a plan: the bound is looked for up to there.
        over: is asked often; once it says so the best so far is the answer.
    """
    low, high = least - meshes.prices.step_overhead, known - meshes.prices.step_overhead
    slices = Slices.of(meshes, -(-batch // min(micro_batches)))
    first = tuple(best_prices(work_of(slices, batch), slices.nums).tolist())
    message = least_message(meshes)
    cases = cases_of(meshes, slices, batch, micro_batches, schedules, high)
    waits = [Waits(case, 2 * message, meshes.largest_node) for case in cases]
    prices = dict.fromkeys(waits, first)
    while high - low > ENOUGH * high and not over():
        step = (low + high) / 2
        for place, one in enumerate(waits):
            prices[one], shown = one.improved(step, prices[one], over)
            if not shown:
                high = step
                waits.insert(0, waits.pop(place))  # the next time it is looked at first
                break
        else:
            low = step
    return max(least, low + meshes.prices.step_overhead)


def least_message(meshes: Meshes) -> float:
    """Seconds in which a row gets to another node, at least."""
    prices = meshes.prices
    ends: dict[Any, list[int]] = {}  # a rank of two nodes of each kind
    for pool in meshes.pools:
        for node in pool.nodes:
            ends.setdefault(prices.shape(node[:1]), []).append(node[0])
    ranks = [rank for alike in ends.values() for rank in alike[:2]]
    sizes = {prices.output_bytes(last - 1, 1) for last in meshes.chain.bounds[1:-1]}
    pairs = [
        pair
        for pair in permutations(ranks, 2)
        if prices.cluster.node_of(pair[0]) is not prices.cluster.node_of(pair[1])
    ]
    found = inf
    for (source, target), whole in product(pairs, sizes):
        into = prices.group((target,), 1)
        for (a, in_rows), (b, _) in product(_degrees(meshes), repeat=2):
            size = prices.handed(whole, a, b, positions=2 if in_rows else 1)
            hop = prices.hop((source,) * a, (target,) * b, into, size, whole)
            found = min(found, hop.latency + size / hop.bandwidth)
    return found if found < inf else 0.0


def _degrees(meshes: Meshes) -> list[tuple[int, bool]]:
    """Of slices, and whether each of their devices gets rows of its own."""
    return [(tensor * expert, expert > 1) for tensor, expert in meshes.all_divisions]


class Waits:
    """Chains of stages of the plans of a case.

    Args:
        case: of the bound.
        message: seconds in which a row gets to another node, and its gradient back.
        per_node: devices of a node, at most.
    """

    def __init__(self, case: Case, message: float, per_node: int) -> None:
        self._case, self._message, self._per_node = case, message, per_node
        self._pairs = pairs = case.pairs()
        self._both = pairs.forward + pairs.backward
        gpipe = case.schedule == "gpipe"
        self._turn = case.last * pairs.forward + pairs.backward if gpipe else self._both
        between = case.stretches.between
        starts = np.searchsorted(pairs.stretch, np.arange(between.max() + 1))
        ends = np.searchsorted(pairs.stretch, np.arange(between.max() + 1), side="right")
        self._stages: list[tuple[Integers, Integers]] = []  # by their first part: which pair, and up to which part
        for first in range(len(between) - 1):
            upto = np.arange(first + 1, len(between))
            own = [np.arange(starts[one], ends[one]) for one in between[first, upto]]
            self._stages.append((np.concatenate(own), np.repeat(upto, list(map(len, own)))))
        order, may = np.array(case.slices.order), case.slices.fewest <= case.rows
        least = [parts[:, may].min(axis=1)[order] for parts in (case.slices.forward, case.slices.backward)]
        self._ahead, self._back = (np.concatenate([[0.0], np.cumsum(one)]) for one in least)

    def improved(self, step: float, prices: Prices, over: Callable[[], bool]) -> tuple[Prices, bool]:
        """Prices, moved while that helps, and whether they show that no plan takes less than *step*."""
        most = self.charge(step, prices)
        for size in SIZES:
            while most <= 1 and not over():
                found = max((self.charge(step, one), one) for one in moved_prices(prices, size))
                if found[0] <= most:
                    break
                most, prices = found
        return prices, most > 1

    def charge(self, step: float, prices: Prices) -> float:
        """What the cheapest chain of stages charges that are all done before *step*; `NEVER` if that is more than 1."""
        pairs, charges = self._pairs, np.array(prices)[self._pairs.type] * self._pairs.devices
        can = (pairs.work + pairs.once < step) & (charges <= 1)
        before = self._least_before(charges, can)
        if before[-1] > MOST:
            return NEVER
        rate = RATE / step
        both = self._least_before(charges + rate * pairs.forward, can)
        unit, num = step / GRID, len(before)
        turns = np.floor(self._turn / unit).astype(np.int64)
        waited = np.arange(GRID + 1)
        left = np.full((num, GRID + 1), NEVER)  # by first part, and what is waited for it and all that is later
        left[-1, 0] = 0.0
        later, found = 0, NEVER
        while left.min() < NEVER:
            cheapest, quickest = left.min(axis=1), (left < NEVER).argmax(axis=1)
            usable = can & (pairs.state + self._case.held(later) * pairs.kept <= 1 + SLACK)
            low, high = np.flatnonzero((left < NEVER).any(axis=0))[[0, -1]]
            more = np.full_like(left, NEVER)
            for first, (pair, upto) in enumerate(self._stages):
                chosen = usable[pair] & (charges[pair] + cheapest[upto] + before[first] <= MOST)
                pair, upto = pair[chosen], upto[chosen]
                usual, most = (room / unit + SLACK for room in self._room(step, first, pair, later))
                chosen = most >= quickest[upto]
                if not chosen.any():
                    continue
                pair, upto, usual, most = pair[chosen], upto[chosen], usual[chosen], most[chosen]
                window = slice(low + turns[pair].min(), min(high, int(most.max())) + turns[pair].max() + 1)
                own = waited[window] - turns[pair][:, None]
                charged = left[upto[:, None], np.maximum(own, 0)] + charges[pair][:, None]
                rest = usual + (self._ahead[first] - (both[first] - MOST) / rate) / unit
                in_time = (own <= most[:, None]) & (own + charged / (rate * unit) <= rest[:, None])
                charged[(own < 0) | ~in_time] = NEVER
                least = charged.min(axis=0)
                more[first, window] = np.where(least + before[first] <= MOST, least, NEVER)
            found = min(found, float(more[0].min()))
            more[0] = NEVER
            better = np.minimum.accumulate(more, axis=1)
            more[:, 1:][better[:, :-1] <= more[:, 1:]] = NEVER
            left, later = more, later + 1
        return found

    def _least_before(self, charges: Array, can: np.ndarray[Any, np.dtype[np.bool_]]) -> Array:
        """What stages charge at least up to each part, if each is done in time by itself."""
        found = np.full(len(self._stages) + 1, NEVER)
        found[0] = 0.0
        for first, (pair, upto) in enumerate(self._stages):
            chosen = can[pair]
            np.minimum.at(found, upto[chosen], found[first] + charges[pair[chosen]])
        return found

    def _room(self, step: float, first: int, pair: Integers, later: int) -> tuple[Array, Array]:
        """What all that is later may take of a micro-batch, so that stages of these pairs are done before *step*: by
        the first turn alone, and by all."""
        case, pairs = self._case, self._pairs
        forward, backward, once = pairs.forward[pair], pairs.backward[pair], pairs.once[pair]
        away = self._message * (-(-(later + 1) // self._per_node) - 1)
        left = step - pairs.work[pair] - self._ahead[first] - np.maximum(once, case.last * self._back[first])
        if case.schedule == "gpipe":
            room = left - away * (1 + case.last) / 2
            return room, room
        left = left + min(later, case.num - 1) * forward
        room = left
        for last, share in ((case.num, case.last), (case.num - 1, 1.0)):
            if later and last >= later + 2:
                twice = left + later * backward + (case.last * forward if last < case.num else 0.0)
                times = (last - 1) // (later + 1) - 1
                every = (twice + times * later * self._both[pair]) / (1 + share + times)
                room = np.minimum(room, np.minimum(twice / (1 + share), every))
        return left - away, room - away
