"""Places of embedding tables: against all placements of small cases, and of a model on devices of mixed memory."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.commands.automatic import search_inputs
from whale.commands.candidates import CandidateCompiler
from whale.commands.planning import make_plan
from whale.commands.searching import Searched, search_plans
from whale.commands.tables import placed_choices, placed_tables
from whale.compile.options import Options
from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import Plan
from whale.ir.profile import LayerVariant, ModelProfile
from whale.planner.catalog import device_types
from whale.planner.cost.layer_cost import LayerCosts
from whale.planner.cost.precision import precision_named
from whale.planner.search import SearchSettings
from whale.planner.tables import Table, TableDevice, TableHost, cheapest_places
from whale.predict.costs import Costs
from whale.strategies.profile import profile_model

GIB = 2**30


def drawn(seed: int) -> tuple[list[Table], list[TableDevice]]:
    """Tables that cannot be cut, on three devices, of which all fit."""
    draw = random.Random(seed)
    speeds = [draw.choice([1, 2, 4]) for _ in range(3)]
    tables = []
    for number in range(6):
        size = draw.randint(1, 40)
        seconds = tuple(size / speed for speed in speeds)
        sent = draw.randint(0, 9)
        tables.append(
            Table(name=str(number), rows=1, columns=1, bytes=size, seconds=seconds, fixed=(0, 0, 0), sent_bytes=sent)
        )
    devices = [
        TableDevice(
            name=str(rank),
            memory_bytes=120,
            seconds=draw.randint(0, 4),
            share=speed / sum(speeds),
            seconds_per_byte=0.3,
        )
        for rank, speed in enumerate(speeds)
    ]
    return tables, devices


def slowest(tables: list[Table], devices: list[TableDevice], ranks: tuple[int, ...]) -> float:
    """Seconds of the slowest device with each table whole on its rank."""
    found = []
    for rank, device in enumerate(devices):
        own = [table for table, at in zip(tables, ranks, strict=True) if at == rank]
        if sum(table.bytes for table in own) > device.memory_bytes:
            return float("inf")
        sent = sum(table.sent_bytes for table in own) * (1 - device.share)
        received = sum(table.sent_bytes for table, at in zip(tables, ranks, strict=True) if at != rank) * device.share
        computed = device.seconds + sum(table.seconds[rank] for table in own)
        found.append(computed + 2 * device.seconds_per_byte * max(sent, received))
    return max(found)


def test_places_are_within_a_tenth_of_the_best_of_all() -> None:
    ratios = []
    for seed in range(30):
        tables, devices = drawn(seed)
        best = min(slowest(tables, devices, ranks) for ranks in product(range(3), repeat=6))
        found = cheapest_places(tables, devices)
        ranks = tuple(found.places[table.name].ranks[0] for table in tables)
        assert max(found.seconds) == pytest.approx(slowest(tables, devices, ranks))
        ratios.append(max(found.seconds) / best)
    assert max(ratios) < 1.1
    assert sum(ratio < 1.000001 for ratio in ratios) >= 20


def test_a_table_too_large_for_any_device_is_cut_by_columns_else_by_rows() -> None:
    def placed(columns: int) -> str:
        devices = [TableDevice(name=n, memory_bytes=8, seconds=0, share=0.5, seconds_per_byte=1) for n in "ab"]
        table = Table(name="t", rows=9, columns=columns, bytes=12, seconds=(1, 1), fixed=(1, 1), sent_bytes=1)
        return cheapest_places([table], devices).places["t"].way

    assert (placed(4), placed(3)) == ("columns", "rows")


def test_hot_tables_have_replicas_where_their_gradients_are_smaller_than_their_vectors() -> None:
    with torch.device("meta"):
        model = Tables(20_000_000, 20_000_000, 50, 9)
    batch = torch.zeros(8192, 4, 8, dtype=torch.long)
    found = placed_tables(model, batch, cluster(16, 16))
    places = found.places.places
    assert [places[f"tables.{number}"].way for number in (2, 3)] == ["replicas", "replicas"]
    assert {places[f"tables.{number}"].ranks for number in (0, 1)} == {(0,), (1,)}
    assert set(found.annotations) == {"", "tables.[0]", "tables.[1]"}
    few = placed_tables(model, batch[:2], cluster(16, 16)).places.places
    assert few["tables.2"].way == "whole"  # vectors of two rows are smaller


def test_tables_that_do_not_fit_are_refused_with_what_is_left() -> None:
    devices = [TableDevice(name=n, memory_bytes=GIB, seconds=0, share=0.5, seconds_per_byte=1) for n in "ab"]
    table = Table(name="t", rows=9, columns=2, bytes=3 * GIB, seconds=(1, 1), fixed=(0, 0), sent_bytes=1)
    with pytest.raises(InfeasibleError, match=r"t takes 3.00 GiB .* a 1.00 GiB, b 1.00 GiB"):
        cheapest_places([table], devices)


class Tables(nn.Module):
    def __init__(self, *rows: int, sparse: bool = True) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, 16, mode="sum", sparse=sparse) for count in rows)
        self.top = nn.Linear(16 * len(rows), 1)

    def forward(self, ids: Tensor) -> Tensor:
        vectors = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        loss: Tensor = self.top(torch.cat(vectors, 1)).square().mean()
        return loss


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).square().mean()
        return loss


def cluster(*memory: int) -> Cluster:
    types = [
        DeviceType.of(f"card-{size}", speed={"float32": 1e12}, memory_bytes=size * GIB, memory_bandwidth=1e12)
        for size in memory
    ]
    return Cluster.of([("node", type_) for type_ in types], intra=Link(bandwidth=1e10, latency=1e-5))


def test_tables_go_where_there_is_memory() -> None:
    with torch.device("meta"):
        model = Tables(100_000_000, 20_000_000, 20_000_000, 1000)
    found = placed_tables(model, torch.zeros(64, 4, 2, dtype=torch.long), cluster(16, 9, 9)).places
    assert [found.places[f"tables.{number}"].ranks for number in range(3)] in ([(0,), (1,), (2,)], [(0,), (2,), (1,)])
    with torch.device("meta"):
        model = Tables(150_000_000, 1000)
    found = placed_tables(model, torch.zeros(64, 2, 2, dtype=torch.long), cluster(9, 9, 9, 9)).places
    assert len(found.places["tables.0"].ranks) > 1


def test_what_cannot_be_placed_is_refused() -> None:
    batch = torch.zeros(8, 1, 2, dtype=torch.long)
    model = Tables(9)
    whale.annotate(model, {"": whale.replicate()})
    with pytest.raises(UsageError, match="annotations already"):
        whale.place_tables(model, batch, 2)
    with pytest.raises(UsageError, match="no table to place"):
        whale.place_tables(Plain(), torch.zeros(2, 2), 2)


@pytest.mark.parametrize("layout", ["placed", "replicas"])
def test_a_plan_of_sparse_tables_is_compiled_and_predicted(layout: str) -> None:
    machines, batch = cluster(16, 16), torch.zeros(64, 3, 2, dtype=torch.long)
    with torch.device("meta"):
        model = Tables(1_000_000, 500_000, 1000)
    profile = profile_model(model, batch, tensor_degrees=[1, 2])
    nest = whale.place_tables(model, batch, machines) if layout == "placed" else {"": whale.replicate()}
    whale.annotate(model, nest)
    costs = Costs(profile=profile, cluster=machines, precision="fp32", micro_batches=1, device="cuda", optimizer="sgd")
    found = make_plan(model, batch, costs, Options(micro_batches=1), rows=64, name="tables").predicted
    reductions = [one.bytes for one in found.workload.reductions]
    assert found.prediction.fits
    assert max(reductions) < 2**20  # of looked-up rows: the tables have 92 MiB


def test_each_table_is_a_layer_and_one_with_sparse_gradients_is_updated_and_held_by_its_rows() -> None:
    def variants(sparse: bool) -> dict[str, LayerVariant]:
        with torch.device("meta"):
            model = Tables(1_000_000, 500_000, 1000, sparse=sparse)
        profile = profile_model(model, torch.zeros(64, 3, 2, dtype=torch.long), tensor_degrees=[1, 2])
        found = zip(profile.paths, profile.chain(), strict=True)
        return {path: kind.variants[0] for path, kind in found}

    found = variants(sparse=True)
    assert list(found) == ["tables.0", "tables.1", "tables.2", "top"]
    assert [one.parameters for one in found.values()] == [16e6, 8e6, 16e3, 49]
    (first,) = found["tables.0"].sparse
    assert (first.elements, first.rows, first.touched(64)) == (16e6, 1e6, 64 * 2 * 16)
    assert not found["top"].sparse
    assert not any(one.sparse for one in variants(sparse=False).values())


def test_gradients_of_rows_are_added_up_in_the_same_time_in_a_larger_table() -> None:
    with torch.device("meta"):
        model = Tables(10_000_000, 100_000, 1000)
    profile = profile_model(model, torch.zeros(64, 3, 2, dtype=torch.long), tensor_degrees=[1, 2])
    costs = LayerCosts(profile=profile, precision=precision_named("fp32"))
    large, small = (costs.seconds(kind, device_types()["T4"], (1, 1, 1), 1024, 4).backward for kind in (0, 1))
    assert large == small


def test_an_update_goes_over_the_rows_of_all_micro_batches() -> None:
    with torch.device("meta"):
        model = Tables(10_000_000, 1000)
    profile = profile_model(model, torch.zeros(64, 2, 2, dtype=torch.long), tensor_degrees=[1, 2])
    costs = LayerCosts(profile=profile, precision=precision_named("fp32"))
    in_four, in_one = (
        costs.seconds(0, device_types()["T4"], (1, 1, 1), rows, count).update for rows, count in ((1024, 4), (4096, 1))
    )
    assert in_four == in_one


def test_devices_are_predicted_to_do_the_work_of_their_own_tables() -> None:
    machines, batch = cluster(16, 16), torch.zeros(4096, 3, 2, dtype=torch.long)
    with torch.device("meta"):
        model = Tables(30_000_000, 30_000_000, 1000)
    profile = profile_model(model, batch, tensor_degrees=[1, 2])
    whale.annotate(model, whale.place_tables(model, batch, machines))
    costs = Costs(profile=profile, cluster=machines, precision="fp32", micro_batches=1, device="cuda")
    found = make_plan(model, batch, costs, Options(micro_batches=1), rows=4096, name="tables").predicted
    of_tables = [stage for stage in found.workload.stages if len(stage.ranks) == 1]
    assert {stage.ranks for stage in of_tables} == {(0,), (1,)}
    assert all(min(stage.forward) > 0 and min(stage.backward) > 0 for stage in of_tables)
    assert max(found.workload.update) < 2e-3  # of 4,096 x 2 rows: all 30,000,000 would take 150 ms with AdamW
    assert all(device.optimizer < 1.1 * 30e6 * 4 for device in found.prediction.memory)  # a number for each row


class Named(nn.Module):
    """Tables that are no list, each with an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.place, self.day = (
            nn.Embedding(count, 16, sparse=True) for count in (70_000_000, 60_000_000, 1000, 100)
        )
        self.top = nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = [table(ids[:, n]) for n, table in enumerate((self.user, self.item, self.place, self.day))]
        loss: Tensor = self.top(torch.cat(found, 1)).square().mean()
        return loss


@pytest.mark.parametrize("memory", [(16, 16), (8, 8)], ids=["whole", "cut"])
def test_tables_of_several_names_share_the_devices_of_their_place(memory: tuple[int, int]) -> None:
    machines, batch = cluster(*memory), torch.zeros(256, 4, dtype=torch.long)
    with torch.device("meta"):
        model = Named()
    placed = placed_tables(model, batch, machines)
    profile = profile_model(model, batch, tensor_degrees=[1, 2])
    whale.annotate(model, dict(placed.annotations))
    costs = Costs(profile=profile, cluster=machines, precision="fp32", micro_batches=1, device="cuda")
    found = make_plan(model, batch, costs, Options(micro_batches=1), rows=256, name="tables")
    of_stages = sorted(stage.ranks for stage in found.plan.stages)
    assert of_stages == sorted([(0, 1), *(place.ranks for place in placed.places.places.values())])
    assert found.predicted.prediction.fits


class History(nn.Module):
    """A table that two layers look up: for an item, and for those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.user = nn.Embedding(3000, 16, sparse=True), nn.Embedding(2000, 16, sparse=True)
        self.first, self.top = nn.Linear(16, 16), nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.cat([self.first(self.item(ids[:, 0])), self.user(ids[:, 1])], 1)
        loss: Tensor = (self.top(h).squeeze(1) * self.item(ids[:, 2:]).sum((1, 2))).square().mean()
        return loss


def test_a_table_that_layers_share_is_none_of_what_they_sum_densely() -> None:
    model, batch = History(), torch.zeros(64, 5, dtype=torch.long)
    profile = profile_model(model.to("meta"), batch, tensor_degrees=[1, 2], rules=True)
    costs = LayerCosts(profile=profile, precision=precision_named("fp32"))
    dense, _ = costs.parameters(range(len(profile.layers)), 1)
    assert dense == sum(x.numel() for part in (model.first, model.top) for x in part.parameters())
    machines = Cluster.homogeneous(2, device_types()["T4"], intra=Link(bandwidth=1e10, latency=1e-5))
    assert search(model, batch, machines)[0].best.compiled


MIXED = """
[links]
intra_node = {bandwidth = "12 GB/s", latency = "5 us"}
inter_node = {bandwidth = "25 Gbit/s", latency = "15 us"}
[[nodes]]
devices = 2
device = "A100-SXM4-80GB"
[[nodes]]
devices = 2
device = "T4"
"""


def search(model: nn.Module, batch: Tensor, machines: Cluster, **settings: Any) -> tuple[Searched, CandidateCompiler]:
    trial = CandidateCompiler(model, batch, name="tables")
    inputs = search_inputs(trial, batch, machines)
    how = SearchSettings(precision="fp32", fixed=inputs.fixed, time_limit=60, **settings)
    tables = partial(placed_choices, trial)
    return search_plans(
        inputs.profile, machines, batch=len(batch), settings=how, trial=trial, with_tables=tables
    ), trial


def test_the_search_places_tables_where_that_is_fastest() -> None:
    machines = Cluster.parse(MIXED, catalog=device_types())
    batch = torch.zeros(8192, 6, 8, dtype=torch.long)
    with torch.device("meta"):
        model = Tables(60_000_000, 60_000_000, 20_000_000, 9_000_000, 9_000_000, 900)
    found, trial = search(model, batch, machines)
    assert found.best.said.startswith("tables placed on 2 A100-SXM4-80GB")
    chains = [choice for choice in found.choices if not choice.said]
    assert all(found.best.prediction.step_seconds < choice.prediction.step_seconds for choice in chains)
    again = trial.predict(found.best.plan, trial_profile(trial, batch, machines), machines)[0]
    assert again.step_seconds == pytest.approx(found.best.prediction.step_seconds)
    assert found.best.plan == Plan.parse(found.best.plan.dumps())


def test_placed_tables_have_the_fastest_of_the_allowed_schedules() -> None:
    machines = Cluster.parse(MIXED, catalog=device_types())
    batch = torch.zeros(8192, 6, 8, dtype=torch.long)
    with torch.device("meta"):
        model = Tables(60_000_000, 60_000_000, 20_000_000, 9_000_000, 9_000_000, 900)
    trial = CandidateCompiler(model, batch, name="tables")
    profile = trial_profile(trial, batch, machines)
    of_one, of_two = (
        list(placed_choices(trial, profile, machines, batch=8192, schedules=names))
        for names in (("1f1b",), ("1f1b", "zero_bubble"))
    )
    assert [choice.plan.schedule for choice in of_two] == ["zero_bubble"] * len(of_two)
    for one, two in zip(of_one, of_two, strict=True):
        assert two.prediction.step_seconds < one.prediction.step_seconds


def trial_profile(trial: CandidateCompiler, batch: Tensor, machines: Cluster) -> ModelProfile:
    return search_inputs(trial, batch, machines).profile


def test_the_search_places_tables_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*arguments: Any, **named: Any) -> None:
        raise InfeasibleError("no chain fits")

    monkeypatch.setattr("whale.commands.searching.search", nothing)
    machines, batch = cluster(12, 12, 9), torch.zeros(64, 3, 2, dtype=torch.long)
    with torch.device("meta"):
        model = Tables(110_000_000, 110_000_000, 60_000_000)
    assert search(model, batch, machines)[0].best.said.startswith("tables placed on 2 card-12 + 1 card-9")
    with pytest.raises(InfeasibleError, match="no chain fits"):
        search(model, batch, machines, max_stages=2)


def test_models_that_are_mostly_no_tables_have_no_places() -> None:
    machines, batch = cluster(16, 16), torch.zeros(8, 1, 2, dtype=torch.long)
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(0), nn.Embedding(90, 16), nn.Linear(16, 200))
    trial = CandidateCompiler(model, batch, name="m", loss_fn=lambda output, _: output.square().mean())
    profile = search_inputs(trial, batch, machines, loss_fn=trial.loss_fn).profile
    assert not list(placed_choices(trial, profile, machines, batch=8))


def on_host(*sizes: int, memory: int, host: int) -> Any:
    """Tables that take twice as long on a host, on two devices of one host."""
    nothing: dict[str, Any] = {"fixed": (0, 0), "sent_bytes": 0}
    tables = [
        Table(name=str(number), rows=1, columns=1, bytes=size, seconds=(1, 1), at_host=(2, 2), **nothing)
        for number, size in enumerate(sizes)
    ]
    devices = [
        TableDevice(name=f"device {i}", memory_bytes=memory, seconds=0, share=0.5, seconds_per_byte=0) for i in (0, 1)
    ]
    return cheapest_places(tables, devices, [TableHost("node", host)])


def test_tables_are_on_hosts_where_devices_cannot_hold_them() -> None:
    assert not any(place.on_host for place in on_host(9, 9, memory=10, host=100).places.values())
    found = on_host(30, 9, 9, memory=10, host=100)
    assert [place.on_host for place in found.places.values()] == [True, False, False]
    assert (found.bytes, found.host_bytes) == ((9, 9), (30,))
    found = on_host(6, 6, 6, memory=10, host=100)  # in no two parts
    assert sum(place.on_host for place in found.places.values()) == 1


def test_tables_that_fit_neither_on_devices_nor_on_hosts_are_refused_with_what_is_left_of_both() -> None:
    with pytest.raises(InfeasibleError, match="device 0 10 B, device 1 10 B, the host node 20 B"):
        on_host(30, memory=10, host=20)


def test_a_model_larger_than_its_devices_has_tables_on_the_host() -> None:
    class Clicks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(
                nn.EmbeddingBag(rows, 64, mode="sum", sparse=True) for rows in (10**8, 500, 400)
            )
            self.dense = nn.Linear(192, 1)

        def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
            vectors = [table(ids[:, number]) for number, table in enumerate(self.tables)]
            return nn.functional.mse_loss(self.dense(torch.cat(vectors, 1)).squeeze(1), clicked)

    given = {
        "ids": torch.zeros(1024, 3, 4, dtype=torch.int64, device="meta"),
        "clicked": torch.zeros(1024, device="meta"),
    }
    cluster = Cluster.homogeneous(1, device_types()["T4"])
    found = whale.place_tables(fresh(Clicks), given, cluster)
    assert str(found["tables.[0]"][1]) == "stage(1, offload='tables')"
    assert str(found["tables.[1,2]"][1]) == "stage(1)"
    small = Cluster.homogeneous(1, replace(device_types()["T4"], memory_bytes=2**33))
    with pytest.raises(InfeasibleError, match=r"T4.* GiB, the host node0 .* GiB"):
        whale.place_tables(fresh(Clicks), given, small)


def fresh(made_by: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return made_by()


def test_the_search_places_tables_on_hosts_where_devices_cannot_hold_them() -> None:
    """Two tables of 60 GiB and a small one on two nodes of two V100 of 32 GiB each."""
    machines = Cluster.parse(HOSTS, catalog=device_types())
    batch = torch.zeros(4096, 3, 8, dtype=torch.long)
    with torch.device("meta"):
        model = Tables(10**9, 10**9, 9_000_000)
    found, trial = search(model, batch, machines)
    assert "in memory of hosts" in found.best.said
    assert found.best.plan == Plan.parse(found.best.plan.dumps())
    assert "tables" in {stage.offload for stage in found.best.plan.stages}
    prediction = trial.predict(found.best.plan, trial_profile(trial, batch, machines), machines)[0]
    assert prediction.fits
    assert max(host.state for host in prediction.hosts) > 20 * GIB


HOSTS = """
[links]
intra_node = {bandwidth = "12 GB/s", latency = "5 us"}
inter_node = {bandwidth = "25 Gbit/s", latency = "15 us"}
[[nodes]]
devices = 2
device = "V100-SXM2-32GB"
host_memory = {size = "200 GiB"}
[[nodes]]
devices = 2
device = "V100-SXM2-32GB"
host_memory = {size = "200 GiB"}
"""
