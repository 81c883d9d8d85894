"""Sums over ranks that have the same rows of a parameter, and other columns each: for optimizers with a state a row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from whale.errors import UsageError
from whale.runtime.engine import Engine
from whale.runtime.optimizers import owners_of

__all__ = ["sum_over_columns"]


def sum_over_columns(parameters: Sequence[Tensor], terms: Sequence[Tensor]) -> list[int]:
    """Sum a number for each row over the ranks that have the row's other columns, in place.

    All of these ranks must call it, with their parts of the same parameters in one order.

    Args:
        parameters: some of them parts of a parallel model's.
        terms: of each, one number for each of the same rows on all of these ranks.

    Returns:
        the number of columns of each parameter on all ranks together.

    Raises:
        UsageError: a parameter is cut by columns, and its gradient is not sparse.
        WorkerError: a rank did not come within the timeout; the message names it.
    """
    owned, columns = owners_of(parameters), []
    together: dict[tuple[Engine, tuple[int, ...], bool], list[Tensor]] = {}
    for parameter, term in zip(parameters, terms, strict=True):
        columns.append(prod(parameter.shape[1:]))
        if id(parameter) not in owned:
            continue
        engine, name = owned[id(parameter)]
        shard = engine.shard(name)
        columns[-1] = prod(shard.shape[1:])
        if ranks := shard.ranks_of_columns(engine.world.rank):
            if (ranks, name in engine.on_host) not in engine.column_groups:
                raise UsageError(
                    f"{name} is cut by columns, and its gradient is not sparse, so ranks do not add up the squares of "
                    "its rows: make the embedding with sparse=True, or use another optimizer, such as AdamW, for it"
                )
            own = shard.parts[engine.world.rank]
            term /= sum(shard.parts[rank] == own for rank in ranks)  # replicas have equal ones
            together.setdefault((engine, ranks, name in engine.on_host), []).append(term)
    for (engine, ranks, on_host), given in together.items():
        total = torch.cat(given)
        what = f"the sums of columns over ranks {list(ranks)}"
        work = dist.all_reduce(total, group=engine.column_groups[ranks, on_host], async_op=True)
        engine.world.failures.wait(work, what, ranks, blocking=not total.is_cuda)
        torch._foreach_copy_(given, list(total.split([len(term) for term in given])))
    return columns
