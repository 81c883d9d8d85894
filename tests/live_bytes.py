"""How many bytes of tensors live on the CPU, counted operator by operator: the oracle of predicted memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def storages() -> dict[int, Tensor]:
    """Every tensor that Python knows, by its storage."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    found += [x.grad for x in found if x.grad is not None]
    return {x.untyped_storage()._cdata: x for x in found if x.device.type == "cpu"}


class LiveBytes(TorchDispatchMode):
    """Counts the storages that live: those there at the start, but for *others*, and those that operators make."""

    def __init__(self, others: frozenset[int]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}
        for key, tensor in storages().items():
            if key not in others:
                self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
            return

        def gone(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result
