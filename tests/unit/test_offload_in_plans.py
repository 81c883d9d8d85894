"""State and activations on hosts in plans: what devices and hosts hold, how long a step takes, when it is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import whale
from tests.small_models import Decoder, decoder, tokens
from whale import replicate, split, stage
from whale.cli.model_loader import load_model
from whale.commands.candidates import CandidateCompiler
from whale.commands.searching import Searched, search_plans
from whale.compile.compile import compile_model, compile_traced
from whale.compile.options import Options
from whale.compile.trace import trace
from whale.errors import AnnotationError, InfeasibleError, PlanMismatchError
from whale.ir.cluster import Cluster, DeviceType, HostMemory, Link
from whale.ir.plan import Plan
from whale.ir.profile import MeasuredTimes, ModelProfile
from whale.ir.state import StateSharding
from whale.ir.strategy import Offload, Recompute, parse_strategy
from whale.planner.catalog import device_types
from whale.planner.cost.hosts import OF_PROCESSES
from whale.planner.cost.memory import run_hosted, run_kept_bytes, run_working_bytes
from whale.planner.cost.precision import PRECISIONS
from whale.planner.explain import savings
from whale.planner.search import SearchSettings, StageChoice, evaluate, search
from whale.predict.costs import Costs
from whale.predict.peak_memory import brief_peak_memory
from whale.predict.prediction import predict
from whale.strategies.profile import profile_model

CARD = DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=2**33, memory_bandwidth=1e9)
SIZES = {"layers": 12, "heads": 4, "width": 256}
"""Sizes of a model of ten buckets."""


def machines(ranks: int, card: DeviceType = CARD, **host: Any) -> Cluster:
    made = Cluster.homogeneous(ranks, card, intra=Link(bandwidth=1e9, latency=1e-6))
    return replace(made, nodes=tuple(replace(node, host_memory=HostMemory(**host)) for node in made.nodes))


@pytest.fixture(scope="module")
def wide() -> ModelProfile:
    return profile_model(decoder(**SIZES).float().to("meta"), tokens(16, 16), tensor_degrees=(1, 2), rules=True)


def staged(profile: ModelProfile, kind: str, rows: int, **way: Any) -> tuple[Any, list[StageChoice]]:
    """Annotations, and the stages of the cost model, of a layout on one to four ranks."""
    num, half = len(profile.layers), len(profile.layers) // 2

    def one(first: int, last: int, *ranks: int, data: int = 2, tensor: int = 1) -> StageChoice:
        return StageChoice(
            first=first, last=last, ranks=ranks, data=data, tensor=tensor, rows=(rows // data,) * data, **way
        )

    if kind == "alone":
        return {"": stage()}, [one(0, num, 0, data=1)]
    if kind == "dp":
        return {"": replicate()}, [one(0, num, 0, 1)]
    if kind == "dp x tp":
        return {"": [replicate(2), split()]}, [one(0, num, 0, 1, 2, 3, tensor=2)]
    stages = [one(0, half, 0, data=1), one(half, num, 1, data=1)]
    return {profile.paths[place]: stage() for place in (0, half)}, stages


@pytest.mark.parametrize(
    ("kind", "level", "offload", "micro_batches", "rule"),
    [
        ("alone", 3, "both", 4, "full"),
        ("dp", 1, "state", 1, "none"),
        ("dp", 2, "state", 4, "none"),
        ("dp x tp", 3, "state", 2, "none"),
        ("pp", 0, "activations", 4, "none"),
    ],
    ids=str,
)
def test_the_cost_model_agrees_with_compiled_plans(
    wide: ModelProfile, kind: str, level: int, offload: Offload, micro_batches: int, rule: Recompute
) -> None:
    state = StateSharding(level) if level else None
    annotations, stages = staged(wide, kind, 16 // micro_batches, recompute=rule, state=state, offload=offload)
    ranks = sum(len(one.ranks) for one in stages)
    model = decoder(**SIZES).float()
    whale.annotate(model, annotations)
    options = Options(micro_batches=micro_batches, state=state, recompute=rule, offload=offload)
    cluster = machines(ranks)
    compilation = compile_model(model.to("meta"), tokens(16, 16), cluster, options, device="cpu", training=True)
    costs = Costs(profile=wide, cluster=cluster, precision="fp32", micro_batches=micro_batches)
    real = predict(compilation, costs, schedule="1f1b", memory_of=brief_peak_memory).prediction
    said = evaluate(wide, cluster, stages, micro_batches=micro_batches).prediction
    assert said.step_seconds == pytest.approx(real.step_seconds, rel=0.01)
    held = {device.rank: device.total for device in real.memory}
    for device in said.memory:
        assert 0.96 <= device.total / held[device.rank] <= 1.4  # buckets are large beside such layers
    ((told,), (counted,)) = said.hosts, real.hosts
    assert told.state == pytest.approx(counted.state, rel=1e-3)
    assert counted.activations <= told.activations <= 1.05 * counted.activations


LARGE = {"layers": 3, "heads": 8, "width": 2048}
"""Sizes of a model whose largest parameters are buckets by themselves."""


@pytest.mark.parametrize("length", [32, 512])
@pytest.mark.parametrize("offload", ["none", "activations"])
@pytest.mark.parametrize("level", [1, 3])
def test_the_only_backward_works_beside_gradients_that_are_made(level: int, offload: Offload, length: int) -> None:
    with torch.device("meta"):
        model = Decoder(**LARGE)
    batch = tokens(16, length)
    profile = profile_model(model, batch, tensor_degrees=(1,))
    state = StateSharding(level)
    stages = [
        StageChoice(
            first=0,
            last=len(profile.layers),
            ranks=(0, 1, 2, 3),
            data=4,
            tensor=1,
            rows=(4,) * 4,
            state=state,
            offload=offload,
        )
    ]
    whale.annotate(model, {"": replicate()})
    cluster = machines(4, device_types()["A100-SXM4-80GB"])
    options = Options(micro_batches=1, state=state, offload=offload)
    compilation = compile_traced(trace(model, batch, device="cpu", training=True), cluster, options, device="cuda")
    costs = Costs(profile=profile, cluster=cluster, precision="fp32", micro_batches=1, device="cuda")
    real = predict(compilation, costs, schedule="1f1b", memory_of=brief_peak_memory).prediction
    said = evaluate(profile, cluster, stages, micro_batches=1).prediction
    (own,), held = said.memory, real.memory[0]
    assert 0.98 <= (own.total - own.framework) / (held.total - held.framework) <= 1.4  # of gathered buckets


def test_a_layer_that_no_rule_computes_again_fetches_what_it_reads_once(wide: ModelProfile) -> None:
    head = wide.kinds[wide.layers[-1]]
    how: dict[str, Any] = {"tensor_degree": 1, "expert_degree": 1, "context_degree": 1, "precision": PRECISIONS["fp32"]}
    amounts = []
    for rule in ("none", "full"):
        kept = run_kept_bytes(head, **how, recompute=rule, rows=16)
        working = run_working_bytes(head, **how, recompute=rule, rows=16)
        assert kept.per_row > 0
        amounts.append(run_hosted(head, kept, working, **how, recompute=rule))
    (_, without, _), (_, under, _) = amounts
    assert under(16) == without(16)


EXPERTS = {"hidden": 32, "heads": 2, "kv_heads": 2, "seq": 8, "vocab": 64, "mlp": "gelu", "layers": 4, "experts": 8}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [2, 4], ids="of {}".format)
@pytest.mark.parametrize("way", ["whole", "cut"])
def test_experts_of_a_rank_stream_through_its_device(way: Any, ranks: int, device: Any) -> None:
    """Experts of all layers are not gathered before the first attention is, where replicas have experts too."""
    loaded = load_model(
        "examples/models/moe.py:moe", {**EXPERTS, "ffn": 2**15, "top_k": 1}, batch_size=8, device="meta"
    )
    nest = [replicate(4 // ranks), split(ranks, experts=way)] if ranks < 4 else split(experts=way)
    whale.annotate(loaded.model, {"": replicate(), "layers.*.feed_forward": nest})
    traced = trace(loaded.model, loaded.batch, device="cpu", training=True, loss_fn=None, promote=False, precision=None)

    def held(**way: Any) -> tuple[Any, Any]:
        compilation = compile_traced(traced, machines(4), Options(micro_batches=2, **way), device=device)
        found = brief_peak_memory(compilation, 0, schedule="1f1b", optimizer="none", device=device)
        return found, found.tasks[0]

    (_, plain), (divided, task) = held(), held(state=StateSharding(3), offload="state")
    whole = 4 // ranks * divided.host_state / 2  # parameters, of which each of four layers has two large ones
    assert task.kept == pytest.approx(plain.kept, rel=0.15)
    assert task.forward_peak < plain.forward_peak + 0.5 * whole
    assert task.backward_peak < plain.backward_peak + 0.7 * whole


def test_the_cost_model_streams_experts_as_compiled_plans_do() -> None:
    """Each large matrix is a bucket of its own: copies of all to the device and of gradients from it follow another."""
    sizes = {**EXPERTS, "ffn": 2**15, "top_k": 1}
    loaded = load_model("examples/models/moe.py:moe", sizes, batch_size=8, device="meta")
    profile = with_one_way(profile_model(loaded.model, loaded.batch, expert_degrees=(4,)))
    whale.annotate(loaded.model, {"": replicate(), "layers.*.feed_forward": split(experts="whole")})
    cluster = machines(4, size_bytes=2**34, device_link=2e8, bandwidth=1e12)
    way: dict[str, Any] = {"state": StateSharding(3), "offload": "state"}
    options = Options(micro_batches=2, **way)
    compilation = compile_model(loaded.model, loaded.batch, cluster, options, device="cpu", training=True)
    costs = Costs(profile=profile, cluster=cluster, precision="fp32", micro_batches=2)
    real = predict(compilation, costs, schedule="1f1b", memory_of=brief_peak_memory).prediction
    only = StageChoice(
        first=0, last=len(profile.layers), ranks=(0, 1, 2, 3), data=1, tensor=1, expert=4, rows=(4,), **way
    )
    said = evaluate(profile, cluster, [only], micro_batches=2).prediction
    assert said.step_seconds == pytest.approx(real.step_seconds, rel=0.02)
    assert max(one.total for one in real.memory) <= said.memory[0].total <= 2 * max(one.total for one in real.memory)


def with_one_way(profile: ModelProfile) -> ModelProfile:
    """The profile of layers whose experts are whole."""

    def of(kind: Any) -> Any:
        return kind.model_copy(
            update={"expert_variants": tuple(one for one in kind.expert_variants if one.experts == "whole")}
        )

    return profile.model_copy(update={"kinds": tuple(map(of, profile.kinds))})


# --- plans and annotations --------------------------------------------------------------------------------------------


def test_a_stage_of_a_plan_says_what_is_on_the_host() -> None:
    text = '{"world_size": 2, "stages": [{"ranks": [0], "offload": "state"}, {"ranks": [1]}]}'
    plan = Plan.parse(text)
    assert [stage.offload for stage in plan.stages] == ["state", None]
    assert Plan.parse(plan.dumps()) == plan
    plan.check_options(micro_batches=None, schedule=None, offload="state")
    plan.check_options(micro_batches=None, schedule=None, offload="auto")
    with pytest.raises(PlanMismatchError, match="stages.0.offload is 'state', but offload='both'"):
        plan.check_options(micro_batches=None, schedule=None, offload="both")
    bare = Plan.parse(text.replace(', "offload": "state"', ""))
    assert bare.digest() != plan.digest()


def test_annotations_say_what_is_on_the_host() -> None:
    for annotation in (stage(2, offload=["state", "activations"]), replicate(offload="state")):
        assert parse_strategy(str(annotation.strategy)) == annotation.strategy
    with pytest.raises(AnnotationError, match="offload is 'optimizer'"):
        stage(offload="optimizer")
    model = decoder(layers=2)
    whale.annotate(model, {"layers.0": stage(offload="state"), "layers.1": stage(offload="activations")})
    options = Options(micro_batches=2, offload="both")
    compilation = compile_model(model, tokens(4, 8), machines(2), options, device="cpu", training=True)
    assert [one.offload for one in compilation.stages] == ["state", "activations"]
    assert {unit.spec.ranks for unit in compilation.units if unit.on_host} == {(0,)}
    twice = decoder(layers=2)
    whale.annotate(twice, {"": [stage(offload="state"), replicate(offload="both")]})
    with pytest.raises(AnnotationError, match="stage 0 say offload='state' and offload='both'"):
        compile_model(twice, tokens(4, 8), machines(2), Options(), device="cpu", training=True)


# --- the search -------------------------------------------------------------------------------------------------------


def searched(cluster: Cluster, **given: Any) -> Searched:
    model, batch = decoder(layers=8, heads=4, width=512).float().to("meta"), tokens(16, 8)
    trial = CandidateCompiler(model, batch, name="wide")
    profile = profile_model(model, batch, captured=trial.captured)
    settings = SearchSettings(time_limit=60.0, max_stages=1, micro_batches=1, top=1, zero="auto", **given)
    return search_plans(profile, cluster, batch=16, settings=settings, trial=trial, with_rules=trial.with_rules)


def card(memory_mib: int) -> DeviceType:
    return DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=memory_mib * 2**20, memory_bandwidth=1e9)


def test_a_search_uses_hosts_only_where_nothing_fits_without() -> None:
    with_zero = searched(machines(2, card(200), size_bytes=2**34), offload="auto").best
    assert all(one.offload is None for one in with_zero.plan.stages)
    tight = searched(machines(2, card(60), size_bytes=2**34), offload="auto").best
    (chosen,) = tight.plan.stages
    assert chosen.offload in ("state", "both")
    assert tight.compiled
    assert tight.prediction.fits
    assert tight.prediction.hosts
    assert Plan.parse(tight.plan.dumps()) == tight.plan
    with pytest.raises(InfeasibleError, match="would fit with .*offload 'state'"):
        searched(machines(2, card(60), size_bytes=2**34))
    with pytest.raises(InfeasibleError, match="in the memory of node0 itself.*would fit with host_memory of"):
        searched(machines(2, card(60), size_bytes=2**27), offload="auto")


def test_stages_are_as_long_as_their_hosts_hold(wide: ModelProfile) -> None:
    """By speed the fast device would have three quarters of the layers, whose state its host does not hold."""
    fast = DeviceType.of("fast", speed={"float32": 3e10}, memory_bytes=2**33, memory_bandwidth=3e9)
    slow = DeviceType.of("slow", speed={"float32": 1e10}, memory_bytes=2**33, memory_bandwidth=1e9)
    link = Link(bandwidth=2e7, latency=1e-6)
    cluster = Cluster.of([("a", fast), ("b", slow)], inter=link)

    def found(size: int) -> tuple[Any, list[int]]:
        nodes = tuple(replace(one, host_memory=HostMemory(size_bytes=size)) for one in cluster.nodes)
        settings = SearchSettings(micro_batches=8, top=1, recompute="none", zero=1, offload="state", precision="fp32")
        best = search(wide, replace(cluster, nodes=nodes), batch=16, settings=settings).best
        return best, [one.state for one in best.prediction.hosts]

    best, states = found(2**34)
    assert len(best.stages) == 2
    assert max(states) > 0.65 * sum(states)
    least, states = found(int(0.6 * sum(states) + OF_PROCESSES))
    assert len(least.stages) == 2
    assert least.prediction.fits
    assert 0.5 * sum(states) < max(states) <= 0.6 * sum(states)


def test_what_offload_would_free_is_named() -> None:
    memory = {"rank": 0, "device": "A100-SXM4-80GB:0", "capacity": 1000, "parameters": 100, "gradients": 100}
    memory |= {"optimizer": 200, "activations": 90}
    plan = {
        "world_size": 1,
        "stages": [{"ranks": [0], "axes": [], "recompute": "full", "offload": "activations"}],
        "prediction": {"step_seconds": 1, "step_seconds_interval": [1, 1], "memory": [memory]},
    }
    assert [(one.what, one.bytes) for one in savings(Plan.parse(json.dumps(plan)))] == [
        ("offload 'state' in stage 0", 300)
    ]


def test_a_processor_steps_on_its_host_as_fast_as_without(wide: ModelProfile) -> None:
    """A data sheet's bandwidth of the host would be beside what was measured on the same processor."""
    annotations, stages = staged(wide, "dp", 16, state=StateSharding(1))
    model = decoder(**SIZES).float()
    whale.annotate(model, annotations)
    traced = trace(
        model.to("meta"), tokens(16, 16), device="cpu", training=True, loss_fn=None, promote=False, precision=None
    )
    fast = MeasuredTimes(
        device_type="cpu", tensor_degree=1, rows=(8,), forward=(1e-3,), backward=(2e-3,), update=(1e-6,)
    )
    kinds = tuple(kind.model_copy(update={"measured": (fast,)}) for kind in wide.kinds)
    measured = wide.model_copy(update={"kinds": kinds})
    said, real = set(), set()
    for offload in ("none", "state"):
        options = Options(state=StateSharding(1), offload=offload)
        compilation = compile_traced(traced, machines(2), options, device="cpu")
        costs = Costs(profile=measured, cluster=machines(2), precision="fp32", micro_batches=1)
        real.add(predict(compilation, costs, schedule="1f1b").prediction.step_seconds)
        chosen = [replace(one, offload=offload) for one in stages]
        said.add(evaluate(measured, machines(2), chosen, micro_batches=1).prediction.step_seconds)
    assert len(said) == len(real) == 1
