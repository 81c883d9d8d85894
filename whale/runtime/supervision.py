"""Supervision of steps that a device still runs when the host has gone on: any rank's failure ends all ranks in time.

A wait on NCCL holds up the device's queue and not the host. Where another rank fails, no call of a script fails:
kernels wait forever, and the script in the next loss that it reads, or at its exit. Here a thread looks at the step
that the device runs. If another rank has reported a failure, or the step takes longer than the limit of all waits, the
thread says so and aborts communication, which ends the kernels; the next step raises the error. Knows events and
failures; not what a step is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from whale.errors import WhaleError, WorkerError
from whale.runtime.failure import Failures

__all__ = ["Done", "Supervisor"]


class Done(Protocol):
    """Whether the device has come to a point of its queue: an event of CUDA."""

    def query(self) -> bool:
        """Look, without waiting. Raises RuntimeError for a device that has failed."""
        ...


class Supervisor:
    """Looks at the steps of one rank until it fails.

    Args:
        failures: of a connection of its own to the store, because the script's may be in a long wait.
        size: number of ranks.
        abort: ends all communication of this process.
        leave: ends this process, where kernels go on nevertheless.
        poll_seconds: between two looks.
        grace_seconds: for kernels to end after communication was aborted.

    Attributes:
        error: why communication was aborted.
        is_told: whether the script has got the error.
    """

    def __init__(
        self,
        failures: Failures,
        size: int,
        abort: Callable[[], None],
        *,
        leave: Callable[[int], object] = os._exit,
        poll_seconds: float = 0.5,
        grace_seconds: float = 3.0,
    ) -> None:
        self._failures, self._size, self._abort, self._leave = failures, size, abort, leave
        self._poll_seconds, self._grace_seconds = poll_seconds, grace_seconds
        self._steps: deque[tuple[str, Done]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.error: WhaleError | None = None
        self.is_told = False

    def watch(self, what: str, done: Done, timeout_seconds: float) -> None:
        """Look at a step until it is done; *what* describes it, equally on all ranks."""
        self._failures.timeout_seconds = timeout_seconds
        with self._changed:
            self._steps.append((what, done))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="whale-supervisor", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error for which communication was aborted, if it was."""
        if self.error is not None:
            self.is_told = True
            raise self.error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._steps))
                what, done = self._steps[0]
            self.error = self._failure(what, done)
            if self.error is not None:
                self._end(done)
                return
            with self._changed:
                self._steps.popleft()

    def _failure(self, what: str, done: Done) -> WhaleError | None:
        """Why a step does not end; None once it has."""
        failures, begin = self._failures, time.monotonic()
        while True:
            try:
                if done.query():
                    return None
            except RuntimeError as error:
                return failures.failed(what, error, range(self._size))
            first = failures.first()
            if first is not None:
                return WorkerError.after(first.code, f"{first.message} [rank {failures.rank} was in {what}]")
            if time.monotonic() - begin > failures.timeout_seconds:
                late = RuntimeError("its device did not come to the end of it")
                return failures.lost(f"the end of {what}", range(self._size), late)
            time.sleep(self._poll_seconds)

    def _end(self, done: Done) -> None:
        """Say why, end communication, and this process if its device goes on nevertheless."""
        sys.stderr.write(f"whale: {self.error}\n")
        sys.stderr.flush()
        self._abort()
        end = time.monotonic() + self._grace_seconds
        while time.monotonic() < end:
            try:
                if done.query():
                    return
            except RuntimeError:
                return
            time.sleep(self._poll_seconds / 10)
        self._leave(WorkerError.exit_code)
