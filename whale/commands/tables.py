"""Places of a model's embedding tables on a cluster, as annotations.

Tables hold nearly all parameters of a recommendation model and take next to no computation, so that each is best whole
on one device, or in parts on some, while the dense part of the model has replicas on all. This module finds a model's
tables, and prices what a device does for each by the cost model of all layers; `whale.planner.tables` places them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from os import PathLike
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from whale.annotations import Annotation, module_scopes, replicate, split, stage
from whale.annotations import cluster as on_devices
from whale.commands.candidates import CandidateCompiler, PredictedPlan
from whale.commands.plan_writer import Choice, shortage_of
from whale.commands.shares_by_speed import even_stages, shares_by_speed
from whale.compile.trace import Traced, precision_of, trace
from whale.errors import UsageError, WhaleError
from whale.graph.capture import batch_leaves
from whale.graph.origins import module_of, modules_around
from whale.graph.values import has_sparse_gradient, needs_grad, operands, value_shape, value_tensor
from whale.ir.cluster import Cluster, Link, Node
from whale.ir.plan import ClusterIdentity, Plan
from whale.ir.profile import Affine, Amount, Kernel, LayerKind, LayerVariant, ModelProfile
from whale.ir.units import counted
from whale.planner.catalog import device_types
from whale.planner.cost.hosts import (
    KEY_SECONDS,
    KEYED_MESSAGE_SECONDS,
    OF_PROCESSES,
    has_hosts,
    host_of,
    link_to_host,
    look_up_type,
)
from whale.planner.cost.layers import layer_seconds
from whale.planner.cost.memory import framework_bytes, run_state_bytes
from whale.planner.cost.optimizers import Optimizer, costs_of
from whale.planner.cost.precision import precision_named
from whale.planner.network.communication import collective
from whale.planner.network.topology import Topology
from whale.planner.search import Candidate, StageChoice
from whale.planner.tables import Table, TableDevice, TableHost, TablePlace, TablePlaces, Way, cheapest_places
from whale.predict.layer_parts import stage_layers
from whale.runtime.equal_rows import RowKeys
from whale.strategies.equal_rows import keys_of

__all__ = ["PlacedTables", "place_tables", "placed_choices", "placed_tables"]

INDEX_BYTES = 8

ROOM = 0.9
"""The part of a device's memory that tables and the state of the dense part may take; activations need the rest."""

MOST_DISTINCT = 0.7
"""If more of the vectors of an example batch are distinct, all are sent: in other batches there may be more."""


def place_tables(
    model: nn.Module,
    example_batch: Any,
    cluster: Cluster | str | PathLike[str] | int,
    *,
    optimizer: Optimizer = "adamw",
) -> dict[str, list[Annotation]]:
    """Annotations that place a model's embedding tables, for `annotate`: each whole on one device, or cut by columns or
    rows over several, and the rest of the model in replicas on all, with hot tables of few rows. Tables with sparse
    gradients for which devices have no room are in the memory of hosts. Rows that samples look up several times are
    sent once (``stage(distinct=...)``) where that is faster.

    Places are chosen by the cost model, so that the slowest device is fast and all of them fit in memory. Equal
    arguments give equal places on every rank.

    Args:
        model: without annotations, on any device, also ``meta``.
        example_batch: as `parallelize` takes it; its size says how much is looked up, and its indices which part of
            them are distinct.
        cluster: a cluster file, a Cluster, or a number of equal devices.
        optimizer: of parameters with dense gradients, whose states must fit: ``adamw``, ``sgd``, ``sgd_momentum`` or
            ``none``. Tables with sparse gradients are taken to have one number a row, as
            `whale.optim.RowWiseAdagrad` keeps.

    Raises:
        UsageError: the model has annotations, or no table in a module of its own.
        InfeasibleError: the tables do not fit.

    >>> import torch
    >>> from torch import nn
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 8, sparse=True, mode="sum") for rows in (90, 50, 20))
    ...         self.top = nn.Linear(24, 1)
    ...     def forward(self, ids):
    ...         return self.top(torch.cat([table(ids) for table in self.tables], 1)).square().mean()
    >>> for key, nest in place_tables(Model(), torch.zeros(4, 2, dtype=torch.long), 2).items():
    ...     print(repr(key), *nest)
    '' cluster([0, 1]) stage(2) replicate()
    'tables.[0,2]' cluster([0]) stage(1)
    'tables.[1]' cluster([1]) stage(1)
    """
    if isinstance(cluster, int):
        described = Cluster.homogeneous(cluster, intra=Link(bandwidth=1e10, latency=1e-5))
    else:
        described = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster, catalog=device_types())
    return dict(placed_tables(model, example_batch, described, optimizer=optimizer).annotations)


@dataclass(frozen=True, kw_only=True)
class PlacedTables:
    """Placed tables: the annotations that say so, and what the places were chosen by."""

    annotations: Mapping[str, list[Annotation]]
    tables: tuple[Table, ...]
    devices: tuple[TableDevice, ...]
    places: TablePlaces


def placed_tables(model: nn.Module, batch: Any, cluster: Cluster, *, optimizer: Optimizer = "adamw") -> PlacedTables:
    """Place the embedding tables of a model on the devices of a cluster.

    Args:
        model: without annotations; nothing of it is allocated or changed.
        batch: an example of the global batch.
        cluster: the devices.
        optimizer: of parameters with dense gradients. Tables with sparse ones are taken to have a number for each row.

    Raises:
        UsageError: the model has annotations, or no table in a module of its own.
        InfeasibleError: the tables do not fit.
    """
    if module_scopes(model):
        raise UsageError("the model has annotations already: place the tables of one without any")
    traced = trace(model, batch, device="cpu", training=model.training)
    found = list(_tables_of(traced, batch))
    if not found:
        raise UsageError(
            "the model has no table to place: no nn.Embedding or nn.EmbeddingBag has a matrix that nothing else reads"
        )
    ranks = range(len(cluster.devices))
    return _placed(traced, found, cluster, ranks, precision=precision_of(model), optimizer=optimizer)


def _placed(
    traced: Traced,
    found: Sequence[_Found],
    cluster: Cluster,
    ranks: Sequence[int],
    *,
    precision: str,
    optimizer: Optimizer,
    micro_batches: int = 1,
) -> PlacedTables:
    """Tables on these ranks of a cluster, with replicas of the rest on all of them."""
    priced = _Prices(traced, cluster, ranks, precision, optimizer, micro_batches)
    tables = tuple(map(priced.table, found))
    devices = tuple(priced.devices({one.parameter for one in found}))
    places = cheapest_places(tables, devices, priced.hosts if has_hosts(cluster) else ())
    annotations = _annotations(tables, places, ranks)
    return PlacedTables(annotations=annotations, tables=tables, devices=devices, places=places)


def placed_choices(
    trial: CandidateCompiler,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    batch: int,
    micro_batches: int = 1,
    schedules: Sequence[str] = ("1f1b",),
) -> Iterator[Choice]:
    """Plans of a searched model with its tables in the cheapest places: on all devices, and on those of each type and
    of a node of each type. Tables are those that the profile has as layers of their own. There is no plan where they
    hold less than half of the model's parameters, nor where they do not fit.

    Args:
        trial: the model.
        profile: of it.
        cluster: the devices.
        batch: rows of the global batch.
        micro_batches: of a step.
        schedules: of which the fastest is taken.
    """
    found = [one for one in _tables_of(trial.traced, trial.batch) if one.path in profile.paths]
    sizes = [sum(variant.parameters for variant in kind.variants[:1]) for kind in profile.chain()]
    of_tables = sum(prod(value_shape((one.parameter, 0))) for one in found)
    for ranks in _device_sets(cluster) if 2 * of_tables > sum(sizes) else ():
        with suppress(WhaleError):
            how: Any = {"precision": trial.precision, "optimizer": trial.optimizer, "micro_batches": micro_batches}
            placed = _placed(trial.traced, found, cluster, ranks, **how)
            plan = Plan(
                model=trial.identity,
                cluster=ClusterIdentity.of(cluster),
                world_size=len(cluster.devices),
                batch=batch,
                micro_batches=micro_batches,
                precision=trial.options.precision,  # type: ignore[arg-type]
                gradient_dtype=trial.options.gradient_dtype,  # type: ignore[arg-type]
                step_in_backward=trial.options.step_in_backward or None,
                annotations={key: _without_devices(nest) for key, nest in placed.annotations.items()},
            )
            size: Any = {"rows": batch, "micro_batches": micro_batches}
            compilation = trial.compile_annotated(placed.annotations, cluster, **size)
            even = even_stages(plan, compilation)
            choices = [
                choice
                for schedule in schedules
                for choice in _choices(trial, even.model_copy(update={"schedule": schedule}), profile, cluster)
            ]
            said = _said(placed.places, [cluster.devices[rank].type.name for rank in ranks])
            for best in sorted(choices, key=lambda one: (bool(one.reason), _seconds(one)))[:1]:
                yield replace(best, said=said)


def _without_devices(nest: Sequence[Annotation]) -> tuple[str, ...]:
    """Annotations as a plan has them, which says itself on which ranks stages are."""
    return tuple(str(one) for one in nest if not one.strategy.chooses_devices)


def _seconds(choice: Choice) -> float:
    return choice.prediction.step_seconds


def _choices(trial: CandidateCompiler, plan: Plan, profile: ModelProfile, cluster: Cluster) -> Iterator[Choice]:
    """A plan with equal shares, and with those by speed where devices are mixed; none if its schedule has no order for
    its stages."""
    try:
        even = trial.predicted(plan, profile, cluster)
    except WhaleError:
        return
    yield _choice(even, profile, cluster)
    if len({cluster.devices[rank].type for stage in even.plan.stages for rank in stage.ranks}) > 1:
        with suppress(WhaleError):
            by_speed = shares_by_speed(even.compilation, even.costs, even.predicted, even.plan)
            yield _choice(trial.predicted(by_speed, profile, cluster), profile, cluster)


def _choice(given: PredictedPlan, profile: ModelProfile, cluster: Cluster) -> Choice:
    prediction, workload = given.predicted.prediction, given.predicted.workload
    members = stage_layers(given.compilation, profile)
    stages = []
    for own, layers in zip(given.plan.stages, members, strict=True):
        data = prod(axis.size for axis in own.axes or () if axis.divides_batch)
        rows = tuple(part[0].rows for part in layers.parts.values()) if layers.layers else (0,)
        stages.append(
            StageChoice(
                first=min(layers.layers, default=0),
                last=max(layers.layers, default=-1) + 1,
                ranks=own.ranks,
                data=data,
                tensor=len(own.ranks) // data,
                rows=rows[:: len(own.ranks) // data],
            )
        )
    candidate = Candidate(
        stages=tuple(stages),
        micro_batches=given.plan.micro_batches,
        schedule=given.plan.schedule,
        prediction=prediction,
        workload=workload,
    )
    return Choice(
        candidate=candidate,
        plan=given.plan.with_prediction(prediction, workload),
        compiled=True,
        reason=shortage_of(prediction),
    )


def _said(places: TablePlaces, types: Sequence[str]) -> str:
    """Places of tables in a line.

    >>> places = {"a": TablePlace("whole", (0,)), "b": TablePlace("rows", (0, 1)), "c": TablePlace("whole", (1,))}
    >>> _said(TablePlaces(places=places, seconds=(), bytes=()), ["T4", "T4"])
    'tables placed on 2 T4 (2 whole, 1 by rows), the rest in 2 replicas'
    >>> places["b"] = places["b"]._replace(on_host=True)
    >>> _said(TablePlaces(places=places, seconds=(), bytes=()), ["T4", "T4"])
    'tables placed on 2 T4 (2 whole, 1 by rows; 1 in memory of hosts), the rest in 2 replicas'
    """
    ways = Counter(place.way for place in places.places.values())
    words: dict[Way, str] = {"whole": "whole", "columns": "by columns", "rows": "by rows", "replicas": "in replicas"}
    cuts = ", ".join(f"{ways[way]} {text}" for way, text in words.items() if ways[way])
    hosted = sum(place.on_host for place in places.places.values())
    cuts += f"; {hosted} in memory of hosts" if hosted else ""
    shown = " + ".join(f"{count} {name}" for name, count in Counter(types).items())
    return f"tables placed on {shown} ({cuts}), the rest in {counted(len(types), 'replica')}"


def _device_sets(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """All devices, those of each type, and those of a node of each type."""
    ranks_of: dict[str, list[int]] = {}
    for device in cluster.devices:
        ranks_of.setdefault(device.type.name, []).append(device.rank)
    nodes: dict[Any, tuple[int, ...]] = {}
    for node in cluster.nodes:
        nodes.setdefault(tuple(cluster.devices[rank].type.name for rank in node.ranks), tuple(node.ranks))
    yield from dict.fromkeys((tuple(range(len(cluster.devices))), *map(tuple, ranks_of.values()), *nodes.values()))


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A table of a model: its module, its parameter, rows that a step looks up, elements that leave the module, whether
    its gradient is sparse, and the keys of rows that leave the module, for the example batch; none if other things
    leave it, or the batch has no values."""

    path: str
    parameter: fx.Node
    lookups: int
    sent: int
    sparse: bool
    keys: tuple[Tensor, ...] = ()

    def distinct(self, parts: int) -> float:
        """The part of the rows that leave the module that are distinct in parts of a batch."""
        pieces = [piece for keys in self.keys for piece in keys.tensor_split(min(parts, len(keys)))]
        return sum(len(piece.unique()) for piece in pieces) / max(1, sum(piece.numel() for piece in pieces))


def _tables_of(traced: Traced, batch: Any) -> Iterator[_Found]:
    """Parameters that are only looked up, each by a module of its own."""
    captured = traced.captured
    for node in captured.graph.nodes:
        if node.op != "placeholder" or node.name not in captured.parameters or len(value_shape((node, 0))) != 2:
            continue
        path = captured.parameters[node.name].rpartition(".")[0]
        readers = list(node.users)
        if not readers or not all(_looks_up(reader, node) and module_of(reader) == path for reader in readers):
            continue
        inside = [one for one in captured.graph.nodes if path in modules_around(one)]
        own = set(inside)
        sent = [one for one in inside if needs_grad((one, 0)) and any(user not in own for user in one.users)]
        yield _Found(
            path=path,
            parameter=node,
            lookups=sum(prod(value_shape(operands(reader)[1])) for reader in readers),
            sent=sum(value_tensor((one, 0)).numel() for one in sent),
            sparse=has_sparse_gradient((node, 0)),
            keys=_values([keys_of(captured, (one, 0)) for one in sent], batch_leaves(batch)),
        )


def _values(keys: Sequence[RowKeys | None], leaves: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Keys of a batch; none if some are not known, or all are one, as those of a batch that is made up."""
    read = [leaves.get(name) for one in keys if one is not None for name, _ in one.leaves]
    known = [isinstance(x, Tensor) and not x.is_meta and not isinstance(x, FakeTensor) for x in read]
    if None in keys or not all(known):
        return ()
    with torch.no_grad():
        found = [
            one.code.once(*(leaves[name].cpu() for name, _ in one.leaves))[0].reshape(one.shape)
            for one in keys
            if one is not None
        ]
    return tuple(found) if any(len(x.unique()) > 1 for x in found) else ()


def _looks_up(reader: fx.Node, table: fx.Node) -> bool:
    schema = getattr(reader.target, "_schema", None)
    return schema is not None and "embedding" in schema.name and reader.args[0] is table


class _Prices:
    """Prices of tables on the devices of a cluster."""

    def __init__(
        self,
        traced: Traced,
        cluster: Cluster,
        ranks: Sequence[int],
        precision: str,
        optimizer: Optimizer,
        micro_batches: int,
    ) -> None:
        self.micro_batches = micro_batches
        self.traced, self.cluster, self.ranks, self.optimizer = traced, cluster, tuple(ranks), optimizer
        self.precision, self.topology = precision_named(precision), Topology.of(cluster)
        self._seconds: dict[Any, float] = {}

    def table(self, found: _Found) -> Table:
        """A table with its prices."""
        rows, columns = value_shape((found.parameter, 0))
        size, elements = self.precision.element_bytes, rows * columns
        if found.sparse:
            held = float((elements + min(found.lookups, rows) * columns + rows) * size)
        else:
            states = costs_of(self.optimizer).states
            held = run_state_bytes(elements, precision=self.precision, states=states).total
        kind, indices = self._kind(found, elements, columns), _of_indices(found)
        part, seconds = self._distinct(found, found.sent * size)
        joined = collective(self.topology, "all_reduce", self.ranks, min(found.lookups, rows) * size).seconds
        return Table(
            name=found.path,
            rows=rows,
            columns=columns,
            bytes=held,
            seconds=tuple(self._time(kind, self.cluster.devices[rank].type) + seconds for rank in self.ranks),
            fixed=tuple(self._time(indices, self.cluster.devices[rank].type) + joined for rank in self.ranks),
            sent_bytes=found.sent * size * (1.0 if part is None else part),
            distinct=part,
            of_replicas=self._of_replicas(kind, found, rows, columns),
            at_host=tuple(self._at_host(kind, found, rank) + seconds for rank in self.ranks) if found.sparse else (),
        )

    def _distinct(self, found: _Found, sent: float) -> tuple[float | None, float]:
        """The part of a table's vectors that are distinct, and the seconds to find them, where sending these alone is
        faster; else none."""
        parts = len(self.ranks) * self.micro_batches
        part = found.distinct(parts) if found.keys and len(self.ranks) > 1 else 1.0
        seconds = parts * KEYED_MESSAGE_SECONDS + KEY_SECONDS * sum(keys.numel() for keys in found.keys)
        if part > MOST_DISTINCT or 2 * sent * (1 - part) * self.pace < 2 * seconds:
            return None, 0.0
        return float(f"{part:.2g}"), seconds

    def _at_host(self, kind: LayerKind, found: _Found, rank: int) -> float:
        """Seconds of a table at a rank's host, with its vectors on their way to the device and their gradients."""
        host = look_up_type(self.cluster, rank)
        alone = host == self.cluster.devices[rank].type
        copied = 0.0 if alone else 2 * found.sent * self.precision.element_bytes / link_to_host(self.cluster, rank)
        return self._time(kind, host) + copied

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes of the devices."""
        found = {node.name: node for node in map(self.cluster.node_of, self.ranks)}
        return list(found.values())

    @property
    def hosts(self) -> list[TableHost]:
        """The memory of these nodes, beside what processes take."""
        found = []
        for node in self.nodes:
            own = [rank for rank in self.ranks if rank in node.ranks]
            processes = sum(OF_PROCESSES for rank in own if not self.cluster.devices[rank].type.is_processor)
            found.append(TableHost(node.name, ROOM * (host_of(self.cluster, node).memory_bytes - processes)))
        return found

    def _of_replicas(self, kind: LayerKind, found: _Found, rows: int, columns: int) -> tuple[float, ...]:
        """Seconds of each device that looks its share of the batch up in a replica: all sum the gradients, and each
        updates what any has looked up."""
        size, shares = self.precision.element_bytes, self.shares
        if found.sparse:
            most = min(rows, found.lookups * max(shares))
            how, summed = "all_gather", len(shares) * most * (columns * size + INDEX_BYTES)
        else:
            how, summed = "all_reduce", rows * columns * size
        together = collective(self.topology, how, self.ranks, summed).seconds  # type: ignore[arg-type]
        return tuple(
            self._time(kind, self.cluster.devices[rank].type, share) + together
            for rank, share in zip(self.ranks, shares, strict=True)
        )

    def _kind(self, found: _Found, elements: int, columns: int) -> LayerKind:
        """A table as a layer: look-ups read rows and write vectors, their backward does the reverse; an optimizer goes
        over what has a gradient. Its row is the whole batch."""
        looked_up = Amount(elements=Affine(0, found.lookups * columns))
        vectors = Amount(elements=Affine(0, found.sent))
        touched = min(elements, found.lookups * columns) if found.sparse else elements
        made = Amount(elements=Affine(touched, 0))
        forward = Kernel(name="aten.embedding", kind="memory", read=looked_up, written=vectors)
        backward = Kernel(name="aten.embedding_backward", kind="memory", read=vectors, written=made)
        variant = LayerVariant(tensor_degree=1, forward=(forward,), backward=(backward,), parameters=touched)
        return LayerKind(name=found.path, variants=(variant,), output=vectors)

    def _time(self, kind: LayerKind, type_: Any, part: float = 1.0) -> float:
        """Seconds of a device that looks a part of the batch up and updates what all of it does."""
        key = (kind.name, type_.name, part)
        if key not in self._seconds:
            own = layer_seconds(kind, type_, rows=part, precision=self.precision, optimizer=self.optimizer)
            self._seconds[key] = own.forward + own.backward + own.update
        return self._seconds[key]

    @cached_property
    def pace(self) -> float:
        """Seconds for each byte that a device exchanges with all."""
        count = len(self.ranks)
        if count == 1:
            return 0.0
        size = 2**20 * count
        return collective(self.topology, "all_to_all", self.ranks, size).transfer / (size * (count - 1) / count)

    @cached_property
    def shares(self) -> list[float]:
        """The part of the batch that each device has of the dense part, by its speed."""
        speeds = [self.cluster.devices[rank].type.speed(self.traced.dtype) for rank in self.ranks]
        return [speed / sum(speeds) for speed in speeds]

    def devices(self, tables: set[fx.Node]) -> Iterator[TableDevice]:
        """The devices, each with a replica of all that is no table for rows by its speed."""
        captured, cluster = self.traced.captured, self.cluster
        dense = sum(
            value_tensor((node, 0)).numel()
            for node in captured.graph.nodes
            if node.op == "placeholder" and node.name in captured.parameters and node not in tables
        )
        state = run_state_bytes(dense, precision=self.precision, states=costs_of(self.optimizer).states).total
        own, ranks = [cluster.devices[rank] for rank in self.ranks], self.ranks
        hosts = {node.name: position for position, node in enumerate(self.nodes)}
        for device, share in zip(own, self.shares, strict=True):
            yield TableDevice(
                name=device.name,
                memory_bytes=ROOM * (device.type.memory_bytes - framework_bytes(device.type, len(ranks))) - state,
                seconds=0.0,
                share=share,
                seconds_per_byte=self.pace,
                host=hosts[device.node],
            )


def _of_indices(found: _Found) -> LayerKind:
    """The work on the indices alone, in the forward and in the backward."""
    read = Amount(bytes=Affine(found.lookups * INDEX_BYTES, 0))
    kernel = Kernel(name="aten.embedding", kind="memory", read=read)
    variant = LayerVariant(tensor_degree=1, forward=(kernel,), backward=(kernel,))
    return LayerKind(name=f"{found.path} (indices)", variants=(variant,))


def _annotations(tables: Sequence[Table], places: TablePlaces, ranks: Sequence[int]) -> dict[str, list[Annotation]]:
    """A stage for the tables in each place, and the rest of the model, with the tables of replicas, in replicas on all
    of these ranks. Tables of which distinct vectors are sent have stages of their own."""
    together: dict[tuple[str, TablePlace, bool], dict[str, Table]] = {}
    for table in tables:
        path, place = table.name, places.places[table.name]
        if place.way != "replicas":
            parent, _, name = path.rpartition(".")
            stage_of = (parent if name.isdigit() else path, place, table.distinct is not None)
            together.setdefault(stage_of, {})[name] = table
    found: dict[str, list[Annotation]] = {"": [on_devices(ranks), stage(len(ranks)), replicate()]}
    for (parent, place, is_distinct), own in together.items():
        names = list(own)
        key = f"{parent}.[{','.join(names)}]".removeprefix(".") if names[0].isdigit() else parent
        inner = [] if place.way == "whole" else [split()]
        of_place = stage(
            len(place.ranks),
            offload="tables" if place.on_host else None,
            distinct=_mean_distinct(own.values()) if is_distinct else None,
        )
        found[key] = [on_devices([ranks[position] for position in place.ranks]), of_place, *inner]
    return found


def _mean_distinct(tables: Collection[Table]) -> float:
    """The part of the vectors of tables that are distinct."""
    sizes = [table.sent_bytes / (table.distinct or 1.0) for table in tables]
    return float(f"{sum(table.sent_bytes for table in tables) / sum(sizes):.2g}")
