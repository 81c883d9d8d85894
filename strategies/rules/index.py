"""Rules of look-ups: embedding, gather, index."""

from __future__ import annotations

import torch

from whale.graph.values import value_tensor
from whale.strategies.rules.registry import Op, OpAxis, Rule, register


@register("aten.embedding")
def _embedding(op: Op) -> Rule:
    """``v@vocabulary_embedding e, * -> * e``; scaling by frequency needs to see all indices."""
    rank = len(op.shape(1))
    axes = [OpAxis({0: 1}, {0: rank})]
    if not op.args["scale_grad_by_freq"]:
        axes += [OpAxis({1: d}, {0: d}) for d in range(rank)]
        axes += [OpAxis({0: 0}, form="vocabulary_embedding")]
    return Rule(axes=axes)


@register("aten.one_hot")
def _one_hot(op: Op) -> Rule | None:
    """``* -> * k``."""
    if op.args["num_classes"] < 0:
        return None
    return Rule(axes=[OpAxis({0: d}, {0: d}) for d in range(len(op.shape(0)))])


@register("aten.gather")
def _gather(op: Op) -> Rule | None:
    if len(op.shape(0)) != len(op.shape(1)) or not op.shape(0):
        return None
    dim = op.args["dim"] % len(op.shape(0))
    axes = []
    for d, (size, count) in enumerate(zip(op.shape(0), op.shape(1), strict=True)):
        if d == dim:
            axes.append(OpAxis({1: d}, {0: d}))
        else:
            axes.append(OpAxis({0: d, 1: d}, {0: d}, blocked=size != count))
    return Rule(axes=axes, linear=[frozenset({0})])


@register("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def _scatter(op: Op) -> Rule:
    """Other dims than the indexed one walk together where no tensor is shorter; what is added may be cut in terms."""
    dim = op.args["dim"] % max(len(op.shape(0)), 1)
    operands = range(len(op.operands))
    axes = []
    for d, size in enumerate(op.shape(0)):
        if d != dim:
            axes.append(
                OpAxis(dict.fromkeys(operands, d), {0: d}, blocked=any(op.shape(i)[d] != size for i in operands))
            )
        elif op.name == "aten.scatter_add" and op.shape(1) == op.shape(2):
            axes.append(OpAxis({1: d, 2: d}))
    adds = len(operands) == 3 and op.args.get("reduce") is None
    return Rule(axes=axes, linear=[frozenset({0, 2})] if adds else [], additive=frozenset({0}))


@register("aten.index_add", "aten.index_copy")
def _index_add(op: Op) -> Rule | None:
    """``a v b, i, a i b -> a v b``."""
    dim = op.args["dim"] % max(len(op.shape(0)), 1)
    if not op.shape(0) or not op.shape(1):
        return None
    axes = [OpAxis({0: d, 2: d}, {0: d}) for d in range(len(op.shape(0))) if d != dim]
    if op.name == "aten.index_add":
        axes.append(OpAxis({1: 0, 2: dim}))
    return Rule(axes=axes, linear=[frozenset({0, 2})], additive=frozenset({0}))


@register("aten.index_select")
def _index_select(op: Op) -> Rule | None:
    if not op.shape(0) or not op.shape(1):
        return None
    dim = op.args["dim"] % len(op.shape(0))
    axes = [OpAxis({0: d}, {0: d}) for d in range(len(op.shape(0))) if d != dim]
    return Rule(axes=[*axes, OpAxis({1: 0}, {0: dim})], linear=[frozenset({0})])


@register("aten.take_along_dim")
def _take_along_dim(op: Op) -> Rule | None:
    return _gather(op) if op.args.get("dim") is not None else None


def _indexed(op: Op) -> tuple[int, int, list[int]] | None:
    """``x[:, i, j]``: the first indexed dim, how many there are, and the index operands; None for other forms."""
    slots = op.positions["indices"]
    given = [d for d, slot in enumerate(slots) if slot is not None]
    if not given or given != list(range(given[0], given[-1] + 1)):
        return None
    operands = [slot for slot in slots if slot is not None]
    if any(value_tensor(op.operands[i]).dtype in (torch.bool, torch.uint8) for i in operands):
        return None
    return given[0], len(given), operands


@register("aten.index")
def _index(op: Op) -> Rule | None:
    """Index tensors in neighbouring dims broadcast to new dims in their place."""
    found = _indexed(op)
    if found is None:
        return None
    first, count, operands = found
    rank = len(op.shape(0))
    new = len(op.outputs[0]) - (rank - count)
    axes = [OpAxis({0: d}, {0: d}) for d in range(first)]
    axes += [OpAxis({0: d}, {0: d - count + new}) for d in range(first + count, rank)]
    for d in range(new):
        axes.append(OpAxis(_broadcast(op, operands, d, new), {0: first + d}))
    return Rule(axes=axes, linear=[frozenset({0})])


def _broadcast(op: Op, operands: list[int], dim: int, rank: int) -> dict[int, int]:
    """The dims of operands that broadcast to dim *dim* of *rank* dims."""
    own = {i: dim - rank + len(op.shape(i)) for i in operands}
    return {i: d for i, d in own.items() if d >= 0 and op.shape(i)[d] != 1}


@register("aten.index_put")
def _index_put(op: Op) -> Rule | None:
    """Writes where ``x[:, i, j]`` reads: other dims are free; rows that are added may be terms."""
    found = _indexed(op)
    values = op.operand("values")
    if found is None or values is None:
        return None
    first, count, operands = found
    shape = op.shape(0)
    new = max(len(op.shape(i)) for i in operands)
    rank = len(shape) - count + new
    axes = []
    for d in range(len(shape)):
        if not first <= d < first + count:
            place = d if d < first else d - count + new
            axes.append(OpAxis({0: d, **_broadcast(op, [values], place, rank)}, {0: d}))
    if op.args["accumulate"]:
        for d in range(new):
            members = {**_broadcast(op, operands, d, new), **_broadcast(op, [values], first + d, rank)}
            axes.append(OpAxis(members, blocked=values not in members))
    return Rule(axes=axes, linear=[frozenset({0, values})], additive=frozenset({0}))
