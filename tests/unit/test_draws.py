"""Random numbers by position: their distributions, and which operators have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from whale.graph.partition import _UNTAGGED
from whale.runtime.draws import DRAWS, SeededDraw
from whale.runtime.random import RNGPosition, column_numbers, row_numbers, uniform_numbers
from whale.strategies.rules import REGISTRY

aten: Any = torch.ops.aten
COUNT = 40_000
CPU = torch.device("cpu")
X = torch.zeros(COUNT, dtype=torch.float64)
WEIGHTS = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)


def draw(target: Any, *args: Any, dtype: torch.dtype = torch.float64, columns: int = 1, **kwargs: Any) -> torch.Tensor:
    ranges = ((0, COUNT),), ((0, columns),)
    rows = row_numbers(ranges, (COUNT, columns), CPU)
    made = SeededDraw(target, 3, RNGPosition(7), dtype)
    found: torch.Tensor = made(rows, column_numbers(ranges, CPU), *args, **kwargs)
    return found


EXPECTED: dict[str, tuple[tuple[Any, ...], tuple[float, ...]]] = {
    "rand": ((aten.rand.default, [COUNT]), (0.1, 0.5, 0.9)),
    "uniform": ((aten.uniform.default, X, -1.0, 3.0), (-0.6, 1.0, 2.6)),
    "randn": ((aten.randn.default, [COUNT]), (-1.2816, 0.0, 1.2816)),
    "normal_": ((aten.normal_functional.default, X, 1.0, 0.5), (0.3592, 1.0, 1.6408)),
    "normal": ((aten.normal.float_Tensor, 1.0, X + 0.5), (0.3592, 1.0, 1.6408)),
    "log_normal": ((aten.log_normal.default, X, 1.0, 0.5), (1.4323, 2.7183, 5.1591)),
    "exponential": ((aten.exponential.default, X, 2.0), (0.0527, 0.3466, 1.1513)),
    "cauchy": ((aten.cauchy.default, X, 1.0, 2.0), (-5.1554, 1.0, 7.1554)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_draws_have_their_distributions(name: str) -> None:
    call, quantiles = EXPECTED[name]
    found = draw(*call).flatten().sort().values
    for share, expected in zip((0.1, 0.5, 0.9), quantiles, strict=True):
        below = float((found < expected).double().mean())
        assert below == pytest.approx(share, abs=0.01)


def test_whole_numbers_have_their_distributions() -> None:
    for found in (draw(aten.randint.low, 2, 6, [COUNT]), draw(getattr(aten.random, "from"), X, 2, 6)):
        assert torch.bincount(found.long()).tolist()[:2] == [0, 0]
        assert (torch.bincount(found.long())[2:] / COUNT).tolist() == pytest.approx([0.25] * 4, abs=0.01)
    lengths = draw(aten.geometric.default, X, 0.3).long()
    assert (torch.bincount(lengths)[1:4] / COUNT).tolist() == pytest.approx([0.3, 0.21, 0.147], abs=0.01)
    assert float(draw(aten.bernoulli.Tensor, X, X + 0.3).mean()) == pytest.approx(0.3, abs=0.01)


def test_categories_are_drawn_by_their_weights() -> None:
    weights = 5 * WEIGHTS.expand(COUNT, 4)
    one = draw(aten.multinomial.default, weights, 1, dtype=torch.int64)
    assert (torch.bincount(one.flatten(), minlength=4) / COUNT).tolist() == pytest.approx(WEIGHTS.tolist(), abs=0.01)
    two = draw(aten.multinomial.default, weights, 2, dtype=torch.int64, columns=2)
    assert (two[:, 0] != two[:, 1]).all() and (two != 1).all()
    second = float((two[:, 1] == 2).double().mean())
    assert second == pytest.approx(0.1 * 0.6 / 0.9 + 0.3 * 0.6 / 0.7, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_below_one_are_so_in_every_dtype(dtype: torch.dtype) -> None:
    found = draw(aten.rand.default, [COUNT], dtype=dtype)
    assert found.min() >= 0 and found.max() < 1


def test_rows_and_columns_are_independent() -> None:
    rows, columns = (row_numbers((((0, 300),),) * 2, (300, 300), CPU), column_numbers((((0, 300),),), CPU))
    u = uniform_numbers(5, rows, columns) - 0.5
    for shifted in (u.roll(1, 0), u.roll(1, 1), u.T):
        assert abs(float((u * shifted).mean())) < 12 * 1e-3 / 12


def _random_operators() -> Iterator[Any]:
    for packet in (getattr(aten, name) for name in dir(aten)):
        for overload in getattr(packet, "overloads", list)():
            target = getattr(packet, overload)
            random = torch.Tag.nondeterministic_seeded in target.tags or target in _UNTAGGED
            if random and not target._schema.is_mutable and not {"generator", "names"} & {*overload.split("_")}:
                yield target


APART = {"aten.dropout", "aten.native_dropout", "aten.scaled_dot_product_attention"}
"""Their masks are by position."""
WHOLE = {"aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"}
"""Their rules leave them whole where they draw."""


def test_random_operators_draw_by_position_or_are_computed_whole() -> None:
    for target in _random_operators():
        name = "aten." + target.overloadpacket.__name__
        if name in REGISTRY and name not in APART | WHOLE:
            assert target in DRAWS or target is aten.bernoulli.p or target is aten.randint_like.Tensor, target
    assert all("aten." + target.overloadpacket.__name__ in REGISTRY for target in DRAWS)
