"""Key-value messages between ranks through the rendezvous store.

Waiting ranks block on a socket at first, and look now and then later: torch logs each wait on a socket that times
out, and a search of rank 0 may take minutes. No collective runs. It knows ranks, names and JSON, not the content of
messages.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from whale.errors import WhaleError, WorkerError
from whale.runtime.failure import LOST
from whale.runtime.launch import World

__all__ = ["Board", "from_first"]

SLICE_SECONDS = 1.0
"""Time of the first wait; after it, and after each look, ranks also look whether one was lost."""

LOOK_SECONDS = 0.1
"""Time between two looks for a message that is late."""

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

    def get(self, key: str) -> Any:
        """Wait for a message and return it.

        Raises:
            WorkerError: the wait timed out, or a rank was lost meanwhile, which would have to write it.
        """
        store = self.world.store
        if store is None:
            return self._own[key]
        name = f"{self.topic}/{self._number}/{key}"
        end = time.monotonic() + self.patience_seconds
        lost = False
        try:
            with contextlib.suppress(dist.DistStoreError):
                store.wait([name], timedelta(seconds=max(0.01, min(SLICE_SECONDS, self.patience_seconds))))
            while not store.check([name]):
                if not lost and store.check([LOST]):
                    lost, end = True, min(end, time.monotonic() + GRACE_SECONDS)
                if time.monotonic() > end:
                    raise TimeoutError("timed out")
                time.sleep(LOOK_SECONDS)
            return json.loads(store.get(name))
        except (RuntimeError, TimeoutError) as error:
            raise self.world.failures.lost(f"{key} of the {self.topic}", (), error) from error


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
    text = board.get("made")
    if text is None:
        raise WorkerError.after(board.get("code"), str(board.get("failure")))
    return str(text)
