"""From annotations and mixed devices to a plan: open decisions are balanced, and predictions belong to the compiled
plan."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import whale
from tests.small_models import decoder, tokens
from whale import replicate, split, stage
from whale.cli.app import app
from whale.commands.candidates import CandidateCompiler
from whale.commands.planning import Planned, first_that_fits, make_plan, stage_annotations
from whale.compile.compile import compile_model, compile_traced
from whale.compile.options import Options
from whale.compile.trace import trace
from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import Plan, PlanStage
from whale.ir.profile import Interference, LinkCurve, ModelProfile
from whale.ir.workload import Workload
from whale.planner.balance.by_speed import Pipeline, pipeline_by_speed
from whale.planner.explain import explain, savings
from whale.planner.simulation.simulate import simulate
from whale.predict.costs import Costs
from whale.predict.dry_step import DryStep
from whale.predict.peak_memory import Known, brief_peak_memory, peak_memory
from whale.predict.reductions import Backward
from whale.strategies.profile import profile_model

LINK = Link(bandwidth=1e9, latency=1e-5)


def build() -> Any:
    return decoder(layers=2, heads=4, width=16).float().to("meta")


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(build(), tokens(), tensor_degrees=(1, 2), name="decoder")


def cluster(*speeds: float, memory_bytes: int = 2**33) -> Cluster:
    types = [
        DeviceType.of(
            f"card{speed:g}", speed={"float32": speed * 1e8}, memory_bytes=memory_bytes, memory_bandwidth=speed * 1e8
        )
        for speed in speeds
    ]
    return Cluster.of([("node0", type_) for type_ in types], intra=LINK)


def plan(profile: ModelProfile, machines: Cluster, layout: Any, *, rows: int = 12, **options: Any) -> Planned:
    model = build()
    whale.annotate(model, layout)
    costs = Costs(profile=profile, cluster=machines, precision="fp32", micro_batches=options.get("micro_batches", 1))
    return make_plan(model, tokens(rows), costs, Options(**options), rows=rows, name="decoder")


@pytest.mark.parametrize("layout", [{"": replicate()}, {"layers.0": stage(), "layers.1": stage()}])
def test_the_last_micro_batch_may_have_fewer_rows(profile: ModelProfile, layout: Any) -> None:
    found = plan(profile, cluster(2, 1), layout, rows=10, micro_batches=4)
    assert (found.plan.micro_batches, found.plan.micro_batch_rows) == (4, 3)
    assert found.predicted.workload.last_share == pytest.approx(1 / 3)
    with pytest.raises(UsageError, match="10 rows does not make 6 micro-batches: .* use 5 or 10"):
        plan(profile, cluster(2, 1), layout, rows=10, micro_batches=6)


def test_faster_devices_get_more_rows(profile: ModelProfile) -> None:
    found = plan(profile, cluster(2, 1), {"": replicate()})
    first, second = found.plan.stages[0].axes[0].shares  # type: ignore[index]
    assert first + second == 12
    assert first > second
    assert found.even is not None
    assert found.predicted.prediction.step_seconds < found.even.prediction.step_seconds


def test_faster_devices_get_more_of_what_is_split(profile: ModelProfile) -> None:
    found = plan(profile, cluster(3, 1), {"": split()})
    first, second = found.plan.stages[0].axes[0].shares  # type: ignore[index]
    assert first >= 2 * second


def test_the_stage_with_more_to_do_gets_the_faster_device(profile: ModelProfile) -> None:
    layout = {"embed": stage(), "layers.0": stage()}
    found = plan(profile, cluster(4, 1), layout, micro_batches=4)
    assert [one.ranks for one in found.plan.stages] == [(1,), (0,)]
    assert "stages take devices by what they have to do" in found.reasons[0]


def test_alike_devices_are_left_as_they_are(profile: ModelProfile) -> None:
    found = plan(profile, cluster(1, 1), {"": replicate()})
    assert found.plan.stages[0].axes[0].shares == ()  # type: ignore[index]
    assert found.plan.prediction == found.predicted.prediction


def test_a_plan_holds_its_prediction_and_its_bytes_are_the_same_each_time(profile: ModelProfile) -> None:
    found = [plan(profile, cluster(1, 1), {"": replicate()}, micro_batches=2) for _ in range(2)]
    assert found[0].plan.dumps() == found[1].plan.dumps()
    read = Plan.parse(found[0].plan.dumps())
    assert read == found[0].plan
    assert read.prediction_is_current
    assert read.workload is not None and read.prediction is not None
    assert simulate(read.workload).step_seconds == read.prediction.step_seconds
    assert sum(read.prediction.breakdown.values()) == pytest.approx(read.prediction.step_seconds)


def test_what_does_not_fit_is_infeasible_and_says_by_how_much(profile: ModelProfile) -> None:
    with pytest.raises(InfeasibleError, match=r"GiB"):
        plan(profile, cluster(2, 1, memory_bytes=2**16), {"": replicate()})


def test_one_breakdown_is_shown_of_a_step_that_of_the_busiest_rank(profile: ModelProfile) -> None:
    found = plan(profile, cluster(1, 3), {"layers.0": stage(), "layers.1": stage()}, micro_batches=4).plan
    assert found.prediction is not None and found.workload is not None
    explained, simulated = explain(found.workload, found.prediction), simulate(found.workload)
    assert found.prediction.breakdown_rank == explained.rank == simulated.busiest_rank
    assert found.prediction.breakdown == explained.breakdown == simulated.breakdowns[explained.rank]
    work = {rank: own["compute"] + own["communication"] for rank, own in simulated.breakdowns.items()}
    assert work[explained.rank] == max(work.values()) and len(set(work.values())) == 2


def test_rows_that_do_not_fit_are_to_blame_and_micro_batches_that_do_are_named(
    profile: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = cluster(2, 1, memory_bytes=3_300_000_000 + 2**21)
    counts: list[int] = []
    run = DryStep.run

    def noted(trial: Any, *arguments: Any, **options: Any) -> None:
        counts.append(len(trial.compilation.rows))
        run(trial, *arguments, **options)

    for layout in ({"": replicate()}, {"layers.0": stage(), "layers.1": stage()}):
        with monkeypatch.context() as patched:
            patched.setattr(DryStep, "run", noted)
            with pytest.raises(InfeasibleError) as raised:
                plan(profile, machines, layout, rows=1000)
        assert counts and set(counts) == {1}, "a dry run of a step of many micro-batches"
        said = str(raised.value)
        assert "without any rows" not in said and "It would fit with --micro-batches " in said, said
        count = int(said.partition("--micro-batches ")[2].split(",")[0].split()[0])
        assert plan(profile, machines, layout, rows=1000, micro_batches=count).predicted.prediction.fits


def test_a_device_that_its_driver_fills_cannot_be_helped_by_more_stages(profile: ModelProfile) -> None:
    with pytest.raises(InfeasibleError, match="card2:0 has 1.00 GiB, but driver, .* take 3.07 GiB, before any layer"):
        plan(profile, cluster(2, 1, memory_bytes=2**30), {"": replicate()})


def test_the_profile_of_another_model_is_refused(profile: ModelProfile) -> None:
    other = profile.model_copy(update={"model_hash": "sha256:" + "0" * 64})
    with pytest.raises(UsageError, match="profile this model"):
        plan(other, cluster(2, 1), {"": replicate()})


def test_replicas_on_mixed_devices_may_have_a_single_row(profile: ModelProfile) -> None:
    found = plan(profile, cluster(2, 1), {"": replicate()}, rows=1)
    assert found.plan.micro_batch_rows == 1
    whole = found.plan.model_copy(update={"stages": tuple(map(_of_one, found.plan.stages))})
    model = build()
    compiled = compile_model(model, tokens(1), cluster(2, 1), Options(plan=whole), device="cpu", training=True)
    assert len(compiled.stages[0].mesh.ranks) == 2


def _of_one(stage: PlanStage) -> PlanStage:
    """The stage with all rows for its first replica."""
    (axis,) = stage.axes or ()
    return stage.model_copy(update={"axes": (axis.model_copy(update={"shares": (1, 0)}),)})


def test_an_unmodified_model_is_cut_where_devices_are_done_together(profile: ModelProfile) -> None:
    machines = cluster(3, 1, memory_bytes=2**34)
    size: Any = {"batch": 8, "micro_batches": 4, "num_stages": 2, "replicas": 1, "precision": "fp32"}
    cuts = stage_annotations(profile, pipeline_by_speed(profile, machines, **size).layers)
    first, second = cuts
    assert first == profile.paths[0]
    assert second in ("layers.1", "head")
    costs = Costs(profile=profile, cluster=machines, precision="fp32", micro_batches=4)
    found = make_plan(build(), tokens(), costs, Options(micro_batches=4), rows=8, name="decoder", annotations=cuts)
    assert dict(found.plan.annotations) == cuts
    assert len(found.plan.stages) == 2


MODEL = """
from tests.small_models import decoder, tokens
import whale
def build(batch_size=8):
    model = decoder(layers=1).float()
    whale.annotate(model, {"": whale.replicate()})
    return model, tokens(batch_size)
"""
CLUSTER = """
[links]
intra_node = {bandwidth = "1 GB/s", latency = "10 us"}
[[nodes]]
devices = 2
device = "T4"
"""


WIDE = """
import torch
from tests.small_models import Decoder, tokens
def build(batch_size=8):
    with torch.device("meta"):
        return Decoder(width=512, heads=8, layers=8), tokens(batch_size)
"""
RESIDUAL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

def build(batch_size=64):
    return Model(), {"x": torch.randn(batch_size, 64, 64)}
"""

TIGHT = """
[links]
intra_node = {bandwidth = "1 GB/s", latency = "10 us"}
[host_memory]
size = "64 GiB"
bandwidth = "100 GB/s"
[[nodes]]
devices = 4
device = "card"
[device_types.card]
speed = {float32 = "10 TFLOP/s", float16 = "20 TFLOP/s"}
memory = "3.20 GiB"
memory_bandwidth = "500 GB/s"
"""


def wide_plan(tmp_path: Path, cluster: str) -> list[str]:
    """The beginning of a command that plans the wide model for a cluster."""
    (tmp_path / "model.py").write_text(WIDE)
    (tmp_path / "cluster.toml").write_text(cluster)
    return ["plan", "--model", f"{tmp_path / 'model.py'}:build", "--cluster", str(tmp_path / "cluster.toml"), "-q"]


def test_a_cut_into_stages_knows_the_optimizer_and_what_is_on_hosts(tmp_path: Path) -> None:
    given = wide_plan(tmp_path, TIGHT)
    given += ["--batch", "8", "--stages", "2", "--micro-batches", "4"]
    refused = CliRunner().invoke(app, given)
    assert refused.exit_code == 4 and "or with --offload state" in refused.stderr
    for options in (("--offload", "state"), ("--offload", "auto"), ("--optimizer", "sgd")):
        done = CliRunner().invoke(app, [*given, *options])
        assert done.exit_code == 0, (options, done.stderr)


@pytest.mark.parametrize(("memory", "level"), [("3.165 GiB", 3), ("3.175 GiB", 2), ("3.185 GiB", 1)])
def test_stages_fit_with_the_least_level_that_is_not_said_where_one_that_is_said_fits(
    tmp_path: Path, memory: str, level: int
) -> None:
    given = wide_plan(tmp_path, TIGHT.replace("3.20 GiB", memory))
    given += ["--batch", "16", "--stages", "2", "--micro-batches", "2", "--zero"]
    codes = [CliRunner().invoke(app, [*given, str(zero)]).exit_code for zero in (level - 1, level)]
    assert codes == [4, 0]
    assert CliRunner().invoke(app, [*given, "auto"]).exit_code == 0


def test_cuts_are_made_to_plans_until_one_fits() -> None:
    made: list[tuple[Pipeline, bool]] = []

    def cut(end: int) -> Pipeline:
        if not end:
            raise InfeasibleError("no cut")
        return Pipeline((range(end), range(end, 4)), ((0,), (1,)))

    def plan_of(pipeline: Pipeline, advises: bool) -> Any:
        made.append((pipeline, advises))
        if len(pipeline.layers[0]) < 3:
            raise InfeasibleError(f"no plan of {pipeline.layers[0]}")
        return pipeline

    ways = [partial(cut, end) for end in (0, 1, 1, 2, 3)]
    found: Any = first_that_fits(ways, plan_of)
    assert found == cut(3) and made == [(cut(1), False), (cut(2), False), (cut(3), False)]
    with pytest.raises(InfeasibleError, match=r"no plan of range\(0, 2\)"):
        first_that_fits([*ways[:4], ways[0]], plan_of)
    assert made[-1] == (cut(2), True)
    with pytest.raises(InfeasibleError, match="no cut"):
        first_that_fits(ways[:1], plan_of)

    def lacking(number: int) -> Pipeline:
        error = InfeasibleError(f"{number} bytes")
        error.lacking_bytes = number
        raise error

    with pytest.raises(InfeasibleError, match="2 bytes"):
        first_that_fits([partial(lacking, number) for number in (3, 2, 5)], plan_of)


def test_what_does_not_free_the_memory_of_hosts_is_not_named_where_that_lacks(tmp_path: Path) -> None:
    given = wide_plan(tmp_path, TIGHT.replace("64 GiB", "11.4 GiB").replace("3.20 GiB", "8 GiB"))
    given += ["--batch", "8", "--stages", "1", "--recompute", "none", "--offload", "state"]
    refused = CliRunner().invoke(app, given)
    assert refused.exit_code == 4 and "in the memory of node0 itself" in refused.stderr
    assert "--recompute" not in refused.stderr and "--zero" not in refused.stderr


def test_replicas_of_a_stage_are_on_the_devices_that_its_layers_were_chosen_for(tmp_path: Path) -> None:
    slow = TIGHT.replace("10 TFLOP", "4 TFLOP").replace("20 TFLOP", "8 TFLOP")
    nodes = '[[nodes]]\ndevices = 2\ndevice = "fast"\n[[nodes]]\ndevices = 2\ndevice = "card"\n'
    mixed = slow.replace('[[nodes]]\ndevices = 4\ndevice = "card"\n', nodes).replace("3.20 GiB", "8 GiB")
    mixed = mixed.replace("[host", '[links.inter_node]\nbandwidth = "1 GB/s"\nlatency = "10 us"\n[host')
    card = TIGHT.partition("[device_types.card]")[2].replace("3.20 GiB", "8 GiB")
    given = wide_plan(tmp_path, f"{mixed}[device_types.fast]{card}")
    for rows in ("16", "15"):
        done = CliRunner().invoke(app, [*given, "--batch", rows, "--stages", "2", "--micro-batches", "4", "--json"])
        assert done.exit_code == 0, done.stderr
        made = Plan.parse(done.stdout)
        assert sorted(one.ranks for one in made.stages) == [(0, 1), (2, 3)]
        assert not any(axis.shares for one in made.stages for axis in one.axes or ())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_zero_is_said_to_free_is_freed(tmp_path: Path, precision: str) -> None:
    given = wide_plan(tmp_path, TIGHT.replace("3.20 GiB", "8 GiB"))
    given += ["--batch", "16", "--stages", "1", "--micro-batches", "2", "--precision", precision, "--json"]
    plans = [Plan.parse(CliRunner().invoke(app, [*given, "--zero", str(zero)]).stdout) for zero in range(4)]
    whole, *divided = (max(one.total for one in plan.prediction.memory) for plan in plans if plan.prediction)
    said = {one.what: one.bytes for one in savings(plans[0])}
    for zero, found in enumerate(divided, 1):
        assert 0.6 <= said[f"zero {zero} in stage 0"] / (whole - found) <= 1.1


@pytest.mark.parametrize("stages", [1, 2])
def test_what_activations_are_said_to_free_at_most_is_what_forwards_keep(tmp_path: Path, stages: int) -> None:
    (tmp_path / "residual.py").write_text(RESIDUAL)
    (tmp_path / "cluster.toml").write_text(TIGHT.replace("3.20 GiB", "8 GiB").replace("devices = 4", "devices = 2"))
    given = ["plan", "--model", f"{tmp_path / 'residual.py'}:build", "--cluster", str(tmp_path / "cluster.toml"), "-q"]
    given += ["--batch", "64", "--stages", str(stages), "--micro-batches", str(stages), "--json"]
    ways: tuple[list[str], ...] = ([], ["--recompute", "full"], ["--offload", "activations"])
    plans = [Plan.parse(CliRunner().invoke(app, [*given, *way]).stdout) for way in ways]
    last = stages - 1  # which has most
    whole, *others = (plan.prediction.memory[last] for plan in plans if plan.prediction)
    said = {one.what: one.bytes for one in savings(plans[0]) if one.is_most}
    ways_of_last = f"recompute 'full' in stage {last}", f"offload 'activations' in stage {last}"
    for what, found in zip(ways_of_last, others, strict=True):
        assert 0.6 <= (whole.total - found.total) / said[what] <= 1


def test_whale_plan_writes_a_plan_and_prints_what_runs_it(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    given = ["plan", "--model", f"{tmp_path / 'model.py'}:build", "--cluster", str(tmp_path / "cluster.toml")]
    done = CliRunner().invoke(app, [*given, "--batch", "8", "-o", str(tmp_path / "plan.json"), "-q"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("torchrun --nproc-per-node 2 train.py")
    written = Plan.load(tmp_path / "plan.json")
    assert (written.batch, written.world_size) == (8, 2)
    assert [said.partition(";")[0] for said in written.assumptions] == [
        "fp32, the model's number type",
        "the state of adamw in memory",
    ]
    assert all(said in done.stdout for said in written.assumptions)
    double = CliRunner().invoke(app, [*given, "--precision", "fp64", "--optimizer", "sgd", "--json", "-q"])
    assumed = json.loads(double.stdout)["assumptions"]
    assert assumed == ["a batch of 8 rows, as in the example; --batch N changes it"]
    assert written.cluster is not None and dict(written.cluster.devices) == {"T4": (0, 1)}
    wrong = CliRunner().invoke(app, [*given, "--stages", "2"])
    assert wrong.exit_code == 2 and "has some" in wrong.stderr


UNLIKE = """
[links]
intra_node = {bandwidth = "1 GB/s", latency = "10 us"}
inter_node = {bandwidth = "1 GB/s", latency = "10 us"}
[[nodes]]
devices = 1
device = "quick"
[[nodes]]
devices = 1
device = "slow"
[device_types]
quick = {speed = {float32 = "300 MFLOP/s"}, memory = "8 GiB", memory_bandwidth = "300 MB/s"}
slow = {speed = {float32 = "100 MFLOP/s"}, memory = "8 GiB", memory_bandwidth = "100 MB/s"}
"""


def test_a_profile_stands_in_for_the_model(profile: ModelProfile, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(profile.dumps())
    (tmp_path / "cluster.toml").write_text(UNLIKE)
    given = ["plan", "--profile", str(tmp_path / "profile.json"), "--cluster", str(tmp_path / "cluster.toml")]

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*given, *arguments, "-q"])

    done = run("--batch", "12", "-o", str(tmp_path / "plan.json"))
    assert done.exit_code == 0, done.stderr
    assert (
        "torchrun --nnodes 2 --node-rank NODE_RANK --nproc-per-node 1 --master-addr HOST --master-port 29500 train.py"
        "    # on each of node0 to node1: NODE_RANK 0 to 1"
    ) in done.stdout
    written = Plan.load(tmp_path / "plan.json")
    ((axis,),) = (one.axes for one in written.stages)  # type: ignore[misc]
    assert sum(axis.shares) == 12 and axis.shares[0] >= 2 * axis.shares[1]
    assert written.prediction_is_current and written.prediction is not None and written.prediction.fits
    done = run("--batch", "12", "--micro-batches", "4", "--stages", "2", "--json")
    assert done.exit_code == 0, done.stderr
    staged = Plan.parse(done.stdout)
    assert [one.ranks for one in staged.stages] == [(0,), (1,)]
    assert {key.partition(".")[0] for key in staged.annotations} <= {"embed", "layers", "head"}
    trial = CandidateCompiler(build(), tokens(12), name="decoder")
    assert len(trial.compile(staged, Cluster.parse(UNLIKE)).stages) == 2
    ragged = run("--batch", "13", "--micro-batches", "4", "--stages", "2")
    assert ragged.exit_code == 0 and "1f1b, 4 micro-batches of 4 rows, the last of 1" in ragged.stdout
    for arguments, says in (
        ((), "say --batch"),
        (("--batch", "12", "--stages", "3"), "3 stages of 1 replica need 3 devices, but the cluster has 2"),
        (
            ("--batch", "12", "--micro-batches", "5"),
            "12 rows does not make 5 micro-batches: with 3 rows each",
        ),
        (("--batch", "12", "--schedule", "zero_bubble"), "choose of gpipe and 1f1b"),
        (
            ("--batch", "12", "--stages", "2", "--schedule", "interleaved"),
            "these have each its own; annotate the stages",
        ),
        (("--batch", "12", "--optimizer", "sgd"), "--optimizer is for --model"),
    ):
        wrong = run(*arguments)
        assert wrong.exit_code == 2 and says in wrong.stderr, wrong.output
    (tmp_path / "cluster.toml").write_text(UNLIKE.replace("8 GiB", "1 GiB"))
    tiny = run("--batch", "12")
    assert tiny.exit_code == 4 and "driver, libraries and communication alone take 3.07 GiB" in tiny.stderr
    (tmp_path / "cluster.toml").write_text(UNLIKE.replace("8 GiB", "3300001 kB"))  # a kilobyte more than these take
    tight = run("--batch", "12")
    assert tight.exit_code == 4 and "use more stages, or let whale search" in tight.stderr
    cut = run("--batch", "12", "--stages", "2")
    assert cut.exit_code == 4 and "--micro-batches 12" in cut.stderr and "--zero" not in cut.stderr


def test_plans_and_profiles_without_a_model_load_no_torch(profile: ModelProfile, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(profile.dumps())
    (tmp_path / "cluster.toml").write_text(UNLIKE)
    files = ["--profile", str(tmp_path / "profile.json"), "--cluster", str(tmp_path / "cluster.toml")]
    importing = ["profile", "import", "metis", str(tmp_path)]
    commands = [["plan", *files, "--batch", "12"], ["profile", "--schema"], importing]
    code = (
        "import sys; from click.testing import CliRunner; from whale.cli.app import app\n"
        f"codes = [CliRunner().invoke(app, arguments).exit_code for arguments in {commands!r}]\n"
        "print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[0] == "[0, 0, 3] False", done.stdout + done.stderr


def test_computation_beside_a_reduction_is_slowed_as_measured(profile: ModelProfile) -> None:
    machines = cluster(2, 1)
    types = tuple(device.type.name for device in machines.devices)
    curve = LinkCurve(
        operation="all_reduce",
        source=min(types),
        target=max(types),
        types=tuple(sorted(types)),
        devices=2,
        within="node",
        sizes=(1e3, 1e6),
        bandwidths=(1e8, 1e8),
        beside=Interference(types=types, slowdowns=(0.25, 1.5)),
    )
    measured = profile.model_copy(update={"links": (curve,)})
    found = plan(measured, machines, {"": replicate()})
    assert {one.slowdown for one in found.predicted.workload.reductions} == {(0.25, 1.5)}
    other = plan(profile, machines, {"": replicate()})
    assert {one.slowdown for one in other.predicted.workload.reductions} == {()}


def test_moving_what_crosses_between_stages_costs_computation_of_both_ends(profile: ModelProfile) -> None:
    machines = cluster(2, 1)
    fast, slow = (device.type.name for device in machines.devices)

    def found(**beside: Any) -> Workload:
        curve = LinkCurve(
            operation="all_reduce",
            source=slow,
            target=fast,
            types=(slow, fast),
            devices=2,
            within="node",
            sizes=(1e3, 1e6),
            bandwidths=(1e8, 1e8),
            beside=Interference(types=(fast, slow), slowdowns=(0.25, 1.0), **beside),
        )
        measured = profile.model_copy(update={"links": (curve,)})
        layout = {"layers.0": stage(), "layers.1": stage()}
        return plan(measured, machines, layout, micro_batches=2).predicted.workload

    told, untold = found(bytes=1e6, stretch=1.0), found()
    (crossing,) = (one for one in told.boundaries if (one.source_stage, one.target_stage) == (0, 1))
    (ahead,), (back,) = crossing.forward, crossing.backward
    assert ahead.bytes == back.bytes > 0
    for one, other in zip(told.stages, untold.stages, strict=True):
        # a sum of 1 MB takes 10 ms, and as long again while its ranks compute; in a ring of 2 it goes out and comes in
        lost = 0.02 * {fast: 0.25 / 1.25, slow: 1.0 / 2.0}[machines.devices[one.ranks[0]].type.name]
        price = lost / 2e6 * ahead.bytes
        assert one.forward[0] - other.forward[0] == pytest.approx(price)
        assert one.backward[0] - other.backward[0] == pytest.approx(price)
        assert one.communication[0] - other.communication[0] == pytest.approx(2 * price)


def test_a_backward_beside_a_reduction_waits_for_the_link_as_often_as_it_communicates() -> None:
    backward = Backward(seconds=2.0, collectives=((10, 0.01), (2, 0.2)))
    assert backward.slowdown(0.0, 0.0) == pytest.approx((10 * 0.01 + 2 * 0.2) / 2)  # two share the link
    assert backward.slowdown(1.0, 0.0) == pytest.approx(1.5 / 2 + 0.5 / 2)
    assert backward.slowdown(1.0, 0.05) == pytest.approx(1.5 / 2 + (10 * 0.05 + 2 * 0.2) / 2)
    assert Backward(seconds=0.0, collectives=()).slowdown(0.25, 1.0) == 0.25


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_single_micro_batch_tells_what_a_step_holds(schedule: str) -> None:
    model = build()
    whale.annotate(model, {"layers.0": stage(), "layers.1": stage()})
    options = Options(micro_batches=6, schedule=schedule)
    compilation = compile_model(model, tokens(24, 32), cluster(1, 1), options, device="cpu", training=True)
    for rank in range(2):
        whole, brief = (held(compilation, rank, schedule=schedule) for held in (peak_memory, brief_peak_memory))
        assert brief.total == pytest.approx(whole.total, rel=0.15)  # messages weigh much in a small model


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("inner", "options"), [(replicate(1), {"recompute": "full"}), (replicate(2), {}), (split(2), {})], ids=str
)
def test_the_only_micro_batch_makes_its_gradients(inner: Any, options: dict[str, Any], device: Any) -> None:
    """They were counted from its beginning, beside all activations."""
    model = decoder(layers=9, heads=4, width=64).float().to("meta")
    whale.annotate(model, {"": inner})
    traced = trace(model, tokens(2, 32), device="cpu", training=True)
    compilation = compile_traced(traced, cluster(*[1] * inner.strategy.degree), Options(**options), device=device)
    whole, brief = (held(compilation, 0, schedule="1f1b", device=device) for held in (peak_memory, brief_peak_memory))
    assert brief.total == pytest.approx(whole.total, rel=0.002)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("inner", [replicate, split])
def test_ranks_that_do_the_same_but_for_names_are_tried_once(inner: Any, device: Any) -> None:
    model = decoder(layers=6, heads=4, width=16).float().to("meta")
    whale.annotate(model, {f"layers.{layer}": [stage(), inner(2)] for layer in range(6)})
    machines, batch = cluster(*(1,) * 12), tokens(24, 32)
    traced = trace(model, batch, device="cpu", training=True)
    known = Known()
    for count in (6, 2):  # with fewer micro-batches less is kept
        options = Options(micro_batches=count)
        compilation = compile_traced(traced, machines, options, device=device)
        stages = [{rank for rank in range(12) if rank in own.mesh.ranks} for own in compilation.stages]
        for rank in range(12):
            alone = brief_peak_memory(compilation, rank, schedule="1f1b", device=device)
            told = brief_peak_memory(compilation, rank, schedule="1f1b", device=device, known=known)
            assert told == alone
            for index, calls in told.calls.items():
                assert {other for call in (*calls.forward, *calls.backward) for other in call.ranks} <= stages[index]
    # The first, the last and the others, for each number of rows and place along the axis.
    assert len(known.runs) <= 2 * 3 * 2


DEEP = {"layers": 8, "heads": 4, "width": 32}
HALVES = {"layers.[0-3]": stage(), "layers.[4-7]": stage()}


@cache
def deep_profile() -> ModelProfile:
    return profile_model(decoder(**DEEP).float().to("meta"), tokens(16, 32), tensor_degrees=(1,), rules=True)


def deep(memory_bytes: int, *, least: bool, layout: Any = HALVES, **options: Any) -> Planned:
    """The plan of a deep decoder in two stages, whose first holds twice as many micro-batches as the second."""
    model, batch = decoder(**DEEP).float().to("meta"), tokens(16, 32)
    whale.annotate(model, layout)
    machines = cluster(1, 1, memory_bytes=memory_bytes)
    costs = Costs(profile=deep_profile(), cluster=machines, precision="fp32", micro_batches=4)
    return make_plan(model, batch, costs, Options(micro_batches=4, **options), rows=16, name="deep", least=least)


@cache
def roomy(rule: str) -> Planned:
    """The plan under a rule on devices with memory for all."""
    return deep(2**33, least=False, recompute=rule)


def fullest(found: Planned) -> int:
    return max(device.total for device in found.predicted.prediction.memory)


def test_stages_compute_again_as_little_as_their_memory_allows() -> None:
    by_rule = {rule: roomy(rule) for rule in ("none", "selective", "full")}
    sizes = {rule: fullest(found) for rule, found in by_rule.items()}
    seconds = [found.predicted.prediction.step_seconds for found in by_rule.values()]
    assert sizes["none"] > sizes["selective"] > sizes["full"]
    assert seconds == sorted(seconds)
    assert deep(sizes["none"], least=True).plan.stages == by_rule["none"].plan.stages
    tight = deep(sizes["none"] - 1, least=True)
    assert [one.recompute for one in tight.plan.stages] == ["selective", "none"]
    assert "recompute 'selective' in stage 0" in tight.reasons[0]
    assert seconds[0] < tight.predicted.prediction.step_seconds < seconds[1]
    least = deep(sizes["full"], least=True)
    assert least.plan.stages[0].recompute == "full"
    assert Plan.parse(least.plan.dumps()) == least.plan


def test_recompute_is_advised_where_a_plan_would_fit_with_it() -> None:
    size = fullest(roomy("selective"))
    with pytest.raises(InfeasibleError, match="would fit with .*--recompute selective"):
        deep(size, least=False)
    with pytest.raises(InfeasibleError) as refused:
        deep(size // 4, least=True)
    assert "recompute" not in str(refused.value)


def test_the_rule_of_an_annotation_stays() -> None:
    size = fullest(roomy("none")) - 1
    layout = {"layers.[0-3]": stage(recompute="none"), "layers.[4-7]": stage()}
    with pytest.raises(InfeasibleError):
        deep(size, least=True, layout=layout)
