"""Custom autograd functions that are declared row-wise, with a backward of their own: exact in every layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import Two
from tests.largest import largest
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


@whale.row_wise
class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        places = torch.arange(x.shape[-1], dtype=x.dtype)
        return ((x + places) / step).round() * step - places

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@whale.row_wise(whole=(1,))
class Scaled(torch.autograd.Function):
    """Rows times a weight and their sums, with twice the gradient; one output is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, None, Tensor]:
        ctx.save_for_backward(x, weight)
        return x * weight, None, x.sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradients[0] * weight + gradients[2].unsqueeze(-1), 2 * (gradients[0] * x).sum((0, 1))


class Factor:
    """A constant whose text says nothing of its value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Factor()"


@whale.row_wise
class Times(torch.autograd.Function):
    """Rows times a constant, with the gradient reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Factor) -> Tensor:
        ctx.factor = factor
        return x * factor.value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -gradients[0] * ctx.factor.value, None


TWO, THREE = Factor(2.0), Factor(3.0)
times = Times.apply


class Model(nn.Module):
    count: Tensor

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("count", torch.zeros(()))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.count.add_(1)
        y, nothing, sums = Scaled.apply(self.first(x), self.weight)
        assert nothing is None
        y = Straight.apply(y, 0.25) + sums.unsqueeze(-1)
        y = Times.apply(y, TWO) + times(y.tanh(), THREE)
        return (self.last(y) - x).square().mean()


def batch(rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows + length)
    return torch.randn(rows, length, 6, generator=generator, dtype=torch.float64)


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"": whale.replicate()},
    "split": {"": whale.split()},
    "stages": {"first": whale.stage(), "last": whale.stage()},
}


def train(world: World, kind: str, writes: bool, micro_batches: int) -> float:
    torch.manual_seed(0)
    local = Model(writes).double()
    model = copy.deepcopy(local)
    whale.annotate(model, LAYOUTS[kind])
    made = whale.parallelize(model, (batch(8, 3),), device="cpu", timeout_seconds=20, micro_batches=micro_batches)
    worst = 0.0
    for rows, length in ((8, 3), (8, 5), (8, 4), (5, 3)):
        local.zero_grad()
        made.zero_grad()
        expected = local(batch(rows, length))
        expected.backward()
        found = made.train_step(batch(rows, length))
        worst = largest(worst, abs(found.item() - expected.item()))
        whole = made.full_gradients()
        for name, parameter in local.named_parameters():
            assert parameter.grad is not None
            worst = largest(worst, float((whole[name] - parameter.grad).abs().max()))
    return worst


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_backward_of_its_own_is_kept(ranks: Two, kind: str, micro_batches: int, writes: bool) -> None:
    assert max(ranks.run(train, kind, writes and micro_batches == 1, micro_batches)) < 1e-12


def test_only_functions_can_be_declared() -> None:
    with pytest.raises(whale.WhaleError, match="for subclasses of torch.autograd.Function, not for <function"):
        whale.row_wise(test_only_functions_can_be_declared)  # type: ignore[call-overload]
