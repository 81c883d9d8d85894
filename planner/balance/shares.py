"""Shares of a batch, or of a sharded dim, on mixed devices: the fastest shares that fit in memory.

Objective: the least time of the slowest device, min max t_i(k_i). Constraints: whole shares that sum to the total, and
fixed_i + slope_i k_i <= capacity_i. `fastest_shares` is exact.

Algorithm 1 of the Whale paper (USENIX ATC 2022) divides in proportion to speed, then moves units that do not fit to the
device that finishes first. That can be slower, because neither largest remainder nor moving a whole excess to one
device minimizes the slowest time. On speeds 15.7, 15.7, 9.3, 9.3 with 256 rows, of which the first device
holds 77, its shares 77, 83, 48, 48 take 5.287, the exact 77, 82, 49, 48 take 5.269. Without memory limits the
difference is at most one row of the slowest device. This module knows numbers only: no model, no cluster.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil, inf

from whale.errors import InfeasibleError, UsageError
from whale.ir.profile import Affine
from whale.ir.units import bytes_text
from whale.planner.advice import advised

__all__ = ["Move", "Remedy", "Shares", "Worker", "fastest_shares", "memory_between"]

_NOTHING = Affine(0, 0)
MOST_ONE_BY_ONE = 1024
"""Number of units that are assigned one by one, with the running maximum of times that decrease. Detecting a decrease
needs the time of every unit; above this number times are assumed not to decrease, and where they do, shares are near
the best."""


ROUNDING = 1e-12
"""By how much a sum of products of floats may be above the bytes that it stands for, as a part: less than a byte."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A device, or several that work as one, that takes a share.

    Attributes:
        name: for messages.
        seconds: time of a number of units, measured or modelled. Where a curve decreases, its running maximum counts:
            more work never finishes earlier.
        memory: bytes of a number of units: a fixed part, and a part for each unit.
        capacity_bytes: memory that it may use.
    """

    name: str
    seconds: Callable[[int], float]
    memory: Affine = _NOTHING
    capacity_bytes: float = inf

    def limit(self, total: int) -> int:
        """Most units of *total* that fit in its memory; -1 if not even 0 fit.

        >>> Worker(name="card", seconds=float, memory=Affine(2e9, 0.18e9), capacity_bytes=16e9).limit(256)
        77
        """
        capacity = self.capacity_bytes * (1 + ROUNDING)
        if self.memory(0) > capacity:
            return -1
        if self.memory(total) <= capacity:
            return total
        held = min(total, int((capacity - self.memory.fixed) / self.memory.per_row))
        while self.memory(held) > capacity:  # at most once: the division rounds
            held -= 1
        return held + 1 if self.memory(held + 1) <= capacity else held


def memory_between(needed: Callable[[float], float], low: float, high: float, *, fixed: float = 0.0) -> Affine:
    """Return the memory of a worker: *fixed* bytes, and the line through what it needs for two numbers of units.

    >>> memory_between(lambda units: 3 + 2 * units, 1, 4, fixed=10)
    Affine(fixed=13.0, per_row=2.0)
    """
    per_unit = (needed(high) - needed(low)) / (high - low) if high > low else 0.0
    return Affine(fixed + max(0.0, needed(low) - per_unit * low), per_unit)


@dataclass(frozen=True, kw_only=True)
class Move:
    """Units moved from a worker (by position) without memory to another, and the reason."""

    giver: int
    taker: int
    units: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of all workers.

    Attributes:
        units: of each worker.
        by_speed: the shares without memory limits.
        moves: from ``by_speed`` to ``units``.
        seconds: time of the slowest worker.
    """

    units: tuple[int, ...]
    by_speed: tuple[int, ...]
    moves: tuple[Move, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that could make the shares fit, with the changed total and workers.

    ``change`` completes the sentence "it would fit with ...", such as ``4 micro-batches``.
    """

    change: str
    total: int
    workers: Sequence[Worker]


def fastest_shares(
    total: int, workers: Sequence[Worker], *, minimum: int = 0, unit: str = "rows", remedies: Iterable[Remedy] = ()
) -> Shares:
    """Return the shares with the least time of the slowest worker.

    Units are assigned one by one, each to the worker that would finish it first. Units that take no time of their own,
    as those of devices that wait for launches, are shared evenly; other ties go to the lower index. If times
    do not decrease with the share this is optimal and monotone: a faster worker never gets fewer units than a slower
    one with as much memory, nor than it had before it became faster. It is never slower than an even split that fits.
    Exact; evaluates O(total log n) times, or O(n log^2 total) for many units.

    Args:
        total: units to assign.
        workers: at least one.
        minimum: of each worker (a sharded dim needs 1).
        unit: name of a unit, for messages.
        remedies: evaluated in the error message only.

    Raises:
        InfeasibleError: the total does not fit; the message says which worker lacks how much, and which changes would
            fit.

    >>> fast = Worker(name="V100:0", seconds=lambda rows: rows / 15.7, memory=Affine(2, 0.3), capacity_bytes=16)
    >>> slow = Worker(name="P100:1", seconds=lambda rows: rows / 9.3, memory=Affine(2, 0.3), capacity_bytes=32)
    >>> found = fastest_shares(96, [fast, slow])
    >>> found.by_speed, found.units
    ((60, 36), (46, 50))
    """
    limits = _limits(total, workers, minimum, unit, remedies)
    by_speed = _first_done(total, workers, [total] * len(workers), minimum)
    if all(share <= limit for share, limit in zip(by_speed, limits, strict=True)):
        return _shares(by_speed, by_speed, (), workers)
    units = _first_done(total, workers, limits, minimum)
    return _shares(units, by_speed, _moves(by_speed, units, workers, unit), workers)


_Turn = tuple[float, int, int]
"""Turn of a unit: when it is done, its number if it takes no time of its own (0: it does), and its worker's index."""


def _turn(seconds: Callable[[int], float], unit: int, index: int) -> _Turn:
    done = seconds(unit)
    return done, unit if unit > 1 and seconds(unit - 1) == done else 0, index


def _first_done(total: int, workers: Sequence[Worker], limits: Sequence[int], minimum: int) -> tuple[int, ...]:
    """Give each worker *minimum* units and assign the others in the order of their turns, within limits."""
    units = [minimum] * len(workers)
    if total - minimum * len(workers) > MOST_ONE_BY_ONE:
        units = _surely_first(total, workers, limits, minimum)
    heap = [
        _turn(workers[index].seconds, units[index] + 1, index)
        for index in range(len(workers))
        if units[index] + 1 <= limits[index]
    ]
    heapq.heapify(heap)
    for _ in range(total - sum(units)):
        before, _, index = heap[0]
        units[index] += 1
        if units[index] < limits[index]:
            done = max(before, workers[index].seconds(units[index] + 1))
            heapq.heapreplace(heap, (done, units[index] + 1 if done == before else 0, index))
        else:
            heapq.heappop(heap)
    return tuple(units)


def _surely_first(total: int, workers: Sequence[Worker], limits: Sequence[int], minimum: int) -> list[int]:
    """Compute the shares of `_first_done` before the last few units by bisection.

    Units are assigned in the order of their turns. So a unit is assigned if at most *total* units precede it. Testing
    the middle of the undecided units decides a quarter of them. Evaluates O(n log^2 total) times.
    """
    seconds = [cache(worker.seconds) for worker in workers]
    given, possible = [minimum] * len(workers), list(limits)
    while total - sum(given) > len(workers):
        middles = sorted(
            (seconds[index](middle), index, middle)
            for index, (least, most) in enumerate(zip(given, possible, strict=True))
            if (middle := (least + most) // 2 + 1) <= most
        )
        undecided = list(accumulate(possible[index] - given[index] for _, index, _ in middles))
        _, last, middle = middles[bisect_left(undecided, undecided[-1] / 2)]
        turn = _turn(seconds[last], middle, last)
        before = [_up_to(turn, seconds[index], index, given[index], possible[index]) for index in range(len(workers))]
        if sum(before) <= total:
            given = before
        else:
            possible = before
            possible[last] = middle - 1
    return given


def _up_to(turn: _Turn, seconds: Callable[[int], float], index: int, least: int, most: int) -> int:
    """Number of a worker's units between *least* and *most* whose turn is not after another."""
    while least < most:
        middle = (least + most) // 2 + 1
        done = seconds(middle)
        if done < turn[0] or (done == turn[0] and _turn(seconds, middle, index) <= turn):
            least = middle
        else:
            most = middle - 1
    return least


def _shares(
    units: tuple[int, ...], by_speed: tuple[int, ...], moves: tuple[Move, ...], workers: Sequence[Worker]
) -> Shares:
    seconds = max(worker.seconds(share) for worker, share in zip(workers, units, strict=True))
    return Shares(units=units, by_speed=by_speed, moves=moves, seconds=seconds)


def _moves(before: Sequence[int], after: Sequence[int], workers: Sequence[Worker], unit: str) -> tuple[Move, ...]:
    """Moves that lead from *before* to *after*: the first giver to the first taker."""
    gives = [[index, b - a] for index, (b, a) in enumerate(zip(before, after, strict=True)) if b > a]
    takes = [[index, a - b] for index, (b, a) in enumerate(zip(before, after, strict=True)) if a > b]
    moves: list[Move] = []
    while gives:
        (giver, given), (taker, taken) = gives[0], takes[0]
        moved = min(given, taken)
        moves.append(Move(giver=giver, taker=taker, units=moved, reason=_reason(workers[giver], after[giver], unit)))
        gives[0][1] -= moved
        takes[0][1] -= moved
        gives = gives if gives[0][1] else gives[1:]
        takes = takes if takes[0][1] else takes[1:]
    return tuple(moves)


def _reason(worker: Worker, limit: int, unit: str) -> str:
    return f"the {bytes_text(worker.capacity_bytes)} of {worker.name} hold {limit} {unit}"


# --- what does not fit
# ----------------------------------------------------------------------------------------------------------------------


def _limits(total: int, workers: Sequence[Worker], minimum: int, unit: str, remedies: Iterable[Remedy]) -> list[int]:
    """Most units that fit on each worker, if they suffice for the total."""
    if total < 0 or minimum < 0 or not workers:
        raise UsageError(
            f"{total} {unit} among {len(workers)} devices, at least {minimum} each: give at least one device, and "
            "nothing negative"
        )
    if total < minimum * len(workers):
        raise InfeasibleError(
            f"{total} {unit} cannot give each of {len(workers)} devices {minimum}; use at most {total // minimum} "
            "devices there"
        )
    limits = [worker.limit(total) for worker in workers]
    if min(limits) < minimum or sum(limits) < total:
        raise InfeasibleError(_shortage(total, workers, limits, minimum, unit, remedies))
    return limits


def _shortage(
    total: int, workers: Sequence[Worker], limits: Sequence[int], minimum: int, unit: str, remedies: Iterable[Remedy]
) -> str:
    """The error if the total does not fit: which worker lacks how much, and which changes would fit."""
    wanted = [minimum] * len(workers)
    held = sum(max(limit, 0) for limit in limits)
    if min(limits) < minimum:
        problem = f"{total} {unit} do not fit"
    else:
        wanted = list(_first_done(total, workers, [total] * len(workers), minimum))
        problem = f"{total} {unit} do not fit: the {len(workers)} devices hold {held}"
    need, index = _fullest(workers, wanted)
    worker = workers[index]
    what = f"for {wanted[index]} {unit}" if wanted[index] else f"for what it holds without any {unit}"
    problem += (
        f". {worker.name} has {bytes_text(worker.capacity_bytes)} and would need {bytes_text(need)} {what}, "
        f"{bytes_text(need - worker.capacity_bytes)} more"
    )
    weighed = [_weigh(remedy, minimum) for remedy in remedies]
    if min(limits) >= minimum and held:
        roomiest = max(range(len(limits)), key=lambda index: (limits[index], -index))
        more = ceil((total - held) / limits[roomiest])
        weighed.append((True, f"at most {held} {unit}"))
        weighed.append((True, f"{more} more {'device' if more == 1 else 'devices'} like {workers[roomiest].name}"))
    return advised(problem, weighed, otherwise=OTHERWISE)


OTHERWISE = "divide the layers over more stages or a tensor group, or use devices with more memory"
"""Advice if no known change fits, valid for every command and the executor."""


def _weigh(remedy: Remedy, minimum: int) -> tuple[bool, str]:
    """Whether the total fits after the change, and the bytes of the fullest worker then."""
    limits = [worker.limit(remedy.total) for worker in remedy.workers]
    fitting = min(limits) >= minimum and sum(limits) >= remedy.total
    units = _first_done(remedy.total, remedy.workers, limits if fitting else [remedy.total] * len(limits), minimum)
    need, index = _fullest(remedy.workers, units)
    worker = remedy.workers[index]
    return fitting, f"{remedy.change} ({bytes_text(need)} of {bytes_text(worker.capacity_bytes)} on {worker.name})"


def _fullest(workers: Sequence[Worker], units: Sequence[int]) -> tuple[float, int]:
    """Bytes and position of the worker with the largest ratio of bytes to capacity."""
    needs = [worker.memory(share) for worker, share in zip(workers, units, strict=True)]
    index = max(range(len(needs)), key=lambda index: (needs[index] / workers[index].capacity_bytes, -index))
    return needs[index], index
