"""Writer of local programs: placeholders by source, calls of operators by their schemas, and clean-up of a finished
graph. It decides no placements.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from whale.graph.nodes import create_node
from whale.graph.values import Value
from whale.runtime.collectives import Bridge
from whale.runtime.experts import group, grouped_product, product_of_groups
from whale.runtime.local_program import LocalCode, LocalGraph, Source
from whale.strategies.layout import Placements
from whale.strategies.rules.registry import Op, arguments_of

__all__ = ["LEVELS", "Emitter", "arguments", "emit", "group_once", "mark_reusable", "substitute"]

aten = torch.ops.aten


LEVELS = ("constant", "step", "micro_batch")
"""The graphs of a local program, and the sources of what a later one reads of an earlier one."""


class Emitter:
    """A graph being written: its placeholders by source, and the values it has, by placement."""

    def __init__(self, level: int, root: nn.Module) -> None:
        self.level, self.graph, self.root = level, fx.Graph(), root
        self.env: dict[tuple[Value, Placements], fx.Node] = {}
        self.sources: list[Source] = []
        self._placeholders: dict[Any, fx.Node] = {}
        self.outputs: list[fx.Node] = []
        self._output_index: dict[fx.Node, int] = {}
        self._modules = 0

    def placeholder(self, key: Any, source: Source, hint: str) -> fx.Node:
        """The node of a key, created if there is none."""
        if key not in self._placeholders:
            last = list(self._placeholders.values())[-1] if self._placeholders else None
            with self.graph.inserting_after(last) if last else self.graph.inserting_before(None):
                self._placeholders[key] = self.graph.placeholder(f"{hint}_{len(self._placeholders)}")
            self.sources.append(source)
        return self._placeholders[key]

    def output(self, node: fx.Node) -> int:
        """Index of the node among the graph's outputs."""
        if node not in self._output_index:
            self._output_index[node] = len(self.outputs)
            self.outputs.append(node)
        return self._output_index[node]

    def call_module(self, module: nn.Module, args: tuple[Any, ...], hint: str, kwargs: dict | None = None) -> fx.Node:
        """A call of a module, which is added to the root."""
        name = f"{hint}_{self._modules}"
        self._modules += 1
        self.root.add_module(name, module)
        return create_node(self.graph, "call_module", name, args, kwargs)

    def finish(self) -> LocalGraph:
        """The graph, without unused nodes."""
        self.graph.output(tuple(self.outputs))
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("call_function", "call_module") and not node.users:
                self.graph.erase_node(node)
                if node.op == "call_module":
                    delattr(self.root, node.target)
        return LocalGraph(LocalCode(self.root, self.graph), self.sources)


def substitute(op: Op, args: Sequence[fx.Node | None]) -> dict[str, Any]:
    """The call's arguments by name with its tensor operands replaced, in order."""
    replacements = iter(args)

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor):
            return next(replacements)
        return leaf

    bound = dict(op.args)
    for name in op.tensor_names:
        given = op.args.get(name)
        one = given is None or isinstance(given, fx.Node)
        bound[name] = replace(given) if one else pytree.tree_map(replace, given, is_leaf=lambda x: x is None)
    return bound


def arguments(op: Op, bound: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, positional and by name, without those equal to their schema defaults."""
    if getattr(op.target, "_schema", None) is None:
        positional = tuple(bound[str(i)] for i in range(len(op.node.args)))
        return positional, {k: bound[k] for k in op.node.kwargs}
    given = [a for a in arguments_of(op.target) if not a.kwarg_only]
    positional_args = [bound[a.name] for a in given]
    while given and given[-1].has_default and positional_args[-1] == given[-1].default:
        given.pop()
        positional_args.pop()
    keyword = {
        a.name: bound[a.name]
        for a in arguments_of(op.target)
        if a.kwarg_only and not (a.has_default and bound[a.name] == a.default)
    }
    return tuple(positional_args), keyword


def emit(graph: fx.Graph, op: Op, bound: dict[str, Any]) -> fx.Node:
    """The call of an operator with these arguments, by name."""
    positional, keyword = arguments(op, bound)
    target: Any = random_between if op.target is _RANDOM_FROM else op.target
    return create_node(graph, "call_function", target, positional, keyword)


_RANDOM_FROM = getattr(aten.random, "from")


def random_between(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``aten.random.from``, whose name, a word of Python, cannot stand in the code of a graph."""
    found: torch.Tensor = _RANDOM_FROM(*args, **kwargs)
    return found


def group_once(graph: fx.Graph, experts: int | None = None) -> None:
    """Sort rows once for all expert products with the same choice of *experts*; None: of all that the model has."""
    known: dict[tuple[fx.Node, int], list[fx.Node]] = {}
    for node in list(graph.nodes):
        if node.target is not grouped_product:
            continue
        x, matrices, choice, kernel = node.args
        count = node.meta["source"].args[1].meta["val"].shape[0] if experts is None else experts
        if (choice, count) not in known:
            with graph.inserting_before(node):
                groups = graph.call_function(group, (choice, count))
                known[choice, count] = [graph.call_function(operator.getitem, (groups, i)) for i in range(3)]
        node.target, node.args = product_of_groups, (x, matrices, *known[choice, count], kernel)


_PRODUCTS = {
    aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default, aten.matmul.default,
    aten.conv2d.default, aten.conv1d.default,
}  # fmt: skip
"""Operators whose results and operand gradients have no alias."""
_FRESH = _PRODUCTS | {aten.add.Tensor, product_of_groups}
"""Operators whose results have no alias, not even in their own backward."""
_RENAMING = {aten.reshape.default}


def mark_reusable(graph: fx.Graph, root: nn.Module, leaving: Collection[fx.Node]) -> None:
    """Make an all-reduce work in place if its input is a fresh result that nothing else reads, and is not *leaving*.

    A value qualifies if one operator made it for the bridge alone; a gradient, if all readers of the bridge's result
    make fresh ones (autograd adds several of them up in a new tensor).
    """
    for node in graph.nodes:
        module = root.get_submodule(node.target) if node.op == "call_module" else None
        if not isinstance(module, Bridge):
            continue
        source = node.args[0]
        leaves = source in leaving
        while source.target in _RENAMING and len(source.users) == 1:
            source = source.args[0]
            leaves |= source in leaving
        module.conversion = replace(
            module.conversion,
            reuse=source.target in _FRESH and len(source.users) == 1 and not leaves,
            reuse_gradient=all(user.target in _PRODUCTS for user in node.users),
        )
