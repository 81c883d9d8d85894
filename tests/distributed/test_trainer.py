"""The Trainer of Hugging Face over a parallel model: the losses, metrics and checkpoints of the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import whale
from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from whale.runtime.launch import World

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

ROWS, LENGTH, WORDS = 4, 8, 32
LAYOUTS: dict[str, Any] = {
    "replicate": {},
    "split": {"": whale.split(2)},
    "stages": {"model.layers.0": whale.stage(), "model.layers.1": whale.stage()},
    "nest": {"model.layers.0": [whale.stage(), whale.split(2)], "model.layers.1": [whale.stage(), whale.replicate(2)]},
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def data() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(0, WORDS, (24, LENGTH), generator=draw)
    return [{"input_ids": row, "labels": torch.where(row % 5 == 0, -100, row)} for row in rows]


def local_model(adapters: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=WORDS,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).double()  # AdamW divides by small numbers what float32 rounds
    if adapters:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    return model


def parallel_model(layout: str, micro_batches: int = 1, adapters: bool = False) -> Any:
    model = local_model(adapters)
    whale.annotate(model.base_model.model if adapters else model, LAYOUTS[layout])
    batch = {name: torch.stack([one[name] for one in data()[:ROWS]]) for name in ("input_ids", "labels")}
    return whale.parallelize(model, batch, micro_batches=micro_batches, device="cpu", timeout_seconds=30)


def accuracy(predictions: Any) -> dict[str, float]:
    found = predictions.predictions[:, :-1].argmax(-1)
    wanted = predictions.label_ids[:, 1:]
    return {
        "accuracy": float((found == wanted)[wanted != -100].mean()),
        "norm": float(np.square(predictions.predictions).mean()),
    }


def arguments(folder: str, **options: Any) -> Any:
    from transformers import TrainingArguments

    given: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "cosine",
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    return TrainingArguments(**given | options)


def history(trainer: Any) -> list[dict[str, float]]:
    timed = ("_runtime", "_per_second")
    return [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in trainer.state.log_history
    ]


def losses(trainer: Any) -> list[dict[str, float]]:
    """Losses of the steps after the checkpoint."""
    found = [entry for entry in history(trainer) if "loss" in entry and entry["step"] > 2]
    assert len(found) == 2
    return found


def largest_difference(one: list[dict[str, float]], other: list[dict[str, float]]) -> float:
    assert [list(entry) for entry in one] == [list(entry) for entry in other]
    pairs = [(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a]
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)


def plain(folder: str, **options: Any) -> Any:
    from transformers import PrinterCallback, Trainer

    rows = data()
    trainer = Trainer(
        local_model(), arguments(folder, **options), train_dataset=rows, eval_dataset=rows[:6], compute_metrics=accuracy
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def parallel(folder: str, layout: str, micro_batches: int = 1, **options: Any) -> Any:
    from transformers import PrinterCallback

    from whale.integrations.transformers import Trainer

    rows = data()
    model = parallel_model(layout, micro_batches)
    trainer = Trainer(
        model, arguments(folder, **options), train_dataset=rows, eval_dataset=rows[:6], compute_metrics=accuracy
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Expected(NamedTuple):
    """A run of the plain Trainer."""

    history: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    logits: Any


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    trainer = plain(str(tmp_path_factory.mktemp("plain")))
    trainer.train()
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return Expected(history(trainer), weights, trainer.predict(data()[:6]).predictions)


def train(world: World, layout: str, micro_batches: int, folder: str, expected: Expected) -> dict[str, Any]:
    found = parallel(f"{folder}/whale", layout, micro_batches)
    found.train()
    weights = found.model.full_state_dict()
    quiet = {
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
    }  # each traces the model again
    resumed = parallel(f"{folder}/resumed", layout, micro_batches, **quiet)
    resumed.train(resume_from_checkpoint=f"{folder}/whale/checkpoint-2")
    errors = {
        "history": largest_difference(history(found), expected.history),
        "resumed": largest_difference(losses(resumed), losses(found)),
        "weights": max(float((weights[n] - p).abs().max()) for n, p in expected.weights.items()),
        "logits": float(np.abs(found.predict(data()[:6]).predictions - expected.logits).max()),
    }
    found.save_model(f"{folder}/saved")
    saved = type(local_model()).from_pretrained(f"{folder}/saved")
    errors["saved"] = max(float((p - weights[n]).abs().max()) for n, p in saved.named_parameters())
    return {
        "errors": errors,
        "architectures": saved.config.architectures,
        "writes": found.args.should_save,
        "files": sorted(path.name for path in Path(f"{folder}/whale/checkpoint-2").rglob("*")),
    }


@pytest.mark.parametrize(
    ("layout", "world_size", "micro_batches"),
    [("replicate", 2, 1), ("split", 2, 1), ("stages", 2, 2), ("nest", 4, 2)],
)
def test_a_run_is_that_of_the_plain_trainer(
    worlds: Worlds, expected: Expected, layout: str, world_size: int, micro_batches: int, tmp_path: Path
) -> None:
    for rank, found in enumerate(worlds.run(world_size, train, layout, micro_batches, str(tmp_path), expected)):
        errors = found["errors"]
        assert max(errors.values()) < 1e-5 and errors["history"] < 1e-6, str(errors)
        assert found["architectures"] == ["LlamaForCausalLM"]
        assert found["writes"] == (rank == 0)
        assert {"model.safetensors", "config.json", "whale", "trainer_state.json"} <= set(found["files"])
        pickles = [name for name in found["files"] if name.endswith((".pt", ".pth", ".bin", ".metadata", ".distcp"))]
        assert pickles == ["training_args.bin"], "the arguments are for a reader, and never loaded"


def train_adapters(world: World, folder: str) -> tuple[float, float, list[str]]:
    from peft import PeftModel
    from transformers import Trainer as Plain

    from whale.integrations.transformers import Trainer

    options = {
        "report_to": "tensorboard",
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
    }
    local = local_model(adapters=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        patch.setenv("TENSORBOARD_LOGGING_DIR", f"{folder}/plain{world.rank}")
        expected = Plain(local, arguments(f"{folder}/p{world.rank}", **options), train_dataset=data())
        expected.train()
        patch.setenv("TENSORBOARD_LOGGING_DIR", f"{folder}/logs{world.rank}")
        model = parallel_model("split", adapters=True)
        found = Trainer(model, arguments(f"{folder}/w", **options), train_dataset=data())
        found.train()
    found.save_model(f"{folder}/saved")
    saved = PeftModel.from_pretrained(local_model(), f"{folder}/saved")
    whole = model.full_state_dict()
    errors = [float((p - whole[n]).abs().max()) for n, p in saved.named_parameters()]
    logs = [path.name for path in Path(folder).glob(f"logs{world.rank}/*")]
    return largest_difference(history(found), history(expected)), max(errors), logs


def test_adapters_of_peft_and_logs_of_tensorboard(worlds: Worlds, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("tensorboard")
    for rank, (error, saved, logs) in enumerate(worlds.run(2, train_adapters, str(tmp_path))):
        assert error < 1e-6
        assert saved < 1e-6
        assert bool(logs) == (rank == 0)


REFUSED: dict[str, dict[str, Any]] = {
    "bf16 of the training arguments": {"bf16": True},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "gradient_checkpointing": {"gradient_checkpointing": True},
}


def refuse(world: World, folder: str) -> list[str]:
    from whale.integrations.transformers import Trainer

    model, found = parallel_model("replicate"), []

    class Own(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 0.0

    for made, options in [*[(Trainer, options) for options in REFUSED.values()], (Own, {})]:
        try:
            made(model, arguments(folder, **options), train_dataset=data())
        except whale.WhaleError as error:
            found.append(str(error))
    try:
        Trainer(local_model(), arguments(folder))
    except whale.WhaleError as error:
        found.append(str(error))
    return found


def test_what_steps_do_not_see_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    for *messages, own, local in worlds.run(2, refuse, str(tmp_path)):
        for name, message in zip(REFUSED, messages, strict=True):
            assert name in message and "has no effect on a parallel model" in message
        assert "compute_loss is not part of the compiled step" in own
        assert "give the Trainer the model that whale.parallelize returned" in local
