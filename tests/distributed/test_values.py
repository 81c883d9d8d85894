"""Values of every sort between stages: integers, bools, frozen, relayed, views, and outputs that only weights reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.harness import Ranks
from whale.ir.check import check_programs
from whale.ir.program import Edge, Shape, StageSpec, Transfer, project
from whale.planner.schedules.orders import schedule_order
from whale.runtime.by_autograd import ByAutograd
from whale.runtime.executor import Executor
from whale.runtime.launch import World

MICRO_BATCHES = 3
ROWS = 4
BATCH = torch.arange(MICRO_BATCHES * ROWS * 4, dtype=torch.float64).view(MICRO_BATCHES, ROWS, 4) / 30

VALUES: list[tuple[str, int, int, bool, str, Shape]] = [
    ("h", 0, 1, True, "float64", (ROWS, 4)),
    ("ids", 0, 1, False, "int64", (ROWS,)),
    ("mask", 0, 2, False, "bool", (ROWS, 4)),
    ("frozen", 0, 1, False, "float64", (ROWS, 4)),
    ("scale", 0, 2, True, "float64", ()),
    ("g", 1, 2, True, "float64", (4, ROWS)),
    ("table", 1, 2, True, "float64", (4, 4)),
    ("relayed", 1, 2, True, "float64", (ROWS, 4)),
    ("unused", 1, 2, True, "float64", (ROWS, 4)),
]


class Source(nn.Module):
    outputs = ("h", "ids", "mask", "frozen", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4, dtype=torch.float64) + 0.1)
        self.s = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)

    def forward(self, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = BATCH[micro_batch]
        return torch.tanh(x @ self.w), torch.arange(ROWS).flip(0), x > 0.5, x * self.fixed, self.s * 2


class Middle(nn.Module):
    """The weight is read on the way from the input, and by an output that no input reaches; two outputs are views."""

    outputs = ("g", "table", "relayed", "unused")

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(16, dtype=torch.float64).view(4, 4) / 10)

    def forward(self, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h, ids, frozen = received
        hidden = torch.tanh(h[ids] @ self.w + frozen) @ self.w
        return hidden.t(), (self.w * 2).t(), h, hidden * 3


class Sink(nn.Module):
    outputs = ("loss",)

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), 0.3, dtype=torch.float64))

    def forward(self, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mask, scale, g, table, relayed, _ = received
        return ((((g.t() @ table) * mask + relayed) * self.w * scale).square().sum(),)


class AsStage:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.outputs: tuple[str, ...] = module.outputs  # type: ignore[assignment]
        self.parameters = tuple(module.parameters())

    def forward(self, micro_batch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.module(micro_batch, received)


def modules() -> list[nn.Module]:
    return [Source(), Middle(), Sink()]


def local() -> tuple[Tensor, dict[str, Tensor]]:
    source, middle, sink = layers = modules()
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in range(MICRO_BATCHES):
        h, ids, mask, frozen, scale = source(micro_batch, ())
        g, table, relayed, unused = middle(micro_batch, (h, ids, frozen))
        total = total + sink(micro_batch, (mask, scale, g, table, relayed, unused))[0]
    total.backward()
    return total.detach(), gradients(layers)


def gradients(layers: list[nn.Module]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in nn.ModuleList(layers).named_parameters() if p.grad is not None}


def edge(index: int, ranks: tuple[int, ...]) -> Edge:
    name, source, target, needs_grad, dtype, shape = VALUES[index]
    box = tuple((0, extent) for extent in shape)
    there = (Transfer(ranks[source], ranks[target], box, box),)
    back = (Transfer(ranks[target], ranks[source], box, box),) if needs_grad else ()
    return Edge(
        index=index,
        value=name,
        source_stage=source,
        target_stage=target,
        needs_grad=needs_grad,
        dtype=dtype,
        forward=(there,) * MICRO_BATCHES,
        backward=(back,) * MICRO_BATCHES,
        source_shapes=({ranks[source]: shape},) * MICRO_BATCHES,
        target_shapes=({ranks[target]: shape},) * MICRO_BATCHES,
    )


def train(world: World, ranks: tuple[int, ...], name: str, dtype_of_h: str) -> tuple[Tensor | None, dict[str, Tensor]]:
    stages = [StageSpec(index=i, ranks=(rank,)) for i, rank in enumerate(ranks)]
    edges = [edge(index, ranks) for index in range(len(VALUES))]
    order = schedule_order(name, 3, MICRO_BATCHES, [frozenset(stage.ranks) for stage in stages])
    programs = project(order, stages, edges)
    check_programs(programs, stages, edges, order=order)
    layers = modules()
    if dtype_of_h != "float64":
        layers[0].to(getattr(torch, dtype_of_h))
        layers[0].forward = lambda *args: (torch.zeros(ROWS, 4),) * 5
    executor = Executor(
        rank=world.rank,
        program=programs.get(world.rank, ()),
        edges=edges,
        stages={i: ByAutograd(AsStage(layer)) for i, layer in enumerate(layers) if ranks[i] == world.rank},
        failures=world.failures,
    )
    return executor.run(train=True), gradients(layers)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("placed", [(0, 1, 2), (0, 1, 0), (1, 1, 0), (2, 2, 2)])
def test_every_sort_of_value_arrives_and_gets_its_gradient(ranks: Ranks, placed: tuple[int, ...], name: str) -> None:
    loss, expected = local()
    results = ranks.run(train, placed, name, "float64")
    torch.testing.assert_close(sum(value for value, _ in results if value is not None), loss, rtol=1e-12, atol=0)
    got = {key: value for _, own in results for key, value in own.items()}
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-12)


def test_a_value_of_another_type_than_planned_is_named_and_not_sent() -> None:
    with Ranks(3, timeout_seconds=3) as ranks:
        outcomes = ranks.outcomes(train, (0, 1, 2), "1f1b", "float32")
    reason = "ScheduleError: value 'h' is torch.float32 (4, 4), but the plan says float64 (4, 4)"
    assert outcomes[0].error == reason
    assert "rank 0 failed in task 0F0 (stage 0, micro-batch 0): " + reason in outcomes[2].error
