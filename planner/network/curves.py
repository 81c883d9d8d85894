"""Measured curves of a profile as functions: time of a message by size, on the measured devices.

Fitted polynomials are accurate only near the sizes they were fitted on: many become negative for small messages, and
some exceed every measured speed for large ones. So values of a curve are limited to its bounds, and a smaller message
is never slower than a larger one. This module knows no topology and no model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import exp, log, log10
from typing import Literal

from whale.ir.profile import Interference, LinkCurve

__all__ = [
    "converted",
    "curves_between",
    "interference",
    "interpolated",
    "measured_seconds",
    "moving_seconds",
    "peak",
    "types_of",
]

SMALLEST_FITTED = 50e3
"""Smallest bytes at which a fitted polynomial is evaluated: those of Sailor's artifact are negative below 8 kB to 200
kB."""
LARGEST_FITTED = 2.0**34

LEAST_RATE = 1.0
"""Smallest bytes per second of a valid measurement."""


def measured_seconds(curve: LinkCurve, num_bytes: float) -> float:
    """Seconds of a message of the given bytes: interpolated in the logarithms between points, below the smallest point
    its seconds, beyond the largest at its bandwidth.

    >>> curve = LinkCurve(
    ...     source="a", target="a", devices=2, within="node", sizes=(1e6, 4e6), bandwidths=(1e9, 2e9)
    ... )
    >>> [round(measured_seconds(curve, size) * 1e3, 3) for size in (1, 1e6, 2e6, 4e6, 8e6)]
    [1.0, 1.0, 1.414, 2.0, 4.0]
    """
    return interpolated(*_points(curve), num_bytes)


def interpolated(sizes: Sequence[float], seconds: Sequence[float], num_bytes: float) -> float:
    """Seconds of the given bytes by points that ascend in both, as `measured_seconds` returns them."""
    if num_bytes <= sizes[0]:
        return seconds[0]
    if num_bytes >= sizes[-1]:
        return seconds[-1] * num_bytes / sizes[-1]
    above = bisect_right(sizes, num_bytes)
    left, right = sizes[above - 1], sizes[above]
    share = log(num_bytes / left) / log(right / left)
    return exp((1 - share) * log(seconds[above - 1]) + share * log(seconds[above]))


def interference(curves: Iterable[LinkCurve]) -> Interference | None:
    """The largest interference of an all-reduce in these curves; None if not measured."""
    told = [curve.beside for curve in curves if curve.beside is not None]
    if not told:
        return None
    slowdowns: dict[str, float] = {}
    for each in told:
        for name, slowdown in zip(each.types, each.slowdowns, strict=True):
            slowdowns[name] = max(slowdown, slowdowns.get(name, 0.0))
    return Interference(
        types=tuple(slowdowns),
        slowdowns=tuple(slowdowns.values()),
        waiting=max(each.waiting for each in told),
        stretch=max(each.stretch for each in told),
    )


def moving_seconds(curves: Iterable[LinkCurve], within: Literal["node", "nodes"], device_type: str) -> float:
    """Seconds of a device type's computation per sent or received byte, from the slowdown by gradient reductions, in
    which each byte goes out and comes in 2 (n - 1) / n times in a ring of n (Patarasuk and Yuan, 2009). The largest of
    any curve; 0 if none has one.
    """
    found = [0.0]
    for curve in curves:
        beside = curve.beside
        if curve.within != within or beside is None or not beside.bytes or device_type not in beside.types:
            continue
        slowdown = beside.slowdowns[beside.types.index(device_type)]
        lost = measured_seconds(curve, beside.bytes) * (1 + beside.stretch) * slowdown / (1 + slowdown)
        found.append(lost / (4 * (curve.ranks - 1) / curve.ranks * beside.bytes))
    return max(found)


def converted(curve: LinkCurve, to: Callable[[float, float], float]) -> tuple[tuple[float, ...], list[float]]:
    """A curve's points with other seconds, computed from the bytes and seconds of each; more bytes are never faster."""
    sizes, seconds = _points(curve)
    return sizes, _ascending([to(size, each) for size, each in zip(sizes, seconds, strict=True)])


def peak(curve: LinkCurve) -> float:
    """The largest bandwidth of a curve at any size."""
    return max(size / seconds for size, seconds in zip(*_points(curve), strict=True))


@lru_cache(maxsize=4096)
def _points(curve: LinkCurve) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Sizes and seconds, both ascending."""
    if curve.sizes:
        points = [
            (size, size / bandwidth)
            for size, bandwidth in zip(curve.sizes, curve.bandwidths, strict=True)
            if size > 0 and bandwidth >= LEAST_RATE
        ]
    else:
        steps = 160
        ratio = LARGEST_FITTED / SMALLEST_FITTED
        grid = [SMALLEST_FITTED * ratio ** (step / steps) for step in range(steps + 1)]
        points = [(size, size / rate) for size in grid if (rate := _fitted(curve, size)) >= LEAST_RATE]
    return tuple(size for size, _ in points), tuple(_ascending([taken for _, taken in points]))


def _ascending(seconds: Sequence[float]) -> list[float]:
    """Seconds of ascending sizes, none of which takes longer than a larger one."""
    return list(accumulate(reversed(seconds), min))[::-1]


def _fitted(curve: LinkCurve, num_bytes: float) -> float:
    value = 0.0
    for coefficient in curve.coefficients:
        value = value * log10(num_bytes) + coefficient
    return min(value * 1e9, curve.maximum) if curve.maximum else value * 1e9


def curves_between(
    curves: Iterable[LinkCurve],
    operation: str,
    within: Literal["node", "nodes"],
    types: Sequence[str],
    *,
    num_devices: int,
) -> tuple[LinkCurve, ...]:
    """The curves that apply to a group: for a collective the curve with the most similar ranks, for sends one for each
    pair of device types, of which the slowest counts. Empty unless every type of the group occurs in one.

    Pairs also cover a collective that was never measured among all of the types together.

    Args:
        curves: of the profile.
        operation: that was timed.
        within: a node, or between nodes.
        types: of the devices of the group, one for each rank.
        num_devices: of the group in each node, times the groups that share the node.
    """
    wanted = Counter(types)

    def unlikeness(curve: LinkCurve) -> tuple[float, int, float]:
        ranks = types_of(curve)
        others = (ranks - wanted).total() + (wanted - ranks).total()
        at_ends = (curve.devices, curve.target_devices or curve.devices)
        return abs(log(curve.ranks / len(types))), others, sum(abs(log(devices / num_devices)) for devices in at_ends)

    best: dict[tuple[str, ...], LinkCurve] = {}
    for curve in curves:
        if curve.operation != operation or curve.within != within or not wanted.keys() >= types_of(curve).keys():
            continue
        key = (curve.source, curve.target) if operation == "send" else tuple(sorted(types_of(curve)))
        if _points(curve)[0] and (key not in best or unlikeness(curve) < unlikeness(best[key])):
            best[key] = curve
    together = best.get(tuple(sorted(wanted)))
    if together is not None and operation != "send":
        return (together,)
    told = {name for key in best for name in key}
    return tuple(best.values()) if told >= wanted.keys() else ()


def types_of(curve: LinkCurve) -> Counter[str]:
    """The device types of the ranks that took part, each with its number."""
    if curve.types:
        return Counter(curve.types)
    return (
        Counter({curve.source: curve.ranks}) if curve.source == curve.target else Counter((curve.source, curve.target))
    )
