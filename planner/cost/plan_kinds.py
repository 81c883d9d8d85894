"""A plan with its kinds of replicas, each priced once: what its messages, sums and memory are worked out from.

Replicas of a stage whose devices, places in their nodes, rows and neighbours are alike are one *kind*, so thousands of
ranks cost what a few do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

from whale.ir.cluster import Cluster
from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.messages import in_common
from whale.planner.cost.plan_gathers import with_gathers
from whale.planner.cost.replica_kinds import Exchanged, Kind, ruled
from whale.planner.cost.replicas import between_replicas, with_meetings
from whale.planner.cost.sharded import scattered_by
from whale.planner.cost.stage import CostModel
from whale.planner.cost.stage_cost import StageCost

__all__ = ["Pair", "PlanKinds", "on_same_ranks"]


class Pair(NamedTuple):
    """Rows that a slice hands to one of the next stage."""

    source: int
    target: int
    rows: float
    same_node: bool


@dataclass(frozen=True, kw_only=True)
class PlanKinds:
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
    kinds: tuple[tuple[Kind, ...], ...]
    of: tuple[tuple[int, ...], ...]
    pairs: Mapping[tuple[int, int], tuple[Pair, ...]]
    costs: tuple[tuple[StageCost, ...], ...]

    @classmethod
    def of_stages(cls, prices: CostModel, stages: Sequence[ChainStage], micro_batches: int, schedule: str) -> Self:
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
        together = on_same_ranks(stages)
        kinds, of = [], []
        for index, (stage, own) in enumerate(zip(stages, groups, strict=True)):
            positions: dict[object, int] = {}
            members: list[Kind] = []
            places = []
            for place, (group, rows) in enumerate(zip(own, stage.rows, strict=True)):
                key = tuple(keys[other][place] for other in together[index])
                if key not in positions:
                    positions[key] = len(members)
                    devices = [prices.cluster.devices[rank] for rank in stage.slice(place)]
                    smallest = min(devices, key=lambda device: device.memory_bytes)
                    share = stage.share(place) if stage.level else 1.0
                    members.append(Kind(group=group, rows=rows, index=place, rank=smallest.rank, share=share))
                places.append(positions[key])
            kinds.append(tuple(members))
            of.append(tuple(places))
        found_costs = []
        for stage, own_kinds in zip(stages, kinds, strict=True):
            shards = len(stage.data_group) if prices.stack.zero and not prices.runs else 1
            own_prices = ruled(prices, stage)
            costs = [own_prices.stage(stage.layers, kind.group, kind.rows, micro_batches, shards) for kind in own_kinds]
            costs = [
                with_gathers(own_prices, stage, kind, cost, micro_batches, pipelined=len(stages) > 1)
                for kind, cost in zip(own_kinds, costs, strict=True)
            ]
            met = between_replicas(prices, stage.layers, own_kinds[0].group, max(stage.rows), stage.row_group)
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

    @cached_property
    def _devices(self) -> list[tuple[int, ...]]:
        """The stages of each set of ranks, ascending."""
        return list(dict.fromkeys(on_same_ranks(self.stages)))

    @cached_property
    def _exchanged(self) -> list[Exchanged]:
        return [Exchanged.of(self.prices, stage, self.micro_batches) for stage in self.stages]

    def _scattered_by(self, stage: ChainStage) -> str:
        """The collective by which a stage sums its gradients."""
        return scattered_by(self.prices.num_of_types) if stage.level else "all_reduce"

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

    def _are_unlike(self, stages: Sequence[int]) -> bool:
        """Whether stages have other meshes or rows than each other."""
        return len({(self.stages[index].rows, *self.stages[index].degrees) for index in stages}) > 1


def on_same_ranks(stages: Sequence[ChainStage]) -> list[tuple[int, ...]]:
    """For each stage those that run on the same ranks, itself included."""
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for index, stage in enumerate(stages):
        by_ranks.setdefault(stage.ranks, []).append(index)
    return [tuple(by_ranks[stage.ranks]) for stage in stages]


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


def _pairs(cluster: Cluster, here: ChainStage, there: ChainStage) -> Iterator[Pair]:
    """Pairs of replicas with p2p transfers."""
    for source, target, rows in in_common(here.rows, there.rows):
        a, b = here.ranks[source * here.size], there.ranks[target * there.size]
        yield Pair(source, target, rows, cluster.devices[a].node == cluster.devices[b].node)
