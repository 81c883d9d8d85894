"""The global loss: a sum over all ranks that travels while the last backward runs, and what it tells of their batches.

Knows ranks and numbers; no stages and no schedules.
"""

from __future__ import annotations

from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from whale.errors import UsageError
from whale.runtime.launch import World

__all__ = ["GlobalLoss"]


class GlobalLoss:
    """The sum of one step's loss over the ranks.

    Args:
        world: all ranks.
        group: of all of them, for this alone, because a rank may begin long before another.
        given: what this rank was given, in words that are equal on all ranks if the batches are alike.
        counts: whether this rank's loss is a term of the sum.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None, given: str, counts: bool) -> None:
        self._world, self._group, self._counts = world, group, counts
        self._label = float(crc32(given.encode()) % 2**16)
        self._loss: Tensor | None = None
        self._total: Tensor | None = None
        self._work: dist.Work | None = None

    def begin(self, loss: Tensor | None) -> None:
        """Send this rank's loss on its way; None if it computes none."""
        self._loss = loss
        if self._world.size == 1:
            return
        counted = 0.0 if loss is None or not self._counts else loss.to(torch.float64)
        # What every rank was given travels with the loss: all labels are equal if n times the squares' sum is the sum's
        # square. Whole numbers of this size are exact, for up to 1024 ranks.
        self._total = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        self._total[0], self._total[1], self._total[2] = counted, self._label, self._label * self._label
        self._work = dist.all_reduce(self._total, group=self._group, async_op=True)

    def finish(self, check: bool, given: str) -> Tensor:
        """Wait for the sum and return it.

        Args:
            check: look whether all ranks were given alike batches.
            given: this rank's, in words, for the error.

        Raises:
            UsageError: they were not.
            WorkerError: a rank did not come within the timeout.
        """
        if self._total is None or self._work is None:
            assert self._loss is not None
            return self._loss
        world = self._world
        what, ranks = "the sum of the loss", range(world.size)
        world.failures.wait(self._work, what, ranks, blocking=world.device.type == "cpu")
        if check:
            _, label, squares = self._total.tolist()
            if world.size * squares != label * label:
                raise UsageError(
                    f"rank {world.rank} was given a batch of {given}, and another rank one of other names, "
                    "shapes or dtypes; give every rank the same global batch, as whale.shard_dataset does"
                )
        return self._total[0].clone() if self._loss is None else self._total[0].to(self._loss.dtype)
