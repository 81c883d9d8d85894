"""The ranks of a collective that a script calls: they agree on the call before it begins, and wait with a timeout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from whale.arguments import check_type
from whale.errors import UsageError
from whale.ir.placement import Cut, Segment
from whale.runtime import collectives
from whale.runtime.launch import World, current
from whale.runtime.mesh_axes import Axis

__all__ = ["REDUCTIONS", "Group", "Members", "cut_of", "in_words", "members_of"]

Group = Axis | dist.ProcessGroup | DeviceMesh | None
"""The ranks that communicate: all (None), those of :func:`mesh_axis`, of a ``torch.distributed`` process group, or of a
``DeviceMesh`` with one dim."""

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
"""Reductions by the name that a script gives."""

_CALLS = (
    "all_reduce",
    "all_gather",
    "broadcast",
    "all_to_all",
    "all_gather_object",
    "broadcast_object",
    "all_to_all_object",
    "the gradient of all_gather",
    "the gradient of broadcast",
    "the gradient of all_to_all",
)
_DTYPES = tuple(
    sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=lambda dtype: str(dtype))
)
_MOST_DIMS = 12


class _Row(NamedTuple):
    """A rank's part of a call."""

    call: str
    option: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    extra: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.call} of {in_words(self.dtype, self.shape)}"

    @property
    def named_option(self) -> str:
        """The option in the caller's words."""
        if self.call == "all_reduce":
            return f"op={list(REDUCTIONS)[self.option]!r}"
        return f"{'dim' if 'gather' in self.call else 'root'}={self.option}"


def in_words(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A tensor in words.

    >>> in_words(torch.float32, (2, 3))
    'float32 (2, 3)'
    """
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


@dataclass(frozen=True)
class Members:
    """The ranks of a call."""

    world: World
    ranks: tuple[int, ...]
    index: int
    group: Any

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def check_root(self, root: int) -> None:
        """Refuse a root that is none of the ranks."""
        if root not in self.ranks or isinstance(root, bool):
            raise UsageError(f"root={root!r} is none of the ranks {list(self.ranks)} that communicate")

    def apply(self, run: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a collective on a tensor, on the device on which ranks communicate."""
        found = _Collective.apply(x.to(self.world.device), run, adjoint)
        return cast(Tensor, found).to(x.device)

    @contextmanager
    def waiting(self, call: str) -> Iterator[None]:
        """Turn the failures of communication into errors that name the rank."""
        try:
            yield
        except RuntimeError as error:
            raise self.world.failures.failed(call, error, self.ranks) from error

    def agree(self, call: str, x: Tensor, *, free: int = -1, option: int = 0, extra: Sequence[int] = ()) -> list[_Row]:
        """The parts of all ranks in a call, which must be alike, except in the size of the dim *free*.

        Args:
            call: its name.
            x: what this rank gives.
            free: dim in which shapes may differ.
            option: a number that is the same on all ranks.
            extra: numbers that may differ, as many on all ranks.

        Raises:
            UsageError: on every rank; names the ranks that differ.
            WorkerError: a rank did not come within the timeout; names it.
        """
        if x.dim() > _MOST_DIMS:
            raise UsageError(f"{call} of a tensor with {x.dim()} dims; the most is {_MOST_DIMS}: flatten it")
        own = _Row(call, option, x.dtype, tuple(x.shape), tuple(extra))
        if self.group is None:
            return [own]
        numbers = [_CALLS.index(call), option, _DTYPES.index(x.dtype), x.dim()]
        numbers += [*x.shape, *(0 for _ in range(_MOST_DIMS - x.dim())), *extra]
        # As many for all calls, because a rank may make another one.
        numbers += [0] * (4 + _MOST_DIMS + self.size - len(numbers))
        given = torch.tensor(numbers, dtype=torch.int64, device=self.world.device)
        told = given.new_empty(self.size * len(numbers))
        work = collectives.gather_single(told, given, group=self.group, async_op=True)
        what = f"{call}, which ranks {list(self.ranks)} must call"
        self.wait(work, what)
        rows = []
        for number, option, dtype, dims, *rest in told.view(self.size, -1).tolist():
            shape = tuple(rest[:dims])
            rows.append(_Row(_CALLS[number], option, _DTYPES[dtype], shape, tuple(rest[_MOST_DIMS:])))
        self._compare(rows, free)
        return rows

    def wait(self, work: Any, what: str) -> None:
        """Wait for communication, on a device in its queue."""
        is_cuda = self.world.device.type == "cuda"
        self.world.failures.wait(work, what, self.ranks, blocking=not is_cuda)
        if is_cuda and self.world.supervisor is not None:
            self.world.supervisor.check()
            done = torch.cuda.Event()
            done.record()
            self.world.supervisor.watch(what, done, self.world.failures.timeout_seconds)

    def _compare(self, rows: Sequence[_Row], free: int) -> None:
        def fixed(row: _Row) -> tuple[Any, ...]:
            return tuple(-1 if dim == free else length for dim, length in enumerate(row.shape))

        keys = [(row.call, row.option, row.dtype, fixed(row)) for row in rows]
        common, _ = Counter(keys).most_common(1)[0]
        if all(key == common for key in keys):
            return
        odd, first = next(i for i, key in enumerate(keys) if key != common), keys.index(common)
        one, other = rows[odd], rows[first]
        what = f"gives {one}, but rank {self.ranks[first]} {other}"
        if str(one) == str(other):
            what = f"calls {one.call} with {one.named_option}, but rank {self.ranks[first]} with {other.named_option}"
        may = "" if free < 0 else f"; the sizes of dim {free} may differ"
        raise UsageError(
            f"rank {self.ranks[odd]} {what}: ranks {list(self.ranks)} must make the same calls in the same order, with "
            f"tensors of one dtype and shape{may}"
        )

    def bytes_of(self, data: bytes) -> Tensor:
        """Bytes as a tensor on the device on which ranks communicate."""
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return held.to(self.world.device)

    def gather_bytes(self, call: str, data: bytes) -> list[bytes]:
        """The bytes of all ranks."""
        own = self.bytes_of(data)
        lengths = tuple(row.shape[0] for row in self.agree(call, own, free=0))
        with self.waiting(call):
            whole = collectives.all_gather(own, cut_of(0, lengths), self.index, self.group)
        return [part.numpy().tobytes() for part in whole.cpu().split(lengths)]


def cut_of(dim: int, lengths: Sequence[int]) -> Cut:
    """The parts of ranks along a dim."""
    return Cut(dim, (Segment(1, sum(lengths), 1),), tuple(lengths))


class _Collective(torch.autograd.Function):
    """A linear collective and its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.adjoint = adjoint
        return run(x.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def members_of(group: Group) -> Members:
    """The ranks of a group.

    Raises:
        UsageError: it is no group, or one without this rank; or this process has not joined the others.
    """
    world = current()
    if group is None:
        everyone = dist.group.WORLD if world.size > 1 else None
        return Members(world, tuple(range(world.size)), world.rank, everyone)
    if isinstance(group, Axis):
        return Members(world, group.ranks, group.index, group.group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(f"group is a DeviceMesh with {group.ndim} dims: give one of them, as in mesh['tp']")
        group = group.get_group()
    given: Any = group
    if not isinstance(given, dist.ProcessGroup):
        if given is dist.GroupMember.NON_GROUP_MEMBER:
            raise UsageError(f"rank {world.rank} is not in the group: call collectives on its ranks alone")
        check_type("group", given, dist.ProcessGroup, "a mesh axis, a process group, or a DeviceMesh with one dim")
    ranks = tuple(dist.get_process_group_ranks(given))
    return Members(world, ranks, dist.get_rank(given), given if len(ranks) > 1 else None)
