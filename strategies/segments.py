"""Compiled kernels: the operators of a graph between its collectives, layer by layer, each run as one function.

Runs of operators that are equal, as those of equal layers are, share one function, so that many layers are compiled in
the time of one. Collectives, random numbers and what autograd keeps on a tape stay nodes between them. It knows graphs
and the names of their modules; not what compiles.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from whale.graph.nodes import node_copy
from whale.graph.origins import layer_of
from whale.runtime.derivative import laid_out
from whale.runtime.local_program import Derivative, LocalCode, LocalGraph, wait_for

__all__ = ["FEWEST", "Runs", "Segment", "Segments", "is_work"]

FEWEST = 3
"""Operators in a run that is worth a function of its own."""


class Segment(nn.Module):
    """A run of operators as a function of the tensors that it reads."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        """The tensors that later nodes read."""
        return self.function(*tensors)


@dataclass(eq=False)
class Segments:
    """Compiles the runs of operators of any number of graphs; equal ones once.

    Attributes:
        compile: makes a function of a graph.
        functions: those that were made, by the text of their graphs.
    """

    compile: Callable[[fx.GraphModule], Callable[..., Any]]
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def of_derivative(self, derivative: Derivative) -> Derivative:
        """The same with compiled runs."""

        def of_graph(graph: LocalGraph) -> LocalGraph:
            return LocalGraph(self._code(graph.code), graph.sources)

        return replace(derivative, forward=self._code(derivative.forward)).with_backwards(of_graph)

    def _code(self, code: LocalCode) -> LocalCode:
        return _Compiled(self, code).run()

    def function(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """The function of a graph."""
        key = _text(graph)
        if key not in self.functions:
            self.functions[key] = self.compile(graph)
        return self.functions[key]


class Runs:
    """A graph being written again, in which runs of operators become calls.

    Args:
        code: the graph.
    """

    def __init__(self, code: LocalCode) -> None:
        self.given, self.old_root = code, code.root
        self.new, self.root = fx.Graph(), nn.Module()
        self.env: dict[fx.Node, fx.Node] = {}
        self.current: list[fx.Node] = []
        self.inside: set[fx.Node] = set()
        self.layer: str | None = None
        self.after: list[fx.Node] = []  # gradients that are handed over when the run is done, which reads parameters
        self.count = 0

    # What a kind of runs decides

    def joins(self, node: fx.Node) -> bool:
        """Whether a node can be part of a run; the nodes that select its results then are, too."""
        raise NotImplementedError

    def ends_at_layers(self) -> bool:
        """Whether the run ends before the next layer."""
        raise NotImplementedError

    def ends(self, node: fx.Node) -> bool:
        """Whether the run ends before a node that is no part of it."""
        return any(used in self.inside for used in node.all_input_nodes)

    def counts(self, node: fx.Node) -> int:
        """The number of operators in a node that make a run worth a call."""
        return int(is_work(node))

    def module(self, number: int, outer: Sequence[fx.Node], graph: fx.Graph, results: Sequence[fx.Node]) -> nn.Module:
        """The module that runs a graph of what it reads, *outer*, to *results*."""
        raise NotImplementedError

    # The graph

    def run(self) -> LocalCode:
        """The new graph."""
        nodes, taken = list(self.given.graph.nodes), set[fx.Node]()
        self.begin([node for node in nodes if node.op == "placeholder"])
        for node in nodes:
            if node.op in ("placeholder", "output") or node in taken:
                continue
            if self.joins(node):
                layer = _layer(node)
                if self.current and layer != self.layer and self.ends_at_layers():
                    self._close()
                self.layer = layer
                joined = [node, *(user for user in node.users if not is_work(user))]
                self.current += joined
                self.inside.update(joined)
                taken.update(joined)
            elif node.op == "call_method" and node.target == "add" and self.current:
                self.after.append(node)
            else:
                if self.ends(node):
                    self._close()
                self.copy(node)
        self._close()
        self.new.output(self.output(self.given.graph.output_node().args[0]))
        return LocalCode(self.root, self.new, boxed=self.given.boxed)

    def begin(self, placeholders: Sequence[fx.Node]) -> None:
        """Write the placeholders."""
        for node in placeholders:
            self.copy(node)

    def output(self, results: Any) -> Any:
        """The results of the new graph."""
        return fx.node.map_arg(results, self.env.__getitem__)

    def copy(self, node: fx.Node) -> None:
        """Write a node that is no part of a run."""
        self.env[node] = node_copy(self.new, node, self.env.__getitem__)
        if node.op in ("call_module", "get_attr"):
            name = str(node.target)
            found = getattr(self.old_root, name)
            if isinstance(found, nn.Module):
                self.root.add_module(name, found)
            else:
                self.root.register_buffer(name, found)

    def _close(self) -> None:
        """End the run: write a call of its function, then what waits for it."""
        nodes, self.current, inside, self.inside = self.current, [], self.inside, set()
        if sum(map(self.counts, nodes)) < FEWEST:
            for node in nodes:
                self.copy(node)
        else:
            self._call(nodes, inside)
        for node in self.after:
            self.copy(node)
        self.after = []

    def _call(self, nodes: Sequence[fx.Node], inside: set[fx.Node]) -> None:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        outer = list(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside))
        for number, used in enumerate(outer):
            env[used] = graph.placeholder(f"x_{number}")
            env[used].meta = {"val": used.meta.get("val")}
        for node in nodes:
            env[node] = self.write(graph, node, env.__getitem__)
        results = [node for node in nodes if _is_tensor(node) and any(user not in inside for user in node.users)]
        graph.output(tuple(env[node] for node in results))
        name = f"segment_{self.count}"
        self.root.add_module(name, self.module(self.count, outer, graph, results))
        self.count += 1
        called = self.new.call_module(name, (*self.first_arguments(), *(self.env[used] for used in outer)))
        called.meta["source"] = nodes[-1].meta.get("source")
        for number, node in enumerate(results):
            self.env[node] = self.new.call_function(operator.getitem, (called, number))

    def write(self, graph: fx.Graph, node: fx.Node, read: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """A node of a run in the graph of it."""
        return node_copy(graph, node, read)

    def first_arguments(self) -> tuple[fx.Node, ...]:
        """The arguments of a call before those that its operators read."""
        return ()


class _Compiled(Runs):
    """One graph with its runs of operators compiled."""

    def __init__(self, segments: Segments, code: LocalCode) -> None:
        super().__init__(code)
        self.segments = segments

    def joins(self, node: fx.Node) -> bool:
        """Whether a node is an operator that draws no random numbers."""
        if isinstance(node.target, torch._ops.OpOverload):
            return torch.Tag.nondeterministic_seeded not in node.target.tags
        return node.target is laid_out

    def ends(self, node: fx.Node) -> bool:
        """Also where the graph waits for a received value, beside which the run is computed."""
        return node.target is wait_for or super().ends(node)

    def ends_at_layers(self) -> bool:
        """Always: then those of equal layers are equal."""
        return True

    def module(self, number: int, outer: Sequence[fx.Node], graph: fx.Graph, results: Sequence[fx.Node]) -> nn.Module:
        """Its function, made once for equal graphs."""
        return Segment(self.segments.function(fx.GraphModule(self.old_root, graph)))


def is_work(node: fx.Node) -> bool:
    """Whether a node computes something, and does not only select a result."""
    return node.target is not operator.getitem


def _is_tensor(node: fx.Node) -> bool:
    """Whether a node is a tensor, and not several of which others select one."""
    return not any(user.target is operator.getitem and user.args[0] is node for user in node.users)


def _layer(node: fx.Node) -> str:
    """The layer of the model in which a node was computed."""
    source = node.meta.get("source")
    return layer_of(source) if isinstance(source, fx.Node) else ""


def _text(graph: fx.GraphModule) -> str:
    """A text that is equal for graphs that compute the same."""
    numbers = {node: number for number, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in graph.graph.nodes:
        args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda x: f"%{numbers[x]}")
        value = node.meta.get("val")
        kind = (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else ""
        target = id(getattr(graph, str(node.target))) if node.op == "get_attr" else node.target
        lines.append(f"{node.op} {target if node.op != 'placeholder' else ''} {args} {kind}")
    return "\n".join(lines)
