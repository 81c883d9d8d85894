"""Casts of parameters, made once a step: the micro-batches of a stage read one copy in low precision.

Under ``torch.autocast`` each forward casts the parameters that products read, and keeps these casts for its backward:
with several micro-batches as many casts, and as many copies as there are micro-batches in flight. Here they become
arguments of the graphs. It is not for steps of one micro-batch, whose backward frees its casts one by one; and what a
backward casts again to save memory stays so. It knows graphs; nothing of stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from whale.graph.captured import Captured
from whale.graph.nodes import node_copy
from whale.runtime.local_program import Derivative, LocalCode, LocalGraph, LocalProgram, Source
from whale.strategies.traced_call import makes_alias

__all__ = ["CAST", "cast_once", "cast_to", "casts_parameters", "read_as"]

CAST = torch.ops.aten._to_copy.default
"""The operator by which a tensor is cast."""


def cast_once(programs: Sequence[LocalProgram], divided: Collection[str] = ()) -> list[LocalProgram]:
    """The programs of a stage's micro-batches, in which casts of parameters have sources ("cast", (name, dtype)).

    Equal programs share theirs. Parameters that are *divided* are cast where they are gathered, and a program without
    a derivative stays as it is, for autograd to derive one from its parameters.
    """
    known: dict[int, _Casting] = {}
    found: dict[int, LocalProgram] = {}
    for program in programs:
        if id(program) not in found:
            code = id(program.micro_batch.code)
            if code not in known and program.derivative is not None:
                known[code] = _Casting.of(program, divided)
            found[id(program)] = known[code].program(program) if program.derivative is not None else program
    return [found[id(program)] for program in programs]


def read_as(parameter: fx.Node) -> torch.dtype | None:
    """The number type to which all that read a parameter cast it first, if it has fewer bytes; None otherwise."""
    casts = {_cast_of(user, {parameter: 0}) for user in parameter.users}
    if len(casts) != 1 or (cast := casts.pop()) is None:
        return None
    return cast[1] if cast[1].itemsize < parameter.meta["val"].dtype.itemsize else None


def casts_parameters(captured: Captured) -> bool:
    """Whether a model casts a parameter, as under ``torch.autocast``."""
    nodes = [node for node in captured.graph.nodes if node.name in captured.parameters]
    places = {node: number for number, node in enumerate(nodes)}
    return any(_cast_of(user, places) is not None for node in nodes for user in node.users)


@dataclass(eq=False)
class _Casting:
    """The casts of a program's parameters as placeholders of its graphs, numbered after the others; each is of the
    placeholder of a parameter, and to a dtype."""

    casts: dict[tuple[int, torch.dtype], int] = field(default_factory=dict)
    code: LocalCode | None = None
    derivative: Derivative | None = None

    @classmethod
    def of(cls, program: LocalProgram, divided: Collection[str]) -> _Casting:
        """The casts of a program with a derivative."""
        given, derivative = program.micro_batch, program.derivative
        assert derivative is not None
        names = {n for n, (kind, what) in enumerate(given.sources) if kind == "parameter" and what not in divided}
        parameters = {node: n for n, node in enumerate(_placeholders(derivative.forward.graph)) if n in names}
        found = cls()
        results: Sequence[fx.Node] = derivative.forward.graph.output_node().args[0]  # type: ignore[assignment]
        kept = results[derivative.num_results :]
        for node in map(_maker, kept):
            if (cast := _cast_of(node, parameters)) is not None:
                found.casts.setdefault(cast, len(given.sources) + len(found.casts))
        if not found.casts:
            return found
        again = {k: found.casts[cast] for k, x in enumerate(kept) if (cast := _cast_of(x, parameters)) is not None}
        found.code = found._forward(given.code)
        forward = found._forward(
            derivative.forward, (*results[: derivative.num_results], *(x for k, x in enumerate(kept) if k not in again))
        )
        moved = {k: place for place, k in enumerate(k for k in range(len(kept)) if k not in again)}
        split = derivative.split
        found.derivative = replace(
            derivative,
            forward=forward,
            backward=found._backward(derivative.backward, again, moved),
            split=split
            and replace(
                split,
                inputs=found._backward(split.inputs, again, moved),
                weights=found._backward(split.weights, again, moved),
            ),
        )
        return found

    def program(self, program: LocalProgram) -> LocalProgram:
        """A program with this code."""
        if self.code is None:
            return program
        given = program.micro_batch
        added: list[Source] = [("cast", (given.sources[number][1], dtype)) for number, dtype in self.casts]
        return replace(program, micro_batch=LocalGraph(self.code, [*given.sources, *added]), derivative=self.derivative)

    def _forward(self, given: LocalCode, results: Sequence[fx.Node] | None = None) -> LocalCode:
        """A graph that gets the casts, with these results, by default its own."""
        placeholders = _placeholders(given.graph)
        parameters = {node: n for n, node in enumerate(placeholders)}
        graph, env, added = fx.Graph(), dict[fx.Node, fx.Node](), dict[tuple[int, torch.dtype], fx.Node]()
        for node in placeholders:
            env[node] = node_copy(graph, node)
        for number, dtype in self.casts:
            added[number, dtype] = graph.placeholder(f"{placeholders[number].name}_cast")
        for node in given.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                found = node.args[0] if results is None else tuple(results)
                graph.output(fx.node.map_arg(found, env.__getitem__))
                continue
            cast = _cast_of(node, parameters)
            if cast in added:
                env[node] = added[cast]
                added[cast].meta.update(node.meta)
            else:
                env[node] = node_copy(graph, node, env.__getitem__)
        return LocalCode(given.root, graph)

    def _backward(self, given: LocalGraph, again: Mapping[int, int], moved: Mapping[int, int]) -> LocalGraph:
        """A backward that gets the casts, also those that it would make again."""
        sink, *holes = _placeholders(given.code.graph)
        parameters = {hole: what for hole, (kind, what) in zip(holes, given.sources, strict=True) if kind == "argument"}
        graph = fx.Graph()
        env = {sink: node_copy(graph, sink)}
        sources: list[Source] = []
        for hole, (kind, what) in zip(holes, given.sources, strict=True):
            casts = [_cast_of(user, parameters) for user in hole.users]
            if casts and all(cast in self.casts for cast in casts):
                continue  # nothing else reads the parameter
            env[hole] = node_copy(graph, hole)
            if kind == "kept":
                sources.append(("argument", again[what]) if what in again else (kind, moved[what]))
            else:
                sources.append((kind, what))
        added: dict[tuple[int, torch.dtype], fx.Node] = {}
        for node in given.code.graph.nodes:
            cast = _cast_of(node, parameters)
            if cast in self.casts and cast not in added:
                added[cast] = graph.placeholder(f"{node.name}_once")
                added[cast].meta.update(node.meta)
                sources.append(("argument", self.casts[cast]))
        for node in given.code.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                graph.output(fx.node.map_arg(node.args[0], env.__getitem__))
                continue
            cast = _cast_of(node, parameters)
            env[node] = added[cast] if cast in added else node_copy(graph, node, env.__getitem__)
        return LocalGraph(LocalCode(given.code.root, graph, boxed=given.code.boxed), sources)


def cast_to(node: fx.Node) -> torch.dtype | None:
    """The dtype to which a node casts its operand, if it does nothing else."""
    if node.target is not CAST or "dtype" not in node.kwargs or not node.kwargs.keys() <= {"dtype", "device"}:
        return None
    dtype = node.kwargs["dtype"]
    assert isinstance(dtype, torch.dtype)
    return dtype


def _maker(node: fx.Node) -> fx.Node:
    """The node that has made the memory of a value, which may be a view."""
    while node.op == "call_function" and makes_alias(node) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _cast_of(node: fx.Node, parameters: Mapping[fx.Node, int]) -> tuple[int, torch.dtype] | None:
    """The number of the parameter of which a node is a cast and nothing else, and the dtype; None if it is not."""
    dtype = cast_to(node)
    operand = node.args[0] if dtype is not None else None
    if dtype is None or not isinstance(operand, fx.Node) or operand not in parameters:
        return None
    return parameters[operand], dtype
