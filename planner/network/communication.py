"""Cost of collectives and sends between the devices of a cluster.

Costs are those of an otherwise idle machine; ``sharing`` is the number of concurrent groups of the same kind over the
same nodes. Curves measured on the same device types have priority over the model of `whale.planner.network.algorithms`.
This module knows no layers, no schedule and no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from whale.errors import UsageError
from whale.ir.profile import Interference, LinkCurve
from whale.planner.network.algorithms import (
    ALGORITHMS,
    Algorithm,
    Collective,
    Duration,
    GroupShape,
    Line,
    Where,
    able_nodes,
    fastest,
    linked,
)
from whale.planner.network.curves import converted, interference, interpolated, measured_seconds, types_of
from whale.planner.network.topology import Member, Topology

__all__ = ["Algorithm", "Collective", "CommunicationCost", "collective", "owned_seconds", "send"]

TRANSFER_ERROR, LATENCY_ERROR = 0.15, 0.3
"""Shares within which nine of ten measured points lie (``benchmarks/collectives.py`` counts them)."""
MEASURED_ERROR = 0.05
"""The same of curves; noise within a cluster is about 1%, between versions of software about 5%."""


@dataclass(frozen=True, kw_only=True)
class CommunicationCost:
    """Cost of a collective or a send.

    Attributes:
        seconds: in all: ``latency`` + ``transfer``.
        latency: seconds that do not depend on the bandwidth: start and hops. 0 for curves, which do not separate it.
        transfer: seconds of the bytes.
        algorithm: the fastest of a communication library's algorithms, or ``measured``.
        bottleneck: the slowest link: its kind, and whether it is within a node or between nodes.
        interval: seconds, with a probability of 0.9.
        beside: interference with other work of its ranks, if measured.
    """

    seconds: float
    latency: float
    transfer: float
    algorithm: Algorithm
    bottleneck: str
    interval: tuple[float, float]
    beside: Interference | None = None


FREE = CommunicationCost(
    seconds=0.0, latency=0.0, transfer=0.0, algorithm="none", bottleneck="nothing", interval=(0.0, 0.0)
)


def collective(
    topology: Topology,
    kind: Collective,
    ranks: Sequence[int],
    num_bytes: float,
    *,
    sharing: int = 1,
    algorithm: Algorithm | None = None,
) -> CommunicationCost:
    """Cost of a collective of *ranks*: measured on such devices, or of NCCL's fastest algorithm.

    Args:
        topology: of the cluster.
        kind: of the collective.
        ranks: the group; ranks of one node count as neighbours in any order, as in NCCL.
        num_bytes: the whole tensor: the input of an all-reduce or reduce-scatter, the result of an all-gather, the
            exchanged tensor of an all-to-all on one device, the value of a broadcast.
        sharing: how many such groups communicate at the same time over the same nodes' adapters, as the data-parallel
            groups of tensor-parallel nodes do.
        algorithm: to price this one, by the model. ``hierarchical`` is priced only when asked for: no library that
            Whale runs on has it, though the rings of NCCL, each through its own adapter, come close.

    Raises:
        UsageError: an unknown collective, an empty or repeated group, or links that the cluster does not give.

    >>> from whale.ir.cluster import Cluster
    >>> from whale.planner.catalog import device_types
    >>> a100 = device_types()["A100-SXM4-80GB"]
    >>> topology = Topology.of(Cluster.homogeneous(8, a100, intra=a100.intra_node))
    >>> cost = collective(topology, "all_reduce", range(8), 2**30)
    >>> cost.algorithm, cost.bottleneck, round(cost.seconds * 1e3, 1)
    ('ring', 'NVLink3 within a node', 8.2)
    """
    if kind not in get_args(Collective):
        raise UsageError(f"unknown collective {kind!r}; use one of {', '.join(get_args(Collective))}")
    if not ranks or num_bytes < 0 or sharing < 1:
        raise UsageError("a collective needs a rank, no negative number of bytes, and a sharing of at least one")
    if len(ranks) == 1 or num_bytes == 0:
        return FREE
    members, group = _group(topology, tuple(ranks), sharing)
    if algorithm is None:
        cost = _modelled(fastest(group, kind, num_bytes))
        if not topology.curves or group.wide is not None:  # curves are of links within a region
            return cost
        return _measured(topology, kind, members, group, num_bytes, sharing, cost) or cost
    duration = ALGORITHMS[algorithm](group, kind, num_bytes) if algorithm in ALGORITHMS else None
    if duration is None:
        raise UsageError(f"there is no algorithm {algorithm!r} for {kind} in this group")
    return _modelled(duration)


def _group(topology: Topology, ranks: tuple[int, ...], sharing: int) -> tuple[tuple[Member, ...], GroupShape]:
    key = (ranks, sharing)
    if key not in topology.memo:
        if ranks not in topology.memo:
            members = topology.members(ranks)
            topology.memo[ranks] = members, topology.unlike(members)
        members, unlike = topology.memo[ranks]
        topology.memo[key] = members, GroupShape.of(topology, members, unlike, sharing)
    found: tuple[tuple[Member, ...], GroupShape] = topology.memo[key]
    return found


def send(topology: Topology, source: int, target: int, num_bytes: float, *, sharing: int = 1) -> CommunicationCost:
    """Cost of a message from one rank to another; *sharing* messages use the same adapters at the same time.

    Raises:
        UsageError: a rank does not exist, or the cluster does not say how the two are linked.
    """
    if num_bytes == 0 or source == target:
        return FREE
    path = topology.link(source, target)
    slowest = min(path.kinds, key=lambda kind: (min(path.bandwidth * kind.efficiency, kind.max_flow), kind.name))
    alone = min(path.bandwidth * slowest.efficiency, slowest.max_flow)
    rate = min(alone, path.bandwidth * slowest.efficiency / sharing) if path.between_nodes else alone
    line = Line(kind=slowest, bandwidth=rate, hop=path.latency + slowest.hop)
    where: Where = "between nodes" if path.between_nodes else "within a node"
    regions = [topology.cluster.node_of(rank).region for rank in (source, target)]
    if regions[0] != regions[1]:
        where = "between regions"
    cost = _modelled(
        Duration(
            algorithm="send",
            latency=line.hop + slowest.launch,
            transfer=num_bytes / rate,
            line=line,
            where=where,
        )
    )
    if not topology.curves or where == "between regions":
        return cost
    types = [topology.cluster.devices[rank].type.name for rank in (source, target)]
    within: Literal["node", "nodes"] = "nodes" if path.between_nodes else "node"
    curves = topology.curves_between("send", within, types, num_devices=1)
    curves = tuple(curve for curve in curves if {curve.source, curve.target} == set(types))
    curves = tuple(curve for curve in curves if [curve.source, curve.target] == types) or curves
    if not curves:
        return cost
    ends = [topology.cluster.node_of(rank) for rank in (source, target)]
    share = rate / alone * linked(topology, curves[0], ends)
    return _as_measured(cost, measured_seconds(curves[0], num_bytes) / share)


def owned_seconds(
    topology: Topology,
    kind: str,
    ranks: Sequence[int],
    num_bytes: float,
    shares: Sequence[float],
    even: CommunicationCost,
) -> float:
    """Return the seconds in which processors exchange a bucket with the owners of unequal parts of it.

    The busiest link counts. Terms go straight to their owners: each rank sends what others own, and gets the terms of
    its own from all of them. Owners broadcast their parts in binomial trees: a rank gets what others own, and sends its
    own, or what it passes on of the largest part, once a level. (NCCL reduces and broadcasts along rings, where
    it does not matter which rank owns what.)

    Args:
        topology: of the cluster.
        kind: ``all_gather``, or that of the terms.
        ranks: of the bucket.
        num_bytes: of it.
        shares: of each rank.
        even: the cost with equal shares.

    >>> from whale.ir.cluster import Cluster, Link
    >>> cluster = Cluster.homogeneous(4, num_devices_per_node=1, inter=Link(bandwidth=1e9, latency=0))
    >>> topology = Topology.of(cluster)
    >>> even = replace(FREE, seconds=0.75, transfer=0.75)
    >>> rate = owned_seconds(topology, "all_to_all", range(4), 1e9, [1, 1, 1, 1.000001], even)
    >>> owners = [1, 0, 0, 0]
    >>> for kind in ("all_to_all", "all_gather"):
    ...     print(round(owned_seconds(topology, kind, range(4), 1e9, owners, even) / rate, 2))
    4.0
    2.67
    """
    if len(set(shares)) < 2 or not even.seconds:
        return even.seconds
    total, num = sum(shares), len(ranks)
    depth = (num - 1).bit_length()
    first, second = sorted((share / total for share in shares), reverse=True)[:2]
    busiest = 0.0
    for rank, share in zip(ranks, shares, strict=True):
        own = share / total
        sent = own * (num - 1)
        if kind == "all_gather":
            sent = max(own * depth, (depth - 1) * (second if own == first else first))
        busiest = max(busiest, num_bytes * max(1 - own, sent) / _rate(topology, rank, ranks))
    return even.latency + busiest


def _rate(topology: Topology, rank: int, ranks: Sequence[int]) -> float:
    """Bytes a second of a rank to many others, and from them: of an adapter of its node, or of its links within."""
    node = topology.cluster.node_of(rank)
    far = (peer for peer in ranks if topology.cluster.node_of(peer).region != node.region)
    apart = next(far, None)
    if apart is None:
        apart = next((peer for peer in ranks if peer not in node.ranks), None)
    peer = apart if apart is not None else next(peer for peer in ranks if peer != rank)
    path = topology.link(rank, peer)
    own = path.bandwidth
    if apart is not None and node.inter is not None:
        own = node.inter.bandwidth / node.inter.num_adapters
        if topology.cluster.node_of(peer).region != node.region:
            own = min(own, path.bandwidth)
    return own * path.kinds[0].efficiency


def _measured(
    topology: Topology,
    kind: Collective,
    members: Sequence[Member],
    group: GroupShape,
    num_bytes: float,
    sharing: int,
    modelled: CommunicationCost,
) -> CommunicationCost | None:
    """Cost from curves of the same collective; those of other numbers of devices are scaled as the model scales.

    If several pairs of device types were measured, the slowest counts.
    """
    within: Literal["node", "nodes"] = "node" if group.inter is None else "nodes"
    num_devices = group.most_on_a_node * (1 if group.inter is None else sharing)
    curves = topology.curves_between(kind, within, topology.types(members), num_devices=num_devices)
    if not curves:
        return None
    told = [_as_if_measured(topology, kind, members, group, sharing, curve) for curve in curves]
    seconds = max(interpolated(*points, num_bytes) for points in told)
    return replace(_as_measured(modelled, seconds), beside=interference(curves))


def _as_if_measured(
    topology: Topology,
    kind: Collective,
    members: Sequence[Member],
    group: GroupShape,
    sharing: int,
    curve: LinkCurve,
) -> tuple[Sequence[float], Sequence[float]]:
    """Sizes and seconds that this group would have been measured with.

    The curve is that of the best linked nodes of its device types. Nodes with lesser links take as long, but at least
    as long as the model says of them.
    """
    key = (kind, members, sharing, id(curve))
    if key not in topology.memo:
        types = types_of(curve)
        own = [member.node for member in topology.unlike(members) if topology.has(member.node, types)]
        here = GroupShape.measured(topology, curve, own)
        there = [
            [GroupShape.measured(topology, curve, [node]) for node in able_nodes(topology, curve, type_)]
            for type_ in types
        ]

        def seconds(size: float, told: float) -> float:
            mine = fastest(here, kind, size).seconds
            best = max(min(fastest(one, kind, size).seconds for one in alike) for alike in there)
            return told * max(1.0, mine / max(best, told)) * fastest(group, kind, size).seconds / mine

        topology.memo[key] = converted(curve, seconds)
    found: tuple[Sequence[float], Sequence[float]] = topology.memo[key]
    return found


def _modelled(duration: Duration) -> CommunicationCost:
    latency, transfer = duration.latency, duration.transfer
    return CommunicationCost(
        seconds=latency + transfer,
        latency=latency,
        transfer=transfer,
        algorithm=duration.algorithm,
        bottleneck=f"{duration.line.kind.name} {duration.where}",
        interval=(
            latency * (1 - LATENCY_ERROR) + transfer * (1 - TRANSFER_ERROR),
            latency * (1 + LATENCY_ERROR) + transfer * (1 + TRANSFER_ERROR),
        ),
    )


def _as_measured(modelled: CommunicationCost, seconds: float) -> CommunicationCost:
    return replace(
        modelled,
        seconds=seconds,
        latency=0.0,
        transfer=seconds,
        algorithm="measured",
        interval=(seconds * (1 - MEASURED_ERROR), seconds * (1 + MEASURED_ERROR)),
    )
