"""Real ranks for tests: processes that stay and run one function after another, with gloo between them.

A module starts its ranks once, in a fixture, and they meet once; whatever goes wrong, all processes are
gone when `Ranks` closes. The store is the parent's, as under torchrun it is the agent's, so it outlives a rank that
fails.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.distributed.traces import shared
from whale.runtime.launch import World, initialize

PRELOADED = "tests.distributed.preloaded"
"""Modules imported by the server that ranks are forked from: a rank starts in milliseconds instead of seconds."""


class Outcome(NamedTuple):
    """How a function ended on one rank: with a value, or with an exception of this type and text."""

    value: Any
    error: str
    traceback: str
    seconds: float


class Ranks:
    """Processes 0 to ``size`` - 1, each in one `World`; a context manager."""

    def __init__(self, size: int, timeout_seconds: float = 60.0) -> None:
        self.size = size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            parent, child = context.Pipe()
            arguments = (rank, size, self._store.port, timeout_seconds, child)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            child.close()
            self._pipes.append(parent)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, at once where they do not end themselves."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(3)
            if process.is_alive():
                process.kill()
                process.join()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 200.0) -> list[Any]:
        """Return ``function(world, *arguments)`` of every rank; show the traceback of the first that raised."""
        outcomes = self.outcomes(function, *arguments, timeout=timeout)
        failed = sorted((outcome.seconds, rank) for rank, outcome in enumerate(outcomes) if outcome.error)
        if failed:
            rank = failed[0][1]
            raise AssertionError(f"rank {rank} of {self.size} failed first:\n{outcomes[rank].traceback}")
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *arguments: Any, timeout: float = 200.0) -> list[Outcome]:
        """Return how ``function(world, *arguments)`` ended on every rank; a rank that raised is gone afterwards."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        end = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.size:
            late = [rank for rank in range(self.size) if rank not in outcomes]
            ready = wait([self._pipes[rank] for rank in late], max(0.0, end - time.monotonic()))
            if not ready:
                for process in self._processes:
                    process.kill()
                done = {rank: outcome.error or "returned" for rank, outcome in sorted(outcomes.items())}
                raise AssertionError(f"ranks {late} did not end within {timeout:g} s; others: {done}")
            for rank in late:
                if self._pipes[rank] not in ready:
                    continue
                try:
                    outcomes[rank] = self._pipes[rank].recv()
                except EOFError:
                    self._processes[rank].join(3)
                    error = f"process ended with exit code {self._processes[rank].exitcode}"
                    outcomes[rank] = Outcome(None, error, error, time.monotonic())
        return [outcomes[rank] for rank in range(self.size)]


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 200.0) -> list[Any]:
    """Run ``function(world, *arguments)`` on ranks started for it alone."""
    with Ranks(size) as ranks:
        return ranks.run(function, *arguments, timeout=timeout)


def _serve(rank: int, size: int, port: int, timeout_seconds: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
    )
    world: World | None = None
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            world = world or initialize(timeout_seconds, size, "cpu")
            with shared():
                outcome = Outcome(function(world, *arguments), "", "", time.monotonic())
        except Exception as error:
            outcome = Outcome(None, f"{type(error).__name__}: {error}", traceback.format_exc(), time.monotonic())
        pipe.send(outcome)
        if outcome.error:
            os._exit(1)  # as a process that died of it: connections close, destructors do not wait for peers
    os._exit(0)  # leaving every group in an orderly way takes seconds and is tested elsewhere
