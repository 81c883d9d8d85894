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
from functools import cache
from typing import Any, Literal

import torch
from torch import fx

from whale.graph.values import Value, needs_grad, output_shapes, value_shape, value_tensor
from whale.ir.placement import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Placement
from whale.strategies.analysis import Analysis, Choice
from whale.strategies.bridge_prices import Prices, all_reduce_price, conversion_cost
from whale.strategies.forms import ASKED, COLLECTIVES

BEAM = 24
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
    an operator.
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
    fixed: Mapping[Value, Placement] = field(default_factory=dict)


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


def _allowed(analysis: Analysis, problem: AxisProblem, node: fx.Node) -> list[Choice]:
    """The choices that the node's annotation allows on this axis."""
    factor = problem.along[node]
    choices = [c for c in analysis.choices[node] if c.factor < 0 or analysis.factors.size(c.factor) >= problem.size]
    op = analysis.ops[node]
    replicate_partial = Choice((REPLICATE_PARTIAL,) * len(op.operands), (REPLICATE_PARTIAL,) * len(output_shapes(node)))
    if factor is None:
        choices = [c for c in choices if c.form not in ASKED]
        # a rank without rows would wait for the others, and messages are padded to the largest part
        choices = [c for c in choices if c.factor < 0 or problem.units(node, c.factor) >= problem.size]
        return [*choices, replicate_partial] if op.operands else choices
    cut = [c for c in analysis.choices[node] if c.factor == factor >= 0]
    linear = [c for c in choices if c.factor < 0 and PARTIAL in c.inputs]
    if cut:
        return cut + linear
    return [choices[0], replicate_partial, *linear] if op.operands else [choices[0]]


def _work(analysis: Analysis, problem: AxisProblem, node: fx.Node) -> float:
    """Price of computing the node once, forward and backward, in the units of :class:`Prices`."""
    op = analysis.ops[node]
    nbytes = sum(problem.local_bytes((node, i)) for i, _ in enumerate(output_shapes(node)))
    cost = 3 * nbytes * problem.prices.byte_touched
    contracted = [a for a in analysis.rules[node].axes if not a.outputs and len(a.inputs) > 1]
    if contracted:
        axis = contracted[0]
        operand, dim = next(iter(axis.inputs.items()))
        count = nbytes / max(value_tensor((node, 0)).element_size(), 1)
        cost += 6 * count * op.shape(operand)[dim] * problem.prices.flop
    return cost


class _Segment:
    """A segment of the topological order in canonical form: values, placements and factors are small numbers."""

    def __init__(self, solver: _Solver, nodes: Sequence[fx.Node], last: Mapping[Value, int], offset: int) -> None:
        self.nodes = nodes
        self.values: dict[Value, int] = {}
        self.factors: dict[int, int] = {}
        self.factors_by_id: list[int] = []
        self._placed: dict[tuple[Placement, bool], Canonical] = {}
        self.steps: list[tuple] = []
        self.dead: list[list[int]] = []
        key: list[object] = []
        for position, node in enumerate(nodes, offset):
            op = solver.analysis.ops[node]
            operands = tuple(self._value(v) if v not in solver.problem.free else -1 for v in op.operands)
            outputs = tuple(self._value((node, i)) for i in range(len(output_shapes(node))))
            grads = [solver.needs_grad(v) for v in op.operands]
            choices = tuple(
                (
                    tuple([self.place(p, grad) for p, grad in zip(c.inputs, grads, strict=True)]),
                    tuple([self.place(p, solver.needs_grad((node, i))) for i, p in enumerate(c.outputs)]),
                    solver.price(node, c),
                )
                for c in solver.allowed[node]
            )
            dead = [
                self.values[v]
                for v in {*op.operands, *((node, i) for i in range(len(outputs)))}
                if v in self.values and last.get(v, -1) <= position and v not in solver.problem.outputs
            ]
            split = solver.problem.along[node] is None
            self.steps.append((operands, outputs, choices, split))
            self.dead.append(sorted(dead))
            key.append((operands, outputs, choices, split, tuple(self.dead[-1])))
        self.info = [
            (
                *solver.describe(v),
                None if (p := solver.problem.fixed.get(v)) is None else self.place(p, solver.needs_grad(v)),
            )
            for v in self.values
        ]
        self.key = (tuple(key), tuple(self.info))
        self.values_by_id = list(self.values)

    def _value(self, value: Value) -> int:
        return self.values.setdefault(value, len(self.values))

    def place(self, placement: Placement, grad: bool) -> Canonical:
        """Canonical form of a placement: kind, dim, number of the factor. Without a gradient, replicated with partial
        gradient is replicated."""
        at = (placement, grad)
        if at not in self._placed:
            self._placed[at] = self._place(placement, grad)
        return self._placed[at]

    def _place(self, placement: Placement, grad: bool) -> Canonical:
        if placement.kind == "R*" and not grad:
            placement = REPLICATE
        factor = -1
        if placement.factor >= 0:
            factor = self.factors.setdefault(placement.factor, len(self.factors))
            if factor == len(self.factors_by_id):
                self.factors_by_id.append(placement.factor)
        return placement.kind, placement.dim, factor

    def concrete(self, placement: Canonical) -> Placement:
        """The inverse of :meth:`place`."""
        kind, dim, factor = placement
        return Placement(kind, dim, -1 if factor < 0 else self.factors_by_id[factor])  # type: ignore[arg-type]


Canonical = tuple[str, int, int]
"""A placement as a tuple: kind, dim, factor (or, inside a segment, the factor's number)."""


def _tuple(placement: Placement) -> Canonical:
    return placement.kind, placement.dim, placement.factor


State = tuple[tuple[int, frozenset[Canonical]], ...]


class _Solver:
    def __init__(self, analysis: Analysis, problem: AxisProblem) -> None:
        self.analysis, self.problem = analysis, problem
        self.allowed = {n: _allowed(analysis, problem, n) for n in problem.nodes}
        self.work = {n: _work(analysis, problem, n) * (1 - 1 / problem.size) for n in problem.nodes}
        # Segments of other stages, and of other plans for this graph, may be equal too.
        self.memo: dict[tuple, list[tuple[State, float, tuple[int, ...]]]] = analysis.solved.setdefault(
            (problem.size, problem.prices), {}
        )
        self.needs_grad = cache(needs_grad)
        self.describe = cache(self._describe)
        self.bridges: dict[tuple, float] = {}
        self.emulations: dict[tuple, float] = {}
        split = {v for n in problem.nodes if problem.along[n] is None for v in analysis.ops[n].operands}
        self.whole = problem.parameters - split
        self.weights = self._weights()
        self.small = self._small()

    def price(self, node: fx.Node, choice: Choice) -> float:
        """Price of a choice without its bridges: duplicated work, and its own collectives.

        A partial result costs a pass over it: an operator that later needs the sum must copy the term first.
        """
        cost = COLLECTIVES.get(choice.form, 0) * self.problem.prices.latency
        if choice.form == "halo":
            cost += 2 * self._halo_bytes(node, choice.inputs[0].dim)
        if choice.factor < 0:
            cost += self.work[node]
            kept = [i for i, p in enumerate(choice.outputs) if p == PARTIAL]
            cost += sum(self.problem.local_bytes((node, i)) for i in kept) * self.problem.prices.byte_touched
        return cost

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
        return self.problem.local_bytes(value), needs_grad(value), kind, matrix

    def bridge(self, a: Canonical, b: Canonical, info: tuple) -> float:
        """Price of a bridge of a value with this description; a sharded parameter is never gathered."""
        at = (a, b, info[:3])
        if at not in self.bridges:
            nbytes, grad, kind = info[:3]
            cost = conversion_cost(Placement(*a), Placement(*b), nbytes, self.problem.size, grad, self.problem.prices)  # type: ignore[arg-type]
            self.bridges[at] = cost + (_FORBIDDEN if kind == "P" and a[0] == "S" else 0.0)
        return self.bridges[at]

    def emulate(self, have: frozenset[Canonical], want: frozenset[Canonical], info: tuple) -> float:
        """Price of bridging a value from *have* to every placement in *want*."""
        at = (have, want, info[:3])
        if at not in self.emulations:
            self.emulations[at] = sum(min(self.bridge(a, b, info) for a in have) for b in want if b not in have)
        return self.emulations[at]

    def undominated(
        self, found: Mapping[Any, tuple[float, Any]], rank: Callable[[Any, float], float], emulate: Callable[..., float]
    ) -> dict:
        """The states that no cheaper state dominates, at most :data:`BEAM`, best first.

        A state is a tuple of values with their placements; *emulate* prices what it takes to have a value placed as in
        another. This is sound: a dominated state's continuation is available to the dominating state at the same price.
        """
        ordered = sorted((rank(state, one[0]), one[0], i, state) for i, (state, one) in enumerate(found.items()))
        kept: list[tuple[float, tuple]] = []
        for _, cost, _, state in ordered:
            for other, placed in kept:
                gap = cost - other
                if gap < 0 or len(placed) != len(state):
                    continue
                for (at, have), (value, want) in zip(placed, state, strict=True):
                    if at != value:
                        gap = -1.0
                    elif have != want:
                        gap -= emulate(value, have, want)
                    if gap < 0:
                        break
                else:
                    break
            else:
                kept.append((cost, state))
                if len(kept) == BEAM:
                    break
        return {state: found[state] for _, state in kept}

    def solve(self) -> AxisSolution:
        """Run the program over the segments and read the best path back."""
        segments = self._segments()
        beam: dict[tuple, tuple[float, tuple]] = {(): (0.0, ())}
        for segment in segments:
            found: dict[tuple, tuple[float, tuple]] = {}
            for state, (cost, path) in beam.items():
                inside = [(v, p) for v, p in state if v in segment.values]
                outside = [(v, p) for v, p in state if v not in segment.values]
                start = tuple(
                    sorted(
                        (segment.values[v], frozenset(segment.place(Placement(*x), True) for x in p)) for v, p in inside
                    )
                )
                for end, extra, picked in self._run(segment, start):
                    after = outside + [
                        (segment.values_by_id[i], frozenset(_tuple(segment.concrete(x)) for x in p)) for i, p in end
                    ]
                    key = tuple(sorted(after, key=lambda item: (item[0][0].name, item[0][1])))
                    total = cost + extra
                    if key not in found or total < found[key][0]:
                        found[key] = (total, (path, picked))
            beam = self.undominated(
                found,
                lambda state, cost: cost,
                lambda value, have, want: self.emulate(have, want, self.describe(value)),
            )
        best_key = min(beam, key=lambda key: beam[key][0] + self._final_cost(key))
        cost, path = beam[best_key]
        decisions: list[tuple[int, ...]] = []
        while path:
            path, last = path
            decisions.append(last)
        flat = [choice for decision in reversed(decisions) for choice in decision]
        choices = {n: self.allowed[n][i] for n, i in zip(self.problem.nodes, flat, strict=True)}
        return self._solution(choices, cost + self._final_cost(best_key))

    def _final_cost(self, state: Iterable[tuple[Value, frozenset[Canonical]]]) -> float:
        """Price of leaving the outputs as the caller needs them."""
        total = 0.0
        for value, available in state:
            want = self.problem.outputs.get(value)
            if want is None:
                continue
            if isinstance(want, Placement):
                target = _tuple(want)
                total += min((self.bridge(p, target, self.describe(value)) for p in available), default=0.0)
                continue
            kinds = {p[0] for p in available}
            nbytes, grad = self.describe(value)[:2]
            if (want == "any" and kinds & {"R", "R*", "S"}) or (want == "sum" and kinds & {"R", "P"}) or "R" in kinds:
                continue
            if want == "any" and grad and kinds == {"R*"}:
                total += all_reduce_price(nbytes, self.problem.size, self.problem.prices)
            total += min(self.bridge(p, _tuple(REPLICATE), self.describe(value)) for p in available)
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
            live |= {(node, i) for i in range(len(output_shapes(node)))}
            live |= {v for v in op.operands if v in self.problem.received}
            live = {v for v in live if last.get(v, -1) > position or v in self.problem.outputs}
            if (len(live) <= 2 and position + 1 - start >= 4) or position + 1 == len(nodes):
                segments.append(_Segment(self, nodes[start : position + 1], last, start))
                start = position + 1
        return segments

    def _run(self, segment: _Segment, start: State) -> list[tuple[State, float, tuple[int, ...]]]:
        key = (segment.key, start)
        if key not in self.memo:
            self.memo[key] = self._beam(segment, start)
        return self.memo[key]

    def _beam(self, segment: _Segment, start: State) -> list[tuple[State, float, tuple[int, ...]]]:
        """The best ways through a segment from the placements in *start*: those that they end with, the price, and the
        number of each operator's choice. Sets of placements are numbers here, and what a step costs is found once."""
        prices = _SegmentPrices(self, segment)
        beam: dict[Any, tuple[float, tuple]] = {tuple((v, prices.number(p)) for v, p in start): (0.0, ())}
        for (operands, outputs, choices, split), dead in zip(segment.steps, segment.dead, strict=True):
            sharded = [any(choice[0][i][0] == "S" for choice in choices) for i in range(len(operands))]
            reads = [
                (
                    work
                    + sum(1.0 for value, want in zip(operands, inputs, strict=True) if value < 0 and want[0] == "P"),
                    [(v, want, sharded[i]) for i, (v, want) in enumerate(zip(operands, inputs, strict=True)) if v >= 0],
                    [
                        (v, prices.number(frozenset((p,))))
                        for v, p in zip(outputs, results, strict=True)
                        if v not in dead
                    ],
                )
                for inputs, results, work in choices
            ]
            found: dict[Any, tuple[float, tuple]] = {}
            for state, (cost, path) in beam.items():
                have = dict(state)
                for number, (work, wanted, made) in enumerate(reads):
                    total = cost + work
                    changed = have.copy()
                    for value, want, hopeful in wanted:
                        available = changed.get(value)
                        if available is None:
                            extra, changed[value] = prices.first(value, want, split, hopeful)
                        else:
                            extra, changed[value] = prices.further(value, available, want)
                        total += extra
                    changed.update(made)
                    for value in dead:
                        changed.pop(value, None)
                    key = tuple(sorted(changed.items()))
                    if key not in found or total < found[key][0]:
                        found[key] = (total, (path, number))
            beam = self.undominated(
                found, lambda state, cost: cost + sum(prices.pending(v, n) for v, n in state), prices.emulate
            )
        results_out = []
        for state, (cost, path) in beam.items():
            decisions: list[int] = []
            while path:
                path, number = path
                decisions.append(number)
            results_out.append((tuple((v, prices.sets[n]) for v, n in state), cost, tuple(reversed(decisions))))
        return results_out

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


class _SegmentPrices:
    """Prices of a segment's values in sets of placements, which have numbers; each is found once."""

    def __init__(self, solver: _Solver, segment: _Segment) -> None:
        self.solver, self.info = solver, segment.info
        self.sets: list[frozenset[Canonical]] = []
        self._numbers: dict[frozenset[Canonical], int] = {}
        self._replicate_partial = {grad: segment.place(REPLICATE_PARTIAL, grad) for grad in (False, True)}
        self.first = cache(self._first)
        self.further = cache(self._further)
        self.pending = cache(self._pending)
        self.emulate = cache(self._emulate)

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
        nbytes, grad, kind, matrix, fixed = self.info[value]
        taken = kind == "W" and want[0] == "S"  # from the whole, which stays
        placed = self.number(frozenset((want, fixed or self._replicate_partial[grad]) if taken else (want,)))
        if fixed is not None:
            whole = fixed[0] != "S" and want[0] != "S"
            return 0.0 if whole else solver.bridge(fixed, want, self.info[value]), placed
        if kind == "E":
            summed = all_reduce_price(nbytes, size, prices) if want[0] == "R*" and grad else 0.0
            return nbytes * (1 / size if want[0] == "S" else 1) + summed, placed
        if want[0] == "S":
            return 0.0 if kind == "P" else solver.bridge(_tuple(REPLICATE_PARTIAL), want, self.info[value]), placed
        cost = nbytes * prices.byte_touched + (2.0 * nbytes if want[0] == "R*" and split else 0.0)
        return cost + (_FORBIDDEN / 1e3 if matrix and split and hopeful else 4.0 * nbytes * split), placed

    def _further(self, value: int, placed: int, want: Canonical) -> tuple[float, int]:
        """Price of reading a value in another placement, and the placements that it then has."""
        available = self.sets[placed]
        if want in available:
            return 0.0, placed
        price = min(self.solver.bridge(a, want, self.info[value]) for a in available)
        return price, self.number(available | {want})

    def _pending(self, value: int, placed: int) -> float:
        """Price of summing a value that is a term of a sum everywhere."""
        problem = self.solver.problem
        terms = all(p[0] == "P" for p in self.sets[placed])
        return all_reduce_price(self.info[value][0], problem.size, problem.prices) if terms else 0.0

    def _emulate(self, value: int, have: int, want: int) -> float:
        """Price of bridging a value from one set of placements to all of another."""
        return self.solver.emulate(self.sets[have], self.sets[want], self.info[value])


def solve_time(
    analysis: Analysis, nodes: Sequence[fx.Node], batch_factor: int, free: frozenset[Value], *, apart: bool = False
) -> tuple[dict[fx.Node, Choice], list[fx.Node]]:
    """Division of every operator into micro-batches: along the batch, without bridges.

    *apart* is for micro-batches that are steps of their own: statistics are then of the micro-batch's rows alone.

    Returns the choices, and the operators without one: those that compute a row from other rows.
    """
    placed: dict[Value, Placement] = {}
    choices: dict[fx.Node, Choice] = {}
    coupled: list[fx.Node] = []
    for node in nodes:
        op = analysis.ops[node]
        have = [None if v in free else placed.get(v, REPLICATE) for v in op.operands]

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
        usable = [c for c in ordered if c.factor in (-1, batch_factor) and c.form not in COLLECTIVES and fits(c)]
        if usable:
            choice = usable[0]
        else:
            coupled.append(node)
            choice = analysis.choices[node][0]
        choices[node] = choice
        for index, placement in enumerate(choice.outputs):
            placed[(node, index)] = placement
    return choices, coupled
