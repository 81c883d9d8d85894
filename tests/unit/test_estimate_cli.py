"""``whale estimate``: a profile in, a table or JSON out, and what is wrong said in the options' names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from whale.cli.app import app
from whale.planner.schedules.orders import SCHEDULES

PROFILE = str(Path(__file__).parents[1] / "golden" / "gpt_22b_profile.json")
DEGREES = ("--batch", "4", "--micro-batch", "4", "--tp", "8", "--recompute", "full", "--precision", "fp16")


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    file = tmp_path / "cluster.toml"
    file.write_text('[[nodes]]\ndevices = 8\ndevice = "A100-SXM4-80GB"\n', encoding="utf-8")
    return str(file)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["estimate", *arguments])


def test_json_has_the_step_its_interval_its_parts_and_the_memory(cluster: str) -> None:
    result = run("--profile", PROFILE, "--cluster", cluster, *DEGREES, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    low, high = found["step_seconds_interval"]
    assert low < found["step_seconds"] < high
    assert sum(found["breakdown"].values()) == pytest.approx(found["step_seconds"])
    assert found["fits"] is True
    assert found["memory_bytes"] == found["memory"]["total"] <= found["memory"]["capacity"]
    assert found["tokens_per_second"] == pytest.approx(4 * 2048 / found["step_seconds"])
    assert 0.3 < found["mfu"] < 0.6


def test_text_is_a_table_with_units_and_a_verdict(cluster: str) -> None:
    result = run("--profile", PROFILE, "--cluster", cluster, *DEGREES)
    for part in ("step ", " ms  (", "tokens/s", "MFU", "TFLOP/s", "GiB", "fits", "communication", "optimizer"):
        assert part in result.stdout


def test_what_does_not_fit_is_said_and_is_no_error(cluster: str) -> None:
    result = run("--profile", PROFILE, "--cluster", cluster, "--batch", "64", "--micro-batch", "64", "--tp", "8")
    assert result.exit_code == 0
    assert "DOES NOT FIT" in result.stdout


def test_a_model_with_a_batch_of_its_own_is_estimated_for_any_batch(cluster: str, tmp_path: Path) -> None:
    """The batch of the callable is only an example, so no parameter of its size is asked for."""
    file = tmp_path / "own_batch.py"
    file.write_text(
        "import torch\nclass Model(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x).square().mean()\n"
        "def build():\n    return Model(3, 1), torch.randn(6, 3)\n"
    )
    result = run("--model", f"{file}:build", "--cluster", cluster, "--batch", "64", "--micro-batch", "8", "--dp", "8")
    assert result.exit_code == 0, result.stderr


def test_other_ways_to_make_one_gradient_have_their_prices(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    lines = ["[links]", 'inter_node = {bandwidth = "10 Gbit/s", latency = "10 us"}', "[[nodes]]", "count = 4"]
    file.write_text("\n".join([*lines, "devices = 1", 'device = "V100-SXM2-32GB"']))
    given = ("--model", "examples/models/gpt.py:gpt", "--set", "layers=2", "--set", "hidden=192", "--set", "seq=32")
    found = {
        reduce: json.loads(
            run(
                *given, "--cluster", str(file), "--batch", "8", "--precision", "fp32", "--reduce", reduce, "--json"
            ).stdout
        )
        for reduce in ("mean", "adasum", "server")
    }
    assert len({one["step_seconds"] for one in found.values()}) == 3
    assert found["server"]["memory_bytes"] < found["mean"]["memory_bytes"]  # each has a part of the optimizer's state


def test_what_cannot_be_run_yet_is_said_of_the_degrees_that_ask_for_it(cluster: str) -> None:
    """And in the help, by the same options."""
    given = ("--profile", PROFILE, "--cluster", cluster, "--batch", "8")
    plain = ("--precision", "fp32", "--no-sequence-parallel")
    assert "as other stacks run it" not in run(*given, *plain).stdout
    assert "as other stacks run it" not in run(*given, *plain, "--zero", "2").stdout
    asked = {
        "--recompute": ("--recompute", "full"),
        "--cp": ("--cp", "2"),
        "--sequence-parallel": ("--tp", "8", "--sequence-parallel"),
        "bf16": ("--precision", "bf16"),
    }
    words = " ".join(run("--help").stdout.split())
    for name, options in asked.items():
        result = run(*given, *plain, *options)
        assert result.exit_code == 0, result.stderr
        (said,) = result.stdout.partition("as other stacks run it:\n")[2].partition("\n\n")[0].splitlines()
        assert name in said
        assert name in words.partition("as other stacks run it")[2]
        assert len(json.loads(run(*given, *plain, *options, "--json").stdout)["of_other_stacks"]) == 1
    assert all(schedule in words for schedule in SCHEDULES)


def test_what_was_assumed_stands_in_the_output(cluster: str) -> None:
    given = ("--profile", PROFILE, "--cluster", cluster, "--batch", "8", "--tp", "8")
    said = json.loads(run(*given, "--json").stdout)["assumptions"]
    assert any(one.startswith("bf16 ") and "--precision" in one for one in said)
    assert any("micro-batches of 1 row" in one and "--micro-batch" in one for one in said)
    assert all(one in run(*given).stdout for one in said)
    assert "the state of adamw in memory" in said  # as other stacks have it, which run bf16 of this profile
    as_whale = json.loads(run(*given, "--precision", "fp32", "--json").stdout)["assumptions"]
    assert "the state of adamw in memory; --optimizer NAME changes it" in as_whale


def test_states_of_another_optimizer_are_counted_and_its_step_priced(cluster: str) -> None:
    given = ("--profile", PROFILE, "--cluster", cluster, "--batch", "8", "--precision", "fp32")
    names = ("adamw", "sgd_momentum", "sgd")
    found = {name: json.loads(run(*given, "--optimizer", name, "--json").stdout) for name in names}
    states = [found[name]["memory"]["optimizer"] for name in found]
    assert states[0] == pytest.approx(2 * states[1], rel=0.01)
    assert states[2] == 0
    seconds = [one["step_seconds"] for one in found.values()]
    assert seconds[0] > seconds[1] > seconds[2]
    assert not any("adamw" in one for one in found["sgd"]["assumptions"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--model"),
        (("--profile", PROFILE, "--model", "model.py:build"), "either --model"),
        (("--profile", PROFILE, "--set", "layers=2"), "--set"),
        (("--profile", PROFILE, "--tp", "3"), "--tp 3"),
        (("--profile", PROFILE, "--layers-per-stage", "1,x"), "12,14"),
        (("--profile", PROFILE, "--precision", "fp7"), "fp7"),
        (("--profile", PROFILE, "--zero", "4"), "--zero"),
        (("--profile", PROFILE, "--zero", "1", "--state-shares", "a"), "such as 3,1, or auto"),
        (("--profile", PROFILE, "--state-shares", "3,1"), "give --zero 1, 2 or 3"),
        (("--profile", PROFILE, "--zero", "1", "--state-shares", "3,1", "--precision", "fp32"), "there are 8 replicas"),
        (("--profile", PROFILE, "--ep", "2"), "leave --ep out"),
        (("--profile", PROFILE, "--reduce", "adasum", "--stack", "fsdp"), "--reduce: stacks other than Whale's"),
        (("--profile", PROFILE, "--optimizer", "sgd", "--stack", "fsdp"), "--optimizer: the step of other stacks"),
        (("--profile", PROFILE, "--optimizer", "adafactor", "--zero", "1", "--state-align", "row"), "use parameter"),
        (("--profile", PROFILE, "--precision", "fp8"), "A100-SXM4-80GB has no float8; use --precision bf16"),
    ],
)
def test_a_wrong_option_is_named_and_ends_with_two(cluster: str, arguments: tuple[str, ...], says: str) -> None:
    result = run("--cluster", cluster, "--batch", "8", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_degrees_that_cannot_be_are_refused_before_a_model_is_captured(cluster: str) -> None:
    for degrees, says in (
        (("--tp", "3"), "does not divide the cluster's 8 devices"),
        (("--dp", "4"), "4 devices, but the cluster has 8"),
        (("--pp", "8", "--micro-batch", "3"), "is no multiple of --micro-batch 3"),
    ):
        result = run("--model", "missing.py:build", "--cluster", cluster, "--batch", "8", *degrees)
        assert result.exit_code == 2 and says in result.stderr, result.stderr


def test_an_unknown_device_is_an_error_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[nodes]]\ndevices = 8\ndevice = "A101"\n', encoding="utf-8")
    result = run("--profile", PROFILE, "--cluster", str(file), "--batch", "8")
    assert result.exit_code == 3
    assert "cluster.toml:3" in result.stderr


def test_a_profile_needs_no_torch(cluster: str) -> None:
    code = "import sys; from whale.cli.app import app; app(sys.argv[1:], standalone_mode=False)"
    code += "; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "estimate", "--profile", PROFILE, "--cluster", cluster, *DEGREES, "-q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("False")
