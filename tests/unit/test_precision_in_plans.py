"""Plans for steps under ``torch.autocast``: masters in float32, activations and messages in the dtypes of the graph."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from tests.small_models import decoder, tokens
from tests.unit.test_search_memory import SIZES, compare, stages
from whale.cli.app import app
from whale.cli.model_loader import load_model
from whale.commands.candidates import CandidateCompiler
from whale.compile.options import Options
from whale.errors import UsageError
from whale.graph.capture import capture
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.ir.profile import Affine, Amount, Kernel, ModelProfile
from whale.planner.catalog import device_types
from whale.planner.cost.kernels import as_run
from whale.planner.cost.precision import AUTOCAST
from whale.planner.cost.silicon import silicon_of
from whale.planner.cost.stage import CostModel
from whale.strategies.profile import profile_model

TYPES = device_types()


def profiled(precision: str | None) -> ModelProfile:
    model = decoder(layers=2, heads=4, width=32).float().to("meta")
    return profile_model(model, tokens(8, 32), tensor_degrees=(1, 2), precision=precision)


def prices(profile: ModelProfile, precision: str, device: str = "A100-SXM4-80GB") -> CostModel:
    return CostModel.of(profile, Cluster.homogeneous(2, TYPES[device]), precision=precision)


def test_masters_gradients_and_states_are_float32_and_activations_are_those_of_autocast() -> None:
    plain, low = prices(profiled(None), "fp32"), prices(profiled("bf16"), "bf16")
    group = low.group((0,), 1)
    parameters = sum(low.parameters(range(len(low.profile.layers)), 1))
    assert low.state(parameters) == plain.state(parameters)
    assert low.gradient_bytes == 4
    block = next(index for index, kind in enumerate(low.profile.kinds) if "layers.0" in kind.name)
    one, other = (one.layer(block, group, 8, 1) for one in (plain, low))
    assert 0.5 < other.kept / one.kept < 0.95  # casts of weights are kept too, and norms are in float32
    assert other.weights < one.weights


def test_a_product_that_autocast_leaves_alone_runs_in_float32() -> None:
    device, size = TYPES["A100-SXM4-80GB"], Affine(4096, 0)
    cast, alone = Amount(bytes=Affine(2 * 2 * 4096**2, 0)), Amount(elements=Affine(2 * 4096**2, 0))
    seconds = []
    for read in (cast, alone):
        kernel = Kernel(name="aten.mm", kind="matmul", dims=(Affine(1, 0), size, size, size), read=read)
        run = as_run((kernel,), fused=True, backward=False, fused_softmax=False, eager=True)
        seconds.append(float(run.seconds(device, silicon_of(device), np.ones(1), precision=AUTOCAST["bf16"]).sum()))
    assert 8 < seconds[1] / seconds[0] < 20  # 312 and 19.5 TFLOP/s


@pytest.mark.parametrize(("name", "settings"), [("gpt", {"vocab": 2048}), ("llama", {"kv_heads": 2})])
def test_the_search_counts_what_the_compiled_plan_holds_and_takes(name: str, settings: dict[str, Any]) -> None:
    loaded = load_model(f"examples/models/{name}.py:{name}", SIZES | settings, device="meta")
    trial = CandidateCompiler(loaded.model, loaded.batch, name=name, options=Options(precision="bf16"))
    profile = profile_model(
        loaded.model, loaded.batch, tensor_degrees=(1, 2), captured=trial.captured, precision="bf16"
    )
    plans = [stages(layout, profile) for layout in ("data", "pipeline of data", "pipeline")]
    # Compiled plans of a search count one message in flight too many, which weighs more beside activations in
    # bfloat16; against the whole step the search is within 0.96 here too.
    for choice in compare(trial, profile, plans, "bf16", seconds=True, below=0.92):
        assert choice.plan.precision == "bf16"
        assert choice.plan.prediction_is_current


def test_sums_in_bfloat16_take_half_the_bytes_in_the_search_and_in_the_compiled_plan() -> None:
    loaded = load_model("examples/models/gpt.py:gpt", SIZES | {"vocab": 2048}, device="meta")
    sent: dict[str | None, list[float]] = {}
    seconds: dict[str | None, list[float]] = {}
    for dtype in (None, "bf16"):
        trial = CandidateCompiler(loaded.model, loaded.batch, name="gpt", options=Options(gradient_dtype=dtype))
        profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2), captured=trial.captured)
        plans = [stages(layout, profile) for layout in ("data", "pipeline of data")]
        choices = compare(trial, profile, plans, "fp32", seconds=True, gradient_dtype=dtype)
        for choice in choices:
            assert choice.plan.gradient_dtype == dtype and choice.plan.prediction_is_current
        workloads = [choice.plan.workload for choice in choices]
        sent[dtype] = [sum(one.bytes for one in found.reductions) for found in workloads if found is not None]
        seconds[dtype] = [choice.prediction.step_seconds for choice in choices]
    assert len(sent[None]) == 2 and sent["bf16"] == [num_bytes / 2 for num_bytes in sent[None]]
    assert all(low < plain for low, plain in zip(seconds["bf16"], seconds[None], strict=True))


def test_a_device_without_bfloat16_is_refused() -> None:
    for name in ("T4", "V100-SXM2-32GB"):
        with pytest.raises(UsageError, match=f"{name} has no bfloat16; use fp16"):
            prices(profiled("bf16"), "bf16", name)
        assert prices(profiled("fp16"), "fp16", name).precision.rate(TYPES[name])[1] == "float16"


def test_a_profile_of_another_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="captured under torch.autocast in bf16, but the precision is fp32"):
        prices(profiled("bf16"), "fp32")


# --- commands ---------------------------------------------------------------------------------------------------------

GIVEN = ("--model", "examples/models/gpt.py:gpt", *(f"--set={name}={SIZES[name]}" for name in SIZES if "_" not in name))


def run(folder: Path, verb: str, *arguments: str) -> Result:
    cluster = folder / "cluster.toml"
    cluster.write_text('[[nodes]]\ndevices = 2\ndevice = "A100-SXM4-80GB"\n', encoding="utf-8")
    return CliRunner().invoke(app, [verb, *arguments, "--cluster", str(cluster), "-q"])


@pytest.mark.parametrize("verb", ["plan", "search", "estimate"])
def test_every_command_refuses_bfloat16_on_devices_without_it(tmp_path: Path, verb: str) -> None:
    cluster = tmp_path / "old.toml"
    cluster.write_text('[[nodes]]\ndevices = 2\ndevice = "V100-SXM2-32GB"\n', encoding="utf-8")
    given = (*GIVEN, "--cluster", str(cluster), "--batch", "4", "--precision", "bf16", "-q")
    result = CliRunner().invoke(app, [verb, *given])
    assert result.exit_code == 2
    assert "V100-SXM2-32GB has no bfloat16; use fp16, or leave such devices out" in result.stderr


def test_an_estimate_is_in_a_precision_that_all_devices_have(tmp_path: Path) -> None:
    for device, precision in (("V100-SXM2-32GB", "fp16"), ("A100-SXM4-80GB", "bf16")):
        cluster = tmp_path / f"{device}.toml"
        cluster.write_text(f'[[nodes]]\ndevices = 2\ndevice = "{device}"\n', encoding="utf-8")
        result = CliRunner().invoke(app, ["estimate", *GIVEN, "--cluster", str(cluster), "--batch", "4", "-q"])
        assert result.exit_code == 0, result.output
        assert f"  {precision} beside weights and optimizer state in float32; --precision NAME" in result.output


def test_commands_say_the_precision_in_the_plan_and_of_whom_it_is(tmp_path: Path) -> None:
    batch = ("--batch", "8")
    plans = {}
    for precision in ("bf16", "bfloat16", "fp32"):
        done = run(tmp_path, "plan", *GIVEN, *batch, "--stages", "2", "--precision", precision, "--json")
        assert done.exit_code == 0, done.output
        plans[precision] = Plan.parse(done.stdout)
    assert [plan.precision for plan in plans.values()] == ["bf16", None, None]
    state = [plan.prediction.memory[0].optimizer for plan in plans.values() if plan.prediction is not None]
    assert state[0] == state[2] == pytest.approx(2 * state[1], rel=1e-3)
    searched = run(tmp_path, "search", *GIVEN, *batch, "--precision", "bf16", "-o", str(tmp_path / "plan.json"))
    assert searched.exit_code == 0, searched.output
    assert Plan.load(tmp_path / "plan.json").precision == "bf16"
    estimated = run(tmp_path, "estimate", *GIVEN, *batch, "--micro-batch", "4", "--recompute", "full")
    assert "as other stacks run it" not in estimated.stdout


@pytest.mark.parametrize("verb", ["plan", "search", "estimate"])
def test_updates_in_the_backward_are_not_planned_where_steps_may_be_skipped(tmp_path: Path, verb: str) -> None:
    refused = run(tmp_path, verb, *GIVEN, "--batch", "8", "--precision", "fp16", "--step-in-backward")
    assert refused.exit_code == 2, refused.output
    assert "--step-in-backward updates parameters before all gradients are known" in refused.stderr


def test_a_profile_alone_says_its_precision(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    for precision, other in (("bf16", "fp32"), ("fp32", "bf16")):
        options = ("--degrees", "1,2", "--precision", precision, "-o", str(file), "-q")
        made = CliRunner().invoke(app, ["profile", "model", *GIVEN, *options])
        assert made.exit_code == 0, made.output
        found = run(tmp_path, "search", "--profile", str(file), "--batch", "8", "-o", str(tmp_path / "plan.json"))
        assert found.exit_code == 0, found.output
        assert Plan.load(tmp_path / "plan.json").precision == (precision if precision == "bf16" else None)
        refused = run(tmp_path, "search", "--profile", str(file), "--batch", "8", "--precision", other)
        assert refused.exit_code == 2
        assert "the profile was captured" in refused.stderr


def test_what_fails_while_casts_are_looked_for_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Operators of T5 have operands of two dtypes, with which they run under autocast alone."""
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "seq": 8, "vocab": 64}
    loaded = load_model("examples/models/t5.py:t5", sizes, device="meta")
    capture(loaded.model, loaded.batch, precision=torch.bfloat16)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
