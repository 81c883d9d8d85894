"""Kinds of links, from the packaged table ``data/links.csv``, and the classification of a link.

A kind carries the constants of the model of communication, each with its meaning in `LinkKind` and its source in the
table; ``benchmarks/collectives.py`` shows how well they do. This file knows neither devices nor collectives.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from math import inf
from types import MappingProxyType
from typing import Literal

from whale.ir.cluster import Link

__all__ = ["ALIASES", "LinkKind", "built_in_links", "inter_node_kind", "intra_node_kind", "link_kinds", "read_table"]

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

HOST_SHARE = 0.65
"""Bandwidth of PCIe per device with several devices, relative to a pair: all-reduces of 4 T4 and of 8 V100-PCIe
(recalled) compared with those of 2 TitanRTX (Sailor's artifact) and copies between peers (12 to 13 GB/s on PCIe 3)."""
MAX_TCP_ADAPTER_BANDWIDTH = 50e9 / 8
"""Bytes per second, 50 Gbit/s: faster adapters count as RDMA by default."""


@dataclass(frozen=True, kw_only=True)
class LinkKind:
    """A technology of links, with its constants in communication libraries.

    Attributes:
        name: such as ``NVLink3``.
        fabric: how devices hang together: all links of a device on a ``switch``; a full ``mesh`` of direct links; the
            ``cube`` mesh of eight V100 or P100; through the ``host``; or a ``network`` of nodes.
        latency: seconds of one hop, where a cluster file leaves the link out.
        efficiency: share of the nominal bandwidth that large messages reach.
        chunk_bytes: what a hop receives before it passes on, at most.
        launch: seconds to start a collective on all devices.
        hop: seconds that a hop of a collective takes beyond the latency of the link: the threads that move data
            between device and network adapter.
        multicast_efficiency: as ``efficiency``, for sums made by the switch (NVLink SHARP); 0: it makes none.
        max_flow: bytes per second of a single connection, however fast the adapter.
    """

    name: str
    fabric: Literal["switch", "mesh", "cube", "host", "network"]
    latency: float
    efficiency: float
    chunk_bytes: float
    launch: float
    hop: float = 0.0
    multicast_efficiency: float = 0.0
    max_flow: float = inf

    def share_of_links(self, num_devices: int, num_devices_of_node: int) -> float:
        """Fraction of its bandwidth that a device can use towards a number of devices (itself included) of its node.

        On a switch all. In a mesh each pair has its own links. The cube of DGX-1 (NVIDIA DGX-1 white paper, 2017) has
        six links a device (four on P100, in the same proportions): one or two to a neighbour, of which one is counted,
        four within a half of the node, all for the whole. Through the host more than two devices get in each other's
        way.
        """
        peers, others = num_devices - 1, max(1, num_devices_of_node - 1)
        if self.fabric == "mesh" or (self.fabric == "cube" and num_devices_of_node <= 4):
            return min(1.0, peers / others)
        if self.fabric == "cube":
            return 1 / 6 if num_devices <= 2 else 4 / 6 if num_devices <= 4 else 1.0
        if self.fabric == "host" and num_devices > 2:
            return HOST_SHARE
        return 1.0


@cache
def link_kinds() -> Mapping[str, LinkKind]:
    """Every known kind of link by its name; the mapping is read-only.

    >>> link_kinds()["NVLink3"].fabric
    'switch'
    """
    found = {}
    for row in read_table("links.csv"):
        found[row["kind"]] = LinkKind(
            name=row["kind"],
            fabric=row["fabric"],  # type: ignore[arg-type]
            latency=float(row["latency_us"]) * 1e-6,
            efficiency=float(row["efficiency"]),
            chunk_bytes=float(row["chunk_KiB"]) * 1024,
            launch=float(row["launch_us"]) * 1e-6,
            hop=float(row["hop_us"]) * 1e-6,
            multicast_efficiency=float(row["multicast_efficiency"]),
            max_flow=float(row["max_flow_GBps"] or inf) * 1e9,
        )
    return MappingProxyType(found)


@lru_cache
def intra_node_kind(link: Link, built_in: tuple[LinkKind, float] | None) -> LinkKind:
    """Classify the link of a node's devices by its bandwidth.

    It is what the devices are built with (*built_in*: a kind and its bandwidth), where it is known and the given
    bandwidth is like it; a quarter of it or less is no NVLink, and more than PCIe can do is a bridge. Otherwise it is
    the slowest PCIe that can do it, or NVLink.
    """
    if built_in is not None:
        kind, nominal = built_in
        least, most = (nominal / 2, nominal * 1.1) if kind.fabric == "host" else (nominal / 4, inf)
        if least < link.bandwidth <= most:
            return kind
    kinds = link_kinds()
    for name, most in (("PCIe3", 16e9), ("PCIe4", 32e9), ("PCIe5", 64e9)):
        if link.bandwidth <= most:
            return kinds[name]
    return kinds["NVLink3"]


@lru_cache
def inter_node_kind(link: Link) -> LinkKind:
    """Classify the link between nodes; by default, adapters of up to 50 Gbit/s use TCP, others RDMA.

    >>> inter_node_kind(Link(bandwidth=12.5e9, latency=15e-6)).name
    'RDMA'
    """
    slow = link.bandwidth / link.num_adapters <= MAX_TCP_ADAPTER_BANDWIDTH
    return link_kinds()[(link.network or ("tcp" if slow else "rdma")).upper()]


def read_table(name: str) -> csv.DictReader[str]:
    """The rows of a packaged table; lines that start with # are comments."""
    text = files("whale.planner").joinpath(f"data/{name}").read_text(encoding="utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


@cache
def built_in_links() -> Mapping[str, tuple[LinkKind, float]]:
    """Built-in links of the devices of each known type in a node: a kind and its bandwidth in bytes per second, in one
    direction; without optional bridges, such as those of RTX3090.

    >>> kind, bandwidth = built_in_links()["A100-SXM4-80GB"]
    >>> kind.name, bandwidth
    ('NVLink3', 300000000000.0)
    """
    kinds = link_kinds()
    found = {row["gpu"]: (kinds[row["intra_link"]], float(row["intra_GBps"]) * 1e9) for row in read_table("gpus.csv")}
    return MappingProxyType(found | {alias: found[name] for alias, name in ALIASES.items()})
