"""Conversion of a candidate to a plan for the executor: annotations by module path, ranks, axes and shares.

The first layer of a stage is annotated with ``stage(n)`` and the others follow it by the data flow. For a split, every
module that computes is annotated, with as few keys as possible; if experts are split, only they are. It decides
nothing, and knows a model only as a list of modules and the stages in which they compute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from whale.errors import UsageError
from whale.ir.cluster import Cluster, DeviceType
from whale.ir.plan import ClusterIdentity, ModelIdentity, Plan, PlanAxis, PlanStage, PlanState
from whale.ir.strategy import REPLICAS, SHARDS
from whale.planner.cost.stage import CostModel
from whale.planner.search import Candidate, StageChoice

__all__ = ["annotations_of", "plan_of", "split_shares"]

Annotations = Mapping[str, tuple[str, ...]]


def plan_of(
    candidate: Candidate,
    cluster: Cluster,
    *,
    batch: int,
    annotations: Annotations,
    model: ModelIdentity | None = None,
    shares: Sequence[tuple[float, ...]] | None = None,
) -> Plan:
    """The plan of a candidate, with the prediction that the search made.

    Args:
        candidate: of the search.
        cluster: that it was found for.
        batch: rows of the global batch.
        annotations: as `annotations_of` makes them.
        model: that it is for.
        shares: of each stage along its first axis ``split``, as `split_shares` makes them; None: equal.
    """
    uneven = shares or [()] * len(candidate.stages)
    ragged = bool(batch % candidate.micro_batches)
    plan = Plan(
        model=model,
        cluster=ClusterIdentity.of(cluster),
        world_size=len(cluster.devices),
        batch=batch,
        micro_batches=candidate.micro_batches,
        schedule=candidate.schedule,
        annotations=dict(annotations),
        stages=tuple(
            _plan_stage(stage, own, ragged, candidate.stages)
            for stage, own in zip(candidate.stages, uneven, strict=True)
        ),
    )
    return plan.with_prediction(candidate.prediction, candidate.workload)


def _plan_stage(
    stage: StageChoice, shares: tuple[float, ...], ragged: bool, stages: Sequence[StageChoice]
) -> PlanStage:
    """With its rows where they are not equal, or say how large a micro-batch is that does not divide the batch; with
    its rule of recompute, and what it has on the host, where any of *stages* has some."""
    axes = []
    if stage.data > 1:
        rows = stage.rows if ragged or len(set(stage.rows)) > 1 else ()
        axes.append(PlanAxis(name=REPLICAS, size=stage.data, role=REPLICAS, shares=rows))
    inner = [degree for degree in (stage.context, stage.tensor, stage.expert) if degree > 1]
    for number, size in enumerate(inner, start=1):
        name = SHARDS if number == 1 else f"{SHARDS}{number}"
        axes.append(PlanAxis(name=name, size=size, role=SHARDS, shares=shares if number == 1 else ()))
    return PlanStage(
        ranks=stage.ranks,
        axes=tuple(axes),
        recompute=stage.recompute if any(one.recompute != "none" for one in stages) else None,
        state=_plan_state(stage),
        offload=stage.offload if any(one.offload != "none" for one in stages) else None,
    )


def _plan_state(stage: StageChoice) -> PlanState | None:
    """How a stage divides its state, with shares of each of its ranks where there are any."""
    if stage.state is None or not stage.level:
        return None
    shares = stage.state.shares
    each = len(stage.ranks) // len(shares) if shares else 0
    return PlanState.of(replace(stage.state, shares=tuple(share for share in shares for _ in range(each))))


def split_shares(stage: StageChoice, prices: CostModel) -> tuple[float, ...]:
    """Proportions by the layer times of equal parts along the first axis ``split`` of a stage whose groups mix types of
    devices; else empty.

    All data slices have the same shares, so each part is as fast as its slowest device.
    """
    num = stage.context if stage.context > 1 else stage.tensor
    each = stage.size // num if stage.expert == 1 else 1
    parts: list[set[DeviceType]] = [set() for _ in range(num)]
    for place, rank in enumerate(stage.ranks):
        parts[place // each % num].add(prices.cluster.devices[rank].type)
    if len(set.union(*parts)) == 1:
        return ()
    layers, rows = Counter(prices.profile.layers[stage.first : stage.last]), max(stage.rows)

    def seconds(type_: DeviceType) -> float:
        each = {kind: prices.computation(kind, type_, stage.tensor, rows, context=stage.context) for kind in layers}
        return max(1e-12, sum(count * sum(each[kind]) for kind, count in layers.items()))

    spent = [max(map(seconds, types)) for types in parts]
    return tuple(round(max(spent) / one, 3) for one in spent) if max(spent) > min(spent) else ()


# --- annotations ------------------------------------------------------------------------------------------------------


def annotations_of(
    stages: Sequence[StageChoice],
    anchors: Sequence[str],
    places: Iterable[tuple[str, int]],
    experts: Sequence[Sequence[str]] = (),
    dim_along: Callable[[str], int | None] = lambda path: 1,
    ways: Mapping[int, str] | None = None,
) -> dict[str, tuple[str, ...]]:
    """The annotations with which a model without any becomes these stages.

    Args:
        stages: in the order of the pipeline.
        anchors: the module with which each stage begins.
        places: for what the model computes, the path of the module and the stage.
        experts: of each layer, the modules of its experts.
        dim_along: returns the dim of what comes into a module that context degrees cut; None: nothing has it, and it
            computes on all devices what each needs of it.
        ways: how devices share experts at an expert degree, where there are several ways.

    Raises:
        UsageError: a stage begins with no module, or with one that another stage needs too.

    >>> two = [
    ...     StageChoice(first=0, last=3, ranks=(0,), data=1, tensor=1, rows=(4,)),
    ...     StageChoice(first=3, last=6, ranks=(1, 2), data=1, tensor=2, rows=(4,)),
    ... ]
    >>> places = [("embed", 0), ("layers.0", 0), ("layers.1", 0), ("layers.2", 1), ("layers.3", 1), ("head", 1)]
    >>> annotations_of(two, ["embed", "layers.2"], places)
    {'embed': ('stage(1)',), 'layers.2': ('stage(2)', 'split(2)'), 'head': ('split(2)',), 'layers.3': ('split(2)',)}
    """
    of_experts = {
        path: _nest_of_experts(one, (ways or {}).get(one.expert))
        for one in stages
        for path in _experts_of(one, experts)
    }
    if len(stages) == 1:
        nest = _nest(stages[0], "", dim_along)
        return ({"": nest} if nest else {}) | _folded(of_experts)
    for index, anchor in enumerate(anchors):
        if not anchor or anchor in anchors[:index]:
            raise UsageError(
                f"layer {stages[index].first}, with which stage {index} would begin, has no module of its own to "
                "annotate"
            )
    found = {
        anchor: (f"stage({len(stage.ranks)})", *_nest(stage, anchor, dim_along))
        for anchor, stage in zip(anchors, stages, strict=True)
    }
    rest = _nests(stages, list(places), set(anchors), dim_along)
    return found | _folded(rest | of_experts)


def _experts_of(stage: StageChoice, experts: Sequence[Sequence[str]]) -> list[str]:
    """The modules of experts that a stage splits."""
    return [path for layer in experts[stage.first : stage.last] for path in layer] if stage.expert > 1 else []


def _nest_of_experts(stage: StageChoice, way: str | None) -> tuple[str, ...]:
    data = (f"replicate({stage.data})",) if stage.data > 1 else ()
    return (*data, f"split({stage.expert})" if way is None else f"split({stage.expert}, experts={way!r})")


def _nest(stage: StageChoice, path: str, dim_along: Callable[[str], int | None]) -> tuple[str, ...]:
    dim = dim_along(path) if stage.context > 1 else None  # which looks at the whole graph
    data = tuple(f"replicate({degree})" for degree in (stage.data, stage.expert) if degree > 1)
    cut = (f"split({stage.context}, dim={dim})",) if dim is not None else ()
    return (*data, *cut, *((f"split({stage.tensor})",) if stage.tensor > 1 else ()))


def _nests(
    stages: Sequence[StageChoice],
    places: Sequence[tuple[str, int]],
    anchors: set[str],
    dim_along: Callable[[str], int | None],
) -> dict[str, tuple[str, ...]]:
    """Annotation of each module that computes outside the anchors and differs from the module around it.

    A module gets the annotation common to all modules in it, or else that of its own operators. If these lie in stages
    with different splits, they are replicated over the batch, as without an annotation.
    """
    own: dict[str, set[int]] = {}
    below: dict[str, set[int]] = {}
    for path, stage in places:
        own.setdefault(path, set()).add(stage)
        while True:
            below.setdefault(path, set()).add(stage)
            if not path:
                break
            path = path.rpartition(".")[0]
    first = {_divided(stage): stage for stage in reversed(stages)}
    divided = [_divided(stage) for stage in stages]
    told: dict[str, tuple[int, ...]] = {}
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(below, key=_depth):
        around = told[path.rpartition(".")[0]] if path else ()
        where = below[path] if len({divided[stage] for stage in below[path]}) == 1 else own.get(path, set())
        wanted = {divided[stage] for stage in where}
        if not where:  # it computes nothing itself: its modules have different annotations
            told[path] = around
            continue
        told[path] = wanted.pop() if len(wanted) == 1 else ()
        if path in anchors:
            continue
        if told[path] != around:
            nest = _nest(first[told[path]], path, dim_along) if told[path] else ()
            found[path] = nest or ("replicate()",)
    return found


def _divided(stage: StageChoice) -> tuple[int, ...]:
    """How a stage divides more than rows among its devices; empty if it does not."""
    return (stage.data, stage.expert, stage.context, stage.tensor) if stage.tensor * stage.context > 1 else ()


def _depth(path: str) -> tuple[int, str]:
    return (path.count(".") + 1 if path else 0, path)


_NUMBER = re.compile(r"(^|.*\.)(\d+)($|\..*)")


def _folded(annotations: Annotations) -> dict[str, tuple[str, ...]]:
    """Merge paths with equal annotations that differ in their last number alone into one key with ranges.

    >>> _folded({"h.0": ("split(2)",), "h.1": ("split(2)",), "h.4": ("split(2)",), "head": ("split(2)",)})
    {'head': ('split(2)',), 'h.[0-1,4]': ('split(2)',)}
    """
    groups: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    found: dict[str, tuple[str, ...]] = {}
    for path, told in annotations.items():
        match = _NUMBER.fullmatch(path)
        if match is None or str(int(match[2])) != match[2]:
            found[path] = told
        else:
            groups.setdefault((match[1], match[3], told), []).append(int(match[2]))
    for (before, after, told), numbers in groups.items():
        numbers.sort()
        shown = str(numbers[0]) if len(numbers) == 1 else f"[{_ranges(numbers)}]"
        found[f"{before}{shown}{after}"] = told
    return found


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
