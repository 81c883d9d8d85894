"""The machines as a search sees them: pools of equal devices that are counted, and the ranks that counts become.

A search decides how many devices of each pool a stage gets, in which degrees; only what it found is laid out on ranks.
So its work does not grow with the cluster. Tensor groups lie within a node where they fit, a stage's groups next to
each other, and the stages of a pool in the order of the pipeline. It knows no prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

from whale.ir.cluster import Cluster, Device, DeviceType

__all__ = ["Mesh", "Pool", "Slice", "lay_out", "pools_of", "slices_of", "with_more"]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Devices of one type.

    Attributes:
        type: what they are.
        nodes: their ranks by node, the nodes that have most of them first.
    """

    type: DeviceType
    nodes: tuple[tuple[int, ...], ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(rank for node in self.nodes for rank in node)

    @cached_property
    def per_node(self) -> int:
        """The most that a node has."""
        return max(map(len, self.nodes))

    @property
    def alike(self) -> bool:
        """Whether any two of its devices may change places: they share a node, or each has one of its own."""
        return len(self.nodes) == 1 or self.per_node == 1


class Mesh(NamedTuple):
    """A stage's devices: how many of each pool, and the tensor or expert degree; the rest of them is the data degree.

    An expert group is a data slice too: its devices divide the rows among them, and their experts.
    """

    counts: tuple[int, ...]
    tensor: int
    expert: int = 1

    @property
    def size(self) -> int:
        """Devices of a data slice."""
        return self.tensor * self.expert

    @property
    def data(self) -> int:
        """Data slices."""
        return sum(self.counts) // self.size


class Slice(NamedTuple):
    """Data slices of a mesh that are alike: their devices by pool, and how many groups."""

    counts: tuple[int, ...]
    num: int


def pools_of(cluster: Cluster, speed: str = "float32") -> tuple[Pool, ...]:
    """One pool for each device type, the fastest in *speed* first."""
    found: dict[DeviceType, list[tuple[int, ...]]] = {}
    for node in cluster.nodes:
        own: dict[DeviceType, list[int]] = {}
        for type_, ranks in groupby(node.ranks, key=lambda rank: cluster.devices[rank].type):
            own.setdefault(type_, []).extend(ranks)
        for type_, members in own.items():
            found.setdefault(type_, []).append(tuple(members))
    pools = [Pool(type=type_, nodes=tuple(sorted(nodes, key=len, reverse=True))) for type_, nodes in found.items()]
    return tuple(sorted(pools, key=lambda pool: (-pool.type.speed(speed), pool.type.name)))


def slices_of(mesh: Mesh) -> tuple[Slice, ...]:
    """The data slices of a mesh: the devices in the order of the pools, cut into groups.

    >>> slices_of(Mesh((3, 3), 2))
    (Slice(counts=(2, 0), num=1), Slice(counts=(1, 1), num=1), Slice(counts=(0, 2), num=1))
    """
    found: list[Slice] = []
    own = [0] * len(mesh.counts)
    free = mesh.size

    def close(num: int) -> None:
        if num and found and found[-1].counts == tuple(own):
            found[-1] = Slice(tuple(own), found[-1].num + num)
        elif num:
            found.append(Slice(tuple(own), num))

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


def lay_out(pools: Sequence[Pool], meshes: Sequence[Mesh]) -> list[list[tuple[int, ...]]]:
    """The data slices of each stage as ranks, ascending within a group and from group to group at every place.

    Groups of large degrees choose first, so that small ones do not split nodes that they need whole.
    """
    free = [[list(node) for node in pool.nodes] for pool in pools]
    found: list[list[tuple[int, ...]]] = [[] for _ in meshes]
    for stage in sorted(range(len(meshes)), key=lambda stage: (-meshes[stage].size, stage)):
        groups: list[list[int]] = []
        for part in slices_of(meshes[stage]):
            for _ in range(part.num):
                groups.append([rank for pool, count in enumerate(part.counts) for rank in _take(free[pool], count)])
        found[stage] = _ascending(groups, meshes[stage].size)
    return found


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
