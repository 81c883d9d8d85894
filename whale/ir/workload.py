"""Workload of the simulator: the times of the stages' tasks on each rank, messages, and gradient reductions of a step.

Pure numbers, in seconds and bytes, made by the planner from a profile and a cluster, or by measuring. It is stored in a
plan's prediction, so that ``whale simulate``, ``explain`` and ``report`` need neither the model nor torch. It knows
neither how the numbers were computed nor the order of tasks: the schedule orders them, and the programs of the ranks
are projected from it, as for the executor.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from whale.ir.record import Record

__all__ = [
    "Boundary",
    "DeviceMemory",
    "LinkTime",
    "NodeMemory",
    "Prediction",
    "Reduction",
    "StageWork",
    "Transfer",
    "Workload",
]

Figure = Annotated[float, Field(ge=0, le=1e42, allow_inf_nan=False)]
"""Up to more seconds than the largest figures of a profile take on the slowest device; sums of them are finite."""
Seconds = Figure
Bytes = Annotated[int, Field(ge=0, le=2**256)]
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
        kept_bytes: saved activations of a micro-batch from its forward to its backward.
        forward_peak_bytes, backward_peak_bytes: peak bytes of a task beyond the saved activations before it.
        gathered: seconds from the beginning of the step before which the first forward cannot end, because it waits for
            parameters that are gathered once a step; empty: it waits for none.
        own: seconds of ``forward`` that come first and need nothing of other stages; empty: none.
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
    gathered: tuple[Seconds, ...] = ()
    own: tuple[Seconds, ...] = ()


class Transfer(Record):
    """Bytes that one rank sends to another for each micro-batch."""

    source: Rank
    target: Rank
    bytes: Bytes


class Boundary(Record):
    """Transfers from one stage to a later one for each micro-batch; the gradients return as ``backward``."""

    source_stage: Annotated[int, Field(ge=0)]
    target_stage: Annotated[int, Field(ge=0)]
    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...] = ()


class Reduction(Record):
    """A bucket of gradients that ``ranks`` reduce once the backwards of ``stages`` are done; ``seconds`` on a free
    network. ``ready`` is the fraction of the last backward after which it can start (1: all of it); ``slowdown`` is the
    slowdown of overlapped computation on each of ``ranks`` (0.1 is 10%; empty: the workload's ``overlap_slowdown``);
    ``stretch`` is the slowdown of the reduction while any of them computes."""

    ranks: tuple[Rank, ...]
    stages: tuple[Annotated[int, Field(ge=0)], ...]
    bytes: Bytes
    seconds: Seconds
    ready: Annotated[float, Field(ge=0, le=1)] = 1.0
    slowdown: tuple[Seconds, ...] = ()
    stretch: Seconds = 0.0


class LinkTime(Record):
    """Time of a message between two ranks: ``latency`` + bytes / ``bandwidth`` (bytes per second).

    Messages that name a common ``resource`` (a node's network adapter) share its bandwidth.
    """

    source: Rank
    target: Rank
    latency: Seconds
    bandwidth: Annotated[float, Field(ge=1e-6, allow_inf_nan=False)]
    resources: tuple[str, ...] = ()


class Workload(Record):
    """All costs of a step.

    Attributes:
        world_size: ranks.
        micro_batches: of the step.
        last_share: rows of the last micro-batch, relative to the others.
        schedule: a name in `whale.planner.schedules.orders`.
        stages: in the order of the pipeline.
        boundaries: between stages.
        reductions: of gradients, in the order in which they are launched.
        links: for each pair of ranks with point-to-point messages.
        update: seconds of the optimizer on each rank.
        overhead: seconds of a step that belong to nothing above (the loss's sum, the launch of the step).
        overlap_slowdown: slowdown of computation during a collective (0.1 is 10%).
        runs_ahead: whether processes run ahead of their devices, as with CUDA, so that receives are posted long before
            they are needed; on a CPU the executor posts them between tasks, limited by its credit.
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
    """Peak memory of a step on one device by category.

    ``activations`` are those of all micro-batches in flight, ``buffers`` of communication, ``workspace`` temporary
    buffers of operators, ``framework`` runtime and driver. ``host_state`` and ``host_activations`` are in the memory of
    its host, and no part of ``total``.
    """

    rank: Rank
    device: str
    capacity: Annotated[int, Field(gt=0, le=2**256)]
    parameters: Bytes = 0
    gradients: Bytes = 0
    optimizer: Bytes = 0
    activations: Bytes = 0
    buffers: Bytes = 0
    workspace: Bytes = 0
    framework: Bytes = 0
    host_state: Bytes = 0
    host_activations: Bytes = 0

    @property
    def share(self) -> float:
        """The part of the capacity that is needed; above 1 where it does not fit."""
        return self.total / self.capacity

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


class NodeMemory(Record):
    """Peak memory of a step in the memory of a node itself, of all its ranks together: their ``state`` and
    ``activations``, and what ``processes`` take."""

    node: str
    capacity: Bytes
    state: Bytes = 0
    activations: Bytes = 0
    processes: Bytes = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.state + self.activations + self.processes


class Prediction(Record):
    """Prediction of a plan's step time and memory.

    Attributes:
        step_seconds: with ``step_seconds_interval``, which contains the step with a probability of 0.9.
        breakdown: seconds of the busiest rank, by ``compute``, ``communication`` (inside stages), ``pipeline``
            (waiting for other stages: bubble), ``transfer`` (exposed sends), ``stall`` (waiting for slower devices in
            its group), ``reduction`` (of gradients, exposed), ``update``, ``overhead``; they sum to ``step_seconds``.
            The busiest rank is the one whose tasks take longest, the lowest of several.
        breakdown_rank: that rank; None in plans of earlier versions, which have another's breakdown.
        memory: of every device, by rank. (A prediction of a large world may keep one device of each kind.)
        hosts: memory of nodes on which ranks keep state or activations, one of each kind.
        fits: whether it fits in the memory of every device, and of every node.
        source: ``measured`` if layers were timed on these devices, else ``modelled``.
        bubble: fraction of the devices' time in which they wait for other stages.
        flops: of a step of the model (without recomputation); ``mfu`` is their fraction of the devices' peak.
    """

    step_seconds: Seconds
    step_seconds_interval: tuple[Seconds, Seconds]
    breakdown: dict[str, Seconds] = Field(default_factory=dict)
    breakdown_rank: Rank | None = None
    memory: tuple[DeviceMemory, ...] = ()
    hosts: tuple[NodeMemory, ...] = ()
    fits: bool = True
    source: Literal["measured", "modelled"] = "modelled"
    bubble: Annotated[float, Field(ge=0, le=1)] = 0.0
    flops: Figure = 0.0
    mfu: Figure = 0.0
