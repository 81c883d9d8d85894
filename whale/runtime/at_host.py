"""Parts of a local graph that compute in the host's memory, such as look-ups in embedding tables that are there.

What they read of the batch is read on the host, what they read of the device is copied there, and their results are
copied to the device; gradients go the other way. The host waits for what it copies, the device for nothing. It knows
tensors and graphs; nothing of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from whale.runtime.local_program import LocalCode
from whale.runtime.uploads import download, upload

__all__ = ["AtHost", "counted_apart", "on_host"]

Apart = Callable[[], AbstractContextManager[Any]]

_apart: list[Apart] = []


@contextmanager
def counted_apart(apart: Apart) -> Iterator[None]:
    """Run what is on the host in a context of its own, and copy results even where device and host are one, as a dry
    run does that counts a device's memory."""
    _apart.append(apart)
    try:
        yield
    finally:
        _apart.pop()


class AtHost(nn.Module):
    """A part of a graph that computes in the host's memory.

    Args:
        code: a function of tensors on the host that returns one.
        there: whether each of these is in the host's memory for good; others are given where they are.
    """

    is_opaque = True
    """Whether operators in its place do not show what it keeps: that is in the host's memory."""

    def __init__(self, code: LocalCode, there: tuple[bool, ...]) -> None:
        super().__init__()
        self.code, self.there = code, there

    def forward(self, like: Tensor, *tensors: Tensor) -> Tensor:
        """The result of the code, on the device of a tensor *like* it."""
        found: Tensor = _AtHost.apply(self, torch.is_grad_enabled(), like.device, *tensors)
        return found


class _AtHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: AtHost, trains: bool, device: torch.device, *tensors: Tensor) -> Tensor:
        pairs = list(zip(tensors, module.there, strict=True))
        with on_host(), torch.set_grad_enabled(trains):
            coming = iter(download([x for x, there in pairs if not there]))
            own = [x if there else next(coming) for x, there in pairs]
            wants = [trains and x.requires_grad for x in tensors]
            given = [x.detach().requires_grad_(wanted) for x, wanted in zip(own, wants, strict=True)]
            (found,) = module.code(*given)
        ctx.given, ctx.found, ctx.there, ctx.device = given, found, module.there, device
        return _brought(found.detach(), device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [x for x in ctx.given if x.requires_grad]
        with on_host():
            made = iter(torch.autograd.grad(ctx.found, wanted, download([grad])))
        gradients = [next(made) if x.requires_grad else None for x in ctx.given]
        pairs = zip(gradients, ctx.there, strict=True)
        return None, None, None, *(x if x is None or there else _brought(x, ctx.device) for x, there in pairs)


def on_host() -> AbstractContextManager[Any]:
    """Context of what is on the host."""
    return _apart[-1]() if _apart else nullcontext()


def _brought(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device."""
    return x.clone() if _apart else upload(x, device)
