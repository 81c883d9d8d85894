"""Planning: from an annotated model and mixed devices to a balanced plan with ranks and shares of every stage.

The annotations decide stages, degrees and regions; planning decides the rest by the layer times of each device. Stages
of equal size may be swapped; `whale.planner.balance.mesh_shares` computes shares along every axis of a mesh. The plan
is compiled as it will be run, predicted, and compared with even shares, which are used if they are no slower. For an
unmodified model, `whale.planner.balance.by_speed` first partitions the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from math import ceil
from typing import Any

from torch import nn

from whale.annotations import Annotation, annotate, module_scopes
from whale.commands.least_offload import offload_that_fits
from whale.commands.plan_writer import shortage_of
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_traced
from whale.compile.options import Options, offloads_told, states_of
from whale.compile.trace import Traced, trace
from whale.errors import InfeasibleError, UsageError, WhaleError
from whale.ir.micro_batches import rows_of_micro_batch
from whale.ir.plan import ClusterIdentity, ModelIdentity, Plan, PlanAxis, PlanStage, PlanState
from whale.ir.profile import ModelProfile
from whale.ir.state import LEVELS, StateSharding
from whale.ir.strategy import OFFLOADS, RECOMPUTES, Offload, Recompute, parse_strategy
from whale.ir.units import bytes_text
from whale.ir.workload import DeviceMemory
from whale.planner.advice import advised
from whale.planner.assignment.from_plan import axis_role
from whale.planner.balance.by_speed import Pipeline
from whale.planner.balance.least_recompute import least_recompute, least_steps
from whale.planner.balance.mesh_shares import AxisToShare, MeshDevice, MeshShares, mesh_shares
from whale.planner.cost.hosts import has_hosts
from whale.planner.cost.memory import refuse_tiny
from whale.planner.cost.state_shares import fitting_states
from whale.predict.costs import Costs
from whale.predict.layer_parts import Part, StageLayers, stage_layers
from whale.predict.peak_memory import PeakMemory, brief_peak_memory, peak_memory
from whale.predict.prediction import Predicted, predict, predicted_memory
from whale.runtime.warn import warn
from whale.strategies.lowering import PlacedStage

__all__ = ["Planned", "even_stages", "make_plan", "shares_by_speed", "stage_annotations"]

MAX_ORDERS = 720
"""Limit on the orders of stages' devices: all orders of six distinct groups."""


MOST_TRIED = 4096
"""Limit on the number of micro-batches that is tried where a plan does not fit."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with the reasons for its decisions.

    Attributes:
        plan: with its prediction and workload.
        predicted: the same, with the timeline.
        even: the prediction with even shares and the first order of devices; None if they do not fit.
        reasons: the decisions, in sentences.
    """

    plan: Plan
    predicted: Predicted
    even: Predicted | None
    reasons: tuple[str, ...]


def first_that_fits(ways: Iterable[Callable[[], Pipeline]], made: Callable[[Pipeline, bool], Planned]) -> Planned:
    """The plan *made* of the first pipeline with which it fits.

    Args:
        ways: to cut a model into stages; those that leave more memory last.
        made: gives the plan of a cut; where none fits, says what would help if it is asked to.

    Raises:
        InfeasibleError: none fits; that of the last plan, or where none was made, of the cut that lacks least.
    """
    problem: InfeasibleError | None = None
    tried: list[Pipeline] = []
    for way in ways:
        try:
            pipeline = way()
        except InfeasibleError as error:
            if problem is None or error.lacking_bytes <= problem.lacking_bytes:
                problem = error
            continue
        if pipeline in tried:
            continue
        tried.append(pipeline)
        with suppress(InfeasibleError):
            return made(pipeline, False)
    if tried:
        return made(tried[-1], True)
    assert problem is not None
    raise problem


def stage_annotations(profile: ModelProfile, cuts: Sequence[range]) -> dict[str, tuple[str, ...]]:
    """Annotations that divide an unmodified model into stages of these layers.

    Raises:
        UsageError: a stage begins with a layer that has no module.
    """
    found: dict[str, tuple[str, ...]] = {}
    for layers in cuts:
        path = profile.paths[layers[0]] if profile.paths else ""
        if not path:
            raise UsageError(
                f"layer {layers[0]} of {profile.name} has no module to annotate; annotate the model instead"
            )
        found[path] = ("stage()",)
    return found


def make_plan(
    model: nn.Module,
    batch: Any,
    costs: Costs,
    options: Options,
    *,
    rows: int,
    name: str,
    annotations: Mapping[str, Sequence[str]] | None = None,
    stages: Sequence[PlanStage] = (),
    least: bool = False,
    least_state: StateSharding | None = None,
    auto_shares: bool = False,
    least_offload: bool = False,
    advises: bool = True,
    traced: Traced | None = None,
) -> Planned:
    """The fastest plan for a model on the cluster of *costs* that fits.

    Args:
        model: on the meta device; its annotations, or *annotations*, are constraints.
        batch: an example of the global batch.
        costs: the model's layers and the cluster's links, and the optimizer whose states must fit.
        options: micro-batches, schedule, precision, what backwards compute again, and how replicas divide state.
        rows: of the batch.
        name: of the model, for the plan.
        annotations: of an unmodified model, as a plan has them.
        stages: their ranks, which equal stages may swap, and axes; empty: as the annotations take them.
        least: whether stages whose devices lack memory compute again what they need to fit.
        least_state: in which way, whatever its level, replicas divide as much of their state as they need to fit; None:
            as the options say.
        auto_shares: whether ranks own of it what their memory leaves, where equal shares do not fit.
        least_offload: whether stages whose devices lack memory with all of that have on the host what they need to fit.
        advises: whether the error says what would help, if nothing fits, for which more plans are compiled.
        traced: the model's trace without *annotations*, on processors and for training with these options, if known.

    Raises:
        InfeasibleError: no plan fits, or the annotations do not fit the devices.
    """
    if annotations:
        annotate(
            model, {key: [Annotation(strategy=parse_strategy(t)) for t in texts] for key, texts in annotations.items()}
        )

    if traced is None or (annotations and traced.annotated.scopes.of):  # those that its forward enters count too
        traced = trace(model, batch, device="cpu", training=True, promote=options.promote, precision=options.precision)
    elif annotations:
        traced = replace(traced, annotated=traced.stages(module_scopes(model)))
    counted = options
    rows_of_micro_batch(rows, options.micro_batches)
    if stages or rows % options.micro_batches:
        decided = Plan(
            world_size=len(costs.cluster.devices),
            batch=rows,
            micro_batches=options.micro_batches,
            schedule=options.schedule,
            stages=tuple(stages),
        )
        counted = replace(options, plan=decided)
    first = compile_traced(traced, costs.cluster, counted, device="cpu")
    for text in first.warnings:
        warn(text)
    identity = traced.hash
    if costs.profile.model_hash not in ("", identity):
        raise UsageError(
            f"the profile is of {costs.profile.name} with hash {costs.profile.model_hash[:19]}..., but {name} has "
            f"{identity[:19]}...: its code, or sizes such as widths, differ; profile this model"
        )
    start = Plan(
        model=ModelIdentity(name=name, hash=identity),
        cluster=ClusterIdentity.of(costs.cluster),
        world_size=len(costs.cluster.devices),
        batch=rows,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        precision=options.precision,  # type: ignore[arg-type]
        gradient_dtype=options.gradient_dtype,  # type: ignore[arg-type]
        step_in_backward=options.step_in_backward or None,
        staleness=options.staleness or None,
        annotations={key: tuple(texts) for key, texts in (annotations or {}).items()},
    )
    start = even_stages(start, first)

    def compiled(plan: Plan) -> Compilation:
        chosen = replace(options, plan=plan, micro_batches=plan.micro_batches)
        return compile_traced(traced, costs.cluster, chosen, device=costs.device)

    def predicted(plan: Plan, memory_of: Callable[..., PeakMemory] = peak_memory) -> Predicted:
        found, own = compiled(plan), replace(costs, micro_batches=plan.micro_batches)
        return predict(found, own, schedule=options.schedule, memory_of=memory_of)

    def fits(plan: Plan) -> bool:
        return predicted(plan, brief_peak_memory).prediction.fits

    def settled(plan: Plan) -> tuple[Plan, Predicted]:
        """A plan predicted, with shares of its state that fit if equal ones do not."""
        found = predicted(plan)
        if auto_shares and not found.prediction.fits:
            other = _with_state(plan, found.prediction.memory)
            again = predicted(other) if other != plan else found
            if again.prediction.fits:
                return other, again
        return plan, found

    options_of: Any = {"schedule": options.schedule, "optimizer": costs.optimizer, "device": costs.device}

    def memory_of(plan: Plan) -> tuple[DeviceMemory, ...]:
        memory = predicted_memory(compiled(plan), costs.cluster, **options_of)
        other = _with_state(plan, memory) if auto_shares and not _fit(memory) else plan
        return memory if other == plan else predicted_memory(compiled(other), costs.cluster, **options_of)

    def holds(plan: Plan) -> bool:
        """Whether devices hold a plan, counted in full; the profile may not say how long it takes."""
        return _fit(predicted_memory(compiled(plan), costs.cluster, **options_of, memory_of=peak_memory))

    refuse_tiny((costs.cluster.devices[rank] for stage in first.stages for rank in stage.mesh.ranks), start.world_size)
    start, even = settled(start)
    unordered = [stage.ranks for stage in start.stages]
    unordered = sorted(unordered) if stages else unordered
    try:
        return _balanced(first, costs, start, even, settled, unordered)
    except InfeasibleError as error:
        problem = error
    graphs = first.partition.stages
    asked = [graph.cut.stage.strategy.recompute if graph.cut.stage else None for graph in graphs]
    told = [own.level if own is not None else None for own in states_of(first.partition, replace(options, state=None))]
    on_host = offloads_told(first.partition, None)
    ranks = [stage.ranks for stage in start.stages]

    def with_rules(plan: Plan) -> Plan:
        return _under(plan, least_recompute(ranks, lambda rules: memory_of(_under(plan, rules)), given=asked))

    def with_levels(plan: Plan) -> Plan:
        way = least_state or StateSharding(1)
        levels = least_steps(ranks, LEVELS, lambda levels: memory_of(_divided(plan, levels, way)), given=told)
        return _divided(plan, levels, way)

    def raised(plan: Plan) -> Plan:
        """The plan with the next level of each stage whose level is open."""
        now = [_level(stage) for stage in plan.stages]
        levels = [min(own + 1, LEVELS[-1]) if level is None else level for own, level in zip(now, told, strict=True)]
        return _divided(plan, levels, least_state or StateSharding(1)) if may_divide else plan

    def with_hosts(plan: Plan) -> Plan:
        words = offload_that_fits(first, lambda words: memory_of(_hosted(plan, words)), given=on_host)
        return _hosted(plan, words)

    def most_of_all() -> Plan:
        """The plan whose stages keep least and divide most, as far as that is open."""
        plan = _under(start, [rule or RECOMPUTES[-1] for rule in asked]) if least else start
        way = [LEVELS[-1] if level is None else level for level in told]
        return _divided(plan, way, least_state) if least_state is not None and may_divide else plan

    def tried(ways: Sequence[Callable[[], Plan]]) -> list[Plan]:
        """The plans of some changes that fit."""
        plans = [one for way in ways if (one := way()) != start]
        return [one for one in plans if _fit(memory_of(one))]

    has_rows = any(spec.rows for spec in first.reduces)  # which are no part of a state that is divided
    least_state = None if has_rows else least_state
    may_divide = not has_rows and any(len(spec.ranks) > 1 for spec in first.reduces)
    ways = [
        *([partial(with_rules, start)] if least else []),
        *([partial(with_levels, start)] if least_state is not None else []),
    ]
    plans = tried(ways)
    if not plans and least and least_state is not None:
        most = _under(start, [rule or RECOMPUTES[-1] for rule in asked])
        plans = tried([lambda: with_rules(with_levels(most))])
    if not plans and least_offload:
        plans = tried([partial(with_hosts, start)]) or tried([lambda: with_hosts(most_of_all())])
    found: list[Planned] = []
    for plan in plans:  # which grows
        plan, even = settled(plan)
        rules, levels = [one.recompute or "none" for one in plan.stages], [_level(one) for one in plan.stages]
        words = [one.offload or "none" for one in plan.stages]
        made = replace(
            counted,
            recompute=tuple(rules),
            state=tuple(_sharding(one) for one in plan.stages),
            offload=tuple(words),
        )
        first = compile_traced(traced, costs.cluster, made, device="cpu")
        try:
            one = _balanced(first, costs, plan, even, settled, unordered)
        except InfeasibleError as error:
            problem = error
            if least_state is not None and (harder := raised(plan)) != plan:  # peaks are brief above
                plans.append(harder)
            continue
        why = (
            *_why_least("recompute", RECOMPUTES, rules),
            *_why_least("zero", LEVELS, levels),
            *_why_least("offload", OFFLOADS, words),
        )
        found.append(replace(one, reasons=(*why, *one.reasons)))
    if found:
        return min(found, key=lambda one: one.predicted.prediction.step_seconds)
    if not advises:
        raise problem
    cures: list[str] = []
    lacking = not _fit(even.prediction.memory)  # else hosts do, and the least of these is what the plan has
    if lacking and not least:
        ruled = [plan for plan in tried([partial(with_rules, start)]) if _most(plan) != _most(start)]
        cures += [f"--recompute {_most(plan)}" for plan in ruled if holds(plan)]
    if lacking and least_state is None and may_divide:
        divided = [plan for plan in tried([partial(with_levels, start)]) if _most_level(plan) > _most_level(start)]
        cures += [f"--zero {_most_level(plan)}" for plan in divided if holds(plan)]
    if not least_offload and not cures and has_hosts(costs.cluster):
        hosted = tried([partial(with_hosts, start)])
        cures += [f"--offload {_most_offload(plan)}" for plan in hosted if settled(plan)[1].prediction.fits]
    more = _enough_micro_batches(start, even, fits)
    raise InfeasibleError(_or_with(str(problem), [*([] if more is None else [f"--micro-batches {more}"]), *cures]))


def even_stages(plan: Plan, compilation: Compilation) -> Plan:
    """A plan with the stages of its compiled annotations, in equal shares."""
    return plan.model_copy(update={"stages": tuple(_even(compilation, stage) for stage in compilation.stages)})


def shares_by_speed(compilation: Compilation, costs: Costs, even: Predicted, start: Plan) -> Plan:
    """The plan with the order of devices and the shares with the least time of the slowest stage.

    Raises:
        InfeasibleError: none fits.
    """
    return _Problem(compilation, costs, even, start).solve()[0]


def _fit(memory: Sequence[DeviceMemory]) -> bool:
    return all(held.total <= held.capacity for held in memory)


def _most(plan: Plan) -> Recompute:
    """The rule of a plan's stages that keeps least."""
    return max((stage.recompute or "none" for stage in plan.stages), key=RECOMPUTES.index)


def _level(stage: PlanStage) -> int:
    return stage.state.level if stage.state is not None else 0


def _most_level(plan: Plan) -> int:
    """The level of a plan's stages that divides most."""
    return max(map(_level, plan.stages))


def _sharding(stage: PlanStage) -> StateSharding | None:
    return None if stage.state is None else stage.state.sharding


def _under(plan: Plan, rules: Sequence[Recompute]) -> Plan:
    """The plan with a rule for each stage."""
    stages = zip(plan.stages, rules, strict=True)
    return plan.model_copy(
        update={"stages": tuple(stage.model_copy(update={"recompute": rule}) for stage, rule in stages)}
    )


def _most_offload(plan: Plan) -> Offload:
    """The word of a plan's stages by which most is on the host."""
    return max((stage.offload or "none" for stage in plan.stages), key=OFFLOADS.index)


def _hosted(plan: Plan, words: Sequence[Offload]) -> Plan:
    """The plan with what is on the host for each stage."""
    stages = zip(plan.stages, words, strict=True)
    return plan.model_copy(
        update={"stages": tuple(stage.model_copy(update={"offload": word}) for stage, word in stages)}
    )


def _divided(plan: Plan, levels: Sequence[int], way: StateSharding) -> Plan:
    """The plan with a level for each stage, which divides its state in some way."""
    stages = []
    for stage, level in zip(plan.stages, levels, strict=True):
        of_stage = replace(way, level=level).of_stage(stage.ranks, plan.world_size) if level else None
        state = None if of_stage is None else PlanState.of(of_stage)
        if _level(stage) == level:
            state = stage.state
        stages.append(stage.model_copy(update={"state": state}))
    return plan.model_copy(update={"stages": tuple(stages)})


def _with_state(plan: Plan, memory: Sequence[DeviceMemory]) -> Plan:
    """The plan with shares of state that fit best, by what devices hold with those that it has."""
    states = fitting_states(
        [stage.ranks for stage in plan.stages],
        [_sharding(stage) for stage in plan.stages],
        memory,
        micro_batches=plan.micro_batches,
    )
    stages = [
        stage if state is None or not state.level else stage.model_copy(update={"state": PlanState.of(state)})
        for stage, state in zip(plan.stages, states, strict=True)
    ]
    return plan.model_copy(update={"stages": tuple(stages)})


def _why_least(name: str, ladder: Sequence[Any], chosen: Sequence[Any]) -> Iterator[str]:
    """Why stages have more than the first of a ladder of changes that save memory, in sentences."""
    for each in ladder[1:]:
        stages = [str(index) for index, own in enumerate(chosen) if own == each]
        if stages:
            which = "stage" if len(stages) == 1 else "stages"
            yield f"{name} {each!r} in {which} {', '.join(stages)}: with less of it their devices lack memory"


def _balanced(
    first: Compilation,
    costs: Costs,
    start: Plan,
    even: Predicted,
    settled: Callable[[Plan], tuple[Plan, Predicted]],
    unordered: Sequence[tuple[int, ...]],
) -> Planned:
    """The plan with the stages of *start* and the fastest shares.

    Args:
        first, costs: of the annotations.
        start: with equal shares.
        even: its prediction.
        settled: a plan predicted, with shares of its state that fit.
        unordered: the ranks of stages that take them as they come.

    Raises:
        InfeasibleError: none fits.
    """
    alike = len({device.type.name for device in costs.cluster.devices}) == 1
    if alike and even.prediction.fits:
        return Planned(
            plan=start.with_prediction(even.prediction, even.workload),
            predicted=even,
            even=even,
            reasons=(*_why_ordered(start, unordered), "all devices are alike: shares are equal"),
        )
    best, reasons = _Problem(first, costs, even, start).solve()
    best, found = (start, even) if best == start else settled(best)
    keep_even = even.prediction.fits and (
        not found.prediction.fits or even.prediction.step_seconds <= found.prediction.step_seconds
    )
    if keep_even:
        best, found, reasons = start, even, ("equal shares are predicted to be no slower than shares by speed",)
    _check_fits(found, tables=any(stage.offload == "tables" for stage in best.stages))
    return Planned(
        plan=best.with_prediction(found.prediction, found.workload),
        predicted=found,
        even=even if even.prediction.fits else None,
        reasons=(*_why_ordered(best, unordered), *reasons),
    )


def _why_ordered(plan: Plan, unordered: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Why stages have other ranks than they would as these come, in a sentence."""
    ranks = [stage.ranks for stage in plan.stages]
    if ranks != list(unordered):
        text = "; ".join(f"stage {index} on ranks {_shown(own)}" for index, own in enumerate(ranks))
        yield f"stages take devices by what they have to do: {text}"


def _even(compilation: Compilation, stage: PlacedStage) -> PlanStage:
    roles = compilation.assignment.stages[stage.index].roles
    ruled = any(one.recompute != "none" for one in compilation.stages)
    return PlanStage(
        recompute=stage.recompute if ruled else None,
        state=None if stage.state is None else PlanState.of(stage.state),
        reduce=stage.reduce if stage.reduce != "mean" else None,
        distinct=stage.distinct,
        offload=stage.offload if any(one.offload != "none" for one in compilation.stages) else None,
        ranks=stage.mesh.ranks,
        axes=tuple(
            PlanAxis(name=axis.name, size=axis.size, role=axis_role(roles, position))
            for position, axis in enumerate(stage.mesh.axes)
        ),
    )


def _check_fits(found: Predicted, *, tables: bool) -> None:
    """Refuse a plan that does not fit, with what takes the memory, and the changes that reduce it the most; *tables*:
    where hosts have these."""
    lacking = [device for device in found.prediction.memory if device.total > device.capacity]
    if not lacking:
        if short := shortage_of(found.prediction):
            parts = "give ranks parts of the tables, of which replicas have a copy each (whale.split, "
            parts = f"{parts}whale.place_tables, whale search), " if tables else ""
            cure = f"{parts}use hosts with more memory (host_memory in the cluster file), or more of them"
            raise InfeasibleError(advised(f"the plan {short}", (), otherwise=cure))
        return
    worst = max(lacking, key=lambda device: device.total - device.capacity)
    others = f" ({len(lacking)} of {len(found.prediction.memory)} devices lack memory)" if len(lacking) > 1 else ""
    state = worst.parameters + worst.gradients + worst.optimizer
    raise InfeasibleError(
        advised(
            f"{worst.device} (rank {worst.rank}) needs {bytes_text(worst.total)} but has {bytes_text(worst.capacity)}"
            f"{others}: {bytes_text(_of_rows(worst))} are activations, {bytes_text(state)} parameters, gradients "
            "and optimizer state",
            (),
            otherwise="use more stages, split, or devices with more memory",
        )
    )


def _of_rows(held: DeviceMemory) -> int:
    """Bytes that grow with the rows: activations, and of the buffers all but those of gradients."""
    return held.activations + held.workspace + max(0, held.buffers - held.parameters)


def _enough_micro_batches(start: Plan, even: Predicted, fits: Callable[[Plan], bool]) -> int | None:
    """A number of micro-batches with which the even plan fits, if there is one; tried, as two of them may be."""
    needed = 1.0
    for held in even.prediction.memory:
        of_rows = _of_rows(held)
        free = held.capacity - (held.total - of_rows) - (held.parameters if start.micro_batches == 1 else 0)
        if free <= 0:
            return None
        needed = max(needed, of_rows / free)
    batch = start.batch or 1
    for spare in (1.05, 2.5):  # a pipeline has more of them in flight
        count = ceil(start.micro_batches * needed * spare)
        if count > min(batch, MOST_TRIED):
            return None
        count = -(-batch // (batch // count))  # of as many rows, the last one of fewer
        try:
            if fits(start.model_copy(update={"micro_batches": count})):
                return count
        except WhaleError:
            return None  # a batch that cannot be cut, or a schedule of another number
    return None


def _or_with(problem: str, changes: Sequence[str]) -> str:
    """The message, with these changes first among those that would do."""
    if not changes:
        return problem
    change = f"It would fit with {', or with '.join(changes)}"
    said, would, others = problem.partition("It would fit with ")
    return f"{said}{change}, or with {others}" if would else f"{problem.partition('; ')[0]}. {change}"


@dataclass(frozen=True)
class _Problem:
    """Open decisions of a plan, and the data for them."""

    compilation: Compilation
    costs: Costs
    even: Predicted
    start: Plan

    def solve(self) -> tuple[Plan, tuple[str, ...]]:
        """The order of devices and the shares with the least time of the slowest stage."""
        layers = stage_layers(self.compilation, self.costs.profile)
        known: dict[Any, MeshShares | InfeasibleError] = {}

        def shared(index: int, ranks: tuple[int, ...]) -> MeshShares:
            key = (index, tuple(self.costs.cluster.devices[rank].type.name for rank in ranks))
            if key not in known:
                try:
                    known[key] = self._shares(index, layers[index], ranks)
                except InfeasibleError as error:
                    known[key] = error
            found = known[key]
            if isinstance(found, InfeasibleError):
                raise found
            return found

        order, stages = self._order(shared)
        reasons: list[str] = []
        for index, (own, shares) in enumerate(zip(order, stages, strict=True)):
            for axis, units, moves in zip(self.start.stages[index].axes or (), shares.units, shares.moves, strict=True):
                if len(set(units)) > 1:
                    what = "rows of a micro-batch" if axis.divides_batch else "units"
                    shown = ", ".join(map(str, units[:16]))
                    reasons.append(f"stage {index} on ranks {_shown(own)}: {what} along {axis.name!r} are {shown}")
                reasons += [f"stage {index}: {move.reason}" for move in moves]
        planned = tuple(
            stage.model_copy(update={"ranks": own, "axes": _with_shares(stage.axes or (), shares)})
            for own, stage, shares in zip(order, self.start.stages, stages, strict=True)
        )
        return self.start.model_copy(update={"stages": planned}), tuple(reasons)

    def _order(
        self, shared: Callable[[int, tuple[int, ...]], MeshShares]
    ) -> tuple[list[tuple[int, ...]], list[MeshShares]]:
        """Assignment of sets of ranks to stages: stages of equal size may be swapped.

        Objective: the least time of the slowest stage, then the least sum. Exact over all orders up to `MAX_ORDERS`.
        """
        sets = [stage.ranks for stage in self.start.stages]
        overlapping = len({rank for own in sets for rank in own}) < sum(map(len, sets))
        graphs = self.compilation.partition.stages
        paths = {path for graph in graphs for path in (graph.cut.outer, *graph.scopes.values())}
        clusters = any(scope.strategy.chooses_devices for path in paths for scope in path)
        best: tuple[tuple[float, float], list[tuple[int, ...]], list[MeshShares]] | None = None
        problem: InfeasibleError | None = None
        seen: set[Any] = set()
        for tried, order in enumerate(permutations(range(len(sets)))):
            ranks = [sets[position] for position in order]
            if tried and (tried >= MAX_ORDERS or overlapping or clusters):
                break
            if any(len(own) != len(stage) for own, stage in zip(ranks, sets, strict=True)):
                continue
            kinds = tuple(tuple(self.costs.cluster.devices[rank].type.name for rank in own) for own in ranks)
            if kinds in seen:
                continue
            seen.add(kinds)
            try:
                shares = [shared(index, own) for index, own in enumerate(ranks)]
            except InfeasibleError as error:
                problem = problem or error
                continue
            cost = (max(one.seconds for one in shares), sum(one.seconds for one in shares))
            if best is None or cost < (best[0][0] * (1 - 1e-9), best[0][1]):
                best = cost, ranks, shares
        if best is None:
            assert problem is not None
            raise problem
        return best[1:]

    def _shares(self, index: int, layers: StageLayers, ranks: tuple[int, ...]) -> MeshShares:
        """Shares along the axes of a stage on these ranks."""
        stage = self.compilation.stages[index]
        axes = [
            AxisToShare(name=axis.name, size=axis.size, role=axis.role, units=self._units(stage, position))
            for position, axis in enumerate(self.start.stages[index].axes or ())
        ]
        held = {one.rank: one for one in self.even.prediction.memory}
        models = stage.mesh.ranks  # whose parts are known
        devices = [self._device(layers, model, held[model], rank) for model, rank in zip(models, ranks, strict=False)]
        return mesh_shares(axes, devices, rows=max(self.compilation.rows))

    def _units(self, stage: PlacedStage, axis: int) -> int:
        """Units of a split axis: the smallest number of units among its operators, such as heads."""
        sizes = {
            self.compilation.analysis.factors.size(choices[axis + 1].factor)
            for choices in stage.choices.values()
            if choices[axis + 1].factor >= 0
        }
        size = stage.mesh.axes[axis].size
        return min((units for units in sizes if units >= size), default=size)

    def _device(self, layers: StageLayers, model: int, held: DeviceMemory, rank: int) -> MeshDevice:
        """A device in the place of a rank that holds *held*; its seconds and bytes depend on its rows and fraction.

        Each layer has its own roles: where its region is replicated, a fraction of the split axes is a share of rows.
        """
        device = self.costs.cluster.devices[rank]
        even_rows = max(max((part.rows for part in layers.parts[model]), default=1), 1)
        parts = layers.parts[model]
        even_fraction = min((part.fraction * part.part / part.context for part in parts), default=1.0)
        divided = any(part.fraction < 1 for part in parts)  # parameters; devices that cut rows have all of them
        of_rows = _of_rows(held)
        state = held.total - held.framework - of_rows

        def seconds(rows: float, fraction: float) -> float:
            total = 0.0
            for layer, part in zip(layers.layers, layers.parts[model], strict=True):
                cut = part.context > 1
                split = cut or part.fraction < 1
                own = Part(
                    rows=round(rows if split else rows * fraction),
                    fraction=part.fraction if cut else fraction if split else 1.0,
                    context=part.context,
                    part=fraction / part.fraction * part.context if cut else 1.0,
                    recompute=part.recompute,
                )
                if own.rows and own.fraction:
                    spent = self.costs.layer(self.costs.profile.layers[layer], rank, own)
                    total += spent.forward + spent.backward
            return total

        def needed(rows: float, fraction: float) -> float:
            share = fraction / even_fraction
            return held.framework + state * (share if divided else 1.0) + of_rows * rows / even_rows * share

        return MeshDevice(name=device.name, seconds=seconds, bytes=needed, capacity_bytes=device.memory_bytes)


def _with_shares(axes: Sequence[PlanAxis], shares: MeshShares) -> tuple[PlanAxis, ...]:
    """Axes with their shares; equal ones are left out.

    Rows of the outermost axis of the batch are counted; of inner ones, which cut what the outer left, and units of what
    is split, they are proportions.
    """
    found, counted = [], False
    for axis, units in zip(axes, shares.units, strict=True):
        outermost = axis.divides_batch and not counted
        counted = counted or axis.divides_batch
        given: tuple[int | float, ...] = units if outermost or not axis.divides_batch else tuple(map(float, units))
        equal = len(set(units)) == 1
        found.append(axis.model_copy(update={"shares": () if equal else given}))
    return tuple(found)


def _shown(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return f"{text} and {len(ranks) - 8} more" if len(ranks) > 8 else text
