"""Python's collector of cyclic garbage.

Graphs are hundreds of thousands of objects that stay, so a collector that looks at all of them after every few hundred
new ones takes an eighth of the time in which they are made, and finds next to nothing.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["without_collections"]

P = ParamSpec("P")
R = TypeVar("R")


def without_collections(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that nothing is collected while it runs. After it collections go on if they did before."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return call
