"""A plan that does not fit the launch, the model or the machines is refused, by field and value, before it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import whale
from tests.small_models import decoder, tokens
from tests.workloads import chain_workload
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.compile.trace import trace
from whale.errors import PlanMismatchError
from whale.ir.cluster import Cluster, DeviceType
from whale.ir.plan import ModelIdentity, Plan
from whale.ir.schedule import peak_in_flight

TWO_STAGES: dict[str, Any] = {
    "world_size": 3,
    "batch": 8,
    "micro_batches": 2,
    "annotations": {"layers.0": "stage()", "layers.1": ["stage()", "split()"]},
    "stages": [
        {"ranks": [2], "axes": []},
        {"ranks": [0, 1], "axes": [{"name": "split", "size": 2, "role": "split", "shares": [3, 1]}]},
    ],
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def launch(size: int) -> None:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}.items():
            monkeypatch.setenv(name, value)

    return launch


def changed(*path: str | int, to: Any) -> Plan:
    data = json.loads(json.dumps(TWO_STAGES))
    at = data
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = to
    return Plan.parse(json.dumps(data))


def parallelize(plan: Plan, **options: Any) -> Any:
    return whale.parallelize(decoder(layers=2), tokens(), plan=plan, device="cpu", **options)


SPLIT = {"name": "split", "size": 2, "role": "split"}
REFUSED: dict[str, tuple[Plan, list[str]]] = {
    "world": (changed("world_size", to=4), ["world_size is 4", "3 processes"]),
    "batch": (changed("batch", to=10), ["batch is 10 rows", "has 8"]),
    "model": (changed("model", to={"name": "other", "hash": "sha256:00"}), ["model.hash is sha256:00 (of other)"]),
    "annotations": (changed("annotations", to={"layer.0": "stage()"}), ["annotations do not fit", "layer.0"]),
    "stages": (changed("stages", to=TWO_STAGES["stages"][1:]), ["1 stages, but the model has 2"]),
    "ranks": (
        changed("annotations", to={"layers.0": "stage(2)", "layers.1": ["stage()", "split()"]}),
        ["stages.0.ranks has 1 ranks", "stage(2)"],
    ),
    "roles": (
        changed("stages", 1, "axes", 0, to={"name": "replicate", "size": 2, "role": "replicate"}),
        ["stages.1.axes are replicate of 2", "make split of 2"],
    ),
    "too many axes": (
        changed("stages", 0, to={"ranks": [1, 2], "axes": [SPLIT]}),
        ["stages.0.axes are split of 2", "make replicate of 2"],
    ),
    "more units than there are": (
        changed("stages", 1, "axes", 0, "shares", to=[60, 5]),
        ["stages.1.axes.0.shares sum to 65", "at most 32"],
    ),
}


@pytest.mark.parametrize(("plan", "parts"), REFUSED.values(), ids=REFUSED.keys())
def test_a_plan_that_does_not_fit_is_refused(launched: Callable[[int], None], plan: Plan, parts: list[str]) -> None:
    launched(3)
    with pytest.raises(PlanMismatchError) as refusal:
        parallelize(plan)
    assert all(part in str(refusal.value) for part in parts), refusal.value
    assert refusal.value.exit_code == 3
    assert not torch.distributed.is_initialized()


def test_arguments_that_contradict_the_plan_are_refused(launched: Callable[[int], None]) -> None:
    launched(3)
    plan = changed("batch", to=8)
    with pytest.raises(PlanMismatchError, match="micro_batches is 2, but micro_batches=4 was given"):
        parallelize(plan, micro_batches=4)
    with pytest.raises(PlanMismatchError, match="schedule is '1f1b', but schedule='gpipe' was given"):
        parallelize(plan, schedule="gpipe")
    named = changed("cluster", to={"devices": {"T4": [0, 1, 2]}})
    with pytest.raises(PlanMismatchError, match="has T4 at rank 0, but this one has device"):
        parallelize(named, cluster=Cluster.homogeneous(3))
    annotated = decoder(layers=2)
    whale.annotate(annotated, {"layers.1": whale.split(4)})
    with pytest.raises(
        PlanMismatchError, match=r"code says split\(4\) of layers.1, but the plan.s annotations say stage"
    ):
        whale.parallelize(annotated, tokens(), plan=plan, device="cpu")


def compiled(plan: Plan, cluster: Cluster) -> Compilation:
    model = decoder(layers=2).to("meta")
    whale.annotate(model, {"layers.0": whale.stage(), "layers.1": [whale.stage(), whale.split()]})
    options = Options(micro_batches=plan.micro_batches, schedule=plan.schedule, plan=plan)
    return compile_model(model, tokens(), cluster, options, device="cpu", training=True)


def test_the_plan_and_not_the_speed_of_devices_decides_shares() -> None:
    fast, slow = (
        DeviceType.of(name, speed={"float32": speed}, memory_bytes=2**34, memory_bandwidth=1e12)
        for name, speed in (("fast", 3e12), ("slow", 1e12))
    )
    cluster = Cluster.of([("node0", type_) for type_ in (slow, fast, slow)])
    plan = changed("annotations", to={})
    shards = compiled(plan, cluster).shards()
    assert {rank: part[1] for rank, part in shards["layers.1.down.weight"].parts.items()} == {
        0: ((0, 24),),
        1: ((24, 32),),
    }
    equal = compiled(changed("stages", 1, "axes", 0, to=SPLIT).model_copy(update={"annotations": {}}), cluster).shards()
    assert equal["layers.1.down.weight"].parts[0][1] == ((0, 16),)


def test_a_cluster_around_a_stage_must_hold_the_ranks_of_the_plan() -> None:
    model = decoder(layers=2).to("meta")
    whale.annotate(model, {"layers.0": [whale.cluster([0]), whale.stage()], "layers.1": [whale.stage(), whale.split()]})
    plan = changed("annotations", to={})
    with pytest.raises(PlanMismatchError, match=r"stages\.0\.ranks has rank 2, which cluster\(\[0\]\)"):
        compile_model(
            model,
            tokens(),
            Cluster.homogeneous(3),
            Options(micro_batches=2, plan=plan),
            device="cpu",
            training=True,
        )


def test_a_schedule_that_depends_on_times_takes_those_of_the_plan() -> None:
    plan = changed("annotations", to={}).model_copy(update={"micro_batches": 8, "schedule": "1f1b_deep"})
    slow_hops = plan.model_copy(update={"workload": chain_workload(2, 8, latency=3.0)})
    kept = [peak_in_flight(compiled(each, Cluster.homogeneous(3)).order) for each in (plan, slow_hops)]
    assert kept == [{0: 3, 1: 1}, {0: 4, 1: 1}]


def test_a_plan_of_a_model_with_dropout_is_verified() -> None:
    """The comparison is in evaluation mode, the plan of the model in training, and the model keeps its mode."""
    model, batch = torch.nn.Sequential(decoder(layers=1).embed, torch.nn.Dropout(), torch.nn.Flatten()), tokens()
    loss_fn = _mean_of_squares
    traced = trace(model, batch["tokens"], device=torch.device("cpu"), training=True, loss_fn=loss_fn)
    plan = Plan(world_size=1, model=ModelIdentity(name="dropout", hash=traced.hash))
    assert whale.verify(model, batch["tokens"], loss_fn=loss_fn, plan=plan, device="cpu").passed
    assert model.training


def _mean_of_squares(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()
