"""Measured gain of searched plans for a GPT and a ResNet without annotations, on three emulated clusters of mixed
devices, relative to every single strategy, random plans, and PyTorch's own parallelism.

    sudo python benchmarks/search_pays.py --folder pays      # on a machine that does nothing else
    sudo python benchmarks/search_pays.py --trial            # small models and quotas: only to see that it runs

``whale profile`` measures the testbed; the search is that of ``whale search``. A single strategy is the best plan that
the same search finds within it: all devices as replicas with rows by speed, all as one tensor group, or stages of one
device each. Random plans are drawn from the search's space: stages, devices in any order, cuts, data x tensor meshes
and micro-batches, with rows by speed; plans that do not compile or fit are drawn again. Twenty are drawn; those with a
predicted step of up to 1.25 times the searched plan's are run, at least the three best. Each is first timed once beside
the searched plan, and the two fastest stay. PyTorch's DistributedDataParallel has equal rows,
torch.distributed.pipelining equal numbers of blocks and as many micro-batches as the best pipeline, or the nearest
number that divides the batch; batch norm sees the whole batch in Whale, a rank's part in DistributedDataParallel. On
four devices the ResNet has larger pictures (`layouts.resnet96`).

The steps of the remaining plans alternate, with AdamW, in the same processes. A ratio is the median of the ratios to
the searched plan's step in the same round; above 1 the searched plan is faster. Layers and reductions are measured
between the steps for the prediction, and the noise is reported, as in benchmarks/prediction.py. The searched plan holds
if no ratio is below 1 by more than the noise, which is the larger of the two sides' noise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from balance_pays import ratio
from between import Step, noise, time_in_turn
from contenders import SINGLE, drawn, label, look, searched
from harness import in_turns, report, table
from pipeline import Part, by_hand, next_token_loss, step_by_hand
from prediction import BEDS, Bed, Case, build, make_profile, step_of
from testbed import Testbed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import whale
from whale.commands.candidates import CandidateCompiler
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types, device_types_with
from whale.runtime.launch import initialize

TORCH = ("DDP", "pipelining")
RANDOM, FEWEST, FINALISTS = 20, 3, 2
TOO_SLOW = 1.25
ERROR = 0.05
BLOCKS = 8
"""For all models, as PyTorch's pipelining divides them."""
MODELS = {"four": ("gpt", "resnet96"), "three": ("gpt", "resnet"), "two": ("gpt", "resnet")}
PROFILE = 300
"""Seconds for ``whale profile``: some steps even of all rows on the slowest device."""

HEAD = (
    "testbed", "model", "found plan", "predicted", "measured", "error", "noise", "best single strategy", "ratio",
    "best random plan", "ratio", "DDP", "ratio", "pipelining", "ratio", "holds",
)  # fmt: skip


@dataclass(frozen=True)
class Contest:
    """A model on a testbed, and the files that come of it."""

    bed: str
    model: str
    trial: bool
    folder: Path

    @property
    def cluster(self) -> Path:
        return self.folder / f"{self.bed}.toml"

    def file(self, what: str) -> Path:
        return self.folder / f"{self.bed}-{self.model}.search.{what}.json"

    def built(self) -> tuple[nn.Module, dict[str, Tensor]]:
        return build(self.model, self.trial, layout="none")

    def step(self, name: str) -> Step:
        return step_of(Case(self.model, "none"), self.file(f"{name}.plan"), self.trial)


def main() -> None:
    parser = argparse.ArgumentParser(description="found plans against single strategies, random plans and torch")
    parser.add_argument("--repeats", type=int, default=6, help="timed steps of each plan")
    parser.add_argument("--only", choices=list(MODELS), help="this testbed alone")
    parser.add_argument("--model", choices=list(PARTS), help="this model alone")
    parser.add_argument("--folder", help="keep profiles, plans and results there, and go on from what it has")
    parser.add_argument("--trial", action="store_true", help="small models and quotas: the times mean nothing")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    if "RANK" in os.environ:
        on_a_rank(Contest(options.only, options.model, options.trial, Path(options.folder)), options.repeats)
        return
    rows, errors = [], []
    for bed in [options.only] if options.only else MODELS:
        for model in [options.model] if options.model else MODELS[bed]:
            found = on_a_bed(bed, model, options)
            errors.append(abs(found["predicted"] / statistics.median(found["seconds"]["found"]) - 1))
            rows.append(row(BEDS[bed], model, found))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    held = sum(cells[-1] == "yes" for cells in rows)
    text = f"{table(HEAD, rows)}\n\nThe found plan holds against all others in {held} of {len(rows)} cases. Error of "
    text += f"its predicted step: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%} (wanted: {ERROR:.0%})."
    chosen = f" --only {options.only}" if options.only else ""
    name = "_".join(filter(None, ("search_pays", options.only)))
    report(name, options, text, command=f"sudo python benchmarks/search_pays.py{chosen}")


def row(bed: Bed, model: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    seconds, labels = found["seconds"], found["labels"]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = {name: ratio(each, seconds["found"]) for name, each in seconds.items() if name != "found"}
    noises = {name: noise(each) for name, each in seconds.items()}
    lost = [name for name in ratios if ratios[name] < 1 - max(noises[name], noises["found"])]

    def best(names: Sequence[str]) -> tuple[str, str]:
        name = min((name for name in names if name in ratios), key=lambda name: ratios[name])
        shown = [name] if name in SINGLE else []
        shown += [labels[name]] if name in labels else []
        return ", ".join((*shown, f"{medians[name]:.3f} s")), f"{ratios[name]:.3f}"

    return (
        bed.title,
        model,
        labels["found"],
        f"{found['predicted']:.3f} s",
        f"{medians['found']:.3f} s",
        f"{found['predicted'] / medians['found'] - 1:+.1%}",
        f"{noises['found']:.1%}",
        *best(SINGLE),
        *best([name for name in ratios if name.startswith("random")]),
        *(cell for name in TORCH for cell in best([name])),
        f"no: {', '.join(lost)}" if lost else "yes",
    )


# --- what is run, found outside of the testbed


def on_a_bed(bed: str, model: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Profile, search, draw and run; what was predicted and what came."""
    trial = options.trial
    kept = Contest(bed, model, trial, Path(options.folder or os.devnull)).file("results")
    if kept.exists():
        return json.loads(kept.read_text())
    description = BEDS[bed].description(0.4 if trial else 1)
    with tempfile.TemporaryDirectory() as temporary, Testbed(description) as testbed:
        contest = Contest(bed, model, trial, Path(options.folder or temporary))
        contest.folder.mkdir(exist_ok=True)
        contest.cluster.write_text(description.cluster_file())
        environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "CLUSTER": str(contest.cluster)}
        tried = trial_of(contest)
        if not contest.file("choices").exists():
            degrees = range(1, max(3, len(BEDS[bed].cores)) + 1)  # a third, for uneven parts of two devices
            asked = ("--degrees", ",".join(map(str, degrees)))
            make_profile(
                testbed, contest.file("profile"), model, contest.cluster, trial, asked, environment, seconds=PROFILE
            )
            contest.file("choices").write_text(json.dumps(choose(contest, tried)))
        choices = json.loads(contest.file("choices").read_text())
        arguments = ["--only", bed, "--model", model, "--folder", str(contest.folder)]
        arguments += ["--repeats", str(2 if trial else options.repeats), *(["--trial"] if trial else [])]
        command = [sys.executable, __file__, *arguments]
        done = testbed.run(command, timeout_seconds=2400, environment=environment, show=False)
        measured = json.loads(done.outputs[0].splitlines()[-1])
        print(f"{bed} {model}: {done.seconds:.0f} s. {json.dumps(measured)}", file=sys.stderr, flush=True)
        measured["seconds"] |= dict.fromkeys(choices["same"], measured["seconds"]["found"])
        between = ModelProfile.load(contest.file("between"))
        prediction, _ = tried.predict(
            whale.Plan.load(contest.file("found.plan")), between, described(contest.cluster, between)
        )
        found = {**choices, **measured, "predicted": prediction.step_seconds}
        contest.file("results").write_text(json.dumps(found))
        return found


def trial_of(contest: Contest) -> CandidateCompiler:
    with torch.device("meta"):
        model, whole = contest.built()
    return CandidateCompiler(model, whole, name=contest.model)


def described(cluster: Path, profile: ModelProfile) -> Cluster:
    return Cluster.load(cluster, catalog=device_types_with(profile))


def choose(contest: Contest, trial: CandidateCompiler) -> dict[str, Any]:
    """Write the plans to run; returns what the ranks and the table need of them."""
    profile = ModelProfile.load(contest.file("profile"))
    cluster = described(contest.cluster, profile)
    batch = len(next(iter(trial.batch.values())))
    chosen = searched(profile, cluster, batch, trial)
    found = chosen["found"]
    same = [name for name in chosen if name != "found" and look(chosen[name]) == look(found)]
    others = drawn(profile, cluster, batch, trial, chosen, 3 if contest.trial else RANDOM)
    limit = TOO_SLOW * found.prediction.step_seconds
    worth = [one for place, one in enumerate(others) if place < FEWEST or one.prediction.step_seconds <= limit]
    chosen |= {f"random-{place}": choice for place, choice in enumerate(worth, start=1)}
    for name, choice in chosen.items():
        contest.file(f"{name}.plan").write_text(choice.plan.dumps())
    stages = found.candidate.stages
    split = any(stage.tensor > 1 for stage in stages)
    num_micro_batches = chosen["pipeline"].candidate.micro_batches if "pipeline" in chosen else 1
    return {
        "labels": {name: label(choice, cluster) for name, choice in chosen.items()},
        "planned": {name: choice.prediction.step_seconds for name, choice in chosen.items()},
        "drawn": [choice.prediction.step_seconds for choice in others],
        "same": same,
        "wanted": [
            sorted({variant.tensor_degree for variant in profile.kinds[0].variants}) if split else [1],
            sorted({rows for stage in stages for rows in stage.rows if rows}),
        ],
        "micro_batches": nearest_divisor(batch, max(len(cluster.devices), num_micro_batches)),
    }


def nearest_divisor(batch: int, count: int) -> int:
    """The number of equal micro-batches of a batch that is nearest to *count*; torch's pipelining knows no others."""
    return min((one for one in range(1, batch + 1) if batch % one == 0), key=lambda one: abs(one - count))


# --- on the ranks


def on_a_rank(contest: Contest, repeats: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    world = initialize(timeout_seconds=300.0, device_type="cpu")
    choices = json.loads(contest.file("choices").read_text())
    alone = [name for name in ("found", *SINGLE) if name in choices["labels"] and name not in choices["same"]]
    steps = {name: contest.step(name) for name in alone} | torch_steps(contest, choices["micro_batches"])
    tried, finalists = quickest(contest, steps["found"], [name for name in choices["labels"] if "random" in name])
    model, whole = contest.built()
    cluster = Cluster.load(os.environ["CLUSTER"], catalog=device_types())
    known, wanted = ModelProfile.load(contest.file("profile")), [choices["wanted"]]
    made, seconds = time_in_turn(world, cluster, known, model, whole, steps | finalists, wanted, repeats=repeats)
    if world.rank == 0:
        contest.file("between").write_text(made.dumps())
        print(json.dumps({"tried": tried, "seconds": seconds}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def quickest(contest: Contest, found: Step, names: Sequence[str]) -> tuple[dict[str, float], dict[str, Step]]:
    """The ratio of each plan's step to the searched plan's adjacent step, and the steps of the fastest plans; the
    others are dropped as they come, for their memory."""
    tried, kept = dict[str, float](), dict[str, Step]()
    for name in names:
        kept[name] = contest.step(name)
        seconds = in_turns({"found": found, name: kept[name]}, 1)
        tried[name] = ratio(seconds[name], seconds["found"])
        if len(kept) > FINALISTS:
            del kept[max(kept, key=lambda one: tried[one])]
            gc.collect()
    return tried, kept


def torch_steps(contest: Contest, micro_batches: int) -> dict[str, Step]:
    """torch's own data and pipeline parallelism, with equal shares."""
    rank, num = dist.get_rank(), dist.get_world_size()
    model, whole = contest.built()
    replica = DistributedDataParallel(model)
    mine = {name: tensor.tensor_split(num)[rank] for name, tensor in whole.items()}
    blocks = [BLOCKS // num + (stage < BLOCKS % num) for stage in range(num)]
    part, loss = PARTS[contest.model]
    stage, schedule = by_hand(contest.built()[0], blocks, micro_batches, part=part, loss=loss)
    return {
        "DDP": with_update(replica, lambda: replica(**mine).loss.backward()),
        "pipelining": with_update(stage, lambda: step_by_hand(schedule, whole)),
    }


def with_update(module: nn.Module, run: Callable[[], object]) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        run()
        optimizer.step()
        optimizer.zero_grad()

    return step


def resnet_part(model: nn.Module, first: int, last: int) -> nn.Module:
    """A stage of a ResNet, like `pipeline.Part` of a GPT."""
    blocks = [block for stage in model.resnet.encoder.stages for block in stage.layers]
    head = (model.resnet.pooler, model.classifier) if last == len(blocks) else ()
    return nn.Sequential(*((model.resnet.embedder,) if first == 0 else ()), *blocks[first:last], *head)


PARTS: dict[str, tuple[Callable[[nn.Module, int, int], nn.Module], Callable[[Tensor, Tensor], Tensor]]] = {
    "gpt": (Part, next_token_loss),
    "resnet": (resnet_part, F.cross_entropy),
    "resnet96": (resnet_part, F.cross_entropy),
}
"""The stage class of PyTorch's pipelining and the loss of each model."""


if __name__ == "__main__":
    main()
