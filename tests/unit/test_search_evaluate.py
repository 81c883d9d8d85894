"""Predictions of the search's plans: equal to an estimate of the same degrees, or computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chains import card, chain, layer, machines
from whale.errors import UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.profile import LayerKind, ModelProfile
from whale.ir.program import BUCKET_BYTES
from whale.planner.catalog import device_types
from whale.planner.cost.configuration import Configuration
from whale.planner.cost.estimate import Estimate, estimate
from whale.planner.cost.stack import WHALE, Stack
from whale.planner.cost.stage import CostModel
from whale.planner.search import StageChoice, evaluate
from whale.planner.simulation.simulate import simulate

A100 = device_types()["A100-SXM4-80GB"]
V100 = device_types()["V100-SXM2-32GB"]
NETWORK = Link(bandwidth=25e9, latency=1e-5, adapters=8)
GOLDEN = Path(__file__).parents[1] / "golden" / "gpt_22b_profile.json"
MEGATRON = Stack(name="megatron")
FAST, SLOW = card("fast"), card("slow")


@pytest.fixture(scope="module")
def gpt() -> ModelProfile:
    """Without its tie: what that adds between stages is not in an estimate."""
    return ModelProfile.load(GOLDEN).model_copy(update={"tied": ()})


def nodes(*types: DeviceType) -> Cluster:
    """A node of eight devices for each type."""
    devices = [(f"node{index}", type_) for index, type_ in enumerate(types) for _ in range(8)]
    return Cluster.of(devices, intra=A100.intra_node, inter=NETWORK)


def as_stages(found: Estimate) -> list[StageChoice]:
    layout, given = found.layout, found.layout.configuration
    return [
        StageChoice(
            first=layers[0],
            last=layers[-1] + 1,
            ranks=tuple(rank for replica in range(layout.data) for rank in layout.devices_of(stage, replica)),
            data=layout.data,
            tensor=given.tensor,
            rows=tuple(int(rows) for rows in found.rows),
        )
        for stage, layers in enumerate(found.cuts)
    ]


@pytest.mark.parametrize(
    "degrees",
    [
        {"tensor": 8, "pipeline": 4},
        {"tensor": 1, "pipeline": 8, "precision": "fp32"},
        {"tensor": 8, "pipeline": 2, "micro_batch": 2},
        {"tensor": 8, "pipeline": 2, "schedule": "gpipe", "precision": "fp16"},
        {"tensor": 1, "pipeline": 1, "micro_batch": 2},
    ],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_uniform_degrees_are_scored_as_they_are_estimated(gpt: ModelProfile, degrees, mixed: bool) -> None:  # type: ignore[no-untyped-def]
    cluster = nodes(A100, A100, *([V100, V100] if mixed else [A100, A100]))
    wanted = estimate(gpt, cluster, Configuration(**{"batch": 64, "precision": "bf16", **degrees}))
    found = evaluate(
        gpt,
        cluster,
        as_stages(wanted),
        micro_batches=wanted.layout.num_micro_batches,
        schedule=wanted.layout.configuration.schedule,
        precision=wanted.layout.configuration.precision,
        stack=MEGATRON,
    ).prediction
    given = wanted.prediction
    assert found.step_seconds == pytest.approx(given.step_seconds, rel=1e-6)
    assert found.step_seconds_interval == pytest.approx(given.step_seconds_interval, rel=1e-6)
    assert found.fits == given.fits and found.source == given.source
    assert found.mfu == pytest.approx(given.mfu) and found.flops == pytest.approx(given.flops)
    need = {device.rank: device for device in given.memory}
    assert need and {device.rank for device in found.memory} >= set(need)
    for device in found.memory:
        if device.rank in need:
            assert device.total == pytest.approx(need[device.rank].total, rel=1e-6)


def test_thousands_of_ranks_are_simulated_as_the_few_kinds_that_there_are(gpt: ModelProfile) -> None:
    cluster = nodes(*[A100] * 128, *[V100] * 128)
    half = len(gpt.layers) // 2
    stages = [
        StageChoice(first=0, last=half, ranks=tuple(range(1024)), data=128, tensor=8, rows=(8,) * 128),
        StageChoice(
            first=half, last=len(gpt.layers), ranks=tuple(range(1024, 2048)), data=1024, tensor=1, rows=(1,) * 1024
        ),
    ]
    found = evaluate(gpt, cluster, stages, micro_batches=512, precision="fp16")
    assert sum(len(stage.ranks) for stage in found.workload.stages) == 2
    whole = simulate(found.workload)
    assert found.prediction.step_seconds == pytest.approx(whole.step_seconds, rel=1e-6)
    assert found.prediction.bubble == pytest.approx(whole.bubble, rel=2e-3)  # of ranks that wait beside the slowest
    assert found.prediction.breakdown == pytest.approx(
        whole.breakdowns[whole.busiest_rank], rel=1e-3, abs=0.01 * whole.step_seconds
    )


def small(num_layers: int = 4) -> ModelProfile:
    return chain([layer({"cpu-fast": 0.01, "cpu-slow": 0.02}, degrees=(1, 2))], (0,) * num_layers)


def choice(first: int, last: int, ranks: tuple[int, ...], rows: tuple[int, ...], tensor: int = 1) -> StageChoice:
    return StageChoice(first=first, last=last, ranks=ranks, data=len(rows), tensor=tensor, rows=rows)


def test_unlike_slices_with_rows_by_speed_are_done_together() -> None:
    cluster = machines([FAST, SLOW])
    fair, even = (
        evaluate(small(), cluster, [choice(0, 4, (0, 1), rows)], micro_batches=1) for rows in ((8, 4), (6, 6))
    )
    assert fair.workload.stages[0].forward[0] == pytest.approx(fair.workload.stages[0].forward[1])
    assert fair.prediction.step_seconds < even.prediction.step_seconds


def test_devices_of_a_tensor_group_take_parts_by_speed() -> None:
    """The slow device takes a third of a layer: all of it takes 20 ms there, half of it 11 ms, and 5.5 ms on the fast
    one. Between the degrees that are known the times are linear."""
    found = evaluate(small(), machines([FAST, SLOW]), [choice(0, 4, (0, 1), (6,), tensor=2)], micro_batches=1)
    (stage,) = found.workload.stages
    assert stage.forward[0] + stage.backward[0] == pytest.approx(4 * 6 * 0.008)
    assert found.prediction.breakdown["update"] == pytest.approx(4 * 1e-4 / 2 * 4 / 3)


def test_every_row_crosses_a_boundary_whatever_the_degrees() -> None:
    """Messages from one replica to four use its one link, and messages from four to one use that one's link."""
    cluster = machines([FAST] * 8)
    for rows in (((8,), (2, 2, 2, 2)), ((2, 2, 2, 2), (8,)), ((5, 3), (2, 2, 2, 2))):
        ranks = (tuple(range(len(rows[0]))), tuple(range(4, 4 + len(rows[1]))))
        stages = [choice(0, 2, ranks[0], rows[0]), choice(2, 4, ranks[1], rows[1])]
        found = evaluate(small(), cluster, stages, micro_batches=2)
        (boundary,) = found.workload.boundaries
        links = {(link.source, link.target): link for link in found.workload.links}
        spent = [one.bytes / links[one.source, one.target].bandwidth for one in boundary.forward]
        alone = CostModel.of(small(), cluster).link(0, 7, 10_000)
        assert max(spent) == pytest.approx(max(*rows[0], *rows[1]) * 1e4 / alone.bandwidth)
        assert {(one.target, one.source) for one in boundary.backward} == {
            (one.source, one.target) for one in boundary.forward
        }


def test_a_slice_without_rows_waits_for_the_others() -> None:
    found = evaluate(small(), machines([FAST, SLOW]), [choice(0, 4, (0, 1), (4, 0))], micro_batches=2)
    assert found.workload.stages[0].forward[1] == 0.0
    assert found.workload.reductions[0].ranks == (0, 1)


def test_tied_layers_on_two_stages_are_summed_between_them() -> None:
    tied = small().model_copy(update={"tied": (((0, 3), 5e5),)})
    stages = [choice(0, 2, (0, 1), (2, 2)), choice(2, 4, (2, 3), (2, 2))]
    cluster = machines([FAST] * 4)
    apart = evaluate(tied, cluster, stages, micro_batches=2).workload.reductions
    assert [reduction.stages for reduction in apart] == [(1,), (0,), (0, 1)]  # in the order of launches
    assert apart[2].bytes == 4 * 5e5 and apart[1].bytes == 4 * 1.5e6
    together = evaluate(tied, cluster, [choice(0, 4, (0, 1, 2, 3), (1, 1, 1, 1))], micro_batches=2)
    assert [reduction.bytes for reduction in together.workload.reductions] == [4 * 3.5e6]


def test_early_stages_keep_more_micro_batches_with_1f1b_and_all_with_gpipe() -> None:
    stages = [choice(stage, stage + 1, (stage,), (1,)) for stage in range(4)]
    kept = {
        schedule: [
            device.activations
            for device in evaluate(
                small(), machines([FAST] * 4), stages, micro_batches=8, schedule=schedule, stack=MEGATRON
            ).prediction.memory
        ]
        for schedule in ("1f1b", "gpipe")
    }
    assert kept["1f1b"] == [4e6, 3e6, 2e6, 1e6]
    assert kept["gpipe"] == [8e6] * 4


def test_what_does_not_fit_is_scored_and_said_not_to_fit() -> None:
    cluster = machines([card("fast", gib=0.01)])
    found = evaluate(small(), cluster, [choice(0, 4, (0,), (1,))], micro_batches=1)
    assert not found.prediction.fits and found.prediction.step_seconds > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"last": 3}, "one after the other"),
        ({"ranks": (0, 0)}, "rank 0 is in two places"),
        ({"ranks": (0, 7)}, "rank 7 does not exist"),
        ({"rows": (3, 2)}, "takes 5 rows"),
        ({"data": 3}, "mesh of 3 x 1"),
        ({"data": 1, "tensor": 3, "ranks": (0, 1, 2), "rows": (4,)}, "no tensor degree 3"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes, said: str) -> None:  # type: ignore[no-untyped-def]
    good = choice(2, 4, (0, 1), (2, 2))
    stages = [choice(0, 2, (2, 3), (2, 2)), replace(good, **changes)]
    with pytest.raises(UsageError, match=said):
        evaluate(small(), machines([FAST] * 4), stages, micro_batches=1)


def test_gradients_are_summed_in_the_messages_that_whale_sends(gpt: ModelProfile) -> None:
    """A large parameter is a message of its own, small ones share a bucket: more bytes are more messages, not larger
    ones. Other stacks are priced with one message."""
    largest, ranks = 10_000_000, range(16)

    def known(kind: LayerKind) -> LayerKind:
        return kind.model_copy(
            update={"variants": tuple(one.model_copy(update={"largest": largest}) for one in kind.variants)}
        )

    profile = gpt.model_copy(update={"kinds": tuple(map(known, gpt.kinds))})
    prices, other = (CostModel.of(profile, nodes(A100, A100), precision="bf16", stack=one) for one in (WHALE, MEGATRON))
    message = 2 * largest
    assert prices.all_reduce(ranks, 1, 100 * message) == pytest.approx(100 * prices.all_reduce(ranks, 1, message))
    assert prices.all_reduce(ranks, 1, message) == pytest.approx(other.all_reduce(ranks, 1, message))
    assert prices.all_reduce(ranks, 1, 100 * message) > 1.05 * other.all_reduce(ranks, 1, 100 * message)
    half = BUCKET_BYTES / 2
    assert prices.all_reduce(ranks, 1, half) == pytest.approx(other.all_reduce(ranks, 1, half))
