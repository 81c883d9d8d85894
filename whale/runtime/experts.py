"""Grouped matrix products of a mixture of experts: each row is multiplied with its expert's matrix.

The rows are sorted by matrix, so that a grouped kernel reads every matrix once, and unsorted afterwards. It knows rows,
matrices and kernels; no models and no placements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Groups", "from_experts", "group", "grouped_product", "product_of_groups", "to_experts"]

Groups = tuple[Tensor, Tensor, Tensor]
"""The order that sorts rows by their matrix, its inverse, and where each matrix's rows end."""


class _Reordered(torch.autograd.Function):
    """``x[order]``, whose gradient needs no sum, because every row is taken once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, inverse = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def group(choice: Tensor, count: int) -> Groups:
    """Group rows by their matrices.

    Args:
        choice: [rows], for each row the number of its matrix.
        count: number of matrices.
    """
    ordered, order = torch.sort(choice, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.searchsorted(ordered, torch.arange(count, device=choice.device, dtype=choice.dtype), right=True)
    return order, inverse, ends.to(torch.int32)


_library = torch.library.Library("whale_experts", "DEF")
_library.define("outer_products(Tensor x, Tensor y, Tensor ends) -> Tensor")


def _outer_products(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """The sum of the outer products of the rows of each group: [rows, n], [rows, m] -> [count, n, m]."""
    found, begin = x.new_zeros(len(ends), x.shape[1], y.shape[1]), 0
    for number, end in enumerate(ends.tolist()):
        torch.mm(x[begin:end].t(), y[begin:end], out=found[number])
        begin = end
    return found


_library.impl("outer_products", _outer_products, "CompositeExplicitAutograd")
torch.library.register_fake(
    "whale_experts::outer_products", lambda x, y, ends: x.new_empty(len(ends), x.shape[1], y.shape[1]), lib=_library
)


class _Product(torch.autograd.Function):
    """Product of groups by a kernel whose own backward reads where groups end, so that it has none without data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, ends: Tensor, kernel: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x, matrices, ends)
        ctx.kernel = kernel
        return kernel(x, matrices, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, matrices, ends = ctx.saved_tensors
        of_rows = ctx.kernel(grad, matrices.transpose(1, 2), ends)
        return of_rows, torch.ops.whale_experts.outer_products(x, grad, ends), None, None


@cache
def _reads_values(kernel: Callable[..., Tensor]) -> bool:
    """Whether it is the kernel of transformers before 5.23, whose backward is no operator."""
    is_fallback = str(kernel).startswith("transformers.grouped_mm_fallback")
    return is_fallback and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward")


def product_of_groups(
    x: Tensor, matrices: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, kernel: Callable[..., Tensor]
) -> Tensor:
    """:func:`grouped_product` of rows that are grouped already."""
    if not len(x):
        return x @ matrices[0]  # kernels refuse no rows
    given = _Reordered.apply(x, order, inverse), matrices, ends
    y = _Product.apply(*given, kernel) if _reads_values(kernel) else kernel(*given)
    return _Reordered.apply(y, inverse, order)


def grouped_product(x: Tensor, matrices: Tensor, choice: Tensor, kernel: Callable[..., Tensor]) -> Tensor:
    """Multiply each row with its matrix.

    Args:
        x: [rows, n].
        matrices: [count, n, m].
        choice: [rows], whole numbers below count.
        kernel: ``kernel(x, matrices, ends)`` multiplies rows in the order of their matrices; ``ends``, [count], says
            where each matrix's rows end.

    Returns:
        [rows, m]
    """
    return product_of_groups(x, matrices, *group(choice, len(matrices)), kernel)


def to_experts(x: Tensor, choice: Tensor) -> Tensor:
    """Rows that are from here on computed at the experts that they chose, wherever these are: here, as they are.

    Args:
        x: [rows, ...].
        choice: [rows], numbers of experts.
    """
    return x


def from_experts(x: Tensor, choice: Tensor) -> Tensor:
    """Rows that come back from the experts that they chose: the inverse of :func:`to_experts`."""
    return x
