"""The timeline: tasks and waits of every device, with p2p transfers and reductions below each row.

If there are few tasks, each is a box with its times. Otherwise the height of a colour in a row is its share of that
moment. It knows no plan and no cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from whale.ir.units import time_text
from whale.ir.workload import Workload
from whale.planner.report.alike import Alike, alike
from whale.planner.report.axis import ticks
from whale.planner.report.colours import PAINT, stage_colour, text_on
from whale.planner.report.labels import ranks_text, stages_of, stages_text
from whale.planner.report.markup import Markup, element, join, number, picture, short
from whale.planner.simulation.timeline import Event, Part, Timeline

__all__ = ["LEGEND", "timeline_view"]

LEGEND = {
    "forward": "F: forward",
    "backward": "B: backward (I: of inputs only)",
    "weights": "W: backward of weights",
    "communication": "communication: inside tasks; below a row, messages (upper line) and gradient reductions (lower)",
    "update": "update of parameters",
    "framework": "overhead",
    "awaited": "waiting for communication",
    "idle": "waiting for others",
}
"""Meaning of the colours of the rows, by CSS class."""

MOST_ROWS = 64
MOST_BOXES = 1_500
"""Number of tasks above which shares are drawn instead of boxes."""
MOST_PIECES = 16_000
"""Number of columns of shares over all rows, so that the picture stays under half a megabyte."""

_WIDTH, _LEFT, _PLOT = 960.0, 196.0, 692.0
_TOP = 26.0
_LEVELS = 8
_CLASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights", "update": "update"}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The events of one rank: its tasks, and its messages and reductions."""

    rank: int
    stages: tuple[int, ...]
    type: str
    work: tuple[Event, ...]
    messages: tuple[Event, ...]
    sums: tuple[Event, ...]
    parts: Mapping[Part, float]

    @property
    def at_work(self) -> float:
        return self.parts["compute"] + self.parts["communication"]


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Heights of a row, of its two lines and of the gap below; and units of the picture per second."""

    row: float
    line: float
    gap: float
    unit: float


_WIDE = (16.0, 2.5, 8.0)
_NARROW = (10.0, 2.0, 3.0)


def timeline_view(timeline: Timeline, workload: Workload, types: Mapping[int, str]) -> Markup:
    """Draw a simulated step; devices that do the same at the same time share a row.

    Args:
        timeline: of ``workload``.
        workload: has the share of communication in each task.
        types: device types by rank, if known.
    """
    groups, left = _groups(timeline, workload, types)
    step = timeline.step_seconds
    row, line, gap = _WIDE if len(groups) <= 24 else _NARROW
    sizes = _Sizes(row=row, line=line, gap=gap, unit=_PLOT / step if step else 0.0)
    inside = _communication(workload)
    boxes = sum(len(group.shown.work) for group in groups) <= MOST_BOXES
    columns = max(120, min(int(_PLOT), MOST_PIECES // (3 * max(1, len(groups)))))
    pitch = row + 2 * line + gap
    height = _TOP + pitch * len(groups) + (14 if left else 0)
    drawn: list[Markup] = [_axis(step, height, sizes)]
    for position, group in enumerate(groups):
        top = _TOP + position * pitch
        shown = group.shown
        work = _boxes(shown, top, sizes, inside) if boxes else [_shares(shown, top, sizes, inside, columns)]
        drawn.append(
            element(
                "g",
                element("title", _about(group, step)),
                *_label(group, top, sizes, len(workload.stages)),
                element("rect", class_="idle", x=_LEFT, y=top, width=_PLOT, height=row),
                *work,
                *_lines(shown, top + row, sizes),
                element("text", f"{_bubble(shown, step):.0%}", x=_WIDTH - 8, y=top + row - 3.5, text_anchor="end"),
            )
        )
    if left:
        text = f"{left} more ranks, each at work for less of the step, are not shown"
        drawn.append(element("text", text, x=_LEFT, y=height - 3, class_="quiet"))
    longest = max((group.shown for group in groups), key=lambda shown: shown.at_work)
    description = (
        f"{len(groups)} rows for {len(timeline.ranks)} ranks over {time_text(step)}. Waiting for other stages takes "
        f"{timeline.bubble:.1%} of all ranks' time. Rank {longest.rank} works longest, {time_text(longest.at_work)}."
    )
    if not boxes:
        description += " The height of a colour is its share of that moment."
    return picture("timeline", "Timeline of each device during a step", description, _WIDTH, height, *drawn)


def _groups(timeline: Timeline, workload: Workload, types: Mapping[int, str]) -> tuple[tuple[Alike[_Row], ...], int]:
    stages = stages_of(stage.ranks for stage in workload.stages)
    step = timeline.step_seconds or 1.0
    rows = []
    for rank in timeline.ranks:
        own = timeline.of_rank(rank)
        rows.append(
            _Row(
                rank=rank,
                stages=stages.get(rank, ()),
                type=types.get(rank, ""),
                work=tuple(event for event in own if event.kind not in ("send", "receive", "reduce")),
                messages=tuple(event for event in own if event.kind in ("send", "receive")),
                sums=tuple(event for event in own if event.kind == "reduce"),
                parts=timeline.breakdowns[rank],
            )
        )
    rows.sort(key=lambda row: (row.stages, row.rank))
    return alike(
        rows,
        equal=lambda row: (
            row.stages,
            row.type,
            tuple((one.kind, one.stage, one.micro_batch, round(one.end / step, 5)) for one in row.work),
        ),
        similar=lambda row: (row.stages, row.type),
        weight=lambda row: row.at_work,
        most=MOST_ROWS,
    )


def _communication(workload: Workload) -> Mapping[tuple[int, int], float]:
    """Fraction of collectives in the tasks of a stage on a rank."""
    found = {}
    for index, stage in enumerate(workload.stages):
        for position, spent in enumerate(stage.communication):
            whole = stage.forward[position] + stage.backward[position]
            found[index, stage.ranks[position]] = min(1.0, spent / whole) if whole else 0.0
    return found


def _axis(step: float, height: float, sizes: _Sizes) -> Markup:
    marks = []
    for tick in ticks(0.0, step * 1e3, 7):
        x = _LEFT + tick / 1e3 * sizes.unit
        marks.append(element("line", class_="grid", x1=x, y1=_TOP - 6, x2=x, y2=height))
        marks.append(element("text", f"{tick:,.10g}", x=x, y=_TOP - 10, text_anchor="middle", class_="quiet"))
    marks.append(element("text", "ms", x=_LEFT - 14, y=_TOP - 10, text_anchor="end", class_="quiet"))
    marks.append(element("text", "bubble", x=_WIDTH - 8, y=_TOP - 10, text_anchor="end", class_="quiet"))
    return element("g", *marks)


def _label(group: Alike[_Row], top: float, sizes: _Sizes, num_stages: int) -> Iterator[Markup]:
    shown = group.shown
    ranks = [row.rank for row in group.members]
    if shown.stages:
        colour = stage_colour(shown.stages[0], num_stages)
        yield element("rect", x=2, y=top, width=6, height=sizes.row + 2 * sizes.line, fill=colour, class_="swatch")
    many = "" if len(ranks) == 1 else f"{len(ranks)} equal" if group.equal else f"busiest of {len(ranks)}"
    first = f"{stages_text(shown.stages)} · {ranks_text(ranks, 12)}"
    if sizes.row == _WIDE[0]:
        yield element("text", short(first, 31), x=14, y=top + 9)
        second = " ".join(filter(None, (short(shown.type, 20), many)))
        yield element("text", second, x=14, y=top + 20.5, class_="quiet")
    else:
        yield element("text", short(f"{first} {many}", 34), x=14, y=top + 10)


def _about(group: Alike[_Row], step: float) -> str:
    shown = group.shown
    ranks = [row.rank for row in group.members]
    parts = ", ".join(f"{part} {seconds / step:.1%}" for part, seconds in shown.parts.items() if seconds > 0)
    which = "" if group.equal else f"; shown: rank {shown.rank}, the busiest of {len(ranks)} that differ a little"
    return f"{short(shown.type, 60)} {stages_text(shown.stages)}, {ranks_text(ranks, 200)}{which}: {parts}".strip()


def _bubble(row: _Row, step: float) -> float:
    return (row.parts["pipeline"] + row.parts["transfer"]) / step if step else 0.0


def _class(event: Event) -> str:
    if event.kind == "idle":
        return "awaited" if event.reason in ("transfer", "reduction") else "idle"
    return _CLASSES.get(event.kind, "framework")


# --- boxes ------------------------------------------------------------------------------------------------------------


def _boxes(row: _Row, top: float, sizes: _Sizes, inside: Mapping[tuple[int, int], float]) -> Iterator[Markup]:
    """Draw a box for each task, with its communication at the bottom and, if there is room, its micro-batch."""
    for event in row.work:
        x, width = _LEFT + event.start * sizes.unit, event.seconds * sizes.unit
        if width < 0.05:
            continue
        name = _class(event)
        said = element("title", _says(event))
        yield element("rect", said, class_=f"{name} box", x=x, y=top, width=width, height=sizes.row)
        share = inside.get((event.stage, row.rank), 0.0) if event.kind in _CLASSES else 0.0
        if share >= 0.02:
            low = sizes.row * share
            yield element("rect", said, class_="communication", x=x, y=top + sizes.row - low, width=width, height=low)
        text = str(event.micro_batch)
        if event.kind in ("F", "B", "I", "W") and width > 6 + 5 * len(text):
            fill = text_on(PAINT[name])
            middle = x + width / 2
            yield element(
                "text", text, x=middle, y=top + sizes.row / 2 + 3, text_anchor="middle", class_="in", fill=fill
            )


def _says(event: Event) -> str:
    when = f"{time_text(event.start)} to {time_text(event.end)} ({time_text(event.seconds)})"
    if event.kind != "idle":
        return f"{event}: {when}"
    whom = f" for rank {event.peer}" if event.peer not in (-1, event.rank) else ""
    return f"waits{whom} ({event.reason}): {when}"


# --- shares -----------------------------------------------------------------------------------------------------------


def _shares(row: _Row, top: float, sizes: _Sizes, inside: Mapping[tuple[int, int], float], columns: int) -> Markup:
    """Draw columns of colours stacked by their share; equal neighbouring columns are one piece."""
    filled = _filled(row, sizes, inside, columns)
    width = _PLOT / columns
    paths: dict[str, list[str]] = {}
    position = 0
    for levels, run in groupby(map(_levels, filled)):
        length = len(list(run))
        x, below = _LEFT + position * width, 0
        for name, level in levels:
            high = sizes.row * level / _LEVELS
            y = top + sizes.row - sizes.row * below / _LEVELS
            paths.setdefault(name, []).append(_piece(x, y - high, length * width, high))
            below += level
        position += length
    return join(element("path", class_=name, d="".join(pieces)) for name, pieces in paths.items())


def _filled(row: _Row, sizes: _Sizes, inside: Mapping[tuple[int, int], float], columns: int) -> list[dict[str, float]]:
    """Share of each class in each column; plain waits take the rest."""
    filled: list[dict[str, float]] = [{} for _ in range(columns)]
    scale = sizes.unit * columns / _PLOT
    for event in row.work:
        name = _class(event)
        if name == "idle":
            continue
        share = inside.get((event.stage, row.rank), 0.0) if event.kind in _CLASSES else 0.0
        start, end = event.start * scale, event.end * scale
        for column in range(int(start), min(columns, int(end) + 1)):
            part = min(end, column + 1.0) - max(start, float(column))
            if part > 0:
                own = filled[column]
                own[name] = own.get(name, 0.0) + part * (1 - share)
                if share:
                    own["communication"] = own.get("communication", 0.0) + part * share
    return filled


def _levels(own: Mapping[str, float]) -> tuple[tuple[str, int], ...]:
    """Shares in eighths, from the bottom, in the order of the legend; their sum never exceeds the column."""
    found, total, done = [], 0.0, 0
    for name in LEGEND:
        total += own.get(name, 0.0)
        level = min(_LEVELS, round(total * _LEVELS)) - done
        if level > 0:
            found.append((name, level))
            done += level
    return tuple(found)


# --- beside the tasks -------------------------------------------------------------------------------------------------


def _lines(row: _Row, top: float, sizes: _Sizes) -> Iterator[Markup]:
    """Draw messages and gradient reductions as two thin lines."""
    for position, (what, events) in enumerate((("messages", row.messages), ("sums of gradients", row.sums))):
        spans = _merged(events, 0.7 / sizes.unit if sizes.unit else 0.0)
        if spans:
            y = top + position * sizes.line
            pieces = [
                _piece(_LEFT + start * sizes.unit, y, max(0.5, (end - start) * sizes.unit), sizes.line - 0.5)
                for start, end in spans
            ]
            yield element("path", element("title", what), class_="communication", d="".join(pieces))


def _merged(events: Sequence[Event], gap: float) -> Iterable[tuple[float, float]]:
    """The times covered by events, joined over gaps of less than ``gap``."""
    spans: list[list[float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if spans and event.start <= spans[-1][1] + gap:
            spans[-1][1] = max(spans[-1][1], event.end)
        elif event.end > event.start:
            spans.append([event.start, event.end])
    return [(start, end) for start, end in spans]


def _piece(x: float, y: float, width: float, height: float) -> str:
    return f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h-{number(width)}z"
