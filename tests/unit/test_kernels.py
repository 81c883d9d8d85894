"""Kernels of Inductor: what was compiled is kept on disk, for other ranks and later runs."""

from __future__ import annotations

import random

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from whale.compile.kernels import Kernel


def graph(rows: int, factor: float) -> tuple[fx.GraphModule, tuple[Tensor, Tensor]]:
    """A graph with a factor in it, and its operands."""
    operands = torch.randn(rows, 8), torch.randn(8)
    return make_fx(lambda x, y: (torch.tanh(x * factor) + y).sum(0))(*operands), operands


def test_a_graph_is_compiled_once_and_again_for_other_sizes() -> None:
    factor = random.SystemRandom().random()  # no earlier run has compiled this one, whatever its seed
    found = []
    for rows in (4, 4, 6):
        code, (x, y) = graph(rows, factor)
        before = counted()
        torch.testing.assert_close(Kernel(code)(x, y), (torch.tanh(x * factor) + y).sum(0))
        found.append([after - one for after, one in zip(counted(), before, strict=True)])
    assert found == [[1, 0], [0, 1], [1, 0]]


def counted() -> list[int]:
    """Graphs that Inductor compiled, and those that it took from disk."""
    return [counters["inductor"][name] for name in ("fxgraph_cache_miss", "fxgraph_cache_hit")]
