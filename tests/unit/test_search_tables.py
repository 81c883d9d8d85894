"""The shortcuts of the search's tables and moves say the same as what they spare."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from tests.chains import card, chain, layer, machines
from tests.small_models import decoder, tokens
from whale.ir.cluster import Cluster, Link
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types
from whale.planner.cost.stage import CostModel
from whale.planner.schedules.in_flight import in_flight
from whale.planner.search import StageChoice
from whale.planner.search.evaluate import score
from whale.planner.search.layout import laid_out
from whale.planner.search.partial_plans import PartialPlan, likely_cuts, score_partial
from whale.planner.search.refine import _moves, refined
from whale.planner.search.space import Chain, Mesh, Pool, pools_of
from whale.planner.search.table import CostTable
from whale.strategies.profile import profile_model

FAST, SLOW = card("fast", gib=1.0), card("slow", gib=0.5)
A100 = device_types()["A100-SXM4-80GB"]
BATCH = 32


def profile() -> ModelProfile:
    kinds = [
        layer({FAST.name: seconds, SLOW.name: 2 * seconds}, parameters=2e6, kept=kept, name=str(seconds))
        for seconds, kept in ((0.01, 4e6), (0.03, 1e6))
    ]
    return chain(kinds, (0, 1, 0, 0, 1, 0, 0, 0))


def table() -> CostTable:
    given, cluster = profile(), machines([FAST] * 4 + [SLOW] * 4, Link(bandwidth=1e9, latency=1e-5))
    prices = CostModel.of(given, cluster, batch=BATCH)
    return CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of(given.paths, len(given.layers), None))


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 16])
def test_backwards_that_accumulate_cost_what_they_are_priced_at(micro_batches: int) -> None:
    meshes = table()
    for mesh in (Mesh((2, 0), 1), Mesh((0, 4), 1)):
        costs = meshes.costs(mesh, 8, micro_batches)
        own = costs.slices[0]
        kinds = [meshes.prices.layer(kind, own.group, own.rows, micro_batches) for kind in meshes.prices.profile.layers]
        assert costs.backward[-1] == pytest.approx(sum(one.backward for one in kinds), rel=1e-12)
        assert costs.forward[-1] == pytest.approx(sum(one.forward for one in kinds), rel=1e-12)


def test_rows_that_a_replica_holds_are_those_of_its_fullness() -> None:
    meshes = table()
    seen = set()
    for mesh, part, held in product((Mesh((2, 2), 1), Mesh((1, 3), 1)), ((0, 8), (0, 3), (4, 8)), (1, 3, 8)):
        for group, _ in meshes.sample(mesh)[0]:
            full = meshes._overflows(group, 4, part, held)
            for rows in range(1, 40):
                wanted = meshes.replica_costs(group, rows, 4).fullness(*part, held) > 1
                assert full(rows) == wanted
                seen.add(wanted)
    assert seen == {True, False}


@drawn(
    nodes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    taken=st.tuples(st.integers(0, 12), st.integers(0, 24)),
    size=st.integers(1, 12),
    context=st.booleans(),
)
def test_groups_of_devices_begin_where_there_are_as_many(
    nodes: list[int], taken: tuple[int, int], size: int, context: bool
) -> None:
    """The first slices of a stage take devices of one pool, one has the rest of it, others those of the next."""
    ends = list(accumulate(nodes, initial=0))
    pool = Pool(type=A100, nodes=tuple(tuple(range(*pair)) for pair in pairwise(ends)))
    leads = pool.leads(size)
    assert all(lead + size <= len(pool.ranks) for lead in leads)
    assert all(second - first >= size for first, second in pairwise(leads))
    own = [(f"node {place}", card("some", gib=1.0)) for place, count in enumerate(nodes) for _ in range(count)]
    own += [(f"node of {name}", card(name, gib=0.5)) for name in ("more", "most") for _ in range(12)]
    cluster = Cluster.of(own, intra=Link(bandwidth=1e9, latency=1e-5), inter=Link(bandwidth=1e8, latency=1e-5))
    profile = chain([layer(dict.fromkeys(("some", "more", "most"), 0.01))], (0,) * 8)
    prices = CostModel.of(profile, cluster, batch=BATCH)
    meshes = CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of((), 8, None))
    room = [len(one.ranks) for one in meshes.pools]
    first, second = min(taken[0], room[0]), min(taken[1], room[1])
    counts = (first, second, -(first + second) % size)
    if sum(counts) > 0 and counts[2] <= room[2]:
        mesh = Mesh(counts, *((1, 1, size) if context else (size,)))
        groups, ranks = meshes.sample(mesh)
        assert sum(num for _, num in groups) == sum(counts) // size
        assert {*ranks} <= {*range(len(own))}
        assert len({*ranks}) == len(ranks)


def test_a_replica_that_owns_state_has_a_row_in_the_table_as_in_the_plan() -> None:
    slow = card("slow", gib=64)
    given = chain([layer({FAST.name: 0.01, slow.name: 1.0}, kept=4e6)], (0,) * 4)
    cluster = machines([FAST] * 2 + [slow] * 2, Link(bandwidth=1e9, latency=1e-5))
    for zero in (0, 1):
        prices = CostModel.of(given, cluster, batch=BATCH).under("none", zero)
        meshes = CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of((), 4, None))
        mesh = Mesh((2, 2), 1)
        partial = PartialPlan(meshes=(mesh,), starts=(0,), micro_batches=4, schedule="1f1b")
        laid = laid_out(meshes, partial, BATCH)
        assert {one.rows for one in meshes.costs(mesh, 8, 4).slices} == ({3, 1} if zero else {4, 0})
        assert {*laid.stages[0].rows} == ({3, 1} if zero else {4})  # the slow ones are left out
        seconds = score_partial(meshes, partial, BATCH).timed.seconds
        assert seconds == pytest.approx(laid.prediction.step_seconds, rel=0.05)  # without them sums are shorter


def test_the_memory_of_a_stage_is_that_of_the_plan_where_micro_batches_share_casts() -> None:
    model = decoder(layers=4, heads=4, width=256).float().to("meta")
    given = profile_model(model, tokens(8, 8), tensor_degrees=(1,), precision="bf16")
    cluster, cut, num = (
        Cluster.homogeneous(2, A100, intra=A100.intra_node),
        given.paths.index("layers.2"),
        len(given.layers),
    )
    prices = CostModel.of(given, cluster, precision="bf16", batch=8)
    meshes = CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of(given.paths, num, None))
    stages = [
        StageChoice(first=first, last=last, ranks=(rank,), data=1, tensor=1, rows=(1,))
        for rank, (first, last) in enumerate(((0, cut), (cut, num)))
    ]
    own = meshes.costs(Mesh((1,), 1), 1, 8).slices[0]
    for stage, device in zip(stages, score(prices, stages, micro_batches=8).prediction.memory, strict=True):
        first, last = (meshes.chain.bounds.index(end) for end in (stage.first, stage.last))
        held = in_flight("1f1b", 2, device.rank, 8)
        assert own.fullness(first, last, held) * own.room == pytest.approx(device.total - device.framework, rel=1e-3)


def test_a_replica_without_rows_keeps_no_casts() -> None:
    model = decoder(layers=4, heads=4, width=32).float().to("meta")
    given = profile_model(model, tokens(8, 8), tensor_degrees=(1,), precision="bf16")
    cluster, cut, num = (
        Cluster.homogeneous(4, A100, intra=A100.intra_node),
        given.paths.index("layers.2"),
        len(given.layers),
    )
    prices = CostModel.of(given, cluster, precision="bf16", batch=8)
    stages = [
        StageChoice(first=first, last=last, ranks=ranks, data=2, tensor=1, rows=(2, 0))
        for first, last, ranks in ((0, cut, (0, 1)), (cut, num, (2, 3)))
    ]
    memory = {device.rank: device for device in score(prices, stages, micro_batches=4).prediction.memory}
    assert memory[0].activations > 0
    assert memory[1].activations == 0


def test_reach_is_the_first_part_that_fits() -> None:
    own = table().costs(Mesh((0, 2), 1), 32, 4).slices[0]
    for held in (1, 2, 5, 9):
        reach = own.reach(held)
        for end in range(1, len(reach)):
            fits = [first for first in range(end) if own.fullness(first, end, held) <= 1]
            assert reach[end] == (min(fits) if fits else reach[end])
            assert fits or reach[end] >= end
    assert np.any(own.reach(9) > own.reach(1))


def test_a_descent_finds_the_mesh_that_is_best_if_stages_are_equal() -> None:
    """From a pipeline that leaves half of the devices idle, to one that does not."""
    meshes = table()
    sequence = (Mesh((2, 0), 1), Mesh((0, 2), 1))
    starts = likely_cuts(meshes, sequence, BATCH, 8, "1f1b")[0]
    begin = score_partial(meshes, PartialPlan(meshes=sequence, starts=starts, micro_batches=8, schedule="1f1b"), BATCH)
    end = refined(
        meshes,
        begin,
        BATCH,
        micro_batches=[4, 8, 16],
        max_stages=8,
        score=lambda draft: score_partial(meshes, draft, BATCH),
        tried=lambda _: None,
        kept=lambda _: None,
        stop=lambda: False,
        left=set(),
    )
    assert sum(sum(mesh.counts) for mesh in end.draft.meshes) == 8
    assert end.seconds < 0.6 * begin.timed.seconds


def test_each_stage_is_divided_otherwise_at_its_cuts_where_that_is_faster() -> None:
    """Also where a mesh is slower with the whole chain, whose gradients its replicas sum over a slow network."""
    model = decoder(layers=6, heads=4, width=512).float().to("meta")
    given = profile_model(model, tokens(8, 64), tensor_degrees=(1, 2, 4))
    slow = Link(bandwidth=1e9, latency=5e-5)
    cluster = Cluster.homogeneous(24, A100, num_devices_per_node=2, intra=A100.intra_node, inter=slow)
    prices = CostModel.of(given, cluster, batch=16)
    meshes = CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of(given.paths, len(given.layers), None))
    draft = PartialPlan(meshes=(Mesh((4,), 2),) * 6, starts=(0, 1, 2, 4, 5, 6), micro_batches=2, schedule="1f1b")
    begin = score_partial(meshes, draft, 16)
    found = set(_moves(meshes, begin, 16, [2], 6))
    faster = 0
    for (stage, (mesh, first, last)), degree in product(enumerate(draft.stages(len(meshes.chain))), (1, 4)):
        other = Mesh(mesh.counts, degree)
        ahead, back, _ = meshes.costs(other, 8, 2).seconds(first, last)
        if ahead + back < begin.times.forward[stage] + begin.times.backward[stage]:
            faster += 1
            assert replace(draft, meshes=(*draft.meshes[:stage], other, *draft.meshes[stage + 1 :])) in found
    assert faster
