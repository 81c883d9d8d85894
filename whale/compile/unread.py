"""Parameters that the first batch does not read, as those of a head that an argument selects.

Each lies whole on the ranks of the stage that its module most likely runs in, so that steps for other batches can read
it there.
"""

from __future__ import annotations

from collections.abc import Mapping

from whale.compile.compilation import Compilation, StoredForm
from whale.errors import UsageError
from whale.runtime.shards import Shard
from whale.strategies.lowering import PlacedStage

__all__ = ["check_places", "forms_of_unread", "unread_bytes"]


def unread_bytes(compilation: Compilation, rank: int) -> int:
    """Bytes of the parameters and buffers that *rank* has and the step does not read."""
    parameters = (
        compilation.traced.parameters[name] for name, stage in compilation.unread.items() if rank in stage.mesh.ranks
    )
    read = set(compilation.captured.buffers.values())
    return sum(parameters) + sum(size for name, size in compilation.traced.buffers.items() if name not in read)


def forms_of_unread(stages: Mapping[str, PlacedStage]) -> dict[tuple[int, str], tuple[StoredForm, ...]]:
    """Storage of such parameters, for a later compilation to reuse."""
    return {(stage.index, name): (("R", -1, ()),) * (1 + len(stage.mesh.axes)) for name, stage in stages.items()}


def check_places(needed: Mapping[str, Shard], held: Mapping[str, Shard]) -> None:
    """Compare where a step needs parameters with where they are.

    Raises:
        UsageError: a parameter is elsewhere; names it.
    """
    for name, shard in needed.items():
        if shard.parts != held[name].parts:
            raise UsageError(
                f"the batch's step needs {name} on ranks {sorted(shard.parts)}, but it lies on ranks "
                f"{sorted(held[name].parts)}, because the example batch of parallelize did not read it, or in another "
                "stage: let one stage run all modules that an argument selects, or give parallelize an example batch "
                "that reads it"
            )
