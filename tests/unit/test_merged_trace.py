"""Traces of ranks as one: clocks, processes and threads, the prediction beside them, and files that are no traces."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.workloads import chain_workload
from whale.cli.app import app
from whale.commands import rank_traces

SECOND = 10**9

Event = dict[str, Any]


def event(name: str, start: float, stop: float, **others: Any) -> Event:
    """A range of the main thread; times in microseconds."""
    made = {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": stop - start, "pid": 70, "tid": 70}
    return made | others


def step(stage: int, start: float, begun: float, had: float) -> list[Event]:
    """A step in which the sum of the loss was begun and had at these times."""
    return [
        event("whale: train step", start, had + 1),
        event(f"whale: forward stage {stage} micro-batch 0", start + 1, start + 5),
        event("whale: all-reduce loss", begun, begun + 1),
        event("whale: wait for all-reduce loss", had - 1, had),
    ]


def exported(folder: Path, rank: int, events: list[Event], *, base: int = SECOND, size: int = 2, **about: Any) -> Path:
    """A trace as torch exports it."""
    path = folder / f"trace{rank}.json"
    known = {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": size}, "baseTimeNanoseconds": base}
    path.write_text(json.dumps({**known, **about, "traceEvents": events}))
    return path


def whale_trace(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def merge(folder: Path, *arguments: object) -> list[Event]:
    """The events of the merged trace."""
    result = whale_trace(*arguments, "-o", folder / "merged.json")
    assert result.exit_code == 0, result.output
    events: list[Event] = json.loads((folder / "merged.json").read_text())["traceEvents"]
    return events


def starts(events: list[Event], name: str) -> list[float]:
    """When events of a name start, in microseconds."""
    return [found["ts"] for found in events if found["name"] == name]


def process_names(events: list[Event]) -> dict[int, str]:
    return {found["pid"]: found["args"]["name"] for found in events if found["name"] == "process_name"}


def two_steps(stage: int, late: float) -> list[Event]:
    """Steps in whose first the other rank is late, and in whose second this one is."""
    return [*step(stage, 100, 110 + late, 131), *step(stage, 200, 230 - late, 241)]


def test_clocks_of_two_hosts_are_aligned_by_the_sums_of_the_loss(tmp_path: Path) -> None:
    one = exported(tmp_path, 0, two_steps(0, 0))
    other = exported(tmp_path, 1, two_steps(1, 20), base=SECOND + 3 * SECOND)
    result = whale_trace(one, other, "-o", tmp_path / "merged.json")
    # Rank 1 began the first sum at 130, and rank 0 had it at 131; it had the second at 241, and rank 0 began it at 230.
    assert "clock of rank 1: moved by -3000.005 ms, within 0.006 ms, by 2 sums over all ranks" in result.stderr
    merged = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    assert starts(merged, "whale: train step") == pytest.approx([5.0, 105.0, 0.0, 100.0])


def test_a_clock_that_the_sums_allow_is_left_as_it_is(tmp_path: Path) -> None:
    one = exported(tmp_path, 0, two_steps(0, 0))
    other = exported(tmp_path, 1, [{**e, "ts": e["ts"] + 5} for e in two_steps(1, 0)])
    assert "clock of" not in whale_trace(one, other, "-o", tmp_path / "merged.json").stderr
    assert starts(merge(tmp_path, one, other), "whale: train step") == [0.0, 100.0, 5.0, 105.0]


def test_a_gpu_has_a_sum_when_its_kernel_ends(tmp_path: Path) -> None:
    gpu: Event = {"cat": "gpu_user_annotation", "pid": 0, "tid": 7}
    late = [*step(0, 100, 110, 112), event("whale: all-reduce loss", 130, 140, **gpu)]
    nccl: dict[str, Any] = {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2}}
    file = rank_traces.read_trace(exported(tmp_path, 0, late, **nccl))
    assert rank_traces.summary(file, alone=True).sums["all-reduce loss"] == ((SECOND + 130_000, SECOND + 140_000),)
    file = rank_traces.read_trace(exported(tmp_path, 0, late[:-1], **nccl))
    assert not any(rank_traces.summary(file, alone=True).sums.values())  # a process does not wait for its GPU


def test_each_rank_is_a_process_whose_threads_and_arrows_are_its_own(tmp_path: Path) -> None:
    kernel = {"cat": "kernel", "pid": 0, "tid": 7, "args": {"device": 0}}
    named = {"ph": "M", "name": "thread_name", "ts": 9.0, "pid": 0, "tid": 7, "args": {"name": "stream 7"}}
    own = event("PyTorch Profiler (0)", 0, 999, cat="Trace", pid="Spans", tid="PyTorch Profiler")
    arrow = [{"ph": phase, "id": 4, "name": "ac2g", "ts": 101, "pid": 70, "tid": 70} for phase in "sf"]
    events = [*step(1, 100, 110, 120), event("gemm", 101, 102, **kernel), named, own, *arrow]
    about: dict[str, Any] = {"host_name": "tower", "deviceProperties": [{"id": 0, "name": "T4"}]}
    merged = merge(tmp_path, *(exported(tmp_path, rank, events, **(about if rank else {})) for rank in (1, 0)))
    assert process_names(merged) == {1: "rank 0 (stage 1, GPU 0)", 3: "rank 1 (stage 1, T4 0, tower)"}
    (stream,) = {found["tid"] for found in merged if found["name"] == "gemm"}
    assert stream not in {found["tid"] for found in merged if found["name"] == "whale: train step"}
    assert {found["tid"] for found in merged if found["name"] == "thread_name"} == {stream}
    assert not starts(merged, "PyTorch Profiler (0)")
    assert starts(merged, "whale: train step") == [0.0, 0.0]
    assert [found["id"] for found in merged if found["ph"] == "s"] == ["0.4", "1.4"]


def test_the_predicted_step_begins_where_the_last_step_does(tmp_path: Path) -> None:
    plan = tmp_path / "workload.json"
    plan.write_text(chain_workload(2, 2, latency=0.1).model_dump_json())
    traces = [exported(tmp_path, rank, two_steps(rank, 0)) for rank in (0, 1)]
    merged = merge(tmp_path, *traces, "--plan", plan)
    names = process_names(merged)
    assert [names[pid] for pid in sorted(names)] == [
        "rank 0 (stage 0, cpu)", "predicted rank 0", "rank 1 (stage 1, cpu)", "predicted rank 1",
    ]  # fmt: skip
    (first,) = starts(merged, "0F0")
    assert first == starts(merged, "whale: train step")[1] == 100.0
    alone = merge(tmp_path, traces[1], "--plan", plan)
    assert list(process_names(alone).values()) == ["rank 1 (stage 1, cpu)", "predicted rank 1"]


def test_a_rank_is_known_by_the_name_of_its_file_where_there_was_no_process_group(tmp_path: Path) -> None:
    events = step(0, 100, 110, 120)
    alone = exported(tmp_path, 0, events, distributedInfo=None)
    assert process_names(merge(tmp_path, alone)) == {1: "rank 0 (stage 0, cpu)"}
    named = alone.rename(tmp_path / "rank3.pt.trace.json")
    assert process_names(merge(tmp_path, named)) == {7: "rank 3 (stage 0, cpu)"}


def test_compressed_traces_are_read(tmp_path: Path) -> None:
    plain = exported(tmp_path, 0, step(0, 100, 110, 120))
    compressed = tmp_path / "trace.json.gz"
    compressed.write_bytes(gzip.compress(plain.read_bytes()))
    assert merge(tmp_path, compressed) == merge(tmp_path, plain)


GOOD = event("a", 1, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "no list 'traceEvents': give what torch.profiler's export_chrome_trace wrote"),
        ('{"traceEvents": []}', "has no events"),
        ('{"traceEvents": [1]}', "traceEvents[0] is no object"),
        (json.dumps({"traceEvents": [GOOD, GOOD | {"ts": "soon"}]}), "traceEvents[1] has the time 'soon'"),
        (json.dumps({"traceEvents": [GOOD | {"dur": -1}]}), "traceEvents[0] has the duration -1"),
        (json.dumps({"traceEvents": [GOOD | {"ts": float("inf")}]}), "has the time None"),
        (json.dumps({"traceEvents": [GOOD | {"ph": 7}]}), "has the phase 7"),
        (json.dumps({"traceEvents": [GOOD | {"tid": [1]}]}), "has the tid [1]"),
        (json.dumps({"traceEvents": [GOOD | {"args": 7}]}), "has 'args' that are no object"),
        ('{"traceEvents": [{"ph": "i", "ts": 1, "args": {"a": ' + "[" * 50 + "]" * 50 + "}}]}", "nested more than 16"),
        ('{"traceEvents": [{"ph": "i", "ts": 1, "args": {"a": 1e999}}]}', "a number that is not finite"),
        (json.dumps({"traceEvents": [GOOD], "distributedInfo": {"rank": 2, "world_size": 2}}), "rank 2 of 2"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_words(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "rank0.json"
    file.write_text(text)
    result = whale_trace(file, "-o", tmp_path / "merged.json")
    assert result.exit_code == 3 and words in result.stderr and "rank0.json" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]


def test_a_trace_too_large_or_damaged_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = tmp_path / "rank0.json.gz"
    bomb.write_bytes(gzip.compress(b" " * 2**22))
    monkeypatch.setattr(rank_traces, "MAX_TRACE_BYTES", 2**20)
    assert "is larger than 1 MB; profile fewer steps" in whale_trace(bomb, "-o", tmp_path / "merged.json").stderr
    bomb.write_bytes(gzip.compress(b" " * 2**20)[:-9])
    assert "is damaged" in whale_trace(bomb, "-o", tmp_path / "merged.json").stderr
    assert whale_trace(tmp_path / "missing.json", "-o", tmp_path / "merged.json").exit_code == 3


def test_traces_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    def refused(*arguments: object) -> tuple[int, str]:
        result = whale_trace(*arguments, "-o", tmp_path / "merged.json")
        return result.exit_code, result.stderr

    one = exported(tmp_path, 0, two_steps(0, 0))
    other = exported(tmp_path, 1, step(1, 100, 110, 120))
    code, text = refused(one, other)
    assert (
        code == 2 and "has 2 times 'whale: all-reduce loss'" in text and "profile the same steps on every rank" in text
    )
    assert "is of rank 0, as" in refused(one, one)[1]
    assert "is of 4 ranks, but" in refused(one, exported(tmp_path, 3, two_steps(0, 0), size=4))[1]
    plan = tmp_path / "workload.json"
    plan.write_text(chain_workload(4, 2).model_dump_json())
    assert "the plan is of 4 ranks, but the traces are of 2" in refused(one, "--plan", plan)[1]
    nameless = exported(tmp_path, 1, two_steps(1, 0), distributedInfo=None)
    assert "name the file rank0.json if it is of rank 0" in refused(one, nameless)[1]
    result = whale_trace(one, "-o", one)
    assert result.exit_code == 2 and "the file of TRACE trace0.json would be lost: give another name" in result.stderr


def test_where_no_loss_was_summed_clocks_are_left_and_it_is_said(tmp_path: Path) -> None:
    traces = [exported(tmp_path, rank, [event("whale: forward-only step", 1, 2)]) for rank in (0, 1)]
    result = whale_trace(*traces, "-o", tmp_path / "merged.json")
    assert "clocks of ranks [0, 1] are as their hosts have them" in result.stderr


def test_merging_loads_no_torch(tmp_path: Path) -> None:
    arguments = ["trace", str(exported(tmp_path, 0, two_steps(0, 0))), "-o", str(tmp_path / "merged.json")]
    code = (
        "import sys; from click.testing import CliRunner; from whale.cli.app import app;"
        f"result = CliRunner().invoke(app, {arguments!r});"
        "sys.exit(result.exit_code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
