"""Detected cluster of a launch without a cluster file.

Each rank reports its device; figures of known accelerators come from the catalog. Properties that a launch cannot
detect, such as the network between nodes, are assumed equal for all: they affect the quality of a plan, never its
correctness. Nothing is measured: the same launch gives the same cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from whale.errors import PlanMismatchError, UsageError
from whale.ir.cluster import Cluster, DeviceType, HostMemory, Link
from whale.ir.device_names import matching_types
from whale.planner.catalog import device_types
from whale.profiling.places import RankLocation, places_of
from whale.runtime.launch import World

__all__ = [
    "alike",
    "cluster_of",
    "detect",
    "detect_unlike",
    "known_type",
    "on_its_hosts",
    "warn_of_other_devices",
]

PROCESS = {"float64": 2.5e10, "float32": 5e10}
"""FLOP/s of a CPU rank, which has one thread under torchrun: eight float32 multiply-adds a cycle at 3 GHz, as on all
except the oldest servers (AVX2), without a second unit, which not all have."""
PROCESS_MEMORY_BANDWIDTH = 1e10
"""Bytes per second that one core moves, on common servers 8 to 15 GB/s."""
GLOO_WITHIN_NODE = Link(bandwidth=1e9, latency=5e-5)
"""gloo takes some 1.1 ns of processor time for a byte (benchmarks/testbed_noise.py)."""
BETWEEN_CPU_NODES = Link(bandwidth=1.25e9, latency=5e-5)
"""10 Gbit/s Ethernet."""
BETWEEN_GPU_NODES = Link(bandwidth=12.5e9, latency=1.5e-5)
"""100 Gbit/s, as most nodes of accelerators have at least."""
MEMORY_TOLERANCE = 0.1
"""Drivers report up to some percent less than the data sheet (`whale.planner.catalog.device_types`)."""


def detect(world: World) -> Cluster:
    """Detect the devices of a launch. Every rank calls it, with the same result.

    Raises:
        UsageError: an unknown accelerator next to others, or ranks that are not in the order of nodes.
        WorkerError: a rank did not come.
    """
    cluster = cluster_of(places_of(world, None))
    processors = all(device.type.is_processor for device in cluster.devices)
    if len(cluster.nodes) > 1 and not processors:
        world.warn(
            f"the links between the {len(cluster.nodes)} nodes are not known, and are taken for 100 Gbit/s; give "
            "parallelize a cluster file for a better plan"
        )
    return cluster


def detect_unlike(world: World) -> Cluster | None:
    """The devices of a launch if they are of different types; None if all are alike. Every rank calls it.

    Raises:
        UsageError, WorkerError: see `detect`.
    """
    places = places_of(world, None)
    return cluster_of(places) if len({place.device_type for place in places}) > 1 else None


def alike(num_devices: int, device_type: str) -> Cluster:
    """The cluster of a launch that is not described: equal devices of a node, of which only ratios matter.

    >>> alike(2, "cpu").devices[0].type.is_processor
    True
    """
    found = Cluster.homogeneous(num_devices)
    if device_type != "cpu":
        return found
    name = found.nodes[0].name
    return Cluster.of([(name, replace(device.type, name="cpu")) for device in found.devices])


def on_its_hosts(world: World, cluster: Cluster, *, planned: bool) -> Cluster:
    """The cluster of a file that names hosts, with its nodes in the order of the ranks there. Every rank calls it.

    *planned*: a plan says what each rank does, so the order must be that of the file.

    Raises:
        PlanMismatchError: the ranks do not run on these hosts, or not in this order.
        WorkerError: a rank did not come.
    """
    found = cluster.on_hosts([place.node for place in places_of(world, None)])
    for wanted, node in zip(cluster.nodes, found.nodes, strict=True):
        if planned and wanted.host != node.host:
            raise PlanMismatchError(
                f"the plan's ranks {list(wanted.ranks)} are for host {wanted.host}, but host {node.host} has them: "
                f"start hosts in the order of the cluster file, {', '.join(str(one.host) for one in cluster.nodes)}, "
                "as with torchrun --node-rank"
            )
    return found


def warn_of_other_devices(world: World, cluster: Cluster) -> None:
    """Warn if a rank has another known accelerator than the cluster says. Every rank calls it, on GPUs."""
    types = device_types()
    for place, device in zip(places_of(world, None), cluster.devices, strict=True):
        found = known_type(place)
        if found is not None and device.type.name in types and found.name != device.type.name:
            world.warn(
                f"rank {place.rank} on {place.node} has a {found.name}, but the cluster says {device.type.name}: "
                "shares are for that one; list nodes in the order of the ranks, or name their hosts in the cluster file"
            )
            return


def cluster_of(places: Sequence[RankLocation]) -> Cluster:
    """The cluster of ranks with these devices.

    >>> places = [RankLocation(rank=rank, device_type="cpu", node="here", memory_bytes=2**34) for rank in range(2)]
    >>> [device.memory_bytes / 2**30 for device in cluster_of(places).devices]
    [8.0, 8.0]
    """
    types = {place.device_type: _type_of(place, places) for place in places}
    processors = all(type_.is_processor for type_ in types.values())
    inter = BETWEEN_CPU_NODES if processors else BETWEEN_GPU_NODES
    cluster = Cluster.of([(place.node, types[place.device_type]) for place in places], inter=inter)
    first = [cluster.devices[node.ranks[0]].type for node in cluster.nodes]
    nodes = []
    for node, type_ in zip(cluster.nodes, first, strict=True):
        host = min(places[rank].host_bytes for rank in node.ranks)
        told = HostMemory(size_bytes=host) if host and not type_.is_processor else HostMemory()
        nodes.append(replace(node, intra=type_.intra_node or GLOO_WITHIN_NODE, host_memory=told))
    return replace(cluster, nodes=tuple(nodes))


def _type_of(place: RankLocation, places: Sequence[RankLocation]) -> DeviceType:
    alike = [other for other in places if other.device_type == place.device_type]
    if place.device_type == "cpu":
        sharing = Counter(other.node for other in places)
        return DeviceType.of(
            "cpu",
            speed=PROCESS,
            memory_bytes=min(other.memory_bytes // sharing[other.node] for other in alike),
            memory_bandwidth=PROCESS_MEMORY_BANDWIDTH,
        )
    found = known_type(place)
    if found is not None:
        return found
    if len(alike) < len(places):
        others = sorted({other.device_type for other in places} - {place.device_type})
        raise UsageError(
            f"rank {place.rank} has a {place.device_type}, of which it is not known how fast it is beside "
            f"{', '.join(others)}; give parallelize a cluster file that says it, or measure with 'whale profile'"
        )
    any_type = Cluster.homogeneous(1).devices[0].type  # all are alike, so that only proportions matter
    memory = min(other.memory_bytes for other in alike)
    return replace(any_type, name=place.device_type, memory_bytes=memory)


def known_type(place: RankLocation) -> DeviceType | None:
    """The catalog's accelerator for a driver's name: the same model, with as much memory.

    >>> found = known_type(RankLocation(rank=0, device_type="H100-80GB-HBM3", node="n", memory_bytes=85_520_809_984))
    >>> found.name if found else None
    'H100-SXM5-80GB'
    """
    types = device_types()
    near = [
        types[name]
        for name in matching_types(place.device_type, {name: type_.memory_bytes for name, type_ in types.items()})
        if name == place.device_type or abs(types[name].memory_bytes / place.memory_bytes - 1) < MEMORY_TOLERANCE
    ]
    return near[0] if near else None
