"""What the stages of a configuration cost on its devices: times of a micro-batch, collectives priced and overlapped,
memory.

From layers to stages: sums over the layers of a stage, the slowest device of each group, what its collectives expose.
The order of tasks is not known here, nor what the other stages do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from whale.ir.cluster import DeviceType
from whale.ir.profile import LayerKind, ModelProfile
from whale.planner.cost.configuration import Layout
from whale.planner.cost.layers import Collective, LayerSeconds, attention_is_fused, layer_seconds, variant_of
from whale.planner.cost.memory import StateBytes, gradient_bytes, kept_bytes, state_bytes, working_bytes
from whale.planner.cost.precision import Precision, precision_named
from whale.planner.cost.sharded import ShardedUnit, sharded_seconds
from whale.planner.network.communication import collective
from whale.planner.network.topology import Topology

__all__ = ["StageCost", "Stages", "exposed_seconds"]

BACKWARD_OVERLAP = 0.4
"""Share of the products that make weights' gradients behind which collectives of the tensor group hide (the gradient
of the input is reduced while they run): calibrated on layer_times.csv."""

SHARDED_SLOWDOWN = 0.7
"""How much longer computation and the collectives of sharded weights (ZeRO 2 and 3) take while both run, as a share of
the shorter of them."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage of the schedule on one replica's devices, for one micro-batch; seconds and bytes of the slowest and
    fullest device.

    Attributes:
        forward, backward, weights: seconds, exposed collectives included.
        communication: seconds of collectives among ``forward`` + ``backward``.
        kept: bytes of a micro-batch from forward to backward; ``working``: beside them while a layer runs.
        output: bytes that it hands to the next stage (all devices of the tensor group together).
        measured: whether all times were measured.
    """

    forward: float
    backward: float
    weights: float
    communication: float
    kept: float
    working: float
    output: float
    measured: bool


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Prices the stages of a layout; equal layers, devices and groups are priced once."""

    profile: ModelProfile
    layout: Layout
    topology: Topology
    _layers: dict[Any, LayerSeconds] = field(default_factory=dict)
    _collectives: dict[Any, float] = field(default_factory=dict)

    @cached_property
    def precision(self) -> Precision:
        """The number types of the run."""
        return precision_named(self.layout.configuration.precision)

    def fused(self, device: DeviceType) -> bool:
        """Whether attention is one kernel on *device*."""
        given = self.layout.configuration.attention
        return attention_is_fused(device, self.precision) if given == "auto" else given == "fused"

    @property
    def eager(self) -> bool:
        """Whether kernels are PyTorch's own: ZeRO 2 and 3 over several devices are FSDP, without Megatron."""
        given = self.layout.configuration
        return given.zero >= 2 and self.layout.data * given.context > 1

    def cost(self, layers: range, stage: int, replica: int, rows: float) -> StageCost:
        """What *layers* take on the devices of a replica's pipeline stage, for *rows* rows."""
        given = self.layout.configuration
        rows = rows / given.context
        kinds = Counter(self.profile.layers[index] for index in layers)
        devices = {self.layout.cluster.devices[rank].type for rank in self.layout.devices_of(stage, replica)}
        forward = backward = weights = communication = kept = 0.0
        measured = True
        by_kind: dict[int, tuple[float, float]] = {}
        for kind, count in kinds.items():
            spent = [self._layer(kind, device, rows) for device in devices]
            slowest = max(spent, key=lambda seconds: (seconds.forward + seconds.backward, seconds.measured))
            exposed = self._exposed(self.profile.kinds[kind], slowest, stage, replica, rows)
            by_kind[kind] = slowest.forward + exposed[0], slowest.backward + exposed[1]
            forward += count * (slowest.forward + exposed[0])
            backward += count * (slowest.backward + exposed[1])
            weights += count * slowest.weights
            communication += count * sum(exposed)
            kept += count * max(self._kept(kind, device, rows) for device in devices)
            measured = measured and slowest.measured
        if given.zero >= 2 and len(self.layout.data_group(stage)) > 1:
            units = self._units(layers, stage, by_kind)
            ahead, back = sharded_seconds(units, regather=self._regathers, slowdown=SHARDED_SLOWDOWN)
            communication += ahead - forward + back - backward
            forward, backward = ahead, back
        last = self.profile.kinds[self.profile.layers[layers[-1]]]
        return StageCost(
            forward=forward,
            backward=backward,
            weights=min(weights, backward),
            communication=min(communication, forward + backward),
            kept=kept,
            working=max(self._working(kind, device, rows) for kind in kinds for device in devices),
            output=last.output.total(rows, self.precision.element_bytes),
            measured=measured,
        )

    def update(self, layers: Iterable[int], stage: int, replica: int) -> float:
        """Seconds of the optimizer for *layers* on the slowest of the devices."""
        devices = {self.layout.cluster.devices[rank].type for rank in self.layout.devices_of(stage, replica)}
        kinds = Counter(self.profile.layers[index] for index in layers)
        return max(sum(n * self._layer(kind, device, 1).update for kind, n in kinds.items()) for device in devices)

    def parameters(self, layers: Iterable[int]) -> tuple[float, float]:
        """Elements of parameters of *layers* on one device: those of experts apart, divided by the expert degree."""
        positions = tuple(layers)
        dense = experts = 0.0
        for index in positions:
            own, of_experts = _parameters(self.profile.kinds[self.profile.layers[index]], self.layout)
            dense, experts = dense + own, experts + of_experts
        for readers, shared in self.profile.tied:  # held once, however many layers of the stage read it
            num = len(set(readers) & set(positions))
            dense -= max(0, num - 1) * shared / self.layout.configuration.tensor
        return max(0.0, dense), experts

    def state(self, layers: Iterable[int]) -> StateBytes:
        """Bytes of weights, gradients and optimizer states on one device."""
        given = self.layout.configuration
        shards = self.layout.data * given.context
        zero = given.zero if given.pipeline == 1 else min(given.zero, 1)  # see _gathered
        dense, experts = self.parameters(layers)
        return state_bytes(dense, precision=self.precision, zero=zero, shards=shards) + state_bytes(
            experts, precision=self.precision, zero=zero, shards=max(1, shards // given.expert)
        )

    def price(self, kind: str, ranks: tuple[int, ...], num_bytes: float, sharing: int = 1) -> float:
        """Seconds of a collective."""
        key = (kind, ranks, num_bytes, sharing)
        if key not in self._collectives:
            cost = collective(self.topology, kind, ranks, num_bytes, sharing=sharing)  # type: ignore[arg-type]
            self._collectives[key] = cost.seconds
        return self._collectives[key]

    def gradients(self, layers: range, stage: int) -> list[tuple[tuple[int, ...], float]]:
        """The groups that sum gradients of *layers*, and the bytes of each: dense parameters, and experts'."""
        zero = self.layout.configuration.zero
        # float16 gradients are summed as they are, whatever holds them (Megatron)
        size = 2 if self.precision.name == "fp16" else gradient_bytes(self.precision, zero)
        dense, experts = self.parameters(layers)
        groups = [(self.layout.data_group(stage), dense * size)]
        if experts:
            groups.append((self.layout.expert_data_group(stage), experts * size))
        return [(group, num_bytes) for group, num_bytes in groups if len(group) > 1 and num_bytes]

    def _layer(self, kind: int, device: DeviceType, rows: float) -> LayerSeconds:
        given = self.layout.configuration
        key = (kind, device.name, rows)
        if key not in self._layers:
            self._layers[key] = layer_seconds(
                self.profile.kinds[kind],
                device,
                tensor_degree=given.tensor,
                rows=rows,
                precision=given.precision,
                fused_attention=self.fused(device),
                eager=self.eager,
                recompute=given.recompute if self._recomputes(kind) else "none",
                sequence_parallel=bool(given.sequence_parallel),
                expert_degree=given.expert,
                optimizer_shards=self.layout.data * given.context if given.zero else 1,
                accumulate=given.zero < 2,
                num_micro_batches=self.layout.num_micro_batches,
            )
        return self._layers[key]

    def _recomputes(self, kind: int) -> bool:
        """Only blocks are computed again, not the embeddings nor the head."""
        return self.profile.layers.count(kind) > 1

    def _kept(self, kind: int, device: DeviceType, rows: float) -> float:
        return kept_bytes(self.profile.kinds[kind], **self._amounts(kind, device))(rows)

    def _working(self, kind: int, device: DeviceType, rows: float) -> float:
        return working_bytes(self.profile.kinds[kind], **self._amounts(kind, device))(rows)

    def _amounts(self, kind: int, device: DeviceType) -> dict[str, Any]:
        given = self.layout.configuration
        return {
            "tensor_degree": given.tensor,
            "recompute": given.recompute if self._recomputes(kind) else "none",
            "precision": self.precision,
            "fused_attention": self.fused(device),
            "eager": self.eager,
            "sequence_parallel": bool(given.sequence_parallel),
        }

    def _exposed(
        self, kind: LayerKind, spent: LayerSeconds, stage: int, replica: int, rows: float
    ) -> tuple[float, float]:
        """Seconds by which a layer's collectives lengthen its forward and its backward."""
        forward = sum(self._seconds_of(one, stage, replica) for one in spent.forward_collectives)
        backward = sum(self._seconds_of(one, stage, replica) for one in spent.backward_collectives)
        return exposed_seconds(spent, forward, backward, context=self._context_seconds(kind, stage, replica, rows))

    def _seconds_of(self, one: Collective, stage: int, replica: int) -> float:
        given = self.layout.configuration
        if one.group == "expert":
            if given.expert == 1:
                return 0.0
            group = self.layout.expert_group(stage, replica)
            return one.num * self.price(one.kind, group, one.bytes, self.topology.sharing(group, given.tensor))
        group = self.layout.tensor_group(stage, replica)
        if len(group) == 1:
            return 0.0
        return one.num * self.price(
            one.kind, group, one.bytes, self.topology.sharing(group, self.layout.data * given.context)
        )

    def _context_seconds(self, kind: LayerKind, stage: int, replica: int, rows: float) -> float:
        """Gathering keys and values over the context group, for each attention of a layer."""
        given = self.layout.configuration
        if given.context == 1 or not kind.variants:
            return 0.0
        total = 0.0
        group = self.layout.context_group(stage, replica)
        for kernel in variant_of(kind, given.tensor).forward:
            if kernel.kind == "attention" and len(kernel.dims) == 4:
                heads, queries, _, size = (dim(rows) for dim in kernel.dims)
                both = kernel.read.total(rows, self.precision.element_bytes)
                both -= heads * queries * size * self.precision.element_bytes
                total += kernel.count * self.price(
                    "all_gather", group, max(0.0, both) * given.context, self.topology.sharing(group, given.tensor)
                )
        return total

    @property
    def _regathers(self) -> bool:
        """Whether weights are gathered again for the backward; in a pipeline they stay whole for the step."""
        given = self.layout.configuration
        return given.zero == 3 and given.pipeline == 1

    def _units(self, layers: range, stage: int, seconds: dict[int, tuple[float, float]]) -> list[ShardedUnit]:
        """What is gathered at a time: each block, and the layers before, between and after blocks together.

        Where weights are not gathered for every micro-batch (ZeRO 2, pipelines), and gradients in a pipeline not
        reduced with every one, a micro-batch has its share of what the step has.
        """
        given, count = self.layout.configuration, self.layout.num_micro_batches
        group = self.layout.data_group(stage)
        size = min(2, self.precision.element_bytes) if self.precision.mixed else self.precision.element_bytes
        sharing = self.topology.sharing(group, given.tensor)
        gathers = 1.0 if self._regathers else 1 / count
        reduces = 1 / count if given.pipeline > 1 else 1.0
        found = []
        for together, run in groupby(layers, key=lambda index: self._unit_of(index)):
            members = list(run)
            num = len(members) if together >= 0 else 1
            num_bytes = sum(self.parameters(members)) / num * size
            ahead, back = (sum(seconds[self.profile.layers[index]][way] for index in members) / num for way in (0, 1))
            found.append(
                ShardedUnit(
                    forward=ahead,
                    backward=back,
                    gather=gathers * self.price("all_gather", group, num_bytes, sharing),
                    reduce=reduces * self.price("reduce_scatter", group, num_bytes, sharing),
                    num=num,
                )
            )
        return found

    def _unit_of(self, index: int) -> int:
        """The kind of a block; below zero for a layer that is none."""
        kind = self.profile.layers[index]
        return kind if self._recomputes(kind) else -1


def exposed_seconds(
    spent: LayerSeconds, forward: float, backward: float, *, context: float = 0.0
) -> tuple[float, float]:
    """By how much collectives lengthen a layer's forward and its backward.

    Args:
        spent: what the layer takes without them.
        forward, backward: seconds of the collectives of its tensor and expert groups.
        context: seconds to gather keys and values, of which half of the computation hides as much.
    """
    hidden = min(BACKWARD_OVERLAP * spent.weights, backward / 2)
    return (
        max(0.0, forward - spent.forward_slack) + max(0.0, context - spent.forward / 2),
        max(0.0, backward - hidden - spent.backward_slack) + max(0.0, 2 * context - spent.backward / 2),
    )


def _parameters(kind: LayerKind, layout: Layout) -> tuple[float, float]:
    given = layout.configuration
    if not kind.variants:
        return (kind.parameters or 0.0) / given.tensor, 0.0
    variant = variant_of(kind, given.tensor)
    return variant.parameters - variant.expert_parameters, variant.expert_parameters / given.expert
