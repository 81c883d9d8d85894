"""Communication hooks of `torch.nn.parallel.DistributedDataParallel`, on the buckets that they fit.

A hook gets what DDP would give it: this rank's gradient, as if the loss were the mean over its own rows, in a bucket;
it returns the mean over the ranks, later. So torch's hooks, such as PowerSGD and casts, are used as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.errors import UsageError

__all__ = ["CommHook", "HookedBucket", "HookedSum"]


class HookedBucket:
    """A bucket as hooks read one of DDP's: `torch.distributed.GradBucket`.

    Args:
        number: of the bucket, the same in every step.
        total: the gradients of all parameters, one after the other.
        parameters: in the same order.
        last: whether it is the step's last one with a hook.
    """

    def __init__(self, number: int, total: Tensor, parameters: Sequence[Any], last: bool) -> None:
        self._number, self._total, self._last = number, total, last
        self._parameters = list(parameters)

    def index(self) -> int:
        """The number of the bucket."""
        return self._number

    def buffer(self) -> Tensor:
        """The gradients in one vector."""
        return self._total

    def set_buffer(self, tensor: Tensor) -> None:
        """Use another vector in place of the gradients'."""
        self._total = tensor

    def gradients(self) -> list[Tensor]:
        """The gradient of each parameter, a view of the vector."""
        parts = self._total.split([prod(one.shape) for one in self._parameters])
        return [part.view(one.shape) for part, one in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[Any]:
        """The parameters."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether no other bucket of the step follows."""
        return self._last


@dataclass(frozen=True)
class HookedSum:
    """A sum that a hook has started."""

    name: str
    future: Any
    total: Tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, or without a *timeout* let the device's queue wait, and write it to the gradients.

        Raises:
            RuntimeError: the hook failed, or its future has no result in time.
            UsageError: the result is another than the mean of the bucket's gradients.
        """
        if timeout is not None:
            done = threading.Event()
            self.future.add_done_callback(lambda future: done.set())
            if not done.wait(timeout.total_seconds()):
                raise RuntimeError(f"the future of the communication hook {self.name} has no result")
        found = self.future.wait()
        mean = found[0] if isinstance(found, (list, tuple)) and found else found
        if not isinstance(mean, Tensor) or mean.numel() != self.total.numel():
            what = f"of {mean.numel()} elements" if isinstance(mean, Tensor) else f"which is a {type(mean).__name__}"
            raise UsageError(
                f"the communication hook {self.name} gave a result {what} for a bucket of {self.total.numel()}: the "
                "result of its future is a tensor, the mean of the bucket's buffer over the ranks"
            )
        if mean.data_ptr() != self.total.data_ptr():
            self.total.copy_(mean.view(-1))
        return True


@dataclass(frozen=True)
class CommHook:
    """A hook, with its state, and the ranks among which it communicates."""

    hook: Callable[[Any, Any], Any]
    state: Any
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, hook: Callable[[Any, Any], Any], state: Any) -> CommHook:
        """A hook with the group that its state is or has; by default, all ranks. A group of other ranks, for which
        `torch.distributed.new_group` has a number in place of a group, has no rank here.

        Raises:
            UsageError: it is no function.
        """
        if not callable(hook):
            raise UsageError(
                f"a communication hook is a function of its state and a bucket, not a {type(hook).__name__}: "
                "model.register_comm_hook(state, hook)"
            )
        group = (
            state
            if isinstance(state, dist.ProcessGroup) or _is_elsewhere(state)
            else getattr(state, "process_group", None)
        )
        ranks = [] if _is_elsewhere(group) else dist.get_process_group_ranks(group)
        return cls(hook, state, tuple(sorted(ranks)))

    @property
    def name(self) -> str:
        """The name of its function."""
        return getattr(self.hook, "__name__", type(self.hook).__name__)

    def fits(self, bucket: Any) -> bool:
        """Whether it can make the sum of a bucket: a plain one, of dense gradients, over its ranks."""
        is_plain = bucket.unit is None and bucket.adasum is None and bucket.dtype is None and not bucket.rows
        return is_plain and bucket.group is not None and tuple(sorted(bucket.ranks)) == self.ranks

    def check(self, buckets: Iterable[Any], warn: Callable[[str], None]) -> None:
        """Warn of buckets of a rank that it does not fit.

        Raises:
            UsageError: it fits none.
        """
        summed = [bucket for bucket in buckets if bucket.group is not None or bucket.unit is not None]
        fitting = [bucket for bucket in summed if self.fits(bucket)]
        if summed and not fitting:
            raise UsageError(
                f"the communication hook {self.name} of ranks {list(self.ranks)} fits no sum of gradients: it makes "
                "those of dense gradients over exactly its ranks, not divided (zero, offload), combined (adasum, "
                "server) or in another number type (gradient_dtype). Its state can be the process group of ranks that "
                "sum, or have it as process_group"
            )
        if len(fitting) < len(summed):
            warn(
                f"the communication hook {self.name} makes {len(fitting)} of {len(summed)} sums of gradients; the "
                "others are of sparse or divided gradients, or over other ranks"
            )

    def start(self, number: int, total: Tensor, parameters: Sequence[Any], last: bool) -> HookedSum:
        """Start a sum.

        Raises:
            UsageError: what the hook returns is no future.
        """
        total.mul_(len(self.ranks))  # terms of a sum become gradients whose mean it is
        with torch.no_grad():
            future = self.hook(self.state, HookedBucket(number, total, parameters, last))
        if not isinstance(future, torch._C.Future):
            raise UsageError(
                f"the communication hook {self.name} returned a {type(future).__name__}; it returns a "
                "torch.futures.Future of the mean, such as work.get_future() of a collective"
            )
        return HookedSum(self.name, future, total)


def _is_elsewhere(group: object) -> bool:
    """Whether it is what `torch.distributed.new_group` returns to ranks that are not in the group."""
    return isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER
