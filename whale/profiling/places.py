"""Location of every rank of a launch: its device type, its node, its memory.

It measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from whale.ir.cluster import Cluster
from whale.runtime.launch import World
from whale.runtime.location import RankLocation, location_of
from whale.runtime.store import Board

__all__ = ["RankLocation", "first_of_types", "places_of"]


def places_of(world: World, cluster: Cluster | None) -> tuple[RankLocation, ...]:
    """Locations of all ranks: from the cluster, in which rank r is device r, or as the ranks detect them.

    Raises:
        PlanMismatchError: the cluster has another number of devices than there are ranks.
    """
    if cluster is not None:
        cluster.check_world(world.size)
        return tuple(
            RankLocation(rank=d.rank, device_type=d.type.name, node=d.node, memory_bytes=d.memory_bytes)
            for d in cluster.devices
        )
    board = Board(world, "profile")
    board.put(f"place/{world.rank}", asdict(location_of(world.rank, world.device)))
    return tuple(RankLocation(**board.get(f"place/{rank}", rank)) for rank in range(world.size))


def first_of_types(places: Sequence[RankLocation]) -> list[RankLocation]:
    """The first rank of each type of device."""
    firsts: dict[str, RankLocation] = {}
    for place in places:
        firsts.setdefault(place.device_type, place)
    return list(firsts.values())
