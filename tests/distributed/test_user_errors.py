"""Errors on one rank only, or between ranks: the other ranks name it, in time, and none hangs.

And annotations whose effect only several ranks show: clusters of two device types, and the default strategy.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import whale
from tests.distributed.harness import Ranks
from tests.distributed.parity import Worlds
from tests.distributed.scripts import run_script
from tests.small_models import decoder, tokens
from whale import api
from whale.api import parallelize
from whale.cli.app import app
from whale.ir.cluster import Cluster
from whale.runtime.engine import FIRST_COMPARED
from whale.runtime.launch import World

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 6.0


def start(folder: Path, script: str, *, processes: int) -> tuple[int, str]:
    """Run a script on ranks of its own; return its exit code and what it wrote."""
    file = folder / "train.py"
    file.write_text(textwrap.dedent(script))
    done = run_script(str(file), ranks=processes)
    return done.returncode, done.stdout + done.stderr


# --- ranks that do not come, fail, or leave ---------------------------------------------------------------------------


def test_a_rank_that_did_not_start_is_named_by_the_others(tmp_path: Path) -> None:
    code, text = start(
        tmp_path,
        """
        import os, sys, time
        import torch, whale
        from tests.small_models import decoder, tokens
        if os.environ["RANK"] == "1":
            sys.exit(0)
        try:
            whale.parallelize(decoder(layers=1), tokens(rows=6), device="cpu", timeout_seconds=6)
        except whale.WhaleError as error:
            print(f"{type(error).__name__} {error.exit_code} {error}", flush=True)
            time.sleep(2)
        """,
        processes=3,
    )
    assert code == 0, text
    assert text.count("WorkerError 6 rank 1 of 3 did not start within 6 s; look at the output of that process") == 2


def annotated(kind: str) -> nn.Module:
    model = decoder(layers=2)
    if kind == "stages":
        whale.annotate(model, {"layers.0": whale.stage(), "layers.1": whale.stage()})
    else:
        whale.annotate(model, {"": whale.split() if kind == "split" else whale.replicate()})
    return model


def raise_in_a_step(world: World, kind: str) -> None:
    model = parallelize(annotated(kind), tokens(), device="cpu", timeout_seconds=TIMEOUT_SECONDS, micro_batches=2)
    for _ in range(FIRST_COMPARED):
        model.train_step(**tokens())
    batch = tokens()
    if world.rank == 1:
        batch["tokens"] += 1000  # an index that the embedding does not have
        batch["labels"] += 1000
    model.train_step(**batch)


def leave_early(world: World, kind: str) -> None:
    model = parallelize(annotated(kind), tokens(), device="cpu", timeout_seconds=TIMEOUT_SECONDS)
    for _ in range(3 if world.rank == 0 else 2):
        model.train_step(**tokens())
    if world.rank == 1:
        time.sleep(TIMEOUT_SECONDS + 2)  # it lives on, as in a notebook, and steps no more


def give_another_batch(world: World, kind: str) -> None:
    model = parallelize(annotated(kind), tokens(), device="cpu", timeout_seconds=TIMEOUT_SECONDS)
    model.train_step(**tokens(rows=8 if world.rank == 0 else 6))


@pytest.mark.parametrize("kind", ["replicate", "split", "stages"])
def test_a_rank_that_raises_in_a_step_is_named_on_all_ranks(kind: str) -> None:
    with Ranks(2, TIMEOUT_SECONDS) as ranks:
        outcomes = ranks.outcomes(raise_in_a_step, kind, timeout=100)
    assert abs(outcomes[0].seconds - outcomes[1].seconds) < TIMEOUT_SECONDS + 3
    for outcome in outcomes:
        assert outcome.error.startswith("WorkerError: rank 1 failed in task "), outcome.traceback
        assert "Error: " in outcome.error


@pytest.mark.parametrize("kind", ["replicate", "split", "stages"])
def test_a_rank_with_fewer_batches_is_named_within_the_timeout(kind: str) -> None:
    with Ranks(2, TIMEOUT_SECONDS) as ranks:
        outcomes = ranks.outcomes(leave_early, kind, timeout=100)
    assert outcomes[0].error.startswith("WorkerError: "), outcomes[0]
    assert f"rank 1 did not come within {TIMEOUT_SECONDS:g} s" in outcomes[0].error
    assert outcomes[1].error == ""
    assert outcomes[0].seconds < outcomes[1].seconds + 2


@pytest.mark.parametrize("kind", ["replicate", "split", "stages"])
def test_ranks_that_are_given_different_batches_do_not_hang(kind: str) -> None:
    with Ranks(2, TIMEOUT_SECONDS) as ranks:
        outcomes = ranks.outcomes(give_another_batch, kind, timeout=100)
    for outcome in outcomes:
        assert outcome.error.startswith("UsageError: "), outcome.traceback
        assert "rank 0 was given a batch of tokens (8, 6) int64, labels" in outcome.error
        assert "for train_step, and rank 1 a batch of tokens (6, 6) int64, labels" in outcome.error
        assert "whale.shard_dataset" in outcome.error


def run_another_step(world: World) -> None:
    model = parallelize(annotated("replicate"), tokens(), device="cpu", timeout_seconds=TIMEOUT_SECONDS)
    (model.train_step if world.rank == 0 else model.eval_step)(**tokens())


def test_ranks_that_run_different_steps_say_so() -> None:
    with Ranks(2, TIMEOUT_SECONDS) as ranks:
        outcomes = ranks.outcomes(run_another_step, timeout=100)
    for outcome in outcomes:
        assert outcome.error.startswith("UsageError: ")
        assert "for train_step, and rank 1 a batch of" in outcome.error
        assert "for eval_step: all ranks take the same steps" in outcome.error


# --- clusters and the default strategy --------------------------------------------------------------------------------

MIXED = """
[links]
intra_node = {bandwidth = "1 GB/s", latency = "10 us"}
inter_node = {bandwidth = "1 GB/s", latency = "10 us"}
[[nodes]]
name = "left"
devices = 2
device = "slow"
[[nodes]]
name = "right"
devices = 2
device = "fast-80GB"
[device_types.slow]
speed = {float32 = "1 TFLOP/s"}
memory = "1 GiB"
memory_bandwidth = "1 TB/s"
[device_types.fast-80GB]
speed = {float32 = "4 TFLOP/s"}
memory = "1 GiB"
memory_bandwidth = "1 TB/s"
"""


def train(world: World, layout: dict[str, Any], default: Any, cluster: Cluster | None) -> tuple[float, dict[str, int]]:
    """The largest error against the local step, and how many elements of which parameters this rank holds."""
    local, model = decoder(layers=2), decoder(layers=2)
    loss = local(**tokens())
    loss.backward()
    whale.annotate(model, layout)
    whale.set_default_strategy(default)
    try:
        parallel = parallelize(model, tokens(), device="cpu", cluster=cluster, micro_batches=2)
    finally:
        whale.set_default_strategy(None)
    errors = [abs(parallel.train_step(**tokens()).item() - loss.item())]
    found = parallel.full_gradients()
    for name, parameter in local.named_parameters():
        assert parameter.grad is not None
        errors.append(((found[name] - parameter.grad).abs().max() / parameter.grad.abs().max()).item())
    return max(errors), {name: parameter.numel() for name, parameter in parallel.named_parameters()}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.mark.parametrize(
    ("first", "second", "ranks_of_first"),
    [
        (whale.cluster(type="fast"), whale.cluster(type="slow"), {2, 3}),
        (whale.cluster(name="right"), whale.cluster(name="left"), {2, 3}),
        (whale.cluster([3, 2]), whale.cluster([1, 0]), {2, 3}),
        (whale.cluster("row", 2), whale.cluster("row", 2), {0, 1}),
        (whale.cluster("average", 2), whale.cluster("average", 2), {0, 1}),
    ],
    ids=["type", "name", "ranks", "row", "average"],
)
def test_a_stage_in_a_cluster_runs_on_its_devices(
    worlds: Worlds, first: Any, second: Any, ranks_of_first: set[int]
) -> None:
    inner = [whale.stage(2), whale.split(2)]
    if "row" in str(first) or "average" in str(first):
        inner = [whale.stage(), whale.split(2)]
    layout = {"layers.0": [first, *inner], "layers.1": [second, *inner]}
    results = worlds.run(4, train, layout, None, Cluster.parse(MIXED), timeout=110)
    whole = {name: parameter.numel() for name, parameter in decoder(layers=2).named_parameters()}
    for rank, (error, held) in enumerate(results):
        assert error < 1e-12
        mine, other = ("layers.0", "layers.1") if rank in ranks_of_first else ("layers.1", "layers.0")
        assert held[f"{mine}.up.weight"] == whole[f"{mine}.up.weight"] // 2
        assert not any(name.startswith(other) for name in held)


def test_the_default_strategy_splits_what_has_no_annotation(worlds: Worlds) -> None:
    results = worlds.run(4, train, {}, whale.split(), None, timeout=110)
    whole = {name: parameter.numel() for name, parameter in decoder(layers=2).named_parameters()}
    for error, held in results:
        assert error < 1e-12
        for name in ("layers.0.up.weight", "layers.1.down.weight", "layers.0.qkv.weight"):
            assert held[name] == whole[name] // 4


def test_an_annotation_overrides_the_default_strategy(worlds: Worlds) -> None:
    layout = {"layers.1": whale.replicate()}
    results = worlds.run(4, train, layout, whale.split(), None, timeout=110)
    whole = {name: parameter.numel() for name, parameter in decoder(layers=2).named_parameters()}
    for error, held in results:
        assert error < 1e-12
        assert held["layers.0.up.weight"] == whole["layers.0.up.weight"] // 4
        assert held["layers.1.up.weight"] == whole["layers.1.up.weight"]


# --- whale verify -----------------------------------------------------------------------------------------------------

MODEL = """
import whale
from tests.small_models import decoder, tokens


def build(layers=1, batch_size=4):
    model = decoder(layers=layers)
    whale.annotate(model, {"": whale.split()})
    return model, tokens(rows=batch_size)


def rows_coupled(batch_size=4):
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            if self.linear(x).sum() > 0:
                x = -x
            return self.linear(x).sum()

    return Model(), torch.ones(batch_size, 8)
"""


def test_whale_verify_compares_on_every_rank_and_exits_with_0(tmp_path: Path) -> None:
    file = tmp_path / "my_model.py"
    file.write_text(MODEL)
    done = run_script("-m", "whale", "verify", "--model", f"{file}:build", "--set", "layers=2", ranks=2)
    code, text = done.returncode, done.stdout + done.stderr
    assert code == 0, text
    assert "on 2 rank(s)" in text
    assert text.count("parity: ok") == 1
    assert "layers.1.up.weight" in text


@pytest.fixture
def model_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model for a command of this process, which is alone."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "my_model.py"
    file.write_text(MODEL)
    return file


def test_whale_verify_prints_json_alone_too(tmp_path: Path) -> None:
    file = tmp_path / "my_model.py"
    file.write_text(MODEL)
    done = run_script("-m", "whale", "verify", "--model", f"{file}:build", "--json")
    assert done.returncode == 0, done.stderr
    assert "on 1 rank(s)" in done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert report["gradient_error"] <= report["tolerance"]


def test_whale_verify_ends_each_mistake_with_its_exit_code(model_file: Path) -> None:
    file = model_file
    for arguments, code, message in (
        (("--model", f"{file}:biuld"), 2, "has no callable 'biuld'; did you mean 'build'?"),
        (("--model", "nothing.py:build"), 2, "no file 'nothing.py'"),
        (("--model", f"{file}:build", "--schedule", "1f2b"), 2, "did you mean '1f1b'?"),
        (("--model", f"{file}:build", "--cluster", "nowhere.toml"), 3, "nowhere.toml: cannot be read"),
        (("--model", f"{file}:rows_coupled"), 2, f"{file}:21: Model cannot be captured"),
    ):
        done = CliRunner().invoke(app, ["verify", *arguments])
        assert done.exit_code == code, done.stderr
        assert done.stdout == ""
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_the_tolerance_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch, model_file: Path) -> None:
    original = api.verify
    monkeypatch.setattr(api, "verify", lambda *args, **options: original(*args, tolerance=-1.0, **options))
    result = CliRunner().invoke(app, ["verify", "--model", f"{model_file}:build"])
    assert result.exit_code == 1
    assert "parity: NOT EQUAL" in result.stdout
    assert torch.is_grad_enabled()
