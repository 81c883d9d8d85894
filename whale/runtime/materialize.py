"""Recording of a model's construction: a model is built without memory, and the shards of this rank are computed later.

`record` runs a function that builds a model. Its tensors are on the meta device: the operators that create or write
them are recorded instead of computed. `Recording.take` computes them afterwards, one tensor at a time, and returns only
the requested parts. Every random operator runs, in the recorded order, on all of its elements, because a generator
cannot skip. So the values, and the final state of the generator, are bitwise those of building the model locally.

Knows tensors and operators; nothing of models, plans or process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from whale.runtime.replay import Call, Incarnation, Recording, Ref, Replay, Resume, bytes_of

__all__ = ["record"]

Result = TypeVar("Result")

_OVERWRITING = {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
    "bernoulli_",
}  # fmt: skip
"""In-place operators whose result does not depend on what was there."""

_ALLOCATING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}


@dataclass(eq=False)
class _Stream:
    """A generator whose draws are recorded. It ticks at every draw, so that its states are distinct."""

    start: Tensor
    draws: dict[bytes, int]
    last: bytes
    count: int = 0


def record(build: Callable[[], Result]) -> tuple[Result, Recording]:
    """Run *build* with tensors on the meta device; return what it returns and the recording.

    Generators are left as they were. A number that the builder asks for (``.item()``) is computed at once.
    Raises :class:`UsageError` if that number is random.
    """
    recorder = _Recorder()
    with _Reads(recorder), recorder, _whole_trunc_normal(recorder):
        result = build()
    return result, recorder.finish()


@contextmanager
def _whole_trunc_normal(recorder: _Recorder) -> Iterator[None]:
    """Record ``trunc_normal_`` as one call: it draws again until what it has drawn is within the bounds."""
    name = "_no_grad_trunc_normal_"
    original = getattr(nn.init, name, None)
    if original is None:
        yield
        return

    def recorded(tensor: Tensor, *args: Any, generator: torch.Generator | None = None) -> Tensor:
        with torch._C.DisableTorchFunction():
            return recorder.draw(original, tensor, *args, generator=generator)

    setattr(nn.init, name, recorded)
    try:
        yield
    finally:
        setattr(nn.init, name, original)


class _Reads(TorchFunctionMode):
    """Handles calls that never reach an operator: values as Python objects, and the device that the builder
    requested."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PYTHON_VALUES and args[0].is_meta:
            with _disable_current_modes():
                return func(self.recorder.value(args[0]), *args[1:], **(kwargs or {}))
        if func in (_DEVICE, _IS_META):
            device = self.recorder.device(args[0])
            return device if func == _DEVICE else device.type == "meta"
        return func(*args, **(kwargs or {}))


_DEVICE, _IS_META = Tensor.device.__get__, Tensor.is_meta.__get__  # type: ignore[attr-defined]
_PYTHON_VALUES = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.incarnations: list[Incarnation] = []
        self.current: dict[int, int] = {}
        self.streams: dict[torch.Generator, _Stream] = {}
        self._stream(torch.default_generator)

    def finish(self) -> Recording:
        ends = {}
        for generator, stream in self.streams.items():
            ends[generator] = self._resume(generator, stream)
            generator.set_state(stream.start)
        starts = {generator: stream.start for generator, stream in self.streams.items()}
        return Recording(self.calls, self.incarnations, self.current, starts, ends)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, schema = func._schema.name.removeprefix("aten::"), func._schema
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        aliases = any(r.alias_info is not None for r in schema.returns)
        written = _written(func, args, kwargs)
        if given and not any(self._is_recorded(x) for x in given) and not draws:
            return func(*args, **kwargs)  # data that the builder brought
        if given and all(not x.is_meta for x in given) and aliases and not written:
            return func(*args, **kwargs)
        if given and schema.returns and not any("Tensor" in str(r.type) for r in schema.returns):
            with torch.no_grad():
                return func(*_values(self, args), **_values(self, kwargs))
        stand_ins = {id(x): x if x.is_meta else _like(x) for x in given}
        result = func(*_replaced(args, stand_ins), **_on_meta(schema, _replaced(kwargs, stand_ins)))
        wanted = kwargs.get("device")
        device = torch.device(wanted) if wanted is not None else self.device(given[0]) if given else torch.device("cpu")
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in stand_ins.values()}
        fresh = [(i, x) for i, x in enumerate(outputs) if x.untyped_storage()._cdata not in known]
        if name in _ALLOCATING:
            self._new(outputs[0].untyped_storage(), device)
        elif fresh or written:
            for index in self._overwritten(name, func._overloadname, given, written):
                old = self.incarnations[index]
                self._new(old.storage, old.device)
            recorded = pytree.tree_map(lambda x: self._ref(x) if isinstance(x, Tensor) else x, (args, kwargs))
            created: dict[int, tuple[int, int]] = {}
            for position, x in fresh:
                if x.untyped_storage()._cdata not in created:
                    created[x.untyped_storage()._cdata] = (position, self._new(x.untyped_storage(), device))
            self._note(func, recorded, written, list(created.values()), given, draws)
        originals = {id(stand_in): x for x in given if (stand_in := stand_ins[id(x)]) is not x}
        return _replaced(result, originals)

    def draw(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record a function that fills a tensor with random numbers as one call."""
        for index in self._overwritten("uniform_", "", [tensor], [tensor]):
            old = self.incarnations[index]
            self._new(old.storage, old.device)
        with _disable_current_modes():
            self._note(function, ((self._ref(tensor), *args), kwargs), [tensor], [], [tensor], True)
        return tensor

    def _note(
        self, func: Any, recorded: Any, written: list[Tensor], created: Any, given: list[Tensor], draws: bool
    ) -> None:
        index = len(self.calls)
        writes = {self._incarnation(x) for x in written} | {i for _, i in created}
        touched = tuple(dict.fromkeys([*(self._incarnation(x) for x in given), *writes]))
        values: dict[int, None] = {}
        after: dict[int, None] = {}
        for i in touched:
            incarnation = self.incarnations[i]
            values.update(dict.fromkeys(incarnation.writers))
            if i in writes:
                after.update(dict.fromkeys(incarnation.readers))
                incarnation.writers.append(index)
                incarnation.readers = []
            else:
                incarnation.readers.append(index)
        call = Call(
            index=index,
            target=func,
            args=recorded[0],
            kwargs=recorded[1],
            created=tuple(created),
            touched=touched,
            draws=draws,
            values=tuple(values),
            after=tuple(after),
        )
        if call.draws:
            given_generator = call.kwargs.get("generator")
            call.generator = given_generator if given_generator is not None else torch.default_generator
            stream = self._stream(call.generator)
            call.resume = self._resume(call.generator, stream)
            torch.rand((), generator=call.generator)
            stream.last = bytes_of(call.generator.get_state())
            stream.draws[stream.last] = stream.count
            stream.count += 1
        self.calls.append(call)

    def _stream(self, generator: torch.Generator) -> _Stream:
        if generator not in self.streams:
            start = generator.get_state()
            self.streams[generator] = _Stream(start, {bytes_of(start): -1}, bytes_of(start))
        return self.streams[generator]

    def _resume(self, generator: torch.Generator, stream: _Stream) -> Resume | None:
        state = generator.get_state()
        found = bytes_of(state)
        if found == stream.last:
            return None
        if found in stream.draws:
            return Resume(None, stream.draws[found])
        return Resume(state, -1)

    def value(self, x: Tensor) -> Tensor:
        """The value of a tensor, from what is recorded so far."""
        ref = self._ref(x)
        run = Replay(Recording(self.calls, self.incarnations, self.current, {}, {}), draw=False)
        run.kept = {ref.incarnation}
        writers = self.incarnations[ref.incarnation].writers
        with torch.no_grad():
            run.need(writers)
            run.plan()
            run.demand(writers)
            return run.tensor(ref)

    def device(self, x: Tensor) -> torch.device:
        """The device that the builder asked for."""
        index = self.current.get(x.untyped_storage()._cdata)
        return x.device if index is None else self.incarnations[index].device

    def _is_recorded(self, x: Tensor) -> bool:
        index = self.current.get(x.untyped_storage()._cdata)
        return x.is_meta or (index is not None and bool(self.incarnations[index].writers))

    # Storages

    def _incarnation(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        if storage._cdata not in self.current:
            index = self._new(storage, x.device)
            if not x.is_meta:
                self.incarnations[index].literal = x.detach()
        return self.current[storage._cdata]

    def _new(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        self.incarnations.append(Incarnation(storage, device))
        self.current[storage._cdata] = len(self.incarnations) - 1
        return len(self.incarnations) - 1

    def _ref(self, x: Tensor) -> Ref:
        return Ref.of(x, self._incarnation(x))

    def _overwritten(self, name: str, overload: str, given: list[Tensor], written: list[Tensor]) -> set[int]:
        """The incarnations that a call replaces whole."""
        if name not in _OVERWRITING and not overload.endswith("out"):
            return set()
        found = set()
        for x in written:
            storage = x.untyped_storage()
            whole = x.numel() * x.element_size() == storage.nbytes() and _dense(x)
            others = [y for y in given if y is not x and y.untyped_storage()._cdata == storage._cdata]
            if whole and not others:
                found.add(self._incarnation(x))
        return found


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _values(recorder: _Recorder, tree: Any) -> Any:
    return pytree.tree_map(lambda x: recorder.value(x) if isinstance(x, Tensor) else x, tree)


def _replaced(tree: Any, by: Mapping[int, Tensor]) -> Any:
    return pytree.tree_map(lambda x: by.get(id(x), x), tree)


def _on_meta(schema: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Run operators that make new tensors on the meta device."""
    instead = {"device": torch.device("meta"), "pin_memory": None}
    return kwargs | {a.name: instead[a.name] for a in schema.arguments if a.name in instead}


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call writes to."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return found


def _dense(x: Tensor) -> bool:
    """Whether the elements lie one after the other, in some order of the dims."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
