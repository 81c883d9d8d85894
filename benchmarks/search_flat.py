"""Search time over the number of devices and the depth of the model.

    python benchmarks/search_flat.py --write 2026-11-21

The model, clusters and prices of ``search_speed.py``, whose blocks are repeated 24 to 384 times on 512 GPUs, and 96
times on 128 to 4,096. Only the search is timed, in processor seconds, each time with no prices known. With ``--write``
``docs/images/search_speed.svg`` is drawn too. The memory is the most that the process ever had, torch and the capture
included.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from harness import arguments, report, table
from lines import Panel
from lines import drawn as picture_of
from search_speed import MIXES, SIZES, TARGETS, cluster, deep, search_row, timed_search

from whale.cli.model_loader import load_model
from whale.planner.report.markup import Markup
from whale.strategies.profile import profile_model

NUM_DEVICES, NUM_BLOCKS = (128, 256, 512, 1024, 2048, 4096), (24, 48, 96, 192, 384)
USUAL_DEVICES, USUAL_BLOCKS = 512, 96
"""Median over the cases in which the other number changes."""

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "search_speed.svg"


@dataclass(frozen=True)
class Case:
    num_types: int
    num_devices: int
    num_blocks: int

    @property
    def name(self) -> str:
        return f"{self.num_types} types, {self.num_devices} GPUs, {self.num_blocks} blocks"


def cases() -> list[Case]:
    found = []
    for num_types in MIXES:
        found += [Case(num_types, num_devices, USUAL_BLOCKS) for num_devices in NUM_DEVICES]
        found += [Case(num_types, USUAL_DEVICES, num_blocks) for num_blocks in NUM_BLOCKS]
    return list(dict.fromkeys(found))


def main() -> None:
    options = arguments(__doc__ or "", repeats=3)
    loaded = load_model("examples/models/gpt.py:gpt", SIZES, device="meta")
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2, 4, 8), name="gpt")
    rows, times = [], {}
    for case in cases():
        if options.only not in case.name:
            continue
        model, machines = deep(profile, case.num_blocks), cluster(case.num_types, case.num_devices)
        times[case], said = timed_search(model, machines, options.repeats)
        rows.append(search_row(case.name, case.num_types, times[case], said))
        print(rows[-1], flush=True)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    text = table(("case", "search", "target", "met", "found"), rows)
    report("search_flat", options, f"{text}\n\nMemory of the process: {most:.2f} GiB at most.")
    if options.write and len(times) == len(cases()):
        IMAGE.write_text(drawn(times), encoding="utf-8")


def drawn(times: dict[Case, float]) -> Markup:
    """Seconds over devices, and over blocks."""
    by_devices = {
        f"{num} types": [
            (case.num_devices, times[case])
            for case in times
            if (case.num_types, case.num_blocks) == (num, USUAL_BLOCKS)
        ]
        for num in MIXES
    }
    by_blocks = {
        f"{num} types": [
            (case.num_blocks, times[case])
            for case in times
            if (case.num_types, case.num_devices) == (num, USUAL_DEVICES)
        ]
        for num in MIXES
    }
    high = max(*TARGETS.values(), *times.values())
    return picture_of(
        "How long the search takes",
        "Processor seconds of a search for two and three types of devices, over GPUs and over blocks.",
        Panel(f"GPUs ({USUAL_BLOCKS} blocks)", by_devices, "s", high),
        Panel(f"blocks of the model ({USUAL_DEVICES} GPUs)", by_blocks, "s", high),
    )


if __name__ == "__main__":
    main()
