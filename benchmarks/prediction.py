"""Does a step take what its plan predicts? Plans of a GPT and a ResNet on devices of two and three speeds and two rates
of links, all on the testbed.

    sudo python benchmarks/prediction.py --folder profiles   # on a machine that does nothing else
    sudo python benchmarks/prediction.py --trial             # small models and quotas: only to see that it runs

With ``--only`` and one folder it runs testbed by testbed, ten minutes each: what the folder has is not measured again.

On each testbed ``whale profile`` measures devices, links and the models' layers; ``whale plan`` makes the plans, with
their predictions, before any of them has run; then the plans run as they are, their steps in turn in the same
processes. A step is forward, backward and AdamW. Measured is the median; the noise is how far the medians of the first
and of the second half of the steps lie apart. Bytes are those of every living tensor, counted operator by operator.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from balance_pays import in_turns
from harness import report, table
from live_bytes import LiveBytes, living
from testbed import Description, Testbed

import whale
from whale.ir.profile import ModelProfile

LAYOUTS = Path(__file__).with_name("layouts.py")
WHALE = (sys.executable, "-m", "whale")
MEAN_ERROR, WORST_ERROR, BYTES_ERROR = 0.05, 0.10, 0.02


@dataclass(frozen=True)
class Case:
    """A plan: of a model in `layouts`, in one of its layouts."""

    model: str
    layout: str
    micro_batches: int = 1

    @property
    def name(self) -> str:
        return f"{self.model}-{self.layout}"


@dataclass(frozen=True)
class Bed:
    """Devices, by their parts of a core, each on a node of its own; the rate of links; and what runs there."""

    cores: tuple[float, ...]
    rate: str
    cases: tuple[Case, ...]

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
            Case("gpt", "tp-pp", 4),
            Case("gpt", "dp-pp", 4),
            Case("resnet", "dp"),
        ),
    ),
    "three": Bed((0.75, 0.5, 0.25), "200 Mbit/s", (Case("gpt", "dp"), Case("gpt", "pp3", 12), Case("resnet", "dp"))),
    "two": Bed((0.5, 0.25), "1 Gbit/s", (Case("gpt", "tp"), Case("gpt", "pp2", 8))),
}
MEASURED = {"gpt": ("1,2", "2,3,4,6,8,12,24"), "resnet": ("1", "8,16,24")}
"""Of each model the tensor degrees, and the rows of micro-batches that the plans above may have."""

TRIAL = {"gpt": {"width": 64, "length": 32}, "resnet": {"side": 16}}
HEAD = ("testbed", "plan", "predicted", "measured", "error", "noise", "bytes predicted / counted, all ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description="predicted against measured steps on emulated devices")
    parser.add_argument("--repeats", type=int, default=8, help="timed steps of each plan")
    parser.add_argument("--only", choices=list(BEDS), help="this testbed alone")
    parser.add_argument("--folder", help="keep profiles and plans there, and go on from what it has")
    parser.add_argument("--trial", action="store_true", help="small models and quotas: the times mean nothing")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    parser.add_argument("--cases", help=argparse.SUPPRESS)  # for the ranks: what to run, as JSON
    options = parser.parse_args()
    if options.cases:
        on_a_rank(json.loads(options.cases), options.repeats)
        return
    rows: list[tuple[str, ...]] = []
    errors: list[float] = []
    for name in [options.only] if options.only else BEDS:
        for case, predicted, found in on_a_bed(name, options):
            error = abs(predicted["seconds"] / found["seconds"] - 1) if predicted else None
            errors += [] if error is None else [error]
            rows.append(row(BEDS[name], case, predicted, error, found))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    text = table(HEAD, rows)
    if errors:
        mean, worst = statistics.mean(errors), max(errors)
        text += f"\n\nError of the step time: mean {mean:.1%} (wanted: {MEAN_ERROR:.0%}), worst {worst:.1%} (wanted: "
        text += f"{WORST_ERROR:.0%}). Bytes are wanted between 0% and {BYTES_ERROR:.0%} above those counted."
    report("prediction", options, text)


def row(
    bed: Bed, case: Case, predicted: Mapping[str, Any] | None, error: float | None, found: Mapping[str, Any]
) -> tuple[str, ...]:
    cells = [f"{', '.join(f'{cores:g}' for cores in bed.cores)} of a core, {bed.rate}", case.name]
    cells.append(f"{predicted['seconds']:.3f} s" if predicted else "")
    cells += [f"{found['seconds']:.3f} s", "" if error is None else f"{error:.1%}", f"{found['noise']:.1%}"]
    if predicted:
        ratios = [ours / counted - 1 for ours, counted in zip(predicted["bytes"], found["bytes"], strict=True)]
        cells.append(", ".join(f"{ratio:+.1%}" for ratio in ratios))
    else:
        cells.append(f"({', '.join(f'{counted / 2**20:.1f} MiB' for counted in found['bytes'])})")
    return tuple(cells)


# --- on the testbed


def on_a_bed(name: str, options: argparse.Namespace) -> list[tuple[Case, Mapping[str, Any] | None, Mapping[str, Any]]]:
    """Profile, plan and run; for each case the prediction (None without ``whale plan``) and what came."""
    bed, trial = BEDS[name], options.trial
    description = bed.description(0.4 if trial else 1)
    with tempfile.TemporaryDirectory() as temporary, Testbed(description) as testbed:
        folder = Path(options.folder or temporary)
        folder.mkdir(exist_ok=True)
        cluster = folder / f"{name}.toml"
        cluster.write_text(description.cluster_file())
        environment = {**os.environ, "PYTHONPATH": str(LAYOUTS.parents[1]), "CLUSTER": str(cluster)}
        plans = {}
        if subprocess.run([*WHALE, "plan", "--help"], capture_output=True, env=environment).returncode == 0:
            profiles = {}
            for model in dict.fromkeys(case.model for case in bed.cases):
                profiles[model] = started_profile(folder, name, model)
                degrees, rows = MEASURED[model]
                command = [*WHALE, "profile", *_model(model, trial), "--degrees", degrees, "--rows", rows, "--parallel"]
                command += ["--time-limit", "180", "--cluster", str(cluster), "-o", str(profiles[model])]
                testbed.run(command, timeout_seconds=600, environment=environment, show=False)
            for case in bed.cases:
                plans[case.name] = make_plan(
                    folder / f"{name}-{case.name}.plan.json", case, cluster, profiles[case.model], trial, environment
                )
        cases = [
            {
                **asdict(case),
                "settings": TRIAL[case.model] if options.trial else {},
                "plan": str(folder / f"{name}-{case.name}.plan.json") if plans else None,
            }
            for case in bed.cases
        ]
        arguments = ["--repeats", str(2 if options.trial else options.repeats), "--cases", json.dumps(cases)]
        done = testbed.run(
            [sys.executable, __file__, *arguments], timeout_seconds=900, environment=environment, show=False
        )
        found = json.loads(done.outputs[0].splitlines()[-1])
        print(f"{done.seconds:.0f} s for {len(cases)} plans. {json.dumps(found)}", file=sys.stderr, flush=True)
        return [(case, plans.get(case.name), found[case.name]) for case in bed.cases]


def _model(model: str, trial: bool) -> list[str]:
    settings = TRIAL[model] if trial else {}
    return [
        "--model",
        f"{LAYOUTS}:{model}",
        *(part for item in settings.items() for part in ("--set", "{}={}".format(*item))),
    ]


def started_profile(folder: Path, bed: str, model: str) -> Path:
    """The profile of a model on a testbed; devices that another testbed had too are not measured again, links are."""
    path = folder / f"{bed}-{model}.profile.json"
    for other in folder.glob(f"*-{model}.profile.json"):
        if not path.exists():
            path.write_text(ModelProfile.load(other).model_copy(update={"links": ()}).dumps())
    return path


def make_plan(
    plan: Path, case: Case, cluster: Path, profile: Path, trial: bool, environment: Mapping[str, str]
) -> dict[str, Any]:
    """``whale plan``, outside of the testbed; what it predicts of the step and of each rank."""
    command = [*WHALE, "plan", *_model(case.model, trial), "--set", f"layout={case.layout}"]
    command += ["--cluster", str(cluster), "--profile", str(profile)]
    command += ["--micro-batches", str(case.micro_batches), "-o", str(plan)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    prediction = whale.Plan.load(plan).prediction
    assert prediction is not None
    memory = sorted(prediction.memory, key=lambda device: device.rank)
    return {"seconds": prediction.step_seconds, "bytes": [device.total for device in memory]}


# --- on the ranks


def on_a_rank(cases: Sequence[Mapping[str, Any]], repeats: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sides: dict[str, Callable[[], object]] = {}
    peaks: dict[str, list[int]] = {}
    for case in cases:
        others = frozenset(living())
        name = f"{case['model']}-{case['layout']}"
        sides[name] = step = step_of(case)
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, peak_of(step, others))
        peaks[name] = each
    seconds = in_turns(sides, repeats)
    found = {
        name: {"seconds": statistics.median(each), "noise": _noise(each), "bytes": peaks[name], "each": each}
        for name, each in seconds.items()
    }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def step_of(case: Mapping[str, Any]) -> Callable[[], object]:
    """A training step of a case, as planned, or with shares by speed where there is no plan."""
    import layouts

    model, whole = getattr(layouts, case["model"])(layout=case["layout"], **case["settings"])
    decided = {"plan": case["plan"]} if case["plan"] else {"micro_batches": case["micro_batches"]}
    parallel = whale.parallelize(
        model, whole, cluster=os.environ["CLUSTER"], device="cpu", timeout_seconds=300, **decided
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)

    def step() -> None:
        parallel.train_step(**whole)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_of(step: Callable[[], object], others: frozenset[int]) -> int:
    """The most bytes of a step's tensors; the less of two steps, for a thread of gloo may hold a buffer a little
    longer."""
    step()
    gc.collect()
    peaks = []
    with LiveBytes(others) as live:
        for _ in range(2):
            live.peak = live.now
            step()
            peaks.append(live.peak)
    return min(peaks)


def _noise(seconds: Sequence[float]) -> float:
    halves = [statistics.median(half) for half in (seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :])]
    return abs(halves[0] / halves[1] - 1)


if __name__ == "__main__":
    main()
