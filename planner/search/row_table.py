"""Costs of layers on replicas by the rows of a micro-batch: priced for some numbers of rows, interpolated for others.

Prices of all replicas are in one array, so those of many replicas with their rows are looked up at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from whale.planner.cost.groups import TensorGroup
from whale.planner.search.mesh_costs import Array

__all__ = [
    "ACCUMULATION",
    "BACKWARD",
    "FAR",
    "FORWARD",
    "KEPT",
    "NEAR",
    "QUANTITIES",
    "UPDATE",
    "WORKING",
    "RowTable",
]

FORWARD, BACKWARD, UPDATE, KEPT, WORKING, ACCUMULATION = range(6)
"""Quantities of a kind of layer: seconds of a micro-batch's forward and backward, and of the optimizer once a step;
bytes saved for the backward, and beside them while it runs, with the allocator's waste; and seconds more of a later
micro-batch's backward."""

FAR, NEAR = (6, 7), (8, 9)
"""Quantities of handing on what a kind of layer makes, and its gradient back, to another node, and within the node if
it has more devices: latency of both ways, and the rest of one way, alone on its links."""

QUANTITIES = 10

Price = Callable[[TensorGroup, int, int], Array]
"""The quantities (first axis) of each kind of layer (second axis) on a group, for a number of rows and of micro-batches
that accumulate gradients."""


class RowTable:
    """Quantities of layers on replicas, each priced once, when it is asked for.

    Which numbers of rows are priced may depend on what was asked for before, but a search always asks for the same.

    Args:
        price: prices a group with some rows.
        num_kinds: of layers.
        most_exact: prices of numbers of rows other than powers of two; of those asked for later the quantities are
            interpolated between powers of two.
    """

    def __init__(self, price: Price, num_kinds: int, most_exact: int) -> None:
        self._price, self._left = price, most_exact
        self._found: dict[tuple[Hashable, int, int], tuple[int, int, float]] = {}
        self._places: dict[tuple[Hashable, int, int], int] = {}
        self._priced = np.zeros((64, QUANTITIES, num_kinds))

    def at(self, asked: Sequence[tuple[TensorGroup, int]], micro_batches: int) -> Array:
        """The quantities (second axis) of each kind of layer (third axis) on groups with rows (first axis), if as many
        *micro_batches* accumulate gradients."""
        known = self._found
        found = [
            known.get((group.kind, -(-rows // group.expert), micro_batches)) or self._find(group, rows, micro_batches)
            for group, rows in asked
        ]
        low, high, share = zip(*found, strict=True)
        below: Array = self._priced[list(low)]
        if any(share):
            below += np.array(share)[:, None, None] * (self._priced[list(high)] - below)
        return below

    def _find(self, group: TensorGroup, rows: int, micro_batches: int) -> tuple[int, int, float]:
        """Two places of the array, and how far the quantities are from the first to the second."""
        own = -(-rows // group.expert)
        power = 1 << max(0, own.bit_length() - 1)  # at or below
        if own in (0, power) or self._left > 0:
            self._left -= own not in (0, power)
            place = self._place(group, own, micro_batches)
            found = place, place, 0.0
        else:
            low, high = (self._place(group, end, micro_batches) for end in (power, 2 * power))
            found = low, high, (own - power) / power
        self._found[group.kind, own, micro_batches] = found
        return found

    def _place(self, group: TensorGroup, own: int, micro_batches: int) -> int:
        """The place of the price of a group with a number of rows a device, which is priced if it is new."""
        key = group.kind, own, micro_batches
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._places)
            if place == len(self._priced):
                self._priced = np.concatenate([self._priced, np.zeros_like(self._priced)])
            self._priced[place] = self._price(group, own * group.expert, micro_batches)
        return place
