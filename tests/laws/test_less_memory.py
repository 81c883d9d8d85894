"""Backwards that compute values again in less memory: the same bits, and no more of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.laws.test_derivatives import Sink, assert_same, graph_of, leaf
from whale.graph import origins
from whale.runtime.local_program import Derivative, LocalGraph
from whale.strategies.differentiation import differentiated
from whale.strategies.gradients_in_place import gradients_in_place
from whale.strategies.less_memory import in_less_memory
from whale.strategies.recompute import recomputed
from whale.strategies.split_backward import split
from whale.strategies.traced_call import fake_like

aten = torch.ops.aten
SIZE = 4


def call(target: Any, *given: Any) -> Callable[..., fx.Node]:
    """Builder of a call of an operator with values and what is given beside them."""
    return lambda graph, *values: graph.call_function(target, (*values, *given))


def by_rows(graph: fx.Graph, x: fx.Node) -> fx.Node:
    longer = call(aten.clone.default)(graph, call(aten.reshape.default, [2, 8])(graph, x))
    return call(aten.reshape.default, [SIZE, SIZE])(graph, longer)


def expanded(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(aten.expand.default, [SIZE, -1])(graph, call(aten.sum.dim_IntList, [0], True)(graph, x))


def scaled(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(aten.mul.Tensor)(graph, call(aten.sum.dim_IntList, [0], True)(graph, x), x)


def with_its_turn(graph: fx.Graph, x: fx.Node) -> fx.Node:
    y = call(aten.tanh.default)(graph, x)
    return call(aten.mul.Tensor)(graph, y, call(aten.transpose.int, 0, 1)(graph, y))


def together(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    halves = [call(aten.slice.Tensor, 0, 0, 2)(graph, z) for z in (x, y)]
    return graph.call_function(aten.cat.default, (halves,))


ONE = [
    call(aten.tanh.default), call(aten.sin.default), call(aten.exp.default), call(aten.mul.Tensor, 0.5),
    call(aten.add.Tensor, 1.0), call(aten.pow.Tensor_Scalar, 3.0), call(aten.silu.default),
    call(aten.transpose.int, 0, 1), call(aten.softmax.int, -1), by_rows, expanded, scaled,
    with_its_turn, call(aten._unsafe_view.default, [SIZE, SIZE]),
]  # fmt: skip
TWO = [call(aten.mul.Tensor), call(aten.mul.Tensor), call(aten.add.Tensor), call(aten.mm.default), together]

Step = tuple[int, int, int]
Body = Callable[..., list[fx.Node]]


def body_of(steps: Sequence[Step]) -> Body:
    """Operators, each with how many values before it those are made that it reads."""

    def body(graph: fx.Graph, *places: fx.Node) -> list[fx.Node]:
        values = list(places)
        for kind, one, other in steps:
            x, y = values[-1 - one % len(values)], values[-1 - other % len(values)]
            values.append(ONE[kind](graph, x) if kind < len(ONE) else TWO[kind - len(ONE)](graph, x, y))
        return values[-2:]

    return body


class Places(Sink):
    """Gives memory for gradients."""

    def place(self, number: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=torch.float64)


class Allocated(TorchDispatchMode):
    """Counts the bytes of what operators allocate and is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            storage = x.untyped_storage()
            if (key := storage._cdata) not in before and key not in self._known:
                self._known[key] = weakref.ref(storage, partial(self._gone, key, storage.nbytes()))
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, key: int, size: int, _: object) -> None:
        del self._known[key]
        self.now -= size


def backward_of(derivative: Derivative, tensors: Sequence[Tensor], seeds: Sequence[Tensor], parts: bool) -> Any:
    """Gradients by placeholder, results, and the bytes that were there at most beside what was there before."""
    found = derivative.forward(*tensors)
    sink = Places()
    kept = list(found[derivative.num_results :])
    before = [x.clone() for x in (*kept, *tensors, *seeds)]
    with Allocated() as live:
        passed: Any = ()
        halves = derivative.split if parts else None
        graphs = [derivative.backward] if halves is None else [halves.inputs, halves.weights]
        for graph in graphs:
            of = {"kept": kept, "argument": tensors, "seed": seeds, "passed": passed}
            passed = graph.code.function(graph.code.root, [sink, *(of[kind][what] for kind, what in graph.sources)])
            if halves is not None:
                passed = passed[halves.num_gradients :]
    for x, old in zip((*kept, *tensors, *seeds), before, strict=True):
        assert_same(x, old)
    return sink.found, passed, live.peak


def derivatives_of(body: Body, tensors: Sequence[Tensor], seeds: Sequence[Tensor], parts: bool) -> list[Derivative]:
    """The derivatives that compute the body's values again, as they are and in less memory."""

    def blank(x: Tensor) -> Tensor:
        return fake_like(x.shape, x.dtype, x.device, requires_grad=x.requires_grad)

    def in_a_checkpoint(graph: fx.Graph, *places: fx.Node) -> list[fx.Node]:
        results = body(graph, *places)
        for node in graph.nodes:
            node.meta |= {"source": node, "custom": {origins._CHECKPOINTED: "1"}}
        return results

    def in_less(graph: LocalGraph) -> LocalGraph:
        return LocalGraph(in_less_memory(gradients_in_place(graph.code)), graph.sources)

    likes = [blank(x) for x in seeds]
    whole = differentiated(graph_of(tensors, in_a_checkpoint), [blank(x) for x in tensors], len(seeds), likes)
    again = recomputed(whole, "none")
    again = split(again) if parts else again
    return [again, again.with_backwards(in_less)]


KINDS = st.integers(0, len(ONE) + len(TWO) - 1)
STEPS = st.lists(st.tuples(KINDS, st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=9)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.booleans())
def test_gradients_have_the_same_bits(steps: list[Step], parts: bool) -> None:
    torch.manual_seed(0)
    tensors = [leaf(SIZE, SIZE).mul(factor).detach().requires_grad_() for factor in (0.5, 0.25)]
    seeds = [torch.randn(SIZE, SIZE, dtype=torch.float64) for _ in range(2)]
    found = derivatives_of(body_of(steps), tensors, seeds, parts)
    with torch.no_grad():
        (wanted, results, most), (gradients, made, peak) = (backward_of(one, tensors, seeds, parts) for one in found)
    assert gradients.keys() == wanted.keys() and len(results) == len(made)
    for number, gradient in wanted.items():
        assert_same(gradients[number], gradient)
    for one, other in zip(results, made, strict=True):
        if isinstance(one, Tensor):
            assert_same(other, one)
    assert peak <= most


def test_a_feed_forward_layer_holds_four_of_its_values_at_most() -> None:
    """Half of what gelu reads, a tanh of it, what gelu returns, and the gradient of that."""

    def body(graph: fx.Graph, h: fx.Node, weight: fx.Node, bias: fx.Node) -> list[fx.Node]:
        cubed = call(aten.mul.Tensor, 0.044715)(graph, call(aten.pow.Tensor_Scalar, 3.0)(graph, h))
        inner = call(aten.mul.Tensor, 0.8)(graph, call(aten.add.Tensor)(graph, h, cubed))
        one = call(aten.add.Tensor, 1.0)(graph, call(aten.tanh.default)(graph, inner))
        half = call(aten.mul.Tensor, 0.5)(graph, h)
        return [graph.call_function(aten.addmm.default, (bias, call(aten.mul.Tensor)(graph, half, one), weight))]

    tensors, seeds = [leaf(64, 512), leaf(512, 2), leaf(2)], [torch.randn(64, 2, dtype=torch.float64)]
    found = derivatives_of(body, tensors, seeds, parts=False)
    with torch.no_grad():
        most, peak = (backward_of(one, tensors, seeds, parts=False)[2] / (64 * 512 * 8) for one in found)
    assert 5 < most < 5.2 and 4 <= peak < 4.2
