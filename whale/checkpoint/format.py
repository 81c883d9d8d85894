"""The format of a checkpoint, version 1: names of files, and records that are checked before anything is believed.

A checkpoint is a folder ``step-00000100``. Each rank writes ``rank-00000.safetensors``, with the parts of tensors that
it owns, and ``rank-00000.json``, its index: which parts these are, where they are, and a SHA-256 for each chunk. Rank 0
writes ``manifest.json`` with the digests of the indexes and what is not a tensor, and renames the folder to its name
last. Every element of every tensor is in one part. A later version of Whale reads each earlier version of the format.
It knows files; no tensors, no ranks that run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    model_validator,
)

from whale.errors import CheckpointError, InputFileError
from whale.ir.json_reader import parse_json
from whale.ir.record import Record

__all__ = [
    "CHUNK_BYTES",
    "DTYPE_BYTES",
    "MANIFEST",
    "MAX_STEP",
    "VERSION",
    "Group",
    "Index",
    "Intervals",
    "Key",
    "Manifest",
    "Part",
    "check_manifest",
    "data_name",
    "empty_of_form",
    "form_of_empty",
    "header_of",
    "index_name",
    "index_of",
    "is_step_name",
    "length",
    "manifest_of",
    "open_file",
    "parse_index",
    "parse_manifest",
    "read_file",
    "step_name",
    "step_of",
    "whole",
    "written_manifest",
]

Intervals = tuple[tuple[tuple[int, int], ...], ...]
"""For each dim of a tensor, half-open stretches in order."""

VERSION = 1
MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 18
"""About as much of a part has a digest of its own."""

DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""The dtypes of safetensors, with the bytes of an element."""

MAX_STEP = 10**18 - 1
MAX_RANKS = 1 << 16
MAX_ELEMENTS = 1 << 50
MAX_INDEX_BYTES = 1 << 28
MAX_MANIFEST_BYTES = 1 << 26
MAX_PARTS = 1 << 21
MAX_DIMS = 16


def step_name(step: int) -> str:
    """The name of the folder of a step.

    >>> step_name(100), is_step_name("step-00000100"), is_step_name(".step-00000100.0f.part")
    ('step-00000100', True, False)
    """
    return f"step-{step:08d}"


def is_step_name(name: str) -> bool:
    """Whether it is the name of a complete checkpoint."""
    return re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,17})", name) is not None


def step_of(name: str) -> int:
    """The step of a complete checkpoint with this name."""
    return int(name.removeprefix("step-"))


def data_name(rank: int) -> str:
    """The name of the file with a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def index_name(rank: int) -> str:
    """The name of the file with a rank's index."""
    return f"rank-{rank:05d}.json"


def whole(shape: tuple[int, ...]) -> Intervals:
    """The part that is all of a tensor."""
    return tuple(((0, size),) for size in shape)


def length(dim: tuple[tuple[int, int], ...]) -> int:
    """The number of indices in stretches."""
    return sum(stop - start for start, stop in dim)


# --- records


class Key(NamedTuple):
    """The name of a tensor: ``of`` is ``model``, or the name by which the script gave an optimizer or another object,
    ``state`` that of a state of an optimizer, ``name`` that of the parameter."""

    of: str
    state: str
    name: str

    def __str__(self) -> str:
        return ".".join(part for part in self if part)


_Name = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Digests = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})*$")]
_Size = Annotated[int, Field(ge=0, le=MAX_ELEMENTS)]
_Shape = Annotated[tuple[_Size, ...], Field(max_length=MAX_DIMS)]


def _read_intervals(text: object) -> object:
    if not isinstance(text, str) or not re.fullmatch(r"([0-9]{1,16}-[0-9]{1,16}([,;](?=.))?)*", text):
        raise ValueError("must be stretches such as 0-4,8-12;0-16")
    return tuple(
        tuple(tuple(map(int, stretch.split("-"))) for stretch in dim.split(",")) for dim in text.split(";") if dim
    )


def _write_intervals(intervals: Intervals) -> str:
    return ";".join(",".join(f"{start}-{stop}" for start, stop in dim) for dim in intervals)


class Part(Record):
    """A part of a tensor in a rank's file.

    Attributes:
        of, state, name: see `Key`.
        dtype: of safetensors.
        shape: of the whole tensor.
        at: the stretches of each dim that the part has.
        offset: of its first byte in the file.
        rows: indices of its first dim in a chunk.
        sha256: the digests of its chunks, one after the other.
    """

    of: _Name
    state: _Name = ""
    name: _Name
    dtype: Literal[*DTYPE_BYTES]  # type: ignore[valid-type]
    shape: _Shape
    at: Annotated[
        Intervals,
        BeforeValidator(_read_intervals),
        PlainSerializer(_write_intervals),
    ]
    offset: _Size
    rows: Annotated[int, Field(ge=1, le=MAX_ELEMENTS)]
    sha256: _Digests

    @model_validator(mode="after")
    def _check(self) -> Part:
        if len(self.at) != len(self.shape) or prod(self.shape) > MAX_ELEMENTS:
            raise ValueError(f"at has {len(self.at)} dims, and shape {len(self.shape)}")
        for dim, size in zip(self.at, self.shape, strict=True):
            ends = [0, *(end for stretch in dim for end in stretch), size]
            if any(first > second for first, second in pairwise(ends)) or not length(dim):
                raise ValueError(f"at: {dim} is no part of 0-{size}")
        if len(self.sha256) != 64 * self.num_chunks:
            raise ValueError(f"sha256 has {len(self.sha256) // 64} digests for {self.num_chunks} chunks")
        return self

    @property
    def key(self) -> Key:
        """The tensor that it is of."""
        return Key(self.of, self.state, self.name)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Its own shape."""
        return tuple(map(length, self.at))

    @property
    def num_rows(self) -> int:
        """Indices of its first dim."""
        return length(self.at[0]) if self.at else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one of them."""
        return prod(self.local_shape[1:]) * DTYPE_BYTES[self.dtype]

    @property
    def num_chunks(self) -> int:
        """Number of its chunks."""
        return -(-self.num_rows // self.rows)

    def digest(self, chunk: int) -> str:
        """The digest of a chunk."""
        return self.sha256[64 * chunk : 64 * (chunk + 1)]


class Group(Record):
    """A group of an optimizer's parameters: the names of those of a rank, and its options, as `encoded` makes them."""

    names: tuple[_Name, ...]
    options: dict[_Name, Any]


class Index(Record):
    """The index of a rank's file.

    Attributes:
        bytes: of its file of tensors.
        parts: in it.
        groups: of the optimizers, by name.
        values: states of optimizers that are no tensors, by the optimizer's name, parameter and state; of objects whose
            state is another than on rank 0, under empty names; and for rank 0 the forms of the models' tensors without
            elements, by the model's name and that of the tensor, under an empty state.
    """

    bytes: _Size
    parts: Annotated[tuple[Part, ...], Field(max_length=MAX_PARTS)]
    groups: dict[_Name, tuple[Group, ...]] = Field(default_factory=dict)
    values: dict[_Name, dict[_Name, dict[_Name, Any]]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Index:
        sizes = [part.num_rows * part.row_bytes for part in self.parts]
        if sum(sizes) > self.bytes:
            raise ValueError(f"parts have {sum(sizes)} bytes, and the file {self.bytes}")
        for part, size in zip(self.parts, sizes, strict=True):
            if part.offset + size > self.bytes:
                raise ValueError(f"{part.key} ends after the {self.bytes} bytes of the file")
        return self


class Manifest(Record):
    """The manifest of a checkpoint.

    Attributes:
        step: number of steps that were done.
        indexes: the SHA-256 of each rank's index.
        names: for each model, its names, and for each the first name of that tensor.
        optimizers: the class of each optimizer, by name.
        objects: the states of other objects, by name (`whale.checkpoint.values`).
        loss_scaler: the state of the model's.
        versions: of what has written it.
    """

    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    indexes: Annotated[tuple[_Digest, ...], Field(min_length=1, max_length=MAX_RANKS)]
    names: dict[_Name, dict[_Name, _Name]]
    optimizers: dict[_Name, _Name] = Field(default_factory=dict)
    objects: dict[_Name, Any] = Field(default_factory=dict)
    loss_scaler: dict[_Name, int | float] | None = None
    versions: dict[_Name, _Name] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        if "model" not in self.names:
            raise ValueError("names: there is no model")
        return self


def form_of_empty(dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The JSON of a tensor without elements, of which no file has a part.

    >>> empty_of_form(form_of_empty("F32", (0, 3)))
    ('F32', (0, 3))
    """
    return {"$empty": [dtype, *shape]}


def empty_of_form(value: object) -> tuple[str, tuple[int, ...]] | None:
    """The dtype and the shape that `form_of_empty` has written; None of anything else."""
    match value:
        case {"$empty": [str(dtype), *shape]} if dtype in DTYPE_BYTES and 0 in shape and len(shape) <= MAX_DIMS:
            if all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in shape):
                return dtype, tuple(shape)
    return None


# --- files


class Cut(Protocol):
    """A part of a tensor in a file of safetensors."""

    @property
    def key(self) -> Key:
        """The tensor."""

    @property
    def dtype(self) -> str:
        """The dtype of its elements."""

    @property
    def at(self) -> Intervals:
        """The stretches of each dim of the tensor that it has."""


def header_of(pieces: Iterable[Cut]) -> bytes:
    """The beginning of a file of safetensors with these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    seen: Counter[str] = Counter()
    offset = 0
    for piece in pieces:
        name = str(piece.key)
        seen[name] += 1
        shape = tuple(map(length, piece.at))
        size = prod(shape) * DTYPE_BYTES[piece.dtype]
        name = name if seen[name] == 1 else f"{name}#{seen[name]}"
        header[name] = {"dtype": piece.dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def open_file(path: Path) -> int:
    """Open a regular file for reading; neither a link nor a pipe.

    Raises:
        CheckpointError: it cannot be.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; is it a link, or gone?") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path} is no regular file")
    return file


def read_file(path: Path, most_bytes: int) -> bytes:
    """The content of a file of limited size.

    Raises:
        CheckpointError: it cannot be read, or is larger.
    """
    with open(open_file(path), "rb") as file:
        try:
            found = file.read(most_bytes + 1)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(found) > most_bytes:
        raise CheckpointError(f"{path} is larger than {most_bytes} bytes, which no such file needs")
    return found


_RecordT = TypeVar("_RecordT", bound=BaseModel)


def _validated(record: type[_RecordT], text: str | bytes, path: Path) -> _RecordT:
    try:
        return record.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is damaged, or none of Whale's: {where}: {first['msg']}") from None


def parse_index(path: Path, digest: str) -> tuple[Index, int]:
    """Read a rank's index with this digest; also returns its bytes.

    Raises:
        CheckpointError: it is missing, another, or breaks a limit.
    """
    content = read_file(path, MAX_INDEX_BYTES)
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not that in {MANIFEST}")
    return index_of(content, path), len(content)


def index_of(content: bytes, path: Path) -> Index:
    """The index with this content; *path* is for errors."""
    return _validated(Index, content, path)


def _canonical(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def written_manifest(manifest: Manifest) -> str:
    """The text of a manifest, which has its own digest."""
    content = manifest.model_dump(mode="json")
    digest = hashlib.sha256(_canonical(content).encode()).hexdigest()
    outer = {"format": "whale-checkpoint", "version": VERSION, "sha256": digest, "content": content}
    return json.dumps(outer, indent=1, allow_nan=False) + "\n"


def check_manifest(content: bytes, path: Path) -> None:
    """Refuse a manifest that would not be read again; older checkpoints are deleted for one that is.

    Raises:
        CheckpointError: it breaks a limit.
    """
    if len(content) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the states of objects have {len(content)} bytes in {path.name}, which is read up to "
            f"{MAX_MANIFEST_BYTES}: give numbers in tensors"
        )
    try:
        manifest_of(content, path)
    except CheckpointError as error:
        raise CheckpointError(f"it could not be loaded again: {error}") from error


def parse_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointError: it is missing or damaged, breaks a limit, or is of a later version.
    """
    return manifest_of(read_file(path, MAX_MANIFEST_BYTES), path)


def manifest_of(content: bytes, path: Path) -> Manifest:
    """The manifest with this content; *path* is for errors."""
    try:
        outer, _ = parse_json(content.decode("utf-8"), str(path))
    except (UnicodeDecodeError, InputFileError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    version = outer.get("version")
    if outer.get("format") != "whale-checkpoint" or not isinstance(version, int):
        raise CheckpointError(f"{path} is damaged, or none of Whale's: it names no format")
    if version != VERSION:
        raise CheckpointError(f"{path} has version {version} of the format, and this Whale reads {VERSION}: update it")
    content_found = outer.get("content")
    if hashlib.sha256(_canonical(content_found).encode()).hexdigest() != outer.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not that of its content")
    return _validated(Manifest, json.dumps(content_found), path)  # the digest is of sorted keys, states have their own
