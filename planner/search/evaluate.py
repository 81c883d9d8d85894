"""Score a plan of the search's space: refuse what is none, and evaluate the rest as every plan is evaluated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from whale.errors import UsageError
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.ir.strategy import Reduce
from whale.planner.cost.optimizers import Optimizer
from whale.planner.cost.plan import PlanCost
from whale.planner.cost.stack import WHALE, Stack
from whale.planner.cost.stage import CostModel
from whale.planner.cost.stage_cost import Memo
from whale.planner.search.problem import Candidate, SearchSettings, StageChoice

__all__ = ["evaluate", "fitted", "prices_of", "score"]


def prices_of(
    profile: ModelProfile, cluster: Cluster, *, batch: int, settings: SearchSettings, known: Memo | None = None
) -> CostModel:
    """Return the prices by which a search goes; *known* are those of an earlier one for the same model."""
    return CostModel.of(
        profile,
        cluster,
        precision=settings.precision,
        optimizer=settings.optimizer,
        batch=batch,
        gradient_dtype=settings.gradient_dtype,
        step_in_backward=settings.step_in_backward,
        reduce=settings.reduce or "mean",
        known=known,
    )


def evaluate(
    profile: ModelProfile,
    cluster: Cluster,
    stages: Sequence[StageChoice],
    *,
    micro_batches: int,
    schedule: str = "1f1b",
    precision: str = "fp32",
    stack: Stack = WHALE,
    optimizer: Optimizer = "adamw",
    gradient_dtype: str | None = None,
    step_in_backward: bool = False,
    reduce: Reduce = "mean",
    known: Memo | None = None,
) -> Candidate:
    """Score a plan, whether it fits in memory or not.

    Complexity: linear in ranks, to see which are alike; quadratic in stages for the step, whatever the micro-batches.

    Raises:
        UsageError: the stages are no chain, a mesh does not fit its ranks, or the profile does not know a degree.
    """
    prices = CostModel.of(
        profile,
        cluster,
        precision=precision,
        stack=stack,
        optimizer=optimizer,
        batch=micro_batches * sum(stages[0].rows) if stages else 0,
        gradient_dtype=gradient_dtype,
        step_in_backward=step_in_backward,
        reduce=reduce,
        known=known,
    )
    return score(prices, stages, micro_batches=micro_batches, schedule=schedule)


def score(
    prices: CostModel,
    stages: Sequence[StageChoice],
    *,
    micro_batches: int,
    schedule: str = "1f1b",
    batch: int | None = None,
) -> Candidate:
    """Evaluate with existing costs; *batch*: rows of the step if the last micro-batch is not full."""
    _check(prices, stages)
    plan = PlanCost.of_stages(prices, stages, micro_batches, schedule)
    rows = sum(stages[0].rows)
    batch = micro_batches * rows if batch is None else batch
    workload = plan.workload(batch / rows - micro_batches + 1)
    return Candidate(
        stages=tuple(stages),
        micro_batches=micro_batches,
        schedule=schedule,
        prediction=plan.prediction(workload, batch),
        workload=workload,
    )


def fitted(
    prices: CostModel, stages: Sequence[StageChoice], *, micro_batches: int, schedule: str, batch: int
) -> Candidate:
    """Evaluate like `score`; where equal shares of the state do not fit on devices of several types, those that do."""
    found = score(prices, stages, micro_batches=micro_batches, schedule=schedule, batch=batch)
    if found.prediction.fits or not any(stage.level for stage in stages):
        return found
    shares = PlanCost.of_stages(prices, stages, micro_batches, schedule).fitting_shares()
    changed = [
        stage if stage.state is None or not own else replace(stage, state=replace(stage.state, shares=own))
        for stage, own in zip(stages, shares, strict=True)
    ]
    if changed == list(stages):
        return found
    other = score(prices, changed, micro_batches=micro_batches, schedule=schedule, batch=batch)
    return other if other.prediction.fits else found


def _check(prices: CostModel, stages: Sequence[StageChoice]) -> None:
    num_layers, used = len(prices.profile.layers), Counter(rank for stage in stages for rank in stage.ranks)
    bounds = [0, *(stage.last for stage in stages)]
    if bounds[:-1] != [stage.first for stage in stages] or bounds[-1] != num_layers or sorted(set(bounds)) != bounds:
        cuts = ", ".join(f"[{stage.first}, {stage.last})" for stage in stages) or "none"
        raise UsageError(f"stages take the layers 0 to {num_layers - 1} one after the other, unlike {cuts}")
    for index, stage in enumerate(stages):
        if stage.data * stage.size != len(stage.ranks) or len(stage.rows) != stage.data:
            raise UsageError(
                f"stage {index} has a mesh of {stage.data} x {stage.size} with {len(stage.ranks)} ranks and rows for "
                f"{len(stage.rows)} data slices"
            )
        if sum(stage.rows) != sum(stages[0].rows) or min(stage.rows) < 0 or not any(stage.rows):
            raise UsageError(
                f"stage {index} takes {sum(stage.rows)} rows of a micro-batch, stage 0 {sum(stages[0].rows)}; all take "
                "the same, at least one"
            )
        if stage.tensor not in prices.tensor_degrees:
            known = ", ".join(map(str, prices.tensor_degrees)) or "none"
            raise UsageError(f"stage {index}: {prices.profile.name} has no tensor degree {stage.tensor}, only {known}")
        if stage.expert not in (1, *prices.expert_degrees) or 1 not in (stage.tensor, stage.expert):
            known = ", ".join(map(str, prices.expert_degrees)) or "none"
            what = f"{stage.expert} at tensor degree {stage.tensor}"
            raise UsageError(f"stage {index}: {prices.profile.name} has no expert degree {what}, only {known}")
        cut = stage.tensor, stage.context
        if stage.context > 1 and (cut not in prices.cuts or stage.expert > 1):
            known = ", ".join(f"{context} at tensor degree {tensor}" for tensor, context in prices.cuts) or "none"
            what = f"{stage.context} at tensor degree {stage.tensor}"
            raise UsageError(f"stage {index}: {prices.profile.name} has no context degree {what}, only {known}")
    twice = next((rank for rank, count in used.items() if count > 1), None)
    wrong = next((rank for rank in used if not 0 <= rank < len(prices.cluster.devices)), None)
    if twice is not None or wrong is not None:
        what = f"rank {twice} is in two places" if twice is not None else f"rank {wrong} does not exist"
        raise UsageError(f"{what}; every rank is used once at most")
