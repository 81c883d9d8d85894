"""The newest of several checkpoints that is good for all ranks: each reads what it needs, and all learn what each one
found. It knows places and ranks; not what is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from whale.errors import CheckpointError, WhaleError
from whale.runtime.store import Board

__all__ = ["Agreed", "Mismatch", "newest_good"]

_ReadT = TypeVar("_ReadT")


class Mismatch(CheckpointError):
    """A good checkpoint of something else: an older one would not fit either."""


@dataclass(frozen=True)
class Agreed(Generic[_ReadT]):
    """The first place that all ranks could read, and what it had for this one.

    Attributes:
        place: of the checkpoint.
        found: what this rank has read of it.
        damaged: why those before it are not good, each with the rank that says so.
    """

    place: Path
    found: _ReadT
    damaged: tuple[str, ...]


def newest_good(meeting: Board, places: Sequence[Path], read: Callable[[Path], _ReadT]) -> Agreed[_ReadT]:
    """Read the first of some places that every rank can read; rank 0 warns of those before it.

    Args:
        meeting: of all ranks.
        places: the newest first, at least one, as many on all ranks.
        read: returns what this rank needs of one, and changes nothing.

    Raises:
        CheckpointError: on every rank: none is good, or one that is good is of something else.
        WorkerError: a rank did not come within the timeout.
    """
    world = meeting.world
    damaged: list[str] = []
    for number, place in enumerate(places):
        found, verdict = None, ["", ""]
        try:
            found = [read(place)]
        except Mismatch as error:
            verdict = ["of another", str(error)]
        except WhaleError as error:
            verdict = ["damaged", str(error)]
        except Exception as error:  # the others wait
            verdict = ["unreadable", f"{type(error).__name__}: {error}"]
        meeting.put(f"{number}/{world.rank}", verdict)
        verdicts = [meeting.get(f"{number}/{rank}", rank) for rank in range(world.size)]
        refused = [(rank, kind, why) for rank, (kind, why) in enumerate(verdicts) if kind]
        if not refused:
            assert found is not None
            for text in damaged:
                world.warn(f"a newer checkpoint is damaged, and {place.name} is loaded: {text}")
            return Agreed(place, found[0], tuple(damaged))
        rank, kind, why = next((one for one in refused if one[1] == "of another"), refused[0])
        if kind == "of another":
            raise CheckpointError(f"rank {rank}: {why}")
        damaged.append(f"rank {rank}: {why}")
    before = f"{places[0].parent} has no good checkpoint: " if len(places) > 1 else ""
    raise CheckpointError(before + "; ".join(damaged))
