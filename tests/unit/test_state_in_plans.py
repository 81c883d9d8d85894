"""State in stretches in plans: what ranks exchange for it, how long a step takes with it, and what devices hold."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest

import whale
from tests.small_models import decoder, tokens
from whale import replicate, split, stage
from whale.commands.candidates import CandidateCompiler
from whale.commands.searching import Searched, search_plans
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import Plan
from whale.ir.profile import ModelProfile
from whale.ir.state import StateSharding, shares_of
from whale.ir.strategy import Recompute
from whale.planner.cost.configuration import Configuration
from whale.planner.cost.estimate import estimate
from whale.planner.cost.state_shares import fitting_shares
from whale.planner.explain import savings
from whale.planner.search import SearchSettings, StageChoice, evaluate
from whale.predict.costs import Costs
from whale.predict.dry_step import DryStep
from whale.predict.peak_memory import _program, brief_peak_memory, peak_memory
from whale.predict.prediction import Predicted, predict
from whale.predict.traffic import bucket_bytes, traffic
from whale.strategies.profile import profile_model

CARD = DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=2**33, memory_bandwidth=1e9)
HALVES: dict[str, Any] = {"layers.0": [stage(2), replicate()], "layers.2": [stage(2), replicate()]}


def machines(ranks: int, bandwidth: float = 1e9, card: DeviceType = CARD) -> Cluster:
    return Cluster.homogeneous(ranks, card, intra=Link(bandwidth=bandwidth, latency=1e-6))


def compiled(annotations: dict[str, Any], ranks: int, state: StateSharding | None, **options: Any) -> Compilation:
    model = decoder(layers=4, heads=4, width=64).float()
    whale.annotate(model, annotations)
    given = Options(state=state, **options)
    return compile_model(model.to("meta"), tokens(8, 16), machines(ranks), given, device="cpu", training=True)


def counted(compilation: Compilation, rank: int, schedule: str) -> Counter[str]:
    """The collectives that a rank makes for its stretches in a step, by kind, as its executor makes them."""
    trial = DryStep(compilation, rank, "cpu", None, several=len(compilation.rows) > 1)
    trial.run(_program(compilation, rank, schedule))
    found: Counter[str] = Counter()
    for held in trial.units:
        found.update(call.op.replace("all_to_all", "reduce_scatter") for call in held.group.calls)
    return found


@pytest.mark.parametrize(
    ("annotations", "ranks", "state", "options"),
    [
        ({"": replicate()}, 2, StateSharding(1), {"micro_batches": 2}),
        ({"": replicate()}, 2, StateSharding(2, (3, 1)), {"micro_batches": 2}),
        ({"": replicate()}, 2, StateSharding(3), {"micro_batches": 2}),
        ({"": replicate()}, 2, StateSharding(3), {}),
        ({"": [replicate(2), split()]}, 4, StateSharding(3), {"micro_batches": 2, "recompute": "full"}),
        (HALVES, 4, StateSharding(3), {"micro_batches": 2, "schedule": "zero_bubble"}),
    ],
    ids=str,
)
def test_messages_of_stretches_are_those_that_ranks_send(
    annotations: dict[str, Any], ranks: int, state: StateSharding, options: dict[str, Any]
) -> None:
    compilation = compiled(annotations, ranks, state, **options)
    told: Counter[str] = Counter()
    for message in traffic(compilation, 0):
        if message.purpose in ("gradients", "parameters"):
            told[message.op] += message.count
    assert told == counted(compilation, 0, options.get("schedule", "1f1b"))
    assert "all_reduce" not in told


@cache
def plain_profile() -> ModelProfile:
    return profile_model(decoder(layers=4, heads=4, width=64).float().to("meta"), tokens(8, 16))


def predicted(
    level: int,
    bandwidth: float = 1e9,
    *,
    annotations: Any = None,
    ranks: int = 2,
    optimizer: Any = "none",
    **options: Any,
) -> Predicted:
    state = StateSharding(level) if level else None
    compilation = compiled({"": replicate()} if annotations is None else annotations, ranks, state, **options)
    costs = Costs(
        profile=plain_profile(),
        cluster=machines(ranks, bandwidth),
        precision="fp32",
        micro_batches=len(compilation.rows),
        optimizer=optimizer,
    )
    return predict(compilation, costs, schedule="1f1b")


def test_a_step_takes_longer_by_what_its_stretches_exchange() -> None:
    steps = [predicted(level, 1e8, micro_batches=2).prediction for level in (0, 1, 2, 3)]
    seconds = [one.step_seconds for one in steps]
    # gathers once a step; sums in each micro-batch, here of one bucket, beside the next forward; gathers in each task
    assert seconds[0] < seconds[1] <= seconds[2] < seconds[3]
    gathered = predicted(1, 1e8, micro_batches=2).workload.stages[0]
    assert min(gathered.gathered) > gathered.forward[0]
    assert steps[1].breakdown["communication"] > steps[0].breakdown["communication"]


def test_a_rank_updates_what_it_owns() -> None:
    plain, divided = (predicted(level, optimizer="adamw").prediction.breakdown["update"] for level in (0, 1))
    assert divided == pytest.approx(plain / 2, rel=0.02)


def test_exchanges_of_stretches_hide_behind_computation() -> None:
    fast = [predicted(level, 1e12, micro_batches=2).prediction.step_seconds for level in (0, 3)]
    assert fast[1] == pytest.approx(fast[0], rel=0.02)


def test_a_later_stage_has_its_parameters_before_its_first_forward() -> None:
    found = predicted(1, 2e8, annotations=HALVES, ranks=4, micro_batches=4)
    first, second = found.workload.stages
    assert min(first.gathered) > first.forward[0]
    plain = predicted(0, 2e8, annotations=HALVES, ranks=4, micro_batches=4)
    begins = [
        next(event.start for event in one.timeline.events if event.kind == "F" and event.stage == 1)
        for one in (plain, found)
    ]
    ends = [
        next(event.end for event in one.timeline.events if event.kind == "F" and event.stage == 1)
        for one in (plain, found)
    ]
    assert begins[1] > begins[0]
    assert ends[1] - begins[1] < 1.01 * max(ends[0] - begins[0], second.gathered[0] - begins[1])


def test_a_step_exchanges_as_much_as_without_stretches_where_these_are_of_optimizer_states() -> None:
    plain, divided = compiled({"": replicate()}, 2, None), compiled({"": replicate()}, 2, StateSharding(1))
    sent = [sum(message.sent_bytes for message in traffic(one, 0)) for one in (plain, divided)]
    assert sent[0] == sent[1]
    assert bucket_bytes(plain) == bucket_bytes(divided)


# --- the cost model ---------------------------------------------------------------------------------------------------

WIDE = {"layers": 12, "heads": 4, "width": 256}
"""Sizes of a model of ten buckets."""


@pytest.fixture(scope="module")
def wide() -> ModelProfile:
    return profile_model(decoder(**WIDE).float().to("meta"), tokens(16, 16), tensor_degrees=(1, 2), rules=True)


def staged(profile: ModelProfile, kind: str, state: StateSharding | None, rows: int, rule: Recompute) -> Any:
    """Annotations, and the stages of the cost model, of a layout on two or four ranks."""
    num, half, each = len(profile.layers), len(profile.layers) // 2, (rows // 2, rows // 2)

    def one(first: int, last: int, *ranks: int, tensor: int = 1) -> StageChoice:
        return StageChoice(
            first=first, last=last, ranks=ranks, data=2, tensor=tensor, rows=each, recompute=rule, state=state
        )

    if kind == "dp":
        return {"": replicate()}, [one(0, num, 0, 1)]
    if kind == "dp x tp":
        return {"": [replicate(2), split()]}, [one(0, num, 0, 1, 2, 3, tensor=2)]
    paths = profile.paths[0], profile.paths[half]
    return {path: [stage(2), replicate()] for path in paths}, [one(0, half, 0, 1), one(half, num, 2, 3)]


@pytest.mark.parametrize(
    ("kind", "state", "micro_batches", "rule"),
    [
        ("dp", StateSharding(1), 1, "none"),
        ("dp", StateSharding(1), 4, "full"),
        ("dp", StateSharding(2, (3, 1)), 1, "none"),
        ("dp", StateSharding(2), 4, "none"),
        ("dp", StateSharding(3, (3, 1)), 4, "none"),
        ("dp", StateSharding(3), 1, "full"),
        ("dp x tp", StateSharding(1), 2, "none"),
        ("dp x tp", StateSharding(3), 2, "none"),
        ("pp", StateSharding(1), 4, "none"),
        ("pp", StateSharding(3), 4, "none"),
    ],
    ids=str,
)
def test_the_cost_model_agrees_with_compiled_plans(
    wide: ModelProfile, kind: str, state: StateSharding, micro_batches: int, rule: Recompute
) -> None:
    annotations, stages = staged(wide, kind, state, 16 // micro_batches, rule)
    ranks = sum(len(one.ranks) for one in stages)
    model = decoder(**WIDE).float()
    whale.annotate(model, annotations)
    options = Options(micro_batches=micro_batches, state=state, recompute=rule)
    compilation = compile_model(model.to("meta"), tokens(16, 16), machines(ranks), options, device="cpu", training=True)
    costs = Costs(profile=wide, cluster=machines(ranks), precision="fp32", micro_batches=micro_batches)
    real = predict(compilation, costs, schedule="1f1b", memory_of=brief_peak_memory).prediction
    said = evaluate(wide, machines(ranks), stages, micro_batches=micro_batches).prediction
    assert said.step_seconds == pytest.approx(real.step_seconds, rel=0.02)
    held = {device.rank: device.total for device in real.memory}
    for device in said.memory:
        assert 0.985 <= device.total / held[device.rank] <= 1.25  # buckets are large beside such layers


@pytest.mark.parametrize("state", [None, StateSharding(1), StateSharding(3)], ids=str)
@pytest.mark.parametrize("rule", ["none", "full"])
def test_the_cost_model_knows_steps_in_the_backward(
    wide: ModelProfile, state: StateSharding | None, rule: Recompute
) -> None:
    annotations, stages = staged(wide, "dp", state, 16, rule)
    model = decoder(**WIDE).float()
    whale.annotate(model, annotations)
    options = Options(state=state, recompute=rule, step_in_backward=True)
    compilation = compile_model(model.to("meta"), tokens(16, 16), machines(2), options, device="cpu", training=True)
    real = peak_memory(compilation, 0, schedule="1f1b").total
    said = evaluate(wide, machines(2), stages, micro_batches=1, step_in_backward=True).prediction.memory[0]
    assert real <= said.total <= 1.15 * real
    assert brief_peak_memory(compilation, 0, schedule="1f1b").total == pytest.approx(real, rel=0.01)


def test_steps_in_the_backward_take_a_gradient_less() -> None:
    found = []
    for updates in (False, True):
        model, options = decoder(**WIDE).float().to("meta"), Options(recompute="full", step_in_backward=updates)
        compilation = compile_model(model, tokens(16, 16), machines(1), options, device="cpu", training=True)
        found.append(peak_memory(compilation, 0, schedule="1f1b").total)
    gradients = 4 * sum(p.numel() for p in decoder(**WIDE).parameters())
    assert found[0] - found[1] > 0.75 * gradients  # of what the last layer computes some is there


@pytest.mark.parametrize(
    ("ranks", "state"), [(1, None), (2, None), (2, StateSharding(1)), (2, StateSharding(3))], ids=str
)
def test_what_an_optimizer_reads_are_gradients(ranks: int, state: StateSharding | None) -> None:
    model, options = decoder(**WIDE).float(), Options(state=state, recompute="full")
    whale.annotate(model, {"": replicate()})
    compilation = compile_model(model.to("meta"), tokens(16, 16), machines(ranks), options, device="cpu", training=True)
    found, brief = (
        one(compilation, 0, schedule="1f1b", optimizer="adamw", device="cuda")
        for one in (peak_memory, brief_peak_memory)
    )
    if state is None:  # the peak is that of the update
        assert found.gradients == 4 * sum(p.numel() for p in decoder(**WIDE).parameters())
    assert (found.gradients, found.buffers) == (brief.gradients, brief.buffers)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_estimate_of_degrees_is_that_of_the_plan_that_they_name(wide: ModelProfile, zero: int) -> None:
    given = Configuration(batch=16, micro_batch=2, pipeline=2, data=2, zero=zero, precision="fp32", stack="whale")
    estimated = estimate(wide, machines(4), given)
    state = StateSharding(zero) if zero else None
    stages = [
        StageChoice(
            first=layers.start,
            last=layers.stop,
            ranks=(2 * index, 2 * index + 1),
            data=2,
            tensor=1,
            rows=(2, 2),
            state=state,
        )
        for index, layers in enumerate(estimated.cuts)
    ]
    planned = evaluate(wide, machines(4), stages, micro_batches=4).prediction
    assert estimated.prediction.step_seconds == pytest.approx(planned.step_seconds)
    assert [one.total for one in estimated.prediction.memory] == [one.total for one in planned.memory]


# --- the search -------------------------------------------------------------------------------------------------------


def searched(cluster: Cluster, rows: int = 16, degrees: tuple[int, ...] = (1, 2), **given: Any) -> Searched:
    model, batch = decoder(layers=12, heads=4, width=512).float().to("meta"), tokens(rows, 8)
    options = Options(step_in_backward=given.get("step_in_backward", False))
    trial = CandidateCompiler(model, batch, name="wide", options=options)
    profile = profile_model(model, batch, tensor_degrees=degrees, captured=trial.captured)
    settings = SearchSettings(time_limit=60.0, max_stages=1, micro_batches=1, top=2, **given)
    return search_plans(profile, cluster, batch=rows, settings=settings, trial=trial, with_rules=trial.with_rules)


def card(memory_mib: int, name: str = "cpu", speed: float = 1e10, bandwidth: float = 1e9) -> DeviceType:
    return DeviceType.of(name, speed={"float32": speed}, memory_bytes=memory_mib * 2**20, memory_bandwidth=bandwidth)


def test_a_search_divides_what_is_updated_faster_so() -> None:
    fast = searched(machines(4, card=card(300, bandwidth=1e13)), zero="auto")
    assert all(one.state is None for one in fast.best.plan.stages)
    slow, whole = (searched(machines(4, card=card(300)), zero=zero) for zero in ("auto", 0))
    assert all(one.state is not None and one.state.level == 1 for one in slow.best.plan.stages)
    assert slow.best.prediction.step_seconds < 0.99 * whole.best.prediction.step_seconds


def test_devices_without_rows_own_states_where_that_makes_updates_faster() -> None:
    cards = machines(5, bandwidth=1e11, card=card(600))
    found = searched(cards, rows=3, degrees=(1,), zero="auto").best
    (chosen,) = found.candidate.stages
    assert (chosen.rows, chosen.level) == ((1, 1, 1, 0, 0), 1)
    assert found.compiled
    whole = searched(cards, rows=3, degrees=(1,), zero=0).best
    assert [stage.rows for stage in whole.candidate.stages] == [(1, 1, 1)]
    assert found.prediction.step_seconds < whole.prediction.step_seconds


def test_a_search_divides_what_memory_needs() -> None:
    tight = searched(machines(4, card=card(160)), zero="auto")
    (chosen,) = tight.best.plan.stages
    assert chosen.state is not None
    assert tight.best.compiled
    assert tight.best.prediction.fits
    assert Plan.parse(tight.best.plan.dumps()) == tight.best.plan
    with pytest.raises(InfeasibleError, match="would fit with .*zero 1"):
        searched(machines(4, card=card(160)), zero=0)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_plan_that_fits_on_its_ranks_is_found_though_its_score_says_more(zero: int) -> None:
    model, batch = decoder(layers=12, heads=4, width=32).float().to("meta"), tokens(16, 64)
    profile = profile_model(model, batch, tensor_degrees=(1,))
    settings: Any = {"time_limit": 20.0, "micro_batches": 1, "max_stages": 1, "zero": zero}

    def needed(size: int) -> float:
        """The memory of the plan that is found, or infinity."""
        small = DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=size, memory_bandwidth=1e9)
        try:
            found = search_plans(profile, machines(4, 1e9, small), batch=16, settings=SearchSettings(**settings))
        except InfeasibleError:
            return inf
        return max(one.total for one in found.best.candidate.prediction.memory)

    sizes = range(4_700_000, 5_000_000, 50_000)
    bytes_needed = [needed(size) for size in sizes]
    first = next(place for place, one in enumerate(bytes_needed) if one < inf)
    assert first > 0
    assert all(one <= size for one, size in zip(bytes_needed[first:], sizes[first:], strict=True))


def test_a_search_counts_on_steps_in_the_backward() -> None:
    tight = machines(2, card=card(180))
    given: dict[str, Any] = {"zero": 0, "recompute": "none"}
    with pytest.raises(InfeasibleError):
        searched(tight, **given)
    found = searched(tight, **given, step_in_backward=True).best
    assert found.compiled
    assert found.prediction.fits
    assert found.plan.step_in_backward
    assert Plan.parse(found.plan.dumps()) == found.plan


def test_a_device_with_more_memory_holds_more_of_the_state() -> None:
    slow = card(330, "cpu-big", 3e9)
    link = Link(bandwidth=1e9, latency=1e-5)
    cards = [("a", card(120, "cpu-small"))] * 2 + [("b", slow)]
    mixed = Cluster.of(cards, intra=link, inter=link)
    found = searched(mixed, zero="auto", recompute="none").best
    (only,) = found.plan.stages
    assert only.state is not None
    assert len(only.state.shares) == 3
    assert only.state.shares[2] > 2 * max(only.state.shares[:2])
    rows = found.candidate.stages[0].rows
    assert rows[2] < min(rows[:2])
    assert found.prediction.fits
    equal = [replace(one, state=replace(one.state, shares=())) for one in found.candidate.stages if one.state]
    trial = CandidateCompiler(decoder(layers=12, heads=4, width=512).float().to("meta"), tokens(16, 8), name="wide")
    profile = profile_model(trial.model, tokens(16, 8), captured=trial.captured)
    assert not evaluate(profile, mixed, equal, micro_batches=1).prediction.fits


def test_devices_without_room_own_what_no_other_of_their_sum_could() -> None:
    """Gradients are summed over pairs of devices, and one pair has no room."""
    everyone = (0, 1, 2, 3, 4, 5)
    state = StateSharding(1, fitting_shares([-1e9, 8e9, 8e9, -1e9, 8e9, 8e9], 60e9))
    for pair in ((0, 3), (1, 4), (2, 5)):
        assert shares_of(pair, {everyone: state})[0] > 0


# --- what frees memory ------------------------------------------------------------------------------------------------


def test_what_would_free_most_of_the_fullest_device_is_named() -> None:
    axis = {"name": "replicate", "size": 4, "role": "replicate"}
    memory = {"rank": 2, "device": "cpu:2", "capacity": 1000, "parameters": 100, "gradients": 100, "optimizer": 200}
    plan = {
        "world_size": 4,
        "stages": [{"ranks": ["0-3"], "axes": [axis], "state": {"level": 1}}],
        "prediction": {"step_seconds": 1, "step_seconds_interval": [1, 1], "memory": [memory | {"activations": 90}]},
    }
    found = [(saving.what, saving.bytes) for saving in savings(Plan.parse(json.dumps(plan)))]
    assert found == [("zero 3 in stage 0", 150), ("recompute 'full' in stage 0", 90), ("zero 2 in stage 0", 75)]
