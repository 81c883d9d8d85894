"""Prediction of a compiled step: seconds, by simulating its workload, and bytes on every device.

Nothing is allocated and no process group is needed. `whale.predict.workload` has the times of the step,
`whale.predict.device_memory` the memory of its devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from whale.compile.compilation import Compilation
from whale.ir.workload import Prediction, Workload
from whale.planner.cost.layers import forward_flops
from whale.planner.cost.precision import precision_named
from whale.planner.cost.step import step
from whale.planner.simulation.recurrence import Timing
from whale.planner.simulation.simulate import simulate_alike
from whale.planner.simulation.timeline import Timeline
from whale.predict.costs import Costs
from whale.predict.device_memory import device_memory, peak_memories
from whale.predict.layer_parts import stage_layers
from whale.predict.peak_memory import PeakMemory, peak_memory
from whale.predict.workload import workload_of
from whale.runtime.random import RNGPosition

__all__ = ["Predicted", "predict"]


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
    clock: RNGPosition | None = None,
    memory_of: Callable[..., PeakMemory] = peak_memory,
) -> Predicted:
    """Predict the compiled step on the cluster of *costs*.

    *memory_of* computes the bytes of a rank: `peak_memory`, or the faster
    `whale.predict.peak_memory.brief_peak_memory`.

    Raises:
        UsageError: the profile is not of this model, or the cluster does not say how ranks are linked.
    """
    layers = stage_layers(compilation, costs.profile)
    held = peak_memories(
        compilation,
        schedule=schedule,
        optimizer=costs.optimizer,
        device=costs.device,
        clock=clock,
        memory_of=memory_of,
    )
    workload, measured = workload_of(compilation, costs, layers, held, schedule)
    timeline = simulate_alike(workload)
    memory = tuple(device_memory(costs.cluster, rank, held[rank]) for rank in sorted(held))
    prediction = step(
        Timing.of(timeline),
        devices=Counter(device.type for device in costs.cluster.devices),
        precision=precision_named(costs.precision),
        flops=3.0 * sum(compilation.rows) * sum(map(forward_flops, costs.profile.chain())),
        memory=memory,
        measured=measured,
    )
    return Predicted(prediction=prediction, workload=workload, timeline=timeline)
