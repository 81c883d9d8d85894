"""Adasum: gradients of replicas are combined as by the formula of its paper, however the model is divided."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.distributed.parity import Worlds, cluster_of
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import refusal
from tests.small_models import Decoder, decoder, tokens
from whale.runtime.launch import World

BOUND = 1e-12


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


# The reference: Maleki et al., "Scaling distributed training with adaptive summation", section 3


def adasum(gradients: Sequence[Tensor]) -> Tensor:
    """The combination of the gradients of one parameter, in tree order."""
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    a, b = adasum(gradients[:half]), adasum(gradients[half:])
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - dot / (2 * aa) if aa > 0 else 1.0
    right = 1 - dot / (2 * bb) if bb > 0 else 1.0
    return left * a + right * b


def expected(model: nn.Module, batch: dict[str, Tensor], rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The combination for each parameter, where replicas have these rows of the batch."""
    found: list[dict[str, Tensor]] = []
    for own in rows:
        local = copy.deepcopy(model)
        if own:
            local(**{name: x[list(own)] for name, x in batch.items()}).backward()
        found.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in local.named_parameters()})
    return {name: adasum([of[name] for of in found]) for name in found[0]}


class Tied(Decoder):
    """A decoder whose head has the weight of its embedding."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.head.weight = self.embed.weight


class Squares(nn.Module):
    """A regression: its loss is divided by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y)


def ignoring() -> dict[str, Tensor]:
    """A batch with another number of labels that count in every row, and none in one."""
    batch = tokens()
    for row in range(8):
        batch["labels"][row, : row % 7] = -100
    batch["labels"][6] = -100
    return batch


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied(layers=2).double()


def squares() -> nn.Module:
    torch.manual_seed(0)
    return Squares().double()


def points() -> dict[str, Tensor]:
    drawn = torch.randn(8, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return {"x": drawn[:, :6], "y": drawn[:, 6:]}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "decoder": (lambda: decoder(layers=2), tokens),
    "ignoring": (lambda: decoder(layers=2), ignoring),
    "tied": (tied, ignoring),
    "squares": (squares, points),
}


def error(
    world: World,
    name: str,
    rows: Sequence[Sequence[int]],
    layout: dict[str, Any],
    speeds: tuple[float, ...],
    options: dict[str, Any],
) -> tuple[float, float]:
    """The largest errors of gradients, of a step and of two that are accumulated, relative to the largest gradient."""
    build, make = MODELS[name]
    model, batch = build(), make()
    reference = expected(model, batch, rows)
    whole = copy.deepcopy(model)
    loss = whole(**batch).item()
    if layout:
        whale.annotate(model, layout)
    made = whale.parallelize(model, batch, device="cpu", cluster=cluster_of(speeds), **{"reduce": "adasum", **options})
    largest = max(x.abs().max().item() for x in reference.values())
    errors = []
    for times in (1, 2):
        assert abs(made.train_step(**batch).item() - loss) <= BOUND
        found = made.full_gradients()
        assert found.keys() == reference.keys()
        errors.append(max((found[n] - times * x).abs().max().item() for n, x in reference.items()) / largest)
    norm = torch.nn.utils.clip_grad_norm_(made.parameters(), 1e9).item()
    squared = sum((2 * x).square().sum().item() for x in reference.values())
    assert abs(norm - squared**0.5) <= 1e-9 * norm
    return errors[0], errors[1]


def each(*sizes: int) -> list[list[int]]:
    """Rows of replicas, the first *sizes* of a batch, then the next, and so on."""
    return [list(range(start, stop)) for start, stop in pairwise(accumulate(sizes, initial=0))]


HALVES = [[0, 1, 4, 5], [2, 3, 6, 7]]
"""Rows of two replicas in two micro-batches of four."""

SECOND = ("layers.0", "layers.1")
PIPELINED: dict[str, Any] = {"micro_batches": 2}

Case = tuple[int, str, list[list[int]], dict[str, Any], tuple[float, ...], dict[str, Any]]
CASES: dict[str, Case] = {
    "two": (2, "decoder", each(4, 4), {}, (), {}),
    "number": (2, "squares", each(4, 4), {}, (), {}),
    "counts": (2, "ignoring", each(4, 4), {}, (), {}),
    "three": (3, "ignoring", each(3, 3, 2), {}, (), {}),
    "uneven": (3, "ignoring", each(4, 3, 1), {}, (4.0, 3.0, 1.0), {}),
    "uneven number": (3, "squares", each(4, 3, 1), {}, (4.0, 3.0, 1.0), {}),
    "four": (4, "tied", each(2, 2, 2, 2), {}, (), {}),
    "micro-batches": (2, "ignoring", HALVES, {}, (), {"micro_batches": 2}),
    "zero": (3, "ignoring", each(3, 3, 2), {}, (), {"zero": 1, "state_shares": [2, 0, 1]}),
    "parameters": (3, "tied", each(3, 3, 2), {}, (), {"zero": 1, "state_align": "parameter"}),
    "zero 3": (2, "ignoring", each(4, 4), {}, (), {"zero": 3}),
    "tensor": (4, "ignoring", each(4, 4), {"": [whale.replicate(2), whale.split(2)]}, (), {}),
    "stages": (4, "tied", HALVES, {path: [whale.stage(2), whale.replicate()] for path in SECOND}, (), PIPELINED),
    "pipelines": (4, "tied", HALVES, {path: whale.stage(1) for path in SECOND}, (), PIPELINED),
    "owned pipelines": (4, "tied", HALVES, {path: whale.stage(1) for path in SECOND}, (), {**PIPELINED, "zero": 1}),
    "annotated": (2, "decoder", each(4, 4), {"": whale.replicate(reduce="adasum")}, (), {"reduce": None}),
    "offloaded": (2, "decoder", each(4, 4), {}, (), {"offload": "state"}),
    "recomputed": (2, "decoder", each(4, 4), {}, (), {"recompute": "full"}),
}


@pytest.mark.parametrize("name", [name for size in (2, 3, 4) for name in CASES if CASES[name][0] == size])
def test_gradients_are_those_of_the_paper(worlds: Worlds, name: str) -> None:
    size, model, rows, layout, speeds, options = CASES[name]
    for errors in worlds.run(size, error, model, rows, layout, speeds, options):
        assert max(errors) <= BOUND


def rounded(world: World, dtype: str) -> float:
    """The largest error of gradients in low precision, relative to the largest gradient."""
    model, batch = decoder(layers=2).float(), tokens()
    reference = expected(model, batch, each(4, 4))
    option: dict[str, Any] = {"precision" if dtype == "bf16" else "gradient_dtype": "bf16"}
    made = whale.parallelize(model, batch, device="cpu", reduce="adasum", **option)
    made.train_step(**batch)
    found = made.full_gradients()
    assert all(x.dtype == torch.float32 for x in found.values())
    largest = max(x.abs().max().item() for x in reference.values())
    return max((found[n] - x).abs().max().item() for n, x in reference.items()) / largest


@pytest.mark.parametrize("dtype", ["bf16", "sums in bf16"])
def test_low_precision_rounds(worlds: Worlds, dtype: str) -> None:
    assert max(worlds.run(2, rounded, dtype)) < 2e-2


def other_sizes(world: World) -> list[float]:
    """Errors of gradients for batches of other sizes, some of which are not compiled."""
    model, batch = decoder(layers=1), tokens()
    whale.annotate(model, {"": whale.replicate(reduce="adasum")})
    made = whale.parallelize(copy.deepcopy(model), batch, device="cpu")
    errors = []
    for rows in (8, 12, 16, 10, 20):
        batch = tokens(rows)
        batch["labels"][1, 2:] = -100
        half = rows // 2
        reference = expected(model, batch, each(half, half))
        made.train_step(**batch)
        errors.append(max((x - reference[n]).abs().max().item() for n, x in made.full_gradients().items()))
        made.zero_grad()
    return errors


def test_batches_of_other_sizes(worlds: Worlds) -> None:
    assert max(map(max, worlds.run(2, other_sizes))) <= BOUND


def local_rows(world: World) -> float:
    """The error of gradients where each rank brings its own rows."""
    model, batch = decoder(layers=1), ignoring()
    reference = expected(model, batch, each(4, 4))
    made = whale.parallelize(model, batch, device="cpu", batch="local", reduce="adasum")
    made.train_step(**{name: x[4 * world.rank : 4 * world.rank + 4] for name, x in batch.items()})
    return max((x - reference[n]).abs().max().item() for n, x in made.full_gradients().items())


def test_ranks_bring_their_own_rows(worlds: Worlds) -> None:
    assert max(worlds.run(2, local_rows)) <= BOUND


class Normed(nn.Module):
    """A batch norm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


class TwoCounts(Decoder):
    """A loss with two counts."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return super().forward(tokens, labels) + super().forward(tokens, labels.where(labels > 3, -100))


def refusals(world: World) -> list[str]:
    def made(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> str:
        return refusal(lambda: whale.parallelize(model.double(), batch, device="cpu", reduce="adasum", **options))

    two = TwoCounts(layers=1)
    return [
        made(Normed(), points()),
        made(two, tokens()),
        made(decoder(layers=1), tokens(), zero=2, micro_batches=2),
        made(decoder(layers=1), tokens(), step_in_backward=True),
        refusal(lambda: whale.parallelize(decoder(), tokens(), device="cpu", reduce="sum")),  # type: ignore[arg-type]
    ]


def test_what_has_no_gradients_of_replicas_is_refused(worlds: Worlds) -> None:
    norm, counts, zero, backward, unknown = worlds.run(2, refusals)[0]
    assert "each of the mean loss over its own rows, but aten._native_batch_norm" in norm
    assert "use another operator" in norm
    assert "the loss has sums over rows of the batch" in counts and "divided by the same count" in counts
    assert "zero=2 sums gradients in every micro-batch" in zero and "use zero=1, or one micro-batch" in zero
    assert "step_in_backward=True updates parameters before" in backward
    assert "reduce" in unknown and "'adasum'" in unknown


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [((1, 2), (1, 2), (1, 2)), ((1, 0), (0, 3), (1, 3)), ((1, 2), (-1, -2), (0, 0)), ((1, 2), (2, 4), (1.5, 3))],
)
def test_reference_has_the_properties_of_the_paper(
    first: tuple[float, float], second: tuple[float, float], result: tuple[float, float]
) -> None:
    found = adasum([torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)])
    torch.testing.assert_close(found, torch.tensor(result, dtype=torch.float64), rtol=0, atol=1e-15)
