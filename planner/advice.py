"""How the planner says that something does not fit: with what would help. It knows only text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["advised"]


def advised(problem: str, weighed: Sequence[tuple[bool, str]], *, otherwise: str) -> str:
    """*problem* with the changes that would do; with all of them if none does; with *otherwise* if there is none.

    >>> advised("too large", [(True, "2 stages"), (False, "ZeRO 1")], otherwise="give up")
    'too large. It would fit with 2 stages'
    """
    cures = [change for does, change in weighed if does]
    if cures:
        return f"{problem}. It would fit with {', or with '.join(cures)}"
    if weighed:
        return f"{problem}. Not even enough: {'; '.join(change for _, change in weighed)}"
    return f"{problem}; {otherwise}"
