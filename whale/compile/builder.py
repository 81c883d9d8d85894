"""The builder of one rank's parallel module: from the first compilation to its tensors, groups and steps, and later to
steps for other batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.compile.any_size import AnySize, PlacedStep, TracingAndPlacing
from whale.compile.assembly import assemble
from whale.compile.communicators import ON_HOSTS, PURPOSES, Communicator, communicators, message_ranks
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_traced, local_tensors, rows_of
from whale.compile.kernels import compiled_kernels, kernels_of_inductor, run_alone
from whale.compile.options import Options
from whale.compile.placed_like import placed_like
from whale.compile.rank_step import RankStep, rank_step
from whale.compile.row_shares import batch_leaf_names, row_shares
from whale.compile.trace import Traced, set_modes, trace
from whale.compile.unread import check_places, forms_of_unread
from whale.errors import CaptureError, WorkerError
from whale.graph.capture import batch_leaves, capture
from whale.graph.captured import Captured
from whale.graph.carried import CapturedForward, Forwards
from whale.graph.copies import variables_of
from whale.graph.made_once import Carried, copied, write_made
from whale.graph.precision import LOW_PRECISIONS
from whale.graph.size_conditions import SizeConditions, VaryingDims, size_conditions
from whale.ir.cluster import Cluster
from whale.ir.garbage import without_collections
from whale.ir.objects import CopiedFunction
from whale.ir.program import Direction, Edge, Returns
from whale.runtime.agreement import ints_of_all
from whale.runtime.attributes import Changes, Sources
from whale.runtime.cuda_graphs import recorder_of
from whale.runtime.engine import COMPARED_EACH, FIRST_COMPARED, CompiledStep, Engine, Modes
from whale.runtime.groups import Groups
from whale.runtime.initial_values import InitialValues
from whale.runtime.launch import World
from whale.runtime.local_rows import LocalBatches, RowShares
from whale.runtime.mesh_axes import MeshAxes
from whale.runtime.module import ParallelModule, parallel_module
from whale.runtime.optimizers import attend
from whale.runtime.owned import HeldTensors, HeldUnit
from whale.runtime.precision import LossScaler
from whale.runtime.random import RNGPosition
from whale.runtime.refusals import Refusals
from whale.runtime.shards import Shard
from whale.runtime.step_in_backward import StepInBackward
from whale.runtime.store import Board

__all__ = ["CHECKED_RANKS", "Builder", "clock_of", "warn_of"]


def warn_of(world: World, compilation: Compilation) -> None:
    """Warn of what a compilation does in another way than the model's code says, or slowly."""
    for name, place in compilation.captured.written:
        world.warn(
            f"the forward writes to its argument {name}{f' at {place.file}:{place.line}' if place else ''}: a parallel "
            "step computes with what is written, and leaves the batch as it was; clone the argument to say so"
        )
    for text in compilation.warnings:
        world.warn(text)


def clock_of(clock: RNGPosition, size: int, options: Options) -> RNGPosition | None:
    """Random operators are seeded by position; a single rank with a single micro-batch draws as the local model does.
    The number that was asked for decides, so that small batches draw as others.
    """
    return clock if size > 1 or options.micro_batches > 1 else None


CHECKED_RANKS = 1024
"""Number of ranks up to which every launch proves its programs; it takes milliseconds for small worlds."""


_COMPILATION_SECONDS = 3600.0
"""The longest that ranks wait for each other's compilers."""

_ANY_NUMBER = 0.5
"""In place of those that a step takes as tensors."""


class Kind(NamedTuple):
    """Key of a step besides its batch: see :class:`whale.runtime.compiled_steps.StepKey`."""

    modes: Modes
    returns: Returns
    attributes: tuple[tuple[str, Hashable], ...] = ()
    numbers: tuple[str, ...] = ()


class Builder:
    """Makes the parallel module of one rank, and later compiles steps for other batches."""

    def __init__(
        self,
        model: nn.Module,
        template: nn.Module,
        cluster: Cluster,
        options: Options,
        world: World,
        loss_fn: Callable[..., Any] | None,
        sources: Sources,
        initial: InitialValues | None,
        clock: RNGPosition,
    ) -> None:
        self.model: nn.Module | None = model
        self.initial, self.sources = initial, sources
        self.template, self.cluster, self.options, self.world, self.loss_fn = template, cluster, options, world, loss_fn
        self.clock = clock
        self.made = Groups(world)
        self.groups: dict[Communicator, Any] = {}
        self.loss_group: Any = None
        self.host_group: Any = None
        self.first: Compilation | None = None
        self.any_size = self._no_sizes()
        self.forwards = Forwards()
        self.shards: dict[str, Shard] = {}
        self.layouts: dict[str, tuple[int, ...]] = {}
        self.segments = kernels_of_inductor() if options.compile else None
        self.recorder = recorder_of(world.device) if options.cuda_graphs else None

    def build(
        self,
        compilation: Compilation,
        example: Mapping[str, Any],
        modes: Modes,
        *,
        bring: str,
        looks: Mapping[str, Tensor],
    ) -> ParallelModule:
        """The parallel module of this rank. All ranks must call it.

        Args:
            compilation: for the example.
            example: a batch, by leaf name.
            modes: of the modules, in the compilation.
            bring: what ranks bring to a step, as in :func:`whale.parallelize`.
            looks: fingerprints of the model's tensors, by name, as far as they are known.
        """
        model, world = self.model, self.world
        assert model is not None
        self.first = compilation
        self.rows = compilation.rows[0]
        shards = compilation.shards()
        named = dict(model.named_parameters())
        for name, stage in compilation.unread.items():
            parameter = named[name]
            parts = dict.fromkeys(stage.mesh.ranks, tuple(((0, size),) for size in parameter.shape))
            shards[name] = Shard(shape=tuple(parameter.shape), dtype=parameter.dtype, parts=parts, trainable=False)
        self.shards = shards
        buffers = {
            name: Shard(
                shape=tuple(b.shape),
                dtype=b.dtype,
                parts=dict.fromkeys(self._buffer_ranks(compilation, name), tuple(((0, size),) for size in b.shape)),
                trainable=False,
            )
            for name, b in model.named_buffers()
        }
        hosted = {name for unit in compilation.units if unit.on_host for name in unit.names}
        hosted |= compilation.tables_on_host
        places = {name: torch.device("cpu") if name in hosted else world.device for name in shards}
        if self.initial is None:
            held = local_tensors(shards, world.rank, named, places)
            held |= {name: b.to(world.device) for name, b in model.named_buffers()}
        else:
            own = {name: shard.parts[world.rank] for name, shard in shards.items() if world.rank in shard.parts}
            first = torch.device("cpu") if hosted else world.device
            tensors = self.initial.take({**own, **dict.fromkeys(buffers)}, first)
            tensors = {name: x.to(places.get(name, world.device)) for name, x in tensors.items()}
            held = {n: nn.Parameter(tensors[n], requires_grad=named[n].requires_grad) for n in own}
            held |= {name: tensors[name] for name in buffers}
        persistent = set(model.state_dict(keep_vars=True))
        aliases = {n: first for n, first in compilation.captured.aliases.items() if n in persistent}
        divided = {name for unit in compilation.units for name in unit.names}
        self.layouts = {n: tuple(x.stride()) for n, x in held.items() if not x.is_contiguous() and n not in divided}
        held = HeldTensors(held)
        self.model = self.initial = None
        if world.size > 1:
            self._make_groups(compilation)
            if world.device.type != "cuda":  # the default group has no messages there
                everyone = tuple(range(world.size))
                self.loss_group = self.host_group = self.made.make([everyone])[everyone]
            elif bring != "global" or compilation.tables_on_host:
                self.host_group = self.made.of_hosts()
        shares, refusals = row_shares(compilation), Refusals(world)
        engine = Engine(
            world=world,
            source=self.compile,
            shards=shards,
            buffers=buffers,
            aliases=aliases,
            tensors=held,
            clock=self.clock,
            loss_group=self.loss_group,
            shares=shares,
            refusals=refusals,
            local=self._local_batches(compilation, shares, refusals) if bring != "global" else None,
            precision=LOW_PRECISIONS.get(self.options.precision or ""),
            loss_scaler=LossScaler() if self.options.precision == "fp16" else None,
            updates=StepInBackward() if self.options.step_in_backward else None,
            axes=MeshAxes(world, [stage.mesh for stage in compilation.stages], self.made),
            column_groups={
                (one.ranks, one.purpose in ON_HOSTS): group
                for one, group in self.groups.items()
                if one.purpose.startswith("sums of columns")
            },
            on_host=compilation.tables_on_host,
            host_group=self.host_group,
        )
        own_modes = modes if any(modes) else ()
        data = self._rank_step(compilation)
        step = self._assemble(self._with_kernels(data, held, example), held)
        self._learn(Kind(own_modes, "loss"), example, PlacedStep(compilation, data), held)
        forward = self._forward(compilation.captured, example, own_modes, "loss", (), Changes(), held)
        self.forwards.add(forward)
        step = replace(step, leaves=self._kept_by(compilation, Changes(), forward))
        engine.install(example, own_modes, step)
        if bring == "parts" and engine.local is not None:
            engine.local.divide_samples(step.stages, example)
        attend(engine, named)
        variables = variables_of(self.template)
        of_loss = self.loss_fn if isinstance(self.loss_fn, CopiedFunction) else None
        variables += of_loss.variables if of_loss is not None else ()
        objects = of_loss.objects if of_loss is not None else ()
        return parallel_module(self.template, engine, _leaves, self.sources, model, looks, variables, objects)

    def _no_sizes(self) -> AnySize:
        return AnySize(lambda number: ints_of_all(self.world, number, "the comparison of compiled steps"))

    def _learn(self, kind: Kind, batch: Mapping[str, Any], placed: PlacedStep, tensors: Mapping[str, Tensor]) -> None:
        """Let a compiled step be one of those from which steps for other sizes are made. All ranks must call it."""

        def trace_other(batch: Mapping[str, Any]) -> Traced:
            return self._trace(batch, kind.modes, kind.returns, kind.numbers, tensors)

        def place_like(compilation: Compilation, traced: Traced) -> PlacedStep | None:
            found = placed_like(compilation, traced, rows_of(traced, self.options, self.rows))
            return None if found is None else PlacedStep(found, self._rank_step(found))

        def conditions(batch: Mapping[str, Any], dims: VaryingDims) -> SizeConditions | None:
            options: dict[str, Any] = {"loss_fn": self.loss_fn, "returns": kind.returns}
            return size_conditions(self.template, batch, dims, device=self.world.device, **options)

        self.any_size.learn(kind, batch, placed, TracingAndPlacing(trace_other, place_like, conditions))

    def _make_groups(self, compilation: Compilation) -> None:
        """Make the groups that a compilation needs and earlier ones did not; all ranks must call it. On NCCL each is
        used once, in the same order, so that ranks connect before a step and not in it."""
        on_device = self.world.device.type == "cuda"
        wanted = [c for c in communicators(compilation, for_messages=on_device) if c not in self.groups]
        for purpose in PURPOSES:
            make = self.made.make_on_hosts if purpose in ON_HOSTS else self.made.make
            made = make(ranks for other, ranks in wanted if other == purpose)
            self.groups |= {Communicator(purpose, ranks): group for ranks, group in made.items()}
        for one in wanted if on_device else ():
            if self.world.rank in one.ranks:
                place = torch.device("cpu") if one.purpose in ON_HOSTS else self.world.device
                work = dist.all_reduce(torch.zeros(1, device=place), group=self.groups[one], async_op=True)
                assert work is not None
                self.world.failures.wait(work, f"the first use of the group {one}", one.ranks)

    def _group_of(self, purpose: str) -> Callable[[tuple[int, ...]], Any]:
        """The group of ranks for a purpose; None for one rank."""
        return lambda ranks: self.groups[Communicator(purpose, ranks)] if len(ranks) > 1 else None

    def _message_group(self) -> Callable[[Edge, Direction], Any]:
        """The group of an edge's messages; on a CPU the default group."""
        assert self.first is not None
        if self.world.device.type != "cuda":
            return lambda edge, direction: None
        specs, found = self.first.rank_specs, self.groups
        return lambda edge, direction: found.get(Communicator(direction, message_ranks(specs, edge)))

    def _local_batches(self, compilation: Compilation, shares: RowShares, refusals: Refusals) -> LocalBatches:
        return LocalBatches(
            world=self.world,
            shares=shares,
            refusals=refusals,
            leaves=batch_leaf_names(compilation),
            known=frozenset(compilation.captured.inputs.values()),
            host_group=self.host_group,
            group=self.loss_group,
            compared_first=FIRST_COMPARED,
            compared_each=COMPARED_EACH,
        )

    def _buffer_ranks(self, compilation: Compilation, name: str) -> Sequence[int]:
        for stage in compilation.stages:
            if name in stage.mutated:
                return stage.mesh.ranks
        return range(self.world.size)

    @without_collections
    def compile(
        self,
        batch: Mapping[str, Any],
        modes: Modes,
        changes: Changes,
        tensors: Mapping[str, Tensor],
        returns: Returns,
        numbers: Collection[str],
    ) -> CompiledStep:
        """A step for batches of another signature, for modules in other modes or with other attributes, or that returns
        something else; parameters stay where they are. It takes *numbers* as tensors, if the model can."""
        kind: Kind | None = Kind(modes, returns, changes.key, tuple(numbers))
        varying = {name: _ANY_NUMBER if name in numbers else leaf for name, leaf in batch.items()}
        made = self.any_size.step(kind, varying)
        if made is not None:
            return replace(self._assemble(made, tensors), numbers=tuple(numbers), is_made=True)
        changes.write(self.template)
        try:
            compilation = self._compiled(self._trace(batch, modes, returns, numbers, tensors))
        except CaptureError:  # where it is not for the numbers, the same is raised again
            if not numbers:
                raise
            compilation, numbers, kind = self._compiled(self._trace(batch, modes, returns, (), tensors)), (), None
        forward = self._forward(compilation.captured, batch, modes, returns, numbers, changes, tensors)
        self.forwards.add(forward)
        needed = compilation.shards()
        check_places(needed, self.shards)
        for name, shard in needed.items():
            self.shards[name] = replace(shard, trainable=shard.trainable or self.shards[name].trainable)
        if self.world.size > 1:
            self._make_groups(compilation)
        warn_of(self.world, compilation)
        if self.world.size <= CHECKED_RANKS:
            clock = clock_of(self.clock, self.world.size, self.options)
            compilation.check(self.world.rank, clock)
        data = self._rank_step(compilation)
        if kind is not None:
            self._learn(kind, varying, PlacedStep(compilation, data), tensors)
        step = self._assemble(self._with_kernels(data, tensors, batch), tensors)
        return replace(step, numbers=tuple(numbers), leaves=self._kept_by(compilation, changes, forward))

    def _kept_by(
        self, compilation: Compilation, changes: Changes, forward: CapturedForward
    ) -> Callable[[nn.Module], bool] | None:
        """Gives a model what a compiled forward makes and keeps, and says whether that is another one than others have
        read; None if it makes nothing."""
        made = compilation.captured.made
        if not made:
            return None

        def leave(model: nn.Module) -> bool:
            by_script = any(one.name in changes.names.get(one.path, ()) for one in made)
            outdated = write_made(self.template, copied(made)) or by_script
            write_made(model, copied({one: x for one, x in made.items() if one.kind != "buffer"}))
            if outdated:
                self.any_size = self._no_sizes()
            self.forwards = Forwards()  # others were captured from another state
            self.forwards.add(forward)
            return outdated

        return leave

    def _forward(
        self,
        captured: Captured,
        batch: Mapping[str, Any],
        modes: Modes,
        returns: Returns,
        numbers: Collection[str],
        changes: Changes,
        tensors: Mapping[str, Tensor],
    ) -> CapturedForward:
        """A captured forward, as it is compared with others."""
        example = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in batch.items()}

        def again(start: Carried | None) -> Captured:
            set_modes(self.template, any(modes), modes)
            return capture(
                self.template,
                example,
                device=self.world.device,
                loss_fn=self.loss_fn,
                promote=self.options.promote,
                returns=returns,
                numbers=numbers,
                precision=LOW_PRECISIONS.get(self.options.precision or ""),
                values=tensors.get,
                start=start,
            )

        return CapturedForward(
            modes=modes,
            returns=returns,
            attributes=changes.key,
            batch=example,
            left=captured.left,
            outside=captured.left_outside,
            listing=captured.listing,
            again=again,
        )

    def _compiled(self, traced: Traced) -> Compilation:
        assert self.first is not None
        return compile_traced(
            traced,
            self.cluster,
            self.options,
            device=self.world.device,
            rows_per_micro_batch=self.rows,
            stored=self.first.stored_forms() | forms_of_unread(self.first.unread),
            units=self.first.units,
            on_host=self.first.tables_on_host,
        )

    def _trace(
        self,
        batch: Mapping[str, Any],
        modes: Modes,
        returns: Returns,
        numbers: Collection[str],
        tensors: Mapping[str, Tensor],
    ) -> Traced:
        return trace(
            self.template,
            batch,
            device=self.world.device,
            training=any(modes),
            modes=modes,
            loss_fn=self.loss_fn,
            promote=self.options.promote,
            precision=self.options.precision,
            returns=returns,
            numbers=numbers,
            values=tensors.get,
        )

    def _rank_step(self, compilation: Compilation) -> RankStep:
        seeded = clock_of(self.clock, self.world.size, self.options)
        rank = self.world.rank
        return rank_step(
            compilation,
            rank,
            compilation.program(rank),
            seeded,
            device=self.world.device,
            layouts=self.layouts,
        )

    def _with_kernels(self, step: RankStep, tensors: Mapping[str, Tensor], batch: Mapping[str, Any]) -> RankStep:
        """The step with compiled kernels, if they are asked for. All ranks must call it."""
        if self.segments is None or step.loss_dtype is None:
            return step
        compiled = compiled_kernels(step, self.segments)
        device = self.world.device
        zeros = {n: torch.zeros_like(x, device=device) if isinstance(x, Tensor) else x for n, x in batch.items()}
        board = Board(self.world, "compilation of kernels", patience_seconds=_COMPILATION_SECONDS)
        try:
            run_alone(compiled, self._held(step, tensors), zeros, self.clock, device)
        except BaseException as error:
            board.put(f"rank {self.world.rank}", f"{type(error).__name__}: {error}")
            raise
        board.put(f"rank {self.world.rank}", "")
        for rank in range(self.world.size):
            if failed := board.get(f"rank {rank}", rank):
                raise WorkerError(f"rank {rank} could not compile its kernels: {failed}")
        return compiled

    def _held(self, step: RankStep, tensors: Mapping[str, Tensor]) -> dict[tuple[str, Any], Any]:
        units = self._units(tensors)
        divided = {name: slot for unit in units.values() for name, slot in unit.slots.items()}
        held: dict[tuple[str, Any], Any] = {
            ("parameter" if isinstance(t, nn.Parameter) else "buffer", name): t
            for name, t in tensors.items()
            if name not in divided
        }
        held |= {("gradient", name): slot for name, slot in divided.items()}
        held |= {("unit", index): unit for index, unit in units.items()}
        return held | {("constant", n): t.to(self.world.device) for n, t in step.constants.items()}

    def _units(self, tensors: Mapping[str, Tensor]) -> Mapping[int, HeldUnit]:
        """The units of which this rank owns stretches; the owned parameters become parts of them."""
        assert self.first is not None
        if not isinstance(tensors, HeldTensors):
            return {}
        if tensors.units is None:
            rank, failures = self.world.rank, self.world.failures
            tensors.units = {
                unit.spec.index: HeldUnit(
                    unit,
                    rank,
                    tensors,
                    self.world.device,
                    self._group_of("gathers of parameters")(unit.spec.ranks),
                    self._group_of("sums of gradients")(unit.spec.ranks),
                    failures,
                    is_shared=tensors.are_shared,
                )
                for unit in self.first.units
                if rank in unit.spec.ranks
            }
        return tensors.units

    def _assemble(self, step: RankStep, tensors: Mapping[str, Tensor]) -> CompiledStep:
        return assemble(
            step,
            self.world.rank,
            tensors=self._held(step, tensors),
            clock=self.clock,
            bridge_group=self._group_of("inside stages"),
            reduce_group=self._group_of("sums of gradients"),
            failures=self.world.failures,
            device=self.world.device,
            host_group=self._group_of("sums of gradients on hosts"),
            message_group=self._message_group(),
            recorder=self.recorder,
            warn=self.world.warn,
        )


def _leaves(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The leaves of a batch in the form of a step's arguments: as one object, or as the model's arguments."""
    positional = batch_leaves(args[0] if len(args) == 1 else args) if args else {}
    return positional | kwargs
