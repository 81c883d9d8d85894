"""Numbers among the arguments of a step: one step for all values where the model only computes with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import whale

X = torch.linspace(-1, 1, 12).view(4, 3)

COMPUTES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a temperature": lambda x, t: (x / t).logsumexp(-1).sum(),
    "a weight of the loss": lambda x, t: t * x.sum(),
    "arithmetic": lambda x, t: (x * (1 - t) + 3 * t**2 - -t / 2).sum(),
    "a threshold": lambda x, t: torch.where(x > t, x, t).masked_fill(x < -0.9, t).sum(),
    "a power": lambda x, t: (x.abs() ** t).sum(),
    "of integers": lambda x, t: x.sum() * (torch.arange(3) * t).sum(),
}
CONSTANTS_BEFORE = {"arithmetic", "a power"}
"""Powers of symbolic numbers, which torch captures from 2.13 on."""
DECIDES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a comparison": lambda x, t: x.sum() * (2 if t > 0.35 else 1),
    "a type": lambda x, t: x.sum() * t * (2 if isinstance(t, float) else 1),
    "math": lambda x, t: x.sum() * math.exp(t),
    "another dtype": lambda x, t: (x.bfloat16() * t).float().sum(),
}


class Model(nn.Module):
    def __init__(self, compute: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.compute = nn.Linear(3, 3), compute

    def forward(self, x: Tensor, t: float) -> Tensor:
        return self.compute(self.linear(x), t)


def run(compute: Callable[[Tensor, float], Tensor], dtype: torch.dtype = torch.float32) -> int:
    """The number of steps that are compiled for four values."""
    model, x = Model(compute).to(dtype), X.to(dtype)
    local = copy.deepcopy(model)
    made: Any = whale.parallelize(model, {"x": x, "t": 0.3}, device="cpu")
    close = 1e-5 if dtype == torch.float32 else 1e-12
    for t in (0.3, 0.4, 0.5, 0.2):
        expected = local(x, t)
        expected.backward()
        found = made.train_step(x=x, t=t)
        assert found.dtype == expected.dtype
        assert found.item() == pytest.approx(expected.item(), rel=close, abs=close)
    gradients = made.full_gradients()
    for name, parameter in local.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name], parameter.grad, rtol=close, atol=close)
    return len(made._whale.engine.steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("what", COMPUTES)
def test_a_number_that_is_computed_with_needs_one_more_step(what: str, dtype: torch.dtype) -> None:
    constant = what in CONSTANTS_BEFORE and torch.__version__ < TorchVersion("2.13")
    assert run(COMPUTES[what], dtype) == (4 if constant else 2)


@pytest.mark.parametrize("what", DECIDES)
def test_a_number_that_decides_more_stays_a_constant(what: str) -> None:
    assert run(DECIDES[what]) == 4
