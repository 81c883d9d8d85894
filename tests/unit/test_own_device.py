"""Ranks have devices of their own: what they compile is equal except for these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import SMALL, build_guard

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Everything that ranks on ``cuda:0`` and ``cuda:1`` say of every model."""
    guard = build_guard(tmp_path_factory.mktemp("guard"))
    if guard is None:
        pytest.skip("fake CUDA devices need a C++ compiler")
    command = [sys.executable, "-m", "tests.fake_cuda", str(guard), *SMALL]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(process.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("default", ["replicate", "split"])
@pytest.mark.parametrize("spec", SMALL)
def test_ranks_agree_and_use_no_device_of_another(spec: str, default: str, said: dict[str, Any]) -> None:
    first, second = (rank[default] for rank in said[spec])
    assert first["texts"] == second["texts"]
    assert set(first["devices"]) <= {"cuda:0", "cpu"}
    assert set(second["devices"]) <= {"cuda:1", "cpu"}


def test_models_that_name_a_device_are_among_them(said: dict[str, Any]) -> None:
    assert [spec for spec, ranks in said.items() if ranks[1]["replicate"]["devices"] == ["cuda:1"]]
