"""Ranks of a stage that have no row of a micro-batch take part in what the others sum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster


class Biased(nn.Module):
    """Attention of two blocks with one learned bias, which the first makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.bias = nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(torch.arange(4, device=x.device))
        x = F.scaled_dot_product_attention(self.first(x), x, x, attn_mask=bias)
        return F.scaled_dot_product_attention(self.second(x), x, x, attn_mask=bias).square().sum()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_bias_that_crosses_a_boundary_is_summed_by_ranks_without_rows_too(micro_batches: int) -> None:
    """torch's attention returns no gradient of a mask for no rows; rank 3 has none of a micro-batch of two."""
    with torch.device("meta"):
        model, batch = Biased(), {"x": torch.zeros(8, 4, 8)}
    whale.annotate(model, {"first": whale.stage(1), "second": whale.stage(3)})
    options = Options(micro_batches=micro_batches)
    compilation = compile_model(model, batch, Cluster.homogeneous(4), options, device="cpu", training=True)
    for rank in range(4):
        compilation.check(rank, None)
