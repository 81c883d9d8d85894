"""Regions of a graph: operators of an attention's core, and of the experts of a mixture.

The core of an attention lies between queries, keys and values and the context: a fused operator, or a product, a
softmax and a product, and the operators between them. This module knows graphs and axis rules only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from whale.graph.captured import Captured
from whale.graph.origins import module_of
from whale.graph.values import Value, operands, resolve, value_tensor
from whale.runtime.experts import grouped_product
from whale.strategies.analysis import Analysis

__all__ = [
    "PRODUCTS",
    "attention_cores",
    "expert_matrices",
    "expert_modules",
    "expert_operators",
    "expert_ways",
    "is_within",
]

aten = torch.ops.aten

_FUSED = {aten.scaled_dot_product_attention.default}
PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default}
_SOFTMAX = {aten.softmax.int, aten._softmax.default}
_BETWEEN = {
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor, aten.sub.Tensor,
    aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar, aten.masked_fill.Tensor,
    aten._to_copy.default, aten.reshape.default, aten.expand.default, aten.tanh.default, aten.dropout.default,
    aten.clone.default, aten.slice.Tensor,
}  # fmt: skip
_MOST = 0.5
"""Smallest fraction of a layer's parameters that experts have."""


def attention_cores(graph: fx.Graph) -> frozenset[fx.Node]:
    """The operators between queries, keys and values and the context, both products included."""
    found = {node for node in graph.nodes if node.target in _FUSED}
    for node in graph.nodes:
        if node.target in _SOFTMAX:
            before = _towards_product(node, lambda n: n.all_input_nodes)
            after = _towards_product(node, lambda n: n.users)
            if before and after:
                found |= {node} | before | after
    return frozenset(found)


def _towards_product(softmax: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Operators between a softmax and the next product in one direction, the product last; empty if there is none."""
    path: set[fx.Node] = set()
    stack: list[tuple[fx.Node, tuple[fx.Node, ...]]] = [(n, ()) for n in step(softmax)]
    while stack:
        node, way = stack.pop()
        if node.target in PRODUCTS:
            path |= {node, *way}
        elif node.target in _BETWEEN and len(way) < 8:
            stack += [(n, (*way, node)) for n in step(node)]
    return path


def expert_operators(nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """Expert products of one layer: products of rows with the matrix that each row chose, and operators between two."""
    products = {node for node in nodes if node.target is grouped_product}
    after, before = set[fx.Node](), set[fx.Node]()
    for node in nodes:
        if any(source in products or source in after for source, _ in operands(node)):
            after.add(node)
    for node in reversed(nodes):
        if node in products or node in before:
            before.update(source for source, _ in operands(node))
    return frozenset(products | (after & before))


def expert_ways(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Expert products of a layer whose rows are sent to the experts, one for each set of rows, and those whose results
    are sent back."""
    products = [node for node in nodes if node.target is grouped_product]
    after = set[fx.Node]()
    for node in nodes:
        if any(source.target is grouped_product or source in after for source, _ in operands(node)):
            after.add(node)
    before = set[fx.Node]()
    for node in reversed(nodes):
        if node in before or node.target is grouped_product:
            before.update(source for source, _ in operands(node))
    bring = {operands(node)[0]: node for node in products if node not in after}
    return list(bring.values()), [node for node in products if node not in before]


def expert_matrices(nodes: Sequence[fx.Node]) -> frozenset[Value]:
    """Parameters that expert products read, possibly in another layout."""
    found = set()
    for node in nodes:
        if node.target is grouped_product:
            found.add(_source(operands(node)[1]))
    return frozenset(found)


def expert_modules(captured: Captured, analysis: Analysis, nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """Modules whose own parameters are expert matrices, one per expert, in order of use.

    Such matrices are multiplied with rows one by one, or read by a batched product along its batch axis. They are most
    of the layer's parameters, and the modules are not the whole layer.
    """
    stacks = expert_matrices(nodes) | {value for node in nodes for value in _stacks(analysis, node)}
    parameters = dict.fromkeys(v for node in nodes for v in operands(node) if v[0].name in captured.parameters)
    stacks &= parameters.keys()
    sizes = {value: value_tensor(value).numel() for value in parameters}
    if not stacks or sum(map(sizes.__getitem__, stacks)) < _MOST * sum(sizes.values()):
        return ()
    names = [captured.parameters[v[0].name] for v in parameters if v in stacks]
    found = tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))
    outside = [node for node in nodes if not any(is_within(module_of(node), path) for path in found)]
    return found if all(found) and any(v in parameters for node in outside for v in operands(node)) else ()


def is_within(path: str, module: str) -> bool:
    """Whether a module equals another or lies in it.

    >>> is_within("layers.0.experts.up", "layers.0.experts"), is_within("layers.10", "layers.1")
    (True, False)
    """
    return path == module or path.startswith(f"{module}.")


def _stacks(analysis: Analysis, node: fx.Node) -> Iterable[Value]:
    """The layer input that a product reads along an axis of its batch."""
    if node.target not in PRODUCTS and node.target is not aten.einsum.default:
        return
    sources = [_source(value) for value in analysis.ops[node].operands]
    for axis in analysis.rules[node].axes:
        if len(axis.inputs) > 1 and axis.outputs:
            yield from (sources[operand] for operand in axis.inputs if value_tensor(sources[operand]).dim() > 2)


def _source(value: Value) -> Value:
    """The source of a value that is only in another layout or dtype."""
    while value[0].op != "placeholder" and len(value[0].all_input_nodes) == 1:
        value = resolve(value[0].all_input_nodes[0])
    return value
