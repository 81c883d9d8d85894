"""Record of a search, for ``whale report``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whale.cli.plan_text import fullest
from whale.cli.search_text import against_the_best, in_short
from whale.ir.search_record import MAX_POINTS, MAX_SHARE, RecordedCandidate, RecordedDrop, RecordedPoint, SearchRecord

if TYPE_CHECKING:
    from whale.commands.plan_writer import Choice
    from whale.commands.searching import Searched
    from whale.ir.cluster import Cluster

__all__ = ["record_of"]

_MOST_CHARACTERS = 1000


def record_of(searched: Searched, cluster: Cluster) -> SearchRecord:
    """The record of a search on a cluster: the same for the same search.

    Plans that turned out not to compile or not to fit are points, with the reason. The seconds that the search took
    are left out, as they differ from run to run.
    """
    found = searched.found
    points = [
        RecordedPoint(
            seconds=one.seconds,
            memory=min(one.memory, MAX_SHARE),
            label=_text(one.label),
            reason=_text(one.reason),
        )
        for one in found.points
    ]
    refused = [
        RecordedPoint(
            seconds=choice.prediction.step_seconds,
            memory=_memory(choice),
            label=_text(in_short(choice.candidate, cluster)),
            reason=_text(choice.reason),
        )
        for choice in searched.refused
    ]
    return SearchRecord(
        plan=searched.best.plan.digest(),
        candidates=tuple(
            RecordedCandidate(
                label=_text(in_short(choice.candidate, cluster)),
                seconds=choice.prediction.step_seconds,
                memory=_memory(choice),
                bubble=choice.prediction.bubble,
                mfu=choice.prediction.mfu,
                micro_batches=choice.candidate.micro_batches,
                schedule=choice.candidate.schedule,
                why="" if choice is searched.best else _text(against_the_best(choice, searched.best)),
            )
            for choice in searched.choices
        ),
        points=tuple((refused + points)[:MAX_POINTS]),
        dropped=tuple(
            RecordedDrop(family=_text(one.family), reason=_text(one.reason), count=one.count) for one in found.dropped
        ),
        bound_seconds=found.bound_seconds,
        tried=found.tried,
    )


def _memory(choice: Choice) -> float:
    device = fullest(list(choice.prediction.memory))
    return min(device.share, MAX_SHARE)


def _text(text: str) -> str:
    return text[:_MOST_CHARACTERS]
