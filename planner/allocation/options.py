"""The devices that a job may be given: numbers of devices of each kind of node, and the ranks that they are.

A number of devices is a part of a node or whole nodes, in sizes that divide each other, so that whatever jobs are given
fits together without a job that is spread over the rests of nodes. It knows no jobs and no speeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from whale.errors import UsageError
from whale.ir.cluster import Cluster, Node

__all__ = ["MOST_KINDS", "Kind", "Options", "kinds_of", "options_of", "place"]

MOST_KINDS = 2
"""Kinds of nodes that a job has devices of at most: each further one multiplies the searches, and pays little."""

MOST_SINGLE_NODES = 8
"""Numbers of whole nodes up to which a job may have any; above, powers of two and all."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Alike nodes.

    Attributes:
        name: the type of their devices, with the number in a node where types alone are ambiguous.
        device_type: name of the type.
        per_node: devices of a node.
        nodes: of this kind, in the cluster's order.
    """

    name: str
    device_type: str
    per_node: int
    nodes: tuple[Node, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All devices, node by node."""
        return tuple(rank for node in self.nodes for rank in node.ranks)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of devices that a job may have of this kind.

        >>> Kind(name="a", device_type="a", per_node=4, nodes=(None,) * 3).counts
        (0, 1, 2, 4, 8, 12)
        """
        parts, left = [1], self.per_node
        while left > 1:
            factor = next(number for number in range(2, left + 1) if left % number == 0)
            left //= factor
            parts.append(parts[-1] * factor)
        num = len(self.nodes)
        whole = {count for count in range(1, num + 1) if count <= MOST_SINGLE_NODES or count & (count - 1) == 0} | {num}
        return (0, *sorted({*parts, *(count * self.per_node for count in whole)}))


@dataclass(frozen=True, kw_only=True)
class Options:
    """All numbers of devices that a job may be given.

    Attributes:
        kinds: of nodes.
        counts: devices by option and kind; the first option is none, and the others have more and more devices.
        capacity: devices by kind.
    """

    kinds: tuple[Kind, ...]
    counts: NDArray[np.int64]
    capacity: tuple[int, ...]

    def text(self, option: int) -> str:
        """An option in words."""
        given = [f"{count} {kind.name}" for count, kind in zip(self.counts[option], self.kinds, strict=True) if count]
        return " + ".join(given) or "none"

    @property
    def numbers(self) -> dict[str, int]:
        """Devices of the cluster by type."""
        found: dict[str, int] = {}
        for kind, number in zip(self.kinds, self.capacity, strict=True):
            found[kind.device_type] = found.get(kind.device_type, 0) + number
        return found

    def index(self, devices: Mapping[str, int]) -> int | None:
        """The option with these numbers of devices by type; None if there is none.

        Raises:
            UsageError: a type that the cluster does not have, or fewer of it than given.
        """
        known = self.numbers
        if unknown := sorted(set(devices) - known.keys()):
            raise UsageError(f"devices: the cluster has no {unknown[0]}, but {', '.join(sorted(known))}")
        if more := sorted(name for name, number in devices.items() if number > known[name]):
            raise UsageError(f"devices: {devices[more[0]]} {more[0]}, but the cluster has {known[more[0]]}")
        for option, counts in enumerate(self.counts):
            found = dict.fromkeys(known, 0)
            for count, kind in zip(counts, self.kinds, strict=True):
                found[kind.device_type] += int(count)
            if found == {name: devices.get(name, 0) for name in known}:
                return option
        return None


def kinds_of(cluster: Cluster) -> tuple[Kind, ...]:
    """The kinds of nodes of a cluster, in its order.

    >>> [(kind.name, kind.ranks) for kind in kinds_of(Cluster.homogeneous(4, num_devices_per_node=2))]
    [('device', (0, 1, 2, 3))]
    """
    found: dict[object, list[Node]] = {}
    for node in cluster.nodes:
        types = tuple(cluster.devices[rank].type.name for rank in node.ranks)
        found.setdefault((types, node.intra, node.inter, node.region), []).append(node)
    names = [cluster.devices[nodes[0].ranks[0]].type.name for nodes in found.values()]
    sizes = [len(nodes[0].ranks) for nodes in found.values()]
    kinds = []
    for index, nodes in enumerate(found.values()):
        alike = [other for other, name in enumerate(names) if name == names[index]]
        name = names[index]
        if len(alike) > 1:
            by_size = len({sizes[other] for other in alike}) == len(alike)
            name += f" of {sizes[index]}" if by_size else f" of {nodes[0].name}"
        kinds.append(Kind(name=name, device_type=names[index], per_node=sizes[index], nodes=tuple(nodes)))
    return tuple(kinds)


def options_of(cluster: Cluster) -> Options:
    """The numbers of devices of a cluster that a job may be given.

    >>> options_of(Cluster.homogeneous(2)).counts.tolist()
    [[0], [1], [2]]
    """
    kinds = kinds_of(cluster)
    found = {(0,) * len(kinds)}
    for chosen in combinations(range(len(kinds)), min(MOST_KINDS, len(kinds))):
        for counts in product(*(kinds[index].counts for index in chosen)):
            given = dict(zip(chosen, counts, strict=True))
            found.add(tuple(given.get(index, 0) for index in range(len(kinds))))
    found.add(tuple(len(kind.ranks) for kind in kinds))
    ordered = sorted(found, key=lambda counts: (sum(counts), counts))
    return Options(
        kinds=kinds,
        counts=np.array(ordered, dtype=np.int64),
        capacity=tuple(len(kind.ranks) for kind in kinds),
    )


def place(options: Options, given: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each job, by its option: larger numbers first, side by side, which no node's end cuts."""
    found: list[list[int]] = [[] for _ in given]
    for index, kind in enumerate(options.kinds):
        free = iter(kind.ranks)
        for job in sorted(range(len(given)), key=lambda job: -int(options.counts[given[job], index])):
            found[job] += [next(free) for _ in range(int(options.counts[given[job], index]))]
    return tuple(tuple(sorted(ranks)) for ranks in found)
