"""Peak memory of a rank, from dry runs of its step (`whale.predict.dry_step`).

They are of the whole step, or of one micro-batch of a folded stage, to which what the others in flight keep is added:
ranks that do the same run once. Temporary buffers inside operators, allocators and drivers are not included. This
module knows no cluster and no prices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from whale.compile.compilation import Compilation
from whale.compile.unread import unread_bytes
from whale.ir.check import CollectiveCall
from whale.ir.program import Program, project_rank
from whale.ir.schedule import Order, peak_in_flight
from whale.planner.cost.memory import MESSAGES
from whale.planner.cost.optimizers import Optimizer, costs_of, state_elements, temporary_bytes
from whale.planner.schedules.orders import schedule_order
from whale.predict.dry_step import Counted, Device, DryStep, ParameterShape, TaskBytes, splits_backwards
from whale.predict.fingerprint import Fingerprint, fingerprint, sketch
from whale.runtime.random import RNGPosition
from whale.strategies.casts import casts_parameters
from whale.strategies.dry_run import TaskCalls

__all__ = ["Known", "PeakMemory", "brief_peak_memory", "peak_memory"]

_POSITION = RNGPosition(0)
"""Position of all dry runs: programs are recognised as equal only if they share it."""

_SMALL_BYTES = 1024
"""Bytes of the loss, its sum over ranks, and the numbers for comparing batches: a few numbers of 8 bytes."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak memory of a rank by category, and the memory of the tasks of each of its stages.

    ``parameters`` includes buffers of the model, ``activations`` the batch and temporary buffers of operators,
    ``buffers`` messages to and from other ranks. ``host_state`` and ``host_activations`` are in the host's memory: what
    a rank owns there, with gradients and optimizer states, and what forwards keep there. ``tasks`` and ``calls`` are by
    stage: bytes of a micro-batch, and the collectives that ``rank`` makes in the first one.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    tasks: Mapping[int, TaskBytes]
    calls: Mapping[int, TaskCalls]
    host_state: int = 0
    host_activations: int = 0

    @property
    def total(self) -> int:
        """The bytes of the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def peak_memory(
    compilation: Compilation,
    rank: int,
    *,
    schedule: str,
    optimizer: Optimizer = "adamw",
    device: Device = "cpu",
) -> PeakMemory:
    """Peak memory of *rank* in a step, including the optimizer's update.

    Args:
        compilation: of the model for training.
        rank: to measure.
        schedule: of the compilation.
        optimizer: determines the states; gradients are assumed to be freed between steps.
        device: ``cpu``, or ``cuda`` for an accelerator, which need not exist.

    Raises:
        UsageError: an unknown optimizer.
    """
    clock, several = _clock(compilation, device), len(compilation.rows) > 1
    step = DryStep(compilation, rank, device, clock, several=several, optimizer=optimizer)
    step.run(_program(compilation, rank, schedule))
    found = step.found()
    assert found is not None  # nothing is folded
    return _held(found, rank, optimizer, device, Counter(), compilation)


def brief_peak_memory(
    compilation: Compilation,
    rank: int,
    *,
    schedule: str,
    optimizer: Optimizer = "adamw",
    device: Device = "cpu",
    known: Known | None = None,
) -> PeakMemory:
    """Peak memory like `peak_memory`, from a single micro-batch, in a fraction of the time.

    Gradients exist when it begins, as in all micro-batches except the first; those of the only one are made in it. The
    saved activations of the other micro-batches in flight are added, and their messages are extrapolated from its own.
    *known* caches results for compilations of the same captured model: ranks with equal fingerprints run once.
    """
    first, known = compilation.of_first, Known() if known is None else known
    clock = _clock(compilation, device)
    program = first.program(rank)
    like = sketch(first, rank, program, clock)
    differ = bool(compilation.units) or compilation.step_in_backward or casts_parameters(compilation.captured)
    several, alone = differ and len(compilation.rows) > 1, len(compilation.rows) == 1
    options = _Options(device, several, alone, optimizer if compilation.step_in_backward else "none")
    key = options, like.description
    if key not in known.sketched:
        known.sketched[key] = like, _found(first, rank, clock, program, known, options)
    found = _renamed(*known.sketched[key], like)
    most = compilation.most_in_flight
    kept = sum((most[stage] - 1) * task.kept for stage, task in found.tasks.items())
    messages = (min(MESSAGES, len(compilation.rows)) - 1) * found.at_peak["buffers"]
    return _held(found, rank, optimizer, device, Counter(activations=kept, buffers=messages), compilation)


def _clock(compilation: Compilation, device: Device) -> RNGPosition | None:
    """The position by which random operators draw, as in the executor's step. A single rank with a single micro-batch
    draws as the local model does. Without one, what an accelerator's kernels keep is counted, which is more: the cost
    model prices these."""
    alone = len(compilation.rows) == 1 and len({r for stage in compilation.stages for r in stage.mesh.ranks}) == 1
    return None if alone or (device != "cpu" and not compilation.computes_again) else _POSITION


class _Options(NamedTuple):
    """Options of a dry run: the device, whether there are several micro-batches where that matters to the run, whether
    there is one, and the optimizer that steps in the backward, if it does."""

    device: Device
    several: bool
    alone: bool
    optimizer: Optimizer


def _found(
    compilation: Compilation,
    rank: int,
    clock: RNGPosition | None,
    program: Program,
    known: Known,
    options: _Options,
) -> Counted:
    """Result of a single micro-batch, unless a rank with an equal fingerprint is known."""
    short = compilation.folded if _can_be_folded(compilation, program) else compilation
    like = fingerprint(short, rank, program, clock)
    key = options, like.description
    if key not in known.runs:
        known.runs[key] = like, _brief((short, compilation), rank, clock, program, options)
    return _renamed(*known.runs[key], like)


def _brief(
    compilations: Iterable[Compilation],
    rank: int,
    clock: RNGPosition | None,
    program: Program,
    options: _Options,
) -> Counted:
    """Dry-run a single micro-batch of the first of equal compilations whose omitted layers can be replayed."""
    for compilation in compilations:
        device, several, alone, optimizer = options
        step = DryStep(compilation, rank, device, clock, several=several, optimizer=optimizer)
        step.run(program, begin=step.expect_gradients if alone else step.hold_gradients)
        if (found := step.found()) is not None:
            return found
    raise AssertionError("nothing is omitted from the last")


_Results = dict[Hashable, tuple[Fingerprint, Counted]]


@dataclass(frozen=True)
class Known:
    """Results of ranks: of those that were run by their fingerprints, and of all by their sketches."""

    runs: _Results = field(default_factory=dict)
    sketched: _Results = field(default_factory=dict)


def _renamed(one: Fingerprint, found: Counted, other: Fingerprint) -> Counted:
    """Result of one rank, translated to another with an equal fingerprint."""
    stages = dict(zip(one.stages, other.stages, strict=True))
    groups = dict(zip(one.groups, other.groups, strict=True))

    def of(calls: Iterable[CollectiveCall]) -> tuple[CollectiveCall, ...]:
        return tuple(call._replace(ranks=groups[call.ranks]) for call in calls)

    return replace(
        found,
        tasks={stages[stage]: task for stage, task in found.tasks.items()},
        calls={
            stages[stage]: TaskCalls(forward=of(calls.forward), backward=of(calls.backward))
            for stage, calls in found.calls.items()
        },
    )


def _held(
    found: Counted,
    rank: int,
    optimizer: Optimizer,
    device: Device,
    more: Counter[str],
    compilation: Compilation,
) -> PeakMemory:
    """Result of a dry run, with *more* bytes at its peak."""
    most_in_flight, in_backward = compilation.most_in_flight, compilation.step_in_backward
    at_peak = found.at_peak + more
    sizes = [prod(one.shape) * one.item for one in found.trained if not one.sparse]
    update = 0 if in_backward else temporary_bytes(optimizer, sizes, processor=device == "cpu")
    if found.after.total() + update > at_peak.total():
        at_peak = found.after + Counter(activations=update)
    return PeakMemory(
        rank=rank,
        parameters=at_peak["parameters"] + unread_bytes(compilation, rank),
        gradients=at_peak["gradients"],
        optimizer=_states(optimizer, found.trained),
        activations=at_peak["activations"] + _SMALL_BYTES,
        buffers=at_peak["buffers"] + at_peak["sums"],
        tasks=found.tasks,
        calls=found.calls,
        host_state=sum((2 - one.sparse) * prod(one.shape) * one.item for one in found.on_host)
        + _states(optimizer, found.on_host),
        host_activations=sum(most_in_flight[stage] * task.hosted for stage, task in found.tasks.items()),
    )


def _states(optimizer: Optimizer, trained: Sequence[ParameterShape]) -> int:
    """Bytes of an optimizer's states for parameters; of one with a sparse gradient a number for each row."""
    own = sum((one.shape[0] if one.sparse else state_elements(optimizer, one.shape)) * one.item for one in trained)
    return own + costs_of(optimizer).counter_bytes * len(trained)


def _can_be_folded(compilation: Compilation, program: Program) -> bool:
    """Whether what is left out of a folded step can be replayed: not what it does with units that are gathered or
    summed layer by layer, with the optimizer's states and with the host's memory, nor backwards in two parts."""
    by_layer = any(unit.on_host or unit.spec.each or unit.spec.gathers == "task" for unit in compilation.units)
    is_other = by_layer or compilation.step_in_backward or compilation.offloads_activations
    return not (is_other or splits_backwards(program))


def _program(compilation: Compilation, rank: int, schedule: str) -> Program:
    """The rank's program, shortened if there are many micro-batches and the micro-batches in flight repeat."""
    order = _short(compilation, schedule)
    return project_rank(
        order, compilation.rank_specs, compilation.edges, compilation.reduces, rank, compilation.gathers
    )


def _short(compilation: Compilation, schedule: str) -> Order:
    """The order of the fewest micro-batches with as many in flight as in the whole step.

    With messages some more are needed, because these are freed a few tasks after they were sent: twice the credit,
    which is the number of micro-batches in flight, and two. So are two with sums in every micro-batch.
    """
    most = compilation.most_in_flight
    depth = max(2, *most.values())
    more = depth + 3 if compilation.edges else 2 * any(spec.each for spec in compilation.reduces)
    sets = tuple(frozenset(stage.mesh.ranks) for stage in compilation.stages)
    for count in range(depth, len(compilation.rows) - more if len(set(compilation.rows)) == 1 else 0):
        if peak_in_flight(schedule_order(schedule, len(compilation.stages), count, sets)) == most:
            return schedule_order(schedule, len(compilation.stages), count + more, sets)
    return compilation.order
