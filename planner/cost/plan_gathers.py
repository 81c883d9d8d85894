"""Seconds that dividing a stage's state over its replicas adds to its tasks: gathers of parameters, sums of gradients
(ZeRO 2 and 3), and copies of what is on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.hosts import adding_on_host, link_to_host, with_copies
from whale.planner.cost.replica_kinds import Exchanged, Kind, own_bytes
from whale.planner.cost.sharded import ShardedUnit, scattered_by, sharded_seconds
from whale.planner.cost.stage import CostModel
from whale.planner.cost.stage_cost import StageCost
from whale.planner.cost.step import overlap_slowdown

__all__ = ["Tie", "sharded_units", "tied_gather", "with_gathers"]

Tie = tuple[Sequence[int], float]
"""Layers that share a parameter, and its elements."""

LOW_BYTES = 2
"""Bytes of an element of a cast."""


def with_gathers(
    prices: CostModel, stage: ChainStage, kind: Kind, cost: StageCost, micro_batches: int, *, pipelined: bool
) -> StageCost:
    """A stage whose weights and gradients its replicas share (ZeRO 2 and 3).

    What is gathered at a time is each block, and the layers before, between and after blocks together; in Whale each
    bucket. Where weights are not gathered for every micro-batch (ZeRO 2, in other stacks pipelines), and gradients not
    reduced with every one, a micro-batch has its share of what the step has; in Whale the step itself has it.
    """
    if prices.runs:
        done = Exchanged.of(prices, stage, micro_batches)
        gathers, reduces, regather = float(done.tasks), float(done.each), True
    else:
        regather = prices.stack.zero == 3 and not pipelined
        gathers = 1.0 if regather else 1 / micro_batches
        reduces = 1 / micro_batches if pipelined else 1.0
        if prices.stack.zero < 2:
            return cost
    if (len(stage.data_group) < 2 and not stage.state_on_host) or not (gathers or reduces):
        return cost
    units = [
        one._replace(gather=gathers * one.gather, reduce=reduces * one.reduce)
        for one in sharded_units(prices, stage, kind, micro_batches)
    ]
    slowdown = prices.stack.calibration.sharded_slowdown
    if prices.runs:
        slowdown = overlap_slowdown(prices.num_of_types)
    forward, backward = sharded_seconds(
        units, regather=regather, slowdown=slowdown, keeps_last=not prices.runs, tail=not prices.runs
    )
    if stage.state_on_host:
        own, link = own_bytes(prices, stage, kind), link_to_host(prices.cluster, kind.rank)
        how = {"kept": cost.hosted, "read": gathers * own, "summed": reduces * own}
        forward, backward = with_copies(forward, backward, **how, link=link)
        backward += adding_on_host(prices.cluster, kind.rank, reduces * own) * (1 - 1 / micro_batches)
    communication = cost.communication + forward - cost.forward + backward - cost.backward
    return cost._replace(forward=forward, backward=backward, communication=min(communication, forward + backward))


def sharded_units(
    prices: CostModel,
    stage: ChainStage,
    kind: Kind,
    micro_batches: int,
    *,
    once: bool = False,
    apart: Sequence[Tie] = (),
) -> list[ShardedUnit]:
    """Parts of a stage that are gathered and reduced at a time, with the computation that reads them; what several read
    is in the first of them if parameters are gathered *once* a step, but not what is gathered *apart*, or not at
    all."""
    precision, layers = prices.precision, prices.profile.layers
    size = min(2, precision.element_bytes) if precision.mixed and not prices.runs else precision.element_bytes
    shards = 1 if prices.runs else len(stage.data_group)
    scattered = scattered_by(prices.num_of_types) if prices.runs else "reduce_scatter"
    units: list[ShardedUnit] = []
    for block, run in groupby(stage.layers, key=lambda index: layers[index] if prices.repeats(layers[index]) else -1):
        members = list(run)
        num: float = len(members) if block >= 0 else 1
        dense, experts = (size * part for part in prices.parameters(members, stage.tensor, stage.expert))
        if once:
            dense = max(0.0, dense - size * _known_before(prices, stage, members, apart))
        casts = _gathered_casts(prices, stage, members, apart, once=once)
        low = 1 + casts * (1 - size / LOW_BYTES) / max(1.0, dense + experts)  # of what is gathered, as it is read
        num_bytes = dense + experts
        if prices.runs:
            degree = stage.tensor * stage.expert
            unit = prices.message_bytes(stage.data_group, num_bytes, degree, members, divided=True)
            num = max(1.0, round(num_bytes / max(1.0, unit)))
        spent = prices.stage(members, kind.group, kind.rows, micro_batches, shards)
        other = prices.gradient_bytes / size if prices.runs else 1.0
        gather = _exchanged(prices, stage, "all_gather", low * dense / num, low * experts / num)
        reduce = _exchanged(prices, stage, scattered, other * dense / num, other * experts / num)
        if stage.state_on_host:
            own = kind.share * (dense / stage.expert + experts) / num
            copied = own / link_to_host(prices.cluster, kind.rank)
            gather, reduce = max(gather, copied), max(reduce, copied)
        units.append(
            ShardedUnit(
                forward=spent.forward / num,
                backward=spent.backward / num,
                gather=gather,
                reduce=reduce,
                num=int(num),
            )
        )
    return units


def tied_gather(prices: CostModel, stage: ChainStage, tie: Tie, group: Sequence[int], degree: int) -> float:
    """Seconds to gather what layers of a stage and of others share, of which each of a *group* has a stretch, beside
    *degree* - 1 like it."""
    size = LOW_BYTES if _all_cast(prices, tie, (stage.tensor, stage.expert)) else prices.precision.element_bytes
    return prices.over("all_gather", group, degree, tie[1] / degree * size)


def _all_cast(prices: CostModel, tie: Tie, degrees: tuple[int, int]) -> bool:
    """Whether all layers that share a parameter cast it."""
    readers, shared = tie
    kinds = {prices.profile.layers[layer] for layer in readers}
    return all(prices.casts_of(kind, degrees) >= LOW_BYTES * shared / degrees[0] for kind in kinds)


def _known_before(prices: CostModel, stage: ChainStage, members: Sequence[int], apart: Sequence[Tie]) -> float:
    """Elements of what some layers of a stage share with those before them, or gather *apart*."""
    found = 0.0
    for readers, shared in prices.profile.tied:
        first = next((layer for layer in stage.layers if layer in readers), None)
        is_known = (readers, shared) in apart or first not in members
        found += shared / stage.tensor if is_known and not set(readers).isdisjoint(members) else 0.0
    return found


def _gathered_casts(
    prices: CostModel, stage: ChainStage, members: Sequence[int], apart: Sequence[Tie], *, once: bool
) -> float:
    """Bytes of parameters of some layers of a stage that are gathered as casts: what layers share if all of them cast
    it, in the first of them if it is gathered *once* a step."""
    degrees = stage.tensor, stage.expert
    found = prices.casts(members, degrees)
    for readers, shared in prices.profile.tied if found else ():
        size, kinds = LOW_BYTES * shared / stage.tensor, prices.profile.layers
        own = sum(layer in members and prices.casts_of(kinds[layer], degrees) >= size for layer in readers)
        first = next((layer for layer in stage.layers if layer in readers), None)
        is_gathered = first in members and (readers, shared) not in apart if once else bool(own)
        found -= size * (own - (is_gathered and _all_cast(prices, (readers, shared), degrees)))
    return max(0.0, found)


def _exchanged(prices: CostModel, stage: ChainStage, kind: str, dense: float, experts: float) -> float:
    """Seconds of a collective over those that hold bytes of dense parameters, and of experts, whom fewer hold."""
    if stage.expert == 1:
        return prices.over(kind, stage.data_group, stage.tensor, dense + experts, stage.owned)
    own = prices.over(kind, stage.data_group[:: stage.expert], stage.tensor * stage.expert, experts)
    return own + prices.over(kind, stage.data_group, stage.tensor, dense)
