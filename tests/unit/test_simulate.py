"""The simulator against closed forms and hand-drawn timelines."""

from __future__ import annotations

import pytest

from tests.drawings import drawing_of, parse_drawing
from tests.rows import chain_of
from tests.workloads import boundary, chain_workload, stage_work
from whale.errors import ScheduleError, UsageError
from whale.ir.check import check_programs
from whale.ir.program import ReduceSpec, Send, box_size, project
from whale.ir.workload import Boundary, LinkTime, Reduction, StageWork, Transfer, Workload
from whale.planner.schedules.orders import one_f_one_b, schedule_order
from whale.planner.simulation.engine import run_programs
from whale.planner.simulation.simulate import order_of, programs_of, simulate, simulate_alike
from whale.planner.simulation.timeline import PARTS


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "micro_batches"), [(1, 3), (2, 2), (4, 8), (5, 3)])
def test_without_communication_gpipe_and_1f1b_take_m_plus_p_minus_1(
    schedule: str, num_stages: int, micro_batches: int
) -> None:
    timeline = simulate(chain_workload(num_stages, micro_batches, schedule=schedule))
    assert timeline.step_seconds == (micro_batches + num_stages - 1) * 3


def test_a_slow_link_costs_1f1b_more_than_gpipe_and_one_more_warm_up_forward_repairs_it() -> None:
    assert simulate(chain_workload(4, 8, schedule="gpipe", latency=0.5)).step_seconds == 36
    assert simulate(chain_workload(4, 8, schedule="1f1b", latency=0.5)).step_seconds == 41
    assert simulate(chain_workload(4, 8, schedule="1f1b_deep", latency=0.5)).step_seconds == 37


def test_the_programs_of_a_workload_pass_the_static_check() -> None:
    workload = chain_workload(4, 6)
    stages, edges, reduces = programs_of(workload)
    check_programs(project(order_of(workload), stages, edges, reduces), stages, edges, reduces)


def test_a_workload_that_contradicts_itself_is_refused() -> None:
    stage = StageWork(ranks=(0, 1), forward=(1.0,), backward=(2.0,), weights=(1.0,), kept_bytes=(1,))
    with pytest.raises(UsageError, match="stage 0 of the workload has 2 ranks, but 1 entries in 'forward'"):
        simulate(Workload(world_size=2, micro_batches=1, stages=(stage,)))


def test_a_step_that_would_not_end_is_refused_before_it_begins() -> None:
    with pytest.raises(UsageError, match="at most 1,000,000 micro-batches"):
        simulate(chain_workload(2, 2**40))


def parts(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | seconds


def test_a_stage_that_only_communicates_computes_for_no_less_than_no_time() -> None:
    """Rounding leaves of a task, without its communication, 1e-16 seconds less than nothing."""
    work = stage_work((0,), forward=(0.3,), backward=(0.6,), communication=(0.3 + 0.6,))
    breakdown = simulate(Workload(world_size=1, micro_batches=1, stages=(work,))).breakdown
    assert breakdown == parts(communication=0.3 + 0.6)


def link(source: int, target: int, resources: tuple[str, ...] = (), bandwidth: float = 1.0) -> LinkTime:
    return LinkTime(source=source, target=target, latency=0.0, bandwidth=bandwidth, resources=resources)


def test_unlike_stages_make_the_quicker_one_wait() -> None:
    timeline = simulate(chain_workload(2, 3, times=[(1.0, 2.0), (2.0, 4.0)]))
    assert drawing_of(timeline) == parse_drawing("""
        rank 0  |F0F1ppppppppppB0--F2ppppppB1--ppppppppB2--|
        rank 1  |ppF0--B0------F1--B1------F2--B2------pppp|
    """)
    assert timeline.breakdown == parts(compute=9, pipeline=12)
    assert timeline.bubble == pytest.approx((12 + 3) / 42)
    tasks = [str(event) for event in timeline.critical_path() if event.kind != "receive"]
    assert tasks == ["0F0", "1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "0B2"]


def test_a_message_takes_latency_and_bytes_and_follows_the_one_before() -> None:
    timeline = simulate(chain_workload(2, 2, schedule="gpipe", latency=1.0, size=2))
    assert drawing_of(timeline) == parse_drawing("""
        rank 0            |F0F1ppppppppppppppttttttB0--B1--|
        0 receive from 1  |..................a0----........|
        0 receive from 1  |......................a1----....|
        1 receive from 0  |..a0----........................|
        1 receive from 0  |......a1----....................|
        rank 1            |ppttttttF0ttF1B0--B1--ttttpppppp|
    """)
    assert timeline.breakdown == parts(compute=6, pipeline=7, transfer=3)


def test_two_senders_share_a_link_and_all_of_it_is_for_the_one_that_is_left() -> None:
    forward = boundary(0, 1, [(0, 2), (1, 2)], 2)
    nothing_back = tuple(transfer.model_copy(update={"bytes": 0}) for transfer in forward.backward)
    workload = Workload(
        world_size=3,
        micro_batches=1,
        stages=(stage_work((0, 1), forward=(1.0, 2.0)), stage_work((2,))),
        boundaries=(forward.model_copy(update={"backward": nothing_back}),),
        links=(link(0, 2, ("adapter",)), link(1, 2, ("adapter",)), link(2, 0), link(2, 1)),
    )
    assert drawing_of(simulate(workload)) == parse_drawing("""
        rank 0            |F0ppppppppppppppB0--|
        rank 1            |F0--ppppppppppppB0--|
        2 receive from 0  |..a0----............|
        2 receive from 1  |....a0----..........|
        rank 2            |ppppttttttF0B0--pppp|
    """)


def test_two_ranks_feed_three_and_each_waits_for_its_own_parts_only() -> None:
    pairs = {(0, 2): 2, (0, 3): 1, (1, 3): 1, (1, 4): 2}
    crossing = Boundary(
        source_stage=0,
        target_stage=1,
        forward=tuple(Transfer(source=a, target=b, bytes=size) for (a, b), size in pairs.items()),
        backward=tuple(Transfer(source=b, target=a, bytes=size) for (a, b), size in pairs.items()),
    )
    workload = Workload(
        world_size=5,
        micro_batches=1,
        stages=(stage_work((0, 1), forward=(1.0, 2.0)), stage_work((2, 3, 4))),
        boundaries=(crossing,),
        links=tuple(link(*ends) for a, b in pairs for ends in ((a, b), (b, a))),
    )
    assert drawing_of(simulate(workload)) == parse_drawing("""
        rank 0            |F0ppppppppppttttB0--pp|
        rank 1            |F0--ppppppppppttttB0--|
        2 receive from 0  |..a0--................|
        3 receive from 0  |..a0..................|
        3 receive from 1  |....a0................|
        4 receive from 1  |....a0--..............|
        rank 2            |ppttttF0B0--ttttpppppp|
        rank 3            |ppppttF0B0--ttpppppppp|
        rank 4            |ppppttttF0B0--ttttpppp|
        0 receive from 2  |............a0--......|
        0 receive from 3  |............a0........|
        1 receive from 3  |............a0........|
        1 receive from 4  |..............a0--....|
    """)


def test_buckets_are_reduced_beside_the_last_backward_and_slow_it_down() -> None:
    both = {"ranks": (0, 1), "stages": (0,), "bytes": 1, "seconds": 2.0}
    workload = Workload(
        world_size=2,
        micro_batches=2,
        stages=(stage_work((0, 1), backward=(2.0, 4.0)),),
        reductions=(Reduction.model_validate(both | {"ready": 0.5}), Reduction.model_validate(both)),
        update=(1.0, 1.0),
        overhead=1.0,
        overlap_slowdown=1.0,
    )
    timeline = simulate(workload)
    assert drawing_of(timeline) == parse_drawing("""
        rank 0    |F0B0--F1B1--ssssrrrrssrrrrUUOU|
        0 reduce  |................r0--..r1--....|
        1 reduce  |................r0--..r1--....|
        rank 1    |F0B0------F1B1--------rrrrUUOU|
    """)
    assert timeline.breakdowns[0] == parts(compute=6, stall=3, reduction=4, update=1, overhead=1)
    assert timeline.breakdowns[1] == parts(compute=10, reduction=3, update=1, overhead=1)
    assert [str(event) for event in timeline.critical_path()][-4:] == ["0B1", "reduce bucket 1", "update", "overhead"]


def test_a_bucket_may_slow_each_rank_down_in_its_own_measure() -> None:
    workload = Workload(
        world_size=2,
        micro_batches=1,
        stages=(stage_work((0, 1), backward=(4.0, 4.0)),),
        reductions=(Reduction(ranks=(0, 1), stages=(0,), bytes=1, seconds=2.0, ready=0.5, slowdown=(0.0, 1.0)),),
        overlap_slowdown=9.0,
    )
    assert drawing_of(simulate(workload)) == parse_drawing("""
        rank 0    |F0B0------pp|
        0 reduce  |......r0--..|
        1 reduce  |......r0--..|
        rank 1    |F0B0--------|
    """)


def test_a_bucket_may_take_longer_while_its_ranks_compute() -> None:
    one = Reduction(ranks=(0, 1), stages=(0,), bytes=1, seconds=2.0, ready=0.5, slowdown=(0.0, 0.0), stretch=1.0)
    workload = Workload(
        world_size=2, micro_batches=1, stages=(stage_work((0, 1), backward=(4.0, 4.0)),), reductions=(one,)
    )
    assert drawing_of(simulate(workload)) == parse_drawing("""
        rank 0    |F0B0------rr|
        0 reduce  |......r0----|
        1 reduce  |......r0----|
        rank 1    |F0B0------rr|
    """)


def test_a_bucket_of_two_stages_waits_for_the_later_one() -> None:
    workload = chain_workload(2, 1)
    tied = Reduction(ranks=(0, 1), stages=(0, 1), bytes=1, seconds=1.0)
    assert drawing_of(simulate(workload.model_copy(update={"reductions": (tied,)}))) == parse_drawing("""
        rank 0    |F0ppppppB0--rr|
        0 reduce  |............r0|
        1 reduce  |............r0|
        rank 1    |ppF0B0--pppprr|
    """)


def test_ranks_that_work_together_start_together_and_end_with_the_slowest() -> None:
    workload = Workload(
        world_size=3,
        micro_batches=1,
        stages=(
            stage_work((0,)),
            stage_work((1, 2), forward=(1.0, 3.0), together=((1, 2),), communication=(0.5, 0.5)),
        ),
        boundaries=(boundary(0, 1, [(0, 1)], 2),),
        links=(link(0, 1), link(1, 0)),
    )
    timeline = simulate(workload)
    assert drawing_of(timeline) == parse_drawing("""
        rank 0            |F0ppppppppppppppttttB0--|
        0 receive from 1  |................a0--....|
        1 receive from 0  |..a0--..................|
        rank 1            |ppttttF0ssssB0--ttttpppp|
        rank 2            |ppttttF0----B0--pppppppp|
    """)
    assert timeline.breakdowns[1] == pytest.approx(
        parts(compute=2.5, communication=0.5, pipeline=3, transfer=4, stall=2)
    )


def test_stages_of_one_device_take_turns_and_exchange_nothing() -> None:
    assert drawing_of(simulate(chain_workload(1, 2, chunks=2, schedule="gpipe"))) == {
        ("rank 0", task, start, start + seconds)
        for task, start, seconds in (
            ("0F0", 0, 1), ("0F1", 1, 1), ("1F0", 2, 1), ("1F1", 3, 1), ("1B0", 4, 2), ("1B1", 6, 2), ("0B0", 8, 2),
            ("0B1", 10, 2),
        )
    }  # fmt: skip


def test_a_last_micro_batch_of_half_the_rows_takes_half_the_time() -> None:
    workload = chain_workload(2, 2, times=[(2.0, 4.0)] * 2).model_copy(update={"last_share": 0.5})
    assert drawing_of(simulate(workload)) == parse_drawing("""
        rank 0  |F0--F1ppppppppppB0------B1--|
        rank 1  |ppppF0--B0------F1B1--pppppp|
    """)


def test_activations_are_kept_from_forward_to_backward_and_tasks_need_more_meanwhile() -> None:
    stage = stage_work((0,), forward_peak_bytes=(130,), backward_peak_bytes=(50,))
    timeline = simulate(Workload(world_size=1, micro_batches=2, schedule="gpipe", stages=(stage,)))
    changes = [(0, 0), (0, 130), (1, 100), (1, 230), (2, 200), (2, 250), (4, 100), (4, 150), (6, 0)]
    assert list(timeline.memory[0]) == changes
    assert timeline.peak_bytes(0) == 250
    assert timeline.in_flight == {0: 2}


def test_where_transfers_block_a_rank_sends_before_it_goes_on() -> None:
    workload = chain_workload(2, 2, size=1).model_copy(update={"blocking_transfers": True})
    assert drawing_of(simulate(workload)) == parse_drawing("""
        rank 0            |F0ttF1ppppttB0--ppttB1--|
        1 receive from 0  |..a0..a1................|
        0 receive from 1  |..........a0......a1....|
        rank 1            |ppttF0B0--ttF1B1--ttpppp|
    """)


@pytest.mark.parametrize(("runs_ahead", "start"), [(True, 5), (False, 7)])
def test_on_a_cpu_a_message_moves_when_its_receiver_gets_to_post_it(runs_ahead: bool, start: int) -> None:
    workload = chain_workload(2, 3, times=[(1.0, 1.0), (4.0, 4.0)], size=2).model_copy(
        update={"runs_ahead": runs_ahead}
    )
    order = one_f_one_b(3, [frozenset({0}), frozenset({1})], extra=[1, 0])
    (third,) = (event for event in simulate(workload, order=order).events if str(event) == "receive 0m2 from 0")
    assert third.start == start


def test_given_programs_are_priced_by_the_bytes_of_their_boxes() -> None:
    stages, edges, reduces = chain_of([[{0: 3, 1: 1}] * 2, [{2: 4}] * 2])
    programs = project(schedule_order("gpipe", 2, 2), stages, edges, reduces)
    workload = Workload(
        world_size=3,
        micro_batches=2,
        stages=(stage_work((0, 1)), stage_work((2,))),
        reductions=tuple(
            Reduction(ranks=reduce.ranks, stages=reduce.stages, bytes=1, seconds=0.0) for reduce in reduces
        ),
        links=tuple(link(a, b, bandwidth=32.0) for a, b in ((0, 2), (1, 2), (2, 0), (2, 1))),
    )
    timeline = run_programs(programs, edges, workload, lambda rank, send: 8 * box_size(send.box))
    received = {event.peer: event.seconds for event in timeline.events if event[:2] == ("receive", 2)}
    assert received == {0: 3 * 4 * 8 / 32, 1: 1 * 4 * 8 / 32}


def test_what_has_no_price_is_named() -> None:
    workload = chain_workload(2, 1)
    with pytest.raises(UsageError, match="rank 0 sends to rank 1, but the workload has no link"):
        simulate(workload.model_copy(update={"links": ()}))
    stages, edges, _ = programs_of(workload)
    programs = project(order_of(workload), stages, edges, [ReduceSpec(index=0, ranks=(0, 1), stages=(0, 1))])
    with pytest.raises(UsageError, match="bucket 0, but the workload has 0 reductions"):
        run_programs(programs, edges, workload, lambda rank, send: 1 * box_size(send.box))


def test_programs_that_wait_for_each_other_are_an_error_and_not_a_short_timeline() -> None:
    workload = chain_workload(2, 1)
    stages, edges, _ = programs_of(workload)
    programs = project(order_of(workload), stages, edges)
    late = tuple(i for i in programs[0] if not isinstance(i, Send)) + tuple(
        i for i in programs[0] if isinstance(i, Send)
    )
    with pytest.raises(ScheduleError, match="rank 0 before 0B0; rank 1 before 1F0"):
        run_programs({0: late, 1: programs[1]}, edges, workload, lambda rank, send: 1 * box_size(send.box))


def test_a_step_of_2520_devices_is_simulated_through_a_rank_of_each_kind() -> None:
    timeline = simulate(chain_workload(35, 70, chunks=3, schedule="interleaved"))
    assert timeline.step_seconds == (70 * 3 + 34) * 3


def test_ranks_that_are_alike_are_simulated_once_and_share_their_nodes_adapter_with_those_left_out() -> None:
    """Four replicas of two stages, two to a node with one adapter: each message has half of it."""
    pairs = [(rank, rank + 4) for rank in range(4)]
    crossing = boundary(0, 1, pairs, 2)
    links = tuple(link(*ends, (f"node {ends[0] // 2} out",)) for pair in pairs for ends in (pair, pair[::-1]))
    workload = Workload(
        world_size=8,
        micro_batches=3,
        stages=(stage_work((0, 1, 2, 3)), stage_work((4, 5, 6, 7))),
        boundaries=(crossing,),
        links=links,
        reductions=(Reduction(ranks=(0, 1, 2, 3), stages=(0,), bytes=1, seconds=1.0),),
    )
    whole, alike = simulate(workload), simulate_alike(workload)
    assert dict(alike.members) == {0: (0, 1, 2, 3), 4: (4, 5, 6, 7)}
    assert alike.step_seconds == whole.step_seconds and alike.bubble == pytest.approx(whole.bubble)
    assert alike.breakdowns == {0: whole.breakdowns[3], 4: whole.breakdowns[7]}


def test_ranks_are_told_apart_by_what_lies_far_from_them() -> None:
    """The first stage's ranks differ only in who is slow two stages later."""
    stages = (stage_work((0, 1)), stage_work((2, 3)), stage_work((4, 5), forward=(1.0, 3.0)))
    hops = [[(0, 2), (1, 3)], [(2, 4), (3, 5)]]
    workload = Workload(
        world_size=6,
        micro_batches=2,
        stages=stages,
        boundaries=tuple(boundary(index, index + 1, hop, 2) for index, hop in enumerate(hops)),
        links=tuple(link(*ends) for hop in hops for pair in hop for ends in (pair, pair[::-1])),
    )
    whole, alike = simulate(workload), simulate_alike(workload)
    assert alike.ranks == whole.ranks and alike.breakdowns == whole.breakdowns


def own_part(own: float, size: int, share: float = 1.0) -> Workload:
    """Two ranks, of which the second one computes for so long before it needs a message of as many seconds."""
    stages = (stage_work((0,)), stage_work((1,), forward=(3.0,), own=(own,)))
    links = (link(0, 1), link(1, 0))
    boundaries = (boundary(0, 1, [(0, 1)], size),)
    return Workload(world_size=2, micro_batches=1, last_share=share, stages=stages, boundaries=boundaries, links=links)


def test_a_stage_computes_its_own_part_while_a_message_is_on_its_way() -> None:
    first = simulate(own_part(0.0, 2)).step_seconds
    assert first == 1 + 2 + 3 + 2 + 2 + 2
    assert simulate(own_part(2.0, 2)).step_seconds == first - 2
    whole = simulate(own_part(3.0, 1))
    assert whole.step_seconds == first - 2 - 2  # there is nothing else to compute when the message is there
    assert whole.breakdowns[1]["compute"] == 3 + 2
    assert sum(whole.breakdowns[1].values()) == whole.step_seconds
    assert simulate_alike(own_part(2.0, 2)).step_seconds == first - 2
