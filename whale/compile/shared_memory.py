"""Parameters, buffers and other tensors of a model that share memory, as ``register_buffer("last", weight.detach())``:
a step knows them as tensors of their own, and what it writes to one of them is not in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn, strided

from whale.compile.compilation import Compilation
from whale.errors import UsageError

__all__ = ["check_shared_memory"]


class _Stretch(NamedTuple):
    """The memory of a tensor: addresses of its first byte and behind its last."""

    start: int
    stop: int
    name: str


def check_shared_memory(model: nn.Module, compilation: Compilation, plain: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse a model of which one tensor is written to, by the forward or by training, and another one shares its
    memory, where a rank does not have both whole. All ranks find the same.

    Args:
        model: the local model.
        compilation: of it.
        plain: tensors that its code reads and that are neither parameters nor buffers, by name.

    Raises:
        UsageError: names both.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # Others the forward makes before it reads them, as spectral_norm its weight.
    constants = {
        x.untyped_storage().data_ptr()
        for x in compilation.captured.constants.values()
        if isinstance(x, Tensor) and not x.is_meta
    }
    read = [(name, x) for name, x in plain if x.layout == strided and x.untyped_storage().data_ptr() in constants]
    pairs = [pair for pair in _sharing([*tensors.items(), *read]) if not tensors.keys().isdisjoint(pair)]
    if not pairs:
        return
    ranks = sorted({rank for stage in compilation.stages for rank in stage.mesh.ranks})
    parts = [compilation.local_parameters(rank) for rank in ranks]

    def is_whole(name: str) -> bool:
        if not any(name in part for part in parts):  # a buffer, or a parameter that the loss does not read
            return True
        return all(name in part and part[name].shape == tensors[name].shape for part in parts)

    for one, other in pairs:
        written = {one, other} & {*compilation.captured.mutated}
        if written:
            name = written.pop()
            rest = other if name == one else one
            raise UsageError(
                f"the forward writes to the buffer {name}, which shares memory with {rest}: a step has a tensor for "
                "each; keep one of them, and let the forward take the other as a view of it"
            )
        trained = next((name for name in (one, other) if name in tensors and tensors[name].requires_grad), None)
        rest = other if trained == one else one
        if trained and rest not in tensors:
            raise UsageError(
                f"{trained} is trained and shares memory with {rest}, which is no buffer of the model: steps would "
                f"read the values that it has now; let the forward compute {rest} of {trained}"
            )
        if trained and (compilation.units or not (is_whole(one) and is_whole(other))):
            raise UsageError(
                f"{trained} is trained and shares memory with {rest}, but a rank has a part of it, or not both: let "
                f"the forward compute {rest} of {trained}, or leave both whole on every rank (replicate, without zero)"
            )


def _sharing(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """The names of tensors that have memory in common."""
    stretches = sorted(
        _Stretch(x.data_ptr(), x.data_ptr() + _extent(x) * x.element_size(), name)
        for name, x in tensors
        if not x.is_meta and x.numel() and not x.is_sparse
    )
    before: list[_Stretch] = []
    for stretch in stretches:
        before = [one for one in before if one.stop > stretch.start]
        yield from ((one.name, stretch.name) for one in before)
        before.append(stretch)


def _extent(x: Tensor) -> int:
    """Elements from a tensor's first to its last, in memory."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
