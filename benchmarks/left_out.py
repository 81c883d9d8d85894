"""Leave one source out: how far off are predictions of runs from a source that no constant has seen?

``python benchmarks/published.py --left-out`` prints it.

The constants of the planner that published runs decide are listed in `CONSTANTS`, each with what is known of it without
them: a rough value and how far it may be off. For every source (a paper or a repository) they are fitted again, from
those rough values, to the runs of all other sources, and the source's runs are predicted with what that gives. Each
run's interval comes from the errors that the other sources had in the same way, for its kind of run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
from published_runs import Run

from whale.planner.cost import layer_cost, layers, plan, silicon, stage

Array = np.ndarray[Any, np.dtype[np.float64]]

STEP = 0.1
"""By how much a constant is moved, in logarithms, to see what it does."""

SCALE = 0.08
"""Relative error beyond which a run counts less and less in a fit (Huber's loss)."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of the planner that published runs decide.

    Attributes:
        name: where it is.
        rough: its value by what is known without these runs.
        spread: how far off that may be, as a standard deviation of its logarithm.
        get, put: read and replace it.
    """

    name: str
    rough: float
    spread: float
    get: Callable[[], float]
    put: Callable[[float], None]


def _of_module(module: ModuleType, name: str, rough: float, spread: float) -> Constant:
    return Constant(
        name=f"{module.__name__.rsplit('.', 1)[-1]}.{name}",
        rough=rough,
        spread=spread,
        get=lambda: float(getattr(module, name)),
        put=lambda value: setattr(module, name, value),
    )


def _of_designs(names: Sequence[str], attribute: str, rough: float, spread: float) -> Constant:
    def put(value: float) -> None:
        changed = {name: replace(silicon.DESIGNS[name], **{attribute: value}) for name in names}
        silicon.DESIGNS = {**silicon.DESIGNS, **changed}  # type: ignore[misc]
        silicon._silicon.cache_clear()

    return Constant(
        name=f"{names[0]} {attribute}",
        rough=rough,
        spread=spread,
        get=lambda: float(getattr(silicon.DESIGNS[names[0]], attribute)),
        put=put,
    )


def _of_laws(attribute: str, rough: float, spread: float) -> Constant:
    def put(value: float) -> None:
        silicon.LAWS = replace(silicon.LAWS, **{attribute: value})  # type: ignore[misc]

    return Constant(
        name=f"laws.{attribute}",
        rough=rough,
        spread=spread,
        get=lambda: float(getattr(silicon.LAWS, attribute)),
        put=put,
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
    _of_designs(HOPPER, "eager_matmul", 0.9, 0.15),
    _of_designs(HOPPER, "eager_flash", 0.6, 0.25),
    _of_module(layers, "COLLECTIVE_LAUNCH_SECONDS", 40e-6, 0.7),
    _of_module(layers, "LOCKSTEP_SLOWDOWN", 1.2, 0.2),
    _of_module(stage, "BACKWARD_OVERLAP", 0.4, 0.5),
    _of_module(plan, "SHARDED_SLOWDOWN", 0.5, 0.5),
    _of_designs(tuple(silicon.DESIGNS), "launch", 50e-6, 0.5),
    Constant(
        name="layer_cost.SUSTAINED of T4",
        rough=0.75,
        spread=0.3,
        get=lambda: layer_cost.SUSTAINED["T4"],
        put=lambda value: layer_cost.SUSTAINED.update(T4=value),
    ),
)


@contextmanager
def constants_at(values: Mapping[str, float]) -> Iterator[None]:
    """The planner with other constants."""
    before = {one.name: one.get() for one in CONSTANTS}
    try:
        for one in CONSTANTS:
            one.put(values.get(one.name, before[one.name]))
        yield
    finally:
        for one in CONSTANTS:
            one.put(before[one.name])


def seconds_of(runs: Sequence[Run]) -> Array:
    return np.array([run.predict().prediction.step_seconds for run in runs])


def sensitivities(runs: Sequence[Run], at: Array) -> Array:
    """Derivatives of every run's seconds with respect to every constant, both in logarithms."""
    found = []
    for one in CONSTANTS:
        with constants_at({one.name: one.get() * np.exp(STEP)}):
            found.append(np.log(seconds_of(runs) / at) / STEP)
    return np.array(found).T


def fitted(errors: Array, slopes: Array, weights: Array) -> dict[str, float]:
    """The constants that fit the runs best: least squares of the runs' errors, large ones damped, and of the distances
    from the rough values, each by its spread.

    *errors* are logarithms of predicted to measured seconds with the constants as they are.
    """
    now = np.log([one.get() / one.rough for one in CONSTANTS])
    spread = np.array([one.spread for one in CONSTANTS])
    moved = np.zeros(len(CONSTANTS))
    for _ in range(50):
        left = errors + slopes @ moved
        damped = weights * np.minimum(1.0, SCALE / np.maximum(np.abs(left), 1e-12)) / SCALE**2
        normal = slopes.T @ (damped[:, None] * slopes) + np.diag(1 / spread**2)
        moved = -np.linalg.solve(normal, slopes.T @ (damped * errors) + now / spread**2)
    return {one.name: one.get() * float(np.exp(step)) for one, step in zip(CONSTANTS, moved, strict=True)}


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
        with constants_at(fits[source]):
            for run in own:
                prediction = run.predict().prediction
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
        values = [one.rough, one.get(), *(fit[one.name] for fit in fits.values())]
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


def report(runs: Sequence[Run]) -> str:
    """Constants and errors, by source left out."""
    found, fits = leave_out(runs)
    return "\n\n".join([table_of_constants(fits), table_of_sources(found), table_of_farthest(found)])
