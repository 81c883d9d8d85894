"""Compiled kernels of a step: every run of operators between collectives becomes one function of Inductor, compiled
before the first step, so that no rank waits for another one's compiler in a collective."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from whale.compile.rank_step import RankStage, RankStep
from whale.runtime.collectives import DryGroup
from whale.runtime.local_program import Derivative, LocalProgram, bound
from whale.runtime.owned import HeldUnit
from whale.runtime.random import RNGPosition
from whale.runtime.stage import LocalStage
from whale.strategies.mask_hashes import masks_written_out
from whale.strategies.recompute import kept_once
from whale.strategies.segments import Segments

__all__ = ["Kernel", "compiled_kernels", "kernels_of_inductor", "run_alone"]


def kernels_of_inductor() -> Segments:
    """Compiles runs of operators with Inductor."""
    return Segments(Kernel)


class Kernel:
    """A graph as a function of Inductor, compiled when it is first called; again for operands in another layout.

    ``torch.compile`` would trace the graph again, and check before each call all that its trace assumed, which takes
    as long as many of the kernels: 0.2 ms, of a graph of two operators. Sizes and dtypes are those of the graph, so
    that only the layouts can be others.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self._functions: dict[tuple[tuple[int, ...], ...], Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        """The results of the graph."""
        layout = tuple([x.stride() for x in tensors])
        function = self._functions.get(layout)
        if function is None:
            function = self._functions[layout] = self._compiled(tensors)
        return function(*tensors)

    def _compiled(self, tensors: Sequence[Tensor]) -> Callable[..., Any]:
        """Compile the graph, or take what Inductor keeps on disk of an equal one, from another rank or an earlier
        run. It does so in a trace alone, with tensors of that trace; their sizes are fixed, as those of the graph."""
        from torch._inductor.compile_fx import compile_fx  # takes a second to load

        own = fx.GraphModule(self.graph, copy.deepcopy(self.graph.graph))  # the compiler writes to it
        mode = FakeTensorMode(shape_env=ShapeEnv())
        likes = [mode.from_tensor(x, static_shapes=True) for x in tensors]
        with torch.no_grad(), tracing(TracingContext(mode)):
            function: Any = compile_fx(own, likes)
        return cast("Callable[..., Any]", function)


def compiled_kernels(step: RankStep, segments: Segments) -> RankStep:
    """The step with compiled kernels in training; nothing is compiled yet."""
    derivatives: dict[int, Derivative] = {}
    programs: dict[int, LocalProgram] = {}

    def of_program(program: LocalProgram) -> LocalProgram:
        derivative = program.derivative
        if derivative is None:
            return program
        if id(derivative) not in derivatives:
            # Only a backward in one part computes masks again; kernels on processors store kept ones one by one.
            once = derivative if derivative.split is not None else kept_once(masks_written_out(derivative))
            derivatives[id(derivative)] = segments.of_derivative(once)
        if id(program) not in programs:
            programs[id(program)] = replace(program, derivative=derivatives[id(derivative)])
        return programs[id(program)]

    def of_stage(stage: RankStage) -> RankStage:
        return replace(stage, programs=tuple(map(of_program, stage.programs)))

    return replace(step, stages=tuple(map(of_stage, step.stages)))


def run_alone(
    step: RankStep,
    tensors: Mapping[tuple[str, Any], Any],
    batch: Mapping[str, Any],
    clock: RNGPosition,
    device: torch.device,
) -> None:
    """Run every program of a rank once, forward and backward, without other ranks and without a trace: parameters,
    gradients, buffers and generators are as before."""
    tensors = dict(tensors)
    for unit in [x for x in tensors.values() if isinstance(x, HeldUnit)]:
        alone = unit.alone()
        tensors["unit", unit.unit.spec.index] = alone
        tensors |= {("gradient", name): slot for name, slot in alone.slots.items()}
    parameters = [x for x in tensors.values() if isinstance(x, nn.Parameter)]
    gradients = [x.grad for x in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            for stage in step.stages:
                sums = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype in step.sums.likes]
                _run_stage(stage, tensors, (batch, sums), RNGPosition(clock.seed), device)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _run_stage(
    stage: RankStage,
    tensors: Mapping[tuple[str, Any], Any],
    given: tuple[Mapping[str, Any], Sequence[Tensor]],
    clock: RNGPosition,
    device: torch.device,
) -> None:
    distinct = list({id(program.derivative): program for program in stage.programs}.values())
    programs = bound(distinct, lambda name, ranks: DryGroup(name, ranks, []) if len(ranks) > 1 else None)
    local = LocalStage(
        programs=programs,
        outputs=stage.outputs,
        mutated=stage.mutated,
        tensors=tensors,
        parameters=(),
        clock=clock,
        device=device,
        returned=stage.returned,
    )
    local.begin(*given)
    for number, program in enumerate(programs):
        derivative = program.derivative
        if derivative is None:
            continue

        def blank(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        received = tuple(blank(*like) for like in derivative.received)
        for in_parts in (False, True) if derivative.split is not None else (False,):
            _, kept = local.forward_to_train(number, received)
            seeds = [None if like is None else blank(*like) for like in derivative.seeds]
            if in_parts:
                local.backward_of_inputs(number, kept, seeds)
                local.backward_of_weights(number, kept)
            else:
                local.backward(number, kept, seeds)
