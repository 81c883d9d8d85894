"""How a verb that takes long shows how far it is, and how it is stopped with what it has so far.

Progress goes to stderr: a bar on a terminal, elsewhere one plain line every ten seconds. It knows no search.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType
from typing import Any

from whale.cli.options import is_quiet, note

__all__ = ["Interruption", "ProgressLine"]

SECONDS_BETWEEN_LINES = 10.0


class Interruption:
    """While it is entered, Ctrl-C and SIGTERM are remembered and not raised; the second one ends the process.

    Attributes:
        signal: the number of the signal that came; None: none.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._noted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    def came(self) -> bool:
        """Whether the process is to stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Exit code of a process that a signal stopped: 130 or 143; 0 without one."""
        return 0 if self.signal is None else 128 + self.signal


class ProgressLine:
    """How far something of known length is, with a text that changes; a context manager.

    Args:
        what: is being done.
        seconds: that it may take.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._bar: Any = None
        self._task: Any = None
        self._last_line = 0.0

    def __enter__(self) -> ProgressLine:
        if sys.stderr.isatty() and not is_quiet():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[now]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=self._seconds, now="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, elapsed: float, text: str) -> None:
        """Show the progress after the given seconds."""
        if self._bar is not None:
            self._bar.update(self._task, completed=min(elapsed, self._seconds), now=text)
        elif elapsed - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = elapsed
            note(f"{self._what}: {text}, {elapsed:.0f} s")
