"""Candidate compiler: a model is captured once, compiled for each plan as it would be run, and predicted.

Nothing is allocated and no process is started. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from whale.annotations import Annotation, annotate, forget, module_scopes
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_traced
from whale.compile.options import Options
from whale.compile.trace import precision_of, trace
from whale.errors import UsageError
from whale.graph.captured import Captured
from whale.graph.origins import modules_around
from whale.ir.cluster import Cluster
from whale.ir.plan import ModelIdentity, Plan
from whale.ir.profile import ModelProfile
from whale.ir.strategy import RECOMPUTES, Scope, ScopePath, Strategy, parse_strategy
from whale.ir.workload import Prediction, Workload
from whale.planner.cost.optimizers import Optimizer
from whale.predict.costs import Costs
from whale.predict.dry_step import Device
from whale.predict.peak_memory import Known, brief_peak_memory
from whale.predict.prediction import Predicted, predict
from whale.strategies.cutting import dim_along
from whale.strategies.kind_costs import MOST_PLACED
from whale.strategies.profile import KnownLayers, profile_model

__all__ = ["CandidateCompiler", "PredictedPlan", "scopes_by", "take_scopes"]


class PredictedPlan(NamedTuple):
    """A plan that was compiled and predicted."""

    plan: Plan
    compilation: Compilation
    costs: Costs
    predicted: Predicted


class _Stopped(Exception):
    """A profile was to stop."""


class CandidateCompiler:
    """A model to compile for plans that have annotations. Its own annotations are removed before (`take_scopes`).

    Args:
        model: on the meta device, without marks on its modules.
        batch: an example of the global batch.
        name: for the plans.
        options: in addition to plans.
        training: whether the step trains; determines dropout.
        loss_fn: for a model that does not return its loss.
        optimizer: its states must fit.
        precision: in which its step is priced, if not under the autocast of *options*; None: its number type's.
        scopes: of annotated modules, whose annotations were taken off.

    Raises:
        UsageError: its forward enters annotations.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        name: str,
        options: Options | None = None,
        training: bool = True,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Optimizer = "adamw",
        precision: str | None = None,
        scopes: Mapping[str, ScopePath] | None = None,
    ) -> None:
        self.model, self.optimizer, self.training = model, optimizer, training
        self.batch, self.loss_fn, self.scopes = batch, loss_fn, scopes or {}
        self.options = replace(options or Options(), micro_batches=1, schedule="1f1b", plan=None)
        self.precision = self.options.precision or precision or precision_of(model)
        self.traced = trace(
            model,
            batch,
            device="cpu",
            training=training,
            loss_fn=loss_fn,
            promote=self.options.promote,
            precision=self.options.precision,
        )
        if self.traced.annotated.scopes.of:
            raise UsageError(
                f"the forward of {name} enters annotations, which the search cannot keep as constraints; put them on "
                "modules with whale.annotate, or let 'whale plan' divide the work of the model as it is annotated"
            )
        self._known = Known()
        self.layers: KnownLayers = {}
        self.num_operators = len(self.traced.flow.calls)
        self.identity = ModelIdentity(name=name, hash=self.traced.hash)

    @property
    def captured(self) -> Captured | None:
        """The capture, for profiling; None if it is not of the unmodified training model."""
        return self.traced.captured if self.training and not self.options.promote else None

    def with_rules(
        self, profile: ModelProfile, *, rows: int = MOST_PLACED, stop: Callable[[], bool] = lambda: False
    ) -> ModelProfile:
        """A profile of the model, with what each rule of recompute keeps and computes again in micro-batches of up to
        *rows* rows; as it was where it was to *stop*."""
        cuts = [variant.context_degree for variant in profile.kinds[0].context_variants]
        parts = ("variants", "expert_variants", "context_variants")
        return self._remade(profile, parts, cuts, rules=True, most_rows=rows, stop=stop)

    def with_cuts(
        self, profile: ModelProfile, degrees: Sequence[int], *, stop: Callable[[], bool] = lambda: False
    ) -> ModelProfile:
        """A profile of the model, with what its layers cost on devices that cut each row, at these *degrees*; as it
        was where it was to *stop*."""
        return self._remade(profile, ("context_variants",), degrees, rules=profile.rules == RECOMPUTES, stop=stop)

    def _remade(
        self,
        profile: ModelProfile,
        parts: Sequence[str],
        cuts: Sequence[int],
        *,
        rules: bool,
        most_rows: int = MOST_PLACED,
        stop: Callable[[], bool],
    ) -> ModelProfile:
        """A profile with some *parts* of its kinds of layers made again."""

        def check() -> None:
            if stop():
                raise _Stopped

        try:
            made = self._made_again(profile, parts, cuts, rules=rules, most_rows=most_rows, check=check)
        except _Stopped:
            return profile
        again = [
            old.model_copy(update={part: getattr(new, part) for part in parts})
            for old, new in zip(profile.kinds, made.kinds, strict=True)
        ]
        update = {"kinds": tuple(again), "rules": made.rules, "cut_dim": made.cut_dim, "uncut": made.uncut}
        return profile.model_copy(update=update)

    def _made_again(
        self, profile: ModelProfile, parts: Sequence[str], cuts: Sequence[int], **options: Any
    ) -> ModelProfile:
        kinds = profile.kinds
        return profile_model(
            self.model,
            self.batch,
            tensor_degrees=[variant.tensor_degree for variant in kinds[0].variants] if "variants" in parts else [1],
            expert_degrees=[one.expert_degree for kind in kinds for one in kind.expert_variants]
            if "expert_variants" in parts
            else [],
            context_degrees=cuts,
            cut_tensor_degrees=(1,),
            loss_fn=self.loss_fn,
            name=profile.name,
            captured=self.captured,
            precision=self.options.precision,
            known=self.layers,
            scopes=self.scopes,
            **options,
        )

    def uncut(self, micro_batches: int) -> str:
        """Reason why its batch cannot be divided into a number of micro-batches: an operator that computes a row from
        others, such as a batch norm; empty if it can."""
        try:
            self.traced.cut_in_time(micro_batches)
        except UsageError as error:
            return str(error)
        return ""

    def places(self, anchors: Sequence[str]) -> list[tuple[str, int]]:
        """For each operator of the model, its module path and its stage, if stages begin with *anchors*.

        Raises:
            AnnotationError: the data does not flow from stage to stage in that order.
        """
        scopes = {path: (Scope(strategy=Strategy(kind="stage"), region=path),) for path in anchors}
        cut = self.traced.stages(scopes)
        found: dict[tuple[str, int], None] = {}
        for node, stage in cut.stage_of.items():
            around = modules_around(node)
            if around:
                found[around[-1], stage] = None
        return list(found)

    def dim_along(self, path: str, dim: int) -> int | None:
        """The dim of what comes into a module that is *dim* of the batch; None if nothing has it."""
        around = self.traced.paths
        members = [node for node in self.traced.captured.graph.nodes if path in around.get(node, ())] if path else None
        return dim_along(self.traced.captured, self.traced.analysis, members, dim)

    def compile(self, plan: Plan, cluster: Cluster) -> Compilation:
        """Compile *plan* for *cluster* as it would be run; its workload has the times for schedules that depend on
        them.

        Raises:
            WhaleError: the model cannot be run so.
        """
        bare = plan.model_copy(update={"model": None, "prediction": None})  # known to be of this model
        options = replace(self.options, micro_batches=plan.micro_batches, schedule=plan.schedule, plan=bare)
        scopes = scopes_by(self.model, plan.annotations)
        return compile_traced(self.traced, cluster, options, device=_device(cluster), scopes=scopes)

    def compile_annotated(
        self, annotations: Mapping[str, Sequence[Annotation]], cluster: Cluster, *, rows: int, micro_batches: int
    ) -> Compilation:
        """Compile the model under *annotations*, which may choose devices, for a batch of *rows* rows.

        Raises:
            WhaleError: the model cannot be run so.
        """
        plan = Plan(world_size=len(cluster.devices), batch=rows, micro_batches=micro_batches)
        options = replace(self.options, micro_batches=micro_batches, plan=plan)
        try:
            annotate(self.model, annotations)
            scopes = module_scopes(self.model)
        finally:
            annotate(self.model, {})
        return compile_traced(self.traced, cluster, options, device=_device(cluster), scopes=scopes)

    def predict(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Prediction, Workload]:
        """Compile *plan* for *cluster*, and predict its step.

        Raises:
            WhaleError: the model cannot be run so.
        """
        found = self.predicted(plan, profile, cluster).predicted
        return found.prediction, found.workload

    def predicted(self, plan: Plan, profile: ModelProfile, cluster: Cluster) -> PredictedPlan:
        """The same, with what was compiled and the costs.

        Raises:
            WhaleError: the model cannot be run so.
        """
        compilation = self.compile(plan, cluster)
        costs = Costs(
            profile=profile,
            cluster=cluster,
            precision=self.precision,
            micro_batches=plan.micro_batches,
            device=_device(cluster),
            optimizer=self.optimizer,
        )
        found = predict(
            compilation, costs, schedule=plan.schedule, memory_of=partial(brief_peak_memory, known=self._known)
        )
        return PredictedPlan(plan, compilation, costs, found)

    def forked(self) -> None:
        """Prepare a forked process: threads that torch has started are not there."""
        torch.set_num_threads(1)


def _device(cluster: Cluster) -> Device:
    """Device type for which a plan is compiled."""
    return "cpu" if any(device.type.is_processor for device in cluster.devices) else "cuda"


def scopes_by(model: nn.Module, annotations: Mapping[str, Sequence[str]]) -> dict[str, ScopePath]:
    """The scopes of the model's modules under annotations in the form of a plan; the model is not changed.

    Raises:
        AnnotationError: they do not fit the model.
    """
    try:
        annotate(
            model, {key: [Annotation(strategy=parse_strategy(t)) for t in texts] for key, texts in annotations.items()}
        )
        return module_scopes(model)
    finally:
        annotate(model, {})


def take_scopes(model: nn.Module) -> dict[str, ScopePath]:
    """The scopes of the modules annotated by the model's code, whose marks are removed."""
    found = module_scopes(model)
    forget(model)
    return found
