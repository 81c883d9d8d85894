"""Joining a launch: from torchrun's environment to process groups, with errors instead of hangs.

A wrong number of processes is detected before any process group exists, and ranks that did not start are named. One
process without torchrun is a world of one, without a process group. This module knows no plans and no models; the
environment is read when `initialize` is called, never at import.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from whale.errors import PlanMismatchError, UsageError, WorkerError
from whale.runtime.failure import Failures

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


def initialize(
    timeout_seconds: float = 60.0, expected_world_size: int | None = None, device_type: str | None = None
) -> World:
    """Join the processes of a launch; a process without torchrun is a world of one.

    All keys in the store have a prefix for the restart attempt, because the keys of a killed attempt would make the
    next one fail. If this process has already joined, here or in the user's script, its existing process groups are
    used.

    Args:
        timeout_seconds: limit for every wait of a rank for another, here and later.
        expected_world_size: how many processes the plan is for.
        device_type: ``cpu`` or ``cuda``; by default cuda where there is one.

    Raises:
        PlanMismatchError: there is another number of processes than the plan is for.
        UsageError: torchrun's environment is incomplete, or a process has no device of its own.
        WorkerError: a rank did not start within the timeout; names all that did not.
    """
    rank, size = _integer("RANK", 0), _integer("WORLD_SIZE", 1)
    if expected_world_size is not None and size != expected_world_size:
        raise PlanMismatchError(
            f"the plan is for {expected_world_size} processes, but {size} {'was' if size == 1 else 'were'} started; "
            f"use torchrun with {expected_world_size} in total, or make a plan for {size}"
        )
    device = _device(device_type)
    if size == 1:
        return World(rank=0, size=1, device=device, failures=Failures(0, None, timeout_seconds))
    timeout = timedelta(seconds=timeout_seconds)
    begin = time.monotonic()
    joined = dist.is_initialized()
    if joined and (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise UsageError(
            f"the default process group has this process as rank {dist.get_rank()} of {dist.get_world_size()}, but the "
            f"environment variables RANK and WORLD_SIZE say {rank} of {size}; start all processes with torchrun"
        )
    store = _store(rank, timeout, hosted=rank == 0 and not joined)
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


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process in torchrun's environment, before it joins the others."""

    rank: int
    size: int
    device: torch.device


def describe(device_type: str | None = None) -> Launch:
    """Read torchrun's environment without joining anything; one process is a launch of one.

    Raises:
        UsageError: the environment is incomplete, or this process has no device of its own.
    """
    return Launch(rank=_integer("RANK", 0), size=_integer("WORLD_SIZE", 1), device=_device(device_type))


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
    local_rank, count = _integer("LOCAL_RANK", 0), torch.cuda.device_count()
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no CUDA device of its own, this node has {count}; "
            f"start at most {count} processes here, or pass device_type='cpu'"
        )
    return torch.device("cuda", local_rank)


def _store(rank: int, timeout: timedelta, *, hosted: bool) -> dist.Store:
    """Connect to torchrun's store, or to the one that rank 0 opens (*hosted*) where there is no torchrun."""
    host, port = os.environ.get("MASTER_ADDR"), _integer("MASTER_PORT")
    if not host:
        raise UsageError("environment variable MASTER_ADDR is not set; start processes with torchrun")
    hosted = hosted and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(host, port, is_master=hosted, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:  # covers what torch raises for a network, a timeout and a port in use
        who = "rank 0 or torchrun" if not hosted else "this rank"
        raise WorkerError(f"rank {rank}: no store at {host}:{port}, which {who} should open: {error}") from error


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
