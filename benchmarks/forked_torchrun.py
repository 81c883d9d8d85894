"""torchrun in processes that have made their imports: its own command line, agent and report, and ranks that are forks.

A process of torchrun imports torch, transformers and Whale for seconds: once for the agent, and for each rank at each
attempt. Here the agent is forked from a server that has imported them and runs torchrun's own ``main``; where that
would execute an interpreter for a rank, it forks, and the fork becomes the script. What an agent sees of a rank is as
ever: a process in a session of its own, its exit code, its error file, its end by a signal.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from tests.distributed.harness import PRELOADED
from tests.distributed.scripts import become

__all__ = ["Agent"]


class Agent:
    """A running torchrun.

    Args:
        arguments: of torchrun, the script and its arguments among them.
        environment: of it and its ranks.
        output: file to which all of them append what they write.

    Attributes:
        pid: of its process.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        self._process = context.Process(target=_become_agent, args=(list(arguments), dict(environment), str(output)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired` if it does not end within *timeout* seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("torchrun", timeout)
        return self._process.exitcode


def _become_agent(arguments: list[str], environment: dict[str, str], output: str) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    SubprocessHandler._popen = _forked  # type: ignore[method-assign, assignment]
    become(["-m", "torch.distributed.run", *arguments], environment, os.getcwd())


def _forked(handler: SubprocessHandler, command: Sequence[str], environment: Mapping[str, str]) -> _Rank:
    """A rank for the command of an interpreter; its output is the agent's."""
    return _Rank([word for word in command[1:] if word != "-u"], environment)


class _Rank:
    """A rank, as far as torchrun knows `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
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
