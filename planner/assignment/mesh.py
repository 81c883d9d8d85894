"""The mesh of one stage: the coarsest mesh that expresses the annotations of all its regions.

Objective: the fewest axes. Constraints: the product of the axes is the stage's degree; an inner scope subdivides the
devices of the outer one, so each numbered scope must cover whole axes; a scope's operators use the same axes in
everything nested in it. Each region requires *cuts* of the device order at certain strides. A mesh exists if and only
if the strides of all regions form a chain in which each divides the next, and then that chain is the mesh: optimal, in
time linear in the regions. This module knows strategies and numbers only: no device, no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm, prod
from typing import NamedTuple

from whale.errors import AnnotationError
from whale.ir.strategy import REPLICAS, RegionRole, Scope, ScopePath, Strategy, region_of

__all__ = ["Mesh", "Needs", "lay_out", "needs_of"]


class Needs(NamedTuple):
    """Degree that the regions of a stage require: a multiple of ``multiple``, and all remaining devices if
    ``takes_rest``."""

    multiple: int
    takes_rest: bool


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the axes, outermost first, none of them 1, and the role of each axis for each region."""

    sizes: tuple[int, ...]
    roles: dict[str, tuple[RegionRole, ...]]


class _Factor(NamedTuple):
    """An axis factor: ``size`` consecutive positions in one role; ``free`` if no annotation fixes its bounds."""

    size: int
    role: RegionRole
    free: bool


@dataclass
class _Region:
    """A scope and the scopes directly in it."""

    strategy: Strategy | None
    children: dict[Scope, _Region] = field(default_factory=dict)

    def multiple(self) -> int:
        """Number of devices of the numbered scopes from this one inwards; any multiple of it is valid."""
        degree = 1 if self.strategy is None else self.strategy.degree or 1
        return degree * self.multiple_of_children()

    def multiple_of_children(self) -> int:
        return lcm(*(child.multiple() for child in self.children.values()))

    def takes_rest(self) -> bool:
        unnumbered = self.strategy is not None and self.strategy.degree is None
        return unnumbered or any(child.takes_rest() for child in self.children.values())


def needs_of(regions: Iterable[ScopePath], default: Strategy | None = None) -> Needs:
    """Return the degree that a stage with these regions requires.

    Args:
        regions: scope paths below the stage, outer to inner; the empty path has the operators without an annotation.
        default: the strategy of those operators; only its number, if any, is a requirement.

    >>> split = Scope(strategy=Strategy(kind="split", degree=4), region="a")
    >>> replicate = Scope(strategy=Strategy(kind="replicate"), region="b")
    >>> needs_of([(), (replicate, split)])
    Needs(multiple=4, takes_rest=True)
    """
    plain = {_without_clusters(path) for path in regions}
    tree = _tree(plain)
    multiple = tree.multiple()
    if () in plain and default is not None and default.degree is not None:
        multiple = lcm(multiple, default.degree)
    return Needs(multiple, tree.takes_rest())


def lay_out(regions: Sequence[ScopePath], degree: int, *, owner: str, default: Strategy | None = None) -> Mesh:
    """Return the mesh of a stage of *degree* devices.

    A numbered scope with more devices than its nest needs is replicated over them, as replicas outside of it. An
    operator between two scopes, such as one in ``replicate(2)`` but outside the ``split(4)`` in it, is replicated over
    the devices that the inner one divides.

    Args:
        regions: scope paths below the stage, outer to inner.
        degree: number of devices.
        owner: how to name the stage in errors.
        default: the strategy of the empty path; None replicates it.

    Raises:
        AnnotationError: degrees that do not fit *degree*, two scopes without a number in a nest, or regions whose cuts
            of the devices fit no single mesh.

    >>> def scope(kind, n): return Scope(strategy=Strategy(kind=kind, degree=n), region=f"{kind}{n}")
    >>> mesh = lay_out([(scope("replicate", 2), scope("split", 4)), (scope("split", 8),)], 8, owner="stage(8)")
    >>> mesh.sizes, mesh.roles["split4"], mesh.roles["split8"]
    ((2, 4), ('replicate', 'split'), ('split', 'split'))
    """
    annotated = {path: _without_clusters(path) for path in regions}
    _check(annotated.values(), degree, owner, default if () in annotated.values() else None)
    factors: dict[ScopePath, tuple[_Factor, ...]] = {}
    _fill(_tree(annotated.values()), degree, (), (), factors)
    if () in annotated.values() and default is not None:
        factors[()] = _repeated(degree, default.degree or degree, default, "")
    strides = _chain({path: _strides(run) for path, run in factors.items()}, degree, owner)
    sizes = tuple(outer // inner for outer, inner in pairwise(strides))
    roles = {region_of(path): _roles(factors[plain], strides) for path, plain in annotated.items()}
    if "" not in roles:
        roles[""] = _roles((_Factor(degree, REPLICAS, True),), strides)
    return Mesh(sizes=sizes, roles=roles)


def _without_clusters(path: ScopePath) -> ScopePath:
    return tuple(scope for scope in path if not scope.strategy.chooses_devices)


def _tree(regions: Iterable[ScopePath]) -> _Region:
    root = _Region(None)
    for path in regions:
        node = root
        for scope in _without_clusters(path):
            node = node.children.setdefault(scope, _Region(scope.strategy))
    return root


def _check(regions: Iterable[ScopePath], degree: int, owner: str, default: Strategy | None) -> None:
    """Check that the degrees fit; errors show the nest that the user wrote.

    All regions together need the least common multiple of the nests' products, so it fits if each nest does.
    """
    for path in regions:
        nest = " > ".join(str(scope.strategy) for scope in path)
        unnumbered = [scope.strategy for scope in path if scope.strategy.degree is None]
        if len({(strategy.kind, strategy.dim) for strategy in unnumbered}) > 1:
            raise AnnotationError(
                f"{nest} in {owner}: neither {unnumbered[0]} nor {unnumbered[1]} has a number, so it is not said how "
                f"they divide the devices; give one of them a number"
            )
        degrees = [scope.strategy.degree for scope in path if scope.strategy.degree is not None]
        needed = prod(degrees)
        if degree % needed:
            product = f"{' x '.join(map(str, degrees))} = {needed}" if len(degrees) > 1 else str(needed)
            raise AnnotationError(
                f"{nest} in {owner} needs {product} devices, which does not divide the {degree} that it has; use "
                f"degrees whose product divides {degree}, or give it a multiple of {needed} devices"
            )
    if default is not None and default.degree is not None and degree % default.degree:
        raise AnnotationError(
            f"the default strategy {default} does not divide the {degree} devices of {owner}; leave out its number, or "
            f"annotate the operators there"
        )


def _fill(
    node: _Region,
    available: int,
    path: ScopePath,
    outer: tuple[_Factor, ...],
    found: dict[ScopePath, tuple[_Factor, ...]],
) -> None:
    """Record the factors of every scope path from *node* inwards, which has *available* devices inside the factors
    *outer*."""
    inside = node.multiple_of_children()
    if node.strategy is None:
        run, inside = outer, available
    elif node.strategy.degree is None:
        run = (*outer, *_repeated(available // inside, available // inside, node.strategy, region_of(path)))
    else:
        degree = node.strategy.degree
        if any(child.takes_rest() for child in node.children.values()):
            inside = available // degree
        run = (*outer, *_repeated(available // inside, degree, node.strategy, region_of(path)))
    found[path] = (*run, _Factor(inside, REPLICAS, True))
    for scope, child in node.children.items():
        _fill(child, inside, (*path, scope), run, found)


def _repeated(available: int, degree: int, strategy: Strategy, region: str) -> tuple[_Factor, ...]:
    return (_Factor(available // degree, REPLICAS, True), _Factor(degree, strategy.role(region), False))


def _strides(run: Sequence[_Factor]) -> frozenset[int]:
    """Strides at which the region cuts the order of devices: between two factors, unless one is free and their roles
    are equal."""
    wide = [factor for factor in run if factor.size > 1]
    stride, strides = 1, set()
    for outer, inner in zip(reversed(wide[:-1]), reversed(wide[1:]), strict=True):
        stride *= inner.size
        if outer.role != inner.role or not (outer.free or inner.free):
            strides.add(stride)
    return frozenset(strides)


def _chain(strides_of: dict[ScopePath, frozenset[int]], degree: int, owner: str) -> list[int]:
    """All strides, from *degree* down to 1."""
    cut_by = {stride: path for path, strides in strides_of.items() for stride in strides}
    chain = sorted({degree, 1, *cut_by}, reverse=True)
    for outer, inner in pairwise(chain):
        if outer % inner:
            nests = [" > ".join(str(scope.strategy) for scope in cut_by[stride]) for stride in (outer, inner)]
            raise AnnotationError(
                f"{nests[0]} and {nests[1]} in {owner} cut its {degree} devices into groups of {outer} and of {inner}, "
                f"and no mesh has both, because {inner} does not divide {outer}; nest them in the same order, or use "
                f"degrees that divide each other"
            )
    return chain


def _roles(run: Sequence[_Factor], strides: Sequence[int]) -> tuple[RegionRole, ...]:
    """The role of each axis: that of the factor which covers it."""
    bounds: list[tuple[int, RegionRole]] = []  # the stride just inside each factor, outermost first
    inner = prod(factor.size for factor in run)
    for factor in run:
        inner //= factor.size
        if factor.size > 1:
            bounds.append((inner, factor.role))
    found: list[RegionRole] = []
    for axis_stride in strides[1:]:
        found.append(next(role for bound, role in bounds if bound <= axis_stride))
    return tuple(found)
