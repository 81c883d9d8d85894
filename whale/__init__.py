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
    from whale.annotations import annotate, cluster, replicate, set_default_strategy, split, stage
    from whale.api import parallelize, verify
    from whale.batch_size import BatchSize
    from whale.checkpoint.load import load_checkpoint
    from whale.checkpoint.save import save_checkpoint, wait_for_checkpoints
    from whale.checkpoint.weights import load_weights
    from whale.data import shard_dataset
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
    "annotate",
    "cluster",
    "launch",
    "load_checkpoint",
    "load_weights",
    "parallelize",
    "replicate",
    "row_wise",
    "save_checkpoint",
    "set_default_strategy",
    "shard_dataset",
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
    "annotate": "whale.annotations",
    "cluster": "whale.annotations",
    "launch": "whale.launcher",
    "load_checkpoint": "whale.checkpoint.load",
    "load_weights": "whale.checkpoint.weights",
    "parallelize": "whale.api",
    "replicate": "whale.annotations",
    "row_wise": "whale.graph.row_wise",
    "save_checkpoint": "whale.checkpoint.save",
    "set_default_strategy": "whale.annotations",
    "shard_dataset": "whale.data",
    "split": "whale.annotations",
    "stage": "whale.annotations",
    "verify": "whale.api",
    "wait_for_checkpoints": "whale.checkpoint.save",
}


if not TYPE_CHECKING:  # a type checker sees the imports above, and so finds a misspelt name

    def __getattr__(name: str) -> Any:
        """Import a public name from its home, once; afterwards it is an ordinary attribute of this module."""
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'whale' has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
