"""Step time of parallelize(compile=True) relative to the same step without it, and to torch.compile of the local model.

    python benchmarks/compiled.py --write 2026-11-26

GPT-2 in one process with one thread. Whale compiles the operators between collectives, layer by layer, so that equal
layers are compiled once; torch.compile compiles the whole model. Products of matrices are the same kernels in all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from harness import HEAD, arguments, report, side_by_side, table
from models import batch, gpt2

import whale

WIDTHS = (64, 256)


def main() -> None:
    options = arguments("compiled kernels", repeats=40)
    torch.set_num_threads(1)
    whole, rows = batch(8, 128), []
    for width in WIDTHS:
        build = partial(gpt2, width=width, layers=2)
        compiled, eager = (whale.parallelize(build(), whole, device="cpu", compile=asked) for asked in (True, False))
        local = torch.compile(build())

        def step(model: whale.ParallelModule) -> Callable[[], None]:
            return lambda: (model.zero_grad(), model.train_step(**whole))

        def plain(model: torch.nn.Module = local) -> None:
            model.zero_grad()
            model(**whole).loss.backward()

        size = f"GPT-2, 2 layers, {width} wide, 8 x 128"
        for case, other, target in (("eager", step(eager), 0.85), ("torch.compile", plain, 1.0)):
            row = side_by_side(f"against {case}, {size}", step(compiled), other, repeats=options.repeats, target=target)
            rows.append(row.cells())
    report("compiled", options, table((HEAD[0], "compiled", "other", "compiled / other", *HEAD[4:]), rows))


if __name__ == "__main__":
    main()
