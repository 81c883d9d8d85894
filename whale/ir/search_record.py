"""Record of a search, as a file: the best candidates, all scored points, and excluded plans with reasons.

``whale search --record`` writes it and ``whale report`` draws it. This module knows neither how candidates are searched
for nor how they are drawn.
"""

from __future__ import annotations

from os import PathLike
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from whale.ir.files import write_file
from whale.ir.json_text import format_json
from whale.ir.plan import Hash, Name
from whale.ir.record import FileRecord, Record
from whale.ir.workload import Seconds

__all__ = ["MAX_POINTS", "MAX_SHARE", "RecordedCandidate", "RecordedDrop", "RecordedPoint", "SearchRecord"]

MAX_POINTS = 20_000
"""Limit on recorded points: the best and a sample of the others."""

MAX_SHARE = 1e9
"""Limit on recorded shares."""

Text = Annotated[str, StringConstraints(max_length=1000)]
Share = Annotated[float, Field(ge=0, le=MAX_SHARE, allow_inf_nan=False)]


class RecordedPoint(Record):
    """A scored point.

    Attributes:
        seconds: of a step.
        memory: of the fullest device, as a fraction of its capacity; `MAX_SHARE` where the framework leaves it none.
        label: a short description.
        reason: why it cannot run; empty if it can.
    """

    seconds: Seconds
    memory: Share
    label: Text
    reason: Text = ""


class RecordedCandidate(Record):
    """One of the best candidates, simulated.

    Attributes:
        label: its stages and degrees in a few words, such as ``A100 x8 (4 x 2) | V100 x8 (8 x 1)``.
        seconds, memory: like `RecordedPoint`.
        bubble, mfu: like `whale.ir.workload.Prediction`.
        micro_batches, schedule: its own.
        why: what makes it slower than the best; empty for the best.
    """

    label: Text
    seconds: Seconds
    memory: Share
    bubble: Annotated[float, Field(ge=0, le=1)] = 0.0
    mfu: Share = 0.0
    micro_batches: Annotated[int, Field(ge=1)] = 1
    schedule: Name = "1f1b"
    why: Text = ""


class RecordedDrop(Record):
    """Number of plans of a family (such as ``tensor 8``) that were dropped for one reason."""

    family: Text
    reason: Text
    count: Annotated[int, Field(ge=1)]


class SearchRecord(FileRecord):
    """The record of one search.

    Attributes:
        version: of the format.
        plan: the digest of the resulting plan, so that the record is not shown with another plan; empty: unknown.
        candidates: best first.
        points: in any order; no more than `MAX_POINTS`.
        dropped: plans that were not scored, or scored and rejected, by family and reason.
        bound_seconds: no plan of the space takes less.
        tried: number of scored plans.
        seconds: search time; 0: omitted, so that the same search gives the same bytes.
    """

    version: Literal[1] = 1
    plan: Hash = ""
    candidates: Annotated[tuple[RecordedCandidate, ...], Field(max_length=1000)] = ()
    points: Annotated[tuple[RecordedPoint, ...], Field(max_length=MAX_POINTS)] = ()
    dropped: Annotated[tuple[RecordedDrop, ...], Field(max_length=10_000)] = ()
    bound_seconds: Seconds = 0.0
    tried: Annotated[int, Field(ge=0)] = 0
    seconds: Seconds = 0.0

    def dumps(self) -> str:
        """The record as JSON, deterministic and without default values."""
        return format_json({"version": self.version, **self.model_dump(mode="json", exclude_defaults=True)})

    def save(self, path: str | PathLike[str]) -> None:
        """Write `dumps` to a file."""
        write_file(path, (self.dumps(),))
