"""Runnable layers with data: the program of one device of a tensor group, layer by layer, as the executor would run it.

Every layer of the chain has its own parameters in its own memory, so that weights are read from memory as in a step;
layers that share a parameter share it. Collectives are replaced by tensors of the right size. This module times nothing
and knows only its own device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from whale.graph.capture import Batch, batch_leaves
from whale.graph.values import value_tensor
from whale.runtime.collectives import DryGroup
from whale.runtime.local_program import LocalProgram, bound
from whale.runtime.random import RNGPosition
from whale.runtime.stage import LocalStage
from whale.strategies.derivatives import derivative_of
from whale.strategies.layers import LayeredModel
from whale.strategies.lowering import PlacedStage

__all__ = ["RunnableLayer", "runnable_layers"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunnableLayer:
    """One layer of the chain, ready to run on a micro-batch.

    Attributes:
        kind: of the layer.
        stage: runs its forward, with one value for each entry of ``received``.
        received: stand-ins for what earlier layers send.
        batch: the part of the global batch that the stage reads.
        parameters: those that it trains, in the order in which it uses them; what layers share is the same object.
    """

    kind: int
    stage: LocalStage
    received: tuple[Tensor, ...]
    batch: Mapping[str, Tensor]
    parameters: tuple[nn.Parameter, ...]


def runnable_layers(
    layered: LayeredModel,
    model: nn.Module,
    batch: Batch,
    *,
    degree: int,
    rows: int,
    positions: Sequence[int],
    device: torch.device,
) -> list[RunnableLayer]:
    """The layers at *positions* of the chain, on the first of *degree* devices, for micro-batches of *rows* rows.

    Args:
        layered: the captured model, for these rows among others.
        model: the source of values, if it has any; otherwise values of a usual size are generated.
        batch: a batch like the example; its rows are repeated until there are enough.
        degree: devices over which the layers are split.
        rows: of a micro-batch.
        positions: of the layers, ascending.
        device: on which to run.

    Raises:
        InfeasibleError: a layer cannot be split over this number of devices.
    """
    made: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    programs: dict[int, LocalProgram] = {}
    leaves = _repeated(batch, sum(layered.rows), device)
    generator = torch.Generator(device).manual_seed(0)
    found = []
    for position in positions:
        layer = layered.chain.layers[position]
        placed = layered.place(layer.kind, degree)
        if layer.kind not in programs:
            programs[layer.kind] = _program(layered, layer.kind, degree, rows, device)
        program = programs[layer.kind]
        first = next(other for other in layered.chain.layers if other.kind == layer.kind)
        names = dict(zip(first.parameters, layer.parameters, strict=True))
        tensors = _tensors(layered, placed, model, names, made, generator, device)
        read = [tensors["parameter", name] for name in first.parameters]
        parameters = tuple(t for t in read if isinstance(t, nn.Parameter) and t.requires_grad)
        found.append(
            RunnableLayer(
                kind=layer.kind,
                stage=_stage(placed, program, tensors, parameters, device),
                received=_received(placed, layered.rows.index(rows), generator, device),
                batch=leaves,
                parameters=parameters,
            )
        )
    return found


def _program(layered: LayeredModel, kind: int, degree: int, rows: int, device: torch.device) -> LocalProgram:
    """The program of a kind of layer, with its derivative."""
    placed, program = layered.place(kind, degree), layered.program(kind, degree, rows)
    micro_batch, rank = layered.rows.index(rows), placed.mesh.ranks[0]
    return replace(program, derivative=derivative_of(layered.captured, placed, rank, program, micro_batch, device))


def _stage(
    placed: PlacedStage,
    program: LocalProgram,
    tensors: Mapping[tuple[str, str], Tensor],
    parameters: tuple[nn.Parameter, ...],
    device: torch.device,
) -> LocalStage:
    outputs = tuple(f"sent {index}" for index in range(len(placed.sent)))
    return LocalStage(
        programs=bound([program], lambda name, ranks: _Silent(ranks) if len(ranks) > 1 else None),
        outputs=outputs + (("loss",) if placed.loss is not None else ()),
        mutated=tuple(placed.mutated),
        tensors=tensors,
        parameters=parameters,
        clock=RNGPosition(0),
        device=device,
    )


class _Silent(DryGroup):
    """A group whose collectives are neither made nor recorded."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__("", tuple(ranks), [])

    def note(self, op: str, x: Tensor, *shapes: Sequence[int], beside: bool = False) -> None:
        """Nothing."""


def _tensors(
    layered: LayeredModel,
    placed: PlacedStage,
    model: nn.Module,
    names: Mapping[str, str],
    made: dict[tuple[str, tuple[int, ...]], Tensor],
    generator: torch.Generator,
    device: torch.device,
) -> dict[tuple[str, str], Tensor]:
    """Parameters, buffers and constants of a layer under the names of the first layer of its kind."""
    captured = layered.captured
    at = placed.mesh.coordinates(placed.mesh.ranks[0])
    tensors: dict[tuple[str, str], Tensor] = {}
    for node in captured.graph.nodes:
        value = (node, 0)
        if node.op != "placeholder" or not isinstance(node.meta.get("val"), Tensor):
            continue
        kind = value_tensor(value)
        if node.name in captured.parameters and captured.parameters[node.name] in names and value in placed.stored:
            name = captured.parameters[node.name]
            shape = placed.layout.local_shape(value, placed.stored[value], (0, *at))
            key = (names[name], tuple(shape))
            if key not in made:
                source = model.get_parameter(names[name])
                made[key] = nn.Parameter(
                    _values(source, shape, kind.dtype, generator, device), requires_grad=source.requires_grad
                )
            tensors["parameter", name] = made[key]
        elif node.name in captured.buffers:
            name = captured.buffers[node.name]
            tensors["buffer", name] = _values(model.get_buffer(name), kind.shape, kind.dtype, generator, device)
        elif node.name in captured.constants:
            constant = captured.constants[node.name]
            tensors["constant", node.name] = _values(constant, kind.shape, kind.dtype, generator, device)
    return tensors


def _values(
    source: Tensor, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> Tensor:
    """The first part of a tensor with this shape; without values, ones for vectors and small random numbers for
    matrices, scaled to preserve the size of a product."""
    if not source.is_meta:
        return source.detach()[tuple(slice(0, size) for size in shape)].to(device, dtype, copy=True).contiguous()
    if not dtype.is_floating_point:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    if len(shape) < 2:
        return torch.ones(tuple(shape), dtype=dtype, device=device)
    fan_in = max(1, source.numel() // source.shape[0])
    return torch.randn(tuple(shape), generator=generator, device=device).mul_(fan_in**-0.5).to(dtype)


def _received(
    placed: PlacedStage, micro_batch: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, ...]:
    at = placed.mesh.coordinates(placed.mesh.ranks[0])
    found = []
    for value in placed.received:
        shape = placed.layout.local_shape(value, placed.stored[value], (micro_batch, *at))
        dtype = value_tensor(value).dtype
        if dtype.is_floating_point:
            x = torch.randn(tuple(shape), generator=generator, device=device).to(dtype)
        else:
            x = torch.zeros(tuple(shape), dtype=dtype, device=device)
        found.append(x)
    return tuple(found)


def _repeated(batch: Batch, rows: int, device: torch.device) -> dict[str, Tensor]:
    """The batch repeated to the given rows; zeros if it has no data."""
    leaves = {name: x for name, x in batch_leaves(batch).items() if isinstance(x, Tensor)}
    first = next((x for x in leaves.values() if x.dim()), None)
    found = {}
    for name, x in leaves.items():
        x = torch.zeros_like(x, device=device) if x.is_meta else x.to(device)
        if first is not None and x.dim() and x.shape[0] == first.shape[0]:
            x = x[torch.arange(rows, device=device) % x.shape[0]]
        found[name] = x
    return found
