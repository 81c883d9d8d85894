"""The candidates of a search: step time over memory, feasible and infeasible plans, and the Pareto front.

It knows a record of a search and no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log

from whale.ir.search_record import MAX_SHARE, RecordedPoint, SearchRecord
from whale.ir.units import counted, time_text
from whale.planner.report.axis import ticks, ticks_of_powers
from whale.planner.report.markup import Markup, element, number, picture, short, table

__all__ = ["candidate_table", "dropped_table", "front_of", "search_view", "summary"]

MOST_DOTS = 1_000
MOST_CANDIDATES = 20
MOST_DROPPED = 40
LARGEST_MEMORY = 3.0
"""End of the memory axis; plans that need more are drawn there, and their titles have the number."""
LARGEST_TIME = 20.0
"""End of the time axis, in multiples of the best; as above."""

_WIDTH, _HEIGHT = 960.0, 400.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 24.0, 30.0, 40.0


@dataclass(frozen=True, kw_only=True)
class _Dot:
    """Points within a few pixels of each other: the fastest of them, and their number."""

    point: RecordedPoint
    count: int


@dataclass(frozen=True, kw_only=True)
class _Scales:
    x: Callable[[float], float]
    y: Callable[[float], float]
    times: tuple[float, ...]
    shares: tuple[float, ...]


def front_of(points: Sequence[RecordedPoint]) -> tuple[RecordedPoint, ...]:
    """The Pareto front: feasible points that no other point beats in both time and memory, fastest first.

    >>> points = [RecordedPoint(seconds=s, memory=m, label="") for s, m in ((1.0, 0.9), (2.0, 0.95), (3.0, 0.4))]
    >>> [point.seconds for point in front_of(points)]
    [1.0, 3.0]
    """
    front: list[RecordedPoint] = []
    for point in sorted(points, key=lambda point: (point.seconds, point.memory)):
        if not point.reason and (not front or point.memory < front[-1].memory):
            front.append(point)
    return tuple(front)


def search_view(record: SearchRecord) -> Markup:
    """Draw all points of a record with at least one point or candidate."""
    own = [RecordedPoint(seconds=one.seconds, memory=one.memory, label=one.label) for one in record.candidates]
    points = [*record.points, *own]
    scales = _scales(points, record.bound_seconds)
    front = front_of(points)
    drawn = [
        _axes(scales, record.bound_seconds),
        *_crosses(_dots([point for point in record.points if point.reason], scales), scales),
        *_circles(_dots([point for point in record.points if not point.reason], scales), scales),
        *_front(front, scales),
        *_candidates(record, scales),
    ]
    fitting = sum(not point.reason for point in points)
    description = (
        f"{fitting} points fit and {len(points) - fitting} do not; {len(front)} are on the "
        f"Pareto front of time and memory."
    )
    if record.candidates:
        best = record.candidates[0]
        description += (
            f" The best takes {time_text(best.seconds)} and {best.memory:.0%} of the fullest device's memory."
        )
    if record.bound_seconds:
        description += f" No plan can take less than {time_text(record.bound_seconds)}."
    return picture("search", "The candidates of the search", description, _WIDTH, _HEIGHT, *drawn)


def _scales(points: Sequence[RecordedPoint], bound: float) -> _Scales:
    seconds = [point.seconds for point in points]
    best = min((point.seconds for point in points if not point.reason), default=min(seconds))
    low = min(bound or best, *seconds) * 0.97
    high = max(min(max(seconds), LARGEST_TIME * best) * 1.03, low * 1.1, 1e-9)
    top = min(max(1.1, 1.05 * max(point.memory for point in points)), LARGEST_MEMORY)
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    logarithmic = low > 0 and high / low > 5

    def x(value: float) -> float:
        value = min(max(value, low), high)
        place = log(value / low) / log(high / low) if logarithmic else (value - low) / (high - low)
        return _LEFT + place * wide

    def y(value: float) -> float:
        return _TOP + (1 - min(value, top) / top) * tall

    times = ticks_of_powers(low * 1e3, high * 1e3) if logarithmic else ticks(low * 1e3, high * 1e3, 7)
    return _Scales(x=x, y=y, times=times, shares=ticks(0.0, top, 6))


def _axes(scales: _Scales, bound: float) -> Markup:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    marks = []
    for time in scales.times:
        x = scales.x(time / 1e3)
        marks.append(element("line", class_="grid", x1=x, y1=_TOP, x2=x, y2=bottom))
        marks.append(element("text", f"{time:,.10g}", x=x, y=bottom + 16, text_anchor="middle", class_="quiet"))
    for share in scales.shares:
        y = scales.y(share)
        marks.append(element("line", class_="grid", x1=_LEFT, y1=y, x2=right, y2=y))
        marks.append(element("text", f"{share:.0%}", x=_LEFT - 8, y=y + 4, text_anchor="end", class_="quiet"))
    full = scales.y(1.0)
    marks.append(element("line", class_="limit", x1=_LEFT, y1=full, x2=right, y2=full))
    marks.append(element("text", "capacity", x=right - 4, y=full - 5, text_anchor="end"))
    if bound:
        x = scales.x(bound)
        marks.append(element("line", class_="bound", x1=x, y1=_TOP, x2=x, y2=bottom))
        marks.append(element("text", "bound", x=x + 5, y=bottom - 6, class_="quiet"))
    marks.append(element("text", "ms a step", x=right, y=_HEIGHT - 8, text_anchor="end", class_="quiet"))
    what = "memory of the fullest device, as a share of its capacity"
    marks.append(element("text", what, x=4, y=14, class_="quiet"))
    return element("g", *marks)


def _dots(points: Sequence[RecordedPoint], scales: _Scales) -> list[_Dot]:
    """Group points by cells, which grow until there are few enough to draw."""
    cell = 3.0
    while True:
        cells: dict[tuple[int, int], list[RecordedPoint]] = {}
        for point in points:
            key = (int(scales.x(point.seconds) / cell), int(scales.y(point.memory) / cell))
            cells.setdefault(key, []).append(point)
        if len(cells) <= MOST_DOTS // 2:
            break
        cell *= 1.5
    return [_Dot(point=min(own, key=lambda point: point.seconds), count=len(own)) for own in cells.values()]


def _says(dot: _Dot) -> Markup:
    point = dot.point
    memory = f", {point.memory:.0%} of memory" if point.memory < MAX_SHARE else ""
    text = f"{short(point.label, 80)}: {time_text(point.seconds)}{memory}"
    if point.reason:
        text += f"; {short(point.reason, 80)}"
    if dot.count > 1:
        text += f" (and {dot.count - 1} more near here)"
    return element("title", text)


def _crosses(dots: Sequence[_Dot], scales: _Scales) -> Iterator[Markup]:
    for dot in dots:
        x, y = scales.x(dot.point.seconds), scales.y(dot.point.memory)
        shape = f"M{number(x - 3)} {number(y - 3)}l6 6m0-6l-6 6"
        yield element("path", _says(dot), class_="refused", d=shape)


def _circles(dots: Sequence[_Dot], scales: _Scales) -> Iterator[Markup]:
    for dot in dots:
        x, y = scales.x(dot.point.seconds), scales.y(dot.point.memory)
        yield element("circle", _says(dot), class_="fits", cx=x, cy=y, r=3)


def _front(front: Sequence[RecordedPoint], scales: _Scales) -> Iterator[Markup]:
    if len(front) > 1:
        steps = [f"M{number(scales.x(front[0].seconds))} {number(scales.y(front[0].memory))}"]
        for point in front[1:]:
            steps.append(f"H{number(scales.x(point.seconds))}V{number(scales.y(point.memory))}")
        yield element("path", element("title", "the front"), class_="front", d="".join(steps))


def _candidates(record: SearchRecord, scales: _Scales) -> Iterator[Markup]:
    """Draw the best candidates as rings, numbered as in the table where numbers do not overlap."""
    labels: list[tuple[float, float]] = []
    shown = list(enumerate(record.candidates[:MOST_CANDIDATES], 1))
    for place, one in reversed(shown):
        x, y = scales.x(one.seconds), scales.y(one.memory)
        title = element("title", f"{place}: {short(one.label, 80)}: {time_text(one.seconds)}, {one.memory:.0%}")
        yield element("circle", title, class_="best" if place == 1 else "candidate", cx=x, cy=y, r=6)
    for place, one in shown:
        x, y = scales.x(one.seconds), scales.y(one.memory)
        if all(abs(x - other) > 14 or abs(y - another) > 13 for other, another in labels):
            labels.append((x, y))
            yield element("text", str(place), x=x, y=y - 9, text_anchor="middle", class_="strong")


def candidate_table(record: SearchRecord) -> Markup:
    """The best candidates, and why each is slower than the best."""
    best = record.candidates[0].seconds
    rows = [
        [
            str(place),
            short(one.label, 120),
            f"{one.schedule}, {counted(one.micro_batches, 'micro-batch', 'es')}",
            time_text(one.seconds),
            f"{one.seconds / best - 1:+.1%}" if place > 1 and best else "",
            f"{one.memory:.0%}",
            f"{one.bubble:.1%}",
            f"{one.mfu:.1%}" if one.mfu else "",
            short(one.why, 200) or ("the best found" if place == 1 else ""),
        ]
        for place, one in enumerate(record.candidates[:MOST_CANDIDATES], 1)
    ]
    head = ["", "plan", "schedule", "step", "longer", "memory", "bubble", "MFU", "why it is slower"]
    return table("The best candidates", head, rows, numbers=(3, 4, 5, 6, 7))


def dropped_table(record: SearchRecord) -> Markup:
    """The excluded families, largest first."""
    dropped = sorted(record.dropped, key=lambda one: -one.count)
    rows = [[short(one.family, 80), short(one.reason, 160), f"{one.count:,}"] for one in dropped[:MOST_DROPPED]]
    more = sum(one.count for one in dropped[MOST_DROPPED:])
    if more:
        rows.append(["others", f"{len(dropped) - MOST_DROPPED} more families", f"{more:,}"])
    return table("What was dropped", ["family", "reason", "candidates"], rows, numbers=(2,))


def summary(record: SearchRecord) -> str:
    """The size of the search, and the gap to the bound."""
    took = f" in {record.seconds:.1f} s" if record.seconds else ""
    said = [f"{record.tried:,} plans were priced{took}."]
    if record.candidates and record.bound_seconds:
        gap = record.candidates[0].seconds / record.bound_seconds - 1
        said.append(f"The best is within {gap:.1%} of the lower bound.")
    return " ".join(said)
