"""Gradients that ranks exchange and sum in another number type than theirs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed.parity import Worlds
from tests.distributed.two_ranks import Two, refusal
from whale.runtime.launch import World

ROWS, WIDTH = 8, 16
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    worlds = Worlds()
    yield Two(worlds)
    worlds.close()


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 1)).to(dtype)


def batches(dtype: torch.dtype) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=made).to(dtype) for _ in range(2)]


def loss_of(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def terms(x: Tensor, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The gradients of the rows of each rank, of the mean over all."""
    found = []
    for rows in x.chunk(2):
        local = model(dtype)
        (local(rows).square().sum() / ROWS).backward()
        found.append({name: p.grad for name, p in local.named_parameters() if p.grad is not None})
    return found


def steps(world: World, dtype: torch.dtype, summed: str, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Whole gradients of a step, of two that are accumulated, and of one after zero_grad()."""
    made = copy.deepcopy(model(dtype))
    whale.annotate(made, {"": whale.replicate()})
    first, second = batches(dtype)
    parallel: Any = whale.parallelize(
        made, first, loss_fn=loss_of, device="cpu", gradient_dtype=summed, timeout_seconds=30, **options
    )
    found = []
    for x, clear in ((first, False), (second, False), (second, True)):
        if clear:
            parallel.zero_grad()
        parallel.train_step(x)
        found.append({name: g.clone() for name, g in parallel.full_gradients().items()})
    return found


@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"zero": 3}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "summed"), [(torch.float32, "bf16"), (torch.float64, "fp16"), (torch.bfloat16, "fp32")], ids=str
)
def test_gradients_are_sums_in_the_other_number_type(
    ranks: Two, dtype: torch.dtype, summed: str, options: dict[str, Any]
) -> None:
    own, other = ranks.run(steps, dtype, summed, options)
    torch.testing.assert_close(own, other, rtol=0, atol=0)
    first, both, again = own
    for x, found in zip(batches(dtype), (first, again), strict=True):
        expected = {}
        mine, theirs = terms(x, dtype)
        for name, gradient in mine.items():
            rounded = [g.to(TYPES[summed]) for g in (gradient, theirs[name])]
            # who owns a stretch adds rounded terms in its own number type, where the processor sums it
            added = rounded[0] + rounded[1] if not options else rounded[0].to(dtype) + rounded[1].to(dtype)
            expected[name] = added.to(dtype)
        rounding = torch.finfo(dtype).eps * 4  # of the backwards, whose products have other shapes
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)
    rounding = 2 * max(torch.finfo(dtype).eps, torch.finfo(TYPES[summed]).eps)
    sums = {name: first[name] + again[name] for name in first}
    torch.testing.assert_close(both, sums, rtol=rounding, atol=rounding / 8)


def refused(world: World) -> list[str]:
    x = batches(torch.float32)[0]

    def make(**options: Any) -> str:
        return refusal(lambda: whale.parallelize(model(torch.float32), x, loss_fn=loss_of, device="cpu", **options))

    return [make(gradient_dtype="int8"), make(precision="fp8")]


def test_other_number_types_are_refused_by_name(ranks: Two) -> None:
    for summed, precision in ranks.run(refused):
        assert "gradient_dtype" in summed and "bf16" in summed
        assert "fp8" in precision and "torchao" in precision
