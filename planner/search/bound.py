"""A lower bound on the step time of any plan: its computation, divided among all devices.

Objective: the least time T in which the devices could compute a step if layers and rows were divided as finely as one
likes and nothing else took time (no communication, no waits in a pipeline, no optimizer) or memory. It is the optimum
of the linear program::

    min T   over shares x[l, k] >= 0 of the kind of layer l on devices of type k
    so that sum_k x[l, k] = 1                   for every kind of layer l
            sum_l w[l, k] x[l, k] <= N[k] T     for every type k

where w[l, k] are the device-seconds of all layers of kind l for the whole batch on type k, at the degrees and number of
rows at which a row costs least, and N[k] is the number of devices. By duality any prices v[k] >= 0 with sum 1 prove
sum_l min_k v[k] w[l, k] / N[k], and the best prices reach T.

Complexity: O(rounds x kinds of layers x types^2), whatever the number of devices. ``benchmarks/search_bound.py`` has a
larger bound, which knows stages and memory and takes seconds to minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from whale.ir.cluster import DeviceType
from whale.planner.cost.layer_cost import Degrees
from whale.planner.cost.stage import CostModel

__all__ = ["least_seconds", "least_time", "work_of_kinds"]

Array = np.ndarray[Any, np.dtype[np.float64]]

ROUNDS = 40
"""Rounds of improving the prices; a round without improvement halves the step."""

MOST_ROWS = 4096
"""Largest number of rows, in powers of two, at which the least cost of a row is computed; that of more rows hardly
differs."""


def least_seconds(prices: CostModel, batch: int, devices: Mapping[DeviceType, int] | None = None) -> float:
    """Lower bound on the step time of all plans for a batch of the given rows, on all devices or as many as given."""
    counts = Counter(prices.profile.layers)
    of_kinds = work_of_kinds(prices, batch)
    nums = np.array([(prices.num_of_types if devices is None else devices).get(one, 0) for one in prices.num_of_types])
    work = np.array([num * of_kinds[kind] for kind, num in counts.items()])
    return least_time(work[:, nums > 0], nums[nums > 0].astype(float)) + prices.step_overhead


def work_of_kinds(prices: CostModel, batch: int) -> Array:
    """Device-seconds of a layer of each kind (first axis) for the whole batch, on each type of device (second axis)."""
    kinds = range(len(prices.profile.kinds))
    return np.array([[batch * _row_seconds(prices, kind, type_) for type_ in prices.num_of_types] for kind in kinds])


def _row_seconds(prices: CostModel, kind: int, type_: DeviceType) -> float:
    """Device-seconds of a row's forward and backward through a kind of layer, at the degrees and the number of rows at
    which they are least."""
    found = []
    for tensor, expert, context in _degrees(prices, type_):
        for rows in _rows(prices, kind):
            seconds = sum(prices.computation(kind, type_, tensor, rows * expert, expert, context))
            found.append(seconds * tensor * context / rows)
    return min(found)


def _degrees(prices: CostModel, type_: DeviceType) -> Iterator[Degrees]:
    """Tensor, expert and context degrees of groups that such a device may be in."""
    node = max(len(node.ranks) for node in prices.cluster.nodes)
    yield from ((degree, 1, 1) for degree in prices.tensor_degrees if prices.knows(type_, degree, node))
    yield from ((1, degree, 1) for degree in prices.expert_degrees)
    yield from ((tensor, 1, context) for tensor, context in prices.cuts)


def _rows(prices: CostModel, kind: int) -> list[int]:
    """Powers of two; and where times are measured those of which they are, between which the cost of a row is
    monotone."""
    measured = {round(rows) for times in prices.profile.kinds[kind].measured for rows in times.rows}
    return sorted({1 << power for power in range(MOST_ROWS.bit_length())} | (measured - {0}))


def least_time(work: Array, nums: Array) -> float:
    """The optimum of the linear program, from below.

    Args:
        work: device-seconds of each kind of layer (first axis) on each type (second).
        nums: devices of each type.

    >>> least_time(np.array([[2.0, 4.0], [4.0, 8.0]]), np.array([1.0, 2.0]))
    3.0
    """
    corners = np.eye(len(nums))

    def proven(prices: Array) -> float:
        return float((work * (prices / nums)).min(axis=1).sum())

    speeds = nums / work.sum(axis=0)
    best: Array = max([*corners, speeds / speeds.sum()], key=proven)
    step = 0.5
    for _ in range(ROUNDS):
        moved = max(((1 - step) * best + step * corner for corner in corners), key=proven)
        if proven(moved) > proven(best):
            best = moved
        else:
            step /= 2
    return proven(best)
