"""Tensors in the host's memory for a while: a forward puts there what its backward reads, which fetches it in time.

Copies run on streams of their own, beside the computation: from a device with the first one, to it with the second.
Their memory on the device is the computation's, which waits for copies before it uses that again: the host runs ahead
of the device, and memory that waits for another stream (``record_stream``) would not be free when it asks for some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["OnHost", "arrived", "copied_by", "fetch", "to_host"]


@dataclass(eq=False)
class OnHost:
    """A tensor in the host's memory, and the event after which it is there."""

    tensor: Tensor
    device: torch.device
    copied: Any = None


@dataclass(eq=False)
class Fetched:
    """A tensor on its way to its device."""

    tensor: Tensor
    copied: Any = None


def _blank(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)


_blanks: list[Callable[[Tensor], Tensor]] = [_blank]


@contextmanager
def copied_by(blank: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Memory of the host is what *blank* gives for a tensor, as in a dry run."""
    _blanks.append(blank)
    try:
        yield
    finally:
        _blanks.pop()


@cache
def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


LEAVING = 2
"""Number of tensors that are copied to the host while the computation goes on; it waits for those before them."""


@cache
def _leaving(device: torch.device) -> deque[tuple[Tensor, Any]]:
    """Tensors that are copied to the host, whose memory is needed until then, and the events after which they are."""
    return deque()


def _wait_for(device: torch.device, count: int) -> None:
    """Let the computation wait for the oldest of the tensors that leave, whose memory is free then."""
    for _ in range(count):
        _, copied = _leaving(device).popleft()
        if copied is not None:
            torch.cuda.current_stream(device).wait_event(copied)


def to_host(x: Tensor) -> OnHost:
    """Start to copy a tensor without gaps to the host; its memory on the device is free when that is done, and the next
    few leave. On the meta device, which stands for one that copies by itself, memory lives as long."""
    found, copied = _blanks[-1](x), None
    if x.device.type == "cpu":
        return OnHost(found.copy_(x), x.device)
    if x.is_cuda:
        stream, copied = _stream(x.device, "to the host"), torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            found.copy_(x, non_blocking=True)
            copied.record()
    _leaving(x.device).append((x, copied))
    _wait_for(x.device, len(_leaving(x.device)) - LEAVING)
    return OnHost(found, x.device, copied)


def fetch(held: OnHost) -> Fetched:
    """Start to copy it back."""
    like, device = held.tensor, held.device
    _wait_for(device, len(_leaving(device)))
    found = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    if device.type != "cuda":
        return Fetched(found.copy_(like))
    stream, copied = _stream(device, "to the device"), torch.cuda.Event()
    stream.wait_event(held.copied)
    stream.wait_stream(torch.cuda.current_stream(device))  # which has used the memory before
    with torch.cuda.stream(stream):
        found.copy_(like, non_blocking=True)
        copied.record()
    return Fetched(found, copied)


def arrived(fetched: Fetched) -> Tensor:
    """The tensor on its device: what is computed next waits for the copy."""
    if fetched.copied is not None:
        torch.cuda.current_stream(fetched.tensor.device).wait_event(fetched.copied)
    return fetched.tensor
