"""Costs of one kind of layer on a device of a group: kernels, saved activations and collectives, as laws of the rows.

The program of one device of a tensor, expert or context group is traced without data, at a few numbers of rows: two
define a linear law, the third must follow it. It knows no chain of layers, no prices and no clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from whale.errors import UsageError
from whale.graph.origins import is_checkpointed
from whale.graph.values import Value, has_sparse_gradient, needs_grad, operands, value_shape, value_tensor
from whale.ir.check import CollectiveCall
from whale.ir.profile import (
    CAST_OF_PARAMETER,
    Affine,
    Amount,
    Communication,
    Kernel,
    LayerVariant,
    RuleCosts,
    Saved,
    SparseParameter,
)
from whale.ir.strategy import EXPERTS, RECOMPUTES, Experts, Recompute
from whale.runtime.random import RNGPosition
from whale.strategies.amounts import as_number, most_of, most_of_both, sum_of, without_all
from whale.strategies.casts import cast_to
from whale.strategies.dry_run import TaskCalls, dry_run
from whale.strategies.fused import Traffic
from whale.strategies.host_tables import looked_up
from whale.strategies.kernels import Again, Kept, KernelRun, Trace, trace, trace_again
from whale.strategies.layers import NO_EXPERTS, NOTHING_SPLIT, ExpertSplit, LayeredModel, default_dtype
from whale.strategies.lowering import PlacedStage
from whale.strategies.recompute import has_regions
from whale.strategies.regions import (
    PRODUCTS,
    attention_cores,
    expert_matrices,
    expert_operators,
    expert_ways,
)
from whale.strategies.routes import ROUTED

__all__ = ["MOST_PLACED", "ROWS", "Collectives", "KindCosts", "NoLaw"]

ROWS = (2, 3, 4)
"""Rows at which layers are traced. Not 1, where some copies are views."""

MOST_PLACED = 1024
"""Rows of a micro-batch up to which it is looked for other ways to place a layer on a group: a power of two."""

Collectives = tuple[tuple[Communication, ...], tuple[Communication, ...]]
"""Collectives of a layer's forward and of its backward."""


class NoLaw(UsageError):
    """Costs of a layer that are not linear in the rows."""


class KindCosts:
    """One kind of layer, traced at every requested degree.

    Args:
        models: by rows of a micro-batch, those that are traced.
        kind: of layer.
        counted: the same in the rows of the laws; in an expert group, the rows of one device.
        rules: whether it is also run with backwards that compute values again.
        most_rows: of a micro-batch, for these.
        multiples: gives the models in which a micro-batch has multiples of a degree's rows; those of *models* have.
        check: called before each measurement; may raise to end them.
    """

    def __init__(
        self,
        models: Mapping[int, LayeredModel],
        kind: int,
        counted: Sequence[int] = ROWS,
        *,
        rules: bool = False,
        most_rows: int = MOST_PLACED,
        multiples: Callable[[int], Mapping[int, LayeredModel]] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.models, self.kind, self.counted, self.rules = models, kind, counted, rules
        self.check = check
        self.most_rows = min(MOST_PLACED, 1 << (most_rows - 1).bit_length())
        self.multiples = multiples or (lambda _: models)
        first = next(iter(models.values()))
        self.name = first.chain.names[kind]
        self.dtype = _main_dtype(first)
        self.traces: dict[_Way, list[Trace]] = {}
        self.again: dict[_Way, list[_Placing]] = {}
        self.divided: dict[int, KindCosts] = {}

    def measure(
        self, degree: int, experts: ExpertSplit = NO_EXPERTS, context: int = 1, *, divisible: bool = False
    ) -> bool:
        """Trace the layer split over *degree* devices, or with only its *experts* split, with rows that are cut over
        *context* of these groups.

        False, and nothing is traced, where they divide rows, unless the rows are *divisible* by the degree.
        """
        self.check()
        first = next(iter(self.models.values()))
        if not (experts or divisible or context > 1) and first.divides_rows(self.kind, degree):
            return False
        way = degree, experts, context
        with default_dtype(self.dtype):  # as captured: tensors that a model creates while running depend on it
            self.traces[way] = [self._trace(rows, way) for rows in self.models]
            nodes = first.chain.partition.stages[self.kind].nodes
            if has_regions(nodes) if self.rules else any(map(is_checkpointed, nodes)):
                self.again[way] = list(self._placings(way))
        return True

    def _trace(self, rows: int, way: _Way) -> Trace:
        model, key = self.models[rows], (self.kind, rows, way)
        if key not in model.traces:
            model.traces[key] = trace(
                model.captured,
                model.place(self.kind, *way),
                model.program(self.kind, way[0], rows, *way[1:]),
                model.rows.index(rows),
                self.dtype,
            )
        return model.traces[key]

    def _placings(self, way: _Way) -> Iterator[_Placing]:
        """The layer under the rules, in each of the ways in which a group places it, with micro-batches of more and
        more rows."""
        first, every = next(iter(self.models.values())), list(self.models)
        degree, experts, context = way
        if experts or degree == 1 or context > 1:
            runs = [self._trace_again(self.models[rows], rows, way) for rows in (every[0], every[-1])]
            yield _Placing(1, 1, 1, (self.counted[0], self.counted[len(every) - 1]), runs)
            return

        @cache
        def placed(rows: int) -> PlacedStage:
            return first.place_between(self.kind, degree, rows)

        def is_other(one: int, other: int) -> bool:
            a, b = placed(one), placed(other)
            return (a.choices, a.stored, a.sent) != (b.choices, b.stored, b.sent)

        for since, rows in ((1, 1), *_changes(is_other, 1, self.most_rows)):
            cut = first.cuts_rows(placed(rows))
            models = self.multiples(degree) if cut else self.models
            ends = (min(models), max(models))
            runs = [self._trace_again(models[count], count, way, rows) for count in ends]
            yield _Placing(since, rows, degree if cut else 1, ends, runs)

    def _trace_again(self, model: LayeredModel, rows: int, way: _Way, placed_for: int = 1) -> Mapping[Recompute, Again]:
        key = (self.kind, rows, way, placed_for, self.rules)
        if key not in model.traces:
            model.traces[key] = self._traced_again(model, rows, way, placed_for)
        return model.traces[key]

    def _traced_again(self, model: LayeredModel, rows: int, way: _Way, placed_for: int) -> Mapping[Recompute, Again]:
        clock, (degree, experts, context) = RNGPosition(0), way
        if experts or context > 1:
            stage, program = (
                model.place(self.kind, *way),
                model.program(self.kind, degree, rows, *way[1:], clock=clock),
            )
        else:  # results of collectives are kept, and which these are depends on the form of what layers hand on
            stage, program = (
                model.place_between(self.kind, degree, placed_for),
                model.program_between(self.kind, degree, rows, placed_for, clock=clock),
            )
        return trace_again(
            model.captured,
            stage,
            program,
            model.rows.index(rows),
            self.dtype,
            rules=RECOMPUTES if self.rules else ("none",),
        )

    @property
    def ways_of_experts(self) -> tuple[Experts | None, ...]:
        """The ways in which devices may share the layer's experts; one that has no name if there is no other."""
        first = next(iter(self.models.values()))
        nodes = first.chain.partition.stages[self.kind].nodes
        return EXPERTS if any(c.form == ROUTED for n in nodes for c in first.analysis.choices[n]) else (None,)

    def between_replicas(self) -> Collectives:
        """The collectives of the layer on two replicas that have the same rows."""
        calls: list[TaskCalls] = []
        for rows, model in self.models.items():
            stage, index = model.place(self.kind, 2, NOTHING_SPLIT), model.rows.index(rows)
            calls.append(dry_run(model.captured, stage, 0, model.program(self.kind, 2, rows, NOTHING_SPLIT), index))
            if not calls[0].forward and not calls[0].backward:
                return (), ()
        return (
            self._communications([one.forward for one in calls], {(0, 1): "replica"}),
            self._communications([one.backward for one in calls], {(0, 1): "replica"}),
        )

    @property
    def keeps_input(self) -> bool:
        """Whether autograd saves the layer's input."""
        return any(kept.received for kept in self.traces[1, NO_EXPERTS, 1][0].kept)

    def sent(self, value: Value) -> Amount:
        """The whole size of a value that leaves the layer."""
        sizes = []
        for rows, model in self.models.items():
            stage = model.place(self.kind, 1)
            number = list(self.models[ROWS[0]].place(self.kind, 1).sent).index(value)
            own, placements = list(stage.sent.items())[number]
            count = prod(stage.layout.local_shape(own, placements, (model.rows.index(rows),)))
            tensor = value_tensor(own)
            same = tensor.dtype == self.dtype
            sizes.append(Traffic(elements=count) if same else Traffic(bytes=count * tensor.element_size()))
        return self._amount(sizes)

    def variant(self, degree: int, experts: ExpertSplit = NO_EXPERTS, context: int = 1, *, sent: bool) -> LayerVariant:
        """The layer's measured costs. *sent* says whether its output is saved here, not by its readers."""
        if degree in self.divided and context == 1:
            return self.divided[degree].variant(degree, sent=sent)
        first = next(iter(self.models.values()))
        stage, traces = first.place(self.kind, degree, experts, context), self.traces[degree, experts, context]
        exchanges = () if experts or context > 1 else self._exchanges([t.forward for t in traces], stage)
        again = self.again.get((degree, experts, context), [])
        regions = _Regions(
            attention_cores(first.captured.graph),
            expert_operators(stage.nodes),
            {rule: one.sources for rule, one in again[0].runs[0].items()} if again else {},
            [looked_up(reader) for value in self._tables(stage) for reader in value[0].users],
        )
        shapes, of_experts, frozen = _parameters(first, stage, in_parts=bool(experts))
        sizes = tuple(map(prod, shapes))
        inside: _Group = "expert" if experts else "tensor"
        lines = [stage.mesh.group(axis, 0) for axis in range(len(stage.mesh.axes))]
        group: dict[tuple[int, ...], _Group] = dict.fromkeys(lines, inside)
        group |= dict.fromkeys(lines[: int(context > 1)], "context")
        saved = self._saved([t.kept for t in traces], regions, sent=sent)
        received, sent_on = first.held_shares(self.kind, 1 if experts or context > 1 else degree)
        working, rules = self._working([t.alive for t in traces], saved), self._under_rules(again, sent=sent)
        if copied := self._copied((degree, experts, context)):
            saved += (Saved(origin="part of the batch", size=copied),)
            rules = tuple(one.model_copy(update={"kept": sum_of([one.kept, copied])}) for one in rules)
        return LayerVariant(
            tensor_degree=1 if experts else degree,
            expert_degree=degree if experts else 1,
            experts=experts.way,
            context_degree=context,
            forward=self._kernels([t.forward for t in traces], regions),
            backward=self._kernels([t.backward for t in traces], regions, forward=False),
            forward_communications=self._communications([t.forward_calls for t in traces], group) + exchanges,
            backward_communications=self._communications([t.backward_calls for t in traces], group) + exchanges[::-1],
            saved=saved,
            working=working,
            parameters=sum(sizes),
            expert_parameters=of_experts,
            buffers=frozen,
            largest=max(sizes, default=0),
            summed=0 if experts or degree == 1 else _summed(first, stage),
            factored=sum(_factored(shape) for shape in shapes),
            sizes=sizes,
            sparse=self._sparse(stage),
            rules=rules,
            received=received,
            sent=sent_on,
        )

    def _sparse(self, stage: PlacedStage) -> tuple[SparseParameter, ...]:
        """The parameters with sparse gradients, with the elements that look-ups read. A device of a group looks all
        indices up in its part; those of other parts of the rows are counted too."""
        found, first = [], next(iter(self.models.values()))
        for value in self._tables(stage):
            shape = stage.layout.local_shape(value, stage.stored[value], (0, *stage.mesh.coordinates(0)))
            lookups = sum(prod(value_shape(operands(reader)[1])) for reader in value[0].users)
            touched = Affine(0, lookups * prod(shape[1:]) / sum(first.rows))
            found.append(SparseParameter(elements=prod(shape), rows=shape[0], touched=touched))
        return tuple(found)

    def _tables(self, stage: PlacedStage) -> list[Value]:
        names = next(iter(self.models.values())).captured.parameters
        return [value for value in stage.stored if value[0].name in names and has_sparse_gradient(value)]

    def _rows_alike(self, runs: Sequence[Sequence[Any]], what: str) -> list[tuple[Any, ...]]:
        if len({len(run) for run in runs}) > 1:
            counts = ", ".join(f"{len(run)} at {rows} rows" for rows, run in zip(self.models, runs, strict=True))
            raise NoLaw(f"layer {self.name}: its {what} depend on the number of rows ({counts}), so it has no law")
        return list(zip(*runs, strict=True))

    def _law(self, values: Sequence[int | Fraction], counted: Sequence[int] = ()) -> Affine:
        """Affine function of the rows through *values*, which are at *counted* rows, by default at all."""
        counted = counted or self.counted
        (first, second), (low, high) = counted[:2], values[:2]
        rise, run = high - low, second - first
        slope = Fraction(rise, run) if rise % run else rise // run  # whole numbers are faster
        fixed = low - first * slope
        if any(value != fixed + rows * slope for rows, value in zip(counted, values, strict=False)):
            raise NoLaw(
                f"layer {self.name}: something in it grows with the rows of a micro-batch as "
                f"{', '.join(map(str, values))} at {', '.join(map(str, self.models))} rows, not by the row; such a "
                "model has no profile, so it is neither searched nor cut into stages: annotate it, for "
                "parallelize without plan='auto', or for 'whale plan'"
            )
        return Affine(as_number(fixed), as_number(slope))

    def _amount(self, sizes: Sequence[Traffic], counted: Sequence[int] = ()) -> Amount:
        elements, others = [size.elements for size in sizes], [size.bytes for size in sizes]
        return Amount(elements=self._law(elements, counted), bytes=self._law(others, counted))

    def _kernels(
        self, runs: Sequence[Sequence[KernelRun]], regions: _Regions, *, forward: bool = True
    ) -> tuple[Kernel, ...]:
        alike = self._rows_alike(runs, "kernels")
        for same in alike:
            if len({(one.kind, len(one.dims)) for one in same}) > 1:  # they are placed in other ways
                names = ", ".join(f"{one.name} at {rows} rows" for one, rows in zip(same, self.models, strict=True))
                raise NoLaw(f"layer {self.name}: its kernels depend on the number of rows ({names}), so it has no law")
        looking_up = regions.looking_up([same[0] for same in alike])
        return tuple(
            Kernel(
                name=same[0].name,
                kind=same[0].kind,
                dims=tuple(self._law(sizes) for sizes in zip(*(k.dims for k in same), strict=True)),
                flops=self._law([k.flops for k in same]),
                read=self._amount([k.read for k in same]),
                written=self._amount([k.written for k in same]),
                split=same[0].split,
                expert=same[0].source in regions.experts,
                causal=same[0].causal,
                attention=same[0].source in regions.cores,
                again=regions.runs_again(same[0]) if forward else "never",
                looks_up=looks_up,
            )
            for same, looks_up in zip(alike, looking_up, strict=True)
        )

    def _communications(
        self, runs: Sequence[Sequence[CollectiveCall]], groups: Mapping[tuple[int, ...], _Group]
    ) -> tuple[Communication, ...]:
        """The collectives of the first device, over one of its *groups* each."""
        found = []
        for same in self._rows_alike(runs, "collectives"):
            name: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"] = same[0].op
            kind = getattr(torch, same[0].dtype)
            law = self._law([_exchanged(call) for call in same])
            if kind == self.dtype:
                size = Amount(elements=law)
            else:
                size = Amount(bytes=Affine(law.fixed * kind.itemsize, law.per_row * kind.itemsize))
            found.append(Communication(kind=name, group=groups[same[0].ranks], size=size, beside=same[0].beside))
        return tuple(found)

    def _copied(self, way: _Way) -> Amount | None:
        """The copies of a device's parts of the batch, which have gaps where another dim than the rows is cut; None if
        there are none."""
        sizes = []
        for rows, model in self.models.items():
            program, size = model.program(self.kind, way[0], rows, *way[1:]), Traffic()
            inputs = model.captured.inputs
            batch = {inputs[n.name]: n.meta["val"] for n in model.captured.graph.nodes if n.name in inputs}
            for leaf, intervals in program.parts_with_gaps(batch):
                count, kind = prod(sum(b - a for a, b in dim) for dim in intervals), batch[leaf].dtype
                size += Traffic(elements=count) if kind == self.dtype else Traffic(bytes=count * kind.itemsize)
            sizes.append(size)
        return self._amount(sizes) if any(size != Traffic() for size in sizes) else None

    def _exchanges(self, runs: Sequence[Sequence[KernelRun]], stage: PlacedStage) -> tuple[Communication, ...]:
        """The all-to-alls of rows to their experts and back, for all degrees at which experts are divided."""
        found = []
        for nodes, sides in zip(expert_ways(stage.nodes), ((1, 3), (1, 2)), strict=True):
            for same in self._rows_alike(runs, "kernels"):
                if same[0].kind == "grouped_matmul" and same[0].source in nodes:
                    sizes = [Traffic(elements=k.dims[sides[0]] * k.dims[sides[1]]) for k in same]
                    found.append(Communication(kind="all_to_all", group="expert", size=self._amount(sizes)))
        return tuple(found)

    def _saved(self, runs: Sequence[Sequence[Kept]], regions: _Regions, *, sent: bool) -> tuple[Saved, ...]:
        found, parameters = [], next(iter(self.models.values())).captured.parameters
        for same in self._rows_alike(runs, "saved tensors"):
            kept = same[0]
            if kept.sent and not sent:
                continue
            found.append(
                Saved(
                    origin="input" if kept.received else _origin(kept.source, parameters),
                    size=self._amount([k.size for k in same]),
                    split=kept.split,
                    expert=kept.source in regions.experts,
                    attention=regions.in_core(kept),
                    input=kept.received,
                )
            )
        return tuple(found)

    def _under_rules(self, placings: Sequence[_Placing], *, sent: bool) -> tuple[RuleCosts, ...]:
        """Memory under each rule; *sent* as in `variant`. Where a group may begin to place the layer in another way it
        is the most of both."""
        found = []
        for rule in RECOMPUTES:
            before: RuleCosts | None = None
            for placing in placings:
                if rule not in placing.runs[0]:
                    continue
                costs = self._ruled(rule, placing, sent=sent)
                if before is not None and placing.since < placing.rows:
                    found.append(most_of_both(before, costs, placing.since * self.dtype.itemsize))
                found.append(costs)
                before = costs
        return tuple(found)

    def _ruled(self, rule: Recompute, placing: _Placing, *, sent: bool) -> RuleCosts:
        runs = [one[rule] for one in placing.runs]
        kept = self._amount([run.kept if sent else run.kept - run.sent for run in runs], placing.counted)
        working: tuple[Amount, ...] = ()
        if len({len(run.alive) for run in runs}) == 1:
            moments = dict.fromkeys(zip(*(run.alive for run in runs), strict=True))
            working = most_of([without_all(self._amount(same, placing.counted), [kept]) for same in moments])
        least = 0 if placing.rows == 1 else placing.rows * self.dtype.itemsize
        return RuleCosts(rule=rule, kept=kept, working=working, least=least, multiple=placing.multiple)

    def _working(self, runs: Sequence[Sequence[Traffic]], saved: Sequence[Saved]) -> tuple[Amount, ...]:
        """Live memory besides saved activations, at each moment; none if the moments depend on the number of rows."""
        if len({len(run) for run in runs}) > 1:
            return ()
        kept = [value.size for value in saved]
        return most_of([without_all(self._amount(same), kept) for same in dict.fromkeys(zip(*runs, strict=True))])


_Way = tuple[int, ExpertSplit, int]
"""The devices over which a layer is split, the modules of its experts if only these are, and the context degree."""

_Group = Literal["tensor", "expert", "context", "replica"]


class _Placing(NamedTuple):
    """A way in which a tensor group places a layer under rules of recompute.

    Attributes:
        since: rows of a micro-batch from which it may be so.
        rows: from which it is.
        multiple: devices that divide the rows.
        counted: rows of the runs.
        runs: for each of these, by rule.
    """

    since: int
    rows: int
    multiple: int
    counted: tuple[int, int]
    runs: Sequence[Mapping[Recompute, Again]]


def _changes(is_other: Callable[[int, int], bool], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Changes between two powers of two: the number after the last power with which something is as before, and the
    first power with which it is not. Between powers that are alike it is taken not to change.

    >>> list(_changes(lambda one, other: (one < 5) != (other < 5), 1, 64))
    [(5, 8)]
    """
    if not is_other(low, high):
        return
    if high == 2 * low:
        yield low + 1, high
        return
    middle = low << ((high // low).bit_length() // 2)
    yield from _changes(is_other, low, middle)
    yield from _changes(is_other, middle, high)


class _Regions:
    """The kernels of an attention's core, those of experts, and under each rule those that run again: their operators,
    each with whether these are products; and the operators of each look-up in a table with sparse gradients."""

    def __init__(
        self,
        cores: frozenset[fx.Node],
        experts: frozenset[fx.Node],
        again: Mapping[Recompute, frozenset[tuple[fx.Node, bool]]],
        look_ups: Sequence[Collection[fx.Node]],
    ) -> None:
        self.cores, self.experts, self.again, self.look_ups = cores, experts, again, look_ups

    def looking_up(self, kernels: Sequence[KernelRun]) -> list[Literal["no", "first", "last"]]:
        """For each kernel, whether it looks up."""
        found: list[Literal["no", "first", "last"]] = ["no"] * len(kernels)
        for nodes in self.look_ups:
            its = [number for number, kernel in enumerate(kernels) if kernel.source in nodes]
            for number in its:
                found[number] = "last" if number == its[-1] else "first"
        return found

    def runs_again(self, kernel: KernelRun) -> Literal["never", "always", "selective", "full"]:
        """The mildest rule under which a kernel of the forward runs again."""
        key = kernel.source, kernel.kind != "memory"
        rule = next((rule for rule, sources in self.again.items() if key in sources), None)
        return "never" if rule is None else "always" if rule == "none" else rule

    def in_core(self, kept: Kept) -> bool:
        """Whether only the core's own backward reads a tensor; its inputs and its output are saved for others too."""
        if kept.source is None or kept.source not in self.cores:
            return False
        if not kept.visible:  # except a copy of an operand that a product needed in another layout
            return kept.source.target not in PRODUCTS
        return all(user in self.cores for user in kept.source.users)


def _origin(node: fx.Node | None, parameters: Collection[str]) -> str:
    """Name of a saved tensor: its operator, or `CAST_OF_PARAMETER`."""
    if node is not None and cast_to(node) is not None and node.all_input_nodes[0].name in parameters:
        return CAST_OF_PARAMETER
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target))) if node else "constant"


def _main_dtype(model: LayeredModel) -> torch.dtype:
    kinds = [n.meta["val"].dtype for n in model.captured.graph.nodes if n.name in model.captured.parameters]
    return next((kind for kind in kinds if kind.is_floating_point), torch.float32)


def _exchanged(call: CollectiveCall) -> int | Fraction:
    """Elements of the whole tensor of a collective, as `Communication.size` has it."""
    if call.op == "all_reduce":
        return prod(call.shapes[0])
    if call.op == "all_to_all":  # noted: the whole tensor, and how it is cut before and after
        whole, before, _ = call.shapes
        if call.beside:  # as long as an all-to-all that sends each rank's part to others
            return Fraction(before[0] * len(call.ranks), len(call.ranks) - 1)
        return Fraction(prod(whole) * before[0], sum(before))
    return sum(prod(shape) for shape in call.shapes)


def _factored(shape: tuple[int, ...]) -> int:
    """Elements of the sums of rows and of columns of matrices, or of a parameter that is none."""
    size = prod(shape)
    return size // max(1, shape[-1]) + size // max(1, shape[-2]) if len(shape) > 1 else size


def _summed(model: LayeredModel, stage: PlacedStage) -> int:
    """Elements of parameters that each device of a tensor group has whole, and of whose gradient it computes a part."""
    return sum(
        value_tensor(value).numel()
        for value, placements in stage.stored.items()
        if value[0].name in model.captured.parameters and needs_grad(value) and placements[-1].kind not in ("R", "S")
    )


def _parameters(
    model: LayeredModel, stage: PlacedStage, *, in_parts: bool
) -> tuple[tuple[tuple[int, ...], ...], int, int]:
    """The shape of each trainable parameter on one device, elements of those of experts among them (or of all sharded
    ones), and elements that are not trained."""
    captured = model.captured
    at = (0, *stage.mesh.coordinates(0))
    shapes, of_experts = [], 0
    frozen: dict[Value, int] = {}
    matrices = expert_matrices(stage.nodes)
    for value, placements in stage.stored.items():
        if value[0].name in captured.parameters:
            shape = tuple(stage.layout.local_shape(value, placements, at))
            count = prod(shape)
            if needs_grad(value):
                shapes.append(shape)
                is_part = any(placement.kind == "S" for placement in placements[1:])
                of_experts += count if (is_part if in_parts else value in matrices) else 0
            else:
                frozen[value] = count
    for node in stage.nodes:
        for value in operands(node):
            if value[0].name in captured.buffers:
                frozen[value] = value_tensor(value).numel()
    return tuple(shapes), of_experts, sum(frozen.values())
