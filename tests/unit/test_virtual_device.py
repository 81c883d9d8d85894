"""The mesh of a stage: who stands where, who belongs together, and how fast each slice is."""

from typing import Any

import pytest

from whale.errors import UsageError
from whale.ir.strategy import Scope, Strategy
from whale.ir.virtual_device import MeshAxis, RegionRoles, VirtualDevice


def mesh(*sizes: int, first: int = 0) -> VirtualDevice:
    count = 1
    for size in sizes:
        count *= size
    return VirtualDevice(
        stage=0,
        ranks=tuple(range(first, first + count)),
        axes=tuple(MeshAxis(name=f"axis{index}", size=size) for index, size in enumerate(sizes)),
        speeds=tuple(float(rank + 1) for rank in range(count)),
        memory_bytes=(16,) * count,
    )


def test_ranks_are_row_major() -> None:
    device = mesh(2, 2, 3, first=10)
    assert device.coordinates(10) == (0, 0, 0)
    assert device.coordinates(11) == (0, 0, 1)
    assert device.coordinates(13) == (0, 1, 0)
    assert device.coordinates(21) == (1, 1, 2)


def test_a_group_differs_along_one_axis_only() -> None:
    device = mesh(2, 4)
    assert device.group(0, 5) == (1, 5)
    assert device.group(1, 5) == (4, 5, 6, 7)


def test_the_groups_of_an_axis_cover_every_rank_once() -> None:
    device = mesh(2, 3, 2)
    for axis_index in range(3):
        groups = {device.group(axis_index, rank) for rank in device.ranks}
        assert sorted(rank for group in groups for rank in group) == list(device.ranks)
        assert set(device.groups(axis_index)) == groups
        assert len(list(device.groups(axis_index))) == len(groups)


def test_a_slice_of_an_axis_has_the_ranks_at_one_index() -> None:
    device = mesh(2, 3, 2)
    for axis_index, size in enumerate(device.shape):
        at = [tuple(r for r in device.ranks if device.coordinates(r)[axis_index] == n) for n in range(size)]
        assert device.slices(axis_index) == tuple(at)


def test_a_slice_is_as_fast_as_all_its_devices() -> None:
    device = mesh(2, 2)
    assert device.slices(0) == ((0, 1), (2, 3))
    assert device.axis_speeds(0) == (3.0, 7.0)
    assert device.axis_speeds(1) == (4.0, 6.0)


def test_a_single_device_has_no_axis() -> None:
    assert mesh().coordinates(0) == ()
    assert mesh().shape == ()


def test_a_rank_of_another_stage_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 9 is not on stage 0"):
        mesh(2).coordinates(9)
    with pytest.raises(UsageError, match="axis 1 does not exist"):
        mesh(2).group(1, 0)


def test_a_mesh_that_does_not_fit_its_ranks_is_refused() -> None:
    axes = (MeshAxis(name="split", size=2),)
    with pytest.raises(UsageError, match="2 different ranks"):
        VirtualDevice(stage=0, ranks=(0, 0), axes=axes, speeds=(1.0, 1.0), memory_bytes=(1, 1))
    with pytest.raises(UsageError, match="a speed and a memory"):
        VirtualDevice(stage=0, ranks=(0, 1), axes=axes, speeds=(1.0,), memory_bytes=(1, 1))
    with pytest.raises(UsageError, match="different names"):
        VirtualDevice(stage=0, ranks=(0, 1, 2, 3), axes=axes * 2, speeds=(1.0,) * 4, memory_bytes=(1,) * 4)
    with pytest.raises(UsageError, match="size 1"):
        MeshAxis(name="split", size=1)


def test_a_region_inside_a_region_inherits_its_roles() -> None:
    roles = RegionRoles((("", ("replicate",)), ("head", ("split",))))
    head = Scope(strategy=Strategy(kind="split"), region="head")
    inner = Scope(strategy=Strategy(kind="split"), region="head.inner")
    assert roles.of((head, inner)) == ("split",)
    assert roles.of((inner,)) == ("replicate",)
    assert roles.of(()) == ("replicate",)
    assert dict(roles) == {"": ("replicate",), "head": ("split",)}


def test_a_region_of_another_stage_is_refused() -> None:
    with pytest.raises(UsageError, match="no region"):
        RegionRoles((("head", ("split",)),)).of(())


def test_an_axis_is_mixed_where_types_differ_along_it() -> None:
    axes = (MeshAxis(name="data", size=2), MeshAxis(name="split", size=2))

    def mixed(*types: str) -> tuple[bool, ...]:
        numbers: dict[str, Any] = {"speeds": (1.0,) * 4, "memory_bytes": (1,) * 4}
        return VirtualDevice(stage=0, ranks=(4, 5, 6, 7), axes=axes, types=types, **numbers).mixed_axes

    assert mixed() == mixed("a", "a", "a", "a") == (False, False)
    assert mixed("a", "a", "b", "b") == (True, False)
    assert mixed("a", "b", "a", "b") == (False, True)
    assert mixed("a", "b", "c", "d") == (True, True)
    with pytest.raises(UsageError, match="needs a type for each, not 3 types"):
        mixed("a", "b", "c")
