"""Views of a timeline: a trace for Perfetto, a chart and a table as text, and `whale simulate`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.workloads import boundary, chain_workload, stage_work
from whale.cli.app import app
from whale.ir.plan import Plan
from whale.ir.workload import LinkTime, Prediction, Reduction, Workload
from whale.planner.simulation.gantt import breakdown_table, gantt
from whale.planner.simulation.simulate import simulate
from whale.planner.simulation.trace import trace_of


def busy_workload() -> Workload:
    """Two ranks feed two over links so slow that several messages are on their way at a time."""
    pairs = [(a, b) for a in (0, 1) for b in (2, 3)]
    return Workload(
        world_size=4,
        micro_batches=4,
        schedule="gpipe",
        stages=(stage_work((0, 1)), stage_work((2, 3), forward=(1.0, 1.5))),
        boundaries=(boundary(0, 1, pairs, 5),),
        links=tuple(
            LinkTime(source=a, target=b, latency=0.7, bandwidth=3.0, resources=("switch",))
            for one, other in pairs
            for a, b in ((one, other), (other, one))
        ),
        reductions=(
            Reduction(ranks=(2, 3), stages=(1,), bytes=1, seconds=1.0, ready=0.5),
            Reduction(ranks=(0, 1), stages=(0,), bytes=1, seconds=1.0, ready=0.5),
        ),
        update=(0.5,) * 4,
        overlap_slowdown=0.1,
    )


def test_events_of_a_thread_never_overlap_and_each_rank_has_its_streams() -> None:
    trace = json.loads(json.dumps(trace_of(simulate(busy_workload()))))
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[int, int], str] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
        elif event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    assert threads.keys() == names.keys()
    for rank in range(4):
        streams = {name.partition(" ")[0] for (pid, _), name in names.items() if pid == rank}
        assert streams == {"compute", "send", "receive", "reduce"}
    for events in threads.values():
        events.sort(key=lambda event: event["ts"])
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
    sends = [name for name in names.values() if name.startswith("send")]
    assert "send 2" in sends  # messages to two ranks, at one time


def test_the_trace_holds_every_event_and_an_arrow_for_every_message() -> None:
    timeline = simulate(busy_workload())
    events = trace_of(timeline)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    assert sum(event["dur"] for event in slices if event["cat"] == "F") == pytest.approx(4 * (1 + 1 + 1 + 1.5) * 1e6)
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 2 * 4 * 4
    assert all(starts[key] < ends[key] for key in starts)


def test_two_values_of_a_stage_between_the_same_ranks_have_an_arrow_each() -> None:
    workload = chain_workload(2, 2, latency=1.0)
    twice = workload.model_copy(update={"boundaries": workload.boundaries * 2})
    flows = [event for event in trace_of(simulate(twice))["traceEvents"] if event["ph"] in "sf"]
    assert len({event["id"] for event in flows}) == len(flows) / 2 == 8


def test_the_chart_shows_each_rank_in_the_width_given() -> None:
    timeline = simulate(chain_workload(2, 2))
    assert gantt(timeline, width=20).splitlines() == [
        "rank 0   |FF..BB.BB|",
        "rank 1   |.FBBFBB..|",
    ]
    assert gantt(timeline, width=29).splitlines() == [
        "rank 0   |FFFF....BBBB..BBBB|",
        "rank 1   |..FFBBBBFFBBBB....|",
    ]


def test_neighbours_that_do_the_same_share_a_line_of_the_chart() -> None:
    workload = Workload(world_size=3, micro_batches=1, stages=(stage_work((0, 1, 2), backward=(2.0, 2.0, 1.0)),))
    assert [line.partition("|")[0].strip() for line in gantt(simulate(workload)).splitlines()] == ["rank 0-1", "rank 2"]


def test_the_table_has_the_busiest_rank_and_the_mean() -> None:
    timeline = simulate(chain_workload(2, 3, times=[(1e-3, 2e-3), (2e-3, 4e-3)]))
    assert breakdown_table(timeline).splitlines() == [
        "          rank 1, the busiest         all ranks",
        "compute              18.00 ms  85.7%   13.50 ms  64.3%",
        "pipeline              3.00 ms  14.3%    7.50 ms  35.7%",
        "step                 21.00 ms",
    ]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_a_workload_or_a_plan_is_simulated_with_its_schedule_or_another(tmp_path: Path) -> None:
    workload = chain_workload(4, 8, latency=0.5)
    file, plan = tmp_path / "workload.json", tmp_path / "plan.json"
    file.write_text(workload.model_dump_json(), encoding="utf-8")
    prediction = Prediction(step_seconds=41.0, step_seconds_interval=(40.0, 42.0))
    Plan(world_size=4, micro_batches=8).with_prediction(prediction, workload).save(plan)
    for path in (file, plan):
        result = run(str(path), "--json")
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        assert data["step_seconds"] == 41
        assert data["in_flight"] == [4, 3, 2, 1]
        assert sum(data["breakdown"].values()) == pytest.approx(41)
        assert data["critical_path"][-1] == {"event": "0B7", "rank": 0, "start": 39.0, "end": 41.0}
    assert json.loads(run(str(file), "--json", "--schedule", "gpipe").stdout)["step_seconds"] == 36
    assert json.loads(run(str(file), "--json", "--schedule", "1f1b_deep").stdout)["step_seconds"] == 37
    text = run(str(file), "--micro-batches", "1").stdout
    assert "1f1b, 4 stages, 1 micro-batch: 15.00 s a step" in text
    assert "waits" in text and "rank 3" in text


def test_the_trace_is_written_where_asked(tmp_path: Path) -> None:
    file, trace = tmp_path / "workload.json", tmp_path / "trace.json"
    file.write_text(chain_workload(2, 2).model_dump_json(), encoding="utf-8")
    result = run(str(file), "-o", str(trace))
    assert result.exit_code == 0 and "perfetto" in result.stderr
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert run(str(file), "-o", str(tmp_path / "missing" / "trace.json")).exit_code == 2


@pytest.mark.parametrize(
    ("content", "code", "part"),
    [
        ('{"world_size": 2, "micro_batches": 1, "stages": []}', 3, "no stages"),
        ('{"world_size": 2,\n"micro_batches": 0, "stages": []}', 3, "workload.json:2: micro_batches"),
        ('{"version": 1, "world_size": 2}', 3, "no workload to simulate"),
        ("[1", 3, "workload.json:1"),
    ],
)
def test_a_file_that_cannot_be_simulated_is_named_with_its_line(
    tmp_path: Path, content: str, code: int, part: str
) -> None:
    file = tmp_path / "workload.json"
    file.write_text(content, encoding="utf-8")
    result = run(str(file))
    assert result.exit_code == code
    assert part in result.stderr


def test_a_schedule_that_does_not_fit_is_wrong_usage(tmp_path: Path) -> None:
    file = tmp_path / "workload.json"
    file.write_text(chain_workload(3, 2, chunks=2).model_dump_json(), encoding="utf-8")
    assert run(str(file), "--schedule", "interleaved").exit_code == 0
    assert run(str(file), "--schedule", "1F1B").exit_code == 2


def test_simulating_loads_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "workload.json"
    file.write_text(chain_workload(2, 2).model_dump_json(), encoding="utf-8")
    code = (
        "import sys; from click.testing import CliRunner; from whale.cli.app import app;"
        f"result = CliRunner().invoke(app, ['simulate', {str(file)!r}]);"
        "sys.exit(result.exit_code or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
