"""Loading weights alone into a parallel model: of a file of Hugging Face, or of a checkpoint. Each rank reads its
parts."""

from __future__ import annotations

from contextlib import ExitStack
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from whale.arguments import check_type, known_arguments
from whale.checkpoint.collect import MODEL, engine_of
from whale.checkpoint.folder import checkpoint_in
from whale.checkpoint.format import Intervals, Key
from whale.checkpoint.hugging_face import WeightFiles
from whale.checkpoint.reader import Array, Reader
from whale.checkpoint.tensors import tensor_of
from whale.errors import CheckpointError, WhaleError
from whale.runtime.engine import Engine
from whale.runtime.module import ParallelModule
from whale.runtime.store import Board

__all__ = ["load_weights"]


class _Model:
    """The model of a checkpoint, by names alone."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def form(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        return self.reader.form(Key(MODEL, "", name))

    def read(self, name: str, at: Intervals | None = None) -> Array:
        return self.reader.read(Key(MODEL, "", name), at)


_Weights = WeightFiles | _Model


@known_arguments()
def load_weights(path: str | PathLike[str], model: ParallelModule, *, strict: bool = True) -> None:
    """Load weights into a parallel model under any plan. Every rank must call it; each reads its parts alone.

    Args:
        path: a file of safetensors, a folder or an index of Hugging Face, or a checkpoint of Whale or the directory of
            several. Names are those of the local model; of tied parameters one name is enough.
        model: the parallel model. Values are cast to its dtypes.
        strict: whether it is an error if a name is missing, or unknown.

    Raises:
        CheckpointError: on every rank, with nothing changed: a file is damaged, or of another model.
        WorkerError: a rank did not come within the timeout.
    """
    check_type("model", model, ParallelModule, "a parallel model, as whale.parallelize returns it")
    engine, place = engine_of(model), Path(path).absolute()
    world = engine.world
    meeting = Board(world, "weights that are loaded", world.failures.timeout_seconds)
    found: dict[str, Tensor] = {}
    failure = ""
    try:
        found = _read(engine, place, strict)
    except WhaleError as error:
        failure = str(error)
    except Exception as error:  # the others wait
        failure = f"{type(error).__name__}: {error}"
    meeting.put(str(world.rank), failure)
    for rank in range(world.size):
        if failure := meeting.get(str(rank), rank):
            raise CheckpointError(f"rank {rank}: {failure}")
    with torch.no_grad():
        for name, tensor in found.items():
            engine.tensors[name].copy_(tensor)


def _read(engine: Engine, path: Path, strict: bool) -> dict[str, Tensor]:
    """This rank's parts of a model's tensors, by first name."""
    with ExitStack() as stack:
        own = checkpoint_in(path)
        if own is None:
            opened = stack.enter_context(WeightFiles(path))
            files: _Weights = opened
            names = {name: name for name in opened.names}
        else:
            reader = stack.enter_context(Reader(own))
            files, names = _Model(reader), reader.manifest.names[MODEL]
        given: dict[str, str] = {}
        for name, first in engine.aliases.items():
            if name in names:
                given.setdefault(first, names[name])
        unknown = sorted(names.keys() - engine.aliases.keys())
        missing = sorted(set(engine.aliases.values()) - given.keys())
        if strict and (unknown or missing):
            raise CheckpointError(
                f"{path} is of another model: it has {unknown[:5] or 'no name'} that this one has not, and lacks "
                f"{missing[:5] or 'none'} of this one's"
            )
        return {
            first: _part(engine, first, name, files)
            for first, name in given.items()
            if first in engine.tensors and engine.tensors[first].numel()
        }


def _part(engine: Engine, first: str, name: str, files: _Weights) -> Tensor:
    shard = engine.shard(first)
    found = files.form(name)
    if found is None or found[1] != shard.shape:
        raise CheckpointError(f"{name} has shape {found[1] if found else None}, but the model's is {shard.shape}")
    return tensor_of(files.read(name, shard.parts.get(engine.world.rank, shard.whole)), found[0])
