"""Calls in the graphs of a derivative that are no operators: of what autograd records, and copies of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

__all__ = ["OnTape", "Tape", "from_tape", "laid_out", "noting_saved"]


class _Like(NamedTuple):
    """The properties of a gradient, which are those of its operand."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Tape(NamedTuple):
    """A call that autograd has recorded.

    ``operands`` and ``results`` are the places where their gradients are made, None where there are none; ``likes`` the
    properties of those that are wanted; ``given`` has operands while it runs forward or backward; ``anew`` says that
    gradients are made by the backward, which a script's own need not do.
    """

    operands: tuple[GradientEdge | None, ...]
    results: tuple[GradientEdge | None, ...]
    likes: tuple[_Like, ...]
    given: list[Tensor]
    anew: bool


class OnTape(nn.Module):
    """A call whose backward is not known as a graph; autograd records it.

    The tape has what the call makes for its backward, but not the operands that it saves: these are given again, so
    that a parameter that is gathered for each of both is freed between them.

    Args:
        call: of a sequence of tensors.
        wants: which of them get gradients.
        again: the numbers of those that are given again.
        anew: whether its backward makes all gradients anew, and returns none that a script holds.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Tensor]], Any],
        wants: tuple[bool, ...],
        again: tuple[int, ...],
        *,
        anew: bool = False,
    ) -> None:
        super().__init__()
        self.call, self.wants, self.again, self.anew = call, wants, again, anew
        self.module: nn.Module | None = getattr(call, "module", None)
        """Its module, if it calls one: a copy of it may have a process group."""

    def forward(self, *tensors: Tensor) -> tuple[Any, Tape]:
        """Its results, and the tape."""
        given = [tensors[number] for number in self.again]  # emptied: what autograd saves holds these hooks
        with torch.enable_grad(), _hooks(partial(_place_of, given), partial(_at_place, given)):
            pairs = zip(tensors, self.wants, strict=True)
            operands = [_with_edge(x) if wanted else x.detach() for x, wanted in pairs]
            edges = tuple(get_gradient_edge(x) if x.requires_grad else None for x in operands)
            call = self.call if self.module is None else replace(self.call, target=self.module)  # type: ignore[type-var]
            found = call(operands)
        several = isinstance(found, (tuple, list))
        results = tuple(found) if several else (found,)
        tracked = [x if isinstance(x, Tensor) and x.requires_grad else None for x in results]
        given.clear()
        tape = Tape(
            edges,
            tuple(None if x is None else get_gradient_edge(x) for x in tracked),
            tuple(
                _Like(tuple(x.shape), x.stride(), x.dtype, x.device)
                for x, wanted in zip(tensors, self.wants, strict=True)
                if wanted
            ),
            given,
            self.anew,
        )
        bare = tuple(x.detach() if isinstance(x, Tensor) else x for x in results)
        return bare if several else bare[0], tape


@contextmanager
def noting_saved(tensors: Sequence[Tensor]) -> Iterator[set[int]]:
    """Note the numbers of the tensors that autograd saves, or parts of which."""
    found: set[int] = set()

    def note(x: Tensor) -> Tensor:
        if isinstance(place := _place_of(tensors, x), _Place):
            found.add(place.operand)
        return x.detach()

    with _hooks(note, lambda x: x):
        yield found


def from_tape(tape: Tape, seeds: Sequence[Tensor | None], again: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of a call's operands, some of which are given *again*, from those of its results; None where none
    is wanted.

    Each is in the layout of its operand, and in memory of its own.
    """
    both = zip(tape.results, seeds, strict=True)
    pairs = [(edge, seed) for edge, seed in both if edge is not None and seed is not None]
    roots, given = [edge for edge, _ in pairs], [seed for _, seed in pairs]
    tape.given.extend(again)
    try:
        wanted = [edge for edge in tape.operands if edge is not None]
        found = torch.autograd.grad(roots, wanted, given, allow_unused=True)
    finally:
        tape.given.clear()
    taken = {_memory(x) for x in (*given, *again) if x.layout is torch.strided}
    gradients: list[Tensor] = []
    made: Sequence[Tensor | None] = found  # None for operands that no result depends on
    for gradient, like in zip(made, tape.likes, strict=True):
        if gradient is None:
            gradient = torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device=like.device).zero_()
        elif gradient.layout is torch.strided:
            alone = tape.anew and _memory(gradient) not in taken and _fills_memory(gradient)
            if not alone or gradient.stride() != like.strides:
                gradient = laid_out(gradient, like.strides)
            taken.add(_memory(gradient))
        gradients.append(gradient)
    of_wanted = iter(gradients)
    return [None if edge is None else next(of_wanted) for edge in tape.operands]


def _hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> AbstractContextManager[Any]:
    """Hooks for what autograd saves, unless a script has disabled them: then the tape holds all that it saves."""
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return saved_tensors_hooks(pack, unpack) if enabled else nullcontext()


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


class _Part(NamedTuple):
    """A part of a tensor without gaps: how far its memory is from the tensor's, and the strides that this had."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    of: tuple[int, ...]


class _Place(NamedTuple):
    """A saved tensor that is an operand or a part of one: the operand's number, and which part; None: all of it."""

    operand: int
    part: _Part | None


def _place_of(operands: Sequence[Tensor], x: Tensor) -> Tensor | _Place:
    """The place of a saved tensor in an operand, or the tensor if it is in none; with its history it would hold the
    node that saves it, which would never be freed."""
    x = x.detach()
    if x.layout is not torch.strided:
        return x
    begin, end = _extent(x)
    for number, operand in enumerate(operands):
        if operand.layout is not torch.strided or _memory(operand) != _memory(x) or operand.dtype != x.dtype:
            continue
        first, stop = _extent(operand)
        if (begin, x.shape, x.stride()) == (first, operand.shape, operand.stride()):
            return _Place(number, None)
        if first <= begin and end <= stop and stop - first == operand.numel():
            return _Place(number, _Part(begin - first, tuple(x.shape), tuple(x.stride()), tuple(operand.stride())))
    return x


def _at_place(operands: Sequence[Tensor], saved: Tensor | _Place) -> Tensor:
    """The saved tensor, from operands that may be in another layout now."""
    if isinstance(saved, Tensor):
        return saved
    operand, part = operands[saved.operand], saved.part
    if part is None:
        return operand
    if operand.stride() != part.of:
        operand = laid_out(operand, part.of)
    return operand.as_strided(part.shape, part.strides, operand.storage_offset() + part.offset)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _fills_memory(x: Tensor) -> bool:
    """Whether a tensor has an element in each place of its memory."""
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()


def _extent(x: Tensor) -> tuple[int, int]:
    """The first element of a tensor in its memory, and that after the last."""
    begin = int(x.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin if x.numel() == 0 else begin + int(last) + 1


def laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of a tensor with these strides; a sparse one, which has none, is returned as it is."""
    if x.is_sparse:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
