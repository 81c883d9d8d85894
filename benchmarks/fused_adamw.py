"""A step of AdamW: `whale.optim.FusedAdamW` against torch's AdamW, its ``foreach`` and its ``fused`` form.

python benchmarks/fused_adamw.py                       # GPT-2's parameters, on a GPU where there is one
python benchmarks/fused_adamw.py --parameters 30e6     # fewer layers, for a loaded machine

All take turns in one run, on copies of the same parameters and gradients; the median of the turns is shown. The limit
is the time to move the bytes that any form must, at the rate of a product in place in the same turns: 28 for each
parameter. In float32 the parameter, the gradient and two moments are read, and three of them written; with masters of
bfloat16 the gradient takes half, and the parameter is written besides its master. On a processor it is processor time,
which other jobs do not count in.

On a GPU two more columns tell what a step is bound by. *Host*: until the step returns, which is before the GPU is done.
*Device*: of the kernels alone, which the host has sent while the GPU was kept busy with something else; a step of more
than some hundred launches waits for the host there too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from whale.optim import FusedAdamW

WIDTH, VOCABULARY, POSITIONS = 768, 50257, 1024

BUSY = 100_000_000
"""Cycles that keep a GPU busy while the host sends a step: more than 50 ms."""


def shapes(target: float) -> list[tuple[int, ...]]:
    """Shapes as GPT-2's, with as many layers as come near a number of parameters."""
    layer: list[tuple[int, ...]] = [(WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    layer += [(WIDTH,), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)]
    size = sum(torch.Size(shape).numel() for shape in layer)
    whole: list[tuple[int, ...]] = [(VOCABULARY, WIDTH), (POSITIONS, WIDTH)]
    rest = sum(torch.Size(shape).numel() for shape in whole)
    if target < rest:
        whole = []
    return whole + layer * max(1, round((target - (rest if whole else 0)) / size))


def parameters(of: list[tuple[int, ...]], device: str, dtype: torch.dtype, flat: bool) -> list[nn.Parameter]:
    """Parameters with gradients; side by side in memory, as a stretch of ZeRO, if *flat*."""
    torch.manual_seed(0)
    sizes = [torch.Size(shape).numel() for shape in of]
    if flat:
        values, gradients = (torch.randn(sum(sizes), device=device, dtype=dtype).split(sizes) for _ in range(2))
    else:
        values, gradients = ([torch.randn(size, device=device, dtype=dtype) for size in sizes] for _ in range(2))
    made = [nn.Parameter(x.view(shape)) for x, shape in zip(values, of, strict=True)]
    for p, g in zip(made, gradients, strict=True):
        p.grad = g.view(p.shape)
    return made


def renewed(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Gives parameters new gradients at other addresses, as a backward does after ``zero_grad``."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    last: list[object] = []

    def renew() -> None:
        last[:] = [p.grad for p in own]  # whose memory is not free for the next ones
        for p in own:
            p.grad = p.grad.clone()

    return renew


class Contender(NamedTuple):
    """A form of the step, the bytes that it must move for each parameter, and what comes before each step."""

    name: str
    moved: int
    step: Callable[[], object]
    prepare: Callable[[], object] = int

    def seconds(self, device: str) -> dict[str, float]:
        """Seconds of a step, and on a GPU those of the host and of the kernels in it."""
        self.prepare()
        if device != "cuda":
            before = time.process_time()
            self.step()
            return {"step": time.process_time() - before}
        torch.cuda.synchronize()
        step, host = self._timed()
        torch.cuda._sleep(BUSY)
        self.prepare()
        kernels, _ = self._timed()
        return {"step": step, "host": host, "device": kernels}

    def _timed(self) -> tuple[float, float]:
        """Seconds between events around a step on the GPU, and until it returns."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        before = time.perf_counter()
        self.step()
        host = time.perf_counter() - before
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=124e6)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device, of = options.device, shapes(options.parameters)
    count = sum(torch.Size(shape).numel() for shape in of)

    def contender(
        name: str, kind: type[torch.optim.AdamW], flat: bool, dtype: torch.dtype, renews: bool = False, **settings: Any
    ) -> Contender:
        optimizer = kind(parameters(of, device, dtype, flat), lr=1e-4, **settings)
        return Contender(name, 28, optimizer.step, renewed(optimizer) if renews else int)

    numbers = torch.ones(count, device=device)
    low, wide = torch.bfloat16, torch.float32
    ours, theirs = FusedAdamW, torch.optim.AdamW
    product, fused = "product in place of as many float32", "torch AdamW, fused=True"
    contenders = [
        Contender(product, 8, lambda: numbers.mul_(1.0)),
        contender("torch AdamW, foreach=False", theirs, False, wide, foreach=False),
        contender("torch AdamW, foreach=True", theirs, False, wide, foreach=True),
        contender(fused, theirs, False, wide, fused=True),
        contender("FusedAdamW", ours, False, wide),
        contender("FusedAdamW, new gradients", ours, False, wide, renews=True),
        contender("FusedAdamW, one stretch", ours, True, wide),
        contender("FusedAdamW, bfloat16 with masters, one stretch", ours, True, low, masters=True),
    ]
    for one in contenders:
        one.step()  # makes states and compiles
    taken: dict[str, list[dict[str, float]]] = {one.name: [] for one in contenders}
    for _ in range(options.turns):
        for one in contenders:
            taken[one.name].append(one.seconds(device))
    medians = {
        name: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]} for name, turns in taken.items()
    }
    rate = 8 * count / medians[product]["step"]
    threads = f"{torch.get_num_threads()} threads"
    print(f"{count:,} parameters in {len(of)} tensors on {device}, torch {torch.__version__}, {threads}")
    print(f"a product in place moves {rate / 1e9:.1f} GB/s; median of {options.turns} turns")
    print()
    parts = [key for key in medians[product] if key != "step"]
    print("| | ms |" + "".join(f" {part} ms |" for part in parts) + " GB/s | of the limit | / torch fused |")
    print("|---" * (5 + len(parts)) + "|")
    for one in contenders:
        found = medians[one.name]
        seconds = found["step"]
        print(
            f"| {one.name} | {1e3 * seconds:.1f} |"
            + "".join(f" {1e3 * found[part]:.2f} |" for part in parts)
            + f" {one.moved * count / seconds / 1e9:.1f} | {100 * one.moved * count / rate / seconds:.0f}% "
            f"| {seconds / medians[fused]['step']:.2f} |"
        )


if __name__ == "__main__":
    main()
