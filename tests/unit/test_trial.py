"""A plan is compiled for the devices that it is for, wherever it is tried."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.small_models import decoder, tokens
from whale.cli.model_loader import load_model
from whale.commands import compiled_candidates
from whale.commands.candidates import CandidateCompiler
from whale.commands.planning import make_plan
from whale.commands.searching import Searched, search_plans
from whale.commands.shared import available_cores
from whale.compile.options import Options
from whale.errors import UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import ClusterIdentity, Plan, PlanAxis, PlanStage
from whale.planner.catalog import device_types
from whale.planner.network.communication import collective
from whale.planner.network.topology import Topology
from whale.planner.search import Fixed, SearchSettings
from whale.predict.costs import Costs
from whale.runtime.collectives import Bridge
from whale.strategies.profile import profile_model

EXAMPLES = Path(__file__).parents[2] / "examples/models"
PROCESSOR = DeviceType.of("cpu", speed={"float32": 1e11}, memory_bytes=2**36, memory_bandwidth=1e10)


def plan_of(trial: CandidateCompiler, cluster: Cluster, *axes: PlanAxis) -> Plan:
    """One stage on all devices, with these axes over the whole model."""
    return Plan(
        model=trial.identity,
        cluster=ClusterIdentity.of(cluster),
        world_size=len(cluster.devices),
        batch=8,
        micro_batches=1,
        schedule="1f1b",
        annotations={"": tuple(f"{axis.role}({axis.size})" for axis in axes) or ("replicate()",)},
        stages=(PlanStage(ranks=tuple(range(len(cluster.devices))), axes=axes),),
    )


def collectives(trial: CandidateCompiler, device: DeviceType) -> Counter[str]:
    """Calls of a rank of a tensor group of four such devices in a micro-batch."""
    cluster = Cluster.homogeneous(4, device, intra=device.intra_node or Link(bandwidth=1e9, latency=5e-5))
    plan = plan_of(trial, cluster, PlanAxis(name="split", size=4, role="split"))
    compilation = trial.compile(plan, cluster)
    program = compilation.local_programs(compilation.stages[0], 0, None)[0]
    conversions = [bridge.conversion for bridge in program.bridges if isinstance(bridge, Bridge)]
    return Counter(name for c in conversions for name in (c.forward_collective, c.backward_collective) if name)


@pytest.fixture(scope="module")
def trial() -> CandidateCompiler:
    sizes = {"layers": 2, "hidden": 768, "heads": 12, "seq": 1024, "vocab": 50304}
    loaded = load_model(str(EXAMPLES / "gpt.py:gpt"), sizes, batch_size=8, device="meta")
    return CandidateCompiler(loaded.model, loaded.batch, name="gpt")


def test_on_accelerators_sums_stay_in_parts_between_products(trial: CandidateCompiler) -> None:
    found = collectives(trial, device_types()["A100-SXM4-80GB"])
    assert found["reduce_scatter"] >= 8 and found["all_gather"] >= 8
    assert not found["all_reduce"]


def test_on_processors_they_are_summed_everywhere(trial: CandidateCompiler) -> None:
    found = collectives(trial, PROCESSOR)
    assert found["all_reduce"] >= 8
    assert not found["reduce_scatter"]


def test_a_plan_is_predicted_as_it_is_tried(trial: CandidateCompiler) -> None:
    a100 = device_types()["A100-SXM4-80GB"]
    cluster = Cluster.homogeneous(4, a100, intra=a100.intra_node)
    sizes = {"layers": 2, "hidden": 768, "heads": 12, "seq": 1024, "vocab": 50304}
    loaded = load_model(str(EXAMPLES / "gpt.py:gpt"), sizes, batch_size=8, device="meta")
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 4))
    costs = Costs(profile=profile, cluster=cluster, precision="fp32", micro_batches=1, device="cuda")
    planned = make_plan(
        loaded.model, loaded.batch, costs, Options(), rows=8, name="gpt", annotations={"": ("split(4)",)}
    )
    tried, _ = trial.predict(planned.plan, profile, cluster)
    assert tried.step_seconds == pytest.approx(planned.predicted.prediction.step_seconds)


def test_a_model_in_float64_is_priced_as_such() -> None:
    """By the speed of the device in it, where its float32 twin takes as long as it did."""

    def step(dtype: torch.dtype, float64: float) -> float:
        speed = {"float32": 4e9, "float64": float64}
        cluster = Cluster.homogeneous(1, DeviceType.of("card", speed=speed, memory_bytes=2**36, memory_bandwidth=1e13))
        model, batch = decoder(width=64).to(dtype), tokens()
        trial = CandidateCompiler(model, batch, name="decoder")
        return trial.predict(plan_of(trial, cluster), profile_model(model, batch, name="decoder"), cluster)[
            0
        ].step_seconds

    twin = step(torch.float32, 1e9)
    assert step(torch.float32, 4e9) == twin
    assert step(torch.float64, 1e9) > 2 * max(twin, step(torch.float64, 4e9))


class Normalised(nn.Module):
    """A model with a batch norm among its layers, which couples its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_a_batch_that_cannot_be_cut_is_searched_whole(trial: CandidateCompiler) -> None:
    """On a slow network, where a pipeline of many micro-batches would be the fastest plan."""
    assert not trial.uncut(2)
    with torch.device("meta"):
        model, batch = Normalised(), {"x": torch.zeros(64, 256)}
    own = CandidateCompiler(model, batch, name="normalised")
    assert "computes a row of the batch from other rows" in own.uncut(2)
    profile = profile_model(model, batch, name="normalised", captured=own.captured)
    nodes = [(f"node{index}", PROCESSOR) for index in range(4)]
    cluster = Cluster.of(nodes, inter=Link(bandwidth=1e7, latency=5e-5))
    found = search_plans(profile, cluster, batch=64, settings=SearchSettings(), trial=own)
    assert found.best.compiled
    assert {choice.plan.micro_batches for choice in found.choices} == {1}
    assert not found.refused
    with pytest.raises(UsageError, match="micro_batches=4: .* computes a row of the batch from other rows"):
        search_plans(profile, cluster, batch=64, settings=SearchSettings(micro_batches=4), trial=own)


@pytest.mark.skipif(available_cores() == 1, reason="processes are not forked here")
def test_plans_compiled_by_forked_processes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = decoder(layers=4)
    own = CandidateCompiler(model, tokens(16), name="decoder")
    given = profile_model(model, tokens(16), tensor_degrees=(1, 2), name="decoder", captured=own.captured)
    cluster = Cluster.of([(f"node{index}", PROCESSOR) for index in range(4)], inter=Link(bandwidth=1e8, latency=5e-5))
    settings = SearchSettings(time_limit=100)
    alone = search_plans(given, cluster, batch=16, settings=settings, trial=own)
    monkeypatch.setattr(compiled_candidates, "WORTH_SHARING", 0)
    shared = search_plans(given, cluster, batch=16, settings=settings, trial=own, processes=2)
    assert len(alone.choices) > 2
    assert [choice.plan.dumps() for choice in shared.choices] == [choice.plan.dumps() for choice in alone.choices]
    assert shared.refused == alone.refused


def test_schedules_that_the_search_does_not_price_are_tried_on_the_best_compiled_pipelines() -> None:
    with torch.device("meta"):
        model = decoder(layers=4)
    own = CandidateCompiler(model, tokens(16), name="decoder")
    profile = profile_model(model, tokens(16), tensor_degrees=(1,), name="decoder", captured=own.captured)
    halves = Fixed(starts=(0, 3))  # the embedding and two layers; two layers and the head

    def choices(memory: int, *schedules: str) -> Searched:
        device = DeviceType.of("slow", speed={"float32": 1e7}, memory_bytes=memory, memory_bandwidth=1e8)
        nodes = [(f"node{index}", device) for index in range(2)]
        cluster = Cluster.of(nodes, inter=Link(bandwidth=1e9, latency=5e-5))
        settings = SearchSettings(micro_batches=8, schedules=schedules, fixed=halves, time_limit=100, top=9)
        return search_plans(profile, cluster, batch=16, settings=settings, trial=own)

    usual = choices(2**36, "1f1b")
    every = choices(2**36, "1f1b", "zero_bubble", "zero_bubble_2p")
    of = {one.plan.schedule: one.prediction for one in reversed(every.choices)}
    assert every.best.plan.schedule != "1f1b" and every.best.compiled
    assert of["zero_bubble"].step_seconds < of["1f1b"].step_seconds == usual.best.prediction.step_seconds
    assert of["zero_bubble_2p"].step_seconds < of["1f1b"].step_seconds
    assert every.best.plan.workload is not None and every.best.plan.workload.schedule == every.best.plan.schedule
    assert {one.plan.schedule for one in choices(2**36, "zero_bubble", "greedy").choices} == {"zero_bubble", "greedy"}

    def most(schedule: str) -> int:
        return max(device.total for device in of[schedule].memory)

    assert most("zero_bubble_2p") > most("1f1b")
    tight = choices(most("zero_bubble_2p") - 1, "1f1b", "zero_bubble_2p")
    assert tight.best.plan.schedule == "1f1b"
    refused = {one.plan.schedule: one.reason for one in tight.refused}  # plans of one stage too, which need more
    assert "needs" in refused["zero_bubble_2p"]


def test_without_a_model_only_schedules_that_have_a_price_are_searched() -> None:
    with torch.device("meta"):
        profile = profile_model(decoder(layers=1), tokens(4), tensor_degrees=(1,), name="decoder")
    with pytest.raises(UsageError, match=r"schedule greedy is tried on plans of a model.* gpipe and 1f1b"):
        search_plans(profile, Cluster.homogeneous(2), batch=4, settings=SearchSettings(schedules=("1f1b", "greedy")))


def test_groups_that_sum_gradients_at_once_share_the_adapters_of_their_nodes() -> None:
    with torch.device("meta"):
        model = decoder(layers=1)
    own = CandidateCompiler(model, tokens(8), name="decoder")
    profile = profile_model(model, tokens(8), tensor_degrees=(1, 2), name="decoder", captured=own.captured)
    gpu = device_types()["A100-SXM4-80GB"]
    nodes = [(f"node{index // 4}", gpu) for index in range(8)]
    cluster = Cluster.of(nodes, intra=gpu.intra_node, inter=Link(bandwidth=1e9, latency=1e-5))
    axes = (PlanAxis(name="replicate", size=4, role="replicate"), PlanAxis(name="split", size=2, role="split"))
    _, workload = own.predict(plan_of(own, cluster, *axes), profile, cluster)
    topology = Topology.of(cluster)
    split = [one for one in workload.reductions if len(one.ranks) == 4]
    assert split
    for one in split:
        alone, shared = (collective(topology, "all_reduce", one.ranks, one.bytes, sharing=n).seconds for n in (1, 2))
        assert one.seconds == shared > alone
