"""Properties of every balance on any devices; optimality by exhaustive search."""

from itertools import product
from unittest import mock

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from whale.errors import InfeasibleError
from whale.ir.profile import Affine
from whale.planner.balance import shares as balance
from whale.planner.balance.shares import Worker, fastest_shares

SPEEDS = st.sampled_from([0.3, 1.0, 1.6, 2.0, 3.1, 8.0])


@st.composite
def workers(draw: st.DrawFn, max_size: int = 6) -> list[Worker]:
    found = []
    for index in range(draw(st.integers(1, max_size))):
        start, speed = draw(st.sampled_from([0.0, 0.0, 1.5])), draw(SPEEDS)
        found.append(
            Worker(
                name=f"card:{index}",
                seconds=lambda units, start=start, speed=speed: start + units / speed,  # type: ignore[misc]
                memory=Affine(draw(st.integers(0, 4)), draw(st.sampled_from([0, 0.5, 1, 1.3]))),
                capacity_bytes=draw(st.integers(4, 30)),
            )
        )
    return found


def held(worker: Worker, share: int) -> bool:
    return worker.memory(share) <= worker.capacity_bytes


@given(st.integers(0, 60), workers())
def test_shares_sum_to_the_total_and_fit_or_nothing_would(total: int, devices: list[Worker]) -> None:
    try:
        found = fastest_shares(total, devices)
    except InfeasibleError:
        assert sum(max(k for k in range(total + 1) if held(device, k)) for device in devices) < total
        return
    assert sum(found.units) == total and min(found.units) >= 0
    assert all(held(device, share) for device, share in zip(devices, found.units, strict=True))
    after = list(found.by_speed)
    for move in found.moves:
        after[move.giver] -= move.units
        after[move.taker] += move.units
    assert tuple(after) == found.units


@given(st.integers(0, 7), workers(max_size=4))
def test_no_other_shares_are_faster(total: int, devices: list[Worker]) -> None:
    possible = [
        max(device.seconds(k) for device, k in zip(devices, units, strict=True))
        for units in product(range(total + 1), repeat=len(devices))
        if sum(units) == total and all(held(device, k) for device, k in zip(devices, units, strict=True))
    ]
    assume(possible)
    assert fastest_shares(total, devices).seconds == min(possible)


@settings(max_examples=2000)
@given(st.integers(0, 300), st.integers(0, 3), st.data())
def test_many_units_are_divided_as_one_by_one(total: int, minimum: int, data: st.DataObject) -> None:
    """Devices with equal times at many shares: times rise in steps of some units."""
    devices = []
    for index in range(data.draw(st.integers(1, 6))):
        start, step, speed = data.draw(st.tuples(st.sampled_from([0.0, 1.5]), st.sampled_from([1, 4, 50]), SPEEDS))
        devices.append(
            Worker(
                name=f"card:{index}",
                seconds=lambda units, start=start, step=step, speed=speed: start + -(-units // step) * step / speed,  # type: ignore[misc]
                memory=Affine(0, data.draw(st.sampled_from([0, 0.5, 1]))),
                capacity_bytes=data.draw(st.integers(4, 200)),
            )
        )
    try:
        expected = fastest_shares(total, devices, minimum=minimum)
    except InfeasibleError:
        return
    with mock.patch.object(balance, "MOST_ONE_BY_ONE", 0):
        assert fastest_shares(total, devices, minimum=minimum) == expected


@given(st.integers(0, 60), workers())
def test_never_slower_than_even(total: int, devices: list[Worker]) -> None:
    try:
        found = fastest_shares(total, devices)
    except InfeasibleError:
        return
    base, extra = divmod(total, len(devices))
    even = [base + (index < extra) for index in range(len(devices))]
    if all(held(device, k) for device, k in zip(devices, even, strict=True)):
        assert found.seconds <= max(device.seconds(k) for device, k in zip(devices, even, strict=True))


@given(st.integers(0, 60), workers(), st.data())
def test_a_device_made_faster_never_gets_less(total: int, devices: list[Worker], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(devices) - 1))
    slow = devices[index]
    quicker = Worker(
        name=slow.name,
        seconds=lambda units: slow.seconds(units) / 1.7,
        memory=slow.memory,
        capacity_bytes=slow.capacity_bytes,
    )
    try:
        before = fastest_shares(total, devices).units[index]
    except InfeasibleError:
        return
    after = fastest_shares(total, [*devices[:index], quicker, *devices[index + 1 :]]).units[index]
    assert after >= before


@given(st.integers(0, 60), st.lists(SPEEDS, min_size=1, max_size=8), st.integers(8, 60))
def test_of_devices_with_equal_memory_the_faster_gets_no_less(total: int, speeds: list[float], capacity: int) -> None:
    devices = [
        Worker(
            name=str(speed),
            seconds=lambda units, speed=speed: units / speed,  # type: ignore[misc]
            memory=Affine(0, 1),
            capacity_bytes=capacity,
        )
        for speed in speeds
    ]
    assume(capacity * len(devices) >= total)
    units = fastest_shares(total, devices).units
    for speed, share in zip(speeds, units, strict=True):
        assert all(share >= other for slower, other in zip(speeds, units, strict=True) if slower < speed)
