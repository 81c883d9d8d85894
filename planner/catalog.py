"""Known accelerators, from the table ``data/gpus.csv`` that is packaged beside this file.

Speeds are the makers' peak rates without sparsity; ``confidence`` and ``notes`` in the table say where each row is
from. What a device really attains is for the cost model to say, not for this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from whale.ir.cluster import DTYPES, DeviceType, Link
from whale.ir.profile import ModelProfile
from whale.planner.network.links import ALIASES, built_in_links, read_table

__all__ = ["Chip", "chip_of", "device_types", "device_types_with", "sources"]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Figures of a chip's data sheet beside its rates and its memory.

    Attributes:
        architecture: the design that it shares with others, as the table names it.
        multiprocessors: streaming multiprocessors; 0 where kernels are not cut into waves over them.
        cache_bytes: of the last-level cache.
        watts: power limit of the board.
        best_matmul: FLOP/s of the fastest 16-bit matrix product that anyone measured on it; 0: unknown.
        host_bandwidth: nominal bytes per second of its link to the host, in one direction.
    """

    architecture: str
    multiprocessors: int
    cache_bytes: float
    watts: float
    best_matmul: float
    host_bandwidth: float


@cache
def chips() -> Mapping[str, Chip]:
    """The chip of every known device type, by its name; the mapping is read-only."""
    return MappingProxyType(
        {
            row["gpu"]: Chip(
                architecture=row["architecture"],
                multiprocessors=int(row["multiprocessors"] or 0),
                cache_bytes=float(row["cache_mb"] or 0) * 1e6,
                watts=float(row["watts"]),
                best_matmul=float(row["best_matmul_tflops"] or 0) * 1e12,
                host_bandwidth=float(row["host_GBps"]) * 1e9,
            )
            for row in read_table("gpus.csv")
        }
    )


def chip_of(device: DeviceType) -> Chip | None:
    """The chip of a device, by the name of its type; None where that is not known."""
    return chips().get(ALIASES.get(device.name, device.name))


@cache
def device_types() -> Mapping[str, DeviceType]:
    """Every known device type by its name, in the order of the table; the mapping is read-only.

    ``float16`` and ``bfloat16`` are the tensor-core rates; a device without bfloat16 has no rate for it. Memory is the
    advertised number taken as GiB, which is what drivers report to within 2% (A100-SXM4-80GB 80.0, H100-SXM5-80GB
    79.6).

    >>> device_types()["V100-SXM2-32GB"].speed("float16")
    125000000000000.0
    """
    found: dict[str, DeviceType] = {}
    for row in read_table("gpus.csv"):
        speed = {
            "float64": row["fp64_tflops"],
            "float32": row["fp32_tflops"],
            "tfloat32": row["tf32_tflops_dense"],
            "float16": row["fp16_bf16_tensor_tflops_dense"],
            "bfloat16": row["fp16_bf16_tensor_tflops_dense"] if row["bf16_supported"] == "yes" else "",
            "float8": row["fp8_tflops_dense"],
        }
        kind, bandwidth = built_in_links()[row["gpu"]]
        found[row["gpu"]] = DeviceType.of(
            row["gpu"],
            speed={dtype: float(tflops) * 1e12 for dtype, tflops in speed.items() if tflops},
            memory_bytes=round(float(row["mem_gb"]) * 2**30),
            memory_bandwidth=float(row["mem_bw_GBps"]) * 1e9,
            intra_node=Link(bandwidth=bandwidth, latency=kind.latency),
        )
    return MappingProxyType(found)


@cache
def sources() -> Mapping[str, str]:
    """For every known device type where its figures are from, and what to know of them."""
    return MappingProxyType(
        {row["gpu"]: "; ".join(filter(None, (row["confidence"], row["notes"]))) for row in read_table("gpus.csv")}
    )


def device_types_with(profile: ModelProfile) -> Mapping[str, DeviceType]:
    """Every known device type and those that *profile* brings along, for ``Cluster.load(..., catalog=...)``.

    A type of the profile keeps its name there. What the profile does not say of it is taken from the table, under that
    name or under the one that it is an alias of; a type of which speed, memory or memory bandwidth are still unknown is
    left out, and a cluster file that uses it must define it.
    """
    known = device_types()
    brought: dict[str, DeviceType] = {}
    for name, figures in profile.device_types.items():
        base = known.get(name) or known.get(ALIASES.get(name, ""))
        speed = {dtype: figures[dtype] for dtype in DTYPES if dtype in figures} or (dict(base.rates) if base else {})
        memory_bytes = round(figures.get("memory_bytes", base.memory_bytes if base else 0))
        memory_bandwidth = figures.get("memory_bandwidth", base.memory_bandwidth if base else 0.0)
        if speed and memory_bytes and memory_bandwidth:
            brought[name] = DeviceType.of(
                name,
                speed=speed,
                memory_bytes=memory_bytes,
                memory_bandwidth=memory_bandwidth,
                intra_node=base.intra_node if base else None,
            )
    return MappingProxyType({**known, **brought})
