"""Capture: a model's training computation as one graph of aten operators, without allocating anything.

The model is copied with fake parameters, its annotated modules are wrapped, and ``torch.export`` (non-strict) records
the loss as a function of parameters, buffers and batch. The graph is that of the *global* batch: shapes are plain
numbers, and data parallelism, micro-batches and ragged batches later divide it. This module knows no devices to run on,
placements or process groups.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.traceback import preserve_node_meta

from whale.annotations import NODE_KEY, enter_module, module_scopes, recording
from whale.errors import CaptureError, UsageError
from whale.graph.canonical import canonicalize, inline_regions
from whale.graph.capture_checks import check_batch, check_dtypes, check_hooks, check_static
from whale.graph.capture_errors import capture_error
from whale.graph.captured import Captured, listed, mark_gradients
from whale.graph.copies import model_copy, reading
from whale.graph.custom_functions import checking_functions
from whale.graph.exported import (
    check_constants,
    detach_regions,
    holes_of,
    lines_of,
    merge_tied,
    mutates,
    note_lines,
    read_signature,
)
from whale.graph.forward_state import Listing, Steadiness, graph_listing
from whale.graph.loss_copies import function_of_copy
from whale.graph.losses import any_sum, pick_loss
from whale.graph.made_once import (
    Attribute,
    Carried,
    Left,
    Made,
    buffers_made,
    copied,
    left_by,
    made_once,
    set_made_buffers,
    write_made,
)
from whale.graph.numbers import numbers_to_tensors
from whale.graph.origins import located, modules_around, place_of_forward
from whale.graph.precision import Autocast, under_autocast, write_casts
from whale.graph.rebinding import places_of
from whale.graph.refusing import refusing
from whale.graph.repeats import Repeats
from whale.graph.structure import Structure
from whale.graph.values import is_call
from whale.ir.program import Returns
from whale.ir.strategy import ScopePath, encode_scopes

Batch = Any
"""A dict of keyword arguments, a tuple of positional arguments, or one tensor."""

LossFn = Callable[..., Any]
"""A function of a model's output and the batch."""


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
    start: Carried | None = None,
) -> Captured:
    """Capture the loss of *model* on a batch of these shapes, or what else a step *returns*.

    With a *precision* it is captured as it computes under ``torch.autocast`` with this dtype.
    *promote* turns casts to float32 inside the model into casts to float64 (for comparisons in float64). The leaves
    *numbers*, of type float, become tensors without dims; that fails where the model does more than compute with one.
    *values* gives a buffer of the model by its name, of which the first forward may make what later ones read; without
    it those that have no data have any. The forward begins from what another has left, *start*.
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
        write_made(duplicate, {**(start.within(duplicate) if start is not None else {}), **copied(made)})
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
        check_constants(program, model)  # what the first trace has left in Python has no data
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
        undo: Callable[[], None] | None = None
        try:
            with _tracing() as entered:
                repeats = Repeats(duplicate, entered) if copying else None
                checks = [repeats.check] if repeats is not None else []
                steadiness = Steadiness(duplicate, loss)
                undo = steadiness.restore_outside
                with steadiness.observing():
                    program = export(root_of(duplicate, loss, *checks, lambda: steadiness.end(found.buffers)))
                if repeats is not None:
                    repeats.finish(program.graph)
                if given:
                    constant = export(root_of(*duplicated(), values=given)).graph
                    numbers_to_tensors(program.graph, holes_of(program, fakes, given), constant)
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
                carried = steadiness.carried
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
                remaining.append(carried)
                outside.append(steadiness.keeps_outside)
            check_constants(program, model)
            merge_tied(program, duplicate, model)
            if first is None and mutates(program.graph):
                detach_regions(program.graph)
                lines = lines_of(program.graph)
                with _tracing():
                    program = program.run_decompositions({})
                note_lines(program.graph, lines)
        except Exception as error:
            if undo is not None:
                undo()
            if copying:  # the copies may be the cause
                return exported(copying=False)
            raise capture_error(error, model) from error
        if first is not None:
            steadiness, listing = first
            steadiness.restore_outside()
            traced = exported(copying=False)
            steadiness.check_second(listing, before_made[0] if before_made else listings[-1])
            return traced
        made_buffers.update(buffers_made(duplicate))
        return program, entered["stage"]

    listings: list[Listing] = []
    remaining: list[Carried | None] = []
    outside: list[bool] = []
    # A model that will run is traced completely: differences between its layers may be invisible to the comparison.
    with under_autocast(autocast):
        program, stages = exported(copying=not _has_values(model))
    captured = read_signature(program, model, list(fakes), made_buffers)
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
    captured.left, captured.left_outside = next(reversed(remaining), None), any(outside)
    captured.listing = listed(captured)
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


def _has_values(model: nn.Module) -> bool:
    return any(not parameter.is_meta for parameter in model.parameters())
