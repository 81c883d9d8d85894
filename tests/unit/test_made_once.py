"""Tensors that a forward makes in its first call and keeps: steps are the local ones, whatever lengths came before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.made_once import KEEPING, REFUSED, Attention, Buffer, Grown, Inside, Rotary, Shared, batch_of
from whale.errors import CaptureError
from whale.graph.capture import capture
from whale.graph.made_once import Attribute
from whale.runtime.module import ParallelModule


def built(kind: type[Attention]) -> Attention:
    torch.manual_seed(0)
    return kind()


def losses(model: nn.Module, lengths: Sequence[int]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    found = []
    for seed, length in enumerate(lengths):
        optimizer.zero_grad()
        batch = batch_of(length, seed)
        if isinstance(model, ParallelModule):
            loss = model.train_step(**batch)
        else:
            loss = model(**batch)
            loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def check(kind: type[Attention], example: int, lengths: Sequence[int]) -> None:
    parallel = whale.parallelize(built(kind), batch_of(example, 99), device="cpu")
    assert losses(parallel, lengths) == pytest.approx(losses(built(kind), lengths), rel=1e-5)


@pytest.mark.parametrize("kind", KEEPING, ids=lambda kind: kind.__name__)
def test_steps_are_the_local_ones_with_longer_and_shorter_batches(kind: type[Attention]) -> None:
    check(kind, 4, (4, 8, 4))


@pytest.mark.parametrize("kind", [Grown, Buffer, Shared], ids=lambda kind: kind.__name__)
def test_an_example_that_is_never_a_batch_leaves_nothing(kind: type[Attention]) -> None:
    check(kind, 8, (6, 4, 12, 6))


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_a_capture_does_not_know_is_refused_with_its_name_and_line(kind: type[Attention]) -> None:
    with pytest.raises(CaptureError, match=r"made_once\.py:\d+: the forward (changes|replaces)"):
        whale.parallelize(built(kind), batch_of(4, 0), device="cpu")


@pytest.mark.filterwarnings("ignore:5 kinds of steps")
def test_a_script_that_resets_a_table_has_another_one() -> None:
    class Window(Attention):
        window = 3

        def added(self, n: int, x: Tensor) -> Any:
            if self.table is None or self.table.size(0) < n:
                self.table = torch.ones(n, n).triu(1 - self.window) * self.window
            return self.table[:n, :n]

    local, parallel = built(Window), whale.parallelize(built(Window), batch_of(4, 99), device="cpu")
    for window in (3, 2, 2):
        for model in (local, parallel):
            model.window, model.table = window, None  # type: ignore[assignment]
        assert losses(parallel, (4, 8)) == pytest.approx(losses(local, (4, 8)), rel=1e-5)
        torch.testing.assert_close(parallel.table, local.table)


def test_a_call_before_makes_what_no_capture_knows() -> None:
    local, called = built(REFUSED[0]), built(REFUSED[0])
    for model in (local, called):
        model(**batch_of(4, 50))
    parallel = whale.parallelize(called, batch_of(4, 99), device="cpu")
    assert losses(parallel, (4, 8)) == pytest.approx(losses(local, (4, 8)), rel=1e-5)


def test_the_graph_is_that_of_later_calls() -> None:
    captured = capture(built(Grown), batch_of(4, 0))
    assert list(captured.made) == [Attribute("", "table")]
    assert [tuple(x.shape) for x in captured.constants.values()] == [(4, 4)]
    assert not captured.graph.find_nodes(op="call_function", target=torch.ops.aten.arange.default)


def test_the_script_s_model_keeps_what_it_had() -> None:
    model = built(Inside)
    captured = capture(model, batch_of(4, 0))
    assert list(captured.made) == [Attribute("positions", "table")]
    assert model.get_submodule("positions").table is None


def test_a_model_without_data_is_planned() -> None:
    """Its buffers have no values, and a plan needs none."""
    with torch.device("meta"):
        model = Rotary()
    captured = capture(model, batch_of(4, 0))
    assert sorted(attribute.name for attribute in captured.made) == ["cos", "longest", "sin"]


def test_evaluation_and_training_have_one_table() -> None:
    local, parallel = built(Grown), whale.parallelize(built(Grown), batch_of(4, 99), device="cpu")
    with torch.no_grad():
        expected = [local(**batch_of(length, 1)).item() for length in (8, 4)]
    assert [parallel.eval_step(**batch_of(length, 1)).item() for length in (8, 4)] == pytest.approx(expected)
    assert losses(parallel, (4, 8, 12)) == pytest.approx(losses(local, (4, 8, 12)), rel=1e-5)
