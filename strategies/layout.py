"""Layout: sizes and positions on one rank of values whose placements on every mesh axis are known.

A stage's mesh axes are processed in order, the outermost first; the outermost of all is *time*, along which the batch
is divided into micro-batches. Two axes may cut one factor: the inner one then cuts the part that the outer one left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from whale.graph.values import Value
from whale.ir.placement import Cut, Placement, unit_ranges
from whale.ir.shares import shares_on_axis
from whale.strategies.analysis import Analysis
from whale.strategies.axes import Dim

Placements = tuple[Placement, ...]
"""One placement for each mesh axis, time first."""

Interval = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LayoutAxis:
    """A mesh axis in the layout: the number of ranks, and their proportions.

    ``sizes`` fixes the shares exactly (time: the rows of each micro-batch); otherwise they are proportional to
    ``weights``, in whole units, at least one each if there are enough and no weight is zero.
    """

    name: str
    size: int
    weights: tuple[float, ...] = ()
    sizes: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        """Without shares, of which there may be hundreds."""
        return hash((self.name, self.size))


@lru_cache(maxsize=65536)
def unit_shares(length: int, axis: LayoutAxis) -> tuple[int, ...]:
    """Number of *length* units of each rank of the axis."""
    if axis.sizes is not None:
        return axis.sizes
    return shares_on_axis(length, axis.weights or (1.0,) * axis.size)


@lru_cache(maxsize=65536)
def largest_part(length: int, axis: LayoutAxis) -> float:
    """The largest share of *length* units of a rank of the axis, as a part of all."""
    return max(unit_shares(length, axis)) / length


@dataclass
class Layout:
    """Sizes and positions on the mesh of one stage.

    ``mirrored`` are axes, each with a factor that it cuts in two stretches for each rank
    (:func:`whale.ir.placement.unit_ranges`).
    """

    analysis: Analysis
    axes: Sequence[LayoutAxis]
    mirrored: frozenset[tuple[int, int]] = frozenset()
    _spans: dict[tuple[Placements, tuple[int, ...]], dict[int, tuple[Interval, ...]]] = field(default_factory=dict)
    _ranges: dict[tuple[int, int, int], tuple[tuple[Interval, ...], ...]] = field(default_factory=dict)
    _intervals: dict[tuple[Value, Placements, tuple[int, ...]], tuple[tuple[Interval, ...], ...]] = field(
        default_factory=dict
    )

    def spans(self, placements: Placements, coordinates: Sequence[int]) -> dict[int, tuple[Interval, ...]]:
        """The half-open ranges of every cut factor at these mesh coordinates."""
        key = (placements, tuple(coordinates))
        found = self._spans.get(key)
        if found is None:
            found = {}
            for index, (axis, placement, coordinate) in enumerate(zip(self.axes, placements, coordinates, strict=True)):
                if placement.kind != "S":
                    continue
                factor = placement.factor
                ranges = found.get(factor, ((0, self.analysis.factors.size(factor)),))
                cut = (index, factor, length_of(ranges))
                if cut not in self._ranges:
                    sizes = unit_shares(cut[2], axis)
                    self._ranges[cut] = unit_ranges(tuple(sizes), (index, factor) in self.mirrored)
                own = self._ranges[cut][coordinate]
                found[factor] = tuple(piece for start, stop in own for piece in _part(ranges, start, stop))
            self._spans[key] = found
        return found

    def form(self, placements: Placements) -> tuple[tuple[str, int, int], ...]:
        """Key on which shards depend: placements of one form are cut equally, factor by factor, like those of equal
        layers."""
        number: dict[int, int] = {}
        return tuple(
            ("S", number.setdefault(p.factor, len(number)), self.analysis.factors.size(p.factor))
            if p.kind == "S"
            else (p.kind, -1, 0)
            for p in placements
        )

    def cuts(self, placements: Placements, coordinates: Sequence[int]) -> tuple[tuple[Interval, ...], ...]:
        """The half-open ranges of every cut factor: equal for all ranks with equal shards."""
        return tuple(self.spans(placements, _within(placements, coordinates)).values())

    def local_shape(self, value: Value, placements: Placements, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Shape of a value on the rank at these coordinates."""
        dims = self.analysis.dims[value]
        shape = [self.analysis.factors.extent(dim) for dim in dims]
        cut_dims = {p.dim for p in placements if p.kind == "S"}
        if cut_dims:
            spans = self.spans(placements, coordinates)
            for d in cut_dims:
                local = {p.factor: length_of(spans[p.factor]) for p in placements if p.kind == "S" and p.dim == d}
                shape[d] = self.analysis.factors.local_extent(dims[d], local)
        return tuple(shape)

    def cut(self, value: Value, placements: Placements, axis: int, coordinates: Sequence[int]) -> Cut:
        """The cut of a value on one axis, given how the other axes have cut it already."""
        placement = placements[axis]
        factor, dim = placement.factor, placement.dim
        before = {i for i in range(len(placements)) if i != axis and placements[i].kind == "S"}
        local: dict[int, int] = {}
        for i in sorted(before):
            p = placements[i]
            if p.factor == factor and i > axis:
                continue
            start_length = local.get(p.factor, self.analysis.factors.size(p.factor))
            sizes = unit_shares(start_length, self.axes[i])
            local[p.factor] = sizes[coordinates[i]]
        length = local.get(factor, self.analysis.factors.size(factor))
        here = {
            p.factor: local[p.factor]
            for i, p in enumerate(placements)
            if i in before and p.dim == dim and p.factor in local
        }
        segments = self.analysis.factors.segments(self.analysis.dims[value][dim], factor, here)
        return Cut(dim, segments, unit_shares(length, self.axes[axis]), (axis, factor) in self.mirrored)

    def starts(self, value: Value, placements: Placements, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Start of the local shard in each dim of the whole value."""
        intervals = self.intervals(value, placements, coordinates)
        return tuple(dim[0][0] if dim else 0 for dim in intervals)

    def intervals(
        self, value: Value, placements: Placements, coordinates: Sequence[int]
    ) -> tuple[tuple[Interval, ...], ...]:
        """The ranges of each dim of the whole value on the rank at these coordinates.

        Only coordinates on axes that cut the value matter: ranks that hold the same get the same object.
        """
        at = _within(placements, coordinates)
        key = (value, placements, at)
        if key not in self._intervals:
            spans = self.spans(placements, at)
            found = []
            for d, dim in enumerate(self.analysis.dims[value]):
                here = {p.factor: spans[p.factor] for p in placements if p.kind == "S" and p.dim == d}
                found.append(dim_intervals(self.analysis, dim, here))
            self._intervals[key] = tuple(found)
        return self._intervals[key]


def _within(placements: Placements, coordinates: Sequence[int]) -> tuple[int, ...]:
    """Coordinates on the axes that cut."""
    return tuple([c if p.kind == "S" else 0 for c, p in zip(coordinates, placements, strict=True)])


def length_of(ranges: Iterable[Interval]) -> int:
    """Number of positions in some ranges."""
    return sum(stop - start for start, stop in ranges)


def _part(ranges: Sequence[Interval], first: int, last: int) -> Iterator[Interval]:
    """The ranges from position *first* to *last* among those in *ranges*."""
    base = 0
    for start, stop in ranges:
        low, high = max(first - base, 0), min(last - base, stop - start)
        if low < high:
            yield start + low, start + high
        base += stop - start


def dim_intervals(analysis: Analysis, dim: Dim, spans: Mapping[int, tuple[Interval, ...]]) -> tuple[Interval, ...]:
    """Half-open ranges of a dim, in order, if some of its factors are cut to ranges."""
    factors = analysis.factors
    result: list[Interval] = [(0, 1)]
    extent = 1
    for factor in reversed(factors.flat(dim)):
        size = factors.size(factor)
        parts = factors.parts(factor)
        if parts is not None and any(factors.count([factor], cut) for cut in spans):
            pieces: list[Interval] = []
            base = 0
            for part in parts:
                pieces += [(a + base, b + base) for a, b in dim_intervals(analysis, [part], spans)]
                base += factors.size(part)
            indices = pieces
        else:
            indices = list(spans.get(factor, ((0, size),) if size else ()))
        if result == [(0, extent)]:
            result = [(a * extent, b * extent) for a, b in indices]
        else:
            result = [
                (i * extent + a, i * extent + b) for low, high in indices for i in range(low, high) for a, b in result
            ]
        extent *= size
    return tuple(_merged(result))


def _merged(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for a, b in intervals:
        if merged and merged[-1][1] == a:
            merged[-1] = (merged[-1][0], b)
        elif b > a:
            merged.append((a, b))
    return merged
