"""Tables in the host's memory in plans: what devices and hosts hold, how long a step takes, as compiled plans do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.commands.planning import make_plan
from whale.compile.compile import compile_traced
from whale.compile.options import Options
from whale.compile.trace import trace
from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster, DeviceType, HostMemory, Link
from whale.ir.plan import Plan
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types
from whale.planner.search import SearchSettings, StageChoice, evaluate, search
from whale.predict.costs import Costs
from whale.predict.peak_memory import brief_peak_memory, peak_memory
from whale.predict.prediction import predict
from whale.strategies.profile import profile_model

ROWS = (2**16, 2**14)
COLUMNS = 32
OF_TABLES = 4 * sum(ROWS) * (COLUMNS + 1)
"""Bytes of the tables, with a number for each row."""


class Clicks(nn.Module):
    """Two tables and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, COLUMNS, mode="sum", sparse=True) for rows in ROWS)
        self.dense = nn.Sequential(nn.Linear(2 * COLUMNS, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        found = self.dense(torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1))
        return nn.functional.mse_loss(found.squeeze(1), clicked)


class Crossed(Clicks):
    """Products of vectors in the forward itself, in no module of their own, as in a DLRM."""

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        vectors = torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        found = self.dense((vectors[:, :, None] * vectors[:, None, :]).sum(2))
        return nn.functional.mse_loss(found.squeeze(1), clicked)


def batch(rows: int = 256) -> dict[str, Tensor]:
    return {"ids": torch.zeros(rows, 2, 8, dtype=torch.int64), "clicked": torch.zeros(rows)}


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(Clicks().to("meta"), batch(), tensor_degrees=(1, 2), rules=True)


def machines(ranks: int, type_: DeviceType, **host: Any) -> Cluster:
    made = Cluster.homogeneous(ranks, type_, intra=Link(bandwidth=1e10, latency=1e-6))
    return replace(made, nodes=tuple(replace(node, host_memory=HostMemory(**host)) for node in made.nodes))


def compiled(
    annotations: dict[str, Any], cluster: Cluster, device: str, kind: type[Clicks] = Clicks, **options: Any
) -> Any:
    model = kind()
    whale.annotate(model, annotations)
    traced = trace(model.to("meta"), batch(), device="cpu", training=True)
    return compile_traced(traced, cluster, Options(**options), device=device)


V100 = device_types()["V100-SXM2-32GB"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_tables_count_in_the_hosts_memory_and_not_in_the_devices(device: Any, micro_batches: int) -> None:
    cluster = machines(2, V100)
    found = {}
    for word in ("none", "tables"):
        compilation = compiled({"": whale.replicate()}, cluster, device, offload=word, micro_batches=micro_batches)
        for name, memory_of in (("whole", peak_memory), ("brief", brief_peak_memory)):
            found[word, name] = memory_of(compilation, 0, schedule="1f1b", optimizer="sgd", device=device)
    for name in ("whole", "brief"):
        on_device, on_host = found["none", name], found["tables", name]
        assert (on_device.host_state, on_host.host_state) == (0, OF_TABLES)
        assert on_device.parameters + on_device.optimizer - on_host.parameters - on_host.optimizer == OF_TABLES
        assert on_host.total < on_device.total - OF_TABLES + 1000
        assert on_host.total < OF_TABLES / 10


@pytest.mark.parametrize("kind", ["dp", "tp", "alone"])
@pytest.mark.parametrize("host", [{"device_link": 1e9}, {"bandwidth": 1e8}, {}], ids=str)
def test_the_cost_model_agrees_with_compiled_plans(profile: ModelProfile, kind: str, host: dict[str, float]) -> None:
    ranks, tensor = 1 if kind == "alone" else 2, 2 if kind == "tp" else 1
    data = ranks // tensor
    cluster = machines(ranks, V100, **host)
    annotations = {"": whale.split() if kind == "tp" else whale.replicate()}
    compilation = compiled(annotations, cluster, "cuda", offload="tables", micro_batches=2)
    costs = Costs(profile=profile, cluster=cluster, precision="fp32", micro_batches=2, device="cuda")
    real = predict(compilation, costs, schedule="1f1b", memory_of=brief_peak_memory).prediction
    layers, rows = len(profile.layers), (128 // data,) * data
    one = StageChoice(first=0, last=layers, ranks=tuple(range(ranks)), data=data, tensor=tensor, rows=rows)
    said = evaluate(profile, cluster, [replace(one, offload="tables")], micro_batches=2).prediction
    beside = (
        0.02 if host.get("bandwidth") is None else 0.05
    )  # what of the sums runs beside the backward, on a slow host
    assert said.step_seconds == pytest.approx(real.step_seconds, rel=beside)
    held = data * OF_TABLES + 4 * sum(ROWS) * (tensor - 1)  # each part of a row has its number
    assert said.hosts[0].state == pytest.approx(held, rel=1e-5)
    assert real.hosts[0].state == pytest.approx(held, rel=1e-5)
    plain = evaluate(profile, cluster, [one], micro_batches=2).prediction
    assert plain.memory[0].total - said.memory[0].total > 0.9 * OF_TABLES / tensor
    assert said.memory[0].total == pytest.approx(real.memory[0].total, rel=0.1)
    if host:
        assert said.step_seconds > plain.step_seconds


def test_what_is_computed_of_vectors_is_computed_on_the_device() -> None:
    """Even where no module has it, so that it is in the layer of the last table."""
    cluster = machines(1, V100, bandwidth=1e8)
    said, real = [], []
    for kind in (Clicks, Crossed):
        profile = profile_model(kind().to("meta"), batch(), tensor_degrees=(1,), rules=True)
        layers = len(profile.layers)
        one = StageChoice(first=0, last=layers, ranks=(0,), data=1, tensor=1, rows=(256,), offload="tables")
        said.append(evaluate(profile, cluster, [one], micro_batches=1).prediction.step_seconds)
        compilation = compiled({"": whale.replicate()}, cluster, "cuda", kind, offload="tables")
        costs = Costs(profile=profile, cluster=cluster, precision="fp32", device="cuda")
        predicted = predict(compilation, costs, schedule="1f1b", memory_of=brief_peak_memory).prediction
        real.append(predicted.step_seconds)
    for without, crossed in (said, real):
        assert without < crossed < 1.05 * without


def test_a_host_that_cannot_hold_the_tables_is_refused(profile: ModelProfile) -> None:
    cluster = machines(1, V100, size_bytes=int(3e9 + OF_TABLES / 2))
    one = StageChoice(first=0, last=len(profile.layers), ranks=(0,), data=1, tensor=1, rows=(256,), offload="tables")
    assert not evaluate(profile, cluster, [one], micro_batches=1).prediction.fits
    larger = machines(1, V100, size_bytes=int(3e9 + OF_TABLES * 2))
    assert evaluate(profile, larger, [one], micro_batches=1).prediction.fits


SMALL = DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=OF_TABLES // 2, memory_bandwidth=1e9)


def planned(profile: ModelProfile, model: nn.Module, host: int = 2**34, **options: Any) -> Any:
    cluster = machines(2, SMALL, size_bytes=host)
    costs = Costs(profile=profile, cluster=cluster, precision="fp32", optimizer="sgd")
    return make_plan(model.to("meta"), batch(), costs, Options(), rows=256, name="clicks", **options)


def test_plans_put_tables_on_hosts_where_devices_lack_memory(profile: ModelProfile, tmp_path: Path) -> None:
    model = Clicks()
    whale.annotate(model, {"": whale.replicate()})
    with pytest.raises(InfeasibleError, match="--offload tables"):
        planned(profile, model)
    found = planned(profile, model, least_offload=True)
    assert [stage.offload for stage in found.plan.stages] == ["tables"]
    assert found.predicted.prediction.fits
    found.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").stages[0].offload == "tables"


def test_copies_of_tables_that_a_host_cannot_hold_are_refused_with_what_would_do(profile: ModelProfile) -> None:
    model = Clicks()
    whale.annotate(model, {"": whale.replicate()})
    with pytest.raises(InfeasibleError, match=r"copy each \(whale\.split, whale\.place_tables.*host_memory in the"):
        planned(profile, model, host=OF_TABLES, least_offload=True)


def test_a_searched_plan_has_tables_on_hosts_where_nothing_fits_without(profile: ModelProfile) -> None:
    cluster = machines(2, SMALL, size_bytes=2**34)
    found = search(profile, cluster, batch=256, settings=SearchSettings(offload="auto"))
    assert {stage.offload for stage in found.best.stages} <= {"none", "tables"}
    assert "tables" in {stage.offload for stage in found.best.stages}
    with pytest.raises(InfeasibleError, match="offload 'tables'"):
        search(profile, cluster, batch=256)
