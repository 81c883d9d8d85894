"""Layers that are computed before a stage needs what it receives, as predictions count them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import whale
from tests.solved import solve
from whale.predict.own_part import own_layers


class Model(nn.Module):
    """A table, layers of the batch alone, one that goes on with what was looked up, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.bottom = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
        self.top = nn.Linear(4, 1)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return (self.top(self.bottom(x) * self.table(ids)) ** 2).mean()


NAMES = ("table", "bottom.0", "bottom.2", "top")


def layer_of(name: str) -> int:
    return NAMES.index(name.rpartition(".")[0])


def test_layers_before_the_first_that_reads_a_received_value_are_computed_alone() -> None:
    batch = {"ids": torch.zeros(4, dtype=torch.long), "x": torch.zeros(4, 3)}
    compilation = solve(Model(), batch, {"table": whale.stage(), "": whale.stage()}).compilation
    of_table, rest = (own_layers(compilation.captured, stage, layer_of) for stage in compilation.stages)
    assert of_table == frozenset()  # it receives nothing
    assert [NAMES[layer] for layer in rest] == ["bottom.0"]  # the second one's product is with what was looked up
