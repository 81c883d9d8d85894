"""The examples run, alone and on ranks, with the same losses; the first is parallel by three lines."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
QUICKSTART = EXAMPLES / "quickstart.py"


def body(name: str) -> list[str]:
    """The lines of a function of the example, without comments."""
    tree = ast.parse(QUICKSTART.read_text())
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return [line for statement in function.body for line in ast.unparse(statement).splitlines()]


def test_the_quickstart_has_at_most_sixty_lines() -> None:
    assert len(QUICKSTART.read_text().splitlines()) <= 60


def test_parallel_training_is_three_lines_of_whale_and_six_lines_of_difference_at_most() -> None:
    difference = [
        line for line in difflib.ndiff(body("train_alone"), body("train_in_parallel")) if line.startswith(("+ ", "- "))
    ]
    added = [line for line in difference if line.startswith("+")]
    assert len(added) == 3
    assert len(difference) + 1 <= 6  # one more: import whale
    assert sum("whale." in line or "train_step" in line for line in added) == 3


def run(size: int, name: str, *arguments: str) -> str:
    """What an example prints, in one process or under torchrun."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)] if size > 1 else []
    command = [sys.executable, *launcher, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("size", [1, 2])
def test_the_quickstart_finds_its_losses_equal(size: int) -> None:
    assert f"on {size} ranks: the losses are equal" in run(size, "quickstart.py")


@pytest.mark.parametrize(
    ("name", "whole", "cut"),
    [
        ("hybrid_classifier.py", "trunk.7.weight is (128, 256)", "head.weight is (10000, 128)"),
        ("moe.py", "blocks.0.attention.query.weight is (32, 32)", "blocks.0.experts.up is (2, 32, 128)"),
    ],
)
def test_a_hybrid_has_the_losses_of_one_process_and_its_part_of_the_weights(name: str, whole: str, cut: str) -> None:
    alone, together = run(1, name, "--steps", "3"), run(2, name, "--steps", "3")
    losses = [[float(loss) for loss in re.findall(r"loss ([0-9.]+)", text)] for text in (alone, together)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)  # printed with four digits
    assert together.count(whole) == 2
    assert together.count(cut) == 2


def test_gpt2_has_the_losses_of_one_process() -> None:
    alone = run(1, "gpt2.py", "--steps", "3")
    together = run(2, "gpt2.py", "--steps", "3", "--layout", "pp", "--micro-batches", "2")
    losses = [[float(loss) for loss in re.findall(r"loss ([0-9.]+)", text)] for text in (alone, together)]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)


@pytest.mark.parametrize(
    ("size", "name", "arguments"),
    [
        (2, "unet3d.py", ()),
        (2, "unet3d.py", ("--model", "cosmoflow")),
        (2, "long_context.py", ()),
        (1, "long_context.py", ("--length", "50")),
    ],
)
def test_parts_of_one_sample_train_as_the_whole_does(size: int, name: str, arguments: tuple[str, ...]) -> None:
    assert f"parity on {size} ranks: losses and " in (text := run(size, name, *arguments))
    assert " equal to 1e-9" in text
