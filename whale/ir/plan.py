"""What the planner decided, as data: readable, diffable, editable, never executable.

A plan names devices, degrees, shares and the schedule. It knows no graph and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whale.errors import InputFileError, PlanMismatchError

MAX_BYTES = 4 * 2**20
"""Larger plan files are refused."""


class PlanStage(BaseModel):
    """The ranks of one stage, row-major over its mesh."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    ranks: list[int]


class Plan(BaseModel):
    """A decided way to run a model.

    ``version`` is of the format. ``stages`` may be empty: then the annotations decide.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: Literal[1] = 1
    world_size: int = Field(ge=1)
    micro_batches: int = Field(default=1, ge=1)
    schedule: str = "1f1b"
    stages: list[PlanStage] = Field(default_factory=list)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Read a plan file. Raises :class:`InputFileError` for anything that is not one."""
        file = Path(path)
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise InputFileError(f"cannot be read: {error.strerror}", path=path) from error
        if len(raw) > MAX_BYTES:
            raise InputFileError(f"is {len(raw)} bytes long; a plan has at most {MAX_BYTES}", path=path)
        try:
            return cls.model_validate(json.loads(raw), strict=True)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            text = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
            where = ".".join(map(str, error.errors()[0]["loc"])) if isinstance(error, ValidationError) else ""
            raise InputFileError(
                f"is not a plan: {where + ': ' if where else ''}{text}", path=path, line=line
            ) from error

    def dumps(self) -> str:
        """The plan as JSON, the same bytes for the same plan."""
        return json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n"

    def check_world(self, world_size: int) -> None:
        """Refuse a number of ranks that the plan was not made for."""
        if world_size != self.world_size:
            raise PlanMismatchError(
                f"the plan's world_size is {self.world_size}, but {world_size} {_were(world_size)} started; use "
                f"torchrun with {self.world_size} processes in total, or make a plan for {world_size}"
            )

    def check_stages(self, stages: Sequence[Sequence[int]]) -> None:
        """Refuse a model whose annotated stages are on other ranks than the plan's."""
        planned = [stage.ranks for stage in self.stages]
        found = [list(ranks) for ranks in stages]
        if planned and planned != found:
            raise PlanMismatchError(
                f"the plan's stages are on ranks {planned}, but the model's are on {found}; annotate the model as it "
                "was when the plan was made, or make a new plan"
            )


def _were(count: int) -> str:
    return "process was" if count == 1 else "processes were"
