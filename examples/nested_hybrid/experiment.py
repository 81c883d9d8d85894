"""An experiment: a model, a batch and a list of nests; and the prediction of each nest on a cluster.

It starts no processes. The file's format is `Experiment`. A nest becomes a plan whose shares follow the speeds of the
cluster file; its prediction comes from the compiled plan and the times of a profile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn

from whale.cli.model_loader import load_model
from whale.compile.compilation import Compilation
from whale.ir.cluster import Cluster
from whale.ir.document import read_document
from whale.ir.plan import Plan
from whale.ir.profile import ModelProfile
from whale.ir.record import Record, read_record
from whale.ir.workload import Prediction, Workload
from whale.predict.costs import Costs
from whale.predict.layer_parts import stage_layers
from whale.predict.prediction import predict
from whale.predict.traffic import Message, call_bytes
from whale.strategies.dry_run import stage_calls


class Nesting(Record):
    """One way to annotate the model: module paths to strategies, outer to inner, as a plan has them."""

    name: str
    annotations: dict[str, str | list[str]]
    micro_batches: int = 1
    schedule: str = "1f1b"


class Experiment(Record):
    """A file of nestings.

    Attributes:
        model: ``file.py:callable``, found from the file's folder, or ``hf:<model_type>``.
        batch: rows of the global batch.
        settings: of the model; *small* ones replace some of them where only parity counts.
        testbed: a description of emulated devices, found from the file's folder.
        nestings: to compare.
    """

    model: str
    batch: int
    settings: dict[str, Any] = Field(default_factory=dict)
    small: dict[str, Any] = Field(default_factory=dict)
    testbed: str = ""
    nestings: tuple[Nesting, ...]


def load(path: Path) -> Experiment:
    """Read an experiment; paths in it become absolute."""
    made = read_record(Experiment, read_document(path))
    found = {"testbed": str(path.resolve().parent / made.testbed)} if made.testbed else {}
    if not made.model.startswith("hf:"):
        found["model"] = str(path.resolve().parent / made.model)
    return made.model_copy(update=found)


def build(experiment: Experiment, *, small: bool = False, device: str = "cpu") -> tuple[nn.Module, Any]:
    """The model and its global batch, the same in every process."""
    torch.manual_seed(0)
    settings = {**experiment.settings, **(experiment.small if small else {})}
    loaded = load_model(experiment.model, settings, batch_size=experiment.batch, device=device)
    return loaded.model, loaded.batch


def plan_of(nesting: Nesting, experiment: Experiment, num_devices: int) -> Plan:
    """The nest as a plan for a number of devices, with shares by speed."""
    return Plan.model_validate(
        {
            "world_size": num_devices,
            "batch": experiment.batch,
            "micro_batches": nesting.micro_batches,
            "schedule": nesting.schedule,
            "annotations": nesting.annotations,
        }
    )


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Prediction of a nest; ``sent_bytes`` are those of all ranks in a step."""

    prediction: Prediction
    workload: Workload
    sent_bytes: float


def simulated(
    compilation: Compilation, plan: Plan, profile: ModelProfile, cluster: Cluster, **options: Any
) -> Simulated:
    """Predict a step of a compiled plan; *options* are those of `whale.predict.prediction.predict`."""
    processors = any(device.type.is_processor for device in cluster.devices)
    costs = Costs(
        profile=profile,
        cluster=cluster,
        precision="fp32",
        micro_batches=plan.micro_batches,
        device="cpu" if processors else "cuda",
    )
    found = predict(compilation, costs, schedule=plan.schedule, **options)
    sent = sent_bytes(compilation, found.workload, gloo=processors)
    return Simulated(prediction=found.prediction, workload=found.workload, sent_bytes=sent)


def parts_of(compilation: Compilation, profile: ModelProfile) -> set[tuple[float, int]]:
    """The fractions of split layers that ranks have, each with the rows of a micro-batch."""
    parts = (part for stage in stage_layers(compilation, profile) for own in stage.parts.values() for part in own)
    return {(part.fraction, part.rows) for part in parts if part.rows}


def sent_bytes(compilation: Compilation, workload: Workload, *, gloo: bool = False) -> float:
    """Bytes that all ranks together send in a step, with the fewest bytes per collective: between stages, in gradient
    reductions, and inside stages, with one dry run for equal ranks. *gloo*'s reduce-scatter sends as much as an
    all-reduce."""
    sends = {"reduce_scatter": "all_reduce"} if gloo else {}
    micro_batches = workload.micro_batches - 1 + workload.last_share
    transfers = [one for boundary in workload.boundaries for one in (*boundary.forward, *boundary.backward)]
    total = micro_batches * sum(one.bytes for one in transfers if one.source != one.target)
    for one in workload.reductions:
        total += len(one.ranks) * _of_a_rank("all_reduce", one.ranks, one.bytes)
    for stage in compilation.stages:
        found = stage_calls(
            compilation.captured,
            stage,
            compilation.rows,
            lambda stage, rank: compilation.local_programs(stage, rank, None),
            -1,
        )
        for index, by_rank in found.items():
            calls = [call for task in by_rank.values() for call in (*task.forward, *task.backward)]
            each = sum(_of_a_rank(sends.get(call.op, call.op), call.ranks, call_bytes(call)) for call in calls)
            total += compilation.rows.count(compilation.rows[index]) * each
    return total


def _of_a_rank(operation: str, ranks: tuple[int, ...], tensor_bytes: int) -> float:
    return Message(purpose="forward", op=operation, ranks=ranks, tensor_bytes=tensor_bytes, count=1).sent_bytes


def to_measure(parts: Iterable[tuple[float, int]], degrees: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Tensor degrees and rows at which to measure layers for the shards of all plans.

    Between two degrees times are taken as linear, so a fraction of 0.4 needs degrees 2 and 3, or the next that there
    are.
    """
    wanted: dict[int, set[int]] = {}
    for fraction, rows in parts:
        below = max(degree for degree in degrees if degree <= 1 / fraction + 1e-9)
        above = min((degree for degree in degrees if degree >= 1 / fraction - 1e-9), default=max(degrees))
        for degree in {below, above}:
            wanted.setdefault(degree, set()).add(rows)
    return [([degree], sorted(rows)) for degree, rows in sorted(wanted.items())]
