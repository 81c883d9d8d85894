"""Layers that are computed before a stage needs what it receives, as predictions count them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import whale
from tests.solved import solve
from whale.predict.layer_parts import layer_finder
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


class Dropped(nn.Module):
    """Two layers, the first of which ends with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


def layer_of(name: str) -> int:
    return layer_finder(NAMES)(name)


def test_layers_before_the_first_that_reads_a_received_value_are_computed_alone() -> None:
    batch = {"ids": torch.zeros(4, dtype=torch.long), "x": torch.zeros(4, 3)}
    compilation = solve(Model(), batch, {"table": whale.stage(), "": whale.stage()}).compilation
    of_table, rest = (own_layers(compilation.captured, stage, layer_of) for stage in compilation.stages)
    assert of_table == frozenset()  # it receives nothing
    assert [NAMES[layer] for layer in sorted(rest)] == ["bottom.0", "bottom.2"]  # their product is of no layer


def test_layers_that_go_on_with_a_received_value_of_an_operator_with_several_results_are_not_alone() -> None:
    """A dropout, which has its mask as a second result, as at the end of T5's encoder."""
    compilation = solve(Dropped(), {"x": torch.zeros(3, 4)}, {"first": whale.stage(), "": whale.stage()}).compilation
    layer_of = layer_finder(("first", "second"))
    assert not any(own_layers(compilation.captured, stage, layer_of) for stage in compilation.stages)
