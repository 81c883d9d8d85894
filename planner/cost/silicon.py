"""Sustained rates of a chip: what products, attention and copies reach of its data sheet, and what a launch costs.

A data sheet gives peak rates, board power, multiprocessors and caches (``planner/data/gpus.csv``). This file says what
kernels reach of the peaks: a fraction that the design of the chip sets, at a clock that the board's power allows. The
constants belong to designs and to laws, none to a single chip, so a chip without measurements is predicted from its
data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from whale.ir.cluster import DeviceType
from whale.planner.catalog import Chip, chip_of

__all__ = ["DESIGNS", "Design", "Laws", "Silicon", "clock", "silicon_of"]

GDDR_JOULES, HBM_JOULES = 60e-12, 31e-12
"""Energy of a byte from memory: 7.5 pJ a bit of GDDR6 (Micron), 3.9 pJ a bit of HBM2 (O'Connor et al., MICRO 2017)."""

LEAST_VOLTAGE, VOLTAGE_SLOPE = 0.7, 1.0
"""Voltage relative to that of the boost clock: it falls with the clock by this slope down to a floor (assumed: power
goes with the cube of the clock, as whole runs on H100 of 500 W and 700 W tell)."""


@dataclass(frozen=True, kw_only=True)
class Silicon:
    """How a chip runs kernels.

    Attributes:
        multiprocessors: that share the tiles of a matrix product (streaming multiprocessors, compute units; 1 where
            the work is not cut into waves that matter).
        matmul: fraction of the peak of matrix units that a large product sustains.
        vector: fraction of the peak of number types without matrix units that a large product sustains.
        transposed: rate of a product in a forward, which reads its weight transposed, relative to ``vector``.
        converted: rate of a product of 16-bit operands without matrix units, relative to ``vector``.
        attention: fraction of the peak of matrix units that a fused attention reaches in its forward.
        vector_attention: the same of number types without matrix units.
        bandwidth: fraction of the memory bandwidth that a kernel over large tensors reaches.
        launch: seconds in which the host of such devices launches an operator of an eager training step, Python and
            autograd included; hosts of one time are much alike.
        calibrated: whether measured times of chips of this design stand behind the figures.
        cache_bytes: of the last-level cache, in which a kernel finds what the one before it wrote.
    """

    multiprocessors: int
    matmul: float
    vector: float = 0.8
    transposed: float = 1.0
    converted: float = 1.0
    attention: float = 0.5
    vector_attention: float = 0.4
    bandwidth: float = 0.8
    launch: float = 64e-6
    calibrated: bool = False
    cache_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Design:
    """Properties that the chips of one architecture share.

    Attributes:
        tensor_joules: energy of one 16-bit operation in the matrix units at the boost clock, of the process in which
            the chips are made; 0: unknown, and power is taken to be no limit.
        byte_joules: energy of a byte from memory.
        wide: whether a multiprocessor has 128 float32 lanes, which its shared memory feeds with the 128 bytes a cycle
            that it has in designs of 64 lanes too.
        shares_lanes: whether half of the float32 lanes also do the integer arithmetic of addresses.
        flash: fraction of the peak of matrix units, at the clock that the power allows, that the best attention kernel
            written for the design reaches in its forward; 0: there is none, and attention is PyTorch's memory-efficient
            kernel.
        eager_matmul: rate of PyTorch's own products relative to those of a stack such as Megatron's.
        eager_flash: the same of attention.
        fsdp_matmul, fsdp_flash: the same in FSDP's runs, beside its collectives; None: no other.
        bandwidth: fraction of the memory bandwidth, where it is not that of the laws.
        launch, calibrated: as in `Silicon`.
    """

    tensor_joules: float = 0.0
    byte_joules: float = GDDR_JOULES
    wide: bool = False
    shares_lanes: bool = False
    flash: float = 0.0
    eager_matmul: float = 0.96
    eager_flash: float = 1.0
    fsdp_matmul: float | None = None
    fsdp_flash: float | None = None
    bandwidth: float | None = None
    launch: float = 64e-6
    calibrated: bool = False


_HOPPER = Design(
    tensor_joules=0.95e-12,
    byte_joules=HBM_JOULES,
    wide=True,
    flash=0.6,
    eager_matmul=1.0,
    fsdp_matmul=0.84,
    fsdp_flash=0.58,
    bandwidth=0.73,
    calibrated=True,
)

DESIGNS: Mapping[str, Design] = MappingProxyType(
    {
        "kepler": Design(wide=True),
        "pascal": Design(tensor_joules=3.7e-12, wide=True, calibrated=True),
        "pascal-100": Design(tensor_joules=3.7e-12, byte_joules=HBM_JOULES),
        "volta": Design(tensor_joules=3.3e-12, byte_joules=HBM_JOULES, calibrated=True),
        "turing": Design(tensor_joules=2.85e-12, calibrated=True),
        "ampere-80": Design(
            tensor_joules=1.48e-12, byte_joules=HBM_JOULES, flash=0.53, bandwidth=0.75, calibrated=True
        ),
        "ampere-86": Design(tensor_joules=1.9e-12, wide=True, shares_lanes=True, flash=0.53, calibrated=True),
        "ada": Design(tensor_joules=1.33e-12, wide=True, shares_lanes=True, flash=0.53, calibrated=True),
        "hopper": _HOPPER,
        "grace-hopper": _HOPPER,
        "blackwell": replace(_HOPPER, tensor_joules=0.7e-12, calibrated=False),
    }
)
"""By the column ``architecture`` of the table; a design that is not listed has the defaults.

``tensor_joules`` of Ampere, Hopper and Blackwell agree with the fastest products measured on them (271 of 312 TFLOP/s
at 400 W, 794 of 989 at 700 W, 1,745 of 2,250 at 1,000 W: Stas Bekman's tables) and with published training runs. Those
of 12 nm are calibrated on published runs and the measured blocks; 16 nm takes a quarter more power than 12, says TSMC,
Samsung's 8 nm lies between 12 and 7, Ada is Hopper's process at a higher clock and voltage. ``flash`` of Ampere is
FlashAttention-2's, of Hopper that of cuDNN beneath TransformerEngine, both calibrated on published runs;
FlashAttention-2 was written for Ampere and leaves Hopper's asynchronous copies and products unused (35% of the peak in
its forward, says FlashAttention-3's paper). ``fsdp_matmul`` and ``fsdp_flash`` of Hopper are calibrated on runs of MPT
and torchtitan, whose products run beside FSDP's collectives and whose attention is FlashAttention-2; torch 2.11 by
itself has cuDNN's attention there, and products at least as fast as those of other stacks (on an H200:
``docs/gpus.md``). Blackwell's are assumed to be the same. ``launch`` is calibrated on runs of other stacks that do not
get faster with less work; that of Whale's executor is measured (`whale.planner.cost.calibration`)."""


@dataclass(frozen=True, kw_only=True)
class Laws:
    """Constants of all designs, calibrated on measured blocks of seven cards (``benchmarks/block_times.py``).

    Attributes:
        sustained: fraction of the peak of matrix units at the clock that the power allows.
        vector: fraction of the peak of number types without matrix units, at that clock, with 64 lanes to a
            multiprocessor.
        wide: the same with 128.
        transposed: rate of products that read a weight transposed where lanes are shared with integer arithmetic.
        converted: rate of products of 16-bit operands in float32 lanes, which convert them on the way.
        vector_joules: energy of a float32 operation relative to a 16-bit one in matrix units.
        bandwidth: fraction of the memory bandwidth.
        memory_efficient: fraction of the peak of matrix units that PyTorch's memory-efficient attention reaches.
        vector_attention: fraction of the peak that attention without matrix units reaches.
        idle: fraction of the board's power that the chip takes whatever its clock.
        joules: factor of the energies of all designs.
        best: fraction of the fastest measured product that products sustain, for designs of unknown energy (assumed).
    """

    sustained: float = 0.93
    vector: float = 1.0
    wide: float = 0.74
    transposed: float = 0.82
    converted: float = 0.87
    vector_joules: float = 6.2
    bandwidth: float = 0.8
    memory_efficient: float = 0.3
    vector_attention: float = 0.4
    idle: float = 0.2
    joules: float = 1.0
    best: float = 0.86


def clock(watts: float, boost_watts: float) -> float:
    """The clock that *watts* allow to kernels that take *boost_watts* at the boost clock, relative to that clock.

    Power falls with the clock and with the square of the voltage.

    >>> clock(300, 200), round(clock(100, 200), 2), round(clock(50, 200), 2)
    (1.0, 0.79, 0.51)
    """
    if boost_watts <= watts:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        voltage = max(LEAST_VOLTAGE, 1 - VOLTAGE_SLOPE * (1 - middle))
        low, high = (middle, high) if boost_watts * middle * voltage**2 < watts else (low, middle)
    return low


def silicon_of(
    device: DeviceType,
    *,
    eager: bool = False,
    fsdp: bool = False,
    laws: Laws | None = None,
    designs: Mapping[str, Design] = DESIGNS,
) -> Silicon:
    """How *device* runs kernels, by the name of its type; a type that is not known gets cautious figures. *eager*: with
    PyTorch's own kernels instead of a stack's such as Megatron's; *fsdp*: in FSDP's runs. *laws* and *designs*: other
    constants than the calibrated ones.

    >>> from whale.planner.catalog import device_types
    >>> v100, t4 = (silicon_of(device_types()[name]) for name in ("V100-SXM2-32GB", "T4"))
    >>> v100.multiprocessors, v100.matmul > 1.5 * t4.matmul  # 300 W against 70 W
    (80, True)
    """
    chip = chip_of(device)
    if chip is None:
        return Silicon(multiprocessors=1, matmul=0.7)
    design = designs.get(chip.architecture, _UNKNOWN)
    if fsdp:
        matmul, flash = design.fsdp_matmul or design.eager_matmul, design.fsdp_flash or design.eager_flash
        design = replace(design, eager_matmul=matmul, eager_flash=flash)
    return _silicon(chip, design, device, eager, laws or _LAWS)


_LAWS, _UNKNOWN = Laws(), Design()


@lru_cache(maxsize=1024)
def _silicon(chip: Chip, design: Design, device: DeviceType, eager: bool, laws: Laws) -> Silicon:
    rates = dict(device.rates)
    peak = max(rates.get("float16", 0.0), rates.get("bfloat16", 0.0))
    joules = design.tensor_joules * laws.joules
    watts = chip.watts * (1 - laws.idle) - device.memory_bandwidth * design.byte_joules / 2  # memory half busy
    tensor = clock(watts, peak * joules)
    lanes = laws.wide if design.wide else laws.vector
    vector = clock(watts, lanes * device.speed("float32") * joules * laws.vector_joules)
    matmul = laws.sustained * tensor
    if not joules:
        matmul, vector = laws.best * (chip.best_matmul / peak if chip.best_matmul else 0.6), laws.best
    return Silicon(
        multiprocessors=chip.multiprocessors or 1,
        matmul=matmul * (design.eager_matmul if eager else 1.0),
        vector=lanes * vector,
        transposed=laws.transposed if design.shares_lanes else 1.0,
        converted=laws.converted,
        attention=tensor * (design.flash or laws.memory_efficient) * (design.eager_flash if eager else 1.0),
        vector_attention=laws.vector_attention * vector,
        bandwidth=design.bandwidth or laws.bandwidth,
        launch=design.launch,
        calibrated=design.calibrated,
        cache_bytes=chip.cache_bytes,
    )
