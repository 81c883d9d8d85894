"""What a configuration of any degrees gives on a cluster: step time with its breakdown and interval, and memory.

Stages are priced by `whale.planner.cost.stage`; the pipeline is simulated with the action list that ranks run, one
rank for each stage and each kind of replica. It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.ir.workload import Boundary, DeviceMemory, LinkTime, Prediction, Reduction, StageWork, Transfer, Workload
from whale.planner.balance.by_speed import boundless, cuts_by_speed, rows_by_speed
from whale.planner.cost.configuration import Configuration, Layout, even_cuts, require_parts
from whale.planner.cost.layers import attention_is_fused, forward_flops
from whale.planner.cost.memory import FRAGMENTATION, framework_bytes
from whale.planner.cost.precision import precision_named
from whale.planner.cost.stage import StageCost, Stages
from whale.planner.cost.step import overlap_slowdown, step, step_overhead
from whale.planner.network.communication import send
from whale.planner.network.topology import Topology
from whale.planner.simulation.recurrence import Timing
from whale.planner.simulation.simulate import simulate
from whale.planner.simulation.timeline import Timeline

__all__ = ["Estimate", "estimate"]

Costs = dict[tuple[int, int], StageCost]
"""By stage of the schedule and replica."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A prediction, and what it was made from.

    Attributes:
        prediction: step time, memory, breakdown.
        layout: of stages and replicas on devices.
        cuts: the layers of every stage of the schedule.
        rows: samples of a micro-batch on every replica.
        workload, timeline: of the representative ranks that were simulated.
        tokens_per_second: of all devices together.
        assumptions: what was not given and how it was taken, in the user's words.
    """

    prediction: Prediction
    layout: Layout
    cuts: tuple[range, ...]
    rows: tuple[float, ...]
    workload: Workload
    timeline: Timeline
    tokens_per_second: float
    assumptions: tuple[str, ...] = ()


def estimate(profile: ModelProfile, cluster: Cluster, configuration: Configuration) -> Estimate:
    """Predict a training step.

    Complexity: linear in layers, stages x micro-batches, and kinds of replicas; independent of the number of equal
    replicas.

    Raises:
        UsageError: the configuration contradicts itself, the cluster or the model.
    """
    configuration, taken = _with_sequence_parallelism(configuration, cluster)
    layout = Layout.of(configuration, cluster)
    require_parts(profile, configuration)
    topology = Topology.of(cluster, profile.links)
    stages = Stages(profile=profile, layout=layout, topology=topology)
    cuts, rows, assumptions = _balanced(stages)
    replicas = _kinds_of_replicas(layout, rows)
    costs = {
        (index, replica): stages.cost(cuts[index], index % configuration.pipeline, replica, rows[replica])
        for index in range(layout.num_stages)
        for replica in replicas
    }
    workload = _workload(stages, cuts, replicas, costs)
    timeline = simulate(workload)
    memory = _memory(stages, cuts, replicas, costs, timeline)
    prediction = step(
        Timing.of(timeline),
        devices=Counter(device.type for device in cluster.devices),
        precision=stages.precision,
        flops=3 * configuration.batch * sum(forward_flops(kind, configuration.tensor) for kind in profile.chain()),
        memory=memory,
        measured=all(cost.measured for cost in costs.values()),
    )
    return Estimate(
        prediction=prediction,
        layout=layout,
        cuts=cuts,
        rows=rows,
        workload=workload,
        timeline=timeline,
        tokens_per_second=configuration.batch * profile.row_tokens / prediction.step_seconds,
        assumptions=taken + assumptions,
    )


def _with_sequence_parallelism(configuration: Configuration, cluster: Cluster) -> tuple[Configuration, tuple[str, ...]]:
    """The configuration with what it leaves open decided, and that in words."""
    if configuration.sequence_parallel is not None:
        return configuration, ()
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


def _kinds_of_replicas(layout: Layout, rows: tuple[float, ...]) -> list[int]:
    """One replica of each kind: those whose devices, nodes and rows are alike take the same time."""
    cluster, given = layout.cluster, layout.configuration
    found: dict[object, int] = {}
    for replica in range(layout.data):
        key: list[object] = [rows[replica]]
        for stage in range(given.pipeline):
            devices = [cluster.devices[rank] for rank in layout.devices_of(stage, replica)]
            after = layout.rank(stage=(stage + 1) % given.pipeline, replica=replica)
            nodes = Counter(device.node for device in devices)
            key.append((frozenset(device.type.name for device in devices), tuple(sorted(nodes.values()))))
            key.append(cluster.devices[after].node == devices[0].node)
        found.setdefault(tuple(key), replica)
    return list(found.values())


def _workload(stages: Stages, cuts: tuple[range, ...], replicas: list[int], costs: Costs) -> Workload:
    """The step of one rank for each stage of the pipeline and each kind of replica."""
    layout, given = stages.layout, stages.layout.configuration
    depth = given.pipeline

    def rank(kind: int, stage: int) -> int:
        return kind * depth + stage

    works = []
    for index in range(layout.num_stages):
        found = [costs[index, replica] for replica in replicas]
        works.append(
            StageWork(
                ranks=tuple(rank(kind, index % depth) for kind in range(len(replicas))),
                forward=tuple(cost.forward for cost in found),
                backward=tuple(cost.backward for cost in found),
                weights=tuple(cost.weights for cost in found),
                communication=tuple(cost.communication for cost in found),
                kept_bytes=tuple(round(cost.kept) for cost in found),
                forward_peak_bytes=tuple(round(cost.kept) for cost in found),
                backward_peak_bytes=tuple(round(cost.working) for cost in found),
            )
        )
    boundaries, links = [], {}
    for index in range(layout.num_stages - 1):
        here, there = index % depth, (index + 1) % depth
        transfers = []
        for kind, replica in enumerate(replicas):
            size = round(costs[index, replica].output / (given.tensor if _divided(given) else 1))
            pair = rank(kind, here), rank(kind, there)
            transfers.append(Transfer(source=pair[0], target=pair[1], bytes=size))
            for (source, target), (a, b) in ((pair, (here, there)), (pair[::-1], (there, here))):
                if (source, target) not in links:
                    links[source, target] = _link(stages, source, target, a, b, replica, size)
        back = tuple(Transfer(source=one.target, target=one.source, bytes=one.bytes) for one in transfers)
        boundaries.append(Boundary(source_stage=index, target_stage=index + 1, forward=tuple(transfers), backward=back))
    reductions, exposed = _reductions(stages, cuts, replicas, costs)
    update = [0.0] * (len(replicas) * depth)
    for stage in range(depth):
        layers = [index for part in cuts[stage::depth] for index in part]
        for kind, replica in enumerate(replicas):
            update[rank(kind, stage)] = stages.update(layers, stage, replica) + exposed[stage]
    types = {device.type for device in layout.cluster.devices}
    schedule = given.schedule
    if schedule == "1f1b" and given.virtual_stages > 1:
        schedule = "interleaved"
    return Workload(
        world_size=len(replicas) * depth,
        micro_batches=layout.num_micro_batches,
        schedule=schedule,
        stages=tuple(works),
        boundaries=tuple(boundaries),
        reductions=tuple(reductions),
        links=tuple(links.values()),
        update=tuple(update),
        overhead=step_overhead(types),
        overlap_slowdown=overlap_slowdown(types),
        blocking_transfers=given.virtual_stages == 1,
    )


def _divided(given: Configuration) -> bool:
    """Whether each rank of a tensor group sends its part to the next stage: where the group divides what crosses, and
    in Megatron's interleaved schedule, which scatters and gathers it. Else one rank's message has all of it."""
    return bool(given.sequence_parallel) or given.virtual_stages > 1


def _link(stages: Stages, source: int, target: int, here: int, there: int, replica: int, num_bytes: int) -> LinkTime:
    """Between neighbours of a pipeline: each device of the tensor group sends its part to its peer, all at once, and
    the parts are gathered where they arrive; or one sends the whole."""
    layout, given = stages.layout, stages.layout.configuration
    a, b = layout.rank(stage=here, replica=replica), layout.rank(stage=there, replica=replica)
    node = layout.cluster.node_of(a)
    sharing = 1
    if _divided(given) and layout.cluster.node_of(b) is not node and node.inter is not None:
        sharing = max(1, len(layout.devices_of(here, replica)) // node.inter.num_adapters)
    cost = send(stages.topology, a, b, max(1, num_bytes), sharing=sharing)
    latency = cost.latency
    if given.tensor > 1 and num_bytes and _divided(given) and not given.sequence_parallel:
        group = layout.tensor_group(there, replica)
        latency += stages.price(
            "all_gather", group, num_bytes * given.tensor, stages.topology.sharing(group, layout.data)
        )
    return LinkTime(source=source, target=target, latency=latency, bandwidth=max(1, num_bytes) / cost.transfer)


def _reductions(
    stages: Stages, cuts: tuple[range, ...], replicas: list[int], costs: Costs
) -> tuple[list[Reduction], list[float]]:
    """The sums of gradients at the end of the step, and for every stage seconds after the update that gather weights.

    Without ZeRO all is summed after the last backward, as Megatron does; with ZeRO 1 gradients are scattered during the
    last backward, and weights gathered during the next forward. ZeRO 2 and 3 do so with every micro-batch.
    """
    layout, given = stages.layout, stages.layout.configuration
    depth = given.pipeline
    found, after = [], [0.0] * depth
    for stage in range(depth):
        if given.zero >= 2:
            continue
        own = tuple(range(stage, layout.num_stages, depth))
        ranks = tuple(kind * depth + stage for kind in range(len(replicas)))
        seconds = num_bytes = 0.0
        for part in own:
            for group, size in stages.gradients(cuts[part], stage):
                sharing = stages.topology.sharing(group, given.tensor)
                num_bytes += size
                if given.zero == 0:
                    seconds += stages.price("all_reduce", group, size, sharing)
                    continue
                seconds += stages.price("reduce_scatter", group, size, sharing)
                gather = stages.price("all_gather", group, size, sharing)
                after[stage] += max(0.0, gather - min(costs[part, replica].forward for replica in replicas))
        if seconds:
            ready = 1.0 if given.zero == 0 else 0.3
            found.append(Reduction(ranks=ranks, stages=own, bytes=round(num_bytes), seconds=seconds, ready=ready))
    return found, after


def _memory(
    stages: Stages,
    cuts: tuple[range, ...],
    replicas: list[int],
    costs: Costs,
    timeline: Timeline,
) -> tuple[DeviceMemory, ...]:
    """The device with least memory of every stage and kind of replica."""
    layout, depth = stages.layout, stages.layout.configuration.pipeline
    found = []
    for kind, replica in enumerate(replicas):
        for stage in range(depth):
            layers = [index for part in cuts[stage::depth] for index in part]
            state = stages.state(layers)
            working = max(costs[index, replica].working for index in range(stage, layout.num_stages, depth))
            peak = timeline.peak_bytes(kind * depth + stage)
            together = [layout.cluster.devices[rank] for rank in layout.devices_of(stage, replica)]
            device = min(together, key=lambda device: device.memory_bytes)
            found.append(
                DeviceMemory(
                    rank=device.rank,
                    device=device.name,
                    capacity=device.memory_bytes,
                    parameters=round(state.parameters),
                    gradients=round(state.gradients),
                    optimizer=round(state.optimizer),
                    activations=round(max(0.0, peak - working)),
                    workspace=round(min(peak, working)),
                    buffers=round(peak * FRAGMENTATION),
                    framework=round(framework_bytes(device.type, len(layout.order))),
                )
            )
    return tuple(found)
