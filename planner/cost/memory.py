"""Memory of a device: weights, gradients and optimizer states, and saved activations.

Amounts only; how many micro-batches a stage keeps at a time is the schedule's business. It knows no times and no
network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, NamedTuple

from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Device, DeviceType
from whale.ir.profile import CAST_OF_PARAMETER, Affine, Amount, Kernel, LayerKind, LayerVariant, RuleCosts, Saved
from whale.ir.strategy import Recompute
from whale.ir.units import bytes_text
from whale.planner.cost.kernels import CAST_BYTES, element_bytes, num_scores
from whale.planner.cost.layers import variant_of
from whale.planner.cost.precision import Precision
from whale.planner.cost.silicon import silicon_of

__all__ = [
    "FRAGMENTATION",
    "MESSAGES",
    "SUMMED_BYTES",
    "Largest",
    "StateBytes",
    "cast_bytes",
    "communicator_bytes",
    "framework_bytes",
    "gradient_bytes",
    "kept_bytes",
    "message_bytes",
    "refuse_tiny",
    "run_hosted",
    "run_kept_bytes",
    "run_state_bytes",
    "run_working_bytes",
    "sharded_bytes",
    "state_bytes",
    "under_rule",
    "wasted_share",
    "working_bytes",
]

Zero = Literal[0, 1, 2, 3]
"""ZeRO stages, by what data-parallel devices share: nothing, optimizer states, gradients too, weights too."""

FRAMEWORK_BYTES = 1.0e9
"""Bytes of a process on a device before any tensor: CUDA context and the workspaces of cuBLAS (typical; recalled)."""

COMMUNICATION_BYTES, COMMUNICATION_BYTES_PER_MULTIPROCESSOR = 2.3e9, 29e6
"""Additional bytes with communication: NCCL's channels, each a block on a multiprocessor with buffers for every peer
and protocol, for every group; at least the bytes without communication. From the peaks of Sailor's runs, which are
those of the device, rounded up: 2.0 GB on RTX-3090 (82 multiprocessors), 3.8 GB on GH200 (132). That of a step with
many groups is counted (`communicator_bytes`)."""

CHANNEL_BANDWIDTH, FEWEST_CHANNELS, MOST_CHANNELS = 12.5e9, 2, 32
"""Bytes per second for which NCCL makes a channel: 24 of them for the 300 GB/s of an A100 (NVIDIA/nccl issue 1225), 32
on H100 (issue 1685), where they end; two for PCIe 3 and for an adapter."""
PAIR_CHANNEL_BYTES, CHANNEL_BYTES = 544e6 / 24, 688e6 / 24
"""Bytes of a channel of a communicator of two ranks, and of more, once they have summed: a group of A100 takes 544 and
688 MB (NVIDIA/nccl issue 964). They grow with the channels and not with the ranks (issue 986)."""
MESSAGE_CHANNEL_BYTES = 14.6e6
"""Bytes of a channel to a rank that sends or receives messages: 3.28 GB for seven peers on H100 (issue 1685)."""

FRAGMENTATION = 0.15
"""Overhead of the caching allocator relative to live activations: free blocks that are too small. From Sailor's runs of
2 to 19 GB of activations, whose peaks grow by this fraction more than the activations do, rounded up."""

WHOLE_UNITS = 3
"""How many units of sharded weights are whole at a time, and as many of their gradients: one that runs, one that is
gathered or summed meanwhile, and one that is not yet free again (FSDP lets two gathers run ahead of the device)."""

SUMMED_BYTES = 4
"""Bytes per element of a gradient while it is reduced over devices that shard it: FSDP sums in float32."""

LOSS_TEMPORARIES = 4
"""Tensors of the size of the scores that the backward of PyTorch's loss over a divided vocabulary makes: zeros, the
exponentials, their sum, and that scaled (``torch.distributed.tensor.parallel.loss``)."""

MESSAGES = 4
"""Micro-batches whose messages a rank of a full pipeline has on their way at a time, as a rule: they are dropped a few
tasks after they were sent."""

FETCHED = 3
"""Tensors of the largest size that a backward has on the device if they are kept on the host: one that is read, and two
that arrive meanwhile (`whale.strategies.offloading`)."""

_CHEAP = frozenset({"rms_norm", "layer_norm", "silu", "gelu", "mul", "dropout"})
"""Operators that selective recomputation repeats if attention is fused: all that take little time for their size, as in
torchtitan's selective checkpointing; products and attentions are saved. (A fused gate recomputes its silu in any
case.)"""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that a device holds all through the step."""

    parameters: float
    gradients: float
    optimizer: float

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )

    @property
    def total(self) -> float:
        """Their sum."""
        return self.parameters + self.gradients + self.optimizer


def communicator_bytes(bandwidth: float, num_ranks: int, num_peers: int = 0) -> float:
    """Bytes that a communicator of NCCL takes on each of its ranks.

    Args:
        bandwidth: bytes per second of the slowest link among the ranks.
        num_ranks: more than one.
        num_peers: with how many of them the rank exchanges messages; 0: it has collectives.

    >>> [round(communicator_bytes(300e9, ranks) / 1e6) for ranks in (2, 8)]
    [544, 688]
    """
    channels = min(MOST_CHANNELS, max(FEWEST_CHANNELS, ceil(bandwidth / CHANNEL_BANDWIDTH)))
    if num_peers:
        return channels * num_peers * MESSAGE_CHANNEL_BYTES
    return channels * (PAIR_CHANNEL_BYTES if num_ranks == 2 else CHANNEL_BYTES)


def framework_bytes(device: DeviceType, num_devices: int, communicators: float = 0.0) -> float:
    """Bytes of a process on its device before any tensor, alone or with communication: an accelerator's driver and
    NCCL, whose *communicators* are counted if they are more than is usual. Processors have neither."""
    if device.is_processor:
        return 0.0
    if num_devices == 1:
        return FRAMEWORK_BYTES
    channels = COMMUNICATION_BYTES_PER_MULTIPROCESSOR * silicon_of(device).multiprocessors
    return FRAMEWORK_BYTES + max(COMMUNICATION_BYTES, channels, communicators)


def refuse_tiny(devices: Iterable[Device], num_devices: int) -> None:
    """Refuse devices whose memory the driver and the libraries fill alone: no division of a model helps there.

    Raises:
        InfeasibleError: names the first of them, its memory and what is taken.
    """
    for device in devices:
        taken = framework_bytes(device.type, num_devices)
        if taken > device.memory_bytes:
            raise InfeasibleError(
                f"{device.name} has {bytes_text(device.memory_bytes)}, but driver, libraries and communication alone "
                f"take {bytes_text(taken)}, before any layer; leave such devices out of the cluster, or use devices "
                "with more memory"
            )


def state_bytes(parameters: float, *, precision: Precision, zero: int = 0, shards: float = 1) -> StateBytes:
    """Bytes of Adam's states for a number of parameters of a device, which *shards* devices replicate and may divide.

    In mixed precision 2-byte weights, gradients (see `gradient_bytes`), and a 4-byte master weight with two moments; in
    full precision weight, gradient and two moments. ZeRO 1 divides the optimizer's states, 2 the gradients too, 3 the
    weights too.

    >>> from whale.planner.cost.precision import precision_named
    >>> [state_bytes(1e9, precision=precision_named("bf16"), zero=zero, shards=8).total / 1e9 for zero in (0, 1, 2, 3)]
    [18.0, 5.5, 3.75, 2.0]
    """
    size = precision.element_bytes
    optimizer = 12 if precision.mixed else 2 * size
    gradient = gradient_bytes(precision, zero)
    return StateBytes(
        parameters=parameters * size / (shards if zero >= 3 else 1),
        gradients=parameters * gradient / (shards if zero >= 2 else 1),
        optimizer=parameters * optimizer / (shards if zero >= 1 else 1),
    )


def sharded_bytes(blocks: Sequence[float], others: float, *, precision: Precision, zero: int, shards: int) -> float:
    """Bytes of weights and gradients that are whole at a time if *shards* devices divide them, by the parameters of
    each block
    and of all else: some blocks' weights (ZeRO 3), and some blocks' gradients in the float32 in which they are summed.
    What is outside of blocks is gathered for the whole step. At most what sharding saves.

    >>> from whale.planner.cost.precision import precision_named
    >>> sharded_bytes([1e9] * 80, 0.5e9, precision=precision_named("bf16"), zero=3, shards=64) / 1e9
    21.0
    """
    whole = min(sum(blocks), WHOLE_UNITS * max(blocks, default=0.0)) + others
    saved = (sum(blocks) + others) * (1 - 1 / shards) / (1 + FRAGMENTATION)
    gradients = min(whole * max(SUMMED_BYTES, precision.element_bytes), saved * gradient_bytes(precision, zero))
    weights = min(whole, saved) * precision.element_bytes
    return gradients + (weights if zero == 3 else 0.0)


def gradient_bytes(precision: Precision, zero: int) -> int:
    """Bytes per element of a gradient: without ZeRO, Megatron accumulates mixed-precision gradients in float32; with it
    gradients have the dtype of the weights, as in DeepSpeed and NVIDIA's recipes."""
    return 4 if precision.mixed and zero == 0 else precision.element_bytes


class Largest(NamedTuple):
    """The largest of some amounts that depend on the rows of a micro-batch.

    >>> Largest((Affine(4, 0), Affine(0, 3)))(2)
    6
    """

    amounts: tuple[Affine, ...]

    def __call__(self, rows: float) -> float:
        """Its value for a number of rows."""
        return max(amount(rows) for amount in self.amounts)


def kept_bytes(
    kind: LayerKind,
    *,
    tensor_degree: int = 1,
    precision: Precision,
    fused_attention: bool,
    eager: bool = False,
    recompute: Recompute = "none",
    sequence_parallel: bool = False,
) -> Affine:
    """Saved activations of one micro-batch in a layer, on one device of the tensor group, by its rows.

    Full recomputation keeps the input of a layer. Selective recomputation does without the core of the attention where
    that is spelt out, and without norms and pointwise results where it is fused. Expert parallelism leaves as much: a
    device's experts get the rows of all others.
    """
    if not kind.variants:
        return _bytes(kind.activations or Amount(), precision.element_bytes)
    variant = variant_of(kind, tensor_degree)
    saved: Iterable[Saved] = variant.saved
    if recompute == "full":
        saved = [value for value in saved if value.input] or [Saved(origin="input", size=kind.output)]
    elif recompute == "selective" and fused_attention:
        saved = [value for value in saved if value.origin not in _CHEAP]
        dropped = [value for value in saved if value.origin == "linear"][1::2] if eager else []
        saved = [value for value in saved if not any(value is one for one in dropped)]
    elif recompute == "selective":
        saved = [value for value in saved if not value.attention]
    elif fused_attention:
        saved = [value for value in saved if value.origin != "silu"]
    else:
        saved = [*saved, *_scores(variant, precision)]
    fixed = per_row = 0.0
    for value in saved:
        share = tensor_degree if sequence_parallel and not value.split else 1
        size = _bytes(value.size, element_bytes(value.origin, precision))
        fixed, per_row = fixed + size.fixed / share, per_row + size.per_row / share
    return Affine(fixed, per_row)


def working_bytes(
    kind: LayerKind,
    *,
    tensor_degree: int = 1,
    precision: Precision,
    fused_attention: bool,
    eager: bool = False,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> Largest:
    """Temporary bytes of a layer's backward beyond saved activations, by the rows of a micro-batch: recomputed
    activations, its largest gradients, and in float8 the copies of a product's operands. For a measured layer:
    gradients as large as its saved activations."""
    if not kind.variants:
        return Largest((_bytes(kind.activations or Amount(), precision.element_bytes),))

    def kept(how: Recompute, *, gathered: bool = False) -> Affine:
        return kept_bytes(
            kind,
            tensor_degree=tensor_degree,
            precision=precision,
            fused_attention=fused_attention,
            eager=eager,
            recompute=how,
            sequence_parallel=sequence_parallel and not gathered,
        )

    variant, some = variant_of(kind, tensor_degree), kept(recompute)
    if not variant.backward:
        return Largest((some,))
    # autograd keeps what a product reads, which sequence parallelism gathers for it
    whole = kept("none", gathered=eager and recompute == "full")
    again = Affine(whole.fixed - some.fixed, whole.per_row - some.per_row)
    wide = {value.size.elements for value in variant.saved if element_bytes(value.origin, precision) > 2}
    found = set()
    for kernel in variant.backward:
        if not _of_weights(kernel):
            of_loss = kernel.written.elements in wide
            num = LOSS_TEMPORARIES if of_loss and eager and tensor_degree > 1 else 2
            fixed, per_row = _bytes(kernel.written, max(element_bytes(kernel.name, precision), 4 if of_loss else 1))
            found.add(Affine(again.fixed + num * fixed, again.per_row + num * per_row))
        if "float8" in precision.products and kernel.kind == "matmul":
            fixed, per_row = _bytes(kernel.read, CAST_BYTES)
            found.add(Affine(again.fixed + fixed, again.per_row + per_row))
    return Largest(tuple(sorted(found or {again})))


def _bytes(amount: Amount, element_bytes: int) -> Affine:
    (fixed, per_row), others = amount.elements, amount.bytes
    return Affine(fixed * element_bytes + others.fixed, per_row * element_bytes + others.per_row)


def _of_weights(kernel: Kernel) -> bool:
    return not any(kernel.written.elements[1:]) and not any(kernel.written.bytes[1:])


def _scores(variant: LayerVariant, precision: Precision) -> list[Saved]:
    """Saved activations of unfused attention: in 16 bits the probabilities before and after dropout and its mask, as in
    Megatron; in 32 bits the probabilities, as in Sailor's profiles."""
    num, mask = (1, 0) if precision.element_bytes > 2 else (2, 1)
    found = []
    for kernel in variant.forward:
        if kernel.kind == "attention":
            fixed, per_row = num_scores(kernel)
            size = Amount(elements=Affine(num * fixed, num * per_row), bytes=Affine(mask * fixed, mask * per_row))
            found.append(Saved(origin="scores", size=size, split=kernel.split, attention=True))
    return found


# --- as Whale runs it -------------------------------------------------------------------------------------------------
# The amounts above are those of stacks like Megatron's. These are of PyTorch's own operators, autograd and optimizers,
# in the number type of the model: what `whale.predict.peak_memory` counts of a compiled step.


def wasted_share(device: DeviceType) -> float:
    """The part of the activations that an allocator reserves beyond them: that of CUDA does, for its blocks."""
    return 0.0 if device.is_processor else FRAGMENTATION


def run_state_bytes(
    parameters: float,
    *,
    frozen: float = 0.0,
    precision: Precision,
    states: float,
    zero: int = 0,
    shards: float = 1,
    on_host: bool = False,
) -> StateBytes:
    """Bytes of a number of parameters of a device, of which *shards* devices divide the part of *zero*, and of a number
    that are not trained. What they divide is no part of it if it is *on_host*. An optimizer has as many *states* of the
    size of a parameter.

    >>> from whale.planner.cost.precision import precision_named
    >>> half = precision_named("bf16")
    >>> [run_state_bytes(1e9, precision=half, states=states).total / 1e9 for states in (2, 0)]
    [8.0, 4.0]
    >>> [
    ...     run_state_bytes(1e9, precision=half, states=2, zero=zero, shards=4).total / 1e9
    ...     for zero in (0, 1, 2, 3)
    ... ]
    [8.0, 5.0, 3.5, 2.0]
    """
    size, own = precision.element_bytes, 0.0 if on_host else parameters / shards
    return StateBytes(
        parameters=((own if zero >= 3 else parameters) + frozen) * size,
        gradients=(own if zero >= 2 else parameters) * size,
        optimizer=(own if zero else parameters) * size * states,
    )


def run_kept_bytes(
    kind: LayerKind,
    *,
    tensor_degree: int = 1,
    expert_degree: int = 1,
    context_degree: int = 1,
    precision: Precision,
    recompute: Recompute = "none",
    rows: float = 0.0,
) -> Affine:
    """Saved activations of one micro-batch in a layer, by its rows: everything that autograd saves, or what a rule
    keeps of micro-batches like one of *rows* rows.

    Raises:
        UsageError: the profile does not say it.
    """
    if not kind.variants:
        if recompute == "selective":
            raise UsageError(
                f"the profile has no kernels of layer {kind.name!r}, so it does not say what recompute 'selective' "
                "keeps of it; use 'full', or --model"
            )
        kept = kind.output if recompute == "full" else kind.activations or Amount()
        return _bytes(kept, precision.element_bytes)
    variant = variant_of(kind, tensor_degree, expert_degree, context_degree)
    if (ruled := under_rule(variant, recompute, rows * precision.element_bytes)) is not None:
        return _bytes(ruled.kept, precision.element_bytes)
    sizes = [_bytes(value.size, precision.element_bytes) for value in variant.saved]
    return Affine(sum(size.fixed for size in sizes), sum(size.per_row for size in sizes))


def cast_bytes(kind: LayerKind, *, tensor_degree: int, expert_degree: int, precision: Precision) -> float:
    """Bytes of the casts of a layer's parameters among its saved activations, which all micro-batches share as Whale
    runs them."""
    if not kind.variants or not precision.autocast:
        return 0.0
    saved = variant_of(kind, tensor_degree, expert_degree).saved
    sizes = [_bytes(value.size, precision.element_bytes) for value in saved if value.origin == CAST_OF_PARAMETER]
    return sum(size.fixed for size in sizes)


def run_hosted(
    kind: LayerKind,
    kept: Affine,
    working: Largest,
    *,
    tensor_degree: int,
    expert_degree: int,
    context_degree: int,
    precision: Precision,
    recompute: Recompute,
) -> tuple[Affine, Largest, Affine]:
    """Bytes that a layer keeps on the device, works with there, and keeps on the host, of those that it keeps and works
    with otherwise: what depends on rows is there. Backwards have the tensor that is read, and some ahead of it."""
    moved = Affine(0.0, kept.per_row)
    ahead = Affine(0.0, FETCHED * kept.per_row)
    saved = variant_of(kind, tensor_degree, expert_degree, context_degree).saved if kind.variants else ()
    sizes = [_bytes(value.size, precision.element_bytes).per_row for value in saved]
    if kind.variants and (recompute != "full" or kept.per_row >= sum(sizes)):  # which leaves a head as it is
        ahead = Affine(0.0, min(FETCHED * max(sizes, default=0.0), kept.per_row))
    amounts = tuple(Affine(one.fixed + ahead.fixed, one.per_row + ahead.per_row) for one in working.amounts)
    return Affine(kept.fixed, 0.0), Largest(amounts), moved


def under_rule(variant: LayerVariant, recompute: Recompute, size: float) -> RuleCosts | None:
    """Memory of a layer under a rule that changes it, for micro-batches of a *size*: rows times the bytes of an
    element; None if it does not."""
    found = [one for one in variant.rules if one.rule == recompute]
    return max((one for one in found if one.least <= size), key=lambda one: one.least, default=None)


def message_bytes(entering: Any, leaving: Any, held: int) -> Any:
    """Bytes of micro-batches at the ends of a stage: with *held* in flight, the output of each of them until its
    backward, and the messages in flight. (Inputs are saved by their readers.)"""
    return max(0, MESSAGES - held) * entering + (held + MESSAGES - 1) * leaving


def run_working_bytes(
    kind: LayerKind,
    *,
    tensor_degree: int = 1,
    expert_degree: int = 1,
    context_degree: int = 1,
    precision: Precision,
    one_by_one: int = 0,
    recompute: Recompute = "none",
    rows: float = 0.0,
) -> Largest:
    """Temporary bytes of a layer while it runs, forward or backward, by its rows, including the gradient of a weight
    before it is accumulated, and what it computes again of micro-batches like one of *rows* rows; or those of the
    optimizer, if it needs *one_by_one* tensors of the size of a parameter.

    Profiles that do not say it have an estimate.
    """
    nothing = Affine(0.0, 0.0)
    if not kind.variants:
        again = _bytes(kind.activations or Amount(), precision.element_bytes)
        return Largest((nothing, again) if recompute == "full" else (nothing,))
    variant = variant_of(kind, tensor_degree, expert_degree, context_degree)
    size = precision.element_bytes
    ruled = under_rule(variant, recompute, rows * size)
    found = tuple(_bytes(amount, size) for amount in (variant.working if ruled is None else ruled.working))
    if not found:
        found = working_bytes(kind, tensor_degree=tensor_degree, precision=precision, fused_attention=True).amounts
    kept = run_kept_bytes(
        kind,
        tensor_degree=tensor_degree,
        expert_degree=expert_degree,
        context_degree=context_degree,
        precision=precision,
        recompute=recompute,
        rows=rows,
    )
    stepping = Affine(one_by_one * variant.largest * size - kept.fixed, -kept.per_row)  # what is kept is gone by then
    return Largest((nothing, *found, stepping))
