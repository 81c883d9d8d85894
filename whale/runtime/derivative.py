"""Calls in the graphs of a derivative that are no operators: of what autograd records, and copies of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

__all__ = ["OnTape", "Tape", "from_tape", "laid_out"]


class Tape(NamedTuple):
    """A call that autograd has recorded: where gradients of its operands and results are made, None where there are
    none, and its operands while it runs forward or backward."""

    operands: tuple[GradientEdge | None, ...]
    results: tuple[GradientEdge | None, ...]
    given: list[Tensor]


class OnTape(nn.Module):
    """A call whose backward is not known as a graph; autograd records it.

    The tape has what the call makes for its backward, but no operands: these are given again, so that a parameter that
    is gathered for each of both is freed between them.

    Args:
        call: of a sequence of tensors.
        wants: which of them get gradients.
    """

    def __init__(self, call: Callable[[Sequence[Tensor]], Any], wants: tuple[bool, ...]) -> None:
        super().__init__()
        self.call, self.wants = call, wants
        self.module: nn.Module | None = getattr(call, "module", None)
        """Its module, if it calls one: a copy of it may have a process group."""

    def forward(self, *tensors: Tensor) -> tuple[Any, Tape]:
        """Its results, and the tape."""
        given = list(tensors)  # emptied: what autograd saves holds these hooks
        with torch.enable_grad(), saved_tensors_hooks(partial(_place_of, given), partial(_at_place, given)):
            pairs = zip(tensors, self.wants, strict=True)
            operands = [_with_edge(x) if wanted else x.detach() for x, wanted in pairs]
            edges = tuple(get_gradient_edge(x) if x.requires_grad else None for x in operands)
            call = self.call if self.module is None else replace(self.call, target=self.module)  # type: ignore[type-var]
            found = call(operands)
        several = isinstance(found, (tuple, list))
        results = tuple(found) if several else (found,)
        tensors_in = (x if isinstance(x, Tensor) and x.requires_grad else None for x in results)
        given.clear()
        tape = Tape(edges, tuple(None if x is None else get_gradient_edge(x) for x in tensors_in), given)
        bare = tuple(x.detach() if isinstance(x, Tensor) else x for x in results)
        return bare if several else bare[0], tape


def from_tape(tape: Tape, seeds: Sequence[Tensor | None], operands: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of a call's operands, which are given again, from those of its results; None where none is wanted.

    Each is in the layout of its operand, and in memory of its own.
    """
    both = zip(tape.results, seeds, strict=True)
    pairs = [(edge, seed) for edge, seed in both if edge is not None and seed is not None]
    wanted = [(edge, x) for edge, x in zip(tape.operands, operands, strict=True) if edge is not None]
    tape.given.extend(operands)
    try:
        roots, given = [edge for edge, _ in pairs], [seed for _, seed in pairs]
        found = list(torch.autograd.grad(roots, [edge for edge, _ in wanted], given, allow_unused=True))
    finally:
        tape.given.clear()
    for number, (_, x) in enumerate(wanted):
        if found[number] is None:
            found[number] = torch.zeros_like(x)
        elif not found[number].is_sparse:
            is_alone = _is_alone(found, number)
            if not is_alone or found[number].stride() != x.stride() or not _fills_memory(found[number]):
                found[number] = laid_out(found[number], x.stride())
    of_wanted = iter(found)
    return [None if edge is None else next(of_wanted) for edge in tape.operands]


class _WithEdge(torch.autograd.Function):
    """A tensor that has a gradient and that its gradient's edge does not hold, as that of a leaf does."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None  # never run: gradients end at its edge


def _with_edge(x: Tensor) -> Tensor:
    found: Tensor = _WithEdge.apply(torch.empty((), requires_grad=True), x.detach())
    return found


class _Place(NamedTuple):
    """A saved tensor that is a part of an operand: the operand's number, and how far its memory is from that one's."""

    operand: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _place_of(operands: Sequence[Tensor], x: Tensor) -> Tensor | _Place:
    """The place of a saved tensor in an operand, or the tensor if it is in none; with its history it would hold the
    node that saves it, which would never be freed."""
    x = x.detach()
    if x.layout is not torch.strided:
        return x
    begin, end = _extent(x)
    for number, operand in enumerate(operands):
        if operand.layout is torch.strided and _memory(operand) == _memory(x) and operand.dtype == x.dtype:
            first, stop = _extent(operand)
            if first <= begin and end <= stop:
                return _Place(number, begin - first, tuple(x.shape), tuple(x.stride()))
    return x


def _at_place(operands: Sequence[Tensor], saved: Tensor | _Place) -> Tensor:
    """The saved tensor."""
    if isinstance(saved, Tensor):
        return saved
    operand = operands[saved.operand]
    return operand.as_strided(saved.shape, saved.strides, operand.storage_offset() + saved.offset)


def _is_alone(tensors: Sequence[Tensor], number: int) -> bool:
    """Whether only this sequence holds one of its tensors, and no other tensor has its memory: the backward of a script
    may return a constant."""
    if getrefcount(tensors[number]) > 2:  # the sequence, and the argument
        return False
    return torch._C._storage_Use_Count(tensors[number].untyped_storage()._cdata) == 2  # the tensor, and this storage


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _fills_memory(x: Tensor) -> bool:
    """Whether a tensor has an element in each place of its memory."""
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()


def _extent(x: Tensor) -> tuple[int, int]:
    """The first element of a tensor in its memory, and that after the last."""
    begin = int(x.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin if x.numel() == 0 else begin + last + 1


def laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of a tensor with these strides; a sparse one, which has none, is returned as it is."""
    if x.is_sparse:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
