"""Properties of every simulated step, for any stages, links and schedule."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workloads import boundary, chain_workload, stage_work
from whale.ir.schedule import Order, Task
from whale.ir.workload import Boundary, LinkTime, Reduction, StageWork, Workload
from whale.planner.schedules.orders import SCHEDULES
from whale.planner.simulation.recurrence import long_timing
from whale.planner.simulation.simulate import order_of, simulate, simulate_alike

few = settings(max_examples=40)
seconds = st.integers(0, 8).map(lambda quarters: quarters / 4)
sizes = st.integers(0, 6)


@st.composite
def workloads(draw: st.DrawFn, *, shares_links: bool = False, slows: bool = False) -> Workload:
    """Stages of one to three ranks, some of which work together, on devices of their own or interleaved twice."""
    num_sets, chunks = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2]))
    degrees = draw(st.lists(st.integers(1, 3), min_size=num_sets, max_size=num_sets))
    starts = [sum(degrees[:index]) for index in range(num_sets)]
    sets = [tuple(range(start, start + degree)) for start, degree in zip(starts, degrees, strict=True)]
    together = [draw(st.booleans()) for _ in sets]

    def stage(index: int) -> Any:
        ranks = sets[index % num_sets]
        count = len(ranks)
        times = st.tuples(*[seconds] * count)
        inputs, weights = draw(times), draw(times)
        return stage_work(
            ranks,
            forward=draw(times),
            backward=tuple(map(sum, zip(inputs, weights, strict=True))),
            weights=weights,
            together=(ranks,) if together[index % num_sets] else (),
            kept_bytes=draw(st.tuples(*[sizes] * count)),
            backward_peak_bytes=draw(st.tuples(*[sizes] * count)),
        )

    stages = tuple(stage(index) for index in range(num_sets * chunks))
    hops = [
        (index, [(a, b) for a in sets[index % num_sets] for b in sets[(index + 1) % num_sets]])
        for index in range(len(stages) - 1)
    ]
    ends = sorted({pair for _, pairs in hops for a, b in pairs for pair in ((a, b), (b, a)) if a != b})
    resources = st.sets(st.sampled_from(["one", "other"])).map(tuple) if shares_links else st.just(())
    return Workload(
        world_size=sum(degrees),
        micro_batches=draw(st.integers(1, 6)),
        schedule=draw(st.sampled_from(["interleaved"] if chunks > 1 else SCHEDULES)),
        stages=stages,
        boundaries=tuple(boundary(index, index + 1, pairs, draw(sizes)) for index, pairs in hops),
        links=tuple(
            LinkTime(source=a, target=b, latency=draw(seconds), bandwidth=4.0, resources=draw(resources))
            for a, b in ends
        ),
        reductions=tuple(
            Reduction(
                ranks=sets[index],
                stages=(index,),
                bytes=1,
                seconds=draw(seconds),
                ready=draw(ready),
                stretch=draw(st.sampled_from([0.0, 1.0])) if slows else 0.0,
            )
            for index in reversed(range(num_sets))
            for ready in (st.sampled_from([0.0, 0.25, 0.5]), st.just(1.0))
        ),
        update=tuple(draw(seconds) for _ in range(sum(degrees))),
        overhead=draw(seconds),
        overlap_slowdown=draw(st.sampled_from([0.0, 0.5])) if slows else 0.0,
        runs_ahead=draw(st.booleans()),
        blocking_transfers=draw(st.booleans()),
    )


anything = workloads(shares_links=True, slows=True)


@few
@given(anything)
def test_what_each_rank_does_and_waits_for_sums_to_the_step_and_its_tasks_do_not_overlap(workload: Workload) -> None:
    timeline = simulate(workload)
    for rank in timeline.ranks:
        assert sum(timeline.breakdowns[rank].values()) == pytest.approx(timeline.step_seconds)
        streams = [e for e in timeline.of_rank(rank) if e.kind not in ("send", "receive", "reduce") and e.seconds]
        assert sum(event.seconds for event in streams) == pytest.approx(timeline.step_seconds)
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(streams))


@few
@given(anything)
def test_a_step_is_never_shorter_than_a_ranks_work_nor_the_longest_chain_of_tasks_and_messages(
    workload: Workload,
) -> None:
    timeline = simulate(workload)
    assert timeline.step_seconds >= max(work_of_ranks(workload).values()) - 1e-9
    assert timeline.step_seconds >= longest_chain(workload, order_of(workload)) - 1e-9


@few
@given(workloads())
def test_messages_without_bytes_cost_their_latency_and_then_the_step_is_the_longest_chain(workload: Workload) -> None:
    boundaries = [b.model_dump() for b in workload.boundaries]
    for part in boundaries:
        for direction in ("forward", "backward"):
            part[direction] = tuple(transfer | {"bytes": 0} for transfer in part[direction])
    bare = workload.model_dump() | {"boundaries": tuple(boundaries), "reductions": (), "update": (), "overhead": 0.0}
    workload = Workload.model_validate(bare | {"runs_ahead": True})
    timeline = simulate(workload)
    latency = {(link.source, link.target): link.latency for link in workload.links}
    for event in timeline.events:
        if event.kind == "receive":
            assert event.seconds == pytest.approx(latency[event.peer, event.rank])
    assert timeline.step_seconds == pytest.approx(longest_chain(workload, order_of(workload)))


@few
@given(workloads(), st.data())
def test_nothing_that_takes_longer_makes_a_step_shorter(workload: Workload, data: st.DataObject) -> None:
    slower = workload.model_dump()
    stage = data.draw(st.sampled_from(slower["stages"]))
    more = tuple(value + 1.0 for value in stage["backward"])
    changes: list[tuple[dict[str, Any], str, Any]] = [
        (stage, "forward", tuple(value + data.draw(seconds) for value in stage["forward"])),
        (stage, "backward", more),
    ]
    for link in slower["links"][:1]:
        changes += [(link, "latency", link["latency"] + 1.0), (link, "bandwidth", link["bandwidth"] / 2)]
    for transfer in [t for b in slower["boundaries"] for t in b["forward"]][:1]:
        changes.append((transfer, "bytes", transfer["bytes"] + 4))
    changes.append((slower["reductions"][0], "seconds", slower["reductions"][0]["seconds"] + 1.0))
    record, name, value = data.draw(st.sampled_from(changes))
    record[name] = value
    order = order_of(workload)
    before = simulate(workload, order=order).step_seconds
    assert simulate(Workload.model_validate(slower), order=order).step_seconds >= before - 1e-9


@few
@given(anything)
def test_memory_ends_where_it_began_and_is_never_negative(workload: Workload) -> None:
    for changes in simulate(workload).memory.values():
        assert changes[0][1] == changes[-1][1] == 0
        assert all(held >= 0 for _, held in changes)
        assert [time for time, _ in changes] == sorted(time for time, _ in changes)


@few
@given(anything)
def test_the_critical_path_has_no_gaps(workload: Workload) -> None:
    timeline = simulate(workload)
    path = timeline.critical_path()
    if timeline.step_seconds:
        assert path[0].start == 0 and path[-1].end == pytest.approx(timeline.step_seconds)
        assert all(other.start <= one.end + 1e-9 for one, other in pairwise(path))


@few
@given(anything)
def test_the_same_workload_gives_the_same_timeline(workload: Workload) -> None:
    assert simulate(workload) == simulate(workload)


def side_by_side(workload: Workload, copies: int, *, share: bool) -> Workload:
    """Several copies of a workload at once, on ranks of their own; *share*: over the same links' resources."""
    size = workload.world_size
    offsets = [copy * size for copy in range(copies)]

    def stage(one: StageWork) -> StageWork:
        numbers = {
            name: getattr(one, name) * copies for name in type(one).model_fields if name not in ("ranks", "together")
        }
        ranks = tuple(rank + offset for offset in offsets for rank in one.ranks)
        together = tuple(tuple(rank + offset for rank in group) for offset in offsets for group in one.together)
        return StageWork.model_validate(numbers | {"ranks": ranks, "together": together})

    def moved(record: Any, offset: int, **changes: Any) -> Any:
        ends = {"source": record.source + offset, "target": record.target + offset}
        return record.model_copy(update=ends | changes)

    def crossing(one: Boundary) -> Boundary:
        ways = {way: getattr(one, way) for way in ("forward", "backward")}
        return one.model_copy(
            update={way: tuple(moved(t, offset) for offset in offsets for t in ts) for way, ts in ways.items()}
        )

    def resources(link: LinkTime, offset: int) -> tuple[str, ...]:
        return link.resources if share else tuple(f"{name} {offset}" for name in link.resources)

    return workload.model_copy(
        update={
            "world_size": size * copies,
            "stages": tuple(map(stage, workload.stages)),
            "boundaries": tuple(map(crossing, workload.boundaries)),
            "links": tuple(
                moved(link, offset, resources=resources(link, offset)) for offset in offsets for link in workload.links
            ),
            "reductions": tuple(
                one.model_copy(update={"ranks": tuple(rank + offset for offset in offsets for rank in one.ranks)})
                for one in workload.reductions
            ),
            "update": workload.update * copies,
        }
    )


@few
@given(anything, st.integers(2, 4))
def test_a_rank_stands_for_those_like_it(workload: Workload, copies: int) -> None:
    workload = side_by_side(workload, copies, share=False)
    whole, alike = simulate(workload), simulate_alike(workload)
    assert alike.step_seconds == whole.step_seconds
    assert alike.bubble == pytest.approx(whole.bubble)
    for rank in whole.ranks:
        assert alike.breakdowns[alike.stand_in(rank)] == pytest.approx(whole.breakdowns[rank])
        assert alike.peak_bytes(rank) == whole.peak_bytes(rank)


@few
@given(anything, st.integers(1, 4))
def test_messages_of_ranks_that_are_left_out_take_their_part_of_what_is_shared(workload: Workload, copies: int) -> None:
    workload = side_by_side(workload, copies, share=True)
    assert simulate_alike(workload).step_seconds == pytest.approx(simulate(workload).step_seconds)


def work_of_ranks(workload: Workload) -> dict[int, float]:
    work = {rank: workload.overhead + workload.update[rank] for rank in range(workload.world_size)}
    for stage in workload.stages:
        for rank, forward, backward in zip(stage.ranks, stage.forward, stage.backward, strict=True):
            work[rank] += workload.micro_batches * (forward + backward)
    return work


def longest_chain(workload: Workload, order: Order) -> float:
    """The end of the last task, where nothing shares a link: one walk along the order, without a clock."""
    links = {(link.source, link.target): link for link in workload.links}
    free = dict.fromkeys(range(workload.world_size), 0.0)
    ends: dict[tuple[int, int, bool, int], float] = {}  # by stage, micro-batch, whether forward, and rank

    def arrival(task: Task, rank: int) -> float:
        times = [0.0]
        for part in workload.boundaries:
            forward = task.kind == "F"
            source, target = part.source_stage, part.target_stage
            for transfer in part.forward if forward else part.backward:
                if transfer.target == rank and task.stage == (target if forward else source) and task.kind != "W":
                    made = ends[source if forward else target, task.micro_batch, forward, transfer.source]
                    if transfer.source != rank:
                        link = links[transfer.source, rank]
                        made += link.latency + transfer.bytes / link.bandwidth
                    times.append(made)
        return max(times)

    for task in order:
        stage = workload.stages[task.stage]
        times = {"F": stage.forward, "B": stage.backward, "W": stage.weights}
        times["I"] = tuple(b - w for b, w in zip(stage.backward, stage.weights, strict=True))
        for group in stage.together or [(rank,) for rank in stage.ranks]:
            start = max(max(free[rank], arrival(task, rank)) for rank in group)
            end = start + max(times[task.kind][stage.ranks.index(rank)] for rank in group)
            for rank in group:
                free[rank] = end
                if task.kind != "W":
                    ends[task.stage, task.micro_batch, task.kind == "F", rank] = end
    return max(free.values())


@few
@given(st.data(), st.integers(2, 4), st.integers(1, 9), st.booleans(), st.sampled_from(["1f1b", "gpipe"]))
def test_the_recurrence_agrees_with_the_simulator_whether_transfers_block_or_not(
    data: st.DataObject, depth: int, micro_batches: int, blocks: bool, schedule: str
) -> None:
    times = data.draw(st.lists(st.tuples(seconds, seconds), min_size=depth, max_size=depth))
    workload = chain_workload(depth, micro_batches, times=times, schedule=schedule, size=2, bandwidth=4.0)
    workload = workload.model_copy(update={"blocking_transfers": blocks})
    if not blocks and schedule == "gpipe":
        return  # a sender that lags by two tasks waits, which the recurrence leaves out
    assert long_timing(workload).seconds == pytest.approx(simulate(workload).step_seconds)
