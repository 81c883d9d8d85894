"""Training on 1,000 to 100,000 devices of up to five types in regions with slow links, on paper.

    python benchmarks/scale.py --write 2026-11-26

For each case a plan is searched in a process of its own, from the profile of a model and a cluster of nodes of
eight, and its step predicted. GPT-3's block (hidden 12288, 96 heads, 2,048 tokens; captured once), 48, 96 and 192 of
them, in fp16 with AdamW, whose states replicas divide (ZeRO 1). `planning` is of the whole process, from its start
until it has the plan: processor time and the most memory. `exposed` is what the busiest rank waits for communication:
collectives in stages, messages, sums of gradients.

Then what failures leave of a run: a device fails once in five years, and its node is back after four hours; a
checkpoint holds training up for 30 s, a restart takes 180 s. Plans for fewer nodes, to which an elastic job changes,
are searched too. The cost is that of all devices at the prices in `DOLLARS` (assumed; they differ by contract).

All is predicted, by the cost model of every other command. With ``--write`` the pictures of docs/scale.md are drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lines import Panel, drawn

from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types
from whale.planner.failures import Failures, Outlook, outlook
from whale.planner.search import Memo, SearchSettings, search
from whale.planner.what_if import only

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
GIB = 2**30
MOST_SECONDS, MOST_BYTES = 60.0, 4 * GIB
SEARCH_SECONDS = 40.0
SIZES = {"layers": 2, "hidden": 12288, "heads": 96, "seq": 2048, "vocab": 51200}
DAY, YEAR = 86400.0, 365.25 * 86400.0

H100, A100, A100_40, V100, L40S = (
    "H100-SXM5-80GB",
    "A100-SXM4-80GB",
    "A100-SXM4-40GB",
    "V100-SXM2-32GB",
    "L40S",
)
DOLLARS = {H100: 2.5, A100: 1.6, A100_40: 1.2, V100: 0.6, L40S: 0.9}
"""Price of an hour of a device, assumed."""
MIXES: Mapping[int, Mapping[str, Mapping[str, float]]] = {
    1: {"north": {H100: 1.0}},
    2: {"north": {H100: 0.5}, "south": {A100: 0.5}},
    5: {"north": {H100: 0.25, A100: 0.25}, "south": {A100_40: 0.2, V100: 0.15}, "east": {L40S: 0.15}},
}
"""Parts of the devices by region and type, by the number of types."""

FAILURES = Failures(mtbf=5 * YEAR, saving=30.0, restart=180.0, repair=4 * 3600.0, node=8)
FEWER = (1, 4, 16)
"""Missing nodes for which an elastic job has plans; fewer where as many are seldom missing."""


SWEEP = (25, 100, 400, 1_600, 6_400, 25_600)
"""Gbit/s out of a region."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Devices of some types in regions, the model's blocks, rows of a step, and the links out of a region."""

    devices: int
    types: int
    blocks: int = 96
    batch: int
    gbit: int = 400
    latency: str = "20 ms"
    fewer: bool = False

    @property
    def name(self) -> str:
        regions = len(MIXES[self.types])
        places = "one region" if regions == 1 else f"{regions} regions, {self.gbit} Gbit/s"
        return f"{self.devices:,} devices of {self.types} type{'s' if self.types > 1 else ''}, {places}"

    def cluster(self) -> str:
        """The cluster file."""
        lines = [
            "[links]",
            'inter_node = {bandwidth = "1600 Gbit/s", latency = "5 us", adapters = 8}',
            f'inter_region = {{bandwidth = "{self.gbit} Gbit/s", latency = "{self.latency}"}}',
        ]
        for region, mix in MIXES[self.types].items():
            for name, share in mix.items():
                count = round(share * self.devices / 8)
                lines.append(f'[[nodes]]\nregion = "{region}"\ncount = {count}\ndevices = 8\ndevice = "{name}"')
        return "\n".join(lines)


def cases() -> list[Case]:
    """Sizes from 1,000 to 100,000 by types, with 0.4 Gbit/s out of a region for each device; and links of other speeds
    between two regions."""
    found = []
    for devices, blocks, batch in ((1_024, 48, 2_048), (10_240, 96, 8_192), (102_400, 192, 32_768)):
        gbit = round(0.4 * devices)
        for types in MIXES:
            found.append(Case(devices=devices, types=types, blocks=blocks, batch=batch, gbit=gbit, fewer=True))
    for gbit in SWEEP:
        found.append(Case(devices=10_240, types=2, batch=8_192, gbit=gbit))
    return found


def deep(profile: ModelProfile, num_blocks: int) -> ModelProfile:
    """The model with a number of blocks."""
    first, block, last = profile.layers[0], profile.layers[1], profile.layers[-1]
    paths = (profile.paths[0], *(f"layers.{index}" for index in range(num_blocks)), profile.paths[-1])
    layers = (first, *(block,) * num_blocks, last)
    return profile.model_copy(update={"layers": layers, "paths": paths, "tied": ()})


# --- a case, in a process of its own ----------------------------------------------------------------------------------


def planned(case: Case, profile_file: Path) -> dict[str, Any]:
    """The best plan of a case, what it took to find it, and what failures leave."""
    profile = deep(ModelProfile.load(profile_file), case.blocks)
    cluster = Cluster.parse(case.cluster(), catalog=device_types())
    settings = SearchSettings(precision="fp16", zero=1, top=1, time_limit=SEARCH_SECONDS)
    known = Memo()
    found = search(profile, cluster, batch=case.batch, settings=settings, known=known)
    spent, most = time.process_time(), most_bytes()
    best = found.best
    prediction = best.prediction
    data: dict[str, Any] = {
        "processor_seconds": spent,
        "bytes": most,
        "step_seconds": prediction.step_seconds,
        "mfu": prediction.mfu,
        "bubble": prediction.bubble,
        "breakdown": dict(prediction.breakdown),
        "gap": found.gap,
        "used": sum(len(stage.ranks) for stage in best.stages),
        "far_sums": sum(spans(cluster, stage.ranks) for stage in best.stages),
        "plan": f"{len(best.stages)} stages, the first of {best.stages[0].data} x {best.stages[0].tensor}, "
        f"{best.micro_batches} micro-batches"
        + "".join(f", {name} {value}" for name, value in parts_of(best.stages[0]) if value not in ("none", 0)),
        "speeds": [],
    }
    nodes = len(cluster.nodes)
    for gone in FEWER if case.fewer else ():
        lost = {round(index * nodes / gone) for index in range(gone)}  # evenly over the types
        kept = (node for index, node in enumerate(cluster.nodes) if index not in lost)
        left = only(cluster, [rank for node in kept for rank in node.ranks])
        try:
            other = search(profile, left, batch=case.batch, settings=settings, known=known)
        except InfeasibleError:
            break
        data["speeds"].append([gone, prediction.step_seconds / other.best.prediction.step_seconds])
    return data


def most_bytes() -> int:
    """The most memory of this process, without that of the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def spans(cluster: Cluster, ranks: Sequence[int]) -> bool:
    """Whether ranks lie in several regions."""
    return len({cluster.node_of(rank).region for rank in ranks}) > 1


def parts_of(stage: Any) -> list[tuple[str, Any]]:
    """The ways in which a stage saves memory."""
    return [("recompute", stage.recompute), ("zero", stage.level), ("offload", stage.offload)]


def run(case: Case, profile_file: Path) -> dict[str, Any]:
    """The result of a case, from a process of its own."""
    index = cases().index(case)
    command = [sys.executable, __file__, "--case", str(index), "--profile", str(profile_file)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- the report -------------------------------------------------------------------------------------------------------


def after_failures(case: Case, data: Mapping[str, Any], spares: int = 0) -> Outlook:
    """The part of a run of a case that failures leave."""
    given = Failures(**{**vars(FAILURES), "spares": spares})
    return outlook(given, case.devices, [(gone, speed) for gone, speed in data["speeds"]])


def exposed(data: Mapping[str, Any]) -> float:
    """The part of a step in which the busiest rank waits for communication."""
    parts = data["breakdown"]
    return sum(parts.get(name, 0.0) for name in ("communication", "transfer", "reduction")) / data["step_seconds"]


def dollars_of_tokens(case: Case, data: Mapping[str, Any], share: float, spares: float = 0.0) -> float:
    """Dollars for a million trained tokens, with a part of the devices more as spares."""
    hour = sum(DOLLARS[name] * part * case.devices for mix in MIXES[case.types].values() for name, part in mix.items())
    tokens = case.batch * SIZES["seq"] / data["step_seconds"] * 3600 * share
    return hour * (1 + spares) / tokens * 1e6


def planning_row(case: Case, data: Mapping[str, Any]) -> tuple[str, ...]:
    met = "yes" if data["processor_seconds"] <= MOST_SECONDS and data["bytes"] <= MOST_BYTES else "no"
    return (
        case.name,
        f"{case.blocks} blocks, {case.batch:,} rows",
        f"{data['processor_seconds']:.1f} s",
        f"{data['bytes'] / GIB:.2f} GiB",
        met,
        f"{data['step_seconds']:.2f} s",
        f"{data['mfu']:.0%}",
        f"{data['bubble']:.0%}",
        f"{exposed(data):.0%}",
        f"{data['plan']}, {data['far_sums']} of them over regions" if len(MIXES[case.types]) > 1 else data["plan"],
    )


def failures_row(case: Case, data: Mapping[str, Any]) -> tuple[str, ...]:
    found, spared = after_failures(case, data), after_failures(case, data, spares=round(case.devices / 8 * 0.01))
    ways = [(found.waiting, 0.0), (found.elastic or 0.0, 0.0), (spared.waiting, 0.01)]
    least = min(dollars_of_tokens(case, data, *way) for way in ways if way[0] > 1e-6)
    return (
        case.name,
        f"{found.mtbf / 3600:.1f} h",
        f"{found.interval / 60:.0f} min",
        f"{found.missing:.2g}",
        f"{found.waiting:.1%}",
        "" if found.elastic is None else f"{found.elastic:.1%}",
        f"{spared.waiting:.1%}",
        f"{least:.2f}",
    )


PLANNING = (
    "case",
    "model, step",
    "planning",
    "memory",
    "60 s, 4 GiB",
    "step",
    "MFU",
    "bubble",
    "exposed",
    "plan",
)
LEFT = (
    "case",
    "a node fails every",
    "checkpoint every",
    "nodes missing",
    "waits for repairs",
    "elastic",
    "1% spare nodes",
    "dollars a million tokens",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results and the pictures, dated so")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(planned(cases()[options.case], options.profile)))
        return
    from harness import report, table  # torch, which a process that plans does without

    from whale.cli.model_loader import load_model
    from whale.strategies.profile import profile_model

    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "gpt.json"
        loaded = load_model("examples/models/gpt.py:gpt", SIZES, device="meta")
        captured = profile_model(loaded.model, loaded.batch, name="gpt", precision="fp16")
        profile.write_text(captured.dumps(), encoding="utf-8")
        found: dict[Case, dict[str, Any]] = {}
        for case in cases():
            if options.only in case.name:
                found[case] = run(case, profile)
                print(planning_row(case, found[case]), file=sys.stderr, flush=True)
    plans = table(PLANNING, [planning_row(case, data) for case, data in found.items()])
    left = table(LEFT, [failures_row(case, data) for case, data in found.items() if case.fewer])
    report("scale", options, f"{plans}\n\nRows per second relative to a run without failures:\n\n{left}")
    if options.write and len(found) == len(cases()):
        draw(found)


# --- the pictures -----------------------------------------------------------------------------------------------------


def draw(found: Mapping[Case, Mapping[str, Any]]) -> None:
    """The pictures of docs/scale.md."""
    sized = {case: data for case, data in found.items() if case.fewer}

    def by_types(value: Any) -> dict[str, list[tuple[float, float]]]:
        lines: dict[str, list[tuple[float, float]]] = {}
        for case, data in sized.items():
            name = f"{case.types} type{'s' if case.types > 1 else ''}"
            lines.setdefault(name, []).append((case.devices, value(case, data)))
        return lines

    (IMAGES / "scale_planning.svg").write_text(
        drawn(
            "How long planning takes",
            "Processor seconds and GiB of memory to plan for 1,000 to 100,000 devices of one to five types.",
            Panel("devices", by_types(lambda _, data: data["processor_seconds"]), "s"),
            Panel("devices", by_types(lambda _, data: data["bytes"] / GIB), "GiB"),
        ),
        encoding="utf-8",
    )
    (IMAGES / "scale_step.svg").write_text(
        drawn(
            "What a step loses",
            "Bubble and exposed communication of the best plan, in percent of the step, over the devices.",
            Panel("devices: bubble", by_types(lambda _, data: 100 * data["bubble"]), "%"),
            Panel("devices: exposed communication", by_types(lambda _, data: 100 * exposed(data)), "%"),
        ),
        encoding="utf-8",
    )
    counts = [256 * 2**step for step in range(10)]
    ways = {
        "waits": lambda devices: outlook(FAILURES, devices).waiting,
        "1% spare": lambda devices: (
            outlook(Failures(**{**vars(FAILURES), "spares": round(devices / 800)}), devices).waiting
        ),
        "elastic": lambda devices: (
            outlook(FAILURES, devices, [(gone, 1 - gone / (devices / 8)) for gone in range(1, 25)]).elastic
        ),
    }
    years = {
        f"{mtbf} years": [
            (
                devices,
                100 * outlook(Failures(**{**vars(FAILURES), "mtbf": mtbf * YEAR, "repair": 0.0}), devices).trained,
            )
            for devices in counts
        ]
        for mtbf in (2, 5, 20)
    }
    (IMAGES / "scale_failures.svg").write_text(
        drawn(
            "What failures leave of a run",
            "Percent of the time that trains, over the devices: with repairs at once, for three times between "
            "failures of a device; and where nodes are back after four hours, for jobs that wait, have spare nodes or "
            "are elastic.",
            Panel("devices: replaced at once", years, "%"),
            Panel(
                "devices: repaired in 4 h",
                {name: [(devices, 100 * way(devices)) for devices in counts] for name, way in ways.items()},
                "%",
            ),
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
