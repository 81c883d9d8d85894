"""A step time below which no plan of the space lies, whatever its stages.

Work alone: every layer of every row must run on some device, on each type at its best degree and number of rows, with
no collective, no message and no wait. How the work is divided among the types is a linear program (minimise T subject
to sum_k x_lk = 1 and sum_l w_lk x_lk <= N_k T, for layers l, types k, w the device-seconds of a layer there); any
weights v_k >= 0 of the types with sum 1 bound it from below by sum_l min_k v_k w_lk / N_k (weak duality), and the best
weights are found by bisecting between pairs of types. To that comes what every step has besides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whale.planner.estimate import STEP_OVERHEAD_SECONDS
from whale.planner.search.meshes import Array, Meshes

__all__ = ["bound_seconds", "least_work", "work_of_layers"]

EXACT_ROWS = 64
"""Rows of a micro-batch up to which all degrees are priced at all powers of two."""

ROUNDS = 40
"""Of improving the weights; each halves a step."""


def bound_seconds(meshes: Meshes, batch: int, micro_batches: Sequence[int]) -> float:
    """No plan takes less, if layers take no less a row for numbers of rows between those that are priced here: powers
    of two, or of large batches of four, and all rows of a micro-batch; and of large batches, if a layer that is split
    takes its devices together no less than one device."""
    work = work_of_layers(meshes, batch, micro_batches)
    nums = np.array([len(pool.ranks) for pool in meshes.pools], dtype=float)
    return least_work(work, nums) + STEP_OVERHEAD_SECONDS


def least_work(work: Array, nums: Array) -> float:
    """The least time in which devices do all work, divided as finely as one likes, from below.

    Args:
        work: device-seconds of each layer (first axis) on each type (second).
        nums: devices of each type.

    >>> least_work(np.array([[2.0, 4.0], [4.0, 8.0]]), np.array([1.0, 2.0]))
    3.0
    """
    num_types = len(nums)

    def value(weights: Array) -> float:
        return float((work * (weights / nums)).min(axis=1).sum())

    speeds = nums / work.sum(axis=0)
    best = max([*np.eye(num_types), speeds / speeds.sum()], key=value)
    step = 0.5
    for _ in range(ROUNDS):
        found = max(((1 - step) * best + step * one for one in np.eye(num_types)), key=value)
        if value(found) > value(best):
            best = found
        else:
            step /= 2
    return value(best)


def work_of_layers(meshes: Meshes, batch: int, micro_batches: Sequence[int]) -> Array:
    """Device-seconds of each layer for the whole batch, on each type at its best."""
    prices = meshes.prices
    most = -(-batch // min(micro_batches))
    found = np.empty((len(prices.profile.kinds), len(meshes.pools)))
    for kind, layer in enumerate(prices.profile.kinds):
        measured = {count for times in layer.measured for count in times.rows if count < most}
        powers = range(0, most.bit_length(), 1 if most <= EXACT_ROWS else 2)
        rows = sorted({1 << power for power in powers} | measured | {most})
        for column, pool in enumerate(meshes.pools):
            found[kind, column] = batch * min(
                prices.computation(kind, pool.type, degree, count) * degree / count
                for degree in prices.tensor_degrees[: None if most <= EXACT_ROWS else 1]
                if degree <= len(prices.cluster.devices)
                for count in rows
            )
    layers: Array = found[np.array(prices.profile.layers)]
    return layers
