"""Projection and the static check: what a good program looks like, and that each kind of fault is found and named."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import Shares, chain_of, rows_edge
from tests.work import counted_calls
from whale.errors import ScheduleError
from whale.ir.check import CollectiveCall, check_collectives, check_edges, check_programs
from whale.ir.program import (
    Compute,
    Copy,
    Free,
    Program,
    Receive,
    Reduce,
    ReduceSpec,
    Send,
    StageSpec,
    SumLoss,
    Transfer,
    forward_only,
    project,
    project_rank,
)
from whale.ir.schedule import Order, Task, peak_in_flight
from whale.planner.schedules.orders import schedule_order

TWO_TO_ONE: list[list[Shares]] = [[{0: 3, 1: 1}] * 2, [{2: 4}] * 2]


def programs_of(shares: list[list[Shares]], name: str = "1f1b") -> tuple[dict[int, Program], Order]:
    stages, edges, reduces = chain_of(shares)
    order = schedule_order(name, len(stages), len(shares[0]), [frozenset(stage.ranks) for stage in stages])
    return project(order, stages, edges, reduces), order


def test_two_ranks_feed_one_in_this_program() -> None:
    programs, _ = programs_of(TWO_TO_ONE)
    assert [str(one) for one in programs[2]] == [
        "receive edge 0 forward m0 from 0 [0:3, 0:4]",
        "receive edge 0 forward m0 from 1 [3:4, 0:4]",
        "receive edge 0 forward m1 from 0 [0:3, 0:4]",
        "receive edge 0 forward m1 from 1 [3:4, 0:4]",
        "1F0",
        "1B0",
        "send edge 0 backward m0 to 0 [0:3, 0:4]",
        "send edge 0 backward m0 to 1 [3:4, 0:4]",
        "free stage 1 m0",
        "1F1",
        "1B1",
        "send edge 0 backward m1 to 0 [0:3, 0:4]",
        "send edge 0 backward m1 to 1 [3:4, 0:4]",
        "free stage 1 m1",
        "reduce bucket 0",
        "sum the loss",
    ]


def test_the_program_of_one_rank_is_its_part_of_all_programs() -> None:
    stages, edges, reduces = chain_of([[{0: 1, 1: 2}] * 4, [{1: 3}] * 4, [{0: 1, 2: 1, 3: 1}] * 4])
    order = schedule_order("zero_bubble", 3, 4, [frozenset(stage.ranks) for stage in stages])
    for rank, program in project(order, stages, edges, reduces).items():
        assert project_rank(order, stages, edges, reduces, rank) == program


def test_empty_boxes_are_not_sent_and_a_shared_rank_copies() -> None:
    programs, _ = programs_of([[{0: 2}, {0: 2}], [{0: 1, 1: 1}, {0: 2, 1: 0}]])
    kinds = [type(instruction) for instruction in programs[0]]
    assert kinds.count(Copy) == 4
    assert kinds.count(Send) == 1
    assert Compute("F", 1, 1) in programs[1]


def test_an_evaluation_runs_forwards_only_and_frees_at_once() -> None:
    programs, order = programs_of(TWO_TO_ONE)
    stages, edges, _ = chain_of(TWO_TO_ONE)
    evaluation = {rank: forward_only(program) for rank, program in programs.items()}
    check_programs(evaluation, stages, [replace(edge, backward=((), ())) for edge in edges], in_flight={0: 2, 1: 2})
    assert [str(one) for one in evaluation[1]] == [
        "0F0",
        "send edge 0 forward m0 to 2 [0:1, 0:4]",
        "free stage 0 m0",
        "0F1",
        "send edge 0 forward m1 to 2 [0:1, 0:4]",
        "free stage 0 m1",
        "sum the loss",
    ]
    directly = project(tuple(task for task in order if task.kind == "F"), stages, edges)
    assert {rank: sorted(map(str, program)) for rank, program in directly.items()} == {
        rank: sorted(map(str, program)) for rank, program in evaluation.items()
    }


def test_a_bucket_of_two_stages_is_reduced_after_both() -> None:
    stages, edges, _ = chain_of(TWO_TO_ONE)
    reduces = [ReduceSpec(index=0, ranks=(2,), stages=(1,)), ReduceSpec(index=1, ranks=(0, 1, 2), stages=(0, 1))]
    programs = project(schedule_order("gpipe", 2, 2), stages, edges, reduces)
    assert [i for i in programs[2] if isinstance(i, Reduce)] == [Reduce(0, early=True), Reduce(1)]
    assert programs[0][-2:] == (Reduce(1), SumLoss())
    check_programs(programs, stages, edges, reduces)


shares_of_ranks = st.dictionaries(st.integers(0, 3), st.just(1), min_size=1, max_size=4)


@st.composite
def pipelines(draw: st.DrawFn) -> list[list[Shares]]:
    """Stages on any ranks, overlapping or not, with ragged and empty shares of the same rows."""
    rank_sets = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), min_size=1, max_size=4))
    rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    shares = []
    for ranks in rank_sets:
        by_micro_batch = []
        for total in rows:
            cuts = sorted(draw(st.lists(st.integers(0, total), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
            parts = [stop - start for start, stop in pairwise([0, *cuts, total])]
            by_micro_batch.append(dict(zip(ranks, parts, strict=True)))
        shares.append(by_micro_batch)
    return shares


@given(pipelines(), st.sampled_from(["gpipe", "1f1b", "zero_bubble", "greedy"]))
def test_what_is_projected_always_passes_the_check(shares: list[list[Shares]], name: str) -> None:
    stages, edges, reduces = chain_of(shares)
    programs, order = programs_of(shares, name)
    check_programs(programs, stages, edges, reduces, peak_in_flight(order))
    evaluation = {rank: forward_only(program) for rank, program in programs.items()}
    check_programs(evaluation, stages, [replace(e, backward=((),) * len(e.backward)) for e in edges])


def test_a_rank_alone_sums_the_loss_too() -> None:
    stages, edges, _ = chain_of([[{0: 1}], [{0: 1}]])
    programs = project(schedule_order("1f1b", 2, 1, [frozenset({0})] * 2), stages, edges, [])
    check_programs(programs, stages, edges)
    with pytest.raises(ScheduleError, match="rank 0 does not sum the loss exactly once"):
        check_programs({0: programs[0][:-1]}, stages, edges)


@settings(max_examples=200)
@given(pipelines().filter(lambda shares: len(shares) > 1), st.data())
def test_a_dropped_instruction_is_always_found(shares: list[list[Shares]], data: st.DataObject) -> None:
    stages, edges, reduces = chain_of(shares)
    reduces = [reduce for reduce in reduces if len(reduce.ranks) > 1]
    order = schedule_order("1f1b", len(stages), len(shares[0]), [frozenset(stage.ranks) for stage in stages])
    programs = project(order, stages, edges, reduces)
    rank = data.draw(st.sampled_from(sorted(programs)))
    at = data.draw(st.integers(0, len(programs[rank]) - 1))
    broken = programs | {rank: programs[rank][:at] + programs[rank][at + 1 :]}
    with pytest.raises(ScheduleError):
        check_programs(broken, stages, edges, reduces, order=order)


def swap(program: Program, first: int, second: int) -> Program:
    items = list(program)
    items[first], items[second] = items[second], items[first]
    return tuple(items)


def without(program: Program, at: int) -> Program:
    return program[:at] + program[at + 1 :]


def test_each_fault_is_named() -> None:
    stages, edges, reduces = chain_of(TWO_TO_ONE)
    programs, _ = programs_of(TWO_TO_ONE)

    def finds(part: str, **changed: Program) -> None:
        broken = programs | {int(name[4:]): program for name, program in changed.items()}
        with pytest.raises(ScheduleError, match=part):
            check_programs(broken, stages, edges, reduces, {0: 2, 1: 1})

    own, last = programs[0], programs[2]
    sends = [at for at, instruction in enumerate(own) if isinstance(instruction, Send)]
    receive = next(at for at, instruction in enumerate(last) if isinstance(instruction, Receive))
    at = {str(instruction): position for position, instruction in enumerate(last)}
    pair = "ranks 0 and 2 disagree on exchange"

    finds(pair + " 0 .*'h0'.*rank 0 has send edge 0 forward m1", rank0=without(own, sends[0]))
    finds(pair + " 1 .*rank 0 has nothing", rank0=without(own, sends[1]))
    finds(pair + " 0 ", rank0=swap(own, *sends))
    finds(pair + " 0 ", rank2=(*last[:receive], Receive(0, "forward", 0, 0, ((0, 2), (0, 4))), *last[receive + 1 :]))
    finds("rank 0, send .*value is not there", rank0=swap(own, own.index(Compute("F", 0, 0)), sends[0]))
    finds("rank 2, 1F0: 0 of 2 parts of edge 0", rank2=(Compute("F", 1, 0), *without(last, at["1F0"])))
    finds("rank 2, 1B0: before its F", rank2=swap(last, at["1B0"], at["1F0"]))
    finds("rank 0, 0F0: done twice", rank0=(own[0], *own))
    finds("rank 3, 1F1: the rank is not of this stage", rank3=(Compute("F", 1, 1),))
    finds("rank 2, free stage 1 m0: nothing to free", rank2=(Free(1, 0), *last))
    finds("rank 2, .*never freed", rank2=without(last, at["free stage 1 m0"]))
    finds("rank 2, .*or no longer", rank2=swap(last, at["free stage 1 m0"], at["1B0"] + 1))
    finds("rank 0, reduce bucket 0: the rank is not in this bucket", rank0=(*own, Reduce(0)))
    finds("rank 2, 1B0: after a bucket of its gradients is reduced", rank2=(Reduce(0), *last[:-1]))
    finds("cannot end: rank 1 waits in 'sum the loss', for rank 0, which never comes", rank0=own[:-1])
    finds("cannot end: rank 1 waits in 'reduce bucket 1', for rank 0, which never comes", rank0=own[:-2])


TIED: list[list[Shares]] = [[{0: 2}] * 4, [{1: 1, 2: 1}] * 4, [{3: 2}] * 4]


def moved(program: Program, what: type, before: type, *, first: bool = False) -> Program:
    """The program with its first instruction of a kind before the last (or first) of another."""
    at = next(i for i, instruction in enumerate(program) if isinstance(instruction, what))
    rest = without(program, at)
    places = [i for i, instruction in enumerate(rest) if isinstance(instruction, before)]
    place = places[0] if first else places[-1]
    return (*rest[:place], program[at], *rest[place:])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble", "greedy"])
def test_orders_that_deadlock_on_a_device_with_one_queue_are_found(name: str) -> None:
    """Ranks that start things in another order than the program's, all of them or one, wait for each other on NCCL."""
    stages, edges, _ = chain_of(TIED)
    reduces = [
        ReduceSpec(index=0, ranks=(1, 2), stages=(1,)),
        ReduceSpec(index=1, ranks=(0, 3), stages=(0, 2)),
        ReduceSpec(index=2, ranks=(1, 2), stages=(1,)),
    ]
    programs = project(schedule_order(name, 3, 4), stages, edges, reduces)
    check_programs(programs, stages, edges, reduces)

    def finds(part: str, changed: dict[int, Program]) -> None:
        with pytest.raises(ScheduleError, match=part):
            check_programs(programs | changed, stages, edges, reduces)

    loss_early = {rank: moved(program, SumLoss, Send) for rank, program in programs.items()}
    finds("cannot end: .*'sum the loss'", loss_early)
    for rank in (1, 3):
        finds("cannot end: .*'sum the loss'", {rank: loss_early[rank]})
    finds("rank 0, 0[BW][23]: after a bucket of its gradients is reduced", {0: moved(programs[0], Reduce, Receive)})
    finds("(cannot end: .*'reduce|after a) bucket", {3: moved(programs[3], Reduce, Send)})
    buckets = [at for at, instruction in enumerate(programs[1]) if isinstance(instruction, Reduce)]
    finds("cannot end: .*'reduce bucket 0'", {1: swap(programs[1], *buckets)})
    shared = programs[0].index(Reduce(1))
    early = (*programs[0][:shared], Reduce(1, early=True), *programs[0][shared + 1 :])
    finds("rank 0, reduce bucket 1: it may start early, but 2 stages", {0: early})
    sends = [at for at, instruction in enumerate(programs[0]) if isinstance(instruction, Send)]
    finds("ranks 0 and 1 disagree on exchange 0", {0: swap(programs[0], sends[0], sends[2])})


def test_ranks_of_a_stage_that_do_its_tasks_in_another_order_are_named() -> None:
    stage = [StageSpec(index=0, ranks=(0, 1))]
    tasks: Program = (Compute("F", 0, 0), Compute("F", 0, 1), Free(0, 0), Free(0, 1))
    with pytest.raises(ScheduleError, match="rank 1 and rank 0 differ on stage 0: '0F1 0F0' against '0F0 0F1'"):
        check_programs({0: tasks, 1: swap(tasks, 0, 1)}, stage, [])
    with pytest.raises(ScheduleError, match="rank 0 and the order differ on stage 0"):
        check_programs({0: tasks, 1: tasks}, stage, [], order=(Task("F", 0, 1), Task("F", 0, 0)))


def test_more_micro_batches_than_the_limit_are_found() -> None:
    stages, edges, reduces = chain_of(TWO_TO_ONE)
    programs, _ = programs_of(TWO_TO_ONE, "gpipe")
    with pytest.raises(ScheduleError, match="rank 2, 1F1: more than 1 micro-batches in flight"):
        check_programs(programs, stages, edges, reduces, {1: 1})


def test_ranks_that_wait_in_a_circle_are_named_with_what_they_wait_for() -> None:
    stages = [StageSpec(index=0, ranks=(0, 1)), StageSpec(index=1, ranks=(0, 1))]
    shares: list[list[Shares]] = [[{0: 1, 1: 1}], [{0: 1, 1: 1}]]
    edge = rows_edge(0, 0, 1, shares)
    crossed = replace(
        edge,
        forward=(tuple(Transfer(a, 1 - a, ((0, 1), (0, 4)), ((0, 1), (0, 4))) for a in (0, 1)),),
        backward=((),),
        needs_grad=False,
    )
    program = project((Task("F", 0, 0), Task("F", 1, 0)), stages, [crossed])
    check_programs(program, stages, [crossed])
    both_first_receive = {
        rank: (own[0], *sorted(own[1:], key=lambda i: not isinstance(i, Receive))) for rank, own in program.items()
    }
    check_programs({0: program[0], 1: both_first_receive[1]}, stages, [crossed])
    with pytest.raises(
        ScheduleError, match=r"rank 0 waits in 'receive .* for rank 1 waits in 'receive .* for rank 0 again"
    ):
        check_programs({r: own[:1] + own[1:] for r, own in both_first_receive.items()}, stages, [crossed])


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (
            {"forward": ((Transfer(0, 2, ((0, 3), (0, 4)), ((0, 3), (0, 4))),),) * 2},
            "rank 2 receives, .* does not fill",
        ),
        ({"forward": ((Transfer(0, 2, ((0, 3), (0, 4)), ((0, 2), (0, 4))),),) * 2}, "boxes of different shape"),
        ({"forward": ((Transfer(0, 2, ((1, 4), (0, 4)), ((0, 3), (0, 4))),),) * 2}, "leaves the .* of rank 0"),
        ({"forward": ((Transfer(5, 2, ((0, 3), (0, 4)), ((0, 3), (0, 4))),),) * 2}, "rank that has no part"),
        ({"needs_grad": False}, "gradients travel"),
        ({"index": 3}, "has index 3 at position 0"),
        ({"backward": ()}, "same number of micro-batches"),
    ],
)
def test_edges_that_do_not_carry_their_value_are_found(change: dict[str, object], part: str) -> None:
    _, edges, _ = chain_of(TWO_TO_ONE)
    with pytest.raises(ScheduleError, match=part):
        check_edges([replace(edges[0], **change)])  # type: ignore[arg-type]


def call(node: str, *ranks: int, op: str = "all_reduce", shape: tuple[int, ...] = (4,)) -> CollectiveCall:
    return CollectiveCall(node, op, ranks, "float32", (shape,))


def test_matching_collectives_pass_and_groups_may_overlap() -> None:
    check_collectives({})
    a, b, c = call("a", 0, 1), call("b", 1, 2), call("c", 0, 1, 2)
    check_collectives({0: [a, c], 1: [a, b, c], 2: [b, c]})


@pytest.mark.parametrize("other", [call("x", 0, 1), call("a", 0, 1, op="all_gather"), call("a", 0, 1, shape=(5,))])
def test_a_collective_that_differs_names_the_ranks_and_the_nodes(other: CollectiveCall) -> None:
    first = call("first", 0, 1)
    expected = f"ranks 0 and 1 disagree on call 1 .* of a over .*{other.op} of {other.node} over"
    with pytest.raises(ScheduleError, match=expected):
        check_collectives({0: [first, call("a", 0, 1)], 1: [first, other]})


def test_a_rank_that_makes_no_call_at_all_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"ranks 0 and 2 disagree on call 0 .*rank 2 makes none"):
        check_collectives({0: [call("a", 0, 1, 2)], 1: [call("a", 0, 1, 2)]})


def test_groups_that_wait_for_each_other_are_named_as_a_circle() -> None:
    a, b, c = call("a", 0, 1), call("b", 1, 2), call("c", 0, 2)
    expected = r"rank 0 waits in 'all_reduce of a .*rank 1 waits in .* of b .*rank 2 waits in .* of c"
    with pytest.raises(ScheduleError, match=expected):
        check_collectives({0: [a, c], 1: [b, a], 2: [c, b]})


def test_a_rank_outside_of_its_own_group_is_found() -> None:
    with pytest.raises(ScheduleError, match=r"rank 2 makes .* not a group that it is in"):
        check_collectives({2: [call("a", 0, 1)]})


def test_a_thousand_ranks_are_checked_with_little_work() -> None:
    """8 stages of 128 ranks with uneven shares and 16 micro-batches, and 200 collectives on each rank."""
    num_stages, width, micro_batches = 8, 128, 16
    shares = [
        [{stage * width + i: 3 - (i + stage) % 2 * 2 for i in range(width)}] * micro_batches
        for stage in range(num_stages)
    ]
    stages, edges, reduces = chain_of(shares)
    order = schedule_order("1f1b", num_stages, micro_batches)
    groups = [tuple(range(first, first + 8)) for first in range(0, num_stages * width, 8)]

    def check() -> None:
        check_programs(project(order, stages, edges, reduces), stages, edges, reduces, peak_in_flight(order))
        check_collectives({rank: [call(f"n{i}", *group) for i in range(200)] for group in groups for rank in group})

    assert counted_calls(check)[1] < 16_000_000
