"""Why a step takes what it takes, and what would make it shorter: found by simulating its workload again, changed.

Every change is one that a user can make; what it gives is the simulator's answer and no rule of thumb. Numbers that the
workload does not hold are taken in proportion, but rows are whole: 16 rows take as long on five devices as on four. It
knows neither model nor cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import ceil, prod
from operator import mul
from typing import Any, NamedTuple

from whale.errors import WhaleError
from whale.ir.plan import Plan, PlanStage
from whale.ir.shares import shares_on_axis
from whale.ir.workload import DeviceMemory, Prediction, StageWork, Workload
from whale.planner.balance.shares import Worker, fastest_shares
from whale.planner.cost.memory import FRAGMENTATION
from whale.planner.schedules.in_flight import in_flight
from whale.planner.schedules.orders import SCHEDULES
from whale.planner.simulation.simulate import simulate_alike
from whale.planner.simulation.timeline import Timeline

__all__ = ["Change", "Difference", "Explanation", "Saving", "Wait", "difference", "explain", "savings"]

_SCHEDULE = "schedule "
LEAST_GAIN = 0.005
"""A change that saves less of the step is not worth a line."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A wait: seconds of a step in which ``rank``, and ranks like it, wait for ``peer`` (-1: no single rank), and their
    part of the breakdown."""

    rank: int
    peer: int
    part: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something to do, and the step that it should give; ``fits`` None where memory is not known."""

    what: str
    step_seconds: float
    fits: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A step, explained.

    Attributes:
        step_seconds: as simulated.
        bound: what takes most of it, in a sentence.
        rank: that works longest, of which the breakdown is.
        breakdown: its seconds by part of the step.
        busiest: the stage whose tasks take longest, and their seconds in the step.
        waits: the longest, longest first.
        changes: those that fit and save most, best first.
        others: changes that were tried and save nothing, or do not fit.
    """

    step_seconds: float
    bound: str
    rank: int
    breakdown: Mapping[str, float]
    busiest: tuple[int, float]
    waits: tuple[Wait, ...]
    changes: tuple[Change, ...]
    others: tuple[Change, ...]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Something to do, and about how many bytes it frees of the fullest device; ``is_most``: it frees that at most."""

    what: str
    bytes: int
    is_most: bool = False


def savings(plan: Plan) -> tuple[Saving, ...]:
    """Return what would free most of the memory of the plan's fullest device, most first.

    State that replicas divide is what the prediction has of it, and all gradients where several micro-batches add to
    them; in low precision replicas divide parameters from level 1 on, and at level 3 the copies that operators read.
    Backwards could compute again, or hosts have, what forwards keep of activations. How much of it only a model tells,
    so all of it is the most. So is the state of a device that is in several stages, for each of them; of that replicas
    divide what they sum.
    """
    memory = plan.prediction.memory if plan.prediction is not None else ()
    if not memory:
        return ()
    fullest = max(memory, key=lambda device: device.share)
    found = []
    for index, stage in enumerate(plan.stages):
        if fullest.rank not in stage.ranks:
            continue
        level, freed = stage.state.level if stage.state is not None else 0, 0.0
        replicas = prod(axis.size for axis in stage.axes or () if axis.divides_batch)
        several = sum(fullest.rank in other.ranks for other in plan.stages) > 1
        whole = stage.offload in ("both", "tables")  # a stage with tables there has no other word
        hosted = {"state", "activations"} if whole else {stage.offload}
        low = plan.precision in ("bf16", "fp16") and "state" not in hosted
        is_divided = level >= (1 if low else 3)
        parameters = fullest.parameters * (replicas if is_divided else 1)
        states = fullest.optimizer * (replicas if level else 1)
        trained = min(parameters, states) if states else parameters  # no more than has states
        gradients = trained if plan.micro_batches > 1 and "state" not in hosted else 0
        parts = (
            fullest.optimizer + (trained if low else 0),
            max(fullest.gradients, gradients),
            trained / 2 if low else parameters,
        )
        summed = _summed_part(plan, index, fullest, trained) if several else 1.0
        for other, part in enumerate(parts, 1):
            freed += summed * part * (1 - 1 / replicas) if other > level else 0.0
            if other > level and freed:
                found.append(Saving(what=f"zero {other} in stage {index}", bytes=round(freed)))
        rows = (plan.batch or 0) / plan.micro_batches / replicas
        if replicas > 1 and 0 < rows <= 1 and fullest.activations:  # no micro-batch has fewer
            what = f"rows cut over the {replicas} replicas of stage {index} (split({replicas}, dim=...))"
            found.append(Saving(what=what, bytes=round(fullest.activations * (1 - 1 / replicas))))
        kept = _kept(plan, index, fullest)
        if stage.recompute != "full" and kept:
            found.append(Saving(what=f"recompute 'full' in stage {index}", bytes=kept, is_most=True))
        own = fullest.optimizer + fullest.gradients + (fullest.parameters if low or is_divided else 0)
        for word, size in (("state", own), ("activations", kept)):
            if word not in hosted and size and not fullest.device.startswith("cpu"):  # its memory is that of the host
                is_most = word == "activations" or several
                found.append(Saving(what=f"offload '{word}' in stage {index}", bytes=size, is_most=is_most))
    return tuple(sorted(found, key=lambda saving: -saving.bytes))


def _summed_part(plan: Plan, index: int, device: DeviceMemory, trained: float) -> float:
    """The part of a device's trained parameters whose gradients the replicas of a stage sum."""
    sums = plan.workload.reductions if plan.workload is not None else ()
    own = sum(one.bytes for one in sums if one.stages == (index,) and device.rank in one.ranks)
    return min(1.0, own / trained) if trained else 0.0


def _kept(plan: Plan, index: int, device: DeviceMemory) -> int:
    """Bytes of activations that forwards of a stage keep on a device, of all micro-batches in flight, with what their
    allocator wastes; all of its activations where the plan does not say it."""
    work = plan.workload.stages[index] if plan.workload is not None else None
    if work is None or not work.kept_bytes:
        return device.activations
    one = dict(zip(work.ranks, work.kept_bytes, strict=False)).get(device.rank, max(work.kept_bytes))
    num = in_flight(plan.schedule, len(plan.stages), index, plan.micro_batches)
    wasted = min(FRAGMENTATION, device.buffers / max(1, device.activations))
    return round(min(num * one, device.activations) * (1 + wasted))


def explain(
    workload: Workload, prediction: Prediction | None = None, *, plan: Plan | None = None, num_changes: int = 3
) -> Explanation:
    """Explain the step of a workload.

    Args:
        workload: of a plan.
        prediction: of the same plan; its memory says whether a change fits.
        plan: whose replicas have whole rows; None: rows are divided as finely as one likes.
        num_changes: the most that are proposed.
    """
    timeline = simulate_alike(workload)
    tried = []
    for what, changed, moved in _changes(workload, _replicas_of(plan, workload)):
        try:
            found = simulate_alike(changed)
        except WhaleError:
            continue  # a schedule that does not fit the stages
        more = _moved_bytes(workload, prediction, moved) if prediction is not None and moved is not None else {}
        fits = _fits(prediction, timeline, found, more) if prediction is not None else None
        tried.append(Change(what=what, step_seconds=found.step_seconds, fits=fits))
    tried.sort(key=lambda change: change.step_seconds)
    least = timeline.step_seconds * (1 - LEAST_GAIN)
    good = [change for change in tried if change.fits is not False and change.step_seconds < least]
    schedules = [change for change in good if change.what.startswith(_SCHEDULE)]
    good = [change for change in good if change not in schedules[1:]]  # the best one is enough
    stage_seconds = [_full_micro_batches(workload) * _longest(stage) for stage in workload.stages]
    busiest = max(range(len(stage_seconds)), key=lambda index: stage_seconds[index])
    rank = timeline.busiest_rank
    return Explanation(
        step_seconds=timeline.step_seconds,
        bound=_bound(workload, timeline, rank, busiest, stage_seconds[busiest]),
        rank=rank,
        breakdown={str(part): seconds for part, seconds in timeline.breakdowns[rank].items()},
        busiest=(busiest, stage_seconds[busiest]),
        waits=_waits(timeline),
        changes=tuple(good[:num_changes]),
        others=tuple(change for change in tried if change not in good[:num_changes]),
    )


def _full_micro_batches(workload: Workload) -> float:
    """How many full micro-batches have as many rows as all of them."""
    return workload.micro_batches - 1 + workload.last_share


def _longest(stage: StageWork) -> float:
    return max(ahead + back for ahead, back in zip(stage.forward, stage.backward, strict=True))


def _bound(workload: Workload, timeline: Timeline, rank: int, busiest: int, seconds: float) -> str:
    parts = {str(part): spent for part, spent in timeline.breakdowns[rank].items()}
    share = seconds / timeline.step_seconds if timeline.step_seconds else 0.0
    largest = max(parts, key=lambda part: parts[part])
    words = {
        "compute": "computation",
        "communication": "collectives inside stages",
        "pipeline": "waiting for other stages",
        "transfer": "messages between stages",
        "stall": "waiting for slower devices of the same group",
        "reduction": "sums of gradients",
        "update": "the optimizer",
        "overhead": "what belongs to no task",
    }
    text = f"{words[largest]} takes {parts[largest] / max(timeline.step_seconds, 1e-12):.0%} of the step on rank {rank}"
    if len(workload.stages) > 1:
        text += f"; stage {busiest} is the busiest, at work for {share:.0%} of it"
    return text


def _waits(timeline: Timeline, most: int = 5) -> tuple[Wait, ...]:
    seconds: dict[tuple[int, int, str], float] = {}
    for event in timeline.events:
        if event.kind == "idle":
            key = (event.rank, event.peer if event.peer != event.rank else -1, event.reason)
            seconds[key] = seconds.get(key, 0.0) + event.seconds
    longest = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))[:most]
    return tuple(Wait(rank=rank, peer=peer, part=part, seconds=spent) for (rank, peer, part), spent in longest)


def _fits(prediction: Prediction, before: Timeline, after: Timeline, moved: Mapping[int, float]) -> bool | None:
    """Whether every device that the prediction lists still holds it, when only activations in flight change, and what
    is *moved* to some ranks, in bytes."""
    for device in prediction.memory:
        if any(timeline.stand_in(device.rank) not in timeline.memory for timeline in (before, after)):
            return None
        more = after.peak_bytes(device.rank) - before.peak_bytes(device.rank)
        if device.total + max(0, more) + moved.get(device.rank, 0.0) > device.capacity:
            return False
    return True if prediction.memory else None


def _moved_bytes(workload: Workload, prediction: Prediction, moved: _Moved) -> dict[int, float]:
    """Bytes more on the ranks of a stage that takes layers of another: as large a part of what the fullest device of
    that has for them, but its activations over as many devices."""
    held = {device.rank: device for device in prediction.memory}
    giver, taker = (workload.stages[index].ranks for index in (moved.giver, moved.taker))
    given = [held[rank] for rank in giver if rank in held]
    if not given:
        return {}
    kept = max(one.activations for one in given) * len(giver) / max(1, len(taker))
    state = max(one.total - one.framework - one.activations for one in given)
    return dict.fromkeys(taker, moved.part * (kept + state))


# --- what could be changed --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Replicas:
    """The replicas of a stage, which divide the rows of its micro-batches.

    Attributes:
        rows: of a micro-batch, of all replicas together; None: not known, and divided as finely as one likes.
        row_seconds: of each replica for a row, or for its part of a micro-batch.
        size: devices of a replica.
    """

    rows: int | None
    row_seconds: tuple[float, ...]
    size: int = 1

    def seconds(self, *, parts: int = 1, more: int = 0) -> float:
        """Seconds of the slowest replica for a micro-batch of which there are *parts* as many, in the fastest shares;
        with some *more* replicas, each as fast as the fastest."""
        each = [max(seconds, 1e-12) for seconds in (*self.row_seconds, *(min(self.row_seconds),) * more)]
        if self.rows is None:
            return 1 / parts / sum(1 / seconds for seconds in each)
        workers = [Worker(name="", seconds=partial(mul, seconds)) for seconds in each]
        return fastest_shares(ceil(self.rows / parts), workers).seconds


def _replicas_of(plan: Plan | None, workload: Workload) -> list[_Replicas]:
    """The replicas of each stage, by the plan; each rank is one where that does not say which rows it has."""
    found = []
    current = plan is not None and plan.prediction_is_current and len(plan.stages) == len(workload.stages)
    rows = plan.micro_batch_rows if plan is not None and current else None
    for index, work in enumerate(workload.stages):
        own = _Replicas(rows=None, row_seconds=_sums(work))
        if plan is not None and rows is not None:
            seconds = dict(zip(work.ranks, _sums(work), strict=True))
            busy = [(ranks, share) for ranks, share in _rows_of(plan.stages[index], rows) if share]
            known = {
                share: max(seconds[rank] for rank in ranks if rank in seconds) / share
                for ranks, share in busy
                if any(rank in seconds for rank in ranks)
            }
            if known:  # ranks that do as others are not in the workload
                each = tuple(known.get(share, max(known.values())) for _, share in busy)
                own = _Replicas(rows=rows, row_seconds=each, size=len(busy[0][0]))
        found.append(own)
    return found


def _rows_of(stage: PlanStage, rows: int) -> list[tuple[list[int], int]]:
    """The ranks of each replica of a stage, and its rows of a micro-batch; none if annotations decide that."""
    divided = cache(shares_on_axis)
    found: dict[tuple[int, ...], tuple[list[int], int]] = {}
    places = () if stage.axes is None else product(*(range(axis.size) for axis in stage.axes))
    for place, rank in zip(places, stage.ranks, strict=False):
        axes = [(axis, at) for axis, at in zip(stage.axes or (), place, strict=True) if axis.divides_batch]
        own = rows
        for axis, at in axes:
            own = divided(own, axis.shares or (1,) * axis.size)[at]
        found.setdefault(tuple(at for _, at in axes), ([], own))[0].append(rank)
    return list(found.values())


class _Moved(NamedTuple):
    """Layers that one stage gives to another: a part of its own."""

    giver: int
    taker: int
    part: float


class _Try(NamedTuple):
    """A change, the workload with it, and layers that another stage has to hold."""

    what: str
    workload: Workload
    moved: _Moved | None = None


def _changes(workload: Workload, replicas: Sequence[_Replicas]) -> Iterator[_Try]:
    stages = workload.stages
    several = len(stages) > 1
    for schedule in SCHEDULES:
        if several and schedule != workload.schedule:
            changed = _with(workload, schedule=schedule)
            yield _Try(f"{_SCHEDULE}{schedule!r} instead of {workload.schedule!r}", changed)
    if several and all(own.rows != 1 for own in replicas):
        halved = _halved(workload, [own.seconds(parts=2) / own.seconds() for own in replicas])
        yield _Try(f"{halved.micro_batches} micro-batches of half the rows, if half of them took half the time", halved)
    if workload.links:
        links = tuple(_with(link, bandwidth=2 * link.bandwidth) for link in workload.links)
        yield _Try("links of twice the bandwidth between stages", _with(workload, links=links))
    if workload.reductions:
        faster = tuple(_with(reduction, seconds=reduction.seconds / 2) for reduction in workload.reductions)
        changed = _with(workload, reductions=faster)
        yield _Try("sums of gradients in half the time (links of twice the bandwidth)", changed)
    for index, (stage, own) in enumerate(zip(stages, replicas, strict=True)):
        if any(stage.communication):
            yield _Try(
                f"collectives inside stage {index} in half the time (faster links, or fewer devices in a split)",
                _replaced(workload, index, _less_communication),
            )
        if len(set(_sums(stage))) > 1:
            yield _Try(
                f"shares of stage {index} in proportion to what its devices do in a second",
                _replaced(workload, index, partial(_levelled, replicas=own)),
            )
    busiest = max(range(len(stages)), key=lambda index: _longest(stages[index]))
    own = replicas[busiest]
    count = len(own.row_seconds)
    if count > 1:  # a second replica would sum gradients, whose bytes and links a workload without sums does not have
        what = "one device" if own.size == 1 else f"a replica of {own.size} devices"
        yield _Try(
            f"{what} more for stage {busiest}, if there was one ({count + 1} instead of {count})",
            _with_another(workload, busiest, own.seconds(more=1) / own.seconds()),
        )
    if several:
        yield from _moved(workload, busiest)


def _with_another(workload: Workload, index: int, factor: float) -> Workload:
    """A stage with a replica more, whose tasks take a *factor* of the time: a sum over n ranks sends 2 (n - 1) / n of
    its bytes through each of them."""
    reductions = [
        _with(one, seconds=one.seconds * n * n / (n * n - 1))
        if index in one.stages and (n := len(one.ranks)) > 1
        else one
        for one in workload.reductions
    ]
    return _with(_replaced(workload, index, partial(_scaled, factor=factor)), reductions=tuple(reductions))


def _moved(workload: Workload, busiest: int) -> Iterator[_Try]:
    """Move layers from the busiest stage to a neighbour, so that both take equally long."""
    own = _longest(workload.stages[busiest])
    for other in (busiest - 1, busiest + 1):
        if 0 <= other < len(workload.stages) and 0 < _longest(workload.stages[other]) < own:
            theirs = _longest(workload.stages[other])
            middle = (own + theirs) / 2
            moved = _replaced(workload, busiest, partial(_scaled, factor=middle / own))
            moved = _replaced(moved, other, partial(_scaled, factor=middle / theirs))
            part = 1 - middle / own
            what = f"layers with {part:.0%} of stage {busiest}'s work moved to stage {other}, if it has such layers"
            yield _Try(what, moved, _Moved(busiest, other, part))


def _with(record: Any, **changes: Any) -> Any:
    return record.model_copy(update=changes)


def _replaced(workload: Workload, index: int, change: Callable[[StageWork], StageWork]) -> Workload:
    stages = list(workload.stages)
    stages[index] = change(stages[index])
    return _with(workload, stages=tuple(stages))


def _scaled(stage: StageWork, factor: float) -> StageWork:
    """A stage with all task times multiplied by a factor."""
    names = ("forward", "backward", "weights", "communication")
    return _with(stage, **{name: tuple(factor * seconds for seconds in getattr(stage, name)) for name in names})


def _halved(workload: Workload, factors: Sequence[float]) -> Workload:
    """Twice as many micro-batches, each of half the rows, of which stages take these *factors* of the time and memory;
    latencies stay."""

    def half(stage: StageWork, factor: float) -> StageWork:
        names = ("kept_bytes", "forward_peak_bytes", "backward_peak_bytes")
        sizes = {name: tuple(ceil(factor * size) for size in getattr(stage, name)) for name in names}
        return _with(_scaled(stage, factor), **sizes)

    boundaries = tuple(
        _with(
            boundary,
            forward=tuple(_with(one, bytes=(one.bytes + 1) // 2) for one in boundary.forward),
            backward=tuple(_with(one, bytes=(one.bytes + 1) // 2) for one in boundary.backward),
        )
        for boundary in workload.boundaries
    )
    stages = tuple(map(half, workload.stages, factors))
    wanted = 2 * _full_micro_batches(workload)
    count = ceil(wanted - 1e-9)
    last = wanted - count + 1
    return _with(workload, micro_batches=count, last_share=last, stages=stages, boundaries=boundaries)


def _less_communication(stage: StageWork) -> StageWork:
    """Collectives inside the stage in half the time; they are taken to be as long forward as backward."""
    forward, backward = [], []
    for ahead, back, spent in zip(stage.forward, stage.backward, stage.communication, strict=True):
        saved = min(ahead, spent / 4)
        forward.append(ahead - saved)
        backward.append(max(0.0, back - (spent / 2 - saved)))
    weights = tuple(min(one, back) for one, back in zip(stage.weights, backward, strict=True))
    communication = tuple(spent / 2 for spent in stage.communication)
    return _with(stage, forward=tuple(forward), backward=tuple(backward), weights=weights, communication=communication)


def _sums(stage: StageWork) -> tuple[float, ...]:
    return tuple(round(ahead + back, 9) for ahead, back in zip(stage.forward, stage.backward, strict=True))


def _levelled(stage: StageWork, replicas: _Replicas) -> StageWork:
    """A stage whose ranks take equally long, with as much work in all: as long as its replicas do with whole rows, or
    where these are not known the harmonic mean, if all do as much now."""
    count = len(stage.ranks)

    def level(values: tuple[float, ...]) -> tuple[float, ...]:
        if not values or min(values) <= 0:
            return values
        return (count / sum(1 / value for value in values),) * count

    found = _with(stage, forward=level(stage.forward), backward=level(stage.backward), weights=level(stage.weights))
    whole = replicas.rows is not None and _longest(found) > 0
    return _scaled(found, replicas.seconds() / _longest(found)) if whole else found


# --- two plans --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two plans: fields that differ, by path, as (first, second); and what each should give, None where unknown."""

    fields: Mapping[str, tuple[Any, Any]]
    effects: Mapping[str, tuple[float | None, float | None]]


def difference(first: Plan, second: Plan) -> Difference:
    """Differences between the decisions of two plans, and their predicted effect."""
    fields: dict[str, tuple[Any, Any]] = {}
    told = {"assumptions", "prediction", "workload", "predicted"}
    _compare(first.model_dump(mode="json", exclude=told), second.model_dump(mode="json", exclude=told), "", fields)
    one, other = _effects(first), _effects(second)
    names = dict.fromkeys([*one, *other])
    if one and other:  # a part that is missing is nothing
        one, other = ({**dict.fromkeys(names, 0.0), **known} for known in (one, other))
    return Difference(fields=fields, effects={name: (one.get(name), other.get(name)) for name in names})


def _compare(first: Any, second: Any, path: str, found: dict[str, tuple[Any, Any]]) -> None:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys([*first, *second]):
            _compare(first.get(key), second.get(key), f"{path}.{key}" if path else str(key), found)
    elif isinstance(first, list) and isinstance(second, list) and _nested(first) and len(first) == len(second):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            _compare(one, other, f"{path}.{index}", found)
    elif first != second:
        found[path] = (first, second)


def _nested(items: list[Any]) -> bool:
    return any(isinstance(item, dict | list) for item in items)


def _effects(plan: Plan) -> dict[str, float]:
    prediction = plan.prediction
    if prediction is None or not plan.prediction_is_current:
        return {}
    found = {"step_seconds": prediction.step_seconds, "bubble": prediction.bubble}
    if prediction.memory:
        fullest = max(prediction.memory, key=lambda device: device.share)
        found |= {"fullest_bytes": float(fullest.total), "fullest_share": fullest.share}
    return found | {f"{part}_seconds": seconds for part, seconds in prediction.breakdown.items() if seconds > 0}
