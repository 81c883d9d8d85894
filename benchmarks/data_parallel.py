"""Step time of whale.replicate() relative to PyTorch's DistributedDataParallel: GPT-2, forward and backward, two ranks.

Both sides start with gradients of None and run without an optimizer. The loss of whale's step is the global one.
"""

from __future__ import annotations

import copy

import torch.distributed as dist
from harness import HEAD, arguments, on_two_ranks, report, side_by_side, table
from models import batch, gpt2
from torch.nn.parallel import DistributedDataParallel

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

    def whale_step() -> None:
        parallel.zero_grad()
        parallel.train_step(**whole)

    def torch_step() -> None:
        plain.zero_grad()
        plain(**part).loss.backward()

    row = side_by_side(
        "GPT-2, 4 layers, 256 wide, 8 x 128", whale_step, torch_step, repeats=options.repeats, target=1.03
    )
    report("data_parallel", options, table(HEAD, [row.cells()]))


if __name__ == "__main__":
    main()
