"""Shares on mixed devices: the golden vectors, moves and their reasons, and errors."""

import pytest

from whale.errors import InfeasibleError, UsageError
from whale.ir.profile import Affine
from whale.planner.balance.shares import Move, Remedy, Worker, fastest_shares

GIB = 2**30
NOTHING = Affine(0, 0)


def worker(speed: float, capacity: float = float("inf"), memory: Affine = NOTHING, name: str = "card") -> Worker:
    return Worker(name=name, seconds=lambda units: units / speed, memory=memory, capacity_bytes=capacity)


def paper_four() -> list[Worker]:
    return [
        worker(speed, capacity, Affine(2, 0.18), name)
        for speed, capacity, name in [(15.7, 16, "a"), (15.7, 32, "b"), (9.3, 16, "c"), (9.3, 16, "d")]
    ]


def test_v100_and_t4_share_a_batch_of_6_as_4_and_2() -> None:
    assert fastest_shares(6, [worker(15.7), worker(8.1)]).units == (4, 2)


def test_eight_v100_and_eight_p100_share_512_as_40_and_24_each() -> None:
    assert fastest_shares(512, [worker(15.7)] * 8 + [worker(9.3)] * 8).units == (40,) * 8 + (24,) * 8


def test_a_fast_device_with_little_memory_ends_with_the_smaller_share() -> None:
    memory = Affine(2 * GIB, 0.3 * GIB)
    found = fastest_shares(96, [worker(15.7, 16 * GIB, memory, "V100:0"), worker(9.3, 32 * GIB, memory, "P100:1")])
    assert found.by_speed == (60, 36)
    assert found.units == (46, 50)
    assert found.moves == (Move(giver=0, taker=1, units=14, reason="the 16.0 GiB of V100:0 hold 46 rows"),)


def test_a_peak_is_relieved_by_several_when_none_can_take_all() -> None:
    memory = Affine(0, 1)
    devices = [worker(8, 3, memory), worker(1, 4, memory), worker(1, 3, memory)]
    found = fastest_shares(10, devices)
    assert found.units == (3, 4, 3)
    assert sum(move.units for move in found.moves if move.giver == 0) == found.by_speed[0] - 3


@pytest.mark.parametrize("speed_ratio", [1, 1.5, 2, 4])
def test_half_fast_half_slow_gains_half_of_the_ratio_plus_one(speed_ratio: float) -> None:
    devices = [worker(speed_ratio)] * 4 + [worker(1)] * 4
    even = 1000
    assert even / fastest_shares(8 * even, devices).seconds == pytest.approx((speed_ratio + 1) / 2, rel=2e-3)


@pytest.mark.parametrize("total", [7, 64, 5000])
def test_what_takes_no_time_is_shared_evenly(total: int) -> None:
    """Devices that wait for launches are as fast with all columns of a table as with one."""
    waiting = Worker(name="card", seconds=lambda units: max(1.0, units * 1e-4))
    half = total // 2
    assert sorted(fastest_shares(total, [waiting] * 2, minimum=1).units) == [half, total - half]
    slow = Worker(name="slow", seconds=lambda units: max(1.0, units * 0.5))
    assert fastest_shares(total, [slow, waiting]).units == (2, total - 2)


@pytest.mark.parametrize("speeds", [(15.7, 9.3), (15.7, 15.7, 9.3, 9.3), (1.0, 2.5, 4.0) * 5])
def test_a_large_batch_is_divided_with_few_times_asked_for(speeds: tuple[float, ...]) -> None:
    asked = []

    def of(speed: float) -> Worker:
        def seconds(units: int) -> float:
            asked.append(units)
            return units / speed

        return Worker(name="card", seconds=seconds)

    total = 10_000_000
    found = fastest_shares(total, [of(speed) for speed in speeds])
    assert sum(found.units) == total
    for units, speed in zip(found.units, speeds, strict=True):
        assert units == pytest.approx(total * speed / sum(speeds), abs=1)
    assert len(asked) <= 300 * len(speeds)


def test_a_device_that_starts_slowly_gets_less_of_a_small_batch_only() -> None:
    """A measured curve decides, not a ratio: the second card is twice as fast once it is busy."""
    devices = [
        Worker(name="steady", seconds=lambda units: units * 1.0),
        Worker(name="late", seconds=lambda units: 6 + units / 2),
    ]
    assert fastest_shares(4, devices).units == (4, 0)
    assert fastest_shares(60, devices).units == (24, 36)


def test_a_dip_in_a_measured_curve_does_not_attract_more_work() -> None:
    measured = [0, 1, 2, 9, 3, 10, 11]
    dipping = Worker(name="dipping", seconds=lambda units: measured[units])
    assert fastest_shares(6, [dipping, worker(0.5)]).units == (2, 4)


def test_a_minimum_goes_to_the_slowest_too() -> None:
    assert fastest_shares(12, [worker(100), worker(1)], minimum=1).units == (11, 1)
    assert fastest_shares(12, [worker(100), worker(1)]).units == (12, 0)


def test_equal_devices_differ_by_one_and_the_first_gets_more() -> None:
    assert fastest_shares(11, [worker(3)] * 4).units == (3, 3, 3, 2)


def test_an_impossible_batch_names_the_device_and_by_how_much() -> None:
    memory = Affine(4 * GIB, 1 * GIB)
    devices = [worker(2, 10 * GIB, memory, "V100:0"), worker(1, 12 * GIB, memory, "P100:1")]
    with pytest.raises(InfeasibleError) as raised:
        fastest_shares(24, devices)
    message = str(raised.value)
    assert "24 rows do not fit: the 2 devices hold 14" in message
    assert "V100:0 has 10.0 GiB and would need 20.0 GiB for 16 rows, 10.0 GiB more" in message
    assert "at most 14 rows" in message
    assert "2 more devices like P100:1" in message


def test_an_impossible_batch_weighs_what_the_caller_could_change() -> None:
    memory = Affine(4 * GIB, 1 * GIB)
    devices = [worker(2, 10 * GIB, memory, "V100:0"), worker(1, 12 * GIB, memory, "P100:1")]
    remedies = [
        Remedy(change="2 micro-batches", total=12, workers=devices),
        Remedy(
            change="recompute='full'",
            total=24,
            workers=[worker(2, 10 * GIB, Affine(9 * GIB, GIB / 2)), worker(1, 12 * GIB, Affine(9 * GIB, GIB / 2))],
        ),
    ]
    with pytest.raises(InfeasibleError) as raised:
        fastest_shares(24, devices, remedies=remedies)
    assert "with 2 micro-batches (10.0 GiB of 10.0 GiB on V100:0)" in str(raised.value)
    assert "recompute" not in str(raised.value)  # 8 rows in all: it would not do


def test_what_is_not_even_enough_is_said_when_nothing_is() -> None:
    tight = [worker(1, 4 * GIB, Affine(5 * GIB, GIB), "T4:0")]
    half = [worker(1, 4 * GIB, Affine(4.5 * GIB, GIB), "T4:0")]
    with pytest.raises(InfeasibleError) as raised:
        fastest_shares(8, tight, remedies=[Remedy(change="ZeRO 1", total=8, workers=half)])
    assert "T4:0 has 4.00 GiB and would need 5.00 GiB for what it holds without any rows" in str(raised.value)
    assert "Not even enough: ZeRO 1 (12.5 GiB of 4.00 GiB on T4:0)" in str(raised.value)
    with pytest.raises(InfeasibleError) as alone:
        fastest_shares(8, tight)
    for beyond in ("for 0 rows", "shard the state", "recompute", "ZeRO"):  # the executor does neither
        assert beyond not in str(alone.value)


def test_a_device_without_room_for_its_minimum_is_an_error_even_if_others_have_room() -> None:
    devices = [worker(1, 2, Affine(2, 1), "full"), worker(1, 100, Affine(2, 1), "free")]
    assert fastest_shares(4, devices).units == (0, 4)
    with pytest.raises(InfeasibleError, match="full has"):
        fastest_shares(4, devices, minimum=1)


def test_the_shares_of_the_paper_s_devices_are_the_fastest() -> None:
    """Algorithm 1 of the Whale paper gives 77, 83, 48, 48, of which the second ends after 83 / 15.7."""
    found = fastest_shares(256, paper_four())
    assert found.by_speed == (81, 81, 47, 47)
    assert found.units == (77, 82, 49, 48)
    assert found.seconds == pytest.approx(49 / 9.3)
    assert found.seconds < 83 / 15.7


@pytest.mark.parametrize(("total", "minimum", "count"), [(-1, 0, 2), (4, -1, 2), (4, 0, 0)])
def test_nonsense_is_a_usage_error(total: int, minimum: int, count: int) -> None:
    with pytest.raises(UsageError):
        fastest_shares(total, [worker(1)] * count, minimum=minimum)


def test_fewer_units_than_devices_need_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="use at most 1 devices"):
        fastest_shares(3, [worker(1)] * 4, minimum=2)
