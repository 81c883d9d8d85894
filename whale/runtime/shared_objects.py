"""Objects of a local model that its parallel model has too, as configurations and schedules.

A script that has made ``config`` for a model changes it between steps, and its loss reads it, wherever the model is:
the parallel model has the same object, not a copy. So it does with tensors that are no state of the model, as a table
that the script writes to. An object that reaches a module, a parameter or a buffer is copied with the model: those of
the parallel model are others. Knows objects; no ranks and no steps.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterator
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from whale.ir.objects import slots_of

__all__ = ["shared_objects"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, range, torch.device, torch.dtype, torch.Size)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_STANDARD = frozenset(nn.Module().__dict__)

_MOST = 100_000
"""Objects in one of a model's attributes from which on it is copied."""


def shared_objects(model: nn.Module, copied: nn.Module) -> dict[int, Any]:
    """The objects of a model that reach no module and none of its states, by the identity of their copies in a copy of
    it."""
    found: dict[int, Any] = {}
    states = {id(x) for x in chain(copied.parameters(), copied.buffers())}
    for (_, module), (_, other) in zip(model.named_modules(), copied.named_modules(), strict=True):
        for x, its in _pairs_of(module, other):
            pairs: dict[int, Any] = {}
            if _are_alike(x, its, pairs, states):
                found |= pairs
    return found


def _pairs_of(module: nn.Module, other: nn.Module) -> Iterator[tuple[Any, Any]]:
    """The attributes and hooks of a module, each with that of a copy of it."""
    tables = [(vars(module), vars(other))]
    tables += [(getattr(module, name), getattr(other, name)) for name in _HOOKS]
    for table, copies in tables:
        for name, x in table.items():
            if name not in _STANDARD and name in copies:
                yield x, copies[name]


def _are_alike(x: Any, other: Any, pairs: dict[int, Any], states: Collection[int]) -> bool:
    """Whether an object and its copy are alike in all that they reach, which is of no model, and no state of one; adds
    these to *pairs*."""
    waiting = [(x, other)]
    while waiting:
        one, its = waiting.pop()
        if one is its or id(its) in pairs or isinstance(one, _PLAIN):
            if pairs.get(id(its), one) is not one and not isinstance(one, _PLAIN):
                return False
            continue
        parts = _parts_of(one) if type(one) is type(its) and id(its) not in states else None
        others = _parts_of(its) if parts is not None else None
        if parts is None or others is None or len(parts) != len(others) or len(pairs) > _MOST:
            return False
        pairs[id(its)] = one
        waiting += zip(parts, others, strict=True)
    return True


def _parts_of(x: Any) -> list[Any] | None:
    """The parts of an object in an order that its copies have too; None of one that is copied with a model."""
    kind = type(x)
    if kind is Tensor:
        return None if x.requires_grad else []
    if kind is dict or (isinstance(x, dict) and kind.__module__ == "collections"):
        return list(chain.from_iterable(x.items()))
    if kind in (list, tuple, deque) or (isinstance(x, tuple) and hasattr(x, "_make")):
        return list(x)
    if kind in (set, frozenset):
        return [] if all(isinstance(one, _PLAIN) for one in x) else None
    if isinstance(x, (bytearray, array)) or kind.__module__.partition(".")[0] == "numpy":
        return []
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords]
    if kind.__module__.partition(".")[0] in ("torch", "whale", "builtins") or hasattr(kind, "__deepcopy__"):
        return None
    slots = slots_of(kind)
    if not (slots or hasattr(x, "__dict__")) or isinstance(x, (nn.Module, dict, list, set, tuple)):
        return None
    held = vars(x) if hasattr(x, "__dict__") else {}
    return [getattr(x, name, None) for name in slots if name != "__weakref__"] + list(chain.from_iterable(held.items()))
