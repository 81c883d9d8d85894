"""Collectives that a script calls, `whale.all_reduce` and `whale.all_gather`, against torch's with gradients.

    python benchmarks/script_collectives.py --ranks 2 --write 2026-11-28

Forward and backward on gloo ranks of this machine, taking turns in one run; the median of the turns on rank 0. Whale's
calls begin with an exchange of what ranks give, which is what they cost more; torch's gather takes equal parts alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed.nn.functional as functional
from harness import report, table
from torch import Tensor

import whale

SIZES = (1 << 10, 1 << 16, 1 << 20)


def measured(turns: int) -> list[tuple[str, int, float, float]]:
    """Call, elements, and seconds of Whale's and of torch's."""
    whale.init(device="cpu")
    calls: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "all-reduce": (whale.all_reduce, functional.all_reduce),
        "all-gather": (whale.all_gather, lambda x: torch.cat(functional.all_gather(x))),
    }
    found = []
    for name, pair in calls.items():
        for size in SIZES:
            x = torch.randn(size, requires_grad=True)
            taken: tuple[list[float], list[float]] = ([], [])
            for _ in range(turns + 2):
                for call, of_call in zip(pair, taken, strict=True):
                    torch.distributed.barrier()
                    begin = time.perf_counter()
                    call(x).sum().backward()
                    of_call.append(time.perf_counter() - begin)
            found.append((name, size, *(statistics.median(of_call[2:]) for of_call in taken)))
    return found  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    rows = [
        (name, f"{size:,}", f"{1e3 * ours:.2f} ms", f"{1e3 * theirs:.2f} ms", f"{ours / theirs:.2f}")
        for name, size, ours, theirs in whale.launch(measured, options.turns, processes=options.ranks)
    ]
    head = ("forward and backward", "float32 elements", "Whale", "torch", "Whale / torch")
    command = f"python benchmarks/script_collectives.py --ranks {options.ranks} --turns {options.turns}"
    report("script_collectives", options, f"{options.ranks} ranks\n\n{table(head, rows)}", command)


if __name__ == "__main__":
    main()
