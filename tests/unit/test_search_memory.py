"""Bytes that the search counts for a plan: those that the compiled step holds, for any optimizer and number type."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests.small_models import decoder, tokens
from whale.annotations import module_scopes
from whale.cli.model_loader import load_model
from whale.commands.automatic import expert_degrees, tensor_degrees
from whale.commands.candidates import CandidateCompiler
from whale.commands.plan_writer import Choice, PlanWriter
from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Cluster, DeviceType
from whale.ir.profile import ModelProfile
from whale.ir.strategy import RECOMPUTES, Recompute
from whale.ir.workload import DeviceMemory
from whale.planner.catalog import device_types
from whale.planner.cost.memory import FRAMEWORK_BYTES
from whale.planner.cost.precision import BY_DTYPE
from whale.planner.search import SearchSettings, StageChoice, evaluate, search
from whale.strategies.profile import profile_model

A100 = device_types()["A100-SXM4-80GB"]
CLUSTER = Cluster.homogeneous(4, A100, intra=A100.intra_node)
BATCH, MICRO_BATCHES = 32, 4
SIZES: dict[str, Any] = {"layers": 4, "hidden": 128, "heads": 4, "seq": 128, "vocab": 8192, "batch_size": BATCH}
BELOW, ABOVE = 0.96, 1.1
"""Memory that the search counts, relative to the compiled memory. It is too much if an embedding has most of the
parameters, because its stage counts all saved activations of a micro-batch while it makes the gradient. It is too
little if a tied weight is cut again for the head, as in a GPT of few hidden units whose stages are tensor parallel: the
head's rows are divided, and its weight is gathered."""


def model() -> nn.Module:
    return decoder(width=256).float()


def small() -> ModelProfile:
    return profile_model(model().to("meta"), tokens(), tensor_degrees=(1,))


def stages(layout: str, profile: ModelProfile) -> list[StageChoice]:
    """A layout of the profile's layers on four devices."""
    num = len(profile.layers)
    middle = profile.paths.index("layers.2")
    every: dict[str, tuple[tuple[int, ...], tuple[int, int]]] = {
        "data": ((0, num), (4, 1)),
        "tensor": ((0, num), (1, 4)),
        "pipeline of data": ((0, middle, num), (2, 1)),
        "pipeline of tensor": ((0, middle, num), (1, 2)),
        "pipeline": ((0, middle - 1, middle, middle + 1, num), (1, 1)),
    }
    bounds, degrees = every[layout]
    size, rows = degrees[0] * degrees[1], BATCH // MICRO_BATCHES // degrees[0]
    return [
        StageChoice(
            first=first,
            last=last,
            ranks=tuple(range(index * size, (index + 1) * size)),
            data=degrees[0],
            tensor=degrees[1],
            rows=(rows,) * degrees[0],
        )
        for index, (first, last) in enumerate(pairwise(bounds))
    ]


def held(device: DeviceMemory) -> int:
    """Without drivers and the batch, which are framework to the search."""
    return device.total - device.framework


@pytest.mark.parametrize(
    ("name", "settings", "dtype", "optimizer", "layouts"),
    [
        ("gpt", {}, torch.bfloat16, "adamw", ("data", "pipeline")),
        ("gpt", {"dropout": 0.0}, torch.float32, "sgd", ("tensor", "pipeline of data")),
        ("llama", {"kv_heads": 2}, torch.float32, "adamw", ("data", "pipeline of tensor")),
        ("moe", {"kv_heads": 2, "experts": 4}, torch.bfloat16, "sgd", ("data", "pipeline")),
        ("bert", {}, torch.float32, "sgd_momentum", ("tensor", "pipeline of data")),
    ],
)
def test_bytes_of_the_search_are_those_of_the_compiled_plan(
    name: str, settings: dict[str, Any], dtype: torch.dtype, optimizer: Any, layouts: tuple[str, ...]
) -> None:
    loaded = load_model(f"examples/models/{name}.py:{name}", SIZES | settings, device="meta")
    loaded.model.to(dtype)
    trial = CandidateCompiler(loaded.model, loaded.batch, name=name, optimizer=optimizer)
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2, 4), captured=trial.captured)
    precision = BY_DTYPE[str(dtype).removeprefix("torch.")]
    compare(trial, profile, [stages(layout, profile) for layout in layouts], precision)


RULES: list[tuple[Recompute, ...]] = [("full",) * 4, ("selective",) * 4, ("full", "none", "selective", "none")]


@pytest.mark.parametrize(("name", "settings"), [("gpt", {"dropout": 0.0}), ("gpt", {}), ("llama", {"kv_heads": 2})])
def test_bytes_and_seconds_of_recompute_are_those_of_the_compiled_plan(name: str, settings: dict[str, Any]) -> None:
    """In stages that have rules of their own, and one of all ranks."""
    loaded = load_model(f"examples/models/{name}.py:{name}", SIZES | settings, device="meta")
    trial = CandidateCompiler(loaded.model, loaded.batch, name=name)
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2), captured=trial.captured, rules=True)
    for layout in ("data", "pipeline of data", "pipeline"):
        plain = stages(layout, profile)
        ruled = [[replace(one, recompute=rule) for one, rule in zip(plain, rules, strict=False)] for rules in RULES]
        found = compare(trial, profile, [plain, *ruled], "fp32", seconds=True)
        kept = [sum(device.activations for device in choice.prediction.memory) for choice in found]
        steps = [choice.prediction.step_seconds for choice in found]
        assert kept[0] > kept[2] > kept[1]  # nothing, selective, full
        assert steps[0] < steps[2] < steps[1]


@pytest.mark.parametrize(
    ("rows", "hidden", "seq", "rules"),
    [(1, 2048, 2048, RECOMPUTES[1:]), (4, 2048, 2048, RECOMPUTES[:0:-1]), (27, 512, 512, RECOMPUTES[1:])],
    ids=str,
)
def test_a_tensor_group_keeps_for_recompute_what_its_devices_gather_and_sum(
    rows: int, hidden: int, seq: int, rules: Sequence[Recompute]
) -> None:
    """Large layers hand on parts, which the devices gather: of the tokens of a row, or of the rows of a micro-batch.
    Small ones do so where a micro-batch has many rows, which devices may divide unevenly. Among the cases every number
    of devices has every rule."""
    sizes = SIZES | {"hidden": hidden, "heads": 16, "seq": seq, "vocab": 512, "batch_size": rows}
    loaded = load_model("examples/models/llama.py:llama", sizes, device="meta")
    trial = CandidateCompiler(loaded.model, loaded.batch, name="llama")
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2, 4), captured=trial.captured, rules=True)
    for degree, rule in zip((2, 4), rules, strict=True):
        ranks = tuple(range(degree))
        stage = StageChoice(
            first=0, last=len(profile.layers), ranks=ranks, data=1, tensor=degree, rows=(rows,), recompute=rule
        )
        candidate = evaluate(profile, CLUSTER, [stage], micro_batches=1, precision="fp32")
        choice = PlanWriter(profile, CLUSTER, rows, trial).compiled(candidate, trial)
        assert choice.compiled, choice.reason
        assert choice.plan.workload is not None
        searched, compiled = (one.stages[0].kept_bytes[0] for one in (candidate.workload, choice.plan.workload))
        # What enters the head is counted whole, of which devices hold parts: a fifteenth of all with four layers.
        assert 1.0 <= (searched + rows * profile.row_bytes) / compiled <= 1.15, (degree, rule)


def compare(
    trial: CandidateCompiler,
    profile: ModelProfile,
    plans: Sequence[Sequence[StageChoice]],
    precision: str,
    *,
    seconds: bool = False,
    gradient_dtype: str | None = None,
    below: float = BELOW,
) -> list[Choice]:
    """Compare what the search counts for some plans with what the compiled ones hold, and take."""
    found = []
    for layout in plans:
        candidate = evaluate(
            profile,
            CLUSTER,
            layout,
            micro_batches=MICRO_BATCHES,
            precision=precision,
            optimizer=trial.optimizer,
            gradient_dtype=gradient_dtype,
        )
        choice = PlanWriter(profile, CLUSTER, BATCH, trial, gradient_dtype).compiled(candidate, trial)
        assert choice.compiled, choice.reason
        compiled = {device.rank: device for device in choice.prediction.memory}
        for device in candidate.prediction.memory:
            wanted = held(compiled[device.rank])
            assert below <= (held(device) + BATCH * profile.row_bytes) / wanted <= ABOVE, (layout, device)
        if seconds:
            searched = candidate.prediction.step_seconds
            assert searched == pytest.approx(choice.prediction.step_seconds, rel=0.06), layout
        found.append(choice)
    return found


@pytest.mark.parametrize(("optimizer", "num_bytes"), [("adamw", 8), ("sgd_momentum", 6), ("sgd", 4), ("none", 4)])
def test_weights_gradients_and_states_have_the_number_type_of_the_run(optimizer: Any, num_bytes: int) -> None:
    profile = small()
    (one,) = evaluate(
        profile,
        Cluster.homogeneous(1, A100),
        [StageChoice(first=0, last=len(profile.layers), ranks=(0,), data=1, tensor=1, rows=(8,))],
        micro_batches=1,
        precision="bf16",
        optimizer=optimizer,
    ).prediction.memory
    parameters = sum(p.numel() for p in model().parameters())
    assert one.parameters + one.gradients + one.optimizer == num_bytes * parameters


def test_what_fits_depends_on_the_optimizer() -> None:
    parameters = sum(p.nbytes for p in model().parameters())
    card = DeviceType.of(
        "card",
        speed={"float32": 1e12},
        memory_bytes=round(FRAMEWORK_BYTES + 3 * parameters),
        memory_bandwidth=1e12,
    )
    cluster = Cluster.homogeneous(1, card, intra=A100.intra_node)
    for optimizer, fits in (("sgd", True), ("adamw", False)):
        settings = SearchSettings(optimizer=optimizer, time_limit=60.0)  # type: ignore[arg-type]
        with nullcontext() if fits else pytest.raises(InfeasibleError):
            assert search(small(), cluster, batch=8, settings=settings).best.prediction.fits


def test_an_optimizer_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="adamw"):
        search(small(), CLUSTER, batch=8, settings=SearchSettings(optimizer="adam"))  # type: ignore[arg-type]


def test_what_is_too_large_for_eight_devices_is_split_over_more() -> None:
    experts = nn.Linear(2**15, 2**17, bias=False, device="meta")  # 16 GiB in float32
    assert tensor_degrees(Cluster.homogeneous(32), experts) == (1, 2, 4, 8)
    assert tensor_degrees(Cluster.homogeneous(32), nn.Linear(2**17, 2**17, device="meta")) == (1, 2, 4, 8, 16, 32)
    assert tensor_degrees(Cluster.homogeneous(8), experts) == (1, 2, 4, 8)


def test_degrees_that_annotations_ask_for_are_profiled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    whale.annotate(model, {"0": whale.split(3), "1": whale.split(7)})
    scopes = module_scopes(model)
    assert tensor_degrees(Cluster.homogeneous(6), model, scopes=scopes) == (1, 2, 3, 4)
    assert expert_degrees(Cluster.homogeneous(6), scopes) == (2, 3, 4, 6)
