"""The steps of a parallel model on one rank: compiled once for each kind of batch, and whole tensors from the parts.

It owns this rank's tensors and runs compiled steps; how a step is compiled (capture, placement, lowering) is behind
`StepSource`. Knows names and tensors; not the modules that a script sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.errors import UsageError
from whale.ir.program import Returns
from whale.runtime.agreement import checksums_of_all
from whale.runtime.attributes import Changes
from whale.runtime.comm_hooks import CommHook
from whale.runtime.compiled_steps import CompiledSteps, StepKey
from whale.runtime.executor import Executor
from whale.runtime.launch import World
from whale.runtime.local_rows import LocalBatches, RowShares, RowTerms
from whale.runtime.loss import ROUNDING, GlobalLoss, LikeBatches, look_at
from whale.runtime.mesh_axes import MeshAxes
from whale.runtime.outputs import Outputs, put
from whale.runtime.owned import HeldTensors
from whale.runtime.precision import LossScaler, in_own_dtypes
from whale.runtime.random import RNGPosition
from whale.runtime.refusals import Refusals
from whale.runtime.shards import Shard, gathered_parts
from whale.runtime.stage import LocalStage, part
from whale.runtime.step_in_backward import StepInBackward
from whale.runtime.store import Board
from whale.runtime.uploads import OnHost, upload

__all__ = ["FIRST_COMPARED", "CompiledStep", "Engine", "Modes", "Result", "StepSource"]

Signature = tuple[Any, ...]

Modes = tuple[bool, ...]
"""Whether each module is in training mode, in the order of ``modules()``; empty if none is."""

FIRST_COMPARED, COMPARED_EACH = 3, 64
"""Steps with batches of a signature in which the ranks compare their values: the first ones, and every 64th later.
On a GPU, where that is waiting for it, the first alone."""

_SAMPLED = 64
"""Elements of a parameter that ranks compare, evenly from all of it."""

_SMALLEST = 1e-30


class ReplicaCounts(NamedTuple):
    """The divisors of the losses of replicas: how many there are, that of this rank, and a stage without tasks that
    returns what it adds to that one's count."""

    replicas: int
    replica: int
    stage: LocalStage | None

    def terms(self, batch: Mapping[str, Any]) -> list[Tensor | float]:
        """This rank's terms of the counts of a batch."""
        found: list[Tensor | float] = [0.0] * self.replicas
        if self.stage is not None:
            self.stage.begin(batch)
            with torch.no_grad():
                (found[self.replica],) = self.stage.forward(0, ())
        return found


@dataclass(kw_only=True)
class CompiledStep:
    """A step for batches of one signature. ``counts_loss`` says whether this rank's loss is part of the global sum,
    ``loss_dtype`` is that of the loss, also where this rank computes none, and None if the model returns no loss;
    ``outputs`` says how the model's output is made, in steps that return it. ``sums`` are the terms of what local
    batches are summed for, ``gathered`` the leaves of local batches that are gathered, once that is known, ``numbers``
    those of type float that it takes as tensors; ``is_made`` says that it was made of others, which takes little time,
    and not compiled. ``count`` is what divides the loss of each replica, if their gradients are combined. ``leaves``
    gives a model what the forward makes and keeps, and says whether steps compiled before compute with another one."""

    executor: Executor
    stages: Sequence[LocalStage]
    counts_loss: bool
    loss_dtype: torch.dtype | None
    outputs: Outputs | None = None
    sums: RowTerms = field(default_factory=RowTerms)
    gathered: tuple[str, ...] | None = None
    numbers: tuple[str, ...] = ()
    is_made: bool = False
    count: ReplicaCounts | None = None
    leaves: Callable[[nn.Module], bool] | None = None


StepSource = Callable[[Mapping[str, Any], Modes, Changes, Mapping[str, Tensor], Returns, Collection[str]], CompiledStep]
"""Compiles a step for a batch (by leaf name), for modules in these modes and with these attributes, over these tensors
of this rank, which takes these numbers of the batch as tensors, if it can."""


class Result(NamedTuple):
    """The result of a step: the global loss and the model's output; None for what was not wanted."""

    loss: Tensor | None
    output: Any


@dataclass(kw_only=True, eq=False)
class Engine:
    """Runs the steps of one rank.

    Attributes:
        world: all ranks.
        source: compiles steps.
        shards, buffers: where each parameter and buffer of the local model is.
        aliases: for every name in the local model's state dict the first name of that tensor.
        tensors: this rank's parts, by first name.
        clock: the position of random operators.
        shares: the rows of a batch that each rank computes on.
        refusals: of steps, by any rank.
        loss_group: of all ranks, for the loss and the comparison of batches.
        steps: compiled ones, by signature, modes, changed attributes and what they return.
        compared: how many batches of a signature there were.
        local: makes global batches of those of the ranks; None if every rank has them.
        precision: in which steps compute, as under ``torch.autocast``; None: in that of the model.
        loss_scaler: keeps a factor of the loss, in float16.
        axes: of the meshes of its stages.
        column_groups: of ranks that have columns each of tables with sparse gradients, by these ranks and by whether
            the tables are in the host's memory.
        on_host: names of the tables that are there.
        host_group: of all ranks, for tensors on the host.
        updates: of parameters inside of steps; None: the script's optimizers update them after these.
        floats: arguments of type float, with the first value of each.
        numbers: those that were another number later.
        done: what the script has done to gradients since the last step, which all ranks must do.
        hook: makes the sums of gradients that it fits; None: all are summed by an all-reduce.
        constants: those of them that decide more than values, so that steps are compiled for each.
    """

    world: World
    source: StepSource
    shards: Mapping[str, Shard]
    buffers: Mapping[str, Shard]
    aliases: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    clock: RNGPosition
    shares: RowShares
    refusals: Refusals
    loss_group: dist.ProcessGroup | None = None
    steps: CompiledSteps[CompiledStep] = field(init=False)
    compared: dict[Signature, int] = field(default_factory=dict)
    local: LocalBatches | None = None
    precision: torch.dtype | None = None
    loss_scaler: LossScaler | None = None
    axes: MeshAxes | None = None
    updates: StepInBackward | None = None
    floats: dict[str, float] = field(default_factory=dict)
    column_groups: Mapping[tuple[tuple[int, ...], bool], Any] = field(default_factory=dict)
    on_host: frozenset[str] = frozenset()
    host_group: dist.ProcessGroup | None = None
    numbers: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    done: Counter[str] = field(init=False, default_factory=Counter)
    hook: CommHook | None = field(init=False, default=None)
    _shapes: list[torch.Size] = field(init=False)
    _num_steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.steps = CompiledSteps(self.world.warn)
        self._shapes = [tensor.shape for tensor in self.tensors.values()]

    def install(self, batch: Mapping[str, Any], modes: Modes, step: CompiledStep) -> None:
        """Use an already compiled step for equal batches."""
        self.floats |= {name: value for name, value in batch.items() if isinstance(value, float)}
        self.steps.add(StepKey(signature(batch), modes), step)

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that begin a step with this one that it does not take part."""
        if self.world.size > 1:
            self.refusals.tell(error)
            if self.local is None:
                work = LikeBatches(self.world, self.loss_group, self.refusals, None).work
            else:
                work = self.local.refuse()
            if work is not None:
                self.refusals.join(work)

    def run(
        self,
        batch: Mapping[str, Any],
        modes: Modes,
        train: bool,
        changes: Changes,
        *,
        returns: Returns = "loss",
        to: int | None = None,
        scale: float | Tensor = 1.0,
    ) -> Result:
        """One step over a global batch, or this rank's rows of it, without gradients unless *train*.

        Args:
            batch: by leaf name.
            modes: of the modules.
            train: whether gradients of *scale* times the loss are added to the parameters'.
            changes: of attributes of the modules since the first step was compiled.
            returns: what is returned; the model's output is whole on every rank, or on rank *to* alone.

        Raises:
            UsageError: there is nothing to train, the ranks were given other batches, or one refused the step.
            WorkerError: a rank failed, or did not come within the timeout.
        """
        supervisor = self.world.supervisor
        if supervisor is not None:
            supervisor.check()
        try:
            return self._run(batch, modes, train, changes, returns=returns, to=to, scale=scale)
        except torch.OutOfMemoryError as error:  # outside of its tasks
            raise self.world.failures.failed("a step", error) from error
        finally:
            self._num_steps += 1
            if supervisor is not None:
                done = torch.cuda.Event()
                done.record()
                supervisor.watch(f"step {self._num_steps}", done, self.world.failures.timeout_seconds)

    def _run(
        self,
        batch: Mapping[str, Any],
        modes: Modes,
        train: bool,
        changes: Changes,
        *,
        returns: Returns,
        to: int | None,
        scale: float | Tensor,
    ) -> Result:
        if train and not changes.key and not any(shard.trainable for shard in self.shards.values()):
            raise UsageError(
                "train_step has nothing to train: the loss depends on no parameter that requires a gradient; unfreeze "
                "one with requires_grad_() before parallelize, or use eval_step"
            )
        if [tensor.shape for tensor in self.tensors.values()] != self._shapes:
            self._refuse_shape()
        if train:
            _check_values(batch)
            self._check_gradients()
            if self.updates is not None:
                self.updates.begin(self.tensors)
        whole = batch
        what = f"{_in_words(train, returns, scale)}{f' with {changes}' if changes.key else ''}"
        what += "".join(f" after {text}{f', {n} times' if n > 1 else ''}" for text, n in self.done.items())
        self.done.clear()
        what += "" if self.hook is None else f" with the communication hook {self.hook.name}"
        if self.local is not None:
            batch, whole = self.local.agree(batch, what, self._look_at_replicas)
        key = signature(whole)
        agree = self._compare(batch, key, what) if self.local is None else None
        step = self._step(whole, modes, changes, returns, agree)
        if train:
            self.clock.step += 1
        device = self.world.device
        batch = {k: torch.tensor(v, dtype=torch.float64) if k in step.numbers else v for k, v in batch.items()}
        # A rank copies the parts that it reads of a global batch on the host.
        as_read = OnHost if device.type == "cuda" and self.local is None else upload
        batch = {k: as_read(v, device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        if self.local is not None:
            if step.gathered is None:
                counting = [step.count.stage] if step.count is not None and step.count.stage is not None else []
                more = step.executor.equal_rows.reads if step.executor.equal_rows is not None else ()
                step.gathered = self.local.read_whole(whole, [*step.stages, *step.sums.stages, *counting], more)
            batch = self.local.placed(batch, whole, step.gathered)
        sums = self.local.sums(batch, step.sums) if self.local is not None and step.sums.likes else ()
        for stage in step.stages:
            stage.begin(batch, sums)
        if step.executor.equal_rows is not None:
            step.executor.equal_rows.begin(batch)
        if step.loss_dtype is None:
            step.executor.run(False, agree=agree)
            for stage in step.stages:
                stage.finish()
            return Result(None, self._output(step, to))
        counts = step.count.terms(batch) if step.count is not None and train else ()
        loss = GlobalLoss(self.world, self.loss_group, step.counts_loss, step.loss_dtype, counts)
        if step.executor.reducer is not None:
            step.executor.reducer.hook = self.hook
            if counts:
                step.executor.reducer.counts = loss.counts
        try:
            self._scaled(step, train, loss, scale, agree)
        except UsageError:  # refused: the next step has the randomness of this one
            self.clock.step -= train
            raise
        for stage in step.stages:
            stage.finish()
        if train and self.updates is not None:
            self.updates.taken()
        return Result(loss.finish(), self._output(step, to) if returns == "both" else None)

    def _scaled(
        self,
        step: CompiledStep,
        train: bool,
        loss: GlobalLoss,
        scale: float | Tensor,
        agree: Callable[[], None] | None,
    ) -> None:
        """Run the programs of a step, whose gradients have the factor of the loss while it runs."""
        if self.loss_scaler is None or not train:
            update = self.updates.update if self.updates is not None else None
            step.executor.run(train, loss.begin, scale, agree, update)
            return

        def run(factor: float) -> None:
            step.executor.run(train, loss.begin, scale * factor, agree)

        self.loss_scaler.run([x for x in self.tensors.values() if x.requires_grad], run, self._largest)

    def _largest(self, number: Tensor) -> int:
        """The largest of a number of each rank. All ranks must call it.

        Raises:
            WorkerError: a rank did not come within the timeout.
        """
        found = number.to(self.world.device, torch.int32)
        if self.world.size > 1:
            work = dist.all_reduce(found, dist.ReduceOp.MAX, group=self.loss_group, async_op=True)
            assert work is not None
            self.world.failures.wait(work, "whether all gradients are finite", range(self.world.size))
        return int(found)

    def _output(self, step: CompiledStep, to: int | None) -> Any:
        assert step.outputs is not None
        own = {key: value for stage in step.stages for key, value in stage.take_returned().items()}
        return step.outputs.gather(self.world, own, to)

    def _step(
        self,
        batch: Mapping[str, Any],
        modes: Modes,
        changes: Changes,
        returns: Returns,
        agree: Callable[[], None] | None,
    ) -> CompiledStep:
        """The step for a batch: compiled with the values of its numbers, and from their second value on for all; all
        ranks *agree* first to compile one."""
        for name, value in batch.items():
            if isinstance(value, float) and value != self.floats.setdefault(name, value):
                self.numbers.add(name)
        numbers = [n for n in batch if n in self.numbers - self.constants and isinstance(batch[n], float)]
        kind = StepKey(signature(batch, numbers), modes, changes.key, returns)
        step = self.steps.get(kind)
        if step is None:
            if agree is not None:
                agree()
            step = self.source(batch, modes, changes, self.tensors, returns, numbers)
            if step.numbers != tuple(numbers):
                self.constants |= set(numbers)
                kind = kind._replace(batch=signature(batch))
            self.steps.add(kind, step, is_made=step.is_made)
        if step.leaves is not None:
            after, outdated = changes.take(step.leaves)
            step = replace(step, leaves=None)
            self.steps.keep(lambda other: not outdated and other.leaves is None)  # others begin from another state
            self.steps.add(kind._replace(attributes=after.key), step, is_made=step.is_made)
        return step

    def _check_gradients(self) -> None:
        """Refuse gradients that are one tensor: the sums of each over ranks would be written to the other's.

        Raises:
            UsageError: names the parameters.
        """
        if self.world.size == 1:
            return
        seen: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            if tensor.grad is not None and (first := seen.setdefault(id(tensor.grad), name)) != name:
                raise UsageError(
                    f"{first} and {name} have one tensor as .grad, and their gradients cannot be summed over ranks "
                    "apart: give each its own"
                )

    def register_comm_hook(self, hook: CommHook) -> None:
        """Let a hook make the sums of gradients that it fits.

        Raises:
            UsageError: on all ranks, if there is a hook already, or it fits no sum of one that has some.
            WorkerError: a rank did not come within the timeout.
        """
        if self.hook is not None:
            raise UsageError(f"the communication hook {self.hook.name} is registered already; a model has one")
        reducer = next((step.executor.reducer for step in self.steps if step.executor.reducer is not None), None)
        refused: UsageError | None = None
        try:
            if self.world.rank in hook.ranks and reducer is not None:
                hook.check(reducer.buckets, lambda text: self.world.warn_of_rank("a communication hook", text))
        except UsageError as error:
            refused = error
        flag = torch.tensor(float(refused is not None), dtype=torch.float64, device=self.world.device)
        if float(self._sum(flag, "what all ranks say to a communication hook")) and refused is None:
            refused = UsageError(f"another rank refuses the communication hook {hook.name}; its error says why")
        if refused is not None:
            raise refused
        self.hook = hook

    def drain(self) -> bool:
        """Leave owners the gradients of the oldest step whose sums are on their way; whether there was one."""
        units = self.tensors.units if isinstance(self.tensors, HeldTensors) else None
        return sum(unit.leave_oldest(0) for unit in (units or {}).values()) > 0

    def check_drained(self, what: str) -> None:
        """Refuse something that would leave out gradients that are on their way.

        Raises:
            UsageError: there are some.
        """
        units = self.tensors.units if isinstance(self.tensors, HeldTensors) else None
        if any(unit.late for unit in (units or {}).values()):
            raise UsageError(
                f"{what} would leave out gradients that are on their way to servers (staleness): first call "
                "`while model.drain(): optimizer.step(); optimizer.zero_grad()`"
            )

    def check_gradients_stay(self, what: str) -> None:
        """Refuse something that reads gradients after a step which has freed them.

        Raises:
            UsageError: such are the steps.
        """
        if self.updates is not None:
            raise UsageError(
                f"{what} needs gradients after a step, but with step_in_backward=True train_step has updated the "
                "parameters and freed them: leave step_in_backward out"
            )

    def _refuse_shape(self) -> NoReturn:
        named = zip(self.tensors.items(), self._shapes, strict=True)
        name, now, own = next((name, t.shape, shape) for (name, t), shape in named if t.shape != shape)
        raise UsageError(
            f"{name} has shape {tuple(now)} on rank {self.world.rank}, whose part of it has {tuple(own)}: a whole "
            "tensor was assigned to its .data; load whole tensors with model.load_full_state_dict({name: tensor}, "
            "strict=False), which takes this rank's part"
        )

    def _compare(self, batch: Mapping[str, Any], key: Signature, what: str) -> Callable[[], None] | None:
        """Compare the batches of all ranks; waits for the result, or, if this rank has had such a batch before, returns
        what does."""
        seen = self.compared.get(key, 0)
        checks = not seen or self.world.device.type != "cuda"  # which is waiting for the device
        looks = self.world.size > 1 and checks and (seen < FIRST_COMPARED or seen % COMPARED_EACH == 0)
        given = f"a batch of {_shapes(batch)} for {what}"
        values = [v for v in batch.values() if looks and isinstance(v, Tensor)]
        replicas = self._look_at_replicas() if looks else 0.0
        alike = LikeBatches(self.world, self.loss_group, self.refusals, given, values, replicas)

        def agree() -> None:
            if checks:
                alike.check()
            self.compared[key] = seen + 1  # a step that a rank refuses is counted on none

        if seen and checks:
            return agree
        agree()
        return None

    def _look_at_replicas(self) -> Tensor:
        """A number for the values of the parameters of which every rank has all, by a sample of each."""
        flat = [x.detach().flatten() for x in self._replicas]
        strides = [-(-len(x) // _SAMPLED) for x in flat]
        step = self.clock.step
        samples = [x[step % stride :: stride].to(self.world.device) for x, stride in zip(flat, strides, strict=True)]
        found = [x.double().sum() for x in samples]
        if not found:
            return torch.zeros(())
        sums = torch.stack(found)
        return look_at(sums) + sums.norm().clamp(min=_SMALLEST).log()  # the first does not see a factor of all

    @cached_property
    def _replicas(self) -> list[Tensor]:
        """Parameters of which every rank has all, of many digits: in few, devices round updates differently."""
        ranks = range(self.world.size)
        return [
            self.tensors[name]
            for name, shard in self.shards.items()
            if all(shard.parts.get(rank) == shard.whole for rank in ranks)
            and shard.dtype in (torch.float32, torch.float64)
            and self.tensors[name].numel()
        ]

    def with_copies(self, memo: dict[int, Any]) -> Engine:
        """The same over copies of its tensors, which *memo* tells copy.deepcopy; nothing is compiled yet. Their
        gradients stay after a step."""
        tensors = HeldTensors()
        tensors.are_shared = True
        for name, tensor in self.tensors.items():
            copied = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
            tensors[name] = memo[id(tensor)] = copied
        return replace(
            self, tensors=tensors, clock=copy(self.clock), compared={}, loss_scaler=copy(self.loss_scaler), updates=None
        )

    # Whole tensors under the local model's names

    def shard(self, name: str) -> Shard:
        """Location of a tensor, by its first name."""
        return self.shards.get(name) or self.buffers[name]

    def whole(self, local: Mapping[str, Tensor], names: Iterable[str], to: int | None) -> Iterator[tuple[str, Tensor]]:
        """Gather tensors one after another, on every rank, or on rank *to* alone, where others go through it without a
        result. All ranks must call it, with the same names.

        Raises:
            WorkerError: a rank did not come within the timeout; names it.
        """
        for name in names:
            whole = self._gathered(name, local.get(name), to)
            if whole is not None:
                yield name, whole

    def _gathered(self, name: str, own: Tensor | None, to: int | None) -> Tensor | None:
        shard, rank, size = self.shard(name), self.world.rank, self.world.size
        receives = to is None or rank == to
        parts = list(gathered_parts(shard, size, to))
        on_host = name in self.on_host  # where all ranks together may have more than a device holds
        place, group = (torch.device("cpu"), self.host_group) if on_host else (self.world.device, None)
        if not parts and shard.parts.get(rank) == shard.whole:
            return own.detach().to(place, copy=True) if own is not None and receives else None
        whole = torch.zeros(shard.shape, dtype=shard.dtype, device=place) if receives else None
        for intervals, owner, ranks in parts:
            if rank not in ranks:
                continue
            piece = own.detach().to(place).contiguous() if own is not None and owner == rank else None
            if piece is None:
                assert whole is not None
                piece = whole.new_empty([sum(b - a for a, b in dim) for dim in intervals])
            if to is None:
                work = dist.broadcast(piece, owner, group=group, async_op=True)
            elif owner == to:
                work = None
            else:
                work = dist.isend(piece, to, group) if owner == rank else dist.irecv(piece, owner, group)
            if work is not None:
                what = f"the parts of {name}, which every rank must ask for (full_state_dict, full_gradients)"
                self.world.failures.wait(work, what, ranks)
            if whole is not None:
                put(whole, piece, intervals)
        return whole

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of whole tensors, by first name. Raises `UsageError` for another shape."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if name not in state:
                    continue
                shard, whole = self.shard(name), state[name]
                self._check_shape(name, whole)
                tensor.copy_(part(whole, shard.parts.get(self.world.rank, shard.whole)))

    def load_on_all(self, state: Mapping[str, Tensor], refusal: str) -> None:
        """The same on all ranks, which must call it with equal tensors; *refusal* says why this one does not load.

        Raises:
            UsageError: on every rank, if one refuses, or has other tensors.
            WorkerError: a rank did not come within the timeout.
        """
        try:
            for name, whole in state.items():
                self._check_shape(name, whole)
        except UsageError as error:
            refusal = refusal or str(error)
        look = float(sum((look_at(x).cpu() for x in state.values()), torch.zeros((), dtype=torch.float64)))
        topic = "states of load_full_state_dict, which every rank must call"
        board = Board(self.world, topic, self.world.failures.timeout_seconds)
        board.put(str(self.world.rank), [refusal, crc32(" ".join(sorted(state)).encode()), look])
        told = [board.get(str(rank), rank) for rank in range(self.world.size)]
        if refusal:
            raise UsageError(refusal)
        for rank, (theirs, names, own) in enumerate(told):
            if theirs:
                raise UsageError(f"rank {rank} loads no state: {theirs}")
            if names != told[0][1] or abs(own - told[0][2]) > max(len(state), 1) * ROUNDING:
                raise UsageError(
                    f"rank {rank} was given another state to load than rank 0: load one checkpoint on every rank"
                )
        self.load(state)

    def _check_shape(self, name: str, whole: Tensor) -> None:
        shape = self.shard(name).shape
        if tuple(whole.shape) != shape:
            raise UsageError(f"{name} has shape {tuple(whole.shape)}, but the model's is {shape}")

    @cached_property
    def has_all_parts(self) -> bool:
        """Whether every rank has a part of every parameter."""
        return all(len(shard.parts) == self.world.size for shard in self.shards.values())

    @cached_property
    def holds_all(self) -> bool:
        """Whether every rank has all of every parameter."""
        ranks = range(self.world.size)
        return all(shard.parts.get(rank) == shard.whole for shard in self.shards.values() for rank in ranks)

    def unlike_copies(self) -> dict[str, tuple[int, ...]]:
        """The parameters of which ranks that have the same part have other bits, with these ranks: those that differ
        from the first one. All ranks must call it.

        Raises:
            WorkerError: a rank did not come within the timeout.
        """
        told = checksums_of_all(self.world, [self.tensors.get(name) for name in self.shards])
        found: dict[str, tuple[int, ...]] = {}
        for position, (name, shard) in enumerate(self.shards.items()):
            first = shard.distinct()
            unlike = [r for r in sorted(shard.parts) if told[r][position] != told[first[shard.parts[r]]][position]]
            if unlike:
                found[name] = tuple(unlike)
        return found

    @in_own_dtypes
    def gradient_norm(self, norm_type: float = 2.0, names: Iterable[str] | None = None) -> Tensor:
        """The norm of gradients, in float64, the same on every rank; every element of the local model's counts once.
        All ranks must call it.

        Args:
            norm_type: its order.
            names: of this rank's gradients, by default all.

        Raises:
            WorkerError: a rank did not come within the timeout.
        """
        self.check_gradients_stay("the norm of gradients, as of clip_grad_norm_,")
        gradients: list[Tensor] = []
        for name in self.shards if names is None else names:
            shard, tensor = self.shards[name], self.tensors.get(name)
            if tensor is None or tensor.grad is None:
                continue
            if shard.distinct()[shard.parts[self.world.rank]] != self.world.rank:
                continue
            gradients.append(tensor.grad.coalesce().values() if tensor.grad.is_sparse else tensor.grad)
        found = torch._foreach_norm(gradients, norm_type) if gradients else ()
        kinds: dict[Any, list[Tensor]] = {}
        for norm in found:
            kinds.setdefault((norm.dtype, norm.device), []).append(norm)
        # stacked before all else, which is then one operator for all of them
        norms = [torch.stack(of).to(self.world.device, torch.float64) for of in kinds.values()]
        terms = norms if norm_type == torch.inf else [of**norm_type for of in norms]
        joined = torch.cat([torch.zeros(1, dtype=torch.float64, device=self.world.device), *terms])
        total = joined.max() if norm_type == torch.inf else joined.sum()
        if self.world.size > 1:
            summed = self._sum(total, "the norm of gradients, as of clip_grad_norm_")
            if norm_type == torch.inf:
                work = dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self.loss_group, async_op=True)
                self._wait(work, "the norm of gradients")
            else:
                total = summed
        return total if norm_type == torch.inf else total ** (1.0 / norm_type)

    def _sum(self, term: Tensor, what: str) -> Tensor:
        """A sum over ranks, by a collective like the first one of a step: a rank that takes a step instead is found."""
        if self.local is not None and self.world.device.type == "cpu":
            return torch.tensor(self.local.sum(float(term), what), dtype=torch.float64)
        return LikeBatches(self.world, self.loss_group, self.refusals, what, term=term).sum()

    def _wait(self, work: dist.Work | None, what: str) -> None:
        assert work is not None
        blocking = self.world.device.type == "cpu"
        self.world.failures.wait(work, what, range(self.world.size), blocking=blocking)


def signature(batch: Mapping[str, Any], numbers: Collection[str] = ()) -> Signature:
    """Signature of a batch: names, shapes and dtypes of tensors, values of the rest, except *numbers*."""
    return tuple(
        (name, tuple(v.shape), v.dtype) if isinstance(v, Tensor) else (name, "a number" if name in numbers else repr(v))
        for name, v in batch.items()
    )


def _check_values(batch: Mapping[str, Any]) -> None:
    """Refuse tensors of a batch with which a training step could not do what the local model's does."""
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        if value.requires_grad:
            raise UsageError(
                f"the batch's {name} requires a gradient, but a step computes those of parameters alone: detach() it; "
                "for the gradient of an input (as of adversarial examples) load model.full_state_dict() into a local "
                "model, and compute it there"
            )
        if value.is_inference():
            raise UsageError(
                f"the batch's {name} was made under torch.inference_mode(), and cannot be kept for a backward: give "
                "its clone(), or make it under torch.no_grad()"
            )


def _in_words(train: bool, returns: Returns, scale: float | Tensor) -> str:
    """The call that makes a step, for errors."""
    name = "train_step" if train else "predict_step" if returns == "outputs" else "eval_step"
    options = ["outputs"] * (returns == "both") + [f"scale={scale}"] * (isinstance(scale, float) and scale != 1.0)
    return name + (f"({', '.join(options)})" if options else "")


def _shapes(batch: Mapping[str, Any]) -> str:
    """A batch in words, for errors."""

    def shown(name: str, value: Any) -> str:
        if not isinstance(value, Tensor):
            return f"{name}={value!r}"
        return f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"

    return ", ".join(shown(*item) for item in batch.items())
