"""The location of a process: the type and the memory of its device, and its host. It measures nothing, and knows no
other process."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch

__all__ = ["DEVICE_TYPE", "RankLocation", "location_of"]

DEVICE_TYPE = "WHALE_DEVICE_TYPE"
"""Environment variable with the device type of a plan or a cluster file that a processor stands for, where
devices are emulated."""


@dataclass(frozen=True, kw_only=True)
class RankLocation:
    """Location of a rank.

    Attributes:
        rank: its number.
        device_type: the driver's name in the form of the catalog, such as ``A100-SXM4-80GB``; ``cpu`` for a processor.
        node: the name of the host.
        memory_bytes: of the device.
        host_bytes: memory of the host; 0: unknown.
        agent: the number of the launcher's process that has started it, if it is known.
        stands_for: the device type that `DEVICE_TYPE` gives a processor.
    """

    rank: int
    device_type: str
    node: str
    memory_bytes: int
    host_bytes: int = 0
    agent: str = ""
    stands_for: str = ""


def location_of(rank: int, device: torch.device) -> RankLocation:
    """The location of this process."""
    is_cuda = device.type == "cuda"
    return RankLocation(
        rank=rank,
        device_type=_device_name(device) if is_cuda else "cpu",
        node=socket.gethostname(),
        memory_bytes=_memory_bytes(device) if is_cuda else _host_bytes(),
        host_bytes=_host_bytes(),
        agent=os.environ.get("GROUP_RANK", ""),
        stands_for="" if is_cuda else os.environ.get(DEVICE_TYPE, ""),
    )


def _device_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device)
    return "-".join(name.replace("NVIDIA ", "").replace("GeForce ", "").split())


def _memory_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
