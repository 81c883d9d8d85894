"""Programs of ranks: a global order of tasks projected on each rank, as tuples.

`project` walks the order once. At each task it writes the computation into the program of every rank of the stage, and
each transfer that follows into the programs of both its ends in the same step. So any two ranks agree on the order of
their messages, and everything that a rank waits for is earlier in the global order. Sums over ranks are part of that
order, too, because NCCL runs what a rank starts one after another: ranks that start the same things in different orders
wait for each other forever. The executor runs these tuples, the simulator times them, `explain` prints them and
`whale.ir.check` proves them free of deadlocks. This module knows no torch, no strategies and no process groups: a stage
is a name for work that its ranks do together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, NamedTuple

from whale.ir.adasum import Adasum
from whale.ir.schedule import Kind, Order, Task

__all__ = [
    "BUCKET_BYTES",
    "Box",
    "Compute",
    "Copy",
    "Direction",
    "Edge",
    "Free",
    "Gather",
    "Gathers",
    "Instruction",
    "Program",
    "Receive",
    "Reduce",
    "ReduceSpec",
    "Send",
    "Shape",
    "StageSpec",
    "SumLoss",
    "Transfer",
    "box_shape",
    "box_size",
    "fills",
    "forward_only",
    "project",
    "project_rank",
]

BUCKET_BYTES = 4 * 2**20
"""Least capacity of a gradient bucket in bytes: that of ranks whose links are not known. Others are as large as their
links ask for (`whale.planner.cost.buckets.bucket_bytes`)."""

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""A half-open range in each dim of a rank's own tensor; () is a whole scalar."""
Direction = Literal["forward", "backward"]

Returns = Literal["loss", "outputs", "both"]
"""Result of a step: the loss, the model's output, or both."""


class Transfer(NamedTuple):
    """A box of a tensor of rank ``source`` that becomes a box, of the same shape, of a tensor of rank ``target``.

    A box of zero size is not sent. ``source == target`` is a copy within the rank.
    """

    source: int
    target: int
    source_box: Box
    target_box: Box


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A value that one stage produces and a later one reads, and how its parts travel, for each micro-batch.

    Several edges may leave from one (stage, value); the gradients that come back on them are summed at the producer.

    Attributes:
        index: position in the list of all edges; a stage receives its values in this order.
        value: the name of the value among the outputs of the source stage.
        source_stage: the stage that produces it.
        target_stage: the stage that reads it, later in the chain.
        needs_grad: whether a gradient comes back; if not, ``backward`` is empty.
        dtype: torch's name of the type, as in ``float32``.
        distinct: the expected part of its rows that are distinct, if both ends know from the batch which are equal, and
            each is sent once; None: all are sent.
        forward: for each micro-batch, the transfers from ranks of the source stage to ranks of the target stage. Boxes
            that arrive at a rank are disjoint and fill its tensor.
        backward: for each micro-batch, the transfers of the gradient from ranks of the *target* stage to ranks of the
            *source* stage. Boxes that arrive at a rank may overlap, and are summed; what none fills is zero.
        source_shapes: for each micro-batch, the local shape on each rank of the source stage.
        target_shapes: for each micro-batch, the local shape on each rank of the target stage.
    """

    index: int
    value: str
    source_stage: int
    target_stage: int
    needs_grad: bool
    dtype: str
    forward: tuple[tuple[Transfer, ...], ...]
    backward: tuple[tuple[Transfer, ...], ...]
    source_shapes: tuple[Mapping[int, Shape], ...]
    target_shapes: tuple[Mapping[int, Shape], ...]
    distinct: float | None = None

    def sent_bytes(self, box: Box, element_bytes: int) -> int:
        """Bytes that are expected to be sent of a box."""
        return ceil(box_size(box) * element_bytes * (1.0 if self.distinct is None else self.distinct))


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A stage and the ranks that compute it together; the ranks of different stages may overlap."""

    index: int
    ranks: tuple[int, ...]


Gathers = Literal["step", "task"]
"""When parameters that ranks own in stretches are gathered: once in a step, or in each task that reads them."""


@dataclass(frozen=True, kw_only=True)
class ReduceSpec:
    """A bucket of gradients to be summed over ``ranks``, once the backwards of all its ``stages`` are done.

    A parameter that two stages share is in a bucket of both. Buckets are reduced by stage completion, those of one
    stage first, then by index: the parameters whose gradients are ready first belong into the bucket of lower index.

    Attributes:
        index: of the bucket.
        ranks: that sum it.
        stages: that contribute.
        bounds: where the stretch of each rank begins in the bucket's elements, one after the other, and the end of the
            last, if each rank owns a stretch of parameters, gradients and optimizer states; () if all have all.
        gathers: when its parameters are gathered from the stretches.
        each: whether the gradients of each micro-batch are summed when they are made.
        dtype: the number type in which ranks exchange the gradients and sum them, if it is another than theirs.
        adasum: how the gradients of replicas are combined; None: they are summed.
        rows: the number of rows that each rank sends of the sparse gradient of its one parameter, the most of which one
            has a gradient; 0: gradients are dense.
        on_host: whether its parameter is in the host's memory, where ranks exchange these rows.
    """

    index: int
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    bounds: tuple[int, ...] = ()
    gathers: Gathers = "step"
    each: bool = False
    dtype: str = ""
    adasum: Adasum | None = None
    rows: int = 0
    on_host: bool = False


class Compute(NamedTuple):
    """Run one task of a stage, together with the stage's other ranks."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return str(Task(*self))


class Send(NamedTuple):
    """Start to send ``box`` of this rank's value (backward: of the gradient of its received value) to ``peer``."""

    edge: int
    direction: Direction
    micro_batch: int
    peer: int
    box: Box

    def __str__(self) -> str:
        return f"send {_exchange(self)} to {self.peer} {_ranges(self.box)}"


class Receive(NamedTuple):
    """Start to receive ``box`` of this rank's value (backward: of the gradient of what it produced) from ``peer``."""

    edge: int
    direction: Direction
    micro_batch: int
    peer: int
    box: Box

    def __str__(self) -> str:
        return f"receive {_exchange(self)} from {self.peer} {_ranges(self.box)}"


class Copy(NamedTuple):
    """A transfer whose two ends are this rank."""

    edge: int
    direction: Direction
    micro_batch: int
    source_box: Box
    target_box: Box

    def __str__(self) -> str:
        return f"copy {_exchange(self)} {_ranges(self.source_box)} to {_ranges(self.target_box)}"


class Reduce(NamedTuple):
    """Start, at the latest here, to sum the gradients of a bucket over its ranks.

    A bucket of one stage (*early*) may start within its last backward, at which all its ranks are together.
    """

    bucket: int
    early: bool = False

    def __str__(self) -> str:
        return f"reduce bucket {self.bucket}"


class Gather(NamedTuple):
    """Start to gather the parameters of a bucket from the stretches that its ranks own, for all tasks of the step."""

    bucket: int

    def __str__(self) -> str:
        return f"gather bucket {self.bucket}"


class Free(NamedTuple):
    """Free the saved activations of a micro-batch."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"free stage {self.stage} m{self.micro_batch}"


class SumLoss(NamedTuple):
    """Start to sum the loss over all ranks: the last that a rank starts in a step."""

    def __str__(self) -> str:
        return "sum the loss"


Instruction = Compute | Send | Receive | Copy | Reduce | Gather | Free | SumLoss
Program = tuple[Instruction, ...]


def project(
    order: Order,
    stages: Sequence[StageSpec],
    edges: Sequence[Edge],
    reduces: Sequence[ReduceSpec] = (),
    gathers: Sequence[ReduceSpec] = (),
) -> dict[int, Program]:
    """Return the program of every rank of ``stages``, in time linear in its size.

    It starts with the *gathers*: of the buckets whose parameters are gathered once a step.

    An order of forwards only gives the programs of an evaluation. `whale.ir.check.check_programs` says what must hold.

    >>> programs = project((Task("F", 0, 0), Task("B", 0, 0)), [StageSpec(index=0, ranks=(0,))], [])
    >>> [str(instruction) for instruction in programs[0]]
    ['0F0', '0B0', 'free stage 0 m0', 'sum the loss']
    """
    programs: dict[int, list[Instruction]] = {rank: [] for stage in stages for rank in stage.ranks}
    for rank, instruction in _walk(order, stages, edges, reduces, gathers, None):
        programs[rank].append(instruction)
    return {rank: tuple(program) for rank, program in sorted(programs.items())}


def project_rank(
    order: Order,
    stages: Sequence[StageSpec],
    edges: Sequence[Edge],
    reduces: Sequence[ReduceSpec],
    rank: int,
    gathers: Sequence[ReduceSpec] = (),
) -> Program:
    """Return ``project(...)[rank]`` without making the programs of the others."""
    return tuple(instruction for _, instruction in _walk(order, stages, edges, reduces, gathers, rank))


def _walk(
    order: Order,
    stages: Sequence[StageSpec],
    edges: Sequence[Edge],
    reduces: Sequence[ReduceSpec],
    gathers: Sequence[ReduceSpec],
    only: int | None,
) -> Iterator[tuple[int, Instruction]]:
    """Walk the order once; with ``only`` leave out what is not of that rank."""
    ranks_of = {stage.index: stage.ranks if only is None else _part(stage.ranks, only) for stage in stages}
    leaving: dict[int, list[Edge]] = {stage.index: [] for stage in stages}
    entering: dict[int, list[Edge]] = {stage.index: [] for stage in stages}
    for edge in edges:
        leaving[edge.source_stage].append(edge)
        if edge.needs_grad:
            entering[edge.target_stage].append(edge)
    last_task: dict[tuple[int, int], Task] = {}
    last_backward: dict[int, int] = {}
    for position, task in enumerate(order):
        last_task[task.stage, task.micro_batch] = task
        if task.kind in "BW":
            last_backward[task.stage] = position
    reduce_at: dict[int, list[ReduceSpec]] = {}
    for reduce in reduces:
        ends = [last_backward[stage] for stage in reduce.stages if stage in last_backward]
        if ends:
            reduce_at.setdefault(max(ends), []).append(reduce)

    for spec in gathers:
        for rank in spec.ranks if only is None else _part(spec.ranks, only):
            yield rank, Gather(spec.index)
    for position, task in enumerate(order):
        kind, stage, micro_batch = task
        for rank in ranks_of[stage]:
            yield rank, Compute(kind, stage, micro_batch)
        if kind == "F":
            for edge in leaving[stage]:
                yield from _exchanges(edge.index, "forward", micro_batch, edge.forward[micro_batch], only)
        elif kind != "W":
            for edge in entering[stage]:
                yield from _exchanges(edge.index, "backward", micro_batch, edge.backward[micro_batch], only)
        if last_task[stage, micro_batch] is task:
            for rank in ranks_of[stage]:
                yield rank, Free(stage, micro_batch)
        for reduce in sorted(reduce_at.get(position, ()), key=lambda reduce: len(reduce.stages) > 1):
            for rank in reduce.ranks if only is None else _part(reduce.ranks, only):
                yield rank, Reduce(reduce.index, len(reduce.stages) == 1)
    for rank in (only,) if only is not None else {rank: None for stage in stages for rank in stage.ranks}:
        yield rank, SumLoss()


def _exchanges(
    edge: int, direction: Direction, micro_batch: int, transfers: Iterable[Transfer], only: int | None
) -> Iterator[tuple[int, Instruction]]:
    for source, target, source_box, target_box in transfers:
        if (only is not None and only != source and only != target) or 0 in box_shape(source_box):
            continue
        if source == target:
            yield source, Copy(edge, direction, micro_batch, source_box, target_box)
            continue
        if only is None or only == source:
            yield source, Send(edge, direction, micro_batch, target, source_box)
        if only is None or only == target:
            yield target, Receive(edge, direction, micro_batch, source, target_box)


def _part(ranks: tuple[int, ...], only: int) -> tuple[int, ...]:
    return (only,) if only in ranks else ()


def forward_only(program: Program) -> Program:
    """Return the part of a training program that an evaluation runs: gathers, forwards, their messages, earlier frees,
    and the sum of the loss."""
    result: list[Instruction] = []
    held: Free | None = None
    last = tuple(instruction for instruction in program if isinstance(instruction, SumLoss))
    for instruction in program:
        if isinstance(instruction, Compute):
            if instruction.kind != "F":
                continue
            if held is not None:
                result.append(held)
            held = Free(instruction.stage, instruction.micro_batch)
        elif isinstance(instruction, Send | Receive | Copy):
            if instruction.direction != "forward":
                continue
        elif not isinstance(instruction, Gather):
            continue
        result.append(instruction)
    return (*result, *last) if held is None else (*result, held, *last)


def box_shape(box: Box) -> Shape:
    """Return the extent in each dim; a box is empty if one of them is 0.

    >>> box_shape(((2, 5), (0, 4)))
    (3, 4)
    """
    return tuple([stop - start for start, stop in box])


def box_size(box: Box) -> int:
    """Return the number of elements."""
    return prod(box_shape(box))


def fills(boxes: Sequence[Box], shape: Shape) -> bool:
    """Return whether boxes inside a tensor of ``shape`` cover each of its elements exactly once.

    >>> fills([((0, 2), (0, 4)), ((2, 3), (0, 4))], (3, 4)), fills([((0, 2), (0, 4)), ((1, 2), (0, 4))], (3, 4))
    (True, False)
    """
    if sum(map(box_size, boxes)) != prod(shape):
        return False
    full = [box for box in boxes if box_size(box)]
    return not any(
        all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))
        for position, one in enumerate(full)
        for other in full[:position]
    )


def _exchange(instruction: Send | Receive | Copy) -> str:
    return f"edge {instruction.edge} {instruction.direction} m{instruction.micro_batch}"


def _ranges(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
