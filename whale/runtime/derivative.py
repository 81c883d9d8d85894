"""Calls in the graphs of a derivative that are no operators: of what autograd records, and copies of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["OnTape", "Tape", "from_tape", "laid_out"]


class Tape(NamedTuple):
    """A call that autograd has recorded: its operands, and its results."""

    operands: tuple[Tensor, ...]
    results: tuple[Any, ...]


class OnTape(nn.Module):
    """A call whose backward is not known as a graph; autograd records it.

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
        with torch.enable_grad():
            operands = tuple(x.detach().requires_grad_(w) for x, w in zip(tensors, self.wants, strict=True))
            call = self.call if self.module is None else replace(self.call, target=self.module)  # type: ignore[type-var]
            found = call(operands)
        several = isinstance(found, (tuple, list))
        results = tuple(found) if several else (found,)
        bare = tuple(x.detach() if isinstance(x, Tensor) else x for x in results)
        return bare if several else bare[0], Tape(operands, results)


def from_tape(tape: Tape, seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a call's operands, in their layout, from those of its results; None where none is wanted."""
    wanted = [x for x in tape.operands if x.requires_grad]
    pairs = [(x, seed) for x, seed in zip(tape.results, seeds, strict=True) if seed is not None]
    found = iter(torch.autograd.grad([x for x, _ in pairs], wanted, [seed for _, seed in pairs], allow_unused=True))
    gradients: list[Tensor | None] = []
    for x in tape.operands:
        gradient = next(found) if x.requires_grad else None
        if x.requires_grad:
            gradient = torch.zeros_like(x) if gradient is None else laid_out(gradient, x.stride())
        gradients.append(gradient)
    return gradients


def laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of a tensor with these strides; a sparse one, which has none, is returned as it is."""
    if x.is_sparse:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
