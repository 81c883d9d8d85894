"""What kernels get of a chip's peak figures: how many multiprocessors share the work, which part of the peak rates the
best kernels sustain in training, and what a launch costs.

Data sheets give peaks; this file says what is left of them, by chip family, with the source of every number. It knows
no models and no networks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from whale.ir.cluster import DeviceType
from whale.planner.network.links import ALIASES

__all__ = ["Silicon", "silicon_of"]


@dataclass(frozen=True, kw_only=True)
class Silicon:
    """How a chip runs kernels.

    Attributes:
        multiprocessors: that share the tiles of a matrix product (streaming multiprocessors, compute units; 1 where
            the work is not cut into waves that matter).
        matmul: share of the tensor-core peak that a large product sustains.
        vector: share of the peak of types without matrix units.
        attention: share of the peak that a fused attention reaches in its forward.
        bandwidth: share of the memory bandwidth that a kernel over large tensors reaches.
        launch: seconds in which the host of such devices launches an operator of an eager training step, Python and
            autograd included; hosts of one time are much alike.
        calibrated: whether published training runs on such chips stand behind the figures.
        cache_bytes: of the last-level cache, in which a kernel finds what the one before it wrote.
    """

    multiprocessors: int
    matmul: float
    vector: float = 0.8
    attention: float = 0.5
    bandwidth: float = 0.8
    launch: float = 60e-6
    calibrated: bool = False
    cache_bytes: float = 0.0


_FAMILIES = {
    "kepler": Silicon(multiprocessors=13, matmul=0.7, vector=0.7),
    "pascal": Silicon(multiprocessors=56, matmul=0.8, vector=0.85),
    "volta": Silicon(multiprocessors=80, matmul=0.79, vector=0.97, calibrated=True, cache_bytes=6e6),
    "turing": Silicon(multiprocessors=68, matmul=0.6, vector=0.95, cache_bytes=5.5e6),
    "ampere": Silicon(
        multiprocessors=108,
        matmul=0.79,
        vector=0.85,
        attention=0.45,
        bandwidth=0.75,
        calibrated=True,
        cache_bytes=40e6,
    ),
    "ada": Silicon(multiprocessors=128, matmul=0.8, vector=0.8, attention=0.4, cache_bytes=72e6),
    "hopper": Silicon(
        multiprocessors=132,
        matmul=0.73,
        vector=0.8,
        attention=0.54,
        bandwidth=0.7,
        calibrated=True,
        cache_bytes=50e6,
    ),
    "blackwell": Silicon(
        multiprocessors=148,
        matmul=0.7,
        vector=0.8,
        attention=0.54,
        bandwidth=0.7,
        cache_bytes=126e6,
    ),
    "other": Silicon(multiprocessors=1, matmul=0.7, vector=0.8),
}
"""Multiprocessors and caches are the makers' figures. ``matmul``, ``bandwidth`` and ``attention`` of Volta, Ampere and
Hopper are calibrated on published runs (attention: Ampere's is FlashAttention-2's, Hopper's that of cuDNN beneath
TransformerEngine), ``launch`` on those that do not get faster with less work, ``vector`` of Volta and Turing on the
layers that Sailor measured in float32 (`benchmarks/published.py`). Blackwell's ``matmul`` is the share that the best
measured product reaches (1745 of 2250 TFLOP/s, Stas Bekman's tables) times Hopper's ratio of training to that; the
others' are assumed."""

# Chips by the beginning of their name in the catalog: family, and what differs from it. Where a best measured product
# is known, ``matmul`` is 0.86 of its share (assumed); power below the family's lowers it.
_CHIPS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("K80", "kepler", {}),
    ("P100", "pascal", {}),
    ("P40", "pascal", {"multiprocessors": 30}),
    ("GTX1080Ti", "pascal", {"multiprocessors": 28}),
    ("QuadroP4000", "pascal", {"multiprocessors": 14}),
    ("V100", "volta", {}),
    ("TitanV", "volta", {}),
    # 70 W: calibrated on AMP's runs, whose stack is old too
    ("T4", "turing", {"multiprocessors": 40, "matmul": 0.2, "vector": 0.5, "bandwidth": 0.55}),
    # half of the rate of the table where sums are kept in float32 (the notes of gpus.csv)
    ("TitanRTX", "turing", {"multiprocessors": 72, "matmul": 0.45}),
    ("QuadroRTX8000", "turing", {"multiprocessors": 72}),
    ("RTX2080Ti", "turing", {"matmul": 0.45}),
    ("RTX2080", "turing", {"multiprocessors": 46, "matmul": 0.45}),
    ("RTX2060", "turing", {"multiprocessors": 30, "matmul": 0.45}),
    ("A100", "ampere", {}),
    ("A100-PCIe", "ampere", {"matmul": 0.74}),
    ("A800", "ampere", {}),
    ("A30", "ampere", {"multiprocessors": 56, "matmul": 0.65}),
    ("A10", "ampere", {"multiprocessors": 72, "matmul": 0.6}),
    ("A10G", "ampere", {"multiprocessors": 80}),
    ("A40", "ampere", {"multiprocessors": 84}),
    ("A6000", "ampere", {"multiprocessors": 84}),
    ("A5000", "ampere", {"multiprocessors": 64}),
    ("RTX3090", "ampere", {"multiprocessors": 82}),
    ("RTX4090", "ada", {}),
    ("RTX6000Ada", "ada", {"multiprocessors": 142, "matmul": 0.55}),
    ("L40", "ada", {"multiprocessors": 142}),
    ("L40S", "ada", {"multiprocessors": 142, "matmul": 0.6}),
    ("L4", "ada", {"multiprocessors": 58, "matmul": 0.45}),
    ("H100-PCIe", "hopper", {"multiprocessors": 114, "matmul": 0.55}),
    ("H100-NVL", "hopper", {"matmul": 0.55}),
    ("H100-SXM5-96GB", "hopper", {"matmul": 0.67}),  # 500 W: calibrated on torchtitan's runs
    ("H100", "hopper", {}),
    ("H800", "hopper", {}),
    ("H20", "hopper", {"multiprocessors": 78, "matmul": 0.9}),
    ("H200", "hopper", {}),
    ("GH200", "hopper", {"launch": 67e-6}),  # Grace: calibrated on runs that do not get faster with less work
    ("B200", "blackwell", {}),
    ("B300", "blackwell", {}),
    ("GB200", "blackwell", {}),
    ("GB300", "blackwell", {}),
    ("MI250X", "other", {"matmul": 0.5}),
    ("MI300X", "other", {"matmul": 0.44}),
    ("MI325X", "other", {"matmul": 0.52}),
    ("MI355X", "other", {"matmul": 0.54}),
    ("Gaudi2", "other", {"matmul": 0.83}),
    ("Gaudi3", "other", {"matmul": 0.64}),
)


_EAGER: dict[str, dict[str, Any]] = {
    "hopper": {"matmul": 0.85, "attention": 0.46},
    "blackwell": {"matmul": 0.85, "attention": 0.46},
}
"""What PyTorch's own kernels reach of the vendor's, by family, where they differ. FlashAttention-2 was written for
Ampere and leaves Hopper's asynchronous copies and products unused (35% of the peak in its forward, says
FlashAttention-3's paper); products run beside FSDP's collectives. Calibrated on runs of MPT and torchtitan; Blackwell's
are assumed."""


def silicon_of(device: DeviceType, *, eager: bool = False) -> Silicon:
    """How *device* runs kernels, by the name of its type; a type that is not known gets cautious figures. *eager*: with
    PyTorch's own kernels instead of the vendor's.

    >>> from whale.planner.catalog import device_types
    >>> silicon_of(device_types()["V100-SXM2-32GB"]).multiprocessors
    80
    """
    return _silicon_named(ALIASES.get(device.name, device.name), eager)


@lru_cache
def _silicon_named(name: str, eager: bool) -> Silicon:
    best = max((chip for chip in _CHIPS if name.startswith(chip[0])), key=lambda chip: len(chip[0]), default=None)
    if best is None:
        return _FAMILIES["other"]
    _, family, differences = best
    found = replace(_FAMILIES[family], **differences)
    if not eager:
        return found
    shares = _EAGER.get(family, {})
    return replace(found, **{name: getattr(found, name) * share for name, share in shares.items()})
