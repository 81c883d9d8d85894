"""Step time of whale.replicate() on two gloo ranks with gradient buckets of several sizes, relative to 32 MiB.

    python benchmarks/buckets.py --write 2026-11-26

A gloo launch on one node has 32 MiB (`whale.planner.cost.buckets`); here the size is set.
"""

from __future__ import annotations

from unittest import mock

from harness import HEAD, arguments, on_two_ranks, report, side_by_side, table
from models import batch, gpt2

import whale

USED = 32
OTHERS = (1, 4, 16, 64)


def main() -> None:
    options = arguments("sizes of gradient buckets")
    on_two_ranks()
    whole, sides = batch(8, 128), {}
    for mebibytes in (USED, *OTHERS):
        model = gpt2()
        whale.annotate(model, {"": whale.replicate()})
        with mock.patch("whale.compile.exchanges.bucket_bytes", lambda *_, size=mebibytes: size * 2**20):
            sides[mebibytes] = whale.parallelize(model, whole, device="cpu")
    num_bytes = sum(p.numel() * p.element_size() for p in sides[USED].parameters())

    def step(mebibytes: int) -> None:
        sides[mebibytes].zero_grad()
        sides[mebibytes].train_step(**whole)

    rows = []
    for mebibytes in OTHERS:
        case = f"{USED} MiB against {mebibytes} MiB, GPT-2 of {num_bytes / 2**20:.0f} MiB, 8 x 128"
        row = side_by_side(case, lambda: step(USED), lambda m=mebibytes: step(m), repeats=options.repeats, target=1.02)
        rows.append(row.cells())
    head = (HEAD[0], f"{USED} MiB", "other", f"{USED} MiB / other", *HEAD[4:])
    report("buckets", options, table(head, rows))


if __name__ == "__main__":
    main()
