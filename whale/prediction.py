"""What a compiled step should take: the times of its tasks, what travels and what is summed, as a workload, and from it
the prediction.

Which layers a stage runs, at how many rows and which part on each rank, what crosses stages and which collectives lie
inside of them comes from the compilation; seconds come from a profile and a cluster; bytes in memory from running the
step without data. Nothing is allocated and no process group is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch

from whale.compiler import Compilation
from whale.errors import UsageError
from whale.graph.refusals import module_of
from whale.ir.check import CollectiveCall
from whale.ir.cluster import Cluster, DeviceType
from whale.ir.profile import Interference, LayerKind, ModelProfile
from whale.ir.program import Copy, Receive, Send, box_size
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
from whale.occupancy import Occupancy, Optimizer, occupancy
from whale.planner.communication import collective, send
from whale.planner.compute import LayerSeconds, layer_seconds
from whale.planner.estimate import relative_error
from whale.planner.memory import framework_bytes
from whale.planner.precision import precision_named
from whale.planner.simulate import simulate
from whale.planner.timeline import Timeline
from whale.planner.topology import Topology
from whale.runtime.random import Clock
from whale.strategies.layout import unit_shares
from whale.strategies.lowering import PlacedStage
from whale.strategies.rehearsal import StageCalls, like_ranks, stage_calls

__all__ = ["Costs", "Predicted", "predict"]

CPU_OVERLAP_SLOWDOWN = 0.5
"""Where nothing was measured: gloo takes some 1.1 ns of processor time for a byte of an all-reduce whose wire time at
1 Gbit/s is 8 ns, so on a quarter of a core computation beside it takes half as long again
(benchmarks/testbed_noise.py)."""

GPU_OVERLAP_SLOWDOWN = 0.126
"""Galvatron's coefficient for A100, as in `whale.planner.stages`."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A prediction with the numbers that it was made from."""

    prediction: Prediction
    workload: Workload
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank has of a layer: the rows of a micro-batch, and the fraction of what is split."""

    rows: int
    fraction: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Prices of a model's layers and messages on a cluster.

    ``micro_batches`` are those of a step. ``device`` is ``cpu`` or ``cuda``: whether processes run ahead of what they
    launch.
    """

    profile: ModelProfile
    cluster: Cluster
    precision: str
    micro_batches: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    _layers: dict[Any, LayerSeconds] = field(default_factory=dict)

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
                rows=part.rows,
                precision=self.precision,
                eager=True,
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
            parts={
                rank: tuple(_part(compilation, stage, node, rank) for _, node in members) for rank in stage.mesh.ranks
            },
        )
        for stage, members in zip(compilation.stages, found, strict=True)
    ]


def _part(compilation: Compilation, stage: PlacedStage, node: Any, rank: int) -> Part:
    """What a rank has of the layer of an operator, by the roles of its region."""
    spot = compilation.assignment.stages[stage.index]
    roles = spot.roles.of(compilation.partition.stages[stage.index].scopes[node])
    rows, fraction = max(compilation.rows), 1.0
    for axis, (role, at) in enumerate(zip(roles, stage.mesh.coordinates(rank), strict=True)):
        shares = stage.mesh.axis_shares(axis)
        if role == "replicate":
            rows = unit_shares(rows, stage.layout.axes[axis + 1])[at]
        else:
            fraction *= shares[at] / sum(shares)
    return Part(rows=rows, fraction=fraction)


def predict(
    compilation: Compilation,
    costs: Costs,
    *,
    schedule: str,
    optimizer: Optimizer = "adamw",
    clock: Clock | None = None,
    held_by: Callable[..., Occupancy] = occupancy,
) -> Predicted:
    """What the compiled step should take on the cluster of *costs*.

    *held_by* finds the bytes of a rank: `occupancy`, or `whale.occupancy.brief_occupancy` where time matters.

    Raises:
        UsageError: the profile is not of this model, or the cluster does not say how ranks are linked.
    """
    layers = stage_layers(compilation, costs.profile)
    held = _occupancies(compilation, schedule, optimizer, clock, held_by)
    workload, measured = _workload(compilation, costs, layers, held, schedule, clock)
    timeline = simulate(workload)
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
    schedule: str,
    optimizer: Optimizer,
    clock: Clock | None,
    held_by: Callable[..., Occupancy],
) -> dict[int, Occupancy]:
    """Of every rank that works; ranks that compute and exchange alike are tried once."""
    alike: dict[Any, list[int]] = {}
    kinds: dict[tuple[int, int], int] = {}
    for stage in compilation.stages:
        for index, members in enumerate(like_ranks(stage, compilation.rows)):
            kinds |= {(stage.index, rank): index for rank in members}
    for rank in sorted({rank for stage in compilation.stages for rank in stage.mesh.ranks}):
        computed = tuple((stage, kind) for (stage, other), kind in sorted(kinds.items()) if other == rank)
        moved = Counter(
            (type(step).__name__, step.edge, step.direction, box_size(_box(step)))
            for step in compilation.program(rank)
            if isinstance(step, Send | Receive | Copy) and step.micro_batch == 0
        )
        summed = tuple(spec.index for spec in compilation.reduces if rank in spec.ranks)
        # Buckets of replicas differ in index and not in size where the groups are alike.
        sizes = tuple(sorted(len(compilation.bucket_parameters[index]) for index in summed))
        alike.setdefault((computed, tuple(sorted(moved.items())), sizes), []).append(rank)
    found: dict[int, Occupancy] = {}
    for members in alike.values():
        one = held_by(
            compilation,
            members[0],
            schedule=schedule,
            optimizer=optimizer,
            device=torch.device("cpu"),
            clock=clock,
        )
        found |= dict.fromkeys(members, one)
    return found


def _box(step: Send | Receive | Copy) -> Any:
    return step.source_box if isinstance(step, Copy) else step.box


def _memory(cluster: Cluster, rank: int, held: Occupancy) -> DeviceMemory:
    device = cluster.devices[rank]
    return DeviceMemory(
        rank=rank,
        device=device.name,
        capacity=device.memory_bytes,
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=held.activations,
        buffers=held.buffers,
        framework=round(framework_bytes(device.type, len(cluster.devices))),
    )


# --- times ------------------------------------------------------------------------------------------------------------


def _workload(
    compilation: Compilation,
    costs: Costs,
    layers: Sequence[StageLayers],
    held: Mapping[int, Occupancy],
    schedule: str,
    clock: Clock | None,
) -> tuple[Workload, bool]:
    """The workload, and whether all its computation was measured."""
    works, measured = [], True
    for stage, own in zip(compilation.stages, layers, strict=True):
        calls = _calls(compilation, stage, clock)
        works.append(_stage_work(costs, stage, own, calls, held))
        measured = measured and all(
            costs.layer(costs.profile.layers[layer], rank, part).measured
            for rank in stage.mesh.ranks
            for layer, part in zip(own.layers, own.parts[rank], strict=True)
            if part.rows
        )
    boundaries = _boundaries(compilation)
    update = [0.0] * len(costs.cluster.devices)
    for own in layers:
        for rank, parts in own.parts.items():
            update[rank] += sum(
                costs.layer(
                    costs.profile.layers[layer], rank, Part(rows=max(1, part.rows), fraction=part.fraction)
                ).update
                for layer, part in zip(own.layers, parts, strict=True)
            )
    ranks = tuple(sorted(held))
    together = collective(costs.topology, "all_reduce", ranks, 16).seconds if len(ranks) > 1 else 0.0
    workload = Workload(
        world_size=len(costs.cluster.devices),
        micro_batches=len(compilation.rows),
        last_share=compilation.rows[-1] / compilation.rows[0],
        schedule=schedule,
        stages=tuple(works),
        boundaries=boundaries,
        reductions=_reductions(compilation, costs),
        links=_links(costs, boundaries),
        update=tuple(update),
        overhead=together,  # the ranks compare their batches before a step
        overlap_slowdown=CPU_OVERLAP_SLOWDOWN if costs.device == "cpu" else GPU_OVERLAP_SLOWDOWN,
        runs_ahead=costs.device != "cpu",
    )
    return workload, measured


def _calls(compilation: Compilation, stage: PlacedStage, clock: Clock | None) -> StageCalls:
    return stage_calls(
        compilation.captured, stage, compilation.rows, lambda s, r: compilation.local_programs(s, r, clock), -1
    )


def _stage_work(
    costs: Costs, stage: PlacedStage, own: StageLayers, calls: StageCalls, held: Mapping[int, Occupancy]
) -> StageWork:
    ranks = stage.mesh.ranks
    tasks = next(iter(calls.values()), {})
    forward, backward, weights, communication = [], [], [], []
    for rank in ranks:
        spent = [
            costs.layer(costs.profile.layers[layer], rank, part)
            for layer, part in zip(own.layers, own.parts[rank], strict=True)
        ]
        inside = own.layers and all(
            costs.includes_communication(costs.profile.layers[layer], rank, part)
            for layer, part in zip(own.layers, own.parts[rank], strict=True)
        )
        made = tasks.get(rank)
        ahead = _seconds(costs, made.forward) if made and not inside else 0.0
        back = _seconds(costs, made.backward) if made and not inside else 0.0
        forward.append(sum(one.forward for one in spent) + ahead)
        backward.append(sum(one.backward for one in spent) + back)
        weights.append(min(sum(one.weights for one in spent), backward[-1]))
        communication.append(ahead + back)
    task_bytes = [held[rank].tasks[stage.index] for rank in ranks]
    return StageWork(
        ranks=ranks,
        together=_together(ranks, tasks.values()),
        forward=tuple(forward),
        backward=tuple(backward),
        weights=tuple(weights),
        communication=tuple(communication),
        kept_bytes=tuple(one.kept for one in task_bytes),
        forward_peak_bytes=tuple(one.forward_peak for one in task_bytes),
        backward_peak_bytes=tuple(one.backward_peak for one in task_bytes),
    )


def _seconds(costs: Costs, calls: Iterable[CollectiveCall]) -> float:
    total = 0.0
    for (op, ranks, size), count in Counter((call.op, call.ranks, call_bytes(call)) for call in calls).items():
        total += count * collective(costs.topology, op, ranks, size).seconds  # type: ignore[arg-type]
    return total


def call_bytes(call: CollectiveCall) -> int:
    """The size of the whole tensor that a collective is about, as `whale.planner.communication` counts it.

    >>> call_bytes(CollectiveCall("n", "all_gather", (0, 1), "float32", ((2, 3), (1, 3))))
    36
    """
    element = torch.empty((), dtype=getattr(torch, call.dtype)).element_size()
    if call.op in ("all_gather", "reduce_scatter"):
        return element * sum(prod(shape) for shape in call.shapes)
    whole = prod(call.shapes[0])
    return element * (whole // len(call.ranks) if call.op == "all_to_all" else whole)


def _together(ranks: Sequence[int], tasks: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """Ranks that meet in collectives, as groups."""
    group = {rank: frozenset((rank,)) for rank in ranks}
    for members in dict.fromkeys(call.ranks for task in tasks for call in (*task.forward, *task.backward)):
        joined = frozenset().union(*(group[rank] for rank in members))
        group |= dict.fromkeys(joined, joined)
    return tuple(tuple(sorted(one)) for one in dict.fromkeys(group.values()) if len(one) > 1)


def _boundaries(compilation: Compilation) -> tuple[Boundary, ...]:
    """What crosses between each pair of stages, all values together."""
    sizes: dict[tuple[int, int], dict[str, Counter[tuple[int, int]]]] = {}
    for edge in compilation.edges:
        pair = sizes.setdefault((edge.source_stage, edge.target_stage), {"forward": Counter(), "backward": Counter()})
        element = torch.empty((), dtype=getattr(torch, edge.dtype)).element_size()
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


def _reductions(compilation: Compilation, costs: Costs) -> tuple[Reduction, ...]:
    """The buckets of gradients. A bucket is ready when its part of the stage's gradients, by bytes, is."""
    shards = compilation.shards()
    sizes = []
    for spec, names in zip(compilation.reduces, compilation.bucket_parameters, strict=True):
        total = 0
        for name in names:
            part = shards[name].parts[spec.ranks[0]]
            elements = prod(sum(stop - start for start, stop in dim) for dim in part)
            total += elements * torch.empty((), dtype=shards[name].dtype).element_size()
        sizes.append(total)
    groups = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    for spec, size in zip(compilation.reduces, sizes, strict=True):
        groups[spec.ranks, spec.stages] += size
    done = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    found = []
    for spec, size in zip(compilation.reduces, sizes, strict=True):
        key = (spec.ranks, spec.stages)
        done[key] += size
        cost = collective(costs.topology, "all_reduce", spec.ranks, size)
        found.append(
            Reduction(
                ranks=spec.ranks,
                stages=spec.stages,
                bytes=size,
                seconds=cost.seconds,
                ready=1.0 if len(spec.stages) > 1 else min(1.0, done[key] / max(1, groups[key])),
                slowdown=_slowdowns(costs, spec.ranks, cost.beside),
            )
        )
    return tuple(found)


def _slowdowns(costs: Costs, ranks: Sequence[int], beside: Interference | None) -> tuple[float, ...]:
    """By how much computation on each rank takes longer beside a reduction; empty where that was not measured."""
    if beside is None:
        return ()
    known = dict(zip(beside.types, beside.slowdowns, strict=True))
    return tuple(known.get(costs.cluster.devices[rank].type.name, 0.0) for rank in ranks)


def _forward_flops(kind: LayerKind) -> float:
    """Multiplications and additions of a layer's products for a row."""
    variant = next((one for one in kind.variants if one.tensor_degree == 1), None)
    if variant is None:
        return 0.0
    return sum(kernel.count * kernel.flops(1) for kernel in variant.forward if kernel.kind != "memory")
