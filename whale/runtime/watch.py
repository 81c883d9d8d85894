"""Changes that a script makes to the modules of a parallel model, which a compiled step does not see.

A step runs graphs over the tensors that the modules had when it was compiled. A parameter that is put in the place of
another, a cast, a module or a hook that is added, would have no effect; the next step refuses them. So it does where
a parameter that other ranks do not have is frozen or unfrozen, which they cannot see. Knows modules; no ranks and no
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn

from whale.errors import UsageError

__all__ = ["Shape", "Watch"]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Shape(NamedTuple):
    """The class of a module, and the modules, tensors and hooks that it has itself. It keeps none of these.

    Attributes:
        kind: its class.
        held: modules, parameters and buffers by their names; those that are None are absent.
        hooks: numbers of hooks of each kind.
    """

    kind: type
    held: Mapping[str, ref[Any]]
    hooks: tuple[int, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Shape:
        """The shape of a module as it is now."""
        hooks = tuple([len(getattr(module, kind)) for kind in _HOOKS])
        return cls(type(module), {name: ref(x) for name, x in _held(module).items()}, hooks)

    def difference(self, path: str, module: nn.Module) -> str | None:
        """A sentence on the first difference of the module now, and on what to do instead, before parallelize."""
        if type(module) is not self.kind:
            return _reclassed(path or "the model", type(module), self.kind)
        now = _held(module)
        for name in {**self.held, **now}:
            if name not in self.held or now.get(name) is not self.held[name]():
                change = "added" if name not in self.held else "replaced" if name in now else "removed"
                where = f"{path}.{name}".removeprefix(".")
                return f"{where} was {change} after parallelize, which steps do not see: change the model"
        hooks = tuple([len(getattr(module, kind)) for kind in _HOOKS])
        if hooks != self.hooks:
            return _hooked(path or "the model", fewer=sum(hooks) < sum(self.hooks))
        return None


def _held(module: nn.Module) -> dict[str, Any]:
    tables = (module._modules, module._parameters, module._buffers)
    return {name: x for table in tables for name, x in table.items() if x is not None}


class Watch:
    """The modules of a model, their tensors and hooks, as they are now.

    Args:
        root: the model.
        freezes: whether parameters may be frozen and unfrozen.
        moves: whether tensors may move to other devices.

    Attributes:
        paths: of the modules, each once, in the order of ``root.modules()``. It keeps what they hold, but not the root.
    """

    def __init__(self, root: nn.Module, *, freezes: bool, moves: bool = False) -> None:
        self.freezes, self.moves = freezes, moves
        named = dict(root.named_modules())
        modules = list(named.values())
        self.paths = list(named)
        self._dicts = [module.__dict__ for module in modules]
        # Modules of torch.compile have that of the module inside.
        self._with_mode = [next(m.__dict__ for m in module.modules() if "training" in m.__dict__) for module in modules]
        self._tables: list[Mapping[str, Any]] = [
            table for module in modules for table in (module._modules, module._parameters, module._buffers)
        ]
        self._known = [dict(table) for table in self._tables]
        self._sizes = list(map(len, self._tables))
        self._slots = [(table, key) for table in self._tables for key in table]
        self._objects = [table[key] for table, key in self._slots]
        held = set(map(id, self._objects))
        self._inner = {path: module for path, module in named.items() if id(module) in held}
        self._root = ref(root)
        self._classes = self._kinds()
        self._forwards = [attributes.get("forward") for attributes in self._dicts]
        self._hooks: list[Mapping[int, Any]] = [getattr(module, kind) for module in modules for kind in _HOOKS]
        self._hooks += [getattr(nn.modules.module, f"_global{kind}") for kind in _HOOKS]
        self._num_hooks = list(map(len, self._hooks))
        named_tensors = dict([*root.named_parameters(), *root.named_buffers()])
        self._names, self._tensors = list(named_tensors), list(named_tensors.values())
        self._dtypes = [t.dtype for t in self._tensors]
        self._devices = [t.device for t in self._tensors]
        self._device_numbers = [t.get_device() for t in self._tensors]
        self._trained = [t.requires_grad for t in self._tensors]
        self._num_tensor_hooks = [_num_hooks(t) for t in self._tensors]
        self._known_hooks = [copy(hooks) for hooks in self._tensor_hooks()]

    def check(self) -> None:
        """Compare with the modules as they are now.

        Raises:
            UsageError: something differs; names it, and what to do instead.
        """
        if not self.is_same():
            raise UsageError(f"{self.difference()} before parallelize")

    def modes(self) -> tuple[bool, ...]:
        """Whether each module is in training mode."""
        return tuple([attributes["training"] for attributes in self._with_mode])

    def is_same(self) -> bool:
        """Whether the modules are as they were."""
        tensors = self._tensors
        return (
            all(map(is_, [table.get(key) for table, key in self._slots], self._objects))
            and list(map(len, self._tables)) == self._sizes
            and all(map(is_, self._kinds(), self._classes))
            and all(map(is_, [attributes.get("forward") for attributes in self._dicts], self._forwards))
            and list(map(len, self._hooks)) == self._num_hooks
            and (self.freezes or [t.requires_grad for t in tensors] == self._trained)
            and [t.dtype for t in tensors] == self._dtypes
            and (self.moves or [t.get_device() for t in tensors] == self._device_numbers)
            and (
                self._tensor_hooks() == self._known_hooks  # without hooks, as almost always, these are Nones
                or [_num_hooks(t) for t in tensors] == self._num_tensor_hooks
            )
        )

    def _kinds(self) -> list[type]:
        """The classes of the root and of the modules that others hold."""
        return [type(self._root()), *map(type, self._inner.values())]

    def _tensor_hooks(self) -> list[Any]:
        backward: list[Any] = [t._backward_hooks for t in self._tensors]
        return backward + [t._post_accumulate_grad_hooks for t in self._tensors]

    def difference(self) -> str:
        """A sentence on the first difference, and on what to do instead, before parallelize."""
        for number, (table, known) in enumerate(zip(self._tables, self._known, strict=True)):
            path = f"{self.paths[number // 3]}."
            for key in [*known, *table]:
                name = f"{path}{key}".lstrip(".")
                if key not in known:
                    return f"{name} was added after parallelize, which steps do not see: add it to the local model"
                if table.get(key) is not known[key]:
                    return (
                        f"{name} was {'replaced' if key in table else 'removed'} after parallelize, which steps do not "
                        "see: write values into this rank's part with torch.no_grad() and copy_, or whole ones with "
                        "model.load_full_state_dict; change the model"
                    )
        for path, now, before in zip(["the model", *self._inner], self._kinds(), self._classes, strict=True):
            if now is not before:
                return _reclassed(path, now, before)
        for path, attributes, forward in zip(self.paths, self._dicts, self._forwards, strict=True):
            if attributes.get("forward") is not forward:
                return f"{path}.forward was replaced after parallelize, which steps do not see: replace it".lstrip(".")
        for number, (hooks, num) in enumerate(zip(self._hooks, self._num_hooks, strict=True)):
            if len(hooks) != num:
                own = number // len(_HOOKS)
                path = (self.paths[own] or "the model") if own < len(self.paths) else "all modules"
                return _hooked(path, fewer=len(hooks) < num)
        states = zip(
            self._names,
            self._tensors,
            self._trained,
            self._dtypes,
            self._devices,
            self._num_tensor_hooks,
            strict=True,
        )
        for name, t, trained, dtype, device, num in states:
            if t.requires_grad != trained and not self.freezes:
                return (
                    f"{name} was {'frozen' if trained else 'unfrozen'} after parallelize, which ranks without it do "
                    "not see: load model.full_state_dict() into a local model, and set requires_grad there"
                )
            if t.dtype != dtype or (t.device != device and not self.moves):
                return (
                    f"{name} was {dtype} on {device} and is {t.dtype} on {t.device} after parallelize, but steps are "
                    "not compiled for that: cast or move the local model"
                )
            if _num_hooks(t) != num:
                return (
                    f"a hook was added to {name} after parallelize, which would see gradients that are not summed over "
                    "ranks: change .grad after train_step, or write the model so"
                )
        raise AssertionError("nothing differs")


def _reclassed(path: str, now: type, before: type) -> str:
    kinds = f"was of class {before.__name__} and is of {now.__name__}"
    return f"{path} {kinds} after parallelize, which steps do not see: set its class"


def _hooked(path: str, *, fewer: bool) -> str:
    if fewer:
        return f"a hook was removed from {path} after parallelize, which steps do not see: remove it"
    return (
        f"a hook was added to {path} after parallelize, but steps call no modules: return from the model what the hook "
        "is to see, or do in a forward what it does,"
    )


def _num_hooks(t: Tensor) -> int:
    return len(t._backward_hooks or ()) + len(t._post_accumulate_grad_hooks or ())
