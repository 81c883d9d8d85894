"""The ``whale`` command: few verbs, results on stdout, everything else on stderr, one exit code for each kind of
failure.

torch is loaded only inside the verbs that need it, so that ``whale -h`` is instant. Exit codes: 0 done, 1 a fault of
ours, 2 usage, 3 a bad input file, 4 infeasible, 5 a damaged checkpoint, 6 a worker failed, 130 interrupted.
"""

from __future__ import annotations

import gc
import time

from whale.cli.app import app

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit with its code. Verbs with a time limit know when it began."""
    try:
        app.main(prog_name="whale", obj=time.monotonic() - time.process_time())
    finally:
        gc.freeze()  # Python would look for cycles in all that is left, a second and more after a capture
