"""The folder of a run's checkpoints: which there are, who saves there, and the one rename that makes a checkpoint.

A name of a step never means half a checkpoint: it is written under another name, and renamed when all of it is on the
disk; before one is deleted it is renamed, too. It knows names of files and no content.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import socket
import time
from pathlib import Path

from whale.checkpoint.format import MANIFEST, is_step_name, step_name, step_of
from whale.checkpoint.writer import synced_folder, write_synced
from whale.errors import CheckpointError

__all__ = ["begin", "checkpoints_in", "commit", "links", "release", "steps"]

_LOCK = ".lock"
_LOCK_SECONDS = 5.0
"""For so long a process may live on that was killed."""

_locks: dict[tuple[int, str], int] = {}
"""Open files of the locks that this process has."""


def steps(directory: Path) -> list[int]:
    """The steps of complete checkpoints, the newest first."""
    paths = [directory / name for name in _names(directory)]
    return [step_of(path.name) for path in paths if path.is_dir() and not path.is_symlink()]


def links(directory: Path) -> list[Path]:
    """Links with the names of checkpoints, which are not followed."""
    return [directory / name for name in _names(directory) if (directory / name).is_symlink()]


def _names(directory: Path) -> list[str]:
    """The names of checkpoints, of folders or not, the newest first."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(filter(is_step_name, os.listdir(directory)), key=step_of, reverse=True)
    return []


def begin(directory: Path, step: int) -> Path:
    """Make an empty folder for a checkpoint, and delete what attempts before have left; rank 0 alone calls it.

    Raises:
        CheckpointError: another process saves there.
        OSError: it cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _lock(directory)
    for entry in list(directory.iterdir()):
        if entry.name.startswith(".step-") and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
    folder = directory / f".{step_name(step)}.{secrets.token_hex(4)}.part"
    folder.mkdir()
    return folder


def commit(folder: Path, step: int, manifest: str, keep: int) -> None:
    """Make a folder with the files of all ranks the checkpoint of a step; it and the newest others stay, *keep* in all.

    Raises:
        OSError: it cannot be written.
    """
    directory = folder.parent
    write_synced(folder / MANIFEST, manifest.encode())
    synced_folder(folder)
    final = directory / step_name(step)
    gone = [_put_aside(final)] if final.exists() else []
    os.rename(folder, final)
    synced_folder(directory)
    others = [other for other in steps(directory) if other != step]
    gone += [_put_aside(directory / step_name(other)) for other in others[keep - 1 :]]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)


def _put_aside(path: Path) -> Path:
    """Rename a checkpoint, so that none of its name is there while it is deleted."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    os.rename(path, aside)
    return aside


def _lock(directory: Path) -> None:
    """Let this process alone save to a directory until it ends, however it ends."""
    key = os.getpid(), os.path.realpath(directory)  # a fork has no locks
    if key in _locks:
        return
    file = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process: forks do not have it
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                break  # a file system without locks
            if time.monotonic() > end:
                who = os.pread(file, 200, 0).decode(errors="replace").strip()
                os.close(file)
                raise CheckpointError(
                    f"{directory}: {who or 'another process'} saves checkpoints here; give each job its own directory"
                ) from None
            time.sleep(0.1)
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _locks[key] = file


def release(directory: Path) -> None:
    """Let others save to a directory, in which this process saves no more."""
    file = _locks.pop((os.getpid(), os.path.realpath(directory)), None)
    if file is not None:
        os.close(file)


def checkpoints_in(path: Path) -> list[Path]:
    """Folders of checkpoints: *path* itself, or those in it, the newest first."""
    if is_step_name(path.name) and (path.is_symlink() or (path / MANIFEST).is_file()):
        return [path]
    return [path / step_name(step) for step in (steps(path) if path.is_dir() else ())]
