"""Rules of losses. Means were written out as a sum over a global count when the model was captured."""

from __future__ import annotations

from whale.strategies.rules.registry import Op, OpAxis, Rule, pointwise, register


@register("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd")
def _cross_entropy(op: Op) -> Rule | None:
    if op.args.get("reduction", 1) != 0:
        return None
    logits, target = op.shape(0), op.shape(1)
    if logits == target and len(logits) >= 2:  # probabilities of the classes
        return Rule(axes=[OpAxis({0: d, 1: d}, {0: d - (d > 1)}) for d in range(len(logits)) if d != 1])
    if len(logits) != len(target) + 1 or len(logits) < 2:
        return None
    plain = not op.args.get("label_smoothing") and len(logits) == 2 and op.args.get("weight") is None
    form = "vocabulary_cross_entropy" if op.name == "aten.cross_entropy_loss" else "vocabulary_nll_loss"
    axes = [OpAxis({0: d, 1: d - (d > 1)}, {0: d - (d > 1)}) for d in range(len(logits)) if d != 1]
    classes = OpAxis({0: 1}, {}, blocked=not plain, form=form)
    if len(op.operands) > 2:
        classes = OpAxis({0: 1, 2: 0}, {}, blocked=True)
    return Rule(axes=[*axes, classes])


@register(
    "aten.mse_loss", "aten.l1_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_with_logits", "aten.kl_div", "aten.soft_margin_loss",
)  # fmt: skip
def _elementwise(op: Op) -> Rule | None:
    return pointwise(op) if op.args.get("reduction", 1) == 0 else None
