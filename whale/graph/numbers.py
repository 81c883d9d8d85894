"""Numbers among a model's arguments: tensors without dims in the graph, so that one step serves every value.

A model is captured with a symbolic number, which torch carries through Python's arithmetic and refuses to compare or to
convert. It then becomes tensors of the dtypes that the number would have had: a number of Python does not promote. A
capture with the number's value must give the same operators. This module knows graphs, and nothing of captures.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from whale.errors import CaptureError
from whale.graph.canonical import emit
from whale.graph.nodes import inner_modules

__all__ = ["NotANumber", "numbers_to_tensors"]

aten = torch.ops.aten

_ARITHMETIC: Mapping[Any, tuple[Callable[..., Any], Any, Any]] = {
    operator.add: (operator.add, aten.add.Tensor, aten.add.Tensor),
    operator.sub: (operator.sub, aten.sub.Tensor, aten.rsub.Scalar),
    operator.mul: (operator.mul, aten.mul.Tensor, aten.mul.Tensor),
    operator.truediv: (operator.truediv, aten.div.Tensor, None),
    operator.pow: (operator.pow, aten.pow.Tensor_Tensor, None),
    operator.neg: (operator.neg, aten.neg.default, None),
}
"""Python's operators on symbolic numbers, with torch's, and torch's where the left operand is a constant."""

_WITH_TENSORS = {
    aten.add.Tensor: aten.add.Tensor, aten.sub.Tensor: aten.sub.Tensor, aten.mul.Tensor: aten.mul.Tensor,
    aten.div.Tensor: aten.div.Tensor, aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor, aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor, aten.lt.Scalar: aten.lt.Tensor, aten.le.Scalar: aten.le.Tensor,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor, aten.where.ScalarOther: aten.where.self,
    aten.where.ScalarSelf: aten.where.self, aten.lerp.Scalar: aten.lerp.Tensor, aten.rsub.Scalar: aten.rsub.Tensor,
}  # fmt: skip
"""Operators that take a number, and their forms that take a tensor in its place."""

_EXACT = (torch.float32, torch.float64)
"""Dtypes in which a tensor without dims acts as a number does: in others, operators compute with a wider one."""


class NotANumber(CaptureError):
    """A number that decides more than values: it stays a constant."""


def numbers_to_tensors(graph: fx.Graph, numbers: Mapping[fx.Node, float], constant: fx.Graph) -> None:
    """Replace symbolic numbers by tensors.

    Args:
        graph: a graph with symbolic numbers.
        numbers: its placeholders of numbers, and their values.
        constant: the graph that the model has with these values.

    Raises:
        NotANumber: an operator cannot take a tensor, or the graphs differ.
    """
    values: dict[fx.Node, float] = {}
    tensors: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is aten.item.default and node.args[0] in numbers:
            values[node], tensors[node] = numbers[node.args[0]], node.args[0]
        elif node.target in _ARITHMETIC and any(source in values for source in node.all_input_nodes):
            compute, target, reversed_target = _ARITHMETIC[node.target]
            values[node] = compute(*(values.get(x, x) for x in node.args))
            operands = [tensors.get(x, x) for x in node.args]
            if not isinstance(operands[0], fx.Node):
                target, operands = reversed_target, operands[::-1]
            if node.target is operator.pow and not isinstance(operands[1], fx.Node):
                target = aten.pow.Tensor_Scalar
            if target is None:
                raise NotANumber(f"{node.target} of a constant and a number")
            with graph.inserting_before(node):
                tensors[node] = emit(graph, node, target, *operands)
    _compare(graph, values, tensors, constant)
    for node in list(graph.nodes):
        if node in values or not any(source in values for source in node.all_input_nodes):
            continue
        result = node.meta.get("val")
        first = next((x.meta["val"] for x in node.args if isinstance(x, fx.Node) and x not in values), None)
        if node.target not in _WITH_TENSORS or not isinstance(result, Tensor) or not isinstance(first, Tensor):
            raise NotANumber(f"{node.target} takes a number")
        dtype = torch.result_type(first, 1.0) if result.dtype == torch.bool else result.dtype
        if dtype not in _EXACT or any(x in values for x in node.kwargs.values()):
            raise NotANumber(f"{node.target} computes in another dtype")
        with graph.inserting_before(node):
            args = [
                emit(graph, node, aten._to_copy.default, tensors[x], dtype=dtype) if x in values else x
                for x in node.args
            ]
        node.target, node.args = _WITH_TENSORS[node.target], tuple(args)
    for node in reversed(values):
        graph.erase_node(node)


def _compare(
    graph: fx.Graph, values: Mapping[fx.Node, float], tensors: Mapping[fx.Node, fx.Node], constant: fx.Graph
) -> None:
    """Check that two graphs have the same operators where numbers are replaced by values.

    Raises:
        NotANumber: they differ.
    """
    made = {*values, *tensors.values()}
    holes = graph.find_nodes(op="placeholder")
    own = [n for n in graph.nodes if n not in made and n.op != "placeholder"]
    other = [n for n in constant.nodes if n.op != "placeholder"]
    names = dict(zip([*holes, *own], [*constant.find_nodes(op="placeholder"), *other], strict=False))
    for a, b in zip(own, other, strict=False):
        args = fx.map_arg((a.args, a.kwargs), lambda n: values[n] if n in values else names.get(n, n))
        if a.target != b.target or repr(args) != repr((b.args, b.kwargs)):
            raise NotANumber(f"{b.target} depends on the number's value")
    inner = [[str(m.graph) for m in inner_modules(one)] for one in (graph, constant)]
    if len(own) != len(other) or inner[0] != inner[1]:
        raise NotANumber("the operators depend on the number's value")
