"""Shares along one or several axes of a mesh of mixed devices."""

import pytest

from whale.errors import InfeasibleError, UsageError
from whale.planner.balance.mesh_shares import AxisToShare, MeshDevice, mesh_shares


def device(speed: float, capacity: float = float("inf"), name: str = "card", per_row: float = 1.0) -> MeshDevice:
    """Work is rows x fraction; memory is what it holds of 10, and of each row."""
    return MeshDevice(
        name=name,
        seconds=lambda rows, fraction: rows * fraction / speed,
        bytes=lambda rows, fraction: 10 * fraction + per_row * rows * fraction,
        capacity_bytes=capacity,
    )


REPLICATE_2 = AxisToShare(name="replicate", size=2, role="replicate")
REPLICATE_4 = AxisToShare(name="replicate", size=4, role="replicate")
SPLIT_2 = AxisToShare(name="split", size=2, role="split", units=12)
SPLIT_4 = AxisToShare(name="split", size=4, role="split", units=12)


def test_rows_go_by_speed() -> None:
    found = mesh_shares([REPLICATE_4], [device(2), device(2), device(1), device(1)], rows=12)
    assert found.units == ((4, 4, 2, 2),)
    assert found.seconds == 2


def test_heads_go_by_speed_and_everyone_has_one() -> None:
    assert mesh_shares([SPLIT_4], [device(2), device(2), device(1), device(1)], rows=3).units == ((4, 4, 2, 2),)
    assert mesh_shares([SPLIT_2], [device(100), device(1)], rows=3).units == ((11, 1),)


def test_heads_go_where_there_is_memory() -> None:
    found = mesh_shares([SPLIT_2], [device(2, capacity=6.6, name="small"), device(1)], rows=2)
    assert found.units == ((6, 6),)
    assert "small" in found.moves[0][0].reason


def test_both_axes_of_a_mesh_are_balanced_where_devices_differ_along_both() -> None:
    found = mesh_shares([REPLICATE_2, SPLIT_2], [device(4), device(2), device(2), device(1)], rows=9)
    assert found.units == ((6, 3), (8, 4))
    assert found.seconds == pytest.approx(6 * 8 / 12 / 4)


def test_an_axis_along_which_all_devices_are_alike_stays_even() -> None:
    found = mesh_shares([REPLICATE_2, SPLIT_2], [device(3), device(3), device(1), device(1)], rows=8)
    assert found.units == ((6, 2), (6, 6))


def test_a_row_of_unlike_devices_is_as_slow_as_its_slowest_where_shares_must_be_common() -> None:
    """The fast card of each row is in another column: even columns are then best."""
    found = mesh_shares([REPLICATE_2, SPLIT_2], [device(2), device(1), device(1), device(2)], rows=8)
    assert found.seconds <= 4 * 0.5 / 1


def test_a_stage_of_one_device_has_no_shares() -> None:
    assert mesh_shares([], [device(2)], rows=8).units == ()
    assert mesh_shares([], [device(2)], rows=8).seconds == 4


def test_a_micro_batch_with_fewer_rows_than_devices_leaves_the_slow_without() -> None:
    assert mesh_shares([REPLICATE_4], [device(1), device(4), device(1), device(4)], rows=2).units == ((0, 1, 0, 1),)


def test_what_a_mesh_does_not_hold_names_the_device() -> None:
    with pytest.raises(InfeasibleError, match="tiny has"):
        mesh_shares([REPLICATE_2], [device(1, 12, "tiny"), device(1, 12, "small")], rows=10)


def test_shares_by_memory_are_tried_where_even_and_fast_ones_do_not_fit() -> None:
    found = mesh_shares([SPLIT_2], [device(1, 3.0, "small"), device(1, 40, "large")], rows=2)
    assert found.units == ((3, 9),)


def test_a_number_of_devices_that_is_not_the_meshs_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        mesh_shares([REPLICATE_2], [device(1)] * 3, rows=4)
