"""Planning: from an annotated model and mixed devices to a balanced plan with ranks and shares of every stage.

The annotations decide stages, degrees and regions; planning decides the rest by the layer times of each device
(`shares_by_speed`). The plan is compiled as it will be run, predicted, and compared with even shares, which are used if
they are no slower. Where it does not fit, its stages take less memory (`memory_ladders`). For an unmodified model,
`whale.planner.balance.by_speed` first partitions the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from torch import nn

from whale.annotations import Annotation, annotate, module_scopes
from whale.commands.memory_ladders import MemoryLadders, PlanTrials, all_fit, level_of, sharding_of
from whale.commands.plan_writer import shortage_of
from whale.commands.shares_by_speed import bytes_of_rows, even_stages, ranks_text, shares_with_reasons
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_traced
from whale.compile.options import Options
from whale.compile.trace import Traced, trace
from whale.errors import InfeasibleError, UsageError, WhaleError
from whale.ir.micro_batches import rows_of_micro_batch
from whale.ir.plan import ClusterIdentity, ModelIdentity, Plan, PlanStage
from whale.ir.profile import ModelProfile
from whale.ir.state import LEVELS, StateSharding
from whale.ir.strategy import OFFLOADS, RECOMPUTES, parse_strategy
from whale.ir.units import bytes_text
from whale.planner.advice import advised
from whale.planner.balance.by_speed import Pipeline
from whale.planner.cost.memory import refuse_tiny
from whale.predict.costs import Costs
from whale.predict.prediction import Predicted
from whale.runtime.warn import warn

__all__ = ["Planned", "first_that_fits", "make_plan", "stage_annotations"]

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
    trials = PlanTrials(traced=traced, costs=costs, options=options, auto_shares=auto_shares)
    refuse_tiny((costs.cluster.devices[rank] for stage in first.stages for rank in stage.mesh.ranks), start.world_size)
    start, even = trials.settled(start)
    unordered = [stage.ranks for stage in start.stages]
    unordered = sorted(unordered) if stages else unordered
    try:
        return _balanced(first, costs, start, even, trials.settled, unordered)
    except InfeasibleError as error:
        problem = error
    ladders = MemoryLadders(
        trials=trials, compilation=first, start=start, rules=least, way=least_state, hosts=least_offload
    )
    plans = ladders.fitting()
    found: list[Planned] = []
    for plan in plans:  # which grows
        plan, even = trials.settled(plan)
        rules, levels = [one.recompute or "none" for one in plan.stages], [level_of(one) for one in plan.stages]
        words = [one.offload or "none" for one in plan.stages]
        made = replace(
            counted,
            recompute=tuple(rules),
            state=tuple(sharding_of(one) for one in plan.stages),
            offload=tuple(words),
        )
        first = compile_traced(traced, costs.cluster, made, device="cpu")
        try:
            one = _balanced(first, costs, plan, even, trials.settled, unordered)
        except InfeasibleError as error:
            problem = error
            if (harder := ladders.raised(plan)) != plan:  # peaks are brief above
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
    cures = ladders.cures(lacking=not all_fit(even.prediction.memory))
    more = _enough_micro_batches(start, even, trials.fits)
    raise InfeasibleError(_or_with(str(problem), [*([] if more is None else [f"--micro-batches {more}"]), *cures]))


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
    best, reasons = shares_with_reasons(first, costs, even, start)
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
        text = "; ".join(f"stage {index} on ranks {ranks_text(own)}" for index, own in enumerate(ranks))
        yield f"stages take devices by what they have to do: {text}"


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
            f"{others}: {bytes_text(bytes_of_rows(worst))} are activations, {bytes_text(state)} parameters, gradients "
            "and optimizer state",
            (),
            otherwise="use more stages, split, or devices with more memory",
        )
    )


def _enough_micro_batches(start: Plan, even: Predicted, fits: Callable[[Plan], bool]) -> int | None:
    """A number of micro-batches with which the even plan fits, if there is one; tried, as two of them may be."""
    needed = 1.0
    for held in even.prediction.memory:
        of_rows = bytes_of_rows(held)
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
