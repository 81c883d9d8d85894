"""Tensors that a forward makes in its first call and keeps for later ones, as masks and tables of positions.

``if self.mask is None: self.mask = torch.tril(torch.ones(n, n))`` leaves a tensor without data in a capture, and the
next call does not make it again. Where all that makes it reads numbers, and buffers that the forward does not write, it
is run once with data, and the model is captured as it is in later calls. Knows traced graphs; no models.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FunctionType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from whale.graph.tracer import current_tracer, node_in
from whale.ir.objects import held_under, parts_of, reached

__all__ = [
    "MADE_BUFFERS",
    "Attribute",
    "Carried",
    "Left",
    "Made",
    "buffers_made",
    "copied",
    "fakes_in",
    "left_by",
    "made_once",
    "mark_left",
    "set_made_buffers",
    "write_made",
]

_MARK = "whale_left"
"""Key of what a node's metadata keeps through torch's passes: the names of tensors that the forward has left."""

MADE_BUFFERS = "_whale_buffers"
"""Attribute of modules of copies: the buffers that a forward has made, by name."""

_MOST = 100_000
"""Objects that are looked at in an attribute."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, torch.device, torch.dtype, torch.Size)

_OF_PYTHON = 1 << 9
"""Flag of a class that Python's code has made (``Py_TPFLAGS_HEAPTYPE``)."""

_OF_SHAPES = {
    torch.ops.aten.ones_like: 0, torch.ops.aten.zeros_like: 0, torch.ops.aten.full_like: 0,
    torch.ops.aten.empty_like: 0, torch.ops.aten.new_ones: 0, torch.ops.aten.new_zeros: 0,
    torch.ops.aten.new_full: 0, torch.ops.aten.new_empty: 0, torch.ops.aten.type_as: 1, torch.ops.aten.expand_as: 1,
    torch.ops.aten.view_as: 1, torch.ops.aten.reshape_as: 1, torch.ops.aten.to: 1,
}  # fmt: skip
"""Operators that read no values of an argument, with its place."""


class Attribute(NamedTuple):
    """An attribute of the module at a path of a model, which the first forward changes.

    Attributes:
        path, name: of the module and its attribute.
        kind: whether it has another ``value`` then, or the ``object`` that it had, with other contents, or is a
            ``buffer`` that was none.
    """

    path: str
    name: str
    kind: Literal["value", "object", "buffer"] = "value"


@dataclass(frozen=True)
class _Unknown:
    """A value that a capture does not have: the number of what makes it."""

    number: int


class _Maker(NamedTuple):
    """An input, or an operator that makes a value which is not known, or that changes something."""

    token: Hashable
    sources: tuple[int, ...]
    changes: bool


class Made(NamedTuple):
    """The tensors that a traced forward has made and left.

    Attributes:
        attributes: with data in their tensors; empty if none was made.
        lost: other attributes that it has left, of which the capture does not know all values.
        computed: all else that it computes; equal for forwards that differ in nothing else than what they make.
    """

    attributes: dict[Attribute, Any]
    lost: frozenset[Attribute]
    computed: Hashable


def mark_left(attributes: Mapping[Attribute, Any]) -> None:
    """Note in a trace, at its end, which of its nodes have made the tensors that attributes reach."""
    tracer = current_tracer()
    if tracer is None:
        return
    for attribute, value in attributes.items():
        for place, x in enumerate(fakes_in(value)):
            node = node_in(tracer, x)
            if node is not None:
                custom = node.meta.get("custom") or {}
                node.meta["custom"] = {**custom, _MARK: (*custom.get(_MARK, ()), (*attribute, place))}


class Left(NamedTuple):
    """The attributes that a traced forward has left.

    Attributes:
        known: copies of those that have data alone, which a later trace does not change.
        lost: others, as those with modules.
    """

    known: dict[Attribute, Any]
    lost: frozenset[Attribute]


def left_by(attributes: Mapping[Attribute, Any]) -> Left:
    """The attributes, as a traced forward has left them."""
    data = {
        name: value
        for name, value in attributes.items()
        if not any(isinstance(x, torch.nn.Module) for x in _all_of(value))
    }
    known = copied(data)
    return Left(known, frozenset(attributes.keys() - known.keys()))


def made_once(
    program: torch.export.ExportedProgram,
    left: Left,
    values: Callable[[str], Tensor | None],
) -> Made:
    """Run what makes the tensors that a traced forward has left.

    Args:
        program: of the trace.
        left: attributes, as the trace has left them.
        values: gives a buffer by the name that it has in the program; None for one without data.
    """
    run = _Run()
    outputs = run.graph(program.graph_module, run.given(program, values))
    made: dict[int, Tensor] = {}
    known: dict[Attribute, Any] = {}
    for attribute, value in left.known.items():
        tensors = {id(x): run.made.get((*attribute, place)) for place, x in enumerate(fakes_in(value))}
        if all(x is not None and run.keeps(x) for x in tensors.values()):
            known[attribute] = value
            made |= {one: x for one, x in tensors.items() if x is not None}
    found = copied(known, made) if made else {}
    return Made(found, left.lost | (left.known.keys() - found.keys()), run.computed(outputs))


def copied(attributes: Mapping[Attribute, Any], made: Mapping[int, Tensor] | None = None) -> dict[Attribute, Any]:
    """Copies of attributes, which share what they share, with the same tensors, or those *made* by the identity of
    others; none where Python cannot copy them."""
    tensors = {id(x): x for value in attributes.values() for x in _all_of(value) if isinstance(x, Tensor)}
    try:
        return copy.deepcopy(dict(attributes), {**tensors, **(made or {})})
    except Exception:  # of any type, by what an attribute has
        return {}


def _all_of(x: Any) -> Iterator[Any]:
    """All that a value reaches, but not through modules."""

    def parts(one: Any) -> Iterable[Any]:
        return () if isinstance(one, (Tensor, torch.nn.Module)) else parts_of(one) or ()

    return islice(reached([x], parts), _MOST)


def fakes_in(x: Any) -> list[FakeTensor]:
    """The tensors without data that a value reaches."""
    return [one for one in _all_of(x) if isinstance(one, FakeTensor)]


class Carried(NamedTuple):
    """Attributes that a forward has left, with the modules and the tensors of the copy of a model that it ran."""

    attributes: Mapping[Attribute, Any]
    model: torch.nn.Module

    @classmethod
    def of(cls, attributes: Mapping[Attribute, Any], model: torch.nn.Module) -> Carried:
        """Copies of attributes, which a later forward does not change, of those without functions that have variables
        of the copy."""
        attributes = {name: x for name, x in attributes.items() if not any(map(_has_variables, _all_of(x)))}
        memo = {id(x): x for x in _parts_of(model).values()}
        found = copied(attributes, memo)
        for name, x in attributes.items() if not found else ():  # those that Python can copy
            found |= copied({name: x}, memo)
        return cls(found, model)

    def within(self, model: torch.nn.Module) -> dict[Attribute, Any]:
        """Copies of the attributes with the modules and the tensors of another copy of the model."""
        others = _parts_of(model)
        return copied(
            self.attributes, {id(x): others[path] for path, x in _parts_of(self.model).items() if path in others}
        )


def _has_variables(x: Any) -> bool:
    """Whether an object is a function whose variables a copy of a model has of its own."""
    of_copy = type(x).__module__.partition(".")[0] == "whale"  # which binds functions to copies
    return of_copy or (isinstance(x, FunctionType) and x.__closure__ is not None)


def _parts_of(model: torch.nn.Module) -> dict[str, Any]:
    named = model.named_modules, model.named_parameters, model.named_buffers
    return {f"{kind.__name__}.{path}": x for kind in named for path, x in kind(remove_duplicate=False)}


def write_made(model: torch.nn.Module, made: Mapping[Attribute, Any]) -> bool:
    """Give a model the attributes that a forward has made; whether one of them was another, which others have read."""
    changes = False
    for attribute, value in made.items():
        table = model.get_submodule(attribute.path).__dict__
        if attribute.kind == "buffer":
            table = table.setdefault(MADE_BUFFERS, {})
        before = table.get(attribute.name)
        changes |= not _extends(value, before)
        if attribute.kind != "object" or not _write_contents(before, value):
            table[attribute.name] = value
    return changes


def _write_contents(x: Any, like: Any) -> bool:
    """Give an object, which others may have too, the contents of another one; whether it can have them: of a class in C
    that is no dict or list they are not known, nor of a partial, and a method has the attributes of its function."""
    kinds = set(type(x).__mro__) - {object, dict, list, OrderedDict, defaultdict, SimpleNamespace}
    is_known = not isinstance(x, partial) and all(kind.__flags__ & _OF_PYTHON for kind in kinds)
    if type(x) is not type(like) or not is_known:
        return False
    if isinstance(x, dict):
        x.clear()
        x.update(like)
    elif isinstance(x, list):
        x[:] = like
    elif not isinstance(held_under(x, "__dict__"), dict):
        return False
    if isinstance(own := held_under(x, "__dict__"), dict):
        own.clear()
        own.update(vars(like))
    return True


def set_made_buffers(model: torch.nn.Module) -> None:
    """Let the modules of a copy have the buffers that a forward has made."""
    for module in model.modules():
        made = vars(module).get(MADE_BUFFERS, {})
        module._buffers.update(made)
        module._non_persistent_buffers_set |= made.keys()  # torch.export compares them with those of the state dict


def buffers_made(model: torch.nn.Module) -> dict[Attribute, Tensor]:
    """The buffers of a copy that a forward has made."""
    return {
        Attribute(path, name, "buffer"): x
        for path, module in model.named_modules()
        for name, x in vars(module).get(MADE_BUFFERS, {}).items()
    }


def _extends(x: Any, before: Any) -> bool:
    """Whether a value is in the place of none, or is the same dict with further entries."""
    if isinstance(x, dict) and isinstance(before, dict):
        return all(name in x and _is_same(x[name], one) for name, one in before.items())
    return before is None or _is_same(x, before)


def _is_same(x: Any, other: Any) -> bool:
    return list(map(_token, _all_of(x))) == list(map(_token, _all_of(other)))


def _token(x: Any) -> Any:
    return id(x) if isinstance(x, Tensor) else (type(x), x if isinstance(x, _PLAIN) else None)


class _Run:
    """Runs the operators of a graph that read no unknown value, and leaves buffers as they are.

    Attributes:
        made: the tensors of marked nodes.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Tensor] = {}
        self._makers: list[_Maker] = []
        self._of_buffers: set[int] = set()
        self._own: set[int] = set()
        self._written: set[int] = set()
        self._alive: list[Tensor] = []

    def given(self, program: torch.export.ExportedProgram, values: Callable[[str], Tensor | None]) -> list[Any]:
        """The values of a program's placeholders."""
        found: list[Any] = []
        for spec in program.graph_signature.input_specs:
            x: Any = None
            if spec.kind is InputKind.BUFFER:
                x = values(spec.target or "")
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                x = program.constants[spec.target]
            is_data = (
                isinstance(x, Tensor) and x.layout is torch.strided and not (x.is_meta or isinstance(x, FakeTensor))
            )
            if is_data:
                found.append(x)
                self._alive.append(x)
                if spec.kind is InputKind.BUFFER:
                    self._of_buffers.add(_memory(x))
            else:
                found.append(self._unknown((str(spec.kind), spec.target or spec.arg.name), ()))
        return found

    def keeps(self, x: Tensor) -> bool:
        """Whether no later step changes a tensor: it is no view of a buffer, and what wrote to it is known."""
        return not {_memory(x)} & (self._written | self._of_buffers)

    def computed(self, outputs: Any) -> Hashable:
        """A key of what a graph returns and changes, whatever computes that of known values."""
        leaves = pytree.tree_leaves(outputs)
        live = {number for number, maker in enumerate(self._makers) if maker.changes}
        live |= {x.number for x in leaves if isinstance(x, _Unknown)}
        for number in range(len(self._makers) - 1, -1, -1):  # what makes a value comes before what reads it
            if number in live:
                live.update(self._makers[number].sources)
        place = {number: index for index, number in enumerate(sorted(live))}
        makers = [
            (maker.token, tuple(place[source] for source in maker.sources))
            for number, maker in enumerate(self._makers)
            if number in live
        ]
        return tuple(makers), tuple(place[x.number] if isinstance(x, _Unknown) else self._token(x) for x in leaves)

    def graph(self, module: Any, given: Sequence[Any]) -> Any:
        """The values that a graph returns."""
        env: dict[fx.Node, Any] = {}
        holes = iter(given)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(holes)
            elif node.op == "get_attr":
                env[node] = getattr(module, str(node.target), None)
            elif node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)
            else:
                env[node] = self._call(node, env)
            if isinstance(env[node], Tensor):
                self._alive.append(env[node])
                for mark in (node.meta.get("custom") or {}).get(_MARK, ()):
                    self.made[tuple(mark)] = env[node]
        return None

    def _call(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        context = _context_of(node, args)
        if context is not None:
            place = next(i for i, x in enumerate(args) if isinstance(x, torch.nn.Module))
            with context:
                return self.graph(args[place], args[place + 1 :])
        values = _without_values(node, args)
        leaves = pytree.tree_leaves((values, kwargs))
        unknown = any(isinstance(x, _Unknown) or self._is_written(x) for x in leaves)
        changes = False
        if isinstance(node.target, torch._ops.OpOverload):
            written = [values[i] if i < len(values) else kwargs.get(a.name) for i, a in _written_arguments(node.target)]
            tensors = [x for x in pytree.tree_leaves(written) if isinstance(x, Tensor)]
            draws = torch.Tag.nondeterministic_seeded in node.target.tags
            unknown |= draws or any(_memory(x) not in self._own for x in tensors)
            changes = draws or (unknown and bool(written))
            if unknown:
                self._written |= {_memory(x) for x in tensors}
        elif getattr(node.target, "__module__", None) not in ("_operator", "math"):
            unknown = changes = True
        if not unknown:
            try:
                with torch.no_grad():
                    return self._noted(leaves, node.target(*values, **kwargs))  # type: ignore[operator]
            except Exception:  # of any type: it cannot run here, as for a device that this machine has not
                pass
        known, spec = pytree.tree_flatten((values, kwargs))
        token = str(node.target), str(spec), tuple(map(self._token, known)), _modes()
        return self._unknown(token, tuple(x.number for x in known if isinstance(x, _Unknown)), changes=changes)

    def _unknown(self, token: Hashable, sources: tuple[int, ...], *, changes: bool = False) -> _Unknown:
        self._makers.append(_Maker(token, sources, changes))
        return _Unknown(len(self._makers) - 1)

    def _noted(self, leaves: Sequence[Any], result: Any) -> Any:
        """A result of an operator with these arguments, whose memory is its own if none of them has it."""
        given = {_memory(x) for x in leaves if isinstance(x, Tensor)}
        self._own |= {_memory(x) for x in pytree.tree_leaves(result) if isinstance(x, Tensor)} - given
        return result

    def _is_written(self, x: Any) -> bool:
        return isinstance(x, Tensor) and _memory(x) in self._written

    def _token(self, x: Any) -> Hashable:
        """A key of an argument; what makes an unknown one is among the sources of the operator."""
        if isinstance(x, _Unknown) or self._is_written(x):
            return "unknown"
        if isinstance(x, torch.nn.Module):
            return str(getattr(x, "graph", ""))
        if not isinstance(x, Tensor):
            return repr(x)
        data = x.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
        return str(x.dtype), tuple(x.shape), hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()


def _modes() -> Hashable:
    """The modes of regions in which operators run, that their arguments do not say."""
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _written_arguments(target: torch._ops.OpOverload) -> Iterable[tuple[int, Any]]:
    arguments = enumerate(target._schema.arguments)
    return [(i, argument) for i, argument in arguments if argument.alias_info and argument.alias_info.is_write]


def _without_values(node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of an operator; in the place of an unknown tensor whose shape alone it reads, another one."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    place = _OF_SHAPES.get(packet)
    if place is None or place >= len(args) or not isinstance(args[place], _Unknown):
        return args
    source = node.args[place]
    fake = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(fake, Tensor):
        return args
    blank = torch.empty((), dtype=fake.dtype, device=fake.device).expand(fake.shape)
    return [*args[:place], blank, *args[place + 1 :]]


def _context_of(node: fx.Node, args: Sequence[Any]) -> contextlib.AbstractContextManager[Any] | None:
    """The context of a region; None for what is no region."""
    name = getattr(node.target, "__name__", "")
    if name == "wrap_with_set_grad_enabled":
        return contextlib.nullcontext()
    if name == "wrap_with_autocast":
        device, dtype, enabled, cache, *_ = args
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
    return None
