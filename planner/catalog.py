"""Known accelerators, from the table ``data/gpus.csv`` that is packaged beside this file.

Speeds are the makers' peak rates without sparsity; ``confidence`` and ``notes`` in the table say where each row is
from. What a device really attains is for the cost model to say, not for this file.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from whale.ir.cluster import DeviceType

__all__ = ["device_types"]


@cache
def device_types() -> Mapping[str, DeviceType]:
    """Every known device type by its name, in the order of the table; the mapping is read-only.

    ``float16`` and ``bfloat16`` are the tensor-core rates; a device without bfloat16 has no rate for it. Memory is the
    advertised number taken as GiB, which is what drivers report to within 2% (A100-SXM4-80GB 80.0, H100-SXM5-80GB
    79.6).

    >>> device_types()["V100-SXM2-32GB"].speed("float16")
    125000000000000.0
    """
    text = files(__package__).joinpath("data/gpus.csv").read_text(encoding="utf-8")
    found: dict[str, DeviceType] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        speed = {
            "float32": row["fp32_tflops"],
            "tfloat32": row["tf32_tflops_dense"],
            "float16": row["fp16_bf16_tensor_tflops_dense"],
            "bfloat16": row["fp16_bf16_tensor_tflops_dense"] if row["bf16_supported"] == "yes" else "",
            "float8": row["fp8_tflops_dense"],
        }
        found[row["gpu"]] = DeviceType.of(
            row["gpu"],
            speed={dtype: float(tflops) * 1e12 for dtype, tflops in speed.items() if tflops},
            memory_bytes=round(float(row["mem_gb"]) * 2**30),
            memory_bandwidth=float(row["mem_bw_GBps"]) * 1e9,
        )
    return MappingProxyType(found)
