"""Random numbers that depend on nothing else: drawn anew in every step, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import Two, annotated
from whale.errors import CaptureError
from whale.runtime.launch import World

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)
DRAWS: dict[str, Callable[[], Tensor]] = {
    "normal of tensors": lambda: torch.normal(torch.zeros(8, 4), torch.ones(8, 4)),
    "normal with a mean": lambda: torch.normal(0.5, torch.ones(8, 4)),
    "normal_": lambda: torch.empty(8, 4).normal_(),
    "uniform_": lambda: torch.empty(8, 4).uniform_(),
    "random_": lambda: torch.empty(8, 4).random_(9),
    "random_ between": lambda: torch.empty(8, 4).random_(2, 9),
    "exponential_": lambda: torch.empty(8, 4).exponential_(),
    "geometric_": lambda: torch.empty(8, 4).geometric_(0.3),
    "cauchy_": lambda: torch.empty(8, 4).cauchy_().clamp(-3, 3),
    "log_normal_": lambda: torch.empty(8, 4).log_normal_(),
    "bernoulli_": lambda: torch.empty(8, 4).bernoulli_(torch.full((8, 4), 0.5)),
    "bernoulli": lambda: torch.full((8, 4), 0.5).bernoulli(),
    "poisson": lambda: torch.poisson(torch.full((8, 4), 3.0)),
    "binomial": lambda: torch.binomial(torch.full((8, 4), 9.0), torch.full((8, 4), 0.3)),
    "gamma": lambda: torch._standard_gamma(torch.ones(8, 4)),
    "beta": lambda: torch.distributions.Beta(torch.ones(4), torch.ones(4), validate_args=False).sample((8,)),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(8, 4)),
    "dropout": lambda: F.dropout(torch.ones(8, 4)),
    "dropout2d": lambda: F.dropout2d(torch.ones(8, 4, 1, 1)).flatten(1),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(8, 4), training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(8, 4), training=True),
    "rand_like": lambda: torch.rand_like(torch.ones(8, 4)),
    "randint_like": lambda: torch.randint_like(torch.ones(8, 4), 9),
    "randperm": lambda: torch.stack([torch.randperm(4) for _ in range(8)]),
    "multinomial": lambda: torch.multinomial(torch.ones(8, 4), 4),
}


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.draw = nn.Linear(3, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        return ((self.layer(x) + 0.1) * self.draw().double()).square().mean()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


def losses(kind: str, draw: Callable[[], Tensor]) -> list[float]:
    model = Noisy(draw).double()
    whale.annotate(model, {"": whale.replicate() if kind == "replicate" else whale.split()})
    parallel = whale.parallelize(model, X, device="cpu", timeout_seconds=20)
    return [parallel.train_step(X).item() for _ in range(3)]


class LikeActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h * torch.randint_like(h, 9) + torch.randint_like(h, 2, 5) + torch.rand_like(h)).square().mean()


def like_activations(world: World, kind: str) -> list[float]:
    model = annotated(kind, LikeActivations().double())
    parallel = whale.parallelize(model, X, device="cpu", timeout_seconds=20)
    return [parallel.train_step(X).item() for _ in range(3)]


@pytest.mark.parametrize("kind", ["replicate", "split"])
def test_numbers_in_the_shape_of_activations_have_no_gradient(ranks: Two, kind: str) -> None:
    one, other = ranks.run(like_activations, kind)
    assert one == other
    assert len(set(one)) == 3


@pytest.mark.parametrize("name", DRAWS)
def test_one_rank_draws_anew_in_every_step(name: str) -> None:
    assert len(set(losses("replicate", DRAWS[name]))) == 3


def draw_all(world: World, kind: str) -> dict[str, list[float]]:
    found = {}
    for name, draw in DRAWS.items():
        try:
            found[name] = losses(kind, draw)
        except CaptureError as error:
            if "no fake impl" not in str(error):  # its shapes are not known without data
                raise
    return found


@pytest.mark.parametrize("kind", ["replicate", "split"])
def test_ranks_draw_anew_in_every_step(ranks: Two, kind: str) -> None:
    one, other = ranks.run(draw_all, kind)
    assert one == other
    assert DRAWS.keys() - one.keys() <= {"binomial", "beta"}
    for drawn in one.values():
        assert len(set(drawn)) == 3
