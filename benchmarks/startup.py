"""Time from a local model to the end of its first step, by part: GPT-2 with 24 layers on two ranks.

    python benchmarks/startup.py --write 2026-11-26
    git worktree add ../before 8439f05~1
    python benchmarks/startup.py --against ../before --write 2026-11-26

The second command measures the start-up relative to that of an earlier commit, in launches that take turns: 8439f05
made backwards graphs.

The seconds of a part exclude those of nested parts and are those of the slowest rank. A step of the wide model takes
seconds on one thread in any implementation, so the start-up time is the total minus the time of a later step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness import free_port, on_two_ranks, over_ranks, report, table
from models import batch, gpt2

import whale
import whale.api

TARGET_SECONDS = 10.0
TARGET_RATIO = 1.3
SIDES = ("this", "before")


def cases() -> dict[str, tuple[dict[str, Any], int, int]]:
    """Annotations, width and micro-batches."""
    return {
        "replicate, 256 wide": ({"": whale.replicate()}, 256, 1),
        "split, 256 wide": ({"": whale.split()}, 256, 1),
        "two stages, 256 wide": ({"transformer.h.0": whale.stage(), "transformer.h.12": whale.stage()}, 256, 4),
        "split, 1024 wide": ({"": whale.split()}, 1024, 1),
    }


def parts() -> Mapping[str, tuple[Any, str]]:
    """Functions of this commit, which others may not have."""
    import torch.export

    import whale.api
    import whale.compile.compilation
    import whale.compile.compile
    import whale.compile.trace

    return {
        "export": (torch.export, "export"),
        "decompositions": (torch.export.ExportedProgram, "run_decompositions"),
        "capture, the rest": (whale.compile.trace, "capture"),
        "partition": (whale.compile.trace, "partition"),
        "analysis": (whale.compile.trace, "analyse"),
        "trace, the rest": (whale.api, "trace"),
        "placement": (whale.compile.compile, "_place_stages"),
        "edges": (whale.compile.compile, "edges_between"),
        "lowering": (whale.compile.compilation.Compilation, "local_programs"),
        "check of all programs": (whale.compile.compilation.Compilation, "check"),
        "agreement": (whale.api, "agree"),
        "compilation, the rest": (whale.api, "compile_traced"),
        "parallelize, the rest": (whale.api, "parallelize"),
    }


class Clock:
    """Seconds by part, each without those inside of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = [0.0]

    def watch(self, part: str, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._inside.append(0.0)
            try:
                return original(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[part] += took - self._inside.pop()
                self._inside[-1] += took

        setattr(owner, name, timed)


def started(scopes: dict[str, Any], width: int, micro_batches: int) -> dict[str, float]:
    """Seconds of a start and of steps: of the slowest rank, and of the processors of both."""
    model, whole = gpt2(width=width, layers=24), batch(4, 64)
    whale.annotate(model, scopes)
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    parallel = whale.api.parallelize(model, whole, micro_batches=micro_batches, device="cpu")
    before = time.perf_counter()
    parallel.train_step(**whole)
    stop, busy = time.perf_counter(), time.process_time() - used
    parallel.train_step(**whole)
    later, busy_later = time.perf_counter() - stop, time.process_time() - used - busy
    found = {"first step": stop - before, "a later step": later, "total": stop - start}
    found = {name: over_ranks(seconds, dist.ReduceOp.MAX) for name, seconds in found.items()}
    found["total without a step"] = over_ranks(stop - start - later, dist.ReduceOp.MAX)
    found["processor time of both, without a step"] = over_ranks(busy - busy_later, dist.ReduceOp.SUM)
    return found


def by_part(options: argparse.Namespace) -> None:
    """Write a table of this commit's parts."""
    on_two_ranks()
    clock = Clock()
    for part, (owner, name) in parts().items():
        clock.watch(part, owner, name)
    columns: dict[str, dict[str, float]] = {}
    for case, given in cases().items():
        if options.only in case:
            clock.seconds.clear()
            found = started(*given)
            columns[case] = {part: over_ranks(clock.seconds[part], dist.ReduceOp.MAX) for part in parts()} | found
    rows = [[part, *(f"{column[part]:.2f} s" for column in columns.values())] for part in next(iter(columns.values()))]
    met = ["yes" if column["total without a step"] < TARGET_SECONDS else "no" for column in columns.values()]
    rows.append([f"total without a step under {TARGET_SECONDS:.0f} s", *met])
    report("startup", options, table(("part", *columns), rows))


def side(options: argparse.Namespace) -> None:
    """Write the measurements of a launch to a file."""
    on_two_ranks()
    found = {case: started(*given) for case, given in cases().items() if options.only in case}
    if dist.get_rank() == 0:
        Path(options.found).write_text(json.dumps(found))


def launched(tree: Path, only: str) -> dict[str, dict[str, float]]:
    """The measurements of two ranks of a tree."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
        command = [sys.executable, *run, __file__, "--found", str(found), "--only", only]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tree)}, check=True, stderr=subprocess.DEVNULL)
        measured: dict[str, dict[str, float]] = json.loads(found.read_text())
        return measured


def against(options: argparse.Namespace) -> None:
    """Write a table of ratios: medians of those of pairs of launches."""
    trees = dict(zip(SIDES, (Path(__file__).resolve().parents[1], options.against.resolve()), strict=True))
    pairs = []
    for number in range(options.repeats):
        order = SIDES if number % 2 else SIDES[::-1]
        pairs.append({name: launched(trees[name], options.only) for name in order})
    rows = []
    for case in pairs[0]["this"]:
        kinds = ("total without a step", "processor time of both, without a step")
        seconds = {kind: [[pair[name][case][kind] for name in SIDES] for pair in pairs] for kind in kinds}
        this, before = (statistics.median(of) for of in zip(*seconds[kinds[0]], strict=True))
        wall, processor = (statistics.median(a / b for a, b in seconds[kind]) for kind in kinds)
        met = "yes" if wall <= TARGET_RATIO else "no"
        ratios = (f"{wall:.3f}", f"{processor:.3f}", f"{TARGET_RATIO:.2f}", met)
        rows.append((case, f"{this:.2f} s", f"{before:.2f} s", *ratios))
    head = ("case", *SIDES, "this / before", "the same of processor time", "target", "met")
    report("startup_against", options, table(head, rows), "python benchmarks/startup.py --against ../before")


def main() -> None:
    parser = argparse.ArgumentParser(description="from a local model to the end of its first step")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of launches, with --against")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    parser.add_argument("--against", type=Path, help="a tree of another commit")
    parser.add_argument("--found", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.found:
        side(options)
    elif options.against is not None:
        against(options)
    else:
        by_part(options)


if __name__ == "__main__":
    main()
