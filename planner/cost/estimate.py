"""Estimate of a configuration of any degrees on a cluster: step time with its breakdown and interval, and memory.

It makes the uniform plan that the degrees name, and evaluates it as the search evaluates its plans. Stacks other than
Whale's have their own kernels, states and collectives (`whale.planner.cost.stack`). It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.ir.workload import Prediction, Workload
from whale.planner.balance.by_speed import boundless, cuts_by_speed, rows_by_speed
from whale.planner.cost.calibration import CALIBRATION, Calibration
from whale.planner.cost.configuration import Configuration, Layout, even_cuts, require_parts
from whale.planner.cost.layers import attention_is_fused
from whale.planner.cost.plan import PlanCost
from whale.planner.cost.precision import precision_named
from whale.planner.cost.uniform import Stages, stack_of

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A prediction, and what it was made from.

    Attributes:
        prediction: step time, memory, breakdown.
        layout: of stages and replicas on devices.
        cuts: the layers of every stage of the schedule.
        rows: samples of a micro-batch on every replica.
        workload: of the ranks that stand for all.
        tokens_per_second: of all devices together.
        assumptions: what was not given and how it was taken, in the user's words.
    """

    prediction: Prediction
    layout: Layout
    cuts: tuple[range, ...]
    rows: tuple[float, ...]
    workload: Workload
    tokens_per_second: float
    assumptions: tuple[str, ...] = ()


def estimate(
    profile: ModelProfile, cluster: Cluster, configuration: Configuration, calibration: Calibration = CALIBRATION
) -> Estimate:
    """Predict a training step.

    Complexity: linear in layers, stages x micro-batches, and kinds of replicas; independent of the number of equal
    replicas.

    Raises:
        UsageError: the configuration contradicts itself, the cluster or the model.
    """
    configuration, taken = _with_sequence_parallelism(configuration, cluster)
    layout = Layout.of(configuration, cluster)
    require_parts(profile, configuration)
    stages = Stages.of(profile, layout, stack=stack_of(configuration, layout.data, calibration))
    cuts, rows, assumptions = _balanced(stages)
    schedule = configuration.schedule
    if schedule == "1f1b" and configuration.virtual_stages > 1:
        schedule = "interleaved"
    own = stages.plan(cuts, rows)
    plan = PlanCost.of_stages(stages.prices, own, layout.num_micro_batches, schedule)
    if configuration.auto_shares and any(device.total > device.capacity for device in plan.memory()):
        shared = zip(own, plan.fitting_shares(), strict=True)
        own = [
            replace(stage, state=replace(stage.state, shares=shares)) if stage.state is not None else stage
            for stage, shares in shared
        ]
        plan = PlanCost.of_stages(stages.prices, own, layout.num_micro_batches, schedule)
    workload = plan.workload()
    prediction = plan.prediction(workload, configuration.batch, of_one=True)
    return Estimate(
        prediction=prediction,
        layout=layout,
        cuts=cuts,
        rows=rows,
        workload=workload,
        tokens_per_second=configuration.batch * profile.row_tokens / prediction.step_seconds,
        assumptions=taken + assumptions,
    )


def _with_sequence_parallelism(configuration: Configuration, cluster: Cluster) -> tuple[Configuration, tuple[str, ...]]:
    """The configuration with what it leaves open decided, and that in words."""
    if configuration.sequence_parallel is not None:
        return configuration, ()
    if configuration.stack == "whale":
        return replace(configuration, sequence_parallel=False), ()
    precision, given = precision_named(configuration.precision), configuration.attention
    fused = given == "fused" or (
        given == "auto" and all(attention_is_fused(device.type, precision) for device in cluster.devices)
    )
    on = fused and configuration.tensor > 1
    said = "the tensor group divides norms too, as where attention is fused (--no-sequence-parallel: it does not)"
    return replace(configuration, sequence_parallel=on), (said,) if on else ()


def _balanced(stages: Stages) -> tuple[tuple[range, ...], tuple[float, ...], tuple[str, ...]]:
    """Layers of the stages and rows of the replicas; by speed alone where nothing fits, which is then said."""
    layout = stages.layout
    if layout.configuration.balance == "even":
        even = layout.configuration.batch / (layout.data * layout.num_micro_batches)
        return even_cuts(stages.profile, layout), (even,) * layout.data, ()
    try:
        cuts = cuts_by_speed(stages)
        return cuts, rows_by_speed(stages, cuts), ()
    except InfeasibleError as error:
        free = boundless(stages)
        cuts = cuts_by_speed(free)
        return cuts, rows_by_speed(free, cuts), (f"balanced by speed alone, because it does not fit: {error}",)
