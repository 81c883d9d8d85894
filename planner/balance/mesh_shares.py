"""Shares along the axes of a stage's mesh: rows for each position of a ``replicate`` axis, and units (heads, columns,
experts) for each position of a ``split`` axis.

Objective: the least time of the slowest device for a micro-batch. Constraints: whole units that sum to the axis's
total; every device fits in memory; one vector of shares per axis, equal at all positions of the other axes, as in a
plan. With one axis this is `fastest_shares`, exact. Several axes are solved one after the other, each exactly with the
others fixed, until none improves, starting from even shares, from shares by speed and from shares by memory: a
heuristic, never slower than even shares that fit. This module knows numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

from whale.errors import InfeasibleError, UsageError
from whale.ir.profile import Affine
from whale.ir.shares import shares
from whale.ir.strategy import Role, divides_batch
from whale.planner.balance.shares import Move, Worker, fastest_shares, memory_between

__all__ = ["AxisToShare", "MeshDevice", "MeshShares", "mesh_shares"]

MAX_ROUNDS = 20
"""Limit on rounds over all axes; each round must improve, and few do."""


@dataclass(frozen=True, kw_only=True)
class AxisToShare:
    """An axis of the mesh: its size, and the units of a split (a ``replicate`` axis divides rows)."""

    name: str
    size: int
    role: Role
    units: int = 0

    @property
    def divides_batch(self) -> bool:
        """Whether its units are rows."""
        return divides_batch(self.role)

    @property
    def minimum(self) -> int:
        """Smallest share: a replica may have no rows, but every shard of a split has a unit."""
        return 0 if self.divides_batch else 1

    @property
    def unit(self) -> str:
        """The unit in error messages."""
        return "rows" if self.divides_batch else f"units of axis {self.name!r}"


@dataclass(frozen=True, kw_only=True)
class MeshDevice:
    """A device of the mesh.

    Attributes:
        name: for messages.
        seconds: of a micro-batch by its rows and by the device's fraction of the split; must not decrease with either.
        bytes: by rows and fraction; affine in each.
        capacity_bytes: its memory.
    """

    name: str
    seconds: Callable[[float, float], float]
    bytes: Callable[[float, float], float] = lambda rows, fraction: 0.0
    capacity_bytes: float = inf


@dataclass(frozen=True, kw_only=True)
class MeshShares:
    """Shares along each axis, moves because of memory along each axis, and seconds of the slowest device."""

    units: tuple[tuple[int, ...], ...]
    moves: tuple[tuple[Move, ...], ...]
    seconds: float


def mesh_shares(axes: Sequence[AxisToShare], devices: Sequence[MeshDevice], *, rows: int) -> MeshShares:
    """Return shares along all axes.

    Args:
        axes: outermost first.
        devices: row-major over the axes.
        rows: of the micro-batch, over all devices.

    Raises:
        InfeasibleError: the mesh has too little memory; the message says which devices lack how much.

    >>> def card(speed): return MeshDevice(name="card", seconds=lambda rows, fraction: rows * fraction / speed)
    >>> data = AxisToShare(name="replicate", size=2, role="replicate")
    >>> heads = AxisToShare(name="split", size=2, role="split", units=12)
    >>> mesh_shares([data, heads], [card(4), card(2), card(2), card(1)], rows=9).units
    ((6, 3), (8, 4))
    """
    if prod(axis.size for axis in axes) != len(devices) or not devices:
        raise UsageError(f"a mesh of {[axis.size for axis in axes]} has no {len(devices)} devices")
    axes = [replace(axis, units=rows) if axis.divides_batch else axis for axis in axes]
    mesh = _Mesh(axes, devices, rows)
    found, problem = [], None
    for start in mesh.starts():
        try:
            found.append(mesh.descend(start))
        except InfeasibleError as error:
            problem = problem or error
    if problem is not None and not found:
        raise problem
    return min(found, key=lambda shares: shares.seconds)


@dataclass(frozen=True)
class _Mesh:
    axes: Sequence[AxisToShare]
    devices: Sequence[MeshDevice]
    rows: int

    def starts(self) -> Iterator[list[tuple[int, ...]]]:
        """Initial shares: even, in proportion to the speeds at even shares, and in proportion to memory."""
        even = [(1.0,) * axis.size for axis in self.axes]
        yield self._rounded(even)
        units = self._rounded(even)
        seconds = [device.seconds(*part) for device, part in zip(self.devices, self.parts(units), strict=True)]
        for weights in ([1 / max(spent, 1e-12) for spent in seconds], [dev.capacity_bytes for dev in self.devices]):
            if max(weights) < inf:
                slices = (self.slices(index) for index in range(len(self.axes)))
                yield self._rounded([[sum(weights[one] for one in members) for members in axis] for axis in slices])

    def _rounded(self, weights: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
        return [shares(axis.units, own, minimum=axis.minimum) for axis, own in zip(self.axes, weights, strict=True)]

    def slices(self, index: int) -> list[list[int]]:
        """Positions of the devices at each position of an axis."""
        found: list[list[int]] = [[] for _ in range(self.axes[index].size)]
        for position, coordinates in enumerate(self._coordinates()):
            found[coordinates[index]].append(position)
        return found

    def _coordinates(self) -> list[tuple[int, ...]]:
        return list(product(*(range(axis.size) for axis in self.axes)))

    def parts(self, units: Sequence[Sequence[int]], apart: int = -1) -> list[tuple[float, float]]:
        """Rows and fraction of each device by the shares of all axes except *apart*."""
        found = []
        for coordinates in self._coordinates():
            rows, fraction = float(self.rows), 1.0
            for index, (axis, own, at) in enumerate(zip(self.axes, units, coordinates, strict=True)):
                if index == apart or not axis.units:
                    continue
                if axis.divides_batch:
                    rows *= own[at] / axis.units
                else:
                    fraction *= own[at] / axis.units
            found.append((rows, fraction))
        return found

    def seconds(self, units: Sequence[Sequence[int]]) -> float:
        parts = self.parts(units)
        return max(device.seconds(*part) for device, part in zip(self.devices, parts, strict=True))

    def descend(self, units: list[tuple[int, ...]]) -> MeshShares:
        """Improve axis by axis until a round of all axes gains nothing."""
        moves: list[tuple[Move, ...]] = [()] * len(self.axes)
        best = inf
        for _ in range(MAX_ROUNDS):
            for index, axis in enumerate(self.axes):
                workers = self._workers(index, units)
                found = fastest_shares(axis.units, workers, minimum=axis.minimum, unit=axis.unit)
                units[index], moves[index] = found.units, found.moves
            seconds = self.seconds(units)
            if seconds >= best * (1 - 1e-9):
                break
            best = seconds
        return MeshShares(units=tuple(units), moves=tuple(moves), seconds=self.seconds(units))

    def _workers(self, index: int, units: Sequence[Sequence[int]]) -> list[Worker]:
        """The positions of an axis as workers, each as slow as its slowest device and as full as its fullest."""
        axis, others = self.axes[index], self.parts(units, apart=index)

        def worker(members: list[int]) -> Worker:
            own = [(self.devices[position], others[position]) for position in members]

            def part(other: tuple[float, float], share: float) -> tuple[float, float]:
                rows, fraction = other
                if axis.divides_batch:
                    return rows * share / max(1, axis.units), fraction
                return rows, fraction * share / max(1, axis.units)

            def need(device: MeshDevice, other: tuple[float, float]) -> Affine:
                return memory_between(lambda share: device.bytes(*part(other, share)), 0, axis.units)

            device, other = min(own, key=lambda one: _room(need(*one), one[0].capacity_bytes))
            return Worker(
                name=device.name,
                seconds=lambda share: max(device.seconds(*part(other, share)) for device, other in own),
                memory=need(device, other),
                capacity_bytes=device.capacity_bytes,
            )

        return [worker(members) for members in self.slices(index)]


def _room(need: Affine, capacity: float) -> float:
    """Units that fit, as a fraction."""
    free = capacity - need.fixed
    if need.per_row > 0 and free > 0:
        return free / need.per_row
    return inf if free >= 0 else free
