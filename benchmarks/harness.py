"""Shared code of the benchmarks: two gloo ranks, alternating steps of several implementations, and a table.

Steps of all sides alternate in the same processes, in changing order, so that other load of the machine affects all of
them. Only ratios are meaningful on a shared machine; the seconds show the scale.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results"
HARDWARE = "2-core-cpu-vm"

TWO_HOSTS = """
[links]
inter_node = {bandwidth = "100 Mbit/s"}
[[nodes]]
count = 2
devices = 1
device = "part"
[device_types]
part = {cores = 0.75, memory = "2 GiB"}
"""
"""A testbed of two hosts, each with a part of the processors, and a slow link between them."""


@dataclass(frozen=True)
class Row:
    """A measured case: medians of both sides, and the largest accepted ratio."""

    case: str
    whale: float
    torch: float
    target: float
    unit: str = "s"
    ratio_median: float | None = None
    processor_ratio: float | None = None  # of the processor seconds of all ranks

    @property
    def ratio(self) -> float:
        return self.ratio_median if self.ratio_median is not None else self.whale / self.torch

    def cells(self) -> tuple[str, ...]:
        scale, unit = (1e3, "ms") if self.unit == "s" else (1 / 2**20, "MiB")
        met = "yes" if self.ratio <= self.target else "no"
        values = (f"{self.whale * scale:.1f} {unit}", f"{self.torch * scale:.1f} {unit}", f"{self.ratio:.3f}")
        processor = "" if self.processor_ratio is None else f"{self.processor_ratio:.3f}"
        return (self.case, *values, processor, f"{self.target:.2f}", met)


HEAD = ("case", "whale", "torch", "whale / torch", "the same of processor time", "target", "met")


def arguments(description: str, **repeats: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=repeats.get("repeats", 20), help="timed steps of each side")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    return parser.parse_args()


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def on_two_ranks() -> None:
    """Start this file again as two ranks, unless it is one already; then join the other."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            str(free_port()),
            *sys.argv,
        ]
        raise SystemExit(subprocess.call(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}))
    dist.init_process_group("gloo")


def over_ranks(number: float, op: dist.ReduceOp.RedOpType) -> float:
    """The largest or the sum over all ranks."""
    if not dist.is_initialized():
        return number
    value = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(value, op=op)
    return value.item()


def side_by_side(
    case: str,
    whale: Callable[[], object],
    plain: Callable[[], object],
    *,
    repeats: int,
    target: float,
    after: Callable[[], object] = lambda: None,
) -> Row:
    """Alternate both sides, in changing order; a ratio is the median of the ratios of pairs. *after* each is not timed.

    The time of a step is that of the slowest rank. Its processor time is that of all ranks; other load disturbs it
    less, and it excludes waiting.
    """
    for _ in range(3):
        whale(), after(), plain(), after()
    wall: dict[int, list[float]] = {0: [], 1: []}
    busy: dict[int, list[float]] = {0: [], 1: []}
    for repeat in range(repeats):
        for side in (0, 1) if repeat % 2 else (1, 0):
            if dist.is_initialized():
                dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            (whale, plain)[side]()
            wall_seconds, busy_seconds = time.perf_counter() - start, time.process_time() - used
            wall[side].append(over_ranks(wall_seconds, dist.ReduceOp.MAX))
            busy[side].append(over_ranks(busy_seconds, dist.ReduceOp.SUM))
            after()
    ratios = [statistics.median(a / b for a, b in zip(of[0], of[1], strict=True)) for of in (wall, busy)]
    medians = [statistics.median(wall[side]) for side in (0, 1)]
    return Row(case, *medians, target, ratio_median=ratios[0], processor_ratio=ratios[1])


def in_turns(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step of each side, of the slowest rank; the sides take turns to begin a round."""
    for side in sides.values():
        side()
    found: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            sides[name]()
            found[name].append(over_ranks(time.perf_counter() - start, dist.ReduceOp.MAX))
    return found


def said_on_testbed(bed: str, script: str, *given: object) -> Any:
    """The JSON that the first rank of a script says last, on the testbed of a description; as root."""
    from testbed import Description, Testbed

    command = [sys.executable, str(Path(script).resolve()), *map(str, given)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with Testbed(Description.parse(bed)) as testbed:
        done = testbed.run(command, timeout_seconds=1200, environment=environment, show=False)
    return json.loads(done.outputs[0].strip().splitlines()[-1])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def report(what: str, options: argparse.Namespace, text: str, command: str = "") -> None:
    """Print a table on the first rank, and write it with the command, hardware and versions."""
    if int(os.environ.get("RANK", "0")):
        return
    print(text, flush=True)
    if not options.write:
        return
    document = (sys.modules["__main__"].__doc__ or "").strip()
    repeats = f" --repeats {options.repeats}" if hasattr(options, "repeats") else ""
    lines = [
        f"# {what.replace('_', ' ').capitalize()}",
        "",
        document,
        "",
        text,
        "",
        f"- hardware: {_processor()}, {os.cpu_count()} cores, shared with other work; one thread a rank",
        f"- versions: torch {torch.__version__}, transformers {version('transformers')}, "
        f"Python {platform.python_version()}",
        f"- command: `{command or f'python benchmarks/{Path(sys.argv[0]).name}'}{repeats}`",
        f"- date: {options.write}",
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{what}_{HARDWARE}_{options.write}.md").write_text("\n".join(lines))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
