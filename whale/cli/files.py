"""Atomic writes of the file of ``-o``: a reader sees the old file or the new one, whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TYPE_CHECKING

from whale.errors import UsageError

if TYPE_CHECKING:
    from whale.ir.profile import ModelProfile


__all__ = ["refuse_unwritable", "write_pieces", "write_profile", "write_whole"]


def refuse_unwritable(path: Path, option: str = "-o") -> None:
    """Find out that a file cannot be written before time is spent on what it is to hold.

    Raises:
        UsageError: its folder is not there or takes no files, or it is a folder itself; names the option.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with _beside(path):
            pass
    except OSError as error:
        raise _unwritable(path, option, error) from error


def write_whole(path: Path, text: str, option: str = "-o") -> None:
    """Put *text* into the file that *option* names, in place of what it held.

    Raises:
        UsageError: it cannot be written.
    """
    write_pieces(path, (text,), option)


def write_pieces(path: Path, pieces: Iterable[str], option: str = "-o") -> None:
    """Put a text of *pieces*, made while it is written, into the file that *option* names; none if one fails.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        with _beside(path, delete=False) as file:
            try:
                file.writelines(pieces)
                file.flush()
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise _unwritable(path, option, error) from error


def _beside(path: Path, *, delete: bool = True) -> IO[str]:
    """A new file in the same folder."""
    return NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=delete, encoding="utf-8")


def _unwritable(path: Path, option: str, error: OSError) -> UsageError:
    return UsageError(f"{option} {path} cannot be written: {error.strerror}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_profile(made: ModelProfile, path: Path) -> None:
    """Put the profile there, at once."""
    if path.suffix.lower() != ".json":
        raise UsageError(f"-o {path}: a profile is a JSON file; give a name that ends with .json")
    write_whole(path, made.dumps())
