"""Known accelerators and links, from the tables ``data/gpus.csv`` and ``data/links.csv`` packaged beside this file.

Speeds are the makers' peak rates without sparsity; ``confidence`` and ``notes`` in the table say where each row is
from. What a device really attains is for the cost model to say. Links carry the constants of the model of
communication, each with its meaning in `LinkKind` and its source in the table.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import inf
from types import MappingProxyType
from typing import Literal

from whale.ir.cluster import DTYPES, DeviceType, Link
from whale.ir.profile import ModelProfile

__all__ = [
    "ALIASES",
    "LinkKind",
    "device_types",
    "device_types_with",
    "inter_node_kind",
    "intra_node_kind",
    "intra_node_link",
    "link_kinds",
]

ALIASES: Mapping[str, str] = {
    "A100-40": "A100-SXM4-40GB",
    "A100-80": "A100-SXM4-80GB",
    "GH-96": "GH200-96GB",
    "RTX-2080": "RTX2080Ti",
    "RTX-3090": "RTX3090",
    "Titan-RTX": "TitanRTX",
    "V100-16": "V100-SXM2-16GB",
}
"""Names that published profiles give to devices of the table: those of the artifact of Sailor (whose
RTX-2080 has the 11 GiB of the Ti)."""

MAX_TCP_ADAPTER_BANDWIDTH = 50e9 / 8
"""Bytes per second, 50 Gbit/s: faster adapters are taken for RDMA ones, since the file does not say."""


@dataclass(frozen=True, kw_only=True)
class LinkKind:
    """A technology of links, and what the communication libraries make of it.

    Attributes:
        name: such as ``NVLink3``.
        fabric: how devices hang together: all links of a device on a ``switch``; a full ``mesh`` of direct links; the
            ``cube`` mesh of eight V100 or P100; through the ``host``; or a ``network`` of nodes.
        latency: seconds of one hop, where a cluster file leaves the link out.
        efficiency: share of the nominal bandwidth that large messages reach.
        chunk_bytes: what a hop receives before it passes on, at most.
        launch: seconds to start a collective on all devices.
        multicast_efficiency: as ``efficiency``, for sums made by the switch (NVLink SHARP); 0: it makes none.
        max_flow: bytes per second of a single connection, however fast the adapter.
    """

    name: str
    fabric: Literal["switch", "mesh", "cube", "host", "network"]
    latency: float
    efficiency: float
    chunk_bytes: float
    launch: float
    multicast_efficiency: float = 0.0
    max_flow: float = inf

    def share_of_links(self, num_devices: int, num_devices_of_node: int) -> float:
        """How much of its bandwidth a device can use towards so many devices (itself included) of its node.

        On a switch all. In a mesh each pair has its own links. The cube of DGX-1 (NVIDIA DGX-1 white paper, 2017) has
        six links a device (four on P100, in the same proportions): one or two to a neighbour, of which one is counted,
        four within a half of the node, all for the whole.
        """
        peers, others = num_devices - 1, max(1, num_devices_of_node - 1)
        if self.fabric == "mesh" or (self.fabric == "cube" and num_devices_of_node <= 4):
            return min(1.0, peers / others)
        if self.fabric == "cube":
            return 1 / 6 if num_devices <= 2 else 4 / 6 if num_devices <= 4 else 1.0
        return 1.0


@cache
def link_kinds() -> Mapping[str, LinkKind]:
    """Every known kind of link by its name; the mapping is read-only.

    >>> link_kinds()["NVLink3"].fabric
    'switch'
    """
    found = {}
    for row in _rows("links.csv"):
        found[row["kind"]] = LinkKind(
            name=row["kind"],
            fabric=row["fabric"],  # type: ignore[arg-type]
            latency=float(row["latency_us"]) * 1e-6,
            efficiency=float(row["efficiency"]),
            chunk_bytes=float(row["chunk_KiB"]) * 1024,
            launch=float(row["launch_us"]) * 1e-6,
            multicast_efficiency=float(row["multicast_efficiency"]),
            max_flow=float(row["max_flow_GBps"] or inf) * 1e9,
        )
    return MappingProxyType(found)


def intra_node_link(device_type: str) -> Link | None:
    """The link with which devices of a known type are built into nodes; None for an unknown type."""
    known = _intra_node_links().get(ALIASES.get(device_type, device_type))
    return None if known is None else Link(bandwidth=known[1], latency=link_kinds()[known[0]].latency)


def intra_node_kind(device_type: str, link: Link) -> LinkKind:
    """What links devices of a type in a node, told from the type and from the bandwidth that is given for the link.

    A known type has its own link, unless the given bandwidth is that of PCIe (NVLink absent) or more than PCIe can do
    (an optional NVLink bridge). An unknown type has PCIe, or NVLink where PCIe cannot do it.
    """
    kinds = link_kinds()
    own = _intra_node_links().get(ALIASES.get(device_type, device_type))
    if own is not None and not own[0].startswith("PCIe") and link.bandwidth > own[1] / 4:
        return kinds[own[0]]
    if link.bandwidth <= 16e9:
        return kinds["PCIe3"]
    if link.bandwidth <= 32e9:
        return kinds["PCIe4"]
    return kinds["PCIe5"] if link.bandwidth <= 64e9 else kinds["NVLink3"]


def inter_node_kind(link: Link) -> LinkKind:
    """What links nodes, told from the bandwidth of an adapter: up to 50 Gbit/s TCP, above it RDMA."""
    slow = link.bandwidth / link.num_adapters <= MAX_TCP_ADAPTER_BANDWIDTH
    return link_kinds()["TCP" if slow else "RDMA"]


@cache
def device_types() -> Mapping[str, DeviceType]:
    """Every known device type by its name, in the order of the table; the mapping is read-only.

    ``float16`` and ``bfloat16`` are the tensor-core rates; a device without bfloat16 has no rate for it. Memory is the
    advertised number taken as GiB, which is what drivers report to within 2% (A100-SXM4-80GB 80.0, H100-SXM5-80GB
    79.6).

    >>> device_types()["V100-SXM2-32GB"].speed("float16")
    125000000000000.0
    """
    found: dict[str, DeviceType] = {}
    for row in _rows("gpus.csv"):
        speed = {
            "float32": row["fp32_tflops"],
            "tfloat32": row["tf32_tflops_dense"],
            "float16": row["fp16_bf16_tensor_tflops_dense"],
            "bfloat16": row["fp16_bf16_tensor_tflops_dense"] if row["bf16_supported"] == "yes" else "",
            "float8": row["fp8_tflops_dense"],
        }
        found[row["gpu"]] = DeviceType.of(
            row["gpu"],
            speed={dtype: float(tflops) * 1e12 for dtype, tflops in speed.items() if tflops},
            memory_bytes=round(float(row["mem_gb"]) * 2**30),
            memory_bandwidth=float(row["mem_bw_GBps"]) * 1e9,
        )
    return MappingProxyType(found)


def device_types_with(profile: ModelProfile) -> Mapping[str, DeviceType]:
    """Every known device type and those that *profile* brings along, for ``Cluster.load(..., catalog=...)``.

    A type of the profile keeps its name there. What the profile does not say of it is taken from the table, under that
    name or under the one that it is an alias of; a type of which speed, memory or memory bandwidth are still unknown is
    left out, and a cluster file that uses it must define it.
    """
    known = device_types()
    brought: dict[str, DeviceType] = {}
    for name, figures in profile.device_types.items():
        base = known.get(name) or known.get(ALIASES.get(name, ""))
        speed = {dtype: figures[dtype] for dtype in DTYPES if dtype in figures} or (dict(base.rates) if base else {})
        memory_bytes = round(figures.get("memory_bytes", base.memory_bytes if base else 0))
        memory_bandwidth = figures.get("memory_bandwidth", base.memory_bandwidth if base else 0.0)
        if speed and memory_bytes and memory_bandwidth:
            brought[name] = DeviceType.of(
                name, speed=speed, memory_bytes=memory_bytes, memory_bandwidth=memory_bandwidth
            )
    return MappingProxyType({**known, **brought})


@cache
def _intra_node_links() -> Mapping[str, tuple[str, float]]:
    return {row["gpu"]: (row["intra_link"], float(row["intra_GBps"]) * 1e9) for row in _rows("gpus.csv")}


def _rows(name: str) -> csv.DictReader[str]:
    text = files(__package__).joinpath(f"data/{name}").read_text(encoding="utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
