"""Where ranks leave each other notes before, or beside, what they do together: the store of the launch.

Ranks that wait here wait at a socket: nothing turns and no collective runs. Knows ranks, names and JSON, not what the
notes are about.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from whale.errors import WorkerError
from whale.runtime.launch import World

__all__ = ["Board", "from_first"]


class Board:
    """Notes by name, for all ranks; for one process a table.

    Args:
        world: whose ranks write and read.
        topic: what the notes are about, for messages. All ranks make their boards of a topic in one order.
        patience_seconds: the longest wait for a note.
    """

    def __init__(self, world: World, topic: str, patience_seconds: float = 600.0) -> None:
        self.world, self.topic, self.patience_seconds = world, topic, patience_seconds
        self._own: dict[str, Any] = {}
        self._number = world.store.add(f"{topic}/boards/{world.rank}", 1) if world.store is not None else 0

    def put(self, key: str, value: Any) -> None:
        """Leave a note that JSON can hold."""
        if self.world.store is None:
            self._own[key] = value
        else:
            self.world.store.set(f"{self.topic}/{self._number}/{key}", json.dumps(value))

    def get(self, key: str) -> Any:
        """Wait for a note and read it.

        Raises:
            WorkerError: it did not come in time.
        """
        store = self.world.store
        if store is None:
            return self._own[key]
        try:
            store.wait([f"{self.topic}/{self._number}/{key}"], timedelta(seconds=self.patience_seconds))
            return json.loads(store.get(f"{self.topic}/{self._number}/{key}"))
        except RuntimeError as error:
            raise self.world.failures.lost(f"{key} of the {self.topic}", (), error) from error


def from_first(world: World, topic: str, make: Callable[[], str], *, patience_seconds: float) -> str:
    """The text that rank 0 makes, on all ranks; the others wait for it.

    Raises:
        WorkerError: rank 0 failed to make it, or took longer than *patience_seconds*.
    """
    board = Board(world, topic, patience_seconds)
    if world.rank == 0:
        try:
            made = make()
        except BaseException as error:
            board.put("failure", f"rank 0: {error or type(error).__name__}")
            board.put("made", None)
            raise
        board.put("made", made)
        return made
    text = board.get("made")
    if text is None:
        raise WorkerError(str(board.get("failure")))
    return str(text)
