"""Rows of looked-up values that are equal because their indices are: which values have such, what finds them, and what
stages say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import whale
from whale.annotations import annotate
from whale.commands.tables import placed_tables
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_traced
from whale.compile.options import Options
from whale.compile.trace import trace
from whale.errors import AnnotationError, UsageError
from whale.graph.values import value_shape
from whale.ir.cluster import Cluster, Link
from whale.ir.plan import PlanStage
from whale.ir.strategy import Scope, Strategy, decode_scopes, encode_scopes, parse_strategy
from whale.predict.traffic import traffic
from whale.runtime.equal_rows import MOST_ROWS, EqualRows
from whale.strategies.equal_rows import keys_of

ROWS = 30

Made = Callable[["Looks", dict[str, Tensor]], Tensor]


class Looks(nn.Module):
    """A table in a module of its own, and what is made of its rows."""

    def __init__(self, made: Made, table: nn.Module | None = None) -> None:
        super().__init__()
        self.table, self.made = table or nn.Embedding(ROWS, 4, sparse=True), made
        self.top = nn.Linear(4, 1)

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.top(self.made(self, batch)).square().mean()
        return loss


def batch() -> dict[str, Tensor]:
    ids = torch.randint(ROWS, (12, 3), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "x": torch.rand(12, 3)}


def bag(mode: str = "mean", **options: Any) -> nn.Module:
    return nn.EmbeddingBag(ROWS, 4, mode=mode, sparse=True, **options)


VALUES: dict[str, tuple[Looks, Callable[[Tensor], Tensor] | None]] = {
    "a column": (Looks(lambda m, b: m.table(b["ids"][:, 1])), lambda ids: ids[:, 1]),
    "all": (Looks(lambda m, b: m.table(b["ids"])), lambda ids: ids),
    "scattered": (Looks(lambda m, b: m.table((b["ids"] * 7 + 2) % ROWS)), lambda ids: (ids * 7 + 2) % ROWS),
    "bags of one": (Looks(lambda m, b: m.table(b["ids"][:, :1]), bag()), lambda ids: ids[:, 0]),
    "with a padding index": (Looks(lambda m, b: m.table(b["ids"][:, :1]), bag(padding_idx=3)), lambda ids: ids[:, 0]),
    "in another number type": (Looks(lambda m, b: m.table(b["ids"][:, 0].int())), lambda ids: ids[:, 0]),
    "bags of three": (Looks(lambda m, b: m.table(b["ids"]), bag()), None),
    "weighted bags": (
        Looks(lambda m, b: m.table(b["ids"][:, :1], per_sample_weights=b["x"][:, :1]), bag("sum")),
        None,
    ),
    "of real numbers": (Looks(lambda m, b: m.table((b["x"][:, 0] * ROWS).long())), None),
    "times real numbers": (Looks(lambda m, b: m.table(b["ids"][:, 0]) * b["x"][:, :1]), lambda ids: ids[:, 0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_looked_up_value_has_the_keys_of_its_indices(name: str) -> None:
    model, expected = VALUES[name]
    traced = trace(model, batch(), device="cpu", training=True)
    sent = [
        (node, 0)
        for node in traced.captured.graph.nodes
        if "table" in str(node.meta.get("nn_module_stack")) and isinstance(node.meta.get("val"), Tensor)
    ]
    found = [keys for value in sent if value_shape(value)[-1:] == (4,) and (keys := keys_of(traced.captured, value))]
    if expected is None:
        last = next(value for value in reversed(sent) if value_shape(value) == (12, 4))
        assert keys_of(traced.captured, last) is None
        return
    keys = found[-1]
    assert keys.rows == ROWS
    leaves = [batch()[leaf] for leaf, _ in keys.leaves]
    assert torch.equal(keys.code(*leaves)[0].reshape(keys.shape).long(), expected(batch()["ids"]))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.sampled_from([10, MOST_ROWS + 1]))
def test_distinct_rows_and_their_copies_are_the_value_and_gradients_are_summed(keys: list[int], rows: int) -> None:
    value = torch.randn(10, 3, dtype=torch.float64)[keys].view(len(keys), 1, 3)
    found = EqualRows({}, {}, torch.device("cpu")).find(torch.tensor(keys), rows)
    if found is None:
        assert len(set(keys)) > 0.8 * len(keys)
        return
    distinct = found.distinct(value)
    assert len(distinct) == found.count == len(set(keys))
    assert torch.equal(found.copies(distinct, value.shape), value)
    gradient = torch.randn_like(value)
    placed = found.placed(found.summed(gradient), value.shape)
    for x in (gradient, placed):
        assert x.shape == value.shape
    sums = [
        torch.zeros(10, 3, dtype=torch.float64).index_add_(0, torch.tensor(keys), x[:, 0]) for x in (gradient, placed)
    ]
    torch.testing.assert_close(*sums, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rows_on_a_gpu_are_those_on_the_host() -> None:
    keys, value = torch.randint(9, (50,)), torch.randn(50, 3, dtype=torch.float64)
    found = [EqualRows({}, {}, torch.device(device)).find(keys, 9) for device in ("cpu", "cuda")]
    here, there = found
    assert here is not None and there is not None
    on_gpu = value.cuda()
    assert torch.equal(there.distinct(on_gpu).cpu(), here.distinct(value))
    sums = there.summed(on_gpu)
    torch.testing.assert_close(sums.cpu(), here.summed(value), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        there.placed(sums, value.shape).cpu(), here.placed(here.summed(value), value.shape), rtol=0, atol=1e-12
    )


def test_gradients_in_low_precision_are_summed_in_a_wider_one() -> None:
    found = EqualRows({}, {}, torch.device("cpu")).find(torch.zeros(1000, dtype=torch.long), 1)
    assert found is not None
    total = found.summed(torch.full((1000, 1), 1.0, dtype=torch.bfloat16))
    assert total.dtype == torch.bfloat16
    assert total.item() == 1000  # in bfloat16 256 + 1 is 256


def compiled(distinct: float | None, made: Made = lambda m, b: m.table(b["ids"][:, 0])) -> Compilation:
    model = Looks(made)
    annotate(
        model,
        {
            "": [whale.cluster([0, 1]), whale.stage(2), whale.replicate()],
            "table": [whale.cluster([0]), whale.stage(1, distinct=distinct)],
        },
    )
    traced = trace(model, batch(), device="cpu", training=True)
    cluster = Cluster.homogeneous(2, intra=Link(bandwidth=1e8, latency=1e-5))
    return compile_traced(traced, cluster, Options(), device="cpu")


def test_messages_of_distinct_rows_are_expected_to_be_smaller() -> None:
    def sent(compilation: Compilation) -> list[int]:
        return [one.tensor_bytes for rank in (0, 1) for one in traffic(compilation, rank) if one.op == "send"]

    assert sent(compiled(None)) == [6 * 4 * 4] * 2  # vectors to the other rank, and their gradients
    assert sent(compiled(0.5)) == [3 * 4 * 4] * 2


def test_a_stage_that_sends_no_looked_up_rows_is_refused() -> None:
    with pytest.raises(UsageError, match=r"stage 0 has distinct=0\.5, but of what it sends, embedding, none is rows"):
        compiled(0.5, lambda m, b: m.table((b["x"][:, 0] * ROWS).long()))


def test_distinct_is_written_and_read_in_annotations_and_plans() -> None:
    made = Strategy(kind="stage", degree=2, offload="tables", distinct=0.25)
    assert str(made) == "stage(2, offload='tables', distinct=0.25)"
    for part in (1, 1.0, 0.004, 0.37, 1e-5, 1.2e-5, 0.00012345678, 1 / 3):
        one = Strategy(kind="stage", distinct=part)
        assert parse_strategy(str(one)) == one
    path = (Scope(strategy=made, region="tables"),)
    assert decode_scopes(encode_scopes(path)) == path
    stage = PlanStage(ranks=(0,), distinct=0.25)
    assert PlanStage.model_validate_json(stage.model_dump_json()) == stage


@pytest.mark.parametrize("part", [0, -1, 1.5, float("nan"), True, "0.5"])
def test_parts_that_are_none_are_refused(part: Any) -> None:
    with pytest.raises(AnnotationError, match="distinct"):
        whale.stage(distinct=part)
    with pytest.raises(AnnotationError, match="a stage sends the rows"):
        Strategy(kind="replicate", distinct=0.5)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10**6, 64, sparse=True) for _ in range(2))
        self.top = nn.Linear(128, 1)

    def forward(self, ids: Tensor) -> Tensor:
        vectors = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        loss: Tensor = self.top(torch.cat(vectors, 1)).square().mean()
        return loss


@pytest.mark.parametrize(
    ("bandwidth", "ids", "says"),
    [(1e8, "few", True), (1e12, "few", False), (1e8, "many", False), (1e8, "zeros", False), (1e8, "meta", False)],
)
def test_tables_send_distinct_rows_where_a_batch_repeats_them_and_links_are_slow(
    bandwidth: float, ids: str, says: bool
) -> None:
    with torch.device("meta"):
        model = Tables()
    drawn = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches = {
        "few": (10**6) ** drawn.square() - 1,
        "many": 10**6 * drawn,
        "zeros": 0 * drawn,  # made up: it says nothing of other batches
        "meta": drawn.to("meta"),
    }
    cluster = Cluster.homogeneous(4, intra=Link(bandwidth=bandwidth, latency=1e-5))
    found = placed_tables(model, batches[ids].long(), cluster)
    parts = [one.strategy.distinct for nest in found.annotations.values() for one in nest]
    assert any(parts) == says
    assert all(0.3 < part < 0.7 for part in parts if part)
