"""The parts of a tensor on ranks, and which of them ranks exchange so that it becomes whole. It moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from whale.ir.check import CollectiveCall
from whale.runtime.local_program import Intervals

__all__ = ["Gathered", "Shard", "gather_calls", "gathered_parts"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Location of a tensor: its whole shape, and the part on every rank that has one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[int, Intervals]
    trainable: bool = True

    def distinct(self) -> dict[Intervals, int]:
        """Every distinct part, with the lowest rank that has it."""
        found: dict[Intervals, int] = {}
        for rank in sorted(self.parts):
            found.setdefault(self.parts[rank], rank)
        return found

    @property
    def whole(self) -> Intervals:
        """The part that is all of it."""
        return tuple(((0, size),) for size in self.shape)

    def ranks_of_columns(self, rank: int) -> tuple[int, ...]:
        """The ranks that have this rank's rows, if some have other columns of them than others; else none."""
        own = self.parts[rank]
        alike = [other for other, part in self.parts.items() if part[:1] == own[:1]]
        return tuple(sorted(alike)) if any(self.parts[other] != own for other in alike) else ()

    def of_first_dims(self, count: int) -> Shard:
        """Location of a tensor that has only the first dims, such as a state of each row of a table."""
        parts = {rank: part[:count] for rank, part in self.parts.items()}
        return replace(self, shape=self.shape[:count], parts=parts)


class Gathered(NamedTuple):
    """A part of a tensor that becomes whole: who sends it, and the ranks that take part."""

    intervals: Intervals
    owner: int
    ranks: tuple[int, ...]


def gathered_parts(shard: Shard, size: int, to: int | None) -> Iterator[Gathered]:
    """The parts of a tensor that ranks exchange, in their order, so that all have the whole of it, or rank *to* has."""
    receivers = range(size) if to is None else (to,)
    if all(shard.parts.get(receiver) == shard.whole for receiver in receivers):
        return
    for intervals, owner in shard.distinct().items():
        if all(any(a < b for a, b in dim) for dim in intervals):
            yield Gathered(intervals, owner, tuple(sorted({owner, *receivers})))


def gather_calls(
    shards: Mapping[str, Shard], names: Iterable[str], size: int, to: int | None, rank: int
) -> Iterator[CollectiveCall]:
    """Collectives of a rank while tensors of these names become whole, as when a checkpoint is written."""
    for name in names:
        shard = shards[name]
        for number, piece in enumerate(gathered_parts(shard, size, to)):
            if rank in piece.ranks and len(piece.ranks) > 1:
                dtype = str(shard.dtype).removeprefix("torch.")
                yield CollectiveCall(f"part {number} of {name}", "gather", piece.ranks, dtype, (shard.shape,))
