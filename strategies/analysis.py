"""Axis analysis of a graph: which dims are the same axis, and how each operator can be sharded.

The result does not depend on devices: it is computed once for a captured graph, then read by the placement solver for
every mesh axis and by the lowering for every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from whale.graph.values import Value, is_call, needs_grad, output_shapes, resolve, value_shape, value_tensor
from whale.ir.placement import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Placement, shard
from whale.strategies.axes import AxisFactors, Dim
from whale.strategies.routes import ROUTED, Routes, routes_of
from whale.strategies.rules import rule_of
from whale.strategies.rules.registry import Op, OpAxis, Rule


@dataclass(frozen=True)
class Choice:
    """One way to compute an operator on one mesh axis: a placement for each operand and each output."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: int = -1
    form: str = ""

    def __str__(self) -> str:
        return f"{','.join(map(str, self.inputs))}->{','.join(map(str, self.outputs))}"


class Form(NamedTuple):
    """The choices of an operator up to the names of its axis factors.

    Attributes:
        number: equal for operators with equal choices, whose prices are equal if their values have equal bytes.
        factors: of the choices, in order of appearance; -1 among them.
        num_outputs: of the operator.
    """

    number: int
    factors: tuple[int, ...]
    num_outputs: int


@dataclass
class Analysis:
    """The axes of a graph. ``dims[value][d]`` is dim *d* of a value as a product of axis factors.

    ``batch_factor`` is the axis factor along which the batch can be cut, -1 if there is none. ``solved`` caches
    segments of the graph that are already placed, because many are equal, for one mesh after the other; ``forms`` what
    :meth:`form` returned.
    """

    factors: AxisFactors = field(default_factory=AxisFactors)
    dims: dict[Value, list[Dim]] = field(default_factory=dict)
    ops: dict[fx.Node, Op] = field(default_factory=dict)
    rules: dict[fx.Node, Rule] = field(default_factory=dict)
    choices: dict[fx.Node, list[Choice]] = field(default_factory=dict)
    batch_factor: int = -1
    solved: dict[Any, Any] = field(default_factory=dict)
    forms: dict[fx.Node, Form] = field(default_factory=dict)
    _form_numbers: dict[Hashable, int] = field(default_factory=dict)

    def shardable(self, value: Value, factor: int, dim: int) -> bool:
        """Whether dim *dim* of a value can be cut along *factor*."""
        return self.factors.count(self.dims[value][dim], factor) == 1

    def form(self, node: fx.Node) -> Form:
        """The choices of an operator up to the names of its axis factors."""
        if node not in self.forms:
            factors: dict[int, int] = {}
            op, rule = self.ops[node], self.rules[node]

            def tokens(placements: Iterable[Placement]) -> Hashable:
                return tuple([(p.kind, p.dim, factors.setdefault(p.factor, len(factors))) for p in placements])

            choices = tuple(
                (tokens(c.inputs), tokens(c.outputs), factors.setdefault(c.factor, len(factors)), c.form)
                for c in self.choices[node]
            )
            terms = contracted_terms(op, rule)
            token = (
                choices,
                tuple(factor < 0 or self.factors.size(factor) for factor in factors),
                tuple(needs_grad(value) for value in op.operands),
                tuple(needs_grad((node, index)) for index, _ in enumerate(output_shapes(node))),
                (terms, value_tensor((node, 0)).element_size()) if terms else 0,
                tuple((dim, each.extent, each.stride, op.shape(0)[dim]) for dim, each in rule.windows.items()),
            )
            number = self._form_numbers.setdefault(token, len(self._form_numbers))
            self.forms[node] = Form(number, tuple(factors), len(output_shapes(node)))
        return self.forms[node]


def contracted_terms(op: Op, rule: Rule) -> int:
    """Length of the first dim along which an operator sums products; 0 if there is none."""
    axis = next((axis for axis in rule.axes if not axis.outputs and len(axis.inputs) > 1), None)
    if axis is None:
        return 0
    operand, dim = next(iter(axis.inputs.items()))
    return op.shape(operand)[dim]


def analyse(graph: fx.Graph, batch: Sequence[fx.Node] = ()) -> Analysis:
    """Find the axes of every value and the sharding choices of every operator of a captured graph.

    *batch* are the placeholders whose first dim is the batch.
    """
    analysis = Analysis()
    factors = analysis.factors
    tiles = _tiling_slices(graph)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if isinstance(node.meta.get("val"), torch.Tensor):
                analysis.dims[(node, 0)] = [factors.dim(s) for s in value_shape((node, 0))]
            continue
        if not is_call(node):
            continue
        op = Op(node)
        rule = rule_of(node)
        analysis.ops[node], analysis.rules[node] = op, rule
        for index, shape in enumerate(output_shapes(node)):
            analysis.dims[(node, index)] = [factors.dim(size) for size in shape]
        if node in tiles:
            _cut_tiles(analysis, node, tiles[node])
        _relate(analysis, op, rule)
    rows = [analysis.dims[(node, 0)][0] for node in batch]
    for other in rows[1:]:
        factors.align([rows[0]], [other])
    if rows:
        found = factors.cuttable(rows[0])
        analysis.batch_factor = found[0] if found else -1
    routes = routes_of((op, analysis.rules[node]) for node, op in analysis.ops.items())
    for one in routes:
        one.align(factors, analysis.dims)
    for node in analysis.ops:
        analysis.choices[node] = _choices(analysis, node)
    for one in routes:
        _add_routed(analysis, one)
    return analysis


def _add_routed(analysis: Analysis, routes: Routes) -> None:
    """Add the choices to compute rows at their experts."""
    cuts = {
        node: {
            c.factor for c in analysis.choices[node] if all(p == shard(0, c.factor) for p in (*c.inputs, *c.outputs))
        }
        for node in routes.ops
    }
    for node, way in routes.ways(analysis.factors, analysis.dims, cuts):
        analysis.choices[node].append(Choice(way.inputs, way.outputs, way.experts, ROUTED))


def _relate(analysis: Analysis, op: Op, rule: Rule) -> None:
    """Apply the rule of one call to the axis factors; block the axes whose structures contradict."""
    factors, dims = analysis.factors, analysis.dims

    def operand(index: int) -> list[Dim]:
        return dims[op.operands[index]]

    def output(index: int) -> list[Dim]:
        return dims[(op.node, index)]

    for axis in rule.axes:
        members = [operand(i)[d] for i, d in axis.inputs.items()] + [output(i)[d] for i, d in axis.outputs.items()]
        if axis.blocked or axis.form in ("tile", "ring"):  # cut from its whole already; for dims that are one anyway
            continue
        if axis.factor is not None:
            outer, size = axis.factor
            axis.within = factors.dim(size)
            pairs = []
            for member in members:
                rest = factors.dim(factors.extent(member) // (outer * size))
                pairs.append((member, [factors.dim(outer), axis.within, rest]))
            walked = [factors.align([member], split) for member, split in pairs]  # each, also after one that fails
            axis.blocked = not all(walked)
            continue
        for member in members[1:]:
            if factors.extent(member) != factors.extent(members[0]) or not factors.align([members[0]], [member]):
                axis.blocked = True
    for source, target in rule.views:
        factors.align(operand(source), output(target))
    for source, dim, sizes in rule.sums:
        if source >= 0:
            whole, parts = operand(source)[dim], [output(i)[dim] for i in range(len(sizes))]
        else:
            whole, parts = output(0)[dim], [operand(i)[dim] for i in range(len(sizes))]
        rule.axes.append(_join(factors, whole, parts, sizes, source, dim))


def _join(
    factors: AxisFactors, whole: Dim, parts: Sequence[Dim], sizes: Sequence[int], source: int, dim: int
) -> OpAxis:
    """Record that *whole* is the concatenation of the parts, along the axis of the split or the join."""
    many = dict.fromkeys(range(len(parts)), dim)
    axis = OpAxis({source: dim}, many) if source >= 0 else OpAxis(many, {0: dim})
    if len(parts) == 1:
        axis.blocked = not factors.align([whole], [parts[0]])
    elif len(set(sizes)) == 1 and sizes[0] > 1:
        walked = [factors.align([parts[0]], [part]) for part in parts[1:]]
        axis.blocked = not (factors.align([whole], [[factors.new(len(parts))], parts[0]]) and all(walked))
    elif len(whole) == 1 and min(sizes) > 1:
        cut = factors.split_sum(whole[0], sizes)
        walked = [] if cut is None else [factors.align([[c]], [p]) for c, p in zip(cut, parts, strict=True)]
        axis.blocked = cut is None or not all(walked)
    else:
        axis.blocked = True
    return axis


def _tiling_slices(graph: fx.Graph) -> dict[fx.Node, tuple[tuple[int, ...], int, int]]:
    """Slices that together tile a dim, which are a split in another form: node -> (sizes, index, dim)."""
    groups: dict[tuple[Value, int], list[tuple[int, int, fx.Node]]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.slice.Tensor:
            source = resolve(node.args[0])
            shape = value_shape(source)
            bound = Op(node).args
            dim = (bound.get("dim") or 0) % len(shape)
            if bound.get("step", 1) != 1:
                continue
            start = min(max(_wrap(bound.get("start") or 0, shape[dim]), 0), shape[dim])
            groups[(source, dim)].append((start, start + node.meta["val"].shape[dim], node))
    found = {}
    for (source, dim), slices in groups.items():
        bounds = sorted({(first, last) for first, last, _ in slices})
        tiled = bounds[0][0] == 0 and bounds[-1][1] == value_shape(source)[dim] and len(bounds) > 1
        if tiled and all(a[1] == b[0] for a, b in pairwise(bounds)):
            sizes = tuple(last - first for first, last in bounds)
            for first, last, node in slices:
                found[node] = (sizes, bounds.index((first, last)), dim)
    return found


def _wrap(index: int, size: int) -> int:
    return index + size if index < 0 else index


def _cut_tiles(analysis: Analysis, node: fx.Node, tile: tuple[tuple[int, ...], int, int]) -> None:
    """Make a tiling slice shardable along its dim, as a split is."""
    sizes, index, dim = tile
    factors = analysis.factors
    whole = analysis.dims[analysis.ops[node].operands[0]][dim]
    if min(sizes) < 2:
        return
    out = analysis.dims[(node, 0)][dim]
    if len(set(sizes)) == 1:
        joined = factors.align([whole], [[factors.new(len(sizes))], out])
    else:
        cut = factors.split_sum(whole[0], sizes) if len(whole) == 1 else None
        joined = cut is not None and factors.align([[cut[index]]], [out])
    if not joined:
        return
    rule = analysis.rules[node]
    rule.axes = [axis for axis in rule.axes if axis.inputs.get(0) != dim] + [OpAxis({0: dim}, {0: dim}, form="tile")]
    start, extent = sum(sizes[:index]), sizes[index]

    def local(op: Op, args: dict, shapes: object) -> dict:
        size = shapes.outputs[0][dim]  # type: ignore[attr-defined]
        first = start * size // extent
        return {**args, "start": first, "end": first + size}

    rule.local = local


def _choices(analysis: Analysis, node: fx.Node) -> list[Choice]:
    """All choices to compute one call on one mesh axis; computing it whole is the first."""
    op, rule = analysis.ops[node], analysis.rules[node]
    num_inputs, num_outputs = len(op.operands), len(output_shapes(node))
    found = [Choice((REPLICATE,) * num_inputs, (REPLICATE,) * num_outputs)]
    for axis in rule.axes:
        if not axis.blocked:
            found += _axis_choices(analysis, op, rule, axis)
    for source, target in rule.views:
        found += _view_choices(analysis, op, source, target)
    for partial in rule.linear:
        inputs = tuple(PARTIAL if i in partial else REPLICATE_PARTIAL for i in range(num_inputs))
        found.append(Choice(inputs, (PARTIAL,) * num_outputs))
    return found


def _axis_choices(analysis: Analysis, op: Op, rule: Rule, axis: OpAxis) -> Iterable[Choice]:
    factors = analysis.factors
    members = [(op.operands[i], d) for i, d in axis.inputs.items()]
    members += [((op.node, i), d) for i, d in axis.outputs.items()]
    if not members:
        return
    first, dim = members[0]
    for factor in factors.cuttable(analysis.dims[first][dim] if axis.within is None else axis.within):
        if not all(analysis.shardable(value, factor, d) for value, d in members):
            continue
        if axis.form in STRETCHES and not _contiguous(analysis, members, factor):
            continue
        inputs = tuple(
            shard(axis.inputs[i], factor)
            if i in axis.inputs
            else (PARTIAL if i in rule.additive and not axis.outputs else REPLICATE_PARTIAL)
            for i in range(len(op.operands))
        )
        outputs = tuple(
            shard(axis.outputs[i], factor) if i in axis.outputs else _CONTRACTED.get(axis.form, PARTIAL)
            for i in range(len(output_shapes(op.node)))
        )
        yield Choice(inputs, outputs, factor, axis.form)


STRETCHES = {"vocabulary_embedding", "vocabulary_cross_entropy", "vocabulary_nll_loss", "halo", "causal", "offset"}
"""Forms that require a part to be a range of indices."""

_CONTRACTED = {"vocabulary_cross_entropy": REPLICATE, "batch_statistics": REPLICATE}
"""Placement that a contracted axis leaves if its special form has already summed."""


def _contiguous(analysis: Analysis, members: Sequence[tuple[Value, int]], factor: int) -> bool:
    """Whether each part of the axis is one contiguous range, so that a part is a range of indices."""
    return all(
        len(segments) == 1 and segments[0].outer == 1
        for value, dim in members
        for segments in [analysis.factors.segments(analysis.dims[value][dim], factor, {})]
    )


def _view_choices(analysis: Analysis, op: Op, source: int, target: int) -> Iterable[Choice]:
    factors = analysis.factors

    def positions(dims: list[Dim]) -> dict[tuple[int, int], int]:
        flat = [(factor, d) for d, dim in enumerate(dims) for factor in factors.flat(dim)]
        extents = [factors.extent([factor]) for factor, _ in flat]
        return {(factor, prod(extents[i + 1 :])): d for i, (factor, d) in enumerate(flat)}

    value, out = op.operands[source], (op.node, target)
    inside, outside = positions(analysis.dims[value]), positions(analysis.dims[out])
    for place, dim in inside.items():
        if place not in outside:
            continue
        for factor in factors.cuttable([place[0]]):
            if analysis.shardable(value, factor, dim) and analysis.shardable(out, factor, outside[place]):
                yield Choice((shard(dim, factor),), (shard(outside[place], factor),), factor)
