"""Constraints of the search from the user's annotations.

A ``stage`` keeps its layers together, apart from those of the stage before it; ``replicate(n)`` and ``split(n)`` fix
the degrees of the stages that hold their layers, ``split(n)`` of experts the expert degree. What else cannot be said of
whole layers is refused. It knows scopes by module path, no module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod

from whale.errors import UsageError
from whale.ir.strategy import Scope, ScopePath, Strategy, cut_at_stage
from whale.planner.search import Degrees, Fixed

__all__ = ["fixed_by", "is_kept"]


def fixed_by(scopes: Mapping[str, ScopePath], paths: Sequence[str], experts: Sequence[Sequence[str]] = ()) -> Fixed:
    """The constraints that annotations are.

    Args:
        scopes: of annotated modules by path, as `whale.annotations.module_scopes` returns them.
        paths: the module of each layer of the chain.
        experts: of each layer, the modules of its experts.

    Raises:
        UsageError: an annotation of less than a layer, of layers that do not follow each other, or of a kind that the
            search does not know; says which.

    >>> stage = Scope(strategy=Strategy(kind="stage"), region="layers.[0-1]")
    >>> split = Scope(strategy=Strategy(kind="split", degree=4), region="layers.0")
    >>> fixed = fixed_by({"layers.0": (stage, split), "layers.1": (stage,)}, ["embed", "layers.0", "layers.1"])
    >>> fixed.starts, fixed.uncut, [(one.first, one.last, one.data, one.tensor) for one in fixed.degrees]
    ((), ((1, 3),), [(1, 2, None, 4)])
    """
    modules = {path for layer in experts for path in layer}
    for path in scopes:
        if path and path not in modules and not any(layer == path or layer.startswith(f"{path}.") for layer in paths):
            inside = next((layer for layer in paths if layer and path.startswith(f"{layer}.")), None)
            what = f"lies within the layer {inside}" if inside else "is no layer of the profile"
            raise UsageError(
                f"{path} is annotated, but {what}, and the search decides about whole layers, such as "
                f"{next((layer for layer in paths if layer), 'none')}; annotate a layer or several, or leave it out"
            )
    told = [_around(path, scopes) for path in paths]
    stages = [_stage(own) for own in told]
    uncut = []
    for stage, members in groupby(range(len(paths)), key=lambda layer: stages[layer]):
        if stage is not None:
            own = list(members)
            if any(one == stage for one in stages[own[-1] + 1 :]):
                raise UsageError(
                    f"the layers of the stage {stage.region} do not follow each other; annotate two stages"
                )
            uncut.append((own[0], own[-1] + 1))
    degrees = []
    pairs = zip(told, experts or [()] * len(paths), strict=True)
    all_degrees = [_all_degrees(own, scopes, its_experts) for own, its_experts in pairs]
    for (data, tensor, expert), members in groupby(range(len(paths)), key=all_degrees.__getitem__):
        if (data, tensor, expert) != (None, None, None):
            own = list(members)
            nest = " > ".join(map(str, told[own[0]]))
            degrees.append(Degrees(first=own[0], last=own[-1] + 1, data=data, tensor=tensor, expert=expert, told=nest))
    starts = tuple(first for first, _ in uncut[1:])  # what comes before the first stage may join it
    told_ways = {scope.strategy.experts for nest in scopes.values() for scope in nest} - {None}
    if len(told_ways) > 1:
        raise UsageError("split(experts='whole') and split(experts='cut'): the search shares all experts in one way")
    way = next(iter(told_ways), None)
    return Fixed(starts=starts, uncut=tuple(uncut), degrees=tuple(degrees), experts=way)


def _around(path: str, scopes: Mapping[str, ScopePath]) -> ScopePath:
    """The scopes of the innermost annotated module that a layer is, or lies in."""
    while path not in scopes and path:
        path = path.rpartition(".")[0]
    return scopes.get(path, ())


def _stage(path: ScopePath) -> Scope | None:
    cut = cut_at_stage(path)
    for scope in path:
        if scope.strategy.chooses_devices:
            raise UsageError(f"{scope}: the search chooses the devices of every stage; leave cluster(...) out")
    if cut.outer:
        raise UsageError(f"{cut.outer[0]} lies around {cut.stage}: the search knows replicas inside of stages only")
    if cut.stage is not None and cut.stage.strategy.recompute is not None:
        raise UsageError(f"{cut.stage}: the search chooses what each stage computes again; leave recompute out")
    for scope in path:
        if scope.strategy.state is not None:
            raise UsageError(f"{scope}: the search divides the state of each stage as --zero says; leave zero out")
        if scope.strategy.offload is not None:
            raise UsageError(f"{scope}: the search puts on hosts what --offload says; leave offload out")
        if scope.strategy.reduce is not None:
            raise UsageError(f"{scope}: all stages of a search make gradients as --reduce says; leave reduce out")
        if scope.strategy.distinct is not None:
            raise UsageError(f"{scope}: the search says itself which stages send distinct rows; leave distinct out")
    return cut.stage


def _all_degrees(
    path: ScopePath, scopes: Mapping[str, ScopePath], experts: Sequence[str]
) -> tuple[int | None, int | None, int | None]:
    """The data, tensor and expert degree that the nests of a layer and of its experts fix; None: open."""
    inside = next((scopes[module] for module in experts if module in scopes), None)
    if inside is None:
        data, tensor = _degrees(path)
        return data, tensor, 1 if experts and (data, tensor) != (None, None) else None
    own, inner = cut_at_stage(path).inner, cut_at_stage(inside).inner
    if not _only_replicas(own) or not _is_split(inner):
        nests = (" > ".join(str(scope.strategy) for scope in one) or "nothing" for one in (own, inner))
        raise UsageError(
            f"{next(nests)}, and for the experts in it {next(nests)}: the search knows experts that are split, or "
            "split inside of replicate, where all else is replicated"
        )
    expert = inner[-1].strategy.degree
    return inner[0].strategy.degree if len(inner) > 1 else None if expert else 1, 1, expert


def _degrees(path: ScopePath) -> tuple[int | None, int | None]:
    """The data and tensor degree that a nest fixes; None: open."""
    cut = cut_at_stage(path)
    along = next((scope.strategy for scope in cut.inner if scope.strategy.dim is not None), None)
    if along is not None:
        raise UsageError(f"{along}: the search knows no split along a dim; plan it with whale plan, or leave dim out")
    if not _only_replicas(cut.inner) and not _is_split(cut.inner):
        nest = " > ".join(str(scope.strategy) for scope in cut.inner)
        raise UsageError(f"{nest}: the search knows replicate, split, and split inside of replicate")
    tensor = next((scope.strategy.degree for scope in cut.inner if scope.strategy.shards_operators), None)
    replicas = [scope.strategy.degree for scope in cut.inner if scope.strategy.divides_batch]
    data = prod(filter(None, replicas)) if replicas and None not in replicas else None
    if cut.inner and _only_replicas(cut.inner) and data is None:  # on all devices of the stage, and so split on none
        tensor = 1
    if len(cut.inner) == 1 and _is_split(cut.inner) and tensor is None:
        data = 1
    size = cut.stage.strategy.degree if cut.stage is not None else None
    if size is None:
        return data, tensor
    if data is None and tensor is not None and size % tensor == 0:
        data = size // tensor
    elif tensor is None and data is not None and size % data == 0:
        tensor = size // data
    if data is None or tensor is None or data * tensor != size:
        raise UsageError(
            f"{cut.stage} has {size} devices; say how they work together, as stage({size}), replicate({size}) "
            "does, or leave the number out"
        )
    return data, tensor


def _only_replicas(path: ScopePath) -> bool:
    return all(scope.strategy.divides_batch for scope in path)


def _is_split(path: ScopePath) -> bool:
    """Whether a nest is a split, or one inside of replicas."""
    return 0 < len(path) <= 2 and path[-1].strategy.shards_operators and _only_replicas(path[:-1])


def is_kept(strategy: Strategy, told: Sequence[Strategy]) -> bool:
    """Whether a plan that tells a module *told* keeps the strategy that it is annotated with.

    Which layers share a stage is not to be seen from one module, and not looked at.

    >>> split = Strategy(kind="split")
    >>> is_kept(split, [Strategy(kind="split", degree=2)]), is_kept(split, [Strategy(kind="replicate", degree=2)])
    (True, False)
    """
    if strategy.chooses_devices:
        return False
    how = (strategy.recompute, strategy.state, strategy.offload, strategy.reduce, strategy.distinct)
    if how != (None,) * 5:
        return any((one.recompute, one.state, one.offload, one.reduce, one.distinct) == how for one in told)
    if strategy.makes_stage or (strategy.divides_batch and strategy.degree is None):
        return True
    same = (one for one in told if (one.kind, one.dim) == (strategy.kind, strategy.dim))
    kept = [one for one in same if strategy.attention in (None, one.attention)]
    kept = [one for one in kept if strategy.experts in (None, one.experts)]
    return any(strategy.degree in (None, one.degree) for one in kept)
