"""Network namespaces as nodes around a switch: the commands that make and remove them, as data.

The switch is a bridge in a namespace of its own, so nothing is seen of it outside, neither by name nor by a firewall,
and removing the namespaces removes everything. Each node has one interface, ``eth0``; both ends of its cable are
throttled by a token bucket, so that what a node sends and what it receives each have the link's rate.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from whale.errors import WhaleError

from .description import Link

__all__ = ["INTERFACE", "address", "make", "names", "namespace", "remove", "run"]

INTERFACE = "eth0"
NAMESPACES = Path("/run/netns")  # where `ip netns` keeps them
QUEUE_SECONDS = 0.05
"""Time to drain a full queue; further packets are dropped, as by a switch."""


def namespace(name: str, node: int) -> str:
    """The network namespace of a node."""
    return f"{name}-node{node}"


def address(node: int) -> str:
    """A node's address."""
    return f"10.77.0.{node + 1}"


def make(name: str, links: Sequence[Link | None]) -> list[list[str]]:
    """The commands that make the network of the testbed *name*."""
    switch = f"{name}-switch"
    commands = [
        ["ip", "netns", "add", switch],
        ["ip", "-n", switch, "link", "add", "bridge", "type", "bridge"],
        ["ip", "-n", switch, "link", "set", "bridge", "up"],
    ]
    for node, link in enumerate(links):
        host, port = namespace(name, node), f"port{node}"
        commands += [
            ["ip", "netns", "add", host],
            ["ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host],
            ["ip", "-n", switch, "link", "set", port, "master", "bridge", "up"],
            ["ip", "-n", host, "address", "add", f"{address(node)}/24", "dev", INTERFACE],
            ["ip", "-n", host, "link", "set", "lo", "up"],
            ["ip", "-n", host, "link", "set", INTERFACE, "up"],
        ]
        if link is not None:
            commands += _throttle(host, INTERFACE, link.bandwidth, link.latency)
            commands += _throttle(switch, port, link.bandwidth, 0)
    return commands


def _throttle(inside: str, interface: str, bandwidth: float, latency: float) -> list[list[str]]:
    burst = max(32 * 1024, round(bandwidth / 1000))  # bytes: a few packets, or a millisecond where that is more
    device = ["tc", "-n", inside, "qdisc", "add", "dev", interface]
    bucket = [
        "tbf",
        "rate",
        f"{round(bandwidth * 8)}bit",
        "burst",
        f"{burst}b",
        "latency",
        f"{round(QUEUE_SECONDS * 1e6)}us",
    ]
    commands = [[*device, "root", "handle", "1:", *bucket]]
    if latency:
        delay = ["netem", "delay", f"{latency * 1e6:.10g}us", "limit", "100000"]
        commands.append([*device, "parent", "1:1", "handle", "10:", *delay])
    return commands


def names(prefix: str) -> list[str]:
    """The namespaces that there are, whose name starts so."""
    if not NAMESPACES.is_dir():
        return []
    return sorted(entry.name for entry in NAMESPACES.iterdir() if entry.name.startswith(prefix))


def remove(name: str) -> None:
    """Remove the network of the testbed *name*, or what there is of it."""
    for each in names(f"{name}-"):
        run(["ip", "netns", "delete", each])


def run(command: Sequence[str]) -> None:
    """Run one of these commands; WhaleError says which failed and why."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        hint = "; this kernel has no netem: leave the links' latency out" if "netem" in command else ""
        raise WhaleError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}{hint}")
