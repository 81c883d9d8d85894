"""Weights in the files of Hugging Face: one ``model.safetensors``, or several with an index. Written from a checkpoint
one tensor at a time, and read in the parts that are wanted. It knows files and numpy's arrays; no torch.

These files have no digests; their headers are checked, and nothing in them is executed.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from whale.checkpoint.format import DTYPE_BYTES, MAX_ELEMENTS, Intervals, Key, header_of, length, whole
from whale.checkpoint.reader import Array, Reader, empty, segments
from whale.checkpoint.writer import Piece, synced_folder, write_all
from whale.errors import CheckpointError, InputFileError, UsageError
from whale.ir.files import write_file
from whale.ir.json_reader import parse_json
from whale.ir.json_text import format_json
from whale.ir.record import Record

__all__ = ["Entry", "Exported", "WeightFiles", "entries_of", "export", "weight_map_of"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

_BLOCK_BYTES = 1 << 24
"""About as much is read at a time of rows of which some columns are wanted."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The files of an export: how many, with how many tensors and bytes."""

    files: tuple[Path, ...]
    num_tensors: int
    bytes: int


def export(reader: Reader, folder: Path, max_shard_bytes: int) -> Exported:
    """Write the model of a checkpoint; of tensors with several names the first name. At most one tensor is in memory.

    Args:
        reader: of the checkpoint.
        folder: for the files; it is made, and must have no weights yet.
        max_shard_bytes: of the tensors in a file, except where one is larger.

    Raises:
        UsageError: the folder has weights, or cannot be written.
        CheckpointError: the checkpoint is damaged; no file is left.
    """
    reader.check_names()
    names = sorted(set(reader.manifest.names["model"].values()))
    forms = {name: form for name in names if (form := reader.form(Key("model", "", name))) is not None}
    sizes = {name: prod(shape) * DTYPE_BYTES[dtype] for name, (dtype, shape) in forms.items()}
    shards: list[list[str]] = [[]]
    for name in forms:
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + sizes[name] > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in folder.iterdir() if re.fullmatch(r"model.*\.safetensors.*", path.name))
        if found:
            raise UsageError(f"{folder} has {found[0]} already; give a folder without weights")
        with contextlib.ExitStack() as written:  # undone if one of them fails
            for file, shard in zip(files, shards, strict=True):
                _write_shard(
                    reader,
                    folder / file,
                    [(name, *forms[name]) for name in sorted(shard, key=lambda n: (-DTYPE_BYTES[forms[n][0]], n))],
                )
                written.callback((folder / file).unlink)
            if len(shards) > 1:
                placed = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
                index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(placed.items()))}
                write_file(folder / INDEX, (format_json(index),))
            synced_folder(folder)
            written.pop_all()
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    return Exported(files=tuple(folder / file for file in files), num_tensors=len(forms), bytes=sum(sizes.values()))


def _write_shard(reader: Reader, path: Path, tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """Write a file, which has its name when all of it is on the disk."""
    part = path.with_name(f".{path.name}.part")
    nothing = np.empty(0)
    try:
        with open(part, "xb", buffering=0) as file:
            pieces = [Piece(Key("", "", name), dtype, shape, whole(shape), nothing) for name, dtype, shape in tensors]
            write_all(file.fileno(), memoryview(header_of(pieces)))
            for name, _, _ in tensors:
                elements = reader.read(Key("model", "", name))
                write_all(file.fileno(), memoryview(elements.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
                del elements
            os.fsync(file.fileno())
        os.rename(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        raise


class Entry(Record):
    """A tensor in the header of a file of safetensors."""

    dtype: str
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_ELEMENTS)], ...], Field(max_length=16)]
    data_offsets: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]


_Header = TypeAdapter(dict[str, Entry])
_Map = TypeAdapter(dict[str, str])


class _Place(NamedTuple):
    """The place of a tensor in a file."""

    file: int
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class WeightFiles:
    """Weights by name; a context manager.

    Args:
        path: a file of safetensors, an index, or a folder with one of them. Links are followed, which the cache of
            Hugging Face is made of; names of files in an index are names only, without folders.

    Raises:
        CheckpointError: a header is damaged, or promises what is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._files: list[int] = []
        self._places: dict[str, _Place] = {}
        if path.is_dir():
            path = path / INDEX if (path / INDEX).is_file() else path / SINGLE
        try:
            if path.name.endswith(".json"):
                self._open_index(path)
            else:
                self._open(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its files."""
        for file in self._files:
            os.close(file)
        self._files.clear()

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return sorted(self._places)

    def form(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """The dtype and the shape of a tensor; None if it is not there."""
        place = self._places.get(name)
        return None if place is None else (place.dtype, place.shape)

    def read(self, name: str, at: Intervals | None = None) -> Array:
        """A part of a tensor, by default all of it.

        Raises:
            CheckpointError: it is not there, or the file is cut short.
        """
        if name not in self._places:
            raise CheckpointError(f"{self.path} has no {name}")
        place = self._places[name]
        at = whole(place.shape) if at is None else at
        out = empty(tuple(map(length, at)), place.dtype)
        if not place.shape:
            self._read_rows(place, 0, 1, out.reshape(1))
            return out
        is_wide = at[1:] == whole(place.shape)[1:]
        inner = [
            [slice(meet.source, meet.source + meet.size) for meet in segments(dim, ((0, size),))]
            for dim, size in zip(at[1:], place.shape[1:], strict=True)
        ]
        row_bytes = max(1, prod(place.shape[1:]) * DTYPE_BYTES[place.dtype])
        target = 0
        for start, stop in at[0]:
            step = stop - start if is_wide else max(1, _BLOCK_BYTES // row_bytes)
            for first in range(start, stop, max(1, step)):
                last = min(first + step, stop)
                own = out[target : target + last - first]
                if is_wide:
                    self._read_rows(place, first, last, own)
                else:
                    block = empty((last - first, *place.shape[1:]), place.dtype)
                    self._read_rows(place, first, last, block)
                    own[...] = _columns(block, inner)
                target += last - first
        return out

    def _read_rows(self, place: _Place, first: int, last: int, out: Array) -> None:
        row_bytes = prod(place.shape[1:]) * DTYPE_BYTES[place.dtype]
        view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        offset = place.offset + first * row_bytes
        while view:
            got = os.preadv(place.file, [view[:_BLOCK_BYTES]], offset)
            if not got:
                raise CheckpointError(f"{place.path} is cut short")
            view, offset, self.bytes_read = view[got:], offset + got, self.bytes_read + got

    def _open_index(self, path: Path) -> None:
        placed = weight_map_of(_content(path, _MAX_HEADER_BYTES), path)
        for file in sorted(set(placed.values())):
            self._open(path.parent / file)
        missing = sorted(name for name, file in placed.items() if name not in self._places)
        if missing:
            raise CheckpointError(f"{path} names {missing[0]}, which {placed[missing[0]]} has not")
        self._places = {name: self._places[name] for name in placed}

    def _open(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self._files.append(file)
        size = os.fstat(file).st_size
        length_bytes = os.pread(file, 8, 0) if path.is_file() else b""
        num_bytes = int.from_bytes(length_bytes, "little")
        if len(length_bytes) < 8 or not 2 <= num_bytes <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is damaged, or no file of safetensors: its header has {num_bytes} bytes")
        for name, entry in entries_of(os.pread(file, num_bytes, 8), size - 8 - num_bytes, path).items():
            if name in self._places:
                raise CheckpointError(f"{path} has {name}, and so has {self._places[name].path}")
            self._places[name] = _Place(file, path, entry.dtype, entry.shape, 8 + num_bytes + entry.data_offsets[0])


def weight_map_of(content: bytes, path: Path) -> dict[str, str]:
    """The names of files by tensor of an index with this content; *path* is for errors.

    Raises:
        CheckpointError: it is none, or a name is none of a file beside it.
    """
    try:
        placed = _Map.validate_python(_parsed(content, path).get("weight_map"), strict=True)
    except ValidationError:
        raise CheckpointError(f"{path} has no weight_map from names to files") from None
    for file in placed.values():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.safetensors", file):
            raise CheckpointError(f"{path} names the file {file[:80]!r}, which is no name of a file of safetensors")
    return placed


def entries_of(content: bytes, data_bytes: int, path: Path) -> dict[str, Entry]:
    """The tensors of a header with this content, before as many bytes of data; *path* is for errors.

    Raises:
        CheckpointError: it is damaged, or promises what is not there.
    """
    found = _parsed(content, path)
    found.pop("__metadata__", None)
    try:
        header = _Header.validate_python(found, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for name, entry in header.items():
        begin, end = entry.data_offsets
        if entry.dtype not in DTYPE_BYTES:
            raise CheckpointError(f"{path}: {name} has dtype {entry.dtype[:20]}, which is not known")
        if end - begin != prod(entry.shape) * DTYPE_BYTES[entry.dtype] or end > data_bytes:
            raise CheckpointError(f"{path} is damaged: {name} is at {begin} to {end} of {data_bytes} bytes")
    return header


def _content(path: Path, most_bytes: int) -> bytes:
    try:
        with open(path, "rb") as file:
            found = file.read(most_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(found) > most_bytes:
        raise CheckpointError(f"{path} is larger than {most_bytes} bytes")
    return found


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return parse_json(content.decode("utf-8"), str(path))[0]
    except (UnicodeDecodeError, InputFileError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:200]}") from error


def _columns(block: Array, inner: list[list[slice]]) -> Array:
    """The stretches of all dims but the first."""
    for dim, spans in enumerate(inner, 1):
        pieces = [block[(slice(None),) * dim + (span,)] for span in spans]
        block = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, dim)
    return block
