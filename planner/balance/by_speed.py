"""A configuration balanced by speed over mixed devices: the layers of each stage and the samples of each replica.

Layer costs come from `Stages`; `whale.planner.balance.cuts` and `whale.planner.balance.shares` decide, for devices in
the order of the layout; `pipeline_by_speed` decides which devices come first, too. A replica's samples are a share of
the whole batch, divided into its micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, islice, pairwise
from typing import Any, NamedTuple

from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Cluster
from whale.ir.micro_batches import rows_of_micro_batch
from whale.ir.profile import Affine, ModelProfile
from whale.ir.strategy import RECOMPUTES, Offload, Recompute, offload_steps
from whale.ir.units import counted
from whale.planner.balance.cuts import Cut, CutProblem, Objective, StageGroup, Tie, fastest_cut
from whale.planner.balance.shares import Remedy, Worker, fastest_shares, memory_between
from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.configuration import Configuration, Layout, even_cuts
from whale.planner.cost.hosts import has_hosts
from whale.planner.cost.memory import refuse_tiny
from whale.planner.cost.optimizers import Optimizer
from whale.planner.cost.plan import PlanCost
from whale.planner.cost.stack import WHALE, Stack
from whale.planner.cost.uniform import Stages
from whale.planner.network.communication import send
from whale.planner.schedules.in_flight import in_flight

__all__ = [
    "Pipeline",
    "boundless",
    "cut_problem",
    "cuts_by_speed",
    "pipeline_by_speed",
    "refuse_misfit",
    "rows_by_speed",
]


MOST_SETTLED = 8
"""Cuts whose memory is counted in full."""

MOST_ORDERS = 120
"""Limit on the orders of stages' devices that are cut: all orders of five different groups."""

Ladder = Sequence[tuple[str, Mapping[str, Any]]]
"""Changes of one option, each in the user's words and as fields of a `Configuration`, from the smallest to the
largest."""


class Pipeline(NamedTuple):
    """The layers of each stage of a pipeline, and the ranks that run it, one for each replica."""

    layers: tuple[range, ...]
    ranks: tuple[tuple[int, ...], ...]


def cuts_by_speed(
    stages: Stages, ladders: Sequence[Ladder] | None = None, others: Sequence[Mapping[str, Any]] = ()
) -> tuple[range, ...]:
    """Return the layers of every stage with the least step time that fits in memory; all replicas have equal rows.

    Given cuts stay. Interleaved schedules, in which a device has several stages, are not balanced.

    Args:
        stages: of a layout.
        ladders: possible changes if no cut fits; None for the options of ``whale estimate``.
        others: fields of a `Configuration` that the caller may choose by itself, with each of these changes.

    Raises:
        InfeasibleError: no cut fits; the message says what is missing and which changes would fit.
    """
    given = stages.layout.configuration
    if given.pipeline == 1 or given.virtual_stages > 1 or given.layers_per_stage is not None:
        return even_cuts(stages.profile, stages.layout)
    relieved = _relieved(stages, _cut_that_fits, ladders, others)
    remedies = ((change, _settled(other)) for change, other in relieved)
    return _layers(stages, fastest_cut(_settled(stages, "step"), remedies=remedies))


def refuse_misfit(cluster: Cluster, num_stages: int, replicas: int, schedule: str) -> None:
    """Refuse stages and replicas that do not fill a cluster, or share devices.

    Raises:
        UsageError: with what would be one.
    """
    needed = num_stages * replicas
    if needed != len(cluster.devices):
        verb = "needs" if num_stages == 1 else "need"
        raise UsageError(
            f"{counted(num_stages, 'stage')} of {counted(replicas, 'replica')} {verb} {counted(needed, 'device')}, but "
            f"the cluster has {len(cluster.devices)}; change the stages, the replicas or the cluster"
        )
    if schedule == "interleaved" and num_stages > 1:
        raise UsageError(
            "schedule 'interleaved' is for stages that share devices, and these have each its own; annotate the stages "
            "of the model, which then go round the devices, or use another schedule"
        )


def pipeline_by_speed(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch: int,
    micro_batches: int,
    num_stages: int,
    replicas: int,
    precision: str,
    schedule: str = "1f1b",
    stack: Stack = WHALE,
    recompute: Recompute = "none",
    zero: int = 0,
    offload: Offload = "none",
    optimizer: Optimizer = "adamw",
    in_full: bool = True,
    room: float = 1.0,
    others: Sequence[Mapping[str, Any]] = (),
) -> Pipeline:
    """Return the stages of a pipeline over all devices: each on neighbours in the cluster's order, and those first that
    make the step shortest. Exact over all orders of groups of different types up to `MOST_ORDERS`.

    Args:
        profile: of the model.
        cluster: the devices: *num_stages* x *replicas*.
        batch: rows of a step.
        micro_batches: of a step.
        num_stages: of the pipeline.
        replicas: of every stage; layers are divided as if all had equal rows in all micro-batches.
        precision: a name in `whale.planner.cost.precision`.
        schedule: a name in `whale.planner.schedules.orders`.
        stack: that runs it.
        recompute: what backwards of all stages compute again.
        zero: how much of their state the replicas of a stage divide.
        offload: what is in the memory of hosts, in all stages.
        optimizer: whose states are in memory.
        in_full: count what devices hold of no single layer too, as buckets of what they exchange.
        room: the part of their memory that devices have for that; with less than all no change is proposed.
        others: recompute, level and offload that the caller tries too, as fields of a `Configuration`.

    Raises:
        UsageError: the numbers do not fit the cluster or the batch.
        InfeasibleError: no cut fits in memory.
    """
    refuse_misfit(cluster, num_stages, replicas, schedule)
    refuse_tiny(cluster.devices, len(cluster.devices))
    if num_stages == 1:
        return Pipeline((range(len(profile.layers)),), (tuple(range(replicas)),))
    rows = -(-rows_of_micro_batch(batch, micro_batches) // replicas)  # of the fullest replica, in a full micro-batch
    configuration = Configuration(
        batch=rows * micro_batches * replicas,
        micro_batch=rows,
        pipeline=num_stages,
        data=replicas,
        precision=precision,
        schedule=schedule,
        recompute=recompute,
        zero=zero,
        offload=offload,
        optimizer=optimizer,
        balance="speed",
    )
    layout = Layout.of(configuration, cluster)
    stages = Stages.of(profile, layout, stack=stack)
    if room < 1:
        stages = _with_memory(stages, lambda size: int(size * room))
    parts = [part for part in range(2, rows + 1) if rows % part == 0]
    more = [(f"--micro-batches {micro_batches * part}", {"micro_batch": rows // part}) for part in parts]
    stages = _ordered(stages, partial(_settled, objective="step") if in_full else cut_problem)
    if in_full:
        every = [more, _more_recompute(stages), _more_shared(stages), _more_hosted(stages)]
        layers = cuts_by_speed(stages, every if room == 1 else (), others)
    else:
        layers = _layers(stages, fastest_cut(cut_problem(stages)))
    order = stages.layout.order
    return Pipeline(layers, tuple(order[first : first + replicas] for first in range(0, len(order), replicas)))


def _ordered(stages: Stages, problem_of: Callable[[Stages], CutProblem]) -> Stages:
    """The stages with the groups of devices in the order with the fastest cut, else in that which lacks least memory.

    All orders of groups of different types, if these are few; else the best of some simple ones, from which groups are
    exchanged as long as that helps.
    """
    layout = stages.layout
    data, cluster = layout.data, layout.cluster
    groups = [layout.order[first : first + data] for first in range(0, len(layout.order), data)]
    types = [tuple(cluster.devices[rank].type.name for rank in group) for group in groups]

    @cache
    def of(kinds: tuple[tuple[str, ...], ...]) -> Stages:
        """The stages whose groups are of these kinds; alike ones keep their order."""
        left = list(zip(types, groups, strict=True))
        order: list[int] = []
        for kind in kinds:
            place = next(index for index, (own, _) in enumerate(left) if own == kind)
            order += left.pop(place)[1]
        changed = replace(layout.configuration, device_order=tuple(order))
        return stages.changed(Layout.of(changed, cluster))

    @cache
    def cost(kinds: tuple[tuple[str, ...], ...]) -> tuple[float, float]:
        try:
            return 0.0, fastest_cut(problem_of(of(kinds))).step_seconds
        except InfeasibleError as error:
            return error.lacking_bytes, 0.0

    given = tuple(types)
    every = list(islice(_orders(Counter(types)), MOST_ORDERS + 1))
    if len(every) == 1:
        return stages
    if len(every) <= MOST_ORDERS:
        return of(min([given, *every], key=cost))
    memory = {
        kind: min(cluster.devices[rank].memory_bytes for rank in group)
        for kind, group in zip(types, groups, strict=True)
    }
    by_memory = tuple(sorted(types, key=lambda kind: -memory[kind]))
    best, left = min([given, given[::-1], by_memory, by_memory[::-1]], key=cost), MOST_ORDERS
    better: tuple[tuple[str, ...], ...] | None = best
    while better is not None:
        best, better = better, None
        for one, other in combinations(range(len(best)), 2):
            if best[one] == best[other] or not left:
                continue
            left -= 1
            changed = list(best)
            changed[one], changed[other] = changed[other], changed[one]
            if cost(tuple(changed)) < cost(best):
                better = tuple(changed)
                break
    return of(best)


def _orders(counts: Mapping[tuple[str, ...], int]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All orders of things of which there are some of each kind.

    >>> a, b = ("a",), ("b",)
    >>> list(_orders({a: 1, b: 2})) == [(a, b, b), (b, a, b), (b, b, a)]
    True
    """
    if not any(counts.values()):
        yield ()
    for kind, count in counts.items():
        if count:
            for others in _orders({**counts, kind: count - 1}):
                yield (kind, *others)


def rows_by_speed(stages: Stages, cuts: Sequence[range]) -> tuple[float, ...]:
    """Return the rows of a micro-batch on every replica (the mean over its micro-batches) that minimize the time of the
    slowest replica within memory.

    Raises:
        InfeasibleError: the batch does not fit; the message says what is missing and which changes would fit.
    """
    layout = stages.layout
    batch, micro_batches = layout.configuration.batch, layout.num_micro_batches
    relieved = _relieved(stages, lambda other: fastest_shares(batch, _replicas(other, cuts)))
    remedies = (Remedy(change=change, total=batch, workers=_replicas(other, cuts)) for change, other in relieved)
    found = fastest_shares(batch, _replicas(stages, cuts), unit="samples", remedies=remedies)
    return tuple(share / micro_batches for share in found.units)


def boundless(stages: Stages) -> Stages:
    """The same stages on devices with unlimited memory, to balance by speed a batch that does not fit."""
    return _with_memory(stages, lambda size: 2**60)


def _with_memory(stages: Stages, memory: Callable[[int], int]) -> Stages:
    """The same stages on devices with another memory than their *size*."""
    cluster = stages.layout.cluster
    devices = tuple(
        replace(device, type=replace(device.type, memory_bytes=memory(device.type.memory_bytes)))
        for device in cluster.devices
    )
    return stages.changed(replace(stages.layout, cluster=replace(cluster, devices=devices)))


def _cut_that_fits(stages: Stages) -> None:
    """Raise `InfeasibleError` if no cut fits on devices, or the fastest one does not on their hosts."""
    cut = fastest_cut(_settled(stages), "slowest")
    if stages.layout.configuration.offload != "none" and not all(
        host.total <= host.capacity for host in _plan(stages, cut)[1].hosts()
    ):
        raise InfeasibleError("hosts have too little memory")


def _plan(stages: Stages, cut: Cut) -> tuple[list[ChainStage], PlanCost]:
    """The stages of a cut, and what they cost."""
    layout = stages.layout
    rows = (layout.configuration.batch / (layout.data * layout.num_micro_batches),) * layout.data
    own = stages.plan(_layers(stages, cut), rows)
    return own, PlanCost.of_stages(stages.prices, own, layout.num_micro_batches, layout.configuration.schedule)


def _settled(stages: Stages, objective: Objective = "slowest") -> CutProblem:
    """The layout's pipeline as numbers, with all that the devices of its fastest cut hold: buckets of what replicas
    exchange, and what an optimizer's step needs, are of no single layer."""
    problem = cut_problem(stages)
    for _ in range(MOST_SETTLED):
        try:
            cut = fastest_cut(problem, objective)
        except InfeasibleError:
            break
        own, plan = _plan(stages, cut)
        held = {device.rank: device for device in plan.memory()}
        groups = []
        for group, counted_bytes, stage in zip(problem.groups, cut.fullest_bytes, own, strict=True):
            of_stage = [held[rank] for rank in stage.ranks if rank in held]
            lacking = max((one.total - one.capacity for one in of_stage), default=0)
            more = max(0.0, lacking - (counted_bytes - group.capacity_bytes))
            groups.append(replace(group, overhead_bytes=group.overhead_bytes + more) if lacking > 0 else group)
        if groups == list(problem.groups):
            break
        problem = replace(problem, groups=tuple(groups))
    return problem


def _layers(stages: Stages, cut: Cut) -> tuple[range, ...]:
    return tuple(range(*bounds) for bounds in pairwise((*cut.starts, len(stages.profile.layers))))


def cut_problem(stages: Stages) -> CutProblem:
    """The layout's pipeline as numbers: for each layer on each stage's devices, the slowest and the fullest replica."""
    layout, profile = stages.layout, stages.profile
    rows = layout.configuration.batch / (layout.data * layout.num_micro_batches)
    groups = tuple(_group(stages, stage, rows) for stage in range(layout.configuration.pipeline))
    num = len(profile.layers)
    outputs = [stages.prices.handed_on(range(end), range(end, num), rows) for end in range(1, num)]
    position = {group.name: stage for stage, group in enumerate(groups)}

    @cache
    def sent(num_bytes: float, source: int, target: int) -> float:
        ends = layout.rank(stage=source, replica=0), layout.rank(stage=target, replica=0)
        size, beside = num_bytes / layout.configuration.tensor, _sends_beside(layout, source, target)
        return sum(send(stages.prices.topology, *way, size, sharing=beside).seconds for way in (ends, ends[::-1]))

    def tie(layers: tuple[int, ...], elements: float) -> Tie:
        part, prices = elements / layout.configuration.tensor, stages.prices
        seconds = prices.all_reduce(_ends(stages), layout.configuration.tensor, prices.gradient_bytes * part)
        return Tie(layers, prices.state(part).total, seconds)

    return CutProblem(
        groups=groups,
        micro_batches=layout.num_micro_batches,
        send=lambda layer, a, b: sent(outputs[layer], position[a.name], position[b.name]),
        ties=tuple(tie(layers, elements) for layers, elements in profile.tied),
        in_flight=tuple(
            in_flight(layout.configuration.schedule, len(groups), stage, layout.num_micro_batches)
            for stage in range(len(groups))
        ),
    )


def _sends_beside(layout: Layout, source: int, target: int) -> int:
    """The messages that leave the first replica's node at the same time, its own among them: of each replica there, and
    of each device of its stage."""

    def node(stage: int, replica: int) -> str:
        return layout.cluster.devices[layout.rank(stage=stage, replica=replica)].node

    leaving = [
        node(source, 0) != node(target, 0) and node(source, one) == node(source, 0) for one in range(layout.data)
    ]
    return max(1, sum(leaving) * layout.configuration.tensor)


def _ends(stages: Stages) -> tuple[int, int]:
    """The first and the last stage's first device."""
    layout = stages.layout
    return layout.rank(stage=0, replica=0), layout.rank(stage=layout.configuration.pipeline - 1, replica=0)


def _group(stages: Stages, stage: int, rows: float) -> StageGroup:
    layout, profile = stages.layout, stages.profile
    replicas = list({_key(stages, replica, (stage,)): replica for replica in range(layout.data)}.values())
    first_of = {kind: layer for layer, kind in reversed(list(enumerate(profile.layers)))}
    costs = {
        kind: [stages.cost(range(layer, layer + 1), stage, replica, rows) for replica in replicas]
        for kind, layer in first_of.items()
    }
    devices = [layout.cluster.devices[rank] for replica in replicas for rank in layout.devices_of(stage, replica)]
    smallest = min(devices, key=lambda device: device.memory_bytes)
    seconds = {kind: max(cost.forward + cost.backward for cost in found) for kind, found in costs.items()}
    kept = {kind: max(cost.kept for cost in found) * stages.prices.waste for kind, found in costs.items()}
    working = {kind: max(cost.working for cost in found) * stages.prices.waste for kind, found in costs.items()}
    state = {kind: stages.state([layer]).total for kind, layer in first_of.items()}
    return StageGroup(
        name=smallest.name,
        seconds=tuple(seconds[kind] for kind in profile.layers),
        fixed_bytes=tuple(state[kind] for kind in profile.layers),
        kept_bytes=tuple(kept[kind] for kind in profile.layers),
        working_bytes=tuple(working[kind] for kind in profile.layers),
        overhead_bytes=stages.prices.overhead_bytes[smallest.type.name],
        capacity_bytes=smallest.memory_bytes,
    )


def _replicas(stages: Stages, cuts: Sequence[range]) -> list[Worker]:
    """Each replica as a worker for samples of the batch; replicas of one kind are priced once."""
    every = tuple(range(stages.layout.configuration.pipeline))
    known: dict[Any, Worker] = {}
    for replica in range(stages.layout.data):
        key = _key(stages, replica, every)
        if key not in known:
            known[key] = _replica(stages, cuts, replica)
    return [known[_key(stages, replica, every)] for replica in range(stages.layout.data)]


def _replica(stages: Stages, cuts: Sequence[range], replica: int) -> Worker:
    layout = stages.layout
    depth, micro_batches = layout.configuration.pipeline, layout.num_micro_batches

    alike = [
        (tuple(stages.profile.layers[layer] for layer in part), _key(stages, replica, (index % depth,)))
        for index, part in enumerate(cuts)
    ]
    first_of = {key: index for index, key in reversed(list(enumerate(alike)))}

    @cache
    def seconds(samples: int) -> float:
        """Step time by the formula that `whale.planner.balance.cuts` minimizes."""
        costs = {
            key: stages.cost(cuts[index], index % depth, replica, samples / micro_batches)
            for key, index in first_of.items()
        }
        times = [costs[key].forward + costs[key].backward for key in alike]
        devices = [sum(times[stage::depth]) for stage in range(depth)]
        return (micro_batches - 1) * max(devices) + sum(devices)

    name, need, capacity = min(
        (_need(stages, cuts, stage, replica) for stage in range(depth)),
        key=lambda found: (found[2] - found[1].fixed) / max(found[1].per_row, 1e-9),
    )
    return Worker(name=name, seconds=seconds, memory=need, capacity_bytes=capacity)


def _need(stages: Stages, cuts: Sequence[range], stage: int, replica: int) -> tuple[str, Affine, float]:
    """The device of a replica's pipeline stage with the least memory: its name, its bytes by the replica's samples, its
    capacity."""
    layout = stages.layout
    given, micro_batches = layout.configuration, layout.num_micro_batches
    own = cuts[stage :: given.pipeline]
    schedule = given.schedule
    held = in_flight(schedule, given.pipeline, stage, micro_batches)
    if len(own) > 1 and schedule != "gpipe":  # interleaved, as Megatron's warm-up counts its chunks
        held = min(2 * (given.pipeline - stage) - 1 + (len(own) - 1) * given.pipeline, micro_batches * len(own))
    elif len(own) > 1:
        held *= len(own)
    devices = [layout.cluster.devices[rank] for rank in layout.devices_of(stage, replica)]
    smallest = min(devices, key=lambda device: device.memory_bytes)
    framework = stages.prices.overhead_bytes[smallest.type.name]
    fixed = framework + stages.state([layer for part in own for layer in part]).total

    def activations(samples: float) -> float:
        costs = [stages.cost(part, stage, replica, samples / micro_batches) for part in own]
        kept = held * sum(cost.kept for cost in costs) / len(own)
        return (kept + max(cost.working for cost in costs)) * stages.prices.waste

    even = given.batch / layout.data
    return smallest.name, memory_between(activations, even, 2 * even, fixed=fixed), smallest.memory_bytes


def _key(stages: Stages, replica: int, among: Sequence[int]) -> object:
    """Key of a replica: replicas with equal device types and node spans take the same time at these stages."""
    layout = stages.layout
    found = []
    for stage in among:
        devices = [layout.cluster.devices[rank] for rank in layout.devices_of(stage, replica)]
        nodes = Counter(device.node for device in devices)
        found.append((tuple(sorted({device.type.name for device in devices})), tuple(sorted(nodes.values()))))
    return tuple(found)


def _relieved(
    stages: Stages,
    attempt: Callable[[Stages], object],
    ladders: Sequence[Ladder] | None = None,
    others: Sequence[Mapping[str, Any]] = (),
) -> Iterator[tuple[str, Stages]]:
    """The configuration after the smallest change of each ladder that fits by *attempt*, with any of *others* if the
    change leaves these fields as they are; otherwise after the largest."""
    layout = stages.layout
    for ladder in ladders if ladders is not None else _options(stages):
        for step, (change, fields) in enumerate(ladder):
            tried = [
                stages.changed(Layout.of(replace(layout.configuration, **more, **fields), layout.cluster))
                for more in ({}, *others)
                if not set(more) & set(fields)
            ]
            if (working := next((one for one in tried if _works(attempt, one)), None)) is not None:
                yield change, working
                break
            if step == len(ladder) - 1 and "offload" not in fields:
                yield change, tried[0]


def _more_recompute(stages: Stages) -> Ladder:
    """The rules that keep less than the given one, as far as they have costs."""
    given, profile = stages.layout.configuration.recompute, stages.profile
    known = profile.rules if stages.prices.runs else ("full",)
    rules = RECOMPUTES[RECOMPUTES.index(given) + 1 :]
    return [(f"--recompute {rule}", {"recompute": rule}) for rule in rules if rule in known]


def _more_shared(stages: Stages) -> Ladder:
    """The levels that divide more of the state of replicas than the given one."""
    layout = stages.layout
    levels = range(layout.configuration.zero + 1, 4) if layout.data > 1 else ()
    return [(f"--zero {zero}", {"zero": zero}) for zero in levels]


def _more_hosted(stages: Stages) -> Ladder:
    """Changes that leave more to the memory of hosts than the given one, if there is some."""
    given = stages.layout.configuration.offload
    steps = offload_steps(has_tables=stages.profile.has_tables)
    words = steps[steps.index(given) + 1 :] if given in steps and has_hosts(stages.layout.cluster) else ()
    return [(f"--offload {word}", {"offload": word}) for word in words]


def _options(stages: Stages) -> list[Ladder]:
    """Smaller micro-batches, more recomputation, more shared state: as options of ``whale estimate``."""
    layout = stages.layout
    given = layout.configuration
    halves = [given.micro_batch >> times for times in range(1, given.micro_batch.bit_length())]
    return [
        [(f"--micro-batch {rows}", {"micro_batch": rows}) for rows in halves],
        _more_recompute(stages),
        _more_shared(stages),
    ]


def _works(attempt: Callable[[Stages], object], stages: Stages) -> bool:
    try:
        attempt(stages)
    except InfeasibleError:
        return False
    return True
