"""How long the layers of a model take on a device: kernels and launches, or measured times.

Each kernel is priced by `whale.planner.cost.kernels`, and has a launch that the host must keep up with. Collectives are
listed with their bytes, not priced: that needs a network, which this file does not know.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from whale.errors import UsageError
from whale.ir.cluster import DeviceType
from whale.ir.profile import Communication, Kernel, LayerKind, LayerVariant, MeasuredTimes
from whale.ir.strategy import RECOMPUTES, Recompute
from whale.planner.cost.calibration import CALIBRATION, Calibration
from whale.planner.cost.kernels import Array, as_run
from whale.planner.cost.optimizers import costs_of
from whale.planner.cost.precision import Precision, precision_named
from whale.planner.cost.silicon import Silicon, silicon_of

__all__ = [
    "Collective",
    "LayerSeconds",
    "attention_is_fused",
    "forward_flops",
    "layer_seconds",
    "layer_seconds_by_rows",
    "run_again",
    "variant_of",
]

MASTER_BYTES = {True: 34, False: 28}
"""Bytes that a fused Adam moves for each parameter: with float32 master weights (gradient 4, weight, moments read and
written 24, half-precision weight 2, gradient's conversion 4) and without (gradient 4, weight and moments 24)."""

ACCUMULATE_BYTES = 8
"""Bytes that adding a parameter's gradient to what earlier micro-batches left moves in a stack such as Megatron's: 4
read, 4 written. Stacks that fuse attention fuse this into the product that makes the gradient."""

EAGER_ACCUMULATE_BYTES = {True: 18, False: 12}
"""The same with PyTorch's own kernels, where sums are kept in float32: with a gradient of 16 bits its conversion (2
read, 4 written), then the sum (8 read, 4 written); without, the sum alone. In measured blocks of seven cards
(``benchmarks/block_times.py``) a backward takes so long beside what grows with its rows."""


class Collective(NamedTuple):
    """A collective inside a layer: ``bytes`` is the size of the whole tensor, as in `whale.ir.profile.Communication`;
    ``num`` of them; ``beside`` attentions."""

    kind: str
    group: str
    bytes: float
    num: int = 1
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """One micro-batch through one layer on one device of the tensor group.

    Attributes:
        forward: seconds, without collectives (those that were measured inside are in).
        backward: the same of a step's first micro-batch, recomputation included.
        accumulation: seconds more of a later micro-batch's backward, which adds to the gradients that there are.
        weights: the part of ``backward`` that only gradients of weights need.
        update: the optimizer's step for the layer's parameters, once a step.
        forward_collectives, backward_collectives: to be priced on a network.
        forward_slack, backward_slack: seconds among ``forward`` and ``backward`` in which the device waits for the
            host's launches: collectives cost nothing while they fit into them.
        forward_attention, backward_attention: seconds among them of attentions, beside which a ring passes keys on.
        measured: whether times were measured on this type of device.
    """

    forward: float
    backward: float
    weights: float
    update: float
    accumulation: float = 0.0
    forward_collectives: tuple[Collective, ...] = ()
    backward_collectives: tuple[Collective, ...] = ()
    forward_slack: float = 0.0
    backward_slack: float = 0.0
    forward_attention: float = 0.0
    backward_attention: float = 0.0
    measured: bool = False

    def averaged(self, num_micro_batches: int) -> LayerSeconds:
        """The mean over the micro-batches of a step, of which all but the first accumulate gradients."""
        added = self.accumulation * (1 - 1 / num_micro_batches)
        return replace(self, backward=self.backward + added, weights=self.weights + added, accumulation=0.0)


def layer_seconds(kind: LayerKind, device: DeviceType, *, rows: float, **how: Any) -> LayerSeconds:
    """How long a layer takes for a micro-batch of *rows* rows; `layer_seconds_by_rows` says what else may be given."""
    return layer_seconds_by_rows(kind, device, (rows,), **how)[0]


def layer_seconds_by_rows(
    kind: LayerKind,
    device: DeviceType,
    rows: Sequence[float],
    *,
    tensor_degree: int = 1,
    precision: str | Precision = "bf16",
    fused_attention: bool | None = None,
    eager: bool = True,
    fsdp: bool = False,
    recompute: Recompute = "none",
    sequence_parallel: bool = False,
    expert_degree: int = 1,
    context_degree: int = 1,
    optimizer: str | None = None,
    optimizer_shards: int = 1,
    accumulate: bool = True,
    calibration: Calibration = CALIBRATION,
) -> list[LayerSeconds]:
    """How long a layer takes for micro-batches of several numbers of rows, each by itself (fractions where context
    parallelism cuts rows). Together they take little more to work out than one.

    Args:
        kind: of the layer, with kernels or measured times; measured times have priority if they are of this device
            type.
        device: on which one shard of the layer runs.
        rows: of the micro-batches.
        tensor_degree: devices over which its matrices are split.
        precision: as in `whale.planner.cost.precision`, or its name.
        fused_attention: whether the core of the attention is one kernel; None: as `attention_is_fused` says.
        eager: whether kernels are those of PyTorch itself, one for each operator, as under FSDP; else a stack like
            Megatron's, which fuses pointwise operators and has the vendor's attention.
        fsdp: whether PyTorch's kernels run beside FSDP's collectives.
        recompute: what the backward computes again.
        sequence_parallel: whether the tensor group also divides what is not split.
        expert_degree: devices over which experts are divided, each with its own *rows* of all else: as the profile has
            it, or if it does not, with the weights of the experts divided.
        context_degree: devices over which Whale cuts each row.
        optimizer: as `whale.planner.cost.optimizers` knows it, run by torch in the number type of the run, as in
            Whale's executor; None: a fused Adam that may have master weights, in other stacks.
        optimizer_shards: devices that share the optimizer's step (ZeRO).
        accumulate: whether gradients are added up over micro-batches on the device (not where they are scattered).
        calibration: constants of kernels and launches.

    Raises:
        UsageError: the profile has neither times nor kernels for this degree or device.
    """
    number = precision_named(precision) if isinstance(precision, str) else precision
    times = _nearest_times(kind, device, tensor_degree)
    found: list[LayerSeconds] = []
    if times is not None:
        again = _share_again(kind, device, number, recompute, runs=optimizer is not None)
        found = [_measured_seconds(times, tensor_degree, one, again, accumulate) for one in rows]
        if times.includes_communication or not kind.variants:
            return found
    fused = attention_is_fused(device, number, eager=eager) if fused_attention is None else fused_attention
    moved = MASTER_BYTES[number.mixed] if optimizer is None else costs_of(optimizer).moved * number.element_bytes
    added_bytes: float = 0 if fused else ACCUMULATE_BYTES
    if eager and optimizer is None:
        added_bytes = EAGER_ACCUMULATE_BYTES[number.mixed]
    later_bytes = 0
    if eager and optimizer is not None:  # gradients stay in the number type of the run; the first is kept as it is
        added_bytes, later_bytes = 0, 3 * number.element_bytes

    def modelled(variant: LayerVariant) -> list[LayerSeconds]:
        degree = expert_degree if variant.expert_degree == 1 else 1
        parameters = variant.parameters - variant.expert_parameters * (1 - 1 / degree)
        priced = _Priced(
            variant=variant,
            device=device,
            rows=np.array(rows, dtype=float),
            precision=number,
            fused=fused,
            eager=eager,
            fsdp=fsdp,
            sequence_parallel=sequence_parallel,
            expert_degree=degree,
            calibration=calibration,
            runs=optimizer is not None,
        )
        added = parameters * added_bytes if accumulate else 0.0
        made = [parameters + sum(one.updated(count) - one.elements for one in variant.sparse) for count in rows]
        later = [each * later_bytes if accumulate else 0.0 for each in made]
        return priced.seconds(recompute, added, later, [each / optimizer_shards * moved for each in made])

    variant = variant_of(kind, tensor_degree, expert_degree, context_degree)
    gathers_again = recompute == "full" and optimizer is None  # Whale keeps what ranks exchange
    if times is None:
        if kind.measured and not variant.forward and not variant.backward:
            raise UsageError(_unmeasured(kind, device))
        found = modelled(variant)
    elif variant.expert_degree > 1 or variant.context_degree > 1:  # never measured
        whole = variant_of(kind, variant.tensor_degree)
        found = list(map(_by_the_model, found, modelled(whole), modelled(variant)))
    return [
        replace(
            one,
            forward_collectives=_collectives(variant.forward_communications, count, number),
            backward_collectives=_collectives(
                (*(variant.forward_communications if gathers_again else ()), *variant.backward_communications),
                count,
                number,
            ),
        )
        for one, count in zip(found, rows, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class _Priced:
    """A layer by its kernels."""

    variant: LayerVariant
    device: DeviceType
    rows: Array
    precision: Precision
    fused: bool
    eager: bool
    fsdp: bool
    sequence_parallel: bool
    expert_degree: int
    calibration: Calibration
    runs: bool

    def seconds(
        self, recompute: Recompute, added_bytes: float, later_bytes: Sequence[float], updated_bytes: Sequence[float]
    ) -> list[LayerSeconds]:
        """Seconds for each number of rows; each backward moves *added_bytes*, all but the first its *later_bytes*, the
        update its *updated_bytes* once."""
        variant, silicon, constants = self.variant, self._silicon(eager=False), self.calibration
        bandwidth = self.device.memory_bandwidth * silicon.bandwidth
        forward, forward_host, _ = self._of(variant.forward)
        backward, backward_host, weights = self._of(variant.backward, backward=True)
        if added_bytes:
            backward, weights = backward + added_bytes / bandwidth, weights + added_bytes / bandwidth
        forward_host += constants.collective_launch_seconds * _num_inside(variant.forward_communications)
        backward_host += constants.collective_launch_seconds * _num_inside(variant.backward_communications)
        if variant.tensor_degree > 4:
            forward_host *= constants.lockstep_slowdown
            backward_host *= constants.lockstep_slowdown
        if recompute == "full" and not self.runs:
            backward, backward_host = backward + forward, backward_host + forward_host
        elif kernels := self._recomputed(recompute):
            again, again_host, _ = self._of(kernels)
            backward, backward_host = backward + again, backward_host + again_host
        attention = [
            self._of(tuple(kernel for kernel in kernels if kernel.kind == "attention"), backward=back)[0].tolist()
            if any(one.beside for one in variant.forward_communications)
            else [0.0] * len(self.rows)
            for kernels, back in ((variant.forward, False), (variant.backward, True))
        ]
        return [
            LayerSeconds(
                forward=max(ahead, forward_host),
                backward=max(back, backward_host),
                weights=of_weights,
                update=updated / bandwidth,
                accumulation=max(back + later / bandwidth, backward_host) - max(back, backward_host),
                forward_slack=max(0.0, forward_host - ahead),
                backward_slack=max(0.0, backward_host - back),
                forward_attention=beside[0],
                backward_attention=beside[1],
            )
            for ahead, back, of_weights, later, updated, *beside in zip(
                forward.tolist(),
                backward.tolist(),
                weights.tolist(),
                later_bytes,
                updated_bytes,
                *attention,
                strict=True,
            )
        ]

    def _of(self, kernels: tuple[Kernel, ...], *, backward: bool = False) -> tuple[Array, float, Array]:
        """Seconds of the device, of its host, and of the device for gradients of weights."""
        softmax = self.precision.element_bytes == 2
        silicon = self._silicon(eager=self.eager)
        runs = as_run(kernels, fused=self.fused, backward=backward, fused_softmax=softmax, eager=self.eager)
        spent = runs.num * runs.seconds(
            self.device,
            silicon,
            self.rows,
            precision=self.precision,
            tensor_degree=self.variant.tensor_degree,
            sequence_parallel=self.sequence_parallel,
            expert_degree=self.expert_degree,
            backward=backward,
        )
        launches = float(runs.num.sum()) * (self.calibration.executor_launch_seconds if self.runs else silicon.launch)
        return _in_all(spent), launches, _in_all(spent[runs.of_weights] if backward else spent[:0])

    def _silicon(self, *, eager: bool) -> Silicon:
        """How the device runs kernels."""
        laws, designs = self.calibration.laws, self.calibration.designs
        return silicon_of(self.device, eager=eager, fsdp=self.fsdp, laws=laws, designs=designs)

    def _recomputed(self, recompute: Recompute) -> tuple[Kernel, ...]:
        """Kernels of the forward that a rule repeats."""
        if self.runs:
            return run_again(self.variant, recompute)
        if recompute == "none":
            return ()
        forward = self.variant.forward
        chosen = [kernel for kernel in forward if (kernel.kind == "memory" if self.fused else _in_core(kernel))]
        if self.eager and self.fused:
            chosen += [kernel for kernel in forward if kernel.kind == "matmul"][1::2]
        return tuple(chosen)


def run_again(variant: LayerVariant, recompute: Recompute) -> tuple[Kernel, ...]:
    """The kernels of a layer's forward that Whale's backward runs again under a rule."""
    rules = ("always", *RECOMPUTES[1 : RECOMPUTES.index(recompute) + 1])
    return tuple(kernel for kernel in variant.forward if kernel.again in rules)


def _in_all(spent: Array) -> Array:
    """The sum of the lines, one after the other: the same whatever the number of columns."""
    found: Array = spent.cumsum(axis=0)[-1] if len(spent) else np.zeros(spent.shape[1])
    return found


def _unmeasured(kind: LayerKind, device: DeviceType) -> str:
    known = ", ".join(sorted({times.device_type for times in kind.measured}))
    return (
        f"the profile has times of layer {kind.name!r} on {known}, but neither times nor kernels for {device.name}; "
        f"measure the model there ('whale profile'), name one of those types in the cluster file, or use --model"
    )


def variant_of(kind: LayerKind, tensor_degree: int, expert_degree: int = 1, context_degree: int = 1) -> LayerVariant:
    """The variant of that tensor degree, and context degree; of an expert degree where there is one for it, else with
    whole experts.

    Raises:
        UsageError: there is none; the message names those that exist.
    """
    if context_degree > 1:
        wanted = (tensor_degree, expert_degree, context_degree)
        for one in kind.context_variants:
            if (one.tensor_degree, one.expert_degree, one.context_degree) == wanted:
                return one
        cuts = ", ".join(f"{one.tensor_degree} x {one.context_degree}" for one in kind.context_variants)
        raise UsageError(
            f"the profile has no layer {kind.name!r} at tensor degree {tensor_degree} and context degree "
            f"{context_degree}; it knows {cuts or 'no context degree'}"
        )
    degrees = (tensor_degree, expert_degree)
    split = next((one for one in kind.expert_variants if (one.tensor_degree, one.expert_degree) == degrees), None)
    if split is not None:
        return split
    found = next((variant for variant in kind.variants if variant.tensor_degree == tensor_degree), None)
    if found is None:
        known = sorted({variant.tensor_degree for variant in kind.variants})
        known = known or sorted({times.tensor_degree for times in kind.measured})
        raise UsageError(
            f"the profile has no layer {kind.name!r} at tensor degree {tensor_degree}; it knows "
            f"{', '.join(map(str, known)) or 'none'}"
        )
    return found


def forward_flops(kind: LayerKind, tensor_degree: int = 1) -> float:
    """Multiplications and additions of a layer's products and attentions for a row, on all devices of the group; 0
    where the profile has no kernels for this degree."""
    variant = next((one for one in kind.variants if one.tensor_degree == tensor_degree), None)
    if variant is None:
        return 0.0
    return sum(
        kernel.count * kernel.flops(1) * (tensor_degree if kernel.split else 1)
        for kernel in variant.forward
        if kernel.kind != "memory"
    )


def attention_is_fused(device: DeviceType, precision: Precision, *, eager: bool = False) -> bool:
    """Whether the core of attention is one kernel. PyTorch's own (*eager*) is in all number types but float64; stacks
    of the device's time fuse it in bfloat16 and float8 on devices that have bfloat16."""
    if eager:
        return precision.name != "fp64"
    return precision.name in ("bf16", "fp8") and "bfloat16" in dict(device.rates)


def _num_inside(communications: Iterable[Communication]) -> int:
    """The number of collectives of a layer on a single replica."""
    return sum(one.group != "replica" for one in communications)


def _in_core(kernel: Kernel) -> bool:
    return kernel.attention or kernel.kind == "attention"


def _collectives(communications: Iterable[Communication], rows: float, precision: Precision) -> tuple[Collective, ...]:
    return tuple(
        Collective(given.kind, given.group, given.size.total(rows, precision.element_bytes), given.count, given.beside)
        for given in communications
    )


# --- measured times ---------------------------------------------------------------------------------------------------


def _nearest_times(kind: LayerKind, device: DeviceType, tensor_degree: int) -> MeasuredTimes | None:
    """Measured times of this device type, at the degree or the nearest one."""
    known = [times for times in kind.measured if times.device_type == device.name]
    return min(known, key=lambda t: (abs(t.tensor_degree - tensor_degree), t.tensor_degree), default=None)


def _share_again(
    kind: LayerKind, device: DeviceType, precision: Precision, recompute: Recompute, *, runs: bool
) -> float:
    """The part of a measured forward that a backward computes again under a rule: by the times of its kernels, beyond
    what it computed again when it was measured."""
    if recompute == "none":
        return 0.0
    if not runs or not kind.variants:
        return float(recompute == "full")
    variant, silicon = kind.variants[0], silicon_of(device)

    def seconds(kernels: tuple[Kernel, ...]) -> float:
        as_they_run = as_run(kernels, fused=True, backward=False, fused_softmax=False, eager=True)
        one = as_they_run.seconds(device, silicon, np.ones(1), precision=precision)
        return float((as_they_run.num * one).sum())

    whole = seconds(variant.forward)
    more = seconds(run_again(variant, recompute)) - seconds(run_again(variant, "none"))
    return more / whole if whole else 0.0


def _measured_seconds(
    times: MeasuredTimes, tensor_degree: int, rows: float, again: float, accumulate: bool
) -> LayerSeconds:
    """From measured times, with a part of the forward *again* in the backward; at other degrees work is taken as
    divided."""
    share = times.tensor_degree / tensor_degree
    forward = _at(times, _never_falling(times.forward), rows) * share
    first_pass = _at(times, _never_falling(times.backward), rows) * share
    backward = first_pass + again * forward
    accumulated = accumulate and bool(times.accumulation)
    return LayerSeconds(
        forward=forward,
        backward=backward,
        weights=first_pass / 2,
        update=_at(times, times.update, rows) * share,
        accumulation=_at(times, times.accumulation, rows) * share if accumulated else 0.0,
        measured=True,
    )


def _by_the_model(measured: LayerSeconds, whole: LayerSeconds, split: LayerSeconds) -> LayerSeconds:
    """Measured times of a layer with whole experts, scaled to split experts by the ratio of the modelled times."""

    def as_many(name: str) -> float:
        known: float = getattr(whole, name)
        found: float = getattr(measured, name) * (getattr(split, name) / known if known else 1.0)
        return found

    backward = as_many("backward")
    return replace(
        measured,
        forward=as_many("forward"),
        backward=backward,
        weights=min(backward, as_many("weights")),
        update=as_many("update"),
        accumulation=as_many("accumulation"),
    )


def _never_falling(values: Sequence[float]) -> tuple[float, ...]:
    """Times by ascending rows of which none is more than a later one: more rows do not take less, so a time that falls
    with the rows was disturbed.

    >>> _never_falling([2.4, 1.5, 1.8])
    (1.5, 1.5, 1.8)
    """
    return tuple(accumulate(reversed(values), min))[::-1]


def _at(times: MeasuredTimes, values: Sequence[float], rows: float) -> float:
    """Between measured rows linear; above the last by its seconds a row or the last slope; below the first by the line
    through the first two, and at least in proportion."""
    points = times.rows
    if len(points) == 1:
        return values[0] * max(rows / points[0], 1.0)
    index = min(max(bisect_right(points, rows), 1), len(points) - 1)
    low, high = points[index - 1], points[index]
    slope = max(0.0, (values[index] - values[index - 1]) / (high - low))
    return max(0.0, values[index - 1] + slope * (rows - low))
