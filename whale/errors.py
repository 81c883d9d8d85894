"""The exceptions of Whale, as one tree.

::

    WhaleError                      exit 1   anything below; on its own, a fault of ours
    ├── UsageError (ValueError)     exit 2   a wrong argument, option or combination of them
    │   └── AnnotationError         exit 2   a wrong annotation: pattern, nesting, degree
    ├── CaptureError                exit 2   the model cannot be captured as a graph; carries file and line
    ├── InputFileError (ValueError) exit 3   a bad cluster, plan or profile file; carries path and line
    │   └── PlanMismatchError       exit 3   a good plan that does not fit this world or this model
    ├── InfeasibleError             exit 4   no plan satisfies memory, devices and annotations together
    ├── CheckpointError             exit 5   a checkpoint is damaged, incomplete or of another model
    ├── WorkerError (RuntimeError)  exit 6   a rank failed, did not start, or timed out
    └── ScheduleError               exit 1   the static check found an inconsistency in our own programs

``except whale.WhaleError`` catches all of them. ``exit_code`` is what the ``whale`` command exits with. A message
says what was given, which rule it breaks and what to do about it. This module imports nothing of Whale and nothing
heavy.
"""

from __future__ import annotations

from os import PathLike, fspath
from typing import ClassVar

__all__ = [
    "AnnotationError",
    "CaptureError",
    "CheckpointError",
    "InfeasibleError",
    "InputFileError",
    "PlanMismatchError",
    "ScheduleError",
    "UsageError",
    "WhaleError",
    "WorkerError",
]


def _located(message: str, path: str | None, line: int | None) -> str:
    """Put ``path:line:`` before ``message``, as compilers do, leaving out what is not known."""
    if path is None:
        return message if line is None else f"line {line}: {message}"
    return f"{path}: {message}" if line is None else f"{path}:{line}: {message}"


class WhaleError(Exception):
    """Base of every exception that Whale raises on purpose; raised itself only for a fault of ours.

    >>> WhaleError("anything").exit_code
    1
    """

    exit_code: ClassVar[int] = 1


class UsageError(WhaleError, ValueError):
    """A wrong argument, option or combination of them: the caller can fix it without touching a file."""

    exit_code: ClassVar[int] = 2


class AnnotationError(UsageError):
    """A wrong annotation: a key that matches no module, a nest without a meaning, a degree that does not fit."""


class _LocatedError(WhaleError):
    """An error at a place in a file: ``str`` shows it, and ``path``, ``line`` and ``message`` hold its parts."""

    def __init__(self, message: str, *, path: str | PathLike[str] | None = None, line: int | None = None) -> None:
        self.message = message
        self.path: str | None = None if path is None else fspath(path)
        self.line = line
        super().__init__(_located(message, self.path, line))

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling between processes, which would otherwise put the place into the message twice."""
        return (type(self), (self.message,), {"path": self.path, "line": self.line, "args": self.args})


class CaptureError(_LocatedError):
    """The model cannot be captured as one graph; ``file`` and ``line`` say where in the model's source.

    >>> str(CaptureError("a branch depends on data", file="model.py", line=12))
    'model.py:12: a branch depends on data'
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, file: str | PathLike[str] | None = None, line: int | None = None) -> None:
        super().__init__(message, path=file, line=line)

    @property
    def file(self) -> str | None:
        """The source file of the model; may be set later, which leaves the message as it is."""
        return self.path

    @file.setter
    def file(self, file: str | None) -> None:
        self.path = file


class InputFileError(_LocatedError, ValueError):
    """A bad cluster, plan, profile or configuration file; ``path`` and ``line`` say where.

    >>> str(InputFileError("unknown key 'nodez'", path="cluster.toml", line=3))
    "cluster.toml:3: unknown key 'nodez'"
    """

    exit_code: ClassVar[int] = 3


class PlanMismatchError(InputFileError):
    """A well-formed plan that does not fit: another world size, another model, other devices."""


class InfeasibleError(WhaleError):
    """No plan satisfies memory, devices and annotations together; the message says what to relax.

    Attributes:
        lacking_bytes: what the fullest device lacks, if that is known.
    """

    exit_code: ClassVar[int] = 4
    lacking_bytes: float = float("inf")


class CheckpointError(WhaleError):
    """A checkpoint is damaged, incomplete or of another model; nothing was loaded."""

    exit_code: ClassVar[int] = 5


class WorkerError(WhaleError, RuntimeError):
    """A rank failed, did not start, or timed out; the message names the rank and the operation.

    Attributes:
        first_code: exit code of the error of the rank that failed first, if that is known.
    """

    exit_code: ClassVar[int] = 6
    first_code: int = exit_code

    @classmethod
    def after(cls, code: int, message: str) -> WorkerError:
        """The error of a rank that stops because another one did, with this exit code."""
        error = cls(message)
        error.first_code = code
        return error


class ScheduleError(WhaleError):
    """The static check found an inconsistency in Whale's own programs, before anything ran: please report it."""

    exit_code: ClassVar[int] = 1
