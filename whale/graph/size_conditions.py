"""Conditions on sizes of a batch under which a model's code does the same: torch finds them with symbolic sizes.

The forward runs once without data. Where its code asks something of a size, as in ``if length > 512`` or
``range(length)``, the answer becomes a condition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from whale.graph.capture import run_without_data
from whale.ir.program import Returns

__all__ = ["SizeConditions", "VaryingDims", "size_conditions"]

VaryingDims = Mapping[tuple[str, int], int]
"""Dims of leaves of a batch, (name, dim), with the number of the size that each has."""

_SMALLEST = 2
"""Dims of size 1 are broadcast: a graph for others is not one for them."""


@dataclass(frozen=True)
class SizeConditions:
    """Conditions on sizes."""

    symbols: tuple[sympy.Symbol, ...]
    conditions: tuple[sympy.Basic, ...]

    def hold(self, sizes: Sequence[int]) -> bool:
        """Whether the model's code does the same for these sizes."""
        values = dict(zip(self.symbols, sizes, strict=True))
        return min(sizes) >= _SMALLEST and all(condition.subs(values) == sympy.true for condition in self.conditions)


class _NotLinearError(Exception):
    """An operator has a number that is not linear in the sizes."""


class _SymbolicMode(FakeTensorMode):
    """Fake tensors with symbolic sizes; operators with numbers that are not linear in these are refused."""

    _depth = 0
    """Operators that compute the sizes of others are not the model's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._depth += 1
        try:
            results = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._depth -= 1
        for leaf in pytree.tree_leaves((args, kwargs, results)) if not self._depth else ():
            for number in leaf.shape if isinstance(leaf, torch.Tensor) else [leaf]:
                if isinstance(number, (torch.SymFloat, torch.SymBool)):
                    raise _NotLinearError(func)
                if isinstance(number, torch.SymInt) and not _is_linear(number.node.expr):
                    raise _NotLinearError(func)
        return results


def _is_linear(expression: sympy.Expr) -> bool:
    symbols = sorted(expression.free_symbols, key=str)
    return not symbols or (expression.is_polynomial(*symbols) and sympy.Poly(expression, *symbols).total_degree() <= 1)


def size_conditions(
    model: nn.Module,
    batch: Mapping[str, Any],
    dims: VaryingDims,
    *,
    device: torch.device | str,
    loss_fn: Callable[..., Any] | None = None,
    returns: Returns = "loss",
) -> SizeConditions | None:
    """The conditions under which *model* computes a batch with other sizes as it does *batch*; None if torch does not
    find them, or not all numbers of its operators are linear in the sizes.

    Args:
        model: in the modes in which it is to run.
        batch: by leaf name.
        dims: that vary.
        device, loss_fn, returns: as in :func:`whale.graph.capture.capture`.
    """
    environment = ShapeEnv()
    mode = _SymbolicMode(shape_env=environment, allow_non_fake_inputs=True)
    symbols: list[sympy.Symbol] = []
    sizes: list[Any] = []
    for (name, dim), number in dims.items():
        if number == len(symbols):
            hint, source = batch[name].shape[dim], ConstantSource(f"size_{number}")
            symbols.append(environment.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC))
            sizes.append(environment.create_symintnode(symbols[-1], hint=hint, source=source))
    try:
        with mode:
            fakes = {
                name: torch.empty(
                    [sizes[dims[name, d]] if (name, d) in dims else size for d, size in enumerate(leaf.shape)],
                    dtype=leaf.dtype,
                    device=device,
                )
                if isinstance(leaf, torch.Tensor)
                else leaf
                for name, leaf in batch.items()
            }
        with enable_python_dispatcher():  # with implementations for symbolic sizes
            run_without_data(model, fakes, mode, device=torch.device(device), loss_fn=loss_fn, returns=returns)
    except Exception:  # whatever a model does that torch's symbols cannot: it is compiled for each size
        return None
    conditions = tuple(guard.expr for guard in environment.guards)
    asserted = tuple(a.expr for several in environment.deferred_runtime_asserts.values() for a in several)
    return SizeConditions(tuple(symbols), conditions + asserted)
