"""Habits of scripts for one GPU, on two ranks: each gives the numbers of the local script, or is refused.

    python benchmarks/habits.py                        # about two minutes

Every habit runs under `replicate`, `split` and in two stages, in float64. "Exact to X": the largest difference from the
local script, of losses, parameters, gradients or outputs. "Refused": the message that says what to write instead.
"Before" is what the first version did, tried by hand in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import harness
import torch.distributed as dist
from habit_cases import HABITS, LAYOUTS

import whale
from whale.errors import WorkerError

LONGEST = 180


def outcome(name: str, function: Callable[[str], float], layout: str) -> str:
    """The outcome of a habit: the largest difference on any rank, or the message of the rank that refused first.

    Ranks tell each other by the store of the launch: one that refuses leaves the others in a collective.
    """
    try:
        own = f"{function(layout):.0e}"
    except whale.WhaleError as error:
        own = f"{'later' if isinstance(error, WorkerError) else 'refused'}: {_shortened(str(error))}"
    store, world_size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    keys = [f"{name} {layout} {rank}" for rank in range(world_size)]
    store.set(keys[dist.get_rank()], own)
    texts = [store.get(key).decode() for key in keys]
    refused = sorted((text for text in texts if ": " in text), reverse=True)
    return refused[0] if refused else f"{max(map(float, texts)):.0e}"


def _shortened(message: str) -> str:
    """The beginning of a message, without the folder of this file."""
    message = message.replace(f"{Path(__file__).parent}/", "")
    return message if len(message) < LONGEST else f"{message[:LONGEST].rpartition(' ')[0]} ..."


def merged(outcomes: Mapping[str, str]) -> str:
    """The outcomes of all layouts in one text; equal ones are said once."""
    texts: dict[str, list[str]] = {}
    for layout, text in outcomes.items():
        texts.setdefault("exact" if not text.startswith("refused") else text, []).append(layout)
    worst = max((float(text) for text in outcomes.values() if not text.startswith("refused")), default=0.0)
    said = {key: f"exact to {worst:.0e}" if key == "exact" else key for key in texts}
    if len(texts) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{', '.join(layouts)}: {said[key]}" for key, layouts in texts.items())


def main() -> None:
    """Try every habit in every layout."""
    options = harness.arguments(__doc__ or "", repeats=1)
    harness.on_two_ranks()
    warnings.filterwarnings("ignore")
    rows = []
    for name, (before, function) in HABITS.items():
        if options.only in name:
            rows.append((name, before, merged({layout: outcome(name, function, layout) for layout in LAYOUTS})))
    harness.report("habits", options, harness.table(("habit", "before", "now"), rows))


if __name__ == "__main__":
    main()
