"""Pieces of a stage's graphs that are recorded as CUDA graphs: the operators between what is the host's.

Collectives, gathers of parameters, gradients that are handed over, operators that seed a generator of the device and
those whose results have other shapes for other values stay nodes between pieces, in their order. Gradients are handed
over when the layer that makes them is done. Seeds are tensors that are written once a step. What a piece makes is in
memory of its recording, so that gradients and results are copied where they leave. It knows graphs and operators;
nothing of how pieces are recorded.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from whale.graph.nodes import node_copy
from whale.runtime.collectives import Take
from whale.runtime.cuda_graphs import Begin, Piece, Recorder, Slots, StepSeeds
from whale.runtime.derivative import OnTape, laid_out
from whale.runtime.local_program import Derivative, LocalCode, LocalGraph, LocalProgram, Source
from whale.runtime.random import (
    MaskKeys,
    PositionMask,
    RNGPosition,
    SeededCall,
    UniformNumbers,
    keep_mask,
    mask_keys,
    uniform_numbers,
)
from whale.strategies.recompute import draws_numbers
from whale.strategies.segments import FEWEST, Runs, Segment, is_work
from whale.strategies.split_backward import owner
from whale.strategies.traced_call import makes_alias, writes

__all__ = ["in_pieces"]

aten = torch.ops.aten

_STAYS = {"parameter", "buffer", "constant", "rows", "columns", "cast"}
"""Sources of tensors that are in the same memory in each step."""

_DRAWN = (MaskKeys, PositionMask, UniformNumbers)

_OTHER_SHAPES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def in_pieces(
    programs: Sequence[LocalProgram],
    recorder: Recorder,
    clock: RNGPosition,
    device: torch.device,
    units: Collection[int],
    warn: Callable[[str], None],
) -> list[LocalProgram]:
    """The programs of a stage's micro-batches with graphs in pieces; equal ones share theirs.

    Args:
        programs: of which they are.
        recorder: of the device.
        clock: of the step.
        device: of the rank.
        units: buckets of which gathered parameters are in the same memory in each step.
        warn: called if programs are run without recordings after all.
    """
    given: dict[int, list[LocalProgram]] = {}
    for one in programs:
        if one.derivative is not None:
            given.setdefault(id(one.derivative), []).append(one)
    keys = {key for first, *_ in given.values() for drawn in _drawn(first.derivative) for key in _keys(drawn)}
    seeds = StepSeeds(clock, sorted(keys), device)
    dividing = {key: _Dividing(like, Slots(recorder, seeds, warn), device, units) for key, like in given.items()}
    made = {key: each.run() for key, each in dividing.items()}
    if left_out := sorted({name for each in dividing.values() for name in each.left_out}):
        warn(
            f"CUDA graphs leave out {', '.join(left_out)}, which run as they are: they draw from torch's generator, "
            "wait for the device, or have a backward that only autograd knows"
        )
    found = {id(one): replace(one, derivative=made.get(id(one.derivative))) for one in programs}
    return [found[id(one)] for one in programs]


def _drawn(derivative: Derivative | None) -> Iterator[MaskKeys | PositionMask | UniformNumbers]:
    assert derivative is not None
    codes = [derivative.forward, derivative.backward.code]
    if (split := derivative.split) is not None:
        codes += [split.inputs.code, split.weights.code]
    for code in codes:
        yield from (module for module in code.root.children() if isinstance(module, _DRAWN))


def _keys(drawn: MaskKeys | PositionMask | UniformNumbers) -> tuple[int, ...]:
    return drawn.keys if isinstance(drawn, MaskKeys) else (drawn.key,)


class _Dividing:
    """The graphs of a derivative, which *programs* share; their pieces have the numbers of one slot."""

    def __init__(
        self, programs: Sequence[LocalProgram], slots: Slots, device: torch.device, units: Collection[int]
    ) -> None:
        assert programs[0].derivative is not None
        self.given, self.sources = programs[0].derivative, programs[0].micro_batch.sources
        self.programs = programs
        self.slots, self.seeds, self.device, self.units = slots, slots.seeds, device, units
        self.numbers = itertools.count()
        self.left_out: set[str] = set()
        results: Any = self.given.forward.graph.output_node().args[0]
        self.use: Source = ("kept", len(results) - self.given.num_results)  # behind all that the forward keeps

    def run(self) -> Derivative:
        given, split = self.given, self.given.split
        if split is not None:
            inputs, weights = self._backward(split.inputs, split.num_gradients), self._backward(split.weights, 0)
            split = replace(split, inputs=inputs, weights=weights)
        results: Any = given.backward.code.graph.output_node().args[0]
        arguments = [s if s[0] == "unit" else ("argument", number) for number, s in enumerate(self.sources)]
        return replace(
            given,
            forward=_Pieces(self, given.forward, arguments, given.num_results, is_forward=True).run(),
            backward=self._backward(given.backward, len(results)),
            split=split,
        )

    def _backward(self, graph: LocalGraph, num_results: int) -> LocalGraph:
        sources: list[Source] = [("sink", None), *graph.sources]
        code = _Pieces(self, graph.code, sources, num_results, is_forward=False).run()
        return LocalGraph(code, [*graph.sources, self.use])

    @cached_property
    def staying(self) -> frozenset[int]:
        """The numbers of the forward's arguments that are in the same memory in each step, for all micro-batches."""
        alike = {id(program.constant.code) for program in self.programs}
        return frozenset(
            number
            for number, (kind, what) in enumerate(self.sources)
            if kind in _STAYS
            and all(program.micro_batch.sources[number] == (kind, what) for program in self.programs)
            and (kind != "constant" or isinstance(what, str) or len(alike) == 1)
        )


class _Pieces(Runs):
    """One graph with its runs of operators as pieces; *sources* are those of its placeholders."""

    def __init__(
        self, whole: _Dividing, code: LocalCode, sources: Sequence[Source], num_results: int, *, is_forward: bool
    ) -> None:
        super().__init__(code)
        self.whole, self.num_results, self.is_forward = whole, num_results, is_forward
        holes = [node for node in code.graph.nodes if node.op == "placeholder"]
        self.sources = dict(zip(holes, sources, strict=True))
        self.use: Any = None

    def run(self) -> LocalCode:
        """The new graph. A result of a piece stays in memory if anything but pieces and copies reads it."""
        code = super().run()
        for node in code.graph.nodes:
            if node.op == "call_module" and isinstance(piece := getattr(code.root, str(node.target)), Piece):
                results = sorted(node.users, key=lambda user: user.args[1])
                piece.kept = tuple(not all(self._is_read_at_once(user) for user in x.users) for x in results)
        return code

    def _is_read_at_once(self, user: fx.Node) -> bool:
        if user.op == "call_module":
            return isinstance(getattr(self.root, str(user.target)), Piece)
        return user.target == "add_copy" or bool(user.meta.get("leaves"))

    def begin(self, placeholders: Sequence[fx.Node]) -> None:
        """Write the placeholders, and take a slot, or get that of the forward."""
        super().begin(placeholders)
        if self.is_forward:
            self.root.add_module("begin", Begin(self.whole.slots))
            self.use = self.new.call_module("begin")
        else:
            self.use = self.new.placeholder("use")

    def joins(self, node: fx.Node) -> bool:
        """Whether a node is an operator that can be recorded, and writes at most to what its run has made."""
        if node.op == "call_module":
            return isinstance(getattr(self.old_root, str(node.target)), (Segment, Take, *_DRAWN))
        if node.op != "call_function" or (node.target is not laid_out and not self._is_recordable(node)):
            return False
        return not writes(node) or owner(node) in self.inside

    def _is_recordable(self, node: fx.Node) -> bool:
        if not isinstance(node.target, torch._ops.OpOverload) or draws_numbers(node):
            return False
        return _OTHER_SHAPES.isdisjoint(node.target.tags) and all(map(self._is_plain, (node, *node.all_input_nodes)))

    def _is_plain(self, node: fx.Node) -> bool:
        """Whether a value has all its elements on the device."""
        value, device = node.meta.get("val"), node.kwargs.get("device")
        if isinstance(device, torch.device) and device.type != self.whole.device.type:
            return False
        is_there = not isinstance(value, Tensor) or value.device.type == self.whole.device.type
        return is_there and getattr(value, "layout", torch.strided) is torch.strided

    def counts(self, node: fx.Node) -> int:
        """Operators that compute something, of which a compiled run has enough: a recording without them is none."""
        if node.op == "call_module" and isinstance(getattr(self.old_root, str(node.target)), Segment):
            return FEWEST
        return super().counts(node) if not makes_alias(node) or writes(node) else 0

    def ends(self, node: fx.Node) -> bool:
        """All that the host does is in its order; a gradient of an earlier run is handed over meanwhile."""
        return is_work(node) and node.op != "get_attr" and node.target != "add"

    def ends_at_layers(self) -> bool:
        """If gradients wait to be handed over."""
        return bool(self.after)

    def copy(self, node: fx.Node) -> None:
        """Write a node of the host's; gradients are copied, because pieces write to their memory again."""
        super().copy(node)
        if node.op == "call_method" and node.target == "add":
            self.env[node].target = "add_copy"
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if not self._is_recordable(node):
                self.whole.left_out.add(str(node.target))
        elif node.op == "call_module":
            module = getattr(self.old_root, str(node.target))
            called = module.call if isinstance(module, OnTape) else module
            if isinstance(module, OnTape | SeededCall):
                self.whole.left_out.add(str(getattr(called, "target", type(called).__name__)))

    def output(self, results: Any) -> Any:
        """The results, copied because a piece may have made them, then what is kept, and the use of the slot."""
        found = list(super().output(results))
        for number, x in enumerate(results[: self.num_results]):
            if isinstance(x, fx.Node) and x.op != "placeholder":
                found[number] = self.new.call_function(aten.clone.default, (self.env[x],))
                found[number].meta["leaves"] = True
        return (*found, self.use) if self.is_forward else tuple(found)

    def first_arguments(self) -> tuple[fx.Node, ...]:
        """The use of the slot."""
        return (self.use,)

    def write(self, graph: fx.Graph, node: fx.Node, read: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """A node of a piece, which has its seed as a tensor."""
        module = getattr(self.old_root, str(node.target)) if node.op == "call_module" else None
        if not isinstance(module, _DRAWN):
            return node_copy(graph, node, read)
        rows, *others = map(read, node.all_input_nodes)
        seeds = [graph.get_attr(f"seed_{key}") for key in _keys(module)]
        if isinstance(module, MaskKeys):
            return graph.call_function(mask_keys, (seeds, rows))
        (seed,), (columns,) = seeds, others
        if isinstance(module, PositionMask):
            return graph.call_function(keep_mask, (seed, module.keep, rows, columns))
        return graph.call_function(uniform_numbers, (seed, rows, columns, module.digits))

    def module(self, number: int, outer: Sequence[fx.Node], graph: fx.Graph, results: Sequence[fx.Node]) -> nn.Module:
        """The piece."""
        root = nn.Module()
        for node in graph.nodes:
            if node.op == "get_attr":
                root.register_buffer(str(node.target), self.whole.seeds.of[int(str(node.target).removeprefix("seed_"))])
            elif node.op == "call_module":
                root.add_module(str(node.target), getattr(self.old_root, str(node.target)))
        stays = tuple(map(self._stays, outer))
        return Piece(next(self.whole.numbers), number == 0, LocalCode(root, graph), stays, (True,) * len(results))

    def _stays(self, node: fx.Node) -> bool:
        """Whether a tensor is in the same memory in each step, whatever makes it."""
        if node in self.sources:
            kind, what = self.sources[node]
            return kind == "argument" and what in self.whole.staying
        if node.op == "get_attr":
            return True
        unit = node.args[0] if node.target is operator.getitem else None
        if not isinstance(unit, fx.Node) or unit.target != "kept_parameters":
            return False
        _, bucket = self.sources[unit.all_input_nodes[0]]
        return bucket in self.whole.units
