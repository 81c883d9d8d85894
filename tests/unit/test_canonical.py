"""Rewrites to a smaller vocabulary keep the values, and show the axes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.graph.capture import capture

aten = torch.ops.aten


class Loss(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale).square().sum()


def written(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], 9)
    y[:, :6].copy_(x)
    y[:, 6:].copy_(x[:, :3])
    return y


def rewritten(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 2:4] = 2.0 * x[:, :2]
    y[:, 3:5] = x[:, :2]
    return y


def strided(x: Tensor) -> Tensor:
    y = x * 2
    y.as_strided((2, 2), (6, 2), 7).copy_(x[1:3, 4:])
    return y


CASES = {
    "every second element": (lambda x: x[:, 1::2] * x[:, ::2], {aten.slice.Tensor}),
    "every third from the last": (lambda x: x[:, 2::3], {aten.slice.Tensor}),
    "a step that leaves a rest": (lambda x: x[:, ::4], set()),
    "repeated": (lambda x: x.repeat(2, 3), {aten.repeat.default}),
    "repeated to more dims": (lambda x: x.repeat(2, 1, 2), {aten.repeat.default}),
    "broadcast together": (lambda x: sum(torch.broadcast_tensors(x, x[:, :1], x[0])), {aten.broadcast_tensors.default}),
    "a tensor filled in pieces": (written, {aten.slice_scatter.default, aten.new_empty.default}),
    "pieces over pieces": (rewritten, {aten.slice_scatter.default}),
    "a filled diagonal": (lambda x: (x.T @ x).fill_diagonal_(0), {aten.as_strided_scatter.default}),
    "a filled diagonal of columns": (lambda x: (x[:, :4].T * 2).fill_diagonal_(1), {aten.as_strided_scatter.default}),
    "a write to a strided view": (strided, {aten.as_strided_scatter.default}),
    "one position of each row": (lambda x: x[torch.arange(len(x)), torch.arange(4) % 3], {aten.index.Tensor}),
    "one position by a step": (lambda x: x[torch.arange(0, len(x), 1), torch.arange(4) % 3], {aten.index.Tensor}),
    "joined by another name": (lambda x: torch.concat([x, x], 1), {aten.concat.default}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_stay(case: str) -> None:
    function, gone = CASES[case]
    torch.manual_seed(0)
    model, x = Loss(function), torch.randn(4, 6)
    captured = capture(model, (x,))
    assert not gone & {node.target for node in captured.graph.nodes}
    given = {**dict(model.named_parameters()), "args[0]": x}
    names = captured.parameters | captured.inputs
    arguments = [given[names[n.name]] for n in captured.graph.nodes if n.op == "placeholder" and n.name in names]
    found, expected = captured.module(*arguments)[0], model(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss, [model.scale])[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)


class Shifted(nn.Module):
    """A loss to which numbers are added, as constant terms of formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        likelihood = 1.5 - self.layer(x).square().mean()
        return torch.sub(2 * (likelihood + 0.25), 3, alpha=0.5) - 1


def test_numbers_added_to_a_loss_are_terms_that_one_micro_batch_has() -> None:
    torch.manual_seed(0)
    local, x = Shifted().double(), torch.randn(8, 3, dtype=torch.float64)
    parallel = whale.parallelize(copy.deepcopy(local), x, micro_batches=4, device="cpu")
    expected = local(x)
    expected.backward()
    torch.testing.assert_close(parallel.train_step(x), expected)
    for name, gradient in parallel.full_gradients().items():
        torch.testing.assert_close(gradient, local.get_parameter(name).grad)


class Masked(nn.Module):
    """Writes of a number to where a mask is set, values that are never read, and a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        unread = self.layer(x).sum()  # noqa: F841
        h = self.layer(x).clone()
        h[h < -0.2] = 0.1
        h[x[:, 0] > 0.5] = 3.0
        with torch.no_grad():
            teacher = self.layer(2 * x)
        return (h - teacher).square().mean()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_numbers_are_written_by_masks_to_each_row(micro_batches: int) -> None:
    torch.manual_seed(0)
    local, x = Masked().double(), torch.randn(8, 3, dtype=torch.float64)
    parallel = whale.parallelize(copy.deepcopy(local), x, micro_batches=micro_batches, device="cpu")
    expected = local(x)
    expected.backward()
    torch.testing.assert_close(parallel.train_step(x), expected)
    for name, gradient in parallel.full_gradients().items():
        torch.testing.assert_close(gradient, local.get_parameter(name).grad)


class Bags(nn.Module):
    """Bags of one size, in one of the ways to say where they begin."""

    def __init__(self, bags: Callable[[Tensor], tuple[Tensor, ...]], weighted: bool) -> None:
        super().__init__()
        self.bags, self.weighted = bags, weighted
        self.table = nn.EmbeddingBag(9, 3, mode="sum", sparse=True)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        of_bags = self.bags(weights)[0] if self.weighted else None
        return self.table(*self.bags(ids), per_sample_weights=of_bags).square().mean()


OF_ONE_SIZE: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "one in a bag": lambda ids: (ids[:, :1],),
    "a column of ones": lambda ids: (ids.unbind(1)[1].unsqueeze(1),),
    "a begin for each": lambda ids: (ids[:, 1], torch.arange(len(ids))),
    "a begin and a step": lambda ids: (ids.flatten(), torch.arange(0, ids.numel(), 2)),
}


@pytest.mark.parametrize("begins", [(0, 8, 1), (0, 8, 2)])
def test_the_last_begin_may_be_the_end_of_the_last_bag(begins: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    local, ids = Bags(lambda ids: (ids.flatten(), torch.arange(*begins)), weighted=False), torch.randint(9, (4, 2))
    local.table.include_last_offset, local.table.mode = True, "mean"
    parallel = whale.parallelize(copy.deepcopy(local), (ids, ids), device="cpu")
    torch.testing.assert_close(parallel.train_step(ids, ids), local(ids, ids))


def test_the_gradient_of_a_maximum_goes_to_the_first_of_equal_rows() -> None:
    local, ids = Bags(lambda ids: (ids,), weighted=False), torch.tensor([[5, 5, 3], [3, 5, 1], [2, 2, 2], [7, 8, 0]])
    local.table.mode, local.table.sparse = "max", False
    with torch.no_grad():
        local.table.weight.copy_(torch.arange(27).remainder(4).reshape(9, 3))
    parallel = whale.parallelize(copy.deepcopy(local), (ids, ids), micro_batches=2, device="cpu")
    expected = local(ids, ids)
    expected.backward()
    torch.testing.assert_close(parallel.train_step(ids, ids), expected)
    torch.testing.assert_close(parallel.full_gradients()["table.weight"], local.table.weight.grad)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", OF_ONE_SIZE)
def test_bags_of_one_size_are_looked_up_by_rows_of_the_batch(case: str, weighted: bool) -> None:
    torch.manual_seed(0)
    local, ids = Bags(OF_ONE_SIZE[case], weighted).double(), torch.randint(9, (8, 2))
    batch = {"ids": ids, "weights": torch.rand(8, 2, dtype=torch.float64)}
    parallel = whale.parallelize(copy.deepcopy(local), batch, micro_batches=4, device="cpu")
    expected = local(**batch)
    expected.backward()
    torch.testing.assert_close(parallel.train_step(**batch), expected)
    assert local.table.weight.grad is not None
    torch.testing.assert_close(parallel.full_gradients()["table.weight"], local.table.weight.grad.to_dense())
