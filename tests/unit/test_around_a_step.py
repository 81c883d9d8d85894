"""Modes of autograd that a script sets around a step: they act, or the step is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import whale
from tests.small_models import decoder, tokens


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).abs().sqrt()).sum()


def parallel() -> Any:
    torch.manual_seed(0)
    return whale.parallelize(Model(), {"x": torch.ones(2, 4)}, device="cpu")


def test_a_gradient_that_is_not_a_number_is_found_with_its_operator_and_module() -> None:
    model = parallel()
    for parameter in model.first.parameters():
        nn.init.zeros_(parameter)  # the root of 0 has an infinite slope, and the absolute value none: 0 * inf
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(RuntimeError, match=r"in the backward of abs.* returned nan"),
    ):
        model.train_step(x=torch.ones(2, 4))
    loss = model.train_step(x=torch.ones(2, 4))
    assert loss.isfinite()


def test_an_optimizer_of_another_model_has_parameters_whose_shapes_are_not_known_yet() -> None:
    model = parallel()
    other = nn.LazyLinear(8)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(2, 3)).sum().backward()
    before = other.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(other.weight, before)
    assert model.train_step(x=torch.ones(2, 4)).isfinite()


def test_anomaly_detection_changes_no_number() -> None:
    losses, gradients = [], []
    for detects in (False, True):
        model = parallel()
        with torch.autograd.set_detect_anomaly(detects):
            losses.append(model.train_step(x=torch.ones(2, 4)).item())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_hooks_of_saved_tensors_see_what_a_step_keeps() -> None:
    packed: list[Tensor] = []

    def pack(x: Tensor) -> tuple[int]:
        packed.append(x)
        return (len(packed) - 1,)

    plain, model = parallel(), parallel()
    expected = plain.train_step(x=torch.ones(2, 4)).item()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index[0]]):
        assert model.train_step(x=torch.ones(2, 4)).item() == expected
    assert len(packed) >= 3
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_norm_of_gradients_takes_as_many_operators_for_any_number_of_them() -> None:
    counts = []
    for layers in (1, 6):
        model = whale.parallelize(decoder(layers=layers), tokens(), device="cpu")
        model.train_step(**tokens())
        with Operators() as mode:
            model._whale.engine.gradient_norm()
        counts.append(mode.count)
    assert counts[0] == counts[1]
