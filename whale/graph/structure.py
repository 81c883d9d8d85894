"""The structure of a model's output: its tensors in order, and how to make an output of other tensors like them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from whale.errors import CaptureError

__all__ = ["Structure"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size)


@dataclass(frozen=True, kw_only=True)
class Structure:
    """An output of tuples, lists, dicts, named tuples and dataclasses, among them those of Hugging Face.

    ``leaves`` are numbers of tensors, or a value in a tuple of its own.
    """

    spec: pytree.TreeSpec
    leaves: tuple[int | tuple[Any], ...]

    @staticmethod
    def of(output: Any) -> tuple[Structure, list[Tensor]]:
        """The structure of an output, and its tensors.

        Raises:
            CaptureError: something in it is neither a tensor nor a plain value.
        """
        found, spec = pytree.tree_flatten_with_path(output, is_leaf=lambda x: isinstance(x, torch.Size))
        strange = {type(leaf) for _, leaf in found if is_dataclass(leaf) and not isinstance(leaf, type)}
        if strange:
            for kind in strange:
                pytree.register_dataclass(kind)
            return Structure.of(output)
        tensors: list[Tensor] = []
        leaves: list[int | tuple[Any]] = []
        for path, leaf in found:
            if isinstance(leaf, Tensor):
                leaves.append(len(tensors))
                tensors.append(leaf)
            elif isinstance(leaf, _PLAIN):
                leaves.append((leaf,))
            else:
                raise CaptureError(
                    f"the model's output{pytree.keystr(path)} is a {type(leaf).__name__}, which a step cannot return: "
                    "return tensors and plain values, in tuples, lists, dicts or dataclasses"
                )
        return Structure(spec=spec, leaves=tuple(leaves)), tensors

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """An output with these tensors."""
        leaves = [tensors[leaf] if isinstance(leaf, int) else leaf[0] for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)
