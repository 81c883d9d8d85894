"""Communicators of the ranks of a plan, each of which takes memory on its ranks: those that a compiled step makes.

They are those of `whale.compile.communicators`, as far as a plan's degrees and messages say them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.layers import variant_of
from whale.planner.cost.memory import communicator_bytes
from whale.planner.cost.plan_messages import PlanMessages
from whale.planner.cost.replica_kinds import Kind
from whale.planner.cost.replicas import between_replicas

__all__ = ["PlanCommunicators"]


@dataclass(frozen=True, kw_only=True)
class PlanCommunicators(PlanMessages):
    """The communicators of a plan."""

    def _communicators(self, own: tuple[int, ...], place: int) -> float:
        """Bytes of those of a device of the stages *own*, of a kind of replica."""
        cluster, stage, kind = self.prices.cluster, self.stages[own[0]], self.kinds[own[0]][place]
        if not self.prices.runs or len(cluster.devices) < 2:
            return 0.0
        total = self._of_all + sum(map(self._bytes, (*self._inside(own, kind), *self._summing(own))))
        if stage.level:
            total += sum(map(self._bytes, self._summing_stage(stage) | self._sharing(own, divided=True)))
        at = stage.slice(kind.index).index(kind.rank)
        for way in range(2):
            for ends, count in self._peers(own, place, way, at).items():
                ranks = tuple(rank for each in ends for rank in each)
                total += communicator_bytes(self._bandwidth(ranks), len(ranks), count) if count else 0.0
        return total

    def _peers(self, own: tuple[int, ...], place: int, way: int, at: int) -> dict[frozenset[tuple[int, ...]], int]:
        """With how many others a device has messages in one direction, its place in a replica of a kind; by the ranks
        of both stages, for which there is one communicator however many stages run on them."""
        found: dict[frozenset[tuple[int, ...]], int] = {}
        for both, exchanges in self._whales.items():
            for end in {both.index(index) for index in both if index in own}:
                ends = frozenset(self.stages[index].ranks for index in both)
                alike = (one.peers[end][way][at] for kinds, one in exchanges.items() if kinds[end] == place)
                found[ends] = max(found.get(ends, 0), next(alike, 0))  # none of a replica without rows
        return found

    @cached_property
    def _of_all(self) -> float:
        return self._bytes(tuple(range(len(self.prices.cluster.devices))))

    def _inside(self, own: tuple[int, ...], kind: Kind) -> set[tuple[int, ...]]:
        """The groups along whose lines the programs of stages communicate, of a replica or over replicas."""
        found = set()
        for stage in (self.stages[index] for index in own):
            found |= {kind.group.ranks_of(axis) for axis in ("tensor", "expert", "context") if getattr(stage, axis) > 1}
            if any(between_replicas(self.prices, stage.layers, kind.group, max(stage.rows), stage.row_group)):
                found.add(stage.row_group)
        return found

    def _summing(self, own: tuple[int, ...]) -> set[tuple[int, ...]]:
        """The sets of ranks that sum gradients: of all but experts, of experts, and of what stages share."""
        found = set()
        for stage in (self.stages[index] for index in own):
            found |= self._summing_stage(stage)
            if stage.expert > 1:
                found.add(stage.data_group[:: stage.expert])
        return found | self._sharing(own)

    def _sharing(self, own: tuple[int, ...], *, divided: bool = False) -> set[tuple[int, ...]]:
        """The sets of ranks that have what the stages *own* share with others; only of what is *divided* over them."""
        found = set()
        for readers, _ in self.prices.profile.tied:
            owners = self._owners(readers)
            stages = [self.stages[index] for index in owners]
            if divided and not all(stage.level for stage in stages):
                continue
            if self._is_apart(readers) and set(own).intersection(owners):
                unlike = self._are_unlike(owners)
                found.add(tuple(rank for one in stages for rank in (one.ranks if unlike else one.data_group)))
        return found

    def _summing_stage(self, stage: ChainStage) -> set[tuple[int, ...]]:
        """The sets of ranks that sum gradients of a stage's parameters but experts: all of it, where its tensor groups
        have some whole and compute parts of their gradients; none of a stage that has but what others have too."""
        shared = sum(
            elements / stage.tensor
            for readers, elements in self.prices.profile.tied
            if self._is_apart(readers) and not set(stage.layers).isdisjoint(readers)
        )
        dense, _ = self.prices.parameters(stage.layers, stage.tensor, stage.expert)
        if dense < shared + 1:
            return set()
        if stage.tensor == 1:
            return {stage.data_group}
        profile = self.prices.profile
        kinds = [profile.kinds[kind] for kind in {profile.layers[layer] for layer in stage.layers}]
        degrees = (stage.tensor, stage.expert, stage.context)
        summed = any(variant_of(kind, *degrees).summed for kind in kinds if kind.variants)
        return {stage.data_group, stage.ranks} if summed else {stage.data_group}

    def _bytes(self, ranks: tuple[int, ...]) -> float:
        bandwidth = self._bandwidth(ranks)
        return communicator_bytes(bandwidth, len(ranks)) if bandwidth and len(ranks) > 1 else 0.0

    def _bandwidth(self, ranks: tuple[int, ...]) -> float:
        known = self.prices.memo.least_bandwidths
        key = self.prices.shape(ranks)
        if key not in known:
            known[key] = self.prices.cluster.least_bandwidth(ranks)
        return known[key]
