"""The pass of AdamW over all runs of a step as one kernel in Triton.

Each program of the kernel updates a block of one run: a table has the addresses of the runs, and a list the run and the
first element of each block. Divisions and roots are rounded as IEEE's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whale.runtime.adamw_runs import NUM_SCALARS, Kind, Run

__all__ = ["launch"]

BLOCK = 2048
"""Elements of a program of the kernel."""

_COLUMNS = 8
"""Columns of the table: six addresses, the number of elements, and the row of the scalars."""

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    None: tl.float32,
}


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    table,
    blocks,
    scalars,
    found_inf,
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
    skips = False
    if CHECKS:
        skips = tl.load(found_inf) != 0
    block = tl.program_id(0)
    row = table + tl.load(blocks + 2 * block) * COLUMNS
    at = tl.load(blocks + 2 * block + 1) + tl.arange(0, SIZE)
    inside = (at < tl.load(row + 6)) & (not skips)
    c = scalars + tl.load(row + 7) * SCALARS
    parameter = tl.load(row).to(tl.pointer_type(P)) + at
    gradient = tl.load(row + 1).to(tl.pointer_type(G)) + at
    mean = tl.load(row + 2).to(tl.pointer_type(M)) + at
    square = tl.load(row + 3).to(tl.pointer_type(V)) + at
    g = tl.load(gradient, mask=inside, other=0.0).to(WIDE)
    if SCALED:
        g = g * tl.load(c + 7)
        tl.store(gradient, g.to(G), mask=inside)
    if MAXIMIZE:
        g = -g
    m = tl.load(mean, mask=inside, other=0.0).to(WIDE)
    own1 = tl.load(c + 1)
    fused = tl.fma(tl.zeros_like(m) + own1, g - m, m)  # as in torch's own
    m = tl.where(own1 < 0.5, fused, g - (g - m) * (1.0 - own1))
    v = tl.load(square, mask=inside, other=0.0).to(WIDE) * tl.load(c + 2) + tl.load(c + 3) * g * g
    tl.store(mean, m.to(M), mask=inside)
    tl.store(square, v.to(V), mask=inside)
    if AMSGRAD:
        largest = tl.load(row + 4).to(tl.pointer_type(L)) + at
        v = tl.maximum(tl.load(largest, mask=inside, other=0.0).to(WIDE), v)
        tl.store(largest, v.to(L), mask=inside)
    p = tl.load(parameter, mask=inside, other=0.0).to(WIDE) * tl.load(c)
    if tl.constexpr(tl.float64) == WIDE:
        p = p + tl.load(c + 4) * m / (tl.sqrt(v) / tl.load(c + 5) + tl.load(c + 6))
    else:
        below = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + tl.load(c + 5)) + tl.load(c + 6)
        p = p + tl.div_rn(tl.load(c + 4) * m, below)
    tl.store(parameter, p.to(P), mask=inside)
    if COPIES:
        copy = tl.load(row + 5).to(tl.pointer_type(C)) + at
        tl.store(copy, p.to(C), mask=inside)


def launch(runs: Sequence[Run], scalars: Tensor, kind: Kind, found_inf: Tensor | None) -> None:
    """Update all runs by one kernel; see :func:`whale.runtime.adamw.step_runs`."""
    runs = [run for run in runs if run.parameter.numel()]
    if not runs:
        return
    table, blocks = _tables(runs, scalars.device)
    types = [_TYPES[None if x is None else x.dtype] for x in runs[0][:-1]]
    options: dict[str, Any] = {} if scalars.device.type == "cpu" else {"enable_fp_fusion": False, "num_warps": 8}
    _kernel[(len(blocks),)](
        table,
        blocks,
        scalars,
        scalars if found_inf is None else found_inf,
        *types,
        WIDE=_TYPES[scalars.dtype],
        MAXIMIZE=kind.maximize,
        AMSGRAD=kind.amsgrad,
        SCALED=kind.scaled,
        COPIES=runs[0].copy is not None,
        CHECKS=found_inf is not None,
        COLUMNS=_COLUMNS,
        SCALARS=NUM_SCALARS,
        SIZE=BLOCK,
        **options,
    )


_kept: dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor, Tensor]] = {}
"""Tables on devices, and their sources on the host, by what is in them."""

_MOST_KEPT = 64


def _tables(runs: Sequence[Run], device: torch.device) -> tuple[Tensor, Tensor]:
    """The addresses of the runs, and the run and the first element of each block."""
    rows = tuple(
        (*(0 if x is None else x.data_ptr() for x in run[:-1]), run.parameter.numel(), run.row) for run in runs
    )
    key = (device, rows)
    if key not in _kept:
        firsts = [(n, first) for n, run in enumerate(runs) for first in range(0, run.parameter.numel(), BLOCK)]
        is_cuda = device.type == "cuda"
        own = [torch.tensor(numbers, dtype=torch.int64, pin_memory=is_cuda) for numbers in (rows, firsts)]
        captures = is_cuda and torch.cuda.is_current_stream_capturing()
        if not captures and len(_kept) >= _MOST_KEPT:
            _kept.clear()
        made = tuple(x.to(device, non_blocking=True) for x in own)
        if captures:
            _captured.append((*made, *own))
            return made[0], made[1]
        _kept[key] = made[0], made[1], own[0], own[1]
    return _kept[key][:2]


_captured: list[tuple[Tensor, ...]] = []
"""Tables of CUDA graphs, which copy them to the device in each replay."""
