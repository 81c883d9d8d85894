"""How the devices of this machine hang together: peer access and NVLink between CUDA devices, and the speeds of its
network adapters, as far as it tells them; and how fast its memory is, and copies between it and devices, as measured in
some tenths of a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["device_links", "host_rates", "network_adapters"]

SYSTEM = Path("/sys/class")

COPIED_BYTES = 2**26
"""Bytes of a measured copy: larger than caches, and small beside any memory."""
RATE_SECONDS = 0.1
"""Seconds of each measurement."""


def device_links(num_devices: int, problems: list[str]) -> list[dict[str, Any]]:
    """For each pair of CUDA devices whether they copy directly to each other, and over how many NVLinks.

    ``nvlinks`` is None where this build of torch cannot tell. What fails is added to *problems*.
    """
    if num_devices < 2:
        return []
    import torch

    nvlinks = _nvlinks()
    links = []
    try:
        for first in range(num_devices):
            for second in range(first + 1, num_devices):
                links.append(
                    {
                        "devices": [first, second],
                        "peer_access": torch.cuda.can_device_access_peer(first, second),
                        "nvlinks": None if nvlinks is None else nvlinks[first][second],
                    }
                )
    except RuntimeError as error:
        problems.append(f"peer access between CUDA devices cannot be read: {error}")
    return links


def host_rates(num_devices: int, problems: list[str]) -> dict[str, Any]:
    """Bytes per second of this machine's memory, read and written by the threads of this process (``threads``), and to
    and from each CUDA device, one at a time, in pinned memory.

    What fails is added to *problems*.
    """
    import torch

    from whale.runtime.probe import copy_seconds, host_copy_seconds

    found: dict[str, Any] = {"bandwidth": None, "threads": torch.get_num_threads(), "devices": []}
    try:
        spent = copy_seconds(COPIED_BYTES, device=torch.device("cpu"), seconds=RATE_SECONDS)
        found["bandwidth"] = COPIED_BYTES / spent.seconds
        for index in range(num_devices):
            ways = {}
            for way, to_device in (("to_device", True), ("from_device", False)):
                device = torch.device("cuda", index)
                own = host_copy_seconds(COPIED_BYTES, device=device, to_device=to_device, seconds=RATE_SECONDS)
                ways[way] = COPIED_BYTES / own.seconds
            found["devices"].append({"index": index, **ways})
    except RuntimeError as error:
        problems.append(f"the speed of the memory cannot be measured: {error}")
    return found


def _nvlinks() -> list[list[int]] | None:
    """How many NVLinks join each pair; None where torch does not tell (it has no public function for it)."""
    try:
        import torch._C._distributed_c10d as c10d
        from torch._C._autograd import DeviceType

        return [list(row) for row in getattr(c10d, "_detect_dma_connectivity")(DeviceType.CUDA, "nvlink").matrix]  # noqa: B009
    except (ImportError, AttributeError, RuntimeError):
        return None


def network_adapters(system: Path = SYSTEM) -> list[dict[str, Any]]:
    """Active network interfaces, and InfiniBand or RoCE ports, with their bits per second (None: unknown).

    Linux only; elsewhere the list is empty. *system* stands in for ``/sys/class``.
    """
    adapters: list[dict[str, Any]] = []
    for folder in _folders(system / "net"):
        if folder.name == "lo" or _text(folder / "operstate") == "down":
            continue
        megabits = _text(folder / "speed")
        known = megabits.isdecimal() and int(megabits) > 0
        adapters.append(
            {"name": folder.name, "kind": "ethernet", "bits_per_second": int(megabits) * 10**6 if known else None}
        )
    for port in (port for device in _folders(system / "infiniband") for port in _folders(device / "ports")):
        if "ACTIVE" not in _text(port / "state"):
            continue
        gigabits = _text(port / "rate").partition(" ")[0]  # such as "200 Gb/sec (4X HDR)"
        rate = round(float(gigabits) * 10**9) if gigabits.replace(".", "", 1).isdecimal() else None
        adapters.append(
            {
                "name": f"{port.parent.parent.name}:{port.name}",
                "kind": _text(port / "link_layer").lower() or "rdma",
                "bits_per_second": rate,
            }
        )
    return adapters


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """Content of a kernel file; empty if it has none (an inactive interface has no speed)."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
