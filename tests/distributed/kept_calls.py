"""Derivatives of operators as bytes: the processes of a run of tests trace each operator once, and read what another
one wrote.

Only operators of torch's own are kept, whose derivatives depend on their arguments alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch._ops import OpOverload

from tests.distributed.kept_graphs import dumps_if_possible, kept
from whale.strategies import differentiation, traced_call
from whale.strategies.traced_call import Call, Kind, Known, Trace, key_of, known_call, traced

__all__ = ["calls_known_once"]


@contextmanager
def calls_known_once() -> Iterator[None]:
    """Context in which derivatives are made of operators that this run has traced."""
    differentiation.known_call, differentiation.traced = _known, _traced
    try:
        yield
    finally:
        differentiation.known_call, differentiation.traced = known_call, traced


def _key(call: Call, tensors: Sequence[Tensor]) -> Hashable:
    """A key that is the same in all processes; None where there is none."""
    if not isinstance(call.target, OpOverload) or call.target.namespace != "aten":
        return None
    key = key_of(call, tensors)
    return None if " at 0x" in repr(key) else key


def _known(call: Call, tensors: Sequence[Tensor]) -> Known:
    """Do as `known_call`, where this process does not know it."""
    own, key = key_of(call, tensors), _key(call, tensors)
    if key is None or own in traced_call._known:
        return known_call(call, tensors)
    with kept(("known", key)) as file:
        if (found := file.graph) is None:
            known = known_call(call, tensors)
            file.write(dumps_if_possible((known.results, known.saved)))
            return known
    if len(traced_call._known) >= traced_call._MOST_KNOWN:
        traced_call._known.clear()
    traced_call._known[own] = Known(*found)
    return traced_call._known[own]


def _traced(call: Call, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Trace | None:
    """Do as `traced`, where no process of this run has traced it."""
    key = _key(call, tensors)
    if key is None:
        return traced(call, tensors, gradients)
    likes = tuple(None if x is None else Kind.of(x) for x in gradients)
    with kept(("traced", key, likes)) as file:
        if (found := file.graph) is None:
            found = traced(call, tensors, gradients)
            plain = found is not None and not found.modules and not list(found.root.buffers())
            file.write(dumps_if_possible(found) if plain else b"")
    return found
