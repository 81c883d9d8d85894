"""Warnings in the user's script: at its own line, whichever part of Whale finds out."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn"]

_NOT_THE_USER = ("whale", "torch")


def warn(text: str) -> None:
    """Warn at the innermost line that is neither in Whale nor in torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USER:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
