"""The rows of the global batch of a job that may go on with another batch, and the learning rate that goes with them.

It knows no ranks: the script says how many rows a step has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from whale.arguments import check_count, check_type
from whale.errors import UsageError

__all__ = ["BatchSize"]


class BatchSize:
    """Rows of the global batch, saved and loaded with a checkpoint.

    Where a job goes on with others, `follow` scales the learning rate.

    The rule: in proportion to the rows for `torch.optim.SGD` (Goyal et al., 2017), to their square root for all other
    optimizers, which divide gradients by their size (Malladi et al., 2022).

    Args:
        rows: of a step, from now on.

    >>> parameter = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.AdamW([parameter], lr=0.1)
    >>> size = BatchSize(64)
    >>> size.load_state_dict({"rows": 256})  # as load_checkpoint does
    >>> size.follow(optimizer), optimizer.param_groups[0]["lr"]
    (0.5, 0.05)
    """

    def __init__(self, rows: int) -> None:
        check_count("rows", rows)
        self.rows = rows
        self._before = rows

    def state_dict(self) -> dict[str, Any]:
        """The rows."""
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the rows of this attempt, and remember those of the checkpoint."""
        before = state.get("rows")
        if not isinstance(before, int) or before < 1:
            raise UsageError(f"the state of a BatchSize is {state!r}, not its rows")
        self._before = before

    def follow(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None) -> float:
        """Scale the learning rates of an optimizer and its scheduler from the rows of the checkpoint to those of this
        attempt. Call it after ``load_checkpoint``; a second call does nothing.

        Returns:
            The factor; 1 if the rows are the same, or nothing was loaded.
        """
        check_type("optimizer", optimizer, torch.optim.Optimizer, "a torch optimizer")
        ratio = self.rows / self._before
        factor = ratio if isinstance(optimizer, torch.optim.SGD) else math.sqrt(ratio)
        self._before = self.rows
        for group in optimizer.param_groups:
            for key in ("lr", "initial_lr", "max_lr", "min_lr"):
                if key in group:
                    group[key] = group[key] * factor
        if scheduler is not None:
            for name in ("base_lrs", "_last_lr"):
                if hasattr(scheduler, name):
                    setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
        return factor
