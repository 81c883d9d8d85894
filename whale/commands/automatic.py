"""``plan="auto"``: from a model and what torchrun started to a plan, the same on every rank.

Rank 0 searches, because a search that is limited by time may end otherwise elsewhere; the others wait for its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from whale.commands.candidates import ModelTrial, take_scopes
from whale.commands.searching import search_plans
from whale.compile.compile import Options
from whale.compile.trace import precision_of
from whale.errors import UsageError
from whale.graph.capture import batch_rows
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.ir.strategy import ScopePath
from whale.planner.cost.optimizers import Optimizer, costs_of
from whale.planner.search import SearchSettings
from whale.planner.search.constraints import fixed_by
from whale.runtime.launch import World
from whale.runtime.store import from_first
from whale.strategies.profile import profile_model

__all__ = ["automatic_plan", "expert_degrees", "tensor_degrees"]

ROOM = 0.8
"""Of a device's memory, what a module with its states may take: gradients to be added, and drivers, want the rest."""

MOST_EXPERT_DEGREES = 64
"""Up to so many devices powers of two are expert degrees; more have experts in common only if all of a type do."""

PATIENCE_SECONDS = 900.0
"""For how long ranks wait for rank 0 to capture a model, to search and to compile."""


def automatic_plan(
    world: World,
    model: nn.Module,
    batch: Any,
    cluster: Cluster,
    *,
    options: Options,
    micro_batches: int | None,
    schedule: str | None,
    loss_fn: Callable[..., Any] | None,
) -> Plan:
    """The plan that rank 0 finds for *model*, on every rank; all of them call this.

    Args:
        world: whose ranks run it.
        model: on the meta device; its annotations are kept as constraints, and taken off.
        batch: an example of the global batch.
        cluster: of as many devices as there are ranks.
        options: beside what a plan says.
        micro_batches: of a step; None: what is best.
        schedule: one for devices that have one stage each; None: ``1f1b``.
        loss_fn: for a model that does not return its loss.

    Raises:
        InfeasibleError: nothing fits, on rank 0.
        WorkerError: rank 0 did not find a plan; says why.
    """
    scopes = take_scopes(model)

    def made() -> str:
        name = type(model).__name__
        rows = batch_rows(batch)
        if rows is None:
            raise UsageError("plan='auto' divides the rows of the batch, but the example batch has no tensor with rows")
        trial = ModelTrial(model, batch, name=name, options=options, training=model.training, loss_fn=loss_fn)
        profile = profile_model(
            model,
            batch,
            tensor_degrees=tensor_degrees(cluster, model, scopes=scopes),
            expert_degrees=expert_degrees(cluster, scopes),
            loss_fn=loss_fn,
            name=name,
            captured=trial.captured,
        ).model_copy(update={"model_hash": trial.identity.hash})
        settings = SearchSettings(
            precision=precision_of(model),
            micro_batches=micro_batches,
            schedules=(schedule or "1f1b",),
            fixed=fixed_by(scopes, profile.paths, profile.experts),
        )
        return search_plans(profile, cluster, batch=rows, settings=settings, trial=trial).best.plan.dumps()

    return Plan.parse(from_first(world, "plan", made, patience_seconds=PATIENCE_SECONDS), source="plan='auto'")


def tensor_degrees(
    cluster: Cluster, model: nn.Module, *, optimizer: Optimizer = "adamw", scopes: Mapping[str, ScopePath] | None = None
) -> tuple[int, ...]:
    """The tensor degrees that are worth profiling: those of nodes of at most eight devices, and more where a module
    with its gradients and the optimizer's states is too large for eight, but the devices together would hold the model;
    and those that the annotations of *scopes* ask for.

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
    degrees = (one.degree for one in every if one.kind == "split" and one.degree is not None)
    return {degree for degree in degrees if degree <= len(cluster.devices)}


def expert_degrees(cluster: Cluster, scopes: Mapping[str, ScopePath] | None = None) -> tuple[int, ...]:
    """The expert degrees that are worth profiling, where there are experts: powers of two, all devices of a type, all;
    and those that the annotations of *scopes* ask for.

    >>> expert_degrees(Cluster.homogeneous(12))
    (2, 4, 8, 12)
    """
    num = len(cluster.devices)
    powers = (1 << power for power in range(1, min(num, MOST_EXPERT_DEGREES).bit_length()))
    of_types = Counter(device.type.name for device in cluster.devices).values()
    return tuple(sorted({*powers, *of_types, num, *_asked(cluster, scopes)} - {1}))
