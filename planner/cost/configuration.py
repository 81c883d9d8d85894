"""A configuration of degrees, as people write them for Megatron, and where it puts what: stages, replicas, groups.

Ranks go tensor innermost, then context, then data, pipeline outermost (Megatron's order), through the devices in the
order of the cluster or in one that is given. Expert parallelism lives inside the data-parallel groups. This file knows
no costs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from whale.errors import UsageError
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.ir.strategy import STATE_ON_HOST, Offload, Recompute, Reduce
from whale.planner.cost.optimizers import Optimizer
from whale.planner.cost.precision import precision_named

__all__ = ["Configuration", "Layout", "blocks_of", "even_cuts", "require_parts"]

Attention = Literal["auto", "fused", "unfused"]
Balance = Literal["even", "speed"]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Everything about a step that is neither the model nor the machines.

    Attributes:
        batch: samples of a step, all replicas together.
        micro_batch: samples of a micro-batch on each replica.
        tensor, pipeline, data, context, expert: degrees; their product without ``expert`` is the number of devices,
            and ``expert`` divides ``data``. ``data`` None: what the devices leave.
        virtual_stages: parts of the model on each stage of the pipeline (interleaving).
        schedule: as `whale.planner.schedules.orders` knows it.
        recompute: what the backward computes again: ``none``, the core of attention (``selective``) or ``full``.
        zero: what data-parallel devices share: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too.
        state_shares: how much of that each replica has, as Whale runs it; (): equally.
        offload: what is in the memory of hosts, as Whale runs it; with state there replicas divide it at level 1 at
            least.
        auto_shares: whether it is by what memory leaves, where equal shares do not fit, as Whale runs it.
        sequence_parallel: whether the tensor group divides what its matrices do not split; None: where attention is
            fused, as in every stack that has both.
        precision: as `whale.planner.cost.precision` knows it.
        gradient_dtype: in which Whale sums gradients over ranks; None: in their own number type.
        step_in_backward: whether Whale updates parameters, and frees gradients, when these are summed.
        reduce: how replicas make one gradient of theirs, as Whale runs it.
        optimizer: whose states are in memory, and whose step is priced, as Whale runs it.
        attention: one fused kernel, spelt out, or by precision and device.
        stack: whose kernels and communication, as `whale.planner.cost.stack` knows it; None: FSDP's where several
            devices share gradients or weights, else Megatron's, as published runs have them.
        layers_per_stage: layers of each stage of the pipeline; None: even.
        balance: ``even``, or by the speed of mixed devices.
        device_order: the rank of the cluster's device at each position; None: the cluster's order.
    """

    batch: int
    micro_batch: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int | None = None
    context: int = 1
    expert: int = 1
    virtual_stages: int = 1
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    zero: int = 0
    state_shares: tuple[float, ...] = ()
    auto_shares: bool = False
    offload: Offload = "none"
    sequence_parallel: bool | None = False
    precision: str = "bf16"
    gradient_dtype: str | None = None
    step_in_backward: bool = False
    reduce: Reduce = "mean"
    optimizer: Optimizer = "adamw"
    attention: Attention = "auto"
    stack: Literal["whale", "fsdp", "megatron"] | None = None
    layers_per_stage: tuple[int, ...] | None = None
    balance: Balance = "even"
    device_order: tuple[int, ...] | None = None

    @property
    def level(self) -> int:
        """How much of the state is divided, as Whale runs it."""
        return max(1, self.zero) if self.offload in STATE_ON_HOST else self.zero


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Assignment of devices to the stages of each replica.

    Attributes:
        configuration: with its data degree.
        cluster: whose devices they are.
        order: the rank of the cluster's device at each position.
        num_micro_batches: of each replica in a step.
    """

    configuration: Configuration
    cluster: Cluster
    order: tuple[int, ...]
    data: int
    num_micro_batches: int

    @classmethod
    def of(cls, configuration: Configuration, cluster: Cluster) -> Layout:
        """The layout of *configuration* on *cluster*.

        Raises:
            UsageError: degrees contradict each other, the devices or the batch; says how.
        """
        given = configuration
        precision_named(given.precision)
        degrees = {"tp": given.tensor, "pp": given.pipeline, "cp": given.context, "ep": given.expert}
        degrees |= {"micro-batch": given.micro_batch, "batch": given.batch, "virtual-stages": given.virtual_stages}
        for name, degree in degrees.items():
            if degree < 1:
                raise UsageError(f"--{name} {degree}: it must be at least 1")
        devices = len(cluster.devices)
        model = given.tensor * given.pipeline * given.context
        data = given.data
        if data is None:
            data = devices // model
            if data * model != devices:
                raise UsageError(
                    f"--tp {given.tensor} x --pp {given.pipeline} x --cp {given.context} = {model} does not divide the "
                    f"cluster's {devices} devices"
                )
        if data * model != devices:
            raise UsageError(
                f"--dp {data} x --tp {given.tensor} x --pp {given.pipeline} x --cp {given.context} = {data * model} "
                f"devices, but the cluster has {devices}; change a degree or the cluster"
            )
        if data * given.context % given.expert:
            raise UsageError(
                f"--ep {given.expert} must divide --dp x --cp = {data * given.context}: experts live inside"
            )
        if given.batch < data:
            raise UsageError(f"--batch {given.batch} is less than one sample for each of --dp {data} replicas")
        if given.micro_batch * data > given.batch and given.micro_batch > 1:
            raise UsageError(
                f"--micro-batch {given.micro_batch} x --dp {data} = {given.micro_batch * data} samples is more than "
                f"--batch {given.batch}; make the micro-batch smaller"
            )
        if not 0 <= given.zero <= 3:
            raise UsageError(f"--zero {given.zero}: use 0, 1, 2 or 3")
        if len(given.state_shares) not in (0, data * given.context):
            raise UsageError(
                f"--state-shares has {len(given.state_shares)} numbers, but there are {data * given.context} replicas"
            )
        if given.virtual_stages > 1 and given.pipeline == 1:
            raise UsageError(f"--virtual-stages {given.virtual_stages} needs a pipeline: --pp is 1")
        if given.sequence_parallel and given.tensor == 1:
            raise UsageError("--sequence-parallel divides work over the tensor group, but --tp is 1")
        micro_batch = given.micro_batch * data
        if given.balance == "even" and given.batch % micro_batch:
            below = given.batch // micro_batch * micro_batch
            raise UsageError(
                f"--batch {given.batch} is no multiple of --micro-batch {given.micro_batch} x --dp {data} = "
                f"{micro_batch}; use --batch {below} or {below + micro_batch}, or another micro-batch"
            )
        if given.balance == "speed" and given.layers_per_stage is not None and data == 1:
            raise UsageError(
                "--balance speed has nothing to balance: --layers-per-stage says the layers, and there is one replica; "
                "leave one of them out"
            )
        _require_float8(given, cluster)
        order = given.device_order or tuple(range(devices))
        if sorted(order) != list(range(devices)):
            raise UsageError(f"--device-order must name each rank from 0 to {devices - 1} once")
        num = ceil(given.batch / (given.micro_batch * data))
        return cls(configuration=configuration, cluster=cluster, order=order, data=data, num_micro_batches=num)

    @property
    def num_stages(self) -> int:
        """Stages of the schedule: those of the pipeline times the virtual ones."""
        return self.configuration.pipeline * self.configuration.virtual_stages

    def rank(self, *, stage: int, replica: int, context: int = 0, tensor: int = 0) -> int:
        """The cluster's rank at these coordinates; *stage* is of the pipeline."""
        given = self.configuration
        position = ((stage * self.data + replica) * given.context + context) * given.tensor + tensor
        return self.order[position]

    def devices_of(self, stage: int, replica: int) -> tuple[int, ...]:
        """The ranks that compute a replica's stage together: all of its context and tensor coordinates."""
        given = self.configuration
        start = (stage * self.data + replica) * given.context * given.tensor
        return self.order[start : start + given.context * given.tensor]

    def tensor_group(self, stage: int, replica: int, context: int = 0) -> tuple[int, ...]:
        """The ranks that share a layer's matrices."""
        return tuple(
            self.rank(stage=stage, replica=replica, context=context, tensor=tensor)
            for tensor in range(self.configuration.tensor)
        )

    def context_group(self, stage: int, replica: int, tensor: int = 0) -> tuple[int, ...]:
        """The ranks that share rows."""
        return tuple(
            self.rank(stage=stage, replica=replica, context=context, tensor=tensor)
            for context in range(self.configuration.context)
        )

    def data_group(self, stage: int, tensor: int = 0) -> tuple[int, ...]:
        """The ranks that hold the same parameters: all replicas, and all parts of their rows."""
        return tuple(
            self.rank(stage=stage, replica=replica, context=context, tensor=tensor)
            for replica in range(self.data)
            for context in range(self.configuration.context)
        )

    def expert_group(self, stage: int, replica: int, context: int = 0, tensor: int = 0) -> tuple[int, ...]:
        """The ranks that share the experts of a layer: neighbours in the data group."""
        group = self.data_group(stage, tensor)
        position = replica * self.configuration.context + context
        start = position - position % self.configuration.expert
        return group[start : start + self.configuration.expert]

    def expert_data_group(self, stage: int, tensor: int = 0) -> tuple[int, ...]:
        """The ranks that hold the same experts as the first of the data group."""
        return self.data_group(stage, tensor)[:: self.configuration.expert]


def _require_float8(given: Configuration, cluster: Cluster) -> None:
    """Products in float8 are asked for by name; bfloat16 stands in for float16 and the reverse, but not for it."""
    if precision_named(given.precision).products[0] == "float8":
        without = sorted({d.type.name for d in cluster.devices if "float8" not in dict(d.type.rates)})
        if without:
            raise UsageError(f"--precision {given.precision}: {', '.join(without)} has no float8; use --precision bf16")


def require_parts(profile: ModelProfile, configuration: Configuration) -> None:
    """Refuse degrees over what the model does not have: experts, attention.

    Raises:
        UsageError: says which degree, and to leave it out.
    """
    variants = [variant for kind in profile.kinds for variant in kind.variants]
    kernels = [kernel for variant in variants for kernel in variant.forward]
    if configuration.expert > 1 and not any(variant.expert_parameters for variant in variants):
        raise UsageError(f"--ep {configuration.expert} divides experts, but {profile.name} has none; leave --ep out")
    attends = any(kernel.attention or kernel.kind == "attention" for kernel in kernels)
    if configuration.context > 1 and configuration.stack != "whale" and kernels and not attends:
        raise UsageError(
            f"--cp {configuration.context} divides the tokens of a row between attentions, but {profile.name} has no "
            "attention; use --dp in its place"
        )


def blocks_of(profile: ModelProfile) -> range:
    """The positions of the layers that repeat: the blocks between embeddings and head.

    They are those whose path ends in a number, or else those of a kind that occurs more than once.
    """
    numbered = [index for index, path in enumerate(profile.paths) if re.search(r"\.\d+$", path)]
    if len(numbered) < 2:
        counts = [profile.layers.count(kind) for kind in profile.layers]
        numbered = [index for index, count in enumerate(counts) if count > 1]
    return range(numbered[0], numbered[-1] + 1) if numbered else range(len(profile.layers))


def even_cuts(profile: ModelProfile, layout: Layout) -> tuple[range, ...]:
    """The layers of every stage of the schedule: blocks evenly, embeddings in the first stage, the head in the last.

    Where blocks do not divide, the stages from the second on take one more each. ``layers_per_stage`` counts either
    the blocks or all layers of the chain.

    Raises:
        UsageError: there are more stages than blocks, or ``layers_per_stage`` does not sum to the layers.
    """
    given, stages = layout.configuration, layout.num_stages
    blocks, total = blocks_of(profile), len(profile.layers)
    if given.layers_per_stage is not None:
        sizes = _given_sizes(given.layers_per_stage, given, len(blocks), total)
        if sum(sizes) == len(blocks) != total:
            sizes[0] += blocks.start
            sizes[-1] += total - blocks.stop
    else:
        if stages > len(blocks):
            raise UsageError(
                f"--pp {given.pipeline} x --virtual-stages {given.virtual_stages} = {stages} stages are more than the "
                f"model's {len(blocks)} layers"
            )
        base, rest = divmod(len(blocks), stages)
        sizes = [base + (0 < (index or stages) <= rest) for index in range(stages)]
        sizes[0] += blocks.start
        sizes[-1] += total - blocks.stop
    starts = [sum(sizes[:index]) for index in range(stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _given_sizes(sizes: Sequence[int], given: Configuration, num_blocks: int, total: int) -> list[int]:
    stages = given.pipeline * given.virtual_stages
    if len(sizes) != stages:
        raise UsageError(f"--layers-per-stage names {len(sizes)} stages, but --pp x --virtual-stages is {stages}")
    if min(sizes) < 1 or sum(sizes) not in (num_blocks, total):
        raise UsageError(
            f"--layers-per-stage {','.join(map(str, sizes))} sums to {sum(sizes)}; the model has {num_blocks} layers "
            f"({total} with embeddings and head), and every stage needs one"
        )
    return list(sizes)
