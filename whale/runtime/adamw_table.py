"""The table of a step of AdamW in Triton: where each parameter, its states and its gradient are in memory.

The kernel takes them by address, so that one launch updates any number of tensors. Most addresses are the same in all
steps: they are on the device already, and a step sends those of gradients if these moved. Knows tensors; not
optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

__all__ = ["BLOCK", "COLUMNS", "Held", "Rows", "Table"]

BLOCK = 2048
"""Elements of a program of the kernel."""

COLUMNS = 6
"""Columns of what stays: the addresses of a `Held`, and the number of elements."""

_WIDTH = 16
"""Bytes of the widest load of a GPU, which needs an address that is a multiple of it."""


class Held(NamedTuple):
    """The tensors of parameters that stay from step to step, in the order of the parameters; see `Run`."""

    parameter: list[Tensor]
    mean: list[Tensor]
    square: list[Tensor]
    largest: list[Tensor] | None
    copy: list[Tensor] | None


class Rows(NamedTuple):
    """Tables on a device by which the kernel finds memory.

    Attributes:
        fixed: of shape (parameters, COLUMNS).
        moving: of shape (parameters, 2): the address of the gradient, and the row of the scalars.
        blocks: of shape (programs, 2): the row of each program's parameter, and which of its blocks it updates.
        types: number types of parameter, gradient, mean, square, largest, and copy.
        aligned: whether all addresses are multiples of 16 bytes.
    """

    fixed: Tensor
    moving: Tensor
    blocks: Tensor
    types: tuple[torch.dtype | None, ...]
    aligned: bool


class Table:
    """The addresses of the same parameters and states in many steps.

    Args:
        options: of the pass; other ones need another table.
        watched: tensors whose addresses must stay.
        held: what the pass updates, all of one device.
        count: of each parameter's steps, a vector on the host; None where a device counts them.
    """

    def __init__(self, options: object, watched: Sequence[Tensor], held: Held, count: Tensor | None) -> None:
        self.count = count
        self.strides = [x.stride() for x in held.parameter]
        self._options = options
        self._watched = [ref(x) for x in watched]  # whose memory is free to go
        self._addresses = [x.data_ptr() for x in watched]
        self._device = held.parameter[0].device
        self._types = [None if column is None else column[0].dtype.to_real() for column in held]
        self._lengths = [x.numel() * (1 + x.is_complex()) for x in held.parameter]
        columns = [[0] * len(self._lengths) if column is None else [x.data_ptr() for x in column] for column in held]
        self._fixed = [*zip(*columns, self._lengths, strict=True)]
        self._is_aligned = _are_aligned(chain(*columns))
        self._sent: tuple[Tensor, Tensor] | None = None
        self._moving: tuple[list[int], list[int], Tensor, bool] | None = None

    def holds(self, options: object, watched: Sequence[Tensor | None]) -> bool:
        """Whether these tensors are those of the table, where they were."""
        return (
            options == self._options
            and len(watched) == len(self._watched)
            and all(map(is_, watched, [known() for known in self._watched]))
            and [x.data_ptr() for x in watched if x is not None] == self._addresses
        )

    def rows(self, gradients: Sequence[Tensor], scalars: Sequence[int]) -> Rows:
        """The table on the device for a step.

        Args:
            gradients: in the strides of their parameters, and of one number type.
            scalars: the row of each parameter's scalars.
        """
        addresses, numbers = [x.data_ptr() for x in gradients], list(scalars)
        captures = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        sent, moving = (None, None) if captures else (self._sent, self._moving)  # a graph fills its own when it runs
        if sent is None:
            blocks = [(n, block) for n, length in enumerate(self._lengths) for block in range(-(-length // BLOCK))]
            sent = self._send(self._fixed), self._send(blocks)
        if moving is None or moving[0] != addresses or moving[1] != numbers:
            placed = self._send([*zip(addresses, numbers, strict=True)])
            moving = addresses, numbers, placed, self._is_aligned and _are_aligned(addresses)
        if not captures:
            self._sent, self._moving = sent, moving
        types = (self._types[0], gradients[0].dtype.to_real(), *self._types[1:])
        return Rows(sent[0], moving[2], sent[1], types, moving[3])

    def _send(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        """A table on the device, from memory of its own: a copy may still read that of the last one."""
        is_cuda = self._device.type == "cuda"
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        made = own.to(self._device, non_blocking=True)
        if is_cuda and torch.cuda.is_current_stream_capturing():
            _captured.append((own, made))
        return made


def _are_aligned(addresses: Sequence[int] | chain[int]) -> bool:
    return not any(address % _WIDTH for address in addresses)


_captured: list[tuple[Tensor, Tensor]] = []
"""Tables of CUDA graphs, which copy them to the device in each replay."""
