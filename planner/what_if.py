"""Clusters that differ from a given one: some of its devices, without a node or some devices, with a node more.

Ranks are numbered anew, as a launch without the missing processes would have them. It asks no costs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from whale.errors import UsageError
from whale.ir.cluster import Cluster, Device, DeviceType, Node
from whale.ir.device_names import matching_types, near_types

__all__ = ["only", "with_node", "without"]


def without(cluster: Cluster, what: str) -> Cluster:
    """The cluster without nodes by name, or without a number of devices of a type, written ``V100-SXM2-16GB:2``; with
    commas, without all of them.

    Devices of a type go from the last nodes that have it. Types have the names that a cluster file may give them.

    Raises:
        UsageError: there is no such node, there are not as many devices, or nothing is left.

    >>> four = Cluster.homogeneous(4, num_devices_per_node=2)
    >>> [device.name for device in without(four, "node0").devices], len(without(four, "device:3").devices)
    (['device:0', 'device:1'], 1)
    """
    gone: set[int] = set()
    for part in (part.strip() for part in what.split(",")):
        gone |= set(_ranks_of(cluster, part, gone))
    kept = [device.rank for device in cluster.devices if device.rank not in gone]
    if not kept:
        raise UsageError(f"--without {what} leaves no device of the cluster's {len(cluster.devices)}")
    return only(cluster, kept)


def only(cluster: Cluster, ranks: Iterable[int]) -> Cluster:
    """The part of the cluster with the devices of these ranks, which are numbered anew in their order.

    >>> [device.node for device in only(Cluster.homogeneous(4, num_devices_per_node=2), [1, 2]).devices]
    ['node0', 'node1']
    """
    wanted = set(ranks)
    kept = [(node, [rank for rank in node.ranks if rank in wanted]) for node in cluster.nodes]
    return _numbered((node, [cluster.devices[rank].type for rank in own]) for node, own in kept if own)


def _ranks_of(cluster: Cluster, part: str, gone: set[int]) -> Sequence[int]:
    by_name = {node.name: node.ranks for node in cluster.nodes}
    if part in by_name:
        return by_name[part]
    written, colon, count = part.rpartition(":")
    named = matching_types(written, {device.type.name: device.memory_bytes for device in cluster.devices})
    if colon and count.isdecimal() and int(count) and named:
        if len(named) > 1:
            raise UsageError(f"--without {part}: {written!r} is {_either(named)}; say which")
        ranks = [device.rank for device in cluster.devices if device.type.name == named[0]]
        left = [rank for rank in ranks if rank not in gone]
        if int(count) > len(left):
            others = f", of which {len(ranks) - len(left)} are missing already" if len(left) < len(ranks) else ""
            raise UsageError(f"--without {part}: the cluster has only {len(ranks)} {named[0]}{others}")
        return left[len(left) - int(count) :]
    types = list(dict.fromkeys(device.type.name for device in cluster.devices))
    near = difflib.get_close_matches(part, [*by_name, *(f"{name}:1" for name in types)], n=1)
    hint = f"did you mean {near[0]}?" if near else f"its nodes are {_some(by_name)}, its types {_some(types)}"
    raise UsageError(
        f"--without {part}: name a node of the cluster, or a type and a number such as {types[0]}:1; {hint}"
    )


def with_node(cluster: Cluster, what: str, catalog: Mapping[str, DeviceType]) -> Cluster:
    """The cluster with a node more, written ``2xA100-SXM4-80GB``, linked with the others as the first node is; with
    commas, with several.

    Args:
        cluster: that gets the node, as its last.
        what: number and type of its devices.
        catalog: known types, beside those of the cluster.

    Raises:
        UsageError: an unknown type, or links that are not given.

    >>> from whale.ir.cluster import Link
    >>> more = with_node(Cluster.homogeneous(2, inter=Link(bandwidth=1e9, latency=1e-5)), "1xdevice", {})
    >>> [(node.name, node.ranks) for node in more.nodes]
    [('node0', (0, 1)), ('added0', (2,))]
    """
    types = {**catalog, **{device.type.name: device.type for device in cluster.devices}}
    nodes = [(node, [cluster.devices[rank].type for rank in node.ranks]) for node in cluster.nodes]
    for index, part in enumerate(part.strip() for part in what.split(",")):
        written = re.fullmatch(r"([1-9][0-9]{0,5})x(.+)", part)
        if written is None:
            raise UsageError(
                f"--with {part}: write a number of devices and their type, such as 2x{cluster.devices[0].type.name}"
            )
        named = matching_types(written[2], {name: type_.memory_bytes for name, type_ in types.items()})
        if len(named) > 1:
            raise UsageError(f"--with {part}: {written[2]!r} is {_either(named)}; say which")
        if not named:
            near = near_types(written[2], list(types))
            hint = (
                f"did you mean {' or '.join(near)}?" if near else "define it under [device_types] of the cluster file"
            )
            raise UsageError(f"--with {part}: unknown device type {written[2]!r}; {hint}")
        count, type_ = int(written[1]), types[named[0]]
        first = cluster.nodes[0]
        like = next((node for node, own in nodes if own[0].name == type_.name), None)
        intra = like.intra if like is not None else type_.intra_node or first.intra
        if first.inter is None or (count > 1 and intra is None):
            kind = "inter_node" if first.inter is None else "intra_node"
            raise UsageError(f"--with {part}: the cluster file gives no {kind} link; add one to [links]")
        added = replace(first, name=f"added{index}", ranks=(), intra=intra)
        nodes.append((added, [type_] * count))
    return _numbered(nodes)


def _numbered(nodes: Iterable[tuple[Node, Sequence[DeviceType]]]) -> Cluster:
    """Nodes with devices of these types, numbered in order."""
    found: list[Node] = []
    devices: list[Device] = []
    for node, types in nodes:
        ranks = tuple(range(len(devices), len(devices) + len(types)))
        devices += [
            Device(rank=rank, name=f"{type_.name}:{rank}", type=type_, node=node.name)
            for rank, type_ in zip(ranks, types, strict=True)
        ]
        found.append(replace(node, ranks=ranks))
    return Cluster(nodes=tuple(found), devices=tuple(devices))


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
