"""A rank's part of a training run's state: its parts of the model's tensors and of the optimizers' states, copied if
training goes on meanwhile, and what is not a tensor. It knows models and optimizers; no files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from whale.checkpoint.format import Group, Intervals, Key, form_of_empty, whole
from whale.checkpoint.generators import of_process, state_of_generator
from whale.checkpoint.owners import TILE, Held, tiles, written_by, written_parts
from whale.checkpoint.reader import Array
from whale.checkpoint.staging import Staging
from whale.checkpoint.tensors import dtype_name, dtype_of, elements, taken
from whale.checkpoint.values import encoded
from whale.checkpoint.writer import Piece
from whale.errors import UsageError
from whale.runtime.engine import Engine
from whale.runtime.module import ParallelModule
from whale.runtime.shard_tensor import ShardTensor

__all__ = [
    "MODEL",
    "OF_PROCESS",
    "RANDOM",
    "Collected",
    "Kinds",
    "ObjectState",
    "class_of_states",
    "collect",
    "engine_of",
    "names_of",
    "of_rank_key",
    "options_key",
    "sorted_out",
    "state_tensor_key",
]

MODEL, RANDOM = "model", "random"
"""Names that a script's objects cannot have."""

OF_PROCESS = f"{RANDOM}."
"""The names of the generators of a process begin so."""

_NOT_OPTIONS = ("params", "param_names")


def engine_of(model: ParallelModule) -> Engine:
    """The engine of a parallel model."""
    return model._whale.engine


def names_of(engine: Engine) -> dict[int, str]:
    """The first name of each of this rank's tensors, by identity."""
    return {id(tensor): name for name, tensor in engine.tensors.items()}


@dataclass(frozen=True)
class Kinds:
    """The objects of a script by how their states are saved: models and optimizers in parts, all others whole, with the
    generators of the process among them."""

    models: Mapping[str, ParallelModule]
    optimizers: Mapping[str, Optimizer]
    objects: Mapping[str, Any]


def sorted_out(model: ParallelModule, state: Mapping[str, Any]) -> Kinds:
    """The objects of a script by kind.

    Raises:
        UsageError: one has no state, or a name that is taken.
    """
    given = {name: state_of_generator(value) or value for name, value in state.items()}
    for name, value in given.items():
        if name in (MODEL, RANDOM):
            raise UsageError(f"{name}= is a name of the checkpoint's own; give the object another one")
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"{name} is of type {type(value).__name__}; give objects with state_dict and load_state_dict, such as "
                "optimizers, schedulers, loaders and generators of random numbers"
            )
    models = {name: value for name, value in given.items() if isinstance(value, ParallelModule)}
    optimizers = {name: value for name, value in given.items() if isinstance(value, Optimizer)}
    objects = {name: value for name, value in given.items() if name not in models and name not in optimizers}
    generators = of_process(engine_of(model).world.device)
    objects |= {f"{OF_PROCESS}{name}": generator for name, generator in generators.items()}
    return Kinds({MODEL: model, **models}, optimizers, objects)


@dataclass(frozen=True)
class ObjectState:
    """The state of an object on a rank: JSON, and the tensors that are numbered in it."""

    encoded: Any
    pieces: list[Piece]

    def digest(self) -> str:
        """The SHA-256 of all of it."""
        found = hashlib.sha256(json.dumps(self.encoded).encode())  # ranks keep their own orders of keys
        for piece in self.pieces:
            found.update(f"{piece.dtype} {piece.shape}".encode())
            found.update(memoryview(np.ascontiguousarray(piece.elements).reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
        return found.hexdigest()


@dataclass
class Collected:
    """The data that a rank writes; ``names``, ``classes`` and the first rank's ``objects`` are for the manifest, which
    it writes."""

    pieces: list[Piece] = field(default_factory=list)
    groups: dict[str, tuple[Group, ...]] = field(default_factory=dict)
    values: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    objects: dict[str, ObjectState] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """The digests of the objects' states."""
        return {of: state.digest() for of, state in self.objects.items()}

    def tiles(self) -> list[Piece]:
        """The pieces as they are written."""
        found = []
        for piece in self.pieces:
            cut = tiles(piece.at)
            for number, at in enumerate(cut):
                columns = piece.elements[:, number * TILE : (number + 1) * TILE] if len(cut) > 1 else piece.elements
                found.append(replace(piece, at=at, elements=columns))
        return found

    def add_objects(self, rank: int, first: Mapping[str, str]) -> None:
        """Add the states of objects to what a rank writes, if they are not those of rank 0, whose digests are *first*.

        Those of rank 0 are in the manifest, except the generators of its process, which are in its index.
        """
        for of, state in self.objects.items():
            if rank == 0 and not of.startswith(OF_PROCESS):
                self.pieces += state.pieces
            elif rank == 0 or first.get(of) != state.digest():
                self.values[of] = {"": {"": state.encoded}}
                self.pieces += [replace(one, key=of_rank_key(of, rank, int(one.key.name))) for one in state.pieces]


def collect(kinds: Kinds, staging: Staging | None) -> Collected:
    """Collect what this rank writes of these objects; no collective runs.

    Args:
        kinds: the objects, with the model.
        staging: where tensors are copied to; None: they have the memory of the training.

    Raises:
        UsageError: something cannot be saved.
    """
    return _Collector(staging).run(kinds)


@dataclass(frozen=True)
class _Layout:
    """The layout of a model's tensors: the parts of each that this rank writes, and the tensors of which it writes what
    is not divided."""

    engine: Engine
    written: Mapping[str, list[Intervals]]
    first: frozenset[str]

    @classmethod
    def of(cls, engine: Engine) -> _Layout:
        saved = dict.fromkeys(engine.aliases.values())
        held = {
            name: Held(shard.shape, shard.dtype.itemsize, shard.parts)
            for name, shard in {**engine.shards, **engine.buffers}.items()
            if name in saved
        }
        written, first = written_by(engine.world.rank, written_parts(held))
        return cls(engine, written, frozenset(first))


class _Collector:
    def __init__(self, staging: Staging | None) -> None:
        self.staging = staging
        self.found = Collected()

    def run(self, kinds: Kinds) -> Collected:
        layouts = {of: _Layout.of(engine_of(model)) for of, model in kinds.models.items()}
        for of, layout in layouts.items():
            self._add_model(of, layout)
        for of, optimizer in kinds.optimizers.items():
            self._add_optimizer(of, optimizer, layouts)
        model = kinds.models[MODEL]
        for of, value in kinds.objects.items():
            state = value.state_dict()
            pieces: list[Piece] = []
            encoded_state = encoded(state, of, self._putting(pieces, partial(_numbered, of)))
            self.found.objects[of] = ObjectState(encoded_state, pieces)
        if model.rank == 0:
            self.found.pieces.append(self._whole(Key(RANDOM, "", ""), model.get_rng_state()))
        return self.found

    def _add_model(self, of: str, layout: _Layout) -> None:
        engine = layout.engine
        self.found.names[of] = dict(engine.aliases)
        if engine.world.rank == 0:  # of which no rank has a part
            self.found.values[of] = {
                name: {"": form_of_empty(dtype_name(shard.dtype, Key(of, "", name)), shard.shape)}
                for name in dict.fromkeys(engine.aliases.values())
                if not prod((shard := engine.shard(name)).shape)
            }
        for name in layout.written:
            self._add_parts(Key(of, "", name), engine.tensors[name], layout)

    def _add_parts(self, key: Key, tensor: Tensor, layout: _Layout) -> None:
        """Add what this rank writes of a tensor that is divided as a parameter is, or as the first dims of one."""
        rank, written = layout.engine.world.rank, layout.written
        shard = layout.engine.shard(key.name)
        dtype = dtype_of(tensor, key)
        if tensor.dim() < len(shard.shape):
            shard = shard.of_first_dims(tensor.dim())
            held = Held(shard.shape, tensor.element_size(), shard.parts)
            written, _ = written_by(rank, written_parts({key.name: held}))
        own = shard.parts[rank]
        for at in written.get(key.name, ()):
            part = self._elements(taken(tensor, own, at))
            self.found.pieces.append(Piece(key, dtype, shard.shape, at, part))

    def _whole(self, key: Key, tensor: Tensor) -> Piece:
        shape = tuple(tensor.shape)
        return Piece(key, dtype_of(tensor, key), shape, whole(shape), self._elements(tensor))

    def _elements(self, tensor: Tensor) -> Array:
        return elements(tensor if self.staging is None else self.staging.copied(tensor))

    def _putting(self, pieces: list[Piece], key: Callable[[int], Key]) -> Callable[[Any], dict[str, Any] | None]:
        """Takes tensors that are written whole."""
        count = 0

        def put(value: Any) -> dict[str, Any] | None:
            nonlocal count
            if not isinstance(value, Tensor):
                return None
            if isinstance(value, ShardTensor):
                raise UsageError(
                    f"{key(count).of} has {value!r} in its state: give the parallel model or the optimizer itself"
                )
            if not value.numel():
                return form_of_empty(dtype_of(value, key(count)), tuple(value.shape))
            pieces.append(self._whole(key(count), value))
            count += 1
            return {"$tensor": count - 1}

        return put

    def _add_optimizer(self, of: str, optimizer: Optimizer, layouts: Mapping[str, _Layout]) -> None:
        layout = _layout_of(of, optimizer, layouts)
        names, rank = names_of(layout.engine), layout.engine.world.rank
        groups: list[Group] = []
        put = self._putting(self.found.pieces, partial(options_key, of, rank))
        for position, group in enumerate(optimizer.param_groups):
            own = [(names[id(p)], p) for p in group["params"] if id(p) in names]
            options = {k: encoded(v, f"{of}.{k}", put) for k, v in group.items() if k not in _NOT_OPTIONS}
            groups.append(Group.model_construct(names=tuple(name for name, _ in own), options=options))
            for name, parameter in own:
                for state, value in optimizer.state.get(parameter, {}).items():
                    self._add_state(Key(of, str(state), name), parameter, value, layout)
            foreign = [p for p in group["params"] if id(p) not in names and p.numel()]
            if foreign:
                raise UsageError(
                    f"group {position} of {of} has a parameter of shape {tuple(foreign[0].shape)} that is none of the "
                    "model's: a checkpoint knows states by the names of parameters; give it an optimizer of its own, "
                    "in an object with state_dict"
                )
        self.found.groups[of] = tuple(groups)
        self.found.classes[of] = class_of_states(optimizer)

    def _add_state(self, key: Key, parameter: Tensor, value: Any, layout: _Layout) -> None:
        """Add a state of a parameter: divided as that is, or written by one rank."""
        engine = layout.engine
        shard = engine.shard(key.name)
        if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape[: value.dim()]:
            is_cut = any(part != shard.whole for part in shard.parts.values())
            if is_cut or value.dim() == parameter.dim():
                self._add_parts(key, value, layout)
                return
        is_scalar = not isinstance(value, (Tensor, list, tuple, dict)) or (
            isinstance(value, Tensor) and not value.dim()
        )
        if not is_scalar and shard.parts[engine.world.rank] != shard.whole:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise UsageError(
                f"{key} is a {type(value).__name__}{shape}, and rank {engine.world.rank} has a part of the parameter: "
                "it is not known which part of the state that is"
            )
        if key.name not in layout.first:
            return
        if isinstance(value, Tensor) and value.numel():
            self.found.pieces.append(self._whole(key, value))
            return
        put = self._putting(self.found.pieces, partial(state_tensor_key, key))
        states = self.found.values.setdefault(key.of, {}).setdefault(key.name, {})
        states[key.state] = encoded(value, str(key), put)


def state_tensor_key(key: Key, number: int) -> Key:
    """The key of a tensor inside of a state."""
    return key._replace(state=f"{key.state}#{number}")


def _layout_of(of: str, optimizer: Optimizer, layouts: Mapping[str, _Layout]) -> _Layout:
    """The model whose parameters an optimizer has; the first, if it has none on this rank."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [layout for layout in layouts.values() if own & names_of(layout.engine).keys()]
    if len(found) > 1:
        raise UsageError(f"{of} has parameters of several models; make an optimizer for each")
    return found[0] if found else layouts[MODEL]


def _numbered(of: str, number: int) -> Key:
    return Key(of, "", str(number))


def of_rank_key(of: str, rank: int, number: int) -> Key:
    """The key of a tensor in the state that an object has on a rank, where it is not that of rank 0."""
    return Key(of, "$rank", f"{rank}.{number}")


def options_key(of: str, rank: int, number: int) -> Key:
    """The key of a tensor among the options of an optimizer's groups on a rank."""
    return Key(of, "$options", f"{rank}.{number}")


def class_of_states(optimizer: Optimizer) -> str:
    """The name of the class whose states an optimizer has: its own, or the one that it names as ``states_of``."""
    return str(getattr(optimizer, "states_of", type(optimizer).__qualname__))
