"""A training step as the simulator sees it: how long the tasks of stages take on each rank, what travels, what is
summed.

Pure numbers, in seconds and bytes, made by the planner from a profile and a cluster, or by measuring. It is stored in
a plan's prediction, so that ``whale simulate``, ``explain`` and ``report`` need neither the model nor torch. It knows
neither how the numbers came about nor the order of tasks: the order is the schedule's, and the programs of the ranks
are projected from it, the same that the executor runs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from whale.ir.record import Record

__all__ = ["Boundary", "DeviceMemory", "LinkTime", "Prediction", "Reduction", "StageWork", "Transfer", "Workload"]

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0)]
Rank = Annotated[int, Field(ge=0)]


class StageWork(Record):
    """One micro-batch on one stage. Lists have one entry for each of ``ranks``.

    Attributes:
        ranks: that compute the stage.
        together: groups of ranks whose collectives lie inside the tasks: they start a task together and end it with
            the slowest. Ranks in no group work alone.
        forward, backward: seconds of computation and of what does not overlap with it; ``weights`` is the part of
            ``backward`` that only weights need (what a W task takes).
        communication: seconds of ``forward`` + ``backward`` that are collectives inside the stage: for the breakdown.
        kept_bytes: what a micro-batch keeps from its forward to its backward.
        forward_peak_bytes, backward_peak_bytes: the most that a task needs beyond what is kept before it.
    """

    ranks: tuple[Rank, ...]
    together: tuple[tuple[Rank, ...], ...] = ()
    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    weights: tuple[Seconds, ...]
    communication: tuple[Seconds, ...] = ()
    kept_bytes: tuple[Bytes, ...]
    forward_peak_bytes: tuple[Bytes, ...] = ()
    backward_peak_bytes: tuple[Bytes, ...] = ()


class Transfer(Record):
    """Bytes that one rank sends to another for each micro-batch."""

    source: Rank
    target: Rank
    bytes: Bytes


class Boundary(Record):
    """What crosses from one stage to a later one for each micro-batch; the gradients come back as ``backward``."""

    source_stage: Annotated[int, Field(ge=0)]
    target_stage: Annotated[int, Field(ge=0)]
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...] = ()


class Reduction(Record):
    """A bucket of gradients that ``ranks`` sum once the backwards of ``stages`` are done; ``seconds`` on a free
    network. ``ready`` is how much of the last backward must be done before it can start (1: all of it); ``slowdown``
    is, of each of ``ranks``, how much longer computation takes beside it (0.1 is 10%; empty: the workload's
    ``overlap_slowdown``); ``stretch`` is how much longer it takes itself while any of them computes."""

    ranks: tuple[Rank, ...]
    stages: tuple[Annotated[int, Field(ge=0)], ...]
    bytes: Bytes
    seconds: Seconds
    ready: Annotated[float, Field(ge=0, le=1)] = 1.0
    slowdown: tuple[Seconds, ...] = ()
    stretch: Seconds = 0.0


class LinkTime(Record):
    """How long a message takes between two ranks: ``latency`` + bytes / ``bandwidth`` (bytes per second).

    Messages that name a common ``resource`` (a node's network adapter) share its bandwidth.
    """

    source: Rank
    target: Rank
    latency: Seconds
    bandwidth: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    resources: tuple[str, ...] = ()


class Workload(Record):
    """Everything that a step takes.

    Attributes:
        world_size: ranks.
        micro_batches: of the step.
        last_share: rows of the last micro-batch, as a share of those of the others.
        schedule: name, as `whale.planner.schedules.orders` knows it.
        stages: in the order of the pipeline.
        boundaries: between stages.
        reductions: of gradients, in the order in which they are launched.
        links: for each pair of ranks that exchange something point to point.
        update: seconds of the optimizer on each rank.
        overhead: seconds of a step that belong to nothing above (the loss's sum, the launch of the step).
        overlap_slowdown: how much longer computation takes while a collective runs beside it (0.1 is 10%).
        runs_ahead: whether the processes run ahead of their devices, as with CUDA, so that receives are posted long
            before they are needed; on a CPU the executor posts them between tasks, as far as its credit goes.
        blocking_transfers: whether a rank waits for its sends before its next task, and posts a receive only when it
            needs it, as Megatron-LM and DeepSpeed do; else messages travel while ranks compute, as in Whale's executor.
    """

    world_size: Annotated[int, Field(ge=1)]
    micro_batches: Annotated[int, Field(ge=1, le=2**40)]
    last_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    schedule: str = "1f1b"
    stages: tuple[StageWork, ...]
    boundaries: tuple[Boundary, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    links: tuple[LinkTime, ...] = ()
    update: tuple[Seconds, ...] = ()
    overhead: Seconds = 0.0
    overlap_slowdown: Seconds = 0.0
    runs_ahead: bool = True
    blocking_transfers: bool = False


class DeviceMemory(Record):
    """Bytes at the peak of a step on one device, by what they are for.

    ``activations`` are those of all micro-batches in flight, ``buffers`` are of communication, ``workspace`` is what
    operators need within themselves, ``framework`` what the runtime and the driver take.
    """

    rank: Rank
    device: str
    capacity: Bytes
    parameters: Bytes = 0
    gradients: Bytes = 0
    optimizer: Bytes = 0
    activations: Bytes = 0
    buffers: Bytes = 0
    workspace: Bytes = 0
    framework: Bytes = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.buffers
            + self.workspace
            + self.framework
        )


class Prediction(Record):
    """What a plan should give.

    Attributes:
        step_seconds: with ``step_seconds_interval``, in which the step lies with 9 chances in 10.
        breakdown: seconds of the rank that ends last, by ``compute``, ``communication`` (inside stages), ``pipeline``
            (waiting for other stages: bubble), ``transfer`` (exposed sends), ``stall`` (waiting for slower devices in
            its group), ``reduction`` (of gradients, exposed), ``update``, ``overhead``; they sum to ``step_seconds``.
        memory: of every device, by rank. (A prediction of a large world may keep one device of each kind.)
        fits: whether every device holds it.
        source: ``measured`` where layers were timed on these devices, else ``modelled``.
        bubble: share of the devices' time in which they wait for other stages.
        flops: of a step, as the model has them (no recomputation); ``mfu`` is their share of the devices' peak.
    """

    step_seconds: Seconds
    step_seconds_interval: tuple[Seconds, Seconds]
    breakdown: dict[str, Seconds] = Field(default_factory=dict)
    memory: tuple[DeviceMemory, ...] = ()
    fits: bool = True
    source: Literal["measured", "modelled"] = "modelled"
    bubble: Annotated[float, Field(ge=0, le=1)] = 0.0
    flops: Seconds = 0.0
    mfu: Seconds = 0.0
