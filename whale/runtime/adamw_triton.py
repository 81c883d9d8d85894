"""The pass of AdamW over all parameters of a step as one kernel in Triton.

Each program of the kernel updates a block of one parameter, which it finds in a table of addresses (`adamw_table`).
Sums and products are in the order of torch's operators on a GPU, and fused where theirs are; divisions and roots are
rounded as IEEE's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whale.runtime.adamw_runs import NUM_SCALARS, Kind
from whale.runtime.adamw_table import BLOCK, COLUMNS, Rows

__all__ = ["launch"]

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    None: tl.float32,
}


@triton.jit
def _pointer(address, at, T: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to elements; the compiler makes wide loads of those that it knows to be aligned."""
    first = address.to(tl.pointer_type(T))
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + at


@triton.jit
def _read(pointer, inside, WHOLE: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:  # a mask would make loads narrow
        return tl.load(pointer).to(WIDE)
    return tl.load(pointer, mask=inside, other=0.0).to(WIDE)


@triton.jit
def _write(pointer, x, inside, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:
        tl.store(pointer, x.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    row,
    address,
    c,
    at,
    inside,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    SCALED: tl.constexpr,
    COPIES: tl.constexpr,
):
    parameter = _pointer(tl.load(row), at, P, ALIGNED)
    gradient = _pointer(address, at, G, ALIGNED)
    mean = _pointer(tl.load(row + 1), at, M, ALIGNED)
    square = _pointer(tl.load(row + 2), at, V, ALIGNED)
    g = _read(gradient, inside, WHOLE, WIDE)
    m = _read(mean, inside, WHOLE, WIDE)
    v = _read(square, inside, WHOLE, WIDE)
    p = _read(parameter, inside, WHOLE, WIDE)
    if SCALED:
        g = g * tl.load(c + 7)
        _write(gradient, g, inside, WHOLE)
    if MAXIMIZE:
        g = -g
    zeros = tl.zeros_like(g)
    own1 = zeros + tl.load(c + 1)
    m = tl.where(own1 < 0.5, tl.fma(own1, g - m, m), tl.fma(m - g, 1.0 - own1, g))
    v = tl.fma(zeros + tl.load(c + 3), g * g, v * tl.load(c + 2))
    _write(mean, m, inside, WHOLE)
    _write(square, v, inside, WHOLE)
    if AMSGRAD:
        largest = _pointer(tl.load(row + 3), at, L, ALIGNED)
        v = tl.maximum(_read(largest, inside, WHOLE, WIDE), v)
        _write(largest, v, inside, WHOLE)
    if tl.constexpr(tl.float64) == WIDE:
        part = m / (tl.sqrt(v) * tl.load(c + 5) + tl.load(c + 6))
    else:
        part = tl.div_rn(m, tl.sqrt_rn(v) * tl.load(c + 5) + tl.load(c + 6))
    p = tl.fma(zeros + tl.load(c + 4), part, p * tl.load(c))
    _write(parameter, p, inside, WHOLE)
    if COPIES:
        _write(_pointer(tl.load(row + 4), at, C, ALIGNED), p, inside, WHOLE)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    fixed,
    moving,
    blocks,
    scalars,
    found_inf,
    ALIGNED: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    SCALED: tl.constexpr,
    COPIES: tl.constexpr,
    CHECKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALARS: tl.constexpr,
    SIZE: tl.constexpr,
):
    if CHECKS:  # noqa: SIM102  (the outer one is decided when the kernel is compiled)
        if tl.load(found_inf) != 0:
            return
    program = tl.program_id(0)
    number = tl.load(blocks + 2 * program)
    first = tl.load(blocks + 2 * program + 1) * SIZE
    row = fixed + number * COLUMNS
    address = tl.load(moving + 2 * number)
    c = scalars + tl.load(moving + 2 * number + 1) * SCALARS
    at = first + tl.arange(0, SIZE)
    length = tl.load(row + COLUMNS - 1)
    # fmt: off
    if first + SIZE <= length:
        _update(
            row, address, c, at, at < length, True, ALIGNED,
            P, G, M, V, L, C, WIDE, MAXIMIZE, AMSGRAD, SCALED, COPIES,
        )
    else:
        _update(
            row, address, c, at, at < length, False, ALIGNED,
            P, G, M, V, L, C, WIDE, MAXIMIZE, AMSGRAD, SCALED, COPIES,
        )
    # fmt: on


def launch(rows: Rows, scalars: Tensor, kind: Kind, found_inf: Tensor | None) -> None:
    """Update all parameters of a table by one kernel; see :func:`whale.runtime.adamw.step_rows`."""
    if not len(rows.blocks):
        return
    options: dict[str, Any] = {} if scalars.device.type == "cpu" else {"enable_fp_fusion": False, "num_warps": 8}
    with torch.cuda.device(scalars.device) if scalars.is_cuda else nullcontext():  # Triton launches on the current one
        _kernel[(len(rows.blocks),)](
            rows.fixed,
            rows.moving,
            rows.blocks,
            scalars,
            scalars if found_inf is None else found_inf,
            rows.aligned,
            *(_TYPES[dtype] for dtype in rows.types),
            WIDE=_TYPES[scalars.dtype],
            MAXIMIZE=kind.maximize,
            AMSGRAD=kind.amsgrad,
            SCALED=kind.scaled,
            COPIES=rows.types[-1] is not None,
            CHECKS=found_inf is not None,
            COLUMNS=COLUMNS,
            SCALARS=NUM_SCALARS,
            SIZE=BLOCK,
            **options,
        )
