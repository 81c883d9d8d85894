"""Step time of parallelize(compile=True) relative to the same step without it, and to torch.compile of the local model.

    python benchmarks/compiled.py --write 2026-11-27

GPT-2 in one process with one thread; the local models take all rows at once. Whale compiles the operators between
collectives, layer by layer, so that equal layers are compiled once; torch.compile compiles the whole model. Masks of
dropout are hashes of positions wherever rows are divided, and are compiled into what reads them; with all rows at once
they are torch's own draws, which nothing makes faster. Products of matrices are the same kernels in all, so that wider
models gain less: the last rows of a size are torch.compile of the local model against the model itself, and the
products of a step alone, against Whale's step without compile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import HEAD, arguments, report, side_by_side, table
from models import WORDS, batch, gpt2
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import whale


class Size(NamedTuple):
    """Sizes of a GPT-2 and its batch of eight rows, and the micro-batches of Whale's step."""

    width: int
    layers: int
    length: int
    dropout: float = 0.0
    words: int = WORDS
    micro_batches: int = 1

    def __str__(self) -> str:
        drops = f", dropout {self.dropout}" if self.dropout else ""
        parts = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"GPT-2, {self.layers} layers, {self.width} wide, 8 x {self.length}{parts}{drops}"

    def model(self) -> nn.Module:
        """The model."""
        return gpt2(width=self.width, layers=self.layers, length=self.length, dropout=self.dropout, words=self.words)


SIZES = (Size(64, 2, 128), Size(192, 4, 64, 0.1, words=512, micro_batches=2), Size(192, 4, 64, 0.1), Size(256, 2, 128))

aten = torch.ops.aten

Batch = dict[str, Tensor]


class _Products(TorchDispatchMode):
    """The products of matrices that run, and the shapes of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[object, tuple[tuple[torch.Size, tuple[int, ...]], ...]]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm):
            self.calls[func.overloadpacket, tuple((x.shape, x.stride()) for x in args)] += 1
        return func(*args, **(kwargs or {}))


def products(step: Callable[[], object]) -> Callable[[], None]:
    """The products of a step, on tensors in the layouts of theirs."""
    with _Products() as mode:
        step()
    calls = [
        (operator, [torch.empty_strided(*kind).normal_() for kind in kinds], count)
        for (operator, kinds), count in mode.calls.items()
    ]

    def run() -> None:
        for operator, operands, count in calls:
            for _ in range(count):
                operator(*operands)

    return run


def main() -> None:
    options = arguments("compiled kernels", repeats=40)
    torch.set_num_threads(1)
    rows = []
    for size in SIZES:
        if options.only not in str(size):
            continue
        whole = batch(8, size.length, size.words)
        compiled, eager = (
            whale.parallelize(size.model(), whole, device="cpu", compile=asked, micro_batches=size.micro_batches)
            for asked in (True, False)
        )
        local: Any = torch.compile(size.model())
        itself = size.model()

        def step(model: whale.ParallelModule, whole: Batch = whole) -> Callable[[], None]:
            return lambda: (model.zero_grad(), model.train_step(**whole))

        def plain(model: Any = local, whole: Batch = whole) -> None:
            model.zero_grad()
            model.train()(**whole).loss.backward()

        for case, other, target in (("eager", step(eager), 0.85), ("torch.compile", plain, 1.0)):
            row = side_by_side(f"against {case}, {size}", step(compiled), other, repeats=options.repeats, target=target)
            rows.append(row.cells())
        mine = step(eager)
        others = (
            ("torch.compile against the model itself", plain, partial(plain, itself)),
            ("products alone, against eager", products(mine), mine),
        )
        for case, one, other in others:
            row = side_by_side(f"{case}, {size}", one, other, repeats=options.repeats, target=1.0).cells()
            rows.append((*row[:-2], "", ""))
    report("compiled", options, table((HEAD[0], "compiled", "other", "compiled / other", *HEAD[4:]), rows))


if __name__ == "__main__":
    main()
