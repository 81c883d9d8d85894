"""``whale search``: a table and a plan on stdout or in a file, the rest on stderr; interrupted, the best so far."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

import whale.commands.searching
from whale.cli.app import app
from whale.cli.collecting import seldom_collecting
from whale.ir.plan import Plan
from whale.ir.search_record import SearchRecord

ROOT = Path(__file__).parents[2]
PROFILE = str(ROOT / "tests" / "golden" / "gpt_22b_profile.json")
MODEL = """
import torch
import whale
from tests.small_models import decoder, tokens
def build(batch_size=8, annotated=False, entered=False):
    model = decoder(layers=4).float()
    if annotated:
        whale.annotate(model, {"layers.[0-1]": whale.stage(), "layers.[2-3]": whale.stage()})
    if entered:
        model = Entered(model)
    return model, tokens(batch_size)
class Entered(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, tokens, labels):
        with whale.split():
            return self.inner(tokens, labels)
"""
CLUSTER = """
[links]
intra_node = {bandwidth = "10 GB/s", latency = "5 us"}
inter_node = {bandwidth = "10 Gbit/s", latency = "20 us"}
[[nodes]]
devices = 2
device = "A100-SXM4-80GB"
[[nodes]]
devices = 1
device = "T4"
[nodes.links]
intra_node = {bandwidth = "10 GB/s", latency = "5 us"}
"""


NORMALISED = """
import torch
from torch import nn
def build(batch_size=8):
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64))]
    return Normalised(*layers), {"x": torch.zeros(batch_size, 64)}
class Normalised(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().sum()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "searched_model.py").write_text(MODEL)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "small.toml").write_text(CLUSTER.replace('"A100-SXM4-80GB"', '"tiny"').replace('"T4"', '"tiny"') + TINY)
    (tmp_path / "a100.toml").write_text('[[nodes]]\ndevices = 8\ndevice = "A100-SXM4-80GB"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


TINY = """
[device_types.tiny]
speed = {float32 = "1 TFLOP/s"}
memory = "20 KiB"
memory_bandwidth = "10 GB/s"
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["search", *arguments])


WIDE = "layers.[0-1]=split(5)"
GIVEN = ("--model", "searched_model.py:build", "--cluster", "cluster.toml", "--batch", "8", "--top", "2")


def test_a_batch_of_very_many_rows_takes_no_longer(folder: Path) -> None:
    """Nothing is tried row by row: 10^10 + 1 rows have no divisor in reach, so that micro-batches are ragged."""
    done = run(
        "--profile", PROFILE, "--cluster", "a100.toml", "--batch", str(10**10 + 1), "--precision", "bfloat16", "-q"
    )
    assert done.exit_code in (0, 4), done.output


def test_a_time_limit_ends_a_search_once_a_plan_fits(folder: Path) -> None:
    given = ("--profile", PROFILE, "--cluster", "a100.toml", "--time-limit", "1e-9", "--batch")
    done = run(*given, "64", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["choices"]
    cases = run(*given, "64,128")
    assert cases.exit_code == 0 and "does not fit" not in cases.stdout, cases.output


def test_an_annotation_that_leaves_no_plan_is_named(folder: Path) -> None:
    done = run("--model", "searched_model.py:build", "--cluster", "cluster.toml", "--batch", "8", "--annotate", WIDE)
    assert done.exit_code == 4, done.output
    assert "split(5) of layers.0 needs 5 devices, but there are 3" in done.stderr


def test_what_was_assumed_stands_in_the_output_with_what_changes_it(folder: Path) -> None:
    done = run(*GIVEN)
    assert "assumed:\n  fp32, the model's number type; --precision NAME changes it\n  the state of adamw" in done.stdout
    given = run(*GIVEN, "--precision", "fp64", "--optimizer", "sgd", "--json")
    assert json.loads(given.stdout)["assumptions"] == []
    cases = run(*GIVEN, "--batch", "8,16", "--json")
    assert len(json.loads(cases.stdout)["assumptions"]) == 2


def test_a_device_without_room_beside_the_framework_is_recorded(folder: Path) -> None:
    small = (
        CLUSTER.replace('"T4"', '"small"')
        + """
[device_types.small]
speed = {float32 = "1 TFLOP/s"}
memory = "1 GiB"
memory_bandwidth = "50 GB/s"
"""
    )
    Path("small.toml").write_text(small)
    given = ["small.toml" if word == "cluster.toml" else word for word in GIVEN]
    done = run(*given, "-o", "plan.json", "--record", "search.json")
    assert done.exit_code == 0, done.stderr
    full = [point for point in SearchRecord.load("search.json").points if "the framework" in point.reason]
    assert full and all(point.memory > 1 for point in full)
    page = CliRunner().invoke(app, ["report", "plan.json", "--search", "search.json", "--cluster", "small.toml"])
    assert page.exit_code == 0, page.stderr


def test_the_best_plan_is_written_and_the_command_that_runs_it_comes_last(folder: Path) -> None:
    done = run(*GIVEN, "-o", "plan.json", "--record", "search.json")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "plan='plan.json'" in lines[-1] and lines[-1].startswith("# HOST is the address of node0")
    for part in ("step", "MFU", "bubble", "GiB", "%", "the best", "Before compiling: "):
        assert part in done.stdout
    assert "wrote plan.json" in done.stderr
    plan = Plan.load("plan.json")
    assert (plan.batch, plan.world_size) == (8, 3)
    assert plan.model is not None and plan.model.hash
    assert plan.prediction_is_current and plan.prediction is not None and plan.prediction.fits
    assert plan.workload is not None
    record = SearchRecord.load("search.json")
    assert record.plan == plan.digest() and record.candidates[0].seconds == plan.prediction.step_seconds
    assert len(record.candidates) > 1 and record.candidates[1].why and record.points and record.bound_seconds > 0
    files = ("plan.json", "--search", "search.json", "--cluster", "cluster.toml")
    page = CliRunner().invoke(app, ["report", *files])
    assert page.exit_code == 0, page.stderr
    assert "The best candidates" in page.stdout and "another plan" not in page.stdout


def test_the_same_search_gives_the_same_bytes(folder: Path) -> None:
    first, second = (run(*GIVEN, "--seed", "3", "--json", "-q") for _ in range(2))
    assert first.exit_code == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stderr == ""
    found = json.loads(first.stdout)
    best = found["choices"][0]
    assert best["compiled"] is True
    assert found["step_seconds"] == best["step_seconds"]
    assert best["memory_bytes"] <= best["memory_capacity_bytes"]
    assert 0 <= found["gap"] < 1
    assert Plan.parse(json.dumps(found["plan"])).world_size == 3


def test_what_does_not_fit_ends_with_four_and_says_what_is_missing(folder: Path) -> None:
    given = ("--model", "searched_model.py:build", "--cluster", "small.toml", "--batch", "8", "-o", "plan.json")
    done = run(*given, "--time-limit", "300")  # of a machine that others use too
    assert done.exit_code == 4, done.output
    assert "GiB" in done.stderr
    assert "assumed: the state of adamw in memory; --optimizer NAME changes it" in done.stderr
    assert not Path("plan.json").exists()


def test_annotated_stages_are_kept(folder: Path) -> None:
    given = [*GIVEN, "--json", "-q"]
    in_code = run(*given, "--set", "annotated=true")
    asked = run(*given, "--annotate", "layers.[0-1]=stage()", "--annotate", "layers.[2-3]=stage()")
    assert in_code.exit_code == asked.exit_code == 0, in_code.stderr + asked.stderr
    assert json.loads(in_code.stdout)["plan"] == json.loads(asked.stdout)["plan"]
    cuts = [[stage["layers"] for stage in choice["stages"]] for choice in json.loads(asked.stdout)["choices"]]
    for stages in cuts:
        starts = {first for first, _ in stages}
        assert 3 in starts and not starts & {2, 4}  # layers: embed, four blocks, head


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cluster", "cluster.toml", "--batch", "8"), "needs --model"),
        (("--profile", PROFILE, "--cluster", "a100.toml", "--batch", "8", "--set", "a=1"), "--set is for --model"),
        ((*GIVEN, "--annotate", "layers.1"), "KEY=STRATEGY"),
        ((*GIVEN, "--annotate", "layers.9=stage()"), "layers.9"),
        ((*GIVEN, "--set", "annotated=true", "--annotate", "head=split(2)"), "keep one"),
        ((*GIVEN, "--set", "entered=true"), "forward of searched_model.py:build enters annotations"),
        ((*GIVEN, "--precision", "fp8"), "--precision fp8"),
        ((*GIVEN, "--without", "node7"), "did you mean node"),
        ((*GIVEN, "--without", "node0", "--without", "node1", "-o", "plan.json"), "there are 3 cases"),
        ((*GIVEN, "--time-limit", "0"), "--time-limit"),
        ((*GIVEN, "-o", "none/plan.json"), "-o none/plan.json cannot be written: No such file or directory"),
        (
            (*GIVEN, "-o", "one.json", "--record", "./one.json"),
            "-o one.json and --record one.json are the same file; each is a file of its own",
        ),
        (
            ("--profile", PROFILE, "--cluster", "a100.toml", "--batch", "8", "-o", PROFILE),
            "are the same file; the file of --profile would be lost",
        ),
        ((*GIVEN, "-o", "."), "-o . cannot be written: Is a directory"),
        ((*GIVEN, "--record", "none/search.json"), "--record none/search.json cannot be written: No such file"),
        ((*GIVEN, "--batch", "8,4-2"), "Invalid value for '--batch': '8,4-2': the range 4-2 goes down; write 2-4"),
        ((*GIVEN, "--batch", "0"), "Invalid value for '--batch': '0': 0 is less than 1"),
        ((*GIVEN, "--batch", "0-2"), "Invalid value for '--batch': '0-2': 0 is less than 1"),
        (
            (*GIVEN, "--precision", "fp8"),
            "--precision fp8: a step runs in bf16 or fp16 over parameters in float32, and a model itself in float64",
        ),
        (
            ("--profile", PROFILE, "--cluster", "a100.toml", "--batch", "8", "--precision", "fp8"),
            "--precision fp8: a step",
        ),
        ((*GIVEN, "--batch", str(2**41)), "a number is more than 1,099,511,627,776"),
        ((*GIVEN, "--batch", "9" * 5000), "a number is more than 1,099,511,627,776"),
        ((*GIVEN, "--micro-batches", "9" * 20), "is not in the range 1<=x<=1099511627776"),
        ((*GIVEN, "--batch", "-1"), "'-1': write whole numbers with commas between them, such as 12,14 or 1-8"),
        ((*GIVEN, "--batch", "8,4-8"), "'8,4-8': 8 is there twice"),
    ],
)
def test_a_wrong_option_is_named_and_ends_with_two(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    with patch.object(whale.commands.searching, "search", side_effect=AssertionError("searched")):
        done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert says in done.stderr


def test_a_profile_alone_needs_no_torch(folder: Path) -> None:
    code = "import sys; from whale.cli.app import app; app(sys.argv[1:], standalone_mode=False)"
    code += "; print('torch' in sys.modules)"
    given = ["search", "--profile", PROFILE, "--cluster", "a100.toml", "--batch", "8", "--precision", "bfloat16", "-q"]
    done = in_a_process(code, given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("False")
    assert "torchrun --nproc-per-node 8 train.py" in done.stdout


def in_a_process(code: str, arguments: list[str]) -> Any:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_keeps_the_best_so_far(folder: Path, name: str, code: int) -> None:
    """The process gets a real signal in the middle of its search."""
    program = f"""
import os, signal, sys
import whale.commands.searching
search = whale.commands.searching.search
def interrupted(*arguments, stop, **options):
    asked = []
    def stopped():
        asked.append(1)
        if len(asked) == 40:
            os.kill(os.getpid(), signal.{name})
        return stop()
    return search(*arguments, stop=stopped, **options)
whale.commands.searching.search = interrupted
import whale.commands.searching
from whale.cli.app import app
app(sys.argv[1:])
"""
    given = ["search", "--profile", PROFILE, "--cluster", "a100.toml", "--batch", "8", "--precision", "bfloat16"]
    done = in_a_process(program, [*given, "-o", "plan.json"])
    assert done.returncode == code == 128 + getattr(signal, name), done.stderr
    assert "the best so far" in done.stderr
    assert "torchrun" in done.stdout.splitlines()[-1]
    assert Plan.load("plan.json").world_size == 8


def test_what_if_keeps_a_batch_whole_that_cannot_be_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has batch norms; its what-if cases are searched without it."""
    (folder / "normalised.py").write_text(NORMALISED)
    original, asked = whale.commands.searching.search, []

    def search(*args: Any, settings: Any, **more: Any) -> Any:
        asked.append(settings.micro_batches)
        return original(*args, settings=settings, **more)

    monkeypatch.setattr(whale.commands.searching, "search", search)
    done = run("--model", "normalised.py:build", "--cluster", "cluster.toml", "--batch", "64,128", "-q")
    assert done.exit_code == 0, done.stderr
    assert asked == [1, 1]


@pytest.mark.parametrize("batches", ["64", "64,128"])
def test_micro_batches_of_a_batch_that_cannot_be_cut_are_refused_before_the_search(folder: Path, batches: str) -> None:
    (folder / "normalised.py").write_text(NORMALISED)
    given = ("--model", "normalised.py:build", "--cluster", "cluster.toml", "--batch", batches)
    with patch.object(whale.commands.searching, "search", side_effect=AssertionError("searched")):
        done = run(*given, "--micro-batches", "2")
    assert done.exit_code == 2, done.output
    assert "batch_norm" in done.stderr and "computes a row of the batch from other rows" in done.stderr
    assert run(*given, "--micro-batches", "1").exit_code == 0


def test_each_case_of_what_if_is_a_row(folder: Path) -> None:
    cases = ("--without", "node1", "--with", "2xT4", "--json", "-q")
    done = run(
        "--profile", PROFILE, "--cluster", "a100.toml", "--batch", "8,16", "--precision", "bfloat16", "--json", "-q"
    )
    assert done.exit_code == 0, done.stderr
    assert [(case["change"], case["batch"]) for case in json.loads(done.stdout)["cases"]] == [
        ("as it is", 8),
        ("as it is", 16),
    ]
    done = run(*GIVEN, *cases)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["cases"]
    assert [(case["change"], case["devices"]) for case in found] == [
        ("as it is", 3),
        ("without node1", 2),
        ("with 2xT4", 5),
    ]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_where_no_case_fits_the_table_is_shown_and_it_ends_with_four(folder: Path, form: tuple[str, ...]) -> None:
    given = ("--model", "searched_model.py:build", "--cluster", "small.toml", "--batch", "8,16")
    done = run(*given, "--time-limit", "300", *form)  # of a machine that others use too
    assert done.exit_code == 4, done.output
    assert "no plan fits in any of the 2 cases" in done.stderr
    reasons = [case["reason"] for case in json.loads(done.stdout)["cases"]] if form else done.stdout.splitlines()[1:3]
    assert len(reasons) == 2 and all("GiB" in reason for reason in reasons)


def test_what_to_run_after_a_lost_node_is_written(folder: Path) -> None:
    done = run(*GIVEN, "--without", "node1", "-o", "plan.json")
    assert done.exit_code == 0, done.stderr
    assert "without node1" in done.stdout and "times the first" in done.stdout
    plan = Plan.load("plan.json")
    assert plan.world_size == 2
    assert plan.cluster is not None and dict(plan.cluster.devices) == {"A100-SXM4-80GB": (0, 1)}


def test_stopped_before_it_compiles_the_search_still_writes_a_plan_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = whale.commands.searching.search

    def interrupted(*arguments: Any, **options: Any) -> Any:
        found = search(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(whale.commands.searching, "search", interrupted)
    done = run(*GIVEN, "-o", "plan.json")
    assert done.exit_code == 130, done.output
    plan = Plan.load("plan.json")
    assert plan.model is not None and plan.model.hash and plan.prediction is not None


def test_the_time_limit_counts_from_the_start_of_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def noted(profile: Any, cluster: Any, *, settings: Any, **others: Any) -> Any:
        limits.append(settings.time_limit)
        raise whale.commands.searching.InfeasibleError("enough is known")

    monkeypatch.setattr(whale.commands.searching, "search", noted)
    cluster = str(folder / "cluster.toml")
    command = ["search", "--profile", PROFILE, "--cluster", cluster, "--batch", "8", "--time-limit", "100"]
    for before in (60.0, 1000.0):  # a quarter is left for the search, whatever went before
        with seldom_collecting():  # as the process would end with it, the command leaves it so
            CliRunner().invoke(app, command, obj=time.monotonic() - before)
    assert 30 < limits[0] < 40 and limits[1] == 25


def test_a_schedule_that_is_none_is_refused_before_the_model_is_loaded(folder: Path) -> None:
    command = ["search", "--model", str(folder / "nothing.py:model"), "--cluster", str(folder / "cluster.toml")]
    done = CliRunner().invoke(app, [*command, "--batch", "8", "--schedule", "1f2b"])
    assert done.exit_code == 2 and "with the schedules gpipe, 1f1b, " in done.stderr and "'1f2b'" in done.stderr


def test_a_precision_that_a_device_lacks_is_refused_before_the_model_is_loaded(folder: Path) -> None:
    command = ["search", "--model", "nothing.py:build", "--cluster", str(folder / "cluster.toml"), "--batch", "8"]
    done = CliRunner().invoke(app, [*command, "--precision", "bf16"])
    assert done.exit_code == 2 and "T4 has no bfloat16; use fp16" in done.stderr
