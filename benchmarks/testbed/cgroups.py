"""CPU quotas and memory limits of processes, by cgroups of version 1 or 2.

Pure functions over paths decide which files to write, so that they can be tested on any folder. A group is the folder
``<name>/rank<r>``; nothing else of the hierarchy is changed, except version 2's delegation of controllers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from whale.errors import WhaleError

__all__ = ["Hierarchy", "find_hierarchy"]

PERIOD_MICROSECONDS = 10_000
"""Quotas are granted anew this often. At half a core, the matmul rate over windows of 0.2 s spread by 3% with 10 ms, by
11% with the kernel's default of 100 ms, and by 6% with 5 ms (2 cores of a Xeon at 2.5 GHz)."""


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """Paths of the cgroups: the mount of each controller (the same one in version 2)."""

    version: int
    cpu: Path
    memory: Path

    @property
    def roots(self) -> tuple[Path, ...]:
        """The different mounts."""
        return (self.cpu, self.memory) if self.version == 1 else (self.cpu,)

    def task_files(self, name: str, rank: int) -> tuple[Path, ...]:
        """File in which a process writes its id to join the group of *rank*."""
        return tuple(root / name / f"rank{rank}" / "cgroup.procs" for root in self.roots)

    def limits(self, name: str, rank: int, *, cores: float, memory_bytes: int) -> tuple[tuple[Path, str], ...]:
        """Files of a group, and what to write into them, in order."""
        quota = round(cores * PERIOD_MICROSECONDS)
        cpu, memory = (root / name / f"rank{rank}" for root in (self.cpu, self.memory))
        if self.version == 1:
            return (
                (cpu / "cpu.cfs_period_us", str(PERIOD_MICROSECONDS)),
                (cpu / "cpu.cfs_quota_us", str(quota)),
                (memory / "memory.limit_in_bytes", str(memory_bytes)),
            )
        return (
            (cpu / "cpu.max", f"{quota} {PERIOD_MICROSECONDS}"),
            (memory / "memory.max", str(memory_bytes)),
        )

    def create(self, name: str, rank: int, *, cores: float, memory_bytes: int) -> None:
        """Make the group of *rank* with its limits."""
        for root in self.roots:
            if self.version == 2:
                _write(root / "cgroup.subtree_control", "+cpu +memory")
            (root / name).mkdir(exist_ok=True)
            if self.version == 2:
                _write(root / name / "cgroup.subtree_control", "+cpu +memory")
            (root / name / f"rank{rank}").mkdir()
        for path, value in self.limits(name, rank, cores=cores, memory_bytes=memory_bytes):
            _write(path, value)

    def was_out_of_memory(self, name: str, rank: int) -> bool:
        """Whether the kernel killed a process of that group because of its memory limit."""
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        try:
            text = (self.memory / name / f"rank{rank}" / file).read_text()
        except OSError:
            return False
        counts = dict(line.split() for line in text.splitlines())
        return counts.get("oom_kill", "0") != "0"

    def names(self) -> set[str]:
        """All groups directly below the roots."""
        return {entry.name for root in self.roots for entry in root.iterdir() if entry.is_dir()}

    def kill(self, name: str, *, ranks: Iterable[int] | None = None, timeout_seconds: float = 10.0) -> None:
        """Kill every process of the groups of *name*, by default of all ranks, and wait until they are gone."""
        chosen = {f"rank{rank}" for rank in ranks} if ranks is not None else None
        deadline = time.monotonic() + timeout_seconds
        while pids := self._members(name, chosen):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise WhaleError(f"processes {sorted(pids)} of {name} do not end, though killed; try again later")
            time.sleep(0.01)

    def remove(self, name: str) -> None:
        """Kill what is in the groups of *name* and remove them; harmless where there are none."""
        self.kill(name)
        for root in self.roots:
            for folder in [*(root / name).glob("rank*"), root / name]:
                _rmdir(folder)

    def _members(self, name: str, chosen: set[str] | None) -> set[int]:
        pids: set[int] = set()
        for root in self.roots:
            for folder in (root / name).glob("rank*"):
                if chosen is None or folder.name in chosen:
                    with contextlib.suppress(OSError):
                        pids |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
        return pids


def find_hierarchy(mounts: str, root: Path = Path("/")) -> Hierarchy | None:
    """The cgroups of this machine, from the text of ``/proc/self/mountinfo``; None where cpu or memory is missing.

    Version 2 is taken where it has both controllers; on machines with both versions mounted they belong to one of them.
    """
    found: dict[str, Path] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if len(before.split()) < 5 or len(after.split()) < 3:
            continue
        place = root / before.split()[4].lstrip("/")
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            with contextlib.suppress(OSError):
                if {"cpu", "memory"} <= set((place / "cgroup.controllers").read_text().split()):
                    return Hierarchy(version=2, cpu=place, memory=place)
        if kind == "cgroup":
            for controller in {"cpu", "memory"} & set(options.split(",")):
                found.setdefault(controller, place)
    if len(found) < 2:
        return None
    return Hierarchy(version=1, cpu=found["cpu"], memory=found["memory"])


def _write(path: Path, value: str) -> None:
    try:
        path.write_text(value)
    except OSError as error:
        raise WhaleError(f"cannot write {value!r} to {path}: {error.strerror}; is this a container?") from error


def _rmdir(folder: Path) -> None:
    """Remove a group; just after its last process ended the kernel may still call it busy."""
    for _ in range(100):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)
        else:
            return
    folder.rmdir()
