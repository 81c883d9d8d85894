"""Rules of reductions, scans and normalisations: which dims they consume, and what a part of them means."""

from __future__ import annotations

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


@register("aten.sum", "aten.mean")
def _sum(op: Op) -> Rule:
    dims, keepdim = _reduced(op)
    form = "mean" if op.name == "aten.mean" else ""
    contracted = [OpAxis({0: dim}, form=form) for dim in dims]
    return Rule(axes=_kept(op, dims, keepdim) + contracted, linear=_FIRST)


@register(
    "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.argmax", "aten.argmin", "aten.prod", "aten.any",
    "aten.all", "aten.var", "aten.std", "aten.var_mean", "aten.logsumexp", "aten.median", "aten.norm",
    "aten.linalg_vector_norm",
)  # fmt: skip
def _reduce(op: Op) -> Rule | None:
    if len(op.operands) != 1:
        return pointwise(op) if op.name in ("aten.max", "aten.min") else None
    dims, keepdim = _reduced(op)
    return Rule(axes=_kept(op, dims, keepdim) + [OpAxis({0: dim}, blocked=True) for dim in dims])


@register(
    "aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten.cumsum", "aten.cumprod",
    "aten.sort", "aten.topk", "aten.argsort", "aten.glu", "aten.logcumsumexp",
)  # fmt: skip
def _along(op: Op) -> Rule | None:
    if not op.shape(0):
        return None
    dim = op.args.get("dim", -1)
    return Rule(axes=same_axes(op, 0, blocked=[dim], outputs=range(len(op.outputs))))


@register("aten.layer_norm", "aten.native_layer_norm", "aten.rms_norm")
def _layer_norm(op: Op) -> Rule:
    rank, normalised = len(op.shape(0)), len(op.args["normalized_shape"])
    outputs = [0] if op.name != "aten.native_layer_norm" else [0, 1, 2]
    axes = [OpAxis({0: d}, dict.fromkeys(outputs, d)) for d in range(rank - normalised)]
    for d in range(normalised):
        axis = OpAxis({0: rank - normalised + d}, {0: rank - normalised + d}, blocked=True)
        for operand in range(1, len(op.operands)):
            axis.inputs[operand] = d
        axes.append(axis)
    return Rule(axes=axes)


@register("aten.dropout", "aten.native_dropout", "aten.bernoulli", "aten.alpha_dropout", "aten.feature_dropout")
def _dropout(op: Op) -> Rule | None:
    if op.name in ("aten.alpha_dropout", "aten.feature_dropout"):
        return None
    return Rule(axes=same_axes(op, 0, outputs=range(len(op.outputs))))


notation("* e!, * -> *", "aten.multinomial")
