"""Dropout with a seed of its own: what it computes, and what it keeps."""

from __future__ import annotations

import pytest
import torch

from whale.runtime.random import RNGPosition, SeededCall, SeededDropout


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_a_dropout_scales_what_it_keeps_and_remembers_a_byte_an_element(probability: float) -> None:
    kept: list[torch.Tensor] = []
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y, mask = SeededDropout(probability, 1, RNGPosition(seed=0), with_mask=True)(x)
    assert [tensor.nbytes for tensor in kept] == [1000]
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    torch.testing.assert_close(y, mask.double() * scale)
    y.sum().backward()
    torch.testing.assert_close(x.grad, mask.double() * scale)
    assert abs(float(mask.double().mean()) - (1 - probability)) < 0.05


def test_a_seeded_call_repeats_and_touches_no_other_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("generators of all devices would be seeded")

    monkeypatch.setattr(torch, "manual_seed", refuse)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    call = SeededCall(torch.ops.aten.rand.default, 3, RNGPosition(seed=5))
    before = torch.get_rng_state()
    first = call([8], dtype=torch.float64, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(call([8], dtype=torch.float64, device="cpu"), first)
    assert not torch.equal(SeededCall(torch.ops.aten.rand.default, 4, RNGPosition(5))([8], dtype=torch.float64), first)
    generator = torch.Generator().manual_seed(RNGPosition(seed=5).derive(3))
    torch.testing.assert_close(first, torch.rand(8, dtype=torch.float64, generator=generator))


def test_a_seeded_call_that_fails_restores_the_generator() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        SeededCall(torch.ops.aten.rand.default, 3, RNGPosition(0))([-1])
    assert torch.equal(torch.get_rng_state(), before)
