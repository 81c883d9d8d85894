"""Annotations: ``replicate``, ``split``, ``stage``, ``cluster``, ``annotate`` and the default strategy.

An annotation says how a region of the model uses the devices. It is inert: entering one does nothing, and marking a
module stores one small plain attribute on it. Only while a capture is *recording* do the operators that are traced
inside receive their scopes, as ``node.meta["custom"]["whale_scopes"]``. This module knows neither graphs nor devices,
and imports torch only while recording.

For the capture: :func:`recording`, :func:`module_scopes`, :func:`enter_module`, and the constant :data:`NODE_KEY`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from whale.arguments import known_arguments
from whale.errors import AnnotationError
from whale.ir.module_pattern import ModulePattern, explain_no_match, most_specific
from whale.ir.state import Align
from whale.ir.strategy import (
    Attention,
    DeviceSelection,
    Experts,
    Recompute,
    Reduce,
    Scope,
    ScopePath,
    Strategy,
    check_nesting,
    decode_scopes,
    encode_scopes,
    offload_of,
    state_of,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "NODE_KEY",
    "Annotation",
    "annotate",
    "cluster",
    "enter_module",
    "forget",
    "get_default_strategy",
    "module_scopes",
    "recording",
    "replicate",
    "set_default_strategy",
    "split",
    "stage",
]

NODE_KEY = "whale_scopes"
"""Key of ``node.meta["custom"]`` under which a traced node carries its encoded scope path."""

_ATTRIBUTE = "_whale_scopes"
_ROOT = "."
"""Region of the whole model: neither a module path nor the empty string, which means no annotation."""
ModuleT = TypeVar("ModuleT", bound="torch.nn.Module")


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """A strategy for a region of a model: make one with ``replicate``, ``split``, ``stage`` or ``cluster``.

    It is a context manager, for use inside ``forward``, and may be entered any number of times, also within itself:
    each entry is a region of its own. Called with a module it marks that module and returns it.
    """

    strategy: Strategy

    def __str__(self) -> str:
        return str(self.strategy)

    def __enter__(self) -> Annotation:
        # The number is looked at first because torch.compile traces through it, and could not through a ContextVar.
        if _num_recording and (recorder := _RECORDER.get()) is not None:
            recorder.enter_annotation(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _num_recording and (recorder := _RECORDER.get()) is not None:
            recorder.leave(self)

    def __call__(self, module: ModuleT) -> ModuleT:
        """Mark *module* as a region of this strategy, replacing any previous mark, and return it.

        To put several strategies on one module, outer to inner, give ``whale.annotate`` a list.
        """
        _check_module(module, f"{self}(...)")
        _store(module, _Mark(origin="call", key="", path="", strategies=(self.strategy,)))
        return module


@known_arguments(AnnotationError)
def replicate(
    n: int | None = None,
    *,
    zero: int | None = None,
    state_shares: Sequence[float] | None = None,
    state_align: Align | None = None,
    offload: str | Sequence[str] | None = None,
    reduce: Reduce | None = None,
) -> Annotation:
    """Data parallelism: *n* replicas of the region, each with a share of the batch; None takes the remaining devices.

    *zero*, *state_shares* and *state_align* say how replicas divide the state of the stage that the region is in,
    *offload* what is in the host's memory, and *reduce* how they make one gradient of theirs, as those of
    ``parallelize`` do for stages that do not say it. Shares are of each replica, or of each rank of the stage.

    >>> print(replicate(2), replicate(2, zero=3, state_shares=[3, 1]), replicate(reduce="adasum"))
    replicate(2) replicate(2, zero=3, state_shares=[3, 1]) replicate(reduce='adasum')
    """
    state, hosted = state_of(zero, state_shares, state_align, reduce), offload_of(offload)
    return Annotation(strategy=Strategy(kind="replicate", degree=n, state=state, offload=hosted, reduce=reduce))


@known_arguments(AnnotationError)
def split(
    n: int | None = None,
    *,
    dim: int | None = None,
    attention: Literal["auto"] | Attention = "auto",
    experts: Literal["auto"] | Experts = "auto",
) -> Annotation:
    """Tensor or spatial parallelism: the operators of the region are split over *n* devices; None takes the remaining
    devices.

    Without *dim*, the region's matrices are stored and computed in shards. With *dim*, activations are split along dim
    *dim* of the region's input (for the whole model: of the batch's tensors), such as the depth of an image or the
    length of a sequence, and parameters are whole on all devices.

    *attention* says how an attention is computed whose rows are cut so:

    * ``"gather"``: each device gathers the keys and values of all;
    * ``"ring"``: keys and values go round from device to device, and none holds all of them (ring attention). Rows of
      causal attention are assigned so that each device computes its share;
    * ``"ulysses"``: each device exchanges its rows of all heads for all rows of some heads (DeepSpeed-Ulysses); there
      are no more devices than heads, or groups of heads with one key;
    * ``"auto"``: the one that moves least.

    *experts* says how devices share the experts of a mixture whose rows are sorted by expert and multiplied with
    stacked matrices, as those of Hugging Face are:

    * ``"whole"``: each device has whole experts, as many as its speed and memory allow; rows go to the experts that
      they chose and come back, and none is dropped (expert parallelism);
    * ``"cut"``: each device has a part of the hidden units of every expert, and computes all rows;
    * ``"auto"``: the one that moves least.

    >>> print(split(4), split(2, dim=1), split(2, dim=1, attention="ring"), split(experts="whole"))
    split(4) split(2, dim=1) split(2, dim=1, attention='ring') split(experts='whole')
    """
    way, shared = (None if given == "auto" else given for given in (attention, experts))
    return Annotation(strategy=Strategy(kind="split", degree=n, dim=dim, attention=way, experts=shared))  # type: ignore[arg-type]


@known_arguments(AnnotationError)
def stage(
    n: int | None = None,
    *,
    recompute: Recompute | None = None,
    zero: int | None = None,
    state_shares: Sequence[float] | None = None,
    state_align: Align | None = None,
    offload: str | Sequence[str] | None = None,
    reduce: Reduce | None = None,
    distinct: float | None = None,
) -> Annotation:
    """Pipeline parallelism: the region is one stage on *n* devices of its own; None takes as many as its regions need,
    or 1.

    *recompute* says what the stage's backward computes again, *zero*, *state_shares* and *state_align* how its replicas
    divide their state, *offload* what is in the host's memory, *reduce* how they make one gradient of theirs, as those
    of ``parallelize`` do for stages that do not say it.

    With *distinct*, rows of embedding tables that a micro-batch looks up several times are sent once to each rank of
    the next stage, and the sum of their gradients returns once. Its value, above 0 and up to 1, is the part of the
    looked-up rows that are expected to be distinct, by which messages are priced.

    >>> print(stage(), stage(2, recompute="full"), stage(zero=1, offload=["state", "activations"]), stage(distinct=0.1))
    stage() stage(2, recompute='full') stage(zero=1, offload='both') stage(distinct=0.1)
    """
    state, hosted = state_of(zero, state_shares, state_align, reduce), offload_of(offload)
    return Annotation(
        strategy=Strategy(
            kind="stage",
            degree=n,
            recompute=recompute,
            state=state,
            offload=hosted,
            reduce=reduce,
            distinct=distinct,
        )
    )


@known_arguments(AnnotationError)
def cluster(
    layout: str | Sequence[int] | None = None,
    number: int | None = None,
    /,
    *,
    type: str | None = None,
    name: str | None = None,
) -> Annotation:
    """Select the physical devices that the region may use.

    Args:
        layout: ``"all"`` devices; ``"row"``, each stage takes *number* consecutive devices; ``"average"``, the devices
            are divided into *number* equal groups and each stage takes one; or a list of ranks.
        number: of devices in a row, or of groups.
        type: of the devices, such as ``"A100"``.
        name: of a device or of a node.

    >>> print(cluster("row", 4), cluster([0, 1, 4]), cluster(type="A100"))
    cluster('row', 4) cluster([0, 1, 4]) cluster(type='A100')
    """
    if sum(choice is not None for choice in (layout, type, name)) != 1:
        raise AnnotationError(
            "cluster takes one choice of devices: 'all', 'row' with a number, 'average' with a number, a list of "
            f"ranks, type=... or name=...; it was given layout={layout!r}, type={type!r}, name={name!r}"
        )
    if type is not None or name is not None:
        if number is not None:
            raise AnnotationError(f"cluster by type or name takes no number, but was given {number!r}")
        chosen = DeviceSelection(layout="name" if type is None else "type", label=name if type is None else type)
    elif isinstance(layout, str):
        chosen = DeviceSelection(layout=layout, number=number)  # type: ignore[arg-type]  # checked there
    elif isinstance(layout, list | tuple | range):
        chosen = DeviceSelection(layout="ranks", number=number, ranks=tuple(layout))
    else:
        raise AnnotationError(f"cluster({layout!r}): give a layout by name or a list of ranks")
    return Annotation(strategy=Strategy(kind="cluster", devices=chosen))


_DEFAULT: ContextVar[Strategy | None] = ContextVar("whale_default_strategy", default=None)


def set_default_strategy(strategy: Annotation | None) -> None:
    """Set the strategy of operators without an annotation: ``replicate(...)`` or ``split(...)``; None resets it.

    Raises:
        AnnotationError: *strategy* is a stage or a cluster, which only make sense for a region.
    """
    if strategy is None:
        _DEFAULT.set(None)
        return
    if not isinstance(strategy, Annotation) or not strategy.strategy.makes_axis:
        raise AnnotationError(
            f"the default strategy is whale.replicate(...), whale.split(...) or None, not {strategy!s}; put a stage or "
            f"a cluster on a region"
        )
    _DEFAULT.set(strategy.strategy)


def get_default_strategy() -> Strategy | None:
    """The default strategy as data, or None if none was set."""
    return _DEFAULT.get()


# --- marks on modules -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """The mark of a module: strategies outer to inner, and their origin.

    ``key`` is the key of ``annotate``; ``path`` is the module's path below the module that ``annotate`` was given,
    which tells the same key used on two sub-models apart. On the module it is a dict of strings, so that a copy or a
    pickle of the module needs nothing of Whale.
    """

    origin: Literal["annotate", "call"]
    key: str
    path: str
    strategies: tuple[Strategy, ...]

    def as_plain_data(self) -> dict[str, str]:
        path = tuple(Scope(strategy=strategy, region="") for strategy in self.strategies)
        return {"origin": self.origin, "key": self.key, "path": self.path, "scopes": encode_scopes(path)}

    def scopes(self, path: str) -> ScopePath:
        """The scopes of the module at *path*.

        A stage or cluster is one region for all modules of its key; a replicate or split is one for each module. Where
        a module has several replicates or splits, the path names the innermost, and path and depth the outer ones.
        """
        if self.path:
            above = path.removesuffix(f".{self.path}") if path.endswith(f".{self.path}") else ""
        else:
            above = path
        key = path if self.origin == "call" else ".".join(part for part in (above, self.key) if part)
        last = len(self.strategies) - 1
        found: list[Scope] = []
        for depth, strategy in enumerate(self.strategies):
            of_key = not strategy.makes_axis
            region = key if of_key else path if depth == last else f"{path}#{depth}"
            found.append(Scope(strategy=strategy, region=region or _ROOT))
        return tuple(found)


def _store(module: torch.nn.Module, mark: _Mark) -> None:
    module.__dict__[_ATTRIBUTE] = mark.as_plain_data()


def _load(module: torch.nn.Module) -> _Mark | None:
    data = module.__dict__.get(_ATTRIBUTE)
    if data is None:
        return None
    strategies = tuple(scope.strategy for scope in decode_scopes(data["scopes"]))
    return _Mark(origin=data["origin"], key=data["key"], path=data["path"], strategies=strategies)


def _check_module(module: object, given: str) -> None:
    torch = sys.modules.get("torch")  # without torch loaded nothing can be a module
    if torch is None or not isinstance(module, torch.nn.Module):
        raise AnnotationError(f"{given} was given {type(module).__name__!r}, which is not a torch.nn.Module")


@known_arguments(AnnotationError)
def annotate(model: torch.nn.Module, mapping: Mapping[str, Annotation | Sequence[Annotation]]) -> None:
    """Put strategies on the modules of *model* by their paths, without changing its code.

    A key is a module path, in which ``[0-7]`` is an inclusive range, ``[0,2,5]`` a list and ``*`` one component; ``""``
    is the whole model. A value is a strategy, or a list of them from outer to inner. If two keys match one module
    the more specific wins: fewer ``*``, then fewer brackets, then brackets within the other's. A key on a module inside
    another annotated module replaces what the outer one says there; it does not nest in it. Calling it again forgets
    the mapping of the last call on the same modules, and keeps the marks that the model's own code made.

    The annotated model still runs on one device as before, and its state dict, copies and pickles have the same keys.

    Raises:
        AnnotationError: a key matches nothing, two keys tie, or a value is no strategy or a nest without a meaning.
            Nothing is annotated then.
    """
    _check_module(model, "annotate")
    if not isinstance(mapping, Mapping):
        raise AnnotationError(f"annotate takes a dict of module paths to strategies, not {type(mapping).__name__!r}")
    values = {key: _strategies_of(key, value) for key, value in mapping.items()}
    patterns = [ModulePattern(key) for key in values]
    modules = dict(model.named_modules(remove_duplicate=False))

    matched: dict[int, list[tuple[ModulePattern, str]]] = {}
    for pattern in patterns:
        hits = [path for path in modules if pattern.matches(path)]
        if not hits:
            raise AnnotationError(_why_no_match(pattern, model, modules))
        for path in hits:
            matched.setdefault(id(modules[path]), []).append((pattern, path))

    chosen: dict[str, ModulePattern] = {}  # by the path under which the winning key matched
    for hits_of_module in matched.values():
        winner = most_specific(list(dict.fromkeys(pattern for pattern, _ in hits_of_module)), hits_of_module[0][1])
        chosen[next(path for pattern, path in hits_of_module if pattern is winner)] = winner

    for module in modules.values():
        mark = _load(module)
        if mark is not None and mark.origin == "annotate":
            del module.__dict__[_ATTRIBUTE]
    for path, pattern in chosen.items():
        mark = _Mark(origin="annotate", key=pattern.text, path=path, strategies=values[pattern.text])
        _store(modules[path], mark)


def forget(model: torch.nn.Module) -> None:
    """Take all marks off the modules of *model*, those of ``annotate`` and those that its own code made."""
    for module in model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)


def _strategies_of(key: object, value: object) -> tuple[Strategy, ...]:
    if not isinstance(key, str):
        raise AnnotationError(f"the keys of annotate are module paths as strings, not {key!r}")
    several: list[object] = list(value) if isinstance(value, list | tuple) else [value]
    if not several:
        raise AnnotationError(f"the key {key!r} has an empty list of strategies; leave the key out, or name a strategy")
    strategies: list[Strategy] = []
    for item in several:
        if not isinstance(item, Annotation):
            raise AnnotationError(
                f"the key {key!r} has {item!r}, which is no strategy; write whale.replicate(...), whale.split(...), "
                "whale.stage(...), whale.cluster(...) or a list of them from outer to inner"
            )
        strategies.append(item.strategy)
    try:
        check_nesting(strategies)
    except AnnotationError as error:
        raise AnnotationError(f"the key {key!r}: {error}") from None
    return tuple(strategies)


def _why_no_match(pattern: ModulePattern, model: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> str:
    for name, _ in model.named_parameters(remove_duplicate=False):
        if pattern.matches(name):
            owner = name.rpartition(".")[0]
            return f"the key {pattern.text!r} matches the parameter {name!r}; annotate its module {owner!r}"
    return explain_no_match(pattern, modules.keys())


def module_scopes(model: torch.nn.Module) -> dict[str, ScopePath]:
    """The scopes, outer to inner, of every module of *model* that carries a mark, by its path.

    A module that occurs at several paths appears under the first. A container without a ``forward`` of its own, such as
    a ``ModuleList``, never runs, so its children without a mark appear with its scopes, in its region.

    Raises:
        AnnotationError: one stage region would lie in another.
    """
    found: dict[str, ScopePath] = {}
    seen: set[int] = set()

    def visit(path: str, module: torch.nn.Module, inherited: ScopePath) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        mark = _load(module)
        scopes = inherited if mark is None else mark.scopes(path)
        if scopes:
            found[path] = scopes
        passed_on = scopes if _has_no_forward(module) else ()
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child, passed_on)

    visit("", model, ())
    return found


def _has_no_forward(module: torch.nn.Module) -> bool:
    return getattr(type(module).forward, "__name__", "") == "_forward_unimplemented"


# --- recording --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """The state after one entry: the active scopes, which of them came from modules, and how to leave."""

    opener: Annotation | None
    scopes: ScopePath
    from_module: tuple[bool, ...]
    note: AbstractContextManager[Any]


@dataclass
class _Recorder:
    """The stack of entered scopes of one capture, and the numbers of the regions given so far."""

    frames: list[_Frame] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def _scopes(self) -> ScopePath:
        return self.frames[-1].scopes if self.frames else ()

    @property
    def _from_module(self) -> tuple[bool, ...]:
        return self.frames[-1].from_module if self.frames else ()

    def enter_annotation(self, annotation: Annotation) -> None:
        kind = annotation.strategy.kind
        scope = Scope(strategy=annotation.strategy, region=f"{kind}#{self.counts[kind]}")
        check_nesting(outer.strategy for outer in (*self._scopes, scope))
        self.counts[kind] += 1
        self._push(annotation, (*self._scopes, scope), (*self._from_module, False))

    def enter_module(self, scopes: ScopePath) -> None:
        entered = tuple(
            scope for scope, from_module in zip(self._scopes, self._from_module, strict=True) if not from_module
        )
        check_nesting(scope.strategy for scope in (*entered, *scopes))
        self._push(None, entered + scopes, (False,) * len(entered) + (True,) * len(scopes))

    def _push(self, opener: Annotation | None, scopes: ScopePath, from_module: tuple[bool, ...]) -> None:
        from torch.fx.traceback import annotate as annotate_nodes

        note = annotate_nodes({NODE_KEY: encode_scopes(scopes)})
        note.__enter__()
        self.frames.append(_Frame(opener, scopes, from_module, note))

    def leave(self, opener: Annotation | None) -> None:
        """Leave the innermost entry, unless it is another's: an annotation entered before recording began has none."""
        if self.frames and self.frames[-1].opener is opener:
            self.frames.pop().note.__exit__(None, None, None)


_RECORDER: ContextVar[_Recorder | None] = ContextVar("whale_recorder", default=None)
_num_recording = 0  # in all threads: while it is 0, no recorder is looked up
_NUM_RECORDING_LOCK = Lock()


def _count_recording(change: int) -> None:
    global _num_recording
    with _NUM_RECORDING_LOCK:
        _num_recording += change


@contextmanager
def recording() -> Iterator[Counter[str]]:
    """Context in which entered scopes are recorded on the nodes of a torch tracer.

    Put the tracing (``torch.export.export``, non-strict) inside, under ``torch.fx.traceback.preserve_node_meta()``.
    Regions of ``with`` statements are numbered from 0 by kind in the order of entry: ``stage#0``, ``stage#1``,
    ``split#0``. Gives how many of each kind have been entered.
    """
    recorder = _Recorder()
    token = _RECORDER.set(recorder)
    _count_recording(+1)
    try:
        yield recorder.counts
    finally:
        while recorder.frames:
            recorder.leave(recorder.frames[-1].opener)
        _count_recording(-1)
        _RECORDER.reset(token)


@contextmanager
def enter_module(scopes: ScopePath) -> Iterator[None]:
    """Enter the scopes of an annotated module, around its forward; does nothing unless recording.

    They replace scopes of outer modules, and nest inside those entered by ``with`` statements; ``with`` statements in
    the module's forward nest in them.
    """
    recorder = _RECORDER.get()
    if recorder is None:
        yield
        return
    recorder.enter_module(scopes)
    try:
        yield
    finally:
        recorder.leave(None)
