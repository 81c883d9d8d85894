"""Training runs that others have published, as the planner's inputs: model, cluster and configuration of each.

Rows of ``data/published_calibration.csv`` and ``data/published_others.csv`` (whose columns ``source`` and
``confidence`` say where they are from) and the eight runs of Sailor's artifact in ``data/sailor`` (MIT licence, beside
them), with the layer times measured there.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from whale.cli.model_loader import load_model
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.profile import ModelProfile
from whale.planner.catalog import device_types, device_types_with
from whale.planner.cost.calibration import CALIBRATION, Calibration
from whale.planner.cost.configuration import Configuration
from whale.planner.cost.estimate import Estimate, estimate
from whale.planner.network.links import built_in_links
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


SOURCES = {
    "Megatron-LM SC21": "Megatron-LM 2021",
    "Narayanan": "Megatron-LM 2021",
    "Korthikanti": "Korthikanti 2022",
    "MosaicML": "llm-foundry",
    "torchtitan": "torchtitan",
    "NVIDIA DGX": "NVIDIA DGXC",
    "vTrain": "vTrain",
    "Megatron-LM README": "Megatron-LM 2020",
    "Alpa": "Alpa",
    "AMP": "AMP",
    "Sailor": "Sailor",
}
"""Names of the sources, by what stands in the columns ``source``."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run.

    Attributes:
        name, group, source: the run, the group of rows that it is reported with, the paper or repository it is from.
        seconds: measured, of a step.
        memory: measured peak of the fullest device in bytes, where it was reported.
        allocated: whether that is what the allocator reports, without what driver and NCCL take beside it.
        profile, cluster, configuration: what the run is predicted from.
    """

    name: str
    group: str
    source: str
    seconds: float
    memory: float | None = None
    allocated: bool = False
    profile: ModelProfile
    cluster: Cluster
    configuration: Configuration

    def predict(self, calibration: Calibration = CALIBRATION) -> Estimate:
        """The planner's estimate of the run, with its constants or others."""
        return estimate(self.profile, self.cluster, self.configuration, calibration)


def published(models: Models) -> Iterator[Run]:
    """The runs of ``published_calibration.csv``."""
    for row in read("published_calibration.csv"):
        memory = row["target_mem_gb_per_gpu"]
        unit = 2**30 if "GiB" in row["config_note"] else 1e9
        yield Run(
            name=f"{row['id']} {row['model']}",
            group=row["group"],
            source=_source(row["source"]),
            seconds=float(row["target_step_s"]),
            memory=float(memory) * unit if memory else None,
            allocated="torchtitan" in row["source"] or "Alpa" in row["source"],
            profile=models.profile(row),
            cluster=cluster_of(row),
            configuration=configuration_of(row),
        )


def _source(text: str) -> str:
    return next(name for beginning, name in SOURCES.items() if beginning in text)


def others(models: Models) -> Iterator[Run]:
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
        yield Run(
            name=row["id"],
            group=row["group"],
            source=_source(row["source"]),
            seconds=float(row["step_s"]),
            memory=float(row["memory_bytes"]) if row["memory_bytes"] else None,
            allocated=True,
            profile=models.of(row["arch"], settings, whole(row, "tp")),
            cluster=cluster,
            configuration=configuration,
        )


def sailor() -> Iterator[Run]:
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
        yield Run(
            name=f"Sailor {path.stem}",
            group="Sailor, measured layers",
            source="Sailor",
            seconds=run["real"],
            memory=run["max_mem"],
            profile=profile,
            cluster=cluster,
            configuration=configuration,
        )
