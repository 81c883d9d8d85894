"""State that forwards leave in Python for each other.

Each forward is captured from the state before the first one. ``self.longest = max(self.longest, n)`` is the same in all
steps of one batch shape, and so passes the check of a capture alone; a step of another shape begins from what that one
has left. Two captured forwards are captured again, each from the state after the other, and must be what they were.
Knows captured graphs; no models.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from whale.errors import CaptureError
from whale.graph.captured import Captured, Listed
from whale.graph.forward_state import first_difference
from whale.graph.made_once import Attribute, Carried
from whale.graph.origins import SourceLine, located
from whale.ir.program import Returns

__all__ = ["CapturedForward", "Forwards"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class CapturedForward:
    """A forward as it was captured.

    Attributes:
        modes: of the modules: whether each is in training mode.
        returns: of the step.
        attributes: key of what the script has changed in the model before.
        batch: an example, by leaf name.
        left: the attributes that it leaves, if there are some.
        outside: whether it changes what modules do not have, as globals, which no capture takes back.
        listing: its graph, with the constants.
        again: captures it from what another forward has left.
    """

    modes: tuple[bool, ...]
    returns: Returns
    attributes: Hashable
    batch: Mapping[str, Any]
    left: Carried | None
    outside: bool
    listing: Listed
    again: Callable[[Carried | None], Captured]

    def __str__(self) -> str:
        shapes = {name: tuple(x.shape) for name, x in self.batch.items() if isinstance(x, torch.Tensor)}
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        return f"{'a training' if any(self.modes) else 'an evaluation'} step with {shown}"


class Forwards:
    """The forwards of a model that were captured from one state."""

    def __init__(self) -> None:
        self._attributes: Hashable = None
        self._last: dict[Hashable, CapturedForward] = {}

    def add(self, forward: CapturedForward) -> None:
        """Compare a forward with the last one of each kind; none is compared with those of other attributes.

        Raises:
            CaptureError: one of them computes something else after the other.
        """
        if forward.attributes != self._attributes:
            self._attributes, self._last = forward.attributes, {}
        for other in self._last.values():
            _check(other, forward)
        self._last[forward.modes, forward.returns] = forward


def _check(first: CapturedForward, second: CapturedForward) -> None:
    outside = first.outside or second.outside
    if _tokens(first.left) == _tokens(second.left) and not outside:
        return  # each was compared with itself from there
    for forward, other in ((second, first), (first, second)):
        if other.left is None and not outside:
            continue
        problem: CaptureError | None = None
        line: SourceLine | None = None
        try:
            differs, line = _difference(forward.listing, forward.again(other.left).listing)
        except CaptureError as error:
            differs, problem = True, error
            line = SourceLine(error.file, error.line) if error.file and error.line else None
        if differs:
            attributes = other.left.attributes if other.left is not None else ()
            names = [f"{path}.{name}".removeprefix(".") for path, name, _ in attributes]
            raise located(
                f"the forward keeps {', '.join(names[:3]) or 'what its functions reach'} for later calls: {forward} "
                f"computes something else after {other}, but a captured graph has one step for all: compute it of each "
                "batch alone, keep it in a buffer (register_buffer) and compute with it by torch's operators, set it "
                "in the training loop, or, if it is made once, call the model once before parallelize",
                line,
            ) from problem


def _tokens(left: Carried | None) -> dict[Attribute, Hashable]:
    return {} if left is None else {name: _token(x) for name, x in left.attributes.items()}


def _token(x: Any) -> Hashable:
    """A token of a value, equal for equal ones where Python can say so."""
    if type(x) in _PLAIN:
        return type(x), repr(x)
    if type(x) in (list, tuple):
        return type(x), tuple(map(_token, x))
    return object()


def _difference(one: Listed, other: Listed) -> tuple[bool, SourceLine | None]:
    """Whether two forwards compute something else, and the model's line where."""
    differs, line = first_difference(one.nodes, other.nodes)
    if differs or len(one.constants) != len(other.constants):
        return True, line
    for (x, place), (y, _) in zip(one.constants, other.constants, strict=True):
        if not _is_equal(x, y):
            return True, place
    return False, None


def _is_equal(x: Any, other: Any) -> bool:
    if not (isinstance(x, torch.Tensor) and isinstance(other, torch.Tensor)):
        return x is other
    is_like = (x.shape, x.dtype, x.device) == (other.shape, other.dtype, other.device)
    return x is other or (is_like and torch.equal(x, other))
