"""The local model after parallelize, while a script has it: steps do not see what is changed there.

``model.train()``, ``model.alpha = 0.5`` or ``model.load_state_dict(state)`` of a script that keeps the local model
beside the parallel one would change nothing in the training; the next step refuses them, if the parallel model is not
changed likewise. A local model into which a state of the parallel one is loaded, as to generate with it, is one of its
own from then on, and so is one that is given to parallelize again. Knows modules; no ranks and no steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor, nn

from whale.errors import UsageError
from whale.runtime.agreement import fingerprints, is_other
from whale.runtime.attributes import Attributes, Sources
from whale.runtime.watch import Watch

__all__ = ["LocalWatch"]


class _State:
    """A local model as it was in parallelize. It keeps what the modules hold, but not the root, which keeps it alive.

    Args:
        root: the model.
        sources: what its code names.
        tensors: of the parallel model, by name; some are those of the local one.
        looks: fingerprints of the model's parameters, by name, as far as they are known.
    """

    def __init__(
        self, root: nn.Module, sources: Sources, tensors: Mapping[str, Tensor], looks: Mapping[str, Tensor]
    ) -> None:
        self.watch = Watch(root, freezes=True, moves=True)
        self.modes = self.watch.modes()
        self.attributes = Attributes(root, Sources(sources.names, pieces=sources.pieces, stored=sources.stored))
        self.apart = {n: p for n, p in root.named_parameters() if tensors.get(n) is not p and not p.is_meta}
        self.versions = [p._version for p in self.apart.values()]
        own = {name: look for name, look in looks.items() if name in self.apart}
        unknown = {name: p for name, p in self.apart.items() if name not in own}
        own |= zip(unknown, fingerprints(unknown.values()), strict=True)
        self.looks: dict[str, Tensor] | None = own

    def written(self, *, train: bool) -> str | None:
        """The first parameter with other values than in parallelize. Those that are written through ``.data`` have no
        version: the first training step compares the values."""
        for (name, p), version in zip(self.apart.items(), self.versions, strict=True):
            if p._version != version:
                return name
        if self.looks is None or not train:
            return None
        looks, self.looks = self.looks, None
        now = fingerprints(self.apart.values())
        for (name, p), look in zip(self.apart.items(), now, strict=True):
            if p.device == looks[name].device and is_other(look, looks[name]):
                return name
        return None


class LocalWatch:
    """A local model, which it does not keep alive.

    Args:
        root: the model.
        sources: what its code names.
        tensors: of the parallel model, by name.
        looks: fingerprints of its parameters, by name, as far as they are known.

    Attributes:
        is_read: whether a state of the parallel model was read since the last step.
    """

    def __init__(
        self, root: nn.Module, sources: Sources, tensors: Mapping[str, Tensor], looks: Mapping[str, Tensor]
    ) -> None:
        held = self._held = [_State(root, sources, tensors, looks)]
        self._root = weakref.ref(root, lambda _: held.clear())
        if root in _watches:
            _watches[root]._held.clear()
        _watches[root] = self
        self.is_read = False

    @property
    def is_alive(self) -> bool:
        """Whether the script has it, and it is not one of its own."""
        return bool(self._held)

    def check(self, parallel: Watch, attributes: Attributes, *, train: bool) -> None:
        """Compare the model with what it was in parallelize, and with the parallel one.

        Raises:
            UsageError: it was changed, and a step of the parallel model would compute something else if it had been
                that; names what, and what to do instead.
        """
        state = self._held[0]
        is_read, self.is_read = self.is_read, False
        name = state.written(train=train)
        if name is not None and is_read:
            self._held.clear()
        elif name is not None:
            raise UsageError(
                f"values were written into {name} of the local model after parallelize, which steps do not see: load "
                "them into the parallel model, on every rank, with model.load_full_state_dict(state)"
            )
        else:
            self._check_modules(state, parallel, attributes, train=train)

    def _check_modules(self, state: _State, parallel: Watch, attributes: Attributes, *, train: bool) -> None:
        if not state.watch.is_same():
            raise UsageError(f"in the local model, {state.watch.difference()} before parallelize{_COPY}")
        root = self._root()
        if state.attributes.changes().key and root is not None:
            unlike = state.attributes.unlike(attributes)
            if unlike:
                raise UsageError(
                    f"{unlike[0]} of the local model was changed after parallelize, which steps do not see: change it "
                    f"in the model that parallelize has returned{_COPY}"
                )
            state.attributes = Attributes(root, state.attributes.sources)
        modes = state.watch.modes()
        if train and modes != state.modes:
            own = zip(state.watch.paths, modes, state.modes, parallel.modes(), strict=False)
            for path, mode, before, other in own:
                if mode != before and mode != other:
                    called = "train()" if mode else "eval()"
                    where = f"{path} of the local model" if path else "the local model"
                    raise UsageError(
                        f"{called} was called of {where} after parallelize, but the parallel model trains in "
                        f"{'training' if other else 'evaluation'} mode: call {called} of the model that parallelize "
                        f"has returned{_COPY}"
                    )
            state.modes = modes


_COPY = "; if the local model has another purpose, give parallelize a copy.deepcopy of it"

_watches: weakref.WeakKeyDictionary[nn.Module, LocalWatch] = weakref.WeakKeyDictionary()
"""The last watch of each local model."""
