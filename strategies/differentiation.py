"""The derivative of a local graph as a graph: what autograd would do in a forward and its backward, written down.

Each operator is traced alone, forward and backward (:mod:`whale.strategies.traced_call`), and the parts are joined in
the order of autograd's engine: from the last operator to the first, gradients of a value summed in the order in which
they are made. So the numbers are those of autograd, bit for bit. What an operator's forward computes for its backward
is returned by the forward graph, as autograd keeps it. Collectives and random masks are nodes of both graphs, because a
trace records them (:mod:`whale.runtime.recording`).

It knows graphs and operators; nothing of placements, stages or ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from whale.graph.nodes import create_node, node_copy
from whale.runtime.collectives import Bridge
from whale.runtime.derivative import OnTape, from_tape, laid_out
from whale.runtime.local_program import INPUTS, Derivative, LocalCode, LocalGraph, ShapeAndDtype, Source
from whale.runtime.recording import recorded
from whale.strategies.split_backward import communicates
from whale.strategies.traced_call import (
    Call,
    Hole,
    Kind,
    Known,
    Trace,
    dense,
    known_call,
    makes_alias,
    makes_gradients_anew,
    sum_without_data,
    traced,
    writes,
)

__all__ = ["differentiated"]

aten = torch.ops.aten

_ANEW = (*INPUTS, "received", "step")
"""Sources of tensors that are others in each step, and may have other strides."""

_Place = tuple[fx.Node, Any]
"""A tensor of the forward: a node of the given graph and the number of its result, or a node of its trace; or what is
kept on its tape."""

_TAPE = "tape"


def differentiated(
    graph: LocalGraph, arguments: Sequence[Tensor], outputs: int, seeds: Sequence[Tensor | None]
) -> Derivative:
    """The forward and the backward of a graph.

    Args:
        graph: of operators that autograd can differentiate.
        arguments: tensors without data like those of its placeholders; gradients are made of those that require one.
        outputs: number of results to the executor, which come first.
        seeds: for each of these, a tensor without data like its gradient, or None if it has none.
    """
    return _Differentiation(graph, arguments, outputs, seeds).run()


class _Gradient(NamedTuple):
    """A gradient as a node of the backward, and a tensor without data like it."""

    node: fx.Node
    like: Tensor


class _Named(NamedTuple):
    """A call of the given graph, the nodes of its tensors, and what is known of it."""

    call: Call
    operands: list[fx.Node]
    known: Known


class _Written:
    """A graph being written, with the modules and constants that it reads."""

    def __init__(self) -> None:
        self.graph, self.root, self._count = fx.Graph(), nn.Module(), 0
        self.source: Any = None
        """The operator of the model for which nodes are written."""

    def module(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """A call of a module."""
        name = self._name(type(module).__name__.strip("_").lower())
        self.root.add_module(name, module)
        return self._noted(create_node(self.graph, "call_module", name, args, kwargs))

    def call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """A call of a function."""
        return self._noted(create_node(self.graph, "call_function", function, args, kwargs))

    def _noted(self, node: fx.Node) -> fx.Node:
        node.meta["source"] = self.source
        return node

    def copy(self, node: fx.Node, trace: Trace, read: Callable[[fx.Node], fx.Node], call: Call) -> fx.Node:
        """A node of the trace of a call."""
        if node.target is recorded:
            tensors, number = node.args
            module = trace.modules[number]  # type: ignore[index]
            if isinstance(call.module, Bridge):
                module = module.named(module.value + call.module.value)
            called = self.module(module, tuple(read(x) for x in tensors))  # type: ignore[union-attr, arg-type]
            called.meta["val"] = node.meta.get("val")
            return called
        if (module := node.meta.get("module")) is not None:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), read)
            return self.module(module, args, kwargs)
        if node.op == "get_attr":
            name = self._name("constant")
            self.root.register_buffer(name, getattr(trace.root, str(node.target)))
            return self.graph.get_attr(name)
        return self._noted(node_copy(self.graph, node, read))

    def code(self, *, boxed: bool = False) -> LocalCode:
        """The finished graph, without unused nodes; collectives remain, because other ranks call them too."""
        for node in reversed(list(self.graph.nodes)):
            unused = node.op in ("call_function", "call_module", "get_attr") and not node.users
            if unused and not writes(node) and not communicates(node, self.root):
                self.graph.erase_node(node)
                if node.op != "call_function":
                    delattr(self.root, str(node.target))
        return LocalCode(self.root, self.graph, boxed=boxed)

    def _name(self, hint: str) -> str:
        self._count += 1
        return f"{hint}_{self._count - 1}"


class _Differentiation:
    def __init__(
        self, graph: LocalGraph, arguments: Sequence[Tensor], outputs: int, seeds: Sequence[Tensor | None]
    ) -> None:
        self.given, self.root, self.seeds, self.num_outputs = graph, graph.code.root, seeds, outputs
        self.nodes = list(graph.code.graph.nodes)
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.numbers = {node: number for number, node in enumerate(self.placeholders)}
        self.values: dict[fx.Node, Any] = dict(zip(self.placeholders, arguments, strict=True))  # without data
        self.calls: dict[fx.Node, _Named] = {}
        self.traces: dict[fx.Node, Trace | None] = {}
        self.forward, self.backward = _Written(), _Written()
        self.sink = self.backward.graph.placeholder("sink")
        self.kept: dict[_Place, fx.Node] = {}  # placeholders of the backward
        self.gradients: dict[_Place, _Gradient] = {}

    def run(self) -> Derivative:
        for node in self.nodes:
            if node.op in ("call_function", "call_module"):
                self._know(node)
        seeds = self._sow()
        first_users: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            for used in node.all_input_nodes:
                first_users.setdefault(used, node)
        for node in reversed(self.nodes):
            self.backward.source = node.meta.get("source")
            self._go_back(node)
            for used in node.all_input_nodes:
                if first_users[used] is node and used.op == "placeholder":
                    self._hand_over(used)
        self._return_gradients()
        return self._finished(seeds)

    # Values without data

    def _know(self, node: fx.Node) -> None:
        if node.target is operator.getitem and isinstance(self.values[node.args[0]], (tuple, list)):  # type: ignore[index]
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        operands: list[fx.Node] = []

        def hole(x: Any) -> Any:
            if not isinstance(x, fx.Node):
                return x
            if not isinstance(self.values[x], Tensor):
                return self.values[x]
            if x not in operands:
                operands.append(x)
            return Hole(operands.index(x))

        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), hole)
        target: Any = self.root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        call = Call(target, args, kwargs)
        known = known_call(call, [self.values[x] for x in operands])
        self.values[node], self.calls[node] = known.results, _Named(call, operands, known)

    def _place(self, node: fx.Node) -> _Place:
        """The place of a node's tensor; a ``getitem`` only selects a result."""
        if node.target is operator.getitem and node not in self.calls:
            return node.args[0], node.args[1]  # type: ignore[return-value]
        return node, 0

    def _num_results(self, node: fx.Node) -> int:
        value = self.values[node]
        return len(value) if isinstance(value, (tuple, list)) else 1

    # The backward, from the last operator to the first

    def _sow(self) -> list[tuple[fx.Node, int]]:
        """Start with the gradients of the outputs; return their placeholders and numbers."""
        results: Sequence[fx.Node] = self.nodes[-1].args[0]
        sown = []
        for number, (node, seed) in enumerate(zip(results[: self.num_outputs], self.seeds, strict=True)):
            if seed is not None and self.values[node].requires_grad:
                placeholder = self.backward.graph.placeholder(f"seed_{number}")
                sown.append((placeholder, number))
                self._add(self._place(node), _Gradient(placeholder, seed))
        return sown

    def _add(self, place: _Place, gradient: _Gradient) -> None:
        if (before := self.gradients.get(place)) is not None:
            total = self.backward.call(aten.add.Tensor, (before.node, gradient.node))
            like = sum_without_data(before.like, gradient.like)
            if not any(map(_is_from_tape, (before.node, gradient.node))):  # which may be sparse
                total.meta["val"] = like
            gradient = _Gradient(total, like)
        self.gradients[place] = gradient

    def _go_back(self, node: fx.Node) -> None:
        if node not in self.calls:
            return
        call, operands, known = self.calls[node]
        given = [self.gradients.pop((node, i), None) for i in range(self._num_results(node))]
        seeds = [gradient for gradient in given if gradient is not None]
        if not seeds:
            return
        likes = [None if gradient is None else gradient.like for gradient in given]
        key = tuple(None if like is None else Kind.of(like) for like in likes)
        if key not in known.traces:
            known.traces[key] = traced(call, [self.values[x] for x in operands], likes)
        trace = self.traces[node] = known.traces[key]
        if trace is None:
            self._go_back_by_tape(node, operands, given)
            return
        places = trace.placeholders
        inner = dict(zip(places[len(operands) :], (seed.node for seed in seeds), strict=True))
        outer = {placeholder: self._place(x) for placeholder, x in zip(places, operands, strict=False)}

        def read(x: fx.Node) -> fx.Node:
            return inner[x] if x in inner else self._keep(outer.get(x, (node, x)))

        for each in trace.graph.nodes:
            if each.op not in ("placeholder", "output") and each not in trace.forward:
                inner[each] = self.backward.copy(each, trace, read, call)
        for x, found in zip(operands, trace.gradients, strict=True):
            if found is not None:
                self._add(self._place(x), _Gradient(read(found), found.meta["val"]))

    def _go_back_by_tape(self, node: fx.Node, operands: Sequence[fx.Node], given: Sequence[_Gradient | None]) -> None:
        seeds = tuple(None if gradient is None else gradient.node for gradient in given)
        again = tuple(self._keep(self._place(operands[number])) for number in self.calls[node].known.saved)
        found = self.backward.call(from_tape, (self._keep((node, _TAPE)), seeds, again))
        for number, x in enumerate(operands):
            if self.values[x].requires_grad:
                gradient = self.backward.call(operator.getitem, (found, number))
                self._add(self._place(x), _Gradient(gradient, dense(self.values[x])))

    def _keep(self, place: _Place) -> fx.Node:
        """The placeholder of a tensor that the forward keeps."""
        if place not in self.kept:
            with self.backward.graph.inserting_after(self.sink):
                self.kept[place] = self.backward.graph.placeholder(f"kept_{len(self.kept)}")
        return self.kept[place]

    def _hand_over(self, placeholder: fx.Node) -> None:
        """Give the gradient of a parameter to the sink: it is complete, for its first reader was gone back over."""
        number = self.numbers[placeholder]
        if self.given.sources[number][0] == "parameter" and (placeholder, 0) in self.gradients:
            gradient = self.gradients.pop((placeholder, 0))
            given = self.backward.graph.call_method("add", (self.sink, number, gradient.node))
            given.meta["in layout"] = gradient.like.stride() == self.values[placeholder].stride()

    def _return_gradients(self) -> None:
        """Return those of received values, and copy those of parameters that share their memory with others, or are in
        another layout than the parameter."""
        received: dict[int, fx.Node | None] = {}
        for placeholder, (kind, position) in zip(self.placeholders, self.given.sources, strict=True):
            if kind == "received":
                gradient = self.gradients.get((placeholder, 0))
                received[position] = None if gradient is None else gradient.node
        self.backward.graph.output(tuple(received.get(i) for i in range(max(received, default=-1) + 1)))
        for node in list(self.backward.graph.nodes):
            if node.op == "call_method":
                _, number, gradient_node = node.args
                if not node.meta["in layout"] or not _is_alone(gradient_node):
                    self.backward.source = gradient_node.meta.get("source")
                    with self.backward.graph.inserting_before(node):
                        strides = tuple(self.values[self.placeholders[number]].stride())
                        copied = self.backward.call(laid_out, (gradient_node, strides))
                    node.args = (*node.args[:2], copied)

    # The forward

    def _finished(self, seeds: Sequence[tuple[fx.Node, int]]) -> Derivative:
        env, backward = self._write_forward(), self.backward.code(boxed=True)
        results: Sequence[fx.Node] = self.nodes[-1].args[0]
        sources: dict[fx.Node, Source] = {placeholder: ("seed", number) for placeholder, number in seeds}
        extra: dict[fx.Node, int] = {}
        numbers = {env[placeholder, 0]: number for placeholder, number in self.numbers.items()}
        for place, placeholder in self.kept.items():
            origin = env[place]
            if origin in numbers:
                sources[placeholder] = ("argument", numbers[origin])
            elif placeholder.users:
                sources[placeholder] = ("kept", extra.setdefault(origin, len(extra)))
        self.forward.graph.output((*(env[self._place(x)] for x in results), *extra))
        for node in list(backward.graph.nodes):
            if node.op == "placeholder" and node is not self.sink and not node.users:
                backward.graph.erase_node(node)
                sources.pop(node, None)
        ordered = [sources[n] for n in backward.graph.nodes if n.op == "placeholder" and n is not self.sink]
        strides = {
            number: tuple(self.values[placeholder].stride())
            for placeholder, number in self.numbers.items()
            if self.given.sources[number][0] in _ANEW
        }
        return Derivative(
            forward=self.forward.code(),
            backward=LocalGraph(backward, ordered),
            num_results=len(results),
            strides=strides,
            received=tuple(like for _, like in sorted(self._received(), key=operator.itemgetter(0))),
            seeds=tuple(None if seed is None else (tuple(seed.shape), seed.dtype) for seed in self.seeds),
        )

    def _received(self) -> Iterator[tuple[int, ShapeAndDtype]]:
        """The received values that the graph reads, by position."""
        for placeholder, (kind, position) in zip(self.placeholders, self.given.sources, strict=True):
            if kind == "received":
                yield position, (tuple(self.values[placeholder].shape), self.values[placeholder].dtype)

    def _write_forward(self) -> dict[_Place, fx.Node]:
        """Write all operators; return the nodes of their tensors, and of those inside of their traces."""
        env: dict[_Place, fx.Node] = {(x, 0): self.forward.graph.placeholder(x.name) for x in self.placeholders}
        for node, (call, operands, _) in self.calls.items():
            self.forward.source = node.meta.get("source")
            tensors = [env[self._place(x)] for x in operands]
            if (trace := self.traces.get(node)) is not None:
                inner = dict(zip(trace.placeholders, tensors, strict=False))
                for each in trace.graph.nodes:
                    if each in trace.forward:
                        env[node, each] = inner[each] = self.forward.copy(each, trace, inner.__getitem__, call)
                env |= {(node, i): inner[x] for i, x in enumerate(trace.results) if x is not None}
                continue
            if node in self.traces:
                wants = tuple(self.values[x].requires_grad for x in operands)
                on_tape = OnTape(call, wants, self.calls[node].known.saved, anew=makes_gradients_anew(call))
                pair = self.forward.module(on_tape, tuple(tensors))
                found, env[node, _TAPE] = (self.forward.call(operator.getitem, (pair, i)) for i in range(2))
            else:
                args, kwargs = call.filled(tensors)
                if call.module is not None:
                    found = self.forward.module(call.module, args, kwargs)
                else:
                    found = self.forward.call(call.target, args, kwargs)
            if isinstance(self.values[node], (tuple, list)):
                for i in range(self._num_results(node)):
                    env[node, i] = self.forward.call(operator.getitem, (found, i))
            else:
                env[node, 0] = found
        return env


def _is_from_tape(node: fx.Node) -> bool:
    """Whether a gradient was made by a call on a tape, or has a term that was."""
    if node.target is aten.add.Tensor:
        return "val" not in node.meta
    return node.target is operator.getitem and node.args[0].target is from_tape  # type: ignore[union-attr]


def _is_alone(node: Any) -> bool:
    """Whether a tensor has memory that no other value has, if only one node reads it."""
    while len(node.users) == 1:
        if node.op == "call_module":
            return True
        if node.target is operator.getitem:
            producer = node.args[0]
            if producer.target is from_tape:
                return True
            return getattr(producer.target, "_schema", None) is not None and not makes_alias(producer)
        if node.op != "call_function" or getattr(node.target, "_schema", None) is None:
            return False
        if not makes_alias(node):
            return True
        node = node.args[0]  # of which it is a view, or to which it wrote
    return False
