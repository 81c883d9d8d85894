"""Report about a cluster file: nodes, devices, links as the planner models them, and some collectives over them.

For ``whale doctor --cluster``. It loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from whale.cli.tables import text_table
from whale.errors import WhaleError
from whale.ir.cluster import Cluster, DeviceType, Link, Node
from whale.ir.units import bytes_text, counted
from whale.planner.catalog import device_types, device_types_with, sources
from whale.planner.cost.hosts import host_of
from whale.planner.network.communication import collective
from whale.planner.network.links import LinkKind, inter_node_kind
from whale.planner.network.topology import Topology

if TYPE_CHECKING:
    from whale.ir.profile import ModelProfile

__all__ = ["cluster_data", "cluster_text"]

PRICED_BYTES = 2**28
"""Bytes of the shown collectives: 256 MiB, at least a usual gradient bucket."""


def cluster_data(cluster: Cluster, profile: ModelProfile | None = None) -> dict[str, Any]:
    """The cluster as a value that JSON can hold; bytes, seconds, FLOP/s.

    ``nodes`` has one entry for each run of equal nodes, ``device_types`` says where its figures are from. Collectives
    are those of the curves of *profile*, where it has some of such devices.
    """
    topology = Topology.of(cluster, () if profile is None else profile.links)
    brought = {} if profile is None else device_types_with(profile)
    types = {device.type.name: device.type for device in cluster.devices}
    return {
        "num_nodes": len(cluster.nodes),
        "num_devices": len(cluster.devices),
        "nodes": list(_nodes(topology)),
        "device_types": [_type(type_, brought) for type_ in types.values()],
        "collectives": list(_collectives(topology)),
    }


def _nodes(topology: Topology) -> Iterator[dict[str, Any]]:
    devices = topology.cluster.devices

    def links_and_types(node: Node) -> tuple[Any, ...]:
        return [devices[rank].type.name for rank in node.ranks], node.intra, node.inter, node.host_memory, node.region

    for _, run in groupby(topology.cluster.nodes, key=links_and_types):
        nodes = list(run)
        host = host_of(topology.cluster, nodes[0])
        first, own = nodes[0], devices[nodes[0].ranks[0]].type.intra_node
        yield {
            "count": len(nodes),
            "names": [first.name] if len(nodes) == 1 else [first.name, nodes[-1].name],
            "ranks": [first.ranks[0], nodes[-1].ranks[-1]],
            "devices": len(first.ranks),
            "device_types": sorted({devices[rank].type.name for rank in first.ranks}),
            "intra_node": first.intra
            and {
                **_link(first.intra, topology.intra_kind(first)),
                "source": "known of the device type" if first.intra == own else "the file",
            },
            "inter_node": first.inter
            and {
                **_link(first.inter, topology.inter_kind(first)),
                "adapters": first.inter.num_adapters,
                "source": "the file",
            },
            "inter_region": first.region
            and {
                **_link(first.region.link, inter_node_kind(first.region.link)),
                "region": first.region.name,
                "source": "the file",
            },
            "host": {
                "memory_bytes": host.memory_bytes,
                "bandwidth": host.bandwidth,
                "device_link": host.device_link,
                "assumed": list(host.assumed),
            },
        }


def _link(link: Link, kind: LinkKind) -> dict[str, Any]:
    return {
        "bandwidth": link.bandwidth,
        "latency": link.latency,
        "kind": kind.name,
        "large_messages_reach": link.bandwidth * kind.efficiency,
    }


def _type(type_: DeviceType, brought: Mapping[str, DeviceType]) -> dict[str, Any]:
    known = device_types().get(type_.name) == type_
    elsewhere = "the profile" if brought.get(type_.name) == type_ else "the file"
    return {
        "name": type_.name,
        "memory_bytes": type_.memory_bytes,
        "memory_bandwidth": type_.memory_bandwidth,
        "speed": dict(type_.rates),
        "source": f"catalog: {sources()[type_.name]}" if known else elsewhere,
    }


def _collectives(topology: Topology) -> Iterator[dict[str, Any]]:
    """An all-reduce within the first node, between one device of each node, and over all devices."""
    nodes = topology.cluster.nodes
    groups = {
        "the devices of a node": nodes[0].ranks,
        "a device of each node": tuple(node.ranks[0] for node in nodes),
        "all devices": tuple(range(len(topology.cluster.devices))),
    }
    priced: set[tuple[int, ...]] = set()
    for name, ranks in groups.items():
        if len(ranks) == 1 or ranks in priced:
            continue
        priced.add(ranks)
        try:
            cost = collective(topology, "all_reduce", ranks, PRICED_BYTES)
        except WhaleError:  # a cluster of which not all links are known
            continue
        yield {
            "operation": "all_reduce",
            "bytes": PRICED_BYTES,
            "group": name,
            "num_ranks": len(ranks),
            "seconds": cost.seconds,
            "seconds_interval": list(cost.interval),
            "algorithm": cost.algorithm,
            "bottleneck": cost.bottleneck,
        }


def cluster_text(data: dict[str, Any]) -> str:
    """The result of `cluster_data` as tables."""
    nodes = [
        [
            " to ".join(entry["names"]),
            entry["count"],
            "-".join(map(str, dict.fromkeys(entry["ranks"]))),
            f"{entry['devices']} x {', '.join(entry['device_types'])}",
        ]
        for entry in data["nodes"]
    ]
    links = [
        [
            " to ".join(entry["names"]),
            where.replace("_", " "),
            f"{link['bandwidth'] / 1e9:g} GB/s",
            f"{link['latency'] * 1e6:g} us",
            link.get("adapters", ""),
            link["kind"],
            f"{link['large_messages_reach'] / 1e9:.4g} GB/s",
            link["source"],
        ]
        for entry in data["nodes"]
        for where in ("intra_node", "inter_node", "inter_region")
        if (link := entry[where]) is not None
    ]
    hosts = [
        [
            " to ".join(entry["names"]),
            bytes_text(host["memory_bytes"]),
            f"{host['bandwidth'] / 1e9:g} GB/s",
            f"{host['device_link'] / 1e9:.4g} GB/s",
            ", ".join(name.replace("_bytes", "").replace("_", " ") for name in host["assumed"]),
        ]
        for entry in data["nodes"]
        if (host := entry["host"])
    ]
    types = [
        [
            entry["name"],
            bytes_text(entry["memory_bytes"]),
            f"{entry['memory_bandwidth'] / 1e9:g} GB/s",
            ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in sorted(entry["speed"].items())),
            entry["source"],
        ]
        for entry in data["device_types"]
    ]
    collectives = [
        [
            entry["group"],
            entry["num_ranks"],
            f"{entry['seconds'] * 1e3:.3g} ms",
            " to ".join(f"{seconds * 1e3:.3g}" for seconds in entry["seconds_interval"]) + " ms",
            entry["algorithm"],
            entry["bottleneck"],
        ]
        for entry in data["collectives"]
    ]
    parts = [
        text_table(
            f"cluster: {counted(data['num_nodes'], 'node')}, {counted(data['num_devices'], 'device')}",
            ["nodes", "count", "ranks", "devices"],
            nodes,
        ),
        text_table(
            "devices", ["type", "memory", "memory bandwidth", "TFLOP/s without sparsity", "figures from"], types
        ),
    ]
    parts.append(
        text_table("memory of hosts", ["nodes", "memory", "bandwidth", "link of each device", "assumed"], hosts)
    )
    if links:
        columns = ["nodes", "link", "bandwidth", "latency", "adapters", "kind", "large messages reach", "from"]
        parts.append(text_table("links, in one direction", columns, links))
    if collectives:
        columns = ["all-reduce of 256 MiB over", "ranks", "predicted", "interval", "algorithm", "bottleneck"]
        parts.append(text_table("communication", columns, collectives))
    return "\n\n".join(parts)
