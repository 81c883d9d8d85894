"""The six conversions between placements, their adjoints, and the graph module that carries one.

A bridge changes the placement of a tensor on one mesh axis: the value from *a* to *b*, its gradient from the gradient
of *b* to the gradient of *a*, with the same primitives::

    value or gradient   R -> S   take        (free)      S -> R   all-gather
                        R -> P   mask        (free)      P -> R   all-reduce
                        S -> P   zero-pad    (free)      P -> S   reduce-scatter
                        S -> S'  all-to-all

Knows tensors, cuts and process groups; nothing of operators, models or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.ir.check import CollectiveCall
from whale.ir.placement import Cut, Placement
from whale.runtime.ranges import named
from whale.runtime.recording import call, is_recording

Group = Any
"""A ``torch.distributed`` process group, None where the axis has one rank, or a :class:`DryGroup`."""

# torch 2.13 renamed them and warns of the old names.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class DryGroup:
    """A process group of a dry run, in which a program runs without other processes: calls are recorded, not made.

    ``calls`` is shared by the groups of a dry run, so it contains all calls in order.
    """

    def __init__(self, node: str, ranks: tuple[int, ...], calls: list[CollectiveCall]) -> None:
        self.node, self.ranks, self.calls = node, ranks, calls

    def note(self, op: str, x: Tensor, *shapes: Sequence[int], beside: bool = False) -> None:
        """Record a call, with what all ranks must agree on: the common shape, or one for each rank; and whether it
        moves *beside* the products of its node."""
        dtype, agreed = str(x.dtype).removeprefix("torch."), tuple(tuple(shape) for shape in shapes)
        self.calls.append(CollectiveCall(self.node, op, self.ranks, dtype, agreed, beside))


class CollectiveModule(nn.Module):
    """A module of a local graph that its ranks run together.

    In a compiled graph it has no group; the copies that run have one (:func:`whale.runtime.local_program.bound`).
    """

    ranks: tuple[int, ...]
    """Global ranks that take part, in the order of the mesh axis."""

    group: Group = None


class Exchange(CollectiveModule):
    """One collective on a tensor, without its gradient, as a module of a local graph.

    Args:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        ranks: global ranks that take part.
        index: of this rank among them.
        source, target: the cut before and after, where there is one.
        value: name of what is exchanged, for profiles.
        reuse: whether an all-reduce may write to its operand.
        reduction: of an all-reduce.
    """

    def __init__(
        self,
        op: str,
        ranks: tuple[int, ...],
        index: int,
        *,
        source: Cut | None = None,
        target: Cut | None = None,
        value: str = "",
        reuse: bool = False,
        reduction: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        super().__init__()
        self.op, self.ranks, self.index, self.source, self.target = op, ranks, index, source, target
        self.value, self.reuse, self.reduction = value, reuse, reduction

    def forward(self, x: Tensor) -> Tensor:
        """The exchanged tensor, contiguous."""
        return _exchanged(
            self.op, x, self.index, self.source, self.target, self.group, self.value, self.reuse, self.reduction
        )

    def named(self, value: str) -> Exchange:
        """The same exchange of something with another name."""
        return Exchange(
            self.op,
            self.ranks,
            self.index,
            source=self.source,
            target=self.target,
            value=value,
            reuse=self.reuse,
            reduction=self.reduction,
        )

    def without_data(self, x: Tensor) -> Tensor:
        """An empty tensor of the result's shape."""
        shape = list(x.shape)
        if self.source is not None:
            shape[self.source.dim] = self.source.extent
        if self.target is not None:
            shape[self.target.dim] = self.target.local_extent(self.index)
        return x.new_empty(shape)

    def extra_repr(self) -> str:
        """The collective and its ranks."""
        return f"{self.op}, ranks={list(self.ranks)}"


def parts(x: Tensor, cut: Cut) -> list[Tensor]:
    """The views ``[..., outer, size, inner, ...]`` of a tensor's whole dim, one a segment of the cut."""
    dim, views, base = cut.dim, [], 0
    for segment in cut.segments:
        piece = x.narrow(dim, base, segment.extent) if len(cut.segments) > 1 else x
        shape = (segment.outer, segment.size, segment.inner)
        views.append(piece.reshape(*x.shape[:dim], *shape, *x.shape[dim + 1 :]))
        base += segment.extent
    return views


def _joined(views: Sequence[Tensor], dim: int) -> Tensor:
    """The inverse of :func:`parts`."""
    flat = [v.reshape(*v.shape[:dim], -1 if v.numel() else _extent(v, dim), *v.shape[dim + 3 :]) for v in views]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim)


def _extent(view: Tensor, dim: int) -> int:
    return view.shape[dim] * view.shape[dim + 1] * view.shape[dim + 2]


def take(x: Tensor, cut: Cut, index: int) -> Tensor:
    """The shard of a whole tensor on rank *index* of the axis (R -> S). A view if the shard is contiguous."""
    ranges = cut.ranges(index)
    if len(cut.segments) == 1 and cut.segments[0].outer == 1 and len(ranges) < 2:
        inner = cut.segments[0].inner
        start, stop = ranges[0] if ranges else (0, 0)
        return x.narrow(cut.dim, start * inner, (stop - start) * inner)
    views = []
    for view in parts(x, cut):
        pieces = [view.narrow(cut.dim + 1, start, stop - start) for start, stop in ranges or ((0, 0),)]
        views.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim + 1))
    return _joined(views, cut.dim)


def embed(x: Tensor, cut: Cut, index: int) -> Tensor:
    """A shard in its position in a whole tensor of zeros (S -> P)."""
    shape = list(x.shape)
    shape[cut.dim] = cut.extent
    whole = x.new_zeros(shape)
    for target, source in zip(parts(whole, cut), _local_parts(x, cut, index), strict=True):
        base = 0
        for start, stop in cut.ranges(index):
            target.narrow(cut.dim + 1, start, stop - start).copy_(source.narrow(cut.dim + 1, base, stop - start))
            base += stop - start
    return whole


def _local_parts(x: Tensor, cut: Cut, index: int) -> list[Tensor]:
    """The segments of rank *index*'s part, seen as ``[..., outer, size, inner, ...]``."""
    local = Cut(
        cut.dim,
        tuple(type(s)(s.outer, cut.sizes[index], s.inner) for s in cut.segments),
        (cut.sizes[index],),
    )
    return parts(x, local)


def assemble(pieces: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole tensor from the shards of all ranks of the axis."""
    if cut.contiguous:
        return torch.cat(list(pieces), cut.dim)
    local = [_local_parts(piece, cut, index) for index, piece in enumerate(pieces)]
    columns = []
    for column in zip(*local, strict=True):
        stretches = [column[rank].narrow(cut.dim + 1, base, size) for rank, base, size in cut.order()]
        columns.append(torch.cat(stretches or column, cut.dim + 1))
    return _joined(columns, cut.dim)


def _stacked(x: Tensor, cut: Cut) -> Tensor:
    """The parts of all ranks along a new first dim, in one copy: for a cut that is even and contiguous."""
    return x.unflatten(cut.dim, (len(cut.sizes), cut.local_extent(0))).movedim(cut.dim, 0).contiguous()


def _side_by_side(stacked: Tensor, cut: Cut) -> Tensor:
    """The whole tensor from the parts of all ranks along the first dim; the inverse of :func:`_stacked`."""
    return stacked.movedim(0, cut.dim).flatten(cut.dim, cut.dim + 1)


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Sum over the group, in place (P -> R)."""
    if isinstance(group, DryGroup):
        group.note("all_reduce", x, x.shape)
    elif group is not None:
        dist.all_reduce(x, op=op, group=group)
    return x


def all_gather(x: Tensor, cut: Cut, index: int, group: Group) -> Tensor:
    """All-gather: the whole tensor on every rank (S -> R). Uneven shards are padded to the largest."""
    if group is None:
        return x
    world = len(cut.sizes)
    shapes = [list(x.shape) for _ in range(world)]
    for rank, shape in enumerate(shapes):
        shape[cut.dim] = cut.local_extent(rank)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    largest = max(sizes)
    flat = x.contiguous().view(-1)
    if len(set(sizes)) > 1 and sizes[index] < largest:
        flat = torch.cat([flat, flat.new_zeros(largest - sizes[index])])
    gathered = flat.new_empty(world * largest)
    if isinstance(group, DryGroup):
        group.note("all_gather", x, *shapes)
    else:
        gather_single(gathered, flat, group=group)
    if cut.even and cut.contiguous:
        return _side_by_side(gathered.view(world, *x.shape), cut)
    pieces = [gathered[rank * largest : rank * largest + sizes[rank]].view(shape) for rank, shape in enumerate(shapes)]
    return assemble(pieces, cut)


def reduce_scatter(x: Tensor, cut: Cut, index: int, group: Group) -> Tensor:
    """Reduce-scatter: the sum over the group, of which each rank gets its shard (P -> S)."""
    if group is None:
        return x
    pieces = [take(x, cut, rank).contiguous() for rank in range(len(cut.sizes))]
    result = torch.empty_like(pieces[index])
    even = len({piece.numel() for piece in pieces}) == 1
    together = torch.cat([piece.view(-1) for piece in pieces]) if even else x
    if isinstance(group, DryGroup):
        group.note("reduce_scatter", x, *(piece.shape for piece in pieces))
    elif even:
        reduce_scatter_single(result.view(-1), together, group=group)
    else:
        dist.reduce_scatter(result, pieces, group=group)
    return result


def all_to_all(x: Tensor, source: Cut, target: Cut, index: int, group: Group) -> Tensor:
    """All-to-all: from shards along one dim to shards along another (S -> S')."""
    if group is None:
        return x
    world = len(source.sizes)
    if isinstance(group, DryGroup):
        whole = [source.extent if d == source.dim else size for d, size in enumerate(x.shape)]
        group.note("all_to_all", x, whole, source.sizes, target.sizes)
    if all(cut.even and cut.contiguous for cut in (source, target)):
        stacked = _stacked(x, target)
        exchanged = torch.empty_like(stacked)
        if not isinstance(group, DryGroup):
            dist.all_to_all_single(exchanged, stacked, group=group)
        return _side_by_side(exchanged, source)
    outgoing = [take(x, target, rank).contiguous() for rank in range(world)]
    mine = list(outgoing[index].shape)
    shapes = []
    for rank in range(world):
        shape = list(mine)
        shape[source.dim] = source.local_extent(rank)
        shapes.append(shape)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = x.new_empty(sum(sizes))
    sent = torch.cat([piece.reshape(-1) for piece in outgoing])
    if not isinstance(group, DryGroup):
        dist.all_to_all_single(received, sent, sizes, [p.numel() for p in outgoing], group=group)
    pieces = [piece.view(shape) for piece, shape in zip(received.split(sizes), shapes, strict=True)]
    return assemble(pieces, source)


def _exchanged(
    op: str,
    x: Tensor,
    index: int,
    source: Cut | None,
    target: Cut | None,
    group: Group,
    value: str,
    reuse: bool,
    reduction: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Tensor:
    with named(_WORDS[op], value):
        match op:
            case "all_reduce":
                held = x if reuse and x.is_contiguous() else x.clone(memory_format=_DENSE)
                return all_reduce(held, group, reduction)
            case "all_gather":
                return all_gather(x, source, index, group).contiguous()  # type: ignore[arg-type]
            case "reduce_scatter":
                return reduce_scatter(x, target, index, group)  # type: ignore[arg-type]
        return all_to_all(x, source, target, index, group).contiguous()  # type: ignore[arg-type]


@dataclass(frozen=True)
class Conversion:
    """A conversion on one mesh axis: from placement *source* to *target*, with a cut, among global ranks.

    ``reuse`` and ``reuse_gradient`` mean that the value, or the returned gradient, has no alias, so that an all-reduce
    may write to it.
    """

    source: Placement
    target: Placement
    source_cut: Cut | None
    target_cut: Cut | None
    ranks: tuple[int, ...]
    index: int
    reuse: bool = False
    reuse_gradient: bool = False

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"

    @property
    def forward_collective(self) -> str:
        """The collective of the value, or the empty string."""
        return _COLLECTIVE.get((self.source.value, self.target.value), "") if len(self.ranks) > 1 else ""

    @property
    def backward_collective(self) -> str:
        """The collective of the gradient, or the empty string."""
        return _COLLECTIVE.get((self.target.gradient, self.source.gradient), "") if len(self.ranks) > 1 else ""


_DENSE = torch.contiguous_format

_WORDS = {
    "all_reduce": "all-reduce %s",
    "all_gather": "all-gather %s",
    "reduce_scatter": "reduce-scatter %s",
    "all_to_all": "all-to-all %s",
}
"""The name of every collective's range in profiles."""

_COLLECTIVE = {
    ("S", "R"): "all_gather",
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("S", "S"): "all_to_all",
}


def _converted(x: Tensor, c: Conversion, group: Group, value: str, *, gradient: bool) -> Tensor:
    """A value in the target's placement, or a gradient of it in the placement of the source's."""
    a, b = (c.target.gradient, c.source.gradient) if gradient else (c.source.value, c.target.value)
    cut_a, cut_b = (c.target_cut, c.source_cut) if gradient else (c.source_cut, c.target_cut)
    match a, b:
        case ("R", "R") | ("P", "P"):
            return x
        case ("R", "S"):
            return take(x, cut_b, c.index)  # type: ignore[arg-type]
        case ("R", "P"):
            return x if c.index == 0 else torch.zeros_like(x)
        case ("S", "P"):
            return embed(x, cut_a, c.index)  # type: ignore[arg-type]
        case ("S", "S") if cut_a == cut_b:
            return x
    op, source, target = _COLLECTIVE[a, b], cut_a if a == "S" else None, cut_b if b == "S" else None
    reuse = c.reuse_gradient if gradient else c.reuse
    if is_recording() and len(c.ranks) > 1:
        return call(Exchange(op, c.ranks, c.index, source=source, target=target, value=value, reuse=reuse), x)
    return _exchanged(op, x, c.index, source, target, group, value, reuse)


class _BridgeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, conversion: Conversion, group: Group, value: str) -> Tensor:
        ctx.conversion, ctx.group, ctx.value = conversion, group, value
        return _converted(x.detach(), conversion, group, value, gradient=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        found = _converted(grad, ctx.conversion, ctx.group, f"gradient of {ctx.value}", gradient=True)
        return found, None, None, None


class Bridge(CollectiveModule):
    """A change of placement inside a stage, as a module of the lowered graph; *value* is the name of what it
    changes, for profiles."""

    def __init__(self, conversion: Conversion, value: str = "") -> None:
        super().__init__()
        self.conversion, self.ranks, self.value = conversion, conversion.ranks, value

    def forward(self, x: Tensor) -> Tensor:
        """Convert the value; the gradient is converted back in the backward pass."""
        if x.requires_grad:
            return _BridgeFunction.apply(x, self.conversion, self.group, self.value)
        return _converted(x, self.conversion, self.group, self.value, gradient=False)

    def extra_repr(self) -> str:
        """The conversion and its ranks."""
        return f"{self.conversion}, ranks={list(self.ranks)}"


class Take(nn.Module):
    """The shard of a whole tensor that this rank reads, without a gradient (R -> S)."""

    def __init__(self, cut: Cut, index: int) -> None:
        super().__init__()
        self.cut, self.index = cut, index

    def forward(self, x: Tensor) -> Tensor:
        """A view where the part is contiguous."""
        return take(x, self.cut, self.index)
