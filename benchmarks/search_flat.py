"""Search time over the number of devices and the depth of the model.

    python benchmarks/search_flat.py --write 2026-11-21

The model, clusters and prices of ``search_speed.py``, whose blocks are repeated 24 to 384 times on 512 GPUs, and 96
times on 128 to 4,096. Only the search is timed, in processor seconds, each time with no prices known. With ``--write``
``docs/images/search_speed.svg`` is drawn too. The memory is the most that the process ever had, torch and the capture
included.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

from harness import arguments, report, table
from search_speed import MIXES, SIZES, TARGETS, cluster, deep, search_row, timed_search

from whale.cli.model_loader import load_model
from whale.planner.report.colours import BLUE, ORANGE
from whale.planner.report.markup import Markup, element, picture
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


# --- the picture ------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, PANEL, TALL = 760, 280, 52, 40, 300, 180


def drawn(times: dict[Case, float]) -> Markup:
    """Seconds over devices, and over blocks."""
    high = max(*TARGETS.values(), *times.values()) * 1.05
    by_devices = {
        num: [
            (case.num_devices, times[case])
            for case in times
            if (case.num_types, case.num_blocks) == (num, USUAL_BLOCKS)
        ]
        for num in MIXES
    }
    by_blocks = {
        num: [
            (case.num_blocks, times[case])
            for case in times
            if (case.num_types, case.num_devices) == (num, USUAL_DEVICES)
        ]
        for num in MIXES
    }
    first = panel(f"GPUs ({USUAL_BLOCKS} blocks)", by_devices, NUM_DEVICES, high)
    second = panel(f"blocks of the model ({USUAL_DEVICES} GPUs)", by_blocks, NUM_BLOCKS, high)
    said = "Processor seconds of a search for two and three types of devices, over GPUs and over blocks."
    return picture(
        "search-speed",
        "How long the search takes",
        said,
        WIDTH,
        HEIGHT,
        element("rect", width=WIDTH, height=HEIGHT, fill="#ffffff"),
        element("g", first, transform=f"translate({LEFT} {TOP})"),
        element("g", second, transform=f"translate({LEFT + PANEL + 70} {TOP})"),
    )


def panel(title: str, lines: dict[int, Sequence[tuple[int, float]]], places: Sequence[int], high: float) -> Markup:
    def across(value: float) -> float:
        return PANEL * log2(value / places[0]) / log2(places[-1] / places[0])

    def up(seconds: float) -> float:
        return TALL * (1 - seconds / high)

    parts: list[Markup] = [words(title, PANEL / 2, TALL + 38, "middle")]
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 50, 100) if high / step <= 6)
    for index in range(int(high / step) + 1):
        height = up(index * step)
        parts.append(element("line", x1=0, x2=PANEL, y1=height, y2=height, stroke="#d0d7de"))
        parts.append(words(f"{index * step:g} s", -6, height + 4, "end"))
    parts += [words(str(place), across(place), TALL + 18, "middle") for place in places]
    for index, ((num, points), colour) in enumerate(zip(lines.items(), (BLUE, ORANGE), strict=True)):
        path = " ".join(f"{across(place):.1f},{up(seconds):.1f}" for place, seconds in sorted(points))
        parts.append(element("polyline", points=path, fill="none", stroke=colour, stroke_width=2))
        parts += [element("circle", cx=across(x), cy=up(y), r=3, fill=colour) for x, y in points]
        parts.append(words(f"{num} types", 60 * index, -16, "start", colour))
    return element("g", *parts)


def words(text: str, x: float, y: float, anchor: str, colour: str = "#1f2328") -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor, fill=colour, font_size=12, font_family="sans-serif")


if __name__ == "__main__":
    main()
