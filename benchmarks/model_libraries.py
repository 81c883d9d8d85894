"""Unmodified models of public libraries, trained for a step on two ranks, against the same step in one process.

    pip install --no-deps timm torchvision diffusers monai segmentation_models_pytorch vit-pytorch x-transformers \\
        torch-einops-utils loguru einops einx frozendict conformer open_clip_torch ftfy wcwidth lightly lightly_utils
    PYTHONPATH=. python benchmarks/model_libraries.py --folder libraries        # over an hour

Each model is trained in replicas and split as a whole, in float64 and in its training mode, where batch norms see the
whole batch. An error is the largest difference of the loss, of an element of a gradient, relative to its largest, or of
a buffer from those of the model alone. Libraries that are not installed are left out. With ``--folder`` a run goes on
from what the folder has.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import report, table

os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

from library_models import MODELS, Example

from tests.distributed.parity import Setup, Worlds, built, compare, local_step
from whale import split
from whale.runtime.launch import World

LAYOUTS: dict[str, dict[str, Any]] = {"replicas": {}, "split": {"": split()}}
BOUND = 1e-9
MODULES = {
    "torchvision segmentation": "torchvision",
    "torchvision video": "torchvision",
    "vit-pytorch": "vit_pytorch",
    "x-transformers": "x_transformers",
    "open_clip_torch": "open_clip",
}
PER_WORLD = 5
"""Models that ranks run before they are started again, for their memory."""


def attempt(world: World, build: Callable[[], Example], setup: Setup, local: bytes) -> tuple[float, str]:
    """The largest error and of what, or infinity and why there is none; the rank goes on."""
    try:
        return compare(world, build, setup, local).worst
    except Exception as error:  # of any type
        return float("inf"), f"{type(error).__name__}: {error}"[:400]


def step(worlds: Worlds, library: str, name: str) -> dict[str, tuple[float, str]]:
    """The errors of a model by layout."""
    build = partial(MODELS[library][0], name)
    found = {}
    setup = Setup(training=True)
    local = pickle.dumps(local_step(*built(build, setup), setup))
    for kind, layout in LAYOUTS.items():
        setup = Setup(training=True, layout=layout)
        try:
            ranks = worlds.run(2, attempt, build, setup, local, timeout=1800.0)
        except AssertionError as failed:
            ranks = [(float("inf"), str(failed).strip().splitlines()[-1])]
        found[kind] = max(ranks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="libraries and models whose names contain this")
    parser.add_argument("--folder", help="keep results there, and go on from what it has")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    kept = Path(options.folder, "results.json") if options.folder else None
    results: dict[str, dict[str, tuple[float, str]]] = {}
    if kept is not None and kept.exists():
        results = json.loads(kept.read_text())
    worlds, begin = Worlds(), time.monotonic()
    cases = [(library, name) for library, (_, names) in MODELS.items() for name in names]
    cases = [case for case in cases if options.only in ", ".join(case)]
    cases = [case for case in cases if importlib.util.find_spec(MODULES.get(case[0], case[0]))]
    for count, case in enumerate(cases):
        key = ", ".join(case)
        if key not in results:
            if count % PER_WORLD == 0:
                worlds.close()
            results[key] = step(worlds, *case)
            print(f"{time.monotonic() - begin:.0f} s: {key}: {results[key]}", flush=True)
            if kept is not None:
                kept.parent.mkdir(exist_ok=True)
                kept.write_text(json.dumps(results))
    worlds.close()
    rows, wrong = [], []
    for library in dict.fromkeys(library for library, _ in cases):
        own = {name: results[f"{library}, {name}"] for one, name in cases if one == library}
        exact = [sum(found[kind][0] <= BOUND for found in own.values()) for kind in LAYOUTS]
        within = [error for found in own.values() for error, _ in found.values() if error <= BOUND]
        rows.append((library, str(len(own)), *map(str, exact), f"{max(within, default=0.0):.1e}"))
        wrong += [
            f"{library}, {name}, {kind}: {found[kind][0]:.1e}, {found[kind][1]}"
            for name, found in own.items()
            for kind in LAYOUTS
            if found[kind][0] > BOUND
        ]
    head = ("library", "models", *(f"exact in {kind}" for kind in LAYOUTS), "largest error of these")
    text = table(head, rows) + f"\n\nExact: within {BOUND:.0e}." + "".join(f"\n- {one}" for one in wrong)
    report("model_libraries", options, text)


if __name__ == "__main__":
    main()
