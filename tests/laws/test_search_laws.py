"""The plans that a search finds are the best ones, by trying all; they are legal; and never worse than simple ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.chains import card, chain, layer, machines
from tests.workloads import chain_workload
from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster, Link
from whale.ir.profile import ModelProfile
from whale.planner.cost.stage import CostModel
from whale.planner.search import Candidate, SearchSettings, StageChoice, search
from whale.planner.search.bound import least_seconds
from whale.planner.search.evaluate import score
from whale.planner.search.families import held_together
from whale.planner.search.layout import fastest_rows
from whale.planner.search.replica_table import HELD
from whale.planner.search.space import Chain, pools_of
from whale.planner.search.table import CostTable
from whale.planner.search.timing import pipeline_bound, pipeline_ends
from whale.planner.simulation.simulate import simulate

EXAMPLES = int(os.environ.get("WHALE_SEARCH_EXAMPLES", "40"))
"""Random cases; each takes about a tenth of a second."""

DEGREES = (1, 2)


@dataclass(frozen=True)
class Case:
    """A search problem."""

    profile: ModelProfile
    cluster: Cluster
    batch: int
    micro_batches: int | None
    schedules: tuple[str, ...]

    @property
    def settings(self) -> SearchSettings:
        return SearchSettings(micro_batches=self.micro_batches, schedules=self.schedules, time_limit=300)


@dataclass(frozen=True)
class Kind:
    """A kind of layer: seconds of a row on each type of device, and what `layer` takes."""

    seconds: tuple[float, ...]
    fixed: float
    parameters: float
    kept: float
    output: float
    ahead: float


def case_of(
    gib: Sequence[float],
    kinds: Sequence[Kind],
    layers: Sequence[int],
    devices: Sequence[int],
    *,
    batch: int,
    micro_batches: int | None,
    schedule: str,
) -> Case:
    """The problem of layers of these kinds on devices of types with this memory."""
    types = [card(name, gib=size) for name, size in zip("abc", gib, strict=False)]
    made = [
        layer(
            dict(zip((one.name for one in types), kind.seconds, strict=True)),
            degrees=DEGREES,
            fixed=kind.fixed,
            parameters=kind.parameters,
            kept=kind.kept,
            output=kind.output,
            name=str(index),
            ahead=kind.ahead,
        )
        for index, kind in enumerate(kinds)
    ]
    return Case(
        profile=chain(made, layers),
        cluster=machines([types[place] for place in sorted(devices)], Link(bandwidth=1e9, latency=1e-5)),
        batch=batch,
        micro_batches=micro_batches,
        schedules=(schedule,),
    )


@st.composite
def cases(draw: st.DrawFn, max_devices: int = 3, max_layers: int = 3, batches: Sequence[int] = (2, 4, 6)) -> Case:
    gib = [draw(st.sampled_from([0.06, 0.12, 64])) for _ in range(draw(st.integers(1, 2)))]
    kinds = [
        Kind(
            seconds=tuple(draw(st.sampled_from([0.01, 0.015, 0.04])) for _ in gib),
            fixed=draw(st.sampled_from([0.0, 0.02])),
            parameters=draw(st.sampled_from([1e5, 2e6])),
            kept=draw(st.sampled_from([1e5, 2e7])),
            output=draw(st.sampled_from([1e3, 1e6])),
            ahead=draw(st.sampled_from([1 / 3, 0.1, 0.6])),
        )
        for _ in range(2)
    ]
    return case_of(
        gib,
        kinds,
        draw(st.lists(st.integers(0, 1), min_size=1, max_size=max_layers)),
        draw(st.lists(st.integers(0, len(gib) - 1), min_size=1, max_size=max_devices)),
        batch=draw(st.sampled_from(batches)),
        micro_batches=draw(st.sampled_from([None, 1, 2])),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
    )


def every_plan(case: Case) -> Iterator[Candidate]:
    """All plans of the space, each scored; devices of a type may change places."""
    counts = numbers_of_micro_batches(case)
    num_layers, num = len(case.profile.layers), len(case.cluster.devices)
    seen = set()
    for places in product(range(-1, min(num, num_layers)), repeat=num):
        depth = max(places) + 1
        if set(places) - {-1} != set(range(depth)) or not depth:
            continue
        members = [tuple(rank for rank, place in enumerate(places) if place == stage) for stage in range(depth)]
        look = tuple(tuple(case.cluster.devices[rank].type.name for rank in own) for own in members)
        if look in seen:
            continue
        seen.add(look)
        for cuts, degrees, count in product(
            combinations(range(1, num_layers), depth - 1),
            product(*([degree for degree in DEGREES if len(own) % degree == 0] for own in members)),
            counts,
        ):
            for schedule in case.schedules:
                yield scored(case, members, (0, *cuts, num_layers), degrees, count, schedule)


def numbers_of_micro_batches(case: Case) -> list[int]:
    return [case.micro_batches] if case.micro_batches else sorted({-(-case.batch // rows) for rows in range(1, 7)})


def meshes_of(case: Case) -> CostTable:
    prices = CostModel.of(case.profile, case.cluster, batch=case.batch)
    return CostTable(prices=prices, pools=pools_of(case.cluster), chain=Chain.of((), len(case.profile.layers), None))


def scored(case: Case, members, bounds, degrees, count: int, schedule: str) -> Candidate:  # type: ignore[no-untyped-def]
    meshes = meshes_of(case)
    prices, rows_in_all = meshes.prices, meshes.rows(case.batch, count)
    stages = []
    for index, (own, degree, (first, last)) in enumerate(zip(members, degrees, pairwise(bounds), strict=True)):
        groups = [prices.group(own[at : at + degree], len(own) // degree) for at in range(0, len(own), degree)]
        held = count if schedule == "gpipe" else min(count, len(members) - index)
        rows = fastest_rows(prices, range(first, last), groups, rows_in_all, count, held)
        stages.append(StageChoice(first=first, last=last, ranks=own, data=len(own) // degree, tensor=degree, rows=rows))
    return score(prices, stages, micro_batches=count, schedule=schedule, batch=case.batch)


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases())
@example(
    case_of(
        [0.06],
        [Kind((0.01,), 0.0, 1e5, 2e7, 1e3, 0.6), Kind((0.01,), 0.0, 2e6, 2e7, 1e3, 1 / 3)],
        [0, 0],
        [0, 0, 0],
        batch=2,
        micro_batches=None,
        schedule="1f1b",
    )
)
@example(
    case_of(
        [0.12, 0.06],
        [Kind((0.01, 0.015), 0.02, 2e6, 1e5, 1e3, 0.1), Kind((0.04, 0.04), 0.0, 2e6, 2e7, 1e6, 1 / 3)],
        [0, 1],
        [0, 1, 1],
        batch=4,
        micro_batches=1,
        schedule="1f1b",
    )
)
@example(
    case_of(
        [0.12, 0.12],
        [Kind((0.01, 0.01), 0.0, 2e6, 2e7, 1e3, 0.1), Kind((0.01, 0.01), 0.02, 2e6, 1e5, 1e3, 0.6)],
        [1, 1, 0],
        [0, 1, 1],
        batch=6,
        micro_batches=1,
        schedule="1f1b",
    )
)
@example(
    case_of(
        [64, 0.12],
        [Kind((0.01, 0.01), 0.02, 1e5, 2e7, 1e3, 0.1), Kind((0.04, 0.015), 0.0, 2e6, 2e7, 1e6, 0.6)],
        [1, 0, 1],
        [0, 1, 1],
        batch=4,
        micro_batches=1,
        schedule="1f1b",
    )
)
@example(
    case_of(
        [0.06, 64],
        [Kind((0.04, 0.015), 0.0, 1e5, 1e5, 1e6, 1 / 3), Kind((0.01, 0.015), 0.02, 1e5, 2e7, 1e3, 1 / 3)],
        [0, 0, 1],
        [0, 0, 0],
        batch=4,
        micro_batches=1,
        schedule="gpipe",
    )
)
@example(
    case_of(
        [0.12, 0.12],
        [Kind((0.04, 0.015), 0.02, 1e5, 2e7, 1e3, 0.6), Kind((0.04, 0.01), 0.0, 2e6, 2e7, 1e3, 0.6)],
        [0, 1],
        [0, 1, 1],
        batch=6,
        micro_batches=2,
        schedule="gpipe",
    )
)
@example(
    case_of(
        [0.06, 0.06],
        [Kind((0.01, 0.015), 0.02, 1e5, 1e5, 1e6, 0.6), Kind((0.04, 0.01), 0.0, 2e6, 2e7, 1e6, 1 / 3)],
        [1, 0, 1],
        [0, 1, 1],
        batch=2,
        micro_batches=None,
        schedule="1f1b",
    )
)
@example(
    case_of(
        [0.12, 0.12],
        [Kind((0.01, 0.04), 0.02, 1e5, 2e7, 1e6, 0.6), Kind((0.04, 0.01), 0.0, 2e6, 1e5, 1e3, 0.1)],
        [0, 1, 1],
        [0, 1, 1],
        batch=6,
        micro_batches=None,
        schedule="gpipe",
    )
)
@example(
    case_of(
        [0.06, 0.12],
        [Kind((0.04, 0.01), 0.02, 1e5, 1e5, 1e3, 1 / 3), Kind((0.01, 0.01), 0.0, 1e5, 2e7, 1e6, 0.1)],
        [1, 1],
        [0, 1, 1],
        batch=6,
        micro_batches=2,
        schedule="gpipe",
    )
)
@example(
    case_of(
        [0.06],
        [Kind((0.04,), 0.0, 2e6, 2e7, 1e3, 1 / 3), Kind((0.04,), 0.0, 2e6, 2e7, 1e3, 1 / 3)],
        [1],
        [0, 0, 0],
        batch=4,
        micro_batches=None,
        schedule="1f1b",
    )
)
def test_no_other_plan_is_faster(case: Case) -> None:
    possible = [plan.prediction.step_seconds for plan in every_plan(case) if plan.prediction.fits]
    if not possible:
        with pytest.raises(InfeasibleError, match="[GM]iB"):
            search(case.profile, case.cluster, batch=case.batch, settings=case.settings)
        return
    found = search(case.profile, case.cluster, batch=case.batch, settings=case.settings)
    assert found.best.prediction.step_seconds == pytest.approx(min(possible), rel=1e-6)
    assert 0 < found.bound_seconds <= min(possible) * (1 + 1e-9)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Case, Candidate]:
    """Any plan of a case that is too large to try all."""
    case = draw(cases(max_devices=8, max_layers=10, batches=(2, 4, 6, 10, 24)))
    num_layers, num = len(case.profile.layers), len(case.cluster.devices)
    depth = draw(st.integers(1, min(num, num_layers)))
    first = draw(st.permutations(range(num)))[:depth]
    places = [first.index(rank) if rank in first else draw(st.integers(-1, depth - 1)) for rank in range(num)]
    members = [tuple(rank for rank in range(num) if places[rank] == stage) for stage in range(depth)]
    cuts = sorted(draw(st.permutations(range(1, num_layers)))[: depth - 1])
    degrees = [draw(st.sampled_from([degree for degree in DEGREES if len(own) % degree == 0])) for own in members]
    count = draw(st.sampled_from(numbers_of_micro_batches(case)))
    schedule = draw(st.sampled_from(case.schedules))
    return case, scored(case, members, (0, *cuts, num_layers), degrees, count, schedule)


@settings(max_examples=3 * EXAMPLES, deadline=None)
@given(plans())
def test_no_plan_is_faster_than_the_bound(drawn: tuple[Case, Candidate]) -> None:
    case, plan = drawn
    bound = least_seconds(meshes_of(case).prices, case.batch)
    assert 0 < bound <= plan.prediction.step_seconds * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(cases(max_devices=8, max_layers=10))
def test_plans_are_legal_and_never_worse_than_one_strategy_alone(case: Case) -> None:
    limited = SearchSettings(micro_batches=case.micro_batches, schedules=case.schedules, time_limit=300)
    try:
        found = search(case.profile, case.cluster, batch=case.batch, settings=limited)
    except InfeasibleError:
        assert not any(plan.prediction.fits for plan in single_strategies(case))
        return
    again = search(case.profile, case.cluster, batch=case.batch, settings=limited)
    assert again.candidates == found.candidates
    times = [one.prediction.step_seconds for one in found.candidates]
    assert times == sorted(times) and found.bound_seconds <= times[0]
    for one in found.candidates:
        (rows,) = {sum(stage.rows) for stage in one.stages}
        assert one.prediction.fits and rows * (one.micro_batches - 1) < case.batch <= rows * one.micro_batches
        for stage in one.stages:
            slices = [stage.slice(index) for index in range(stage.data)]
            assert all(a < b for group in slices for a, b in pairwise(group))
            assert all(a < b for both in pairwise(slices) for a, b in zip(*both, strict=True))
    for plan in single_strategies(case):
        if plan.prediction.fits:
            assert times[0] <= plan.prediction.step_seconds * (1 + 1e-9)


def single_strategies(case: Case) -> Iterator[Candidate]:
    """All devices in pure data or tensor parallelism, or in a pipeline in the order of ranks with even cuts."""
    num, num_layers = len(case.cluster.devices), len(case.profile.layers)
    every = tuple(range(num))
    for count in [case.micro_batches] if case.micro_batches else [n for n in range(1, 7) if case.batch % n == 0]:
        for degree in {1, num} & set(DEGREES):
            if num // degree <= case.batch // count:
                yield scored(case, [every], (0, num_layers), (degree,), count, case.schedules[0])
        if num <= num_layers:
            bounds = tuple(num_layers * stage // num for stage in range(num + 1))
            yield scored(case, [(rank,) for rank in every], bounds, (1,) * num, count, case.schedules[0])


TIMES = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.5])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.sampled_from(["1f1b", "gpipe"]),
    st.sampled_from([0.0, 0.4, 1.0]),
)
@example([(0.5, 0.5), (0.5, 0.5)], 15, 0.3, "1f1b", 0.0)
def test_drafts_end_when_the_simulator_says(
    times: list[tuple[float, float]], micro_batches: int, hop: float, schedule: str, alone: float
) -> None:
    workload = chain_workload(len(times), micro_batches, schedule=schedule, times=times, latency=hop)
    forward, backward = zip(*times, strict=True)
    hops, own = [hop] * len(times), [0.0, *(alone * one for one in forward[1:])]
    stages = (stage.model_copy(update={"own": (early,)}) for stage, early in zip(workload.stages, own, strict=True))
    workload = workload.model_copy(update={"stages": tuple(stages)})
    ends = pipeline_ends(forward, backward, hops, micro_batches, schedule, latencies=hops, own=own)
    assert max(*ends.done, *ends.sent) == pytest.approx(simulate(workload).step_seconds, rel=1e-2)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 5), min_size=6, max_size=6)), min_size=1, max_size=3)
)
def test_no_order_of_stages_holds_more_than_is_said(types: list[tuple[int, list[int]]]) -> None:
    nums = [num for num, _ in types]
    orders = set(permutations([own for own, num in enumerate(nums) for _ in range(num)][:6], min(sum(nums), 6)))
    most = max(sum(types[own][1][place] / 8 for place, own in enumerate(order)) for order in orders)
    said = held_together([np.array([parts]) / 8 for _, parts in types], nums)
    if said >= HELD:  # all layers: how much more there is room for is not asked
        assert most >= HELD or len(types) > 2 or sum(nums) > 6
    else:
        assert said == most if len(types) < 3 and sum(nums) <= 6 else said >= most


@given(
    st.lists(st.tuples(*(st.floats(0.1, 2.0),) * 3, st.floats(0.0, 0.5), st.floats(0.0, 1.0)), min_size=1, max_size=7),
    st.integers(1, 9),
    st.floats(0.05, 1.0),
    st.booleans(),
    st.lists(st.just(0.0) | st.floats(0.0, 9.0), min_size=7, max_size=7),
)
@example([*([(1.0, 1.0, 1.0, 0.0, 0.0)] * 6), (2.0, 1.0, 1.0, 0.0, 1.0)], 2, 0.75, True, [0.0] * 7)
def test_no_pipeline_ends_before_its_bound(
    stages: list[tuple[float, ...]], count: int, share: float, begins_alone: bool, waits: list[float]
) -> None:
    forward, backward, once, hops, parts = map(list, zip(*stages, strict=True))
    hops[-1], share = 0.0, share if count > 1 else 1.0
    own = [0.0, *(part * one * begins_alone for part, one in zip(parts[1:], forward[1:], strict=True))]
    given: Any = {"last_share": share, "own": own, "gathered": waits[: len(own)]}
    ends = pipeline_ends(forward, backward, hops, count, "1f1b", **given)
    least = pipeline_bound(forward, backward, hops, once, count, "1f1b", **given)
    assert least <= max(end + after for end, after in zip(ends.done, once, strict=True)) * (1 + 1e-9)
