"""Recompute in plans: what each rule keeps and computes again of a layer, and which rule a search gives a stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.small_models import decoder, tokens
from whale.commands.candidates import CandidateCompiler
from whale.commands.searching import Searched, search_plans
from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import Plan
from whale.ir.profile import LayerVariant, ModelProfile
from whale.ir.strategy import Recompute
from whale.planner.cost.configuration import Configuration
from whale.planner.cost.estimate import estimate
from whale.planner.cost.layers import layer_seconds, run_again
from whale.planner.cost.memory import run_kept_bytes
from whale.planner.cost.precision import precision_named
from whale.planner.cost.stage import CostModel
from whale.planner.search import Candidate, Progress, SearchSettings, StageChoice, evaluate, search
from whale.strategies import profile
from whale.strategies.layers import layered
from whale.strategies.profile import profile_model

CARD = DeviceType.of("card", speed={"float32": 1e10}, memory_bytes=2**33, memory_bandwidth=1e9)


class Checkpointed(nn.Module):
    """A decoder whose layers are in checkpoints of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder(layers=2, heads=4, width=32).float()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.inner.embed(tokens)
        for layer in self.inner.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.inner.head(x).flatten(0, 1), labels.flatten())


def profiled(model: nn.Module, **options: Any) -> ModelProfile:
    return profile_model(model.to("meta"), tokens(8, 32), tensor_degrees=(1, 2), **options)


def block(profile: ModelProfile, degree: int = 1) -> LayerVariant:
    kind = next(kind for kind in profile.kinds if "layers.0" in kind.name)
    return next(variant for variant in kind.variants if variant.tensor_degree == degree)


def test_a_rule_keeps_less_of_a_layer_and_runs_more_of_its_kernels_again() -> None:
    found = profiled(decoder(layers=2, heads=4, width=32).float(), rules=True)
    kind = next(kind for kind in found.kinds if "layers.0" in kind.name)
    for degree in (1, 2):
        kept = [
            run_kept_bytes(kind, tensor_degree=degree, precision=precision_named("fp32"), recompute=rule)(4)
            for rule in found.rules
        ]
        again = [len(run_again(block(found, degree), rule)) for rule in found.rules]
        assert kept[0] > kept[1] > kept[2]
        assert 0 == again[0] < again[1] < again[2]
        selective, full = (
            {kernel.kind for kernel in run_again(block(found, degree), rule)} for rule in found.rules[1:]
        )
        assert selective == {"memory"}
        assert {"matmul", "attention"} <= full
    # the input of a layer of 32 units and rows of 32 tokens; split, also the sums that ranks exchange
    assert run_kept_bytes(kind, precision=precision_named("fp32"), recompute="full")(4) == 4 * 32 * 32 * 4
    seconds = [
        layer_seconds(kind, CARD, rows=4, precision="fp32", optimizer="adamw", recompute=rule) for rule in found.rules
    ]
    assert seconds[0].backward < seconds[1].backward < seconds[2].backward
    assert seconds[2].backward <= seconds[0].backward + seconds[0].forward
    assert len({one.forward for one in seconds}) == len({one.backward_collectives for one in seconds}) == 1


def test_the_head_and_the_embedding_are_as_without_a_rule() -> None:
    found = profiled(decoder(layers=2, heads=4, width=32).float(), rules=True)
    assert [bool(kind.variants[0].rules) for kind in found.kinds] == ["layers" in kind.name for kind in found.kinds]


def test_a_checkpoint_of_torch_is_priced_as_it_runs() -> None:
    plain = profiled(decoder(layers=2, heads=4, width=32).float())
    found = profiled(Checkpointed())
    kinds = [next(kind for kind in one.kinds if "layers.0" in kind.name) for one in (plain, found)]
    kept = [run_kept_bytes(kind, precision=precision_named("fp32"))(4) for kind in kinds]
    seconds = [layer_seconds(kind, CARD, rows=4, precision="fp32", optimizer="adamw").backward for kind in kinds]
    assert kept[1] < kept[0] / 3
    assert seconds[1] > 1.2 * seconds[0]


def test_a_profile_that_says_nothing_of_recompute_is_refused() -> None:
    found = profiled(decoder(layers=2, heads=4, width=32).float())
    prices = CostModel.of(found, Cluster.homogeneous(1, CARD))
    with pytest.raises(UsageError, match="does not say what recompute 'full' keeps"):
        prices.under("full")


def deep_search(memory_bytes: int, **given: Any) -> Searched:
    """A search for a deep decoder on four small devices, which is profiled with rules only if that is asked for."""
    model, batch = decoder(layers=12, heads=4, width=32).float().to("meta"), tokens(16, 64)
    card = DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=memory_bytes, memory_bandwidth=1e9)
    machines = Cluster.homogeneous(4, card, intra=Link(bandwidth=1e9, latency=1e-5))
    trial = CandidateCompiler(model, batch, name="deep")
    profile = profile_model(model, batch, tensor_degrees=(1, 2), captured=trial.captured)
    asked: list[ModelProfile] = []

    def with_rules(profile: ModelProfile) -> ModelProfile:
        asked.append(trial.with_rules(profile))
        return asked[-1]

    settings = SearchSettings(time_limit=60.0, micro_batches=4, **given)
    found = search_plans(profile, machines, batch=16, settings=settings, trial=trial, with_rules=with_rules)
    return replace(found, refused=(), found=replace(found.found, tried=len(asked)))


def test_a_search_computes_again_only_what_memory_needs() -> None:
    wide = deep_search(2**33, top=12)
    assert wide.found.tried == 0
    assert all(one.recompute is None for one in wide.best.plan.stages)
    smallest = min(max(held.total for held in one.prediction.memory) for one in wide.choices)
    narrow = deep_search(int(0.85 * smallest))
    assert narrow.found.tried == 1
    rules = {stage.recompute for stage in narrow.best.plan.stages}
    assert rules & {"selective", "full"}
    assert narrow.best.prediction.fits
    assert narrow.best.prediction.step_seconds > wide.best.prediction.step_seconds
    again = Plan.parse(narrow.best.plan.dumps())
    assert [stage.recompute for stage in again.stages] == [one.recompute for one in narrow.best.candidate.stages]
    with pytest.raises(InfeasibleError, match="would fit with .*recompute '(selective|full)'"):
        deep_search(int(0.85 * smallest), recompute="none")


def test_a_search_computes_again_where_that_is_faster_than_what_fits_without() -> None:
    """Replicas of the whole model lack a byte; parts of it fit, and wait."""
    found = profiled(decoder(layers=12, heads=4, width=32).float(), rules=True)

    def best(memory_bytes: int, recompute: Literal["auto", "none"]) -> Candidate:
        card = DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=memory_bytes, memory_bandwidth=1e9)
        machines = Cluster.homogeneous(4, card, intra=Link(bandwidth=1e9, latency=1e-5))
        settings = SearchSettings(time_limit=60.0, micro_batches=1, recompute=recompute)
        return search(found, machines, batch=16, settings=settings).best

    wide = best(2**33, "auto")
    assert [(stage.data, stage.recompute) for stage in wide.stages] == [(4, "none")]
    tight = max(held.total for held in wide.prediction.memory) - 1
    without, again = best(tight, "none"), best(tight, "auto")
    assert [(stage.data, stage.recompute) for stage in again.stages] == [(4, "selective")]
    assert again.prediction.step_seconds < 0.9 * without.prediction.step_seconds


@pytest.mark.parametrize("rule", ["none", "selective", "full"])
def test_an_estimate_of_degrees_is_that_of_the_plan_that_they_name(rule: Recompute) -> None:
    found = profiled(decoder(layers=4, heads=4, width=32).float(), rules=True)
    machines = Cluster.homogeneous(4, CARD, intra=Link(bandwidth=1e9, latency=1e-5))
    given = Configuration(batch=16, micro_batch=2, pipeline=2, data=2, recompute=rule, precision="fp32", stack="whale")
    estimated = estimate(found, machines, given)
    stages = [
        StageChoice(
            first=layers.start,
            last=layers.stop,
            ranks=(2 * index, 2 * index + 1),
            data=2,
            tensor=1,
            rows=(2, 2),
            recompute=rule,
        )
        for index, layers in enumerate(estimated.cuts)
    ]
    planned = evaluate(found, machines, stages, micro_batches=4).prediction
    assert estimated.prediction.step_seconds == pytest.approx(planned.step_seconds)
    assert [one.activations for one in estimated.prediction.memory] == [one.activations for one in planned.memory]


def test_what_was_found_under_one_rule_stays_where_the_search_is_stopped_under_the_next() -> None:
    found = profiled(decoder(layers=12, heads=4, width=32).float(), rules=True)
    card = DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=2**33, memory_bandwidth=1e9)
    settings = SearchSettings(time_limit=60.0, micro_batches=2, max_stages=1)

    wide = search(found, Cluster.homogeneous(1, card), batch=16, settings=settings).best
    tight = wide.prediction.memory[0].total - 1
    asked: list[bool] = []

    def told(progress: Progress) -> None:
        asked.extend([True] * (progress.best_seconds is not None))

    machines = Cluster.homogeneous(1, replace(card, memory_bytes=tight))
    best = search(found, machines, batch=16, settings=settings, progress=told, stop=lambda: bool(asked)).best
    assert {stage.recompute for stage in best.stages} == {"selective"}


def test_layers_are_captured_once_for_a_profile_and_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = decoder(layers=2, heads=4, width=32).float().to("meta"), tokens(4, 32)
    trial = CandidateCompiler(model, batch, name="few rows")
    calls: list[object] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return layered(*args, **kwargs)

    monkeypatch.setattr(profile, "layered", counted)
    given: dict[str, Any] = {"tensor_degrees": (1, 2), "captured": trial.captured, "name": "few rows"}
    plain = profile_model(model, batch, **given, known=trial.layers)
    ruled = trial.with_rules(plain)
    assert len(calls) == 1
    assert ruled.kinds == profile_model(model, batch, **given, rules=True).kinds


def test_rules_are_not_measured_to_the_end_where_a_search_is_stopped() -> None:
    model, batch = decoder(layers=1, heads=2, width=8).to("meta").float(), tokens(4, 8)
    trial = CandidateCompiler(model, batch, name="stopped")
    plain = profile_model(model, batch, tensor_degrees=(1, 2), captured=trial.captured, known=trial.layers)
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    assert trial.with_rules(plain, stop=stop) is plain
    assert asked == [False, False, True]
    assert trial.with_rules(plain).rules != plain.rules
    assert trial.with_cuts(plain, (2,), stop=lambda: True) is plain


def test_a_profile_for_few_rows_has_the_rules_of_one_for_many() -> None:
    """In a group of four the layers are placed in another way from eight rows on."""
    model, batch = decoder(layers=2, heads=16, width=1024).to("meta").float(), tokens(4, 1024)
    trial = CandidateCompiler(model, batch, name="few rows")
    given: dict[str, Any] = {"tensor_degrees": (1, 4), "captured": trial.captured, "name": "few rows"}
    plain = profile_model(model, batch, **given, known=trial.layers)
    every, few = trial.with_rules(plain), trial.with_rules(plain, rows=3)
    assert every.kinds != few.kinds
    for all_rules, own in zip(every.kinds, few.kinds, strict=True):
        for one, other in zip(all_rules.variants, own.variants, strict=True):
            assert other == one.model_copy(update={"rules": tuple(r for r in one.rules if r.least <= 4 * 4)})
