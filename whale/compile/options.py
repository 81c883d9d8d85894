"""Options of a compilation, and what these, a plan and annotations say of each stage: a plan's word counts before an
annotation's, and both before the options'. Nothing here is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from whale.errors import AnnotationError, PlanMismatchError
from whale.graph.partition import Partition, TaskGraph
from whale.ir.plan import Plan
from whale.ir.state import StateSharding
from whale.ir.strategy import Offload, Recompute, Reduce, Strategy

__all__ = ["Options", "distincts_of", "offloads_of", "offloads_told", "reduces_of", "rules_of", "states_of"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a compilation besides annotations. ``micro_batches`` divide the batch with which the model is made;
    ``precision`` is that of ``torch.autocast`` under which it computes, ``gradient_dtype`` that in which gradients are
    summed. ``step_in_backward`` asks for parameters to be updated as soon as their gradients are summed,
    ``staleness`` for sums that servers have that many steps later. ``recompute``
    says what backwards compute again, of all stages or of each, where neither the plan nor an annotation says it.
    ``compile`` asks for compiled kernels, ``cuda_graphs`` for recorded ones; ``local_rows`` says that ranks bring their
    own rows of a batch alone. ``state`` divides parameters, gradients and optimizer states, of
    all stages or of each, where neither the plan nor an annotation says it; its shares may be of each rank of the
    launch. ``reduce`` says how replicas make one gradient of theirs, likewise. ``offload`` says what is in the host's
    memory, likewise; with state there ranks own stretches of it, at level 1 at least.

    ``plan`` decides the stages' devices, if it has any. Its schedule and micro-batches must equal these options.
    """

    micro_batches: int = 1
    schedule: str = "1f1b"
    default: Strategy | None = None
    prefer: str = "consecutive"
    promote: bool = False
    precision: str | None = None
    gradient_dtype: str | None = None
    step_in_backward: bool = False
    staleness: int = 0
    recompute: Recompute | tuple[Recompute, ...] = "none"
    compile: bool = False
    cuda_graphs: bool = False
    local_rows: bool = False
    state: StateSharding | tuple[StateSharding | None, ...] | None = None
    reduce: Reduce | None = None
    offload: Offload | tuple[Offload, ...] = "none"
    plan: Plan | None = None


def rules_of(cut: Partition, options: Options) -> tuple[Recompute, ...]:
    """The rule of each stage for what its backward computes again: the plan's, its annotation's, or the options'.

    Raises:
        PlanMismatchError: plan and annotation contradict each other.
    """
    planned = [stage.recompute for stage in options.plan.stages] if options.plan is not None else []
    found: list[Recompute] = []
    for index, graph in enumerate(cut.stages):
        told = planned[index] if planned else None
        asked = graph.cut.stage.strategy.recompute if graph.cut.stage is not None else None
        if told is not None and asked is not None and told != asked:
            raise PlanMismatchError(
                f"the plan's stages.{index}.recompute is {told!r}, but {graph.cut.stage} asks for {asked!r}; change "
                "one of them"
            )
        given = options.recompute if isinstance(options.recompute, str) else options.recompute[index]
        found.append(told or asked or given)
    return tuple(found)


def states_of(cut: Partition, options: Options) -> tuple[StateSharding | None, ...]:
    """How the ranks of each stage divide its state: as the plan says, an annotation of it, or the options.

    Raises:
        AnnotationError: annotations of a stage contradict each other.
        PlanMismatchError: plan and annotation do.
    """
    plan = options.plan
    planned = [None if own.state is None else own.state.sharding for own in plan.stages] if plan is not None else []
    given = options.state if isinstance(options.state, tuple) else (options.state,) * len(cut.stages)
    told = _told(cut, planned, lambda strategy: strategy.state, "state")
    return tuple(own or other for own, other in zip(told, given, strict=True))


def offloads_of(cut: Partition, options: Options) -> tuple[Offload, ...]:
    """The word of each stage for what is in the host's memory: the plan's, an annotation's, or that of the options.

    Raises: see `offloads_told`.
    """
    given = (options.offload,) * len(cut.stages) if isinstance(options.offload, str) else options.offload
    return tuple(told or own for told, own in zip(offloads_told(cut, options.plan), given, strict=True))


def offloads_told(cut: Partition, plan: Plan | None) -> tuple[Offload | None, ...]:
    """The same without options; None where neither says it.

    Raises:
        AnnotationError: annotations of a stage contradict each other.
        PlanMismatchError: plan and annotation do.
    """
    planned = [stage.offload for stage in plan.stages] if plan is not None else []
    return _told(cut, planned, lambda strategy: strategy.offload, "offload")


def reduces_of(cut: Partition, options: Options) -> tuple[Reduce, ...]:
    """How the replicas of each stage make one gradient: as the plan says, an annotation of it, or the options.

    Raises:
        AnnotationError: annotations of a stage contradict each other.
        PlanMismatchError: plan and annotation do.
    """
    planned: list[Reduce | None] = []
    planned += [stage.reduce for stage in options.plan.stages] if options.plan is not None else []
    told: tuple[Reduce | None, ...] = _told(cut, planned, lambda strategy: strategy.reduce, "reduce")
    otherwise: Reduce = options.reduce or "mean"
    return tuple(own or otherwise for own in told)


def distincts_of(cut: Partition, options: Options) -> tuple[float | None, ...]:
    """The part of the looked-up rows of each stage that are distinct, as the plan says or an annotation of it.

    Raises:
        AnnotationError: annotations of a stage contradict each other.
        PlanMismatchError: plan and annotation do.
    """
    planned = [stage.distinct for stage in options.plan.stages] if options.plan is not None else []
    told: tuple[float | None, ...] = _told(cut, planned, lambda strategy: strategy.distinct, "distinct")
    return told


_T = TypeVar("_T")


def _told(
    cut: Partition, planned: Sequence[_T | None], of: Callable[[Strategy], _T | None], field: str
) -> tuple[_T | None, ...]:
    """The value of each stage that the plan says, or else an annotation; None where neither does.

    Raises:
        AnnotationError: annotations of a stage contradict each other.
        PlanMismatchError: plan and annotation do.
    """
    found: list[_T | None] = []
    for index, graph in enumerate(cut.stages):
        asked = list(dict.fromkeys(one for one in map(of, _strategies(graph)) if one is not None))
        if len(asked) > 1:
            first, second = (f"{field}={one!r}" if isinstance(one, str) else str(one) for one in asked[:2])
            raise AnnotationError(
                f"annotations of stage {index} say {first} and {second}, but a stage has one {field}; change one of "
                "them"
            )
        own = planned[index] if planned else None
        if own is not None and asked and own != asked[0]:
            ours, theirs = (repr(one) if isinstance(one, str) else str(one) for one in (own, asked[0]))
            raise PlanMismatchError(
                f"the plan's stages.{index}.{field} is {ours}, but an annotation asks for {theirs}; change one of them"
            )
        found.append(own if own is not None else asked[0] if asked else None)
    return tuple(found)


def _strategies(graph: TaskGraph) -> list[Strategy]:
    """The annotations in which a stage is, and those within it."""
    scopes = [*([graph.cut.stage] if graph.cut.stage is not None else []), *graph.cut.outer]
    scopes += [scope for path in dict.fromkeys(graph.scopes.values()) for scope in path]
    return [scope.strategy for scope in scopes]
