"""Whole shares of a batch, a number of heads or of rows, in proportion to speeds.

Largest remainder, exact, and equal on every rank. This module knows neither units nor memory: the planner's balancing
starts from these shares and moves load where memory requires it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite

from whale.errors import InfeasibleError, UsageError

__all__ = ["shares", "shares_on_axis"]


def shares(total: int, weights: Sequence[float], *, minimum: int = 0) -> tuple[int, ...]:
    """Divide *total* units in proportion to *weights*, by largest remainder, ties to the lower index.

    Each receiver gets at least *minimum* units; the others divide the remaining units in proportion to their weights.
    The ideal shares are exact fractions, so the result does not depend on
    rounding: floats mean their printed decimal numbers, so that ``[0.1, 0.2]`` is one to two. Without a binding minimum
    every share is within one unit of its ideal, and a larger weight never gets a smaller share than a smaller weight.

    Args:
        total: units to assign, at least 0.
        weights: one for each receiver, finite and not negative, not all zero; in any unit.
        minimum: units that every receiver gets at least, also one of weight 0.

    Raises:
        UsageError: a weight, the total or the minimum is out of range.
        InfeasibleError: *total* is too small for the minimum of all.

    >>> shares(6, [15.7, 8.1])
    (4, 2)
    >>> shares(512, [15.7] * 2 + [9.3] * 2)
    (161, 161, 95, 95)
    >>> shares(3, [100, 1, 1], minimum=1)
    (1, 1, 1)
    """
    if total < 0 or minimum < 0:
        raise UsageError(f"shares of {total} with a minimum of {minimum}: neither may be negative")
    if not weights:
        raise UsageError("shares among no receivers: give at least one weight")
    if any(not isfinite(weight) or weight < 0 for weight in weights):
        raise UsageError(f"weights must be finite and not negative, not {list(weights)}")
    if total < minimum * len(weights):
        raise InfeasibleError(
            f"{total} units cannot give each of {len(weights)} receivers the minimum of {minimum}: that takes "
            f"{minimum * len(weights)}; use fewer receivers or a larger total"
        )
    exact = [Fraction(str(float(weight))) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    if not any(exact):
        raise UsageError(f"all {len(weights)} weights are zero; give a positive weight")

    # Receivers whose proportional share is below the minimum get exactly the minimum and leave the division; that
    # lowers the share of the rest, so repeat until none falls below: at most len(weights) rounds, since each removes
    # one.
    units = [minimum] * len(weights)
    dividing = [index for index, weight in enumerate(exact) if weight > 0]
    while True:
        remaining = total - minimum * (len(weights) - len(dividing))
        weight_sum = sum(exact[index] for index in dividing)
        above = [index for index in dividing if exact[index] * remaining >= minimum * weight_sum]
        if len(above) == len(dividing):
            break
        dividing = above

    ideals = {index: exact[index] * remaining / weight_sum for index in dividing}
    for index, ideal in ideals.items():
        units[index] = int(ideal)
    missing = total - sum(units)
    for index in sorted(dividing, key=lambda index: (units[index] - ideals[index], index))[:missing]:
        units[index] += 1
    return tuple(units)


def shares_on_axis(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide *total* units along a mesh axis: at least one each, if there are enough and no weight is zero.

    >>> shares_on_axis(3, [100, 1, 1]), shares_on_axis(2, [100, 1, 1])
    ((1, 1, 1), (2, 0, 0))
    """
    return shares(total, weights, minimum=1 if total >= len(weights) and all(weights) else 0)
