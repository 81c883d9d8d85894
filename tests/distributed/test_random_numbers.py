"""Random numbers that depend on nothing else: drawn anew in every step, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import Two, annotated
from whale.cli.model_loader import load_model
from whale.errors import CaptureError, UsageError
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
    "bernoulli_ of one half": lambda: torch.empty(8, 4).bernoulli_(),
    "bernoulli": lambda: torch.full((8, 4), 0.5).bernoulli(),
    "poisson": lambda: torch.poisson(torch.full((8, 4), 3.0)),
    "binomial": lambda: torch.binomial(torch.full((8, 4), 9.0), torch.full((8, 4), 0.3)),
    "gamma": lambda: torch._standard_gamma(torch.ones(8, 4)),
    "beta": lambda: torch.distributions.Beta(torch.ones(4), torch.ones(4), validate_args=False).sample((8,)),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(8, 4)),
    "dropout": lambda: F.dropout(torch.ones(8, 4)),
    "normal of sizes": lambda: torch.normal(0.5, 2.0, (8, 4)),
    "uniform_ for each row": lambda: torch.empty(8, 1).uniform_(-1, 1),
    "normal_ for each column": lambda: torch.empty(4).normal_(),
    "dropout1d": lambda: F.dropout1d(torch.ones(8, 4, 3)).mean(-1),
    "dropout2d": lambda: F.dropout2d(torch.ones(8, 4, 1, 1)).flatten(1),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(torch.ones(8, 4, 3), training=True).mean(-1),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(8, 4), training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(8, 4), training=True),
    "rand_like": lambda: torch.rand_like(torch.ones(8, 4)),
    "randint_like": lambda: torch.randint_like(torch.ones(8, 4), 9),
    "randperm": lambda: torch.randperm(40)[:4].expand(8, 4),
    "multinomial": lambda: torch.multinomial(torch.ones(8, 4), 4),
    "multinomial with replacement": lambda: torch.multinomial(torch.ones(8, 4), 4, replacement=True),
    "student's t": lambda: torch.distributions.StudentT(torch.full((8, 4), 5.0)).sample().clamp(-3, 3),
    "categories": lambda: torch.distributions.OneHotCategorical(logits=torch.zeros(8, 4)).sample(),
    "laplace": lambda: torch.distributions.Laplace(torch.zeros(8, 4), torch.ones(8, 4)).sample(),
}


WHOLE = ("poisson", "binomial", "gamma", "beta", "student's t")
"""They have no formula for one number from one uniform number."""
BY_POSITION = tuple(name for name in DRAWS if name not in WHOLE)
ALONE = {"laplace", "categories", "random_ between"}
TOGETHER = (tuple(name for name in BY_POSITION if name not in ALONE), *((name,) for name in sorted(ALONE)))
"""Draws of one model each: torch.export takes some only without others beside them."""


class Noisy(nn.Module):
    def __init__(self, *draws: Callable[[], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.draws = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)]), draws

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x)) + 0.1
        return torch.stack([(x * draw().double()).square().mean() for draw in self.draws]).sum()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


NOISY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicas": ({"": whale.replicate()}, {}),
    "split": ({"": whale.split()}, {}),
    "replicas, micro-batches": ({"": whale.replicate()}, {"micro_batches": 2}),
    "stages": ({"layers.0": whale.stage(), "layers.1": whale.stage()}, {"micro_batches": 2}),
}


def losses(names: tuple[str, ...], annotations: dict[str, Any], **options: Any) -> list[float]:
    model = Noisy(*(DRAWS[name] for name in names)).double()
    if annotations:
        whale.annotate(model, annotations)
    parallel = whale.parallelize(model, X, device="cpu", timeout_seconds=20, **options)
    return [parallel.train_step(X).item() for _ in range(2)]


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


class Dropping(nn.Module):
    """Dropout of rows, of a hidden dim that ranks split, of attention's shape, of a weight, in place, and of whole
    rows, as of a residual path."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)])
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.layers[0](x), 0.3)
        x = F.dropout(F.gelu(self.layers[1](x)), 0.5) * F.dropout(self.scale, 0.2)
        x = F.dropout(self.layers[2](x).view(-1, 2, 8).transpose(0, 1), 0.4).transpose(0, 1).flatten(1)
        x = x * x.new_empty(x.shape[0], 1).bernoulli_(0.7)
        return F.dropout(self.layers[3](x), 0.1, inplace=True).square().mean()


def dropping_layers() -> tuple[nn.Module, dict[str, Any]]:
    return Dropping(), {"x": X}


def dropping_attention() -> tuple[nn.Module, dict[str, Any]]:
    """A GPT with dropout of embeddings, in its causal attention and after it."""
    torch.manual_seed(0)
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "seq": 6, "vocab": 20, "dropout": 0.3}
    loaded = load_model("examples/models/gpt.py:gpt", {**sizes, "batch_size": 8}, device="cpu")
    return loaded.model, loaded.batch


MODELS = {"layers": dropping_layers, "attention": dropping_attention}

DROPPING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicas": ({"": whale.replicate()}, {}),
    "replicas, micro-batches": ({"": whale.replicate()}, {"micro_batches": 4}),
    "split": ({"layers.[1-2]": whale.split(), "": whale.replicate()}, {}),
    "stages": ({"layers.[0-1]": whale.stage(), "layers.[2-3]": whale.stage()}, {"micro_batches": 2}),
}
STAGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicas, micro-batches": DROPPING["replicas, micro-batches"],
    "split layers": ({"layers.1": whale.split(), "": whale.replicate()}, {}),
    "stages of layers": ({"layers.0": whale.stage(), "layers.1": whale.stage()}, {"micro_batches": 2}),
}
ALONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gathered keys": ({"": whale.split(dim=1, attention="gather")}, {}),
    "exchanged heads": ({"": whale.split(dim=1, attention="ulysses")}, {"micro_batches": 2}),
}
"""Layouts of a sequence."""


def dropping(world: World | None, model: str, name: str) -> tuple[list[float], dict[str, Tensor]]:
    annotations, options = (DROPPING | STAGED | ALONG)[name]
    made, batch = MODELS[model]()
    if world is not None:
        whale.annotate(made, annotations)
    parallel = whale.parallelize(made.double(), batch, device="cpu", timeout_seconds=20, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    found = []
    for rows in (8, 8, 2):  # two are one micro-batch, where there are several otherwise
        optimizer.zero_grad()
        found.append(parallel.train_step(**{name: x[:rows] for name, x in batch.items()}).item())
        optimizer.step()
    return found, parallel.full_gradients()


@pytest.mark.parametrize("model", ["layers", "attention"])
def test_dropout_is_the_same_in_every_layout(ranks: Two, model: str) -> None:
    alone = dropping(None, model, "replicas, micro-batches")
    assert len(set(alone[0])) == 3
    for name in DROPPING if model == "layers" else [*STAGED, *ALONG]:
        for losses, gradients in ranks.run(dropping, model, name):
            torch.testing.assert_close(losses, alone[0], rtol=1e-12, atol=0, msg=name)
            torch.testing.assert_close(gradients, alone[1], rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("name", DRAWS)
def test_one_rank_draws_anew_in_every_step(name: str) -> None:
    assert len(set(losses((name,), {}))) == 2


def draw_whole(world: World, kind: str) -> dict[str, list[float] | str]:
    found: dict[str, list[float] | str] = {}
    annotations, options = NOISY[kind]
    for name in WHOLE:
        try:
            found[name] = losses((name,), annotations, **options)
        except (CaptureError, UsageError) as error:
            found[name] = str(error)
    return found


def draw_by_position(world: World, kind: str) -> list[list[float]]:
    annotations, options = NOISY[kind]
    return [losses(names, annotations, **options) for names in TOGETHER]


@cache
def drawn_alone() -> list[list[float]]:
    return [losses(names, {}, micro_batches=2) for names in TOGETHER]


@pytest.mark.parametrize("kind", NOISY)
def test_numbers_are_the_same_in_every_layout(ranks: Two, kind: str) -> None:
    for found in ranks.run(draw_by_position, kind):
        for own, alone in zip(found, drawn_alone(), strict=True):
            assert own == pytest.approx(alone, rel=1e-7)


@pytest.mark.parametrize("kind", NOISY)
def test_numbers_of_the_whole_batch_are_equal_on_all_ranks_or_refused(ranks: Two, kind: str) -> None:
    one, other = ranks.run(draw_whole, kind)
    assert one == other
    for name, found in one.items():
        if isinstance(found, list):
            assert len(set(found)) == 2, name
        else:
            assert "draws random numbers of the whole batch" in found or "no fake impl" in found, found
