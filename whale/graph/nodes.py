"""Nodes that are added to a graph by the thousand, and roots to which modules are added.

`torch.fx.Graph.create_node` looks through the arguments of every node for symbolic numbers, to warn of them, and takes
most of its time for that. Whale's graphs have none, so a node gets its arguments after it is made; and past
`torch.fx.Node.__setattr__`, which files a node anew in its graph whatever is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn

_set = object.__setattr__

__all__ = ["copy_of_root", "create_node", "graph_copy", "inner_modules", "node_copy"]


def inner_modules(graph: fx.Graph) -> list[fx.GraphModule]:
    """The modules of the graphs inside of a graph, as of regions without gradients."""
    owner = graph.owning_module
    return [m for m in owner.modules() if isinstance(m, fx.GraphModule) and m is not owner] if owner else []


def create_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    type_expr: Any = None,
) -> fx.Node:
    """Add a node, as `torch.fx.Graph.create_node` does."""
    node = graph.create_node(op, target, name=name, type_expr=type_expr)
    if args:
        _set(node, "args", args)
    if kwargs:
        _set(node, "kwargs", dict(kwargs))
    return node


def node_copy(graph: fx.Graph, node: fx.Node, read: Callable[[fx.Node], Any] = lambda node: node) -> fx.Node:
    """Add a copy of a node of any graph, which reads *read* of each that it reads: `torch.fx.Graph.node_copy`."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), read)
    made = create_node(graph, node.op, node.target, args, kwargs, node.name, node.type)
    made.meta.update(node.meta)
    return made


def graph_copy(graph: fx.Graph) -> fx.Graph:
    """A graph with copies of all nodes of another."""
    made, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op == "output":
            made.output(fx.map_arg(node.args[0], env.__getitem__))
        else:
            env[node] = node_copy(made, node, env.__getitem__)
    return made


def copy_of_root(root: nn.Module) -> nn.Module:
    """A root with the same modules and buffers, to which others can be added."""
    made = nn.Module()
    for name, module in root.named_children():
        made.add_module(name, module)
    for name, buffer in root.named_buffers(recurse=False):
        made.register_buffer(name, buffer)
    return made
