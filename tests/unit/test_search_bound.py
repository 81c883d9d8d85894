"""The bound of the search knows what every plan pays: work, sums of gradients, waits for the pipeline, memory."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.chains import card, chain, layer
from whale.ir.cluster import Cluster, Link
from whale.planner.cost.stage import CostModel
from whale.planner.search.bound import Duals, bound_seconds, cases_of, least_work, work_of_parts
from whale.planner.search.chain import Chain
from whale.planner.search.choices import StageChoice
from whale.planner.search.devices import pools_of
from whale.planner.search.evaluate import score
from whale.planner.search.meshes import Meshes
from whale.planner.search.slices import Slices

FAST, SLOW = card("fast"), card("slow")
ROOMY = Link(bandwidth=1e12, latency=1e-7)


def bound(num: int, *, gib: float = 64, parameters: float = 1e5, network: Link = ROOMY, kept: float = 1e5) -> float:
    """Bound of eight layers of 10 ms a row, 8 rows in 4 micro-batches, as a multiple of their work divided by devices
    that each have a node."""
    type_ = card("fast", gib=gib)
    profile = chain([layer({type_.name: 0.01}, parameters=parameters, kept=kept)], (0,) * 8)
    cluster = Cluster.of([(str(index), type_) for index in range(num)], intra=network, inter=network)
    return bound_seconds(meshes_of(profile, cluster), 8, [4]) / (8 * 8 * 0.01 / num)


def meshes_of(profile, cluster: Cluster) -> Meshes:  # type: ignore[no-untyped-def]
    chain_of = Chain.of((), len(profile.layers), None)
    return Meshes(prices=CostModel.of(profile, cluster), pools=pools_of(cluster), chain=chain_of)


def test_of_one_device_it_is_the_step() -> None:
    assert bound(1) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("rows", [9, 10, 13, 17, 18, 100])
def test_it_is_no_more_than_the_step_where_slices_have_many_rows(rows: int) -> None:
    """Ranges of rows are one kind of replica: four devices, with the given rows each."""
    profile = chain([layer({FAST.name: 0.01}, parameters=1e5)], (0,) * 4)
    meshes = meshes_of(profile, Cluster.of([("node", FAST)] * 4, intra=ROOMY))
    assert 0.8 * rows * 4 * 0.01 < bound_seconds(meshes, 4 * rows, [1]) < rows * 4 * 0.01 + 4e-3


def test_replicas_that_cost_nothing_leave_the_work_alone() -> None:
    assert 1 <= bound(2) < 1.05


def test_sums_of_gradients_count_where_a_pipeline_would_wait() -> None:
    slow = Link(bandwidth=1e9, latency=1e-5)
    assert bound(2, parameters=2e5, network=slow) + 0.05 < bound(2, parameters=1e7, network=slow)


def test_a_model_that_only_a_pipeline_holds_waits_for_it() -> None:
    """The states of all layers take 128 MB and those of half of them 64."""
    assert bound(2, gib=0.09, parameters=1e6) > 1.08


def test_types_work_at_their_own_pace() -> None:
    profile = chain([layer({FAST.name: 0.01, SLOW.name: 0.03})], (0,) * 4)
    meshes = meshes_of(profile, Cluster.of([("node", FAST), ("node", SLOW)], intra=ROOMY))
    work = work_of_parts(meshes, 12, [3])
    assert work[:, 0] == pytest.approx(12 * 0.01) and work[:, 1] == pytest.approx(12 * 0.03)
    assert least_work(work, np.ones(2)) <= bound_seconds(meshes, 12, [3])


def test_a_stage_may_have_few_rows_on_each_of_its_slower_devices() -> None:
    """One stage on all three, with 2, 1 and 1 of four rows: more slices of one row than there are slow devices."""
    kinds = [layer({FAST.name: 0.01, SLOW.name: slow}, parameters=1e5) for slow in (0.01, 0.04)]
    cluster = Cluster.of([("node", FAST), ("node", SLOW), ("node", SLOW)], intra=ROOMY)
    bound_of = bound_seconds(meshes_of(chain(kinds, (0, 1, 0)), cluster), 4, [1])
    assert 0.9 * 0.06 < bound_of < 0.06 + 0.004


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("ahead", [0.2, 0.6])
def test_it_comes_near_to_a_pipeline_whose_last_micro_batch_is_small(schedule: str, ahead: float) -> None:
    """Two layers of which a device holds one; five rows as four and one."""
    type_ = card("fast", gib=0.025)
    profile = chain([layer({type_.name: 0.01}, parameters=1e6, ahead=ahead)], (0, 0))
    cluster = Cluster.of([("node", type_)] * 2, intra=ROOMY)
    meshes = meshes_of(profile, cluster)
    assert meshes.rows(5, 2) == 4
    stages = [
        StageChoice(first=index, last=index + 1, ranks=(index,), data=1, tensor=1, rows=(4,)) for index in range(2)
    ]
    plan = score(meshes.prices, stages, micro_batches=2, schedule=schedule, batch=5)
    assert plan.prediction.fits
    taken = plan.prediction.step_seconds - plan.workload.overhead
    (case,) = cases_of(meshes, Slices.of(meshes, 5), 5, [2], (schedule,), 2 * taken)
    weights = product(np.linspace(-2, 1, 13), (0.0, 0.5, 1.0), (0.0, 0.5, 1.0))
    shown = [case.shown(taken * 1.01, Duals((1.0,), *one)) + taken * 1.01 for one in weights]
    assert 0.8 * taken < max(shown) <= taken * (1 + 1e-6)
