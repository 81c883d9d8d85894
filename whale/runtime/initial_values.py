"""Initial values of a model without data, as if it had been built on the CPU: from its builder, or from its modules.

A builder (a function without arguments) is recorded, so it is exact for any model. A finished model on the meta device
has only its structure: a Hugging Face model is built again from its class and its config, any other module gets its
``reset_parameters()``, in the order in which modules are registered. This equals the constructors if nothing else wrote
to their tensors, and torch counts the writes: if the counts differ, as after ``model.apply(init_weights)``, or if a
module has tensors that nothing initialises, the model is refused, and the error asks for the builder. It knows modules
and values; nothing of plans or ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whale.errors import UsageError
from whale.ir.objects import deep_copy
from whale.runtime.local_program import Intervals
from whale.runtime.materialize import record
from whale.runtime.replay import Recording
from whale.runtime.stage import part

__all__ = ["InitialValues", "values_of_builder", "values_of_meta_model"]

_ADVICE = "give parallelize the function that builds the model in place of the model, or its values with state_dict="


@dataclass(frozen=True, kw_only=True)
class InitialValues:
    """The tensors of a model by name, and how to compute them. ``given`` values replace computed ones."""

    tensors: Mapping[str, Tensor]
    recording: Recording
    given: Mapping[str, Tensor]

    def digest(self) -> str:
        """Digest of the random generator's state, on which ranks must agree for their shards to match."""
        return self.recording.digest() if not self.given else ""

    def take(self, wanted: Mapping[str, Intervals | None], device: torch.device) -> dict[str, Tensor]:
        """Compute parts of tensors (None is the whole tensor), one tensor at a time.

        torch's generator ends in the state after the local construction, unless values are given.
        """
        found = {}
        for name, intervals in wanted.items():
            if name in self.given:
                whole = self.given[name]
                if tuple(whole.shape) != tuple(self.tensors[name].shape):
                    raise UsageError(
                        f"state_dict has {name} of shape {tuple(whole.shape)}, but the model's is "
                        f"{tuple(self.tensors[name].shape)}"
                    )
                piece = whole if intervals is None else part(whole, intervals)
                kind = self.tensors[name].dtype
                found[name] = piece.detach().to(device, kind, copy=True, memory_format=torch.contiguous_format)
        rest = {name: (self.tensors[name], part) for name, part in wanted.items() if name not in found}
        return found | self.recording.take(rest, device, draw=not self.given)


def values_of_builder(
    build: Callable[[], nn.Module], state_dict: Mapping[str, Tensor] | None = None
) -> tuple[nn.Module, InitialValues]:
    """Build a model without data, and return its values.

    Raises :class:`UsageError` for a builder that returns no module.
    """
    model, recording = record(build)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a function that returns {type(model).__name__}; it must return an nn.Module")
    named = _named(model)
    if any(recording.asked_for_meta(x) for x in named.values()):
        return model, values_of_meta_model(model, state_dict)
    _keep_plain_tensors(model, recording)
    return model, InitialValues(tensors=named, recording=recording, given=_given(state_dict, model))


def values_of_meta_model(model: nn.Module, state_dict: Mapping[str, Tensor] | None = None) -> InitialValues:
    """The values of a finished model whose tensors are on the meta device.

    Raises :class:`UsageError` where a module's initialisation is not known; names the tensor and what to do.
    """
    rebuild = _Rebuild(model, _given(state_dict, model))
    _, recording = record(rebuild.run)
    tensors = {name: rebuild.made.get(id(x), x) for name, x in _named(model).items()}
    rebuild.check(tensors, recording)
    return InitialValues(tensors=tensors, recording=recording, given=rebuild.given)


class _Rebuild:
    """Makes, for every tensor of a model on the meta device, one with its history, by the identity of the tensor."""

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor]) -> None:
        self.model, self.given = model, given
        self.made: dict[int, Tensor] = {}
        self.visited: set[int] = set()
        self.dtype = torch.get_default_dtype()
        self.known = {id(x) for name, x in _named(model).items() if name in given or not x.is_meta}
        self.versions = {id(x): x._version for x in _named(model).values()}
        self.meta_twins = {id(m): _meta_twin(m) for m in _outermost_pretrained(model) if not self._is_known(m)}

    def run(self) -> None:
        self._visit(self.model)

    def _is_known(self, module: nn.Module) -> bool:
        return all(id(x) in self.known for x in _named(module).values())

    def _visit(self, module: nn.Module) -> None:
        if id(module) in self.visited or self._is_known(module):
            return
        self.visited.add(id(module))
        if id(module) in self.meta_twins:
            self._construct_again(module)
            return
        for child in module.children():
            self._visit(child)
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            getattr(self._blank(module), reset.__name__)()

    def _blank(self, module: nn.Module) -> nn.Module:
        """A copy whose tensors are those made so far, and new ones without a value."""
        memo: dict[int, Any] = {}
        for x in _named(module).values():
            if id(x) not in self.made:
                blank = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
                kept = nn.Parameter(blank, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else blank
                self.made[id(x)] = kept
            memo[id(x)] = self.made[id(x)]
        return deep_copy(module, memo, module.modules)

    def _construct_again(self, module: Any) -> None:
        fresh = _named(type(module)(copy.deepcopy(module.config)))
        twin = _named(self.meta_twins[id(module)])
        for name, x in _named(module).items():
            same = name in fresh and fresh[name].shape == x.shape and fresh[name].dtype == x.dtype
            if same and twin[name]._version == self.versions[id(x)]:
                self.made[id(x)] = fresh[name]
                self.versions[id(x)] = fresh[name]._version

    def check(self, tensors: Mapping[str, Tensor], recording: Recording) -> None:
        """Refuse tensors that have another history than the one that was made, or none."""
        owners: dict[int, set[int]] = {}  # of the parameters that no Hugging Face model made
        for module in self.model.modules():
            if id(module) in self.visited and id(module) not in self.meta_twins:
                for parameter in module._parameters.values():
                    owners.setdefault(id(parameter), set()).add(id(module))
        blank = set(recording.uninitialised({n: x for n, x in tensors.items() if x.is_meta}))
        for name, x in _named(self.model).items():
            if id(x) in self.known:
                continue
            path = name.rpartition(".")[0]
            kind = type(self.model.get_submodule(path)).__name__
            where = f"{name} (a {kind})"
            if len(owners.get(id(x), ())) > 1:
                reason = "is shared by several modules, and whose initialisation it has cannot be seen"
            elif id(x) not in self.made or name in blank:
                reason = "is on the meta device, and how to initialise it is not known"
            elif isinstance(x, nn.Parameter) and self.made[id(x)]._version != self.versions[id(x)]:
                reason = "was written to by more than its module's reset_parameters(), so its values are not known"
            elif isinstance(x, nn.Parameter) and x.is_floating_point() and x.dtype != self.dtype and id(x) in owners:
                reason = f"is {x.dtype}, and whether it was made so or converted later cannot be seen"
            else:
                continue
            raise UsageError(f"{where} {reason}; {_ADVICE}")


def _outermost_pretrained(model: nn.Module) -> list[nn.Module]:
    """The Hugging Face models in a model, not those inside of others."""
    if any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(model).__mro__):
        return [model]
    return [found for child in model.children() for found in _outermost_pretrained(child)]


def _meta_twin(module: Any) -> nn.Module:
    """The model that class and config give on the meta device; a model that was written to afterwards differs from
    it."""
    with torch.device("meta"):
        twin: nn.Module = type(module)(copy.deepcopy(module.config))
    return twin


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _given(state_dict: Mapping[str, Tensor] | None, model: nn.Module) -> dict[str, Tensor]:
    """A state dict under every name that its tensors have in the model; all that the model saves must be in it."""
    if state_dict is None:
        return {}
    wanted = model.state_dict(keep_vars=True)
    by_identity = {id(wanted[name]): tensor for name, tensor in state_dict.items() if name in wanted}
    unknown = sorted(set(state_dict) - set(wanted))
    missing = sorted(name for name, x in wanted.items() if id(x) not in by_identity)
    if unknown or missing:
        raise UsageError(f"state_dict does not fit the model: unknown {unknown[:5]}, missing {missing[:5]}")
    return {name: by_identity[id(x)] for name, x in _named(model).items() if id(x) in by_identity}


def _keep_plain_tensors(model: nn.Module, recording: Recording) -> None:
    """Give tensors that are plain attributes of modules their values: they are constants of the graph."""
    for path, module in model.named_modules():
        for name, x in list(vars(module).items()):
            if isinstance(x, Tensor) and x.is_meta:
                if recording.random(x):
                    raise UsageError(f"{path}.{name} is random, but neither a parameter nor a buffer: register it")
                vars(module)[name] = recording.take({name: (x, None)}, draw=False)[name]
