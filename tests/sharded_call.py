"""One operator call, whole against sharded, in one process: the oracle of the tests of axis rules.

A call is a node of a captured graph, or becomes a graph of one node. For a choice of the node on each axis of a small
mesh, operands are cut as the choice says, the node is lowered for every rank, and what the ranks compute is put
together again: parts are compared where they lie, terms are summed, and so for the gradients. Ranks whose form
communicates run in threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from whale.graph.canonical import canonicalize
from whale.graph.captured import Captured
from whale.graph.values import Value, is_call, needs_grad, output_shapes, resolve, value_tensor
from whale.ir.placement import Placement
from whale.ir.virtual_device import MeshAxis, VirtualDevice
from whale.runtime.local_program import LocalProgram, bound
from whale.runtime.random import RNGPosition
from whale.runtime.stage import element_numbers, part
from whale.strategies.analysis import Analysis, Choice, analyse
from whale.strategies.layout import Layout, LayoutAxis, Placements
from whale.strategies.lowering import PlacedStage, at_micro_batch, lower


class Call:
    """A node of an analysed graph with the tensors of its operands; every floating operand has a gradient."""

    def __init__(self, captured: Captured, analysis: Analysis, node: fx.Node, tensors: Mapping[Value, Tensor]) -> None:
        self.captured, self.analysis, self.node, self.tensors = captured, analysis, node, tensors
        self.values: list[Value] = [(node, i) for i in range(len(output_shapes(node)))]

        def tensor(leaf: Any) -> Any:
            return tensors[resolve(leaf)] if isinstance(leaf, fx.Node) else leaf

        args, kwargs = fx.map_arg((node.args, node.kwargs), tensor)
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        self.results: list[Any] = list(result) if isinstance(result, (tuple, list)) else [result]

    @property
    def opaque(self) -> bool:
        return self.analysis.rules[self.node].opaque

    @property
    def choices(self) -> list[Choice]:
        return self.analysis.choices[self.node]

    @property
    def offers(self) -> set[str]:
        return {str(choice) for choice in self.choices[1:]}


def single_call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """A call of an operator as a graph of one node."""
    graph = fx.Graph()
    tensors: dict[Value, Tensor] = {}

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        node = graph.placeholder(f"operand_{len(tensors)}")
        node.meta = {"val": leaf, "grad": leaf.requires_grad}
        tensors[(node, 0)] = leaf
        return node

    bound = pytree.tree_map(placeholder, (args, kwargs))
    node = graph.call_function(target, *bound)
    node.meta["val"] = target(*args, **kwargs)
    graph.output((node,))
    canonicalize(graph)
    for detach in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        if detach is not node and not detach.args[0].meta["val"].requires_grad:  # put in front of a random operator
            detach.replace_all_uses_with(detach.args[0])
            graph.erase_node(detach)
    calls = [node for node in graph.nodes if is_call(node)]
    assert len(calls) == 1, [str(call.target) for call in calls]
    leaves = pytree.tree_leaves(node.meta["val"])
    calls[0].meta["grad"] = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
    captured = Captured(graph=graph, parameters={}, buffers={}, constants={}, inputs={})
    return Call(captured, analyse(graph), calls[0], tensors)


def check(
    call: Call,
    choices: Sequence[Choice],
    weights: Sequence[Sequence[float]],
    compare_values: bool = True,
    empty: bool = False,
    scratch: Sequence[int] = (),
) -> None:
    """Compare the call lowered with a choice a mesh axis with the whole call; *weights* are the shares a mesh axis.

    *empty* says that it takes parts without a position, which many operators do not. Results numbered in *scratch* are
    not compared.
    """
    mesh_shape = tuple(len(w) for w in weights)
    axes = [LayoutAxis(name="time", size=1, sizes=(1,))]
    axes += [LayoutAxis(name=f"axis{i}", size=len(w), weights=tuple(w)) for i, w in enumerate(weights)]
    layout = Layout(call.analysis, axes)
    count = prod(mesh_shape)
    mesh = VirtualDevice(
        stage=0,
        ranks=tuple(range(count)),
        axes=tuple(MeshAxis(name=f"axis{i}", size=n) for i, n in enumerate(mesh_shape)),
        speeds=(1.0,) * count,
        memory_bytes=(1,) * count,
    )
    every = (call.choices[0], *choices)
    operands = call.analysis.ops[call.node].operands
    wanted = {value: _across(every, "inputs", i) for i, value in enumerate(operands)}
    made = {value: _across(every, "outputs", i) for i, value in enumerate(call.values)}
    stage = PlacedStage(
        index=0,
        mesh=mesh,
        layout=layout,
        nodes=(call.node,),
        choices={call.node: every},
        stored=wanted,
        received=tuple(wanted),
        sent=made,
        loss=None,
    )
    places = {rank: (0, *mesh.coordinates(rank)) for rank in mesh.ranks}
    spans = [layout.spans(placed, at) for placed in (*wanted.values(), *made.values()) for at in places.values()]
    if not empty and not all(ranges for found in spans for ranges in found.values()):
        return  # fewer positions than ranks
    given = {value: _distribute(call.tensors[value], value, placed, layout, places) for value, placed in wanted.items()}
    lowered = [
        at_micro_batch(lower(call.captured, call.analysis, stage, r, 0, clock=RNGPosition(0)), stage, r, 0)
        for r in mesh.ranks
    ]
    groups: dict[tuple[int, ...], _ThreadGroup] = {}
    programs = bound(lowered, lambda name, ranks: groups.setdefault(ranks, _ThreadGroup(ranks)))
    generator = torch.Generator().manual_seed(1)
    cotangents = {
        value: torch.randn(result.shape, dtype=result.dtype, generator=generator)
        for value, result in zip(call.values, call.results, strict=True)
        if isinstance(result, Tensor) and result.requires_grad
    }

    def rank_program(rank: int) -> tuple[list[Tensor], dict[Value, Tensor]]:
        own = {value: given[value][rank].detach().requires_grad_(needs_grad(value)) for value in wanted}
        program = programs[rank]
        given_by = {"received": list(own.values()), "constant": program.constant.code.once()}
        arguments = [
            given_by[kind][what] if kind in given_by else element_numbers(kind, what, torch.device("cpu"))
            for kind, what in program.micro_batch.sources
        ]
        outputs = list(program.micro_batch.code.once(*arguments))
        local = {value: part(c, layout.intervals(value, made[value], places[rank])) for value, c in cotangents.items()}
        picked = [(out, local[value]) for out, value in zip(outputs, call.values, strict=True) if value in local]
        picked = [(out, c) for out, c in picked if out.requires_grad]
        inputs = [value for value in wanted if needs_grad(value)]
        if not picked:
            return outputs, {value: torch.zeros_like(own[value]) for value in inputs}
        found = torch.autograd.grad(
            [out for out, _ in picked], [own[value] for value in inputs], [c for _, c in picked], allow_unused=True
        )
        filled = [torch.zeros_like(own[v]) if g is None else g for v, g in zip(inputs, found, strict=True)]
        return outputs, dict(zip(inputs, filled, strict=True))

    ran = _run(rank_program, programs, list(mesh.ranks))
    for index, (value, result) in enumerate(zip(call.values, call.results, strict=True)):
        if isinstance(result, Tensor) and index not in scratch:
            local = {rank: ran[rank][0][index] for rank in mesh.ranks}
            summed = [i for i, p in enumerate(made[value]) if p.kind == "P"]
            _compare(f"output {index}", result, local, value, made[value], layout, places, summed, compare_values)
    gradients = _whole_gradients(call, cotangents)
    for value, expected in gradients.items():
        local = {rank: ran[rank][1][value] for rank in mesh.ranks}
        summed = [i for i, p in enumerate(wanted[value]) if p.kind == "R*"]
        name = f"gradient of {value[0].name}"
        _compare(name, expected, local, value, wanted[value], layout, places, summed, compare_values)


def _across(choices: Sequence[Choice], side: str, index: int) -> Placements:
    return tuple(getattr(choice, side)[index] for choice in choices)


def _distribute(
    whole: Tensor, value: Value, placed: Sequence[Placement], layout: Layout, places: dict[int, tuple[int, ...]]
) -> dict[int, Tensor]:
    """Operands of each rank: random terms that add up to the whole."""
    summed = [i for i, p in enumerate(placed) if p.kind == "P"]
    keys = sorted({tuple(at[i] for i in summed) for at in places.values()})
    generator = torch.Generator().manual_seed(2)
    terms: dict[tuple[int, ...], Tensor] = {}
    rest = whole.detach().clone()
    scale = min(float(rest.abs().max()), 1.0) if whole.is_floating_point() and rest.numel() else 1.0
    for key in keys[1:]:
        if whole.is_floating_point():
            terms[key] = torch.randn(whole.shape, dtype=whole.dtype, generator=generator) * scale
        else:
            terms[key] = torch.zeros_like(whole)
        if whole.dtype != torch.bool:
            rest = rest - terms[key]
    terms[keys[0]] = rest
    return {
        rank: part(terms[tuple(at[i] for i in summed)], layout.intervals(value, tuple(placed), at)).clone()
        for rank, at in places.items()
    }


def _compare(
    name: str,
    whole: Tensor,
    local: dict[int, Tensor],
    value: Value,
    placed: Placements,
    layout: Layout,
    places: dict[int, tuple[int, ...]],
    summed: Sequence[int],
    compare_values: bool,
) -> None:
    tolerance = tolerance_of(layout.analysis)
    for rank, at in places.items():
        same = [i for i in range(len(at)) if i not in summed]
        alike = [r for r, other in places.items() if all(at[i] == other[i] for i in same)]
        expected = part(whole.detach(), layout.intervals(value, placed, at))
        got = local[alike[0]].detach()
        for other in alike[1:]:
            got = got + local[other].detach()
        assert got.shape == expected.shape, (
            f"{name}, rank {rank}: shape {tuple(got.shape)}, not {tuple(expected.shape)}"
        )
        if compare_values:
            message = f"{name}, rank {rank}"
            torch.testing.assert_close(
                got, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=partial("{}: {}".format, message)
            )


def tolerance_of(analysis: Analysis) -> float:
    """Tolerance of the least precise value of a graph."""
    single = any(value_tensor(value).dtype == torch.float32 for value in analysis.dims)
    return 1e-5 if single else 1e-9


def _whole_gradients(call: Call, cotangents: dict[Value, Tensor]) -> dict[Value, Tensor]:
    inputs = {v: call.tensors[v] for v in call.analysis.ops[call.node].operands if needs_grad(v)}
    if not cotangents or not inputs:
        return {}
    found = torch.autograd.grad(
        [call.results[value[1]] for value in cotangents],
        list(inputs.values()),
        list(cotangents.values()),
        allow_unused=True,
        retain_graph=True,
    )
    return {v: torch.zeros_like(x) if g is None else g for (v, x), g in zip(inputs.items(), found, strict=True)}


# Ranks as threads


class _ThreadGroup:
    """A process group of threads: each collective is a meeting of its members."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.size, self.condition = len(members), threading.Condition()
        self.index = {rank: i for i, rank in enumerate(members)}
        self.given: dict[int, Any] = {}
        self.round = 0

    def meet(self, given: Any, finish: Callable[[list[Any]], None]) -> None:
        """Wait for all members; the last one has *finish* work on what they gave, in the order of ranks."""
        with self.condition:
            mine = self.round
            self.given[self.index[_here.rank]] = given
            if len(self.given) == self.size:
                finish([self.given[i] for i in range(self.size)])
                self.given.clear()
                self.round += 1
                self.condition.notify_all()
            elif not self.condition.wait_for(lambda: self.round != mine, timeout=20):
                raise TimeoutError("another rank did not come to a collective")


_here = threading.local()


@contextmanager
def _threaded_collectives() -> Iterator[None]:
    def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        def finish(every: list[Tensor]) -> None:
            total = torch.stack(every).amax(0) if op == dist.ReduceOp.MAX else torch.stack(every).sum(0)
            for tensor in every:
                tensor.copy_(total)

        with torch.no_grad():
            group.meet(x, finish)

    def all_to_all(
        received: Tensor,
        sent: Tensor,
        taken: list[int],
        given: list[int],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        def finish(every: list[Any]) -> None:
            for target, (into, _) in enumerate(every):
                into.copy_(torch.cat([parts[target] for _, parts in every]))

        with torch.no_grad():
            group.meet((received, sent.split(given)), finish)
        return SimpleNamespace(wait=lambda: True) if async_op else None

    with mock.patch.object(dist, "all_reduce", all_reduce), mock.patch.object(dist, "all_to_all_single", all_to_all):
        yield


def _run(function: Callable[[int], Any], programs: Sequence[LocalProgram], ranks: Sequence[int]) -> dict[int, Any]:
    """Run a function on every rank: in turn, or in threads where a program communicates."""
    if not any(p.bridges for p in programs):
        return {rank: function(rank) for rank in ranks}
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        _here.rank = rank
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)

    with _threaded_collectives():
        threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results
