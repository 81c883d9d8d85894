"""Communicators of NCCL take memory on the ranks that have them: it is part of what a compiled step needs."""

from __future__ import annotations

from typing import Any

import pytest

import whale
from tests.small_models import decoder, tokens
from whale.compile.compilation import Compilation
from whale.compile.compile import Options, compile_model
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.planner.catalog import device_types
from whale.planner.cost.memory import FRAMEWORK_BYTES, communicator_bytes, framework_bytes
from whale.predict.device_memory import bytes_of_communicators
from whale.predict.prediction import predicted_memory

A100 = device_types()["A100-SXM4-80GB"]
SLOW = Link(bandwidth=3e9, latency=3e-5)


def compiled(cluster: Cluster, annotations: dict[str, Any], layers: int = 2, **options: Any) -> Compilation:
    model = decoder(layers=layers)
    whale.annotate(model, annotations)
    return compile_model(model.to("meta"), tokens(), cluster, Options(**options), device="cpu", training=True)


def of_a100(num: int, per_node: int | None = None) -> Cluster:
    return Cluster.homogeneous(num, A100, num_devices_per_node=per_node, intra=A100.intra_node, inter=SLOW)


def test_a_group_of_two_gpus_takes_what_was_measured_and_does_not_grow_with_ranks_beyond() -> None:
    bandwidth = A100.intra_node.bandwidth if A100.intra_node else 0.0
    sizes = [communicator_bytes(bandwidth, num) for num in (2, 4, 64)]
    assert sizes == [pytest.approx(544e6), pytest.approx(688e6), pytest.approx(688e6)]
    assert communicator_bytes(SLOW.bandwidth, 64) < sizes[0] / 5


def test_each_group_of_a_rank_counts_and_those_of_other_ranks_do_not() -> None:
    one = bytes_of_communicators(compiled(of_a100(4), {"": whale.replicate()}))
    assert one == dict.fromkeys(range(4), pytest.approx(2 * 688e6))  # all ranks, their sums
    halves = {"layers.0": whale.stage(2), "layers.1": whale.stage(2)}
    two = bytes_of_communicators(compiled(of_a100(4), {**halves, "": whale.replicate()}, micro_batches=2))
    message = communicator_bytes(3e11, 4, 1)
    assert two == dict.fromkeys(range(4), pytest.approx(688e6 + 544e6 + 2 * message))  # all, sums, two ways


def test_slow_links_between_nodes_need_few_channels() -> None:
    cluster = of_a100(4, per_node=1)
    found = bytes_of_communicators(compiled(cluster, {"": whale.replicate()}))
    assert max(found.values()) < 0.2e9


def test_a_deep_interleaved_pipeline_needs_more_than_a_usual_step_and_says_so() -> None:
    layers = {f"layers.{index}": whale.stage() for index in range(16)}
    compilation = compiled(of_a100(8), layers, layers=16, schedule="interleaved", micro_batches=8)
    found = predicted_memory(compilation, compilation.cluster, schedule="interleaved", optimizer="adamw", device="cuda")
    used = bytes_of_communicators(compilation)
    for memory in found:
        assert memory.framework == round(framework_bytes(A100, 8, used[memory.rank]))
        assert memory.framework >= FRAMEWORK_BYTES + used[memory.rank]


def test_processors_have_no_communicators_of_nccl() -> None:
    processor = DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=2**34, memory_bandwidth=1e10)
    cluster = Cluster.homogeneous(4, processor, intra=Link(bandwidth=1e9, latency=5e-5))
    compilation = compiled(cluster, {"": whale.replicate()})
    found = predicted_memory(compilation, cluster, schedule="1f1b", optimizer="adamw", device="cpu")
    assert {memory.framework for memory in found} == {0}
