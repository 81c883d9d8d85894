"""Live bytes of tensors: every storage that exists at the start, and every one that operators allocate.

Bytes are counted operator by operator; temporary buffers inside an operator are not included.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from whale.runtime.host import copied_by
from whale.runtime.owned import HeldUnit

Step = Callable[[], object]


def living() -> dict[int, Tensor]:
    """Every tensor that Python knows, by its storage."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    found += [x.grad for x in found if x.grad is not None]
    return {x.untyped_storage()._cdata: x for x in found if x.device.type == "cpu" and x.layout is torch.strided}


class LiveBytes(TorchDispatchMode):
    """Counts live storages: those at the start, except *others*, of which views are not counted either, and those that
    operators allocate."""

    def __init__(self, others: frozenset[int]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.is_elsewhere = False
        """Whether what is made now stands for tensors in another memory, and is not counted."""
        self._known: dict[int, Any] = {}
        for key, tensor in living().items():
            self._add(tensor, is_counted=key not in others)

    def _add(self, tensor: Tensor, *, is_counted: bool = True) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if is_counted and not self.is_elsewhere else 0

        def gone(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it runs operators on its local tensors, which come here
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result


@contextmanager
def hosted_left_out(live: LiveBytes) -> Iterator[None]:
    """Leave out what would be in the host's memory beside a GPU."""
    make = HeldUnit._on_host

    def elsewhere(make: Any, *of: Any) -> Tensor:
        live.is_elsewhere = True
        found: Tensor = make(*of)
        live.is_elsewhere = False
        return found

    def counted_elsewhere(self: HeldUnit, size: int) -> Tensor:
        return elsewhere(make, self, size)

    HeldUnit._on_host = counted_elsewhere  # type: ignore[method-assign]
    try:
        with copied_by(lambda like: elsewhere(torch.empty_like, like)):
            yield
    finally:
        HeldUnit._on_host = make  # type: ignore[method-assign]


def peak_of(step: Step, live: LiveBytes) -> int:
    """Peak bytes of a step after the first; the smallest of five, because a gloo thread may release a buffer late."""
    step()
    gc.collect()
    peaks = []
    for _ in range(5):
        live.peak = live.now
        step()
        peaks.append(live.peak)
    return min(peaks)
