"""Overlap of messages with a stage's own part: that is computed first, and each received value is waited for where it
is first read.

So messages travel while a stage computes what it has all operands of, as the bottom MLP of a recommendation model does
beside the exchange of vectors. The own part is what is computed of the batch with the stage's own parameters; masks and
casts, which take next to no time, stay where they are read. The backward of the own part is then the last one, after
the gradients of all received values. It knows graphs; nothing of stages and messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from whale.graph.nodes import node_copy
from whale.runtime.local_program import INPUTS, LocalCode, LocalGraph, LocalProgram, wait_for
from whale.strategies.recompute import draws_numbers
from whale.strategies.split_backward import communicates
from whale.strategies.traced_call import writes

__all__ = ["awaited", "own_first"]


def own_first(given: LocalGraph) -> bool:
    """Move what a stage computes of the batch with its own parameters ahead of all that reads received values; whether
    there is any.

    Collectives, operators that draw random numbers and those that write to an operand keep their order, and nothing
    passes one that writes.
    """
    graph, root = given.code.graph, given.code.root
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    late = _of_kinds(given, {"received"})
    if not late:
        return False
    held = in_order = False  # all that follows is late; what has an order is
    first: fx.Node | None = None
    for node in calls:
        has_order = communicates(node, root) or draws_numbers(node) or writes(node)
        held |= first is not None and writes(node)
        if held or (in_order and has_order) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            first = first or node
            in_order |= has_order
    own = [node for node in calls if node not in late]
    of_batch, of_parameters = (_reached(own, _of_kinds(given, kinds)) for kinds in ({*INPUTS, "step"}, {"parameter"}))
    wanted = of_batch & of_parameters
    for node in reversed(own):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    if not of_batch & of_parameters & set(own):
        return False
    places = {node: place for place, node in enumerate(calls)}
    for node in own:
        if first is not None and node in wanted and places[node] > places[first]:
            first.prepend(node)
    return True


def awaited(programs: Sequence[LocalProgram]) -> list[LocalProgram]:
    """The programs of a stage's micro-batches, those that begin with a part of their own with waits for received values
    where they are first read; equal ones share theirs."""
    codes: dict[int, LocalCode] = {}
    found: dict[int, LocalProgram] = {}

    def waiting(code: LocalCode, positions: Mapping[int, int]) -> LocalCode:
        if id(code) not in codes:
            codes[id(code)] = _with_waits(code, positions)
        return codes[id(code)]

    for program in programs:
        if id(program) in found or not program.begins_alone:
            continue
        given, derivative = program.micro_batch, program.derivative
        positions = {number: what for number, (kind, what) in enumerate(given.sources) if kind == "received"}
        if derivative is not None:
            derivative = replace(derivative, forward=waiting(derivative.forward, positions))
        graph = LocalGraph(waiting(given.code, positions), [*given.sources, ("wait", None)])
        found[id(program)] = replace(program, micro_batch=graph, derivative=derivative)
    return [found.get(id(program), program) for program in programs]


def _with_waits(code: LocalCode, positions: Mapping[int, int]) -> LocalCode:
    """A graph that waits for the placeholders with these numbers, which have positions among received values; a last
    placeholder is what waits."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    holes = [node for node in code.graph.nodes if node.op == "placeholder"]
    for node in holes:
        env[node] = node_copy(graph, node)
    wait = graph.placeholder("wait")
    coming = {holes[number]: position for number, position in positions.items()}
    for node in code.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], env.__getitem__))
        elif node.op != "placeholder":
            for used in node.all_input_nodes:
                if used in coming:
                    graph.call_function(wait_for, (wait, coming.pop(used)))
            env[node] = node_copy(graph, node, env.__getitem__)
    return LocalCode(code.root, graph, boxed=code.boxed)


def _of_kinds(given: LocalGraph, kinds: Collection[str]) -> set[fx.Node]:
    """The placeholders with sources of some kinds."""
    holes = (node for node in given.code.graph.nodes if node.op == "placeholder")
    return {node for node, (kind, _) in zip(holes, given.sources, strict=True) if kind in kinds}


def _reached(nodes: Sequence[fx.Node], starts: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes, of some in order, that read any of others, or read what does."""
    found = set(starts)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
