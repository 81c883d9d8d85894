"""Training under every level of ZeRO and every rule of recompute, in eight layouts, against the local model.

    PYTHONPATH=. python benchmarks/parity_matrix.py                      # 4 models x 8 layouts x 4 levels x 3 rules
    PYTHONPATH=. python benchmarks/parity_matrix.py --draw 60 --seed 1   # as many cases of other models

The cases are those of `tests/distributed/trained.py`: in float64, casts to float32 inside of models promoted. Five
steps of AdamW, the first of two accumulated batches. An error is the largest difference of a loss, or of an element of
a parameter at the end, from those of the local model in one process. The collectives of the compiled steps are counted,
too: under each rule there are as many.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import product
from typing import Any

from harness import report, table

from tests.distributed.parity import worlds
from tests.distributed.trained import BOUND, LAYOUTS, LISTED, MODELS, OTHERS, training_errors
from whale.ir.state import LEVELS
from whale.ir.strategy import RECOMPUTES
from whale.runtime.launch import World
from whale.strategies.split_backward import communicates

Case = tuple[str, str, int, str]
"""Layout, model, level of ZeRO, and rule of recompute."""


def collectives(made: Any) -> int:
    """The collectives of a rank's graphs."""
    found = 0
    for one in made._whale.engine.steps._steps.values():
        for stage in one.stages:
            derivative = stage.programs[0].derivative
            if derivative is not None:
                for code in (derivative.forward, derivative.backward.code):
                    found += sum(communicates(node, code.root) for node in code.graph.nodes)
    return found


def errors(world: World, kind: str, name: str, zero: int, recompute: str) -> tuple[float, float, int]:
    """Errors of losses and of parameters, and the collectives of this rank's graphs."""
    layout = LAYOUTS[kind]
    options = {**layout.options, "zero": zero, "recompute": recompute}
    loss, parameters, made = training_errors(name, layout.annotate(MODELS[name].stages), options)
    return loss, parameters, collectives(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models and layouts whose names contain this")
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="as many cases of other models, by a seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    every: list[Case] = list(product(LAYOUTS, OTHERS if options.draw else LISTED, LEVELS, RECOMPUTES))
    if options.draw:
        every = sorted(random.Random(options.seed).sample(every, options.draw), key=every.index)
    cases = [case for case in every if options.only in f"{case[1]}, {case[0]}"]
    wrong, within, largest, counts = list[str](), 0, 0.0, dict[Any, set[tuple[int, ...]]]()
    cells: dict[tuple[str, str], dict[int, float]] = {}
    begin = time.monotonic()
    with worlds() as made:
        for kind, name, zero, rule in cases:
            said = f"{name}, {kind}, zero={zero}, recompute={rule}"
            try:
                found = made.run(LAYOUTS[kind].ranks, errors, kind, name, zero, rule, timeout=600.0)
            except AssertionError as failed:
                print(said, failed, flush=True)
                wrong.append(f"{said}: {str(failed).strip().splitlines()[-1]}")
                continue
            error = max(max(loss, parameters) for loss, parameters, _ in found)
            counts.setdefault((kind, name, zero), set()).add(tuple(count for _, _, count in found))
            print(f"{time.monotonic() - begin:.0f} s: {said}: {error:.1e}", flush=True)
            row = cells.setdefault((name, kind), {})
            row[zero] = max(row.get(zero, 0.0), error)
            largest = max(largest, error)
            if error <= BOUND:
                within += 1
            else:
                wrong.append(f"{said}: {error:.1e}")
    unlike = sum(len(each) > 1 for each in counts.values())
    rows = [(*key, *(f"{row[zero]:.1e}" if zero in row else "" for zero in LEVELS)) for key, row in cells.items()]
    text = table(("model", "layout", *(f"zero={zero}" for zero in LEVELS)), rows)
    text += f"\n\nThe largest error of the rules. {within} of {len(cases)} are within {BOUND:.0e}; the largest is "
    text += f"{largest:.1e}. Collectives differ between rules in {unlike} of {len(counts)}."
    text += "".join(f"\n- {one}" for one in wrong)
    command = "python benchmarks/parity_matrix.py" + f" --draw {options.draw} --seed {options.seed}" * bool(
        options.draw
    )
    report(f"parity_matrix{f'_seed{options.seed}' if options.draw else ''}", options, text, command)


if __name__ == "__main__":
    main()
