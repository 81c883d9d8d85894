"""Checks of torch's optimizers, and its clipping, on a rank's parts of parameters.

An optimizer that updates each element by itself needs nothing. One that was made from the local model's parameters
would train nothing, and one that computes an update from a whole matrix, or from all parameters, something else: both
are refused at their first step, such an optimizer by a trial on small tensors and not by a list of names. States of
parts are saved as :class:`ShardTensor`. The norm by which ``torch.nn.utils.clip_grad_norm_`` scales is that of all
ranks. Knows engines and optimizers; no modules.
"""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from whale.errors import UsageError
from whale.runtime.checkpoints import attend_checkpoints
from whale.runtime.elsewhere import Elsewhere
from whale.runtime.engine import Engine
from whale.runtime.launch import World
from whale.runtime.precision import in_own_dtypes
from whale.runtime.shard_tensor import ShardTensor
from whale.runtime.shards import Shard
from whale.runtime.stage import part
from whale.runtime.step_in_backward import twin_of, twins

__all__ = ["attend", "owners_of"]

LARGEST = 160
"""Size of each dim of the tensors of a trial at most: optimizers that factor matrices leave small ones alone."""

STEPS = 2
"""Steps of a trial: the first may only start the state."""

SAME = 1e-4
"""By how much updates of a whole tensor and of its parts differ at most if each element counts alone, as a part of the
largest."""

_engines: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()
"""Engines, numbered in one order on all ranks."""
_numbers = count(1)
_local: dict[int, tuple[weakref.ref[Tensor], str, weakref.ref[Engine]]] = {}
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_saved: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def attend(engine: Engine, local: Mapping[str, Tensor]) -> None:
    """Look at optimizers, and at clipping by norm, that get tensors of an engine from now on.

    Args:
        engine: it has parts.
        local: parameters of the local model by name; those that this rank has in parts are not trained.
    """
    if not _engines:
        _install()
    _engines[engine] = next(_numbers)
    if engine.updates is not None:
        engine.updates.check = _check
    for name, tensor in local.items():
        if name in engine.tensors and engine.tensors[name] is not tensor:
            _local[id(tensor)] = weakref.ref(tensor), name, weakref.ref(engine)
    given = {id(tensor) for tensor in local.values()}
    for optimizer in list(_checked):  # it may have trained the local model
        if any(id(p) in given for group in optimizer.param_groups for p in group["params"]):
            del _checked[optimizer]


_installed: list[Any] = []


def _install() -> None:
    if _installed:
        return
    _installed.append(register_optimizer_step_pre_hook(_before_step))
    Optimizer.add_param_group = _attending(Optimizer.add_param_group)  # type: ignore[method-assign]
    Optimizer.__init__ = _of_any_number(Optimizer.__init__)  # type: ignore[method-assign]
    attend_checkpoints(_refuse)
    for name in ("unscale_", "step"):
        setattr(torch.amp.GradScaler, name, _of_local_models(getattr(torch.amp.GradScaler, name)))
    # By the first torch's clip_grad_norm_ finds the norm, and by the second it scales.
    _replace_in_torch("_get_total_norm", _over_ranks)
    _replace_in_torch("_clip_grads_with_norm_", _noted)
    _replace_in_torch("clip_grad_value_", _noted)


def _replace_in_torch(name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put another function in the place of one with which torch clips, by all of its names."""
    function = getattr(clip_grad, name, None)
    if function is not None:
        changed = change(function)
        for place in (clip_grad, torch.nn.utils):
            for alias in [alias for alias, value in vars(place).items() if value is function]:
                setattr(place, alias, changed)


def owners_of(tensors: Iterable[Tensor]) -> dict[int, tuple[Engine, str]]:
    """Engines and names of tensors, by identity."""
    wanted = {id(tensor) for tensor in tensors}
    return {id(t): (engine, name) for engine in _engines for name, t in engine.tensors.items() if id(t) in wanted}


# --- optimizers -------------------------------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in twins:
        return
    for engine in _engines:
        if engine.updates is not None:
            engine.updates.ended(optimizer)
        if engine.loss_scaler is not None:
            own = {id(x) for x in engine.tensors.values()}
            engine.loss_scaler.skip(p for g in optimizer.param_groups for p in g["params"] if id(p) in own)
    _check(optimizer)


def _check(optimizer: Optimizer) -> None:
    """Check an optimizer, once for each number of its parameters."""
    num = sum([len(group["params"]) for group in optimizer.param_groups])
    if _checked.get(optimizer) == num:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if (known := _in_local(parameter)) is not None:
            name, _ = known
            raise UsageError(
                f"the optimizer has {name} of the local model, but this rank trains a part of it: make the optimizer "
                "after parallelize, from the parallel model's parameters"
            )
    owners = owners_of(parameters)
    engines = dict.fromkeys(engine for engine, _ in owners.values())
    if any(not engine.holds_all or engine.updates is not None for engine in engines):
        try:
            _check_elementwise(optimizer, owners)
        except UsageError as error:
            _refuse(optimizer, error)
            raise
    _checked[optimizer] = num


def _in_local(parameter: Tensor) -> tuple[str, Engine | None] | None:
    """The name of a parameter in a local model, and the engine that trains a part of it; None of others."""
    known = _local.get(id(parameter))
    return (known[1], known[2]()) if known is not None and known[0]() is parameter else None


def _refuse(optimizer: Optimizer, error: UsageError) -> None:
    """Tell the other ranks, which had no reason to refuse and wait in the next step."""
    owners = owners_of(p for group in optimizer.param_groups for p in group["params"])
    engines = list(dict.fromkeys(engine for engine, _ in owners.values()))
    if not engines:  # the rank has no parameters to know the model by
        gc.collect()
        engines = [engine for engine in _engines if not engine.holds_all]
    for engine in engines if len(engines) == 1 or owners else ():
        engine.refuse(error)


def _attending(add_param_group: Callable[..., None]) -> Callable[..., None]:
    """The method by which every optimizer takes its parameters, without those of other ranks; those of parts get hooks
    for their states."""

    @functools.wraps(add_param_group)
    def attending(self: Optimizer, param_group: dict[str, Any]) -> None:
        given = param_group.get("params") if isinstance(param_group, dict) else None
        if isinstance(given, Iterable) and not isinstance(given, (Tensor, set)):
            own = [x for x in given if not isinstance(x[-1] if isinstance(x, tuple) else x, Elsewhere)]
            param_group["params"] = own
        add_param_group(self, param_group)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for engine in {engine for engine, _ in owners_of(parameters).values()}:
            if engine.updates is not None:
                engine.updates.attach(self)
        is_empty = not any(is_lazy(x) or x.numel() for x in parameters) and any(
            not engine.holds_all for engine in _engines
        )
        if self not in _saved and (is_empty or any(_cut(*owner) for owner in owners_of(parameters).values())):
            _saved.add(self)
            self.register_state_dict_post_hook(_wrap_states)
            self.register_load_state_dict_pre_hook(_take_states)

    return attending


def _of_local_models(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a scaler, which divides by its factor: gradients of a step were not multiplied by it."""

    @functools.wraps(method)
    def of_local_models(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.is_enabled() and owners_of(parameters):
            raise UsageError(
                "the GradScaler would divide gradients by its scale, with which no step has multiplied them: leave it "
                'out; parallelize(..., precision="fp16") scales the loss inside of the step (model.loss_scaler)'
            )
        return method(self, optimizer, *args, **kwargs)

    return of_local_models


def _of_any_number(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of every optimizer, which takes an empty list where another rank may have the parameters, as of a
    module of another stage."""

    @functools.wraps(init)
    def of_any_number(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        given = params if isinstance(params, Tensor) else list(params)
        if isinstance(given, list) and not given and any(not engine.holds_all for engine in _engines):
            given = [torch.nn.Parameter(torch.empty(0))]
        init(self, given, defaults)

    return of_any_number


def _cut(engine: Engine, name: str) -> Shard | None:
    """Location of a tensor, unless every rank has all of it."""
    shard = engine.shard(name)
    return None if all(shard.parts.get(r) == shard.whole for r in range(engine.world.size)) else shard


def _parts(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[Any, Tensor, Engine, str, Shard]]:
    """Parameters that are parts, by their key in a state dict: a number, or a name where torch's distributed
    checkpoints made it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    owners = owners_of(parameters)
    for key, parameter in zip(keys, parameters, strict=False):  # torch refuses unequal numbers itself
        engine, name = owners.get(id(parameter), (None, ""))
        if engine is not None and (shard := _cut(engine, name)) is not None:
            yield key, parameter, engine, name, shard


def _wrap_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict whose states of parts say which parts they are."""
    states = dict(state_dict["state"])
    for number, parameter, engine, _, shard in _parts(optimizer, state_dict):
        states[number] = {
            key: _shard_tensor(value, shard.of_first_dims(value.dim()), engine.world.rank)
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape[: value.dim()]
            else value
            for key, value in states.get(number, {}).items()
        }
        if not states[number]:
            del states[number]
    return {**state_dict, "state": states}


def _shard_tensor(value: Tensor, shard: Shard, rank: int) -> ShardTensor:
    return ShardTensor(value, shard.shape, shard.parts[rank])


def _take_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with this rank's parts, of one with these parts or with whole tensors.

    Raises:
        UsageError: a state is another part, or of another shape, or the groups are those of another layout.
    """
    try:
        return _taken(optimizer, state_dict)
    except UsageError as error:
        _refuse(optimizer, error)
        raise


def _taken(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    own_sizes, sizes = (
        [len(g["params"]) for g in groups] for groups in (optimizer.param_groups, state_dict["param_groups"])
    )
    if own_sizes != sizes:
        raise UsageError(
            f"the optimizer's state has {_in_words(sizes)}, and this rank's optimizer {_in_words(own_sizes)}: it is of "
            "the local model or of another layout, where ranks have other parameters. Take it by names, with "
            "get_optimizer_state_dict of torch.distributed.checkpoint.state_dict and "
            "StateDictOptions(flatten_optimizer_state_dict=True), and give it to set_optimizer_state_dict"
        )
    states = dict(state_dict["state"])
    for number, _, engine, name, shard in _parts(optimizer, state_dict):
        taken = {}
        for key, value in states.get(number, {}).items():
            own = shard.parts[engine.world.rank]
            is_whole = own == shard.whole and not isinstance(value, ShardTensor)  # states may have other shapes
            if isinstance(value, Tensor) and value.dim() and not is_whole:
                of_state = shard.of_first_dims(value.dim())
                own = of_state.parts[engine.world.rank]
                if tuple(value.shape) != of_state.shape or getattr(value, "intervals", own) != own:
                    raise UsageError(
                        f"{key} of {name} has shape {tuple(value.shape)}, which is neither whole, of shape "
                        f"{shard.shape}, nor this rank's part: load what optimizer.state_dict() gave on this rank, or "
                        "use torch.distributed.checkpoint, which reshards"
                    )
                value = value.local if isinstance(value, ShardTensor) else part(value, own)
            taken[key] = value
        if taken:
            states[number] = taken
    return {**state_dict, "state": states}


def _in_words(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} group{'s' * (len(sizes) != 1)} of {', '.join(map(str, sizes))} parameters"


@in_own_dtypes
def _check_elementwise(optimizer: Optimizer, owners: Mapping[int, tuple[Engine, str]]) -> None:
    """Refuse an optimizer whose updates of parts are not parts of the updates.

    Raises:
        UsageError: it is such a one.
    """
    is_owned = any(getattr(engine.tensors, "units", None) for engine, _ in owners.values())
    in_backward = any(engine.updates is not None for engine, _ in owners.values())
    all_of_them = "leave zero and offload out" if is_owned else "replicate() without split and stage"
    all_of_them = "leave step_in_backward out" if in_backward else all_of_them
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} computes the loss at points that it finds from all parameters, of which a "
            f"rank has some, or parts: use an elementwise optimizer, such as AdamW, or {all_of_them}"
        )
    samples: dict[tuple[int, int, int | None, bool], tuple[tuple[int, ...], Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in owners and parameter.numel():
                engine, name = owners[id(parameter)]
                shard = engine.shard(name)
                shape = tuple(min(size, LARGEST) for size in shard.shape)
                own = zip(shard.parts[engine.world.rank], shard.whole, strict=True)
                cut = [dim for dim, (part, whole) in enumerate(own) if part != whole]
                if getattr(optimizer, "joins_columns", False):
                    cut = [dim for dim in cut if not dim]
                is_sparse = _has_rows(parameter)
                for dim in [*cut, None]:
                    known = samples.get((number, len(shape), dim, is_sparse))
                    if known is None or shape > known[0]:
                        samples[number, len(shape), dim, is_sparse] = shape, parameter
    for (number, _, dim, _), (shape, like) in samples.items():
        try:
            error = _trial(optimizer, number, shape, like, dim)
        except Exception as failure:  # whatever an optimizer of the script's own does
            world = next(engine.world for engine, _ in owners.values())
            world.warn_of_rank(
                f"the trial of {type(optimizer).__name__}",
                f"{type(optimizer).__name__} could not be tried on tensors of shape {shape} ({failure}); it must "
                "update each element by itself, because this rank has parts of tensors, or not all of them",
            )
            return
        if in_backward and dim is None and not error:
            _check_own_state(optimizer, number, shape, like)
        if error > (SAME if dim is not None or not in_backward else 0.0):
            way = all_of_them
            if is_owned and dim is not None:
                way = 'state_align="parameter", under which a rank has whole ones'
            raise UsageError(
                f"{type(optimizer).__name__} updates an element by others: on "
                f"{'one of two tensors' if dim is None else 'a part of a tensor'} of shape {shape} it is off by "
                f"{error:.1g} of the largest update. A rank has {'some' if dim is None else 'parts'} of the tensors, "
                f"so it would train another model: use an elementwise optimizer, such as AdamW, or {way}"
            )


def _check_own_state(optimizer: Optimizer, group: int, shape: Sequence[int], like: Tensor) -> None:
    """Refuse an optimizer that counts its steps, or keeps anything else, beside the states of parameters: it would step
    once for each bucket of them.

    Raises:
        UsageError: it is such a one.
    """
    start = torch.ones(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    parameter = torch.nn.Parameter(start.clone())
    own = {**optimizer.param_groups[group], "params": [parameter]}
    twin = twin_of(optimizer, [own], defaultdict(dict))
    before = {**twin.__dict__, **own}
    parameter.grad = start.to_sparse(1) if _has_rows(like) else start
    twin.step()
    after = {**twin.__dict__, **twin.param_groups[0]}
    for name, value in after.items():
        if name not in ("state", "param_groups", "params") and repr(before.get(name)) != repr(value):
            raise UsageError(
                f"{type(optimizer).__name__} changes {name} in a step, which is of all parameters, but with "
                "step_in_backward=True it steps for some at a time: use an optimizer whose states are of single "
                "parameters, such as AdamW, or leave step_in_backward out"
            )


def _has_rows(parameter: Tensor) -> bool:
    """Whether a parameter has a sparse gradient, which some optimizers need and others refuse."""
    return parameter.grad is not None and parameter.grad.is_sparse


def _trial(optimizer: Optimizer, group: int, shape: Sequence[int], like: Tensor, dim: int | None) -> float:
    """By how much the updates of an optimizer for all differ from those of two, as on two ranks, that have a half each
    of a tensor along a dim, or a tensor each of two (None); as a part of the largest."""
    draw = torch.Generator().manual_seed(0)
    dtype = torch.promote_types(like.dtype, torch.float32)  # in fewer digits equal updates are rounded differently

    def drawn() -> list[Tensor]:
        whole = [torch.randn(shape, generator=draw).to(like.device, dtype) for _ in range(2)]
        return whole if dim is None else list(whole[0].split(-(-shape[dim] // 2), dim))

    def joined(pieces: Sequence[Tensor]) -> list[Tensor]:
        return list(pieces) if dim is None else [torch.cat(list(pieces), dim)]

    def given(pieces: Sequence[Tensor]) -> list[Tensor]:
        return [piece.to_sparse(1) for piece in pieces] if _has_rows(like) else list(pieces)

    starts, gradients = drawn(), [drawn() for _ in range(STEPS)]
    with torch.random.fork_rng(devices=[]):
        together = _updated(optimizer, group, joined(starts), [given(joined(pieces)) for pieces in gradients])
        apart = [
            _updated(optimizer, group, [start], [given([pieces[place]]) for pieces in gradients])[0]
            for place, start in enumerate(starts)
        ]
    pairs = list(zip(together, joined(starts), joined(apart), strict=True))
    largest = max(float((one - start).abs().max()) for one, start, _ in pairs) or 1.0
    return max(float((one - other).abs().max()) for one, _, other in pairs) / largest


def _updated(
    optimizer: Optimizer, group: int, starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Tensors after steps of an optimizer with the options of a group of another."""
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    made = twin_of(optimizer, [{**optimizer.param_groups[group], "params": parameters}], defaultdict(dict))
    if "_params" in made.__dict__:  # as LBFGS keeps them
        made.__dict__["_params"], made.__dict__["_numel_cache"] = parameters, None
    takes_closure = len(inspect.signature(made.step).parameters) > 0
    for pieces in gradients:
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.clone()
        made.step(lambda: 0.0) if takes_closure else made.step()
    return [parameter.detach() for parameter in parameters]


# --- clipping ---------------------------------------------------------------------------------------------------------


def _over_ranks(total_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The norm of gradients on all ranks, where they are of a parallel model."""

    def over_ranks(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not given:
            gc.collect()  # a pipeline that is gone must be so on all ranks: those of one that is not meet here
        asked = {id(tensor) for tensor in given}
        names: dict[Engine, Sequence[str]] = {}
        for one in [engine for engine in _engines if not engine.holds_all]:
            if found := [n for n, t in one.tensors.items() if t.grad is not None and id(t.grad) in asked]:
                names[one] = found
        is_mixed = len(names) > 1 or (bool(names) and len(given) > sum(map(len, names.values())))
        cut = [engine for engine in _engines if not engine.has_all_parts]
        engine: Engine | None
        own: Sequence[str]
        if cut and (not given or not names.keys().isdisjoint(cut)):
            engine, own = _of_all_ranks(cut[0].world, names, is_mixed)
        elif is_mixed:
            raise UsageError(_MIXED)
        else:
            engine, own = next(iter(names.items()), (None, ()))
        if engine is None:
            rows = [x.coalesce().values() if x.is_sparse else x for x in given]  # torch has no norm of sparse ones
            return total_norm(rows, norm_type, error_if_nonfinite, foreach)
        norm = engine.gradient_norm(float(norm_type), own)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped"
            )
        return norm.to(given[0].dtype.to_real()) if given else norm

    return over_ranks


def _noted(clip: Callable[..., Any]) -> Callable[..., Any]:
    """A function that clips gradients; the next step compares whether all ranks have done so. Where ranks have all of
    every gradient, none would wait for another here. A rank that has none, such as one without work or of a frozen
    stage, clips nothing."""

    @functools.wraps(clip)
    def noted(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for parameter in given:
            if parameter.grad is None and (known := _in_local(parameter)) is not None:
                name, engine = known
                error = UsageError(
                    f"{'clip_grad_norm_' if 'norm' in clip.__name__ else clip.__name__} was given {name} of the local "
                    "model, which has no gradient, because this rank trains a part of it: clip the parameters of the "
                    "parallel model, as model.clip_grad_norm_(max_norm) does"
                )
                if engine is not None:
                    engine.refuse(error)
                raise error
        for engine in dict.fromkeys(engine for engine, _ in owners_of(given).values()):
            engine.check_gradients_stay(f"{clip.__name__.strip('_')} of torch")
        for engine in [engine for engine in _engines if engine.holds_all] if given else ():
            if any(given[0] is x for x in engine.tensors.values()):
                limit = next(iter([*args, *kwargs.values()]), None)
                shown = f"{limit:.4g}" if isinstance(limit, (int, float)) else "..."
                engine.done[f"{clip.__name__.lstrip('_')}({shown})"] += 1
        has_none = all(x.grad is None for x in given) and any(not engine.holds_all for engine in _engines)
        return None if has_none else clip(given, *args, **kwargs)

    return noted


_MIXED = (
    "clip_grad_norm_ was given gradients of a parallel model together with others; clip those of each model alone, as "
    "model.clip_grad_norm_(max_norm) does"
)
_IS_MIXED = -1


def _of_all_ranks(
    world: World, own: Mapping[Engine, Sequence[str]], is_mixed: bool
) -> tuple[Engine | None, Sequence[str]]:
    """The one model with stages of which ranks give gradients, and the names of this rank's; None if no rank gives any.
    All ranks must call it, because a rank without the stages has none to know the model by.

    Norms of single parameters are refused where ranks have others, as in a loop over ``model.parameters()``: what they
    give at the same time does not belong together.

    Raises:
        UsageError: on every rank, if one gave gradients of several models, or another model or parameter than another.
    """
    engine, names = next(iter(own.items()), (None, ()))
    is_single = engine is not None and len(names) == 1 < sum(t.grad is not None for t in engine.tensors.values())
    key = crc32(names[0].encode()) if is_single else 0
    mine = torch.tensor(
        [0 if engine is None else _IS_MIXED if is_mixed else _engines[engine], key], device=world.device
    )
    told = [torch.empty_like(mine) for _ in range(world.size)]
    work = dist.all_gather(told, mine, async_op=True)
    world.failures.wait(work, "the names of gradients to clip", range(world.size))
    kinds = {(number, key) for number, key in torch.stack(told).tolist() if number}
    given = {number for number, _ in kinds}
    if _IS_MIXED in given:
        raise UsageError(_MIXED)
    if len(given) > 1:
        raise UsageError(
            "clip_grad_norm_ was given gradients of one parallel model on a rank, and of another on another rank; "
            "clip those of each model alone, as model.clip_grad_norm_(max_norm) does"
        )
    if len(kinds) > 1:
        raise UsageError(
            f"clip_grad_norm_ was given {names[0] if is_single else f'{len(names)} gradients'} on rank {world.rank}, "
            "and another parameter on another rank, where ranks have others: clip all of them with "
            "model.clip_grad_norm_(max_norm), those of a module, or each by its norm in full_gradients()"
        )
    return next((one for one, own_number in _engines.items() if own_number in given), None), names
