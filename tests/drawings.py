"""Timelines drawn by hand, as text, and simulated ones brought into the same form.

A line is a stream of a rank, with two characters for each second. A task is its kind and micro-batch, then dashes to
its end: ``B0--`` lasts two seconds. A rank that waits shows the first letter of the reason, twice each second: ``pp``
for the pipeline, ``tt`` a transfer, ``ss`` a stall, ``rr`` a reduction. In ``receive`` lines ``a0--`` is a message of
micro-batch 0 from the rank named in the line that takes two seconds to arrive; in ``reduce`` lines ``r1`` is bucket 1.
``U`` is the update and ``O`` the overhead; dots are nothing. ::

    rank 0            |F0ttB0--|
    1 receive from 0  |..a0....|
"""

from __future__ import annotations

import re

from whale.planner.simulation.timeline import Timeline

Drawn = set[tuple[str, str, float, float]]
"""Stream, what, start, end."""

_CELL = re.compile(r"(?P<wait>([ptsr])\2(?:\2\2)*)|(?P<event>[A-Za-z][0-9U](?:--)*)|(?P<nothing>\.\.)")


def parse_drawing(text: str) -> Drawn:
    """Read a drawing."""
    drawn: Drawn = set()
    for line in filter(None, map(str.strip, text.splitlines())):
        stream, bar, cells = line.partition("|")
        assert bar and cells.endswith("|") and len(cells) % 2, line
        position, cells = 0, cells[:-1]
        while position < len(cells):
            match = _CELL.match(cells, position)
            assert match, f"{line}: not understood: {cells[position:]}"
            position = match.end()
            if match["nothing"] is None:
                what = f"wait {match[0][0]}" if match["wait"] else match[0][:2]
                drawn.add((stream.strip(), what, match.start() / 2, match.end() / 2))
    return drawn


def drawing_of(timeline: Timeline) -> Drawn:
    """Bring a timeline into the form of a parsed drawing; what takes no time is not drawn. Where ranks compute more
    than one stage, tasks bear the stage."""
    drawn: Drawn = set()
    tasks = {(event.rank, event.stage) for event in timeline.events if event.kind in "FBIW"}
    several = len({rank for rank, _ in tasks}) < len(tasks)
    for event in timeline.events:
        if event.start == event.end:
            continue
        stream = f"rank {event.rank}"
        match event.kind:
            case "send":
                continue
            case "receive":
                stream, what = f"{event.rank} receive from {event.peer}", f"a{event.micro_batch}"
            case "reduce":
                stream, what = f"{event.rank} reduce", f"r{event.bucket}"
            case "update" | "overhead":
                what = f"{event.kind[0].upper()}U"
            case "idle":
                what = f"wait {event.reason[0]}"
            case _:
                what = f"{event.stage if several else ''}{event.kind}{event.micro_batch}"
        drawn.add((stream, what, event.start, event.end))
    return drawn
