"""Placement of a tensor on one mesh axis, and the cut of a dim into shards.

A placement is a *pair* (value, gradient), because the two differ in two of the four cases:

=====================  ==================  ==================
placement              value               gradient
=====================  ==================  ==================
``REPLICATE``          whole on each rank  whole on each rank
``REPLICATE_PARTIAL``  whole on each rank  a term of a sum
``Shard``              a part              a part
``PARTIAL``            a term of a sum     whole on each rank
``at_experts``         chosen rows         chosen rows
=====================  ==================  ==================

``REPLICATE_PARTIAL`` is the placement of a replicated value, with partial gradient, that each rank uses for another
part of the work: Megatron's *f* operator, and the gradient all-reduce of data parallelism, are its bridge. Rows
``at_experts`` are on the ranks that have the experts which they chose; only a step knows how many. No bridge leads
there or back, because it needs the choice: operators do, which have it. This module knows sizes and positions only: no
torch, no process groups, no graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple


class Placement(NamedTuple):
    """Placement of a tensor on one mesh axis. Use the constants, or :func:`shard`.

    ``dim`` and ``factor`` are set for shards and rows at experts only: the tensor dim, and the axis factor (see
    ``strategies.axes``) along which it is cut.
    """

    kind: Literal["R", "R*", "S", "P", "E"]
    dim: int = -1
    factor: int = -1

    def __str__(self) -> str:
        return f"{self.kind}({self.dim})" if self.kind in "SE" else self.kind

    @property
    def gradient(self) -> Literal["R", "S", "P", "E"]:
        """The kind of the gradient in this placement."""
        return _GRADIENT[self.kind]

    @property
    def value(self) -> Literal["R", "S", "P", "E"]:
        """The kind of the value in this placement."""
        return "R" if self.kind == "R*" else self.kind


_GRADIENT: dict[str, Literal["R", "S", "P", "E"]] = {"R": "R", "R*": "P", "S": "S", "P": "R", "E": "E"}

REPLICATE = Placement("R")
REPLICATE_PARTIAL = Placement("R*")
PARTIAL = Placement("P")


def shard(dim: int, factor: int) -> Placement:
    """A tensor sharded along axis factor *factor* of its dim *dim*."""
    return Placement("S", dim, factor)


def at_experts(dim: int, factor: int) -> Placement:
    """A tensor whose rows, in its dim *dim*, are each on the rank of the expert that they chose. They come from ranks
    that cut them along axis factor *factor*; -1: that have them all."""
    return Placement("E", dim, factor)


@dataclass(frozen=True)
class Segment:
    """A range of a dim seen as ``[outer, size, inner]`` whose middle part is cut."""

    outer: int
    size: int
    inner: int

    @property
    def extent(self) -> int:
        """Number of elements of the dim that the segment covers."""
        return self.outer * self.size * self.inner


@dataclass(frozen=True)
class Cut:
    """The cut of a dim among the ranks of one mesh axis.

    A plain shard has one segment with ``outer == 1``. A fused ``(3, heads, head_dim)`` weight cut by heads has ``outer
    == 3``; fused parts of different length have one segment each. ``sizes[i]`` is the number of units of rank *i*,
    equal for every segment. In a ``mirrored`` cut a rank has a stretch of units from each end (:func:`unit_ranges`).

    >>> cut = Cut(dim=0, segments=(Segment(3, 4, 16),), sizes=(3, 1))
    >>> cut.extent, cut.local_extent(0), cut.local_extent(1)
    (192, 144, 48)
    >>> cut.intervals(1)
    ((48, 64), (112, 128), (176, 192))
    >>> Cut(dim=0, segments=(Segment(1, 8, 1),), sizes=(4, 4), mirrored=True).intervals(0)
    ((0, 2), (6, 8))
    """

    dim: int
    segments: tuple[Segment, ...]
    sizes: tuple[int, ...]
    mirrored: bool = False

    @property
    def extent(self) -> int:
        """Length of the whole dim."""
        return sum(segment.extent for segment in self.segments)

    def ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the units of rank *index*."""
        return unit_ranges(self.sizes, self.mirrored)[index]

    def order(self) -> list[tuple[int, int, int]]:
        """The stretches of units from the first on: each one's rank, its start among that rank's, and its length."""
        found = []
        for rank, ranges in enumerate(unit_ranges(self.sizes, self.mirrored)):
            base = 0
            for start, stop in ranges:
                found.append((start, rank, base, stop - start))
                base += stop - start
        return [(rank, base, size) for _, rank, base, size in sorted(found)]

    def local_extent(self, index: int) -> int:
        """Length of the dim on rank *index*."""
        return sum(segment.outer * self.sizes[index] * segment.inner for segment in self.segments)

    @property
    def even(self) -> bool:
        """Whether every rank has the same number of units."""
        return len(set(self.sizes)) <= 1

    @property
    def contiguous(self) -> bool:
        """Whether each rank's shard is one contiguous range of the dim."""
        return len(self.segments) == 1 and self.segments[0].outer == 1 and not self.mirrored

    def intervals(self, index: int) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the whole dim on rank *index*, in their local order."""
        found: list[tuple[int, int]] = []
        base = 0
        for segment in self.segments:
            for outer in range(segment.outer):
                for start, stop in self.ranges(index):
                    first = base + outer * segment.size * segment.inner
                    found.append((first + start * segment.inner, first + stop * segment.inner))
            base += segment.extent
        return tuple(found)


@lru_cache(maxsize=4096)
def unit_ranges(sizes: tuple[int, ...], mirrored: bool) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The half-open ranges of the units of each rank, one after the other.

    *mirrored*: half of each rank's units are in this order from the start, the others in the same order from the end.
    Then the units of each rank lie as far from the start on average, so that what a causal attention computes for them
    is proportional to their number.

    >>> unit_ranges((2, 4, 2), False)
    (((0, 2),), ((2, 6),), ((6, 8),))
    >>> unit_ranges((2, 4, 2), True)
    (((0, 1), (7, 8)), ((1, 3), (5, 7)), ((3, 5),))
    """
    fronts = [(size + 1) // 2 for size in sizes] if mirrored else list(sizes)
    first, last = 0, sum(sizes)
    found = []
    for size, front in zip(sizes, fronts, strict=True):
        ranges = [(first, first + front), (last - (size - front), last)]
        if ranges[0][1] == ranges[1][0]:
            ranges = [(first, last)] if size > front else ranges[:1]
        found.append(tuple((start, stop) for start, stop in ranges if start < stop))
        first, last = first + front, last - (size - front)
    return tuple(found)


def numel(shape: tuple[int, ...]) -> int:
    """Number of elements of a tensor of this shape."""
    return prod(shape)
