"""A timeline as text: one line per rank; each letter is the task that fills most of its column.

It serves terminals of any width and knows neither files nor terminals.
"""

from __future__ import annotations

from itertools import groupby

from whale.ir.units import time_text
from whale.planner.simulation.timeline import PARTS, Event, Timeline

__all__ = ["LEGEND", "breakdown_table", "gantt"]

LEGEND = "F forward, B backward (I of inputs, W of weights), R reduction, U update and overhead, . waiting"


def gantt(timeline: Timeline, width: int = 100) -> str:
    """Draw the ranks' work over time in lines of at most ``width`` characters; equal neighbouring ranks share a line.

    >>> from whale.ir.workload import StageWork, Workload
    >>> from whale.planner.simulation.simulate import simulate
    >>> stage = StageWork(ranks=(0, 1), forward=(1, 1), backward=(2, 2), weights=(1, 1), kept_bytes=(0, 0))
    >>> print(gantt(simulate(Workload(world_size=2, micro_batches=2, stages=(stage,))), width=23))
    rank 0-1 |FFBBBBFFBBBB|
    """
    label = max(len(f"rank {rank}-{rank}") for rank in timeline.ranks)
    columns = max(1, width - label - 3)
    by_rank: dict[int, list[Event]] = {rank: [] for rank in timeline.ranks}
    for event in timeline.events:
        by_rank[event.rank].append(event)
    rows = [(rank, _row(by_rank[rank], timeline.step_seconds, columns)) for rank in timeline.ranks]
    lines = []
    for _, alike in groupby(enumerate(rows), key=lambda row: (row[1][1], row[1][0] - row[0])):
        ranks = [rank for _, (rank, _) in alike]
        name = f"rank {ranks[0]}" if len(ranks) == 1 else f"rank {ranks[0]}-{ranks[-1]}"
        lines.append(f"{name:<{label}} |{dict(rows)[ranks[0]]}|")
    return "\n".join(lines)


def _row(events: list[Event], step_seconds: float, columns: int) -> str:
    """Return the letter that fills most of each column; ties go to the first."""
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    scale = columns / step_seconds if step_seconds else 0.0
    for event in events:
        if event.kind in ("send", "receive", "reduce") or event.end == event.start:
            continue
        letter = _letter(event)
        start, end = event.start * scale, event.end * scale
        for column in range(int(start), min(columns, int(end) + 1)):
            part = min(end, column + 1) - max(start, column)
            shares[column][letter] = shares[column].get(letter, 0.0) + part
    return "".join(max(share, key=lambda letter: share[letter], default=".") if share else "." for share in shares)


def _letter(event: Event) -> str:
    if event.kind in ("update", "overhead"):
        return "U"
    if event.kind == "idle":
        return "R" if event.reason == "reduction" else "."
    return event.kind


def breakdown_table(timeline: Timeline) -> str:
    """Return the breakdown of the busiest rank and the average over all ranks."""
    count = len(timeline.ranks)
    rows = [("", f"rank {timeline.busiest_rank}, the busiest", "", "all ranks", "")]
    for part in PARTS:
        own = timeline.breakdowns[timeline.busiest_rank][part]
        mean = sum(parts[part] for parts in timeline.breakdowns.values()) / count
        if own or mean:
            step = timeline.step_seconds
            rows.append((part, time_text(own), f"{own / step:.1%}", time_text(mean), f"{mean / step:.1%}"))
    rows.append(("step", time_text(timeline.step_seconds), "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
