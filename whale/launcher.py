"""Starting ranks from a notebook or a script: ``launch`` runs a function on several processes of this machine.

torch's elastic launcher, which is torchrun without its command line, starts the processes, watches them and ends them.
This module chooses how they start, brings back what they return and says which rank failed first, and where. It knows
no models; a rank finds its world as under torchrun.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from whale.arguments import check_choice, check_count, check_number, known_arguments
from whale.errors import UsageError, WorkerError
from whale.runtime.launch import describe

__all__ = ["launch"]


@known_arguments()
def launch(
    function: Callable[..., Any],
    *args: Any,
    processes: int,
    results: str = "rank0",
    timeout_seconds: float | None = None,
) -> Any:
    """Run ``function(*args)`` on *processes* ranks of this machine, and return what rank 0 returns.

    It does for a notebook or a script what torchrun does for a command: ``whale.parallelize`` inside of the function
    finds its rank. Ranks are forks of this process, so that functions of a notebook, closures and arguments need no
    pickling; a fork computes on one thread of a CPU. If this process has used CUDA, or computed gradients beside GPUs,
    ranks start afresh and import the function, which must then be in a module or in a script whose own calls are under
    ``if __name__ == "__main__":``.

    Tensors in results arrive on the CPU. Whatever goes wrong, no process is left.

    Args:
        function: what every rank runs.
        args: its arguments.
        processes: number of ranks; on GPUs at most one for each.
        results: ``rank0``, or ``all`` for a list of every rank's result, by rank.
        timeout_seconds: limit for the whole run; by default none. Waits of ranks for each other have the limit that
            ``whale.parallelize`` is given.

    Raises:
        UsageError: this process is itself a rank, or neither of the two ways to start ranks is possible.
        WorkerError: a rank raised an exception, died, or did not end in time; has that rank's traceback.

    >>> import torch, whale
    >>> def train(rows):
    ...     model = whale.parallelize(torch.nn.Linear(4, 1), torch.ones(rows, 4), loss_fn=lambda y, batch: y.sum())
    ...     return model.world_size
    >>> whale.launch(train, 8, processes=2)  # doctest: +SKIP
    2
    """
    check_count("processes", processes)
    check_choice("results", results, ("rank0", "all"))
    if timeout_seconds is not None:
        check_number("timeout_seconds", timeout_seconds, above=0)
    if not callable(function):
        raise UsageError(f"function is {function!r}; give launch the function that every rank runs, without calling it")
    own = describe("cpu")
    if own.size > 1:
        raise UsageError(
            f"this process is rank {own.rank} of {own.size} already; call the function itself, or start the script "
            "with python and not with a launcher"
        )
    with _as_it_was(), tempfile.TemporaryDirectory(prefix="whale-launch-") as name:
        folder = Path(name)
        method = "fork" if _can_fork() else _spawn(function, args)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method=method,
            logs_specs=DefaultLogsSpecs(log_dir=name),
        )
        try:
            elastic_launch(config, _run)(folder, method, timeout_seconds, function, args)
        except ChildFailedError as failed:
            raise _error(folder, processes, timeout_seconds, failed.failures) from None
        found = [_load(folder, rank, processes) for rank in range(processes if results == "all" else 1)]
    return found if results == "all" else found[0]


# --- in the process that launches -------------------------------------------------------------------------------------

_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.multiprocessing.spawn",
)
"""Loggers that show a failed rank in their own words, besides the error."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PROBE_SECONDS = 10.0


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Leave signal handlers, environment and loggers as they were; a signal that ended the ranks acts afterwards.

    torch's check for CUDA goes through NVML meanwhile: through the CUDA runtime, it would make later forks useless.
    """
    set_ = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}
    variables = {name: os.environ.get(name) for name in set_}
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    disabled = [logger.disabled for logger in loggers]
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if is_main else {}
    received: int | None = None
    try:
        os.environ.update(set_)
        for logger in loggers:
            logger.disabled = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            yield
    except SignalException as caught:
        received = int(caught.sigval)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for logger, was in zip(loggers, disabled, strict=True):
            logger.disabled = was
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    if received is not None:
        signal.raise_signal(received)
        raise WorkerError(f"signal {signal.Signals(received).name} ended all ranks")


def _can_fork() -> bool:
    """Whether forks of this process can compute: one tries, because CUDA and autograd say it only there."""
    process = multiprocessing.get_context("fork").Process(target=_compute_in_fork, daemon=True)
    process.start()
    process.join(_PROBE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode == 0


def _spawn(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The start method ``spawn``, for a function that new processes can import."""
    why = "ranks cannot be forks of this process, because it has used CUDA (or, beside GPUs, computed gradients)"
    remedy = (
        "restart the kernel and call launch first, with all of that inside of the function, torch.cuda.is_available "
        "too; or put the function into a module"
    )
    if getattr(function, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise UsageError(f"{why}; and new processes cannot import {_name(function)} from a notebook; {remedy}")
    try:
        pickle.dumps((function, args))
    except Exception as error:  # whatever the arguments' own methods raise
        raise UsageError(
            f"{why}; and new processes cannot be given {_name(function)} and its arguments ({error}); {remedy}"
        ) from error
    return "spawn"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _compute_in_fork() -> NoReturn:
    """End with 0 if CUDA and autograd work in this fork."""
    with contextlib.suppress(BaseException):
        torch.set_num_threads(1)
        if not torch.cuda._is_in_bad_fork():
            torch.ones(1, requires_grad=True).sum().backward()
            os._exit(0)
    os._exit(1)


def _error(
    folder: Path, processes: int, timeout_seconds: float | None, failures: dict[int, ProcessFailure]
) -> WorkerError:
    """The error of the rank that failed first."""
    errors = {int(path.stem): path.read_text(encoding="utf-8") for path in folder.glob("*.error")}
    if errors:
        rank = min(errors, key=lambda rank: float(errors[rank].partition("\n")[0]))
        _, headline, shown = errors[rank].split("\n", 2)
        return WorkerError(f"rank {rank} of {processes} failed: {headline}\n\n{shown}")
    stacks = {int(path.stem): path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.stack"))}
    stacks = {rank: stack for rank, stack in stacks.items() if stack}
    if stacks:
        late = [rank for rank in range(processes) if not (folder / f"{rank}.result").exists()]
        who = f"rank {late[0]}" if len(late) == 1 else f"ranks {late}"
        shown = "\n".join(
            f"rank {rank} was here (most recent call first):{_own_frames(stack)}" for rank, stack in stacks.items()
        )
        return WorkerError(f"{who} of {processes} did not end within {timeout_seconds:g} s\n\n{shown}")
    rank, failure = min(failures.items())
    how = f"signal {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return WorkerError(f"rank {rank} of {processes} ended with {how}, without an exception; look at its output above")


def _own_frames(stack: str) -> str:
    """The frames of the main thread, which faulthandler writes last, inside of the function."""
    return stack.rpartition("(most recent call first):")[2].partition(f'\n  File "{__file__}"')[0]


def _load(folder: Path, rank: int, processes: int) -> Any:
    try:
        return torch.load(folder / f"{rank}.result", map_location="cpu", weights_only=False)
    except Exception as error:  # whatever the result's own methods raise
        raise WorkerError(f"what rank {rank} of {processes} returned cannot be loaded here: {error}") from error


# --- in a rank --------------------------------------------------------------------------------------------------------


def _run(
    folder: Path, method: str, timeout_seconds: float | None, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Run the function on this rank, and leave its result, its error or, on a timeout, its stack in the folder."""
    rank = os.environ["RANK"]
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # a rank that waits in C++ would not come to Python's handlers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if method == "fork" or (os.environ["WORLD_SIZE"] != "1" and "OMP_NUM_THREADS" not in os.environ):
        torch.set_num_threads(1)  # a fork has none of the threads that OpenMP expects; else as under torchrun
    try:
        result = _call(folder / f"{rank}.stack", timeout_seconds, function, args)
        try:
            torch.save(result, folder / f"{rank}.result")
        except Exception as error:  # whatever the result's own methods raise
            raise UsageError(
                f"{_name(function)} returned {type(result).__name__}, which cannot be sent to the process that called "
                f"launch ({error}); return tensors, numbers, texts and containers of them"
            ) from error
    except BaseException as error:
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename == __file__:
            own = own.tb_next
        headline = traceback.format_exception_only(error)[0].strip().replace("\n", " ")
        shown = "".join(traceback.format_exception(type(error), error, own))
        part = folder / f"{rank}.part"  # this rank may be ended while it writes
        part.write_text(f"{time.time()}\n{headline}\n{shown}", encoding="utf-8")
        part.rename(folder / f"{rank}.error")
        raise


def _call(stack: Path, timeout_seconds: float | None, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with contextlib.ExitStack() as left:
        if timeout_seconds is not None:
            file = left.enter_context(stack.open("w"))
            faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=file)
            left.callback(faulthandler.cancel_dump_traceback_later)
        try:
            return function(*args)
        except SystemExit as end:
            if end.code:
                raise
            return None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
