"""How often Python looks for garbage in cycles while a verb goes through a model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["seldom_collecting"]

ALLOCATIONS = 3_000_000
"""Objects that are made between two collections of the youngest. Python's own 700 are for programs with few objects: a
captured graph has a million, which would be looked through again and again, and little of it is garbage."""


@contextmanager
def seldom_collecting(*, restored: bool = True) -> Iterator[None]:
    """Collect cycles less often in this block; what no cycle holds goes at once, as ever.

    Args:
        restored: collect as often as before at its end, which looks through all that was made in it; not needed where
            the process ends too.

    >>> with seldom_collecting():
    ...     gc.get_threshold()[0]
    3000000
    >>> gc.get_threshold()[0] < 3000000
    True
    """
    before = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        if restored:
            gc.set_threshold(*before)
