"""Failure reports between ranks: a failing rank writes its error, and the others raise it instead of a socket error.

A rank that fails writes its error into the store before it stops. A rank whose wait then fails, or times out, reads it
and raises a `WorkerError` that names the first rank that failed. It knows no stages and no programs, only ranks and
texts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from whale.errors import WhaleError, WorkerError
from whale.runtime.messages import Work

__all__ = ["LOST", "Failures"]

_FAILURE = "whale/failure"
LOST = "whale/lost"
"""Key that a rank sets in the store when others did not come, or closed the connection."""
_GRACE_SECONDS = 1.0
"""Seconds for which a rank that lost another waits for its report; reports are written before connections close."""

_ADVICE_SECONDS = 20.0
"""Limit on the time for advice on memory."""


class Report(NamedTuple):
    """Why a rank stopped: its number, the exit code of its error, and the message."""

    rank: int
    code: int
    message: str


class Failures:
    """The failures of one launch.

    Args:
        rank: this rank.
        store: where all ranks read and write; None for one process.
        timeout_seconds: the longest that any wait may take.

    Attributes:
        memory_advice: says what was predicted of this rank's memory, and what would need less.
    """

    def __init__(self, rank: int, store: dist.Store | None = None, timeout_seconds: float = 60.0) -> None:
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self._store = store
        self.has_reported = False
        self.memory_advice: Callable[[], str] | None = None

    def report(self, message: str, code: int = WorkerError.exit_code) -> None:
        """Report why this rank stops, and its exit code; only the first report of all ranks counts."""
        self.has_reported = True
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store may have gone with the rank that hosts it
                self._store.compare_set(_FAILURE, "", f"{self.rank}:{code}:{message}")

    def first(self, grace_seconds: float = 0.0) -> Report | None:
        """Return the first report, waiting for one up to ``grace_seconds``."""
        if self._store is None:
            return None
        end = time.monotonic() + grace_seconds
        with contextlib.suppress(RuntimeError):
            while not self._store.check([_FAILURE]):
                if time.monotonic() >= end:
                    return None
                time.sleep(0.05)
            rank, code, message = self._store.get(_FAILURE).decode().split(":", 2)
            return Report(int(rank), int(code), message)
        return None

    def wait(self, work: Work, what: str, ranks: Sequence[int], *, blocking: bool = True) -> None:
        """Wait for communication with ``ranks``; ``what`` describes it, as in "rank 1 in 1F0, value 'h'".

        With ``blocking`` false the device's queue waits and not this process; the timeout is then the process group's.

        Raises:
            WorkerError: it failed or took longer than the timeout; names the rank that failed first, or did not come.
        """
        try:
            done = work.wait(timedelta(seconds=self.timeout_seconds)) if blocking else work.wait()
        except RuntimeError as error:
            raise self.lost(what, ranks, error) from error
        if not done:
            raise self.lost(what, ranks, RuntimeError("the operation was aborted"))

    def lost(self, what: str, ranks: Sequence[int], error: BaseException) -> WorkerError:
        """Return the error for failed communication with ``ranks``, and report it if it is the first failure.

        A `TimeoutError` says until when they did not come; any other error may be a limit or a connection that ended.
        """
        self._note(what)
        first = self.first(_GRACE_SECONDS)
        if first is not None and first.rank != self.rank:
            return WorkerError.after(first.code, f"{first.message} [rank {self.rank} was waiting for {what}]")
        return self._lost(what, ranks, error)

    def _note(self, what: str) -> None:
        """Tell the others that communication failed, and for what this rank was waiting."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"whale/waiting/{what}/{self.rank}", "")
                self._store.set(LOST, "")

    def _lost(self, what: str, ranks: Sequence[int], error: BaseException) -> WorkerError:
        """Return the error after the others have had time to say for what they wait, and report it."""
        late = self._late(what, ranks)
        who = f"rank {late[0]}" if len(late) == 1 else f"ranks {late}" if late else "another rank"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not isinstance(error, TimeoutError):
            reason = f"within {self.timeout_seconds:g} s or closed the connection: {reason}"
        message = f"rank {self.rank} waited for {what}, and {who} did not come {reason}"
        self.report(message)
        return WorkerError(message)

    def failed(self, where: str, error: Exception, peers: Sequence[int] = ()) -> WhaleError:
        """Return the error for an ``error`` that stopped this rank at ``where``, and report it.

        If a collective inside a stage broke because another rank failed, it names that rank, otherwise those of
        ``peers`` that did not come.
        """
        if isinstance(error, WorkerError):
            return error
        text = str(error)
        broken = isinstance(error, RuntimeError) and any(word in text.lower() for word in ("connection", "timed out"))
        collective = f"a collective in {where}" if broken and len(peers) > 1 else ""
        if collective:
            self._note(collective)
        first = self.first(_GRACE_SECONDS if broken else 0.0)
        if broken and first is not None and first.rank != self.rank:
            return WorkerError.after(first.code, f"{first.message} [rank {self.rank} was in {where}]")
        if collective:
            return self._lost(collective, peers, error)
        root: BaseException = error
        while root.__cause__ is not None:  # the innermost exception says the most
            root = root.__cause__
        if isinstance(root, torch.OutOfMemoryError):
            message = f"rank {self.rank} is out of memory in {where}: {self._memory_text(root)}"
        else:
            message = f"rank {self.rank} failed in {where}: {type(root).__name__}: {root}"
        self.report(message, error.exit_code if isinstance(error, WhaleError) else WorkerError.exit_code)
        if isinstance(error, WhaleError):
            error.add_note(f"rank {self.rank}, in {where}")
            return error
        return WorkerError(message)

    def _memory_text(self, error: BaseException) -> str:
        """Text of torch for an allocation that failed, in a line, with the advice on memory."""
        said = str(error).strip().splitlines()[0].split(". See documentation")[0]
        found: list[str] = []

        def advise() -> None:
            with contextlib.suppress(Exception):  # the error of the allocation is what counts
                if self.memory_advice is not None:
                    found.append(self.memory_advice())

        # The other ranks wait meanwhile: for models that take longer they get the error alone.
        thread = threading.Thread(target=advise, daemon=True)
        thread.start()
        thread.join(min(_ADVICE_SECONDS, self.timeout_seconds / 2))
        return f"{said}; {found[0]}" if found else said

    def _late(self, what: str, ranks: Sequence[int]) -> list[int]:
        """Return those of ``ranks`` that are not waiting for the same thing; all others are, if there is no store."""
        others = [rank for rank in ranks if rank != self.rank]
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                return [rank for rank in others if not self._store.check([f"whale/waiting/{what}/{rank}"])] or others
        return others
