"""Fuzzing of the file readers: every text ends in a value or in an error of Whale.

    PYTHONPATH=. python benchmarks/fuzz_files.py --examples 10000
    PYTHONPATH=. python benchmarks/fuzz_files.py --examples 10000 --kind cluster --seed 7

Generates ``--examples`` malformed texts for every kind of file (``tests/hostile_files.py``), a quarter in each manner:
pieces of syntax in any order, a good file with places overwritten, a good file with values exchanged, any tree of
values. A failure is shown in its smallest form, and ends the run. Seconds are of the reading alone, which takes less
time than making the texts. No reading may take 2 s or 500 MB.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter

from harness import report, table
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.hostile_files import KINDS, MANNERS, FileKind, Text
from whale.errors import InputFileError


def fuzz(kind: FileKind, manner: str, num_examples: int, start: int) -> tuple[Counter[str], list[float]]:
    """How reading ended, and the seconds that each took."""
    ends: Counter[str] = Counter()
    seconds: list[float] = []

    @seed(start)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(MANNERS[manner](kind))
    def reading_ends_well(text: Text) -> None:
        began = time.perf_counter()
        try:
            kind.parse(*text)
            ends["read"] += 1
        except InputFileError:
            ends["refused"] += 1
        finally:
            seconds.append(time.perf_counter() - began)

    reading_ends_well()
    return ends, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000, help="texts of each kind of file")
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], action="append", help="only this kind of file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results")
    options = parser.parse_args()
    rows = []
    for kind in KINDS:
        if options.kind and kind.name not in options.kind:
            continue
        for manner in MANNERS:
            ends, seconds = fuzz(kind, manner, options.examples // len(MANNERS), options.seed)
            counts = (str(ends.total()), str(ends["read"]), str(ends["refused"]))
            rows.append((kind.name, manner, *counts, f"{sum(seconds):.1f}", f"{max(seconds) * 1e3:.0f}"))
            print(" | ".join(rows[-1]), flush=True)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    head = ("file", "manner", "texts", "read", "refused", "seconds of reading", "slowest (ms)")
    text = f"{table(head, rows)}\n\nPeak memory of the process, with hypothesis: {most:.0f} MiB."
    report("fuzz_files", options, text, f"PYTHONPATH=. python benchmarks/fuzz_files.py --examples {options.examples}")


if __name__ == "__main__":
    main()
