"""Steps of many micro-batches are timed without simulating all of them, and agree with the simulator."""

from __future__ import annotations

import random

import pytest

from whale.ir.workload import Boundary, LinkTime, Reduction, StageWork, Transfer, Workload
from whale.planner.cost.step import timing_of
from whale.planner.simulation.recurrence import Timing, long_timing, settled_counts, settled_timing
from whale.planner.simulation.simulate import simulate


def pipeline(
    seed: int,
    schedule: str,
    *,
    ranks: int,
    parts: int = 1,
    micro_batches: int,
    summed: float = 0.0,
    last_share: float = 1.0,
) -> Workload:
    """Stages of random times on one rank each, or on several in turn, with sums of gradients of up to *summed*."""
    draw = random.Random(seed)
    spread, message = 0.3, 1e-3
    stages, boundaries, reductions, links = [], [], [], {}
    for stage in range(ranks * parts):
        forward = draw.uniform(1 - spread, 1 + spread)
        stages.append(
            StageWork(
                ranks=(stage % ranks,),
                forward=(forward,),
                backward=(2 * forward,),
                weights=(forward,),
                kept_bytes=(1,),
            )
        )
    for stage in range(ranks * parts - 1):
        here, there = stage % ranks, (stage + 1) % ranks
        ends = [Transfer(source=a, target=b, bytes=1) for a, b in ((here, there), (there, here))]
        boundaries.append(Boundary(source_stage=stage, target_stage=stage + 1, forward=(ends[0],), backward=(ends[1],)))
        for end in ends:
            links[end.source, end.target] = LinkTime(
                source=end.source, target=end.target, latency=message, bandwidth=1 / message
            )
    for rank in range(ranks if summed else 0):
        reductions.append(
            Reduction(
                ranks=(rank,),
                stages=(rank,),
                bytes=1,
                seconds=draw.uniform(0.1, summed),
                ready=draw.uniform(0, 1),
                slowdown=(draw.choice([0.0, 0.126, 0.5]),),
                stretch=draw.choice([0.0, 0.3]),
            )
        )
    return Workload(
        world_size=ranks,
        micro_batches=micro_batches,
        last_share=last_share,
        schedule=schedule,
        stages=tuple(stages),
        boundaries=tuple(boundaries),
        reductions=tuple(reductions),
        links=tuple(links.values()),
        update=(0.1,) * ranks,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(12))
def test_sums_that_overlap_the_last_backward_are_timed_as_they_are_simulated(schedule: str, seed: int) -> None:
    summed, last_share = (0.5, 2.0, 8.0)[seed % 3], (1.0, 0.5)[seed % 2]
    ranks, count = 1 + seed % 5, 1 + seed
    workload = pipeline(seed, schedule, ranks=ranks, micro_batches=count, summed=summed, last_share=last_share)
    timing, timeline = long_timing(workload), simulate(workload)
    assert timing.seconds == pytest.approx(timeline.step_seconds, rel=1e-9)
    assert sum(timing.breakdown.values()) == pytest.approx(timing.seconds)
    assert timing.breakdown["reduction"] == pytest.approx(timeline.breakdown["reduction"], abs=2e-3)
    assert timing.busiest_rank == timeline.busiest_rank
    assert timing.of_busiest["compute"] == pytest.approx(timeline.breakdowns[timing.busiest_rank]["compute"])
    assert sum(timing.of_busiest.values()) == pytest.approx(timing.seconds)


@pytest.mark.parametrize(("schedule", "parts"), [("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)])
@pytest.mark.parametrize("ranks", [2, 5])
def test_other_schedules_go_on_as_they_began(schedule: str, parts: int, ranks: int) -> None:
    for micro_batches in (12 * ranks, 15 * ranks + 1):
        workload = pipeline(1, schedule, ranks=ranks, parts=parts, micro_batches=micro_batches)
        timing, whole = long_timing(workload), Timing.of(simulate(workload))
        assert timing.seconds == pytest.approx(whole.seconds, rel=1e-6)
        assert timing.bubble == pytest.approx(whole.bubble, rel=1e-4)
        assert timing.breakdown == pytest.approx(whole.breakdown, rel=1e-4, abs=1e-6)
        assert timing.busiest_rank == whole.busiest_rank
        assert timing.of_busiest == pytest.approx(whole.of_busiest, rel=1e-4, abs=1e-6)
        assert sum(timing.of_busiest.values()) == pytest.approx(timing.seconds)


def test_a_step_of_many_micro_batches_takes_no_longer_to_time() -> None:
    one, other = (
        long_timing(pipeline(0, "interleaved", ranks=4, parts=2, micro_batches=num)).seconds for num in (400, 400_000)
    )
    assert other == pytest.approx(1000 * one, rel=0.05)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("message", "off"), [(0.2, 0.03), (1.0, 0.12), (3.0, 0.25)])
def test_messages_of_several_boundaries_that_share_an_adapter_take_turns(
    schedule: str, message: float, off: float
) -> None:
    """The last three of four stages read what the first one makes, so three messages leave its node at a time. What
    waits for messages that are under way is left out, which is more the longer they take beside the tasks."""
    alone = pipeline(3, schedule, ranks=4, micro_batches=16)
    boundaries = [
        Boundary(
            source_stage=here,
            target_stage=there,
            forward=(Transfer(source=here, target=there, bytes=1),),
            backward=(Transfer(source=there, target=here, bytes=1),),
        )
        for here, there in ((0, 1), (1, 2), (2, 3), (0, 2), (0, 3))
    ]
    links = tuple(
        LinkTime(source=a, target=b, latency=1e-3, bandwidth=1 / message, resources=(f"{a} out", f"{b} in"))
        for one in boundaries
        for a, b in ((one.source_stage, one.target_stage), (one.target_stage, one.source_stage))
    )
    workload = alone.model_copy(update={"boundaries": tuple(boundaries), "links": links})
    timing, whole = long_timing(workload), Timing.of(simulate(workload))
    assert timing.seconds == pytest.approx(whole.seconds, rel=off)
    assert sum(timing.breakdown.values()) == pytest.approx(timing.seconds)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("message", [0.2, 1.0, 3.0])
def test_a_single_plan_is_timed_with_messages_that_wait_for_each_other(schedule: str, message: float) -> None:
    """A stage receives from both sides through one adapter, and sends to both; 60 micro-batches are more than are
    simulated."""
    alone = pipeline(3, schedule, ranks=4, micro_batches=60)
    links = tuple(
        LinkTime(source=a, target=b, latency=1e-3, bandwidth=1 / message, resources=(f"{a} out", f"{b} in"))
        for here in range(3)
        for a, b in ((here, here + 1), (here + 1, here))
    )
    workload = alone.model_copy(update={"links": links})
    timing, whole = settled_timing(workload), Timing.of(simulate(workload))
    assert sum(settled_counts(workload)) < 60
    assert timing.seconds == pytest.approx(whole.seconds, rel=0.005)
    assert timing_of(workload, of_one=True).seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert sum(timing.breakdown.values()) == pytest.approx(timing.seconds)
