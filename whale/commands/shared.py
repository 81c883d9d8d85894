"""Sharing independent work with forked processes, which have everything in memory that this one has.

A fork takes milliseconds, but it must not happen beside threads that hold locks, a process group or a CUDA context: the
caller decides. What a fork fails at is done here, so its errors are raised here too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, TypeVar

__all__ = ["Shared", "available_cores"]

T = TypeVar("T")

MOST_TASKS, NUMBER_BYTES = 4096, 4
"""Tasks that are offered to forks, whose numbers fit into a pipe; the others are done where they are asked for."""


def available_cores() -> int:
    """Processor cores that this process may use; 1 where processes are not forked safely, as with the frameworks of
    macOS."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


class Shared(Generic[T]):
    """Results of numbered tasks, which this process and its forks take one by one; a context manager.

    Args:
        work: does the task of a number. Its results are pickled.
        count: of the tasks.
        processes: number of processes, with this one; 1: nothing is forked.
        forked: called at the beginning of a fork.

    >>> with Shared(lambda number: number**2, 4, processes=2) as squares:
    ...     [squares.result(number) for number in range(4)]
    [0, 1, 4, 9]
    """

    def __init__(
        self, work: Callable[[int], T], count: int, *, processes: int, forked: Callable[[], None] = lambda: None
    ) -> None:
        self._work, self._forked = work, forked
        self._found: dict[int, T] = {}
        self._forks: list[tuple[Any, Connection]] = []
        # The process that reads a number takes that task: a read of what is in a pipe is atomic.
        self._tasks, numbers = os.pipe()
        os.write(numbers, b"".join(number.to_bytes(NUMBER_BYTES) for number in range(min(count, MOST_TASKS))))
        os.close(numbers)
        for _ in range(min(processes, count) - 1):
            self._fork()

    def __enter__(self) -> Shared[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process, results in self._forks:
            process.terminate()
            process.join()
            results.close()
        os.close(self._tasks)

    def result(self, number: int) -> T:
        """The result of a task; does tasks here until none is left, and waits for the forks after that.

        Raises whatever *work* raises.
        """
        while number not in self._found:
            if (task := self._take()) is not None:
                try:
                    self._found[task] = self._work(task)
                except Exception:
                    if task == number:
                        raise
            elif not self._receive():
                self._found[number] = self._work(number)
        return self._found[number]

    def _take(self) -> int | None:
        """The next task that no process has taken; None: there is none."""
        taken = os.read(self._tasks, NUMBER_BYTES)
        return int.from_bytes(taken) if taken else None

    def _receive(self) -> bool:
        """Receive all results of a fork; False if there is none."""
        if not self._forks:
            return False
        process, results = self._forks.pop()
        try:
            while True:
                number, result = results.recv()
                self._found[number] = result
        except EOFError:  # it is done, or ended before that
            process.join()
            results.close()
        return True

    def _fork(self) -> None:
        here, there = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=self._run, args=(there,), daemon=True)
        process.start()
        there.close()
        self._forks.append((process, here))

    def _run(self, results: Connection) -> None:
        """Do tasks in a fork until none is left. Results are sent at the end, when the other process waits for them: a
        pipe holds few."""
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process decides what Ctrl-C does
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._forked()
            found = {}
            while (task := self._take()) is not None:
                found[task] = self._work(task)
            for each in found.items():
                results.send(each)
        finally:
            os._exit(0)  # without what the other process does at its end
