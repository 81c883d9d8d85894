"""Reading parts of a checkpoint's tensors: of its chunks those with elements that are wanted, and no byte that is used
without a check of its digest. It knows files and numpy's arrays; no torch."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whale.checkpoint.format import (
    DTYPE_BYTES,
    MANIFEST,
    Index,
    Intervals,
    Key,
    Part,
    data_name,
    empty_of_form,
    header_of,
    index_name,
    is_step_name,
    length,
    open_file,
    parse_index,
    parse_manifest,
    step_name,
    whole,
)
from whale.errors import CheckpointError

__all__ = ["Array", "Reader", "empty", "segments"]

Array = npt.NDArray[Any]
"""Elements by their bits, as whole numbers without a sign."""


def empty(shape: tuple[int, ...], dtype: str) -> Array:
    """An array for elements of a dtype of safetensors."""
    return np.empty(shape, dtype=f"u{DTYPE_BYTES[dtype]}")


class Segment(NamedTuple):
    """A place where stretches of a dim meet: from which index of each, and how many."""

    target: int
    source: int
    size: int


def segments(target: tuple[tuple[int, int], ...], source: tuple[tuple[int, int], ...]) -> list[Segment]:
    """The places where two parts of a dim meet, by their own indices.

    >>> segments(((2, 6),), ((0, 3), (5, 9)))
    [Segment(target=0, source=2, size=1), Segment(target=3, source=3, size=1)]
    """
    found, at = [], 0
    for first, last in target:
        other = 0
        for start, stop in source:
            low, high = max(first, start), min(last, stop)
            if low < high:
                found.append(Segment(at + low - first, other + low - start, high - low))
            other += stop - start
        at += last - first
    return found


_PRIME = (1 << 61) - 1


class _Measure:
    """A measure of parts by which exactly those have that of the whole together that have each element once.

    The length of an index is drawn at random, modulo a prime: the sum of parts that leave elements out, or have some
    twice, is that of the whole with a probability of some 2**-60. It takes time in proportion to the number of parts.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], int] = {}

    def __call__(self, at: Intervals) -> int:
        product = 1
        for dim, stretches in enumerate(at):
            product = product * sum(self._end(dim, stop) - self._end(dim, start) for start, stop in stretches) % _PRIME
        return product

    def _end(self, dim: int, index: int) -> int:
        """The length of all indices of a dim before this one."""
        if (dim, index) not in self._ends:
            self._ends[dim, index] = secrets.randbelow(_PRIME)
        return self._ends[dim, index]


class Placed(NamedTuple):
    """A part, and the rank that has written it."""

    part: Part
    rank: int


class Reader:
    """The tensors of one checkpoint; a context manager.

    Args:
        folder: of the checkpoint.

    Attributes:
        manifest: what it is.
        indexes: by rank.
        parts: of each tensor.
        bytes_read: so far, with the indexes.

    Raises:
        CheckpointError: it is damaged or incomplete, as far as the indexes show.
    """

    def __init__(self, folder: Path) -> None:
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a link, which is not followed: give the folder itself")
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder of a checkpoint")
        self.folder = folder
        self.manifest = parse_manifest(folder / MANIFEST)
        if is_step_name(folder.name) and folder.name != step_name(self.manifest.step):
            raise CheckpointError(
                f"{folder} has the checkpoint of step {self.manifest.step}: it was renamed or copied; give it the name "
                f"{step_name(self.manifest.step)} again"
            )
        self.indexes: list[Index] = []
        self.parts: dict[Key, list[Placed]] = {}
        self.bytes_read = 0
        self._files: dict[int, int] = {}
        self._scratch = np.empty(0, np.uint8)
        measure = _Measure()
        for rank, digest in enumerate(self.manifest.indexes):
            index, size = parse_index(folder / index_name(rank), digest)
            self._check_size(rank, index.bytes)
            self.indexes.append(index)
            self.bytes_read += size
            for part in index.parts:
                self.parts.setdefault(part.key, []).append(Placed(part, rank))
        for key, placed in self.parts.items():
            first = placed[0].part
            if any((one.shape, one.dtype) != (first.shape, first.dtype) for one, _ in placed):
                raise CheckpointError(f"{folder} is damaged: parts of {key} have several shapes or dtypes")
            if sum(map(measure, (one.at for one, _ in placed))) % _PRIME != measure(whole(first.shape)):
                raise CheckpointError(f"{folder} is damaged: the parts of {key} are not all of its elements, each once")

    def _check_size(self, rank: int, written: int) -> None:
        path = self.folder / data_name(rank)
        try:
            size = os.stat(path, follow_symlinks=False).st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if size != written:
            raise CheckpointError(f"{path} has {size} bytes, but {written} were written")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def form(self, key: Key) -> tuple[str, tuple[int, ...]] | None:
        """The dtype and the whole shape of a tensor; None if it is not there."""
        if placed := self.parts.get(key):
            return placed[0].part.dtype, placed[0].part.shape
        return empty_of_form(self.indexes[0].values.get(key.of, {}).get(key.name, {}).get(key.state))

    def read(self, key: Key, at: Intervals | None = None) -> Array:
        """A part of a tensor, by default all of it.

        Raises:
            CheckpointError: it is not there, or damaged.
        """
        form = self.form(key)
        if form is None:
            raise CheckpointError(f"{self.folder} has no {key}")
        dtype, shape = form
        at = whole(shape) if at is None else at
        found = empty(tuple(map(length, at)), dtype)
        self.read_into(key, at, found)
        return found

    def read_into(self, key: Key, at: Intervals, out: Array) -> None:
        """The same into an array of that shape, contiguous, which is spoiled if something is damaged."""
        done = 0
        for part, rank in self.parts.get(key, ()):
            meets = [segments(target, source) for target, source in zip(at, part.at, strict=True)]
            if all(meets):
                done += self._take(part, rank, meets, out)
        if done != out.size:
            raise CheckpointError(f"{self.folder} is damaged: it has {done} of {out.size} elements of a part of {key}")

    def verify(self) -> int:
        """Check every byte of the checkpoint, and that all tensors of its models are there; returns how many bytes.

        Raises:
            CheckpointError: names the first part that is damaged.
        """
        self.check_names()
        for rank, index in enumerate(self.indexes):
            self._check_places(rank, index)
            for part in index.parts:
                for chunk in range(part.num_chunks):
                    self._chunk(part, rank, chunk, None)
        return self.bytes_read

    def check_names(self) -> None:
        """Refuse a manifest that names tensors of models which no rank has written; a load misses them by itself."""
        for of, names in self.manifest.names.items():
            missing = [name for name in dict.fromkeys(names.values()) if self.form(Key(of, "", name)) is None]
            if missing:
                raise CheckpointError(
                    f"{self.folder} has no part of {', '.join(missing[:5])} of {of}, which {MANIFEST} names: it is "
                    "damaged, or of an earlier Whale and the tensor has no elements: then load it and save it again"
                )

    def _check_places(self, rank: int, index: Index) -> None:
        """Refuse another header than that of the parts, and bytes that are of no part: no load reads either."""
        header = header_of(index.parts)
        found = self._read(rank, memoryview(bytearray(len(header))), 0)
        if found != header:
            raise CheckpointError(
                f"{self.folder / data_name(rank)} is damaged: its header is not that of the parts in its index"
            )
        end = len(header)
        for part in index.parts:
            if part.offset != end:
                raise CheckpointError(
                    f"{self.folder / index_name(rank)} is damaged: {part.key} begins at {part.offset}, and what is "
                    f"before it ends at {end}"
                )
            end += part.num_rows * part.row_bytes
        if end != index.bytes:
            raise CheckpointError(
                f"{self.folder / data_name(rank)} is damaged: its parts end at {end} of {index.bytes} bytes"
            )

    def _take(self, part: Part, rank: int, meets: list[list[Segment]], out: Array) -> int:
        """Copy the elements of a part that are wanted; returns how many they are."""
        if not part.at:
            out[...] = self._chunk(part, rank, 0, None).reshape(())
            return 1
        inner = part.local_shape[1:]
        is_wide = out.shape[1:] == inner and all(
            meet == [Segment(0, 0, size)] for meet, size in zip(meets[1:], inner, strict=True)
        )
        done = 0
        for chunk in range(part.num_chunks):
            first, last = chunk * part.rows, min((chunk + 1) * part.rows, part.num_rows)
            rows = [
                Segment(meet.target + low - meet.source, low - first, high - low)
                for meet in meets[0]
                if (low := max(meet.source, first)) < (high := min(meet.source + meet.size, last))
            ]
            if not rows:
                continue
            if is_wide and len(rows) == 1 and rows[0].size == last - first:
                place = out[rows[0].target : rows[0].target + rows[0].size]
                self._chunk(part, rank, chunk, place)
                done += place.size
                continue
            found = self._chunk(part, rank, chunk, None).reshape(last - first, *inner)
            done += sum(_copied(out, found, slices) for slices in _boxes([rows, *meets[1:]]))
        return done

    def _chunk(self, part: Part, rank: int, chunk: int, into: Array | None) -> Array:
        """The elements of a chunk, in an array if one is given; else in memory that the next chunk has, too."""
        first, last = chunk * part.rows, min((chunk + 1) * part.rows, part.num_rows)
        size = (last - first) * part.row_bytes
        if into is None and self._scratch.nbytes < size:
            self._scratch = np.empty(size, np.uint8)
        found = self._scratch[:size].view(f"u{DTYPE_BYTES[part.dtype]}") if into is None else into
        view = memoryview(found.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        got = self._read(rank, view, part.offset + first * part.row_bytes)
        if len(got) != size or hashlib.sha256(got).hexdigest() != part.digest(chunk):
            what = "is cut short" if len(got) != size else "is damaged"
            raise CheckpointError(
                f"{self.folder / data_name(rank)} {what} in {part.key}, chunk {chunk} of {part.num_chunks}"
            )
        return found

    def _read(self, rank: int, into: memoryview, offset: int) -> memoryview:
        """The bytes of a rank's file from an offset on, in this memory; fewer where the file ends."""
        try:
            got = os.preadv(self._file(rank), [into], offset)
        except OSError as error:
            raise CheckpointError(f"{self.folder / data_name(rank)} cannot be read: {error.strerror}") from error
        self.bytes_read += got
        return into[:got]

    def _file(self, rank: int) -> int:
        if rank not in self._files:
            self._files[rank] = open_file(self.folder / data_name(rank))
        return self._files[rank]


def _boxes(meets: list[list[Segment]]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Slices of the target and of the source for each box where parts meet."""
    if not meets:
        yield (), ()
        return
    for target, source in _boxes(meets[:-1]):
        for meet in meets[-1]:
            yield (
                (*target, slice(meet.target, meet.target + meet.size)),
                (*source, slice(meet.source, meet.source + meet.size)),
            )


def _copied(out: Array, found: Array, slices: tuple[tuple[slice, ...], tuple[slice, ...]]) -> int:
    target, source = slices
    box = found[source]
    out[target] = box
    return box.size
