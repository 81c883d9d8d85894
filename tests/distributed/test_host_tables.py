"""Embedding tables in the host's memory: steps equal the local model's, and look-ups are parts of graphs that compute
there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whale
from tests.distributed.parity import Worlds, cluster_of
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.test_tables import ROWS, Clicks, batch, in_four_steps, local_step, optimizers, steps
from tests.distributed.two_ranks import refusal
from tests.replays import CpuRecorder
from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster, DeviceType, HostMemory, Link
from whale.runtime import cuda_graphs
from whale.runtime.at_host import AtHost
from whale.runtime.derivative import OnTape
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


class Views(nn.Module):
    """Tables of mixed kinds: bags with weights that are trained, bags that begin where offsets say, rows of a padding
    index, and one that is looked up twice."""

    def __init__(self, columns: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(
            [
                nn.EmbeddingBag(ROWS[0], columns, mode="sum", sparse=True),
                nn.EmbeddingBag(ROWS[1], columns, mode="mean", sparse=True, padding_idx=2),
                nn.Embedding(ROWS[2], columns, sparse=True, padding_idx=1),
            ]
        )
        self.dense = nn.Sequential(nn.Linear(4 * columns, 8), nn.ReLU(), nn.Linear(8, 1))
        self.weights = nn.Linear(4, 4)

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        weights = self.weights(ids[:, 0].to(clicked.dtype) / 50)
        once = [
            self.tables[0](ids[:, 0], per_sample_weights=weights),
            self.tables[1](ids[:, 1] % ROWS[1]),
            self.tables[2](ids[:, 2] % ROWS[2]).sum(1),
            self.tables[2](ids[:, 0, 0] % ROWS[2]),
        ]
        return F.binary_cross_entropy_with_logits(self.dense(torch.cat(once, 1)).squeeze(1), clicked)


def odd() -> nn.Module:
    return Views(5)


HOST: dict[str, Any] = {"offload": "tables"}
LAYOUTS: dict[str, Any] = {
    "replicas": {"": whale.replicate(**HOST)},
    "parts": {"tables.*": whale.split(), "dense": whale.replicate(**HOST), "weights": whale.replicate()},
    "a stage": {"tables": whale.stage(**HOST), "dense": [whale.stage(2), whale.replicate()]},
    "places": {
        "tables.0": [whale.cluster([0]), whale.stage(**HOST)],
        "tables.1": [whale.cluster([1]), whale.stage()],
        "tables.2": [whale.cluster([0, 1]), whale.stage(**HOST), whale.split()],
        "dense": [whale.cluster([0, 1]), whale.stage(), whale.replicate()],
    },
}


def parallel(local: nn.Module, kind: str, **options: Any) -> Any:
    model = copy.deepcopy(local)
    whale.annotate(model, LAYOUTS[kind])
    if "speeds" in options:
        options["cluster"] = cluster_of(options.pop("speeds"))
    return whale.parallelize(model, batch(), device="cpu", timeout_seconds=30, **options)


def looks(model: Any) -> tuple[int, int]:
    """The numbers of look-ups of a rank that compute at the host, and of those elsewhere."""
    at_host = elsewhere = 0
    step = next(iter(model._whale.engine.steps._steps.values()))
    for stage in step.stages:
        forward = stage.programs[0].derivative.forward
        on_tape: list[Any] = [x.call for x in forward.root.children() if isinstance(x, OnTape)]
        at_host += sum(isinstance(call.module, AtHost) for call in on_tape)
        called = [str(node.target) for node in forward.graph.nodes] + [str(call.target) for call in on_tape]
        elsewhere += sum("embedding" in name for name in called if not name.startswith(("p_", "AtHost")))
    return at_host, elsewhere


def both(
    world: World, kind: str, of_tables: str, options: dict[str, Any] | None = None, made_by: Any = Views
) -> tuple[dict[str, float], tuple[int, int]]:
    """The largest differences of losses, gradients and parameters from the local model's, and what looks up where."""
    local = made_by().double()
    made = parallel(local, kind, **options or {})
    local(**batch()).backward()
    made.train_step(**batch())
    gradients = made.full_gradients()
    own = {name: p.grad.to_dense() for name, p in local.named_parameters() if p.grad is not None}
    found = {"gradients": max(float((gradients[name] - own[name]).abs().max()) for name in own)}
    norm = torch.stack([x.norm() for x in own.values()]).norm()
    found["norm"] = abs(float(made.clip_grad_norm_(1e9) - norm))
    for each in (local, made):
        each.zero_grad()
    losses = steps(local, of_tables, local_step(local)), steps(made, of_tables, made.train_step)
    found["losses"] = max(abs(a - b) for a, b in zip(*losses, strict=True))
    with torch.no_grad():
        found["evaluated"] = abs(float(made.eval_step(**batch(3)) - local(**batch(3))))
    state = made.full_state_dict()
    found["parameters"] = max(float((state[k] - v).abs().max()) for k, v in local.state_dict().items())
    return found, looks(made)


@pytest.mark.parametrize("of_tables", ["RowWiseAdagrad", "SparseAdam", "SGD", "Adagrad"])
def test_replicas_of_tables_on_hosts_train_as_the_local_ones(worlds: Worlds, of_tables: str) -> None:
    for found, looked_up in worlds.run(2, both, "replicas", of_tables):
        assert max(found.values()) < 1e-12, found
        assert looked_up == (4, 0)


SETTINGS: dict[str, tuple[int, str, dict[str, Any], Any]] = {
    "columns": (2, "parts", {}, Views),
    "rows": (2, "parts", {}, odd),
    "three parts": (3, "parts", {}, Views),
    "a stage": (3, "a stage", {}, Views),
    "places": (2, "places", {}, Views),
    "micro-batches": (2, "replicas", {"micro_batches": 5}, Views),
    "mixed devices": (2, "replicas", {"speeds": (1e9, 4e9)}, Views),
    "recompute": (2, "replicas", {"recompute": "full"}, Views),
    "zero bubble": (3, "a stage", {"schedule": "zero_bubble", "micro_batches": 2}, Views),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_layouts_of_tables_on_hosts_train_as_the_local_ones(worlds: Worlds, name: str) -> None:
    size, kind, options, made_by = SETTINGS[name]
    found = worlds.run(size, both, kind, "RowWiseAdagrad", options, made_by)
    for errors, _ in found:
        assert max(errors.values()) < 1e-12, errors
    assert sum(at_host for _, (at_host, _) in found) > 0
    assert sum(elsewhere for _, (_, elsewhere) in found) == (1 if name == "places" else 0)


def sums_at_host(world: World) -> int:
    """The number of sums that compute at the host: of three bags, and of the rows that count in one."""
    made = parallel(Views().double(), "replicas")
    (stage,) = next(iter(made._whale.engine.steps._steps.values())).stages
    inside = [x.code.graph for x in stage.programs[0].micro_batch.code.root.children() if isinstance(x, AtHost)]
    return sum("sum" in str(node.target) for graph in inside for node in graph.nodes)


def test_a_bag_is_summed_where_its_rows_are(worlds: Worlds) -> None:
    assert worlds.run(2, sums_at_host) == [4, 4]


class Begun(nn.Module):
    """A bag that begins where offsets say, whose operator has several results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.EmbeddingBag(9, 4, mode="sum", sparse=True)
        self.dense = nn.Linear(4, 1)

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        offsets = torch.arange(0, ids.numel(), 3, device=ids.device) * 1
        return F.mse_loss(self.dense(self.tables(ids.reshape(-1), offsets)).squeeze(1), clicked)


def bags_at_offsets(world: World) -> float:
    torch.manual_seed(1)
    given = {"ids": torch.randint(9, (6, 3)), "clicked": torch.rand(6).double()}
    local = Begun().double()
    made: Any = whale.parallelize(copy.deepcopy(local), given, device="cpu", offload="tables")
    error = 0.0
    for _ in range(2):
        loss = local(**given)
        loss.backward()
        error = max(error, abs(float(made.train_step(**given) - loss)))
        for model in (local, made):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    return error


@pytest.mark.filterwarnings("ignore:no axis rule")
def test_bags_that_begin_at_offsets_are_looked_up_at_the_host(worlds: Worlds) -> None:
    assert max(worlds.run(2, bags_at_offsets)) < 1e-12


def other_ways(world: World) -> dict[str, float]:
    """Differences from the local model's parameters of other ways to train."""
    found = {}
    for way, options, rows in (
        ("in the backward", {"step_in_backward": True}, 10),
        ("fewer rows than ranks", {}, 1),
        ("compiled", {"compile": True}, 10),
    ):
        local = Views().double()
        made = parallel(local, "replicas", **options)
        steps(local, "RowWiseAdagrad", local_step(local), rows), steps(made, "RowWiseAdagrad", made.train_step, rows)
        state = made.full_state_dict()
        found[way] = max(float((state[k] - v).abs().max()) for k, v in local.state_dict().items())
    local = Views().double()
    made = parallel(local, "replicas", batch="local")
    for _ in range(2):
        local(**batch()).backward()
        own = slice(*((0, 5), (5, 10))[world.rank])
        made.train_step(**{name: x[own] for name, x in batch().items()})
    gradients = made.full_gradients()
    of_local = {n: p.grad.to_dense() for n, p in local.named_parameters() if p.grad is not None}
    found["own rows, twice"] = max(float((gradients[n] - x).abs().max()) for n, x in of_local.items())
    return found


@pytest.mark.filterwarnings("ignore")
def test_other_ways_to_train_tables_on_hosts(worlds: Worlds) -> None:
    for found in worlds.run(2, other_ways):
        assert max(found.values()) < 1e-12, found


def saved_and_resumed(world: World, folder: str) -> float:
    """The largest difference of whole parameters after four steps, in the middle of which a run goes on from the
    checkpoint of one with tables elsewhere."""
    made = parallel(Views().double(), "places")
    expected = in_four_steps(made, optimizers(made, "RowWiseAdagrad"), folder)
    error = 0.0
    for kind in ("parts", "replicas"):
        other = parallel(Views().double(), kind)
        own = optimizers(other, "RowWiseAdagrad")
        whale.load_checkpoint(folder, other, tables=own[0], dense=own[1])
        found = in_four_steps(other, own, folder, first=2)
        error = max(error, *(float((found[name] - x).abs().max()) for name, x in expected.items()))
    return error


def test_checkpoints_of_tables_on_hosts_load_into_other_layouts(worlds: Worlds, tmp_path: Path) -> None:
    assert max(worlds.run(2, saved_and_resumed, str(tmp_path))) < 1e-12


def refused(world: World, annotations: dict[str, Any], options: dict[str, Any], dense: bool) -> str:
    model: nn.Module = nn.Sequential(nn.Linear(3, 3)) if dense else Views()
    whale.annotate(model, annotations)
    given: Any = torch.rand(4, 3) if dense else batch()
    given = given if dense else {**given, "clicked": given["clicked"].float()}
    more: dict[str, Any] = {"loss_fn": lambda out, _: out.sum()} if dense else {}
    return refusal(lambda: whale.parallelize(model, given, device="cpu", **options, **more))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], bool, str]] = {
    "no table": ({"": whale.replicate(**HOST)}, {}, True, "sparse=True"),
    "zero": ({"": whale.replicate(**HOST)}, {"zero": 1}, False, "zero=1"),
    "adasum": ({"": whale.replicate(**HOST)}, {"reduce": "adasum"}, False, "reduce='adasum'"),
    "activations": ({}, {"offload": ["tables", "activations"]}, False, "stage of their own"),
    "two words": (
        {"tables": whale.replicate(**HOST), "dense": whale.replicate(offload="state")}, {}, False, "one offload"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_tables_on_hosts_cannot_is_refused(worlds: Worlds, name: str) -> None:
    annotations, options, dense, says = REFUSED[name]
    for message in worlds.run(2, refused, annotations, options, dense):
        assert says in message


def placed(world: World, host_bytes: int) -> tuple[float, list[str]]:
    """The error of a model whose tables the planner has placed, and how those are placed that are on hosts."""
    type_ = DeviceType.of("cpu", speed={"float32": 1e9}, memory_bytes=9000, memory_bandwidth=1e9)
    cluster = Cluster.homogeneous(2, type_, intra=Link(bandwidth=1e9, latency=1e-5))
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], host_memory=HostMemory(size_bytes=host_bytes)),))
    local = Clicks().double()
    model = copy.deepcopy(local)
    annotations = whale.place_tables(local, batch(), cluster)
    whale.annotate(model, annotations)
    made: Any = whale.parallelize(model, batch(), device="cpu")
    steps(local, "RowWiseAdagrad", local_step(local)), steps(made, "RowWiseAdagrad", made.train_step)
    state = made.full_state_dict()
    error = max(float((state[name] - value).abs().max()) for name, value in local.state_dict().items())
    return error, [key for key, nest in annotations.items() if nest[1].strategy.offload == "tables"]


def test_tables_that_the_planner_places_on_hosts_train_as_the_local_ones(worlds: Worlds) -> None:
    for error, on_host in worlds.run(2, placed, 2**20):
        assert error < 1e-12
        assert on_host


def test_tables_that_fit_neither_devices_nor_hosts_are_refused_on_every_rank(worlds: Worlds) -> None:
    for message in worlds.run(2, refused_places):
        assert "the host node0" in message


def refused_places(world: World) -> str:
    try:
        placed(world, 2000)
    except InfeasibleError as error:
        return str(error)
    return ""


def chosen(world: World, options: dict[str, Any]) -> tuple[float, list[str]]:
    """The error of losses on devices that cannot hold a table, and the tables that are on hosts."""
    type_ = DeviceType.of("cpu", speed={"float64": 1e9}, memory_bytes=400_000, memory_bandwidth=1e9)
    cluster = Cluster.homogeneous(2, type_, intra=Link(bandwidth=1e9, latency=1e-5))
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], host_memory=HostMemory(size_bytes=2**30)),))
    local = Clicks().double()
    local.tables[0] = nn.EmbeddingBag(20_000, 6, mode="sum", sparse=True).double()
    made: Any = whale.parallelize(copy.deepcopy(local), batch(), device="cpu", cluster=cluster, **options)
    losses = steps(local, "RowWiseAdagrad", local_step(local)), steps(made, "RowWiseAdagrad", made.train_step)
    return max(abs(a - b) for a, b in zip(*losses, strict=True)), sorted(made._whale.engine.on_host)


@pytest.mark.parametrize("options", [{"offload": "auto"}, {"plan": "auto"}], ids=str)
def test_tables_that_devices_cannot_hold_are_put_on_hosts_by_themselves(
    worlds: Worlds, options: dict[str, str]
) -> None:
    for error, on_host in worlds.run(2, chosen, options):
        assert error < 1e-12
        assert "tables.0.weight" in on_host


def recorded(world: World) -> tuple[float, int, list[str]]:
    """The error of steps whose operators are recorded and replayed, the number of pieces, and what is said."""
    local = Views().double()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setitem(cuda_graphs.RECORDERS, "cpu", CpuRecorder)
        CpuRecorder.made.clear()
        made = parallel(local, "replicas", cuda_graphs=True)
        for _ in range(2):
            steps(local, "SGD", local_step(local)), steps(made, "SGD", made.train_step)
    state = made.full_state_dict()
    error = max(float((state[k] - v).abs().max()) for k, v in local.state_dict().items())
    said = [str(each.message) for each in told if "CUDA graphs" in str(each.message)]
    return error, CpuRecorder.made[-1].num_replayed, said


def test_recorded_steps_leave_look_ups_at_the_host_out(worlds: Worlds) -> None:
    for error, replayed, said in worlds.run(2, recorded):
        assert error < 1e-12
        assert replayed > 0
        assert all("AtHost" in text for text in said)


def of_sizes(world: World, kind: str) -> tuple[float, int]:
    """The error of losses of batches of many sizes, and how many steps were made of others."""
    local = Views().double()
    made = parallel(local, kind)
    error = 0.0
    for rows in (4, 20, 8, 12, 16):
        error = max(error, abs(float(made.train_step(**batch(rows)).detach() - local(**batch(rows)).detach())))
    steps_of = made._whale.engine.steps._steps.values()
    return error, sum(step.is_made for step in steps_of)


@pytest.mark.parametrize("kind", ["replicas", "parts"])
def test_steps_of_other_sizes_are_made_of_those_with_tables_on_hosts(worlds: Worlds, kind: str) -> None:
    for error, num_made in worlds.run(2, of_sizes, kind):
        assert error < 1e-12
        assert num_made > 0


class Odd(nn.Module):
    """Look-ups by indices of the batch, with and without real numbers between, of constants, and of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(17, 4, sparse=True)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        real = clicked.unsqueeze(1) * torch.arange(1, 5, device=ids.device)
        found = [
            self.table(ids[:, 0] % 17).sum((1, 2)),
            self.table((ids[:, 1] + clicked.long()[:, None]) % 17).sum(-1).mean(1),
            self.table(real.argmax(1)).sum(1),
            self.table(torch.arange(3, device=ids.device)).sum(),
            self.table((real @ self.weight).argmax(1)).square().sum(1),
        ]
        return F.binary_cross_entropy_with_logits(sum(found), clicked)


def indices(world: World) -> tuple[float, list[bool]]:
    """The error of gradients, and for each look-up whether its indices are of the batch on the host."""
    local = Odd().double()
    made: Any = whale.parallelize(copy.deepcopy(local), batch(), device="cpu", offload="tables")
    local(**batch()).backward()
    made.train_step(**batch())
    gradients = made.full_gradients()
    own = {name: p.grad.to_dense() for name, p in local.named_parameters() if p.grad is not None}
    (stage,) = next(iter(made._whale.engine.steps._steps.values())).stages
    graph = stage.programs[0].micro_batch
    holes = [node for node in graph.code.graph.nodes if node.op == "placeholder"]
    of_batch = {hole for hole, (kind, _) in zip(holes, graph.sources, strict=True) if kind == "host input"}
    calls = [node for node in graph.code.graph.nodes if "at_host" in str(node.target)]
    return max(float((gradients[name] - x).abs().max()) for name, x in own.items()), [
        not of_batch.isdisjoint(node.args[1:]) for node in calls
    ]


def test_whole_indices_of_the_batch_are_computed_on_the_host_and_others_copied(worlds: Worlds) -> None:
    for error, on_host in worlds.run(2, indices):
        assert error < 1e-12
        assert on_host == [True, True, False, False, False]
