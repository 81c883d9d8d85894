"""A model as a chain of layers, each lowered for one device of a tensor group, without allocating anything.

Every kind of layer is a stage of its own, on a mesh with one axis, and goes through the passes that any stage goes
through: what is costed and timed here is what runs. Knows no costs and no clusters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from whale.errors import InfeasibleError, UsageError
from whale.graph.capture import Batch, batch_leaves, capture
from whale.graph.captured import Captured, copy_of, mark_gradients
from whale.graph.chain import LayerChain, chain_of
from whale.graph.copies import model_copy
from whale.graph.identity import model_hash
from whale.graph.loss_copies import function_of_copy
from whale.graph.masks import recognize_masks
from whale.graph.ordering import settle_order
from whale.graph.origins import module_of
from whale.graph.values import Value, operands, resolve, value_shape, value_tensor
from whale.ir.placement import REPLICATE, REPLICATE_PARTIAL, Placement, shard
from whale.ir.profile import HeldShare
from whale.ir.strategy import REPLICAS, SHARDS, Along, Experts, ExpertsRole, RegionRole, ScopePath
from whale.ir.virtual_device import MeshAxis, VirtualDevice
from whale.runtime.local_program import LocalProgram
from whale.runtime.random import RNGPosition
from whale.strategies.analysis import Analysis, Choice, analyse
from whale.strategies.bridge_prices import Prices
from whale.strategies.cutting import cut_along
from whale.strategies.layout import Layout, Placements
from whale.strategies.lowering import PlacedStage, at_micro_batch, lower
from whale.strategies.placing import Report, StageProblem, batch_placeholders, layout_axes, place_stage, place_time
from whale.strategies.regions import is_within
from whale.strategies.ungroup import ungroup

__all__ = [
    "NOTHING_SPLIT",
    "NO_EXPERTS",
    "ExpertSplit",
    "LayeredModel",
    "at_rows",
    "converted",
    "default_dtype",
    "layered",
    "within",
]


class ExpertSplit(NamedTuple):
    """The modules of a layer whose experts alone are split, and how; none: the whole layer is split."""

    modules: tuple[str, ...] = ()
    way: Experts | None = None

    def __bool__(self) -> bool:
        return bool(self.modules)


NO_EXPERTS = ExpertSplit()

NOTHING_SPLIT = ExpertSplit((".",))
"""No module's path, in place of experts' paths: nothing is split, the devices are replicas that divide the rows."""

MEGATRON = Prices(reduce_scatter=1.0)
"""Prices under which sums stay all-reduces, which the cost model rewrites for sequence parallelism."""

MANY_ROWS = 16
"""Rows of a micro-batch for each device of a group for which it is found out what stages hand on: as many as make
messages matter."""

MOST_CUT = 0.5
"""Part of a model's operators that a cut along a dim of the batch divides, at least."""


@dataclass(kw_only=True)
class LayeredModel:
    """A captured model whose kinds of layers can be lowered at any tensor degree, for each of ``rows``; ``hash`` is the
    whole model's. Placements are those of ``like``, the same model for more rows, if it is set. ``traces`` keeps those
    of its layers."""

    hash: str
    chain: LayerChain
    analysis: Analysis
    rows: tuple[int, ...]
    time: Mapping[fx.Node, Choice]
    like: LayeredModel | None = None
    traces: dict[Hashable, Any] = field(default_factory=dict)
    _placed: dict[tuple[int, int, ExpertSplit, int], PlacedStage] = field(default_factory=dict)
    _between: dict[tuple[int, int, int], PlacedStage] = field(default_factory=dict)
    _forms: dict[tuple[int, int, int, Placement], PlacedStage] = field(default_factory=dict)

    @property
    def captured(self) -> Captured:
        """The graph, with one layer of each kind."""
        return self.chain.captured

    @property
    def coupled(self) -> str:
        """Reason why its batch cannot be divided into micro-batches, where these have statistics of their own rows:
        an operator that computes a row from others; empty if it can."""
        try:
            place_time(self.captured, self.analysis, self.chain.partition, 2)
        except UsageError as error:
            return str(error).removeprefix("micro_batches=2: ")
        return ""

    def place(self, kind: int, degree: int, experts: ExpertSplit = NO_EXPERTS, context: int = 1) -> PlacedStage:
        """A kind of layer with its operators split over *degree* devices; with *experts*, only those in their modules
        are split, and the others divide the rows. Each row is cut over *context* such groups along `cut_dim`.

        Raises:
            InfeasibleError: the layer cannot be split over that number of devices.
        """
        key = (kind, degree, experts, context)
        if key not in self._placed and self.like is not None:
            self._placed[key] = _translated(self.like.place(*key), self.like, self)
        elif key not in self._placed:
            graph = self.chain.partition.stages[kind]
            inside = (REPLICATE,) * (degree > 1)
            if context > 1:
                factor = self._cut_factor(context)
                placed = {v: (*p, *inside) for v in (*graph.received, *graph.sent) if (p := self._along(v, factor))}
                received = {v: placed[v] for v in graph.received if v in placed}
            else:
                placed = {v: p for v in (*graph.received, *graph.sent) if (p := self._along(v))}
                whole = (REPLICATE, *inside)
                received = {v: placed[v] if experts else whole for v in graph.received if v in placed}
            if experts == NOTHING_SPLIT:  # the layer that made it sums its gradient, once for all of its readers
                received |= {v: (REPLICATE, REPLICATE_PARTIAL) for v in graph.received if v not in placed}
            problem = replace(
                self._problem(kind, degree, experts, context),
                fixed=received | ({} if experts else self._shared(kind, degree, context)),
                sent="whole",
                leaving={v: placed[v] for v in graph.sent if (experts or context > 1) and v in placed},
            )
            self._placed[key] = self._solved(problem, Prices() if experts or degree == 1 else MEGATRON)
        return self._placed[key]

    @cached_property
    def cut_dim(self) -> int:
        """The dim of the batch along which most of the model's operators can be cut, such as the length of a sequence
        or the depth of a volume; 0 if those are few."""
        nodes = [node for node in self.captured.graph.nodes if node in self.analysis.choices]
        found: dict[int, int] = {}
        for node in batch_placeholders(self.captured):
            for dim, factors in enumerate(self.analysis.dims[node, 0][1:], start=1):
                for factor in self.analysis.factors.cuttable(factors)[:1]:
                    num = sum(
                        any(one.factor == factor and all(p.kind == "S" for p in one.outputs) for one in own)
                        for own in map(self.analysis.choices.__getitem__, nodes)
                    )
                    found[dim] = max(found.get(dim, 0), num)
        best = max(found, key=lambda dim: (found[dim], -dim), default=0)
        return best if best and found[best] >= MOST_CUT * len(nodes) else 0

    def _cut_factor(self, context: int) -> int:
        """The axis factor that *context* devices cut.

        Raises:
            InfeasibleError: it has fewer parts than there are devices.
        """
        if not self.cut_dim:
            raise InfeasibleError("no dim of the batch but its rows can be cut through most of the model's operators")
        role, node = Along(dim=self.cut_dim, region=""), next(iter(self.analysis.choices))
        scopes, mesh = self.chain.partition.scopes, _mesh(0, 1, context)
        factor = cut_along(self.captured, self.analysis, scopes, mesh, {node: (role,)})[node][0]
        assert factor is not None
        return factor

    def place_between(self, kind: int, degree: int, rows: int) -> PlacedStage:
        """A kind of layer split over *degree* devices as in the middle of a stage, with micro-batches of *rows* rows:
        what it receives and hands on has the form that costs least, the same one in a chain of such layers. Its layout
        is that of this model's micro-batches.

        Raises:
            InfeasibleError: the layer cannot be split over that number of devices.
        """
        key = (kind, degree, rows)
        if degree == 1:
            return self.place(kind, degree)
        if key not in self._between and self.like is not None:
            self._between[key] = _translated(self.like.place_between(*key), self.like, self)
        elif key not in self._between:
            stage = self._in_a_chain(kind, degree, rows)
            self._between[key] = replace(stage, layout=Layout(self.analysis, layout_axes(stage.mesh, self.rows)))
        return self._between[key]

    def _in_a_chain(self, kind: int, degree: int, rows: int) -> PlacedStage:
        """A layer whose values come in the form in which they leave, the one that costs least, so that it can follow
        itself; in any form where it cannot."""
        free = self._solved(self._inside(kind, degree, rows), Prices())
        if (through := self._through(kind)) is None:
            return free
        entering, leaving = through
        seen = dict.fromkeys((free.stored[entering][1], free.sent[leaving][1]))
        cuts = [p for p in seen if p.kind == "S" and self._fits(p, entering) and self._fits(p, leaving)]
        chains = [self._with_form(kind, degree, rows, form) for form in (REPLICATE_PARTIAL, *cuts)]
        return min(chains, key=lambda stage: stage.price)

    def _inside(self, kind: int, degree: int, rows: int) -> StageProblem:
        """A kind of layer as a stage, with micro-batches of *rows* rows and in any form."""
        problem = self._problem(kind, degree)
        return replace(problem, fixed=self._shared(kind, degree), rows=(rows,) * len(self.rows))

    def _through(self, kind: int) -> tuple[Value, Value] | None:
        """The values that come into a kind of layer and leave it, if there is one of each and they look alike."""
        graph = self.chain.partition.stages[kind]
        looks = {v: (value_shape(v), value_tensor(v).dtype) for v in (*graph.received, *graph.sent)}
        pairs = [(v, [r for r in graph.received if looks[r] == looks[v]]) for v in graph.sent]
        if len(pairs) != 1 or len(pairs[0][1]) != 1:
            return None
        return pairs[0][1][0], pairs[0][0]

    def _with_form(self, kind: int, degree: int, rows: int, form: Placement) -> PlacedStage:
        """A layer that receives and hands on a form, and nothing else."""
        key = (kind, degree, rows, form)
        through = self._through(kind)
        assert through is not None
        if key not in self._forms:
            problem, (entering, leaving) = self._inside(kind, degree, rows), through
            there = {**problem.leaving, leaving: (REPLICATE, form)}
            fixed = {**problem.fixed, entering: (REPLICATE, form)}
            self._forms[key] = self._solved(replace(problem, fixed=fixed, leaving=there), Prices())
        return self._forms[key]

    def _place_end(self, kind: int, degree: int, rows: int, end: Literal["first", "last"]) -> PlacedStage:
        """The same as the *first* or *last* of a stage: what comes in, or leaves, has the form that costs least."""
        stage, problem = self.place_between(kind, degree, rows), self._inside(kind, degree, rows)
        leaving: dict[Value, Placements] = {}
        fixed = dict(problem.fixed)
        if end == "first":
            leaving = {value: (REPLICATE, *placements[1:]) for value, placements in stage.sent.items()}
        else:
            fixed |= {value: (REPLICATE, *stage.stored[value][1:]) for value in stage.received}
        return self._solved(replace(problem, fixed=fixed, leaving=leaving), Prices())

    def _fits(self, cut: Placement, value: Value) -> bool:
        return cut.dim < len(value_shape(value)) and self.analysis.shardable(value, cut.factor, cut.dim)

    def held_shares(self, kind: int, degree: int) -> tuple[HeldShare, HeldShare]:
        """Return what parts each of *degree* devices has of what a kind of layer receives as the first of a stage, and
        of what it hands on as the last. Each is taken to change once between few rows and many."""
        if degree == 1:
            return HeldShare(), HeldShare()
        if self.like is not None:
            return self.like.held_shares(kind, degree)
        counts, shares = range(1, MANY_ROWS * degree + 1), cache(partial(self._shares_at, kind, degree))

        def held(end: int) -> HeldShare:
            few, many = shares(counts[0])[end], shares(counts[-1])[end]
            if few == many:
                return HeldShare(many=many, few=few)
            since = bisect_left(counts, True, key=lambda rows: shares(rows)[end] == many)
            return HeldShare(many=many, few=few, since=counts[since])

        return held(0), held(1)

    def _shares_at(self, kind: int, degree: int, rows: int) -> tuple[float, float]:
        """The parts of what a layer receives and hands on as the first and the last of a stage, with micro-batches of
        *rows* rows."""
        first = last = self._between_stages(kind, degree, rows)
        through = self._through(kind)
        if through is not None and first.sent[through[1]][-1].kind != "S":  # where it is divided inside, it is at ends
            first, last = self._place_end(kind, degree, rows, "first"), self._place_end(kind, degree, rows, "last")
        return _held({value: first.stored[value] for value in first.received}, degree), _held(last.sent, degree)

    def _between_stages(self, kind: int, degree: int, rows: int) -> PlacedStage:
        """`place_between`, or with its tied tables whole where it cannot follow itself: a stage that begins or ends
        with it lies apart from other readers of a table, such as the words of a head."""
        tied = self._tied(kind)
        if not tied or self._through(kind) is not None:
            return self.place_between(kind, degree, rows)
        problem = self._inside(kind, degree, rows)
        whole = dict.fromkeys(tied, (REPLICATE, REPLICATE_PARTIAL))
        return self._solved(replace(problem, fixed={**problem.fixed, **whole}), Prices())

    def cuts_rows(self, stage: PlacedStage) -> bool:
        """Whether the devices of a stage's group divide the rows of a micro-batch at some operator."""
        factor = self.analysis.batch_factor
        choices = (stage.choices[node][1] for node in stage.nodes)
        return any(p.kind == "S" and p.factor == factor for one in choices for p in (*one.inputs, *one.outputs))

    def _problem(self, kind: int, degree: int, experts: ExpertSplit = NO_EXPERTS, context: int = 1) -> StageProblem:
        """A kind of layer as a stage whose values may come and leave in any form."""
        graph = self.chain.partition.stages[kind]
        outputs: tuple[Any, ...] = self.captured.graph.output_node().args[0]  # type: ignore[assignment]
        mutated = zip(self.captured.mutated, map(resolve, outputs[1:]), strict=True)
        loss = resolve(outputs[0])
        cut: tuple[RegionRole, ...] = (Along(dim=self.cut_dim, region=""),) if context > 1 else ()
        return StageProblem(
            task_graph=graph,
            mesh=_mesh(kind, degree, context),
            roles={node: (*cut, *_roles(node, degree, experts)) for node in graph.nodes},
            rows=self.rows,
            time=self.time,
            loss=loss if self.chain.partition.stage_of[loss[0]] == kind else None,
            mutated={name: v for name, v in mutated if self.chain.partition.stage_of.get(v[0]) == kind},
        )

    def _solved(self, problem: StageProblem, prices: Prices) -> PlacedStage:
        return place_stage(self.captured, self.analysis, self.chain.partition, problem, prices=prices, report=Report())

    @cached_property
    def factors_of_like(self) -> dict[int, int]:
        """The axis factor of this model for each of ``like``'s: equal operators have equal choices, in order. A stage's
        own choices do not have them all: it stores tied parameters as a later stage does."""
        found: dict[int, int] = {}
        if self.like is None:
            return found
        for there, here in zip(self.like.captured.graph.nodes, self.captured.graph.nodes, strict=True):
            theirs, own = (model.analysis.choices.get(node, ()) for model, node in ((self.like, there), (self, here)))
            for one, other in zip(theirs, own, strict=True) if len(theirs) == len(own) else ():
                pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=False)
                found.update({a.factor: b.factor for a, b in pairs if a.kind == b.kind == "S"})
        return found

    def divides_rows(self, kind: int, degree: int) -> bool:
        """Whether the devices of a group divide the rows of a micro-batch at some operator of a kind of layer."""
        return degree > 1 and self.cuts_rows(self.place(kind, degree))

    def _along(self, value: Value, factor: int | None = None) -> Placements:
        """Placement of a value that the devices of a group cut along a factor, by default its rows; empty for others,
        such as relative positions, which need not be whole."""
        factor = self.analysis.batch_factor if factor is None else factor
        dims = range(len(value_shape(value)))
        return next(
            ((REPLICATE, shard(dim, factor)) for dim in dims if self.analysis.shardable(value, factor, dim)), ()
        )

    def _shared(self, kind: int, degree: int, context: int = 1) -> dict[Value, Placements]:
        """How later layers store the parameters that this one also reads."""
        readers = {value: max(kinds) for value, kinds in self._tied(kind).items() if max(kinds) > kind}
        return {v: self.place(last, degree, NO_EXPERTS, context).stored[v] for v, last in readers.items()}

    def _tied(self, kind: int) -> dict[Value, list[int]]:
        """The parameters of a kind of layer that others read too, with these."""
        found: dict[Value, list[int]] = {}
        for other, read in enumerate(self._parameters):
            for value in read & self._parameters[kind] if other != kind else ():
                found.setdefault(value, []).append(other)
        return found

    @cached_property
    def _parameters(self) -> list[set[Value]]:
        """The parameters that each kind of layer reads."""
        every = [{value for node in stage.nodes for value in operands(node)} for stage in self.chain.partition.stages]
        return [{value for value in read if value[0].name in self.captured.parameters} for read in every]

    def program(
        self,
        kind: int,
        degree: int,
        rows: int,
        experts: ExpertSplit = NO_EXPERTS,
        context: int = 1,
        *,
        clock: RNGPosition | None = None,
    ) -> LocalProgram:
        """The program of the first device of the group for a kind of layer, for one of ``rows``; *clock* as in
        `whale.strategies.lowering.lower`."""
        return self._lowered(self.place(kind, degree, experts, context), rows, clock)

    def program_between(
        self, kind: int, degree: int, rows: int, placed_for: int, *, clock: RNGPosition | None = None
    ) -> LocalProgram:
        """The same for a kind of layer in the middle of a stage, placed for micro-batches of other rows."""
        return self._lowered(self.place_between(kind, degree, placed_for), rows, clock)

    def _lowered(self, stage: PlacedStage, rows: int, clock: RNGPosition | None) -> LocalProgram:
        micro_batch = self.rows.index(rows)
        program = lower(self.captured, self.analysis, stage, 0, micro_batch, clock=clock)
        return at_micro_batch(program, stage, 0, micro_batch)


def _roles(node: fx.Node, degree: int, experts: ExpertSplit) -> tuple[RegionRole, ...]:
    """The role of an operator on the devices of a group."""
    if degree == 1:
        return ()
    if experts and not any(is_within(module_of(node), path) for path in experts.modules):
        return (REPLICAS,)
    return (SHARDS if experts.way is None else ExpertsRole(experts=experts.way),)


def _held(placed: Mapping[Value, Placements], degree: int) -> float:
    """The part of some values that each of *degree* devices has, on the last axis of a mesh."""
    sizes = {value: prod(value_shape(value)) for value in placed}
    every = sum(sizes.values())
    own = sum(size / degree if placed[value][-1].kind == "S" else size for value, size in sizes.items())
    return own / every if every else 1.0


def _mesh(kind: int, degree: int, context: int = 1) -> VirtualDevice:
    axes = (("context", context), (SHARDS, degree))
    return VirtualDevice(
        stage=kind,
        ranks=tuple(range(degree * context)),
        axes=tuple(MeshAxis(name=name, size=size) for name, size in axes if size > 1),
        speeds=(1.0,) * (degree * context),
        memory_bytes=(0,) * (degree * context),
    )


def _translated(stage: PlacedStage, source: LayeredModel, target: LayeredModel) -> PlacedStage:
    """A placement of one capture of a model, translated to another whose graph has the same operators."""
    graph = target.chain.partition.stages[stage.index]
    nodes = dict(zip(source.captured.graph.nodes, target.captured.graph.nodes, strict=True))
    factors = dict(target.factors_of_like)
    choices = {}
    for node in stage.nodes:
        options, own = source.analysis.choices[node], target.analysis.choices[nodes[node]]
        found = [own[options.index(choice)] if choice in options else choice for choice in stage.choices[node]]
        for there, here in zip(stage.choices[node], found, strict=True):
            pairs = zip((*there.inputs, *there.outputs), (*here.inputs, *here.outputs), strict=True)
            factors.update({a.factor: b.factor for a, b in pairs if a.kind == "S"})
        choices[nodes[node]] = tuple(found)

    def moved(placement: Placement) -> Placement:
        return placement._replace(factor=factors[placement.factor]) if placement.kind == "S" else placement

    def placed(values: Mapping[Value, Placements]) -> dict[Value, Placements]:
        return {(nodes[node], output): tuple(map(moved, placements)) for (node, output), placements in values.items()}

    return PlacedStage(
        index=stage.index,
        mesh=stage.mesh,
        layout=Layout(
            target.analysis,
            layout_axes(stage.mesh, target.rows),
            frozenset((axis, factors[factor]) for axis, factor in stage.layout.mirrored),
        ),
        nodes=graph.nodes,
        choices=choices,
        stored=placed(stage.stored),
        received=graph.received,
        sent=placed(stage.sent),
        loss=None if stage.loss is None else (nodes[stage.loss[0]], stage.loss[1]),
        loss_placements=stage.loss_placements,
        mutated={name: (nodes[node], output) for name, (node, output) in stage.mutated.items()},
    )


def layered(
    model: nn.Module,
    batch: Batch,
    rows: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    loss_fn: Callable[..., Any] | None = None,
    captured: Captured | None = None,
    precision: torch.dtype | None = None,
    scopes: Mapping[str, ScopePath] | None = None,
) -> dict[int, LayeredModel]:
    """The model as a chain of layers, for micro-batches of the given rows.

    If rows do not depend on each other, except in statistics of batch norms, the model is captured once, with all the
    rows together; otherwise once for each number of rows. *dtype* replaces the dtype of parameters and of floating
    batch entries, as ``model.to`` does. *captured* is a capture of the unmodified training model: if its batch has the
    rows, it replaces another capture. *precision* is the dtype of ``torch.autocast`` under which it computes, *scopes*
    are those of modules whose annotations were taken off.

    Raises the errors of the capture; see `whale.errors`.
    """
    try:
        if captured is not None and (held := _batch_rows(captured)) >= sum(rows):
            together = _chained(copy_of(captured), model, _filled(held, rows), scopes)
        else:
            blank = _blank(model, dtype)
            loss = loss_fn and function_of_copy(loss_fn, model, blank)
            together = _layered(blank, at_rows(batch, sum(rows)), tuple(rows), dtype, loss, precision, scopes)
        return dict.fromkeys(rows, together)
    except _Coupled:
        pass
    blank = _blank(model, dtype)
    loss = loss_fn and function_of_copy(loss_fn, model, blank)
    found: dict[int, LayeredModel] = {}
    for count in sorted(rows, reverse=True):
        found[count] = _layered(blank, at_rows(batch, count), (count,), dtype, loss, precision, scopes)
        found[count].like = next(iter(found.values())) if len(found) > 1 else None
    return {count: found[count] for count in rows}


def within(layers: LayeredModel, rows: Sequence[int]) -> dict[int, LayeredModel] | None:
    """The same layers for micro-batches of other rows, two of them at least, as far as the captured batch has enough;
    otherwise None. A whole batch is none of them: it is placed by itself, without micro-batches to cut operators along.
    """
    batch = _batch_rows(layers.captured)
    fewer = sorted((count for count in rows if count < batch), reverse=True)
    try:
        if sum(rows) <= batch:
            return dict.fromkeys(rows, _cut(layers, batch, rows))
        if max(rows) > batch or len(fewer) < 2:
            return None
        apart = {count: _cut(layers, batch, (count,)) for count in fewer}
    except _Coupled:
        return None
    for count in fewer[1:]:
        apart[count].like = apart[fewer[0]]
    return {count: apart[count] for count in reversed(fewer)}


class _Coupled(UsageError):
    """An operator computes a row from other rows."""


def _layered(
    model: nn.Module,
    batch: Batch,
    rows: tuple[int, ...],
    dtype: torch.dtype | None,
    loss_fn: Callable[..., Any] | None,
    precision: torch.dtype | None,
    scopes: Mapping[str, ScopePath] | None,
) -> LayeredModel:
    batch = converted(batch, dtype)
    with default_dtype(dtype):
        captured = capture(model, batch, loss_fn=loss_fn, precision=precision)
    recognize_masks(captured)
    if ungroup(captured.graph):
        mark_gradients(captured, model)
    settle_order(captured)
    return _chained(captured, model, rows, scopes)


def _batch_rows(captured: Captured) -> int:
    """Rows of the batch of a capture; none where nothing in it has rows."""
    batch = batch_placeholders(captured)
    return value_shape((batch[0], 0))[0] if batch else 0


def _filled(batch: int, rows: Sequence[int]) -> tuple[int, ...]:
    """Micro-batches with these rows, and smaller ones, that make up a whole batch."""
    full, rest = divmod(batch - sum(rows), max(rows))
    return (*rows, *(max(rows),) * full, *((rest,) if rest else ()))


def _cut(layers: LayeredModel, batch: int, rows: Sequence[int]) -> LayeredModel:
    """The layers with a batch that is divided into these rows and smaller ones."""
    filled = _filled(batch, rows)
    time = _time(layers.chain, layers.analysis, len(filled))
    return replace(layers, rows=filled, time=time, like=None, _placed={}, _between={})


def _chained(
    captured: Captured, model: nn.Module, rows: tuple[int, ...], scopes: Mapping[str, ScopePath] | None
) -> LayeredModel:
    """The layers of a capture, whose graph is consumed."""
    identity = model_hash(captured)
    chain = chain_of(captured, model, scopes)
    analysis = analyse(captured.graph, batch_placeholders(captured))
    time = _time(chain, analysis, len(rows))
    return LayeredModel(hash=identity, chain=chain, analysis=analysis, rows=rows, time=time)


def _time(chain: LayerChain, analysis: Analysis, micro_batches: int) -> Mapping[fx.Node, Choice]:
    """Division of every operator into a number of micro-batches."""
    try:
        return place_time(chain.captured, analysis, chain.partition, micro_batches, apart=True)
    except UsageError as error:
        raise _Coupled(str(error)) from error


def at_rows(batch: Batch, rows: int) -> Batch:
    """A batch of this kind with the given rows, on the meta device."""
    leaves = batch_leaves(batch)
    first = next((x for x in leaves.values() if isinstance(x, Tensor) and x.dim()), None)

    def resized(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        cut = first is not None and x.dim() and x.shape[0] == first.shape[0]
        return torch.empty((rows, *x.shape[1:]) if cut else x.shape, dtype=x.dtype, device="meta")

    return _like(batch, [resized(x) for x in leaves.values()])


def converted(batch: Batch, dtype: torch.dtype | None) -> Batch:
    """The batch with its floating entries in another dtype."""

    def convert(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and dtype is not None else x

    return _like(batch, [convert(x) for x in batch_leaves(batch).values()])


def _like(batch: Batch, leaves: Sequence[Any]) -> Batch:
    if isinstance(batch, Mapping):
        return dict(zip(batch, leaves, strict=True))
    return tuple(leaves) if isinstance(batch, tuple | list) else leaves[0]


def _blank(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the model on the meta device, in training mode and another dtype; tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) in memo:
            continue
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        blank: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="meta")
        if isinstance(tensor, nn.Parameter):
            blank = nn.Parameter(blank, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = blank
    return model_copy(model, memo).train()


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Context in which tensors that are created without a dtype have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
