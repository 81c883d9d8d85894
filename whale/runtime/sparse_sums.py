"""Sums of sparse gradients over ranks: each rank gets the rows that all of them looked up, and adds them up.

Ranks exchange as many rows as one of them has at most, which all know before the step, so that one all-gather is enough
and no rank waits for numbers. It knows tensors and groups; no buckets.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.runtime.collectives import gather_single

__all__ = ["SparseSum"]

_NO_ROW = -1

_ALIGNED = 16
"""A multiple of the size of any element, of which what each rank sends is one."""


class SparseSum:
    """The sum of a gradient whose rows are some of a parameter's, on its way.

    Args:
        gradient: this rank's term, sparse in its first dim, with at most *rows* rows (one that comes twice counts
            once); None: it has none.
        like: the parameter, [any, ...].
        rows: that each rank sends.
        size: number of ranks.
        group: of these ranks.
        dtype: in which rows are sent; None: in their own.
        transport: ``torch.distributed``; in a dry run what has ``gather_single``.
    """

    def __init__(
        self,
        gradient: Tensor | None,
        like: Any,
        rows: int,
        size: int,
        group: dist.ProcessGroup,
        dtype: torch.dtype | None = None,
        transport: Any = dist,
    ) -> None:
        self.shape, self.dtype, self._rows, self._sent = tuple(like.shape), like.dtype, rows, dtype or like.dtype
        width = torch.int64.itemsize + prod(self.shape[1:]) * self._sent.itemsize
        size_of_one = -(-rows * width // _ALIGNED) * _ALIGNED
        own = torch.zeros(size_of_one, dtype=torch.uint8, device=like.device)
        index, values = self._seen(own)
        index.fill_(_NO_ROW)
        self._has_data = transport is dist
        if gradient is not None and self._has_data:
            found = gradient.coalesce()
            index[: found.values().shape[0]] = found.indices()[0]
            values[: found.values().shape[0]] = found.values()
        self._received = own.new_empty((size, own.numel()))
        gather = gather_single if self._has_data else transport.gather_single
        self.work: dist.Work | None = gather(self._received.view(-1), own, group=group, async_op=True)

    def result(self) -> Tensor:
        """The sum, coalesced, once its work is done. All ranks add the terms in one order, so it is the same on all."""
        pairs = [self._seen(each) for each in self._received.unbind()]
        index, values = (torch.cat(each) for each in zip(*pairs, strict=True))
        if not self._has_data:  # as many rows as there may be
            terms = values.to(self.dtype)
            return torch.sparse_coo_tensor(index.unsqueeze(0), terms, self.shape, check_invariants=False)
        kept = index != _NO_ROW
        rows, terms = index[kept].unsqueeze(0), values[kept].to(self.dtype)
        return torch.sparse_coo_tensor(rows, terms, self.shape, check_invariants=False).coalesce()

    def _seen(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """The indices and the rows in what a rank sends."""
        end = self._rows * torch.int64.itemsize
        values = sent[end : end + self._rows * prod(self.shape[1:]) * self._sent.itemsize]
        return sent[:end].view(torch.int64), values.view(self._sent).view(self._rows, *self.shape[1:])
