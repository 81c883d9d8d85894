"""A backward in two parts, for schedules that run the second later: first what other stages wait for.

Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024), sections 2 and 4: I makes the gradients of inputs, W those of
weights.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from whale.graph.nodes import node_copy
from whale.runtime.local_program import Derivative, LocalCode, LocalGraph, Source, SplitBackward
from whale.strategies.traced_call import makes_alias, writes

__all__ = ["communicates", "owner", "split"]


def split(derivative: Derivative) -> Derivative:
    """The derivative with its backward also in two parts.

    The first makes the gradients of received values, and has all collectives, in the order of the whole. Where no value
    is received it does nothing.
    """
    whole = derivative.backward
    graph, root = whole.code.graph, whole.code.root
    gradients: tuple[Any, ...] = graph.output_node().args[0]  # type: ignore[assignment]
    first: set[fx.Node] = set()
    if wanted := [x for x in gradients if isinstance(x, fx.Node)]:
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        wanted += [node for node in nodes if communicates(node, root)]
        while wanted:
            _add_with_operands(first, wanted)
            wanted = [node for node in nodes if node not in first and writes(node) and owner(node) in first]
    first |= {node for node in graph.nodes if node.target is operator.getitem and node.args[0] in first}
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    before, after = [n for n in calls if n in first], [n for n in calls if n not in first]
    passed = [node for node in before if any(user not in first and user.op != "output" for user in node.users)]
    parts = SplitBackward(
        inputs=_part(whole, before, (), (*gradients, *passed)),
        weights=_part(whole, after, passed, ()),
        num_gradients=len(gradients),
    )
    return replace(derivative, split=parts)


def communicates(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is a collective: all its ranks run it."""
    return node.op == "call_module" and bool(getattr(root.get_submodule(str(node.target)), "ranks", ()))


def _add_with_operands(chosen: set[fx.Node], wanted: Iterable[fx.Node]) -> None:
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in chosen:
            chosen.add(node)
            waiting += node.all_input_nodes


def owner(node: fx.Node) -> fx.Node:
    """The node whose memory an operator writes to."""
    base = node.args[0]
    while isinstance(base, fx.Node) and base.op == "call_function" and makes_alias(base):
        base = base.args[0]
    return base  # type: ignore[return-value]


def _part(whole: LocalGraph, calls: Sequence[fx.Node], passed: Sequence[fx.Node], results: Sequence[Any]) -> LocalGraph:
    """Some calls of a backward as a graph, which takes what others have *passed*."""
    sink, *placeholders = [node for node in whole.code.graph.nodes if node.op == "placeholder"]
    new, own = fx.Graph(), list[Source]()
    env = {sink: new.placeholder("sink")}
    read = {used for node in calls for used in node.all_input_nodes} | {x for x in results if isinstance(x, fx.Node)}
    for node, source in zip(placeholders, whole.sources, strict=True):
        if node in read:
            env[node] = new.placeholder(node.name)
            own.append(source)
    for number, node in enumerate(passed):
        env[node] = new.placeholder(node.name)
        own.append(("passed", number))
    for node in calls:
        env[node] = node_copy(new, node, env.__getitem__)
    new.output(tuple(env[x] if isinstance(x, fx.Node) else x for x in results))
    return LocalGraph(LocalCode(whole.code.root, new, boxed=True), own)
