"""How long the kernels of a layer take on a device: a roofline whose efficiency depends on sizes, or measured times.

A matrix product is cut into tiles that the multiprocessors take in waves; a kernel that only moves data runs at the
memory bandwidth that is left in practice; each kernel has a launch that the host must keep up with. Collectives are
listed with their bytes, not priced: that needs a network, which this file does not know.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod
from typing import Literal, NamedTuple

from whale.errors import UsageError
from whale.ir.cluster import DeviceType
from whale.ir.profile import Affine, Amount, Communication, Kernel, LayerKind, LayerVariant, MeasuredTimes
from whale.planner.optimizers import costs_of
from whale.planner.precision import Precision, precision_named
from whale.planner.silicon import silicon_of

__all__ = [
    "Collective",
    "LayerSeconds",
    "Recompute",
    "attention_is_fused",
    "element_bytes",
    "forward_flops",
    "kernel_seconds",
    "layer_seconds",
    "matmul_seconds",
    "num_scores",
    "variant_of",
]

Recompute = Literal["none", "selective", "full"]

KERNEL_SECONDS = 3e-6
"""What a kernel takes at least on the device, start and end of its grid included (typical of CUDA; recalled)."""

CAST_BYTES = 2
"""Bytes that casts to float8 move for each element that a product reads: 2 read and 1 written, and 1 for the transpose,
of each of input, weight and gradient once for the two products that read it."""

CONVOLUTION_SHARE = 0.6
"""What convolutions on tensor cores reach of a matrix product's rate (assumed; ResNet-50 comes out near what NVIDIA
reports of V100 and A100)."""

COLLECTIVE_LAUNCH_SECONDS = 50e-6
"""What the host takes to launch a collective inside a layer."""

LOCKSTEP_SLOWDOWN = 1.4
"""How much longer launches take in a tensor group of more than four devices: it spans both sockets of a host, and waits
at every collective for the slowest of its processes. vTrain's layers that the host limits take 3.4 ms at degree 1, 3.6
at 2 and 4, 5.1 at 8."""

CACHE_SPEEDUP = 3.0
"""How much faster the last-level cache is than the memory (A100: about 5 TB/s against 1.6; recalled)."""

MASTER_BYTES = {True: 34, False: 28}
"""Bytes that a fused Adam moves for each parameter: with float32 master weights (gradient 4, weight, moments read and
written 24, half-precision weight 2, gradient's conversion 4) and without (gradient 4, weight and moments 24)."""

SOFTMAX_KEYS, SOFTMAX_SLOWDOWN = 1024, 0.6
"""A warp of Megatron's fused softmax holds a whole row of scores: above so many keys it runs out of registers, and
gets slower by this power of the keys. Calibrated on the A100 and V100 rows of published_calibration.csv with 1,024 and
2,048 keys."""

ACCUMULATE_BYTES = 8
"""Bytes that adding a parameter's gradient to what earlier micro-batches left moves: 4 read, 4 written. Stacks that
fuse attention fuse this into the product that makes the gradient."""

_POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy", "add", "add_", "cat", "clone", "copy", "cos", "div", "div_", "exp", "exp_", "gelu", "log",
        "masked_fill", "mul", "mul_", "native_dropout", "native_dropout_backward", "neg", "pow", "relu", "rsqrt",
        "sigmoid", "silu", "sin", "sub", "tanh", "threshold_backward", "where",
    )
)  # fmt: skip
"""Operators that a stack of kernels fuses with their neighbours: Megatron's bias, dropout and residual, rotary
positions, gates; all that a compiler fuses."""

_OF_LOSS = frozenset(
    {"aten._log_softmax", "aten._log_softmax_backward_data", "aten.nll_loss_backward", "cross_entropy_loss"}
)

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
"""Sizes of the tiles that a matrix library chooses among, with the share of the largest tile's speed."""

_TILE_START_K = 112
"""A tile's start and end cost as much as so many steps of its inner dimension."""


class Collective(NamedTuple):
    """A collective inside a layer: ``bytes`` is the size of the whole tensor, as in `whale.ir.profile.Communication`;
    ``num`` of them."""

    kind: str
    group: str
    bytes: float
    num: int = 1


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """One micro-batch through one layer on one device of the tensor group.

    Attributes:
        forward: seconds, without collectives (those that were measured inside are in).
        backward: the same, recomputation included.
        weights: the part of ``backward`` that only gradients of weights need.
        update: the optimizer's step for the layer's parameters, once a step.
        forward_collectives, backward_collectives: to be priced on a network.
        forward_slack, backward_slack: seconds among ``forward`` and ``backward`` in which the device waits for the
            host's launches: collectives cost nothing while they fit into them.
        measured: whether times were measured on this type of device.
    """

    forward: float
    backward: float
    weights: float
    update: float
    forward_collectives: tuple[Collective, ...] = ()
    backward_collectives: tuple[Collective, ...] = ()
    forward_slack: float = 0.0
    backward_slack: float = 0.0
    measured: bool = False


def layer_seconds(
    kind: LayerKind,
    device: DeviceType,
    *,
    tensor_degree: int = 1,
    rows: float,
    precision: str = "bf16",
    fused_attention: bool | None = None,
    eager: bool = False,
    recompute: Recompute = "none",
    sequence_parallel: bool = False,
    expert_degree: int = 1,
    optimizer: str | None = None,
    optimizer_shards: int = 1,
    accumulate: bool = True,
    num_micro_batches: int = 1,
) -> LayerSeconds:
    """How long a layer takes for a micro-batch of *rows* rows (a fraction where context parallelism cuts rows).

    Args:
        kind: of the layer, with kernels or measured times; the latter win where they are of this device type.
        device: on which one shard of the layer runs.
        tensor_degree: devices over which its matrices are split.
        rows: of the micro-batch.
        precision: as in `whale.planner.precision`.
        fused_attention: whether the core of the attention is one kernel; None: by precision and device.
        eager: whether kernels are those of PyTorch itself, one for each operator, as under FSDP; else a stack like
            Megatron's, which fuses pointwise operators and has the vendor's attention.
        recompute: what the backward computes again.
        sequence_parallel: whether the tensor group also divides what is not split.
        expert_degree: devices over which experts are divided.
        optimizer: as `whale.planner.optimizers` knows it, run by torch in the number type of the run; None: a fused
            Adam that may have master weights.
        optimizer_shards: devices that share the optimizer's step (ZeRO).
        accumulate: whether gradients are added up over micro-batches on the device (not where they are scattered).
        num_micro_batches: of a step, of which the first adds nothing up, where that was measured.

    Raises:
        UsageError: the profile has neither times nor kernels for this degree or device.
    """
    number = precision_named(precision)
    times = _nearest_times(kind, device, tensor_degree)
    measured = None
    if times is not None:
        adding = (num_micro_batches - 1) / num_micro_batches if accumulate else 0.0
        measured = _measured_seconds(times, tensor_degree, rows, recompute, adding)
        if times.includes_communication or not kind.variants:
            return measured
    variant = variant_of(kind, tensor_degree)
    parameters = variant.parameters - variant.expert_parameters * (1 - 1 / expert_degree)
    silicon = silicon_of(device)
    stepped = MASTER_BYTES[number.mixed] if optimizer is None else costs_of(optimizer).moved * number.element_bytes
    update = parameters / optimizer_shards * stepped / (device.memory_bandwidth * silicon.bandwidth)
    forward_collectives = _collectives(variant.forward_communications, rows, number)
    backward_collectives = _collectives(variant.backward_communications, rows, number)
    if recompute == "full":
        backward_collectives = forward_collectives + backward_collectives
    if measured is not None:
        return replace(measured, forward_collectives=forward_collectives, backward_collectives=backward_collectives)
    if kind.measured and not variant.forward and not variant.backward:
        raise UsageError(_unmeasured(kind, device))
    fused = attention_is_fused(device, number) if fused_attention is None else fused_attention

    def seconds(kernels: Iterable[Kernel], *, backward: bool) -> tuple[float, float, float]:
        device_time = host_time = weights = 0.0
        for kernel in kernels:
            divisor = _divisor(kernel, tensor_degree, sequence_parallel)
            experts = expert_degree if kernel.expert else 1
            spent = kernel.count * kernel_seconds(
                kernel,
                device,
                rows=rows,
                precision=number,
                divisor=divisor,
                expert_degree=experts,
                backward=backward,
                eager=eager,
            )
            device_time += spent
            host_time += kernel.count * silicon.launch
            if backward and _is_of_weights(kernel, rows):
                weights += spent
        return device_time, host_time, weights

    softmax = number.element_bytes == 2
    runs = [
        _runs(_Same(kernels), fused=fused, backward=backward, fused_softmax=softmax, eager=eager)
        for kernels, backward in ((variant.forward, False), (variant.backward, True))
    ]
    forward, forward_host, _ = seconds(runs[0], backward=False)
    backward, backward_host, weights = seconds(runs[1], backward=True)
    if accumulate and not fused:
        moved = parameters * ACCUMULATE_BYTES
        added = moved / (device.memory_bandwidth * silicon.bandwidth)
        backward, weights = backward + added, weights + added
    forward_host += COLLECTIVE_LAUNCH_SECONDS * len(variant.forward_communications)
    backward_host += COLLECTIVE_LAUNCH_SECONDS * len(variant.backward_communications)
    if tensor_degree > 4:
        forward_host, backward_host = forward_host * LOCKSTEP_SLOWDOWN, backward_host * LOCKSTEP_SLOWDOWN
    if recompute == "full":
        backward, backward_host = backward + forward, backward_host + forward_host
    elif recompute == "selective":
        chosen = [kernel for kernel in variant.forward if (kernel.kind == "memory" if fused else _in_core(kernel))]
        if eager and fused:
            chosen += [kernel for kernel in variant.forward if kernel.kind == "matmul"][1::2]
        repeated = _runs(_Same(tuple(chosen)), fused=fused, backward=False, fused_softmax=softmax, eager=eager)
        again, again_host, _ = seconds(repeated, backward=False)
        backward, backward_host = backward + again, backward_host + again_host
    return LayerSeconds(
        forward=max(forward, forward_host),
        backward=max(backward, backward_host),
        weights=weights,
        update=update,
        forward_collectives=forward_collectives,
        backward_collectives=backward_collectives,
        forward_slack=max(0.0, forward_host - forward),
        backward_slack=max(0.0, backward_host - backward),
    )


def _unmeasured(kind: LayerKind, device: DeviceType) -> str:
    known = ", ".join(sorted({times.device_type for times in kind.measured}))
    return (
        f"the profile has times of layer {kind.name!r} on {known}, but neither times nor kernels for {device.name}; "
        f"measure the model there ('whale profile'), name one of those types in the cluster file, or use --model"
    )


def variant_of(kind: LayerKind, tensor_degree: int) -> LayerVariant:
    """The variant of that tensor degree.

    Raises:
        UsageError: there is none; the message names those that exist.
    """
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


def attention_is_fused(device: DeviceType, precision: Precision) -> bool:
    """Whether software of the device's time fuses attention: bfloat16 and float8 on devices that have bfloat16."""
    return precision.name in ("bf16", "fp8") and "bfloat16" in dict(device.rates)


def element_bytes(operator: str, precision: Precision) -> int:
    """Bytes of what an operator reads, keeps and writes: the loss over a vocabulary is computed in float32.

    >>> from whale.planner.precision import precision_named
    >>> [element_bytes(name, precision_named("bf16")) for name in ("aten.mm", "aten._log_softmax")]
    [2, 4]
    """
    return max(4 if operator in _OF_LOSS else 1, precision.element_bytes)


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernel_seconds(
    kernel: Kernel,
    device: DeviceType,
    *,
    rows: float,
    precision: Precision,
    divisor: float = 1,
    expert_degree: int = 1,
    backward: bool = False,
    eager: bool = False,
) -> float:
    """Seconds of one of a kernel's ``count`` runs on the device, launches of the host apart.

    Expert parallelism divides the weights of experts, not the rows: a device's experts get those of all others.
    """
    silicon = silicon_of(device, eager=eager)
    size = element_bytes(kernel.name, precision)
    weights = (kernel.read.total(0, size) + kernel.written.total(0, size)) * (1 - 1 / expert_degree)
    moved = (kernel.read.total(rows, size) + kernel.written.total(rows, size) - weights) / divisor
    cached = min(moved, silicon.cache_bytes) * (1 - 1 / CACHE_SPEEDUP)
    memory = (moved - cached) / (device.memory_bandwidth * silicon.bandwidth)
    if "batch_norm" in kernel.name:  # statistics of the whole batch first, then a second pass that uses them
        memory += kernel.read.total(rows, size) / (device.memory_bandwidth * silicon.bandwidth)
    flops = kernel.flops(rows) / divisor
    dims = tuple(max(dim(rows), 1e-9) for dim in kernel.dims)
    match kernel.kind:
        case "matmul" | "grouped_matmul" if len(dims) == 4:
            rate, dtype = precision.rate(device, attention=kernel.attention)
            share = silicon.vector if dtype == "float32" else silicon.matmul
            batch, m, n, k = dims
            if kernel.kind == "grouped_matmul":
                batch = max(1.0, batch / expert_degree)
                m = m / batch
            compute = matmul_seconds(batch, m / divisor, n, k, rate * share, silicon.multiprocessors)
            if dtype == "float8":
                compute += CAST_BYTES * batch * (m / divisor + n) * k / (device.memory_bandwidth * silicon.bandwidth)
        case "attention":
            rate, dtype = precision.rate(device, attention=True)
            share = silicon.vector * 0.5 if dtype == "float32" else silicon.attention
            head = dims[3] if len(dims) == 4 else 128
            half = 0.5 if kernel.causal else 1.0  # what is masked is skipped
            slowdown = 1.25 if backward else 1.0  # its backward is less efficient than its forward
            compute = flops * half * slowdown / (rate * share * head / (head + 24))
        case "memory":
            compute = flops / (device.speed("float32") * silicon.vector)
        case _:
            rate, dtype = precision.rate(device)
            compute = flops / (rate * (silicon.vector if dtype == "float32" else CONVOLUTION_SHARE * silicon.matmul))
            if dtype == "tfloat32":  # tensor cores want channels last, images in float32 are kept channels first
                compute += 2 * moved / (device.memory_bandwidth * silicon.bandwidth)
    return max(memory, compute) + KERNEL_SECONDS


@lru_cache(maxsize=65536)
def matmul_seconds(batch: float, m: float, n: float, k: float, rate: float, multiprocessors: int) -> float:
    """Seconds of ``batch`` products of (m, k) by (k, n) at a sustained *rate* (FLOP/s), by waves of tiles.

    The best of a few tile sizes, each with the inner dimension cut or not; exact under the model.

    >>> large = matmul_seconds(1, 8192, 8192, 8192, 2.5e14, 108)
    >>> round(2 * 8192**3 / large / 2.5e14, 2)
    0.98
    """
    best = float("inf")
    for rows, columns, speed in _TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        for cuts in (1, 2, 4, 8):
            if cuts > 1 and (tiles >= multiprocessors or k / cuts < 256):
                break
            waves = ceil(tiles * cuts / multiprocessors)
            steps = k / cuts + _TILE_START_K
            best = min(best, waves * 2 * rows * columns * steps * multiprocessors / (rate * speed))
    return best


def _divisor(kernel: Kernel, tensor_degree: int, sequence_parallel: bool) -> int:
    return tensor_degree if sequence_parallel and not kernel.split and kernel.kind == "memory" else 1


def _is_of_weights(kernel: Kernel, rows: float) -> bool:
    """Whether a kernel of the backward makes a weight's gradient: its inner dimension is the rows."""
    return kernel.kind in ("matmul", "grouped_matmul") and len(kernel.dims) == 4 and kernel.dims[3].per_row > 0


def _in_core(kernel: Kernel) -> bool:
    return kernel.attention or kernel.kind == "attention"


class _Same:
    """Kernels that are equal to themselves only: comparing all that they hold takes longer than running over them."""

    def __init__(self, kernels: tuple[Kernel, ...]) -> None:
        self.kernels = kernels

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.kernels is other.kernels

    def __hash__(self) -> int:
        return id(self.kernels)


@lru_cache(maxsize=1024)
def _runs(same: _Same, *, fused: bool, backward: bool, fused_softmax: bool, eager: bool) -> tuple[Kernel, ...]:
    """The kernels in the form in which they run, of whatever number of rows."""
    as_run = _as_run(same.kernels, fused=fused, backward=backward, fused_softmax=fused_softmax)
    return tuple(as_run if eager else _with_pointwise_fused(as_run))


def _as_run(kernels: Iterable[Kernel], *, fused: bool, backward: bool, fused_softmax: bool) -> Iterable[Kernel]:
    """The kernels with their attentions in the form in which they run: one fused kernel, or spelt out."""
    for kernel in kernels:
        if kernel.kind == "attention" and not fused and len(kernel.dims) == 4:
            yield from _spelt_out(kernel, backward=backward, fused_softmax=fused_softmax)
        else:
            yield kernel


def _spelt_out(kernel: Kernel, *, backward: bool, fused_softmax: bool) -> Iterable[Kernel]:
    """An attention as products of matrices with a softmax and a dropout between them, masked scores included.

    The passes over the scores are those of Megatron's kernels: scale, mask and softmax are one, dropout is one. Only in
    16 bits the softmax's own backward is fused; in 32 bits eleven more passes fit the layers that Sailor measured.
    """
    heads, queries, keys, size = kernel.dims
    scores = _product(heads, queries, keys)
    products: tuple[tuple[str, Affine, Affine, Affine], ...] = (
        ("scores", queries, keys, size),
        ("context", queries, size, keys),
    )
    if backward:  # for each product the gradients of both of its factors
        products = (
            ("probabilities", queries, keys, size),
            ("values", keys, size, queries),
            ("queries", queries, size, keys),
            ("keys", keys, size, queries),
        )
    for name, m, n, k in products:
        sides = [_product(heads, *pair) for pair in ((m, k), (k, n), (m, n))]
        yield kernel.model_copy(
            update={
                "name": f"{kernel.name}.{name}",
                "kind": "matmul",
                "dims": (heads, m, n, k),
                "flops": _scaled(_product(heads, m, n, k), 2),
                "read": Amount(elements=Affine(*(sum(part) for part in zip(sides[0], sides[1], strict=True)))),
                "written": Amount(elements=sides[2]),
                "attention": True,
            }
        )
    slower = max(1.0, max(keys) / SOFTMAX_KEYS) ** SOFTMAX_SLOWDOWN
    passes = [("softmax", (2 if backward else 1) * slower, slower, 0), ("dropout", slower, slower, 1)]
    if backward and not fused_softmax:
        passes.append(("copies", 6, 5, 0))
    for name, read, written, mask in passes:
        yield kernel.model_copy(
            update={
                "name": f"{kernel.name}.{name}",
                "kind": "memory",
                "dims": (),
                "flops": Affine(0, 0),
                "read": Amount(elements=_scaled(scores, read), bytes=_scaled(scores, mask if backward else 0)),
                "written": Amount(elements=_scaled(scores, written), bytes=_scaled(scores, 0 if backward else mask)),
                "attention": True,
            }
        )


def _with_pointwise_fused(kernels: Iterable[Kernel]) -> Iterable[Kernel]:
    """The kernels with runs of pointwise ones as one kernel, which does not move what only they read and write."""
    run: list[Kernel] = []
    for kernel in kernels:
        if kernel.name in _POINTWISE and (not run or _alike(run[0], kernel)):
            run.append(kernel)
            continue
        yield from _fused(run)
        run = [kernel] if kernel.name in _POINTWISE else []
        if not run:
            yield kernel
    yield from _fused(run)


def _alike(one: Kernel, other: Kernel) -> bool:
    return (one.split, one.expert, one.attention, one.count) == (
        other.split,
        other.expert,
        other.attention,
        other.count,
    )


def _fused(run: Sequence[Kernel]) -> Iterable[Kernel]:
    """One kernel for a run: it reads all that they read and writes what the last writes, but for what one of them
    writes and another reads. Without the graph between them that is an estimate; it moves no less than the largest."""
    if len(run) < 2:
        yield from run
        return
    largest = max(run, key=lambda kernel: kernel.read.total(1, 2) + kernel.written.total(1, 2))
    inner = [kernel.written for kernel in run[:-1]]
    read = _sum([kernel.read for kernel in run], inner)
    if read.total(1, 2) + run[-1].written.total(1, 2) <= largest.read.total(1, 2) + largest.written.total(1, 2):
        yield largest
        return
    yield largest.model_copy(update={"name": "fused", "read": read, "written": run[-1].written})


def _sum(plus: Sequence[Amount], minus: Sequence[Amount]) -> Amount:
    """A sum of amounts, without others, at least nothing."""
    parts = []
    for part in ("elements", "bytes"):
        for place in (0, 1):
            total = sum(getattr(amount, part)[place] for amount in plus)
            parts.append(max(0.0, total - sum(getattr(amount, part)[place] for amount in minus)))
    return Amount(elements=Affine(parts[0], parts[1]), bytes=Affine(parts[2], parts[3]))


def num_scores(kernel: Kernel) -> Affine:
    """How many scores an attention has."""
    return _product(*kernel.dims[:3]) if len(kernel.dims) == 4 else Affine(0, 0)


def _product(*factors: Affine) -> Affine:
    """The product of sizes of which one at most depends on the rows."""
    fixed = [factor.fixed for factor in factors if not factor.per_row]
    varying = next((factor for factor in factors if factor.per_row), Affine(1, 0))
    return _scaled(varying, prod(fixed))


def _scaled(size: Affine, factor: float) -> Affine:
    return Affine(size.fixed * factor, size.per_row * factor)


def _collectives(communications: Iterable[Communication], rows: float, precision: Precision) -> tuple[Collective, ...]:
    return tuple(
        Collective(given.kind, given.group, given.size.total(rows, precision.element_bytes), given.count)
        for given in communications
    )


# --- measured times ---------------------------------------------------------------------------------------------------


def _nearest_times(kind: LayerKind, device: DeviceType, tensor_degree: int) -> MeasuredTimes | None:
    """Those of this type of device, at the degree or the one next to it."""
    known = [times for times in kind.measured if times.device_type == device.name]
    return min(known, key=lambda t: (abs(t.tensor_degree - tensor_degree), t.tensor_degree), default=None)


def _measured_seconds(
    times: MeasuredTimes, tensor_degree: int, rows: float, recompute: Recompute, adding: float
) -> LayerSeconds:
    """From measured times; at other degrees work is taken as divided. *adding* is the share of the micro-batches whose
    gradients are added to others."""
    share = times.tensor_degree / tensor_degree
    forward = _at(times, _never_falling(times.forward), rows) * share
    backward = _at(times, _never_falling(times.backward), rows) * share + (forward if recompute == "full" else 0.0)
    if times.accumulation:
        backward += _at(times, times.accumulation, rows) * share * adding
    return LayerSeconds(
        forward=forward,
        backward=backward,
        weights=backward / 2,
        update=_at(times, times.update, rows) * share,
        measured=True,
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
