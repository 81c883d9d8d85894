"""What a compiled step should take: the times of its tasks, what travels and what is summed, as a workload, and from it
the prediction.

Which layers a stage runs, at how many rows and which part on each rank, what crosses stages and which collectives lie
inside of them comes from the compilation; seconds come from a profile and a cluster; bytes in memory from running the
step without data. Nothing is allocated and no process group is needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch

from whale.compiler import Compilation
from whale.errors import UsageError
from whale.graph.refusals import module_of
from whale.ir.cluster import Cluster, DeviceType
from whale.ir.profile import Interference, LayerKind, ModelProfile
from whale.ir.program import ReduceSpec, box_size
from whale.ir.workload import (
    Boundary,
    DeviceMemory,
    LinkTime,
    Prediction,
    Reduction,
    StageWork,
    Transfer,
    Workload,
)
from whale.occupancy import Device, Occupancy, occupancy
from whale.planner.communication import CommunicationCost, collective, send
from whale.planner.compute import LayerSeconds, layer_seconds
from whale.planner.curves import moving_seconds
from whale.planner.estimate import relative_error
from whale.planner.memory import framework_bytes, wasted_share
from whale.planner.optimizers import Optimizer
from whale.planner.precision import precision_named
from whale.planner.simulate import simulate_alike
from whale.planner.timeline import Timeline
from whale.planner.topology import Topology
from whale.runtime.random import Clock
from whale.strategies.layout import unit_shares
from whale.strategies.lowering import PlacedStage
from whale.strategies.rehearsal import like_ranks
from whale.traffic import bucket_bytes, call_bytes

__all__ = ["Costs", "Predicted", "predict"]

CPU_OVERLAP_SLOWDOWN = 0.5
"""Where nothing was measured: gloo takes some 1.1 ns of processor time for a byte of an all-reduce whose wire time at
1 Gbit/s is 8 ns, so on a quarter of a core computation beside it takes half as long again
(benchmarks/testbed_noise.py)."""

GPU_OVERLAP_SLOWDOWN = 0.126
"""Galvatron's coefficient for A100, as in `whale.planner.stages`."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A prediction with the numbers that it was made from; the timeline is of one rank of each kind."""

    prediction: Prediction
    workload: Workload
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank has of a layer: the rows of a micro-batch, the fraction of what is split, and over how many ranks
    only its experts are."""

    rows: int
    fraction: float
    expert: int = 1


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Prices of a model's layers and messages on a cluster.

    ``micro_batches`` are those of a step. ``device`` is ``cpu`` or ``cuda``: whose kernels run, and whether processes
    run ahead of what they launch. ``optimizer`` is the one whose states are held and whose step is priced.
    """

    profile: ModelProfile
    cluster: Cluster
    precision: str
    micro_batches: int = 1
    device: Device = "cpu"
    optimizer: Optimizer = "adamw"
    _layers: dict[Any, LayerSeconds] = field(default_factory=dict)
    _collectives: dict[Any, CommunicationCost] = field(default_factory=dict)

    @cached_property
    def topology(self) -> Topology:
        """The links of the cluster, with the curves of the profile."""
        return Topology.of(self.cluster, self.profile.links)

    def layer(self, kind: int, rank: int, part: Part) -> LayerSeconds:
        """Seconds of a micro-batch through a part of a layer. Collectives are apart, unless they were measured
        inside."""
        type_ = self.cluster.devices[rank].type
        key = (kind, type_.name, part)
        if key not in self._layers:
            self._layers[key] = self._at_fraction(self.profile.kinds[kind], type_, part)
        return self._layers[key]

    def collective(self, kind: str, ranks: tuple[int, ...], num_bytes: int) -> float:
        """Seconds of a collective."""
        return self.collective_cost(kind, ranks, num_bytes).seconds

    def collective_cost(self, kind: str, ranks: tuple[int, ...], num_bytes: int) -> CommunicationCost:
        """What a collective takes; groups that lie alike are priced once."""
        key = (kind, self.topology.shape(ranks), num_bytes)
        if key not in self._collectives:
            self._collectives[key] = collective(self.topology, kind, ranks, num_bytes)  # type: ignore[arg-type]
        return self._collectives[key]

    def includes_communication(self, kind: int, rank: int, part: Part) -> bool:
        """Whether the times of a split layer hold its collectives."""
        name = self.cluster.devices[rank].type.name
        measured = [times for times in self.profile.kinds[kind].measured if times.device_type == name]
        if not measured or part.fraction == 1:
            return False
        nearest = min(measured, key=lambda times: abs(times.tensor_degree - 1 / part.fraction))
        return nearest.includes_communication

    def _at_fraction(self, kind: LayerKind, device: DeviceType, part: Part) -> LayerSeconds:
        """Between the tensor degrees that the profile knows seconds are linear in the fraction that a device holds."""
        if part.rows == 0:
            return LayerSeconds(forward=0.0, backward=0.0, weights=0.0, update=0.0)
        measured = {times.tensor_degree for times in kind.measured if times.device_type == device.name}
        degrees = sorted(measured or {variant.tensor_degree for variant in kind.variants})
        exact = next((degree for degree in degrees if abs(degree * part.fraction - 1) < 1e-9), None)

        def at(degree: int) -> LayerSeconds:
            return layer_seconds(
                kind,
                device,
                tensor_degree=degree,
                expert_degree=part.expert,
                rows=part.rows,
                precision=self.precision,
                eager=True,
                optimizer=self.optimizer,
                num_micro_batches=self.micro_batches,
            )

        if exact is not None:
            return at(exact)
        if len(degrees) < 2:
            return _blend(at(degrees[0]), at(degrees[0]), part.fraction * degrees[0], 0.0)
        above = max((degree for degree in degrees if 1 / degree >= part.fraction), default=degrees[0])
        below = min((degree for degree in degrees if degree > above), default=degrees[-1])
        if below == above:
            above = degrees[-2]
        share = (part.fraction - 1 / below) / (1 / above - 1 / below)
        return _blend(at(above), at(below), share, 1 - share)


def _blend(one: LayerSeconds, other: LayerSeconds, share: float, rest: float) -> LayerSeconds:
    def mixed(name: str) -> float:
        return max(0.0, share * getattr(one, name) + rest * getattr(other, name))

    backward = mixed("backward")
    return LayerSeconds(
        forward=mixed("forward"),
        backward=backward,
        weights=min(backward, mixed("weights")),
        update=mixed("update"),
        measured=one.measured and other.measured,
    )


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """The layers of a stage: positions in the profile's chain, and for each rank its part of each."""

    layers: tuple[int, ...]
    parts: Mapping[int, tuple[Part, ...]]


def stage_layers(compilation: Compilation, profile: ModelProfile) -> list[StageLayers]:
    """Which stage runs which layer of the profile, and in which parts.

    A layer is of the stage that computes the first operator in its module.

    Raises:
        UsageError: the profile has no module paths, or a layer's module computes nothing in this model.
    """
    if len(profile.paths) != len(profile.layers):
        raise UsageError(
            f"the profile of {profile.name} does not say which modules its layers are; make one with whale profile "
            "--model, or estimate its degrees with whale estimate"
        )
    first: dict[str, tuple[int, Any]] = {}
    for stage in compilation.stages:
        for node in stage.nodes:
            path = module_of(node) or ""
            while True:
                first.setdefault(path, (stage.index, node))
                if not path:
                    break
                path = path.rpartition(".")[0]
    found: list[list[tuple[int, Any]]] = [[] for _ in compilation.stages]
    before: tuple[int, Any] | None = None
    for position, path in enumerate(profile.paths):
        place = first.get(path) if path else before or first.get("")
        if place is None:
            raise UsageError(
                f"layer {position} of the profile is {path!r}, which computes nothing in this model; give the profile "
                "that was made of it"
            )
        found[place[0]].append((position, place[1]))
        before = place
    return [
        StageLayers(
            layers=tuple(position for position, _ in members),
            parts=_parts(compilation, profile, stage, members),
        )
        for stage, members in zip(compilation.stages, found, strict=True)
    ]


def _parts(
    compilation: Compilation, profile: ModelProfile, stage: PlacedStage, members: Sequence[tuple[int, Any]]
) -> dict[int, tuple[Part, ...]]:
    """What each rank has of layers, each with its first operator, by the roles of their regions."""
    spot, scopes = compilation.assignment.stages[stage.index], compilation.partition.stages[stage.index].scopes
    by_path = {module_of(node) or "": spot.roles.of(scopes[node]) for node in stage.nodes} if profile.experts else {}
    roles = []
    for layer, node in members:
        own, modules = spot.roles.of(scopes[node]), profile.experts[layer] if profile.experts else ()
        roles.append((own, next((by_path[module] for module in modules if module in by_path), own)))
    shares = [stage.mesh.axis_shares(axis) for axis in range(len(stage.mesh.axes))]
    sums = [sum(own) for own in shares]

    def part(role: Sequence[object], of_experts: Sequence[object], coordinates: Sequence[int]) -> Part:
        rows, fraction, expert = max(compilation.rows), 1.0, 1
        for axis, (one, other, at) in enumerate(zip(role, of_experts, coordinates, strict=True)):
            if one == "replicate":
                rows = unit_shares(rows, stage.layout.axes[axis + 1])[at]
                expert *= stage.mesh.shape[axis] if other == "split" else 1
            else:
                fraction *= shares[axis][at] / sums[axis]
        return Part(rows=rows, fraction=fraction, expert=expert)

    found = {}
    for rank in stage.mesh.ranks:
        coordinates = stage.mesh.coordinates(rank)
        parts = {both: part(*both, coordinates) for both in dict.fromkeys(roles)}
        found[rank] = tuple(parts[both] for both in roles)
    return found


def predict(
    compilation: Compilation,
    costs: Costs,
    *,
    schedule: str,
    clock: Clock | None = None,
    held_by: Callable[..., Occupancy] = occupancy,
) -> Predicted:
    """What the compiled step should take on the cluster of *costs*.

    *held_by* finds the bytes of a rank: `occupancy`, or `whale.occupancy.brief_occupancy` where time matters.

    Raises:
        UsageError: the profile is not of this model, or the cluster does not say how ranks are linked.
    """
    layers = stage_layers(compilation, costs.profile)
    held = _occupancies(compilation, costs, schedule, clock, held_by)
    workload, measured = _workload(compilation, costs, layers, held, schedule)
    timeline = simulate_alike(workload)
    memory = tuple(_memory(costs.cluster, rank, held[rank]) for rank in sorted(held))
    seconds = timeline.step_seconds
    source: Literal["measured", "modelled"] = "measured" if measured else "modelled"
    error = relative_error(costs.cluster, measured=measured)
    flops = 3.0 * sum(compilation.rows) * sum(map(_forward_flops, costs.profile.chain()))
    peak = sum(precision_named(costs.precision).rate(device.type)[0] for device in costs.cluster.devices)
    prediction = Prediction(
        step_seconds=seconds,
        step_seconds_interval=(seconds * (1 - error), seconds * (1 + error)),
        breakdown={str(part): spent for part, spent in timeline.breakdown.items()},
        memory=memory,
        fits=all(device.total <= device.capacity for device in memory),
        source=source,
        bubble=min(1.0, timeline.bubble),
        flops=flops,
        mfu=flops / seconds / peak if seconds else 0.0,
    )
    return Predicted(prediction=prediction, workload=workload, timeline=timeline)


# --- memory -----------------------------------------------------------------------------------------------------------


def _occupancies(
    compilation: Compilation,
    costs: Costs,
    schedule: str,
    clock: Clock | None,
    held_by: Callable[..., Occupancy],
) -> dict[int, Occupancy]:
    """Of every rank that works; ranks that compute and exchange alike are tried once."""
    found: dict[int, Occupancy] = {}
    for members in _alike(compilation):
        one = held_by(
            compilation,
            members[0],
            schedule=schedule,
            optimizer=costs.optimizer,
            device=costs.device,
            clock=clock,
        )
        found |= dict.fromkeys(members, one)
    return found


def _alike(compilation: Compilation) -> Iterable[list[int]]:
    """Ranks that compute, exchange and sum alike, but for their places; each kind in order, by its first rank."""
    does: dict[int, list[Any]] = {}
    for stage in compilation.stages:
        for kind, members in enumerate(like_ranks(stage, compilation.rows)):
            for rank in members:
                does.setdefault(rank, []).append(("computes", stage.index, kind))
    moved: dict[int, Counter[Any]] = {rank: Counter() for rank in does}
    for edge in compilation.edges:
        for direction, transfers in (("forward", edge.forward), ("backward", edge.backward)):
            for source, target, box, _ in transfers[0] if transfers else ():
                what = (edge.index, direction, box_size(box))
                if source == target:
                    moved[source]["copies", *what] += bool(what[-1])
                elif what[-1]:
                    moved[source]["sends", *what] += 1
                    moved[target]["receives", *what] += 1
    buckets: dict[tuple[int, ...], list[int]] = {}
    for spec, names in zip(compilation.reduces, compilation.bucket_parameters, strict=True):
        buckets.setdefault(spec.ranks, []).append(len(names))
    summed: dict[int, list[int]] = {rank: [] for rank in does}
    for ranks, sizes in buckets.items():
        for rank in ranks:
            summed[rank] += sizes
    # Buckets of replicas differ in index and not in size where the groups are alike.
    kinds: dict[Any, list[int]] = {}
    for rank in sorted(does):
        key = (tuple(does[rank]), frozenset(moved[rank].items()), tuple(sorted(summed[rank])))
        kinds.setdefault(key, []).append(rank)
    return kinds.values()


def _memory(cluster: Cluster, rank: int, held: Occupancy) -> DeviceMemory:
    device = cluster.devices[rank]
    wasted = round(wasted_share(device.type) * (held.activations + held.buffers))
    return DeviceMemory(
        rank=rank,
        device=device.name,
        capacity=device.memory_bytes,
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=held.activations,
        buffers=held.buffers + wasted,
        framework=round(framework_bytes(device.type, len(cluster.devices))),
    )


# --- times ------------------------------------------------------------------------------------------------------------


def _workload(
    compilation: Compilation,
    costs: Costs,
    layers: Sequence[StageLayers],
    held: Mapping[int, Occupancy],
    schedule: str,
) -> tuple[Workload, bool]:
    """The workload, and whether all its computation was measured."""
    boundaries = _boundaries(compilation)
    moving = _moving(costs, boundaries)
    works, measured, update = [], True, [0.0] * len(costs.cluster.devices)
    backwards: dict[tuple[int, int], Backward] = {}
    for stage, own in zip(compilation.stages, layers, strict=True):
        spent = _spent(costs, own)
        work, backward = _stage_work(costs, stage, spent, held, moving)
        works.append(work)
        backwards |= {(stage.index, rank): one for rank, one in backward.items()}
        measured = measured and all(one.measured for one in spent.values())
        for rank, one in spent.items():
            update[rank] += one.update
    ranks = tuple(sorted(held))
    together = costs.collective("all_reduce", ranks, 16) if len(ranks) > 1 else 0.0
    workload = Workload(
        world_size=len(costs.cluster.devices),
        micro_batches=len(compilation.rows),
        last_share=compilation.rows[-1] / compilation.rows[0],
        schedule=schedule,
        stages=tuple(works),
        boundaries=boundaries,
        reductions=_reductions(compilation, costs, backwards),
        links=_links(costs, boundaries),
        update=tuple(update),
        overhead=together,  # the ranks compare their batches before a step
        overlap_slowdown=CPU_OVERLAP_SLOWDOWN if costs.device == "cpu" else GPU_OVERLAP_SLOWDOWN,
        runs_ahead=costs.device != "cpu",
    )
    return workload, measured


@dataclass(frozen=True, kw_only=True)
class _Spent:
    """Seconds of a micro-batch through a rank's parts of the layers of a stage; ``inside`` says whether they hold the
    collectives."""

    forward: float
    backward: float
    weights: float
    update: float
    inside: bool
    measured: bool


def _spent(costs: Costs, own: StageLayers) -> dict[int, _Spent]:
    """Of each rank of a stage; those of one type with equal parts are priced once."""
    known: dict[Any, _Spent] = {}
    found = {}
    for rank, parts in own.parts.items():
        key = (costs.cluster.devices[rank].type.name, parts)
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
    )


@dataclass(frozen=True, kw_only=True)
class Backward:
    """A rank's backward of a stage: its seconds, and of its collectives how many take how many seconds each."""

    seconds: float
    collectives: _Times

    def slowdown(self, computation: float, waiting: float) -> float:
        """By how much it takes longer beside a reduction: *computation* by so much, and each collective waits for
        parts of the reduction that were on the link before, or shares the link, whichever takes longer."""
        if not self.seconds:
            return computation
        alone = max(0.0, 1 - _total(self.collectives) / self.seconds)
        waited = sum(count * max(waiting, seconds) for count, seconds in self.collectives)
        return alone * computation + waited / self.seconds


def _stage_work(
    costs: Costs,
    stage: PlacedStage,
    spent: Mapping[int, _Spent],
    held: Mapping[int, Occupancy],
    moving: Mapping[tuple[str, int, int], float],
) -> tuple[StageWork, dict[int, Backward]]:
    ranks = stage.mesh.ranks
    actors = {held[rank].rank: held[rank] for rank in ranks}
    exchanges = {actor: _exchanges(stage, one) for actor, one in actors.items()}
    forward, weights, communication, backward = [], [], [], {}
    for rank in ranks:
        own, made = spent[rank], exchanges[held[rank].rank]
        lines = [stage.mesh.group(axis, rank) for axis in range(len(stage.mesh.axes))]
        times = [_times(costs, calls, lines) for calls in made]
        ahead, back = (0.0, 0.0) if own.inside else map(_total, times)
        ahead += moving.get(("forward", stage.index, rank), 0.0)
        back += moving.get(("backward", stage.index, rank), 0.0)
        forward.append(own.forward + ahead)
        backward[rank] = Backward(seconds=own.backward + back, collectives=times[1])
        weights.append(min(own.weights, backward[rank].seconds))
        communication.append(ahead + back)
    task_bytes = [held[rank].tasks[stage.index] for rank in ranks]
    met = {rank: {axis for calls in exchanges[held[rank].rank] for _, axis, _ in calls} for rank in ranks}
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
    """By direction, stage and rank the seconds of computation that its messages of a micro-batch cost it.

    A message takes its time on the link beside the computation, and of the computation what moving its bytes costs.
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


_Calls = Mapping[tuple[str, int, int], int]
"""How many collectives there are of each kind, along which axis of the mesh, of how many bytes."""

_Times = tuple[tuple[int, float], ...]
"""How many collectives take how many seconds each."""


def _exchanges(stage: PlacedStage, held: Occupancy) -> tuple[_Calls, _Calls]:
    """The collectives of a stage, forward and backward, of all ranks that are like the one that was tried."""
    axes = {tuple(sorted(stage.mesh.group(axis, held.rank))): axis for axis in range(len(stage.mesh.axes))}
    calls = held.calls[stage.index]
    forward, backward = (
        Counter((call.op, axes[call.ranks], call_bytes(call)) for call in made)
        for made in (calls.forward, calls.backward)
    )
    return forward, backward


def _times(costs: Costs, calls: _Calls, lines: Sequence[tuple[int, ...]]) -> _Times:
    return tuple((count, costs.collective(op, lines[axis], size)) for (op, axis, size), count in calls.items())


def _total(times: _Times) -> float:
    return sum(count * seconds for count, seconds in times)


def _together(stage: PlacedStage, met: Mapping[int, Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Ranks that meet in collectives, as groups; *met* says along which axes each does."""
    group = {rank: frozenset((rank,)) for rank in stage.mesh.ranks}
    for members in dict.fromkeys(stage.mesh.group(axis, rank) for rank, axes in met.items() for axis in axes):
        joined = frozenset().union(*(group[rank] for rank in members))
        group |= dict.fromkeys(joined, joined)
    return tuple(tuple(sorted(one)) for one in dict.fromkeys(group.values()) if len(one) > 1)


def _boundaries(compilation: Compilation) -> tuple[Boundary, ...]:
    """What crosses between each pair of stages, all values together."""
    sizes: dict[tuple[int, int], dict[str, Counter[tuple[int, int]]]] = {}
    for edge in compilation.edges:
        pair = sizes.setdefault((edge.source_stage, edge.target_stage), {"forward": Counter(), "backward": Counter()})
        element = getattr(torch, edge.dtype).itemsize
        for direction, transfers in (("forward", edge.forward), ("backward", edge.backward)):
            for transfer in transfers[0] if transfers else ():
                if size := box_size(transfer.source_box) * element:
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
    """The links between ranks that exchange something, at the size of the largest message."""
    largest: dict[tuple[int, int], int] = {}
    for boundary in boundaries:
        for transfer in (*boundary.forward, *boundary.backward):
            pair = (transfer.source, transfer.target)
            if pair[0] != pair[1]:
                largest[pair] = max(largest.get(pair, 0), transfer.bytes)
    found = []
    for (source, target), size in largest.items():
        cost = send(costs.topology, source, target, size)
        bandwidth = size / cost.transfer if cost.transfer > 0 else size / max(cost.seconds, 1e-9)
        resources = costs.topology.link(source, target).resources
        found.append(
            LinkTime(source=source, target=target, latency=cost.latency, bandwidth=bandwidth, resources=resources)
        )
    return tuple(found)


def _reductions(
    compilation: Compilation, costs: Costs, backwards: Mapping[tuple[int, int], Backward]
) -> tuple[Reduction, ...]:
    """The buckets of gradients. A bucket is ready when its part of the stage's gradients, by bytes, is."""
    sizes = bucket_bytes(compilation)
    groups = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    for spec, size in zip(compilation.reduces, sizes, strict=True):
        groups[spec.ranks, spec.stages] += size
    done = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    found = []
    for spec, size in zip(compilation.reduces, sizes, strict=True):
        key = (spec.ranks, spec.stages)
        done[key] += size
        cost = costs.collective_cost("all_reduce", spec.ranks, size)
        found.append(
            Reduction(
                ranks=spec.ranks,
                stages=spec.stages,
                bytes=size,
                seconds=cost.seconds,
                ready=1.0 if len(spec.stages) > 1 else min(1.0, done[key] / max(1, groups[key])),
                slowdown=_slowdowns(costs, spec, cost.beside, backwards),
                stretch=cost.beside.stretch if cost.beside is not None else 0.0,
            )
        )
    return tuple(found)


def _slowdowns(
    costs: Costs, spec: ReduceSpec, beside: Interference | None, backwards: Mapping[tuple[int, int], Backward]
) -> tuple[float, ...]:
    """By how much the backward of each rank takes longer beside a reduction; empty where that was not measured."""
    if beside is None:
        return ()
    known = dict(zip(beside.types, beside.slowdowns, strict=True))
    found = []
    for rank in spec.ranks:
        computation = known.get(costs.cluster.devices[rank].type.name, 0.0)
        own = (backwards[stage, rank] for stage in spec.stages if (stage, rank) in backwards)
        found.append(max((one.slowdown(computation, beside.waiting) for one in own), default=computation))
    return tuple(found)


def _forward_flops(kind: LayerKind) -> float:
    """Multiplications and additions of a layer's products for a row."""
    variant = next((one for one in kind.variants if one.tensor_degree == 1), None)
    if variant is None:
        return 0.0
    return sum(kernel.count * kernel.flops(1) for kernel in variant.forward if kernel.kind != "memory")
