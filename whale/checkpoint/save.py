"""Saving a checkpoint: a copy of this rank's parts, which a thread writes beside the training.

The ranks meet through the store of the launch, over a connection of the thread's own: no collective runs, for its order
among those of the training would be unknown. A rank that fails tells the others, and none makes a checkpoint then.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from whale.arguments import check_count, check_type, known_arguments
from whale.checkpoint import folder as folders
from whale.checkpoint.collect import OF_PROCESS, Collected, collect, engine_of, sorted_out
from whale.checkpoint.format import MANIFEST, MAX_STEP, Manifest, check_manifest, step_name, written_manifest
from whale.checkpoint.staging import Staging
from whale.checkpoint.writer import write_rank
from whale.errors import CheckpointError, UsageError, WhaleError
from whale.runtime.launch import World
from whale.runtime.module import ParallelModule
from whale.runtime.store import Board

__all__ = ["save_checkpoint", "wait_for_checkpoints"]

_TOPIC = "checkpoint that is saved"
_LAST_SECONDS = 10.0
"""For so long rank 0 waits until the others know that a checkpoint is complete; it may have the store."""


@known_arguments()
def save_checkpoint(
    directory: str | PathLike[str],
    model: ParallelModule,
    *,
    step: int,
    keep: int = 2,
    asynchronous: bool = True,
    **state: Any,
) -> None:
    """Save the state of a training run, from which any plan on any number of ranks goes on. Every rank must call it.

    It returns when this rank's parts are copied, and a thread writes them while training goes on; an error there is
    raised by the next save, by :func:`wait_for_checkpoints`, or at the end of the script. The directory must be one
    that all hosts see. A crash at any time leaves the checkpoints before as they were.

    Args:
        directory: of the run; the checkpoint is ``step-00000100`` there.
        model: the parallel model: parameters, buffers, the position of random operators, the loss scale.
        step: number of steps that were done.
        keep: how many checkpoints stay: this one, and the newest others.
        asynchronous: whether training goes on while files are written.
        state: objects with ``state_dict`` and ``load_state_dict``, by name: optimizers of the model, of which each rank
            saves its parts, schedulers, loaders; copies of the model; and generators of random numbers. Those of torch,
            ``random`` and ``numpy.random`` themselves are saved always.

    Raises:
        UsageError: an object has no state, or one that files cannot hold; the step has more than 18 digits, or differs
            from that of another rank.
        CheckpointError: this one, or an asynchronous one before, could not be written.
        WorkerError: a rank did not come within the timeout of steps.

    >>> import tempfile, torch, whale
    >>> model = whale.parallelize(torch.nn.Linear(4, 1), torch.ones(2, 4), loss_fn=lambda y, batch: y.sum())
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with tempfile.TemporaryDirectory() as runs:
    ...     whale.save_checkpoint(runs, model, step=3, optimizer=optimizer)
    ...     done = whale.load_checkpoint(runs, model, optimizer=optimizer)
    >>> done.step
    3
    """
    check_type("directory", directory, (str, PathLike), "the path of a folder")
    check_type("model", model, ParallelModule, "a parallel model, as whale.parallelize returns it")
    check_count("step", step, least=0, most=MAX_STEP)
    check_count("keep", keep)
    engine_of(model).check_drained("save_checkpoint")
    wait_for_checkpoints()
    world = engine_of(model).world
    meeting = Board(_with_own_store(world), _TOPIC, world.failures.timeout_seconds)
    try:
        _warn_of_newer(world, Path(directory), step, keep)
        kinds = sorted_out(model, state)
        found = collect(kinds, _staging_of(model) if asynchronous else None)
    except Exception as error:  # whatever the objects' own methods raise
        if world.rank == 0:
            meeting.put("folder", ["", str(error), {}])
        meeting.put(f"written/{world.rank}", ["", str(error), CheckpointError.exit_code])
        raise
    scaler = model.loss_scaler
    manifest = Manifest.model_construct(
        step=step,
        indexes=(),  # when all ranks have written them
        names=found.names,
        optimizers=found.classes,
        objects={of: state.encoded for of, state in found.objects.items() if not of.startswith(OF_PROCESS)},
        loss_scaler=None if scaler is None else scaler.state_dict(),
        versions={"torch": torch.__version__},
    )
    saving = _Saving(Path(directory).absolute(), meeting, found, manifest, keep)
    if asynchronous:
        _see_the_end()
        _active.append(saving)
        saving.start()
    else:
        saving.run()
        saving.check()


def _warn_of_newer(world: World, directory: Path, step: int, keep: int) -> None:
    """Warn of checkpoints from before a run went back: a load takes the newest."""
    with suppress(OSError):  # the save says more
        newest = max(folders.steps(directory) if world.rank == 0 else (), default=step)
        if newest > step:
            then = "delete it to go on from here" if keep > 1 else "keep=1 deletes it"
            world.warn(f"{directory} has a newer checkpoint than the one that is saved, that of step {newest}: {then}")


def wait_for_checkpoints() -> None:
    """Wait until checkpoints are written that are being saved. At the end of a script this happens by itself.

    Raises:
        CheckpointError, WorkerError: one could not be written.
        UsageError: ranks gave it several steps.
    """
    while _active:
        saving = _active[0]
        saving.join()
        _active.remove(saving)
        saving.check()


_active: list[_Saving] = []
_stagings: WeakKeyDictionary[ParallelModule, Staging] = WeakKeyDictionary()


def _staging_of(model: ParallelModule) -> Staging:
    """The memory of a model's copies, of which none is written any more."""
    found = _stagings.setdefault(model, Staging())
    found.clear()
    return found


class _Saving(threading.Thread):
    """The writing of one checkpoint; the interpreter waits for it at its end."""

    def __init__(self, directory: Path, meeting: Board, found: Collected, manifest: Manifest, keep: int) -> None:
        super().__init__(name="whale-checkpoint", daemon=False)
        self.directory, self.meeting, self.found, self.manifest, self.keep = directory, meeting, found, manifest, keep
        self.error: WhaleError | None = None

    def check(self) -> None:
        """Raise what has failed."""
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        """Write, and keep an error."""
        try:
            self._write()
        except WhaleError as error:
            self.error = error
        except BaseException as error:  # of whatever kind: the script must see it
            self.error = CheckpointError(f"the checkpoint in {self.directory} was not saved: {_said(error)}")
            self.error.__cause__ = error

    def _write(self) -> None:
        """Write this rank's files; rank 0 makes the checkpoint when all ranks have."""
        rank = self.meeting.world.rank
        folder, digests = self._folder()
        try:
            self.found.add_objects(rank, digests)
            digest = write_rank(folder, rank, self.found.tiles(), self.found.groups, self.found.values)
            self.meeting.put(f"written/{rank}", [digest, "", 0])
        except Exception as error:
            self.meeting.put(f"written/{rank}", ["", _said(error), CheckpointError.exit_code])
            if rank != 0:
                raise self._failed(rank, _said(error)) from error
        self.found = Collected()
        if rank == 0:
            self._complete(folder)
        who, failure, code = self.meeting.get("done", 0)
        self.meeting.put(f"seen/{rank}", "")
        if failure:
            raise self._failed(who, failure, code)
        if rank == 0:
            self._wait_until_seen()

    def _folder(self) -> tuple[Path, dict[str, str]]:
        """The folder that rank 0 makes, and the digests of its objects' states."""
        rank = self.meeting.world.rank
        if rank == 0:
            try:
                digests = self.found.digests()
                folder = folders.begin(self.directory, self.manifest.step)
            except Exception as error:  # the others wait
                self.meeting.put("folder", ["", _said(error), {}])
                raise self._failed(0, _said(error)) from error
            self.meeting.put("folder", [folder.name, "", digests])
            return folder, digests
        name, failure, digests = self.meeting.get("folder", 0)
        if failure:
            raise self._failed(0, failure)
        folder, code = self.directory / name, CheckpointError.exit_code
        if not name.startswith(f".{step_name(self.manifest.step)}."):
            failure = (
                f"it saves step {self.manifest.step}, and rank 0 {name[1:].split('.')[0]}: give the same on all ranks"
            )
            code = UsageError.exit_code
        elif not folder.is_dir():
            failure = f"it does not see {folder}, which rank 0 has made: all hosts must share the directory"
        if failure:
            self.meeting.put(f"written/{rank}", ["", failure, code])
            raise self._failed(rank, failure, code)
        return folder, digests

    def _complete(self, folder: Path) -> None:
        """Make the checkpoint, or delete what there is of it."""
        world = self.meeting.world
        digests, who, failure, code = [], 0, "", CheckpointError.exit_code
        try:
            for rank in range(world.size):
                digest, failed, why = self.meeting.get(f"written/{rank}", rank)
                if failed and not failure:
                    who, failure, code = rank, failed, why
                digests.append(digest)
            if not failure:
                manifest = self.manifest.model_copy(update={"indexes": tuple(digests)})
                text = written_manifest(manifest)
                check_manifest(text.encode(), folder / MANIFEST)
                folders.commit(folder, self.manifest.step, text, self.keep)
        except BaseException as error:
            failure = _said(error)
            if isinstance(error, WhaleError):
                raise self._failed(0, failure) from error
            raise
        finally:
            if failure:
                shutil.rmtree(folder, ignore_errors=True)
            self.meeting.put("done", [who, failure, code])

    def _wait_until_seen(self) -> None:
        """Wait until all ranks know that the checkpoint is complete, and leave nothing in the store."""
        world = self.meeting.world
        last = Board.__new__(Board)
        last.__dict__.update(self.meeting.__dict__, patience_seconds=_LAST_SECONDS)
        with suppress(WhaleError):
            for rank in range(world.size):
                last.get(f"seen/{rank}", rank)
            ranks = [f"{topic}/{rank}" for topic in ("written", "seen") for rank in range(world.size)]
            last.forget(["folder", "done", *ranks])

    def _failed(self, rank: int, why: str, code: int = CheckpointError.exit_code) -> WhaleError:
        kind = UsageError if code == UsageError.exit_code else CheckpointError
        return kind(
            f"the checkpoint of step {self.manifest.step} in {self.directory} was not saved: rank {rank}: {why}"
        )


def _said(error: BaseException) -> str:
    """An error in a line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return f"{error}" if isinstance(error, WhaleError) else f"{type(error).__name__}: {error}"


def _with_own_store(world: World) -> World:
    """The same world over a connection of its own: waits in a thread would hold up those of the training."""
    return world if world.store is None else replace(world, store=world.store.clone())  # type: ignore[attr-defined]


@cache
def _see_the_end() -> None:
    atexit.register(_end)


def _end() -> None:
    """A script that has not seen that a checkpoint failed must not end as if it had not."""
    try:
        wait_for_checkpoints()
    except WhaleError as error:
        sys.stdout.flush()
        sys.stderr.write(f"whale: error: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
