"""Embedding tables with sparse gradients on ranks: sums of looked-up rows, row-wise Adagrad and its checkpoints, each
equal to the local model's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whale
from tests.distributed.parity import Worlds, cluster_of
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import refusal
from whale.commands.automatic import search_inputs
from whale.commands.candidates import CandidateCompiler
from whale.commands.tables import placed_choices
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.optim import RowWiseAdagrad
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


ROWS = (50, 9, 17)


class Clicks(nn.Module):
    """Tables of mixed sizes, of which one skips a padding index and one is looked up twice, and a dense part."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(
            [
                nn.EmbeddingBag(ROWS[0], 6, mode="sum", sparse=sparse),
                nn.EmbeddingBag(ROWS[1], 6, mode="mean", sparse=sparse, padding_idx=2),
                nn.Embedding(ROWS[2], 6, sparse=sparse),
            ]
        )
        self.dense = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        bags = [table(ids[:, number] % ROWS[number]) for number, table in enumerate(self.tables)]
        once = [*bags[:2], bags[2].sum(1), self.tables[2](ids[:, 0, 0] % ROWS[2])]
        return F.binary_cross_entropy_with_logits(self.dense(torch.cat(once, 1)).squeeze(1), clicked)


def batch(rows: int = 10) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (rows, 3, 4), generator=generator)
    return {"ids": ids, "clicked": torch.rand(rows, generator=generator).round().double()}


LAYOUTS: dict[str, Any] = {
    "replicas": {"": whale.replicate()},
    "split": {"tables.*": whale.split(), "dense": whale.replicate()},
    "split twice": {"tables.*": [whale.replicate(2), whale.split(2)], "dense": whale.replicate(4)},
    "a stage of replicas": {"tables": whale.stage(), "dense": [whale.stage(2), whale.replicate()]},
    "tables on ranks": {
        "tables.0": [whale.cluster([0]), whale.stage()],
        "tables.[1-2]": [whale.cluster([1]), whale.stage()],
        "dense": [whale.cluster([0, 1]), whale.stage(), whale.replicate()],
    },
}


def optimizers(model: Any, of_tables: str) -> list[torch.optim.Optimizer]:
    tables = [p for name, p in model.named_parameters() if name.startswith("tables")]
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    made = RowWiseAdagrad if of_tables == "RowWiseAdagrad" else getattr(torch.optim, of_tables)
    return [made(tables, lr=0.1), torch.optim.AdamW(dense, lr=0.01)]


def steps(model: Any, of_tables: str, train: Any, rows: int = 10) -> list[float]:
    found, own = [], optimizers(model, of_tables)
    for _ in range(3):
        found.append(train(**batch(rows)).item())
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()
    return found


def local_step(model: nn.Module) -> Any:
    def step(**given: Tensor) -> Tensor:
        loss: Tensor = model(**given)
        loss.backward()
        return loss

    return step


def both(
    world: World, kind: str, of_tables: str = "RowWiseAdagrad", options: dict[str, Any] | None = None
) -> dict[str, float]:
    """The largest differences of losses, gradients and parameters from the local model's."""
    local = Clicks().double()
    model = copy.deepcopy(local)
    whale.annotate(model, LAYOUTS[kind])
    given = dict(options or {})
    if "speeds" in given:
        given["cluster"] = cluster_of(given.pop("speeds"))
    made: Any = whale.parallelize(model, batch(), device="cpu", timeout_seconds=30, **given)
    expected = local(**batch())
    expected.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # torch's, of its old names
        made.train_step(**batch())
    gradients = made.full_gradients()
    tables = [p for name, p in made.named_parameters() if name.startswith("tables")]
    is_sparse = all(p.grad.is_sparse for p in tables if p.grad is not None)
    own = {name: p.grad.to_dense() for name, p in local.named_parameters() if p.grad is not None}
    found = {"gradients": max(float((gradients[name] - own[name]).abs().max()) for name in own)}
    for each in (local, made):
        each.zero_grad()
    losses = steps(local, of_tables, local_step(local)), steps(made, of_tables, made.train_step)
    state = made.full_state_dict()
    found["losses"] = max(abs(a - b) for a, b in zip(*losses, strict=True))
    found["parameters"] = max(float((state[k] - v).abs().max()) for k, v in local.state_dict().items())
    return {**found, "dense": float(not is_sparse)}


@pytest.mark.parametrize("of_tables", ["RowWiseAdagrad", "SparseAdam"])
@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "split twice"])
def test_sparse_tables_train_as_the_local_ones(worlds: Worlds, kind: str, of_tables: str) -> None:
    for found in worlds.run(3 if kind == "a stage of replicas" else 2, both, kind, of_tables):
        assert max(found.values()) < 1e-12, found


SETTINGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "micro-batches": (2, "replicas", {"micro_batches": 5}),
    "micro-batches of split tables": (2, "split", {"micro_batches": 2}),
    "mixed devices": (2, "replicas", {"speeds": (1e9, 4e9)}),
    "split over mixed devices": (2, "split", {"speeds": (1e9, 3e9)}),
    "three parts": (3, "split", {}),
    "replicas of parts": (4, "split twice", {}),
    "bfloat16 sums": (2, "replicas", {"gradient_dtype": "bf16"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_sparse_tables(worlds: Worlds, name: str) -> None:
    size, kind, options = SETTINGS[name]
    for found in worlds.run(size, both, kind, "RowWiseAdagrad", options):
        bound = 5e-3 if "gradient_dtype" in options else 1e-12
        assert max(value for key, value in found.items() if key != "parameters" or bound < 1e-3) < bound, found


def in_backward(world: World) -> float:
    local = Clicks().double()
    model = copy.deepcopy(local)
    made: Any = whale.parallelize(model, batch(), device="cpu", step_in_backward=True)
    steps(local, "RowWiseAdagrad", local_step(local)), steps(made, "RowWiseAdagrad", made.train_step)
    state = made.full_state_dict()
    return max(float((state[name] - value).abs().max()) for name, value in local.state_dict().items())


def test_rows_are_updated_inside_of_the_backward(worlds: Worlds) -> None:
    assert max(worlds.run(2, in_backward)) < 1e-12


def accumulated(world: World) -> tuple[float, bool]:
    """Gradients of two steps, and whether the second is added to the tensors of the first."""
    local = Clicks().double()
    model = copy.deepcopy(local)
    made: Any = whale.parallelize(model, batch(), device="cpu")
    tables = [p for name, p in made.named_parameters() if name.startswith("tables")]
    for rows in (10, 6):
        local(**batch(rows)).backward()
    made.train_step(**batch())
    before = [p.grad for p in tables]
    made.train_step(**batch(6))
    own = {name: p.grad.to_dense() for name, p in local.named_parameters() if p.grad is not None}
    gradients = made.full_gradients()
    norm = torch.stack([x.norm() for x in own.values()]).norm()
    error = max(float((gradients[name] - own[name]).abs().max()) for name in own)
    return max(error, abs(float(made.clip_grad_norm_(1e9) - norm))), all(
        p.grad is x for p, x in zip(tables, before, strict=True)
    )


def test_sparse_gradients_accumulate_and_have_the_local_norm(worlds: Worlds) -> None:
    for error, is_same in worlds.run(2, accumulated):
        assert error < 1e-12
        assert is_same


def clipped(world: World) -> float:
    local = Clicks().double()
    model = copy.deepcopy(local)
    whale.annotate(model, {"": whale.replicate()})
    made: Any = whale.parallelize(model, batch(), device="cpu")
    made.train_step(**batch())
    local(**batch()).backward()
    own = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in local.parameters() if p.grad is not None]
    norm = torch.stack([x.norm() for x in own]).norm()
    error = abs(float(torch.nn.utils.clip_grad_norm_(made.parameters(), 0.01) - norm))
    after = made.full_gradients()
    for name, parameter in local.named_parameters():
        assert parameter.grad is not None
        expected = parameter.grad.to_dense() * 0.01 / (norm + 1e-6)
        error = max(error, float((after[name] - expected).abs().max()))
    return error


def test_torch_clips_sparse_gradients_of_replicas(worlds: Worlds) -> None:
    assert max(worlds.run(2, clipped)) < 1e-12


class Twice(nn.Module):
    """A table that skips a padding index and is looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 4, sparse=True, padding_idx=1)

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        found = self.table(ids[:, 0]).sum((1, 2)) * self.table(ids[:, 1, 0]).sum(1)
        return F.binary_cross_entropy_with_logits(found, clicked)


def twice(world: World) -> float:
    local = Twice().double()
    made: Any = whale.parallelize(copy.deepcopy(local), batch(), device="cpu")
    local(**batch()).backward()
    made.train_step(**batch())
    assert local.table.weight.grad is not None
    return float((made.full_gradients()["table.weight"] - local.table.weight.grad.to_dense()).abs().max())


def test_two_look_ups_of_a_table_with_a_padding_index_make_one_gradient(worlds: Worlds) -> None:
    assert max(worlds.run(2, twice)) < 1e-12


def tried(world: World) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both(world, "split", "SparseAdam")
    return [str(one.message) for one in caught if "could not be tried" in str(one.message)]


class Scores(nn.Module):
    """Tables of one row, whose vectors are larger than they are, of which one cannot be cut, and an output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(1, columns, sparse=True) for columns in (1, 3))
        self.top = nn.Linear(3, 1)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        scores = torch.cat([table(ids) for table in self.tables], 1).sum(1) + self.top(self.tables[1](ids)).squeeze(1)
        return {"loss": scores.square().mean(), "scores": scores}


def with_outputs(world: World, offload: str) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    model, ids = Scores().double(), torch.zeros(6, dtype=torch.long)
    whale.annotate(model, {"": whale.replicate(), "tables.*": whale.split()})
    made, losses = whale.parallelize(model, ids, offload=offload), []
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for outputs in (False, True, True):
        found = made.train_step(ids, outputs=outputs)
        losses.append((found[0] if outputs else found).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, made.predict_step(ids)["scores"], made.full_state_dict()


@pytest.mark.parametrize("offload", ["none", "tables"])
def test_small_tables_stay_as_they_are_whatever_a_step_returns(worlds: Worlds, offload: str) -> None:
    local, ids, losses = Scores().double(), torch.zeros(6, dtype=torch.long), []
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(3):
        loss = local(ids)["loss"]
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for found, scores, state in worlds.run(2, with_outputs, offload):
        assert found == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(scores, local(ids)["scores"].detach())
        torch.testing.assert_close(state, dict(local.state_dict()))


def test_optimizers_of_sparse_gradients_are_tried_with_such(worlds: Worlds) -> None:
    assert worlds.run(2, tried) == [[], []]


def refused(world: World, options: dict[str, Any]) -> str:
    model = Clicks().double()
    whale.annotate(model, {"": whale.replicate()})
    return refusal(lambda: whale.parallelize(model, batch(), device="cpu", **options))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"zero": 1}, "zero=1"), ({"offload": "state"}, "offload"), ({"reduce": "adasum"}, "reduce='adasum'")],
    ids=str,
)
def test_what_divides_or_combines_whole_gradients_is_refused(
    worlds: Worlds, options: dict[str, Any], says: str
) -> None:
    for message in worlds.run(2, refused, options):
        assert says in message
        assert "tables." in message
        assert "sparse=False" in message


def in_four_steps(made: Any, own: Any, folder: str, first: int = 0) -> dict[str, Tensor]:
    """Whole parameters after four steps, in the middle of which a checkpoint is saved unless they begin there."""
    for number in range(first, 4):
        if number == 2 > first:
            whale.save_checkpoint(folder, made, step=number, tables=own[0], dense=own[1])
            whale.wait_for_checkpoints()
        made.train_step(**batch())
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()
    return dict(made.full_state_dict())


def saved(world: World, kind: str, folder: str) -> dict[str, Tensor]:
    model = Clicks().double()
    whale.annotate(model, LAYOUTS[kind])
    made: Any = whale.parallelize(model, batch(), device="cpu")
    return in_four_steps(made, optimizers(made, "RowWiseAdagrad"), folder)


def resumed(world: World, kind: str, folder: str) -> dict[str, Tensor]:
    """The same of a run that begins in the middle, in another layout."""
    model = Clicks().double()
    whale.annotate(model, LAYOUTS[kind])
    made: Any = whale.parallelize(model, batch(), device="cpu")
    own = optimizers(made, "RowWiseAdagrad")
    whale.load_checkpoint(folder, made, tables=own[0], dense=own[1])
    return in_four_steps(made, own, folder, first=2)


@pytest.mark.parametrize(
    ("before", "after"),
    [("replicas", "split"), ("split", "tables on ranks"), ("tables on ranks", "split"), ("split", "replicas")],
)
def test_states_of_rows_go_through_checkpoints_into_other_layouts(
    worlds: Worlds, before: str, after: str, tmp_path: Path
) -> None:
    expected = worlds.run(2, saved, before, str(tmp_path))[0]
    for found in worlds.run(2, resumed, after, str(tmp_path)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def own_state(world: World, kind: str) -> float:
    """The largest difference after an optimizer's state dict was loaded on its rank."""
    model = Clicks().double()
    whale.annotate(model, LAYOUTS[kind])
    made: Any = whale.parallelize(model, batch(), device="cpu")
    tables, _ = optimizers(made, "RowWiseAdagrad")
    made.train_step(**batch())
    tables.step()
    before = [x["sum"].clone() for x in tables.state.values()]
    tables.load_state_dict(copy.deepcopy(tables.state_dict()))
    return max(float((x["sum"] - y).abs().max()) for x, y in zip(tables.state.values(), before, strict=True) if len(y))


@pytest.mark.parametrize("kind", ["split", "tables on ranks"])
def test_state_dicts_of_rows_load_on_their_rank(worlds: Worlds, kind: str) -> None:
    assert max(worlds.run(2, own_state, kind)) == 0


class BottomFirst(Clicks):
    """A dense part that computes before, between and after the look-ups, as that of DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(3, 6)

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        found = self.bottom(ids[:, :, 0].to(clicked.dtype) / 50)
        for number, table in enumerate(self.tables):
            looked_up = table(ids[:, number] % ROWS[number])
            found = torch.tanh(found) + (looked_up if looked_up.dim() == 2 else looked_up.sum(1))
        return F.binary_cross_entropy_with_logits(found.sum(1), clicked)


def placed(world: World, memory_bytes: int, rows: int, made_by: type[Clicks] = Clicks) -> tuple[float, int]:
    """The error of a model whose tables the planner has placed, and the most ranks of a table that has no replicas."""
    types = [
        DeviceType.of(f"cpu-{rank}", speed={"float32": 1e9}, memory_bytes=size, memory_bandwidth=1e9)
        for rank, size in enumerate([memory_bytes, memory_bytes])
    ]
    cluster = Cluster.of([("node", type_) for type_ in types], intra=Link(bandwidth=1e9, latency=1e-5))
    local = made_by().double()
    model = copy.deepcopy(local)
    annotations = whale.place_tables(local, batch(rows), cluster)
    whale.annotate(model, annotations)
    made: Any = whale.parallelize(model, batch(rows), device="cpu")
    steps(local, "RowWiseAdagrad", local_step(local), rows), steps(made, "RowWiseAdagrad", made.train_step, rows)
    state = made.full_state_dict()
    error = max(float((state[name] - value).abs().max()) for name, value in local.state_dict().items())
    ranks = (nest[0].strategy.devices.ranks for key, nest in annotations.items() if key)  # type: ignore[union-attr]
    return error, max(map(len, ranks), default=0)


@pytest.mark.parametrize(
    ("memory_bytes", "rows", "most"), [(1 << 20, 2, 1), (12_200, 10, 2), (1 << 20, 400, 0)],
    ids=["whole", "cut", "replicas"],
)  # fmt: skip
def test_tables_that_the_planner_places_train_as_the_local_ones(
    worlds: Worlds, memory_bytes: int, rows: int, most: int
) -> None:
    for error, cut in worlds.run(2, placed, memory_bytes, rows):
        assert error < 1e-12
        assert cut == most


def hot(world: World, sparse: bool) -> tuple[float, list[str]]:
    """The error of a model whose hot tables have replicas, and the names of the parameters of this rank."""
    local = Clicks(sparse).double()
    model = copy.deepcopy(local)
    type_ = DeviceType.of("cpu", speed={"float32": 1e9}, memory_bytes=1 << 20, memory_bandwidth=1e9)
    cluster = Cluster.of([("node", type_)] * 2, intra=Link(bandwidth=1e7, latency=1e-5))
    annotations = whale.place_tables(local, batch(200), cluster, optimizer="sgd")
    whale.annotate(model, annotations)
    made: Any = whale.parallelize(model, batch(200), device="cpu")
    kind = "RowWiseAdagrad" if sparse else "SGD"
    steps(local, kind, local_step(local), 200), steps(made, kind, made.train_step, 200)
    state = made.full_state_dict()
    error = max(float((state[name] - value).abs().max()) for name, value in local.state_dict().items())
    return error, [name for name, _ in made.named_parameters()]


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_hot_tables_in_replicas_train_as_the_local_ones(worlds: Worlds, sparse: bool) -> None:
    found = worlds.run(2, hot, sparse)
    assert max(error for error, _ in found) < 1e-12
    everywhere = set.intersection(*({name for name in names if "tables" in name} for _, names in found))
    assert everywhere, "no table has replicas"


def test_tables_are_placed_wherever_the_forward_looks_them_up(worlds: Worlds) -> None:
    for error, cut in worlds.run(2, placed, 1 << 20, 2, BottomFirst):
        assert error < 1e-12
        assert cut == 1


def searched(world: World) -> tuple[float, int]:
    """The error of a model under a plan of the search with its tables in places, and the stages of tables."""
    machines = Cluster.of(
        [
            ("node", DeviceType.of(f"cpu-{n}", speed={"float32": 1e9}, memory_bytes=1 << 20, memory_bandwidth=1e9))
            for n in range(2)
        ],
        intra=Link(bandwidth=1e9, latency=1e-5),
    )
    local = BottomFirst().double()
    trial = CandidateCompiler(copy.deepcopy(local).to("meta"), batch(), name="clicks")
    profile = search_inputs(trial, batch(), machines).profile
    plan = next(placed_choices(trial, profile, machines, batch=10)).plan
    made: Any = whale.parallelize(copy.deepcopy(local), batch(), device="cpu", cluster=machines, plan=plan)
    steps(local, "RowWiseAdagrad", local_step(local)), steps(made, "RowWiseAdagrad", made.train_step)
    state = made.full_state_dict()
    error = max(float((state[name] - value).abs().max()) for name, value in local.state_dict().items())
    return error, sum(len(stage.ranks) == 1 for stage in plan.stages)


def test_plans_of_the_search_with_tables_in_places_train_as_the_local_model(worlds: Worlds) -> None:
    for error, placed_alone in worlds.run(2, searched):
        assert error < 1e-12
        assert placed_alone >= 2
