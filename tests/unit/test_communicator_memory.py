"""Communicators of NCCL take memory on the ranks that have them: it is part of what a compiled step needs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import whale
from tests.small_models import decoder, tokens
from whale.cli.model_loader import load_model
from whale.commands.candidates import CandidateCompiler
from whale.commands.plan_writer import PlanWriter
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.profile import ModelProfile
from whale.ir.state import StateSharding
from whale.planner.catalog import device_types
from whale.planner.cost.memory import FRAMEWORK_BYTES, communicator_bytes, framework_bytes
from whale.planner.search import StageChoice, evaluate
from whale.predict.device_memory import bytes_of_communicators
from whale.predict.prediction import predicted_memory
from whale.strategies.profile import profile_model

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


LAYOUTS: dict[str, list[tuple[int, int, int]]] = {
    "pipeline": [(2, 1, 1), (4, 2, 1), (6, 3, 1)],
    "one device after the other": [(last, 1, 1) for last in range(1, 7)],
    "two, then tensor groups": [(2, 2, 1), (6, 2, 2)],
    "tensor groups, then three": [(3, 1, 3), (6, 3, 1)],
}
"""For each stage its last layer, and its degrees over replicas and in tensor groups."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_search_counts_the_communicators_of_the_compiled_plan(layout: str) -> None:
    h20 = device_types()["H20"]  # few multiprocessors and fast links: more than a usual step's
    cluster = Cluster.homogeneous(6, h20, intra=h20.intra_node)
    model = decoder(layers=6, heads=6, width=24).float()
    trial = CandidateCompiler(model.to("meta"), tokens(rows=6), name="decoder", optimizer="adamw")
    profile = profile_model(model, tokens(rows=6), tensor_degrees=(1, 2, 3), captured=trial.captured)
    stages, first, rank = [], 0, 0
    for place, (last, data, tensor) in enumerate(LAYOUTS[layout]):
        end = len(profile.layers) if place == len(LAYOUTS[layout]) - 1 else profile.paths.index(f"layers.{last}")
        ranks = tuple(range(rank, rank + data * tensor))
        rows = (6 // data,) * data
        stages.append(StageChoice(first=first, last=end, ranks=ranks, data=data, tensor=tensor, rows=rows))
        first, rank = end, rank + data * tensor
    candidate = evaluate(profile, cluster, stages, micro_batches=1, precision="fp32", optimizer="adamw")
    choice = PlanWriter(profile, cluster, 6, trial, None).compiled(candidate, trial)
    assert choice.compiled, choice.reason
    compiled = {device.rank: device.framework for device in choice.prediction.memory}
    found = {device.rank: device.framework for device in candidate.prediction.memory}
    assert max(found.values()) > framework_bytes(h20, 6)
    part = any(tensor > 1 for _, _, tensor in LAYOUTS[layout])  # of a value that a device of a tensor group sends
    for rank, framework in found.items():
        assert framework == pytest.approx(compiled[rank], rel=0.2 if part else 0.001), (rank, found, compiled)


@cache
def qwen3() -> tuple[CandidateCompiler, ModelProfile]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "head_dim": 8, "vocab_size": 32, "sequence_length": 8}
    loaded = load_model("hf:qwen3", sizes, batch_size=4, device="meta")
    trial = CandidateCompiler(loaded.model, loaded.batch, name="qwen3", optimizer="adamw")
    return trial, profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2), captured=trial.captured)


@pytest.mark.parametrize("level", [0, 1])
def test_norms_of_heads_are_summed_by_tensor_groups_too(level: int) -> None:
    trial, profile = qwen3()
    assert profile.kinds[1].variants[1].summed >= 16
    h20 = device_types()["H20"]
    cluster = Cluster.homogeneous(4, h20, intra=h20.intra_node)
    state = StateSharding(level) if level else None
    stage = StageChoice(first=0, last=3, ranks=(0, 1, 2, 3), data=2, tensor=2, rows=(2, 2), state=state)
    candidate = evaluate(profile, cluster, [stage], micro_batches=1, precision="fp32", optimizer="adamw")
    choice = PlanWriter(profile, cluster, 4, trial, None).compiled(candidate, trial)
    found, wanted = (max(one.framework for one in p.memory) for p in (candidate.prediction, choice.prediction))
    assert found == pytest.approx(wanted, rel=0.001)
    assert wanted > framework_bytes(h20, 4)


@cache
def t5() -> tuple[CandidateCompiler, ModelProfile]:
    sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 32, "vocab_size": 32}
    loaded = load_model("hf:t5", {**sizes, "sequence_length": 8}, batch_size=4, device="meta")
    trial = CandidateCompiler(loaded.model, loaded.batch, name="t5", optimizer="adamw")
    return trial, profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2), captured=trial.captured)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("end", [1, 2])
def test_a_parameter_that_stages_share_has_ranks_of_its_own_which_may_be_all_that_a_stage_has(
    end: int, level: int, tensor: int
) -> None:
    trial, profile = t5()
    h20 = device_types()["H20"]
    cluster = Cluster.homogeneous(4 * tensor, h20, intra=h20.intra_node)
    stages = [
        StageChoice(
            first=first,
            last=last,
            ranks=tuple(range(place * 2 * tensor, (place + 1) * 2 * tensor)),
            data=2,
            tensor=tensor,
            rows=(2, 2),
            state=StateSharding(level) if level else None,
        )
        for place, (first, last) in enumerate(((0, end), (end, len(profile.layers))))
    ]
    candidate = evaluate(profile, cluster, stages, micro_batches=1, precision="fp32", optimizer="adamw")
    choice = PlanWriter(profile, cluster, 4, trial, None).compiled(candidate, trial)
    assert choice.compiled, choice.reason
    compiled = {device.rank: device.framework for device in choice.prediction.memory}
    for device in candidate.prediction.memory:
        assert device.framework == pytest.approx(compiled[device.rank], rel=0.2 if tensor > 1 else 0.001)


def test_processors_have_no_communicators_of_nccl() -> None:
    processor = DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=2**34, memory_bandwidth=1e10)
    cluster = Cluster.homogeneous(4, processor, intra=Link(bandwidth=1e9, latency=5e-5))
    compilation = compiled(cluster, {"": whale.replicate()})
    found = predicted_memory(compilation, cluster, schedule="1f1b", optimizer="adamw", device="cpu")
    assert {memory.framework for memory in found} == {0}
