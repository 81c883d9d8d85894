"""A rank that gets no row of a micro-batch: it runs nothing, and the step is still the local one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests.distributed.harness import Ranks


class Picture(nn.Module):
    """Operators that refuse tensors without rows: convolution and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x).flatten(1)), y)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as running:
        yield running


def _last_batch_of_three(world: Any) -> tuple[float, float]:
    torch.manual_seed(0)
    model = Picture().double().eval()
    batch = {"x": torch.randn(4, 3, 8, 8, dtype=torch.float64), "y": torch.tensor([0, 1, 2, 3])}
    last = {name: value[:3] for name, value in batch.items()}
    local = copy.deepcopy(model)
    expected = local(**last)
    expected.backward()
    whale.annotate(model, {"": whale.replicate()})
    parallel = whale.parallelize(model, batch, micro_batches=2, device="cpu")
    loss = parallel.train_step(**last)  # micro-batches of two rows and of one, which only the first replica has
    found = parallel.full_gradients()
    errors = [(found[n] - p.grad).abs().max().item() for n, p in local.named_parameters() if p.grad is not None]
    return abs(loss.item() - expected.item()), max(errors)


def test_a_replica_without_a_row_of_the_last_micro_batch(ranks: Ranks) -> None:
    for loss_error, gradient_error in ranks.run(_last_batch_of_three):
        assert loss_error <= 1e-12
        assert gradient_error <= 1e-12
