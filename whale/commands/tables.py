"""Places of a model's embedding tables on a cluster, as annotations.

Tables hold nearly all parameters of a recommendation model and take next to no computation, so that each is best whole
on one device, or in parts on some, while the dense part of the model has replicas on all. This module finds a model's
tables, and prices what a device does for each by the cost model of all layers; `whale.planner.tables` places them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from os import PathLike
from typing import Any

from torch import fx, nn

from whale.annotations import Annotation, module_scopes, replicate, split, stage
from whale.annotations import cluster as on_devices
from whale.compile.trace import Traced, precision_of, trace
from whale.errors import UsageError
from whale.graph.capture_checks import module_of, modules_around
from whale.graph.values import has_sparse_gradient, needs_grad, operands, value_shape, value_tensor
from whale.ir.cluster import Cluster, Link
from whale.ir.profile import Affine, Amount, Kernel, LayerKind, LayerVariant
from whale.planner.catalog import device_types
from whale.planner.cost.layers import layer_seconds
from whale.planner.cost.memory import framework_bytes, run_state_bytes
from whale.planner.cost.optimizers import Optimizer, costs_of
from whale.planner.cost.precision import precision_named
from whale.planner.network.communication import collective
from whale.planner.network.topology import Topology
from whale.planner.tables import Table, TableDevice, TablePlace, TablePlaces, cheapest_places

__all__ = ["PlacedTables", "place_tables", "placed_tables"]

INDEX_BYTES = 8

ROOM = 0.9
"""The part of a device's memory that tables and the state of the dense part may take; activations need the rest."""


def place_tables(
    model: nn.Module,
    example_batch: Any,
    cluster: Cluster | str | PathLike[str] | int,
    *,
    optimizer: Optimizer = "adamw",
) -> dict[str, list[Annotation]]:
    """Annotations that place a model's embedding tables, for `annotate`: each whole on one device, or cut by columns or
    rows over several, and the rest of the model in replicas on all.

    Places are chosen by the cost model, so that the slowest device is fast and all of them fit in memory. Equal
    arguments give equal places on every rank.

    Args:
        model: without annotations, on any device, also ``meta``.
        example_batch: as `parallelize` takes it; its size says how much is looked up.
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
    '' cluster([0, 1]) stage() replicate()
    'tables.[0,2]' cluster([0]) stage()
    'tables.[1]' cluster([1]) stage()
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
    found = list(_tables_of(traced))
    if not found:
        raise UsageError(
            "the model has no table to place: no nn.Embedding or nn.EmbeddingBag has a matrix that nothing else reads"
        )
    priced = _Prices(traced, cluster, precision_of(model), optimizer)
    tables = tuple(map(priced.table, found))
    devices = tuple(priced.devices({one.parameter for one in found}))
    places = cheapest_places(tables, devices)
    return PlacedTables(annotations=_annotations(places), tables=tables, devices=devices, places=places)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A table of a model: its module, its parameter, rows that a step looks up, elements that leave the module, and
    whether its gradient is sparse."""

    path: str
    parameter: fx.Node
    lookups: int
    sent: int
    sparse: bool


def _tables_of(traced: Traced) -> Iterator[_Found]:
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
        )


def _looks_up(reader: fx.Node, table: fx.Node) -> bool:
    schema = getattr(reader.target, "_schema", None)
    return schema is not None and "embedding" in schema.name and reader.args[0] is table


class _Prices:
    """Prices of tables on the devices of a cluster."""

    def __init__(self, traced: Traced, cluster: Cluster, precision: str, optimizer: Optimizer) -> None:
        self.traced, self.cluster, self.optimizer = traced, cluster, optimizer
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
        ranks = tuple(range(len(self.cluster.devices)))
        joined = collective(self.topology, "all_reduce", ranks, min(found.lookups, rows) * size).seconds
        return Table(
            name=found.path,
            rows=rows,
            columns=columns,
            bytes=held,
            seconds=tuple(self._time(kind, device.type) for device in self.cluster.devices),
            fixed=tuple(self._time(indices, device.type) + joined for device in self.cluster.devices),
            sent_bytes=found.sent * size,
        )

    def _kind(self, found: _Found, elements: int, columns: int) -> LayerKind:
        """A table as a layer: look-ups read rows and write vectors, their backward does the reverse; an optimizer goes
        over what has a gradient."""
        looked_up = Amount(elements=Affine(found.lookups * columns, 0))
        vectors = Amount(elements=Affine(found.sent, 0))
        touched = min(elements, found.lookups * columns) if found.sparse else elements
        made = Amount(elements=Affine(touched, 0))
        forward = Kernel(name="aten.embedding", kind="memory", read=looked_up, written=vectors)
        backward = Kernel(name="aten.embedding_backward", kind="memory", read=vectors, written=made)
        variant = LayerVariant(tensor_degree=1, forward=(forward,), backward=(backward,), parameters=touched)
        return LayerKind(name=found.path, variants=(variant,), output=vectors)

    def _time(self, kind: LayerKind, type_: Any) -> float:
        key = (kind.name, type_.name)
        if key not in self._seconds:
            own = layer_seconds(kind, type_, rows=1, precision=self.precision, optimizer=self.optimizer)
            self._seconds[key] = own.forward + own.backward + own.update
        return self._seconds[key]

    def devices(self, tables: set[fx.Node]) -> Iterator[TableDevice]:
        """The devices, each with a replica of all that is no table for rows by its speed."""
        captured, cluster = self.traced.captured, self.cluster
        dense = sum(
            value_tensor((node, 0)).numel()
            for node in captured.graph.nodes
            if node.op == "placeholder" and node.name in captured.parameters and node not in tables
        )
        state = run_state_bytes(dense, precision=self.precision, states=costs_of(self.optimizer).states).total
        speeds = [device.type.speed(self.traced.dtype) for device in cluster.devices]
        ranks = tuple(range(len(speeds)))
        size = 2**20 * len(ranks)
        sent = size * (len(ranks) - 1) / len(ranks)
        pace = collective(self.topology, "all_to_all", ranks, size).transfer / sent if len(ranks) > 1 else 0.0
        for device, speed in zip(cluster.devices, speeds, strict=True):
            yield TableDevice(
                name=device.name,
                memory_bytes=ROOM * (device.type.memory_bytes - framework_bytes(device.type, len(ranks))) - state,
                seconds=0.0,
                share=speed / sum(speeds),
                seconds_per_byte=pace,
            )


def _of_indices(found: _Found) -> LayerKind:
    """The work on the indices alone, in the forward and in the backward."""
    read = Amount(bytes=Affine(found.lookups * INDEX_BYTES, 0))
    kernel = Kernel(name="aten.embedding", kind="memory", read=read)
    variant = LayerVariant(tensor_degree=1, forward=(kernel,), backward=(kernel,))
    return LayerKind(name=f"{found.path} (indices)", variants=(variant,))


def _annotations(places: TablePlaces) -> dict[str, list[Annotation]]:
    """A stage for the tables in each place, and the rest of the model in replicas on all devices."""
    together: dict[tuple[str, TablePlace], list[str]] = {}
    for path, place in places.places.items():
        parent, _, name = path.rpartition(".")
        together.setdefault((parent if name.isdigit() else path, place), []).append(name)
    count = len(places.seconds)
    found: dict[str, list[Annotation]] = {"": [on_devices(range(count)), stage(), replicate()]}
    for (parent, place), names in together.items():
        key = f"{parent}.[{','.join(names)}]".removeprefix(".") if names[0].isdigit() else parent
        inner = [] if place.way == "whole" else [split()]
        found[key] = [on_devices(place.ranks), stage(), *inner]
    return found
