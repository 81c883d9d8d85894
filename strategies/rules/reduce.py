"""Rules of reductions, scans and normalisations."""

from __future__ import annotations

import torch

from whale.strategies.rules.registry import Op, OpAxis, Rule, notation, pointwise, register, same_axes

_FIRST = [frozenset({0})]


def _reduced(op: Op) -> tuple[list[int], bool]:
    rank = len(op.shape(0))
    dims = op.args.get("dim")
    if dims is None or dims == []:
        return list(range(rank)), bool(op.args.get("keepdim", False))
    dims = [dims] if isinstance(dims, int) else dims
    return [d % max(rank, 1) for d in dims], bool(op.args.get("keepdim", False))


def _kept(op: Op, dims: list[int], keepdim: bool) -> list[OpAxis]:
    axes, position = [], 0
    outputs = range(len(op.outputs))
    for dim in range(len(op.shape(0))):
        if dim in dims:
            position += keepdim
            continue
        axes.append(OpAxis({0: dim}, dict.fromkeys(outputs, position)))
        position += 1
    return axes


@register("aten.sum", "aten.mean", "aten.nansum", "aten.count_nonzero")
def _sum(op: Op) -> Rule:
    dims, keepdim = _reduced(op)
    form = "mean" if op.name == "aten.mean" else ""
    contracted = [OpAxis({0: dim}, form=form) for dim in dims]
    linear = _FIRST if op.name in ("aten.sum", "aten.mean") else []
    return Rule(axes=_kept(op, dims, keepdim) + contracted, linear=linear)


@register(
    "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.argmax", "aten.argmin", "aten.prod", "aten.any",
    "aten.all", "aten.var", "aten.std", "aten.var_mean", "aten.std_mean", "aten.logsumexp", "aten.median",
    "aten.nanmedian", "aten.nanmean", "aten.mode", "aten.kthvalue", "aten.aminmax", "aten.norm",
    "aten.linalg_vector_norm",
)  # fmt: skip
def _reduce(op: Op) -> Rule | None:
    """A reduction that is no sum: what it reduces stays together."""
    if len(op.operands) != 1:
        return pointwise(op) if op.name in ("aten.max", "aten.min") else None
    return Rule(axes=_kept(op, *_reduced(op)))


@register("aten.histc")
def _histc(op: Op) -> Rule | None:
    """Counts add up, if the bins do not depend on the values."""
    if op.args["min"] == op.args["max"]:
        return None
    return Rule(axes=[OpAxis({0: dim}) for dim in range(len(op.shape(0)))])


@register(
    "aten.softmax", "aten._softmax", "aten._safe_softmax", "aten.cumprod", "aten.cummax", "aten.cummin", "aten.sort",
    "aten.topk", "aten.argsort", "aten.glu", "aten.logcumsumexp",
)  # fmt: skip
def _along(op: Op) -> Rule | None:
    if not op.shape(0):
        return None
    dim = op.args.get("dim", -1)
    return Rule(axes=same_axes(op, 0, blocked=[dim], outputs=range(len(op.outputs))))


@register("aten.log_softmax", "aten._log_softmax")
def _log_softmax(op: Op) -> Rule | None:
    if not op.shape(0):
        return None
    axes = [OpAxis({0: dim}, {0: dim}) for dim in range(len(op.shape(0)))]
    axes[op.args["dim"]].form = "log_softmax"
    return Rule(axes=axes)


@register("aten.cumsum")
def _linear_along(op: Op) -> Rule | None:
    if not op.shape(0):
        return None
    return Rule(axes=same_axes(op, 0, blocked=[op.args["dim"]]), linear=_FIRST)


@register("aten.diff")
def _differences(op: Op) -> Rule | None:
    """Differences along a dim, of the input with what is put before and after it."""
    out = op.outputs[0]
    operands = range(len(op.operands))
    if any(len(op.shape(operand)) != len(out) for operand in operands):
        return None
    dim = op.args.get("dim", -1) % len(out)
    axes = [OpAxis(dict.fromkeys(operands, d), {0: d}) for d in range(len(out)) if d != dim]
    return Rule(axes=axes, linear=[frozenset(operands)])


@register(
    "aten.fft_fft", "aten.fft_ifft", "aten.fft_rfft", "aten.fft_irfft", "aten.fft_hfft", "aten.fft_ihfft",
    "aten.fft_fft2", "aten.fft_ifft2", "aten.fft_rfft2", "aten.fft_irfft2", "aten.fft_fftn", "aten.fft_ifftn",
    "aten.fft_rfftn", "aten.fft_irfftn", "aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r",
)  # fmt: skip
def _transform(op: Op) -> Rule | None:
    """A Fourier transform mixes the positions of its dims, and leaves others apart."""
    dims = op.args.get("dim")
    if dims is None:
        last = op.args.get("s")
        dims = range(-len(last), 0) if last is not None else range(len(op.shape(0)))
    return Rule(axes=same_axes(op, 0, blocked=[dims] if isinstance(dims, int) else dims))


@register("aten.cosine_similarity")
def _cosine(op: Op) -> Rule | None:
    shape = torch.broadcast_shapes(op.shape(0), op.shape(1))
    dim = op.args["dim"] % len(shape)
    axes = []
    for d in range(len(shape)):
        if d != dim and shape[d] != 1:
            own = {i: d - len(shape) + len(op.shape(i)) for i in (0, 1)}
            inputs = {i: o for i, o in own.items() if o >= 0 and op.shape(i)[o] != 1}
            axes.append(OpAxis(inputs, {0: d - (d > dim)}))
    return Rule(axes=axes)


@register("aten.layer_norm", "aten.native_layer_norm", "aten.rms_norm", "aten._fused_rms_norm")
def _layer_norm(op: Op) -> Rule:
    """``* e!, e!?, e!? -> * e!`` and the statistics of each row."""
    rows = len(op.shape(0)) - len(op.args["normalized_shape"])
    outputs = range(len(op.outputs))
    return Rule(axes=[OpAxis({0: d}, dict.fromkeys(outputs, d)) for d in range(rows)])


notation("* r d!, * s d! -> * r s", "aten.cdist")
