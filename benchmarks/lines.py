"""A picture of one or more panels of lines over a logarithmic axis, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

from whale.planner.report.colours import BLUE, GREEN, ORANGE, VERMILION
from whale.planner.report.markup import Markup, element, picture

__all__ = ["Panel", "drawn"]

COLOURS = (BLUE, ORANGE, GREEN, VERMILION)
HEIGHT, LEFT, TOP, WIDE, TALL, BETWEEN = 280, 52, 40, 300, 180, 70
STEPS = tuple(factor * 10.0**power for power in range(-3, 6) for factor in (1, 2, 5))


@dataclass(frozen=True)
class Panel:
    """Lines by name, what is across, the unit of what is up, and its highest value (by default the largest)."""

    across: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    unit: str
    high: float = 0.0


def drawn(title: str, said: str, *panels: Panel) -> Markup:
    """The panels side by side; *said* describes them."""
    width = LEFT + len(panels) * (WIDE + BETWEEN) - BETWEEN + 38
    return picture(
        "-".join(title.lower().split()),
        title,
        said,
        width,
        HEIGHT,
        element("rect", width=width, height=HEIGHT, fill="#ffffff"),
        *(
            element("g", _panel(panel), transform=f"translate({LEFT + index * (WIDE + BETWEEN)} {TOP})")
            for index, panel in enumerate(panels)
        ),
    )


def _panel(panel: Panel) -> Markup:
    high = 1.05 * max(panel.high, *(y for points in panel.lines.values() for _, y in points))
    places = sorted({x for points in panel.lines.values() for x, _ in points})

    def across(value: float) -> float:
        return WIDE * log2(value / places[0]) / log2(places[-1] / places[0])

    def up(value: float) -> float:
        return TALL * (1 - value / high)

    parts: list[Markup] = [_words(panel.across, WIDE / 2, TALL + 38, "middle")]
    step = next(step for step in STEPS if high / step <= 6)
    for index in range(int(high / step) + 1):
        height = up(index * step)
        parts.append(element("line", x1=0, x2=WIDE, y1=height, y2=height, stroke="#d0d7de"))
        parts.append(_words(f"{index * step:g} {panel.unit}", -6, height + 4, "end"))
    shown = places if len(places) <= 6 else places[:: -(-len(places) // 5)]
    parts += [_words(f"{place:g}", across(place), TALL + 18, "middle") for place in shown]
    for index, ((name, points), colour) in enumerate(zip(panel.lines.items(), COLOURS, strict=False)):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in sorted(points))
        parts.append(element("polyline", points=path, fill="none", stroke=colour, stroke_width=2))
        parts += [element("circle", cx=across(x), cy=up(y), r=3, fill=colour) for x, y in points]
        parts.append(_words(name, 72 * index, -16, "start", colour))
    return element("g", *parts)


def _words(text: str, x: float, y: float, anchor: str, colour: str = "#1f2328") -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor, fill=colour, font_size=12, font_family="sans-serif")
