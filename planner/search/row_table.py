"""Costs of layers on replicas by the rows of a micro-batch: priced for some numbers of rows, interpolated for others.

Prices of all replicas are in one array, so those of many replicas with their rows are looked up at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from whale.planner.cost.groups import TensorGroup
from whale.planner.search.mesh_costs import Array
from whale.planner.search.problem import MAX_BATCH

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
"""Quantities of handing on what a kind of layer makes, and its gradient back, to another node, and within the node
where there is room for another replica: latency of both ways, and the rest of one way, alone on its links."""

QUANTITIES = 10

Price = Callable[[TensorGroup, int, int], Array]
"""The quantities (first axis) of each kind of layer (second axis) on a group, for a number of rows and of micro-batches
that accumulate gradients."""


class RowTable:
    """Quantities of layers on replicas, each priced once, when it is asked for.

    Args:
        price: prices a group with some rows.
        num_kinds: of layers.
        exact_rows: rows of a device up to which all numbers of rows are priced; beyond, powers of two are.
    """

    def __init__(self, price: Price, num_kinds: int, exact_rows: int) -> None:
        self._price = price
        powers = (1 << power for power in range(MAX_BATCH.bit_length()))
        self._rows = np.array(sorted({*range(exact_rows + 1), *powers}))
        self._places: dict[tuple[int, int], int] = {}
        self._known: set[tuple[int, int]] = set()
        self._priced = np.zeros((0, len(self._rows), QUANTITIES, num_kinds))  # by place and number of rows

    def at(self, asked: Sequence[tuple[TensorGroup, int]], micro_batches: int) -> Array:
        """The quantities (second axis) of each kind of layer (third axis) on groups with rows (first axis), if as many
        *micro_batches* accumulate gradients."""
        own = np.array([-(-rows // group.expert) for group, rows in asked])
        upper = self._rows.searchsorted(own)
        exact = self._rows[upper] == own
        keys = ((group.kind, micro_batches) for group, _ in asked)
        places = np.array([self._places.setdefault(key, len(self._places)) for key in keys])
        wanted = zip(asked, places.tolist(), upper.tolist(), exact.tolist(), strict=True)
        for (group, _), place, number, whole in wanted:
            self._find(group, place, number, micro_batches)
            if not whole:
                self._find(group, place, number - 1, micro_batches)
        found: Array = self._priced[places, upper]
        if not exact.all():
            between = np.flatnonzero(~exact)
            above, low = upper[between], self._rows[upper[between] - 1]
            below = self._priced[places[between], above - 1]
            share = (own[between] - low) / (self._rows[above] - low)
            found[between] = below + share[:, None, None] * (found[between] - below)
        return found

    def _find(self, group: TensorGroup, place: int, number: int, micro_batches: int) -> None:
        """Price a group with a number of rows, by position, if it is not known."""
        if (place, number) not in self._known:
            self._known.add((place, number))
            if place >= len(self._priced):
                self._priced = np.concatenate([self._priced, np.zeros((place + 1, *self._priced.shape[1:]))])
            self._priced[place, number] = self._price(group, int(self._rows[number]) * group.expert, micro_batches)
