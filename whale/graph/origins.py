"""Origins of operators: the line of the model's source, and the module, in which one was made."""

from __future__ import annotations

import inspect
import os
import sysconfig
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.traceback import annotate as annotate_nodes

from whale.errors import CaptureError

__all__ = [
    "SourceLine",
    "checkpointing",
    "is_checkpointed",
    "is_model",
    "layer_of",
    "located",
    "module_of",
    "modules_around",
    "place_of_forward",
    "place_of_frame",
    "place_of_node",
    "where",
]


class SourceLine(NamedTuple):
    """A line of a source file."""

    file: str
    line: int


_NOT_THE_MODEL = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        sysconfig.get_paths()["stdlib"],
    )
)
_PACKAGES = ("numpy", "transformers/utils", "transformers/integrations")


def is_model(file: str) -> bool:
    """Whether a source file may be the model's own: not torch, Whale, Python, or a library's decorators."""
    if file.startswith("<"):
        return False
    if "site-packages" in file:
        inside = file.rpartition("site-packages")[2].lstrip("/\\").replace("\\", "/")
        return not inside.startswith((*(f"{name}/" for name in _PACKAGES), "torch/"))
    return not os.path.abspath(file).startswith(_NOT_THE_MODEL)


def place_of_frame(frame: FrameType | None) -> SourceLine | None:
    """The innermost line of the model's own source that a frame is in."""
    while frame is not None:
        if is_model(frame.f_code.co_filename):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def place_of_node(node: fx.Node) -> SourceLine | None:
    """The innermost line of the model's own source that made an operator."""
    found = None
    for line in (node.meta.get("stack_trace") or "").splitlines():
        if line.strip().startswith("File "):
            file, number = line.strip().removeprefix('File "').split('", line ')
            if is_model(file):
                found = SourceLine(file, int(number.split(",")[0]))
    return found


def where(node: fx.Node) -> str:
    """The operator's place at the end of a phrase, for messages: `` at model.py:12``; that of what it reads, or of what
    reads it, where its own is not known, as of operators that write; empty where neither is."""
    if (place := place_of_node(node)) is not None:
        return f" at {place.file}:{place.line}"
    for near in (*reversed(node.all_input_nodes), *node.users):
        if (place := place_of_node(near)) is not None:
            return f" near {place.file}:{place.line}"
    return ""


def module_of(node: fx.Node) -> str:
    """Path of the innermost module of the model whose forward made an operator; empty for the model itself."""
    return next(reversed(modules_around(node)), "")


def modules_around(node: fx.Node) -> list[str]:
    """Paths of the modules of the model in whose forwards an operator was made, outermost first; the model is the empty
    path, and what computes the loss from its output lies in none."""
    paths = [str(entry[0]).removeprefix("L['self'].") for entry in (node.meta.get("nn_module_stack") or {}).values()]
    return [path.removeprefix("model").removeprefix(".") for path in paths if path]


def layer_of(node: fx.Node) -> str:
    """The module of a list of modules in which an operator was made, as far as the first number in its path; empty
    outside of lists."""
    parts = next(iter(reversed(modules_around(node))), "").split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ""


def is_checkpointed(node: fx.Node) -> bool:
    """Whether an operator was made in a ``torch.utils.checkpoint``."""
    return _CHECKPOINTED in (node.meta.get("custom") or {})


_CHECKPOINTED = "whale_checkpointed"


def checkpointing() -> AbstractContextManager[Any]:
    """Context in which operators are those of a ``torch.utils.checkpoint``."""
    return annotate_nodes({_CHECKPOINTED: "1"})


def place_of_forward(model: nn.Module) -> SourceLine | None:
    """The line at which a model's forward begins, where it is not torch's."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return SourceLine(code.co_filename, code.co_firstlineno) if code and is_model(code.co_filename) else None


def located(message: str, place: SourceLine | None) -> CaptureError:
    """An error at a line."""
    return CaptureError(message, file=place.file if place else None, line=place.line if place else None)
