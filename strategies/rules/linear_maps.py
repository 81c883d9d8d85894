"""Rules of elementwise operators that preserve partial sums, or that torch does not tag as pointwise."""

from __future__ import annotations

from whale.strategies.rules.registry import Op, OpAxis, Rule, pointwise, register


@register(
    "aten.__and__", "aten.__or__", "aten.__xor__", "aten.floor_divide", "aten.log_sigmoid", "aten.isclose",
    "aten.isfinite", "aten.isinf", "aten.hardswish", "aten.absolute", "aten.greater", "aten.less", "aten.special_expit",
    "aten.complex", "aten.polar", "aten.leaky_relu",
)  # fmt: skip
def _untagged(op: Op) -> Rule:
    return pointwise(op)


@register("aten.neg", "aten.negative")
def _neg(op: Op) -> Rule:
    rule = pointwise(op)
    rule.linear = [frozenset({0})]
    return rule


@register("aten.add", "aten.sub", "aten.subtract", "aten.rsub")
def _add(op: Op) -> Rule:
    rule = pointwise(op)
    if len(op.operands) == 2:
        rule.linear = [frozenset({0, 1})]
    return rule


@register("aten.mul", "aten.multiply")
def _mul(op: Op) -> Rule:
    """A product is linear in each factor while the other is whole."""
    rule = pointwise(op)
    rule.linear = [frozenset({i}) for i in range(len(op.operands))]
    return rule


@register("aten.div", "aten.divide", "aten.true_divide")
def _div(op: Op) -> Rule:
    rule = pointwise(op)
    if op.args.get("rounding_mode") is None and op.operand("self") == 0:
        rule.linear = [frozenset({0})]
    return rule


@register("aten.where", "aten.masked_fill")
def _where(op: Op) -> Rule:
    """Linear in the choices, if a constant choice is zero."""
    rule = pointwise(op)
    names = ("self", "other") if op.name == "aten.where" else ("self", "value")
    chosen = [op.operand(name) for name in names]
    numbers = [op.args.get(name) for name, operand in zip(names, chosen, strict=True) if operand is None]
    if all(number == 0 for number in numbers):
        rule.linear = [frozenset(operand for operand in chosen if operand is not None)]
    return rule


@register("aten.fill", "aten.zero")
def _fill(op: Op) -> Rule:
    return pointwise(op)


@register("aten.prelu")
def _prelu(op: Op) -> Rule:
    """The weight belongs to dim 1, or to all."""
    rank, slopes = len(op.shape(0)), op.shape(1)
    axes = [OpAxis({0: dim}, {0: dim}) for dim in range(rank)]
    if slopes != (1,) and rank > 1:
        axes[1].inputs[1] = 0
    return Rule(axes=axes)


@register("aten.searchsorted")
def _searchsorted(op: Op) -> Rule | None:
    wanted = op.operand("self")
    if len(op.shape(0)) != 1 or wanted is None or op.args.get("sorter") is not None:
        return None
    return Rule(axes=[OpAxis({wanted: dim}, {0: dim}) for dim in range(len(op.shape(wanted)))])


@register("aten.bucketize")
def _bucketize(op: Op) -> Rule | None:
    if op.operand("self") != 0:
        return None
    return Rule(axes=[OpAxis({0: dim}, {0: dim}) for dim in range(len(op.shape(0)))])
