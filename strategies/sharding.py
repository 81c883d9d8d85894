"""The placement solver: a placement for every tensor of a stage, one mesh axis at a time.

Objective: the bytes that the runtime moves in a step (:func:`conversion_cost`), plus duplicated work (:class:`Prices`).
Constraints, each an annotation:

* ``split``: a matrix that is read inside the region is stored sharded and never gathered (:data:`_FORBIDDEN`);
* ``replicate``: operators are cut along the batch, parameters are whole, activations are never bridged
  (:func:`_allowed`); ``split`` along a dim is the same with another axis factor.

Minimizing bytes alone would gather weights for every use (ZeRO-3), so costs only break ties between what the
annotations allow. The search is a dynamic program over the topological order whose state is the placements of the live
values, with a beam. Its steps are the segments between narrow places of the graph; segments that are equal up to names
are solved once, so the cost does not grow with depth. The beam makes it a heuristic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from torch import fx

from whale.graph.values import Value, has_sparse_gradient, needs_grad, value_shape, value_tensor
from whale.ir.placement import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Placement
from whale.ir.strategy import Experts
from whale.runtime.experts import from_experts, to_experts
from whale.strategies.analysis import Analysis, Choice, contracted_terms
from whale.strategies.bridge_prices import Prices, all_reduce_price, conversion_cost, exchange_price, ring_price
from whale.strategies.forms import ASKED, COLLECTIVES
from whale.strategies.routes import ROUTED
from whale.strategies.sequences import Ways, allowed_ways, repetitions
from whale.strategies.states import Canonical, Known, Moves, Priced, State, canonical, undominated, with_gradient

_RESHAPED = {
    torch.ops.aten.reshape.default, torch.ops.aten.expand.default, torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default, torch.ops.aten._to_copy.default,
}  # fmt: skip
_FORBIDDEN = 1e15
"""Price of a choice that an annotation forbids: finite, so that a graph without an allowed choice is still lowered, and
reported."""


@dataclass(frozen=True, kw_only=True)
class AxisProblem:
    """Input of the solver for one mesh axis of one stage.

    ``along`` is the axis factor along which each operator is to be cut (the batch, or a dim of the region; -1: none);
    None for operators whose matrices are split. ``units`` are the positions of a factor that the earlier axes have left
    an operator. ``attention`` are operators along a sequence that may be cut otherwise. ``experts`` says of operators
    that compute rows at experts whether a rank has whole experts; of those that it does not have, the solver does.
    """

    nodes: Sequence[fx.Node]
    along: Mapping[fx.Node, int | None]
    size: int
    parameters: frozenset[Value]
    free: frozenset[Value]
    received: frozenset[Value]
    outputs: Mapping[Value, Literal["sum", "whole", "any"] | Placement]
    local_bytes: Callable[[Value], int]
    units: Callable[[fx.Node, int], float]
    prices: Prices = field(default_factory=Prices)
    attention: Ways = field(default_factory=dict)
    experts: Mapping[fx.Node, Experts] = field(default_factory=dict)
    fixed: Mapping[Value, Placement] = field(default_factory=dict)

    def divides(self, node: fx.Node, factor: int) -> bool:
        """Whether the ranks may divide an operator along an axis factor, if that is not asked for: a rank without any
        of it would wait for the others, and messages are padded to the largest part. Whole experts wait for the rows of
        others in any case, and stay in the rows of the operators around them."""
        own = self.experts.get(node) == "whole" and factor in self._rows
        return factor < 0 or own or self.units(node, factor) >= self.size

    @cached_property
    def _rows(self) -> frozenset[int]:
        """The axis factors along which operators are to be cut."""
        return frozenset(factor for factor in self.along.values() if factor is not None and factor >= 0)


@dataclass
class AxisSolution:
    """A choice for every operator, and how parameters and received values are stored, on one mesh axis."""

    choices: dict[fx.Node, Choice]
    stored: dict[Value, Placement]
    cost: float
    forbidden: list[Value] = field(default_factory=list)


def solve_axis(analysis: Analysis, problem: AxisProblem) -> AxisSolution:
    """The cheapest placements for one mesh axis of one stage."""
    return _Solver(analysis, problem).solve()


def _allowed(analysis: Analysis, problem: AxisProblem, node: fx.Node) -> list[int]:
    """The choices that the node's annotation allows on this axis, by number; :data:`_WHOLE` for `_whole`."""
    factor, every = problem.along[node], analysis.choices[node]
    fit = [i for i, c in enumerate(every) if c.factor < 0 or analysis.factors.size(c.factor) >= problem.size]
    whole = [_WHOLE] * bool(analysis.ops[node].operands)
    if factor is None:
        usable = [i for i, c in enumerate(every) if c.form not in ASKED and problem.divides(node, c.factor)]
        routed = {i for i in usable if every[i].form == ROUTED}
        match problem.experts.get(node):
            case "whole" if routed:
                return [i for i in usable if i in routed]
            case "cut":
                usable = [i for i in usable if i not in routed]
        return usable + whole
    if node in problem.attention:
        heads = [i for i in fit if problem.divides(node, every[i].factor)]
        cut = allowed_ways(analysis, node, factor, problem.attention[node], heads)
    else:
        cut = [i for i, c in enumerate(every) if c.factor == factor >= 0]
    linear = [i for i in fit if every[i].factor < 0 and PARTIAL in every[i].inputs]
    if cut:
        return cut + linear
    return [fit[0], *whole, *linear] if whole else [fit[0]]


_WHOLE = -1


def _whole(analysis: Analysis, node: fx.Node) -> Choice:
    """Everything replicated with partial gradient."""
    num_operands = len(analysis.ops[node].operands)
    return Choice((REPLICATE_PARTIAL,) * num_operands, (REPLICATE_PARTIAL,) * analysis.form(node).num_outputs)


def _work(analysis: Analysis, problem: AxisProblem, node: fx.Node) -> float:
    """Price of computing the node once, forward and backward, in the units of :class:`Prices`."""
    op = analysis.ops[node]
    nbytes = sum(problem.local_bytes((node, i)) for i in range(analysis.form(node).num_outputs))
    cost = 3 * nbytes * problem.prices.byte_touched
    if terms := contracted_terms(op, analysis.rules[node]):
        count = nbytes / max(value_tensor((node, 0)).element_size(), 1)
        cost += 6 * count * terms * problem.prices.flop
    return cost


class _Segment:
    """A segment of the topological order in canonical form: values, placements and factors are small numbers."""

    def __init__(self, solver: _Solver, nodes: Sequence[fx.Node], last: Mapping[Value, int], offset: int) -> None:
        self.nodes = nodes
        self.values: dict[Value, int] = {}
        self.factors: dict[int, int] = {-1: -1}
        self.steps: list[tuple[tuple[int, ...], tuple[int, ...], Priced, tuple[int, ...], bool]] = []
        self.dead: list[tuple[int, ...]] = []
        key: list[object] = []
        problem, analysis, values, factors = solver.problem, solver.analysis, self.values, self.factors
        for position, node in enumerate(nodes, offset):
            read, form, priced = analysis.ops[node].operands, analysis.form(node), solver.priced(node)
            results = [(node, i) for i in range(form.num_outputs)]
            operands = tuple([-1 if v in problem.free else values.setdefault(v, len(values)) for v in read])
            outputs = tuple([values.setdefault(v, len(values)) for v in results])
            own = tuple([factors.setdefault(factor, len(factors) - 1) for factor in form.factors])
            dead = {
                values[v]
                for v in (*read, *results)
                if last.get(v, -1) <= position and v in values and v not in problem.outputs
            }
            split = problem.along[node] is None
            self.steps.append((operands, outputs, priced, own, split))
            self.dead.append(tuple(sorted(dead)))
            key.append((operands, outputs, priced.number, own, split, self.dead[-1]))
        self.factors_by_id = list(factors)[1:]
        self.info = [
            (
                *solver.describe(v),
                None if (p := problem.fixed.get(v)) is None else self.numbered(canonical(p), solver.needs_grad(v)),
            )
            for v in values
        ]
        self.number = solver.known.segments.setdefault((tuple(key), tuple(self.info)), len(solver.known.segments))
        self.values_by_id = list(values)
        self.concrete = cache(self._concrete)

    def _factor(self, factor: int) -> int:
        if factor not in self.factors:
            self.factors[factor] = len(self.factors_by_id)
            self.factors_by_id.append(factor)
        return self.factors[factor]

    def numbered(self, placement: Canonical, grad: bool = True) -> Canonical:
        """A placement with the number of its factor. Without a gradient, replicated with partial gradient is
        replicated."""
        kind, dim, factor = placement
        return with_gradient(kind, grad), dim, self._factor(factor)

    def _concrete(self, placed: frozenset[Canonical]) -> frozenset[Canonical]:
        """The inverse of :meth:`numbered`, for a set of placements."""
        return frozenset([(kind, dim, -1 if f < 0 else self.factors_by_id[f]) for kind, dim, f in placed])


class _Solver:
    def __init__(self, analysis: Analysis, problem: AxisProblem) -> None:
        self.analysis, self.problem = analysis, problem
        # Operators and segments of other stages, and of other plans for this graph, may be equal too.
        self.known: Known = analysis.solved.setdefault((problem.size, problem.prices), Known())
        self.needs_grad = cache(needs_grad)
        self.describe = cache(self._describe)
        self.priced = cache(self._priced)
        self.bridges: dict[tuple, float] = {}
        self.reached: dict[tuple, float] = {}
        self.steps: dict[tuple[int, tuple[int, ...]], tuple[_SegmentPrices, list[_Step]]] = {}
        split = {v for n in problem.nodes if problem.along[n] is None for v in analysis.ops[n].operands}
        self.whole = problem.parameters - split
        self.weights = self._weights()
        self.small = self._small()

    def _priced(self, node: fx.Node) -> Priced:
        """The choices of an operator with their prices."""
        problem, form, rule = self.problem, self.analysis.form(node), self.analysis.rules[node]
        along, choices_of = problem.along[node], self.analysis.choices[node]
        key = (
            form.number,
            along if along is None or along < 0 else form.factors.index(along) if along in form.factors else -1,
            tuple([problem.local_bytes((node, i)) for i in range(form.num_outputs)]),
            problem.local_bytes(self.analysis.ops[node].operands[0]) if rule.windows else 0,
            self._ring(node) if node in problem.attention and any(c.form == "ring" for c in choices_of) else 0,
            tuple([problem.divides(node, f) for f in form.factors])
            if along is None or node in problem.attention
            else (),
            (problem.attention[node],) if node in problem.attention else (),
            problem.experts.get(node) if any(c.form == ROUTED for c in choices_of) else None,
        )
        if key not in self.known.priced:
            place = {factor: i for i, factor in enumerate(form.factors)} | {-1: -1}

            def tokens(values: Iterable[Value], placements: Iterable[Placement]) -> tuple[Canonical, ...]:
                return tuple(
                    (with_gradient(p.kind, needs_grad(v)), p.dim, place[p.factor])
                    for v, p in zip(values, placements, strict=True)
                )

            allowed, choices = _allowed(self.analysis, problem, node), []
            for number in allowed:
                choice = self.choice(node, number)
                inputs = tokens(self.analysis.ops[node].operands, choice.inputs)
                outputs = tokens([(node, i) for i in range(form.num_outputs)], choice.outputs)
                choices.append((inputs, outputs, self.price(node, choice)))
            self.known.priced[key] = Priced(len(self.known.priced), allowed, choices)
        return self.known.priced[key]

    def choice(self, node: fx.Node, number: int) -> Choice:
        """An allowed choice by its number."""
        return _whole(self.analysis, node) if number == _WHOLE else self.analysis.choices[node][number]

    def price(self, node: fx.Node, choice: Choice) -> float:
        """Price of a choice without its bridges: duplicated work, and its own collectives.

        A partial result costs a pass over it: an operator that later needs the sum must copy the term first.
        """
        if choice.form == "ring":
            return self._ring(node)
        if choice.form == ROUTED:
            return self._exchange(node, choice)
        cost = COLLECTIVES.get(choice.form, 0) * self.problem.prices.latency
        if choice.form == "halo":
            cost += 2 * self._halo_bytes(node, choice.inputs[0].dim)
        if choice.factor < 0:
            cost += _work(self.analysis, self.problem, node) * (1 - 1 / self.problem.size)
            kept = [i for i, p in enumerate(choice.outputs) if p == PARTIAL]
            cost += sum(self.problem.local_bytes((node, i)) for i in kept) * self.problem.prices.byte_touched
        return cost

    def _exchange(self, node: fx.Node, choice: Choice) -> float:
        """Price of the way of rows to their experts, or back, if they are exchanged."""
        operands, problem = self.analysis.ops[node].operands, self.problem
        if node.target is to_experts and operands[0] == operands[1]:  # the host waits for the numbers of rows
            return problem.prices.latency
        if node.target not in (to_experts, from_experts) or all(p.kind != "S" for p in choice.inputs):
            return 0.0
        return exchange_price(problem.local_bytes(operands[0]), problem.size, needs_grad((node, 0)), problem.prices)

    def _ring(self, node: fx.Node) -> float:
        """Price of an attention as a ring."""
        op, problem = self.analysis.ops[node], self.problem
        query, key, value = op.operands[:3]
        scores = problem.local_bytes(query) / value_tensor(query).element_size() * value_shape(key)[-2] / problem.size
        seen = 2 if op.args.get("is_causal") or node.meta.get("mask") == "causal" else 1
        nbytes = (problem.local_bytes(key) + problem.local_bytes(value)) / repetitions(key[0])
        masked = op.operand("attn_mask") is not None and "mask" not in node.meta
        fused = value_tensor(query).element_size() == 2 and not masked
        work = 4 * scores / seen * problem.prices.flop
        unfused = 0.0 if fused else scores / seen * problem.prices.score
        return ring_price(nbytes, work, problem.size, problem.prices) + unfused

    def _halo_bytes(self, node: fx.Node, dim: int) -> float:
        """Bytes of the halo of an operand with windows."""
        value, window = self.analysis.ops[node].operands[0], self.analysis.rules[node].windows[dim]
        rows = max(0, window.extent - window.stride)
        return self.problem.local_bytes(value) * rows / max(1, value_shape(value)[dim])

    def _weights(self) -> set[Value]:
        """Parameters that may be sharded, and the same parameters in another shape or dtype."""
        found = set(self.problem.parameters - self.whole)
        for node in self.problem.nodes:
            if node.target in _RESHAPED and self.analysis.ops[node].operands[0] in found:
                found.add((node, 0))
        return found

    def _small(self) -> set[Value]:
        """Matrices smaller than a shard of those that read the same value: a router, the single head of multi-query
        attention. They may be whole where that saves communication; others may not."""
        readers: dict[Value, list[Value]] = {}
        origin: dict[Value, Value] = {}  # of a value in another shape or dtype, and of a matrix so
        for node in self.problem.nodes:
            operands = [origin.get(v, v) for v in self.analysis.ops[node].operands]
            if node.target in _RESHAPED:
                origin[node, 0] = operands[0]
            matrices = [v for v in operands if v in self.problem.parameters and value_tensor(v).dim() >= 2]
            for value in operands:
                if value not in self.problem.parameters and value_tensor(value).is_floating_point():
                    readers.setdefault(value, []).extend(matrices)
        nbytes = self.problem.local_bytes
        return {
            m for group in readers.values() for m in group if nbytes(m) * self.problem.size <= sum(map(nbytes, group))
        }

    def _describe(self, value: Value) -> tuple:
        """Key on which the price of a value's bridges depends."""
        matrix = value in self.problem.parameters and value_tensor(value).dim() >= 2
        matrix = matrix and value not in self.small
        kind = "W" if value in self.whole else "P" if value in self.weights else "A"
        kind = "E" if kind == "A" and value in self.problem.received else kind
        sparse = value in self.problem.parameters and has_sparse_gradient(value)
        return self.problem.local_bytes(value), needs_grad(value), kind, matrix, sparse

    def bridge(self, a: Canonical, b: Canonical, info: tuple) -> float:
        """Price of a bridge of a value with this description; a sharded parameter is never gathered."""
        at = (a, b, info[:3])
        if at not in self.bridges:
            nbytes, grad, kind = info[:3]
            cost = conversion_cost(Placement(*a), Placement(*b), nbytes, self.problem.size, grad, self.problem.prices)  # type: ignore[arg-type]
            self.bridges[at] = cost + (_FORBIDDEN if kind == "P" and a[0] == "S" and a != b else 0.0)
        return self.bridges[at]

    def reach(self, info: tuple, have: frozenset[Canonical], want: Canonical) -> float:
        """Price of bridging a value with this description, which is placed as in *have*, to another placement."""
        at = (have, want, info[:3])
        if at not in self.reached:
            self.reached[at] = min([self.bridge(a, want, info) for a in have])
        return self.reached[at]

    def _moves(self, value: Value, placed: Sequence[frozenset[Canonical]]) -> Moves:
        """Prices of a value that is live between segments in each of the sets in which it may be *placed*."""
        return Moves.between(placed, lambda _: 0.0, partial(self.reach, self.describe(value)))

    def solve(self) -> AxisSolution:
        """Run the program over the segments and read the best path back."""
        segments = self._segments()
        beam: dict[tuple, tuple[float, tuple]] = {(): (0.0, ())}
        live: list[Value] = []
        for segment in segments:
            found: dict[tuple, tuple[float, tuple]] = {}
            after: list[Value] = []
            for state, (cost, path) in beam.items():
                outside = {v: p for v, p in zip(live, state, strict=True) if v not in segment.values}
                inside = [(v, p) for v, p in zip(live, state, strict=True) if v in segment.values]
                start = tuple(sorted((segment.values[v], frozenset(map(segment.numbered, p))) for v, p in inside))
                for end, extra, picked in self._run(segment, start):
                    placed = outside | {segment.values_by_id[i]: segment.concrete(p) for i, p in end}
                    after = after or sorted(placed, key=lambda value: (value[0].name, value[1]))
                    key = tuple([placed[value] for value in after])
                    total = cost + extra
                    if key not in found or total < found[key][0]:
                        found[key] = (total, (path, picked))
            live = after
            beam = undominated(
                live,
                found,
                self._moves,
                lambda value: value in self.weights,
            )
        best_key = min(beam, key=lambda key: beam[key][0] + self._final_cost(zip(live, key, strict=True)))
        cost, path = beam[best_key]
        decisions: list[tuple[int, ...]] = []
        while path:
            path, last = path
            decisions.append(last)
        flat = [choice for decision in reversed(decisions) for choice in decision]
        choices = {n: self.choice(n, self.priced(n).allowed[i]) for n, i in zip(self.problem.nodes, flat, strict=True)}
        return self._solution(choices, cost + self._final_cost(zip(live, best_key, strict=True)))

    def _final_cost(self, state: Iterable[tuple[Value, frozenset[Canonical]]]) -> float:
        """Price of leaving the outputs as the caller needs them."""
        total = 0.0
        for value, available in state:
            want = self.problem.outputs.get(value)
            if want is None:
                continue
            if isinstance(want, Placement):
                target = canonical(want)
                total += min((self.bridge(p, target, self.describe(value)) for p in available), default=0.0)
                continue
            kinds = {p[0] for p in available}
            nbytes, grad = self.describe(value)[:2]
            if (want == "any" and kinds & {"R", "R*", "S"}) or (want == "sum" and kinds & {"R", "P"}) or "R" in kinds:
                continue
            if want == "any" and grad and kinds == {"R*"}:
                total += all_reduce_price(nbytes, self.problem.size, self.problem.prices)
            total += min(self.bridge(p, canonical(REPLICATE), self.describe(value)) for p in available)
        return total

    def _segments(self) -> list[_Segment]:
        """Cut the order where few values are live."""
        nodes = list(self.problem.nodes)
        last: dict[Value, int] = {}
        for position, node in enumerate(nodes):
            for value in self.analysis.ops[node].operands:
                last[value] = position
        live: set[Value] = set()
        segments, start = [], 0
        for position, node in enumerate(nodes):
            op = self.analysis.ops[node]
            live |= {(node, i) for i in range(self.analysis.form(node).num_outputs)}
            live |= {v for v in op.operands if v in self.problem.received}
            live = {v for v in live if last.get(v, -1) > position or v in self.problem.outputs}
            if (len(live) <= 2 and position + 1 - start >= 4) or position + 1 == len(nodes):
                segments.append(_Segment(self, nodes[start : position + 1], last, start))
                start = position + 1
        return segments

    def _run(self, segment: _Segment, start: State) -> list[tuple[State, float, tuple[int, ...]]]:
        key = (segment.number, start)
        if key not in self.known.ways:
            self.known.ways[key] = self._beam(segment, start)
        return self.known.ways[key]

    def _beam(self, segment: _Segment, start: State) -> list[tuple[State, float, tuple[int, ...]]]:
        """The best ways through a segment from the placements in *start*: those that they end with, the price, and the
        number of each operator's choice. Sets of placements are numbers here, and what a step costs is found once."""
        live = [value for value, _ in start]
        prices, steps = self._steps(segment, live)
        beam: dict[Any, tuple[float, tuple]] = {tuple([prices.number(p) for _, p in start]): (0.0, ())}
        for step in steps:
            found: dict[Any, tuple[float, tuple]] = {}
            for state, (cost, path) in beam.items():
                have = [*state, *step.unread]
                for number, (work, reads, made) in enumerate(step.ways):
                    total = cost + work
                    changed = have.copy()
                    for value, at, want, first in reads:
                        extra, changed[at] = first or prices.further(value, changed[at], want)
                        total += extra
                    changed += made
                    key = tuple([changed[at] for at in step.left])
                    if key not in found or total < found[key][0]:
                        found[key] = (total, (path, number))
            live = step.live
            beam = undominated(live, found, prices.moves, prices.is_stored)
        ends = []
        for state, (cost, path) in beam.items():
            decisions: list[int] = []
            while path:
                path, number = path
                decisions.append(number)
            placed = tuple([(v, prices.sets[n]) for v, n in zip(live, state, strict=True)])
            ends.append((placed, cost, tuple(reversed(decisions))))
        return ends

    def _steps(self, segment: _Segment, live: Sequence[int]) -> tuple[_SegmentPrices, list[_Step]]:
        """The operators of a segment after values that are *live*, for all ways to place these, and their prices."""
        key = (segment.number, tuple(live))
        if key not in self.steps:
            prices, steps = _SegmentPrices(self, segment), list[_Step]()
            for position in range(len(segment.steps)):
                steps.append(_Step(segment, position, steps[-1].live if steps else live, prices))
            self.steps[key] = prices, steps
        return self.steps[key]

    def _solution(self, choices: dict[fx.Node, Choice], cost: float) -> AxisSolution:
        """Replay the choices to see how parameters and received values are stored."""
        stored: dict[Value, Placement] = {}
        forbidden: list[Value] = []
        kept = self.problem.parameters | self.problem.received
        for node in self.problem.nodes:
            split = self.problem.along[node] is None
            for value, want in zip(self.analysis.ops[node].operands, choices[node].inputs, strict=True):
                if value not in kept:
                    continue
                if value in self.whole and want.kind == "S":
                    want = REPLICATE_PARTIAL
                if want.kind == "R*" and not needs_grad(value):
                    want = REPLICATE
                if want.kind == "P":
                    want = REPLICATE if value not in stored else want
                have = stored.setdefault(value, want)
                if have.kind == "R" and want.kind == "R*":
                    stored[value] = REPLICATE_PARTIAL
                elif have.kind == "S" and want != have and want.kind != "P" and value in self.problem.parameters:
                    forbidden.append(value)
                if split and self.describe(value)[3] and want.kind != "S":
                    forbidden.append(value)
        for value in self.problem.received:
            if stored.get(value, REPLICATE).kind in ("R*", "P"):
                stored[value] = REPLICATE
        return AxisSolution(choices, stored, cost, forbidden)


class _Step:
    """An operator of a segment after values that are *live*: the ways to compute it.

    A state has the numbers of the placements of the live values, to which those are appended that are first read here,
    and those that are made.

    Attributes:
        unread: placeholders for values that are first read here.
        ways: for each choice its work, what it reads (value, place in the state, placement, and where it is first read
            the price and the number of its placements then), and the numbers of what it makes.
        live: values that are live after it.
        left: their places.
    """

    def __init__(self, segment: _Segment, position: int, live: Sequence[int], prices: _SegmentPrices) -> None:
        operands, outputs, priced, factors, split = segment.steps[position]
        names = (*factors, -1)  # the last is of what has none
        place = {value: i for i, value in enumerate(live)}
        read = [(i, value, place.setdefault(value, len(place))) for i, value in enumerate(operands) if value >= 0]
        self.unread = [0] * (len(place) - len(live))
        sharded = [any(inputs[i][0] == "S" for inputs, _, _ in priced.choices) for i in range(len(operands))]
        made = [i for i, value in enumerate(outputs) if value not in segment.dead[position]]
        self.ways = []
        for inputs, results, work in priced.choices:
            known, reads = set(range(len(live))), []
            for i, value, at in read:
                kind, dim, factor = inputs[i]
                want = (kind, dim, names[factor])
                reads.append((value, at, want, None if at in known else prices.first(value, want, split, sharded[i])))
                known.add(at)
            makes = [prices.number(frozenset(((kind, dim, names[f]),))) for kind, dim, f in (results[i] for i in made)]
            terms = sum(1.0 for v, want in zip(operands, inputs, strict=True) if v < 0 and want[0] == "P")
            self.ways.append((work + terms, reads, makes))
        place |= {outputs[i]: len(place) + number for number, i in enumerate(made)}
        self.live = sorted(place.keys() - set(segment.dead[position]))
        self.left = [place[value] for value in self.live]


class _SegmentPrices:
    """Prices of a segment's values in sets of placements, which have numbers; each is found once."""

    def __init__(self, solver: _Solver, segment: _Segment) -> None:
        self.solver, self.info = solver, segment.info
        self.sets: list[frozenset[Canonical]] = []
        self._numbers: dict[frozenset[Canonical], int] = {}
        self._replicate_partial = {grad: segment.numbered(canonical(REPLICATE_PARTIAL), grad) for grad in (False, True)}
        self.first = cache(self._first)
        self.further = cache(self._further)
        self.moves = cache(self._moves)

    def number(self, placed: frozenset[Canonical]) -> int:
        """The number of a set of placements."""
        if placed not in self._numbers:
            self._numbers[placed] = len(self.sets)
            self.sets.append(placed)
        return self._numbers[placed]

    def _first(self, value: int, want: Canonical, split: bool, hopeful: bool) -> tuple[float, int]:
        """Price of storing a parameter, or receiving a value, as it is first read, and the placements that it then has;
        others are derived from whole ones."""
        solver, size, prices = self.solver, self.solver.problem.size, self.solver.problem.prices
        nbytes, grad, kind, matrix, _, fixed = self.info[value]
        taken = kind == "W" and want[0] == "S"  # from the whole, which stays
        placed = self.number(frozenset((want, fixed or self._replicate_partial[grad]) if taken else (want,)))
        if fixed is not None:
            whole = fixed[0] != "S" and want[0] != "S"
            if self._sums_rows(value, want):
                return _FORBIDDEN, placed
            return 0.0 if whole else solver.bridge(fixed, want, self.info[value]), placed
        if kind == "E":
            summed = all_reduce_price(nbytes, size, prices) if want[0] == "R*" and grad else 0.0
            return nbytes * (1 / size if want[0] == "S" else 1) + summed, placed
        if want[0] == "S":
            return 0.0 if kind == "P" else solver.bridge(canonical(REPLICATE_PARTIAL), want, self.info[value]), placed
        cost = nbytes * prices.byte_touched + (2.0 * nbytes if want[0] == "R*" and split else 0.0)
        return cost + (_FORBIDDEN / 1e3 if matrix and split and hopeful else 4.0 * nbytes * split), placed

    def _further(self, value: int, placed: int, want: Canonical) -> tuple[float, int]:
        """Price of reading a value in another placement, and the placements that it then has."""
        available = self.sets[placed]
        if want in available:
            return 0.0, placed
        cost = _FORBIDDEN if self._sums_rows(value, want) else self.solver.reach(self.info[value], available, want)
        return cost, self.number(available | {want})

    def _sums_rows(self, value: int, want: Canonical) -> bool:
        """Whether a backward would have to sum a gradient of rows: of a table that another step has fixed to have all
        of it on each rank."""
        *_, sparse, fixed = self.info[value]
        return bool(sparse and fixed is not None and fixed[0] == "R" and want[0] == "R*")

    def _pending(self, value: int, placed: frozenset[Canonical]) -> float:
        """Price of summing a value that is a term of a sum everywhere."""
        problem = self.solver.problem
        terms = all(p[0] == "P" for p in placed)
        return all_reduce_price(self.info[value][0], problem.size, problem.prices) if terms else 0.0

    def is_stored(self, value: int) -> bool:
        """Whether a value is a parameter that may be sharded, which is then never gathered."""
        return bool(self.info[value][2] == "P")

    def _moves(self, value: int, placed: tuple[int, ...]) -> Moves:
        """Prices of a value in each of the sets in which it may be *placed*."""
        sets = [self.sets[one] for one in placed]
        return Moves.between(sets, partial(self._pending, value), partial(self.solver.reach, self.info[value]))


def solve_time(
    analysis: Analysis, nodes: Sequence[fx.Node], batch_factor: int, free: frozenset[Value], *, apart: bool = False
) -> tuple[dict[fx.Node, Choice], list[fx.Node]]:
    """Division of every operator into micro-batches: along the batch, without bridges that exchange anything.

    What does not depend on rows and joins a sum over them, as a penalty of parameters joins a loss, is read as a term
    of the sum: an equal part of it in every micro-batch.
    *apart* is for micro-batches that are steps of their own: statistics are then of the micro-batch's rows alone.

    Returns the choices, and the operators without one: those that compute a row from other rows.
    """
    placed: dict[Value, Placement] = {}
    choices: dict[fx.Node, Choice] = {}
    coupled: list[fx.Node] = []
    for node in nodes:
        op = analysis.ops[node]
        have = [None if v in free else placed.get(v, REPLICATE) for v in op.operands]
        divisible = [value_tensor(v).is_floating_point() or value_tensor(v).is_complex() for v in op.operands]

        def joins(choice: Choice, have: list[Placement | None] = have, divisible: list[bool] = divisible) -> bool:
            """Whether operands that do not depend on rows become terms of a sum over them."""
            fitting = (
                want == given if given is not None and given.kind != "R" else want.kind != "P" or parts
                for want, given, parts in zip(choice.inputs, have, divisible, strict=True)
            )
            return PARTIAL in have and choice.factor < 0 and all(fitting)

        def fits(choice: Choice, have: list[Placement | None] = have) -> bool:
            for want, given in zip(choice.inputs, have, strict=True):
                if given is None:
                    if want.kind == "P":
                        return False
                elif given.kind == "R" and want.kind in ("R", "R*"):
                    continue
                elif want != given:
                    return False
            return True

        ordered = sorted(analysis.choices[node], key=lambda c: (c.factor != batch_factor, c.factor >= 0))
        if apart:
            ordered = [replace(c, form="") if c.form in COLLECTIVES else c for c in ordered]
        ordered = [c for c in ordered if c.factor in (-1, batch_factor) and c.form not in COLLECTIVES]
        usable = [c for c in ordered if fits(c)] or [c for c in ordered if joins(c)]
        if usable:
            choice = usable[0]
        else:
            coupled.append(node)
            choice = analysis.choices[node][0]
        choices[node] = choice
        for index, placement in enumerate(choice.outputs):
            placed[(node, index)] = placement
    return choices, coupled
