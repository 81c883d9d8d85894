"""State that a forward keeps in Python: a captured graph has what it was in the capture, for all steps.

Python's and numpy's random generators, clocks, counters and other attributes that a forward changes leave no operators
in a graph. A capture compares them before and after the model is traced; where one changed, the model is traced once
more from there, and both graphs must be equal. This module knows Python's objects and source lines, not how a model is
captured.
"""

from __future__ import annotations

import datetime
import functools
import random
import sys
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import length_hint
from types import FrameType, GeneratorType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from whale.errors import UsageError
from whale.graph.code_names import Named, hooks_of, names_in_code
from whale.graph.loss_copies import READ_BY_LOSS
from whale.graph.made_once import (
    MADE_BUFFERS,
    Attribute,
    Carried,
    buffers_made,
    mark_left,
    set_made_buffers,
    write_made,
)
from whale.graph.nodes import inner_modules
from whale.graph.origins import SourceLine, is_model, located, place_of_forward, place_of_frame, place_of_node
from whale.graph.outside import Outside
from whale.graph.reach import REACHED, WATCHES, Reach, Same, untraced
from whale.ir.objects import FORWARD_HOOKS

__all__ = ["Listing", "Steadiness", "first_difference", "graph_listing"]


class Kept(NamedTuple):
    """A keeper of state: an attribute of the module at a path, or, without a path, a name in words."""

    path: str | None
    name: str

    def __str__(self) -> str:
        return self.name if self.path is None else f"{self.path}.{self.name}".removeprefix(".")


class _Generator(NamedTuple):
    """A global random generator: reads its state, sets it, and draws a number."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    draw: Callable[[], Any]

    def now(self) -> Hashable:
        state = self.read()
        return state.numpy().tobytes() if isinstance(state, Tensor) else repr(state)


_GENERATORS = {
    Kept(None, "Python's random generator"): _Generator(random.getstate, random.setstate, random.random),
    Kept(None, "numpy's random generator"): _Generator(np.random.get_state, np.random.set_state, np.random.random),
    Kept(None, "torch's random generator"): _Generator(
        torch.random.get_rng_state, torch.random.set_rng_state, lambda: torch.rand(1, device="cpu")
    ),
}


@contextmanager
def _noting_draws() -> Iterator[list[Kept]]:
    """Context that finds out which random generators are used or seeded, and leaves them as they were."""
    used: list[Kept] = []
    states = {generator: generator.read() for generator in _GENERATORS.values()}
    for generator in states:
        generator.draw()  # a seed that the script has set before is set again
    before = {kept: generator.now() for kept, generator in _GENERATORS.items()}
    try:
        yield used
        used.extend(kept for kept, generator in _GENERATORS.items() if generator.now() != before[kept])
    finally:
        for generator, state in states.items():
            generator.write(state)


class State:
    """The state that a model's code reaches: its modules' attributes, and what its functions name."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.caches: list[Any] = []
        self.fakes: list[Tensor] = []
        self.objects: list[Any] = []

    def may_read(self, name: str) -> bool:
        """Whether the forward may read an attribute of this name."""
        named = self._named
        return name in named.names or any(piece in name for piece in named.pieces)

    def is_read_by_loss(self, kept: Kept) -> bool:
        """Whether the loss has, by itself, an object that an attribute, or a hook, of the script's model has."""
        for path, module in self.model.named_modules():
            names = vars(module).get(READ_BY_LOSS, frozenset())
            of_hook = kept.name == _of_hook(path) and not names.isdisjoint(FORWARD_HOOKS)
            if of_hook or (path == kept.path and kept.name in names):
                return True
        return False

    @functools.cached_property
    def _named(self) -> Named:
        return names_in_code(self.model, self.loss_fn)

    @untraced
    def now(self, *, only: Collection[Kept] | None = None, by_shape: bool = False) -> dict[Kept, Hashable]:
        """Tokens of the state, equal if it is; of *only* some, if given. *by_shape*: tensors are equal if their shapes
        are."""
        reach = _All(self, by_shape)
        found: dict[Kept, Hashable] = {}
        classes: dict[type, None] = {}
        hooks: dict[Any, str] = {}
        for path, module in self.model.named_modules():
            classes[type(module)] = None
            hooks |= dict.fromkeys(hooks_of(module), _of_hook(path))
            for name, x in module.__dict__.items():
                kept = Kept(path, name)
                if name not in _TABLES and (only is None or kept in only):
                    found[kept] = reach.token(x)
        functions: dict[Any, str] = {kind: f"what the class {kind.__name__} and its methods reach" for kind in classes}
        functions |= hooks
        if self.loss_fn is not None:
            functions[self.loss_fn] = _OF_LOSS
        for function, words in functions.items():
            kept = Kept(None, words)
            if only is None or kept in only:
                found[kept] = reach.token(function)
        self.caches, self.fakes, self.objects = reach.caches, reach.fakes, reach.objects
        return found

    def attributes(self) -> dict[str, dict[str, Any]]:
        """The attributes of modules, by path."""
        return {
            path: {name: x for name, x in module.__dict__.items() if name not in _TABLES}
            for path, module in self.model.named_modules()
        }

    def restore(self, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the attributes of modules: torch.export takes back what a forward did to them."""
        for path, module in self.model.named_modules():
            module.__dict__.update(attributes.get(path, {}))


_TABLES = (frozenset(nn.Module().__dict__) | {MADE_BUFFERS}) - {"training"}
_OF_LOSS = "what loss_fn reaches"
_OF_TORCH = "_flat_weight"
"""Lists of a recurrent layer's parameters, which torch makes anew."""


def _of_hook(path: str) -> str:
    return f"what a hook of {path or 'the model'} reaches"


_BEFORE_A_FORWARD = ("__init__", "__new__", "__init_subclass__", "__setstate__", "__deepcopy__")
"""Methods of modules that make them."""


class _All(Reach):
    """Tokens of everything reached, as far as it can be determined; an object that is reached again has none.

    Attributes of classes are those that the forward may read by name, or Python by itself: methods that load and
    publish models reach libraries full of counters and caches.
    """

    def __init__(self, state: State, by_shape: bool) -> None:
        super().__init__(state.model)
        self._state, self._by_shape = state, by_shape
        self.caches: list[Any] = []
        self.fakes: list[Tensor] = []

    @property
    def objects(self) -> list[Any]:
        """All that was reached."""
        return [x for _, x in self._seen.values()]

    def token(self, x: Any) -> Hashable:
        """The token of an object."""
        if isinstance(x, functools._lru_cache_wrapper):
            self.caches.append(x)
        if isinstance(x, FakeTensor):
            self.fakes.append(x)
        if self._by_shape and isinstance(x, Tensor):
            return Tensor, x.dtype, x.device, tuple(x.shape)
        found = super().token(x)
        if self._by_shape and isinstance(found, tuple) and found and isinstance(found[0], Same):
            return type(x), *found[1:]
        return found

    def _may_read(self, kind: type, name: str) -> bool:
        if issubclass(kind, nn.Module) and name in _BEFORE_A_FORWARD:
            return False
        return (name.startswith("__") and name.endswith("__")) or self._state.may_read(name)

    def _again(self, x: Any) -> Hashable:
        return ()

    def _hidden(self, x: Any) -> Hashable:
        if len(self._seen) > REACHED or not isinstance(x, Iterator):
            return Same(x), None
        self._seen[id(x)] = len(self._seen), x
        if isinstance(x, GeneratorType):
            frame = x.gi_frame  # None once it has ended
            return Same(x), frame and (frame.f_lasti, tuple(map(self.token, frame.f_locals.values())))
        if type(x).__module__ not in ("builtins", "itertools"):
            return Same(x), tuple(map(self.token, self._parts(x)))
        with suppress(TypeError, AttributeError), warnings.catch_warnings():  # later versions of Python do not say
            warnings.simplefilter("ignore", DeprecationWarning)
            return Same(x), self.token(x.__reduce__()[1:])
        return Same(x), length_hint(x, -1)


class Left(Tensor):
    """A tensor that a forward has left in Python, as a hook does that collects activations, when it was captured. It
    has no data, and no step writes it: what uses it is refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # its shape, its dtype
            return super().__torch_function__(func, types, args, kwargs or {})
        raise UsageError(
            "the forward left this tensor in Python when it was captured, for the script, but steps do not write it: "
            "return it from forward, and take it with train_step(**batch, outputs=True) or predict_step(**batch)"
        )


class Steadiness:
    """A check that a forward does the same in every step: what it keeps in Python decides nothing that it computes.

    Args:
        model: what is traced.
        loss_fn: what computes its loss, if it does not.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._state = State(model, loss_fn)
        self._before = self._state.now()
        self._outside = Outside(self._state.objects)
        self._first = self._state.attributes()
        self._kept: list[Kept] = []
        self._drawn: list[Kept] = []
        self._clocks: list[SourceLine] = []
        self._left: dict[Kept, Hashable] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        self._changed: dict[Attribute, Any] = {}

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Context for the trace."""
        try:
            with _noting_clocks(self._state) as self._clocks, _noting_draws() as self._drawn:
                yield
        finally:
            for cache in self._state.caches:
                cache.cache_clear()  # tensors of the trace have no data

    def end(self, buffers: Mapping[Attribute, Tensor]) -> None:
        """Look at the state; to be called at the end of every forward that is traced, with the *buffers* that it has
        made.

        Raises:
            CaptureError: it has made a module.
        """
        for path, module in self._state.model.named_modules():
            if path not in self._first:
                outer = self._state.model.get_submodule(path.rpartition(".")[0])
                raise located(
                    f"the forward makes the module {path}, a {type(module).__name__}: make it in __init__, or call the "
                    "model once before parallelize, which makes it",
                    place_of_forward(outer),
                )
        changed = _changed(self._before, self._state.now())
        self._kept = changed + [Kept(path, name) for path, name, _ in buffers]
        if self._kept:
            self._left = self._state.now(by_shape=True)
            for (path, name, _), x in {**buffers_made(self._state.model), **buffers}.items():
                self._left[Kept(path, name)] = Tensor, x.dtype, x.device, tuple(x.shape)
            self._attributes = self._state.attributes()
            self._changed = {
                Attribute(path, name, self._kind(path, name)): self._attributes[path][name]
                for path, name in [*changed, *self._replaced()]
                if path is not None and name in self._attributes[path]
            }
            self._changed |= buffers
            mark_left(self._changed)

    def _replaced(self) -> list[tuple[str, str]]:
        """Attributes that have another object: of one that several have, only the first is seen to be another."""
        return [
            (path, name)
            for path, attributes in self._attributes.items()
            for name, x in attributes.items()
            if self._first[path].get(name) is not x
        ]

    def _kind(self, path: str, name: str) -> Literal["value", "object"]:
        now = self._attributes[path][name]
        return "object" if self._first[path].get(name) is now and not isinstance(now, Tensor) else "value"

    @property
    def left(self) -> dict[Attribute, Any]:
        """The attributes that the last trace has left as others than they were."""
        return self._changed

    @property
    def carried(self) -> Carried | None:
        """Copies of these for a later forward; None without any."""
        own = {
            one: x
            for one, x in self._changed.items()
            if not (one.name.startswith(_OF_TORCH) or one.kind == "buffer")  # which has no data in a later trace
        }
        found = Carried.of(own, self._state.model)
        return found if found.attributes else None

    @property
    def is_kept_alone(self) -> bool:
        """Whether the trace did nothing that a capture does not know besides what it left: it drew no numbers of
        Python, read no clock, and changed nothing that the loss has by itself."""
        return not (self._drawn or self._clocks or any(map(self._state.is_read_by_loss, self._kept)))

    @property
    def keeps_outside(self) -> bool:
        """Whether the last trace changed what modules do not have."""
        return any(kept.path is None for kept in self._kept)

    @property
    def kept_something(self) -> bool:
        """Whether the trace changed a state, or read a clock."""
        return bool(self._kept or self._drawn or self._clocks)

    def check(
        self, graph: fx.Graph, again: Callable[[], fx.Graph], run: Callable[[Callable[[nn.Module], None]], Any]
    ) -> None:
        """Compare with the next step.

        Args:
            graph: the one traced.
            again: traces the model once more, from where the first trace left it.
            run: calls a function with a copy of the model as it was before, and then runs the copy's forward.

        Raises:
            CaptureError: random numbers of Python are drawn, or the next step computes something else.
        """

        def place(kept: Collection[Kept]) -> SourceLine | None:
            return _place_of_change(run, kept, self._state.loss_fn)

        for generator in self._drawn:
            if drawn := place([generator]):
                raise located(
                    f"the forward changes {generator}: a captured graph has what was drawn once, for all steps; draw "
                    "with torch's operators (torch.where(torch.rand(...) < p, ...)), or draw outside and give the "
                    "step a tensor",
                    drawn,
                )
        own, left = self._kept, self._left
        if not own and not self._clocks:
            return
        if read := [kept for kept in own if self._state.is_read_by_loss(kept)]:
            raise located(
                f"the forward changes {read[0]}, and loss_fn has an object of it by itself, not through the model, of "
                "which a captured forward has its own: make it an attribute of the model, and read it as that in "
                "loss_fn (lambda output, batch: ... model.features), or return from forward what the loss needs",
                place(read),
            )
        first = graph_listing(graph)
        self._state.restore(self._attributes)
        write_made(self._state.model, {name: x for name, x in self._changed.items() if name.kind == "buffer"})
        set_made_buffers(self._state.model)
        try:
            with _noting_clocks(self._state, later=True), _noting_draws():
                second, error = graph_listing(again()), None
        except Exception as problem:
            second, error = first, problem
        changing = _changed(left, self._left) if own else []
        differs, line = first_difference(first, second)
        if not changing and not differs and error is None:
            return
        if not own:
            raise located(
                "the forward computes with the time, and a captured graph has that of the capture; give the step a "
                "tensor instead",
                self._clocks[0],
            )
        found = [kept for kept in changing or own if not kept.name.startswith(_OF_TORCH)] or own
        computed = f", and computes something else then{f' (at {line.file}:{line.line})' if line else ''}"
        of_loss = all(kept.name == _OF_LOSS for kept in found)
        shown = (
            "loss_fn changes what it reaches" if of_loss else f"the forward changes {', '.join(map(str, found[:3]))}"
        )
        raise located(
            f"{shown} from step to step{computed if differs or error else ''}, but a captured graph has the first step "
            f"for all: keep what changes in a buffer {'of a loss inside the model ' if of_loss else ''}"
            "(register_buffer) and compute with it by torch's operators, change it in the training loop, or, if it is "
            "made once, call the model once before parallelize",
            place(found),
        )

    def restore_outside(self) -> None:
        """Take out of globals, classes and what they reach the tensors that the trace has left there: they have no
        data, and the script's own model would compute with them."""
        self._outside.restore()

    def leave(self, model: nn.Module) -> None:
        """Let the tensors that the forward of this model has left outside of its copy say what they are."""
        if self.keeps_outside:
            state = State(model, self._state.loss_fn)
            state.now()
            for tensor in state.fakes:
                tensor.__class__ = Left

    def check_second(self, first: Listing, second: Listing) -> None:
        """Compare this trace with one of another copy of the model after it, for what is not of the copy, such as a
        flag of a function, that the first call alone changes.

        Raises:
            CaptureError: the second computes something else.
        """
        outside = [kept for kept in self._kept if kept.path is None]
        if not outside:
            return
        differs, line = first_difference(first, second)
        if differs:
            shown = ", ".join(map(str, outside[:3]))
            raise located(
                f"the forward changes {shown} in its first call, and computes something else then, but a captured "
                "graph has one step for all: do what is done once before parallelize",
                line,
            )


def _changed(before: Mapping[Kept, Hashable], after: Mapping[Kept, Hashable]) -> list[Kept]:
    """The differences of two states."""
    return [kept for kept in {**before, **after} if before.get(kept) != after.get(kept)]


# --- clocks -----------------------------------------------------------------------------------------------------------

_CLOCKS = [
    f"{name}{suffix}" for name in ("time", "monotonic", "perf_counter", "process_time") for suffix in ("", "_ns")
]
_LATER = 10**10
"""Seconds by which the time of a next step is ahead."""


@contextmanager
def _noting_clocks(state: State, *, later: bool = False) -> Iterator[list[SourceLine]]:
    """Context that notes where the model reads a clock of ``time`` or ``datetime``, by whatever name its files have it.

    *later* tells the model another time, years on.
    """
    places: list[SourceLine] = []

    def is_read() -> bool:
        """Whether the model has called what calls this."""
        frame = sys._getframe(2)
        if is_model(frame.f_code.co_filename):
            places.append(SourceLine(frame.f_code.co_filename, frame.f_lineno))
        return is_model(frame.f_code.co_filename)

    def noting(clock: Callable[[], Any], ahead: Any) -> Callable[[], Any]:
        return lambda: clock() + ahead * (is_read() and later)

    days = datetime.timedelta(seconds=_LATER)

    class Datetime(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + days * (is_read() and later)

        @classmethod
        def utcnow(cls) -> Any:
            return super().now(datetime.UTC).replace(tzinfo=None) + days * (is_read() and later)

        @classmethod
        def today(cls) -> Any:
            return super().now() + days * (is_read() and later)

    class Date(datetime.date):
        @classmethod
        def today(cls) -> Any:
            return super().today() + days * (is_read() and later)

    noted: dict[Any, Any] = {datetime.datetime: Datetime, datetime.date: Date}
    for name in _CLOCKS:
        noted[getattr(time, name)] = noting(getattr(time, name), _LATER * (10**9 if name.endswith("_ns") else 1))
    for clock, stand_in in noted.items():
        stand_in.__wrapped__ = clock
        setattr(stand_in, WATCHES, True)
    files = {base.__module__ for module in state.model.modules() for base in type(module).__mro__}
    files.add(getattr(state.loss_fn, "__module__", "") or "")
    tables = [vars(sys.modules[file]) for file in files if file in sys.modules and not file.startswith("torch.")]
    stand_ins = {id(clock): stand_in for clock, stand_in in noted.items()}
    found = [
        (table, name, x)
        for table in (vars(time), vars(datetime), *tables)
        for name, x in table.items()
        if id(x) in stand_ins
    ]
    for table, name, x in found:
        table[name] = stand_ins[id(x)]
    try:
        yield places
    finally:
        for table, name, x in found:
            table[name] = x


# --- places and differences -------------------------------------------------------------------------------------------


def _place_of_change(
    run: Callable[[Callable[[nn.Module], None]], Any], kept: Collection[Kept], loss_fn: Callable[..., Any] | None
) -> SourceLine | None:
    """The model's line at which some of its state changes while *run* runs it; None if it does not, or elsewhere."""
    found: list[SourceLine] = []
    last: list[SourceLine | None] = [None]
    states: list[tuple[State, Mapping[Kept, Hashable]]] = []

    def read(state: State) -> dict[Kept, Hashable]:
        own = [one for one in kept if one not in _GENERATORS]
        found = {one: _GENERATORS[one].now() for one in kept if one in _GENERATORS}
        return {**found, **state.now(only=own)} if own else found

    def start(model: nn.Module) -> None:
        state = State(model, loss_fn)
        states.append((state, read(state)))
        sys.settrace(enter)

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return step if is_model(frame.f_code.co_filename) else None

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        state, before = states[0]
        if not found:
            if read(state) != before:
                place = last[0] or place_of_frame(frame)
                found.extend([place] if place else [])
            last[0] = SourceLine(frame.f_code.co_filename, frame.f_lineno)
        return step

    own = sys.gettrace()
    try:
        with _noting_draws():
            run(start)
    except Exception:  # what it raises is reported by the capture
        pass
    finally:
        sys.settrace(own)
    return found[0] if found else None


Listing = Sequence[tuple[fx.Node, Hashable]]
"""Nodes, each with a text that is equal for equal operators."""


def graph_listing(graph: fx.Graph) -> Listing:
    """The nodes of a graph and of the graphs inside of it, each with a text that is equal for equal operators."""
    found: list[tuple[fx.Node, Hashable]] = []
    for one in (graph, *(m.graph for m in inner_modules(graph))):
        nodes = [node for node in one.nodes if node.op != "placeholder" or node.users]
        number = {node: i for i, node in enumerate(nodes)}
        for node in nodes:
            args = fx.map_arg((node.args, node.kwargs), functools.partial(_numbered, number))
            shapes = [
                (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else repr(x)
                for x in pytree.tree_leaves(node.meta.get("val"))
            ]
            found.append((node, (node.op, str(node.target), repr(args), tuple(shapes))))
    return found


def _numbered(number: Mapping[fx.Node, int], node: fx.Node) -> Any:
    return f"%{number[node]}"


def first_difference(first: Listing, second: Listing) -> tuple[bool, SourceLine | None]:
    """Whether two graphs differ, and the model's line of the first operator that does."""
    for (node, text), (_, other) in zip(first, second, strict=False):
        if text != other:
            return True, place_of_node(node)
    return len(first) != len(second), None
