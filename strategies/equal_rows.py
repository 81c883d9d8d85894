"""Rows of a looked-up value that are equal because their indices are, so that a stage need send each of them but once.

It knows captured graphs; `whale.runtime.equal_rows` finds the rows of each batch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from math import prod

import torch
from torch import fx, nn

from whale.graph.captured import Captured
from whale.graph.nodes import node_copy
from whale.graph.values import Value, is_call, operands, value_shape, value_tensor
from whale.runtime.equal_rows import RowKeys
from whale.runtime.local_program import LocalCode
from whale.strategies.traced_call import is_pure

__all__ = ["keys_of"]

aten = torch.ops.aten

_SAME_ORDER = {aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.clone.default}
"""Operators that keep the order of elements, and so of rows whose columns stay the last dim."""


def keys_of(captured: Captured, value: Value) -> RowKeys | None:
    """The keys of a value whose rows are those of a table at indices that are computed of the batch alone; None if it
    is another."""
    found_at, shape = _look_up(value), value_shape(value)[:-1]
    if found_at is None or not shape:
        return None
    table, indices = operands(found_at)[:2]
    if prod(value_shape(indices)) != prod(shape):
        return None
    nodes = _of_batch(captured, indices)
    if nodes is None:
        return None
    graph, env, leaves = fx.Graph(), dict[fx.Node, fx.Node](), []
    for node in nodes:
        env[node] = node_copy(graph, node, env.__getitem__)
        if node.op == "placeholder":
            leaves.append((captured.inputs[node.name], value_shape((node, 0))))
        elif "device" in node.kwargs:
            env[node].kwargs = env[node].kwargs | {"device": torch.device("cpu")}
    node, number = indices
    found = env[node]
    if value_tensor(indices) is not node.meta.get("val"):
        found = graph.call_function(operator.getitem, (found, number))
    graph.output((found,))
    return RowKeys(LocalCode(nn.Module(), graph), tuple(leaves), shape, value_shape(table)[0])


def _look_up(value: Value) -> fx.Node | None:
    """The look-up of which a value has the rows, each in the place of its index; None if it has other rows."""
    columns, beside = value_shape(value)[-1:], list[Value]()
    while value[0].target is not aten.embedding.default:
        given = operands(value[0])
        if not _keeps_rows(value[0]) or value_shape(given[0])[-1:] != columns:
            return None
        if any(value_shape(one)[-1:] not in ((), (1,)) for one in given[1:]):
            return None
        value, beside = given[0], beside + given[1:]
    indices = operands(value[0])[1]
    return value[0] if all(value_shape(one) == () or _is_of(one, indices) for one in beside) else None


def _keeps_rows(node: fx.Node) -> bool:
    """Whether each row of a result is of one row of the operand, in the same order."""
    if not is_call(node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    result, given = value_shape((node, 0)), operands(node)
    if not given or prod(value_shape(given[0])) != prod(result):
        return False
    if node.target is aten.sum.dim_IntList:
        return True  # of dims of one element each
    is_plain = torch.Tag.pointwise in node.target.tags and _is_plain(node)
    return node.target in _SAME_ORDER or node.target is aten._to_copy.default or is_plain


def _is_of(value: Value, indices: Value) -> bool:
    """Whether each element of a value is computed of one index, in the same order."""
    while value != indices:
        given = operands(value[0])
        if not _keeps_rows(value[0]) or any(value_shape(one) for one in given[1:]):
            return False
        value = given[0]
    return True


def _of_batch(captured: Captured, value: Value) -> list[fx.Node] | None:
    """The nodes that compute a value in whole numbers of the batch alone, in order; None if other things do."""
    places = {node: place for place, node in enumerate(captured.graph.nodes)}
    found, waiting = set[fx.Node](), [value[0]]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        if node.op == "placeholder":
            if node.name not in captured.inputs:
                return None
        elif not is_call(node) or not _is_plain(node):
            return None
        if node.target is not operator.getitem and not _is_whole(node.meta):
            return None
        found.add(node)
        waiting += node.all_input_nodes
    return sorted(found, key=places.__getitem__)


def _is_plain(node: fx.Node) -> bool:
    return node.target is operator.getitem or is_pure(node)


def _is_whole(meta: Mapping[str, object]) -> bool:
    value = meta.get("val")
    own = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(x, torch.Tensor) and not x.is_floating_point() and not x.is_complex() for x in own)
