"""Experts that are split while all else is replicated on the same devices: what the search says of such plans is what
the compiled plan says, and it finds them where they are better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

import pytest

from whale.cli.model_loader import LoadedModel, load_model
from whale.cli.search_text import in_short
from whale.commands.automatic import expert_degrees
from whale.commands.candidates import CandidateCompiler
from whale.commands.plan_writer import PlanWriter
from whale.commands.searching import search_plans
from whale.errors import UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.profile import ModelProfile
from whale.ir.state import StateSharding
from whale.ir.workload import DeviceMemory
from whale.planner.catalog import device_types
from whale.planner.cost.stage import CostModel
from whale.planner.search import Degrees, Fixed, SearchSettings, StageChoice, evaluate, search
from whale.planner.search.bound import least_seconds
from whale.planner.search.evaluate import score
from whale.planner.search.space import Chain, Mesh, pools_of
from whale.planner.search.table import CostTable
from whale.planner.search.to_plan import annotations_of
from whale.strategies.profile import profile_model

A100 = device_types()["A100-SXM4-80GB"]
NODE = Cluster.homogeneous(4, A100, intra=A100.intra_node)
NODES = Cluster.homogeneous(
    4, A100, intra=A100.intra_node, num_devices_per_node=2, inter=Link(bandwidth=1.25e9, latency=1e-5)
)
BATCH, MICRO_BATCHES = 32, 2
SIZES: dict[str, dict[str, Any]] = {
    "gshard": {"layers": 2, "hidden": 256, "ffn": 1024, "heads": 4, "experts": 8, "seq": 128, "vocab": 1024},
    "moe": {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "experts": 8, "seq": 128, "vocab": 1024},
}
EXPERTS = {"gshard": "feed_forward.experts", "moe": "feed_forward"}


@cache
def loaded(name: str) -> LoadedModel:
    return load_model(f"examples/models/{name}.py:{name}", SIZES[name] | {"batch_size": BATCH}, device="meta")


@cache
def trial(name: str) -> CandidateCompiler:
    return CandidateCompiler(loaded(name).model, loaded(name).batch, name=name)


@cache
def profiled(name: str) -> ModelProfile:
    own = trial(name)
    model, batch = loaded(name).model, loaded(name).batch
    return profile_model(model, batch, tensor_degrees=(1, 2), expert_degrees=(2, 4), captured=own.captured)


def stages(profile: ModelProfile, *given: tuple[int, int, int]) -> list[StageChoice]:
    """Stages by layers, data and expert degree, on ranks in order."""
    found: list[StageChoice] = []
    layer = rank = 0
    for layers, data, expert in given:
        ranks = tuple(range(rank, rank + data * expert))
        rows = (BATCH // MICRO_BATCHES // data,) * data
        found.append(
            StageChoice(first=layer, last=layer + layers, ranks=ranks, data=data, tensor=1, rows=rows, expert=expert)
        )
        layer, rank = layer + layers, rank + len(ranks)
    assert layer == len(profile.layers)
    return found


def held(device: DeviceMemory) -> int:
    """Without drivers and the batch, which are framework to the search."""
    return device.total - device.framework


# --- the profile ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gshard", "moe"])
def test_a_profile_says_what_layers_cost_whose_experts_are_split(name: str) -> None:
    profile = profiled(name)
    assert profile.experts == ((), (f"layers.0.{EXPERTS[name]}",), (f"layers.1.{EXPERTS[name]}",), ())
    (kind,) = [kind for kind in profile.kinds if kind.expert_variants]
    whole = kind.variants[0]
    ways = (None,) if name == "gshard" else ("whole", "cut")  # of experts that stay in place, and of sorted rows
    found = [(one.tensor_degree, one.expert_degree, one.experts) for one in kind.expert_variants]
    assert found == [(1, degree, way) for degree in (2, 4) for way in ways]
    for split in kind.expert_variants:
        in_parts = split.expert_parameters * split.expert_degree
        assert split.parameters - split.expert_parameters + in_parts == whole.parameters
        assert in_parts > 0.5 * whole.parameters
        for given in (split.forward_communications, split.backward_communications):
            assert given and all(one.group == "expert" for one in given)
    products = [sum(kernel.flops(4) for kernel in one.forward) for one in (whole, *kind.expert_variants)]
    assert products == pytest.approx(
        [products[0]] * len(products), rel=0.05
    )  # its own rows, and as many of its experts


def test_tokens_go_to_the_experts_and_back() -> None:
    kind = profiled("gshard").kinds[profiled("gshard").layers[1]]
    sizes = SIZES["gshard"]
    places = sizes["experts"] * round(1.5 * 2 * sizes["seq"] / sizes["experts"])  # of a row, in all experts
    for split in kind.expert_variants:
        for given in (split.forward_communications, split.backward_communications):
            exchanged = [one for one in given if one.kind == "all_to_all"]
            assert [one.size.elements(3) + one.size.bytes(3) / 4 for one in exchanged] == [
                3 * places * sizes["hidden"]
            ] * 2


def test_without_experts_a_profile_is_as_before() -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "seq": 32, "vocab": 128, "batch_size": 8}
    gpt = load_model("examples/models/gpt.py:gpt", sizes, device="meta")
    one, other = (
        profile_model(gpt.model, gpt.batch, tensor_degrees=(1, 2), expert_degrees=degrees) for degrees in ((), (2, 4))
    )
    assert one.dumps() == other.dumps()
    with pytest.raises(UsageError, match="no expert degree 2 at tensor degree 1, only none"):
        evaluate(one, NODE, stages(one, (len(one.layers), 2, 2)), micro_batches=MICRO_BATCHES)


def test_a_degree_over_which_nothing_can_be_split_is_left_out() -> None:
    given = load_model("examples/models/gshard.py:gshard", SIZES["gshard"] | {"experts": 4}, device="meta")
    profile = profile_model(given.model, given.batch, tensor_degrees=(1,), expert_degrees=(2, 3, 2048))
    assert {one.expert_degree for kind in profile.kinds for one in kind.expert_variants} == {2, 3}


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_a_group_with_less_rows_than_devices_gathers_once_a_step(rows: int) -> None:
    """A device without rows of a micro-batch runs no graph of it, in which the others would gather with it."""
    profile, micro_batches = profiled("moe"), BATCH // rows
    (first,) = stages(profile, (len(profile.layers), 1, 4))
    first = replace(first, rows=(rows,), state=StateSharding(3))
    candidate = evaluate(profile, NODE, [first], micro_batches=micro_batches, precision="fp32")
    choice = PlanWriter(profile, NODE, BATCH, trial("moe")).compiled(candidate, trial("moe"))
    assert choice.compiled, choice.reason
    (said,), (real, *_) = candidate.prediction.memory, choice.prediction.memory
    assert said.parameters == pytest.approx(real.parameters, rel=1e-3)
    assert held(real) <= 1.02 * held(said)
    assert held(said) <= 1.5 * held(real)
    prices = CostModel.of(profile, NODE, precision="fp32").under("none", 3)
    chain = Chain.of((), len(profile.layers), None)
    table = CostTable(prices=prices, pools=pools_of(NODE), chain=chain)
    costs = table.costs(Mesh((4,), 1, 4), rows, micro_batches)
    whole = costs.slices[0].fixed[-1] - table.costs(Mesh((4,), 1, 4), 4, BATCH // 4).slices[0].fixed[-1]
    assert (whole > 0.9 * real.parameters) == (rows < 4)


# --- the price --------------------------------------------------------------------------------------------------------


LAYOUTS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "one group": ((4, 1, 4),),
    "two groups": ((4, 2, 2),),
    "in both stages": ((2, 1, 2), (2, 1, 2)),
    "behind replicas": ((2, 2, 1), (2, 1, 2)),
}


@pytest.mark.parametrize("cluster", [NODE, NODES], ids=["a node", "two nodes"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gshard", "moe"])
def test_the_search_says_what_the_compiled_plan_says(name: str, layout: str, cluster: Cluster) -> None:
    profile = profiled(name)
    candidate = evaluate(
        profile, cluster, stages(profile, *LAYOUTS[layout]), micro_batches=MICRO_BATCHES, precision="fp32"
    )
    compiler = trial(name)
    choice = PlanWriter(profile, cluster, BATCH, compiler).compiled(candidate, compiler)
    assert choice.compiled, choice.reason
    assert choice.plan.workload is not None
    for own, compiled in zip(candidate.workload.stages, choice.plan.workload.stages, strict=True):
        for place, rank in enumerate(own.ranks):
            at = compiled.ranks.index(rank)
            # A stage of milliseconds: two kernels that only one of both has, at the price of a launch, are 3%.
            assert own.forward[place] == pytest.approx(compiled.forward[at], rel=0.035)
            assert own.backward[place] == pytest.approx(compiled.backward[at], rel=0.035)
    by_rank = {device.rank: device for device in choice.prediction.memory}
    for device in candidate.prediction.memory:
        wanted = held(by_rank[device.rank])
        assert 0.95 <= (held(device) + BATCH * profile.row_bytes) / wanted <= 1.1


def test_experts_are_shared_in_the_way_that_takes_less_time() -> None:
    profile = profiled("moe")
    slow = Cluster.homogeneous(4, A100, intra=Link(bandwidth=1e9, latency=1e-5))
    settings = SearchSettings(
        fixed=Fixed(degrees=(Degrees(first=0, last=len(profile.layers), data=1, tensor=1, expert=4),)), top=1
    )
    found = search_plans(profile, slow, batch=BATCH, settings=settings)
    shared = next(one for one in found.shared if one.degree == 4)
    way = shared.way
    assert shared.seconds[way] == min(shared.seconds.values())
    assert found.best.plan.annotations["layers.[0-1].feed_forward"] == (f"split(4, experts='{way}')",)
    assert "rows go to whole experts in" in str(shared)
    assert "each device has a part of every expert in" in str(shared)
    other: Any = "cut" if way == "whole" else "whole"
    told = search_plans(
        profile, slow, batch=BATCH, settings=replace(settings, fixed=replace(settings.fixed or Fixed(), experts=other))
    )
    assert told.best.plan.annotations["layers.[0-1].feed_forward"] == (f"split(4, experts='{other}')",)
    assert told.best.prediction.step_seconds > found.best.prediction.step_seconds


# --- as annotations ---------------------------------------------------------------------------------------------------


def test_experts_are_shared_in_the_way_that_is_faster_with_the_rows_of_the_plan() -> None:
    """With two rows on each of 12 devices cut experts would be faster, and the best plan has six on each of four."""
    sizes = {"layers": 4, "hidden": 480, "heads": 6, "seq": 512, "experts": 16, "top_k": 1, "ffn": 960}
    loaded = load_model("examples/models/moe.py:moe", sizes | {"vocab": 30528, "batch_size": 24}, device="meta")
    own = CandidateCompiler(loaded.model, loaded.batch, name="moe").captured
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1,), expert_degrees=(2,), captured=own)
    l40s = device_types()["L40S"]
    network = Link(bandwidth=1.25e9, latency=5e-6)
    cluster = Cluster.homogeneous(12, l40s, num_devices_per_node=4, intra=l40s.intra_node, inter=network)
    settings = SearchSettings(fixed=Fixed(degrees=(Degrees(first=0, last=len(profile.layers), expert=2),)), zero=1)
    found = search_plans(profile, cluster, batch=24, settings=settings)
    assert [(one.degree, one.way) for one in found.shared] == [(2, "whole")]
    assert found.best.plan.stages[0].ranks == (0, 1, 2, 3)


def test_a_stage_of_expert_groups_is_written_as_nested_annotations() -> None:
    profile = profiled("gshard")
    experts = profile.experts
    assert annotations_of(stages(profile, (4, 2, 2)), [""], [], experts) == {
        "": ("replicate(2)", "replicate(2)"),
        "layers.[0-1].feed_forward.experts": ("replicate(2)", "split(2)"),
    }
    two = stages(profile, (2, 2, 1), (2, 1, 2))
    anchors = [profile.paths[stage.first] for stage in two]
    places = [(path, layer // 2) for layer, path in enumerate(profile.paths)]
    assert annotations_of(two, anchors, places, experts) == {
        anchors[0]: ("stage(2)", "replicate(2)"),
        "layers.1": ("stage(2)", "replicate(2)"),
        "layers.1.feed_forward.experts": ("split(2)",),
    }


# --- the search -------------------------------------------------------------------------------------------------------


def test_experts_that_do_not_fit_whole_are_split_where_that_is_quickest() -> None:
    """On a slow network all else is better replicated than split."""
    profile = profiled("gshard")
    state = 16 * sum(profile.kinds[kind].variants[0].parameters for kind in profile.layers)
    card = DeviceType.of("cpu-card", speed={"float32": 1e12}, memory_bytes=round(0.8 * state), memory_bandwidth=1e11)
    cluster = Cluster.homogeneous(4, card, intra=Link(bandwidth=2e9, latency=1e-5))
    settings = SearchSettings(precision="fp32", time_limit=60.0)
    found = search_plans(profile, cluster, batch=BATCH, settings=settings, trial=trial("gshard"))
    assert any(stage.expert > 1 for stage in found.best.candidate.stages), in_short(found.best.candidate, cluster)
    assert "experts" in in_short(found.best.candidate, cluster)
    assert found.best.compiled
    assert found.found.bound_seconds <= found.found.best.prediction.step_seconds


def test_a_stage_without_experts_is_one_plan_whatever_expert_groups_its_devices_could_form() -> None:
    slow = Cluster.homogeneous(
        6, A100, intra=A100.intra_node, num_devices_per_node=2, inter=Link(bandwidth=1.25e8, latency=1e-5)
    )
    settings = SearchSettings(micro_batches=2, top=20)
    found = search(profiled("gshard"), slow, batch=BATCH, settings=settings).candidates
    assert any(any(profiled("gshard").experts[one.first : one.last]) for one in found[0].stages)
    assert len({one.stages for one in found}) == len(found) > 1


def test_a_fixed_expert_degree_is_kept() -> None:
    profile = profiled("gshard")
    fixed = Fixed(degrees=(Degrees(first=1, last=3, data=2, tensor=1, expert=2),))
    settings = SearchSettings(precision="fp32", time_limit=60.0, fixed=fixed, top=2)
    found = search_plans(profile, NODE, batch=BATCH, settings=settings)
    for choice in found.choices:
        own = [stage for stage in choice.candidate.stages if stage.first < 3 and stage.last > 1]
        assert own and all(stage.degrees == (2, 1, 2) for stage in own)


def test_degrees_that_are_worth_profiling_are_powers_of_two_and_all_devices() -> None:
    assert expert_degrees(Cluster.homogeneous(6)) == (2, 4, 6)


def every_plan(prices: CostModel, divisions: Sequence[tuple[int, int, int]], count: int) -> list[list[StageChoice]]:
    """Plans of one stage and of two on all devices and half of them each, at all degrees."""
    num, layers, rows = len(prices.cluster.devices), len(prices.profile.layers), BATCH // count
    meshes = {
        size: [(size // prod(one), *one) for one in divisions if size % prod(one) == 0] for size in (num, num // 2)
    }

    def stage(first: int, last: int, start: int, degrees: tuple[int, ...]) -> StageChoice:
        data, tensor, expert, _ = degrees
        ranks = tuple(range(start, start + data * tensor * expert))
        own = (rows // data,) * data
        return StageChoice(first=first, last=last, ranks=ranks, data=data, tensor=tensor, rows=own, expert=expert)

    found = [[stage(0, layers, 0, one)] for one in meshes[num] if rows % one[0] == 0]
    for cut in range(1, layers):
        for one, other in product(meshes[num // 2], repeat=2):
            if rows % one[0] == 0 and rows % other[0] == 0:
                found.append([stage(0, cut, 0, one), stage(cut, layers, num // 2, other)])
    return found


@pytest.mark.parametrize("bandwidth", [1e8, 2e9, 3e11])
@pytest.mark.parametrize("name", ["gshard", "moe"])
def test_no_plan_takes_less_than_the_bound_or_what_the_search_finds(name: str, bandwidth: float) -> None:
    profile = profiled(name)
    cluster = Cluster.homogeneous(4, A100, intra=Link(bandwidth=bandwidth, latency=1e-5))
    prices = CostModel.of(profile, cluster, precision="fp32", batch=BATCH)
    meshes = CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of((), len(profile.layers), None))
    for count in (1, 4):
        settings = SearchSettings(precision="fp32", time_limit=300.0, micro_batches=count)
        found = search(profile, cluster, batch=BATCH, settings=settings)
        least = min(
            score(prices, plan, micro_batches=count, batch=BATCH).prediction.step_seconds
            for plan in every_plan(prices, meshes.all_divisions, count)
        )
        assert found.best.prediction.step_seconds <= least * (1 + 1e-6)
        assert least_seconds(prices, BATCH) <= found.best.prediction.step_seconds


def test_a_batch_that_has_rows_for_some_of_the_traces_only_is_captured_again() -> None:
    few = load_model("examples/models/moe.py:moe", SIZES["moe"] | {"batch_size": 13}, device="meta")
    captured = CandidateCompiler(few.model, few.batch, name="moe").captured
    made = profile_model(few.model, few.batch, tensor_degrees=(1,), expert_degrees=(4,), captured=captured)
    assert [[one.expert_degree for one in kind.expert_variants] for kind in made.kinds] == [[], [4, 4], []]


def test_the_last_devices_of_an_expert_group_compute_a_row_fewer() -> None:
    """Five rows on four devices are two on the first, and the slow last ones have one."""
    slow = device_types()["T4"]
    machines = Cluster.of(
        [("node0", A100)] * 2 + [("node1", slow)] * 2,
        intra=Link(bandwidth=10e9, latency=1e-5),
        inter=Link(bandwidth=1.25e9, latency=1e-5),
    )
    sizes = SIZES["moe"] | {"hidden": 1024, "heads": 8, "kv_heads": 8, "seq": 1024, "batch_size": 5}
    five, ranks = load_model("examples/models/moe.py:moe", sizes, device="meta"), (0, 1, 2, 3)
    compiler = CandidateCompiler(five.model, five.batch, name="moe")
    profile = profile_model(
        five.model, five.batch, tensor_degrees=(1,), expert_degrees=(4,), captured=compiler.captured
    )
    stage = StageChoice(first=0, last=len(profile.layers), ranks=ranks, data=1, tensor=1, rows=(5,), expert=4)
    candidate = evaluate(profile, machines, [stage], micro_batches=1)
    writer = PlanWriter(profile, machines, 5, compiler)
    choice = writer.with_prediction(writer.written(candidate), compiler)
    assert choice.compiled, choice.reason
    computed = [one.breakdown["compute"] for one in (candidate.prediction, choice.prediction)]
    assert computed[0] == pytest.approx(computed[1], rel=0.05)


def test_devices_without_rows_exchange_those_of_others_with_the_experts() -> None:
    """Operators that route rows stay in the rows of each device, also where some have none."""
    pytest.importorskip("transformers")
    rows = 3
    machines = Cluster.homogeneous(4, A100, num_devices_per_node=1, inter=Link(bandwidth=1.25e9, latency=1e-5))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8, "sequence_length": 64}
    few = load_model("hf:mixtral", sizes, batch_size=rows, device="meta")
    compiler = CandidateCompiler(few.model, few.batch, name="moe")
    profile = profile_model(few.model, few.batch, tensor_degrees=(1,), expert_degrees=(4,))
    given = {kind.name: [one for one in kind.expert_variants if one.experts == "whole"] for kind in profile.kinds}
    kinds = [kind.model_copy(update={"expert_variants": tuple(given[kind.name])}) for kind in profile.kinds]
    profile = profile.model_copy(update={"kinds": tuple(kinds)})
    ranks = (0, 1, 2, 3)
    stage = StageChoice(first=0, last=len(profile.layers), ranks=ranks, data=1, tensor=1, rows=(rows,), expert=4)
    candidate = evaluate(profile, machines, [stage], micro_batches=1)
    writer = PlanWriter(profile, machines, rows, compiler)
    choice = writer.with_prediction(writer.written(candidate), compiler)
    assert choice.compiled, choice.reason
    said, real = (one.breakdown["communication"] for one in (candidate.prediction, choice.prediction))
    assert 0.7 * said <= real <= said  # a device without rows sends none


def test_parameters_are_combined_by_adasum_at_degrees_that_only_experts_have() -> None:
    """The number of parameters, whose dot products are summed, was that of a tensor degree of three."""
    model, batch = loaded("moe").model, loaded("moe").batch
    profile = profile_model(model, batch, tensor_degrees=(1, 2), expert_degrees=(3,), captured=trial("moe").captured)
    node = Cluster.homogeneous(6, A100, intra=A100.intra_node)
    found = search(profile, node, batch=BATCH, settings=SearchSettings(reduce="adasum"))
    assert found.candidates
