"""A GPT whose state does not fit in equal shares, on three testbeds of mixed devices: does the found plan train, and
does FSDP2?

    sudo python benchmarks/uneven_memory.py --write 2026-11-26

A fast device has little memory, a slow one much. ``whale plan --zero 3 --state-shares auto`` plans for what a device
has beside the bytes of the process itself, which are measured first. Both sides then train with AdamW under the memory
limits of the devices (cgroups), and again with as much memory as each wants, where their steps alternate. FSDP2
(`fully_shard` of every block and the model) has equal shares of rows and of state. Both build the model on the meta
device, and both give memory back that they free: glibc's malloc keeps much of it, which no device does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from harness import in_turns, report, table
from layouts import large
from testbed import Description, Testbed
from testbed.bed import RankFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import whale
from whale.runtime.launch import initialize

ROOT = Path(__file__).parents[1]
MIB = 2**20
SPARE = 1.1
"""Limit of a device, in parts of what a plan and the process may use: allocators round up."""
PLENTY = 4096 * MIB
SIDES = ("whale", "fsdp2")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
TRIAL = {"layers": 2, "width": 64, "heads": 4}


@dataclass(frozen=True)
class Bed:
    """Devices by their parts of a core, and the MiB that each has for tensors."""

    cores: tuple[float, ...]
    mebibytes: tuple[int, ...]

    def description(self, limits: tuple[int, ...]) -> Description:
        lines = ["[links]", 'inter_node = {bandwidth = "10 Gbit/s"}']
        for rank in range(len(self.cores)):
            lines += ["[[nodes]]", f'device = "cpu-{rank}"']
        lines.append("[device_types]")
        for rank, (cores, limit) in enumerate(zip(self.cores, limits, strict=True)):
            lines.append(f'cpu-{rank} = {{cores = {cores}, memory = "{limit} B"}}')
        return Description.parse("\n".join(lines))


BEDS = {
    "one fast, one slow": Bed((0.75, 0.25), (400, 1400)),
    "two fast, one slow": Bed((0.5, 0.5, 0.25), (340, 340, 1400)),
    "three unlike": Bed((0.75, 0.35, 0.2), (360, 420, 1200)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="a GPT that does not fit in equal shares of memory")
    parser.add_argument("--only", default="", help="testbeds whose name contains this")
    parser.add_argument("--repeats", type=int, default=4, help="timed steps of each side")
    parser.add_argument("--trial", action="store_true", help="a small model: only to see that it runs")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    parser.add_argument("--ranks", choices=(*SIDES, "idle", "both"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trial:
        os.environ["SIZES"] = json.dumps(TRIAL)
    if options.ranks:
        on_a_rank(options.ranks, options.repeats)
        return
    rows = []
    for name, bed in BEDS.items():
        if options.only in name:
            rows.append(row(name, bed, options.repeats))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    heads = ("testbed", "cores", "MiB of tensors", "plan", "whale", "FSDP2", "steps without limits", "FSDP2 / whale")
    report("uneven_memory", options, table(heads, rows), f"sudo python benchmarks/{Path(__file__).name}")


def row(name: str, bed: Bed, repeats: int) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        plan, cluster = Path(folder, "plan.json"), Path(folder, "cluster.toml")
        cluster.write_text(bed.description(tuple(size * MIB for size in bed.mebibytes)).cluster_file())
        found = make_plan(cluster, plan)
        files = {"CLUSTER": str(cluster), "PLAN": str(plan), "SIZES": json.dumps(sizes())}
        plenty = tuple(PLENTY for _ in bed.cores)
        own = run(bed, plenty, "idle", files, 1)[0]
        limits = tuple(round(SPARE * (own + size * MIB)) for size in bed.mebibytes)
        said = []
        for side in SIDES:
            try:
                losses = run(bed, limits, side, files, repeats)
                said.append(f"trains: loss {losses[0]:.3f} to {losses[-1]:.3f}")
            except RankFailed as failed:
                over = "needed more than its memory" in str(failed)
                said.append(f"rank {failed.rank} is out of memory" if over else str(failed).splitlines()[-1])
        ours, theirs = run(bed, plenty, "both", files, repeats)
        return (
            name,
            ", ".join(map(str, bed.cores)),
            ", ".join(map(str, bed.mebibytes)),
            found,
            *said,
            f"{ours:.2f} s, {theirs:.2f} s",
            f"{theirs / ours:.2f}",
        )


def make_plan(cluster: Path, plan: Path) -> str:
    """Make the plan of replicas that divide rows and state by what their devices can, and say what it is."""
    command = [sys.executable, "-m", "whale", "plan", "--model", f"{ROOT}/benchmarks/layouts.py:large"]
    command += [word for name, size in sizes().items() for word in ("--set", f"{name}={size}")]
    command += ["--set", "layout=dp", "--cluster", str(cluster), "--zero", "3", "--state-shares", "auto"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "-o", str(plan)], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = done.stdout.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("stage "))
    return " ".join(lines[head + 1].split())


def sizes() -> dict[str, int]:
    """Sizes of the model that differ from its own."""
    found: dict[str, int] = json.loads(os.environ.get("SIZES", "{}"))
    return found


def run(bed: Bed, limits: tuple[int, ...], side: str, files: Mapping[str, str], repeats: int) -> list[float]:
    """Output of rank 0 of a side, on a testbed with these limits."""
    command = [sys.executable, __file__, "--ranks", side, "--repeats", str(repeats)]
    environment = {"PYTHONPATH": str(ROOT), **MALLOC, **files}
    with Testbed(bed.description(limits)) as testbed:
        done = testbed.run(command, timeout_seconds=1500, environment=environment, show=False)
    found: list[float] = json.loads(done.outputs[0].splitlines()[-1])
    return found


# --- on the ranks


def on_a_rank(side: str, repeats: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    initialize(timeout_seconds=600.0, device_type="cpu")
    if side == "idle":
        own = torch.tensor(float(bytes_of_process()))
        dist.all_reduce(own, dist.ReduceOp.MAX)
        found = [own.item()]
    elif side == "both":
        seconds = in_turns({"whale": whale_step(), "fsdp2": torch_step()}, repeats)
        found = [statistics.median(seconds[name]) for name in SIDES]
    else:
        step = whale_step() if side == "whale" else torch_step()
        found = [step() for _ in range(repeats)]
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def bytes_of_process() -> int:
    """Bytes of a process after a step of a model that is hardly any."""
    whale_step(is_planned=False, **TRIAL)()
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return (int(lines["VmHWM"].split()[0]) - int(lines["RssFile"].split()[0])) * 1024


def whale_step(*, is_planned: bool = True, **shape: int) -> Callable[[], float]:
    with torch.device("meta"):
        model, _ = large("dp", **(shape or sizes()))
    _, given = large(layers=1, width=64, heads=4)
    options: dict[str, Any] = {"plan": os.environ["PLAN"], "cluster": os.environ["CLUSTER"]} if is_planned else {}
    parallel = whale.parallelize(model, given, device="cpu", timeout_seconds=600, **options)
    optimizer = AdamW([{"params": list(parallel.parameters())}], lr=1e-4)

    def step() -> float:
        loss = parallel.train_step(**given).item()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def torch_step() -> Callable[[], float]:
    with torch.device("meta"):
        model: Any = large(**sizes())[0]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.tie_weights()
    optimizer = AdamW(model.parameters(), lr=1e-4)
    _, given = large(layers=1, width=64, heads=4)
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {name: x.tensor_split(size)[rank] for name, x in given.items()}

    def step() -> float:
        loss = model(**own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


if __name__ == "__main__":
    main()
