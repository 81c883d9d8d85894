"""A step of AdamW: `whale.optim.FusedAdamW` against torch's AdamW, its ``foreach`` and its ``fused`` form.

python benchmarks/fused_adamw.py                       # GPT-2's parameters, on a GPU where there is one
python benchmarks/fused_adamw.py --parameters 30e6     # fewer layers, for a loaded machine

All take turns in one run, on copies of the same parameters and gradients; the median of the turns is shown. The limit
is the time to move the bytes that any form must, at the rate of a product in place in the same turns: 28 for each
parameter. In float32 the parameter, the gradient and two moments are read, and three of them written; with masters of
bfloat16 the gradient takes half, and the parameter is written besides its master. On a processor it is processor time,
which other jobs do not count in.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from whale.optim import FusedAdamW

WIDTH, VOCABULARY, POSITIONS = 768, 50257, 1024


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=124e6)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device, of = options.device, shapes(options.parameters)
    count = sum(torch.Size(shape).numel() for shape in of)

    def seconds(step: Callable[[], object]) -> float:
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        before = time.process_time()
        step()
        return time.process_time() - before

    def contender(
        kind: type[torch.optim.AdamW], flat: bool, dtype: torch.dtype, **settings: object
    ) -> Callable[[], object]:
        return kind(parameters(of, device, dtype, flat), lr=1e-4, **settings).step  # type: ignore[arg-type]

    numbers = torch.ones(count, device=device)

    def scaled() -> Tensor:
        return numbers.mul_(1.0)

    low, wide = torch.bfloat16, torch.float32
    makers: list[tuple[str, int, Callable[[], Callable[[], object]]]] = [
        ("product in place of as many float32", 8, lambda: scaled),
        ("torch AdamW, foreach=False", 28, lambda: contender(torch.optim.AdamW, False, wide, foreach=False)),
        ("torch AdamW, foreach=True", 28, lambda: contender(torch.optim.AdamW, False, wide, foreach=True)),
        ("torch AdamW, fused=True", 28, lambda: contender(torch.optim.AdamW, False, wide, fused=True)),
        ("FusedAdamW", 28, lambda: contender(FusedAdamW, False, wide)),
        ("FusedAdamW, one stretch", 28, lambda: contender(FusedAdamW, True, wide)),
        ("FusedAdamW, bfloat16 with masters, one stretch", 28, lambda: contender(FusedAdamW, True, low, masters=True)),
    ]
    steps = []
    for name, moved, make in makers:
        step = make()
        step()  # makes states and compiles
        steps.append((name, moved, step))
    taken: dict[str, list[float]] = {name: [] for name, _, _ in steps}
    for _ in range(options.turns):
        for name, _, step in steps:
            taken[name].append(seconds(step))
    medians = {name: statistics.median(of_one) for name, of_one in taken.items()}
    rate = 8 * count / medians["product in place of as many float32"]
    fused = medians["torch AdamW, fused=True"]
    threads = f"{torch.get_num_threads()} threads"
    print(f"{count:,} parameters in {len(of)} tensors on {device}, torch {torch.__version__}, {threads}")
    print(f"a product in place moves {rate / 1e9:.1f} GB/s; median of {options.turns} turns")
    print()
    print("| | ms | GB/s | of the limit | / torch fused |")
    print("|---|---|---|---|---|")
    for name, moved, _ in steps:
        seconds_of_one = medians[name]
        limit = moved * count / rate
        print(
            f"| {name} | {1e3 * seconds_of_one:.1f} | {moved * count / seconds_of_one / 1e9:.1f} "
            f"| {100 * limit / seconds_of_one:.0f}% | {seconds_of_one / fused:.2f} |"
        )


if __name__ == "__main__":
    main()
