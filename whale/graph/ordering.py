"""Deterministic order and names of a captured graph.

Python's sets have another order in every process, and some models iterate over one to compute their masks or rotary
tables. Ranks must agree on a graph including its names, so nodes that depend on no parameter move to where they are
first read, and all nodes are renumbered.
"""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from whale.graph.captured import Captured
from whale.graph.nodes import create_node
from whale.graph.partition import is_random

__all__ = ["settle_order"]


def settle_order(captured: Captured) -> None:
    """Replace the graph by one with the same nodes in a deterministic order, and rename its constants in that order."""
    order = _order(captured)
    graph, copies, constants = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
    for node in captured.graph.nodes:
        if node.op == "placeholder" and node.name not in captured.constants:
            copies[node] = _copied(graph, node, copies, node.name)
    for node in order:
        if node.op == "placeholder":
            copies[node] = _copied(graph, node, copies, f"constant_{len(constants)}")
            constants[copies[node].name] = captured.constants[node.name]
    for node in order:
        if node.op != "placeholder":
            copies[node] = _copied(graph, node, copies, re.sub(r"_\d+$", "", node.name))
    captured.graph, captured.constants = graph, constants
    graph.lint()


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], name: str) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    target = name if node.op == "placeholder" else node.target
    copy = create_node(graph, node.op, target, args, kwargs, name, node.type)
    copy.meta = node.meta
    return copy


def _order(captured: Captured) -> list[fx.Node]:
    """The nodes that depend on a parameter in execution order, each after the other nodes that it reads first."""
    anchored: set[fx.Node] = set()
    order: dict[fx.Node, None] = {}
    changing = {placeholder for placeholder, name in captured.buffers.items() if name in captured.mutated}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            if node.name in captured.parameters or node.name in changing:
                anchored.add(node)
            continue
        if not (node.op == "output" or is_random(node) or anchored.intersection(node.all_input_nodes)):
            continue
        anchored.add(node)
        stack = [node]
        while stack:
            waiting = [n for n in stack[-1].all_input_nodes if n not in order and n not in anchored]
            waiting = [n for n in waiting if n.op != "placeholder" or n.name in captured.constants]
            if waiting:
                stack.extend(reversed(waiting))
            else:
                order.setdefault(stack.pop())
    return list(order)
