"""Python's collector of cyclic garbage in the processes of tests, whose graphs are many objects that stay."""

from __future__ import annotations

import gc

__all__ = ["collect_seldom"]


def collect_seldom() -> None:
    """Collect seldom enough to take little time, and often enough that tensors in cycles go."""
    gc.set_threshold(50_000, 10, 10)
