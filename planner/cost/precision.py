"""The number types of a run, as ``--precision`` names them: what activations, products and optimizer states take.

Data only; the costs are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from whale.errors import UsageError
from whale.ir.cluster import DeviceType
from whale.ir.profile import ModelProfile

__all__ = [
    "AUTOCAST",
    "BY_DTYPE",
    "DTYPES",
    "PRECISIONS",
    "Precision",
    "executed",
    "mixed_precision_of",
    "own_precision",
    "precision_named",
]

KernelKind = Literal["products", "attention", "convolutions"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A number type, or a mixture.

    Attributes:
        name: as in ``--precision``.
        element_bytes: of activations and of the weights that kernels read.
        products: number types in which matrix products run, the first that a device has.
        attention: the same for attention, which float8 leaves in bfloat16.
        convolutions: the same for convolutions.
        mixed: whether float32 master weights stand beside the weights.
        autocast: whether it is that of a model under ``torch.autocast``, as Whale runs ``parallelize(precision=)``:
            elements are float32, as parameters, gradients and states are, and what is cast has other bytes.
    """

    name: str
    element_bytes: int
    products: tuple[str, ...]
    attention: tuple[str, ...]
    convolutions: tuple[str, ...]
    mixed: bool
    autocast: bool = False

    def refuse_without(self, device_types: Iterable[DeviceType]) -> None:
        """Refuse accelerators that have float16 and no bfloat16, as before NVIDIA's Ampere, for a run in bfloat16:
        they emulate it, more slowly than float32.

        Raises:
            UsageError: names them, and what to use.
        """
        if self.products[0] == "bfloat16" and (type_ := _without_bfloat16(device_types)):
            raise UsageError(f"{type_.name} has no bfloat16; use fp16, or leave such devices out")

    def rate(self, device: DeviceType, kernel: KernelKind = "products") -> tuple[float, str]:
        """FLOP/s at the device's peak for one kind of kernel, and the number type that gives it."""
        listed = dict(device.rates)
        wanted: tuple[str, ...] = getattr(self, kernel)
        found = next((dtype for dtype in wanted if dtype in listed), None)
        return (device.speed("float32"), "float32") if found is None else (listed[found], found)


def _precision(
    name: str,
    element_bytes: int,
    products: tuple[str, ...],
    *,
    attention: tuple[str, ...] = (),
    convolutions: tuple[str, ...] = (),
    mixed: bool,
) -> Precision:
    """Attention and convolutions run in the number types of products unless named."""
    return Precision(
        name=name,
        element_bytes=element_bytes,
        products=products,
        attention=attention or products,
        convolutions=convolutions or products,
        mixed=mixed,
    )


_HALF, _TF32 = ("bfloat16", "float16"), ("tfloat32", "float32")
PRECISIONS = {
    precision.name: precision
    for precision in (
        _precision("fp64", 8, ("float64",), mixed=False),
        _precision("fp32", 4, ("float32",), convolutions=_TF32, mixed=False),
        _precision("tf32", 4, _TF32, mixed=False),
        _precision("fp16", 2, ("float16",), mixed=True),
        _precision("bf16", 2, _HALF, mixed=True),
        _precision("fp8", 2, ("float8", *_HALF), attention=_HALF, convolutions=_HALF, mixed=True),
    )
}
"""Precisions by name. ``fp32`` is PyTorch's default for float32 tensors: matrix products in float32
(``torch.backends.cuda.matmul.allow_tf32`` is False), convolutions in TF32 if the device supports it
(``torch.backends.cudnn.allow_tf32`` is True). ``tf32`` is float32 with both allowed, as after
``torch.set_float32_matmul_precision("high")``, and in NVIDIA's containers."""

AUTOCAST = {name: replace(PRECISIONS[name], element_bytes=4, mixed=False, autocast=True) for name in ("bf16", "fp16")}
"""Precisions of ``torch.autocast``, by name."""

BY_DTYPE = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Names of precisions by a model's dtype. (Without mixed precision: a model runs in its own dtype.)"""

DTYPES = {name: dtype for dtype, name in BY_DTYPE.items()}
"""Number types by the name of a precision."""


ALIASES = {**BY_DTYPE, "float8": "fp8", "tfloat32": "tf32"}
"""Other names of precisions."""


def _without_bfloat16(device_types: Iterable[DeviceType]) -> DeviceType | None:
    """The first of these accelerators that has float16 and no bfloat16."""
    for type_ in device_types:
        known = dict(type_.rates)
        if "float16" in known and "bfloat16" not in known and not type_.is_processor:
            return type_
    return None


def mixed_precision_of(device_types: Iterable[DeviceType]) -> str:
    """The precision in which such accelerators train beside float32 if none is asked for."""
    return "fp16" if _without_bfloat16(device_types) else "bf16"


def own_precision(profile: ModelProfile) -> str:
    """The precision in which a profile's model runs if none is asked for."""
    return profile.autocast or BY_DTYPE.get(profile.precision, "fp32")


def executed(name: str, autocast: str) -> Precision:
    """The precision of a run by Whale: a model's own, or that of ``torch.autocast`` under which its profile was
    captured.

    Raises:
        UsageError: there is none of that name, or the profile is of another.

    >>> executed("bf16", "").element_bytes, executed("bf16", "bf16").element_bytes
    (2, 4)
    """
    number = precision_named(name)
    if autocast and number.name != autocast:
        raise UsageError(
            f"the profile was captured under torch.autocast in {autocast}, but the precision is {name}; make a profile "
            "for that one"
        )
    return AUTOCAST[autocast] if autocast else number


def precision_named(name: str) -> Precision:
    """The precision of that name, or of the number type of that name.

    Raises:
        UsageError: there is none.

    >>> precision_named("bfloat16").name, precision_named("tf32").products
    ('bf16', ('tfloat32', 'float32'))
    """
    name = ALIASES.get(name, name)
    if name not in PRECISIONS:
        raise UsageError(f"unknown precision {name!r}; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
