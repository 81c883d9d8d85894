"""Step time of whale.stage() relative to a hand-written pipeline with torch.distributed.pipelining: two stages, 1F1B.

The torch side cuts GPT-2 into two modules of Hugging Face blocks, which use causal attention without a mask; the tied
weight is not summed there. The loss is the mean of the micro-batches' losses on both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import HEAD, arguments, on_two_ranks, report, side_by_side, table
from models import batch, gpt2
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import whale

MICRO_BATCHES = 8


class Part(nn.Module):
    """The blocks from *first* to *last*; the first stage includes the embeddings and the last one the head."""

    def __init__(self, model: nn.Module, first: int, last: int) -> None:
        super().__init__()
        inner = model.transformer
        self.blocks = inner.h[first:last]
        self.wte, self.wpe = (inner.wte, inner.wpe) if first == 0 else (None, None)
        self.ln_f, self.head = (inner.ln_f, model.lm_head) if last == len(inner.h) else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.wte is not None:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = _first(block(x))
        return x if self.head is None else self.head(self.ln_f(x))


def _first(output: object) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten())


def by_hand(
    model: nn.Module,
    layers: Sequence[int] = (2, 2),
    micro_batches: int = MICRO_BATCHES,
    *,
    part: Callable[[nn.Module, int, int], nn.Module] = Part,
    loss: Callable[[Tensor, Tensor], Tensor] = next_token_loss,
):
    """This rank's stage, with its number of layers from *layers*, and the schedule that runs it."""
    rank, ends = dist.get_rank(), list(accumulate(layers, initial=0))
    stage = PipelineStage(part(model, ends[rank], ends[rank + 1]), rank, len(layers), torch.device("cpu"))
    return stage.submod, Schedule1F1B(stage, micro_batches, loss_fn=loss)


def step_by_hand(schedule: Schedule1F1B, whole: dict[str, Tensor]) -> None:
    """One step: the first rank has the tokens, or whatever is first in the batch, the last one the labels."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    inputs = (next(iter(whole.values())),) if rank == 0 else ()
    schedule.step(*inputs, **({"target": whole["labels"], "losses": []} if rank == last else {}))


def main() -> None:
    options = arguments("whale.stage() against torch.distributed.pipelining", repeats=12)
    on_two_ranks()
    model, whole = gpt2(), batch(8, 128)
    module, schedule = by_hand(copy.deepcopy(model))
    whale.annotate(model, {"transformer.h.0": whale.stage(), "transformer.h.2": whale.stage()})
    parallel = whale.parallelize(model, whole, micro_batches=MICRO_BATCHES, device="cpu")

    def whale_step() -> None:
        parallel.zero_grad()
        parallel.train_step(**whole)

    def torch_step() -> None:
        module.zero_grad()
        step_by_hand(schedule, whole)

    case = "GPT-2, 4 layers, 256 wide, 8 micro-batches of 1 x 128"
    row = side_by_side(case, whale_step, torch_step, repeats=options.repeats, target=1.03)
    report("pipeline", options, table(HEAD, [row.cells()]))


if __name__ == "__main__":
    main()
