"""Copies of a batch from the host to a rank's device: the parts that the rank reads, without waiting for the device.

Knows tensors and devices; no batches and no steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whale.runtime.local_program import Intervals
from whale.runtime.stage import part

__all__ = ["OnHost", "upload"]


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. One that comes from the host to a GPU goes through memory of its own, from which the device
    copies later: the script may write to its tensor at once."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return _pinned(x).to(device, non_blocking=True)


def _pinned(x: Tensor) -> Tensor:
    """A copy that the device can read by itself; torch keeps its memory until it has."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


class OnHost:
    """A leaf of a global batch on the host; each part that a rank reads is copied to its device once a step."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor, self._device = tensor, device
        self._parts: dict[Intervals, Tensor] = {}

    def part(self, intervals: Intervals) -> Tensor:
        """The part that lies in these stretches of each dim."""
        if intervals not in self._parts:
            self._parts[intervals] = upload(part(self._tensor, intervals), self._device)
        return self._parts[intervals]
