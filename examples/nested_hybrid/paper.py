"""BERT-large on 8, 16 and 32 V100, simulated and compared with the Whale paper (USENIX ATC 2022).

The paper (arXiv 2011.09208) gives speed-ups over one GPU, for data parallelism and for pipelines of 2, 4 and 8 stages,
and not its batches: they are assumed as in benchmarks/whale_paper.py (16 samples a GPU, micro-batches of 8 a replica,
128 tokens, float32). Nothing is measured and nothing fitted. What the paper has no figure for is simulated all the
same. Here, unlike there, every nesting is a plan, compiled for all ranks; gradients are summed in the runtime's buckets
of 4 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import show
from experiment import Experiment, Nesting, Simulated, build, plan_of, simulated
from whale_paper import ASSUMED, V100, ZOO, cluster_of

from whale.commands.candidates import CandidateCompiler
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.planner.balance.by_speed import pipeline_by_speed
from whale.predict.peak_memory import brief_peak_memory
from whale.strategies.profile import profile_model

PAPER = {  # times one GPU, on 8, 16, 32
    "replicate": (7.26, 8.71, 14.06),
    "pipeline of 2 > replicate": (6.60, 12.50, 23.00),
    "pipeline of 4 > replicate": (7.25, 11.99, 23.30),
    "pipeline of 8 > replicate": (4.99, 9.90, 18.60),
}
DEVICES = (8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A nest on a number of devices: its prediction, and its speed-up over one device."""

    name: str
    num_devices: int
    found: Simulated
    speed_up: float

    @property
    def paper(self) -> float | None:
        """The paper's speed-up, if it has one."""
        figures = PAPER.get(self.name)
        return figures[DEVICES.index(self.num_devices)] if figures else None

    def cells(self) -> list[str]:
        prediction = self.found.prediction
        fullest = max(prediction.memory, key=lambda device: device.total / device.capacity)
        return [
            str(self.num_devices),
            self.name,
            "" if self.paper is None else f"{self.paper:.2f}",
            f"{self.speed_up:.2f}",
            "" if self.paper is None else f"{self.speed_up / self.paper - 1:+.0%}",
            show.seconds(prediction.step_seconds),
            f"{show.byte_size(fullest.total)} of {show.byte_size(fullest.capacity)}",
            show.byte_size(self.found.sent_bytes),
            f"{prediction.bubble:.0%}",
        ]


def nestings(profile: ModelProfile, cluster: Cluster, batch: int) -> list[Nesting]:
    """The paper's, and three that it has not."""
    size = len(cluster.devices)
    found = [Nesting(name="replicate", annotations={"": "replicate()"})]
    for count in (2, 4, 8):
        inner = ["replicate()"] if size > count else []
        found.append(_pipeline(profile, cluster, batch, count, "replicate", inner))
    found.append(_pipeline(profile, cluster, batch, 2, "split", ["split()"]))
    found.append(_pipeline(profile, cluster, batch, 2, "replicate > split", [f"replicate({size // 4})", "split(2)"]))
    within = ["split()"] if size == 8 else [f"replicate({size // 8})", "split(8)"]
    return [*found, Nesting(name="replicate > split within nodes", annotations={"": within})]


def _pipeline(profile: ModelProfile, cluster: Cluster, batch: int, count: int, inside: str, nest: list[str]) -> Nesting:
    """Stages of equal time, each on as many devices."""
    size, micro_batch = len(cluster.devices), ASSUMED["BERT-large"].micro_batch or 1
    replicas = size // count
    micro_batches = batch // (replicas * micro_batch)
    cuts = pipeline_by_speed(
        profile,
        cluster,
        batch=batch,
        micro_batches=micro_batches,
        num_stages=count,
        replicas=replicas,
        precision="fp32",
    ).layers
    starts = [0]  # the first stage begins with the embeddings, and has a layer, or it would have no name
    for layers in cuts[1:]:
        starts.append(max(starts[-1] + 1, int(profile.paths[layers[0]].split(".")[1])))
    ends = [*(start - 1 for start in starts[1:]), sum(path.startswith("layers.") for path in profile.paths) - 1]
    stages: dict[str, str | list[str]] = {
        f"layers.[{start}-{end}]": [f"stage({replicas})", *nest] for start, end in zip(starts, ends, strict=True)
    }
    return Nesting(name=f"pipeline of {count} > {inside}", annotations=stages, micro_batches=micro_batches)


def cases() -> list[Case]:
    """All nestings on all numbers of devices."""
    found: list[Case] = []
    alone = 0.0
    for size in (1, *DEVICES):
        batch = ASSUMED["BERT-large"].batch * size
        experiment = Experiment(
            model=f"{ZOO / 'bert.py'}:bert", batch=batch, settings={"seq": 128, "dropout": 0.0}, nestings=()
        )
        model, example = build(experiment, device="meta")
        cluster = cluster_of((V100, size))
        profile = profile_model(model, example, tensor_degrees=(1, 2, 4, 8), name="BERT-large")
        trial = CandidateCompiler(model, example, name="BERT-large")
        own = nestings(profile, cluster, batch) if size > 1 else [Nesting(name="one", annotations={"": "replicate()"})]
        for nesting in own:
            plan = plan_of(nesting, experiment, size)
            told = simulated(trial.compile(plan, cluster), plan, profile, cluster, memory_of=brief_peak_memory)
            seconds = told.prediction.step_seconds
            alone = alone or seconds
            if size > 1:
                found.append(Case(name=nesting.name, num_devices=size, found=told, speed_up=size * alone / seconds))
                print(" | ".join(found[-1].cells()), flush=True)
    return found


def compare(path: Path) -> None:
    """Write the table, and the figure beside it."""
    found = cases()
    head = ["V100", "nesting", "paper, x one GPU", "predicted", "difference", "step", "fullest device"]
    head += ["sent by all in a step", "bubble"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(case.cells()) + " |" for case in found]
    known = [abs(case.speed_up / case.paper - 1) for case in found if case.paper]
    bars = [(f"{case.name}, {case.num_devices} V100", case.speed_up, case.paper) for case in found]
    picture = path.with_suffix(".svg")
    title = "BERT-large on V100: times one GPU"
    picture.write_text(
        show.figure(title, bars, second="paper", shown=lambda value: f"{value or 0:.2f}") + "\n", encoding="utf-8"
    )
    text = [
        "# Nestings of BERT-large on V100, and the Whale paper",
        (__doc__ or "").strip(),
        "\n".join(lines),
        f"Mean difference to the paper's {len(known)} figures: {sum(known) / len(known):.1%}.",
        f"![{title}, predicted and the paper's]({picture.name})",
        "To repeat: `python examples/nested_hybrid/run.py paper`",
    ]
    path.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    print(f"wrote {path}")
