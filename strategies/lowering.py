"""Lowering: from one stage of the global graph to the local program of one rank.

The result is three graphs of local tensors: *constant* (floating values that depend on nothing but buffers), *step*
(floating values of the whole batch, such as the number of targets that count; run once a step) and *micro-batch* (the
stage itself). Floating nodes are derived on demand in the placement in which they are read. Pinned nodes are computed
as the solver chose, with a bridge if a value is read in another placement. Local shapes come from the global graph and
the layout; the new nodes have none.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from math import prod
from typing import Any

import torch
from torch import fx, nn

from whale.graph.captured import Captured
from whale.graph.nodes import node_copy
from whale.graph.partition import is_random
from whale.graph.values import Value, needs_grad, output_shapes, value_shape, value_tensor
from whale.ir.placement import REPLICATE, Cut, Placement
from whale.ir.state import StateSharding
from whale.ir.strategy import Offload, Offloading, Recompute, Reduce
from whale.ir.virtual_device import VirtualDevice
from whale.runtime.attention import CausalRows, has_kernel
from whale.runtime.collectives import Bridge, CollectiveModule, Conversion, Take
from whale.runtime.draws import DRAWS, SeededDraw
from whale.runtime.experts import from_experts, to_experts
from whale.runtime.local_program import INPUTS, LocalCode, LocalGraph, LocalProgram, Source
from whale.runtime.random import RNGPosition, SeededAttention, SeededBernoulli, SeededCall, SeededDropout, position_key
from whale.runtime.routing import AtExperts, Route
from whale.strategies.analysis import STRETCHES, Analysis, Choice
from whale.strategies.arrivals import own_first
from whale.strategies.forms import ASKED, COLLECTIVES, FORMS, FormCall, MeshPlace
from whale.strategies.halos import causal_mask, windowed_call
from whale.strategies.host_tables import computed_at_host
from whale.strategies.layout import Layout, Placements, length_of, unit_shares
from whale.strategies.local_graph import LEVELS, Emitter, arguments, emit, group_once, mark_reusable, substitute
from whale.strategies.routes import ROUTED
from whale.strategies.rules.registry import LocalShapes, Op
from whale.strategies.sequences import ring_call

aten = torch.ops.aten

CONSTANT, STEP, MICRO_BATCH = 0, 1, 2

_NOT_FLOATING = ASKED | COLLECTIVES.keys()
"""Forms in which floating values are not derived: ranks may not reach them at the same time."""


@dataclass(frozen=True, kw_only=True)
class PlacedStage(Offloading):
    """A stage with a placement for everything: the input of the lowering, the same on every rank.

    ``choices[node]`` and ``stored[value]`` have one entry per mesh axis, time first. ``sent`` and ``mutated`` are the
    placements in which values leave the micro-batch graph; ``returned`` are the tensors of the model's output, each
    with its number. ``omitted`` operators are not computed; only their floating operands are derived
    (:mod:`whale.strategies.folding`). ``summed`` are sums over rows that ranks exchange before a step
    (:mod:`whale.strategies.row_sums`). ``recompute`` says what its backward computes again
    (:mod:`whale.strategies.recompute`), ``state`` how its ranks divide the state of what they sum; None: all have all.
    ``offload`` says what is in the host's memory, ``on_host`` which parameters are looked up there
    (:mod:`whale.strategies.host_tables`). ``reduce`` says how its replicas make one gradient of theirs; if they combine
    them, ``row_axes`` are, for each parameter and the loss, the axes of the mesh along which all that reads (computes)
    it is replicated. ``distinct`` is the expected part of looked-up rows that are distinct, of which each is sent once
    (:mod:`whale.strategies.equal_rows`); None: all are sent. ``origin`` identifies the search that found the
    placements: stages with the same one differ only in their index, their ranks, their state, where it is, what is
    omitted and what is computed again. ``price`` is the solver's, on all axes.
    """

    index: int
    mesh: VirtualDevice
    layout: Layout
    nodes: tuple[fx.Node, ...]
    choices: Mapping[fx.Node, tuple[Choice, ...]]
    stored: Mapping[Value, Placements]
    received: tuple[Value, ...]
    sent: Mapping[Value, Placements]
    loss: Value | None
    loss_placements: Placements = ()
    mutated: Mapping[str, Value] = field(default_factory=dict)
    returned: tuple[tuple[int, Value, Placements], ...] = ()
    omitted: frozenset[fx.Node] = frozenset()
    summed: tuple[Value, ...] = ()
    row_axes: Mapping[Value, tuple[int, ...]] = field(default_factory=dict)
    recompute: Recompute = "none"
    state: StateSharding | None = None
    offload: Offload = "none"
    on_host: frozenset[str] = frozenset()
    reduce: Reduce = "mean"
    distinct: float | None = None
    price: float = field(default=0.0, compare=False)
    origin: object = field(default_factory=object, compare=False)


def lower(
    captured: Captured,
    analysis: Analysis,
    stage: PlacedStage,
    rank: int,
    micro_batch: int,
    *,
    clock: RNGPosition | None = None,
) -> LocalProgram:
    """The local program of *rank* for one micro-batch of a stage.

    *clock* seeds random operators by position; without one they are left as they are (a single process).
    """
    return Lowering(captured, analysis, stage, rank, micro_batch, clock).run()


ANY = -1
"""Size of a dim of rows at experts in the arguments of views: as many as there are."""


def _of_any_rows(shape: tuple[int, ...], placements: Placements) -> tuple[int, ...]:
    """A local shape, of whose rows at experts only a step knows the number."""
    dims = {p.dim for p in placements if p.kind == "E"}
    return tuple(ANY if dim in dims else size for dim, size in enumerate(shape))


class _AtExperts:
    """The graph of what is computed at experts for the rows of one choice: its values, and what is given to them."""

    def __init__(self, choice: Value) -> None:
        self.body = Emitter(MICRO_BATCH, nn.Module())
        self.own = self.body.placeholder(choice, ("at experts", "choice"), "choice")
        self.rows: list[tuple[fx.Node, fx.Node]] = []  # that come, and where they come in
        self.others: list[tuple[fx.Node, fx.Node]] = []
        self.values: dict[Value, Placements] = {}  # of rows

    def bring(self, value: Value, given: fx.Node, placed: Placements, *, is_choice: bool) -> None:
        """Let rows come, as a value."""
        hole = self.own if is_choice else self.body.placeholder(value, ("at experts", "rows"), value[0].name)
        self.values[value], self.body.env[value, placed] = placed, hole
        if not is_choice:
            self.rows.append((given, hole))

    def hold(self, value: Value, placed: Placements, given: fx.Node) -> fx.Node:
        """Give a tensor that has no rows."""
        if (value, placed) not in self.body.env:
            hole = self.body.placeholder((value, placed), ("at experts", "other"), value[0].name)
            self.body.env[value, placed] = hole
            self.others.append((given, hole))
        return self.body.env[value, placed]

    def call(self, result: fx.Node, route: Route, ranks: tuple[int, ...]) -> tuple[AtExperts, list[fx.Node]]:
        """A module that computes a result, and the tensors that it reads besides the choice."""
        inside = [self.own, *(hole for _, hole in (*self.rows, *self.others))]
        graph = fx.Graph()
        env = {hole: graph.placeholder(hole.name) for hole in inside}
        wanted = _before(result)
        for node in self.body.graph.nodes:
            if node.op != "placeholder" and node in wanted:
                env[node] = node_copy(graph, node, env.__getitem__)
        graph.output((env[result],))
        group_once(graph, route.experts[route.index])
        tensors = [given for given, _ in (*self.rows, *self.others)]
        return AtExperts(LocalCode(self.body.root, graph), len(self.rows), route, ranks), tensors


def _before(node: fx.Node) -> set[fx.Node]:
    """A node and all that it reads."""
    found, waiting = set[fx.Node](), [node]
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found


class Lowering:
    """The graphs of one rank, as they are written."""

    def __init__(
        self,
        captured: Captured,
        analysis: Analysis,
        stage: PlacedStage,
        rank: int,
        micro_batch: int,
        clock: RNGPosition | None,
    ) -> None:
        self.captured, self.analysis, self.stage, self.rank, self.clock = captured, analysis, stage, rank, clock
        self.coordinates = (micro_batch, *stage.mesh.coordinates(rank))
        self.groups = ((), *(stage.mesh.group(i, rank) for i in range(len(stage.mesh.axes))))
        self.whole: Placements = (REPLICATE,) * len(self.coordinates)
        self.pinned = set(stage.nodes)
        self.emitters = [Emitter(level, nn.Module()) for level in range(3)]
        self.primary: dict[Value, Placements] = {}
        self.depends_on_position = False
        self._level: dict[fx.Node, int] = {}
        self._masks: dict[Any, fx.Node] = {}
        self._at_experts: dict[Value, _AtExperts] = {}

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        """The places of the operators in the whole graph."""
        return {node: i for i, node in enumerate(self.captured.graph.nodes)}

    def _wait_for_gradients(self) -> None:
        """Let an output depend on everything whose gradient other ranks sum with this one, which has no rows: some
        operators, such as attention with a mask, return no gradients where there is nothing to compute."""
        main, trained = self.emitters[MICRO_BATCH], [needs_grad(value) for value in self.stage.sent]
        trained += [True] * (self.stage.loss is not None)
        if not any(trained):
            return
        place = trained.index(True)
        flows = self._nodes_with_gradients(list(compress(main.outputs, trained)))
        for node in [node for node in main.graph.nodes if node.op == "call_module" and node in flows]:
            module = getattr(main.root, str(node.target))
            if isinstance(module, Bridge) and module.conversion.backward_collective:
                flat = main.graph.call_function(aten.reshape.default, (node, [-1]))
                nothing = main.graph.call_function(aten.slice.Tensor, (flat, 0, 0, 0))
                total = main.graph.call_function(aten.sum.default, (nothing,))
                main.outputs[place] = main.graph.call_function(aten.add.Tensor, (main.outputs[place], total))

    def _nodes_with_gradients(self, outputs: Sequence[fx.Node]) -> set[fx.Node]:
        """The local nodes to which some outputs pass gradients on a rank with rows: none to what is read for choices
        alone, such as an expert's number."""
        env = self.emitters[MICRO_BATCH].env
        stops = set(env.values()) - {node for (value, _), node in env.items() if needs_grad(value)}
        found, left = set[fx.Node](), list(outputs)
        while left:
            if (node := left.pop()) not in found and node not in stops:
                found.add(node)
                left += node.all_input_nodes
        return found

    # The walk

    def run(self) -> LocalProgram:
        """The local program of the stage."""
        main = self.emitters[MICRO_BATCH]
        for position, value in enumerate(self.stage.received):
            placed = self._normal(value, self.stage.stored[value])
            self.primary[value] = placed
            main.env[(value, placed)] = main.placeholder(value, ("received", position), f"received_{value[0].name}")
        for node in self.stage.nodes:
            if node in self.stage.omitted:
                self._floats(node)
                continue
            last = next(iter(reversed(main.graph.nodes)), None)
            self._pinned(node)
            if self.stage.omitted:
                self._note_start(last, node)
        for value, want in self.stage.sent.items():
            main.outputs.append(self.read(value, want))
        if self.stage.loss is not None:
            main.outputs.append(self.read(self.stage.loss, self.stage.loss_placements))
        if nothing_of(self.stage, self.coordinates) is not None:
            self._wait_for_gradients()
        for value in self.stage.mutated.values():
            main.outputs.append(self.read(value, self.whole))
        main.outputs += [self.read(value, placed) for _, value, placed in self.stage.returned]
        if self.stage.on_host:
            computed_at_host(self.emitters, self.stage.on_host)
        group_once(main.graph)
        mark_reusable(main.graph, main.root, set(main.outputs))
        constant, step, micro_batch = (emitter.finish() for emitter in self.emitters)
        modules = (m for g in (constant, step, micro_batch) for m in g.code.root.modules())
        return LocalProgram(
            constant=constant,
            step=step,
            micro_batch=micro_batch,
            bridges=[m for m in modules if isinstance(m, CollectiveModule)],
            depends_on_position=self.depends_on_position,
            begins_alone=own_first(micro_batch),
        )

    def _normal(self, value: Value, placements: Placements) -> Placements:
        """Without a gradient, replicated with partial gradient is replicated; along time it always is: gradients
        accumulate there."""
        grad = needs_grad(value)
        return tuple(
            REPLICATE if p.kind == "R*" and (axis == 0 or not grad) else p for axis, p in enumerate(placements)
        )

    def _note_start(self, last: fx.Node | None, node: fx.Node) -> None:
        """Note at which local node an operator begins, with what it needs; *last* was before it."""
        begin = next(iter(self.emitters[MICRO_BATCH].graph.nodes)) if last is None else last.next
        while begin.op == "placeholder":
            begin = begin.next
        begin.meta["starts"] = node

    def _floats(self, node: fx.Node) -> None:
        """Derive what an omitted operator would read of floating values."""
        choices, op = self.stage.choices[node], self.analysis.ops[node]
        if all(value[0] in self.pinned or value in self.stage.stored for value in op.operands):
            return
        spared = self._spared_mask(op)
        for i, value in enumerate(op.operands):
            if i != spared and value[0] not in self.pinned and value not in self.stage.stored:
                self.read(value, tuple(c.inputs[i] for c in choices))

    def _pinned(self, node: fx.Node) -> None:
        main = self.emitters[MICRO_BATCH]
        choices = self.stage.choices[node]
        op = self.analysis.ops[node]
        inputs = [tuple(c.inputs[i] for c in choices) for i in range(len(op.operands))]
        outputs = [
            self._normal((node, i), tuple(c.outputs[i] for c in choices)) for i in range(len(output_shapes(node)))
        ]
        if any(choice.form == ROUTED for choice in choices):
            self._routed(op, choices, inputs, outputs)
            return
        if node.target in (to_experts, from_experts):  # they are here
            main.env[(node, 0), outputs[0]] = self.read(op.operands[0], inputs[0])
            self.primary[node, 0] = outputs[0]
            return
        spared = self._spared_mask(op)
        args = [
            self.read(value, want) if i != spared else None
            for i, (value, want) in enumerate(zip(op.operands, inputs, strict=True))
        ]
        self._call(main, op, choices, args, inputs, outputs)
        for index, placed in enumerate(outputs):
            self.primary[(node, index)] = placed

    def _routed(
        self, op: Op, choices: Sequence[Choice], inputs: Sequence[Placements], outputs: Sequence[Placements]
    ) -> None:
        """Write an operator that computes rows at experts into the graph of these, or bring rows there or back."""
        node, main = op.node, self.emitters[MICRO_BATCH]
        if op.target is to_experts:
            place = self._at_experts.setdefault(op.operands[1], _AtExperts(op.operands[1]))
            is_choice = op.operands[0] == op.operands[1]
            place.bring((node, 0), self.read(op.operands[0], inputs[0]), outputs[0], is_choice=is_choice)
            return
        place = next(p for p in self._at_experts.values() if any(v in p.values for v in op.operands))
        if op.target is from_experts:
            axis = next(i for i, choice in enumerate(choices) if choice.form == ROUTED)
            value = op.operands[0]
            result = self._convert(value, place.values[value], self._normal(value, inputs[0]), place.body)
            module, tensors = place.call(result, self._route(op, choices, axis, inputs[1]), self.groups[axis])
            choice = self.read(op.operands[1], inputs[1])
            back = main.call_module(module, (choice, *tensors), "at_experts")
            back.meta["source"] = node
            main.env[(node, 0), outputs[0]] = back
            self.primary[node, 0] = outputs[0]
            return
        args: list[fx.Node | None] = []
        for value, want in zip(op.operands, inputs, strict=True):
            wanted = self._normal(value, want)
            if value in place.values:
                args.append(self._convert(value, place.values[value], wanted, place.body))
            else:
                args.append(place.hold(value, wanted, self.read(value, wanted)))
        self._call(place.body, op, choices, args, inputs, outputs)
        place.values |= {(node, index): placed for index, placed in enumerate(outputs)}

    def _route(self, op: Op, choices: Sequence[Choice], axis: int, placed: Placements) -> Route:
        """The way of rows along an axis of the mesh."""
        layout, count = self.stage.layout, self.analysis.factors.size(choices[axis].factor)
        rows = []
        for index in range(len(self.groups[axis])):
            at = (*self.coordinates[:axis], index, *self.coordinates[axis + 1 :])
            rows.append(layout.local_shape(op.operands[1], placed, at)[0])
        return Route(
            experts=unit_shares(count, layout.axes[axis]),
            rows=tuple(rows),
            index=self.coordinates[axis],
            exchanged=placed[axis].kind == "S",
        )

    def _spared_mask(self, op: Op) -> int | None:
        """The operand that is a mask known to attention by a flag."""
        return op.operand("attn_mask") if "mask" in op.node.meta else None

    # Reading a value in a placement

    def read(self, value: Value, want: Placements) -> fx.Node:
        """The node of *value* in the wanted placement, in the micro-batch graph; bridges are made once."""
        want = self._normal(value, want)
        main = self.emitters[MICRO_BATCH]
        if (value, want) in main.env:
            return main.env[(value, want)]
        if value[0] in self.pinned or value in self.primary:
            return self._convert(value, self.primary[value], want)
        if value[0].op == "placeholder" and value[0].name in self.captured.parameters:
            name = self.captured.parameters[value[0].name]
            stored = self._normal(value, self.stage.stored[value])
            self.primary[value] = stored
            hint = "p_" + name.replace(".", "_")
            main.env[(value, stored)] = main.placeholder(value, ("parameter", name), hint)
            return self.read(value, want)
        return self._floating(value, want, MICRO_BATCH)

    def _convert(self, value: Value, have: Placements, want: Placements, emitter: Emitter | None = None) -> fx.Node:
        """Bridge from *have* to *want*, axis by axis; shards are gathered from the inside out."""
        main = emitter or self.emitters[MICRO_BATCH]
        node, current = main.env[(value, have)], have
        for axis, target in self._steps(have, want):
            after = (*current[:axis], target, *current[axis + 1 :])
            key = (value, after)
            if key not in main.env:
                main.env[key] = self._bridge(main, node, value, current, after, axis)
            node, current = main.env[key], after
        return node

    def _steps(self, have: Placements, want: Placements) -> list[tuple[int, Placement]]:
        changed = {i for i, (a, b) in enumerate(zip(have, want, strict=True)) if a != b}
        # An inner axis that cuts the same factor as an outer, changing axis must be whole meanwhile.
        nested = {
            inner
            for inner, p in enumerate(have)
            if p.kind == "S"
            and any(
                outer in changed and (have[outer].factor == p.factor or want[outer].factor == p.factor)
                for outer in range(inner)
                if have[outer].kind == "S" or want[outer].kind == "S"
            )
        }
        steps: list[tuple[int, Placement]] = []
        for axis in sorted(changed | nested, reverse=True):
            if axis in nested:
                steps.append((axis, REPLICATE))
            elif have[axis].kind == "S" or want[axis].kind != "S":
                steps.append((axis, want[axis]))
        for axis in sorted(changed | nested):
            if axis in nested:
                if want[axis] != REPLICATE:
                    steps.append((axis, want[axis]))
            elif have[axis].kind != "S" and want[axis].kind == "S":
                steps.append((axis, want[axis]))
        return steps

    def _bridge(
        self, emitter: Emitter, node: fx.Node, value: Value, have: Placements, want: Placements, axis: int
    ) -> fx.Node:
        a, b = have[axis], want[axis]
        cut_a = self._cut(value, have, axis) if a.kind == "S" else None
        cut_b = self._cut(value, want, axis) if b.kind == "S" else None
        if axis == 0 and (a.kind, b.kind) == ("R", "P"):  # equal terms of the sum over micro-batches
            term = emitter.graph.call_function(aten.mul.Tensor, (node, 1.0 / self.stage.layout.axes[0].size))
            term.meta["source"] = value[0]
            return term
        if axis == 0:
            raise AssertionError(f"{value[0].name}: a bridge {a}->{b} between micro-batches")
        if not needs_grad(value) and (a.value, b.value) == ("R", "R"):
            return node
        conversion = Conversion(a, b, cut_a, cut_b, self.groups[axis], self.coordinates[axis])
        kind = conversion.forward_collective or conversion.backward_collective or "take"
        fresh = emitter.call_module(Bridge(conversion, value[0].name), (node,), f"{kind}_{value[0].name}")
        fresh.meta["source"] = value[0]
        return fresh

    def _cut(self, value: Value, placements: Placements, axis: int) -> Cut:
        return self.stage.layout.cut(value, placements, axis, self.coordinates)

    # Floating values

    def _levels(self, node: fx.Node) -> int:
        """CONSTANT for values that depend on nothing but buffers that no step changes, otherwise STEP.

        Tensors beside the model are a script's, which may write to them unnoticed, as through ``.data``.
        """
        if node not in self._level:
            if node.op == "placeholder":
                name = self.captured.buffers.get(node.name)
                self._level[node] = STEP if name is None or name in self.captured.mutated else CONSTANT
            else:
                self._level[node] = max((self._levels(n) for n in node.all_input_nodes), default=CONSTANT)
        return self._level[node]

    def _floating(self, value: Value, want: Placements, level: int) -> fx.Node:
        """Derive a floating value as wanted, in the earliest graph that can."""
        want = tuple(REPLICATE if p.kind == "R*" else p for p in want)
        own = MICRO_BATCH if want[0].kind == "S" else self._levels(value[0])
        own = min(own, level) if want[0].kind != "S" else own
        emitter = self.emitters[own]
        if (value, want) not in emitter.env:
            emitter.env[(value, want)] = self._derive(emitter, value, want)
        node = emitter.env[(value, want)]
        if own == level:
            return node
        position = emitter.output(node)
        hint = f"{LEVELS[own]}_{value[0].name}"
        return self.emitters[level].placeholder((value, want), (LEVELS[own], position), hint)

    def _derive(self, emitter: Emitter, value: Value, want: Placements) -> fx.Node:
        node, index = value
        for axis, placement in enumerate(want):
            if placement.kind == "P":  # a term of a sum: rank 0 has it all
                whole = (*want[:axis], REPLICATE, *want[axis + 1 :])
                source = self._floating(value, whole, emitter.level)
                return self._bridge_floating(emitter, source, value, whole, want, axis)
        if node.op == "placeholder":
            return self._derive_placeholder(emitter, value, want)
        if value in self.stage.summed and want == self.whole:
            return emitter.placeholder((value, want), ("sum", self.stage.summed.index(value)), f"sum_{node.name}")
        op = self.analysis.ops[node]
        choices = [self._choice_for(node, index, axis, placement) for axis, placement in enumerate(want)]
        for axis, choice in enumerate(choices):
            if choice is None:  # cannot be computed in parts: compute more, and take the part
                return self._taken(emitter, value, want, axis)
        inputs = [tuple(c.inputs[i] for c in choices) for i in range(len(op.operands))]  # type: ignore[union-attr]
        outputs = [tuple(c.outputs[i] for c in choices) for i in range(len(output_shapes(node)))]  # type: ignore[union-attr]
        args = [self._floating(v, w, emitter.level) for v, w in zip(op.operands, inputs, strict=True)]
        self._call(emitter, op, choices, args, inputs, outputs)  # type: ignore[arg-type]
        return emitter.env[(value, want)]

    def _taken(self, emitter: Emitter, value: Value, want: Placements, axis: int) -> fx.Node:
        """A value that is whole on *axis*, and on inner axes that cut the same factor, from which the shard is
        taken."""
        nested = [i for i, p in enumerate(want) if i >= axis and p.kind == "S" and p.factor == want[axis].factor]
        have = tuple(REPLICATE if i in nested else p for i, p in enumerate(want))
        node = self._floating(value, have, emitter.level)
        for i in nested:
            after = (*have[:i], want[i], *have[i + 1 :])
            node, have = self._bridge_floating(emitter, node, value, have, after, i), after
        return node

    def _choice_for(self, node: fx.Node, index: int, axis: int, placement: Placement) -> Choice | None:
        choices = self.analysis.choices[node]
        if placement.kind != "S":
            return choices[0]
        mirrored = (axis, placement.factor) in self.stage.layout.mirrored
        excluded = _NOT_FLOATING | STRETCHES if mirrored else _NOT_FLOATING
        return next((c for c in choices if c.outputs[index] == placement and c.form not in excluded), None)

    def _bridge_floating(
        self, emitter: Emitter, node: fx.Node, value: Value, have: Placements, want: Placements, axis: int
    ) -> fx.Node:
        if want[axis].kind == "S":
            cut = self._cut(value, want, axis)
            if axis == 0:
                self.depends_on_position = True
            return emitter.call_module(Take(cut, self.coordinates[axis]), (node,), f"take_{value[0].name}")
        return self._bridge(emitter, node, value, have, want, axis)

    def _derive_placeholder(self, emitter: Emitter, value: Value, want: Placements) -> fx.Node:
        node = value[0]
        if node.name in self.captured.inputs:
            leaf = self.captured.inputs[node.name]
            source: Source = ("input", (leaf, value, want))
            return emitter.placeholder((value, want), source, node.name)
        if node.name in self.captured.parameters:
            raise AssertionError(f"{node.name}: a floating value reads a parameter")
        kind, table = ("buffer", self.captured.buffers) if node.name in self.captured.buffers else ("constant", None)
        name = table[node.name] if table is not None else node.name
        whole = emitter.placeholder((value, self.whole), (kind, name), node.name)
        emitter.env[(value, self.whole)] = whole
        cut = [axis for axis, placement in enumerate(want) if placement.kind == "S"]
        return self._taken(emitter, value, want, cut[0]) if cut else whole

    # Emitting a call

    def _call(
        self,
        emitter: Emitter,
        op: Op,
        choices: Sequence[Choice],
        args: Sequence[fx.Node | None],
        inputs: Sequence[Placements],
        outputs: Sequence[Placements],
    ) -> None:
        """Write one operator on local tensors into a graph, and its outputs into the graph's values.

        The operand that is None is a mask that is not needed.
        """
        rule = self.analysis.rules[op.node]
        bound = substitute(op, args)
        if None in args:
            bound["is_causal"] = op.node.meta["mask"] == "causal"
        sharded = any(p.kind in "SE" for placements in (*inputs, *outputs) for p in placements)
        if sharded and rule.local is not None:
            layout, at = self.stage.layout, self.coordinates
            starts: tuple[int, ...] = ()
            if any(c.form == "offset" for c in choices):
                starts = layout.starts((op.node, 0), outputs[0], at)
                self.depends_on_position |= outputs[0][0].kind == "S"
            shapes = LocalShapes(
                tuple(layout.local_shape(v, p, at) for v, p in zip(op.operands, inputs, strict=True)),
                tuple(_of_any_rows(layout.local_shape((op.node, i), p, at), p) for i, p in enumerate(outputs)),
                starts,
            )
            bound = rule.local(op, bound, shapes)
            if op.name == "aten.slice" and any(p.kind == "E" and p.dim == bound["dim"] for p in outputs[0]):
                bound["end"] = sys.maxsize
        without_mask = None
        if bound.get("is_causal") and not any(choice.form == "ring" for choice in choices):
            bound, without_mask = self._causal_rows(emitter, op, bound, inputs)
        special = without_mask or self._special(emitter, op, choices, bound, inputs, outputs)
        node = emit(emitter.graph, op, bound) if special is None else special
        node.meta["source"] = op.node
        if isinstance(op.node.meta.get("val"), (tuple, list)):
            for index, placed in enumerate(outputs):
                emitter.env[((op.node, index), placed)] = emitter.graph.call_function(operator.getitem, (node, index))
        else:
            emitter.env[((op.node, 0), outputs[0])] = node

    def _causal_rows(
        self, emitter: Emitter, op: Op, bound: dict[str, Any], inputs: Sequence[Placements]
    ) -> tuple[dict[str, Any], fx.Node | None]:
        """Let the rows of a causal attention that this rank has read the columns up to the last of them.

        Returns the operator's arguments, with a mask if the rows are not the first ones, and the node that computes
        them without that, where the device has a kernel for it.
        """
        dim = len(op.shape(0)) - 2
        if not any(p.kind == "S" and p.dim == dim for p in inputs[0]):
            return bound, None
        held = self.stage.layout.intervals(op.operands[0], inputs[0], self.coordinates)[dim] or ((0, 0),)
        columns, own = min(held[-1][1], op.shape(1)[dim]), dict(bound)
        for name in ("key", "value"):
            own[name] = emitter.graph.call_function(aten.slice.Tensor, (bound[name], dim, 0, columns))
        if len(held) == 1 and held[0][0] == 0:
            return own, None
        query, _, value = (value_tensor(x) for x in op.operands[:3])
        alike = len({op.shape(i)[:-3] for i in range(3)}) == 1
        if alike and held[-1][1] == columns and not is_random(op.node) and has_kernel(query, value):
            rows = CausalRows(held, bound.get("scale"))
            return own, emitter.call_module(rows, (own["query"], own["key"], own["value"]), "causal_rows")
        mask = self._causal_mask((held, columns, query.dtype, query.device))
        return own | {"attn_mask": mask, "is_causal": False}, None

    def _causal_mask(self, key: tuple[Any, ...]) -> fx.Node:
        """A mask for some rows, one for all layers."""
        if key not in self._masks:
            constant = self.emitters[CONSTANT]
            position = constant.output(constant.graph.call_function(causal_mask, key))
            self._masks[key] = self.emitters[MICRO_BATCH].placeholder(key, (LEVELS[CONSTANT], position), "causal_mask")
        return self._masks[key]

    def _special(
        self,
        emitter: Emitter,
        op: Op,
        choices: Sequence[Choice],
        bound: dict[str, Any],
        inputs: Sequence[Placements],
        outputs: Sequence[Placements],
    ) -> fx.Node | None:
        """The special lowering of a call, where one of its sharded axes needs one or it draws random numbers."""
        if any(choice.form == "ring" for choice in choices):
            ring = ring_call(op, choices, bound, inputs[0], self.stage.layout, self.coordinates, self.groups)
            return emitter.call_module(*ring, "ring")
        if any(choice.form == "halo" for choice in choices):
            rule, layout = self.analysis.rules[op.node], self.stage.layout
            call = windowed_call(op, rule, choices, bound, inputs[0], layout, self.coordinates, self.groups)
            return emitter.call_module(*call, "windows")
        for choice in choices:
            if choice.form not in FORMS:
                continue
            held = self.stage.layout.intervals(op.operands[0], inputs[0], self.coordinates)[choice.inputs[0].dim]
            first, stop = (held[0][0], held[-1][1]) if held else (0, 0)
            axes = [i for i, c in enumerate(choices) if c.form == choice.form]
            form = FormCall(
                arguments=bound,
                first=first,
                length=stop - first,
                shape=op.shape(0),
                axes=tuple(MeshPlace(ranks=self.groups[i], index=self.coordinates[i]) for i in axes),
            )
            module, operands = FORMS[choice.form](form)
            return emitter.call_module(module, operands, choice.form)
        if any(c.form == "mean" for c in choices):
            shape = op.shape(0)
            dims = bound.get("dim")
            dims = list(range(len(shape))) if dims is None else [dims] if isinstance(dims, int) else list(dims)
            keepdim, dtype = bool(bound.get("keepdim", False)), bound.get("dtype")
            total = emitter.graph.call_function(
                aten.sum.dim_IntList, (bound["self"], dims or list(range(len(shape))), keepdim), {"dtype": dtype}
            )
            count = prod(shape[d] for d in dims) if dims else prod(shape)
            return emitter.graph.call_function(aten.div.Scalar, (total, count))
        if self.clock is not None and is_random(op.node):
            part = tuple((a, self.coordinates[a]) for a in range(1, len(choices)) if outputs[0][a].kind == "S")
            key, of_all = (position_key(self.order[op.node], where) for where in (part, ()))
            copied = [placed.kind != "S" for placed in outputs[0][1:]]
            mixed = any(
                is_copied and unlike for is_copied, unlike in zip(copied, self.stage.mesh.mixed_axes, strict=True)
            )
            where = ((op.node, 0), self._normal((op.node, 0), outputs[0]))
            positional, keyword = arguments(op, bound)
            target: Any = op.target
            drawn: nn.Module | None = None
            if target in (aten.dropout.default, aten.native_dropout.default):
                pair = target is aten.native_dropout.default
                drawn, positional, keyword = SeededDropout(bound["p"], of_all, self.clock, pair), (bound["input"],), {}
            elif target is aten.bernoulli.p:
                drawn, positional, keyword = SeededBernoulli(bound["p"], of_all, self.clock), (bound["self"],), {}
            elif target in DRAWS:
                drawn = SeededDraw(target, of_all, self.clock, value_tensor((op.node, 0)).dtype)
            if drawn is not None:
                rows = emitter.placeholder((*where, "rows"), ("rows", where), "rows")
                columns = emitter.placeholder((*where, "columns"), ("columns", where), "columns")
                return emitter.call_module(drawn, (rows, columns, *positional), "drawn", keyword)
            if target is aten.scaled_dot_product_attention.default:
                rows = emitter.placeholder((*where, "rows"), ("rows", where), "rows")
                attention = SeededAttention(target, key, of_all, self.clock, mixed)
                return emitter.call_module(attention, (rows, *positional), "attention", keyword)
            return emitter.call_module(SeededCall(target, key, self.clock, mixed), positional, "random", keyword)
        return None


def at_micro_batch(program: LocalProgram, stage: PlacedStage, rank: int, micro_batch: int) -> LocalProgram:
    """The program with the ranges of the batch that it reads in one micro-batch; its graphs are shared."""
    coordinates = (micro_batch, *stage.mesh.coordinates(rank))

    def located(graph: LocalGraph) -> LocalGraph:
        sources: list[Source] = []
        for kind, what in graph.sources:
            if kind in INPUTS:
                leaf, value, want = what
                sources.append((kind, (leaf, stage.layout.intervals(value, want, coordinates))))
            elif kind in ("rows", "columns"):
                value, placed = what
                sources.append((kind, (stage.layout.intervals(value, placed, coordinates), value_shape(value))))
            else:
                sources.append((kind, what))
        return LocalGraph(graph.code, sources)

    return LocalProgram(
        constant=located(program.constant),
        step=located(program.step),
        micro_batch=located(program.micro_batch),
        bridges=program.bridges,
        depends_on_position=program.depends_on_position,
        begins_alone=program.begins_alone,
        nothing=None if program.bridges or stage.mutated else nothing_of(stage, coordinates),
    )


def nothing_of(
    stage: PlacedStage, coordinates: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...] | None:
    """Result of the rank at these coordinates if it has no row of the micro-batch; None if it has rows, or terms of
    sums that do not depend on rows."""
    factor = stage.layout.analysis.batch_factor
    for choices in stage.choices.values():
        if any(choice.factor == factor for choice in choices):
            placements = tuple(choice.outputs[0] for choice in choices)
            if length_of(stage.layout.spans(placements, coordinates).get(factor, ((0, 1),))) or _adds_to_rows(stage):
                return None
            leaving = [*stage.sent.items()] + ([(stage.loss, stage.loss_placements)] if stage.loss is not None else [])
            return tuple((stage.layout.local_shape(v, p, coordinates), value_tensor(v).dtype) for v, p in leaving)
    return None


def _adds_to_rows(stage: PlacedStage) -> bool:
    """Whether something that is whole in every micro-batch is read as a term of a sum over them."""
    for node, choices in stage.choices.items():
        for (source, index), want in zip(stage.layout.analysis.ops[node].operands, choices[0].inputs, strict=True):
            known = stage.choices[source][0].outputs[index] if source in stage.choices else None
            known = stage.stored[source, index][0] if (source, index) in stage.stored else known
            if want.kind == "P" and (known is None or known.kind != "P"):
                return True
    return False
