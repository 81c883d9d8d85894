"""Public functions for training scripts: ``parallelize``, ``verify`` and ``verify_replicas``.

They join the process group, compile the model and pass this rank's part to the runtime. Every detectable error is
raised before any process group is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf, isnan
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.annotations import Annotation, annotate, forget, get_default_strategy, module_scopes
from whale.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_number,
    check_type,
    check_updates,
    known_arguments,
)
from whale.commands.automatic import automatic_plan, with_least_memory
from whale.compile.builder import CHECKED_RANKS, Builder, clock_of, warn_of
from whale.compile.communicators import communicators
from whale.compile.compile import compile_traced
from whale.compile.options import Options
from whale.compile.shared_memory import check_shared_memory
from whale.compile.trace import precision_of, trace
from whale.detection import alike, detect, detect_unlike, on_its_hosts, warn_of_other_devices
from whale.errors import AnnotationError, PlanMismatchError, UsageError
from whale.graph.capture import batch_leaves, batch_rows
from whale.graph.capture_checks import check_hooks, check_modules
from whale.graph.code_names import names_in_code
from whale.graph.copies import model_copy
from whale.graph.loss_copies import function_of_copy, mark_read_by_loss
from whale.graph.precision import LOW_PRECISIONS, autocast_around
from whale.ir.cluster import Cluster
from whale.ir.garbage import without_collections
from whale.ir.plan import GradientDtype, Plan
from whale.ir.state import Align, StateSharding
from whale.ir.strategy import RECOMPUTES, REDUCES, STATE_ON_HOST, Offload, Recompute, Reduce, offload_of
from whale.planner.assignment.assign import Preference
from whale.planner.catalog import device_types
from whale.planner.schedules.orders import SCHEDULES
from whale.planner.search.constraints import is_kept
from whale.predict.device_memory import memory_advice
from whale.predict.dry_step import Device
from whale.runtime.agreement import agree, agree_on_values, int_of_first, meet, take_from
from whale.runtime.attributes import Attributes, Sources
from whale.runtime.cuda_graphs import check_recordable
from whale.runtime.ending import ELASTIC, end_with_own_code
from whale.runtime.initial_values import InitialValues, values_of_builder, values_of_meta_model
from whale.runtime.launch import World, check_device, describe, initialize, name_of_unsupported
from whale.runtime.location import location_of
from whale.runtime.module import ParallelModule
from whale.runtime.random import RNGPosition
from whale.seats import PartOfCluster, seating

__all__ = ["ParallelModule", "ParityReport", "ReplicaReport", "parallelize", "verify", "verify_replicas"]


@known_arguments()
@without_collections
def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    example_batch: Any,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    plan: str | PathLike[str] | Plan | None = None,
    plan_cache: str | PathLike[str] | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    prefer: str = "consecutive",
    seed: int | None = None,
    timeout_seconds: float | None = None,
    device: str | None = None,
    promote_casts: bool = False,
    sync_module_states: bool = False,
    batch: str = "global",
    precision: str | None = None,
    gradient_dtype: str | None = None,
    recompute: Recompute | Literal["auto"] | None = None,
    zero: int | Literal["auto"] | None = None,
    state_shares: Sequence[float] | Literal["auto"] | None = None,
    state_align: Align | None = None,
    offload: str | Sequence[str] | None = None,
    reduce: Reduce | None = None,
    staleness: int | None = None,
    step_in_backward: bool | None = None,
    compile: bool = False,
    cuda_graphs: bool = False,
) -> ParallelModule:
    """Return this rank's part of *model*, annotated or not; its steps equal the local model's steps.

    Args:
        model: any module, on the CPU or on this rank's device. Models too large for a host may be on the meta device,
            or be passed as a function that builds them. Then no rank creates a parameter that it does not own, and the
            values are those of the model built on the CPU at this point, with torch's current seed.
        example_batch: a global batch, of which only shapes and dtypes matter: a dict of keyword arguments, a tuple of
            positional ones, or one tensor. The first dim of its tensors is the batch.
        state_dict: whole tensors under the model's names, for a model on the meta device or a function. Mapped from a
            file they are read only in parts.
        cluster: a cluster file, or a Cluster; by default the devices of the launch, assumed equal (as detected for
            ``plan="auto"``, and where GPUs are of different types).
        plan: a plan file, or a Plan. ``"auto"``: rank 0 searches for one, for a model without annotations, with the
            given *micro_batches* and *schedule*.
        plan_cache: a folder, such as one beside the checkpoints, in which rank 0 keeps the plans that ``"auto"`` finds.
            A search for the same model, devices, batch and options then takes the one that is there.
        micro_batches: number of micro-batches; must divide the batch, except with ``plan="auto"``: the last one may
            then have fewer rows, as it may in a plan.
        schedule: ``gpipe``, ``1f1b`` (the default), ``1f1b_deep`` (more warm-up forwards, for slow links),
            ``interleaved``, ``zero_bubble`` or ``zero_bubble_1p`` (the memory of 1F1B's first stage on all stages),
            ``zero_bubble_h2`` or ``zero_bubble_2p`` (twice that, and almost no bubble), or ``greedy``.
        loss_fn: ``loss_fn(output, batch)``, for a model that does not return its loss.
        prefer: ``consecutive`` or ``replica_in_node``: which devices are neighbours.
        seed: of dropout and other random operators, which then do not use torch's generator; by default the seed of
            torch on rank 0. Where training goes on, ``model.get_rng_state`` and ``set_rng_state`` keep the position.
        timeout_seconds: limit for every wait of a rank for another; by default a minute while ranks start, and ten in
            steps, where one may write a checkpoint meanwhile.
        device: ``cpu`` or ``cuda``; by default cuda where there is one.
        promote_casts: turn casts to float32 inside the model into casts to float64, for comparisons in float64.
        sync_module_states: overwrite the model's parameters and buffers with those of rank 0 first. Otherwise all ranks
            must bring the same ones, and it is an error if they do not.
        batch: what ranks bring to a step: ``global``, all of them the whole batch; ``local``, each the rows that it
            computes on (``model.batch_share``); or ``parts``, of these rows the parts that it reads
            (``model.sample_share``), where dims of samples are split. The example batch is a global one for all.
        precision: ``bf16`` or ``fp16``: compute as under ``torch.autocast`` with this dtype, over parameters, gradients
            and optimizer states in their own, which is float32; by default, and with ``fp32``, as the model is.
            parallelize and steps may stand under ``torch.autocast`` too. With ``fp16`` gradients are scaled in
            the step, as by a ``GradScaler`` (``model.loss_scaler``).
        gradient_dtype: ``bf16``, ``fp16`` or ``fp32``: the number type in which ranks exchange gradients and sum them
            (FSDP's ``reduce_dtype``); parameters and gradients keep theirs, which it is by default. ``bf16`` takes half
            the bytes of float32 on slow links, and rounds: steps equal the local ones up to that.
        recompute: what the backward computes again, instead of the forward keeping it: ``none``; ``selective``,
            everything in a layer but products, attention and what ranks exchange; ``full``, everything but the layer's
            inputs and what ranks exchange; ``auto``, in each stage the least of these with which its devices, as in
            the cluster or detected, hold it beside the states of AdamW. Layers are the modules of lists, such as
            ``layers.3``. It is for stages of which neither the plan nor the annotation (``whale.stage(recompute=...)``)
            says it; by default these keep everything, and ``plan="auto"`` decides it. What a model computes in
            ``torch.utils.checkpoint`` is computed again whatever this says.
        zero: divide the state of parameters among the ranks that sum their gradients, replicas of a stage (ZeRO):
            1: optimizer states, and the gradients that they read; 2: gradients in every micro-batch, too; 3: also the
            parameters, which are gathered for each task. A rank's parameters are then the rows that it owns, under the
            local names, and an elementwise optimizer is made from them as ever. 0: every replica has all. It is for
            stages of which neither the plan nor an annotation (``whale.stage(zero=...)`` or
            ``whale.replicate(zero=...)``) says it; by default these have all. ``auto``: in each stage the least of
            these with which its devices hold it, before anything is computed again. ``plan="auto"`` decides it by
            default.
        state_shares: of each rank of the launch, or of each replica, such as ``[3, 1]``: a device with more memory
            owns more, whatever its share of the batch is; ``auto``: what its memory leaves after the activations of its
            rows, where equal shares do not fit. By default all own as much.
        state_align: ``row``: ranks own rows of parameters; ``parameter``: whole parameters, as optimizers need that
            compute with matrices, such as Muon.
        offload: ``state``, ``activations`` or a list of both, ``both``, ``tables``, ``none``: what is in the host's
            memory, in stages of which neither the plan nor an annotation (``whale.stage(offload=...)`` or
            ``whale.replicate(offload=...)``) says it. ``activations``: what
            forwards keep for backwards, copied there and back beside the computation. ``state``: what a rank owns of
            trained parameters, their gradients and optimizer states; the optimizer computes there. Devices have
            parameters while steps run: all of them with ``zero=1`` and 2, which are copied there once a step, or with
            ``zero=3`` those of a task and the next ones. Ranks own what they sum no gradient of with others alone.
            Without zero it is 1. ``tables``: embedding tables with sparse gradients, which are looked up and updated
            there. The model may be on the CPU then, whatever the device is. ``auto``: in each stage the
            least with which its devices hold it, after zero and recompute; ``plan="auto"`` then may use it where
            nothing fits without.
        reduce: how replicas make one gradient of theirs, in stages of which neither the plan nor an annotation
            (``whale.stage(reduce=...)`` or ``whale.replicate(reduce=...)``) says it. ``mean`` (the default): that of
            the mean loss over all rows, as the local model has it. ``adasum``: each replica has the gradient of the
            mean loss over its own rows, and pairs of them are combined for each parameter: their sum where they are
            orthogonal, their mean where they are equal (Maleki et al. 2020). ``server``: the mean, as with parameter
            servers: each parameter has one rank, which gets its gradient from all, and sends it to all when it is
            updated; ``state_shares`` says how many bytes each rank serves, 0 if none. See docs/sums.md.
        staleness: with ``reduce="server"``, how many steps later servers have the gradients of a step, which travel
            beside these steps: a step leaves the gradients that the one *staleness* steps before it made, with the
            parameters of then, and the first ones leave none. ``model.drain()`` leaves those of the last steps. 0 by
            default: those of this step.
        step_in_backward: let ``train_step`` update the parameters of each bucket of gradients when these are summed,
            and free them: no rank then has all gradients of a step with one micro-batch. The script's optimizer,
            made after parallelize, and its loop stay as they are, and so do the bits; ``optimizer.step()`` ends the
            step. What needs all gradients at once is refused: clipping, accumulation over several calls, ``fp16``,
            optimizers that compute with several parameters, and reading gradients after the step. By default the plan
            says it.
        compile: compile the operators between collectives with Inductor, as ``torch.compile`` does; equal layers once.
            It takes up to minutes before the first step, and again for batches of another signature (not for lengths
            for which steps are made of others). Results then equal the local model's up to rounding.
        cuda_graphs: record what a stage computes for a micro-batch, between collectives, as CUDA graphs in the third
            step, and replay them from then on, which spares the host the start of each operator. Numbers are the same.
            Memory of what they keep stays taken between steps. Not with activations on the host. See docs/gpus.md.

    Raises:
        UsageError, AnnotationError, CaptureError, InfeasibleError, PlanMismatchError: before any process group is made.
        WorkerError: a rank did not start, or failed.
    """
    end_with_own_code()
    if not callable(model):  # a module is callable too
        check_type("model", model, nn.Module, "a torch.nn.Module, or a function that builds one")
    if isinstance(model, ParallelModule):
        raise UsageError("model is parallel already; give parallelize the local model")
    check_type("plan", plan, (str, PathLike, Plan, type(None)), "a path or a whale.Plan")
    check_type("cluster", cluster, (str, PathLike, Cluster, type(None)), "a path or a whale.Cluster")
    if micro_batches is not None:
        check_count("micro_batches", micro_batches)
    if schedule is not None:
        check_choice("schedule", schedule, SCHEDULES)
    check_choice("prefer", prefer, get_args(Preference))
    if timeout_seconds is not None:
        check_number("timeout_seconds", timeout_seconds, above=0)
    check_choice("batch", batch, ("global", "local", "parts"))
    if recompute is not None:
        check_choice("recompute", recompute, ("auto", *RECOMPUTES))
    if precision is not None:
        _check_precision(precision)
    if gradient_dtype is not None:
        check_choice("gradient_dtype", gradient_dtype, get_args(GradientDtype))
    if reduce is not None:
        check_choice("reduce", reduce, REDUCES)
    if staleness is not None:
        check_count("staleness", staleness, least=0)
    check_type("step_in_backward", step_in_backward, (bool, type(None)), "True or False")
    for name, flag in {
        "promote_casts": promote_casts,
        "sync_module_states": sync_module_states,
        "compile": compile,
        "cuda_graphs": cuda_graphs,
    }.items():
        check_flag(name, flag)
    check_type("seed", seed, (int, type(None)), "a whole number")
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(f"loss_fn is {loss_fn!r}; it must be a function of the model's output and the batch")
    check_device(device)
    hosted = _offload(offload)
    automatic = plan == "auto"
    if plan_cache is not None:
        check_type("plan_cache", plan_cache, (str, PathLike), "a path")
        if not automatic:
            raise UsageError('plan_cache keeps plans that plan="auto" finds: leave it out, or give plan="auto"')
    if automatic and state_shares not in (None, "auto"):
        raise UsageError('state_shares: plan="auto" chooses how much each device owns; leave them out')
    if isinstance(plan, (str, PathLike)):
        plan = None if automatic else Plan.load(plan)
    described = Cluster.load(cluster, catalog=device_types()) if isinstance(cluster, (str, PathLike)) else cluster
    if plan is not None:
        plan.check_options(
            micro_batches=micro_batches,
            schedule=schedule,
            precision=precision,
            gradient_dtype=gradient_dtype,
            step_in_backward=step_in_backward,
            recompute=recompute,
            zero=None if zero == "auto" else zero,
            state_shares=state_shares,
            state_align=state_align,
            offload=hosted,
            reduce=reduce,
            staleness=staleness,
        )
    options = Options(
        micro_batches=micro_batches if micro_batches is not None else plan.micro_batches if plan else 1,
        schedule=schedule if schedule is not None else plan.schedule if plan else "1f1b",
        plan=plan,
        default=get_default_strategy(),
        prefer=prefer,
        promote=promote_casts,
        compile=compile,
        cuda_graphs=cuda_graphs,
        gradient_dtype=gradient_dtype or (plan.gradient_dtype if plan else None),
        step_in_backward=bool(plan.step_in_backward if plan and step_in_backward is None else step_in_backward),
        recompute="none" if recompute is None or recompute == "auto" else recompute,
        local_rows=batch != "global",
        state=None if automatic else _state(zero, state_shares, state_align, hosted, reduce),
        offload="none" if hosted is None or hosted == "auto" else hosted,
        reduce=reduce,
        staleness=(plan.staleness if plan and staleness is None else staleness) or 0,
    )
    launch = describe(device)
    if cuda_graphs:
        check_recordable(launch.device)
    asked = precision or (plan.precision if plan else None)
    options = replace(options, precision=_precision(asked, launch.device))
    check_updates(options.precision, step_in_backward=options.step_in_backward, name="step_in_backward=True")
    if plan is not None:
        plan.check_world(launch.size)
    world: World | None = None
    seats = seating(described, plan)
    if ELASTIC in os.environ and plan is None and described is not None and len(described.devices) > launch.size:
        part = PartOfCluster(described)
        if launch.size > 1:
            world = initialize(timeout_seconds, device_type=device, seating=part)
        else:
            part([location_of(0, launch.device)])
        described, seats = part.cluster, None
    if described is None and not automatic and launch.size > 1 and launch.device.type == "cuda":
        world = initialize(timeout_seconds, device_type=device, seating=seats)
        described = detect_unlike(world)
    if described is None:
        described = alike(launch.size, launch.device.type)
    else:
        described.check_world(launch.size)
    leaves = batch_leaves(example_batch)
    if plan is not None:
        if cluster is not None:
            plan.check_cluster(described)
        plan.check_batch(batch_rows(leaves))
    if isinstance(model, nn.Module):
        check_modules(model)
        _check_one_place(model, launch.device)
    initial: InitialValues | None = None
    if not isinstance(model, nn.Module):
        model, initial = values_of_builder(model, state_dict)
    elif any(x.is_meta for x in [*model.parameters(), *model.buffers()]):
        initial = values_of_meta_model(model, state_dict)
    elif state_dict is not None:
        raise UsageError("state_dict is for models without data; call model.load_state_dict(state_dict) instead")
    if sync_module_states and initial is not None:
        raise UsageError(
            "sync_module_states is for a model with data; a model on the meta device or built by a function has the "
            "values that torch's seed gives: call torch.manual_seed with one seed on every rank"
        )
    check_hooks(model)
    _check_casts(model, asked)
    _check_devices(model, launch.device)
    template = _meta_copy(model)
    if loss_fn is not None:
        mark_read_by_loss(model, template, loss_fn)
        loss_fn = function_of_copy(loss_fn, model, template)
    choosing = automatic or "auto" in (recompute, zero, state_shares, hosted)
    if world is None and launch.size > 1 and (choosing or described.names_hosts or seats is not None):
        if described.names_hosts and dist.is_initialized():  # ranks stay as they are, and nodes take their order
            seats = None
        world = initialize(timeout_seconds, device_type=device, seating=seats)
    if world is not None:
        launch = describe(device)  # by the seat that this process has
    if world is not None and described.names_hosts:
        described = on_its_hosts(world, described, planned=plan is not None)
    if automatic and world is not None:
        described = detect(world) if cluster is None else described
        plan = automatic_plan(
            world,
            template,
            leaves,
            described,
            options=options,
            micro_batches=micro_batches,
            schedule=schedule,
            recompute=recompute or "auto",
            zero="auto" if zero is None else zero,  # type: ignore[arg-type]  # one of these
            state_align=state_align or "row",
            offload=hosted or "none",
            loss_fn=loss_fn,
            cache=None if plan_cache is None else Path(plan_cache),
        )
        options = replace(options, plan=plan, micro_batches=plan.micro_batches, schedule=plan.schedule)
    if plan is not None and plan.annotations:
        _annotate_as_planned(template, plan)
    modes = tuple(module.training for module in template.modules())
    traced = trace(
        template,
        leaves,
        device=launch.device,
        training=any(modes),
        modes=modes,
        loss_fn=loss_fn,
        promote=options.promote,
        precision=options.precision,
        values=(lambda name: None) if sync_module_states else dict(model.named_buffers(remove_duplicate=False)).get,
    )
    least = {"recompute": recompute == "auto", "zero": zero == "auto", "shares": state_shares == "auto"}
    least |= {"offload": hosted == "auto"}
    if any(least.values()) and (plan is None or not automatic):
        world = world or initialize(timeout_seconds, device_type=device)
        options = with_least_memory(
            world, traced, detect(world) if cluster is None else described, described, options, **least
        )
    compilation = compile_traced(traced, described, options, device=launch.device)
    sources = Sources(*names_in_code(template, loss_fn))
    check_shared_memory(model, compilation, Attributes(model, sources).tensors())
    if cuda_graphs and compilation.offloads_activations:
        raise UsageError(
            'cuda_graphs=True keeps in place what forwards keep, and offload="activations" puts it on the host: leave '
            "one of them out"
        )
    clock = RNGPosition(torch.initial_seed() if seed is None else seed)
    calls = ""
    if launch.size <= CHECKED_RANKS:
        calls = compilation.check(launch.rank, clock_of(clock, launch.size, options))
    world = world or initialize(timeout_seconds, device_type=device)
    warn_of(world, compilation)
    texts = {
        **compilation.texts(),
        "the collectives of its programs": calls,
        "its process groups": str(communicators(compilation, for_messages=launch.device.type == "cuda")),
        "torch's random state (its seed)": initial.digest() if initial else "",
    }
    agree(world, texts)
    if cluster is not None and launch.size > 1 and launch.device.type == "cuda":
        warn_of_other_devices(world, described)
    looks: dict[str, torch.Tensor] = {}
    if initial is None:
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if sync_module_states:
            take_from(world, 0, named.values())
        looks = agree_on_values(world, named)
    if seed is None:
        clock.seed = int_of_first(world, clock.seed)
    try:
        module = Builder(model, template, described, options, world, loss_fn, sources, initial, clock).build(
            compilation, leaves, modes, bring=batch, looks=looks
        )
    except Exception as error:
        raise world.failures.failed("parallelize", error) from error
    meet(world, "all ranks to have built their part of the model")
    kind: Device = "cuda" if world.device.type == "cuda" else "cpu"
    told = (compilation, described, world.rank, options.schedule, kind)
    world.failures.memory_advice = lambda: memory_advice(*told)
    world.begin_steps()
    return module


def _state(
    zero: int | Literal["auto"] | None,
    shares: Sequence[float] | Literal["auto"] | None,
    align: Align | None,
    hosted: Offload | Literal["auto"] | None,
    reduce: Reduce | None,
) -> StateSharding | None:
    """How the state of parameters is divided; where the level or the shares are chosen later, with any."""
    if shares is not None and shares != "auto":
        check_type("state_shares", shares, (list, tuple), "a list of numbers, or 'auto'")
    if reduce == "server" and not zero:
        zero, align = 1, "parameter"
    if not zero and hosted in (None, "none", "activations") and (shares or align):
        raise UsageError("state_shares and state_align say how zero= divides the state: give zero=1, 2 or 3")
    level = 1 if zero == "auto" or (hosted in STATE_ON_HOST and not zero) else zero
    own = tuple(shares or ()) if shares != "auto" else ()
    return None if level is None else StateSharding(level, own, align or "row")


def _offload(offload: str | Sequence[str] | None) -> Offload | Literal["auto"] | None:
    """The word for what is on the host; None where it is not said."""
    if offload == "auto":
        return "auto"
    check_type(
        "offload", offload, (str, list, tuple, set, frozenset, type(None)), "'state', 'activations', or a list of them"
    )
    try:
        return offload_of(offload)
    except AnnotationError as error:
        raise UsageError(str(error)) from None


def _check_precision(precision: str) -> None:
    if precision in ("fp8", "float8"):
        raise UsageError(
            "precision='fp8' is not there: products in float8 need scales of each tensor, as torchao keeps them in "
            "modules of its own; use bf16, or fp16 where devices have no bfloat16"
        )
    check_choice("precision", precision, ("fp32", *LOW_PRECISIONS))


def _check_casts(model: nn.Module, precision: str | None) -> None:
    """Refuse a precision that changes nothing: ``torch.autocast`` leaves float64 as it is; fp16 scales the loss."""
    if precision == "bf16" and {p.dtype for p in model.parameters()} == {torch.float64}:
        raise UsageError(
            "precision='bf16' changes nothing: the model's parameters are float64, which torch.autocast leaves "
            "as they are; call model.float() first, or leave precision out"
        )


def _precision(given: str | None, device: torch.device) -> str | None:
    """The precision of ``torch.autocast`` in which a model computes: the given one, or that of the script around."""
    around = autocast_around(device.type).dtype
    names = {dtype: name for name, dtype in LOW_PRECISIONS.items()}
    if around is None:
        return given if given in LOW_PRECISIONS else None
    if around not in names or given not in (None, names[around]):
        raise UsageError(
            f"parallelize stands under torch.autocast with {str(around).removeprefix('torch.')}, but precision is "
            f"{given!r}: leave one of them out"
            if given
            else f"torch.autocast with {around} is not supported; use torch.bfloat16 or torch.float16"
        )
    return names[around]


def _annotate_as_planned(template: nn.Module, plan: Plan) -> None:
    """Put the plan's annotations on a copy of the model, replacing its own annotations there."""
    own = module_scopes(template)
    forget(template)
    try:
        annotate(
            template, {key: [Annotation(strategy=s) for s in several] for key, several in plan.strategies().items()}
        )
    except AnnotationError as error:
        raise PlanMismatchError(f"the plan's annotations do not fit the model: {error}") from error
    planned = module_scopes(template)
    for path, scopes in own.items():
        around = path
        while around not in planned and around:
            around = around.rpartition(".")[0]
        told = [scope.strategy for scope in planned.get(around, ())]
        for scope in scopes:
            if not is_kept(scope.strategy, told):
                raise PlanMismatchError(
                    f"the model's code says {scope.strategy} of {path or 'the whole model'}, but the plan's "
                    f"annotations say {' > '.join(map(str, told)) or 'nothing'}; change one, or search for a new plan"
                )


def _meta_copy(model: nn.Module) -> nn.Module:
    """The model without its data, to capture other batches from."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in memo:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            kept = nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
            memo[id(tensor)] = kept
    return model_copy(model, memo)


def _check_one_place(model: nn.Module, device: torch.device) -> None:
    places: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        places.setdefault(parameter.device, name)
    if len(places) > 1:
        shown = ", ".join(f"{name} on {place}" for place, name in places.items())
        raise UsageError(
            f"the model's parameters are on several devices: {shown}; put all of them on {device}, or all on the meta "
            "device, and let annotations place them"
        )


def _check_devices(model: nn.Module, device: torch.device) -> None:
    """Refuse tensors on another device; from the host's memory each rank copies its part."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type in ("meta", "cpu") or tensor.device == device:
            continue
        if tensor.device.type == device.type and str(device) == device.type:  # no index: any device of the type
            continue
        why = name_of_unsupported(tensor.device.type)
        raise UsageError(
            f"{name} is on {tensor.device}, but {f'{why}, and ' if why else ''}this rank computes on {device}: leave "
            f"the model on the host, or move it with .to({str(device)!r}) before parallelize"
        )


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Differences between a parallel and a local step. Errors of gradients are relative to the largest element of each,
    or to a hundredth of the largest of all: some, as those of a bias of keys, are nothing but rounding.

    ``worst`` names the parameter with the largest error; ``passed`` compares with ``tolerance``.
    """

    loss: float
    local_loss: float
    loss_error: float
    gradient_error: float
    worst: str
    tolerance: float
    gradients: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether loss and every gradient are within the tolerance."""
        return self.loss_error <= self.tolerance and self.gradient_error <= self.tolerance


def verify(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> ParityReport:
    """Run one step locally and one in parallel from the same weights, and compare the loss and every gradient.

    Call it on every rank. *options* are those of :func:`parallelize`. The default tolerance is that of the precision in
    which steps compute and sum gradients: 1e-9 in float64, 1e-4 in float32, 0.01 in TF32 and float16, 0.08 in
    bfloat16. In low precision, of the options, the plan or the script, the local step is under ``torch.autocast`` too.
    Models with dropout are compared in evaluation mode.

    Raises:
        UsageError: the loss or a gradient of the local step is not finite, so that nothing can be compared with it.
    """
    from whale.graph.capture import _Loss

    local = model_copy(model, {}).eval()
    here = describe(options.get("device")).device
    if all(x.device.type == "cpu" for x in local.parameters()):  # each rank copies its part to its device, too
        local = local.to(here)
    leaves = leaves_beside(local, batch)
    given = [v.clone() if isinstance(v, Tensor) else v for v in leaves.values()]
    plan = options.get("plan")
    if isinstance(plan, (str, PathLike)) and plan != "auto":
        plan = options["plan"] = Plan.load(plan)
    if isinstance(plan, Plan) and plan.step_in_backward:  # gradients are compared, not updates
        plan = options["plan"] = plan.model_copy(update={"step_in_backward": None})
    precision = _precision(options.get("precision") or (plan.precision if isinstance(plan, Plan) else None), here)
    summed = options.get("gradient_dtype") or (plan.gradient_dtype if isinstance(plan, Plan) else None)
    dtype = LOW_PRECISIONS.get(precision or "")
    device = next((p.device.type for p in local.parameters()), "cpu")
    with torch.autocast(device, dtype) if dtype is not None else nullcontext():
        loss = _Loss(local, list(leaves), loss_fn and function_of_copy(loss_fn, model, local))(*given)
    loss.backward()
    expected = {n: p.grad for n, p in local.named_parameters() if p.requires_grad and p.grad is not None}
    _refuse_infinite(loss, expected)
    with _gradients_aside(model):
        parallel = parallelize(model, batch, loss_fn=loss_fn, **options).eval()  # a plan is of the model in its mode
        found_loss = parallel._step(leaves, train=True)
        found = parallel.full_gradients()
    sizes = {n: x.abs().max().item() for n, x in expected.items() if n in found and x.numel()}
    least = _LEAST_GRADIENT * max(sizes.values(), default=0.0)
    apart = {n: (found[n].to(expected[n].device) - expected[n]).abs().max().item() for n in sizes}
    errors = {n: error / (max(sizes[n], least) or 1.0) for n, error in apart.items()}
    errors = {n: inf if isnan(error) else error for n, error in errors.items()}  # nan is more than any
    worst = max(errors, key=lambda n: errors[n], default="")
    return ParityReport(
        loss=found_loss.item(),
        local_loss=loss.item(),
        loss_error=abs(found_loss.item() - loss.item()) / (abs(loss.item()) or 1.0),
        gradient_error=errors.get(worst, 0.0),
        worst=worst,
        tolerance=tolerance if tolerance is not None else tolerance_of(local, precision, summed),
        gradients=errors,
    )


def _refuse_infinite(loss: Tensor, gradients: Mapping[str, Tensor]) -> None:
    """Refuse a local step of which something is not finite."""
    bad = [f"the gradient of {name}" for name, x in gradients.items() if not x.isfinite().all()]
    if not loss.isfinite().all():
        bad = [f"the loss ({loss.item()})"]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise UsageError(
            f"{bad[0]}{more} of the local step is not finite, so nothing can be compared with it; verify a batch and "
            "weights with which the local model trains (torch.autograd.set_detect_anomaly names the operator)"
        )


@contextmanager
def _gradients_aside(model: nn.Module) -> Iterator[None]:
    """Without the gradients of a model, which has them again after that."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def leaves_beside(model: nn.Module, batch: Any) -> dict[str, Any]:
    """The leaves of a batch on the model's device, which a parallel step does not ask for and the local one does.

    >>> leaves_beside(nn.Linear(2, 2, device="meta"), {"x": torch.ones(3), "n": 1})
    {'x': tensor(..., device='meta', size=(3,)), 'n': 1}
    """
    place = next((x.device for x in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    return {name: v.to(place) if isinstance(v, Tensor) else v for name, v in batch_leaves(batch).items()}


_LEAST_GRADIENT = 1e-2
"""The part of the largest gradient below which elements of others may be rounding."""

_TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 8e-2}
"""How far steps may differ whose sums are in another order: of the formats with 11 and 8 bits, twenty units in the last
place."""


def tolerance_of(model: nn.Module, precision: str | None, gradient_dtype: str | None = None) -> float:
    """The default tolerance of a model's steps in a precision and with a number type of sums of :func:`parallelize`.

    >>> tolerance_of(nn.Linear(2, 2), None), tolerance_of(nn.Linear(2, 2), "bf16")
    (0.0001, 0.08)
    """
    is_double = any(p.dtype == torch.float64 for p in model.parameters())
    names = {"fp64"} if is_double else {precision_of(model), precision or "fp32"}
    names |= {gradient_dtype} if gradient_dtype is not None else set()
    return max(_TOLERANCES[name] for name in names)


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """Copies of parameters after some steps. ``unlike`` are the parameters of which some rank has other bits than the
    first one that has the same part, with these ranks."""

    parameters: int
    steps: int
    unlike: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all copies are equal to the bit."""
        return not self.unlike


def verify_replicas(
    model: nn.Module, batch: Any, *, steps: int = 20, loss_fn: Callable[..., Any] | None = None, **options: Any
) -> ReplicaReport:
    """Train some steps in parallel, and compare the copies of every parameter bit for bit: they must stay equal, also
    on devices that round differently.

    Call it on every rank. *options* are those of :func:`parallelize`; the optimizer is AdamW. Afterwards
    ``model.unlike_copies()`` of a parallel model compares in any training.
    """
    check_count("steps", steps)
    parallel = parallelize(model, batch, loss_fn=loss_fn, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    leaves = batch_leaves(batch)
    for _ in range(steps):
        parallel._step(leaves, train=True)
        optimizer.step()
        optimizer.zero_grad()
    names = len(dict(model.named_parameters()))
    return ReplicaReport(parameters=names, steps=steps, unlike=parallel.unlike_copies())
