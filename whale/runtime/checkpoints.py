"""``torch.distributed.checkpoint.state_dict`` on parallel models: it knows no parts of tensors but torch's own, and
expects parameters in every group of an optimizer. Knows state dicts; no engines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import state_dict as torch_states
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from whale.errors import UsageError
from whale.runtime.shard_tensor import ShardTensor

__all__ = ["attend_checkpoints"]

States = dict[str, Any]


def attend_checkpoints(refuse: Callable[[Optimizer, UsageError], None]) -> None:
    """Look at the state dicts that torch makes and loads from now on; *refuse* tells ranks that wait for this one."""
    for name, around in (
        ("_maybe_full_or_cpu_state_dict", _refusing_parts),
        ("_unflatten_optim_state_dict", _without_empty_groups),
        ("_split_optim_state_dict", functools.partial(_with_own_groups, refuse)),
    ):
        if hasattr(torch_states, name):
            setattr(torch_states, name, around(getattr(torch_states, name)))


def _refusing_parts(gather: Callable[[States, Any], States]) -> Callable[[States, Any], States]:
    """The function that makes tensors whole if it is asked to."""

    @functools.wraps(gather)
    def refusing_parts(state_dict: States, info: Any) -> States:
        if info.full_state_dict and any(isinstance(x, ShardTensor) for x in pytree.tree_leaves(state_dict)):
            raise UsageError(
                "StateDictOptions(full_state_dict=True) does not gather the parts of a parallel model: take "
                "model.full_state_dict() for the model; for an optimizer leave it out, save the parts with "
                "torch.distributed.checkpoint, and make one file of them with its dcp_to_torch_save"
            )
        return gather(state_dict, info)

    return refusing_parts


def _without_empty_groups(unflatten: Callable[..., States]) -> Callable[..., States]:
    """The function that sorts states by name into an optimizer's groups, which reads the first parameter of each."""

    @functools.wraps(unflatten)
    def without_empty_groups(optim: Optimizer, *args: Any, **kwargs: Any) -> States:
        groups = optim.param_groups
        has_some = [any(x.numel() for x in group["params"]) for group in groups]
        optim.param_groups = [group for group, some in zip(groups, has_some, strict=True) if some]
        try:
            found = unflatten(optim, *args, **kwargs)
        finally:
            optim.param_groups = groups
        filled = iter(found["param_groups"])
        return {
            **found,
            "param_groups": [next(filled) if some else group for group, some in zip(groups, has_some, strict=True)],
        }

    return without_empty_groups


def _with_own_groups(
    refuse: Callable[[Optimizer, UsageError], None], split: Callable[..., States]
) -> Callable[..., States]:
    """The function that finds the states of an optimizer's groups in a state dict. A distributed checkpoint has the
    groups of one rank, where names do not say whose they are."""

    @functools.wraps(split)
    def with_own_groups(model: Any, optim: Optimizer, *args: Any, **kwargs: Any) -> States:
        found = split(model, optim, *args, **kwargs)
        for own, group in zip(optim.param_groups, found.get("param_groups", ()), strict=False):
            if own["params"] and (missing := sorted(own.keys() - group.keys())):
                error = UsageError(
                    f"the optimizer's state has no {missing[0]!r} for parameters that this rank has, and another rank "
                    "has not: save and load it with StateDictOptions(flatten_optimizer_state_dict=True)"
                )
                refuse(optim, error)
                raise error
        return found

    return with_own_groups
