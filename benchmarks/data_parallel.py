"""Step time of whale.replicate() relative to PyTorch's DistributedDataParallel: GPT-2 on two ranks.

The loss of whale's step is the global one. Cases: forward and backward; a training loop with AdamW; the same with the
gradients of two batches, which both sides sum over ranks after each.
"""

from __future__ import annotations

import copy
from functools import partial

import torch.distributed as dist
from harness import HEAD, arguments, on_two_ranks, report, side_by_side, table
from models import batch, gpt2
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import whale


def main() -> None:
    options = arguments("whale.replicate() against DistributedDataParallel")
    on_two_ranks()
    model, whole = gpt2(), batch(8, 128)
    plain = DistributedDataParallel(copy.deepcopy(model))
    whale.annotate(model, {"": whale.replicate()})
    parallel = whale.parallelize(model, whole, device="cpu")
    rank = dist.get_rank()
    part = {name: tensor[4 * rank : 4 * rank + 4] for name, tensor in whole.items()}

    sides = {"whale": (parallel, AdamW(parallel.parameters())), "torch": (plain, AdamW(plain.parameters()))}

    def backward(side: str) -> None:
        if side == "whale":
            parallel.train_step(**whole)
        else:
            plain(**part).loss.backward()

    def step(side: str, batches: int, update: bool) -> None:
        model, optimizer = sides[side]
        model.zero_grad()
        for _ in range(batches):
            backward(side)
        if update:
            optimizer.step()

    size, rows = "GPT-2, 4 layers, 256 wide, 8 x 128", []
    for case, batches, update in (
        ("forward and backward", 1, False),
        ("with AdamW", 1, True),
        ("two batches and AdamW", 2, True),
    ):
        if options.only in case:
            one, other = (partial(step, side, batches, update) for side in sides)
            rows.append(side_by_side(f"{case}, {size}", one, other, repeats=options.repeats, target=1.0).cells())
    report("data_parallel", options, table(HEAD, rows))


if __name__ == "__main__":
    main()
