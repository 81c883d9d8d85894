"""Ranks of a stage that have no row of a micro-batch take part in what the others sum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from whale.cli.model_loader import load_model
from whale.commands.candidates import CandidateCompiler
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster
from whale.planner.catalog import device_types


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


def test_ranks_without_rows_send_no_gradients_of_what_only_decides() -> None:
    """A router takes each token's largest gate, of which there is no gradient; one of three rows is one rank's of
    two."""
    sizes = {"layers": 1, "hidden": 1600, "ffn": 3200, "heads": 20, "experts": 6, "seq": 1024, "vocab": 512}
    loaded = load_model("examples/models/gshard.py:gshard", sizes, batch_size=3, device="meta")
    trial = CandidateCompiler(loaded.model, loaded.batch, name="router", options=Options())
    cluster = Cluster.homogeneous(5, device_types()["A100-SXM4-80GB"])
    both = [whale.replicate(2), whale.split(2)]
    annotations = {"tokens": [whale.stage(1)], "layers.0": [whale.stage(4), *both], "": both}
    compilation = trial.compile_annotated(annotations, cluster, rows=3, micro_batches=1)
    for rank in range(5):
        compilation.check(rank, None)
