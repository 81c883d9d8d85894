"""The bounds of ``whale.verify``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.small_models import decoder, tokens
from whale.api import leaves_beside, tolerance_of
from whale.errors import UsageError
from whale.runtime.module import ParallelModule


@pytest.mark.parametrize(
    ("dtype", "matmul", "precision", "expected"),
    [
        (torch.float64, "highest", None, 1e-9),
        (torch.float32, "highest", None, 1e-4),
        (torch.float32, "high", None, 1e-2),
        (torch.float32, "high", "bf16", 8e-2),
        (torch.float32, "highest", "fp16", 1e-2),
        (torch.bfloat16, "highest", None, 8e-2),
    ],
)
def test_a_tolerance_is_that_of_the_precision_in_which_steps_compute(
    dtype: torch.dtype, matmul: str, precision: str | None, expected: float
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(matmul)
    try:
        assert tolerance_of(nn.Linear(2, 2, dtype=dtype), precision) == expected
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_batch_goes_where_the_model_is() -> None:
    found = leaves_beside(nn.BatchNorm1d(2, affine=False, device="meta"), (torch.ones(2, 2), 3))
    assert [getattr(x, "device", x) for x in found.values()] == [torch.device("meta"), 3]
    assert all(x.device.type == "cpu" for x in leaves_beside(nn.Identity(), tokens()).values())


class Biased(nn.Module):
    """Attention with a bias of keys, whose gradient is zero except for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)), y)


def test_rounding_of_a_gradient_that_is_zero_is_no_difference() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 12, 16), "y": torch.randn(8, 12, 16)}
    report = whale.verify(Biased(), batch, device="cpu", micro_batches=2)
    assert report.passed, report
    assert report.gradients["key.bias"] > 0


def test_gradients_of_before_are_not_compared_and_stay() -> None:
    model = decoder(layers=1)
    batch = tokens()
    for _ in range(2):
        assert whale.verify(model, batch, device="cpu", micro_batches=2).passed
    assert all(x.grad is None for x in model.parameters())
    model(**batch).backward()
    before = [x.grad for x in model.parameters()]
    values = [x.clone() for x in before if x is not None]
    assert whale.verify(model, batch, device="cpu").passed
    assert all(x.grad is y for x, y in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip([x for x in before if x is not None], values, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"compile": True}])
def test_a_model_is_verified_on_a_gpu_with_a_batch_on_the_host(place: str, options: dict[str, Any]) -> None:
    report = whale.verify(decoder(layers=1).to(place), tokens(), **options)
    assert report.passed, report


class Steep(nn.Module):
    """A model of which the loss or a gradient is not finite for some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.steady, self.steep = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
        nn.init.ones_(self.steep.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (self.steady(x).square() + self.steep(x).sqrt()).mean()


@pytest.mark.parametrize(
    ("rows", "named"), [(-1.0, r"the loss \(nan\) of the local"), (0.0, "the gradient of steep.weight of the local")]
)
def test_a_local_step_that_is_not_finite_is_refused(rows: float, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        whale.verify(Steep(), {"x": torch.full((2, 3), rows)}, device="cpu")


def test_a_gradient_that_is_not_a_number_is_no_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = ParallelModule.full_gradients

    def spoilt(self: ParallelModule) -> dict[str, Tensor]:
        return {name: x * (torch.nan if "steep" in name else 1.0) for name, x in gradients(self).items()}

    monkeypatch.setattr(ParallelModule, "full_gradients", spoilt)
    report = whale.verify(Steep(), {"x": torch.ones(2, 3)}, device="cpu")
    assert not report.passed
    assert report.worst == "steep.weight"


class Hollow(nn.Linear):
    """A layer with a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean() + self.none.sum()


def test_a_parameter_without_elements_is_equal() -> None:
    assert whale.verify(Hollow(), {"x": torch.ones(2, 3)}, device="cpu").passed
