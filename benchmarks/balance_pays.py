"""Speed-up of balanced over even shares on four emulated devices of speeds 2:2:1:1.

    sudo python benchmarks/balance_pays.py              # about ten minutes, on a machine that does nothing else
    sudo python benchmarks/balance_pays.py --trial      # small models and quotas: only to see that it runs

Both sides, and PyTorch's own parallelism with even shares, alternate step by step in the same processes; a gain is the
median of the ratios within a round. The ideal follows from the shares alone, without communication: of the batch for
data parallelism, of units for tensor parallelism, and for the pipeline the timeline of both cuts with the seconds of
embedding, block and head measured on each device just before. The balanced cut is the best of all cuts by that
timeline.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from harness import in_turns, report, table
from models import batch, gpt2
from pipeline import Part, by_hand, next_token_loss, step_by_hand
from testbed import Description, Testbed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import whale
from whale.ir.workload import Boundary, LinkTime, StageWork, Transfer, Workload
from whale.planner.simulation.simulate import simulate

BED = """
[links]
inter_node = {{bandwidth = "10 Gbit/s"}}
[[nodes]]
count = 2
device = "fast"
[[nodes]]
count = 2
device = "slow"
[device_types]
fast = {{cores = {fast}, memory = "4 GiB"}}
slow = {{cores = {slow}, memory = "4 GiB"}}
"""
SPEEDS = (2, 2, 1, 1)
TARGETS = {"data": 0.95, "pipeline": 0.90, "tensor": 0.90}
HEAD = ("case", "balanced", "even", "gain", "ideal", "of the ideal", "target", "met", "torch, even", "gain over torch")
SIDES = ("balanced", "even", "torch")
ACTIVATION = "gelu"
"""Attention in one kernel; unfused, a step waits for memory bandwidth, which all emulated devices share."""

Sides = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description="balanced against even shares on devices of speeds 2:2:1:1")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each side")
    parser.add_argument("--only", choices=list(CASES), help="this case alone")
    parser.add_argument("--trial", action="store_true", help="small models and quotas: the times mean nothing")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    if "RANK" in os.environ:
        on_a_rank(options)
        return
    quotas = {"fast": 0.2, "slow": 0.1} if options.trial else {"fast": 0.5, "slow": 0.25}
    description = Description.parse(BED.format(**quotas))
    rows = []
    with tempfile.TemporaryDirectory() as folder, Testbed(description) as testbed:
        cluster = Path(folder, "cluster.toml")
        cluster.write_text(description.cluster_file())
        for case in [options.only] if options.only else CASES:
            arguments = ["--only", case, "--repeats", str(options.repeats), *(["--trial"] if options.trial else [])]
            environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "CLUSTER": str(cluster)}
            done = testbed.run(
                [sys.executable, __file__, *arguments], timeout_seconds=600, environment=environment, show=False
            )
            found = json.loads(done.outputs[0].splitlines()[-1])
            rows.append(row(case, found))
            print(f"{case}: {done.seconds:.0f} s. {json.dumps(found)}", file=sys.stderr, flush=True)
    report("balance_pays", options, table(HEAD, rows))


def row(case: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    seconds, ideal, target = found["seconds"], found["ideal"], TARGETS[case]
    balanced, even, plain = (statistics.median(seconds[side]) if side in seconds else None for side in SIDES)
    gain = ratio(seconds["even"], seconds["balanced"])
    cells = [found["case"], f"{balanced:.3f} s", f"{even:.3f} s", f"{gain:.3f}", f"{ideal:.3f}", f"{gain / ideal:.1%}"]
    cells += [f"{target:.0%}", "yes" if gain >= target * ideal else "no"]
    if plain is None:
        return (*cells, "", "")
    return (*cells, f"{plain:.3f} s", f"{ratio(seconds['torch'], seconds['balanced']):.3f}")


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


# --- on the ranks


def on_a_rank(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case, sides, ideal = CASES[options.only](options.trial)
    seconds = in_turns(sides, 2 if options.trial else options.repeats)
    if dist.get_rank() == 0:
        print(json.dumps({"case": case, "ideal": ideal, "seconds": seconds}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def step_of(model: nn.Module, whole: dict[str, Tensor], *, balanced: bool, **options: Any) -> Callable[[], object]:
    """A step of Whale: "balanced" knows the speeds of the devices, "even" assumes equal devices."""
    cluster = os.environ["CLUSTER"] if balanced else None
    parallel = whale.parallelize(model, whole, cluster=cluster, device="cpu", timeout_seconds=300, **options)

    def step() -> None:
        parallel.zero_grad()
        parallel.train_step(**whole)

    return step


def data_parallel(trial: bool) -> tuple[str, Sides, float]:
    layers, width, rows, length = (2, 64, 12, 32) if trial else (6, 256, 48, 256)
    model, whole = gpt2(width=width, layers=layers, length=length, activation=ACTIVATION), batch(rows, length)
    plain = DistributedDataParallel(copy.deepcopy(model))
    each, rank = rows // len(SPEEDS), dist.get_rank()
    part = {name: tensor[each * rank : each * (rank + 1)] for name, tensor in whole.items()}
    whale.annotate(model, {"": whale.replicate()})

    def torch_step() -> None:
        plain.zero_grad()
        plain(**part).loss.backward()

    even = step_of(copy.deepcopy(model), whole, balanced=False)
    sides = {"balanced": step_of(model, whole, balanced=True), "even": even, "torch": torch_step}
    case = f"data parallel, GPT-2 of {layers} x {width}, batch {rows} x {length}"
    return case, sides, sum(SPEEDS) / (len(SPEEDS) * min(SPEEDS))


def tensor_parallel(trial: bool) -> tuple[str, Sides, float]:
    layers, width, heads, rows, length = (1, 96, 12, 2, 32) if trial else (1, 3072, 24, 4, 192)
    model = gpt2(width=width, layers=layers, length=length, heads=heads, activation=ACTIVATION)
    whole = batch(rows, length)
    whale.annotate(model, {"": whale.split()})
    even = step_of(copy.deepcopy(model), whole, balanced=False)
    sides = {"balanced": step_of(model, whole, balanced=True), "even": even}
    units = [heads * speed // sum(SPEEDS) for speed in SPEEDS]
    ideal = (heads / len(SPEEDS) / min(SPEEDS)) / max(u / s for u, s in zip(units, SPEEDS, strict=True))
    return f"tensor parallel, GPT-2 of {layers} x {width}, {heads} heads, batch {rows} x {length}", sides, ideal


def pipeline(trial: bool) -> tuple[str, Sides, float]:
    layers, width, length, micro_batches, rows = (8, 64, 32, 4, 2) if trial else (12, 256, 128, 12, 4)
    model = gpt2(width=width, layers=layers, length=length, activation=ACTIVATION)
    whole = batch(rows * micro_batches, length)
    times = layer_times(model, {name: tensor[:rows] for name, tensor in whole.items()})
    even = (layers // len(SPEEDS),) * len(SPEEDS)
    best = min(cuts(layers, len(SPEEDS)), key=lambda cut: ideal_seconds(cut, times, micro_batches))
    module, schedule = by_hand(copy.deepcopy(model), even, micro_batches)

    def torch_step() -> None:
        module.zero_grad()
        step_by_hand(schedule, whole)

    def of(cut: Sequence[int]) -> Callable[[], object]:
        cut_model = copy.deepcopy(model)
        starts = [sum(cut[:stage]) for stage in range(len(cut))]
        whale.annotate(cut_model, {f"transformer.h.{start}": whale.stage() for start in starts})
        return step_of(cut_model, whole, balanced=True, micro_batches=micro_batches)

    sides = {"balanced": of(best), "even": of(even), "torch": torch_step}
    ideal = ideal_seconds(even, times, micro_batches) / ideal_seconds(best, times, micro_batches)
    shape = f"{'-'.join(map(str, best))} against {'-'.join(map(str, even))} layers"
    return (
        f"pipeline, GPT-2 of {layers} x {width}, {micro_batches} micro-batches of {rows} x {length}, {shape}",
        sides,
        ideal,
    )


CASES = {"data": data_parallel, "pipeline": pipeline, "tensor": tensor_parallel}


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every division of the layers into stages of at least one."""
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple(last - first for first, last in pairwise((0, *ends, layers)))


Times = list[dict[str, list[float]]]
"""For each rank the seconds of forward and backward of the embeddings, a block and the head."""


def ideal_seconds(cut: Sequence[int], times: Times, micro_batches: int) -> float:
    """Seconds of a step of 1F1B with that cut, with no communication."""
    last = len(cut) - 1
    stages, boundaries, links = [], [], []
    for stage, layers in enumerate(cut):
        parts = [("block", layers), ("embedding", stage == 0), ("head", stage == last)]
        forward, backward = (sum(count * times[stage][name][kind] for name, count in parts) for kind in (0, 1))
        work = {"forward": (forward,), "backward": (backward,), "weights": (0.0,), "kept_bytes": (0,)}
        stages.append(StageWork(ranks=(stage,), **work))
        if stage < last:
            there, back = (stage, stage + 1), (stage + 1, stage)
            forward, backward = ((Transfer(source=a, target=b, bytes=0),) for a, b in (there, back))
            boundaries.append(Boundary(source_stage=stage, target_stage=stage + 1, forward=forward, backward=backward))
            links += [LinkTime(source=a, target=b, latency=0.0, bandwidth=1e12) for a, b in (there, back)]
    return simulate(
        Workload(
            world_size=len(cut),
            micro_batches=micro_batches,
            stages=tuple(stages),
            boundaries=tuple(boundaries),
            links=tuple(links),
        )
    ).step_seconds


def layer_times(model: nn.Module, part: dict[str, Tensor], seconds: float = 3.0) -> Times:
    """Measure the kinds of layers on every rank at the same time, on a micro-batch, each for the given seconds."""
    whole = Part(copy.deepcopy(model), 0, len(model.transformer.h))
    tokens, block = part["input_ids"], whole.blocks[0]
    embedded = (whole.wte(tokens) + whole.wpe(torch.arange(tokens.shape[1]))).detach().requires_grad_()

    def embed() -> Tensor:
        return whole.wte(tokens) + whole.wpe(torch.arange(tokens.shape[1]))

    def run_block() -> Tensor:
        output = block(embedded)
        return output[0] if isinstance(output, tuple) else output

    def head() -> Tensor:
        return next_token_loss(whole.head(whole.ln_f(embedded)), part["labels"])

    mine = {"embedding": _times(embed, seconds), "block": _times(run_block, seconds), "head": _times(head, seconds)}
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, mine)
    return each


def _times(forward: Callable[[], Tensor], seconds: float) -> list[float]:
    """Mean seconds of forward and backward; sums over some time, for a quota is granted in slices."""
    output = forward()
    seed = torch.ones_like(output)
    output.backward(seed)
    spent, turns = [0.0, 0.0], 0
    while sum(spent) < seconds:
        start = time.perf_counter()
        output = forward()
        middle = time.perf_counter()
        output.backward(seed)
        spent[0] += middle - start
        spent[1] += time.perf_counter() - middle
        turns += 1
    return [each / turns for each in spent]


if __name__ == "__main__":
    main()
