"""The optimizer's step inside of a backward: parameters are updated when their gradients are summed, which frees these.

Lv et al., "Full parameter fine-tuning for large language models with limited resources" (2023), and torchtitan's
``early_step_in_backward``: so a device never has all gradients. A script has the lines of any other: its call of
``optimizer.step()`` finds no gradients and ends the step. What needs all gradients at once, or several calls of
``train_step`` for one step, is refused. Knows tensors and torch's optimizers; not engines.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from whale.errors import UsageError

__all__ = ["StepInBackward", "twin_of"]

_Options = list[dict[str, Any]]


class StepInBackward:
    """Updates of one model's parameters inside of its steps, by the script's optimizers.

    A step: `begin`, then `update` for each bucket of parameters, and `taken`; the script's ``optimizer.step()`` then
    calls `ended`.

    Attributes:
        check: refuses an optimizer whose update of some parameters needs others.
    """

    def __init__(self) -> None:
        self.check: Callable[[Optimizer], None] = lambda optimizer: None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._of: dict[int, Optimizer] = {}
        self._options: weakref.WeakKeyDictionary[Optimizer, _Options] = weakref.WeakKeyDictionary()
        self._open: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def attach(self, optimizer: Optimizer) -> None:
        """Take an optimizer that has some of the parameters."""
        self._optimizers.add(optimizer)

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Start a step that trains some of these tensors.

        Raises:
            UsageError: a tensor has a gradient already, or several optimizers; there is no optimizer; the last step is
                not ended; or an optimizer cannot step so.
        """
        if self._open:
            raise UsageError(
                "train_step was called again before optimizer.step(): with step_in_backward=True each train_step has "
                "updated the parameters, so gradients of several are not accumulated; call optimizer.step() after "
                "each, use micro_batches= for larger batches, or leave step_in_backward out"
            )
        for name, tensor in tensors.items():
            if tensor.grad is not None:
                raise UsageError(
                    f"{name} has a gradient before the step, but with step_in_backward=True gradients are freed inside "
                    "of it: call optimizer.zero_grad(), or leave step_in_backward out"
                )
        names = {id(tensor): name for name, tensor in tensors.items() if tensor.requires_grad}
        self._of, doubled = self._owners(names)
        if doubled:  # an optimizer that the script has left may be in a cycle, as of a scheduler
            gc.collect()
            self._of, doubled = self._owners(names)
        if doubled:
            raise UsageError(
                f"{doubled} is in several optimizers, but step_in_backward=True steps its optimizer inside of "
                "train_step: make one of it, and delete those that are not used"
            )
        if names and not self._of:
            raise UsageError(
                "step_in_backward=True steps the optimizer inside of train_step, but none has parameters of this "
                "model: make it after parallelize, from the parallel model's parameters, before the first train_step"
            )
        for optimizer in dict.fromkeys(self._of.values()):
            self.check(optimizer)
            self._options[optimizer] = _options(optimizer)

    def _owners(self, names: Mapping[int, str]) -> tuple[dict[int, Optimizer], str]:
        """The optimizer of each parameter, and the name of one that has several."""
        found: dict[int, Optimizer] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in names and found.setdefault(id(parameter), optimizer) is not optimizer:
                        return {}, names[id(parameter)]
        return found, ""

    def update(self, parameters: Sequence[Tensor]) -> None:
        """Step for parameters whose gradients are final."""
        wanted = {id(x) for x in parameters if x.grad is not None}
        for optimizer in dict.fromkeys(self._of[key] for key in wanted if key in self._of):
            groups = [
                {**group, "params": [x for x in group["params"] if id(x) in wanted]} for group in optimizer.param_groups
            ]
            twin_of(optimizer, [group for group in groups if group["params"]], optimizer.state).step()

    def taken(self) -> None:
        """The step is done, and the script will call ``step()`` of its optimizers."""
        self._open, self._of = weakref.WeakSet(self._of.values()), {}

    def ended(self, optimizer: Optimizer) -> None:
        """The script has called ``step()`` of an optimizer.

        Raises:
            UsageError: it has changed options of it since the step.
        """
        if optimizer not in self._open:
            return
        self._open.discard(optimizer)
        for before, now in zip(self._options[optimizer], _options(optimizer), strict=False):
            for name, value in now.items():
                if name not in before or not _is_equal(before[name], value):
                    raise UsageError(
                        f"{name} of the optimizer was changed between train_step and optimizer.step(), but with "
                        "step_in_backward=True parameters were updated inside of train_step: change it before "
                        "train_step, or leave step_in_backward out"
                    )


def _options(optimizer: Optimizer) -> _Options:
    """The options of an optimizer's groups."""
    return [
        {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def twin_of(optimizer: Optimizer, groups: Iterable[dict[str, Any]], state: Any) -> Optimizer:
    """An optimizer like another, with these groups and states, and without hooks of the script."""
    made: Optimizer = object.__new__(type(optimizer))
    for name, value in optimizer.__dict__.items():
        if not (callable(value) and hasattr(type(optimizer), name)):  # as `step` of schedulers, bound to the optimizer
            made.__dict__[name] = value
    made.state, made.param_groups = state, list(groups)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        made.__dict__[hooks] = OrderedDict()
    twins.add(made)
    return made


twins: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that `twin_of` has made: no script steps them."""
