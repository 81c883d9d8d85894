"""Ranks have devices of their own: what they compile is equal except for these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.fake_cuda import SMALL, build_guard
from tests.fake_steps import LOW, PLANS, SAVING, Waits

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of a process with CUDA devices that do not exist: what ranks on ``cuda:0`` and ``cuda:1`` say of every
    model, waits of training steps of a rank on ``cuda:1``, and those of one model in other plans."""
    guard = build_guard(tmp_path_factory.mktemp("guard"))
    if guard is None:
        pytest.skip("fake CUDA devices need a C++ compiler, and a torch that is not built for CUDA")
    process = subprocess.run(
        [sys.executable, "-m", "tests.fake_steps", *SMALL],
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": str(guard)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def said(steps: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Everything that ranks on ``cuda:0`` and ``cuda:1`` say of every model."""
    found: dict[str, list[dict[str, Any]]] = steps["ranks"]
    return found


@pytest.fixture(scope="module")
def stepped(steps: dict[str, Any]) -> dict[str, dict[str, dict[str, Any] | None]]:
    """Waits of steps of models, by model and layout."""
    found: dict[str, dict[str, dict[str, Any] | None]] = steps["models"]
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


@pytest.mark.parametrize("spec", SMALL)
def test_a_step_never_waits_for_its_device(spec: str, stepped: dict[str, dict[str, dict[str, Any] | None]]) -> None:
    found = stepped[spec]
    assert found["replicate"] is not None and found["split"] is not None
    for one in found.values():
        assert one is None or (one["waits"], one["watched"]) == ([], ["step 1", "step 2"])


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_of_no_kind_of_plan_waits(plan: str, steps: dict[str, Any]) -> None:
    found = steps["plans"][plan]
    assert (found["waits"], found["unused"]) == ([], [])


@pytest.mark.parametrize("spec", SMALL)
def test_a_rank_is_in_no_process_group_that_it_does_not_use(
    spec: str, stepped: dict[str, dict[str, dict[str, Any] | None]]
) -> None:
    assert [one["unused"] for one in stepped[spec].values() if one is not None and one["unused"]] == []


def test_tables_on_a_host_and_their_gradients_never_are_on_its_device(steps: dict[str, Any]) -> None:
    """Indices are on the host, vectors come, then gradients of vectors go, of two tables, in two steps."""
    found = steps["hosted"]
    assert found["places"] == {
        "tables.0.weight": ["cpu", "cpu"],
        "tables.1.weight": ["cpu", "cpu"],
        "dense.weight": ["cuda:1", "cuda:1"],
        "dense.bias": ["cuda:1", "cuda:1"],
    }
    one = [["cpu", "cpu"], ["cpu", "cuda:1"]] * 2 + [["cuda:1", "cpu"]] * 2
    assert found["went"] == one * 2
    assert (found["waits"], found["unused"]) == ([], [])


@pytest.mark.parametrize("spec", LOW)
def test_models_under_autocast_are_cut_into_micro_batches(spec: str, steps: dict[str, Any]) -> None:
    assert steps["halves"][spec] == [4, 4]


@pytest.mark.parametrize("name", SAVING)
def test_a_rank_that_is_out_of_memory_says_what_was_predicted(name: str, steps: dict[str, Any]) -> None:
    assert steps["advice"][name].startswith("predicted were ")


DROPS_WEIGHTS = {
    "examples/models/gpt.py:gpt": 2,
    "examples/models/bert.py:bert": 2,
    "hf:gpt2": 2,
    "hf:bert": 2,
    "hf:t5": 3,
}
"""How many attentions of a model drop some of their weights, for which only a kernel's own generator is fast enough."""


@pytest.mark.parametrize("spec", SMALL)
def test_generators_are_seeded_for_attention_with_dropout_alone(
    spec: str, stepped: dict[str, dict[str, dict[str, Any] | None]]
) -> None:
    for one in stepped[spec].values():
        assert one is None or one["seeded"] == 2 * DROPS_WEIGHTS.get(spec, 0)  # in two steps


def test_pipelines_are_among_these_steps(stepped: dict[str, dict[str, dict[str, Any] | None]]) -> None:
    assert sum(one["stages"] is not None for one in stepped.values()) >= 4


def test_a_rank_copies_the_rows_that_it_reads(stepped: dict[str, dict[str, dict[str, Any] | None]]) -> None:
    images = stepped["hf:vit"]["replicate"]
    assert images is not None
    assert images["copied"] < images["whole"] / 4 + 100  # one of four ranks; some numbers of the loss besides


def test_waits_are_noted() -> None:
    with FakeTensorMode(), Waits() as waits:
        x = torch.empty(3, device="cuda")
        x.cpu()
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
    assert [found.split()[0] for found in waits.found] == [
        "aten._to_copy.default",
        "aten._local_scalar_dense.default",
    ]
