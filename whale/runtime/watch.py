"""Changes that a script makes to the modules of a parallel model, which a compiled step does not see.

A step runs graphs over the tensors that the modules had when it was compiled. A parameter that is put in the place of
another, a cast, a module or a hook that is added, would have no effect; the next step refuses them. So it does where
a parameter that other ranks do not have is frozen or unfrozen, which they cannot see. Knows modules; no ranks and no
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

from torch import Tensor, nn

from whale.errors import UsageError

__all__ = ["Watch"]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Watch:
    """The modules of a model, their tensors and hooks, as they are now.

    Args:
        root: the model.
        freezes: whether parameters may be frozen and unfrozen.

    Attributes:
        modules: each once, in the order of ``root.modules()``.
    """

    def __init__(self, root: nn.Module, *, freezes: bool) -> None:
        self.freezes = freezes
        named = dict(root.named_modules())
        self.modules = list(named.values())
        self._paths = list(named)
        self._tables: list[Mapping[str, Any]] = [
            table for module in self.modules for table in (module._modules, module._parameters, module._buffers)
        ]
        self._known = [dict(table) for table in self._tables]
        self._sizes = [len(table) for table in self._tables]
        self._slots = [(table, key) for table in self._tables for key in table]
        self._objects = [table[key] for table, key in self._slots]
        self._forwards = [module.__dict__.get("forward") for module in self.modules]
        self._hooks: list[Mapping[int, Any]] = [getattr(module, kind) for module in self.modules for kind in _HOOKS]
        self._hooks += [getattr(nn.modules.module, f"_global{kind}") for kind in _HOOKS]
        self._num_hooks = [len(hooks) for hooks in self._hooks]
        named_tensors = dict([*root.named_parameters(), *root.named_buffers()])
        self._names, self._tensors = list(named_tensors), list(named_tensors.values())
        self._kinds = [(t.dtype, t.device) for t in self._tensors]
        self._trained = [t.requires_grad for t in self._tensors]
        self._num_tensor_hooks = [_num_hooks(t) for t in self._tensors]

    def check(self) -> None:
        """Compare with the modules as they are now.

        Raises:
            UsageError: something differs; names it, and what to do instead.
        """
        tensors = self._tensors
        if not (
            all(map(is_, [table.get(key) for table, key in self._slots], self._objects))
            and [len(table) for table in self._tables] == self._sizes
            and all(map(is_, [module.__dict__.get("forward") for module in self.modules], self._forwards))
            and [len(hooks) for hooks in self._hooks] == self._num_hooks
            and (self.freezes or [t.requires_grad for t in tensors] == self._trained)
            and [(t.dtype, t.device) for t in tensors] == self._kinds
            and [_num_hooks(t) for t in tensors] == self._num_tensor_hooks
        ):
            raise UsageError(f"{self._difference()} before parallelize")

    def _difference(self) -> str:
        for number, (table, known) in enumerate(zip(self._tables, self._known, strict=True)):
            path = f"{self._paths[number // 3]}."
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
        for path, module, forward in zip(self._paths, self.modules, self._forwards, strict=True):
            if module.__dict__.get("forward") is not forward:
                return f"{path}.forward was replaced after parallelize, which steps do not see: replace it".lstrip(".")
        for number, (hooks, num) in enumerate(zip(self._hooks, self._num_hooks, strict=True)):
            if len(hooks) != num:
                own = number // len(_HOOKS)
                path = (self._paths[own] or "the model") if own < len(self._paths) else "all modules"
                return (
                    f"a hook was added to {path} after parallelize, but steps call no modules: return from the model "
                    "what the hook is to see, or do in a forward what it does,"
                )
        states = zip(self._names, self._tensors, self._trained, self._kinds, self._num_tensor_hooks, strict=True)
        for name, t, trained, (dtype, device), num in states:
            if t.requires_grad != trained and not self.freezes:
                return (
                    f"{name} was {'frozen' if trained else 'unfrozen'} after parallelize, which ranks without it do "
                    "not see: load model.full_state_dict() into a local model, and set requires_grad there"
                )
            if (t.dtype, t.device) != (dtype, device):
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


def _num_hooks(t: Tensor) -> int:
    return len(t._backward_hooks or ()) + len(t._post_accumulate_grad_hooks or ())
