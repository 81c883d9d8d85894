"""Sample calls of every operator that has an axis rule: small, in float64, in the forms that models use.

``offers`` names choices that the rule must offer (operands -> outputs), ``refused`` marks calls that a rule must leave
whole, ``random`` those whose values may differ from the whole call's, ``scratch`` results that only the operator's own
backward reads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whale.graph.row_wise import operator_of, row_wise
from whale.runtime.experts import from_experts, grouped_product, to_experts

aten = torch.ops.aten
_count = 0


@dataclass(frozen=True)
class Sample:
    """A call: the operator, its arguments, and what to expect of its rule."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    offers: tuple[str, ...] = ()
    refused: bool = False
    random: bool = False
    scratch: tuple[int, ...] = ()

    def __str__(self) -> str:
        def show(x: Any) -> str:
            if isinstance(x, Tensor):
                return "x".join(map(str, x.shape)) or "scalar"
            return "[" + ",".join(map(show, x)) + "]" if isinstance(x, (list, tuple)) else str(x)

        words = [*map(show, self.args), *(f"{k}={show(v)}" for k, v in self.kwargs.items())]
        name = str(self.target) if isinstance(self.target, torch._ops.OpOverload) else self.target.__name__
        return f"{name.removeprefix('aten.')}({','.join(words)})"


def x(*shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    """A float64 tensor with a gradient, different at every call, the same at every run."""
    global _count
    _count += 1
    generator = torch.Generator().manual_seed(_count)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low).requires_grad_()


def single(*shape: int) -> Tensor:
    """Like `x`, in float32, for kernels that have no other precision."""
    return x(*shape).detach().float().requires_grad_()


def data(*shape: int) -> Tensor:
    """Like `x`, without a gradient."""
    return x(*shape).detach()


def ints(high: int, *shape: int, low: int = 0) -> Tensor:
    """Integers below *high*."""
    global _count
    _count += 1
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(_count))


def bools(*shape: int) -> Tensor:
    """Bools of both sorts."""
    return ints(2, *shape).bool()


def S(target: Callable[..., Any], *args: Any, offers: tuple[str, ...] = (), refused: bool = False, random: bool = False,
      scratch: tuple[int, ...] = (), **kwargs: Any) -> Sample:  # fmt: skip
    """A sample in one line."""
    return Sample(target, args, kwargs, offers, refused, random, scratch)


def samples() -> Iterator[Sample]:
    """All of them, always the same."""
    global _count
    _count = 0
    yield from _pointwise()
    yield from _shape()
    yield from _matmul()
    yield from _matrices()
    yield from _reduce()
    yield from _index()
    yield from _loss()
    yield from _window()
    yield from _unpooled()
    yield from _recurrent()
    yield from _row_wise()
    yield from _random()


def _pointwise() -> Iterator[Sample]:
    batch = "S(0),S(0)->S(0)"
    yield S(aten.exp.default, x(4, 6), offers=("S(0)->S(0)", "S(1)->S(1)"))
    yield S(aten.tanh.default, x(4, 6))
    yield S(aten.gelu.default, x(4, 6))
    yield S(aten.pow.Tensor_Scalar, x(4, 6), 2)
    yield S(aten.atan2.default, x(4, 6), x(6), offers=("S(0),R*->S(0)", "S(1),S(0)->S(1)"))
    yield S(aten.maximum.default, x(4, 1, 6), x(5, 1), offers=("R*,S(0)->S(1)",))
    yield S(aten.clamp.Tensor, x(4, 6), x(6, low=-0.5, high=0.0), None)
    yield S(aten.lerp.Tensor, x(4, 6), x(4, 6), x(6))
    yield S(aten.addcmul.default, x(4, 6), x(4, 6), x(6))
    yield S(aten.silu.default, x(4))
    yield S(aten.exp.default, x())
    for target in (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.subtract.Tensor):
        yield S(target, x(4, 6), x(4, 6), offers=(batch, "P,P->P"))
    yield S(aten.add.Tensor, x(4, 6), x(6), alpha=3, offers=("P,P->P", "S(0),R*->S(0)"))
    yield S(aten.add.Tensor, x(4, 6), 3.0)
    yield S(aten.add.Scalar, x(4, 6), 3.0)
    yield S(aten.sub.Scalar, x(4, 6), 3.0)
    yield S(aten.rsub.Scalar, x(4, 6), 3.0)
    yield S(aten.add.Tensor, ints(9, 4), ints(9, 4), offers=("P,P->P",))
    for target in (aten.mul.Tensor, aten.multiply.Tensor):
        yield S(target, x(4, 6), x(4, 6), offers=(batch, "P,R*->P", "R*,P->P"))
        yield S(target, x(4, 6), x(4, 1))
        yield S(target, x(4, 6), 2.5, offers=("P->P",))
    for target in (aten.div.Tensor, aten.divide.Tensor, aten.true_divide.Tensor):
        yield S(target, x(4, 6), x(6, low=1.0, high=2.0), offers=("P,R*->P", "R*,P->P")[:1])
        yield S(target, x(4, 6), 3.0, offers=("P->P",))
    yield S(aten.div.Tensor_mode, x(4, 6), x(4, 6, low=0.1), rounding_mode="floor")
    for target in (aten.neg.default, aten.negative.default):
        yield S(target, x(4, 6), offers=("P->P",))
    for target in (aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor):
        yield S(target, bools(4, 6), bools(6), offers=("S(0),R*->S(0)",))
    yield S(aten.__and__.Scalar, ints(9, 4), 3)
    yield S(aten.floor_divide.default, ints(50, 4, 6), 4, offers=("S(0)->S(0)",))
    yield S(aten.floor_divide.default, ints(50, 4, 6), ints(9, 6, low=1))
    yield S(aten.log_sigmoid.default, x(4, 6))
    yield S(aten.leaky_relu.default, x(4, 6), 0.1, offers=("S(1)->S(1)",))
    yield S(aten.special_expit.default, x(4, 6))
    yield S(aten.absolute.default, x(4, 6))
    yield S(aten.hardswish.default, x(4, 6, low=-4.0, high=4.0), offers=("S(1)->S(1)",))
    yield S(aten.isclose.default, data(4, 6), data(6))
    yield S(aten.isfinite.default, data(4, 6))
    yield S(aten.isinf.default, data(4, 6))
    yield S(aten.greater.Tensor, data(4, 6), data(6))
    yield S(aten.less.Scalar, data(4, 6), 0.1)
    yield S(aten.complex.default, data(4, 6), data(4, 6))
    yield S(aten.polar.default, data(4, 6), data(4, 6))
    yield S(aten.where.self, bools(4, 6), x(4, 6), x(6), offers=("S(0),S(0),R*->S(0)", "R*,P,P->P"))
    yield S(aten.where.ScalarOther, bools(4, 6), x(4, 6), 0.0, offers=("R*,P->P",))
    yield S(aten.where.ScalarOther, bools(4, 1), x(4, 6), 2.0, offers=("R*,S(1)->S(1)",))
    yield S(aten.where.ScalarSelf, bools(4, 6), 1.0, x(4, 6))
    yield S(aten.where.Scalar, bools(4, 6), 1.0, 0.0)
    yield S(aten.masked_fill.Scalar, x(4, 6), bools(6), 0.0, offers=("P,R*->P",))
    yield S(aten.masked_fill.Scalar, x(4, 6), bools(4, 6), -3.0)
    yield S(aten.masked_fill.Tensor, x(4, 6), bools(4, 1), x(), offers=("S(0),S(0),R*->S(0)",))
    yield S(aten.fill.Scalar, x(4, 6), 2.0)
    yield S(aten.fill.Tensor, x(4, 6), x())
    yield S(aten.zero.default, x(4, 6))
    yield S(aten.prelu.default, x(4, 6, 3), x(6), offers=("S(1),S(0)->S(1)", "S(0),R*->S(0)"))
    yield S(aten.prelu.default, x(4, 6), x(1))
    yield S(aten.searchsorted.Tensor, torch.linspace(-1, 1, 7), data(4, 6).float(), offers=("R*,S(0)->S(0)",))
    yield S(aten.searchsorted.Tensor, data(4, 7).sort().values, data(4, 6), refused=True)
    yield S(aten.bucketize.Tensor, data(4, 6), torch.linspace(-1, 1, 7), offers=("S(0),R*->S(0)",))


def _shape() -> Iterator[Sample]:
    yield S(aten.reshape.default, x(4, 6), [24], offers=("S(0)->S(0)", "S(1)->S(0)", "P->P"))
    yield S(aten.reshape.default, x(24), [4, 6], offers=("S(0)->S(0)", "S(0)->S(1)"))
    yield S(aten.reshape.default, x(4, 6, 5), [4, 2, 15], offers=("S(0)->S(0)", "S(1)->S(2)", "S(2)->S(2)"))
    yield S(aten.reshape.default, x(4, 6), [4, 1, 6])
    yield S(aten.reshape.default, x(4, 3), [3, 4])
    yield S(aten.reshape.default, x(8, 6), [-1, 2, 3])
    yield S(aten.view.default, x(4, 6), [2, 2, 6])
    yield S(aten.unsqueeze.default, x(4, 6), 1, offers=("S(1)->S(2)",))
    yield S(aten.squeeze.dims, x(4, 1, 6, 1), [1, 3])
    yield S(aten.flatten.using_ints, x(4, 3, 2), 1)
    yield S(aten.transpose.int, x(4, 6), 0, 1, offers=("S(0)->S(1)", "P->P"))
    yield S(aten.transpose.int, x(4, 6, 5), -1, -2)
    yield S(aten.permute.default, x(4, 6, 5), [2, 0, 1], offers=("S(0)->S(1)", "S(2)->S(0)"))
    yield S(aten.permute.default, x(4, 6, 5), [0, -1, 1])
    for target in (aten.t.default, aten.numpy_T.default, aten.mT.default):
        yield S(target, x(4, 6), offers=("S(0)->S(1)",))
    yield S(aten.movedim.int, x(4, 6, 5), 0, -1, offers=("S(0)->S(2)",))
    yield S(aten.swapaxes.default, x(4, 6, 5), 0, 2, offers=("S(0)->S(2)",))
    yield S(aten.expand.default, x(1, 6), [4, 6], offers=("R*->S(0)", "S(1)->S(1)"))
    yield S(aten.expand.default, x(6), [4, -1], offers=("R*->S(0)", "S(0)->S(1)"))
    yield S(aten.expand_as.default, x(1, 6), data(4, 6), offers=("R*->S(0)",))
    yield S(aten.broadcast_to.default, x(6), [4, 6])
    yield S(aten.clone.default, x(4, 6), offers=("P->P",))
    yield S(aten.detach.default, x(4, 6))
    yield S(aten.view_as_real.default, torch.complex(data(4, 6), data(4, 6)), offers=("S(0)->S(0)",))
    yield S(aten.view_as_complex.default, x(4, 6, 2).detach())
    yield S(aten.real.default, torch.complex(data(4, 6), data(4, 6)))
    yield S(aten.imag.default, torch.complex(data(4, 6), data(4, 6)))
    yield S(aten.conj_physical.default, torch.complex(data(4, 6), data(4, 6)), offers=("S(0)->S(0)", "P->P"))
    yield S(aten._to_copy.default, x(4, 6).detach().float().requires_grad_(), dtype=torch.float64, offers=("P->P",))
    yield S(aten._to_copy.default, ints(9, 4), dtype=torch.float64)
    yield S(aten.split.Tensor, x(4, 6), 3, 1, offers=("S(0)->S(0),S(0)", "S(1)->S(1),S(1)", "P->P,P"))
    yield S(aten.split.Tensor, x(4, 6), 4, 1, offers=("S(0)->S(0),S(0)",))
    yield S(aten.split_with_sizes.default, x(4, 24), [12, 8, 4], 1, offers=("S(0)->S(0),S(0),S(0)",))
    yield S(aten.split_with_sizes.default, x(24, 4), [8, 8, 8], offers=("S(0)->S(0),S(0),S(0)",))
    yield S(aten.chunk.default, x(4, 8), 2, -1, offers=("S(1)->S(1),S(1)",))
    yield S(aten.chunk.default, x(4, 7), 2, 1, offers=("S(0)->S(0),S(0)",))
    yield S(aten.tensor_split.sections, x(7, 4), 3)
    yield S(aten.slice.Tensor, x(4, 6), 0, 0, 9223372036854775807, offers=("S(0)->S(0)", "S(1)->S(1)"))
    yield S(aten.slice.Tensor, x(4, 6), 1, 1, 5, offers=("S(0)->S(0)", "P->P"))
    yield S(aten.slice.Tensor, x(4, 6), 1, -4, -1)
    yield S(aten.slice.Tensor, x(4, 7), 1, 0, 7, 2)
    yield S(aten.slice.Tensor, x(4, 6), 0, None, None, 1)
    yield S(aten.narrow.default, x(4, 6), 1, 2, 3, offers=("S(0)->S(0)",))
    yield S(aten.select.int, x(4, 6, 5), 1, -2, offers=("S(0)->S(0)", "S(2)->S(1)", "P->P"))
    yield S(aten.unbind.int, x(3, 4, 6), offers=("S(1)->S(0),S(0),S(0)",))
    yield S(aten.stack.default, [x(4, 6), x(4, 6)], 1, offers=("S(0),S(0)->S(0)", "S(1),S(1)->S(2)", "P,P->P"))
    yield S(aten.cat.default, [x(4, 6), x(4, 3)], 1, offers=("S(0),S(0)->S(0)", "P,P->P"))
    yield S(aten.cat.default, [x(4, 8), x(4, 8), x(4, 8)], -1, offers=("S(1),S(1),S(1)->S(1)",))
    yield S(aten.cat.default, [x(4, 6), x(4, 1)], 1)
    yield S(aten.pad.default, x(4, 6), [1, 2], offers=("S(0)->S(0)", "P->P"))
    yield S(aten.pad.default, x(4, 6, 5), [1, 1], "reflect")
    yield S(aten.pad.default, x(4, 6), [0, 0, -1, 0], "constant", 2.0, offers=("S(1)->S(1)",))
    yield S(aten.constant_pad_nd.default, x(4, 6), [1, 1], 0.0)
    yield S(aten.flip.default, x(4, 6), [1], offers=("S(0)->S(0)", "P->P"))
    yield S(aten.roll.default, x(4, 6), [2], [-1], offers=("S(0)->S(0)",))
    yield S(aten.roll.default, x(4, 6), [2], refused=True)
    yield S(aten.tril.default, x(4, 6, 6), offers=("S(0)->S(0)", "P->P"))
    yield S(aten.triu.default, x(6, 6), 1)
    yield S(aten.diagonal.default, x(4, 6, 6, 5), 0, 1, 2, offers=("S(0)->S(0)", "S(3)->S(1)"))
    yield S(aten.diag_embed.default, x(4, 6), offers=("S(0)->S(0)",))
    yield S(aten.diag_embed.default, x(4, 6), 0, 0, 2, offers=("S(0)->S(1)",))
    yield S(aten.unfold.default, x(4, 6), 1, 3, 2, offers=("S(0)->S(0)", "P->P"))
    yield S(aten.repeat_interleave.self_int, x(4, 6), 3, 1, offers=("S(0)->S(0)", "S(1)->S(1)", "P->P"))
    yield S(aten.repeat_interleave.self_int, x(4, 6), 2, 0, output_size=8, offers=("S(0)->S(0)",))
    yield S(aten.repeat_interleave.self_int, x(4, 6), 2, refused=True)
    yield S(aten.pixel_shuffle.default, x(4, 12, 5, 6), 2, offers=("S(0)->S(0)", "S(1)->S(1)", "S(2)->S(2)"))
    yield S(aten.pixel_unshuffle.default, x(4, 3, 8, 6), 2, offers=("S(0)->S(0)", "S(1)->S(1)", "S(3)->S(3)"))
    yield S(aten.slice_scatter.default, x(4, 6), x(4, 2), 1, 1, 4, 2, offers=("S(0),S(0)->S(0)", "P,P->P"))
    yield S(aten.select_scatter.default, x(4, 6, 5), x(4, 5), 1, 2, offers=("S(0),S(0)->S(0)", "S(2),S(1)->S(2)"))
    yield S(aten.zeros.default, [4, 6], offers=("->S(0)", "->S(1)"))
    yield S(aten.ones.default, [4, 6])
    yield S(aten.full.default, [4, 6], 2.0)
    yield S(aten.empty.memory_format, [4, 6], random=True)
    for target in (aten.new_zeros.default, aten.new_ones.default):
        yield S(target, x(3, 5), [4, 6], offers=("->S(0)", "->S(1)"))
    yield S(aten.new_full.default, data(3), [4], 2.0)
    yield S(aten.new_empty.default, data(3), [4], random=True)
    for target in (aten.zeros_like.default, aten.ones_like.default):
        yield S(target, x(4, 6), offers=("S(0)->S(0)",))
    yield S(aten.full_like.default, x(4, 6), 2.0)
    yield S(aten.empty_like.default, data(4, 6), random=True)
    yield S(aten.arange.default, 7, offers=("->S(0)",))
    yield S(aten.arange.start, 3, 9)
    yield S(aten.arange.start_step, 3, 16, 2)
    yield S(aten.arange.start_step, 9, 0, -2)


def _matmul() -> Iterator[Sample]:
    for lead in ((), (3,), (4, 3)):
        yield S(aten.linear.default, x(*lead, 6), x(5, 6), x(5))
    yield S(aten.linear.default, x(4, 6), x(5, 6), offers=("S(0),R*->S(0)", "R*,S(0)->S(1)", "S(1),S(1)->P"))
    yield S(
        aten.linear.default, x(4, 6), x(5, 6), x(5), offers=("R*,S(0),S(0)->S(1)", "S(1),S(1),P->P", "S(0),R*,R*->S(0)")
    )
    yield S(aten.mm.default, x(4, 6), x(6, 5), offers=("S(0),R*->S(0)", "S(1),S(0)->P", "R*,S(1)->S(1)"))
    yield S(aten.bmm.default, x(4, 6, 3), x(4, 3, 5), offers=("S(0),S(0)->S(0)",))
    yield S(aten.dot.default, x(6), x(6), offers=("S(0),S(0)->P",))
    yield S(aten.mv.default, x(4, 6), x(6), offers=("S(1),S(0)->P",))
    for target in (aten.outer.default, aten.ger.default):
        yield S(target, x(4), x(6), offers=("S(0),R*->S(0)", "R*,S(0)->S(1)"))
    importlib.import_module("transformers.integrations.moe")  # registers its operators
    kernel = torch.ops.transformers.grouped_mm_fallback.default
    yield S(
        grouped_product, x(8, 6), x(4, 6, 5), ints(4, 8), kernel,
        offers=("S(0),R*,S(0)->S(0)", "S(1),S(1),R*->P", "R*,S(2),R*->S(1)"),
    )  # fmt: skip
    for function in (to_experts, from_experts):
        yield S(function, x(8, 6), ints(4, 8), offers=("S(0),S(0)->S(0)", "S(1),R*->S(1)", "P,R*->P"))
    yield S(aten.bilinear.default, x(4, 6), x(4, 5), x(3, 6, 5), x(3), offers=("S(0),S(0),R*,R*->S(0)",))
    yield S(aten.bilinear.default, x(4, 6), x(4, 5), x(3, 6, 5), offers=("R*,R*,S(0)->S(1)", "S(1),R*,S(1)->P"))
    yield S(aten.einsum.default, "bhqd,bhkd->bhqk", [x(4, 3, 5, 2), x(4, 3, 6, 2)], offers=("S(0),S(0)->S(0)",))
    yield S(aten.einsum.default, "nchw, kc -> nk", [x(4, 6, 2, 2), x(3, 6)], offers=("S(1),S(1)->P", "S(2),R*->P"))
    yield S(aten.einsum.default, "ii->i", [x(4, 4)], refused=True)
    yield S(aten.tensordot.default, x(4, 6, 5), x(5, 4, 3), [2, 0], [0, 1], offers=("S(1),R*->S(0)", "S(0),S(1)->P"))
    yield S(aten.addmm.default, x(5), x(4, 6), x(6, 5), offers=("S(0),R*,S(1)->S(1)", "P,S(1),S(0)->P"))
    yield S(aten.addmm.default, x(4, 5), x(4, 6), x(6, 5), offers=("S(0),S(0),R*->S(0)",))
    yield S(aten.addmm.default, x(5), x(4, 6), x(6, 5), alpha=0.5)
    yield S(aten.addmm.default, x(5), x(4, 6), x(6, 5), beta=0.5)
    yield S(aten.baddbmm.default, x(4, 5, 3), x(4, 5, 6), x(4, 6, 3), alpha=0.5, offers=("S(0),S(0),S(0)->S(0)",))
    yield S(aten.baddbmm.default, x(1, 1, 3), x(4, 5, 6), x(4, 6, 3), beta=2.0)
    yield S(aten.matmul.default, x(4, 3, 5, 6), x(4, 3, 6, 2), offers=("S(0),S(0)->S(0)", "S(3),S(2)->P"))
    yield S(aten.matmul.default, x(4, 3, 6), x(6, 5), offers=("S(0),R*->S(0)", "R*,S(1)->S(2)"))
    yield S(aten.matmul.default, x(5, 6), x(4, 6, 3), offers=("R*,S(0)->S(0)", "S(0),R*->S(1)"))
    yield S(aten.matmul.default, x(4, 1, 5, 6), x(3, 6, 2), offers=("R*,S(0)->S(1)",))
    yield S(aten.matmul.default, x(4, 6), x(6), offers=("S(0),R*->S(0)", "S(1),S(0)->P"))
    yield S(aten.matmul.default, x(6), x(6, 4), offers=("R*,S(1)->S(0)", "S(0),S(0)->P"))
    yield S(aten.matmul.default, x(6), x(3, 6, 4), offers=("R*,S(0)->S(0)",))
    yield S(aten.matmul.default, x(6), x(6), offers=("S(0),S(0)->P",))
    q, k, v = x(4, 6, 5, 3), x(4, 6, 7, 3), x(4, 6, 7, 2)
    attention = aten.scaled_dot_product_attention.default
    heads = "S(1),S(1),S(1)->S(1)"
    yield S(attention, q, k, v, offers=("S(0),S(0),S(0)->S(0)", heads, "S(2),R*,R*->S(2)"))
    yield S(attention, x(4, 6, 5, 3), x(4, 6, 5, 3), x(4, 6, 5, 3), is_causal=True, offers=(heads, "S(2),R*,R*->S(2)"))
    yield S(attention, q, k, v, bools(4, 1, 5, 7) | True, offers=("S(1),S(1),S(1),R*->S(1)",))
    yield S(attention, q, k, v, x(5, 7), scale=0.3, offers=("S(0),S(0),S(0),R*->S(0)", "S(2),R*,R*,S(0)->S(2)"))
    yield S(
        attention, x(4, 12, 5, 4), x(4, 4, 7, 4), x(4, 4, 7, 4), enable_gqa=True, offers=(heads, "S(1),R*,R*->S(1)")
    )
    yield S(attention, x(4, 6, 5, 3), x(4, 1, 7, 3), x(4, 1, 7, 3), enable_gqa=True, offers=("S(1),R*,R*->S(1)",))
    yield S(attention, x(6, 5, 3), x(6, 7, 3), x(6, 7, 3), offers=("S(0),S(0),S(0)->S(0)",))


def _matrices() -> Iterator[Sample]:
    square = x(4, 3, 3).detach() + 2 * torch.eye(3, dtype=torch.float64)
    positive = square @ square.mT
    for target, results, given in (
        (aten._linalg_det.default, 3, square), (aten._linalg_slogdet.default, 4, square),
        (aten.linalg_inv_ex.default, 2, square), (aten.linalg_matrix_exp.default, 1, square),
        (aten.linalg_qr.default, 2, square), (aten.linalg_lu_factor_ex.default, 3, square),
        (aten._linalg_svd.default, 3, square), (aten._linalg_eigh.default, 2, positive),
        (aten.linalg_cholesky_ex.default, 2, positive), (aten.cholesky.default, 1, positive),
    ):  # fmt: skip
        yield S(target, given.clone().requires_grad_(), offers=(f"S(0)->{','.join(['S(0)'] * results)}",))
    yield S(aten._linalg_eigvals.default, square, offers=("S(0)->S(0)",))
    yield S(aten.linalg_eig.default, square, offers=("S(0)->S(0),S(0)",))
    yield S(aten.cholesky_inverse.default, torch.linalg.cholesky(positive), offers=("S(0)->S(0)",))
    yield S(aten.cholesky_solve.default, data(4, 3, 2), torch.linalg.cholesky(positive), offers=("S(0),S(0)->S(0)",))
    triangular = torch.linalg.cholesky(positive).requires_grad_()
    yield S(aten.linalg_solve_triangular.default, triangular, x(4, 3, 2), upper=False)
    leaf = square.clone().requires_grad_()
    solved = "S(0),S(0)->S(0),S(0),S(0),S(0)"
    yield S(aten._linalg_solve_ex.default, leaf, x(4, 3, 2), offers=(solved,))
    yield S(aten._linalg_solve_ex.default, leaf, x(4, 3), offers=(solved,))
    yield S(aten._linalg_solve_ex.default, leaf, x(3, 2), refused=True)


def _reduce() -> Iterator[Sample]:
    for transform in (aten.fft_fft, aten.fft_ifft, aten.fft_hfft, aten.fft_ihfft, aten.fft_rfft, aten.fft_irfft):
        yield S(transform.default, x(4, 6), offers=("S(0)->S(0)",))
        yield S(transform.default, x(4, 6), 6, 0, offers=("S(1)->S(1)",))
    for transform in (aten.fft_fft2, aten.fft_ifft2, aten.fft_rfft2, aten.fft_irfft2):
        yield S(transform.default, x(4, 6, 5), offers=("S(0)->S(0)",))
    for transform in (aten.fft_fftn, aten.fft_ifftn, aten.fft_rfftn, aten.fft_irfftn):
        yield S(transform.default, x(4, 6, 5), None, [1, 2], offers=("S(0)->S(0)",))
        yield S(transform.default, x(4, 6, 5), [6, 5], offers=("S(0)->S(0)",))
        yield S(transform.default, x(4, 6))
    yield S(aten._fft_r2c.default, x(4, 6), [1], 0, True, offers=("S(0)->S(0)",))
    yield S(aten._fft_c2c.default, torch.complex(x(4, 6), x(4, 6)).detach(), [1], 0, True, offers=("S(0)->S(0)",))
    yield S(aten._fft_c2r.default, torch.complex(x(4, 4), x(4, 4)).detach(), [1], 2, 6, offers=("S(0)->S(0)",))
    yield S(aten.sum.default, x(4, 6), offers=("S(0)->P", "S(1)->P", "P->P"))
    yield S(aten.sum.dim_IntList, x(4, 6, 5), [1], offers=("S(0)->S(0)", "S(1)->P", "S(2)->S(1)"))
    yield S(aten.sum.dim_IntList, x(4, 6, 5), [-1, 0], True, offers=("S(0)->P", "S(1)->S(1)"))
    yield S(aten.sum.default, bools(4, 6))
    yield S(aten.mean.default, x(4, 6), offers=("S(0)->P", "P->P"))
    yield S(aten.mean.dim, x(4, 6), [1], True, offers=("S(0)->S(0)", "S(1)->P"))
    yield S(aten.mean.dim, x(4, 6, 5), [-1], offers=("S(2)->P",))
    yield S(aten.mean.dim, x(4, 6), None)
    yield S(aten.mean.dim, x(4, 6), [0, 1], dtype=torch.float32)
    yield S(aten.nansum.default, x(4, 6), [1], offers=("S(0)->S(0)", "S(1)->P"))
    yield S(aten.count_nonzero.default, ints(2, 4, 6), offers=("S(0)->P",))
    yield S(aten.count_nonzero.dim_IntList, ints(2, 4, 6), [1])
    for target in (aten.amax.default, aten.amin.default):
        yield S(target, x(4, 6), [1], offers=("S(0)->S(0)",))
        yield S(target, x(4, 6), [0], True, offers=("S(1)->S(1)",))
    for target in (aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default, aten.nanmedian.dim):
        yield S(target, x(4, 6), 1, offers=("S(0)->S(0),S(0)",))
    yield S(aten.max.default, x(4, 6))
    yield S(aten.max.other, x(4, 6), x(6), offers=("S(0),R*->S(0)",))
    yield S(aten.min.other, x(4, 6), x(6))
    yield S(aten.aminmax.default, x(4, 6), dim=1, offers=("S(0)->S(0),S(0)",))
    yield S(aten.argmax.default, data(4, 6), -1, offers=("S(0)->S(0)",))
    yield S(aten.argmin.default, data(4, 6), 0, True, offers=("S(1)->S(1)",))
    yield S(aten.argmax.default, data(4, 6))
    yield S(aten.prod.dim_int, x(4, 6), 1, offers=("S(0)->S(0)",))
    yield S(aten.any.dim, bools(4, 6), 1, offers=("S(0)->S(0)",))
    yield S(aten.all.dim, bools(4, 6), 1)
    yield S(aten.all.default, bools(4, 6))
    yield S(aten.var.correction, x(4, 6), [1], correction=0, offers=("S(0)->S(0)",))
    yield S(aten.std.correction, x(4, 6), [0], offers=("S(1)->S(0)",))
    yield S(aten.var_mean.correction, x(4, 6), [1], keepdim=True, offers=("S(0)->S(0),S(0)",))
    yield S(aten.std_mean.correction, x(4, 6), [1])
    yield S(aten.logsumexp.default, x(4, 6), [1], offers=("S(0)->S(0)",))
    yield S(aten.nanmean.default, x(4, 6), [1])
    yield S(aten.kthvalue.default, x(4, 6), 2, 1, offers=("S(0)->S(0),S(0)",))
    yield S(aten.norm.ScalarOpt_dim, x(4, 6), 2, [1], offers=("S(0)->S(0)",))
    yield S(aten.norm.Scalar, x(4, 6), 2)
    yield S(aten.linalg_vector_norm.default, x(4, 6), 2, [-1], True, offers=("S(0)->S(0)",))
    yield S(aten.histc.default, data(4, 6), 5, -1, 1, offers=("S(0)->P",))
    yield S(aten.histc.default, data(4, 6), 5, refused=True)
    yield S(aten.softmax.int, x(4, 6), -1, offers=("S(0)->S(0)",))
    yield S(aten._softmax.default, x(4, 6, 5), 1, False, offers=("S(0)->S(0)", "S(2)->S(2)"))
    yield S(aten.log_softmax.int, x(4, 6), 0, offers=("S(0)->S(0)", "S(1)->S(1)"))
    yield S(aten.log_softmax.int, x(4, 6), -1, torch.float32, offers=("S(1)->S(1)",))
    yield S(aten._log_softmax.default, x(4, 6), 1, False, offers=("S(0)->S(0)", "S(1)->S(1)"))
    yield S(aten._safe_softmax.default, x(4, 6), -1)
    for target in (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default):
        yield S(target, x(4, 6), 1, offers=("S(0)->S(0)",))
    yield S(aten.cumsum.default, data(4, 6) * 9, 1, dtype=torch.int64, offers=("S(0)->S(0)",))
    yield S(aten.sum.default, data(4, 6) * 9, dtype=torch.int32, offers=("S(0)->P",))
    for target in (aten.cummax.default, aten.cummin.default):
        yield S(target, x(4, 6), 1, offers=("S(0)->S(0),S(0)",))
    yield S(aten.diff.default, x(4, 6), offers=("S(0)->S(0)", "P->P"))
    yield S(aten.diff.default, x(4, 6), 1, -1, x(4, 1), offers=("S(0),S(0)->S(0)",))
    yield S(aten.diff.default, x(4, 6), 2, 0, x(2, 6), x(1, 6), offers=("S(1),S(1),S(1)->S(1)",))
    yield S(aten.sort.default, x(4, 6), 1, offers=("S(0)->S(0),S(0)",))
    yield S(aten.sort.stable, x(4, 6), stable=True, dim=0, offers=("S(1)->S(1),S(1)",))
    yield S(aten.argsort.default, data(4, 6), 1, True, offers=("S(0)->S(0)",))
    yield S(aten.topk.default, x(4, 6), 3, offers=("S(0)->S(0),S(0)",))
    yield S(aten.topk.default, x(4, 6), 2, 0, offers=("S(1)->S(1),S(1)",))
    yield S(aten.topk.default, x(4, 6), 6, -1)
    yield S(aten.glu.default, x(4, 6), offers=("S(0)->S(0)",))
    yield S(aten.cosine_similarity.default, x(4, 6), x(4, 6), offers=("S(0),S(0)->S(0)",))
    yield S(aten.cosine_similarity.default, x(4, 1, 6), x(5, 6), -1, offers=("S(0),R*->S(0)", "R*,S(0)->S(1)"))
    rows = "S(0),R*,R*->S(0)"
    yield S(aten.layer_norm.default, x(4, 3, 6), [6], x(6), x(6), offers=(rows,))
    yield S(aten.layer_norm.default, x(4, 3, 6), [3, 6], offers=("S(0)->S(0)",))
    yield S(aten.native_layer_norm.default, x(4, 6), [6], x(6), x(6), 1e-5, offers=("S(0),R*,R*->S(0),S(0),S(0)",))
    yield S(aten.rms_norm.default, x(4, 6), [6], x(6), offers=("S(0),R*->S(0)",))
    yield S(aten._fused_rms_norm.default, x(4, 6), [6], x(6), 1e-5)
    yield S(aten.cdist.default, x(4, 3, 6), x(4, 5, 6), offers=("S(0),S(0)->S(0)", "S(1),R*->S(1)", "R*,S(1)->S(2)"))
    yield S(aten.cdist.default, x(3, 6), x(2, 5, 6), 1.0, offers=("R*,S(0)->S(0)", "S(0),R*->S(1)"))


def _index() -> Iterator[Sample]:
    words = ("R*,S(0)->S(0)", "S(1),R*->S(2)", "S(0),R*->P")
    yield S(aten.embedding.default, x(7, 6), ints(7, 4, 3), offers=words)
    yield S(aten.embedding.default, x(7, 6), torch.tensor([[0, 2, 2], [2, 6, 1]]), 2, offers=words)
    yield S(aten.embedding.default, x(7, 6), ints(7, 4), 6, offers=("R*,S(0)->S(0)",))
    yield S(aten.embedding.default, x(7, 6), ints(7, 4, 3), -1, True, offers=("S(1),R*->S(2)",))
    yield S(aten.one_hot.default, ints(5, 4, 3), 5, offers=("S(0)->S(0)",))
    yield S(aten.one_hot.default, ints(5, 4, 3), refused=True)
    yield S(aten.gather.default, x(4, 6), 1, ints(6, 4, 3), offers=("S(0),S(0)->S(0)", "R*,S(1)->S(1)", "P,R*->P"))
    yield S(aten.gather.default, x(4, 6), 0, ints(4, 3, 5))
    yield S(aten.take_along_dim.default, x(4, 6), ints(6, 4, 3), 1, offers=("S(0),S(0)->S(0)",))
    yield S(aten.take_along_dim.default, x(4, 6), ints(6, 1, 3), 1)
    yield S(aten.take_along_dim.default, x(4, 6), ints(6, 5), refused=True)
    yield S(aten.scatter.src, x(4, 6), 1, ints(6, 4, 3).argsort(1), x(4, 3), offers=("S(0),S(0),S(0)->S(0)",))
    yield S(aten.scatter.value, x(4, 6), 1, ints(6, 4, 3), 2.0, offers=("S(0),S(0)->S(0)",))
    yield S(aten.scatter.reduce, data(4, 6), 1, ints(6, 4, 3), data(4, 3), reduce="multiply")
    yield S(aten.scatter_add.default, x(4, 6), 1, ints(6, 4, 5), x(4, 5),
            offers=("S(0),S(0),S(0)->S(0)", "P,S(1),S(1)->P", "P,R*,P->P"))  # fmt: skip
    yield S(aten.scatter_add.default, x(4, 6), 1, ints(6, 4, 3), data(4, 5))
    yield S(aten.scatter_reduce.two, x(4, 6), 1, ints(6, 4, 3), x(4, 3), "amax", offers=("S(0),S(0),S(0)->S(0)",))
    yield S(aten.index_add.default, x(7, 6), 0, ints(7, 4), x(4, 6),
            offers=("S(1),R*,S(1)->S(1)", "P,S(0),S(0)->P"))  # fmt: skip
    yield S(aten.index_add.default, x(4, 7), 1, ints(7, 5), x(4, 5), alpha=0.5)
    yield S(aten.index_copy.default, x(7, 6), 0, torch.tensor([1, 5, 2]), x(3, 6), offers=("S(1),R*,S(1)->S(1)",))
    yield S(aten.index_select.default, x(4, 7, 6), 1, ints(7, 5), offers=("S(0),R*->S(0)", "R*,S(0)->S(1)", "P,R*->P"))
    yield S(aten.index.Tensor, x(7, 6), [ints(7, 4, 3)], offers=("R*,S(0)->S(0)", "S(1),R*->S(2)", "P,R*->P"))
    yield S(aten.index.Tensor, x(4, 7, 5, 3), [None, ints(7, 6), ints(5, 6)], offers=("S(0),R*,R*->S(0)",))
    yield S(aten.index.Tensor, x(7, 5), [ints(7, 4, 1), ints(5, 1, 6)], offers=("R*,S(0),R*->S(0)", "R*,R*,S(1)->S(1)"))
    yield S(aten.index.Tensor, x(4, 7, 5), [ints(4, 3), None, ints(5, 3)], refused=True)
    yield S(aten.index.Tensor, x(4, 6), [None, torch.tensor([True, False, True, True, False, False])], refused=True)
    put = aten.index_put.default
    yield S(put, x(7, 6), [ints(7, 3).sort().values], x(6), offers=("S(1),R*,S(0)->S(1)",))
    yield S(put, x(7, 6), [torch.tensor([3, 1, 5])], x(3, 6), offers=("S(1),R*,S(1)->S(1)", "P,R*,P->P"))
    yield S(put, x(7, 6), [ints(7, 4)], x(4, 6), True, offers=("P,S(0),S(0)->P",))
    yield S(put, x(7, 6), [ints(7, 4)], x(1, 6), True)
    yield S(put, x(4, 7, 6), [None, ints(7, 5)], x(4, 5, 6), True, offers=("S(0),R*,S(0)->S(0)", "P,S(0),S(1)->P"))
    yield S(put, x(4, 6), [bools(4)], x(6), refused=True)


def _loss() -> Iterator[Sample]:
    loss = aten.cross_entropy_loss.default
    none: dict[str, Any] = {"reduction": 0}
    target = torch.tensor([1, 5, -100, 0, 3, 5])
    yield S(loss, x(6, 7), target, **none, offers=("S(0),S(0)->S(0)", "S(1),R*->R"))
    yield S(loss, x(6, 7), ints(7, 6), ignore_index=3, **none)
    yield S(loss, x(6, 7), target, label_smoothing=0.1, **none, offers=("S(0),S(0)->S(0)",))
    yield S(loss, x(6, 7), target, x(7, low=0.1).detach(), **none, offers=("S(0),S(0),R*->S(0)",))
    yield S(loss, x(4, 7, 5, 3), ints(7, 4, 5, 3), **none, offers=("S(0),S(0)->S(0)", "S(2),S(1)->S(1)"))
    yield S(loss, x(4, 7), x(4, 7).detach().softmax(1), **none, offers=("S(0),S(0)->S(0)",))
    yield S(loss, x(7), torch.tensor(3), **none, refused=True)
    for target_op in (aten.nll_loss.default, aten.nll_loss_nd.default):
        yield S(target_op, x(6, 7), target, **none, offers=("S(0),S(0)->S(0)", "S(1),R*->P"))
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
        yield S(getattr(aten, name).default, x(4, 6), data(4, 6), 0, offers=("S(0),S(0)->S(0)",))
    yield S(aten.binary_cross_entropy.default, x(4, 6, low=0.1, high=0.9), bools(4, 6).double(), None, 0)
    yield S(aten.binary_cross_entropy_with_logits.default, x(4, 6), bools(4, 6).double(), None, data(6), 0)
    yield S(aten.kl_div.default, x(4, 6), data(4, 6).abs(), 0)


def _window() -> Iterator[Sample]:
    batch, out, inside = "S(0),R*,R*->S(0)", "R*,S(0),S(0)->S(1)", "S(1),S(1),P->P"
    along = "S(2),R*,R*->S(2)"
    yield S(aten.conv1d.default, x(4, 6, 9), x(5, 6, 3), x(5), offers=(batch, out, inside))
    yield S(aten.conv1d.default, x(4, 6, 9), x(6, 1, 3), x(6), [1], [2], [1], 6, offers=(batch, "S(1),S(0),S(0)->S(1)"))
    yield S(aten.conv1d.padding, x(4, 6, 9), x(5, 6, 3), x(5), [1], "same", offers=(batch, out, along))
    yield S(aten.conv1d.padding, x(4, 6, 8), x(5, 6, 4), x(5), [1], "same", offers=(batch, out))
    yield S(aten.conv1d.default, x(2, 3, 12), x(5, 3, 3), None, [2], [1], offers=("S(2),R*->S(2)",))
    yield S(aten.conv1d.default, x(2, 3, 12), x(5, 3, 2), None, [3], offers=("S(2),R*->S(2)",))
    yield S(aten.conv1d.default, x(2, 3, 8), x(5, 3, 3), x(5), [1], [2], [2], offers=(along,))
    yield S(aten.conv2d.default, x(4, 6, 5, 4), x(5, 6, 3, 3), x(5), [1, 1], [1, 1], offers=(batch, out, inside, along))
    yield S(aten.conv2d.default, x(4, 6, 8, 6), x(5, 6, 2, 2), None, [2, 2], offers=("S(2),R*->S(2)", "S(3),R*->S(3)"))
    yield S(aten.conv2d.default, x(4, 6, 8, 6), x(5, 6, 1, 1), None, offers=("S(2),R*->S(2)",))
    yield S(aten.conv2d.default, x(4, 8, 5, 4), x(12, 2, 3, 3), x(12), [1, 1], [1, 1], [1, 1], 4,
            offers=(batch, along, "S(1),S(0),S(0)->S(1)"))  # fmt: skip
    yield S(aten.conv2d.default, x(6, 5, 4), x(5, 6, 3, 3), x(5), refused=True)
    yield S(aten.conv3d.default, x(4, 3, 4, 4, 4), x(5, 3, 2, 2, 2), x(5), offers=(batch, out))
    yield S(aten.conv3d.default, x(2, 2, 6, 4, 4), x(3, 2, 3, 3, 3), x(3), [1, 1, 1], [1, 1, 1], offers=(along,))
    yield S(aten.conv_transpose1d.default, x(4, 6, 5), x(6, 5, 3), x(5), offers=(batch, "R*,S(1),S(0)->S(1)"))
    yield S(aten.conv_transpose2d.input, x(4, 6, 5, 4), x(6, 5, 2, 2), x(5), [2, 2], offers=("S(1),S(0),P->P", along))
    yield S(aten.conv_transpose1d.default, x(2, 3, 5), x(3, 4, 2), x(4), [3], [0], [1], offers=(along,))
    yield S(aten.conv_transpose2d.input, x(4, 8, 5, 4), x(8, 3, 2, 2), x(12), [2, 2], [0, 0], [0, 0], 4,
            offers=(batch, "S(1),S(0),S(0)->S(1)"))  # fmt: skip
    yield S(aten.conv_transpose3d.input, x(4, 3, 2, 2, 2), x(3, 4, 2, 2, 2))
    both = ("S(0)->S(0)", "S(1)->S(1)")
    tiles = ("S(2)->S(2)",)
    yield S(aten.max_pool1d.default, x(4, 6, 8), [2], offers=both + tiles)
    yield S(aten.max_pool2d.default, x(4, 6, 8, 6), [2, 2], offers=both + tiles)
    yield S(aten.max_pool2d.default, x(4, 6, 8, 6), [3, 3], [2, 2], [1, 1], offers=both + tiles)
    yield S(aten.max_pool1d.default, x(2, 3, 8), [3], [2], [0], [1], True, offers=both + tiles)
    yield S(aten.max_pool2d.default, x(6, 8, 6), [2, 2], offers=("S(0)->S(0)", "S(1)->S(1)"))
    yield S(aten.max_pool3d.default, x(4, 3, 4, 4, 4), [2], offers=both)
    yield S(aten.max_pool2d_with_indices.default, x(4, 6, 8, 6), [2, 2], offers=("S(0)->S(0),S(0)",))
    yield S(aten.max_pool3d_with_indices.default, x(4, 3, 4, 4, 4), [2, 2, 2])
    yield S(aten.avg_pool1d.default, x(4, 6, 8), [2], offers=both + tiles)
    yield S(aten.avg_pool2d.default, x(4, 6, 8, 6), [2, 2], [2, 2], offers=(*both, *tiles, "P->P"))
    yield S(aten.avg_pool2d.default, x(4, 6, 7, 6), [2, 2], [2, 2], [0, 0], True)
    yield S(aten.avg_pool2d.default, x(4, 6, 7, 6), [3, 3], [1, 1], [1, 1], offers=both + tiles)
    yield S(aten.avg_pool2d.default, x(4, 6, 7, 6), [3, 3], [1, 1], [1, 1], False, False, offers=both)
    yield S(aten.avg_pool1d.default, x(4, 6, 8), [3], [2], [1], True, offers=both)
    yield S(aten.avg_pool3d.default, x(4, 3, 4, 4, 4), [2, 2, 2])
    for space, size in ((1, (5,)), (2, (5, 4)), (3, (4, 4, 4))):
        yield S(getattr(aten, f"adaptive_avg_pool{space}d").default, x(4, 6, *size), [2] * space, offers=both)
        yield S(getattr(aten, f"adaptive_max_pool{space}d").default, x(4, 6, *size), [2] * space)
        for name in (f"upsample_nearest{space}d", f"_upsample_nearest_exact{space}d"):
            yield S(getattr(aten, name).vec, x(4, 6, *size), None, [2.0] * space, offers=both + tiles)
    yield S(aten.adaptive_avg_pool2d.default, x(4, 6, 8, 6), [4, 3], offers=both + tiles)
    yield S(aten.upsample_nearest2d.default, x(4, 6, 5, 4), [15, 8], offers=both + tiles)
    yield S(aten.upsample_nearest1d.vec, x(4, 6, 5), None, [2.1], offers=both)
    yield S(aten.upsample_linear1d.default, x(4, 6, 5), [10], False, offers=both)
    yield S(aten.upsample_bilinear2d.vec, x(4, 6, 5, 4), [10, 8], True, None, offers=both)
    yield S(aten.upsample_bicubic2d.default, x(4, 6, 5, 4), [7, 9], False)
    yield S(aten.upsample_trilinear3d.default, x(4, 3, 2, 2, 2), [4, 4, 4], False)
    yield S(aten._upsample_bilinear2d_aa.default, x(4, 6, 5, 4), [3, 3], False)
    yield S(aten._upsample_bicubic2d_aa.default, x(4, 6, 5, 4), [3, 3], False)
    yield S(aten.im2col.default, x(4, 6, 5, 4), [2, 3], [1, 1], [0, 0], [1, 1], offers=both)
    yield S(aten.im2col.default, x(6, 5, 4), [2, 3], [1, 1], [0, 0], [1, 1], offers=("S(0)->S(0)",))
    yield S(aten.col2im.default, x(4, 24, 12), [5, 4], [2, 2], [1, 1], [0, 0], [1, 1], offers=both)
    yield S(aten.grid_sampler.default, x(4, 6, 5, 4), x(4, 3, 7, 2), 0, 0, False,
            offers=("S(0),S(0)->S(0)", "S(1),R*->S(1)", "R*,S(1)->S(2)"))  # fmt: skip
    yield S(aten.group_norm.default, x(4, 12, 5), 4, x(12), x(12), offers=(batch, along, "S(1),S(0),S(0)->S(1)"))
    yield S(aten.group_norm.default, x(4, 6, 2, 2), 1, offers=("S(0)->S(0)", "S(3)->S(3)"))
    yield S(aten.group_norm.default, x(4, 6, 2, 2), 6, x(6), offers=("S(1),S(0)->S(1)",))
    last = (0.1, 1e-5, False)
    yield S(aten.instance_norm.default, x(4, 6, 5), x(6), x(6), None, None, True, *last,
            offers=(batch, along, "S(1),S(0),S(0)->S(1)"))  # fmt: skip
    yield S(aten.instance_norm.default, x(4, 6, 5), None, None, data(6), data(6).abs(), False, *last, offers=(batch,))
    mean, var = data(6), data(6).abs() + 0.5
    weights = (x(6), x(6))
    yield S(aten.batch_norm.default, x(4, 6, 5), *weights, mean, var, False, *last,
            offers=("S(0),R*,R*,R*,R*->S(0)", "S(1),S(0),S(0),S(0),S(0)->S(1)", "S(2),R*,R*,R*,R*->S(2)"))  # fmt: skip
    yield S(aten.batch_norm.default, x(8, 6), *weights, None, None, True, *last, offers=(batch, "S(1),S(0),S(0)->S(1)"))
    yield S(aten.batch_norm.default, x(8, 6), None, None, None, None, True, *last, offers=("S(0)->S(0)",))
    yield S(aten._native_batch_norm_legit_no_training.default, x(4, 6, 5), *weights, mean, var, 0.1, 1e-5)
    yield S(aten._native_batch_norm_legit.no_stats, x(4, 6, 5), *weights, True, 0.1, 1e-5)
    functional = aten._native_batch_norm_legit_functional.default
    yield S(functional, x(4, 6, 5, 3), *weights, mean, var, True, 0.1, 1e-5,
            offers=("S(0),R*,R*,R*,R*->S(0),R,R,R,R", "S(3),R*,R*,R*,R*->S(3),R,R,R,R"))  # fmt: skip
    yield S(functional, x(8, 6), None, None, mean, var, True, 0.3, 1e-3)
    yield S(functional, x(8, 6), *weights, mean, var, False, 0.3, 1e-3, refused=True)


def _unpooled() -> Iterator[Sample]:
    rows = "S(0),S(0)->S(0)"
    places = torch.tensor([0, 3, 9, 10])
    yield S(aten.max_unpool2d.default, x(4, 3, 2, 2), places.view(2, 2).expand(4, 3, 2, 2), [4, 4],
            offers=(rows, "S(1),S(1)->S(1)"))  # fmt: skip
    yield S(aten.max_unpool3d.default, x(4, 3, 1, 2, 2), places.view(1, 2, 2).expand(4, 3, 1, 2, 2), [2, 4, 4],
            [2, 2, 2], [0, 0, 0], offers=(rows,))  # fmt: skip
    steps = torch.full((4, 3, 3), 0.3, dtype=torch.float64)
    yield S(aten.fractional_max_pool2d.default, x(4, 3, 5, 5), [2, 2], [3, 3], steps[..., :2],
            offers=("S(0),S(0)->S(0),S(0)", "S(1),S(1)->S(1),S(1)"))  # fmt: skip
    yield S(aten.fractional_max_pool3d.default, x(4, 3, 4, 5, 5), [2, 2, 2], [2, 3, 3], steps)
    yield S(aten.affine_grid_generator.default, x(4, 2, 3), [4, 3, 5, 6], False, offers=("S(0)->S(0)",))


def _random() -> Iterator[Sample]:
    rows = "S(0)->S(0)"
    yield S(aten.dropout.default, x(4, 6), 0.5, True, random=True, offers=(rows,))
    yield S(aten.native_dropout.default, x(4, 6), 0.5, True, random=True)
    yield S(aten.bernoulli.default, ints(2, 4, 6).double(), offers=(rows,))
    yield S(aten.bernoulli.p, data(4, 6), 0.5, random=True)
    yield S(aten.bernoulli.Tensor, data(4, 6), ints(2, 6).double(), offers=("S(0),R*->S(0)", "S(1),S(0)->S(1)"))
    yield S(aten.multinomial.default, torch.eye(6, dtype=torch.float64)[[1, 3, 5, 0]], 1, offers=(rows,))
    yield S(aten.multinomial.default, torch.eye(6, dtype=torch.float64)[[1, 3, 5, 0]], 4, True, offers=(rows,))
    for name in ("uniform", "normal_functional", "exponential", "cauchy", "log_normal", "random"):
        yield S(getattr(aten, name).default, data(4, 6), random=True, offers=(rows, "S(1)->S(1)"))
    yield S(aten.geometric.default, data(4, 6), 0.4, random=True)
    yield S(aten.normal.Tensor_Tensor, data(4, 6), data(6).abs(), random=True, offers=("S(0),R*->S(0)",))
    yield S(aten.normal.Tensor_float, data(4, 6), 0.5, random=True)
    yield S(aten.normal.float_float, 0.0, 0.5, [4, 6], random=True, offers=("->S(0)",))
    for target in (aten.rand.default, aten.randn.default):
        yield S(target, [4, 6], random=True, offers=("->S(0)", "->S(1)"))
    yield S(aten.randint.low, 0, 9, [4, 6], random=True)
    for target in (aten.rand_like.default, aten.randn_like.default):
        yield S(target, data(4, 6), random=True, offers=(rows,))
    yield S(aten.randint_like.default, ints(9, 4, 6), 5, random=True, offers=(rows,))


def _recurrent() -> Iterator[Sample]:
    def weights(gates: int, biases: bool = True) -> list[Tensor]:
        hidden = [x(gates * 3, 5), x(gates * 3, 3)]
        return hidden + ([x(gates * 3), x(gates * 3)] if biases else [])

    flags = (True, 1, 0.0, True, False)
    yield S(aten.lstm.input, x(4, 2, 5), [x(1, 4, 3), x(1, 4, 3)], weights(4), *flags, True,
            offers=("S(0),S(1),S(1),R*,R*,R*,R*->S(0),S(1),S(1)",))  # fmt: skip
    yield S(aten.lstm.input, x(2, 4, 5), [x(1, 4, 3), x(1, 4, 3)], weights(4), *flags, False,
            offers=("S(1),S(1),S(1),R*,R*,R*,R*->S(1),S(1),S(1)",))  # fmt: skip
    yield S(aten.gru.input, x(4, 2, 5), x(1, 4, 3), weights(3), *flags, True)
    yield S(aten.rnn_tanh.input, x(4, 2, 5), x(1, 4, 3), weights(1), *flags, True)
    yield S(aten.rnn_relu.input, x(4, 2, 5), x(1, 4, 3), weights(1, False), False, 1, 0.0, True, False, True)
    yield S(aten.gru.input, x(4, 2, 5), x(1, 4, 3), weights(3), True, 1, 0.5, True, False, True, refused=True)
    yield S(aten.lstm_cell.default, x(4, 5), [x(4, 3), x(4, 3)], *weights(4),
            offers=("S(0),S(0),S(0),R*,R*,R*,R*->S(0),S(0)",))  # fmt: skip
    yield S(aten.gru_cell.default, x(4, 5), x(4, 3), *weights(3))
    yield S(aten.rnn_tanh_cell.default, x(4, 5), x(4, 3), *weights(1))
    yield S(aten.rnn_relu_cell.default, x(4, 5), x(4, 3), *weights(1))
    if torch.backends.mkldnn.is_available():
        rows, states = single(4, 2, 5), [single(2, 3), single(2, 3)]
        kernel = [single(12, 5), single(12, 3), single(12), single(12)]
        yield S(aten.mkldnn_rnn_layer.default, rows, *kernel, *states, False, [], 2, 3, 1, True, False, False, True,
                offers=("S(1),R*,R*,R*,R*,S(0),S(0)->S(1),S(0),S(0),P",), scratch=(3,))  # fmt: skip


@row_wise(whole=(1,))
class Reversed(torch.autograd.Function):
    """Rows times a weight, with the gradient of the rows reversed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, power: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, weight)
        return rows * weight**power, rows.sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight = ctx.saved_tensors
        return -gradients[0] * weight - gradients[1].unsqueeze(1), (gradients[0] * rows).sum(0), None


def _row_wise() -> Iterator[Sample]:
    apply = torch.autograd.Function.__dict__["apply"].__func__
    target: Any = operator_of(apply, Reversed, (x(4, 6), x(6), 1)).target
    yield S(target, [x(4, 6), x(6)], offers=("S(0),R*->S(0),S(0)",))
