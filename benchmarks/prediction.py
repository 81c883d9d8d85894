"""Error of predicted step times: plans of a GPT and a ResNet on emulated devices of two and three speeds and two link
rates.

    sudo python benchmarks/prediction.py --folder plans      # over an hour, on a machine that does nothing else
    sudo python benchmarks/prediction.py --only memory       # recompute, ZeRO, bfloat16 and offload in 12 settings
    sudo python benchmarks/prediction.py --trial             # small models and quotas: only to see that it runs

With ``--only`` and one folder it runs testbed by testbed: plans and results that the folder has are not made again.

On each testbed ``whale profile`` measures devices, links and the models' layers, and ``whale plan`` makes the plans
before any of them has run. Then the plans run unchanged. The testbed's processors belong to a virtual machine, whose
host gives them 10 to 20% more or less from one minute to the next. So layers and all-reduces are measured again between
the steps, in the same processes, and the prediction from these times is the main result; the original prediction is
listed too. A step is forward, backward and AdamW. The measured time is the median; the noise is the distance between
the medians of the first and of the second half of the steps. Bytes are those of every live tensor, counted operator by
operator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import layouts
import torch
import torch.distributed as dist
from between import noise, peak_of, time_in_turn
from harness import report, table
from live_bytes import living
from testbed import Description, Testbed
from torch import Tensor, nn

import whale
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types, device_types_with
from whale.predict.costs import Costs
from whale.predict.prediction import predict
from whale.runtime.launch import World, initialize

LAYOUTS = Path(__file__).with_name("layouts.py")
WHALE = (sys.executable, "-m", "whale")
MEAN_ERROR, WORST_ERROR, BYTES_ERROR = 0.05, 0.10, 0.02


@dataclass(frozen=True)
class Case:
    """A plan: of a model in `layouts`, in one of its layouts."""

    model: str
    layout: str
    micro_batches: int = 1
    flags: tuple[str, ...] = ()
    """Options of ``whale plan``, such as ``--zero 1``."""

    @property
    def name(self) -> str:
        return "-".join((self.model, self.layout, *(flag.lstrip("-").replace(" ", "-") for flag in self.flags)))


@dataclass(frozen=True)
class Bed:
    """Devices, by their parts of a core, each on a node of its own; the rate of links; and what runs there."""

    cores: tuple[float, ...]
    rate: str
    cases: tuple[Case, ...]
    measured: tuple[tuple[str, str, str], ...]
    """Tensor degrees of each model, and the rows of micro-batches of its plans."""

    @property
    def title(self) -> str:
        return f"{', '.join(f'{cores:g}' for cores in self.cores)} of a core, {self.rate}"

    def description(self, scale: float) -> Description:
        lines = ["[links]", f'inter_node = {{bandwidth = "{self.rate}"}}']
        for cores in self.cores:
            lines += ["[[nodes]]", f'device = "cpu-{round(100 * cores)}"']
        lines.append("[device_types]")
        for cores in dict.fromkeys(self.cores):
            lines.append(f'cpu-{round(100 * cores)} = {{cores = {max(0.1, cores * scale):.3g}, memory = "4 GiB"}}')
        return Description.parse("\n".join(lines))


BEDS = {
    "four": Bed(
        (0.5, 0.5, 0.25, 0.25),
        "1 Gbit/s",
        (
            Case("gpt", "dp"),
            Case("gpt", "pp4", 12),
            Case("wide", "tp-pp", 4),
            Case("gpt", "dp-pp", 4),
            Case("resnet", "dp"),
        ),
        (("gpt", "1", "2,3,4,8"), ("wide", "2", "2"), ("resnet", "1", "8,16")),
    ),
    "three": Bed(
        (0.75, 0.5, 0.25),
        "200 Mbit/s",
        (Case("gpt", "dp"), Case("gpt", "pp3", 12), Case("resnet", "dp")),
        (("gpt", "1", "2,4,8,12"), ("resnet", "1", "8,16,24")),
    ),
    "two": Bed(
        (0.5, 0.25),
        "1 Gbit/s",
        (Case("wide", "tp", 2), Case("gpt", "pp2", 8)),
        (("gpt", "1", "3"), ("wide", "1,2,3", "4")),
    ),
    "memory": Bed(
        (0.5, 0.25),
        "1 Gbit/s",
        (
            Case("few", "dp"),
            Case("few", "dp", flags=("--recompute selective",)),
            Case("few", "dp", flags=("--recompute full",)),
            Case("few", "dp", flags=("--zero 1",)),
            Case("few", "dp", 2, flags=("--zero 2",)),
            Case("few", "dp", flags=("--zero 3",)),
            Case("few", "dp", flags=("--zero 3", "--recompute full")),
            Case("few", "dp", flags=("--offload activations",)),
            Case("few", "dp", flags=("--offload state",)),
            Case("few", "pp2", 4, flags=("--recompute full",)),
            Case("few16", "dp"),
            Case("few16", "dp", flags=("--zero 1", "--recompute selective")),
        ),
        (("few", "1", "2,3,4,8"), ("few16", "1", "4,8")),
    ),
}

TRIAL = {
    "gpt": {"width": 96, "length": 32},
    "wide": {"width": 192, "length": 32},
    "few": {"width": 96, "length": 32},
    "few16": {"width": 96, "length": 32},
    "resnet": {"side": 16},
    "resnet96": {"side": 16},
}
HEAD = (
    "testbed",
    "plan",
    "predicted",
    "measured",
    "error",
    "noise",
    "predicted by the plan",
    "error",
    "bytes predicted / counted, all ranks",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="predicted against measured steps on emulated devices")
    parser.add_argument("--repeats", type=int, default=8, help="timed steps of each plan")
    parser.add_argument("--only", choices=list(BEDS), help="this testbed alone")
    parser.add_argument("--folder", help="keep profiles and plans there, and go on from what it has")
    parser.add_argument("--trial", action="store_true", help="small models and quotas: the times mean nothing")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    parser.add_argument("--ranks", metavar="MODEL", help=argparse.SUPPRESS)  # this is a rank of the testbed
    options = parser.parse_args()
    if options.ranks:
        on_a_rank(options.only, options.ranks, Path(options.folder), options.trial, options.repeats)
        return
    rows: list[tuple[str, ...]] = []
    errors: list[float] = []
    for name in [options.only] if options.only else BEDS:
        for case, found in on_a_bed(name, options):
            errors.append(abs(found["predicted"] / found["seconds"] - 1))
            rows.append(row(BEDS[name], case, found))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    mean, worst = statistics.mean(errors), max(errors)
    text = (
        f"{table(HEAD, rows)}\n\nError of the step time: mean {mean:.1%} (wanted: {MEAN_ERROR:.0%}), worst {worst:.1%} "
    )
    text += f"(wanted: {WORST_ERROR:.0%}). Bytes are wanted between 0% and {BYTES_ERROR:.0%} above those counted."
    report("_".join(filter(None, ("prediction", options.only))), options, text)


def row(bed: Bed, case: Case, found: Mapping[str, Any]) -> tuple[str, ...]:
    def error(predicted: float) -> str:
        return f"{predicted / found['seconds'] - 1:+.1%}"

    hosted = any("offload" in flag for flag in case.flags)  # the bytes of hosts are counted, too
    sizes = [] if hosted else zip(found["planned_bytes"], found["bytes"], strict=True)
    ratios = [ours / counted - 1 for ours, counted in sizes]
    return (
        bed.title,
        case.name,
        f"{found['predicted']:.3f} s",
        f"{found['seconds']:.3f} s",
        error(found["predicted"]),
        f"{found['noise']:.1%}",
        f"{found['planned']:.3f} s",
        error(found["planned"]),
        ", ".join(f"{ratio:+.2%}" for ratio in ratios),
    )


# --- on the testbed


def on_a_bed(name: str, options: argparse.Namespace) -> list[tuple[Case, Mapping[str, Any]]]:
    """Profile, plan and run; for each case what was predicted and what came."""
    bed, trial = BEDS[name], options.trial
    kept = {case.model: Path(options.folder or os.devnull, f"{name}-{case.model}.results.json") for case in bed.cases}
    if all(file.exists() for file in kept.values()):
        return _results(bed, kept)
    description = bed.description(0.4 if trial else 1)
    with tempfile.TemporaryDirectory() as temporary, Testbed(description) as testbed:
        folder = Path(options.folder or temporary)
        folder.mkdir(exist_ok=True)
        cluster = folder / f"{name}.toml"
        cluster.write_text(description.cluster_file())
        environment = {"PYTHONPATH": str(LAYOUTS.parents[1]), "CLUSTER": str(cluster)}
        profiles = {model: folder / f"{name}-{model}.profile.json" for model, _, _ in bed.measured}
        plans = {case.name: folder / f"{name}-{case.name}.plan.json" for case in bed.cases}
        if not all(plan.exists() for plan in plans.values()):
            for model, degrees, rows in bed.measured:
                asked = ("--degrees", degrees, "--rows", rows)
                make_profile(testbed, profiles[model], model, cluster, trial, asked, environment)
            for case in bed.cases:
                make_plan(plans[case.name], case, cluster, profiles[case.model], trial, {**os.environ, **environment})
        arguments = ["--repeats", str(2 if trial else options.repeats), "--only", name, "--folder", str(folder)]
        arguments += ["--trial"] if trial else []
        kept = {model: folder / file.name for model, file in kept.items()}
        for model in (model for model, file in kept.items() if not file.exists()):
            command = [sys.executable, __file__, *arguments, "--ranks", model]
            done = testbed.run(
                command, timeout_seconds=600 + 300 * options.repeats, environment=environment, show=False
            )
            measured = json.loads(done.outputs[0].splitlines()[-1])
            print(f"{model}: {done.seconds:.0f} s. {json.dumps(measured)}", file=sys.stderr, flush=True)
            found = {}
            for case in (case for case in bed.cases if case.model == model):
                prediction = whale.Plan.load(plans[case.name]).prediction
                assert prediction is not None
                found[case.name] = {
                    **measured[case.name],
                    "planned": prediction.step_seconds,
                    "planned_bytes": [device.total for device in sorted(prediction.memory, key=lambda one: one.rank)],
                    "predicted": predicted_from(measured_profile(folder, name, model), case, cluster, folder, trial),
                }
            kept[model].write_text(json.dumps(found))
        return _results(bed, kept)


def _results(bed: Bed, kept: Mapping[str, Path]) -> list[tuple[Case, Mapping[str, Any]]]:
    found = {name: one for file in kept.values() for name, one in json.loads(file.read_text()).items()}
    return [(case, found[case.name]) for case in bed.cases]


def measured_profile(folder: Path, bed: str, model: str) -> Path:
    """Indices of the layers."""
    return folder / f"{bed}-{model}.between.profile.json"


def predicted_from(profile: Path, case: Case, cluster: Path, folder: Path, trial: bool) -> float:
    """Seconds that the plan of *case* should take by a profile."""
    plan = whale.Plan.load(folder / f"{cluster.stem}-{case.name}.plan.json")
    known = ModelProfile.load(profile)
    described = Cluster.load(cluster, catalog=device_types_with(known))
    model, whole = build(case.model, trial, layout=case.layout)
    options = Options(micro_batches=case.micro_batches, plan=plan)
    compilation = compile_model(model, whole, described, options, device="cpu", training=True)
    costs = Costs(profile=known, cluster=described, precision="fp32", micro_batches=case.micro_batches)
    return predict(compilation, costs, schedule=plan.schedule).prediction.step_seconds


def build(name: str, trial: bool, **settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of `layouts` and its batch."""
    return getattr(layouts, name)(**settings, **(TRIAL[name] if trial else {}))


def _model(model: str, trial: bool) -> list[str]:
    settings = TRIAL[model] if trial else {}
    return [
        "--model",
        f"{LAYOUTS}:{model}",
        *(part for item in settings.items() for part in ("--set", "{}={}".format(*item))),
    ]


def make_profile(
    testbed: Testbed,
    profile: Path,
    model: str,
    cluster: Path,
    trial: bool,
    asked: Sequence[str],
    environment: Mapping[str, str],
    *,
    seconds: int = 120,
) -> None:
    """``whale profile``, on the testbed; *asked*: which degrees and rows."""
    command = [*WHALE, "profile", *_model(model, trial), *asked, "--parallel"]
    command += ["--time-limit", str(seconds), "--cluster", str(cluster), "-o", str(profile)]
    for _ in range(1 if trial else 2):  # what there was no time for the first time
        testbed.run(command, timeout_seconds=480 + seconds, environment=environment, show=False)


def make_plan(
    plan: Path, case: Case, cluster: Path, profile: Path, trial: bool, environment: Mapping[str, str]
) -> None:
    """``whale plan``, outside of the testbed."""
    command = [*WHALE, "plan", *_model(case.model, trial), "--set", f"layout={case.layout}"]
    command += ["--cluster", str(cluster), "--profile", str(profile)]
    command += ["--micro-batches", str(case.micro_batches), "-o", str(plan)]
    command += [word for flag in case.flags for word in flag.split()]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


# --- on the ranks


def on_a_rank(bed: str, model: str, folder: Path, trial: bool, repeats: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    world = initialize(timeout_seconds=300.0, device_type="cpu")
    cases = [case for case in BEDS[bed].cases if case.model == model]
    steps, peaks = dict[str, Callable[[], object]](), dict[str, list[int]]()
    for case in cases:
        others = frozenset(living())
        steps[case.name] = step = step_of(case, folder / f"{bed}-{case.name}.plan.json", trial)
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, peak_of(step, others))
        peaks[case.name] = each
    made, seconds = between_steps(world, bed, folder, model, steps, trial, repeats)
    if world.rank == 0:
        measured_profile(folder, bed, model).write_text(made.dumps())
        found = {
            name: {"seconds": statistics.median(each), "noise": noise(each), "bytes": peaks[name], "each": each}
            for name, each in seconds.items()
        }
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def between_steps(
    world: World,
    bed: str,
    folder: Path,
    name: str,
    steps: Mapping[str, Callable[[], object]],
    trial: bool,
    repeats: int,
) -> tuple[ModelProfile, dict[str, list[float]]]:
    """Run steps and measure layers and all-reduces in turn: the profile with those, and the steps' seconds."""
    model, whole = build(name, trial)
    cluster = Cluster.load(os.environ["CLUSTER"], catalog=device_types())
    known = ModelProfile.load(folder / f"{bed}-{name}.profile.json")
    wanted = [(_numbers(degrees), _numbers(rows)) for model, degrees, rows in BEDS[bed].measured if model == name]
    return time_in_turn(world, cluster, known, model, whole, steps, wanted, repeats=repeats)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def step_of(case: Case, plan: Path, trial: bool) -> Callable[[], object]:
    """A training step of a case, as planned."""
    model, whole = build(case.model, trial, layout=case.layout)
    cluster = os.environ["CLUSTER"]
    parallel = whale.parallelize(model, whole, cluster=cluster, plan=plan, device="cpu", timeout_seconds=300)
    # as a group, which may be empty: a plan may leave a device idle
    optimizer = torch.optim.AdamW([{"params": list(parallel.parameters())}], lr=1e-4)

    def step() -> None:
        parallel.train_step(**whole)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
