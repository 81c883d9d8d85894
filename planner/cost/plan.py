"""Cost of a plan: the workload of its step, its memory and its prediction, for stages on their own devices.

The one evaluation of plans: the search scores its candidates here, and ``whale estimate`` the uniform plan that its
degrees name. Replicas of a stage whose devices, places in their nodes, rows and neighbours are alike are one *kind*,
priced and simulated once, so thousands of ranks cost what a few do. What stages cost is in `whale.planner.cost.stage`,
how a step goes in `whale.planner.cost.step`. It decides nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from whale.ir.cluster import Cluster
from whale.ir.workload import (
    Boundary,
    DeviceMemory,
    LinkTime,
    NodeMemory,
    Prediction,
    Reduction,
    StageWork,
    Transfer,
    Workload,
)
from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.hosts import Held, adding_on_host, link_to_host, node_memories, stepping_on_host, with_copies
from whale.planner.cost.memory import SUMMED_BYTES, StateBytes, message_bytes, sharded_bytes
from whale.planner.cost.messages import Exchange, Sent, exchange, in_common
from whale.planner.cost.optimizers import costs_of
from whale.planner.cost.overlap import Beside, largest_lead, overlap
from whale.planner.cost.replicas import between_replicas, with_meetings
from whale.planner.cost.sharded import ShardedUnit, arrival_seconds, scattered_by, sharded_seconds
from whale.planner.cost.stage import CostModel, StageCost, TensorGroup
from whale.planner.cost.state_shares import fitting_shares, owned_bytes
from whale.planner.cost.step import overlap_slowdown, step, timing_of
from whale.planner.schedules.in_flight import in_flight, peak_kept

__all__ = ["PlanCost"]


SCATTERED_BEFORE = 0.3
"""Part of the last backward before which the scattering of gradients (ZeRO 1) does not begin (assumed)."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Replicas of a stage that are alike; the first stands for them.

    Attributes:
        index: of that slice in its stage.
        rank: of its device with least memory, which stands for all of the slice.
        share: of the state that they own.
    """

    group: TensorGroup
    rows: float
    index: int
    rank: int
    share: float


class _Exchanged(NamedTuple):
    """When the replicas of a stage exchange for the state that they divide: whether gradients are summed in ``each``
    micro-batch, and parameters gathered in ``tasks``, or else once a step."""

    each: bool
    tasks: bool

    @classmethod
    def of(cls, prices: CostModel, stage: ChainStage, micro_batches: int) -> _Exchanged:
        """The times at which Whale does it: not in tasks in which a replica has no rows."""
        rows = sum(stage.rows)
        last = min(1.0, prices.batch / rows - micro_batches + 1) if prices.batch and rows else 1.0
        idle = any(round(count * last) < 1 for count in stage.rows)
        return cls(each=stage.level > 1 and micro_batches > 1, tasks=stage.level == 3 and not idle)


class _Pair(NamedTuple):
    """Rows that a slice hands to one of the next stage."""

    source: int
    target: int
    rows: float
    same_node: bool


class _Sum(NamedTuple):
    """The sum of gradients over a data group, one of *num_alike*: bytes, and seconds of all and of one message."""

    group: tuple[int, ...]
    num_alike: int
    bytes: float
    seconds: float
    message: float


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """A plan with its kinds of replicas.

    Attributes:
        prices: of stages and messages.
        stages: in the order of the pipeline.
        micro_batches, schedule: of a step.
        kinds: of each stage; ``of`` says the kind of each replica, by position in ``kinds``.
        pairs: by stages, of which the first sends to the second.
        costs: of each stage and kind, for one micro-batch.
    """

    prices: CostModel
    stages: tuple[ChainStage, ...]
    micro_batches: int
    schedule: str
    kinds: tuple[tuple[_Kind, ...], ...]
    of: tuple[tuple[int, ...], ...]
    pairs: Mapping[tuple[int, int], tuple[_Pair, ...]]
    costs: tuple[tuple[StageCost, ...], ...]

    @classmethod
    def of_stages(cls, prices: CostModel, stages: Sequence[ChainStage], micro_batches: int, schedule: str) -> PlanCost:
        """Price the stages, which form a chain over the model's layers.

        Complexity: linear in ranks, to see which are alike.
        """
        groups = [
            [prices.group(stage.slice(index), stage.data, stage.expert, stage.context) for index in range(stage.data)]
            for stage in stages
        ]
        pairs = {
            (source, target): tuple(_pairs(prices.cluster, stages[source], stages[target]))
            for source, target in _senders(prices, stages)
        }
        looks: list[list[set[tuple[object, ...]]]] = [[set() for _ in stage.rows] for stage in stages]
        for (source, target), found in pairs.items():
            here, there = stages[source], stages[target]
            for pair in found:
                ahead = (groups[target][pair.target].kind, there.rows[pair.target], pair.same_node)
                back = (groups[source][pair.source].kind, here.rows[pair.source], pair.same_node)
                looks[source][pair.source].add(("to", target, *ahead))
                looks[target][pair.target].add(("from", source, *back))
        keys = [
            [
                (group.kind, rows, frozenset(see), stage.share(place) if stage.level else 1.0)
                for place, (group, rows, see) in enumerate(zip(own, stage.rows, seen, strict=True))
            ]
            for stage, own, seen in zip(stages, groups, looks, strict=True)
        ]
        together = _on_same_ranks(stages)
        kinds, of = [], []
        for index, (stage, own) in enumerate(zip(stages, groups, strict=True)):
            positions: dict[object, int] = {}
            members: list[_Kind] = []
            places = []
            for place, (group, rows) in enumerate(zip(own, stage.rows, strict=True)):
                key = tuple(keys[other][place] for other in together[index])
                if key not in positions:
                    positions[key] = len(members)
                    devices = [prices.cluster.devices[rank] for rank in stage.slice(place)]
                    smallest = min(devices, key=lambda device: device.memory_bytes)
                    share = stage.share(place) if stage.level else 1.0
                    members.append(_Kind(group=group, rows=rows, index=place, rank=smallest.rank, share=share))
                places.append(positions[key])
            kinds.append(tuple(members))
            of.append(tuple(places))
        found_costs = []
        for stage, own_kinds in zip(stages, kinds, strict=True):
            shards = len(stage.data_group) if prices.stack.zero and not prices.runs else 1
            ruled = _ruled(prices, stage)
            costs = [ruled.stage(stage.layers, kind.group, kind.rows, micro_batches, shards) for kind in own_kinds]
            costs = [
                _with_gathers(ruled, stage, kind, cost, micro_batches, pipelined=len(stages) > 1)
                for kind, cost in zip(own_kinds, costs, strict=True)
            ]
            met = between_replicas(prices, stage.layers, own_kinds[0].group, max(stage.rows), stage.data_group)
            found_costs.append(tuple(with_meetings(costs, *met)))
        return cls(
            prices=prices,
            stages=tuple(stages),
            micro_batches=micro_batches,
            schedule=schedule,
            kinds=tuple(kinds),
            of=tuple(of),
            pairs=pairs,
            costs=tuple(found_costs),
        )

    def prediction(self, workload: Workload, batch: float) -> Prediction:
        """The prediction of a step of *batch* rows, by its *workload*."""
        return step(
            timing_of(workload),
            devices=self.prices.num_of_types,
            precision=self.prices.precision,
            flops=3 * batch * self.prices.flops,
            memory=sorted(self.memory(), key=lambda device: device.rank),
            hosts=self.hosts(),
            measured=all(price.measured for own in self.costs for price in own),
            launched=self._launched,
        )

    @property
    def _launched(self) -> float:
        """The part of the tasks' time that the host's launches decide."""
        costs = [cost for own in self.costs for cost in own]
        return sum(cost.launched for cost in costs) / max(1e-12, sum(cost.forward + cost.backward for cost in costs))

    @cached_property
    def _devices(self) -> list[tuple[int, ...]]:
        """The stages of each set of ranks, ascending."""
        return list(dict.fromkeys(_on_same_ranks(self.stages)))

    # The workload

    def workload(self, last_share: float = 1.0) -> Workload:
        """The step of one rank for each kind of replica; the last micro-batch may have only a share of the rows."""
        works = []
        for index, (own, costs) in enumerate(zip(self.kinds, self.costs, strict=True)):
            kept = tuple(round(cost.kept) for cost in costs)
            gathered = tuple(self._arriving(index, kind) for kind in own) if self.stages[index].level else ()
            works.append(
                StageWork(
                    ranks=tuple(kind.rank for kind in own),
                    forward=tuple(cost.forward for cost in costs),
                    backward=tuple(cost.backward for cost in costs),
                    weights=tuple(cost.weights for cost in costs),
                    communication=tuple(cost.communication for cost in costs),
                    kept_bytes=kept,
                    forward_peak_bytes=kept,
                    backward_peak_bytes=tuple(round(cost.working) for cost in costs),
                    gathered=gathered,
                )
            )
        boundaries, links = self._boundaries()
        update = [0.0] * len(self.prices.cluster.devices)
        for stage, own, costs in zip(self.stages, self.kinds, self.costs, strict=True):
            gathered_after = self._gathered_after(stage, min(cost.forward for cost in costs))
            for kind, cost in zip(own, costs, strict=True):
                update[kind.rank] += self._update(stage, kind, cost) + gathered_after
        return Workload(
            world_size=len(self.prices.cluster.devices),
            micro_batches=self.micro_batches,
            last_share=last_share,
            schedule=self.schedule,
            stages=tuple(works),
            boundaries=boundaries,
            reductions=tuple(sorted(self._reductions(last_share), key=self._launched_at)),
            links=links,
            update=tuple(update),
            overhead=self.prices.overhead_of(sorted({rank for stage in self.stages for rank in stage.ranks})),
            overlap_slowdown=overlap_slowdown(self.prices.num_of_types),
            blocking_transfers=self.prices.stack.blocks,
        )

    @staticmethod
    def _launched_at(reduction: Reduction) -> tuple[int, bool]:
        """Sort key: as Whale's ranks launch reductions, later stages first, whose backwards end first, and of a stage
        its own before what it shares."""
        return -min(reduction.stages), len(reduction.stages) > 1

    def _boundaries(self) -> tuple[tuple[Boundary, ...], tuple[LinkTime, ...]]:
        """The messages between kinds of replicas: the slowest of those between the replicas of two kinds that have rows
        in common, forward and back."""
        boundaries: list[Boundary] = []
        links: dict[tuple[int, int], LinkTime] = {}
        for (here, there), pairs in self.pairs.items():
            example: dict[tuple[int, int], _Pair] = {}
            for pair in pairs:
                example.setdefault((self.of[here][pair.source], self.of[there][pair.target]), pair)
            ways: list[list[Transfer]] = [[], []]
            messages = self._whales if self.prices.exchanges else self._of_others
            found = messages(here, there, example)
            for way, transfers in enumerate(ways):
                # All messages of a way are in each other's price; the slowest shares its ends with other boundaries.
                ends: set[str] = set()
                for (source, target), both in sorted(found.items(), key=lambda one: -one[1][way].seconds):
                    sent, ranks = both[way], (self.kinds[here][source].rank, self.kinds[there][target].rank)
                    a, b = ranks[:: -1 if way else 1]
                    transfers.append(Transfer(source=a, target=b, bytes=sent.bytes))
                    spent = max(1e-12, sent.seconds - sent.latency)
                    own = set(self._ends(a, b, example[source, target].same_node)) - ends
                    ends |= own
                    link = LinkTime(
                        source=a,
                        target=b,
                        latency=sent.latency,
                        bandwidth=max(1, sent.bytes) / spent,
                        resources=tuple(sorted(own)),
                    )
                    if (a, b) not in links or link.bandwidth < links[a, b].bandwidth:
                        links[a, b] = link
            boundaries.append(
                Boundary(source_stage=here, target_stage=there, forward=tuple(ways[0]), backward=tuple(ways[1]))
            )
        return tuple(boundaries), tuple(links.values())

    def _ends(self, source: int, target: int, same_node: bool) -> tuple[str, ...]:
        """The resources that a message shares with those of other boundaries, in stacks like Whale's."""
        if not self.prices.exchanges:
            return ()
        end = self.prices.topology.end
        return end(source, "out", same_node), end(target, "in", same_node)

    def _whales(
        self, here: int, there: int, example: Mapping[tuple[int, int], _Pair]
    ) -> dict[tuple[int, int], Exchange]:
        """The messages between an example of each two kinds, with all that share their adapters."""
        pairs = [(pair.source, pair.target) for pair in example.values()]
        found = exchange(self.prices, self.stages[here], self.stages[there], pairs)
        return {kinds: found[pair.source, pair.target] for kinds, pair in example.items()}

    def _of_others(
        self, here: int, there: int, example: Mapping[tuple[int, int], _Pair]
    ) -> dict[tuple[int, int], Exchange]:
        """The same in stacks other than Whale's. A replica that sends to several of a kind, or receives from several,
        uses one link for all: the busier end counts."""
        sent: dict[tuple[int, int], float] = {}
        received: dict[tuple[int, int], float] = {}
        for pair in self.pairs[here, there]:
            source, target = self.of[here][pair.source], self.of[there][pair.target]
            sent[pair.source, target] = sent.get((pair.source, target), 0) + pair.rows
            received[source, pair.target] = received.get((source, pair.target), 0) + pair.rows
        rows = dict.fromkeys(example, 0.0)
        for (index, target), count in sent.items():
            between = self.of[here][index], target
            rows[between] = max(rows[between], count)
        for (source, index), count in received.items():
            between = source, self.of[there][index]
            rows[between] = max(rows[between], count)
        found = {}
        for kinds, pair in example.items():
            whole = self.prices.output_bytes(self.stages[here].last - 1, rows[kinds])
            groups = self.kinds[here][kinds[0]].group, self.kinds[there][kinds[1]].group
            ends = self.stages[here].slice(pair.source), self.stages[there].slice(pair.target)
            ways = ((*ends, groups[1]), (*ends[::-1], groups[0]))
            found[kinds] = Exchange(*(self._of_other(*way, whole) for way in ways))
        return found

    def _of_other(self, source: Sequence[int], target: Sequence[int], into: TensorGroup, whole: float) -> Sent:
        size = self.prices.handed(whole, len(source), len(target), positions=into.positions)
        hop = self.prices.hop(source, target, into, size, whole)
        return Sent(size, hop.latency, hop.latency + size / hop.bandwidth)

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
        for readers, shared in apart:
            owners = self._owners(readers)
            degree = min(self.stages[index].tensor for index in owners)
            group = tuple(rank for index in owners for rank in self.stages[index].data_group)
            if prices.runs and self._are_unlike(owners):  # then it is whole on each rank, and all of them sum it
                degree, group = 1, tuple(rank for index in owners for rank in self.stages[index].ranks)
            seconds = prices.over("all_reduce", group, degree, shared / degree * size)
            ranks = tuple(kind.rank for index in owners for kind in self.kinds[index])
            yield Reduction(ranks=ranks, stages=owners, bytes=round(shared / degree * size), seconds=seconds)

    def _sums(self, index: int, apart: Sequence[tuple[Sequence[int], float]]) -> list[_Sum]:
        """The sums of a stage's dense gradients and of those of its experts, over its replicas: those of the slowest of
        the data groups, which may lie differently in nodes."""
        stage, prices = self.stages[index], self.prices
        dense, experts = prices.parameters(stage.layers, stage.tensor, stage.expert)
        dense -= sum(shared / stage.tensor for readers, shared in apart if index in self._owners(readers))
        found = []
        for every, stride, num_alike, elements in (
            (stage.ranks, stage.tensor, stage.tensor, max(0.0, dense)),
            (stage.data_group, stage.expert, stage.tensor * stage.expert, experts),
        ):
            num_bytes = elements * prices.gradient_bytes
            groups = {prices.shape(every[first::stride]): every[first::stride] for first in range(stride)}
            slowest = None
            for group in groups.values():
                if prices.stack.zero and not prices.runs:
                    seconds = message = prices.over("reduce_scatter", group, num_alike, num_bytes)
                else:
                    kind = self._scattered_by(stage)
                    seconds = prices.all_reduce(group, num_alike, num_bytes, stage.layers, kind)
                    size = prices.message_bytes(group, num_bytes, num_alike, stage.layers, divided=kind != "all_reduce")
                    message = prices.over(kind, group, num_alike, size)
                if stage.state_on_host:
                    link = len(group) * link_to_host(prices.cluster, group[0])
                    seconds, message = max(seconds, num_bytes / link), max(message, size / link)
                if slowest is None or seconds > slowest.seconds:
                    slowest = _Sum(group, num_alike, num_bytes, seconds, message)
            found.extend([slowest] if slowest else [])
        return found

    def _overlapped(self, index: int, sums: Sequence[_Sum], last_share: float) -> tuple[float, Beside]:
        """The part of a stage's last backward after which its sums begin, taken as one, and how both slow each
        other."""
        prices, stage = self.prices, self.stages[index]
        ruled = _ruled(prices, stage)
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
            spent = ruled.stage(members, kind.group, kind.rows, self.micro_batches).backward * last_share
            spent += between_replicas(prices, members, kind.group, kind.rows, stage.data_group)[1]
            each = (max(0.0, dense), experts)
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

    def _scattered_by(self, stage: ChainStage) -> str:
        """The collective by which a stage sums its gradients."""
        return scattered_by(self.prices.num_of_types) if stage.level else "all_reduce"

    @cached_property
    def _exchanged(self) -> list[_Exchanged]:
        return [_Exchanged.of(self.prices, stage, self.micro_batches) for stage in self.stages]

    def _update(self, stage: ChainStage, kind: _Kind, cost: StageCost) -> float:
        """Seconds of the optimizer of a device, for what it owns."""
        if stage.state_on_host:
            own = _own_bytes(self.prices, stage, kind)
            return stepping_on_host(self.prices.cluster, kind.rank, own, self.prices.optimizer)
        return cost.update * _owned(self.prices, stage, kind)

    def _arriving(self, index: int, kind: _Kind) -> float:
        """Seconds from the beginning of the step before which the first forward of a stage cannot end, because its
        parameters are gathered; ranks start with those of the stages before."""
        stage, prices = self.stages[index], self.prices
        if self._exchanged[index].tasks:
            return 0.0
        units = _units(_ruled(prices, stage), stage, kind, self.micro_batches)
        alike = (self.stages[other] for other in range(index) if self.stages[other].ranks == stage.ranks)
        before = sum(unit.num * unit.gather for one in alike for unit in _units(prices, one, kind, self.micro_batches))
        return arrival_seconds(units, slowdown=overlap_slowdown(prices.num_of_types), before=before)

    def _is_apart(self, readers: Sequence[int]) -> bool:
        """Whether a tied parameter is on several sets of ranks."""
        return len({self.stages[index].ranks for index in self._owners(readers)}) > 1

    def _owners(self, readers: Sequence[int]) -> tuple[int, ...]:
        """The stages that have one of the layers *readers*."""
        return tuple(
            index
            for index, stage in enumerate(self.stages)
            if any(stage.first <= layer < stage.last for layer in readers)
        )

    # Memory

    def _whole(self, index: int) -> float:
        """Elements that devices of a stage have besides because what stages share is whole on each of them, as Whale
        runs it, if their meshes are unlike."""
        if not self.prices.runs:
            return 0.0
        owners = [(self._owners(readers), shared) for readers, shared in self.prices.profile.tied]
        unlike = [shared for own, shared in owners if index in own and self._are_unlike(own)]
        return sum(unlike) * (1 - 1 / self.stages[index].tensor)

    def _are_unlike(self, stages: Sequence[int]) -> bool:
        """Whether stages have other meshes or rows than each other."""
        return len({(self.stages[index].rows, *self.stages[index].degrees) for index in stages}) > 1

    def _summing_tied(self, layers: Sequence[int], stage: ChainStage, kind: _Kind, kept: int) -> float:
        """Bytes beside *kept* while a device sums the gradients of the readers of a tied parameter, as autograd does:
        that of the last reader waits for that of the first, and then there is the sum too; activations are freed."""
        prices, most = _ruled(self.prices, stage), 0.0
        if not prices.runs:
            return 0.0
        for readers, shared in prices.profile.tied:
            here = sorted(set(layers).intersection(readers))
            if len(here) < 2:
                continue
            size = shared / stage.tensor * prices.precision.element_bytes
            between = [
                prices.layer(prices.profile.layers[layer], kind.group, kind.rows, 1)
                for layer in layers
                if layer < here[-1]
            ]
            most = max(most, size + max(price.working for price in between))
            most = max(most, 3 * size - kept)
        return most

    def memory(self) -> Iterator[DeviceMemory]:
        """Memory of the smallest device of each kind of replica."""
        prices, zero = self.prices, 0 if self.prices.runs else self.prices.stack.zero
        any_on_host = any(stage.offload != "none" for stage in self.stages)
        renews = zero >= 2 and len(self.stages) > 1  # weights and gradients are whole, but made anew in each step
        for own in self._devices:
            stage = self.stages[own[0]]
            layers = [layer for index in own for layer in self.stages[index].layers]
            degrees, shards = (stage.tensor, stage.expert), len(stage.data_group)
            more = sum(self._whole(index) for index in own)
            state = prices.state_of(layers, *degrees, shards=shards, zero=1 if renews else zero) + prices.state(more)
            renewed = 0.0
            if renews:  # gradients as they are summed
                state = replace(state, gradients=state.parameters / prices.precision.element_bytes * SUMMED_BYTES)
                renewed = state.parameters + state.gradients
            sharded = self._sharded(layers, *degrees, shards)
            stepping = stepping_whole = round(prices.step_bytes(sum(prices.parameters(layers, *degrees)) + more))
            whole = state
            for place, kind in enumerate(self.kinds[own[0]]):
                device = prices.cluster.devices[kind.rank]
                if stage.level:
                    stepping = 0 if stage.state_on_host else round(stepping_whole * _owned(prices, stage, kind))
                if prices.step_in_backward:  # of a bucket at a time
                    unit = prices.full_bucket(stage.data_group, layers, *degrees, divided=stage.level > 0)
                    stepping = min(stepping, round(unit))
                kept = self._kept(own, place) + round(sum(self._messages(index, kind) for index in own))
                working = max(self.costs[index][place].working for index in own)
                working = round(max(working, stepping - kept, self._summing_tied(layers, stage, kind, kept)))
                if stage.level:
                    one = sum(self.costs[index][place].kept - self._shared_casts(index) for index in own)
                    state, sharded = self._divided(own, layers, kind, whole, (kept, one, working))
                elif prices.summed_bytes is not None and shards > 1:  # two buckets are there as they are exchanged, too
                    held = min(state.gradients, 2 * prices.largest_bucket(stage.data_group, layers, *degrees))
                    sharded = held * prices.summed_bytes / prices.precision.element_bytes
                if prices.step_in_backward and self.micro_batches == 1 and not stage.level:
                    held = min(whole.gradients, 3 * unit) + self._stepping(layers, degrees, unit)
                    state = replace(state, gradients=_passing(whole.gradients, unit, held, kept))
                wasted = round((kept + working + sharded + renewed) * prices.wasted)
                yield DeviceMemory(
                    rank=kind.rank,
                    device=device.name,
                    capacity=device.memory_bytes,
                    parameters=round(state.parameters),
                    gradients=round(state.gradients),
                    optimizer=round(state.optimizer),
                    activations=kept,
                    workspace=working,
                    buffers=round(sharded) + wasted,
                    framework=round(prices.overhead_bytes[device.type.name]),
                    **(self._on_host(own, place, kind) if any_on_host else {}),
                )

    def _on_host(self, own: tuple[int, ...], place: int, kind: _Kind) -> dict[str, int]:
        """Bytes that a device has on its host."""
        hosted = [index for index in own if self.stages[index].state_on_host]
        state = sum(_own_bytes(self.prices, self.stages[index], kind) for index in hosted)
        kept = [self.costs[index][place].hosted for index in own]
        return {
            "host_state": round(state * (2 + self.prices.states)),
            "host_activations": self._in_flight(own, kept) if any(kept) else 0,
        }

    def hosts(self) -> tuple[NodeMemory, ...]:
        """Memory of the nodes on which ranks keep something, one of each kind."""
        if all(stage.offload == "none" for stage in self.stages):
            return ()
        of_kinds = {one.rank: Held(one.host_state, one.host_activations) for one in self.memory()}
        held: dict[int, Held] = {}
        for own in self._devices:
            stage, kinds = self.stages[own[0]], self.kinds[own[0]]
            for replica, place in enumerate(self.of[own[0]]):
                held |= dict.fromkeys(stage.slice(replica), of_kinds[kinds[place].rank])
        return node_memories(self.prices.cluster, held)

    def _divided(
        self,
        own: Sequence[int],
        layers: Sequence[int],
        kind: _Kind,
        whole: StateBytes,
        activations: tuple[float, float, float],
    ) -> tuple[StateBytes, float]:
        """Bytes of what a device has of the *whole* state of its stages, and of buckets that are whole for a while, as
        Whale runs it.

        Two buckets of parameters that tasks gather are there: one that is read and the next. Sums of gradients have a
        bucket that is not complete, and two on their way to their owners with what each receives, which on processors
        are the terms of the other ranks, and the sum. They are there while what is kept is freed, unless gradients are
        summed in each micro-batch. *activations* are the bytes that all micro-batches keep, that one keeps, and of what
        runs.
        """
        prices, stage, done = self.prices, self.stages[own[0]], self._exchanged[own[0]]
        size = prices.precision.element_bytes
        frozen = size * sum(prices.frozen_of(prices.profile.layers[one], stage.tensor, stage.expert) for one in layers)
        trained, share = whole.parameters - frozen, _owned(self.prices, stage, kind)
        apart = size * sum(
            shared / stage.tensor
            for readers, shared in prices.profile.tied
            if self._is_apart(readers) and set(layers).intersection(readers)
        )
        held = 0.0 if stage.state_on_host else share
        once = trained * held + apart * (1 - held)  # what stages share is whole
        unit = min(trained, prices.largest_bucket(stage.data_group, layers, stage.tensor, stage.expert, divided=True))
        exchanged = prices.gradient_bytes / size
        received = exchanged * share * unit
        if any(type_.is_processor for type_ in kind.group.types):  # of one micro-batch a bucket: small shares need it
            received = exchanged * unit if self.micro_batches == 1 else received * (len(stage.data_group) - 1)
        received = 2 * received + held * unit  # a sum on the host is not here
        if stage.data == 1 and (stage.expert > 1 or len(stage.data_group) == 1):
            received = 0.0  # a rank sums the largest buckets with no other
        kept, kept_one, working = activations
        summed = min(trained * max(1.0, exchanged), (1 + 2 * max(1.0, exchanged)) * unit) + received
        gradients, summing = whole.gradients, max(0.0, received - kept_one / 2)
        if done.each:
            gradients, summing = once, summed
        elif self.micro_batches == 1 and (stage.state_on_host or prices.step_in_backward):
            if not stage.state_on_host:
                summed += self._stepping(layers, (stage.tensor, stage.expert), share * unit)
            gradients, summing = 0.0, _passing(trained, unit, summed, kept)
        elif self.micro_batches == 1:
            needed = max(0.0, once + summed - kept - working)
            gradients, summing = min(once, needed), max(0.0, needed - once)
        casts = prices.casts(layers, (stage.tensor, stage.expert))
        read = trained + casts * (1 - size / 2)  # as they are gathered
        kept_whole = (once + read if casts else trained) if not done.tasks else once
        state = StateBytes(
            parameters=frozen + kept_whole,
            gradients=gradients,
            optimizer=whole.optimizer * held,
        )
        return state, summing + (min(read, 2 * unit * read / max(1.0, trained)) if done.tasks else 0.0)

    def _stepping(self, layers: Sequence[int], degrees: tuple[int, int], unit: float) -> float:
        """Temporary bytes of an optimizer's step for a bucket of *unit* bytes."""
        prices = self.prices
        costs, size = costs_of(prices.optimizer), prices.precision.element_bytes
        if not any(type_.is_processor for type_ in prices.num_of_types) and costs.in_lists:
            return costs.in_lists * unit
        return costs.one_by_one * min(unit, size * prices.largest_parameter(layers, *degrees))

    def fitting_shares(self) -> list[tuple[float, ...]]:
        """Shares of each stage's state, of its replicas, that fit best where equal ones do not; () are equal ones, or
        where it divides none."""
        held = {device.rank: device for device in self.memory()}
        found: list[tuple[float, ...]] = []
        for index, stage in enumerate(self.stages):
            rooms, owned = [], 0.0
            for place in self.of[index] if stage.level and not stage.state_on_host else ():
                device = held[self.kinds[index][place].rank]
                at_once = self.micro_batches == 1 or self._exchanged[index].each
                parts = device.parameters, device.gradients, device.optimizer
                own = owned_bytes(
                    *parts, level=2 + self._exchanged[index].tasks if stage.level > 1 else 1, at_once=at_once
                )
                rooms.append(device.capacity - device.total + own)
                owned += own
            found.append(fitting_shares(rooms, owned) if rooms else ())
        return found

    def _sharded(self, layers: Sequence[int], tensor: int, expert: int, shards: int) -> float:
        """Bytes of weights and gradients that are whole for a while although devices divide them."""
        prices, zero = self.prices, self.prices.stack.zero
        if zero < 2 or shards == 1:
            return 0.0
        blocks = [layer for layer in layers if prices.repeats(prices.profile.layers[layer])]
        others = [layer for layer in layers if not prices.repeats(prices.profile.layers[layer])]
        return sharded_bytes(
            [sum(prices.parameters([layer], tensor, expert)) for layer in blocks],
            sum(prices.parameters(others, tensor, expert)),
            precision=prices.precision,
            zero=zero,
            shards=shards,
        )

    def _kept(self, own: tuple[int, ...], place: int) -> int:
        """Bytes that ranks which run the stages *own* save at a time for backwards."""
        shared = [self._shared_casts(index) for index in own]
        sizes = [self.costs[index][place].kept - casts for index, casts in zip(own, shared, strict=True)]
        gathered = self.stages[own[0]].level > 0  # then the casts are the gathered parameters
        return self._in_flight(own, sizes) + (0 if gathered else round(sum(shared)))

    def _in_flight(self, own: tuple[int, ...], sizes: Sequence[float]) -> int:
        """Bytes at a time of what the micro-batches in flight have, each *sizes* in the stages *own*."""
        depth, whole = len(self.stages), list(map(round, sizes))
        if len(own) == 1:
            return in_flight(self.schedule, depth, own[0], self.micro_batches) * whole[0]
        return peak_kept(self.schedule, self._sets, self.micro_batches, dict(zip(own, whole, strict=True)))

    def _shared_casts(self, index: int) -> float:
        """Bytes of the casts of parameters in what a micro-batch saves of a stage, which are not its own."""
        stage = self.stages[index]
        return self.prices.casts(stage.layers, (stage.tensor, stage.expert)) if stage.recompute == "none" else 0.0

    @cached_property
    def _sets(self) -> tuple[frozenset[int], ...]:
        """For each stage the set of ranks that runs it, as a number."""
        return tuple(frozenset(own[:1]) for own in _on_same_ranks(self.stages))

    def _messages(self, index: int, kind: _Kind) -> float:
        """Bytes of the messages of a stage that a rank holds at a time."""
        stage, prices = self.stages[index], self.prices
        rows = kind.rows / stage.size * stage.tensor
        if prices.runs:
            rows = kind.group.whole_rows(int(kind.rows)) / stage.expert
        entering = prices.handed_bytes(stage.first - 1, rows) if index else 0.0
        leaving = prices.handed_bytes(stage.last - 1, rows) if index < len(self.stages) - 1 else 0.0
        held = in_flight(self.schedule, len(self.stages), index, self.micro_batches)
        return float(message_bytes(entering, leaving, held))


def _on_same_ranks(stages: Sequence[ChainStage]) -> list[tuple[int, ...]]:
    """For each stage those that run on the same ranks, itself included."""
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for index, stage in enumerate(stages):
        by_ranks.setdefault(stage.ranks, []).append(index)
    return [tuple(by_ranks[stage.ranks]) for stage in stages]


def _ruled(prices: CostModel, stage: ChainStage) -> CostModel:
    """The prices of a stage's layers, without exchanges of its state."""
    return prices.under(stage.recompute, offload="activations" if stage.activations_on_host else "none")


def _owned(prices: CostModel, stage: ChainStage, kind: _Kind) -> float:
    """The part of its state that a device owns: of experts, as many fewer ranks hold as all others."""
    if not stage.level:
        return 1.0
    dense, experts = prices.parameters(stage.layers, stage.tensor, stage.expert)
    return kind.share * (dense / stage.expert + experts) / max(1.0, dense + experts)


def _passing(gradients: float, unit: float, held: float, kept: float) -> float:
    """Bytes that gradients which leave a device bucket by bucket have beside the *kept* activations of a backward. The
    memory of a bucket of *unit* bytes is there from its first gradient on; most of what is *held* is, once two of them
    are on their way, when the activations of these are freed."""
    return max(min(gradients, unit), held - kept * min(1.0, 2 * unit / max(1.0, gradients)))


def _own_bytes(prices: CostModel, stage: ChainStage, kind: _Kind) -> float:
    """Bytes of a stage's trained parameters that a device owns."""
    elements = sum(prices.parameters(stage.layers, stage.tensor, stage.expert))
    return elements * prices.precision.element_bytes * _owned(prices, stage, kind)


def _with_gathers(
    prices: CostModel, stage: ChainStage, kind: _Kind, cost: StageCost, micro_batches: int, *, pipelined: bool
) -> StageCost:
    """A stage whose weights and gradients its replicas share (ZeRO 2 and 3).

    What is gathered at a time is each block, and the layers before, between and after blocks together; in Whale each
    bucket. Where weights are not gathered for every micro-batch (ZeRO 2, in other stacks pipelines), and gradients not
    reduced with every one, a micro-batch has its share of what the step has; in Whale the step itself has it.
    """
    if prices.runs:
        done = _Exchanged.of(prices, stage, micro_batches)
        gathers, reduces, regather = float(done.tasks), float(done.each), True
    else:
        regather = prices.stack.zero == 3 and not pipelined
        gathers = 1.0 if regather else 1 / micro_batches
        reduces = 1 / micro_batches if pipelined else 1.0
        if prices.stack.zero < 2:
            return cost
    if (len(stage.data_group) < 2 and not stage.state_on_host) or not (gathers or reduces):
        return cost
    units = [
        one._replace(gather=gathers * one.gather, reduce=reduces * one.reduce)
        for one in _units(prices, stage, kind, micro_batches)
    ]
    slowdown = prices.stack.calibration.sharded_slowdown
    if prices.runs:
        slowdown = overlap_slowdown(prices.num_of_types)
    forward, backward = sharded_seconds(
        units, regather=regather, slowdown=slowdown, keeps_last=not prices.runs, tail=not prices.runs
    )
    if stage.state_on_host:
        own, link = _own_bytes(prices, stage, kind), link_to_host(prices.cluster, kind.rank)
        how = {"kept": cost.hosted, "read": gathers * own, "summed": reduces * own}
        forward, backward = with_copies(forward, backward, **how, link=link)
        backward += adding_on_host(prices.cluster, kind.rank, reduces * own) * (1 - 1 / micro_batches)
    communication = cost.communication + forward - cost.forward + backward - cost.backward
    return cost._replace(forward=forward, backward=backward, communication=min(communication, forward + backward))


def _units(prices: CostModel, stage: ChainStage, kind: _Kind, micro_batches: int) -> list[ShardedUnit]:
    """Parts of a stage that are gathered and reduced at a time, with the computation that reads them."""
    precision, layers = prices.precision, prices.profile.layers
    size = min(2, precision.element_bytes) if precision.mixed and not prices.runs else precision.element_bytes
    shards = 1 if prices.runs else len(stage.data_group)
    scattered = scattered_by(prices.num_of_types) if prices.runs else "reduce_scatter"
    units = []
    for block, run in groupby(stage.layers, key=lambda index: layers[index] if prices.repeats(layers[index]) else -1):
        members = list(run)
        num: float = len(members) if block >= 0 else 1
        dense, experts = (size * part for part in prices.parameters(members, stage.tensor, stage.expert))
        num_bytes = dense + experts
        if prices.runs:
            unit = prices.message_bytes(stage.data_group, num_bytes, stage.tensor, members, divided=True)
            num = max(1.0, round(num_bytes / max(1.0, unit)))
        spent = prices.stage(members, kind.group, kind.rows, micro_batches, shards)
        casts = prices.casts(members, (stage.tensor, stage.expert))
        low = 1 + casts * (1 - size / 2) / max(1.0, num_bytes)  # of what is gathered, as it is read
        other = prices.gradient_bytes / size if prices.runs else 1.0
        gather = _exchanged(prices, stage, "all_gather", low * dense / num, low * experts / num)
        reduce = _exchanged(prices, stage, scattered, other * dense / num, other * experts / num)
        if stage.state_on_host:
            own = kind.share * (dense / stage.expert + experts) / num
            copied = own / link_to_host(prices.cluster, kind.rank)
            gather, reduce = max(gather, copied), max(reduce, copied)
        units.append(
            ShardedUnit(
                forward=spent.forward / num,
                backward=spent.backward / num,
                gather=gather,
                reduce=reduce,
                num=int(num),
            )
        )
    return units


def _exchanged(prices: CostModel, stage: ChainStage, kind: str, dense: float, experts: float) -> float:
    """Seconds of a collective over those that hold bytes of dense parameters, and of experts, whom fewer hold."""
    if stage.expert == 1:
        return prices.over(kind, stage.data_group, stage.tensor, dense + experts)
    own = prices.over(kind, stage.data_group[:: stage.expert], stage.tensor * stage.expert, experts)
    return own + prices.over(kind, stage.data_group, stage.tensor, dense)


def _senders(prices: CostModel, stages: Sequence[ChainStage]) -> list[tuple[int, int]]:
    """The stages that send to others: each to the next, and those that make what passes over stages."""
    found = {(index, index + 1): None for index in range(len(stages) - 1)}
    if prices.exchanges:
        bounds = [stage.last for stage in stages]
        for skip in prices.profile.skips:
            source = bisect_right(bounds, skip.layer)
            targets = {bisect_right(bounds, layer) for layer in skip.readers}
            found |= {(source, target): None for target in sorted(targets - {source})}
    return list(found)


def _pairs(cluster: Cluster, here: ChainStage, there: ChainStage) -> Iterator[_Pair]:
    """Pairs of replicas with p2p transfers."""
    for source, target, rows in in_common(here.rows, there.rows):
        a, b = here.ranks[source * here.size], there.ranks[target * there.size]
        yield _Pair(source, target, rows, cluster.devices[a].node == cluster.devices[b].node)
