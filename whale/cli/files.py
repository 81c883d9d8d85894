"""How a verb writes the file of ``-o``: at once, so that whoever reads it finds the old one or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from whale.errors import UsageError

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Put *text* into the file, in place of what it held.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o666 & ~_umask())
        os.replace(file.name, path)
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
