"""Training of small models in parallel against the local model: the models and layouts of the suite and of
`benchmarks/parity_matrix.py`.

In float64, casts to float32 inside of models promoted. Five steps of AdamW, the first of two accumulated batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSeq2SeqLM

import whale
from tests.distributed.parity import cluster_of
from tests.distributed.traces import captured_once
from tests.largest import largest
from tests.small_models import decoder, tokens
from whale.cli.model_loader import load_model

__all__ = ["BOUND", "LAYOUTS", "MODELS", "Layout", "Training", "built", "halves", "trained", "training_errors"]

BOUND = 1e-12
"""The largest error of a loss, and of an element of a parameter at the end."""
ROWS, LENGTH, WORDS = 8, 6, 32


class Training(NamedTuple):
    """A model with its batch, and the first modules of two stages."""

    build: Callable[[], tuple[nn.Module, Any]]
    stages: tuple[str, str]


def words() -> dict[str, Tensor]:
    drawn = torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": drawn, "labels": drawn}


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"pixel_values": drawn, "labels": torch.randint(4, (ROWS,), generator=generator)}


def hub(kind: str, auto: Any = AutoModelForCausalLM, batch: Any = words, **sizes: Any) -> tuple[nn.Module, Any]:
    """A model of transformers with random weights and without dropout."""
    config = AutoConfig.for_model(kind, **sizes)
    for name in [name for name in vars(config) if name.endswith(("dropout", "pdrop", "drop", "dropout_rate", "_prob"))]:
        setattr(config, name, 0.0)
    return auto.from_config(config), batch()


def mixture() -> tuple[nn.Module, Any]:
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 16, "seq": LENGTH, "vocab": WORDS, "experts": 4}
    found = load_model(f"{Path(__file__).parents[2] / 'examples' / 'models' / 'moe.py'}:moe", sizes, batch_size=ROWS)
    return found.model, found.batch


SPECIAL = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
FED = {**SPECIAL, **WIDE, "intermediate_size": 24, "num_key_value_heads": 2}
OLD = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
BART = {f"{side}_{name}": n for side in ("encoder", "decoder")
        for name, n in {"layers": 1, "attention_heads": 4, "ffn_dim": 24}.items()}  # fmt: skip
LAYERS = ("model.layers.0", "model.layers.1")
OF_BLOCKS = ("transformer.h.0", "transformer.h.1")
OWN_LAYERS = ("layers.0", "layers.1")

LISTED: dict[str, Training] = {
    "gpt2": Training(partial(hub, "gpt2", **SPECIAL, **OLD), OF_BLOCKS),
    "llama": Training(partial(hub, "llama", **FED), LAYERS),
    "t5": Training(partial(hub, "t5", AutoModelForSeq2SeqLM, vocab_size=WORDS, **T5), ("encoder", "decoder")),
    "mixture": Training(mixture, OWN_LAYERS),
}
"""The models of which every combination is run."""
OTHERS: dict[str, Training] = {
    "decoder": Training(lambda: (decoder(layers=2), tokens(ROWS, LENGTH)), OWN_LAYERS),
    "qwen3": Training(partial(hub, "qwen3", **FED, head_dim=4), LAYERS),
    "gemma2": Training(partial(hub, "gemma2", **FED, head_dim=4, sliding_window=4), LAYERS),
    "phi": Training(partial(hub, "phi", **FED), LAYERS),
    "falcon": Training(partial(hub, "falcon", **SPECIAL, **WIDE), OF_BLOCKS),
    "bart": Training(partial(hub, "bart", AutoModelForSeq2SeqLM, **SPECIAL, **BART, d_model=16,
                             max_position_embeddings=8), ("model.encoder", "model.decoder")),
    "vit": Training(partial(hub, "vit", AutoModelForImageClassification, images, **WIDE, intermediate_size=24,
                            image_size=16, patch_size=8, num_labels=4), ("vit.layers.0", "vit.layers.1")),
    "mamba": Training(partial(hub, "mamba", **SPECIAL, hidden_size=16, num_hidden_layers=2, state_size=4),
                      ("backbone.layers.0", "backbone.layers.1")),
}  # fmt: skip
MODELS = LISTED | OTHERS


class Layout(NamedTuple):
    """Ranks, the annotations of a model by its first modules of two stages, and options."""

    ranks: int
    annotate: Callable[[tuple[str, str]], dict[str, Any]]
    options: dict[str, Any] = {}  # noqa: RUF012


def halves(stages: tuple[str, str], inner: Any) -> dict[str, Any]:
    """Two stages on two ranks each."""
    return {path: [whale.stage(2), inner] for path in stages}


def alone(stages: tuple[str, str]) -> dict[str, Any]:
    return {path: whale.stage() for path in stages}


LAYOUTS: dict[str, Layout] = {
    "dp": Layout(2, lambda _: {"": whale.replicate()}),
    "dp, rows 3 : 1": Layout(2, lambda _: {"": whale.replicate()}, {"cluster": (3.0, 1.0)}),
    "tp": Layout(2, lambda _: {"": whale.split()}, {"micro_batches": 2}),
    "pp, 1F1B": Layout(2, alone, {"micro_batches": 4}),
    "pp, zero-bubble": Layout(2, alone, {"micro_batches": 4, "schedule": "zero_bubble"}),
    "dp x tp": Layout(4, lambda _: {"": [whale.replicate(2), whale.split()]}),
    "pp x dp": Layout(4, lambda stages: halves(stages, whale.replicate()), {"micro_batches": 2}),
    "pp, 1 and 3 ranks": Layout(
        4,
        lambda stages: {stages[0]: whale.stage(1), stages[1]: [whale.stage(3), whale.replicate()]},
        {"micro_batches": 2},
    ),
}


def built(name: str) -> tuple[nn.Module, Any]:
    """A model in float64 and its batch, the same on every rank."""
    torch.manual_seed(0)
    model, batch = MODELS[name].build()
    return model.double(), batch


def trained(model: Any, step: Callable[[], Tensor]) -> list[float]:
    """The losses of five steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    losses = []
    for number in range(5):
        optimizer.zero_grad()
        for _ in range(2 if number == 0 else 1):
            losses.append(step().item())
        optimizer.step()
    return losses


@cache
def _local(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the local model."""
    model, batch = built(name)
    captured = captured_once(model, batch, promote=True)
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    names = {**captured.parameters, **captured.buffers, **{n: n for n in captured.constants}}
    placeholders = [node.name for node in captured.graph.nodes if node.op == "placeholder"]
    read = [batch[captured.inputs[n]] if n in captured.inputs else tensors.get(names.get(n, "")) for n in placeholders]

    def step() -> Tensor:
        loss: Tensor = captured.module(*read)[0]
        loss.backward()
        return loss

    return trained(model, step), dict(model.named_parameters())


def training_errors(name: str, annotation: dict[str, Any], options: dict[str, Any]) -> tuple[float, float, Any]:
    """The largest errors of losses and of parameters of this rank, and the parallel model."""
    model, batch = built(name)
    whale.annotate(model, annotation)
    options = {"device": "cpu", "promote_casts": True, **options}
    made: Any = whale.parallelize(model, batch, cluster=cluster_of(options.pop("cluster", ())), **options)
    losses = trained(made, lambda: made.train_step(**batch))
    wanted, parameters = _local(name)
    whole = made.full_state_dict()
    loss = largest(*(abs(a - b) for a, b in zip(losses, wanted, strict=True)))
    return loss, largest(*(float((whole[n] - x).abs().max()) for n, x in parameters.items())), made
