"""Which operators of a graph belong to the core of an attention, and which to the experts of a mixture.

The core of an attention is what lies between queries, keys and values and the context: a fused operator, or a product,
a softmax and a product, and what stands between them. Knows graphs and axis rules only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from whale.graph.capture import Captured
from whale.graph.capture_checks import module_of
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
"""Of a layer's parameters, what experts have at least."""


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
    """What lies between a softmax and the next product in one direction, the product last; empty if there is none."""
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
    """Of the operators of one layer, products of rows with the matrix that each chose, and what lies between two."""
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
    """Of the products with experts in a layer, those whose rows have to be brought to the experts, one for each set of
    rows, and those whose results are brought back."""
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
    """The parameters that products with experts read, maybe in another layout."""
    found = set()
    for node in nodes:
        if node.target is grouped_product:
            found.add(_source(operands(node)[1]))
    return frozenset(found)


def expert_modules(captured: Captured, analysis: Analysis, nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """The modules whose own parameters are matrices of experts, one for each, in order of use.

    Those are what rows are multiplied with one by one, and what a batched product reads along the axis of its batch;
    and they are most of what the layer has, of which the modules are not all.
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
    """Whether a module is another, or lies in it.

    >>> is_within("layers.0.experts.up", "layers.0.experts"), is_within("layers.10", "layers.1")
    (True, False)
    """
    return path == module or path.startswith(f"{module}.")


def _stacks(analysis: Analysis, node: fx.Node) -> Iterable[Value]:
    """What a product reads along an axis of its batch, as it came into the layer."""
    if node.target not in PRODUCTS and node.target is not aten.einsum.default:
        return
    sources = [_source(value) for value in analysis.ops[node].operands]
    for axis in analysis.rules[node].axes:
        if len(axis.inputs) > 1 and axis.outputs:
            yield from (sources[operand] for operand in axis.inputs if value_tensor(sources[operand]).dim() > 2)


def _source(value: Value) -> Value:
    """What a value is in another layout or number type."""
    while value[0].op != "placeholder" and len(value[0].all_input_nodes) == 1:
        value = resolve(value[0].all_input_nodes[0])
    return value
