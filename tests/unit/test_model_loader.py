"""``--model`` and ``--set``: what they accept, and what they say about what they do not."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from whale.cli.model_loader import load_model, parse_settings
from whale.errors import UsageError

SOURCE = """
import torch

def build(width, depth=1, batch_size=2):
    layers = [torch.nn.Linear(width, width) for _ in range(depth)]
    return torch.nn.Sequential(*layers), {"input": torch.zeros(batch_size, width)}

def fixed():
    return torch.nn.Linear(1, 1), torch.zeros(1, 1)

def wrong():
    return torch.nn.Linear(1, 1)

def broken():
    return 1 / 0
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "loaded_model.py"
    path.write_text(SOURCE)
    return path


def test_callable_of_a_file_receives_settings_and_batch_size(file: Path) -> None:
    loaded = load_model(f"{file}:build", {"width": 3, "depth": 2}, batch_size=5)
    assert len(list(loaded.model.parameters())) == 4
    assert loaded.batch["input"].shape == (5, 3)


def test_an_unseeded_file_gives_every_process_the_same_model_and_batch(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = (
        "import random, torch, numpy\nscale = numpy.random.rand()\ndef build():\n"
        "    return torch.nn.Linear(3, 1), scale * random.random() * torch.randn(2, 3)\n"
    )
    found = []
    for seed in (1, 2):  # another file, because one that has not changed runs once
        path = tmp_path / f"unseeded_{seed}.py"
        path.write_text(text)
        torch.manual_seed(seed)
        loaded = load_model(f"{path}:build", {})
        found.append([*loaded.model.parameters(), loaded.batch])
        assert torch.initial_seed() == seed  # the process's own random numbers go on
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


OPERATOR = """
import torch

@torch.library.custom_op("loaded_model::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * {factor}

class Scaled(torch.nn.Linear):
    def forward(self, x):
        return torch.ops.loaded_model.scaled(x)

def build(width=3):
    return Scaled(width, width), torch.ones(2, width)
"""


def test_a_file_runs_again_only_where_it_has_changed(file: Path) -> None:
    """A second definition of an operator frees the first one, and the graphs that call it call free memory."""
    file.write_text(OPERATOR.format(factor=2))
    loaded = load_model(f"{file}:build", {})
    operator = torch.ops.loaded_model.scaled.default
    load_model(f"{file}:build", {"width": 5})
    assert torch.ops.loaded_model.scaled.default is operator
    assert loaded.model(loaded.batch).sum() == 12
    file.write_text(OPERATOR.format(factor=30))
    again = load_model(f"{file}:build", {})
    assert again.model(again.batch).sum() == 180


def test_model_on_the_meta_device_allocates_nothing(file: Path) -> None:
    loaded = load_model(f"{file}:build", {"width": 3}, device="meta")
    assert all(parameter.is_meta for parameter in loaded.model.parameters())


@pytest.mark.parametrize(
    ("name", "settings", "batch_size", "parts"),
    [
        ("biuld", {}, None, ["no callable 'biuld'", "did you mean 'build'"]),
        ("build", {}, None, ["needs width", "--set width="]),
        ("build", {"width": 1, "dept": 1}, None, ["--set dept", "did you mean 'depth'"]),
        ("fixed", {}, 3, ["--batch 3", "no parameter 'batch_size'", "def fixed(batch_size=3)"]),
        ("wrong", {}, None, ["returned Linear", "(model, example_batch)"]),
        ("broken", {}, None, ["ZeroDivisionError", "loaded_model.py:15"]),
    ],
)
def test_wrong_callable_is_explained(
    file: Path, name: str, settings: dict[str, object], batch_size: int | None, parts: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        load_model(f"{file}:{name}", settings, batch_size=batch_size)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("spec", ["gpt2", "model.py", "model.py:", "model.txt:build", ":build", "model.py:a.b"])
def test_spec_of_another_form_is_refused_with_the_forms(spec: str) -> None:
    with pytest.raises(UsageError, match=r"file.py:callable.*hf:"):
        load_model(spec, {})


def test_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"no file 'nowhere.py'"):
        load_model("nowhere.py:build", {})


def test_text_in_place_of_a_number_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sized.py"
    path.write_text(
        "import torch\ndef build(hidden=8, kind='x'):\n    return torch.nn.Linear(hidden, 1), torch.ones(2, 8)"
    )
    with pytest.raises(UsageError, match=r"TypeError.*; --set hidden=abc is text, and its default 8$"):
        load_model(f"{path}:build", {"hidden": "abc", "kind": "y"})


@pytest.mark.parametrize("settings", [["a"], ["=1"], ["a-b=1"], ["a=1", "a=2"]])
def test_wrong_setting_is_refused(settings: list[str]) -> None:
    with pytest.raises(UsageError, match="--set"):
        parse_settings(settings)


def test_hugging_face_model_is_small_when_told_and_gives_a_loss() -> None:
    pytest.importorskip("transformers")
    settings = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "sequence_length": 4}
    loaded = load_model("hf:gpt2", settings, batch_size=3)
    assert loaded.batch["input_ids"].shape == (3, 4)
    assert loaded.batch["input_ids"] is not loaded.batch["labels"]
    assert loaded.model(**loaded.batch).loss.ndim == 0


SMALL_GPT2 = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11}
SMALL_BERT = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 11,
}
SMALL_T5 = {"num_layers": 1, "d_model": 8, "num_heads": 2, "d_ff": 8, "vocab_size": 11, "sequence_length": 4}
SMALL_BART = {
    "encoder_layers": 1, "decoder_layers": 1, "d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 11,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "settings", "length", "why"),
    [
        ("gpt2", SMALL_GPT2, 1024, "max_position_embeddings"),
        ("gpt2", SMALL_GPT2 | {"n_positions": 64}, 64, "max_position_embeddings"),
        ("roberta", SMALL_BERT, 510, "table of positions"),  # of its 512 two are padding's
        ("bloom", {"hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11}, 1024, "names no length"),
    ],
)
def test_rows_are_as_long_as_the_configuration_says(
    model_type: str, settings: dict[str, object], length: int, why: str
) -> None:
    pytest.importorskip("transformers")
    loaded = load_model(f"hf:{model_type}", settings, device="meta")
    assert loaded.batch["input_ids"].shape == (4, length)
    (said,) = loaded.assumptions
    assert said.startswith(f"{length:,} tokens a row, ")
    assert why in said
    assert "--set sequence_length=" in said
    given = load_model(f"hf:{model_type}", settings | {"sequence_length": 4}, device="meta")
    assert given.batch["input_ids"].shape == (4, 4)
    assert not given.assumptions


def test_rows_that_are_longer_than_the_positions_are_refused() -> None:
    pytest.importorskip("transformers")
    for model_type, settings, room in (("gpt2", SMALL_GPT2, 1024), ("roberta", SMALL_BERT, 510)):
        with pytest.raises(
            UsageError, match=rf"sequence_length=1025.*positions for {room} tokens.*max_position_embedd"
        ):
            load_model(f"hf:{model_type}", settings | {"sequence_length": 1025}, device="meta")


def test_a_model_that_takes_tokens_in_turn_is_refused_long_rows() -> None:
    pytest.importorskip("transformers")
    settings = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 11}
    with pytest.raises(UsageError, match=r"hf:mamba computes a row token by token.*--set sequence_length=\d+ or less"):
        load_model("hf:mamba", settings, device="meta")
    assert load_model("hf:mamba", settings | {"sequence_length": 32}, device="meta").batch["input_ids"].shape == (4, 32)


def test_images_are_as_large_as_the_configuration_says() -> None:
    pytest.importorskip("transformers")
    settings = SMALL_BERT | {"patch_size": 8, "image_size": 16}
    del settings["vocab_size"]
    loaded = load_model("hf:vit", settings, device="meta")
    assert loaded.batch["pixel_values"].shape == (4, 3, 16, 16)
    assert not loaded.assumptions
    del settings["image_size"]
    assert load_model("hf:vit", settings, device="meta").assumptions[0].startswith("images of 224 x 224")
    with pytest.raises(UsageError, match="a row of hf:vit is an image"):
        load_model("hf:vit", settings | {"sequence_length": 7}, device="meta")


def test_dotted_keys_are_of_configurations_in_the_configuration() -> None:
    pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "head_dim": 8}
    towers = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    settings = {"text_config": sizes, "vision_config": towers, "text_config.num_attention_heads": 4}
    config: Any = load_model("hf:llama4", settings | {"sequence_length": 8}, device="meta").model.config
    assert (config.num_attention_heads, config.hidden_size) == (4, 32)  # the model is the one for text
    with pytest.raises(UsageError, match=r"or 'text_config.num_hidden_layers'|'text_config.num_hidden_layers' or"):
        load_model("hf:llama4", {"num_hidden_layers": 2}, device="meta")
    with pytest.raises(UsageError, match=r"--set text_config.num_key_value_heads=3: 4 attention heads cannot share"):
        load_model("hf:llama4", settings | {"text_config.num_key_value_heads": 3}, device="meta")
    with pytest.raises(UsageError, match=r"^--set text_config.hidden_size: text_config is 3, which has no hidden_size"):
        load_model("hf:llama4", {"text_config": 3, "text_config.hidden_size": 8}, device="meta")
    with pytest.raises(UsageError, match="must be a whole number, at least 0"):
        load_model("hf:llama4", {"text_config.num_hidden_layers": -1}, device="meta")


def test_a_model_type_in_capitals_is_told_its_name() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=r"knows no such model type; did you mean 'gpt2'\?"):
        load_model("hf:GPT2", {}, device="meta")


def test_each_head_has_its_own_keys_where_the_configuration_has_no_number() -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    loaded = load_model("hf:nemotron", sizes | {"vocab_size": 64, "sequence_length": 8}, device="meta")
    config: Any = loaded.model.config
    assert config.num_key_value_heads == 4


@pytest.mark.parametrize(
    ("model_type", "heads", "pairs", "is_said"),
    [("qwen3", 8, 8, True), ("mixtral", 4, 1, True), ("mixtral", 16, 8, False), ("llama", 8, 8, False)],
)
def test_heads_of_keys_and_values_follow_the_heads_where_they_would_not_divide_them(
    model_type: str, heads: int, pairs: int, is_said: bool
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 8}
    settings = sizes | {"num_attention_heads": heads, "sequence_length": 8}
    loaded = load_model(f"hf:{model_type}", settings, device="meta")
    config: Any = loaded.model.config
    assert config.num_key_value_heads == pairs
    assert any(f"{pairs} heads of keys and values" in said for said in loaded.assumptions) == is_said
    with pytest.raises(UsageError, match=f"num_key_value_heads=3: {heads} attention heads cannot share"):
        load_model(f"hf:{model_type}", settings | {"num_key_value_heads": 3}, device="meta")


@pytest.mark.parametrize(
    ("model_type", "settings", "task"),
    [
        ("t5", SMALL_T5, "T5ForConditionalGeneration"),
        ("mbart", SMALL_BART | {"sequence_length": 4}, "MBartForConditionalGeneration"),
        ("bart", SMALL_BART | {"sequence_length": 4}, "BartForConditionalGeneration"),
        ("whisper", SMALL_BART | {"max_source_positions": 6, "sequence_length": 4, "pad_token_id": 0,
            "decoder_start_token_id": 1}, "WhisperForConditionalGeneration"),
        ("bert", SMALL_BERT | {"sequence_length": 4}, "BertForMaskedLM"),
        ("deit", {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8,
            "image_size": 32}, "DeiTForImageClassification"),  # or one with a teacher
    ],
)  # fmt: skip
def test_an_architecture_is_taken_for_its_usual_task(model_type: str, settings: dict[str, object], task: str) -> None:
    pytest.importorskip("transformers")
    loaded = load_model(f"hf:{model_type}", settings, batch_size=2)
    assert type(loaded.model).__name__ == task
    assert loaded.model(**loaded.batch).loss.isfinite()


def test_hugging_face_model_is_the_same_for_the_same_seed() -> None:
    pytest.importorskip("transformers")
    settings = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "seed": 3, "sequence_length": 4}
    first, second = load_model("hf:gpt2", settings), load_model("hf:gpt2", settings)
    assert torch.equal(first.batch["input_ids"], second.batch["input_ids"])
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("spec", "settings", "parts"),
    [
        ("hf:gptt2", {}, ["no such model type", "'gpt2'"]),
        ("hf:gpt2", {"n_layerz": 1}, ["n_layerz", "'n_layer'"]),
        ("hf:gpt2", {"sequence_length": "long"}, ["sequence_length", "whole number"]),
        ("hf:gpt2", {"n_layer": -2}, ["n_layer=-2", "at least 0"]),
    ],
)
def test_wrong_hugging_face_model_is_explained(spec: str, settings: dict[str, object], parts: list[str]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError) as caught:
        load_model(spec, settings)
    for part in parts:
        assert part in str(caught.value)
