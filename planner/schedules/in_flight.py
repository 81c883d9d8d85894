"""Micro-batches in flight on each stage under a schedule, which determine the memory of saved activations.

A micro-batch is in flight on a stage from its forward to the end of its backward. All code that sizes activations uses
this function. This module knows neither times nor bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from whale.ir.schedule import Order, peak_in_flight
from whale.planner.schedules.orders import schedule_order

__all__ = ["in_flight", "peak_kept"]


def in_flight(schedule: str, num_stages: int, stage: int, micro_batches: int) -> int:
    """Return the largest number of micro-batches in flight on *stage*.

    GPipe has all of them in flight, 1F1B one for each stage from this one to the last. For other schedules the number
    is counted in the order for one device per stage and backwards twice as long as forwards.

    >>> [in_flight("1f1b", 4, stage, 8) for stage in range(4)]
    [4, 3, 2, 1]
    >>> in_flight("gpipe", 4, 3, 8), in_flight("zero_bubble_h2", 4, 0, 8)
    (8, 7)
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "1f1b":
        return min(num_stages - stage, micro_batches)
    return _counted(schedule, num_stages, min(micro_batches, 4 * num_stages))[stage]


@lru_cache(maxsize=256)
def _counted(schedule: str, num_stages: int, micro_batches: int) -> tuple[int, ...]:
    """Count by stage; with four micro-batches per stage every schedule is past its warm-up."""
    peaks = peak_in_flight(schedule_order(schedule, num_stages, micro_batches))
    return tuple(peaks[stage] for stage in range(num_stages))


def peak_kept(schedule: str, devices: tuple[frozenset[int], ...], micro_batches: int, sizes: Mapping[int, int]) -> int:
    """Return the most that devices which run several stages save at a time, of which each saves *sizes* bytes of a
    micro-batch.

    >>> two = (frozenset({0}), frozenset({1})) * 2
    >>> peak_kept("interleaved", two, 8, {0: 10, 2: 1})
    41
    """
    held = most = 0
    for kind, stage, _ in _order(schedule, devices, min(micro_batches, 4 * len(devices))):
        if stage in sizes and kind != "I":
            held += sizes[stage] if kind == "F" else -sizes[stage]
            most = max(most, held)
    return most


@lru_cache(maxsize=64)
def _order(schedule: str, devices: tuple[frozenset[int], ...], micro_batches: int) -> Order:
    return schedule_order(schedule, len(devices), micro_batches, devices)
