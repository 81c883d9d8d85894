"""Dry run of a stage: the collectives that every rank will call, in order, from its program run without data.

A program is lowered, gets process groups that only record calls, and runs forward and backward, by the code of a real
step. So the sequence is correct for every bridge and form, and for the order of the backward: autograd's engine runs
the ready node with the highest sequence number. All nodes that wait for a node were made after it, so the nodes run in
the reverse of the order in which the forward made them, except those whose output needs no gradient or reaches no root.
That order depends on the graph alone, so it is the same here and on the machines.

With a thousand ranks not all need be lowered. A rank's coordinates enter its program only as shares, so ranks of a
stage with equal shares (of every placement that occurs) make the same calls, each along its own lines of the mesh: one
of them runs dry. Each rank also dry-runs its own program, and the ranks compare digests of the results
(:func:`calls_as_text`), so a rank that lowers another program than its equals is detected before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from whale.errors import ScheduleError
from whale.graph.captured import Captured
from whale.graph.values import needs_grad, value_tensor
from whale.ir.check import CollectiveCall, check_collectives
from whale.runtime.collectives import DryGroup
from whale.runtime.local_program import LocalProgram, bound
from whale.runtime.random import RNGPosition
from whale.runtime.stage import LocalStage
from whale.strategies.layout import Placements, length_of
from whale.strategies.lowering import PlacedStage

__all__ = [
    "EarlySum",
    "TaskCalls",
    "WithoutData",
    "calls_as_text",
    "check_stage",
    "dry_run",
    "forward_without_data",
    "key_of_call",
    "like_ranks",
    "noting_calls",
    "returns_its_own",
    "stage_calls",
    "stage_without_data",
    "tensors_in",
]


@dataclass(frozen=True, kw_only=True)
class TaskCalls:
    """The collectives of one rank in one stage's forward and backward of a micro-batch, and the parameters of which the
    backward makes the gradient, each with the number of collectives before it."""

    forward: tuple[CollectiveCall, ...]
    backward: tuple[CollectiveCall, ...]
    ready: tuple[tuple[int, str], ...] = ()


class EarlySum(NamedTuple):
    """A bucket that may start within the last backward of a stage: its ranks and its parameters."""

    bucket: int
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]


Programs = Callable[[PlacedStage, int], Sequence[LocalProgram]]
"""The program of a rank in a stage, one per micro-batch; see ``Compilation.local_programs``."""

StageCalls = Mapping[int, Mapping[int, TaskCalls]]
"""The calls of a stage: by micro-batch (one of each number of rows) and rank."""


def stage_calls(
    captured: Captured,
    stage: PlacedStage,
    rows: Sequence[int],
    programs: Programs,
    rank: int,
) -> StageCalls:
    """The collectives of all ranks of a stage. *rank* is dry-run itself, if it belongs to the stage."""
    if all(axis.size == 1 for axis in stage.mesh.axes):
        return {}
    micro_batches = [rows.index(count) for count in dict.fromkeys(rows)]
    found: dict[int, dict[int, TaskCalls]] = {m: {} for m in micro_batches}
    for members in like_ranks(stage, rows):
        actor = rank if rank in members else members[0]
        local = programs(stage, actor)
        for m in micro_batches:
            calls = dry_run(captured, stage, actor, local[m], m)
            for member in members:
                found[m][member] = _of_rank(calls, stage, actor, member)
    return {m: dict(sorted(calls.items())) for m, calls in found.items()}


def like_ranks(stage: PlacedStage, rows: Sequence[int]) -> list[list[int]]:
    """The ranks of a stage in groups with equal programs up to their coordinates in the mesh."""
    micro_batches = [rows.index(count) for count in dict.fromkeys(rows)]
    by_axes: dict[tuple[bool, ...], list[Placements]] = {}  # that cut: only coordinates on these matter
    for placed in _all_placements(stage):
        by_axes.setdefault(tuple(p.kind == "S" for p in placed), []).append(placed)
    known: dict[object, object] = {}
    likes: dict[object, list[int]] = {}
    for member in stage.mesh.ranks:
        at = stage.mesh.coordinates(member)
        own = []
        for cut, placements in by_axes.items():
            key = (cut, tuple(c if axis else 0 for c, axis in zip(at, cut[1:], strict=True)))
            if key not in known:
                known[key] = _shares(stage, placements, micro_batches, at)
            own.append(known[key])
        likes.setdefault(tuple(own), []).append(member)
    return list(likes.values())


def check_stage(stage: int, calls: StageCalls, sums: Sequence[EarlySum] = (), within: Collection[int] = ()) -> None:
    """Prove that the collectives of a stage match on all ranks.

    Args:
        stage: its index.
        calls: of all ranks.
        sums: buckets that start within a backward, in their order.
        within: the micro-batches of such backwards, or others with as many rows.

    Raises:
        ScheduleError: names the stage, the task, the ranks, and the node at which they differ.
    """
    for micro_batch, by_rank in calls.items():
        sequences = {
            "forward": {rank: task.forward for rank, task in by_rank.items()},
            "backward": {rank: task.backward for rank, task in by_rank.items()},
        }
        if micro_batch in within:
            sequences["backward with sums"] = {rank: _with_sums(task, rank, sums) for rank, task in by_rank.items()}
        for direction, of_ranks in sequences.items():
            try:
                check_collectives(of_ranks)
            except ScheduleError as error:
                raise ScheduleError(f"stage {stage}, {direction} of micro-batch {micro_batch}: {error}") from error


def _with_sums(task: TaskCalls, rank: int, sums: Sequence[EarlySum]) -> tuple[CollectiveCall, ...]:
    """The calls of a rank's last backward with the sums of gradients, each as soon as it and those before it can
    start, as the reducer starts them."""
    own = [each for each in sums if rank in each.ranks]
    found: list[CollectiveCall] = []
    ready: set[str] = set()
    seen = started = 0

    def start(done: bool) -> None:
        nonlocal started
        while started < len(own) and (done or ready.issuperset(own[started].parameters)):
            each = own[started]
            found.append(CollectiveCall(f"bucket {each.bucket}", "all_reduce", each.ranks, "", ()))
            started += 1

    for before, name in task.ready:
        found += task.backward[seen:before]
        seen = before
        ready.add(name)
        start(False)
    found += task.backward[seen:]
    start(True)
    return tuple(found)


def calls_as_text(stage: PlacedStage, calls: StageCalls) -> str:
    """The calls of a stage as text without rank numbers, equal on all ranks."""
    lines: dict[str, None] = {}
    for micro_batch, by_rank in calls.items():
        for rank, task in by_rank.items():
            lines_of_mesh = {stage.mesh.group(axis, rank): axis for axis in range(len(stage.mesh.axes))}
            for call in (*task.forward, *task.backward):
                where = f"stage {stage.index}, micro-batch {micro_batch}, axis {lines_of_mesh[call.ranks]}"
                lines[f"{where}: {call.op} of {call.node}, {call.dtype} {call.shapes}"] = None
    return "\n".join(lines)


def dry_run(
    captured: Captured,
    stage: PlacedStage,
    rank: int,
    program: LocalProgram,
    micro_batch: int,
) -> TaskCalls:
    """Run a rank's program of one micro-batch, forward and backward, without data or processes, and return its
    calls."""
    if not any(len(bridge.ranks) > 1 for bridge in program.bridges):
        return TaskCalls(forward=(), backward=())
    running, calls = noting_calls(program)
    ready: list[tuple[int, str]] = []
    with WithoutData(), torch.enable_grad():
        roots, seeds = forward_without_data(
            captured, stage, rank, running, micro_batch, on_gradient=lambda name: ready.append((len(calls), name))
        )
        forward = tuple(calls)
        calls.clear()
        if roots:
            torch.autograd.backward(roots, seeds)
    return TaskCalls(forward=forward, backward=tuple(calls), ready=tuple(ready))


def noting_calls(program: LocalProgram) -> tuple[LocalProgram, list[CollectiveCall]]:
    """A copy of a program whose groups record calls, and the list of these calls."""
    calls: list[CollectiveCall] = []

    def group(name: str, ranks: tuple[int, ...]) -> DryGroup | None:
        return DryGroup(name, ranks, calls) if len(ranks) > 1 else None

    return bound([program], group)[0], calls


aten = torch.ops.aten

_SUMS = {aten.add.Tensor, aten.add_.Tensor}


class WithoutData(TorchDispatchMode):
    """Computes shapes only: operators that would make or read a tensor with data run on the meta device.

    A fake tensor does the same and knows its device, but takes ten times as long. Anomaly detection is off inside,
    because it reads values of gradients. Sparse gradients have all rows that they may have.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether each call is shielded from Dynamo, which costs more than a call: nothing is compiled here."""
        return False

    def __enter__(self) -> Any:
        self._anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        self._all_rows = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
        self._all_rows.__enter__()
        torch.autograd.set_detect_anomaly(False)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.autograd.set_detect_anomaly(*self._anomaly)
        self._all_rows.__exit__(*raised)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator on shapes, for modes that watch its results besides."""
        if _takes_device(func):
            kwargs = {**kwargs, "device": torch.device("meta")}
        if _have_data(args) or _have_data(kwargs.values()):
            args, kwargs = pytree.tree_map(_blank, args), pytree.tree_map(_blank, kwargs)
        if func in _SUMS and any(isinstance(x, Tensor) and x.is_sparse for x in args[:2]):  # torch needs their data
            dense = next((x for x in args[:2] if not x.is_sparse), args[0])
            return args[0] if func is aten.add_.Tensor else dense.clone()
        known = _known_results(func, args, kwargs) if returns_its_own(func) else None
        return func(*args, **kwargs) if known is None else known


class _Shape(NamedTuple):
    """A tensor without data."""

    sizes: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def blank(self) -> Tensor:
        """Whether an argument is such a tensor."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="meta")


class _SparseError(Exception):
    """A tensor is sparse, and has no strides."""


class _Items(NamedTuple):
    """A list of arguments."""

    items: tuple[Any, ...]


def _known_results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Tensors of the shapes that an operator returns, cached for equal arguments; None if it must be run."""
    key = key_of_call(func, args, kwargs)
    found = None if key is None else _results(*key)
    if found is None:
        return None
    kind, shapes = found
    blanks = [None if shape is None else shape.blank() for shape in shapes]
    return blanks[0] if kind is Tensor else kind(blanks)


def key_of_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """A cache key of a call of an operator, equal for tensors of equal shapes, strides and dtypes; None if one is
    sparse."""
    try:
        named = tuple((name, _shaped(x)) for name, x in kwargs.items())
        return func, tuple(map(_shaped, args)), named, torch.get_default_dtype()
    except _SparseError:
        return None


@lru_cache(maxsize=65536)
def _results(
    func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], default: torch.dtype
) -> tuple[type, tuple[_Shape | None, ...]] | None:
    """The shapes of an operator's results, each with its own memory; None for any other results. They have the
    *default* dtype, which is set, if the arguments do not determine it.

    torch can only compute them by running the operator: many are Python functions, which are slow.
    """
    given, named = [_unshaped(x) for x in args], {name: _unshaped(x) for name, x in kwargs}
    result = func(*given, **named)
    results = result if isinstance(result, list | tuple) else (result,)
    tensors = [x for x in results if isinstance(x, Tensor)]
    if any(x.layout is not torch.strided for x in tensors):
        return None
    memory = [x.untyped_storage()._cdata for x in tensors]
    others = [x for x in pytree.tree_leaves((given, named)) if isinstance(x, Tensor)]
    if len(set(memory)) < len(memory) or not {x.untyped_storage()._cdata for x in others}.isdisjoint(memory):
        return None
    if any(x.is_complex() for x in (*tensors, *others)):  # it may be a conjugate, unlike a fresh tensor
        return None
    shapes = tuple(None if x is None else _shaped(x) for x in results)
    if not all(shape is None or isinstance(shape, _Shape) for shape in shapes):
        return None
    alike = ((x, shape.blank()) for x, shape in zip(tensors, filter(None, shapes), strict=True))
    if not all(x.is_meta and x.untyped_storage().nbytes() == y.untyped_storage().nbytes() for x, y in alike):
        return None
    return type(result) if isinstance(result, list | tuple) else Tensor, shapes


def _shaped(x: Any) -> Any:
    """An argument as a cache key; numbers with their types, because some equal numbers have different types."""
    if isinstance(x, Tensor):
        if x.layout is not torch.strided:
            raise _SparseError
        return _Shape(x.shape, x.stride(), x.dtype)
    if isinstance(x, list | tuple):
        return _Items(tuple(map(_shaped, x)))
    return type(x), x


def _unshaped(x: Any) -> Any:
    if isinstance(x, _Shape):
        return x.blank()
    return [_unshaped(item) for item in x.items] if isinstance(x, _Items) else x[1]


@cache
def returns_its_own(func: Any) -> bool:
    """Whether an operator mutates none of its arguments and returns no alias of them."""
    return all(x.alias_info is None for x in (*func._schema.arguments, *func._schema.returns))


@cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, and in their lists, in order, without sparse ones, which
    have the memory of those of which they were made."""
    for x in values:
        if isinstance(x, Tensor):
            if x.layout is torch.strided:
                yield x
        elif isinstance(x, list | tuple):
            yield from tensors_in(x)


def _have_data(values: Iterable[Any]) -> bool:
    """Whether any of an operator's arguments, or of those in its lists, is a tensor with data."""
    return any(not x.is_meta for x in tensors_in(values))


def _blank(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) and not x.is_meta else x


def forward_without_data(
    captured: Captured,
    stage: PlacedStage,
    rank: int,
    program: LocalProgram,
    micro_batch: int,
    *,
    gradients: bool = False,
    on_gradient: Callable[[str], None] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run the stage as the executor does; return the roots of its backward and their gradients. With *gradients*
    parameters already have gradients, as in all micro-batches except the first; *on_gradient* is called with the name
    of each whose gradient the backward has made."""
    local, received = stage_without_data(
        captured, stage, rank, program, micro_batch, gradients=gradients, on_gradient=on_gradient
    )
    outputs = local.forward(0, received)
    flows = [needs_grad(value) for value in stage.sent] + [True] * (stage.loss is not None)
    roots = [x for x, flow in zip(outputs, flows, strict=True) if flow and x.requires_grad]
    return roots, [torch.ones_like(x) for x in roots]


def stage_without_data(
    captured: Captured,
    stage: PlacedStage,
    rank: int,
    program: LocalProgram,
    micro_batch: int,
    *,
    gradients: bool = False,
    on_gradient: Callable[[str], None] | None = None,
) -> tuple[LocalStage, tuple[Tensor, ...]]:
    """A stage of one micro-batch on tensors without data, and those that it receives; see `forward_without_data`."""
    at = stage.mesh.coordinates(rank)
    tensors: dict[tuple[str, str], Tensor] = {}
    batch: dict[str, Tensor] = {}
    for node in captured.graph.nodes:
        if node.op != "placeholder" or not isinstance(node.meta.get("val"), Tensor):
            continue
        value = (node, 0)
        kind = value_tensor(value)
        if node.name in captured.parameters and value in stage.stored:
            shape = stage.layout.local_shape(value, stage.stored[value], (0, *at))
            blank = torch.empty(shape, dtype=kind.dtype, device="meta")
            parameter = nn.Parameter(blank, requires_grad=needs_grad(value))
            if gradients and parameter.requires_grad:
                parameter.grad = torch.empty_like(blank)
            name = captured.parameters[node.name]
            if on_gradient is not None and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: on_gradient(name))
            tensors["parameter", name] = parameter
        elif node.name in captured.buffers:
            tensors["buffer", captured.buffers[node.name]] = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
        elif node.name in captured.constants:
            tensors["constant", node.name] = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
        elif node.name in captured.inputs:
            batch[captured.inputs[node.name]] = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
    sent = list(stage.sent)
    local = LocalStage(
        programs=[program],
        outputs=tuple(f"sent {i}" for i in range(len(sent))) + (("loss",) if stage.loss is not None else ()),
        mutated=tuple(stage.mutated),
        returned=tuple(number for number, _, _ in stage.returned),
        tensors=tensors,
        parameters=(),
        clock=RNGPosition(0),
        device=torch.device("meta"),
    )
    totals = [value_tensor(value) for value in stage.summed]
    local.begin(batch, [torch.empty(total.shape, dtype=total.dtype, device="meta") for total in totals])
    received = []
    for value in stage.received:
        shape = stage.layout.local_shape(value, stage.stored[value], (micro_batch, *at))
        x = torch.empty(shape, dtype=value_tensor(value).dtype, device="meta")
        received.append(x.requires_grad_(needs_grad(value)))
    return local, tuple(received)


def _of_rank(calls: TaskCalls, stage: PlacedStage, actor: int, rank: int) -> TaskCalls:
    """The calls of a rank with the shares of *actor*, along its own lines of the mesh."""
    if rank == actor:
        return calls
    lines = {stage.mesh.group(axis, actor): stage.mesh.group(axis, rank) for axis in range(len(stage.mesh.axes))}
    return TaskCalls(
        forward=tuple(call._replace(ranks=lines[call.ranks]) for call in calls.forward),
        backward=tuple(call._replace(ranks=lines[call.ranks]) for call in calls.backward),
        ready=calls.ready,
    )


def _all_placements(stage: PlacedStage) -> list[Placements]:
    """One placement of every form that occurs in the stage."""
    found: dict[Placements, None] = dict.fromkeys([*stage.stored.values(), *stage.sent.values()])
    for choices in stage.choices.values():
        for kind in ("inputs", "outputs"):
            found.update(dict.fromkeys(zip(*(getattr(choice, kind) for choice in choices), strict=True)))
    return list({stage.layout.form(placed): placed for placed in found}.values())


def _shares(
    stage: PlacedStage, placements: Sequence[Placements], micro_batches: Sequence[int], at: Sequence[int]
) -> object:
    """The lengths of all cut axes at a position in the mesh."""
    return tuple(
        tuple(map(length_of, stage.layout.cuts(placed, (m, *at)))) for m in micro_batches for placed in placements
    )
