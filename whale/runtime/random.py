"""Random operators whose numbers depend on the position in a tensor, not on which process draws first.

Ranks with the same shard of a tensor draw the same numbers; ranks with different shards draw independent ones. The seed
is a hash of (user's seed, step, micro-batch, operator, shard), so a step can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_MASK = (1 << 63) - 1


class RNGPosition:
    """The RNG position: current step and micro-batch; shared by all seeded operators of a model."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step, self.micro_batch = seed, 0, 0

    def derive(self, key: int) -> int:
        """A seed for the operator *key* at this position."""
        value = self.seed & _MASK
        for part in (self.step, self.micro_batch, key):
            value = _mix(value ^ _mix(part + 0x9E3779B97F4A7C15))
        return value


def _mix(x: int) -> int:
    """SplitMix64's finalizer (Steele et al., OOPSLA 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) & _MASK


def position_key(operator: int, part: tuple[tuple[int, int], ...]) -> int:
    """A key of an operator and of the part of its output (axis, coordinate) that this rank computes."""
    key = _mix(operator + 1)
    for axis, coordinate in part:
        key = _mix(key ^ _mix(axis * 0x10001 + coordinate + 1))
    return key


class SeededDropout(nn.Module):
    """Dropout with its own generator; the second result, if requested, is the mask."""

    def __init__(self, probability: float, key: int, clock: RNGPosition, with_mask: bool) -> None:
        super().__init__()
        self.probability, self.key, self.clock, self.with_mask = probability, key, clock, with_mask
        self._generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Any:
        """Zero elements with the probability, scale the others up."""
        if self._generator is None and not x.is_meta:
            self._generator = torch.Generator(device=x.device)
        if self._generator is not None:
            self._generator.manual_seed(self.clock.derive(self.key))
        keep = 1.0 - self.probability
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(keep, generator=self._generator)
        y = x * mask  # saves the mask for the backward, a byte per element; the scale saves nothing
        if keep > 0:
            y = y.mul_(1 / keep)
        return (y, mask) if self.with_mask else y


class SeededCall(nn.Module):
    """Any other random operator, run with the default generator of its device, which is seeded for it and restored
    afterwards. Those of other devices are left alone: to seed them takes milliseconds, and none of them draws."""

    def __init__(self, target: Callable[..., Any], key: int, clock: RNGPosition) -> None:
        super().__init__()
        self.target, self.key, self.clock = target, key, clock

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator."""
        named = kwargs.get("device")
        devices = [a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        generator = _generator_of(torch.device(named) if named is not None else devices[0] if devices else None)
        state = generator.get_state()
        generator.manual_seed(self.clock.derive(self.key))
        try:
            return self.target(*args, **kwargs)
        finally:
            generator.set_state(state)


def _generator_of(device: torch.device | None) -> torch.Generator:
    """The default generator of a device, from which operators draw there; on the meta device nothing does."""
    if device is None or device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
