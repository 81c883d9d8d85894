"""``--model`` and ``--set``: what they accept, and what they say about what they do not."""

import sys
from pathlib import Path

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


def test_model_on_the_meta_device_allocates_nothing(file: Path) -> None:
    loaded = load_model(f"{file}:build", {"width": 3}, device="meta")
    assert all(parameter.is_meta for parameter in loaded.model.parameters())


@pytest.mark.parametrize(
    ("name", "settings", "batch_size", "parts"),
    [
        ("biuld", {}, None, ["no callable 'biuld'", "did you mean 'build'"]),
        ("build", {}, None, ["needs width", "--set width="]),
        ("build", {"width": 1, "dept": 1}, None, ["--set dept", "did you mean 'depth'"]),
        ("fixed", {}, 3, ["--batch 3", "no parameter 'batch_size'"]),
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


def test_a_hugging_face_model_to_plan_with_says_how_many_tokens_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    settings = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11}
    load_model("hf:gpt2", settings, device="meta")
    assert "32 tokens a row; --set sequence_length=" in capsys.readouterr().err
    load_model("hf:gpt2", settings | {"sequence_length": 4}, device="meta")
    assert not capsys.readouterr().err


def test_hugging_face_model_is_the_same_for_the_same_seed() -> None:
    pytest.importorskip("transformers")
    settings = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "seed": 3}
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
    ],
)
def test_wrong_hugging_face_model_is_explained(spec: str, settings: dict[str, object], parts: list[str]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError) as caught:
        load_model(spec, settings)
    for part in parts:
        assert part in str(caught.value)
