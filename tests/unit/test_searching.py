"""Tests of which plans a search compiles, and which wins: with a model that compiles to what a test says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.chains import card, chain, layer, machines
from whale.cli.assumptions import in_precision
from whale.cli.model_loader import load_model
from whale.commands import searching
from whale.commands.compiled_candidates import CompiledCandidates
from whale.commands.plan_writer import PlanWriter
from whale.commands.searching import search_plans
from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Cluster, Link
from whale.ir.plan import ModelIdentity, Plan
from whale.ir.profile import ModelProfile
from whale.ir.workload import Prediction, Workload
from whale.planner.search import Found, Progress, SearchSettings, search
from whale.planner.search.problem import Stopped
from whale.planner.search.simple import simple_plans

SLOW = Link(bandwidth=1e8, latency=1e-3)
LAYERS = [0] * 8


@dataclass
class Model:
    """Compiles every plan to the search's prediction, changed by a rule."""

    change: Callable[[Plan, Prediction], Prediction]
    identity: ModelIdentity = field(default_factory=lambda: ModelIdentity(name="model", hash="sha256:0"))
    num_operators: int = 0
    compiled: int = 0
    seconds: float = 0.0

    def uncut(self, micro_batches: int) -> str:
        return ""

    def places(self, anchors: Sequence[str]) -> Iterable[tuple[str, int]]:
        return [(path, index) for index, path in enumerate(anchors)]

    def dim_along(self, path: str, dim: int) -> int | None:
        return dim

    def predict(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Prediction, Workload]:
        self.compiled += 1
        time.sleep(self.seconds)
        assert plan.prediction is not None and plan.workload is not None
        return self.change(plan, plan.prediction), plan.workload

    def forked(self) -> None:
        """Nothing to prepare."""


def profile(**sizes: float) -> ModelProfile:
    kinds = [layer({"cpu-fast": 1e-2, "cpu-slow": 2e-2}, **sizes)]  # type: ignore[arg-type]
    return chain(kinds, LAYERS).model_copy(update={"paths": tuple(f"layers.{index}" for index in range(len(LAYERS)))})


def searched(model: Model, given: ModelProfile, cluster: Cluster, **settings: Any) -> Any:
    return search_plans(given, cluster, batch=16, settings=SearchSettings(**settings), trial=model)


def faster(num_stages: int, factor: float) -> Callable[[Plan, Prediction], Prediction]:
    """Plans of *num_stages* stages take a part, *factor*, of what the search said."""

    def change(plan: Plan, prediction: Prediction) -> Prediction:
        part = factor if len(plan.stages) == num_stages else 1.0
        return prediction.model_copy(update={"step_seconds": prediction.step_seconds * part})

    return change


def larger(cluster: Cluster, factor: float) -> Callable[[Plan, Prediction], Prediction]:
    """Every plan takes *factor* times the memory that the search said."""

    def change(plan: Plan, prediction: Prediction) -> Prediction:
        memory = tuple(
            one.model_copy(update={"buffers": one.buffers + round(one.total * (factor - 1))})
            for one in prediction.memory
        )
        fits = all(one.total <= cluster.devices[one.rank].memory_bytes for one in memory)
        return prediction.model_copy(update={"memory": memory, "fits": fits})

    return change


def test_one_stage_wins_where_its_sums_run_beside_the_backward() -> None:
    """The search prices the sums as exposed, and prefers a pipeline by far."""
    cluster = machines([card("fast")] * 4, SLOW)
    given = profile(parameters=2e5)
    pipeline = searched(Model(faster(1, 1.0)), given, cluster).best
    assert len(pipeline.plan.stages) > 1
    alone = min(
        (one for one in simple_plans(given, cluster, batch=16, settings=SearchSettings()) if len(one.stages) == 1),
        key=lambda one: one.prediction.step_seconds,
    )
    needed = 0.98 * pipeline.prediction.step_seconds / alone.prediction.step_seconds
    found = searched(Model(faster(1, needed)), given, cluster, top=1).best
    assert found.compiled and len(found.plan.stages) == 1


def test_simple_plans_are_not_compiled_where_they_could_not_be_better() -> None:
    cluster = machines([card("fast")] * 4, SLOW)
    model = Model(faster(1, 1.0))
    searched(model, profile(parameters=1e8), cluster)
    assert model.compiled <= 8  # five of the search, and pipelines of a stage a device


@pytest.mark.parametrize(("zero", "divides"), [("auto", True), (0, False)])
def test_simple_plans_divide_states_of_the_optimizer_where_that_is_faster(zero: Any, divides: bool) -> None:
    """An update takes longer than what a layer computes."""
    cluster, given = machines([card("fast")] * 4, Link(bandwidth=1e11, latency=1e-6)), profile()
    measured = tuple(one.model_copy(update={"update": (1.0, 1.0)}) for one in given.kinds[0].measured)
    given = given.model_copy(update={"kinds": (given.kinds[0].model_copy(update={"measured": measured}),)})
    plans = simple_plans(given, cluster, batch=16, settings=SearchSettings(zero=zero))
    every = [one for one in plans if len(one.stages) == 1 and one.stages[0].data == 4]
    assert every and all(any(own.level for own in one.stages) == divides for one in every)


@pytest.mark.parametrize(("factor", "divides"), [(0.95, True), (0.995, False), (1.0, False), (1.05, False)])
def test_states_are_divided_where_that_is_faster_once_compiled(factor: float, divides: bool) -> None:
    """Less than a hundredth of a step is not worth it; the search says that it makes no difference."""

    def change(plan: Plan, prediction: Prediction) -> Prediction:
        part = factor if any(stage.state is not None for stage in plan.stages) else 1.0
        return prediction.model_copy(update={"step_seconds": prediction.step_seconds * part})

    cluster = machines([card("fast")] * 4, Link(bandwidth=1e11, latency=1e-6))
    model = Model(change)
    found = searched(model, profile(), cluster, zero="auto", top=1)
    assert found.best.compiled and any(stage.state is not None for stage in found.best.plan.stages) == divides
    assert model.compiled > 1


@pytest.mark.parametrize("factor", [1.01, 1.1, 1.3])
def test_where_no_plan_fits_once_compiled_others_are_tried_until_one_does(factor: float) -> None:
    """Memory that the search lacks is found by compiling, and searched with."""
    given = profile(parameters=2e8, kept=2e8)
    roomy = machines([card("fast"), card("slow")] * 2)
    needs = max(one.total for one in searched(Model(faster(1, 1.0)), given, roomy).best.prediction.memory)
    cluster = machines([card("fast", needs / 2**30), card("slow", needs / 2**30)] * 2)
    found = searched(Model(larger(cluster, factor)), given, cluster)
    assert found.best.compiled and found.best.prediction.fits


def test_where_no_plan_fits_once_compiled_others_are_tried_after_the_time_limit_too() -> None:
    cluster = machines([card("fast"), card("slow")] * 2)
    beyond = larger(cluster, 1e9)
    time_limit = 0.5
    model = Model(lambda plan, given: beyond(plan, given) if model.compiled < 4 else given, seconds=0.2)
    assert searched(model, profile(), cluster, time_limit=time_limit).best.compiled
    assert model.compiled >= 4
    model = Model(beyond, seconds=0.35)
    with pytest.raises(UsageError, match="no time .* --time-limit. So far none of the . best .* needs .* on cpu"):
        searched(model, profile(), cluster, time_limit=time_limit)


@pytest.mark.parametrize("by_user", [False, True])
def test_a_search_that_time_ended_without_a_plan_says_which_option_gives_it_more(
    monkeypatch: pytest.MonkeyPatch, by_user: bool
) -> None:
    def ended(*given: Any, progress: Callable[[Progress], None], stop: Callable[[], bool], **more: Any) -> Found:
        progress(Progress(best_seconds=1.0, bound_seconds=0.5, tried=1, elapsed=0.0))  # fits without its host
        assert stop()
        raise Stopped("the search was stopped before it found a plan that fits")

    monkeypatch.setattr(searching, "search", ended)
    monkeypatch.setattr(searching, "SEARCH_SHARE", -1.0)
    cluster = machines([card("fast")] * 2)
    with pytest.raises(InfeasibleError if by_user else UsageError, match="was stopped" if by_user else "--time-limit"):
        search_plans(
            profile(),
            cluster,
            batch=16,
            settings=SearchSettings(),
            trial=Model(larger(cluster, 1.0)),
            stop=lambda: by_user,
        )


def test_plans_that_processes_share_are_compiled_until_the_time_limit() -> None:
    """With one that can be run the others are written down when the time is over."""
    cluster, given = machines([card("fast")] * 3 + [card("slow")] * 3, SLOW), profile(parameters=1e6)
    found = search(given, cluster, batch=16, settings=SearchSettings(time_limit=100.0, top=30))
    model = Model(faster(1, 1.0), num_operators=10**6, seconds=0.5)
    writer, limit = PlanWriter(given, cluster, 16, model), 1.2
    tried = CompiledCandidates(writer, model, None, time.monotonic() + limit, limit, lambda: False, processes=2)
    tried.best_of(found, lambda: [], 30)
    assert tried.choices[0].compiled
    assert len(tried.choices) >= 8
    assert model.compiled <= 3  # by this process; without an end it is half of all


def test_what_does_not_fit_at_all_is_refused_with_what_it_lacks() -> None:
    cluster = machines([card("fast")] * 2)
    with pytest.raises(InfeasibleError, match="can be run: needs .* on cpu-fast"):
        searched(Model(larger(cluster, 1000.0)), profile(), cluster)


def test_pictures_take_the_precision_that_is_asked_for() -> None:
    sizes = {"layers": 14, "size": 32, "classes": 4}
    loaded = load_model("examples/models/resnet.py:resnet", sizes, batch_size=2, device="meta")
    assert in_precision(loaded, "bf16") == "bf16"  # as autocast casts, on pictures in float32
    assert str(next(iter(loaded.batch.values())).dtype) == "torch.float32"
    assert in_precision(loaded, "float16") == "fp16"
    assert [str(x.dtype) for x in loaded.batch.values()] == ["torch.float16", "torch.int64"]


def test_plans_that_could_be_better_than_what_compiling_shows_are_compiled_too() -> None:
    """Plans with the micro-batches of the best one take longer than the search said, others do not."""
    cluster = machines([card("fast")] * 2 + [card("slow")] * 2, SLOW)

    def slower(plan: Plan, prediction: Prediction) -> Prediction:
        factor = 1.3 if plan.micro_batches == first.micro_batches else 1.0
        return prediction.model_copy(update={"step_seconds": prediction.step_seconds * factor})

    first = searched(Model(faster(1, 1.0)), profile(), cluster, top=1).best.plan
    found = searched(Model(slower), profile(), cluster, top=2)
    assert found.best.plan.micro_batches != first.micro_batches
    assert found.best.prediction.step_seconds < 1.29 * first.prediction.step_seconds


def test_a_thorough_search_begins_with_the_default_one_and_searches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is compiled by default is compiled too, without another search."""
    cluster, given = machines([card("fast")] * 3 + [card("slow")] * 3, SLOW), profile(parameters=1e6)
    found: list[Found] = []

    def counted(*args: Any, **kwargs: Any) -> Found:
        found.append(search(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(searching, "search", counted)
    default, model = Model(faster(1, 1.0)), Model(faster(1, 1.0))
    plain = searched(default, given, cluster, time_limit=100.0).best.prediction.step_seconds
    thorough = searched(model, given, cluster, time_limit=100.0, thorough=True).best.prediction.step_seconds
    first, second = found
    assert first.default is None
    assert second.default is not None
    assert second.default.candidates == first.candidates
    assert thorough <= plain
    assert model.compiled >= default.compiled
