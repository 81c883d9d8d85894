"""Learning rates that follow the rows of a batch, and the exit code of a rank under ``whale run``."""

import subprocess
import sys
from typing import Any

import pytest
import torch

import whale
from whale.errors import UsageError


def optimizer(kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.zeros(2))], lr=0.4)


@pytest.mark.parametrize(
    ("kind", "factor"), [(torch.optim.SGD, 0.25), (torch.optim.AdamW, 0.5), (torch.optim.Adagrad, 0.5)]
)
def test_rates_follow_the_rows_by_the_rule_of_the_optimizer(kind: Any, factor: float) -> None:
    own = optimizer(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(own, step_size=2, gamma=0.1)
    size = whale.BatchSize(16)
    size.load_state_dict({"rows": 64})
    assert size.follow(own, scheduler) == factor
    assert own.param_groups[0]["lr"] == pytest.approx(0.4 * factor)
    for _ in range(2):
        own.step()
        scheduler.step()
    assert own.param_groups[0]["lr"] == pytest.approx(0.04 * factor)


def test_rates_follow_once_and_only_other_rows() -> None:
    own, size = optimizer(), whale.BatchSize(16)
    assert size.follow(own) == 1.0  # nothing was loaded
    size.load_state_dict({"rows": 16})
    assert size.follow(own) == 1.0
    size.load_state_dict({"rows": 8})
    assert (size.follow(own), size.follow(own)) == (2.0, 1.0)
    assert own.param_groups[0]["lr"] == 0.8
    assert size.state_dict() == {"rows": 16}


def test_a_state_without_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="not its rows"):
        whale.BatchSize(16).load_state_dict({"rows": 0})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("PlanMismatchError('no')", 3),
        ("InfeasibleError('no')", 4),
        ("WorkerError('lost')", 6),
        ("WorkerError.after(3, 'rank 1 said no')", 3),
        ("KeyError('no')", 1),
    ],
)
def test_under_whale_run_a_script_ends_with_the_code_of_its_error(error: str, code: int) -> None:
    program = f"from whale.runtime.ending import *\nfrom whale.errors import *\nend_with_own_code()\nraise {error}"
    for elastic, expected in ((True, code), (False, 1)):
        variables = {"WHALE_ELASTIC": "1:1"} if elastic else {}
        done = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == expected
        assert "Traceback" in done.stderr
