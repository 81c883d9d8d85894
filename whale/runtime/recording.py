"""Calls that a trace of operators records as they are, and does not look into: collectives and random masks.

A module that is called through :func:`call` runs, except while a trace is made (:func:`recording`): then the trace has
one operator for it, which stands for the module in the traced graph. It knows modules and tensors; not why they are
traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Recordable", "call", "is_recording", "recorded", "recording"]


class Recordable(Protocol):
    """A module that maps tensors to one tensor with its own memory, or to one of them that it may write to."""

    @property
    def __call__(self) -> Callable[..., Any]:
        """Run it."""
        ...

    @property
    def without_data(self) -> Callable[..., Tensor]:
        """A tensor in the shape, strides, dtype and device of its result, with its own memory."""
        ...


_library = torch.library.Library("whale_recording", "DEF")
_library.define("call(Tensor[] tensors, int number) -> Tensor")
_recordings: list[dict[int, Recordable]] = []
_numbers = itertools.count()


def _without_data(tensors: list[Tensor], number: int) -> Tensor:
    return _recordings[-1][number].without_data(*tensors)


torch.library.register_fake("whale_recording::call", _without_data, lib=_library)
recorded = torch.ops.whale_recording.call.default
"""The operator of a recorded call: its tensors, and a number of the module, which no other recording uses: caches of
what operators return know the arguments alone."""


@contextmanager
def recording() -> Iterator[Mapping[int, Recordable]]:
    """Context in which calls are recorded; gives their modules by number."""
    _recordings.append({})
    try:
        yield _recordings[-1]
    finally:
        _recordings.pop()


def is_recording() -> bool:
    """Whether calls are recorded."""
    return bool(_recordings)


def call(module: Recordable, *tensors: Tensor) -> Tensor:
    """The result of a module, or a record of it."""
    if not _recordings:
        result: Tensor = module(*tensors)
        return result
    number = next(_numbers)
    _recordings[-1][number] = module
    found: Tensor = recorded(list(tensors), number)
    return found
