"""Step time of one process relative to the plain model: GPT-2, forward and backward."""

from __future__ import annotations

import copy
import warnings

import torch
from harness import HEAD, arguments, report, side_by_side, table
from models import batch, gpt2

import whale


def main() -> None:
    options = arguments("whale on one process against the plain module")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for width in (64, 256):
        model, whole = gpt2(width=width), batch(4, 128)
        plain = copy.deepcopy(model)
        parallel = whale.parallelize(model, whole, device="cpu")

        def whale_step(parallel=parallel, whole=whole) -> None:
            parallel.zero_grad()
            parallel.train_step(**whole)

        def torch_step(plain=plain, whole=whole) -> None:
            plain.zero_grad()
            plain(**whole).loss.backward()

        case = f"GPT-2, 4 layers, {width} wide, 4 x 128"
        rows.append(side_by_side(case, whale_step, torch_step, repeats=options.repeats, target=1.03).cells())
    report("single", options, table(HEAD, rows))


if __name__ == "__main__":
    main()
