"""Rules of matrix products and attention."""

from __future__ import annotations

from whale.strategies.rules.registry import Op, OpAxis, Rule, notation, register, same_axes

notation("* i, o i, +o? -> * o", "aten.linear")
notation("m k, k n -> m n", "aten.mm")
notation("b m k, b k n -> b m n", "aten.bmm")
notation("k, k -> ", "aten.dot")
notation("m k, k -> m", "aten.mv")
notation("m, n -> m n", "aten.outer", "aten.ger")
notation("* i, * j, o i j, +o? -> * o", "aten.bilinear")
notation("n k, e! k m, n -> n m", "whale.runtime.experts.grouped_product")


@register("whale.runtime.experts.to_experts", "whale.runtime.experts.from_experts")
def _to_and_from_experts(op: Op) -> Rule:
    """``n *, n -> n *``; rows that are terms of a sum stay terms."""
    rows, *others = same_axes(op, 0)
    rows.inputs[1] = 0
    return Rule(axes=[rows, *others], linear=[frozenset({0})])


@register("aten.einsum")
def _einsum(op: Op) -> Rule | None:
    """The equation is the rule; repeated letters in one operand (a trace) are not covered."""
    equation = op.args.get("equation")
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    left, right = equation.replace(" ", "").split("->")
    axes: dict[str, OpAxis] = {}
    for operand, letters in enumerate(left.split(",")):
        if len(set(letters)) != len(letters):
            return None
        for dim, letter in enumerate(letters):
            if op.shape(operand)[dim] != 1:
                axes.setdefault(letter, OpAxis()).inputs[operand] = dim
    for dim, letter in enumerate(right):
        if letter in axes:
            axes[letter].outputs[0] = dim
    return Rule(axes=list(axes.values()))


@register("aten.tensordot")
def _tensordot(op: Op) -> Rule:
    left, right = len(op.shape(0)), len(op.shape(1))
    one, other = ([d % r for d in op.args[k]] for k, r in (("dims_self", left), ("dims_other", right)))
    free = [d for d in range(left) if d not in one], [d for d in range(right) if d not in other]
    axes = [OpAxis({0: d}, {0: i}) for i, d in enumerate(free[0])]
    axes += [OpAxis({1: d}, {0: len(free[0]) + i}) for i, d in enumerate(free[1])]
    return Rule(axes=axes + [OpAxis({0: a, 1: b}) for a, b in zip(one, other, strict=True)])


@register("aten.addmm", "aten.baddbmm")
def _addmm(op: Op) -> Rule:
    """``+m o, ... m i, ... i o -> ... m o``, the first operand broadcast."""
    batch = len(op.outputs[0]) - 2
    bias = op.shape(0)
    axes = [OpAxis({1: i, 2: i}, {0: i}) for i in range(batch)]
    axes += [OpAxis({1: batch}, {0: batch}), OpAxis({2: batch + 1}, {0: batch + 1})]
    axes.append(OpAxis({1: batch + 1, 2: batch}))
    for axis in axes:
        if 0 in axis.outputs:
            dim = axis.outputs[0] - (batch + 2 - len(bias))
            if dim >= 0 and bias[dim] != 1:
                axis.inputs[0] = dim
    return Rule(axes=axes, additive=frozenset({0}))


@register("aten.matmul")
def _matmul(op: Op) -> Rule:
    left, right, out = op.shape(0), op.shape(1), op.outputs[0]
    if len(left) < 2 or len(right) < 2:  # a vector has only the dim that is summed over
        one, other = max(len(left) - 1, 0), max(len(right) - 2, 0)
        axes = [OpAxis({0: d}, {0: d}) for d in range(one)]
        axes += [OpAxis({1: d}, {0: one + d}) for d in range(other)]
        axes += [OpAxis({1: d}, {0: one + other}) for d in range(other + 1, len(right))]
        return Rule(axes=[*axes, OpAxis({0: one, 1: other})])
    axes = []
    for dim in range(len(out) - 2):
        axis = OpAxis(outputs={0: dim})
        for operand, shape in ((0, left), (1, right)):
            own = dim - (len(out) - len(shape))
            if own >= 0 and shape[own] != 1:
                axis.inputs[operand] = own
        axes.append(axis)
    axes.append(OpAxis({0: len(left) - 2}, {0: len(out) - 2}))
    axes.append(OpAxis({0: len(left) - 1, 1: len(right) - 2}))
    axes.append(OpAxis({1: len(right) - 1}, {0: len(out) - 1}))
    return Rule(axes=axes)


@register("aten.scaled_dot_product_attention")
def _attention(op: Op) -> Rule | None:
    query, key, value = (op.shape(i) for i in range(3))
    if not len(query) == len(key) == len(value) or len(query) < 3:
        return None
    batch, width = len(query) - 2, len(query) - 1
    grouped = bool(op.args.get("enable_gqa")) and query[-3] != key[-3]
    axes = []
    for dim in range(batch):
        if grouped and dim == batch - 1:
            axes.append(OpAxis({0: dim, 1: dim, 2: dim}, {0: dim}, factor=(1, key[-3])))
        else:
            alike = len({query[dim], key[dim], value[dim]}) == 1
            axes.append(OpAxis(dict.fromkeys(range(3), dim), {0: dim}, blocked=not alike))
    axes.append(OpAxis({0: batch}, {0: batch}, form="causal" if op.args.get("is_causal") else ""))
    ring = OpAxis(dict.fromkeys(range(3), batch), {0: batch}, form="ring")
    axes.append(OpAxis({0: width, 1: width}, {}, blocked=True))
    axes.append(OpAxis({1: batch, 2: batch}, {}, blocked=True))
    axes.append(OpAxis({2: width}, {0: width}, blocked=value[-1] == query[-1]))
    mask = op.operand("attn_mask")
    if mask is not None:
        shape = op.shape(mask)
        for axis in (*axes[: batch + 1], ring):
            dim = axis.outputs[0] - (len(query) - len(shape))
            if dim >= 0 and shape[dim] != 1:
                axis.inputs[mask] = dim
        if shape[-1] != 1:
            axes.append(OpAxis({mask: len(shape) - 1}, {}, blocked=True))
    if grouped:
        axes.append(OpAxis({0: batch - 1}, {0: batch - 1}, factor=(key[-3], query[-3] // key[-3])))
    of_itself = query[-2] == key[-2] and (mask is None or op.shape(mask)[-1] in (1, key[-2]))
    if of_itself and len(query) == 4 and not op.args.get("dropout_p"):
        axes.append(ring)
    return Rule(axes=axes)
