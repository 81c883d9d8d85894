"""Profiling of a model's graph: a chain of layers with compute, saved activations and communication, by tensor degree.

Nothing is allocated. The model is captured and divided into layers, and each kind of layer is traced at the degrees
that are asked for (`whale.strategies.kind_costs`). If the devices of a group divide rows, these are multiples of the
degree, because uneven shards run other kernels. This module knows no prices, no clusters and no plans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from whale.errors import CaptureError, InfeasibleError, UsageError
from whale.graph.capture import Batch, batch_leaves
from whale.graph.captured import Captured
from whale.graph.chain import Layer
from whale.graph.precision import LOW_PRECISIONS
from whale.graph.values import Value
from whale.ir.profile import Affine, Amount, LayerKind, LayerVariant, ModelProfile, Skip
from whale.ir.strategy import RECOMPUTES, ScopePath
from whale.strategies.host_tables import tables_of
from whale.strategies.kind_costs import MOST_PLACED, ROWS, Collectives, KindCosts, NoLaw
from whale.strategies.layers import ExpertSplit, LayeredModel, default_dtype, layered, within
from whale.strategies.regions import expert_modules

__all__ = ["KnownLayers", "profile_model"]

LEAST_ROWS = 2
"""Number of these that define a law. The others check it, if the batch has them."""

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
    most_rows: int = MOST_PLACED,
    known: KnownLayers | None = None,
    scopes: Mapping[str, ScopePath] | None = None,
    check: Callable[[], None] = lambda: None,
) -> ModelProfile:
    """Profile *model*, trained on batches like *batch* (of which only shapes matter, and not the number of rows).

    A tensor degree over which the model cannot be split, or at which its costs follow no law, is left out; ``refused``
    of the profile says why. Where a layer has experts, they alone are split at *expert_degrees*, if that is possible.
    Each row is cut along a dim of the batch, such as the length of its sequence, at *context_degrees*, at each of the
    tensor degrees or those of *cut_tensor_degrees*; ``uncut`` of the profile says where it is not.
    With *captured*, a capture of the training model as it is, the profile is of a run in the model's own number type.
    With a *precision*, ``bf16`` or ``fp16``, it is of a run under ``torch.autocast``, as *captured* then is.
    With *rules* it has what each rule of recompute keeps and computes again, in micro-batches of up to *most_rows*
    rows; layers then take about twice as long.
    *known* has the layers that an earlier profile of the same model and batch captured, and gets those of this one.
    *scopes* are those of modules whose annotations were taken off: layers begin where these do.
    *check* is called before each measurement, and ends all by what it raises.

    Raises:
        CaptureError, UsageError: the model cannot be captured, or is none that training could split into rows.
    """
    capturing = _Capturing(model, batch, loss_fn, captured, precision, {} if known is None else known, scopes)
    models = capturing.at_rows(ROWS)
    first = models[ROWS[0]]
    degrees = sorted({1, *tensor_degrees})

    @cache
    def multiples() -> Mapping[int, Mapping[int, LayeredModel]]:
        return _in_multiples(capturing, [degree for degree in degrees if degree > 1], first)

    costs = [
        KindCosts(
            models, kind, rules=rules, most_rows=most_rows, multiples=lambda degree: multiples()[degree], check=check
        )
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
            except NoLaw as error:
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
            given = more if modules else {}
            costs_at = {way: KindCosts(own, position, rules=rules, check=check) for way, own in given.items()}
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
        coupled=first.coupled,
        since=tuple(layer.since for layer in layers) if any(layer.since for layer in layers) else (),
    )


def _add_cut(
    kinds: list[LayerKind],
    costs: Sequence[KindCosts],
    contexts: Sequence[int],
    degrees: Sequence[int],
    sent: Sequence[bool],
    between: Sequence[Collectives],
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
            except (InfeasibleError, NoLaw) as error:
                if degree == 1:
                    refused[context] = str(error)
                continue
            for position, variant in enumerate(found):
                more = (*kinds[position].context_variants, variant)
                kinds[position] = kinds[position].model_copy(update={"context_variants": more})
    return refused


def _between_replicas(models: Mapping[int, LayeredModel], kind: int) -> Collectives:
    """The collectives of a layer whose devices only divide the rows, such as a batch norm's statistics; none where that
    is impossible or they follow no law."""
    two = {rows: models[rows] for rows in ROWS if not rows % 2}  # as many on both replicas
    costs = KindCosts(two, kind, [rows // 2 for rows in two])
    with suppress(InfeasibleError, UsageError), default_dtype(costs.dtype):
        return costs.between_replicas()
    return (), ()


def _with(variant: LayerVariant, between: Collectives) -> LayerVariant:
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
    costs: Sequence[KindCosts],
    degrees: Sequence[int],
    in_multiples: Callable[[Sequence[int]], Mapping[int, Mapping[int, LayeredModel]]],
) -> dict[int, str]:
    """Trace every kind of layer at the degrees; return the impossible degrees, with reasons.

    A kind whose rows a group divides is traced in multiples of the degree.
    """
    refused: dict[int, str] = {}
    divided: dict[int, list[KindCosts]] = {}
    for degree in degrees:
        try:
            divided[degree] = [kind for kind in costs if not kind.measure(degree)]
        except InfeasibleError as error:
            refused[degree] = str(error)
    wanted = [degree for degree, kinds in divided.items() if kinds and degree not in refused]
    for degree, models in in_multiples(wanted).items() if wanted else ():
        for kind in divided[degree]:
            kind.divided[degree] = KindCosts(
                models, kind.kind, list(models), rules=kind.rules, most_rows=kind.most_rows, check=kind.check
            )
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
    scopes: Mapping[str, ScopePath] | None

    def at_rows(self, rows: Sequence[int]) -> Mapping[int, LayeredModel]:
        """The model for these rows, captured once."""
        key = tuple(rows)
        if key not in self.known:
            self.known[key] = self._captured_at(rows)
        return self.known[key]

    def _captured_at(self, rows: Sequence[int]) -> Mapping[int, LayeredModel]:
        """The model with the stand-in for its number type; as it is where it cannot be converted, is captured, or
        computes under ``torch.autocast``."""
        how: dict[str, Any] = {"loss_fn": self.loss_fn, "scopes": self.scopes}
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
    costs_at: Mapping[int, KindCosts], modules: tuple[str, ...], *, sent: bool
) -> Iterator[LayerVariant]:
    """A kind of layer at the expert degrees that are possible, in each way to share experts that it has."""
    for degree, costs in costs_at.items():
        for way in costs.ways_of_experts if modules else (None,):
            split = ExpertSplit(modules, way)
            with suppress(InfeasibleError, NoLaw):
                costs.measure(degree, split)
                yield costs.variant(degree, split, sent=sent)


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
    """Layers that share parameters, and the number of shared parameters: of dense ones, as gradients of the rows of a
    table are no sum of its size; each of its layers counts it."""
    readers: dict[str, list[int]] = {}
    sparse = tables_of(layered.captured, [(node, 0) for node in layered.captured.graph.nodes])
    for position, layer in enumerate(layered.chain.layers):
        for name in layer.parameters:
            if name not in sparse:
                readers.setdefault(name, []).append(position)
    shared: dict[tuple[int, ...], int] = {}
    for name, layers in readers.items():
        if len(layers) > 1:
            shared[tuple(layers)] = shared.get(tuple(layers), 0) + model.get_parameter(name).numel()
    return tuple(shared.items())


def _skips(costs: Sequence[KindCosts], layered: LayeredModel) -> tuple[Skip, ...]:
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


def _sum(costs: Sequence[KindCosts], layered: LayeredModel, crossing: Sequence[Value]) -> Amount:
    """The size of the values that cross a cut of the chain."""
    amounts = [costs[layered.chain.partition.stage_of[value[0]]].sent(value) for value in crossing]
    return Amount(
        elements=Affine(sum(a.elements.fixed for a in amounts), sum(a.elements.per_row for a in amounts)),
        bytes=Affine(sum(a.bytes.fixed for a in amounts), sum(a.bytes.per_row for a in amounts)),
    )
