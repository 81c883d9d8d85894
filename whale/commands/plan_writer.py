"""Plans written from candidates of a search, as annotations of a model, and compiled.

Without a model a plan has the search's own prediction. This module does not import torch: `whale.commands.candidates`
compiles plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Protocol

from whale.errors import WhaleError
from whale.ir.cluster import Cluster
from whale.ir.plan import ModelIdentity, Plan
from whale.ir.profile import ModelProfile
from whale.ir.strategy import Reduce
from whale.ir.units import bytes_text
from whale.ir.workload import Prediction, Workload
from whale.planner.cost.experts import first_ways
from whale.planner.cost.precision import own_precision
from whale.planner.cost.stage import CostModel
from whale.planner.schedules.orders import FITTED
from whale.planner.search import Candidate, StageChoice
from whale.planner.search.to_plan import annotations_of, plan_of, split_shares

__all__ = ["Choice", "PlanWriter", "Trial", "shortage_of"]


class Trial(Protocol):
    """A candidate compiler; `whale.commands.candidates.CandidateCompiler` is one."""

    identity: ModelIdentity
    num_operators: int

    def uncut(self, micro_batches: int) -> str:
        """Reason why the batch cannot be divided into a number of micro-batches; empty if it can."""

    def places(self, anchors: Sequence[str]) -> Iterable[tuple[str, int]]:
        """For each operator of the model, its module path and its stage, if stages begin with *anchors*."""

    def dim_along(self, path: str, dim: int) -> int | None:
        """The dim of what comes into a module that is *dim* of the batch; None if nothing has it."""

    def predict(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Prediction, Workload]:
        """Compile the plan, and predict its step."""

    def forked(self) -> None:
        """Called in a forked process before it predicts."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A plan that the search proposes.

    Attributes:
        candidate: with the score of the search.
        plan: with the prediction of the compiled step if *compiled*, else with the search's.
        compiled: whether it was compiled.
        reason: why it is rejected; empty if it is not, as far as known.
        said: in a line, a plan that is no chain of stages.
    """

    candidate: Candidate
    plan: Plan
    compiled: bool = False
    reason: str = ""
    said: str = ""

    @property
    def prediction(self) -> Prediction:
        """The most accurate prediction of its step."""
        return self.plan.prediction or self.candidate.prediction


@dataclass(frozen=True)
class PlanWriter:
    """Writes candidates as plans, and compiles them.

    Attributes:
        profile: of the model.
        cluster: the devices.
        batch: rows of the global batch.
        trial: the model; None: there is only the profile.
        gradient_dtype: in which gradients are summed; None: in their own.
        step_in_backward: whether parameters are updated, and gradients freed, when these are summed.
        reduce: how replicas of all stages make one gradient of theirs; None: their mean.
    """

    profile: ModelProfile
    cluster: Cluster
    batch: int
    trial: Trial | None
    gradient_dtype: str | None = None
    step_in_backward: bool = False
    reduce: Reduce | None = None

    @cached_property
    def _prices(self) -> CostModel:
        return CostModel.of(self.profile, self.cluster, precision=own_precision(self.profile))

    def unwritten(self, candidate: Candidate) -> Plan:
        """The ranks and axes alone, for an annotated model."""
        plan = plan_of(candidate, self.cluster, batch=self.batch, annotations={}, model=self._identity())
        return self._in_precision(plan)

    def written(self, candidate: Candidate, *, by_speed: bool = False) -> Choice:
        """Not compiled."""
        shares = None
        if by_speed and self.trial is not None:
            shares = [split_shares(stage, self._prices) for stage in candidate.stages]
        plan = plan_of(
            candidate,
            self.cluster,
            batch=self.batch,
            annotations=self._annotations(candidate.stages),
            model=self._identity(),
            shares=shares,
        )
        return Choice(candidate=candidate, plan=self._in_precision(plan))

    def _in_precision(self, plan: Plan) -> Plan:
        """The plan with the precision of ``torch.autocast`` under which the model was captured, if it was, and the
        number type of its sums, how replicas make one gradient, and whether the optimizer steps in the backward."""
        update: dict[str, Any] = {
            "precision": self.profile.autocast or None,
            "gradient_dtype": self.gradient_dtype,
            "step_in_backward": self.step_in_backward or None,
        }
        if self.reduce is not None:
            update["stages"] = tuple(stage.model_copy(update={"reduce": self.reduce}) for stage in plan.stages)
        if not any(update.values()):
            return plan
        said = plan.model_copy(update=update)
        return said if plan.prediction is None else said.with_prediction(plan.prediction, plan.workload)

    def compiled(self, candidate: Candidate, trial: Trial) -> Choice:
        """Compile a candidate; if tensor groups have mixed devices, with shards by speed if that is faster. The reason
        of the choice says why it does not compile or fit.

        Raises:
            UsageError: it cannot be written as annotations of this model.
        """
        even = self.with_prediction(self.written(candidate), trial)
        if not any(split_shares(stage, self._prices) for stage in candidate.stages):
            return even
        uneven = self.with_prediction(self.written(candidate, by_speed=True), trial)
        return min(even, uneven, key=lambda choice: (bool(choice.reason), choice.prediction.step_seconds))

    def with_prediction(self, choice: Choice, trial: Trial) -> Choice:
        """Compile a written candidate, and put the prediction into its plan; the reason of the choice says why it does
        not compile or fit."""
        try:
            prediction, workload = trial.predict(choice.plan, self.profile, self.cluster)
            plan = choice.plan.with_prediction(prediction, workload)
            if plan.schedule in FITTED:  # to times that are known now, and with them what it keeps in flight
                prediction, workload = trial.predict(plan, self.profile, self.cluster)
                plan = choice.plan.with_prediction(prediction, workload)
        except WhaleError as error:
            return replace(choice, reason=str(error))
        return replace(choice, plan=plan, compiled=True, reason=shortage_of(prediction))

    def _identity(self) -> ModelIdentity | None:
        if self.trial is not None:
            return self.trial.identity
        return ModelIdentity(name=self.profile.name, hash=self.profile.model_hash) if self.profile.model_hash else None

    def _annotations(self, stages: Sequence[StageChoice]) -> Mapping[str, tuple[str, ...]]:
        paths = self.profile.paths
        trial, dim = self.trial, self.profile.cut_dim
        along = (lambda path: dim) if trial is None else cache(partial(trial.dim_along, dim=dim))
        more = self.profile.experts, along, first_ways(self.profile)
        if not any(paths):
            return {}
        anchors = [paths[stage.first] for stage in stages]
        first = stages[0]
        anchors[0] = next((path for path in paths[first.first : first.last] if path), "")
        if self.trial is not None and len(stages) > 1 and all(anchors):
            return annotations_of(stages, anchors, self.trial.places(anchors), *more)
        places = [(paths[layer], index) for index, one in enumerate(stages) for layer in range(one.first, one.last)]
        return annotations_of(stages, anchors, [one for one in places if one[0]], *more)


def shortage_of(prediction: Prediction) -> str:
    """The device, or else the host, that lacks the most memory, and how much; empty if all fit."""
    worst = max(prediction.memory, key=lambda device: device.total - device.capacity)
    if prediction.fits:
        return ""
    if worst.total <= worst.capacity:
        host = max(prediction.hosts, key=lambda one: one.total - one.capacity)
        return (
            f"needs {bytes_text(host.total)} in the memory of {host.node} itself, which has {bytes_text(host.capacity)}"
        )
    return f"needs {bytes_text(worst.total)} on {worst.device}, which has {bytes_text(worst.capacity)}"
