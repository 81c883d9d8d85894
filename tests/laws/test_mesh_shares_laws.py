"""Shares along axes are never slower than even ones, and with one axis none is faster, by trying all."""

from itertools import product
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from whale.errors import InfeasibleError
from whale.ir.strategy import Role
from whale.planner.balance.mesh_shares import AxisToShare, MeshDevice, mesh_shares

SPEEDS = st.sampled_from([0.5, 1.0, 1.6, 2.0, 5.0])


@st.composite
def meshes(draw: st.DrawFn, max_axes: int) -> tuple[list[AxisToShare], list[MeshDevice], int]:
    axes, count = [], 1
    for index in range(draw(st.integers(1, max_axes))):
        role: Role = draw(st.sampled_from(get_args(Role)))
        size = draw(st.integers(2, 3))
        axes.append(AxisToShare(name=str(index), size=size, role=role, units=draw(st.integers(3, 9))))
        count *= size
    devices = []
    for index in range(count):
        speed, start = draw(SPEEDS), draw(st.sampled_from([0.0, 0.3]))
        devices.append(
            MeshDevice(
                name=f"card:{index}",
                seconds=lambda rows, fraction, start=start, speed=speed: start + rows * (0.2 + fraction) / speed,  # type: ignore[misc]
                bytes=lambda rows, fraction: (4 + rows) * fraction,
                capacity_bytes=draw(st.sampled_from([3.0, 6.0, 100.0])),
            )
        )
    return axes, devices, draw(st.integers(1, 6))


def priced(axes, devices, rows, units):  # type: ignore[no-untyped-def]
    """Seconds of the slowest device, or None if one does not hold its part."""
    slowest = 0.0
    for device, at in zip(devices, product(*(range(axis.size) for axis in axes)), strict=True):
        own_rows, fraction = float(rows), 1.0
        for axis, shares, index in zip(axes, units, at, strict=True):
            if axis.role == "replicate":
                own_rows *= shares[index] / rows
            else:
                fraction *= shares[index] / axis.units
        if device.bytes(own_rows, fraction) > device.capacity_bytes * (1 + 1e-9):
            return None
        slowest = max(slowest, device.seconds(own_rows, fraction))
    return slowest


def total(axis: AxisToShare, rows: int) -> int:
    return rows if axis.role == "replicate" else axis.units


@given(meshes(max_axes=3))
def test_shares_fit_sum_and_are_never_slower_than_even_ones(mesh) -> None:  # type: ignore[no-untyped-def]
    axes, devices, rows = mesh
    even = []
    for axis in axes:
        base, extra = divmod(total(axis, rows), axis.size)
        even.append([base + (index < extra) for index in range(axis.size)])
    even_seconds = priced(axes, devices, rows, even)
    try:
        found = mesh_shares(axes, devices, rows=rows)
    except InfeasibleError:
        assert even_seconds is None
        return
    seconds = priced(axes, devices, rows, found.units)
    assert seconds is not None and abs(seconds - found.seconds) < 1e-9
    assert all(sum(units) == total(axis, rows) for axis, units in zip(axes, found.units, strict=True))
    assert even_seconds is None or seconds <= even_seconds * (1 + 1e-9)


def test_devices_that_are_full_to_the_byte_hold_their_parts() -> None:
    sizes = ("replicate", 2, 3), ("split", 2, 5), ("split", 3, 8)
    axes = [AxisToShare(name=str(n), size=size, role=role, units=units) for n, (role, size, units) in enumerate(sizes)]  # type: ignore[arg-type]
    devices = [
        MeshDevice(
            name="card",
            seconds=lambda rows, fraction, speed=speed: rows * (0.2 + fraction) / speed,  # type: ignore[misc]
            bytes=lambda rows, fraction: (4 + rows) * fraction,
            capacity_bytes=capacity,
        )
        for speed, capacity in zip([1, 2, 1, 0.5, 1, *[0.5] * 7], [*[3.0] * 7, 6.0, *[3.0] * 4], strict=True)
    ]
    even = priced(axes, devices, 1, [[1, 0], [3, 2], [3, 3, 2]])
    assert even is not None
    assert mesh_shares(axes, devices, rows=1).seconds <= even


@given(meshes(max_axes=1))
def test_with_one_axis_no_other_shares_are_faster(mesh) -> None:  # type: ignore[no-untyped-def]
    (axis,), devices, rows = mesh
    lowest = 1 if axis.role == "split" else 0
    choices = product(range(lowest, total(axis, rows) + 1), repeat=axis.size)
    times = [priced([axis], devices, rows, [units]) for units in choices if sum(units) == total(axis, rows)]
    possible = [seconds for seconds in times if seconds is not None]
    try:
        found = mesh_shares([axis], devices, rows=rows)
    except InfeasibleError:
        assert not possible
        return
    assert abs(found.seconds - min(possible)) < 1e-9
