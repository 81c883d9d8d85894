"""Messages of a gradient reduction: buckets of parameters, and larger parameters by themselves.

The same rule as `whale.runtime.reduce.bucketize`, for layers of a profile.
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.ir.profile import LayerKind
from whale.ir.program import BUCKET_BYTES
from whale.planner.cost.layers import variant_of

__all__ = ["REPEATS", "num_buckets", "num_buckets_of"]

REPEATS = 8
"""Layers in a row over which buckets are counted: those of small layers hold parameters of several."""


def num_buckets(sizes: Sequence[float], capacity: float = BUCKET_BYTES) -> float:
    """Return the number of buckets for each of many equal layers with parameters of these *sizes*.

    >>> num_buckets([3, 1, 1, 1], capacity=4), num_buckets([1], capacity=4), num_buckets([9, 1], capacity=4)
    (2.0, 0.25, 2.0)
    """
    num, held = 0, capacity
    for size in [*reversed(sizes)] * REPEATS:
        if held + size > capacity:
            num, held = num + 1, 0.0
        held += size
    return num / REPEATS


def num_buckets_of(kind: LayerKind, tensor_degree: int, element_bytes: float) -> float:
    """Return the number of buckets of a layer, at a degree that the profile has and with *element_bytes* for each of
    its elements; without the sizes of its parameters as few as the largest allows."""
    if not kind.variants:
        return (kind.parameters or 0.0) / tensor_degree * element_bytes / BUCKET_BYTES
    variant = variant_of(kind, tensor_degree)
    if variant.sizes:
        return num_buckets([size * element_bytes for size in variant.sizes])
    largest = variant.largest or variant.parameters
    return variant.parameters * element_bytes / max(BUCKET_BYTES, largest * element_bytes)
