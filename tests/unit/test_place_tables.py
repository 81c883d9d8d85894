"""Places of embedding tables: against all placements of small cases, and of a model on devices of mixed memory."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.commands.planning import make_plan
from whale.commands.tables import placed_tables
from whale.compile.compile import Options
from whale.errors import InfeasibleError, UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.planner.tables import Table, TableDevice, cheapest_places
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


def test_tables_that_do_not_fit_are_refused_with_what_is_left() -> None:
    devices = [TableDevice(name=n, memory_bytes=GIB, seconds=0, share=0.5, seconds_per_byte=1) for n in "ab"]
    table = Table(name="t", rows=9, columns=2, bytes=3 * GIB, seconds=(1, 1), fixed=(0, 0), sent_bytes=1)
    with pytest.raises(InfeasibleError, match=r"t takes 3.00 GiB .* a 1.00 GiB, b 1.00 GiB"):
        cheapest_places([table], devices)


class Tables(nn.Module):
    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, 16, mode="sum", sparse=True) for count in rows)
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
        model = Tables(60_000_000, 20_000_000, 20_000_000, 1000)
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
