"""Dropout with a seed of its own: what it computes, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import whale
from whale.runtime.random import RNGPosition, SeededCall, SeededDropout, column_numbers, keep_mask, row_numbers

CPU = torch.device("cpu")
ROWS, COLUMNS = row_numbers((((0, 1000),),), (1000,), CPU), column_numbers((((0, 1000),),), CPU)


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_a_dropout_scales_what_it_keeps_and_remembers_a_byte_an_element(probability: float) -> None:
    kept: list[torch.Tensor] = []
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y, mask = SeededDropout(probability, 1, RNGPosition(seed=0), with_mask=True)(ROWS, COLUMNS, x)
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
    generator = torch.Generator().manual_seed(RNGPosition(seed=5).of_step(3))
    torch.testing.assert_close(first, torch.rand(8, dtype=torch.float64, generator=generator))


def test_a_seeded_call_that_fails_restores_the_generator() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        SeededCall(torch.ops.aten.rand.default, 3, RNGPosition(0))([-1])
    assert torch.equal(torch.get_rng_state(), before)


GOLDEN = ["1000010011111010", "1111010110110100"]


def numbers(*ranges: tuple[int, int], sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    held = tuple((each,) for each in ranges)
    return row_numbers(held, sizes, CPU), column_numbers(held, CPU)


def test_a_mask_is_the_same_for_a_part_as_in_the_whole() -> None:
    sizes = (6, 40, 500)
    whole = keep_mask(99, 0.7, *numbers((0, 6), (0, 40), (0, 500), sizes=sizes)).view(sizes)
    part = keep_mask(99, 0.7, *numbers((2, 5), (0, 40), (120, 500), sizes=sizes)).view(3, 40, 380)
    assert torch.equal(part, whole[2:5, :, 120:])
    ragged = ((0, 1), (4, 6)), ((7, 8),), ((0, 3), (490, 500))
    rows, columns = row_numbers(ragged, sizes, CPU), column_numbers(ragged, CPU)
    expected = whole[[0, 4, 5]][:, [7]][:, :, [0, 1, 2, *range(490, 500)]]
    assert torch.equal(keep_mask(99, 0.7, rows, columns).view(3, 1, 13), expected)
    nothing = row_numbers(((), ((0, 40),), ((0, 500),)), sizes, CPU)
    assert keep_mask(99, 0.7, nothing, columns).shape == (0, 13)


def test_a_mask_does_not_depend_on_how_much_is_computed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = numbers((0, 50), (0, 300), sizes=(50, 300))
    whole = keep_mask(7, 0.5, rows, columns)
    monkeypatch.setattr("whale.runtime.random._CPU_CHUNK", 1000)
    assert torch.equal(keep_mask(7, 0.5, rows, columns), whole)


def test_masks_are_these_bits_on_every_device() -> None:
    """Checkpoints resume with the masks that they would have had: another hash is another format."""
    mask = keep_mask(0x1234_5678_9ABC_DEF0, 0.5, *numbers((3, 5), (0, 16), sizes=(8, 16)))
    assert ["".join(map(str, row)) for row in mask.int().tolist()] == GOLDEN


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_masks_are_the_same_on_a_gpu() -> None:
    held, sizes, gpu = (((0, 300),), ((0, 4000),)), (300, 4000), torch.device("cuda")
    mask = keep_mask(5, 0.9, row_numbers(held, sizes, gpu), column_numbers(held, gpu))
    assert torch.equal(mask.cpu(), keep_mask(5, 0.9, *numbers((0, 300), (0, 4000), sizes=sizes)))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_elements_are_kept_as_often_as_they_should_and_independently(keep: float) -> None:
    """Sample means lie within five standard deviations, also those of pairs of neighbours in rows, columns, steps and
    operators."""
    side, clock = 1500, RNGPosition(seed=11)
    rows, columns = numbers((0, side), (0, side), sizes=(side, side))
    masks = []
    for step, key in ((0, 1), (1, 1), (0, 2)):
        clock.step = step
        masks.append(keep_mask(clock.of_step(key), keep, rows, columns))
    first = masks[0]
    pairs = {
        "alone": first,
        "row": first[:, 1:] & first[:, :-1],
        "column": first[1:] & first[:-1],
        "far": first[:, 1024:] & first[:, :-1024],
        "diagonal": first[1:, 1:] & first[:-1, :-1],
        "step": first & masks[1],
        "operator": first & masks[2],
    }
    for name, pair in pairs.items():
        chance = keep if name == "alone" else keep**2
        deviation = (chance * (1 - chance) / pair.numel()) ** 0.5
        wider = 1.0 if name == "alone" else 1.5  # neighbouring pairs share elements
        assert abs(pair.double().mean().item() - chance) < 5 * wider * deviation, name
    for dim in (0, 1):  # no row or column is kept more often than by chance
        means = first.double().mean(dim)
        assert abs(means.std().item() / (keep * (1 - keep) / side) ** 0.5 - 1) < 0.12


def test_small_changes_of_the_seed_change_half_of_the_bits() -> None:
    rows, columns = numbers((0, 64), (0, 1024), sizes=(64, 1024))
    base = keep_mask(0, 0.5, rows, columns)
    for bit in range(0, 63, 7):
        assert abs((keep_mask(1 << bit, 0.5, rows, columns) ^ base).double().mean().item() - 0.5) < 0.02


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = nn.functional.scaled_dot_product_attention(x, self.layer(x), x, dropout_p=0.5)
        return nn.functional.dropout(x, 0.5).square().mean()


def test_a_second_model_of_a_process_draws_as_the_first_does() -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 64).view(4, 4, 4)
        model = whale.parallelize(Attends(), x, device="cpu", seed=0, micro_batches=2)
        return [model.train_step(x).item() for _ in range(3)]

    assert losses() == losses()
