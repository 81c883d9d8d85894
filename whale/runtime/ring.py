"""Ring attention: rows of a sequence stay on their ranks, keys and values go round, and no rank holds all of them.

Liu et al., "Ring Attention with Blockwise Transformers" (2023). A rank computes its rows against the columns of one
rank after the other, while those of the next arrive, and merges the results by the logarithms of the sums of their
weights, which makes them exact. The backward goes round once more: gradients of keys and values travel with the columns
that they are of, and end where these are at home. It knows tensors, positions and process groups; nothing of placements
or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from whale.runtime.attention import Stretch, attend, attend_back, cut, dtype_of_sums
from whale.runtime.collectives import CollectiveModule, DryGroup
from whale.runtime.ranges import named
from whale.runtime.recording import call

__all__ = ["Block", "RingAttention", "Round"]


class Block(NamedTuple):
    """A part of the scores, in rows and columns of what two ranks hold; ``causal``: a square, of which a row sees the
    columns up to its own."""

    rows: Stretch
    columns: Stretch
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class Round:
    """A sequence on the ranks of a mesh axis.

    Attributes:
        held: the positions of each rank's rows: half-open, in order.
        index: of this rank.
        causal: whether a row sees only the positions up to its own.
        scale: of the scores; None: one over the root of the width.
    """

    held: tuple[tuple[Stretch, ...], ...]
    index: int
    causal: bool
    scale: float | None = None

    def length(self, rank: int) -> int:
        """Number of rows of a rank."""
        return sum(stop - start for start, stop in self.held[rank])

    def blocks(self, owner: int) -> list[Block]:
        """The parts of this rank's rows and another's columns that have any weight.

        >>> Round(held=(((0, 2), (6, 8)), ((2, 6),)), index=0, causal=True).blocks(1)
        [Block(rows=(2, 4), columns=(0, 4), causal=False)]
        """
        rows, columns = self.length(self.index), self.length(owner)
        if not self.causal:
            return [Block((0, rows), (0, columns))] if rows and columns else []
        found = list[Block]()
        seen: list[tuple[int, Stretch]] = []  # for each stretch of rows: the columns that all of it sees
        for (first, stop), place in _placed(self.held[self.index]):
            whole = 0
            for stretch, own in _placed(self.held[owner]):
                if stretch == (first, stop) and stop - first > 1:
                    found.append(Block(place, own, causal=True))
                elif stretch[1] <= first + 1:
                    whole = own[1]
            seen.append((whole, place))
        for whole, group in groupby(seen, key=lambda each: each[0]):
            places = [place for _, place in group]
            if whole and places[-1][1] > places[0][0]:
                found.append(Block((places[0][0], places[-1][1]), (0, whole)))
        return found


def _placed(stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, Stretch]]:
    """Stretches of positions, each with its place among those of the rank."""
    ends = list(accumulate((stop - start for start, stop in stretches), initial=0))
    return zip(stretches, pairwise(ends), strict=True)


class RingAttention(CollectiveModule):
    """Attention of this rank's rows to those of all ranks.

    Args:
        round_: of the sequence.
        ranks: global ranks that take part, in the order of the axis.
    """

    def __init__(self, round_: Round, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.round, self.ranks = round_, ranks

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """*query* (..., heads, rows, width), *key* (..., groups, rows, width), *value* (..., groups, rows, size) of
        this rank, *mask* (..., rows, all columns) -> (..., heads, rows, size).

        A group of heads reads one key. A mask is boolean, or added to the scores.
        """
        given = (query, key, value) if mask is None else (query, key, value, mask)
        found: Tensor = _RingFunction.apply(self, *given)
        return found

    def extra_repr(self) -> str:
        """The stretches of rows of this rank, and the ranks."""
        causal = "causal, " if self.round.causal else ""
        return f"{causal}rows={list(self.round.held[self.round.index])}, ranks={list(self.ranks)}"


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: RingAttention, *given: Tensor) -> Tensor:
        ahead = _Ahead(ring)
        packed = call(ahead, *given)
        ctx.ring, ctx.wanted = ring, ctx.needs_input_grad[4:] == (True,)
        ctx.save_for_backward(*given, packed)
        return ahead.unpacked(packed, *given)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, packed = ctx.saved_tensors
        back = _Back(ctx.ring, ctx.wanted)
        found = back.unpacked(call(back, grad, packed, *given), *given)
        return None, *found, *([None] * (len(given) - len(found)))


class _Going(CollectiveModule):
    """A way round the ring, as one collective of the graph: what arrives is never kept."""

    def __init__(self, ring: RingAttention) -> None:
        super().__init__()
        self.round, self.ranks, self.group = ring.round, ring.ranks, ring.group

    def extra_repr(self) -> str:
        """The ranks."""
        return f"causal={self.round.causal}, ranks={list(self.ranks)}"

    def sent(self, part: Tensor, owner: int, of_row: int) -> Callable[[], Tensor]:
        """Start to pass on what belongs to the rows of *owner*, *of_row* elements each; a call waits for what comes."""
        world, index = len(self.ranks), self.round.index
        sizes = [self.round.length(rank) * of_row for rank in range(world)]
        received = part.new_empty(sizes[(owner - 1) % world])
        if isinstance(self.group, DryGroup):
            # noted as an all-to-all in which a rank sends as much: a part of the world's it keeps
            most = -(-max(sizes) * world * world // (world - 1))
            shapes = (most,), tuple(sizes), (*sizes[-1:], *sizes[:-1])
            self.group.note("all_to_all", part, *shapes, beside=True)
        elif self.group is not None:
            going, coming = [0] * world, [0] * world
            going[(index + 1) % world], coming[index - 1] = part.numel(), received.numel()
            with named("ring attention"):
                work = dist.all_to_all_single(received, part, coming, going, group=self.group, async_op=True)

            def arrived(sent: Tensor = part) -> Tensor:  # which lives until then
                work.wait()
                return received

            return arrived
        return lambda: received

    def visits(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The ranks whose keys and values come by, from this one on; those of the next are on their way meanwhile."""
        world, owner = len(self.ranks), self.round.index
        of_row = [x.numel() // max(x.shape[-2], 1) for x in (key, value)]
        part = torch.cat([key.reshape(-1), value.reshape(-1)])
        for step in range(world):
            arrived = self.sent(part, owner, sum(of_row)) if step + 1 < world else None
            keys, values = _views(part, [_with_rows(x, self.round.length(owner)) for x in (key, value)])
            yield owner, keys, values
            if arrived is not None:
                part, owner = arrived(), (owner - 1) % world

    def masked(self, mask: Tensor | None, owner: int) -> Tensor | None:
        """The columns of a mask that are those of a rank."""
        if mask is None or mask.shape[-1] == 1:
            return mask
        parts = [mask.narrow(-1, start, stop - start) for start, stop in self.round.held[owner]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1) if parts else mask.narrow(-1, 0, 0)


class _Ahead(_Going):
    """The forward: the result, and the logarithms of the sums of its weights, in one tensor."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Operands of a rank -> a flat tensor."""
        packed = self.without_data(query, key, value)
        result, sums = self.unpacked(packed, query, key, value)
        sums.fill_(torch.finfo(sums.dtype).min)
        total = _accumulator(result)
        for owner, keys, values in self.visits(key, value):
            seen = self.masked(mask, owner)
            for rows, columns, causal in self.round.blocks(owner) if query.numel() else ():  # else kernels fail
                own = cut(query, rows), cut(keys, columns), cut(values, columns)
                found, log = attend(*own, seen, causal, self.round.scale)
                _merge(cut(total, rows), sums.narrow(-1, rows[0], rows[1] - rows[0]), found, log)
        if total is not result:
            result.copy_(total)
        return packed

    def without_data(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """An empty tensor for what it returns."""
        rows = prod(query.shape[:-1])
        sums = rows * dtype_of_sums(query.dtype).itemsize // query.element_size()
        return query.new_empty(_aligned(rows * value.shape[-1], query.dtype) + sums)

    def unpacked(
        self, packed: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The result, in the layout that a following projection reads, and the logarithms of the sums."""
        shape = (*query.shape[:-1], value.shape[-1])
        sums = packed[_aligned(prod(shape), query.dtype) :]
        if (wide := dtype_of_sums(query.dtype)) != query.dtype:
            sums = sums.view(wide)
        return _laid(packed[: prod(shape)], shape), sums.view(query.shape[:-1])


class _Back(_Going):
    """The backward: the gradients of queries, keys and values, and of the mask where it has one, in one tensor."""

    def __init__(self, ring: RingAttention, of_mask: bool) -> None:
        super().__init__(ring)
        self.of_mask = of_mask

    def forward(
        self, grad: Tensor, packed: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """The gradient of the result, what the forward returned, and its operands -> a flat tensor."""
        result, sums = _Ahead.unpacked(self, packed, query, key, value)  # type: ignore[arg-type]
        flat = self.without_data(grad, packed, query, key, value, mask)
        made = self.unpacked(flat, query, key, value, mask)
        of_query, own_keys, own_values, *of_mask = totals = [_accumulator(x) for x in made]
        of_row = sum(x.numel() // max(x.shape[-2], 1) for x in (key, value))
        arrived: Callable[[], Tensor] | None = None
        for owner, keys, values in self.visits(key, value):
            if owner == self.round.index:
                part, of_keys, of_values = None, own_keys, own_values
            else:
                part = keys.new_zeros(keys.numel() + values.numel(), dtype=of_query.dtype)
                of_keys, of_values = _views(part, [keys.shape, values.shape])
            seen = self.masked(mask, owner)
            for rows, columns, causal in self.round.blocks(owner) if query.numel() else ():
                x = cut(query, rows), cut(keys, columns), cut(values, columns)
                log = sums.narrow(-1, rows[0], rows[1] - rows[0])
                found = attend_back(
                    cut(grad, rows), *x, cut(result, rows), log, seen, causal, self.round.scale, self.of_mask
                )
                cut(of_query, rows).add_(found[0])
                cut(of_keys, columns).add_(found[1])
                cut(of_values, columns).add_(found[2])
                if found[3] is not None:
                    self._add_to_mask(of_mask[0], found[3], owner)
                del found
            if part is None:
                continue
            if arrived is not None:
                part.add_(arrived())
            arrived = self.sent(part, owner, of_row)
        if arrived is not None:
            for total, rest in zip((own_keys, own_values), _views(arrived(), [key.shape, value.shape]), strict=True):
                total.add_(rest)
        for target, total in zip(made, totals, strict=True):
            if total is not target:
                target.copy_(total)
        return flat

    def _add_to_mask(self, whole: Tensor, found: Tensor, owner: int) -> None:
        """Add the gradient of the columns of a rank to that of the mask."""
        if whole.shape[-1] == 1:
            whole.add_(found)
            return
        for (start, stop), (first, last) in _placed(self.round.held[owner]):
            whole.narrow(-1, start, stop - start).add_(found.narrow(-1, first, last - first))

    def without_data(
        self, grad: Tensor, packed: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """An empty tensor for what it returns."""
        return query.new_empty(sum(x.numel() for x in self._with_gradient(query, key, value, mask)))

    def unpacked(
        self, flat: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> list[Tensor]:
        """The gradients, in the layout of the results of projections."""
        given = self._with_gradient(query, key, value, mask)
        parts = flat.split([x.numel() for x in given])
        return [_laid(part, x.shape) for part, x in zip(parts, given, strict=True)]

    def _with_gradient(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> list[Tensor]:
        return [query, key, value, *([mask] if self.of_mask and mask is not None else [])]


def _merge(result: Tensor, sums: Tensor, found: Tensor, log: Tensor) -> None:
    """Merge attention to other columns into a result, in place."""
    total = torch.logaddexp(sums, log)
    result.mul_((sums - total).exp_().unsqueeze(-1)).add_(found * (log - total).exp_().unsqueeze(-1))
    sums.copy_(total)


def _accumulator(x: Tensor) -> Tensor:
    """A tensor of zeros in which to add up what becomes *x*: itself, unless it has too few digits."""
    wide = dtype_of_sums(x.dtype)
    return x.zero_() if wide == x.dtype else torch.zeros_like(x, dtype=wide)


def _aligned(count: int, dtype: torch.dtype) -> int:
    """The first place after *count* elements at which sums may begin."""
    each = dtype_of_sums(dtype).itemsize // dtype.itemsize
    return -(-count // each) * each


def _with_rows(x: Tensor, rows: int) -> tuple[int, ...]:
    return (*x.shape[:-2], rows, x.shape[-1])


def _views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Consecutive parts of a flat tensor."""
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _laid(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """A flat tensor in a shape, heads beside each other."""
    if len(shape) < 3:
        return flat.view(tuple(shape))
    *outer, heads, rows, width = shape
    return flat.view(*outer, rows, heads, width).transpose(-3, -2)
