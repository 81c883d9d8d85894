"""Orders: golden pictures, known times and memory of the classical schedules, and laws that hold for all of them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workloads import chain_workload
from whale.errors import InfeasibleError, ScheduleError, UsageError
from whale.ir.schedule import Kind, Order, Task, check_order, peak_in_flight
from whale.planner.schedules.orders import SCHEDULES, extra_warm_ups, greedy, list_schedule, schedule_order
from whale.planner.schedules.zero_bubble import searched
from whale.planner.simulation.simulate import simulate

Devices = list[frozenset[int]]


def own(num_stages: int) -> Devices:
    return [frozenset({stage}) for stage in range(num_stages)]


def dealt(num_sets: int, chunks: int) -> Devices:
    return [frozenset({stage % num_sets}) for stage in range(num_sets * chunks)]


def forward_1_backward_2(task: Task) -> float:
    return 2 if task.kind == "B" else 1


def makespan(order: Order, num_ranks: int, chunks: int = 1) -> float:
    """How long a step takes with forwards of 1 and backwards of 2 seconds, and no communication."""
    micro_batches = 1 + max(task.micro_batch for task in order)
    return simulate(chain_workload(num_ranks, micro_batches, chunks=chunks), order=order).step_seconds


def order_of(text: str) -> Order:
    """The order of tasks that are written like ``2F0``."""
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    found = (re.fullmatch(r"(\d+)([FBIW])(\d+)", word) for word in text.split())
    return tuple(Task(kinds[one[2]], int(one[1]), int(one[3])) for one in found if one)


GOLDEN = {
    "gpipe": """
        0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
        1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
        2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3""",
    "1f1b": """
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3""",
    "zero_bubble": """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3""",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_schedule_of_three_stages_and_four_micro_batches_is_this_picture(name: str) -> None:
    order = sorted(schedule_order(name, 3, 4), key=lambda task: task.stage)
    assert list(map(str, order)) == GOLDEN[name].split()


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
def test_gpipe_keeps_all_micro_batches_and_1f1b_stage_s_keeps_p_minus_s(num_stages: int, micro_batches: int) -> None:
    stages = range(num_stages)
    assert peak_in_flight(schedule_order("gpipe", num_stages, micro_batches)) == dict.fromkeys(stages, micro_batches)
    expected = {stage: min(micro_batches, num_stages - stage) for stage in stages}
    for name in ("1f1b", "greedy"):
        assert peak_in_flight(schedule_order(name, num_stages, micro_batches)) == expected


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "greedy"])
def test_without_communication_the_unsplit_schedules_take_m_plus_p_minus_1(
    name: str, num_stages: int, micro_batches: int
) -> None:
    order = schedule_order(name, num_stages, micro_batches)
    assert makespan(order, num_stages) == (micro_batches + num_stages - 1) * 3


@pytest.mark.parametrize(("num_sets", "chunks"), [(1, 3), (2, 2), (4, 2), (3, 2), (4, 4)])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_device(num_sets: int, chunks: int, rounds: int) -> None:
    devices, micro_batches = dealt(num_sets, chunks), num_sets * rounds
    order = schedule_order("interleaved", num_sets * chunks, micro_batches, devices)
    assert makespan(order, num_sets, chunks) == (micro_batches * chunks + num_sets - 1) * 3
    if num_sets > 1:
        assert makespan(order, num_sets, chunks) < (micro_batches + num_sets - 1) * 3 * chunks


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 6, 7])
def test_interleaving_any_number_of_micro_batches_is_never_longer_than_the_next_multiple(micro_batches: int) -> None:
    devices = dealt(4, 2)
    order = schedule_order("interleaved", 8, micro_batches, devices)
    check_order(order, 8, micro_batches)
    assert makespan(order, 4, 2) <= (-(-micro_batches // 4) * 4 * 2 + 3) * 3


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(1, 3), (2, 2), (2, 5), (3, 3), (4, 8), (8, 16)])
def test_zero_bubble_takes_3m_plus_p_minus_1_and_the_memory_of_the_first_1f1b_stage(
    num_stages: int, micro_batches: int
) -> None:
    order = schedule_order("zero_bubble", num_stages, micro_batches)
    assert makespan(order, num_stages) == 3 * micro_batches + num_stages - 1
    assert set(peak_in_flight(order).values()) == {num_stages}


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(1, 3), (2, 5), (4, 8), (8, 24)])
def test_in_zero_bubble_h2_no_stage_pauses_and_each_keeps_twice_the_micro_batches_less_one(
    num_stages: int, micro_batches: int
) -> None:
    order = schedule_order("zero_bubble_h2", num_stages, micro_batches)
    timeline = simulate(chain_workload(num_stages, micro_batches), order=order)
    assert timeline.span_seconds == 3 * micro_batches
    assert set(timeline.in_flight.values()) == {2 * num_stages - 1}


def test_searched_orders_keep_their_limit_and_suit_unlike_stages_better_than_hand_made_ones() -> None:
    times = [(4.0, 5.0), (5.0, 9.0), (6.0, 8.0), (3.0, 9.0)]
    timelines = {
        name: simulate(chain_workload(4, 16, times=times, latency=0.75, schedule=name))
        for name in ("zero_bubble", "zero_bubble_1p", "zero_bubble_h2", "zero_bubble_2p")
    }
    spans = {name: timeline.span_seconds for name, timeline in timelines.items()}
    assert spans["zero_bubble_1p"] <= spans["zero_bubble"]
    assert spans["zero_bubble_2p"] < spans["zero_bubble_h2"] < spans["zero_bubble_1p"]
    assert max(timelines["zero_bubble_1p"].in_flight.values()) == 4
    assert max(timelines["zero_bubble_2p"].in_flight.values()) == 8


def test_a_quick_stage_has_no_forward_that_the_stage_before_has_not() -> None:
    seconds = ((10.0, 5.0, 5.0), (0.1, 0.1, 0.1), (1.0, 5.0, 5.0))
    order = schedule_order("zero_bubble_2p", 3, 4, seconds=lambda task: seconds[task.stage]["FIW".index(task.kind)])
    check_order(order, 3, 4)


@given(
    st.lists(st.tuples(*[st.floats(0.1, 10.0)] * 3), min_size=1, max_size=6),
    st.integers(1, 10),
    st.sampled_from(["zero_bubble_1p", "zero_bubble_2p"]),
    st.floats(0.0, 5.0),
)
def test_searched_orders_are_orders_whatever_stages_and_hops_take(
    seconds: list[tuple[float, float, float]], micro_batches: int, name: str, p2p_seconds: float
) -> None:
    def cost(task: Task) -> float:
        return seconds[task.stage]["FIW".index(task.kind)]

    order = schedule_order(name, len(seconds), micro_batches, seconds=cost, p2p_seconds=p2p_seconds)
    check_order(order, len(seconds), micro_batches)


def test_no_order_keeps_less_than_one_micro_batch() -> None:
    with pytest.raises(InfeasibleError, match="limit is 0.5"):
        searched(2, 2, forward_1_backward_2, limit=0.5)


def test_slower_hops_need_more_warm_up_the_further_a_stage_is_from_the_end() -> None:
    assert extra_warm_ups(4, forward_1_backward_2, 0.0) == [0, 0, 0, 0]
    assert extra_warm_ups(4, forward_1_backward_2, 0.5) == [1, 1, 1, 0]
    assert extra_warm_ups(4, forward_1_backward_2, 2.0) == [4, 3, 2, 0]
    assert extra_warm_ups(4, forward_1_backward_2) == [1, 1, 1, 0]
    strict, deep = (peak_in_flight(schedule_order(name, 4, 9)) for name in ("1f1b", "1f1b_deep"))
    assert {stage: deep[stage] - strict[stage] for stage in strict} == {0: 1, 1: 1, 2: 1, 3: 0}


overlapping = st.lists(st.frozensets(st.integers(0, 3), min_size=1), min_size=1, max_size=5)


@given(st.sampled_from([name for name in SCHEDULES if name != "interleaved"]), overlapping, st.integers(1, 9))
def test_every_order_is_complete_and_topological_on_any_device_sets(
    name: str, devices: Devices, micro_batches: int
) -> None:
    check_order(schedule_order(name, len(devices), micro_batches, devices), len(devices), micro_batches)


@given(overlapping, st.integers(1, 7), st.data())
def test_greedy_ends_for_any_costs_and_any_limits(devices: Devices, micro_batches: int, data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.floats(0, 10), min_size=len(devices), max_size=len(devices)))
    limits = data.draw(st.lists(st.integers(1, 4), min_size=len(devices), max_size=len(devices)))
    order = greedy(micro_batches, devices, lambda task: costs[task.stage], limits)
    check_order(order, len(devices), micro_batches)
    assert all(peak <= limits[stage] for stage, peak in peak_in_flight(order).items())


def test_greedy_starts_tasks_in_the_order_of_time() -> None:
    order = greedy(4, own(3), lambda task: (1, 5, 2)[task.stage])
    workload = chain_workload(3, 4, times=[(1.0, 1.0), (5.0, 5.0), (2.0, 2.0)])
    starts = {str(event): event.start for event in simulate(workload, order=order).events if event.kind in "FB"}
    in_order = [starts[str(task)] for task in order]
    assert in_order == sorted(in_order)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'1F1B'.*gpipe, 1f1b, .*interleaved, zero_bubble, .*greedy"):
        schedule_order("1F1B", 2, 2)


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(0, 1), (1, 0), (2, -1)])
def test_less_than_one_stage_or_micro_batch_is_refused(num_stages: int, micro_batches: int) -> None:
    with pytest.raises(UsageError, match=f"at least 1 .*{num_stages} stages and {micro_batches} micro"):
        schedule_order("1f1b", num_stages, micro_batches)


def test_devices_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="3 stages need 3 device sets"):
        schedule_order("1f1b", 3, 2, own(2))
    with pytest.raises(UsageError, match="none empty"):
        schedule_order("1f1b", 2, 2, [frozenset({0}), frozenset()])
    with pytest.raises(UsageError, match="round-robin"):
        schedule_order("interleaved", 3, 2, dealt(2, 2)[:3])
    with pytest.raises(UsageError, match="1 or more"):
        greedy(2, own(2), forward_1_backward_2, (1, 0))


def test_lines_that_wait_for_each_other_are_an_error_and_not_a_short_order() -> None:
    lines = [[Task("B", 0, 0), Task("F", 0, 0)], [Task("F", 1, 0), Task("B", 1, 0)]]
    with pytest.raises(ScheduleError, match="0B0, 1F0"):
        list_schedule(lines, own(2), forward_1_backward_2)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0F0 1F0 0B0 1B0", "0B0 comes before 1B0"),
        ("1F0 0F0 1B0 0B0", "1F0 comes before 0F0"),
        ("0F0 1F0 1B0", "0B0 is missing"),
        ("0F0 0F0 1F0 1B0 0B0", "0F0 is in the order twice"),
        ("0F0 1F0 1I0 0B0", "1W0 is missing"),
        ("0F0 1F0 1W0 1I0 0B0", "1W0 comes before 1I0"),
        ("0F0 1F0 1B0 0B0 0F1", "outside"),
    ],
)
def test_a_broken_order_is_named_by_its_task(text: str, part: str) -> None:
    with pytest.raises(ScheduleError, match=part):
        check_order(order_of(text), 2, 1)


def test_schedules_and_programs_load_no_torch() -> None:
    code = "import sys, whale.planner.schedules.orders;sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
