"""Memory of hosts: how much a node has beside its devices, how fast it is, how fast devices copy to it and from it, and
what a step holds there.

Figures are those of the cluster file; else of the chip's data sheet; else assumed, and `Host.assumed` says which. It
prices nothing but copies, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from whale.ir.cluster import Cluster, DeviceType, Node
from whale.ir.units import bytes_text
from whale.ir.workload import NodeMemory
from whale.planner.catalog import chip_of
from whale.planner.cost.optimizers import costs_of

__all__ = [
    "KEYED_MESSAGE_SECONDS",
    "KEY_SECONDS",
    "OF_PROCESSES",
    "Held",
    "Host",
    "adding_on_host",
    "gathering_on_host",
    "has_hosts",
    "host_of",
    "host_rank_bandwidth",
    "look_up_type",
    "host_text",
    "link_to_host",
    "node_memories",
    "stepping_on_host",
    "with_copies",
]

COPIED_SHARE = 0.8
"""Part of the nominal rate of a link that large copies from pinned memory reach: 12 to 13 of 15.75 GB/s of PCIe 3, some
25 of 31.5 of PCIe 4 (recalled)."""
UNKNOWN_LINK = 15.75e9
"""Nominal rate of the link of a device that is not known: 16 lanes of PCIe 3."""

DEVICES_TIMES = 2
"""How many times the memory of its devices a node has: 512 GB of 256 (DGX-1), 1 TB of 320 GB (DGX A100), 2 TB of 640 GB
(DGX H100) have as much or more."""
BANDWIDTH_FOR_DEVICE = 2.5e10
"""Bytes per second that processors read and write, for each device of a node: 200 GB/s of eight, which two sockets of
six channels of DDR4 have, and one channel and a half of a workstation."""

KEY_SECONDS = 1.5e-8
"""Seconds of a processor for each row of a message, to find those that are equal (`benchmarks/equal_rows.py`)."""
KEYED_MESSAGE_SECONDS = 2e-5
"""Seconds for the message itself, which that takes besides."""

OF_PROCESSES = 3e9
"""Bytes in which a process of an accelerator has its libraries, its CUDA context and its Python (typical; recalled)."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Memory of a node.

    Attributes:
        memory_bytes: for all of its ranks.
        bandwidth: bytes per second that its processors read and write together.
        device_link: bytes per second from it to each device, and as much from each device to it; of the slowest.
        assumed: which of these neither the cluster nor a data sheet says.
    """

    memory_bytes: int
    bandwidth: float
    device_link: float
    assumed: tuple[str, ...] = ()


class Held(NamedTuple):
    """Bytes that a rank has on its host: stretches of the state, and activations."""

    state: float
    activations: float


def host_of(cluster: Cluster, node: Node) -> Host:
    """The memory of a node.

    >>> from whale.planner.catalog import device_types
    >>> cluster = Cluster.homogeneous(8, device_types()["V100-SXM2-32GB"])
    >>> host = host_of(cluster, cluster.nodes[0])
    >>> host.memory_bytes / 2**30, host.bandwidth / 1e9, host.device_link / 1e9
    (512.0, 200.0, 12.6)
    """
    types = [cluster.devices[rank].type for rank in node.ranks]
    given = node.host_memory
    sums = sum(type_.memory_bandwidth for type_ in types) if types[0].is_processor else 0.0
    found = {
        "memory_bytes": (given.size_bytes, DEVICES_TIMES * sum(type_.memory_bytes for type_ in types)),
        "bandwidth": (given.bandwidth, sums or BANDWIDTH_FOR_DEVICE * len(types)),
        "device_link": (given.device_link, min(map(_link, types))),
    }
    assumed = [name for name, (told, _) in found.items() if told is None]
    if all(chip_of(type_) is not None or type_.is_processor for type_ in types) and "device_link" in assumed:
        assumed.remove("device_link")
    return Host(**{n: told or other for n, (told, other) in found.items()}, assumed=tuple(assumed))  # type: ignore[arg-type]


def _link(type_: DeviceType) -> float:
    """Bytes per second between a device and its host; a processor copies within its memory."""
    if type_.is_processor:
        return type_.memory_bandwidth
    chip = chip_of(type_)
    return COPIED_SHARE * (chip.host_bandwidth if chip is not None else UNKNOWN_LINK)


def link_to_host(cluster: Cluster, rank: int) -> float:
    """Bytes per second between a rank's device and its host, in one direction, while all devices copy."""
    told = cluster.node_of(rank).host_memory.device_link
    return told if told is not None else _link(cluster.devices[rank].type)


def host_rank_bandwidth(cluster: Cluster, rank: int) -> float:
    """Bytes per second that a rank's optimizer reads and writes on its host while those of all ranks of the node do."""
    node = cluster.node_of(rank)
    return host_of(cluster, node).bandwidth / len(node.ranks)


def look_up_type(cluster: Cluster, rank: int) -> DeviceType:
    """A rank's host as a device that looks tables up and updates them: a processor, with the rank's part of the host's
    memory bandwidth. A processor is its own host, unless the cluster says how fast the host is.

    >>> from whale.planner.catalog import device_types
    >>> look_up_type(Cluster.homogeneous(8, device_types()["V100-SXM2-32GB"]), 0).memory_bandwidth / 1e9
    25.0
    """
    type_, node = cluster.devices[rank].type, cluster.node_of(rank)
    if type_.is_processor and node.host_memory.bandwidth is None:
        return type_
    bandwidth = host_rank_bandwidth(cluster, rank)
    speed = dict.fromkeys(("float64", "float32", "bfloat16", "float16"), bandwidth)  # tables take next to none
    size = host_of(cluster, node).memory_bytes
    return DeviceType.of(f"cpu-host-{bandwidth:g}", speed=speed, memory_bytes=size, memory_bandwidth=bandwidth)


def has_hosts(cluster: Cluster) -> bool:
    """Whether nodes have memory beside that of their devices: those of processors do if the cluster file says so."""
    nodes = ((cluster.devices[node.ranks[0]].type, node.host_memory) for node in cluster.nodes)
    return any(not type_.is_processor or told.size_bytes is not None for type_, told in nodes)


def stepping_on_host(cluster: Cluster, rank: int, num_bytes: float, optimizer: str, *, on_device: float) -> float:
    """Seconds of a rank's optimizer on its host, for parameters of some bytes: those *on_device* for a processor, which
    is its own host, unless the cluster says how fast the host is."""
    if cluster.devices[rank].type.is_processor and cluster.node_of(rank).host_memory.bandwidth is None:
        return on_device
    return costs_of(optimizer).moved * num_bytes / host_rank_bandwidth(cluster, rank)


def adding_on_host(cluster: Cluster, rank: int, num_bytes: float) -> float:
    """Seconds in which a rank adds gradients of some bytes to those of an earlier micro-batch on its host; its device
    waits."""
    return 3 * num_bytes / host_rank_bandwidth(cluster, rank)


def gathering_on_host(cluster: Cluster, ranks: Iterable[int], num_bytes: float) -> float:
    """Seconds in which the slowest of some ranks writes on its host what it gets of all of them, and reads it, whatever
    the links between their devices are; none for processors, whose links are through their memory, unless the cluster
    says how fast their host is."""
    own = [rank for rank in ranks if look_up_type(cluster, rank) != cluster.devices[rank].type]
    return max((2 * num_bytes / host_rank_bandwidth(cluster, rank) for rank in own), default=0.0)


def with_copies(
    forward: float, backward: float, *, kept: float = 0.0, read: float = 0.0, summed: float = 0.0, link: float
) -> tuple[float, float]:
    """Seconds of a forward and a backward with the copies beside them, which lengthen them where the link is slower.

    Args:
        forward, backward: seconds without copies.
        kept: bytes of activations that the forward copies to the host, and the backward from it.
        read: bytes of parameters that either copies from the host.
        summed: bytes of gradients that the backward copies to it.
        link: bytes per second in one direction, while as many go the other way.

    >>> with_copies(1.0, 2.0, kept=6, read=6, summed=1, link=4)
    (1.5, 3.0)
    """
    return max(forward, kept / link, read / link), max(backward, (kept + read) / link, summed / link)


def host_text(cluster: Cluster) -> Iterable[str]:
    """Sentences on what is assumed of the hosts of a cluster."""
    told = set()
    for node in cluster.nodes:
        host = host_of(cluster, node)
        values = {
            "memory_bytes": f"size {bytes_text(host.memory_bytes)}",
            "bandwidth": f"bandwidth {host.bandwidth / 1e9:g} GB/s",
            "device_link": f"device_link {host.device_link / 1e9:g} GB/s",
        }
        if host.assumed:
            told.add(", ".join(values[name] for name in host.assumed))
    for text in sorted(told):
        yield f"memory of a host: {text}; host_memory in the cluster file says it"


def node_memories(cluster: Cluster, held: Mapping[int, Held]) -> tuple[NodeMemory, ...]:
    """The memory of nodes on which ranks hold something; of nodes that hold as much the first.

    Args:
        cluster: the nodes.
        held: by rank, of all that take part.
    """
    found: dict[object, NodeMemory] = {}
    for node in cluster.nodes:
        own = [held[rank] for rank in node.ranks if rank in held]
        state, activations = (round(sum(one[part] for one in own)) for part in (0, 1))
        if not state + activations:
            continue
        processes = sum(
            OF_PROCESSES for rank in node.ranks if rank in held and not cluster.devices[rank].type.is_processor
        )
        capacity = host_of(cluster, node).memory_bytes
        one = NodeMemory(
            node=node.name, capacity=capacity, state=state, activations=activations, processes=round(processes)
        )
        found.setdefault((capacity, state, activations, processes), one)
    return tuple(found.values())
