"""Parameter servers against all-reduce: bytes of each link and seconds of a step, on a testbed of four hosts whose
links limit them, three of 100 Mbit/s and one of 400 Mbit/s; and by the cost model of processors on up to 64 hosts.

python benchmarks/servers.py                        # as root
python benchmarks/servers.py --write 2026-11-26

Sides take turns in the same processes. A step sums 8 MiB of gradients and computes little. The bytes are the counters
of each host's network interface, of what it sends and what it receives; seconds are the median of the slowest rank's.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, over_ranks, report, said_on_testbed, table
from torch import Tensor, nn

import whale
from whale.ir.cluster import Cluster, Device, Link, Node
from whale.planner.catalog import device_types
from whale.planner.network.communication import collective, owned_seconds
from whale.planner.network.topology import Topology

BED = """
[[nodes]]
count = 1
devices = 1
device = "part"
links = {inter_node = {bandwidth = "400 Mbit/s"}}
[[nodes]]
count = 3
devices = 1
device = "part"
links = {inter_node = {bandwidth = "100 Mbit/s"}}
[device_types]
part = {cores = 0.4, memory = "2 GiB"}
"""

WIDTH, LAYERS = 512, 8
ROWS = 8
SIDES: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "servers on all, equal": {"reduce": "server"},
    "one server, on the fast link": {"reduce": "server", "state_shares": [1, 0, 0, 0]},
    "one server, on a slow link": {"reduce": "server", "state_shares": [0, 1, 0, 0]},
    "one server, on the fast link, a step late": {"reduce": "server", "state_shares": [1, 0, 0, 0], "staleness": 1},
    "Adasum": {"reduce": "adasum"},
}


class Layers(nn.Module):
    """Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def counters() -> tuple[int, int]:
    """Bytes that this host's interfaces have received and sent."""
    found = [0, 0]
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, numbers = line.split(":")
        if name.strip() != "lo":
            received, sent = (int(numbers.split()[place]) for place in (0, 8))
            found = [found[0] + received, found[1] + sent]
    return found[0], found[1]


def run_rank(repeats: int) -> None:
    """One rank: the sides in turns, and a line of JSON on the first one."""
    torch.set_num_threads(1)
    batch = torch.ones(ROWS, WIDTH)
    made: dict[str, Any] = {}
    for name, options in SIDES.items():
        model = whale.parallelize(Layers(), batch, device="cpu", timeout_seconds=120, **options)
        parameters = list(model.parameters())
        made[name] = model, torch.optim.SGD(parameters, lr=1e-4) if parameters else None
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    moved: dict[str, list[list[int]]] = {name: [] for name in SIDES}
    for turn in range(repeats + 2):
        for name, (model, optimizer) in made.items():
            dist.barrier()
            before, start = counters(), time.perf_counter()
            model.train_step(batch)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            spent = over_ranks(time.perf_counter() - start, dist.ReduceOp.MAX)
            dist.barrier()
            after = counters()
            if turn > 1:  # later ones are alike
                seconds[name].append(spent)
                moved[name].append([after[way] - before[way] for way in (0, 1)])
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, moved)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "moved": told}))


def hosts(num: int, fast: float, slow: float) -> Topology:
    """Hosts of a device each: the first with a fast link, the others with slow ones."""
    type_ = device_types()["A100-SXM4-80GB"]
    links = [Link(bandwidth=fast if host == 0 else slow, latency=5e-5) for host in range(num)]
    nodes = [Node(name=f"host{host}", ranks=(host,), intra=None, inter=link) for host, link in enumerate(links)]
    devices = tuple(Device(rank=host, type=type_, name=f"gpu{host}", node=f"host{host}") for host in range(num))
    return Topology.of(Cluster(nodes=tuple(nodes), devices=devices))


def modelled() -> str:
    """Bytes of the busiest link and seconds by the cost model of processors, by number of hosts."""
    size, rows = 2**30, []
    for num in (2, 4, 8, 16, 32, 64):
        shares = [1.0] + [0.0] * (num - 1)
        cells = [str(num), f"{2 * (num - 1) / num:.2f}", f"{num - 1:.2f}"]
        for ratio in (1, num):
            topology, ranks = hosts(num, ratio * 1.25e9, 1.25e9), tuple(range(num))
            ring = collective(topology, "all_reduce", ranks, size).seconds
            terms, parameters = (
                owned_seconds(topology, kind, ranks, size, shares, collective(topology, kind, ranks, size))
                for kind in ("all_to_all", "all_gather")
            )
            cells += [f"{ring:.2f} s", f"{terms + parameters:.2f} s", f"{parameters:.2f} s"]
        rows.append(cells)
    head = ["hosts", "bytes of the busiest link: all-reduce", "one server"]
    for links in ("equal links", "the server's n times as fast"):
        head += [f"{links}: {way}" for way in ("all-reduce", "one server", "sums late")]
    return table(head, rows)


def main() -> None:
    if "RANK" in os.environ:
        run_rank(int(sys.argv[1]))
        return
    options = arguments(__doc__ or "", repeats=10)
    found = said_on_testbed(BED, __file__, options.repeats)
    size = 4 * LAYERS * WIDTH**2
    rows = []
    for name in SIDES:
        each = [
            [statistics.median(step[way] for step in of_rank[name]) / size for way in (0, 1)]
            for of_rank in found["moved"]
        ]
        spent = statistics.median(found["seconds"][name])
        ratios = [a / b for a, b in zip(found["seconds"][name], found["seconds"]["all-reduce"], strict=True)]
        fast, slow = max(each[0]), max(number for own in each[1:] for number in own)
        rows.append([name, f"{spent:.2f} s", f"{statistics.median(ratios):.2f}", f"{fast:.2f}", f"{slow:.2f}"])
    head = ["8 MiB of gradients", "step", "of all-reduce", "fast host, busier direction", "slow hosts, busiest"]
    text = (
        f"{table(head, rows)}\n\nBytes are multiples of the gradients'.\n\n## By the cost model, 1 GiB of gradients\n\n"
    )
    text += f"{modelled()}\n\nLinks of 10 Gbit/s; bytes are multiples of the gradients', in one direction."
    report("servers", options, text)


if __name__ == "__main__":
    main()
