"""Gradient sums that overlap the last backward of a step.

Whale's reducer starts a bucket as soon as the last backward has made its gradients, last layers first, one bucket after
the other. So only that part of the sums is exposed for which the backward of the layers before has no time, and at
least the last bucket; beside them the computation is slower. The search, whose tables have sums up to each part of the
chain, and the workload of a plan use the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Beside", "Overlap", "largest_lead", "overlap"]


class Beside(NamedTuple):
    """How computation and a gradient sum slow each other: both as the part by which they take longer."""

    slowdown: float
    stretch: float = 0.0

    @property
    def rate(self) -> float:
        """Seconds of a sum (alone) that fit beside a second of backward (alone)."""
        return (1 + self.slowdown) / (1 + self.stretch)


class Overlap(NamedTuple):
    """Seconds of a stage's gradient sums.

    Attributes:
        exposed: after the backward.
        hidden: of the backward, as it is alone, that sums run beside.
        added: by which the step is longer than with no sums: what is exposed, and what the backward is slower.
    """

    exposed: float
    hidden: float
    added: float


def overlap(total: float, lead: float, message: float, beside: Beside, backward: float) -> Overlap:
    """Return how gradient sums overlap the last backward of their stage.

    Args:
        total: seconds of all sums of the stage.
        lead: the most by which the sums of its first layers, whichever, outlast their backwards (`largest_lead`).
        message: seconds of one bucket, the last of which has nothing to hide behind.
        beside: how both slow each other.
        backward: seconds of the backward; before the first bucket it has the part of it that makes a bucket, if sums
            outlast it.

    >>> overlap(total=6.0, lead=2.0, message=0.5, beside=Beside(0.25), backward=12.0)
    Overlap(exposed=2.5, hidden=2.8, added=3.2)
    >>> overlap(total=6.0, lead=4.0, message=0.5, beside=Beside(0.0), backward=2.4).exposed
    4.2
    """
    filling = min(message, beside.rate * backward * message / total) if total else 0.0
    exposed = min(total, max(message, filling + max(0.0, lead)))
    hidden = (total - exposed) / beside.rate
    return Overlap(exposed, hidden, exposed + beside.slowdown * hidden)


def largest_lead(layers: Iterable[tuple[float, float]], beside: Beside) -> float:
    """Return the most by which sums outlast backwards over the first layers of a stage, whichever.

    Args:
        layers: seconds of the gradient sum and of the backward of each, from the first.
        beside: how both slow each other.

    >>> largest_lead([(3.0, 1.0), (3.0, 1.0), (1.0, 9.0)], Beside(0.0))
    4.0
    """
    lead = most = 0.0
    for summed, backward in layers:
        lead += summed - beside.rate * backward
        most = max(most, lead)
    return most
