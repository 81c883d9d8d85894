"""Jobs that share a cluster, and their file: what each trains, how much is left, and what it may take.

A `Jobs` is frozen data; it knows no cluster and no speeds.
"""

from __future__ import annotations

from collections import Counter
from os import PathLike
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from whale.ir.document import Document, Format, parse_document, read_document
from whale.ir.record import Record, read_record

__all__ = ["Job", "Jobs"]

MAX_JOBS = 1_000
MOST = 2**40
"""Limit on rows and batches, as in plans."""

_Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
_Rows = Annotated[int, Field(ge=1, le=MOST)]


class Job(Record):
    """A training job.

    Attributes:
        name: unique in the file, of letters, digits, dots, dashes and underscores.
        profile: file of the model's profile, relative to the jobs file; or
        model: ``file.py:callable`` or ``hf:<model_type>``, as of ``--model``, with its settings in
        set: by name.
        batch: rows of the global batch, or several that the job allows.
        rows: that are left to train, counted at the smallest batch.
        weight: of its completion time.
        noise_scale: the gradient noise scale in rows: a batch of B needs (noise_scale + B) / (noise_scale + b) times
            the rows of the smallest batch b for the same progress (McCandlish et al., 2018); None: as many.
        precision: as of ``--precision``; None: the model's.
        optimizer: whose states must fit in memory.
        max_devices: limit on the number of devices; None: none.
        devices: number of devices by type that the job runs on now; a job that gets others restarts.
    """

    name: Annotated[str, StringConstraints(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    profile: _Name | None = None
    model: _Name | None = None
    set: dict[_Name, bool | int | float | str] = Field(default={})
    batch: Annotated[tuple[_Rows, ...], Field(min_length=1, max_length=64)]
    rows: _Rows
    weight: Annotated[float, Field(ge=1e-9, le=1e9)] = 1.0
    noise_scale: Annotated[float, Field(gt=0, le=1e15)] | None = None
    precision: _Name | None = None
    optimizer: _Name = "adamw"
    max_devices: Annotated[int, Field(ge=1, le=MOST)] | None = None
    devices: dict[_Name, Annotated[int, Field(ge=0, le=MOST)]] = Field(default={})

    @field_validator("batch", mode="before")
    @classmethod
    def _of_one(cls, given: Any) -> Any:
        return tuple(given) if isinstance(given, list | tuple) else (given,)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.profile is None and self.model is None:
            raise ValueError(f"job {self.name!r} has neither profile nor model; give one")
        if self.profile is not None and self.model is not None:
            raise ValueError(f"job {self.name!r} has both profile and model; give one")
        if self.set and self.model is None:
            raise ValueError("set: is for model")
        if len(set(self.batch)) < len(self.batch):
            raise ValueError("batch: a number is there twice")
        return self

    def rows_for(self, batch: int) -> float:
        """Rows that are left to train at this batch.

        >>> Job(name="a", profile="a.json", batch=(64, 192), rows=1000, noise_scale=64).rows_for(192)
        2000.0
        """
        if self.noise_scale is None:
            return float(self.rows)
        return self.rows * (self.noise_scale + batch) / (self.noise_scale + min(self.batch))


class Jobs(Record):
    """The jobs of a cluster.

    Attributes:
        jobs: in the order in which they came.
        restart_seconds: for which a job makes no progress whenever its devices change: to save, start, search and load.
    """

    format_version: Annotated[int, Field(ge=1, le=1)] = 1
    restart_seconds: Annotated[float, Field(ge=0, le=1e6)] = 60.0
    jobs: Annotated[tuple[Job, ...], Field(min_length=1, max_length=MAX_JOBS)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        twice = [name for name, count in Counter(job.name for job in self.jobs).items() if count > 1]
        if twice:
            last = max(index for index, job in enumerate(self.jobs) if job.name == twice[0])
            raise ValueError(f"jobs.{last}.name: two jobs are named {twice[0]!r}; give each its own name")
        names = {job.name for job in self.jobs}
        for index, job in enumerate(self.jobs):
            if job.name.endswith(".cluster") and job.name.removesuffix(".cluster") in names:
                other = job.name.removesuffix(".cluster")
                raise ValueError(f"jobs.{index}.name: {job.name!r} names the cluster file of {other!r}; choose another")
        return self

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a file in TOML, YAML or JSON, by its suffix.

        Raises:
            InputFileError: whatever is wrong with it, with the line.
        """
        return cls.of_document(read_document(path))

    @classmethod
    def parse(cls, text: str, *, format: Format = "toml", source: str = "<text>") -> Self:
        """Parse text; *source* is its name in errors."""
        return cls.of_document(parse_document(text, format, source=source))

    @classmethod
    def of_document(cls, document: Document) -> Self:
        """Convert a parsed document."""
        return read_record(cls, document)
