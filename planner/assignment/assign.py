"""Assignment of devices to stages: from annotated stages and a list of devices to one VirtualDevice per stage.

If a model replica needs D devices, summed over its stages, then K devices with K % D == 0 hold K / D replicas, as an
outermost mesh axis ``data``; otherwise the error names the counts that would fit. This module follows the annotations
and decides nothing by cost; it knows neither graph nor model.

>>> from whale.ir.cluster import Cluster
>>> from whale.ir.strategy import Scope, Strategy
>>> two_stages = [StageRequest(stage=Scope(strategy=Strategy(kind="stage"), region=name)) for name in ("a", "b")]
>>> assignment = place(two_stages, Cluster.homogeneous(4).devices)
>>> [stage.device.ranks for stage in assignment.stages]
[(0, 2), (1, 3)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Literal, get_args

from whale.errors import AnnotationError, InfeasibleError, UsageError
from whale.ir.cluster import Device
from whale.ir.strategy import (
    REPLICAS,
    DeviceSelection,
    RegionRole,
    Scope,
    ScopePath,
    Strategy,
    check_nesting,
    role_of_axis,
)
from whale.ir.virtual_device import MeshAxis, RegionRoles, VirtualDevice
from whale.planner.assignment.mesh import Mesh, lay_out, needs_of

__all__ = [
    "Assignment",
    "Preference",
    "Selected",
    "StagePlacement",
    "StageRequest",
    "axes_of",
    "outer_degree",
    "place",
    "place_interleaved",
    "selected",
]

Preference = Literal["consecutive", "replica_in_node"]
"""``consecutive``: a model replica has consecutive devices. ``replica_in_node``: the replicas of a stage have
consecutive devices, so that gradients are reduced inside a node and the pipeline crosses nodes."""


@dataclass(frozen=True, kw_only=True)
class StageRequest:
    """One stage, as annotated.

    Attributes:
        stage: its scope; None for a model without stages, which is a single stage.
        outer: the scopes around it: ``replicate`` and ``cluster``.
        regions: the distinct scope paths of its operators, below the stage; the empty path has the operators without an
        annotation.
    """

    stage: Scope | None
    outer: ScopePath = ()
    regions: tuple[ScopePath, ...] = ((),)

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return "the model" if self.stage is None else f"{self.stage.strategy} ({self.stage.region})"

    def nests(self) -> str:
        """Its annotations with a number, for error messages; empty if there are none.

        >>> split = Scope(strategy=Strategy(kind="split", degree=4), region="a")
        >>> StageRequest(stage=None, regions=((split,),)).nests()
        ' with split(4)'
        """
        numbered = [path for path in self.regions if any(scope.strategy.degree for scope in path)]
        shown = dict.fromkeys(" > ".join(str(scope.strategy) for scope in path) for path in numbered)
        return f" with {' and '.join(list(shown)[:4])}" if shown else ""


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """The devices of one stage, and how each of its regions uses the axes of their mesh."""

    device: VirtualDevice
    roles: RegionRoles


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The devices of all stages.

    Attributes:
        stages: in the order of the pipeline.
        num_replicas: of the whole model; the size of each mesh's axis ``data``, which is omitted if it is 1.
        idle_ranks: devices without work; the caller warns about them.
    """

    stages: tuple[StagePlacement, ...]
    num_replicas: int
    idle_ranks: tuple[int, ...]


def place(
    stages: Sequence[StageRequest],
    devices: Sequence[Device],
    *,
    default: Strategy | None = None,
    prefer: Preference = "consecutive",
    dtype: str = "float32",
) -> Assignment:
    """Assign devices to every stage.

    A stage with a number has that many devices; a stage without one has as many as its regions need, or 1. Stages
    without a number that contain a ``replicate()`` or ``split()`` without a number divide the remaining devices evenly.
    Stages under ``cluster`` use the devices that it selects, which may also serve another stage: stages of one
    selection divide its devices, except those with a number that is that of all of them; the other stages use the
    devices that no ``cluster`` selects. Every stage has the same number of replicas.

    Args:
        stages: in the order of the pipeline.
        devices: in the order of ranks.
        default: the strategy of operators without an annotation; None replicates them over all axes of their stage.
        prefer: which devices are consecutive.
        dtype: the dtype whose speed the VirtualDevices have.

    Raises:
        AnnotationError: annotations that contradict each other, or a selection that matches no device.
        InfeasibleError: degrees that do not fit the number of devices.
        UsageError: a wrong argument.
    """
    if not stages or not devices:
        raise UsageError(f"placing {len(stages)} stages on {len(devices)} devices: there must be at least one of each")
    if prefer not in get_args(Preference):
        raise UsageError(f"unknown preference {prefer!r}; use {' or '.join(map(repr, get_args(Preference)))}")
    if len({device.rank for device in devices}) < len(devices):
        raise UsageError("two devices have the same rank")
    if default is not None and not default.makes_axis:
        raise UsageError(f"the default strategy is replicate or split, not {default}")

    demands = [_demand(index, stage, default) for index, stage in enumerate(stages)]
    outer = outer_degree(stages)
    pools = _pools(demands, devices)
    num_replicas = _num_replicas(pools, outer)
    placed: dict[int, StagePlacement] = {}
    for pool in pools:
        degrees = pool.degrees(num_replicas)
        used = sum(degrees)
        start = 0
        for demand, degree in zip(pool.demands, degrees, strict=True):
            size = demand.group_size
            if size is not None and (start % size or (used % size and num_replicas > 1)):
                raise InfeasibleError(
                    f"{demand.request.name} would start in the middle of a group of {size} devices; give "
                    "the other stages degrees that fill whole groups"
                )
            mine: list[Device] = []
            for replica in range(num_replicas):
                first = replica * used + start if prefer == "consecutive" else num_replicas * start + replica * degree
                mine += pool.devices[first : first + degree]
            mesh = lay_out(demand.request.regions, degree, owner=demand.request.name, default=default)
            placed[demand.index] = _stage_placement(demand.index, mine, mesh, num_replicas, dtype)
            start += degree
    busy = {rank for stage in placed.values() for rank in stage.device.ranks}
    return Assignment(
        stages=tuple(placed[index] for index in range(len(stages))),
        num_replicas=num_replicas,
        idle_ranks=tuple(device.rank for device in devices if device.rank not in busy),
    )


def place_interleaved(
    stages: Sequence[StageRequest],
    devices: Sequence[Device],
    *,
    default: Strategy | None = None,
    prefer: Preference = "consecutive",
    dtype: str = "float32",
) -> Assignment:
    """Assign stages round-robin to device groups, V times P stages on the devices of P, for the interleaved schedule.

    The first P stages are assigned by :func:`place`, and stage s shares the devices of stage s % P. P is the largest
    divisor of the number of stages for which there are enough devices; V = 1 is a plain pipeline.

    Args and Raises are those of :func:`place`; stages that share devices must request the same number and the same
    ``cluster``.

    >>> from whale.ir.cluster import Cluster
    >>> four = [StageRequest(stage=Scope(strategy=Strategy(kind="stage"), region=name)) for name in "abcd"]
    >>> [stage.device.ranks for stage in place_interleaved(four, Cluster.homogeneous(2).devices).stages]
    [(0,), (1,), (0,), (1,)]
    """
    count = len(stages)
    failures: dict[int, InfeasibleError] = {}
    for num_groups in (n for n in range(count, 0, -1) if count % n == 0):
        try:
            first = place(stages[:num_groups], devices, default=default, prefer=prefer, dtype=dtype)
        except InfeasibleError as error:
            failures[num_groups] = error
            continue
        if num_groups == 1 < count:
            break  # one group for all stages is no pipeline
        return _deal(stages, first, default)
    groups = [n for n in range(2, count + 1) if count % n == 0]
    wanted = " or ".join(f"{_devices_of(stages[:n], default)} (groups for {n} stages)" for n in groups)
    raise InfeasibleError(
        f"schedule='interleaved' deals {count} stages round-robin to equal groups of devices, and the {len(devices)} "
        f"devices make no such groups; use a multiple of {wanted or 'more stages'} devices, or another number of stages"
    ) from next(iter(failures.values()), None)


def _devices_of(stages: Sequence[StageRequest], default: Strategy | None) -> int:
    """Smallest number of devices of one replica of these stages."""
    demands = [_demand(index, stage, default) for index, stage in enumerate(stages)]
    return sum(demand.degree or demand.multiple for demand in demands)


def _deal(stages: Sequence[StageRequest], first: Assignment, default: Strategy | None) -> Assignment:
    """Assign the devices of the first stages to the later ones, round-robin."""
    placed = list(first.stages)
    num_groups = len(placed)
    for index in range(num_groups, len(stages)):
        like, request = stages[index % num_groups], stages[index]
        spot = placed[index % num_groups].device
        degree = len(spot.ranks) // first.num_replicas
        asked = request.stage.strategy.degree if request.stage is not None else None
        if asked not in (None, degree):
            raise InfeasibleError(
                f"schedule='interleaved' puts {request.name} on the {degree} devices of {like.name}, but it asks for "
                f"{asked}; give every {_ordinal(num_groups)} stage the same number, or use another schedule"
            )
        if _selections(request) not in ((), _selections(like)) or (like.outer and request.outer != like.outer):
            raise AnnotationError(
                f"schedule='interleaved' puts {request.name} on the devices of {like.name}, but they lie in different "
                "clusters; put both in the same one, or use another schedule"
            )
        mesh = lay_out(request.regions, degree, owner=request.name, default=default)
        placed.append(_on_mesh(index, spot, mesh, first.num_replicas))
    return Assignment(stages=tuple(placed), num_replicas=first.num_replicas, idle_ranks=first.idle_ranks)


def _ordinal(number: int) -> str:
    """A number as used in "every second stage".

    >>> _ordinal(2), _ordinal(5)
    ('second', '5th')
    """
    return {1: "single", 2: "second", 3: "third"}.get(number, f"{number}th")


def _stage_placement(
    index: int, devices: Sequence[Device], mesh: Mesh, num_replicas: int, dtype: str
) -> StagePlacement:
    axes, roles = axes_of(mesh, num_replicas)

    def on(ordered: Sequence[Device]) -> VirtualDevice:
        return VirtualDevice(
            stage=index,
            ranks=tuple(device.rank for device in ordered),
            axes=axes,
            speeds=tuple(device.speed(dtype) for device in ordered),
            memory_bytes=tuple(device.memory_bytes for device in ordered),
            types=tuple(device.type.name for device in ordered),
        )

    device = on(devices)
    # A process group has its ranks in ascending order, and the parts of a tensor are in the order of the axis.
    groups = (group for axis in range(len(axes)) for group in device.groups(axis))
    if any(list(group) != sorted(group) for group in groups):
        device = on(sorted(devices, key=lambda device: device.rank))
    return StagePlacement(device=device, roles=roles)


def _on_mesh(index: int, spot: VirtualDevice, mesh: Mesh, num_replicas: int) -> StagePlacement:
    """Another stage on the devices of an assigned one."""
    axes, roles = axes_of(mesh, num_replicas)
    return StagePlacement(device=replace(spot, stage=index, axes=axes), roles=roles)


def axes_of(mesh: Mesh, num_replicas: int) -> tuple[tuple[MeshAxis, ...], RegionRoles]:
    """The named axes of a stage's mesh, with ``data`` outermost, and how its regions use them."""
    axes: list[MeshAxis] = []
    data: tuple[RegionRole, ...] = ()
    if num_replicas > 1:
        axes.append(MeshAxis(name="data", size=num_replicas))
        data = (REPLICAS,)
    counts: dict[str, int] = {}
    for position, size in enumerate(mesh.sizes):
        role = role_of_axis(roles[position] for roles in mesh.roles.values())
        counts[role] = counts.get(role, 0) + 1
        axes.append(MeshAxis(name=role if counts[role] == 1 else f"{role}{counts[role]}", size=size))
    roles = tuple((region, data + of_region) for region, of_region in sorted(mesh.roles.items()))
    return tuple(axes), RegionRoles(roles)


# --- what each stage asks for
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Demand:
    """The devices that one stage requests; ``degree`` None divides the remaining devices, in multiples of
    ``multiple``."""

    index: int
    request: StageRequest
    degree: int | None
    multiple: int
    selections: tuple[DeviceSelection, ...]
    group_size: int | None = None


def _demand(index: int, request: StageRequest, default: Strategy | None) -> _Demand:
    for path in request.regions:
        inside = () if request.stage is None else (request.stage,)
        check_nesting(scope.strategy for scope in (*request.outer, *inside, *path))
    needs = needs_of(request.regions, default)
    takes_rest = needs.takes_rest
    unannotated = any(all(scope.strategy.chooses_devices for scope in path) for path in request.regions)
    if request.stage is None and unannotated and default is not None and default.degree is None:
        takes_rest = True
    degree = None if request.stage is None else request.stage.strategy.degree
    if degree is None and not takes_rest:
        degree = needs.multiple
    return _Demand(
        index=index, request=request, degree=degree, multiple=needs.multiple, selections=_selections(request)
    )


def _selections(request: StageRequest) -> tuple[DeviceSelection, ...]:
    """The device selections around and in a stage, outer to inner; all regions of a stage share its devices."""

    def chosen(path: ScopePath) -> tuple[DeviceSelection, ...]:
        found = (scope.strategy.devices for scope in path)
        return tuple(devices for devices in found if devices is not None and devices.layout != "all")

    inner = dict.fromkeys(chosen(path) for path in request.regions if chosen(path))
    if len(inner) > 1:
        first, second = (" > ".join(map(str, selections)) for selections in list(inner)[:2])
        raise AnnotationError(
            f"{request.name} has regions in {first} and in {second}, but all regions of a stage share its devices; put "
            f"them in different stages"
        )
    return chosen(request.outer) + next(iter(inner), ())


@dataclass(frozen=True, kw_only=True)
class Selected:
    """The ranks that a ``cluster`` selects, and its text."""

    name: str
    ranks: frozenset[int]


def selected(request: StageRequest, devices: Sequence[Device]) -> list[Selected]:
    """The selections by list, type or name of the clusters around and in a stage, outer to inner."""
    found: list[Selected] = []
    for selection in _selections(request):
        if selection.layout not in ("row", "average"):
            devices = _select(selection, devices)
            found.append(Selected(name=str(selection), ranks=frozenset(device.rank for device in devices)))
    return found


def outer_degree(stages: Sequence[StageRequest]) -> int:
    """Number of replicas requested by ``replicate(n)`` around the stages; equal for all stages."""
    found: dict[int, str] = {}
    for stage in stages:
        degree = prod(scope.strategy.degree or 1 for scope in stage.outer if scope.strategy.divides_batch)
        found.setdefault(degree, stage.name)
    if len(found) > 1:
        parts = " and ".join(f"{degree} around {name}" for degree, name in found.items())
        raise AnnotationError(
            f"the stages lie in different outer replications ({parts}); put all stages in one replicate(n), or none"
        )
    return next(iter(found))


# --- pools: devices that some stages share among them
# -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """A pool: stages that use devices of the same selection, one after the other."""

    name: str
    devices: tuple[Device, ...]
    demands: tuple[_Demand, ...]

    @property
    def numbered(self) -> int:
        """Number of devices of the stages with a known degree, for one model replica."""
        return sum(demand.degree or 0 for demand in self.demands)

    @property
    def sharing(self) -> list[_Demand]:
        """Stages that divide the remaining devices."""
        return [demand for demand in self.demands if demand.degree is None]

    def describe(self) -> str:
        """Its stages and their degrees, for error messages."""
        shown = [
            f"{demand.request.name}{demand.request.nests()} on {demand.degree or 'what is left'}"
            for demand in self.demands[:6]
        ]
        return ", ".join(shown) + (f" and {len(self.demands) - 6} more stages" if len(self.demands) > 6 else "")

    def degrees(self, num_replicas: int) -> list[int]:
        """Degree of every stage if the pool's devices serve the given number of model replicas."""
        sharing = self.sharing
        if not sharing:
            return [demand.degree or 0 for demand in self.demands]
        unit = len(sharing) * lcm(*(demand.multiple for demand in sharing))
        rest = len(self.devices) // num_replicas - self.numbered
        if len(self.devices) % num_replicas or rest < unit or rest % unit:
            raise self.misfit(num_replicas * self.numbered, num_replicas * unit, at_least=1)
        return [demand.degree or rest // len(sharing) for demand in self.demands]

    def misfit(self, fixed: int, unit: int, *, at_least: int) -> InfeasibleError:
        """The error for an invalid number of devices; valid counts are ``fixed`` plus ``at_least`` or more of
        ``unit``."""
        num_devices = len(self.devices)
        below = fixed + (num_devices - fixed) // unit * unit
        legal = [count for count in (below, below + unit) if count >= fixed + at_least * unit and count > 0]
        legal = legal or [fixed + at_least * unit]
        rule = f"{fixed} and a multiple of {unit}" if fixed else f"a multiple of {unit}"
        verb = "needs" if len(self.demands) == 1 else "need"
        return InfeasibleError(
            f"{self.describe()} {verb} {rule} devices, and {self.name} {num_devices}; use "
            f"{' or '.join(map(str, legal))} devices, or change the degrees"
        )


def _num_replicas(pools: Sequence[_Pool], outer_degree: int) -> int:
    """Number of model replicas: the capacity of the pools with known degrees, equal for all of them."""
    found: dict[int, _Pool] = {}
    for pool in pools:
        if pool.sharing:
            continue
        if len(pool.devices) % (pool.numbered * outer_degree):
            raise pool.misfit(0, pool.numbered * outer_degree, at_least=1)
        found.setdefault(len(pool.devices) // pool.numbered, pool)
    if len(found) > 1:
        parts = " but ".join(
            f"{pool.describe()}: {pool.name} {len(pool.devices)}, {n} times as many" for n, pool in found.items()
        )
        raise InfeasibleError(
            f"every stage must have the same number of replicas, found {parts}; give the stages degrees in proportion "
            f"to the devices that their clusters select, or select fewer"
        )
    return next(iter(found), outer_degree)


def _pools(demands: Sequence[_Demand], devices: Sequence[Device]) -> list[_Pool]:
    """Group the stages by the devices that they select. Selections may overlap: a device then serves both stages."""
    groups: dict[tuple[frozenset[int], int | None], tuple[str, tuple[Device, ...], list[_Demand]]] = {}
    unselected: list[_Demand] = []
    for demand in demands:
        filters = [selection for selection in demand.selections if selection.layout not in ("row", "average")]
        chosen = tuple(devices)
        for selection in filters:
            chosen = _select(selection, chosen)
        sized = _sized(demand, len(chosen)) if filters else demand
        if filters:
            name = " > ".join(map(str, filters)) + " selects"
            alone = demand.index if sized.degree == len(chosen) else None
            ranks = frozenset(device.rank for device in chosen)
            groups.setdefault((ranks, alone), (name, chosen, []))[2].append(sized)
        else:
            unselected.append(demand)
    taken = frozenset[int]().union(*(ranks for ranks, _ in groups))
    pools = [_Pool(name=name, devices=chosen, demands=tuple(members)) for name, chosen, members in groups.values()]
    if unselected:
        free = tuple(device for device in devices if device.rank not in taken)
        if not free:
            raise InfeasibleError(
                f"{unselected[0].request.name} is under no cluster, and the clusters of the other stages select all "
                f"{len(devices)} devices; put it under a cluster too, or leave devices free"
            )
        name = "there are" if len(free) == len(devices) else "the other clusters leave"
        pools.append(_Pool(name=name, devices=free, demands=tuple(_sized(demand, len(free)) for demand in unselected)))
    return pools


def _sized(demand: _Demand, num_devices: int) -> _Demand:
    """Set the degree of a stage from a ``row`` or ``average`` layout."""
    layouts = [selection for selection in demand.selections if selection.layout in ("row", "average")]
    if not layouts:
        return demand
    if len(layouts) > 1:
        raise AnnotationError(f"{demand.request.name} lies in {layouts[0]} and in {layouts[1]}; use one layout")
    layout = layouts[0]
    number = layout.number or 1
    if num_devices % number:
        below = num_devices // number * number
        legal = " or ".join(str(count) for count in (below, below + number) if count)
        raise InfeasibleError(f"{layout} does not divide {num_devices} devices evenly; use {legal} devices")
    size = number if layout.layout == "row" else num_devices // number
    stage = demand.request.stage
    if stage is not None and stage.strategy.degree not in (None, size):
        raise AnnotationError(
            f"{demand.request.name} lies in {layout}, which gives each stage {size} of {num_devices} devices; leave "
            f"out the stage's number, or make it {size}"
        )
    return _Demand(
        index=demand.index,
        request=demand.request,
        degree=size,
        multiple=demand.multiple,
        selections=demand.selections,
        group_size=size,
    )


def _select(selection: DeviceSelection, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices among *devices* that a list, type or name selects. A list keeps its order for the stages that share
    it. (Within a stage, ranks ascend where its axes would otherwise not.)
    """
    if selection.layout == "ranks":
        by_rank = {device.rank: device for device in devices}
        missing = [rank for rank in selection.ranks if rank not in by_rank]
        if missing:
            raise AnnotationError(f"{selection}: there is no rank {missing[0]} among {_span(list(by_rank))}")
        return tuple(by_rank[rank] for rank in selection.ranks)
    label = (selection.label or "").casefold()
    if selection.layout == "type":
        chosen = tuple(
            device for device in devices if f"{device.type.name.casefold()}-".startswith((f"{label}-", f"{label} "))
        )
        known = dict.fromkeys(device.type.name for device in devices)
    else:
        chosen = tuple(device for device in devices if label in (device.name.casefold(), device.node.casefold()))
        known = dict.fromkeys(device.node for device in devices) | dict.fromkeys(device.name for device in devices)
    if not chosen:
        shown = ", ".join(list(known)[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        raise AnnotationError(f"{selection} matches no device; there are {shown}")
    return chosen


def _span(ranks: Sequence[int]) -> str:
    """Ranks for an error message, as a range if possible.

    >>> _span([0, 1, 2]), _span([0, 4])
    ('ranks 0 to 2', 'ranks [0, 4]')
    """
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {list(ranks)}"
