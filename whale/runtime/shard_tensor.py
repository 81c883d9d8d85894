"""A tensor of a state dict that says which part of the whole one this rank has.

Its shape is the whole tensor's, its data the rank's part, so that it cannot be taken for either. Copies and elementwise
arithmetic with other parts of the same place act on the part; ``torch.distributed.checkpoint`` saves, loads and
reshards it; everything else is refused. Knows stretches of dims; no modules and no process groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils import _pytree as pytree

from whale.errors import UsageError
from whale.runtime.local_program import Intervals
from whale.runtime.stage import Rectangle, rectangles

__all__ = ["ShardTensor"]

aten = torch.ops.aten
_COPIES = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
}


class ShardTensor(Tensor):
    """This rank's part of a tensor.

    Attributes:
        local: the part.
        intervals: which stretches of each dim of the whole tensor it is.
    """

    local: Tensor
    intervals: Intervals

    @staticmethod
    def __new__(cls, local: Tensor, shape: tuple[int, ...], intervals: Intervals) -> ShardTensor:
        """A tensor of the whole shape, without data."""
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)

    def __init__(self, local: Tensor, shape: tuple[int, ...], intervals: Intervals) -> None:
        self.local, self.intervals = local.detach(), intervals

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):  # asynchronous checkpoints
            func, args = aten.empty_like.default, args[:1]
        flat, spec = pytree.tree_flatten((args, dict(kwargs or {})))
        parts = [x for x in flat if isinstance(x, ShardTensor)]
        alike = all((x.shape, x.intervals) == (parts[0].shape, parts[0].intervals) for x in parts)
        plain = all(not isinstance(x, Tensor) or isinstance(x, ShardTensor) or x.dim() == 0 for x in flat)
        if not (alike and plain and (func in _COPIES or torch.Tag.pointwise in func.tags)):
            raise UsageError(
                f"{func} on {parts[0]!r}: it is a part of a tensor; use model.full_state_dict() for whole tensors, or "
                "torch.distributed.checkpoint to save and load parts"
            )
        place = parts[0]
        inner_args, inner_kwargs = pytree.tree_unflatten(
            [x.local if isinstance(x, ShardTensor) else x for x in flat], spec
        )
        result = func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable:
            return args[0]
        return pytree.tree_map(
            lambda x: ShardTensor(x, tuple(place.shape), place.intervals) if isinstance(x, Tensor) else x, result
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stretches = ", ".join("+".join(f"{a}:{b}" for a, b in dim) or "none" for dim in self.intervals)
        return f"ShardTensor([{stretches}] of {tuple(self.shape)}, {self.dtype}, {self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refused("torch.save would write it as if it were the model's")

    def storage(self) -> NoReturn:
        """Refused: files of tensors, such as those of safetensors, are written from it."""
        raise self._refused("it has no memory of its whole shape")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: it would be taken for the whole tensor."""
        raise self._refused("it has no array of its whole shape")

    def _refused(self, why: str) -> UsageError:
        return UsageError(
            f"{self!r} is this rank's part of a tensor: {why}; save model.full_state_dict(), which all ranks call, or "
            "use torch.distributed.checkpoint on model.state_dict(), for an optimizer on "
            "get_optimizer_state_dict(model, optimizer)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        return ShardTensor(self.local.clone(), tuple(self.shape), self.intervals)

    # What torch.distributed.checkpoint asks of a tensor in parts (torch.distributed._checkpointable)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=offset, sizes=torch.Size([span.stop - span.start for span in box.whole]))
            for offset, box in self._rectangles().items()
        ]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.local[self._rectangles()[index.offset].part]

    def _rectangles(self) -> dict[torch.Size, Rectangle]:
        """The rectangles of which the part is made, by their place in the whole tensor."""
        return {torch.Size([span.start for span in box.whole]): box for box in rectangles(self.intervals)}
