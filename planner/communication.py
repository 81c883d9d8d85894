"""How long collectives and sends take, by the links they use, their size and their algorithm.

Prices are those of an otherwise idle machine; ``sharing`` says how many groups of the same kind communicate over the
same nodes at once. Where curves were measured on the very device types they are used, else a model of what NCCL does.
This file knows no layers, no schedule and no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal, get_args

from whale.errors import UsageError
from whale.planner.catalog import LinkKind
from whale.planner.topology import Member, Topology

__all__ = ["Algorithm", "Collective", "CommunicationCost", "collective", "send"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
Algorithm = Literal["none", "ring", "tree", "multicast", "hierarchical", "pairwise", "send", "measured"]

TREE_EFFICIENCY = 0.92
"""Share of the ring's bandwidth that NCCL counts on for trees (nccl, src/graph/tuning.cc)."""
MODELLED_ERROR = 0.15
MEASURED_ERROR = 0.05


@dataclass(frozen=True, kw_only=True)
class CommunicationCost:
    """What a collective or a send takes.

    Attributes:
        seconds: in all: ``latency`` + ``transfer``.
        latency: seconds that do not depend on the bandwidth: launch and hops.
        transfer: seconds in which bytes travel.
        algorithm: the one that is quickest of those that a communication library has for it.
        bottleneck: the link that decides: a kind, and whether it lies within or between nodes.
        interval: seconds between which it lies with 9 chances in 10.
    """

    seconds: float
    latency: float
    transfer: float
    algorithm: Algorithm
    bottleneck: str
    interval: tuple[float, float]


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
    """What a collective of *ranks* takes.

    Args:
        topology: of the cluster.
        kind: of the collective.
        ranks: the group; those of one node are taken as neighbours, whatever their order, as NCCL does.
        num_bytes: the whole tensor: what an all-reduce reduces, an all-gather returns, a reduce-scatter reads, an
            all-to-all exchanges on one device, a broadcast sends.
        sharing: how many such groups communicate at the same time over the same nodes' adapters.
        algorithm: to price another than the quickest.

    Raises:
        UsageError: an unknown collective, an empty or repeated group, or links that the cluster does not give.
    """
    if kind not in get_args(Collective):
        raise UsageError(f"unknown collective {kind!r}; use one of {', '.join(get_args(Collective))}")
    if not ranks or num_bytes < 0 or sharing < 1:
        raise UsageError("a collective needs a rank, no negative number of bytes, and is one of at least one")
    if len(ranks) == 1 or num_bytes == 0:
        return FREE
    group = _Group.of(topology, topology.members(ranks), sharing)
    names = [algorithm] if algorithm else [name for name in _ALGORITHMS if name != "hierarchical"]
    priced = [_ALGORITHMS[name](group, kind, num_bytes) for name in names if name in _ALGORITHMS]
    options = [cost for cost in priced if cost is not None]
    if not options:
        raise UsageError(f"there is no algorithm {algorithm!r} for {kind} in this group")
    return min(options, key=lambda cost: cost.seconds)


def send(topology: Topology, source: int, target: int, num_bytes: float, *, sharing: int = 1) -> CommunicationCost:
    """What a message takes from one rank to another; *sharing* messages use the same adapters at the same time."""
    if num_bytes == 0 or source == target:
        return FREE
    path = topology.link(source, target)
    efficiency = min(kind.efficiency for kind in path.kinds)
    between = len(path.kinds) == 2
    bandwidth = path.bandwidth * efficiency / (sharing if between else 1)
    bandwidth = min(bandwidth, *(kind.max_flow for kind in path.kinds))
    return _cost("send", path.kinds[0], between, path.latency + path.kinds[0].launch, num_bytes / bandwidth)


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The links of a group within its nodes or between them, as its slowest member has them."""

    kind: LinkKind
    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class _Group:
    num_ranks: int
    num_nodes: int
    most_on_a_node: int
    intra: _Line | None
    inter: _Line | None
    launch: float

    @classmethod
    def of(cls, topology: Topology, members: Sequence[Member], sharing: int) -> _Group:
        intra = [_intra(topology, member) for member in members if len(member.ranks) > 1]
        inter = [_inter(topology, member, sharing) for member in members] if len(members) > 1 else []
        return cls(
            num_ranks=sum(len(member.ranks) for member in members),
            num_nodes=len(members),
            most_on_a_node=max(len(member.ranks) for member in members),
            intra=_slowest(intra),
            inter=_slowest(inter),
            launch=max(line.kind.launch for line in intra + inter),
        )


def _intra(topology: Topology, member: Member) -> _Line:
    link, kind = topology.intra_link(member.node), topology.intra_kind(member.node)
    share = kind.share_of_links(len(member.ranks), len(member.node.ranks))
    return _Line(kind=kind, bandwidth=link.bandwidth * share * kind.efficiency, latency=link.latency)


def _inter(topology: Topology, member: Member, sharing: int) -> _Line:
    link, kind = topology.inter_link(member.node), topology.inter_kind(member.node)
    adapters = len({topology.adapter(rank) for rank in member.ranks})
    own = min(link.bandwidth / link.num_adapters * kind.efficiency, kind.max_flow) * adapters
    return _Line(kind=kind, bandwidth=min(own, link.bandwidth * kind.efficiency / sharing), latency=link.latency)


def _slowest(lines: Sequence[_Line]) -> _Line | None:
    if not lines:
        return None
    slowest = min(lines, key=lambda line: line.bandwidth)
    return _Line(kind=slowest.kind, bandwidth=slowest.bandwidth, latency=max(line.latency for line in lines))


# --- algorithms
# -----------------------------------------------------------------------------------------------------------


def _ring(group: _Group, kind: Collective, num_bytes: float) -> CommunicationCost | None:
    """Every rank passes parts on to the next: 2 (n - 1) steps for an all-reduce, n - 1 for the others."""
    if kind == "all_to_all":
        return None
    n = group.num_ranks
    rounds = 2 if kind == "all_reduce" else 1
    traffic = num_bytes if kind == "broadcast" else rounds * (n - 1) / n * num_bytes
    steps = n - 1
    between = min(group.num_nodes, steps) if group.inter else 0
    latency = group.launch
    for line, num_steps in ((group.inter, between), (group.intra, steps - between)):
        if line is not None:
            fill = min(num_bytes / n, line.kind.chunk_bytes) / line.bandwidth
            latency += rounds * num_steps * (line.latency + fill)
    line = _narrowest(group)
    return _cost("ring", line.kind, line is group.inter, latency, traffic / line.bandwidth)


def _tree(group: _Group, kind: Collective, num_bytes: float) -> CommunicationCost | None:
    """Up and down a double binary tree of nodes, a chain within each: the busiest node sends everything twice."""
    if kind not in ("all_reduce", "broadcast") or group.inter is None:
        return None
    rounds = 2 if kind == "all_reduce" else 1
    latency = group.launch
    for line, num_steps in ((group.inter, ceil(log2(group.num_nodes))), (group.intra, group.most_on_a_node - 1)):
        if line is not None:
            latency += rounds * num_steps * line.latency
    line = _narrowest(group)
    return _cost(
        "tree", line.kind, line is group.inter, latency, rounds * num_bytes / (line.bandwidth * TREE_EFFICIENCY)
    )


def _multicast(group: _Group, kind: Collective, num_bytes: float) -> CommunicationCost | None:
    """The switch of a node sums and distributes: every device sends its bytes once and 1/n of the sum."""
    if kind != "all_reduce" or group.intra is None or group.inter or not group.intra.kind.multicast_efficiency:
        return None
    line, own = group.intra, group.intra.kind
    bandwidth = line.bandwidth / own.efficiency * own.multicast_efficiency
    latency = group.launch + 2 * (line.latency + min(num_bytes / group.num_ranks, own.chunk_bytes) / bandwidth)
    return _cost("multicast", own, False, latency, num_bytes * (1 + 1 / group.num_ranks) / bandwidth)


def _hierarchical(group: _Group, kind: Collective, num_bytes: float) -> CommunicationCost | None:
    """Reduce-scatter in each node, all-reduce of the parts between nodes over all adapters, all-gather in each node."""
    if kind != "all_reduce" or group.inter is None or group.intra is None:
        return None
    per_node, num_nodes = group.most_on_a_node, group.num_nodes
    latency = group.launch + 2 * (per_node - 1) * group.intra.latency + 2 * (num_nodes - 1) * group.inter.latency
    within = 2 * (per_node - 1) / per_node * num_bytes / group.intra.bandwidth
    between = 2 * (num_nodes - 1) / num_nodes * num_bytes / group.inter.bandwidth
    line = group.inter if between > within else group.intra
    return _cost("hierarchical", line.kind, line is group.inter, latency, within + between)


def _pairwise(group: _Group, kind: Collective, num_bytes: float) -> CommunicationCost | None:
    """Every rank sends every other its part, all at once."""
    if kind != "all_to_all":
        return None
    n, k = group.num_ranks, group.most_on_a_node
    part = num_bytes / n
    times = []
    if group.intra is not None:
        times.append((part * (k - 1) / group.intra.bandwidth, group.intra))
    if group.inter is not None:
        times.append((part * (n - k) * k / group.inter.bandwidth, group.inter))
    transfer, line = max(times, key=lambda time: time[0])
    latency = group.launch + max(time[1].latency for time in times)
    return _cost("pairwise", line.kind, line is group.inter, latency, transfer)


_ALGORITHMS: dict[Algorithm, Callable[[_Group, Collective, float], CommunicationCost | None]] = {
    "ring": _ring,
    "tree": _tree,
    "multicast": _multicast,
    "hierarchical": _hierarchical,
    "pairwise": _pairwise,
}


def _narrowest(group: _Group) -> _Line:
    return min((line for line in (group.inter, group.intra) if line is not None), key=lambda line: line.bandwidth)


def _cost(algorithm: Algorithm, kind: LinkKind, between: bool, latency: float, transfer: float) -> CommunicationCost:
    seconds = latency + transfer
    return CommunicationCost(
        seconds=seconds,
        latency=latency,
        transfer=transfer,
        algorithm=algorithm,
        bottleneck=f"{kind.name} {'between nodes' if between else 'within a node'}",
        interval=(seconds * (1 - MODELLED_ERROR), seconds * (1 + MODELLED_ERROR)),
    )
