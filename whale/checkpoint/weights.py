"""Loading weights alone into a parallel model: of a file of Hugging Face, or of a checkpoint. Each rank reads its
parts."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whale.arguments import check_type, known_arguments
from whale.checkpoint.agree import Mismatch, newest_good
from whale.checkpoint.collect import MODEL, engine_of
from whale.checkpoint.folder import checkpoints_in
from whale.checkpoint.format import Intervals, Key
from whale.checkpoint.hugging_face import WeightFiles
from whale.checkpoint.reader import Array, Reader
from whale.checkpoint.tensors import elements, tensor_of
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
            several, of which all ranks take the newest that is good. Names are those of the local model; of tied
            parameters one name is enough.
        model: the parallel model. Values are cast to its dtypes.
        strict: whether it is an error if a name is missing, or unknown, or if names of one parameter have other values.

    Raises:
        CheckpointError: on every rank, with nothing changed: a file is damaged, or of another model.
        WorkerError: a rank did not come within the timeout.
    """
    check_type("path", path, (str, PathLike), "the path of a file or a folder")
    check_type("model", model, ParallelModule, "a parallel model, as whale.parallelize returns it")
    engine, place = engine_of(model), Path(path).absolute()
    world = engine.world
    meeting = Board(world, "weights that are loaded", world.failures.timeout_seconds)
    if world.rank == 0:
        meeting.put("checkpoints", _checkpoints(place))
    checkpoints = meeting.get("checkpoints", 0)
    places = [place / name for name in checkpoints] or [place]
    found = newest_good(meeting, places, lambda one: _read(engine, one, bool(checkpoints), strict)).found
    with torch.no_grad():
        for name, tensor in found.items():
            engine.tensors[name].copy_(tensor)


def _checkpoints(path: Path) -> list[str]:
    """The folders of checkpoints that a path means, the newest first, from there; none if it is of Hugging Face."""
    with suppress(OSError):  # the ranks say more when they read it
        return [os.path.relpath(folder, path) for folder in checkpoints_in(path)]
    return []


def _read(engine: Engine, path: Path, is_checkpoint: bool, strict: bool) -> dict[str, Tensor]:
    """This rank's parts of a model's tensors, by first name."""
    with ExitStack() as stack:
        files: _Weights
        if is_checkpoint:
            reader = stack.enter_context(Reader(path))
            files, names = _Model(reader), reader.manifest.names[MODEL]
        else:
            files = stack.enter_context(WeightFiles(path))
            names = {name: name for name in files.names}
        given: dict[str, list[str]] = {}  # of a tied tensor all that the file has for it
        for name, first in engine.aliases.items():
            if name in names and names[name] not in given.setdefault(first, []):
                given[first].append(names[name])
        unknown = sorted(names.keys() - engine.aliases.keys())
        missing = sorted(set(engine.aliases.values()) - given.keys())
        if strict and (unknown or missing):
            raise Mismatch(
                f"{path} is of another model: it has {unknown[:5] or 'no name'} that this one has not, and lacks "
                f"{missing[:5] or 'none'} of this one's"
            )
        found = {}
        for first, several in given.items():
            if first in engine.tensors and (own := engine.tensors[first]).numel():
                found[first] = _part(engine, first, several[0], files)
                for name in several[1:] if strict else ():
                    other = _part(engine, first, name, files)
                    if not np.array_equal(elements(found[first].to(own.dtype)), elements(other.to(own.dtype))):
                        raise Mismatch(
                            f"{path} is of another model: {several[0]} and {name} are one tensor here, and have other "
                            f"values there; strict=False takes {several[0]}"
                        )
        return found


def _part(engine: Engine, first: str, name: str, files: _Weights) -> Tensor:
    shard = engine.shard(first)
    found = files.form(name)
    if found is None or found[1] != shard.shape:
        raise Mismatch(f"{name} has shape {found[1] if found else None}, but the model's is {shard.shape}")
    return tensor_of(files.read(name, shard.parts.get(engine.world.rank, shard.whole)), found[0])
