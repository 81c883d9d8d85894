"""A stage whose backward autograd derives from a run of its forward: for programs that have no derivative, such as dry
runs, and to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from whale.runtime.gradients import TakesGradients
from whale.runtime.local_program import Wait, there

__all__ = ["ByAutograd"]


class _Forward(Protocol):
    """A stage without a backward."""

    @property
    def outputs(self) -> tuple[str, ...]: ...

    @property
    def parameters(self) -> Sequence[Parameter]: ...

    def forward(self, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...


@dataclass(eq=False)
class _Recorded:
    """The ends of what autograd has recorded; for the second part of a split backward, with gradients."""

    received: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    ends: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class ByAutograd:
    """A stage for the executor, from one that only computes its forward.

    ``taker`` gets the gradients, as those of a graph.

    Args:
        stage: its forward must work under autograd.
        needs_grad: which of the received values get gradients; by default those of floating dtype.
    """

    def __init__(self, stage: _Forward, needs_grad: Sequence[bool] | None = None) -> None:
        self.stage, self.needs_grad = stage, needs_grad
        self.outputs, self.parameters = stage.outputs, tuple(stage.parameters)
        self._running = False  # other stages may have the same parameters
        self.taker: TakesGradients | None = getattr(stage, "taker", None)
        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: Tensor) -> None:
        if self._running and self.taker is not None:
            place = self.taker.place(parameter)
            if place is not None and parameter.grad is not place and parameter.grad is not None:
                parameter.grad = place.copy_(parameter.grad)
            self.taker.gradient_ready(parameter)

    def _backward(self, kept: _Recorded, inputs: Sequence[Tensor] | None = None) -> None:
        if kept.ends:
            roots, gradients = zip(*kept.ends, strict=True)
            self._running = True
            try:
                torch.autograd.backward(roots, gradients, inputs=inputs)
            finally:
                self._running = False
        kept.outputs, kept.ends = (), []

    def waits(self, micro_batch: int) -> bool:
        """No: autograd records what is there."""
        return False

    def forward(self, micro_batch: int, received: tuple[Tensor, ...], wait: Wait = there) -> tuple[Tensor, ...]:
        """The stage's own."""
        return self.stage.forward(micro_batch, received)

    def forward_to_train(
        self, micro_batch: int, received: tuple[Tensor, ...], wait: Wait = there
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The stage's own, recorded."""
        wanted = self.needs_grad or [x.is_floating_point() for x in received]
        with torch.enable_grad():
            given = tuple(x.detach().requires_grad_(w) for x, w in zip(received, wanted, strict=True))
            outputs = self.stage.forward(micro_batch, given)
        return tuple(x.detach() for x in outputs), _Recorded(given, outputs)

    def backward(self, micro_batch: int, kept: _Recorded, seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run autograd."""
        kept.ends = self._ends(kept, seeds)
        self._backward(kept)
        return [x.grad for x in kept.received]

    def backward_of_inputs(
        self, micro_batch: int, kept: _Recorded, seeds: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Run autograd towards the received values alone."""
        kept.ends = self._ends(kept, seeds)
        wanted = [x for x in kept.received if x.requires_grad]
        found: Iterator[Tensor | None] = iter(())
        if wanted and kept.ends:
            roots, gradients = zip(*kept.ends, strict=True)
            found = iter(torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True))
        return [next(found, None) if x.requires_grad else None for x in kept.received]

    def backward_of_weights(self, micro_batch: int, kept: _Recorded) -> None:
        """Run autograd towards the parameters, by the way that the inputs' part went too."""
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        if trained:
            self._backward(kept, trained)

    def _ends(self, kept: _Recorded, seeds: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        return [(x, seed) for x, seed in zip(kept.outputs, seeds, strict=True) if x.requires_grad and seed is not None]
