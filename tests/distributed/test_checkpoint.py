"""Checkpoints: saved under one plan and loaded under another, bitwise, with the curve of a run that never stopped.

A few plans; ``benchmarks/resharding.py`` has all pairs of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.resharding import BOUND, Run, Runs
from whale.runtime.launch import World

PLANS = ("one process", "tp 3:1", "uneven pp", "interleaved", "zero3 3:1", "state on the host", "tp2 x pp2")


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


@pytest.fixture(scope="module")
def runs(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(worlds, "decoder", PLANS, "AdamW", 3, tmp_path_factory.mktemp("runs"))


def test_all_plans_train_alike(runs: Runs) -> None:
    for curve in runs.curves.values():
        assert curve == pytest.approx(runs.curves["one process"], rel=BOUND)


@pytest.mark.parametrize("plan", PLANS)
def test_a_checkpoint_of_any_plan_goes_on_under_this_one(runs: Runs, plan: str) -> None:
    for other, wrong in runs.faults(plan).items():
        assert not wrong, f"from {other}"


def through_torch(world: World, plans: tuple[str, ...], folder: Path) -> list[str]:
    """The tensors and states that are others after torch's checkpoints have carried them from each plan to the next."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    runs = {plan: Run("decoder", plan, "AdamW", 3, number) for number, plan in enumerate(plans)}
    states = {}
    for plan, run in runs.items():
        run.train(1)
        state = {
            "model": run.model.state_dict(),
            "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=options),
        }
        states[plan] = state
    first, *others = plans
    expected = runs[first].model.full_state_dict()
    moments = {name: state["exp_avg"].clone() for name, state in by_name(runs[first]).items()}
    unlike = []
    for source, target in zip(plans, [*others, first], strict=True):
        dcp.save(states[source], checkpoint_id=folder / source)
        for tensor in [x for state in runs[source].optimizer.state.values() for x in state.values()]:
            tensor.zero_()
        dcp.load(states[target], checkpoint_id=folder / source)
        found = runs[target].model.full_state_dict()
        unlike += [f"{target}: {name}" for name, value in expected.items() if not torch.equal(found[name], value)]
    own = by_name(runs[first])
    lost = [name for name, value in moments.items() if not torch.equal(own[name]["exp_avg"], value)]
    return unlike + [f"moment of {name}" for name in lost]


def by_name(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    """The states of this rank's parameters."""
    return {name: dict(run.optimizer.state[p]) for name, p in run.model.named_parameters() if p in run.optimizer.state}


def test_torch_s_checkpoints_carry_states_from_plan_to_plan(worlds: Worlds, tmp_path: Path) -> None:
    for unlike in worlds.run(2, through_torch, ("tp 3:1", "interleaved", "state on the host"), tmp_path):
        assert not unlike
