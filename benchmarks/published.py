"""Error of ``whale estimate`` on published training runs.

    python benchmarks/published.py                       # every run, then a table of the groups
    python benchmarks/published.py --keep /tmp/profiles  # profiles of the models are kept there
    python benchmarks/published.py --others              # 147 more runs

Predicts, through the code of ``whale estimate``, the rows of ``data/published_calibration.csv`` (whose columns
``source`` and ``confidence`` say where they are from), the eight runs of Sailor's artifact in ``data/sailor`` (MIT
licence, beside them) from the layer times measured there, the layer times of ``data/layer_times.csv`` and the memory of
``data/activation_memory.csv``. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from whale.cli.model_loader import load_model
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.profile import ModelProfile
from whale.planner.catalog import built_in_links, device_types, device_types_with
from whale.planner.cost.configuration import Configuration
from whale.planner.cost.estimate import Estimate, estimate
from whale.planner.profile_import import import_sailor

HERE = Path(__file__).parent
DATA = HERE / "data"
MODELS = HERE.parent / "examples" / "models"

GPUS = {
    "A100-80": "A100-SXM4-80GB",
    "A100-40": "A100-SXM4-40GB",
    "H100-SXM": "H100-SXM5-80GB",
    "H100-SXM-96HBM2e-500W": "H100-SXM5-96GB-HBM2e-500W",
    "V100-32-DGX2": "V100-SXM3-32GB (DGX-2)",
    "V100-16": "V100-SXM2-16GB",
    "T4": "T4",
    "GH200-96": "GH200-96GB",
}

NETWORKS = (
    ("8x HDR200", 200e9, 8),
    ("8xHDR200", 200e9, 8),
    ("1600 Gbps", 200e9, 8),
    ("IB 800 Gbps", 100e9, 4),
    ("8x400", 400e9, 8),
    ("8x NDR400", 400e9, 8),
    ("400 Gbps/GPU", 400e9, 8),
    ("25 Gbps Ethernet", 25e9 / 8, 1),
    ("AWS 50 Gbps", 50e9 / 8, 1),
    ("Slingshot", 100e9, 4),
)
"""Network between nodes of a row: bytes per second of a node, adapters. Assumed for the A100s of torchtitan, which does
not state it: 8 x 200 Gbit/s."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run, or a part of one, with what was measured and what is predicted."""

    name: str
    group: str
    measured: float
    predicted: float
    measured_bytes: float | None = None
    predicted_bytes: float | None = None
    breakdown: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float | None:
        if self.measured_bytes is None or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes - 1


# --- the rows of published_calibration.csv ----------------------------------------------------------------------------


def read(name: str) -> list[dict[str, str]]:
    with open(DATA / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def whole(row: dict[str, str], column: str, default: int = 1) -> int:
    return int(float(row[column])) if row[column] else default


def cluster_of(row: dict[str, str]) -> Cluster:
    """The machines of a row, with what it says of their links; devices that a row does not fill are left out."""
    type_ = device_types()[GPUS[row["gpu_type"]]]
    network = next((n for n in NETWORKS if n[0] in row["interconnect_inter"]), ("", 200e9, 8))
    slow = network[1] < 10e9
    inter = Link(bandwidth=network[1], latency=30e-6 if slow else 5e-6, adapters=network[2])
    num = whole(row, "num_gpus")
    intra = type_.intra_node
    if intra and 1 < num < whole(row, "gpus_per_node"):  # a part of a node: of a cube of links only those between these
        kind = built_in_links()[type_.name][0]
        share = kind.share_of_links(num, whole(row, "gpus_per_node")) / kind.share_of_links(num, num)
        intra = Link(bandwidth=intra.bandwidth * share, latency=intra.latency)
    given = re.search(r"NVLink (\d+) GB/s \(4 GPUs\)", row["interconnect_intra"])
    if given:
        intra = Link(bandwidth=float(given[1]) * 1e9, latency=3e-6)
    return Cluster.homogeneous(
        num, type_, num_devices_per_node=min(num, whole(row, "gpus_per_node")), intra=intra, inter=inter
    )


def configuration_of(row: dict[str, str]) -> Configuration:
    """The degrees of a row. Where it does not say whether it recomputes, it does not; sequence parallelism that it
    does not state is left to the planner."""
    zero = re.search(r"ZeRO-(\d)", row["zero_or_fsdp"])
    recompute = row["recompute"].split()[0]
    bounds = re.search(r"boundaries \(.*?\) \[([\d, ]+)\]", row["config_note"])
    stages = re.search(r"layer items per stage ([\d,]+)", row["config_note"])
    layers = None
    if bounds and whole(row, "pp") > 1:  # of 30 items, of which the model's layers are 24: the outer ones are none
        ends = [min(max(int(end) - 3, 0), whole(row, "layers")) for end in bounds[1].split(",")]
        layers = tuple(after - before for before, after in pairwise(ends))
    elif stages and whole(row, "pp") > 1:
        layers = tuple(int(count) for count in stages[1].split(","))
        layers = (layers[0] - 1, *layers[1:-1], layers[-1] - 1)  # with embedding and head
    return Configuration(
        batch=whole(row, "global_batch"),
        micro_batch=whole(row, "micro_batch"),
        tensor=whole(row, "tp"),
        pipeline=whole(row, "pp"),
        data=whole(row, "dp"),
        context=whole(row, "cp"),
        expert=whole(row, "ep"),
        virtual_stages=whole(row, "virtual_pp"),
        recompute="none" if recompute == "unstated" else recompute,  # type: ignore[arg-type]
        zero=int(zero[1]) if zero else 0,
        sequence_parallel={"yes": True, "no": False}.get(row["seq_parallel"]),
        precision="tf32" if "TF32" in row["precision"] else row["precision"].split()[0].split("/")[0],
        layers_per_stage=layers,
    )


class Models:
    """Profiles of the models in examples/models, captured once."""

    def __init__(self, keep: Path | None) -> None:
        self.keep = keep
        self.known: dict[str, ModelProfile] = {}

    def profile(self, row: dict[str, str]) -> ModelProfile:
        settings = {"layers": "layers", "hidden": "hidden", "ffn": "ffn_hidden", "heads": "heads", "seq": "seq"}
        if row["arch"] != "gpt":
            settings["kv_heads"] = "kv_heads"
        settings["vocab"] = "vocab"
        return self.of(row["arch"], {name: whole(row, column) for name, column in settings.items()}, whole(row, "tp"))

    def of(self, name: str, settings: dict[str, Any], tensor: int) -> ModelProfile:
        key = "_".join([name, *(f"{setting}{value}" for setting, value in settings.items()), f"tp{tensor}"])
        if key in self.known:
            return self.known[key]
        path = self.keep / f"{key}.json" if self.keep else None
        if path and path.exists():
            found = ModelProfile.load(path)
        else:
            from whale.strategies.profile import profile_model

            loaded = load_model(f"{MODELS / name}.py:{name}", settings, batch_size=4, device="meta")
            degrees = sorted({1, tensor})
            found = profile_model(loaded.model, loaded.batch, tensor_degrees=degrees, name=name)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(found.dumps(), encoding="utf-8")
        self.known[key] = found
        return found


def published(models: Models) -> Iterator[Point]:
    for row in read("published_calibration.csv"):
        found = estimate(models.profile(row), cluster_of(row), configuration_of(row))
        memory = row["target_mem_gb_per_gpu"]
        unit = 2**30 if "GiB" in row["config_note"] else 1e9
        yield _point(
            f"{row['id']} {row['model']}",
            row["group"],
            float(row["target_step_s"]),
            found,
            float(memory) * unit if memory else None,
            allocated="torchtitan" in row["source"] or "Alpa" in row["source"],
        )


def _point(
    name: str, group: str, measured: float, found: Estimate, memory: float | None, *, allocated: bool = False
) -> Point:
    """*allocated*: the memory is what the allocator reports, without what driver and NCCL take beside it."""
    seconds = found.prediction.step_seconds
    parts = [
        f"{part} {spent / seconds:.0%}"
        for part, spent in found.prediction.breakdown.items()
        if spent > 0.005 * seconds and part != "compute"
    ]
    return Point(
        name=name,
        group=group,
        measured=measured,
        predicted=seconds,
        measured_bytes=memory,
        predicted_bytes=max(device.total - allocated * device.framework for device in found.prediction.memory)
        if memory
        else None,
        breakdown=", ".join(parts),
    )


def others(models: Models) -> Iterator[Point]:
    """The runs of ``published_others.csv``."""
    for row in read("published_others.csv"):
        type_ = device_types()[row["gpu"]]
        inter = None
        if row["network_gbit"]:
            adapters = whole(row, "adapters")
            inter = Link(bandwidth=adapters * float(row["network_gbit"]) / 8 * 1e9, latency=5e-6, adapters=adapters)
        cluster = Cluster.homogeneous(
            whole(row, "num_gpus"),
            type_,
            num_devices_per_node=whole(row, "gpus_per_node"),
            intra=type_.intra_node,
            inter=inter,
        )
        configuration = Configuration(
            batch=whole(row, "global_batch"),
            micro_batch=whole(row, "micro_batch"),
            tensor=whole(row, "tp"),
            pipeline=whole(row, "pp"),
            data=whole(row, "dp"),
            context=whole(row, "cp"),
            virtual_stages=whole(row, "virtual_pp"),
            recompute=row["recompute"],  # type: ignore[arg-type]
            zero=int(row["zero"]),
            sequence_parallel=True if row["seq_parallel"] else None,
            precision=row["precision"],
        )
        sizes = ("layers", "hidden", "ffn", "heads", "seq", "kv_heads", "vocab")
        settings = {name: int(row[name]) for name in sizes if row[name]}
        found = estimate(models.of(row["arch"], settings, whole(row, "tp")), cluster, configuration)
        memory = float(row["memory_bytes"]) if row["memory_bytes"] else None
        yield _point(row["id"], row["group"], float(row["step_s"]), found, memory, allocated=True)


# --- Sailor's runs ----------------------------------------------------------------------------------------------------


def sailor() -> Iterator[Point]:
    """Its eight runs, from its own layer times: devices in the order of the replicas, each of a stage."""
    profile = import_sailor(DATA / "sailor")
    types = device_types_with(profile)
    for path in sorted((DATA / "sailor" / "runs").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        pipeline = run["pipeline_list"][0]
        stages = pipeline["tmp_per_stage"]
        tensor, data = stages[0][0][1], pipeline["dp"][0]
        devices: list[tuple[str, DeviceType]] = []
        nodes = 0
        for stage in stages:
            for members, _ in stage:
                for name, count, _ in members:
                    devices += [(f"node{nodes}", types[name])] * count
                    nodes += 1
        mixed = len({type_.name for _, type_ in devices}) > 1
        cluster = Cluster.of(
            devices,
            intra=Link(bandwidth=16e9 if mixed else 150e9, latency=5e-6),
            inter=Link(bandwidth=0.125e9 if mixed else 100e9, latency=30e-6, adapters=1 if mixed else 4),
        )
        configuration = Configuration(
            batch=run["gbs"],
            micro_batch=run["mbs"],
            tensor=tensor,
            pipeline=len(stages),
            data=data,
            precision="tf32",
            layers_per_stage=tuple(len(layers) for layers in pipeline["layers_per_stage"]),
        )
        found = estimate(profile, cluster, configuration)
        yield _point(f"Sailor {path.stem}", "Sailor, measured layers", run["real"], found, run["max_mem"])


# --- layers, and the memory of activations ----------------------------------------------------------------------------


def layers(models: Models) -> Iterator[Point]:
    """Single layers of the 22B model: a model of two layers less one of one is a layer."""
    for row in read("layer_times.csv"):
        settings = {"hidden": whole(row, "hidden"), "ffn": 4 * whole(row, "hidden"), "heads": whole(row, "heads")}
        settings |= {"seq": whole(row, "seq"), "vocab": 51200}
        what = row["experiment"]
        configuration = Configuration(
            batch=whole(row, "micro_batch"),
            micro_batch=whole(row, "micro_batch"),
            tensor=whole(row, "tp"),
            precision="fp16",
            recompute="full" if "full" in what else "selective" if "selective" in what else "none",
            sequence_parallel="sequence" in what,
        )
        type_ = device_types()[GPUS[row["gpu"]]]
        cluster = Cluster.homogeneous(whole(row, "tp"), type_, intra=type_.intra_node)
        works = []
        for count in (2, 3):
            found = estimate(models.of("gpt", {"layers": count, **settings}, whole(row, "tp")), cluster, configuration)
            works.append(found.workload.stages[0])
        forward, backward = (getattr(works[1], way)[0] - getattr(works[0], way)[0] for way in ("forward", "backward"))
        name = f"{row['model']}, {what}"
        yield Point(name=f"{name}: forward", group="layers", measured=float(row["forward_ms"]) / 1e3, predicted=forward)
        yield Point(
            name=f"{name}: backward", group="layers", measured=float(row["backward_ms"]) / 1e3, predicted=backward
        )


def activations(models: Models) -> Iterator[tuple[str, float, float]]:
    """The rows of activation_memory.csv: name, reported, predicted.

    States are those of the blocks of a middle stage (the source leaves embeddings out), activations those of the blocks
    of the first stage.
    """
    for row in read("activation_memory.csv"):
        settings = {"layers": whole(row, "layers"), "hidden": whole(row, "hidden"), "heads": whole(row, "heads")}
        settings |= {"seq": 2048, "vocab": 51200}
        ways = _ways(row["quantity"] + " " + (row["recompute"] if row["unit"] == "%" else ""))
        predicted = activation_bytes(models, row, settings, *ways)
        if row["quantity"].startswith("params"):
            predicted = state_bytes_of(models, row, settings)
        if row["unit"] == "%":
            predicted *= 100 / activation_bytes(models, row, settings, "none", False)
        else:
            predicted /= 2**30
        yield f"{row['model']} {row['quantity']} {row['recompute']}", float(row["value"]), predicted


def _ways(text: str) -> tuple[str, bool]:
    sequence = "sequence" in text or "SP" in text or "seq-" in text
    return "full" if "full" in text else "selective" if "selective" in text else "none", sequence


def activation_bytes(
    models: Models, row: dict[str, str], settings: dict[str, int], recompute: str, sequence: bool
) -> float:
    """Bytes of saved activations of the first stage's blocks at the peak."""
    from whale.planner.cost.memory import kept_bytes
    from whale.planner.cost.precision import precision_named

    tensor, pipeline, virtual = whole(row, "tp"), whole(row, "pp"), whole(row, "virtual_pp")
    profile = models.of("gpt", settings, tensor)
    block = profile.kinds[profile.layers[len(profile.layers) // 2]]
    kept = kept_bytes(
        block,
        tensor_degree=tensor,
        precision=precision_named("fp16"),
        fused_attention=False,
        recompute=recompute,  # type: ignore[arg-type]
        sequence_parallel=sequence,
    )
    in_flight = 1 + (pipeline - 1) / (pipeline * virtual) if virtual > 1 else 1
    return kept(whole(row, "micro_batch")) * whole(row, "layers") * in_flight


def state_bytes_of(models: Models, row: dict[str, str], settings: dict[str, int]) -> float:
    """Weights, gradients and optimizer states of the blocks of a stage."""
    from whale.planner.cost.memory import state_bytes
    from whale.planner.cost.precision import precision_named

    profile = models.of("gpt", settings, whole(row, "tp"))
    block = profile.kinds[profile.layers[len(profile.layers) // 2]]
    own = next(one for one in block.variants if one.tensor_degree == whole(row, "tp"))
    parameters = own.parameters * whole(row, "layers") / whole(row, "pp")
    return state_bytes(parameters, precision=precision_named("fp16")).total


# --- tables -----------------------------------------------------------------------------------------------------------


def table(points: list[Point]) -> str:
    lines = ["| run | group | measured | predicted | error | memory | where the time goes beside computing |"]
    lines.append("|---|---|---|---|---|---|---|")
    for point in points:
        memory = (
            "" if point.memory_error is None else f"{point.memory_error:+.0%} of {point.measured_bytes / 1e9:.1f} GB"
        )
        cells = [point.name, point.group, _time(point.measured), _time(point.predicted), f"{point.error:+.1%}"]
        lines.append(f"| {' | '.join([*cells, memory, point.breakdown])} |")
    return "\n".join(lines)


def groups(points: list[Point]) -> str:
    lines = ["| group | runs | mean error | mean absolute error |", "|---|---|---|---|"]
    for group in dict.fromkeys(point.group for point in points):
        errors = [point.error for point in points if point.group == group]
        lines.append(
            f"| {group} | {len(errors)} | {statistics.mean(errors):+.1%} | {statistics.mean(map(abs, errors)):.1%} |"
        )
    return "\n".join(lines)


def summary(points: list[Point]) -> str:
    errors = [abs(point.error) for point in points]
    memory = [abs(point.memory_error) for point in points if point.memory_error is not None]
    errors.sort()
    text = f"{len(errors)} runs: mean absolute error of step time {statistics.mean(errors):.1%}, median "
    text += f"{statistics.median(errors):.1%}, nine in ten within {errors[int(0.9 * len(errors))]:.1%}"
    if memory:
        text += f"; memory ({len(memory)}): {statistics.mean(memory):.1%}"
    return text


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 0.1 else f"{seconds * 1e3:.4g} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the profiles of models there")
    parser.add_argument("--others", action="store_true", help="the runs of published_others.csv instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = Models(arguments.keep)
    if arguments.others:
        more = list(others(models))
        print(table(more), "\n")
        print(groups(more), "\n")
        print(summary(more))
        return
    runs = list(published(models))
    print(table(runs), "\n")
    print(groups(runs), "\n")
    print(summary(runs), "\n")
    measured = list(sailor())
    print(table(measured), "\n")
    print(summary(measured), "\n")
    print(summary(runs + measured), "\n")
    print(table(list(layers(models))), "\n")
    print("| memory | reported | predicted | error |\n|---|---|---|---|")
    for name, reported, predicted in activations(models):
        print(f"| {name} | {reported:.2f} | {predicted:.2f} | {predicted / reported - 1:+.1%} |")


if __name__ == "__main__":
    main()
