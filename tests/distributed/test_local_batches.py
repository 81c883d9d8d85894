"""Local batches: each rank brings the rows that it computes on, and the step is that of the concatenated batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import whale
from tests.distributed import spatial
from tests.distributed.parity import Worlds, cluster_of, relative_errors
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import refusal
from tests.small_models import decoder, tokens
from whale.runtime.launch import World

BOUND = 1e-12


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def masked(rows: int, length: int = 6) -> dict[str, Tensor]:
    """Tokens with labels that do not count, unlike many in each row."""
    batch = tokens(rows, length)
    generator = torch.Generator().manual_seed(rows)
    ignored = torch.rand(rows, length, generator=generator) < torch.linspace(0, 0.8, rows)[:, None]
    return {**batch, "labels": batch["labels"].masked_fill(ignored, -100)}


class Normed(nn.Module):
    """Statistics over all rows, a weight for each class, and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.body(x))), y, weight)


class Halves(nn.Module):
    """It compares the first half of the rows with the second: rows are not computed alone, nor in the batch's order."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        first, second = self.body(x).view(2, -1, 3)
        return F.cross_entropy(first - second, y.view(2, -1)[0] % 3, weight[:3])


def halves() -> nn.Module:
    torch.manual_seed(0)
    return Halves().double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed().double()


def pictures(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(5, (rows,), generator=generator)
    return {"x": x, "y": y, "weight": torch.linspace(0.5, 2, 5, dtype=torch.float64)}


def two_layers() -> nn.Module:
    return decoder(layers=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Mapping[str, Any]
    batches: tuple[dict[str, Tensor], ...]
    build: Callable[[], nn.Module] = two_layers
    speeds: tuple[float, ...] = ()
    micro_batches: int = 1


def rows_of(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows, in the order of its share."""
    rows = len(next(iter(batch.values())))
    share = model.batch_share(rows)
    index = torch.tensor([row for first, stop in share for row in range(first, stop)], dtype=torch.long)
    return {name: x[index] if len(x) == rows else x for name, x in batch.items()}


def gathered_by(model: Any) -> set[str]:
    """Leaves that the model's last step gathered."""
    return set(list(model._whale.engine.steps._steps.values())[-1].gathered)


def steps(world: World, case: Case) -> tuple[list[int], float, set[str]]:
    """The rows that the rank brought, the largest error of losses, gradients and buffers, and the gathered leaves."""
    local, model = case.build(), case.build()
    whale.annotate(model, case.layout)
    parallel = whale.parallelize(
        model,
        case.batches[0],
        cluster=cluster_of(case.speeds),
        micro_batches=case.micro_batches,
        device="cpu",
        batch="local",
        timeout_seconds=20,
    )
    brought: list[int] = []
    errors: list[float] = []
    gathered: set[str] = set()
    for batch in case.batches:
        own = rows_of(parallel, batch)
        brought.append(len(next(iter(own.values()))))
        local.zero_grad()
        parallel.zero_grad()
        expected = local(**batch)
        expected.backward()
        found = parallel.train_step(**own) if brought[-1] else parallel.train_step()
        gathered |= gathered_by(parallel) if len(next(iter(batch.values()))) > 1 else set()  # one row has no parts
        errors.append(float((found - expected).abs() / expected.abs()))
        gradients = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        errors += relative_errors(parallel.full_gradients(), gradients).values()
    if local.state_dict().keys() - dict(local.named_parameters()).keys():  # running statistics
        own = rows_of(parallel, case.batches[0])
        errors.append(float((parallel.eval_step(**own) - local.eval()(**case.batches[0])).abs()))
    state = parallel.full_state_dict()
    errors += [float((state[n].double() - b.double()).abs().max()) for n, b in local.named_buffers()]
    return brought, max(errors), gathered


TOKENS = (masked(8), masked(7), masked(8, 4), masked(1), masked(20))
TWO = {
    "uneven": Case(layout={"": whale.replicate()}, speeds=(3.0, 1.0), batches=TOKENS),
    "micro-batches": Case(layout={"": whale.replicate()}, speeds=(3.0, 1.0), micro_batches=2, batches=TOKENS),
    "statistics": Case(
        layout={"": whale.replicate()},
        build=normed,
        speeds=(3.0, 1.0),
        batches=(pictures(8), pictures(7), pictures(12)),
    ),
    "rows with each other": Case(
        layout={"": whale.replicate()}, build=halves, speeds=(3.0, 1.0), batches=(pictures(8), pictures(6), pictures(2))
    ),
    "a head over both": Case(layout={"": whale.replicate(), "head": whale.split()}, batches=TOKENS[:2]),
    "split": Case(layout={"": whale.split()}, batches=TOKENS[:2]),
    "stages": Case(layout={"layers.0": whale.stage(), "layers.1": whale.stage()}, micro_batches=2, batches=TOKENS[:3]),
}

GATHERED = {"rows with each other": {"x", "y"}, "a head over both": {"labels"}}
"""Leaves of which ranks read rows of others; sums over rows need none."""


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_step_as_one_with_all_rows(worlds: Worlds, name: str) -> None:
    found = worlds.run(2, steps, TWO[name])
    for _, error, gathered in found:
        assert error <= BOUND
        assert gathered == GATHERED.get(name, set())
    brought = [rows for rows, _, _ in found]
    if name == "uneven":
        assert brought == [[6, 5, 6, 1, 15], [2, 2, 2, 0, 5]]
    if name == "a head over both":
        assert brought == [[4, 4], [4, 3]]
    if name in ("split", "stages"):
        assert brought[0] == brought[1] == [len(batch["tokens"]) for batch in TWO[name].batches]


FOUR = {
    "dp x tp": Case(layout={"": [whale.replicate(2), whale.split(2)]}, batches=(TOKENS[0], TOKENS[3])),
    "stages of 1 and 3": Case(
        layout={"layers.0": whale.stage(1), "layers.1": [whale.stage(3), whale.replicate()]},
        micro_batches=2,
        batches=TOKENS[:2],
    ),
}


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_step_as_one_with_all_rows(worlds: Worlds, name: str) -> None:
    found = worlds.run(4, steps, FOUR[name])
    brought = [rows for rows, _, _ in found]
    for _, error, gathered in found:
        assert error <= BOUND
        assert gathered == set()
    if name == "dp x tp":
        assert brought == [[4, 1], [4, 1], [4, 0], [4, 0]]
    else:
        assert brought == [[8, 7], [4, 3], [2, 2], [2, 2]]


# --- what is refused --------------------------------------------------------------------------------------------------


def refusals(world: World, layout: Mapping[str, Any], batches: list[list[dict[str, Tensor]]]) -> list[str]:
    """Messages with which batches are refused; empty for one that is not."""
    model = two_layers()
    whale.annotate(model, layout)
    parallel = whale.parallelize(model, tokens(), device="cpu", batch="local", timeout_seconds=20)
    found = []
    for by_rank in batches:
        try:
            parallel.train_step(**by_rank[world.rank])
            found.append("")
        except whale.WhaleError as error:
            found.append(str(error))
    return found


def test_other_rows_than_a_rank_s_share_are_refused(worlds: Worlds) -> None:
    four, three = tokens(4), tokens(3)
    unlike = {"tokens": four["tokens"], "labels": three["labels"]}
    wrong = [[three, four], [four, tokens(4, 5)], [four, unlike], [{}, {}], [four, three]]
    for messages in worlds.run(2, refusals, {"": whale.replicate()}, wrong):
        assert "rank 0 brought 3 rows, but its share of this global batch of 7 rows is 4" in messages[0]
        assert "rank 1 brought a batch of tokens (rows, 5) int64" in messages[1]
        assert "pad all to one length" in messages[1]
        assert "rank 1 brought a batch whose leaves labels, tokens do not have the same number of rows" in messages[2]
        assert "no rank brought a row of labels, tokens" in messages[3]
        assert messages[4] == ""


def rows_under_another_name(world: World, before: int) -> str:
    """The refusal of rows that the example gives as a keyword, and the step by position, after steps."""
    model = two_layers()
    parallel = whale.parallelize(model, tokens(2), device="cpu", batch="local", timeout_seconds=20)
    row = {name: x[world.rank : world.rank + 1] for name, x in tokens(2).items()}
    for _ in range(before):
        parallel.eval_step(**row)
    return refusal(lambda: parallel.eval_step(row["tokens"], labels=row["labels"]))


@pytest.mark.parametrize("before", [0, 20])
def test_rows_under_another_name_than_the_example_s_are_refused(worlds: Worlds, before: int) -> None:
    for message in worlds.run(2, rows_under_another_name, before):
        assert message.startswith("ranks 0 and 1 brought other values in args[0], which must be the same on all ranks")
        assert "in the example batch labels, tokens have rows" in message


def test_ranks_that_split_a_model_bring_the_same_rows(worlds: Worlds) -> None:
    batch = tokens(4)
    rolled = {name: x.roll(1, 0) for name, x in batch.items()}
    for messages in worlds.run(2, refusals, {"": whale.split()}, [[batch, rolled], [batch, tokens(3)]]):
        assert "ranks 0 and 1 compute on the same 4 rows of the global batch, but brought others" in messages[0]
        assert "rank 1 brought 3 rows, but its share of this global batch of 4 rows is 4" in messages[1]


def bring_the_same(world: World) -> list[str]:
    model = two_layers()
    whale.annotate(model, {"": whale.replicate()})
    parallel = whale.parallelize(model, tokens(), device="cpu", batch="local", timeout_seconds=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel.train_step(**tokens())
    return [str(warning.message) for warning in caught if "batch=" in str(warning.message)]


def test_a_warning_for_the_global_batch_on_every_rank(worlds: Worlds) -> None:
    (message,), none = worlds.run(2, bring_the_same)
    assert "every rank brought the same 8 rows, so that a step computes each row 2 times" in message
    assert none == []


# --- outputs ----------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        output = self.head(x)
        return output if y is None else (F.mse_loss(output, y), output)


def see_outputs(world: World) -> float:
    torch.manual_seed(0)
    local, x, y = Head().double(), torch.randn(7, 4).double(), torch.randn(7, 3).double()
    model = copy.deepcopy(local)
    whale.annotate(model, {"": whale.replicate()})
    parallel = whale.parallelize(
        model, {"x": x, "y": y}, cluster=cluster_of((3.0, 1.0)), device="cpu", batch="local", timeout_seconds=20
    )
    own = rows_of(parallel, {"x": x, "y": y})
    _, (_, found) = parallel.train_step(**own, outputs=True)
    return max(float((each - local(x)).abs().max()) for each in (found, parallel.predict_step(x=own["x"])))


def test_outputs_are_those_of_the_rows_of_all_ranks(worlds: Worlds) -> None:
    assert max(worlds.run(2, see_outputs)) <= BOUND


# --- datasets ---------------------------------------------------------------------------------------------------------


class Noted(Dataset[dict[str, Tensor]]):
    """It notes which rows are read."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch, self.read = batch, list[int]()

    def __len__(self) -> int:
        return len(self.batch["tokens"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {name: x[index] for name, x in self.batch.items()}


def train(world: World, mode: str) -> tuple[list[float], list[int]]:
    """An epoch of a shuffled dataset: its losses, and which rows the rank read."""
    model = two_layers()
    whale.annotate(model, {"": whale.replicate()})
    parallel = whale.parallelize(model, tokens(), cluster=cluster_of((3.0, 1.0)), device="cpu", batch=mode)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    dataset, losses = Noted(masked(17)), []
    for batch in whale.shard_dataset(dataset, parallel, shuffle=True):
        losses.append(parallel.train_step(**batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, dataset.read


def test_a_rank_reads_its_share_of_a_dataset_alone(worlds: Worlds) -> None:
    expected, read = worlds.run(2, train, "global")[0]
    assert len(expected) == 3
    assert sorted(read) == list(range(17))
    found = worlds.run(2, train, "local")
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=BOUND)
    first, second = (read for _, read in found)
    assert [len(first), len(second)] == [6 + 6 + 1, 2 + 2 + 1]  # one to know how a batch without rows looks
    assert {*first, *second} == set(range(17))


# --- parts of samples -------------------------------------------------------------------------------------------------

SPLIT: dict[str, tuple[Any, Any, int]] = {
    "volume": (spatial.unet3d_of_two, {"": whale.split(dim=2)}, 2),
    "replicas of slabs": (spatial.cosmoflow, {"": [whale.replicate(2), whale.split(dim=2)]}, 4),
    "sequence": (spatial.gpt, {"": whale.split(dim=1)}, 2),
}


def train_on_parts(world: World, name: str) -> tuple[float, dict[str, int], str, set[str]]:
    """The largest error, how many elements of each leaf the rank read, what whole samples are refused with, and the
    gathered leaves."""
    build, layout, _ = SPLIT[name]
    torch.manual_seed(0)
    local, batch = build()
    model = copy.deepcopy(local)
    whale.annotate(model, layout)
    parallel = whale.parallelize(model, batch, device="cpu", batch="parts", timeout_seconds=20)
    read = dict.fromkeys(batch, 0)

    def reader(index: int, parts: Any) -> dict[str, Tensor]:
        sample = {}
        for leaf, x in batch.items():
            sample[leaf] = x[index]
            for dim, ranges in enumerate(parts.get(leaf, ())):
                sample[leaf] = torch.cat([sample[leaf].narrow(dim, a, b - a) for a, b in ranges], dim)
            read[leaf] += sample[leaf].numel()
        return sample

    rows = len(next(iter(batch.values())))
    (own,) = whale.shard_dataset(range(rows), parallel, reader=reader)
    expected = local(**batch)
    expected.backward()
    found = parallel.train_step(**own)
    gradients = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
    errors = relative_errors(parallel.full_gradients(), gradients)
    message = ""
    try:
        parallel.train_step(**rows_of(parallel, batch))
    except whale.WhaleError as error:
        message = str(error)
    return max(float((found - expected).abs()), *errors.values()), read, message, gathered_by(parallel)


@pytest.mark.parametrize("name", SPLIT)
def test_ranks_read_parts_of_samples(worlds: Worlds, name: str) -> None:
    build, _, size = SPLIT[name]
    whole = {leaf: x.numel() for leaf, x in build()[1].items()}
    found = worlds.run(size, train_on_parts, name)
    for error, _, message, gathered in found:
        assert error <= BOUND
        assert gathered == set()
        assert "rank 0 brought samples of other sizes than its parts" in message
        assert "model.sample_share()" in message
    for leaf, elements in whole.items():
        times = 2 if leaf == "targets" else 1  # it has no depth
        assert sum(read[leaf] for _, read, _, _ in found) == times * elements
