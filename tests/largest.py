"""The largest error of several, none of which is passed over: `max` passes over what is not a number."""

from __future__ import annotations

from math import inf, isnan

__all__ = ["largest"]


def largest(*errors: float) -> float:
    """The largest error; one that is not a number is larger than any."""
    return max(inf if isnan(error) else error for error in errors)
