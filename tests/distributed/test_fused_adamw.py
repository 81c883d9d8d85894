"""The fused AdamW on ranks: on stretches of ZeRO, on the host, inside of the backward, and through checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import Two, annotated
from tests.small_models import tokens
from whale import optim
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


def trained(kind: str, optimizer: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters after three steps; on one device, without options, for reference."""
    model: Any = annotated(kind)
    if "precision" in options:
        model.float()
    if options:
        model = whale.parallelize(model, tokens(), device="cpu", timeout_seconds=60, **options)
    own: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    made = optimizer(own, lr=0.01)
    for _ in range(3):
        model.train_step(**tokens()) if options else model(**tokens()).backward()
        made.step()
        made.zero_grad()
    state: dict[str, Tensor] = model.full_state_dict() if options else model.state_dict()
    return state


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero 1": ("replicate", {"zero": 1}),
    "zero 3 of unequal stretches": ("replicate", {"zero": 3, "state_shares": [3, 1], "micro_batches": 2}),
    "offload": ("replicate", {"offload": "state"}),
    "in the backward": ("replicate", {"step_in_backward": True, "zero": 2}),
    "split": ("split", {"micro_batches": 1}),
    "stages": ("stages", {"micro_batches": 2}),
}


def error_of(world: World, kind: str, options: dict[str, Any]) -> float:
    ours, theirs = trained(kind, optim.FusedAdamW, options), trained(kind, torch.optim.AdamW, {})
    return max(float((ours[key] - theirs[key]).abs().max()) for key in theirs)


@pytest.mark.parametrize(("kind", "options"), SETTINGS.values(), ids=SETTINGS)
def test_it_trains_as_torchs_on_one_device(ranks: Two, kind: str, options: dict[str, Any]) -> None:
    for error in ranks.run(error_of, kind, options):
        assert error <= 1e-9  # in float64: gradients differ by rounding, which Adam enlarges where they are small


def error_of_float16(world: World) -> float:
    options = {"precision": "fp16", "zero": 1}
    kinds = (partial(made, eps=1e-3) for made in (optim.FusedAdamW, torch.optim.AdamW))  # some gradients are noise
    ours, theirs = (trained("replicate", made, options) for made in kinds)
    return max(float((ours[key] - theirs[key]).abs().max()) for key in theirs)


def test_it_trains_as_torchs_with_a_loss_scale(ranks: Two) -> None:
    for error in ranks.run(error_of_float16):
        assert error <= 1e-5


def runs(world: World) -> list[int]:
    """How many runs a step has, of all parameters of a rank."""
    seen: list[int] = []
    step = optim.step_runs
    optim.step_runs = lambda runs, *rest: [seen.append(len(runs)), step(runs, *rest)]  # type: ignore[assignment,func-returns-value]
    try:
        model = whale.parallelize(annotated("replicate").float(), tokens(), device="cpu", timeout_seconds=60, zero=1)
        optimizer = optim.FusedAdamW(model.parameters())
        model.train_step(**tokens())
        optimizer.step()
    finally:
        optim.step_runs = step
    return seen[-1:]  # after those of the trial on small tensors


def test_a_stretch_that_a_rank_owns_is_one_run(ranks: Two) -> None:
    assert ranks.run(runs) == [[1], [1]]


def saved_and_loaded(world: World, folder: str, first: str, second: str) -> float:
    """Two steps, a checkpoint, two more: against the same with another optimizer and plan after the checkpoint."""
    classes: dict[str, Any] = {"ours": optim.FusedAdamW, "torch": torch.optim.AdamW}
    model = whale.parallelize(annotated("replicate"), tokens(), device="cpu", timeout_seconds=60, zero=1)
    optimizer = classes[first](model.parameters(), lr=0.01)
    other = whale.parallelize(annotated("replicate"), tokens(), device="cpu", timeout_seconds=60, zero=3)
    resumed = classes[second](other.parameters(), lr=0.01)
    for step in range(4):
        if step == 2:
            whale.save_checkpoint(folder, model, step=step, optimizer=optimizer)
            whale.wait_for_checkpoints()
            whale.load_checkpoint(folder, other, optimizer=resumed)
        pairs: list[tuple[Any, Any]] = [(model, optimizer), (other, resumed)]
        for one, own in pairs[: 1 + (step >= 2)]:
            one.train_step(**tokens())
            own.step()
            own.zero_grad()
    one, two = model.full_state_dict(), other.full_state_dict()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.parametrize(("first", "second"), [("ours", "torch"), ("torch", "ours"), ("ours", "ours")])
def test_checkpoints_of_one_are_those_of_the_other(ranks: Two, tmp_path: Path, first: str, second: str) -> None:
    for error in ranks.run(saved_and_loaded, str(tmp_path), first, second):
        assert error <= 1e-9


def masters(world: World) -> tuple[float, list[torch.dtype]]:
    """Parameters in bfloat16 whose float32 masters are divided among ranks, against one process."""
    local = annotated("replicate").bfloat16()
    alone = optim.FusedAdamW(local.parameters(), lr=0.01, masters=True)
    made = whale.parallelize(annotated("replicate").bfloat16(), tokens(), device="cpu", timeout_seconds=60, zero=1)
    own = optim.FusedAdamW(made.parameters(), lr=0.01, masters=True)
    made.train_step(**tokens())
    whole = made.full_gradients()
    for name, p in local.named_parameters():
        p.grad = whole[name].clone()
    own.step()
    alone.step()
    state = made.full_state_dict()
    error = max(float((state[name].float() - p.float()).abs().max()) for name, p in local.named_parameters())
    return error, sorted({x.dtype for s in own.state.values() for k, x in s.items() if k != "step"}, key=str)


def test_masters_are_on_the_rank_that_owns_the_stretch(ranks: Two) -> None:
    for error, dtypes in ranks.run(masters):
        assert error == 0
        assert dtypes == [torch.float32]
