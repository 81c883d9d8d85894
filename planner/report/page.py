"""The report as one page: a summary, then the views.

The page opens from a file, loads nothing from the network and runs no script; its content security policy forbids both.
Even large plans take at most a megabyte, because every view draws equal items once. The same input gives the same
bytes.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.ir.search_record import SearchRecord
from whale.ir.units import bytes_text, counted, time_text
from whale.planner.explain import Explanation
from whale.planner.report import map_view, memory_view, reasons_view, search_view, timeline_view
from whale.planner.report.labels import stages_of, types_of
from whale.planner.report.markup import Markup, element, short
from whale.planner.report.style import STYLE
from whale.planner.simulation.timeline import Timeline

__all__ = ["report_page"]


@dataclass(frozen=True, kw_only=True)
class _View:
    """A section of the page: its anchor, title and content."""

    name: str
    title: str
    content: tuple[Markup, ...]


def report_page(
    plan: Plan,
    *,
    timeline: Timeline | None = None,
    explanation: Explanation | None = None,
    cluster: Cluster | None = None,
    record: SearchRecord | None = None,
) -> str:
    """Write the report about a plan, as HTML.

    Args:
        plan: with prediction and workload; without them, the views that need them say how to get them.
        timeline: the simulation of the plan's workload.
        explanation: of the same workload.
        cluster: with the nodes; the plan's own cluster.
        record: of the search that made the plan.
    """
    types = types_of(plan, cluster)
    stages = [stage.ranks for stage in plan.workload.stages] if plan.workload is not None else []
    views = [
        _timeline(plan, timeline, types),
        _memory(plan, stages_of(stages or [stage.ranks for stage in plan.stages])),
        _View(
            name="map-view",
            title="The plan on the cluster",
            content=(
                _framed("picture of the cluster", map_view.map_view(plan, stages, types, cluster)),
                map_view.stage_table(plan, stages, types),
            ),
        ),
        _search(plan, record),
        _reasons(timeline, explanation),
    ]
    title = f"Whale plan: {short(plan.model.name, 120) if plan.model is not None else 'any model'}"
    body = element(
        "body",
        element("h1", title),
        element("p", _subtitle(plan, types)),
        *_notes(plan),
        element("nav", *(element("a", view.title, href=f"#{view.name}") for view in views), aria_label="Views"),
        _figures(plan, timeline),
        element("main", *map(_section, views)),
        element("footer", "Made by whale report. Times are predicted; hover over a shape for its numbers."),
    )
    return f"<!DOCTYPE html>\n{element('html', _head(title), body, lang='en')}\n"


def _head(title: str) -> Markup:
    """The content security policy: the style is allowed by its hash; nothing else may be loaded, run or sent."""
    digest = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(STYLE)),
    )


def _section(view: _View) -> Markup:
    heading = element("h2", view.title, id=f"{view.name}-heading")
    return element("section", heading, *view.content, id=view.name, aria_labelledby=f"{view.name}-heading")


def _framed(name: str, drawing: Markup) -> Markup:
    """A picture that scrolls by itself if it is wider than the screen."""
    return element("div", drawing, class_="scroll", tabindex="0", role="region", aria_label=name)


def _legend(names: Iterable[tuple[str, str]]) -> Markup:
    items = (element("li", element("span", class_=f"colour {name}"), text) for name, text in names)
    return element("ul", *items, class_="legend")


def _missing(what: str) -> tuple[Markup]:
    return (element("p", what),)


# --- the head of the page ---------------------------------------------------------------------------------------------


def _subtitle(plan: Plan, types: Mapping[int, str]) -> str:
    counts = Counter(types.values())
    devices = ", ".join(f"{count} {short(name, 60)}" for name, count in list(counts.items())[:12])
    parts = [devices or counted(plan.world_size, "device")]
    if len(counts) > 12:
        parts[0] += f" and {len(counts) - 12} more types"
    micro_batches = counted(plan.micro_batches, "micro-batch", "es")
    if plan.batch is not None:
        rows = plan.micro_batch_rows
        parts.append(f"batch {plan.batch} in {micro_batches} of {counted(rows or 0, 'row')}")
    else:
        parts.append(micro_batches)
    return " · ".join([*parts, f"schedule {plan.schedule}"])


def _notes(plan: Plan) -> Iterator[Markup]:
    if plan.prediction is not None and not plan.prediction_is_current:
        text = "The plan was edited after its prediction was computed: times and memory are those of the old plan."
        yield element("p", text, class_="note")
    if plan.prediction is not None and not plan.prediction.fits:
        yield element("p", "The plan does not fit in memory: some bars exceed their line.", class_="note")


def _figures(plan: Plan, timeline: Timeline | None) -> Markup:
    """The summary, in large type."""
    found: list[tuple[str, str, str]] = []
    prediction = plan.prediction
    if prediction is not None:
        low, high = prediction.step_seconds_interval
        step = prediction.step_seconds
        found.append(("step", time_text(step), f"{time_text(low)} to {time_text(high)}, {prediction.source}"))
        if plan.batch is not None and step:
            found.append(("throughput", f"{plan.batch / step:,.1f} rows/s", ""))
        found.append(("bubble", f"{prediction.bubble:.1%}", "of all devices' time"))
        if prediction.mfu and prediction.flops and step:
            rate = f"{prediction.flops / step / 1e12:,.1f} TFLOP/s in all"
            found.append(("model FLOP/s utilization", f"{prediction.mfu:.1%}", rate))
        if prediction.memory:
            full = max(prediction.memory, key=lambda device: device.share)
            what = f"{bytes_text(full.total)} of {bytes_text(full.capacity)}, rank {full.rank}"
            found.append(("fullest device", f"{full.share:.0%}", what))
    elif timeline is not None:
        found.append(("step", time_text(timeline.step_seconds), "simulated"))
        found.append(("bubble", f"{timeline.bubble:.1%}", "of all devices' time"))
    tiles = [
        element("div", element("dt", name), element("dd", value, *([element("small", more)] if more else [])))
        for name, value, more in found
    ]
    return element("dl", *tiles) if tiles else Markup()


# --- the views --------------------------------------------------------------------------------------------------------


def _timeline(plan: Plan, timeline: Timeline | None, types: Mapping[int, str]) -> _View:
    name, title = "timeline-view", "The step on every device"
    if timeline is None or plan.workload is None:
        text = "The plan was written by hand and has no workload to simulate. 'whale plan' makes plans with one."
        return _View(name=name, title=title, content=_missing(text))
    drawing = timeline_view.timeline_view(timeline, plan.workload, types)
    used = [
        (name, text) for name, text in timeline_view.LEGEND.items() if name == "idle" or f'class="{name}' in drawing
    ]
    content = [_legend(used), _framed("picture of the step", drawing)]
    if len(timeline.ranks) < plan.world_size:
        text = (
            f"The workload has {len(timeline.ranks)} of {plan.world_size} ranks: each other one does as one of these, "
        )
        content.append(element("p", text + "or has no stage."))
    return _View(name=name, title=title, content=tuple(content))


def _memory(plan: Plan, stages: Mapping[int, tuple[int, ...]]) -> _View:
    name, title = "memory-view", "The memory of every device"
    if plan.prediction is None or not plan.prediction.memory:
        text = "The plan has no prediction of memory. 'whale plan' makes plans with one."
        return _View(name=name, title=title, content=_missing(text))
    memory = plan.prediction.memory
    used = [(part, part) for part in memory_view.LEGEND if any(getattr(device, part) for device in memory)]
    content = [_legend(used), _framed("picture of memory", memory_view.memory_view(memory, stages))]
    if len(memory) < plan.world_size:
        text = f"The prediction lists {len(memory)} of {plan.world_size} devices; the others are like one of these."
        content.append(element("p", text))
    return _View(name=name, title=title, content=tuple(content))


def _search(plan: Plan, record: SearchRecord | None) -> _View:
    name, title = "search-view", "The candidates of the search"
    if record is None:
        text = (
            "There is no record of a search. 'whale search --record search.json' writes one beside the plan; "
            "'whale report plan.json --search search.json' draws it."
        )
        return _View(name=name, title=title, content=_missing(text))
    content = [element("p", search_view.summary(record))]
    if record.plan and record.plan != plan.digest():
        text = "The record is of a search for another plan, or the plan was edited afterwards."
        content.append(element("p", text, class_="note"))
    if record.points or record.candidates:
        content.append(_framed("picture of the search", search_view.search_view(record)))
        content.append(element("p", "Circles fit; grey crosses do not. Rings are the best candidates, in their order."))
    if record.candidates:
        content.append(search_view.candidate_table(record))
    if record.dropped:
        content.append(search_view.dropped_table(record))
    return _View(name=name, title=title, content=tuple(content))


def _reasons(timeline: Timeline | None, explanation: Explanation | None) -> _View:
    name, title = "why-view", "Why this plan"
    if timeline is None or explanation is None:
        text = "Without a workload there is nothing to explain: 'whale plan' makes a plan that carries one."
        return _View(name=name, title=title, content=_missing(text))
    return _View(name=name, title=title, content=tuple(reasons_view.reasons_view(explanation, timeline)))
