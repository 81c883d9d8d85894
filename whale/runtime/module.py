"""The parallel model for a training loop: this rank's parameters, and steps over a global batch.

It owns tensors and runs compiled steps; how a step was compiled (capture, placement, lowering) is behind
:class:`StepSource`. Names of parameters and buffers are the local model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.errors import UsageError
from whale.runtime.executor import Executor
from whale.runtime.launch import World
from whale.runtime.loss import GlobalLoss, LikeBatches
from whale.runtime.stage import Intervals, LocalStage, part

Signature = tuple[Any, ...]

FIRST_COMPARED, COMPARED_EACH = 3, 64
"""Steps with batches of a signature in which the ranks compare their values: the first ones, and every 64th later.
On a GPU, where that is waiting for it, the first alone."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Location of a tensor: its whole shape, and the part on every rank that has one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[int, Intervals]
    trainable: bool = True

    def distinct(self) -> dict[Intervals, int]:
        """Every distinct part, with the lowest rank that has it."""
        found: dict[Intervals, int] = {}
        for rank in sorted(self.parts):
            found.setdefault(self.parts[rank], rank)
        return found


@dataclass(kw_only=True)
class CompiledStep:
    """A step for batches of one signature. ``counts_loss`` says whether this rank's loss is part of the global sum,
    ``loss_dtype`` is that of the loss, also where this rank computes none."""

    executor: Executor
    stages: Sequence[LocalStage]
    counts_loss: bool
    loss_dtype: torch.dtype


StepSource = Callable[[Mapping[str, Any], bool], CompiledStep]
"""Compiles a step for a batch (by leaf name) and for training (True) or evaluation."""


class ParallelModule(nn.Module):
    """A model whose steps run in parallel, equal to the local model's steps on the same global batch.

    ``parameters()`` yields this rank's parts; an optimizer made from them updates them as the local one would. A rank
    without parts has one parameter without elements instead, which is in no state dict. Make a model with
    :func:`whale.parallelize`.
    """

    def __init__(
        self,
        *,
        world: World,
        source: StepSource,
        shards: Mapping[str, Shard],
        buffers: Mapping[str, Shard],
        aliases: Mapping[str, str],
        tensors: Mapping[str, Tensor],
        clock: Any,
        leaves: Callable[..., dict[str, Any]],
        loss_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._loss_group = loss_group
        self._world, self._source, self._clock, self._leaves = world, source, clock, leaves
        self._shards, self._buffer_shards, self._aliases = dict(shards), dict(buffers), dict(aliases)
        self._steps: dict[tuple[Signature, bool], CompiledStep] = {}
        self._agreed: dict[Signature, int] = {}
        self._local = dict(tensors)
        for name, tensor in tensors.items():
            parent = self
            *path, last = name.split(".")
            for piece in path:
                if piece not in parent._modules:
                    parent.add_module(piece, _Namespace())
                parent = parent._modules[piece]  # type: ignore[assignment]
            if isinstance(tensor, nn.Parameter):
                parent.register_parameter(last, tensor)
            else:
                parent.register_buffer(last, tensor)
        if shards and not any(isinstance(tensor, nn.Parameter) for tensor in tensors.values()):
            self.add_module("_idle", _Idle(world.device))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world.size

    @property
    def rank(self) -> int:
        """This rank."""
        return self._world.rank

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Not a plain call: a parallel step is more than a forward."""
        raise UsageError("a parallel model runs whole steps: use model.train_step(batch) or model.eval_step(batch)")

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of the global batch; returns the global loss, the same on every rank.

        Gradients are added to ``.grad`` of this rank's parameters, already summed over replicas.
        """
        return self._run(self._leaves(*args, **kwargs), True)

    def eval_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward of the global batch in evaluation mode, without gradients; returns the global loss on every rank."""
        return self._run(self._leaves(*args, **kwargs), False)

    def install(self, batch: Mapping[str, Any], training: bool, step: CompiledStep) -> None:
        """Use an already compiled step for equal batches."""
        self._steps[(signature(batch), training)] = step

    def compile_step(self, batch: Mapping[str, Any], train: bool) -> CompiledStep:
        """The step for batches of this signature, compiled once."""
        key = (signature(batch), train and self.training)
        if key not in self._steps:
            self._steps[key] = self._source(batch, train and self.training)
        return self._steps[key]

    def _run(self, batch: dict[str, Any], train: bool) -> Tensor:
        if train and not any(shard.trainable for shard in self._shards.values()):
            raise UsageError(
                "train_step has nothing to train: the loss depends on no parameter that requires a gradient; unfreeze "
                "one with requires_grad_() before parallelize, or use eval_step"
            )
        key = signature(batch)
        given = f"{_shapes(batch)} for {'train_step' if train else 'eval_step'}"
        seen = self._agreed.get(key, 0)
        looks = self._world.size > 1 and (seen < FIRST_COMPARED or seen % COMPARED_EACH == 0)
        values = [v for v in batch.values() if looks and isinstance(v, Tensor)]
        alike = LikeBatches(self._world, self._loss_group, given, values)
        if not seen or self._world.device.type != "cuda":  # looking is waiting for the device
            alike.check()
        self._agreed[key] = seen + 1
        step = self.compile_step(batch, train)
        if train:
            self._clock.step += 1
        device = self._world.device
        batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        for stage in step.stages:
            stage.begin(batch)
        loss = GlobalLoss(self._world, self._loss_group, step.counts_loss, step.loss_dtype)
        step.executor.run(train, loss.begin)
        for stage in step.stages:
            stage.finish()
        return loss.finish()

    # Whole tensors under the local model's names

    def full_state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers, whole, under the local model's names, on every rank."""
        whole = self._whole({n: t.detach() for n, t in self._local.items()}, {**self._shards, **self._buffer_shards})
        return {name: whole[first] for name, first in self._aliases.items() if first in whole}

    def full_gradients(self) -> dict[str, Tensor]:
        """All gradients, whole, under the local model's names (a tied parameter once), on every rank."""
        local: dict[str, Tensor] = {}
        for name, tensor in self._local.items():
            if name in self._shards and self._shards[name].trainable:
                local[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        return self._whole(local, {n: s for n, s in self._shards.items() if s.trainable})

    def load_full_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load whole tensors under the local model's names: each rank takes its parts.

        Raises :class:`UsageError` for missing or unknown names (if *strict*) and for wrong shapes.
        """
        named = {self._aliases[name]: tensor for name, tensor in state.items() if name in self._aliases}
        unknown = sorted(set(state) - set(self._aliases))
        missing = sorted((set(self._shards)) - set(named))
        if strict and (unknown or missing):
            raise UsageError(f"the state does not fit the model: unknown {unknown[:5]}, missing {missing[:5]}")
        with torch.no_grad():
            for name, tensor in self._local.items():
                if name not in named:
                    continue
                shard = self._shards.get(name) or self._buffer_shards[name]
                if tuple(named[name].shape) != shard.shape:
                    raise UsageError(f"{name} has shape {tuple(named[name].shape)}, but the model's is {shard.shape}")
                tensor.copy_(part(named[name], shard.parts[self.rank]))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most *max_norm*; returns the norm before, on every rank.

        Every element of the local model's gradients counts once, on any number of ranks.
        """
        terms = [torch.zeros((), dtype=torch.float64, device=self._world.device)]
        for name, shard in self._shards.items():
            tensor = self._local.get(name)
            if tensor is None or tensor.grad is None or shard.distinct()[shard.parts[self.rank]] != self.rank:
                continue
            norm = torch.linalg.vector_norm(tensor.grad, norm_type).to(torch.float64)
            terms.append(norm if norm_type == torch.inf else norm**norm_type)
        stacked = torch.stack(terms)
        total = stacked.max() if norm_type == torch.inf else stacked.sum()
        if self._world.size > 1:
            dist.all_reduce(total, op=dist.ReduceOp.MAX if norm_type == torch.inf else dist.ReduceOp.SUM)
        norm = total if norm_type == torch.inf else total ** (1.0 / norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for tensor in self._local.values():
            if tensor.grad is not None:
                tensor.grad.mul_(scale.to(tensor.grad.dtype))
        return norm

    def _whole(self, local: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for name in sorted(shards):
            shard = shards[name]
            if len(set(shard.parts.values())) == 1 and len(shard.parts) == self._world.size:
                result[name] = local[name].detach().clone()
                continue
            whole = torch.zeros(shard.shape, dtype=shard.dtype, device=self._world.device)
            for intervals, owner in shard.distinct().items():
                shape = [sum(b - a for a, b in dim) for dim in intervals]
                mine = owner == self.rank
                piece = local[name].detach().contiguous() if mine else whole.new_empty(shape)
                if piece.numel() and self._world.size > 1:
                    dist.broadcast(piece, owner)
                _put(whole, piece, intervals)
            result[name] = whole
        return result


class _Namespace(nn.Module):
    """A level of the local model's names."""


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


def signature(batch: Mapping[str, Any]) -> Signature:
    """Signature of a batch: names, shapes and dtypes of tensors, values of the rest."""
    return tuple(
        (name, tuple(v.shape), v.dtype) if isinstance(v, Tensor) else (name, repr(v)) for name, v in batch.items()
    )


def _shapes(batch: Mapping[str, Any]) -> str:
    """A batch in words, for errors."""

    def shown(name: str, value: Any) -> str:
        if not isinstance(value, Tensor):
            return f"{name}={value!r}"
        return f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"

    return ", ".join(shown(*item) for item in batch.items())


def _put(whole: Tensor, piece: Tensor, intervals: Intervals) -> None:
    """Write a part to its position in the whole tensor."""
    index = [
        torch.cat([torch.arange(a, b, device=whole.device) for a, b in dim])
        if dim
        else torch.empty(0, dtype=torch.long, device=whole.device)
        for dim in intervals
    ]
    if not index:
        whole.copy_(piece)
    elif all(i.numel() for i in index):
        grid = torch.meshgrid(*index, indexing="ij") if len(index) > 1 else index
        whole[tuple(grid)] = piece
