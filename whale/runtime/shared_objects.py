"""Objects of a local model that its parallel model has too, as configurations and schedules.

A script that has made ``config`` for a model changes it between steps, and its loss reads it, wherever the model is:
the parallel model has the same object, not a copy. So it does with tensors that are no state of the model, as a table
that the script writes to. An object that reaches a module, a parameter or a buffer is copied with the model: those of
the parallel model are others. Knows objects; no ranks and no steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from whale.ir.objects import parts_of

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
    states = {id(x) for x in chain(copied.modules(), copied.parameters(), copied.buffers())}
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
        if isinstance(one, _PLAIN) or id(its) in pairs:
            if not isinstance(one, _PLAIN) and pairs[id(its)] is not one:
                return False
            continue
        if one is its:
            pairs[id(its)] = one
            continue
        parts = _parts_of(one) if type(one) is type(its) and id(its) not in states else None
        others = _parts_of(its) if parts is not None else None
        if parts is None or others is None or len(parts) != len(others) or len(pairs) > _MOST:
            return False
        pairs[id(its)] = one
        waiting += zip(parts, others, strict=True)
    return True


def _parts_of(x: Any) -> list[Any] | None:
    """The parts of an object; None of one that is copied with a model."""
    if isinstance(x, Tensor):
        return [] if type(x) in (Tensor, nn.Parameter) and x.is_leaf else None
    return parts_of(x)
