"""The number types of a run, as ``--precision`` names them: what activations, products and optimizer states take.

Data only; the costs are elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.errors import UsageError
from whale.ir.cluster import DeviceType

__all__ = ["BY_DTYPE", "PRECISIONS", "Precision", "precision_named"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A number type, or a mixture.

    Attributes:
        name: as in ``--precision``.
        element_bytes: of activations and of the weights that kernels read.
        products: number types in which matrix products run, the first that a device has.
        attention: the same for attention, which float8 leaves in bfloat16.
        mixed: whether float32 master weights stand beside the weights.
    """

    name: str
    element_bytes: int
    products: tuple[str, ...]
    attention: tuple[str, ...]
    mixed: bool

    def rate(self, device: DeviceType, *, attention: bool = False) -> tuple[float, str]:
        """FLOP/s at the device's peak and the number type that gives it."""
        listed = dict(device.rates)
        wanted = self.attention if attention else self.products
        found = next((dtype for dtype in wanted if dtype in listed), None)
        return (device.speed("float32"), "float32") if found is None else (listed[found], found)


_HALF = ("bfloat16", "float16")
PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(name="fp64", element_bytes=8, products=("float64",), attention=("float64",), mixed=False),
        Precision(
            name="fp32",
            element_bytes=4,
            products=("tfloat32", "float32"),
            attention=("tfloat32", "float32"),
            mixed=False,
        ),
        Precision(name="fp16", element_bytes=2, products=("float16",), attention=("float16",), mixed=True),
        Precision(name="bf16", element_bytes=2, products=_HALF, attention=_HALF, mixed=True),
        Precision(name="fp8", element_bytes=2, products=("float8", *_HALF), attention=_HALF, mixed=True),
    )
}
"""By name. ``fp32`` multiplies on tensor cores (TF32) where the device has them, as NVIDIA's containers and Megatron
do."""

BY_DTYPE = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""What the precision of a model is called by its number type. (No mixture: a model runs in the type that it has.)"""


ALIASES = {**BY_DTYPE, "float8": "fp8", "tf32": "fp32"}
"""What others call them."""


def precision_named(name: str) -> Precision:
    """The precision of that name, or of the number type of that name.

    Raises:
        UsageError: there is none.

    >>> precision_named("bfloat16").name, precision_named("tf32").name
    ('bf16', 'fp32')
    """
    name = ALIASES.get(name, name)
    if name not in PRECISIONS:
        raise UsageError(f"unknown precision {name!r}; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
