"""The model's output of a step, whole, from the parts that ranks compute in micro-batches.

A tensor is cut, or a sum of terms, over micro-batches and ranks; each rank sends everything that it has to give in one
message. Knows ranks, tensors and where their parts are; no graphs and no placements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.runtime.launch import World
from whale.runtime.local_program import Intervals
from whale.runtime.stage import rectangles

__all__ = ["Outputs", "Piece", "put"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a tensor of the output, or a term of it, which *rank* computes in a micro-batch."""

    number: int
    rank: int
    micro_batch: int
    intervals: Intervals

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(sum(stop - start for start, stop in dim) for dim in self.intervals)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The tensors of the model's output by number, and how they are made: equal on every rank.

    Attributes:
        shapes, dtypes: of the whole tensors.
        pieces: which are added up to them.
        filled: makes the model's output of them.
    """

    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[torch.dtype]
    pieces: Sequence[Piece]
    filled: Callable[[Sequence[Tensor]], Any]

    @cached_property
    def _by_rank(self) -> dict[int, list[Piece]]:
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            if prod(piece.shape):
                found.setdefault(piece.rank, []).append(piece)
        return dict(sorted(found.items()))

    def gather(self, world: World, own: Mapping[tuple[int, int], Tensor], to: int | None) -> Any:
        """The output on every rank, or on rank *to* alone; None on the others.

        Args:
            world: all ranks, each of which calls it.
            own: the tensors that this rank has computed, by number and micro-batch.
            to: the rank that gets it; None: all of them.

        Raises:
            WorkerError: a rank did not come within the timeout; names it.
        """
        receives = to is None or to == world.rank
        whole = [
            torch.zeros(shape, dtype=dtype, device=world.device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
            if receives
        ]
        for rank, pieces in self._by_rank.items():
            message = None
            if rank == world.rank and (to is None or to != rank) and world.size > 1:
                parts = [own[piece.number, piece.micro_batch].contiguous().reshape(-1) for piece in pieces]
                message = torch.cat([part.view(torch.uint8) for part in parts])
            elif rank != world.rank and receives:
                sizes = [prod(piece.shape) * self.dtypes[piece.number].itemsize for piece in pieces]
                message = torch.empty(sum(sizes), dtype=torch.uint8, device=world.device)
            if message is not None:
                self._exchange(world, message, rank, to)
            if not receives:
                continue
            place = 0
            for piece in pieces:
                if rank == world.rank:
                    part = own[piece.number, piece.micro_batch]
                else:
                    dtype = self.dtypes[piece.number]
                    stop = place + prod(piece.shape) * dtype.itemsize
                    part, place = message[place:stop].clone().view(dtype).view(piece.shape), stop  # type: ignore[index]
                put(whole[piece.number], part, piece.intervals, add=True)
        return self.filled(whole) if receives else None

    def _exchange(self, world: World, message: Tensor, rank: int, to: int | None) -> None:
        if to is None:
            work = dist.broadcast(message, rank, async_op=True)
        else:
            work = dist.isend(message, to) if rank == world.rank else dist.irecv(message, rank)
        assert work is not None
        among = range(world.size) if to is None else (rank, to)
        world.failures.wait(work, f"the model's output on rank {rank}", among)


def put(whole: Tensor, piece: Tensor, intervals: Intervals, *, add: bool = False) -> None:
    """Write a part to its position in the whole tensor, or *add* it there."""
    for box in rectangles(intervals):
        target = whole[box.whole]
        if not add:
            target.copy_(piece[box.part])
        elif whole.dtype == torch.bool:
            target |= piece[box.part]
        else:
            target += piece[box.part]
