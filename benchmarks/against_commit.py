"""Time of a step relative to that of an earlier commit of Whale: two ranks of each, whose steps alternate.

    git worktree add ../before 2c65541
    python benchmarks/against_commit.py ../before

Each side runs its own package in processes of its own, with the same models and batches. A side steps while the other
waits; the ratio is the median of the ratios of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from harness import report, table

HERE = Path(__file__).parents[1]
SIDES = ("this", "before")


def models() -> dict[str, tuple[Callable[[], tuple[object, dict[str, object]]], int]]:
    """Models and batches by name, and for how many steps one is repeated."""
    import torch
    import transformers
    from models import batch, gpt2

    def vit() -> tuple[object, dict[str, object]]:
        config = transformers.ViTConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=32,
            patch_size=8, num_labels=10,
        )  # fmt: skip
        torch.manual_seed(0)
        images = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 10, (8,))}
        return transformers.ViTForImageClassification(config), images

    return {
        "ViT, 4 layers, 64 wide, 8 images of 32 x 32": (vit, 10),
        "GPT-2, 4 layers, 256 wide, 8 x 128": (lambda: (gpt2(), batch(8, 128)), 1),
    }


def rank(side: str, number: int, repeats: int) -> None:
    """One rank of a side: it steps when it is its turn."""
    import torch
    import torch.distributed as dist

    import whale

    torch.set_num_threads(1)
    turns = dist.TCPStore("127.0.0.1", int(os.environ["TURNS"]), is_master=False, timeout=timedelta(seconds=300))
    dist.init_process_group("gloo")
    for name, (build, count) in models().items():
        model, given = build()
        whale.annotate(model, {"": whale.replicate()})  # type: ignore[arg-type]
        parallel = whale.parallelize(model, given, device="cpu")  # type: ignore[arg-type]
        for repeat in range(-3, repeats):
            order = SIDES if repeat % 2 else SIDES[::-1]
            turns.wait([f"{name} {repeat} {order[0]}"] if side == order[1] else [f"{name} {repeat}"])
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            for _ in range(count):
                parallel.train_step(**given)
            taken = torch.tensor([time.perf_counter() - start, 0.0], dtype=torch.float64)
            taken[1] = time.process_time() - used
            most = taken.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX)
            dist.all_reduce(taken)
            if number == 0:
                if repeat >= 0:
                    turns.set(f"{side} {name} {repeat}", json.dumps([most[0].item() / count, taken[1].item() / count]))
                turns.set(f"{name} {repeat} {side}" if side == order[0] else f"{name} {repeat + 1}", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="a tree of the earlier commit")
    parser.add_argument("--repeats", type=int, default=30, help="timed pairs")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    parser.add_argument("--rank", nargs=2, metavar=("SIDE", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank[0], int(options.rank[1]), options.repeats)
        return
    import torch.distributed as dist

    turns = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=900))
    jobs = []
    for side, tree in zip(SIDES, (HERE, options.before.resolve()), strict=True):
        rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            **os.environ, "PYTHONPATH": f"{tree}:{HERE / 'benchmarks'}", "TURNS": str(turns.port), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        for number in range(2):
            own = {"RANK": str(number), "LOCAL_RANK": str(number)}
            command = [sys.executable, __file__, str(options.before), "--repeats", str(options.repeats), "--rank", side]
            jobs.append((subprocess.Popen([*command, str(number)], env={**common, **own}), rendezvous))
    rows = []
    for name in models():
        turns.set(f"{name} -3", "")
        found = {
            side: [json.loads(turns.get(f"{side} {name} {repeat}")) for repeat in range(options.repeats)]
            for side in SIDES
        }
        medians = [statistics.median(wall for wall, _ in found[side]) for side in SIDES]
        ratios = [
            statistics.median(this[which] / before[which] for this, before in zip(*found.values(), strict=True))
            for which in (0, 1)
        ]
        rows.append(
            (name, *(f"{1e3 * median:.1f} ms" for median in medians), *(f"{ratio:.3f}" for ratio in ratios), "1.01")
        )
    for job, _ in jobs:
        job.wait()
    commit = subprocess.check_output(["git", "-C", options.before, "rev-parse", "--short", "HEAD"], text=True).strip()
    head = ("case", "this", f"before ({commit})", "this / before", "the same of processor time", "target")
    report("against_commit", options, table(head, rows))


if __name__ == "__main__":
    main()
