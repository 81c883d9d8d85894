"""Rows at experts: which operators may compute rows where the experts are that these chose, and how each reads them.

Between :func:`~whale.runtime.experts.to_experts` and :func:`~whale.runtime.experts.from_experts` every operator
computes row by row, so a rank may have any rows there. It is then the axis of the experts that is cut: dim 0 of their
stacked matrices. This is one more choice for each of these operators; whether it is taken is the solver's question.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import fx

from whale.graph.values import Value, output_shapes
from whale.ir.placement import PARTIAL, REPLICATE_PARTIAL, Placement, at_experts, shard
from whale.runtime.experts import from_experts, grouped_product, to_experts
from whale.strategies.axes import AxisFactors, Dim
from whale.strategies.rules.registry import Op, Rule

__all__ = ["ROUTED", "Routed", "Routes", "routes_of", "rows_after"]

aten = torch.ops.aten

ROUTED = "routed"
"""Form of the choices of operators that compute rows at experts."""


def rows_after(op: Op, rule: Rule, rows: Mapping[int, int]) -> tuple[int, ...] | None:
    """The dims of rows in the outputs of an operator that computes row by row; None if it does not, or if nothing shows
    it. Empty if no output has rows.

    *rows* are the dims of rows in its operands, of those that have any.
    """
    outputs = output_shapes(op.node)
    for axis in rule.axes:
        if not axis.blocked and not axis.form and axis.factor is None and axis.inputs == rows:
            if not axis.outputs:
                return ()
            if len(axis.outputs) < len(outputs):  # a statistic of all rows beside the rows
                return None
            return tuple(axis.outputs[i] for i in range(len(outputs)))
    if rule.views and list(rows) == [0]:
        kept = rows[0] + 1
        if op.shape(0)[:kept] == outputs[0][:kept]:
            return (rows[0],)
    return None


class Routed(NamedTuple):
    """One way to compute an operator with rows at experts: placements of its operands and its outputs, and the factor
    of the experts."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    experts: int


class Routes:
    """The operators that read rows of one choice of experts, with the dim of rows in each of their values."""

    def __init__(self) -> None:
        self.ops: dict[fx.Node, Op] = {}
        self.dims: dict[Value, int] = {}
        self.stacks: list[Value] = []
        self.is_known = True

    def add(self, op: Op, rule: Rule) -> None:
        """Add the next operator that reads rows, or brings them."""
        self.ops[op.node] = op
        if op.target is to_experts:
            self.dims[op.node, 0] = 0
            return
        rows = {i: self.dims[v] for i, v in enumerate(op.operands) if v in self.dims}
        if op.target is from_experts:
            self.is_known &= rows == {0: 0}
            return
        found = rows_after(op, rule, rows)
        self.is_known &= bool(found)
        self.dims.update({(op.node, i): dim for i, dim in enumerate(found or ())})
        if (stack := _stack(op)) is not None:
            self.stacks.append(op.operands[stack])

    def align(self, factors: AxisFactors, dims: Mapping[Value, list[Dim]]) -> None:
        """Let the matrices, and all that has a part for each expert, have one axis of experts."""
        heads = [dims[value][0] for value in self.stacks]
        self.is_known &= bool(heads) and all(factors.align([heads[0]], [head]) for head in heads)
        self.is_known = self.is_known and len(factors.flat(heads[0])) == 1

    def ways(
        self, factors: AxisFactors, dims: Mapping[Value, list[Dim]], cuts: Mapping[fx.Node, set[int]]
    ) -> Iterator[tuple[fx.Node, Routed]]:
        """For each operator the ways to compute it: with rows of ranks that cut them along one of the factors that
        *cuts* has for those that bring rows and take them back, or with rows that all ranks have."""
        if not self.is_known:
            return
        (experts,) = factors.flat(dims[self.stacks[0]][0])
        ends = [node for node, op in self.ops.items() if op.target in (to_experts, from_experts)]
        for way in (-1, *sorted(set.intersection(*(cuts[node] for node in ends)))):
            for node, op in self.ops.items():
                yield node, self._way(node, op, way, experts)

    def _way(self, node: fx.Node, op: Op, way: int, experts: int) -> Routed:
        here, result = shard(0, way) if way >= 0 else REPLICATE_PARTIAL, shard(0, way) if way >= 0 else PARTIAL
        if op.target is to_experts:
            return Routed((here, here), (at_experts(0, way),), experts)
        if op.target is from_experts:
            return Routed((at_experts(0, way), here), (result,), experts)
        stack = _stack(op)
        inputs = tuple(
            at_experts(self.dims[value], way)
            if value in self.dims
            else shard(0, experts) if i == stack else REPLICATE_PARTIAL
            for i, value in enumerate(op.operands)
        )  # fmt: skip
        outputs = tuple(at_experts(self.dims[node, i], way) for i in range(len(output_shapes(node))))
        return Routed(inputs, outputs, experts)


def _stack(op: Op) -> int | None:
    """The operand of which a row reads the part of its expert."""
    if op.target is grouped_product:
        return 1
    return 0 if op.target is aten.index.Tensor else None


def routes_of(ops: Iterable[tuple[Op, Rule]]) -> list[Routes]:
    """The rows at experts of a graph, by choice of experts."""
    found: dict[Value, Routes] = {}
    for op, rule in ops:
        if op.target is to_experts:
            found.setdefault(op.operands[1], Routes()).add(op, rule)
            continue
        reads = [routes for routes in found.values() if not routes.dims.keys().isdisjoint(op.operands)]
        for routes in reads:
            routes.add(op, rule)
            routes.is_known &= len(reads) == 1
    return list(found.values())
