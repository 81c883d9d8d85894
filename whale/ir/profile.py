"""Profile of a model: a chain of layers, each with its kernels, saved activations and collectives.

A profile is made once for a model, from its captured graph or by measuring, and knows no cluster and no plan: every
amount is per device of a *tensor degree*, as a function of the rows of a micro-batch. Equal layers share a *kind* and
are costed once. Amounts are in elements where the dtype follows the run (``--precision``), and in bytes otherwise. The
planner prices kernels on devices; this module knows no prices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from whale.ir.cluster import DTYPES
from whale.ir.json_text import format_json
from whale.ir.record import FileRecord, Record
from whale.ir.strategy import Experts, Recompute

__all__ = [
    "CAST_OF_PARAMETER",
    "Affine",
    "Amount",
    "Communication",
    "DEVICE_FIGURES",
    "HeldShare",
    "Kernel",
    "LayerKind",
    "LayerVariant",
    "LinkCurve",
    "MeasuredRate",
    "MeasuredTimes",
    "ModelProfile",
    "RuleCosts",
    "Saved",
    "Skip",
    "SparseParameter",
]

MOST = 1e24
"""Limit on all figures, far beyond those of any model, so that no sum of them overflows."""

NonNegative = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**40)]
Positive = Annotated[int, Field(ge=1, le=2**40)]


DEVICE_FIGURES = ("memory_bytes", "devices_per_node", "memory_bandwidth", "cores", *DTYPES)
"""Figures of a device type in a profile; a dtype means FLOP/s."""


class Affine(NamedTuple):
    """A number that depends on the rows of a micro-batch: ``fixed + per_row * rows``.

    >>> Affine(2, 3)(4)
    14
    """

    fixed: Finite
    per_row: Finite

    def __call__(self, rows: float) -> float:
        """Its value for a number of rows, which may be a fraction (context parallelism divides a row)."""
        return self.fixed + self.per_row * rows


class Amount(Record):
    """Memory or traffic: ``elements`` of the run's dtype, and ``bytes`` of others (masks, indices, statistics in
    float32)."""

    elements: Affine = Affine(0, 0)
    bytes: Affine = Affine(0, 0)

    def total(self, rows: float, element_bytes: float) -> float:
        """Bytes for a number of rows, with ``element_bytes`` per element."""
        return self.elements(rows) * element_bytes + self.bytes(rows)


def _sized(amount: Amount) -> Amount:
    """Refuse what is negative at one row and more; fits of nothing are a little less."""
    for name, part in (("elements", amount.elements), ("bytes", amount.bytes)):
        if part.per_row <= 0 and part(1) <= -1:
            raise ValueError(f"{name} [{part.fixed:g}, {part.per_row:g}] is negative at every number of rows")
    return amount


Size = Annotated[Amount, AfterValidator(_sized)]


class Kernel(Record):
    """One operator as one device runs it, with local sizes; ``count`` of them.

    Attributes:
        name: the operator, such as ``aten.addmm``.
        kind: ``matmul`` has ``dims`` (batch, m, n, k): ``batch`` products of (m, k) by (k, n), of which
            ``grouped_matmul`` shares all m rows among the batch (experts). ``attention`` is a fused attention with dims
            (batch x heads, queries, keys, head size). ``memory`` only moves data.
        flops: multiplications and additions, a multiply-add counted as two.
        read, written: memory traffic, including parameters.
        split: whether the tensor degree divides this work. Other work is replicated on each device of the tensor group,
            and sequence parallelism divides it.
        expert: whether it belongs to the experts of a mixture, which expert parallelism divides.
        causal: of an attention: only half of the scores count.
        attention: whether it belongs to the core of an unfused attention (scores to context), which selective
            recomputation repeats and a fused kernel would replace.
        again: the mildest rule under which Whale's backward runs it again; ``always`` in a checkpoint of torch.
        looks_up: whether it looks vectors up in a table with sparse gradients, or sums them, which is done where the
            table is; the ``last`` of these writes what the device needs of it.
    """

    name: str
    kind: Literal["matmul", "grouped_matmul", "attention", "convolution", "memory"]
    dims: tuple[Affine, ...] = ()
    flops: Affine = Affine(0, 0)
    read: Size = Amount()
    written: Size = Amount()
    count: Positive = 1
    split: bool = False
    expert: bool = False
    causal: bool = False
    attention: bool = False
    again: Literal["never", "always", "selective", "full"] = "never"
    looks_up: Literal["no", "first", "last"] = "no"


class HeldShare(Record):
    """The part of a value between layers that a device of a group has at an end of its stage, of its rows if
    ``expert_degree`` divides them: ``many`` with micro-batches of ``since`` rows and more, ``few`` with fewer."""

    many: Annotated[float, Field(gt=0, le=1)] = 1.0
    few: Annotated[float, Field(gt=0, le=1)] = 1.0
    since: Count = 0

    def at(self, rows: float) -> float:
        """The part with micro-batches of up to *rows* rows for each replica."""
        return self.many if rows >= self.since else self.few


class Communication(Record):
    """A collective inside a layer, as the strategies declare it, over the ``tensor``, ``expert`` or ``context`` group,
    or over the ``replica`` group, which holds the same parameters and divides the rows of a micro-batch.

    ``size`` is the whole tensor: the input of an all-reduce or reduce-scatter, the result of an all-gather, the
    exchanged tensor of an all-to-all on one device. ``beside`` says that it moves while an attention computes.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    group: Literal["tensor", "expert", "context", "replica"] = "tensor"
    size: Size
    count: Positive = 1
    beside: bool = False


CAST_OF_PARAMETER = "cast of a parameter"
"""The origin of saved casts of parameters to the precision of autocast, which all micro-batches share."""


class Saved(Record):
    """Saved activations: tensors that autograd saves in the forward for the backward, from one operator.

    ``split`` as in `Kernel`: sharded by the tensor group, else whole on each device. ``attention`` marks the
    core of an attention, which selective recomputation or a fused kernel does not save. ``input`` marks the layer's
    input, the only value that full recomputation saves.
    """

    origin: str
    size: Size
    split: bool = False
    expert: bool = False
    attention: bool = False
    input: bool = False


class RuleCosts(Record):
    """Memory of a layer whose backward computes values again, as Whale runs it.

    A tensor group places a layer in other ways where a micro-batch is large, because messages then cost more than their
    start-up; each way has its own costs.

    Attributes:
        rule: that says what is kept; ``none`` where the model has checkpoints of torch.
        kept: activations of each micro-batch between forward and backward.
        working: temporary memory besides, as in `LayerVariant`.
        least: size of a micro-batch from which this holds: its rows times the bytes of an element.
        multiple: devices that divide the rows of a micro-batch, of which the fullest counts; 1: they all have all.
    """

    rule: Recompute
    kept: Amount
    working: tuple[Amount, ...] = ()
    least: int = 0
    multiple: Positive = 1


class SparseParameter(Record):
    """An embedding table with sparse gradients on one device: elements and rows of its part, and elements of the rows
    that a micro-batch looks up, each as often as it does. An optimizer updates these, and keeps a number for each row
    (`whale.optim.RowWiseAdagrad`)."""

    elements: NonNegative
    rows: NonNegative
    touched: Affine

    def updated(self, rows: float) -> float:
        """Elements that an update changes after a micro-batch of *rows* rows."""
        return min(self.elements, self.touched(rows))


class LayerVariant(Record):
    """A kind of layer at one tensor degree, on one device of the tensor group.

    Attributes:
        tensor_degree: devices over which its matrices are split.
        expert_degree: devices over which only its experts are split, while each runs all else on its own rows of a
            micro-batch: those of which amounts are a function then.
        experts: how these devices share them: ``whole`` experts, or each ``cut``; None where there is one way.
        context_degree: devices over which each row is cut along a dim, such as the length of a sequence.
        forward, backward: kernels in execution order; none if only totals were measured.
        forward_communications, backward_communications: in their order.
        saved: activations of each micro-batch between forward and backward.
        working: temporary memory while it runs, forward or backward: the largest of these at a number of rows; none if
            unknown.
        parameters: elements of trainable parameters on a device; ``expert_parameters`` are those of experts among
            them, whole where ``expert_degree`` is 1.
        buffers: elements that are not trained.
        largest: elements of the largest of the parameters.
        summed: elements of parameters that all devices of a tensor group have, whose gradients they sum: those of norms
            that each computes of some rows.
        factored: elements of sums of rows and of columns of each matrix among them, and of other parameters, which
            optimizers keep that factor their states; 0: unknown.
        received: the part of the layer's input where a stage begins with it.
        sent: the part of the layer's output where a stage ends with it, of whose gradient no more is needed.
        sizes: elements of each trainable parameter, in the order of the forward; none if unknown.
        sparse: those of ``parameters`` with sparse gradients.
        rules: memory under each rule that changes it; under others it is that of ``saved`` and ``working``.
    """

    tensor_degree: Positive
    expert_degree: Positive = 1
    experts: Experts | None = None
    context_degree: Positive = 1
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    forward_communications: tuple[Communication, ...] = ()
    backward_communications: tuple[Communication, ...] = ()
    saved: tuple[Saved, ...] = ()
    working: tuple[Amount, ...] = ()
    parameters: NonNegative = 0
    expert_parameters: NonNegative = 0
    buffers: NonNegative = 0
    largest: NonNegative = 0
    summed: NonNegative = 0
    factored: NonNegative = 0
    received: HeldShare = HeldShare()
    sent: HeldShare = HeldShare()
    sizes: tuple[NonNegative, ...] = ()
    sparse: tuple[SparseParameter, ...] = ()
    rules: tuple[RuleCosts, ...] = ()


class MeasuredTimes(Record):
    """Seconds of one kind of layer on one device type, measured with the communication of its tensor group or without.

    ``rows`` ascend; ``forward``, ``backward`` and ``update`` (the optimizer's step) have one entry for each.
    ``accumulation`` is the extra time of a later micro-batch's backward, which adds to existing gradients, compared
    with the first of a step, which
    ``backward`` is. ``spread`` is the interquartile range of a step relative to its median, if known.
    """

    device_type: str
    tensor_degree: Positive
    rows: tuple[Positive, ...]
    forward: tuple[NonNegative, ...]
    backward: tuple[NonNegative, ...]
    update: tuple[NonNegative, ...]
    accumulation: tuple[NonNegative, ...] = ()
    spread: tuple[NonNegative, ...] = ()
    includes_communication: bool = False

    @model_validator(mode="after")
    def _has_an_entry_for_each(self) -> Self:
        _check_ascending("rows", self.rows)
        for name in ("forward", "backward", "update", "accumulation", "spread"):
            optional = name in ("accumulation", "spread")
            _check_length(name, getattr(self, name), "rows", self.rows, may_be_empty=optional)
        return self


class MeasuredRate(Record):
    """A measured rate of a device type.

    ``matmul`` is a product of two matrices of ``dims`` (m, n, k), in FLOP/s; ``memory`` is a copy of ``dims`` (bytes,)
    from memory to memory, in bytes per second, read and written. ``spread`` as in `MeasuredTimes`.
    """

    device_type: str
    kind: Literal["matmul", "memory"]
    dtype: str
    dims: tuple[Positive, ...]
    rate: Annotated[float, Field(ge=1e-6, le=MOST, allow_inf_nan=False)]
    spread: NonNegative = 0


class LayerKind(Record):
    """A kind of layer: layers that are equal except for their values.

    Attributes:
        name: the path of the first of them, such as ``transformer.h.0``.
        variants: by ascending tensor degree; degree 1 is always there, unless all that is known was measured.
        expert_variants: by ascending expert degree; none of layers without experts.
        context_variants: by ascending context degree, those of some tensor degrees; none where no dim is cut.
        measured: times on device types; they replace kernel costs for devices that have them.
        output: the layer's output, whole.
        parameters, activations: elements of all its parameters and saved bytes per row, if only totals are known (an
            imported profile without variants).
    """

    name: str
    variants: tuple[LayerVariant, ...] = ()
    expert_variants: tuple[LayerVariant, ...] = ()
    context_variants: tuple[LayerVariant, ...] = ()
    measured: tuple[MeasuredTimes, ...] = ()
    output: Size = Amount()
    parameters: NonNegative | None = None
    activations: Amount | None = None


class Interference(Record):
    """Interference of a gradient reduction (an all-reduce of a bucket) with concurrent work of its ranks.

    ``bytes`` is the size of the bucket (0: unknown). ``slowdowns`` are, for each of the device ``types``, the slowdown
    of computation (1: twice as long), including copies into and out of the bucket; ``waiting`` is the extra seconds of
    a small all-reduce of the same ranks, which uses the same queues; ``stretch`` is the slowdown of the reduction
    itself while its ranks compute.
    """

    types: tuple[str, ...]
    slowdowns: tuple[NonNegative, ...]
    bytes: NonNegative = 0
    waiting: NonNegative = 0.0
    stretch: NonNegative = 0.0

    @model_validator(mode="after")
    def _has_an_entry_for_each(self) -> Self:
        _check_length("slowdowns", self.slowdowns, "types", self.types)
        return self


class LinkCurve(Record):
    """Measured bandwidth between devices, by message size.

    ``operation`` is the timed operation: a send, or a collective of ``ranks`` ranks (whose ``sizes`` are those of
    `Communication`). ``source`` and ``target`` are device types, of a group the first and the last by name, and
    ``types`` are those of all its ranks, sorted, if they differ; ``devices`` is the number of participating devices of
    a node (``target_devices`` of the target's node, if different); ``within`` a node or between nodes. ``coefficients``
    are of a polynomial in log10(bytes) for GB/s, highest first; ``maximum`` is the largest measured value, in bytes per
    second; or ``sizes`` (bytes) and ``bandwidths`` (bytes per second) are the points: the bandwidth of a size is the
    size divided by the total seconds. ``beside`` is the interference of an all-reduce with other work of its ranks, if
    measured.
    """

    operation: Literal["send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"] = "send"
    ranks: Annotated[int, Field(ge=2)] = 2
    source: str
    target: str
    types: tuple[str, ...] = ()
    devices: Positive
    target_devices: Positive | None = None
    within: Literal["node", "nodes"]
    coefficients: tuple[float, ...] = ()
    maximum: NonNegative = 0
    sizes: tuple[NonNegative, ...] = ()
    bandwidths: tuple[NonNegative, ...] = ()
    beside: Interference | None = None

    @model_validator(mode="after")
    def _has_an_entry_for_each(self) -> Self:
        _check_ascending("sizes", self.sizes)
        _check_length("bandwidths", self.bandwidths, "sizes", self.sizes)
        if not self.sizes and not self.coefficients:
            raise ValueError("give sizes and bandwidths, or coefficients")
        return self


class Skip(Record):
    """A value that other layers read than the one after the layer that makes it, such as what an encoder hands to all
    layers of a decoder. A stage sends it to each later stage that has a reader; ``output`` of every kind has it too.

    Attributes:
        layer: that makes it, by position.
        readers: layers that read it, ascending.
        size: of it.
    """

    layer: Count
    readers: Annotated[tuple[Count, ...], Field(min_length=1)]
    size: Size


class ModelProfile(FileRecord):
    """A model as a chain of costed layers; and, where they were measured, the machines. Without layers, only these.

    Attributes:
        format_version: of the file.
        name: of the model.
        model_hash: of the captured graph (empty for imported profiles); a plan made from this profile names it.
        layers: for each layer of the chain, in order, the position of its kind in ``kinds``.
        paths: for each layer its module path (empty where it has none): what a plan's cuts refer to.
        experts: for each layer the module paths of its experts, which may be split by themselves.
        kinds: the distinct layers.
        precision: the dtype in which ``measured`` times were taken and the model was captured.
        row_tokens: tokens in a row of the batch (1 where a row is a sample).
        row_bytes: of a row of the batch, which every device holds whole as Whale runs it.
        device_types: figures of device types that the profile brings along, by name: ``memory_bytes``,
            ``devices_per_node``, ``memory_bandwidth`` (bytes per second), FLOP/s by number type (``float32``), and of
            processors ``cores`` (those that a process had while it computed: 0.25 under a quota of a quarter);
            a cluster file may use types whose figures are known (`whale.planner.catalog.device_types_with`).
        links: measured curves.
        rates: measured rates of devices.
        tied: groups of layers (positions) that share a parameter, with its elements.
        skips: values that pass over layers.
        refused: tensor degrees over which the model cannot be split, with the reason; no kind has a variant for them.
        rules: what a backward may compute again, of which kinds of layers have the costs.
        autocast: the precision of ``torch.autocast`` under which the model was captured; empty: none. Elements are then
            those in the dtype of its parameters.
        cut_dim: the dim of the batch that context degrees cut, such as 1 of (rows, length); 0: none.
        uncut: context degrees at which the model cannot be cut so, with the reason.
        since: for each layer the position of the first one that it depends on, its own if it is computed of the batch
            alone; empty: 0 for all. A stage computes those that depend on none of the stages before while
            what they send is on its way.
        coupled: the operator that computes a row of the batch from others, as a batch norm does, so that Whale cuts no
            batch into micro-batches; empty: none.
    """

    format_version: Literal[1] = 1
    name: str
    model_hash: str = ""
    layers: tuple[Count, ...]
    paths: tuple[str, ...] = ()
    experts: tuple[tuple[str, ...], ...] = ()
    kinds: tuple[LayerKind, ...]
    precision: str = "float32"
    row_tokens: Positive = 1
    row_bytes: NonNegative = 0
    device_types: dict[str, dict[str, float]] = Field(default_factory=dict)
    links: tuple[LinkCurve, ...] = ()
    rates: tuple[MeasuredRate, ...] = ()
    tied: tuple[tuple[tuple[Count, ...], NonNegative], ...] = ()
    skips: tuple[Skip, ...] = ()
    refused: tuple[tuple[Count, str], ...] = ()
    rules: tuple[Recompute, ...] = ("none",)
    autocast: Literal["", "bf16", "fp16"] = ""
    cut_dim: Count = 0
    uncut: tuple[tuple[Count, str], ...] = ()
    coupled: str = ""
    since: tuple[Count, ...] = ()

    @property
    def has_tables(self) -> bool:
        """Whether some parameters have sparse gradients."""
        return any(variant.sparse for kind in self.kinds for variant in kind.variants[:1])

    def chain(self) -> Iterator[LayerKind]:
        """The kind of every layer, in order."""
        for position in self.layers:
            yield self.kinds[position]

    def own_layers(self, first: int, last: int) -> list[int]:
        """Layers of a stage [first, last) that depend on no earlier one, of a stage that is not the first."""
        return [layer for layer in range(first, last) if self.since[layer] >= first] if first and self.since else []

    @model_validator(mode="after")
    def _refers_to_what_there_is(self) -> Self:
        for name, positions, count, what in (
            ("layers", self.layers, len(self.kinds), "kinds"),
            ("tied", [layer for group, _ in self.tied for layer in group], len(self.layers), "layers"),
            (
                "skips",
                [layer for skip in self.skips for layer in (skip.layer, *skip.readers)],
                len(self.layers),
                "layers",
            ),
        ):
            if max(positions, default=-1) >= count:
                raise ValueError(f"{name} refers to position {max(positions)}, but there are only {count} {what}")
        _check_length("paths", self.paths, "layers", self.layers, may_be_empty=True)
        _check_length("experts", self.experts, "layers", self.layers, may_be_empty=True)
        _check_length("since", self.since, "layers", self.layers, may_be_empty=True)
        for layer, since in enumerate(self.since):
            if since > layer:
                raise ValueError(f"since has {since} for layer {layer}, which can only depend on those up to itself")
        for name, figures in self.device_types.items():
            for figure, value in figures.items():
                if figure not in DEVICE_FIGURES or value <= 0:
                    raise ValueError(
                        f"device type {name!r} has {figure!r} = {value:g}; give positive numbers for "
                        f"{', '.join(DEVICE_FIGURES)}"
                    )
        return self

    def dumps(self) -> str:
        """The profile as JSON, deterministic and without default values."""
        return format_json({"format_version": 1, **self.model_dump(mode="json", exclude_defaults=True)})


def _check_ascending(name: str, values: tuple[float, ...]) -> None:
    if any(one >= other for one, other in pairwise(values)):
        raise ValueError(f"{name} must ascend, without repetition")


def _check_length(
    name: str, values: tuple[Any, ...], other: str, others: tuple[Any, ...], *, may_be_empty: bool = False
) -> None:
    if len(values) != len(others) and not (may_be_empty and not values):
        raise ValueError(f"{name} has {len(values)} entries and {other} has {len(others)}; give one for each")
