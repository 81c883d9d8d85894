"""What a plan of the search's space should give: a chain of stages, each on its own mesh, simulated as a workload.

Data slices of a stage whose devices, places in their nodes, rows and neighbours are alike are one *kind*, priced and
simulated once, so that thousands of ranks cost what a few do. Where stages of the same degrees follow each other it
says what `whale.planner.cost.estimate` says. It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from whale.errors import UsageError
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.ir.workload import Boundary, DeviceMemory, LinkTime, Reduction, StageWork, Transfer, Workload
from whale.planner.cost.memory import message_bytes
from whale.planner.cost.optimizers import Optimizer
from whale.planner.cost.step import overlap_slowdown, step, timing_of
from whale.planner.schedules.in_flight import in_flight
from whale.planner.search.choices import Candidate, StageChoice
from whale.planner.search.prices import LayerPrice, Memo, Prices, TensorGroup

__all__ = ["cost_of", "evaluate", "score"]


def evaluate(
    profile: ModelProfile,
    cluster: Cluster,
    stages: Sequence[StageChoice],
    *,
    micro_batches: int,
    schedule: str = "1f1b",
    precision: str = "fp32",
    eager: bool = False,
    optimizer: Optimizer = "adamw",
    known: Memo | None = None,
) -> Candidate:
    """Score a plan, whether it fits in memory or not.

    Complexity: linear in ranks, to see which are alike; quadratic in stages for the step, whatever the micro-batches.

    Raises:
        UsageError: the stages are no chain, a mesh does not fit its ranks, or the profile does not know a degree.
    """
    prices = Prices.of(
        profile,
        cluster,
        precision=precision,
        eager=eager,
        optimizer=optimizer,
        batch=micro_batches * sum(stages[0].rows) if stages else 0,
        known=known,
    )
    return score(prices, stages, micro_batches=micro_batches, schedule=schedule)


def score(
    prices: Prices,
    stages: Sequence[StageChoice],
    *,
    micro_batches: int,
    schedule: str = "1f1b",
    batch: int | None = None,
) -> Candidate:
    """As `evaluate`, with prices that are there; *batch*: rows of the step, where the last micro-batch is not full."""
    _check(prices, stages)
    plan = _Plan.of_stages(prices, stages, micro_batches, schedule)
    rows = sum(stages[0].rows)
    batch = micro_batches * rows if batch is None else batch
    workload = plan.workload().model_copy(update={"last_share": batch / rows - micro_batches + 1})
    prediction = step(
        timing_of(workload),
        devices=prices.num_of_types,
        precision=prices.precision,
        flops=3 * batch * prices.flops,
        memory=sorted(plan.memory(), key=lambda device: device.rank),
        measured=all(price.measured for own in plan.costs for price in own),
    )
    return Candidate(
        stages=tuple(stages),
        micro_batches=micro_batches,
        schedule=schedule,
        prediction=prediction,
        workload=workload,
    )


def _check(prices: Prices, stages: Sequence[StageChoice]) -> None:
    num_layers, used = len(prices.profile.layers), Counter(rank for stage in stages for rank in stage.ranks)
    bounds = [0, *(stage.last for stage in stages)]
    if bounds[:-1] != [stage.first for stage in stages] or bounds[-1] != num_layers or sorted(set(bounds)) != bounds:
        cuts = ", ".join(f"[{stage.first}, {stage.last})" for stage in stages) or "none"
        raise UsageError(f"stages take the layers 0 to {num_layers - 1} one after the other, unlike {cuts}")
    for index, stage in enumerate(stages):
        if stage.data * stage.size != len(stage.ranks) or len(stage.rows) != stage.data:
            raise UsageError(
                f"stage {index} has a mesh of {stage.data} x {stage.size} with {len(stage.ranks)} ranks and rows for "
                f"{len(stage.rows)} data slices"
            )
        if sum(stage.rows) != sum(stages[0].rows) or min(stage.rows) < 0 or not any(stage.rows):
            raise UsageError(
                f"stage {index} takes {sum(stage.rows)} rows of a micro-batch, stage 0 {sum(stages[0].rows)}; all take "
                "the same, at least one"
            )
        if stage.tensor not in prices.tensor_degrees:
            known = ", ".join(map(str, prices.tensor_degrees)) or "none"
            raise UsageError(f"stage {index}: {prices.profile.name} has no tensor degree {stage.tensor}, only {known}")
        if stage.expert not in (1, *prices.expert_degrees) or 1 not in (stage.tensor, stage.expert):
            known = ", ".join(map(str, prices.expert_degrees)) or "none"
            what = f"{stage.expert} at tensor degree {stage.tensor}"
            raise UsageError(f"stage {index}: {prices.profile.name} has no expert degree {what}, only {known}")
    twice = next((rank for rank, count in used.items() if count > 1), None)
    wrong = next((rank for rank in used if not 0 <= rank < len(prices.cluster.devices)), None)
    if twice is not None or wrong is not None:
        what = f"rank {twice} is in two places" if twice is not None else f"rank {wrong} does not exist"
        raise UsageError(f"{what}; every rank is used once at most")


# --- data slices that are alike ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Data slices of a stage that are alike; the first stands for them.

    Attributes:
        index: of that slice in its stage.
        rank: of its device with least memory, which stands for all of the slice.
    """

    group: TensorGroup
    rows: int
    index: int
    rank: int


class _Pair(NamedTuple):
    """Rows that a slice hands to one of the next stage."""

    source: int
    target: int
    rows: int
    same_node: bool


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A plan with its kinds of slices.

    Attributes:
        kinds: of each stage; ``of`` says the kind of each slice, by position in ``kinds``.
        pairs: of each boundary.
        costs: of each stage and kind, for one micro-batch.
    """

    prices: Prices
    stages: tuple[StageChoice, ...]
    micro_batches: int
    schedule: str
    kinds: tuple[tuple[_Kind, ...], ...]
    of: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[_Pair, ...], ...]
    costs: tuple[tuple[LayerPrice, ...], ...]

    @classmethod
    def of_stages(cls, prices: Prices, stages: Sequence[StageChoice], micro_batches: int, schedule: str) -> _Plan:
        groups = [
            [prices.group(stage.slice(index), stage.data, stage.expert) for index in range(stage.data)]
            for stage in stages
        ]
        pairs = tuple(tuple(_pairs(prices.cluster, *both)) for both in pairwise(stages))
        looks: list[list[set[tuple[object, ...]]]] = [[set() for _ in stage.rows] for stage in stages]
        for boundary, found in enumerate(pairs):
            here, there = stages[boundary], stages[boundary + 1]
            for pair in found:
                ahead = (groups[boundary + 1][pair.target].kind, there.rows[pair.target], pair.same_node)
                back = (groups[boundary][pair.source].kind, here.rows[pair.source], pair.same_node)
                looks[boundary][pair.source].add(("to", *ahead))
                looks[boundary + 1][pair.target].add(("from", *back))
        kinds, of = [], []
        for stage, own, seen in zip(stages, groups, looks, strict=True):
            positions: dict[object, int] = {}
            members: list[_Kind] = []
            places = []
            for index, (group, rows) in enumerate(zip(own, stage.rows, strict=True)):
                key = (group.kind, rows, frozenset(seen[index]))
                if key not in positions:
                    positions[key] = len(members)
                    devices = [prices.cluster.devices[rank] for rank in stage.slice(index)]
                    smallest = min(devices, key=lambda device: device.memory_bytes)
                    members.append(_Kind(group=group, rows=rows, index=index, rank=smallest.rank))
                places.append(positions[key])
            kinds.append(tuple(members))
            of.append(tuple(places))
        costs = tuple(
            tuple(cost_of(prices, range(stage.first, stage.last), kind.group, kind.rows, micro_batches) for kind in own)
            for stage, own in zip(stages, kinds, strict=True)
        )
        return cls(
            prices=prices,
            stages=tuple(stages),
            micro_batches=micro_batches,
            schedule=schedule,
            kinds=tuple(kinds),
            of=tuple(of),
            pairs=pairs,
            costs=costs,
        )

    def layers(self, stage: int) -> range:
        """Those of a stage."""
        return range(self.stages[stage].first, self.stages[stage].last)

    # The workload

    def workload(self) -> Workload:
        """The step of one rank for each kind of slice."""
        works = []
        for own, costs in zip(self.kinds, self.costs, strict=True):
            kept = tuple(round(cost.kept) for cost in costs)
            works.append(
                StageWork(
                    ranks=tuple(kind.rank for kind in own),
                    forward=tuple(cost.forward for cost in costs),
                    backward=tuple(cost.backward for cost in costs),
                    weights=tuple(cost.weights for cost in costs),
                    communication=tuple(cost.communication for cost in costs),
                    kept_bytes=kept,
                    forward_peak_bytes=kept,
                    backward_peak_bytes=tuple(round(cost.working) for cost in costs),
                )
            )
        boundaries, links = self._boundaries()
        update = [0.0] * len(self.prices.cluster.devices)
        for own, costs in zip(self.kinds, self.costs, strict=True):
            for kind, cost in zip(own, costs, strict=True):
                update[kind.rank] = cost.update
        return Workload(
            world_size=len(self.prices.cluster.devices),
            micro_batches=self.micro_batches,
            schedule=self.schedule,
            stages=tuple(works),
            boundaries=boundaries,
            reductions=tuple(self._reductions()),
            links=links,
            update=tuple(update),
            overhead=self.prices.step_overhead,
            overlap_slowdown=overlap_slowdown(self.prices.num_of_types),
        )

    def _boundaries(self) -> tuple[tuple[Boundary, ...], tuple[LinkTime, ...]]:
        """What kinds of slices hand to each other. Of a slice that sends to several of a kind, or receives from
        several, all go through its one link: the busier end counts."""
        boundaries, links = [], []
        for boundary, pairs in enumerate(self.pairs):
            sent: dict[tuple[int, int], int] = {}
            received: dict[tuple[int, int], int] = {}
            example: dict[tuple[int, int], _Pair] = {}
            for pair in pairs:
                source, target = self.of[boundary][pair.source], self.of[boundary + 1][pair.target]
                sent[pair.source, target] = sent.get((pair.source, target), 0) + pair.rows
                received[source, pair.target] = received.get((source, pair.target), 0) + pair.rows
                example.setdefault((source, target), pair)
            rows = dict.fromkeys(example, 0)
            for (index, target), count in sent.items():
                between = self.of[boundary][index], target
                rows[between] = max(rows[between], count)
            for (source, index), count in received.items():
                between = source, self.of[boundary + 1][index]
                rows[between] = max(rows[between], count)
            forward, backward = [], []
            for (source, target), pair in example.items():
                one, other = self._links(boundary, pair, rows[source, target])
                links += [one[1], other[1]]
                forward.append(one[0])
                backward.append(other[0])
            boundaries.append(
                Boundary(
                    source_stage=boundary,
                    target_stage=boundary + 1,
                    forward=tuple(forward),
                    backward=tuple(backward),
                )
            )
        return tuple(boundaries), tuple(links)

    def _links(
        self, boundary: int, pair: _Pair, rows: int
    ) -> tuple[tuple[Transfer, LinkTime], tuple[Transfer, LinkTime]]:
        """The message of *rows* rows forward and the one of gradients back, between the ranks that stand for slices."""
        here, there = self.stages[boundary], self.stages[boundary + 1]
        ends = [
            (here.slice(pair.source), self.kinds[boundary][self.of[boundary][pair.source]]),
            (there.slice(pair.target), self.kinds[boundary + 1][self.of[boundary + 1][pair.target]]),
        ]
        whole = self.prices.output_bytes(here.last - 1, rows)
        found = []
        for (source, kind), (target, other) in (ends, ends[::-1]):
            in_rows = other.group.expert > 1
            size = self.prices.handed(whole, len(source), len(target), in_rows=in_rows)
            hop = self.prices.hop(source, target, other.group, size, whole)
            transfer = Transfer(source=kind.rank, target=other.rank, bytes=size)
            link = LinkTime(source=kind.rank, target=other.rank, latency=hop.latency, bandwidth=hop.bandwidth)
            found.append((transfer, link))
        return found[0], found[1]

    def _reductions(self) -> Iterator[Reduction]:
        """The sums of gradients at the end of the step: each stage's own over its data slices, after the last backward,
        and those of tied parameters over the stages that have them."""
        prices, size = self.prices, self.prices.gradient_bytes
        apart = [(readers, shared) for readers, shared in prices.profile.tied if len(self._owners(readers)) > 1]
        for index, stage in enumerate(self.stages):
            dense, experts = prices.parameters(self.layers(index), stage.tensor, stage.expert)
            dense -= sum(shared / stage.tensor for readers, shared in apart if index in self._owners(readers))
            sums = [(stage.tensor, max(0.0, dense) * size), (stage.size, experts * size)]  # in how many parts it is
            seconds = sum(prices.all_reduce(stage.ranks[::parts], parts, amount) for parts, amount in sums)
            whole = sum(amount for _, amount in sums)
            if seconds:
                ranks = tuple(kind.rank for kind in self.kinds[index])
                yield Reduction(ranks=ranks, stages=(index,), bytes=round(whole), seconds=seconds)
        for readers, shared in apart:
            owners = self._owners(readers)
            alike = len({(self.stages[index].rows, *self.stages[index].degrees) for index in owners}) == 1
            degree = self.stages[owners[0]].tensor if alike or not prices.eager else 1  # else it is whole on each rank
            group = tuple(rank for index in owners for rank in self.stages[index].ranks[::degree])
            seconds = prices.all_reduce(group, degree, shared / degree * size)
            ranks = tuple(kind.rank for index in owners for kind in self.kinds[index])
            yield Reduction(ranks=ranks, stages=owners, bytes=round(shared / degree * size), seconds=seconds)

    def _owners(self, readers: Sequence[int]) -> tuple[int, ...]:
        """The stages that have one of the layers *readers*."""
        return tuple(
            index
            for index, stage in enumerate(self.stages)
            if any(stage.first <= layer < stage.last for layer in readers)
        )

    # Memory

    def _whole(self, index: int) -> float:
        """Elements that devices of a stage have besides because what stages share is whole on each of them, as Whale
        runs it, if their meshes are unlike."""
        if not self.prices.eager:
            return 0.0
        owners = [(self._owners(readers), shared) for readers, shared in self.prices.profile.tied]
        meshes = [(stage.rows, *stage.degrees) for stage in self.stages]
        unlike = [shared for own, shared in owners if index in own and len({meshes[one] for one in own}) > 1]
        return sum(unlike) * (1 - 1 / self.stages[index].tensor)

    def memory(self) -> Iterator[DeviceMemory]:
        """Of the smallest device of each kind of slice."""
        for index, (stage, own, costs) in enumerate(zip(self.stages, self.kinds, self.costs, strict=True)):
            prices, layers = self.prices, self.layers(index)
            held = in_flight(self.schedule, len(self.stages), index, self.micro_batches)
            more = self._whole(index)
            degrees = stage.tensor, stage.expert
            state = prices.state_of(layers, *degrees) + prices.state(more)
            step = round(prices.step_bytes(sum(prices.parameters(layers, *degrees)) + more))
            for kind, cost in zip(own, costs, strict=True):
                device = self.prices.cluster.devices[kind.rank]
                rows = kind.group.whole_rows(kind.rows) / stage.expert
                entering = prices.handed_bytes(stage.first - 1, rows) if index else 0.0
                leaving = prices.handed_bytes(stage.last - 1, rows) if index < len(self.stages) - 1 else 0.0
                kept = held * round(cost.kept) + round(message_bytes(entering, leaving, held))
                working = round(cost.working)
                wasted = round((kept + working) * prices.wasted)
                yield DeviceMemory(
                    rank=kind.rank,
                    device=device.name,
                    capacity=device.memory_bytes,
                    parameters=round(state.parameters),
                    gradients=round(state.gradients),
                    optimizer=round(state.optimizer),
                    activations=kept,
                    workspace=max(working, step - kept - wasted),
                    buffers=wasted,
                    framework=round(prices.overhead_bytes[device.type.name]),
                )


def _pairs(cluster: Cluster, here: StageChoice, there: StageChoice) -> Iterator[_Pair]:
    """Who hands rows to whom: slices have their rows in order, as ranges of the micro-batch."""
    source = target = 0
    left, wanted = here.rows[0], there.rows[0]
    while True:
        rows = min(left, wanted)
        if rows:
            a, b = here.ranks[source * here.size], there.ranks[target * there.size]
            yield _Pair(source, target, rows, cluster.devices[a].node == cluster.devices[b].node)
        left, wanted = left - rows, wanted - rows
        if not left:
            source += 1
            if source == here.data:
                return
            left = here.rows[source]
        if not wanted and target + 1 < there.data:
            target += 1
            wanted = there.rows[target]


def cost_of(prices: Prices, layers: range, group: TensorGroup, rows: int, micro_batches: int) -> LayerPrice:
    """A micro-batch through layers on a data slice."""
    kinds = Counter(prices.profile.layers[index] for index in layers)
    found = [(count, prices.layer(kind, group, rows, micro_batches)) for kind, count in kinds.items()]
    backward = sum(count * price.backward for count, price in found)
    forward = sum(count * price.forward for count, price in found)
    return LayerPrice(
        forward=forward,
        backward=backward,
        weights=min(backward, sum(count * price.weights for count, price in found)),
        communication=min(forward + backward, sum(count * price.communication for count, price in found)),
        kept=sum(count * price.kept for count, price in found),
        working=max(price.working for _, price in found),
        update=sum(count * price.update for count, price in found),
        measured=all(price.measured for _, price in found),
    )
