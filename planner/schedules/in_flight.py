"""How many micro-batches a schedule keeps in flight: what decides the memory of activations.

A micro-batch is in flight on a stage from its forward to the end of its backward. Everything that sizes activations
reads it here. It knows neither times nor bytes.
"""

from __future__ import annotations

from functools import lru_cache

from whale.ir.schedule import peak_in_flight
from whale.planner.schedules.orders import schedule_order

__all__ = ["in_flight"]


def in_flight(schedule: str, num_stages: int, stage: int, micro_batches: int) -> int:
    """Return how many micro-batches *stage* keeps at a time, at most.

    GPipe keeps all, 1F1B as many as stages follow, itself included. For other schedules it is counted in the order
    that they have when every stage has its own devices and a backward takes two forwards.

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
    """By stage; with four micro-batches for each stage every schedule is past its warm-up."""
    peaks = peak_in_flight(schedule_order(schedule, num_stages, micro_batches))
    return tuple(peaks[stage] for stage in range(num_stages))
