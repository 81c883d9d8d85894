"""Values that a step computes from buffers alone are made once, and anew when a buffer has other values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)

COMPUTES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a function": lambda x, f: x * f.cos(),
    "a sum": lambda x, f: x * f.exp().sum(),
    "with numbers of rows": lambda x, f: x * (torch.arange(x.shape[0])[:, None] * f).cos(),
    "repeated": lambda x, f: x * f.cos().expand(4, 6),
    "a view": lambda x, f: x * f.view(2, 3).flatten(),
}


class Rotated(nn.Module):
    frequencies: Tensor

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.compute = nn.Linear(6, 6, dtype=torch.float64), compute
        self.register_buffer("frequencies", torch.arange(1.0, 7.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.layer(x), self.frequencies).square().mean()


def written(model: Any) -> None:
    with torch.no_grad():
        model.frequencies.mul_(0.3)


def loaded(model: Any) -> None:
    state = (model.full_state_dict if hasattr(model, "full_state_dict") else model.state_dict)()
    state = {**state, "frequencies": state["frequencies"] * 0.3}
    (model.load_full_state_dict if hasattr(model, "load_full_state_dict") else model.load_state_dict)(state)


@pytest.mark.parametrize("change", [written, loaded])
@pytest.mark.parametrize("what", COMPUTES)
def test_a_buffer_that_is_written_to_acts_at_the_next_step(what: str, change: Callable[[Any], None]) -> None:
    local = Rotated(COMPUTES[what])
    made: Any = whale.parallelize(copy.deepcopy(local), {"x": X}, device="cpu")
    for _ in range(3):
        assert made.train_step(x=X).item() == pytest.approx(local(X).item(), rel=1e-12)
        assert made.eval_step(x=X).item() == pytest.approx(local(X).item(), rel=1e-12)
        change(local)
        change(made)


class Quantized(nn.Module):
    """A codebook that follows what it is given in training, as of a VQ-VAE; distances take its squares."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.register_buffer("codes", torch.randn(5, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        distances = x.square().sum(1, keepdim=True) - 2 * x @ self.codes.T + self.codes.square().sum(1)
        if self.training:
            with torch.no_grad():
                self.codes.mul_(0.9).add_(0.1 * x.mean(0))
        return distances.min(1).values.mean()


def test_an_evaluation_sees_the_buffers_that_training_changed() -> None:
    local = Quantized()
    made: Any = whale.parallelize(copy.deepcopy(local), {"x": X}, device="cpu")
    for _ in range(4):
        for model in (local, made):
            model.eval()
        assert made.eval_step(x=X).item() == pytest.approx(local(X).item(), rel=1e-12)
        for model in (local, made):
            model.train()
        assert made.train_step(x=X).item() == pytest.approx(local(X).item(), rel=1e-12)
