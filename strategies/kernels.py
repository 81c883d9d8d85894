"""Recorder of a local program: its kernels forward and backward, the saved activations, and its live memory.

The program runs on the meta device, without data, operator by operator; a dispatch mode sees every kernel that would
run. Fused attention, dropout and expert products run here as single kernels, as on an accelerator, not in the
decomposed form of the meta device. It knows no prices.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from whale.graph.captured import Captured
from whale.ir.check import CollectiveCall
from whale.ir.strategy import RECOMPUTES, Recompute
from whale.runtime.collectives import Bridge
from whale.runtime.local_program import LocalCode, LocalGraph, LocalProgram
from whale.runtime.routing import AtExperts
from whale.strategies.derivatives import derivative_of
from whale.strategies.dry_run import (
    WithoutData,
    forward_without_data,
    noting_calls,
    stage_without_data,
    tensors_in,
)
from whale.strategies.fused import FUSED, Traffic, fused, work_of_attention
from whale.strategies.less_memory import in_less_memory
from whale.strategies.lowering import PlacedStage
from whale.strategies.recompute import computed_again, recomputed

__all__ = ["Again", "KernelRun", "Kept", "Trace", "trace", "trace_again"]

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class KernelRun:
    """One kernel that ran; the fields are those of `whale.ir.profile.Kernel`, for one number of rows."""

    name: str
    kind: str
    dims: tuple[int, ...]
    flops: int
    read: Traffic
    written: Traffic
    source: fx.Node | None
    split: bool
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A saved activation.

    ``source`` is the operator that made it; ``visible`` means that operators read it, not only a backward; ``received``
    and ``sent`` that it comes from another layer, or goes to one.
    """

    size: Traffic
    source: fx.Node | None
    split: bool
    visible: bool
    received: bool
    sent: bool


@dataclass(kw_only=True)
class Trace:
    """Record of one run of a layer. ``alive`` is its live memory at every allocation, without what exists
    before and after it: parameters, their gradients, and the batch."""

    forward: list[KernelRun] = field(default_factory=list)
    backward: list[KernelRun] = field(default_factory=list)
    forward_calls: tuple[CollectiveCall, ...] = ()
    backward_calls: tuple[CollectiveCall, ...] = ()
    kept: list[Kept] = field(default_factory=list)
    alive: list[Traffic] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Again:
    """Record of one run of a layer whose backward computes values again.

    ``kept`` is the size of what its forward keeps, and ``sent`` that of what goes to another layer among it; ``alive``
    is as in `Trace`; ``sources`` are the operators of which something runs again, each with whether that is a product
    or an attention.
    """

    kept: Traffic
    sent: Traffic
    alive: list[Traffic]
    sources: frozenset[tuple[fx.Node, bool]]


def trace_again(
    captured: Captured,
    stage: PlacedStage,
    program: LocalProgram,
    micro_batch: int,
    dtype: torch.dtype,
    *,
    rules: Iterable[Recompute] = RECOMPUTES,
) -> dict[Recompute, Again]:
    """Run the derivative of a layer's program with fused kernels, without data, under each of the *rules* that changes
    what it keeps.

    *dtype* is the stand-in for the run's dtype.
    """
    program = fused(program)
    whole = derivative_of(captured, stage, 0, program, micro_batch, torch.device("cpu"))
    found: dict[Recompute, Again] = {}
    for rule in rules:
        changed = recomputed(whole, rule)
        if changed is not whole:
            changed = changed.with_backwards(lambda graph: LocalGraph(in_less_memory(graph.code), graph.sources))
            found[rule] = _run_again(captured, stage, replace(program, derivative=changed), micro_batch, dtype)
    return found


def _run_again(
    captured: Captured, stage: PlacedStage, program: LocalProgram, micro_batch: int, dtype: torch.dtype
) -> Again:
    recorder = _Recorder(stage, dtype)
    running, _ = noting_calls(program)
    given = running.derivative
    assert given is not None
    forward = _Interpreted(given.forward)
    backward = LocalGraph(_Interpreted(given.backward.code), given.backward.sources)  # type: ignore[arg-type]
    forward.begin = recorder.begin
    forward.received = [place for place, (kind, _) in enumerate(program.micro_batch.sources) if kind == "received"]
    running = replace(running, derivative=replace(given, forward=forward, backward=backward))  # type: ignore[arg-type]
    with recorder, torch.no_grad():
        local, received = stage_without_data(captured, stage, 0, running, micro_batch, gradients=True)
        outputs, kept = local.forward_to_train(0, received)
        del received  # only what the backward reads is kept
        shapes = [(x.shape, x.dtype, recorder.number(x), recorder.size(x)) for x in outputs]
        del outputs
        size = recorder.now
        sent = sum((own for _, _, number, own in shapes if recorder.is_alive(number)), Traffic())
        local.backward(0, kept, [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, *_ in shapes])
    return Again(kept=size, sent=sent, alive=recorder.alive, sources=frozenset(computed_again(given)))


class _Interpreted:
    """Code that is run node by node, and frees what no later node reads.

    ``begin`` is called before a forward runs, with those of its arguments that it has ``received``.
    """

    def __init__(self, code: LocalCode) -> None:
        self.root, self.graph = code.root, code.graph
        self.begin: Callable[[Sequence[Tensor]], None] = lambda received: None
        self.received: list[int] = []

    def __call__(self, *args: Any) -> Any:
        """Run a forward."""
        self.begin([args[place] for place in self.received])
        return self.function(self.root, list(args))

    def function(self, root: nn.Module, args: list[Any]) -> Any:
        """Run it with the arguments of a list, which it empties."""
        return fx.Interpreter(root, graph=self.graph).boxed_run(args)


def trace(captured: Captured, stage: PlacedStage, program: LocalProgram, micro_batch: int, dtype: torch.dtype) -> Trace:
    """Run a layer's program forward and backward without data, and record it.

    *dtype* is the stand-in for the run's dtype.
    """
    recorder = _Recorder(stage, dtype)
    running, calls = noting_calls(program)
    graph = running.micro_batch
    watched = replace(running, micro_batch=LocalGraph(_Watched(graph, recorder), graph.sources))  # type: ignore[arg-type]
    found = Trace()
    with recorder, torch.enable_grad():
        roots, seeds = forward_without_data(captured, stage, 0, watched, micro_batch, gradients=True)
        found.forward_calls = tuple(calls)
        found.forward, recorder.kernels = recorder.kernels, []
        calls.clear()
        sent = {recorder.number(x) for x in roots}
        edges = [get_gradient_edge(x) for x in roots]
        del roots  # only their readers save them
        if edges:
            with recorder.recording(None):
                torch.autograd.backward(edges, seeds)
    found.backward, found.backward_calls = recorder.kernels, tuple(calls)
    found.kept, found.alive = recorder.kept(sent), recorder.alive
    return found


class _Recorder(WithoutData):
    """Records every kernel by its node, every tensor that autograd saves, and live storages.

    Storages have numbers, in the order of allocation, because addresses are reused.
    """

    def __init__(self, stage: PlacedStage, dtype: torch.dtype) -> None:
        super().__init__()
        self.stage, self.dtype = stage, dtype
        self.kernels: list[KernelRun] = []
        self.node: fx.Node | None = None
        self.on = False
        self.saved: dict[int, tuple[Traffic, fx.Node | None]] = {}
        self.made: dict[int, fx.Node | None] = {}  # by storage: who computed it
        self.visible: dict[int, tuple[fx.Node, nn.Module | None]] = {}  # by storage: the node that returned it
        self.claimed: set[Any] = set()
        self.given: set[int] = set()
        self.received: set[int] = set()
        self.alive: list[Traffic] = []
        self._now = Traffic()
        self._count = self._before = 0
        self._storages: dict[int, tuple[int, Any]] = {}  # by address: number, and a weak reference
        self._counted: dict[int, Traffic] = {}  # by number, of live storages

    def number(self, x: Tensor) -> int:
        """The number of a tensor's storage."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return self._storages[key][0]
        number = self._count = self._count + 1

        def gone(_: object) -> None:
            del self._storages[key]
            self._now -= self._counted.pop(number, Traffic())

        self._storages[key] = number, weakref.ref(storage, gone)
        return number

    def count(self, x: Tensor) -> None:
        """Count a tensor as alive until its storage is freed, unless it existed before."""
        number = self.number(x)
        if number not in self._counted and number > self._before:
            self._counted[number] = self.size(x)
            self._now += self._counted[number]
            self.alive.append(self._now)

    @property
    def now(self) -> Traffic:
        """The size of what is alive because of the layer."""
        return self._now

    def is_alive(self, number: int) -> bool:
        """Whether the storage of a number is alive."""
        return number in self._counted

    def begin(self, received: Sequence[Tensor]) -> None:
        """Forget everything that exists before the layer, except what it receives."""
        self._counted = {self.number(x): self.size(x) for x in received}
        self._now, self._before = sum(self._counted.values(), Traffic()), self._count
        self.alive = [self._now]

    @contextmanager
    def recording(self, node: fx.Node | None) -> Iterator[None]:
        """Record the kernels in this block as work of a node of the local graph."""
        before = self.node, self.on
        self.node, self.on = node, True
        try:
            yield
        finally:
            self.node, self.on = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = list(tensors_in((result,)))
        for x in outputs:
            self.count(x)
        if self.on:
            self._note(func, args, kwargs or {}, result, outputs)
        return result

    def _note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, outputs: Sequence[Tensor]) -> None:
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        for x in outputs:
            self.made.setdefault(self.number(x), self.node)
        packet = func._overloadpacket
        storages = {self.number(x) for x in inputs}
        view = not func._schema.is_mutable and all(self.number(x) in storages for x in outputs)
        if packet in _NOTHING or view:
            return
        read, written = _TOUCHES.get(packet, _all)(inputs, outputs)
        if (attention := _attention_work(packet, args)) is not None:
            self.add(name=str(packet), read=self.traffic(read), written=self.traffic(written), **attention)
            return
        kind, dims = _work(packet, args, outputs)
        flops = int(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0
        self.add(
            name=str(packet), kind=kind, dims=dims, flops=flops, read=self.traffic(read), written=self.traffic(written)
        )

    def add(
        self,
        *,
        name: str,
        kind: str,
        dims: tuple[int, ...],
        flops: int,
        read: Traffic,
        written: Traffic,
        causal: bool = False,
    ) -> None:
        """Record one kernel of the running node."""
        source, split = _source(self.node), self._works_in_parts(self.node)
        self.kernels.append(
            KernelRun(
                name=name,
                kind=kind,
                dims=dims,
                flops=flops,
                read=read,
                written=written,
                source=source,
                split=split,
                causal=causal,
            )
        )

    def traffic(self, tensors: Sequence[Tensor]) -> Traffic:
        """Memory traffic of these tensors; an expanded one counts with the size of its storage, a repeated one once."""
        total, seen = Traffic(), set[tuple[Any, ...]]()
        for x in tensors:
            key = (self.number(x), x.storage_offset(), tuple(x.shape), tuple(x.stride()))
            if key not in seen:
                count = prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size)
                total += self._traffic(count, x)
            seen.add(key)
        return total

    def size(self, x: Tensor) -> Traffic:
        """The size of a tensor's storage."""
        return self._traffic(x.untyped_storage().nbytes() // x.element_size(), x)

    def _traffic(self, count: int, x: Tensor) -> Traffic:
        same = x.dtype == self.dtype
        return Traffic(elements=count) if same else Traffic(bytes=count * x.element_size())

    def _works_in_parts(self, node: fx.Node | None) -> bool:
        """Whether the tensor group divides the work of a node."""
        choices = self.stage.choices.get(_source(node))  # type: ignore[arg-type]
        if choices is None or len(choices) < 2:
            return False
        return any(p.kind == "S" for p in (*choices[1].inputs, *choices[1].outputs))

    def _is_part(self, node: fx.Node, module: nn.Module | None) -> bool:
        """Whether a node returns a part of the whole value."""
        if isinstance(module, Bridge):
            return module.conversion.target.kind == "S"
        choices = self.stage.choices.get(_source(node))  # type: ignore[arg-type]
        return choices is not None and len(choices) > 1 and choices[1].outputs[0].kind == "S"

    def save(self, x: Tensor) -> Tensor:
        """Hook that autograd calls for every saved tensor; what it returned with its history would never be freed."""
        self.saved.setdefault(self.number(x), (self.size(x), self.node))
        return x.detach()

    def kept(self, sent: set[int]) -> list[Kept]:
        """Saved tensors, each storage once, without parameters, buffers and the batch."""
        found = []
        for storage, (size, node) in self.saved.items():
            if storage in self.given:
                continue
            received = storage in self.received
            maker = self.made.get(storage, node)
            shown = self.visible.get(storage)
            split = self._is_part(*shown) if shown else self._works_in_parts(maker)
            found.append(
                Kept(
                    size=size,
                    source=None if received else _source(maker),
                    split=split and not received,
                    visible=shown is not None,
                    received=received,
                    sent=storage in sent,
                )
            )
        return found

    def claim(self, result: Any, node: fx.Node, module: nn.Module | None) -> None:
        """Record the node that made these values, so that their backward is attributed to it."""
        stack = []
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self.visible.setdefault(self.number(x), (node, module))
                stack.append(x.grad_fn)
        while stack:
            function = stack.pop()
            if function is None or function in self.claimed:
                continue
            self.claimed.add(function)
            leaf = not function.next_functions  # gradient accumulation, which happens once a step in the trace
            function.register_prehook(lambda _, node=node, leaf=leaf: self.turn_to(node, not leaf))
            stack += [following for following, _ in function.next_functions]

    def turn_to(self, node: fx.Node, on: bool) -> None:
        """Called when the backward reaches the part of a node."""
        self.node, self.on = node, on


class _Watched:
    """Runs a graph node by node, so that the recorder knows the node of every kernel."""

    def __init__(self, graph: LocalGraph, recorder: _Recorder) -> None:
        self.graph, self.recorder = graph, recorder

    def __call__(self, *args: Any) -> Any:
        for (kind, _), x in zip(self.graph.sources, args, strict=True):
            numbers = self.recorder.received if kind == "received" else self.recorder.given
            numbers.add(self.recorder.number(x))
        self.recorder.begin([x for (kind, _), x in zip(self.graph.sources, args, strict=True) if kind == "received"])
        return _Interpreter(self.graph.code, self.recorder).run(*args)


class _Interpreter(fx.Interpreter):
    def __init__(self, code: LocalCode, recorder: _Recorder) -> None:
        super().__init__(code.root, graph=code.graph)
        self.recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_module"):
            return super().run_node(n)
        hooks = torch.autograd.graph.saved_tensors_hooks(self.recorder.save, lambda x: x)
        with self.recorder.recording(n), hooks:
            result = super().run_node(n)
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        self.recorder.claim(result, n, module)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        kernel = FUSED.get(target)
        return kernel(self.recorder, *args, **kwargs) if kernel else super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if not isinstance(module, AtExperts):
            return super().call_module(target, args, kwargs)

        def run(root: nn.Module, code: LocalCode, given: Sequence[Any]) -> Any:
            return _Interpreter(LocalCode(root, code.graph), self.recorder).run(*given)

        trained = [x for x in args if x.requires_grad]
        together = iter(_Together.apply(*trained) if trained else ())
        return module.through(run, *(next(together) if x.requires_grad else x for x in args))


class _Together(torch.autograd.Function):
    """Tensors whose gradients are there together, as those of a call on a tape."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _source(node: fx.Node | None) -> fx.Node | None:
    """The node of the captured graph that a node of a local one comes from."""
    return node.meta.get("source") if node is not None else None


# --- what a kernel does -----------------------------------------------------------------------------------------------

_NOTHING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view}

Tensors = Sequence[Tensor]
Touches = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""Replace a kernel's arguments and results by the tensors that it reads and writes, by size."""


def _all(inputs: Tensors, outputs: Tensors) -> tuple[Tensors, Tensors]:
    return inputs, outputs


def _fills(inputs: Tensors, outputs: Tensors) -> tuple[Tensors, Tensors]:
    return (), outputs


def _gathers(inputs: Tensors, outputs: Tensors) -> tuple[Tensors, Tensors]:
    return (*inputs[1:], *outputs), outputs


def _ignores_first(inputs: Tensors, outputs: Tensors) -> tuple[Tensors, Tensors]:
    return inputs[1:], outputs


def _changes_places(inputs: Tensors, outputs: Tensors) -> tuple[Tensors, Tensors]:
    return inputs[1:], inputs[-1:]


_TOUCHES: dict[Any, Touches] = {
    **dict.fromkeys((aten.zeros, aten.ones, aten.full, aten.zeros_like, aten.ones_like, aten.full_like, aten.arange,
                     aten.new_zeros, aten.new_ones, aten.new_full, aten.fill_, aten.zero_, aten.scalar_tensor), _fills),
    **dict.fromkeys((aten.embedding, aten.index_select, aten.index, aten.gather), _gathers),
    **dict.fromkeys((aten.copy_, aten.nll_loss_forward), _ignores_first),
    **dict.fromkeys((aten.scatter_add_, aten.scatter_, aten.index_add_, aten.index_put_), _changes_places),
}  # fmt: skip


def _work(packet: Any, args: Any, outputs: Tensors) -> tuple[str, tuple[int, ...]]:
    """Kind and dims of a kernel."""
    if packet in (aten.mm, aten.addmm):
        a, b = args[-2:]
        return "matmul", (1, a.shape[0], b.shape[1], a.shape[1])
    if packet in (aten.bmm, aten.baddbmm):
        a, b = args[-2:]
        return "matmul", (a.shape[0], a.shape[1], b.shape[2], a.shape[2])
    if packet is aten.convolution:
        return "convolution", _convolution(outputs[0], args[1], args[8])
    if packet is aten.convolution_backward:
        return "convolution", _convolution(args[0], args[2], args[9])
    return "memory", ()


def _convolution(result: Tensor, weight: Tensor, groups: int) -> tuple[int, ...]:
    """A convolution as a product: groups, positions, channels out and the window's size."""
    return groups, result.numel() // result.shape[1], weight.shape[0] // groups, prod(weight.shape[1:])


def _attention_work(packet: Any, args: Any) -> dict[str, Any] | None:
    """Kind, dims, operations and whether it is causal of a block of attention; None for other kernels."""
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        first, causal, products = 0, args[4:5], 2
    elif packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        first, causal, products = 1, args[7:8], 5  # the scores are recomputed
    else:
        return None
    dims, flops = work_of_attention(*args[first : first + 3])
    return {"kind": "attention", "dims": dims, "flops": flops * products // 2, "causal": any(causal)}
