"""Rules of look-ups: embedding, gather, index."""

from __future__ import annotations

import torch

from whale.graph.values import value_tensor
from whale.strategies.rules.registry import Op, OpAxis, Rule, register, same_axes


@register("aten.embedding")
def _embedding(op: Op) -> Rule:
    rank = len(op.shape(1))
    refuse = op.args.get("padding_idx", -1) not in (-1, None) or bool(op.args.get("sparse"))
    axes = [OpAxis({0: 0}, {}, blocked=refuse, form="vocabulary_embedding"), OpAxis({0: 1}, {0: rank})]
    return Rule(axes=axes + [OpAxis({1: d}, {0: d}) for d in range(rank)])


@register("aten.gather")
def _gather(op: Op) -> Rule | None:
    if len(op.shape(0)) != len(op.shape(1)) or not op.shape(0):
        return None
    dim = op.args["dim"] % len(op.shape(0))
    axes = []
    for d, (size, count) in enumerate(zip(op.shape(0), op.shape(1), strict=True)):
        if d == dim:
            axes += [OpAxis({0: d}, blocked=True), OpAxis({1: d}, {0: d})]
        else:
            axes.append(OpAxis({0: d, 1: d}, {0: d}, blocked=size != count))
    return Rule(axes=axes)


@register("aten.scatter", "aten.scatter_add", "aten.index_copy")
def _scatter(op: Op) -> Rule | None:
    if any(op.shape(i) != op.shape(1) for i in range(2, len(op.operands))) or op.name == "aten.index_copy":
        return None
    dim = op.args["dim"] % len(op.shape(0))
    axes = []
    for d, size in enumerate(op.shape(0)):
        inputs = dict.fromkeys(range(len(op.operands)), d)
        axes.append(OpAxis(inputs, {0: d}, blocked=d == dim or any(op.shape(i)[d] != size for i in inputs)))
    return Rule(axes=axes)


@register("aten.index_select")
def _index_select(op: Op) -> Rule | None:
    dim = op.args["dim"] % len(op.shape(0))
    axes = [axis for axis in same_axes(op, 0) if axis.inputs[0] != dim]
    return Rule(axes=[*axes, OpAxis({0: dim}, blocked=True), OpAxis({1: 0}, {0: dim})])


@register("aten.index")
def _index(op: Op) -> Rule | None:
    """``x[:, i, j]``: index tensors in neighbouring dims broadcast to new dims in their place."""
    indices = op.args["indices"]
    given = [d for d, index in enumerate(indices) if index is not None]
    if not given or given != list(range(given[0], given[-1] + 1)):
        return None
    slots = op.positions["indices"]
    if any(slots[d] is None for d in given):
        return None
    operands = [slots[d] for d in given if slots[d] is not None]
    if any(value_tensor(op.operands[i]).dtype == torch.bool for i in operands if i is not None):
        return None
    rank, out = len(op.shape(0)), len(op.outputs[0])
    new = out - (rank - len(given))
    axes = [OpAxis({0: d}, {0: d}) for d in range(given[0])]
    axes += [OpAxis({0: d}, blocked=True) for d in given]
    axes += [OpAxis({0: d}, {0: d - len(given) + new}) for d in range(given[-1] + 1, rank)]
    for d in range(new):
        axis = OpAxis({}, {0: given[0] + d})
        for operand in operands:
            assert operand is not None
            own = d - (new - len(op.shape(operand)))
            if own >= 0 and op.shape(operand)[own] != 1:
                axis.inputs[operand] = own
        axes.append(axis)
    return Rule(axes=axes)
