"""The files that options name, such as ``-o``: written by `whale.ir.files`, with errors that name the option."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from whale.errors import UsageError
from whale.ir.files import check_writable, write_file

if TYPE_CHECKING:
    from whale.ir.profile import ModelProfile


__all__ = ["refuse_same", "refuse_unwritable", "write_pieces", "write_profile", "write_whole"]


def refuse_unwritable(path: Path, option: str = "-o") -> None:
    """Find out that a file cannot be written before time is spent on what it is to hold.

    Raises:
        UsageError: its folder is not there or takes no files, or it is a folder itself; names the option.
    """
    try:
        check_writable(path)
    except OSError as error:
        raise _unwritable(path, option, error) from error


def refuse_same(written: Mapping[str, Path | None], read: Mapping[str, str | Path | None] | None = None) -> None:
    """Refuse one file for two outputs, or an output in place of what is read; by the options that name them.

    Raises:
        UsageError: both options and the file.
    """
    given = [(option, Path(path)) for option, path in (*written.items(), *(read or {}).items()) if path is not None]
    for index, (option, path) in enumerate(given):
        for other, before in given[:index]:
            if other in written and os.path.realpath(path) == os.path.realpath(before) and not _is_special(path):
                what = "each is a file of its own" if option in written else f"the file of {option} would be lost"
                raise UsageError(f"{other} {before} and {option} {path} are the same file; {what}: give another name")


def _is_special(path: Path) -> bool:
    """Whether it is there and holds nothing, such as /dev/null."""
    return path.exists() and not path.is_file()


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
        write_file(path, pieces)
    except OSError as error:
        raise _unwritable(path, option, error) from error


def _unwritable(path: Path, option: str, error: OSError) -> UsageError:
    return UsageError(f"{option} {path} cannot be written: {error.strerror}")


def write_profile(made: ModelProfile, path: Path) -> None:
    """Put the profile there, at once."""
    if path.suffix.lower() != ".json":
        raise UsageError(f"-o {path}: a profile is a JSON file; give a name that ends with .json")
    write_whole(path, made.dumps())
