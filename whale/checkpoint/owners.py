"""The owners of elements, that is the ranks that write them: each element is written once, and the bytes of ranks that
have copies are levelled. It knows shapes and parts; every rank computes the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from whale.checkpoint.format import Intervals, length, whole
from whale.runtime.owned import rows_of

__all__ = ["TILE", "Held", "Written", "tiles", "written_by", "written_parts"]

DIVIDED_BYTES = 1 << 20
"""Copies of a part of at least as many bytes are written by several ranks, some rows each."""

TILE = 256
"""Columns of what is written together: a rank that reads some columns of a matrix, as under tensor parallelism, reads
little else."""


@dataclass(frozen=True)
class Held:
    """A tensor and the part of it that each rank has."""

    shape: tuple[int, ...]
    element_bytes: int
    parts: Mapping[int, Intervals]


@dataclass(frozen=True)
class Written:
    """A part of a tensor that a rank writes."""

    name: str
    at: Intervals
    rank: int


def written_parts(tensors: Mapping[str, Held]) -> list[Written]:
    """Divide tensors among ranks, so that every element is written by one that has it.

    Elements of one rank alone come first; then copies, the largest first, in rows to the ranks that have least so far.
    It is a heuristic: the largest load is at most that of an even division plus the largest part that is not divided.

    >>> both = dict.fromkeys(range(2), (((0, 4),),))
    >>> written_parts({"a": Held((4,), 4, both), "b": Held((4,), 4, both)})
    [Written(name='a', at=(((0, 4),),), rank=0), Written(name='b', at=(((0, 4),),), rank=1)]
    """
    load = dict.fromkeys((rank for held in tensors.values() for rank in held.parts), 0)
    jobs = []
    for name, held in tensors.items():
        for at, ranks in _distinct(held):
            if size := prod(map(length, at)) * held.element_bytes:
                jobs.append((size, name, at, ranks))
    jobs.sort(key=lambda job: (len(job[3]) > 1, -job[0], job[1], job[2]))
    found = []
    for size, name, at, ranks in jobs:
        for rank, own in _divided(size, at, ranks, load):
            found.append(Written(name, own, rank))
    return found


def written_by(rank: int, parts: Sequence[Written]) -> tuple[dict[str, list[Intervals]], set[str]]:
    """The parts of each tensor that a rank writes, and the tensors of which it writes the first element, and what is
    not divided."""
    first: dict[str, tuple[Intervals, int]] = {}
    own: dict[str, list[Intervals]] = {}
    for one in parts:
        if one.name not in first or one.at < first[one.name][0]:
            first[one.name] = one.at, one.rank
        if one.rank == rank:
            own.setdefault(one.name, []).append(one.at)
    return own, {name for name, (_, writer) in first.items() if writer == rank}


def _distinct(held: Held) -> Iterator[tuple[Intervals, list[int]]]:
    """Parts that have no element in common and have all of them together, with the ranks that have each."""
    ranks: dict[Intervals, list[int]] = {}
    for rank in sorted(held.parts):
        ranks.setdefault(held.parts[rank], []).append(rank)
    if whole(held.shape) in ranks or sum(prod(map(length, at)) for at in ranks) == prod(held.shape):
        every = ranks.get(whole(held.shape))
        yield from ranks.items() if every is None else [(whole(held.shape), every)]
        return
    cuts = [sorted({end for at in ranks for stretch in at[dim] for end in stretch}) for dim in range(len(held.shape))]
    for cell in product(*(list(pairwise(ends)) for ends in cuts)):
        having = [
            rank
            for at, several in ranks.items()
            for rank in several
            if all(any(a <= x and y <= b for a, b in dim) for (x, y), dim in zip(cell, at, strict=True))
        ]
        if having:
            yield tuple((stretch,) for stretch in cell), sorted(having)


def _divided(size: int, at: Intervals, ranks: Sequence[int], load: dict[int, int]) -> Iterator[tuple[int, Intervals]]:
    """The rows of a part that each of its ranks writes."""
    rows = length(at[0]) if at else 1
    least = sorted(ranks, key=lambda rank: (load[rank], rank))
    if len(ranks) == 1 or size < DIVIDED_BYTES or rows < len(ranks):
        load[least[0]] += size
        yield least[0], at
        return
    for count in range(len(least), 0, -1):  # as many as reach one level with it
        level = (sum(load[rank] for rank in least[:count]) + size) / count
        if level >= load[least[count - 1]]:
            break
    done, ideal = 0, 0.0
    for place, rank in enumerate(least[:count]):
        ideal += (level - load[rank]) * rows / size
        end = rows if place == count - 1 else min(rows, round(ideal))
        if end > done:
            load[rank] += (end - done) * size // rows
            yield rank, rows_of(at, done, end)
        done = max(done, end)


def tiles(at: Intervals) -> list[Intervals]:
    """A part of a matrix in tiles of some columns."""
    if len(at) != 2 or length(at[1]) < 2 * TILE:
        return [at]
    columns = length(at[1])
    return [(at[0], rows_of(at[1:], start, start + TILE)[0]) for start in range(0, columns, TILE)]
