"""What a model costs: a chain of layers, each with the kernels it runs, what it keeps and what it communicates.

A profile is made once for a model, from its captured graph or by measuring, and knows no cluster and no plan: every
amount is per device of a *tensor degree*, as a function of the rows of a micro-batch. Equal layers share a *kind* and
are costed once. Amounts of numbers are in elements where the number type follows the run (``--precision``), and in
bytes where it does not. The planner prices kernels on devices; this file knows no prices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Affine",
    "Amount",
    "Communication",
    "Kernel",
    "LayerKind",
    "LayerVariant",
    "LinkCurve",
    "MeasuredTimes",
    "ModelProfile",
    "Saved",
]

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Affine(NamedTuple):
    """A number that depends on the rows of a micro-batch: ``fixed + per_row * rows``.

    >>> Affine(2, 3)(4)
    14
    """

    fixed: float
    per_row: float

    def __call__(self, rows: float) -> float:
        """Its value for so many rows; fractions of a row are meant (context parallelism cuts a row)."""
        return self.fixed + self.per_row * rows


class Amount(_Record):
    """Memory or traffic: ``elements`` of the run's number type, and ``bytes`` of others (masks, indices, statistics
    kept in float32)."""

    elements: Affine = Affine(0, 0)
    bytes: Affine = Affine(0, 0)

    def total(self, rows: float, element_bytes: float) -> float:
        """Bytes for so many rows, when an element takes ``element_bytes``."""
        return self.elements(rows) * element_bytes + self.bytes(rows)


class Kernel(_Record):
    """One operator as one device runs it, with local sizes; ``count`` of them.

    Attributes:
        name: the operator, such as ``aten.addmm``.
        kind: what bounds it. ``matmul`` has ``dims`` (batch, m, n, k): ``batch`` products of (m, k) by (k, n), of which
            ``grouped_matmul`` shares all m rows among the batch (experts). ``attention`` is a fused attention with
            dims (batch x heads, queries, keys, head size). ``memory`` is all that only moves data.
        flops: multiplications and additions, a multiply-add counted as two.
        read, written: what it reads and writes, parameters included.
        split: whether the tensor degree divides this work. What is not split runs alike on each device of the tensor
            group, and sequence parallelism divides it.
        expert: whether it belongs to the experts of a mixture, which expert parallelism divides.
        causal: of an attention: only half of the scores count.
        attention: whether it belongs to the core of an attention (scores to context) spelt out in operators, which
            selective recomputation repeats and a fused kernel would replace.
    """

    name: str
    kind: Literal["matmul", "grouped_matmul", "attention", "convolution", "memory"]
    dims: tuple[Affine, ...] = ()
    flops: Affine = Affine(0, 0)
    read: Amount = Amount()
    written: Amount = Amount()
    count: Annotated[int, Field(ge=1)] = 1
    split: bool = False
    expert: bool = False
    causal: bool = False
    attention: bool = False


class Communication(_Record):
    """A collective inside a layer, as the strategies declare it, over the ``tensor``, ``expert`` or ``context`` group.

    ``size`` is the whole tensor: what an all-reduce reduces, an all-gather returns, a reduce-scatter reads, an
    all-to-all exchanges on one device.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    group: Literal["tensor", "expert", "context"] = "tensor"
    size: Amount
    count: Annotated[int, Field(ge=1)] = 1


class Saved(_Record):
    """What autograd keeps from the forward for the backward, of one origin.

    ``split`` as in `Kernel`: kept in parts by the tensor group, else whole by each device. ``attention`` marks the
    core of an attention: what selective recomputation, or a fused kernel, does not keep. ``input`` marks the layer's
    input, the one value that full recomputation keeps.
    """

    origin: str
    size: Amount
    split: bool = False
    expert: bool = False
    attention: bool = False
    input: bool = False


class LayerVariant(_Record):
    """A kind of layer at one tensor degree, on one device of the tensor group.

    Attributes:
        tensor_degree: devices over which its matrices are split.
        forward, backward: kernels in the order in which they run.
        forward_communications, backward_communications: in their order.
        saved: what is kept of each micro-batch between forward and backward.
        parameters: elements of trainable parameters on a device; ``expert_parameters`` are those of experts among
            them, whole (no expert parallelism).
        buffers: elements that are kept and not trained.
    """

    tensor_degree: Annotated[int, Field(ge=1)]
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    forward_communications: tuple[Communication, ...] = ()
    backward_communications: tuple[Communication, ...] = ()
    saved: tuple[Saved, ...] = ()
    parameters: NonNegative = 0
    expert_parameters: NonNegative = 0
    buffers: NonNegative = 0


class MeasuredTimes(_Record):
    """Seconds of one kind of layer on one device type, measured with the communication of its tensor group or without.

    ``rows`` ascend; ``forward``, ``backward`` and ``update`` (the optimizer's step) have one entry for each.
    """

    device_type: str
    tensor_degree: Annotated[int, Field(ge=1)]
    rows: tuple[Annotated[int, Field(ge=1)], ...]
    forward: tuple[NonNegative, ...]
    backward: tuple[NonNegative, ...]
    update: tuple[NonNegative, ...]
    includes_communication: bool = False


class LayerKind(_Record):
    """Layers that are equal but for their values.

    Attributes:
        name: the path of the first of them, such as ``transformer.h.0``.
        variants: by ascending tensor degree; degree 1 is always there, unless all that is known was measured.
        measured: times on device types; where there are any for a device they are used instead of prices of kernels.
        output: what the layer hands to the next one, whole.
        parameters, activations: elements of all its parameters and bytes that it keeps for each row, where only totals
            are known (an imported profile without variants).
    """

    name: str
    variants: tuple[LayerVariant, ...] = ()
    measured: tuple[MeasuredTimes, ...] = ()
    output: Amount = Amount()
    parameters: NonNegative | None = None
    activations: Amount | None = None


class LinkCurve(_Record):
    """Measured bandwidth between devices, by message size.

    ``operation`` is what was timed: a send, or a collective of ``ranks`` ranks (whose ``sizes`` are those of
    `Communication`). ``source`` and ``target`` are device types; ``devices`` is how many of a node take part;
    ``within`` a node or between nodes. ``coefficients`` are of a polynomial in log10(bytes) for GB/s, highest first;
    ``maximum`` is the largest value measured, in bytes per second; or ``sizes`` (bytes) and ``bandwidths`` (bytes per
    second) are the points.
    """

    operation: Literal["send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"] = "send"
    ranks: Annotated[int, Field(ge=2)] = 2
    source: str
    target: str
    devices: Annotated[int, Field(ge=1)]
    within: Literal["node", "nodes"]
    coefficients: tuple[float, ...] = ()
    maximum: NonNegative = 0
    sizes: tuple[NonNegative, ...] = ()
    bandwidths: tuple[NonNegative, ...] = ()


class ModelProfile(_Record):
    """A model as a chain of costed layers.

    Attributes:
        format_version: of the file.
        name: of the model.
        model_hash: of the captured graph (empty for imported profiles); a plan made from this profile names it.
        layers: for each layer of the chain, in order, the position of its kind in ``kinds``.
        paths: for each layer its module path (empty where it has none): what a plan's cuts refer to.
        kinds: the different layers.
        precision: the number type in which ``measured`` times were taken and the model was captured.
        row_tokens: tokens in a row of the batch (1 where a row is a sample).
        device_types: figures of device types that the profile brings along, by name: memory in bytes, devices in a
            node; a cluster file may use them.
        links: measured curves, for imported profiles.
        tied: groups of layers (positions) that share a parameter, with its elements.
    """

    format_version: Literal[1] = 1
    name: str
    model_hash: str = ""
    layers: tuple[Count, ...]
    paths: tuple[str, ...] = ()
    kinds: tuple[LayerKind, ...]
    precision: str = "float32"
    row_tokens: Annotated[int, Field(ge=1)] = 1
    device_types: dict[str, dict[str, float]] = {}
    links: tuple[LinkCurve, ...] = ()
    tied: tuple[tuple[tuple[Count, ...], NonNegative], ...] = ()

    def chain(self) -> Iterator[LayerKind]:
        """The kind of every layer, in order."""
        for position in self.layers:
            yield self.kinds[position]
