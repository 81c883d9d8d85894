"""Functions of torch.nn in one process: exact, whole and in micro-batches, or refused with what to write instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.torch_functions import ROWS_OF, error, paths, words
from whale.errors import CaptureError, UsageError


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", ROWS_OF)
def test_functions_of_torch_are_exact(name: str, micro_batches: int) -> None:
    assert error(name, micro_batches=micro_batches) < 1e-12


F: Any = torch.nn.functional


class Ends(nn.Module):
    def __init__(self, width: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, width), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).mean()


LABELS = torch.arange(8) % 5
ENDS = torch.tensor([3, 8], dtype=torch.int32)
GAMMA = torch.distributions.Gamma
REFUSED: dict[str, tuple[int, Callable[[Tensor], Tensor], str]] = {
    "targets of ctc_loss that are joined": (
        60,
        lambda h: F.ctc_loss(paths(h.view(8, 12, 5)), words(LABELS).flatten(), (12,) * 8, (3,) * 8),
        "give log-probabilities of shape (time, rows, classes), and targets of shape (rows, longest), padded",
    ),
    "a grouped product whose shapes torch has for bfloat16 alone": (
        4, lambda h: F.grouped_mm(h, torch.ones(2, 4, 4), offs=ENDS),
        "here, give bfloat16, for which alone torch knows its shapes without data, or use "
        "torch.ops.transformers.grouped_mm_fallback",
    ),
    "one_hot without a number of classes": (5, lambda h: h * F.one_hot(LABELS), "give num_classes"),
    "a gamma of parameters": (4, lambda h: GAMMA(h.exp(), torch.ones(4)).rsample(), "is written to through detach()"),
    "a beta of parameters": (
        4, lambda h: torch.distributions.Beta(h.exp(), h.exp()).rsample(), "custom autograd function _Dirichlet",
    ),
    "a norm across channels": (4, lambda h: nn.CrossMapLRN2d(2)(h[..., None, None]), "function CrossMapLRN2d"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_have_is_refused(name: str) -> None:
    width, function, message = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        whale.parallelize(Ends(width, function), torch.ones(8, 3), device="cpu")
    assert message in str(caught.value) and __file__ in str(caught.value)


def test_bags_divide_gradients_by_frequencies_as_torch_does() -> None:
    """Frequencies of torch's bags on a processor are those of other rows, unlike an embedding's."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.bags = nn.EmbeddingBag(9, 4, mode="sum", scale_grad_by_freq=True)

        def forward(self, indices: Tensor) -> Tensor:
            return self.bags(indices).square().mean()

    local, indices = Bags(), torch.tensor([[0, 3, 3], [7, 8, 0], [5, 0, 1], [8, 8, 6]])
    parallel = whale.parallelize(copy.deepcopy(local), indices, device="cpu")
    parallel.train_step(indices)
    local(indices).backward()
    assert local.bags.weight.grad is not None
    torch.testing.assert_close(parallel.full_gradients()["bags.weight"], local.bags.weight.grad)


def test_numbers_that_torch_draws_one_after_the_other_are_refused_in_micro_batches() -> None:
    model = Ends(4, lambda h: h * torch.poisson(torch.full((8, 4), 3.0)))
    with pytest.raises(UsageError, match=r"poisson.* draws random numbers of the whole batch .*torch\.rand"):
        whale.parallelize(model, torch.ones(8, 3), device="cpu", micro_batches=2)


def test_a_variance_below_zero_is_not_a_number() -> None:
    model = Ends(4, lambda h: F.gaussian_nll_loss(h, torch.zeros(8, 4), h * 0 - 1))
    assert whale.parallelize(model, torch.ones(8, 3), device="cpu").train_step(torch.ones(8, 3)).isnan()


def test_a_capture_leaves_distributions_as_they_were() -> None:
    before = torch.distributions.Distribution._validate_args
    whale.parallelize(Ends(4, lambda h: h), torch.ones(8, 3), device="cpu")
    assert torch.distributions.Distribution._validate_args is before
