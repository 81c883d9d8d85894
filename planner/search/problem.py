"""Problem, settings and result of a search, as data.

It knows no prices and no algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from whale.errors import InfeasibleError, UsageError
from whale.ir.micro_batches import rows_of_micro_batch
from whale.ir.state import LEVELS, Align
from whale.ir.strategy import OFFLOADS, RECOMPUTES, REDUCES, STATE_ON_HOST, Experts, Offload, Recompute, Reduce
from whale.ir.workload import Prediction, Workload
from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.optimizers import Optimizer, costs_of
from whale.planner.schedules.orders import SCHEDULES

__all__ = [
    "MAX_BATCH",
    "PRICED",
    "Candidate",
    "Degrees",
    "Dropped",
    "Fixed",
    "Found",
    "Point",
    "Progress",
    "SearchSettings",
    "StageChoice",
    "Stopped",
]

PRICED = ("gpipe", "1f1b")
"""The schedules of which a search knows what a step takes without going through it."""

OF_ONE_STAGE = tuple(schedule for schedule in SCHEDULES if schedule != "interleaved")
"""Schedules for devices with one stage each, as in all plans of the search."""

MAX_BATCH = 2**40
"""Rows of a batch, as plans have them."""


@dataclass(frozen=True, kw_only=True)
class StageChoice(ChainStage):
    """A stage of a plan that Whale runs: whole rows, no context parallelism, and one of tensor and expert degree 1."""

    rows: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that was scored.

    Attributes:
        stages: in the order of the pipeline.
        micro_batches: of a step, the same for all stages.
        schedule: one of `PRICED`, as the search has it.
        prediction: of its step, by simulation; the memory of one device for each kind of data slice.
        workload: that was simulated, with one rank for each kind of data slice: the numbers are the cluster's.
    """

    stages: tuple[StageChoice, ...]
    micro_batches: int
    schedule: str
    prediction: Prediction
    workload: Workload


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A family of plans that was left out: what they have in common, why, and how many there were."""

    family: str
    reason: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """A plan that was looked at, for a drawing.

    Attributes:
        seconds: of a step.
        memory: of the fullest device, as a share of its capacity.
        label: the plan in short.
        reason: why it cannot be had; empty where it can.
    """

    seconds: float
    memory: float
    label: str
    reason: str = ""


class Stopped(InfeasibleError):
    """The search was asked to stop before it had a plan."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a search is: the best step so far (None: nothing fits yet), the bound below which none lies, plans that
    were scored, seconds since it began."""

    best_seconds: float | None
    bound_seconds: float
    tried: int
    elapsed: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a search.

    Attributes:
        candidates: the best plans that differ in more than a cut or a row, best first; at least one.
        near: plans on the meshes of a candidate with other numbers of micro-batches, best first.
        bound_seconds: no plan of the space takes less.
        dropped: what was left out, and why.
        points: plans that were looked at.
        tried: how many were scored.
        seconds: that the search took.
        default: of a thorough search, the result of the default search with which it began; None if that found none.
    """

    candidates: tuple[Candidate, ...]
    near: tuple[Candidate, ...]
    bound_seconds: float
    dropped: tuple[Dropped, ...]
    points: tuple[Point, ...]
    tried: int
    seconds: float
    default: Found | None = None

    @property
    def best(self) -> Candidate:
        """The fastest candidate."""
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """By how much the best plan's step could at most be shorter, as a part of it."""
        return max(0.0, 1 - self.bound_seconds / self.best.prediction.step_seconds)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees of the stages that hold layers [first, last); None: open. ``told`` is what fixes them, for messages."""

    first: int
    last: int
    data: int | None = None
    tensor: int | None = None
    expert: int | None = None
    told: str = ""

    def __str__(self) -> str:
        ways = [f"{name} degree {value}" for name in ("data", "tensor", "expert") if (value := getattr(self, name))]
        return self.told or f"{', '.join(ways)} of layers {self.first} to {self.last - 1}"


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Decisions fixed in advance, such as by partial annotations.

    Attributes:
        starts: layers that begin a stage, beside the first of the chain.
        uncut: ranges of layers [first, last) that no cut goes through.
        degrees: of ranges of layers.
        experts: how devices share the experts of a mixture.
    """

    starts: tuple[int, ...] = ()
    uncut: tuple[tuple[int, int], ...] = ()
    degrees: tuple[Degrees, ...] = ()
    experts: Experts | None = None

    def check(self, num_layers: int) -> None:
        """Refuse what contradicts itself or names layers that do not exist.

        Raises:
            UsageError: which, and why.
        """
        ranges = [*self.uncut, *((one.first, one.last) for one in self.degrees)]
        for first, last in ranges:
            if not 0 <= first < last <= num_layers:
                raise UsageError(f"layers [{first}, {last}) are fixed, but the chain has layers 0 to {num_layers - 1}")
        for start in self.starts:
            if not 0 <= start < num_layers:
                raise UsageError(
                    f"a stage is to start at layer {start}, but the chain has layers 0 to {num_layers - 1}"
                )
            for first, last in self.uncut:
                if first < start < last:
                    raise UsageError(
                        f"a stage is to start at layer {start}, within layers [{first}, {last}) of one stage"
                    )


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of a search: its space and its time.

    Attributes:
        precision: of the run, as `whale.planner.cost.precision` knows it.
        micro_batches: a number, or None: any; where it does not divide the batch, the last one has fewer rows.
        schedules: allowed ones. The search prices plans with `PRICED` ones; for others it searches as for ``1f1b``, and
            they are tried on compiled plans.
        max_stages: of the pipeline; None: as many as there are devices or layers.
        optimizer: that Whale runs.
        seed: of the refinement's random moves.
        time_limit: seconds after which the best so far is the answer.
        top: how many plans are wanted.
        fixed: what is decided already.
        recompute: what backwards compute again in all stages; ``auto``: nothing where a plan fits so, unless computing
            again is faster; else in each stage the least with which it does.
        zero: how much of their state replicas divide in all stages; ``auto``: nothing where a plan fits so, unless
            dividing it is faster; else in each stage the least with which it does.
        gradient_dtype: in which gradients are summed; None: in their own.
        step_in_backward: whether parameters are updated, and gradients freed, when these are summed.
        state_align: where stretches of it end, as `whale.ir.state.StateSharding` has it. They are equal; between
            devices of several types, if these do not fit so, by what their memory leaves.
        offload: what is in the memory of hosts, in all stages; ``auto``: nothing where a plan fits so, else in each
            stage the least with which it does.
        reduce: how replicas make one gradient of theirs, in all stages; None: the mean, which annotations may change.
        thorough: whether more of everything is tried, for some seconds more, up to the time limit.
    """

    precision: str = "fp32"
    micro_batches: int | None = None
    schedules: tuple[str, ...] = ("1f1b",)
    max_stages: int | None = None
    optimizer: Optimizer = "adamw"
    seed: int = 0
    time_limit: float = 10.0
    top: int = 5
    fixed: Fixed | None = None
    recompute: Recompute | Literal["auto"] = "auto"
    zero: Literal[0, 1, 2, 3, "auto"] = 0
    state_align: Align = "row"
    gradient_dtype: str | None = None
    step_in_backward: bool = False
    offload: Offload | Literal["auto"] = "none"
    reduce: Reduce | None = None
    thorough: bool = False

    @property
    def is_free(self) -> bool:
        """Whether nothing is fixed in advance."""
        return self.fixed in (None, Fixed())

    @property
    def way(self) -> tuple[Recompute, int, Offload]:
        """The rule of recompute, the level of state and the offload of plans that are looked for first."""
        offload: Offload = "none" if self.offload == "auto" else self.offload
        level = 0 if self.zero == "auto" else self.zero
        if offload in STATE_ON_HOST:
            level = max(1, level)
        return "none" if self.recompute == "auto" else self.recompute, level, offload

    @property
    def may_divide(self) -> bool:
        """Whether the search decides if replicas divide the states of the optimizer."""
        return self.zero == "auto" and not self.way[1] and self.reduce in (None, "mean")

    @property
    def priced(self) -> tuple[str, ...]:
        """The schedules by which plans are found."""
        return tuple(schedule for schedule in self.schedules if schedule in PRICED) or (PRICED[-1],)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """The schedules to try on the best plans."""
        return tuple(schedule for schedule in self.schedules if schedule not in PRICED)

    def check(self, batch: int) -> None:
        """Refuse settings that contradict each other or the batch.

        Raises:
            UsageError: which, and what to give in its place.
        """
        unknown = [schedule for schedule in self.schedules if schedule not in OF_ONE_STAGE]
        if unknown or not self.schedules:
            given = repr(unknown[0]) if unknown else "none"
            why = (
                " (its devices have several stages each; the search gives them one)" if "interleaved" in unknown else ""
            )
            raise UsageError(f"plans are searched with the schedules {', '.join(OF_ONE_STAGE)}, not {given}{why}")
        if batch > MAX_BATCH:
            raise UsageError(f"a batch has at most {MAX_BATCH:,} rows, not {batch:,}")
        for name, value in (
            ("batch", batch),
            ("micro_batches", self.micro_batches),
            ("max_stages", self.max_stages),
            ("top", self.top),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, but must be at least 1")
        if self.micro_batches is not None:
            rows_of_micro_batch(batch, self.micro_batches)
        if costs_of(self.optimizer).factored and self.state_align == "row" and (self.zero or self.offload != "none"):
            raise UsageError(
                f"{self.optimizer} computes with whole matrices, so that ranks own whole parameters: use state_align "
                "'parameter'"
            )
        if self.recompute not in ("auto", *RECOMPUTES):
            raise UsageError(f"recompute is {self.recompute!r}; use one of auto, {', '.join(RECOMPUTES)}")
        if self.zero not in ("auto", *LEVELS):
            raise UsageError(f"zero is {self.zero!r}; use one of auto, {', '.join(map(str, LEVELS))}")
        if self.offload not in ("auto", *OFFLOADS):
            raise UsageError(f"offload is {self.offload!r}; use one of auto, {', '.join(OFFLOADS)}")
        if self.reduce not in (None, *REDUCES):
            raise UsageError(f"reduce is {self.reduce!r}; use one of {', '.join(REDUCES)}")
        if not self.time_limit > 0:
            raise UsageError(f"the time limit is {self.time_limit} seconds, but must be positive")
