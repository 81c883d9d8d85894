"""Groups of devices that run a replica of a stage, and where they lie: groups that cost alike are one object.

Everything that makes groups cost alike (device types, where they lie in their nodes, the nodes' links) is their
kind, so thousands of equal devices are priced like one. It knows no seconds and no bytes of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from typing import Any

from whale.ir.cluster import Cluster, DeviceType
from whale.planner.cost.layer_cost import LayerCosts
from whale.planner.cost.stage_cost import Memo, Shape
from whale.planner.network.topology import Topology

__all__ = ["DeviceGroups", "TensorGroup"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorGroup:
    """The devices of one replica of a stage. Groups that cost alike are one object.

    They lie tensor innermost, and outside of it positions that divide the rows: over these experts are split, or the
    tokens of a row (context parallelism), or both.

    Attributes:
        kind: a number; groups of the same number cost alike, on whatever cluster.
        ranks: of one of them.
        types: the different ones among its devices, by name.
        shape: where it lies.
        num_alike: how many such groups the stage has.
        sharing: how many of them communicate at the same time over the same adapters.
        memory_bytes: of its smallest device.
        expert: the degree over which experts alone are split, and rows divided; else 1.
        context: the degree over which tokens of a row are divided; else 1.
    """

    kind: int
    ranks: tuple[int, ...]
    types: tuple[DeviceType, ...]
    shape: Shape
    num_alike: int
    sharing: int
    memory_bytes: int
    expert: int = 1
    context: int = 1

    @property
    def degree(self) -> int:
        """Its devices."""
        return len(self.ranks)

    @property
    def positions(self) -> int:
        """Devices that divide the rows."""
        return lcm(self.expert, self.context)

    @property
    def tensor(self) -> int:
        """The degree over which all matrices are split."""
        return self.degree // self.positions

    def whole_rows(self, rows: int) -> int:
        """Rows of a micro-batch with which each of its devices has as many as the one that has most."""
        return -(-rows // self.expert) * self.expert

    def ranks_of(self, axis: str) -> tuple[int, ...]:
        """The ranks of its first ``tensor``, ``expert`` or ``context`` group."""
        if axis == "tensor":
            return self.ranks[: self.tensor]
        return self.ranks[:: self.tensor][: self.expert if axis == "expert" else self.context]


@dataclass(frozen=True, kw_only=True)
class DeviceGroups(LayerCosts):
    """The groups of devices of a cluster, each looked at once.

    Attributes:
        cluster: the devices and their links.
    """

    cluster: Cluster
    memo: Memo = field(default_factory=Memo)
    _groups: dict[int, TensorGroup] = field(default_factory=dict, init=False)
    _known: dict[tuple[tuple[int, ...], int, int, int], TensorGroup] = field(default_factory=dict, init=False)
    _within: dict[tuple[int, tuple[int, ...], bool, int, int], TensorGroup] = field(default_factory=dict, init=False)
    _parts: dict[tuple[int, ...], tuple[int, int, int]] = field(default_factory=dict, init=False)
    _shapes: dict[tuple[int, ...], Shape] = field(default_factory=dict, init=False)
    _located: dict[tuple[int, ...], tuple[int, dict[int, int]]] = field(default_factory=dict, init=False)
    _sharings: dict[tuple[tuple[int, ...], int], int] = field(default_factory=dict, init=False)

    @cached_property
    def topology(self) -> Topology:
        """The links of the cluster, with the curves of the profile."""
        return Topology.of(self.cluster, self.profile.links) if self.profile.links else self.described

    @cached_property
    def described(self) -> Topology:
        """The links of the cluster without any curve, as the ranks of a launch know them."""
        return Topology.of(self.cluster)

    def group(self, ranks: Sequence[int], num_alike: int, expert: int = 1, context: int = 1) -> TensorGroup:
        """The group of these ranks, one of *num_alike* in its stage."""
        key = (tuple(ranks), num_alike, expert, context)
        if key not in self._known:
            self._known[key] = self._found(*key)
        return self._known[key]

    def _found(self, own: tuple[int, ...], num_alike: int, expert: int, context: int) -> TensorGroup:
        places = self._places
        node = places[own[0]][0]
        if all(places[rank][0] == node for rank in own):  # where they lie there is all that matters
            here = tuple(places[rank][1] for rank in own)
            key = (self._kinds_of_nodes[node], here, num_alike == 1, expert, context)
            if key not in self._within:
                self._within[key] = self._group(own, num_alike, expert, context)
            return self._within[key]
        return self._group(own, num_alike, expert, context)

    def _group(self, own: tuple[int, ...], num_alike: int, expert: int, context: int) -> TensorGroup:
        shape = self.shape(own)
        sharing = self.topology.sharing(own, num_alike)
        types = {self.cluster.devices[rank].type.name: self.cluster.devices[rank].type for rank in own}
        ordered = tuple(types[name] for name in sorted(types))
        known = self.memo.kinds_of_groups
        mix = Counter(self.cluster.devices[rank].type.name for rank in own) if len(types) > 1 else {}
        shared = (num_alike == 1, *sorted(mix.items())) if mix else ()  # by which its devices have parts by speed
        kind = known.setdefault((shape, sharing, ordered, expert, context, shared), len(known))
        if kind not in self._groups:
            self._groups[kind] = TensorGroup(
                kind=kind,
                ranks=own,
                types=ordered,
                shape=shape,
                num_alike=num_alike,
                sharing=sharing,
                memory_bytes=min(type_.memory_bytes for type_ in ordered),
                expert=expert,
                context=context,
            )
        return self._groups[kind]

    def shape(self, ranks: Sequence[int]) -> Shape:
        """Key for the location of ranks. Linear in the ranks; each group is looked at once."""
        key = tuple(ranks)
        if key not in self._shapes:
            self._shapes[key] = self._shape(key)
        return self._shapes[key]

    def _sharing(self, ranks: Sequence[int], num_alike: int) -> int:
        """`Topology.sharing`; each group is looked at once."""
        key = (tuple(ranks), num_alike)
        if key not in self._sharings:
            self._sharings[key] = self.topology.sharing(*key)
        return self._sharings[key]

    def _shape(self, ranks: tuple[int, ...]) -> Shape:
        kinds, places, parts = self._kinds_of_nodes, self._places, self._parts
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            node, position = places[rank]
            by_node.setdefault(node, []).append(position)
        runs: list[tuple[int, int, int, int]] = []
        for node in sorted(by_node):
            key = (kinds[node], *by_node[node])
            if key not in parts:
                parts[key] = (kinds[node], len(by_node[node]), self._num_adapters(node, by_node[node]))
            own = parts[key]
            if runs and runs[-1][:3] == own:
                runs[-1] = (*own, runs[-1][3] + 1)
            else:
                runs.append((*own, 1))
        return tuple(runs)

    def _num_adapters(self, node: int, positions: Sequence[int]) -> int:
        """Adapters of a node that devices at these positions use (`whale.planner.network.topology` deals them out
        so)."""
        here = self.cluster.nodes[node]
        if here.inter is None:
            return 0
        num_adapters, num_devices = here.inter.num_adapters, len(here.ranks)
        return len({position * num_adapters // num_devices for position in positions})

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """For each rank the index of its node and its position there."""
        return [(index, place) for index, node in enumerate(self.cluster.nodes) for place in range(len(node.ranks))]

    @cached_property
    def _kinds_of_nodes(self) -> list[int]:
        """A number for each node: nodes with the same number have the same links and devices, in the same region."""
        found: list[int] = []
        numbers: dict[Any, int] = {}  # by identity of types, which is faster
        for node in self.cluster.nodes:
            types = tuple(self.cluster.devices[rank].type for rank in node.ranks)
            look = (node.intra, node.inter, node.host_memory, node.region, tuple(map(id, types)))
            if look not in numbers:
                known = self.memo.kinds_of_nodes
                links = node.intra, node.inter, node.host_memory, node.region
                numbers[look] = known.setdefault((*links, types), len(known))
            found.append(numbers[look])
        return found

    def places(self, here: Sequence[int], there: Sequence[int]) -> tuple[int, int, frozenset[tuple[int, int]]]:
        """Key for the location of two sets of ranks, each in order: messages between sets of equal keys take as long.
        Linear in the ranks; each set is looked at once."""
        (one, own), (other, others) = self._place(tuple(here)), self._place(tuple(there))
        return one, other, frozenset((own[node], others[node]) for node in own.keys() & others.keys())

    def _place(self, ranks: tuple[int, ...]) -> tuple[int, dict[int, int]]:
        """A number for the kinds of nodes of *ranks* and their positions there, and the order of these nodes."""
        if ranks not in self._located:
            order: dict[int, int] = {}
            kinds, look = self._kinds_of_nodes, []
            for node, position in map(self._places.__getitem__, ranks):
                look.append((order.setdefault(node, len(order)), kinds[node], position))
            known = self.memo.places
            self._located[ranks] = known.setdefault(tuple(look), len(known)), order
        return self._located[ranks]
