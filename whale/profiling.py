"""Measure machines, and a model's layers on them, on the ranks of one launch, within a time limit.

What is to be measured is a list of items that all ranks make alike, in one order. Rank 0 says, item by item, how long
it may take; the ranks of an item measure it, the first of them reports, and rank 0 puts the result into the profile
and the profile into its file: an interrupted run is resumed by running it again, since items that the profile has are
not measured again. Ranks wait for each other at the store and not in collectives, so that they do not disturb what is
being measured.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whale.errors import PlanMismatchError, UsageError, WhaleError
from whale.ir.cluster import Cluster
from whale.ir.profile import Interference, LayerKind, LinkCurve, MeasuredRate, MeasuredTimes, ModelProfile
from whale.runtime import probe
from whale.runtime.board import Board
from whale.runtime.launch import World, groups
from whale.runtime.reduce import BUCKET_BYTES
from whale.strategies.layers import LayeredModel
from whale.strategies.runnable import runnable_layers

__all__ = ["Item", "Place", "Sizes", "layer_items", "machine_items", "measure_items", "places_of"]

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MOST_SECONDS = 1.0
"""For an item of weight 1: five windows."""
PREPARATION_SECONDS = 900.0
"""For how long ranks wait for the slowest to load and capture a model, which runs on throttled devices too."""
PARTS = ("forward", "backward", "update", "accumulation", "spread")
"""Of measured times of a layer, in the order in which they are passed on."""
MICRO_BATCHES = 2
"""Of the steps in which layers are timed: of a step's backwards one sets gradients, the other adds to them."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs: its type of device, its node, and the memory of the device in bytes."""

    rank: int
    device_type: str
    node: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What sizes to measure: sides of matrices by number type, bytes of a copy and of messages."""

    matmul: tuple[tuple[str, tuple[int, ...]], ...]
    copy: int
    messages: tuple[int, ...]

    @classmethod
    def of(cls, device: torch.device) -> Sizes:
        """The usual ones: large enough on each kind of device for its best rate, and to be out of its caches."""
        if device.type == "cuda":
            sides = (512, 1024, 2048, 4096, 8192)
            dtypes = ("float32", "tfloat32", "float16", "bfloat16")
            messages = tuple(2 ** (10 + 3 * step) for step in range(7))  # 1 KiB to 256 MiB
            return cls(matmul=tuple((dtype, sides) for dtype in dtypes), copy=2**30, messages=messages)
        return cls(
            matmul=(("float32", (128, 256, 512, 1024)), ("float64", (512,)), ("bfloat16", (512,))),
            copy=2**28,
            messages=(2**10, 2**14, 2**18, 2**20, BUCKET_BYTES, 2**24),
        )


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing to measure.

    Attributes:
        name: as people are told.
        ranks: that measure it together; the first reports.
        weight: its share of the time, in proportion to the others.
        known: whether a profile has it.
        run: measure it for about so many seconds; returns what JSON can hold.
        merged: a profile with what was returned.
        prepare: what takes time of its own before; the ranks do it all at once, and not on the clock.
    """

    name: str
    ranks: tuple[int, ...]
    known: Callable[[ModelProfile], bool]
    run: Callable[[float], Any]
    merged: Callable[[ModelProfile, Any], ModelProfile]
    weight: float = 1.0
    prepare: Callable[[], object] = lambda: None


# --- who is where -----------------------------------------------------------------------------------------------------


def places_of(world: World, cluster: Cluster | None) -> tuple[Place, ...]:
    """Where every rank runs: as the cluster says, of which rank r is device r, or as the ranks themselves found out.

    Raises:
        PlanMismatchError: the cluster has another number of devices than there are ranks.
    """
    if cluster is not None and len(cluster.devices) != world.size:
        raise PlanMismatchError(
            f"the cluster has {len(cluster.devices)} devices, but {world.size} processes were started; use torchrun "
            f"with {len(cluster.devices)} in total, or another cluster file"
        )
    if cluster is not None:
        return tuple(
            Place(rank=d.rank, device_type=d.type.name, node=d.node, memory_bytes=d.memory_bytes)
            for d in cluster.devices
        )
    board = Board(world, "profile")
    board.put(f"place/{world.rank}", [_device_name(world.device), socket.gethostname(), _memory_bytes(world.device)])
    found = [board.get(f"place/{rank}") for rank in range(world.size)]
    return tuple(
        Place(rank=rank, device_type=name, node=node, memory_bytes=memory)
        for rank, (name, node, memory) in enumerate(found)
    )


def _device_name(device: torch.device) -> str:
    """The driver's name in the form of the catalog, such as ``A100-SXM4-80GB``; ``cpu`` for a processor."""
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    return "-".join(name.replace("NVIDIA ", "").replace("GeForce ", "").split())


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- what is measured -------------------------------------------------------------------------------------------------


def machine_items(world: World, places: Sequence[Place], sizes: Sizes) -> list[Item]:
    """Links, then devices: each type of device on its first rank, each kind of pair and group on its first ranks."""
    pairs = _pairs(places)
    sets = _sets(places, pairs)
    made = groups([*pairs, *sets], timeout_seconds=world.failures.timeout_seconds)
    beside = groups(sets, timeout_seconds=world.failures.timeout_seconds)
    items = []
    for pair in pairs:
        items += [_send(world, places, pair, made[pair], size) for size in sizes.messages]
    for ranks in sets:
        items += [
            _collective(world, places, operation, ranks, made[ranks], size)
            for operation in OPERATIONS
            for size in sizes.messages
        ]
        items.append(_interference(world, places, ranks, (made[ranks], beside[ranks]), sizes.messages))
    for place in _firsts(places):
        items.append(_rate(world, place, "memory", "float32", (sizes.copy,)))
        items += [_rate(world, place, "matmul", dtype, (side,) * 3) for dtype, sides in sizes.matmul for side in sides]
    return items


def _firsts(places: Sequence[Place]) -> list[Place]:
    """The first rank of each type of device."""
    firsts: dict[str, Place] = {}
    for place in places:
        firsts.setdefault(place.device_type, place)
    return list(firsts.values())


def _pairs(places: Sequence[Place]) -> list[tuple[int, int]]:
    """The first pair of ranks of each kind: of these two types, within a node or between nodes."""
    found: dict[tuple[Any, ...], tuple[int, int]] = {}
    for one, other in combinations(places, 2):
        found.setdefault(_kind((one, other)), (one.rank, other.rank))
    return list(found.values())


def _sets(places: Sequence[Place], pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The first group of each kind among: the pairs, powers of two of a node's devices, powers of two of nodes with a
    device each, of one type of device or as they come, and all devices."""
    nodes: dict[str, list[Place]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place)
    firsts = [members[0] for members in nodes.values()]
    alike: dict[str, list[Place]] = {}
    for place in firsts:
        alike.setdefault(place.device_type, []).append(place)
    groups_of = [[places[rank] for rank in pair] for pair in pairs]
    groups_of += [
        members[:count]
        for members in (*nodes.values(), *alike.values(), firsts)
        for count in (*_powers(len(members)), len(members))
    ]
    groups_of.append(list(places))
    found: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for members in groups_of:
        if len(members) > 1:
            found.setdefault(_kind(members), tuple(place.rank for place in members))
    return list(dict.fromkeys(found.values()))


def _powers(most: int) -> list[int]:
    return [2**power for power in range(1, most.bit_length()) if 2**power < most]


def _kind(members: Sequence[Place]) -> tuple[Any, ...]:
    """What tells groups apart: types, and how many there are of each on each node."""
    by_node: dict[str, list[str]] = {}
    for place in members:
        by_node.setdefault(place.node, []).append(place.device_type)
    return tuple(sorted(tuple(sorted(types)) for types in by_node.values()))


def _rate(world: World, place: Place, kind: str, dtype: str, dims: tuple[int, ...]) -> Item:
    side = dims[0]

    def run(seconds: float) -> list[float]:
        if kind == "memory":
            measured = probe.copy_seconds(side, device=world.device, seconds=seconds)
            return [side / measured.seconds, measured.spread]
        measured = probe.matmul_seconds(side, dtype, device=world.device, seconds=seconds)
        return [2 * side**3 / measured.seconds, measured.spread]

    def known(profile: ModelProfile) -> bool:
        return any(
            (rate.device_type, rate.kind, rate.dtype, rate.dims) == (place.device_type, kind, dtype, dims)
            for rate in profile.rates
        )

    def merged(profile: ModelProfile, found: list[float]) -> ModelProfile:
        rate = MeasuredRate(
            device_type=place.device_type,
            kind=kind,  # type: ignore[arg-type]
            dtype=dtype,
            dims=dims,
            rate=found[0],
            spread=found[1],
        )
        figure = "memory_bandwidth" if kind == "memory" else dtype
        figures = {"memory_bytes": float(place.memory_bytes)} | profile.device_types.get(place.device_type, {})
        figures[figure] = max(figures.get(figure, 0.0), found[0])
        return profile.model_copy(
            update={
                "rates": (*profile.rates, rate),
                "device_types": {**profile.device_types, place.device_type: figures},
            }
        )

    size = f"{side / 2**20:g} MiB" if kind == "memory" else f"{side} x {side}"
    return Item(
        name=f"{kind} {dtype} {size} on {place.device_type}",
        ranks=(place.rank,),
        known=known,
        run=run,
        merged=merged,
    )


def _send(world: World, places: Sequence[Place], pair: tuple[int, int], group: Any, size: int) -> Item:
    def run(seconds: float) -> float:
        rank, peer = pair if world.rank == pair[0] else pair[::-1]
        measured = probe.send_seconds(size, rank, peer, group, device=world.device, seconds=seconds)
        return measured.seconds

    return _link_item(world, places, "send", pair, size, run)


def _collective(
    world: World, places: Sequence[Place], operation: str, ranks: tuple[int, ...], group: Any, size: int
) -> Item:
    def run(seconds: float) -> float:
        measured = probe.collective_seconds(
            operation, size, ranks, world.rank, group, device=world.device, seconds=seconds
        )
        return measured.seconds

    return _link_item(world, places, operation, ranks, size, run)


def _interference(
    world: World, places: Sequence[Place], ranks: tuple[int, ...], two: tuple[Any, Any], sizes: Sequence[int]
) -> Item:
    """What sums of buckets of gradients do to the work beside them; told with the curve of the all-reduces."""
    bucket = max((size for size in sizes if size <= BUCKET_BYTES), default=sizes[0])
    is_it = _is_of(_identity(places, "all_reduce", ranks))

    def run(seconds: float) -> list[Any]:
        slowdown, waiting, stretch = probe.interference(sizes[0], bucket, two, device=world.device, seconds=seconds)
        each: list[Any] = [None] * len(ranks)
        dist.all_gather_object(each, slowdown, group=two[0])
        return [each, waiting, stretch]

    def known(profile: ModelProfile) -> bool:
        return any(curve.beside is not None for curve in profile.links if is_it(curve))

    def merged(profile: ModelProfile, found: list[Any]) -> ModelProfile:
        slowdowns: dict[str, float] = {}
        for rank, slowdown in zip(ranks, found[0], strict=True):
            name = places[rank].device_type
            slowdowns[name] = max(slowdown, slowdowns.get(name, 0.0))
        beside = Interference(
            types=tuple(slowdowns),
            slowdowns=tuple(slowdowns.values()),
            bytes=bucket,
            waiting=found[1],
            stretch=found[2],
        )
        links = [curve.model_copy(update={"beside": beside}) if is_it(curve) else curve for curve in profile.links]
        return profile.model_copy(update={"links": tuple(links)})

    name = f"work beside sums of gradients among {_told(places, ranks)}"
    return Item(name=name, ranks=ranks, known=known, run=run, merged=merged)


def _types(places: Sequence[Place], ranks: Sequence[int]) -> list[str]:
    return sorted(places[rank].device_type for rank in ranks)


def _told(places: Sequence[Place], ranks: Sequence[int]) -> str:
    return f"{len(ranks)}: {', '.join(_types(places, ranks))}"


def _identity(places: Sequence[Place], operation: str, ranks: Sequence[int]) -> dict[str, Any]:
    """What tells the curve of these ranks from others."""
    types, nodes = _types(places, ranks), [places[rank].node for rank in ranks]
    return {
        "operation": operation,
        "ranks": len(ranks),
        "source": types[0],
        "target": types[-1],
        "types": tuple(types) if len(set(types)) > 1 else (),
        "devices": max(nodes.count(node) for node in nodes),
        "within": "node" if len(set(nodes)) == 1 else "nodes",
    }


def _is_of(identity: Mapping[str, Any]) -> Callable[[LinkCurve], bool]:
    def is_it(curve: LinkCurve) -> bool:
        return all(getattr(curve, name) == value for name, value in identity.items()) and not curve.coefficients

    return is_it


def _link_item(
    world: World,
    places: Sequence[Place],
    operation: str,
    ranks: tuple[int, ...],
    size: int,
    run: Callable[[float], float],
) -> Item:
    identity = _identity(places, operation, ranks)
    mine = _is_of(identity)

    def known(profile: ModelProfile) -> bool:
        return any(size in curve.sizes for curve in profile.links if mine(curve))

    def merged(profile: ModelProfile, found: float) -> ModelProfile:
        old = next((curve for curve in profile.links if mine(curve)), None)
        points = {} if old is None else dict(zip(old.sizes, old.bandwidths, strict=True))
        points[float(size)] = size / found
        bandwidths = tuple(points[at] for at in sorted(points))
        new = LinkCurve(
            **identity,
            sizes=tuple(sorted(points)),
            bandwidths=bandwidths,
            maximum=max(bandwidths),
            beside=None if old is None else old.beside,
        )
        links = [new if curve is old else curve for curve in profile.links]
        return profile.model_copy(update={"links": tuple(links if old else [*links, new])})

    return Item(
        name=f"{operation} of {size} bytes among {_told(places, ranks)}, {identity['within']}",
        ranks=ranks,
        known=known,
        run=run,
        merged=merged,
    )


# --- a model's layers -------------------------------------------------------------------------------------------------


def layer_items(
    world: World,
    places: Sequence[Place],
    profile: ModelProfile,
    capture: Callable[[], Mapping[int, LayeredModel]],
    model: nn.Module,
    batch: Any,
    *,
    rows: Sequence[int],
    degrees: Sequence[int] | None = None,
) -> list[Item]:
    """The layers of *model* on each type of device, on its first rank, at these tensor degrees, or at every one that
    the profile knows.

    *capture* cuts the model into layers for micro-batches of these rows; it is called where there is something to
    measure, once.
    """
    captured = cache(capture)
    every = sorted({variant.tensor_degree for kind in profile.kinds for variant in kind.variants})
    return [
        _layers(world, place, profile, captured, model, batch, degree, count)
        for degree in every
        if degrees is None or degree in degrees
        for count in rows
        for place in _firsts(places)
    ]


def _layers(
    world: World,
    place: Place,
    chain: ModelProfile,
    captured: Callable[[], Mapping[int, LayeredModel]],
    model: nn.Module,
    batch: Any,
    degree: int,
    rows: int,
) -> Item:
    positions = _positions(chain, degree, rows, place.memory_bytes)

    def prepare() -> None:
        model_at_rows = captured()[rows]
        if model_at_rows.hash != chain.model_hash:
            raise UsageError(f"the profile is of another model ({chain.name!r}): measure into another file")
        for kind in dict.fromkeys(chain.layers):
            model_at_rows.place(kind, degree)

    def run(seconds: float) -> list[list[float]]:
        layers = runnable_layers(
            captured()[rows], model, batch, degree=degree, rows=rows, positions=positions, device=world.device
        )
        found = probe.layer_seconds(layers, device=world.device, seconds=seconds, micro_batches=MICRO_BATCHES)
        by_kind: dict[int, list[probe.LayerSeconds]] = {}
        for layer, times in zip(layers, found, strict=True):
            by_kind.setdefault(layer.kind, []).append(times)
        return [
            [
                mean(times.forward for times in by_kind[kind]),
                mean(times.first_backward for times in by_kind[kind]),
                mean(times.update for times in by_kind[kind]),
                max(0.0, mean(times.backward - times.first_backward for times in by_kind[kind])),
                by_kind[kind][0].spread,
            ]
            for kind in range(len(chain.kinds))
        ]

    def times_of(kind: LayerKind) -> MeasuredTimes | None:
        return next((t for t in kind.measured if (t.device_type, t.tensor_degree) == (place.device_type, degree)), None)

    def known(profile: ModelProfile) -> bool:
        return all((times := times_of(kind)) is not None and rows in times.rows for kind in profile.kinds)

    def merged(profile: ModelProfile, found: list[list[float]]) -> ModelProfile:
        kinds = []
        for kind, numbers in zip(profile.kinds, found, strict=True):
            old = times_of(kind)
            points = {} if old is None else {at: _parts(old, index) for index, at in enumerate(old.rows)}
            points[rows] = tuple(numbers)
            columns: Any = zip(*(points[at] for at in sorted(points)), strict=True)
            named: dict[str, Any] = dict(zip(PARTS, columns, strict=True))
            new = MeasuredTimes(
                device_type=place.device_type,
                tensor_degree=degree,
                rows=tuple(sorted(points)),
                **named,
            )
            others = [times for times in kind.measured if times is not old]
            measured = sorted([*others, new], key=lambda times: (times.device_type, times.tensor_degree))
            kinds.append(kind.model_copy(update={"measured": tuple(measured)}))
        return profile.model_copy(update={"kinds": tuple(kinds)})

    return Item(
        name=f"layers at tensor degree {degree}, {rows} rows, on {place.device_type}",
        ranks=(place.rank,),
        known=known,
        run=run,
        merged=merged,
        weight=4.0,
        prepare=prepare,
    )


def _parts(times: MeasuredTimes, index: int) -> tuple[float, ...]:
    return tuple(values[index] if (values := getattr(times, part)) else 0.0 for part in PARTS)


def _positions(chain: ModelProfile, degree: int, rows: int, memory_bytes: int) -> list[int]:
    """The layers to run: all, since fewer would find more in the caches than a step does, or as many of each kind as
    leave half of the memory free, at least one."""
    number_bytes = 4.0  # float32, the widest that is usual
    costs = []
    for kind in chain.kinds:
        variant = next((v for v in kind.variants if v.tensor_degree == degree), None)
        kept = sum(saved.size.total(rows, number_bytes) for saved in variant.saved) if variant else 0.0
        costs.append((variant.parameters * 4 * number_bytes if variant else 0.0) + kept)
    most = max(chain.layers.count(kind) for kind in range(len(chain.kinds)))
    while most > 1 and sum(costs[kind] * min(most, chain.layers.count(kind)) for kind in range(len(costs))) > (
        memory_bytes / 2
    ):
        most -= 1
    seen: Counter[int] = Counter()
    positions = []
    for position, layer in enumerate(chain.layers):
        seen[layer] += 1
        if seen[layer] <= most:
            positions.append(position)
    return positions


# --- doing it ---------------------------------------------------------------------------------------------------------


def measure_items(
    world: World,
    items: Sequence[Item],
    profile: ModelProfile,
    *,
    time_limit: float,
    most_seconds: float = MOST_SECONDS,
    passes: int = 1,
    parallel: bool = False,
    write: Callable[[ModelProfile], None] = lambda profile: None,
    tell: Callable[[str], None] = lambda message: None,
) -> tuple[ModelProfile, int]:
    """Measure what the profile does not have yet; returns the new one, and how many items there was no time for.

    Called by all ranks with the same items, which they prepare before the time begins. The profile that rank 0 gives is
    the one that counts, and only rank 0 writes and tells, after each item. What cannot be measured, such as a layer for
    which memory is too small, is told and passed over. An item of weight 1 gets *most_seconds* at most in each of the
    *passes*: one goes through all items, and the medians of all count, for a machine that does other work too is now
    faster and now slower. *parallel* lets items that follow each other run at the same time where they have no rank in
    common.
    """
    board = Board(world, "profile", time_limit + PREPARATION_SECONDS)
    if world.rank == 0:
        board.put("known", [item.known(profile) for item in items])
    missing = [item for item, known in zip(items, board.get("known"), strict=True) if not known]
    for item in missing:
        if world.rank in item.ranks:
            item.prepare()
    board.put(f"ready/{world.rank}", True)
    for rank in range(world.size):
        board.get(f"ready/{rank}")
    end = time.monotonic() + time_limit
    before, found, failed = profile, dict[Item, list[Any]](), set[Item]()
    rounds = _rounds(missing, parallel) * passes
    for index, together in enumerate(rounds):
        if world.rank == 0:
            now = [item for item in together if item not in failed]
            remaining = [item for later in rounds[index:] for item in later if item not in failed]
            seconds = _seconds(now, remaining, end - time.monotonic(), most_seconds)
            board.put(f"round/{index}", [seconds, [together.index(item) for item in now]])
        seconds, chosen = board.get(f"round/{index}")
        if not seconds:
            continue
        for number in chosen:
            if world.rank in together[number].ranks:
                result = _try(together[number], seconds)
                if world.rank == together[number].ranks[0]:
                    board.put(f"result/{index}/{number}", result)
        for number in chosen if world.rank == 0 else ():
            item, result = together[number], board.get(f"result/{index}/{number}")
            if "failure" in result:
                failed.add(item)
                tell(f"not measured: {item.name}: {result['failure']}")
                continue
            values = found.setdefault(item, [])
            values.append(result["value"])
            if len(values) == 1:
                profile = item.merged(profile, values[0])
            write(profile)
            tell(f"measured: {item.name}")
    if passes > 1 and found:
        profile = before
        for item, values in found.items():
            profile = item.merged(profile, _medians(values))
        write(profile)
    board.put(f"done/{world.rank}", True)
    for rank in range(world.size) if world.rank == 0 else ():
        board.get(f"done/{rank}")  # the store is rank 0's, and ends with it
    return profile, len(set(missing) - found.keys() - failed)


def _medians(values: Sequence[Any]) -> Any:
    """Number by number, of measurements that are a number or a list of them each.

    >>> _medians([[1.0, [4.0]], [3.0, [2.0]], [2.0, [9.0]]])
    [2.0, [4.0]]
    """
    if isinstance(values[0], list):
        return [_medians(each) for each in zip(*values, strict=True)]
    return median(values)


def _rounds(items: Sequence[Item], parallel: bool) -> list[list[Item]]:
    """Items that run at the same time, in the order in which they were given."""
    rounds: list[list[Item]] = []
    for item in items:
        busy = {rank for other in rounds[-1] for rank in other.ranks} if rounds else set()
        if parallel and rounds and not busy & set(item.ranks):
            rounds[-1].append(item)
        else:
            rounds.append([item])
    return rounds


def _seconds(now: Sequence[Item], remaining: Sequence[Item], free: float, most_seconds: float) -> float:
    """For the items of a round: their share of the time that is left, by weight; 0 where there is none."""
    if not now or free <= 0:
        return 0.0
    weight = max(item.weight for item in now)
    return min(free * weight / sum(item.weight for item in remaining), most_seconds * weight)


def _try(item: Item, seconds: float) -> dict[str, Any]:
    """What was measured; why not, where it was this rank's alone."""
    try:
        return {"value": item.run(seconds)}
    except (RuntimeError, WhaleError) as error:
        if len(item.ranks) > 1:
            raise
        return {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
