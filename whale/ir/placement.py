"""Placement of a tensor on one mesh axis, and the cut of a dim into shards.

A placement is a *pair* (value, gradient), because the two differ in two of the four cases:

=====================  ==================  ==================
placement              value               gradient
=====================  ==================  ==================
``REPLICATE``          whole on each rank  whole on each rank
``REPLICATE_PARTIAL``  whole on each rank  a term of a sum
``Shard``              a part              a part
``PARTIAL``            a term of a sum     whole on each rank
=====================  ==================  ==================

``REPLICATE_PARTIAL`` is the placement of a replicated value, with partial gradient, that each rank uses for another
part of the work: Megatron's *f* operator, and the gradient all-reduce of data parallelism, are its bridge. This module
knows sizes and positions only: no torch, no process groups, no graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple


class Placement(NamedTuple):
    """Placement of a tensor on one mesh axis. Use the constants, or :func:`shard`.

    ``dim`` and ``factor`` are set for shards only: the sharded tensor dim and the axis factor (see ``strategies.axes``)
    along which it is cut.
    """

    kind: Literal["R", "R*", "S", "P"]
    dim: int = -1
    factor: int = -1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind

    @property
    def gradient(self) -> Literal["R", "S", "P"]:
        """The kind of the gradient in this placement."""
        return _GRADIENT[self.kind]

    @property
    def value(self) -> Literal["R", "S", "P"]:
        """The kind of the value in this placement."""
        return "R" if self.kind == "R*" else self.kind


_GRADIENT: dict[str, Literal["R", "S", "P"]] = {"R": "R", "R*": "P", "S": "S", "P": "R"}

REPLICATE = Placement("R")
REPLICATE_PARTIAL = Placement("R*")
PARTIAL = Placement("P")


def shard(dim: int, factor: int) -> Placement:
    """A tensor sharded along axis factor *factor* of its dim *dim*."""
    return Placement("S", dim, factor)


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
    equal for every segment.

    >>> cut = Cut(dim=0, segments=(Segment(3, 4, 16),), sizes=(3, 1))
    >>> cut.extent, cut.local_extent(0), cut.local_extent(1)
    (192, 144, 48)
    >>> cut.intervals(1)
    ((48, 64), (112, 128), (176, 192))
    """

    dim: int
    segments: tuple[Segment, ...]
    sizes: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Length of the whole dim."""
        return sum(segment.extent for segment in self.segments)

    def start(self, index: int) -> int:
        """First unit of rank *index*."""
        return sum(self.sizes[:index])

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
        return len(self.segments) == 1 and self.segments[0].outer == 1

    def intervals(self, index: int) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the whole dim on rank *index*, in their local order."""
        start, size = self.start(index), self.sizes[index]
        found: list[tuple[int, int]] = []
        base = 0
        for segment in self.segments:
            for outer in range(segment.outer):
                first = base + (outer * segment.size + start) * segment.inner
                if size:
                    found.append((first, first + size * segment.inner))
            base += segment.extent
        return tuple(found)


def numel(shape: tuple[int, ...]) -> int:
    """Number of elements of a tensor of this shape."""
    return prod(shape)
