"""Messages of a gradient reduction: buckets of parameters, and larger parameters by themselves.

The size of a bucket, which compiler, cost model and search read here, and the buckets of a profile's layers,
by the same rule as `whale.runtime.reduce.bucketize`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

from whale.errors import UsageError
from whale.ir.profile import LayerKind
from whale.ir.program import BUCKET_BYTES
from whale.planner.cost.layers import variant_of
from whale.planner.network.communication import collective
from whale.planner.network.topology import Topology

__all__ = ["LARGEST_BUCKET_BYTES", "REPEATS", "bucket_bytes", "largest_packed", "packed", "packed_of"]

LARGEST_BUCKET_BYTES = 64 * 2**20
"""Beyond it the last bucket, which no backward hides, and the memory of those in flight cost more than is saved."""

PROCESSOR_BUCKET_BYTES = 32 * 2**20
"""Capacity between processors of one node, whose own cores move the bytes: nothing hides a sum, and each costs work
(``benchmarks/buckets.py``)."""

TRANSFERS = 4
"""Seconds of transfer for each second of latency: a sum takes at most a quarter longer than its bytes."""

REPEATS = 8
"""Layers in a row over which buckets are counted, or buckets of small layers, which hold parameters of several."""
MOST_REPEATS = 1024
"""Layers so small that eight buckets hold as many fill them, except for a negligible part."""


def bucket_bytes(topology: Topology, ranks: Sequence[int], *, divided: bool = False) -> int:
    """Return the bytes of a bucket that these ranks sum: their latency times their bandwidth, four times, as a power of
    two from `BUCKET_BYTES` to `LARGEST_BUCKET_BYTES`.

    A smaller one would spend its time on latencies; a larger one would start later, and its end is exposed. Both
    figures are those of the cost of an all-reduce. Measured curves of a profile are not asked: all ranks of a launch
    know the cluster, but not the profile. Processors of one node have `PROCESSOR_BUCKET_BYTES`, except where the state
    is *divided* over them: what a rank needs of others is in memory a bucket at a time.

    >>> from whale.ir.cluster import Cluster, Link
    >>> from whale.planner.catalog import device_types
    >>> a100, slow = device_types()["A100-SXM4-80GB"], Link(bandwidth=3e9, latency=3e-5)
    >>> topology = Topology.of(Cluster.homogeneous(16, a100, num_devices_per_node=8, intra=a100.intra_node, inter=slow))
    >>> [bucket_bytes(topology, ranks) // 2**20 for ranks in (range(8), range(16))]
    [32, 4]
    """
    types = [topology.cluster.devices[rank].type for rank in ranks]
    if not divided and all(type_.is_processor for type_ in types) and len(topology.members(ranks)) == 1:
        return PROCESSOR_BUCKET_BYTES
    try:
        latency = collective(topology, "all_reduce", ranks, 1).latency
        seconds = collective(topology, "all_reduce", ranks, LARGEST_BUCKET_BYTES).transfer
    except UsageError:  # the cluster does not know these links
        return BUCKET_BYTES
    size = BUCKET_BYTES
    while size < LARGEST_BUCKET_BYTES and size * seconds / LARGEST_BUCKET_BYTES < TRANSFERS * latency:
        size *= 2
    return size


def largest_packed(sizes: Sequence[float], capacity: float) -> float:
    """Return the size of the largest bucket of many equal layers with parameters of these *sizes*.

    >>> largest_packed([3, 1, 1, 1], capacity=4), largest_packed([1], capacity=4), largest_packed([3], capacity=4)
    (4.0, 4.0, 3.0)
    """
    total, largest, held = sum(sizes), 0.0, 0.0
    if total * MOST_REPEATS <= REPEATS * capacity:
        return float(capacity)
    for size in [*reversed(sizes)] * (REPEATS * ceil(max(1.0, capacity / total))):
        held = size if held + size > capacity else held + size
        largest = max(largest, held)
    return float(largest)


def packed(sizes: Sequence[float], capacity: float) -> dict[float, float]:
    """Return the sizes of the buckets of many equal layers with parameters of these *sizes*, with how many of each
    there are for a layer.

    >>> packed([1], capacity=4), packed([9, 1], capacity=4)
    ({4.0: 0.25}, {1.0: 1.0, 9.0: 1.0})
    """
    total = sum(sizes)
    if total * MOST_REPEATS <= REPEATS * capacity:
        return {float(capacity): total / capacity}
    repeats = REPEATS * ceil(max(1.0, capacity / total))
    found, held = Counter[float](), 0.0
    for size in [*reversed(sizes)] * repeats:
        if held and held + size > capacity:
            found[held] += 1
            held = 0.0
        held += size
    found[held] += 1
    return {float(size): num / repeats for size, num in found.items()}


def packed_of(kind: LayerKind, tensor_degree: int, element_bytes: float, capacity: float) -> dict[float, float]:
    """Return the buckets of *capacity* bytes of a layer, as `packed`, at a degree that the profile has and with
    *element_bytes* for each of its elements; without the sizes of its parameters as few as the largest allows."""
    if not kind.variants:
        return {capacity: (kind.parameters or 0.0) / tensor_degree * element_bytes / capacity}
    variant = variant_of(kind, tensor_degree)
    if variant.sizes:
        dense = list(variant.sizes)
        for one in variant.sparse:  # of whose gradients ranks exchange rows
            if one.elements in dense:
                dense.remove(one.elements)
        return packed([size * element_bytes for size in dense], capacity)
    size = max(capacity, (variant.largest or variant.parameters) * element_bytes)
    return {size: variant.parameters * element_bytes / size}
