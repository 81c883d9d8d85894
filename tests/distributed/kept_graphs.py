"""Captured graphs as bytes: the processes of a run of tests capture each model once, and read what another one wrote.

Only tests read these bytes, which they have written themselves: what a pickle may do is not looked at.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import pickle
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from whale.strategies import traced_call

__all__ = ["FOLDER", "Kept", "dumps", "dumps_if_possible", "kept", "loads"]

FOLDER = "WHALE_TESTS_GRAPHS"
"""Environment variable: the folder of a run's graphs; without it nothing is kept."""


@contextmanager
def kept(key: Hashable) -> Iterator[Kept]:
    """Context with the graph that the processes of this run keep for a key, while no other one looks at it.

    A key that another process has found to have no bytes is left at once.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        yield Kept(None)
        return
    file = Path(folder, hashlib.sha256(repr(key).encode()).hexdigest())
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = Kept(file)
        if found.is_none:
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield found


class Kept:
    """The file of a graph; None where nothing is kept."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._text = file.read_bytes() if file is not None and file.exists() else None
        self.is_none = file is None or self._text == b""

    @property
    def graph(self) -> Any:
        """A graph of its own, if there is one; none where it has operators that this process defines by a capture."""
        try:
            return loads(self._text) if self._text else None
        except AttributeError:
            return None

    def write(self, text: bytes) -> None:
        """Keep these bytes, none if there are none for this key."""
        if self._file is not None and self._text is None:
            part = self._file.with_suffix(".part")
            part.write_bytes(text)
            part.replace(self._file)


def dumps(captured: Any) -> bytes:
    """The bytes of a graph, or of what holds graphs.

    Raises:
        Exception: of any type, where it holds what cannot be written.
    """
    stream = io.BytesIO()
    _Pickler(stream).dump(captured)
    return stream.getvalue()


def dumps_if_possible(captured: Any) -> bytes:
    """The bytes of a graph, or of what holds graphs; none where it has none that can be read."""
    try:
        text = dumps(captured)
        loads(text)
    except Exception:  # of any type
        return b""
    return text


def loads(text: bytes) -> Any:
    """A graph of its own, or what holds graphs, from bytes."""
    return pickle.loads(text)


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, fx.Graph):
            return fx.Graph, (), list(x.nodes), None, None, _in_order
        if isinstance(x, fx.Node):
            state = (x.args, x.kwargs, x.type, x.meta)
            return _new_node, (x.graph, x.op, x.name, x.target), state, None, None, _fill
        if x is traced_call._fakes:
            return _mode_of_calls, ()
        if isinstance(x, FakeTensorMode):
            return _new_mode, (x.allow_non_fake_inputs,)
        if isinstance(x, FakeTensor):
            layout = (tuple(x.shape), x.stride(), x.storage_offset(), x.untyped_storage().nbytes())
            return _new_fake, (x.fake_mode, *layout, x.dtype, x.device, isinstance(x, nn.Parameter), x.requires_grad)
        if isinstance(x, OpOverload):
            return _overload, (x._schema.name, x._overloadname)
        if isinstance(x, (HigherOrderOperator, OpOverloadPacket)):
            return _named, (str(x) if isinstance(x, OpOverloadPacket) else f"{x.namespace}.{x.name()}",)
        return NotImplemented


def _in_order(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    for before, after in pairwise(nodes):
        before.append(after)


def _new_node(graph: fx.Graph, op: str, name: str, target: Any) -> fx.Node:
    node = graph.create_node(op, target, name=name)
    if node.name != name:
        raise ValueError(f"{name} is {node.name} in a new graph")
    return node


def _fill(node: fx.Node, state: tuple[Any, Any, Any, dict[str, Any]]) -> None:
    node.args, node.kwargs, node.type, node.meta = state


def _mode_of_calls() -> FakeTensorMode:
    return traced_call._fakes


def _new_mode(allow_non_fake_inputs: bool) -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs)


def _new_fake(
    mode: FakeTensorMode,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    num_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    with no_dispatch():
        whole = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="meta")
        found: torch.Tensor = FakeTensor(mode, whole.as_strided(shape, stride, offset), device)
    return nn.Parameter(found, requires_grad) if is_parameter else found.requires_grad_(requires_grad)


def _overload(name: str, overload: str) -> OpOverload:
    namespace, operator = name.split("::")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")
    return found


def _named(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
