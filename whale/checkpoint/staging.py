"""Memory on the host for copies of tensors that are written while training goes on. It is kept from save to save:
memory that is new to a process costs as much time as the copy, in page faults."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Staging"]

BLOCK_BYTES = 1 << 26
ALIGNMENT = 64


class Staging:
    """Copies of tensors, one after the other in blocks of memory; `clear` gives the same blocks to later ones.

    >>> staging = Staging()
    >>> first = staging.copied(torch.ones(2))
    >>> staging.clear()
    >>> staging.copied(torch.zeros(2)).data_ptr() == first.data_ptr()
    True
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._at, self._used = 0, 0

    def clear(self) -> None:
        """Forget all copies, and give back the blocks that none of them has."""
        del self._blocks[self._at + 1 :]
        self._at, self._used = 0, 0

    def copied(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor of any device."""
        size = tensor.numel() * tensor.element_size()
        while self._at == len(self._blocks) or self._used + size > len(self._blocks[self._at]):
            if self._at == len(self._blocks):
                self._blocks.append(torch.empty(max(BLOCK_BYTES, size), dtype=torch.uint8))
            else:
                self._at += 1
            self._used = 0
        place = self._blocks[self._at][self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return place.copy_(tensor.detach())
