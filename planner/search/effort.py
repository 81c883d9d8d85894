"""How much a search tries: what it does in the half second that it usually takes, and what if it may take longer."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["QUICK", "THOROUGH", "Effort"]


class Effort(NamedTuple):
    """How much a search tries.

    Attributes:
        micro_batches: numbers of micro-batches for which families are solved at first, where a batch has more divisors;
            then those next to the best, as long as that helps.
        families: quota programs that are solved for a set of numbers of micro-batches, from the first that leads to
            something: for two types of devices, and as many for each type more. Those that could be better than the
            best so far are all solved.
        near: families that could at best come to so many times the best so far are dropped.
        sequences: of all quota programs, that are cut and scored, for types as ``families``.
        cut_exactly: of these, that get their exact cuts.
        refined: drafts from which a descent starts.
        restarts: how often another descent starts near the best, some random moves away.
        stages_refined: of all drafts that a descent scores.
    """

    micro_batches: int
    families: int
    near: float
    sequences: int
    cut_exactly: int
    refined: int
    restarts: int
    stages_refined: int


QUICK = Effort(
    micro_batches=5, families=12, near=1.1, sequences=16, cut_exactly=4, refined=3, restarts=3, stages_refined=2_000
)
THOROUGH = Effort(
    micro_batches=10, families=60, near=1.25, sequences=64, cut_exactly=12, refined=8, restarts=10, stages_refined=8_000
)
