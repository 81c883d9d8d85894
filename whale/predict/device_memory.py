"""Peak memory of every device in a compiled step, and its capacity.

A dry run of a rank's step counts its bytes (`whale.predict.peak_memory`), once for ranks with equal fingerprints. Here
tensors become bytes of a device, with the overhead of allocators and frameworks. It knows no seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from whale.compile.communicators import DIRECTIONS, ON_HOSTS, Communicator, communicators
from whale.compile.compilation import Compilation
from whale.ir.cluster import Cluster
from whale.ir.program import box_size
from whale.ir.units import bytes_text
from whale.ir.workload import DeviceMemory
from whale.planner.cost.memory import communicator_bytes, framework_bytes, wasted_share
from whale.planner.cost.optimizers import Optimizer
from whale.predict.dry_step import Device
from whale.predict.peak_memory import PeakMemory, brief_peak_memory
from whale.strategies.dry_run import like_ranks
from whale.strategies.host_tables import tables_of

__all__ = ["bytes_of_communicators", "device_memory", "memory_advice", "peak_memories"]

OWNED_PARTS = 128
"""Ranks that own state in stretches are alike if these differ by less than such a part of it, as rounding to rows makes
them: the largest counts for all."""


def peak_memories(
    compilation: Compilation,
    *,
    schedule: str,
    optimizer: Optimizer,
    device: Device,
    memory_of: Callable[..., PeakMemory],
) -> dict[int, PeakMemory]:
    """Bytes of every rank that works, by *memory_of*; one dry run for ranks with equal fingerprints."""
    found: dict[int, PeakMemory] = {}
    for members in _alike(compilation):
        one = memory_of(compilation, members[0], schedule=schedule, optimizer=optimizer, device=device)
        found |= dict.fromkeys(members, one)
    return found


def _alike(compilation: Compilation) -> Iterable[list[int]]:
    """Ranks with equal fingerprints, up to their positions in the mesh; each kind in order, by its first rank."""
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
    of_state = _owned(compilation)
    summed: dict[int, list[int]] = {rank: [] for rank in does}
    for ranks, sizes in buckets.items():
        for rank in ranks:
            summed[rank] += sizes
    # Buckets of replicas differ in index and not in size if their groups are equal.
    kinds: dict[Any, list[int]] = {}
    for rank in sorted(does):
        part = round(OWNED_PARTS * of_state[rank]) if rank in of_state else 0
        key = (tuple(does[rank]), frozenset(moved[rank].items()), tuple(sorted(summed[rank])), part)
        kinds.setdefault(key, []).append(rank)
    for members in kinds.values():  # the one that owns most of the state stands for them
        yield sorted(members, key=lambda rank: -of_state.get(rank, 0.0))


def _owned(compilation: Compilation) -> dict[int, float]:
    """The part of the state that each rank owns, of what it would have otherwise, where ranks divide some."""
    owned, whole = Counter[int](), Counter[int]()
    for unit in compilation.units:
        for rank, (first, last) in zip(unit.spec.ranks, pairwise(unit.spec.bounds), strict=True):
            owned[rank] += (last - first) * unit.dtype.itemsize
            whole[rank] += unit.spec.bounds[-1] * unit.dtype.itemsize
    return {rank: owned[rank] / size for rank, size in whole.items() if size}


def bytes_of_communicators(compilation: Compilation) -> dict[int, float]:
    """Bytes that each rank's communicators of NCCL take, that of all ranks included.

    Groups of unknown links count nothing.
    """
    cluster = compilation.cluster
    everyone = tuple(range(len(cluster.devices)))
    peers: dict[tuple[str, int], dict[int, None]] = {}  # by direction and rank
    for edge in compilation.edges:
        for direction, transfers in (("forward", edge.forward), ("backward", edge.backward)):
            for source, target, box, _ in transfers[0] if transfers else ():
                if source != target and box_size(box):
                    peers.setdefault((direction, source), {})[target] = None
                    peers.setdefault((direction, target), {})[source] = None
    found = dict.fromkeys(everyone, 0.0)
    for purpose, ranks in (Communicator("all", everyone), *communicators(compilation, for_messages=True)):
        bandwidth, members = cluster.least_bandwidth(ranks), set(ranks)
        for rank in ranks if bandwidth and purpose not in ON_HOSTS else ():
            others = len(peers.get((purpose, rank), {}).keys() & members)
            if others or purpose not in DIRECTIONS:
                found[rank] += communicator_bytes(bandwidth, len(ranks), others)
    return found


def device_memory(cluster: Cluster, rank: int, held: PeakMemory, communicators: float) -> DeviceMemory:
    """The bytes of a device; *held* are those of the step's tensors."""
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
        framework=round(framework_bytes(device.type, len(cluster.devices), communicators)),
        host_state=held.host_state,
        host_activations=held.host_activations,
    )


def memory_advice(compilation: Compilation, cluster: Cluster, rank: int, schedule: str, device: Device) -> str:
    """Predicted memory of a rank, and options that would need less, for a rank that is out of memory."""
    tensors = brief_peak_memory(compilation, rank, schedule=schedule, device=device)
    held = device_memory(cluster, rank, tensors, bytes_of_communicators(compilation)[rank])
    parts = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "AdamW's states": held.optimizer,
        "activations": held.activations,
        "buffers": held.buffers,
        "the framework": held.framework if device == "cuda" else 0,
    }
    shown = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    stages = [stage.index for stage in compilation.stages if rank in stage.mesh.ranks]
    cures = []
    rules = {stage.recompute for stage in compilation.stages if rank in stage.mesh.ranks}
    if rules != {"full"}:
        cures.append(f'recompute="{"full" if rules == {"selective"} else "selective"}"')
    own = [stage.state.level if stage.state else 0 for stage in compilation.stages if rank in stage.mesh.ranks]
    level = min(own, default=0)
    if level < 3 and any(rank in spec.ranks and len(spec.ranks) > 1 for spec in compilation.reduces):
        cures.append(f"zero={3 if level else 1}")
    own_stages = [stage for stage in compilation.stages if rank in stage.mesh.ranks]
    hosted = {stage.offload for stage in own_stages}
    if any(not stage.on_host and tables_of(compilation.captured, stage.stored) for stage in own_stages):
        cures.append('offload="tables"')
    elif not hosted & {"both", "tables"}:
        less = "state" if hosted == {"none"} else "both"
        cures.append(f'offload="{less}"')
    rows = compilation.rows[0]
    if rows > 1:
        smallest = next(n for n in range(2, rows + 1) if rows % n == 0)
        cures.append(f"micro_batches={len(compilation.rows) * smallest}")
    cures.append(f"more devices for stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}, split among them")
    return f"predicted were {bytes_text(sum(parts.values()))}: {shown}; what needs less: {', or '.join(cures)}"
