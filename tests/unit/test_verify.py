"""The bounds of ``whale.verify``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests.small_models import decoder, tokens
from whale.api import leaves_beside, tolerance_of


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"compile": True}])
def test_a_model_on_a_gpu_is_verified_with_a_batch_on_the_host(options: dict[str, Any]) -> None:
    report = whale.verify(decoder(layers=1).cuda(), tokens(), **options)
    assert report.passed, report
