"""torch's tensors as elements of files, and back: their dtypes, their bits, and parts of parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whale.checkpoint.format import Intervals
from whale.checkpoint.reader import Array, segments
from whale.errors import UsageError

__all__ = ["DTYPES", "dtype_name", "dtype_of", "elements", "taken", "tensor_of"]

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""By their names in safetensors."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, what: object) -> str:
    """The name of a dtype in safetensors. Raises `UsageError` if it has none."""
    if dtype not in _NAMES:
        raise UsageError(f"{what} has {dtype}, which files of safetensors cannot hold")
    return _NAMES[dtype]


def dtype_of(tensor: Tensor, what: object) -> str:
    """The name of a tensor's dtype in safetensors. Raises `UsageError` if it has none, or if its elements are not there
    one after the other."""
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        kind = "on the device meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout)
        raise UsageError(f"{what} is a tensor that is {kind}, which files of safetensors cannot hold: give a dense one")
    return dtype_name(tensor.dtype, what)


def elements(tensor: Tensor) -> Array:
    """The bits of a tensor's elements on the host; in the same memory, if they are there and contiguous."""
    made = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    flat = made.reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"u{made.element_size()}").reshape(tuple(made.shape))


def tensor_of(found: Array, dtype: str) -> Tensor:
    """The tensor with these bits, in the same memory."""
    flat = torch.from_numpy(found.reshape(-1).view("u1"))
    return flat.view(DTYPES[dtype]).view(found.shape)


def taken(local: Tensor, own: Intervals, at: Intervals) -> Tensor:
    """Take the part *at* out of the part of a tensor that a rank has."""
    for dim, (target, source) in enumerate(zip(at, own, strict=True)):
        if target != source:
            pieces = [local.narrow(dim, meet.source, meet.size) for meet in segments(target, source)]
            local = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return local
