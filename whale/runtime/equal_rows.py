"""Rows of messages that are equal because their keys are: both ends find them in the batch, before they exchange any.

A stage sends each of them once, and the next puts copies in their places; gradients of copies are summed before they
return. So rows of a table that many samples look up travel once to a rank. It knows batches and parts of tensors; no
graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whale.ir.program import Box
from whale.runtime.local_program import Intervals, LocalCode
from whale.runtime.stage import part
from whale.runtime.uploads import download, upload

__all__ = ["MOST_DISTINCT", "EqualRows", "Repeats", "RowKeys"]

MOST_DISTINCT = 0.8
"""If more of the rows of a message are distinct, it is sent as it is."""

MOST_ROWS = 2**24
"""Most rows of a table for each of which there is a number of 4 bytes on the host; keys of larger ones are sorted."""


@dataclass(frozen=True)
class RowKeys:
    """Whole numbers that tell the rows of a value: rows with equal ones are equal.

    Attributes:
        code: their function of leaves of a batch, which are on the host.
        leaves: names of these, with the whole shape of each.
        shape: of the keys, which is the value's without its last dim.
        rows: keys are from 0 up to this number, without it.
    """

    code: LocalCode
    leaves: tuple[tuple[str, tuple[int, ...]], ...]
    shape: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class Repeats:
    """Equal rows of a message: the places of those that are *chosen* among them, and for each row the number of one of
    these."""

    chosen: Tensor
    number: Tensor

    @property
    def count(self) -> int:
        """The number of distinct rows."""
        return len(self.chosen)

    def distinct(self, rows: Tensor) -> Tensor:
        """The distinct rows of a value."""
        return _as_rows(rows, self).index_select(0, self.chosen)

    def copies(self, distinct: Tensor, like: Sequence[int]) -> Tensor:
        """The value with these distinct rows."""
        return distinct.index_select(0, self.number).view(*like)

    def summed(self, rows: Tensor) -> Tensor:
        """The sums of equal rows of a gradient, in float32 at least."""
        own = _as_rows(rows, self)
        wide = own if own.dtype in (torch.float32, torch.float64) else own.float()
        sums = wide.new_zeros((self.count, own.shape[1])).index_add_(0, self.number, wide)
        return sums.to(rows.dtype)

    def placed(self, sums: Tensor, like: Sequence[int]) -> Tensor:
        """A gradient with these sums in the chosen of equal rows, and zeros in the others."""
        found = sums.new_zeros((len(self.number), sums.shape[1]))
        return found.index_copy_(0, self.chosen, sums).view(*like)


def _as_rows(x: Tensor, repeats: Repeats) -> Tensor:
    return x.reshape(len(repeats.number), -1)


class EqualRows:
    """Finds the equal rows of a rank's messages.

    Args:
        keys: of the edges that have them, by index.
        held: for each of these and whether this rank is at its source, the part of the value that the rank has of
            each micro-batch.
        device: of the rank.
    """

    def __init__(
        self, keys: Mapping[int, RowKeys], held: Mapping[tuple[int, bool], Sequence[Intervals]], device: torch.device
    ) -> None:
        self._keys, self._held, self._device = keys, held, device
        self._batch: Mapping[str, Any] | None = None
        self._whole: dict[int, Tensor] = {}
        self._found: dict[Any, Repeats | None] = {}
        self._last = np.empty(0, dtype=np.int32)

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Start a step on a global batch, of which the rank has the leaves that it reads."""
        self._batch = batch
        self._whole.clear()
        self._found.clear()

    @property
    def reads(self) -> list[tuple[str, Intervals]]:
        """The leaves of a batch that it reads, whole."""
        return [(name, _all_of(shape)) for keys in self._keys.values() for name, shape in keys.leaves]

    def of(self, edge: int, at_source: bool, micro_batch: int, box: Box) -> Repeats | None:
        """The equal rows of a box of this rank's value; None if it is sent as it is."""
        if edge not in self._keys or self._batch is None:
            return None
        dims = len(self._keys[edge].shape)
        key = (edge, at_source, micro_batch, box[:dims])
        if key not in self._found:
            intervals = self._held[edge, at_source][micro_batch]
            own = part(self._of_edge(edge), intervals[:dims])
            own = own[tuple(slice(*one) for one in box[:dims])].flatten()
            self._found[key] = self.find(own, self._keys[edge].rows)
        return self._found[key]

    def find(self, keys: Tensor, rows: int) -> Repeats | None:
        """The equal ones of keys less than *rows*, of which the last stands for all, on both ends; None if too many of
        them are distinct."""
        own, size = keys.numpy(), len(keys)
        places = np.arange(size, dtype=np.int32)
        if rows <= MOST_ROWS:
            if len(self._last) < rows:
                self._last = np.empty(rows, dtype=np.int32)
            self._last[own] = places  # of equal keys the last is written last
            stands = self._last[own]
            chosen = np.flatnonzero(stands == places)
            number = np.empty(size, dtype=np.int64)
            number[chosen] = np.arange(len(chosen))
            number = number[stands]
        else:
            _, chosen, number = np.unique(own, return_index=True, return_inverse=True)
        if len(chosen) > MOST_DISTINCT * size:
            return None
        return Repeats(*(upload(torch.from_numpy(x), self._device) for x in (chosen, number)))

    def _of_edge(self, edge: int) -> Tensor:
        """The keys of the whole batch."""
        if edge not in self._whole:
            keys = self._keys[edge]
            with torch.no_grad():
                (found,) = keys.code(*(self._leaf(*leaf) for leaf in keys.leaves))
            self._whole[edge] = found.reshape(keys.shape)
        return self._whole[edge]

    def _leaf(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A leaf of the batch on the host, whole."""
        assert self._batch is not None
        held = self._batch[name]
        (found,) = download([held if isinstance(held, Tensor) else held.on_host(_all_of(shape))])
        return found


def _all_of(shape: tuple[int, ...]) -> Intervals:
    return tuple(((0, size),) for size in shape)
