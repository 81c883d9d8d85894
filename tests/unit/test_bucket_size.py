"""Buckets of gradients are as large as the links of their ranks ask for, equally wherever their size is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.compile.placed_like import placed_like
from whale.compile.trace import trace
from whale.ir.cluster import Cluster, Link
from whale.ir.program import BUCKET_BYTES
from whale.ir.state import StateSharding
from whale.planner.catalog import device_types
from whale.planner.cost.buckets import LARGEST_BUCKET_BYTES, TRANSFERS, bucket_bytes
from whale.planner.cost.stage import CostModel
from whale.planner.network.communication import collective
from whale.planner.network.topology import Topology
from whale.strategies.profile import profile_model

A100 = device_types()["A100-SXM4-80GB"]
FAST, SLOW = Link(bandwidth=300e9, latency=3e-6), Link(bandwidth=3e9, latency=3e-5)
WIDTH, LAYERS = 512, 40


def two(intra: Link | None) -> Cluster:
    return Cluster.homogeneous(2, A100, intra=intra)


class Deep(nn.Module):
    """Layers whose matrices have 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


def compiled(cluster: Cluster, **options: Any) -> Compilation:
    with torch.device("meta"):
        model = Deep()
    whale.annotate(model, {"": whale.replicate()})
    batch = {"x": torch.randn(4, WIDTH)}
    return compile_model(model, batch, cluster, Options(**options), device="cpu", training=True)


def test_fast_links_have_large_buckets_and_slow_or_unknown_ones_the_least() -> None:
    sizes = [len(names) for names in compiled(two(FAST)).bucket_parameters]
    assert sizes == [32, 8] or sizes == [40]
    for link in (SLOW, None):
        assert {len(names) for names in compiled(two(link)).bucket_parameters} == {4}


def test_slow_nodes_decide_for_groups_that_span_them() -> None:
    cluster = Cluster.homogeneous(4, A100, num_devices_per_node=2, intra=FAST, inter=SLOW)
    topology = Topology.of(cluster)
    within, between = (bucket_bytes(topology, ranks) for ranks in ((0, 1), (0, 2)))
    assert within > between == BUCKET_BYTES


def test_processors_of_a_node_have_large_buckets_where_none_has_to_be_held_apart() -> None:
    processors = [("here", replace(A100, name="cpu")), ("here", replace(A100, name="cpu-50"))]
    topology = Topology.of(Cluster.of(processors, intra=SLOW))
    assert bucket_bytes(topology, (0, 1)) > bucket_bytes(topology, (0, 1), divided=True) == BUCKET_BYTES
    apart = Topology.of(Cluster.of([("here", processors[0][1]), ("there", processors[1][1])], inter=SLOW))
    assert bucket_bytes(apart, (0, 1)) == BUCKET_BYTES


@pytest.mark.parametrize("bandwidth", [1e8, 1e10, 1e11, 1e13])
def test_a_bucket_is_neither_all_latency_nor_larger_than_that_asks_for(bandwidth: float) -> None:
    topology = Topology.of(two(Link(bandwidth=bandwidth, latency=3e-6)))
    size = bucket_bytes(topology, (0, 1))
    latency = collective(topology, "all_reduce", (0, 1), 1).latency
    transfer = collective(topology, "all_reduce", (0, 1), size).transfer
    assert size == LARGEST_BUCKET_BYTES or transfer >= TRANSFERS * latency
    assert size == BUCKET_BYTES or transfer < 2.01 * TRANSFERS * latency


@pytest.mark.parametrize("link", [FAST, SLOW])
def test_the_cost_model_counts_the_messages_that_the_program_has(link: Link) -> None:
    cluster = two(link)
    compilation = compiled(cluster)
    prices = CostModel.of(profile_model(Deep(), {"x": torch.randn(4, WIDTH)}, tensor_degrees=(1,)), cluster)
    num_bytes = LAYERS * WIDTH * WIDTH * 4
    messages = num_bytes / prices.message_bytes((0, 1), num_bytes, 1)
    assert round(messages) == len(compilation.reduces)


def test_a_later_batch_and_a_division_of_state_keep_the_size() -> None:
    first = compiled(two(FAST))
    with torch.device("meta"):
        model = Deep()
    whale.annotate(model, {"": whale.replicate()})
    longer = trace(model, {"x": torch.randn(8, WIDTH)}, device="cpu", training=True)
    later = placed_like(first, longer, (8,))
    assert later is not None and later.bucket_parameters == first.bucket_parameters
    divided = compiled(two(FAST), state=StateSharding(level=1))
    assert divided.bucket_parameters == first.bucket_parameters


class Normed(nn.Module):
    """Layers of a norm and a matrix of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).relu()
        return x.square().mean()


def test_buckets_of_other_ranks_do_not_wait_for_one_that_is_ready_last() -> None:
    with torch.device("meta"):
        model = Normed()
    whale.annotate(model, {"": whale.replicate(4), "layers.*": [whale.replicate(2), whale.split(2)]})
    cluster = Cluster.homogeneous(4, A100, intra=SLOW)
    compilation = compile_model(
        model, {"x": torch.randn(4, WIDTH)}, cluster, Options(state=StateSharding(3)), device="cpu", training=True
    )
    assert {len(spec.ranks) for spec in compilation.reduces} == {2, 4}
    both = zip(compilation.reduces, compilation.bucket_parameters, strict=True)
    *matrices, norms = [names for spec, names in both if 0 in spec.ranks]
    assert all(name.startswith("norms.") for name in norms)  # one bucket for all: complete when the backward ends
    first = [min(int(name.split(".")[1]) for name in names) for names in matrices]
    assert len(first) > 1
    assert first == sorted(first, reverse=True)
