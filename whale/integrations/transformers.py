"""The Trainer of Hugging Face over a parallel model.

    model = whale.parallelize(model, example_batch)
    trainer = whale.integrations.transformers.Trainer(model, args, train_dataset=...)

Every rank runs the Trainer's loop over global batches as a process of its own would, and the model computes the steps
together. Rank 0 alone writes and logs. Losses, clipping, metrics and checkpoints are those of a plain Trainer in one
process; a checkpoint is resumed on any number of ranks in any layout.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors import safe_open
from torch import Tensor, nn

from whale.checkpoint.folder import release
from whale.checkpoint.load import load_checkpoint, load_random_numbers
from whale.checkpoint.save import save_checkpoint
from whale.errors import UsageError
from whale.runtime.module import ParallelModule

__all__ = ["Trainer"]

WRITING = timedelta(hours=2)
"""Limit of the time that ranks wait for rank 0 to write a checkpoint."""

_LAUNCH = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)

_saves = count()

_STATE = "whale"
"""The folder of a Trainer's checkpoint that has one of Whale: the optimizer, the schedule and random numbers, too."""

_REFUSED = {
    "fp16": 'write parallelize(..., precision="fp16")',
    "bf16": 'write parallelize(..., precision="bf16")',
    "fp16_full_eval": 'write parallelize(..., precision="fp16")',
    "bf16_full_eval": 'write parallelize(..., precision="bf16")',
    "torch_compile": "a parallel model runs compiled graphs of its own",
    "gradient_checkpointing": 'write parallelize(..., recompute="full")',
    "fsdp": "whale.parallelize divides the model",
    "deepspeed": "whale.parallelize divides the model",
    "auto_find_batch_size": "the batch is that of parallelize; whale estimate says what fits",
    "neftune_noise_alpha": "a parallel model runs no hooks",
    "label_smoothing_factor": "compute the loss in the model, or in a loss_fn of parallelize",
}
"""Arguments of training that a parallel step would not see, and what to do instead."""


class Trainer(transformers.Trainer):
    """`transformers.Trainer` for a model that :func:`whale.parallelize` returned, with the same arguments.

    ``per_device_train_batch_size`` and ``per_device_eval_batch_size`` are those of the *global* batch.

    Raises:
        UsageError: the model is not parallel, or an argument would change steps in a way that they do not see.
    """

    model: Any

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **options: Any) -> None:
        if not isinstance(model, ParallelModule):
            raise UsageError(
                f"model is a {type(model).__name__}; give the Trainer the model that whale.parallelize returned"
            )
        if model.batch_mode != "global":
            raise UsageError('the Trainer brings global batches: leave batch="local" of parallelize out')
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        self._check(args, options)
        use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        with _one_process() as launch:
            _set_up_alone(args, model, int(launch.get("LOCAL_RANK", model.rank)))
            super().__init__(model, args, *others, **options)
        if use_cache is not None:
            self.model.config.use_cache = use_cache  # steps keep no cache anyhow, and would be compiled again
        rows = model._whale.engine.shares.rows
        if args.train_batch_size != rows:
            model._whale.engine.world.warn(
                f"per_device_train_batch_size is {args.train_batch_size}, and the example batch of parallelize has "
                f"{rows} rows: it is the number of rows of all ranks together"
            )

    def _check(self, args: Any, options: Mapping[str, Any]) -> None:
        for name, instead in _REFUSED.items():
            if getattr(args, name, None):
                raise UsageError(f"{name} of the training arguments has no effect on a parallel model: {instead}")
        if options.get("model_init") is not None:
            raise UsageError("model_init would make a local model: give the parallel one as model")
        overridden = [name for name in ("compute_loss",) if getattr(type(self), name) is not getattr(Trainer, name)]
        if overridden or options.get("compute_loss_func") is not None:
            raise UsageError(
                f"{'compute_loss' if overridden else 'compute_loss_func'} is not part of the compiled step: give "
                "parallelize a loss_fn(output, batch)"
            )

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return model

    # Steps

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """A step of all ranks; returns its loss."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs, counted = self._counted(self._prepare_inputs(inputs), num_items_in_batch)
        scale = 1.0 if counted else 1.0 / self.current_gradient_accumulation_steps
        loss: Tensor = model.train_step(inputs, scale=scale)
        return loss * scale

    def _counted(self, inputs: Any, num_items: Any) -> tuple[dict[str, Any], bool]:
        """The batch with the number of labels of all accumulated ones, if the model takes it."""
        if num_items is None or not self.model_accepts_loss_kwargs:
            return dict(inputs), False
        return {**inputs, "num_items_in_batch": num_items}, True

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, logits and labels of a batch, whole on every rank; each is None if there is none."""
        inputs = dict(self._prepare_inputs(inputs))
        labels = tuple(inputs.get(name) for name in self.label_names)
        has_loss = all(label is not None for label in labels) and bool(labels or self.can_return_loss)
        if prediction_loss_only:
            return (model.eval_step(inputs) if has_loss else None), None, None
        if ignore_keys is None:
            ignore_keys = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
        loss, output = model.eval_step(inputs, outputs=True)
        if isinstance(output, Mapping):
            logits: Any = tuple(value for key, value in output.items() if key not in [*ignore_keys, "loss"])
        else:
            logits = output[1:] if has_loss and isinstance(output, tuple) else output
        if isinstance(logits, tuple) and len(logits) == 1:
            logits = logits[0]
        if not has_loss:
            return None, logits, None
        return loss, logits, labels[0] if len(labels) == 1 else labels or None

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of forward and backward of a batch on all ranks, as the plain Trainer estimates them."""
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if tokens is None or not hasattr(self.model, "num_parameters"):
            return 0
        embeddings = {f"{path}.weight" for path, one in self.model.named_modules() if isinstance(one, nn.Embedding)}
        shards = self.model._whale.engine.shards
        return 6 * tokens.numel() * sum(prod(one.shape) for name, one in shards.items() if name not in embeddings)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model, as the local one would be; every rank must call it."""
        state = self.model.full_state_dict(to="rank0")
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        self._wait_for_rank_0()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir, _STATE)
        state = {"optimizer": self._plain_optimizer, "scheduler": self.lr_scheduler}
        save_checkpoint(folder, self.model, step=self.state.global_step, keep=1, asynchronous=False, **state)
        release(folder.absolute())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (folder := Path(checkpoint, _STATE)).is_dir():
            load_checkpoint(folder, self.model, optimizer=self._plain_optimizer, scheduler=self.lr_scheduler)

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside accelerate's."""
        found: Any = self.optimizer
        plain: torch.optim.Optimizer = getattr(found, "optimizer", found)
        return plain

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.model.load_full_state_dict(_Weights(Path(resume_from_checkpoint)))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        pass  # it is with the optimizer

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (folder := Path(checkpoint, _STATE)).is_dir():
            load_random_numbers(folder, self.model)  # once more: loaders have drawn meanwhile

    def _wait_for_rank_0(self) -> None:
        """Let no rank go on before rank 0 has written: it would wait for it in a step, which has a shorter limit."""
        if self.model.world_size == 1:
            return
        store, key = dist.distributed_c10d._get_default_store(), f"whale/trainer/{next(_saves)}"
        if self.args.should_save:
            store.set(key, "written")
        store.wait([key], WRITING)


class _Weights(Mapping[str, Tensor]):
    """The tensors of a folder that a Trainer wrote, which are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{folder} has no *.safetensors: it is not a checkpoint of a Trainer")
        self._files = [safe_open(file, framework="pt") for file in files]
        self._file = {name: file for file in self._files for name in list(file.keys())}

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._file[name].get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


@contextmanager
def _one_process() -> Iterator[Mapping[str, str]]:
    """Let accelerate take this process for the only one: the launch is Whale's matter."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCH if name in os.environ}
    try:
        yield hidden
    finally:
        os.environ.update(hidden)


def _set_up_alone(args: Any, model: ParallelModule, local_rank: int) -> None:
    """Give the arguments the state of a single process, which writes if it is rank 0."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    device = model._whale.engine.world.device
    args.use_cpu = device.type == "cpu"
    for name in ("_setup_devices", "__cached__setup_devices"):
        args.__dict__.pop(name, None)
    logger = logging.getLogger("transformers.training_args")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it takes this for a mistake
    assert args.device is not None  # this sets the state up
    logger.setLevel(level)
    args._n_gpu = int(device.type == "cuda")
    state: Any = PartialState()
    state.process_index = model.rank
    state.local_process_index = local_rank
    state.device = device
