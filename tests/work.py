"""How much a call does, in numbers that are the same on every machine and under every load."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def counted_calls(function: Callable[[], T]) -> tuple[T, int]:
    """The result of `function` and how many functions it called, of Python and built-in ones: a stand-in for its time.

    An algorithm that grows with the square of its input where it should grow with the input shows here as it does in
    seconds, and a busy machine or a large heap does not.
    """
    profile = cProfile.Profile()
    result = profile.runcall(function)
    return result, sum(entry.callcount for entry in profile.getstats())
