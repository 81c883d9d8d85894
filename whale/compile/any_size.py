"""Steps for batches of any size, from those that were compiled for two: a new length of sequences costs no compilation.

Compiled steps for two lengths, placed alike, differ in numbers alone, which are linear in the length
(:mod:`whale.compile.linear`), and the model's code does the same under conditions on it
(:mod:`whale.graph.size_conditions`). So a step for any length that fulfils them is made by putting numbers in. Where a
dim of that length is cut among ranks or micro-batches, only lengths between the two are made so, at which all shares
are whole: shares of others may be rounded in another way. Elsewhere a length may be several times longer or shorter;
beyond, other placements may be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from whale.compile.compilation import Compilation
from whale.compile.linear import OfSizes, UnlikeError, of_sizes
from whale.compile.rank_step import RankStep
from whale.compile.trace import Traced
from whale.graph.masks import LARGEST_MASK, mask_in_words
from whale.graph.size_conditions import SizeConditions, VaryingDims
from whale.runtime.local_program import LocalCode

__all__ = ["AnySize", "PlacedStep", "TracingAndPlacing"]

Shapes = Mapping[str, tuple[int, ...]]

_POINTS, _ATTEMPTS, _SIZES = 4, 16, 3
"""Limits: of traced models that are kept to be compared, of comparisons, and of sizes that vary independently."""

_FAR = 8
"""By how much a size may be larger or smaller than those that were compiled."""


class PlacedStep(NamedTuple):
    """A step of this rank, and the compilation of which it is."""

    compilation: Compilation
    step: RankStep


class TracingAndPlacing(NamedTuple):
    """Sources of what steps are compared with: none of it is done by ranks together.

    Attributes:
        trace: traces the model with a batch.
        place_like: the step of a traced model, with the placements of a compilation; None if it cannot have them.
        conditions: finds the conditions on sizes of a batch under which the model's code does the same.
    """

    trace: Callable[[Mapping[str, Any]], Traced]
    place_like: Callable[[Compilation, Traced], PlacedStep | None]
    conditions: Callable[[Mapping[str, Any], VaryingDims], SizeConditions | None]


def _cuts(compilation: Compilation) -> tuple[int, ...]:
    """The sizes of all axes along which something is cut among ranks or micro-batches."""
    size = compilation.analysis.factors.size
    return tuple(
        size(placement.factor)
        for stage in compilation.stages
        for choices in stage.choices.values()
        for choice in choices
        for placement in choice.outputs
        if placement.kind == "S"
    )


class _Varying(NamedTuple):
    """Dims of a batch that vary.

    ``between`` are their sizes in two batches, and in others between these, so that each differs from the last in one
    size.
    """

    dims: VaryingDims
    between: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class _Template:
    """Steps for all sizes. Where axes of these sizes are *cut*, of those between *lowest* and *highest* only."""

    shapes: Shapes
    dims: VaryingDims
    conditions: SizeConditions
    steps: OfSizes[tuple[RankStep, _Masks]]
    period: int
    lowest: tuple[int, ...]
    highest: tuple[int, ...]
    is_cut: bool

    def step(self, shapes: Shapes) -> RankStep | None:
        """The step for a batch of these shapes, if it is one of them."""
        sizes: dict[int, int] = {}
        for name, shape in shapes.items():
            for dim, size in enumerate(shape):
                number = self.dims.get((name, dim))
                if size != (self.shapes[name][dim] if number is None else sizes.setdefault(number, size)):
                    return None
        found = tuple(sizes[number] for number in range(len(sizes)))
        far = 1 if self.is_cut else _FAR
        for size, low, high in zip(found, self.lowest, self.highest, strict=True):
            if (size - low) % self.period or not low <= size * far or not size <= high * far:
                return None
        if not self.conditions.hold(found):
            return None
        step, masks = self.steps.make(found)
        return step if all(map(_is_equivalent, masks)) else None


@dataclass(kw_only=True)
class _Family:
    """Steps for batches that differ in sizes only."""

    points: list[tuple[Mapping[str, Any], Traced]] = field(default_factory=list)
    templates: list[_Template] = field(default_factory=list)
    attempts: int = 0


class AnySize:
    """Steps of one rank for batches of any size.

    Args:
        agreed: the numbers that all ranks have, from that of this one; all call it together.
    """

    def __init__(self, agreed: Callable[[int], list[int]]) -> None:
        self._agreed = agreed
        self._families: dict[Any, _Family] = {}

    def step(self, kind: Hashable, batch: Mapping[str, Any]) -> RankStep | None:
        """The step for a batch, if it need not be compiled; the same answer on all ranks.

        Args:
            kind: of the step, besides its batch.
            batch: by leaf name, with any value for numbers that the step takes as tensors.
        """
        family = self._families.get((kind, _form(batch)))
        shapes = _shapes(batch)
        for template in family.templates if family is not None else ():
            found = template.step(shapes)
            if found is not None:
                return found
        return None

    def learn(self, kind: Hashable, batch: Mapping[str, Any], placed: PlacedStep, sources: TracingAndPlacing) -> None:
        """Compare a compiled step with earlier ones of its kind. All ranks must call it, with the same batches.

        Args:
            kind: of the step, besides its batch.
            batch: for which it was compiled.
            placed: the step.
            sources: make what it is compared with.
        """
        batch = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in batch.items()}
        family = self._families.setdefault((kind, _form(batch)), _Family())
        known: dict[Any, SizeConditions | None] = {}
        for earlier, traced in reversed(family.points):
            varying = _varying(earlier, batch)
            if varying is None or family.attempts == _ATTEMPTS:
                continue
            family.attempts += 1
            dims = tuple(varying.dims.items())
            if dims not in known:
                known[dims] = sources.conditions(batch, varying.dims)
            template = self._template(batch, placed, traced, varying, known[dims], sources)
            if template is not None:
                family.templates.insert(0, template)
                if not template.is_cut:
                    family.points = []  # it serves their sizes
                    break
        family.points = [*family.points, (batch, placed.compilation.traced)][-_POINTS:]

    def _template(
        self,
        batch: Mapping[str, Any],
        placed: PlacedStep,
        first: Traced,
        varying: _Varying,
        conditions: SizeConditions | None,
        sources: TracingAndPlacing,
    ) -> _Template | None:
        """The steps for all sizes, as one is placed; None if there are more differences than numbers."""
        steps: OfSizes[tuple[RankStep, _Masks]] | None = None

        def point(sizes: tuple[int, ...]) -> PlacedStep:
            if sizes == varying.between[-1]:
                return placed
            traced = first if sizes == varying.between[0] else sources.trace(_batch_of(batch, varying, sizes))
            found = sources.place_like(placed.compilation, traced)
            if found is None:
                raise UnlikeError("operators")
            return found

        is_cut = True
        try:
            if conditions is None or not all(map(conditions.hold, varying.between)):
                raise UnlikeError("code")
            points = [(sizes, point(sizes)) for sizes in varying.between]
            is_cut = any(_cuts(one.compilation) != _cuts(placed.compilation) for _, one in points)
            further = _between(varying, of_sizes(_steps(points)).period) if is_cut else _beyond(varying)
            # Numbers that are products of sizes are not linear at a further point.
            points += [(sizes, point(sizes)) for sizes in islice(filter(conditions.hold, further), 1)]
            if len(points) > len(varying.between):
                steps = of_sizes(_steps(points))
        except Exception:  # whatever it is, such as a batch that the model does not take: each size can be compiled
            steps = None
        periods = self._agreed(0 if steps is None else steps.period)
        if steps is None or conditions is None or 0 in periods:
            return None
        return _Template(
            shapes=_shapes(batch),
            dims=varying.dims,
            conditions=conditions,
            steps=steps,
            period=lcm(*periods),
            lowest=tuple(map(min, zip(*varying.between, strict=True))),
            highest=tuple(map(max, zip(*varying.between, strict=True))),
            is_cut=is_cut,
        )


_Masks = tuple[tuple[str, LocalCode, tuple[Tensor, ...]], ...]
"""Masks of attentions that run without them: their equivalents, and what computes them."""


def _steps(
    points: Iterable[tuple[tuple[int, ...], PlacedStep]],
) -> list[tuple[tuple[int, ...], tuple[RankStep, _Masks]]]:
    root = nn.Module()
    return [
        (
            sizes,
            (
                placed.step,
                tuple(
                    (mask.words, LocalCode(root, mask.graph, runs_once=True), mask.constants)
                    for mask in placed.compilation.captured.masks
                ),
            ),
        )
        for sizes, placed in points
    ]


def _is_equivalent(mask: tuple[str, LocalCode, tuple[Tensor, ...]]) -> bool:
    """Whether a mask is, for other sizes too, what an attention computes without it."""
    words, code, constants = mask
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            size = code.once(*constants).numel()
        return size <= LARGEST_MASK and mask_in_words(code.once(*constants)) == words
    except Exception:  # of any type: there is no such mask for these sizes
        return False


def _between(varying: _Varying, period: int) -> Iterator[tuple[int, ...]]:
    """A combination in the middle, at which all shares are whole, if there is one."""
    first, last = varying.between[0], varying.between[-1]
    low, high = tuple(map(min, first, last)), tuple(map(max, first, last))
    counts = [(stop - start) // period // 2 for start, stop in zip(low, high, strict=True)]
    if all(counts):
        yield tuple(start + period * count for start, count in zip(low, counts, strict=True))


def _beyond(varying: _Varying) -> Iterator[tuple[int, ...]]:
    """Combinations of larger sizes, of smaller ones, and of those in the middle, each size another one than before."""
    ends = list(zip(varying.between[0], varying.between[-1], strict=True))
    yield tuple(max(end) + abs(end[1] - end[0]) for end in ends)
    yield tuple(min(end) - max(1, abs(end[1] - end[0]) // 2) for end in ends)
    yield tuple(sum(end) // 2 for end in ends)


def _shapes(batch: Mapping[str, Any]) -> Shapes:
    """The shapes of a batch's tensors, by leaf name."""
    return {name: tuple(x.shape) for name, x in batch.items() if isinstance(x, Tensor)}


def _form(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """The common part of batches that differ in sizes only."""
    return tuple((name, x.dtype, x.dim()) if isinstance(x, Tensor) else (name, repr(x)) for name, x in batch.items())


def _varying(one: Mapping[str, Any], other: Mapping[str, Any]) -> _Varying | None:
    """The dims that differ between two batches; those with equal sizes in both vary together. None if there are none,
    or too many sizes."""
    dims: dict[tuple[str, int], int] = {}
    pairs: dict[tuple[int, int], int] = {}
    shapes, others = _shapes(one), _shapes(other)
    for name, shape in shapes.items():
        for dim, pair in enumerate(zip(shape, others[name], strict=True)):
            if pair[0] != pair[1]:
                dims[name, dim] = pairs.setdefault(pair, len(pairs))
    if not 0 < len(pairs) <= _SIZES:
        return None
    between = [tuple(pair[n < changed] for n, pair in enumerate(pairs)) for changed in range(len(pairs) + 1)]
    return _Varying(dims, tuple(between))


def _batch_of(batch: Mapping[str, Any], varying: _Varying, sizes: tuple[int, ...]) -> dict[str, Any]:
    """A batch like another one, without data, with these sizes."""
    made = dict(batch)
    for name, shape in _shapes(batch).items():
        own = [sizes[varying.dims[name, d]] if (name, d) in varying.dims else size for d, size in enumerate(shape)]
        made[name] = torch.empty(own, dtype=batch[name].dtype, device="meta")
    return made
