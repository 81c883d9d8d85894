"""The way of a gradient from the backward that makes it to its parameter, and to what takes it, as a sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["GradientSink", "TakesGradients"]


class TakesGradients(Protocol):
    """A taker of gradients, such as a sum over ranks."""

    def place(self, parameter: Any) -> Tensor | None:
        """Memory for the gradient of a parameter that has none; None: any."""

    def gradient_ready(self, parameter: Any) -> None:
        """A backward has made the gradient of a parameter."""


class GradientSink:
    """Adds gradients to those of parameters, as autograd does; new ones are where *taker* wants them.

    Args:
        parameters: by the number of their placeholder.
        taker: knows the memory of gradients, and gets each that is made.
    """

    def __init__(self, parameters: Sequence[Any], taker: TakesGradients | None = None) -> None:
        self.parameters, self.taker = parameters, taker

    def place(self, number: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """Memory for a result of an operator that is all of a gradient, which is then given to `add`."""
        parameter = self.parameters[number]
        if self.taker is not None and parameter.grad is None and parameter.requires_grad:
            place = self.taker.place(parameter)
            if place is not None and place.is_contiguous():
                return place.as_strided(shape, strides)
        return torch.empty_strided(shape, strides, dtype=parameter.dtype, device=parameter.device)

    def add(self, number: int, gradient: Tensor) -> None:
        """Add a gradient, which nothing else reads."""
        parameter = self.parameters[number]
        if not parameter.requires_grad:
            return
        taker = self.taker
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        elif taker is None or gradient.is_sparse or (place := taker.place(parameter)) is None:
            # scripts may write to it what autograd forbids for a view that was made without it
            parameter.grad = gradient.detach() if gradient._is_view() else gradient
        else:
            if not _share(place, gradient):
                place.copy_(gradient)
            parameter.grad = place
        if taker is not None:
            taker.gradient_ready(parameter)

    def add_copy(self, number: int, gradient: Tensor) -> None:
        """The same for a gradient whose memory will be written again."""
        if self.parameters[number].grad is None and not gradient.is_sparse:
            gradient = (
                self.place(number, tuple(gradient.shape), gradient.stride()).copy_(gradient)
                if gradient.is_contiguous()
                else gradient.clone()
            )
        self.add(number, gradient)


def _share(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors begin at the same memory."""
    return x.storage_offset() == y.storage_offset() and x.untyped_storage()._cdata == y.untyped_storage()._cdata
