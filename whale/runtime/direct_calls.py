"""Operators of a graph called by torch's own functions, which take half the host's time of a call of the overload.

The functions parse their arguments in C, and call the same overloads: nothing that is computed changes. Graphs keep the
overloads, which passes read; only the code that runs has these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

__all__ = ["called_directly", "directly"]

aten = torch.ops.aten


class _Direct(NamedTuple):
    """A function in place of an overload, for calls with at most *positional* arguments and some *named* ones."""

    function: Callable[..., Any]
    positional: int
    named: frozenset[str] = frozenset()


_DIRECT: dict[Any, _Direct] = {
    aten.view.default: _Direct(Tensor.view, 2),
    aten.reshape.default: _Direct(torch.reshape, 2),
    aten.t.default: _Direct(torch.t, 1),
    aten.transpose.int: _Direct(torch.transpose, 3),
    aten.permute.default: _Direct(torch.permute, 2),
    aten.mm.default: _Direct(torch.mm, 2),
    aten.bmm.default: _Direct(torch.bmm, 2),
    aten.addmm.default: _Direct(torch.addmm, 3),
    aten.mul.Tensor: _Direct(torch.mul, 2),
    aten.div.Tensor: _Direct(torch.div, 2),
    aten.add.Tensor: _Direct(torch.add, 2, frozenset({"alpha"})),
    aten.sub.Tensor: _Direct(torch.sub, 2, frozenset({"alpha"})),
    aten.sum.dim_IntList: _Direct(torch.sum, 3, frozenset({"dtype"})),
    aten.mean.dim: _Direct(torch.mean, 3, frozenset({"dtype"})),
    aten.cat.default: _Direct(torch.cat, 2),
    aten.split_with_sizes.default: _Direct(torch.split_with_sizes, 3),
    aten.where.self: _Direct(torch.where, 3),
    aten.clone.default: _Direct(torch.clone, 1, frozenset({"memory_format"})),
    aten.pow.Tensor_Scalar: _Direct(torch.pow, 2),
    aten.neg.default: _Direct(torch.neg, 1),
    aten.exp.default: _Direct(torch.exp, 1),
    aten.rsqrt.default: _Direct(torch.rsqrt, 1),
    aten.sigmoid.default: _Direct(torch.sigmoid, 1),
    aten.tanh.default: _Direct(torch.tanh, 1),
    aten.gelu.default: _Direct(torch._C._nn.gelu, 1, frozenset({"approximate"})),
    aten.silu.default: _Direct(torch._C._nn.silu, 1),
    aten.embedding.default: _Direct(torch.embedding, 5),
    aten.native_layer_norm.default: _Direct(torch.native_layer_norm, 5),
    aten._softmax.default: _Direct(torch._softmax, 3),
    aten._log_softmax.default: _Direct(torch._log_softmax, 3),
    aten._softmax_backward_data.default: _Direct(torch._softmax_backward_data, 4),
    aten._log_softmax_backward_data.default: _Direct(torch._log_softmax_backward_data, 4),
}


def directly(node: fx.Node) -> Callable[..., Any]:
    """The function that a call in a graph calls."""
    target: Any = node.target
    direct = _DIRECT.get(target)
    if direct is not None and len(node.args) <= direct.positional and direct.named.issuperset(node.kwargs):
        return direct.function
    if target is aten._to_copy.default and _casts(node):
        return Tensor.to
    return target


@contextmanager
def called_directly(graph: fx.Graph) -> Iterator[None]:
    """Context in which code that is made of a graph calls torch's functions; the graph is as before afterwards."""
    changed = []
    for node in graph.nodes:
        target = directly(node) if node.op == "call_function" else node.target
        if target is not node.target:
            changed.append((node, node.target))
            node.target = target
    try:
        yield
    finally:
        for node, target in changed:
            node.target = target


def _casts(node: fx.Node) -> bool:
    """Whether a copy is of another dtype, so that ``to`` makes one, too."""
    if not {"dtype", "device"}.issuperset(node.kwargs) or "dtype" not in node.kwargs:
        return False
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return isinstance(source, Tensor) and source.dtype != node.kwargs["dtype"]
