"""Weak and strong scaling of spatial parallelism: the 3D U-Net of ``examples/unet3d.py`` on 1, 2 and 4 emulated hosts.

    python benchmarks/spatial_scaling.py --write 2026-11-27             # as root: a testbed

Every host has a device of 0.4 of a core and a link of 1 Gbit/s. ``whale.split(dim=2)`` gives each rank a slab of the
two volumes of a batch: of a batch of one, torch computes small parts by another, slower algorithm than the whole.
Strong: volumes of 64 x 64 x 64 on all; weak: 16 x 64 x 64 for each rank. Rounds of launches on
1, 2 and 4 hosts follow one another; a step is the forward, the backward and SGD, its time that of the slowest rank, and
its processor time that of the busiest one, without waits; both are of the fastest step of all rounds, which other load
of the machine changes least. Losses of the first step are compared. Bytes are the counters of each host's network
interface.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, over_ranks, report, said_on_testbed, table
from servers import counters

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from unet3d import UNet

import whale

BED = """
[links]
inter_node = {bandwidth = "1 Gbit/s"}
[[nodes]]
count = NUM
devices = 1
device = "part"
[device_types]
part = {cores = 0.4, memory = "2 GiB"}
"""

SIZE, SLAB, STEPS = 64, 16, 6
NUMS = (1, 2, 4)


def run_rank() -> None:
    """One rank: both volumes, and a line of JSON on the first one."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    size = int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}
    for name, depth in (("strong", SIZE), ("weak", SLAB * size)):
        torch.manual_seed(0)
        model, shape = UNet(), (depth, SIZE, SIZE)
        batch = {"volume": torch.randn(2, 1, *shape), "labels": torch.randint(3, (2, *shape))}
        whale.annotate(model, {"": whale.split(dim=2)})
        made: Any = whale.parallelize(model, batch, device="cpu", timeout_seconds=120)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.01, momentum=0.9)
        losses, seconds, busy, moved = [], [], [], []
        for _ in range(STEPS + 2):
            if dist.is_initialized():
                dist.barrier()
            before, start, used = counters(), time.perf_counter(), time.process_time()
            losses.append(made.train_step(**batch).item())
            optimizer.step()
            optimizer.zero_grad()
            spent, used = time.perf_counter() - start, time.process_time() - used
            seconds.append(over_ranks(spent, dist.ReduceOp.MAX))
            busy.append(over_ranks(used, dist.ReduceOp.MAX))
            moved.append(over_ranks(counters()[1] - before[1], dist.ReduceOp.MAX))
        found[name] = [min(own[2:]) for own in (seconds, busy, moved)] + [losses[0]]
    if os.environ["RANK"] == "0":
        print(json.dumps(found))


def launched(num: int) -> dict[str, list[float]]:
    """Seconds of a step, processor seconds, the most bytes that a host sends and the first loss, of each volume."""
    found: dict[str, list[float]] = said_on_testbed(BED.replace("NUM", str(num)), __file__)
    return found


def main() -> None:
    if "RANK" in os.environ:
        run_rank()
        return
    options = arguments(__doc__ or "", repeats=3)
    rounds = [{num: launched(num) for num in NUMS} for _ in range(options.repeats)]
    rows = []
    for name, depth in (("strong", f"{SIZE}"), ("weak", f"{SLAB} a rank")):
        for num in NUMS:
            most, cells = 1.0 if name == "weak" else float(num), []
            for which in (0, 1):
                base, seconds = (min(own[count][name][which] for own in rounds) for count in (1, num))
                ratio = base / seconds
                cells += [f"{seconds * 1e3:.0f} ms", f"{ratio:.2f}", f"{ratio / most:.2f}"]
            moved = rounds[0][num][name][2] / 2**20
            rows.append((name, f"{depth} x {SIZE} x {SIZE}", str(num), *cells, f"{moved:.2f} MiB"))
    losses = [own[num]["strong"][3] for own in rounds for num in NUMS]
    error = max(abs(loss - losses[0]) / losses[0] for loss in losses)
    of_one = ("one rank's / this", "of ideal")
    head = ("scaling", "volume", "ranks", "step", *of_one, "processor time", *of_one, "a host sends")
    report(
        "spatial_scaling",
        options,
        f"{table(head, rows)}\n\nFirst losses of the same volumes differ by {error:.0e}, in float32.",
    )


if __name__ == "__main__":
    main()
