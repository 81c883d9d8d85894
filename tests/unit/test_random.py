"""Dropout with a seed of its own: what it computes, and what it keeps."""

from __future__ import annotations

import pytest
import torch

from whale.runtime.random import RNGPosition, SeededDropout


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
