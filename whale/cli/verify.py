"""``whale verify``: run a model locally and in parallel on the same global batch, and show how far loss and gradients
differ.

The comparison itself is ``whale.api.verify``; this file loads the model, calls it, and shows what it returns. Started
by ``torchrun -m whale verify ...`` it runs on every rank of the launch, and the first rank prints.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from whale.cli.clusters import load_cluster_and_profile
from whale.cli.model_loader import load_model, parse_settings
from whale.cli.options import AT_LEAST_1, note, offload_option, state_options, verbosity_options
from whale.cli.tables import cell_text, text_table
from whale.errors import UsageError
from whale.ir.strategy import RECOMPUTES

if TYPE_CHECKING:
    from torch import nn

EXIT_NOT_EQUAL = 1


@click.command()
@click.option("--model", "spec", required=True, metavar="SPEC", help="file.py:callable, or hf:<model_type>.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the model; may be repeated.")
@click.option("--batch", "batch_size", type=AT_LEAST_1, metavar="N", help="Samples in the global batch.")
@click.option("--cluster", metavar="FILE", help="A cluster file; without it, the devices of the launch.")
@click.option("--profile", "profile_file", metavar="FILE", help="A profile with device types of the cluster file.")
@click.option("--plan", metavar="FILE", help="A plan file, or 'auto' to search.")
@click.option("--micro-batches", type=AT_LEAST_1, metavar="M", help="Micro-batches in a step.")
@click.option("--schedule", metavar="NAME", help="The pipeline schedule, for example 1f1b.")
@click.option("--replicas", is_flag=True, help="Train some steps, and compare the copies of parameters to the bit.")
@click.option("--steps", type=AT_LEAST_1, metavar="N", help="Steps of --replicas [20].")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="As of parallelize [the plan's].")
@click.option("--gradient-dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="As of parallelize [the plan's].")
@click.option("--recompute", type=click.Choice(("auto", *RECOMPUTES)), help="As of parallelize [the plan's].")
@state_options(None, "the plan's, else 0")
@offload_option(None, "the plan's, else none")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@verbosity_options
def verify(
    spec: str,
    settings: tuple[str, ...],
    batch_size: int | None,
    cluster: str | None,
    profile_file: str | None,
    replicas: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Compare loss and every gradient of the parallel step with the local step.

    On several ranks: torchrun --nproc-per-node 2 -m whale verify --model model.py:build

    With --replicas: train, and show of which parameters ranks with the same part have other bits, as devices that round
    differently would make them.

    Exits with 0 when they agree within the bounds, and with 1 when they do not.
    """
    if how["steps"] is not None and not replicas:
        raise UsageError("--steps is for --replicas; a comparison with the local model is of one step")
    how["cluster"], _ = load_cluster_and_profile(cluster, profile_file)
    parsed = parse_settings(settings)
    loaded = load_model(spec, parsed, batch_size=batch_size)
    from whale import api

    first = os.environ.get("RANK", "0") == "0"
    if first:
        note(f"verifying {loaded.name} on {os.environ.get('WORLD_SIZE', '1')} rank(s)")
        for assumption in loaded.assumptions:
            note(f"assumed: {assumption}")
    given: dict[str, Any] = {name: value for name, value in how.items() if value not in (None, ())}
    compare = api.verify_replicas if replicas else api.verify
    report = as_data(compare(_on_device(loaded.model), loaded.batch, **given))
    if first:
        click.echo(json.dumps(report, indent=2, default=str) if as_json else as_text(report))
    if report.get("passed") is False:
        raise click.exceptions.Exit(EXIT_NOT_EQUAL)


def _on_device(model: nn.Module) -> nn.Module:
    """The model on the device of this rank."""
    from whale.runtime.launch import describe

    return model.to(describe().device)


def as_data(report: Any) -> dict[str, Any]:
    """The report as a mapping, with ``passed`` among its keys where the report has such a property.

    >>> as_data({"passed": True, "loss": 0.5})
    {'passed': True, 'loss': 0.5}
    """
    if isinstance(report, Mapping):
        return dict(report)
    if dataclasses.is_dataclass(report) and not isinstance(report, type):
        data = dataclasses.asdict(report)
    elif hasattr(report, "model_dump"):
        data = report.model_dump(mode="json")
    else:
        data = dict(vars(report))
    if hasattr(report, "passed"):
        data["passed"] = bool(report.passed)
    return data


def as_text(report: Mapping[str, Any]) -> str:
    """Single values as lines, then each list of records or mapping of names as a table of its own."""
    tables = {name: value for name, value in report.items() if _is_table(value)}
    single = {name: value for name, value in report.items() if name not in tables and name != "passed"}
    parts = []
    for name, value in tables.items():
        if isinstance(value, Mapping):
            parts.append(text_table(name, ["name", "value"], [[key, item] for key, item in value.items()]))
        else:
            parts.append(text_table(name, list(value[0]), [list(row.values()) for row in value]))
    if single:
        width = max(len(name) for name in single)
        parts.append(
            "\n".join(f"{name.replace('_', ' '):<{width}}  {cell_text(value)}" for name, value in single.items())
        )
    if "passed" in report:
        what = "copies" if "unlike" in report else "parity"
        parts.append(f"{what}: " + ("ok" if report["passed"] else "NOT EQUAL"))
    return "\n\n".join(parts)


def _is_table(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)
