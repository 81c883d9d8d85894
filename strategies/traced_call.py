"""One operator, forward and backward, as the operators below autograd that both run: traced on tensors without data.

Calls with equal arguments are traced once, and many equal layers take the time of one. A call that depends on values,
or whose backward is a script's own, is not traced: autograd keeps what it needs on a tape. It knows operators and
tensors; nothing of the graph that they are in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from whale.graph.canonical import COMPUTED
from whale.graph.row_wise import by_target
from whale.runtime.collectives import Bridge
from whale.runtime.derivative import noting_saved
from whale.runtime.local_program import LocalCode
from whale.runtime.random import SeededCall
from whale.runtime.recording import recorded, recording

__all__ = [
    "Call",
    "Hole",
    "Kind",
    "Known",
    "Trace",
    "dense",
    "fake_like",
    "key_of",
    "known_call",
    "makes_alias",
    "makes_gradients_anew",
    "run_without_data",
    "sum_without_data",
    "traced",
    "is_pure",
    "writes",
    "written_to",
]

aten = torch.ops.aten

_fakes = FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    strides: Sequence[int] | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor without data that knows its device; contiguous without *strides*."""
    with _fakes:
        if strides is None:
            x = torch.empty(tuple(shape), dtype=dtype, device=device)
        else:
            x = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
    return x.requires_grad_(requires_grad)


def dense(x: Tensor) -> Tensor:
    """A tensor without data in the shape of another, without gaps, with its dims in the same order in memory."""
    with _fakes:
        return torch.empty_like(x, requires_grad=False)


def sum_without_data(x: Tensor, y: Tensor) -> Tensor:
    """A tensor like the sum of two."""
    with _fakes, torch.no_grad():
        return x + y


def run_without_data(code: LocalCode, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results of a graph for tensors without data."""
    with recording(), _fakes, torch.no_grad():
        found: Sequence[Tensor] = code.once(*arguments)
    return found


class Kind(NamedTuple):
    """The properties of a tensor on which a trace depends."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> Kind:
        """The kind of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad)

    def fake(self) -> Tensor:
        """A tensor of this kind, without data."""
        return fake_like(self.shape, self.dtype, self.device, strides=self.strides, requires_grad=self.requires_grad)


@dataclass(frozen=True)
class Hole:
    """The place of a tensor among the arguments of a call."""

    number: int


@dataclass(eq=False)
class Call:
    """An operator, a function or a module with its arguments, of which tensors are holes."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def module(self) -> nn.Module | None:
        """The target, if it is a module."""
        return self.target if isinstance(self.target, nn.Module) else None

    def filled(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors, or with what stands for them."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda x: tensors[x.number] if isinstance(x, Hole) else x, (self.args, self.kwargs)
        )
        return found

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Call it."""
        args, kwargs = self.filled(tensors)
        return self.target(*args, **kwargs)


@dataclass(eq=False)
class Trace:
    """The operators of a call.

    Attributes:
        graph: has placeholders for the tensors, then for the gradients of results that have one.
        root: constants that the graph reads.
        modules: recorded ones, by number.
        forward: the nodes of the forward; all others are the backward's.
        results: those of the call; None where it returns none.
        gradients: of the tensors; None where there is none.
    """

    graph: fx.Graph
    root: nn.Module
    modules: Mapping[int, Any]
    forward: frozenset[fx.Node]
    results: list[fx.Node | None]
    gradients: list[fx.Node | None]

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholders of the tensors and of the gradients."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]


@dataclass(eq=False)
class Known:
    """Facts of calls with equal arguments: tensors like the results, the numbers of the operands that autograd saves,
    as far as that is known, or all, and traces by the kinds of gradients."""

    results: Any
    saved: tuple[int, ...]
    traces: dict[tuple[Kind | None, ...], Trace | None] = field(default_factory=dict)


_known: dict[Any, Known] = {}
_MOST_KNOWN = 1024


def key_of(call: Call, tensors: Sequence[Tensor]) -> Hashable:
    """Return what the facts of a call with tensors like these depend on; None where that is not comparable: of modules
    only bridges are, whose names are not compared."""
    module = call.module
    if module is not None and not isinstance(module, Bridge):
        return None
    target = call.target if module is None else (type(module), module.conversion)
    return target, torch.get_default_dtype(), _frozen((call.args, call.kwargs)), *map(Kind.of, tensors)


def known_call(call: Call, tensors: Sequence[Tensor]) -> Known:
    """The facts of a call with tensors like these."""
    key = key_of(call, tensors)
    if key in _known:
        return _known[key]
    fakes = [Kind.of(x).fake() for x in tensors]
    with recording(), _fakes, torch.enable_grad():
        if _is_for_tape(call):
            with noting_saved(fakes) as saved:
                found = call(fakes)
        else:
            found, saved = call(fakes), set(range(len(fakes)))
        results = pytree.tree_map(
            lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x, found
        )
    known = Known(results, tuple(sorted(saved)))
    if key is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = known
    return known


def _is_for_tape(call: Call) -> bool:
    """Whether a call is not traced: a script's own backward may do anything, such as print, and some modules say so."""
    return call.target in by_target or getattr(call.module, "is_opaque", False)


def makes_gradients_anew(call: Call) -> bool:
    """Whether the backward of a call makes its gradients: that of a script may return one that it holds, a constant."""
    if not getattr(call.module, "is_opaque", False):
        return False
    code = getattr(call.module, "code", None)
    return not isinstance(code, LocalCode) or not any(node.target in by_target for node in code.graph.nodes)


def traced(call: Call, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Trace | None:
    """Trace a call.

    Args:
        call: of some tensors.
        tensors: like those.
        gradients: like those of its results, None where there is none.

    Returns:
        None if it cannot be traced.
    """
    if isinstance(call.module, Bridge):  # equal ones share the trace, whose exchanges get the name of each
        call = Call(Bridge(call.module.conversion), call.args, call.kwargs)
    if _is_for_tape(call):
        return None
    primals = [Kind.of(x).fake() for x in tensors]
    tangents = [Kind.of(x).fake() for x in gradients if x is not None]
    with recording() as modules, _fakes, torch.enable_grad(), _Recorder([*primals, *tangents]) as recorder:
        try:
            found = call(primals)
            forward = frozenset(node for node in recorder.graph.nodes if node.op != "placeholder")
            results = list(found) if isinstance(found, (tuple, list)) else [found]
            roots = [x for x, gradient in zip(results, gradients, strict=True) if gradient is not None]
            wanted = [x for x in primals if x.requires_grad]
            made = iter(torch.autograd.grad(roots, wanted, tangents, allow_unused=True))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None
        if any(node.target in _WITH_AUTOGRAD for node in recorder.graph.nodes):
            return None
        trace = Trace(
            recorder.graph,
            recorder.root,
            dict(modules),
            forward,
            [recorder.node(x) if isinstance(x, Tensor) else None for x in results],
            [recorder.node(next(made)) if x.requires_grad else None for x in primals],
        )
        recorder.graph.output((*trace.results, *trace.gradients))
    _simplify(trace)
    if isinstance(call.module, SeededCall):
        _draw_by_position(trace, call.module)
    return trace


_WITH_AUTOGRAD = {aten.mkldnn_rnn_layer.default}
"""Operators that return what their backward needs only while autograd is on; graphs run without it."""


class _Recorder(TorchDispatchMode):
    """Writes the operators that run into a graph."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.root = fx.Graph(), nn.Module()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the number of one
        for number, x in enumerate(inputs):
            self._note(x, self.graph.placeholder(f"x_{number}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether each call is shielded from Dynamo, which costs more than a call: nothing is compiled here."""
        return False

    def node(self, x: Tensor | None) -> fx.Node | None:
        """The node of a tensor; one that no operator made is a constant."""
        if x is None:
            return None
        if id(x) not in self._nodes:
            name = f"constant_{len(self._alive)}"
            self.root.register_buffer(name, x)
            self._note(x, self.graph.get_attr(name))
        return self._nodes[id(x)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in _ASKED:
            return found
        given = pytree.tree_map_only(Tensor, self.node, (tuple(args), kwargs))
        node = self.graph.call_function(func, *given)
        if isinstance(found, Tensor):
            self._note(found, node)
        elif isinstance(found, (tuple, list)):
            for number, x in enumerate(found):
                if isinstance(x, Tensor):
                    self._note(x, self.graph.call_function(operator.getitem, (node, number)))
        return found

    def _note(self, x: Tensor, node: fx.Node) -> None:
        node.meta["val"] = x
        self._nodes[id(x)] = node
        self._alive.append(x)


_ASKED = {torch.ops.prim.device.default, aten.size.default, aten.stride.default}
"""Calls that only ask for a property of a tensor."""


def _frozen(x: Any) -> Any:
    """A key of arguments; numbers with their types, because some equal numbers have different ones."""
    if isinstance(x, (tuple, list)):
        return tuple(map(_frozen, x))
    if isinstance(x, dict):
        return tuple((name, _frozen(value)) for name, value in x.items())
    if isinstance(x, slice):
        return "slice", x.start, x.stop, x.step
    return ("hole", x.number) if isinstance(x, Hole) else (type(x), x)


_SAME = {aten.detach.default, aten.alias.default, aten.resolve_conj.default, aten.resolve_neg.default}
"""Operators that do nothing below autograd, where no tensor is a view of its conjugate or its negative."""

_VIEWS = {aten.view.default, aten._unsafe_view.default}
"""Operators that fail for tensors in another layout: a few kernels, such as that of the gradient of CTC, return another
one than torch expects of them without data. A reshape then copies, and else is the same."""


def _simplify(trace: Trace) -> None:
    same: dict[Any, Any] = {}
    for node in trace.graph.nodes:
        if node.target in _SAME:
            source = node.args[0]
            same[node] = same.get(source, source)
            node.replace_all_uses_with(same[node])
        elif node.target in _VIEWS:
            node.target = aten.reshape.default
        elif node.target in COMPUTED:
            node.target = COMPUTED[node.target]
    trace.results = [same.get(x, x) for x in trace.results]
    trace.gradients = [same.get(x, x) for x in trace.gradients]
    for node in reversed(list(trace.graph.nodes)):
        unused = node.op in ("call_function", "get_attr") and not node.users
        if unused and not writes(node) and node.target is not recorded:
            trace.graph.erase_node(node)
    left = set(trace.graph.nodes)
    trace.forward = frozenset(node for node in trace.forward if node in left)


def _draw_by_position(trace: Trace, seeded: SeededCall) -> None:
    """Let operators that draw random numbers draw them as the call does."""
    for node in trace.forward:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta["module"] = seeded.of(node.target)  # type: ignore[arg-type]


def writes(node: fx.Node) -> bool:
    """Whether an operator writes to an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def is_pure(node: fx.Node) -> bool:
    """Whether a node is an operator that computes nothing but its results, always the same ones."""
    pure = isinstance(node.target, torch._ops.OpOverload) and not writes(node)
    return pure and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]


def makes_alias(node: fx.Node) -> bool:
    """Whether an operator returns an argument or a view of it; its first one."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(argument.alias_info is not None for argument in schema.arguments)


def written_to(graph: fx.Graph) -> set[fx.Node]:
    """The values of a graph in whose memory something is written after they are made, by themselves or through a
    view."""
    owners: dict[fx.Node, fx.Node] = {}  # of the memory
    written = set()
    for node in graph.nodes:
        operands = node.all_input_nodes
        shares = operands and (node.target is operator.getitem or makes_alias(node))
        owners[node] = owners[operands[0]] if shares else node
        if writes(node):
            names = {argument.name: n for n, argument in enumerate(node.target._schema.arguments) if argument.is_write}
            given = [node.args[n] if n < len(node.args) else node.kwargs.get(name) for name, n in names.items()]
            fx.node.map_arg((node, given), lambda one: written.add(owners[one]))
    return {node for node, owner in owners.items() if owner in written}
