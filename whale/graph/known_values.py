"""Values that a capture knows: of tensors that a forward makes of Python's numbers alone, such as
``torch.arange(2, x.dim()).tolist()``.

A traced tensor has no values. Where a forward reads one, the operators that made it are looked up in the tracer's graph
and computed, if all of them begin with numbers. This module knows torch's tracer, not how a model is captured.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from whale.graph.tracer import current_tracer, node_in

__all__ = ["READS_VALUES", "known_value"]

_MOST_OPERATORS = 64
"""Limit of what is computed in a capture."""

READS_VALUES = (
    Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__,
)  # fmt: skip
"""Functions that return values of a tensor to Python."""


def known_value(x: Tensor, most_elements: int = 4096) -> Tensor | None:
    """A traced tensor with its values; None where these depend on more than numbers of Python, or on a tensor of more
    elements."""
    tracer = current_tracer()
    if tracer is None or not isinstance(x, FakeTensor) or x.constant is not None:
        return None
    last = node_in(tracer, x)
    nodes = None if last is None else _made_of_numbers(tracer, last, most_elements)
    if nodes is None:
        return None
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        for node in nodes:
            if node.op == "get_attr":
                values[node] = _constant(tracer, node)
                continue
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            target: Any = node.target
            values[node] = target(*args, **kwargs)
    found = values[nodes[-1]]
    return found if isinstance(found, Tensor) and found.shape == x.shape and found.dtype == x.dtype else None


def _made_of_numbers(tracer: Any, last: fx.Node, most_elements: int) -> list[fx.Node] | None:
    """The operators of which a node is the result, first to last; None where one reads more than numbers, draws random
    ones, makes a large tensor, or one that is written to."""
    found: dict[fx.Node, None] = {}
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        made = _is_pure(node.target) if node.op == "call_function" else _constant(tracer, node) is not None
        sizes = [v.numel() for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
        if not made or len(found) == _MOST_OPERATORS or max(sizes, default=0) > most_elements or _is_written(node):
            return None
        found[node] = None
        waiting.extend(node.all_input_nodes)
    places = {node: place for place, node in enumerate(last.graph.nodes) if node in found}
    return sorted(found, key=places.__getitem__)


def _constant(tracer: Any, node: fx.Node) -> Tensor | None:
    """The values of a constant, as ``torch.tensor`` makes it."""
    found = getattr(tracer.root, str(node.target), None) if node.op == "get_attr" else None
    found = found.constant if isinstance(found, FakeTensor) else found
    return found if isinstance(found, Tensor) and not isinstance(found, (FakeTensor, nn.Parameter)) else None


def _is_written(node: fx.Node) -> bool:
    """Whether an operator writes to a tensor or to a view of it."""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        for user in waiting.pop().users:
            if _writes(user.target):
                return True
            if user not in seen and (user.target is operator.getitem or _is_view(user.target)):
                seen.add(user)
                waiting.append(user)
    return False


def _is_view(target: Any) -> bool:
    return isinstance(target, OpOverload) and any(x.alias_info is not None for x in target._schema.returns)


def _is_pure(target: Any) -> bool:
    random = torch.Tag.nondeterministic_seeded
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return not _writes(target) and random not in target.tags and target.namespace in ("aten", "prims")


def _writes(target: Any) -> bool:
    """Whether an operator changes values; ``torch.tensor`` detaches in place."""
    return isinstance(target, OpOverload) and target._schema.is_mutable and target != torch.ops.aten.detach_.default
