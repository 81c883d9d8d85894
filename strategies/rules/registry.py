"""Axis rules: their data form, their notation, and the registry from operators to rules.

A rule names the axes of an operator as einsum does. An axis in an output is *free*: shard it and the output is
sharded. An axis only in inputs is *contracted*: the output is then a term of a sum. Everything else follows: which
inputs need a bridge, and which input gradients are terms of a sum. A rule knows shapes and arguments, never devices,
costs or the rest of the graph.

Notation, one group an operand, in the order of the operator's tensor arguments::

    * i, o i, +o? -> * o        linear; ``*`` any leading dims, aligned right
    b h q d!, b h s! d! -> ...  ``!`` blocks the axis: it is never sharded
    v@form e, * -> * e          sharding axis v needs the special lowering named ``form``
    +o?                         ``+`` added to a contraction: a term of the sum; ``?`` may be absent

A dim of size 1 never takes part in an axis (broadcasting).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from whale.graph.values import Value, is_tensor, output_shapes, resolve, value_shape, value_tensor


@dataclass
class OpAxis:
    """One axis of an operator: its dim in each operand and each output that has it.

    ``factor``: only a factor of each dim is the axis. ``(outer, size)`` sees every dim as [outer, size, rest] and means
    the middle: the groups of a grouped convolution, the windows of a pooling. ``within`` is that axis factor, once the
    graph has been analysed. ``form`` names the special lowering that sharding the axis needs.
    """

    inputs: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    blocked: bool = False
    form: str = ""
    factor: tuple[int, int] | None = None
    within: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Window:
    """A window of an operator along a dim: output *i* reads ``extent`` inputs from ``i * stride - before`` on.

    What lies outside of the whole input counts as ``padding``. Windows touch the input: ``before < extent``.
    """

    stride: int
    before: int
    extent: int
    padding: float = 0.0

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Input range of the outputs whose strides are the inputs from *start* to *stop*; it may extend outside.

        >>> Window(stride=2, before=1, extent=3).reach(0, 4), Window(stride=2, before=1, extent=3).reach(4, 8)
        ((-1, 4), (3, 8))
        """
        first, last = start // self.stride, stop // self.stride - 1
        return first * self.stride - self.before, last * self.stride - self.before + self.extent


@dataclass
class Rule:
    """The sharding rule of one call of an operator.

    ``linear``: sets of operands which may all be terms of a sum at once, the output then being one.
    ``additive``: operands that are added to a contraction. ``views``: (operand, output) pairs that hold the same
    elements under other shapes. ``sums``: (operand, dim, sizes), whose dim is cut into the outputs; operand -1: the
    dim of the output joins the operands. ``local`` rewrites the arguments that speak of sizes for one rank.
    ``windows``: by dim of the first operand, for axes with the form ``halo``.
    """

    axes: list[OpAxis] = field(default_factory=list)
    linear: list[frozenset[int]] = field(default_factory=list)
    additive: frozenset[int] = frozenset()
    views: list[tuple[int, int]] = field(default_factory=list)
    sums: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    windows: dict[int, Window] = field(default_factory=dict)
    local: Callable[[Op, dict[str, Any], LocalShapes], dict[str, Any]] | None = None
    opaque: bool = False


@dataclass(frozen=True)
class LocalShapes:
    """Sizes on this rank: of every operand and output of one call, and where its first output starts per dim."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...] = ()


class Argument(NamedTuple):
    """An argument of an operator's schema, which torch makes anew at every access."""

    name: str
    kwarg_only: bool
    of_tensors: bool
    has_default: bool
    default: Any


@cache
def arguments_of(target: Any) -> tuple[Argument, ...]:
    """The arguments in the schema of an operator."""
    return tuple(
        Argument(a.name, a.kwarg_only, "Tensor" in str(a.type), a.has_default_value(), a.default_value)
        for a in target._schema.arguments
    )


class Op:
    """One call of an operator, with its arguments by name and its tensor operands in order."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.target = node.target
        self.name = target_name(node)
        self.args: dict[str, Any] = {}
        if getattr(node.target, "_schema", None) is not None:
            arguments = arguments_of(node.target)
            for position, argument in enumerate(arguments):
                if position < len(node.args):
                    self.args[argument.name] = node.args[position]
                elif argument.name in node.kwargs:
                    self.args[argument.name] = node.kwargs[argument.name]
                elif argument.has_default:
                    self.args[argument.name] = argument.default
            self.tensor_names = [argument.name for argument in arguments if argument.of_tensors]
        else:
            self.args = {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
            self.tensor_names = list(self.args)
        self.operands: list[Value] = []
        self.positions: dict[str, list[int | None]] = {}
        for name in self.tensor_names:
            given = self.args.get(name)
            one = given is None or isinstance(given, fx.Node)
            leaves = [given] if one else pytree.tree_leaves(given, is_leaf=lambda x: x is None)
            slots: list[int | None] = []
            for leaf in leaves:
                if isinstance(leaf, fx.Node) and is_tensor(leaf):
                    slots.append(len(self.operands))
                    self.operands.append(resolve(leaf))
                else:
                    slots.append(None)
            self.positions[name] = slots

    def operand(self, name: str) -> int | None:
        """Index of the operand given as the argument *name*; None where it is absent."""
        slots = self.positions.get(name) or [None]
        return slots[0]

    def shape(self, operand: int) -> tuple[int, ...]:
        """Whole shape of an operand."""
        return value_shape(self.operands[operand])

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """Whole shapes of the outputs."""
        return output_shapes(self.node)


def target_name(node: fx.Node) -> str:
    """The operator's name without its overload, as ``aten.linear``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket._qualified_op_name.replace("::", ".")
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


Derivation = Callable[[Op], Rule | None]
REGISTRY: dict[str, Derivation] = {}


def register(*names: str) -> Callable[[Derivation], Derivation]:
    """Register a derivation for operators (names as :func:`target_name` gives them), or for a namespace of them. It
    returns None to refuse."""

    def add(derivation: Derivation) -> Derivation:
        for name in names:
            REGISTRY[name] = derivation
        return derivation

    return add


def notation(text: str, *names: str, guard: Callable[[Op], bool] | None = None) -> None:
    """Register a rule in the notation of this file. *guard* refuses calls whose arguments it does not cover."""
    left, right = (side.strip() for side in text.split("->"))
    groups = [group.split() for group in left.split(",")]
    outputs = [group.split() for group in right.split(",")]

    def derive(op: Op) -> Rule | None:
        if guard is not None and not guard(op):
            return None
        return from_notation(op, groups, outputs)

    for name in names:
        REGISTRY[name] = derive


_TOKEN = re.compile(r"(?P<name>\*|\w+)(?P<blocked>!?)(?:@(?P<form>\w+))?(?P<optional>\??)$")


def from_notation(op: Op, groups: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]]) -> Rule | None:
    """Bind a parsed notation to one call; None if the ranks of its tensors do not fit."""
    axes: dict[str, OpAxis] = {}
    additive: set[int] = set()

    def bind(tokens: Sequence[str], shape: tuple[int, ...], index: int, side: str) -> bool:
        names: list[tuple[str, bool, str]] = []
        for token in tokens:
            match = _TOKEN.match(token.lstrip("+"))
            assert match is not None, token
            names.append((match["name"], bool(match["blocked"]), match["form"] or ""))
        stars = [i for i, (name, _, _) in enumerate(names) if name == "*"]
        if stars:
            extra = len(shape) - (len(names) - 1)
            if extra < 0:
                return False
            at = stars[0]
            leading = [(f"*{extra - i}", names[at][1], "") for i in range(extra)]
            names = names[:at] + leading + names[at + 1 :]
        if len(names) != len(shape):
            return False
        for dim, (name, blocked, form) in enumerate(names):
            axis = axes.setdefault(name, OpAxis())
            axis.blocked |= blocked
            axis.form = axis.form or form
            if shape[dim] != 1:
                getattr(axis, side)[index] = dim
        return True

    slots = [slot for name in op.tensor_names for slot in op.positions[name]]
    for position, tokens in enumerate(groups):
        slot = slots[position] if position < len(slots) else None
        if slot is None:
            if not any(token.endswith("?") for token in tokens):
                return None
            continue
        if not bind(tokens, op.shape(slot), slot, "inputs"):
            return None
        if tokens and tokens[0].startswith("+"):
            additive.add(slot)
    for index, tokens in enumerate(outputs):
        if index < len(op.outputs) and not bind(tokens, op.outputs[index], index, "outputs"):
            return None
    return Rule(axes=list(axes.values()), additive=frozenset(additive))


def broadcast_axes(op: Op, operands: Iterable[int], output: int = 0, blocked: Iterable[int] = ()) -> list[OpAxis]:
    """Axes of operands that broadcast against each other to one output; dims in *blocked* are of the output."""
    shape = op.outputs[output]
    blocked = {dim % max(len(shape), 1) for dim in blocked}
    axes: list[OpAxis] = []
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        axis = OpAxis(outputs={output: dim}, blocked=dim in blocked)
        for operand in operands:
            own = op.shape(operand)
            position = dim - (len(shape) - len(own))
            if position >= 0 and own[position] == size:
                axis.inputs[operand] = position
        axes.append(axis)
    return axes


def same_axes(op: Op, operand: int, blocked: Iterable[int] = (), outputs: Iterable[int] = (0,)) -> list[OpAxis]:
    """Axes of an operator whose outputs have the dims of one operand, some of them blocked."""
    shape = op.shape(operand)
    blocked = {dim % max(len(shape), 1) for dim in blocked}
    axes = []
    for dim, size in enumerate(shape):
        axis = OpAxis(inputs={operand: dim}, blocked=dim in blocked)
        for output in outputs:
            if dim < len(op.outputs[output]) and op.outputs[output][dim] == size:
                axis.outputs[output] = dim
            else:
                axis.blocked = True
        axes.append(axis)
    return axes


def rule_of(node: fx.Node) -> Rule:
    """The rule of a call: registered, derived for pointwise operators, or opaque (computed whole)."""
    op = Op(node)
    derivation = REGISTRY.get(op.name) or REGISTRY.get(op.name.partition(".")[0])
    rule: Rule | None = None
    if derivation is not None:
        rule = derivation(op)
    elif isinstance(op.target, torch._ops.OpOverload) and torch.Tag.pointwise in op.target.tags:
        rule = pointwise(op)
    if rule is None:
        return Rule(opaque=True)
    rule.linear = [operands for operands in rule.linear if _carries_terms(op, operands)]
    return rule


def _carries_terms(op: Op, operands: Iterable[int]) -> bool:
    """Whether the outputs hold terms of a sum as exactly as the operands: a cast to fewer digits is not linear."""
    outputs = [value_tensor((op.node, i)).dtype for i in range(len(op.outputs))]
    sources = [value_tensor(op.operands[i]).dtype for i in operands]
    pairs = [(source, out) for source in sources for out in outputs]
    return all(torch.bool not in pair and torch.promote_types(*pair) == pair[1] for pair in pairs)


def pointwise(op: Op) -> Rule:
    """The rule of every elementwise operator: operands broadcast to the output."""
    return Rule(axes=broadcast_axes(op, range(len(op.operands))))
