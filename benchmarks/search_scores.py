"""Is the search's score of a plan what compiling the plan predicts?

    python benchmarks/search_scores.py [--plans 24] [--seed 0] [--only hf:bart] [--keep FILE] [--write DATE]

The search orders plans by its score, and sells the best of those that it compiles: a plan that is scored too high is
never compiled. For each model and cluster plans are drawn of all kinds: data parallel, tensor parallel in nodes,
pipelines, both at once across nodes, stages of mixed devices, of different degrees and of unequal sizes. Each is scored
as the search scores its candidates, then compiled and simulated, and the ratios of both are listed by kind, whether a
plan fits in memory or not. ``--keep`` writes every ratio with both breakdowns as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from pathlib import Path
from typing import Any

import click
from harness import report, table
from hunt_cases import EXAMPLES, Problem
from hunt_rivals import Makers, Mesh, random_meshes, simple_meshes

from whale.cli.model_loader import load_model
from whale.cli.search import SearchedModel, search
from whale.commands.plan_writer import Choice, PlanWriter, Trial
from whale.compile.options import Options
from whale.errors import UsageError
from whale.ir.cluster import Cluster
from whale.planner.catalog import device_types
from whale.planner.cost.precision import BY_DTYPE
from whale.planner.search import Candidate, SearchSettings

MODELS: dict[str, dict[str, Any]] = {
    "hf:bart": {"encoder_layers": 4, "decoder_layers": 4, "sequence_length": 512},
    "hf:gpt2": {"n_layer": 8, "sequence_length": 512},
    "hf:t5": {"num_layers": 4, "sequence_length": 512},
    "hf:bert": {"num_hidden_layers": 8, "sequence_length": 512},
    "gpt": {"layers": 8, "hidden": 1024, "heads": 16, "seq": 512, "vocab": 50257},
    "moe": {"layers": 4, "hidden": 768, "heads": 12, "seq": 512, "vocab": 30528, "experts": 4, "ffn": 1536},
}
"""Settings of each model: tied embeddings in all of ``hf:``, encoders with decoders in two."""

CLUSTERS = {
    "four nodes": """
[[nodes]]
devices = 4
device = "A100-SXM4-40GB"
links = {inter_node = {bandwidth = "100 Gbit/s", latency = "5 us"}}
[[nodes]]
devices = 4
device = "V100-SXM2-16GB"
links = {inter_node = {bandwidth = "50 Gbit/s", latency = "5 us"}}
[[nodes]]
devices = 2
device = "T4"
links = {inter_node = {bandwidth = "25 Gbit/s", latency = "15 us"}}
[[nodes]]
devices = 1
device = "L4"
links = {inter_node = {bandwidth = "25 Gbit/s", latency = "15 us"}}
""",
    "two adapters": """
[links]
inter_node = {bandwidth = "100 Gbit/s", latency = "5 us", adapters = 2}
[[nodes]]
count = 2
devices = 4
device = "A100-SXM4-40GB"
[[nodes]]
count = 2
devices = 4
device = "V100-SXM2-32GB"
""",
}

CLUSTERS["two less"] = CLUSTERS["four nodes"].replace("devices = 4", "devices = 3")
CLUSTERS["slow"] = CLUSTERS["four nodes"].replace("100 Gbit/s", "10 Gbit/s").replace("50 Gbit/s", "10 Gbit/s")

BATCH = 48

ANY_KIND = "all plans"

MOST_MISSED = 2_000
"""Draws of impossible plans after which no more are drawn."""


@dataclass(frozen=True)
class Ratio:
    """A plan's score over its compiled step."""

    kind: str
    scored: Candidate
    compiled: Choice

    @property
    def value(self) -> float:
        return self.scored.prediction.step_seconds / self.compiled.prediction.step_seconds

    def as_json(self, case: str) -> dict[str, Any]:
        scored, compiled = self.scored.prediction, self.compiled.prediction
        return {
            "case": case,
            "kind": self.kind,
            "ratio": round(self.value, 4),
            "ms": [round(one.step_seconds * 1e3, 3) for one in (scored, compiled)],
            "breakdown": {
                part: [round(one.breakdown.get(part, 0.0) * 1e3, 3) for one in (scored, compiled)]
                for part in dict.fromkeys((*scored.breakdown, *compiled.breakdown))
            },
            "micro_batches": self.scored.micro_batches,
            "stages": [
                f"[{one.first},{one.last}) {list(one.ranks)} {one.data}x{one.tensor}x{one.expert} {list(one.rows)}"
                for one in self.scored.stages
            ],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="the search's score of plans over their compiled step")
    parser.add_argument("--plans", type=int, default=24, help="of each model on each cluster")
    parser.add_argument("--seed", type=int, default=0, help="that they are drawn from")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--keep", type=Path, help="write each plan there")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    found: list[Ratio] = []
    for (model, settings), (name, text) in product(MODELS.items(), CLUSTERS.items()):
        case = f"{model} on {name}"
        if options.only not in case:
            continue
        own = list(ratios(model, settings, text, options.plans, f"{options.seed}:{case}"))
        found += own
        values = sorted(one.value for one in own)
        print(f"{case}: {len(own)} plans, {values[0]:.3f} to {values[-1]:.3f}", file=sys.stderr, flush=True)
        if options.keep:
            with options.keep.open("a") as file:
                file.writelines(json.dumps(one.as_json(case)) + "\n" for one in own)
    options.repeats = 1
    command = f"python benchmarks/search_scores.py --plans {options.plans} --seed {options.seed}"
    report("search_scores", options, summary(found), command=command)


def ratios(name: str, settings: dict[str, Any], text: str, num: int, seed: str) -> Iterator[Ratio]:
    """Plans of a model on a cluster, scored and compiled."""
    cluster = Cluster.parse(text, catalog=device_types())
    path = name if name.startswith("hf:") else f"{EXAMPLES / name}.py:{name}"
    loaded = load_model(path, settings, batch_size=BATCH, device="meta")
    with click.Context(search):
        model = SearchedModel.of(loaded, None, cluster, None, "adamw", (), Options(), rules=False)
    precision = BY_DTYPE.get(model.profile.precision, "fp32")
    problem = Problem(seed=0, number=0, model=path, settings=settings, cluster=text, batch=BATCH, precision=precision)
    makers = Makers.of(model.profile, cluster, SearchSettings(precision=precision), problem)
    for candidate in drawn(makers, random.Random(seed), num):
        if (choice := compiled(candidate, makers, model.trial)) is not None:
            yield Ratio(kind_of(candidate, cluster), candidate, choice)


def drawn(makers: Makers, numbers: random.Random, num: int) -> Iterator[Candidate]:
    """A third of the plans are those that people write down, a third has stages within nodes, a third is random."""
    simple = defaultdict[str, list[list[Mesh]]](list)
    for kind, meshes in simple_meshes(makers):
        simple[kind].append(meshes)
    kinds = list(simple.values())
    made = missed = 0
    while made < num and missed < MOST_MISSED:
        if made % 3 == 0:
            meshes = numbers.choice(numbers.choice(kinds))
        else:
            meshes = within_nodes(makers, numbers) if made % 3 == 1 else random_meshes(makers, numbers)[0]
        candidate = makers.made(meshes, numbers.choice(makers.few_counts(len(meshes))))
        if candidate is None or any(not all(stage.rows) for stage in candidate.stages):
            missed += 1  # impossible, or with replicas that have nothing to do, which the search leaves out
            continue
        made += 1
        yield candidate


def within_nodes(makers: Makers, numbers: random.Random) -> list[Mesh]:
    """Stages each on a node or on an equal part of one, in any order, with any degree that such a part has room for."""
    meshes = []
    for node in makers.cluster.nodes:
        size = numbers.choice([size for size in range(1, len(node.ranks) + 1) if len(node.ranks) % size == 0])
        for first in range(0, len(node.ranks), size):
            ranks = tuple(node.ranks[first : first + size])
            degrees = [degree for degree in makers.prices.tensor_degrees if size % degree == 0]
            meshes.append(Mesh(ranks, numbers.choice(degrees)))
    numbers.shuffle(meshes)
    return meshes[: numbers.randint(2, makers.layers)]


def compiled(candidate: Candidate, makers: Makers, trial: Trial) -> Choice | None:
    """The compiled plan, with its shards as even as the score takes them to be; None if the model cannot be run so."""
    writer = PlanWriter(makers.profile, makers.cluster, makers.batch, trial)
    try:
        choice = writer.with_prediction(writer.written(candidate), trial)
    except UsageError:
        return None
    return choice if choice.compiled else None


def kind_of(candidate: Candidate, cluster: Cluster) -> str:
    """The kind of a plan, for the table."""
    stages = candidate.stages
    experts = any(one.expert > 1 for one in stages)
    across = any(len({cluster.devices[rank].node for rank in one.slice(0)}) > 1 for one in stages)
    split = "experts" if experts else "tensor" if any(one.tensor > 1 for one in stages) else "data"
    where = " across nodes" if across else ""
    if len(stages) == 1:
        return f"one stage, {split}{where}"
    unlike = len({one.degrees for one in stages}) > 1
    return f"stages, {split}{where}" + (", unlike" if unlike else ", alike")


def summary(found: Sequence[Ratio]) -> str:
    """By kind: number of plans, median, spread and both ends of the ratios."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for one in found:
        by_kind[one.kind].append(one.value)
        by_kind[ANY_KIND].append(one.value)
    rows = []
    for kind, values in sorted(by_kind.items(), key=lambda item: (item[0] == ANY_KIND, item[0])):
        off = [abs(log(value)) for value in values]
        rows.append(
            (
                kind,
                str(len(values)),
                f"{statistics.median(values):.3f}",
                f"{statistics.mean(off):.1%}",
                f"{sum(one <= 0.05 for one in off) / len(off):.0%}",
                f"{min(values):.3f}",
                f"{max(values):.3f}",
            )
        )
    return table(("kind", "plans", "median", "mean error", "within 5%", "lowest", "highest"), rows)


if __name__ == "__main__":
    main()
