"""Jobs whose machines come and go: torch's elastic agent with the settings that work, and a batch that may change.

`Agent` is one machine's part of ``whale run``: it starts the ranks of this machine, and starts them again with the
machines that are there whenever one is lost or comes; or with the same ones, where these have numbers. The script does
the rest: it searches a plan, loads its newest checkpoint and goes on. This module knows no models.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from whale.errors import WorkerError
from whale.runtime.ending import ELASTIC, ENDING

__all__ = ["Agent", "Ended"]

SETTINGS = {
    "join_timeout": 600,
    "last_call_timeout": 5,
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 4,
}
"""Settings of torch's rendezvous, in seconds: how long a machine waits for the least number of them; how long, once
these are there, for more (torch: 30, which every restart waits); how often a machine says that it is alive, and after
how many times without it is taken for lost (torch: 15 s in all)."""

HEARD_SECONDS = 3.0
"""How long a machine that ends the job waits for the others to hear of it: it may have the meeting point."""

_ENDED, _HEARD = "whale/ended", "whale/heard"
"""Keys of the meeting point's store: why the job ends, and how many machines know it."""

_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")


class Ended(WorkerError):
    """The ranks of a job have ended, and are not started again.

    Attributes:
        code: with which this machine's part of it ends: that of the first rank if it is one of `ENDING`, else 6.
    """

    def __init__(self, message: str, code: int = WorkerError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]  # of this one


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A machine's part of a job.

    Attributes:
        machines: the least and the most with which it runs.
        processes: ranks that this machine starts.
        endpoint: ``host:port`` at which the machines meet; empty: this one is alone.
        hosts: whether this machine has the meeting point; None: if it has the endpoint's address.
        number: of this machine, if ranks are in the order of machines' numbers, and all of them are there; the meeting
            point is at machine 0. None: they are in the order of addresses.
        job: a name that the machines of a job share, and no other at this endpoint has.
        max_restarts: after failures of ranks; machines that come do not count.
        local_address: of this machine for the others; None: its host name.
        tell: called with what happens, in a sentence.
    """

    machines: tuple[int, int]
    processes: int
    endpoint: str = ""
    hosts: bool | None = None
    number: int | None = None
    job: str = "whale"
    max_restarts: int = 10
    local_address: str | None = None
    tell: Callable[[str], None] = lambda text: None

    def run(self, script: Sequence[str]) -> None:
        """Run a Python script with its arguments until it ends on all ranks.

        Raises:
            Ended: a rank failed as no restart would fix, or too often, or another machine ended the job.
            SignalException: this process got a signal; its ranks have ended.
        """
        os.environ[ELASTIC] = f"{self.machines[0]}:{self.machines[1]}"
        # A machine that joins would otherwise end all others' ranks: they share the meeting point's store with torch.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what they say is said below
        with tempfile.TemporaryDirectory(prefix="whale-run-") as folder:
            try:
                self._run(script, folder)
            except (RendezvousError, DistError) as error:
                raise Ended(
                    f"the machines of job {self.job} do not meet at {self.endpoint or 'this machine'} (any more): "
                    f"one of them has ended the job, or that with the meeting point is gone ({type(error).__name__})"
                ) from error

    def _run(self, script: Sequence[str], folder: str) -> None:
        alone = not self.endpoint
        host = self.endpoint.rpartition(":")[0]
        try:
            socket.getaddrinfo(host or None, 0)
        except OSError:
            self.tell(f"{host} has no address (yet): is that the machine with the meeting point?")
        if self.number is not None:
            settings: dict[str, Any] = {"rank": self.number, "timeout": SETTINGS["join_timeout"]}
        else:
            settings = dict(SETTINGS)
            if self.hosts is not None or alone:
                settings["is_host"] = str(bool(self.hosts) or alone).lower()
        address = "127.0.0.1" if alone or self.endpoint.startswith(("127.", "localhost")) else None
        parameters = RendezvousParameters(
            backend="c10d" if self.number is None else "static",
            endpoint=self.endpoint or "127.0.0.1:0",
            run_id=uuid.uuid4().hex if alone else self.job,
            min_nodes=self.machines[0],
            max_nodes=self.machines[1],
            local_addr=self.local_address or address,
            **settings,
        )
        handler = rendezvous_registry.get_rendezvous_handler(parameters)
        spec = WorkerSpec(
            role="default",
            local_world_size=self.processes,
            entrypoint=sys.executable,
            args=("-u", *script),
            rdzv_handler=handler,
            max_restarts=self.max_restarts,
            monitor_interval=0.1,
            local_addr=self.local_address or address,
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=folder), tell=self.tell)
        closes = True
        try:
            result = agent.run()
            if agent.ended_by is not None:
                raise Ended(agent.ended_by)
            if result.is_failed():
                ended = _ended(result.failures, agent.restarts)
                agent.tell_others(str(ended))
                raise ended
        except SignalException as caught:
            if self.number is not None:  # no other machine takes its place
                agent.tell_others(f"it got {signal.Signals(int(caught.sigval)).name}")
            closes = False  # the other machines go on without this one
            raise
        finally:
            if closes:
                handler.shutdown()


class _Agent(LocalElasticAgent):
    """torch's agent, which does not start again what ends with one of `ENDING`, and says what happens."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, *, tell: Callable[[str], None]) -> None:
        super().__init__(spec=spec, logs_specs=logs, start_method="spawn", exit_barrier_timeout=60)
        self._tell = tell
        self._looked = 0.0
        self.restarts = 0
        self.ended_by: str | None = None
        """The machine that has ended the job, if another one has, and its reason."""
        self._shared: Any = None
        """The store of the meeting point."""
        self._num_machines = 1

    def tell_others(self, why: str) -> None:
        """Let the other machines end the job, too, and wait a little for them to hear it."""
        if self._num_machines < 2:
            return
        with contextlib.suppress(RuntimeError):  # the meeting point may be gone, and then they see that
            if not self._shared.check([_ENDED]):
                number = self._worker_group.group_rank
                self._shared.set(_ENDED, f"machine {number} has ended the job: {why}"[:2000])
            self._shared.add(_HEARD, 1)
            end = time.monotonic() + HEARD_SECONDS
            while self._shared.add(_HEARD, 0) < self._num_machines and time.monotonic() < end:
                time.sleep(0.1)

    def _is_ended(self) -> bool:
        """Whether another machine has ended the job; looked up once a second."""
        now = time.monotonic()
        if self._num_machines > 1 and now - self._looked > 1.0:
            self._looked = now
            with contextlib.suppress(RuntimeError):
                if self._shared.check([_ENDED]):
                    self.ended_by = self._shared.get(_ENDED).decode(errors="replace")
                    self._shared.add(_HEARD, 1)
        return self.ended_by is not None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is not WorkerState.SUCCEEDED and self._is_ended():
            self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            if any(failure.exitcode in ENDING for failure in result.failures.values()):
                self._remaining_restarts = 0
            for rank, failure in sorted(result.failures.items()):
                left = f"{self._remaining_restarts} restart{'' if self._remaining_restarts == 1 else 's'} left"
                self._tell(f"rank {rank} {_how(failure)}; {left}")
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.restarts += 1
        self._tell("the ranks of this machine are ended and start again with the machines that are there")
        super()._restart_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Wait until the ranks of the other machines have ended too, in a thread: the wait itself hears no signal."""
        waiting = threading.Thread(target=super()._exit_barrier, daemon=True)
        waiting.start()
        while waiting.is_alive():
            waiting.join(0.1)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._tell("waiting for the other machines")
        super()._rendezvous(worker_group)
        store: Any = self._store  # while the last barrier waits on its connection, no other thread gets an answer there
        self._shared, self._num_machines = store.clone(), worker_group.group_world_size or 1
        ranks = [worker.global_rank for worker in worker_group.workers]
        self._tell(
            f"{worker_group.group_world_size} machines with {worker_group.workers[0].world_size} ranks have met; "
            f"this one starts ranks {ranks[0]} to {ranks[-1]}"
        )


def _how(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"ended with signal {failure.signal_name()}"
    message = _message(failure)
    return f"ended with exit code {failure.exitcode}" + (f": {message}" if message else "")


def _message(failure: ProcessFailure) -> str:
    """The message that the rank left in its file."""
    if not Path(failure.error_file).is_file():
        return ""
    given: Any = failure.message
    return str(given.get("message", given) if isinstance(given, dict) else given).splitlines()[0]


def _ended(failures: dict[int, ProcessFailure], restarts: int) -> Ended:
    """The error of the rank that failed first, of those that no restart fixes if there are any."""
    fatal = {rank: failure for rank, failure in failures.items() if failure.exitcode in ENDING} or failures
    rank, failure = min(fatal.items(), key=lambda item: item[1].timestamp)
    often = f", after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    if failure.exitcode in ENDING:
        return Ended(
            f"rank {rank} {_how(failure)}; it is not started again, because that would not help", failure.exitcode
        )
    return Ended(f"rank {rank} {_how(failure)}{often}; look at its output above")
