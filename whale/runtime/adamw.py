"""One pass of AdamW over memory: parameters, moments and copies in low precision, each element read and written once.

On a processor
Inductor compiles the pass to one loop for each run; on a GPU a step is one kernel in Triton (`adamw_triton`). Knows
memory and numbers; not optimizers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from whale.errors import UsageError
from whale.runtime.adamw_runs import Kind, Run
from whale.runtime.adamw_table import Rows

__all__ = ["is_triton", "step_rows", "step_runs"]

SMALLEST = 64
"""Elements of a run for which compiled code is worth its call: smaller ones are computed by torch's operators."""


def is_triton(device: torch.device) -> bool:
    """Whether a step on a device is one kernel in Triton, which its interpreter runs on a processor, for tests."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def step_rows(rows: Rows, scalars: Tensor, kind: Kind, found_inf: Tensor | None = None) -> None:
    """Update all parameters of a table, by one kernel in Triton.

    Args:
        rows: where they are.
        scalars: of shape (rows, NUM_SCALARS), on their device, in the type of `wide_of`.
        kind: the options of the pass.
        found_inf: one number on the device; if it is not zero nothing is updated.

    Raises:
        UsageError: there is no Triton.
    """
    try:
        from whale.runtime.adamw_triton import launch
    except ImportError as error:
        raise UsageError(
            f"FusedAdamW needs Triton for parameters on a GPU ({error}): install it (pip install triton), or use "
            "torch.optim.AdamW(..., fused=True)"
        ) from error
    launch(rows, scalars, kind, found_inf)


def step_runs(runs: Sequence[Run], scalars: Tensor, kind: Kind) -> None:
    """Update all runs, on a processor, by loops that Inductor compiles.

    Args:
        runs: not overlapping, of the same number types.
        scalars: of shape (rows, NUM_SCALARS), in the type of `wide_of`.
        kind: the options of the pass.

    Raises:
        UsageError: there is no compiler.
    """
    for run in runs:
        update = _update if run.parameter.numel() < SMALLEST else _compiled(kind, *_types(run))
        update(*run[:-1], scalars[run.row], kind)


def _types(run: Run) -> tuple[torch.dtype | None, ...]:
    return tuple(None if x is None else x.dtype for x in run[:-1])


_OPTIONS: Any = {"cpp.enable_floating_point_contract_flag": "fast"}
"""torch's own operators fuse products with sums, too."""


@cache
def _compiled(kind: Kind, *types: torch.dtype | None) -> Callable[..., None]:
    """The pass, compiled once for each combination of options and number types, for runs of any length.

    Each has code of its own, because the compiler limits how often one code is compiled.
    """
    own = FunctionType(_update.__code__.replace(), globals(), "_update")
    made: Callable[..., None] = torch.compile(own, dynamic=True, fullgraph=True, options=_OPTIONS)

    def run(*arguments: Any) -> None:
        try:
            made(*arguments)
        except Exception as error:
            raise UsageError(
                "FusedAdamW compiles its pass with Inductor, which needs a C++ compiler, and this failed: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}; "
                "use torch.optim.AdamW(..., fused=True)"
            ) from error

    return run


def _update(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    largest: Tensor | None,
    copy: Tensor | None,
    scalars: Tensor,
    kind: Kind,
) -> None:
    """The pass, in the order of operations of torch's AdamW."""
    decay, own1, beta2, own2, step_size, root2, eps, scale = scalars.unbind()
    wide = scalars.dtype
    g = gradient.to(wide)
    if kind.scaled:
        g = g * scale
        gradient.copy_(g)
    if kind.maximize:
        g = -g
    # The compiler fuses a sum with its first product: these are the products that torch's operators fuse.
    start, is_near = mean.to(wide), own1 < 0.5
    m = torch.where(is_near, start, g) + torch.where(is_near, own1, own1 - 1) * (g - start)
    v = own2 * g * g + square.to(wide) * beta2
    mean.copy_(m)
    square.copy_(v)
    if kind.amsgrad:
        assert largest is not None
        v = torch.maximum(largest.to(wide), v)
        largest.copy_(v)
    p = parameter.to(wide) * decay
    p = p + step_size * m / (v.sqrt() / root2 + eps)
    parameter.copy_(p)
    if copy is not None:
        copy.copy_(p)
