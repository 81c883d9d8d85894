"""Parameters that other ranks have, as of another stage, where a script names them: ``model.lm_head.weight``.

A script is the same on all ranks, and what it does to such a parameter happens where that is: here its shape and dtype
are known, a write does nothing, and what is computed from it has no values either. Where values are needed, for a
number or to write them into another tensor, an error names the ranks that have them. Neither ``named_parameters()`` nor
a state has it. Knows tensors; no modules and no engines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from whale.errors import UsageError

__all__ = ["Elsewhere"]


class Elsewhere(Tensor):
    """A parameter of which this rank has no part, or what is computed from one.

    Args:
        like: a tensor on the meta device.
        said: which parameter it is, and which ranks have it, for errors.
    """

    like: Tensor
    said: str

    @staticmethod
    def __new__(cls, like: Tensor, said: str) -> Elsewhere:
        """Make one."""
        made = torch.empty(0, device="meta").as_subclass(cls)
        made.like, made.said = like, said
        made._is_param = isinstance(like, nn.Parameter)  # by which torch knows parameters
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch on tensors without values."""
        if func == Tensor.grad.__set__:  # type: ignore[union-attr]  # optimizers update what has a gradient
            return None
        given, structure = pytree.tree_flatten((args, kwargs or {}))
        own = [x for x in given if isinstance(x, Elsewhere)]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            bare = [_without_values(x) if isinstance(x, Tensor) else x for x in given]
            versions = [x._version if isinstance(x, Tensor) else 0 for x in bare]
            inside, named = pytree.tree_unflatten(bare, structure)
            try:
                result = func(*inside, **named)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                if isinstance(error, TypeError) and "meta" not in str(error):  # of wrong arguments
                    raise
                raise _without(own[0], func) from error
            for x, like, version in zip(given, bare, versions, strict=True):
                if isinstance(x, Tensor) and not isinstance(x, Elsewhere) and like._version != version:
                    raise _without(own[0], func)
        known = {id(x.like): x for x in own}
        return pytree.tree_map_only(
            Tensor, lambda x: known[id(x)] if id(x) in known else Elsewhere(x, own[0].said), result
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Its shape, and which ranks have it."""
        return f"<{tuple(self.like.shape)} {str(self.like.dtype).removeprefix('torch.')}: {self.said}>"

    def __deepcopy__(self, memo: Any) -> Elsewhere:
        """The same, which has no values of its own."""
        return self


def _without_values(x: Tensor) -> Tensor:
    return x.like if isinstance(x, Elsewhere) else torch.empty_like(x, device="meta")


def _without(x: Elsewhere, func: Any) -> UsageError:
    return UsageError(
        f"{getattr(func, '__name__', 'this')} needs values of {x.said}: do it in a loop over "
        "model.named_parameters(), which has those of this rank, or with model.full_state_dict(), which every rank "
        "must call"
    )
