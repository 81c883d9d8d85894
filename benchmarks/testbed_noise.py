"""Noise of emulated devices, and the cost of messages: four devices of a half and a quarter of a core.

    sudo python benchmarks/testbed_noise.py            # about three minutes, on a machine that does nothing else

The rate of matrix products (256 x 256) of each device while the others wait, and while all compute; spread is the
distance from the slowest to the fastest window, as a share of the mean. Then what a send and an all-reduce take, the
processor time of the busiest rank, and how much longer a computation of two seconds takes with the same all-reduces
beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from harness import report, table
from testbed import Description, Testbed

BED = """
[links]
inter_node = {{bandwidth = "{rate}"}}
[[nodes]]
count = 2
device = "half"
[[nodes]]
count = 2
device = "quarter"
[device_types]
half = {{cores = {half}, memory = "2 GiB"}}
quarter = {{cores = {quarter}, memory = "2 GiB"}}
"""
RATES = ("1 Gbit/s", "200 Mbit/s")
SIZES = (2**10, 2**16, 2**20, 2**22, 2**24)
SPEED_HEAD = ("who computes", "products/s of ranks 0 to 3", "spread of 0.2 s", "spread of 2 s")
LINK_HEAD = ("link", "bytes", "send", "processor", "all-reduce of 4", "processor", "2 s of products, with all-reduces")


def main() -> None:
    parser = argparse.ArgumentParser(description="how steady emulated devices are, and what messages take")
    parser.add_argument("--repeats", type=int, default=5, help="windows of two seconds")
    parser.add_argument("--trial", action="store_true", help="small quotas: the times mean nothing")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    if "RANK" in os.environ:
        on_a_rank(options.repeats)
        return
    quotas = {"half": 0.2, "quarter": 0.1} if options.trial else {"half": 0.5, "quarter": 0.25}
    speeds: list[Sequence[str]] = []
    links: list[Sequence[str]] = []
    for rate in RATES:
        with Testbed(Description.parse(BED.format(rate=rate, **quotas))) as testbed:
            done = testbed.run(
                [sys.executable, __file__, "--repeats", str(options.repeats)],
                timeout_seconds=400,
                environment={"PYTHONPATH": str(Path(__file__).parents[1])},
                show=False,
            )
        found = json.loads(done.outputs[0].splitlines()[-1])
        if rate == RATES[0]:
            speeds += found["speeds"]
        links += [(rate, *row) for row in found["links"]]
    report("testbed_noise", options, table(SPEED_HEAD, speeds) + "\n\n" + table(LINK_HEAD, links))


# --- on the ranks


def on_a_rank(repeats: int) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    x = torch.randn(256, 256)

    def product() -> object:
        return x @ x

    speeds = []
    for who in (0, 2, None):
        dist.barrier()
        rates = windows(product, repeats) if who in (rank, None) else []
        speeds.append(speed_row(who, rates))
    # about two seconds of products on this machine
    count = round(2 * statistics.mean(windows(product, 1)))
    alone, _ = timed(lambda: [product() for _ in range(count)])
    rows = []
    for size in SIZES:
        message = torch.ones(size // 4)
        times = max(1, min(20, 2**23 // size))
        send = timed(lambda message=message, times=times: [exchange(message, rank) for _ in range(times)])
        reduce = timed(lambda message=message, times=times: [dist.all_reduce(message) for _ in range(times)])

        def beside(message: torch.Tensor = message, times: int = times) -> None:
            works = [dist.all_reduce(message, async_op=True) for _ in range(times)]
            for _ in range(count):
                product()
            for work in works:
                work.wait()

        both, _ = timed(beside)
        cells = [f"{seconds / times * 1e3:.2f} ms" for seconds in (*send, *reduce)]
        rows.append((f"{size}", *cells, f"{both / alone - 1:+.1%} ({times / both:.1f} a second)"))
    if rank == 0:
        print(json.dumps({"speeds": speeds, "links": rows}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def exchange(message: torch.Tensor, rank: int) -> None:
    """From the first rank to the third."""
    if rank == 0:
        dist.send(message, 2)
    elif rank == 2:
        dist.recv(message, 0)


def windows(run: Callable[[], object], repeats: int) -> list[float]:
    """Runs a second, in windows of 0.2 s, ten for each repeat."""
    rates = []
    for _ in range(10 * repeats):
        start, runs = time.perf_counter(), 0
        while time.perf_counter() < start + 0.2:
            run()
            runs += 1
        rates.append(runs / (time.perf_counter() - start))
    return rates


def speed_row(who: int | None, rates: Sequence[float]) -> tuple[str, ...]:
    """The rates of all ranks that computed, and their largest spreads."""
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, list(rates))
    shown, short, long = [], 0.0, 0.0
    for rank, found in enumerate(each):
        if not found:
            continue
        joined = [statistics.mean(found[start : start + 10]) for start in range(0, len(found), 10)]
        shown.append(f"{rank}: {statistics.mean(found):.0f}")
        short, long = max(short, spread(found)), max(long, spread(joined))
    return ("all" if who is None else f"rank {who}", ", ".join(shown), f"{short:.1%}", f"{long:.1%}")


def spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.mean(values)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the slowest rank, and processor seconds of the busiest."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    run()
    mine = torch.tensor([time.perf_counter() - start, time.process_time() - used], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return tuple(mine.tolist())


if __name__ == "__main__":
    main()
