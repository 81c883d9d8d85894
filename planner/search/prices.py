"""What a search pays: layers on the devices of a tensor group, collectives and sends, each priced once.

The prices are those of `whale.planner.cost.estimate`, for groups of any ranks: a tensor group is as slow as its slowest
device, and everything that makes groups cost alike (device types, where they lie in their nodes, the nodes' links) is
the key under which a price is kept. So thousands of equal devices are priced like one, and a later search for the same
model, on other machines or with another batch, finds what it shares with the first. It knows no stages and decides
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from whale.ir.cluster import Cluster, DeviceType
from whale.ir.profile import Affine, ModelProfile
from whale.ir.program import BUCKET_BYTES
from whale.planner.cost.layers import (
    Collective,
    LayerSeconds,
    attention_is_fused,
    forward_flops,
    layer_seconds_by_rows,
    variant_of,
)
from whale.planner.cost.memory import (
    FRAGMENTATION,
    Largest,
    StateBytes,
    framework_bytes,
    gradient_bytes,
    kept_bytes,
    run_kept_bytes,
    run_state_bytes,
    run_working_bytes,
    state_bytes,
    wasted_share,
    working_bytes,
)
from whale.planner.cost.optimizers import Optimizer, costs_of
from whale.planner.cost.precision import Precision, precision_named
from whale.planner.cost.stage import exposed_seconds
from whale.planner.cost.step import AGREED_BYTES, step_overhead
from whale.planner.network.communication import collective, send
from whale.planner.network.topology import Topology

__all__ = ["Hop", "LayerPrice", "Memo", "Prices", "TensorGroup"]

MOST_USUAL_ROWS = 4096
"""Up to so many powers of two are priced together; a search asks for most of them."""

Shape = tuple[tuple[int, int, int, int], ...]
"""Where a group lies: kind of node, its devices and adapters there, and how many such nodes follow each other."""


class LayerPrice(NamedTuple):
    """A micro-batch through one layer on a tensor group: seconds of its slowest device, bytes of its fullest."""

    forward: float
    backward: float
    weights: float
    communication: float
    kept: float
    working: float
    update: float
    measured: bool


NOTHING = LayerPrice(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, True)


class Hop(NamedTuple):
    """What a message between two tensor groups takes: seconds besides its bytes, and bytes per second."""

    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorGroup:
    """Devices that share a layer's matrices, or only those of its experts. Groups that cost alike are one object.

    Attributes:
        kind: a number; groups of the same number cost alike, on whatever cluster.
        ranks: of one of them.
        types: the different ones among its devices, by name.
        shape: where it lies.
        sharing: how many such groups communicate at the same time over the same adapters.
        memory_bytes: of its smallest device.
        expert: the degree over which experts alone are split, and rows divided; else 1.
    """

    kind: int
    ranks: tuple[int, ...]
    types: tuple[DeviceType, ...]
    shape: Shape
    sharing: int
    memory_bytes: int
    expert: int = 1

    @property
    def degree(self) -> int:
        """Its devices."""
        return len(self.ranks)

    @property
    def tensor(self) -> int:
        """The degree over which all matrices are split."""
        return self.degree // self.expert

    def whole_rows(self, rows: int) -> int:
        """Rows of a micro-batch with which each of its devices has as many as the one that has most."""
        return -(-rows // self.expert) * self.expert


class Memo:
    """What was priced already, for one profile, number type and stack of kernels; others empty it.

    Keys say all that a price depends on, so it may be handed from a search to the next one on other machines.
    """

    def __init__(self) -> None:
        self._of: tuple[Any, ...] = ()
        self.kinds_of_nodes: dict[Any, int] = {}
        self.kinds_of_groups: dict[Any, int] = {}
        self.layers: dict[Any, LayerPrice] = {}
        self.seconds: dict[Any, LayerSeconds] = {}
        self.collectives: dict[Any, float] = {}
        self.hops: dict[Any, Hop] = {}

    def begin(self, profile: ModelProfile, precision: Precision, eager: bool, optimizer: str) -> Memo:
        """Itself, emptied if it has prices of another profile or run."""
        of = (profile, precision, eager, optimizer)
        if self._of != of:
            self.__dict__.update(Memo().__dict__)
            self._of = of
        return self


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of a model's layers and messages on a cluster.

    ``eager``: kernels are PyTorch's own, as Whale runs them with ``optimizer``, and every device holds the whole
    ``batch``; else those of a stack such as Megatron's.
    """

    profile: ModelProfile
    cluster: Cluster
    precision: Precision
    eager: bool = False
    optimizer: Optimizer = "adamw"
    batch: int = 0
    memo: Memo = field(default_factory=Memo)
    _groups: dict[int, TensorGroup] = field(default_factory=dict, init=False)
    _known: dict[tuple[tuple[int, ...], int, int], TensorGroup] = field(default_factory=dict, init=False)
    _within: dict[tuple[int, tuple[int, ...], int], TensorGroup] = field(default_factory=dict, init=False)
    _parts: dict[tuple[int, ...], tuple[int, int, int]] = field(default_factory=dict, init=False)
    _bytes: dict[tuple[int, str, int, int], tuple[Affine, Largest]] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        cluster: Cluster,
        *,
        precision: str = "fp32",
        eager: bool = False,
        optimizer: Optimizer = "adamw",
        batch: int = 0,
        known: Memo | None = None,
    ) -> Prices:
        """Prices with what is *known*."""
        number = precision_named(precision)
        memo = (known or Memo()).begin(profile, number, eager, optimizer)
        return cls(
            profile=profile,
            cluster=cluster,
            precision=number,
            eager=eager,
            optimizer=optimizer,
            batch=batch,
            memo=memo,
        )

    @cached_property
    def topology(self) -> Topology:
        """The links of the cluster, with the curves of the profile."""
        return Topology.of(self.cluster, self.profile.links)

    @cached_property
    def num_of_types(self) -> dict[DeviceType, int]:
        """How many devices there are of each type."""
        types = {id(device.type): device.type for device in self.cluster.devices}
        found: dict[DeviceType, int] = {}
        for key, num in Counter(id(device.type) for device in self.cluster.devices).items():
            found[types[key]] = found.get(types[key], 0) + num
        return found

    @cached_property
    def overhead_bytes(self) -> dict[str, float]:
        """What is taken on a device of each type before any layer, by the name of the type."""
        num = len(self.cluster.devices)
        given = self.batch * self.profile.row_bytes if self.eager else 0.0
        return {type_.name: framework_bytes(type_, num) + given for type_ in self.num_of_types}

    @cached_property
    def step_overhead(self) -> float:
        """Seconds of a step that belong to no task."""
        ranks = range(len(self.cluster.devices))
        agreed = self.collective("all_reduce", ranks, AGREED_BYTES) if self.eager and len(ranks) > 1 else 0.0
        return step_overhead(self.num_of_types, agreed)

    @cached_property
    def wasted(self) -> float:
        """The part of the activations that is reserved beyond them."""
        return max(wasted_share(type_) for type_ in self.num_of_types) if self.eager else FRAGMENTATION

    @property
    def waste(self) -> float:
        """How many times as much as the activations is reserved for them."""
        return 1 + self.wasted

    @cached_property
    def tensor_degrees(self) -> tuple[int, ...]:
        """The degrees over which all layers can be split, ascending."""
        common: set[int] | None = None
        for kind in self.profile.kinds:
            known = {one.tensor_degree for one in kind.variants} or {one.tensor_degree for one in kind.measured}
            common = known if common is None else common & known
        refused = {degree for degree, _ in self.profile.refused}
        return tuple(sorted((common or set()) - refused))

    @cached_property
    def expert_degrees(self) -> tuple[int, ...]:
        """The degrees over which all experts can be split by themselves, as Whale runs it, ascending."""
        known = [
            {variant.expert_degree for variant in kind.expert_variants}
            for kind in self.profile.kinds
            if kind.expert_variants or any(variant.expert_parameters for variant in kind.variants)
        ]
        usable = known and self.eager and self.profile.experts and 1 in self.tensor_degrees
        return tuple(sorted(set.intersection(*known))) if usable else ()

    def knows(self, type_: DeviceType, degree: int, per_node: int) -> bool:
        """Whether layers have times on groups of so many devices of a type, of which a node has *per_node*.

        Times that hold the collectives of their group tell nothing of other groups, nor of one that spans nodes.
        """
        told = True
        for kind in self.profile.kinds:
            own = [one for one in kind.measured if one.device_type == type_.name and one.includes_communication]
            if own and degree > 1:
                told = told and degree <= per_node and any(one.tensor_degree == degree for one in own)
        return told

    @cached_property
    def flops(self) -> float:
        """Multiplications and additions of a row's forward."""
        degree = min(self.tensor_degrees, default=1)
        counts = Counter(self.profile.layers)
        return sum(count * forward_flops(self.profile.kinds[kind], degree) for kind, count in counts.items())

    # Groups

    def group(self, ranks: Sequence[int], num_alike: int, expert: int = 1) -> TensorGroup:
        """The tensor group of these ranks, one of *num_alike* in its stage, or with an expert degree their expert
        group."""
        own = tuple(ranks)
        if (own, num_alike, expert) not in self._known:
            self._known[own, num_alike, expert] = self._found(own, num_alike, expert)
        return self._known[own, num_alike, expert]

    def _found(self, own: tuple[int, ...], num_alike: int, expert: int) -> TensorGroup:
        places = self._places
        node = places[own[0]][0]
        if all(places[rank][0] == node for rank in own):  # where they lie there is all that matters
            key = (self._kinds_of_nodes[node], tuple(places[rank][1] for rank in own), expert)
            if key not in self._within:
                self._within[key] = self._group(own, num_alike, expert)
            return self._within[key]
        return self._group(own, num_alike, expert)

    def _group(self, own: tuple[int, ...], num_alike: int, expert: int) -> TensorGroup:
        shape = self.shape(own)
        sharing = self.topology.sharing(own, num_alike)
        types = {self.cluster.devices[rank].type.name: self.cluster.devices[rank].type for rank in own}
        ordered = tuple(types[name] for name in sorted(types))
        known = self.memo.kinds_of_groups
        kind = known.setdefault((shape, sharing, ordered, expert), len(known))
        if kind not in self._groups:
            memory = min(type_.memory_bytes for type_ in ordered)
            self._groups[kind] = TensorGroup(
                kind=kind,
                ranks=own,
                types=ordered,
                shape=shape,
                sharing=sharing,
                memory_bytes=memory,
                expert=expert,
            )
        return self._groups[kind]

    def shape(self, ranks: Sequence[int]) -> Shape:
        """Where ranks lie, for a key. Linear in the ranks."""
        kinds, places, parts = self._kinds_of_nodes, self._places, self._parts
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            node, position = places[rank]
            by_node.setdefault(node, []).append(position)
        runs: list[tuple[int, int, int, int]] = []
        for node in sorted(by_node):
            key = (kinds[node], *by_node[node])
            if key not in parts:
                parts[key] = (kinds[node], len(by_node[node]), self._num_adapters(node, by_node[node]))
            own = parts[key]
            if runs and runs[-1][:3] == own:
                runs[-1] = (*own, runs[-1][3] + 1)
            else:
                runs.append((*own, 1))
        return tuple(runs)

    def _num_adapters(self, node: int, positions: Sequence[int]) -> int:
        """Adapters of a node that devices at these positions use (`whale.planner.network.topology` deals them out
        so)."""
        here = self.cluster.nodes[node]
        if here.inter is None:
            return 0
        num_adapters, num_devices = here.inter.num_adapters, len(here.ranks)
        return len({position * num_adapters // num_devices for position in positions})

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """Of each rank the index of its node and its position there."""
        return [(index, place) for index, node in enumerate(self.cluster.nodes) for place in range(len(node.ranks))]

    @cached_property
    def _kinds_of_nodes(self) -> list[int]:
        """Of each node a number: nodes of the same number have the same links and devices."""
        found: list[int] = []
        numbers: dict[Any, int] = {}  # by types that are the same objects, which are told apart more quickly
        for node in self.cluster.nodes:
            types = tuple(self.cluster.devices[rank].type for rank in node.ranks)
            look = (node.intra, node.inter, tuple(map(id, types)))
            if look not in numbers:
                known = self.memo.kinds_of_nodes
                numbers[look] = known.setdefault((node.intra, node.inter, types), len(known))
            found.append(numbers[look])
        return found

    # Layers

    def layer(self, kind: int, group: TensorGroup, rows: int, micro_batches: int) -> LayerPrice:
        """A micro-batch of *rows* rows through a layer of this kind (a position in the profile), one of
        *micro_batches* of a step."""
        if not rows:
            return NOTHING._replace(update=self.layer(kind, group, 1, micro_batches).update)
        rows = group.whole_rows(rows)
        times = micro_batches if self._accumulates[kind] else 1
        key = (kind, group.kind, rows, times)
        found = self.memo.layers.get(key)
        if found is None:
            found = self.memo.layers[key] = self._price(kind, group, rows, times)
        return found

    def adding(self, micro_batches: int) -> int:
        """The number of micro-batches if prices of any layer depend on it, else 1."""
        return micro_batches if any(self._accumulates) else 1

    @cached_property
    def _accumulates(self) -> list[bool]:
        """Whether a layer's time depends on the number of micro-batches: where adding up gradients was measured."""
        return [any(times.accumulation for times in kind.measured) for kind in self.profile.kinds]

    def _price(self, kind: int, group: TensorGroup, rows: int, micro_batches: int) -> LayerPrice:
        degrees = group.tensor, group.expert
        spent = [self._seconds(kind, type_, degrees, rows, micro_batches) for type_ in group.types]
        slowest = max(spent, key=lambda seconds: (seconds.forward + seconds.backward, seconds.measured))
        forward = sum(self._collective_of(one, group) for one in slowest.forward_collectives)
        backward = sum(self._collective_of(one, group) for one in slowest.backward_collectives)
        exposed = (forward, backward) if self.eager else exposed_seconds(slowest, forward, backward)
        return LayerPrice(
            forward=slowest.forward + exposed[0],
            backward=slowest.backward + exposed[1],
            weights=slowest.weights,
            communication=sum(exposed),
            kept=max(self.kept(kind, type_, group.tensor, rows, group.expert) for type_ in group.types),
            working=max(self.working(kind, type_, group.tensor, rows, group.expert) for type_ in group.types),
            update=max(self._seconds(kind, type_, degrees, 1, micro_batches).update for type_ in group.types),
            measured=slowest.measured,
        )

    def computation(self, kind: int, type_: DeviceType, degree: int, rows: int, expert: int = 1) -> tuple[float, float]:
        """Seconds forward and backward of a step's only micro-batch through a layer on one device of a group of
        *degree*, or of an *expert* degree, without its collectives."""
        spent = self._seconds(kind, type_, (degree, expert), rows, 1)
        return spent.forward, spent.backward

    def _seconds(
        self, kind: int, type_: DeviceType, degrees: tuple[int, int], rows: int, micro_batches: int
    ) -> LayerSeconds:
        known, key, rows = self.memo.seconds, (kind, type_, degrees, micro_batches), -(-rows // degrees[1])
        if (*key, rows) not in known:
            wanted = _usual_rows(rows)
            found = layer_seconds_by_rows(
                self.profile.kinds[kind],
                type_,
                wanted,
                tensor_degree=degrees[0],
                expert_degree=degrees[1],
                precision=self.precision.name,
                eager=self.eager,
                optimizer=self.optimizer if self.eager else None,
                num_micro_batches=micro_batches,
            )
            known.update(((*key, count), one) for count, one in zip(wanted, found, strict=True))
        return known[*key, rows]

    def kept(self, kind: int, type_: DeviceType, degree: int, rows: int, expert: int = 1) -> float:
        """Bytes that a micro-batch keeps of a layer on a device."""
        return self._amounts(kind, type_, degree, expert)[0](rows / expert)

    def working(self, kind: int, type_: DeviceType, degree: int, rows: int, expert: int = 1) -> float:
        """Bytes that a layer works with on a device besides."""
        return self._amounts(kind, type_, degree, expert)[1](rows / expert)

    def _amounts(self, kind: int, type_: DeviceType, degree: int, expert: int) -> tuple[Affine, Largest]:
        """What is kept and worked with, by the rows of a device."""
        key = (kind, type_.name, degree, expert)
        if key not in self._bytes:
            given, precision = self.profile.kinds[kind], self.precision
            if self.eager:
                one_by_one = costs_of(self.optimizer).one_by_one if type_.is_processor else 0
                how: dict[str, Any] = {"tensor_degree": degree, "expert_degree": expert, "precision": precision}
                self._bytes[key] = (
                    run_kept_bytes(given, **how),
                    run_working_bytes(given, **how, one_by_one=one_by_one),
                )
            else:
                fused = attention_is_fused(type_, precision)
                self._bytes[key] = (
                    kept_bytes(given, tensor_degree=degree, precision=precision, fused_attention=fused),
                    working_bytes(given, tensor_degree=degree, precision=precision, fused_attention=fused),
                )
        return self._bytes[key]

    def _collective_of(self, one: Collective, group: TensorGroup) -> float:
        if one.group != ("tensor" if group.expert == 1 else "expert") or group.degree == 1:
            return 0.0
        return one.num * self.collective(one.kind, group.ranks, one.bytes, group.sharing, group.shape)

    def output_bytes(self, layer: int, rows: float) -> float:
        """What a layer (a position in the chain) hands to the next for so many rows."""
        kind = self.profile.kinds[self.profile.layers[layer]]
        return kind.output.total(rows, self.precision.element_bytes)

    # What is stored and summed

    def parameters(self, layers: Iterable[int], degree: int, expert: int = 1) -> tuple[float, float]:
        """Elements of parameters of *layers* on a device: dense, and of experts. Tied ones count once."""
        positions = set(layers)
        dense = experts = 0.0
        for kind, count in Counter(self.profile.layers[index] for index in positions).items():
            own, of_experts = self.parameters_of(kind, degree, expert)
            dense, experts = dense + count * own, experts + count * of_experts
        for readers, shared in self.profile.tied:
            dense -= max(0, len(positions.intersection(readers)) - 1) * shared / degree
        return max(0.0, dense), experts

    def parameters_of(self, index: int, degree: int, expert: int = 1) -> tuple[float, float]:
        """Elements of parameters of a kind of layer on a device: dense, and of experts."""
        kind = self.profile.kinds[index]
        if not kind.variants:
            return (kind.parameters or 0.0) / degree, 0.0
        variant = variant_of(kind, degree, expert)
        return variant.parameters - variant.expert_parameters, variant.expert_parameters

    def state(self, parameters: float, frozen: float = 0.0) -> StateBytes:
        """Bytes of weights, gradients and optimizer states of so many parameters, and of so many that are not
        trained."""
        if self.eager:
            return run_state_bytes(parameters, frozen=frozen, precision=self.precision, optimizer=self.optimizer)
        return state_bytes(parameters, precision=self.precision)

    def frozen_of(self, index: int, degree: int, expert: int = 1) -> float:
        """Elements that a kind of layer has on a device and does not train."""
        kind = self.profile.kinds[index]
        return variant_of(kind, degree, expert).buffers if kind.variants else 0.0

    def state_of(self, layers: Iterable[int], degree: int, expert: int = 1) -> StateBytes:
        """Bytes of weights, gradients and optimizer states of *layers* on a device."""
        positions = list(layers)
        frozen = sum(self.frozen_of(self.profile.layers[index], degree, expert) for index in positions)
        return self.state(sum(self.parameters(positions, degree, expert)), frozen)

    def step_bytes(self, parameters: float) -> float:
        """What the optimizer's step takes besides, where it goes through lists of parameters."""
        if not self.eager or any(type_.is_processor for type_ in self.num_of_types):
            return 0.0
        return costs_of(self.optimizer).in_lists * parameters * self.precision.element_bytes

    def handed_bytes(self, layer: int, rows: float) -> float:
        """What a stage that ends with a layer holds of a micro-batch because it hands it on: nothing in stacks like
        Megatron's, which let it go."""
        return self.output_bytes(layer, rows) if self.eager else 0.0

    @property
    def gradient_bytes(self) -> int:
        """Of a gradient when it is summed; float16 ones are as they are, whatever holds them (Megatron)."""
        if self.eager:
            return self.precision.element_bytes
        return 2 if self.precision.name == "fp16" else gradient_bytes(self.precision, 0)

    def all_reduce(self, ranks: Sequence[int], degree: int, num_bytes: float) -> float:
        """Seconds to sum gradients over the data group *ranks* (one of each tensor group) while the other *degree* - 1
        data groups of the stage do the same. As Whale runs it they come in messages, one after the other."""
        if len(ranks) < 2 or not num_bytes:
            return 0.0
        message = min(num_bytes, max(BUCKET_BYTES, self._largest_bytes / degree)) if self.eager else num_bytes
        return num_bytes / message * self.collective("all_reduce", ranks, message, self.topology.sharing(ranks, degree))

    @cached_property
    def _largest_bytes(self) -> float:
        """Of the gradients of the largest parameter of a layer, each of which is a message of its own: on average over
        the bytes of the model. All gradients of a layer where that is not known."""
        sizes = []
        for index, num in Counter(self.profile.layers).items():
            kind, whole = self.profile.kinds[index], sum(self.parameters_of(index, self.tensor_degrees[0]))
            largest = variant_of(kind, self.tensor_degrees[0]).largest if kind.variants else 0
            sizes.append((num * whole, (largest or whole) * self.tensor_degrees[0]))
        total = sum(weight for weight, _ in sizes)
        return sum(weight * size for weight, size in sizes) / max(total, 1.0) * self.gradient_bytes

    # Messages

    def collective(
        self, kind: str, ranks: Sequence[int], num_bytes: float, sharing: int = 1, shape: Shape | None = None
    ) -> float:
        """Seconds of a collective."""
        key = (kind, shape or self.shape(ranks), num_bytes, sharing)
        if key not in self.memo.collectives:
            cost = collective(self.topology, kind, ranks, num_bytes, sharing=sharing)  # type: ignore[arg-type]
            self.memo.collectives[key] = cost.seconds
        return self.memo.collectives[key]

    def handed(self, whole: float, source: int, target: int, *, in_rows: bool = False) -> int:
        """Bytes that a device sends when its group of *source* devices hands *whole* to one of *target*, or, if that is
        more, that one of these receives; *in_rows* if each of these gets only rows of its own.

        As Whale runs it each device of the target gets all of it, from the devices of the source in turn; Megatron
        sends parts, which the target gathers.
        """
        if in_rows:
            return round(whole / min(source, target))
        return round(whole * max(1.0, target / source) if self.eager else whole / min(source, target))

    def hop(self, source: Sequence[int], target: Sequence[int], into: TensorGroup, num_bytes: int, whole: float) -> Hop:
        """What *num_bytes* (`handed`) from a device of the group *source* to one of *target* take, all pairs sending at
        once; not as Whale runs it, ``into`` (the target's) then gathers *whole*."""
        a, b = source[0], target[0]
        node = self.cluster.node_of(a)
        same = self.cluster.node_of(b) is node
        sharing = 1
        if not same and node.inter is not None:
            senders = len(node.ranks) if self.eager else min(len(source), len(target))  # all slices of the node send
            sharing = max(1, senders // node.inter.num_adapters)
        key = (self.shape((a,)), self.shape((b,)), same, into.kind, num_bytes, whole, sharing)
        if key not in self.memo.hops:
            cost = send(self.topology, a, b, max(1, num_bytes), sharing=sharing)
            latency = cost.latency
            if into.degree > 1 and num_bytes and not self.eager:
                latency += self.collective("all_gather", into.ranks, whole, into.sharing, into.shape)
            self.memo.hops[key] = Hop(latency, max(1, num_bytes) / cost.transfer)
        return self.memo.hops[key]


def _usual_rows(rows: int) -> tuple[int, ...]:
    """Numbers of rows that are priced together with one that a search asks for: powers of two, and the few below four;
    of others that number alone.

    >>> _usual_rows(5), _usual_rows(2)[:5]
    ((5,), (1, 2, 3, 4, 8))
    """
    if rows > 4 and rows & (rows - 1):
        return (rows,)
    most = max(MOST_USUAL_ROWS, rows)
    return (1, 2, 3, *(1 << power for power in range(2, most.bit_length())))
