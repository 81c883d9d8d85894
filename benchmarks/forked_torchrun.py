"""torchrun in processes that have made their imports: its own command line, agent and report, and ranks that are forks.

A process of torchrun imports torch, transformers and Whale for seconds: once for the agent, and for each rank at each
attempt. Here the agent is forked from a server that has imported them and runs torchrun's own ``main``, and its ranks
are forks of it (:mod:`tests.distributed.forked_ranks`).
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.distributed.forked_ranks import fork_ranks
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
    fork_ranks(become)
    become(["-m", "torch.distributed.run", *arguments], environment, os.getcwd())
