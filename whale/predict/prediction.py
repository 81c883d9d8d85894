"""Prediction of a compiled step: seconds, by simulating its workload, and bytes on every device.

Nothing is allocated and no process group is needed. `whale.predict.workload` has the times of the step,
`whale.predict.device_memory` the memory of its devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from whale.compile.compilation import Compilation
from whale.ir.cluster import Cluster
from whale.ir.workload import DeviceMemory, Prediction, Workload
from whale.planner.cost.hosts import Held, node_memories
from whale.planner.cost.layers import forward_flops
from whale.planner.cost.optimizers import Optimizer
from whale.planner.cost.step import step
from whale.planner.simulation.recurrence import Timing
from whale.planner.simulation.simulate import simulate_alike
from whale.planner.simulation.timeline import Timeline
from whale.predict.costs import Costs
from whale.predict.device_memory import bytes_of_communicators, device_memory, peak_memories
from whale.predict.dry_step import Device
from whale.predict.layer_parts import stage_layers
from whale.predict.peak_memory import PeakMemory, brief_peak_memory, peak_memory
from whale.predict.workload import workload_of

__all__ = ["Predicted", "predict", "predicted_memory"]


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A prediction with the numbers that it was computed from; the timeline has one rank of each kind."""

    prediction: Prediction
    workload: Workload
    timeline: Timeline


def predict(
    compilation: Compilation,
    costs: Costs,
    *,
    schedule: str,
    memory_of: Callable[..., PeakMemory] = peak_memory,
) -> Predicted:
    """Predict the compiled step on the cluster of *costs*.

    *memory_of* computes the bytes of a rank: `peak_memory`, or the faster
    `whale.predict.peak_memory.brief_peak_memory`.

    Raises:
        UsageError: the profile is not of this model, or the cluster does not say how ranks are linked.
    """
    layers = stage_layers(compilation, costs.profile)
    options: dict[str, Any] = {"schedule": schedule, "optimizer": costs.optimizer, "device": costs.device}
    held = peak_memories(compilation, **options, memory_of=memory_of)
    workload, measured = workload_of(compilation, costs, layers, held, schedule)
    timeline = simulate_alike(workload)
    memory = _on_devices(compilation, costs.cluster, held)
    on_hosts = {one.rank: Held(one.host_state, one.host_activations) for one in memory}
    prediction = step(
        Timing.of(timeline),
        devices=Counter(device.type for device in costs.cluster.devices),
        precision=costs.number,
        flops=3.0 * sum(compilation.rows) * sum(map(forward_flops, costs.profile.chain())),
        memory=memory,
        hosts=node_memories(costs.cluster, on_hosts),
        measured=measured,
    )
    return Predicted(prediction=prediction, workload=workload, timeline=timeline)


def predicted_memory(
    compilation: Compilation,
    cluster: Cluster,
    *,
    schedule: str,
    optimizer: Optimizer,
    device: Device,
    memory_of: Callable[..., PeakMemory] = brief_peak_memory,
) -> tuple[DeviceMemory, ...]:
    """Predict what every device of *cluster* holds in the compiled step, as `predict` does; no profile is needed."""
    options: dict[str, Any] = {"schedule": schedule, "optimizer": optimizer, "device": device}
    held = peak_memories(compilation, **options, memory_of=memory_of)
    return _on_devices(compilation, cluster, held)


def _on_devices(compilation: Compilation, cluster: Cluster, held: Mapping[int, PeakMemory]) -> tuple[DeviceMemory, ...]:
    used = bytes_of_communicators(compilation)
    return tuple(device_memory(cluster, rank, held[rank], used[rank]) for rank in sorted(held))
