"""The least that stages have in the host's memory with which their devices fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whale.compile.compilation import Compilation
from whale.ir.strategy import Offload, offload_steps
from whale.ir.workload import DeviceMemory
from whale.planner.balance.least_recompute import least_steps
from whale.strategies.host_tables import tables_of

__all__ = ["offload_that_fits"]


def offload_that_fits(
    compilation: Compilation,
    memory_under: Callable[[tuple[Offload, ...]], Sequence[DeviceMemory]],
    *,
    given: Sequence[Offload | None],
) -> tuple[Offload, ...]:
    """A word for each stage: the first with which its devices fit, or the last where none does. Tables with sparse
    gradients are on hosts in stages that have some.

    Args:
        compilation: of the model with any words.
        memory_under: what devices hold where stages have these words.
        given: words that are decided already, None where one is open.
    """
    has_tables = [bool(tables_of(compilation.captured, stage.stored)) for stage in compilation.stages]

    def of_tables(words: Sequence[Offload]) -> tuple[Offload, ...]:
        return tuple(word if has or word != "tables" else "none" for word, has in zip(words, has_tables, strict=True))

    ranks = [stage.mesh.ranks for stage in compilation.stages]
    steps = offload_steps(has_tables=any(has_tables))
    return of_tables(least_steps(ranks, steps, lambda words: memory_under(of_tables(words)), given=given))
