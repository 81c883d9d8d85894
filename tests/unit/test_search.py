"""The search beyond small cases: never worse than uniform degrees, respects what is fixed, stops, repeats, explains."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chains import GIB, card, chain, layer, machines
from whale.cli.model_loader import load_model
from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types
from whale.planner.cost.stage import CostModel
from whale.planner.search import (
    Degrees,
    Fixed,
    Found,
    Memo,
    Progress,
    SearchSettings,
    StageChoice,
    evaluate,
    search,
    searching,
)
from whale.planner.search.layout import laid_out
from whale.planner.search.partial_plans import PartialPlan, Scored, best_cuts, likely_cuts, score_partial
from whale.planner.search.refine import with_moved_cuts
from whale.planner.search.space import Chain, Mesh, lay_out, pools_of
from whale.planner.search.table import CostTable
from whale.strategies.profile import profile_model

A100, V100 = device_types()["A100-SXM4-80GB"], device_types()["V100-SXM2-32GB"]
NETWORK = Link(bandwidth=25e9, latency=1e-5, adapters=8)
GOLDEN = Path(__file__).parents[1] / "golden" / "gpt_22b_profile.json"
MIB = 2**20
FAST, SLOW = card("fast"), card("slow")
UNLIKE = layer({FAST.name: 0.01, SLOW.name: 0.02}, degrees=(1, 2, 4))


def nodes(*counts: int) -> Cluster:
    """Nodes of eight A100, and nodes of eight V100, by their counts."""
    types = [type_ for type_, count in zip((A100, V100), counts, strict=False) for _ in range(count)]
    devices = [(f"node{index}", type_) for index, type_ in enumerate(types) for _ in range(8)]
    return Cluster.of(devices, intra=A100.intra_node, inter=NETWORK)


def mixed(num_fast: int = 8, num_slow: int = 8) -> Cluster:
    devices = [("a", FAST)] * num_fast + [("b", SLOW)] * num_slow
    return Cluster.of(devices, intra=Link(bandwidth=1e11, latency=1e-6), inter=Link(bandwidth=1e9, latency=1e-5))


def found(num_layers: int = 12, batch: int = 32, cluster: Cluster | None = None, **settings: object) -> Found:
    given = SearchSettings(**{"time_limit": 300.0, **settings})  # type: ignore[arg-type]
    return search(chain([UNLIKE], (0,) * num_layers), cluster or mixed(), batch=batch, settings=given)


@pytest.mark.parametrize("counts", [(2,), (1, 1)])
def test_no_uniform_degrees_are_faster(counts: tuple[int, ...]) -> None:
    """Megatron's space: even cuts, all stages of the same degrees, ranks in order."""
    profile = ModelProfile.load(GOLDEN).model_copy(update={"tied": ()})
    cluster = nodes(*counts)
    best = search(profile, cluster, batch=64, settings=SearchSettings(precision="fp16", time_limit=300)).best
    num_layers = len(profile.layers)
    for tensor, pipeline, rows in ((8, 2, 1), (8, 2, 2), (8, 1, 1), (1, 16, 1)):
        size = 16 // pipeline
        stages = [
            StageChoice(
                first=num_layers * stage // pipeline,
                last=num_layers * (stage + 1) // pipeline,
                ranks=tuple(range(stage * size, (stage + 1) * size)),
                data=size // tensor,
                tensor=tensor,
                rows=(rows,) * (size // tensor),
            )
            for stage in range(pipeline)
        ]
        micro_batches = 64 * tensor // size // rows
        uniform = evaluate(profile, cluster, stages, micro_batches=micro_batches, precision="fp16").prediction
        if uniform.fits:
            assert best.prediction.step_seconds <= uniform.step_seconds * 1.001


def test_whatever_could_be_better_is_tried() -> None:
    """With little memory, deep pipelines are best, although they are not among the first families."""
    sizes = {"layers": 2, "hidden": 2560, "heads": 32, "seq": 2048, "vocab": 50304}
    loaded = load_model("examples/models/gpt.py:gpt", sizes, device="meta")
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2, 4, 8))
    first, block, last = profile.layers[0], profile.layers[1], profile.layers[-1]
    paths = (profile.paths[0], *(f"layers.{index}" for index in range(32)), profile.paths[-1])
    deep = profile.model_copy(update={"layers": (first, *(block,) * 32, last), "paths": paths, "tied": ()})
    types = [device_types()[name] for name in ("V100-PCIe-16GB", "A10G")]
    devices = [(f"node{index}", types[index // 2]) for index in range(4) for _ in range(4)]
    cluster = Cluster.of(devices, intra=Link(bandwidth=25e9, latency=1e-5), inter=Link(bandwidth=12.5e9, latency=1e-5))
    quick, thorough = (
        search(deep, cluster, batch=2048, settings=SearchSettings(precision="fp16", time_limit=300, thorough=more)).best
        for more in (False, True)
    )
    assert quick.prediction.step_seconds <= 1.01 * thorough.prediction.step_seconds


def test_a_fast_and_a_slow_half_are_both_used_by_their_speed() -> None:
    """No plan of equal parts takes less than the slow half needs; work divided by speed takes 3 / 4 of that."""
    best = found().best
    assert {rank for stage in best.stages for rank in stage.ranks} == set(range(16))
    assert best.prediction.step_seconds < 0.8 * 32 * 12 * 0.02 / 16


@pytest.mark.parametrize(("counts", "rows"), [((1, 1), 2), ((2, 1), 2), ((1, 2), 4), ((1, 1), 16)])
def test_a_pipeline_is_cut_well_whether_or_not_micro_batches_fill_it(counts: tuple[int, int], rows: int) -> None:
    """With two micro-batches, a first stage does both forwards while it would wait for a backward: it may do more."""
    profile, cluster = chain([UNLIKE, layer({FAST.name: 0.03, SLOW.name: 0.02})], (0, 1) * 5), mixed(3, 3)
    prices = CostModel.of(profile, cluster, batch=rows)
    meshes = CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of(profile.paths, 10, None))
    sequence = (Mesh((counts[0], 0), 1), Mesh((0, counts[1]), 1))

    def seconds(start: int) -> float:
        draft = PartialPlan(meshes=sequence, starts=(0, start), micro_batches=rows // 2, schedule="1f1b")
        return score_partial(meshes, draft, rows).timed.seconds

    cuts = likely_cuts(meshes, sequence, rows, rows // 2, "1f1b")
    assert min(seconds(start) for _, start in cuts) <= min(map(seconds, range(1, 10))) * 1.01


@pytest.mark.parametrize("first", [0, 1])
def test_cuts_are_moved_where_messages_are_hidden(first: int) -> None:
    """A message takes nearly as long as a layer, and moves while both stages compute."""
    wide, last = (layer({FAST.name: 0.01, SLOW.name: 0.02}, output=output) for output in (8 * MIB, 1.0))
    profile, cluster = chain([wide, last], (0,) * 6 + (1,)), machines([FAST, SLOW], Link(bandwidth=1e9, latency=1e-5))
    prices = CostModel.of(profile, cluster, batch=16)
    meshes = CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of(profile.paths, 7, None))
    sequence = tuple(Mesh(counts, 1) for counts in ((1, 0), (0, 1)))[:: -1 if first else 1]

    def scored(start: int) -> Scored:
        draft = PartialPlan(meshes=sequence, starts=(0, start), micro_batches=16, schedule="1f1b")
        return score_partial(meshes, draft, 16).timed

    _, start = best_cuts(meshes, sequence, 16, 16, "1f1b") or (0, 1)
    least = min(scored(start).seconds for start in range(1, 7))
    assert with_moved_cuts(meshes, scored(start), 16, partial(score_partial, meshes, batch=16)).seconds == least
    found = search(profile, cluster, batch=16, settings=SearchSettings(micro_batches=16, zero=0))
    assert found.best.prediction.step_seconds <= least * (1 + 1e-9)


def test_a_stage_goes_on_to_where_little_is_handed_on() -> None:
    """A message takes longer than a layer, but behind the fifth one: no even cut is as fast."""
    wide, narrow = (layer({FAST.name: 0.01, SLOW.name: 0.02}, output=output) for output in (5 * MIB, 1e3))
    profile, cluster = (
        chain([wide, narrow], (0, 0, 0, 0, 1, 0, 0)),
        machines([FAST] * 2, Link(bandwidth=1e8, latency=1e-5)),
    )
    prices = CostModel.of(profile, cluster, batch=12)
    meshes = CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of(profile.paths, 7, None))
    assert likely_cuts(meshes, [Mesh((1,), 1)] * 2, 12, 12, "1f1b") == [(0, 5)]


@pytest.mark.parametrize("others", [(("b", SLOW),) * 7, (("b", FAST),), (("b", SLOW), ("c", FAST), ("d", SLOW))])
def test_devices_behind_a_slow_network_do_not_make_a_plan_slower(others: tuple[tuple[str, DeviceType], ...]) -> None:
    """Stages in one node send each other what they would never send to another."""
    links = {"intra": Link(bandwidth=1e10, latency=1e-6), "inter": Link(bandwidth=1e7, latency=1e-3)}
    near = Cluster.of([("a", FAST)] * 3, **links)
    every = Cluster.of([*[("a", FAST)] * 3, *others], **links)
    large = layer({FAST.name: 0.01, SLOW.name: 0.02}, output=MIB, parameters=4e8)
    alone, more = (
        search(chain([large], (0,) * 6), cluster, batch=7, settings=SearchSettings(time_limit=300.0))
        for cluster in (near, every)
    )
    assert len(alone.best.stages) > 1
    (less, idle) = (  # without what all ranks do together at the end of a step, with or without a stage
        one.best.prediction.step_seconds - one.best.workload.overhead for one in (alone, more)
    )
    assert idle <= less * 1.001


def test_a_node_with_a_slow_network_does_not_slow_down_messages_between_others() -> None:
    links = {"intra": Link(bandwidth=1e10, latency=1e-6), "inter": Link(bandwidth=1e9, latency=1e-5)}
    alike = Cluster.of([("a", FAST), ("b", FAST), ("c", FAST)], **links)
    whole = Cluster.of([("a", FAST), ("b", FAST), ("c", FAST), ("d", SLOW)], **links)
    nodes = (*whole.nodes[:-1], replace(whole.nodes[-1], inter=Link(bandwidth=1e7, latency=1e-5)))
    large = layer({FAST.name: 0.01, SLOW.name: 0.02}, output=MIB, parameters=4e8)
    alone, more = (
        search(chain([large], (0,) * 6), cluster, batch=8, settings=SearchSettings(time_limit=300.0))
        for cluster in (alike, replace(whole, nodes=nodes))
    )
    assert len(alone.best.stages) == 3
    (less, idle) = (one.best.prediction.step_seconds - one.best.workload.overhead for one in (alone, more))
    assert idle <= less * 1.001


def test_of_plans_that_differ_in_the_names_of_types_alone_one_is_shown() -> None:
    twin = card("twin")
    devices = [("a", twin)] * 2 + [("b", FAST)] * 2 + [("c", twin)] * 2
    cluster = Cluster.of(devices, intra=Link(bandwidth=1e11, latency=1e-6), inter=Link(bandwidth=1e8, latency=1e-4))
    same = layer({FAST.name: 0.01, twin.name: 0.01}, output=MIB)
    one = search(chain([same], (0,) * 6), cluster, batch=8, settings=SearchSettings(time_limit=300.0))
    looks = {(candidate.micro_batches, candidate.prediction.step_seconds) for candidate in one.candidates}
    assert len(looks) == len(one.candidates) > 1


def test_the_best_plan_of_one_stage_is_among_those_that_are_compiled() -> None:
    cluster = Cluster.of([("a", FAST)] * 3, intra=Link(bandwidth=1e10, latency=1e-6))
    large = chain([layer({FAST.name: 0.01}, output=MIB, parameters=4e8)], (0,) * 6)
    first, second = search(large, cluster, batch=7, settings=SearchSettings(time_limit=300.0, top=2)).candidates
    assert len(first.stages) > 1 and len(second.stages) == 1
    assert len(search(large, cluster, batch=7, settings=SearchSettings(time_limit=300.0, top=1)).best.stages) > 1


def test_the_same_arguments_give_the_same_answer() -> None:
    assert found().candidates == found().candidates


def test_candidates_are_different_plans_from_best_to_worst() -> None:
    candidates = found(top=4).candidates
    times = [one.prediction.step_seconds for one in candidates]
    assert len(candidates) == 4 and times == sorted(times)
    assert len({one.stages for one in candidates}) == 4


def test_the_bound_is_below_every_plan_and_above_nothing() -> None:
    one = found()
    assert 0.5 < one.bound_seconds / one.best.prediction.step_seconds <= 1
    assert 0 <= one.gap < 0.5


def test_what_is_left_out_is_said() -> None:
    one = found()
    assert one.dropped and all(dropped.count > 0 and dropped.reason for dropped in one.dropped)
    assert one.tried >= len(one.points) > 0


# What is fixed


def test_fixed_starts_begin_stages() -> None:
    best = found(fixed=Fixed(starts=(5,))).best
    assert 5 in {stage.first for stage in best.stages}


def test_layers_that_belong_together_are_not_cut() -> None:
    best = found(fixed=Fixed(uncut=((2, 11),)), max_stages=3).best
    assert not {stage.first for stage in best.stages} & set(range(3, 11))


def test_fixed_degrees_are_kept() -> None:
    fixed = Fixed(degrees=(Degrees(first=0, last=3, tensor=4), Degrees(first=6, last=12, data=2)))
    best = found(fixed=fixed).best
    for stage in best.stages:
        assert stage.tensor == 4 or stage.first >= 3
        assert stage.data == 2 or stage.last <= 6


def test_stages_begin_where_there_is_a_module() -> None:
    paths = tuple(f"layers.{index}" if index % 3 == 0 else "" for index in range(12))
    profile = chain([UNLIKE], (0,) * 12).model_copy(update={"paths": paths})
    fixed = Fixed(starts=(6,))
    best = search(profile, mixed(), batch=32, settings=SearchSettings(time_limit=300, fixed=fixed)).best
    assert {stage.first for stage in best.stages} <= {0, 3, 6, 9} and len(best.stages) > 1


def test_micro_batches_schedule_and_number_of_stages_are_kept() -> None:
    one = found(micro_batches=8, schedules=("gpipe",), max_stages=2)
    for candidate in one.candidates:
        assert candidate.micro_batches == 8 and candidate.schedule == "gpipe" and len(candidate.stages) <= 2


def test_with_a_schedule_that_has_no_price_plans_are_those_of_1f1b() -> None:
    usual, more = found(), found(schedules=("1f1b", "zero_bubble"))
    assert [one.stages for one in more.candidates] == [one.stages for one in usual.candidates]
    assert {one.schedule for one in more.candidates} == {"1f1b"}
    assert more.bound_seconds == usual.bound_seconds


def test_a_number_that_leaves_the_last_micro_batch_fewer_rows_can_be_asked_for() -> None:
    assert {one.micro_batches for one in found(micro_batches=11).candidates} == {11}  # ten of 3 rows, one of 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"micro_batches": 9},
            "a batch of 32 rows does not make 9 micro-batches: with 4 rows each there are 8; use 8 or 11",
        ),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"schedules": ("interleaved",)}, "searched with the schedules gpipe, 1f1b, .*not 'interleaved'"),
        ({"schedules": ()}, "not none"),
        ({"time_limit": 0.0}, "time limit"),
        ({"fixed": Fixed(starts=(12,))}, "layers 0 to 11"),
        ({"fixed": Fixed(starts=(4,), uncut=((3, 6),))}, "within layers"),
    ],
)
def test_settings_that_contradict_are_refused(settings, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=said):
        found(**settings)


# Stopping, telling, remembering


def test_a_search_that_is_stopped_answers_with_the_best_so_far() -> None:
    asked = iter(range(1000))
    profile, cluster = chain([UNLIKE], (0,) * 12), mixed()
    one = search(profile, cluster, batch=32, stop=lambda: next(asked) > 10)
    assert one.best.prediction.fits and one.tried < found().tried


def test_a_search_that_was_stopped_at_once_says_so() -> None:
    with pytest.raises(InfeasibleError, match="was stopped before it found"):
        search(chain([UNLIKE], (0,) * 12), mixed(), batch=32, stop=lambda: True)


def test_progress_is_told() -> None:
    told: list[Progress] = []
    one = search(chain([UNLIKE], (0,) * 12), mixed(), batch=32, progress=told.append)
    assert told[-1].best_seconds is not None and told[-1].tried == one.tried


def test_another_search_uses_the_prices_of_the_first() -> None:
    """Without one node, and with another batch: groups are as before, and give what a search of its own gives."""
    profile, known = ModelProfile.load(GOLDEN), Memo()
    settings = SearchSettings(precision="fp16", time_limit=300)
    search(profile, nodes(2, 1), batch=32, settings=settings, known=known)
    before = len(known.seconds)
    again = search(profile, nodes(1, 1), batch=32, settings=settings, known=known)
    assert again.candidates == search(profile, nodes(1, 1), batch=32, settings=settings).candidates
    assert len(known.seconds) <= before * 1.25


# What does not fit


def test_what_is_missing_is_said_with_what_would_help() -> None:
    heavy = layer({FAST.name: 0.01}, parameters=2 * GIB / 16, kept=GIB / 8)
    cluster = machines([card("fast", gib=5)] * 4)
    with pytest.raises(
        InfeasibleError, match=r"needs .* GiB .* too little.*would fit with 4 more devices like cpu-fast"
    ):
        search(chain([heavy], (0,) * 10), cluster, batch=8)
    with pytest.raises(InfeasibleError, match="would fit with 28 more devices like cpu-fast"):
        search(chain([heavy], (0,) * 30), cluster, batch=8)
    with pytest.raises(InfeasibleError, match="Not even enough: 60 more devices like cpu-fast; a batch of 1"):
        search(chain([heavy], (0,) * 200), cluster, batch=8)


# Ranks


def test_tensor_groups_lie_inside_nodes_and_stages_apart() -> None:
    pools = pools_of(nodes(2, 1))
    placed = lay_out(pools, [Mesh((4, 0), 1), Mesh((8, 0), 8), Mesh((4, 8), 4)])
    assert placed[1] == [tuple(range(8))]
    assert placed[0] == [(12,), (13,), (14,), (15,)]
    assert placed[2] == [(8, 9, 10, 11), (16, 17, 18, 19), (20, 21, 22, 23)]


def test_tensor_groups_straddle_nodes_whose_size_they_do_not_divide() -> None:
    """Groups of eight on nodes of six: no smaller degree of the profile holds the model in one stage."""
    profile = ModelProfile.load(GOLDEN).model_copy(update={"tied": ()})
    some = profile.model_copy(update={"layers": (*profile.layers[:11], profile.layers[-1]), "paths": ()})
    devices = [(f"node{index}", V100) for index in range(4) for _ in range(6)]
    cluster = Cluster.of(devices, intra=V100.intra_node, inter=NETWORK)
    settings = SearchSettings(precision="fp16", max_stages=1, time_limit=300)
    best = search(some, cluster, batch=24, settings=settings).best
    assert [(stage.data, stage.tensor) for stage in best.stages] == [(3, 8)]


@pytest.mark.parametrize("meshes", [(Mesh((2,), 1, 1), Mesh((2,), 1, 1)), (Mesh((2,), 1, 1), Mesh((1,), 1, 1))])
def test_partial_plans_price_the_sum_of_a_parameter_that_two_stages_read(meshes: tuple[Mesh, ...]) -> None:
    cluster = machines([FAST] * 4, Link(bandwidth=1e9, latency=1e-5))
    own = chain([layer({FAST.name: 0.001}, parameters=2e6)], (0,) * 4)
    tied = own.model_copy(update={"tied": (((0, 3), 1.5e6),)})
    partial, whole = [], []
    for profile in (own, tied):
        prices = CostModel.of(profile, cluster, precision="fp32", optimizer="adamw", batch=8)
        parts = Chain.of(profile.paths, len(profile.layers), None)
        table = CostTable(prices=prices, pools=pools_of(cluster), chain=parts)
        plan = PartialPlan(meshes=meshes, starts=(0, 2), micro_batches=4, schedule="1f1b")
        partial.append(score_partial(table, plan, 8).timed.seconds)
        whole.append(laid_out(table, plan, 8).prediction.step_seconds)
    added = whole[1] - whole[0]
    assert added > 0.1 * whole[0]
    assert partial[1] - partial[0] == pytest.approx(added, rel=0.1)


@pytest.mark.parametrize("parameters", [1e6, 3e6, 1e7])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("starts", [(0, 3, 6), (0, 1, 6), (0, 1, 2)])
def test_partial_plans_wait_for_gathers_and_slower_backwards(
    starts: tuple[int, ...], micro_batches: int, parameters: float
) -> None:
    """Replicas divide states: what a stage gathers before its first forward, and sums beside its last backward, holds
    up the stages after it."""
    cluster, rows = machines([FAST] * 6, Link(bandwidth=1e9, latency=1e-5)), 4 * micro_batches
    profile = chain([layer({FAST.name: 0.01}, parameters=parameters)], (0,) * 9)
    prices = CostModel.of(profile, cluster, batch=rows).under("none", 1, "none")
    table = CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of(profile.paths, 9, None))
    plan = PartialPlan(meshes=(Mesh((2,), 1),) * 3, starts=starts, micro_batches=micro_batches, schedule="1f1b")
    whole = laid_out(table, plan, rows).prediction.step_seconds
    assert score_partial(table, plan, rows).timed.seconds == pytest.approx(whole, rel=1e-3)


def test_a_device_that_gets_no_rows_is_left_out() -> None:
    profile = chain([layer({FAST.name: 0.01, SLOW.name: 0.1})], (0,) * 4)
    cluster = machines([FAST, SLOW])
    prices = CostModel.of(profile, cluster, precision="fp32", optimizer="adamw", batch=3)
    parts = Chain.of(profile.paths, len(profile.layers), None)
    table = CostTable(prices=prices, pools=pools_of(cluster), chain=parts)
    plan = PartialPlan(meshes=(Mesh((1, 1), 1, 1),), starts=(0,), micro_batches=1, schedule="1f1b")
    (stage,) = laid_out(table, plan, 3).stages
    assert (stage.ranks, stage.data, stage.rows) == ((0,), 1, (3,))


def test_replicas_that_are_decided_need_rows() -> None:
    profile, fixed = chain([UNLIKE], (0,) * 4), Fixed(degrees=(Degrees(first=0, last=4, data=3),))
    with pytest.raises(InfeasibleError, match="needs a row for each replica, but the batch has 2 rows"):
        search(profile, machines([FAST, SLOW, SLOW]), batch=2, settings=SearchSettings(fixed=fixed, zero=0))


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_a_device_has_rows_where_the_replicas_are_decided(rows: int) -> None:
    profile = chain([layer({FAST.name: 0.01, SLOW.name: 0.1})], (0,) * 4)
    fixed = Fixed(degrees=(Degrees(first=0, last=2, data=2),))
    given = SearchSettings(fixed=fixed, zero=0)
    for candidate in search(profile, machines([FAST, SLOW]), batch=rows, settings=given).candidates:
        assert all(stage.data == 2 and min(stage.rows) > 0 for stage in candidate.stages if stage.first < 2)


def test_neighbours_stand_in_the_order_in_which_messages_wait_least() -> None:
    """Two stages that are far from the bottleneck take as long in either order, by a bound."""
    types = [card("a"), card("b"), card("c", 0.06)]
    times = ({"cpu-a": 0.015, "cpu-b": 0.02, "cpu-c": 0.015}, {"cpu-a": 0.01, "cpu-b": 0.015, "cpu-c": 0.01})
    sizes = ({"kept": 5e6, "output": 1e6, "name": "0"}, {"kept": 1e5, "output": 1e3, "name": "1"})
    kinds = [
        layer(own, degrees=(1, 2), parameters=2e6, **size)  # type: ignore[arg-type]
        for own, size in zip(times, sizes, strict=True)
    ]
    given = chain(kinds, (0, 1, 0, 1, 1, 0, 0, 1))
    cluster = machines([types[index] for index in (0, 0, 1, 1, 1, 2)], Link(bandwidth=1e8, latency=1e-5))
    stages = [
        StageChoice(first=first, last=last, ranks=ranks, data=1, tensor=len(ranks), rows=(1,))
        for first, last, ranks in ((0, 2, (1,)), (2, 4, (2, 3)), (4, 5, (4,)), (5, 8, (0, 5)))
    ]
    best = search(given, cluster, batch=12, settings=SearchSettings(time_limit=300.0)).best.prediction.step_seconds
    assert best <= 1.0001 * evaluate(given, cluster, stages, micro_batches=12).prediction.step_seconds


def test_state_is_divided_where_that_is_faster_than_the_pipelines_that_fit_without() -> None:
    """Eight rows fill no pipeline; replicas of the whole model do not fit, but those that divide their state do."""
    large = layer({"cpu-a": 0.05}, parameters=1e8, kept=1e6, output=1e6)  # 1.6 GB of state
    given = chain([large], (0,) * 8)
    cluster = machines([card("a", 6)] * 8, Link(bandwidth=1e11, latency=1e-6))
    found = {
        zero: search(given, cluster, batch=8, settings=SearchSettings(time_limit=100.0, zero=zero)).best
        for zero in (0, 3, "auto")
    }
    seconds = {zero: one.prediction.step_seconds for zero, one in found.items()}
    assert len(found[0].stages) > 1
    assert seconds[3] < 0.9 * seconds[0]
    assert seconds["auto"] <= 1.001 * seconds[3]
    assert found["auto"].prediction.fits
    roomy = machines([card("a", 64)] * 8, Link(bandwidth=1e11, latency=1e-6))
    whole = search(given, roomy, batch=8, settings=SearchSettings(time_limit=100.0, zero="auto")).best
    assert not any(stage.level for stage in whole.stages)


def test_where_nothing_fits_what_needs_no_measurement_is_tried_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = layer({"cpu-a": 0.05}, parameters=1e8, kept=1e6, output=1e6)  # 1.6 GB of state
    machine = machines([card("a", 6)] * 4, Link(bandwidth=1e11, latency=1e-6))

    def measured() -> Any:
        raise AssertionError("no rule is measured any more")

    settings = SearchSettings(time_limit=1.0, max_stages=1, zero="auto")
    monkeypatch.setattr(searching, "LEAST_TIME", 100.0)
    clock = iter([0.0])
    monkeypatch.setattr(searching, "time", SimpleNamespace(monotonic=lambda: next(clock, 1e6)))
    found = search(chain([large], (0,) * 8), machine, batch=8, settings=settings, with_rules=measured)
    assert found.best.prediction.fits and all(stage.level for stage in found.best.stages)


def test_no_other_rule_is_tried_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0])
    monkeypatch.setattr(searching, "time", SimpleNamespace(monotonic=lambda: next(clock, 1e6)))
    large = layer({"cpu-fast": 0.01}, parameters=1e12, kept=1e5)
    with pytest.raises(UsageError, match="no time to try all that takes less memory; use a larger --time-limit"):
        search(
            chain([large], (0,) * 6),
            machines([FAST] * 2, Link(bandwidth=1e9, latency=1e-5)),
            batch=8,
            settings=SearchSettings(time_limit=100.0),
        )
