"""Communication algorithms: time of collectives in a group of devices, by a model of NCCL.

A collective takes the start of its kernels, sequential hops, and bytes through the narrowest link. The costs of a step,
a hop and a byte belong to the kind of link (`whale.planner.network.links`), or come from a measured curve of sends.
This module knows no ranks and no cluster beyond the group.

References: S. Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4" (2019), for rings and double binary
trees; NCCL's own model in ``src/graph/tuning.cc``; R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005), for the costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2
from types import MappingProxyType
from typing import Literal, NamedTuple

from whale.ir.cluster import Node, Region
from whale.ir.profile import LinkCurve
from whale.planner.network.curves import measured_seconds, peak
from whale.planner.network.links import LinkKind, inter_node_kind
from whale.planner.network.topology import Member, Topology

__all__ = ["ALGORITHMS", "Algorithm", "Collective", "Duration", "GroupShape", "Line", "able_nodes", "linked", "fastest"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
Algorithm = Literal["none", "ring", "tree", "multicast", "hierarchical", "pairwise", "send", "measured"]
Where = Literal["within a node", "between nodes", "between regions"]

SLICES = 4
"""Slices of a part in a hop, each forwarded once it is whole (NCCL's buffers have eight steps, two per slice)."""
TREE_BANDWIDTH = 0.92
"""Share of a ring's bandwidth that trees reach (what NCCL itself counts on)."""
LOW_LATENCY_BANDWIDTH = 0.1
"""Share of the bandwidth that NCCL's protocol LL reaches, which sends a flag with every four bytes and does not wait
for whole slices: measured on 8 A100, 32 kB to 512 kB (``data/network.csv``)."""
LOW_LATENCY_HOP = 0.2
"""A hop in that protocol as a share of one in the protocol for large messages (0.6 us to 3.4 us in NCCL's model)."""


class Duration(NamedTuple):
    """Seconds of ``latency`` (start and hops) and of ``transfer`` (bytes through ``line``)."""

    algorithm: Algorithm
    latency: float
    transfer: float
    line: Line
    where: Where

    @property
    def seconds(self) -> float:
        """In all."""
        return self.latency + self.transfer


@dataclass(frozen=True, kw_only=True)
class Line:
    """The share of a group in the links within its nodes, between them or between regions, at the slowest place.

    Attributes:
        kind: of the links.
        bandwidth: bytes per second that large messages reach; within nodes out of each device, between nodes out of
            each node, between regions out of each region.
        hop: seconds.
        curves: measured sends, each with the group's share of their bandwidth; they replace bandwidth and hop.
    """

    kind: LinkKind
    bandwidth: float
    hop: float
    curves: tuple[tuple[LinkCurve, float], ...] = ()

    def rate(self, part: float) -> float:
        """Bytes per second of messages of the given size."""
        if not self.curves:
            return self.bandwidth
        return min(scale * part / measured_seconds(curve, part) for curve, scale in self.curves)

    def pass_on(self, part: float) -> float:
        """Seconds that a hop adds: its latency, and the first slice of a part, which it waits for."""
        if self.curves:
            return 0.0
        return self.hop + min(part / SLICES, self.kind.chunk_bytes) / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """The shape of a group: all that its collectives' durations depend on.

    ``intra`` is None where no two ranks share a node, ``inter`` where all do, and ``wide`` where all are in one region:
    then ``regions`` has none, else the ranks in each.
    """

    num_ranks: int
    num_nodes: int
    most_on_a_node: int
    intra: Line | None
    inter: Line | None
    wide: Line | None = None
    regions: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, topology: Topology, members: Sequence[Member], unlike: Sequence[Member], sharing: int = 1
    ) -> GroupShape:
        """The shape of the group with these members, of which these are *unlike*; *sharing* such groups communicate at
        once.

        Groups of different nodes have the worst figures of all their nodes, in any order.
        """
        most = max(len(member.ranks) for member in members)
        regions = topology.in_regions(members)

        def within(member: Member) -> int:
            """Groups that share the adapters of a node; between regions more share a way."""
            return min(sharing, max(1, len(member.node.ranks) // len(member.ranks))) if regions else sharing

        group = cls(
            num_ranks=sum(len(member.ranks) for member in members),
            num_nodes=len(members),
            most_on_a_node=most,
            intra=_worst([_intra(topology, one.node, len(one.ranks)) for one in unlike if len(one.ranks) > 1]),
            inter=_worst([_inter(topology, one.node, one.ranks, within(one)) for one in unlike if len(members) > 1]),
            wide=_worst([_wide(region, most, sharing) for region in regions]),
            regions=tuple(regions.values()),
        )
        return _with_curves(topology, members, group, sharing) if topology.curves and not regions else group

    @classmethod
    def measured(cls, topology: Topology, curve: LinkCurve, nodes: Sequence[Node]) -> GroupShape:
        """The shape of the ranks among which a collective was timed, had they been on nodes such as these."""
        within = curve.within == "node"
        num_nodes = 1 if within else max(2, ceil(curve.ranks / curve.devices))
        members = [Member(node=node, ranks=node.ranks[: curve.ranks if within else curve.devices]) for node in nodes]
        most = max(len(member.ranks) for member in members)
        group = cls(
            num_ranks=most * num_nodes,
            num_nodes=num_nodes,
            most_on_a_node=most,
            intra=_worst([_intra(topology, one.node, len(one.ranks)) for one in members if len(one.ranks) > 1]),
            inter=None if within else _worst([_inter(topology, one.node, one.ranks, 1) for one in members]),
        )
        return _with_curves(topology, members, group, 1)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The lines that exist."""
        return tuple(line for line in (self.intra, self.inter, self.wide) if line is not None)

    @cached_property
    def launch(self) -> float:
        """Seconds to start a collective; measured curves have it in them."""
        return max((line.kind.launch for line in self.lines if not line.curves), default=0.0)

    def narrowest(self, part: float) -> Line:
        """The line with the least bandwidth."""
        return min(self.lines, key=lambda line: line.rate(part))


def _intra(topology: Topology, node: Node, num_devices: int) -> Line:
    key = ("intra", topology.kind_of(node), num_devices)
    if key not in topology.memo:
        link, kind = topology.intra_link(node), topology.intra_kind(node)
        share = kind.share_of_links(num_devices, len(node.ranks))
        topology.memo[key] = Line(
            kind=kind, bandwidth=link.bandwidth * share * kind.efficiency, hop=link.latency + kind.hop
        )
    found: Line = topology.memo[key]
    return found


def _inter(topology: Topology, node: Node, ranks: Sequence[int], sharing: int) -> Line:
    """Each rank sends through its own adapter; of one that several share, and of what a node has in all, a part."""
    num_adapters = len(set(topology.adapters(node, ranks)))
    key = ("inter", topology.kind_of(node), len(ranks), num_adapters, sharing)
    if key not in topology.memo:
        link, kind = topology.inter_link(node), topology.inter_kind(node)
        own = min(link.bandwidth * kind.efficiency * num_adapters / link.num_adapters, kind.max_flow * len(ranks))
        bandwidth = min(own, link.bandwidth * kind.efficiency / sharing)
        topology.memo[key] = Line(kind=kind, bandwidth=bandwidth, hop=link.latency + kind.hop)
    found: Line = topology.memo[key]
    return found


def _wide(region: Region, most_on_a_node: int, sharing: int) -> Line:
    """The part of a region's link that each of *sharing* groups has which lie in several regions."""
    kind = inter_node_kind(region.link)
    own = min(region.link.bandwidth * kind.efficiency / sharing, kind.max_flow * most_on_a_node)
    return Line(kind=kind, bandwidth=own, hop=region.link.latency + kind.hop)


def _worst(lines: Sequence[Line]) -> Line | None:
    """The slowest line, with the longest hop, the longest start and the largest chunk of all."""
    if len(lines) <= 1:
        return lines[0] if lines else None
    slowest = min(lines, key=lambda line: (line.bandwidth, line.kind.name))
    kind = replace(
        slowest.kind,
        launch=max(line.kind.launch for line in lines),
        chunk_bytes=max(line.kind.chunk_bytes for line in lines),
    )
    return replace(slowest, kind=kind, hop=max(line.hop for line in lines))


def _with_curves(topology: Topology, members: Sequence[Member], group: GroupShape, sharing: int) -> GroupShape:
    """Replace the model of lines by measured sends between devices of these types.

    Curves of another number of devices in a node are scaled as the model scales.
    """
    if group.intra is not None:
        paired = [member for member in members if len(member.ranks) > 1]
        found = topology.curves_between("send", "node", topology.types(paired), num_devices=group.most_on_a_node)
        scales = [
            _scale(topology, curve, paired, lambda one: _intra(topology, one.node, len(one.ranks))) for curve in found
        ]
        group = replace(group, intra=replace(group.intra, curves=tuple(zip(found, scales, strict=True))))
    if group.inter is not None:
        most = group.most_on_a_node * sharing
        found = topology.curves_between("send", "nodes", topology.types(members), num_devices=most)
        scales = [
            _scale(topology, curve, members, lambda one: _inter(topology, one.node, one.ranks, sharing))
            for curve in found
        ]
        group = replace(group, inter=replace(group.inter, curves=tuple(zip(found, scales, strict=True))))
    return group


def _scale(topology: Topology, curve: LinkCurve, members: Sequence[Member], line: Callable[[Member], Line]) -> float:
    """The members' share of the bandwidth of a curve of sends: the minimum over members with devices of its types."""
    own = [member for member in topology.unlike(members) if topology.has(member.node, {curve.source, curve.target})]
    shapes = [line(member).bandwidth / _as_timed(topology, curve, member.node) for member in own]
    return min(shapes) * linked(topology, curve, [member.node for member in own])


def linked(topology: Topology, curve: LinkCurve, nodes: Sequence[Node]) -> float:
    """The nodes' share of the links on which sends were measured, at most 1.

    Curves belong to device types, not to nodes. If nodes of a type have different links, the curve is that of the best
    node; another node's link limits it.
    """
    key = ("best", id(curve))
    if key not in topology.memo:
        best = [
            max(_as_timed(topology, curve, node) for node in able_nodes(topology, curve, type_))
            for type_ in (curve.source, curve.target)
        ]
        topology.memo[key] = min(*best, peak(curve))
    return min(1.0, min(_as_timed(topology, curve, node) for node in nodes) / topology.memo[key])


def able_nodes(topology: Topology, curve: LinkCurve, type_: str) -> list[Node]:
    """Nodes, one of each kind, with devices of a type to which a curve may apply."""
    linked_nodes = [
        node
        for node in topology.unlike_nodes
        if (len(node.ranks) > 1 and node.intra is not None if curve.within == "node" else node.inter is not None)
    ]
    return [node for node in linked_nodes if topology.has(node, {type_})]


def _as_timed(topology: Topology, curve: LinkCurve, node: Node) -> float:
    """Bytes per second, by the model, on a node with as many devices as a curve of sends was measured with."""
    if curve.within == "nodes":
        return _inter(topology, node, node.ranks[: curve.devices], 1).bandwidth
    return _intra(topology, node, min(max(2, curve.devices), len(node.ranks))).bandwidth


# --- algorithms: None where a collective has none such
# ------------------------------------------------------------------------------------


def _ring(group: GroupShape, kind: Collective, num_bytes: float) -> Duration | None:
    """Ring: every rank passes parts on to the next, 2 (n - 1) times for an all-reduce and n - 1 times for the others.

    A ring goes through each region and each node once, as ranks are in the order of these, and as many rings as there
    are adapters share the bytes.
    """
    if kind == "all_to_all":
        return None
    rounds, n = _rounds(kind), group.num_ranks
    part = num_bytes / n
    traffic = num_bytes if kind == "broadcast" else rounds * (n - 1) * part
    far = min(len(group.regions), n - 1)
    between = min(group.num_nodes, n - 1) - far if group.inter else 0
    latency = group.launch
    for line, num_hops in ((group.wide, far), (group.inter, between), (group.intra, n - 1 - between - far)):
        if line is not None:
            latency += rounds * num_hops * line.pass_on(part)
    line = group.narrowest(part)
    ring = _duration("ring", group, line, latency, traffic / line.rate(part))
    if group.inter is not None or line.curves:
        return ring
    fast_hops = rounds * (n - 1) * line.hop * LOW_LATENCY_HOP
    fast = _duration("ring", group, line, group.launch + fast_hops, ring.transfer / LOW_LATENCY_BANDWIDTH)
    return min(ring, fast, key=lambda duration: duration.seconds)


def _tree(group: GroupShape, kind: Collective, num_bytes: float) -> Duration | None:
    """Double binary tree: up and down two trees of nodes with half of the bytes each, a chain within each node.

    A node inside one tree is a leaf of the other: it sends everything twice, whatever the number of nodes. A level of a
    tree may lead to another region and back: each then sends as much between regions as a node sends.
    """
    if kind not in ("all_reduce", "broadcast") or group.inter is None:
        return None
    rounds, part = _rounds(kind), num_bytes / 2
    latency, levels = group.launch, ceil(log2(group.num_nodes))
    far = ceil(log2(len(group.regions))) if group.wide else 0
    for line, num_hops in (
        (group.wide, far),
        (group.inter, levels - far),
        (group.intra, group.most_on_a_node - 1),
    ):
        if line is not None:
            latency += rounds * num_hops * line.pass_on(part)
    rates = [(line.rate(part) / (levels if line is group.wide else 1), line) for line in group.lines]
    rate, line = min(rates, key=lambda one: one[0])
    return _duration("tree", group, line, latency, rounds * num_bytes / rate / TREE_BANDWIDTH)


def _multicast(group: GroupShape, kind: Collective, num_bytes: float) -> Duration | None:
    """NVLink SHARP: the switch of a node sums and distributes; a device sends its bytes once and 1/n of the sum."""
    line, n = group.intra, group.num_ranks
    if kind != "all_reduce" or line is None or line.curves or group.inter or not line.kind.multicast_efficiency:
        return None
    bandwidth = line.bandwidth / line.kind.efficiency * line.kind.multicast_efficiency
    wait = min(num_bytes / SLICES, n * line.kind.chunk_bytes) / bandwidth
    return _duration(
        "multicast", group, line, group.launch + 2 * (line.hop + wait), num_bytes * (1 + 1 / n) / bandwidth
    )


def _hierarchical(group: GroupShape, kind: Collective, num_bytes: float) -> Duration | None:
    """Hierarchical: reduce-scatter in each node, all-reduce of the parts between nodes over all adapters, all-gather in
    each node."""
    if kind != "all_reduce" or group.inter is None or group.intra is None or group.wide is not None:
        return None
    per_node, num_nodes = group.most_on_a_node, group.num_nodes
    within, part = num_bytes / per_node, num_bytes / per_node / num_nodes
    hops_between = 2 * min(ceil(log2(num_nodes)), num_nodes - 1)
    latency = group.launch + 2 * (per_node - 1) * group.intra.pass_on(within) + hops_between * group.inter.pass_on(part)
    seconds_within = 2 * (per_node - 1) * within / group.intra.rate(within)
    seconds_between = 2 * (num_nodes - 1) / num_nodes * num_bytes / group.inter.rate(part)
    line = group.inter if seconds_between > seconds_within else group.intra
    return _duration("hierarchical", group, line, latency, seconds_within + seconds_between)


def _pairwise(group: GroupShape, kind: Collective, num_bytes: float) -> Duration | None:
    """All-to-all: every rank sends every other its part, concurrently; a node's ranks share its outgoing links."""
    if kind != "all_to_all":
        return None
    n, most, part = group.num_ranks, group.most_on_a_node, num_bytes / group.num_ranks
    times = []
    if group.intra is not None:
        times.append((part * (most - 1) / group.intra.rate(part), group.intra))
    if group.inter is not None:
        times.append((part * (n - most) * most / group.inter.rate(part), group.inter))
    if group.wide is not None:
        times.append((part * max(own * (n - own) for own in group.regions) / group.wide.rate(part), group.wide))
    transfer, line = max(times, key=lambda time: time[0])
    return _duration("pairwise", group, line, group.launch + max(time[1].pass_on(part) for time in times), transfer)


def _rounds(kind: Collective) -> int:
    return 2 if kind == "all_reduce" else 1


def _duration(algorithm: Algorithm, group: GroupShape, line: Line, latency: float, transfer: float) -> Duration:
    where: Where = "between regions" if line is group.wide else "within a node"
    if line is group.inter:
        where = "between nodes"
    return Duration(algorithm=algorithm, latency=latency, transfer=transfer, line=line, where=where)


ALGORITHMS: Mapping[Algorithm, Callable[[GroupShape, Collective, float], Duration | None]] = MappingProxyType(
    {"ring": _ring, "tree": _tree, "multicast": _multicast, "hierarchical": _hierarchical, "pairwise": _pairwise}
)


def fastest(group: GroupShape, kind: Collective, num_bytes: float) -> Duration:
    """The algorithm that a library would choose; none of those that Whale runs on has the hierarchical one."""
    durations = [price(group, kind, num_bytes) for name, price in ALGORITHMS.items() if name != "hierarchical"]
    return min((one for one in durations if one is not None), key=lambda duration: duration.seconds)
