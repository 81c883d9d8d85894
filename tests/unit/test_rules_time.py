"""Operators that may be divided into micro-batches, and operators that couple the rows of the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.graph.capture import capture
from whale.graph.partition import partition
from whale.strategies.analysis import analyse
from whale.strategies.placing import batch_placeholders
from whale.strategies.sharding import solve_time


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Contrast(nn.Module):
    """Each row against all rows, as CLIP's loss has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.normalize(self.embed(x), dim=-1)
        return F.cross_entropy(rows @ rows.T, torch.arange(x.shape[0]))


def coupled(model: nn.Module, x: Tensor) -> set[str]:
    captured = capture(model, (x,))
    analysis = analyse(captured.graph, batch_placeholders(captured))
    nodes = [node for stage in partition(captured).stages for node in stage.nodes]
    floating = partition(captured).floating
    operands = {value for node in nodes for value in analysis.ops[node].operands}
    free = {value for value in operands if value[0] in floating}
    free |= {v for v in operands if v[0].op == "placeholder" and v[0].name not in captured.parameters}
    _, found = solve_time(analysis, nodes, analysis.batch_factor, frozenset(free))
    return {str(node.target) for node in found}


def test_statistics_of_the_batch_couple_its_rows() -> None:
    model = Net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    images = torch.rand(4, 3, 8, 8)
    assert "aten._native_batch_norm_legit_functional.default" in coupled(model.train(), images)
    assert coupled(model.eval(), images) == set()


@pytest.mark.parametrize(
    "layer",
    [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.PixelShuffle(2)],
)
def test_operators_that_keep_to_a_row_do_not(layer: nn.Module) -> None:
    assert coupled(Net(nn.Conv2d(3, 4, 3, padding=1), layer), torch.rand(4, 3, 8, 8)) == set()


def test_a_contrast_of_rows_couples_them() -> None:
    assert coupled(Contrast(), torch.rand(4, 6)) != set()
