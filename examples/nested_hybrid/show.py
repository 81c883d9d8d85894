"""The table and the figure of an experiment. Knows numbers and text only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whale.planner.report.markup import Markup, element, picture

PREDICTED, KNOWN = "#8250df", "#bf8700"
LEFT, WIDE, ROW, TOP = 330, 420, 30, 54


@dataclass(frozen=True, kw_only=True)
class Found:
    """Known results of a nest; *measured* is None if it was only simulated. Seconds, bytes, shares of time.

    ``memory`` has predicted bytes, counted bytes (or None) and capacity of every rank.
    """

    name: str
    seconds: float
    memory: Sequence[tuple[int, int | None, int]]
    sent: float
    bubble: float
    measured: float | None = None
    noise: float = 0.0
    sent_measured: float | None = None
    bubble_measured: float | None = None
    parity: float | None = None


def table(found: Sequence[Found]) -> str:
    """Markdown, a row for each nesting."""
    head = ["nesting", "predicted", "measured", "error", "noise", "memory of the fullest rank", "predicted / counted"]
    head += ["sent by all ranks", "counted", "bubble", "measured", "parity"]
    rows = [_row(one) for one in found]
    if all(one.measured is None for one in found):
        keep = [0, 1, 5, 7, 9, *([11] if any(one.parity is not None for one in found) else [])]
        head, rows = [head[i] for i in keep], [[row[i] for i in keep] for row in rows]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _row(one: Found) -> list[str]:
    fullest = max(one.memory, key=lambda rank: rank[0] / rank[2])
    ratios = [predicted / counted - 1 for predicted, counted, _ in one.memory if counted]
    return [
        one.name,
        seconds(one.seconds),
        seconds(one.measured),
        "" if one.measured is None else f"{one.seconds / one.measured - 1:+.1%}",
        "" if one.measured is None else f"{one.noise:.1%}",
        byte_size(fullest[0]),
        f"{min(ratios):+.1%} to {max(ratios):+.1%}" if ratios else "",
        byte_size(one.sent),
        byte_size(one.sent_measured),
        f"{one.bubble:.1%}",
        "" if one.bubble_measured is None else f"{one.bubble_measured:.1%}",
        "" if one.parity is None else f"{one.parity:.0e}",
    ]


def seconds(value: float | None) -> str:
    """In words; nothing where there is no value."""
    return "" if value is None else f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def byte_size(value: float | None) -> str:
    """In words; nothing where there is no value."""
    if value is None:
        return ""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.2f} MiB"


def summary(found: Sequence[Found]) -> str:
    """Errors of the predictions."""
    errors = [abs(one.seconds / one.measured - 1) for one in found if one.measured]
    if not errors:
        return ""
    return f"Error of the step time: mean {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}."


def figure(
    title: str,
    bars: Sequence[tuple[str, float, float | None]],
    *,
    second: str = "measured",
    shown: Callable[[float | None], str] = seconds,
) -> Markup:
    """For each name a bar of what was predicted, and below it one of what is known of it otherwise."""
    longest = max(max(predicted, known or 0.0) for _, predicted, known in bars)
    width, height = LEFT + WIDE + 110, TOP + ROW * len(bars) + 12
    parts = [
        element("rect", x=0, y=0, width=width, height=height, fill="#ffffff"),
        element("text", title, x=16, y=24, font_weight="600", fill="#1f2328"),
        _key(LEFT, "predicted", PREDICTED),
        _key(LEFT + 110, second, KNOWN) if any(known is not None for *_, known in bars) else "",
    ]
    for index, (name, *values) in enumerate(bars):
        y = TOP + ROW * index
        parts.append(element("text", name, x=LEFT - 10, y=y + 15, text_anchor="end", fill="#1f2328"))
        for line, (value, colour) in enumerate(zip(values, (PREDICTED, KNOWN), strict=True)):
            if value is not None:
                end, top = WIDE * value / longest, y + 2 + 11 * line
                parts.append(element("rect", x=LEFT, y=top, width=end, height=9, fill=colour))
                parts.append(element("text", shown(value), x=LEFT + end + 6, y=top + 9, font_size=10, fill="#57606a"))
    described = "; ".join(
        f"{name}: predicted {shown(predicted)}" + ("" if known is None else f", {second} {shown(known)}")
        for name, predicted, known in bars
    )
    body = element("g", *parts, font_family="system-ui, sans-serif", font_size=13)
    return picture("nestings", title, described, width, height, body)


def _key(x: float, text: str, colour: str) -> Markup:
    return element(
        "g",
        element("rect", x=x, y=34, width=10, height=10, fill=colour),
        element("text", text, x=x + 15, y=43, font_size=11, fill="#57606a"),
    )
