"""Time that Inductor takes for 48 equal layers, relative to 1 and 4: parallelize(compile=True) compiles them once, and
time of the next start.

    python benchmarks/compile_time.py --write 2026-11-26

GPT-2, 64 wide, in one process with one thread. Each case is a process of its own, whose compiler has no files of other
ones; another one follows with the files of the first, as other ranks and later starts have. Processor time includes
that of the C++ compilers that it starts. The time is that of compiling the kernels and running each program once. A
first layer, one in the middle and a last one differ in what enters and leaves them, so that 4 layers have all functions
that 48 have.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

LAYERS = (1, 4, 48)
TARGET = 1.25


def seconds() -> tuple[float, float]:
    """Seconds of the clock, and of the processor with those of compilers."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in used)


def one(layers: int) -> dict[str, Any]:
    """Compile one model."""
    import torch
    from models import batch, gpt2

    import whale
    from whale.compile import builder, kernels

    torch.set_num_threads(1)
    model, whole = gpt2(width=64, layers=layers, length=32), batch(2, 32)
    made: list[tuple[float, float]] = []
    functions = 0

    def timed(original: Any, **kinds: Any) -> Any:
        def call(*args: Any) -> Any:
            begin = seconds()
            try:
                return original(*args)
            finally:
                end = seconds()
                made.append((end[0] - begin[0], end[1] - begin[1]))

        return call

    builder.Builder._with_kernels = timed(builder.Builder._with_kernels)  # type: ignore[method-assign]
    compiled = kernels.Kernel._compiled

    def counted(kernel: Any, tensors: Any) -> Any:
        nonlocal functions
        functions += 1
        return compiled(kernel, tensors)

    kernels.Kernel._compiled = counted  # type: ignore[method-assign]
    whale.parallelize(model, whole, device="cpu", compile=True)
    [(wall, processor)] = made
    return {"wall": wall, "processor": processor, "functions": functions}


def started(layers: int) -> dict[str, Any]:
    """A process that compiles one model; ``again`` are the seconds of the clock of another one with its files."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--layers", str(layers)]
        runs = [subprocess.run(command, env=os.environ | own, check=True, capture_output=True) for _ in range(2)]
        first, again = (json.loads(run.stdout.decode().splitlines()[-1]) for run in runs)
        return {**first, "again": again["wall"]}


def main() -> None:
    from harness import report, table

    parser = argparse.ArgumentParser(description="time of compiled kernels")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each size")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    parser.add_argument("--layers", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layers:
        print(json.dumps(one(options.layers)))
        return
    rounds = [{layers: started(layers) for layers in LAYERS} for _ in range(options.repeats)]
    rows = []
    for layers in LAYERS:
        wall, again, processor = (
            statistics.median(of[layers][kind] for of in rounds) for kind in ("wall", "again", "processor")
        )
        most = LAYERS[-1]
        ratios = [statistics.median(of[most][k] / of[layers][k] for of in rounds) for k in ("wall", "processor")]
        target = (f"{TARGET:.2f}", "yes" if ratios[1] <= TARGET else "no") if layers == LAYERS[1] else ("", "")
        functions = str(rounds[0][layers]["functions"])
        times = f"{wall:.1f} s", f"{again:.1f} s", f"{processor:.1f} s"
        rows.append((str(layers), functions, *times, *map("{:.3f}".format, ratios), *target))
    head = (
        "layers",
        "functions",
        "time",
        "the next start",
        "processor time",
        "48 layers / these",
        "the same of processor time",
    )
    report("compile_time", options, table((*head, "target", "met"), rows))


if __name__ == "__main__":
    main()
