"""The sums of gradients of a compiled step: their bytes and seconds, and when in the last backward each is ready.

The compilation determines the buckets; seconds come from `whale.predict.costs`. It knows no schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whale.compile.compilation import Compilation
from whale.ir.adasum import dot_bytes
from whale.ir.profile import Interference
from whale.ir.program import ReduceSpec
from whale.ir.workload import Reduction
from whale.planner.cost.hosts import gathering_on_host
from whale.predict.costs import Costs
from whale.predict.divided_state import copies_to_hosts, kind_to_owners, num_alike, owned_elements, seconds_to_owners
from whale.predict.layer_parts import StageLayers, layer_finder
from whale.predict.traffic import first_of_tables, kind_of_sum, summed_bytes

__all__ = ["Backward", "Times", "reductions_of", "total_seconds"]

Times = tuple[tuple[int, float], ...]
"""Number of collectives by their seconds."""


@dataclass(frozen=True, kw_only=True)
class Backward:
    """A rank's backward of a stage: its seconds, and the number of its collectives by their seconds."""

    seconds: float
    collectives: Times

    def slowdown(self, computation: float, waiting: float) -> float:
        """Slowdown during a reduction: *computation* slows by a given factor, and each collective waits for messages of
        the reduction that were on the link before, or shares the link, whichever takes longer."""
        if not self.seconds:
            return computation
        alone = max(0.0, 1 - total_seconds(self.collectives) / self.seconds)
        waited = sum(count * max(waiting, seconds) for count, seconds in self.collectives)
        return alone * computation + waited / self.seconds


def total_seconds(times: Times) -> float:
    """Seconds of all collectives, one after the other."""
    return sum(count * seconds for count, seconds in times)


def reductions_of(
    compilation: Compilation,
    costs: Costs,
    sizes: Sequence[int],
    layers: Sequence[StageLayers],
    backwards: Mapping[tuple[int, int], Backward],
) -> tuple[Reduction, ...]:
    """The buckets of gradients that are summed once a step, in the order in which they are launched; of those that are
    summed in each backward the last sum, which nothing hides in the last one."""
    found = []
    copies = copies_to_hosts(compilation, costs.cluster)
    owned = owned_elements(compilation)
    each = [spec for spec in compilation.reduces if spec.each]
    last = {(spec.ranks, spec.stages): spec.index for spec in each}
    for spec, size, ready in zip(compilation.reduces, sizes, _ready(compilation, costs, layers), strict=True):
        if (spec.each and last[spec.ranks, spec.stages] != spec.index) or (len(spec.ranks) == 1 and not spec.bounds):
            continue
        alike = num_alike(compilation, costs, spec)
        size = summed_bytes(compilation, spec, size)
        cost = costs.collective_cost(kind_of_sum(spec), spec.ranks, size, alike)
        seconds = cost.seconds
        if spec.bounds:
            seconds = seconds_to_owners(costs, kind_to_owners(costs, spec), spec, size, alike, owned)
            seconds = max(seconds, copies.get(spec.index, 0.0))
        if spec.on_host:
            seconds = max(seconds, gathering_on_host(costs.cluster, spec.ranks, size))
        if spec.adasum is not None:
            seconds = max(costs.collective("all_to_all", spec.ranks, size, alike), copies.get(spec.index, 0.0))
        found.append(
            Reduction(
                ranks=spec.ranks,
                stages=spec.stages,
                bytes=size,
                seconds=seconds,
                ready=1.0 if spec.each else ready,
                slowdown=_slowdowns(costs, spec, cost.beside, backwards),
                stretch=cost.beside.stretch if cost.beside is not None else 0.0,
            )
        )
    return (*found, *_combinations(compilation, costs, sizes))


def _combinations(compilation: Compilation, costs: Costs, sizes: Sequence[int]) -> Iterator[Reduction]:
    """The exchanges after the backwards where gradients are combined: sums of dot products, level by level, and the
    gathers of what each rank has combined of the buckets of these ranks."""
    gathers: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, float]] = {}
    is_combined = any(spec.adasum is not None for spec in compilation.reduces)
    firsts = {spec.ranks[0] for spec in compilation.reduces} if is_combined else ()
    first = frozenset[int]().union(*(first_of_tables(compilation, rank) for rank in firsts))
    for spec, size in zip(compilation.reduces, sizes, strict=True):
        if spec.adasum is None:
            continue
        num_bytes, seconds = gathers.get((spec.ranks, spec.stages), (0, 0.0))
        if not spec.bounds:
            num_bytes += size
            seconds += costs.collective("all_gather", spec.ranks, size, num_alike(compilation, costs, spec))
        if spec.index in first:
            for products in dot_bytes(len(spec.adasum.replicas), len(spec.adasum.table)):
                num_bytes += products
                seconds += costs.collective("all_reduce", spec.adasum.ranks, products, 1)
        gathers[spec.ranks, spec.stages] = num_bytes, seconds
    for (ranks, stages), (num_bytes, seconds) in gathers.items():
        yield Reduction(ranks=ranks, stages=stages, bytes=num_bytes, seconds=seconds)


def _ready(compilation: Compilation, costs: Costs, layers: Sequence[StageLayers]) -> list[float]:
    """For each bucket the fraction of the last backward after which it is ready: when the backwards of its layers, and
    in a layer as large a part as that of its parameters that came before, are done. Parameters of no layer are ready
    with those before them, and those that stages share at the end."""
    layer_of = layer_finder(costs.profile.paths)
    both = list(zip(compilation.reduces, compilation.bucket_parameters, strict=True))
    num = Counter((spec.ranks, spec.stages, layer_of(name)) for spec, names in both for name in names)
    done: Counter[Any] = Counter()
    before: dict[Any, dict[int, tuple[float, float]]] = {}
    last: dict[Any, float] = defaultdict(float)
    found = []
    for spec, names in both:
        if len(spec.stages) > 1:
            found.append(1.0)
            continue
        group, stage = (spec.ranks, spec.stages), layers[spec.stages[0]]
        parts = (spec.stages[0], costs.cluster.devices[spec.ranks[0]].type.name, stage.parts[spec.ranks[0]])
        if parts not in before:
            before[parts] = _backwards_before(costs, stage, spec.ranks[0])
        known = before[parts]
        done.update((*group, layer_of(name)) for name in names)
        for layer in {layer_of(name) for name in names}:
            start, share = known.get(layer, (0.0, 0.0))
            last[group] = max(last[group], start + share * done[*group, layer] / num[*group, layer])
        found.append(min(1.0, last[group]) if known else 1.0)
    return found


def _backwards_before(costs: Costs, stage: StageLayers, rank: int) -> dict[int, tuple[float, float]]:
    """By layer the fraction of a rank's backward of a stage that comes before the layer's own, and its own fraction."""
    spent = {
        layer: costs.layer(costs.profile.layers[layer], rank, part).backward
        for layer, part in zip(stage.layers, stage.parts[rank], strict=True)
    }
    total, done, found = sum(spent.values()), 0.0, {}
    for layer in reversed(stage.layers):
        found[layer] = (done / total, spent[layer] / total) if total else (1.0, 0.0)
        done += spent[layer]
    return found


def _slowdowns(
    costs: Costs, spec: ReduceSpec, beside: Interference | None, backwards: Mapping[tuple[int, int], Backward]
) -> tuple[float, ...]:
    """Slowdown of each rank's backward during a reduction; empty if not measured."""
    if beside is None:
        return ()
    known = dict(zip(beside.types, beside.slowdowns, strict=True))
    found = []
    for rank in spec.ranks:
        computation = known.get(costs.cluster.devices[rank].type.name, 0.0)
        own = (backwards[stage, rank] for stage in spec.stages if (stage, rank) in backwards)
        found.append(max((one.slowdown(computation, beside.waiting) for one in own), default=computation))
    return tuple(found)
