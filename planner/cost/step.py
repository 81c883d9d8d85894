"""A training step predicted: seconds with their interval, where they go, MFU and memory.

The only place that makes a `Prediction`, and that knows what a step costs beside its tasks. The search, an estimate and
the prediction of a compiled plan make a `Workload` each, and get their prediction here, so they agree wherever their
workloads do. It knows no plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt

from whale.ir.cluster import DeviceType
from whale.ir.workload import DeviceMemory, NodeMemory, Prediction, Workload
from whale.planner.cost.precision import Precision
from whale.planner.cost.silicon import silicon_of
from whale.planner.simulation.recurrence import Timing, long_timing, settled_counts, settled_timing
from whale.planner.simulation.simulate import simulate

__all__ = ["AGREED_BYTES", "overlap_slowdown", "relative_error", "step", "step_overhead", "timing_of"]

COMPUTE_ERROR, LAUNCH_ERROR, COMMUNICATION_ERROR = 0.17, 0.3, 0.5
"""By how much, as a share of it, each part of a step may be off with 9 chances in 10: computation, what the host's
launches decide, and exposed communication. With each source of published runs left out in turn nine of ten of its runs
lie within what that gives (``python benchmarks/published.py --left-out``)."""

CROWDED, CROWDED_ERROR = 0.95, 0.08
"""The part of a device's memory beyond which the allocator may have to give blocks back and ask for others while the
device waits, and by how much more a step may then be off: published runs at the limit take up to 25% longer."""

UNLIKE = sqrt(2)
"""Factor on the interval of a step on mixed devices, whose errors are independent (assumed)."""

UNKNOWN_CHIP = 1.5
"""How much wider the interval is where nothing measured stands behind a chip's figures (assumed)."""

LOOP_SECONDS = 3e-3
"""Seconds of the loop around a step on the host of an accelerator: reading the loss, starting the next step. From
Sailor's runs of 1 and 32 micro-batches on A100. Processors do not wait."""

AGREED_BYTES = 16
"""Bytes of the all-reduce by which Whale's ranks compare their batches before a step."""

GPU_OVERLAP_SLOWDOWN = 0.126
"""How much longer computation takes while a collective runs beside it (Galvatron's coefficient for A100)."""

CPU_OVERLAP_SLOWDOWN = 0.5
"""The same on processors: gloo takes some 1.1 ns of processor time for a byte of an all-reduce whose wire time at
1 Gbit/s is 8 ns, so on a quarter of a core computation beside it takes half as long again
(benchmarks/testbed_noise.py)."""

MOST_TASKS = 400
"""Steps of more tasks are not simulated event by event where many plans are compared."""

MOST_TASKS_OF_ONE = 20_000
"""The same of a single plan: half a second."""


def step(
    timing: Timing,
    *,
    devices: Mapping[DeviceType, int],
    precision: Precision,
    flops: float,
    memory: Iterable[DeviceMemory],
    measured: bool,
    launched: float = 0.0,
    hosts: tuple[NodeMemory, ...] = (),
) -> Prediction:
    """Return the prediction of a step.

    Args:
        timing: of its workload, by `timing_of` or from a timeline.
        devices: how many of each type the cluster has, idle ones included.
        precision: of the products, for the peak that MFU is a share of.
        flops: of the model in the step, forward and backward, without recomputation.
        memory: of the devices.
        measured: whether all layers were measured on their devices.
        launched: the part of the tasks' time that the host's launches decide.
        hosts: memory of nodes on which ranks keep something.
    """
    seconds = timing.seconds
    found = tuple(memory)
    error = relative_error(devices, timing, measured=measured, launched=launched)
    if any(device.total > CROWDED * device.capacity for device in found):
        error += CROWDED_ERROR
    peak = sum(num * precision.rate(type_)[0] for type_, num in devices.items())
    return Prediction(
        step_seconds=seconds,
        step_seconds_interval=(seconds / (1 + error), seconds * (1 + error)),
        breakdown=timing.of_busiest,
        breakdown_rank=timing.busiest_rank,
        memory=found,
        hosts=hosts,
        fits=all(one.total <= one.capacity for one in found) and all(one.total <= one.capacity for one in hosts),
        source="measured" if measured else "modelled",
        bubble=min(1.0, timing.bubble),
        flops=flops,
        mfu=flops / seconds / peak if seconds else 0.0,
    )


def timing_of(workload: Workload, *, of_one: bool = False) -> Timing:
    """Return how long a step takes: by the simulator, if it has many tasks by that of two shorter ones, and if these
    have too by the recurrence that leads to the same where messages are no bottleneck. *of_one*: of a plan that is not
    compared with many others."""
    ranks, most = sum(len(stage.ranks) for stage in workload.stages), MOST_TASKS_OF_ONE if of_one else MOST_TASKS
    if 2 * ranks * workload.micro_batches <= most:
        return Timing.of(simulate(workload))
    if 2 * ranks * sum(settled_counts(workload)) <= most:
        return settled_timing(workload)
    return long_timing(workload)


def step_overhead(device_types: Iterable[DeviceType], agreeing: float = 0.0) -> float:
    """Return the seconds of a step that belong to no task: the host's loop, and *agreeing*, the all-reduce of
    `AGREED_BYTES` in which Whale's ranks compare their batches.

    >>> step_overhead([], agreeing=1e-4)
    0.0001
    """
    return agreeing + (LOOP_SECONDS if any(not type_.is_processor for type_ in device_types) else 0.0)


def overlap_slowdown(device_types: Iterable[DeviceType]) -> float:
    """Return how much longer computation takes beside a collective where that was not measured."""
    return CPU_OVERLAP_SLOWDOWN if all(type_.is_processor for type_ in device_types) else GPU_OVERLAP_SLOWDOWN


def relative_error(
    device_types: Iterable[DeviceType], timing: Timing, *, measured: bool, launched: float = 0.0
) -> float:
    """Return how far off a step may be, as a share of its time: the errors of its parts, weighted by their shares."""
    types = {type_.name: type_ for type_ in device_types}
    calibrated = measured or all(silicon_of(type_).calibrated for type_ in types.values())
    exposed = sum(timing.breakdown.get(part, 0.0) for part in ("communication", "transfer", "reduction"))
    share = min(1.0, exposed / timing.seconds) if timing.seconds else 0.0
    computed = launched * LAUNCH_ERROR + (1 - launched) * COMPUTE_ERROR * (1.0 if calibrated else UNKNOWN_CHIP)
    return ((1 - share) * computed + share * COMMUNICATION_ERROR) * (UNLIKE if len(types) > 1 else 1.0)
