"""A stage computes its own part first, and waits for each received value where it is first read."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx, nn

import whale
from tests.solved import solve
from whale.compile.rank_step import rank_step
from whale.runtime.local_program import LocalCode, LocalGraph, wait_for
from whale.strategies.arrivals import own_first

aten = torch.ops.aten
CPU = torch.device("cpu")


class Model(nn.Module):
    """A first stage, and a second one that reads its value before it computes of the batch, if *own*."""

    def __init__(self, own: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 1)
        self.own = own

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        if self.own:
            y = y + self.second(x)
        return ((self.third(y) - labels.sum(1, keepdim=True)) ** 2).mean()


def graphs(model: nn.Module) -> list[list[str]]:
    """The names of operators of the second stage's forwards, without training and with it."""
    batch = {"x": torch.zeros(4, 3), "labels": torch.zeros(4, 2)}
    annotations = {"first": whale.stage(), "": whale.stage()}
    compilation = solve(model, batch, annotations).compilation
    (stage,) = rank_step(compilation, 1, compilation.program(1), None, device=CPU).stages
    (program,) = stage.programs
    assert program.derivative is not None
    return [
        [getattr(node.target, "__name__", str(node.target)).split(".")[0] for node in code.graph.nodes]
        for code in (program.micro_batch.code, program.derivative.forward)
    ]


def test_the_own_part_comes_before_the_wait_and_the_rest_after_it() -> None:
    for names in graphs(Model()):
        wait = names.index("wait_for")
        assert names[wait + 1] == "tanh"
        own = [name for name in names[:wait] if name in ("linear", "addmm")]
        assert len(own) == 1


def test_a_stage_without_parameters_of_its_own_for_the_batch_waits_first() -> None:
    for names in graphs(Model(own=False)):
        assert "wait_for" not in names


def moved(build: list[tuple[object, tuple[str, ...]]]) -> tuple[bool, list[str]]:
    """Whether a graph of calls by name has an own part, and their order afterwards."""
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for name in ("received", "input", "parameter"):
        nodes[name] = graph.placeholder(name)
    for number, (target, used) in enumerate(build):
        nodes[f"n{number}"] = graph.call_function(target, tuple(nodes[name] for name in used), name=f"n{number}")  # type: ignore[arg-type]
    graph.output((nodes[f"n{len(build) - 1}"],))
    sources = [("received", 0), ("input", ("x", ())), ("parameter", "w")]
    found = own_first(LocalGraph(LocalCode(nn.Module(), graph), sources))
    return found, [node.name for node in graph.nodes if node.op == "call_function"]


def test_what_is_computed_of_parameters_alone_stays_where_it_is() -> None:
    late = (aten.sin.default, ("received",))
    cast = (aten.neg.default, ("parameter",))
    own = (aten.mul.Tensor, ("input", "parameter"))
    assert moved([late, cast, own, (aten.add.Tensor, ("n0", "n2"))]) == (True, ["n2", "n0", "n1", "n3"])
    assert moved([late, cast, (aten.add.Tensor, ("n0", "n1"))]) == (False, ["n0", "n1", "n2"])


def test_nothing_passes_an_operator_that_writes() -> None:
    late = (aten.sin.default, ("received",))
    read = (aten.add.Tensor, ("n0", "input"))
    write = (aten.add_.Tensor, ("input", "parameter"))
    after = (aten.mul.Tensor, ("n2", "parameter"))
    assert moved([late, read, write, after])[1] == ["n0", "n1", "n2", "n3"]
    before = (aten.mul.Tensor, ("input", "parameter"))
    assert moved([late, before, (aten.add_.Tensor, ("n1", "parameter"))])[1] == ["n1", "n0", "n2"]


def test_what_draws_random_numbers_keeps_its_order() -> None:
    late = (aten.bernoulli.default, ("received",))
    drawn = (aten.bernoulli.default, ("parameter",))
    own = (aten.mul.Tensor, ("n1", "input"))
    plain = (aten.mul.Tensor, ("parameter", "input"))
    assert moved([late, drawn, own, plain, (operator.add, ("n2", "n3"))])[1] == ["n3", "n0", "n1", "n2", "n4"]


def test_a_wait_returns_nothing_and_calls_what_waits() -> None:
    seen: list[int] = []
    wait_for(seen.append, 3)
    assert seen == [3]
