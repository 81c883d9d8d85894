"""The session of a launch: a name that all of its ranks know, and that no earlier attempt had.

A launcher restarts ranks with the store of the attempt before, whose keys are still there, and its counts of restarts
are those of one agent, so that ranks of several nodes have different ones. So every rank says hello with a number that
it draws, rank 0 answers that number with the name, and the rank confirms it: what an earlier attempt has left is never
an answer.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from whale.errors import WorkerError

__all__ = ["session"]

_PAUSE_SECONDS = 0.01


def session(store: dist.Store, rank: int, size: int, seconds: float, timeout_seconds: float) -> str:
    """The name of the session; every rank has started when it is returned.

    Args:
        store: of the launch, with any keys of earlier attempts.
        rank: this process.
        size: number of processes.
        seconds: limit of the wait.
        timeout_seconds: that of the user, for errors.

    Raises:
        WorkerError: ranks did not start within the limit; names them.
    """
    try:
        missing, name = (_host if rank == 0 else _guest)(store, rank, size, time.monotonic() + seconds)
    except RuntimeError as error:
        raise WorkerError(f"rank {rank} lost the store while it waited for {size} ranks to start: {error}") from error
    if missing:
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        raise WorkerError(
            f"{who} of {size} did not start within {timeout_seconds:g} s; look at the output of that process"
        )
    return name


def _host(store: dist.Store, rank: int, size: int, end: float) -> tuple[list[int], str]:
    """Answer every rank until all have confirmed; the ranks that have not, and the name."""
    name = secrets.token_hex(8)
    answered: dict[int, str] = {}
    waiting = list(range(1, size))
    while waiting:
        for other in waiting:
            if store.check([_hello(other)]):
                said = store.get(_hello(other)).decode()
                if answered.get(other) != said:
                    answered[other] = said
                    store.set(f"whale/answer/{other}/{said}", name)
        waiting = [other for other in waiting if not store.check([_confirmed(name, other)])]
        if waiting and time.monotonic() > end:
            return waiting, name
        time.sleep(_PAUSE_SECONDS if waiting else 0)
    store.set(_complete(name), "")
    return [], name


def _guest(store: dist.Store, rank: int, size: int, end: float) -> tuple[list[int], str]:
    """Wait for the answer of rank 0, and for the others; the ranks that have not come, and the name."""
    number = secrets.token_hex(8)
    store.set(_hello(rank), number)
    answer = f"whale/answer/{rank}/{number}"
    if not _waited(store, answer, end):
        return [0, *(other for other in range(1, size) if not store.check([_hello(other)]))], ""
    name = store.get(answer).decode()
    store.set(_confirmed(name, rank), "")
    if not _waited(store, _complete(name), end):
        return [other for other in range(1, size) if not store.check([_confirmed(name, other)])] or [0], name
    return [], name


def _waited(store: dist.Store, key: str, end: float) -> bool:
    """Whether a key is there in time."""
    try:
        store.wait([key], timedelta(seconds=max(0.01, end - time.monotonic())))
    except dist.DistStoreError:
        return bool(store.check([key]))
    return True


def _hello(rank: int) -> str:
    return f"whale/hello/{rank}"


def _confirmed(name: str, rank: int) -> str:
    return f"whale/confirmed/{name}/{rank}"


def _complete(name: str) -> str:
    return f"whale/complete/{name}"
