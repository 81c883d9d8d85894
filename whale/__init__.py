"""Whale: annotate a local PyTorch model in a few lines and train it in parallel.

This module is the public surface and nothing else. It is lazy (PEP 562): ``import whale`` loads neither torch nor any
part of Whale; a name is imported from its home the first time it is used.

>>> import whale
>>> whale.WhaleError.exit_code
1
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whale import optim as optim
    from whale.annotations import annotate, cluster, replicate, set_default_strategy, split, stage
    from whale.api import parallelize, verify
    from whale.batch_size import BatchSize
    from whale.checkpoint.load import load_checkpoint
    from whale.checkpoint.save import save_checkpoint, wait_for_checkpoints
    from whale.checkpoint.weights import load_weights
    from whale.commands.tables import place_tables
    from whale.communication import (
        all_gather,
        all_gather_object,
        all_reduce,
        all_to_all,
        all_to_all_object,
        broadcast,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        init,
        local_rank,
        mesh_axis,
        rank,
        size,
    )
    from whale.data import read_parts, shard_dataset
    from whale.errors import WhaleError
    from whale.graph.row_wise import row_wise
    from whale.ir.cluster import Cluster
    from whale.ir.plan import Plan
    from whale.launcher import launch

__version__ = "0.1.0.dev0"

__all__ = [
    "BatchSize",
    "Cluster",
    "Plan",
    "WhaleError",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_object",
    "annotate",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cluster",
    "init",
    "launch",
    "load_checkpoint",
    "load_weights",
    "local_rank",
    "mesh_axis",
    "parallelize",
    "place_tables",
    "rank",
    "read_parts",
    "replicate",
    "row_wise",
    "save_checkpoint",
    "set_default_strategy",
    "shard_dataset",
    "size",
    "split",
    "stage",
    "verify",
    "wait_for_checkpoints",
]

_HOMES = {
    "BatchSize": "whale.batch_size",
    "Cluster": "whale.ir.cluster",
    "Plan": "whale.ir.plan",
    "WhaleError": "whale.errors",
    "all_gather": "whale.communication",
    "all_gather_object": "whale.communication",
    "all_reduce": "whale.communication",
    "all_to_all": "whale.communication",
    "all_to_all_object": "whale.communication",
    "annotate": "whale.annotations",
    "broadcast": "whale.communication",
    "broadcast_object": "whale.communication",
    "broadcast_optimizer_state": "whale.communication",
    "broadcast_parameters": "whale.communication",
    "cluster": "whale.annotations",
    "init": "whale.communication",
    "launch": "whale.launcher",
    "load_checkpoint": "whale.checkpoint.load",
    "load_weights": "whale.checkpoint.weights",
    "local_rank": "whale.communication",
    "mesh_axis": "whale.communication",
    "parallelize": "whale.api",
    "place_tables": "whale.commands.tables",
    "rank": "whale.communication",
    "read_parts": "whale.data",
    "replicate": "whale.annotations",
    "row_wise": "whale.graph.row_wise",
    "save_checkpoint": "whale.checkpoint.save",
    "set_default_strategy": "whale.annotations",
    "shard_dataset": "whale.data",
    "size": "whale.communication",
    "split": "whale.annotations",
    "stage": "whale.annotations",
    "verify": "whale.api",
    "wait_for_checkpoints": "whale.checkpoint.save",
}


if not TYPE_CHECKING:  # a type checker sees the imports above, and so finds a misspelt name

    def __getattr__(name: str) -> Any:
        """Import a public name from its home, once; afterwards it is an ordinary attribute of this module."""
        if name == "optim":
            return import_module("whale.optim")
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'whale' has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
