"""The local model after parallelize, while a script has it or modules of it: steps do not see what is changed there.

``model.train()``, ``model.alpha = 0.5`` or ``model.load_state_dict(state)`` of a script that keeps the local model
beside the parallel one, or ``backbone.eval()`` of one that keeps a module of it, would change nothing in the training;
the next step refuses them, if the parallel model is not changed likewise. A local model into which a state of the
parallel one is loaded, as to generate with it, is one of its own from then on, and so is one that is given to
parallelize again. Knows modules; no ranks and no steps.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whale.errors import UsageError
from whale.runtime.agreement import fingerprints, is_other
from whale.runtime.attributes import Attributes, Sources, Tokens
from whale.runtime.watch import Shape, Watch

__all__ = ["LocalWatch", "hand_over_hooks"]


class _Modules(nn.Module):
    """Modules of a model, under their paths in it, as far as a script has them. It does not keep them."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._refs = {path: weakref.ref(module) for path, module in modules.items()}

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return ((path, module) for path, one in self._refs.items() if (module := one()) is not None)

    def outermost(self) -> list[nn.Module]:
        """The modules that are in no other one."""
        own = list(self.modules())
        inside = {id(x) for module in own for x in module._modules.values()}
        return [module for module in own if id(module) not in inside]


class _Known(NamedTuple):
    """A model as it was in parallelize, by the paths of modules and the names of tensors. It keeps none of these.

    Attributes:
        modes: of training.
        shapes: the tensors, modules and hooks that each module has.
        tokens: of attributes.
        parameters: those that the parallel model does not share.
        versions: of these.
        uses: whether these require gradients, and how many hooks they have.
        looks: fingerprints of these, until a training step has compared them: what is written through ``.data`` has no
            version.
    """

    modes: dict[str, bool]
    shapes: dict[str, Shape]
    tokens: Tokens
    parameters: dict[str, weakref.ref[nn.Parameter]]
    versions: dict[str, int]
    uses: dict[str, tuple[bool, int]]
    looks: dict[str, Tensor]


class _Beside(NamedTuple):
    """A parameter that another parallel model has too, apart: its name here, the tensor there, and the version of that
    when the later of the two was made."""

    name: str
    tensor: weakref.ref[Tensor]
    version: int


class _State:
    """Modules as they are now. It keeps what they hold, and so all but the outermost ones."""

    def __init__(self, modules: _Modules, sources: Sources, tokens: Tokens | None = None) -> None:
        self.modules = modules
        self.watch = Watch(modules, freezes=True, moves=True)
        self.attributes = Attributes(modules, sources, tokens)
        self.modes = self.watch.modes()
        self.parameters = dict(modules.named_parameters(remove_duplicate=False))
        self.versions = [p._version for p in self.parameters.values()]

    def goes_by(self, known: _Known) -> None:
        """Compare with what is known from now on."""
        self.modes = tuple(known.modes[path] for path in self.watch.paths)
        self.parameters = {name: p for name, p in self.parameters.items() if name in known.versions}
        self.versions = [known.versions[name] for name in self.parameters]


def _owners_of(root: nn.Module) -> dict[str, weakref.ref[nn.Module]]:
    """The module of each parameter, by its name."""
    return {
        f"{path}.{name}".removeprefix("."): weakref.ref(module)
        for path, module in root.named_modules()
        for name in module._parameters
    }


class LocalWatch:
    """A local model, which it does not keep alive.

    Args:
        root: the model.
        sources: what its code names.
        tensors: of the parallel model, by name; some are those of the local one.
        looks: fingerprints of its parameters, by name, as far as they are known.
        is_held: whether some of its objects, as a trainer, may have it: what this holds of the model would keep it.

    Attributes:
        is_alive: whether the script may have some of it that is not of another model.
        is_read: whether a state of the parallel model was read since the last step.
    """

    def __init__(
        self,
        root: nn.Module,
        sources: Sources,
        tensors: Mapping[str, Tensor],
        looks: Mapping[str, Tensor],
        *,
        is_held: bool = False,
    ) -> None:
        self._sources = Sources(sources.names, pieces=sources.pieces, stored=sources.stored, whole=sources.whole)
        self._modules = _Modules(dict(root.named_modules()))
        self._held: list[_State] = []
        self._owners = _owners_of(root)
        self.is_alive, self.is_read = True, False
        self._is_held, self._num_checks = is_held, 0
        self._tensors = {name: weakref.ref(x) for name, x in tensors.items()}
        self._beside: list[_Beside] = []
        for path, module in self._modules.named_modules():
            if module in _watches:
                self._take(path, module, _watches[module])
            _watches[module] = self
        state = _State(self._modules, self._sources)
        shared = {id(x) for x in tensors.values()}
        apart = {name: p for name, p in state.parameters.items() if id(p) not in shared and not p.is_meta}
        own = {name: look for name, look in looks.items() if name in apart}
        unknown = {name: p for name, p in root.named_parameters() if name in apart and name not in own}
        own |= zip(unknown, fingerprints(unknown.values()), strict=True)
        self._known = _Known(
            modes=dict(zip(state.watch.paths, state.modes, strict=True)),
            shapes={path: Shape.of(module) for path, module in self._modules.named_modules()},
            tokens=dict(state.attributes.first),
            parameters={name: weakref.ref(p) for name, p in apart.items()},
            versions={name: p._version for name, p in apart.items()},
            uses={name: (p.requires_grad, len(p._backward_hooks or ())) for name, p in apart.items()},
            looks=own,
        )
        self._hold(state)

    def check(self, parallel: Watch, attributes: Attributes, *, train: bool) -> None:
        """Compare the model with what it was in parallelize, and with the parallel one.

        Raises:
            UsageError: it was changed, and a step of the parallel model would compute something else if it had been
                that; names what, and what to do instead.
        """
        self._let_go()
        state = self._held[0] if self._held else self._left()
        alone = self._alone() if state is None or len(state.parameters) < len(self._known.parameters) else {}
        if state is None and not alone:
            self._forget()
            return
        is_read, self.is_read = self.is_read, False
        name = self._written(state, train=train) if state is not None else None
        name = name or next((name for name, p in alone.items() if p._version != self._known.versions[name]), None)
        if name is not None and is_read:
            self._forget()
        elif name is not None:
            raise UsageError(
                f"values were written into {name} of the local model after parallelize, which steps do not see: load "
                "them into the parallel model, on every rank, with model.load_full_state_dict(state)"
            )
        else:
            self._check_alone(alone)
            if state is not None:
                self._check_modules(state, parallel, attributes, train=train)

    def _let_go(self) -> None:
        """Let Python free a model that has an object that has it, now and then, if the script has dropped it."""
        self._num_checks += 1
        if self._is_held and self._held and self._num_checks.bit_count() == 1:  # at a power of two
            self._held.clear()
            gc.collect()

    def check_beside(self) -> None:
        """Compare with other parallel models that train the same modules.

        Raises:
            UsageError: one has updated a parameter of which this one has its own copy; names it.
        """
        for name, tensor, version in self._beside:
            if (other := tensor()) is not None and other._version != version:
                raise UsageError(
                    f"{name} is of a module that another parallel model trains too, and that has updated its own copy, "
                    "which this one does not see: train both in one module that holds them, or as replicas, which have "
                    "one copy; or make the other one of a copy.deepcopy, if they are to be trained apart"
                )

    def _take(self, path: str, module: nn.Module, other: LocalWatch) -> None:
        """Watch a module that another watch has had until now."""
        theirs = other._leave(module)
        for own, parameter in module._parameters.items():
            name = f"{path}.{own}".removeprefix(".")
            here, there = self._tensors.get(name), theirs.get(id(parameter))
            mine, its = here() if here is not None else None, there[1]() if there is not None else None
            if there is not None and mine is not None and its is not None and mine is not its:
                self._beside.append(_Beside(name, weakref.ref(its), its._version))
                other._beside.append(_Beside(there[0], weakref.ref(mine), mine._version))

    def _leave(self, module: nn.Module) -> dict[int, tuple[str, weakref.ref[Tensor]]]:
        """Watch a module no more: another parallel model trains its parameters, or has its own of them.

        Returns names and tensors of this model for the module's parameters that it does not share, by identity.
        """
        self._held.clear()
        own = {id(x) for x in module._parameters.values()}
        left = {name: id(one()) for name, one in self._known.parameters.items() if id(one()) in own}
        for name in left:
            del self._known.parameters[name]
        return {known: (name, self._tensors[name]) for name, known in left.items() if name in self._tensors}

    def _alone(self) -> dict[str, nn.Parameter]:
        """The parameters that the script has without their modules."""
        found = {}
        for name, one in self._known.parameters.items():
            parameter = one()
            if parameter is not None and self._owners[name]() is None:
                found[name] = parameter
        return found

    def _check_alone(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            trains, num_hooks = self._known.uses[name]
            if parameter.requires_grad != trains:
                change = "unfrozen" if parameter.requires_grad else "frozen"
            elif len(parameter._backward_hooks or ()) > num_hooks:
                change = "given a hook"
            else:
                continue
            raise UsageError(
                f"{name} of the local model was {change} after parallelize, which steps do not see: change it in the "
                f"model that parallelize has returned{_COPY}"
            )

    def _hold(self, state: _State) -> _State:
        """Keep a state while the script has all of its outermost modules."""
        state.goes_by(self._known)
        held = self._held
        held[:] = [state]
        self._outermost = [weakref.ref(module, lambda _: held.clear()) for module in state.modules.outermost()]
        return state

    def _left(self) -> _State | None:
        """The state of the modules that the script still has, where it dropped the model, or some are another's.

        Raises:
            UsageError: they have other modules, tensors or hooks than in parallelize.
        """
        left = {path: module for path, module in self._modules.named_modules() if _watches.get(module) is self}
        if not left:
            return None
        for path, module in left.items():
            difference = self._known.shapes[path].difference(path, module)
            if difference is not None:
                raise UsageError(f"in the local model, {difference} before parallelize{_COPY}")
        self._modules = _Modules(left)
        return self._hold(_State(self._modules, self._sources, self._known.tokens))

    def _forget(self) -> None:
        self._held.clear()
        self.is_alive = False

    def _written(self, state: _State, *, train: bool) -> str | None:
        """The first parameter with other values than in parallelize."""
        versions = [p._version for p in state.parameters.values()]
        if versions != state.versions:
            own = zip(state.parameters, versions, state.versions, strict=True)
            return next(name for name, now, before in own if now != before)
        if not self._known.looks or not train:
            return None
        looks = {name: look for name, look in self._known.looks.items() if name in state.parameters}
        self._known.looks.clear()
        now = fingerprints([state.parameters[name] for name in looks])
        for (name, before), look in zip(looks.items(), now, strict=True):
            if before.device == look.device and is_other(look, before):
                return name
        return None

    def _check_modules(self, state: _State, parallel: Watch, attributes: Attributes, *, train: bool) -> None:
        if not state.watch.is_same():
            raise UsageError(f"in the local model, {state.watch.difference()} before parallelize{_COPY}")
        if state.attributes.changes().key:
            unlike = state.attributes.unlike(attributes)
            if unlike:
                raise UsageError(
                    f"{unlike[0]} of the local model was changed after parallelize, which steps do not see: change it "
                    f"in the model that parallelize has returned{_COPY}"
                )
            state.attributes = Attributes(state.modules, self._sources)
            self._known.tokens.update(state.attributes.first)
        modes = state.watch.modes()
        if train and modes != state.modes:
            self._check_modes(state, modes, dict(zip(parallel.paths, parallel.modes(), strict=True)))

    def _check_modes(self, state: _State, modes: tuple[bool, ...], parallel: Mapping[str, bool]) -> None:
        for path, mode, before in zip(state.watch.paths, modes, state.modes, strict=True):
            if before != mode != parallel.get(path, mode):
                called = "train()" if mode else "eval()"
                where = f"{path} of the local model" if path else "the local model"
                raise UsageError(
                    f"{called} was called of {where} after parallelize, but the parallel model trains in "
                    f"{'evaluation' if mode else 'training'} mode: call {called} of the model that parallelize "
                    f"has returned{_COPY}"
                )
        state.modes = modes
        self._known.modes.update(zip(state.watch.paths, modes, strict=True))


def hand_over_hooks(local: nn.Module, parallel: nn.Module) -> None:
    """Let the handles that a script has of a local model's hooks remove those of the parallel model once a module of
    the local one is gone: they know its hooks alone."""
    tables: dict[int, tuple[nn.Module, Any]] = {}
    for path, module in local.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            if table := getattr(module, kind):
                tables[id(table)] = module, getattr(parallel.get_submodule(path), kind)
    for handle in [x for x in gc.get_objects() if type(x) is RemovableHandle] if tables else ():
        owner, other = tables.get(id(handle.hooks_dict_ref()), (None, None))
        if owner is not None and other is not None:
            weakref.finalize(owner, _hand_over, weakref.ref(handle), weakref.ref(other)).atexit = False


def _hand_over(handle: weakref.ref[RemovableHandle], hooks: weakref.ref[Any]) -> None:
    one, others = handle(), hooks()
    if one is not None and others is not None:
        one.hooks_dict_ref = weakref.ref(others)


_COPY = "; if the local model has another purpose, give parallelize a copy.deepcopy of it"

_watches: weakref.WeakKeyDictionary[nn.Module, LocalWatch] = weakref.WeakKeyDictionary()
"""The last watch of each module of local models."""
