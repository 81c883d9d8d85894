"""How long kernels take on a device: a roofline whose efficiency depends on sizes.

A matrix product is cut into tiles that the multiprocessors take in waves; a kernel that only moves data runs at the
memory bandwidth that is left in practice. Kernels are first brought into the form in which a stack runs them
(attentions fused or spelt out, pointwise operators with their neighbours), and then priced together, for several
numbers of rows at once: arrays [kernel, number of rows]. This file knows no layers, no launches and no network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from whale.ir.cluster import DeviceType
from whale.ir.profile import Affine, Amount, Kernel
from whale.planner.cost.precision import Precision
from whale.planner.cost.silicon import Silicon

__all__ = ["Array", "KernelsAsRun", "as_run", "element_bytes", "matmul_seconds", "num_scores"]

Array = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Places = np.ndarray[Any, np.dtype[np.int64]]

KERNEL_SECONDS = 3e-6
"""Least time of a kernel on the device, including start and end of its grid (typical of CUDA; recalled)."""

CAST_BYTES = 2
"""Bytes that casts to float8 move for each element that a product reads: 2 read and 1 written, and 1 for the transpose,
of each of input, weight and gradient once for the two products that read it."""

CONVOLUTION_SHARE = 0.6
"""Rate of convolutions on tensor cores relative to matrix products (assumed; ResNet-50 then takes about what NVIDIA
reports for V100 and A100)."""

CACHE_SPEEDUP = 3.0
"""How much faster the last-level cache is than the memory (A100: about 5 TB/s against 1.6; recalled). A kernel that
moves more than the cache holds evicts what it has yet to read: of one that moves twice as much, nothing is a hit."""

SOFTMAX_KEYS, SOFTMAX_SLOWDOWN = 1024, 0.6
"""A warp of Megatron's fused softmax has a whole row of scores in registers. Above this number of keys it runs out of
registers, and gets slower by this power of the keys. Calibrated on the A100 and V100 rows of published_calibration.csv
with 1,024 and 2,048 keys."""

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

_CUTS, _LEAST_CUT = (1, 2, 4, 8), 256
"""Into how many pieces the inner dimension may be cut where there are fewer tiles than multiprocessors, and the
shortest of them."""

_TILE_START_K = 112
"""Cost of a tile's start and end, in steps of its inner dimension."""

_VECTOR = ("float32", "float64")
"""Number types without matrix units."""

_LEAST_SIZE = 1e-9
"""Size used for an empty dimension."""


def element_bytes(operator: str, precision: Precision) -> int:
    """Bytes of what an operator reads, keeps and writes: the loss over a vocabulary is computed in float32.

    >>> from whale.planner.cost.precision import precision_named
    >>> [element_bytes(name, precision_named("bf16")) for name in ("aten.mm", "aten._log_softmax")]
    [2, 4]
    """
    return max(4 if operator in _OF_LOSS else 1, precision.element_bytes)


# --- seconds ----------------------------------------------------------------------------------------------------------


class _Sizes:
    """Numbers that depend on the rows of a micro-batch: one for each kernel, for several numbers of rows at once."""

    def __init__(self, values: Sequence[Affine]) -> None:
        self.fixed, self.per_row = np.array(values, dtype=float).reshape(-1, 2).T[:, :, None]

    def __call__(self, rows: Array) -> Array:
        found: Array = self.fixed + self.per_row * rows
        return found


class _Amounts:
    """The same of bytes: elements of the run's number type, and others."""

    def __init__(self, values: Sequence[Amount]) -> None:
        self.elements = _Sizes([value.elements for value in values])
        self.bytes = _Sizes([value.bytes for value in values])

    def __call__(self, rows: Array, element_bytes: Array) -> Array:
        return self.elements(rows) * element_bytes + self.bytes(rows)

    def fixed(self, element_bytes: Array) -> Array:
        """The part that does not depend on rows: weights."""
        found: Array = self.elements.fixed * element_bytes + self.bytes.fixed
        return found


class KernelsAsRun:
    """Kernels in the form in which they run, as arrays with a line for each.

    Attributes:
        num: how many there are of each.
        of_weights: positions of the products that make a weight's gradient: their inner dimension is the rows.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        products = [kernel for kernel in kernels if _is_product(kernel)]
        attentions = [kernel for kernel in kernels if kernel.kind == "attention"]
        kinds = ["product" if _is_product(kernel) else kernel.kind for kernel in kernels]
        self.num = np.array([kernel.count for kernel in kernels], dtype=float).reshape(-1, 1)
        self.of_weights = _places(_is_product(kernel) and kernel.dims[3].per_row > 0 for kernel in kernels)
        self._read = _Amounts([kernel.read for kernel in kernels])
        self._written = _Amounts([kernel.written for kernel in kernels])
        self._flops = _Sizes([kernel.flops for kernel in kernels])
        self._least_bytes = np.where(_flags(kernel.name in _OF_LOSS for kernel in kernels), 4, 1)
        self._is_norm = _flags("batch_norm" in kernel.name for kernel in kernels)
        self._is_whole = _flags(not kernel.split and kernel.kind == "memory" for kernel in kernels)
        self._of_experts = _flags(kernel.expert for kernel in kernels)
        self._products = _places(kind == "product" for kind in kinds)
        self._dims = [_Sizes([kernel.dims[axis] for kernel in products]) for axis in range(4)]
        self._is_grouped = _flags(kernel.kind == "grouped_matmul" for kernel in products)
        self._in_core = _flags(kernel.attention for kernel in products)
        self._is_uncast = _flags(not any(kernel.read.bytes) for kernel in products)
        self._attentions = _places(kind == "attention" for kind in kinds)
        self._heads = _Sizes([kernel.dims[3] if len(kernel.dims) == 4 else Affine(128, 0) for kernel in attentions])
        self._is_causal = _flags(kernel.causal for kernel in attentions)
        self._moves = _places(kind == "memory" for kind in kinds)
        self._others = _places(kind not in ("product", "attention", "memory") for kind in kinds)

    def seconds(
        self,
        device: DeviceType,
        silicon: Silicon,
        rows: Array,
        *,
        precision: Precision,
        tensor_degree: int = 1,
        sequence_parallel: bool = False,
        expert_degree: int = 1,
        backward: bool = False,
    ) -> Array:
        """Seconds of one of each (first axis) for given rows (second axis) on a device whose chip runs kernels like
        *silicon*, without launches of the host.

        Sequence parallelism divides what the tensor degree does not. Expert parallelism divides the weights of experts,
        not the rows: a device's experts get those of all others.
        """
        bandwidth = device.memory_bandwidth * silicon.bandwidth
        size = np.maximum(self._least_bytes, precision.element_bytes)
        experts = np.where(self._of_experts, expert_degree, 1)
        divisor = np.where(self._is_whole, tensor_degree if sequence_parallel else 1, 1)
        weights = (self._read.fixed(size) + self._written.fixed(size)) * (1 - 1 / experts)
        read = self._read(rows, size)
        moved = (read + self._written(rows, size) - weights) / divisor
        cached = np.maximum(0.0, np.minimum(moved, 2 * silicon.cache_bytes - moved)) * (1 - 1 / CACHE_SPEEDUP)
        memory = (moved - cached) / bandwidth
        memory += np.where(self._is_norm, read / bandwidth, 0.0)  # a second pass uses the statistics of the first
        flops = self._flops(rows) / divisor
        compute = np.zeros_like(memory)
        if len(own := self._products):
            compute[own] = self._of_products(device, silicon, rows, precision, experts[own], backward)
        if len(own := self._attentions):
            compute[own] = self._of_attentions(device, silicon, rows, precision, flops[own], backward)
        if len(own := self._moves):
            compute[own] = flops[own] / (device.speed("float32") * silicon.vector)
        if len(own := self._others):
            rate, dtype = precision.rate(device, "convolutions")
            compute[own] = flops[own] / (
                rate * (silicon.vector if dtype in _VECTOR else CONVOLUTION_SHARE * silicon.matmul)
            )
            if dtype == "tfloat32":  # tensor cores want channels last, images in float32 are kept channels first
                compute[own] += 2 * moved[own] / bandwidth
        found: Array = np.maximum(memory, compute) + KERNEL_SECONDS
        return found

    def _of_products(
        self, device: DeviceType, silicon: Silicon, rows: Array, precision: Precision, experts: Array, backward: bool
    ) -> Array:
        batch, m, n, k = (np.maximum(dim(rows), _LEAST_SIZE) for dim in self._dims)
        batch = np.where(self._is_grouped, np.maximum(1.0, batch / experts), batch)
        m = np.where(self._is_grouped, m / batch, m)
        rates = [precision.rate(device), precision.rate(device, "attention")]
        vector = silicon.vector * (silicon.converted if precision.element_bytes < 4 else 1.0)
        vector *= 1.0 if backward else silicon.transposed
        outside, inside = (rate * (vector if dtype in _VECTOR else silicon.matmul) for rate, dtype in rates)
        speeds = np.where(self._in_core, inside, outside)
        if precision.autocast:
            speeds = np.where(self._is_uncast, device.speed("float32") * vector, speeds)
        found = matmul_seconds(batch, m, n, k, speeds, silicon.multiprocessors)
        if "float8" in (dtype for _, dtype in rates):
            is_cast = np.where(self._in_core, rates[1][1] == "float8", rates[0][1] == "float8")
            casts = CAST_BYTES * batch * (m + n) * k / (device.memory_bandwidth * silicon.bandwidth)
            found = found + np.where(is_cast, casts, 0.0)
        return found

    def _of_attentions(
        self, device: DeviceType, silicon: Silicon, rows: Array, precision: Precision, flops: Array, backward: bool
    ) -> Array:
        rate, dtype = precision.rate(device, "attention")
        share = silicon.vector_attention if dtype in _VECTOR else silicon.attention
        head = np.maximum(self._heads(rows), _LEAST_SIZE)
        half = np.where(self._is_causal, 0.5, 1.0)  # what is masked is skipped
        slowdown = 1.25 if backward else 1.0  # its backward is less efficient than its forward
        found: Array = flops * half * slowdown / (rate * share * head / (head + 24))
        return found


def _is_product(kernel: Kernel) -> bool:
    return kernel.kind in ("matmul", "grouped_matmul") and len(kernel.dims) == 4


def _flags(values: Iterable[bool]) -> Flags:
    """A line for each."""
    return np.array(list(values), dtype=np.bool_).reshape(-1, 1)


def _places(values: Iterable[bool]) -> Places:
    """Indices of true values."""
    return np.flatnonzero(list(values))


def matmul_seconds(
    batch: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike, rate: ArrayLike, multiprocessors: int
) -> Array:
    """Seconds of ``batch`` products of (m, k) by (k, n) at a sustained *rate* (FLOP/s), by waves of tiles.

    The best of a few tile sizes, each with the inner dimension cut or not; exact under the model. Sizes and rates are
    numbers, or arrays that broadcast.

    >>> large = matmul_seconds(1, 8192, 8192, 8192, 2.5e14, 108)
    >>> round(float(2 * 8192**3 / large / 2.5e14), 2)
    0.98
    """
    num, height, width, depth, speed = (np.asarray(one, dtype=float) for one in (batch, m, n, k, rate))
    ones = (1,) * max(one.ndim for one in (num, height, width, depth, speed))
    rows, columns, share = (one.reshape(-1, 1, *ones) for one in np.array(_TILES).T)
    cuts = np.array(_CUTS).reshape(-1, *ones)
    tiles = num * np.ceil(height / rows) * np.ceil(width / columns)
    waves = np.ceil(tiles * cuts / multiprocessors)
    steps = depth / cuts + _TILE_START_K
    seconds = waves * 2 * rows * columns * steps * multiprocessors / (speed * share)
    possible = (cuts == 1) | ((tiles < multiprocessors) & (depth / cuts >= _LEAST_CUT))
    found: Array = np.where(possible, seconds, inf).min(axis=(0, 1))
    return found


# --- the form in which kernels run ------------------------------------------------------------------------------------


class _Same:
    """Kernels that are equal to themselves only: comparing all that they hold takes longer than running over them."""

    def __init__(self, kernels: tuple[Kernel, ...]) -> None:
        self.kernels = kernels

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.kernels is other.kernels

    def __hash__(self) -> int:
        return id(self.kernels)


def as_run(
    kernels: tuple[Kernel, ...], *, fused: bool, backward: bool, fused_softmax: bool, eager: bool
) -> KernelsAsRun:
    """The kernels in the form in which they run, of whatever number of rows; worked out once.

    Args:
        kernels: in their order.
        fused: whether the core of an attention is one kernel; else it is spelt out.
        backward: whether they are those of a backward.
        fused_softmax: whether the softmax of an attention that is spelt out is one kernel in its backward.
        eager: whether operators run one by one; else pointwise ones are one with their neighbours.
    """
    return _runs(_Same(kernels), fused=fused, backward=backward, fused_softmax=fused_softmax, eager=eager)


@lru_cache(maxsize=1024)
def _runs(same: _Same, *, fused: bool, backward: bool, fused_softmax: bool, eager: bool) -> KernelsAsRun:
    found = _as_run(same.kernels, fused=fused, backward=backward, fused_softmax=fused_softmax)
    return KernelsAsRun(tuple(found if eager else _with_pointwise_fused(found)))


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
    """One fused kernel for a run of kernels: it reads all of their inputs and writes the last output, except tensors
    that pass between them. This is an estimate without the graph between them; it moves at least as much as the
    largest."""
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
