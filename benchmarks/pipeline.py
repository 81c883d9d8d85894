"""Is a pipeline of whale.stage() as fast as one written by hand with torch.distributed.pipelining? Two stages, 1F1B.

The torch side cuts GPT-2 into two modules of Hugging Face blocks, which use causal attention without a mask; the tied
weight is not summed there. The loss is the mean of the micro-batches' losses on both sides.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import HEAD, arguments, on_two_ranks, report, side_by_side, table
from models import batch, gpt2
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import whale

MICRO_BATCHES = 8


class First(nn.Module):
    """Embeddings and the first half of the blocks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        inner = model.transformer
        self.wte, self.wpe, self.blocks = inner.wte, inner.wpe, inner.h[: len(inner.h) // 2]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = _first(block(x))
        return x


class Last(nn.Module):
    """The second half of the blocks and the head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        inner = model.transformer
        self.blocks, self.ln_f, self.head = inner.h[len(inner.h) // 2 :], inner.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = _first(block(x))
        return self.head(self.ln_f(x))


def _first(output: object) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten())


def by_hand(model: nn.Module):
    rank = dist.get_rank()
    stage = PipelineStage((First, Last)[rank](model), rank, 2, torch.device("cpu"))
    return stage.submod, Schedule1F1B(stage, MICRO_BATCHES, loss_fn=next_token_loss)


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
        if dist.get_rank() == 0:
            schedule.step(whole["input_ids"])
        else:
            schedule.step(target=whole["labels"], losses=[])

    case = "GPT-2, 4 layers, 256 wide, 8 micro-batches of 1 x 128"
    row = side_by_side(case, whale_step, torch_step, repeats=options.repeats, target=1.03)
    report("pipeline", options, table(HEAD, [row.cells()]))


if __name__ == "__main__":
    main()
