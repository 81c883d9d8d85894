"""Masks of dropout as operators: their hashes of positions, written out for a compiler to fuse with what reads them.

A mask is a module of its rows and columns (:class:`whale.runtime.random.PositionMask`), which makes its hashes in
memory. Written out, the keys of the rows of all masks stay one module, because their seeds are others in each step,
and elements are whole-number arithmetic on these keys and the numbers of columns, with the same bits. It knows graphs
and masks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from whale.graph.nodes import copy_of_root, create_node, node_copy
from whale.runtime.local_program import Derivative, LocalCode, LocalGraph
from whale.runtime.random import MASK_FACTORS, MaskKeys, PositionMask, mask_limit
from whale.strategies.traced_call import fake_like

__all__ = ["masks_written_out"]

aten = torch.ops.aten


def masks_written_out(derivative: Derivative) -> Derivative:
    """The same with masks as operators."""

    def of_graph(graph: LocalGraph) -> LocalGraph:
        return LocalGraph(_written_out(graph.code), graph.sources)

    return replace(derivative, forward=_written_out(derivative.forward)).with_backwards(of_graph)


def _written_out(code: LocalCode) -> LocalCode:
    masks = {node: module for node in code.graph.nodes if (module := _mask(code, node)) is not None}
    if not masks:
        return code
    of_rows: dict[fx.Node, list[fx.Node]] = {}
    for node in masks:
        of_rows.setdefault(node.all_input_nodes[0], []).append(node)
    root, graph, env = copy_of_root(code.root), fx.Graph(), dict[fx.Node, fx.Node]()
    keys: dict[fx.Node, fx.Node] = {}
    for node in code.graph.nodes:
        if node not in masks:
            env[node] = node_copy(graph, node, env.__getitem__)
            continue
        rows, columns = node.all_input_nodes
        alike, writing = of_rows[rows], _Writing(graph, node)
        if rows not in keys:
            name = f"mask_keys_{len(keys)}"
            root.add_module(name, MaskKeys([masks[other].key for other in alike], masks[node].clock))
            keys[rows] = writing.keys(name, env[rows], len(alike))
        env[node] = writing.mask(keys[rows], alike.index(node), env[columns], masks[node].keep)
    return LocalCode(root, graph, boxed=code.boxed)


def _mask(code: LocalCode, node: fx.Node) -> PositionMask | None:
    """The mask that a node makes, if it has elements of both kinds and a known shape."""
    if node.op != "call_module" or node.meta.get("val") is None:
        return None
    module = getattr(code.root, str(node.target))
    return module if isinstance(module, PositionMask) and 0.0 < module.keep < 1.0 else None


class _Writing:
    """Writes the nodes of one mask, marked as parts of a hash."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node, self.shape = graph, node, tuple(node.meta["val"].shape)

    def keys(self, name: str, rows: fx.Node, count: int) -> fx.Node:
        """The keys of the rows of *count* masks, by the module *name*."""
        made = create_node(self.graph, "call_module", name, (rows,))
        made.meta = {**self.node.meta, "val": self._like((count, 2, self.shape[0], 1))}
        return made

    def mask(self, keys: fx.Node, number: int, columns: fx.Node, keep: float) -> fx.Node:
        """The elements that are kept: the arithmetic of :func:`whale.runtime.random.keep_mask`."""
        first, second = MASK_FACTORS
        own = self._call(aten.select.int, (2, self.shape[0], 1), keys, 0, number)
        lower, upper = (self._call(aten.select.int, (self.shape[0], 1), own, 0, half) for half in range(2))
        x = self._each(aten.add.Tensor, lower, columns)
        x = self._each(aten.bitwise_xor.Tensor, x, self._shifted(x, 16))
        x = self._each(aten.mul.Tensor, x, first)
        x = self._each(aten.add.Tensor, x, upper)
        x = self._each(aten.bitwise_xor.Tensor, x, self._shifted(x, 13))
        x = self._each(aten.mul.Tensor, x, second)
        found = self._each(aten.lt.Scalar, x, mask_limit(keep))
        found.meta["val"] = self.node.meta["val"]
        return found

    def _shifted(self, x: fx.Node, by: int) -> fx.Node:
        """The bits of numbers, shifted to the right; torch shifts in copies of the sign."""
        shifted = self._each(aten.bitwise_right_shift.Tensor_Scalar, x, by)
        return self._each(aten.bitwise_and.Scalar, shifted, (1 << (32 - by)) - 1)

    def _each(self, target: Any, *args: Any) -> fx.Node:
        return self._call(target, self.shape, *args)

    def _call(self, target: Any, shape: tuple[int, ...], *args: Any) -> fx.Node:
        made = create_node(self.graph, "call_function", target, args)
        made.meta = {**self.node.meta, "val": self._like(shape), "hash": True}
        return made

    def _like(self, shape: tuple[int, ...]) -> torch.Tensor:
        return fake_like(shape, torch.int32, self.node.meta["val"].device)
