"""Agents of torch whose ranks are forks: processes that have made their imports, as their agent has.

Where an agent would execute an interpreter for a rank, it forks, and the fork becomes the script. What an agent sees of
a rank is as ever: a process in a session of its own, its exit code, its error file, its end by a signal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

__all__ = ["fork_ranks"]

Become = Callable[[Sequence[str], Mapping[str, str], str], Any]


def fork_ranks(become: Become) -> None:
    """Let agents of this process fork their ranks, which then *become* a command in an environment and a folder."""
    SubprocessHandler._popen = partial(_forked, become)  # type: ignore[method-assign, assignment]


def _forked(become: Become, command: Sequence[str], environment: Mapping[str, str]) -> _Rank:
    """A rank for the command of an interpreter; its output is the agent's."""
    return _Rank(become, [word for word in command[1:] if word != "-u"], environment)


class _Rank:
    """A rank, as far as torchrun knows `subprocess.Popen`."""

    def __init__(self, become: Become, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            _close_inherited()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            become(command, environment, os.getcwd())
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired` if it does not end within *timeout* seconds."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return code


def _close_inherited() -> None:
    """Close the agent's files and sockets, which no program that is executed has. Their numbers stay taken: objects of
    the agent that are collected later would close what has them by then."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            os.dup2(nothing, number)
