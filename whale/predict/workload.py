"""The workload of a compiled step: times of its tasks, p2p transfers and gradient reductions.

The compilation determines the layers, rows and shards of each stage and rank, the values between stages and the
collectives inside them; seconds come from `whale.predict.costs`, bytes of tasks from dry runs. The workload is the
simulator's input.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from whale.compile.compilation import Compilation
from whale.ir.adasum import dot_bytes
from whale.ir.cluster import Cluster
from whale.ir.profile import Interference
from whale.ir.program import ReduceSpec, box_size
from whale.ir.workload import Boundary, LinkTime, Reduction, StageWork, Transfer, Workload
from whale.planner.cost.hosts import (
    KEY_SECONDS,
    KEYED_MESSAGE_SECONDS,
    adding_on_host,
    gathering_on_host,
    link_to_host,
    stepping_on_host,
    with_copies,
)
from whale.planner.cost.sharded import ShardedUnit, arrival_seconds, scattered_by, sharded_seconds
from whale.planner.cost.stage import exposed_beside
from whale.planner.cost.step import AGREED_BYTES, overlap_slowdown, step_overhead
from whale.planner.network.communication import CommunicationCost, owned_seconds, send
from whale.planner.network.curves import moving_seconds
from whale.predict.costs import Costs
from whale.predict.layer_parts import Part, StageLayers
from whale.predict.own_part import own_layers
from whale.predict.peak_memory import PeakMemory
from whale.predict.traffic import bucket_bytes, call_bytes, first_of_tables, gathered_bytes, kind_of_sum, summed_bytes
from whale.strategies.lowering import PlacedStage

__all__ = ["Backward", "workload_of"]


def workload_of(
    compilation: Compilation,
    costs: Costs,
    layers: Sequence[StageLayers],
    held: Mapping[int, PeakMemory],
    schedule: str,
) -> tuple[Workload, bool]:
    """The workload of a step with the peak memory in *held*, and whether all of its computation was measured."""
    boundaries = _boundaries(compilation)
    moving = _moving(costs, boundaries)
    works, measured, update = [], True, [0.0] * len(costs.cluster.devices)
    backwards: dict[tuple[int, int], Backward] = {}
    sizes = bucket_bytes(compilation)
    divided, layer_of = _Divided.of(compilation, costs, sizes), _layers_of(costs.profile.paths)
    for stage, own in zip(compilation.stages, layers, strict=True):
        spent = _spent(costs, own)
        work, backward = _stage_work(costs, stage, spent, held, moving)
        alone = own_layers(compilation.captured, stage, layer_of)
        if any(layer in alone for layer in own.layers):
            seconds = tuple(_spent_on_own(costs, own, rank, alone) for rank in work.ranks)
            work = work.model_copy(update={"own": seconds})
        works.append(divided.with_copies(divided.with_gathers(work, stage.index, own), stage, held))
        backwards |= {(stage.index, rank): one for rank, one in backward.items()}
        measured = measured and all(one.measured for one in spent.values())
        for rank, one in spent.items():
            update[rank] += divided.update(stage, rank, one.update)
    ranks = tuple(sorted(held))
    agreed = costs.collective("all_reduce", ranks, AGREED_BYTES) if len(ranks) > 1 else 0.0
    types = {device.type for device in costs.cluster.devices}
    workload = Workload(
        world_size=len(costs.cluster.devices),
        micro_batches=len(compilation.rows),
        last_share=compilation.rows[-1] / compilation.rows[0],
        schedule=schedule,
        stages=tuple(works),
        boundaries=boundaries,
        reductions=_reductions(compilation, costs, sizes, layers, backwards),
        links=_links(costs, boundaries),
        update=tuple(update),
        overhead=step_overhead(types, agreed) + _seconds_of_keys(compilation),
        overlap_slowdown=overlap_slowdown(types),
        runs_ahead=costs.device != "cpu",
    )
    return workload, measured


def _seconds_of_keys(compilation: Compilation) -> float:
    """Seconds in which the slowest rank finds the equal rows of its messages, of values and gradients together."""
    found = defaultdict[int, float](float)
    for edge in compilation.edges:
        for transfers in edge.forward if edge.distinct is not None else ():
            for source, target, box, _ in transfers:
                if source != target and box_size(box):
                    seconds = KEYED_MESSAGE_SECONDS + KEY_SECONDS * box_size(box[:-1])
                    found[source] += seconds
                    found[target] += seconds
    return max(found.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class _Spent:
    """Seconds of a micro-batch through a rank's shards of the layers of a stage; ``inside`` says whether they include
    the collectives; ``attention`` are those of attentions among forward and backward beside which rings go round."""

    forward: float
    backward: float
    weights: float
    update: float
    inside: bool
    measured: bool
    attention: tuple[float, float] = (0.0, 0.0)


def _spent(costs: Costs, own: StageLayers) -> dict[int, _Spent]:
    """Work of each rank of a stage; ranks of one type with equal shards are priced once."""
    known: dict[Any, _Spent] = {}
    found = {}
    for rank, parts in own.parts.items():
        key = (costs.cluster.devices[rank].type.name, costs.host_key(rank, parts), parts)
        if key not in known:
            known[key] = _spent_on(costs, own.layers, rank, parts)
        found[rank] = known[key]
    return found


def _spent_on(costs: Costs, layers: Sequence[int], rank: int, parts: Sequence[Part]) -> _Spent:
    kinds = [costs.profile.layers[layer] for layer in layers]
    spent = [costs.layer(kind, rank, part) for kind, part in zip(kinds, parts, strict=True)]
    whole = [replace(part, rows=max(1, part.rows)) for part in parts]
    return _Spent(
        forward=sum(one.forward for one in spent),
        backward=sum(one.backward for one in spent),
        weights=sum(one.weights for one in spent),
        update=sum(costs.layer(kind, rank, part).update for kind, part in zip(kinds, whole, strict=True)),
        inside=bool(kinds)
        and all(costs.includes_communication(kind, rank, part) for kind, part in zip(kinds, parts, strict=True)),
        measured=all(one.measured for one, part in zip(spent, parts, strict=True) if part.rows),
        attention=(sum(one.forward_attention for one in spent), sum(one.backward_attention for one in spent)),
    )


def _spent_on_own(costs: Costs, own: StageLayers, rank: int, alone: Collection[int]) -> float:
    """Seconds of a rank's forward of these layers of a stage."""
    both = zip(own.layers, own.parts[rank], strict=True)
    return sum(costs.layer(costs.profile.layers[layer], rank, part).forward for layer, part in both if layer in alone)


@dataclass(frozen=True, kw_only=True)
class Backward:
    """A rank's backward of a stage: its seconds, and the number of its collectives by their seconds."""

    seconds: float
    collectives: _Times

    def slowdown(self, computation: float, waiting: float) -> float:
        """Slowdown during a reduction: *computation* slows by a given factor, and each collective waits for messages of
        the reduction that were on the link before, or shares the link, whichever takes longer."""
        if not self.seconds:
            return computation
        alone = max(0.0, 1 - _total(self.collectives) / self.seconds)
        waited = sum(count * max(waiting, seconds) for count, seconds in self.collectives)
        return alone * computation + waited / self.seconds


def _stage_work(
    costs: Costs,
    stage: PlacedStage,
    spent: Mapping[int, _Spent],
    held: Mapping[int, PeakMemory],
    moving: Mapping[tuple[str, int, int], float],
) -> tuple[StageWork, dict[int, Backward]]:
    ranks = stage.mesh.ranks
    actors = {held[rank].rank: held[rank] for rank in ranks}
    exchanges = {actor: _exchanges(stage, one) for actor, one in actors.items()}
    forward, weights, communication, backward = [], [], [], {}
    for rank in ranks:
        own, made = spent[rank], exchanges[held[rank].rank]
        lines = [stage.mesh.group(axis, rank) for axis in range(len(stage.mesh.axes))]
        times = [
            _exposed(_times(costs, calls, lines, len(ranks)), calls, attention, lines)
            for calls, attention in zip(made, own.attention, strict=True)
        ]
        ahead, back = (0.0, 0.0) if own.inside else map(_total, times)
        ahead += moving.get(("forward", stage.index, rank), 0.0)
        back += moving.get(("backward", stage.index, rank), 0.0)
        forward.append(own.forward + ahead)
        backward[rank] = Backward(seconds=own.backward + back, collectives=times[1])
        weights.append(min(own.weights, backward[rank].seconds))
        communication.append(ahead + back)
    task_bytes = [held[rank].tasks[stage.index] for rank in ranks]
    met = {rank: {call.axis for calls in exchanges[held[rank].rank] for call in calls} for rank in ranks}
    work = StageWork(
        ranks=ranks,
        together=_together(stage, met),
        forward=tuple(forward),
        backward=tuple(backward[rank].seconds for rank in ranks),
        weights=tuple(weights),
        communication=tuple(communication),
        kept_bytes=tuple(one.kept for one in task_bytes),
        forward_peak_bytes=tuple(one.forward_peak for one in task_bytes),
        backward_peak_bytes=tuple(one.backward_peak for one in task_bytes),
    )
    return work, backward


def _moving(costs: Costs, boundaries: Sequence[Boundary]) -> dict[tuple[str, int, int], float]:
    """Seconds of computation, by direction, stage and rank, that the messages of a micro-batch cost.

    A message overlaps computation on the link, and costs computation for moving its bytes.
    """
    devices, links = costs.cluster.devices, costs.profile.links
    price = cache(lambda within, device_type: moving_seconds(links, within, device_type))
    found: dict[tuple[str, int, int], float] = defaultdict(float)
    for boundary in boundaries:
        stages = (boundary.source_stage, boundary.target_stage)
        for direction, transfers, (sender, receiver) in (
            ("forward", boundary.forward, stages),
            ("backward", boundary.backward, stages[::-1]),
        ):
            for transfer in transfers:
                if transfer.source == transfer.target:
                    continue
                ends = [devices[transfer.source], devices[transfer.target]]
                within = "node" if ends[0].node == ends[1].node else "nodes"
                for stage, device in zip((sender, receiver), ends, strict=True):
                    found[direction, stage, device.rank] += transfer.bytes * price(within, device.type.name)
    return found


class _Call(NamedTuple):
    """A collective: its kind, mesh axis and bytes, and whether it moves beside an attention."""

    op: str
    axis: int
    bytes: int
    beside: bool


_Calls = Mapping[_Call, int]
"""Number of collectives."""

_Times = tuple[tuple[int, float], ...]
"""Number of collectives by their seconds."""


def _exchanges(stage: PlacedStage, held: PeakMemory) -> tuple[_Calls, _Calls]:
    """The collectives of a stage, forward and backward, of all ranks equal to the dry-run one."""
    axes = {tuple(sorted(stage.mesh.group(axis, held.rank))): axis for axis in range(len(stage.mesh.axes))}
    calls = held.calls[stage.index]
    forward, backward = (
        Counter(_Call(call.op, axes[call.ranks], call_bytes(call), call.beside) for call in made)
        for made in (calls.forward, calls.backward)
    )
    return forward, backward


def _times(costs: Costs, calls: _Calls, lines: Sequence[tuple[int, ...]], num_ranks: int) -> _Times:
    """Times of the calls of a rank of a stage with the given number of ranks, all of which make theirs at once."""
    return tuple(
        (count, costs.collective(op, lines[axis], size, num_ranks // len(lines[axis])))
        for (op, axis, size, _), count in calls.items()
    )


def _exposed(times: _Times, calls: _Calls, attention: float, lines: Sequence[tuple[int, ...]]) -> _Times:
    """The times of calls, without what the seconds of *attention* hide of those beside it."""
    beside = [
        (count * seconds, len(lines[call.axis]))
        for (count, seconds), call in zip(times, calls, strict=True)
        if call.beside
    ]
    whole = sum(seconds for seconds, _ in beside)
    if not whole:
        return times
    left = exposed_beside((seconds for seconds, _ in beside), attention, max(ranks for _, ranks in beside)) / whole
    return tuple(
        (count, seconds * left if call.beside else seconds) for (count, seconds), call in zip(times, calls, strict=True)
    )


def _total(times: _Times) -> float:
    return sum(count * seconds for count, seconds in times)


def _together(stage: PlacedStage, met: Mapping[int, Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks with common collectives; *met* has the axes of each."""
    group = {rank: frozenset((rank,)) for rank in stage.mesh.ranks}
    for members in dict.fromkeys(stage.mesh.group(axis, rank) for rank, axes in met.items() for axis in axes):
        joined = frozenset().union(*(group[rank] for rank in members))
        group |= dict.fromkeys(joined, joined)
    return tuple(tuple(sorted(one)) for one in dict.fromkeys(group.values()) if len(one) > 1)


def _boundaries(compilation: Compilation) -> tuple[Boundary, ...]:
    """Transfers between each pair of stages, all values together."""
    sizes: dict[tuple[int, int], dict[str, Counter[tuple[int, int]]]] = {}
    for edge in compilation.edges:
        pair = sizes.setdefault((edge.source_stage, edge.target_stage), {"forward": Counter(), "backward": Counter()})
        element = getattr(torch, edge.dtype).itemsize
        for direction, transfers in (("forward", edge.forward), ("backward", edge.backward)):
            for transfer in transfers[0] if transfers else ():
                if size := edge.sent_bytes(transfer.source_box, element):
                    pair[direction][transfer.source, transfer.target] += size
    return tuple(
        Boundary(
            source_stage=source,
            target_stage=target,
            forward=_transfers(pair["forward"]),
            backward=_transfers(pair["backward"]),
        )
        for (source, target), pair in sizes.items()
    )


def _transfers(sizes: Mapping[tuple[int, int], int]) -> tuple[Transfer, ...]:
    return tuple(Transfer(source=a, target=b, bytes=size) for (a, b), size in sizes.items())


def _links(costs: Costs, boundaries: Sequence[Boundary]) -> tuple[LinkTime, ...]:
    """The links between ranks that exchange messages, at the size of the largest message."""
    largest: dict[tuple[int, int], int] = {}
    for boundary in boundaries:
        for transfer in (*boundary.forward, *boundary.backward):
            pair = (transfer.source, transfer.target)
            if pair[0] != pair[1]:
                largest[pair] = max(largest.get(pair, 0), transfer.bytes)
    found, known = [], dict[Any, CommunicationCost]()
    for (source, target), size in largest.items():
        key = costs.topology.route(source, target), size
        if key not in known:
            known[key] = send(costs.topology, source, target, size)
        cost = known[key]
        bandwidth = size / cost.transfer if cost.transfer > 0 else size / max(cost.seconds, 1e-9)
        resources = costs.topology.resources(source, target)
        found.append(
            LinkTime(source=source, target=target, latency=cost.latency, bandwidth=bandwidth, resources=resources)
        )
    return tuple(found)


def _reductions(
    compilation: Compilation,
    costs: Costs,
    sizes: Sequence[int],
    layers: Sequence[StageLayers],
    backwards: Mapping[tuple[int, int], Backward],
) -> tuple[Reduction, ...]:
    """The buckets of gradients that are summed once a step, in the order in which they are launched; of those that are
    summed in each backward the last sum, which nothing hides in the last one."""
    found = []
    copies = _copies(compilation, costs.cluster)
    owned = _owned(compilation)
    each = [spec for spec in compilation.reduces if spec.each]
    last = {(spec.ranks, spec.stages): spec.index for spec in each}
    for spec, size, ready in zip(compilation.reduces, sizes, _ready(compilation, costs, layers), strict=True):
        if (spec.each and last[spec.ranks, spec.stages] != spec.index) or (len(spec.ranks) == 1 and not spec.bounds):
            continue
        num_alike = _num_alike(compilation, costs, spec)
        size = summed_bytes(compilation, spec, size)
        cost = costs.collective_cost(kind_of_sum(spec), spec.ranks, size, num_alike)
        seconds = cost.seconds
        if spec.bounds:
            seconds = _to_owners(costs, _scattered_by(costs, spec), spec, size, num_alike, owned)
            seconds = max(seconds, copies.get(spec.index, 0.0))
        if spec.on_host:
            seconds = max(seconds, gathering_on_host(costs.cluster, spec.ranks, size))
        if spec.adasum is not None:
            seconds = max(costs.collective("all_to_all", spec.ranks, size, num_alike), copies.get(spec.index, 0.0))
        found.append(
            Reduction(
                ranks=spec.ranks,
                stages=spec.stages,
                bytes=size,
                seconds=seconds,
                ready=1.0 if spec.each else ready,
                slowdown=_slowdowns(costs, spec, cost.beside, backwards),
                stretch=cost.beside.stretch if cost.beside is not None else 0.0,
            )
        )
    return (*found, *_combinations(compilation, costs, sizes))


def _combinations(compilation: Compilation, costs: Costs, sizes: Sequence[int]) -> Iterator[Reduction]:
    """The exchanges after the backwards where gradients are combined: sums of dot products, level by level, and the
    gathers of what each rank has combined of the buckets of these ranks."""
    gathers: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, float]] = {}
    is_combined = any(spec.adasum is not None for spec in compilation.reduces)
    firsts = {spec.ranks[0] for spec in compilation.reduces} if is_combined else ()
    first = frozenset[int]().union(*(first_of_tables(compilation, rank) for rank in firsts))
    for spec, size in zip(compilation.reduces, sizes, strict=True):
        if spec.adasum is None:
            continue
        num_bytes, seconds = gathers.get((spec.ranks, spec.stages), (0, 0.0))
        if not spec.bounds:
            num_bytes += size
            seconds += costs.collective("all_gather", spec.ranks, size, _num_alike(compilation, costs, spec))
        if spec.index in first:
            for products in dot_bytes(len(spec.adasum.replicas), len(spec.adasum.table)):
                num_bytes += products
                seconds += costs.collective("all_reduce", spec.adasum.ranks, products, 1)
        gathers[spec.ranks, spec.stages] = num_bytes, seconds
    for (ranks, stages), (num_bytes, seconds) in gathers.items():
        yield Reduction(ranks=ranks, stages=stages, bytes=num_bytes, seconds=seconds)


def _ready(compilation: Compilation, costs: Costs, layers: Sequence[StageLayers]) -> list[float]:
    """For each bucket the fraction of the last backward after which it is ready: when the backwards of its layers, and
    in a layer as large a part as that of its parameters that came before, are done. Parameters of no layer are ready
    with those before them, and those that stages share at the end."""
    layer_of = _layers_of(costs.profile.paths)
    both = list(zip(compilation.reduces, compilation.bucket_parameters, strict=True))
    num = Counter((spec.ranks, spec.stages, layer_of(name)) for spec, names in both for name in names)
    done: Counter[Any] = Counter()
    before: dict[Any, dict[int, tuple[float, float]]] = {}
    last: dict[Any, float] = defaultdict(float)
    found = []
    for spec, names in both:
        if len(spec.stages) > 1:
            found.append(1.0)
            continue
        group, stage = (spec.ranks, spec.stages), layers[spec.stages[0]]
        parts = (spec.stages[0], costs.cluster.devices[spec.ranks[0]].type.name, stage.parts[spec.ranks[0]])
        if parts not in before:
            before[parts] = _backwards_before(costs, stage, spec.ranks[0])
        known = before[parts]
        done.update((*group, layer_of(name)) for name in names)
        for layer in {layer_of(name) for name in names}:
            start, share = known.get(layer, (0.0, 0.0))
            last[group] = max(last[group], start + share * done[*group, layer] / num[*group, layer])
        found.append(min(1.0, last[group]) if known else 1.0)
    return found


def _layers_of(paths: Sequence[str]) -> Callable[[str], int]:
    """The layer of a parameter, the one with the longest path that it begins with; -1 for none."""
    positions = {path: layer for layer, path in reversed(list(enumerate(paths))) if path}

    @cache
    def layer_of(name: str) -> int:
        while name and name not in positions:
            name = name.rpartition(".")[0]
        return positions.get(name, -1)

    return layer_of


def _backwards_before(costs: Costs, stage: StageLayers, rank: int) -> dict[int, tuple[float, float]]:
    """By layer the fraction of a rank's backward of a stage that comes before the layer's own, and its own fraction."""
    spent = {
        layer: costs.layer(costs.profile.layers[layer], rank, part).backward
        for layer, part in zip(stage.layers, stage.parts[rank], strict=True)
    }
    total, done, found = sum(spent.values()), 0.0, {}
    for layer in reversed(stage.layers):
        found[layer] = (done / total, spent[layer] / total) if total else (1.0, 0.0)
        done += spent[layer]
    return found


def _copies(compilation: Compilation, cluster: Cluster) -> dict[int, float]:
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


UNEVEN = 0.05
"""Differences of what ranks own, as parts of all, up to which these are as equal as rows allow."""

Owned = Mapping[tuple[int, ...], Sequence[int]]
"""The elements that each rank owns, of all buckets of the same ranks."""


def _owned(compilation: Compilation) -> Owned:
    """The elements that ranks own. Their buckets are on their way together, so that owners of one rest while others
    send."""
    owned: dict[tuple[int, ...], list[int]] = {}
    for spec in compilation.reduces:
        if spec.bounds:
            sizes = [stop - start for start, stop in pairwise(spec.bounds)]
            owned[spec.ranks] = [a + b for a, b in zip(owned.get(spec.ranks, [0] * len(sizes)), sizes, strict=True)]
    return owned


def _to_owners(costs: Costs, kind: str, spec: ReduceSpec, num_bytes: int, num_alike: int, owned: Owned) -> float:
    """Seconds of a collective between the owners of a bucket's stretches, which differ by more than a rounding."""
    cost, shares = costs.collective_cost(kind, spec.ranks, num_bytes, num_alike), owned[spec.ranks]
    direct = all(costs.cluster.devices[rank].type.is_processor for rank in spec.ranks)
    if not direct or max(shares) - min(shares) <= UNEVEN * sum(shares):
        return cost.seconds
    return owned_seconds(costs.topology, kind, spec.ranks, num_bytes, shares, cost)


def _scattered_by(costs: Costs, spec: ReduceSpec) -> str:
    return scattered_by(costs.cluster.devices[rank].type for rank in spec.ranks)


class _Bucket(NamedTuple):
    """A bucket of which ranks own stretches, with its names and bytes, and seconds to gather it and to sum it."""

    spec: ReduceSpec
    names: Sequence[str]
    bytes: int
    gather: float
    reduce: float


@dataclass(frozen=True, kw_only=True)
class _Divided:
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
    def of(cls, compilation: Compilation, costs: Costs, sizes: Sequence[int]) -> _Divided:
        """The exchanges of a compilation."""
        buckets, gathered = [], gathered_bytes(compilation)
        copies, owned = _copies(compilation, costs.cluster), _owned(compilation)
        whole: dict[tuple[int, int], tuple[float, float]] = {}
        triples = zip(compilation.reduces, compilation.bucket_parameters, sizes, strict=True)
        for spec, names, size in triples:
            own = dict.fromkeys(spec.ranks, 1.0)
            if spec.bounds:
                num_alike = _num_alike(compilation, costs, spec)
                copied, summed = copies.get(spec.index, 0.0), summed_bytes(compilation, spec, size)
                size_of = {"all_gather": gathered[spec.index], _scattered_by(costs, spec): summed}
                gather, reduce = (
                    max(copied, _to_owners(costs, kind, spec, bytes_, num_alike, owned))
                    for kind, bytes_ in size_of.items()
                )
                buckets.append(_Bucket(spec, names, size, gather, reduce if spec.each else 0.0))
                stretches = zip(spec.ranks, pairwise(spec.bounds), strict=True)
                own = {rank: (last - first) / max(1, spec.bounds[-1]) for rank, (first, last) in stretches}
            for rank, share in own.items():
                before = whole.get((spec.stages[0], rank), (0.0, 0.0))
                whole[spec.stages[0], rank] = before[0] + size, before[1] + size * share
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
        layer_of = _layers_of(self.costs.profile.paths)
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


def _num_alike(compilation: Compilation, costs: Costs, spec: ReduceSpec) -> int:
    """Sets of ranks that reduce equal gradients at the same time: in a stage, those of all its shards; from region to
    region those of all stages share a way."""
    sizes = [len(compilation.stages[stage].mesh.ranks) for stage in spec.stages]
    alike = max(1, min(sizes) * len(sizes) // len(spec.ranks))
    if not costs.topology.spans_regions(spec.ranks):
        return alike
    groups = {one.mesh.ranks for one in compilation.stages if costs.topology.spans_regions(one.mesh.ranks)}
    return alike * max(1, len(groups))


def _slowdowns(
    costs: Costs, spec: ReduceSpec, beside: Interference | None, backwards: Mapping[tuple[int, int], Backward]
) -> tuple[float, ...]:
    """Slowdown of each rank's backward during a reduction; empty if not measured."""
    if beside is None:
        return ()
    known = dict(zip(beside.types, beside.slowdowns, strict=True))
    found = []
    for rank in spec.ranks:
        computation = known.get(costs.cluster.devices[rank].type.name, 0.0)
        own = (backwards[stage, rank] for stage in spec.stages if (stage, rank) in backwards)
        found.append(max((one.slowdown(computation, beside.waiting) for one in own), default=computation))
    return tuple(found)
