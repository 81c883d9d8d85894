"""Devices of different types in one group: what each would draw or round in its own way is the same on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import whale
from whale import detection
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster, DeviceType
from whale.profiling.places import RankLocation
from whale.runtime import random
from whale.runtime.launch import initialize
from whale.runtime.random import RNGPosition, SeededAttention, SeededCall


def cluster(*names: str) -> Cluster:
    types = [DeviceType.of(name, speed={"float32": 1e12}, memory_bytes=2**34, memory_bandwidth=1e12) for name in names]
    return Cluster.of([("node", type_) for type_ in types])


class OneHead(nn.Module):
    """Attention without a dim of heads, which split ranks compute whole, and a random operator without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)
        x = self.down(torch.relu(self.up(x)))
        return (x + torch.poisson(torch.ones(4))[:, None, None]).square().mean()


def seeded_modules(*names: str) -> list[SeededCall]:
    with torch.device("meta"):
        model = OneHead()
    whale.annotate(model, {"": whale.split()})
    compiled = compile_model(
        model, {"x": torch.zeros(4, 6, 8)}, cluster(*names), Options(), device="cpu", training=True
    )
    (stage,) = compiled.stages
    (program,) = compiled.local_programs(stage, 1, RNGPosition(0))
    graphs = (program.constant, program.step, program.micro_batch)
    return [m for graph in graphs for m in graph.code.root.modules() if isinstance(m, SeededCall)]


def test_what_devices_of_different_types_draw_alike_is_drawn_alike() -> None:
    assert [m.mixed for m in seeded_modules("fast", "slow")] == [True, True]
    assert [m.mixed for m in seeded_modules("fast", "fast")] == [False, False]


@pytest.mark.parametrize("mixed", [False, True])
def test_attention_with_dropout_has_a_kernel_on_gpus_of_one_type(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_generator_of", lambda device: torch.default_generator)
    kernels = []

    def kernel(query: Tensor, *others: Any, **options: Any) -> Tensor:
        kernels.append(query)
        return query.clone()

    call = SeededAttention(kernel, 1, 1, RNGPosition(0), mixed)
    with FakeTensorMode(), torch.no_grad():
        query = torch.empty(2, 3, 4, 8, device="cuda")
        rows = torch.empty(24, dtype=torch.int64, device="cuda")
        assert call(rows, query, query, query, None, 0.5).shape == query.shape
    assert len(kernels) == (0 if mixed else 1)


def test_numbers_without_positions_are_drawn_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.device | None] = []

    def generator_of(device: torch.device | None) -> torch.Generator:
        drawn.append(device)
        return torch.default_generator

    monkeypatch.setattr(random, "_generator_of", generator_of)
    for mixed in (False, True):
        with FakeTensorMode():
            call = SeededCall(torch.ops.aten.poisson.default, 1, RNGPosition(0), mixed)
            assert call(torch.ones(3, device="cuda")).device.type == "cuda"
    assert [str(device) for device in drawn] == ["cuda:0", "cpu"]


def test_copies_are_summed_over_devices_of_different_types_alone() -> None:
    def ranks_of_sums(*names: str) -> set[tuple[int, ...]]:
        with torch.device("meta"):
            model = OneHead().eval()
        whale.annotate(model, {"": whale.split()})
        batch = {"x": torch.zeros(4, 6, 8)}
        compiled = compile_model(model, batch, cluster(*names), Options(), device="cpu", training=False)
        return {spec.ranks for spec in compiled.reduces}

    assert ranks_of_sums("fast", "slow") == {(0, 1)}
    assert ranks_of_sums("fast", "fast") == set()


def test_devices_of_a_launch_are_detected_where_they_are_of_different_types(monkeypatch: pytest.MonkeyPatch) -> None:
    def places(*names: str) -> list[RankLocation]:
        return [RankLocation(rank=r, device_type=n, node="n", memory_bytes=24 * 2**30) for r, n in enumerate(names)]

    world = initialize(device_type="cpu")
    monkeypatch.setattr(detection, "places_of", lambda *ignored: places("L4", "L4"))
    assert detection.detect_unlike(world) is None
    monkeypatch.setattr(detection, "places_of", lambda *ignored: places("L4", "RTX3090"))
    found = detection.detect_unlike(world)
    assert found is not None
    assert [device.type.name for device in found.devices] == ["L4", "RTX3090"]
