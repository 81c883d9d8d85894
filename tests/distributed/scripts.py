"""Scripts on ranks of their own, as under torchrun, in processes that have made their imports.

A process of torchrun imports torch, transformers and Whale for seconds, once for each rank and once for the agent. The
ranks here are forked from the server of `harness`, so a script costs what it computes; of ranks with one model one
captures it for all. Agents are forked too (torchrun as ``-m torch.distributed.run``), and start ranks of their own as
they do anywhere, or fork them.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from tests.distributed.forked_ranks import fork_ranks
from tests.distributed.harness import PRELOADED
from tests.distributed.traces import shared

ROOT = Path(__file__).resolve().parents[2]
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE_SECONDS = 20.0
"""How long ranks may go on after one of them failed: they name it, which takes them up to their own timeout."""


class Ended(NamedTuple):
    """Output of processes, in the order of their ranks, and the first exit code that is not 0."""

    returncode: int
    stdout: str
    stderr: str


def run_script(
    *command: str,
    ranks: int = 0,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: float = 110.0,
    forks_ranks: bool = False,
) -> Ended:
    """Run a script and its arguments (``-m`` and a module instead) on each of *ranks*, or in one plain process, which
    forks its ranks where it is an agent and *forks_ranks*."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
    common = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    common |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    common |= environment or {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    with tempfile.TemporaryDirectory() as outputs:
        processes = []
        for rank in range(max(ranks, 1)):
            own = dict(common)
            if store is not None:
                own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
                own |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            files = (f"{outputs}/{rank}.stdout", f"{outputs}/{rank}.stderr")
            process = context.Process(target=_run, args=(command, own, str(folder), files, False, forks_ranks))
            process.start()
            processes.append(process)
        end, running = time.monotonic() + timeout, list(processes)
        while running and (left := end - time.monotonic()) > 0:
            ended = wait([process.sentinel for process in running], left)
            running = [process for process in running if process.sentinel not in ended]
            if any(process.exitcode for process in processes if process not in running):
                end = min(end, time.monotonic() + GRACE_SECONDS)
        for process in running:
            process.kill()
        for process in processes:
            process.join()
        written = [
            "".join(Path(f"{outputs}/{rank}.{kind}").read_text() for rank in range(len(processes)))
            for kind in ("stdout", "stderr")
        ]
    codes = [process.exitcode or 0 for process in processes]
    return Ended(next((code for code in codes if code), 0), *written)


class Forked:
    """A process that runs a script and its arguments (``-m`` and a module instead), as :class:`subprocess.Popen` has
    it: in a session of its own if wanted, with both outputs in one file. An agent may fork its ranks."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path = ROOT,
        output: Path,
        start_new_session: bool = False,
        forks_ranks: bool = False,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        files = (str(output),) * 2
        arguments = (tuple(command), dict(environment), str(folder), files, start_new_session, forks_ranks)
        self._process = context.Process(target=_run, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.kill = self._process.kill

    def poll(self) -> int | None:
        """The exit code, minus the number of a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs for longer.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._process.exitcode


def _run(
    command: tuple[str, ...],
    environment: dict[str, str],
    folder: str,
    outputs: tuple[str, str],
    session: bool,
    forks_ranks: bool,
) -> None:
    """Become a process that was started with *command*, whose outputs are in files."""
    if session:
        os.setsid()
    if forks_ranks:
        fork_ranks(become)
    for number, output in enumerate(outputs, 1):
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    become(command, environment, folder)


def become(command: Sequence[str], environment: Mapping[str, str], folder: str) -> NoReturn:
    """Go on as a process that was started with *command*: a script and its arguments, or ``-m`` and a module."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    code: object = 0
    try:
        with shared():
            if command[0] == "-m":
                sys.argv = list(command[1:])
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(command)
                sys.path.insert(0, str(Path(command[0]).resolve().parent))
                runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
