"""The workload of a compiled step: times of its tasks, p2p transfers and gradient reductions.

The compilation determines the layers, rows and shards of each stage and rank, the values between stages and the
collectives inside them; seconds come from `whale.predict.costs`, bytes of tasks from dry runs. The workload is the
simulator's input.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from whale.compile.compilation import Compilation
from whale.ir.program import box_size
from whale.ir.workload import Boundary, LinkTime, StageWork, Transfer, Workload
from whale.planner.cost.hosts import KEY_SECONDS, KEYED_MESSAGE_SECONDS
from whale.planner.cost.stage import exposed_beside
from whale.planner.cost.step import AGREED_BYTES, overlap_slowdown, step_overhead
from whale.planner.network.communication import CommunicationCost, send
from whale.planner.network.curves import moving_seconds
from whale.predict.costs import Costs
from whale.predict.divided_state import DividedState
from whale.predict.layer_parts import Part, StageLayers, layer_finder
from whale.predict.own_part import own_layers
from whale.predict.peak_memory import PeakMemory
from whale.predict.reductions import Backward, Times, reductions_of, total_seconds
from whale.predict.traffic import bucket_bytes, call_bytes
from whale.strategies.lowering import PlacedStage

__all__ = ["workload_of"]


def workload_of(
    compilation: Compilation,
    costs: Costs,
    layers: Sequence[StageLayers],
    held: Mapping[int, PeakMemory],
    schedule: str,
) -> tuple[Workload, bool]:
    """The workload of a step with the peak memory in *held*, and whether all of its computation was measured."""
    boundaries = _boundaries(compilation)
    moving = _moving(costs, boundaries)
    works, measured, update = [], True, [0.0] * len(costs.cluster.devices)
    backwards: dict[tuple[int, int], Backward] = {}
    sizes = bucket_bytes(compilation)
    divided, layer_of = DividedState.of(compilation, costs, sizes), layer_finder(costs.profile.paths)
    for stage, own in zip(compilation.stages, layers, strict=True):
        spent = _spent(costs, own)
        work, backward = _stage_work(costs, stage, spent, held, moving)
        alone = own_layers(compilation.captured, stage, layer_of)
        if any(layer in alone for layer in own.layers):
            seconds = tuple(_spent_on_own(costs, own, rank, alone) for rank in work.ranks)
            work = work.model_copy(update={"own": seconds})
        works.append(divided.with_copies(divided.with_gathers(work, stage.index, own), stage, held))
        backwards |= {(stage.index, rank): one for rank, one in backward.items()}
        measured = measured and all(one.measured for one in spent.values())
        for rank, one in spent.items():
            update[rank] += divided.update(stage, rank, one.update)
    ranks = tuple(sorted(held))
    agreed = costs.collective("all_reduce", ranks, AGREED_BYTES) if len(ranks) > 1 else 0.0
    types = {device.type for device in costs.cluster.devices}
    workload = Workload(
        world_size=len(costs.cluster.devices),
        micro_batches=len(compilation.rows),
        last_share=compilation.rows[-1] / compilation.rows[0],
        schedule=schedule,
        stages=tuple(works),
        boundaries=boundaries,
        reductions=reductions_of(compilation, costs, sizes, layers, backwards),
        links=_links(costs, boundaries),
        update=tuple(update),
        overhead=step_overhead(types, agreed) + _seconds_of_keys(compilation),
        overlap_slowdown=overlap_slowdown(types),
        runs_ahead=costs.device != "cpu",
    )
    return workload, measured


def _seconds_of_keys(compilation: Compilation) -> float:
    """Seconds in which the slowest rank finds the equal rows of its messages, of values and gradients together."""
    found = defaultdict[int, float](float)
    for edge in compilation.edges:
        for transfers in edge.forward if edge.distinct is not None else ():
            for source, target, box, _ in transfers:
                if source != target and box_size(box):
                    seconds = KEYED_MESSAGE_SECONDS + KEY_SECONDS * box_size(box[:-1])
                    found[source] += seconds
                    found[target] += seconds
    return max(found.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class _Spent:
    """Seconds of a micro-batch through a rank's shards of the layers of a stage; ``inside`` says whether they include
    the collectives; ``attention`` are those of attentions among forward and backward beside which rings go round."""

    forward: float
    backward: float
    weights: float
    update: float
    inside: bool
    measured: bool
    attention: tuple[float, float] = (0.0, 0.0)


def _spent(costs: Costs, own: StageLayers) -> dict[int, _Spent]:
    """Work of each rank of a stage; ranks of one type with equal shards are priced once."""
    known: dict[Any, _Spent] = {}
    found = {}
    for rank, parts in own.parts.items():
        key = (costs.cluster.devices[rank].type.name, costs.host_key(rank, parts), parts)
        if key not in known:
            known[key] = _spent_on(costs, own.layers, rank, parts)
        found[rank] = known[key]
    return found


def _spent_on(costs: Costs, layers: Sequence[int], rank: int, parts: Sequence[Part]) -> _Spent:
    kinds = [costs.profile.layers[layer] for layer in layers]
    spent = [costs.layer(kind, rank, part) for kind, part in zip(kinds, parts, strict=True)]
    whole = [replace(part, rows=max(1, part.rows)) for part in parts]
    return _Spent(
        forward=sum(one.forward for one in spent),
        backward=sum(one.backward for one in spent),
        weights=sum(one.weights for one in spent),
        update=sum(costs.layer(kind, rank, part).update for kind, part in zip(kinds, whole, strict=True)),
        inside=bool(kinds)
        and all(costs.includes_communication(kind, rank, part) for kind, part in zip(kinds, parts, strict=True)),
        measured=all(one.measured for one, part in zip(spent, parts, strict=True) if part.rows),
        attention=(sum(one.forward_attention for one in spent), sum(one.backward_attention for one in spent)),
    )


def _spent_on_own(costs: Costs, own: StageLayers, rank: int, alone: Collection[int]) -> float:
    """Seconds of a rank's forward of these layers of a stage."""
    both = zip(own.layers, own.parts[rank], strict=True)
    return sum(costs.layer(costs.profile.layers[layer], rank, part).forward for layer, part in both if layer in alone)


def _stage_work(
    costs: Costs,
    stage: PlacedStage,
    spent: Mapping[int, _Spent],
    held: Mapping[int, PeakMemory],
    moving: Mapping[tuple[str, int, int], float],
) -> tuple[StageWork, dict[int, Backward]]:
    ranks = stage.mesh.ranks
    actors = {held[rank].rank: held[rank] for rank in ranks}
    exchanges = {actor: _exchanges(stage, one) for actor, one in actors.items()}
    forward, weights, communication, backward = [], [], [], {}
    for rank in ranks:
        own, made = spent[rank], exchanges[held[rank].rank]
        lines = [stage.mesh.group(axis, rank) for axis in range(len(stage.mesh.axes))]
        times = [
            _exposed(_times(costs, calls, lines, len(ranks)), calls, attention, lines)
            for calls, attention in zip(made, own.attention, strict=True)
        ]
        ahead, back = (0.0, 0.0) if own.inside else map(total_seconds, times)
        ahead += moving.get(("forward", stage.index, rank), 0.0)
        back += moving.get(("backward", stage.index, rank), 0.0)
        forward.append(own.forward + ahead)
        backward[rank] = Backward(seconds=own.backward + back, collectives=times[1])
        weights.append(min(own.weights, backward[rank].seconds))
        communication.append(ahead + back)
    task_bytes = [held[rank].tasks[stage.index] for rank in ranks]
    met = {rank: {call.axis for calls in exchanges[held[rank].rank] for call in calls} for rank in ranks}
    work = StageWork(
        ranks=ranks,
        together=_together(stage, met),
        forward=tuple(forward),
        backward=tuple(backward[rank].seconds for rank in ranks),
        weights=tuple(weights),
        communication=tuple(communication),
        kept_bytes=tuple(one.kept for one in task_bytes),
        forward_peak_bytes=tuple(one.forward_peak for one in task_bytes),
        backward_peak_bytes=tuple(one.backward_peak for one in task_bytes),
    )
    return work, backward


def _moving(costs: Costs, boundaries: Sequence[Boundary]) -> dict[tuple[str, int, int], float]:
    """Seconds of computation, by direction, stage and rank, that the messages of a micro-batch cost.

    A message overlaps computation on the link, and costs computation for moving its bytes.
    """
    devices, links = costs.cluster.devices, costs.profile.links
    price = cache(lambda within, device_type: moving_seconds(links, within, device_type))
    found: dict[tuple[str, int, int], float] = defaultdict(float)
    for boundary in boundaries:
        stages = (boundary.source_stage, boundary.target_stage)
        for direction, transfers, (sender, receiver) in (
            ("forward", boundary.forward, stages),
            ("backward", boundary.backward, stages[::-1]),
        ):
            for transfer in transfers:
                if transfer.source == transfer.target:
                    continue
                ends = [devices[transfer.source], devices[transfer.target]]
                within = "node" if ends[0].node == ends[1].node else "nodes"
                for stage, device in zip((sender, receiver), ends, strict=True):
                    found[direction, stage, device.rank] += transfer.bytes * price(within, device.type.name)
    return found


class _Call(NamedTuple):
    """A collective: its kind, mesh axis and bytes, and whether it moves beside an attention."""

    op: str
    axis: int
    bytes: int
    beside: bool


_Calls = Mapping[_Call, int]
"""Number of collectives."""


def _exchanges(stage: PlacedStage, held: PeakMemory) -> tuple[_Calls, _Calls]:
    """The collectives of a stage, forward and backward, of all ranks equal to the dry-run one."""
    axes = {tuple(sorted(stage.mesh.group(axis, held.rank))): axis for axis in range(len(stage.mesh.axes))}
    calls = held.calls[stage.index]
    forward, backward = (
        Counter(_Call(call.op, axes[call.ranks], call_bytes(call), call.beside) for call in made)
        for made in (calls.forward, calls.backward)
    )
    return forward, backward


def _times(costs: Costs, calls: _Calls, lines: Sequence[tuple[int, ...]], num_ranks: int) -> Times:
    """Times of the calls of a rank of a stage with the given number of ranks, all of which make theirs at once."""
    return tuple(
        (count, costs.collective(op, lines[axis], size, num_ranks // len(lines[axis])))
        for (op, axis, size, _), count in calls.items()
    )


def _exposed(times: Times, calls: _Calls, attention: float, lines: Sequence[tuple[int, ...]]) -> Times:
    """The times of calls, without what the seconds of *attention* hide of those beside it."""
    beside = [
        (count * seconds, len(lines[call.axis]))
        for (count, seconds), call in zip(times, calls, strict=True)
        if call.beside
    ]
    whole = sum(seconds for seconds, _ in beside)
    if not whole:
        return times
    left = exposed_beside((seconds for seconds, _ in beside), attention, max(ranks for _, ranks in beside)) / whole
    return tuple(
        (count, seconds * left if call.beside else seconds) for (count, seconds), call in zip(times, calls, strict=True)
    )


def _together(stage: PlacedStage, met: Mapping[int, Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks with common collectives; *met* has the axes of each."""
    group = {rank: frozenset((rank,)) for rank in stage.mesh.ranks}
    for members in dict.fromkeys(stage.mesh.group(axis, rank) for rank, axes in met.items() for axis in axes):
        joined = frozenset().union(*(group[rank] for rank in members))
        group |= dict.fromkeys(joined, joined)
    return tuple(tuple(sorted(one)) for one in dict.fromkeys(group.values()) if len(one) > 1)


def _boundaries(compilation: Compilation) -> tuple[Boundary, ...]:
    """Transfers between each pair of stages, all values together."""
    sizes: dict[tuple[int, int], dict[str, Counter[tuple[int, int]]]] = {}
    for edge in compilation.edges:
        pair = sizes.setdefault((edge.source_stage, edge.target_stage), {"forward": Counter(), "backward": Counter()})
        element = getattr(torch, edge.dtype).itemsize
        for direction, transfers in (("forward", edge.forward), ("backward", edge.backward)):
            for transfer in transfers[0] if transfers else ():
                if size := edge.sent_bytes(transfer.source_box, element):
                    pair[direction][transfer.source, transfer.target] += size
    return tuple(
        Boundary(
            source_stage=source,
            target_stage=target,
            forward=_transfers(pair["forward"]),
            backward=_transfers(pair["backward"]),
        )
        for (source, target), pair in sizes.items()
    )


def _transfers(sizes: Mapping[tuple[int, int], int]) -> tuple[Transfer, ...]:
    return tuple(Transfer(source=a, target=b, bytes=size) for (a, b), size in sizes.items())


def _links(costs: Costs, boundaries: Sequence[Boundary]) -> tuple[LinkTime, ...]:
    """The links between ranks that exchange messages, at the size of the largest message."""
    largest: dict[tuple[int, int], int] = {}
    for boundary in boundaries:
        for transfer in (*boundary.forward, *boundary.backward):
            pair = (transfer.source, transfer.target)
            if pair[0] != pair[1]:
                largest[pair] = max(largest.get(pair, 0), transfer.bytes)
    found, known = [], dict[Any, CommunicationCost]()
    for (source, target), size in largest.items():
        key = costs.topology.route(source, target), size
        if key not in known:
            known[key] = send(costs.topology, source, target, size)
        cost = known[key]
        bandwidth = size / cost.transfer if cost.transfer > 0 else size / max(cost.seconds, 1e-9)
        resources = costs.topology.resources(source, target)
        found.append(
            LinkTime(source=source, target=target, latency=cost.latency, bandwidth=bandwidth, resources=resources)
        )
    return tuple(found)
