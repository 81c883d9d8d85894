"""The bounds of ``whale.verify``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from whale.api import tolerance_of


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
