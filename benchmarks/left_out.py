"""Leave one source out: how far off are predictions of runs from a source that no constant has seen?

``python benchmarks/published.py --left-out`` prints it.

The constants of the planner that published runs decide are listed in `CONSTANTS`, each with what is known of it without
them: a rough value and how far it may be off. For every source (a paper or a repository) they are fitted again, from
those rough values, to the runs of all other sources, and the source's runs are predicted with what that gives. Each
run's interval comes from the errors that the other sources had in the same way, for its kind of run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from published_runs import Run

from whale.planner.cost.calibration import CALIBRATION, Calibration

Array = np.ndarray[Any, np.dtype[np.float64]]

STEP = 0.1
"""By how much a constant is moved, in logarithms, to see what it does."""

SCALE = 0.08
"""Relative error beyond which a run counts less and less in a fit (Huber's loss)."""


MOST_TASKS = 10_000
"""Runs with more tasks on one rank of each stage are left out: each takes seconds to simulate, and a fit does so some
thirty times."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of the planner that published runs decide.

    Attributes:
        name: where it is.
        rough: its value by what is known without these runs.
        spread: how far off that may be, as a standard deviation of its logarithm.
        get: reads it.
        put: the calibration with another value of it.
    """

    name: str
    rough: float
    spread: float
    get: Callable[[Calibration], float]
    put: Callable[[Calibration, float], Calibration]

    @property
    def calibrated(self) -> float:
        """Its value as it is."""
        return self.get(CALIBRATION)


def _of_calibration(name: str, rough: float, spread: float) -> Constant:
    return Constant(
        name=name,
        rough=rough,
        spread=spread,
        get=lambda of: float(getattr(of, name)),
        put=lambda of, value: replace(of, **{name: value}),
    )


def _of_designs(names: Sequence[str], attribute: str, rough: float, spread: float) -> Constant:
    def put(of: Calibration, value: float) -> Calibration:
        changed = {name: replace(of.designs[name], **{attribute: value}) for name in names}
        return replace(of, designs={**of.designs, **changed})

    return Constant(
        name=f"{names[0]} {attribute}",
        rough=rough,
        spread=spread,
        get=lambda of: float(getattr(of.designs[names[0]], attribute)),
        put=put,
    )


def _of_laws(attribute: str, rough: float, spread: float) -> Constant:
    return Constant(
        name=f"laws.{attribute}",
        rough=rough,
        spread=spread,
        get=lambda of: float(getattr(of.laws, attribute)),
        put=lambda of, value: replace(of, laws=replace(of.laws, **{attribute: value})),
    )


HOPPER = ("hopper", "grace-hopper")
CONSTANTS = (
    _of_laws("sustained", 0.9, 0.1),
    _of_designs(("volta",), "tensor_joules", 3.3e-12, 0.25),
    _of_designs(("ampere-80",), "tensor_joules", 1.4e-12, 0.25),
    _of_designs(HOPPER, "tensor_joules", 1.0e-12, 0.25),
    _of_designs(("ampere-80",), "bandwidth", 0.8, 0.1),
    _of_designs(HOPPER, "bandwidth", 0.8, 0.1),
    _of_designs(("ampere-80",), "flash", 0.55, 0.25),
    _of_designs(HOPPER, "flash", 0.55, 0.25),
    _of_designs(HOPPER, "fsdp_matmul", 0.9, 0.15),
    _of_designs(HOPPER, "fsdp_flash", 0.6, 0.25),
    _of_calibration("collective_launch_seconds", 40e-6, 0.7),
    _of_calibration("lockstep_slowdown", 1.2, 0.2),
    _of_calibration("backward_overlap", 0.4, 0.5),
    _of_calibration("sharded_slowdown", 0.5, 0.5),
    _of_designs(tuple(CALIBRATION.designs), "launch", 50e-6, 0.5),
    Constant(
        name="sustained of T4",
        rough=0.75,
        spread=0.3,
        get=lambda of: of.sustained["T4"],
        put=lambda of, value: replace(of, sustained={**of.sustained, "T4": value}),
    ),
)


def constants_at(values: Mapping[str, float]) -> Calibration:
    """The calibration with other constants."""
    found = CALIBRATION
    for one in CONSTANTS:
        if one.name in values:
            found = one.put(found, values[one.name])
    return found


def seconds_of(runs: Sequence[Run], calibration: Calibration = CALIBRATION) -> Array:
    return np.array([run.predict(calibration).prediction.step_seconds for run in runs])


def sensitivities(runs: Sequence[Run], at: Array) -> Array:
    """Derivatives of every run's seconds with respect to every constant, both in logarithms."""
    found = []
    for one in CONSTANTS:
        moved = one.put(CALIBRATION, one.calibrated * float(np.exp(STEP)))
        found.append(np.log(seconds_of(runs, moved) / at) / STEP)
    return np.array(found).T


def fitted(errors: Array, slopes: Array, weights: Array) -> dict[str, float]:
    """The constants that fit the runs best: least squares of the runs' errors, large ones damped, and of the distances
    from the rough values, each by its spread.

    *errors* are logarithms of predicted to measured seconds with the constants as they are.
    """
    now = np.log([one.calibrated / one.rough for one in CONSTANTS])
    spread = np.array([one.spread for one in CONSTANTS])
    moved = np.zeros(len(CONSTANTS))
    for _ in range(50):
        left = errors + slopes @ moved
        damped = weights * np.minimum(1.0, SCALE / np.maximum(np.abs(left), 1e-12)) / SCALE**2
        normal = slopes.T @ (damped[:, None] * slopes) + np.diag(1 / spread**2)
        moved = -np.linalg.solve(normal, slopes.T @ (damped * errors) + now / spread**2)
    return {one.name: one.calibrated * float(np.exp(step)) for one, step in zip(CONSTANTS, moved, strict=True)}


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A run that was predicted without its source.

    Attributes:
        seconds: predicted.
        width: of the interval that is printed: it goes from seconds / (1 + width) to seconds * (1 + width).
    """

    run: Run
    seconds: float
    width: float

    @property
    def error(self) -> float:
        return self.seconds / self.run.seconds - 1

    @property
    def needed(self) -> float:
        """How many times as wide the interval must be to hold what was measured."""
        return (max(self.run.seconds / self.seconds, self.seconds / self.run.seconds) - 1) / self.width


def leave_out(runs: Sequence[Run]) -> tuple[list[LeftOut], dict[str, dict[str, float]]]:
    """Every run predicted with constants that its source did not decide; and those constants, by source left out."""
    measured = np.array([run.seconds for run in runs])
    now = seconds_of(runs)
    errors, slopes = np.log(now / measured), sensitivities(runs, now)
    fits = {"nothing": fitted(errors, slopes, np.ones(len(runs)))}
    found = []
    for source in dict.fromkeys(run.source for run in runs):
        kept = np.array([float(run.source != source) for run in runs])
        fits[source] = fitted(errors, slopes, kept)
        own = [run for run in runs if run.source == source]
        calibration = constants_at(fits[source])
        for run in own:
            prediction = run.predict(calibration).prediction
            width = prediction.step_seconds_interval[1] / prediction.step_seconds - 1
            found.append(LeftOut(run=run, seconds=prediction.step_seconds, width=width))
    return found, fits


def held(found: Sequence[LeftOut], source: str) -> float:
    """The share of a source's runs that lie in intervals whose width the errors of all other sources tell: the printed
    ones, as many times as wide as nine in ten of the others need."""
    needed = sorted(one.needed for one in found if one.run.source != source)
    scale = needed[min(len(needed) - 1, int(np.ceil(0.9 * (len(needed) + 1))) - 1)]
    return statistics.mean(one.needed <= scale for one in found if one.run.source == source)


def table_of_constants(fits: Mapping[str, Mapping[str, float]]) -> str:
    lines = [f"| constant | rough | as it is | {' | '.join(f'without {name}' for name in fits)} |"]
    lines.append("|---" * (len(fits) + 3) + "|")
    for one in CONSTANTS:
        values = [one.rough, one.calibrated, *(fit[one.name] for fit in fits.values())]
        lines.append(f"| {one.name} | {' | '.join(f'{value:.3g}' for value in values)} |")
    return "\n".join(lines)


def table_of_sources(found: Sequence[LeftOut]) -> str:
    lines = [
        "| source left out | runs | mean error | mean absolute error | nine in ten within | in the printed interval |"
    ]
    lines[0] += " in one that the others tell |"
    lines.append("|---" * 7 + "|")
    sources = list(dict.fromkeys(one.run.source for one in found))
    for source in [*sources, "all"]:
        own = [one for one in found if source in (one.run.source, "all")]
        sizes = sorted(abs(one.error) for one in own)
        inside = statistics.mean(one.needed <= 1 for one in own)
        told = statistics.mean(held(found, one.run.source) for one in own)
        lines.append(
            f"| {source} | {len(own)} | {statistics.mean(one.error for one in own):+.1%} | "
            f"{statistics.mean(sizes):.1%} | {sizes[int(0.9 * len(sizes))]:.1%} | {inside:.0%} | {told:.0%} |"
        )
    return "\n".join(lines)


def table_of_farthest(found: Sequence[LeftOut], num: int = 25) -> str:
    lines = [
        f"The {num} that need the widest intervals:",
        "",
        "| run | source | error | interval |",
        "|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda one: -one.needed)[:num]:
        lines.append(f"| {one.run.name} | {one.run.source} | {one.error:+.1%} | {one.width:.0%} |")
    return "\n".join(lines)


def _num_tasks(run: Run) -> int:
    given = run.configuration
    micro_batches = given.batch // (given.micro_batch * (given.data or 1))
    return 2 * micro_batches * given.pipeline * given.virtual_stages


def report(runs: Sequence[Run]) -> str:
    """Constants and errors, by source left out, of the runs that are not too long."""
    found, fits = leave_out([run for run in runs if _num_tasks(run) <= MOST_TASKS])
    return "\n\n".join([table_of_constants(fits), table_of_sources(found), table_of_farthest(found)])
