"""Layers priced for some numbers of rows and interpolated between, of many replicas at once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.chains import card, chain, layer, machines
from whale.ir.cluster import Cluster
from whale.planner.cost.groups import TensorGroup
from whale.planner.cost.stage import CostModel
from whale.planner.search.row_table import FORWARD, QUANTITIES, RowTable
from whale.planner.search.space import Chain, Mesh, pools_of
from whale.planner.search.table import CostTable

ONE, OTHER = card("one"), card("other")


def cost_table(cluster: Cluster, *, batch: int = 64) -> CostTable:
    kinds = [layer({"cpu-one": 0.01, "cpu-other": 0.03}, degrees=(1, 2), fixed=0.02, name=name) for name in "ab"]
    profile = chain(kinds, (0, 1, 1, 1, 0))
    prices = CostModel.of(profile, cluster, batch=batch)
    return CostTable(prices=prices, pools=pools_of(cluster), chain=Chain.of((), 5, None))


def test_rows_beyond_the_first_are_interpolated_and_each_price_is_asked_for_once() -> None:
    cluster = machines([ONE, ONE])
    prices = CostModel.of(chain([layer({"cpu-one": 0.01})], (0,)), cluster)
    group = prices.group((0,), 1)
    asked: list[int] = []

    def price(group: TensorGroup, rows: int, micro_batches: int) -> np.ndarray:
        asked.append(rows)
        return np.full((QUANTITIES, 1), float(rows * rows * micro_batches))

    table = RowTable(price, 1, most_exact=1)
    found = table.at([(group, rows) for rows in (0, 3, 8, 12, 12)], 2)[:, FORWARD, 0]
    assert found.tolist() == [0.0, 18.0, 128.0, 320.0, 320.0]  # 12 is halfway between 8 and 16 rows
    assert sorted(asked) == [0, 3, 8, 16]
    assert table.at([(group, 12), (group, 3)], 1)[:, FORWARD, 0].tolist() == [160.0, 10.0]


@pytest.mark.parametrize(("rows", "micro_batches"), [(6, 8), (24, 2), (48, 1)])
def test_meshes_cost_together_what_they_cost_one_by_one(rows: int, micro_batches: int) -> None:
    cluster = machines([ONE] * 4 + [OTHER] * 4)
    meshes = [Mesh((1, 0), 1), Mesh((4, 0), 2), Mesh((0, 4), 1), Mesh((2, 2), 1), Mesh((4, 4), 2)]
    together, alone = cost_table(cluster), cost_table(cluster)
    for find in ("find_paces", "find_work", "find_likely_work"):
        getattr(together, find)(meshes, rows, micro_batches)
    for mesh in meshes:
        for name in ("paces", "work", "likely_work"):
            one, other = (getattr(table, name)(mesh, rows, micro_batches) for table in (together, alone))
            assert one == pytest.approx(other, rel=1e-12), (mesh, name)


def test_the_chain_on_a_mesh_takes_what_its_parts_take() -> None:
    cluster = machines([ONE] * 4 + [OTHER] * 4)
    table = cost_table(cluster)
    for mesh in (Mesh((4, 0), 2), Mesh((2, 2), 1)):
        costs, pace = table.costs(mesh, 12, 4), table.paces(mesh, 12, 4)
        sums, _ = costs.pace(4)
        assert pace.of_chain == pytest.approx(sums[-1] + costs.message / 4, rel=1e-12)
