"""Parameters that ranks own in stretches, in the graphs that read them: gathered before their first reader.

Where they are gathered once a step a graph waits for them; else it starts to gather each bucket before it waits for the
one ahead, and has views of a buffer that is freed after their last reader. Ranks start the gathers of a forward in the
order in which the model first reads the buckets, and those of a backward from the bucket that it reads last, whatever
their own operators read; buckets of a rank alone come as they are read. A forward
keeps no view or cast of such a parameter: the backward gathers it again. It knows graphs and the buckets of their
parameters; nothing of stages.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from whale.graph.nodes import node_copy
from whale.runtime.local_program import Derivative, LocalCode, LocalGraph, LocalProgram, Source
from whale.runtime.owned import Unit
from whale.strategies.casts import CAST, cast_to
from whale.strategies.traced_call import makes_alias

__all__ = ["gathered"]


def gathered(programs: Sequence[LocalProgram], units: Sequence[Unit]) -> list[LocalProgram]:
    """The programs of a stage's micro-batches, whose parameters are gathered if they are of these units.

    A placeholder of such a parameter has the source ("gathered", name) and no tensor; others, with sources ("unit",
    index of the bucket), follow for the units. Equal programs share theirs.
    """
    gathering = _Gathering(units)
    found = {id(program): gathering.program(program) for program in {id(p): p for p in programs}.values()}
    return [found[id(program)] for program in programs]


@dataclass(eq=False)
class _Read:
    """A placeholder of a graph that is a parameter, or what a node of the forward makes of one."""

    name: str
    of_forward: fx.Node | None = None


class _Gathering:
    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = {unit.spec.index: unit for unit in units}
        self.places = {name: (u.spec.index, n) for u in units for n, name in enumerate(u.names)}
        self.codes: dict[int, LocalCode] = {}
        self.derivatives: dict[int, Derivative] = {}

    def order(self, units: Sequence[int], *, backward: bool = False) -> list[int]:
        """The buckets in the order in which a forward, or a backward, gathers them: the same on all ranks."""
        readers = {index: self.units[index].readers for index in units}
        if backward:
            return sorted(units, key=lambda index: (-readers[index][1], index))
        return sorted(units, key=lambda index: (readers[index][0], -index))

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which a parameter is gathered."""
        index, number = self.places[name]
        return self.units[index].read_as[number]

    def program(self, program: LocalProgram) -> LocalProgram:
        """One program."""
        given = program.micro_batch
        names = {n: what for n, (kind, what) in enumerate(given.sources) if kind == "parameter" and what in self.places}
        if not names:
            return program
        read = sorted({self.places[name][0] for name in names.values()})
        sources: list[Source] = [("gathered", names[n]) if n in names else s for n, s in enumerate(given.sources)]
        sources += [("unit", index) for index in read]
        if id(given.code) not in self.codes:
            self.codes[id(given.code)] = self._forward(given.code, names, read)
        derivative = program.derivative
        if derivative is not None:
            if id(derivative) not in self.derivatives:
                self.derivatives[id(derivative)] = self._derivative(derivative, names, read)
            derivative = self.derivatives[id(derivative)]
        return replace(program, micro_batch=LocalGraph(self.codes[id(given.code)], sources), derivative=derivative)

    def _derivative(self, derivative: Derivative, names: Mapping[int, str], read: Sequence[int]) -> Derivative:
        graph, count = derivative.forward.graph, derivative.num_results
        found: Sequence[fx.Node] = graph.output_node().args[0]  # type: ignore[assignment]
        made = self._made_of_parameters(graph, names)
        again = {k: _Read(made[node], node) for k, node in enumerate(found[count:]) if node in made}
        kept = [k for k in range(len(found) - count) if k not in again]
        results = (*found[:count], *(found[count + k] for k in kept))
        moved = {k: position for position, k in enumerate(kept)}

        def backward(given: LocalGraph) -> LocalGraph:
            return self._backward(given, names, again, moved)

        forward = self._forward(derivative.forward, names, read, results)
        return replace(derivative, forward=forward).with_backwards(backward)

    def _made_of_parameters(self, graph: fx.Graph, names: Mapping[int, str]) -> dict[fx.Node, str]:
        """The views and casts of parameters that are gathered in each task, with the names of these."""
        made: dict[fx.Node, str] = {}
        for number, node in enumerate(_placeholders(graph)):
            if number in names and self.units[self.places[names[number]][0]].spec.gathers == "task":
                made[node] = names[number]
        for node in graph.nodes:
            operands = node.all_input_nodes
            is_view = node.target is operator.getitem or cast_to(node) is not None or makes_alias(node)
            if node.op == "call_function" and len(operands) == 1 and operands[0] in made and is_view:
                made[node] = made[operands[0]]
        return made

    def _forward(
        self, code: LocalCode, names: Mapping[int, str], read: Sequence[int], results: Sequence[fx.Node] | None = None
    ) -> LocalCode:
        """A graph with these results, by default its own."""
        writing = _Writing(self, self.order(read))
        for number, node in enumerate(_placeholders(code.graph)):
            writing.env[node] = writing.graph.placeholder(node.name)
            if number in names:
                writing.read[node] = _Read(names[number])
        writing.take_units(read)
        writing.write(code.graph, results)
        return LocalCode(code.root, writing.graph)

    def _backward(
        self, given: LocalGraph, names: Mapping[int, str], again: Mapping[int, _Read], moved: Mapping[int, int]
    ) -> LocalGraph:
        sink, *holes = _placeholders(given.code.graph)
        reads: dict[fx.Node, _Read] = {}
        for hole, (kind, what) in zip(holes, given.sources, strict=True):
            if kind == "argument" and what in names:
                reads[hole] = _Read(names[what])
            elif kind == "kept" and what in again:
                reads[hole] = again[what]
        used = sorted({self.places[read.name][0] for hole, read in reads.items() if hole.users})
        writing = _Writing(self, self.order(used, backward=True))
        writing.read = reads
        writing.env[sink] = writing.graph.placeholder("sink")
        sources: list[Source] = []
        for hole, (kind, what) in zip(holes, given.sources, strict=True):
            if hole not in reads:
                writing.env[hole] = writing.graph.placeholder(hole.name)
                sources.append((kind, moved[what] if kind == "kept" else what))
        writing.take_units(used)
        writing.write(given.code.graph)
        sources += [("unit", index) for index in used]
        return LocalGraph(LocalCode(given.code.root, writing.graph, boxed=True), sources)


class _Writing:
    """A graph being written.

    Args:
        gathering: knows the units.
        order: in which their gathers start.
    """

    def __init__(self, gathering: _Gathering, order: Sequence[int]) -> None:
        self.gathering, self.graph = gathering, fx.Graph()
        units = gathering.units
        self.order = [n for n in order if units[n].spec.gathers == "task" and len(units[n].spec.ranks) > 1]
        self.alone: list[int] = []
        self.env: dict[fx.Node, fx.Node] = {}
        self.read: dict[fx.Node, _Read] = {}
        self.held: dict[int, fx.Node] = {}
        self.arriving: dict[int, fx.Node] = {}
        self.wholes: dict[int, fx.Node] = {}
        self.parameters: dict[str, fx.Node] = {}

    def take_units(self, units: Sequence[int]) -> None:
        """Make the placeholders of units."""
        for index in units:
            self.held[index] = self.graph.placeholder(f"unit_{index}")

    def write(self, graph: fx.Graph, results: Sequence[fx.Node] | None = None) -> None:
        """Write all nodes of a graph but its placeholders."""
        inputs_of = (self.read[used] for node in graph.nodes for used in node.all_input_nodes if used in self.read)
        first = dict.fromkeys(self.gathering.places[read.name][0] for read in inputs_of)
        specs = {index: self.gathering.units[index].spec for index in first}
        self.alone = [n for n, spec in specs.items() if spec.gathers == "task" and len(spec.ranks) == 1]
        for node in graph.nodes:
            if node.op == "output":
                found = node.args[0] if results is None else tuple(results)
                self.graph.output(fx.node.map_arg(found, self._value))
            elif node.op != "placeholder":
                if (name := self._cast_parameter(node)) is not None:
                    self.env[node] = self._parameter(name, cast=True)
                    continue
                inputs = {used: self._value(used) for used in node.all_input_nodes}
                self.env[node] = node_copy(self.graph, node, inputs.__getitem__)

    def _value(self, node: fx.Node) -> fx.Node:
        if (read := self.read.get(node)) is None:
            return self.env[node]
        return self._parameter(read.name) if read.of_forward is None else self._again(read.of_forward, read.name)

    def _again(self, node: fx.Node, name: str) -> fx.Node:
        """The value that a forward makes of a parameter."""
        if node.op == "placeholder":
            return self._parameter(name)
        is_cast = cast_to(node) == self.gathering.dtype_of(name)
        if is_cast and node.all_input_nodes[0].op == "placeholder":
            return self._parameter(name, cast=True)
        if node not in self.env:
            self.env[node] = node_copy(self.graph, node, lambda used: self._again(used, name))
        return self.env[node]

    def _cast_parameter(self, node: fx.Node) -> str | None:
        """The parameter that a node casts to the dtype in which it is gathered; None if it does something else."""
        dtype = cast_to(node)
        read = self.read.get(node.all_input_nodes[0]) if dtype is not None else None
        if read is None or read.of_forward is not None or self.gathering.dtype_of(read.name) != dtype:
            return None
        name: str = read.name
        return name

    def _parameter(self, name: str, *, cast: bool = False) -> fx.Node:
        """A parameter as it is gathered, if *cast*; else in its own dtype, for a rank that takes its part of it before
        it is cast."""
        index, number = self.gathering.places[name]
        if name not in self.parameters:
            if index not in self.wholes:
                self.wholes[index] = self._gather(index)
            self.parameters[name] = self.graph.call_function(operator.getitem, (self.wholes[index], number))
        own = self.gathering.units[index].dtype
        if cast or self.gathering.dtype_of(name) == own:
            return self.parameters[name]
        return self.graph.call_function(CAST, (self.parameters[name],), {"dtype": own})

    def _gather(self, index: int) -> fx.Node:
        if self.gathering.units[index].spec.gathers != "task":
            return self.graph.call_method("kept_parameters", (self.held[index],))
        order = self.order if index in self.order else self.alone
        place = order.index(index)
        for other in order[: place + 2]:  # the next one arrives while this one is read
            if other not in self.arriving:
                self.arriving[other] = self.graph.call_method("start", (self.held[other],))
        return self.graph.call_method("arrived", (self.held[index], self.arriving[index]))


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]
