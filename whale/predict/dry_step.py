"""A rank's step without data or other ranks: the memory of the step by category, and of each of its tasks.

The executor runs the rank's program, with fake tensors, the kernels of the device, a dry transport, and a counter of
live storages. So saved activations, receives, sends and reductions are not modelled but result from the code itself.
Temporary buffers inside operators, allocators and drivers are not included. This module knows no cluster and no prices.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from whale.compile.assembly import assemble
from whale.compile.compilation import Compilation
from whale.compile.rank_step import RankStep, rank_step
from whale.graph.values import has_sparse_gradient, value_tensor
from whale.ir.check import CollectiveCall
from whale.ir.program import Compute, Program
from whale.planner.cost.optimizers import Optimizer, temporary_bytes
from whale.predict.live_memory import LiveMemory, memory_of
from whale.predict.replay import OF_GRADIENTS, Event, Log, Replay, marked
from whale.runtime.at_host import counted_apart
from whale.runtime.by_autograd import ByAutograd
from whale.runtime.collectives import DryGroup
from whale.runtime.failure import Failures
from whale.runtime.host import copied_by
from whale.runtime.local_program import with_codes
from whale.runtime.owned import GradientSlot, HeldUnit
from whale.runtime.random import RNGPosition
from whale.runtime.reduce import Reducer
from whale.runtime.stage import LocalStage
from whale.strategies.casts import cast_once, casts_parameters
from whale.strategies.derivatives import with_derivatives
from whale.strategies.dry_run import TaskCalls
from whale.strategies.folding import Fold
from whale.strategies.fused import accelerated, fused
from whale.strategies.gathering import gathered
from whale.strategies.offloading import offloaded

__all__ = ["Counted", "Device", "DryStep", "ParameterShape", "TaskBytes", "splits_backwards"]

Device = Literal["cpu", "cuda"]
"""Device whose kernels run, and its optimizer implementation. Tensors are always on the CPU, because other devices need
a driver."""


@dataclass(frozen=True, kw_only=True)
class TaskBytes:
    """Memory of one micro-batch on one stage: saved activations, the peak of each task beyond what existed before it,
    and activations that its forward copies to the host."""

    kept: int
    forward_peak: int
    backward_peak: int
    hosted: int = 0


class ParameterShape(NamedTuple):
    """The shape of a parameter, bytes of its elements, and whether its gradient is sparse."""

    shape: tuple[int, ...]
    item: int
    sparse: bool = False


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Result of a dry run: bytes by category at the peak and after the last backward, shapes and bytes of an element of
    each trained parameter on the device, in the model's order, and on the host, and the memory and calls of the tasks
    of each stage."""

    at_peak: Counter[str]
    after: Counter[str]
    trained: tuple[ParameterShape, ...]
    on_host: tuple[ParameterShape, ...]
    tasks: Mapping[int, TaskBytes]
    calls: Mapping[int, TaskCalls]


def splits_backwards(program: Program) -> bool:
    """Whether backwards are in two parts."""
    return any(isinstance(task, Compute) and task.kind == "I" for task in program)


def _runs_graphs(compilation: Compilation, program: Program, data: RankStep, batch: Mapping[str, Tensor]) -> bool:
    """Whether a dry run needs the graphs of backwards: autograd keeps other values, and no copies of parts of the
    *batch*."""
    is_other = compilation.computes_again or compilation.offloads_activations or compilation.step_in_backward
    casts = compilation.is_of_several and casts_parameters(compilation.captured)
    copies = any(one.parts_with_gaps(batch) for stage in data.stages for one in stage.programs)
    return splits_backwards(program) or is_other or casts or copies or bool(compilation.units)


def _without_data(device: Device) -> AbstractContextManager[Any]:
    """Run operators on shapes only: those of processors with fake tensors, which show what a processor's kernels save;
    those of accelerators in the mode that counts (`LiveMemory`), with substitutes for fused kernels (`accelerated`)."""
    return nullcontext() if device == "cuda" else FakeTensorMode(allow_non_fake_inputs=True)


class _Nobody:
    """A transport whose messages complete immediately."""

    def __init__(self, live: LiveMemory) -> None:
        self.live = live

    def isend(self, tensor: Tensor, peer: int, group: Any) -> _Done:
        if self.live.is_new(tensor):  # a copy made for the message
            self.live.mark(tensor, "buffers")
        return _Done()

    def irecv(self, tensor: Tensor, peer: int, group: Any) -> _Done:
        self.live.mark(tensor, "buffers")
        return _Done()

    def all_reduce(self, tensor: Tensor, **options: Any) -> _Done:
        if self.live.purpose_of(tensor) != "gradients":
            self.live.mark(tensor, "sums")
        return _Done()

    def gather_single(self, whole: Tensor, part: Tensor, **options: Any) -> _Done:
        for tensor in (whole, part):
            if self.live.purpose_of(tensor):  # it is not on the host
                self.live.mark(tensor, "sums")
        return _Done()


class _AloneOnProcessors(DryGroup):
    """A group of gloo without other ranks: it sums a copy of what it then scatters (torch, ProcessGroupGloo.cpp)."""

    def note(self, op: str, x: Tensor, *shapes: Sequence[int], beside: bool = False) -> None:
        super().note(op, x, *shapes, beside=beside)
        if op == "reduce_scatter":
            torch.empty_like(x)


class _Taker:
    """A reducer, or none, that says which gradients of graphs get a place or are ready (``happens``), and logs none of
    the buckets that are then made or reduced, which are not the layer's."""

    def __init__(self, reducer: Reducer | None, log: Log, happens: Callable[[str, Any], None]) -> None:
        self._reducer, self._log, self._happens = reducer, log, happens

    def place(self, parameter: Any) -> Tensor | None:
        if self._reducer is None:
            return None
        self._happens("place", parameter)
        paused, self._log.paused = self._log.paused, True
        place = self._reducer.place(parameter)
        self._log.paused = paused
        return place

    def gradient_ready(self, parameter: Any) -> None:
        self._happens("ready", parameter)
        self._log.paused = True
        if self._reducer is not None:
            self._reducer.gradient_ready(parameter)
        self._log.paused = False


class _Done:
    def wait(self, timeout: Any = None) -> bool:
        return True


class DryStep:
    """One rank's step on tensors without data, to be run once.

    Args:
        compilation: of the model for training; layers that are folded are replayed.
        rank: that runs it.
        device: whose kernels run.
        clock: position by which random operators draw; without one, what they keep is counted.
        several: whether micro-batches came before this one.
        optimizer: that steps in the backward; ``none`` if it steps afterwards.
    """

    def __init__(
        self,
        compilation: Compilation,
        rank: int,
        device: Device,
        clock: RNGPosition | None,
        *,
        several: bool,
        optimizer: Optimizer = "none",
    ) -> None:
        self.compilation, self.rank, self.device, self.clock = compilation, rank, device, clock
        self.several, self.optimizer = several, optimizer
        self.place = torch.device("meta" if self.device == "cuda" else "cpu")
        self.live = LiveMemory(fake=self.device == "cpu")
        self.parameters: dict[str, nn.Parameter] = {}
        self.tensors: dict[tuple[str, Any], Any] = {}
        self.units: list[HeldUnit] = []
        self.in_flight: list[Tensor] = []
        self.batch: dict[str, Any] = {}
        self.noting = _Noting()
        self._replays: list[Replay] = []
        self._reducer: Reducer | None = None
        self._holders: dict[str, Any] = {}
        """To what backwards add gradients, by the name of the parameter: itself, or the slot of one that is divided."""
        self._names: dict[Any, str] = {}
        self._assembled: Any = None
        """The step that has run: what it keeps for the next one is there when an optimizer updates parameters."""
        self._without_data = _without_data(self.device)
        with self._without_data:
            self._make()

    def _make(self) -> None:
        """Everything that exists before the step: parameters, buffers, constants and the whole batch."""
        captured = self.compilation.captured
        read = (node for node in captured.graph.nodes if node.op == "placeholder" and node.name in captured.parameters)
        self.sparse = {captured.parameters[node.name] for node in read if has_sparse_gradient((node, 0))}
        units = [unit for unit in self.compilation.units if self.rank in unit.spec.ranks]
        divided = {name for unit in units for name in unit.names}
        for name, part in self.compilation.local_parameters(self.rank).items():
            if name in divided:
                continue
            blank = torch.empty(part.shape, dtype=part.dtype, device=self.place)
            self.parameters[name] = nn.Parameter(blank, requires_grad=part.trainable)
            if name in self.compilation.tables_on_host:
                self.live.leave_out(self.parameters[name])
            else:
                self.live.add(self.parameters[name], "parameters")
            if part.trainable:
                self.parameters[name].register_post_accumulate_grad_hook(partial(self._accumulated, name))
        self.tensors = {("parameter", name): parameter for name, parameter in self.parameters.items()}
        for unit in units:
            group = DryGroup("", unit.spec.ranks, [])
            held = _DryUnit(unit, self.rank, {}, self.place, group, group, Failures(self.rank))
            held.live = self.live
            if not unit.on_host:
                self.live.add(held.own, "parameters")
            else:
                self.live.leave_out(held.own)
                for whole in held.kept_parameters():
                    self.live.add(whole, "parameters")
            self.units.append(held)
            self.tensors["unit", unit.spec.index] = held
            self.tensors |= {("gradient", name): slot for name, slot in held.slots.items()}
        for node in captured.graph.nodes:
            if node.op != "placeholder" or not isinstance(node.meta.get("val"), Tensor):
                continue
            kind = value_tensor((node, 0))
            if node.name in captured.parameters:
                continue
            tensor = torch.empty(kind.shape, dtype=kind.dtype, device=self.place)
            if node.name in captured.inputs:
                self.batch[captured.inputs[node.name]] = tensor
                self.live.add(tensor, "activations")
            elif node.name in captured.buffers:
                self.tensors["buffer", captured.buffers[node.name]] = tensor
                self.live.add(tensor, "parameters")
            else:
                self.tensors["constant", node.name] = tensor
                self.live.add(tensor, "parameters")

    def hold_gradients(self, of: Callable[[str], bool] = lambda name: True) -> None:
        """Create the gradients that exist when a micro-batch begins which is not the first, *of* parameters with some
        names: of what ranks divide, their sums if these are made in every micro-batch; not sparse ones, which have some
        rows."""
        if self.compilation.step_in_backward and not self.several:
            return  # the only micro-batch
        for total in self._reducer.resume() if self._reducer is not None else ():
            self.live.mark(total, "gradients")
        slots = [slot for held in self.units if not held.unit.spec.each for slot in held.slots.values()]
        whole = (name for name, p in self.parameters.items() if p.requires_grad and name not in self.sparse)
        holders: list[Any] = [self.parameters[name] for name in whole if of(name)]
        for holder in holders + slots * self.several:
            place = None if self._reducer is None else self._reducer.place(holder)
            if place is None:
                place = torch.empty(holder.shape, dtype=holder.dtype, device=self.place)
            holder.grad = place
            self.live.mark(place, "gradients")
        for held in [held for held in self.units if held.unit.spec.each][-2:]:  # sums in flight
            received = 0 if len(held.bounds) == 2 else len(held.bounds) - 2 if self.device == "cpu" else 1
            size = held.bounds[-1] + received * held.own.numel()
            self.in_flight.append(torch.empty(size, dtype=held.unit.dtype, device=self.place))
            self.live.mark(self.in_flight[-1], "sums")

    def expect_gradients(self) -> None:
        """Create gradients of the only micro-batch that its dry run does not make, or not all of those of a layer:
        theirs where layers are left out. Each counts from where the first in its memory is made."""
        around = [_container(names) for replay in self._replays for names in replay.parameters.items()]
        self.hold_gradients(lambda name: any(name.startswith(path) for path in around))
        for parameter in self.parameters.values():
            if parameter.grad is not None and self.live.purpose_of(parameter.grad):
                self.live.expect(memory_of(parameter.grad))

    def _happened(self, what: str, holder: Any) -> None:
        """Log what happens to a gradient that is made by a graph."""
        self.live.log.add(what, self._names[holder])
        if what == "ready":
            self._came(holder)

    def _came(self, parameter: Any) -> None:
        """Count the memory of a gradient from here on."""
        if parameter.grad is not None and not parameter.grad.is_sparse:
            self.live.come(memory_of(parameter.grad))

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        self.live.log.add("ready", name)
        self._came(parameter)
        self.live.log.paused = True  # reductions that start now are not the layer's
        if parameter.grad is not None and name not in self.compilation.tables_on_host:
            self.live.mark(parameter.grad, "gradients")

    def _resume(self, parameter: Tensor) -> None:
        self._came(parameter)
        self.live.log.paused = False

    def run(self, program: Program, begin: Callable[[], None] = lambda: None) -> None:
        """Run a program of the rank; *begin* is called before its first task."""
        data = self._step(program)
        with self._without_data:
            self._run(program, data, begin)

    def _step(self, program: Program) -> RankStep:
        """The data of the step: with derivatives if autograd keeps other values than these."""
        data = rank_step(self.compilation, self.rank, program, self.clock)
        if not _runs_graphs(self.compilation, program, data, self.batch):
            return data
        placed = {stage.index: stage for stage in self.compilation.stages}
        captured = self.compilation.captured
        named = captured.device  # operators name it; here nothing is computed
        stages = []
        for stage in data.stages:
            programs = {id(one): fused(one) if self.device == "cuda" else one for one in stage.programs}
            own = [programs[id(one)] for one in stage.programs]
            own = with_derivatives(
                captured, placed[stage.index], self.rank, own, named, in_parts=splits_backwards(program)
            )
            if self.compilation.is_of_several:
                own = cast_once(own, {name for unit in data.units for name in unit.names})
            own = gathered(own, data.units)
            if placed[stage.index].activations_on_host:
                own = offloaded(own)
            stages.append(replace(stage, programs=tuple(own)))
        return replace(data, stages=tuple(stages))

    def _run(self, program: Program, data: RankStep, begin: Callable[[], None]) -> None:
        self.noting = _Noting(program)
        self.noting.live, self.noting.called, self.noting.begin = self.live, [], begin
        self.noting.in_flight = self.in_flight
        alone = _AloneOnProcessors if self.device == "cpu" else DryGroup
        step = assemble(
            data,
            self.rank,
            tensors=self.tensors,
            clock=self.clock or RNGPosition(0),
            bridge_group=lambda ranks: alone("", ranks, self.noting.called) if len(ranks) > 1 else None,
            reduce_group=lambda ranks: object() if len(ranks) > 1 else None,
            failures=Failures(self.rank),
            device=self.place,
            transport=_Nobody(self.live),
            credit=0 if self.device == "cuda" else None,
        )
        self._assembled = step
        self._reducer = step.executor.reducer
        if not _runs_graphs(self.compilation, program, data, self.batch):
            needs = {s: [edge.needs_grad for edge in edges] for s, edges in step.executor.entering.items()}
            step.executor.stages = {s: ByAutograd(one, needs[s]) for s, one in step.executor.stages.items()}
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._resume)
        order = {stage.index: stage.nodes for stage in self.compilation.stages if self.rank in stage.mesh.ranks}
        self._holders = {**self.parameters, **{name: slot for held in self.units for name, slot in held.slots.items()}}
        self._names = {holder: name for name, holder in self._holders.items()}
        for index, stage in zip(order, step.stages, strict=True):
            if folds := self.compilation.folds.get(index):
                replays = [(fold, self._replay(fold)) for fold in folds]
                stage.programs = [marked(stage.programs[0], replays, order[index])]
            stage.programs = with_codes(stage.programs, lambda code: replace(code, runs_once=True))
            stage.taker = _Taker(self._reducer, self.live.log, self._happened)
        if self.device == "cuda" and not _runs_graphs(self.compilation, program, data, self.batch):
            for stage in step.stages:
                programs = {id(program): accelerated(program) for program in stage.programs}
                stage.programs = [programs[id(program)] for program in stage.programs]
        step.executor.programs[True] = self.noting
        with warnings.catch_warnings(), copied_by(self._on_host), counted_apart(self.live.elsewhere), self.live:
            warnings.simplefilter("ignore")
            sums = [torch.empty(shape, dtype=dtype, device=self.place) for shape, dtype in data.sums.likes]
            for stage in step.stages:
                stage.begin(self.batch, sums)
                stage.prepare()  # earlier steps did
            casts = [self._casts_of_omitted(stage) for stage in step.stages]
            step.executor.run(True, update=self._update if self.compilation.step_in_backward else None)
            casts.clear()
            for stage in step.stages:
                stage.finish()

    def _casts_of_omitted(self, stage: LocalStage) -> list[Tensor]:
        """The casts that a stage makes once a step of the parameters of omitted layers."""
        sources = (one for program in stage.programs for one in program.micro_batch.sources)
        return [
            torch.empty_like(self.parameters[other], dtype=what[1])
            for kind, what in dict.fromkeys(sources)
            if kind == "cast"
            for replay in self._replays
            for other in replay.parameters.get(what[0], ())
        ]

    def _update(self, parameters: Sequence[Tensor]) -> None:
        """Make what an optimizer makes and drops in a step for parameters."""
        held = (x for x in parameters if x.grad is not None and self.live.purpose_of(x))
        ready = {id(x) for x in held if x.grad is not None and not x.grad.is_sparse}
        sizes = [x.numel() * x.element_size() for x in self._trained().values() if id(x) in ready]
        size = temporary_bytes(self.optimizer, sizes, processor=self.device == "cpu")
        torch.empty(size, dtype=torch.uint8, device=self.place)

    def _on_host(self, like: Tensor) -> Tensor:
        """Memory of the host for a tensor."""
        with self.live.elsewhere():
            found = torch.empty_like(like)
        self.noting.hosted += found.untyped_storage().nbytes()
        return found

    def _replay(self, fold: Fold) -> Replay:
        """The replay of the layers that a fold leaves out."""
        name = self.compilation.parameter_name
        replay = Replay(
            omitted=fold.omitted,
            parameters={name(value): tuple(map(name, others)) for value, others in fold.parameters.items()},
            log=self.live.log,
            calls=self.noting.called,
            happens=self._happens,
        )
        self._replays.append(replay)
        return replay

    def _happens(self, event: Event) -> None:
        """Repeat an event in an omitted layer."""
        if event[0] not in OF_GRADIENTS:
            self.live.happens(*event)
            return
        holder, reducer = self._holders[event[1]], self._reducer
        place = None if reducer is None or holder.grad is not None else reducer.place(holder)
        if event[0] == "place":
            return
        if isinstance(holder, GradientSlot) and holder.grad is None:
            holder.grad = place
        self._came(holder)
        if reducer is not None:
            reducer.gradient_ready(holder)

    def found(self) -> Counted | None:
        """Result of the run; None if the layers of a fold were not equal."""
        for replay in self._replays:
            replay.finish()
        if any(replay.failed for replay in self._replays):
            return None
        there = [
            ParameterShape(tuple(parameter.shape), parameter.element_size())
            for held in self.units
            if held.unit.on_host
            for parameter in held.parameters.values()
        ]
        tables = self.parameters.keys() & self.compilation.tables_on_host
        there += [
            ParameterShape(tuple(self.parameters[name].shape), self.parameters[name].element_size(), sparse=True)
            for name in sorted(tables)
        ]
        at_peak = self.live.at_peak.copy()
        for parameter in self._trained().values():  # what backwards and sums have left for the optimizer
            if parameter.grad is not None and not parameter.grad.is_sparse and self.live.purpose_of(parameter.grad):
                self.live.mark(parameter.grad, "gradients")
        return Counted(
            at_peak=at_peak,
            after=self.live.by_purpose.copy(),
            trained=tuple(
                ParameterShape(tuple(x.shape), x.element_size(), name in self.sparse)
                for name, x in self._trained().items()
            ),
            on_host=tuple(there),
            tasks=self.tasks(),
            calls=self.calls(),
        )

    def _trained(self) -> dict[str, Tensor]:
        """The parameters on the device that an optimizer updates, in its order: the model's."""
        hosted = self.compilation.tables_on_host
        trained: dict[str, Tensor] = {n: x for n, x in self.parameters.items() if x.requires_grad and n not in hosted}
        for held in self.units:
            if not held.unit.on_host:
                trained |= held.parameters
        return {name: trained[name] for name in self.compilation.local_parameters(self.rank) if name in trained}

    def tasks(self) -> dict[int, TaskBytes]:
        """Memory of the tasks of each stage: the maximum over micro-batches."""
        noted = self.noting.noted
        return {
            stage: TaskBytes(
                kept=noted["kept", stage],
                forward_peak=noted["F", stage],
                backward_peak=noted["B", stage],
                hosted=noted["hosted", stage],
            )
            for stage in {stage for _, stage in noted}
        }

    def calls(self) -> dict[int, TaskCalls]:
        """The collectives of each stage in the first micro-batch."""
        calls = self.noting.calls
        return {
            stage: TaskCalls(forward=tuple(calls["F", stage]), backward=tuple(calls.get(("B", stage), ())))
            for kind, stage in calls
            if kind == "F"
        }


def _container(alike: tuple[str, Sequence[str]]) -> str:
    """The path up to the module that holds layers with parameters that are *alike*, with its dot; empty if they have
    none in common.

    >>> _container(("decoder.layers.4.up.weight", ("decoder.layers.2.up.weight", "decoder.layers.3.up.weight")))
    'decoder.layers.'
    """
    name, others = alike
    parts = zip(*(one.split(".") for one in (name, *others)), strict=False)
    return "".join(f"{part}." for part, *rest in takewhile(lambda same: len(set(same)) == 1, parts))


class _DryUnit(HeldUnit):
    """A unit whose tensors on the host have no data and are not counted."""

    live: LiveMemory | None = None

    def _on_host(self, size: int) -> Tensor:
        if self.live is None:
            return self._empty(size)
        with self.live.elsewhere():
            return self._empty(size)


class _Noting(tuple[Any, ...]):
    """A program that records the memory and calls of each of its tasks while it is executed."""

    live: LiveMemory
    called: list[CollectiveCall]
    begin: Callable[[], None]
    in_flight: list[Tensor]
    hosted: int
    """Bytes that the task has copied to the host."""

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        self.noted: Counter[tuple[str, int]] = Counter()
        self.calls: dict[tuple[str, int], list[CollectiveCall]] = {}
        for instruction in super().__iter__():
            before = self.live.now
            if isinstance(instruction, Compute) and instruction.kind not in "FI":
                self.in_flight.clear()  # a backward first waits for them
            self.called.clear()
            self.hosted = 0
            self.live.begin_task()
            yield instruction
            if isinstance(instruction, Compute):
                kind = "F" if instruction.kind == "F" else "B"
                if instruction.micro_batch == 0:
                    self.calls.setdefault((kind, instruction.stage), []).extend(self.called)
                self._note((kind, instruction.stage), self.live.task_peak - before)
                if kind == "F":
                    self._note(("kept", instruction.stage), self.live.now - before)
                    self._note(("hosted", instruction.stage), self.hosted)

    def _note(self, key: tuple[str, int], size: int) -> None:
        self.noted[key] = max(self.noted[key], size)
