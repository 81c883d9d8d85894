"""A model's profile as text: its chain, and of every kind of layer what one device computes, keeps and communicates.

Knows the data only: neither torch nor how a profile is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from whale.ir.profile import Kernel, LayerKind, LayerVariant, ModelProfile
from whale.ir.units import bytes_text, counted

__all__ = ["format_profile"]

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def format_profile(
    profile: ModelProfile, *, rows: int = 1, element_bytes: int | None = None, kernels: bool = False
) -> str:
    """The profile as a table, for a number of rows and bytes per element, else those of the model's number type.

    ``kernels`` lists those of every kind and degree too.
    """
    width = element_bytes or _BYTES.get(profile.precision, 4)
    return "\n".join(_lines(profile, rows, width, kernels))


def _lines(profile: ModelProfile, rows: int, width: int, kernels: bool) -> Iterator[str]:
    yield (
        f"{profile.name}: {len(profile.layers)} layers of {counted(len(profile.kinds), 'kind')}, at "
        f"{counted(rows, 'row')}, {width}-byte numbers"
    )
    runs = [(kind, len(list(run))) for kind, run in groupby(profile.layers)]
    yield "chain: " + ", ".join(f"{count} x {profile.kinds[kind].name}" for kind, count in runs)
    for layers, elements in profile.tied:
        yield f"tied: layers {', '.join(map(str, layers))} share {elements:,.0f} elements"
    for degree, reason in profile.refused:
        yield f"not at tensor degree {degree}: {reason}"
    columns = ("kind", "degree", "parameters", "GFLOP fwd", "GFLOP bwd", "kept", "sent on", "collectives fwd | bwd")
    table = [columns, *(_row(kind, variant, rows, width) for kind in profile.kinds for variant in kind.variants)]
    sizes = [max(len(row[i]) for row in table) for i in range(len(columns))]
    yield ""
    for row in table:
        yield "  ".join(
            cell.ljust(size) if i in (0, 7) else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ).rstrip()
    if kernels:
        for kind in profile.kinds:
            for variant in kind.variants:
                yield from _kernels(kind, variant, rows, width)


def _row(kind: LayerKind, variant: LayerVariant, rows: int, width: int) -> tuple[str, ...]:
    kept = sum(saved.size.total(rows, width) for saved in variant.saved)
    calls = []
    for found in (variant.forward_communications, variant.backward_communications):
        named = [f"{c.count} {c.kind} {bytes_text(c.size.total(rows, width))}" for c in found]
        calls.append(", ".join(named) or "none")
    return (
        kind.name,
        str(variant.tensor_degree),
        f"{variant.parameters:,.0f}",
        f"{_gflop(variant.forward, rows):,.3f}",
        f"{_gflop(variant.backward, rows):,.3f}",
        bytes_text(kept),
        bytes_text(kind.output.total(rows, width)),
        " | ".join(calls),
    )


def _gflop(kernels: tuple[Kernel, ...], rows: int) -> float:
    return sum(kernel.flops(rows) * kernel.count for kernel in kernels) / 1e9


def _kernels(kind: LayerKind, variant: LayerVariant, rows: int, width: int) -> Iterator[str]:
    for name in ("forward", "backward"):
        yield f"\n{kind.name}, degree {variant.tensor_degree}, {name}:"
        for kernel in getattr(variant, name):
            dims = " x ".join(f"{size(rows):g}" for size in kernel.dims)
            marks = [mark for mark in ("split", "expert", "attention", "causal") if getattr(kernel, mark)]
            moved = [bytes_text(x.total(rows, width)) for x in (kernel.read, kernel.written)]
            size = f"{dims:28} reads {moved[0]:>10}, writes {moved[1]:>10}"
            yield f"  {kernel.name:45} {size}  {' '.join(marks)}".rstrip()
    yield f"\n{kind.name}, degree {variant.tensor_degree}, kept:"
    for saved in variant.saved:
        marks = [mark for mark in ("input", "split", "expert", "attention") if getattr(saved, mark)]
        yield f"  {saved.origin:45} {bytes_text(saved.size.total(rows, width)):>10}  {' '.join(marks)}".rstrip()
