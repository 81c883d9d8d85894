"""Key-value messages between ranks through the rendezvous store.

A waiting rank looks at the store now and then, and no collective runs: a wait on the store's socket ends with a
warning of torch for each limit that it has. It knows ranks, names and JSON, not the content of messages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from whale.errors import WhaleError, WorkerError
from whale.runtime.failure import LOST
from whale.runtime.launch import World

__all__ = ["Board", "from_first"]

SHORTEST_SECONDS, LONGEST_SECONDS = 0.001, 0.25
"""Between two looks at the store: a tenth of the time that a rank has waited, within these."""

GRACE_SECONDS = 3.0
"""Time after a rank was lost for messages of the others."""


class Board:
    """Messages by name, for all ranks; a table for one process.

    Args:
        world: the ranks that write and read.
        topic: of the messages, for errors. All ranks make the boards of a topic in one order.
        patience_seconds: timeout of a wait for a message.
    """

    def __init__(self, world: World, topic: str, patience_seconds: float = 600.0) -> None:
        self.world, self.topic, self.patience_seconds = world, topic, patience_seconds
        self._own: dict[str, Any] = {}
        self._number = world.store.add(f"{topic}/boards/{world.rank}", 1) if world.store is not None else 0

    def put(self, key: str, value: Any) -> None:
        """Write a message that is representable in JSON."""
        if self.world.store is None:
            self._own[key] = value
        else:
            self.world.store.set(f"{self.topic}/{self._number}/{key}", json.dumps(value))

    def forget(self, keys: Iterable[str]) -> None:
        """Delete messages, which all ranks have read."""
        for key in keys:
            if self.world.store is None:
                self._own.pop(key, None)
            else:
                self.world.store.delete_key(f"{self.topic}/{self._number}/{key}")

    def get(self, key: str, writer: int | None) -> Any:
        """Wait for a message of rank *writer* and return it; None: of any rank.

        Raises:
            WorkerError: the wait timed out, or a rank was lost meanwhile; names the writer.
        """
        store = self.world.store
        if store is None:
            return self._own[key]
        name = f"{self.topic}/{self._number}/{key}"
        begin = time.monotonic()
        end, is_lost = begin + self.patience_seconds, False
        try:
            while not store.check([name]):
                now = time.monotonic()
                if now > end:
                    lost = f"{GRACE_SECONDS:g} s after other communication had failed"
                    raise TimeoutError(f"within {lost if is_lost else f'{self.patience_seconds:g} s'}")
                if not is_lost and store.check([LOST]):
                    is_lost, end = True, min(end, now + GRACE_SECONDS)
                time.sleep(min(max(SHORTEST_SECONDS, (now - begin) / 10), LONGEST_SECONDS, max(0.0, end - now)))
            return json.loads(store.get(name))
        except (RuntimeError, TimeoutError) as error:
            ranks = range(self.world.size) if writer is None else (writer,)
            raise self.world.failures.lost(f"{key} of the {self.topic}", ranks, error) from error


def from_first(world: World, topic: str, make: Callable[[], str], *, patience_seconds: float) -> str:
    """Broadcast a text that rank 0 makes; the others wait for it.

    Raises:
        WorkerError: rank 0 failed to make it, or took longer than *patience_seconds*.
    """
    board = Board(world, topic, patience_seconds)
    if world.rank == 0:
        try:
            made = make()
        except BaseException as error:
            board.put("failure", f"rank 0: {error or type(error).__name__}")
            board.put("code", error.exit_code if isinstance(error, WhaleError) else WorkerError.exit_code)
            board.put("made", None)
            raise
        board.put("made", made)
        return made
    text = board.get("made", 0)
    if text is None:
        raise WorkerError.after(board.get("code", 0), str(board.get("failure", 0)))
    return str(text)
