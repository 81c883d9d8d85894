"""Placement of a stage: from its operators and its mesh to a placement for everything (:class:`PlacedStage`).

Time comes first: every operator is cut along the batch without a bridge, or the model couples the rows and cannot be
cut into micro-batches. Then the mesh axes, outermost first, each solved with the sizes that the outer ones left.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Literal

import torch
from torch import fx

from whale.errors import InfeasibleError, UsageError
from whale.graph.captured import Captured
from whale.graph.origins import module_of, where
from whale.graph.partition import Partition, TaskGraph, is_random
from whale.graph.values import Value, is_call, needs_grad, output_shapes, resolve, value_shape, value_tensor
from whale.ir.placement import PARTIAL, REPLICATE, REPLICATE_PARTIAL, Placement
from whale.ir.strategy import Along, Experts, RegionRole, divides_batch, experts_of, shards_operators
from whale.ir.units import counted
from whale.ir.virtual_device import VirtualDevice
from whale.runtime.experts import grouped_product
from whale.strategies.analysis import Analysis, Choice
from whale.strategies.bridge_prices import Prices
from whale.strategies.cutting import cut_along
from whale.strategies.layout import Layout, LayoutAxis, Placements, largest_part
from whale.strategies.lowering import PlacedStage
from whale.strategies.routes import ROUTED
from whale.strategies.sequences import mirrored_cuts, ways_of_attention
from whale.strategies.sharding import AxisProblem, solve_axis, solve_time


@dataclass
class Report:
    """Warnings about the placements: operators computed whole, without a rule or a way to cut them along the dim of
    their region, attentions with fewer heads than devices, and matrices that could not be split."""

    whole: list[fx.Node] = field(default_factory=list)
    few_heads: list[fx.Node] = field(default_factory=list)
    uncut: list[fx.Node] = field(default_factory=list)
    gathered: list[Value] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Add the warnings about another stage."""
        self.whole += other.whole
        self.few_heads += other.few_heads
        self.uncut += other.uncut
        self.gathered += [value for value in other.gathered if value not in self.gathered]


@dataclass(frozen=True, kw_only=True)
class StageProblem:
    """A stage to place: its operators, its mesh, and the role of each operator on each mesh axis.

    ``fixed`` are required placements of some parameters and received values. The gradients of ``shared`` parameters are
    summed with other stages'. ``returned`` are the tensors of the model's output, by number, which are taken as they
    are computed. ``sent`` says whether values may leave in shards, ``leaving`` how some of them must leave
    on the axes of the mesh.
    """

    task_graph: TaskGraph
    mesh: VirtualDevice
    roles: Mapping[fx.Node, tuple[RegionRole, ...]]
    rows: tuple[int, ...]
    time: Mapping[fx.Node, Choice]
    loss: Value | None = None
    mutated: Mapping[str, Value] = field(default_factory=dict)
    returned: Mapping[int, Value] = field(default_factory=dict)
    fixed: Mapping[Value, Placements] = field(default_factory=dict)
    shared: frozenset[Value] = frozenset()
    sent: Literal["any", "whole"] = "any"
    leaving: Mapping[Value, Placements] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """Equal for problems of one graph, divided into micro-batches in one way, that have equal solutions; None where
        a role refers to annotations."""
        graph, roles = self.task_graph, tuple([self.roles[node] for node in self.task_graph.nodes])
        if any(isinstance(role, Along) for own in set(roles) for role in own):
            return None
        tables = (self.mutated, self.returned, self.fixed, self.leaving)
        placed = (self.loss, self.shared, self.sent, *(tuple(table.items()) for table in tables))
        axes = tuple(layout_axes(self.mesh, self.rows)), self.mesh.mixed_axes
        return graph.nodes, graph.received, graph.sent, roles, axes, placed


def batch_placeholders(captured: Captured) -> list[fx.Node]:
    """The inputs whose first dim is the batch: the first tensor input, and all of the same length."""
    inputs = [n for n in captured.graph.nodes if n.op == "placeholder" and n.name in captured.inputs]
    tensors = [n for n in inputs if value_tensor((n, 0)).dim() > 0]
    if not tensors:
        return []
    length = value_shape((tensors[0], 0))[0]
    return [n for n in tensors if value_shape((n, 0))[0] == length]


def place_stage(
    captured: Captured,
    analysis: Analysis,
    partition: Partition,
    problem: StageProblem,
    *,
    prices: Prices,
    report: Report,
) -> PlacedStage:
    """Choose placements for one stage on all of its axes."""
    nodes, mesh = problem.task_graph.nodes, problem.mesh
    few_heads = _with_few_heads(problem)
    free = _free(captured, analysis, partition, nodes)
    time = {n: problem.time[n] for n in nodes}
    layout = Layout(analysis, layout_axes(mesh, problem.rows))
    chosen: dict[fx.Node, list[Choice]] = {n: [time[n]] for n in nodes}
    read = dict.fromkeys(v for n in nodes for v in analysis.ops[n].operands if _is_parameter(captured, v))
    parameters = frozenset(read)
    trained = frozenset(filter(needs_grad, parameters))
    received = problem.task_graph.received
    stored: dict[Value, list[Placement]] = {v: [REPLICATE] for v in read}
    stored |= {v: [problem.time[v[0]].outputs[v[1]]] for v in received}
    roles = _effective_roles(captured, analysis, nodes, problem.roles, len(mesh.axes))
    along = cut_along(captured, analysis, partition.scopes, mesh, roles)
    outputs: dict[Value, str | Placement] = dict.fromkeys(problem.task_graph.sent, problem.sent)
    outputs |= dict.fromkeys(problem.mutated.values(), "whole")
    price = 0.0
    if problem.loss is not None:
        outputs[problem.loss] = "sum"
    for axis, mesh_axis in enumerate(mesh.axes):

        @cache
        def local_bytes(value: Value) -> int:
            """Size of the largest shard, as earlier axes have cut it."""
            tensor = value_tensor(value)
            nbytes = float(tensor.nbytes)
            for layout_axis, placement in zip(layout.axes, _placed(chosen, stored, value), strict=False):
                if placement.kind == "S" and (length := analysis.factors.size(placement.factor)):
                    nbytes *= largest_part(length, layout_axis)
                elif placement.kind == "E":
                    nbytes /= layout_axis.size
            return max(int(nbytes), 1)

        @cache
        def left_units(factor: int, cut: tuple[bool, ...]) -> float:
            length = analysis.factors.size(factor)
            return length * prod(largest_part(length, one) for one, own in zip(layout.axes, cut, strict=False) if own)

        def units(node: fx.Node, factor: int) -> float:
            """Size of the largest shard, as earlier axes have cut it."""
            if any(choice.factor == factor and choice.form == ROUTED for choice in chosen[node]):
                return 0.0  # rows go to experts once
            return left_units(factor, tuple(choice.factor == factor for choice in chosen[node]))

        experts = {n: way for n in nodes if (way := _way_of_experts(analysis, n, roles[n], axis)) is not None}
        _check_experts(analysis, experts, mesh_axis.size)
        solution = solve_axis(
            analysis,
            AxisProblem(
                nodes=nodes,
                along={n: along[n][axis] for n in nodes},
                size=mesh_axis.size,
                parameters=parameters,
                free=free - parameters,
                received=frozenset(received),
                outputs=outputs | {v: p[axis + 1] for v, p in problem.leaving.items()},  # type: ignore[arg-type]
                local_bytes=local_bytes,
                units=units,
                prices=prices,
                attention=ways_of_attention(nodes, analysis, roles, along, axis, mesh_axis.size),
                experts=experts,
                fixed={v: p[axis + 1] for v, p in problem.fixed.items()},
            ),
        )
        price += solution.cost
        for node in nodes:
            chosen[node].append(solution.choices[node])
        for value in stored:
            placement = (
                problem.fixed[value][axis + 1] if value in problem.fixed else solution.stored.get(value, REPLICATE)
            )
            # Gradients that stages sum must be partial on every rank. So are those of copies on devices of different
            # types, which round differently: the sum of the first one's and of zeros keeps copies equal.
            summed = value in problem.shared or (value in trained and mesh.mixed_axes[axis])
            stored[value].append(REPLICATE_PARTIAL if summed and placement.kind == "R" else placement)
        for value in solution.forbidden:
            _check_units(captured, analysis, problem, value, axis)
        report.gathered += [v for v in solution.forbidden if v not in report.gathered]
        report.whole += _computed_whole(analysis, nodes, chosen, axis + 1, report)
        report.uncut += _uncut(analysis, nodes, chosen, along, axis)
    report.few_heads += [node for node in few_heads if all(choice.factor < 0 for choice in chosen[node][1:])]
    choices = {n: tuple(c) for n, c in chosen.items()}
    layout = Layout(analysis, layout.axes, mirrored_cuts(analysis, choices))
    final = {v: tuple(p) for v, p in stored.items()}
    sent = {v: _leaving(choices, final, v) for v in problem.task_graph.sent}
    sent |= {v: (*sent[v][:1], *placements[1:]) for v, placements in problem.leaving.items()}
    return PlacedStage(
        index=problem.task_graph.index,
        mesh=mesh,
        layout=layout,
        nodes=nodes,
        choices=choices,
        stored=final,
        received=received,
        sent=sent,
        loss=problem.loss,
        loss_placements=_loss_placements(choices, problem.loss),
        mutated=problem.mutated,
        returned=tuple((i, v, _as_computed(choices, final, v)) for i, v in problem.returned.items()),
        price=price,
    )


def _with_few_heads(problem: StageProblem) -> list[fx.Node]:
    """The attentions with fewer heads than devices that split them.

    Raises:
        InfeasibleError: all attentions are such, and some have several heads.
    """
    found: dict[fx.Node, tuple[int, int]] = {}
    for node in problem.task_graph.nodes:
        parts = prod(
            a.size for a, role in zip(problem.mesh.axes, problem.roles[node], strict=True) if shards_operators(role)
        )
        if parts > 1 and _is_attention(node):
            shape = value_shape(resolve(node.args[0]))  # type: ignore[arg-type]
            if len(shape) >= 4:
                found[node] = parts, shape[-3]
    few = [node for node, (parts, heads) in found.items() if heads < parts]
    most = max(few, key=lambda node: found[node][1], default=None)
    if most is not None and len(few) == len(found) and found[most][1] > 1:
        parts, heads = found[most]
        legal = " or ".join(str(n) for n in (heads // 2, heads) if n)
        raise InfeasibleError(
            f"split over {parts} devices: the attention in {module_of(most) or 'the model'}{where(most)} has {heads} "
            f"heads, and a head is not cut; split it over {legal} (as in whale.split({heads})), and let replicate or "
            "stage use the other devices"
        )
    return few


def _way_of_experts(analysis: Analysis, node: fx.Node, roles: Sequence[RegionRole], axis: int) -> Experts | None:
    """How the devices along an axis share experts. Operators that other axes split would exchange rows between them, of
    which only a step knows the number."""
    way, others = (
        experts_of(roles[axis]),
        [role for i, role in enumerate(roles) if i != axis and shards_operators(role)],
    )
    if not others or all(choice.form != ROUTED for choice in analysis.choices[node]):
        return way
    if way == "whole":
        raise InfeasibleError(
            f"split(experts='whole') inside of or around another split: {module_of(node) or 'the model'}{where(node)} "
            "would be split twice; use one split(n, experts='whole') with the product of their numbers, or "
            "experts='cut' on both"
        )
    return "cut"


def _check_experts(analysis: Analysis, experts: Mapping[fx.Node, Experts], size: int) -> None:
    """Refuse whole experts where there are fewer than devices, or none that could be found."""
    asked = [node for node, way in experts.items() if way == "whole"]
    for node in asked:
        if node.target is not grouped_product:
            continue
        stack: Any = node.args[1]
        if (count := value_shape(resolve(stack))[0]) < size:
            raise InfeasibleError(
                f"split(experts='whole') over {size} devices: {module_of(node) or 'the model'}{where(node)} has "
                f"{counted(count, 'expert')}, and each of them needs one; split it over fewer devices, or cut every "
                "expert with experts='cut'"
            )
    if asked and not any(c.form == ROUTED for choices in analysis.choices.values() for c in choices):
        raise InfeasibleError(
            f"split(experts='whole'): nothing in {module_of(asked[0]) or 'the model'}{where(asked[0])} is found that "
            "sorts rows by expert and multiplies them with stacked matrices, one for each (a grouped product); leave "
            "experts='whole' out, or let the model compute its experts so: "
            "set_experts_implementation('grouped_mm') of models of Hugging Face"
        )


def _is_attention(node: fx.Node) -> bool:
    """A fused attention, or the product of queries and keys that a softmax reads."""
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return True
    if node.target is not torch.ops.aten.matmul.default or len(value_shape((node, 0))) < 4:
        return False
    near = [node]
    for _ in range(4):
        near = [user for found in near for user in found.users]
        if any(user.target is torch.ops.aten.softmax.int for user in near):
            return True
    return False


def _check_units(captured: Captured, analysis: Analysis, problem: StageProblem, value: Value, axis: int) -> None:
    """Refuse to split a matrix that has fewer units than there are devices in each of its dims."""
    if value[0].name not in captured.parameters or value in problem.fixed:
        return
    readers = [n for n in problem.task_graph.nodes if value in analysis.ops[n].operands]
    factors = {
        choice.factor
        for node in readers
        for choice in analysis.choices[node]
        for operand, want in zip(analysis.ops[node].operands, choice.inputs, strict=True)
        if operand == value and want.kind == "S"
    }
    units = max((analysis.factors.size(factor) for factor in factors), default=0)
    parts = problem.mesh.axes[axis].size
    if 0 < units < parts:
        name = captured.parameters[value[0].name]
        raise InfeasibleError(
            f"split over {parts} devices: {name} of shape {tuple(value_shape(value))} can be cut into at most {units} "
            f"parts{where(readers[0])}; split its module over {units} or fewer, or use replicate there"
        )


def place_time(
    captured: Captured, analysis: Analysis, partition: Partition, micro_batches: int, *, apart: bool = False
) -> Mapping[fx.Node, Choice]:
    """Division of every pinned operator of the model into micro-batches; *apart* as for `solve_time`.

    Raises :class:`UsageError` if the batch is cut and an operator couples its rows, the loss is no sum over them, or
    the new value of a buffer is one.
    """
    nodes = [n for n in captured.graph.nodes if is_call(n) and n not in partition.floating]
    if micro_batches == 1:
        return {n: analysis.choices[n][0] for n in nodes}
    free = _free(captured, analysis, partition, nodes)
    time, coupled = solve_time(analysis, nodes, analysis.batch_factor, free, apart=apart)
    loss = resolve(captured.graph.output_node().args[0][0])  # type: ignore[index, arg-type]
    summed = apart or not captured.has_loss or loss[0] not in time or time[loss[0]].outputs[loss[1]] == PARTIAL
    if coupled or not summed:
        node = coupled[0] if coupled else loss[0]
        whole = _computes_whole_batch(analysis, time, node)
        raise UsageError(_coupled_message(analysis, time, node if whole is None else whole, micro_batches))
    for name, value in captured.new_values.items():
        if value[0] in time and time[value[0]].outputs[value[1]] == PARTIAL:
            raise UsageError(
                f"micro_batches={micro_batches}: the forward writes a sum or a mean over the rows of the batch to the "
                f"buffer {name}{where(value[0])}, of which a micro-batch has only a term; use micro_batches=1, or "
                "return the sum and update the buffer in the script, after train_step"
            )
    return time


def _computes_whole_batch(analysis: Analysis, time: Mapping[fx.Node, Choice], node: fx.Node) -> fx.Node | None:
    """The first operator before *node* that reads rows of the batch and is not cut along them, or draws for them."""
    batch = analysis.batch_factor
    above, waiting = set[fx.Node](), [node]
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in above]
        above.update(new)
        waiting += new
    uncut = [found for found in time if found in above and time[found].factor != batch]

    def has_rows(found: fx.Node) -> bool:
        read = [*analysis.ops[found].operands, *([(found, 0)] if _draws_whole(analysis, found) else [])]
        return any(analysis.factors.count(dim, batch) for value in read for dim in analysis.dims[value])

    return next(filter(has_rows, uncut), None)


def _draws_whole(analysis: Analysis, node: fx.Node) -> bool:
    """Whether an operator draws random numbers that are not known by their positions."""
    return analysis.rules[node].opaque and is_random(node)


def _free(captured: Captured, analysis: Analysis, partition: Partition, nodes: Sequence[fx.Node]) -> frozenset[Value]:
    """Values that cost nothing in any placement: floating ones, inputs, constants, buffers."""
    return frozenset(
        v for n in nodes for v in analysis.ops[n].operands if v[0] in partition.floating or _is_leaf(captured, v)
    )


def layout_axes(mesh: VirtualDevice, rows: Sequence[int]) -> list[LayoutAxis]:
    """Time and the mesh axes, as the layout sees them."""
    axes = [LayoutAxis(name="time", size=len(rows), sizes=tuple(rows))]
    for index, axis in enumerate(mesh.axes):
        shares = mesh.axis_shares(index)
        weights = () if len(set(shares)) == 1 else shares
        axes.append(LayoutAxis(name=axis.name, size=axis.size, weights=weights))
    return axes


def _is_leaf(captured: Captured, value: Value) -> bool:
    node = value[0]
    return node.op == "placeholder" and node.name not in captured.parameters


def _is_parameter(captured: Captured, value: Value) -> bool:
    return value[0].op == "placeholder" and value[0].name in captured.parameters


def _effective_roles(
    captured: Captured,
    analysis: Analysis,
    nodes: Sequence[fx.Node],
    roles: Mapping[fx.Node, tuple[RegionRole, ...]],
    num_axes: int,
) -> dict[fx.Node, tuple[RegionRole, ...]]:
    """A replicated operator without parameters that reads a split one may be cut as that is: a residual sum, a loss.

    The next operator with parameters decides what it must not do.
    """
    found: dict[fx.Node, tuple[RegionRole, ...]] = {}
    for node in nodes:
        own = list(roles[node])
        operands = analysis.ops[node].operands
        if not any(_is_parameter(captured, v) for v in operands):
            for axis in range(num_axes):
                if divides_batch(own[axis]):
                    read = [found[v[0]][axis] for v in operands if v[0] in found]
                    own[axis] = next((role for role in read if not divides_batch(role)), own[axis])
        found[node] = tuple(own)
    return found


def _placed(
    chosen: Mapping[fx.Node, Sequence[Choice]], stored: Mapping[Value, Sequence[Placement]], value: Value
) -> list[Placement]:
    if value in stored:
        return list(stored[value])
    return [c.outputs[value[1]] for c in chosen.get(value[0], ())]


def _leaving(
    choices: Mapping[fx.Node, tuple[Choice, ...]], stored: Mapping[Value, Placements], value: Value
) -> Placements:
    """Placement of a sent value: sharded if it is sharded, otherwise whole; a sum over rows is one of a micro-batch."""
    time, *placed = _placed(choices, stored, value)
    return (time, *(p if p.kind == "S" else REPLICATE for p in placed))


def _as_computed(
    choices: Mapping[fx.Node, tuple[Choice, ...]], stored: Mapping[Value, Placements], value: Value
) -> Placements:
    """Placement of a returned value: that in which it is computed or stored, and whole where it is derived."""
    return tuple(_placed(choices, stored, value)) or (REPLICATE,) * len(next(iter(choices.values())))


def _loss_placements(choices: Mapping[fx.Node, tuple[Choice, ...]], loss: Value | None) -> Placements:
    if loss is None:
        return ()
    return tuple(p if p.kind == "P" else REPLICATE for p in _placed(choices, {}, loss))


def _computed_whole(
    analysis: Analysis, nodes: Sequence[fx.Node], chosen: Mapping[fx.Node, Sequence[Choice]], axis: int, report: Report
) -> list[fx.Node]:
    """Operators without a rule that are therefore computed whole on an axis on which their inputs are sharded."""
    found = []
    for node in nodes:
        if not analysis.rules[node].opaque or node in report.whole:
            continue
        for value in analysis.ops[node].operands:
            producer = chosen.get(value[0])
            if producer is not None and producer[axis].outputs[value[1]].kind in "SP":
                found.append(node)
                break
    return found


def _uncut(
    analysis: Analysis, nodes: Sequence[fx.Node], chosen: Mapping[fx.Node, Sequence[Choice]],
    along: Mapping[fx.Node, tuple[int | None, ...]], axis: int,
) -> list[fx.Node]:  # fmt: skip
    """Operators of regions cut along a dim that need the whole dim, and so gather it."""
    found = []
    for node in nodes:
        factor, choice = along[node][axis], chosen[node][axis + 1]
        if factor in (None, analysis.batch_factor) or choice.factor >= 0 or PARTIAL in choice.inputs:
            continue
        read = (chosen[v[0]][axis + 1].outputs[v[1]] for v in analysis.ops[node].operands if v[0] in chosen)
        if not analysis.rules[node].opaque and any(p.kind == "S" and p.factor == factor for p in read):
            found.append(node)
    return found


def _coupled_message(analysis: Analysis, time: Mapping[fx.Node, Choice], node: fx.Node, count: int) -> str:
    operator = f"micro_batches={count}: {node.target}{where(node)}"
    if _draws_whole(analysis, node):
        return (
            f"{operator} draws random numbers of the whole batch one after the other, which micro-batches would draw "
            "apart; use micro_batches=1, or compute them from torch.rand or torch.randn, whose numbers depend on their "
            "positions"
        )
    if analysis.rules[node].opaque:
        return (
            f"{operator} has no axis rule, so it is not known whether it computes a row of the batch from other rows; "
            "use micro_batches=1, or another operator"
        )
    if analysis.ops[node].args.get("scale_grad_by_freq"):
        return (
            f"{operator} computes the gradient of a row of the batch from other rows (scale_grad_by_freq counts the "
            "indices of the whole batch), so micro-batches would change the result; use micro_batches=1, or leave "
            "scale_grad_by_freq out"
        )
    rows = [dim for value in analysis.ops[node].operands for dim in analysis.dims[value]]
    rows += [dim for index, _ in enumerate(output_shapes(node)) for dim in analysis.dims[node, index]]
    if not any(analysis.factors.count(dim, analysis.batch_factor) for dim in rows):
        terms = any(v[0] in time and time[v[0]].outputs[v[1]] == PARTIAL for v in analysis.ops[node].operands)
        what = (
            "needs the whole sum over the rows of the batch, but a micro-batch has only terms of the loss, which are "
            "added up"
            if terms
            else "computes the loss from no rows that could be divided among micro-batches, as where a part of the "
            "batch is taken before the first layer (x[:n])"
        )
        return (
            f"{operator} {what}; use micro_batches=1, or let the loss be a sum or a mean over rows, with weights that "
            "depend on no other rows"
        )
    return (
        f"{operator} computes a row of the batch from other rows, so "
        "micro-batches would change the result; use micro_batches=1, or take the operator out of the model (e.g. "
        "freeze batch-norm with .eval())"
    )
