"""The error if no plan fits: the memory that the nearest plan lacks, and changes that would fit.

Remedies are more devices of each type, another number of micro-batches and smaller batches: for each kind, the smallest
sufficient change, by short searches that end with the first plan that fits. This module does not know how they search.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from whale.ir.cluster import DeviceType
from whale.ir.strategy import RECOMPUTES
from whale.ir.units import bytes_text
from whale.planner.advice import advised
from whale.planner.cost.stage import CostModel
from whale.planner.search.layout import laid_out
from whale.planner.search.partial_plans import PartialPlan
from whale.planner.search.problem import SearchSettings
from whale.planner.search.space import pools_of, with_more
from whale.planner.search.table import CostTable

__all__ = ["QUICK_LOOK_SECONDS", "Look", "remedies", "shortage"]

_T = TypeVar("_T")

QUICK_LOOK_SECONDS, REMEDIES_SECONDS = 1.0, 5.0
"""For each change that is weighed where nothing fits, and for all, unless the time limit leaves less."""

MORE = (1, 2, 4, 8, 16)
"""Nodes (of a single node: devices) that are weighed as an addition, up to as many devices as there are."""

MULTIPLES = (2, 4, 8, 16)
"""Multiples of a type's devices that are tried if no such addition is enough."""

Look = Callable[[CostModel, int, SearchSettings], int | None]
"""A short search for a batch: the number of micro-batches of a plan that fits, or None."""


def shortage(meshes: CostTable, nearest: PartialPlan, batch: int, weighed: Iterable[tuple[bool, str]]) -> str:
    """Error text for the *nearest* plan, with the *weighed* changes and whether each would fit."""
    memory, stack = laid_out(meshes, nearest, batch).prediction.memory, meshes.prices.stack
    said = [f"recompute {stack.recompute!r}"] if stack.recompute != "none" else []
    said += [f"zero {stack.zero}"] if stack.zero else []
    ruled = f" with {' and '.join(said)}" if said else ""
    worst = max(memory, key=lambda one: one.total / one.capacity)
    state = worst.parameters + worst.gradients + worst.optimizer
    problem = (
        f"no plan fits in memory{ruled}. The one that comes nearest, {nearest.label}, needs "
        f"{bytes_text(worst.total)} on {worst.device}, which has {bytes_text(worst.capacity)}, "
        f"{bytes_text(max(0, worst.total - worst.capacity))} too little: "
        f"{bytes_text(state)} are weights, gradients and optimizer states, {bytes_text(worst.activations)} "
        f"activations, {bytes_text(worst.framework)} driver and libraries"
    )
    return advised(problem, list(weighed), otherwise="use devices with more memory, or a smaller model")


def remedies(
    prices: CostModel, batch: int, settings: SearchSettings, *, look: Look, seconds: float
) -> Iterator[tuple[bool, str]]:
    """The smallest sufficient change of each kind, or the largest one tried, and whether it is sufficient.

    *seconds* are left of the search's time. What there is no time for is left out.
    """
    num = len(prices.cluster.devices)
    until = time.monotonic() + min(REMEDIES_SECONDS, max(QUICK_LOOK_SECONDS, seconds))

    def fits(prices: CostModel, batch: int) -> bool:
        return time.monotonic() < until and look(prices, batch, settings) is not None

    for pool in pools_of(prices.cluster):

        def enough(times: int, type_: DeviceType = pool.type) -> bool:
            return fits(replace(prices, cluster=with_more(prices.cluster, type_, times)), batch)

        own = sum(device.type == pool.type for device in prices.cluster.devices)
        node = len(with_more(prices.cluster, pool.type, 1).devices) - num
        few = [times for times in MORE if times == 1 or times * node <= num]
        many = [times for multiple in MULTIPLES if (times := (multiple - 1) * own // node) > few[-1]]
        least = _least(few, enough) or _least(many, enough)
        count = node * (least or max(*few, *many))
        if least is not None or time.monotonic() < until:
            yield least is not None, f"{count} more {'device' if count == 1 else 'devices'} like {pool.type.name}"
    if settings.micro_batches is not None and settings.micro_batches < batch:
        micro_batches = look(prices, batch, replace(settings, micro_batches=None))
        if micro_batches is not None:
            yield True, f"{micro_batches} micro-batches"
    rule, level = prices.stack.recompute, prices.stack.zero
    rules = RECOMPUTES[RECOMPUTES.index(rule) + 1 :] if settings.recompute != "auto" else ()
    levels = [one for one in (1, 3) if one > level] if settings.zero != "auto" and num > 1 else []
    known = [one for one in rules if one in prices.profile.rules]
    ways = [[(one, level) for one in known], [(rule, one) for one in levels]]
    found = [next((way for way in tried if fits(prices.under(*way), batch)), None) for tried in ways]
    if not any(found):
        found.append(
            next((way for way in ((one, 3) for one in known if levels) if fits(prices.under(*way), batch)), None)
        )
    for way in found:
        if way is not None:
            said = [f"recompute {way[0]!r}"] if way[0] != rule else []
            yield True, " and ".join([*said, *([f"zero {way[1]}"] if way[1] != level else [])])
    batches = [batch // parts for parts in (2, 4, 8) if batch % parts == 0]
    smaller = _least(batches, lambda given: fits(prices, given))
    if smaller is not None or (batches and time.monotonic() < until):
        yield smaller is not None, f"a batch of {smaller or batches[-1]}"


def _least(values: Sequence[_T], fits: Callable[[_T], bool]) -> _T | None:
    """The first of some changes, from small to large, that is enough, if the last one is."""
    if not values or not fits(values[-1]):
        return None
    return values[bisect_left(values, True, hi=len(values) - 1, key=fits)]
