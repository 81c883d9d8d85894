"""How much a search tries: what it does by default, and what if it may take longer."""

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
        near: families that could at best reach this multiple of the best step are dropped.
        stages_cut: of all sequences of the quota programs that are cut and scored, for types as ``families``.
        cut_exactly: of these, that get their exact cuts.
        refined: largest number of partial plans from which a descent starts.
        stages_descended: about the total stages of all partial plans that these descents score.
        leaders: of the best plans, near one of which a descent starts again.
        restarts: how often in a row another descent near one of the best, some random moves away, may find no better.
        stages_refined: total stages of all partial plans that a descent scores.
        stages_restarted: about the total stages of all partial plans that restarts score.
    """

    micro_batches: int
    families: int
    near: float
    stages_cut: int
    cut_exactly: int
    refined: int
    stages_descended: int
    leaders: int
    restarts: int
    stages_refined: int
    stages_restarted: int


QUICK = Effort(
    micro_batches=7,
    families=12,
    near=1.1,
    stages_cut=400,
    cut_exactly=4,
    refined=12,
    stages_descended=4_000,
    leaders=1,
    restarts=8,
    stages_refined=1_500,
    stages_restarted=3_000,
)
THOROUGH = Effort(
    micro_batches=10,
    families=60,
    near=1.25,
    stages_cut=1_000,
    cut_exactly=12,
    refined=40,
    stages_descended=64_000,
    leaders=8,
    restarts=30,
    stages_refined=8_000,
    stages_restarted=64_000,
)
