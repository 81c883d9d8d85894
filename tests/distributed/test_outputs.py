"""Outputs of steps on two and four ranks: those of the local model, whole, of its own types."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.parity import Worlds, cluster_of
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import refusal
from whale.runtime.launch import World

BOUND = 1e-12


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


class Parts(NamedTuple):
    hidden: Tensor
    mask: Tensor


@dataclass
class Answer:
    loss: Tensor | None
    logits: Tensor
    metrics: dict[str, Any]
    parts: Parts
    labels: Tensor | None = None


class Classifier(nn.Module):
    """It returns rows, sums over rows, means, a count, a parameter, a constant and its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 8)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Answer:
        hidden = x
        for layer in self.body:
            hidden = torch.tanh(layer(hidden))
        logits = self.head(hidden)
        metrics: dict[str, Any] = {"bias": self.head.bias, "kind": "softmax", "rows": hidden.square().sum(-1)}
        loss = None
        if labels is not None:
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
            loss = losses.mean()
            metrics |= {"correct": (logits.argmax(-1) == labels).sum(), "total": losses.sum(), "none": None}
        return Answer(loss, logits, metrics, Parts(hidden, x > 0), labels)


LAYOUTS: dict[str, Any] = {
    "replicate": {},
    "split": {"": whale.split(2)},
    "split head": {"head": whale.split(2)},
    "stages": {"body.0": whale.stage(), "body.1": whale.stage()},
}


def made(layout: str, rows: int = 6) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Classifier().double()
    whale.annotate(model, LAYOUTS[layout])
    return model, {"x": torch.randn(rows, 6, dtype=torch.float64), "labels": torch.arange(rows) % 8}


def difference(one: Any, other: Any) -> float:
    """The largest difference of tensors in equal structures; everything else must be equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):  # a parameter comes as a tensor
        assert (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, False)
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    assert type(one) is type(other), (type(one), type(other))
    if isinstance(one, Answer):
        return difference(vars(one), vars(other))
    if isinstance(one, dict):
        assert list(one) == list(other)
        return max([difference(one[key], other[key]) for key in one])
    if isinstance(one, tuple):
        return max([difference(a, b) for a, b in zip(one, other, strict=True)])
    assert one == other
    return 0.0


def all_steps(
    world: World, layout: str, micro_batches: int, rows: int, speeds: tuple[float, ...] = ()
) -> dict[str, float]:
    model, batch = made(layout)
    local = copy.deepcopy(model)
    parallel = whale.parallelize(
        model, batch, micro_batches=micro_batches, cluster=cluster_of(speeds), device="cpu", timeout_seconds=20
    )
    batch = {key: value[:rows] for key, value in batch.items()}
    with torch.no_grad():
        expected, unlabelled = local(**batch), local(batch["x"])
    found = {"predict": difference(parallel.predict_step(**batch), expected)}
    found["predict without labels"] = difference(parallel.predict_step(batch["x"]), unlabelled)
    first = parallel.predict_step(**batch, to="rank0")
    assert (first is None) == (world.rank != 0)
    if first is not None:
        found["predict to rank 0"] = difference(first, expected)
    loss, output = parallel.eval_step(**batch, outputs=True)
    found["eval"] = max(difference(loss, expected.loss), difference(output, expected))
    loss, output = parallel.eval_step(batch["x"], outputs=True)
    assert loss is None
    found["eval without labels"] = difference(output, unlabelled)
    loss, output = parallel.train_step(**batch, outputs=True, scale=0.25)
    (local(**batch).loss * 0.25).backward()
    gradients = parallel.full_gradients()
    found["train"] = max(difference(loss.detach(), expected.loss), difference(output, expected))
    found["gradients"] = max([difference(gradients[n], p.grad) for n, p in local.named_parameters()])
    return found


@pytest.mark.parametrize(
    ("layout", "micro_batches", "rows"),
    [
        ("replicate", 1, 6),
        ("replicate", 3, 6),
        ("replicate", 1, 1),
        ("split", 1, 6),
        ("split head", 2, 5),
        ("stages", 2, 6),
    ],
)
def test_outputs_are_those_of_the_local_model(worlds: Worlds, layout: str, micro_batches: int, rows: int) -> None:
    for found in worlds.run(2, all_steps, layout, micro_batches, rows):
        assert max(found.values()) < BOUND, found


def test_ranks_with_unequal_shares_return_whole_outputs(worlds: Worlds) -> None:
    for found in worlds.run(2, all_steps, "replicate", 2, 6, (1.0, 3.0)):
        assert max(found.values()) < 1e-9, found


class Metric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        found: Tensor = scale * self.line(x)
        return found


def squared(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output[:, 0] - batch["y"]).square().mean()


def with_a_loss_function(world: World) -> tuple[float, float, list[str]]:
    torch.manual_seed(0)
    model = Metric().double()
    batch = {"x": torch.randn(4, 6, dtype=torch.float64), "y": torch.randn(4, dtype=torch.float64)}
    local = copy.deepcopy(model)
    parallel = whale.parallelize(model, batch, loss_fn=squared, device="cpu", timeout_seconds=20)
    with torch.no_grad():
        expected = local(batch["x"])
    loss, output = parallel.train_step(**batch, outputs="rank0")
    assert (output is None) == (world.rank != 0)
    alone = parallel.predict_step(x=batch["x"])
    scaled = parallel.predict_step({"x": batch["x"], "scale": 2.0})
    refused = [
        refusal(lambda: parallel.train_step(**batch, scale=0.5)),
        refusal(lambda: parallel.predict_step(**batch, to="rank1")),
        refusal(lambda: parallel.eval_step(x=batch["x"])),
    ]
    worst = max(difference(alone, expected), difference(scaled, 2 * expected))
    return difference(loss.detach(), squared(expected, batch)), worst, refused


def test_a_loss_function_is_not_part_of_the_output(worlds: Worlds) -> None:
    for loss, output, (ambiguous, to, _) in worlds.run(2, with_a_loss_function):
        assert max(loss, output) < BOUND
        assert "scale is an argument of the model's forward and an option of the step" in ambiguous
        assert "'rank1' says not who gets the output" in to


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"loss": self.line(x).sum(), "cache": object()}


def strange_outputs(world: World) -> tuple[float, str]:
    x = torch.ones(2, 4)
    parallel = whale.parallelize(Odd(), x, device="cpu", timeout_seconds=20)
    return float(parallel.eval_step(x)), refusal(lambda: parallel.predict_step(x))


def test_an_output_that_cannot_be_returned_is_refused(worlds: Worlds) -> None:
    for _, message in worlds.run(2, strange_outputs):
        assert "the model's output['cache'] is a object, which a step cannot return" in message


class Following(nn.Module):
    """It follows the mean of its rows in a buffer, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        assert isinstance(self.mean, Tensor)
        self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        for layer in self.body:
            x = torch.tanh(layer(x - self.mean))
        return {"loss": x.square().mean(), "x": x}


def follow(world: World, layout: dict[str, Any]) -> tuple[float, ...]:
    torch.manual_seed(0)
    model = Following().double()
    local: Any = copy.deepcopy(model)
    whale.annotate(model, layout)
    batches = [torch.randn(4, 4, dtype=torch.float64) for _ in range(6)]
    options: dict[str, Any] = {"device": "cpu", "timeout_seconds": 20}
    parallel: Any = whale.parallelize(model, batches[0], **options)
    errors = []
    for step, x in zip(("predict", "train", "predict", "eval", "predict", "train"), batches, strict=True):
        local.train(step == "train")
        with torch.no_grad():
            expected = local(x)
        if step == "predict":
            errors.append(parallel.predict_step(x)["x"] - expected["x"])
        else:
            loss = parallel.train_step(x) if step == "train" else parallel.eval_step(x)
            errors.append(loss - expected["loss"])
        errors.append(parallel.full_state_dict()["mean"] - local.mean)
    return tuple(float(error.detach().abs().max()) for error in errors)


@pytest.mark.parametrize("layout", ["replicate", "split", "stages"])
def test_what_a_forward_writes_to_buffers_stays_written_whatever_a_step_returns(worlds: Worlds, layout: str) -> None:
    for errors in worlds.run(2, follow, LAYOUTS[layout]):
        assert max(errors) < BOUND
