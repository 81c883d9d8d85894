"""The parallel model for a training loop: the local model's modules over this rank's tensors, and steps.

Classes, attributes, names and ties are those of the local model; parameters are this rank's parts, and are absent where
it has none. What runs the steps is behind `Engine`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from whale.errors import UsageError
from whale.ir import range_names
from whale.ir.objects import Variable, deep_copy, part_of
from whale.ir.program import Returns
from whale.runtime.attributes import Attributes, Sources
from whale.runtime.comm_hooks import CommHook
from whale.runtime.elsewhere import Elsewhere
from whale.runtime.engine import Engine, Result
from whale.runtime.local_watch import LocalWatch, hand_over_hooks
from whale.runtime.precision import LossScaler, in_own_dtypes, without_autocast
from whale.runtime.ranges import named
from whale.runtime.shard_tensor import ShardTensor
from whale.runtime.shared_objects import CopiedObjects, shared_objects
from whale.runtime.watch import Watch

__all__ = ["ParallelModule", "parallel_module"]


_Step = TypeVar("_Step", bound=Callable[..., Any])


def _told(step: _Step) -> _Step:
    """A step that is refused on all ranks if one refuses it."""

    @functools.wraps(step)
    def told(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        engine = self._whale.engine
        joined = engine.refusals.joined
        try:
            return step(self, *args, **kwargs)
        except Exception as error:
            if engine.refusals.joined == joined:  # the others wait
                engine.refuse(error)
            raise

    return cast(_Step, told)


class ParallelModule(nn.Module):
    """A model whose steps run in parallel, equal to the local model's steps on the same global batch.

    It is an instance of the local model's class too, and has its modules. ``parameters()`` yields this rank's parts; an
    optimizer made from them updates them as the local one would. A rank without parts has one parameter without
    elements instead, which is in no state dict. Make a model with :func:`whale.parallelize`.
    """

    _whale: Inner

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._whale.engine.world.size

    @property
    def rank(self) -> int:
        """This rank."""
        return self._whale.engine.world.rank

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Not a plain call: a parallel step is more than a forward."""
        raise UsageError(
            "a parallel model runs whole steps: write loss = model.train_step(**batch), without "
            "loss.backward() after it, or model.eval_step(**batch) for the loss alone; for anything else, such as "
            "generate, or torch's update_bn of batch norms, load model.full_state_dict() into a local model"
        )

    @property
    def batch_mode(self) -> str:
        """Kind of the batches that ranks bring to a step: ``global``, the whole one, ``local``, each its rows, or
        ``parts``, of these rows the parts that it reads."""
        local = self._whale.engine.local
        return "global" if local is None else "local" if local.parts is None else "parts"

    def batch_share(self, rows: int | None = None, *, rank: int | None = None) -> tuple[tuple[int, int], ...]:
        """The rows of a global batch that a rank computes on, as half-open ranges in order; in a step with local
        batches it brings these.

        Args:
            rows: of the global batch; by default those of the example batch.
            rank: by default this one.
        """
        shares = self._whale.engine.shares
        return shares.stretches(self.rank if rank is None else rank, shares.rows if rows is None else rows)

    def sample_share(self, *, rank: int | None = None) -> dict[str, tuple[tuple[tuple[int, int], ...], ...]]:
        """The parts of each sample that a rank brings in a step with parts: by leaf, for each dim after the batch,
        half-open ranges in order. Leaves of which it brings whole samples are absent.

        Args:
            rank: by default this one.
        """
        local = self._whale.engine.local
        return {} if local is None or local.parts is None else dict(local.parts[self.rank if rank is None else rank])

    @_told
    def train_step(self, *args: Any, outputs: Any = False, scale: Any = 1.0, **kwargs: Any) -> Any:
        """Forward and backward of the global batch; returns the global loss, the same on every rank.

        Gradients are added to ``.grad`` of this rank's parameters, already summed over replicas.

        Args:
            args, kwargs: the batch: the arguments of the local model, or one dict or tuple of them.
            outputs: return ``(loss, output)``, with the local model's output, detached and whole on every rank, or with
                ``"rank0"`` on rank 0 alone, and None elsewhere.
            scale: a factor of the gradients, the same on every rank; the loss is returned without it.

        Raises:
            UsageError: the modules were changed in a way that steps do not see, the ranks were given other batches, or
                another rank refused the step.
        """
        self._check_names(kwargs, outputs=outputs is not False, scale=not isinstance(scale, float) or scale != 1.0)
        if not torch.is_grad_enabled():
            raise UsageError(
                "train_step computes gradients, but they are off here (torch.no_grad or torch.inference_mode): take it "
                "out, or use eval_step"
            )
        where = _destination(outputs)
        result = self._run(self._whale.leaves(*args, **kwargs), True, "both" if outputs else "loss", where, scale)
        assert result.loss is not None
        parameters = self._whale.engine.tensors.values()
        trained = next((x for x in parameters if x.requires_grad), None)  # torch.autograd.grad looks for it
        loss = _Done.apply(result.loss.requires_grad_(), trained)
        return result._replace(loss=loss) if outputs else loss

    @_told
    def eval_step(self, *args: Any, outputs: Any = False, **kwargs: Any) -> Any:
        """Forward of the global batch in evaluation mode, without gradients; returns the global loss on every rank.

        With *outputs* it returns ``(loss, output)`` as :meth:`train_step` does, where the loss is None if the model
        returns none, as without labels.
        """
        self._check_names(kwargs, outputs=outputs is not False)
        where = _destination(outputs)
        result = self._run(self._whale.leaves(*args, **kwargs), False, "both" if outputs else "loss", where)
        return result if outputs else result.loss

    @_told
    def predict_step(self, *args: Any, to: Any = "all", **kwargs: Any) -> Any:
        """Forward of the global batch in evaluation mode, without gradients; returns the local model's output, as that
        returns it, with whole tensors.

        *to*: ``all`` ranks get it, or ``rank0`` alone, and the others None. A ``loss_fn`` is not called.
        """
        self._check_names(kwargs, to=to != "all")
        return self._run(self._whale.leaves(*args, **kwargs), False, "outputs", _destination(to)).output

    def _check_names(self, kwargs: Mapping[str, Any], **given: bool) -> None:
        """Refuse options of a step that the model's forward has too: which is meant is not known."""
        taken = [name for name, is_given in given.items() if is_given and name in self._whale.arguments]
        if taken:
            raise UsageError(
                f"{taken[0]} is an argument of the model's forward and an option of the step: give the batch as one "
                f"dict, as train_step({{{taken[0]!r}: ..., ...}})"
            )

    def _step(self, batch: Mapping[str, Any], *, train: bool) -> Tensor:
        """A step over a batch by leaf name; returns the loss."""
        loss = self._run(batch, train, "loss", None).loss
        assert loss is not None
        return loss

    def _run(
        self,
        batch: Mapping[str, Any],
        train: bool,
        returns: Returns,
        to: int | None,
        scale: float | Tensor = 1.0,
    ) -> Result:
        engine, watch, local = self._whale.engine, self._whale.watch, self._whale.local
        with without_autocast(engine.world.device, engine.precision):
            watch.check()
            self._check_variables()
            self._whale.copied.follow()
            self._whale.of_loss.follow()
            local.check_beside()
            modes = watch.modes() if train else ()
            modes = modes if True in modes else ()
            changes = self._whale.attributes.changes()
            if local.is_alive:
                local.check(watch, self._whale.attributes, train=train)
            with named(range_names.TRAIN_STEP if train else range_names.FORWARD_STEP):
                return engine.run(batch, modes, train, changes, returns=returns, to=to, scale=scale)

    def _check_variables(self) -> None:
        """Refuse a loss, a hook or a module's own forward of which a variable that had something of the local model has
        neither that nor the same of this model: a step has what it was."""
        for variable in self._whale.variables:
            try:
                now = variable.read()
            except (KeyError, ValueError):  # deleted, as to free a model
                continue
            if now is None or (now is not variable.first() and now is not part_of(self, variable.kind, variable.path)):
                had = f"the {variable.kind} {variable.path!r}" if variable.path else "the model"
                had = had if variable.kind else "a function that reads the model"
                raise UsageError(
                    f"{variable.name}, a variable of {variable.owner}, had {had} in parallelize and has something else "
                    "now, which steps do not see: keep what changes, as a factor, in a variable of its own"
                )

    # States

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The factor of the loss while float16 gradients are computed; None in other precisions. Its ``scale`` is for
        logs, ``state_dict()`` for checkpoints, the same on all ranks."""
        return self._whale.engine.loss_scaler

    def full_state_dict(self, *, to: str = "all") -> dict[str, Tensor]:
        """All parameters and buffers, whole, under the local model's names.

        Every rank must call it. *to*: ``all`` ranks get them, or ``rank0`` alone, and the others an empty dict; one
        tensor at a time is gathered, so that no other rank ever holds more than one whole tensor.
        """
        if to not in ("all", "rank0"):
            raise UsageError(f"to is {to!r}; it can be 'all' or 'rank0'")
        engine = self._whale.engine
        self._whale.local.is_read = True
        names = sorted({**engine.shards, **engine.buffers})
        whole = dict(engine.whole(engine.tensors, names, None if to == "all" else 0))
        return {name: whole[first] for name, first in engine.aliases.items() if first in whole}

    @in_own_dtypes
    def full_gradients(self) -> dict[str, Tensor]:
        """All gradients, whole and dense, under the local model's names (a tied parameter once), on every rank.

        Every parameter that could be trained in `parallelize` is there, with zeros where ``.grad`` is None, as after
        ``optimizer.zero_grad()`` or where it was frozen since.
        """
        engine = self._whale.engine
        engine.check_gradients_stay("full_gradients")
        trainable = sorted(name for name, shard in engine.shards.items() if shard.trainable)
        local = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.to_dense()
            for name in trainable
            if (tensor := engine.tensors.get(name)) is not None
        }
        return dict(engine.whole(local, trainable, None))

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let a communication hook of DDP make the sums of gradients, as torch's PowerSGD and casts do in fewer bytes.

        It fits sums of dense gradients over exactly the ranks of its process group, which *state* is or has as
        ``process_group``; by default all ranks. Other sums are made as without it, which a warning says. Steps differ
        from the local ones as the hook approximates. All ranks must call it, once, before they train.

        Args:
            state: of the hook, which a checkpoint must keep where the hook needs it.
            hook: gets the state and a bucket of gradients, like `torch.distributed.GradBucket`, and returns a future of
                their mean over the ranks.

        Raises:
            UsageError: on all ranks, if there is a hook already, or it fits no sum of a rank that has some.
        """
        if self.world_size > 1:
            self._whale.engine.register_comm_hook(CommHook.of(hook, state))

    @in_own_dtypes
    def drain(self) -> bool:
        """Leave the gradients of the oldest step whose sums are on their way, with ``parallelize(staleness=...)``.

        After the last step, as before a checkpoint: ``while model.drain(): optimizer.step(); optimizer.zero_grad()``.
        All ranks must call it, as often.

        Returns:
            whether there was such a step.

        Raises:
            WorkerError: a rank did not come within the timeout.
        """
        return self._whale.engine.drain()

    def unlike_copies(self) -> dict[str, tuple[int, ...]]:
        """The parameters of which several ranks have a copy and not all copies have the same bits, with the ranks that
        differ from the first one that has it; none, in a sound run. Every rank must call it, between steps.

        Copies drift where a script changes them on some ranks alone, and where devices round differently, which steps
        prevent between devices of different types in the cluster.
        """
        return self._whale.engine.unlike_copies()

    @in_own_dtypes
    def load_full_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load whole tensors under the local model's names: each rank takes its parts. Every rank must call it, with
        the same tensors.

        Raises :class:`UsageError`, on every rank, for missing or unknown names (if *strict*), for wrong shapes, and for
        tensors that differ between ranks.
        """
        engine = self._whale.engine
        named = {engine.aliases[name]: tensor for name, tensor in state.items() if name in engine.aliases}
        unknown = sorted(set(state) - set(engine.aliases))
        missing = sorted(set(engine.shards) - set(named))
        refusal = ""
        if strict and (unknown or missing):
            refusal = f"the state does not fit the model: unknown {unknown[:5]}, missing {missing[:5]}"
        engine.load_on_all(named, refusal)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's tensors under the local model's names: plain ones where every rank has the whole tensor, else
        :class:`ShardTensor`, which ``torch.distributed.checkpoint`` saves and loads, and ``torch.save`` refuses."""
        self._whale.local.is_read = True
        state = super().state_dict(*args, **kwargs)
        if kwargs.get("keep_vars"):
            return state
        engine, prefix = self._whale.engine, kwargs.get("prefix", "")
        for name, first in engine.aliases.items():
            shard = engine.shard(first)
            if prefix + name not in state:
                continue
            if self.rank not in shard.parts:  # statistics that another stage updates
                del state[prefix + name]
            elif any(shard.parts.get(rank) != shard.whole for rank in range(engine.world.size)):
                local = state[prefix + name]
                state[prefix + name] = ShardTensor(local, shard.shape, shard.parts[engine.world.rank])
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what :meth:`state_dict` gave on this rank, or whole tensors, of which this rank takes its parts.

        Raises:
            UsageError: a part is another than this rank's, a shape differs, or (if *strict*) a name is missing or
                unknown; or *assign* is set, which steps would not see.
        """
        if assign:
            raise UsageError("assign=True would replace parameters that steps have: leave it out")
        engine = self._whale.engine
        own = {
            name
            for name, first in engine.aliases.items()
            if first in engine.tensors and self.rank in engine.shard(first).parts
        }
        unknown = sorted(set(state_dict) - set(engine.aliases))
        missing = sorted(own - set(state_dict))
        if strict and (unknown or missing):
            raise UsageError(f"the state does not fit the model: unknown {unknown[:5]}, missing {missing[:5]}")
        whole: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, value in state_dict.items():
                first = engine.aliases.get(name)
                if first is None or first not in engine.tensors:
                    continue
                shard = engine.shard(first)
                if not isinstance(value, ShardTensor):
                    whole[first] = value
                elif (tuple(value.shape), value.intervals) != (shard.shape, shard.parts[self.rank]):
                    raise UsageError(
                        f"{name} is {value!r}, but rank {self.rank} has another part of it: load whole tensors, or use "
                        "torch.distributed.checkpoint, which reshards"
                    )
                else:
                    engine.tensors[first].copy_(value.local)
        engine.load(whole)
        return nn.modules.module._IncompatibleKeys(missing, unknown)

    def get_rng_state(self) -> Tensor:
        """The position of random operators, as integers: it decides what dropout draws next. Save it with a checkpoint.

        The first two are the seed of random operators and the number of training steps so far. The others are torch's
        generators, from which a single rank draws, as the local model does.
        """
        engine = self._whale.engine
        return torch.cat(
            [
                torch.tensor([engine.clock.seed & (1 << 63) - 1, engine.clock.step]),
                *(state.view(torch.int64) for state in _generators(engine.world.device)),
            ]
        )

    def set_rng_state(self, state: Tensor) -> None:
        """Go on drawing where :meth:`get_rng_state` was called; every rank must set the same."""
        engine = self._whale.engine
        sizes = [2, *(state.numel() // 8 for state in _generators(engine.world.device))]
        if not isinstance(state, Tensor) or state.dtype != torch.int64 or tuple(state.shape) != (sum(sizes),):
            raise UsageError("the state is not what get_rng_state of a parallel model returns")
        (*own,), host, device = state.cpu().split(sizes)
        engine.clock.seed, engine.clock.step = (int(x) for x in own)
        if engine.world.size == 1:
            torch.set_rng_state(host.clone().view(torch.uint8))
            if engine.world.device.type == "cuda":
                torch.cuda.set_rng_state(device.clone().view(torch.uint8), engine.world.device)

    @in_own_dtypes
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most *max_norm*; returns the norm before, on every rank.

        Every element of the local model's gradients counts once, on any number of ranks.
        """
        norm = self._whale.engine.gradient_norm(norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in self._whale.engine.tensors.values():
            if tensor.grad is not None:
                alike.setdefault((tensor.grad.device, tensor.grad.dtype), []).append(tensor.grad)
        for kind, gradients in alike.items():  # a few kernels on a device, not one for each parameter
            torch._foreach_mul_(gradients, scale.to(*kind))
        return norm

    # What a module can do, and a parallel one cannot

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            made = fn(tensor.detach())
            if (made.dtype, made.device) != (tensor.dtype, tensor.device):
                raise UsageError(
                    f"{name} cannot become {made.dtype} on {made.device}: steps are compiled for {tensor.dtype} on "
                    f"{tensor.device}; cast or move the local model before parallelize"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A copy with tensors of its own, as of an average of the parameters; its steps are compiled when they run."""
        made: ParallelModule = type(self).__new__(type(self))
        memo[id(self)] = made
        engine = self._whale.engine.with_copies(memo)
        state = {key: value for key, value in self.__dict__.items() if key != "_whale"}
        made.__dict__.update(copy.deepcopy(state, memo))
        before = self._whale.attributes
        attributes = Attributes(made, before.sources, before.first, before.ever)
        watch = Watch(made, freezes=self._whale.watch.freezes)
        copied = self._whale.copied.of_copy(made, memo)
        inner = self._whale._replace(engine=engine, watch=watch, attributes=attributes, variables=(), copied=copied)
        made.__dict__["_whale"] = inner
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a parallel model cannot be pickled: it has process groups; save model.full_state_dict(), and parallelize "
            "again where it is loaded"
        )


def _generators(device: torch.device) -> tuple[Tensor, Tensor]:
    """The states of torch's generators for the host and the device, in bytes; of one without a device, zeros."""
    is_cuda = device.type == "cuda"
    own = torch.cuda.get_rng_state(device) if is_cuda else torch.zeros(16, dtype=torch.uint8)
    return torch.get_rng_state(), own


def _destination(to: bool | str) -> int | None:
    """The rank that gets outputs; None for all.

    Raises:
        UsageError: it is no such word.
    """
    if to not in (True, False, "all", "rank0"):
        raise UsageError(f"{to!r} says not who gets the output; it can be 'all' or 'rank0'")
    return 0 if to == "rank0" else None


class _Done(torch.autograd.Function):
    """The loss of a step that has been gone backward through already; so has what is computed from it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, trained: Tensor | None) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise UsageError(
            "train_step has done the backward already, its gradients are in .grad: leave loss.backward() out; to scale "
            "gradients, as for accumulation, write train_step(..., scale=1 / n)"
        )


class Inner(NamedTuple):
    """The part of a parallel model that is not of the local one: ``leaves`` makes a batch by leaf name of the
    arguments of a step, ``arguments`` are the names of those of the local model's forward, ``local`` looks at that
    model, which a script may still have, ``variables`` are those of its loss, and of hooks and other functions on it,
    that have something of it, ``copied`` are the objects of that model that reach some of it, ``of_loss`` those of its
    loss."""

    engine: Engine
    watch: Watch
    leaves: Callable[..., dict[str, Any]]
    attributes: Attributes
    arguments: frozenset[str]
    local: LocalWatch
    variables: Sequence[Variable]
    copied: CopiedObjects
    of_loss: CopiedObjects


def parallel_module(
    template: nn.Module,
    engine: Engine,
    leaves: Callable[..., dict[str, Any]],
    sources: Sources,
    local: nn.Module,
    looks: Mapping[str, Tensor],
    variables: Sequence[Variable] = (),
    objects: Sequence[tuple[Any, Any]] = (),
) -> ParallelModule:
    """The modules of a model over the tensors of an engine.

    Args:
        template: the model, with any tensors; they are neither kept nor changed.
        engine: its tensors are those of the modules, by first name; what it has not is absent.
        leaves: makes a batch by leaf name of the arguments of a step.
        sources: what the code of the model names.
        local: the model that the script gave.
        looks: fingerprints of its tensors, by name, as far as they are known.
        variables: of its loss, and of hooks and other functions on it, that have something of it.
        objects: of its loss, that have something of it, each with that of the template.
    """
    memo: dict[int, Any] = {}
    first = {id(tensor): name for name, tensor in [*template.named_parameters(), *template.named_buffers()]}
    for known, name in first.items():
        memo[known] = engine.tensors.get(name)
    held = shared_objects(local, template)
    memo |= held.shared
    made: Any = deep_copy(template, memo, template.modules)
    made.__class__ = _class_of(type(template))
    for path, module in made.named_modules():
        names = [f"{path}.{own}".lstrip(".") for own in template.get_submodule(path)._parameters]
        if module is not made and any(not _is_whole(engine, engine.aliases.get(name, name)) for name in names):
            module.register_forward_pre_hook(functools.partial(_refuse_call, path))
    if engine.shards and not any(isinstance(tensor, nn.Parameter) for tensor in engine.tensors.values()):
        made.add_module("_idle", _Idle(engine.world.device))
    _name_elsewhere(made, template, engine)
    arguments = frozenset(inspect.signature(type(template).forward).parameters)
    ranks = frozenset(range(engine.world.size))
    watch = Watch(made, freezes=all(ranks <= shard.parts.keys() for shard in engine.shards.values()))
    seen = LocalWatch(local, sources, engine.tensors, looks, is_held=bool(held.apart))
    hand_over_hooks(local, made)
    attributes = Attributes(made, sources)
    pairs = [(x, memo[known]) for known, x in held.apart.items() if known in memo]
    copied = CopiedObjects(made, (local,), pairs, attributes.named)
    of_loss = CopiedObjects(template, (local, made), objects, attributes.named)
    made.__dict__["_whale"] = Inner(engine, watch, leaves, attributes, arguments, seen, variables, copied, of_loss)
    found: ParallelModule = made
    return found


def _name_elsewhere(made: nn.Module, template: nn.Module, engine: Engine) -> None:
    """Let scripts name parameters that this rank has no part of. Where modules keep parameters, there is None."""
    first = {id(parameter): name for name, parameter in template.named_parameters()}
    found: dict[str, Elsewhere] = {}
    for path, module in made.named_modules():
        for own, value in module._parameters.items():
            if value is None and (like := template.get_submodule(path)._parameters[own]) is not None:
                name = first[id(like)]
                shard = engine.shard(name)
                if name not in found:
                    ranks = sorted(shard.parts)
                    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                    meta = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
                    said = f"{name}, of which {who} has the values and rank {engine.world.rank} none"
                    found[name] = Elsewhere(nn.Parameter(meta, requires_grad=like.requires_grad), said)
                module.__dict__[own] = found[name]


_classes: dict[type[nn.Module], type[ParallelModule]] = {}


def _class_of(local: type[nn.Module]) -> type[ParallelModule]:
    """The one class of parallel models that are instances of the local class too, with the signature of its forward."""

    @functools.wraps(local.forward)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    def save_pretrained(self: Any, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any) -> None:
        """Write the whole model as the local one would be, on rank 0; every rank must call it."""
        state = self.full_state_dict(to="rank0") if state_dict is None else state_dict
        if self.rank == 0:
            alone = object.__new__(local)
            alone.__dict__.update({key: value for key, value in self.__dict__.items() if key != "_whale"})
            alone.__dict__["config"] = copy.deepcopy(self.config)  # it is written into, on this rank alone
            alone.save_pretrained(*args, state_dict=state, **kwargs)  # type: ignore[operator]

    if local not in _classes:
        own: dict[str, Any] = {"forward": forward, "__module__": __name__}
        if hasattr(local, "save_pretrained"):  # of Hugging Face: it reads states and the name of the class
            own["save_pretrained"] = save_pretrained
        _classes[local] = type(f"Parallel{local.__name__}", (ParallelModule, local), own)
    return _classes[local]


def _is_whole(engine: Engine, name: str) -> bool:
    shard = engine.shards.get(name)
    return shard is None or shard.parts.get(engine.world.rank) == shard.whole


def _refuse_call(path: str, module: nn.Module, args: Any) -> NoReturn:
    raise UsageError(
        f"{path} has a part of its parameters on this rank, or none, and cannot be called alone: a parallel model runs "
        "whole steps, with model.train_step(**batch) or model.eval_step(**batch)"
    )


class _Idle(nn.Module):
    """A parameter without elements for a rank that has none: torch's optimizers refuse an empty list.

    It has no gradient, and states are saved and loaded as if it were not there.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, device=device))

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        pass
