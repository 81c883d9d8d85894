"""How a rank ends that a launcher watches: the reason in the launcher's file, and the exit code of the error.

It knows no ranks, and needs no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from whale.errors import WhaleError, WorkerError

__all__ = ["ELASTIC", "ENDING", "end_with_own_code", "tell_launcher"]

ELASTIC = "WHALE_ELASTIC"
"""Environment variable by which ``whale run`` says how many machines a job may have, such as ``3:8``."""

ENDING = (2, 3, 4)
"""Exit codes after which nothing is started again: a wrong argument, a bad file, and what no plan fits are the same
the next time."""


def tell_launcher(error: BaseException, message: str) -> str:
    """Under torchrun, leave the reason where it looks for one, so that its closing report shows it for the first rank.

    The form is that of ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler``, which would need torch.
    Returns why that failed, if it did.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return ""
    reason = message if isinstance(error, WhaleError) else "".join(traceback.format_exception(error)) + message
    extra = {"py_callstack": reason, "timestamp": str(int(time.time()))}
    try:
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
    except OSError as failure:
        return str(failure)
    return ""


def end_with_own_code() -> None:
    """Under ``whale run``, let a `WhaleError` that nothing catches end the process with its exit code, not with 1: by
    it the agent knows what no restart will fix. Where another rank failed first it is that one's."""
    if ELASTIC not in os.environ or getattr(sys.excepthook, "ends_with_own_code", False):
        return
    before = sys.excepthook

    def ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, WhaleError):
            tell_launcher(error, f"{kind.__name__}: {error}")
            raise SystemExit(error.first_code if isinstance(error, WorkerError) else error.exit_code)

    ended.ends_with_own_code = True  # type: ignore[attr-defined]
    sys.excepthook = ended
