"""Prices on a cluster: seconds of a rank's part of a layer, and of collectives, from a profile.

Layers that were measured at some tensor degrees are priced at any fraction; what was priced once is kept. It serves
whoever predicts a step or balances one, and knows no compilation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from whale.ir.cluster import Cluster, DeviceType
from whale.ir.profile import LayerKind, ModelProfile
from whale.planner.cost.layers import LayerSeconds, layer_seconds
from whale.planner.cost.optimizers import Optimizer
from whale.planner.network.communication import CommunicationCost, collective
from whale.planner.network.topology import Topology
from whale.predict.layer_parts import Part
from whale.predict.peak_memory import Device

__all__ = ["Costs"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Prices of a model's layers and messages on a cluster.

    ``micro_batches`` are those of a step. ``device`` is ``cpu`` or ``cuda``: whose kernels run, and whether processes
    run ahead of what they launch. ``optimizer`` is the one whose states are held and whose step is priced.
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
    def topology(self) -> Topology:
        """The links of the cluster, with the curves of the profile."""
        return Topology.of(self.cluster, self.profile.links)

    def layer(self, kind: int, rank: int, part: Part) -> LayerSeconds:
        """Seconds of a micro-batch through a part of a layer. Collectives are apart, unless they were measured
        inside."""
        type_ = self.cluster.devices[rank].type
        key = (kind, type_.name, part)
        if key not in self._layers:
            self._layers[key] = self._at_fraction(self.profile.kinds[kind], type_, part)
        return self._layers[key]

    def collective(self, kind: str, ranks: tuple[int, ...], num_bytes: int, num_alike: int = 1) -> float:
        """Seconds of a collective."""
        return self.collective_cost(kind, ranks, num_bytes, num_alike).seconds

    def collective_cost(
        self, kind: str, ranks: tuple[int, ...], num_bytes: int, num_alike: int = 1
    ) -> CommunicationCost:
        """What a collective takes in each of *num_alike* groups at once; groups that lie alike are priced once."""
        sharing = self.topology.sharing(ranks, num_alike)
        key = (kind, self.topology.shape(ranks), num_bytes, sharing)
        if key not in self._collectives:
            self._collectives[key] = collective(self.topology, kind, ranks, num_bytes, sharing=sharing)  # type: ignore[arg-type]
        return self._collectives[key]

    def includes_communication(self, kind: int, rank: int, part: Part) -> bool:
        """Whether the times of a split layer hold its collectives."""
        name = self.cluster.devices[rank].type.name
        measured = [times for times in self.profile.kinds[kind].measured if times.device_type == name]
        if not measured or part.fraction == 1:
            return False
        nearest = min(measured, key=lambda times: abs(times.tensor_degree - 1 / part.fraction))
        return nearest.includes_communication

    def _at_fraction(self, kind: LayerKind, device: DeviceType, part: Part) -> LayerSeconds:
        """Between the tensor degrees that the profile knows seconds are linear in the fraction that a device holds."""
        if part.rows == 0:
            return LayerSeconds(forward=0.0, backward=0.0, weights=0.0, update=0.0)
        measured = {times.tensor_degree for times in kind.measured if times.device_type == device.name}
        degrees = sorted(measured or {variant.tensor_degree for variant in kind.variants})
        exact = next((degree for degree in degrees if abs(degree * part.fraction - 1) < 1e-9), None)

        def at(degree: int) -> LayerSeconds:
            return layer_seconds(
                kind,
                device,
                tensor_degree=degree,
                expert_degree=part.expert,
                rows=part.rows,
                precision=self.precision,
                eager=True,
                optimizer=self.optimizer,
                num_micro_batches=self.micro_batches,
            )

        if exact is not None:
            return at(exact)
        if len(degrees) < 2:
            return _blend(at(degrees[0]), at(degrees[0]), part.fraction * degrees[0], 0.0)
        above = max((degree for degree in degrees if 1 / degree >= part.fraction), default=degrees[0])
        below = min((degree for degree in degrees if degree > above), default=degrees[-1])
        if below == above:
            above = degrees[-2]
        share = (part.fraction - 1 / below) / (1 / above - 1 / below)
        return _blend(at(above), at(below), share, 1 - share)


def _blend(one: LayerSeconds, other: LayerSeconds, share: float, rest: float) -> LayerSeconds:
    def mixed(name: str) -> float:
        return max(0.0, share * getattr(one, name) + rest * getattr(other, name))

    backward = mixed("backward")
    return LayerSeconds(
        forward=mixed("forward"),
        backward=backward,
        weights=min(backward, mixed("weights")),
        update=mixed("update"),
        measured=one.measured and other.measured,
    )
