"""Measurements of links: sends, collectives and their interference with computation, for each kind of pair and group.

Ranks of the same types and positions in nodes have the same curve, so only the first of each kind are measured. It
knows neither models nor rates of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch.distributed as dist

from whale.ir.profile import Interference, LinkCurve, ModelProfile
from whale.ir.program import BUCKET_BYTES
from whale.profiling.measuring import Item
from whale.profiling.places import RankLocation
from whale.runtime import probe
from whale.runtime.launch import World, groups

__all__ = ["OPERATIONS", "link_items"]

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def link_items(world: World, places: Sequence[RankLocation], messages: Sequence[int]) -> list[Item]:
    """Each kind of pair and group on its first ranks, at these bytes of a message."""
    pairs = _pairs(places)
    sets = _sets(places, pairs)
    made = groups([*pairs, *sets], timeout_seconds=world.failures.timeout_seconds)
    beside = groups(sets, timeout_seconds=world.failures.timeout_seconds)
    items = []
    for pair in pairs:
        items += [_send(world, places, pair, made[pair], size) for size in messages]
    for ranks in sets:
        items += [
            _collective(world, places, operation, ranks, made[ranks], size)
            for operation in OPERATIONS
            for size in messages
        ]
        items.append(_interference(world, places, ranks, (made[ranks], beside[ranks]), messages))
    return items


def _pairs(places: Sequence[RankLocation]) -> list[tuple[int, int]]:
    """The first pair of ranks of each kind: of these two types, within a node or between nodes."""
    found: dict[tuple[Any, ...], tuple[int, int]] = {}
    for one, other in combinations(places, 2):
        found.setdefault(_kind((one, other)), (one.rank, other.rank))
    return list(found.values())


def _sets(places: Sequence[RankLocation], pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The first group of each kind among: the pairs, powers of two of a node's devices, powers of two of nodes with a
    device each, of one type of device or as they come, and all devices."""
    nodes: dict[str, list[RankLocation]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place)
    firsts = [members[0] for members in nodes.values()]
    alike: dict[str, list[RankLocation]] = {}
    for place in firsts:
        alike.setdefault(place.device_type, []).append(place)
    groups_of = [[places[rank] for rank in pair] for pair in pairs]
    groups_of += [
        members[:count]
        for members in (*nodes.values(), *alike.values(), firsts)
        for count in (*_powers(len(members)), len(members))
    ]
    groups_of.append(list(places))
    found: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for members in groups_of:
        if len(members) > 1:
            found.setdefault(_kind(members), tuple(place.rank for place in members))
    return list(dict.fromkeys(found.values()))


def _powers(most: int) -> list[int]:
    return [2**power for power in range(1, most.bit_length()) if 2**power < most]


def _kind(members: Sequence[RankLocation]) -> tuple[Any, ...]:
    """Key of a group: its types, and the number of each on each node."""
    by_node: dict[str, list[str]] = {}
    for place in members:
        by_node.setdefault(place.node, []).append(place.device_type)
    return tuple(sorted(tuple(sorted(types)) for types in by_node.values()))


def _send(world: World, places: Sequence[RankLocation], pair: tuple[int, int], group: Any, size: int) -> Item:
    def run(seconds: float) -> float:
        rank, peer = pair if world.rank == pair[0] else pair[::-1]
        measured = probe.send_seconds(size, rank, peer, group, device=world.device, seconds=seconds)
        return measured.seconds

    return _link_item(world, places, "send", pair, size, run)


def _collective(
    world: World, places: Sequence[RankLocation], operation: str, ranks: tuple[int, ...], group: Any, size: int
) -> Item:
    def run(seconds: float) -> float:
        measured = probe.collective_seconds(
            operation, size, ranks, world.rank, group, device=world.device, seconds=seconds
        )
        return measured.seconds

    return _link_item(world, places, operation, ranks, size, run)


def _interference(
    world: World, places: Sequence[RankLocation], ranks: tuple[int, ...], two: tuple[Any, Any], sizes: Sequence[int]
) -> Item:
    """Interference of gradient reductions with concurrent work, stored in the curve of the all-reduces."""
    bucket = max((size for size in sizes if size <= BUCKET_BYTES), default=sizes[0])
    is_it = _is_of(_identity(places, "all_reduce", ranks))

    def run(seconds: float) -> list[Any]:
        slowdown, waiting, stretch = probe.interference(sizes[0], bucket, two, device=world.device, seconds=seconds)
        each: list[Any] = [None] * len(ranks)
        dist.all_gather_object(each, slowdown, group=two[0])
        return [each, waiting, stretch]

    def known(profile: ModelProfile) -> bool:
        return any(curve.beside is not None for curve in profile.links if is_it(curve))

    def merged(profile: ModelProfile, found: list[Any]) -> ModelProfile:
        slowdowns: dict[str, float] = {}
        for rank, slowdown in zip(ranks, found[0], strict=True):
            name = places[rank].device_type
            slowdowns[name] = max(slowdown, slowdowns.get(name, 0.0))
        beside = Interference(
            types=tuple(slowdowns),
            slowdowns=tuple(slowdowns.values()),
            bytes=bucket,
            waiting=found[1],
            stretch=found[2],
        )
        links = [curve.model_copy(update={"beside": beside}) if is_it(curve) else curve for curve in profile.links]
        return profile.model_copy(update={"links": tuple(links)})

    name = f"work beside sums of gradients among {_told(places, ranks)}"
    return Item(name=name, ranks=ranks, known=known, run=run, merged=merged)


def _types(places: Sequence[RankLocation], ranks: Sequence[int]) -> list[str]:
    return sorted(places[rank].device_type for rank in ranks)


def _told(places: Sequence[RankLocation], ranks: Sequence[int]) -> str:
    return f"{len(ranks)}: {', '.join(_types(places, ranks))}"


def _identity(places: Sequence[RankLocation], operation: str, ranks: Sequence[int]) -> dict[str, Any]:
    """Fields that identify the curve of these ranks."""
    types, nodes = _types(places, ranks), [places[rank].node for rank in ranks]
    return {
        "operation": operation,
        "ranks": len(ranks),
        "source": types[0],
        "target": types[-1],
        "types": tuple(types) if len(set(types)) > 1 else (),
        "devices": max(nodes.count(node) for node in nodes),
        "within": "node" if len(set(nodes)) == 1 else "nodes",
    }


def _is_of(identity: Mapping[str, Any]) -> Callable[[LinkCurve], bool]:
    def is_it(curve: LinkCurve) -> bool:
        return all(getattr(curve, name) == value for name, value in identity.items()) and not curve.coefficients

    return is_it


def _link_item(
    world: World,
    places: Sequence[RankLocation],
    operation: str,
    ranks: tuple[int, ...],
    size: int,
    run: Callable[[float], float],
) -> Item:
    identity = _identity(places, operation, ranks)
    mine = _is_of(identity)

    def known(profile: ModelProfile) -> bool:
        return any(size in curve.sizes for curve in profile.links if mine(curve))

    def merged(profile: ModelProfile, found: float) -> ModelProfile:
        old = next((curve for curve in profile.links if mine(curve)), None)
        points = {} if old is None else dict(zip(old.sizes, old.bandwidths, strict=True))
        points[float(size)] = size / found
        bandwidths = tuple(points[at] for at in sorted(points))
        new = LinkCurve(
            **identity,
            sizes=tuple(sorted(points)),
            bandwidths=bandwidths,
            maximum=max(bandwidths),
            beside=None if old is None else old.beside,
        )
        links = [new if curve is old else curve for curve in profile.links]
        return profile.model_copy(update={"links": tuple(links if old else [*links, new])})

    return Item(
        name=f"{operation} of {size} bytes among {_told(places, ranks)}, {identity['within']}",
        ranks=ranks,
        known=known,
        run=run,
        merged=merged,
    )
