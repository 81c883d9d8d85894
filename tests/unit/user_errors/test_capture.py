"""Code that cannot be captured: it is refused at its own line, and torch is left as it was."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests.refusals import refused
from tests.small_models import decoder, tokens
from whale import api
from whale.errors import CaptureError, UsageError

SOURCE = """\
import numpy
import torch
from torch import nn

import whale


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 100 * gradient


@whale.row_wise
class MeanFree(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@whale.row_wise
class FreeBackward(MeanFree):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


@whale.row_wise
class Positions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.arange(len(x), dtype=x.dtype).unsqueeze(1)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


@whale.row_wise(whole=(1,))
class WholeMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).mean(0)


wrong, grad = Wrong.apply, torch.autograd.grad


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = self.between(x)
        return self.last(x).pow(2).mean()

    def between(self, x):
        {code}
        return x
"""
LINE = SOURCE[: SOURCE.index("{code}")].count("\n") + 1


@pytest.fixture
def model_of(tmp_path: Path) -> Callable[[str], nn.Module]:
    def make(code: str) -> nn.Module:
        file = tmp_path / "my_model.py"
        file.write_text(SOURCE.replace("{code}", code))
        specification = importlib.util.spec_from_file_location("my_model", file)
        assert specification is not None and specification.loader is not None
        module: ModuleType = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        model: nn.Module = module.Model()
        return model

    return make


DATA = ["depends on a tensor's values", "torch.where"]


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("x = x if x.sum() > 0 else -x", DATA),
        ("x = x * x.sum().item()", DATA),
        ("x = x[: x.argmax().item() % 3]", DATA),
        ("x = x[x[:, 0].nonzero().squeeze(1)]", DATA),
        ("x = x[x > 0].sum() * x", DATA),
        ("x = x * x.tolist()[0][0]", DATA),
        ("x = x * torch.linalg.lstsq(x, x).solution.sum()", ["in linalg_lstsq, control flow", *DATA]),
        ("x = x * nn.functional.one_hot(x.long().abs()).sum()", ["in one_hot, control flow", *DATA]),
        ("x = torch.distributions.Gamma(x.exp(), x.exp(), validate_args=True).rsample()", ["in Gamma", *DATA]),
        (
            "x = nn.LSTM(8, 8)(nn.utils.rnn.pack_padded_sequence(x[None], x.long()[:, 0], True))",
            ["of a packed sequence", "leave pack_padded_sequence out", "with gather"],
        ),
        ("x = sum([x for _ in range(int(x.sum()))], x)", DATA),
        ("x = x * float(x.detach().numpy().sum())", ["numpy reads a tensor's values", "torch's operators"]),
        ("x = x + torch.from_numpy(numpy.tanh(x.detach().numpy()))", ["numpy reads"]),
        ("print('value', x)", ["printed", "remove it from forward"]),
        ("print(f'{x.mean():.3f}')", ["printed", "remove it from forward"]),
        ("x = Wrong.apply(x)", ["custom autograd function Wrong", "@whale.row_wise"]),
        ("x = wrong(x)", ["custom autograd function Wrong", "@whale.row_wise"]),
        ("x, = grad(x.square().sum(), x)", ["gradients are computed inside forward"]),
        ("x, = grad(x.square().sum(), x, create_graph=True)", ["gradients are computed inside forward"]),
        ("x = MeanFree.apply(x)", ["MeanFree is declared row-wise", "its rows depend on each other"]),
        ("x = FreeBackward.apply(x)", ["FreeBackward is declared row-wise", "its rows depend on each other"]),
        ("x = Positions.apply(x)", ["Positions is declared row-wise", "or on how many there are"]),
        ("x = MeanFree.apply([x])", ["MeanFree is row-wise and was given tensors in a list"]),
        ("x = WholeMean.apply(x, self.first.bias)", ["WholeMean is declared row-wise", "are no sums over rows"]),
        ("x = torch.vmap(self.first)(x)", ["torch.vmap and other transforms of torch.func", "torch.einsum"]),
        ("x = torch.func.grad(lambda y: self.first(y).sum())(x)", ["transforms of torch.func inside forward"]),
        ("x, = torch.autograd.grad(x.square().sum(), x)", ["gradients are computed inside forward"]),
        ("torch.autograd.backward(x.sum())", ["gradients are computed inside forward"]),
        ("x.detach().mul_(2)", ["is written to through detach()", "a clone()"]),
        ("x.data[:, 0] = 0", ["is written to through detach()", "a clone()"]),
        ("x.detach()[:, 1].zero_()", ["is written to through detach()", "a clone()"]),
        ("x.detach().view(-1)[::2] = 0", ["is written to through detach()", "a clone()"]),
        ("torch.set_grad_enabled(False); x.mul_(2); torch.set_grad_enabled(True)", ["or under torch.no_grad()"]),
        ("x.sum().backward()", ["gradients are computed inside forward"]),
        ("x.register_hook(lambda gradient: 2 * gradient)", ["register_hook", "hook on a gradient"]),
        ("raise ValueError('my own trouble')", ["its forward raised ValueError: my own trouble", "one device"]),
        ("x = x @ torch.ones(3, 3)", ["[4, 8] X [3, 3]", "one device"]),
    ],
)
def test_code_that_cannot_be_captured_is_refused_at_its_own_line(
    model_of: Callable[[str], nn.Module], code: str, parts: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    error = refused(CaptureError, parts, model_of(code), torch.randn(4, 8))
    assert isinstance(error, CaptureError)
    assert error.file is not None
    assert (Path(error.file).name, error.line) == ("my_model.py", LINE)
    assert str(error).startswith(f"{error.file}:{LINE}: ")
    assert error.exit_code == 2
    assert len(str(error)) < 600
    assert capfd.readouterr().err == ""  # no dump of torch's


def test_the_original_error_is_the_cause(model_of: Callable[[str], nn.Module]) -> None:
    error = refused(CaptureError, ["my own trouble"], model_of("raise ValueError('my own trouble')"), torch.randn(4, 8))
    assert isinstance(error.__cause__, ValueError)


def test_hooks_on_gradients_are_refused_by_the_name_of_what_has_them() -> None:
    model = decoder(layers=1)
    handle = model.head.register_full_backward_hook(lambda *ignored: None)
    refused(CaptureError, ["the module 'head' of Decoder has a backward hook", "remove it"], model)
    handle.remove()
    handle = model.head.weight.register_hook(lambda gradient: gradient)
    refused(CaptureError, ["the parameter head.weight of Decoder has a gradient hook", "after train_step"], model)
    handle.remove()
    model.head.register_forward_hook(lambda module, inputs, output: 2 * output)
    twice = api.parallelize(model, tokens(), device="cpu").train_step(**tokens())
    torch.testing.assert_close(twice, model(**tokens()).detach())


def test_capture_leaves_torch_as_it_was(model_of: Callable[[str], nn.Module]) -> None:
    apply = torch.autograd.Function.__dict__["apply"]
    refused(CaptureError, ["Wrong"], model_of("x = Wrong.apply(x)"), torch.randn(4, 8))
    assert torch.autograd.Function.__dict__["apply"] is apply
    model = model_of("x = Wrong.apply(x)")
    model(torch.randn(4, 8)).backward()


class Read(nn.Module):
    """A model, or a loss, that reads what a function gives."""

    def __init__(self, read: Callable[[Any], torch.Tensor], *, has_loss: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.listed: list[torch.Tensor] = [self.linear.weight]
        self.read, self.has_loss = read, has_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.read(self).sum()
        return y.square().mean() if self.has_loss else y


GLOBAL = nn.Parameter(torch.ones(3))


def test_a_parameter_that_is_not_the_models_is_refused_where_it_is_read() -> None:
    line = Read.forward.__code__.co_firstlineno + 1
    parts = [
        f"{__file__}:{line}",
        "a parameter of shape (3,)",
        "requires a gradient",
        "register it",
        "nn.ParameterList",
    ]
    refused(CaptureError, parts, Read(lambda model: GLOBAL), torch.randn(4, 8))
    parts = [f"{__file__}:{line}", "a tensor of shape (8, 8)", "not under a name", "nn.ParameterList"]
    refused(CaptureError, parts, Read(lambda model: model.listed[0]), torch.randn(4, 8))
    api.parallelize(Read(lambda model: GLOBAL.detach()), torch.randn(4, 8), device="cpu")
    GLOBAL.requires_grad_(False)
    api.parallelize(Read(lambda model: GLOBAL), torch.randn(4, 8), device="cpu")
    GLOBAL.requires_grad_(True)


class CentredLoss(nn.Module):
    """A loss with a buffer that it may write to, and a parameter."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.centre: torch.Tensor
        self.register_buffer("centre", torch.zeros(8))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.writes = writes

    def forward(self, output: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
        if self.writes:
            self.centre.mul_(0.9).add_(0.1 * output.detach().mean(0))
        return (output - self.centre).square().mean() * self.scale


def test_a_losss_module_may_have_constants_but_neither_a_state_nor_parameters() -> None:
    x, loss = torch.randn(4, 8), CentredLoss()
    model = nn.Linear(8, 8)
    parallel = api.parallelize(model, (x,), loss_fn=loss, device="cpu")
    torch.testing.assert_close(parallel.train_step(x).detach(), loss(model(x), (x,)).detach())
    loss.centre += 1
    torch.testing.assert_close(parallel.train_step(x).detach(), loss(model(x), (x,)).detach())
    loss.scale.requires_grad_(True)
    parts = [__file__, "a parameter of shape ()", "put a loss with parameters inside the model"]
    refused(CaptureError, parts, nn.Linear(8, 8), (x,), loss_fn=loss)
    parts = ["writes to a tensor that is no buffer of the model", "inside the model"]
    refused(CaptureError, parts, nn.Linear(8, 8), (x,), loss_fn=CentredLoss(writes=True))


def test_a_running_average_in_a_dict_is_refused_with_what_to_write() -> None:
    state = {"mean": torch.zeros(())}

    def loss_fn(output: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
        loss = output.square().mean()
        state["mean"] = 0.9 * state["mean"] + 0.1 * loss.detach()
        return loss / (1 + state["mean"])

    line = loss_fn.__code__.co_firstlineno + 2
    parts = [f"{__file__}:{line}", "loss_fn changes what it reaches", "register_buffer", "inside the model"]
    refused(CaptureError, parts, nn.Linear(8, 8), (torch.randn(4, 8),), loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("loss_fn", "example"),
    [
        (nn.functional.cross_entropy, "cross_entropy(output, batch[1])"),
        (nn.CrossEntropyLoss(), "loss(output, batch[1])"),
        (lambda output, y: nn.functional.cross_entropy(output, y), "loss(output, batch[1])"),
        (lambda output: output.mean(), "loss(output, batch[1])"),
    ],
)
def test_a_loss_of_an_output_and_a_target_is_shown_with_the_batch(loss_fn: Callable[..., Any], example: str) -> None:
    parts = ["loss_fn raised TypeError", "called as loss_fn(output, batch)", f"loss_fn=lambda output, batch: {example}"]
    batch = (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
    refused(UsageError, parts, nn.Linear(8, 8), batch, loss_fn=loss_fn)


def test_control_flow_of_a_module_of_torch_names_its_class() -> None:
    model = Read(lambda model: model.linear.bias)
    model.linear = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))  # type: ignore[assignment]
    refused(CaptureError, [__file__, "in BatchNorm1d, control flow"], model, torch.randn(4, 8))


def test_a_model_that_torch_has_made_parallel_is_refused_for_the_module_inside() -> None:
    refused(CaptureError, ["DataParallel", "give the module inside of it, model.module"], nn.DataParallel(decoder()))


def test_statistics_that_an_operator_writes_silently_are_refused() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), nn.InstanceNorm1d(4, track_running_stats=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.norm(self.first(x)).square().mean()
            return found

    refused(CaptureError, ["running statistics", "track_running_stats=False"], Normed(), torch.randn(2, 4, 8))
    model = Normed()
    model.norm.eval()
    parallel: Any = whale.parallelize(model, torch.randn(2, 4, 8), device="cpu")
    assert parallel.train_step(torch.randn(2, 4, 8)).isfinite()
