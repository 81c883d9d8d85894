"""Rows of the neighbours: what windows at the edge of a part read, brought from the ranks that hold it.

Each rank of a mesh axis holds a stretch of a dim and reads another, which overlaps the stretches of its neighbours (of
several, where parts are thin) and reaches into padding at the two true ends. The rows go in one all-to-all, in which
ranks that are no neighbours exchange nothing; the gradients of those rows go back the same way and are added. Knows
tensors, stretches and process groups; nothing of operators.
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

__all__ = ["Halo", "Reach", "Stretch", "WindowedCall"]

Stretch = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What the ranks of a mesh axis hold and read of a dim.

    Attributes:
        dim: of the tensor.
        held: by each rank, half-open, one after the other.
        read: by each rank, inside the whole dim.
        padding: rows before and after, on this rank.
        value: that padding has.

    >>> Reach(dim=2, held=((0, 4), (4, 6)), read=((0, 5), (3, 6)), padding=(1, 0), value=0.0).moved(0, 1)
    (3, 4)
    """

    dim: int
    held: tuple[Stretch, ...]
    read: tuple[Stretch, ...]
    padding: Stretch
    value: float

    def moved(self, source: int, target: int) -> Stretch:
        """What rank *source* holds and rank *target* reads."""
        start = max(self.held[source][0], self.read[target][0])
        return start, max(start, min(self.held[source][1], self.read[target][1]))

    def num_moved(self, source: int, target: int) -> int:
        """How many rows go from one rank to another."""
        start, stop = self.moved(source, target)
        return 0 if source == target else stop - start


class Halo(CollectiveModule):
    """Brings the rows around its part that a rank reads, and gives their gradients back."""

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
        """Bring what this rank reads."""
        reach, own = self.reach, self.reach.held[self.index][0]
        outgoing = [(reach.moved(self.index, rank), own) for rank in range(len(self.ranks))]
        kept.append(self._exchange(x, outgoing, self.received))
        return self.assemble(x, kept[-1])

    def assemble(self, x: Tensor, received: Sequence[Tensor]) -> Tensor:
        """Own rows and those of others, by rank, in their places between the padding."""
        reach, dim, index = self.reach, self.reach.dim, self.index
        first, own = reach.read[index][0], reach.held[index][0]
        before, after = reach.padding
        shape = list(x.shape)
        shape[dim] = before + reach.read[index][1] - first + after
        result = x.new_empty(shape)
        result.narrow(dim, 0, before).fill_(reach.value)
        result.narrow(dim, shape[dim] - after, after).fill_(reach.value)
        for rank, piece in enumerate(received):
            start, stop = reach.moved(rank, index)
            if stop > start:
                rows = x.narrow(dim, start - own, stop - start) if rank == index else piece
                result.narrow(dim, before + start - first, stop - start).copy_(rows)
        return result

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
        """Send every other rank its stretch of *x*, which starts at a row of the whole, for so many rows of each."""
        dim, counts = self.reach.dim, [0] * len(rows)
        outgoing = []
        for rank, ((start, stop), first) in enumerate(pieces):
            if rank != self.index and stop > start:
                outgoing.append(x.narrow(dim, start - first, stop - start).reshape(-1))
                counts[rank] = outgoing[-1].numel()
        shapes = [[*x.shape[:dim], count, *x.shape[dim + 1 :]] for count in rows]
        sizes = [prod(shape) for shape in shapes]
        received = x.new_empty(sum(sizes))
        if self.most:  # else no rank reads what another holds
            sent = torch.cat(outgoing) if outgoing else x.new_empty(0)
            if isinstance(self.group, DryGroup):
                size = len(self.ranks)
                busiest = [*x.shape[:dim], self.most * size, *x.shape[dim + 1 :]]  # as if each sent as much
                held, read = ([b - a for a, b in stretches] for stretches in (self.reach.held, self.reach.read))
                self.group.note("all_to_all", x, busiest, held, read)
            elif self.group is not None:
                dist.all_to_all_single(received, sent, sizes, counts, group=self.group)
        return [piece.view(shape) for piece, shape in zip(received.split(sizes), shapes, strict=True)]

    def extra_repr(self) -> str:
        """What is held and read here."""
        held, read = self.reach.held[self.index], self.reach.read[self.index]
        return f"dim={self.reach.dim}, held={held}, read={read}, padding={self.reach.padding}, ranks={list(self.ranks)}"


class _HaloFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo, kept: list[list[Tensor]]) -> Tensor:
        ctx.halo = halo
        return halo.gather(x, kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.halo.give_back(grad), None, None


class WindowedCall(nn.Module):
    """An operator with windows, on a part that is given its halos one dim after the other.

    The operator would keep a copy of its operand, halos included, beside the part that its maker or other readers keep:
    here the part and the halos are kept, and put together again for the backward.

    Args:
        target: the operator.
        arguments: its arguments by name, in its order; those of *tensors* are given at every call, the part first.
        tensors: names of the arguments that are tensors.
        halos: in the order in which dims are widened, so that corners come along.
    """

    def __init__(
        self, target: Callable[..., Tensor], arguments: Mapping[str, Any], tensors: Sequence[str], halos: Sequence[Halo]
    ) -> None:
        super().__init__()
        self.target, self.arguments, self.tensors = target, dict(arguments), tuple(tensors)
        self.halos = nn.ModuleList(halos)
        self.without_rows = [h.reach.dim for h in halos if len(set(h.reach.held[h.index])) == 1]

    def forward(self, part: Tensor, *others: Tensor | None) -> Tensor:
        """What the operator gives for the windows of this rank."""
        kept: list[list[Tensor]] = []
        wide = part
        for halo in self.halos:
            wide = halo(wide, kept)
        own, shape, held = wide.untyped_storage()._cdata, wide.shape, part.detach()

        def pack(x: Tensor) -> Tensor | None:
            return None if x.untyped_storage()._cdata == own and x.shape == shape else x

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
