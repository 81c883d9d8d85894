"""Rows that are cut, in profiles, predictions and searches: what a part costs, what a ring hides, when it is tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests.small_models import decoder, tokens
from whale.cli.model_loader import load_model
from whale.commands.candidates import CandidateCompiler
from whale.commands.planning import make_plan
from whale.commands.searching import Searched, search_plans
from whale.compile.options import Options
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.profile import LayerVariant, ModelProfile
from whale.planner.cost.configuration import Configuration
from whale.planner.cost.estimate import estimate
from whale.planner.cost.memory import FRAGMENTATION
from whale.planner.cost.stage import CostModel, exposed_beside
from whale.planner.search import SearchSettings
from whale.predict.costs import Costs
from whale.strategies.profile import profile_model

CARD = DeviceType.of("card", speed={"float32": 1e13, "bfloat16": 1e14}, memory_bytes=2**34, memory_bandwidth=1e12)
LINK = Link(bandwidth=1e11, latency=5e-6)


def long_gpt(rows: int = 1, length: int = 8192) -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"layers": 2, "hidden": 1024, "heads": 8, "seq": length, "vocab": 1000, "dropout": 0.0}
    loaded = load_model("examples/models/gpt.py:gpt", sizes, batch_size=rows, device="meta")
    return loaded.model, loaded.batch


def volumes(**sizes: int) -> tuple[nn.Module, dict[str, Any]]:
    spec = "examples/models/cosmoflow.py:cosmoflow"
    loaded = load_model(spec, {"channels": 1, **sizes}, batch_size=2, device="meta")
    return loaded.model, loaded.batch


def profiled(model: nn.Module, batch: Any, **options: Any) -> ModelProfile:
    return profile_model(model, batch, tensor_degrees=(1,), **options)


def block(profile: ModelProfile, context: int) -> LayerVariant:
    kind = next(kind for kind in profile.kinds if "layers.0" in kind.name)
    every = (*kind.variants, *kind.context_variants)
    return next(one for one in every if (one.tensor_degree, one.context_degree) == (1, context))


def flops(variant: LayerVariant) -> float:
    return sum(one.flops(2) / (2 if one.causal else 1) for one in variant.forward if one.kind != "memory")


def test_a_device_of_a_context_group_computes_and_keeps_its_part_of_each_row_and_has_all_parameters() -> None:
    found = profiled(*long_gpt(), context_degrees=(2, 4))
    assert (found.cut_dim, found.uncut) == (1, ())
    whole = block(found, 1)
    for context in (2, 4):
        part = block(found, context)
        assert flops(part) == pytest.approx(flops(whole) / context, rel=1e-3)
        assert sum(one.size.total(2, 2) for one in part.saved) == pytest.approx(
            sum(one.size.total(2, 2) for one in whole.saved) / context, rel=0.05
        )
        assert part.parameters == whole.parameters
        ring = [one for one in part.forward_communications if one.beside]
        assert len(ring) == context - 1
        # keys and values of a part go to one rank, as an all-to-all sends them to all others together
        each = 2 * 8192 // context * 1024
        assert ring[0].size.elements(2) == pytest.approx(2 * each * context / (context - 1))
        assert {one.group for one in part.forward_communications} == {"context"}


def test_a_volume_is_cut_along_its_depth_into_as_many_parts_as_its_poolings_leave() -> None:
    model, batch = volumes(size=32, width=4, most=8)
    found = profiled(model, batch, context_degrees=(2, 4, 8))
    assert found.cut_dim == 2
    assert [context for context, _ in found.uncut] == [8]
    assert "can be cut into at most 4 parts" in found.uncut[0][1]
    assert [one.context_degree for one in found.kinds[0].context_variants] == [2, 4]


def test_rows_of_features_are_not_cut() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = profile_model(
        model, (torch.randn(4, 8),), tensor_degrees=(1,), context_degrees=(2,), loss_fn=lambda y, _: y.square().mean()
    )
    assert found.cut_dim == 0
    assert "no dim of the batch but its rows" in found.uncut[0][1]


def test_a_ring_is_hidden_by_all_of_its_attention_but_the_columns_that_come_last() -> None:
    assert exposed_beside([1.0, 1.0, 1.0], attention=2.0, ranks=4) == 1.5
    assert exposed_beside([1.0, 1.0, 1.0], attention=8.0, ranks=4) == 0.0
    assert exposed_beside([], attention=1.0, ranks=1) == 0.0


@pytest.mark.parametrize("way", ["ring", "ulysses", "gather"])
def test_an_estimate_is_what_a_compiled_step_of_the_annotation_is_predicted_to_take(way: Any) -> None:
    cluster = Cluster.homogeneous(2, CARD, intra=LINK)
    model, batch = long_gpt()
    profile = profiled(model, batch, context_degrees=(2,), name="gpt")
    said = estimate(profile, cluster, Configuration(batch=1, context=2, precision="fp32", stack="whale")).prediction
    whale.annotate(model, {"": whale.split(dim=1, attention=way)})
    costs = Costs(profile=profile, cluster=cluster, precision="fp32", device="cuda")
    planned = make_plan(model, batch, costs, Options(), rows=1, name="gpt").predicted.prediction
    assert planned.step_seconds == pytest.approx(said.step_seconds, rel=0.05)
    assert max(one.total for one in planned.memory) == pytest.approx(max(one.total for one in said.memory), rel=0.1)


@pytest.mark.parametrize("rule", ["none", "full"])
def test_the_copy_of_a_devices_part_of_the_batch_is_counted(rule: Any) -> None:
    cluster = Cluster.homogeneous(2, CARD, intra=LINK)
    model, batch = volumes(size=64, width=4, most=8)
    profile = profiled(model, batch, context_degrees=(2,), rules=True, name="volumes")
    configuration = Configuration(
        batch=2, micro_batch=2, context=2, precision="fp32", stack="whale", recompute=rule
    )  # fmt: skip
    said = estimate(profile, cluster, configuration).prediction
    whale.annotate(model, {"": whale.split(dim=2)})
    costs = Costs(profile=profile, cluster=cluster, precision="fp32", device="cuda")
    planned = make_plan(model, batch, costs, Options(recompute=rule), rows=2, name="volumes").predicted.prediction
    of_part = 2 * profile.row_bytes / 2
    assert min(one.activations for one in planned.memory) > 2 * profile.row_bytes + of_part
    both = [max(one.total - one.framework for one in found.memory) for found in (said, planned)]
    whole = 2 * profile.row_bytes * (1 + FRAGMENTATION)  # which a prediction has in what the framework takes
    assert both[1] <= both[0] + whole <= 1.3 * both[1]


def test_the_allocator_reserves_as_much_beyond_the_batch_as_beyond_activations() -> None:
    cluster = Cluster.homogeneous(1, CARD)
    profile = profiled(*volumes(size=32, width=4, most=8))
    costs = [CostModel.of(profile, cluster, precision="fp32", batch=rows) for rows in (0, 4)]
    none, some = (one.overhead_bytes["card"] for one in costs)
    assert some - none == pytest.approx((1 + FRAGMENTATION) * 4 * profile.row_bytes)
    assert profile.row_bytes == 4 * (32**3 + 4)


def searched(
    batch: int, cluster: Cluster, model: nn.Module, example: Any, degrees: Sequence[int] = (1, 2)
) -> tuple[Searched, list[ModelProfile]]:
    """A search, and the profiles to which it had cuts added."""
    asked: list[ModelProfile] = []
    trial = CandidateCompiler(model, example, name="model")
    profile = profile_model(model, example, tensor_degrees=degrees, name="model", captured=trial.captured)

    def with_cuts(given: ModelProfile) -> ModelProfile:
        asked.append(given)
        return trial.with_cuts(given, (2, 4))

    settings = SearchSettings(time_limit=120.0, top=2, zero="auto", precision=trial.precision)
    more: dict[str, Any] = {"trial": trial, "with_rules": trial.with_rules, "with_cuts": with_cuts}
    return search_plans(profile, cluster, batch=batch, settings=settings, **more), asked


def test_one_long_row_is_cut_over_all_devices() -> None:
    found, asked = searched(1, Cluster.homogeneous(4, CARD, intra=LINK), *long_gpt())
    assert len(asked) == 1
    (stage,) = found.best.candidate.stages
    assert (stage.data, stage.tensor, stage.context) == (1, 1, 4)
    assert found.best.compiled
    assert found.best.plan.annotations == {"": ("split(4, dim=1)",)}
    assert found.best.prediction.step_seconds == pytest.approx(found.best.candidate.prediction.step_seconds, rel=0.03)


def test_rows_enough_for_all_devices_are_not_cut_and_nothing_is_profiled_for_it() -> None:
    found, asked = searched(4, Cluster.homogeneous(4, CARD, intra=LINK), *long_gpt(4, 256))
    assert not asked
    assert all(stage.context == 1 for choice in found.choices for stage in choice.candidate.stages)


def test_rows_that_only_wait_for_launches_are_not_cut() -> None:
    _, asked = searched(2, Cluster.homogeneous(4, CARD, intra=LINK), decoder(layers=1).float().to("meta"), tokens(2))
    assert not asked


def test_a_volume_that_fits_in_no_other_way_is_cut() -> None:
    model, example = volumes(size=128, width=8, most=16)
    small = DeviceType.of("card", speed={"float32": 1e13}, memory_bytes=3400 * 2**20, memory_bandwidth=1e12)
    found, asked = searched(2, Cluster.homogeneous(2, small, intra=LINK), model, example, degrees=(1,))
    assert asked
    assert all(stage.context == 2 for stage in found.best.candidate.stages)


def test_a_profile_without_cuts_is_refused_for_a_plan_that_cuts() -> None:
    profile = profiled(*long_gpt(), name="gpt")
    configuration = Configuration(batch=1, context=2, precision="fp32", stack="whale")
    with pytest.raises(whale.WhaleError, match=r"context degree 2; it knows no context degree"):
        estimate(profile, Cluster.homogeneous(2, CARD, intra=LINK), configuration)
