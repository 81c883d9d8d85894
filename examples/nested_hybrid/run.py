"""Nested strategies compared: predicted and measured steps.

    python examples/nested_hybrid/run.py report gpt.toml --cluster lab.toml --folder out      # simulated: no processes
    torchrun --nproc-per-node 4 examples/nested_hybrid/run.py measure gpt.toml --cluster lab.toml --folder out
    sudo python examples/nested_hybrid/run.py testbed                # all of it on emulated devices: a GPT and a MoE
    python examples/nested_hybrid/run.py paper                       # BERT-large on V100, beside the Whale paper

An experiment is a file: a model, a batch, and nestings of annotations. Every nesting becomes a plan, whose shares of
rows, heads and experts follow the speeds of the cluster's devices. A step is forward, backward and AdamW; measured is
the median, and noise is how far the medians of the first and of the second half of the steps lie apart. Layers are
measured between the steps in the same processes, and predictions are of the plans from those times. Bytes are those of
living tensors, counted operator by operator; bytes sent are the kernel's count, with headers, against what ring and
pairwise algorithms send (gloo's reduce-scatter as much as an all-reduce). The bubble is the share of all ranks' time in
which they wait for other stages. Parity is the worst error of loss and gradients against the local model in float64, on
a small model of the same nesting.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import show
import torch
import torch.distributed as dist
from experiment import Experiment, build, load, parts_of, plan_of, simulated, to_measure
from harness import RESULTS, report
from testbed import Description, Testbed

from whale.commands.candidates import CandidateCompiler
from whale.compile.compilation import Compilation
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types, device_types_with
from whale.predict.peak_memory import brief_peak_memory, peak_memory
from whale.runtime.launch import initialize
from whale.strategies.profile import profile_model

HERE = Path(__file__).resolve().parent
DEGREES = (1, 2, 3, 4, 6, 8)
"""Tensor and expert degrees at which layers are profiled."""

ON_THE_TESTBED = ("gpt", "moe")


@dataclass(frozen=True)
class Folder:
    """The known results of an experiment on a cluster, as files; existing files are not made again."""

    path: Path
    experiment: Experiment
    cluster: Path
    small: bool
    _compiled: dict[str, Compilation] = field(default_factory=dict)

    def file(self, name: str) -> Path:
        return self.path / name

    @cached_property
    def plans(self) -> dict[str, Path]:
        """By the nesting's name."""
        return {one.name: self.file(f"{index:02}.plan.json") for index, one in enumerate(self.experiment.nestings)}

    @cached_property
    def trial(self) -> CandidateCompiler:
        model, batch = build(self.experiment, small=self.small, device="meta")
        return CandidateCompiler(model, batch, name=self.experiment.model)

    @property
    def profile(self) -> ModelProfile:
        """The profile measured between the steps, otherwise the modelled one."""
        measured = self.file("measured.profile.json")
        return ModelProfile.load(measured if measured.exists() else self.file("profile.json"))

    def compiled(self, name: str) -> Compilation:
        """The plan of a nesting, compiled once."""
        if name not in self._compiled:
            self._compiled[name] = self.trial.compile(Plan.load(self.plans[name]), self._cluster_with(self.profile))
        return self._compiled[name]

    def _cluster_with(self, profile: ModelProfile) -> Cluster:
        return Cluster.load(self.cluster, catalog=device_types_with(profile))

    def prepare(self) -> None:
        """Plans, the modelled profile, and at which degrees and rows layers have to be measured."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.file("wanted.json").exists():
            return
        model, batch = build(self.experiment, small=self.small, device="meta")
        num_devices = len(Cluster.load(self.cluster, catalog=device_types()).devices)
        degrees = [degree for degree in DEGREES if degree <= num_devices]
        profile = profile_model(
            model, batch, tensor_degrees=degrees, expert_degrees=degrees, name=self.experiment.model
        )
        self.file("profile.json").write_text(profile.dumps())
        for nesting in self.experiment.nestings:
            plan = plan_of(nesting, self.experiment, num_devices)
            self.plans[nesting.name].write_text(plan.dumps())
        known = [variant.tensor_degree for variant in profile.kinds[0].variants]
        parts = set[tuple[float, int]]().union(*(parts_of(self.compiled(name), profile) for name in self.plans))
        self.file("wanted.json").write_text(json.dumps(to_measure(parts, known)))

    def found(self) -> list[show.Found]:
        """All known results of every nest."""
        profile = self.profile
        cluster = self._cluster_with(profile)
        capacity = [device.memory_bytes for device in cluster.devices]
        measured, parity = (_read(self.file(name)) for name in ("measured.json", "parity.json"))
        rows, memory_of = [], peak_memory if measured else brief_peak_memory
        for name in self.plans:
            plan = Plan.load(self.plans[name])
            told = simulated(self.compiled(name), plan, profile, cluster, memory_of=memory_of)
            own = measured.get(name, {})
            predicted = {device.rank: device.total for device in told.prediction.memory}
            counted = own.get("bytes") or [None] * len(capacity)
            rows.append(
                show.Found(
                    name=name,
                    seconds=told.prediction.step_seconds,
                    memory=[(predicted[rank], counted[rank], capacity[rank]) for rank in sorted(predicted)],
                    sent=told.sent_bytes,
                    bubble=told.prediction.bubble,
                    measured=own.get("seconds"),
                    noise=own.get("noise", 0.0),
                    sent_measured=own.get("sent"),
                    bubble_measured=own.get("bubble"),
                    parity=parity.get(name),
                )
            )
        return rows


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def shown(title: str, found: list[show.Found], picture: Path) -> str:
    """The table, and the figure in a file beside it."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    bars = [(one.name, one.seconds, one.measured) for one in found]
    picture.write_text(show.figure(title, bars) + "\n")
    link = f"![{title}: step times of all nestings]({picture.name})"
    return "\n\n".join(part for part in (f"## {title}", show.table(found), show.summary(found), link) if part)


# --- on ranks ---------------------------------------------------------------------------------------------------------


def on_a_rank(folder: Folder, options: argparse.Namespace) -> None:
    """Prepare, verify and measure what the folder does not have yet; rank 0 writes."""
    from ranks import measure, verify, write

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    world = initialize(timeout_seconds=300.0)
    if world.rank == 0:
        folder.prepare()
    dist.barrier()
    if not folder.file("parity.json").exists():
        errors = verify(folder.experiment, folder.plans, folder.cluster)
        if world.rank == 0:
            write(folder.file("parity.json"), errors)
    if options.what == "measure":
        profile = ModelProfile.load(folder.file("profile.json"))
        wanted = json.loads(folder.file("wanted.json").read_text())
        made, found = measure(
            world,
            folder.experiment,
            folder.plans,
            folder.cluster,
            profile,
            wanted,
            small=folder.small,
            repeats=options.repeats,
        )
        if world.rank == 0:
            folder.file("measured.profile.json").write_text(made.dumps())
            write(folder.file("measured.json"), found)
    dist.barrier()
    dist.destroy_process_group()


# --- on the testbed ---------------------------------------------------------------------------------------------------


def on_the_testbed(options: argparse.Namespace) -> str:
    parts = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in [options.only] if options.only else ON_THE_TESTBED:
            experiment = load(HERE / f"{name}.toml")
            description = Description.load(experiment.testbed)
            path = Path(options.folder or temporary, name)
            path.mkdir(parents=True, exist_ok=True)
            cluster = path / "cluster.toml"
            cluster.write_text(description.cluster_file())
            folder = Folder(path, experiment, cluster, options.trial)
            folder.prepare()
            arguments = [str(HERE / f"{name}.toml"), "--cluster", str(cluster), "--folder", str(path)]
            arguments += ["--repeats", str(2 if options.trial else options.repeats), "--silent"]
            arguments += ["--small"] if options.trial else []
            if not folder.file("parity.json").exists():
                count = str(len(description.devices))
                command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
                subprocess.run([sys.executable, *command, __file__, "verify", *arguments], check=True, env=environment)
            if not folder.file("measured.json").exists():
                with Testbed(description) as bed:
                    done = bed.run([sys.executable, __file__, "measure", *arguments], timeout_seconds=2700)
                print(f"{name}: {done.seconds:.0f} s on the testbed", file=sys.stderr, flush=True)
            title = f"{Path(experiment.model).name.partition('.')[0]} on {len(description.devices)} devices"
            place = RESULTS / f"nested_hybrid_{name}_{options.write}.svg" if options.write else path / f"{name}.svg"
            parts.append(shown(title, folder.found(), place))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="nestings of strategies, predicted and measured")
    parser.add_argument("what", choices=["report", "verify", "measure", "testbed", "paper"])
    parser.add_argument("file", nargs="?", type=Path, help="the experiment; for report, verify and measure")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="the machines; for report, verify and measure")
    parser.add_argument("--folder", type=Path, help="keep what was made and measured there, and go on from what it has")
    parser.add_argument("--repeats", type=int, default=4, help="timed steps of each nesting")
    parser.add_argument("--only", choices=ON_THE_TESTBED, help="this experiment alone, on the testbed")
    parser.add_argument("--small", action="store_true", help="the experiment's small settings")
    parser.add_argument("--trial", action="store_true", help="small models, two steps: only to see that it runs")
    parser.add_argument("--silent", action="store_true", help=argparse.SUPPRESS)  # the testbed's own ranks
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    if options.what == "testbed":
        command = "python examples/nested_hybrid/run.py testbed"
        name = "nested_hybrid"
        if options.only:
            name, command = f"{name}_{options.only}", f"{command} --only {options.only}"
        report(name, options, on_the_testbed(options), command=command)
    elif options.what == "paper":
        from paper import compare

        folder, name = (RESULTS, f"_{options.write}") if options.write else (options.folder or Path(), "")
        compare(folder / f"nested_hybrid_v100{name}.md")
    elif None in (options.file, options.cluster, options.folder):
        parser.error(f"{options.what} needs an experiment, --cluster and --folder")
    else:
        folder = Folder(options.folder, load(options.file), options.cluster, options.small)
        if options.what == "report":
            folder.prepare()
        else:
            on_a_rank(folder, options)
        if not options.silent and os.environ.get("RANK", "0") == "0":
            print(shown(options.file.stem, folder.found(), folder.file(f"{options.file.stem}.svg")))


if __name__ == "__main__":
    main()
