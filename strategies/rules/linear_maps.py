"""Which elementwise operators pass a term of a sum on as a term of a sum."""

from __future__ import annotations

from whale.strategies.rules.registry import Op, Rule, pointwise, register


@register("aten.neg")
def _neg(op: Op) -> Rule:
    rule = pointwise(op)
    rule.linear = [frozenset({0})]
    return rule


@register("aten.add", "aten.sub")
def _add(op: Op) -> Rule:
    rule = pointwise(op)
    if len(op.operands) == 2:
        rule.linear = [frozenset({0, 1})]
        rule.additive = frozenset({0, 1})
    return rule


@register("aten.mul")
def _mul(op: Op) -> Rule:
    rule = pointwise(op)
    # A product is linear in each factor while the other is whole.
    rule.linear = [frozenset({i}) for i in range(len(op.operands))]
    return rule


@register("aten.div")
def _div(op: Op) -> Rule:
    rule = pointwise(op)
    if op.args.get("rounding_mode") is None:
        rule.linear = [frozenset({0})]
    return rule
