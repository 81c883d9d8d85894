"""Tensor memory of a rank relative to PyTorch's own parallelism: two ranks, forward and backward.

Live bytes are those of every tensor storage, with the parameters and what the other side keeps for itself. A step's
peak is taken five times after the first step, and the least counts, because a thread of gloo may hold a buffer for some
milliseconds after its use. The peak is the larger of the two ranks, and for the pipeline also each of them. The torch
sides are those of the speed benchmarks.
"""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist
from harness import HEAD, Row, arguments, on_two_ranks, over_ranks, report, table
from live_bytes import LiveBytes, living, peak_of
from models import batch, gpt2, llama
from pipeline import MICRO_BATCHES, by_hand, step_by_hand
from tensor_parallel import megatron
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import whale


def whale_peak(
    model: nn.Module, whole: dict[str, Tensor], others: frozenset[int], annotations: dict[str, Any], micro_batches: int
) -> int:
    whale.annotate(model, annotations)
    parallel = whale.parallelize(model, whole, micro_batches=micro_batches, device="cpu")
    del model

    def step() -> None:
        parallel.zero_grad()
        parallel.train_step(**whole)

    with LiveBytes(others) as live:
        return peak_of(step, live)


def data_parallel_peak(model: nn.Module, whole: dict[str, Tensor], others: frozenset[int]) -> int:
    with LiveBytes(others) as live:
        plain = DistributedDataParallel(model)
        rank = dist.get_rank()
        part = {name: tensor[4 * rank : 4 * rank + 4] for name, tensor in whole.items()}

        def step() -> None:
            plain.zero_grad()
            plain(**part).loss.backward()

        return peak_of(step, live)


def tensor_parallel_peak(model: nn.Module, whole: dict[str, Tensor], others: frozenset[int]) -> int:
    with LiveBytes(others) as live:
        plain = megatron(model)
        gc.collect()

        def step() -> None:
            plain.zero_grad()
            plain(**whole).loss.backward()

        return peak_of(step, live)


def pipeline_peak(model: nn.Module, whole: dict[str, Tensor], others: frozenset[int]) -> int:
    with LiveBytes(others) as live:
        module, schedule = by_hand(model)
        del model

        def step() -> None:
            module.zero_grad()
            step_by_hand(schedule, whole)

        return peak_of(step, live)


def main() -> None:
    options = arguments("live bytes of a rank against torch's own parallelism")
    on_two_ranks()
    stages = {"transformer.h.0": whale.stage(), "transformer.h.2": whale.stage()}
    cases = {
        "data parallel, GPT-2 256 wide, 8 x 128": (gpt2, data_parallel_peak, {"": whale.replicate()}, batch(8, 128), 1),
        "tensor parallel, Llama 256 wide, 2 x 64": (
            llama,
            tensor_parallel_peak,
            {"": whale.split()},
            batch(2, 64, 64),
            1,
        ),
        "pipeline, GPT-2 256 wide, 8 x 128": (gpt2, pipeline_peak, stages, batch(8, 128), MICRO_BATCHES),
    }
    rows = []
    for name, (make, torch_peak, scopes, whole, micro_batches) in cases.items():
        if options.only not in name:
            continue
        others = frozenset(living())
        ours = whale_peak(make(), whole, others, scopes, micro_batches)
        others = frozenset(living())
        theirs = torch_peak(make(), whole, others)
        each: list[Any] = [None, None]
        dist.all_gather_object(each, (ours, theirs))
        most = [over_ranks(float(peak), dist.ReduceOp.MAX) for peak in (ours, theirs)]
        rows.append(Row(name, *most, 1.0, unit="B").cells())
        if "pipeline" in name:
            rows += [Row(f"{name}, rank {r}", *map(float, e), 1.0, unit="B").cells() for r, e in enumerate(each)]
    report("memory", options, table(HEAD, rows))


if __name__ == "__main__":
    main()
