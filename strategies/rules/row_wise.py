"""The rule of custom functions that are declared to compute row by row: their rows are cut, nothing else."""

from __future__ import annotations

from whale.graph.row_wise import NAMESPACE, by_target
from whale.strategies.rules.registry import Op, OpAxis, Rule, register


@register(NAMESPACE)
def _row_wise(op: Op) -> Rule | None:
    """``b ..., b ... -> b ...``; whole operands have no such axis, so that their gradients are sums over rows."""
    rows = [i for i in range(len(op.operands)) if i not in by_target[op.target].whole and op.shape(i)]
    sizes = {op.shape(i)[0] for i in rows} | {output[0] if output else 0 for output in op.outputs}
    if len(sizes) != 1:
        return None
    return Rule(axes=[OpAxis(dict.fromkeys(rows, 0), dict.fromkeys(range(len(op.outputs)), 0))])
