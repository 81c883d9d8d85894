"""Software stack of a training run: its kernels, recomputation, and data-parallel sharding.

Whale's executor is one such stack, the only one that a search plans for. The others are those of published runs, which
``whale estimate`` may be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from whale.ir.cluster import DeviceType
from whale.ir.strategy import Offload, Offloading, Recompute
from whale.planner.cost.calibration import CALIBRATION, Calibration
from whale.planner.cost.layers import attention_is_fused
from whale.planner.cost.precision import Precision

__all__ = ["WHALE", "Attention", "Stack"]

Attention = Literal["auto", "fused", "unfused"]


@dataclass(frozen=True, kw_only=True)
class Stack(Offloading):
    """A training stack and how it is set.

    Attributes:
        name: ``whale``: PyTorch's kernels, autograd and optimizers, in the number type of the model, gradients summed
            in buckets while the backward goes on. ``fsdp``: the same kernels with fused optimizers and master weights.
            ``megatron``: fused kernels too, gradients summed in one message.
        attention: one fused kernel, spelt out, or by precision and device.
        recompute: what the backward computes again.
        sequence_parallel: whether the tensor group divides what its matrices do not split.
        zero: what data-parallel devices share: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too.
        offload: what is in the host's memory, in Whale's.
        interleaved: whether devices have several stages each.
        calibration: constants of its times.
    """

    name: Literal["whale", "fsdp", "megatron"] = "whale"
    attention: Attention = "auto"
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero: int = 0
    offload: Offload = "none"
    interleaved: bool = False
    calibration: Calibration = CALIBRATION

    @property
    def eager(self) -> bool:
        """Whether kernels are PyTorch's own, one for each operator."""
        return self.name != "megatron"

    @cached_property
    def way(self) -> tuple[Recompute, Offload, int]:
        """On what costs of a layer depend: what is computed again, what is on the host, and at which level of state
        there."""
        return self.recompute, self.offload, self.zero if self.state_on_host else 0

    @property
    def scatters(self) -> bool:
        """Whether each rank of a tensor group sends its part to the next stage: where the group divides what crosses,
        and in Megatron's interleaved schedule, which scatters and gathers it. Else one rank's message has all of
        it."""
        return self.sequence_parallel or self.interleaved

    @property
    def blocks(self) -> bool:
        """Whether a rank waits for its sends, as Megatron's 1F1B does."""
        return self.name != "whale" and not self.interleaved

    def fuses(self, device: DeviceType, precision: Precision) -> bool:
        """Whether attention is one kernel on *device*: in Whale's executor it is PyTorch's, in others that of their
        time."""
        if self.attention != "auto":
            return self.attention == "fused"
        return attention_is_fused(device, precision, eager=self.name == "whale")


WHALE = Stack()
