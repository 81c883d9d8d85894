"""Rules of operators that draw random numbers, each by the position of its element in the whole tensor."""

from __future__ import annotations

from typing import Any

from whale.strategies.rules.registry import LocalShapes, Op, OpAxis, Rule, pointwise, register, same_axes


@register("aten.dropout", "aten.native_dropout")
def _dropout(op: Op) -> Rule:
    return Rule(axes=same_axes(op, 0, outputs=range(len(op.outputs))))


@register(
    "aten.rand_like", "aten.randn_like", "aten.randint_like", "aten.uniform", "aten.normal_functional",
    "aten.exponential", "aten.geometric", "aten.cauchy", "aten.log_normal", "aten.random",
)  # fmt: skip
def _like(op: Op) -> Rule | None:
    return Rule(axes=same_axes(op, 0)) if len(op.operands) == 1 else None


@register("aten.bernoulli", "aten.normal")
def _each(op: Op) -> Rule | None:
    """A number for each element of the parameters, which broadcast; for none, a new tensor."""
    return pointwise(op) if op.operands else _create(op)


@register("aten.rand", "aten.randn", "aten.randint")
def _create(op: Op) -> Rule:
    def local(op: Op, args: dict[str, Any], shapes: LocalShapes) -> dict[str, Any]:
        return {**args, "size": list(shapes.outputs[0])}

    return Rule(axes=[OpAxis({}, {0: dim}) for dim in range(len(op.outputs[0]))], local=local)


@register("aten.multinomial")
def _multinomial(op: Op) -> Rule:
    """``* e! -> * k``."""
    rows = range(len(op.shape(0)) - 1)
    draws = OpAxis({}, {0: len(rows)}, blocked=True)
    return Rule(axes=[*(OpAxis({0: d}, {0: d}) for d in rows), draws])
