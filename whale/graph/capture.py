"""Capture: a model's training computation as one graph of aten operators, without allocating anything.

The model is copied with fake parameters, its annotated modules are wrapped, and ``torch.export`` (non-strict) records
the loss as a function of parameters, buffers and batch. The graph is that of the *global* batch: shapes are plain
numbers, and data parallelism, micro-batches and ragged batches later divide it. This module knows no devices to run on,
placements or process groups.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from whale.annotations import NODE_KEY, enter_module, module_scopes, recording
from whale.errors import CaptureError, UsageError
from whale.graph.canonical import DRAWS, canonicalize, functional, inline_regions
from whale.graph.capture_checks import check_batch, check_constant, check_dtypes, check_hooks, check_static
from whale.graph.capture_errors import capture_error
from whale.graph.copies import model_copy, reading
from whale.graph.custom_functions import checking_functions
from whale.graph.forward_state import Listing, Steadiness, graph_listing
from whale.graph.loss_copies import function_of_copy
from whale.graph.losses import any_sum, pick_loss
from whale.graph.made_once import (
    Attribute,
    Left,
    Made,
    buffers_made,
    copied,
    left_by,
    made_once,
    set_made_buffers,
    write_made,
)
from whale.graph.nodes import inner_modules, node_copy
from whale.graph.numbers import numbers_to_tensors
from whale.graph.origins import SourceLine, located, modules_around, place_of_forward, place_of_node
from whale.graph.precision import Autocast, under_autocast, write_casts
from whale.graph.rebinding import places_of
from whale.graph.refusing import refusing
from whale.graph.repeats import Repeats
from whale.graph.structure import Structure
from whale.graph.values import Value, is_call, resolve
from whale.ir.program import Returns
from whale.ir.strategy import ScopePath, encode_scopes

Batch = Any
"""A dict of keyword arguments, a tuple of positional arguments, or one tensor."""

LossFn = Callable[..., Any]
"""A function of a model's output and the batch."""


@dataclass(kw_only=True)
class Captured:
    """A captured model: its graph and what its placeholders are.

    ``parameters`` and ``buffers`` map a placeholder's name to the tensor's name in the model (the first of its names
    if it is tied), ``constants`` to a tensor, ``inputs`` to the batch leaf that it reads. The graph's output is the
    loss (any number, if the model returned none: not ``has_loss``) followed by the new values of the buffers in
    ``mutated``, and the tensors of ``structure``, that of the model's output, where it is wanted. ``stage_regions`` are
    those of annotated modules, whether they run or not, and of ``with`` statements, whether they compute or not.
    ``made`` are attributes as the first forward leaves them, with which it was captured.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: dict[str, str]
    mutated: tuple[str, ...] = ()
    structure: Structure | None = None
    has_loss: bool = True
    aliases: dict[str, str] = field(default_factory=dict)
    stage_regions: tuple[str, ...] = ()
    written: tuple[tuple[str, SourceLine | None], ...] = ()
    made: Mapping[Attribute, Any] = field(default_factory=dict)

    @property
    def new_values(self) -> dict[str, Value]:
        """The values that the forward writes into buffers, by their names."""
        outputs: tuple[Any, ...] = self.graph.output_node().args[0]  # type: ignore[assignment]
        return {name: resolve(node) for name, node in zip(self.mutated, outputs[1:], strict=False)}

    @property
    def device(self) -> torch.device:
        """The device that its operators name."""
        values = (node.meta.get("val") for node in self.graph.nodes)
        return next((x.device for x in values if isinstance(x, torch.Tensor)), torch.device("cpu"))

    @property
    def module(self) -> fx.GraphModule:
        """The graph as a callable of its placeholders, in order."""
        return fx.GraphModule(nn.Module(), self.graph)


def copy_of(captured: Captured) -> Captured:
    """A copy with its own graph and names, which may be changed independently."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in captured.graph.nodes:
        copies[node] = node_copy(graph, node, copies.__getitem__)
    return replace(
        captured,
        graph=graph,
        parameters=dict(captured.parameters),
        buffers=dict(captured.buffers),
        constants=dict(captured.constants),
        inputs=dict(captured.inputs),
    )


def batch_leaves(batch: Batch) -> dict[str, Any]:
    """The leaves of a batch by name: the keyword, or ``args[i]``."""
    if isinstance(batch, Mapping):
        return dict(batch)
    items = batch if isinstance(batch, (tuple, list)) else (batch,)
    return {f"args[{i}]": item for i, item in enumerate(items)}


def batch_rows(batch: Batch) -> int | None:
    """The rows of a batch: the length of the first dim of its first tensor that has one."""
    leaves = batch_leaves(batch).values()
    return next((len(x) for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 0), None)


@dataclass
class _Found:
    """Findings of a forward: torch.export takes back what is assigned to modules."""

    structure: Structure | None = None
    has_loss: bool = True
    buffers: Mapping[Attribute, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Later:
    """A forward that has made what it keeps, and why it is refused if a later one does anything else differently."""

    made: Made
    error: CaptureError

    def check(self, now: Made) -> None:
        """Compare with the next forward.

        Raises:
            CaptureError: it computes something else, or does not leave again what the first one left.
        """
        if now.computed != self.made.computed or not self.made.lost <= now.lost:
            raise self.error


class _Loss(nn.Module):
    """The model with the selection of its loss, and *checks* at the end of its forward."""

    loss_fn: Callable[..., Any] | None

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        loss_fn: Callable[..., Any] | None,
        checks: Sequence[Callable[[], None]] = (),
        returns: Returns = "loss",
        found: _Found | None = None,
        numbers: Mapping[str, float | None] | None = None,
    ) -> None:
        super().__init__()
        self.numbers = {} if numbers is None else numbers
        self.model = model
        self.names = tuple(names)
        self.__dict__["loss_fn"] = loss_fn  # not a module of the model, whose tensors have names
        self.first = places_of(model)
        self.checks = tuple(checks)
        self.returns = returns
        self.found = _Found() if found is None else found

    def forward(self, *leaves: Any) -> Any:
        with reading(self.model, self.first, self.loss_fn) as loss_fn:
            return self._results(leaves, loss_fn)

    def _results(self, leaves: Sequence[Any], loss_fn: LossFn | None) -> Any:
        values = dict(zip(self.names, leaves, strict=True))
        for name, constant in self.numbers.items():
            values[name] = values[name].item() if constant is None else constant
        held = {path: (inner, dict(inner._buffers)) for path, inner in self.model.named_modules()}
        args = [v for k, v in values.items() if k.startswith("args[")]
        kwargs = {k: v for k, v in values.items() if not k.startswith("args[")}
        if loss_fn is None:
            output = self.model(*args, **kwargs)
        else:
            accepted = _accepted(self.model, len(args), kwargs)
            output = self.model(*args[: accepted[0]], **{k: kwargs[k] for k in accepted[1]})
        if self.returns != "loss":
            self.found.structure, tensors = Structure.of(output)
        loss = None
        if self.returns != "outputs":
            batch = kwargs if kwargs else tuple(args)
            output = output if loss_fn is None else _loss_of(loss_fn, output, batch)
            loss = pick_loss(output, required=self.returns == "loss" or self.training)
        self.found.has_loss = loss is not None
        if loss is None:
            loss = any_sum(tensors)
        self.found.buffers = _write_replaced(held)
        for check in self.checks:
            check()
        return loss if self.returns == "loss" else (loss, *tensors)


def _loss_of(loss_fn: Callable[..., Any], output: Any, batch: Any) -> Any:
    """The loss that a loss_fn returns.

    Raises:
        UsageError: it takes other arguments than the output and the whole batch, as losses of torch do.
    """
    try:
        return loss_fn(output, batch)
    except (TypeError, AttributeError, LookupError) as error:
        if "numpy" in str(error) or isinstance(error, UsageError):
            raise
        shown = f"a tuple of {len(batch)}" if isinstance(batch, tuple) else f"a dict of {', '.join(batch)}"
        last = len(batch) - 1 if isinstance(batch, tuple) else list(batch)[-1]
        function = getattr(loss_fn, "__name__", "")
        example = function if function.isidentifier() else "loss"
        raise UsageError(
            f"loss_fn raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; it is called "
            f"as loss_fn(output, batch), where the batch is {shown}: write loss_fn=lambda output, batch: "
            f"{example}(output, batch[{last!r}])"
        ) from error


def _write_replaced(
    held: Mapping[str, tuple[nn.Module, Mapping[str, torch.Tensor | None]]],
) -> dict[Attribute, torch.Tensor]:
    """Copy replaced buffers into the original ones: torch.export handles replacement in the root module only. Returns
    those that were none, or that a forward had made, and that are others now.

    Raises:
        CaptureError: the new one is of another shape or dtype, at the line of the module's forward.
    """
    known = {(path, name) for path, name, _ in buffers_made(held[""][0])}
    replaced = [
        (path, module, name, old, module._buffers.get(name))
        for path, (module, buffers) in held.items()
        for name, old in buffers.items()
        if old is not None and module._buffers.get(name) is not old and (path, name) not in known
    ]
    found = {
        Attribute(path, name, "buffer"): x
        for path, (module, buffers) in held.items()
        for name, x in module._buffers.items()
        if x is not None and x is not buffers.get(name) and (buffers.get(name) is None or (path, name) in known)
    }
    for module, buffers in held.values():
        module._buffers.update(buffers)
    for path, module, name, old, new in replaced:
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            made = "None" if new is None else f"one of shape {tuple(new.shape)} and {new.dtype}"
            raise located(
                f"the forward replaces the buffer {f'{path}.{name}'.removeprefix('.')} of shape {tuple(old.shape)} and "
                f"{old.dtype} by {made}, but a step keeps the buffers that it began with: if it is made once for "
                "inputs of a shape, call the model once on such a batch before parallelize; else write to a buffer of "
                "the greatest shape",
                place_of_forward(module),
            )
        old.copy_(new.detach())
    return found


def _accepted(model: nn.Module, num_args: int, kwargs: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Number of positional arguments, and keywords, that the model's forward takes of a batch with a loss_fn."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose own forward takes anything
    signature = getattr(model.forward, "__wrapped__", model.forward)
    parameters = inspect.signature(signature).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return num_args, list(kwargs)
    names = [p.name for p in parameters]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    return max(min(num_args - 1, len(positional)), min(required, num_args)), [k for k in kwargs if k in names]


def fake_copy(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy of the model whose parameters and buffers are fake tensors on *device*; tied ones stay tied."""
    memo: dict[int, Any] = {}
    with mode:
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) in memo:
                continue
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = fake
    return model_copy(model, memo)


def fake_batch(leaves: Mapping[str, Any], mode: FakeTensorMode, device: torch.device) -> dict[str, Any]:
    """Fake copies of the batch's tensors: equal but distinct, so that aliased ones are not merged."""
    with mode:
        return {
            k: torch.empty(v.shape, dtype=v.dtype, device=device) if isinstance(v, torch.Tensor) else v
            for k, v in leaves.items()
        }


def _without_caches(model: nn.Module) -> None:
    """Let a transformer not keep the keys and values of its attentions, which only generating text reads."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False  # type: ignore[union-attr]


def _register_plain(model: nn.Module) -> None:
    """Register the buffers that modules have as plain attributes too, as ``self.mean = self.norm.running_mean``."""
    buffers = {id(buffer) for buffer in model.buffers()}
    for module in model.modules():
        for name in [name for name, x in vars(module).items() if id(x) in buffers]:
            module._buffers[name] = vars(module).pop(name)


def _duplicate(
    model: nn.Module, mode: FakeTensorMode, device: torch.device, loss_fn: LossFn | None
) -> tuple[nn.Module, LossFn | None]:
    """A copy of the model with fake tensors, as it is traced, and its loss."""
    duplicate = fake_copy(model, mode, device)
    loss_fn = loss_fn and function_of_copy(loss_fn, model, duplicate)
    _register_plain(duplicate)
    _without_caches(duplicate)
    set_made_buffers(duplicate)
    wrap_annotated(duplicate)
    return duplicate, loss_fn


def run_without_data(
    model: nn.Module,
    fakes: Mapping[str, Any],
    mode: FakeTensorMode,
    *,
    device: torch.device,
    loss_fn: Callable[..., Any] | None,
    returns: Returns,
    numbers: Collection[str] = (),
    start: Callable[[nn.Module], None] = lambda duplicate: None,
) -> None:
    """Run the forward of a copy of *model* on fake leaves, after *start*."""
    duplicate, loss_fn = _duplicate(model, mode, device, loss_fn)
    root = _Loss(duplicate, list(fakes), loss_fn, returns=returns, numbers=dict.fromkeys(numbers))
    root.training = model.training
    with _tracing(), mode:
        start(duplicate)
        root(*fakes.values())


def capture(
    model: nn.Module,
    batch: Batch,
    *,
    device: torch.device | str = "cpu",
    loss_fn: Callable[..., Any] | None = None,
    promote: bool = False,
    returns: Returns = "loss",
    numbers: Collection[str] = (),
    precision: torch.dtype | None = None,
    values: Callable[[str], torch.Tensor | None] | None = None,
) -> Captured:
    """Capture the loss of *model* on a batch of these shapes, or what else a step *returns*.

    With a *precision* it is captured as it computes under ``torch.autocast`` with this dtype.
    *promote* turns casts to float32 inside the model into casts to float64 (for comparisons in float64). The leaves
    *numbers*, of type float, become tensors without dims; that fails where the model does more than compute with one.
    *values* gives a buffer of the model by its name, of which the first forward may make what later ones read; without
    it those that have no data have any.
    Raises :class:`CaptureError` with the user's file and line where the model cannot be captured.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device(device)
    autocast = Autocast(device.type, precision)
    leaves = batch_leaves(batch)
    check_batch(model, leaves, loss_fn)
    check_hooks(model)
    given = {name: float(leaves[name]) for name in numbers}
    leaves = {name: torch.tensor(leaf, dtype=torch.float64) if name in given else leaf for name, leaf in leaves.items()}
    fakes = fake_batch(leaves, mode, device)
    found = _Found()
    own = dict(model.named_buffers(remove_duplicate=False))

    def value_of(name: str) -> torch.Tensor | None:
        x = None if values is None else values(name)
        x = own.get(name) if x is None else x
        return torch.zeros_like(x, device=device) if values is None and x is not None and x.is_meta else x

    def own_name(name: str) -> str:
        return name.removeprefix("model.")

    def made_by(left: Left, program: torch.export.ExportedProgram) -> Made:
        known = {**buffers_made(model), **{one: x for one, x in made.items() if one.kind == "buffer"}}
        buffers = {f"{path}.{name}".removeprefix("."): x for (path, name, _), x in known.items()}
        return made_once(program, left, lambda name: buffers.get(own_name(name), value_of(own_name(name))))

    made: dict[Attribute, Any] = {}
    later: list[_Later] = []
    before_made: list[Listing] = []
    made_buffers: dict[Attribute, torch.Tensor] = {}

    def duplicated() -> tuple[nn.Module, LossFn | None]:
        duplicate, loss = _duplicate(model, mode, device, loss_fn)
        write_made(duplicate, copied(made))
        set_made_buffers(duplicate)
        return duplicate, loss

    def root_of(
        duplicate: nn.Module,
        loss: LossFn | None,
        *checks: Callable[[], None],
        values: Mapping[str, float] | None = None,
    ) -> _Loss:
        symbols = dict.fromkeys(given) if values is None else values
        root = _Loss(duplicate, list(fakes), loss, checks, returns, found, symbols)
        root.training = model.training  # modules inside of it keep their own modes
        return root

    def export(root: nn.Module) -> torch.export.ExportedProgram:
        return torch.export.export(root, tuple(fakes.values()), strict=False)

    def exported_again(root: nn.Module) -> fx.Graph:
        with _tracing():
            program = export(root)
        _check_constants(program, model)  # what the first trace has left in Python has no data
        return program.graph

    def run(start: Callable[[nn.Module], None]) -> None:
        options: dict[str, Any] = {"device": device, "loss_fn": loss_fn, "returns": returns, "numbers": given}
        with under_autocast(autocast):
            run_without_data(model, fakes, mode, **options, start=start)

    def exported(*, copying: bool) -> tuple[torch.export.ExportedProgram, int]:
        """The exported program, and the number of stages that the forward enters; most equal layers are copies, unless
        all are traced."""
        duplicate, loss = duplicated()
        first: tuple[Steadiness, Listing] | None = None
        try:
            with _tracing() as entered:
                repeats = Repeats(duplicate, entered) if copying else None
                checks = [repeats.check] if repeats is not None else []
                steadiness = Steadiness(duplicate, loss)
                with steadiness.observing():
                    program = export(root_of(duplicate, loss, *checks, lambda: steadiness.end(found.buffers)))
                if repeats is not None:
                    repeats.finish(program.graph)
                if given:
                    constant = export(root_of(*duplicated(), values=given)).graph
                    numbers_to_tensors(program.graph, _holes(program, fakes, given), constant)
                if later and not copying:
                    later[-1].check(made_by(left_by(steadiness.left), program))
                if not (copying and steadiness.kept_something):
                    check_static(program.graph, type(model).__name__)
            listings.append(graph_listing(program.graph) if steadiness.kept_something or listings else [])
            if steadiness.kept_something and copying:
                first = steadiness, listings[0]
            elif steadiness.kept_something:
                root = root_of(duplicate, loss, lambda: steadiness.end(found.buffers))
                left, is_alone = left_by(steadiness.left), steadiness.is_kept_alone
                try:
                    steadiness.check(program.graph, lambda: exported_again(root), run)
                except CaptureError as error:
                    makes = made_by(left, program)
                    if not (is_alone and makes.attributes and made.keys().isdisjoint(makes.attributes)):
                        raise
                    made.update(makes.attributes)
                    later.append(_Later(makes, error))
                    before_made.append(listings[-1])
                    return exported(copying=False)
                steadiness.leave(model)
            _check_constants(program, model)
            _merge_tied(program, duplicate, model)
            if first is None and _mutates(program.graph):
                _detach_regions(program.graph)
                lines = _lines(program.graph)
                with _tracing():
                    program = program.run_decompositions({})
                _note_lines(program.graph, lines)
        except Exception as error:
            if copying:  # the copies may be the cause
                return exported(copying=False)
            raise capture_error(error, model) from error
        if first is not None:
            traced = exported(copying=False)
            steadiness, listing = first
            steadiness.check_second(listing, before_made[0] if before_made else listings[-1])
            return traced
        made_buffers.update(buffers_made(duplicate))
        return program, entered["stage"]

    listings: list[Listing] = []
    # A model that will run is traced completely: differences between its layers may be invisible to the comparison.
    with under_autocast(autocast):
        program, stages = exported(copying=not _has_values(model))
    captured = _read_signature(program, model, list(fakes), made_buffers)
    captured.structure, captured.has_loss, captured.made = found.structure, found.has_loss, copied(made)
    inline_regions(captured.graph)
    write_casts(captured.graph, autocast, captured.parameters)
    check_dtypes(captured.graph, type(model).__name__)
    canonicalize(captured.graph, promote=promote)
    mark_gradients(captured, model)
    marked = module_scopes(model)
    _scope_by_modules(captured.graph, marked)
    scopes = (scope for path in marked.values() for scope in path)
    annotated = dict.fromkeys(s.region for s in scopes if s.strategy.makes_stage)
    captured.stage_regions = (*annotated, *(f"stage#{i}" for i in range(stages)))
    return captured


def _scope_by_modules(graph: fx.Graph, marked: Mapping[str, ScopePath]) -> None:
    """Give the scopes of their modules to operators without some: functionalization drops those of ``no_grad`` regions,
    in which a parametrization updates its buffers."""
    for node in graph.nodes:
        custom = node.meta.get("custom") or {}
        if is_call(node) and NODE_KEY not in custom:
            inner = next((marked[path] for path in reversed(modules_around(node)) if path in marked), ())
            if inner:
                node.meta["custom"] = {**custom, NODE_KEY: encode_scopes(inner)}


def _holes(
    program: torch.export.ExportedProgram, leaves: Iterable[str], numbers: Mapping[str, float]
) -> dict[fx.Node, float]:
    """The placeholders of numbers, with their values."""
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = {spec.arg.name: numbers.get(leaf) for spec, leaf in zip(specs, leaves, strict=True)}
    holes = program.graph.find_nodes(op="placeholder")
    return {node: value for node in holes if (value := values.get(node.name)) is not None}


@contextmanager
def _tracing() -> Iterator[Mapping[str, int]]:
    """Context for a trace: how many annotations of each kind it enters."""
    with (
        warnings.catch_warnings(),
        recording() as entered,
        preserve_node_meta(),
        refusing(),
        checking_functions(),
        _use_lazy_graph_module(True),  # the graph changes thirty times, its code is not run
    ):
        warnings.simplefilter("ignore")
        yield entered


_NO_GRADIENT = DRAWS | {
    torch.ops.aten.detach.default, torch.ops.aten.zeros_like.default, torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default, torch.ops.aten.new_zeros.default, torch.ops.aten.new_ones.default,
    torch.ops.aten.new_full.default, torch.ops.aten.empty_like.default,
}  # fmt: skip


def mark_gradients(captured: Captured, model: nn.Module) -> None:
    """Record in ``node.meta["grad"]`` whether gradients flow through a node: it depends on a trainable parameter, and
    the loss on it. A parameter that only a metric reads has no gradient, as in the local model."""
    trainable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            node.meta["grad"] = captured.parameters.get(node.name) in trainable
        else:
            inherits = any(source.meta.get("grad") for source in node.all_input_nodes)
            leaves = pytree.tree_leaves(node.meta.get("val"))
            floats = any(isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves)
            node.meta["grad"] = inherits and floats and node.target not in _NO_GRADIENT
    reached = set[fx.Node]()
    waiting = [node for node in pytree.tree_leaves(captured.graph.output_node().args[0])[:1] if node.meta["grad"]]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += [source for source in node.all_input_nodes if source.meta["grad"]]
    for node in captured.graph.nodes:
        node.meta["grad"] = node in reached


def wrap_annotated(model: nn.Module) -> None:
    """Wrap the forward of every annotated module so that the nodes traced in it carry its scopes."""
    scopes = module_scopes(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if path in scopes and "_whale_wrapped" not in module.__dict__:
            module.forward = _scoped(module.forward, scopes[path])
            module.__dict__["_whale_wrapped"] = True


def _scoped(forward: Callable[..., Any], scopes: Any) -> Callable[..., Any]:
    import functools

    @functools.wraps(forward)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with enter_module(scopes):
            return forward(*args, **kwargs)

    return scoped


_BLANKS = {
    getattr(torch.ops.aten, name)
    for name in (
        "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty",
        "new_zeros", "new_ones", "new_full",
    )
}  # fmt: skip
"""Operators whose results have no alias."""


def _mutates(graph: fx.Graph) -> bool:
    """Whether an operator changes its arguments, beyond the harmless ``detach_`` of a fresh constant. Writes into an
    unaliased empty tensor become values of their own first, which saves a second trace of the model."""
    for module in [graph.owning_module, *inner_modules(graph)]:
        written = set[fx.Node]()
        for node in module.graph.nodes if module is not None else ():
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or schema is None:
                continue
            if node.target is torch.ops.aten.batch_norm.default and node.args[5]:
                return True
            if not schema.is_mutable or node.target is torch.ops.aten.detach_.default:
                continue
            base, target = node.args[0], functional(node.target)
            blank = base in written or getattr(base.target, "_overloadpacket", None) in _BLANKS
            if target is None or not blank or len(base.users) > 1:
                return True
            node.target = target
            written.add(node)
    return False


def _detach_regions(graph: fx.Graph) -> None:
    """Detach the inputs of regions under ``no_grad``: a functionalized program has no such regions any more."""
    for module in [graph.owning_module, *inner_modules(graph)]:
        for node in list(module.graph.nodes) if module is not None else ():
            if getattr(node.target, "__name__", "") != "wrap_with_set_grad_enabled" or node.args[0]:
                continue
            body: Any = module.get_submodule(node.args[1].target)  # type: ignore[union-attr]
            holes = body.graph.find_nodes(op="placeholder")
            first = next(inner for inner in body.graph.nodes if inner.op != "placeholder")
            for hole in holes:
                value = hole.meta.get("val")
                if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
                    continue
                with body.graph.inserting_before(first):
                    detached = body.graph.call_function(torch.ops.aten.detach.default, (hole,))
                detached.meta = dict(hole.meta)
                hole.replace_all_uses_with(detached, delete_user_cb=lambda user, own=detached: user is not own)
            body.recompile()


def _lines(graph: fx.Graph) -> dict[str, str]:
    """The stacks of operators by name; of a region that of its first operator."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        bodies = [use for use in node.all_input_nodes if use.op == "get_attr"] if node.op == "call_function" else []
        inside = [inner for body in bodies for inner in _nodes_of(graph, str(body.target))]
        for one in (node, *inside):
            if place_of_node(one) is not None:
                found.setdefault(node.name, str(one.meta["stack_trace"]))
    return found


def _nodes_of(graph: fx.Graph, name: str) -> list[fx.Node]:
    body: Any = getattr(graph.owning_module, name, None)
    return list(body.graph.nodes) if isinstance(body, fx.GraphModule) else []


def _note_lines(graph: fx.Graph, lines: Mapping[str, str]) -> None:
    """Give operators of a graph that was traced again the stacks of those that they are from."""
    for node in graph.nodes:
        if is_call(node) and place_of_node(node) is None:
            known = [lines[source.name] for source in node.meta.get("from_node", ()) if source.name in lines]
            if known:
                node.meta["stack_trace"] = known[-1]


def _has_values(model: nn.Module) -> bool:
    return any(not parameter.is_meta for parameter in model.parameters())


def _read_signature(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    leaves: Sequence[str],
    made_buffers: Mapping[Attribute, torch.Tensor],
) -> Captured:
    """Name every placeholder by the model's name of its tensor; buffers that a forward made are constants."""
    made = {f"{path}.{name}".removeprefix("."): x for (path, name, _), x in made_buffers.items()}
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        aliases[name] = first_name.setdefault(id(tensor), name)
    graph_module = program.graph_module
    captured = Captured(graph=graph_module.graph, parameters={}, buffers={}, constants={}, inputs={}, aliases=aliases)
    user_inputs = iter(leaves)
    placeholders = {node.name: node for node in captured.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        target = (spec.target or "").removeprefix("model.")
        if spec.kind is InputKind.PARAMETER:
            captured.parameters[name] = aliases[target]
        elif spec.kind is InputKind.BUFFER and target in made:
            captured.constants[name] = made[target]
        elif spec.kind is InputKind.BUFFER:
            captured.buffers[name] = aliases[target]
        elif spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ):
            constant = program.constants[spec.target]
            captured.constants[name] = constant.detach() if isinstance(constant, torch.Tensor) else constant
        else:
            leaf = next(user_inputs)
            if name in placeholders and isinstance(placeholders[name].meta.get("val"), torch.Tensor):
                captured.inputs[name] = leaf
    outputs = program.graph_signature.output_specs
    loss, *returned = [i for i, s in enumerate(outputs) if s.kind is OutputKind.USER_OUTPUT]
    mutated = [i for i, s in enumerate(outputs) if s.kind is OutputKind.BUFFER_MUTATION]
    results: Any = captured.graph.output_node().args[0]
    for spec, node in zip(outputs, results, strict=True):
        if spec.kind is OutputKind.PARAMETER_MUTATION:
            raise located(
                f"the forward writes to the parameter {(spec.target or '').removeprefix('model.')}: a step would have "
                "to do so on every rank that holds a part of it; write to it after optimizer.step(), under "
                "torch.no_grad(), or compute with another tensor",
                place_of_node(node) or place_of_forward(model),
            )
        if spec.kind is OutputKind.USER_INPUT_MUTATION and spec.target in captured.inputs:
            captured.written += ((captured.inputs[spec.target], place_of_node(node)),)
    captured.mutated = tuple(aliases[(outputs[i].target or "").removeprefix("model.")] for i in mutated)
    output = captured.graph.output_node()
    output.args = (tuple(output.args[0][i] for i in [loss, *mutated, *returned]),)  # type: ignore[index]
    return captured


def _check_constants(program: torch.export.ExportedProgram, model: nn.Module) -> None:
    """Refuse a tensor without data that is no state of the model, before decompositions compute with it."""
    holes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.arg.name in holes:
            check_constant(program.constants[spec.target], holes[spec.arg.name], model)


def _merge_tied(program: torch.export.ExportedProgram, duplicate: nn.Module, model: nn.Module) -> None:
    """Merge the placeholders of tensors that *duplicate* has under several names, those of *model* first: of what is
    written to one, functionalization knows nothing in the other."""
    registered = [*duplicate.named_parameters(remove_duplicate=False), *duplicate.named_buffers(remove_duplicate=False)]
    tensors = {f"model.{name}": tensor for name, tensor in registered}
    own = {f"model.{name}" for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    holes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    first: dict[int, fx.Node] = {}
    specs = program.graph_signature.input_specs
    for spec in sorted(specs, key=lambda spec: spec.target not in own):
        node, tensor = holes.get(spec.arg.name), tensors.get(spec.target or "")
        if node is None or tensor is None:
            continue
        kept = first.setdefault(id(tensor), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)
            specs.remove(spec)
