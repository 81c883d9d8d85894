"""A recorder of operators on a CPU, in place of CUDA graphs, which breaks what relies on more than those give.

A replay runs the recorded operators with the numbers, sizes and memory of the recording, and writes to the memory that
they had. What was gone when a piece was recorded is overwritten before this piece is replayed, as memory of a pool is
that is used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from whale.runtime.cuda_graphs import Recorded, solid
from whale.runtime.messages import _uses


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _Operators(TorchDispatchMode):
    """The operators that run, with their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found


class CpuRecorder:
    """Records operators, for one rank."""

    made: ClassVar[list[CpuRecorder]] = []

    def __init__(self, device: torch.device) -> None:
        self.lent: list[Tensor] = []  # whose memory is used again when others have left it
        self.held: Counter[int] = Counter()  # tensors that the recorder has of each memory
        self.num_recorded = self.num_replayed = self.num_broken = 0
        CpuRecorder.made.append(self)

    def record(self, function: Callable[..., Any], operands: Sequence[Tensor], fixed: Sequence[bool]) -> Recorded:
        free = self._left()
        own = [
            x if stays else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
            for x, stays in zip(operands, fixed, strict=True)
        ]
        mine = [self._same(x) for x, stays in zip(own, fixed, strict=True) if not stays]
        for x, to in zip(operands, own, strict=True):
            if to is not x:
                solid(to).copy_(solid(x))
        with _Operators() as mode:
            results = function(*own)
        calls = pytree.tree_map_only(Tensor, self._same, mode.calls)
        mode.calls.clear()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            self.num_broken += len(free)
            _break(free)
            for func, args, kwargs, found in calls:
                again = func(*args, **kwargs)
                there = set(map(_memory, _tensors((args, kwargs))))
                for old, new in zip(_tensors(found), _tensors(again), strict=True):
                    if _memory(old) not in there:
                        old.copy_(new)
            _break(mine)

        return Recorded(own, results, replay)

    def unowned(self, x: Tensor) -> Tensor:
        self.lent.append(self._same(x))
        return self._same(x)

    def wait(self) -> None:
        pass

    def _same(self, x: Tensor) -> Tensor:
        self.held[_memory(x)] += 1
        return x.detach()

    def _left(self) -> list[Tensor]:
        """The lent tensors of which only the recorder has the memory."""
        return [x for x in self.lent if _uses(x) == self.held[_memory(x)]]


def _break(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        if x.is_floating_point():
            solid(x).fill_(torch.nan)
