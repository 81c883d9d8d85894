"""Memory that lives in a dry run: every storage that is made, with its category, until it is freed.

Operators run on fake tensors or on shapes alone. It knows tensors and operators; nothing of stages and steps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from whale.predict.replay import Log
from whale.strategies.dry_run import WithoutData, key_of_call, returns_its_own, tensors_in

__all__ = ["LiveMemory", "memory_of"]

aten = torch.ops.aten


class LiveMemory(WithoutData):
    """Counts live storages by category: registered ones, and those that operators allocate, on shapes alone unless the
    tensors are fake."""

    def __init__(self, *, fake: bool) -> None:
        super().__init__()
        self._fake = fake
        self.now = self.task_peak = self._peak = 0
        self._expected: dict[int, int] = {}
        self._later = 0
        """Bytes of memory that is there and counts only later: of each by its key, and the sum."""
        self.by_purpose: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self._known: dict[int, Any] = {}
        self._purpose: dict[int, str] = {}
        self._newest = 0
        self.log = Log()
        self._elsewhere = False

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor's storage: it is not on the device."""
        storage = memory_of(tensor)
        key = storage._cdata
        self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key))

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Leave out what is made meanwhile."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def begin_task(self) -> None:
        """Reset the peak of the previous task and its allocations."""
        self.task_peak, self._newest = self.now, 0

    def add(self, tensor: Tensor, purpose: str = "activations") -> None:
        """Count a tensor's storage until it is freed."""
        storage = memory_of(tensor)
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def gone(_: object) -> None:
            self.happens("free", self._purpose.pop(key), size)
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self._purpose[key] = purpose
        self._newest = key
        self.happens("add", purpose, size)

    def happens(self, what: str, purpose: str, size: int) -> None:
        """Count bytes that are made (``add``), freed (``free``), or change their category (``from``, then ``to``)."""
        self.log.add(what, purpose, size)
        sign = 1 if what in ("add", "to") else -1
        self.now += sign * size
        self.by_purpose[purpose] += sign * size
        if what == "add":
            self.task_peak = max(self.task_peak, self.now)
            self._look()

    def expect(self, storage: Any) -> None:
        """Count memory only from where it comes."""
        if storage._cdata not in self._expected:
            self._expected[storage._cdata] = storage.nbytes()
            self._later += storage.nbytes()

    def come(self, storage: Any) -> None:
        """Count memory that was expected."""
        if size := self._expected.pop(storage._cdata, 0):
            self._later -= size
            self._look()

    def _look(self) -> None:
        """Note what is there, if that is more than ever before."""
        if self.now - self._later > self._peak:
            self._peak, self.at_peak = self.now - self._later, self.by_purpose.copy()
            self.at_peak["gradients"] -= self._later

    def mark(self, tensor: Tensor, purpose: str) -> None:
        """Set the category of a tensor."""
        self.add(tensor)
        storage = memory_of(tensor)
        key, size = storage._cdata, storage.nbytes()
        self.happens("from", self._purpose[key], size)
        self.happens("to", purpose, size)
        self._purpose[key] = purpose

    def purpose_of(self, tensor: Tensor) -> str | None:
        """The category of a tensor."""
        return self._purpose.get(memory_of(tensor)._cdata)

    def is_new(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is the last that was made."""
        return memory_of(tensor)._cdata == self._newest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        result = _of_fake(func, args, kwargs) if self._fake else self.run(func, args, kwargs)
        if func is not torch.ops.prim.device.default:
            for leaf in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    (self.leave_out if self._elsewhere else self.add)(leaf)
        return result


_NORMS = {
    aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
}  # fmt: skip


def _of_fake(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of an operator on fake tensors; a mask selects all that it may, as on shapes alone."""
    if func is aten.index.Tensor:
        args = (args[0], [one for x in args[1] for one in ([None] if x is None else _all_of(x))])
    elif func is aten.nonzero.default:
        return args[0].new_zeros((args[0].numel(), args[0].dim()), dtype=torch.int64)
    mode, is_own = _mode_of([*args, *kwargs.values()]), returns_its_own(func)
    if mode is not None and not is_own:
        if func in _INTO_FIRST:
            return args[0]
        if _returns_views(func):
            return _views(mode, func, args, kwargs)
    key = key_of_call(func, args, kwargs) if is_own and mode is not None else None
    if key is None or mode is None:
        return _of_kernel(func, args, func(*args, **kwargs))
    if (known := _known.get(key)) is not None:
        return known.of(mode)
    result = _of_kernel(func, args, func(*args, **kwargs))
    if len(_known) < MOST_KNOWN and (found := _Results.like(result, tensors_in([*args, *kwargs.values()]))) is not None:
        _known[key] = found
    return result


class _Results(NamedTuple):
    """Results of an operator on fake tensors of a processor: tensors with their own memory, alone or in this type."""

    kind: type
    shapes: tuple[tuple[Any, ...] | None, ...]

    @classmethod
    def like(cls, result: Any, given: Iterable[Tensor]) -> _Results | None:
        """Results like this one, of an operator that was *given* tensors; None where it is of another kind. An operator
        may return the memory that it was given, although its schema names no alias."""
        leaves = result if isinstance(result, list | tuple) else (result,)
        shapes: list[tuple[Any, ...] | None] = []
        memory = {x.untyped_storage()._cdata for x in given}
        others = len(memory)
        for x in leaves:
            if x is None:
                shapes.append(None)
                continue
            if not isinstance(x, FakeTensor) or not _is_plain(x) or x.storage_offset():
                return None
            size = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
            if x.untyped_storage().nbytes() != (size * x.element_size() if x.numel() else 0):
                return None
            memory.add(x.untyped_storage()._cdata)
            shapes.append((x.shape, x.stride(), x.dtype))
        alone = len(memory) == others + sum(shape is not None for shape in shapes)
        return cls(type(result) if isinstance(result, list | tuple) else Tensor, tuple(shapes)) if alone else None

    def of(self, mode: FakeTensorMode) -> Any:
        """The same again."""
        with no_dispatch():
            made = [
                None
                if shape is None
                else FakeTensor(mode, torch.empty_strided(*shape[:2], dtype=shape[2], device="meta"), _PROCESSOR)
                for shape in self.shapes
            ]
        return made[0] if self.kind is Tensor else self.kind(made)


_INTO_FIRST = {aten.add_.Tensor, aten.copy_.default}
"""Operators that write to their first argument and return it."""


@cache
def _returns_views(func: Any) -> bool:
    """Whether an operator writes nothing, and returns views of its first argument."""
    first, *others = func._schema.arguments
    alike = [one.alias_info for one in (first, *func._schema.returns)]
    return all(one is not None and not one.is_write for one in alike) and all(one.alias_info is None for one in others)


def _views(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The views that an operator returns."""
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    with no_dispatch():
        if isinstance(result, Tensor):
            return FakeTensor(mode, result, _PROCESSOR)
        return type(result)(FakeTensor(mode, x, _PROCESSOR) for x in result)


_PROCESSOR = torch.device("cpu")

MOST_KNOWN = 65536
"""Calls of operators whose results are kept."""

_known: dict[Hashable, _Results] = {}
"""Results by calls. Fake tensors find them ten times as slowly."""


def _mode_of(args: Iterable[Any]) -> FakeTensorMode | None:
    """The mode of an operator's arguments; None if these are not all plain fake tensors of one."""
    found = None
    for x in tensors_in(args):
        if not isinstance(x, FakeTensor) or not _is_plain(x) or found not in (None, x.fake_mode):
            return None
        found = x.fake_mode
    return found


def _is_plain(x: FakeTensor) -> bool:
    """Whether a fake tensor is of a processor and determined by its shape, strides and dtype."""
    return x.fake_device == _PROCESSOR and x.constant is None and x.layout is torch.strided and not x.is_complex()


def _all_of(index: Tensor) -> list[Tensor]:
    """Indices that select as many elements as a mask may; others as they are."""
    if index.dtype != torch.bool:
        return [index]
    return [index.new_zeros(index.numel(), dtype=torch.int64)] * index.dim()


def _of_kernel(func: Any, args: Sequence[Any], result: Any) -> Any:
    """The results of an operator as a processor's kernels return them. Beside parameters in float32 statistics of norms
    have float32, but fake ones the dtype of the input; and fake gradients of grouped ones have float32."""
    if func is aten.native_group_norm_backward.default and result[0] is not None:
        return result[0].to(args[1].dtype), *result[1:]
    if func not in _NORMS or not any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in args):
        return result
    normed, mean, deviation, *more = result
    return normed, mean.float(), deviation.float(), *more


def memory_of(tensor: Tensor) -> Any:
    """The storage of a tensor; of a sparse one, that of its rows."""
    return (tensor._values() if tensor.is_sparse else tensor).untyped_storage()
