"""The ordered mesh of devices that one stage runs on, the capacity of each, and the role of each axis for each region.

*Axis* is of a mesh, *dim* of a tensor. The first axis varies slowest: ranks are row-major. This file describes a mesh
that the planner has chosen; it knows neither how it was chosen nor any process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from whale.errors import UsageError
from whale.ir.strategy import RegionRole, ScopePath

__all__ = ["MeshAxis", "RegionRoles", "VirtualDevice"]


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """One axis of a mesh with ``size`` positions, at least 2 (an axis of size 1 is omitted).

    ``shares`` divide the units along the axis, as proportions or in whole units; by default in proportion to the speeds
    at its positions.
    """

    name: str
    size: int
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 2:
            raise UsageError(f"mesh axis {self.name!r} has size {self.size}: an axis of size 1 is left out of the mesh")
        if self.shares and len(self.shares) != self.size:
            raise UsageError(f"mesh axis {self.name!r} has size {self.size}, but {len(self.shares)} shares")


@dataclass(frozen=True, kw_only=True)
class VirtualDevice:
    """The devices of one stage.

    Attributes:
        stage: position of the stage in the pipeline.
        ranks: of the devices, row-major over the axes.
        axes: from the outermost (slowest) to the innermost; none for a single device.
        speeds: FLOP/s of each device, in the order of ``ranks``.
        memory_bytes: capacity of each device, in the order of ``ranks``.
        types: name of the type of each device, in the order of ``ranks``; none if all are alike.

    >>> mesh = VirtualDevice(
    ...     stage=0,
    ...     ranks=(4, 5, 6, 7),
    ...     axes=(MeshAxis(name="data", size=2), MeshAxis(name="split", size=2)),
    ...     speeds=(2.0, 2.0, 1.0, 1.0),
    ...     memory_bytes=(1, 1, 1, 1),
    ... )
    >>> mesh.coordinates(6), mesh.group(0, 6), mesh.group(1, 6)
    ((1, 0), (4, 6), (6, 7))
    >>> mesh.axis_speeds(0), mesh.axis_speeds(1)
    ((4.0, 2.0), (3.0, 3.0))
    """

    stage: int
    ranks: tuple[int, ...]
    axes: tuple[MeshAxis, ...]
    speeds: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        size = prod(axis.size for axis in self.axes)
        if len(self.ranks) != size or len(set(self.ranks)) != size:
            raise UsageError(f"a mesh of {self.shape} needs {size} different ranks, not {list(self.ranks)}")
        if len(self.speeds) != size or len(self.memory_bytes) != size:
            raise UsageError(
                f"a mesh of {size} devices needs a speed and a memory for each, not {len(self.speeds)} speeds and "
                f"{len(self.memory_bytes)} memories"
            )
        if self.types and len(self.types) != size:
            raise UsageError(f"a mesh of {size} devices needs a type for each, not {len(self.types)} types")
        if len({axis.name for axis in self.axes}) != len(self.axes):
            raise UsageError(f"the axes of a mesh need different names, not {[axis.name for axis in self.axes]}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis."""
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def position(self, rank: int) -> int:
        """Position of *rank* in ``ranks``; raises UsageError if it does not belong to this stage."""
        try:
            return self._position[rank]
        except KeyError:
            raise UsageError(f"rank {rank} is not on stage {self.stage}, whose ranks are {list(self.ranks)}") from None

    @cached_property
    def _coordinates(self) -> tuple[tuple[int, ...], ...]:
        return tuple(product(*(range(axis.size) for axis in self.axes)))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Index of *rank* along each axis."""
        return self._coordinates[self.position(rank)]

    def _stride(self, axis_index: int) -> int:
        if not 0 <= axis_index < len(self.axes):
            raise UsageError(f"axis {axis_index} does not exist: stage {self.stage} has {len(self.axes)} mesh axes")
        return prod(self.shape[axis_index + 1 :])

    def group(self, axis_index: int, rank: int) -> tuple[int, ...]:
        """The ranks that differ from *rank* only along that axis, itself included, in the order of the axis."""
        stride, position = self._stride(axis_index), self.position(rank)
        block, inside = divmod(position, stride * self.axes[axis_index].size)
        return self._groups[axis_index][block * stride + inside % stride]

    @cached_property
    def _groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The `groups` along each axis: made once, as all ranks of a group ask for it."""
        return tuple(tuple(self.groups(axis)) for axis in range(len(self.axes)))

    def groups(self, axis_index: int) -> Iterator[tuple[int, ...]]:
        """The different `group`s along that axis: every rank is in exactly one."""
        stride = self._stride(axis_index)
        width = stride * self.axes[axis_index].size
        for block in range(0, len(self.ranks), width):
            for first in range(block, block + stride):
                yield self.ranks[first : block + width : stride]

    @cached_property
    def mixed_axes(self) -> tuple[bool, ...]:
        """For each axis whether devices of different types differ only along it; types round each in their own way."""
        if len(set(self.types)) < 2:
            return (False,) * len(self.axes)
        type_of = dict(zip(self.ranks, self.types, strict=True))
        return tuple(
            any(len({type_of[rank] for rank in line}) > 1 for line in self.groups(axis))
            for axis in range(len(self.axes))
        )

    def slices(self, axis_index: int) -> tuple[tuple[int, ...], ...]:
        """The ranks at each index of that axis: every device is at exactly one."""
        stride, size = self._stride(axis_index), self.axes[axis_index].size
        found: list[list[int]] = [[] for _ in range(size)]
        for number, first in enumerate(range(0, len(self.ranks), stride)):
            found[number % size] += self.ranks[first : first + stride]
        return tuple(map(tuple, found))

    def axis_speeds(self, axis_index: int) -> tuple[float, ...]:
        """FLOP/s at each index of that axis: the sum over its devices.

        The devices at an index work together, each on its own shard, so they are as fast as their sum: the shares of an
        axis are proportional to these sums. (If shards inside an index are even over unequal devices, this is too
        high.)
        """
        return tuple(sum(self.speeds[self.position(rank)] for rank in members) for members in self.slices(axis_index))

    def axis_shares(self, axis_index: int) -> tuple[float, ...]:
        """Shares along that axis: those of the axis, or in proportion to its speeds."""
        return self.axes[axis_index].shares or self.axis_speeds(axis_index)


@dataclass(frozen=True)
class RegionRoles(Mapping[str, tuple[RegionRole, ...]]):
    """The role of each region of a stage along each mesh axis, by its identity; the empty string is the unannotated
    rest.

    >>> roles = RegionRoles((("", ("replicate",)), ("lm_head", ("split",))))
    >>> roles["lm_head"]
    ('split',)
    """

    entries: tuple[tuple[str, tuple[RegionRole, ...]], ...]

    @cached_property
    def _table(self) -> dict[str, tuple[RegionRole, ...]]:
        return dict(self.entries)

    def __getitem__(self, region: str) -> tuple[RegionRole, ...]:
        return self._table[region]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def of(self, path: ScopePath) -> tuple[RegionRole, ...]:
        """Roles of the innermost region of *path* that is known here: a region inside a region inherits its roles."""
        for scope in reversed(path):
            if scope.region in self._table:
                return self._table[scope.region]
        if "" in self._table:
            return self._table[""]
        raise UsageError(
            f"no region of {[str(scope) for scope in path]} belongs to this stage, which has {sorted(self)}"
        )
