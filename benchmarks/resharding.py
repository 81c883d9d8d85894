"""Checkpoints of every plan, loaded under every plan: parameters, states of the optimizer, tied weights, the position
of random operators, of the data and of the schedule, bit by bit; and the losses of two further steps.

    PYTHONPATH=. python benchmarks/resharding.py --seed 7            # all pairs, for SGD with momentum and AdamW
    PYTHONPATH=. python benchmarks/resharding.py --first             # the first ten plans: 90 ordered pairs of two

Losses after a load are bitwise those of the run that has saved, if the plan is the same; else within 1e-12.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from harness import report, table

from tests.distributed.parity import worlds
from tests.distributed.resharding import FAMILIES, FIRST_TEN, OPTIMIZERS, Runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of values, data and their order")
    parser.add_argument("--first", action="store_true", help="only the first ten plans of the decoder")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append", help="only this one")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="only as many plans, by the seed")
    parser.add_argument("--write", metavar="DATE", default="")
    options = parser.parse_args()
    rows, all_good = [], True
    with worlds() as made:
        for family, plans in FAMILIES.items():
            names = list(FIRST_TEN if options.first else plans)
            if options.first and family != "decoder":
                continue
            if options.sample:
                names = random.Random(options.seed).sample(names, min(options.sample, len(names)))
            for optimizer in options.optimizer or OPTIMIZERS:
                begin = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    runs = Runs(made, family, names, optimizer, options.seed, Path(folder))
                    pairs = {
                        (other, plan): wrong
                        for plan in sorted(names, key=lambda name: plans[name].size)
                        for other, wrong in runs.faults(plan).items()
                    }
                bad = {pair: wrong for pair, wrong in pairs.items() if wrong}
                for (other, plan), wrong in bad.items():
                    print(f"{family}, {optimizer}: from {other} to {plan}: {'; '.join(wrong)[:400]}", flush=True)
                kinds = [[pair for pair in pairs if (pair[0] == pair[1]) == alike] for alike in (False, True)]
                good = [f"{sum(pair not in bad for pair in kind)} of {len(kind)}" for kind in kinds]
                rows.append((family, optimizer, str(len(names)), *good, f"{time.monotonic() - begin:.0f}"))
                all_good &= not bad
    head = ("model", "optimizer", "plans", "ordered pairs of two", "the same plan", "seconds")
    command = f"python benchmarks/resharding.py --seed {options.seed}" + (" --first" if options.first else "")
    report("resharding", options, table(head, rows), command)
    raise SystemExit(not all_good)


if __name__ == "__main__":
    main()
