"""Profiling of a model's graph: a chain of layers with compute, saved activations and communication, by tensor degree.

Nothing is allocated. The model is captured and divided into layers. For every kind of layer, the program of one device
of a tensor group is traced without data, at three numbers of rows: two define a linear law, the third must follow it.
If the devices of a group divide rows, these are multiples of the degree, because uneven shards run other kernels. This
module knows no prices, no clusters and no plans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from whale.errors import CaptureError, InfeasibleError, UsageError
from whale.graph.capture import Batch, Captured, batch_leaves
from whale.graph.capture_checks import is_checkpointed
from whale.graph.chain import Layer
from whale.graph.precision import LOW_PRECISIONS
from whale.graph.values import Value, needs_grad, operands, value_tensor
from whale.ir.check import CollectiveCall
from whale.ir.profile import (
    CAST_OF_PARAMETER,
    Affine,
    Amount,
    Communication,
    Kernel,
    LayerKind,
    LayerVariant,
    ModelProfile,
    RuleCosts,
    Saved,
    Skip,
)
from whale.ir.strategy import EXPERTS, RECOMPUTES, Experts, Recompute
from whale.runtime.random import RNGPosition
from whale.strategies.casts import cast_to
from whale.strategies.dry_run import TaskCalls, dry_run
from whale.strategies.fused import Traffic
from whale.strategies.kernels import Again, Kept, KernelRun, Trace, trace, trace_again
from whale.strategies.layers import (
    NO_EXPERTS,
    NOTHING_SPLIT,
    ExpertSplit,
    LayeredModel,
    default_dtype,
    layered,
    within,
)
from whale.strategies.lowering import PlacedStage
from whale.strategies.recompute import has_regions
from whale.strategies.regions import (
    PRODUCTS,
    attention_cores,
    expert_matrices,
    expert_modules,
    expert_operators,
    expert_ways,
)
from whale.strategies.routes import ROUTED

__all__ = ["KnownLayers", "profile_model"]

ROWS = (2, 3, 4)
"""Rows at which layers are traced. Not 1, where some copies are views."""

LEAST_ROWS = 2
"""Number of these that define a law. The others check it, if the batch has them."""

MOST_PLACED = 1024
"""Rows of a micro-batch up to which it is looked for other ways to place a layer on a group."""

ELEMENT_BYTES = (2, 4, 8)
"""The dtypes in which a profile may be read."""

KnownLayers = dict[tuple[int, ...], Mapping[int, LayeredModel]]
"""Layers of a captured model, by the rows for which they were captured together."""

STAND_IN = torch.bfloat16
"""The stand-in for the run's dtype; tensors that a model holds in float32 on purpose then differ from it."""


def profile_model(
    model: nn.Module,
    batch: Batch,
    *,
    tensor_degrees: Sequence[int] = (1, 2, 4, 8),
    expert_degrees: Sequence[int] = (),
    context_degrees: Sequence[int] = (),
    cut_tensor_degrees: Collection[int] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    name: str | None = None,
    captured: Captured | None = None,
    precision: str | None = None,
    rules: bool = False,
    known: KnownLayers | None = None,
) -> ModelProfile:
    """Profile *model*, trained on batches like *batch* (of which only shapes matter, and not the number of rows).

    A tensor degree over which the model cannot be split, or at which its costs follow no law, is left out; ``refused``
    of the profile says why. Where a layer has experts, they alone are split at *expert_degrees*, if that is possible.
    Each row is cut along a dim of the batch, such as the length of its sequence, at *context_degrees*, at each of the
    tensor degrees or those of *cut_tensor_degrees*; ``uncut`` of the profile says where it is not.
    With *captured*, a capture of the training model as it is, the profile is of a run in the model's own number type.
    With a *precision*, ``bf16`` or ``fp16``, it is of a run under ``torch.autocast``, as *captured* then is.
    With *rules* it has what each rule of recompute keeps and computes again; layers then take about twice as long.
    *known* has the layers that an earlier profile of the same model and batch captured, and gets those of this one.

    Raises:
        CaptureError, UsageError: the model cannot be captured, or is none that training could split into rows.
    """
    capturing = _Capturing(model, batch, loss_fn, captured, precision, {} if known is None else known)
    models = capturing.at_rows(ROWS)
    first = models[ROWS[0]]
    degrees = sorted({1, *tensor_degrees})

    @cache
    def multiples() -> Mapping[int, Mapping[int, LayeredModel]]:
        return _in_multiples(capturing, [degree for degree in degrees if degree > 1], first)

    costs = [
        _KindCosts(models, kind, rules=rules, multiples=lambda degree: multiples()[degree])
        for kind in range(len(first.chain.names))
    ]
    refused = _measured(costs, degrees, lambda some: _in_multiples(capturing, some, first))
    legal = [degree for degree in degrees if degree not in refused]
    layers = first.chain.layers
    outputs = {}
    for layer in reversed(layers):
        outputs[layer.kind] = _sum(costs, first, layer.crossing)
    nexts = _next_kinds([layer.kind for layer in layers])
    sent = [not all(costs[other].keeps_input for other in nexts[position]) for position in range(len(costs))]
    between = [_between_replicas(models, position) for position in range(len(costs))]
    kinds = []
    for position, kind in enumerate(costs):
        variants = []
        for degree in legal:
            try:
                variants.append(_with(kind.variant(degree, sent=sent[position]), between[position]))
            except _NoLaw as error:
                if degree == 1:
                    raise UsageError(str(error)) from error
                refused.setdefault(degree, str(error))
        kinds.append(LayerKind(name=first.chain.names[position], variants=tuple(variants), output=outputs[position]))
    kinds = [_without(kind, refused) for kind in kinds]
    experts = [_experts(first, kind) for kind in range(len(kinds))]
    ways = sorted({*expert_degrees} - {1})
    if ways and any(experts):
        more = _in_multiples(capturing, ways, first)
        for position, modules in enumerate(experts):
            costs_at = {way: _KindCosts(own, position, rules=rules) for way, own in more.items()} if modules else {}
            split = [_with(v, between[position]) for v in _expert_variants(costs_at, modules, sent=sent[position])]
            kinds[position] = kinds[position].model_copy(update={"expert_variants": tuple(split)})
    cuts = sorted({*context_degrees} - {1})
    wanted = set(legal) - set(refused)
    wanted &= wanted if cut_tensor_degrees is None else set(cut_tensor_degrees)
    uncut = _add_cut(kinds, costs, cuts, sorted(wanted), sent, between)
    return ModelProfile(
        name=name or type(model).__name__,
        model_hash=first.hash,
        layers=tuple(layer.kind for layer in layers),
        paths=tuple(layer.path for layer in layers),
        experts=_expert_paths(layers, experts) if any(experts) else (),
        kinds=tuple(kinds),
        precision=_precision(model),
        row_tokens=_row_tokens(batch),
        row_bytes=_row_bytes(batch),
        tied=_tied(model, first),
        skips=_skips(costs, first),
        refused=tuple(refused.items()),
        rules=RECOMPUTES if rules else ("none",),
        autocast=precision or "",  # type: ignore[arg-type]
        cut_dim=first.cut_dim if cuts else 0,
        uncut=tuple(uncut.items()),
    )


def _add_cut(
    kinds: list[LayerKind],
    costs: Sequence[_KindCosts],
    contexts: Sequence[int],
    degrees: Sequence[int],
    sent: Sequence[bool],
    between: Sequence[_Both],
) -> dict[int, str]:
    """Add to the kinds of layers their variants at context degrees, in each tensor degree at which all of them can be
    cut so; return the context degrees at which there is none, with reasons."""
    refused: dict[int, str] = {}
    for context in contexts:
        for degree in degrees:
            found = []
            try:
                for kind, own, met in zip(costs, sent, between, strict=True):
                    kind.measure(degree, context=context)
                    found.append(_with(kind.variant(degree, context=context, sent=own), met))
            except (InfeasibleError, _NoLaw) as error:
                if degree == 1:
                    refused[context] = str(error)
                continue
            for position, variant in enumerate(found):
                more = (*kinds[position].context_variants, variant)
                kinds[position] = kinds[position].model_copy(update={"context_variants": more})
    return refused


_Both = tuple[tuple[Communication, ...], tuple[Communication, ...]]
"""Collectives of a layer's forward and of its backward."""


def _between_replicas(models: Mapping[int, LayeredModel], kind: int) -> _Both:
    """The collectives of a layer whose devices only divide the rows, such as a batch norm's statistics; none where that
    is impossible or they follow no law."""
    two = {rows: models[rows] for rows in ROWS if not rows % 2}  # as many on both replicas
    costs = _KindCosts(two, kind, [rows // 2 for rows in two])
    with suppress(InfeasibleError, UsageError), default_dtype(costs.dtype):
        return costs.between_replicas()
    return (), ()


def _with(variant: LayerVariant, between: _Both) -> LayerVariant:
    """The variant with its collectives between replicas. Those of a shard are taken as whole: they are small."""
    if not any(between):
        return variant
    forward, backward = between
    return variant.model_copy(
        update={
            "forward_communications": (*variant.forward_communications, *forward),
            "backward_communications": (*variant.backward_communications, *backward),
        }
    )


def _experts(model: LayeredModel, kind: int) -> tuple[str, ...]:
    """The modules of a kind's experts, in the first layer of the kind."""
    return expert_modules(model.captured, model.analysis, model.chain.partition.stages[kind].nodes)


def _expert_paths(layers: Sequence[Layer], experts: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The expert modules of each layer: those that own the same parameters, by order, as in the first layer of the
    kind."""
    owners = [[name.rpartition(".")[0] for name in layer.parameters] for layer in layers]
    firsts: dict[int, list[str]] = {}
    for layer, own in zip(layers, owners, strict=True):
        firsts.setdefault(layer.kind, own)
    return tuple(
        tuple(own[firsts[layer.kind].index(module)] for module in experts[layer.kind])
        for layer, own in zip(layers, owners, strict=True)
    )


def _measured(
    costs: Sequence[_KindCosts],
    degrees: Sequence[int],
    in_multiples: Callable[[Sequence[int]], Mapping[int, Mapping[int, LayeredModel]]],
) -> dict[int, str]:
    """Trace every kind of layer at the degrees; return the impossible degrees, with reasons.

    A kind whose rows a group divides is traced in multiples of the degree.
    """
    refused: dict[int, str] = {}
    divided: dict[int, list[_KindCosts]] = {}
    for degree in degrees:
        try:
            divided[degree] = [kind for kind in costs if not kind.measure(degree)]
        except InfeasibleError as error:
            refused[degree] = str(error)
    wanted = [degree for degree, kinds in divided.items() if kinds and degree not in refused]
    for degree, models in in_multiples(wanted).items() if wanted else ():
        for kind in divided[degree]:
            kind.divided[degree] = _KindCosts(models, kind.kind, list(models), rules=kind.rules)
            kind.divided[degree].measure(degree, divisible=True)
    return refused


class _Capturing(NamedTuple):
    """A model to capture as a chain of layers, or captured already."""

    model: nn.Module
    batch: Batch
    loss_fn: Callable[..., Any] | None
    captured: Captured | None
    precision: str | None
    known: KnownLayers

    def at_rows(self, rows: Sequence[int]) -> Mapping[int, LayeredModel]:
        """The model for these rows, captured once."""
        key = tuple(rows)
        if key not in self.known:
            self.known[key] = self._captured_at(rows)
        return self.known[key]

    def _captured_at(self, rows: Sequence[int]) -> Mapping[int, LayeredModel]:
        """The model with the stand-in for its number type; as it is where it cannot be converted, is captured, or
        computes under ``torch.autocast``."""
        how: dict[str, Any] = {"loss_fn": self.loss_fn}
        if self.captured is not None or self.precision is not None:
            how |= {"captured": self.captured, "precision": LOW_PRECISIONS.get(self.precision or "")}
            return layered(self.model, self.batch, rows, **how)
        try:
            return layered(self.model, self.batch, rows, dtype=STAND_IN, **how)
        except CaptureError:
            return layered(self.model, self.batch, rows, **how)


def _in_multiples(
    capturing: _Capturing, degrees: Sequence[int], layers: LayeredModel
) -> dict[int, Mapping[int, LayeredModel]]:
    """The model for each degree, for micro-batches of which a device has `ROWS` rows: the given *layers* if they are
    those of *captured*; otherwise captured again, all together, for rows that the batch lacks."""
    rows = {degree: [degree * count for count in ROWS] for degree in degrees}
    found: dict[int, Mapping[int, LayeredModel]] = {}
    for degree, own in rows.items() if capturing.captured is not None else ():
        if known := within(layers, own) or within(layers, own[:LEAST_ROWS]):
            found[degree] = known
    if missing := [degree for degree in degrees if degree not in found]:
        every = sorted({count for degree in missing for count in rows[degree]})
        found |= dict.fromkeys(missing, capturing.at_rows(every))
    return {
        degree: {count: found[degree][count] for count in rows[degree] if count in found[degree]} for degree in degrees
    }


def _expert_variants(
    costs_at: Mapping[int, _KindCosts], modules: tuple[str, ...], *, sent: bool
) -> Iterator[LayerVariant]:
    """A kind of layer at the expert degrees that are possible, in each way to share experts that it has."""
    for degree, costs in costs_at.items():
        for way in costs.ways_of_experts if modules else (None,):
            split = ExpertSplit(modules, way)
            with suppress(InfeasibleError, _NoLaw):
                costs.measure(degree, split)
                yield costs.variant(degree, split, sent=sent)


class _NoLaw(UsageError):
    """Costs of a layer that are not linear in the rows."""


def _without(kind: LayerKind, refused: Mapping[int, str]) -> LayerKind:
    """The kind at the degrees that all kinds have."""
    return kind.model_copy(update={"variants": tuple(v for v in kind.variants if v.tensor_degree not in refused)})


def _precision(model: nn.Module) -> str:
    kinds = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return str(kinds[0] if kinds else torch.float32).removeprefix("torch.")


def _row_tokens(batch: Batch) -> int:
    """Tokens of a row: the length of its first whole-number matrix; 1 where a row is a sample."""
    for x in batch_leaves(batch).values():
        if isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point():
            return int(x.shape[1])
    return 1


def _row_bytes(batch: Batch) -> int:
    """Bytes of a row of all tensors that have rows."""
    tensors = [x for x in batch_leaves(batch).values() if isinstance(x, Tensor) and x.dim()]
    return sum(x[:1].numel() * x.element_size() for x in tensors if x.shape[0] == tensors[0].shape[0])


def _tied(model: nn.Module, layered: LayeredModel) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Layers that share parameters, and the number of shared parameters."""
    readers: dict[str, list[int]] = {}
    for position, layer in enumerate(layered.chain.layers):
        for name in layer.parameters:
            readers.setdefault(name, []).append(position)
    shared: dict[tuple[int, ...], int] = {}
    for name, layers in readers.items():
        if len(layers) > 1:
            shared[tuple(layers)] = shared.get(tuple(layers), 0) + model.get_parameter(name).numel()
    return tuple(shared.items())


def _skips(costs: Sequence[_KindCosts], layered: LayeredModel) -> tuple[Skip, ...]:
    """Values that are read beyond the next layer, those with the same readers together."""
    found: dict[tuple[int, tuple[int, ...]], list[Value]] = {}
    for position, layer in enumerate(layered.chain.layers):
        for value, readers in layer.read.items():
            if readers[-1] > position + 1:
                found.setdefault((position, readers), []).append(value)
    return tuple(
        Skip(layer=layer, readers=readers, size=_sum(costs, layered, values))
        for (layer, readers), values in found.items()
    )


def _next_kinds(layers: Sequence[int]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {kind: set() for kind in layers}
    for here, following in pairwise(layers):
        found[here].add(following)
    return found


def _sum(costs: Sequence[_KindCosts], layered: LayeredModel, crossing: Sequence[Value]) -> Amount:
    """The size of the values that cross a cut of the chain."""
    amounts = [costs[layered.chain.partition.stage_of[value[0]]].sent(value) for value in crossing]
    return Amount(
        elements=Affine(sum(a.elements.fixed for a in amounts), sum(a.elements.per_row for a in amounts)),
        bytes=Affine(sum(a.bytes.fixed for a in amounts), sum(a.bytes.per_row for a in amounts)),
    )


class _KindCosts:
    """One kind of layer, traced at every requested degree.

    Args:
        models: by rows of a micro-batch, those that are traced.
        kind: of layer.
        counted: the same in the rows of the laws; in an expert group, the rows of one device.
        rules: whether it is also run with backwards that compute values again.
        multiples: gives the models in which a micro-batch has multiples of a degree's rows; those of *models* have.
    """

    def __init__(
        self,
        models: Mapping[int, LayeredModel],
        kind: int,
        counted: Sequence[int] = ROWS,
        *,
        rules: bool = False,
        multiples: Callable[[int], Mapping[int, LayeredModel]] | None = None,
    ) -> None:
        self.models, self.kind, self.counted, self.rules = models, kind, counted, rules
        self.multiples = multiples or (lambda _: models)
        first = next(iter(models.values()))
        self.name = first.chain.names[kind]
        self.dtype = _main_dtype(first)
        self.traces: dict[_Way, list[Trace]] = {}
        self.again: dict[_Way, list[_Placing]] = {}
        self.divided: dict[int, _KindCosts] = {}

    def measure(
        self, degree: int, experts: ExpertSplit = NO_EXPERTS, context: int = 1, *, divisible: bool = False
    ) -> bool:
        """Trace the layer split over *degree* devices, or with only its *experts* split, with rows that are cut over
        *context* of these groups.

        False, and nothing is traced, where they divide rows, unless the rows are *divisible* by the degree.
        """
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
        model = self.models[rows]
        return trace(
            model.captured,
            model.place(self.kind, *way),
            model.program(self.kind, way[0], rows, *way[1:]),
            model.rows.index(rows),
            self.dtype,
        )

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

        for since, rows in ((1, 1), *_changes(is_other, 1, MOST_PLACED)):
            cut = first.cuts_rows(placed(rows))
            models = self.multiples(degree) if cut else self.models
            ends = (min(models), max(models))
            runs = [self._trace_again(models[count], count, way, rows) for count in ends]
            yield _Placing(since, rows, degree if cut else 1, ends, runs)

    def _trace_again(self, model: LayeredModel, rows: int, way: _Way, placed_for: int = 1) -> Mapping[Recompute, Again]:
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

    def between_replicas(self) -> _Both:
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
        )
        shapes, of_experts, frozen = _parameters(first, stage, in_parts=bool(experts))
        sizes = tuple(map(prod, shapes))
        inside: _Group = "expert" if experts else "tensor"
        lines = [stage.mesh.group(axis, 0) for axis in range(len(stage.mesh.axes))]
        group: dict[tuple[int, ...], _Group] = dict.fromkeys(lines, inside)
        group |= dict.fromkeys(lines[: int(context > 1)], "context")
        saved = self._saved([t.kept for t in traces], regions, sent=sent)
        shares = (1.0, 1.0) if experts or context > 1 else first.held_shares(self.kind, degree)
        received_share, sent_share = shares
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
            working=self._working([t.alive for t in traces], saved),
            parameters=sum(sizes),
            expert_parameters=of_experts,
            buffers=frozen,
            largest=max(sizes, default=0),
            factored=sum(_factored(shape) for shape in shapes),
            sizes=sizes,
            rules=self._under_rules(again, sent=sent),
            received_share=received_share,
            sent_share=sent_share,
        )

    def _rows_alike(self, runs: Sequence[Sequence[Any]], what: str) -> list[tuple[Any, ...]]:
        if len({len(run) for run in runs}) > 1:
            counts = ", ".join(f"{len(run)} at {rows} rows" for rows, run in zip(self.models, runs, strict=True))
            raise _NoLaw(f"layer {self.name}: its {what} depend on the number of rows ({counts}), so it has no law")
        return list(zip(*runs, strict=True))

    def _law(self, values: Sequence[int | Fraction], counted: Sequence[int] = ()) -> Affine:
        """Affine function of the rows through *values*, which are at *counted* rows, by default at all."""
        counted = counted or self.counted
        (first, second), (low, high) = counted[:2], values[:2]
        rise, run = high - low, second - first
        slope = Fraction(rise, run) if rise % run else rise // run  # whole numbers are faster
        fixed = low - first * slope
        if any(value != fixed + rows * slope for rows, value in zip(counted, values, strict=False)):
            raise _NoLaw(
                f"layer {self.name}: something in it grows with the rows of a micro-batch as "
                f"{', '.join(map(str, values))} at {', '.join(map(str, self.models))} rows, not by the row; such a "
                "model has no profile, so it is neither searched nor cut into stages: annotate it, for "
                "parallelize without plan='auto', or for 'whale plan'"
            )
        return Affine(_number(fixed), _number(slope))

    def _amount(self, sizes: Sequence[Traffic], counted: Sequence[int] = ()) -> Amount:
        elements, others = [size.elements for size in sizes], [size.bytes for size in sizes]
        return Amount(elements=self._law(elements, counted), bytes=self._law(others, counted))

    def _kernels(
        self, runs: Sequence[Sequence[KernelRun]], regions: _Regions, *, forward: bool = True
    ) -> tuple[Kernel, ...]:
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
            )
            for same in self._rows_alike(runs, "kernels")
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
                    found.append(_most_of_both(before, costs, placing.since * self.dtype.itemsize))
                found.append(costs)
                before = costs
        return tuple(found)

    def _ruled(self, rule: Recompute, placing: _Placing, *, sent: bool) -> RuleCosts:
        runs = [one[rule] for one in placing.runs]
        kept = self._amount([run.kept if sent else run.kept - run.sent for run in runs], placing.counted)
        working: tuple[Amount, ...] = ()
        if len({len(run.alive) for run in runs}) == 1:
            moments = dict.fromkeys(zip(*(run.alive for run in runs), strict=True))
            working = _most_of([_without_all(self._amount(same, placing.counted), [kept]) for same in moments])
        least = 0 if placing.rows == 1 else placing.rows * self.dtype.itemsize
        return RuleCosts(rule=rule, kept=kept, working=working, least=least, multiple=placing.multiple)

    def _working(self, runs: Sequence[Sequence[Traffic]], saved: Sequence[Saved]) -> tuple[Amount, ...]:
        """Live memory besides saved activations, at each moment; none if the moments depend on the number of rows."""
        if len({len(run) for run in runs}) > 1:
            return ()
        kept = [value.size for value in saved]
        return _most_of([_without_all(self._amount(same), kept) for same in dict.fromkeys(zip(*runs, strict=True))])


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


def _most_of_both(one: RuleCosts, other: RuleCosts, least: int) -> RuleCosts:
    """Costs that are no less than either, for any number of rows."""

    def most(a: Affine, b: Affine) -> Affine:
        return Affine(max(a.fixed, b.fixed), max(a.per_row, b.per_row))

    kept = Amount(
        elements=most(one.kept.elements, other.kept.elements),
        bytes=most(one.kept.bytes, other.kept.bytes),
    )
    working = (*one.working, *other.working) if one.working and other.working else ()
    multiple = max(one.multiple, other.multiple)
    return RuleCosts(rule=other.rule, kept=kept, working=working, least=least, multiple=multiple)


def _number(value: Fraction | int) -> float:
    """Whole numbers as such."""
    return int(value) if value.denominator == 1 else float(value)


def _without_all(amount: Amount, others: Sequence[Amount]) -> Amount:
    """The rest of an amount without others."""
    parts = [
        Affine(*(own - sum(theirs) for own, *theirs in zip(whole, *those, strict=True)))
        for whole, those in (
            (amount.elements, [other.elements for other in others]),
            (amount.bytes, [other.bytes for other in others]),
        )
    ]
    return Amount(elements=parts[0], bytes=parts[1])


def _most_of(amounts: Sequence[Amount]) -> tuple[Amount, ...]:
    """The amounts that are the largest at some number of rows: the upper hull of lines, for each element size.

    >>> few, many = Amount(bytes=Affine(9, 1)), Amount(bytes=Affine(1, 2))
    >>> _most_of([few, many, Amount(bytes=Affine(4, 1.5))]) == (few, many)
    True
    """
    found: dict[Amount, None] = {}
    for size in ELEMENT_BYTES:
        lines = [(one.total(0, size), one.total(1, size) - one.total(0, size), one) for one in amounts]
        best = max(lines, key=lambda line: (line[0] + line[1], line[1]), default=None)
        while best is not None:
            found[best[2]] = None
            fixed, slope = best[:2]
            steeper = [line for line in lines if line[1] > slope]
            best = min(steeper, key=lambda line: ((fixed - line[0]) / (line[1] - slope), -line[1]), default=None)
    return tuple(found)


class _Regions:
    """The kernels of an attention's core, those of experts, and under each rule those that run again: their operators,
    each with whether these are products."""

    def __init__(
        self,
        cores: frozenset[fx.Node],
        experts: frozenset[fx.Node],
        again: Mapping[Recompute, frozenset[tuple[fx.Node, bool]]],
    ) -> None:
        self.cores, self.experts, self.again = cores, experts, again

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
