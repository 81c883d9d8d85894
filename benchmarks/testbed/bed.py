"""The testbed as a context manager: set it up, run commands on it, and tear it down in every case.

A testbed is a context: its groups and namespaces live inside the ``with``, under a name that no other has, and commands
run on it one after the other. SIGTERM and SIGHUP end the ``with`` as Ctrl-C does. Only SIGKILL leaves something behind,
which does not disturb the next testbed, and which `clean` removes.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from whale.errors import UsageError, WorkerError

from . import network
from .cgroups import Hierarchy, find_hierarchy
from .description import Description, Device

__all__ = ["RankFailed", "Run", "Testbed", "TimedOut", "clean", "missing"]

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
"""Programs that the testbed runs, with their Debian packages."""

CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Capabilities of root that a container usually lacks, and their bits (linux/capability.h)."""

MOST_OF_CORES = 0.8
"""Fraction of the machine's cores above which the scheduler, and not the quotas, limits the speed of devices."""

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""An emulated device retains freed memory, as an accelerator's allocator does. By default glibc returns it when the top
of its heap happens to be free, and page faults then make the same layer up to half as slow again in some processes."""

TAIL_LINES = 60
_NAME = re.compile(r"whale-testbed-(\d+)-(\d+)-\d+")
_counter = itertools.count()

# Join the groups, enter the namespace, become the command: the quota holds from the first instruction of the command.
_ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'


def packed(quotas: Sequence[float], num_cores: int) -> list[int]:
    """The core of each device: the largest quota first, each to the core with the least so far.

    On a core of its own a device could have all of it; devices that the scheduler moves about meet others now and then,
    and are slower than their quota by chance.

    >>> packed([0.25, 0.5, 0.25, 0.5], 2)
    [0, 0, 1, 1]
    """
    taken, places = [0.0] * num_cores, [0] * len(quotas)
    for index in sorted(range(len(quotas)), key=lambda index: (-quotas[index], index)):
        places[index] = min(range(num_cores), key=lambda core: (taken[core], core))
        taken[places[index]] += quotas[index]
    return places


class RankFailed(WorkerError):
    """The command ended with a failure on a rank.

    Attributes:
        rank: the first that failed.
        rank_exit_code: its own, as a shell gives it: 128 and the number for a signal.
        tail: the last lines that it wrote.
    """

    def __init__(self, rank: int, rank_exit_code: int, tail: str, reason: str = "") -> None:
        super().__init__(f"rank {rank} failed with exit code {rank_exit_code}{reason}; its last lines:\n{tail}")
        self.rank, self.rank_exit_code, self.tail = rank, rank_exit_code, tail


class TimedOut(WorkerError):
    """The command took longer than allowed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command that ended well on all ranks: what each wrote to stdout, and the seconds from start to end."""

    outputs: tuple[str, ...]
    seconds: float


@dataclass
class _Rank:
    """A running rank: its process, and what it wrote so far."""

    device: Device
    process: subprocess.Popen[bytes]
    output: list[bytes] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))


class Testbed:
    """The emulated devices of a description, up while inside a ``with``.

    Raises:
        UsageError: this machine cannot have a testbed; names what is missing.
    """

    __test__ = False  # for pytest, which would take the name for a test's

    def __init__(self, description: Description) -> None:
        if problems := missing():
            raise UsageError(f"a testbed needs {'; '.join(problems)}")
        hierarchy = _hierarchy()
        assert hierarchy is not None  # or it would be missing
        self.description, self._hierarchy = description, hierarchy
        self.name = f"whale-testbed-{os.getpid()}-{_start_time(os.getpid())}-{next(_counter)}"
        self._port = 29500
        self._handlers: dict[int, Any] = {}
        cores = sorted(os.sched_getaffinity(0))
        places = packed([device.cores for device in description.devices], len(cores))
        self._cores = [cores[place] for place in places]
        available = len(cores)
        if description.cores > MOST_OF_CORES * available:
            warnings.warn(
                f"the quotas sum up to {description.cores:g} of {available} cores; above {MOST_OF_CORES * available:g} "
                f"the scheduler decides how fast a device is: give the devices less",
                stacklevel=2,
            )

    def __enter__(self) -> Testbed:
        atexit.register(self._tear_down)
        try:
            self._handle_signals()
            for command in network.make(self.name, self.description.node_links):
                network.run(command)
            for device in self.description.devices:
                self._hierarchy.create(self.name, device.rank, cores=device.cores, memory_bytes=device.memory_bytes)
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._tear_down()

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        environment: Mapping[str, str] | None = None,
        show: bool = True,
    ) -> Run:
        """Run a command on every device at once, as one rank each, and wait for all.

        What rank 0 writes to stdout goes to stdout; all else goes to stderr with the rank before each line, unless
        *show* is off.

        Raises:
            RankFailed: of the first rank that failed; all others have been killed.
            TimedOut: all ranks have been killed.
        """
        self._port += 1  # the last one's may still be closing
        start = time.monotonic()
        deadline = None if timeout_seconds is None else start + timeout_seconds
        ranks: list[_Rank] = []
        try:
            for device in self.description.devices:
                ranks.append(_Rank(device, self._start(device, command, environment or {})))
            with _Streams(ranks, show) as streams:
                while any(rank.process.returncode is None for rank in ranks):
                    streams.read(timeout_seconds=0.05)
                    failed = [rank for rank in ranks if rank.process.poll()]
                    if failed:
                        raise self._failure(failed[0], streams)
                    if deadline is not None and time.monotonic() > deadline:
                        raise self._timeout(ranks, timeout_seconds)
                streams.drain()
        finally:
            self._hierarchy.kill(self.name)
            for rank in ranks:
                rank.process.wait()
        return Run(
            outputs=tuple(b"".join(rank.output).decode(errors="replace") for rank in ranks),
            seconds=time.monotonic() - start,
        )

    def _start(self, device: Device, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        files = [str(path) for path in self._hierarchy.task_files(self.name, device.rank)]
        enter = ["nsenter", f"--net={network.NAMESPACES / network.namespace(self.name, device.node)}"]
        process = subprocess.Popen(
            ["/bin/sh", "-c", _ENTER, "sh", *files, "--", *enter, *command],
            env={**os.environ, **self.environment(device), "MASTER_PORT": str(self._port), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with contextlib.suppress(ProcessLookupError):  # it has failed already
            os.sched_setaffinity(process.pid, {self._cores[device.rank]})
        return process

    def environment(self, device: Device) -> dict[str, str]:
        """Environment variables of a rank, as from torchrun, except the port."""
        devices = self.description.devices
        return {
            "RANK": str(device.rank),
            "WORLD_SIZE": str(len(devices)),
            "LOCAL_RANK": str(device.local_rank),
            "LOCAL_WORLD_SIZE": str(sum(other.node == device.node for other in devices)),
            "MASTER_ADDR": network.address(0),
            "GLOO_SOCKET_IFNAME": network.INTERFACE,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **KEEP_MEMORY,
        }

    def _failure(self, rank: _Rank, streams: _Streams) -> RankFailed:
        streams.drain()
        code = rank.process.returncode
        code = code if code >= 0 else 128 - code
        reason = ""
        if self._hierarchy.was_out_of_memory(self.name, rank.device.rank):
            reason = f": it needed more than its memory of {rank.device.memory_bytes / 2**20:g} MiB"
        return RankFailed(rank.device.rank, code, "\n".join(rank.tail), reason)

    def _timeout(self, ranks: Sequence[_Rank], seconds: float | None) -> TimedOut:
        running = [rank for rank in ranks if rank.process.returncode is None]
        which = ", ".join(str(rank.device.rank) for rank in running)
        tail = "\n".join(running[0].tail)
        return TimedOut(f"not done within {seconds:g} s; running still: rank {which}; last lines of the first:\n{tail}")

    def _handle_signals(self) -> None:
        """Let SIGTERM and SIGHUP unwind the stack, so that everything is torn down; a signal's handler is only the main
        thread's to set."""
        with contextlib.suppress(ValueError):
            for number in (signal.SIGTERM, signal.SIGHUP):
                self._handlers[number] = signal.signal(number, _leave)

    def _tear_down(self) -> None:
        """Remove everything, or what there is of it; a signal must not interrupt that."""
        ignored: dict[int, Any] = {}
        with contextlib.suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                ignored[number] = signal.signal(number, signal.SIG_IGN)
        try:
            _remove(self._hierarchy, self.name)
        finally:
            for ignored_number, handler in {**ignored, **self._handlers}.items():
                signal.signal(ignored_number, handler)
            self._handlers.clear()
        atexit.unregister(self._tear_down)


class _Streams:
    """Passes on what the ranks write, line by line, and keeps the last lines of each."""

    def __init__(self, ranks: Sequence[_Rank], show: bool) -> None:
        self._show = show
        self._selector = selectors.DefaultSelector()
        self._begun: dict[int, bytes] = {}
        for rank in ranks:
            for stream in (rank.process.stdout, rank.process.stderr):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, selectors.EVENT_READ, rank)

    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *raised: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def read(self, timeout_seconds: float) -> bool:
        """Pass on what comes within that time; whether there was anything."""
        if not self._selector.get_map():
            time.sleep(timeout_seconds)
            return False
        events = self._selector.select(timeout_seconds)
        for key, _ in events:
            self._read_one(key.fileobj, key.data)  # type: ignore[arg-type]
        return bool(events)

    def drain(self) -> None:
        """Pass on what is there already, and lines without an end."""
        while self._selector.get_map() and self.read(0):
            pass
        for key in list(self._selector.get_map().values()):
            self._pass_on(key.fileobj, key.data, b"\n")  # type: ignore[arg-type]

    def _read_one(self, stream: IO[bytes], rank: _Rank) -> None:
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(stream)
            self._pass_on(stream, rank, b"\n")
            stream.close()
            return
        if stream is rank.process.stdout:
            rank.output.append(data)
        self._pass_on(stream, rank, data)

    def _pass_on(self, stream: IO[bytes], rank: _Rank, data: bytes) -> None:
        key = id(stream)
        *lines, rest = (self._begun.pop(key, b"") + data).split(b"\n")
        if data == b"\n" and lines == [b""]:
            return  # the end, with no line begun
        self._begun[key] = rest
        for line in lines:
            text = line.decode(errors="replace")
            rank.tail.append(text)
            if self._show and rank.device.rank == 0 and stream is rank.process.stdout:
                print(text, flush=True)
            elif self._show:
                print(f"[rank {rank.device.rank}] {text}", file=sys.stderr, flush=True)


def missing() -> list[str]:
    """Requirements of a testbed that this machine or this user lacks."""
    if sys.platform != "linux":
        return [f"Linux, not {sys.platform}"]
    problems = [] if os.geteuid() == 0 else ["root (run it with sudo)"]
    if not problems and (denied := [name for name, bit in CAPABILITIES.items() if not _has_capability(bit)]):
        problems.append(f"{' and '.join(denied)} (a container needs --privileged)")
    lacking: dict[str, list[str]] = {}
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            lacking.setdefault(package, []).append(tool)
    problems += [f"{' and '.join(tools)} (package {package})" for package, tools in lacking.items()]
    hierarchy = _hierarchy()
    if hierarchy is None or not all(os.access(root, os.W_OK) for root in hierarchy.roots):
        problems.append("the cgroup controllers cpu and memory, writable (mount them, or leave the container)")
    return problems


def clean() -> list[str]:
    """Remove what testbeds left behind whose process has gone; returns their names."""
    if problems := missing():
        raise UsageError(f"cleaning up needs {'; '.join(problems)}")
    hierarchy = _hierarchy()
    assert hierarchy is not None
    seen = hierarchy.names() | {each.rpartition("-")[0] for each in network.names("whale-testbed-")}
    stale = sorted(name for name in seen if (found := _NAME.fullmatch(name)) and not _is_alive(*found.groups()))
    for name in stale:
        _remove(hierarchy, name)
    return stale


def _remove(hierarchy: Hierarchy, name: str) -> None:
    """Kill and remove all that has this name; a failure of one part does not keep the other."""
    try:
        hierarchy.remove(name)
    finally:
        network.remove(name)


def _hierarchy() -> Hierarchy | None:
    with contextlib.suppress(OSError):
        return find_hierarchy(Path("/proc/self/mountinfo").read_text())
    return None


def _has_capability(bit: int) -> bool:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(status["CapEff"], 16) >> bit & 1)


def _start_time(pid: int) -> str:
    """When a process started, in ticks: with its id, a name that is never given twice."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _is_alive(pid: str, start_time: str) -> bool:
    try:
        return _start_time(int(pid)) == start_time
    except OSError:
        return False


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
