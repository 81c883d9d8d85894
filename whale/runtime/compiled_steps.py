"""Compiled steps by what they were compiled for: the most recently used ones are kept.

Knows keys of steps, and that compiling is slow; not what a step is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["CompiledSteps", "StepKey"]

KEPT = 64
"""Limit of compiled steps: a script that buckets lengths has a few, twice with evaluation."""

KEPT_MADE = 16
"""Limit of steps that were made of compiled ones: each has its own constants, such as masks, and is soon made again."""

MANY = 5
"""Kinds of batches after which a warning says what they differ in."""


class StepKey(NamedTuple):
    """Key of a compiled step.

    Attributes:
        batch: for every leaf its name, and its shape and dtype, or its value in words.
        modes: whether each module is in training mode.
        attributes: names and values of attributes that were changed.
        returns: what the step returns.
    """

    batch: tuple[Any, ...]
    modes: tuple[bool, ...] = ()
    attributes: tuple[tuple[str, Hashable], ...] = ()
    returns: str = "loss"


Step = TypeVar("Step")


class CompiledSteps(Generic[Step]):
    """Compiled steps, of which the least recently used are dropped. Ranks that run the same steps keep the same ones.

    Args:
        warn: called once, with a text, if many steps are compiled.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._steps: dict[StepKey, Step] = {}
        self._made: set[StepKey] = set()
        self._kinds: dict[tuple[Any, ...], None] | None = {}
        self.num_compiled = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps.values())

    def get(self, key: StepKey) -> Step | None:
        """The step for a key, which is then the most recently used one."""
        step = self._steps.pop(key, None)
        if step is not None:
            self._steps[key] = step
        return step

    def add(self, key: StepKey, step: Step, *, is_made: bool = False) -> None:
        """Keep a step for a key, which was compiled, or made of compiled ones in little time."""
        self._steps[key] = step
        if is_made:
            self._made.add(key)
            self._drop_one(self._made, KEPT_MADE)
            return
        self.num_compiled += 1
        self._drop_one(self._steps.keys() - self._made, KEPT)
        if self._kinds is not None:
            self._kinds[key.batch, key.attributes] = None
            if len(self._kinds) == MANY:
                self._warn(
                    f"{MANY} kinds of steps have been compiled, which takes much longer than running one; they differ "
                    f"in {_differences(self._kinds)}. Pad sequences to a few lengths; give a number that changes as a "
                    "tensor (as an argument), or write it into a buffer (as an attribute)"
                )
                self._kinds = None

    def keep(self, holds: Callable[[Step], bool]) -> None:
        """Drop those for which it does not hold."""
        self._steps = {key: step for key, step in self._steps.items() if holds(step)}
        self._made &= self._steps.keys()

    def _drop_one(self, among: Collection[StepKey], limit: int) -> None:
        if len(among) > limit:
            oldest = next(key for key in self._steps if key in among)
            del self._steps[oldest]
            self._made.discard(oldest)


def _differences(kinds: Iterable[tuple[Any, ...]]) -> str:
    """The differences among the batches and attributes of steps, in words."""
    batches = [{leaf[0]: leaf[1:] for leaf in batch} for batch, _ in kinds]
    changes = [dict(attributes) for _, attributes in kinds]
    found = []
    for name in dict.fromkeys(name for batch in batches for name in batch):
        values = list(dict.fromkeys(batch.get(name) for batch in batches))
        shapes = [value[0] for value in values if value is not None and len(value) == 2]
        if len(values) < 2:
            continue
        if len(shapes) < len(values) or len({len(shape) for shape in shapes}) > 1:
            found.append(f"{name} ({', '.join('not given' if v is None else str(v[0]) for v in values)})")
            continue
        for dim, sizes in enumerate(zip(*shapes, strict=True)):
            if len(set(sizes)) > 1:
                found.append(f"dim {dim} of {name} ({', '.join(str(size) for size in dict.fromkeys(sizes))})")
        if len({value[1] for value in values if value is not None}) > 1:
            found.append(f"the dtype of {name}")
    for name in dict.fromkeys(name for change in changes for name in change):
        if len({change.get(name) for change in changes}) > 1:
            found.append(f"the attribute {name}")
    return ", ".join(found)
