"""Special lowerings: operators whose sharded form is not the operator itself on a part.

A form refuses arguments that it does not handle where its rule is made, never here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.runtime.collectives import Group


class VocabularyEmbedding(nn.Module):
    """Look-up in rows ``[start, start + size)`` of a table; other indices give zeros, so the ranks' results add up.

    Megatron-LM (Shoeybi et al. 2019, section 3): the vocabulary-parallel embedding.
    """

    def __init__(self, start: int, size: int) -> None:
        super().__init__()
        self.start, self.size = start, size

    def forward(self, weight: Tensor, index: Tensor) -> Tensor:
        """*weight* (size, e), *index* (...) of the whole vocabulary -> (..., e), a term of the sum over ranks."""
        local = index - self.start
        outside = (local < 0) | (local >= self.size)
        found = torch.nn.functional.embedding(local.masked_fill(outside, 0), weight)
        return found.masked_fill(outside.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        """Rows held."""
        return f"rows {self.start}:{self.start + self.size}"


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, ignore: int, group: Group) -> Tensor:
        size = logits.shape[1]
        if size:
            highest = logits.amax(dim=1)
        else:
            highest = logits.new_full((logits.shape[0],), -torch.inf)
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - highest.unsqueeze(1)
        local = target - start
        kept = target != ignore
        inside = (local >= 0) & (local < size) & kept
        column = local.masked_fill(~inside, 0).unsqueeze(1)
        picked = shifted.gather(1, column).squeeze(1) if size else shifted.new_zeros(shifted.shape[0])
        probability = shifted.exp_()
        both = torch.stack([probability.sum(dim=1), picked.masked_fill(~inside, 0.0)])
        if group is not None:
            dist.all_reduce(both, group=group)
        total, chosen = both[0], both[1]
        ctx.save_for_backward(probability.div_(total.unsqueeze(1)), column, inside, kept)
        return (total.log() - chosen).masked_fill(~kept, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probability, column, inside, kept = ctx.saved_tensors
        grad = grad.masked_fill(~kept, 0.0)
        out = probability * grad.unsqueeze(1)
        if out.shape[1]:
            out.scatter_add_(1, column, -(grad * inside).unsqueeze(1))
        return out, None, None, None, None


class VocabularyCrossEntropy(nn.Module):
    """Cross-entropy of logits whose classes are sharded, without gathering them: two small all-reduces."""

    def __init__(self, start: int, ignore_index: int, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.start, self.ignore_index, self.ranks = start, ignore_index, ranks
        self.group: Group = None

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """*logits* (t, classes of this rank), *target* (t) -> loss of each row, whole on every rank."""
        return _CrossEntropy.apply(logits, target, self.start, self.ignore_index, self.group)

    def extra_repr(self) -> str:
        """First class held, and the ranks."""
        return f"classes from {self.start}, ranks={list(self.ranks)}"
