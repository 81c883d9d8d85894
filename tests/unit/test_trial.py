"""A plan is compiled for the devices that it is for, wherever it is tried."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from whale.cli.model_loader import load_model
from whale.compiler import Options
from whale.costs import Costs
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import ClusterIdentity, Plan, PlanAxis, PlanStage
from whale.planner.catalog import device_types
from whale.planner.search import SearchSettings
from whale.planning import make_plan
from whale.runtime.collectives import Bridge
from whale.searching import search_plans
from whale.strategies.profile import profile_model
from whale.trial import ModelTrial

EXAMPLES = Path(__file__).parents[2] / "examples/models"
PROCESSOR = DeviceType.of("cpu", speed={"float32": 1e11}, memory_bytes=2**36, memory_bandwidth=1e10)


def collectives(trial: ModelTrial, device: DeviceType) -> Counter[str]:
    """What a rank of a tensor group of four such devices calls in a micro-batch."""
    cluster = Cluster.homogeneous(4, device, intra=device.intra_node or Link(bandwidth=1e9, latency=5e-5))
    plan = Plan(
        model=trial.identity,
        cluster=ClusterIdentity.of(cluster),
        world_size=4,
        batch=8,
        micro_batches=1,
        schedule="1f1b",
        annotations={"": ("split(4)",)},
        stages=(PlanStage(ranks=(0, 1, 2, 3), axes=(PlanAxis(name="split", size=4, role="split"),)),),
    )
    compilation = trial.compile(plan, cluster)
    program = compilation.local_programs(compilation.stages[0], 0, None)[0]
    conversions = [bridge.conversion for bridge in program.bridges if isinstance(bridge, Bridge)]
    return Counter(name for c in conversions for name in (c.forward_collective, c.backward_collective) if name)


@pytest.fixture(scope="module")
def trial() -> ModelTrial:
    sizes = {"layers": 2, "hidden": 768, "heads": 12, "seq": 1024, "vocab": 50304}
    loaded = load_model(str(EXAMPLES / "gpt.py:gpt"), sizes, batch_size=8, device="meta")
    return ModelTrial(loaded.model, loaded.batch, name="gpt")


def test_on_accelerators_sums_stay_in_parts_between_products(trial: ModelTrial) -> None:
    found = collectives(trial, device_types()["A100-SXM4-80GB"])
    assert found["reduce_scatter"] >= 8 and found["all_gather"] >= 8
    assert not found["all_reduce"]


def test_on_processors_they_are_summed_everywhere(trial: ModelTrial) -> None:
    found = collectives(trial, PROCESSOR)
    assert found["all_reduce"] >= 8
    assert not found["reduce_scatter"]


def test_a_plan_is_predicted_as_it_is_tried(trial: ModelTrial) -> None:
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


class Normalised(nn.Module):
    """A batch norm among its layers, whose rows are not to be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_a_batch_that_cannot_be_cut_is_searched_whole(trial: ModelTrial) -> None:
    """On a slow network, where a pipeline of many micro-batches would be quickest."""
    assert not trial.uncut
    with torch.device("meta"):
        model, batch = Normalised(), {"x": torch.zeros(64, 256)}
    own = ModelTrial(model, batch, name="normalised")
    assert "computes a row of the batch from other rows" in own.uncut
    profile = profile_model(model, batch, name="normalised", captured=own.captured)
    nodes = [(f"node{index}", PROCESSOR) for index in range(4)]
    cluster = Cluster.of(nodes, inter=Link(bandwidth=1e7, latency=5e-5))
    found = search_plans(profile, cluster, batch=64, settings=SearchSettings(eager=True), trial=own)
    assert found.best.compiled
    assert {choice.plan.micro_batches for choice in found.choices} == {1}
    assert not found.refused
