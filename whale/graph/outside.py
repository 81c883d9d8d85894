"""Undoing of what a traced forward leaves outside of the model's copy, in globals, classes and containers: tensors
without data, which are taken out again where the model is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType
from typing import Any, NamedTuple

from whale.graph.bytecode import names_of
from whale.graph.made_once import fakes_in

__all__ = ["Outside"]

_NOTHING: Any = object()


class _Table(NamedTuple):
    """Values by name, such as the globals that a function reads, as they were.

    Attributes:
        read: returns them as they are now.
        write: sets one.
        delete: takes one out.
        before: as they were.
    """

    read: Callable[[], Mapping[Any, Any]]
    write: Callable[[Any, Any], None]
    delete: Callable[[Any], None]
    before: Mapping[Any, Any]

    def restore(self) -> None:
        for name, x in list(self.read().items()):
            had = self.before.get(name, _NOTHING)
            if x is not had and fakes_in(x):
                with suppress(TypeError, AttributeError):  # a class that cannot be changed
                    self.delete(name) if had is _NOTHING else self.write(name, had)


class Outside:
    """Objects as they were before a trace.

    Args:
        objects: all that the code of a model reaches.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._tables: list[_Table] = []
        self._items: list[tuple[Any, list[Any]]] = []
        for x in objects:
            if isinstance(x, list | deque | set):
                self._items.append((x, list(x)))
            else:
                self._tables += _tables_of(x)

    def restore(self) -> None:
        """Take out the tensors that a trace has left, and put back what was there."""
        for table in self._tables:
            table.restore()
        for x, before in self._items:
            had = {id(item) for item in before}
            if any(id(item) not in had and fakes_in(item) for item in x):
                x.clear()
                (x.update if isinstance(x, set) else x.extend)(before)


def _tables_of(x: Any) -> Iterator[_Table]:
    if isinstance(x, dict):
        yield _Table(lambda: x, x.__setitem__, x.__delitem__, dict(x))
    elif isinstance(x, type):
        yield _Table(lambda: vars(x), partial(setattr, x), partial(delattr, x), dict(vars(x)))
    elif isinstance(x, FunctionType):
        table, names = x.__globals__, names_of(x.__code__)

        def named() -> dict[str, Any]:
            return {name: table[name] for name in names if name in table}

        yield _Table(named, table.__setitem__, table.__delitem__, named())
        for cell in x.__closure__ or ():
            yield _table_of_cell(cell)


def _table_of_cell(cell: CellType) -> _Table:
    def read() -> dict[str, Any]:
        try:
            return {"": cell.cell_contents}
        except ValueError:  # it is empty
            return {}

    def write(_: str, x: Any) -> None:
        cell.cell_contents = x

    def delete(_: str) -> None:
        del cell.cell_contents

    return _Table(read, write, delete, read())
