"""Location of every rank of a launch: its device type, its node, its memory.

It measures nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from whale.errors import PlanMismatchError
from whale.ir.cluster import Cluster
from whale.runtime.launch import World
from whale.runtime.store import Board

__all__ = ["RankLocation", "first_of_types", "places_of"]


@dataclass(frozen=True, kw_only=True)
class RankLocation:
    """Location of a rank: its device type, its node, and the memory of the device and of the node itself in bytes (0:
    unknown)."""

    rank: int
    device_type: str
    node: str
    memory_bytes: int
    host_bytes: int = 0


def places_of(world: World, cluster: Cluster | None) -> tuple[RankLocation, ...]:
    """Locations of all ranks: from the cluster, in which rank r is device r, or as the ranks detect them.

    Raises:
        PlanMismatchError: the cluster has another number of devices than there are ranks.
    """
    if cluster is not None and len(cluster.devices) != world.size:
        raise PlanMismatchError(
            f"the cluster has {len(cluster.devices)} devices, but {world.size} processes were started; use torchrun "
            f"with {len(cluster.devices)} in total, or another cluster file"
        )
    if cluster is not None:
        return tuple(
            RankLocation(rank=d.rank, device_type=d.type.name, node=d.node, memory_bytes=d.memory_bytes)
            for d in cluster.devices
        )
    board = Board(world, "profile")
    own = [_device_name(world.device), socket.gethostname(), _memory_bytes(world.device), _memory_bytes()]
    board.put(f"place/{world.rank}", own)
    found = [board.get(f"place/{rank}") for rank in range(world.size)]
    return tuple(
        RankLocation(rank=rank, device_type=name, node=node, memory_bytes=memory, host_bytes=host)
        for rank, (name, node, memory, host) in enumerate(found)
    )


def _device_name(device: torch.device) -> str:
    """The driver's name in the form of the catalog, such as ``A100-SXM4-80GB``; ``cpu`` for a processor."""
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    return "-".join(name.replace("NVIDIA ", "").replace("GeForce ", "").split())


def _memory_bytes(device: torch.device | None = None) -> int:
    """Bytes of a device; of the host without one."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def first_of_types(places: Sequence[RankLocation]) -> list[RankLocation]:
    """The first rank of each type of device."""
    firsts: dict[str, RankLocation] = {}
    for place in places:
        firsts.setdefault(place.device_type, place)
    return list(firsts.values())
