"""How well does ``whale estimate`` tell the training runs that others have published?

    python benchmarks/published.py                       # every run, groups of runs, layers, memory
    python benchmarks/published.py --keep /tmp/profiles  # profiles of the models are kept there
    python benchmarks/published.py --left-out            # and each source with constants that it did not decide

Predicts, through the code of ``whale estimate``, the runs of `published_runs`, the layer times of
``data/layer_times.csv`` and the memory of ``data/activation_memory.csv``. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from published_runs import GPUS, Models, Run, others, published, read, sailor, whole

from whale.ir.cluster import Cluster
from whale.planner.catalog import device_types
from whale.planner.cost.configuration import Configuration
from whale.planner.cost.estimate import estimate


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


def predicted(runs: list[Run]) -> list[Point]:
    """Predictions of runs. Memory that an allocator reports is compared without driver and NCCL."""
    return [_point(run) for run in runs]


def _point(run: Run) -> Point:
    prediction = run.predict().prediction
    seconds = prediction.step_seconds
    parts = [
        f"{part} {spent / seconds:.0%}"
        for part, spent in prediction.breakdown.items()
        if spent > 0.005 * seconds and part != "compute"
    ]
    return Point(
        name=run.name,
        group=run.group,
        measured=run.seconds,
        predicted=seconds,
        measured_bytes=run.memory,
        predicted_bytes=max(device.total - run.allocated * device.framework for device in prediction.memory)
        if run.memory
        else None,
        breakdown=", ".join(parts),
    )


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
    """Saved activations of the first stage's blocks at the peak."""
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
    parser.add_argument("--left-out", action="store_true", help="leave each source out in turn as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = Models(arguments.keep)
    sets = [list(published(models)), list(sailor()), list(others(models))]
    points = [predicted(runs) for runs in sets]
    for found in points:
        print(table(found), "\n")
        print(groups(found), "\n")
        print(summary(found), "\n")
    print(summary([point for found in points for point in found]), "\n")
    print(table(list(layers(models))), "\n")
    print("| memory | reported | predicted | error |\n|---|---|---|---|")
    for name, reported, told in activations(models):
        print(f"| {name} | {reported:.2f} | {told:.2f} | {told / reported - 1:+.1%} |")
    if arguments.left_out:
        from left_out import report

        print("\n" + report([run for runs in sets for run in runs]))


if __name__ == "__main__":
    main()
