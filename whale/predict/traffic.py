"""Messages of a rank in a step, in bytes: collectives inside its stages, p2p transfers to other stages, gradient
reductions, and gathers of parameters.

They are read off the compiled step, without data or other ranks: the calls that the static check proves and the
executor makes. The agreement before a step (some numbers of the batch, and the loss) is not included. It knows no
clusters and no seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from whale.compile.compilation import Compilation
from whale.compile.rank_step import rank_step
from whale.ir.adasum import dot_bytes
from whale.ir.check import CollectiveCall
from whale.ir.program import ReduceSpec, Send
from whale.runtime.random import RNGPosition
from whale.strategies.dry_run import dry_run

__all__ = [
    "Message",
    "bucket_bytes",
    "call_bytes",
    "first_of_tables",
    "gathered_bytes",
    "kind_of_sum",
    "summed_bytes",
    "traffic",
]

Purpose = Literal["forward", "backward", "gradients", "parameters"]


@dataclass(frozen=True, kw_only=True)
class Message:
    """Equal messages of a rank in a step.

    Attributes:
        purpose: their pass, the sums of gradients, or the gathers of parameters that ranks own in stretches.
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``send``.
        ranks: the members; for a send, this rank and the receiver.
        tensor_bytes: the whole tensor, as in `whale.planner.network.communication`: the input of an all-reduce,
            reduce-scatter or all-to-all, the result of an all-gather, the value of a send.
        count: number of such messages in a step.
    """

    purpose: Purpose
    op: str
    ranks: tuple[int, ...]
    tensor_bytes: int
    count: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends for all of them by a ring algorithm, the minimum.

        >>> Message(purpose="gradients", op="all_reduce", ranks=(0, 1, 2, 3), tensor_bytes=100, count=2).sent_bytes
        300.0
        """
        others = 1 - 1 / len(self.ranks)
        share = {"all_reduce": 2 * others, "send": 1.0}.get(self.op, others)
        return self.count * share * self.tensor_bytes


def traffic(compilation: Compilation, rank: int, clock: RNGPosition | None = None) -> tuple[Message, ...]:
    """The messages of *rank* in a training step, grouped, in order of appearance.

    *clock* is the RNG position of random operators, if any.
    """
    found: Counter[tuple[Purpose, str, tuple[int, ...], int]] = Counter()
    for stage in compilation.stages:
        if rank not in stage.mesh.ranks:
            continue
        programs = compilation.local_programs(stage, rank, clock)
        calls = {}  # micro-batches of equally many rows make equal calls
        for index, (rows, program) in enumerate(zip(compilation.rows, programs, strict=True)):
            if rows not in calls:
                calls[rows] = dry_run(compilation.captured, stage, rank, program, index)
            for call in calls[rows].forward:
                found["forward", call.op, call.ranks, call_bytes(call)] += 1
            for call in calls[rows].backward:
                found["backward", call.op, call.ranks, call_bytes(call)] += 1
    for step in compilation.program(rank):
        if isinstance(step, Send):
            edge = compilation.edges[step.edge]
            size = edge.sent_bytes(step.box, _element_bytes(edge.dtype))
            found[step.direction, "send", (rank, step.peer), size] += 1
    gathers = _gathers(compilation, rank, clock)
    gathered = gathered_bytes(compilation)
    dots = first_of_tables(compilation, rank)
    for spec, size in zip(compilation.reduces, bucket_bytes(compilation), strict=True):
        if rank in spec.ranks and len(spec.ranks) > 1:
            op = "reduce_scatter" if spec.bounds else kind_of_sum(spec)
            summed = summed_bytes(compilation, spec, size)
            if spec.adasum is not None:
                op = "all_to_all"
                if not spec.bounds:
                    found["gradients", "all_gather", spec.ranks, size] += 1
                if spec.index in dots:
                    for products in dot_bytes(len(spec.adasum.replicas), len(spec.adasum.table)):
                        found["gradients", "all_reduce", spec.adasum.ranks, products] += 1
            found["gradients", op, spec.ranks, summed] += len(compilation.rows) if spec.each else 1
            gathers[spec.index] += spec in compilation.gathers
            if gathers[spec.index]:
                found["parameters", "all_gather", spec.ranks, gathered[spec.index]] += gathers[spec.index]
    return tuple(
        Message(purpose=purpose, op=op, ranks=ranks, tensor_bytes=size, count=count)
        for (purpose, op, ranks, size), count in found.items()
    )


def first_of_tables(compilation: Compilation, rank: int) -> frozenset[int]:
    """The first bucket of each set of those whose gradients a rank combines together, with one sum of dot products at a
    level."""
    tables = {
        (spec.adasum.ranks, len(spec.adasum.replicas)): spec.index
        for spec in reversed(compilation.reduces)
        if spec.adasum is not None and rank in spec.ranks
    }
    return frozenset(tables.values())


def _gathers(compilation: Compilation, rank: int, clock: RNGPosition | None) -> Counter[int]:
    """How often a rank gathers each bucket in a step, for the tasks that read it."""
    found = Counter[int]()
    units = tuple(unit for unit in compilation.units if rank in unit.spec.ranks and unit.spec.gathers == "task")
    if not units:
        return found
    data = rank_step(compilation, rank, compilation.program(rank), clock, device=compilation.captured.device)
    for stage in data.stages:
        for program in stage.programs:
            derivative = program.derivative
            assert derivative is not None
            split = derivative.split
            backward = [derivative.backward] if split is None else [split.inputs, split.weights]
            for code in (derivative.forward, *(graph.code for graph in backward)):
                for node in code.graph.nodes:
                    if node.op == "call_method" and node.target == "start":
                        found[int(node.args[0].name.removeprefix("unit_").split("_")[0])] += 1
    return found


def gathered_bytes(compilation: Compilation) -> dict[int, int]:
    """The size of each bucket of parameters that are gathered from stretches, by its index."""
    return {unit.spec.index: unit.whole_bytes for unit in compilation.units}


def kind_of_sum(spec: ReduceSpec) -> str:
    """The collective that sums a bucket which every rank has whole."""
    return "all_gather" if spec.rows else "all_reduce"


def summed_bytes(compilation: Compilation, spec: ReduceSpec, size: int) -> int:
    """The size of a bucket of gradients of *size* bytes as ranks exchange it; of a sparse one, that of the rows of all
    ranks and their indices."""
    if not spec.dtype and not spec.rows:
        return size
    name = compilation.bucket_parameters[spec.index][0]
    part = compilation.local_parameters(spec.ranks[0])[name]
    own = part.dtype
    if spec.rows:
        element = _element_bytes(spec.dtype) if spec.dtype else own.itemsize
        return len(spec.ranks) * spec.rows * (prod(part.shape[1:]) * element + torch.int64.itemsize)
    return size // own.itemsize * _element_bytes(spec.dtype)


def bucket_bytes(compilation: Compilation) -> list[int]:
    """The size of each bucket of gradients, in the order of ``compilation.reduces``."""
    held: dict[int, dict[str, int]] = {}
    sizes = []
    for spec, names in zip(compilation.reduces, compilation.bucket_parameters, strict=True):
        rank = spec.ranks[0]
        if rank not in held:
            own = compilation.local_parameters(rank).items()
            held[rank] = {name: prod(part.shape) * part.dtype.itemsize for name, part in own}
        sizes.append(sum(held[rank][name] for name in names))
    return sizes


def call_bytes(call: CollectiveCall) -> int:
    """Size of the whole tensor of a collective, as in `whale.planner.network.communication`; gathered shards are padded
    to the largest.

    >>> call_bytes(CollectiveCall("n", "all_gather", (0, 1), "float32", ((2, 3), (1, 3))))
    48
    """
    element = _element_bytes(call.dtype)
    if call.op == "all_gather":
        return element * len(call.shapes) * max(prod(shape) for shape in call.shapes)
    if call.op == "reduce_scatter":
        return element * sum(prod(shape) for shape in call.shapes)
    whole = prod(call.shapes[0])
    return element * (whole // len(call.ranks) if call.op == "all_to_all" else whole)


def _element_bytes(dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize
