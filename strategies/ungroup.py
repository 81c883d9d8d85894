"""Rewrite of mixtures of experts: computation on rows sorted by expert becomes computation on rows in their own order.

A mixture of experts sorts its rows by expert, computes on the sorted rows, and sorts them back. In between, a row's
position depends on all other rows, so no rank could compute on its own. But the sorted rows are computed row by row. So
the same operators are applied to the unsorted rows, and products with the experts' matrices become
:func:`~whale.runtime.experts.grouped_product`, which sorts internally. The axis rules of the operators in between are
the proof; if one of them is not row by row, the graph is not changed. Where rows entered the order and left it, they
now go to their experts and come back, which ranks that have whole experts take at its word
(`whale.strategies.routes`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from whale.graph.canonical import drop_dead, emit
from whale.graph.nodes import node_copy
from whale.runtime.experts import from_experts, grouped_product, to_experts
from whale.strategies.routes import rows_after
from whale.strategies.rules import rule_of
from whale.strategies.rules.registry import Op, target_name

__all__ = ["ungroup"]

aten = torch.ops.aten

_SORTS = {aten.sort.default, aten.sort.stable}
_KERNELS = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
"""Names of functions of ``(x, matrices, ends)`` in PyTorch, transformers and elsewhere: the rows up to each end times
the matrix of that position."""
_COUNTS = {"aten.histc", "aten.bincount"}


def ungroup(graph: fx.Graph) -> bool:
    """Rewrite computations in sorted order where that is proven valid; return whether anything was rewritten."""
    changed = False
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SORTS and node.args[0].meta["val"].dim() == 1:
            changed |= _Sorted(graph, node).rewrite()
    if changed:
        drop_dead(graph)
        graph.lint()
    return changed


class _Sorted:
    """Nodes that depend on one sort of row numbers: those in sorted order, with the dim of their rows."""

    def __init__(self, graph: fx.Graph, sort: fx.Node) -> None:
        self.graph, self.sort = graph, sort
        self.choice: fx.Node = sort.args[0]  # type: ignore[assignment]
        self.rows = self.choice.meta["val"].shape[0]
        self.dims: dict[fx.Node, tuple[int, ...]] = {sort: (0, -1)}  # for each output of nodes in sorted order
        self.kind: dict[fx.Node, str] = {sort: "sort"}
        self.repeats: dict[fx.Node, int] = {}
        self.plain: dict[fx.Node, fx.Node] = {}
        self.own: fx.Node | None = None
        self.returned: dict[fx.Node, fx.Node] = {}

    def rewrite(self) -> bool:
        nodes = list(self.graph.nodes)
        found = []
        for node in nodes[nodes.index(self.sort) + 1 :]:
            if not any(source in self.kind for source in node.all_input_nodes):
                continue
            kind = self._classify(node) if node.op == "call_function" else ""
            if not kind:
                return False
            if kind != "left":
                self.kind[node] = kind
            found.append((node, kind))
        if "product" not in self.kind.values():
            return False
        for node, kind in found:
            self._write(node, kind)
        return True

    def _is(self, node: Any, kind: str) -> bool:
        return self.kind.get(node) == kind

    def _classify(self, node: fx.Node) -> str:
        """Relation of a node to the sorted rows; the empty string if nothing is known."""
        target, args = node.target, node.args
        if target is operator.getitem and args[0] is self.sort:
            if args[1] == 0:
                self.dims[node] = (0,)
            return "rows" if args[1] == 0 else "order"
        if target is aten.floor_divide.default and self._is(args[0], "order") and isinstance(args[1], int):
            self.repeats[node] = args[1]
            return "repeated order"
        if target in (aten.empty_like.default, aten.zeros_like.default) and self._is(args[0], "order"):
            return "blank"
        if target is aten.index_put.default:
            return "inverse" if self._is_inverse(node) else ""
        if target is aten.index.Tensor and (kind := self._classify_index(node)):
            return kind
        if target_name(node) in _COUNTS:
            return "counts" if self._counts_all(node) else ""
        if any(self._is(source, "counts") for source in node.all_input_nodes):
            plain = {aten._to_copy.default, aten.cumsum.default}
            return ("ends" if target is aten.cumsum.default else "counts") if target in plain else ""
        if target_name(node).rpartition(".")[2] in _KERNELS:
            x, matrices, ends = args[:3]
            sorted_rows = self.dims.get(x) == (0,) and matrices not in self.kind and self._is(ends, "ends")  # type: ignore[arg-type]
            if not sorted_rows or len(ends.meta["val"]) != len(matrices.meta["val"]):  # type: ignore[union-attr]
                return ""
            self.dims[node] = (0,)
            return "product"
        return self._classify_row_by_row(node)

    def _is_inverse(self, node: fx.Node) -> bool:
        """``blank[order] = 0, 1, 2, ...``"""
        base, indices, values = node.args[:3]
        counts = isinstance(values, fx.Node) and values.target is aten.arange.start_step
        return (
            self._is(base, "blank")
            and len(indices) == 1  # type: ignore[arg-type]
            and self._is(indices[0], "order")  # type: ignore[index]
            and counts
            and tuple(values.args[:3]) == (0, self.rows, 1)  # type: ignore[union-attr]
            and not any(node.args[3:])
        )

    def _classify_index(self, node: fx.Node) -> str:
        source: Any = node.args[0]
        indices: Any = node.args[1]
        if len(indices) != 1:
            return ""
        index, length = indices[0], source.meta["val"].shape[0]
        if self._is(index, "inverse"):
            return "left" if self.dims.get(source) == (0,) else ""
        if source in self.kind:
            return ""
        if self._is(index, "order") and length == self.rows:
            self.dims[node] = (0,)
            return "taken"
        if self._is(index, "repeated order") and length * self.repeats[index] == self.rows:
            self.dims[node] = (0,)
            return "taken repeatedly"
        return ""

    def _counts_all(self, node: fx.Node) -> bool:
        """Whether a node counts the rows of every matrix: it reads the choices, and its bins are whole numbers."""
        source: Any = node.args[0]
        while source.target is aten._to_copy.default:
            source = source.args[0]
        if not self._is(source, "rows"):
            return False
        if target_name(node) == "aten.bincount":
            return len(node.args) < 2 or node.args[1] is None
        bins = node.meta["val"].shape[0]
        return (*node.args[2:4], 0, 0)[:2] == (0, bins - 1)  # a graph leaves zeros out, which are the defaults

    def _classify_row_by_row(self, node: fx.Node) -> str:
        """By the operator's rule: an axis that the rows of all sorted operands are in, and nothing else is."""
        if node.target is operator.getitem:
            place: Any = node.args[0]
            which: Any = node.args[1]
            if place not in self.dims:
                return ""
            self.dims[node] = (self.dims[place][which],)
            return "row by row"
        if not isinstance(node.target, torch._ops.OpOverload):
            return ""
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return ""
        op, rule = Op(node), rule_of(node)
        if any(v[0] in self.kind and v[0] not in self.dims for v in op.operands):
            return ""
        rows = {i: self.dims[n][which] for i, (n, which) in enumerate(op.operands) if n in self.dims}
        if -1 in rows.values():  # the order itself
            return ""
        found = rows_after(op, rule, rows)
        if found is None:
            return ""
        if not found:
            return "left"
        self.dims[node] = found
        return "row by row"

    def _write(self, node: fx.Node, kind: str) -> None:
        """Write a node's counterpart for rows in their own order."""
        args: Any = node.args
        with self.graph.inserting_before(node):
            if kind == "rows":
                self.plain[node] = self._chosen(node)
            elif kind == "taken":
                self.plain[node] = emit(self.graph, node, to_experts, args[0], self.choice)
            elif kind == "taken repeatedly":
                length, *rest = args[0].meta["val"].shape
                times = self.repeats[args[1][0]]
                row = emit(self.graph, node, aten.reshape.default, args[0], [length, 1, *rest])
                rows = emit(self.graph, node, aten.expand.default, row, [length, times, *rest])
                rows = emit(self.graph, node, aten.reshape.default, rows, [self.rows, *rest])
                self.plain[node] = emit(self.graph, node, to_experts, rows, self.choice)
            elif kind == "product":
                x = self.plain[args[0]]
                self.plain[node] = emit(self.graph, node, grouped_product, x, args[1], self._chosen(node), node.target)
            elif kind == "row by row":
                self.plain[node] = node_copy(self.graph, node, lambda n: self.plain.get(n, n))
            elif kind == "left" and node.target is aten.index.Tensor and self._is(args[1][0], "inverse"):
                node.replace_all_uses_with(self._left(node, args[0]))
            elif kind == "left":
                node.args = fx.map_arg(node.args, lambda n: self._left(node, n))
                node.kwargs = fx.map_arg(node.kwargs, lambda n: self._left(node, n))

    def _chosen(self, node: fx.Node) -> fx.Node:
        """The choice of each row, where the rows are."""
        if self.own is None:
            self.own = emit(self.graph, node, to_experts, self.choice, self.choice)
        return self.own

    def _left(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """The value that a node outside of the order reads in place of a source."""
        if source not in self.plain:
            return source
        if source not in self.returned:
            self.returned[source] = emit(self.graph, node, from_experts, self.plain[source], self.choice)
        return self.returned[source]
