"""Rows that samples of a micro-batch look up several times: each is sent once, and the step is the local model's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whale
from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.test_local_batches import rows_of
from whale.optim import RowWiseAdagrad
from whale.runtime.launch import World
from whale.runtime.messages import Messages


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


ROWS, COLUMNS = 60, 6


class Clicks(nn.Module):
    """A table of single look-ups, one of bags of one row with a padding index, and one of three look-ups a sample that
    are not summed in it; indices are given, scattered by a modulus, and in another leaf."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(
            [
                nn.Embedding(ROWS, COLUMNS, sparse=sparse),
                nn.EmbeddingBag(ROWS, COLUMNS, mode="mean", sparse=sparse, padding_idx=1),
                nn.Embedding(ROWS, COLUMNS, sparse=sparse),
            ]
        )
        self.dense = nn.Sequential(nn.Linear(3 * COLUMNS, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: Tensor, others: Tensor, clicked: Tensor) -> Tensor:
        found = [self.tables[0](ids[:, 0]), self.tables[1](ids[:, 1:2]), self.tables[2]((others * 7 + 3) % ROWS)]
        x = torch.cat([*found[:2], found[2].square().sum(1)], 1)
        return F.binary_cross_entropy_with_logits(self.dense(x).squeeze(1), clicked)


def batch(rows: int = 24, seed: int = 1) -> dict[str, Tensor]:
    """Most of the indices are few."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(rows, 5, generator=generator)
    ids = (ROWS * drawn**6).long()
    return {
        "ids": ids[:, :2],
        "others": ids[:, 2:],
        "clicked": torch.rand(rows, generator=generator).round().double(),
    }


def layout(*, split: bool = False, offload: str | None = None, distinct: bool = True) -> dict[str, Any]:
    part = 0.4 if distinct else None
    if split:
        return {
            "tables": [whale.cluster([0, 1]), whale.stage(2, distinct=part, offload=offload), whale.split()],
            "": [whale.cluster([0, 1, 2]), whale.stage(3), whale.replicate()],
        }
    return {
        "tables.0": [whale.cluster([0]), whale.stage(1, distinct=part, offload=offload)],
        "tables.[1-2]": [whale.cluster([1]), whale.stage(1, distinct=part, offload=offload)],
        "": [whale.cluster([0, 1]), whale.stage(2), whale.replicate()],
    }


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """One for the first table, one for the others, and one for all else."""
    kinds: list[Any] = [RowWiseAdagrad, torch.optim.SparseAdam, torch.optim.AdamW]
    kinds = kinds if model.tables[0].sparse else [torch.optim.AdamW] * 3
    found: list[list[Any]] = [[], [], []]
    for name, parameter in model.named_parameters():
        found[0 if name.startswith("tables.0") else 1 if name.startswith("tables") else 2].append(parameter)
    return [kind(own, lr=0.1) for kind, own in zip(kinds, found, strict=True) if own]


def counted(sizes: list[int]) -> Any:
    """`Messages.send`, which notes how many elements it sends."""
    send = Messages.send

    def sends(self: Messages, tensor: Tensor, peer: int, group: Any) -> Any:
        sizes.append(tensor.numel())
        return send(self, tensor, peer, group)

    return sends


def both(world: World, placed: dict[str, Any], options: dict[str, Any], rows: tuple[int, ...]) -> dict[str, float]:
    """The largest differences of losses and parameters from the local model's in steps of these rows, and the part of
    what is sent elsewhere."""
    local = Clicks(placed.pop("sparse", True)).double()
    model = copy.deepcopy(local)
    whale.annotate(model, layout(**placed))
    made: Any = whale.parallelize(model, batch(), device="cpu", timeout_seconds=30, **options)
    ours, theirs = optimizers(made), optimizers(local)
    found, sizes = {"losses": 0.0}, list[int]()
    before, Messages.send = Messages.send, counted(sizes)  # type: ignore[method-assign]
    try:
        for number, count in enumerate(rows):
            given = batch(count, number)
            own = rows_of(made, given) if options.get("batch") == "local" else given
            expected = local(**given)
            expected.backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                loss = made.train_step(**own)
            found["losses"] = max(found["losses"], abs(loss.item() - expected.item()))
            for optimizer in (*ours, *theirs):
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            evaluated = made.eval_step(**own) - local(**given)
        found["losses"] = max(found["losses"], abs(evaluated.item()))
    finally:
        Messages.send = before  # type: ignore[method-assign]
    state = made.full_state_dict()
    found["parameters"] = max(float((state[k] - v).abs().max()) for k, v in local.state_dict().items())
    return {**found, "sent": float(sum(sizes))}


SETTINGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tables on ranks": (2, {}, {}),
    "in columns": (3, {"split": True}, {}),
    "in the memory of hosts": (2, {"offload": "tables"}, {}),
    "dense gradients": (2, {"sparse": False}, {"micro_batches": 2}),
    "micro-batches": (2, {}, {"micro_batches": 3}),
    "micro-batches and zero bubble": (3, {"split": True}, {"micro_batches": 2, "schedule": "zero_bubble"}),
    "recompute": (2, {}, {"micro_batches": 2, "recompute": "full"}),
    "compiled": (2, {}, {"compile": True}),
    "rows of its own": (2, {}, {"batch": "local"}),
    "rows of its own, in columns": (3, {"split": True}, {"batch": "local", "micro_batches": 2}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_step_is_the_local_one(worlds: Worlds, name: str) -> None:
    size, placed, options = SETTINGS[name]
    for found in worlds.run(size, both, placed, options, (24, 24, 18)):  # the last batch has other rows
        assert max(found["losses"], found["parameters"]) < 1e-12, found


@pytest.mark.parametrize("name", ["tables on ranks", "micro-batches and zero bubble"])
def test_less_is_sent(worlds: Worlds, name: str) -> None:
    size, placed, options = SETTINGS[name]
    sent = [
        sum(one["sent"] for one in worlds.run(size, both, {**placed, "distinct": distinct}, options, (24,)))
        for distinct in (True, False)
    ]
    assert 0 < sent[0] < 0.7 * sent[1]
