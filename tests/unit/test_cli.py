"""The command line: results on stdout, one message on stderr, an exit code for each kind of failure."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner, Result

import whale
from whale import errors
from whale.cli.app import WhaleGroup, app
from whale.cli.options import verbosity_options
from whale.ir.profile import ModelProfile


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def run_raising(error: BaseException, *arguments: str) -> Result:
    """Run a verb that raises ``error`` under the group that translates errors."""

    @click.group(cls=WhaleGroup)
    def group() -> None:
        pass

    @group.command()
    @verbosity_options
    def verb() -> NoReturn:
        raise error

    return CliRunner().invoke(group, ["verb", *arguments])


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert whale.__version__ in result.stdout


@pytest.mark.parametrize("arguments", [["nosuchverb"], ["doctor", "--nosuchoption"], ["verify"]])
def test_usage_error_is_2_and_on_stderr(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Error" in result.stderr


@pytest.mark.parametrize("name", errors.__all__)
def test_whale_error_is_one_message_and_its_exit_code(name: str) -> None:
    kind = getattr(errors, name)
    result = run_raising(kind("the reason"))
    assert result.exit_code == kind.exit_code
    assert result.stderr == "whale: error: the reason\n"
    assert result.stdout == ""


def test_verbose_shows_the_traceback_and_the_message_last() -> None:
    result = run_raising(errors.InfeasibleError("the reason"), "-v")
    assert result.exit_code == 4
    assert "Traceback" in result.stderr
    assert result.stderr.rstrip().endswith("whale: error: the reason")


def test_any_other_exception_is_our_fault() -> None:
    result = run_raising(ZeroDivisionError("division"))
    assert result.exit_code == 1
    assert "internal error: ZeroDivisionError: division" in result.stderr
    assert "whale doctor" in result.stderr
    assert "Traceback" not in result.stderr


def test_launcher_is_told_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    run_raising(errors.WorkerError("rank 1 timed out"))
    assert json.loads(file.read_text())["message"]["message"] == "whale: error: rank 1 timed out"


def test_interrupt_is_130() -> None:
    assert run_raising(KeyboardInterrupt()).exit_code == 130


def test_doctor_as_json_has_every_part() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["whale"] == whale.__version__
    assert report["packages"]["torch"] is not None
    assert report["backends"].keys() == {"gloo", "nccl"}
    assert report["cores"]["usable"] >= 1
    assert report["problems"] == []


def test_doctor_as_text_names_torch_devices_and_memory() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    for word in ("whale", "python", "torch", "gloo", "cores", "memory"):
        assert word in result.stdout


def test_doctor_reports_a_torch_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("doctor")
    assert result.exit_code == 0
    assert "torch does not import" in result.stdout


@dataclass
class _Report:
    """A result of ``whale.api.verify``: data, and a verdict."""

    loss: float = 0.5
    gradients: list[dict[str, Any]] = field(default_factory=lambda: [{"name": "weight", "relative_error": 1e-15}])
    passed: bool = True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[dict[str, Any]]:
    """Stand in for the comparison, and put a model where it is looked for."""
    recorded: list[dict[str, Any]] = []

    def fake_verify(model: Any, batch: Any, **how: Any) -> _Report:
        recorded.append({"model": model, "batch": batch, **how})
        return _Report(passed=how.get("schedule") != "wrong")

    def fake_replicas(model: Any, batch: Any, **how: Any) -> Any:
        recorded.append({"model": model, "batch": batch, **how})
        return SimpleNamespace(steps=3, unlike={"layers.0.bias": (1,)}, passed=False)

    api = SimpleNamespace(verify=fake_verify, verify_replicas=fake_replicas)
    monkeypatch.setitem(sys.modules, "whale.api", api)
    monkeypatch.setattr(whale, "api", api, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "verified_model.py").write_text(
        "import torch\ndef build(width=3, batch_size=2):\n"
        "    return torch.nn.Linear(width, 1), torch.zeros(batch_size, width)\n"
    )
    return recorded


def test_verify_calls_the_api_with_what_was_given(calls: list[dict[str, Any]]) -> None:
    result = run(
        "verify", "--model", "verified_model.py:build", "--set", "width=5", "--batch", "7", "--micro-batches", "2"
    )
    assert result.exit_code == 0, result.output
    (call,) = calls
    assert tuple(call["batch"].shape) == (7, 5)
    assert call.keys() == {"model", "batch", "micro_batches"}


def test_verify_prints_a_table_and_the_verdict(calls: list[dict[str, Any]]) -> None:
    result = run("verify", "--model", "verified_model.py:build")
    assert "relative error" in result.stdout and "1e-15" in result.stdout
    assert "parity: ok" in result.stdout
    assert "verifying" in result.stderr and "verifying" not in result.stdout


def test_verify_as_json_is_the_report(calls: list[dict[str, Any]]) -> None:
    result = run("verify", "--model", "verified_model.py:build", "--json", "-q")
    assert json.loads(result.stdout)["gradients"] == [{"name": "weight", "relative_error": 1e-15}]
    assert result.stderr == ""


def test_verify_fails_where_parity_fails(calls: list[dict[str, Any]]) -> None:
    result = run("verify", "--model", "verified_model.py:build", "--schedule", "wrong")
    assert result.exit_code == 1
    assert "NOT EQUAL" in result.stdout


def test_verify_names_copies_that_differ_and_their_ranks(calls: list[dict[str, Any]]) -> None:
    result = run("verify", "--replicas", "--steps", "3", "--model", "verified_model.py:build")
    assert result.exit_code == 1
    assert calls[0]["steps"] == 3
    assert "layers.0.bias" in result.stdout and "copies: NOT EQUAL" in result.stdout
    assert run("verify", "--steps", "3", "--model", "verified_model.py:build").exit_code == 2


def test_verify_knows_device_types_of_a_profile(calls: list[dict[str, Any]], tmp_path: Any) -> None:
    figures = {"memory_bytes": 2.0**30, "memory_bandwidth": 1e10, "cores": 4, "float32": 1e11}
    (tmp_path / "p.json").write_text(ModelProfile(name="m", kinds=(), layers=(), device_types={"own": figures}).dumps())
    (tmp_path / "c.toml").write_text("[[nodes]]\ndevices = 1\ndevice = 'own'\n")
    verify = ("verify", "--model", "verified_model.py:build")
    result = run(*verify, "--cluster", "c.toml", "--profile", "p.json")
    assert result.exit_code == 0, result.output
    assert [device.type.name for device in calls[0]["cluster"].devices] == ["own"]
    without = run(*verify, "--cluster", "c.toml")
    assert without.exit_code == 3 and "--profile" in without.stderr
    assert run(*verify, "--profile", "p.json").exit_code == 2


def test_only_the_first_rank_prints(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result = run("verify", "--model", "verified_model.py:build")
    assert result.exit_code == 0
    assert len(calls) == 1
    assert result.output == ""


@pytest.mark.parametrize("verb", ["plan", "search", "estimate", "verify", "profile"])
def test_absurd_numbers_are_refused_before_anything_is_loaded(verb: str) -> None:
    result = run(verb, "--model", "none.py:build", "--cluster", "none.toml", "--batch", "9" * 20)
    assert result.exit_code == 2 and "1099511627776" in result.stderr.replace(",", "")
