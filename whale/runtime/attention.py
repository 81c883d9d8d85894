"""Attention of some rows to some of their columns on one device, and of rows of a causal sequence without a mask.

Blocks of the scores are computed one by one, by the kernels that a device has, and merged by the logarithms of the sums
of their weights, which makes them exact: a ring merges those of several ranks, and `CausalRows` the columns before a
stretch of rows and those of the stretch itself. It knows tensors and positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CausalRows", "Stretch", "attend", "attend_back", "cut", "dtype_of_sums", "has_kernel"]

aten = torch.ops.aten

Stretch = tuple[int, int]
"""Positions from the first on and before the second."""


class CausalRows(nn.Module):
    """Attention of some rows of a causal sequence to the columns up to their own, without a mask: each stretch of rows
    sees all columns before it, which are a block, and its own, which are a causal square.

    Args:
        rows: their positions, in order.
        scale: of the scores; None: one over the root of the width.
    """

    def __init__(self, rows: Sequence[Stretch], scale: float | None) -> None:
        super().__init__()
        self.rows, self.scale = tuple(rows), scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """*query* (..., heads, rows, width) of these rows, *key* and *value* (..., groups, columns, width) up to the
        last of them -> (..., heads, rows, width). A group of heads reads one key."""
        if not query.numel():  # which kernels refuse
            return query + (key.sum() + value.sum())
        found: Tensor = _CausalRowsFunction.apply(self, query, key, value)
        return found

    def blocks(self) -> Iterator[tuple[Stretch, list[tuple[Stretch, bool]]]]:
        """Each stretch of rows, by its place among them, with its blocks: columns, and whether they are causal.

        >>> list(CausalRows(((2, 5), (8, 9)), None).blocks())
        [((0, 3), [((0, 2), False), ((2, 5), True)]), ((3, 4), [((0, 9), False)])]
        """
        place = 0
        for first, stop in self.rows:
            if stop - first == 1:
                found = [((0, stop), False)]
            else:
                found = [((0, first), False)] * (first > 0) + [((first, stop), True)]
            yield (place, place + stop - first), found
            place += stop - first

    def extra_repr(self) -> str:
        """The positions of the rows."""
        return f"rows={list(self.rows)}"


class _CausalRowsFunction(torch.autograd.Function):
    clear_saved_tensors_on_access = True  # keys and values are freed before their gradients are summed

    @staticmethod
    def forward(ctx: Any, module: CausalRows, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = []
        for rows, blocks in module.blocks():
            parts = [
                attend(cut(query, rows), cut(key, columns), cut(value, columns), None, causal, module.scale)
                for columns, causal in blocks
            ]
            found.append(parts[0] if len(parts) == 1 else _merged(*parts))
        result, sums = _joined([x for x, _ in found], -2), _joined([log for _, log in found], -1)
        ctx.module = module
        ctx.save_for_backward(query, key, value, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, sums = ctx.saved_tensors
        of_query: list[Tensor] = []
        of_keys, of_values = list[list[Tensor]](), list[list[Tensor]]()  # of each stretch of rows, by columns
        for rows, blocks in ctx.module.blocks():
            asked = [
                attend_back(
                    cut(grad, rows), cut(query, rows), cut(key, columns), cut(value, columns), cut(result, rows),
                    sums.narrow(-1, rows[0], rows[1] - rows[0]), None, causal, ctx.module.scale,
                )
                for columns, causal in blocks
            ]  # fmt: skip
            of_query.append(asked[0][0] if len(asked) == 1 else asked[0][0] + asked[1][0])
            of_keys.append([found[1] for found in asked])
            of_values.append([found[2] for found in asked])
            del asked
        del query, key, value, result, sums
        return None, _joined(of_query, -2), _of_columns(of_keys), _of_columns(of_values)


def _of_columns(of_rows: list[list[Tensor]]) -> Tensor:
    """The sum over stretches of rows of the gradients of columns, of which later rows see more; empties the lists."""
    total: Tensor | None = None
    for parts in of_rows:
        if total is not None:
            first, count = parts[0], total.shape[-2]
            parts[:1] = [first.narrow(-2, 0, count) + total, first.narrow(-2, count, first.shape[-2] - count)]
        total = _joined(parts, -2)
        parts.clear()
    assert total is not None
    return total


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to two blocks of columns, from that to each, with the logarithms of the sums of their weights."""
    sums = torch.logaddexp(one[1], other[1])
    parts = [found * (log - sums).exp().unsqueeze(-1) for found, log in (one, other)]
    return (parts[0] + parts[1]).to(one[0].dtype), sums


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of rows to some of their columns, and the logarithm of the sum of the weights of each row, which is the
    least number where it has none."""
    key, value = _repeated(query, key), _repeated(query, value)
    if mask is not None and mask.requires_grad:
        mask = mask.detach()
    if _on_processor(query, value):
        bias = _bias(mask, query)
        result, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
        if bias is not None:  # the kernel gives zero for a row without columns
            sums = sums.masked_fill((bias == -torch.inf).all(-1), torch.finfo(sums.dtype).min)
        return result, sums
    if _by_flash(query, value, mask):
        found = aten._scaled_dot_product_flash_attention.default(query, key, value, 0.0, causal, scale=scale)
        return found[0], found[1]
    parts = []
    for first, stop in _stretches(query, key):
        scores = _scores(query, key, mask, causal, scale, first, stop)
        sums = scores.logsumexp(-1).clamp_min(torch.finfo(scores.dtype).min)
        weights = scores.sub_(sums.unsqueeze(-1)).exp_()
        parts.append((weights @ value.to(scores.dtype), sums))
    results, logs = zip(*parts, strict=True)
    return torch.cat(results, -2), torch.cat(logs, -1)


def attend_back(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    sums: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    of_mask: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of a block's queries, keys and values, and of its mask if asked; *result* and *sums* are those of the
    rows over all columns."""
    keys, values = _repeated(query, key), _repeated(query, value)
    of_bias: Tensor | None = None
    if _on_processor(query, value) and not of_mask:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, query, keys, values, result, sums, 0.0, causal, attn_mask=_bias(mask, query), scale=scale
        )
    elif _by_flash(query, value, mask):
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        packed = sums.contiguous()  # the kernel does not look at strides
        found = aten._scaled_dot_product_flash_attention_backward.default(
            grad, query, keys, values, result, packed, None, None, query.shape[-2], keys.shape[-2], 0.0, causal,
            nothing, nothing, scale=scale,
        )  # fmt: skip
    else:
        wide, factor = dtype_of_sums(query.dtype), query.shape[-1] ** -0.5 if scale is None else scale
        found = tuple(torch.zeros_like(x, dtype=wide) for x in (query, keys, values))
        of_bias = torch.zeros_like(mask, dtype=wide) if of_mask and mask is not None else None
        for first, stop in _stretches(query, keys):
            weights = _scores(query, keys, mask, causal, scale, first, stop)
            weights.sub_(sums[..., first:stop].unsqueeze(-1)).exp_()
            rows = first, stop
            above, made, asked = (cut(x, rows).to(wide) for x in (grad, result, query))
            found[2].add_(weights.transpose(-2, -1) @ above)
            inner = above @ values.to(wide).transpose(-2, -1) - (above * made).sum(-1, keepdim=True)
            of_scores = weights.mul_(inner)
            cut(found[0], rows).add_(of_scores @ keys.to(wide), alpha=factor)
            found[1].add_(of_scores.transpose(-2, -1) @ asked, alpha=factor)
            if of_bias is not None:
                place = of_bias if of_bias.shape[-2] == 1 else cut(of_bias, rows)
                place.add_(of_scores.sum_to_size(place.shape))
    return found[0], _summed(found[1], key.shape), _summed(found[2], value.shape), of_bias


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether a device has a kernel for blocks without a mask, which keeps none of their scores in memory."""
    return _on_processor(query, value) or _by_flash(query, value, None)


def _on_processor(query: Tensor, value: Tensor) -> bool:
    """Whether torch has a kernel for processors."""
    return query.device.type in ("cpu", "meta") and query.dim() == 4 and query.shape[-1] == value.shape[-1]


def _by_flash(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether flash attention takes such operands."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    alike = query.dim() == 4 and width == value.shape[-1] and width % 8 == 0 and width <= 256
    return query.is_cuda and half and alike and mask is None and _has_flash(query.device)


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether torch has flash attention for a GPU: of NVIDIA's from Ampere on."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as a term of the scores, with as many dims as these."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return mask.to(query.dtype).reshape((1,) * (query.dim() - mask.dim()) + tuple(mask.shape))


_MOST_SCORES = 2**26
"""The number of scores that are in memory at once where no kernel computes them."""


def _stretches(query: Tensor, key: Tensor) -> list[Stretch]:
    """The rows in stretches whose scores fit in memory."""
    rows = query.shape[-2]
    size = max(1, _MOST_SCORES // max(prod(query.shape[:-2]) * key.shape[-2], 1))
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None, first: int, stop: int
) -> Tensor:
    """The scores of some rows."""
    wide = dtype_of_sums(query.dtype)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (cut(query, (first, stop)).to(wide) * factor) @ key.to(wide).transpose(-2, -1)
    if mask is not None and mask.shape[-2] > 1:
        mask = cut(mask, (first, stop))
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(first + 1)
        scores.masked_fill_(hidden, -torch.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        scores.add_(mask)
    return scores


def _repeated(query: Tensor, given: Tensor) -> Tensor:
    """Keys or values for each head."""
    if query.dim() < 4 or query.shape[-3] == given.shape[-3]:
        return given
    return given.repeat_interleave(query.shape[-3] // given.shape[-3], -3)


def _summed(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient of what was repeated for each head."""
    if tuple(grad.shape) == tuple(shape):
        return grad
    return grad.unflatten(-3, (shape[-3], -1)).sum(-3)


def cut(x: Tensor, rows: Stretch) -> Tensor:
    """Some rows of a tensor (..., rows, width), as a view."""
    return x.narrow(-2, rows[0], rows[1] - rows[0])


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, and of what is added up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
