"""Joining a launch: from a launcher's environment to process groups, with errors instead of hangs.

A rank is, in this order, what the script's own process group says, what torchrun's variables say, or what those of a
Slurm step say; any other process is a world of one, without a process group. A wrong number of processes is detected
before any process group exists, and ranks that did not start are named. This module knows no plans and no models; the
environment is read when `initialize` is called, never at import.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from whale.errors import PlanMismatchError, UsageError, WorkerError
from whale.runtime.failure import Failures
from whale.runtime.warn import warn

__all__ = ["World", "finalize", "groups", "initialize"]


@dataclass(frozen=True, kw_only=True)
class World:
    """This process and its world.

    Attributes:
        rank: this process.
        size: number of processes.
        device: of this process.
        failures: failure reports; has the timeout.
        store: the rendezvous store; None for one process.
    """

    rank: int
    size: int
    device: torch.device
    failures: Failures
    store: dist.Store | None = None
    _said: set[str] = field(default_factory=set, repr=False, compare=False)

    def warn(self, text: str) -> None:
        """Warn of what all ranks know: on rank 0, once."""
        if self.rank == 0 and text not in self._said:
            self._said.add(text)
            warn(text)

    def warn_of_rank(self, kind: str, text: str) -> None:
        """Warn of what other ranks may not know: once for each *kind*, on the first rank that finds one."""
        if self.store is None or self.store.add(f"warned/{kind}", 1) == 1:
            self.warn(text) if self.rank == 0 else warn(f"rank {self.rank}: {text}")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among those of its launch, before it joins them."""

    rank: int
    size: int
    device: torch.device


def describe(device_type: str | None = None) -> Launch:
    """The rank, world size and device of this process, without joining anything.

    Raises:
        UsageError: the environment is incomplete or that of an unknown launcher, this process has no device of its own,
            or the script's process group does not communicate for it.
    """
    if dist.is_available() and dist.is_initialized():
        launch = Launch(rank=dist.get_rank(), size=dist.get_world_size(), device=_device(device_type))
        served = sorted({device.type for device in dist.distributed_c10d._get_default_group()._device_types})
        if launch.device.type not in served:
            raise UsageError(
                f"the script's process group ({dist.get_backend()}) communicates for {' and '.join(served)}, but this "
                f"rank computes on {launch.device.type}; call init_process_group without a backend, or pass "
                f"device={served[0]!r}"
            )
        return launch
    rank, size, _ = _variables()
    launch = Launch(rank=_integer(rank, 0), size=_integer(size, 1), device=_device(device_type))
    for name in () if size in os.environ else _SIZES_OF_MPI:
        if _integer(name, 1) > 1:
            raise UsageError(
                f"environment variable {name} says that this is one of {os.environ[name]} processes, but not how they "
                "meet; use torchrun, or call torch.distributed.init_process_group before parallelize"
            )
    return launch


def initialize(
    timeout_seconds: float = 60.0, expected_world_size: int | None = None, device_type: str | None = None
) -> World:
    """Join the processes of a launch; a process that nothing launched is a world of one.

    All keys in the store have a prefix for the restart attempt, because the keys of a killed attempt would make the
    next one fail. If this process has already joined, here or in the user's script, its existing process groups are
    used.

    Args:
        timeout_seconds: limit for every wait of a rank for another, here and later.
        expected_world_size: how many processes the plan is for.
        device_type: ``cpu`` or ``cuda``; by default cuda where there is one.

    Raises:
        PlanMismatchError: there is another number of processes than the plan is for.
        UsageError: see `describe`.
        WorkerError: a rank did not start within the timeout; names all that did not.
    """
    launch = describe(device_type)
    rank, size, device = launch.rank, launch.size, launch.device
    if expected_world_size is not None and size != expected_world_size:
        raise PlanMismatchError(
            f"the plan is for {expected_world_size} processes, but {size} {'was' if size == 1 else 'were'} started; "
            f"use torchrun with {expected_world_size} in total, or make a plan for {size}"
        )
    if size == 1:
        return World(rank=0, size=1, device=device, failures=Failures(0, None, timeout_seconds))
    timeout = timedelta(seconds=timeout_seconds)
    begin = time.monotonic()
    joined = dist.is_initialized()
    # A connection of its own: a long wait for a message would hold up torch's use of the script's store.
    store = dist.distributed_c10d._get_default_store().clone() if joined else _store(rank, timeout)  # type: ignore[attr-defined]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = dist.PrefixStore(f"whale/attempt/{attempt}", store)
    if joined:
        return World(
            rank=rank, size=size, device=device, failures=Failures(rank, shared, timeout_seconds), store=shared
        )
    _wait_for_all(shared, rank, size, max(1.0, timeout_seconds - (time.monotonic() - begin)), timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("groups", shared),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        raise WorkerError(f"rank {rank} could not connect to the other {size - 1} ranks: {error}") from error
    # A gloo thread that releases a tensor after the interpreter has exited aborts the process.
    atexit.register(finalize)
    return World(rank=rank, size=size, device=device, failures=Failures(rank, shared, timeout_seconds), store=shared)


def groups(
    rank_sets: Iterable[Iterable[int]], timeout_seconds: float = 60.0
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make a process group for each distinct set of ranks; the ranks of a key are in order.

    All ranks must call this with the same sets, including ranks in none of them; groups are made in one sorted order.
    Sets of one rank need no group and are omitted. Every call makes new groups, so that operations that must not wait
    for each other, such as collectives of stages and gradient reductions, can have different ones.
    """
    wanted = sorted({tuple(sorted(set(ranks))) for ranks in rank_sets})
    timeout = timedelta(seconds=timeout_seconds)
    return {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in wanted if len(ranks) > 1}


def finalize() -> None:
    """Leave the launch; a no-op if nothing was joined."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
"""Variables of a step that ``srun`` starts; a batch script itself is no step, and is one process."""

_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Numbers of processes that MPI's launchers set."""


def _variables() -> tuple[str, str, str]:
    """Names of the variables for rank, world size and local rank: torchrun's, also inside of a Slurm step."""
    slurm = _SLURM[1] in os.environ and not {*_TORCHRUN[:2]} & {*os.environ}
    return _SLURM if slurm else _TORCHRUN


def _integer(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise UsageError(f"environment variable {name} is {text!r}, not a number; start processes with torchrun")
    return int(text)


def _device(device_type: str | None) -> torch.device:
    if device_type not in (None, "cpu", "cuda"):
        raise UsageError(f"device_type is {device_type!r}; it can be 'cpu' or 'cuda'")
    if device_type == "cpu" or not torch.cuda.is_available():
        if device_type == "cuda":
            raise UsageError("device_type is 'cuda', but torch sees no CUDA device")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and _variables() == _SLURM:
        return torch.device("cuda", 0)  # Slurm may show each process its own device only
    local_rank = _local_rank(count)
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no CUDA device of its own, this node has {count}; "
            f"start at most {count} processes here, or pass device_type='cpu'"
        )
    return torch.device("cuda", local_rank)


def _local_rank(num_devices: int) -> int:
    """This process among those of its node; where no launcher says it, by the device that the script has set, or by
    rank, with as many ranks on each node as it has devices."""
    name = _variables()[2]
    if name in os.environ or not dist.is_initialized():
        return _integer(name, 0)
    return torch.cuda.current_device() or dist.get_rank() % num_devices


def _store(rank: int, timeout: timedelta) -> dist.Store:
    """Connect to torchrun's store, or to the one that rank 0 opens where there is no torchrun."""
    host, port = _address()
    hosted = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(host, port, is_master=hosted, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:  # covers what torch raises for a network, a timeout and a port in use
        who = "rank 0 or torchrun" if not hosted else "this rank"
        raise WorkerError(f"rank {rank}: no store at {host}:{port}, which {who} should open: {error}") from error


_FIRST_PORT, _NUM_PORTS, _STEPS_OF_A_JOB = 20_000, 10_000, 10


def _address() -> tuple[str, int]:
    """Host and port of the store; in a Slurm step that names neither the first host, and a port by job and step."""
    host, default = os.environ.get("MASTER_ADDR"), None
    if _variables() == _SLURM:
        host = host or first_host(os.environ.get("SLURM_STEP_NODELIST", ""))
        step = _integer("SLURM_JOB_ID", 0) * _STEPS_OF_A_JOB + _integer("SLURM_STEP_ID", 0)
        default = _FIRST_PORT + step % _NUM_PORTS
    port = _integer("MASTER_PORT", default)
    if not host:
        raise UsageError("environment variable MASTER_ADDR is not set; start processes with torchrun")
    return host, port


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts.

    >>> first_host("rack1-node[03-05,9],gpu7"), first_host("gpu7,gpu8"), first_host("a[1-2]b[10-12]-ib")
    ('rack1-node03', 'gpu7', 'a1b10-ib')
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", hosts).split(",")[0]


def _wait_for_all(store: dist.Store, rank: int, size: int, seconds: float, timeout_seconds: float) -> None:
    keys = {other: f"alive/{other}" for other in range(size)}
    with contextlib.suppress(RuntimeError):
        store.set(keys[rank], "")
        store.wait(list(keys.values()), timedelta(seconds=seconds))
        return
    try:
        missing = [other for other, key in keys.items() if not store.check([key])]
    except RuntimeError as error:
        raise WorkerError(f"rank {rank} lost the store while it waited for {size} ranks to start: {error}") from error
    if missing:
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        raise WorkerError(
            f"{who} of {size} did not start within {timeout_seconds:g} s; look at the output of that process"
        )
