"""Batches of other lengths: after two, a step is made of those and not compiled, and is that of the local model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import LAYOUTS, Two, annotated
from tests.largest import largest
from tests.small_models import Decoder, decoder, tokens
from whale.compile import builder
from whale.runtime.launch import World

BOUND = 1e-12


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


class Steps:
    """Steps of a parallel model, each compared with the local one's, and whether it was compiled."""

    def __init__(self, local: nn.Module, parallel: Any) -> None:
        self.local, self.parallel = local, parallel
        self.compiled: list[bool] = []
        self.worst = 0.0

    def run(self, batch: dict[str, Tensor]) -> None:
        with patch.object(builder, "compile_traced", wraps=builder.compile_traced) as compiling:
            loss = self.parallel.train_step(**batch)
        self.compiled.append(compiling.called)
        found = self.parallel.full_gradients()
        self.parallel.zero_grad()
        self.local.zero_grad()
        expected = self.local(**batch)
        expected.backward()
        errors = [loss - expected]
        errors += [found[name] - p.grad for name, p in self.local.named_parameters() if p.grad is not None]
        self.worst = largest(self.worst, *(float(error.abs().max()) for error in errors))

    @property
    def result(self) -> tuple[list[bool], float]:
        return self.compiled, self.worst


def train_on_lengths(
    world: World, kind: str, lengths: list[int], build: Callable[[], nn.Module], options: dict[str, Any]
) -> tuple[list[bool], float]:
    model = build()
    local = copy.deepcopy(model)
    parallel = whale.parallelize(annotated(kind, model), tokens(), device="cpu", timeout_seconds=20, **options)
    steps = Steps(local, parallel)
    for length in lengths:
        steps.run(tokens(length=length))
    return steps.result


def two_layers() -> nn.Module:
    return decoder(layers=2)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_steps_for_a_third_length_are_made_of_two(ranks: Two, kind: str, micro_batches: int) -> None:
    options = {"micro_batches": micro_batches}
    for compiled, worst in ranks.run(train_on_lengths, kind, [6, 8, 9, 17, 3, 2, 9], two_layers, options):
        assert compiled == [False, True, False, False, False, False, False]
        assert worst < BOUND


class Normed(nn.Module):
    """Statistics over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.body(x))), y)


def rows_of_points(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 4, dtype=torch.float64, generator=generator)
    return {"x": x, "y": torch.randint(5, (count,), generator=generator)}


def train_on_rows(world: World, kind: str, is_normed: bool) -> tuple[list[bool], float]:
    torch.manual_seed(0)
    model, batches = (Normed().double(), rows_of_points) if is_normed else (decoder(layers=2), tokens)
    local = copy.deepcopy(model)
    steps = Steps(local, whale.parallelize(annotated(kind, model), batches(8), device="cpu", timeout_seconds=20))
    for rows in [8, 6, 12, 16, 10, 7, 2]:
        steps.run(batches(rows))
    return steps.result


@pytest.mark.parametrize("kind", ["replicate", "split"])
@pytest.mark.parametrize("is_normed", [False, True])
def test_one_micro_batch_has_all_rows_however_many(ranks: Two, kind: str, is_normed: bool) -> None:
    for compiled, worst in ranks.run(train_on_rows, kind, is_normed):
        if kind == "split" and not is_normed:  # ranks do not divide the rows, and numbers are linear in them
            assert compiled == [False, True, *[False] * 5]
        assert worst < BOUND


class Branching(Decoder):
    """Scales its words where there are many."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        if tokens.shape[1] > 10:
            x = 3 * x
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def branching() -> nn.Module:
    torch.manual_seed(0)
    return Branching(layers=2).double()


def test_code_that_asks_for_the_length_is_compiled_for_each_answer(ranks: Two) -> None:
    lengths = [6, 8, 5, 12, 14, 16, 11, 7, 10]
    for compiled, worst in ranks.run(train_on_lengths, "split", lengths, branching, {}):
        assert compiled == [False, True, False, True, True, False, False, False, False]
        assert worst < BOUND


class Windowed(nn.Module):
    """Attends to the last seven words: a causal mask of up to seven, and one of its own beyond."""

    def __init__(self, lowest: float | None = None) -> None:
        super().__init__()
        self.lowest = lowest
        self.embed, self.inner, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.inner(self.embed(tokens))
        places = torch.arange(tokens.shape[1])
        behind = places[:, None] - places
        seen = (behind >= 0) & (behind < 7)
        if self.lowest is not None:
            seen = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, self.lowest)
        heads = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
        x = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def windowed(lowest: float | None = None) -> nn.Module:
    torch.manual_seed(0)
    return Windowed(lowest).double()


@pytest.mark.parametrize("kind", ["replicate", "split"])
@pytest.mark.parametrize("lowest", [None, float("-inf"), torch.finfo(torch.float64).min])
def test_a_mask_is_that_of_each_length(ranks: Two, kind: str, lowest: float | None) -> None:
    build = functools.partial(windowed, lowest)
    for compiled, worst in ranks.run(train_on_lengths, kind, [6, 5, 7, 9, 12, 8, 3, 20], build, {}):
        assert compiled == [False, True, False, True, True, False, False, False]
        assert worst < BOUND


class Unrolled(nn.Module):
    """A recurrent cell in a loop over the words: each length is another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(32, 8), nn.GRUCell(8, 8), nn.Linear(8, 32)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, state = self.embed(tokens), torch.zeros(len(tokens), 8, dtype=torch.float64)
        states = []
        for place in range(tokens.shape[1]):
            state = self.cell(x[:, place], state)
            states.append(state)
        return F.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), labels.flatten())


def unrolled() -> nn.Module:
    torch.manual_seed(0)
    return Unrolled().double()


def test_loops_over_the_words_are_compiled_for_each_length(ranks: Two) -> None:
    for compiled, worst in ranks.run(train_on_lengths, "replicate", [6, 4, 5, 3], unrolled, {}):
        assert compiled == [False, True, True, True]
        assert worst < BOUND


class Translating(nn.Module):
    """Attention from one sequence to another, both of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, source: Tensor, labels: Tensor) -> Tensor:
        read, written = self.embed(source), self.embed(labels.roll(1, 1))
        heads = [
            linear(x).unflatten(2, (4, 4)).transpose(1, 2)
            for linear, x in ((self.query, written), (self.key, read), (self.value, read))
        ]
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        logits = self.out(attended.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_on_two_lengths(world: World, kind: str) -> tuple[list[bool], float]:
    def batch(read: int, written: int) -> dict[str, Tensor]:
        return {"source": tokens(length=read)["tokens"], "labels": tokens(length=written)["labels"]}

    torch.manual_seed(0)
    model = Translating().double()
    local = copy.deepcopy(model)
    whale.annotate(model, {"": whale.split()} if kind == "split" else {"": whale.replicate()})
    steps = Steps(local, whale.parallelize(model, batch(6, 5), device="cpu", timeout_seconds=20))
    for lengths in ((6, 5), (8, 9), (7, 7), (12, 3), (5, 20)):
        steps.run(batch(*lengths))
    return steps.result


@pytest.mark.parametrize("kind", ["replicate", "split"])
def test_two_lengths_vary_independently(ranks: Two, kind: str) -> None:
    for compiled, worst in ranks.run(train_on_two_lengths, kind):
        assert compiled == [False, True, False, False, False]
        assert worst < BOUND


class Scan(nn.Module):
    """Convolutions over a sequence, which can be cut among ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 8, 5, padding=2), nn.Conv1d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) - x).square().mean()


def train_on_cut_lengths(world: World, lengths: list[int]) -> tuple[list[bool], float]:
    def batch(length: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(length)
        return {"x": torch.randn(4, 3, length, generator=generator, dtype=torch.float64)}

    torch.manual_seed(0)
    model = Scan().double()
    local = copy.deepcopy(model)
    whale.annotate(model, {"": whale.split(dim=2)})
    steps = Steps(local, whale.parallelize(model, batch(lengths[0]), device="cpu", timeout_seconds=20))
    for length in lengths:
        steps.run(batch(length))
    return steps.result


def test_cut_lengths_are_made_between_two_where_shares_are_whole(ranks: Two) -> None:
    for compiled, worst in ranks.run(train_on_cut_lengths, [16, 32, 24, 20, 23, 48, 40, 12]):
        assert compiled == [False, True, False, False, True, True, False, True]
        assert worst < BOUND


class Images(nn.Module):
    """Convolutions and a batch norm, whose count of elements is a product of sizes."""

    def __init__(self, is_normed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if is_normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.norm(self.first(x)).relu()).mean((2, 3)) - x.mean((2, 3))).square().sum()


def train_on_images(world: World, is_normed: bool) -> tuple[list[bool], float]:
    def batch(height: int, width: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(height)
        return {"x": torch.randn(4, 3, height, width, generator=generator, dtype=torch.float64)}

    torch.manual_seed(0)
    model = Images(is_normed).double()
    local = copy.deepcopy(model)
    whale.annotate(model, {"": whale.replicate()})
    steps = Steps(local, whale.parallelize(model, batch(8, 8), device="cpu", timeout_seconds=20))
    for sizes in ((8, 8), (12, 12), (10, 10), (9, 14), (16, 8)):
        steps.run(batch(*sizes))
    return steps.result


@pytest.mark.parametrize("is_normed", [False, True])
def test_images_of_other_sizes(ranks: Two, is_normed: bool) -> None:
    for compiled, worst in ranks.run(train_on_images, is_normed):
        assert compiled[:3] == [False, True, is_normed]
        assert worst < BOUND


def train_with_dropout(world: World, lengths: list[int]) -> list[float]:
    model = decoder(layers=2)
    model.head = nn.Sequential(nn.Dropout(0.3), model.head)  # type: ignore[assignment]
    made = whale.parallelize(annotated("split", model), tokens(), device="cpu", timeout_seconds=20, seed=5)
    losses = [made.train_step(**tokens(length=length)).item() for length in lengths]
    if lengths[-1] != lengths[0]:
        with patch.object(builder, "compile_traced", side_effect=AssertionError("compiled")):
            losses.append(made.train_step(**tokens(length=9)).item())
    else:
        losses.append(made.train_step(**tokens(length=9)).item())
    return losses


def test_random_numbers_are_those_of_a_compiled_step(ranks: Two) -> None:
    made, compiled = (ranks.run(train_with_dropout, lengths)[0] for lengths in ([6, 8], [6, 6]))
    assert made[-1] == compiled[-1]


def predict_lengths(world: World) -> list[float]:
    class Logits(Decoder):
        def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return {"logits": self.head(x), "length": tokens.shape[1]}

    torch.manual_seed(0)
    model = Logits(layers=2).double()
    local = copy.deepcopy(model)
    loss: dict[str, Any] = {"loss_fn": lambda output, batch: output["logits"].square().mean()}
    made = whale.parallelize(annotated("stages", model), tokens(), device="cpu", timeout_seconds=20, **loss)
    errors = []
    for length in (6, 8, 11, 4):
        batch = {"tokens": tokens(length=length)["tokens"]}
        found, expected = made.predict_step(**batch), local(**batch)
        assert found["length"] == length
        errors.append(float((found["logits"] - expected["logits"]).abs().max()))
    return errors


def test_outputs_have_the_sizes_of_the_batch(ranks: Two) -> None:
    for errors in ranks.run(predict_lengths):
        assert max(errors) < BOUND


def train_on_local_rows(world: World) -> tuple[list[bool], float]:
    model = decoder(layers=2)
    local = copy.deepcopy(model)
    options: dict[str, Any] = {"device": "cpu", "timeout_seconds": 20, "batch": "local"}
    made = whale.parallelize(annotated("replicate", model), tokens(), **options)
    compiled, worst = [], 0.0
    for length in (6, 8, 11, 4):
        whole = tokens(length=length)
        ((start, stop),) = made.batch_share(8)
        with patch.object(builder, "compile_traced", wraps=builder.compile_traced) as compiling:
            loss = made.train_step(**{name: x[start:stop] for name, x in whole.items()})
        compiled.append(compiling.called)
        worst = largest(worst, abs(loss.item() - local(**whole).item()))
    return compiled, worst


def test_local_batches_of_other_lengths(ranks: Two) -> None:
    for compiled, worst in ranks.run(train_on_local_rows):
        assert compiled == [False, True, False, False]
        assert worst < BOUND


def warnings_of_lengths(world: World, lengths: list[int]) -> list[str]:
    made = whale.parallelize(annotated("replicate"), tokens(), device="cpu", timeout_seconds=20)
    told: list[str] = []
    made._whale.engine.steps._warn = told.append
    for length in lengths:
        made.train_step(**tokens(length=length))
    return told


def test_nothing_is_said_of_lengths_that_cost_nothing(ranks: Two) -> None:
    assert ranks.run(warnings_of_lengths, list(range(6, 14))) == [[], []]


def hooks_after(world: World, lengths: list[int]) -> int:
    made = whale.parallelize(annotated("replicate"), tokens(), device="cpu", timeout_seconds=20)
    for length in lengths:
        made.train_step(**tokens(length=length))
    hooks = [p._post_accumulate_grad_hooks or p._backward_hooks for p in made.parameters()]
    return sum(map(bool, hooks))


def test_steps_leave_no_hooks_on_parameters(ranks: Two) -> None:
    assert ranks.run(hooks_after, [6, 8, 9, 10, 11]) == [0, 0]
