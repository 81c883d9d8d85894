"""Agreement of ranks at the start: they compare digests of what each has compiled and the values of their tensors, and
wait for each other.

Ranks compile independently, so ranks with different models, plans or seeds would make different groups and wait for
each other until a timeout. Here they first exchange a few digests and report which ranks differ, and in what. It knows
ranks and texts; not what was compiled.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from whale.errors import PlanMismatchError
from whale.runtime.launch import World
from whale.runtime.precision import in_own_dtypes

__all__ = [
    "agree",
    "agree_on_values",
    "checksums_of_all",
    "fingerprint",
    "fingerprints",
    "int_of_first",
    "ints_of_all",
    "is_other",
    "meet",
    "take_from",
]

_BYTES = 16


def agree(world: World, texts: Mapping[str, str]) -> None:
    """Compare named texts with those of all ranks.

    Raises:
        PlanMismatchError: on every rank; names what differs and the ranks that differ from the most common text.
        WorkerError: a rank did not come within the timeout; names it.
    """
    if world.size == 1:
        return
    mine = b"".join(hashlib.sha256(text.encode()).digest()[:_BYTES] for text in texts.values())
    local = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(world.device)
    gathered = [torch.empty_like(local) for _ in range(world.size)]
    work = dist.all_gather(gathered, local, async_op=True)
    world.failures.wait(work, "the comparison of what ranks compiled", range(world.size))
    rows = [row.view(len(texts), _BYTES).tolist() for row in gathered]
    for index, name in enumerate(texts):
        column = [bytes(row[index]) for row in rows]
        common, _ = Counter(column).most_common(1)[0]
        others = [rank for rank, digest in enumerate(column) if digest != common]
        if others:
            who = f"rank {others[0]} differs" if len(others) == 1 else f"ranks {others} differ"
            raise PlanMismatchError(
                f"{who} from rank {column.index(common)} in {name}; start the same script with the same arguments, "
                "seed and versions on every rank"
            )


def agree_on_values(world: World, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compare named tensors with those of all ranks by `fingerprint`: every element counts, and ranks may round
    differently.

    Returns:
        The fingerprints by name; none where there is one rank.

    Raises:
        PlanMismatchError: on every rank; names the first tensor that differs, and the ranks.
        WorkerError: a rank did not come within the timeout; names it.
    """
    if world.size == 1 or not tensors:
        return {}
    own = dict(zip(tensors, fingerprints(tensors.values()), strict=True))
    found = torch.stack([look.to(world.device) for look in own.values()]).nan_to_num(_NOT_A_NUMBER)
    most = torch.cat([found, -found])
    work = dist.all_reduce(most, dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    world.failures.wait(work, _COMPARISON, range(world.size))
    most, least = most.cpu().view(2, -1, 2)
    allowed = torch.tensor([_TOLERANCES.get(x.dtype, 0.0) for x in tensors.values()], dtype=torch.float64)
    different = (most + least > allowed[:, None] * most[:, 1:]).any(dim=1)
    if not different.any():
        return own
    first = int(different.nonzero()[0])
    rows = [torch.empty_like(found[first]) for _ in range(world.size)]
    work = dist.all_gather(rows, found[first], async_op=True)
    world.failures.wait(work, _COMPARISON, range(world.size))
    ranks = [
        rank
        for rank, row in enumerate(rows)
        if ((row - rows[0]).abs() > float(allowed[first]) * torch.maximum(row, rows[0])[1]).any()
    ]
    name = list(tensors)[first]
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {ranks} have"
    raise PlanMismatchError(
        f"{who} other values in {name} than rank 0: every rank must start with the same model; call torch.manual_seed "
        "with one seed on every rank, load one checkpoint on all, or pass sync_module_states=True to take rank 0's"
    )


_COMPARISON = "the comparison of the model's values"
_NOT_A_NUMBER = 1e300
_TOLERANCES = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.bfloat16: 1e-3,
    torch.float16: 1e-3,
}
"""By how much fingerprints of equal tensors differ at most, as a part of the norm, by the type of their elements:
processors round the last bit differently, and more signs cancel than add up. Integers are equal."""

_THREADS = 1e-6
"""By how much fingerprints of one tensor differ at most, as a part of its norm: any number of threads sums up."""

_CHUNK = 1 << 16
_CHUNKS_AT_ONCE = 64
_GOLDEN = 0.6180339887498949


def fingerprint(x: Tensor) -> Tensor:
    """The sum of a tensor's elements under fixed pseudo-random signs, and its norm, as two elements in float64.

    Tensors of one norm that differ in an element, or in the order of elements, have other sums. Elements are read once
    for each of the two, in chunks that float32 sums up well.
    """
    return fingerprints([x])[0]


@in_own_dtypes
def fingerprints(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The `fingerprint` of each tensor."""
    signs: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    found = []
    for x in tensors:
        flat = x.detach().flatten()
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten()
        wide = torch.float32 if flat.is_floating_point() and flat.dtype != torch.float64 else torch.float64
        key, most = (wide, flat.device), min(_CHUNK, flat.numel())
        if key not in signs or len(signs[key]) < most:
            signs[key] = _signs(most, *key)
        whole = flat.numel() // _CHUNK * _CHUNK
        sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
        if whole:
            chunks = flat[:whole].view(-1, _CHUNK)
            for first in range(0, len(chunks), _CHUNKS_AT_ONCE):
                values = chunks[first : first + _CHUNKS_AT_ONCE].to(wide)
                place = torch.arange(first, first + len(values), dtype=torch.float64, device=flat.device)
                turned = (values @ signs[key]).double() @ (1 - place * _GOLDEN % 1 / 2)  # chunks have a weight each
                sums += torch.stack([turned, torch.linalg.vector_norm(values, dim=1).double().square().sum()])
        if whole < flat.numel():
            values = flat[whole:].to(wide)
            sums += torch.stack([values @ signs[key][: len(values)], values @ values])
        sums[1] = sums[1].sqrt()
        found.append(sums)
    return found


def is_other(look: Tensor, before: Tensor) -> bool:
    """Whether a fingerprint is of other values than one that this process found before, perhaps in other threads."""
    now, then = look.nan_to_num(_NOT_A_NUMBER), before.nan_to_num(_NOT_A_NUMBER)
    return bool((now - then).abs().max() > _THREADS * then[1])


def _signs(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pseudo-random signs for the elements of a chunk, 1 and -1."""
    place = torch.arange(count, device=device)
    return (1 - 2 * ((place * 0x9E3779B1 >> 15 ^ place >> 3) & 1)).to(dtype)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers that have the bits of elements of these sizes, in bytes."""

_WEIGHT = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio in 64 bits, with a sign."""


def checksum(x: Tensor) -> Tensor:
    """A whole number for the bits of a tensor: tensors that differ in one element have other ones.

    It is a sum in 64 bits, with an odd weight for each position, so it is the same on all devices.

    >>> x = torch.ones(3)
    >>> bool(checksum(x) == checksum(x.clone())), bool(checksum(x) == checksum(torch.nextafter(x, 2 * x)))
    (True, False)
    """
    flat = x.detach().contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    flat = flat.view(_WORDS[flat.element_size()])
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(flat.split(_CHUNK)):
        first = number * _CHUNK + 1
        weights = torch.arange(first, first + chunk.numel(), device=flat.device).mul_(_WEIGHT).bitwise_or_(1)
        found += (chunk.to(torch.int64) * weights).sum()
    return found


def checksums_of_all(world: World, tensors: Sequence[Tensor | None]) -> list[list[int]]:
    """The checksums of tensors on every rank, by rank; 0 where a rank has none. All ranks must call it.

    Raises:
        WorkerError: a rank did not come within the timeout; names it.
    """
    none = torch.zeros((), dtype=torch.int64, device=world.device)
    mine = torch.stack([none, *(none if x is None else checksum(x).to(world.device) for x in tensors)])
    rows = [torch.empty_like(mine) for _ in range(world.size)]
    if world.size == 1:
        rows = [mine]
    else:
        work = dist.all_gather(rows, mine, async_op=True)
        world.failures.wait(work, "the comparison of copies of parameters", range(world.size))
    return [row.tolist()[1:] for row in rows]


def take_from(world: World, root: int, tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with those of one rank, several at a time.

    Raises:
        WorkerError: a rank did not come within the timeout; names it.
    """
    if world.size == 1:
        return
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        own = alike.setdefault(tensor.dtype, [])
        if own and sum(x.nbytes for x in own) + tensor.nbytes > _BYTES_AT_ONCE:
            _take_together(world, root, own)
            own.clear()
        own.append(tensor)
    for own in alike.values():
        if own:
            _take_together(world, root, own)


_BYTES_AT_ONCE = 32 << 20


def _take_together(world: World, root: int, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors of one dtype, in one message."""
    whole = torch.cat([x.detach().to(world.device).flatten() for x in tensors])
    work = dist.broadcast(whole, root, async_op=True)
    world.failures.wait(work, f"the values of rank {root}", range(world.size))
    with torch.no_grad():
        for tensor, values in zip(tensors, whole.split([x.numel() for x in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def int_of_first(world: World, number: int) -> int:
    """The last 63 bits of a number of rank 0, on every rank.

    Raises:
        WorkerError: a rank did not come within the timeout; names it.
    """
    held = torch.tensor(number & (1 << 63) - 1, dtype=torch.int64, device=world.device)
    take_from(world, 0, [held])
    return int(held)


def ints_of_all(world: World, number: int, what: str) -> list[int]:
    """A number of every rank, by rank.

    Raises:
        WorkerError: a rank did not come within the timeout; names it.
    """
    held = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    held[world.rank] = number
    if world.size > 1:
        work = dist.all_reduce(held, async_op=True)
        assert work is not None
        world.failures.wait(work, what, range(world.size))
    found: list[int] = held.tolist()
    return found


def meet(world: World, what: str) -> None:
    """Wait for every rank.

    Raises:
        WorkerError: a rank did not come within the timeout, or failed before; names it.
    """
    if world.size == 1:
        return
    token = torch.zeros(1, device=world.device)
    work = dist.all_reduce(token, async_op=True)
    assert work is not None
    world.failures.wait(work, what, range(world.size))
