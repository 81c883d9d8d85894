"""Values of a graph: a node and one of its outputs. ``getitem`` nodes only select an output."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import fx

Value = tuple[fx.Node, int]
"""One tensor of the graph: a node, and which of its outputs (0 for a node with one)."""


def resolve(node: fx.Node) -> Value:
    """The value behind a node: a ``getitem`` is an output of its producer."""
    if node.op == "call_function" and node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def is_call(node: fx.Node) -> bool:
    """Whether a node computes something."""
    return node.op == "call_function" and node.target is not operator.getitem


def is_tensor(node: fx.Node) -> bool:
    """Whether the node yields one tensor (not a tuple, a number or a list)."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def operands(node: fx.Node) -> list[Value]:
    """The tensor operands of a call, in the order of its arguments; one that is given twice counts twice."""
    return [resolve(leaf) for leaf in _nodes((*node.args, *node.kwargs.values())) if is_tensor(leaf)]


def _nodes(arguments: Iterable[object]) -> Iterator[fx.Node]:
    """The nodes among a call's arguments, and in their lists, in order."""
    for x in arguments:
        if isinstance(x, fx.Node):
            yield x
        elif isinstance(x, tuple | list):
            yield from _nodes(x)
        elif isinstance(x, Mapping):
            yield from _nodes(x.values())


def value_tensor(value: Value) -> torch.Tensor:
    """The fake tensor of a value."""
    meta = value[0].meta["val"]
    return meta if isinstance(meta, torch.Tensor) else meta[value[1]]


def value_shape(value: Value) -> tuple[int, ...]:
    """Whole shape of a value."""
    return tuple(value_tensor(value).shape)


def value_name(value: Value) -> str:
    """Name of a value, which is the same on every rank."""
    return value[0].name if value[1] == 0 else f"{value[0].name}:{value[1]}"


def needs_grad(value: Value) -> bool:
    """Whether gradients flow through a value (see ``whale.graph.capture.mark_gradients``)."""
    tensor = value_tensor(value)
    return bool(value[0].meta.get("grad")) and (tensor.is_floating_point() or tensor.is_complex())


def makes_sparse_gradient(node: fx.Node) -> bool:
    """Whether an operator makes a sparse gradient of its first operand, of which it reads some rows."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "sparse" not in names:
        return False
    place = names.index("sparse")
    return bool(node.args[place] if len(node.args) > place else node.kwargs.get("sparse"))


def has_sparse_gradient(value: Value) -> bool:
    """Whether the gradient of a parameter is sparse: all that reads it makes sparse ones."""
    users = value[0].users
    return bool(users) and all(makes_sparse_gradient(user) and user.args[0] is value[0] for user in users)


def output_shapes(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Whole shapes of a node's outputs; an output that is not a tensor counts as a scalar."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return (tuple(val.shape),)
    if isinstance(val, (tuple, list)):
        return tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in val)
    return ((),)
