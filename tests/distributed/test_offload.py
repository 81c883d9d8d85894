"""Activations on the host: the bits of losses and gradients are those without."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.small_models import decoder, tokens
from whale.compile import builder
from whale.errors import UsageError
from whale.runtime.host import arrived, fetch, to_host
from whale.runtime.launch import World
from whale.strategies import offloading

STAGES = {"layers.0": whale.stage(), "layers.1": whale.stage()}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def trained(layout: Any, options: dict[str, Any], dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and gradients of the last."""
    torch.manual_seed(0)
    model = decoder(layers=2, heads=2).to(dtype)
    whale.annotate(model, layout)
    made = whale.parallelize(model, tokens(), device="cpu", seed=0, **options)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(made.train_step(**tokens()).item())
        gradients = made.full_gradients()
        optimizer.step()
    return losses, gradients


def apart(world: World, layout: Any, options: dict[str, Any], dtype: torch.dtype) -> tuple[bool, bool, int]:
    """Whether losses and gradients are equal to the bit, and how many tensors were on the host."""
    plain = trained(layout, options, dtype)
    count = 0
    fetch = offloading.fetch

    def counted(held: Any) -> Any:
        nonlocal count
        count += 1
        return fetch(held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading, "SMALLEST_BYTES", 0)
        patch.setattr(offloading, "fetch", counted)
        losses, gradients = trained(layout, {**options, "offload": ["activations"]}, dtype)
    same = all(torch.equal(gradients[name], x) for name, x in plain[1].items())
    return losses == plain[0], same, count


@pytest.mark.parametrize(
    ("layout", "options", "dtype"),
    [
        ({"": whale.replicate()}, {"zero": 3, "micro_batches": 2}, torch.float64),
        ({"": whale.split()}, {"micro_batches": 2, "recompute": "selective"}, torch.float64),
        (STAGES, {"micro_batches": 4, "schedule": "zero_bubble"}, torch.float64),
        (STAGES, {"micro_batches": 2, "recompute": "full", "precision": "bf16"}, torch.float32),
    ],
    ids=["replicate, zero", "split, selective", "zero bubble", "full, bfloat16"],
)
def test_bits_are_those_without(worlds: Worlds, layout: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    for losses, gradients, count in worlds.run(2, apart, layout, options, dtype):
        assert losses
        assert gradients
        assert count


class Views(nn.Module):
    """Views of one tensor, tensors of several results, and one that is a result too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 12), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss and its parts."""
        a, b = self.inner(x).split(6, dim=-1)
        top, places = (a * b.transpose(0, 1).reshape(a.shape)).sort(-1)
        hidden = self.outer(torch.nn.functional.layer_norm(top * a.T.T, (6,)).exp().tanh())
        return {"loss": (hidden * hidden).sum() + places.sum() * 0, "hidden": hidden}


def test_memory_of_what_leaves_is_needed_until_the_next_few_do() -> None:
    tensors = [torch.empty(8, device="meta") for _ in range(4)]
    known = [weakref.ref(x) for x in tensors]
    held = [to_host(x) for x in tensors]
    tensors.clear()
    assert [one() is None for one in known] == [True, True, False, False]
    assert arrived(fetch(held[3])).shape == (8,)
    assert all(one() is None for one in known)


def test_views_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "SMALLEST_BYTES", 0)
    torch.manual_seed(0)
    local = Views().double()
    other = Views().double()
    other.load_state_dict(local.state_dict())
    x = torch.randn(6, 6, dtype=torch.float64)
    made = whale.parallelize(other, {"x": x}, device="cpu", offload="activations")
    loss, output = made.train_step(x=x, outputs=True)
    expected = local(x)
    expected["loss"].backward()
    assert torch.equal(loss, expected["loss"])
    assert torch.equal(output["hidden"], expected["hidden"])
    for name, parameter in local.named_parameters():
        own = made.get_parameter(name)
        assert own.grad is not None
        assert parameter.grad is not None
        assert torch.equal(own.grad, parameter.grad)


@pytest.mark.parametrize("options", [{"recompute": "auto"}, {"zero": "auto"}, {"zero": 3, "state_shares": "auto"}])
def test_what_is_chosen_leaves_the_state_on_the_host(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    made: list[bool] = []
    assemble = builder.assemble

    def noted(step: Any, *args: Any, **kwargs: Any) -> Any:
        made.extend(unit.on_host for unit in step.units)
        return assemble(step, *args, **kwargs)

    monkeypatch.setattr(builder, "assemble", noted)
    whale.parallelize(decoder(), tokens(), device="cpu", offload="state", **options)
    assert made and all(made)


def test_other_words_are_refused() -> None:
    with pytest.raises(UsageError, match="offload.*'state'"):
        whale.parallelize(decoder(), tokens(), device="cpu", offload="optimizer")
