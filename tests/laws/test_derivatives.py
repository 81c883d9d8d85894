"""The derivative of a local graph against autograd, bit for bit: of every operator that has a rule, and of graphs in
which values are read several times, alias each other, or lead nowhere."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tests.operator_samples import samples
from whale.ir.placement import Placement
from whale.runtime.collectives import Bridge, Conversion, Exchange
from whale.runtime.local_program import Derivative, LocalCode, LocalGraph
from whale.strategies import differentiation
from whale.strategies.differentiation import differentiated
from whale.strategies.split_backward import split
from whale.strategies.traced_call import fake_like, traced

aten = torch.ops.aten
SAMPLES = list(samples())


NOT_REVERSED = {"view_as_complex.default", "take_along_dim.default", "max_unpool2d.default", "max_unpool3d.default"}

REFUSED = {"one_hot.default(4x3)", "index.Tensor(4x6,[None,6])"}
"""Calls whose shapes depend on values: a capture refuses them."""

TOLERANCE = {"masked_fill.Tensor": 1e-14, "prod.dim_int": 1e-14}
"""Operators for which autograd has another formula, of the same value, for tensors without data."""


def name_of(sample: Any) -> str:
    return str(sample).partition("(")[0]


class Sink:
    """Notes gradients by placeholder."""

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def add(self, number: int, gradient: Tensor) -> None:
        assert number not in self.found
        self.found[number] = gradient


def graph_of(tensors: Sequence[Tensor], body: Callable[..., Any], *, received: Sequence[int] = ()) -> LocalGraph:
    """A local graph whose placeholders are these tensors, some of them received; *body* writes it."""
    graph = fx.Graph()
    places = [graph.placeholder(f"x_{i}") for i in range(len(tensors))]
    graph.output(tuple(body(graph, *places)))
    order = list(received)
    sources = [
        ("received", order.index(i)) if i in order else ("parameter" if x.requires_grad else "buffer", str(i))
        for i, x in enumerate(tensors)
    ]
    return LocalGraph(LocalCode(nn.Module(), graph), sources)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, in memory in another order."""
    if layout == "reversed" and x.dim() > 1:
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    return x.contiguous()


def run(derivative: Derivative, tensors: Sequence[Tensor], seeds: Sequence[Tensor | None], parts: bool) -> Any:
    """Results and gradients by placeholder."""
    with torch.no_grad():
        found = derivative.forward(*tensors)
        kept, sink = found[derivative.num_results :], Sink()

        def backward(graph: LocalGraph, passed: Sequence[Any] = ()) -> Any:
            given = {"kept": kept, "argument": tensors, "seed": seeds, "passed": passed}
            arguments = [sink, *(given[kind][what] for kind, what in graph.sources)]
            return graph.code.function(graph.code.root, arguments)

        if parts:
            halves = split(derivative).split
            assert halves is not None
            made = backward(halves.inputs)
            assert not sink.found
            backward(halves.weights, made[halves.num_gradients :])
            made = made[: halves.num_gradients]
        else:
            made = backward(derivative.backward)
    return found[: derivative.num_results], sink.found, made


def check(
    graph: LocalGraph,
    tensors: Sequence[Tensor],
    layout: str = "contiguous",
    *,
    parts: bool = False,
    tolerance: float = 0.0,
) -> Derivative:
    """Compare with autograd; return the derivative."""
    tensors = [laid_out(x.detach(), layout).requires_grad_(x.requires_grad) for x in tensors]
    torch.manual_seed(0)
    outputs = graph.code.once(*tensors)
    generator = torch.Generator().manual_seed(1)
    seeds: list[Tensor | None] = []
    for x in outputs:
        grad = isinstance(x, Tensor) and x.requires_grad
        seed = torch.randn(x.shape, dtype=x.dtype, generator=generator) if grad else None
        seeds.append(None if seed is None else laid_out(seed, layout))
    wanted = [x for x in tensors if x.requires_grad]
    ends = [(x, seed) for x, seed in zip(outputs, seeds, strict=True) if seed is not None]
    expected: list[Tensor | None] = [None] * len(wanted)
    if ends and wanted:
        expected = list(
            torch.autograd.grad([x for x, _ in ends], wanted, [seed for _, seed in ends], allow_unused=True)
        )

    def blank(x: Tensor) -> Tensor:
        return fake_like(x.shape, x.dtype, x.device, strides=x.stride(), requires_grad=x.requires_grad)

    likes = [None if seed is None else blank(seed) for seed in seeds]
    derivative = differentiated(graph, [blank(x) for x in tensors], len(outputs), likes)
    before = [x.detach().clone() for x in tensors]
    torch.manual_seed(0)
    results, gradients, made = run(derivative, tensors, seeds, parts)
    for got, want in zip(results, outputs, strict=True):
        if isinstance(want, Tensor):
            assert_same(got, want.detach())
    numbers = [i for i, x in enumerate(tensors) if x.requires_grad]
    for number, want in zip(numbers, expected, strict=True):
        kind, what = graph.sources[number]
        got = gradients.get(number) if kind == "parameter" else made[what] if what < len(made) else None
        if want is None:
            assert got is None or not got.any()
        else:
            assert got is not None
            assert_same(got, want, tolerance)
            if kind == "parameter":
                assert layout != "contiguous" or got.stride() == tensors[number].stride() or got.numel() < 2
    assert len({x.untyped_storage().data_ptr() for x in gradients.values() if x.numel()}) == sum(
        x.numel() > 0 for x in gradients.values()
    ), "two gradients share memory"
    for x, old in zip(tensors, before, strict=True):
        assert_same(x.detach(), old)
    return derivative


def assert_same(got: Tensor, want: Tensor, tolerance: float = 0.0) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


CASES = [
    pytest.param(number, layout, id=f"{sample}-{layout}")
    for number, sample in enumerate(SAMPLES)
    for layout in ("contiguous", "reversed")
    if "empty" not in name_of(sample) and not (layout == "reversed" and name_of(sample) in NOT_REVERSED)
]
"""All but tensors of any values, and layouts that an operator refuses."""


@pytest.mark.parametrize(("number", "layout"), CASES)
def test_the_derivative_of_an_operator_is_that_of_autograd(number: int, layout: str) -> None:
    sample = SAMPLES[number]
    tensors: list[Tensor] = []

    def body(graph: fx.Graph, *places: fx.Node) -> list[fx.Node]:
        found = iter(places)
        args, kwargs = torch.utils._pytree.tree_map(
            lambda a: next(found) if isinstance(a, Tensor) else a, (list(sample.args), sample.kwargs)
        )
        node = graph.call_function(sample.target, tuple(args), kwargs)
        result = sample.target(*sample.args, **sample.kwargs)
        if isinstance(result, Tensor):
            return [node]
        picked = [i for i, x in enumerate(result) if isinstance(x, Tensor) and i not in sample.scratch]
        return [graph.call_function(operator.getitem, (node, i)) for i in picked]

    tensors = [a for a in torch.utils._pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(a, Tensor)]
    graph = graph_of(tensors, body)
    if str(sample) in REFUSED:
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            check(graph, tensors, layout)
    else:
        check(graph, tensors, layout, tolerance=TOLERANCE.get(name_of(sample), 0.0))


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def two_equal_gradients(graph: fx.Graph, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    return [graph.call_function(aten.add.Tensor, (a, b))]


def read_thrice(graph: fx.Graph, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    first = graph.call_function(aten.mul.Tensor, (a, b))
    second = graph.call_function(aten.sin.default, (a,))
    third = graph.call_function(aten.mm.default, (first, second))
    return [graph.call_function(aten.add.Tensor, (third, a)), third]


def by_itself(graph: fx.Graph, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    square = graph.call_function(aten.mul.Tensor, (a, a))
    return [graph.call_function(aten.mm.default, (square, b)), square, square]


def views_and_parts(graph: fx.Graph, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    turned = graph.call_function(aten.transpose.int, (a, 0, 1))
    parts = graph.call_function(aten.split.Tensor, (turned, 2))
    first, second = (graph.call_function(operator.getitem, (parts, i)) for i in range(2))
    return [graph.call_function(aten.mm.default, (first, b)), graph.call_function(aten.exp.default, (second,))]


def unused_and_untrained(graph: fx.Graph, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    parts = graph.call_function(aten.var_mean.correction, (a,), {"dim": [0]})
    graph.call_function(aten.mul.Tensor, (a, b))
    mean = graph.call_function(operator.getitem, (parts, 1))
    cut = graph.call_function(aten.detach.default, (b,))
    return [graph.call_function(aten.mul.Tensor, (mean, cut))]


def itself(graph: fx.Graph, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    return [a, graph.call_function(aten.mm.default, (a, b))]


BODIES = [two_equal_gradients, read_thrice, by_itself, views_and_parts, unused_and_untrained, itself]


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("received", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_derivative_of_a_graph_is_that_of_autograd(
    body: Callable[..., Any], received: tuple[int, ...], parts: bool
) -> None:
    tensors = [leaf(4, 4), leaf(4, 4).mul(2).detach().requires_grad_()]
    check(graph_of(tensors, body, received=received), tensors, parts=parts)


def test_equal_operators_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def noted(call: Any, *given: Any) -> Any:
        calls.append(call)
        return traced(call, *given)

    monkeypatch.setattr(differentiation, "traced", noted)

    def chain(graph: fx.Graph, a: fx.Node, *weights: fx.Node) -> list[fx.Node]:
        for w in weights:
            a = graph.call_function(aten.tanh.default, (graph.call_function(aten.linear.default, (a, w)),))
        return [a]

    tensors = [leaf(3, 7), *(leaf(7, 7) for _ in range(6))]
    check(graph_of(tensors, chain, received=(0,)), tensors)
    assert len(calls) <= 3  # a linear, a tanh, and the last tanh, whose gradient is given


def test_equal_bridges_are_traced_once_and_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return traced(*given)

    monkeypatch.setattr(differentiation, "traced", counted)
    summed = Conversion(Placement("P"), Placement("R"), None, None, (0, 1), 0)
    x = fake_like((3, 4), torch.float64, torch.device("cpu"), requires_grad=True)
    root, graph = nn.Module(), fx.Graph()
    place = graph.placeholder("x")
    for name in ("first", "second"):
        root.add_module(name, Bridge(summed, name))
        place = graph.call_module(name, (place,))
    graph.output((place,))
    found = differentiated(LocalGraph(LocalCode(root, graph), [("parameter", "x")]), [x], 1, [x.detach()])
    modules = [*found.forward.root.children(), *found.backward.code.root.children()]
    assert [one.value for one in modules if isinstance(one, Exchange)] == ["first", "second"]
    assert len(calls) == 1
