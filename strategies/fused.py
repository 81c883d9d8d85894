"""Fused kernels of accelerators for operators that the meta device and processors decompose: attention, dropout, RMS
norm, expert products.

Each one saves for its backward what that kernel saves, and reports its computation and memory traffic to a listener. It
knows no prices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from whale.graph.nodes import graph_copy
from whale.runtime.experts import product_of_groups
from whale.runtime.local_program import LocalCode, LocalGraph, LocalProgram
from whale.runtime.random import SeededAttention
from whale.runtime.routing import AtExperts

__all__ = ["FUSED", "FusedCall", "Listener", "Traffic", "accelerated", "fused", "work_of_attention"]

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """``elements`` of the run's dtype, and ``bytes`` of other dtypes."""

    elements: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(elements=self.elements + other.elements, bytes=self.bytes + other.bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(elements=self.elements - other.elements, bytes=self.bytes - other.bytes)


class Listener(Protocol):
    """Listener that receives every fused kernel."""

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
        """Called for every kernel that ran."""

    def traffic(self, tensors: Sequence[Tensor]) -> Traffic:
        """Memory traffic of these tensors."""
        ...


def work_of_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[int, ...], int]:
    """Dims and operations of the two products of an attention."""
    batch, length, size = prod(query.shape[:-2]), query.shape[-2], query.shape[-1]
    columns = key.shape[-2]
    return (batch, length, columns, size), 2 * batch * length * columns * (size + value.shape[-1])


class _Attention(torch.autograd.Function):
    """Fused attention (Dao et al. 2022): saves its operands, its result and a statistic for each row of scores."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, recorder: Listener, name: str,
        causal: bool,
    ) -> Tensor:  # fmt: skip
        *outer, length, _ = query.shape
        size = value.shape[-1]
        if len(outer) == 2:  # in the layout that the following projection reads
            result = query.new_empty(outer[0], length, outer[1], size).transpose(1, 2)
        else:
            result = query.new_empty(*outer, length, size)
        statistic = query.new_empty(*outer, length, dtype=torch.float32)
        given = [x for x in (query, key, value, mask) if x is not None]
        ctx.save_for_backward(*given, result, statistic)
        ctx.recorder, ctx.name, ctx.causal, ctx.masked = recorder, name, causal, mask is not None
        ctx.work = work_of_attention(query, key, value)
        dims, flops = ctx.work
        recorder.add(
            name=name, kind="attention", dims=dims, flops=flops, causal=causal,
            read=recorder.traffic(given), written=recorder.traffic([result, statistic]),
        )  # fmt: skip
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tensors, recorder = ctx.saved_tensors, ctx.recorder
        given = tensors[: 3 + ctx.masked]
        grads = [torch.empty_like(x) for x in given]
        dims, flops = ctx.work
        recorder.add(  # five products instead of two in the forward: the scores are recomputed
            name=f"{ctx.name}_backward", kind="attention", dims=dims, flops=flops * 5 // 2, causal=ctx.causal,
            read=recorder.traffic([*tensors, grad]), written=recorder.traffic(grads[:3]),
        )  # fmt: skip
        mask = grads[3] if ctx.masked and ctx.needs_input_grad[3] else None
        return *grads[:3], mask, None, None, None


def _attention(
    recorder: Listener,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    name = "aten.scaled_dot_product_attention" + ("+dropout" if dropout_p else "")
    return _Attention.apply(query, key, value, attn_mask, recorder, name, is_causal)


def _dropout(recorder: Listener, x: Tensor, p: float, train: bool) -> Tensor:
    return aten.native_dropout.default(x, p, True)[0] if train and p else x


class _RootMeanSquare(torch.autograd.Function):
    """Fused RMS norm: saves its input and a statistic for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, size: int, recorder: Listener) -> Tensor:
        result = torch.empty_like(x)
        statistic = x.new_empty(x.numel() // size, dtype=torch.float32)
        ctx.save_for_backward(x, statistic, *([] if weight is None else [weight]))
        ctx.recorder = recorder
        given = [t for t in (x, weight) if t is not None]
        _RootMeanSquare.note(recorder, "aten._fused_rms_norm", given, [result, statistic])
        return result

    @staticmethod
    def note(recorder: Listener, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """A kernel that moves data only."""
        moved = recorder.traffic(read), recorder.traffic(written)
        recorder.add(name=name, kind="memory", dims=(), flops=0, read=moved[0], written=moved[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, statistic, *weight = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (x, *weight)]
        name = "aten._fused_rms_norm_backward"
        _RootMeanSquare.note(ctx.recorder, name, [grad, x, statistic, *weight], grads)
        return grads[0], grads[1] if weight else None, None, None


def _rms_norm(
    recorder: Listener, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _RootMeanSquare.apply(x, weight, prod(shape), recorder)


class _Grouped(torch.autograd.Function):
    """Rows times the matrix of their group, each matrix read once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, ends: Tensor, recorder: Listener) -> Tensor:
        result = x.new_empty(x.shape[0], matrices.shape[-1])
        ctx.save_for_backward(x, matrices, ends)
        ctx.recorder = recorder
        _Grouped.note(recorder, "aten._grouped_mm", x, matrices, result)
        return result

    @staticmethod
    def note(recorder: Listener, name: str, x: Tensor, matrices: Tensor, result: Tensor) -> None:
        """A product of *x* and *matrices*, or of two of the three for the third."""
        count, inner, width = matrices.shape
        operands = {id(t): t for t in (x, matrices, result)}
        *given, made = operands.values()
        recorder.add(
            name=name, kind="grouped_matmul", dims=(count, x.shape[0], width, inner),
            flops=2 * x.shape[0] * width * inner, read=recorder.traffic(given), written=recorder.traffic([made]),
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, matrices, _ = ctx.saved_tensors
        grad_x, grad_matrices = torch.empty_like(x), torch.empty_like(matrices)
        _Grouped.note(ctx.recorder, "aten._grouped_mm", grad, matrices.transpose(1, 2), grad_x)
        count, inner, width = matrices.shape
        ctx.recorder.add(
            name="aten._grouped_mm", kind="grouped_matmul", dims=(count, inner, width, x.shape[0]),
            flops=2 * x.shape[0] * width * inner,
            read=ctx.recorder.traffic([x, grad]), written=ctx.recorder.traffic([grad_matrices]),
        )  # fmt: skip
        return grad_x, grad_matrices, None, None


def _products(
    recorder: Listener, x: Tensor, matrices: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, kernel: Any
) -> Tensor:
    def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        return _Grouped.apply(x, matrices, ends, recorder)

    return product_of_groups(x, matrices, order, inverse, ends, grouped)


FUSED: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.dropout.default: _dropout,
    aten.rms_norm.default: _rms_norm,
    product_of_groups: _products,
}


def accelerated(program: LocalProgram) -> LocalProgram:
    """The program with fused kernels on any device; it saves what it would save on an accelerator."""
    graph = program.micro_batch
    return replace(program, micro_batch=LocalGraph(_Accelerated(graph.code), graph.sources))  # type: ignore[arg-type]


def fused(program: LocalProgram) -> LocalProgram:
    """The same with modules in place of operators, so that its derivative can be made. Attention that is seeded is the
    kernel too, which draws by itself."""
    graph = program.micro_batch
    return replace(program, micro_batch=LocalGraph(_fused(graph.code), graph.sources))


def _fused(code: LocalCode) -> LocalCode:
    graph, root = graph_copy(code.graph), copy.copy(code.root)
    root._modules = dict(code.root._modules)
    for number, node in enumerate(graph.nodes):
        target = node.target
        if node.op == "call_module" and isinstance(seeded := root.get_submodule(str(target)), SeededAttention):
            target, node.args = seeded.target, node.args[1:]
        elif node.op == "call_module" and isinstance(placed := root.get_submodule(str(target)), AtExperts):
            root.add_module(str(target), AtExperts(_fused(placed.code), placed.num_rows, placed.route, placed.ranks))
        if target in FUSED:
            name = f"fused_{number}"
            root.add_module(name, FusedCall(target, draws=_drops(target, node)))
            node.op, node.target = "call_module", name
    return LocalCode(root, graph)


def _drops(target: Any, node: fx.Node) -> bool:
    """Whether a kernel draws numbers, to drop elements or weights of an attention."""
    if target is aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    return target is aten.dropout.default


class FusedCall(nn.Module):
    """A fused kernel without a listener.

    Args:
        target: the operator that it computes.
        draws: whether it draws random numbers.
    """

    def __init__(self, target: Any, *, draws: bool) -> None:
        super().__init__()
        self.target, self.draws = target, draws

    @property
    def is_opaque(self) -> bool:
        """Whether operators in its place do not show what it keeps."""
        return self.target not in (aten.dropout.default, product_of_groups)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        if self.target is product_of_groups:  # parameters must not be hidden from what gathers them
            return product_of_groups(*args[:-1], _of_first_matrix)
        return FUSED[self.target](_Nobody(), *args, **kwargs)


def _of_first_matrix(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """A product that reads, keeps and makes what a grouped one does."""
    return x @ matrices[0]


class _Accelerated:
    def __init__(self, code: LocalCode) -> None:
        self.code = code

    def __call__(self, *args: Any) -> Any:
        return _Interpreter(self.code.root, graph=self.code.graph).run(*args)


class _Interpreter(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        fused = FUSED.get(target)
        return fused(_Nobody(), *args, **kwargs) if fused else super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, AtExperts):
            return module.through(lambda root, code, given: _Interpreter(root, graph=code.graph).run(*given), *args)
        return super().call_module(target, args, kwargs)


class _Nobody:
    """A listener that records nothing."""

    def add(self, **what: Any) -> None:
        """Nothing."""

    def traffic(self, tensors: Sequence[Tensor]) -> Traffic:
        """Nothing."""
        return Traffic()
