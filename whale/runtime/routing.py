"""Expert parallelism: rows go to the ranks of the experts that they chose, are computed there, and come back.

No row is dropped and none is padded, so the number of rows at a rank is known when the step runs. Ranks may have any
numbers of experts. It knows rows, experts and process groups; nothing of models or placements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from whale.runtime.collectives import CollectiveModule, DryGroup, Group
from whale.runtime.local_program import LocalCode
from whale.runtime.ranges import named

__all__ = ["AtExperts", "Route"]


@dataclass(frozen=True, kw_only=True)
class Route:
    """The experts of the ranks of a mesh axis, and the rows that they have.

    Attributes:
        experts: number of experts of each rank; rank after rank has the next ones.
        rows: number of rows of each rank before they go to experts.
        index: of this rank.
        exchanged: whether each rank has its own rows; else all have the same.
    """

    experts: tuple[int, ...]
    rows: tuple[int, ...]
    index: int
    exchanged: bool

    @property
    def expected(self) -> tuple[int, ...]:
        """Number of rows at the experts of each rank if all experts are chosen equally often.

        >>> Route(experts=(3, 3, 2), rows=(4, 4, 4), index=0, exchanged=True).expected
        (4, 5, 3)
        """
        total = sum(self.rows) if self.exchanged else self.rows[0]
        ends = [total * end // sum(self.experts) for end in accumulate(self.experts, initial=0)]
        return tuple(stop - start for start, stop in pairwise(ends))


class AtExperts(CollectiveModule):
    """A part of a graph that computes rows at the experts that they chose.

    Args:
        code: a function of the number of each row's expert among those here, rows of some tensors that came here, and
            other tensors; it returns tensors with as many rows.
        num_rows: number of tensors whose rows go to the experts.
        route: of the rows.
        ranks: global ranks that take part, in the order of the mesh axis.
    """

    is_opaque = True
    """Whether operators in its place do not show what it keeps: their sizes are those of a step."""

    def __init__(self, code: LocalCode, num_rows: int, route: Route, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.code, self.num_rows, self.route, self.ranks = code, num_rows, route, ranks
        self.root = code.root

    def forward(self, choice: Tensor, *tensors: Tensor) -> Any:
        """*choice* [rows], numbers of experts, then tensors of [rows, ...] and others -> tensors of [rows, ...].

        If all ranks have the same rows, those of other ranks' experts are zeros, so that the ranks' results add up.
        """
        return self.through(lambda root, code, args: code.function(root, *args), choice, *tensors)

    def through(self, run: Callable[[Any, LocalCode, Sequence[Any]], Any], choice: Tensor, *tensors: Tensor) -> Any:
        """The same, where *run* runs the code with its modules."""
        way = _Way.of(self.route, choice, self.group)
        own = _Going.apply(way, *tensors[: self.num_rows])
        results = run(self.root, self.code, (way.own, *own, *tensors[self.num_rows :]))
        back = _Coming.apply(way, *results)
        return back[0] if len(back) == 1 else back

    def extra_repr(self) -> str:
        """The numbers of experts, and the ranks."""
        return f"experts={list(self.route.experts)}, ranks={list(self.ranks)}"


@dataclass(frozen=True, kw_only=True)
class _Way:
    """The way of rows to experts and back.

    Attributes:
        order: numbers of the rows that leave, in the order of their experts.
        own: [rows that come], the number of each one's expert among those here.
        going, coming: number of rows to, and from, each rank.
        num_rows: before they leave.
        group: that exchanges them, if it does.
    """

    order: Tensor
    own: Tensor
    going: Sequence[int]
    coming: Sequence[int]
    num_rows: int
    route: Route
    group: Group

    @classmethod
    def of(cls, route: Route, choice: Tensor, group: Group) -> _Way:
        count, index, num_rows = sum(route.experts), route.index, len(choice)
        if not route.exchanged:
            group = None
        if choice.is_meta or isinstance(choice, FakeTensor) or isinstance(group, DryGroup):
            own = choice.new_zeros(route.expected[index])
            order = torch.zeros_like(choice if route.exchanged else own)
            return cls(order=order, own=own, going=(), coming=(), num_rows=num_rows, route=route, group=group)
        ordered, order = torch.sort(choice, stable=True)
        counts = torch.bincount(choice, minlength=count)
        if not route.exchanged:
            first, stop = (counts[: sum(route.experts[:n])].sum().item() for n in (index, index + 1))
            own = ordered[int(first) : int(stop)] - sum(route.experts[:index])
            return cls(
                order=order[int(first) : int(stop)], own=own, going=(), coming=(), num_rows=num_rows, route=route,
                group=None,
            )  # fmt: skip
        here, world = route.experts[index], len(route.experts)
        of_ranks = counts.new_empty(world * here)
        with named("all-to-all numbers of rows"):
            dist.all_to_all_single(of_ranks, counts, [here] * world, list(route.experts), group=group)
        numbers = torch.arange(here, device=choice.device, dtype=choice.dtype).repeat(world)
        return cls(
            order=order,
            own=torch.repeat_interleave(numbers, of_ranks),
            going=[part.sum().item() for part in counts.split(list(route.experts))],
            coming=of_ranks.view(world, here).sum(1).tolist(),
            num_rows=num_rows,
            route=route,
            group=group,
        )  # fmt: skip

    def to_experts(self, x: Tensor) -> Tensor:
        """Rows that come to the experts here."""
        return self._exchanged(x.index_select(0, self.order), self.going, self.coming, len(self.own), "rows to experts")

    def back(self, y: Tensor) -> Tensor:
        """Rows that come back, each in its place; zeros where none does."""
        found = self._exchanged(y, self.coming, self.going, len(self.order), "rows from experts")
        whole = found.new_empty if len(self.order) == self.num_rows else found.new_zeros
        return whole((self.num_rows, *y.shape[1:])).index_copy_(0, self.order, found)

    def _exchanged(self, x: Tensor, going: Sequence[int], coming: Sequence[int], num: int, what: str) -> Tensor:
        if not self.route.exchanged:
            return x
        received = x.new_empty((num, *x.shape[1:]))
        if isinstance(self.group, DryGroup):
            before, after = self.route.rows, self.route.expected
            if what == "rows from experts":
                before, after = after, before
            self.group.note("all_to_all", x, (sum(before), *x.shape[1:]), before, after)
        elif going:
            with named(f"all-to-all {what}"):
                dist.all_to_all_single(received, x.contiguous(), list(coming), list(going), group=self.group)
        return received


class _Going(torch.autograd.Function):
    """Rows on their way to experts; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, way: _Way, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.way = way
        return tuple(way.to_experts(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(grads, ctx.needs_input_grad[1:], strict=True)
        return None, *(ctx.way.back(grad) if wants else None for grad, wants in wanted)


class _Coming(torch.autograd.Function):
    """Rows on their way back; their gradients go to the experts."""

    @staticmethod
    def forward(ctx: Any, way: _Way, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.way = way
        return tuple(way.back(y) for y in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(grads, ctx.needs_input_grad[1:], strict=True)
        return None, *(ctx.way.to_experts(grad) if wants else None for grad, wants in wanted)
