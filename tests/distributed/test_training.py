"""Training on two ranks: the curves, the states and the random numbers are those of the local model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import zoo
from tests.distributed.parity import Setup, Worlds, parallel, relative_errors
from tests.distributed.parity import worlds as worlds_of_a_module
from whale import replicate, split, stage
from whale.runtime.launch import World

STEPS = 100
LAYOUTS: dict[str, Any] = {
    "dp": Setup(layout={"": replicate()}),
    "tp": Setup(layout={"": split()}),
    "pp": Setup(layout={"first": stage(), "second": stage()}, micro_batches=2),
    "hybrid": Setup(layout={"": replicate(), "head": split()}),
    "uneven dp": Setup(layout={"": replicate()}, speeds=(3.0, 1.0)),
}
GPT2_LAYOUTS: dict[str, Any] = {
    "dp": Setup(layout={"": replicate()}, promote=True),
    "tp": Setup(layout={"": split()}, promote=True),
    "pp": Setup(layout={"transformer.h.0": stage(), "transformer.h.1": stage()}, promote=True, micro_batches=2),
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


Make = Callable[[Any], torch.optim.Optimizer]


def in_double(model: nn.Module) -> nn.Module:
    """GPT-2's loss casts logits to float32; here the local model computes it as the promoted graph does."""
    if hasattr(model, "loss_function"):

        def loss_function(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
            shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
            return nn.functional.cross_entropy(logits.flatten(0, 1), shifted, ignore_index=-100)

        setattr(model, "loss_function", loss_function)  # noqa: B010 - a module's attribute of another type
    return model


def pair(build: Any, setup: Setup) -> tuple[nn.Module, Any, Any]:
    """The local model, its batch and the parallel model, equal at the start."""
    torch.manual_seed(0)
    model, batch = build()
    model.train(setup.training)
    local = in_double(copy.deepcopy(model))
    return local, batch, parallel(model, batch, setup)


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def local_step(model: nn.Module, batch: Any) -> Tensor:
    loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach()


def at_step(batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Another batch of the same shapes, of which another number of labels is ignored."""
    ids, labels = batch
    mask = torch.arange(batch[labels].shape[1]) < step % 4
    return {ids: batch[ids].roll(step, 1), labels: batch[labels].masked_fill(mask, -100)}


@cache
def local_curve(build: Any, training: bool, make: Make, steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of the local model, and its state after training: once in a rank for all layouts."""
    torch.manual_seed(0)
    model, batch = build()
    local = in_double(model.train(training))
    optimizer = make(local.parameters())
    losses = []
    for step in range(steps):
        losses.append(local_step(local, at_step(batch, step)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, local.state_dict()


def train(world: World, build: Any, setup: Setup, make: Make, steps: int) -> tuple[list[float], dict[str, float]]:
    """Relative errors of the loss by step, and of the state after training by name."""
    _, batch, module = pair(build, setup)
    losses, whole = local_curve(build, setup.training, make, steps)
    optimizer = make(module.parameters())
    errors = []
    for step, expected in enumerate(losses):
        found = module.train_step(**at_step(batch, step))
        errors.append(float((found - expected).abs() / expected.abs()))
        optimizer.step()
        optimizer.zero_grad()
    state = module.full_state_dict()
    assert {n: tuple(t.shape) for n, t in state.items()} == {n: tuple(t.shape) for n, t in whole.items()}
    return errors, relative_errors(state, whole)


@pytest.mark.parametrize(("make", "bound"), [(sgd, 1e-12), (adamw, 1e-9)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("setup", GPT2_LAYOUTS.values(), ids=GPT2_LAYOUTS.keys())
def test_curve_of_a_hundred_steps(worlds: Worlds, setup: Setup, make: Make, bound: float) -> None:
    for losses, state in worlds.run(2, train, zoo.gpt2, setup, make, STEPS):
        assert max(losses) <= bound, f"step {losses.index(max(losses))} differs by {max(losses):.1e}"
        assert max(state.values()) <= 1e-6, state


@pytest.mark.parametrize("setup", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_curve_and_state_of_a_tied_model(worlds: Worlds, setup: Setup) -> None:
    for losses, state in worlds.run(2, train, zoo.tied_stages, setup, sgd, 20):
        assert max(losses) <= 1e-12
        assert max(state.values()) <= 1e-11, state


def clip(world: World, setup: Setup) -> dict[float, tuple[float, dict[str, float]]]:
    """By the order of the norm its error, and those of the gradients that it leaves."""
    local, batch, module = pair(zoo.tied_stages, setup)
    errors = {}
    for order in (2.0, 1.0, torch.inf):
        local.zero_grad()
        module.zero_grad()
        local_step(local, batch)
        module.train_step(**batch)
        expected = torch.nn.utils.clip_grad_norm_(local.parameters(), 0.1, order)
        found = module.clip_grad_norm_(0.1, order)
        gradients = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        wrong = relative_errors(module.full_gradients(), gradients)
        errors[order] = float((found - expected).abs() / expected), wrong
    return errors


@pytest.mark.parametrize("setup", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_clipping_is_that_of_torch(worlds: Worlds, setup: Setup) -> None:
    for errors in worlds.run(2, clip, setup):
        for order, (norm, gradients) in errors.items():
            assert norm <= 1e-12, order
            assert max(gradients.values()) <= 1e-12, (order, gradients)


def round_trip(world: World, setup: Setup) -> dict[str, float]:
    local, batch, module = pair(zoo.tied_stages, setup)
    with torch.no_grad():
        for number, parameter in enumerate(local.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / (number + 1))
    module.load_full_state_dict(local.state_dict())
    state = module.full_state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in local.state_dict().items())
    expected, found = local_step(local, batch), module.train_step(**batch)
    gradients = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
    return {"loss": float((found - expected).abs()), **relative_errors(module.full_gradients(), gradients)}


@pytest.mark.parametrize("setup", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_state_that_is_loaded_is_the_one_that_trains(worlds: Worlds, setup: Setup) -> None:
    for errors in worlds.run(2, round_trip, setup):
        assert max(errors.values()) <= 1e-12, errors


def accumulate(world: World, setup: Setup) -> tuple[float, dict[str, float], dict[str, float]]:
    """Two steps without an optimizer in between, of which the second has fewer rows; and an evaluation before."""
    local, batch, module = pair(zoo.tied_stages, setup)
    with torch.no_grad():
        expected = local(**batch)
    evaluated = float((module.eval_step(**batch) - expected).abs() / expected)
    assert all(p.grad is None for p in module.parameters())
    smaller = {name: tensor[:3] for name, tensor in batch.items()}
    losses = {}
    for name, rows in (("whole", batch), ("smaller", smaller)):
        expected, found = local_step(local, rows), module.train_step(**rows)
        losses[name] = float((found - expected).abs() / expected)
    gradients = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
    return evaluated, losses, relative_errors(module.full_gradients(), gradients)


@pytest.mark.parametrize("setup", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_evaluation_accumulation_and_a_smaller_last_batch(worlds: Worlds, setup: Setup) -> None:
    for evaluated, losses, gradients in worlds.run(2, accumulate, setup):
        assert evaluated <= 1e-12
        assert max(losses.values()) <= 1e-12, losses
        assert max(gradients.values()) <= 1e-12, gradients


def ragged(world: World) -> float:
    """Batches of 12 rows as three micro-batches of 4, then one of 10: 4, 4 and 2."""
    torch.manual_seed(0)
    model, _ = zoo.tied_stages()
    ids = torch.randint(0, 24, (12, 6))
    batch = {"ids": ids, "labels": ids.roll(1, 1)}
    local = copy.deepcopy(model)
    module = parallel(model, batch, Setup(layout={"first": stage(), "second": stage()}, micro_batches=3))
    last = {name: tensor[:10] for name, tensor in batch.items()}
    expected, found = local_step(local, last), module.train_step(**last)
    gradients = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
    errors = relative_errors(module.full_gradients(), gradients)
    return max(float((found - expected).abs() / expected), *errors.values())


def test_a_ragged_last_micro_batch(worlds: Worlds) -> None:
    assert max(worlds.run(2, ragged)) <= 1e-12


# Dropout has no local counterpart: its laws instead


class Masked(nn.Module):
    """Two dropouts: what the first keeps shows in the gradient of ``up``, as the rows of the batch are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64, bias=False)
        self.down = nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.up(x), 0.5, self.training)
        output = nn.functional.dropout(self.down(hidden), 0.5, self.training)
        return output.pow(2).sum()


def masked(rows: int = zoo.ROWS) -> tuple[nn.Module, Any]:
    return Masked().double(), {"x": torch.ones(rows, 8, dtype=torch.float64)}


def dropped(
    world: World, build: Any, setup: Setup, steps: int
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of some steps of SGD, the whole gradients of the last, and this rank's parameters."""
    torch.manual_seed(0)
    model, batch = build()
    model.train()
    module = parallel(model, batch, setup)
    optimizer = sgd(module.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(module.train_step(**batch).item())
        optimizer.step()
    held = {n: p.detach().clone() for n, p in module.named_parameters()}
    return losses, module.full_gradients(), held


def with_seed(setup: Setup, seed: int) -> Setup:
    return Setup(**{**setup.__dict__, "seed": seed, "training": True})


@pytest.mark.parametrize("layout", [{"": replicate()}, {"": split()}], ids=["dp", "tp"])
def test_dropout_is_a_function_of_the_seed_and_of_the_step(worlds: Worlds, layout: Any) -> None:
    runs = [worlds.run(2, dropped, masked, with_seed(Setup(layout=layout), seed), 3)[0][0] for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def gradient_of(world: World, layout: Any, rows: int) -> Tensor:
    """The gradient of ``up``, whose rows are zero where every row of the batch dropped a hidden unit."""
    torch.manual_seed(0)
    model, batch = masked(rows)
    module = parallel(model.train(), batch, Setup(layout=layout, training=True, seed=3))
    module.train_step(**batch)
    return module.full_gradients()["up.weight"]


def test_shards_of_a_dropout_are_independent(worlds: Worlds) -> None:
    gradient = worlds.run(2, gradient_of, {"": split()}, 1)[0]
    first, second = (gradient.abs().sum(1) > 0).chunk(2)  # the hidden units that were kept, by rank
    assert not torch.equal(first, second)


def test_replicas_drop_other_elements(worlds: Worlds) -> None:
    gradient = worlds.run(2, gradient_of, {"": replicate()}, 2)[0]
    untouched = float((gradient.abs().sum(1) == 0).double().mean())
    assert 0.1 < untouched < 0.4  # both rows dropped a unit with probability 1/4; 1/2 if the masks were equal


def test_replicas_of_a_weight_stay_equal_under_dropout(worlds: Worlds) -> None:
    setup = with_seed(Setup(layout={"": split()}, promote=True), 5)
    (first, _, one), (second, _, other) = worlds.run(2, dropped, zoo.gpt2_one_layer_with_dropout, setup, 5)
    assert first == second
    whole = [n for n, p in one.items() if n.split(".")[-2].startswith("ln")]
    assert whole
    assert all(torch.equal(one[n], other[n]) for n in whole)
