"""Calibrated constants of the cost model: those that published runs and measured blocks decide, as one value.

A cost model has one of them, so a benchmark fits other constants by making another, and nothing else changes. Each
constant belongs to a chip's design, to a law of all designs or to a mechanism, none to a single run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from whale.planner.cost.silicon import DESIGNS, Design, Laws

__all__ = ["CALIBRATION", "Calibration"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants of the cost model.

    Attributes:
        laws: of all chips.
        designs: of the chips of one architecture, by its name.
        executor_launch_seconds: of the host, to launch a kernel in Whale's executor, views beside it included: GPT and
            Llama with tensors of a few bytes take 13 to 25 on a processor (``benchmarks/launches.py``).
        collective_launch_seconds: of the host, to launch a collective inside a layer.
        lockstep_slowdown: how much longer launches take in a tensor group of more than four devices: it spans both
            sockets of a host, and waits at every collective for the slowest of its processes. vTrain's layers that the
            host limits take 3.4 ms at degree 1, 3.6 at 2 and 4, 5.1 at 8.
        backward_overlap: share of the products that make weights' gradients behind which collectives of the tensor
            group hide (the gradient of the input is reduced while they run): calibrated on layer_times.csv.
        sharded_slowdown: how much longer computation and the collectives of sharded weights (ZeRO 2 and 3) take while
            both run, as a share of the shorter of them.
        sustained: share of the rate of single blocks that whole steps sustain, by type of device: boards without a fan
            of their own clock down when they are hot. Calibrated on AMP's runs, which take twice what blocks that were
            timed alone tell.
    """

    laws: Laws = field(default_factory=Laws)
    designs: Mapping[str, Design] = field(default_factory=lambda: DESIGNS)
    executor_launch_seconds: float = 20e-6
    collective_launch_seconds: float = 35e-6
    lockstep_slowdown: float = 1.4
    backward_overlap: float = 0.4
    sharded_slowdown: float = 0.8
    sustained: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({"T4": 0.5}))


CALIBRATION = Calibration()
