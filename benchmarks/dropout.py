"""Dropout by position against torch's: masks of a million elements, and steps of a GPT with dropout in its attention.

    python benchmarks/dropout.py --write 2026-11-25

Sides take turns in one process with one thread. Whale runs two micro-batches, because a single process with one draws
as the local model does; the local model runs the same two.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import HEAD, arguments, report, side_by_side, table
from models import batch, gpt2

import whale
from whale.cli.model_loader import load_model
from whale.runtime.random import RNGPosition, SeededDropout, column_numbers, row_numbers

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CPU = torch.device("cpu")
SIDE = 1024
SIZES: dict[str, object] = {"layers": 12, "hidden": 128, "heads": 4, "seq": 128, "vocab": 512, "batch_size": 8}


def mask_row(repeats: int) -> tuple[str, ...]:
    """A forward of each, on a float32 tensor."""
    x, ranges = torch.randn(SIDE, SIDE), (((0, SIDE),),) * 2
    rows, columns = row_numbers(ranges, (SIDE, SIDE), CPU), column_numbers(ranges, CPU)
    dropout = SeededDropout(0.1, 1, RNGPosition(0), with_mask=False)
    one, other = lambda: dropout(rows, columns, x), lambda: F.dropout(x, 0.1, training=True)
    return side_by_side("dropout, 1M elements", one, other, repeats=repeats, target=1.0).cells()


def step_row(repeats: int) -> tuple[str, ...]:
    """Whale's step with dropout against its step without."""
    sides = []
    for dropout in (0.1, 0.0):
        loaded = load_model(f"{EXAMPLES}/models/gpt.py:gpt", {**SIZES, "dropout": dropout}, device="cpu")
        parallel = whale.parallelize(loaded.model, loaded.batch, device="cpu", micro_batches=2)
        sides.append(lambda parallel=parallel, batch=loaded.batch: (parallel.zero_grad(), parallel.train_step(**batch)))
    case = "GPT of 12 layers, with dropout everywhere against without"
    return side_by_side(case, sides[0], sides[1], repeats=repeats, target=1.1).cells()


def attention_row(width: int, repeats: int) -> tuple[str, ...]:
    """Whale's step with dropout in attention alone against its step without."""
    sides, whole = [], batch(8, 128)
    for dropout in (0.1, 0.0):
        model = gpt2(width=width, layers=12, attention_dropout=dropout)
        parallel = whale.parallelize(model, whole, device="cpu", micro_batches=2)
        sides.append(lambda parallel=parallel: (parallel.zero_grad(), parallel.train_step(**whole)))
    case = f"GPT-2 of 12 layers, {width} wide, with dropout in attention against without"
    return side_by_side(case, sides[0], sides[1], repeats=repeats, target=1.1).cells()


def local_row(repeats: int) -> tuple[str, ...]:
    """Whale's step with dropout against the local model's."""
    loaded = load_model(f"{EXAMPLES}/models/gpt.py:gpt", {**SIZES, "dropout": 0.1}, device="cpu")
    local = load_model(f"{EXAMPLES}/models/gpt.py:gpt", {**SIZES, "dropout": 0.1}, device="cpu").model
    parallel = whale.parallelize(loaded.model, loaded.batch, device="cpu", micro_batches=2)
    parts = [{name: x.chunk(2)[i] for name, x in loaded.batch.items()} for i in range(2)]

    def plain() -> None:
        local.zero_grad()
        for part in parts:
            (local(**part) / 2).backward()

    def step() -> None:
        parallel.zero_grad()
        parallel.train_step(**loaded.batch)

    case = "GPT of 12 layers with dropout everywhere, against the local model"
    return side_by_side(case, step, plain, repeats=repeats, target=1.0).cells()


def main() -> None:
    options = arguments("dropout by position against torch's")
    torch.set_num_threads(1)
    makes = (mask_row, *(partial(attention_row, width) for width in (128, 256)), step_row, local_row)
    rows = [make(options.repeats) for make in makes]
    report("dropout", options, table(HEAD, rows))


if __name__ == "__main__":
    main()
