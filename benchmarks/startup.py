"""Time from a local model to the end of its first step, by part: GPT-2 with 24 layers on two ranks.

The seconds of a part exclude those of nested parts and are those of the slowest rank. A step of the wide model takes
seconds on one thread in any implementation, so the start-up time is the total minus the time of a later step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.export
from harness import arguments, on_two_ranks, over_ranks, report, table
from models import batch, gpt2

import whale
import whale.api
import whale.compile.compilation
import whale.compile.compile
import whale.compile.trace
import whale.graph.capture

TARGET_SECONDS = 10.0

PARTS = {
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


def main() -> None:
    options = arguments("from a local model to the end of its first step")
    on_two_ranks()
    clock = Clock()
    for part, (owner, name) in PARTS.items():
        clock.watch(part, owner, name)
    columns: dict[str, dict[str, float]] = {}
    cases: dict[str, tuple[dict[str, Any], int, int]] = {
        "replicate, 256 wide": ({"": whale.replicate()}, 256, 1),
        "split, 256 wide": ({"": whale.split()}, 256, 1),
        "two stages, 256 wide": ({"transformer.h.0": whale.stage(), "transformer.h.12": whale.stage()}, 256, 4),
        "split, 1024 wide": ({"": whale.split()}, 1024, 1),
    }
    for case, (scopes, width, micro_batches) in cases.items():
        if options.only not in case:
            continue
        model, whole = gpt2(width=width, layers=24), batch(4, 64)
        whale.annotate(model, scopes)
        clock.seconds.clear()
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        parallel = whale.api.parallelize(model, whole, micro_batches=micro_batches, device="cpu")
        before = time.perf_counter()
        parallel.train_step(**whole)
        stop, busy = time.perf_counter(), time.process_time() - used
        parallel.train_step(**whole)
        later = time.perf_counter() - stop
        column = {part: clock.seconds[part] for part in PARTS}
        column |= {"first step": stop - before, "a later step": later, "total": stop - start}
        column |= {"total without a step": stop - start - later, "processor time of the total": busy}
        columns[case] = {part: over_ranks(value, dist.ReduceOp.MAX) for part, value in column.items()}
        del parallel, model
    rows = [[part, *(f"{column[part]:.2f} s" for column in columns.values())] for part in next(iter(columns.values()))]
    met = ["yes" if column["total without a step"] < TARGET_SECONDS else "no" for column in columns.values()]
    rows.append([f"total without a step under {TARGET_SECONDS:.0f} s", *met])
    report("startup", options, table(("part", *columns), rows))


if __name__ == "__main__":
    main()
