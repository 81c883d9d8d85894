"""Compiled kernels: runs of operators as functions compute what the graph does, equal layers share one, and a step of
two ranks with Inductor equals the local step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import whale
from tests.distributed.harness import Ranks
from tests.torch_functions import error_of
from whale.compile import kernels
from whale.runtime.launch import World

LAYERS = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) * 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)}


def errors(annotations: dict[str, Any], **options: Any) -> float:
    """The largest error of the loss and the gradients of two steps."""
    return error_of(Model(), batch(), annotations, compile=True, timeout_seconds=60, **options)


def test_equal_layers_share_their_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[fx.GraphModule] = []

    def note(graph: fx.GraphModule) -> Callable[..., Any]:
        made.append(graph)
        return graph

    monkeypatch.setattr(kernels, "Kernel", note)
    assert errors({}) == 0.0  # the same operators in the same order
    calls = [sum(node.op == "call_function" for node in graph.graph.nodes) for graph in made]
    assert 2 <= len(made) <= 6, calls  # forward and backward: the first layer, those in the middle, the last
    assert min(calls) >= 3


def test_a_function_computes_the_same_for_operands_in_another_layout() -> None:
    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.ops.aten.mm.default(x, weight)
        return y, torch.ops.aten.tanh.default(y)

    graph = fx.symbolic_trace(run)
    kernel, x, weight = kernels.Kernel(graph), torch.randn(4, 8).double(), nn.Parameter(torch.randn(8, 6).double())
    across = torch.randn(8, 4).double().t()
    with torch.no_grad():
        for given in (x, across, x):
            for found, expected in zip(kernel(given, weight), run(given, weight), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
                assert not found.requires_grad


class Spelled(nn.Module):
    """A GELU written out, of which autograd keeps the argument, its half, the tangent, one plus it, and the result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(0.5 * y * (1.0 + torch.tanh(0.8 * (y + 0.04 * y.pow(3))))).square().mean()


def kept_by(compile: bool) -> int:
    """How many tensors of 4 x 64 a forward keeps, memory that is shared once."""
    model = whale.parallelize(Spelled(), batch(), device="cpu", compile=compile)
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.numel() == 4 * 64 and not isinstance(x, nn.Parameter):
            kept[x.untyped_storage()._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.train_step(**batch())
    return len(kept)


def test_fused_forwards_write_what_backwards_cannot_compute_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "Kernel", lambda graph: graph)
    assert kept_by(False) == 5
    assert kept_by(True) == 3
    assert error_of(Spelled(), batch(), {}, compile=True) == 0.0


def errors_of_two(world: World) -> list[float]:
    halves = {f"layers.[{i}-{i + 2}]": whale.stage() for i in (0, 3)}
    return [errors({"": whale.split()}), errors(halves, micro_batches=2, schedule="zero_bubble")]


def test_two_ranks_with_compiled_kernels_equal_the_local_model() -> None:
    with Ranks(2) as ranks:
        for found in ranks.run(errors_of_two, timeout=500):
            assert max(found) < 1e-12
