"""What a compiled step should take: seconds, by simulating its workload, and bytes on every device.

Nothing is allocated and no process group is needed. What the step consists of is in `whale.predict.workload`, what its
devices hold in `whale.predict.device_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from whale.compile.compile import Compilation
from whale.ir.profile import LayerKind
from whale.ir.workload import Prediction, Workload
from whale.planner.cost.estimate import relative_error
from whale.planner.cost.precision import precision_named
from whale.planner.simulation.simulate import simulate_alike
from whale.planner.simulation.timeline import Timeline
from whale.predict.costs import Costs
from whale.predict.device_memory import device_memory, occupancies
from whale.predict.layer_parts import stage_layers
from whale.predict.peak_memory import Occupancy, occupancy
from whale.predict.workload import workload_of
from whale.runtime.random import Clock

__all__ = ["Predicted", "predict"]


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A prediction with the numbers that it was made from; the timeline is of one rank of each kind."""

    prediction: Prediction
    workload: Workload
    timeline: Timeline


def predict(
    compilation: Compilation,
    costs: Costs,
    *,
    schedule: str,
    clock: Clock | None = None,
    held_by: Callable[..., Occupancy] = occupancy,
) -> Predicted:
    """What the compiled step should take on the cluster of *costs*.

    *held_by* finds the bytes of a rank: `occupancy`, or `whale.predict.peak_memory.brief_occupancy` where time matters.

    Raises:
        UsageError: the profile is not of this model, or the cluster does not say how ranks are linked.
    """
    layers = stage_layers(compilation, costs.profile)
    held = occupancies(
        compilation,
        schedule=schedule,
        optimizer=costs.optimizer,
        device=costs.device,
        clock=clock,
        held_by=held_by,
    )
    workload, measured = workload_of(compilation, costs, layers, held, schedule)
    timeline = simulate_alike(workload)
    memory = tuple(device_memory(costs.cluster, rank, held[rank]) for rank in sorted(held))
    seconds = timeline.step_seconds
    source: Literal["measured", "modelled"] = "measured" if measured else "modelled"
    error = relative_error(costs.cluster, measured=measured)
    flops = 3.0 * sum(compilation.rows) * sum(map(_forward_flops, costs.profile.chain()))
    peak = sum(precision_named(costs.precision).rate(device.type)[0] for device in costs.cluster.devices)
    prediction = Prediction(
        step_seconds=seconds,
        step_seconds_interval=(seconds * (1 - error), seconds * (1 + error)),
        breakdown={str(part): spent for part, spent in timeline.breakdown.items()},
        memory=memory,
        fits=all(device.total <= device.capacity for device in memory),
        source=source,
        bubble=min(1.0, timeline.bubble),
        flops=flops,
        mfu=flops / seconds / peak if seconds else 0.0,
    )
    return Predicted(prediction=prediction, workload=workload, timeline=timeline)


def _forward_flops(kind: LayerKind) -> float:
    """Multiplications and additions of a layer's products for a row."""
    variant = next((one for one in kind.variants if one.tensor_degree == 1), None)
    if variant is None:
        return 0.0
    return sum(kernel.count * kernel.flops(1) for kernel in variant.forward if kernel.kind != "memory")
