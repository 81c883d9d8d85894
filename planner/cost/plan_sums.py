"""Sums of gradients of a plan over replicas and stages, and how they overlap the last backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from whale.ir.workload import Reduction
from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.hosts import gathering_on_host, link_to_host
from whale.planner.cost.overlap import Beside, largest_lead, overlap
from whale.planner.cost.plan_kinds import PlanKinds
from whale.planner.cost.replica_kinds import ruled
from whale.planner.cost.replicas import between_replicas

__all__ = ["PlanSums"]

SCATTERED_BEFORE = 0.3
"""Part of the last backward before which the scattering of gradients (ZeRO 1) does not begin (assumed)."""


class _Sum(NamedTuple):
    """The sum of gradients over a data group, one of *num_alike*: bytes, seconds of all and of one message, and of what
    must wait for the end of the backward."""

    group: tuple[int, ...]
    num_alike: int
    bytes: float
    seconds: float
    message: float
    after: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlanSums(PlanKinds):
    """The sums of gradients of a plan."""

    def _reductions(self, last_share: float) -> Iterator[Reduction]:
        """The sums of gradients: of each set of ranks its own over the replicas, and those of tied parameters over the
        stages that have them. Whale's begin during the last backward, others' after it."""
        prices, size = self.prices, self.prices.gradient_bytes
        apart = [(readers, shared) for readers, shared in prices.profile.tied if self._is_apart(readers)]
        for own in self._devices if prices.runs or prices.stack.zero < 2 else ():
            sums = [one for index in own for one in self._sums(index, apart)]
            seconds = sum(one.seconds for one in sums)
            if not seconds:
                continue
            ready, stretch = SCATTERED_BEFORE if prices.stack.zero and not prices.runs else 1.0, 0.0
            slowdown: tuple[float, ...] = ()
            ranks = tuple(kind.rank for kind in self.kinds[own[0]])
            if self._exchanged[own[0]].each:  # all but the last are beside the backwards
                seconds = min(seconds, max(one.message for one in sums))
            elif prices.runs and len(own) == 1:
                ready, beside = self._overlapped(own[0], sums, last_share)
                slowdown, stretch = (beside.slowdown,) * len(ranks), beside.stretch
            yield Reduction(
                ranks=ranks,
                stages=own,
                bytes=round(sum(one.bytes for one in sums)),
                seconds=seconds,
                ready=ready,
                slowdown=slowdown,
                stretch=stretch,
            )
            if after := sum(one.after for one in sums):
                size_after = round(sum(one.bytes for one in sums))
                yield Reduction(ranks=ranks, stages=own, bytes=size_after, seconds=after)
        for readers, shared in apart:
            owners = self._owners(readers)
            group, degree = self._tied_group(owners)
            seconds = prices.tied_sum(group, degree, shared / degree * size, divided=self._divide(owners))
            ranks = tuple(kind.rank for index in owners for kind in self.kinds[index])
            yield Reduction(ranks=ranks, stages=owners, bytes=round(shared / degree * size), seconds=seconds)

    def _tied_group(self, owners: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The ranks that sum the gradient of what stages share, one of each tensor group, and the number of these
        groups' devices."""
        if self.prices.runs and self._are_unlike(owners):  # then it is whole on each rank, and all of them sum it
            return tuple(rank for index in owners for rank in self.stages[index].ranks), 1
        degree = min(self.stages[index].tensor for index in owners)
        return tuple(rank for index in owners for rank in self.stages[index].data_group), degree

    def _divide(self, owners: Sequence[int]) -> bool:
        """Whether all stages that share something divide it."""
        return self.prices.runs and all(self.stages[index].level for index in owners)

    def _sums(self, index: int, apart: Sequence[tuple[Sequence[int], float]]) -> list[_Sum]:
        """The sums of a stage's dense gradients and of those of its experts, over its replicas: those of the slowest of
        the data groups, which may lie differently in nodes."""
        stage, prices = self.stages[index], self.prices
        dense, experts = prices.parameters(stage.layers, stage.tensor, stage.expert)
        dense -= sum(shared / stage.tensor for readers, shared in apart if index in self._owners(readers))
        looked_up = prices.touched(stage.layers, stage.tensor, max(stage.rows) * self.micro_batches)
        found = []
        for every, stride, num_alike, elements, rows in (
            (stage.ranks, stage.tensor, stage.tensor, max(0.0, dense), stage.data * looked_up),
            (stage.data_group, stage.expert, stage.tensor * stage.expert, experts, 0.0),
        ):
            num_bytes = elements * prices.gradient_bytes
            groups = {prices.shape(every[first::stride]): every[first::stride] for first in range(stride)}
            slowest = None
            for group in groups.values():
                beside = self._far_sums if self._far_sums > 1 and prices.topology.spans_regions(group) else 1
                if prices.stack.zero and not prices.runs:
                    seconds = message = prices.over("reduce_scatter", group, num_alike * beside, num_bytes)
                else:
                    kind = self._scattered_by(stage)
                    seconds = prices.all_reduce(group, num_alike, num_bytes, stage.layers, kind, beside)
                    size = prices.message_bytes(group, num_bytes, num_alike, stage.layers, divided=kind != "all_reduce")
                    message = prices.over(kind, group, num_alike * beside, size)
                    if stage.owned and message and stage.expert == 1:
                        other = prices.over(kind, group, num_alike * beside, size, stage.owned)
                        seconds, message = seconds * other / message, other
                exchanged = prices.over("all_gather", group, num_alike * beside, rows * prices.gradient_bytes)
                if stage.tables_on_host:
                    on_host = gathering_on_host(prices.cluster, group, rows * prices.gradient_bytes)
                    exchanged = max(exchanged, on_host)
                seconds, message = seconds + exchanged, message or exchanged
                after = 0.0
                if prices.combines and seconds:
                    divided = kind != "all_reduce"
                    seconds, after = prices.combining(group, num_alike, num_bytes, stage.layers, divided=divided)
                if stage.state_on_host:
                    link = len(group) * link_to_host(prices.cluster, group[0])
                    seconds, message = max(seconds, num_bytes / link), max(message, size / link)
                if slowest is None or seconds + after > slowest.seconds + slowest.after:
                    summed = num_bytes + rows * prices.gradient_bytes
                    slowest = _Sum(group, num_alike, summed, seconds, message, after)
            found.extend([slowest] if slowest else [])
        return found

    @cached_property
    def _far_sums(self) -> int:
        """Sets of ranks whose sums go from region to region, all of them at the same time."""
        spans = self.prices.topology.spans_regions
        return sum(spans(self.stages[own[0]].data_group) for own in self._devices)

    def _overlapped(self, index: int, sums: Sequence[_Sum], last_share: float) -> tuple[float, Beside]:
        """The part of a stage's last backward after which its sums begin, taken as one, and how both slow each
        other."""
        prices, stage = self.prices, self.stages[index]
        own_prices = ruled(prices, stage)
        largest = max(sums, key=lambda one: one.seconds)
        divided = self._scattered_by(stage) != "all_reduce"
        message = prices.message_bytes(largest.group, largest.bytes, largest.num_alike, stage.layers, divided=divided)
        beside = prices.beside(largest.group, largest.num_alike, message)
        slowest = max(range(len(self.kinds[index])), key=lambda place: self.costs[index][place].backward)
        kind, backward = self.kinds[index][slowest], self.costs[index][slowest].backward * last_share
        if not backward:
            return 1.0, beside
        paces = [one.seconds / one.bytes if one.bytes else 0.0 for one in sums]
        layers = []
        seen: set[int] = set()
        for _, run in groupby(stage.layers, key=lambda layer: prices.profile.layers[layer]):
            members = list(run)
            dense, experts = prices.parameters(members, stage.tensor, stage.expert)
            for place, (readers, shared) in enumerate(prices.profile.tied):  # summed once the first of them is done
                if set(readers) & set(members):
                    dense -= shared / stage.tensor if place in seen or self._is_apart(readers) else 0.0
                    seen.add(place)
            spent = own_prices.stage(members, kind.group, kind.rows, self.micro_batches).backward * last_share
            spent += between_replicas(prices, members, kind.group, kind.rows, stage.row_group)[1]
            rows = stage.data * prices.touched(members, stage.tensor, max(stage.rows) * self.micro_batches)
            each = (max(0.0, dense) + rows, experts)
            summed = sum(part * prices.gradient_bytes * pace for part, pace in zip(each, paces, strict=True))
            layers.append((summed, spent))
        total = sum(one.seconds for one in sums)
        num = largest.bytes / message
        found = overlap(total, largest_lead(layers, beside), largest.seconds / num, beside, backward)
        return max(0.0, 1.0 - found.hidden / backward), beside

    def _gathered_after(self, stage: ChainStage, forward: float) -> float:
        """Seconds by which gathering the weights that each device has updated (ZeRO 1) exceeds the next forward, which
        hides it."""
        if self.prices.runs or self.prices.stack.zero != 1:
            return 0.0
        dense, experts = self.prices.parameters(stage.layers, stage.tensor, stage.expert)
        size = self.prices.gradient_bytes
        over = self.prices.over
        seconds = over("all_gather", stage.data_group, stage.tensor, dense * size)
        seconds += over("all_gather", stage.data_group[:: stage.expert], stage.tensor * stage.expert, experts * size)
        return max(0.0, seconds - forward)
