"""Activations on the host: a forward copies what its backward reads to the host, after its last reader there; the
backward starts to fetch each before it waits for the one ahead.

Views of one tensor are one copy, of which the backward makes them again. Small tensors stay, and so do casts of
parameters, and what has the memory of arguments or of results. It knows graphs; nothing of stages.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from whale.graph.nodes import node_copy
from whale.runtime.host import arrived, fetch, to_host
from whale.runtime.local_program import Derivative, LocalCode, LocalGraph, LocalProgram, Source
from whale.strategies.traced_call import makes_alias, writes

__all__ = ["offloaded"]

SMALLEST_BYTES = 2**16
"""Below it a copy takes longer to start than the bytes are worth."""

_AHEAD = 2
"""Number of tensors that arrive while one is read."""


def offloaded(programs: Sequence[LocalProgram]) -> list[LocalProgram]:
    """The programs of a stage's micro-batches, whose forwards keep tensors on the host; equal ones share theirs."""
    derivatives: dict[int, Derivative] = {}
    found: dict[int, LocalProgram] = {}
    for program in programs:
        derivative = program.derivative
        if derivative is not None:
            if id(derivative) not in derivatives:
                derivatives[id(derivative)] = _Offloading(derivative).run()
            derivative = derivatives[id(derivative)]
        if id(program) not in found:
            found[id(program)] = replace(program, derivative=derivative)
    return [found[id(program)] for program in programs]


class _Offloading:
    def __init__(self, derivative: Derivative) -> None:
        self.given = derivative
        self.graph = derivative.forward.graph
        results: Sequence[fx.Node] = self.graph.output_node().args[0]  # type: ignore[assignment]
        self.own, self.kept = results[: derivative.num_results], results[derivative.num_results :]
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        """The nodes that have the memory of each maker of some, and the readers of these."""
        self.makers: dict[fx.Node, fx.Node] = {}
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        self.order = order
        for node in self.graph.nodes:
            operands = node.all_input_nodes
            is_one_of = node.target is operator.getitem and self.makers[operands[0]] is not operands[0]  # of views
            is_view = is_one_of or (node.op == "call_function" and makes_alias(node) and bool(operands))
            maker = self.makers[operands[0]] if is_view else node
            self.makers[node] = maker
            self.readers.setdefault(maker, []).extend([node, *(u for u in node.users if u.op != "output")])

    def run(self) -> Derivative:
        moved = self._moved()
        if not moved:
            return self.given
        places = {maker: number for number, maker in enumerate(moved)}
        stays = [k for k, node in enumerate(self.kept) if self.makers[node] not in places]
        numbers = {k: len(places) + number for number, k in enumerate(stays)}

        def backward(graph: LocalGraph) -> LocalGraph:
            return self._backward(graph, places, numbers)

        forward = self._forward(places, [self.kept[k] for k in stays])
        return replace(self.given, forward=forward).with_backwards(backward)

    def _moved(self) -> list[fx.Node]:
        """The makers of memory that is put on the host."""
        remaining = {self.makers[node] for node in self.own}
        found: dict[fx.Node, None] = {}
        for node in self.kept:
            maker = self.makers[node]
            value = maker.meta.get("val")
            if maker in remaining or not isinstance(value, Tensor) or _is_given(maker):
                continue
            large = value.numel() * value.element_size() >= SMALLEST_BYTES
            dense = value.layout is torch.strided and value.untyped_storage().nbytes() == (
                value.numel() * value.element_size()
            )
            if large and dense and not any(writes(reader) for reader in self.readers[maker]):
                found[maker] = None
        return list(found)

    def _forward(self, places: Mapping[fx.Node, int], stays: Sequence[fx.Node]) -> LocalCode:
        last: dict[fx.Node, list[fx.Node]] = {}
        for maker in places:
            last.setdefault(max(self.readers[maker], key=self.order.__getitem__), []).append(maker)
        graph, env, held = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            if node.op == "output":
                results = [*self.own, *(held[maker] for maker in places), *stays]
                graph.output(tuple(env.get(x, x) for x in results))
                continue
            env[node] = node_copy(graph, node, env.__getitem__)
            for maker in last.get(node, ()):
                held[maker] = graph.call_function(to_host, (env[maker],))
        return LocalCode(self.given.forward.root, graph)

    def _backward(self, given: LocalGraph, places: Mapping[fx.Node, int], numbers: Mapping[int, int]) -> LocalGraph:
        old = [node for node in given.code.graph.nodes if node.op == "placeholder"]
        graph = fx.Graph()
        env = {old[0]: graph.placeholder("sink")}
        sources: list[Source] = []
        read: dict[fx.Node, fx.Node] = {}  # placeholders, and the nodes of the forward that they are
        for hole, (kind, what) in zip(old[1:], given.sources, strict=True):
            if kind == "kept" and self.makers[self.kept[what]] in places:
                read[hole] = self.kept[what]
                continue
            env[hole] = graph.placeholder(hole.name)
            sources.append((kind, numbers[what] if kind == "kept" else what))
        order: dict[fx.Node, None] = {}  # makers, by their first readers
        for node in given.code.graph.nodes:
            for used in node.all_input_nodes:
                if used in read:
                    order[self.makers[read[used]]] = None
        held = {maker: graph.placeholder(f"on_host_{places[maker]}") for maker in order}
        sources += [("kept", places[maker]) for maker in order]
        wanted, started, again = list(order), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()

        def value(node: fx.Node) -> fx.Node:
            return made(read[node]) if node in read else env[node]

        def made(node: fx.Node) -> fx.Node:
            """A node of the forward, in the backward."""
            if node not in again:
                if node in held:
                    place = wanted.index(node)
                    for other in wanted[: place + 1 + _AHEAD]:
                        if other not in started:
                            started[other] = graph.call_function(fetch, (held[other],))
                    again[node] = graph.call_function(arrived, (started[node],))
                else:
                    inputs = {used: made(used) for used in node.all_input_nodes}
                    again[node] = node_copy(graph, node, inputs.__getitem__)
                again[node].meta = node.meta
            return again[node]

        for node in given.code.graph.nodes:
            if node.op == "output":
                graph.output(fx.node.map_arg(node.args[0], value))
            elif node.op != "placeholder":
                inputs = {used: value(used) for used in node.all_input_nodes}
                env[node] = node_copy(graph, node, inputs.__getitem__)
        return LocalGraph(LocalCode(given.code.root, graph, boxed=True), sources)


def _is_given(node: fx.Node) -> bool:
    """Whether a tensor is an argument, or a cast of one."""
    if node.target is torch.ops.aten._to_copy.default:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder"
