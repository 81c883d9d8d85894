"""Random operators whose numbers depend on the position in a tensor, not on which process draws first.

A number is a hash of (user's seed, step, operator, position of the element in the whole tensor): it is the same for
every division into ranks and micro-batches, and dropout masks bit for bit on every device. Operators without such a
form are computed whole, seeded by a hash of (user's seed, step, operator). Either way a step can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from whale.runtime.recording import call, is_recording

_MASK = (1 << 63) - 1

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of a dim, in order."""


class RNGPosition:
    """The RNG position: current step and micro-batch; shared by all seeded operators of a model."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step, self.micro_batch = seed, 0, 0

    def derive(self, key: int) -> int:
        """A seed for the operator *key* in this micro-batch."""
        return self._hash(self.step, self.micro_batch, key)

    def of_step(self, key: int) -> int:
        """A seed for the operator *key* in all micro-batches of this step."""
        return self._hash(self.step, key)

    def _hash(self, *parts: int) -> int:
        value = self.seed & _MASK
        for part in parts:
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


def row_numbers(ranges: Sequence[Ranges], sizes: Sequence[int], device: torch.device) -> Tensor:
    """The numbers of a part's rows, which are all its dims except the last, in the whole tensor.

    Args:
        ranges: for each dim, what the part has of it.
        sizes: of the whole tensor.
        device: of the result, int64.

    >>> row_numbers((((1, 3),), ((0, 1), (3, 4)), ((0, 5),)), (3, 4, 5), torch.device("cpu")).tolist()
    [4, 7, 8, 11]
    """
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    for held, size in zip(ranges[:-1], sizes[:-1], strict=True):
        numbers = (numbers[:, None] * size + _places(held, device)).flatten()
    return numbers


def column_numbers(ranges: Sequence[Ranges], device: torch.device) -> Tensor:
    """The numbers of a part's columns, which are its last dim, in the whole tensor, as the mask's hash reads them."""
    places = _places(ranges[-1], device) if ranges else torch.zeros(1, dtype=torch.int64, device=device)
    return _low(places * _GOLDEN)


def _places(ranges: Ranges, device: torch.device) -> Tensor:
    pieces = [torch.arange(start, stop, device=device) for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat([*pieces, torch.zeros(0, dtype=torch.int64, device=device)])


_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
"""Odd numbers of 32 bits: the golden ratio, and the multipliers of MurmurHash3's finalizer (Appleby 2011)."""

_CPU_CHUNK, _CHUNK = 1 << 17, 1 << 24
"""Elements of a mask that are computed at a time: on a CPU so that they stay in its cache, elsewhere so that temporary
tensors are small."""


def keep_mask(seed: int, keep: float, rows: Tensor, columns: Tensor) -> Tensor:
    """A mask of elements that are kept, each with probability *keep*, as a hash of its position.

    Each row has a key of 64 bits, by SplitMix64's finalizer of its number and the seed. An element's hash is
    MurmurHash3's finalizer of the lower half of the key plus the column, to which the upper half is added after the
    first round. All of it is arithmetic on whole numbers, which is equal on all devices.

    Args:
        seed: 63 bits.
        keep: in [0, 1]; the probability is exact to 2**-32.
        rows, columns: from :func:`row_numbers` and :func:`column_numbers`.
    """
    shape = (rows.numel(), columns.numel())
    if not 0.0 < keep < 1.0:
        return torch.full(shape, keep >= 1.0, device=rows.device)
    lower, upper = mask_keys((seed,), rows)[0]
    first, second = MASK_FACTORS
    limit = mask_limit(keep)
    mask = torch.empty(shape, dtype=torch.bool, device=rows.device)
    chunk = max(1, (_CPU_CHUNK if rows.device.type == "cpu" else _CHUNK) // max(1, shape[1]))
    for begin in range(0, shape[0], chunk):
        part = slice(begin, begin + chunk)
        x = lower[part] + columns
        x ^= _shifted(x, 16)
        x *= first
        x += upper[part]
        x ^= _shifted(x, 13)
        x *= second
        torch.lt(x, limit, out=mask[part])
    return mask


def mask_keys(seeds: Sequence[int | Tensor], rows: Tensor) -> Tensor:
    """The lower and the upper halves of the keys of rows under each seed, in int32 of shape (seeds, 2, rows, 1)."""
    keys = _mixed(torch.stack([rows ^ seed for seed in seeds]))
    return torch.stack([_low(keys), _low(_shifted(keys, 32))], 1)[..., None]


def mask_limit(keep: float) -> int:
    """The hash, as a number with a sign, below which elements are kept with probability *keep*, in (0, 1)."""
    return min(round(keep * 2**32), 2**32 - 1) - 2**31


def uniform_numbers(seed: int, rows: Tensor, columns: Tensor, digits: int = 53) -> Tensor:
    """Uniform numbers in [0, 1) in float64, each a hash of its position: SplitMix64, started at its row's key.

    Args:
        seed: 63 bits.
        rows, columns: from :func:`row_numbers` and :func:`column_numbers`.
        digits: binary digits of each number; one of 52 plus half of its last place is in (0, 1).
    """
    found = torch.empty((rows.numel(), columns.numel()), dtype=torch.float64, device=rows.device)
    keys, places = _mixed(rows ^ seed)[:, None], columns.long() * (0x9E3779B97F4A7C15 - 2**64)
    chunk = max(1, (_CPU_CHUNK if rows.device.type == "cpu" else _CHUNK) // max(1, columns.numel()))
    for begin in range(0, rows.numel(), chunk):
        part = slice(begin, begin + chunk)
        found[part] = _shifted(_mixed(keys[part] + places), 64 - digits)
    return found.mul_(2.0**-digits)


def _signed(number: int) -> int:
    """The number of 32 bits with the same bits and a sign."""
    return number - 2**32 if number >= 2**31 else number


MASK_FACTORS = _signed(_FIRST), _signed(_SECOND)
"""The multipliers of a mask's hash, in int32."""


def _low(x: Tensor) -> Tensor:
    """The lower halves of 64-bit numbers."""
    return ((x << 32) >> 32).to(torch.int32)


def _shifted(x: Tensor, by: int) -> Tensor:
    """The bits of numbers, shifted to the right; torch shifts in copies of the sign."""
    bits = 64 if x.dtype == torch.int64 else 32
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finalizer of 64-bit numbers."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


class PositionMask(nn.Module):
    """The mask of an operator: see :func:`keep_mask`."""

    def __init__(self, keep: float, key: int, clock: RNGPosition) -> None:
        super().__init__()
        self.keep, self.key, self.clock = keep, key, clock

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The mask of elements in these rows and columns, in this step."""
        return keep_mask(self.clock.of_step(self.key), self.keep, rows, columns)

    def without_data(self, rows: Tensor, columns: Tensor) -> Tensor:
        """An empty mask."""
        return torch.empty((rows.numel(), columns.numel()), dtype=torch.bool, device=rows.device)

    def like(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The mask in the shape of a tensor, or without data where that has none."""
        if is_recording():
            return call(self, rows, columns).view(x.shape)
        if type(rows) is not Tensor or x.is_meta:
            return torch.empty(x.shape, dtype=torch.bool, device=x.device)
        found: Tensor = self(rows, columns)
        return found.view(x.shape)


class MaskKeys(nn.Module):
    """The keys of the rows of several operators: see :func:`mask_keys`."""

    def __init__(self, keys: Sequence[int], clock: RNGPosition) -> None:
        super().__init__()
        self.keys, self.clock = tuple(keys), clock

    def forward(self, rows: Tensor) -> Tensor:
        """The keys of these rows in this step."""
        return mask_keys([self.clock.of_step(key) for key in self.keys], rows)


class UniformNumbers(nn.Module):
    """The uniform numbers of an operator: see :func:`uniform_numbers`."""

    def __init__(self, key: int, clock: RNGPosition, digits: int) -> None:
        super().__init__()
        self.key, self.clock, self.digits = key, clock, digits

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The numbers of elements in these rows and columns, in this step."""
        return uniform_numbers(self.clock.of_step(self.key), rows, columns, self.digits)

    def without_data(self, rows: Tensor, columns: Tensor) -> Tensor:
        """An empty tensor for them."""
        return torch.empty((rows.numel(), columns.numel()), dtype=torch.float64, device=rows.device)


class SeededDropout(nn.Module):
    """Dropout whose mask depends on positions in the whole tensor; the second result, if requested, is the mask."""

    def __init__(self, probability: float, key: int, clock: RNGPosition, with_mask: bool) -> None:
        super().__init__()
        self.mask, self.with_mask = PositionMask(1.0 - probability, key, clock), with_mask

    def forward(self, rows: Tensor, columns: Tensor, x: Tensor) -> Any:
        """Zero elements with the probability, scale the others up."""
        y, mask = _dropped(x, self.mask, rows, columns)
        return (y, mask) if self.with_mask else y


def _dropped(x: Tensor, position_mask: PositionMask, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor after dropout, and the mask."""
    mask = position_mask.like(x, rows, columns)
    y = x * mask  # saves the mask for the backward, a byte per element; the scale saves nothing
    return y.mul_(1 / position_mask.keep) if position_mask.keep > 0 else y, mask


class SeededBernoulli(nn.Module):
    """Ones with one probability, else zeros, which depend on positions in the whole tensor."""

    def __init__(self, probability: float, key: int, clock: RNGPosition) -> None:
        super().__init__()
        self.mask = PositionMask(probability, key, clock)

    def forward(self, rows: Tensor, columns: Tensor, x: Tensor) -> Tensor:
        """Draw in the shape and dtype of a tensor."""
        return self.mask.like(x, rows, columns).to(x.dtype)


class SeededCall(nn.Module):
    """A random operator that is computed whole, with the default generator of its device, which is seeded for it and
    restored afterwards. Those of other devices are left alone: to seed them takes milliseconds, and none of them
    draws.

    Numbers of a GPU's generator depend on its type, whose multiprocessors limit how a kernel is divided. Where ranks
    with devices of different types draw the same numbers (*mixed*), they draw them on the CPU.
    """

    def __init__(self, target: Callable[..., Any], key: int, clock: RNGPosition, mixed: bool = False) -> None:
        super().__init__()
        self.target, self.key, self.clock, self.mixed = target, key, clock, mixed

    def seed(self) -> int:
        """The seed of this step, the same in all micro-batches."""
        return self.clock.of_step(self.key)

    def of(self, target: Callable[..., Any]) -> SeededCall:
        """Another operator with this seed."""
        return type(self)(target, self.key, self.clock, self.mixed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator."""
        if is_recording():
            return self.target(*args, **kwargs)
        named = kwargs.get("device")
        devices = [a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        device = torch.device(named) if named is not None else devices[0] if devices else None
        if self.mixed and device is not None and device.type != "cpu":
            moved = pytree.tree_map_only((Tensor, torch.device), _on_host, (args, kwargs))
            return pytree.tree_map_only(Tensor, lambda x: x.to(device), self(*moved[0], **moved[1]))
        generator = _generator_of(device)
        state = generator.get_state()
        generator.manual_seed(self.seed())
        try:
            return self.target(*args, **kwargs)
        finally:
            generator.set_state(state)


class SeededPart(SeededCall):
    """A random operator of which a rank computes a part, seeded for each part and micro-batch."""

    def seed(self) -> int:
        """The seed of this micro-batch."""
        return self.clock.derive(self.key)


class SeededAttention(SeededPart):
    """Attention whose dropout mask depends on positions in the whole tensor.

    On a CPU torch computes attention with dropout in steps, as this does. GPUs have kernels for it, which draw by
    themselves: they are seeded as any other random operator. Which kernel there is depends on the type of the GPU, so
    where types compute the same attention (*mixed*) it is computed in steps, too, with the scores in memory.
    """

    def __init__(
        self, target: Callable[..., Any], key: int, key_of_all: int, clock: RNGPosition, mixed: bool = False
    ) -> None:
        super().__init__(target, key, clock, mixed)
        self.key_of_all = key_of_all

    def of(self, target: Callable[..., Any]) -> SeededCall:
        """Another operator with this seed."""
        return SeededPart(target, self.key, self.clock, self.mixed)

    def forward(
        self,
        rows: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute ``scaled_dot_product_attention``; *rows* are the numbers of the output's rows."""
        if query.is_cuda and not self.mixed:
            options = {"scale": scale, "enable_gqa": enable_gqa}
            found: Tensor = super().forward(query, key, value, attn_mask, dropout_p, is_causal, **options)
            return found
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
        if is_causal:
            hidden = torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device)
            scores = scores + hidden.triu(1)
        elif attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        if attn_mask is None:
            weights = scores.softmax(-1)
        else:  # a row may have no column
            weights = torch.ops.aten._safe_softmax.default(scores, -1)
        columns = column_numbers((((0, key.shape[-2]),),), scores.device)
        mask = PositionMask(1.0 - dropout_p, self.key_of_all, self.clock)
        kept = (weights * mask.like(weights, rows, columns)) @ value
        return kept.mul_(1 / mask.keep) if mask.keep > 0 else kept  # fewer than the weights, which dropout would scale


def _on_host(x: Any) -> Any:
    return x.cpu() if isinstance(x, Tensor) else torch.device("cpu")


def _generator_of(device: torch.device | None) -> torch.Generator:
    """The default generator of a device, from which operators draw there; on the meta device nothing does."""
    if device is None or device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
