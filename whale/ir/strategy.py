"""Strategies: the data that an annotation records, its region, and the scope path of an operator.

It connects the annotations (which create scopes), the captured graph (whose nodes have them, encoded as a string) and
the planner (which assigns devices to them). It knows no module, no torch and no device: only what the user wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from whale.errors import AnnotationError, UsageError
from whale.ir.state import Align, StateSharding

__all__ = [
    "MAX_STALENESS",
    "ACTIVATIONS_ON_HOST",
    "ATTENTIONS",
    "Along",
    "EXPERTS",
    "Experts",
    "ExpertsRole",
    "Attention",
    "DeviceSelection",
    "Kind",
    "Layout",
    "OFFLOADS",
    "Offloading",
    "RECOMPUTES",
    "REPLICAS",
    "REDUCES",
    "Recompute",
    "Reduce",
    "RegionRole",
    "Role",
    "SHARDS",
    "STATE_ON_HOST",
    "Scope",
    "ScopePath",
    "StageCut",
    "Strategy",
    "check_nesting",
    "cut_at_stage",
    "decode_scopes",
    "divides_batch",
    "encode_scopes",
    "experts_of",
    "offload_of",
    "offload_steps",
    "parse_strategy",
    "region_of",
    "role_of_axis",
    "shards_operators",
    "state_of",
]

Kind = Literal["replicate", "split", "stage", "cluster"]
Role = Literal["replicate", "split"]
"""Role of a mesh axis: each replica computes its share of the batch, or each device its shard of the operators."""

REPLICAS: Role = "replicate"
SHARDS: Role = "split"

Layout = Literal["all", "row", "average", "ranks", "type", "name"]

Recompute = Literal["none", "selective", "full"]
"""Rule for what a backward computes again, in place of keeping it: nothing, all but products and attention, or all of a
layer but its inputs."""

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""From the one that keeps most to the one that keeps least."""

Offload = Literal["none", "activations", "state", "both", "tables"]
"""Word for what is in the host's memory: nothing; what forwards keep for backwards; what a rank owns of trained
parameters, gradients and optimizer states; both; or embedding tables with sparse gradients, which are looked up and
updated there."""

OFFLOADS: tuple[Offload, ...] = get_args(Offload)


def offload_steps(*, has_tables: bool) -> tuple[Offload, ...]:
    """Words from the one that keeps most on devices to the one that keeps least there: of models that have tables with
    sparse gradients, which cannot be among stretches of a state on the host, or of others."""
    return ("none", "tables") if has_tables else ("none", "activations", "state", "both")


STATE_ON_HOST, ACTIVATIONS_ON_HOST = frozenset(("state", "both")), frozenset(("activations", "both"))
"""The words by which each of them is there."""


class Offloading:
    """A stage, or prices of one, with a word for what is in the host's memory."""

    offload: Offload

    @property
    def state_on_host(self) -> bool:
        """Whether devices keep what they own of parameters, gradients and optimizer states in the host's memory."""
        return self.offload in STATE_ON_HOST

    @property
    def activations_on_host(self) -> bool:
        """Whether forwards keep there what backwards read."""
        return self.offload in ACTIVATIONS_ON_HOST

    @property
    def tables_on_host(self) -> bool:
        """Whether embedding tables with sparse gradients are there."""
        return self.offload == "tables"


Reduce = Literal["mean", "adasum", "server"]
"""How replicas make one gradient of theirs: that of the mean loss over all rows; the combination of those of the mean
loss over each one's rows (`whale.ir.adasum`); or the mean, which the ranks that own a parameter, its servers, sum."""

REDUCES: tuple[Reduce, ...] = get_args(Reduce)

MAX_STALENESS = 64
"""Limit on the number of steps by which sums may be late; a rank keeps the gradients of all of them."""

Attention = Literal["gather", "ring", "ulysses"]
"""How ranks that each have a part of a sequence compute its attention: each gathers the keys and values of all; they
pass them on from one to the next (ring attention, Liu et al. 2023); or each takes some heads of the whole sequence
(DeepSpeed-Ulysses, Jacobs et al. 2023)."""

ATTENTIONS: tuple[Attention, ...] = get_args(Attention)

Experts = Literal["whole", "cut"]
"""How devices that split a mixture of experts share it: each has whole experts, to which rows go; or each a part of
every expert."""

EXPERTS: tuple[Experts, ...] = get_args(Experts)

MAX_DIMS = 64
"""Largest number of dims of a tensor in PyTorch."""


@dataclass(frozen=True, kw_only=True)
class DeviceSelection:
    """Selection of physical devices, recorded by ``cluster(...)``.

    Attributes:
        layout: ``all`` every device; ``row`` consecutive groups of ``number`` devices; ``average`` ``number`` groups of
            equal size; ``ranks`` those of ``ranks``; ``type`` those of type ``label``; ``name`` the device, or the
            devices of the node, named ``label``.
        number: of devices in a row, or of groups; only for ``row`` and ``average``.
        ranks: of the devices chosen; only for ``ranks``.
        label: the type or name; only for ``type`` and ``name``.
    """

    layout: Layout
    number: int | None = None
    ranks: tuple[int, ...] = ()
    label: str | None = None

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise AnnotationError(
                f"cluster({self.layout!r}): unknown layout; use 'all', 'row' with a number, 'average' with a number, "
                "a list of ranks, type=... or name=..."
            )
        if self.layout in ("row", "average"):
            _check_positive(self.number, f"cluster({self.layout!r}, {self.number!r})", "number of devices or groups")
        elif self.number is not None:
            raise AnnotationError(f"cluster: the layout {self.layout!r} takes no number, but was given {self.number!r}")
        if self.layout == "ranks":
            _check_ranks(self.ranks)
        if self.layout in ("type", "name") and (not isinstance(self.label, str) or not self.label.strip()):
            raise AnnotationError(
                f"cluster({self.layout}={self.label!r}): give the {self.layout} as a string that is not empty"
            )

    def __str__(self) -> str:
        match self.layout:
            case "all":
                return "cluster('all')"
            case "row" | "average":
                return f"cluster({self.layout!r}, {self.number})"
            case "ranks":
                return f"cluster({list(self.ranks)})"
            case _:
                return f"cluster({self.layout}={self.label!r})"


@dataclass(frozen=True, kw_only=True)
class Along:
    """Role of a region that is split along a dim of its input: ``split(n, dim=...)``.

    Attributes:
        dim: of the tensors that come into *region*; negative: from the last.
        region: identity of the region that was annotated so; the empty string is the unannotated rest.
        attention: how attentions are computed whose rows are cut so; None: as is cheapest.
    """

    dim: int
    region: str
    attention: Attention | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertsRole:
    """Role of a region whose operators are split, and its experts in this way: ``split(n, experts=...)``."""

    experts: Experts


RegionRole = Role | Along | ExpertsRole
"""Role of a region along a mesh axis; that of a split without a dim splits operators as their matrices are stored."""


def divides_batch(role: RegionRole) -> bool:
    """Whether the devices along an axis compute whole operators, each on its share of the rows."""
    return role == REPLICAS


def shards_operators(role: RegionRole) -> bool:
    """Whether the devices along an axis compute operators together, each with its shard of the matrices."""
    return role == SHARDS or isinstance(role, ExpertsRole)


def experts_of(role: RegionRole) -> Experts | None:
    """How the devices along an axis share experts; None: as is cheapest."""
    return role.experts if isinstance(role, ExpertsRole) else None


def role_of_axis(roles: Iterable[RegionRole]) -> Role:
    """The role of an axis that regions use in these ways: replicas if it divides the batch for all of them.

    >>> role_of_axis(["replicate", "split"])
    'split'
    """
    return REPLICAS if all(map(divides_batch, roles)) else SHARDS


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One annotation, as data.

    Attributes:
        kind: of the primitive that the user called.
        degree: number of replicas, parts or devices; None lets the planner choose.
        dim: only for ``split``: the dim of the region's input along which its operators are split; None: their matrices
            are split.
        attention: only for ``split`` with a dim: how attentions are computed whose rows are cut so; None: as is
            cheapest.
        experts: only for ``split`` without a dim: how devices share the experts of a mixture; None: as is cheapest.
        devices: only for ``cluster``.
        recompute: only for ``stage``: what its backward computes again; None: as is said for the whole model.
        state: only for ``stage`` and ``replicate``: how replicas divide the state of their stage; None: as is said for
            the whole model.
        offload: only for ``stage`` and ``replicate``: what is in the host's memory; None: as is said for the whole
            model.
        reduce: only for ``stage`` and ``replicate``: how its replicas make one gradient of theirs; None: as is said for
            the whole model.
        distinct: only for ``stage``: the expected part of its looked-up rows that are distinct, of which each is sent
            once; None: all are sent.

    >>> print(Strategy(kind="split", degree=4), Strategy(kind="split", degree=2, dim=1), Strategy(kind="stage"))
    split(4) split(2, dim=1) stage()
    >>> print(Strategy(kind="stage", degree=2, recompute="full", state=StateSharding(3, (3, 1)), offload="both"))
    stage(2, recompute='full', zero=3, state_shares=[3, 1], offload='both')
    """

    kind: Kind
    degree: int | None = None
    dim: int | None = None
    attention: Attention | None = None
    experts: Experts | None = None
    devices: DeviceSelection | None = None
    recompute: Recompute | None = None
    state: StateSharding | None = None
    offload: Offload | None = None
    reduce: Reduce | None = None
    distinct: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise AnnotationError(f"unknown strategy {self.kind!r}; use one of {', '.join(get_args(Kind))}")
        if (self.kind == "cluster") != (self.devices is not None):
            raise AnnotationError(
                "devices are chosen by cluster(...), and by nothing else: nest the other strategies in it"
            )
        if self.degree is not None:
            if self.kind == "cluster":
                raise AnnotationError("cluster(...) has no degree: nest stage(n), replicate(n) or split(n) in it")
            _check_positive(self.degree, f"{self.kind}({self.degree!r})", "degree")
        if self.dim is not None:
            if self.kind != "split":
                raise AnnotationError(f"{self.kind}(dim={self.dim!r}): only split(n, dim=...) cuts along a dim")
            if isinstance(self.dim, bool) or not isinstance(self.dim, int) or abs(self.dim) > MAX_DIMS:
                raise AnnotationError(
                    f"split(dim={self.dim!r}): the dim is a whole number that a tensor may have, as in "
                    "whale.split(2, dim=1) for the second dim of what comes into the region"
                )
        if self.attention is not None:
            if self.dim is None:
                raise AnnotationError(
                    f"{self.kind}(attention={self.attention!r}): only split(n, dim=...) has a way to compute "
                    "attention, for it cuts the rows of one"
                )
            if self.attention not in ATTENTIONS:
                raise AnnotationError(
                    f"split(attention={self.attention!r}): unknown way; use 'auto', {', '.join(map(repr, ATTENTIONS))}"
                )
        if self.experts is not None:
            if self.kind != "split" or self.dim is not None:
                raise AnnotationError(
                    f"{self.kind}(experts={self.experts!r}): only split(n) without a dim splits experts; say it there"
                )
            if self.experts not in EXPERTS:
                raise AnnotationError(
                    f"split(experts={self.experts!r}): unknown way; use 'auto', {', '.join(map(repr, EXPERTS))}"
                )
        if self.recompute is not None:
            if self.kind != "stage":
                raise AnnotationError(
                    f"{self.kind}(recompute={self.recompute!r}): only a stage has a rule of its own; "
                    "parallelize(recompute=...) is for the whole model"
                )
            if self.recompute not in RECOMPUTES:
                raise AnnotationError(
                    f"stage(recompute={self.recompute!r}): unknown rule; use {', '.join(map(repr, RECOMPUTES))}"
                )
        if self.state is not None and self.kind not in ("stage", "replicate"):
            raise AnnotationError(
                f"{self.kind}({self.state}): replicas divide the state of a stage; say it of stage(...) or "
                "replicate(...), or in parallelize(zero=...) of the whole model"
            )
        if self.offload is not None:
            if self.kind not in ("stage", "replicate"):
                raise AnnotationError(
                    f"{self.kind}(offload={self.offload!r}): a stage has state and activations; say it of stage(...) "
                    "or replicate(...), or in parallelize(offload=...) of the whole model"
                )
            if self.offload not in OFFLOADS:
                raise AnnotationError(
                    f"{self.kind}(offload={self.offload!r}): unknown; use {', '.join(map(repr, OFFLOADS))}"
                )
        if self.reduce is not None:
            if self.kind not in ("stage", "replicate"):
                raise AnnotationError(
                    f"{self.kind}(reduce={self.reduce!r}): replicas have gradients of their own rows; say it of "
                    "stage(...) or replicate(...), or in parallelize(reduce=...) of the whole model"
                )
            if self.reduce not in REDUCES:
                raise AnnotationError(
                    f"{self.kind}(reduce={self.reduce!r}): unknown; use {', '.join(map(repr, REDUCES))}"
                )
        if self.distinct is not None:
            if self.kind != "stage":
                raise AnnotationError(
                    f"{self.kind}(distinct={self.distinct!r}): a stage sends the rows that it looks up; say it of "
                    "stage(...)"
                )
            is_number = isinstance(self.distinct, (int, float)) and not isinstance(self.distinct, bool)
            if not is_number or not 0 < self.distinct <= 1:
                raise AnnotationError(
                    f"stage(distinct={self.distinct!r}): the expected part of looked-up rows that are distinct lies "
                    "above 0 and up to 1"
                )

    @property
    def divides_batch(self) -> bool:
        """Whether its devices are replicas, each with its share of the rows."""
        return self.kind == "replicate"

    @property
    def shards_operators(self) -> bool:
        """Whether its devices compute each operator together."""
        return self.kind == "split"

    @property
    def makes_stage(self) -> bool:
        """Whether its region is a stage of the pipeline."""
        return self.kind == "stage"

    @property
    def chooses_devices(self) -> bool:
        """Whether it says which devices, and nothing of what they compute."""
        return self.kind == "cluster"

    @property
    def makes_axis(self) -> bool:
        """Whether its degree is an axis of a stage's mesh."""
        return not self.makes_stage and not self.chooses_devices

    def role(self, region: str) -> RegionRole:
        """The role of its region along the axis that it makes."""
        if self.dim is not None:
            return Along(dim=self.dim, region=region, attention=self.attention)
        if self.experts is not None:
            return ExpertsRole(experts=self.experts)
        return SHARDS if self.shards_operators else REPLICAS

    def __str__(self) -> str:
        if self.devices is not None:
            return str(self.devices)
        given = [str(self.degree)] if self.degree is not None else []
        given += [f"dim={self.dim}"] if self.dim is not None else []
        given += [f"attention={self.attention!r}"] if self.attention is not None else []
        given += [f"experts={self.experts!r}"] if self.experts is not None else []
        given += [f"recompute={self.recompute!r}"] if self.recompute is not None else []
        given += [str(self.state)] if self.state is not None else []
        given += [f"offload={self.offload!r}"] if self.offload is not None else []
        given += [f"reduce={self.reduce!r}"] if self.reduce is not None else []
        given += [f"distinct={self.distinct!r}"] if self.distinct is not None else []
        return f"{self.kind}({', '.join(given)})"


_WRITTEN = re.compile(r"(?P<kind>replicate|split|stage)\((?P<arguments>[^()]*)\)")
_WORD = r"(?P<quote>['\"]?)(?P<word>[a-z]{1,20})(?P=quote)"
_ARGUMENTS = {
    "degree": re.compile(r"(?P<number>[1-9][0-9]{0,5})"),
    "dim": re.compile(r"dim=(?P<number>0|-?[1-9][0-9]?)"),
    "attention": re.compile(rf"attention={_WORD}"),
    "experts": re.compile(rf"experts={_WORD}"),
    "recompute": re.compile(rf"recompute={_WORD}"),
    "zero": re.compile(r"zero=(?P<number>[0-9])"),
    "state_shares": re.compile(r"state_shares=\[(?P<list>[0-9., ]+)\]"),
    "state_align": re.compile(rf"state_align={_WORD}"),
    "offload": re.compile(rf"offload={_WORD}"),
    "reduce": re.compile(rf"reduce={_WORD}"),
    "distinct": re.compile(r"distinct=(?P<part>(?:[01]|[0-9]?\.[0-9]{1,20}|[0-9](?:\.[0-9]{1,20})?e-[0-9]{1,3}))"),
}
"""How each argument is written, in the order in which they are."""
_BETWEEN = re.compile(r", (?![^\[]*\])")


def _argument(text: str) -> tuple[str, Any] | None:
    """The name and value of a written argument; None if it is none."""
    for name, pattern in _ARGUMENTS.items():
        if found := pattern.fullmatch(text):
            kind, given = next((kind, given) for kind, given in found.groupdict().items() if given and kind != "quote")
            if kind == "list":
                return name, tuple(map(_number, given.split(",")))
            return name, int(given) if kind == "number" else float(given) if kind == "part" else given
    return None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise AnnotationError(f"state_shares has {text.strip()!r}, which is no number") from None


def state_of(
    zero: int | None, shares: Sequence[float] | None, align: Align | None, reduce: str | None = None
) -> StateSharding | None:
    """How state is divided, by the arguments of an annotation; None if it does not say it. Servers own whole
    parameters.

    Raises:
        AnnotationError: they contradict each other, or are not of these.
    """
    if reduce == "server" and not zero:
        zero, align = 1, "parameter"
    if zero is None and shares is None and align is None:
        return None
    try:
        return StateSharding(zero or 0, tuple(shares or ()), align or "row")
    except (UsageError, TypeError) as error:
        raise AnnotationError(str(error)) from None


def offload_of(given: str | Iterable[str] | None) -> Offload | None:
    """The word for what is in the host's memory, where it is given as one or as several; None if it is not given.

    Raises:
        AnnotationError: a word that is not known.

    >>> offload_of("state"), offload_of(["activations", "state"]), offload_of([]), offload_of(None)
    ('state', 'both', 'none', None)
    """
    if given is None:
        return None
    words = {given} if isinstance(given, str) else set(given)
    for word in words - set(OFFLOADS):
        raise AnnotationError(
            f"offload is {word!r}; it can be {', '.join(map(repr, OFFLOADS))}, or a list of 'state' and 'activations'"
        )
    if "tables" in words and words - {"tables", "none"}:
        raise AnnotationError(
            f"offload has {' and '.join(map(repr, sorted(words)))}: a stage has either its tables in the host's "
            "memory, or state and activations; put the tables into a stage of their own"
        )
    if words >= {"state", "activations"} or "both" in words:
        return "both"
    return next((one for one in OFFLOADS if one in words - {"none"}), "none")


def parse_strategy(text: str) -> Strategy:
    """Parse a strategy from text; a cluster is not one, because it does not affect computation.

    Raises:
        AnnotationError: anything else.

    >>> parse_strategy("split(4)") == Strategy(kind="split", degree=4)
    True
    >>> parse_strategy("split(2, dim=1)") == Strategy(kind="split", degree=2, dim=1)
    True
    >>> print(parse_strategy("stage(2, zero=1, state_shares=[3, 1])"))
    stage(2, zero=1, state_shares=[3, 1])
    """
    found = _WRITTEN.fullmatch(text)
    written = _BETWEEN.split(found["arguments"]) if found is not None and found["arguments"] else []
    told = [argument for argument in map(_argument, written) if argument is not None]
    places = [list(_ARGUMENTS).index(name) for name, _ in told]
    if found is None or len(told) < len(written) or places != sorted(set(places)):
        raise AnnotationError(
            f"{text[:60]!r} is no strategy; write replicate(), split() or stage(), with or without a number, "
            "split(2, dim=1), split(2, dim=1, attention='ring'), stage(recompute='full'), or replicate(zero=3)"
        )
    given = dict(told)
    zero, shares, align = (given.pop(name, None) for name in ("zero", "state_shares", "state_align"))
    state = state_of(zero, shares, align, given.get("reduce"))
    return Strategy(kind=found["kind"], state=state, **given)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Scope:
    """One entered annotation: the strategy, and the identity of the region that it covers.

    Two scopes with equal strategies and different regions are different regions: two ``with whale.stage():`` are two
    stages.

    >>> print(Scope(strategy=Strategy(kind="stage", degree=2), region="stage#0"))
    stage(2) of stage#0
    """

    strategy: Strategy
    region: str

    def __str__(self) -> str:
        return f"{self.strategy} of {self.region}"


ScopePath = tuple[Scope, ...]
"""The scopes that an operator lies in, from the outermost to the innermost."""


class StageCut(NamedTuple):
    """A scope path cut at its stage: what lies around the stage, the stage (None if there is none), what lies in it."""

    outer: ScopePath
    stage: Scope | None
    inner: ScopePath


def region_of(path: ScopePath) -> str:
    """Identity of the innermost region of *path*; the empty string for an operator with no annotation."""
    return path[-1].region if path else ""


def check_nesting(strategies: Iterable[Strategy]) -> None:
    """Refuse an invalid nest: a stage may lie in ``replicate`` and ``cluster``, never in a stage or a split.

    Args:
        strategies: from the outermost to the innermost.

    Raises:
        AnnotationError: naming the two annotations that contradict each other.

    >>> check_nesting([Strategy(kind="stage", degree=8), Strategy(kind="replicate", degree=2), Strategy(kind="split")])
    """
    outer: list[Strategy] = []
    for strategy in strategies:
        if strategy.makes_stage:
            for other in outer:
                if other.makes_stage:
                    raise AnnotationError(
                        f"{strategy} lies in {other}: a stage cannot contain a stage; put one after the other, or use "
                        "replicate or split inside the stage"
                    )
                if other.shards_operators:
                    raise AnnotationError(
                        f"{strategy} lies in {other}: a split region cannot be cut into stages; put {other} inside "
                        f"{strategy}"
                    )
        outer.append(strategy)


def cut_at_stage(path: ScopePath) -> StageCut:
    """Cut *path* at its stage scope, after checking its nesting; with no stage, all of *path* is inner.

    >>> stage = Scope(strategy=Strategy(kind="stage"), region="a")
    >>> split = Scope(strategy=Strategy(kind="split"), region="b")
    >>> cut_at_stage((stage, split)).inner == cut_at_stage((split,)).inner == (split,)
    True
    """
    check_nesting(scope.strategy for scope in path)
    for index, scope in enumerate(path):
        if scope.strategy.makes_stage:
            return StageCut(path[:index], scope, path[index + 1 :])
    return StageCut((), None, path)


def encode_scopes(path: ScopePath) -> str:
    """*path* as a line of JSON, the form in which graph nodes carry it; options that few strategies have come last.

    >>> encode_scopes((Scope(strategy=Strategy(kind="split", degree=4), region="lm_head"),))
    '[["split",4,null,null,"lm_head"]]'
    """
    rows: list[list[object]] = []
    for scope in path:
        devices = scope.strategy.devices
        chosen = None if devices is None else [devices.layout, devices.number, list(devices.ranks), devices.label]
        state = scope.strategy.state
        divided = None if state is None else [state.level, list(state.shares), state.align]
        given = scope.strategy
        more: list[object] = [given.recompute, given.attention, divided, given.offload, given.reduce]
        more += [given.experts, given.distinct]
        while more and more[-1] is None:
            more.pop()
        rows.append([scope.strategy.kind, scope.strategy.degree, scope.strategy.dim, chosen, scope.region, *more])
    return json.dumps(rows, separators=(",", ":"))


def decode_scopes(text: str) -> ScopePath:
    """The inverse of :func:`encode_scopes`.

    Raises:
        AnnotationError: if *text* was not made by :func:`encode_scopes`.
    """
    try:
        path: list[Scope] = []
        for kind, degree, dim, chosen, region, *more in json.loads(text):
            devices = None
            if chosen is not None:
                layout, number, ranks, label = chosen
                devices = DeviceSelection(layout=layout, number=number, ranks=tuple(ranks), label=label)
            if not isinstance(region, str):
                raise TypeError("a region is a string")
            recompute, attention, divided, offload, reduce, experts, distinct = (*more, *(None,) * 7)[:7]
            state = None if divided is None else StateSharding(divided[0], tuple(divided[1]), divided[2])
            strategy = Strategy(
                kind=kind,
                degree=degree,
                dim=dim,
                attention=attention,
                devices=devices,
                recompute=recompute,
                state=state,
                offload=offload,
                reduce=reduce,
                experts=experts,
                distinct=distinct,
            )
            path.append(Scope(strategy=strategy, region=region))
    except (ValueError, TypeError, LookupError, UsageError, RecursionError) as error:
        raise AnnotationError(f"not an encoded scope path: {text[:200]!r} ({error})") from error
    return tuple(path)


def _check_positive(number: object, given: str, noun: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise AnnotationError(f"{given}: the {noun} must be a positive integer, not {number!r}")


def _check_ranks(ranks: tuple[int, ...]) -> None:
    if not ranks:
        raise AnnotationError("cluster([]): the list of ranks is empty; name at least one device")
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise AnnotationError(f"cluster({list(ranks)}): ranks are integers from 0 up, not {rank!r}")
    if len(set(ranks)) < len(ranks):
        repeated = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        raise AnnotationError(
            f"cluster({list(ranks)}): rank {repeated[0]} is listed more than once; list each device once"
        )
