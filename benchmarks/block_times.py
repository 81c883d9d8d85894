"""Predicted against measured kernel times of one Llama block, for every card and with each card left out in turn.

    python benchmarks/block_times.py                  # the constants as they are, then each card left out
    python benchmarks/block_times.py --data FILE      # other measurements with the same columns, constants as they are
    python benchmarks/block_times.py -o RESULT.md     # write the tables there too

A row is a forward and a backward of one block on one device: kernels alone, no recomputation, no optimizer, gradients
added up in float32. ``gpu`` is a name of a device type of the catalog, as `whale.ir.device_names` reads it; where it
leaves the form open, the SXM card is taken. A card that is left out is predicted from its data sheet, with the
constants of `whale.planner.cost.Laws` fitted to the other cards from rough values. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whale.cli.model_loader import load_model
from whale.ir.cluster import DeviceType
from whale.ir.device_names import matching_types
from whale.ir.profile import LayerKind
from whale.planner.catalog import device_types
from whale.planner.cost.calibration import CALIBRATION, Calibration
from whale.planner.cost.layers import layer_seconds_by_rows
from whale.planner.cost.precision import precision_named
from whale.planner.cost.silicon import Laws
from whale.strategies.profile import profile_model

HERE = Path(__file__).parent
DATA = HERE / "data" / "layer_times_by_gpu.csv"
LLAMA = f"{HERE.parent / 'examples' / 'models' / 'llama.py'}:llama"

Array = np.ndarray[Any, np.dtype[np.float64]]

ROUGH = Laws(
    sustained=0.9,
    vector=0.95,
    wide=0.75,
    transposed=0.9,
    converted=0.9,
    vector_joules=6.0,
    bandwidth=0.8,
    memory_efficient=0.3,
    vector_attention=0.4,
)
"""The constants as they are known without these measurements, to about `SPREAD`."""

SPREAD = 0.15
"""Standard deviation of the logarithms of the constants around their rough values."""

SCALE = 0.15
"""Relative error beyond which a row counts less and less in a fit."""

FITTED = (
    "sustained", "vector", "wide", "transposed", "converted", "vector_joules", "bandwidth", "memory_efficient",
    "vector_attention", "joules",
)  # fmt: skip


@dataclass(frozen=True)
class Series:
    """Rows that differ in the micro-batch alone.

    Attributes:
        gpu: as the file names it.
        measured: seconds, [row, forward and backward].
    """

    gpu: str
    device: DeviceType
    precision: str
    block: tuple[int, int, int, int]
    rows: tuple[float, ...]
    measured: Array

    def errors(self, laws: Laws = CALIBRATION.laws) -> Array:
        """Predicted over measured seconds, less one, [row, forward and backward]."""
        spent = layer_seconds_by_rows(
            block(*self.block),
            self.device,
            self.rows,
            precision=self.precision,
            calibration=Calibration(laws=laws),
        )
        kernels = [(one.forward - one.forward_slack, one.backward - one.backward_slack) for one in spent]
        found: Array = np.array(kernels) / self.measured - 1
        return found


@cache
def block(hidden: int, ffn: int, heads: int, seq: int) -> LayerKind:
    """A block of that size, as captured."""
    settings = {"layers": 3, "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": heads, "seq": seq, "vocab": 1024}
    loaded = load_model(LLAMA, settings, batch_size=4, device="meta")
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=[1], name="llama")
    return profile.kinds[profile.layers[len(profile.layers) // 2]]


def read(path: Path) -> list[Series]:
    """The measurements of a file, by all that a micro-batch leaves alike."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(line for line in file if not line.startswith("#")))
    alike: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for line in lines:
        alike[tuple(line[name] for name in ("gpu", "precision", "hidden", "ffn", "heads", "seq"))].append(line)
    return [
        Series(
            gpu=gpu,
            device=device_named(gpu),
            precision=precision_named(precision).name,
            block=(int(hidden), int(ffn), int(heads), int(seq)),
            rows=tuple(float(line["micro_batch"]) for line in own),
            measured=np.array([(float(line["forward_ms"]), float(line["backward_ms"])) for line in own]) / 1e3,
        )
        for (gpu, precision, hidden, ffn, heads, seq), own in alike.items()
    ]


@cache
def device_named(name: str) -> DeviceType:
    """The device type of a name; of several that it may mean, the one on an SXM board, else the first."""
    types = device_types()
    found = matching_types(name, {known: type_.memory_bytes for known, type_ in types.items()})
    if not found:
        raise SystemExit(f"{name}: no device type of the catalog has that name")
    chosen = next((known for known in found if "SXM" in known), found[0])
    if len(found) > 1:
        print(f"{name}: taken for {chosen}, of {', '.join(found)}", file=sys.stderr)
    return types[chosen]


# --- fitting ----------------------------------------------------------------------------------------------------------


def moved(logarithms: Array) -> Laws:
    """The rough laws, each constant times the exponential of its logarithm."""
    factors = {name: getattr(ROUGH, name) * float(np.exp(by)) for name, by in zip(FITTED, logarithms, strict=True)}
    return replace(ROUGH, **factors)


def fitted(series: Sequence[Series]) -> Laws:
    """The laws that fit the rows best, every card with the same weight: damped least squares of the logarithms of
    predicted over measured seconds and of the distances from the rough values, by Gauss-Newton."""
    counts = {gpu: sum(len(one.rows) for one in series if one.gpu == gpu) for gpu in {one.gpu for one in series}}
    weights = np.concatenate([np.full(2 * len(one.rows), 100 / counts[one.gpu]) for one in series])

    def logarithms(at: Array) -> Array:
        laws = moved(at)
        return np.log1p(np.concatenate([one.errors(laws).ravel() for one in series]))

    at, step = np.zeros(len(FITTED)), 0.02
    for _ in range(5):
        now = logarithms(at)
        slopes = np.stack([(logarithms(at + step * one) - now) / step for one in np.eye(len(at))], axis=1)
        damped = weights * np.minimum(1.0, SCALE / np.maximum(np.abs(now), 1e-12)) / SCALE**2
        normal = slopes.T @ (damped[:, None] * slopes) + np.eye(len(at)) / SPREAD**2
        at = at - np.clip(np.linalg.solve(normal, slopes.T @ (damped * now) + at / SPREAD**2), -0.3, 0.3)
    return moved(at)


# --- tables -----------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Sequence[tuple[Series, Array]]]) -> str:
    """Rows, mean error and mean absolute error of forward, backward and both, by card and precision."""
    lines = ["| card | precision | rows | forward: bias | error | backward: bias | error | both: bias | error |"]
    lines.append("|---" * 9 + "|")
    for gpu, own in found.items():
        names = sorted({series.precision for series, _ in own})
        for name in [*names, "all"] if len(names) > 1 else names:
            errors = np.concatenate([error for series, error in own if name in (series.precision, "all")])
            lines.append(f"| {gpu} | {name} | {len(errors)} | {_cells(errors)} |")
    every = np.concatenate([error for own in found.values() for _, error in own])
    lines.append(f"| all | | {len(every)} | {_cells(every)} |")
    return "\n".join(lines)


def _cells(errors: Array) -> str:
    parts = [errors[:, 0], errors[:, 1], errors]
    return " | ".join(f"{part.mean():+.1%} | {np.abs(part).mean():.1%}" for part in parts)


def by_card(series: Sequence[Series], laws: Laws = CALIBRATION.laws) -> dict[str, list[tuple[Series, Array]]]:
    found: dict[str, list[tuple[Series, Array]]] = defaultdict(list)
    for one in sorted(series, key=lambda one: one.gpu):
        found[one.gpu].append((one, one.errors(laws)))
    return dict(found)


def left_out(series: Sequence[Series]) -> tuple[dict[str, list[tuple[Series, Array]]], str]:
    """Every card predicted with laws that the others decide; and those laws, as a table."""
    found: dict[str, list[tuple[Series, Array]]] = {}
    laws = {"as it is": CALIBRATION.laws, "rough": ROUGH}
    for gpu in sorted({one.gpu for one in series}):
        laws[f"without {gpu}"] = fitted([one for one in series if one.gpu != gpu])
        found |= by_card([one for one in series if one.gpu == gpu], laws[f"without {gpu}"])
    lines = [f"| constant | {' | '.join(laws)} |", "|---" * (len(laws) + 1) + "|"]
    for name in FITTED:
        lines.append(f"| {name} | {' | '.join(f'{getattr(one, name):.3g}' for one in laws.values())} |")
    return found, "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FILE", help="other measurements; no card is left out")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the tables there too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    series = read(arguments.data or DATA)
    parts = ["## With the constants as they are", table(by_card(series))]
    if arguments.data is None:
        found, constants = left_out(series)
        parts += ["## With each card left out", table(found), "## The constants", constants]
    text = "\n\n".join(parts)
    print(text)
    if arguments.output:
        arguments.output.write_text(f"# Kernel times of a Llama block\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
