"""Writes of files: a reader sees the old file or the new one, whole; a link keeps pointing where it does, and a device
or a pipe is written to, never replaced. It knows no content and no option."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

__all__ = ["check_writable", "write_file"]

_OF_THE_KERNEL = ("/dev", "/proc")
"""Folders whose links lead to open files, such as ``/dev/stdout``, which another process or a shell holds."""


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out that a file cannot be written before time is spent on its content; nothing is left there.

    Raises:
        OSError: its folder is missing or takes no files, it is a folder itself, or a device that takes nothing.
    """
    place, found = _place(Path(path))
    if found is None:
        with _beside(place):
            pass
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write_file(path: str | os.PathLike[str], pieces: Iterable[str]) -> None:
    """Put a text of *pieces*, made while it is written, into a file in place of what it held; it stays as it was if one
    piece fails. What is no regular file gets the pieces one after the other.

    Raises:
        OSError: it cannot be written.
    """
    place, found = _place(Path(path))
    if found is not None:
        with open(place, "w", encoding="utf-8") as file:
            file.writelines(pieces)
        return
    with _beside(place, delete=False) as file:
        try:
            file.writelines(pieces)
            file.flush()
            os.chmod(file.name, _mode_of(place))
            os.replace(file.name, place)
        except BaseException:
            os.unlink(file.name)
            raise


def _place(path: Path) -> tuple[Path, os.stat_result | None]:
    """The file to replace, links followed; or the path itself with its status, if it is opened and written through."""
    try:
        found = path.stat()
    except FileNotFoundError:  # a link to a file that is still missing is one of its target
        return Path(os.path.realpath(path)), None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    of_the_kernel = path.absolute().parts[:2] in [Path(folder).parts for folder in _OF_THE_KERNEL]
    if not stat.S_ISREG(found.st_mode) or (of_the_kernel and path.is_symlink()):
        return path, found
    return Path(os.path.realpath(path)), None


def _beside(path: Path, *, delete: bool = True) -> IO[str]:
    """A new file in the same folder."""
    return NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=delete, encoding="utf-8")


def _mode_of(path: Path) -> int:
    """The permissions of a file that is there; else those of a new one."""
    with suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
