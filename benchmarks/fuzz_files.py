"""Fuzzing of the file readers: every text ends in a value or in an error of Whale.

    PYTHONPATH=. python benchmarks/fuzz_files.py --examples 10000
    PYTHONPATH=. python benchmarks/fuzz_files.py --examples 10000 --kind cluster --seed 7

Generates ``--examples`` malformed texts for every kind of file (``tests/hostile_files.py``), a quarter in each manner,
and reads them. A failure is shown in its smallest form. Seconds are of the reading alone.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter

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
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], help="only this kind of file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| file | manner | texts | read | refused | seconds of reading | slowest (ms) |")
    print("|---|---|---|---|---|---|---|")
    for kind in KINDS:
        if options.kind not in (None, kind.name):
            continue
        for manner in MANNERS:
            ends, seconds = fuzz(kind, manner, options.examples // len(MANNERS), options.seed)
            counts = " | ".join(map(str, (ends.total(), ends["read"], ends["refused"])))
            print(f"| {kind} | {manner} | {counts} | {sum(seconds):.1f} | {max(seconds) * 1e3:.0f} |", flush=True)
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
