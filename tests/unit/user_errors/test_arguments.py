"""Arguments of the wrong kind, plans and clusters that do not fit what was started, models on the wrong device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import whale
from tests.refusals import Launched, refused
from tests.small_models import decoder, tokens
from whale import api
from whale.errors import AnnotationError, InputFileError, PlanMismatchError, UsageError
from whale.ir.plan import Plan, PlanStage

LOOSE: Any = whale
"""The module without its types, which a type checker would hold against wrong calls."""


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: LOOSE.parallelize(decoder(), tokens(), microbatches=2), UsageError, "did you mean 'micro_batches'?"),
        (lambda: LOOSE.parallelize(decoder()), UsageError, "'example_batch'"),
        (lambda: LOOSE.annotate(decoder(), {}, strict=True), AnnotationError, "no argument 'strict'; use 'model' or"),
        (lambda: LOOSE.cluster(typ="A100"), AnnotationError, "no argument 'typ'; did you mean 'type'?"),
        (lambda: LOOSE.split(degree=2), AnnotationError, "split() has no argument 'degree'; use 'n'"),
        (lambda: whale.cluster("rows", 2), AnnotationError, "cluster('rows'): unknown layout"),
    ],
)
def test_an_unknown_or_missing_argument_is_named(call: Callable[[], Any], kind: type[UsageError], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"plan": 123}, ["plan is int 123", "a path or a whale.Plan"]),
        ({"cluster": object()}, ["cluster is ", "a path or a whale.Cluster"]),
        ({"micro_batches": 0}, ["micro_batches=0", "a whole number of at least 1"]),
        ({"micro_batches": 1.5}, ["micro_batches=1.5", "a whole number of at least 1"]),
        ({"micro_batches": True}, ["micro_batches=True", "a whole number of at least 1"]),
        ({"micro_batches": "2"}, ["micro_batches='2'"]),
        ({"schedule": "1f2b"}, ["schedule='1f2b' is unknown", "did you mean '1f1b'?"]),
        ({"schedule": 3}, ["schedule=3", "'gpipe', '1f1b', '1f1b_deep', 'interleaved'"]),
        ({"prefer": "node"}, ["prefer='node'", "'consecutive' or 'replica_in_node'"]),
        ({"seed": "x"}, ["seed is str 'x'", "a whole number"]),
        ({"timeout_seconds": -1}, ["timeout_seconds=-1", "above 0"]),
        ({"timeout_seconds": float("nan")}, ["timeout_seconds=nan"]),
        ({"compile": "max-autotune"}, ["compile is str 'max-autotune'", "True or False"]),
        ({"cuda_graphs": "yes"}, ["cuda_graphs is str 'yes'"]),
        ({"sync_module_states": 0}, ["sync_module_states is int 0"]),
        ({"device": "tpu"}, ["device='tpu' is unknown", "'cpu' or 'cuda'"]),
        ({"loss_fn": 3}, ["loss_fn is 3"]),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_with_its_value(options: dict[str, Any], parts: list[str]) -> None:
    refused(UsageError, parts, decoder(), **options)


def test_what_is_no_model_is_refused() -> None:
    refused(UsageError, ["model is str 'gpt2'", "torch.nn.Module"], "gpt2")
    parallel = api.parallelize(decoder(layers=1), tokens(), device="cpu")
    refused(UsageError, ["parallel already"], parallel)


# --- the world --------------------------------------------------------------------------------------------------------


def test_an_automatic_plan_of_one_process_is_the_model_alone() -> None:
    model = api.parallelize(decoder(layers=1), tokens(), plan="auto", device="cpu")
    assert model.world_size == 1
    assert model.train_step(**tokens()).item() == pytest.approx(decoder(layers=1)(**tokens()).item(), rel=1e-12)


def test_a_plan_for_another_world_or_model_is_refused(launched: Launched) -> None:
    launched(2)
    parts = ["world_size is 3", "2 processes were started", "torchrun with 3"]
    error = refused(PlanMismatchError, parts, decoder(layers=1), plan=Plan(world_size=3))
    assert error.exit_code == 3
    plan = Plan(world_size=2, stages=(PlanStage(ranks=(0,)), PlanStage(ranks=(1,))))
    refused(PlanMismatchError, ["[[0], [1]]", "the model's are on [[0, 1]]"], decoder(layers=1), plan=plan)


CLUSTER = """
[links]
intra_node = {bandwidth = "300 GB/s", latency = "5 us"}
inter_node = {bandwidth = "1 GB/s", latency = "5 us"}
[[nodes]]
count = 2
devices = 8
device = "A100-SXM4-80GB"
"""


def test_a_cluster_of_another_size_names_both_counts(launched: Launched, tmp_path: Path) -> None:
    launched(2)
    parts = ["3 devices", "2 processes were started", "torchrun with 3"]
    refused(PlanMismatchError, parts, decoder(layers=1), cluster=whale.Cluster.homogeneous(3))
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    refused(PlanMismatchError, ["16 devices", "2 processes"], decoder(layers=1), cluster=file)


@pytest.mark.parametrize("option", ["plan", "cluster"])
def test_a_missing_file_names_its_path(option: str) -> None:
    parts = ["/nowhere/file.toml: cannot be read", "No such file"]
    error = refused(InputFileError, parts, decoder(layers=1), **{option: "/nowhere/file.toml"})
    assert error.exit_code == 3


def test_a_model_on_the_wrong_device_names_the_parameter_and_both() -> None:
    there = SimpleNamespace(device=torch.device("cuda", 1))
    model: Any = SimpleNamespace(named_parameters=lambda: [("embed.weight", there)], named_buffers=lambda: [])
    with pytest.raises(UsageError) as found:
        api._check_devices(model, torch.device("cuda", 0))
    for part in ("embed.weight is on cuda:1", "computes on cuda:0", "leave the model on the host", ".to('cuda:0')"):
        assert part in str(found.value)


def test_parameters_on_several_devices_name_one_of_each() -> None:
    model = decoder(layers=1)
    model.head.to("meta")
    refused(UsageError, ["several devices", "embed.weight on cpu", "head.weight on meta"], model)
