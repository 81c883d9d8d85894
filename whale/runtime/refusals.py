"""Refusals of steps: a rank that refuses a step tells those that wait for it there.

Every step begins with one collective, in which ranks compare their batches. A rank that refuses joins it with a mark in
place of its batch, and has written why; the others find the mark and raise an error that names the rank. It costs
nothing in a step that no rank refuses. Knows ranks and texts; no batches.
"""

from __future__ import annotations

import atexit
import time
from typing import Any

import torch.distributed as dist

from whale.errors import UsageError, WhaleError
from whale.runtime.launch import World
from whale.runtime.store import Board

__all__ = ["Refusals"]

MOST_SECONDS_AT_EXIT = 1.0
"""For which a process that ends waits for the other ranks to join the collectives of its refusals."""

_joined: list[dist.Work] = []
"""Collectives that this process joined to refuse steps; nothing waits for them."""


class Refusals:
    """The refusals of steps whose first collectives are of one process group; all ranks make one in one order.

    Attributes:
        joined: how many first collectives this rank has joined.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._board = Board(world, "refusals", world.failures.timeout_seconds)
        self.joined = 0

    def tell(self, error: Exception) -> None:
        """Write why this rank refuses the step, before it joins the first collective with a mark."""
        text = str(error) if isinstance(error, WhaleError) else f"{type(error).__name__}: {error}"
        self._board.put(str(self.joined + 1), [self._world.rank, text])

    def join(self, work: dist.Work) -> None:
        """Keep the first collective of a step that this rank refuses until it is done, or the process ends: a thread
        that releases the last tensor of one while Python ends aborts the process."""
        if not _joined:
            atexit.register(_settle)
        _joined[:] = [*(one for one in _joined if not one.is_completed()), work]

    def told_by_all(self, mine: Any) -> list[Any]:
        """A value of each rank, by rank, where all have found in the last first collective that they differ."""
        self._board.put(f"{self.joined} of {self._world.rank}", mine)
        return [self._board.get(f"{self.joined} of {rank}", rank) for rank in range(self._world.size)]

    def found(self) -> UsageError:
        """The error on a rank that finds a mark in the collective that it joined last."""
        rank, text = self._board.get(str(self.joined), None)
        return UsageError(f"rank {rank} refused the step: {text}")


def _settle() -> None:
    until = time.monotonic() + MOST_SECONDS_AT_EXIT
    while time.monotonic() < until and not all(work.is_completed() for work in _joined):
        time.sleep(0.001)
