"""The search space: pools of equal devices, meshes of counted devices, and the model as a chain of parts.

A search decides how many devices of each pool a stage gets, and in which degrees. Only its results are placed on ranks
(`lay_out`), so the work does not grow with the cluster: tensor groups lie within a node where they fit, the groups of a
stage next to each other, and the stages of a pool in the order of the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from whale.ir.cluster import Cluster, Device, DeviceType, Region
from whale.planner.cost.stage import CostModel
from whale.planner.search.problem import Fixed

__all__ = [
    "Chain",
    "Division",
    "Mesh",
    "MeshSpace",
    "Pool",
    "Replicas",
    "degrees_text",
    "lay_out",
    "layouts",
    "pools_of",
    "replicas_of",
    "with_more",
]


Integers = np.ndarray[Any, np.dtype[np.int64]]

Degree = tuple[int | None, int | None, int | None]

Division = tuple[int, int, int]
"""The tensor, the expert and the context degree of a data slice; one of the first two is 1, and with experts the last
one."""

FACTORS = (1, 2, 3, 4, 6, 8)
"""Rows of a slice of all of a pool's devices, of micro-batches that all pools divide evenly."""


NEARBY_ROWS = 1_024
"""Numbers of rows of a micro-batch of which one is chosen, where several are possible."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Devices of one type in one region.

    Attributes:
        type: what they are.
        nodes: their ranks by node, the nodes that have most of them first.
        region: where they are.
    """

    type: DeviceType
    nodes: tuple[tuple[int, ...], ...]
    region: Region | None = None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(rank for node in self.nodes for rank in node)

    @cached_property
    def node_of(self) -> dict[int, int]:
        """The position of each rank's node."""
        return {rank: place for place, node in enumerate(self.nodes) for rank in node}

    @cached_property
    def per_node(self) -> int:
        """The most that a node has."""
        return max(map(len, self.nodes))

    def leads(self, size: int) -> list[int]:
        """Places in `ranks` where groups of *size* devices begin, as `lay_out` forms them of all that it has: within
        nodes, if these have room for any."""
        if size > self.per_node:
            return list(range(0, len(self.ranks) - size + 1, size))
        found: list[int] = []
        begin = 0
        for node in self.nodes:
            found += range(begin, begin + len(node) - size + 1, size)
            begin += len(node)
        return found

    @property
    def alike(self) -> bool:
        """Whether any two of its devices may change places: they share a node, or each has one of its own."""
        return len(self.nodes) == 1 or self.per_node == 1


class Mesh(NamedTuple):
    """A stage's devices: how many of each pool, and the tensor or expert degree, and the context degree; the rest of
    them is the data degree.

    An expert group is a data slice too: its devices divide the rows among them, and their experts. So are devices that
    cut each row.
    """

    counts: tuple[int, ...]
    tensor: int
    expert: int = 1
    context: int = 1

    @property
    def size(self) -> int:
        """Devices of a data slice."""
        return self.tensor * self.expert * self.context

    @property
    def division(self) -> Division:
        """Its degrees within a data slice."""
        return self.tensor, self.expert, self.context

    @property
    def data(self) -> int:
        """Data slices."""
        return sum(self.counts) // self.size


class Replicas(NamedTuple):
    """Data slices of a mesh that are alike: their devices by pool, and how many groups."""

    counts: tuple[int, ...]
    num: int


def degrees_text(tensor: int, expert: int, context: int) -> str:
    """The degrees of a data slice in words.

    >>> degrees_text(2, 1, 1), degrees_text(1, 4, 1), degrees_text(1, 1, 8), degrees_text(2, 1, 8)
    ('2', '4 experts', '8 parts of rows', '8 parts of rows x 2')
    """
    if expert > 1:
        return f"{expert} experts"
    if context == 1:
        return f"{tensor}"
    return f"{context} parts of rows" + (f" x {tensor}" if tensor > 1 else "")


def pools_of(cluster: Cluster, speed: str = "float32") -> tuple[Pool, ...]:
    """One pool for each device type in each region, the fastest in *speed* first, and of these those of a region in its
    order."""
    found: dict[tuple[DeviceType, Region | None], list[tuple[int, ...]]] = {}
    for node in cluster.nodes:
        own: dict[DeviceType, list[int]] = {}
        for type_, ranks in groupby(node.ranks, key=lambda rank: cluster.devices[rank].type):
            own.setdefault(type_, []).extend(ranks)
        for type_, members in own.items():
            found.setdefault((type_, node.region), []).append(tuple(members))
    pools = [
        Pool(type=type_, nodes=tuple(sorted(nodes, key=len, reverse=True)), region=region)
        for (type_, region), nodes in found.items()
    ]
    return tuple(sorted(pools, key=lambda pool: (-pool.type.speed(speed), pool.type.name)))


def replicas_of(mesh: Mesh) -> tuple[Replicas, ...]:
    """The data slices of a mesh: the devices in the order of the pools, cut into groups.

    >>> replicas_of(Mesh((3, 3), 2))
    (Replicas(counts=(2, 0), num=1), Replicas(counts=(1, 1), num=1), Replicas(counts=(0, 2), num=1))
    """
    found: list[Replicas] = []
    own = [0] * len(mesh.counts)
    free = mesh.size

    def close(num: int) -> None:
        if num and found and found[-1].counts == tuple(own):
            found[-1] = Replicas(tuple(own), found[-1].num + num)
        elif num:
            found.append(Replicas(tuple(own), num))

    for pool, count in enumerate(mesh.counts):
        taken = min(count, free) if free < mesh.size else 0
        own[pool] += taken
        free, count = free - taken, count - taken
        if free == 0:
            close(1)
            own, free = [0] * len(mesh.counts), mesh.size
        whole, rest = divmod(count, mesh.size)
        if whole:
            own[pool] = mesh.size
            close(whole)
            own = [0] * len(mesh.counts)
        if rest:
            own[pool] = rest
            free = mesh.size - rest
    return tuple(found)


def layouts(pools: Sequence[Pool], meshes: Sequence[Mesh]) -> list[list[list[tuple[int, ...]]]]:
    """Layouts to choose from, the likeliest first: stages that follow each other on the devices of a pool; and where
    one then lies in several nodes that a node has room for, before it one with stages within nodes."""
    along = lay_out(pools, meshes)
    if any(_straddles(pools, mesh, groups) for mesh, groups in zip(meshes, along, strict=True)):
        within = lay_out(pools, meshes, whole=True)
        return [within, along] if within != along else [along]
    return [along]


def _straddles(pools: Sequence[Pool], mesh: Mesh, groups: Sequence[tuple[int, ...]]) -> bool:
    """Whether devices of a pool lie in several nodes where one has room for all of the mesh."""
    for pool, count in zip(pools, mesh.counts, strict=True):
        if 1 < count <= pool.per_node:
            places = (pool.node_of.get(rank) for group in groups for rank in group)
            if len({place for place in places if place is not None}) > 1:
                return True
    return False


def lay_out(pools: Sequence[Pool], meshes: Sequence[Mesh], *, whole: bool = False) -> list[list[tuple[int, ...]]]:
    """The data slices of each stage as ranks, ascending within a group and from group to group at every place.

    Groups of large degrees choose first, so that small ones do not split nodes that they need whole. If *whole*, large
    stages do too, and each lies in the first node that has room for it; else stages follow each other on the devices of
    a pool.
    """

    def order(stage: int) -> tuple[int, int, int]:
        mesh = meshes[stage]
        return -mesh.size, -sum(mesh.counts) if whole else 0, stage

    free = [[list(node) for node in pool.nodes] for pool in pools]
    found: list[list[tuple[int, ...]]] = [[] for _ in meshes]
    for stage in sorted(range(len(meshes)), key=order):
        if whole:
            for nodes, count in zip(free, meshes[stage].counts, strict=True):
                _put_first(nodes, count)
        groups: list[list[int]] = []
        for part in replicas_of(meshes[stage]):
            for _ in range(part.num):
                groups.append([rank for pool, count in enumerate(part.counts) for rank in _take(free[pool], count)])
        found[stage] = _ascending(groups, meshes[stage].size)
    return found


def _put_first(nodes: list[list[int]], count: int) -> None:
    """Put the first node that has room for all *count* ranks of a stage before the others, if there is one."""
    place = next((place for place, node in enumerate(nodes) if len(node) >= count), 0)
    if count and place:
        nodes.insert(0, nodes.pop(place))


def _take(nodes: list[list[int]], count: int) -> list[int]:
    """The given number of ranks from one node if it has them, else from as few as possible."""
    taken: list[int] = []
    while len(taken) < count:
        wanted = count - len(taken)
        node = next((node for node in nodes if len(node) >= wanted), None) or max(nodes, key=len)
        taken += node[:wanted]
        del node[:wanted]
        if not node:
            nodes.remove(node)
    return taken


def _ascending(groups: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
    ordered = sorted(tuple(sorted(group)) for group in groups)
    if all(a < b for one, other in pairwise(ordered) for a, b in zip(one, other, strict=True)):
        return ordered
    ranks = sorted(rank for group in ordered for rank in group)
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def with_more(cluster: Cluster, type_: DeviceType, times: int) -> Cluster:
    """The cluster with more nodes like the first that has devices of a type; with more devices in its only node if
    there is no link between nodes.

    >>> from whale.ir.cluster import Cluster, Link
    >>> cluster = Cluster.homogeneous(4, num_devices_per_node=2, inter=Link(bandwidth=1e9, latency=1e-5))
    >>> with_more(cluster, cluster.devices[0].type, 2).nodes[-1].ranks
    (6, 7)
    """
    nodes, devices = list(cluster.nodes), list(cluster.devices)
    like = next(node for node in nodes if any(devices[rank].type == type_ for rank in node.ranks))
    for number in range(times):
        if like.inter is None:
            name, types = like.name, [type_]
            nodes[-1] = replace(like, ranks=(*nodes[-1].ranks, len(devices)))
        else:
            name, types = f"{like.name} (new {number})", [devices[rank].type for rank in like.ranks]
            ranks = tuple(range(len(devices), len(devices) + len(types)))
            nodes.append(replace(like, name=name, ranks=ranks))
        for own in types:
            devices.append(Device(rank=len(devices), name=f"{own.name}:{len(devices)}", type=own, node=name))
    return Cluster(nodes=tuple(nodes), devices=tuple(devices))


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The model as parts that no cut goes through.

    Attributes:
        bounds: the first layer of each part, and the number of layers.
        starts: parts that must begin a stage.
        degrees: for each part (data, tensor, expert) where they are decided, else None.
    """

    bounds: tuple[int, ...]
    starts: frozenset[int] = frozenset()
    degrees: tuple[Degree, ...] = ()

    @classmethod
    def of(cls, paths: Sequence[str], num_layers: int, fixed: Fixed | None) -> Chain:
        """The parts of a chain: a stage cannot begin at a layer without a path, if others have one, nor inside of what
        is fixed to be one."""
        fixed = fixed or Fixed()
        cuts = {layer for layer in range(num_layers) if not paths or paths[layer]} | {0, *fixed.starts}
        for first, last in fixed.uncut:
            cuts -= set(range(first + 1, last))
        bounds = (*sorted(cuts), num_layers)
        position = {bound: index for index, bound in enumerate(bounds)}
        degrees: list[Degree] = []
        for first, last in pairwise(bounds):
            own = [one for one in fixed.degrees if one.first < last and first < one.last]
            data = next((one.data for one in own if one.data is not None), None)
            tensor = next((one.tensor for one in own if one.tensor is not None), None)
            expert = next((one.expert for one in own if one.expert is not None), None)
            degrees.append((data, tensor, expert))
        starts = frozenset(position[start] for start in fixed.starts)
        return cls(bounds=bounds, starts=starts, degrees=tuple(degrees))

    def __len__(self) -> int:
        """Parts."""
        return len(self.bounds) - 1

    @cached_property
    def last_start(self) -> Integers:
        """For each end of a stage the first part that it may reach back to, by what must begin a stage."""
        found = np.zeros(len(self) + 1, dtype=np.int64)
        for start in sorted(self.starts):
            found[start + 1 :] = start
        return found

    def allows(self, mesh: Mesh) -> Integers:
        """For each end of a stage on a mesh the first part that it may reach back to, by all that is decided."""
        if not self._decided:
            return self.last_start
        found = self.last_start.copy()
        for part, degrees in self._decided:
            data, tensor, expert = degrees
            whole = mesh.data * (mesh.expert if expert is None else 1)  # of what is no expert there are more replicas
            fits = data in (None, mesh.data, whole)
            if not fits or tensor not in (None, mesh.tensor) or expert not in (None, mesh.expert):
                found[part + 1 :] = np.maximum(found[part + 1 :], part + 1)
        return found

    @cached_property
    def _decided(self) -> list[tuple[int, Degree]]:
        """Parts whose degrees are decided, with these."""
        return [(part, degrees) for part, degrees in enumerate(self.degrees) if any(one is not None for one in degrees)]


@dataclass(frozen=True, kw_only=True)
class MeshSpace:
    """Rows of micro-batches and degrees of meshes that a search may choose.

    Attributes:
        prices: the cost model, of a profile on a cluster.
        pools: the devices by type.
        chain: the model as parts that no cut goes through.
    """

    prices: CostModel
    pools: tuple[Pool, ...]
    chain: Chain
    _rows: dict[tuple[int, int], int] = field(default_factory=dict, init=False)

    # Rows of a micro-batch

    def rows(self, batch: int, micro_batches: int) -> int:
        """Rows of a micro-batch; the last one has fewer where their number does not divide the batch.

        Then there is a choice: those that most data degrees of a pool's devices divide, or are divided by.
        """
        if batch % micro_batches == 0:
            return batch // micro_batches
        if (batch, micro_batches) not in self._rows:
            least, most = -(-batch // micro_batches), (batch - 1) // (micro_batches - 1)
            most = min(most, least + NEARBY_ROWS)
            found = max(range(least, most + 1), key=lambda rows: (sum(self._matches(rows)), -rows), default=least)
            self._rows[batch, micro_batches] = found
        return self._rows[batch, micro_batches]

    def matching_micro_batches(self, batch: int) -> list[int]:
        """Numbers of micro-batches whose rows every pool can divide evenly at some tensor degree."""
        nums = {len(pool.ranks) // degree for pool in self.pools for degree in self.degrees(pool)}
        found = set()
        for rows in sorted({num * factor for num in nums for factor in FACTORS}):
            if 0 < rows <= batch and all(self._matches(rows)) and self.rows(batch, -(-batch // rows)) == rows:
                found.add(-(-batch // rows))
        return sorted(found)

    def _matches(self, rows: int) -> list[int]:
        """Number of tensor degrees at which the devices of each pool divide the given rows evenly."""
        found = []
        for pool in self.pools:
            slices = [len(pool.ranks) // degree for degree in self.degrees(pool)]
            found.append(sum(num > 0 and (rows % num == 0 or num % rows == 0) for num in slices))
        return found

    # CostTable

    def degrees(self, pool: Pool) -> tuple[int, ...]:
        """Tensor degrees of groups of a pool's devices, where times are known. A group larger than a node may straddle
        nodes, those of eight devices nodes of six."""
        return self._degrees[pool.type.name]

    def divisions(self, pool: Pool) -> tuple[Division, ...]:
        """Ways to form data slices of a pool's devices, by tensor, expert and context degree; such as `degrees`."""
        usual = self.degrees(pool)
        return tuple(division for division in self.all_divisions if division[1] > 1 or division[0] in usual)

    @cached_property
    def all_divisions(self) -> tuple[Division, ...]:
        """All that there are for groups of any devices, those by tensor degree first."""
        prices = self.prices
        return (
            *((one, 1, 1) for one in prices.tensor_degrees),
            *((1, one, 1) for one in prices.expert_degrees),
            *((tensor, 1, context) for tensor, context in prices.cuts),
        )

    @cached_property
    def largest_node(self) -> int:
        """Devices of the node that has most."""
        return max(len(node.ranks) for node in self.prices.cluster.nodes)

    @cached_property
    def _degrees(self) -> dict[str, tuple[int, ...]]:
        return {
            pool.type.name: tuple(
                degree for degree in self.prices.tensor_degrees if self.prices.knows(pool.type, degree, pool.per_node)
            )
            for pool in self.pools
        }
