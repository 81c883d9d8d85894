"""Replay of omitted layers in the dry run of a folded stage (`whale.strategies.folding`).

Between the layers that stay, markers are put into the stage's program. From one marker to the next the dry run logs
every change of the live bytes, every gradient that becomes ready, and every collective: in the forward where the marker
is executed; in a backward of autograd where the first gradient arrives at the values that cross it, after everything
behind it is done, and in a backward that is a graph before the first operator of an earlier layer. If two consecutive
layers log the same, so would the omitted ones, and their log is replayed as often. If not, the result must not be used.
This module knows no optimizer and no device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from whale.graph.nodes import graph_copy
from whale.ir.check import CollectiveCall
from whale.runtime.local_program import LocalCode, LocalGraph, LocalProgram
from whale.strategies.folding import Fold

__all__ = ["Event", "Log", "Replay", "marked"]

Event = tuple[Any, ...]
"""``("add", category, bytes)``, ``("free", category, bytes)``, ``("from", category, bytes)`` and ``("to", category,
bytes)`` where the category of bytes changes; ``("place", parameter)`` and ``("ready", parameter)`` for a gradient."""

OF_GRADIENTS = ("place", "ready")
"""Events of a gradient: it gets its place in a bucket; it is there."""


@dataclass
class Log:
    """The events of a dry run since the last marker, while anything is logged."""

    events: list[Event] | None = None
    paused: bool = False

    def add(self, *event: Any) -> None:
        """Log an event."""
        if self.events is not None and not self.paused:
            self.events.append(event)


@dataclass(eq=False)
class Replay:
    """The replay of one run of layers.

    Attributes:
        omitted: number of omitted layers.
        parameters: for the names of the third last layer's parameters, those of the omitted layers, last first.
        log: of the dry run.
        calls: collectives of the dry run's task.
        happens: called with each event of an omitted layer.
        failed: whether layers were not equal, or not passed in order: the result must not be used.
    """

    omitted: int
    parameters: Mapping[str, Sequence[str]]
    log: Log
    calls: list[CollectiveCall]
    happens: Callable[[Event], None]
    failed: bool = False
    _forward: _Direction = field(default_factory=lambda: _Direction(order=(0, 1, 2)))
    _backward: _Direction = field(default_factory=lambda: _Direction(order=(2, 1, 0)))

    def forward(self, marker: int, *crossing: Any) -> None:
        """Execute a marker that these values cross."""
        for value in crossing:
            if isinstance(value, Tensor) and value.grad_fn is not None:
                value.register_hook(partial(self._gradient, marker))
        self._pass(self._forward, marker)

    def _gradient(self, marker: int, gradient: Tensor) -> None:
        if marker not in self._backward.passed:
            self.backward(marker)

    def backward(self, marker: int) -> None:
        """Come to a marker in a backward."""
        self._pass(self._backward, marker)

    def finish(self) -> None:
        """Check that a forward, and a backward, passed all markers or none."""
        self.failed |= not {len(self._forward.passed), len(self._backward.passed)} <= {0, 3}

    def _pass(self, direction: _Direction, marker: int) -> None:
        count = len(direction.passed)
        direction.passed.append(marker)
        if count > 2 or direction.order[count] != marker:
            self.failed = True
            return
        if count:
            made = tuple(call._replace(node="") for call in self.calls[direction.made :])
            direction.layers.append((self.log.events or [], made))
        self.log.events = [] if count < 2 else None
        direction.made = len(self.calls)
        if count == 2:
            self._replay(direction)

    def _replay(self, direction: _Direction) -> None:
        one, other = direction.layers
        known = all(event[0] not in OF_GRADIENTS or event[1] in self.parameters for event in other[0])
        if not known or one[1] != other[1] or list(map(_nameless, one[0])) != list(map(_nameless, other[0])):
            self.failed = True
            return
        made = self.calls[len(self.calls) - len(other[1]) :]
        for layer in range(self.omitted):
            for event in other[0]:
                is_named = event[0] in OF_GRADIENTS
                self.happens((event[0], self.parameters[event[1]][layer]) if is_named else event)
            self.calls.extend(made)


@dataclass
class _Direction:
    """A forward or backward: the order of its markers, those passed, and what happened between them."""

    order: tuple[int, ...]
    passed: list[int] = field(default_factory=list)
    layers: list[tuple[list[Event], tuple[CollectiveCall, ...]]] = field(default_factory=list)
    made: int = 0


def _nameless(event: Event) -> Event:
    return event[:1] if event[0] in OF_GRADIENTS else event


def marked(program: LocalProgram, folds: Sequence[tuple[Fold, Replay]], order: Sequence[fx.Node]) -> LocalProgram:
    """A copy of a program with the markers of each fold, which call its replay.

    Args:
        program: of a folded stage; if it has a derivative, its forward and its backward get markers.
        folds: of the stage.
        order: the operators of the stage.
    """
    derivative = program.derivative
    if derivative is None:
        marking = _Marking(program.micro_batch.code)
        _mark_by_starts(marking, folds)
        return replace(program, micro_batch=LocalGraph(marking.code(), program.micro_batch.sources))
    positions = {node: place for place, node in enumerate(order)}
    forward, backward = _Marking(derivative.forward), _Marking(derivative.backward.code)
    _mark_both(forward, backward, folds, positions)
    return replace(
        program,
        derivative=replace(
            derivative,
            forward=forward.code(),
            backward=LocalGraph(backward.code(), derivative.backward.sources),
        ),
    )


class _Marking:
    """A copy of a graph into which markers are put."""

    def __init__(self, code: LocalCode) -> None:
        self.graph = graph_copy(code.graph)
        self.root = copy.copy(code.root)
        self.root._modules = dict(code.root._modules)
        self.nodes = list(self.graph.nodes)
        self._boxed, self._count = code.boxed, 0

    def put(self, place: int, passed: Callable[..., None], crossing: Sequence[fx.Node] = ()) -> None:
        """Put a marker before a node of the original graph."""
        name = f"marker_{self._count}"
        self._count += 1
        self.root.add_module(name, _Marker(passed))
        with self.graph.inserting_before(self.nodes[place]):
            self.graph.call_module(name, tuple(crossing))

    def code(self) -> LocalCode:
        """The graph with its markers."""
        return LocalCode(self.root, self.graph, boxed=self._boxed)


def _mark_by_starts(marking: _Marking, folds: Sequence[tuple[Fold, Replay]]) -> None:
    """Mark a graph of which autograd derives the backward."""
    nodes = marking.nodes
    first: dict[Any, int] = {None: len(nodes) - 1}
    for i, node in enumerate(nodes):
        first.setdefault(node.meta.get("starts"), i)
    place = {node: i for i, node in enumerate(nodes)}
    for fold, replay in folds:
        bounds = [first[start] for start in fold.starts if start in first]
        if len(bounds) < len(fold.starts) or bounds != sorted(bounds):  # nothing reads an operator
            replay.failed = True
            continue
        for marker, (before, here, after) in enumerate(zip(bounds, bounds[1:], bounds[2:], strict=False)):
            crossing = [
                node
                for node in nodes[before:here]
                if node.op != "placeholder" and any(here <= place.get(user, -1) < after for user in node.users)
            ]
            marking.put(here, partial(replay.forward, marker), crossing)


def _mark_both(
    forward: _Marking,
    backward: _Marking,
    folds: Sequence[tuple[Fold, Replay]],
    positions: Mapping[fx.Node, int],
) -> None:
    """Mark a forward where the layers that stay begin, and its backward where it first comes to what is before them."""
    ahead, back = _positions(forward, positions), _positions(backward, positions)
    for fold, replay in folds:
        begins = [len(positions) if start is None else positions[start] for start in fold.starts[1:-1]]
        firsts = [next((place for place, own in ahead if own >= begin), -1) for begin in begins]
        lasts = [next((place for place, own in back if own < begin), -1) for begin in begins]
        if firsts != sorted(set(firsts)) or lasts != sorted(set(lasts), reverse=True) or -1 in firsts + lasts:
            replay.failed = True
            continue
        for marker, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            forward.put(first, partial(replay.forward, marker))
            backward.put(last, partial(replay.backward, marker))


def _positions(marking: _Marking, positions: Mapping[fx.Node, int]) -> list[tuple[int, int]]:
    """The places of a graph's nodes that compute something, with the positions of their operators in the stage."""
    found = []
    for place, node in enumerate(marking.nodes):
        source = node.meta.get("source")
        if node.op.startswith("call") and isinstance(source, fx.Node) and source in positions:
            found.append((place, positions[source]))
    return found


class _Marker(nn.Module):
    def __init__(self, passed: Callable[..., None]) -> None:
        super().__init__()
        self.passed = passed

    def forward(self, *crossing: Any) -> None:
        self.passed(*crossing)
