"""The derivatives of a rank's local programs: tensors without data in place of its own, for
:mod:`whale.strategies.differentiation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from whale.graph.captured import Captured
from whale.graph.values import needs_grad, value_tensor
from whale.runtime.local_program import INPUTS, Derivative, LocalGraph, LocalProgram
from whale.runtime.stage import part
from whale.strategies.differentiation import differentiated
from whale.strategies.lowering import PlacedStage
from whale.strategies.recompute import recomputed
from whale.strategies.split_backward import split
from whale.strategies.traced_call import dense, fake_like, run_without_data

__all__ = ["derivative_of", "with_derivatives"]


def with_derivatives(
    captured: Captured,
    stage: PlacedStage,
    rank: int,
    programs: Sequence[LocalProgram],
    device: torch.device,
    *,
    in_parts: bool,
    layouts: Mapping[str, tuple[int, ...]] | None = None,
) -> list[LocalProgram]:
    """The programs of a stage's micro-batches with their derivatives; equal ones share theirs.

    Args:
        captured, stage, rank, programs: of which they are; the stage says what their backwards compute again.
        device: of the rank's tensors.
        in_parts: whether the schedule splits backwards.
        layouts: strides of parameters and buffers by name, where they are not contiguous.
    """
    known: dict[int, Derivative] = {}
    found: dict[int, LocalProgram] = {}
    for micro_batch, program in enumerate(programs):
        if id(program) in found:
            continue
        code = id(program.micro_batch.code)
        if program.nothing is None and code not in known:
            kept = derivative_of(captured, stage, rank, program, micro_batch, device, layouts)
            whole = recomputed(kept, stage.recompute)
            known[code] = split(whole) if in_parts else whole
        found[id(program)] = replace(program, derivative=known.get(code))
    return [found[id(program)] for program in programs]


def derivative_of(
    captured: Captured,
    stage: PlacedStage,
    rank: int,
    program: LocalProgram,
    micro_batch: int,
    device: torch.device,
    layouts: Mapping[str, tuple[int, ...]] | None = None,
) -> Derivative:
    """The derivative of one program, of a micro-batch; arguments as in :func:`with_derivatives`."""
    return _Arguments(captured, stage, rank, micro_batch, device, layouts or {}).derivative(program)


class _Arguments:
    """Tensors without data in place of those of a rank."""

    def __init__(
        self,
        captured: Captured,
        stage: PlacedStage,
        rank: int,
        micro_batch: int,
        device: torch.device,
        layouts: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.stage, self.micro_batch, self.device = stage, micro_batch, device
        self.at = stage.mesh.coordinates(rank)
        self.kinds: dict[tuple[str, str], Tensor] = {}
        self.leaves: dict[str, Tensor] = {}
        for node in captured.graph.nodes:
            if node.op != "placeholder" or not isinstance(node.meta.get("val"), Tensor):
                continue
            value, kind = (node, 0), value_tensor((node, 0))
            if node.name in captured.parameters and value in stage.stored:
                shape = stage.layout.local_shape(value, stage.stored[value], (0, *self.at))
                name = "parameter", captured.parameters[node.name]
                place = torch.device("cpu") if name[1] in stage.on_host else device
                self.kinds[name] = fake_like(
                    shape, kind.dtype, place, strides=layouts.get(name[1]), requires_grad=needs_grad(value)
                )
            elif node.name in captured.buffers:
                buffer = captured.buffers[node.name]
                self.kinds["buffer", buffer] = fake_like(kind.shape, kind.dtype, device, strides=layouts.get(buffer))
            elif node.name in captured.constants:
                constant = captured.constants[node.name]
                self.kinds["constant", node.name] = fake_like(
                    constant.shape, constant.dtype, device, strides=constant.stride()
                )
            elif node.name in captured.inputs:
                self.leaves[captured.inputs[node.name]] = kind

    def derivative(self, program: LocalProgram) -> Derivative:
        """The derivative of a program of the micro-batch."""
        earlier: dict[str, Sequence[Tensor]] = {}
        earlier["constant"] = run_without_data(program.constant.code, self._of(program.constant, earlier))
        earlier["step"] = run_without_data(program.step.code, self._of(program.step, earlier))
        seeds: list[Tensor | None] = []
        for value, placed in self.stage.sent.items():
            shape = self.stage.layout.local_shape(value, placed, (self.micro_batch, *self.at))
            seeds.append(fake_like(shape, value_tensor(value).dtype, self.device) if needs_grad(value) else None)
        if self.stage.loss is not None:
            loss = value_tensor(self.stage.loss)
            seeds.append(fake_like(loss.shape, loss.dtype, self.device))
        arguments = self._of(program.micro_batch, earlier)
        return differentiated(program.micro_batch, arguments, len(seeds), seeds)

    def _of(self, graph: LocalGraph, earlier: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
        return [self._argument(kind, what, earlier) for kind, what in graph.sources]

    def _argument(self, kind: str, what: Any, earlier: Mapping[str, Sequence[Tensor]]) -> Tensor:
        if kind in earlier and isinstance(what, int):
            return earlier[kind][what]
        if kind in ("parameter", "buffer", "constant"):
            return self.kinds[kind, what]
        if kind in INPUTS:
            leaf, intervals = what
            kind_of_leaf, place = self.leaves[leaf], self.device if kind == "input" else torch.device("cpu")
            whole = fake_like(kind_of_leaf.shape, kind_of_leaf.dtype, place, strides=kind_of_leaf.stride())
            return dense(part(whole, intervals))
        if kind == "sum":
            total = value_tensor(self.stage.summed[what])
            return fake_like(total.shape, total.dtype, self.device)
        if kind == "received":
            value = self.stage.received[what]
            placed = self.stage.stored[value]
            shape = self.stage.layout.local_shape(value, placed, (self.micro_batch, *self.at))
            return fake_like(shape, value_tensor(value).dtype, self.device, requires_grad=needs_grad(value))
        intervals, _ = what
        sizes = [sum(stop - start for start, stop in dim) for dim in intervals]
        if kind == "rows":
            return fake_like((prod(sizes[:-1]),), torch.int64, self.device)
        return fake_like((sizes[-1] if sizes else 1,), torch.int32, self.device)
