"""``plan="auto"``: a searched plan for the ranks of a launch, equal on every rank.

Rank 0 searches, because a time-limited search may end differently elsewhere; the others wait for its plan.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from whale.commands.candidates import CandidateCompiler, take_scopes
from whale.commands.least_offload import offload_that_fits
from whale.commands.searching import search_plans
from whale.commands.tables import placed_choices
from whale.compile.compile import compile_traced
from whale.compile.options import Options, offloads_told, states_of
from whale.compile.trace import Traced
from whale.errors import InputFileError, UsageError
from whale.graph.capture import batch_leaves, batch_rows
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.ir.profile import ModelProfile
from whale.ir.state import LEVELS, Align, StateSharding
from whale.ir.strategy import Offload, Recompute, ScopePath
from whale.ir.workload import DeviceMemory
from whale.planner.balance.least_recompute import least_recompute, least_steps
from whale.planner.cost.optimizers import Optimizer, costs_of
from whale.planner.cost.state_shares import fitting_states
from whale.planner.search import Fixed, SearchSettings
from whale.planner.search.constraints import fixed_by
from whale.predict.dry_step import Device
from whale.predict.prediction import predicted_memory
from whale.runtime.launch import World
from whale.runtime.store import from_first
from whale.strategies.profile import profile_model

__all__ = [
    "SearchInputs",
    "automatic_plan",
    "context_degrees",
    "cut_degrees",
    "expert_degrees",
    "search_inputs",
    "tensor_degrees",
    "with_least_memory",
]

ROOM = 0.8
"""Fraction of a device's memory that a module with its states may take; accumulated gradients and drivers need the
rest."""

MOST_CONTEXT_DEGREES = 64
"""Largest number of devices over which a search cuts rows."""

MOST_EXPERT_DEGREES = 64
"""Largest number of devices for which powers of two are expert degrees; a larger degree is all devices of a type."""

PATIENCE_SECONDS = 900.0
"""Seconds for which ranks wait for rank 0 to capture a model, to search and to compile."""


def automatic_plan(
    world: World,
    model: nn.Module,
    batch: Any,
    cluster: Cluster,
    *,
    options: Options,
    micro_batches: int | None,
    schedule: str | None,
    recompute: Recompute | Literal["auto"],
    zero: Literal[0, 1, 2, 3, "auto"],
    state_align: Align,
    offload: Offload | Literal["auto"],
    loss_fn: Callable[..., Any] | None,
    cache: Path | None = None,
) -> Plan:
    """The plan of rank 0 for *model*, on every rank; all of them call this.

    Args:
        world: the ranks that run it.
        model: on the meta device; its annotations become constraints, and are removed.
        batch: an example of the global batch.
        cluster: with as many devices as there are ranks.
        options: in addition to the plan.
        micro_batches: of a step; None: the best number.
        schedule: one for devices that have one stage each; None: ``1f1b``.
        recompute: what backwards compute again; ``auto``: in each stage the least that is needed.
        zero: how much of their state replicas divide; ``auto``: in each stage the least that is needed.
        state_align: where stretches of it end.
        offload: what is in the host's memory; ``auto``: in each stage the least that is needed.
        loss_fn: for a model that does not return its loss.
        cache: the folder of plans that were found before, for the same search.

    Raises:
        InfeasibleError: no plan fits, on rank 0.
        WorkerError: rank 0 failed to make a plan; the message says why.
    """
    scopes = take_scopes(model)

    def made() -> str:
        name = type(model).__name__
        training = model.training
        trial = CandidateCompiler(
            model, batch, name=name, options=options, training=training, loss_fn=loss_fn, scopes=scopes
        )
        asked = (scopes, options, micro_batches, schedule, recompute, zero, state_align, offload, trial.precision)
        form = [(name, tuple(x.shape), x.dtype) for name, x in batch_leaves(batch).items() if isinstance(x, Tensor)]
        place = _place(cache, cluster, trial.identity.hash, repr((form, asked)))
        if (found := _found(place, world)) is not None:
            return found.dumps()
        inputs = search_inputs(trial, batch, cluster, loss_fn=loss_fn, rules=recompute not in ("auto", "none"))
        settings = SearchSettings(
            precision=trial.precision,
            micro_batches=micro_batches,
            schedules=(schedule or "1f1b",),
            recompute=recompute,
            zero=zero,
            state_align=state_align,
            gradient_dtype=options.gradient_dtype,
            step_in_backward=options.step_in_backward,
            reduce=options.reduce,
            offload=offload,
            fixed=inputs.fixed,
        )
        best = search_plans(
            inputs.profile,
            cluster,
            batch=inputs.rows,
            settings=settings,
            trial=trial,
            with_rules=partial(trial.with_rules, rows=inputs.rows),
            with_cuts=partial(trial.with_cuts, degrees=context_degrees(cluster)),
            with_tables=partial(placed_choices, trial),
        ).best.plan
        if place is not None:
            _keep(place, best, world)
        return best.dumps()

    return Plan.parse(from_first(world, "plan", made, patience_seconds=PATIENCE_SECONDS), source="plan='auto'")


def _place(cache: Path | None, cluster: Cluster, *asked: str) -> Path | None:
    """The file for the plan of a search: of a model and options for devices, whatever the names of their hosts are."""
    if cache is None:
        return None
    nodes = [
        (node.ranks, node.intra, node.inter, node.host_memory, *([] if node.region is None else [node.region]))
        for node in cluster.nodes
    ]
    text = repr((nodes, [device.type for device in cluster.devices], asked))
    return cache / f"plan-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _found(place: Path | None, world: World) -> Plan | None:
    """A plan that was found before."""
    if place is None or not place.is_file():
        return None
    try:
        return Plan.load(place)
    except (InputFileError, OSError) as error:
        world.warn(f"a plan that was kept cannot be read, and another one is searched for: {error}")
        return None


def _keep(place: Path, plan: Plan, world: World) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        plan.save(place)
    except OSError as error:
        world.warn(f"the plan that was found cannot be kept in {place}: {error.strerror}")


def with_least_memory(
    world: World,
    traced: Traced,
    memory: Cluster,
    cluster: Cluster,
    options: Options,
    *,
    recompute: bool = False,
    zero: bool = False,
    shares: bool = False,
    offload: bool = False,
) -> Options:
    """The options with as little of these for each stage as its devices need to hold it, as rank 0 counts; all ranks
    call this.

    Args:
        world: the ranks that run the model.
        traced: the model.
        memory: the devices, with what they can hold.
        cluster: the devices for which it is compiled.
        options: of the compilation; they say what stages compute again, and how they divide their state, whose plan or
            annotation does not.
        recompute: whether to choose what stages compute again, after how much of their state they divide.
        zero: whether to choose the level of the options' way to divide it.
        shares: whether ranks own what their memory leaves, where equal shares do not fit.
        offload: whether to choose what is in the host's memory, after all else.
    """
    kind: Device = "cuda" if world.device.type == "cuda" else "cpu"
    way = options.state if isinstance(options.state, StateSharding) else StateSharding(1)
    start = replace(options, state=None) if zero else options
    first = compile_traced(traced, cluster, start, device=kind)
    planned = [stage.recompute for stage in options.plan.stages] if options.plan is not None else []
    stages, num = first.partition.stages, len(cluster.devices)
    asked = [graph.cut.stage.strategy.recompute if graph.cut.stage is not None else None for graph in stages]
    given = [told or own for told, own in zip(planned or [None] * len(stages), asked, strict=True)]
    told = states_of(first.partition, replace(options, state=None))
    ranks = [stage.mesh.ranks for stage in first.stages]

    def of_levels(levels: Sequence[int]) -> tuple[StateSharding | None, ...]:
        return tuple(
            replace(way, level=level).of_stage(own, num) if level else None
            for own, level in zip(ranks, levels, strict=True)
        )

    def memory_of(chosen: Options) -> tuple[DeviceMemory, ...]:
        compiled = compile_traced(traced, cluster, chosen, device=kind)
        return predicted_memory(compiled, memory, schedule=options.schedule, optimizer="adamw", device=kind)

    def with_shares(chosen: Options) -> Options:
        """The options with shares of state that fit, if equal ones do not."""
        held = memory_of(chosen)
        if not shares or all(one.total <= one.capacity for one in held):
            return chosen
        own = [state if said is None else None for state, said in zip(_of_stages(chosen, ranks), told, strict=True)]
        return replace(chosen, state=fitting_states(ranks, own, held, micro_batches=options.micro_batches))

    def made() -> str:
        chosen = replace(start, state=of_levels([0] * len(ranks))) if zero else start
        if zero:
            levels = least_steps(
                ranks,
                LEVELS,
                lambda levels: memory_of(with_shares(replace(start, state=of_levels(levels)))),
                given=[None if state is None else state.level for state in told],
            )
            chosen = replace(start, state=of_levels(levels))
        chosen = with_shares(chosen)
        if recompute:
            rules = least_recompute(
                ranks, lambda rules: memory_of(replace(chosen, recompute=tuple(rules))), given=given
            )
            chosen = replace(chosen, recompute=tuple(rules))
        if offload:
            words = offload_that_fits(
                first,
                lambda words: memory_of(replace(chosen, offload=words)),
                given=offloads_told(first.partition, options.plan),
            )
            chosen = replace(chosen, offload=words)
        states = [
            None if state is None else [state.level, state.shares, state.align] for state in _of_stages(chosen, ranks)
        ]
        return json.dumps([chosen.recompute, states, chosen.offload])

    text = from_first(world, "memory", made, patience_seconds=PATIENCE_SECONDS)
    rules, states, words = json.loads(text)
    found = [None if one is None else StateSharding(one[0], tuple(one[1]), one[2]) for one in states]
    again, where = (one if isinstance(one, str) else tuple(one) for one in (rules, words))
    chosen: Any = {"recompute": again, "offload": where}
    return replace(options, state=tuple(found), **chosen)


def _of_stages(options: Options, ranks: Sequence[Sequence[int]]) -> tuple[StateSharding | None, ...]:
    """How each stage divides its state by the options."""
    return options.state if isinstance(options.state, tuple) else (options.state,) * len(ranks)


@dataclass(frozen=True, kw_only=True)
class SearchInputs:
    """The profile and the constraints of a captured model, for a search.

    Attributes:
        profile: of its layers.
        fixed: the constraints that its annotations are.
        rows: of the global batch.
    """

    profile: ModelProfile
    fixed: Fixed
    rows: int


def search_inputs(
    trial: CandidateCompiler,
    batch: Any,
    cluster: Cluster,
    *,
    profile: ModelProfile | None = None,
    loss_fn: Callable[..., Any] | None = None,
    rules: bool = False,
) -> SearchInputs:
    """Profile a captured model for a search on *cluster*, unless a *profile* is given, and read its annotations.

    Args:
        trial: the captured model.
        batch: an example of the global batch.
        cluster: whose nodes tell the degrees that are profiled.
        profile: measured or made earlier, of this model.
        loss_fn: for a model that does not return its loss.
        rules: whether the profile has what each rule of recompute costs.

    Raises:
        UsageError: the batch has no rows, or the profile is of another model.
    """
    name, hash_, scopes = trial.identity.name, trial.identity.hash, trial.scopes
    rows = batch_rows(batch)
    if rows is None:
        raise UsageError(f"a search divides the rows of the batch, but the batch of {name} has no tensor with rows")
    if profile is None:
        profile = profile_model(
            trial.model,
            batch,
            tensor_degrees=tensor_degrees(cluster, trial.model, optimizer=trial.optimizer, scopes=scopes),
            expert_degrees=expert_degrees(cluster, scopes),
            loss_fn=loss_fn,
            name=name,
            captured=trial.captured,
            precision=trial.options.precision,
            rules=rules,
            known=trial.layers,
            scopes=scopes,
        ).model_copy(update={"model_hash": hash_})
    elif profile.model_hash not in ("", hash_):
        raise UsageError(
            f"the profile is of {profile.name} with hash {profile.model_hash[:19]}..., but {name} has {hash_[:19]}...: "
            "its code, or sizes such as widths, differ; profile this model"
        )
    return SearchInputs(profile=profile, fixed=fixed_by(scopes, profile.paths, profile.experts), rows=rows)


def tensor_degrees(
    cluster: Cluster, model: nn.Module, *, optimizer: Optimizer = "adamw", scopes: Mapping[str, ScopePath] | None = None
) -> tuple[int, ...]:
    """Tensor degrees to profile: those of nodes of at most eight devices; more if a module with its gradients and
    optimizer states is too large for eight, but the devices together have enough memory for the model; and those in the
    annotations of *scopes*.

    >>> tensor_degrees(Cluster.homogeneous(6), nn.Linear(8, 8))
    (1, 2, 4)
    """
    num = len(cluster.devices)
    found = [degree for degree in (1, 2, 4, 8) if degree <= num]
    states = 2 + costs_of(optimizer).states
    sizes = [sum(p.nbytes for p in part.parameters(recurse=False)) * states for part in model.modules()]
    memory = [device.memory_bytes for device in cluster.devices]
    whole = sum(p.nbytes for p in model.parameters()) * states
    while whole <= sum(memory) and max(sizes) > ROOM * found[-1] * max(memory) and 2 * found[-1] <= num:
        found.append(2 * found[-1])
    return tuple(sorted({*found, *_asked(cluster, scopes)}))


def _asked(cluster: Cluster, scopes: Mapping[str, ScopePath] | None) -> set[int]:
    """The degrees of annotated splits, as far as there are devices."""
    every = (scope.strategy for path in (scopes or {}).values() for scope in path)
    degrees = (one.degree for one in every if one.shards_operators and one.degree is not None)
    return {degree for degree in degrees if degree <= len(cluster.devices)}


def context_degrees(cluster: Cluster) -> tuple[int, ...]:
    """Context degrees to profile where rows are cut: powers of two, and the devices of a node.

    >>> context_degrees(Cluster.homogeneous(6))
    (2, 4, 6)
    """
    num = min(len(cluster.devices), MOST_CONTEXT_DEGREES)
    powers = (1 << power for power in range(1, num.bit_length()))
    nodes = (len(node.ranks) for node in cluster.nodes)
    return tuple(sorted({degree for degree in (*powers, *nodes) if 1 < degree <= num}))


def cut_degrees(cluster: Cluster, scopes: Mapping[str, ScopePath]) -> tuple[int, ...]:
    """Context degrees of annotations with a dim: their numbers, or where they have none those that devices may be left
    for.

    >>> from whale.ir.strategy import Scope, Strategy
    >>> path = (Scope(strategy=Strategy(kind="split", dim=1), region=""),)
    >>> cut_degrees(Cluster.homogeneous(6), {"": path}), cut_degrees(Cluster.homogeneous(6), {})
    ((2, 3, 6), ())
    """
    asked = {scope.strategy.degree for path in scopes.values() for scope in path if scope.strategy.dim is not None}
    num = len(cluster.devices)
    left = {degree for degree in range(2, num + 1) if num % degree == 0} if None in asked else set()
    return tuple(sorted(degree for degree in {*left, *asked} if degree is not None and 1 < degree <= num))


def expert_degrees(cluster: Cluster, scopes: Mapping[str, ScopePath] | None = None) -> tuple[int, ...]:
    """Expert degrees to profile, if there are experts: powers of two, all devices of a type, all; and those in the
    annotations of *scopes*.

    >>> expert_degrees(Cluster.homogeneous(12))
    (2, 4, 8, 12)
    """
    num = len(cluster.devices)
    powers = (1 << power for power in range(1, min(num, MOST_EXPERT_DEGREES).bit_length()))
    of_types = Counter(device.type.name for device in cluster.devices).values()
    return tuple(sorted({*powers, *of_types, num, *_asked(cluster, scopes)} - {1}))
