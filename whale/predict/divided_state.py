"""State of which each rank owns a part: seconds of gathers and sums between the owners, and of copies to hosts.

The compilation determines the buckets and their owners; seconds come from `whale.predict.costs`. It knows no schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from whale.compile.compilation import Compilation
from whale.graph.values import has_sparse_gradient, needs_grad, value_tensor
from whale.ir.cluster import Cluster
from whale.ir.program import ReduceSpec
from whale.ir.workload import StageWork
from whale.planner.cost.hosts import adding_on_host, link_to_host, stepping_on_host, with_copies
from whale.planner.cost.sharded import ShardedUnit, arrival_seconds, scattered_by, sharded_seconds
from whale.planner.cost.step import overlap_slowdown
from whale.planner.network.communication import owned_seconds
from whale.predict.costs import Costs
from whale.predict.layer_parts import StageLayers, layer_finder
from whale.predict.peak_memory import PeakMemory
from whale.predict.traffic import gathered_bytes, summed_bytes
from whale.strategies.lowering import PlacedStage

__all__ = ["DividedState", "copies_to_hosts", "kind_to_owners", "num_alike", "owned_elements", "seconds_to_owners"]

_UNEVEN = 0.05
"""Differences of what ranks own, as parts of all, up to which these are as equal as rows allow."""

Owned = Mapping[tuple[int, ...], Sequence[int]]
"""The elements that each rank owns, of all buckets of the same ranks."""


class _Bucket(NamedTuple):
    """A bucket of which ranks own stretches, with its names and bytes, and seconds to gather it and to sum it."""

    spec: ReduceSpec
    names: Sequence[str]
    bytes: int
    gather: float
    reduce: float


@dataclass(frozen=True, kw_only=True)
class DividedState:
    """Exchanges for the stretches that ranks own, besides sums once a step.

    Attributes:
        buckets: in the order in which backwards end.
        gathers: of them those that are gathered once a step, in that order.
        whole: bytes of trained parameters of each stage on each rank, and those among them that it owns.
    """

    costs: Costs
    buckets: Sequence[_Bucket]
    gathers: Sequence[int]
    whole: Mapping[tuple[int, int], tuple[float, float]]

    @classmethod
    def of(cls, compilation: Compilation, costs: Costs, sizes: Sequence[int]) -> DividedState:
        """The exchanges of a compilation."""
        buckets, gathered = [], gathered_bytes(compilation)
        copies, owned = copies_to_hosts(compilation, costs.cluster), owned_elements(compilation)
        whole: dict[tuple[int, int], tuple[float, float]] = {}
        stages = {stage.index: stage for stage in compilation.stages}
        triples = zip(compilation.reduces, compilation.bucket_parameters, sizes, strict=True)
        for spec, names, size in triples:
            own = dict.fromkeys(spec.ranks, 1.0)
            if spec.bounds:
                alike = num_alike(compilation, costs, spec)
                copied, summed = copies.get(spec.index, 0.0), summed_bytes(compilation, spec, size)
                size_of = {"all_gather": gathered[spec.index], kind_to_owners(costs, spec): summed}
                gather, reduce = (
                    max(copied, seconds_to_owners(costs, kind, spec, bytes_, alike, owned))
                    for kind, bytes_ in size_of.items()
                )
                buckets.append(_Bucket(spec, names, size, gather, reduce if spec.each else 0.0))
                stretches = zip(spec.ranks, pairwise(spec.bounds), strict=True)
                own = {rank: (last - first) / max(1, spec.bounds[-1]) for rank, (first, last) in stretches}
            for stage in (stages[index] for index in spec.stages):
                for rank, share in ((rank, own[rank]) for rank in stage.mesh.ranks if rank in own):
                    before = whole.get((stage.index, rank), (0.0, 0.0))
                    whole[stage.index, rank] = before[0] + size, before[1] + size * share
        for stage in stages.values() if buckets else ():
            for rank, size in _bytes_without_sum(compilation, stage):
                before = whole.get((stage.index, rank), (0.0, 0.0))
                whole[stage.index, rank] = before[0] + size, before[1] + size
        gathers = [spec.index for spec in compilation.gathers]
        return cls(costs=costs, buckets=buckets, gathers=gathers, whole=whole)

    def update(self, stage: PlacedStage, rank: int, seconds: float) -> float:
        """Seconds of the optimizer for what a rank owns of a stage, of which it would take *seconds* for all on its
        device."""
        whole, own = self.whole.get((stage.index, rank), (0.0, 0.0))
        update = seconds * (own / whole) if whole else seconds
        if not stage.state_on_host:
            return update
        return stepping_on_host(self.costs.cluster, rank, own, self.costs.optimizer, on_device=update)

    def with_copies(self, work: StageWork, stage: PlacedStage, held: Mapping[int, PeakMemory]) -> StageWork:
        """A stage's work in no less time than what its tasks copy to the host and from it."""
        if stage.offload == "none":
            return work
        read, summed = Counter[int](), Counter[int]()
        for bucket in self.buckets if stage.state_on_host else ():
            if stage.index in bucket.spec.stages:
                for rank, (first, last) in zip(bucket.spec.ranks, pairwise(bucket.spec.bounds), strict=True):
                    own = bucket.bytes * (last - first) // max(1, bucket.spec.bounds[-1])
                    read[rank] += own if bucket.spec.gathers == "task" else 0
                    summed[rank] += own if bucket.spec.each else 0
        forward, backward, cluster = [], [], self.costs.cluster
        for rank, ahead, back in zip(work.ranks, work.forward, work.backward, strict=True):
            kept, link = held[rank].tasks[stage.index].hosted, link_to_host(cluster, rank)
            ahead, back = with_copies(ahead, back, kept=kept, read=read[rank], summed=summed[rank], link=link)
            added = adding_on_host(cluster, rank, summed[rank]) * (1 - 1 / self.costs.micro_batches)
            forward.append(ahead)
            backward.append(back + added)
        return work.model_copy(update={"forward": tuple(forward), "backward": tuple(backward)})

    def with_gathers(self, work: StageWork, stage: int, layers: StageLayers) -> StageWork:
        """A stage's work with the collectives of its tasks and with what its first forward waits for."""
        own = [bucket for bucket in self.buckets if stage in bucket.spec.stages]
        if not own:
            return work
        slowdown = overlap_slowdown({self.costs.cluster.devices[rank].type for rank in work.ranks})
        lists: dict[str, list[float]] = {"forward": [], "backward": [], "communication": [], "gathered": []}
        known: dict[Any, tuple[float, ...]] = {}
        for place, rank in enumerate(work.ranks):
            on_rank = [bucket for bucket in own if rank in bucket.spec.ranks]
            key = (
                tuple((bucket.bytes, bucket.gather, bucket.reduce, bucket.spec.gathers) for bucket in on_rank),
                sum(bucket.gather for bucket in self._before(stage, rank)),
                layers.parts[rank],
                work.forward[place],
                work.backward[place],
            )
            if key not in known:
                known[key] = self._on(
                    rank, on_rank, key[1], layers, work.forward[place], work.backward[place], slowdown
                )
            forward, backward, gathered = known[key]
            added = forward - work.forward[place] + backward - work.backward[place]
            lists["forward"].append(forward)
            lists["backward"].append(backward)
            lists["communication"].append((work.communication[place] if work.communication else 0.0) + added)
            lists["gathered"].append(gathered)
        if not any(lists["gathered"]):
            lists["gathered"] = []
        return work.model_copy(update={name: tuple(values) for name, values in lists.items()})

    def _before(self, stage: int, rank: int) -> Iterator[_Bucket]:
        """The gathers of a step that a rank starts before those of a stage."""
        of_index = {bucket.spec.index: bucket for bucket in self.buckets}
        for index in self.gathers:
            bucket = of_index[index]
            if stage in bucket.spec.stages:
                return
            if rank in bucket.spec.ranks:
                yield bucket

    def _on(
        self,
        rank: int,
        buckets: Sequence[_Bucket],
        before: float,
        layers: StageLayers,
        forward: float,
        backward: float,
        slowdown: float,
    ) -> tuple[float, float, float]:
        """Seconds of a forward and a backward on a rank, and from the beginning of the step before which the first
        forward cannot end."""
        parts = self._parts(rank, buckets, layers)
        once = [
            ShardedUnit(share[0] * forward, 0.0, bucket.gather if bucket.spec.gathers == "step" else 0.0, 0.0)
            for bucket, share in zip(reversed(buckets), reversed(parts), strict=True)
        ]
        tasks = [
            ShardedUnit(
                share[0] * forward,
                share[1] * backward,
                bucket.gather if bucket.spec.gathers == "task" else 0.0,
                bucket.reduce,
            )
            for bucket, share in zip(reversed(buckets), reversed(parts), strict=True)
        ]
        gathered = arrival_seconds(once, slowdown=slowdown, before=before) if any(one.gather for one in once) else 0.0
        if any(one.gather or one.reduce for one in tasks):
            forward, backward = sharded_seconds(tasks, regather=True, slowdown=slowdown, keeps_last=False, tail=False)
        return forward, backward, gathered

    def _parts(self, rank: int, buckets: Sequence[_Bucket], layers: StageLayers) -> list[tuple[float, float]]:
        """The parts of a stage's forward and backward that read each bucket: of each layer as much as of its bytes, and
        of layers with none in proportion."""
        layer_of = layer_finder(self.costs.profile.paths)
        num = [Counter(layer_of(name) for name in bucket.names) for bucket in buckets]
        all_of = sum(num, Counter[int]())
        found = [[0.0, 0.0] for _ in buckets]
        for layer, part in zip(layers.layers, layers.parts[rank], strict=True):
            spent = self.costs.layer(self.costs.profile.layers[layer], rank, part)
            for own, counted in zip(found, num, strict=True):
                if counted[layer]:
                    own[0] += spent.forward * counted[layer] / all_of[layer]
                    own[1] += spent.backward * counted[layer] / all_of[layer]
        sums = [sum(own[way] for own in found) for way in (0, 1)]
        even = 1 / len(buckets) if buckets else 0.0
        return [(own[0] / sums[0] if sums[0] else even, own[1] / sums[1] if sums[1] else even) for own in found]


def _bytes_without_sum(compilation: Compilation, stage: PlacedStage) -> Iterator[tuple[int, int]]:
    """Find bytes of trained parameters of a stage on each of its ranks that are in no bucket, because no other rank
    has them."""
    buckets = zip(compilation.reduces, compilation.bucket_parameters, strict=True)
    summed = {name for spec, names in buckets if stage.index in spec.stages for name in names}
    alone = [
        (value, placements)
        for value, placements in stage.stored.items()
        if value[0].name in compilation.captured.parameters
        and needs_grad(value)
        and not has_sparse_gradient(value)
        and compilation.parameter_name(value) not in summed
    ]
    for rank in stage.mesh.ranks if alone else ():
        at = (0, *stage.mesh.coordinates(rank))
        shapes = ((value_tensor(value).dtype, stage.layout.local_shape(value, p, at)) for value, p in alone)
        yield rank, sum(dtype.itemsize * prod(shape) for dtype, shape in shapes)


def owned_elements(compilation: Compilation) -> Owned:
    """The elements that ranks own. Their buckets are on their way together, so that owners of one rest while others
    send."""
    owned: dict[tuple[int, ...], list[int]] = {}
    for spec in compilation.reduces:
        if spec.bounds:
            sizes = [stop - start for start, stop in pairwise(spec.bounds)]
            owned[spec.ranks] = [a + b for a, b in zip(owned.get(spec.ranks, [0] * len(sizes)), sizes, strict=True)]
    return owned


def seconds_to_owners(costs: Costs, kind: str, spec: ReduceSpec, num_bytes: int, num_alike: int, owned: Owned) -> float:
    """Seconds of a collective between the owners of a bucket's stretches, which differ by more than a rounding."""
    cost, shares = costs.collective_cost(kind, spec.ranks, num_bytes, num_alike), owned[spec.ranks]
    direct = all(costs.cluster.devices[rank].type.is_processor for rank in spec.ranks)
    if not direct or max(shares) - min(shares) <= _UNEVEN * sum(shares):
        return cost.seconds
    return owned_seconds(costs.topology, kind, spec.ranks, num_bytes, shares, cost)


def kind_to_owners(costs: Costs, spec: ReduceSpec) -> str:
    """The collective by which gradients come to their owners."""
    return scattered_by(costs.cluster.devices[rank].type for rank in spec.ranks)


def copies_to_hosts(compilation: Compilation, cluster: Cluster) -> dict[int, float]:
    """Seconds in which the slowest rank of each bucket on hosts copies its stretch to its host, or from it."""
    links: dict[int, float] = {}
    found = {}
    for unit in compilation.units:
        if unit.on_host:
            spent = 0.0
            for rank, (first, last) in zip(unit.spec.ranks, pairwise(unit.spec.bounds), strict=True):
                if rank not in links:
                    links[rank] = link_to_host(cluster, rank)
                spent = max(spent, (last - first) * unit.dtype.itemsize / links[rank])
            found[unit.spec.index] = spent
    return found


def num_alike(compilation: Compilation, costs: Costs, spec: ReduceSpec) -> int:
    """Sets of ranks that reduce equal gradients at the same time: in a stage, those of all its shards; from region to
    region those of all stages share a way."""
    sizes = [len(compilation.stages[stage].mesh.ranks) for stage in spec.stages]
    alike = max(1, min(sizes) * len(sizes) // len(spec.ranks))
    if not costs.topology.spans_regions(spec.ranks):
        return alike
    groups = {one.mesh.ranks for one in compilation.stages if costs.topology.spans_regions(one.mesh.ranks)}
    return alike * max(1, len(groups))
