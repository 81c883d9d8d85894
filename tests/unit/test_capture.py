"""Captures are independent of their example."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import fx, nn

import whale
from tests.small_models import decoder, tokens
from whale.errors import CaptureError
from whale.graph.capture import capture


def test_entries_of_the_example_that_are_one_tensor_stay_apart() -> None:
    ids = tokens()["tokens"]
    example = {"tokens": ids, "labels": ids}
    model = decoder(layers=1)
    assert set(capture(model, example).inputs.values()) == {"tokens", "labels"}
    local = model(tokens=ids, labels=ids.roll(1, 0)).item()
    parallel = whale.parallelize(model, example, device="cpu")
    assert parallel.train_step(tokens=ids, labels=ids.roll(1, 0)).item() == pytest.approx(local, rel=1e-12)
    assert parallel.train_step(**example).item() != pytest.approx(local, rel=1e-3)


class _Averages(nn.Module):
    """Keeps an average of what it sees, and adds it."""

    average: torch.Tensor

    def __init__(self, *, replaced: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.replaced = replaced
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.replaced:
            self.average = self.average * 0.9 + x.detach().mean(0)
        else:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0))
        return (x + self.average).square().mean()


@pytest.mark.parametrize("replaced", [False, True])
def test_averages_in_buffers_are_kept_and_have_no_gradient(replaced: bool) -> None:
    torch.manual_seed(0)
    model, x = _Averages(replaced=replaced), torch.randn(2, 4)
    captured = capture(model, (x,))
    assert captured.mutated == ("average",)
    values = {**dict(model.named_parameters()), **{name: b.clone() for name, b in model.named_buffers()}}
    names = {**captured.parameters, **captured.buffers}
    holes = captured.graph.find_nodes(op="placeholder")
    loss, average = captured.module(*(values[names[n.name]] if n.name in names else x for n in holes))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected = model(x)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(average, model.average)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, list(model.parameters())))


class _Positions(nn.Module):
    """Makes a table of positions when a batch of another width comes, as ConViT does."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table.shape[1] != x.shape[1]:
            self.table = torch.arange(float(x.shape[1]))[None]
        return x * self.table


def test_a_buffer_that_becomes_larger_is_named_and_a_call_before_makes_it() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), _Positions()), torch.ones(2, 4)
    told = r"test_capture\.py:\d+: .* 1\.table of shape \(1, 1\) .* by one of shape \(1, 4\).* call the model once"
    with pytest.raises(CaptureError, match=told):
        capture(model, x, loss_fn=lambda output, batch: output.sum())
    local = model(x).sum()
    made = whale.parallelize(model, x, loss_fn=lambda output, batch: output.sum(), device="cpu")
    assert made.train_step(x).item() == pytest.approx(local.item())


class _Meanwhile(nn.Module):
    """Changes a graph module in another thread while its own forward is traced."""

    def __init__(self, other: fx.GraphModule) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._change = lambda: self._turn(other)

    @staticmethod
    def _turn(other: fx.GraphModule) -> None:
        next(node for node in other.graph.nodes if node.target is torch.sin).target = torch.cos
        other.recompile()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=self._change)
        thread.start()
        thread.join()
        return self.linear(x).square().mean()


def test_graph_modules_of_other_threads_are_compiled_as_always_while_a_model_is_captured() -> None:
    other = fx.symbolic_trace(lambda x: torch.sin(x))
    with torch.device("meta"):
        model = _Meanwhile(other)
    capture(model, (torch.empty(2, 4, device="meta"),))
    assert "cos" in other.code
