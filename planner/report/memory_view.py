"""Peak memory of every device by category, with its capacity. It knows no plan and no timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from whale.ir.units import bytes_text
from whale.ir.workload import DeviceMemory
from whale.planner.report.alike import Alike, alike
from whale.planner.report.axis import ticks
from whale.planner.report.colours import PAINT, stage_colour, text_on
from whale.planner.report.labels import ranks_text, stages_text, type_of_name
from whale.planner.report.markup import Markup, element, picture, short

__all__ = ["LEGEND", "memory_view"]

LEGEND = ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace", "framework")
"""Categories of memory, from left to right; each is the name of its CSS class."""

MOST_ROWS = 64

_WIDTH, _LEFT, _PLOT, _TOP = 960.0, 196.0, 564.0, 26.0
_ROW, _PITCH = 18.0, 27.0
_GIB = 2**30


def memory_view(memory: Sequence[DeviceMemory], stages: Mapping[int, tuple[int, ...]]) -> Markup:
    """Draw a bar for each device with a line at its capacity; devices with equal bars share one.

    Args:
        memory: of devices, at least one.
        stages: of each rank.
    """
    num_stages = 1 + max((index for own in stages.values() for index in own), default=0)

    def place(device: DeviceMemory) -> tuple[tuple[int, ...], str]:
        return stages.get(device.rank, ()), type_of_name(device.device, device.rank)

    groups, left = alike(
        sorted(memory, key=lambda device: (stages.get(device.rank, ()), device.rank)),
        equal=lambda device: (place(device), device.capacity, tuple(getattr(device, name) for name in LEGEND)),
        similar=place,
        weight=attrgetter("share"),
        most=MOST_ROWS,
    )
    largest = max(max(group.shown.capacity, group.shown.total) for group in groups) or 1
    unit = _PLOT / largest
    height = _TOP + _PITCH * len(groups) + (12 if left else 0)
    drawn = [_axis(largest, unit, height)]
    for position, group in enumerate(groups):
        own = stages.get(group.shown.rank, ())
        drawn.append(element("g", *_bar(group, own, num_stages, _TOP + position * _PITCH, unit)))
    if left:
        text = f"{left} more devices, each less full, are not shown"
        drawn.append(element("text", text, x=_LEFT, y=height - 2, class_="quiet"))
    full = max((group.shown for group in groups), key=attrgetter("share"))
    description = (
        f"{len(groups)} bars for {len(memory)} devices. Rank {full.rank} is the fullest: {bytes_text(full.total)} of "
        f"{bytes_text(full.capacity)}, {full.share:.0%}."
    )
    return picture("memory", "Peak memory of each device", description, _WIDTH, height, *drawn)


def _axis(largest: float, unit: float, height: float) -> Markup:
    marks = []
    scale, name = (_GIB, "GiB") if largest >= 0.01 * _GIB else (2**20, "MiB")
    for tick in ticks(0.0, largest / scale, 7):
        x = _LEFT + tick * scale * unit
        marks.append(element("line", class_="grid", x1=x, y1=_TOP - 6, x2=x, y2=height))
        marks.append(element("text", f"{tick:,.10g}", x=x, y=_TOP - 10, text_anchor="middle", class_="quiet"))
    marks.append(element("text", name, x=_LEFT - 14, y=_TOP - 10, text_anchor="end", class_="quiet"))
    return element("g", *marks)


def _bar(
    group: Alike[DeviceMemory], stages: tuple[int, ...], num_stages: int, top: float, unit: float
) -> Iterator[Markup]:
    device, count = group.shown, len(group.members)
    type_ = type_of_name(device.device, device.rank)
    ranks = [one.rank for one in group.members]
    which = "" if group.equal else f"; shown: rank {device.rank}, the fullest"
    yield element("title", f"{short(type_, 60)} {stages_text(stages)}, {ranks_text(ranks, 200)}{which}")
    if stages:
        colour = stage_colour(stages[0], num_stages)
        yield element("rect", x=2, y=top, width=6, height=_ROW, fill=colour, class_="swatch")
    many = "" if count == 1 else f"{count} equal" if group.equal else f"fullest of {count}"
    yield element("text", short(f"{stages_text(stages)} · {ranks_text(ranks, 12)}", 31), x=14, y=top + 7.5)
    yield element("text", " ".join(filter(None, (short(type_, 20), many))), x=14, y=top + 18.5, class_="quiet")
    x = _LEFT
    for name in LEGEND:
        size = getattr(device, name)
        width = size * unit
        if not size:
            continue
        share = f"{size / device.capacity:.0%}"
        said = element("title", f"{name}: {bytes_text(size)} ({share} of the capacity)")
        yield element("rect", said, class_=f"{name} box", x=x, y=top, width=width, height=_ROW)
        if width > 30:
            fill = text_on(PAINT[name])
            middle = x + width / 2
            yield element("text", share, x=middle, y=top + _ROW - 5, text_anchor="middle", class_="in", fill=fill)
        x += width
    end = _LEFT + device.capacity * unit
    limit = element("title", f"capacity: {bytes_text(device.capacity)}")
    yield element("line", limit, class_="limit", x1=end, y1=top - 3, x2=end, y2=top + _ROW + 3)
    text = f"{bytes_text(device.total)} of {bytes_text(device.capacity)} · {device.share:.0%}"
    over = device.total > device.capacity
    y, right = top + (7.5 if over else 13), _WIDTH - 4
    yield element("text", text, x=right, y=y, text_anchor="end", class_="over" if over else None)
    if over:
        lacking = f"lacks {bytes_text(device.total - device.capacity)}"
        yield element("text", lacking, x=right, y=top + 18.5, text_anchor="end", class_="over")
