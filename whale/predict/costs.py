"""Cost model on a cluster: seconds of a rank's shard of a layer, and of collectives, from a profile.

Layers measured at some tensor degrees are priced at any fraction; results are cached. It knows no compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from whale.ir.cluster import Cluster, DeviceType
from whale.ir.profile import ModelProfile
from whale.planner.cost.hosts import link_to_host, look_up_type
from whale.planner.cost.layer_cost import LayerCosts
from whale.planner.cost.layers import LayerSeconds
from whale.planner.cost.optimizers import Optimizer
from whale.planner.cost.precision import Precision, executed
from whale.planner.network.communication import CommunicationCost, collective
from whale.planner.network.topology import Topology
from whale.predict.dry_step import Device
from whale.predict.layer_parts import Part

__all__ = ["Costs"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a model's layers and messages on a cluster.

    ``micro_batches`` are those of a step. ``device`` is ``cpu`` or ``cuda``: it determines kernels, and whether
    processes run ahead of their devices. ``optimizer`` determines states and the time of the update.
    """

    profile: ModelProfile
    cluster: Cluster
    precision: str
    micro_batches: int = 1
    device: Device = "cpu"
    optimizer: Optimizer = "adamw"
    _layers: dict[Any, LayerSeconds] = field(default_factory=dict)
    _collectives: dict[Any, CommunicationCost] = field(default_factory=dict)

    @cached_property
    def _of_layers(self) -> LayerCosts:
        return LayerCosts(profile=self.profile, precision=self.number, optimizer=self.optimizer)

    @cached_property
    def number(self) -> Precision:
        """The precision of the run."""
        return executed(self.precision, self.profile.autocast)

    @cached_property
    def topology(self) -> Topology:
        """The links of the cluster, with the curves of the profile."""
        return Topology.of(self.cluster, self.profile.links)

    def layer(self, kind: int, rank: int, part: Part) -> LayerSeconds:
        """Seconds of a micro-batch through a shard of a layer, without collectives, unless they were measured with
        it."""
        type_ = self.cluster.devices[rank].type
        if part.tables_on_host and self._of_layers.is_sparse(kind):
            return self._at_host(kind, rank, part)
        key = (kind, type_.name, part)
        if key not in self._layers:
            self._layers[key] = self._of_layers.under(part.recompute).seconds_of_part(
                kind, type_, part.fraction, part.expert, part.rows, self.micro_batches, part.context, part.part
            )
        return self._layers[key]

    def host_key(self, rank: int, parts: Sequence[Part]) -> str:
        """The host of a rank as a key of the seconds of its shards, if tables are there."""
        on_host = any(part.tables_on_host for part in parts)
        return f"{look_up_type(self.cluster, rank).name} {link_to_host(self.cluster, rank)}" if on_host else ""

    def _at_host(self, kind: int, rank: int, part: Part) -> LayerSeconds:
        """The same of tables on a rank's host, with the copies of vectors and of their gradients."""
        host, type_ = look_up_type(self.cluster, rank), self.cluster.devices[rank].type
        link = inf if host == type_ else link_to_host(self.cluster, rank)
        key = (kind, host.name, type_.name, link, part)
        if key not in self._layers:

            def price(costs: LayerCosts, on: DeviceType) -> LayerSeconds:
                return costs.seconds_of_part(kind, on, part.fraction, part.expert, part.rows, self.micro_batches)

            spent, _ = self._of_layers.beside_tables(kind, type_, host, price)
            copied = self._of_layers.vector_bytes(kind, part.fraction, part.rows) / link
            self._layers[key] = replace(spent, forward=spent.forward + copied, backward=spent.backward + copied)
        return self._layers[key]

    def collective(self, kind: str, ranks: tuple[int, ...], num_bytes: int, num_alike: int = 1) -> float:
        """Seconds of a collective."""
        return self.collective_cost(kind, ranks, num_bytes, num_alike).seconds

    def collective_cost(
        self, kind: str, ranks: tuple[int, ...], num_bytes: int, num_alike: int = 1
    ) -> CommunicationCost:
        """Cost of a collective in each of *num_alike* concurrent groups; equal groups are priced once."""
        own = (kind, ranks, num_bytes, num_alike)  # every rank of a group asks for it
        if own not in self._collectives:
            sharing = self.topology.sharing(ranks, num_alike)
            key = (kind, self.topology.shape(ranks), num_bytes, sharing)
            if key not in self._collectives:
                self._collectives[key] = collective(self.topology, kind, ranks, num_bytes, sharing=sharing)  # type: ignore[arg-type]
            self._collectives[own] = self._collectives[key]
        return self._collectives[own]

    def includes_communication(self, kind: int, rank: int, part: Part) -> bool:
        """Whether the times of a split layer include its collectives."""
        name = self.cluster.devices[rank].type.name
        measured = [times for times in self.profile.kinds[kind].measured if times.device_type == name]
        if not measured or part.fraction == 1:
            return False
        nearest = min(measured, key=lambda times: abs(times.tensor_degree - 1 / part.fraction))
        return nearest.includes_communication
