"""Topology of a cluster: the route of a message between two devices, and the resources that a group shares.

A cluster is a tree: devices on the switch of their node and on its network adapters, adapters on the network of their
region, regions on what joins them. It is kept as such, so that thousands of devices cost nothing until a pair or a
group is asked for. This file knows what there is and who shares it; `whale.planner.network.communication` knows how
much of it a message gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from whale.errors import UsageError
from whale.ir.cluster import Cluster, Link, Node, Region
from whale.ir.profile import LinkCurve
from whale.planner.network.curves import curves_between
from whale.planner.network.links import LinkKind, built_in_links, inter_node_kind, intra_node_kind

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Member", "Path", "Topology"]

NETWORK = "network"


@dataclass(frozen=True, kw_only=True)
class Path:
    """Route of a single message from one device to another.

    Attributes:
        bandwidth: bytes per second of the narrowest part, as the cluster gives it.
        latency: seconds.
        resources: what messages share that name the same: the sender's and the receiver's end, each in its own
            direction (``rank 3 out``, ``node0 adapter 1 out``, ``node2 adapter 0 in``), and the ways out of one region
            and into the other.
        kinds: of the links at both ends, and of those between regions.
        between_nodes: whether it leaves a node.
    """

    bandwidth: float
    latency: float
    resources: tuple[str, ...]
    kinds: tuple[LinkKind, ...]
    between_nodes: bool


class Member(NamedTuple):
    """The part of a group that lies on one node."""

    node: Node
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The links of a cluster, with the curves that were measured on them.

    >>> from whale.ir.cluster import Cluster, Link
    >>> cluster = Cluster.homogeneous(
    ...     16,
    ...     num_devices_per_node=8,
    ...     intra=Link(bandwidth=300e9, latency=3e-6),
    ...     inter=Link(bandwidth=100e9, latency=5e-6, adapters=4),
    ... )
    >>> path = Topology.of(cluster).link(3, 8)
    >>> path.bandwidth, path.resources
    (25000000000.0, ('node0 adapter 1 out', 'node1 adapter 0 in'))
    """

    cluster: Cluster
    curves: tuple[LinkCurve, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, curves: Sequence[LinkCurve] = ()) -> Topology:
        """The topology of *cluster*; *curves* are of a profile measured on its device types."""
        return cls(cluster=cluster, curves=tuple(curves))

    def link(self, source: int, target: int) -> Path:
        """Route of a message between two ranks. Constant time.

        Raises:
            UsageError: the ranks are the same, do not exist, or the cluster does not say how they are linked.
        """
        if source == target:
            raise UsageError(f"rank {source} has no link to itself")
        link = self.cluster.link(source, target)
        here, there = self.cluster.node_of(source), self.cluster.node_of(target)
        if here is there:
            kind = self.intra_kind(here)
            return Path(
                bandwidth=link.bandwidth * kind.share_of_links(2, len(here.ranks)),
                latency=link.latency,
                resources=self.resources(source, target),
                kinds=(kind, kind),
                between_nodes=False,
            )
        rates = [end.bandwidth / end.num_adapters for end in map(self.inter_link, (here, there))]
        kinds = [self.inter_kind(node) for node in (here, there)]
        if here.region != there.region:
            for region in (here.region, there.region):
                assert region is not None
                rates.append(region.link.bandwidth / self.gateways(region))
                kinds.append(inter_node_kind(region.link))
        return Path(
            bandwidth=min(rates),
            latency=link.latency,
            resources=self.resources(source, target),
            kinds=tuple(kinds),
            between_nodes=True,
        )

    def resources(self, source: int, target: int) -> tuple[str, ...]:
        """Resources that a message between two ranks shares with others (`Path`).

        Raises:
            UsageError: a rank does not exist, or the cluster does not give a node's adapters.
        """
        here, there = self.cluster.node_of(source), self.cluster.node_of(target)
        return self.ends(source, target, same_node=here is there)

    def ends(self, source: int, target: int, *, same_node: bool) -> tuple[str, ...]:
        """The same of ranks that stand for such on the *same_node*, or on others."""
        found = [self.end(source, "out", same_node), self.end(target, "in", same_node)]
        here, there = self.cluster.node_of(source), self.cluster.node_of(target)
        if here.region != there.region:
            found += [self._gateway(here, "out"), self._gateway(there, "in")]
        return tuple(found)

    def end(self, rank: int, way: Literal["out", "in"], within: bool) -> str:
        """The resource by which messages of a rank go out or come in, to others *within* its node or on other nodes."""
        if within:
            return f"rank {rank} {way}"
        node = self.cluster.node_of(rank)
        return f"{node.name} adapter {self.adapters(node, (rank,))[0]} {way}"

    def gateways(self, region: Region) -> int:
        """Ways out of a region, each about as fast as a message can go: its nodes share its link in such parts, in
        turn, so that a few next to each other have most of it."""
        return self._regions[region.name][1]

    def _gateway(self, node: Node, way: Literal["out", "in"]) -> str:
        assert node.region is not None
        places, count = self._regions[node.region.name]
        return f"region {node.region.name} gateway {places[node.name] % count} {way}"

    @cached_property
    def _regions(self) -> dict[str, tuple[dict[str, int], int]]:
        """For each region by name the place of each of its nodes, and its gateways."""
        members: dict[Region, list[Node]] = {}
        for node in self.cluster.nodes:
            if node.region is not None:
                members.setdefault(node.region, []).append(node)
        found = {}
        for region, nodes in members.items():
            links = {node.inter for node in nodes if node.inter is not None}
            adapter = max((link.bandwidth / link.num_adapters for link in links), default=inf)
            most = min(adapter, inter_node_kind(region.link).max_flow)
            count = max(1, min(len(nodes), round(region.link.bandwidth / most)))
            found[region.name] = {node.name: place for place, node in enumerate(nodes)}, count
        return found

    def spans_regions(self, ranks: Sequence[int]) -> bool:
        """Whether ranks lie in several regions."""
        if len(self._regions) < 2:
            return False
        nodes = self.cluster.nodes
        return len({nodes[index].region for index in {self._places[rank][0] for rank in ranks}}) > 1

    def in_regions(self, members: Sequence[Member]) -> dict[Region, int]:
        """How many ranks of a group lie in each region; none, if all lie in one or the cluster has none."""
        found: dict[Region, int] = {}
        for member in members if len(self._regions) > 1 else ():
            if member.node.region is not None:
                found[member.node.region] = found.get(member.node.region, 0) + len(member.ranks)
        return found if len(found) > 1 else {}

    def route(self, source: int, target: int) -> tuple[Any, ...]:
        """Key of the route of a message between two ranks: by routes with equal keys, it takes the same time."""
        (here, own), (there, other) = self._places[source], self._places[target]
        kinds = [(self._kinds[node][0], self._kinds[node][1][place]) for node, place in ((here, own), (there, other))]
        return here == there, *kinds

    def adapters(self, node: Node, ranks: Sequence[int]) -> tuple[int, ...]:
        """The adapter of *node* that messages of each of its *ranks* use: consecutive devices share an adapter, as PCIe
        switches join them."""
        num_adapters, first, num_devices = self.inter_link(node).num_adapters, node.ranks[0], len(node.ranks)
        return tuple((rank - first) * num_adapters // num_devices for rank in ranks)

    def members(self, ranks: Sequence[int]) -> tuple[Member, ...]:
        """The parts of a group by node, in the order of the nodes. Linear in the ranks.

        Raises:
            UsageError: a rank is given twice or does not exist.
        """
        if len(set(ranks)) < len(ranks):
            raise UsageError(f"a group has every rank once, unlike {list(ranks)}")
        by_node: dict[int, list[int]] = {}
        places = self._places
        for rank in sorted(ranks):
            if rank not in places:
                raise UsageError(f"rank {rank} does not exist: the cluster has {len(self.cluster.devices)} devices")
            by_node.setdefault(places[rank][0], []).append(rank)
        nodes = self.cluster.nodes
        return tuple(Member(node=nodes[index], ranks=tuple(part)) for index, part in by_node.items())

    def unlike(self, members: Sequence[Member]) -> list[Member]:
        """The members without those whose nodes, and places there, are like another's."""
        found: dict[object, Member] = {}
        for member in members:
            index, _ = self._places[member.ranks[0]]
            first = member.node.ranks[0]
            found.setdefault((self._kinds[index][0], tuple(rank - first for rank in member.ranks)), member)
        return list(found.values())

    @cached_property
    def unlike_nodes(self) -> list[Node]:
        """One node of each kind: of these links and devices."""
        firsts = {kind: node for (kind, _, _), node in zip(self._kinds, self.cluster.nodes, strict=True)}
        return list(firsts.values())

    def has(self, node: Node, types: Collection[str]) -> bool:
        """Whether a node has a device of one of these types."""
        return any(self.cluster.devices[rank].type.name in types for rank in node.ranks)

    def types(self, members: Sequence[Member]) -> list[str]:
        """The type of each device of a group."""
        return [self.cluster.devices[rank].type.name for member in members for rank in member.ranks]

    def sharing(self, ranks: Sequence[int], num_alike: int) -> int:
        """How many of *num_alike* groups like this one communicate over the same nodes' adapters: as many as the node
        with the least room for another has devices for; between regions all."""
        if num_alike == 1:
            return 1
        counts = Counter(self._places[rank][0] for rank in ranks)
        if len(counts) == 1:
            return 1
        if self.spans_regions(ranks):
            return num_alike
        room = min(len(self.cluster.nodes[index].ranks) // count for index, count in counts.items())
        return max(1, min(num_alike, room))

    def shape(self, ranks: Sequence[int]) -> tuple[tuple[Any, int], ...]:
        """Location of a group, as a key: equal groups take the same time. Linear in the ranks.

        For each of its nodes the kind of node, the types of its devices there and how many adapters they use; nodes
        that are alike and follow each other are counted.
        """
        positions: dict[int, list[int]] = {}
        for rank in ranks:
            node, position = self._places[rank]
            positions.setdefault(node, []).append(position)
        runs: list[tuple[Any, int]] = []
        for node in sorted(positions):
            kind, types, adapters = self._kinds[node]
            own = sorted(positions[node])
            part = (kind, tuple(types[place] for place in own), len({adapters[place] for place in own}))
            count = runs.pop()[1] if runs and runs[-1][0] == part else 0
            runs.append((part, count + 1))
        return tuple(runs)

    def kind_of(self, node: Node) -> int:
        """A number of the kind of a node: nodes of a region with equal links and devices have the same."""
        return self._kinds[self._places[node.ranks[0]][0]][0]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Index of the node, and position in it, of each rank."""
        nodes = enumerate(self.cluster.nodes)
        return {rank: (index, place) for index, node in nodes for place, rank in enumerate(node.ranks)}

    @cached_property
    def _kinds(self) -> list[tuple[int, tuple[str, ...], tuple[int, ...]]]:
        """A number for each node, equal for nodes of a region with equal links and devices; its devices' types and
        adapters."""
        known: dict[Any, int] = {}
        found = []
        for node in self.cluster.nodes:
            types = tuple(self.cluster.devices[rank].type.name for rank in node.ranks)
            adapters = self.adapters(node, node.ranks) if node.inter is not None else (0,) * len(node.ranks)
            look = node.intra, node.inter, node.region, types
            found.append((known.setdefault(look, len(known)), types, adapters))
        return found

    def intra_link(self, node: Node) -> Link:
        """The link between the devices of *node*."""
        if node.intra is None:
            raise UsageError(f"no intra_node link of {node.name!r} is known; describe it in a cluster file")
        return node.intra

    def inter_link(self, node: Node) -> Link:
        """The link from *node* to the others."""
        if node.inter is None:
            raise UsageError(f"no inter_node link of {node.name!r} is known; describe it in a cluster file")
        return node.inter

    def intra_kind(self, node: Node) -> LinkKind:
        """The kind of link between the devices of *node*."""
        link, known = self.intra_link(node), built_in_links()
        types = {self.cluster.devices[rank].type.name for rank in node.ranks}
        return min(
            (intra_node_kind(link, known.get(type_)) for type_ in types), key=lambda kind: (kind.efficiency, kind.name)
        )

    def inter_kind(self, node: Node) -> LinkKind:
        """The kind of link from *node* to the others."""
        return inter_node_kind(self.inter_link(node))

    def curves_between(
        self, operation: str, within: Literal["node", "nodes"], types: Sequence[str], *, num_devices: int
    ) -> tuple[LinkCurve, ...]:
        """The curves that apply to a group; see `whale.planner.network.curves.curves_between`."""
        key = (operation, within, frozenset(Counter(types).items()), num_devices)
        if key not in self.memo:
            self.memo[key] = curves_between(self.curves, operation, within, types, num_devices=num_devices)
        found: tuple[LinkCurve, ...] = self.memo[key]
        return found

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Cache of results for groups of ranks."""
        return {}

    @cached_property
    def graph(self) -> nx.Graph:
        """Devices (their ranks), the switch of each node (its name), its adapters and the network of each region, as a
        graph.

        Edges have ``bandwidth`` (bytes per second) and ``latency`` (seconds); the latencies along a path sum to that
        of a message. Linear in the devices.
        """
        import networkx as nx  # takes longer to load than most searches

        graph = nx.Graph()
        graph.add_node(NETWORK, kind="switch")
        for node in self.cluster.nodes:
            network = NETWORK
            if node.region is not None and node.inter is not None:
                network = f"region {node.region.name}"
                graph.add_node(network, kind="switch")
                further = max(0.0, node.region.link.latency - node.inter.latency) / 2
                graph.add_edge(network, NETWORK, bandwidth=node.region.link.bandwidth, latency=further)
            graph.add_node(node.name, kind="node")
            graph.add_nodes_from(node.ranks, kind="device")
            if node.intra is not None:
                graph.add_edges_from(
                    ((rank, node.name) for rank in node.ranks),
                    bandwidth=node.intra.bandwidth,
                    latency=node.intra.latency / 2,
                )
            if node.inter is not None:
                each = node.inter.bandwidth / node.inter.num_adapters
                for rank, adapter in zip(node.ranks, self.adapters(node, node.ranks), strict=True):
                    name = f"{node.name} adapter {adapter}"
                    graph.add_node(name, kind="adapter")
                    graph.add_edge(rank, name, bandwidth=each, latency=node.inter.latency / 2)
                    graph.add_edge(name, network, bandwidth=each, latency=0.0)
        return graph
