"""An all-reduce works in place only if its input has no other reader."""

from __future__ import annotations

import torch
from torch import nn

import whale
from tests.solved import solve, tokens
from tests.unit.test_placements import gpt2
from whale.runtime.collectives import Bridge


def reuses(model: nn.Module, batch: object) -> tuple[list[bool], list[bool]]:
    """For each all-reduce, of values and of gradients, whether it works in place."""
    compilation = solve(model, batch, {"": whale.split()}).compilation
    program = compilation.local_programs(compilation.stages[0], 0, None)[0]
    conversions = [b.conversion for b in program.bridges if isinstance(b, Bridge)]
    return (
        [c.reuse for c in conversions if c.forward_collective == "all_reduce"],
        [c.reuse_gradient for c in conversions if c.backward_collective == "all_reduce"],
    )


def test_sums_of_products_need_no_copy() -> None:
    values, gradients = reuses(gpt2(), tokens(4, 8))
    assert values.count(True) >= 4  # attention and MLP of two layers
    assert gradients == [True] * 5


class PassedOn(nn.Module):
    """A value of which one reader passes its gradient on as it is, to a parameter too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)
        self.shift = nn.Parameter(torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.shift
        return (self.second(torch.relu(self.first(y))) + y).square().sum()


def test_a_gradient_that_others_hold_is_copied() -> None:
    compilation = solve(PassedOn(), (torch.zeros(4, 8),), {"first": whale.split(), "second": whale.split()}).compilation
    shared = []
    for stage in compilation.stages:
        graph = compilation.local_programs(stage, 0, None)[0].micro_batch.code.module
        for node in graph.graph.nodes:
            bridge = graph.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(bridge, Bridge) and any(user.target is torch.ops.aten.add.Tensor for user in node.users):
                shared.append(bridge.conversion.reuse_gradient)
    assert shared and not any(shared)
