"""``whale doctor --gpu``: its parts on two CPU ranks, and what it says of hangs, failures and machines without GPUs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.distributed.scripts import Forked
from whale.cli import doctor, gpu
from whale.cli.app import app
from whale.cli.gpu import PARTS, Part, gpu_text, run_parts


def run(name: str, seconds: float = 120.0, ranks: int = 2) -> dict[str, Any]:
    return run_parts([Part(name=name, seconds=seconds)], ranks, "cpu", lambda text: None)[name]


def test_a_machine_without_gpus_is_told_so() -> None:
    if doctor.examine()["devices"]:
        pytest.skip("there are GPUs")
    result = CliRunner().invoke(app, ["doctor", "--gpu"])
    assert result.exit_code == 4
    assert "no CUDA device to check" in result.stderr
    assert CliRunner().invoke(app, ["doctor", "-o", "x.json"]).exit_code == 2


def forked(command: list[str], *, env: dict[str, str], stdout: Any, stderr: int) -> Forked:
    """A rank that has made its imports."""
    return Forked(command[1:], environment=env, output=Path(stdout.name))


@pytest.mark.parametrize(("name", "ranks"), [("parity", 1), ("copies", 2), ("failures", 2), ("graphs", 2)])
def test_a_part_runs(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "copies":  # whose ranks are processes as a user's
        popen = {"Popen": forked, "STDOUT": subprocess.STDOUT, "TimeoutExpired": subprocess.TimeoutExpired}
        monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(**popen))
    found = run(name, ranks=ranks)
    assert found["passed"], found
    if name == "failures":
        assert all("rank 1 is out of memory" in rank["message"] for rank in found["ranks"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.timeout(1200)
def test_every_part_passes_on_gpus() -> None:
    found = run_parts(PARTS, torch.cuda.device_count(), "cuda", print)
    assert all(part["passed"] for part in found.values()), found


def test_a_part_that_hangs_is_a_result() -> None:
    found = run("copies", seconds=0.5)
    assert not found["passed"]
    assert found["hung"] == "no end of ranks [0, 1] within 0.5 s"
    assert found["ranks"] == [{"passed": False, "error": "it wrote nothing"}] * 2


def test_the_report_is_written_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = [{"plan": "split", "error": 1e-15}, {"plan": "stages", "error": 3e-14}]
    found = {
        "parity": {"passed": True, "seconds": 12.0, "ranks": [{"passed": True, "cases": cases}]},
        "copies": {"passed": False, "seconds": 3.0, "ranks": [{"passed": False, "error": "ValueError: no"}]},
    }
    machine = {**doctor.examine(), "devices": [{"index": 0, "name": "NVIDIA L4", "memory_bytes": 2**34}] * 4}
    asked: list[int] = []

    def run_none(parts: Any, ranks: int, device_type: str, tell: Any) -> dict[str, Any]:
        asked.append(ranks)
        return found

    monkeypatch.setattr(doctor, "examine", lambda: machine)
    monkeypatch.setattr("whale.cli.gpu.run_parts", run_none)
    result = CliRunner().invoke(app, ["doctor", "--gpu", "-o", str(tmp_path / "gpu.json")])
    assert result.exit_code == 1
    assert asked == [4]
    assert "2 cases, largest error 3.0e-14" in result.output and "rank 0: ValueError: no" in result.output
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["parity"]["passed"]


def test_parts_take_at_most_a_quarter_of_an_hour_and_are_named_once() -> None:
    assert sum(part.seconds for part in PARTS) <= 16 * 60
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert gpu_text({"parts": {}})
