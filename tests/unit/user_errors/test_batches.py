"""Micro-batches that cannot be cut, models without a loss, batches that forward does not take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.refusals import refused
from tests.small_models import decoder, tokens
from whale import api
from whale.errors import CaptureError, UsageError

# --- micro-batches ----------------------------------------------------------------------------------------------------


def test_micro_batches_that_do_not_divide_the_batch_name_the_nearest() -> None:
    refused(UsageError, ["micro_batches=3", "batch of 8 rows", "use 2 or 4"], decoder(layers=1), micro_batches=3)


class Coupled(nn.Module):
    """A model whose rows depend on each other."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = x - x.mean(0, keepdim=True) if self.norm is None else self.norm(x)
        return x.pow(2).mean()


@pytest.mark.parametrize(("norm", "operator"), [(False, "aten.sub.Tensor"), (True, "batch_norm")])
def test_rows_that_depend_on_each_other_name_the_operator_and_its_line(norm: bool, operator: str) -> None:
    line = Coupled.forward.__code__.co_firstlineno + 2
    parts = ["micro_batches=2", operator, f"{__file__}:{line}", "from other rows", "use micro_batches=1"]
    refused(UsageError, parts, Coupled(norm=norm), torch.randn(4, 8), micro_batches=2)


class Unknown(nn.Module):
    """A model with an operator of which no rule says what its rows are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.linear(x).reshape(-1, 4, 2)
        return torch.linalg.householder_product(parts, parts[:, 0]).sum()


def test_an_operator_without_a_rule_is_not_said_to_mix_rows() -> None:
    parts = ["micro_batches=2", "householder_product", "has no axis rule", "use micro_batches=1"]
    refused(UsageError, parts, Unknown(), torch.randn(4, 8), micro_batches=2)


class Frequencies(nn.Module):
    """An embedding whose gradients are divided by the frequencies of the indices in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, scale_grad_by_freq=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x).square().mean()


def test_gradients_divided_by_frequencies_in_the_batch_couple_its_rows() -> None:
    line = Frequencies.forward.__code__.co_firstlineno + 1
    parts = ["micro_batches=2", f"{__file__}:{line}", "scale_grad_by_freq", "use micro_batches=1", "leave"]
    refused(UsageError, parts, Frequencies(), torch.randint(0, 5, (8, 3)), micro_batches=2)


class Bag(nn.Module):
    """A model with an operator that has no rule, and one that joins its result with rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.embedding = nn.EmbeddingBag(5, 4, mode="max", padding_idx=0), nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.bag(x)
        return (rows + self.embedding(x).mean(1)).square().mean()


def test_what_joins_rows_with_a_value_of_the_whole_batch_is_not_blamed() -> None:
    line = Bag.forward.__code__.co_firstlineno + 1
    parts = ["micro_batches=2", "embedding_bag", f"{__file__}:{line}", "has no axis rule"]
    refused(UsageError, parts, Bag(), torch.randint(0, 5, (8, 3)), micro_batches=2)


class Root(nn.Module):
    """A loss that is no sum over rows, but mixes none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean().sqrt()


def test_a_loss_that_is_no_sum_over_rows_is_not_said_to_mix_them() -> None:
    parts = ["micro_batches=2", "aten.sqrt", "needs the whole sum over the rows", "use micro_batches=1"]
    refused(UsageError, parts, Root(), torch.randn(4, 8), micro_batches=2)


class Averages(nn.Module):
    """A running mean over the rows of batches."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y.square().mean()


def test_a_running_mean_over_rows_is_refused_with_its_buffer() -> None:
    parts = ["micro_batches=2", "the buffer mean", "test_batches.py:", "a micro-batch has only a term"]
    refused(UsageError, parts, Averages(), torch.randn(4, 8), micro_batches=2)


class Halves(nn.Module):
    """A loss of a part of the batch, or of rows that are far apart."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        half = len(x) // 2
        if self.kind == "first":
            return self.linear(x[:half]).square().mean()
        if self.kind == "pairs":
            return self.linear(x).view(half, 2, 8).cumsum(1).square().mean()
        y = self.linear(x)
        return (y[:half] - y[half:]).square().mean()


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("first", ["computes the loss from no rows that could be divided", "x[:n]"]),
        ("pairs", ["does not divide the 4 parts of the batch of 8 rows", "computes 2 together", "use 4"]),
        ("far", ["aten.slice", "computes a row of the batch from other rows"]),
    ],
)
def test_rows_that_are_computed_together_are_told_from_rows(kind: str, parts: list[str]) -> None:
    refused(UsageError, ["micro_batches=8", *parts], Halves(kind), torch.randn(8, 8), micro_batches=8)


# --- the loss ---------------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    """A model that returns the result of a function."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x), x)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda y, x: y, ["must be a scalar", "shape (4, 8)", ".mean()", "loss_fn"]),
        (lambda y, x: None, ["returns NoneType, which has no loss", "loss_fn(output, batch)"]),
        (lambda y, x: {"logits": y}, ["returns dict, which has no loss", "pass labels"]),
        (lambda y, x: (y.sum(), y.mean(), y.abs().sum()), ["scalars at 0 and 1 and 2", "output[0]"]),
    ],
)
def test_an_output_without_a_scalar_loss_names_its_type_and_forward(make: Any, parts: list[str]) -> None:
    line = Returns.forward.__code__.co_firstlineno
    error = refused(CaptureError, parts, Returns(make), torch.randn(4, 8))
    assert isinstance(error, CaptureError)
    assert (error.file, error.line) == (__file__, line)


def test_a_loss_without_a_parameter_or_a_gradient_is_refused_with_its_line() -> None:
    def mean_of_input(y: Tensor, x: Tensor) -> Tensor:
        return x.mean()

    line = mean_of_input.__code__.co_firstlineno + 1
    parts = [f"the loss at {__file__}:{line} depends on no parameter"]
    refused(UsageError, parts, Returns(mean_of_input), torch.randn(4, 8))
    model = Returns(lambda y, x: y.mean()).requires_grad_(False)
    refused(UsageError, ["no parameter that requires a gradient", "requires_grad_()"], model, torch.randn(4, 8))
    parallel = api.parallelize(model.eval(), torch.randn(4, 8), device="cpu")
    parallel.eval_step(torch.randn(4, 8))
    with pytest.raises(UsageError, match="nothing to train"):
        parallel.train_step(torch.randn(4, 8))


# --- batches ----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A batch with names."""

    tokens: Tensor
    labels: Tensor


@dataclass
class Record:
    """A batch with names, and a number beside."""

    tokens: Tensor
    labels: Tensor
    step: int = 3


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ({}, ["holds no tensor (nothing)", "Decoder.forward"]),
        ((None,), ["holds no tensor (args[0]: NoneType)"]),
        ({"tokens": [torch.zeros(4, 6).long()] * 2, "labels": torch.zeros(4, 6).long()}, ["tokens is a list"]),
        (
            {"batch": {"tokens": torch.zeros(4, 6).long(), "labels": torch.zeros(4, 6).long()}},
            [
                "batch is a dict of tensors",
                "forward(self, tokens, labels) calls self.model({'tokens': tokens, 'labels': labels})",
            ],
        ),
        (
            (Pair(**tokens()),),
            ["args[0] is a Pair", "forward(self, tokens, labels) calls self.model(Pair(tokens, labels))"],
        ),
        (
            {"batch": Record(torch.ones(4), torch.ones(4))},
            [
                "batch is a Record of tensors",
                "forward(self, tokens, labels, step) calls self.model(Record(tokens=tokens, labels=labels, step=step))",
            ],
        ),
        (Record(torch.ones(4), torch.ones(4)), ["args[0] is a Record of tensors"]),
        (
            {"batch": SimpleNamespace(**tokens())},
            [
                "batch is a SimpleNamespace of tensors",
                "forward(self, tokens, labels) calls self.model with a SimpleNamespace of them",
            ],
        ),
        ({"batch": {"in": torch.ones(4), "2": torch.ones(4)}}, ["forward(self, x0, x1)", "{'in': x0, '2': x1}"]),
        (
            {"tokens": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
            ["tokens is a nested tensor", "to_padded_tensor"],
        ),
        ({"tokens": torch.eye(4).to_sparse()}, ["tokens is a sparse tensor", "to_dense"]),
        (([torch.zeros(4, 6).long()],), ["args[0] is a list of tensors", "forward(self, x0) calls self.model([x0])"]),
        ({"tokens": torch.zeros(4, 6).long()}, ["the batch has tokens", "(tokens, labels)", "'labels'"]),
        (tokens() | {"mask": torch.ones(8)}, ["tokens, labels, mask", "unexpected keyword argument 'mask'"]),
        (tuple(tokens().values()) * 2, ["4 positional", "too many positional"]),
        (tokens(rows=0), ["tokens has shape (0, 6)", "no rows"]),
    ],
)
def test_a_batch_that_forward_does_not_take_is_refused(batch: Any, parts: list[str]) -> None:
    refused(UsageError, parts, decoder(layers=1), batch)


@pytest.mark.filterwarnings("ignore:5 kinds of steps")
def test_steps_take_batches_of_other_sizes_and_refuse_others() -> None:
    model = api.parallelize(decoder(layers=1), tokens(), device="cpu", micro_batches=2)
    local = decoder(layers=1)
    for batch in (tokens(), tokens(rows=16), tokens(rows=3), tokens(length=9)):
        torch.testing.assert_close(
            model.train_step(**batch), local(**batch).detach(), rtol=1e-12, atol=0, check_dtype=False
        )
        torch.testing.assert_close(model.train_step(batch["tokens"], labels=batch["labels"]), model.train_step(batch))
    with pytest.raises(UsageError, match="the batch has tokens, but .*missing a required argument: 'labels'"):
        model.train_step(tokens=tokens()["tokens"])
    with pytest.raises(UsageError, match="the batch has tokens, targets"):
        model.train_step(tokens=tokens()["tokens"], targets=tokens()["labels"])
    with pytest.raises(UsageError, match="the batch has 1 positional"):
        model.train_step(tokens()["tokens"])
    with pytest.raises(
        CaptureError, match=r"small_models\.py:\d+: Decoder cannot be captured: .*but got torch.float32"
    ):
        model.train_step(**tokens() | {"tokens": torch.rand(8, 6)})
    with pytest.raises(UsageError, match="train_step"):
        model(**tokens())


def test_a_batch_of_another_dtype_names_the_operator_and_both_dtypes() -> None:
    model = api.parallelize(Returns(lambda y, x: y.mean()), torch.randn(4, 8), device="cpu")
    with pytest.raises(
        CaptureError, match=r"aten\.linear\.default of float32 and float64; give a batch of the model's"
    ):
        model.train_step(torch.randn(4, 8).double())


def test_a_batch_that_needs_a_gradient_or_cannot_be_kept_is_refused_before_the_step() -> None:
    model = Returns(lambda y, x: y.square().mean())
    parallel = api.parallelize(model, torch.randn(4, 8), device="cpu")
    with pytest.raises(UsageError, match=r"args\[0\] requires a gradient, .* detach\(\) it; .* local model"):
        parallel.train_step(torch.randn(4, 8, requires_grad=True))
    with torch.inference_mode():
        x = torch.randn(4, 8)
        parallel.eval_step(x)
    with pytest.raises(UsageError, match=r"args\[0\] was made under torch.inference_mode.* clone\(\)"):
        parallel.train_step(x)
    x = x.clone()
    torch.testing.assert_close(parallel.train_step(x).detach(), model(x).detach())


def test_a_parameter_of_another_shape_is_refused_before_the_step() -> None:
    parallel = api.parallelize(Returns(lambda y, x: y.square().mean()), torch.randn(4, 8), device="cpu")
    parallel.get_parameter("linear.weight").data = torch.zeros(16, 8)
    with pytest.raises(
        UsageError, match=r"linear.weight has shape \(16, 8\) on rank 0, .*has \(8, 8\): .*load_full_state"
    ):
        parallel.train_step(torch.randn(4, 8))
