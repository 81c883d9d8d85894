"""Cost of a stage on the devices of a replica: layers, collectives, messages, gradient reductions, memory.

The only place that knows links, reductions and what a device holds. A replica is as slow as its slowest device, and
everything that makes replicas cost alike (device types, where they lie in their nodes, the nodes' links) is the key
under which a price is kept, so thousands of equal devices are priced like one, and a later search for the same model,
on other machines or with another batch, finds what it shares with the first. It knows no pipelines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale.ir.adasum import dot_bytes
from whale.ir.cluster import Cluster, DeviceType
from whale.ir.profile import LayerVariant, ModelProfile
from whale.ir.strategy import Reduce
from whale.planner.cost.buckets import bucket_bytes, largest_packed, packed_of
from whale.planner.cost.groups import DeviceGroups, TensorGroup
from whale.planner.cost.hosts import link_to_host, look_up_type, stepping_on_host, with_copies
from whale.planner.cost.layer_cost import LayerCosts, with_part
from whale.planner.cost.layers import Collective, LayerSeconds, variant_of
from whale.planner.cost.memory import FRAGMENTATION, StateBytes, framework_bytes, wasted_share
from whale.planner.cost.optimizers import Optimizer, costs_of
from whale.planner.cost.overlap import Beside
from whale.planner.cost.precision import executed, precision_named
from whale.planner.cost.sharded import scattered_by
from whale.planner.cost.stack import WHALE, Stack
from whale.planner.cost.stage_cost import NOTHING, Hop, Memo, Shape, StageCost
from whale.planner.cost.step import AGREED_BYTES, overlap_slowdown, step_overhead
from whale.planner.network.communication import collective, owned_seconds, send

__all__ = ["CostModel", "exposed_beside", "exposed_seconds"]


@dataclass(frozen=True, kw_only=True)
class CostModel(DeviceGroups):
    """Prices of a model's stages and messages on a cluster.

    Attributes:
        batch: rows of the step, all of which every device of Whale's stack holds.
        reduce: how replicas of all stages make one gradient of theirs, as Whale runs it.
    """

    batch: int = 0
    reduce: Reduce = "mean"
    _messages: dict[tuple[int, int, int], Mapping[float, float]] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        cluster: Cluster,
        *,
        precision: str = "fp32",
        stack: Stack = WHALE,
        optimizer: Optimizer = "adamw",
        batch: int = 0,
        gradient_dtype: str | None = None,
        step_in_backward: bool = False,
        reduce: Reduce = "mean",
        known: Memo | None = None,
    ) -> CostModel:
        """Return the prices, with what is *known*. Ranks sum gradients in *gradient_dtype*, by default in their own,
        and step the optimizer in the backward if *step_in_backward*; *reduce* says how replicas make one gradient.

        Raises:
            UsageError: a device does not have the precision, or the profile is of another.
        """
        number = precision_named(precision)
        if stack.name == "whale":
            number = executed(precision, profile.autocast)
            number.refuse_without({device.type for device in cluster.devices})
        summed = precision_named(gradient_dtype).element_bytes if gradient_dtype is not None else None
        memo = (known or Memo()).begin(profile, number, stack, optimizer, summed)
        return cls(
            profile=profile,
            cluster=cluster,
            precision=number,
            stack=stack,
            optimizer=optimizer,
            batch=batch,
            summed_bytes=summed,
            step_in_backward=step_in_backward,
            reduce=reduce,
            memo=memo,
        )

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
        """Bytes on a device of each type before any layer, by the name of the type, with the usual communicators."""
        return {type_.name: self.overhead(type_) for type_ in self.num_of_types}

    def overhead(self, type_: DeviceType, communicators: float = 0.0) -> float:
        """Bytes on a device of a type before any layer: the framework's with *communicators*, and as Whale runs it the
        batch, beyond which the allocator reserves as much as beyond activations."""
        given = self.waste * self.batch * self.profile.row_bytes if self.runs else 0.0
        return framework_bytes(type_, len(self.cluster.devices), communicators) + given

    @cached_property
    def step_overhead(self) -> float:
        """Seconds of any step that belong to no task."""
        return step_overhead(self.num_of_types)

    def overhead_of(self, ranks: Sequence[int]) -> float:
        """The same with what it takes these ranks to compare their batches, as Whale's do."""
        agreed = self.collective("all_reduce", ranks, AGREED_BYTES) if self.runs and len(ranks) > 1 else 0.0
        return step_overhead(self.num_of_types, agreed)

    @cached_property
    def wasted(self) -> float:
        """The part of the activations that is reserved beyond them."""
        return max(wasted_share(type_) for type_ in self.num_of_types) if self.runs else FRAGMENTATION

    @property
    def waste(self) -> float:
        """How many times as much as the activations is reserved for them."""
        return 1 + self.wasted

    def knows(self, type_: DeviceType, degree: int, per_node: int) -> bool:
        """Whether layers have times on groups of *degree* devices of a type, of which a node has *per_node*.

        Times that hold the collectives of their group tell nothing of other groups, nor of one that spans nodes.
        """
        told = True
        for kind in self.profile.kinds:
            own = [one for one in kind.measured if one.device_type == type_.name and one.includes_communication]
            if own and degree > 1:
                told = told and degree <= per_node and any(one.tensor_degree == degree for one in own)
        return told

    # Layers

    def layer(self, kind: int, group: TensorGroup, rows: float, micro_batches: int, shards: int = 1) -> StageCost:
        """A micro-batch of *rows* rows through a layer of this kind (a position in the profile), one of
        *micro_batches* of a step, whose optimizer states *shards* devices may divide."""
        if not rows:
            return NOTHING._replace(update=self.layer(kind, group, 1, micro_batches, shards).update)
        whole = group.whole_rows(int(rows)) if self.runs else rows
        lacking = round(whole - rows) if len(group.types) > 1 else 0
        times = micro_batches if self._accumulates[kind] else 1
        key = (kind, group.kind, whole, lacking, times, shards, self.stack.way)
        found = self.memo.layers.get(key)
        if found is None:
            found = self.memo.layers[key] = self._price(
                kind, group, whole / self.divided_rows(group), times, shards, lacking
            )
        return found

    def _parts_by_speed(self, group: TensorGroup, spent: Sequence[LayerSeconds]) -> list[float]:
        """How many times an equal part of each row, or of a layer, a device of each type of a group has, which *spent*
        seconds on that: parts are by speed where devices cut rows, and those of layers in the only replica of a stage,
        as all replicas have the same ones."""
        alone = group.tensor > 1 and group.num_alike == 1
        if not self.runs or len(group.types) == 1 or not (group.context > 1 or alone):
            return [1.0] * len(group.types)
        seconds = {
            type_.name: max(one.forward + one.backward, 1e-12) for type_, one in zip(group.types, spent, strict=True)
        }
        speeds = [1 / seconds[self.cluster.devices[rank].type.name] for rank in group.ranks]
        return [len(speeds) / sum(speeds) / seconds[type_.name] for type_ in group.types]

    def divided_rows(self, group: TensorGroup) -> int:
        """Devices of a group that divide the rows of a micro-batch: those that cut each row have parts of all, of which
        the profile has the costs as Whale runs it."""
        return group.expert if self.runs else group.positions

    def _price(
        self, kind: int, group: TensorGroup, rows: float, micro_batches: int, shards: int, lacking: int = 0
    ) -> StageCost:
        """Cost of *rows* rows on each device, of which the last ones, *lacking* of them, have a row fewer."""
        degrees = (group.tensor, group.expert, group.context if self.runs else 1)
        if self.stack.tables_on_host and self.is_sparse(kind):
            return self._at_host(kind, group, degrees, rows, micro_batches)
        first = group.ranks[: group.degree - lacking]
        most = {self.cluster.devices[rank].type for rank in first} if lacking else group.types
        fewer = rows - 1 or rows - lacking / group.expert  # who has no row computes experts for the rows of others
        spent = [
            self.seconds(kind, type_, degrees, rows if type_ in most else fewer, micro_batches, shards)
            for type_ in group.types
        ]
        largest = next(one for one, type_ in zip(spent, group.types, strict=True) if type_ in most)
        parts = self._parts_by_speed(group, spent)
        of_rows = of_layer = [1.0] * len(parts)
        if group.context > 1:
            of_rows = parts
            spent = [with_part(one, part) for one, part in zip(spent, parts, strict=True)]
        elif max(parts) > 1:
            of_layer, shares = parts, zip(group.types, (part / group.tensor for part in parts), strict=True)
            spent = [self.seconds_of_part(kind, type_, share, 1, rows, micro_batches) for type_, share in shares]
        slowest = max(spent, key=lambda seconds: (seconds.forward + seconds.backward, seconds.measured))
        forward = self._collectives_of(largest.forward_collectives, group, largest.forward_attention)
        backward = self._collectives_of(largest.backward_collectives, group, largest.backward_attention)
        if not self.runs:
            context = self._context_seconds(kind, group, rows)
            forward, backward = exposed_seconds(
                slowest, forward, backward, overlap=self.stack.calibration.backward_overlap, context=context
            )
        updated = rows if self.is_sparse(kind) else 1
        once = (self.seconds(kind, type_, degrees, updated, micro_batches, shards) for type_ in group.types)
        hosted, update = 0.0, max(part * one.update for part, one in zip(of_layer, once, strict=True))
        ahead, back = slowest.forward + forward, slowest.backward + backward
        if self.stack.offload != "none":
            hosted = max(self.hosted(kind, type_, degrees, rows) for type_ in group.types)
            size = sum(self.parameters_of(kind, *degrees[:2])) * self.precision.element_bytes
            read = size if self.stack.state_on_host and self.stack.zero == 3 else 0.0
            link = min(link_to_host(self.cluster, rank) for rank in group.ranks)
            ahead, back = with_copies(ahead, back, kept=hosted, read=read, link=link)
            if self.stack.state_on_host:
                update = stepping_on_host(self.cluster, group.ranks[0], size, self.optimizer, on_device=update)
        return StageCost(
            forward=ahead,
            backward=back,
            weights=slowest.weights,
            communication=forward + backward,
            kept=max(
                part * self.kept(kind, type_, degrees, rows) for part, type_ in zip(of_rows, group.types, strict=True)
            ),
            working=max(
                part * self.working(kind, type_, degrees, rows)
                for part, type_ in zip(of_rows, group.types, strict=True)
            ),
            update=update,
            measured=slowest.measured,
            launched=(slowest.forward if slowest.forward_slack else 0.0)
            + (slowest.backward if slowest.backward_slack else 0.0),
            accumulation=slowest.accumulation,
            hosted=hosted,
        )

    def _at_host(
        self, kind: int, group: TensorGroup, degrees: tuple[int, int, int], rows: float, micro_batches: int
    ) -> StageCost:
        """Cost of tables on the hosts of a group, whose vectors come over the link and whose gradients go."""
        hosts = {look_up_type(self.cluster, rank) for rank in group.ranks}
        slowest = min(hosts, key=lambda host: host.memory_bandwidth)

        def price(costs: LayerCosts, type_: DeviceType) -> LayerSeconds:
            return costs.seconds(kind, type_, degrees, rows, micro_batches)

        each = [self.beside_tables(kind, type_, slowest, price) for type_ in group.types]
        spent, computes = max(each, key=lambda one: one[0].forward + one[0].backward)
        vectors = self.vector_bytes(kind, 1 / group.tensor, rows)
        copied = 0.0 if hosts <= set(group.types) else vectors / min(link_to_host(self.cluster, r) for r in group.ranks)
        forward, backward = (
            self._collectives_of(some, group, 0.0) for some in (spent.forward_collectives, spent.backward_collectives)
        )
        return StageCost(
            forward=spent.forward + copied + forward,
            backward=spent.backward + copied + backward,
            weights=spent.weights,
            communication=forward + backward,
            kept=max(self.kept(kind, type_, degrees, rows) for type_ in group.types),
            working=max(self.working(kind, type_, degrees, rows) for type_ in group.types) if computes else vectors,
            update=spent.update,
            measured=False,
            launched=0.0,
        )

    def stage(
        self, layers: Iterable[int], group: TensorGroup, rows: float, micro_batches: int, shards: int = 1
    ) -> StageCost:
        """A micro-batch of *rows* rows through *layers* on one replica."""
        kinds = Counter(map(self.profile.layers.__getitem__, layers))
        found = [(count, self.layer(kind, group, rows, micro_batches, shards)) for kind, count in kinds.items()]
        backward = sum(count * price.backward for count, price in found)
        forward = sum(count * price.forward for count, price in found)
        return StageCost(
            forward=forward,
            backward=backward,
            weights=min(backward, sum(count * price.weights for count, price in found)),
            communication=min(forward + backward, sum(count * price.communication for count, price in found)),
            kept=sum(count * price.kept for count, price in found),
            working=max(price.working for _, price in found),
            update=sum(count * price.update for count, price in found),
            measured=all(price.measured for _, price in found),
            launched=sum(count * price.launched for count, price in found),
            hosted=0.0 if self.stack.offload == "none" else sum(count * price.hosted for count, price in found),
        )

    def computation(
        self, kind: int, type_: DeviceType, degree: int, rows: int, expert: int = 1, context: int = 1
    ) -> tuple[float, float]:
        """Seconds forward and backward of a step's only micro-batch through a layer on one device of a group of
        *degree*, or of an *expert* or *context* degree, without its collectives."""
        spent = self.seconds(kind, type_, (degree, expert, context), -(-rows // expert), 1)
        return spent.forward, spent.backward

    def _collectives_of(self, some: Sequence[Collective], group: TensorGroup, attention: float) -> float:
        """Seconds of collectives of a layer, and of those beside its *attention* what that does not hide."""
        each = [(self._collective_of(one, group), one.beside) for one in some]
        beside = exposed_beside((seconds for seconds, beside in each if beside), attention, group.context)
        return sum(seconds for seconds, beside in each if not beside) + beside

    def _collective_of(self, one: Collective, group: TensorGroup) -> float:
        degree = {"tensor": group.tensor, "expert": group.expert, "context": group.context}.get(one.group, 1)
        if degree == 1:  # between replicas: priced for a stage by `whale.planner.cost.replicas`
            return 0.0
        return one.num * self._among(group, one.group, one.kind, one.bytes)

    def _among(self, group: TensorGroup, axis: str, kind: str, num_bytes: float) -> float:
        """Seconds of a collective over an axis of a group."""
        ranks = group.ranks_of(axis)
        if len(ranks) == group.degree:
            return self.collective(kind, ranks, num_bytes, group.sharing, group.shape)
        sharing = self.topology.sharing(ranks, group.num_alike * group.degree // len(ranks))
        return self.collective(kind, ranks, num_bytes, sharing)

    def _context_seconds(self, kind: int, group: TensorGroup, rows: float) -> float:
        """Gathering keys and values over the context group, for each attention of a layer."""
        given = self.profile.kinds[kind]
        if group.context == 1 or not given.variants:
            return 0.0
        total, size = 0.0, self.precision.element_bytes
        for kernel in variant_of(given, group.tensor).forward:
            if kernel.kind == "attention" and len(kernel.dims) == 4:
                heads, queries, _, head_size = (dim(rows) for dim in kernel.dims)
                both = kernel.read.total(rows, size) - heads * queries * head_size * size
                total += kernel.count * self._among(group, "context", "all_gather", max(0.0, both) * group.context)
        return total

    # What is stored and summed

    def state_of(
        self, layers: Iterable[int], degree: int, expert: int = 1, *, shards: int = 1, zero: int = 0
    ) -> StateBytes:
        """Bytes of weights, gradients and optimizer states of *layers* on a device; *shards* devices divide what *zero*
        says, of experts as many fewer as hold others."""
        positions = list(layers)
        frozen = sum(self.frozen_of(self.profile.layers[index], degree, expert) for index in positions)
        dense, experts = self.parameters(positions, degree, expert)
        if not zero or (shards == 1 and not self.stack.state_on_host):
            return self.state(dense + experts, frozen)
        whole = self.state(dense, frozen, shards=shards, zero=zero)
        return whole + self.state(experts, shards=max(1, shards // expert), zero=zero)

    def step_bytes(self, parameters: float) -> float:
        """Temporary bytes of the optimizer's step, if it is multi-tensor."""
        if not self.runs or any(type_.is_processor for type_ in self.num_of_types):
            return 0.0
        return costs_of(self.optimizer).in_lists * parameters * self.precision.element_bytes

    def handed_bytes(self, layer: int, rows: float) -> float:
        """Bytes of a micro-batch's output that a stage ending with a layer stores: none in stacks like Megatron's,
        which free it."""
        return self.output_bytes(layer, rows) if self.runs else 0.0

    def over(
        self, kind: str, ranks: Sequence[int], num_alike: int, num_bytes: float, shares: Sequence[float] = ()
    ) -> float:
        """Seconds of one collective over a data group, in each of *num_alike* of the stage at once; *shares*: of each
        rank, of what they own, if they are unequal."""
        if len(ranks) < 2 or not num_bytes:
            return 0.0
        if shares and all(type_.is_processor for type_ in self.num_of_types):
            sharing = self._sharing(ranks, num_alike)
            even = collective(self.topology, kind, ranks, num_bytes, sharing=sharing)  # type: ignore[arg-type]
            each = [share for share in shares for _ in range(len(ranks) // len(shares))]
            return owned_seconds(self.topology, kind, ranks, num_bytes, each, even)
        return self.collective(kind, ranks, num_bytes, self._sharing(ranks, num_alike))

    def all_reduce(
        self,
        ranks: Sequence[int],
        degree: int,
        num_bytes: float,
        layers: Iterable[int] | None = None,
        kind: str = "all_reduce",
        beside: int = 1,
    ) -> float:
        """Seconds to sum gradients, of *layers* or of the whole model, over the data group *ranks* (one of each tensor
        group) while the other *degree* - 1 data groups of the stage do the same, each *beside* as many as this in all.
        As Whale runs it they come in messages, one after the other. Another *kind* sums to the owners of a divided
        state."""
        if len(ranks) < 2 or not num_bytes:
            return 0.0
        if self.combines:
            return sum(self.combining(ranks, degree, num_bytes, layers, divided=kind != "all_reduce"))
        if not self.runs:
            return self.over(kind, ranks, degree * beside, num_bytes)
        capacity, positions = self._capacity(ranks, divided=kind != "all_reduce"), None if layers is None else {*layers}
        sizes = [
            (count * num * size, size)
            for index, count in self._counts_of(positions).items()
            for size, num in self._messages_of(index, degree, capacity).items()
        ]
        for readers, shared in self.profile.tied:  # one message, which each of their layers counts
            size = shared / degree * self.gradient_bytes
            again = len(readers if positions is None else positions.intersection(readers)) - 1
            sizes += [(-again * size, size)] if again > 0 and size >= capacity else []
        whole = sum(size for size, _ in sizes)
        if whole <= 0:
            return self.over(kind, ranks, degree * beside, num_bytes)
        alone = ((size, min(num_bytes, message)) for size, message in sizes)
        seconds = sum(size / message * self.over(kind, ranks, degree * beside, message) for size, message in alone)
        return seconds / whole * num_bytes

    def tied_sum(self, ranks: Sequence[int], degree: int, num_bytes: float, *, divided: bool) -> float:
        """Seconds to sum the gradient of a parameter over stages that share it: one message, beside *degree* - 1 like
        it; to its owners where the ranks have *divided* it."""
        kind = scattered_by(self.num_of_types) if divided else "all_reduce"
        if self.combines:
            return self.all_reduce(ranks, degree, num_bytes, kind=kind)
        return self.over(kind, ranks, degree, num_bytes)

    @property
    def combines(self) -> bool:
        """Whether gradients of replicas are combined by Adasum."""
        return self.runs and self.reduce == "adasum"

    def combining(
        self,
        ranks: Sequence[int],
        degree: int,
        num_bytes: float,
        layers: Iterable[int] | None = None,
        *,
        divided: bool = False,
    ) -> tuple[float, float]:
        """The same where gradients are combined by Adasum: seconds of exchanging their terms, which may be beside the
        backward, and of what follows it: sums of the dot products of parameters, a level of pairs after the other, and
        the gather of what each rank has combined, unless the state is *divided* so."""
        message = self.message_bytes(ranks, num_bytes, degree, layers, divided=divided)
        kinds = self._counts_of(layers)
        parameters = sum(count * self._num_parameters(kind) for kind, count in kinds.items())
        dots = [self.over("all_reduce", ranks, degree, size) for size in dot_bytes(len(ranks), parameters)]
        gather = 0.0 if divided else self.over("all_gather", ranks, degree, message)
        num = num_bytes / message
        return num * self.over("all_to_all", ranks, degree, message), sum(dots) + num * gather

    def _num_parameters(self, kind: int) -> int:
        """Trained parameters of a layer, as many on each device of a group of any degree."""
        given = self.profile.kinds[kind]
        return max(1, len(given.variants[0].sizes)) if given.variants and given.parameters != 0 else 1

    def largest_bucket(
        self, ranks: Sequence[int], layers: Iterable[int], degree: int, expert: int = 1, *, divided: bool = False
    ) -> float:
        """Bytes of the largest bucket over *ranks*, which may have *divided* the state, of parameters of *layers*, as
        they are packed: as many as fit in a full one, or a larger parameter by itself."""
        capacity, size, largest = self._capacity(ranks, divided=divided), self.precision.element_bytes, 0.0
        for kind in {self.profile.layers[index] for index in layers}:
            given = self.profile.kinds[kind]
            variant = variant_of(given, degree, expert) if given.variants else LayerVariant(tensor_degree=degree)
            sizes = [size * one for one in variant.sizes] or [max(capacity, size * variant.largest)]
            largest = max(largest, largest_packed(sizes, capacity))
        return largest

    def filled_bucket(self, ranks: Sequence[int], largest: float) -> float:
        """Bytes of gradients that wait for others in a bucket of divided state over *ranks*, by the bytes of the
        *largest* bucket: none in that of a large parameter, whose gradient is one of those that a layer works with."""
        return 0.0 if largest > self._capacity(ranks, divided=True) else largest

    def full_bucket(
        self, ranks: Sequence[int], layers: Sequence[int], degree: int, expert: int = 1, *, divided: bool = False
    ) -> float:
        """Bytes of the largest bucket over *ranks* of parameters of *layers*, where one may have those of several; a
        rank alone has one for each parameter."""
        largest = self.precision.element_bytes * self.largest_parameter(layers, degree, expert)
        if len(ranks) == 1 and not divided:
            return largest
        whole = self.precision.element_bytes * sum(self.parameters(layers, degree, expert))
        return min(whole, max(largest, self._capacity(ranks, divided=divided)))

    def largest_parameter(self, layers: Iterable[int], degree: int, expert: int = 1) -> float:
        """Elements of the largest parameter of *layers*, or of the largest layer if its parameters are not known."""
        found = 0.0
        for kind in {self.profile.layers[index] for index in layers}:
            given = self.profile.kinds[kind]
            variant = variant_of(given, degree, expert) if given.variants else LayerVariant(tensor_degree=degree)
            found = max(found, *variant.sizes, variant.largest or sum(self.parameters_of(kind, degree, expert)))
        return found

    def _capacity(self, ranks: Sequence[int], *, divided: bool = False) -> int:
        """Bytes of a full bucket over some ranks."""
        key = self.shape(ranks), divided
        if key not in self.memo.buckets:
            self.memo.buckets[key] = bucket_bytes(self.described, ranks, divided=divided)
        return self.memo.buckets[key]

    def message_bytes(
        self,
        ranks: Sequence[int],
        num_bytes: float,
        degree: int,
        layers: Iterable[int] | None = None,
        *,
        divided: bool = False,
    ) -> float:
        """Bytes of a message of a gradient reduction over *ranks*, which may have *divided* the state, on average: a
        bucket, or a larger parameter; in other stacks all gradients."""
        if not self.runs:
            return num_bytes
        capacity = self._capacity(ranks, divided=divided)
        kinds = self._counts_of(layers)
        whole = messages = 0.0
        for kind, count in kinds.items():
            own = self._messages_of(kind, degree, capacity)
            whole += count * sum(size * num for size, num in own.items())
            messages += count * sum(own.values())
        return min(num_bytes, whole / max(1.0, messages)) if whole else num_bytes

    def _counts_of(self, layers: Iterable[int] | None) -> Counter[int]:
        """The number of layers of each kind among some, or in the whole model."""
        return self._counts if layers is None else Counter(map(self.profile.layers.__getitem__, layers))

    def _messages_of(self, kind: int, degree: int, capacity: int) -> Mapping[float, float]:
        """Sizes in bytes of the messages of the gradients of a layer of a kind on one of *degree* devices, and how many
        there are of each."""
        key = (kind, degree, capacity)
        if key not in self._messages:
            known = self.tensor_degrees[0]
            element = known / degree * self.precision.element_bytes
            part = self.gradient_bytes / self.precision.element_bytes
            own = packed_of(self.profile.kinds[kind], known, element, capacity)
            self._messages[key] = {size * part: num for size, num in own.items() if size and num}
        return self._messages[key]

    def beside(self, ranks: Sequence[int], num_alike: int, num_bytes: float) -> Beside:
        """How the last backward and a message of gradients over a data group slow each other: as measured, else as
        elsewhere."""
        key = (self.shape(ranks), num_bytes, num_alike)
        if key not in self.memo.besides:
            found = Beside(overlap_slowdown(self.num_of_types))
            if self.profile.links and len(ranks) > 1:
                sharing = self._sharing(ranks, num_alike)
                told = collective(self.topology, "all_reduce", ranks, num_bytes, sharing=sharing).beside
                if told is not None:
                    types = {self.cluster.devices[rank].type.name for rank in ranks}
                    known = [slow for name, slow in zip(told.types, told.slowdowns, strict=True) if name in types]
                    found = Beside(max(known, default=0.0), told.stretch)
            self.memo.besides[key] = found
        return self.memo.besides[key]

    # Messages

    @property
    def exchanges(self) -> bool:
        """Whether devices of two stages exchange parts of what is handed on (`whale.planner.cost.messages`); else their
        messages are those of `hop`."""
        return self.runs

    def collective(
        self, kind: str, ranks: Sequence[int], num_bytes: float, sharing: int = 1, shape: Shape | None = None
    ) -> float:
        """Seconds of a collective."""
        key = (kind, shape or self.shape(ranks), num_bytes, sharing)
        if key not in self.memo.collectives:
            cost = collective(self.topology, kind, ranks, num_bytes, sharing=sharing)  # type: ignore[arg-type]
            self.memo.collectives[key] = cost.seconds
        return self.memo.collectives[key]

    def link(self, source: int, target: int, num_bytes: int) -> Hop:
        """Cost of a message of *num_bytes* from one rank to another, alone on its links."""
        same = self._places[source][0] == self._places[target][0]
        key = (self.shape((source,)), self.shape((target,)), same, num_bytes)
        if key not in self.memo.hops:
            cost = send(self.topology, source, target, max(1, num_bytes))
            self.memo.hops[key] = Hop(cost.latency, max(1, num_bytes) / cost.transfer)
        return self.memo.hops[key]

    def handed(self, whole: float, source: int, target: int, positions: int = 1) -> int:
        """Bytes that a device of another stack than Whale's sends when its group of *source* devices hands *whole* to
        one of *target*, in which *positions* divide the rows: the whole, from one device of each position, or parts,
        which the target gathers."""
        return round(whole / (min(source, target) if self.stack.scatters else positions))

    def hop(self, source: Sequence[int], target: Sequence[int], into: TensorGroup, num_bytes: int, whole: float) -> Hop:
        """Seconds of *num_bytes* (`handed`) from a device of the group *source* to one of *target*, all pairs sending
        at once, in stacks other than Whale's; ``into`` (the target's) then gathers *whole*."""
        a, b = source[0], target[0]
        node = self.cluster.node_of(a)
        same = self.cluster.node_of(b) is node
        sharing = 1
        if not same and node.inter is not None:
            senders = min(len(source), len(target)) if self.stack.scatters else into.positions
            sharing = max(1, senders // node.inter.num_adapters)
        key = (self.shape((a,)), self.shape((b,)), same, into.kind, num_bytes, whole, sharing)
        if key not in self.memo.hops:
            cost = send(self.topology, a, b, max(1, num_bytes), sharing=sharing)
            latency = cost.latency
            if into.tensor > 1 and num_bytes and self.stack.scatters and not self.stack.sequence_parallel:
                latency += self._among(into, "tensor", "all_gather", whole / into.positions)
            self.memo.hops[key] = Hop(latency, max(1, num_bytes) / cost.transfer)
        return self.memo.hops[key]


def exposed_beside(messages: Iterable[float], attention: float, ranks: int) -> float:
    """Seconds that remain of a ring's messages, between a number of ranks, beside their attention of that many seconds:
    it begins with the columns that a rank has, and passes these on meanwhile, except the last."""
    return max(0.0, sum(messages) - attention * (1 - 1 / max(1, ranks)))


def exposed_seconds(
    spent: LayerSeconds, forward: float, backward: float, *, overlap: float, context: float = 0.0
) -> tuple[float, float]:
    """By how much collectives lengthen a layer's forward and its backward.

    Args:
        spent: what the layer takes without them.
        forward, backward: seconds of the collectives of its tensor and expert groups.
        overlap: share of the products that make weights' gradients behind which those of the backward hide.
        context: seconds to gather keys and values, of which half of the computation hides as much.
    """
    hidden = min(overlap * spent.weights, backward / 2)
    return (
        max(0.0, forward - spent.forward_slack) + max(0.0, context - spent.forward / 2),
        max(0.0, backward - hidden - spent.backward_slack) + max(0.0, 2 * context - spent.backward / 2),
    )
