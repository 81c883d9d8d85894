"""The first example: small, and parallel by three lines more than the same training alone."""

from __future__ import annotations

import ast
import difflib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.py"


def body(name: str) -> list[str]:
    """The lines of a function of the example, without comments."""
    tree = ast.parse(QUICKSTART.read_text())
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return [line for statement in function.body for line in ast.unparse(statement).splitlines()]


def test_it_has_at_most_sixty_lines() -> None:
    assert len(QUICKSTART.read_text().splitlines()) <= 60


def test_parallel_training_is_three_lines_of_whale_and_six_lines_of_difference_at_most() -> None:
    difference = [
        line for line in difflib.ndiff(body("train_alone"), body("train_in_parallel")) if line.startswith(("+ ", "- "))
    ]
    added = [line for line in difference if line.startswith("+")]
    assert len(added) == 3
    assert len(difference) + 1 <= 6  # one more: import whale
    assert sum("whale." in line or "train_step" in line for line in added) == 3


def test_it_runs_alone() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, QUICKSTART], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "on 1 ranks: the losses are equal" in run.stdout
