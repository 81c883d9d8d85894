"""The executor: a loop over one rank's program, which computes, sends, receives, reduces and frees.

It saves the activations that a backward needs, posts receives early but within a bound, and waits only where a task
consumes a value. It knows no strategies, graphs or schedules: a stage maps received values to sent values and makes its
own collectives; the program guarantees that all ranks of a stage run its tasks in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from whale.errors import ScheduleError, UsageError
from whale.ir import range_names
from whale.ir.program import (
    Box,
    Compute,
    Copy,
    Direction,
    Edge,
    Free,
    Gather,
    Program,
    Receive,
    Reduce,
    Send,
    SumLoss,
    box_shape,
    fills,
    forward_only,
)
from whale.runtime.equal_rows import EqualRows, Repeats
from whale.runtime.failure import Failures
from whale.runtime.gradients import TakesGradients
from whale.runtime.local_program import Wait, there
from whale.runtime.messages import Messages, Work, messages_of
from whale.runtime.owned import HeldUnit
from whale.runtime.ranges import named
from whale.runtime.reduce import Reducer, Update

__all__ = ["Executor", "StageProgram"]

_Key = tuple[int, Direction, int]


class StageProgram(Protocol):
    """The part of a stage that a rank runs."""

    taker: TakesGradients | None
    """Takes the gradients that a backward makes; the executor sets it."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that `forward` returns; ``loss`` is a scalar whose gradient is the scale."""
        ...

    @property
    def parameters(self) -> Sequence[Parameter]:
        """The stage's parameters on this rank, each once; frozen ones may be among them."""
        ...

    def waits(self, micro_batch: int) -> bool:
        """Whether the forward waits for received values itself, where it first reads each; else they are there."""
        ...

    def forward(self, micro_batch: int, received: tuple[Tensor, ...], wait: Wait = there) -> tuple[Tensor, ...]:
        """Compute a micro-batch from the values of the stage's incoming edges, in the order of their indices, each of
        which is there once *wait* has returned for it."""
        ...

    def forward_to_train(
        self, micro_batch: int, received: tuple[Tensor, ...], wait: Wait = there
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The same, with what the backward needs of it."""
        ...

    def backward(self, micro_batch: int, kept: Any, seeds: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Add the gradients of parameters, from those of the outputs, and return those of the received values; None is
        zero."""
        ...

    def backward_of_inputs(
        self, micro_batch: int, kept: Any, seeds: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The part of a backward that makes the gradients of received values."""
        ...

    def backward_of_weights(self, micro_batch: int, kept: Any) -> None:
        """The rest of it."""
        ...


def _default_group(edge: Edge, direction: Direction) -> None:
    return None


class Executor:
    """Runs one rank's program repeatedly.

    Args:
        rank: this rank.
        program: its program for a training step; the part for an evaluation is taken from it.
        edges: all edges, by index.
        stages: the stages that this rank computes.
        reducer: sums the gradients; its buckets are in the program's order. None if no gradient is shared.
        units: buckets of which this rank owns a stretch.
        failures: reports and looks up failures; has the timeout of every wait.
        group_of: the process group of an edge's messages in a direction; None is the default group. On NCCL a group's
            messages wait for each other, so those of other stages, or of the opposite direction, need another one.
        device: receives tensors.
        messages: starts messages; by default as the device wants it.
        credit: limit of values in flight to this rank before the program asks for them. By default 2, or as many as the
            program has micro-batches in flight; on CUDA 0, because there the program itself runs ahead of the device.
        equal_rows: finds the rows that are sent once on edges with *distinct* rows; None: all are sent.
    """

    def __init__(
        self,
        *,
        rank: int,
        program: Program,
        edges: Sequence[Edge],
        stages: Mapping[int, StageProgram],
        reducer: Reducer | None = None,
        units: Mapping[int, HeldUnit] | None = None,
        failures: Failures | None = None,
        group_of: Callable[[Edge, Direction], Any] = _default_group,
        device: torch.device | str = "cpu",
        messages: Messages | None = None,
        credit: int | None = None,
        equal_rows: EqualRows | None = None,
    ) -> None:
        self.rank = rank
        self.edges = tuple(edges)
        self.stages = dict(stages)
        self.reducer = reducer
        self.units = units or {}
        self.failures = failures or Failures(rank)
        directions: tuple[Direction, ...] = ("forward", "backward")
        self.groups = {(edge.index, direction): group_of(edge, direction) for edge in edges for direction in directions}
        self.device = torch.device(device)
        self.messages = messages or messages_of(self.device)
        self.equal_rows = equal_rows
        self.programs = {True: program, False: forward_only(program)}
        self.alone = {train: self._num_alone(part) for train, part in self.programs.items()}
        self.credit = credit if credit is not None else 0 if self.device.type == "cuda" else max(2, _most_kept(program))
        self.entering = {s: [edge for edge in edges if edge.target_stage == s] for s in stages}
        self.leaving = {s: [edge for edge in edges if edge.source_stage == s] for s in stages}
        self.boxes: dict[_Key, list[Box]] = {}
        last: dict[int, Compute] = {}
        for instruction in program:
            if isinstance(instruction, Compute) and instruction.kind in "BW":
                last[instruction.stage] = instruction
            elif isinstance(instruction, Receive):
                self.boxes.setdefault(instruction[:3], []).append(instruction.box)
            elif isinstance(instruction, Copy):
                self.boxes.setdefault(instruction[:3], []).append(instruction.target_box)
        self.last_backwards = set(last.values())
        self.disjoint = {key: fills(boxes, self.shape(*key)) for key, boxes in self.boxes.items()}
        self.dtypes = [getattr(torch, edge.dtype) for edge in edges]
        for stage in self.stages.values():
            stage.taker = reducer
        planned = [(task.bucket, task.early) for task in program if isinstance(task, Reduce)]
        given = [(bucket.index, bucket.early) for bucket in reducer.buckets] if reducer is not None else []
        if planned != given:
            raise ScheduleError(
                f"rank {rank} reduces buckets (and whether early) {planned} in its program, but was given {given}"
            )

    def run(
        self,
        train: bool,
        on_loss: Callable[[Tensor | None], None] | None = None,
        scale: float | Tensor = 1.0,
        agree: Callable[[], None] | None = None,
        update: Update | None = None,
    ) -> Tensor | None:
        """Run one step and return the sum of this rank's losses, or None if it computes none.

        In training, gradients of *scale* times the loss are added to the parameters, and those in buckets are summed
        over their ranks. Otherwise only forwards run, without gradients. ``on_loss`` is called with the sum where the
        program says so, so that its sum over ranks runs beside those of gradients. ``agree`` waits until all ranks take
        this step, and raises if they do not: it is called after the forwards that need no other rank, before anything
        that outlives the step. ``update`` steps an optimizer for parameters whose gradients are final, which are freed
        then.

        Raises:
            WorkerError: a task failed here or elsewhere, or a rank did not come in time; names rank, task and value.
        """
        with torch.no_grad():
            return _Step(self, train, on_loss or (lambda loss: None), scale, agree, update).run()

    def _num_alone(self, program: Program) -> int:
        """How many instructions a program begins with that compute forwards without another rank."""
        if self.units or any(isinstance(instruction, Receive) for instruction in program):  # posted ahead
            return 0
        for position, instruction in enumerate(program):
            if not isinstance(instruction, Compute) or instruction.kind != "F":
                return position
            if len(getattr(self.stages[instruction.stage], "peers", ())) > 1:
                return position
        return len(program)

    def shape(self, edge: int, direction: Direction, micro_batch: int) -> tuple[int, ...]:
        """Return the shape of a received tensor: a value, or the gradient of one."""
        shapes = self.edges[edge].target_shapes if direction == "forward" else self.edges[edge].source_shapes
        return shapes[micro_batch][self.rank]

    def blank(self, make: Callable[..., Tensor], edge: int, micro_batch: int) -> Tensor:
        """Make a tensor like a received value."""
        return make(self.shape(edge, "forward", micro_batch), dtype=self.dtypes[edge], device=self.device)


def _most_kept(program: Program) -> int:
    kept = most = 0
    for instruction in program:
        kept += isinstance(instruction, Compute) and instruction.kind == "F"
        kept -= isinstance(instruction, Free)
        most = max(most, kept)
    return most


@dataclass(eq=False)
class _Kept:
    """State of a micro-batch at a stage between its tasks."""

    outputs: tuple[Tensor, ...]
    of_stage: Any = None
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of received values, by edge


@dataclass(eq=False)
class _Arrival:
    """A tensor that is being received in parts."""

    buffer: Tensor | None = None
    parts: list[tuple[Work | None, Tensor | None, Box, int, Repeats | None]] = field(default_factory=list)


class _Refused(Exception):
    """A step that the ranks do not take."""

    def __init__(self, error: UsageError) -> None:
        super().__init__(str(error))
        self.error = error


class _Step:
    """One run of a program, with its temporary state."""

    def __init__(
        self,
        executor: Executor,
        train: bool,
        on_loss: Callable[[Tensor | None], None],
        scale: float | Tensor,
        agree: Callable[[], None] | None,
        update: Update | None,
    ) -> None:
        self.executor = executor
        self.agree, self.update = agree, update
        self.scale = scale
        self.on_loss = on_loss
        self.train = train
        self.program = executor.programs[train]
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.arrivals: dict[_Key, _Arrival] = {}
        self.sends: deque[tuple[int, Work, Tensor, Send]] = deque()
        self.task: Compute | None = None
        self.num_tasks = 0
        self.next_receive = 0  # receives before this position are posted
        self.loss: Tensor | None = None

    def run(self) -> Tensor | None:
        executor = self.executor
        reducer = executor.reducer if self.train else None
        try:
            for unit in executor.units.values():
                unit.take_own()
            alone = executor.alone[self.train] if self.agree is not None else 0
            if not alone:
                self.start(reducer)
            for position, instruction in enumerate(self.program):
                if position == alone > 0:
                    self.start(reducer)
                if isinstance(instruction, Compute):
                    self.post_receives(position)
                if not isinstance(instruction, Send | Receive | Copy):
                    executor.messages.start()
                match instruction:
                    case Compute():
                        self.compute(instruction)
                        executor.messages.task_ended()
                    case Send():
                        self.send(instruction)
                    case Receive():
                        self.post_receives(position)
                    case Copy():
                        self.copy(instruction)
                    case Reduce():
                        if reducer is not None:
                            reducer.launch(instruction.bucket)
                    case Gather():
                        executor.units[instruction.bucket].begin()
                    case Free():
                        del self.kept[instruction.stage, instruction.micro_batch]
                        executor.messages.task_ended()
                    case SumLoss():
                        self.on_loss(self.loss)
            if alone == len(self.program) > 0:
                self.start(reducer)
            self.task = None
            executor.messages.start()
            while self.sends:
                self.complete_send()
            for unit in executor.units.values():
                unit.finish()
            if reducer is not None:
                reducer.finish()
        except _Refused as refused:
            raise refused.error from None
        except Exception as error:
            stage = None if self.task is None else executor.stages.get(self.task.stage)
            failure = executor.failures.failed(self.where(), error, getattr(stage, "peers", ()))
            if failure is error:
                raise
            raise failure from error
        return self.loss

    def start(self, reducer: Reducer | None) -> None:
        """Start what outlives the step, once all ranks agree to take it."""
        if self.agree is not None:
            try:
                self.agree()
            except UsageError as error:  # no failure: the next step may be another
                raise _Refused(error) from error
        if reducer is not None:
            reducer.begin(self.update)

    def where(self) -> str:
        if self.task is None:
            return "the end of the step"
        return f"task {self.task} (stage {self.task.stage}, micro-batch {self.task.micro_batch})"

    # Tasks

    def compute(self, task: Compute) -> None:
        executor = self.executor
        self.task = task
        self.num_tasks += 1
        kind, stage, micro_batch = task
        while self.sends and self.sends[0][0] < self.num_tasks - 2 * executor.credit - 2:
            self.complete_send()
        if kind == "F":
            self.forward(stage, micro_batch)
            return
        kept = self.kept[stage, micro_batch]
        last, reducer = task in executor.last_backwards, executor.reducer
        if reducer is not None and (last or (reducer.sums_each and kind != "I")):
            reducer.arm(stage, last)
        program = executor.stages[stage]
        if kind == "W":
            with named(range_names.WEIGHT_BACKWARD, stage, micro_batch):
                program.backward_of_weights(micro_batch, kept.of_stage)
        else:
            seeds = self.seeds(stage, micro_batch, kept)
            kept.outputs = ()
            if kind == "B":
                with named(range_names.BACKWARD, stage, micro_batch):
                    gradients = program.backward(micro_batch, kept.of_stage, seeds)
            else:
                with named(range_names.INPUT_BACKWARD, stage, micro_batch):
                    gradients = program.backward_of_inputs(micro_batch, kept.of_stage, seeds)
            for number, edge in enumerate(executor.entering[stage]):
                if edge.needs_grad:
                    gradient = gradients[number] if number < len(gradients) else None
                    kept.gradients[edge.index] = (
                        executor.blank(torch.zeros, edge.index, micro_batch) if gradient is None else gradient
                    )
        if reducer is not None and (last or (reducer.sums_each and kind != "I")):
            reducer.finished(stage, last)

    def forward(self, stage: int, micro_batch: int) -> None:
        executor = self.executor
        edges = [edge.index for edge in executor.entering[stage]]
        received = tuple(self.expected(edge, micro_batch) for edge in edges)
        program, of_stage = executor.stages[stage], None

        def wait(position: int) -> None:
            self.take(edges[position], "forward", micro_batch)

        if not program.waits(micro_batch):
            for position in range(len(edges)):
                wait(position)
        with named(range_names.FORWARD, stage, micro_batch):
            if self.train:
                outputs, of_stage = program.forward_to_train(micro_batch, received, wait)
            else:
                outputs = program.forward(micro_batch, received, wait)
        for position in range(len(edges)):  # what the stage did not read
            wait(position)
        if len(outputs) != len(program.outputs):
            raise ScheduleError(f"the stage returned {len(outputs)} values, but its outputs are {program.outputs}")
        for name, output in zip(program.outputs, outputs, strict=True):
            if name == "loss":
                self.loss = output.detach() if self.loss is None else self.loss + output.detach()
        self.kept[stage, micro_batch] = _Kept(outputs, of_stage)

    def seeds(self, stage: int, micro_batch: int, kept: _Kept) -> list[Tensor | None]:
        """The gradients of a stage's outputs, summed over the stages that read them."""
        executor = self.executor
        gradients: dict[str, Tensor] = {}
        for edge in executor.leaving[stage]:
            if edge.needs_grad and (gradient := self.take(edge.index, "backward", micro_batch)) is not None:
                gradients[edge.value] = gradients[edge.value] + gradient if edge.value in gradients else gradient
        named_outputs = zip(executor.stages[stage].outputs, kept.outputs, strict=True)
        return [torch.ones_like(x) * self.scale if n == "loss" else gradients.get(n) for n, x in named_outputs]

    # Messages

    def send(self, instruction: Send) -> None:
        edge, direction, _, peer, box = instruction
        with self.message(range_names.SEND, *instruction[:4]):
            part = self.sent(instruction, _part(self.value(instruction), box))
            work = self.executor.messages.send(part, peer, self.executor.groups[edge, direction])
        if work is None:
            raise ScheduleError(f"edge {edge}: rank {self.executor.rank} is not in the group of its edges")
        self.sends.append((self.num_tasks, work, part, instruction))

    def sent(self, instruction: Send, part: Tensor) -> Tensor:
        """The message of a part of a value."""
        if self.executor.edges[instruction.edge].distinct is None:
            return part.contiguous()
        repeats = self.repeats(instruction)
        if repeats is None:
            return part.clone(memory_format=torch.contiguous_format)  # memory as of one that is sent in part
        return repeats.distinct(part) if instruction.direction == "forward" else repeats.summed(part)

    def repeats(self, instruction: Send | Receive) -> Repeats | None:
        """The equal rows of a message; None if it is sent as it is."""
        edge, direction, micro_batch, _, box = instruction
        equal_rows = self.executor.equal_rows
        if equal_rows is None or self.executor.edges[edge].distinct is None:
            return None
        at_source = (direction == "forward") == isinstance(instruction, Send)
        return equal_rows.of(edge, at_source, micro_batch, box)

    def copy(self, instruction: Copy) -> None:
        key: _Key = instruction[:3]
        arrival = self.arrivals.setdefault(key, _Arrival())
        part = _part(self.value(instruction), instruction.source_box)
        if self.executor.disjoint[key] and len(self.executor.boxes[key]) == 1:
            arrival.buffer = part
            arrival.parts.append((None, None, instruction.target_box, self.executor.rank, None))
        else:
            arrival.parts.append((None, part, instruction.target_box, self.executor.rank, None))

    def value(self, instruction: Send | Copy) -> Tensor:
        """Return the tensor from which an instruction takes its box."""
        executor = self.executor
        edge = executor.edges[instruction.edge]
        if instruction.direction == "backward":
            return self.kept[edge.target_stage, instruction.micro_batch].gradients[edge.index]
        kept = self.kept[edge.source_stage, instruction.micro_batch]
        value = kept.outputs[executor.stages[edge.source_stage].outputs.index(edge.value)].detach()
        expected = edge.source_shapes[instruction.micro_batch][executor.rank]
        if tuple(value.shape) != tuple(expected) or value.dtype != executor.dtypes[edge.index]:
            raise ScheduleError(
                f"value {edge.value!r} is {value.dtype} {tuple(value.shape)}, but the plan says {edge.dtype} {expected}"
            )
        return value

    def post_receives(self, position: int) -> None:
        """Post the receives up to ``position``, and later ones while fewer values than the credit are in flight."""
        while self.next_receive < len(self.program):
            if self.next_receive > position and len(self.arrivals) >= self.executor.credit:
                return
            instruction = self.program[self.next_receive]
            self.next_receive += 1
            if isinstance(instruction, Receive):
                self.receive(instruction)

    def receive(self, instruction: Receive) -> None:
        executor = self.executor
        key: _Key = instruction[:3]
        arrival = self.arrivals.setdefault(key, _Arrival())
        dtype = executor.dtypes[instruction.edge]
        target: Tensor | None = None
        if executor.disjoint[key]:
            if arrival.buffer is None:
                arrival.buffer = executor.messages.blank(executor.shape(*key), dtype)
            target = _part(arrival.buffer, instruction.box)
        apart = target is None or not target.is_contiguous() or executor.edges[instruction.edge].distinct is not None
        repeats = self.repeats(instruction)
        if target is None or apart:
            target = executor.messages.blank(box_shape(instruction.box), dtype)
        if repeats is not None:
            target = target.view(len(repeats.number), -1)[: repeats.count]
        with self.message(range_names.RECEIVE, *instruction[:4]):
            group = executor.groups[instruction.edge, instruction.direction]
            work = executor.messages.receive(target, instruction.peer, group)
        arrival.parts.append((work, target if apart else None, instruction.box, instruction.peer, repeats))

    def take(self, edge: int, direction: Direction, micro_batch: int) -> Tensor | None:
        """Wait for all parts of a tensor and return it; None if it has none."""
        executor = self.executor
        key: _Key = (edge, direction, micro_batch)
        arrival = self.arrivals.pop(key, None)
        if arrival is None:
            return None
        buffer = self.buffer(key, arrival)
        for work, part, box, peer, repeats in arrival.parts:
            if work is not None:
                self.wait(work, edge, direction, micro_batch, peer, "from")
            if part is None:
                continue
            target = _part(buffer, box)
            if repeats is not None:
                part = (repeats.copies if direction == "forward" else repeats.placed)(part, target.shape)
            if executor.disjoint[key]:
                target.copy_(part)
            else:
                target.add_(part)
        return buffer

    def expected(self, edge: int, micro_batch: int) -> Tensor:
        """The memory of a value that a forward reads, which may be on its way."""
        key: _Key = (edge, "forward", micro_batch)
        arrival = self.arrivals.get(key)
        if arrival is None:
            return self.executor.blank(torch.empty, edge, micro_batch)
        return self.buffer(key, arrival)

    def buffer(self, key: _Key, arrival: _Arrival) -> Tensor:
        """The memory into which a tensor is received."""
        if arrival.buffer is None:
            executor = self.executor
            make = torch.empty if executor.disjoint[key] else torch.zeros
            arrival.buffer = make(executor.shape(*key), dtype=executor.dtypes[key[0]], device=executor.device)
        return arrival.buffer

    def complete_send(self) -> None:
        _, work, _, instruction = self.sends.popleft()
        self.wait(work, instruction.edge, instruction.direction, instruction.micro_batch, instruction.peer, "to")

    def wait(self, work: Work, edge: int, direction: Direction, micro_batch: int, peer: int, preposition: str) -> None:
        what = "value" if direction == "forward" else "gradient of value"
        description = (
            f"{what} {self.executor.edges[edge].value!r} of micro-batch {micro_batch} {preposition} rank {peer}, "
            f"in {self.where()}"
        )
        name = range_names.WAIT + (range_names.SEND if preposition == "to" else range_names.RECEIVE)
        with self.message(name, edge, direction, micro_batch, peer):
            self.executor.failures.wait(work, description, (peer,), blocking=self.executor.device.type != "cuda")

    def message(
        self, name: str, edge: int, direction: Direction, micro_batch: int, peer: int
    ) -> AbstractContextManager[object]:
        """A range of what is done about a message."""
        what = "" if direction == "forward" else "gradient of "
        return named(name, what, self.executor.edges[edge].value, peer, micro_batch)


def _part(tensor: Tensor, box: Box) -> Tensor:
    """Return the box of a tensor as a view."""
    if all(start == 0 and stop == extent for (start, stop), extent in zip(box, tensor.shape, strict=True)):
        return tensor
    return tensor[tuple(slice(start, stop) for start, stop in box)]
