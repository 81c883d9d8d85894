"""Copies between the host and a rank's device: to it without waiting, as of the parts of a batch that the rank reads.

Knows tensors and devices; no batches and no steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whale.runtime.local_program import Intervals
from whale.runtime.recording import is_recording
from whale.runtime.stage import part

__all__ = ["OnHost", "download", "upload"]


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. One that comes from the host to a GPU goes through memory of its own, from which the device
    copies later: the script may write to its tensor at once."""
    if device.type != "cuda" or x.device.type != "cpu" or is_recording():
        return x.to(device)
    return _pinned(x).to(device, non_blocking=True)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors on the host, which waits until all are there; those that are stay the same."""
    if is_recording():
        return [x.to("cpu") for x in tensors]
    found = [_blank(x).copy_(x, non_blocking=True) if x.is_cuda else x.to("cpu") for x in tensors]
    if any(x.is_cuda for x in tensors):
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()
    return found


def _blank(x: Tensor) -> Tensor:
    """Memory on the host to which the device can write by itself."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)


def _pinned(x: Tensor) -> Tensor:
    """A copy that the device can read by itself; torch keeps its memory until it has."""
    return _blank(x).copy_(x)


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

    def on_host(self, intervals: Intervals) -> Tensor:
        """The same where the script has it."""
        return part(self._tensor, intervals)
