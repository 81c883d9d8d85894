"""Communication between stages: the values that cross stages, and the gradient reductions.

Both follow from the placements of the stages, equally on every rank. Collectives inside a stage belong to its graph,
and their timing to the schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from whale.compile.adasum import divisor_of, replicas_of
from whale.errors import UsageError
from whale.graph.captured import Captured
from whale.graph.values import Value, has_sparse_gradient, needs_grad, value_name, value_tensor
from whale.ir.adasum import Adasum
from whale.ir.cluster import Cluster
from whale.ir.program import Edge, Gathers, ReduceSpec
from whale.ir.state import Align, shares_of, stretches
from whale.planner.cost.buckets import bucket_bytes
from whale.planner.network.topology import Topology
from whale.runtime.reduce import bucketize
from whale.strategies.equal_rows import keys_of
from whale.strategies.layout import Placements
from whale.strategies.lowering import PlacedStage, nothing_of
from whale.strategies.transfer import region_shape, transfers

__all__ = ["edges_between", "has_idle_ranks", "places_of_readers", "sums_of_gradients"]


def edges_between(captured: Captured, stages: Sequence[PlacedStage], rows: Sequence[int]) -> tuple[Edge, ...]:
    """The values that cross stages, and their transfers.

    Boxes are within local tensors, and shards of micro-batches of equal size differ only in their position in the
    batch, so they have the same transfers.

    Raises:
        UsageError: a stage is to send distinct rows, and sends none that are looked up.
    """
    edges: list[Edge] = []
    firsts = {count: rows.index(count) for count in dict.fromkeys(rows)}

    def held(stage: PlacedStage, value: Value, placements: Placements, micro_batch: int) -> dict[int, Any]:
        return {
            rank: stage.layout.intervals(value, placements, (micro_batch, *stage.mesh.coordinates(rank)))
            for rank in stage.mesh.ranks
        }

    for source in stages:
        looked_up = {value for value in source.sent if keys_of(captured, value)} if source.distinct else frozenset()
        if source.distinct and not looked_up:
            raise UsageError(
                f"stage {source.index} has distinct={source.distinct:g}, but of what it sends, "
                f"{', '.join(map(value_name, source.sent)) or 'nothing'}, none is rows of a table at indices "
                "that are computed of the batch alone: leave it out, or annotate what computes with these rows as a "
                "stage too. Bags of several rows are no rows of a table"
            )
        for value, placements in source.sent.items():
            for target in stages[source.index + 1 :]:
                if value not in target.received:
                    continue
                grad = needs_grad(value)
                ends = {
                    count: (held(source, value, placements, m), held(target, value, target.stored[value], m))
                    for count, m in firsts.items()
                }
                forward = {count: transfers(a, b) for count, (a, b) in ends.items()}
                backward = {count: transfers(b, a) for count, (a, b) in ends.items()} if grad else {}
                shapes = {
                    count: tuple({rank: region_shape(region) for rank, region in end.items()} for end in both)
                    for count, both in ends.items()
                }
                edges.append(
                    Edge(
                        index=0,
                        value=value_name(value),
                        source_stage=source.index,
                        target_stage=target.index,
                        needs_grad=grad,
                        dtype=str(value_tensor(value).dtype).removeprefix("torch."),
                        forward=tuple(forward[count] for count in rows),
                        backward=tuple(backward.get(count, ()) for count in rows),
                        source_shapes=tuple(shapes[count][0] for count in rows),
                        target_shapes=tuple(shapes[count][1] for count in rows),
                        distinct=source.distinct if value in looked_up else None,
                    )
                )
    # A stage receives its values in the order of the edges' indices, which must be that of PlacedStage.received.
    edges.sort(key=lambda e: (e.target_stage, [value_name(v) for v in stages[e.target_stage].received].index(e.value)))
    return tuple(Edge(**{**edge.__dict__, "index": index}) for index, edge in enumerate(edges))


class _Part(NamedTuple):
    """A part of a parameter whose gradient several ranks sum."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: int = 0
    """The most rows of which a rank has a gradient, if it is sparse."""


def sums_of_gradients(
    captured: Captured,
    stages: Sequence[PlacedStage],
    rows: Sequence[int],
    cluster: Cluster,
    dtype: str = "",
    *,
    of_one: bool = False,
) -> tuple[tuple[ReduceSpec, ...], tuple[tuple[str, ...], ...]]:
    """The gradient reductions: over replicas of a stage, and over stages that share a parameter.

    Args:
        captured: the model.
        stages: all of it; what several share is divided if each of them divides its state.
        rows: of the batch in each micro-batch.
        cluster: whose links say how large buckets are.
        dtype: in which real gradients are summed; by default their own.
        of_one: whether parameters of one rank are in buckets too, each in one of its own.

    Returns:
        the buckets in the order of their launches, and the names of the parameters in each.

    Raises:
        UsageError: shares of state are not as many as the ranks that sum a gradient, or as those of the stage; or
            gradients that are to be combined cannot be.
    """
    readers: dict[str, list[tuple[PlacedStage, Value]]] = {}
    for stage in stages:
        for value in stage.stored:
            if value[0].name in captured.parameters and needs_grad(value):
                readers.setdefault(captured.parameters[value[0].name], []).append((stage, value))
    groups: dict[tuple[tuple[int, ...], tuple[int, ...], bool, Adasum | None, bool], list[_Part]] = {}
    combines = captured.has_loss and any(stage.reduce == "adasum" for stage in stages)
    divisor = divisor_of(captured, stages[0].layout.analysis, stages) if combines else None
    known: dict[Any, list[_Owners]] = {}
    for name, entries in readers.items():
        sharing = tuple(stage.index for stage, _ in entries)
        ranks_of: dict[Any, list[int]] = {}
        for stage, value in entries:
            placements = stage.stored[value]
            for copies, ranks in _owners(stage, placements, known):
                region = stage.layout.intervals(value, placements, (0, *stage.mesh.coordinates(ranks[0])))
                ranks_of.setdefault((region, copies), []).extend(ranks)
        own = value_tensor(entries[0][1]).dtype
        regions = [region for region, _ in ranks_of]
        is_sparse = all(has_sparse_gradient(value) for _, value in entries)
        for (region, _), ranks in ranks_of.items():
            together = tuple(sorted(set(ranks)))
            if len(together) > 1 or of_one or all(stage.state_on_host for stage, _ in entries):
                # Ranks that sum equal gradients apart, as of a norm beside split matrices, divide them alike if their
                # buckets have nothing else.
                apart = all(stage.state for stage, _ in entries) and regions.count(region) > 1
                adasum = None
                if combines and len(together) > 1:
                    everyone = [rank for owners in ranks_of.values() for rank in owners]
                    adasum = replicas_of(captured, stages, entries, together, everyone, rows, divisor)
                shape = region_shape(region)
                read = _rows_read(entries, together, len(rows)) if is_sparse and len(together) > 1 else 0
                if read:
                    _check_sum_of_rows(name, [stage for stage, _ in entries], adasum)
                part = _Part(name, shape, own, min(read, shape[0]) if read else 0)
                groups.setdefault((together, sharing, apart, adasum, bool(read)), []).append(part)
    found: list[tuple[ReduceSpec, tuple[str, ...]]] = []
    buckets: dict[tuple[int, tuple[_Part, ...]], list[tuple[str, ...]]] = {}
    topology = Topology.of(cluster)
    capacities: dict[Any, int] = {}
    tables: dict[tuple[tuple[int, ...], int], dict[str, None]] = {}
    for (_, _, _, adasum, _), parts in groups.items():
        if adasum is not None:
            table = tables.setdefault((adasum.ranks, len(adasum.replicas)), {})
            table.update(dict.fromkeys(part.name for part in parts))
    for (together, sharing, _, adasum, is_sparse), parts in groups.items():
        if adasum is not None:
            adasum = replace(adasum, table=tuple(tables[adasum.ranks, len(adasum.replicas)]))
        readers_of = [stage for stage in stages if stage.index in sharing]
        several = len(together) > 1
        is_divided = all(stage.state and (several or stage.state_on_host) for stage in readers_of)
        links = topology.shape(together), is_divided, is_sparse
        if links not in capacities:
            is_free = (not several and not is_divided) or is_sparse
            capacities[links] = 0 if is_free else bucket_bytes(topology, together, divided=is_divided)
        key = (capacities[links], tuple(parts))
        if key not in buckets:
            buckets[key] = _bucketized(parts, capacities[links])
        divided = [dict[str, Any]() for _ in buckets[key]]
        if is_divided:
            divided = _divided(parts, buckets[key], together, readers_of, len(rows))
        by_name = {part.name: part for part in parts}
        for bucket, options in zip(buckets[key], divided, strict=True):
            given = by_name[bucket[0]].dtype
            is_other = several and given.is_floating_point and dtype != str(given).removeprefix("torch.")
            options["dtype"] = dtype if is_other else ""
            if adasum is not None and options.get("each"):
                raise UsageError(
                    f"{bucket[0]}: zero={min(stage.state.level for stage in readers_of if stage.state)} sums gradients "
                    "in every micro-batch, but reduce='adasum' combines those of all of them: use zero=1, or one "
                    "micro-batch"
                )
            options["adasum"] = adasum
            options["rows"] = by_name[bucket[0]].rows
            options["on_host"] = any(bucket[0] in stage.on_host for stage in readers_of)
            found.append((ReduceSpec(index=0, ranks=together, stages=sharing, **options), bucket))
    places = places_of_readers(captured)
    # Ranks start buckets in one order, whatever their groups: a bucket of others that is ready later would keep one
    # from overlapping a backward. What stages share is ready when the last backward of its first reader is done.
    found.sort(key=lambda one: (len(one[0].stages) > 1, one[0].stages, -min(places[name][0] for name in one[1])))
    specs = tuple(replace(spec, index=index) for index, (spec, _) in enumerate(found))
    return specs, tuple(names for _, names in found)


def places_of_readers(captured: Captured) -> dict[str, tuple[int, int]]:
    """The places in the graph of the first and the last operator that reads each parameter, by name."""
    places = {node: place for place, node in enumerate(captured.graph.nodes)}
    found: dict[str, tuple[int, int]] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder" and node.name in captured.parameters:
            own = [places[user] for user in node.users] or [0]
            found[captured.parameters[node.name]] = min(own), max(own)
    return found


def _rows_read(entries: Sequence[tuple[PlacedStage, Value]], ranks: Sequence[int], micro_batches: int) -> int:
    """The most rows of a parameter that one of these ranks looks up in a step; those that it looks up twice count
    twice."""
    found = Counter[int]()
    for stage, (placeholder, _) in entries:
        for node in [user for user in placeholder.users if user in stage.choices]:
            indices = stage.layout.analysis.ops[node].operands[1]
            placements = tuple(choice.inputs[1] for choice in stage.choices[node])
            for rank in set(ranks).intersection(stage.mesh.ranks):
                at = stage.mesh.coordinates(rank)
                for micro_batch in range(micro_batches):
                    found[rank] += prod(stage.layout.local_shape(indices, placements, (micro_batch, *at)))
    return max(found.values())


def _check_sum_of_rows(name: str, stages: Sequence[PlacedStage], adasum: Adasum | None) -> None:
    """Refuse ways to sum gradients that have none for sparse ones.

    Raises:
        UsageError: a stage asks for such.
    """
    ways = [
        *("reduce='adasum'" for _ in stages if adasum is not None),
        *(f"reduce={stage.reduce!r}" for stage in stages if stage.reduce != "mean"),
        *(f"offload={stage.offload!r}" for stage in stages if stage.state_on_host),
        *(f"zero={stage.state.level}" for stage in stages if stage.state is not None and stage.state.level),
    ]
    if ways:
        raise UsageError(
            f"{name} has sparse gradients, of which ranks exchange the rows that were looked up, but "
            f"{ways[0]} divides or combines whole gradients: leave it out for the stage of {name}, put "
            f"{name} into a stage of its own, split it, or make the embedding with sparse=False"
        )


def _divided(
    parts: Sequence[_Part],
    buckets: Sequence[Sequence[str]],
    ranks: Sequence[int],
    stages: Sequence[PlacedStage],
    micro_batches: int,
) -> list[dict[str, Any]]:
    """How ranks divide buckets of some stages, which they all sum.

    What stages share is gathered once in a step: one stage would wait for another that computes later. So is what is
    computed in a task in which a rank has nothing to do.
    """
    shape_of = {part.name: part.shape for part in parts}
    states = {stage.mesh.ranks: stage.state for stage in stages if stage.state is not None}
    shares = shares_of(ranks, states) if len(ranks) > 1 else (1.0,)
    level, owed = min(state.level for state in states.values()), [0.0] * (len(shares) - 1)
    align: Align = "parameter" if any(state.align == "parameter" for state in states.values()) else "row"
    alone = len(stages) == 1
    gathers: Gathers = "task" if level == 3 and alone and not has_idle_ranks(stages[0], micro_batches) else "step"
    return [
        {
            "bounds": stretches([shape_of[name] for name in bucket], shares, align, owed),
            "gathers": gathers,
            "each": level > 1 and alone and micro_batches > 1,
        }
        for bucket in buckets
    ]


def has_idle_ranks(stage: PlacedStage, micro_batches: int) -> bool:
    """Whether a rank has no row of some micro-batch."""
    return any(
        nothing_of(stage, (micro_batch, *stage.mesh.coordinates(rank))) is not None
        for rank in stage.mesh.ranks
        for micro_batch in range(micro_batches)
    )


_Owners = tuple[tuple[int, ...], list[int]]
"""Ranks with one shard of a parameter, with their positions along the axes whose ranks have equal gradients."""


def _owners(stage: PlacedStage, placements: Placements, known: dict[Any, list[_Owners]]) -> list[_Owners]:
    """The ranks of a stage that sum the gradient of a parameter, equal for all parameters with the same cut."""
    key = (stage.index, stage.layout.form(placements))
    if key not in known:
        found: dict[Any, _Owners] = {}
        for rank in stage.mesh.ranks:
            at = stage.mesh.coordinates(rank)
            copies = tuple(c for c, p in zip(at, placements[1:], strict=True) if p.kind == "R")
            found.setdefault((stage.layout.cuts(placements, (0, *at)), copies), (copies, []))[1].append(rank)
        known[key] = list(found.values())
    return known[key]


def _bucketized(parts: Sequence[_Part], capacity: int) -> list[tuple[str, ...]]:
    """The names of the parameters of each bucket."""
    blanks = [nn.Parameter(torch.empty(part.shape, dtype=part.dtype, device="meta")) for part in parts]
    names = {id(blank): part.name for blank, part in zip(blanks, parts, strict=True)}
    return [tuple(names[id(p)] for p in bucket) for bucket in bucketize(blanks, capacity)]
