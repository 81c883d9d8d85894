"""The yardstick of the search, by hand."""

from pathlib import Path

import pytest

from benchmarks.sailor_scores import Physical, Slice, Stage, Strict, uniform
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.profile import Affine, Amount, LayerKind, LayerVariant, LinkCurve, MeasuredTimes, ModelProfile, Saved
from whale.planner.catalog import device_types_with
from whale.planner.cost.stack import Stack
from whale.planner.cost.stage import CostModel
from whale.planner.profile_import import import_sailor
from whale.planner.search import SearchSettings, search

CARD = DeviceType.of("card", speed={"float32": 1e12}, memory_bytes=10**10, memory_bandwidth=1e12)
DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "sailor"


def layer(name: str, output: float) -> LayerKind:
    """A million parameters, as many elements kept for a row; 0.3 s for a row, 0.6 s for two."""
    million = Amount(elements=Affine(0, 1e6))
    times = MeasuredTimes(
        device_type="card",
        tensor_degree=1,
        rows=(1, 2, 4),
        forward=(0.1, 0.2, 0.4),
        backward=(0.2, 0.4, 0.8),
        update=(0.01, 0.01, 0.01),
    )
    return LayerKind(
        name=name,
        variants=(LayerVariant(tensor_degree=1, parameters=1e6, saved=(Saved(origin="profile", size=million),)),),
        measured=(times,),
        output=Amount(elements=Affine(0, output)),
    )


def curve(within: str, gigabytes_per_second: float) -> LinkCurve:
    devices = 2 if within == "node" else 1
    return LinkCurve(
        source="card",
        target="card",
        devices=devices,
        within=within,  # type: ignore[arg-type]
        coefficients=(gigabytes_per_second,),
    )


def rules(kind: type[Strict], batch: int, *nodes: str) -> Strict:
    profile = ModelProfile(
        name="toy",
        layers=(0, 1),
        kinds=(layer("block", 1e6), layer("head", 1e7)),
        links=(curve("node", 10.0), curve("nodes", 1.0)),
    )
    return kind(profile=profile, cluster=Cluster.of([(node, CARD) for node in nodes]), batch=batch)


TWO_ON_ONE = (
    Stage(first=0, last=1, slices=(Slice(ranks=(0,), rows=1), Slice(ranks=(1,), rows=1))),
    Stage(first=1, last=2, slices=(Slice(ranks=(2,), rows=2),)),
)


def test_a_step_is_what_a_person_computes() -> None:
    # Stage 0: 0.3 s and one message of 4 MB; stage 1: 0.6 s and two messages of 80 MB, the head's own output.
    # Two micro-batches; 4 MB of gradients in halves there and back; the update of both layers.
    score = rules(Strict, 4, "a", "a", "b").score(TWO_ON_ONE)
    assert score.micro_batches == 2
    assert score.straggler == pytest.approx(0.6 + 0.16)
    assert score.reduction == pytest.approx(2 * 0.002)
    assert score.seconds == pytest.approx((0.304 + 0.76) + 0.76 + 0.02 + 0.004)
    kept = 4e6 * 1 * 2  # of two micro-batches of one row on the first stage; one of two rows on the last
    assert score.memory == pytest.approx((24e6 + kept + 2e9) / 1e10)


def test_physical_links_are_those_that_are_there() -> None:
    # A gradient is as large as what came; the slices of stage 0 are on one node, whose links are ten times as fast.
    score = rules(Physical, 4, "a", "a", "b").score(TWO_ON_ONE)
    assert score.straggler == pytest.approx(0.6 + 2 * 0.008)
    assert score.reduction == pytest.approx(2 * 0.0002)
    apart = rules(Physical, 4, "a", "b", "c").score(TWO_ON_ONE)
    assert apart.reduction == pytest.approx(2 * 0.002)


def test_a_last_micro_batch_takes_what_its_rows_take() -> None:
    strict = rules(Strict, 3, "a", "a", "b")
    assert strict.score(TWO_ON_ONE, whole=True).seconds == pytest.approx(1.848)
    assert strict.score(TWO_ON_ONE).seconds == pytest.approx((0.304 + 0.76) + 0.3 + 0.08 + 0.024)


def test_rows_between_measured_ones_lie_on_a_line_and_others_are_unknown() -> None:
    alone = (Stage(first=0, last=2, slices=(Slice(ranks=(0,), rows=3),)),)
    assert rules(Strict, 3, "a").score(alone).seconds == pytest.approx(2 * 0.9 + 0.02)
    more = (Stage(first=0, last=2, slices=(Slice(ranks=(0,), rows=8),)),)
    assert rules(Strict, 8, "a").score(more).per_second == 0


def test_what_is_no_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="not a chain"):
        rules(Strict, 4, "a", "a", "b").score(TWO_ON_ONE[:1])
    with pytest.raises(ValueError, match="divide"):
        rules(Strict, 4, "a", "a", "b").score(
            (TWO_ON_ONE[0], Stage(first=1, last=2, slices=(Slice(ranks=(2,), rows=1),)))
        )


def clusters(fast: int, slow: int) -> Strict:
    profile = import_sailor(DATA)
    types = device_types_with(profile)
    names = ["A100-40"] * fast + ["V100-16"] * slow
    within, between = Link(bandwidth=150e9, latency=3e-6), Link(bandwidth=6.25e9, latency=30e-6, adapters=1)
    devices = [(f"node{rank // 4}", types[name]) for rank, name in enumerate(names)]
    cluster = Cluster.of(devices, intra=within, inter=between)
    return Strict(profile=profile, cluster=cluster, batch=1024)


@pytest.mark.parametrize(
    ("fast", "tensor", "rows", "published"), [(32, 2, 4, 0.130), (80, 4, 4, 0.272), (128, 4, 8, 0.418)]
)
def test_the_fast_devices_alone_do_what_is_published(fast: int, tensor: int, rows: int, published: float) -> None:
    plan = uniform([(0, 26)], range(fast), data=fast // tensor, tensor=tensor, rows=rows)
    assert clusters(fast, 3 * fast).score(plan, whole=True).per_second == pytest.approx(published, abs=5e-4)


def test_a_plan_of_mixed_devices_takes_what_its_last_micro_batch_needs() -> None:
    """96 V100 by four, then 32 A100 by two; ten micro-batches of 96 rows and one of 64."""
    stages = (
        Stage(first=0, last=13, slices=tuple(Slice(ranks=tuple(range(r, r + 4)), rows=4) for r in range(32, 128, 4))),
        Stage(first=13, last=26, slices=tuple(Slice(ranks=(r, r + 1), rows=6) for r in range(0, 32, 2))),
    )
    strict = clusters(32, 96)
    assert strict.score(stages, whole=True).per_second == pytest.approx(0.2075, abs=5e-5)
    assert strict.score(stages).per_second == pytest.approx(0.2113, abs=5e-5)


def test_the_search_beats_what_is_published_for_a_mixed_cluster() -> None:
    """Sailor's own plan makes 0.361 steps a second, the best of plans like it with uneven micro-batches 0.406."""
    rules = clusters(80, 240)
    stack = Stack(name="megatron", interleaved=True)  # what ran there: sums after the last backward, scattered messages
    prices = CostModel.of(rules.profile, rules.cluster, batch=1024, stack=stack)
    found = search(rules.profile, rules.cluster, batch=1024, settings=SearchSettings(time_limit=60.0), prices=prices)
    best = found.best
    assert best.micro_batches == 13  # of 80 rows, as all devices divide them, and a last one of 64
    chain = tuple(
        Stage(
            first=stage.first,
            last=stage.last,
            slices=tuple(Slice(ranks=stage.slice(index), rows=rows) for index, rows in enumerate(stage.rows)),
        )
        for stage in best.stages
    )
    physical = Physical(profile=rules.profile, cluster=rules.cluster, batch=1024)
    assert physical.score(chain).per_second > 0.45
