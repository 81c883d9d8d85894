"""Weights in files of Hugging Face: what a checkpoint exports, and what is read of such files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import whale
from whale.checkpoint.hugging_face import INDEX, WeightFiles
from whale.cli.app import app
from whale.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=8)
WORDS = torch.randint(40, (2, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": WORDS, "labels": WORDS}


def gpt2(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(CONFIG).eval()


def parallel(seed: int) -> Any:
    return whale.parallelize(gpt2(seed), BATCH, device="cpu")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    model = parallel(0)
    optimizer = torch.optim.AdamW(model.parameters())
    whale.save_checkpoint(folder, model, step=7, optimizer=optimizer, asynchronous=False)
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    return parallel(1)


def test_an_export_is_a_model_of_hugging_face(saved: Path, tmp_path: Path) -> None:
    assert "model.safetensors" in run("export", saved, "-o", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    CONFIG.save_pretrained(tmp_path)
    assert same(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict(), gpt2(0).state_dict())


def test_a_large_export_has_files_with_an_index(saved: Path, tmp_path: Path, model: Any) -> None:
    run("export", saved / "step-00000007", "-o", tmp_path, "--max-shard-size", "10kB")
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(path for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert set(index["weight_map"].values()) == {path.name for path in files}
    tensors = [load_file(path) for path in files]
    assert all(len(one) == 1 or sum(x.nbytes for x in one.values()) <= 10_000 for one in tensors)
    assert index["metadata"]["total_size"] == sum(x.nbytes for one in tensors for x in one.values())
    CONFIG.save_pretrained(tmp_path)
    assert same(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict(), gpt2(0).state_dict())
    whale.load_weights(tmp_path, model)
    assert same(model.full_state_dict(), gpt2(0).state_dict())


def test_weights_of_a_checkpoint_and_of_hugging_face_are_loaded(saved: Path, tmp_path: Path, model: Any) -> None:
    whale.load_weights(saved, model)
    assert same(model.full_state_dict(), gpt2(0).state_dict())
    gpt2(2).save_pretrained(tmp_path)
    whale.load_weights(tmp_path, model)
    assert same(model.full_state_dict(), gpt2(2).state_dict())
    gpt2(3).half().save_pretrained(tmp_path)
    whale.load_weights(tmp_path / "model.safetensors", model)
    assert same(model.full_state_dict(), gpt2(3).half().float().state_dict())


def test_weights_of_another_model_change_nothing(tmp_path: Path, model: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.full_state_dict().items()}
    good = {name: x.clone() for name, x in gpt2(0).state_dict().items() if name != "lm_head.weight"}
    for changed, said in (
        ({**good, "more": torch.ones(2)}, r"it has \['more'\]"),
        ({n: x for n, x in good.items() if n != "transformer.ln_f.bias"}, r"lacks \['transformer.ln_f.bias'\]"),
        ({**good, "transformer.ln_f.bias": torch.ones(17)}, r"transformer.ln_f.bias has shape \(17,\)"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=said):
            whale.load_weights(tmp_path, model)
        assert same(model.full_state_dict(), before)


def test_parts_are_read_without_the_rest(tmp_path: Path) -> None:
    tensor = torch.arange(1000 * 8, dtype=torch.float32).view(1000, 8)
    save_file({"a": tensor, "b": torch.tensor(3.0), "c": torch.ones(4, 3, 2)}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        found = files.read("a", (((1, 3), (990, 1000)), ((0, 8),))).view("f4")
        assert torch.equal(torch.from_numpy(found), torch.cat([tensor[1:3], tensor[990:]]))
        assert files.bytes_read == 12 * 8 * 4
        found = files.read("a", (((5, 7),), ((0, 1), (6, 8)))).view("f4")
        assert torch.equal(torch.from_numpy(found), tensor[5:7][:, [0, 6, 7]])
        assert files.read("b").view("f4") == 3.0
        assert files.read("c", (((1, 4),), ((2, 3),), ((0, 2),))).shape == (3, 1, 2)


def test_an_export_never_replaces_weights(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    assert "has model.safetensors already" in run("export", saved, "-o", tmp_path, code=2)
    assert (tmp_path / "model.safetensors").read_text() == "mine"
    assert "no unit" in run("export", saved, "-o", tmp_path / "new", "--max-shard-size", "5", code=2)


def test_a_checkpoint_is_shown_and_verified(saved: Path, tmp_path: Path) -> None:
    text = run("checkpoint", "show", saved)
    assert "step 7, written by 1 rank\n" in text
    assert "optimizer, AdamW" in text
    found = json.loads(run("checkpoint", "show", saved, "--json"))
    assert found["tensors"]["model.transformer.wte.weight"] == {"dtype": "F32", "shape": [40, 16], "parts": 1}
    assert "is good" in run("checkpoint", "verify", saved)
    assert "neither a checkpoint" in run("checkpoint", "verify", tmp_path, code=5)


def test_a_damaged_checkpoint_is_not_exported(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "runs"))
    file = copy / "step-00000007" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    assert "is damaged in " in run("checkpoint", "verify", copy, code=5)
    assert "is damaged in " in run("export", copy, "-o", tmp_path / "out", code=5)
    assert not list((tmp_path / "out").iterdir())


def test_of_a_run_the_newest_good_checkpoint_is_taken(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "runs"))
    for step in (8, 9):
        whale.save_checkpoint(copy, parallel(0), step=step, keep=3, asynchronous=False)
    (copy / "step-00000009" / "manifest.json").unlink()
    file = copy / "step-00000008" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    sizes = ("--max-shard-size", "10KB")
    said = run("export", copy, "-o", tmp_path / "out", *sizes)
    assert said.count("a newer checkpoint is damaged, and step-00000007 is taken") == 2
    run("export", saved, "-o", tmp_path / "whole", *sizes)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )
    assert "step-00000008: step 8" in run("checkpoint", "show", copy)  # whose indexes are good
    assert "manifest.json cannot be read" in run("checkpoint", "verify", copy, code=5)
    shutil.rmtree(copy / "step-00000007")
    assert "has no good checkpoint" in run("export", copy, "-o", tmp_path / "none", code=5)
    assert not list((tmp_path / "none").iterdir())


def test_neither_export_nor_show_loads_torch(saved: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom whale.cli.app import app\n"
        f"app(['export', {str(saved)!r}, '-o', {str(tmp_path)!r}], standalone_mode=False)\n"
        f"app(['checkpoint', 'show', {str(saved)!r}], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def header(content: Any, data: bytes = b"\0" * 64) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 7 + b"\x7f",
        (10**12).to_bytes(8, "little") + b"{}",
        header(b"[]"),
        header(b"{" * 3000),
        header(b'{"a": 1, "a": 1}'),
        header(b"\x80\x04cos\nsystem\n."),
        header({"a": 3}),
        header({"a": ENTRY | {"dtype": "O"}}),
        header({"a": ENTRY | {"shape": [4, 5]}}),
        header({"a": ENTRY | {"shape": [-4, -4]}}),
        header({"a": ENTRY | {"shape": [2**40, 2**40]}}),
        header({"a": ENTRY | {"data_offsets": [64, 128]}}),
        header({"a": ENTRY | {"data_offsets": [64, 0]}}),
        header({"a": ENTRY | {"data_offsets": [-64, 0]}}),
        header({"a": ENTRY | {"path": "/etc/passwd"}}),
    ],
)
def test_a_file_of_an_enemy_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    "placed",
    [
        None,
        [],
        {"a": 3},
        {"a": "../model.safetensors"},
        {"a": "/etc/passwd"},
        {"a": "sub/model.safetensors"},
        {"a": "..safetensors"},
        {"a": "model.safetensors\n"},
        {"a": "missing.safetensors"},
        {"b": "one.safetensors"},
        {"a": "one.safetensors", "b": "two.safetensors"},
    ],
)
def test_an_index_of_an_enemy_is_refused(tmp_path: Path, placed: Any) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(header({"a": ENTRY}))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(CheckpointError, match="safetensors"):
        WeightFiles(tmp_path)


def test_a_pipe_is_no_file_of_weights(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no file of safetensors"):
        WeightFiles(tmp_path / "model.safetensors")


def test_weights_of_a_run_are_those_of_its_newest_good_checkpoint(saved: Path, tmp_path: Path, model: Any) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "runs"))
    whale.save_checkpoint(copy, parallel(2), step=8, asynchronous=False)
    file = copy / "step-00000008" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="a newer checkpoint is damaged, and step-00000007 is loaded: rank 0: "):
        whale.load_weights(copy, model)
    assert same(model.full_state_dict(), gpt2(0).state_dict())
    with pytest.raises(CheckpointError, match=r"rank 0: .*step-00000008/rank-00000.safetensors is damaged"):
        whale.load_weights(copy / "step-00000008", model)


def test_names_of_one_parameter_must_have_the_same_values(saved: Path, tmp_path: Path, model: Any) -> None:
    given = {name: tensor.clone() for name, tensor in gpt2(5).state_dict().items()}
    save_file(given, tmp_path / "model.safetensors")
    whale.load_weights(tmp_path, model)
    assert same(model.full_state_dict(), gpt2(5).state_dict())
    save_file(given | {"lm_head.weight": given["lm_head.weight"] + 1}, tmp_path / "model.safetensors")
    whale.load_weights(saved, model)
    with pytest.raises(CheckpointError, match="wte.weight and lm_head.weight are one tensor here, and have other"):
        whale.load_weights(tmp_path, model)
    assert same(model.full_state_dict(), gpt2(0).state_dict())
    whale.load_weights(tmp_path, model, strict=False)
    assert same(model.full_state_dict(), gpt2(5).state_dict())
    untied = GPT2LMHeadModel(GPT2Config(**CONFIG.to_diff_dict() | {"tie_word_embeddings": False}))
    whale.save_checkpoint(tmp_path / "runs", whale.parallelize(untied, BATCH, device="cpu"), step=1, asynchronous=False)
    with pytest.raises(CheckpointError, match="are one tensor here, and have other values there"):
        whale.load_weights(tmp_path / "runs", model)
