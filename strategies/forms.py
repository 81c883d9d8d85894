"""Special forms: lowerings of operators whose sharded form is not the operator itself on a shard.

The rule of a form checks its arguments, never the form. One axis of the operator may be cut on several mesh axes: a
form receives all of them, and sums over one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.runtime.collectives import CollectiveModule, Exchange, all_reduce
from whale.runtime.recording import call, is_recording


@dataclass(frozen=True, kw_only=True)
class MeshPlace:
    """The ranks along one mesh axis, in order, and the position of this rank."""

    ranks: tuple[int, ...]
    index: int


@dataclass(frozen=True, kw_only=True)
class FormCall:
    """One call on one rank, as the input of a form.

    ``arguments`` are the operator's by name, with tensors of the local graph; ``first`` and ``length`` say which part
    of the sharded axis the first operand has here; ``shape`` is its whole shape; ``axes`` are the mesh axes on which
    the call has this form.
    """

    arguments: Mapping[str, Any]
    first: int
    length: int
    shape: tuple[int, ...]
    axes: tuple[MeshPlace, ...]


class AxisSum(CollectiveModule):
    """A reduction over the ranks of one mesh axis."""

    def __init__(self, place: MeshPlace) -> None:
        super().__init__()
        self.ranks, self.index = place.ranks, place.index

    def add(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        """Maximum over the ranks, in place."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def _reduced(self, x: Tensor, reduction: dist.ReduceOp.RedOpType) -> Tensor:
        if is_recording() and len(self.ranks) > 1:
            return call(Exchange("all_reduce", self.ranks, self.index, reuse=True, reduction=reduction), x)
        return all_reduce(x, self.group, reduction)

    def every(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, stacked. For small tensors: sent as a sum with zeros, which needs no other
        collective."""
        if len(self.ranks) == 1:
            return x.unsqueeze(0)
        slots = x.new_zeros((len(self.ranks), *x.shape))
        slots[self.index] = x
        return self.add(slots)

    def extra_repr(self) -> str:
        """The ranks."""
        return f"ranks={list(self.ranks)}"


class VocabularyEmbedding(nn.Module):
    """Look-up in rows ``[start, start + size)`` of a table; other indices give zeros, so the ranks' results add up.

    Megatron-LM (Shoeybi et al. 2019, section 3): the vocabulary-parallel embedding. The row of *padding* gets no
    gradient, on the rank that has it. A *sparse* gradient has the rows that were looked up here, and no others.
    """

    def __init__(self, start: int, size: int, padding: int = -1, sparse: bool = False) -> None:
        super().__init__()
        self.start, self.size, self.sparse = start, size, sparse
        self.padding = padding - start if start <= padding < start + size else -1

    def forward(self, weight: Tensor, index: Tensor) -> Tensor:
        """*weight* (size, e), *index* (...) of the whole vocabulary -> (..., e), partial over the ranks."""
        local = index - self.start
        outside = (local < 0) | (local >= self.size)
        if self.sparse:
            found = _SparseRows.apply(weight, local.masked_fill(outside, -1), self.padding)
        elif self.size:
            found = torch.ops.aten.embedding(weight, local.masked_fill(outside, 0), self.padding)
        else:
            return weight.new_zeros((*index.shape, weight.shape[1])) + weight.sum()
        return found.masked_fill(outside.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        """Number of local rows."""
        return f"rows {self.start}:{self.start + self.size}"


class _SparseRows(torch.autograd.Function):
    """Rows of a table, those of negative indices with any values, and the sparse gradient of the others."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.padding = weight.shape, padding
        if not len(weight):
            return weight.new_zeros((*index.shape, weight.shape[1]))
        return weight[index.clamp(min=0)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        own = (index >= 0) & (index != ctx.padding)
        return (
            torch.sparse_coo_tensor(index[own].unsqueeze(0), grad[own], ctx.shape, check_invariants=False),
            None,
            None,
        )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, ignore: int, sums: Sequence[AxisSum]) -> Tensor:
        size = logits.shape[1]
        if size:
            highest = logits.amax(dim=1)
        else:
            highest = logits.new_full((logits.shape[0],), -torch.inf)
        for axis in sums:
            highest = axis.largest(highest)
        shifted = logits - highest.unsqueeze(1)
        local = target - start
        kept = target != ignore
        inside = (local >= 0) & (local < size) & kept
        column = local.masked_fill(~inside, 0).unsqueeze(1)
        picked = shifted.gather(1, column).squeeze(1) if size else shifted.new_zeros(shifted.shape[0])
        probability = shifted.exp_()
        both = torch.stack([probability.sum(dim=1), picked.masked_fill(~inside, 0.0)])
        for axis in sums:
            both = axis.add(both)
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


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype, sums: Sequence[AxisSum]) -> Tensor:
        wide = _wide(x)
        if x.shape[dim]:
            highest = wide.amax(dim, keepdim=True)
        else:
            highest = wide.sum(dim, keepdim=True) - torch.inf
        for axis in sums:
            highest = axis.largest(highest)
        shifted = wide - highest
        total = shifted.exp().sum(dim, keepdim=True)
        for axis in sums:
            total = axis.add(total)
        out = shifted.sub_(total.log_()).to(dtype)
        ctx.dim, ctx.dtype, ctx.sums = dim, x.dtype, sums
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (out,) = ctx.saved_tensors
        wide = _wide(grad)
        total = wide.sum(ctx.dim, keepdim=True)
        for axis in ctx.sums:
            total = axis.add(total)
        return (wide - _wide(out).exp() * total).to(ctx.dtype), None, None, None


class ShardedLogSoftmax(nn.Module):
    """Logarithm of a softmax along a dim that is sharded: sums of a number for each row, two in the forward and one in
    the backward."""

    def __init__(self, dim: int, dtype: torch.dtype | None, axes: Sequence[MeshPlace]) -> None:
        super().__init__()
        self.dim, self.dtype = dim, dtype
        self.sums = nn.ModuleList(AxisSum(place) for place in axes)

    def forward(self, x: Tensor) -> Tensor:
        """*x* with a part of the dim -> the same part of the result, in the operator's own dtype or in another."""
        return _LogSoftmax.apply(x, self.dim, self.dtype or x.dtype, list(self.sums))

    def extra_repr(self) -> str:
        """The dim."""
        return f"dim={self.dim}"


class VocabularyLoss(nn.Module):
    """Negative log-likelihood of log-probabilities whose classes are sharded: each rank has the loss of the rows whose
    target is among its own."""

    def __init__(self, start: int, ignore_index: int) -> None:
        super().__init__()
        self.start, self.ignore_index = start, ignore_index

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        """*scores* (t, classes of this rank), *target* (t) -> loss of each row, partial over the ranks."""
        local = target - self.start
        own = (local >= 0) & (local < scores.shape[1]) & (target != self.ignore_index)
        if not scores.shape[1]:
            return scores.sum(1)
        picked = scores.gather(1, local.masked_fill(~own, 0).unsqueeze(1)).squeeze(1)
        return -picked.masked_fill(~own, 0.0)

    def extra_repr(self) -> str:
        """First local class."""
        return f"classes from {self.start}"


class VocabularyCrossEntropy(nn.Module):
    """Cross-entropy of logits whose classes are sharded, without gathering them: two small all-reduces."""

    def __init__(self, start: int, ignore_index: int, axes: Sequence[MeshPlace]) -> None:
        super().__init__()
        self.start, self.ignore_index = start, ignore_index
        self.sums = nn.ModuleList(AxisSum(place) for place in axes)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """*logits* (t, classes of this rank), *target* (t) -> loss of each row, whole on every rank."""
        return _CrossEntropy.apply(logits, target, self.start, self.ignore_index, list(self.sums))

    def extra_repr(self) -> str:
        """First local class."""
        return f"classes from {self.start}"


class _BatchNorm(torch.autograd.Function):
    """The passes over *x* are those of PyTorch's kernels: channel statistics, sums and the normalisation itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, count: int, sums: Sequence[AxisSum]
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = _wide(x)
        num, mean, squares = _statistics(wide, eps)
        for axis in sums:  # merge the statistics of the shards, as Chan, Golub and LeVeque (1979)
            nums, means, parts = axis.every(torch.stack([num, mean, squares])).unbind(1)
            num = nums.sum(0)
            mean = (nums * means).sum(0) / num
            squares = (parts + nums * (means - mean).square()).sum(0)
        variance = squares / count
        if x.numel():
            factor, offset = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
            y = torch.native_batch_norm(wide, factor, offset, mean, variance, False, 0.0, eps)[0]
        else:
            y = wide.clone()
        ctx.sums, ctx.count, ctx.eps, ctx.has_bias = sums, count, eps, bias is not None
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        return y.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        wide, wide_grad = _wide(x), grad.to(mean.dtype)
        both = _gradient_sums(wide_grad, wide, mean, variance, ctx.eps)
        grad_weight, grad_bias = both.clone()
        for axis in ctx.sums:
            both = axis.add(both)
        scale = (variance + ctx.eps).rsqrt()
        factor = scale if weight is None else scale * weight
        # factor * (grad - (both[1] + normal * both[0]) / count), where normal is (x - mean) * scale
        slope = -factor * scale * both[0] / ctx.count
        offset = -factor * both[1] / ctx.count - slope * mean
        grad_x = torch.addcmul(_along(offset, x), wide, _along(slope, x))
        return (
            grad_x.addcmul_(wide_grad, _along(factor, x)).to(grad.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias if ctx.has_bias else None,
            None,
            None,
            None,
        )


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of each channel of this shard: number of positions, mean, and the sum of squared distances from the
    mean."""
    num = x.new_full((x.shape[1],), x.numel() // max(x.shape[1], 1))
    if not x.numel():
        return num, torch.zeros_like(num), torch.zeros_like(num)
    _, mean, scale = torch.native_batch_norm(x, None, None, None, None, True, 0.0, eps)
    return num, mean, num * (scale**-2 - eps).clamp_min(0)


def _gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Sums for each channel of this shard: of the gradient times the normalised *x*, and of the gradient."""
    if not x.numel():
        return mean.new_zeros(2, x.shape[1])
    fixed = (mean, variance, None, None, False, eps, [False, True, True])
    _, times_normal, alone = torch.ops.aten.native_batch_norm_backward(grad, x, None, *fixed)
    return torch.stack([times_normal, alone])


def _along(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view(-1, *[1] * (x.dim() - 2))


class BatchStatisticsNorm(nn.Module):
    """Batch normalisation of rows or space that are sharded over several ranks, with global statistics.

    One small all-reduce forward, one backward. With running statistics it returns what the functional operator does:
    the output, the batch's mean and scale, and the new running statistics.
    """

    def __init__(self, eps: float, momentum: float, count: int, outputs: int, axes: Sequence[MeshPlace]) -> None:
        super().__init__()
        self.eps, self.momentum, self.count, self.outputs = eps, momentum, count, outputs
        self.sums = nn.ModuleList(AxisSum(place) for place in axes)

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
    ) -> Any:
        """*x* (n of this rank, c, space of this rank)."""
        y, mean, variance = _BatchNorm.apply(x, weight, bias, self.eps, self.count, list(self.sums))
        if self.outputs == 1:
            return y
        result = (y, mean, (variance + self.eps).rsqrt())
        if running_mean is None or running_var is None:
            return result
        unbiased = variance * (self.count / max(self.count - 1, 1))
        return (
            *result,
            torch.lerp(running_mean, mean.to(running_mean.dtype), self.momentum),
            torch.lerp(running_var, unbiased.to(running_var.dtype), self.momentum),
        )

    def extra_repr(self) -> str:
        """Number of positions of each channel."""
        return f"eps={self.eps}, momentum={self.momentum}, count={self.count}"


class GroupStatisticsNorm(nn.Module):
    """Normalisation of each row's groups of channels over sharded space, with global statistics.

    One small all-reduce forward, one backward; without *groups* every channel is a group.
    """

    def __init__(self, eps: float, groups: int | None, space: int, axes: Sequence[MeshPlace]) -> None:
        super().__init__()
        self.eps, self.groups, self.space = eps, groups, space
        self.sums = nn.ModuleList(AxisSum(place) for place in axes)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """*x* (n, c, space of this rank)."""
        rows, channels = x.shape[:2]
        groups = channels if self.groups is None else self.groups
        each = channels // max(groups, 1)
        apart = x.reshape(1, rows * groups, each * prod(x.shape[2:]))
        y = _BatchNorm.apply(apart, None, None, self.eps, each * self.space, list(self.sums))[0].view(x.shape)
        y = y if weight is None else y * _along(weight, x)
        y = y if bias is None else y + _along(bias, x)
        return y.to(x.dtype)  # of which weights have more bits under torch.autocast

    def extra_repr(self) -> str:
        """The groups, and the number of positions of the whole space."""
        return f"eps={self.eps}, groups={self.groups}, space={self.space}"


Built = tuple[nn.Module, tuple[Any, ...]]


def _embedding(call: FormCall) -> Built:
    given = call.arguments
    module = VocabularyEmbedding(call.first, call.length, given["padding_idx"], bool(given["sparse"]))
    return module, (given["weight"], given["indices"])


def _cross_entropy(call: FormCall) -> Built:
    given = call.arguments
    return VocabularyCrossEntropy(call.first, given["ignore_index"], call.axes), (given["self"], given["target"])


def _log_softmax(call: FormCall) -> Built:
    given = call.arguments
    dtype = torch.float32 if given.get("half_to_float") else given.get("dtype")
    return ShardedLogSoftmax(given["dim"], dtype, call.axes), (given.get("self", given.get("input")),)


def _nll_loss(call: FormCall) -> Built:
    given = call.arguments
    return VocabularyLoss(call.first, given["ignore_index"]), (given["self"], given["target"])


def _batch_norm(call: FormCall) -> Built:
    given = call.arguments
    count = prod(call.shape) // call.shape[1]
    functional = "cudnn_enabled" not in given
    outputs = 1 if not functional else 5 if "running_mean" in given else 3
    module = BatchStatisticsNorm(given["eps"], given["momentum"], count, outputs, call.axes)
    tensors = [given["input"], given["weight"], given["bias"], given.get("running_mean"), given.get("running_var")]
    return module, tuple(tensors if functional else tensors[:3])


def _group_norm(call: FormCall) -> Built:
    given = call.arguments
    module = GroupStatisticsNorm(given["eps"], given.get("num_groups"), prod(call.shape[2:]), call.axes)
    return module, (given["input"], given["weight"], given["bias"])


FORMS: dict[str, Callable[[FormCall], Built]] = {
    "vocabulary_embedding": _embedding,
    "vocabulary_cross_entropy": _cross_entropy,
    "vocabulary_nll_loss": _nll_loss,
    "log_softmax": _log_softmax,
    "batch_statistics": _batch_norm,
    "group_statistics": _group_norm,
}
"""Lowering of a call on a rank whose sharded axis has this form: a module, and its arguments."""

COLLECTIVES = {
    "vocabulary_cross_entropy": 2, "log_softmax": 3, "batch_statistics": 2, "group_statistics": 2, "halo": 2, "ring": 3,
}  # fmt: skip
"""Forms that communicate, with the number of collectives in a step (of two ranks): every rank of the axis must reach
them at the same time."""

ASKED = {"halo", "causal", "group_statistics", "ring"}
"""Forms for shards of space and of sequences, used only in regions that are split along such a dim."""
