"""Runs of a step of AdamW: stretches of memory in which parameters, their gradients and moments follow each other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NUM_SCALARS", "Kind", "Run", "wide_of"]

NUM_SCALARS = 8
"""Columns of the scalars of a pass: 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, -lr / (1 - beta1 ** step), the
square root of 1 - beta2 ** step (its reciprocal for the kernel in Triton, as torch's operators divide by a number on a
GPU), eps, and the factor of gradients."""


class Kind(NamedTuple):
    """The options of a pass: whether gradients are negated, the largest second moment counts, and gradients are
    multiplied by a factor and written back."""

    maximize: bool = False
    amsgrad: bool = False
    scaled: bool = False


class Run(NamedTuple):
    """A stretch of elements, in vectors of one length.

    Attributes:
        parameter: in the number type in which it is updated.
        gradient, mean, square: its gradient, and the moments.
        largest: the largest second moment so far, with ``amsgrad``.
        copy: where the parameter is written too, in low precision.
        row: of its scalars.
    """

    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    largest: Tensor | None
    copy: Tensor | None
    row: int


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The number type in which a pass computes: float32, or that of wider parameters."""
    return torch.promote_types(dtype.to_real(), torch.float32)
