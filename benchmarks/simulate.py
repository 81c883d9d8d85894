"""Error of the simulator on real programs whose tasks only sleep, on four ranks.

The workload is known exactly, so differences come from the simulator's model of the executor: what waits for what.
Tasks do not use the processor, so the machine may be small. They are long, so that the executor's overhead and other
load count for little. Links are the machine's loopback and count as infinitely fast.

    python benchmarks/simulate.py [--repeats 5] [--write DATE]
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor

from whale.ir.program import project
from whale.ir.workload import Boundary, LinkTime, StageWork, Transfer, Workload
from whale.planner.schedules.orders import SCHEDULES
from whale.planner.simulation.simulate import order_of, programs_of, simulate
from whale.runtime.executor import Executor
from whale.runtime.local_program import Wait, there

RANKS = 4
RESULTS = Path(__file__).parent / "results"
UNLIKE = ((0.050, 0.100), (0.075, 0.120), (0.030, 0.070), (0.060, 0.150))
EQUAL = ((0.050, 0.100),) * RANKS
MICRO_BATCHES = 8


class SleepingStage:
    """A stage whose tasks last as the workload says: half of a backward is for the weights."""

    on_gradient: Callable[[Tensor], None] | None = None
    parameters = ()

    def __init__(self, index: int, work: StageWork, last: bool) -> None:
        self.work = work
        self.outputs = ("loss",) if last else (f"boundary{index}",)

    def waits(self, micro_batch: int) -> bool:
        return False

    def forward(self, micro_batch: int, received: tuple[Tensor, ...], wait: Wait = there) -> tuple[Tensor, ...]:
        time.sleep(self.work.forward[0])
        return (torch.zeros(() if self.outputs == ("loss",) else (1,)),)

    def forward_to_train(
        self, micro_batch: int, received: tuple[Tensor, ...], wait: Wait = there
    ) -> tuple[tuple[Tensor, ...], None]:
        return self.forward(micro_batch, received, wait), None

    def backward(self, micro_batch: int, kept: None, seeds: Sequence[Tensor | None]) -> tuple[()]:
        time.sleep(self.work.backward[0])
        return ()

    def backward_of_inputs(self, micro_batch: int, kept: None, seeds: Sequence[Tensor | None]) -> tuple[()]:
        time.sleep(self.work.backward[0] - self.work.weights[0])
        return ()

    def backward_of_weights(self, micro_batch: int, kept: None) -> None:
        time.sleep(self.work.weights[0])


def workload_of(schedule: str, times: tuple[tuple[float, float], ...], micro_batches: int) -> Workload:
    chunks = 2 if schedule == "interleaved" else 1
    stages = [
        StageWork(
            ranks=(stage % RANKS,),
            forward=(times[stage % RANKS][0] / chunks,),
            backward=(times[stage % RANKS][1] / chunks,),
            weights=(times[stage % RANKS][1] / chunks / 2,),
            kept_bytes=(0,),
        )
        for stage in range(RANKS * chunks)
    ]
    if schedule.startswith("zero"):  # the first stage has no inputs to work for: its I takes nothing, its W all
        stages[0] = stages[0].model_copy(update={"weights": stages[0].backward})
    hops = [(stage % RANKS, (stage + 1) % RANKS) for stage in range(len(stages) - 1)]
    return Workload(
        world_size=RANKS,
        micro_batches=micro_batches,
        schedule=schedule,
        stages=tuple(stages),
        boundaries=tuple(
            Boundary(
                source_stage=stage,
                target_stage=stage + 1,
                forward=(Transfer(source=a, target=b, bytes=0),),
                backward=(Transfer(source=b, target=a, bytes=0),),
            )
            for stage, (a, b) in enumerate(hops)
        ),
        links=tuple(
            LinkTime(source=a, target=b, latency=0.0, bandwidth=1e9)
            for a, b in sorted({pair for a, b in hops for pair in ((a, b), (b, a))})
        ),
        runs_ahead=False,
    )


def executor_of(workload: Workload, rank: int) -> Executor:
    stages, edges, _ = programs_of(workload)
    edges = [replace(edge, dtype="float32") for edge in edges]
    mine = {
        index: SleepingStage(index, work, index == len(stages) - 1)
        for index, work in enumerate(workload.stages)
        if rank in work.ranks
    }
    return Executor(rank=rank, program=project(order_of(workload), stages, edges)[rank], edges=edges, stages=mine)


def measured(executor: Executor) -> float:
    """Seconds from the first rank's start to the last rank's end; all read one clock."""
    dist.barrier()
    times = torch.tensor([-time.perf_counter(), 0.0], dtype=torch.float64)
    executor.run(train=True)
    times[1] = time.perf_counter()
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", port]
        raise SystemExit(subprocess.run([*launch, *sys.argv], check=False).returncode)
    dist.init_process_group("gloo")
    rows, errors = [], []
    for label, times in (("equal stages", EQUAL), ("unlike stages", UNLIKE)):
        for schedule in SCHEDULES:
            workload = workload_of(schedule, times, MICRO_BATCHES)
            executor = executor_of(workload, dist.get_rank())
            executor.run(train=True)
            seconds = statistics.median(measured(executor) for _ in range(options.repeats))
            expected = simulate(workload).step_seconds
            errors.append(seconds / expected - 1)
            rows.append(
                f"| {label}, {schedule} | {expected * 1e3:.1f} ms | {seconds * 1e3:.1f} ms | {errors[-1]:+.1%} |"
            )
    if dist.get_rank() == 0:
        mean = statistics.fmean(map(abs, errors))
        table = ["| case | simulated | measured | difference |", "|---|---|---|---|", *rows]
        summary = f"Mean absolute difference {mean:.1%}, largest {max(map(abs, errors)):.1%}."
        print("\n".join([*table, "", summary]))
        if options.write:
            write(table, summary, options)
    dist.destroy_process_group()


def write(table: list[str], summary: str, options: argparse.Namespace) -> None:
    text = str(__doc__).partition("\n\n    python")[0]
    lines = ["# Simulated and executed steps", "", text, "", *table, "", summary, ""]
    lines += [
        f"- {RANKS} ranks, {os.cpu_count()} cores, shared with other work (load {os.getloadavg()[0]:.0f} at the end)",
        f"- {MICRO_BATCHES} micro-batches, median of {options.repeats} steps",
        f"- versions: torch {torch.__version__}, Python {sys.version.split()[0]}",
        f"- command: `python benchmarks/simulate.py --repeats {options.repeats}`",
        f"- date: {options.write}",
        "",
    ]
    (RESULTS / f"simulate_2-core-cpu-vm_{options.write}.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
