"""Writing a rank's files of a checkpoint: tensors as safetensors, and an index with a digest of each chunk. What is
returned is on the disk. It knows bytes; no tensors and no ranks that run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whale.checkpoint.format import (
    CHUNK_BYTES,
    DTYPE_BYTES,
    Group,
    Index,
    Intervals,
    Key,
    Part,
    data_name,
    header_of,
    index_name,
    length,
)
from whale.checkpoint.reader import Array

__all__ = ["Piece", "synced_folder", "write_all", "write_rank", "write_synced"]

_WRITE_BYTES = 1 << 26


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that is written, with its elements."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    at: Intervals
    elements: Array


def write_rank(
    folder: Path,
    rank: int,
    pieces: Sequence[Piece],
    groups: dict[str, tuple[Group, ...]],
    values: dict[str, dict[str, dict[str, Any]]],
) -> str:
    """Write a rank's tensors and its index; returns the SHA-256 of the index.

    Raises:
        OSError: they cannot be written.
    """
    pieces = aligned(pieces)
    header = header_of(pieces)
    path = folder / data_name(rank)
    parts = []
    with open(path, "xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(header))
        offset = len(header)
        for piece in pieces:
            data = memoryview(np.ascontiguousarray(piece.elements).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            rows = length(piece.at[0]) if piece.at else 1
            row_bytes = len(data) // rows
            per_chunk = max(1, CHUNK_BYTES // row_bytes)
            digests = [
                hashlib.sha256(data[start * row_bytes : (start + per_chunk) * row_bytes]).hexdigest()
                for start in range(0, rows, per_chunk)
            ]
            write_all(file.fileno(), data)
            parts.append(
                Part.model_construct(
                    **piece.key._asdict(),
                    dtype=piece.dtype,
                    shape=piece.shape,
                    at=piece.at,
                    offset=offset,
                    rows=per_chunk,
                    sha256="".join(digests),
                )
            )
            offset += len(data)
        os.fsync(file.fileno())
    index = Index.model_construct(bytes=offset, parts=tuple(parts), groups=groups, values=values)
    text = index.model_dump_json().encode()
    write_synced(folder / index_name(rank), text)
    return hashlib.sha256(text).hexdigest()


def aligned(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces in an order in which each begins at a multiple of its elements' size, as readers want."""
    return sorted(pieces, key=lambda piece: -DTYPE_BYTES[piece.dtype])


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file to the disk."""
    with open(path, "xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(content))
        os.fsync(file.fileno())


def synced_folder(path: Path) -> None:
    """Write the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_all(file: int, data: memoryview) -> None:
    """Write all bytes to an open file."""
    while data:
        data = data[os.write(file, data[:_WRITE_BYTES]) :]
