"""Content of the report: times and bytes as they are, each item once, and no markup from a plan."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.report_plans import FAST, SLOW, large_plan, mixed_cluster, mixed_plan, search_record
from tests.workloads import chain_workload
from whale.cli.app import app
from whale.cli.plan_text import stage_table
from whale.ir.plan import Plan, PlanStage, PlanState
from whale.ir.search_record import RecordedPoint, SearchRecord
from whale.ir.workload import DeviceMemory, Workload
from whale.planner.explain import explain
from whale.planner.report.map_view import map_view, places_of
from whale.planner.report.memory_view import memory_view
from whale.planner.report.page import report_page
from whale.planner.report.search_view import search_view
from whale.planner.report.timeline_view import timeline_view
from whale.planner.simulation.simulate import simulate

PLOT = 692.0
"""Units of the timeline's picture that a step takes."""


class Page(HTMLParser):
    """Elements with their attributes, in order, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.texts.append((self.elements[-1][0], data))

    def of_class(self, name: str) -> list[dict[str, str]]:
        return [attributes for _, attributes in self.elements if name in attributes.get("class", "").split()]

    def words(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def simulated(plan: Plan) -> dict[str, Any]:
    assert plan.workload is not None
    return {"timeline": simulate(plan.workload), "explanation": explain(plan.workload, plan.prediction)}


def widths(page: Page, name: str) -> float:
    return sum(float(attributes["width"]) for attributes in page.of_class(name))


# --- the stages -------------------------------------------------------------------------------------------------------


def test_tables_of_stages_have_a_column_for_each_decision_that_any_has() -> None:
    plan = mixed_plan()
    usual = [{"recompute": "none", "reduce": "mean"}, *({} for _ in plan.stages[1:])]
    others: list[dict[str, Any]] = [{"recompute": "full", "reduce": "adasum"}, {"offload": "state", "distinct": 0.3}]
    others[1]["state"] = PlanState(level=1)
    others += [{} for _ in plan.stages[2:]]
    for given, names in ((usual, []), (others, ["recompute", "zero", "offload", "reduce", "distinct"])):
        stages = [stage.model_copy(update=own) for stage, own in zip(plan.stages, given, strict=True)]
        changed = plan.model_copy(update={"stages": tuple(stages)})
        page = Page(report_page(changed, **simulated(plan), cluster=mixed_cluster()))
        heads = page.words("th")
        after = heads.index("mesh and shares") + 1
        assert heads[after : after + len(names)] == names
        assert not {"recompute", "zero", "offload", "reduce", "distinct"} - set(names) & set(heads)
        assert plan.prediction is not None and plan.workload is not None
        head = stage_table(changed, plan.prediction, plan.workload, mixed_cluster()).splitlines()[0]
        assert head.split("mesh")[1].split("a micro-batch")[0].split() == names


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_five_views_each_picture_in_words_and_asks_for_nothing() -> None:
    plan = mixed_plan()
    text = report_page(plan, **simulated(plan), cluster=mixed_cluster(), record=search_record(plan))
    page = Page(text)
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["timeline-view", "memory-view", "map-view", "search-view", "why-view"]
    pictures = [attributes for tag, attributes in page.elements if tag == "svg" and "role" in attributes]
    assert len(pictures) == 4
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert set(ids.values()) == {1}
    for picture in pictures:
        assert picture["role"] == "img"
        assert all(name in ids for name in picture["aria-labelledby"].split())
    assert len(page.words("desc")) == 4 and all(page.words("desc"))
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    assert all(
        attributes["href"].startswith("#") for _, attributes in page.elements if "href" in attributes
    ) and not any("src" in attributes or "style" in attributes for _, attributes in page.elements)
    assert not re.search(r"url\(|@import", text)


def test_the_policy_allows_the_one_style_and_nothing_else() -> None:
    text = report_page(mixed_plan())
    policy = next(
        attributes["content"]
        for _, attributes in Page(text).elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None and "<" not in style[1]
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy.split("; ")[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]


def test_the_same_input_gives_the_same_bytes() -> None:
    plan = mixed_plan()
    pages = [
        report_page(plan, **simulated(plan), cluster=mixed_cluster(), record=search_record(plan)) for _ in range(2)
    ]
    assert pages[0] == pages[1]


HOSTILE = "<img src=x onerror=alert(1)>\"'&</text></svg></style><script>alert(2)</script>"


def test_names_of_a_plan_never_become_markup() -> None:
    plan = mixed_plan(name=HOSTILE, model=HOSTILE)
    record = search_record(plan)
    record = record.model_copy(
        update={
            "candidates": tuple(one.model_copy(update={"label": HOSTILE, "why": HOSTILE}) for one in record.candidates),
            "points": tuple(one.model_copy(update={"label": HOSTILE, "reason": HOSTILE}) for one in record.points),
            "dropped": tuple(one.model_copy(update={"family": HOSTILE, "reason": HOSTILE}) for one in record.dropped),
        }
    )
    innocent = mixed_plan()
    harmless = report_page(innocent, **simulated(innocent), cluster=mixed_cluster(), record=search_record(innocent))
    hostile = report_page(plan, **simulated(plan), cluster=mixed_cluster(name=HOSTILE), record=record)
    known = {(tag, *attributes) for tag, attributes in Page(harmless).elements}
    assert {(tag, *attributes) for tag, attributes in Page(hostile).elements} <= known
    assert HOSTILE in "".join(Page(hostile).words("h1"))


def test_characters_that_cannot_be_seen_are_shown() -> None:
    memory = (DeviceMemory(rank=0, device="A\u202e100\x00\ud800:0", capacity=1, parameters=1),)
    text = memory_view(memory, {})
    assert "A\ufffd100\ufffd\ufffd" in text
    text.encode()


def test_a_plan_without_numbers_is_drawn_on_the_map_and_the_rest_says_how_to_get_it() -> None:
    page = report_page(Plan(world_size=2, stages=(PlanStage(ranks=(0,)), PlanStage(ranks=(1,)))))
    assert page.count("whale plan") >= 3 and "whale search --record" in page
    assert "rank 1" in page and "stage 1" in page


def test_an_edited_plan_is_said_to_have_old_numbers() -> None:
    plan = mixed_plan()
    assert "edited" not in report_page(plan)
    assert "The plan was edited" in report_page(plan.model_copy(update={"schedule": "gpipe"}))


# --- the step ---------------------------------------------------------------------------------------------------------


def test_boxes_are_as_wide_as_tasks_are_long() -> None:
    workload = chain_workload(2, 4, times=[(1.0, 2.0), (2.0, 3.0)], latency=0.25)
    timeline = simulate(workload)
    page = Page(timeline_view(timeline, workload, {}))
    for name, kind in (("forward", "F"), ("backward", "B")):
        seconds = sum(event.seconds for event in timeline.events if event.kind == kind)
        assert widths(page, name) * timeline.step_seconds / PLOT == pytest.approx(seconds, rel=0.01)
    boxes = sorted((float(box["y"]), float(box["x"]), float(box["width"])) for box in page.of_class("box"))
    for (row, x, width), (next_row, next_x, _) in pairwise(boxes):
        assert row < next_row or x + width <= next_x + 0.2
    for rank in (0, 1):
        parts = timeline.breakdowns[rank]
        waiting = (parts["pipeline"] + parts["transfer"]) / timeline.step_seconds
        assert f"{waiting:.0%}" in page.words("text")


def test_devices_that_do_the_same_share_a_row() -> None:
    plan = mixed_plan()
    assert plan.workload is not None
    page = Page(timeline_view(simulate(plan.workload), plan.workload, {}))
    assert len(page.of_class("idle")) >= 4  # the background of each row
    labels = [text for text in page.words("text") if "stage" in text]
    assert {"stage 0 · ranks 0, 2", "stage 1 · ranks 8, 9"} <= set(labels)


def test_more_tasks_than_boxes_are_drawn_as_shares() -> None:
    workload = chain_workload(4, 600)
    page = Page(timeline_view(simulate(workload), workload, {}))
    assert not page.of_class("box")
    areas = {}
    for name in ("forward", "backward"):
        pieces = "".join(attributes["d"] for attributes in page.of_class(name))
        areas[name] = sum(float(width) * float(height) for width, height in re.findall(r"h([\d.]+)v([\d.]+)h-", pieces))
    step = simulate(workload).step_seconds
    assert areas["forward"] == pytest.approx(4 * 600 * 1.0 / step * PLOT * 16, rel=0.05)
    assert areas["backward"] == pytest.approx(4 * 600 * 2.0 / step * PLOT * 16, rel=0.05)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_bytes_are_many_and_pass_their_line_where_memory_lacks() -> None:
    gib = 2**30
    memory = (
        DeviceMemory(rank=0, device="big:0", capacity=40 * gib, parameters=10 * gib, activations=20 * gib),
        DeviceMemory(rank=1, device="small:1", capacity=16 * gib, parameters=5 * gib, optimizer=15 * gib),
    )
    page = Page(memory_view(memory, {0: (0,), 1: (1,)}))
    per_gib = widths(page, "parameters") / 15
    assert widths(page, "activations") / per_gib == pytest.approx(20, rel=0.01)
    assert widths(page, "optimizer") / per_gib == pytest.approx(15, rel=0.01)
    (first, second) = [float(line["x1"]) for line in page.of_class("limit")]
    start = min(float(box["x"]) for box in page.of_class("box"))
    assert (first - start) / per_gib == pytest.approx(40, rel=0.01)
    assert (second - start) / per_gib == pytest.approx(16, rel=0.01)
    assert "lacks 4.00 GiB" in page.words("text")
    assert "30.0 GiB of 40.0 GiB · 75%" in page.words("text")
    assert "125%" in "".join(page.words("desc"))


def test_devices_with_equal_bars_share_one() -> None:
    memory = mixed_plan().prediction
    assert memory is not None
    page = Page(memory_view(memory.memory, dict.fromkeys(range(8), (0,)) | dict.fromkeys(range(8, 12), (1,))))
    assert len(page.of_class("limit")) == 2
    assert f"{FAST} 8 equal" in page.words("text")


# --- the map ----------------------------------------------------------------------------------------------------------


def test_each_device_has_its_stage_position_and_share() -> None:
    places = places_of(mixed_plan(), ())
    assert places[3].stages == (0,) and places[3].position == (("r", 1, 4), ("t", 1, 2))
    assert (places[3].rows, places[3].count, places[3].part) == (0.25, 4, 0.25)
    assert (places[11].stages, places[11].count) == ((1,), 2)
    assert sum(places[rank].rows for rank in range(8, 12)) == 1
    page = Page(map_view(mixed_plan(), (), {}, mixed_cluster()))
    assert {"rank 8", "rank 11", "5 rows", "t0/2 75% 4 rows"} <= set(page.words("text"))


def test_equal_nodes_are_drawn_once() -> None:
    page = Page(map_view(mixed_plan(), (), {}, mixed_cluster()))
    assert len(page.of_class("node")) == 2
    assert "left and 1 more equal" in page.words("text")


def test_devices_without_a_stage_are_unused() -> None:
    plan = Plan(world_size=3, stages=(PlanStage(ranks=(0, 2)),))
    page = Page(map_view(plan, (), {}, None))
    assert len(page.of_class("unused")) == 1
    assert "1 devices have no stage" in "".join(page.words("desc"))


# --- the search -------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_a_cross_with_its_reason() -> None:
    plan = mixed_plan()
    record = search_record(plan)
    page = Page(search_view(record))
    refused = [title for title in page.words("title") if "needs" in title]
    assert page.of_class("refused") and len(refused) == len(page.of_class("refused"))
    assert len(page.of_class("candidate")) == 3 and len(page.of_class("best")) == 1
    best = page.of_class("best")[0]
    assert all(float(best["cx"]) <= float(dot["cx"]) for dot in page.of_class("fits"))


def test_points_far_off_stay_in_the_picture() -> None:
    points = [RecordedPoint(seconds=1.0, memory=0.5, label="a"), RecordedPoint(seconds=1e12, memory=1e9, label="b")]
    page = Page(search_view(SearchRecord(points=tuple(points))))
    for dot in page.of_class("fits"):
        assert 0 < float(dot["cx"]) < 960 and 0 < float(dot["cy"]) < 400


def test_a_record_is_read_as_it_was_written_and_refused_with_the_line(tmp_path: Path) -> None:
    record = search_record(mixed_plan())
    file = tmp_path / "search.json"
    record.save(file)
    assert SearchRecord.load(file) == record
    with pytest.raises(ValueError, match=r"x:2.*did you mean 'seconds'"):
        SearchRecord.parse('{"points": [\n{"second": 1.0, "memory": 0.5, "label": ""}]}', source="x")


def test_a_record_of_another_search_is_said_to_be_one() -> None:
    plan = mixed_plan()
    record = search_record(plan)
    assert "another plan" not in report_page(plan, record=record)
    assert "another plan" in report_page(plan.model_copy(update={"batch": None}), record=record)


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unlike", [False, True])
def test_the_page_of_4096_devices_is_under_a_megabyte(unlike: bool) -> None:
    plan, small = large_plan(4096, stages=16, micro_batches=1, unlike=unlike), mixed_plan()
    assert plan.workload is not None
    points = tuple(
        RecordedPoint(seconds=1 + index / 7919, memory=index * 31 % 20_000 / 1e4, label="x" * 80, reason="y" * 90)
        for index in range(20_000)
    )
    reasons = simulated(small)["explanation"]  # as long as that of a large plan, and faster
    page = report_page(plan, timeline=simulate(plan.workload), explanation=reasons, record=SearchRecord(points=points))
    assert len(page.encode()) < 10**6
    if not unlike:
        assert len(Page(page).of_class("limit")) == 16 + 1  # a bar for each stage, and the line of the search


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def written(tmp_path: Path, plan: Plan) -> Path:
    file = tmp_path / "plan.json"
    plan.save(file)
    return file


CLUSTER = f"""
[links]
intra_node = {{bandwidth = "10 GB/s", latency = "10 us"}}
inter_node = {{bandwidth = "10 GB/s", latency = "10 us"}}
[[nodes]]
count = 2
devices = 4
device = "{FAST}"
[[nodes]]
devices = 4
device = "{SLOW}"
[device_types.{FAST}]
speed = {{float32 = "19.5 TFLOP/s"}}
memory = "40 GiB"
memory_bandwidth = "1555 GB/s"
[device_types.{SLOW}]
speed = {{float32 = "15.7 TFLOP/s"}}
memory = "16 GiB"
memory_bandwidth = "900 GB/s"
"""


def test_the_command_writes_the_page_and_the_trace(tmp_path: Path) -> None:
    plan = mixed_plan()
    file, page, trace = written(tmp_path, plan), tmp_path / "report.html", tmp_path / "trace.json"
    cluster, record = tmp_path / "cluster.toml", tmp_path / "search.json"
    cluster.write_text(CLUSTER, encoding="utf-8")
    search_record(plan).save(record)
    result = run(file, "-o", page, "--cluster", cluster, "--search", record, "--trace", trace)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and "node0" in text and "The best candidates" in text
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == set(range(12))
    assert run(file).stdout.startswith("<!DOCTYPE html>")
    assert "another plan" not in result.stderr
    search_record(plan.model_copy(update={"micro_batches": plan.micro_batches * 2})).save(record)
    assert "search.json is of a search for another plan" in run(file, "-o", page, "--search", record).stderr


def test_other_machines_are_refused(tmp_path: Path) -> None:
    file, cluster = written(tmp_path, mixed_plan()), tmp_path / "cluster.toml"
    for change in (("count = 2", "count = 3"), (f'device = "{SLOW}"', f'device = "{FAST}"')):
        cluster.write_text(CLUSTER.replace(*change), encoding="utf-8")
        result = run(file, "--cluster", cluster)
        assert result.exit_code == 3
        assert "the plan" in result.stderr


def test_wrong_use_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, Plan(world_size=1))
    result = run(file, "--trace", tmp_path / "trace.json")
    assert result.exit_code == 2 and "no workload" in result.stderr
    assert run(file, "-o", tmp_path / "missing" / "report.html").exit_code == 2
    workload = chain_workload(1, 1).model_copy(update={"stages": ()})
    prediction = mixed_plan().prediction
    assert prediction is not None and isinstance(workload, Workload)
    broken = written(tmp_path, Plan(world_size=1).with_prediction(prediction, workload))
    assert run(broken).exit_code == 3


def test_reporting_loads_no_torch(tmp_path: Path) -> None:
    file = written(tmp_path, mixed_plan(micro_batches=1))
    code = (
        "import sys; from click.testing import CliRunner; from whale.cli.app import app;"
        f"result = CliRunner().invoke(app, ['report', {str(file)!r}]);"
        "sys.exit(result.exit_code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
