"""Halo exchange: the rows that windows at the edge of a shard read from neighbouring ranks.

Each rank of a mesh axis owns a range of a dim and reads another, which overlaps the ranges of its neighbours (of
several, if shards are thin) and extends into padding at the two true ends. The rows are sent in one all-to-all, in
which ranks that are not neighbours exchange nothing; the gradients of those rows return the same way and are added. It
knows tensors, ranges and process groups; nothing of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.runtime.collectives import CollectiveModule, DryGroup
from whale.runtime.ranges import named
from whale.runtime.recording import call, is_recording

__all__ = ["Halo", "Reach", "Stretch", "WindowedCall"]

Stretch = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The owned and the read ranges of the ranks of a mesh axis.

    Attributes:
        dim: of the tensor.
        held: owned by each rank, half-open, consecutive.
        read: by each rank, inside the whole dim.
        padding: rows before and after, on this rank.
        value: of the padding.

    >>> Reach(dim=2, held=((0, 4), (4, 6)), read=((0, 5), (3, 6)), padding=(1, 0), value=0.0).moved(0, 1)
    (3, 4)
    """

    dim: int
    held: tuple[Stretch, ...]
    read: tuple[Stretch, ...]
    padding: Stretch
    value: float

    def moved(self, source: int, target: int) -> Stretch:
        """The range that rank *source* owns and rank *target* reads."""
        start = max(self.held[source][0], self.read[target][0])
        return start, max(start, min(self.held[source][1], self.read[target][1]))

    def num_moved(self, source: int, target: int) -> int:
        """Number of rows sent from one rank to another."""
        start, stop = self.moved(source, target)
        return 0 if source == target else stop - start


class Halo(CollectiveModule):
    """Exchanges the halo of a shard, and returns its gradients."""

    def __init__(self, reach: Reach, ranks: tuple[int, ...], index: int) -> None:
        super().__init__()
        self.reach, self.ranks, self.index = reach, ranks, index
        others = range(len(ranks))
        self.sent = [reach.num_moved(index, rank) for rank in others]
        self.received = [reach.num_moved(rank, index) for rank in others]
        self.most = max(sum(reach.num_moved(source, target) for target in others) for source in others)

    def forward(self, x: Tensor, kept: list[list[Tensor]]) -> Tensor:
        """*x* with the rows that this rank holds -> those that it reads, padding included; others' go to *kept* too."""
        if x.requires_grad:
            return _HaloFunction.apply(x, self, kept)
        return self.gather(x, kept)

    def gather(self, x: Tensor, kept: list[list[Tensor]]) -> Tensor:
        """Exchange the halo of this rank."""
        reach, own = self.reach, self.reach.held[self.index][0]
        outgoing = [(reach.moved(self.index, rank), own) for rank in range(len(self.ranks))]
        kept.append(self._exchange(x, outgoing, self.received))
        return self.assemble(x, kept[-1])

    def assemble(self, x: Tensor, received: Sequence[Tensor]) -> Tensor:
        """Own rows and those of others, by rank, in their positions between the padding."""
        reach, dim, index = self.reach, self.reach.dim, self.index
        own = reach.held[index][0]

        def padded(size: int) -> list[Tensor]:
            return [x.new_full((*x.shape[:dim], size, *x.shape[dim + 1 :]), reach.value)] if size else []

        rows = []
        for rank, piece in enumerate(received):
            start, stop = reach.moved(rank, index)
            if stop > start:
                rows.append(x.narrow(dim, start - own, stop - start) if rank == index else piece)
        before, after = reach.padding
        return torch.cat([*padded(before), *rows, *padded(after)], dim)

    def give_back(self, grad: Tensor) -> Tensor:
        """Send the gradients of others' rows back, and add those of own rows."""
        reach, dim, index = self.reach, self.reach.dim, self.index
        first, own = reach.read[index][0] - reach.padding[0], reach.held[index][0]
        outgoing = [(reach.moved(rank, index), first) for rank in range(len(self.ranks))]
        received = self._exchange(grad, outgoing, self.sent)
        shape = list(grad.shape)
        shape[dim] = reach.held[index][1] - own
        result = grad.new_zeros(shape)
        for rank, piece in enumerate(received):
            start, stop = reach.moved(index, rank)
            if stop > start:
                rows = grad.narrow(dim, start - first, stop - start) if rank == index else piece
                result.narrow(dim, start - own, stop - start).add_(rows)
        return result

    def _exchange(self, x: Tensor, pieces: Sequence[tuple[Stretch, int]], rows: Sequence[int]) -> list[Tensor]:
        """Send every other rank its range of *x*, which starts at a row of the whole, with the number of rows of
        each."""
        dim, counts = self.reach.dim, [0] * len(rows)
        outgoing = []
        for rank, ((start, stop), first) in enumerate(pieces):
            if rank != self.index and stop > start:
                outgoing.append(x.narrow(dim, start - first, stop - start).reshape(-1))
                counts[rank] = outgoing[-1].numel()
        shapes = [[*x.shape[:dim], count, *x.shape[dim + 1 :]] for count in rows]
        sizes = [prod(shape) for shape in shapes]
        if self.most:  # otherwise no rank reads another's rows
            sent = torch.cat(outgoing) if outgoing else x.new_empty(0)
            exchange = _HaloExchange(self, tuple(x.shape), sizes, counts)
            received = call(exchange, sent) if is_recording() else exchange(sent)
        else:
            received = x.new_empty(sum(sizes))
        return [piece.view(shape) for piece, shape in zip(received.split(sizes), shapes, strict=True)]

    def extra_repr(self) -> str:
        """The owned and read range of this rank."""
        held, read = self.reach.held[self.index], self.reach.read[self.index]
        return f"dim={self.reach.dim}, held={held}, read={read}, padding={self.reach.padding}, ranks={list(self.ranks)}"


class _HaloExchange(CollectiveModule):
    """The all-to-all of a halo: of what is sent, in the order of the ranks, to what is received.

    Args:
        halo: of which it is.
        shape: of the tensor from which the rows are.
        sizes, counts: elements received from and sent to each rank.
    """

    def __init__(self, halo: Halo, shape: tuple[int, ...], sizes: Sequence[int], counts: Sequence[int]) -> None:
        super().__init__()
        self.reach, self.ranks, self.group = halo.reach, halo.ranks, halo.group
        self.most, self.shape, self.sizes, self.counts = halo.most, shape, list(sizes), list(counts)

    def forward(self, sent: Tensor) -> Tensor:
        """Exchange flat tensors."""
        reach, received = self.reach, self.without_data(sent)
        if isinstance(self.group, DryGroup):
            busiest = [*self.shape]  # as if each sent as much as the one that sends most
            busiest[reach.dim] = self.most * len(self.ranks)
            held, read = ([b - a for a, b in stretches] for stretches in (reach.held, reach.read))
            self.group.note("all_to_all", sent, busiest, held, read)
        elif self.group is not None:
            with named("halo exchange dim %d", reach.dim):
                dist.all_to_all_single(received, sent, self.sizes, self.counts, group=self.group)
        return received

    def without_data(self, sent: Tensor) -> Tensor:
        """An empty tensor for what is received."""
        return sent.new_empty(sum(self.sizes))


class _HaloFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo, kept: list[list[Tensor]]) -> Tensor:
        ctx.halo = halo
        return halo.gather(x, kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.halo.give_back(grad), None, None


class WindowedCall(nn.Module):
    """A windowed operator, on a shard extended by its halos one dim after the other.

    The operator would save a copy of its operand with halos, in addition to the shard that its producer or other
    readers save. Here the shard and the halos are saved, and joined again in the backward.

    Args:
        target: the operator.
        arguments: its arguments by name, in order; those of *tensors* are passed in every call, the shard first.
        tensors: names of the arguments that are tensors.
        halos: in the order in which dims are extended, so that corners are included.
    """

    def __init__(
        self, target: Callable[..., Tensor], arguments: Mapping[str, Any], tensors: Sequence[str], halos: Sequence[Halo]
    ) -> None:
        super().__init__()
        self.target, self.arguments, self.tensors = target, dict(arguments), tuple(tensors)
        self.halos = nn.ModuleList(halos)
        self.without_rows = [h.reach.dim for h in halos if len(set(h.reach.held[h.index])) == 1]

    def forward(self, part: Tensor, *others: Tensor | None) -> Tensor:
        """Result of the operator for the windows of this rank."""
        kept: list[list[Tensor]] = []
        wide = part
        for halo in self.halos:
            wide = halo(wide, kept)
        own, shape, held = wide.untyped_storage()._cdata, wide.shape, part.detach()

        def pack(x: Tensor) -> Tensor | None:
            return None if x.untyped_storage()._cdata == own and x.shape == shape else x.detach()

        def unpack(x: Tensor | None) -> Tensor:
            return self._again(held, kept) if x is None else x

        given = {**self.arguments, **dict(zip(self.tensors, (wide, *others), strict=True))}
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = self.target(*given.values())
        for dim in self.without_rows:
            result = result.narrow(dim, 0, 0)
        return result

    def _again(self, part: Tensor, kept: Sequence[Sequence[Tensor]]) -> Tensor:
        with torch.no_grad():
            for halo, received in zip(self.halos, kept, strict=True):
                part = halo.assemble(part, received)  # type: ignore[operator]
        return part

    def extra_repr(self) -> str:
        """The operator."""
        return str(self.target)
