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
from whale.ir.strategy import RECOMPUTES, Offload, Recompute
from whale.ir.units import bytes_text
from whale.ir.workload import Prediction
from whale.planner.advice import advised
from whale.planner.cost.hosts import OF_PROCESSES, has_hosts, host_of
from whale.planner.cost.stage import CostModel
from whale.planner.search.layout import laid_out
from whale.planner.search.partial_plans import PartialPlan
from whale.planner.search.problem import SearchSettings
from whale.planner.search.space import pools_of, with_more
from whale.planner.search.table import CostTable

__all__ = ["QUICK_LOOK_SECONDS", "Look", "hosts_hold", "remedies", "shortage"]

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
    found, stack = laid_out(meshes, nearest, batch).prediction, meshes.prices.stack
    memory = found.memory
    said = [f"recompute {stack.recompute!r}"] if stack.recompute != "none" else []
    said += [f"zero {stack.zero}"] if stack.zero else []
    said += [f"offload {stack.offload!r}"] if stack.offload != "none" else []
    ruled = f" with {' and '.join(said)}" if said else ""
    worst = max(memory, key=lambda one: one.share)
    state = worst.parameters + worst.gradients + worst.optimizer
    problem = (
        f"no plan fits in memory{ruled}. The one that comes nearest, {nearest.label}, needs "
        f"{bytes_text(worst.total)} on {worst.device}, which has {bytes_text(worst.capacity)}, "
        f"{bytes_text(max(0, worst.total - worst.capacity))} too little: "
        f"{bytes_text(state)} are weights, gradients and optimizer states, {bytes_text(worst.activations)} "
        f"activations, {bytes_text(worst.framework)} driver and libraries"
    )
    if all(device.total <= device.capacity for device in memory):
        return _of_hosts(f"no plan fits in memory{ruled}. The one that comes nearest, {nearest.label},", found)
    return advised(problem, list(weighed), otherwise="use devices with more memory, or a smaller model")


def _of_hosts(which: str, found: Prediction) -> str:
    """Error text for a plan that fits on its devices, but not on the hosts."""
    worst = max(found.hosts, key=lambda one: one.total - one.capacity)
    return advised(
        f"{which} needs {bytes_text(worst.total)} in the memory of {worst.node} itself, which has "
        f"{bytes_text(worst.capacity)}, {bytes_text(worst.total - worst.capacity)} too little: "
        f"{bytes_text(worst.state)} are parameters, gradients and optimizer states, {bytes_text(worst.activations)} "
        f"activations, {bytes_text(worst.processes)} processes",
        [(True, f"host_memory of {bytes_text(worst.total)} in the cluster file")],
        otherwise="use more nodes, or an optimizer with fewer states",
    )


def remedies(
    prices: CostModel, batch: int, settings: SearchSettings, *, look: Look, seconds: float
) -> Iterator[tuple[bool, str]]:
    """The smallest sufficient change of each kind, or the largest one tried, and whether it is sufficient.

    *seconds* are left of the search's time. What there is no time for is left out.
    """
    num = len(prices.cluster.devices)
    until = time.monotonic() + min(REMEDIES_SECONDS, max(QUICK_LOOK_SECONDS, seconds))

    def fits(prices: CostModel, batch: int) -> bool:
        return time.monotonic() < until and hosts_hold(prices) and look(prices, batch, settings) is not None

    for type_ in dict.fromkeys(pool.type for pool in pools_of(prices.cluster)):

        def enough(times: int, type_: DeviceType = type_) -> bool:
            return fits(replace(prices, cluster=with_more(prices.cluster, type_, times)), batch)

        own = sum(device.type == type_ for device in prices.cluster.devices)
        node = len(with_more(prices.cluster, type_, 1).devices) - num
        few = [times for times in MORE if times == 1 or times * node <= num]
        many = [times for multiple in MULTIPLES if (times := (multiple - 1) * own // node) > few[-1]]
        least = _least(few, enough) or _least(many, enough)
        count = node * (least or max(*few, *many))
        if least is not None or time.monotonic() < until:
            yield least is not None, f"{count} more {'device' if count == 1 else 'devices'} like {type_.name}"
    if settings.micro_batches is not None and settings.micro_batches < batch:
        micro_batches = look(prices, batch, replace(settings, micro_batches=None))
        if micro_batches is not None:
            yield True, f"{micro_batches} micro-batches"
    rule, level, offload = prices.stack.recompute, prices.stack.zero, prices.stack.offload
    rules = RECOMPUTES[RECOMPUTES.index(rule) + 1 :] if settings.recompute != "auto" else ()
    levels = [one for one in (1, 3) if one > level] if settings.zero != "auto" and num > 1 else []
    known = [one for one in rules if one in prices.profile.rules]
    ways = [[(one, level, offload) for one in known], [(rule, one, offload) for one in levels]]
    found = [next((way for way in tried if fits(prices.under(*way), batch)), None) for tried in ways]
    if not any(found):
        found.append(
            next(
                (way for way in ((one, 3, offload) for one in known if levels) if fits(prices.under(*way), batch)), None
            )
        )
    if not any(found) and settings.offload == "none" and has_hosts(prices.cluster):
        most, last = (*known, rule)[len(known) - 1], max(1, level, *levels)
        on_host: list[tuple[Recompute, int, Offload]] = [(rule, max(1, level), "state"), (most, last, "state")]
        on_host.append((most, last, "both"))
        if prices.profile.has_tables:
            on_host = [(rule, level, "tables")]
        found.append(next((way for way in on_host if fits(prices.under(*way), batch)), None))
    for way in found:
        if way is not None:
            said = [f"recompute {way[0]!r}"] if way[0] != rule else []
            said += [f"zero {way[1]}"] if way[1] != level else []
            yield True, " and ".join([*said, *([f"offload {way[2]!r}"] if way[2] != offload else [])])
    batches = [batch // parts for parts in (2, 4, 8) if batch % parts == 0]
    smaller = _least(batches, lambda given: fits(prices, given))
    if smaller is not None or (batches and time.monotonic() < until):
        yield smaller is not None, f"a batch of {smaller or batches[-1]}"


def hosts_hold(prices: CostModel) -> bool:
    """Whether all hosts together have room for the state that is on them."""
    if not prices.stack.state_on_host:
        return True
    degree, cluster = prices.tensor_degrees[0], prices.cluster
    parameters = degree * sum(prices.parameters(range(len(prices.profile.layers)), degree))
    room = sum(host_of(cluster, node).memory_bytes - OF_PROCESSES * len(node.ranks) for node in cluster.nodes)
    return (2 + prices.states) * prices.precision.element_bytes * parameters <= room


def _least(values: Sequence[_T], fits: Callable[[_T], bool]) -> _T | None:
    """The first of some changes, from small to large, that is enough, if the last one is."""
    if not values or not fits(values[-1]):
        return None
    return values[bisect_left(values, True, hi=len(values) - 1, key=fits)]
