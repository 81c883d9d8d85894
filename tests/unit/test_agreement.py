"""Fingerprints of tensors: what they tell apart, and what they do not."""

from __future__ import annotations

import pytest
import torch

from whale.runtime.agreement import fingerprint, fingerprints, is_other

SIZES = [1, 1000, 1 << 16, (1 << 16) + 1, 70 * (1 << 16) + 17]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64]


def values(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rng = torch.Generator().manual_seed(size)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-99, 99, (size,), generator=rng).to(dtype)
    return torch.randn(size, generator=rng, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_the_second_number_is_the_norm(size: int, dtype: torch.dtype) -> None:
    x = values(size, dtype)
    norm = float(torch.linalg.vector_norm(x.to(torch.complex128 if dtype.is_complex else torch.float64)))
    assert float(fingerprint(x)[1]) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("size", SIZES[1:])
def test_an_element_and_the_order_of_elements_count(size: int) -> None:
    x = values(size)
    look = fingerprint(x)
    one = x.clone()
    one[size // 2] += 1.0
    assert is_other(fingerprint(one), look)
    assert is_other(fingerprint(x.roll(1)), look)
    assert not is_other(fingerprint(x.clone()), look)


@pytest.mark.parametrize("size", SIZES)
def test_autocast_around_changes_nothing(size: int) -> None:
    x = values(size)
    with torch.autocast("cpu", dtype=torch.float16):
        under = fingerprint(x)
    assert torch.equal(under, fingerprint(x))


def test_the_order_of_chunks_counts() -> None:
    x = values(4 << 16)
    swapped = x.view(4, -1)[[0, 2, 1, 3]].flatten()
    assert is_other(fingerprint(swapped), fingerprint(x))


def test_values_that_are_no_numbers_are_equal_to_themselves() -> None:
    x = values(1000)
    x[3] = torch.nan
    assert not is_other(fingerprint(x), fingerprint(x.clone()))
    assert is_other(fingerprint(values(1000)), fingerprint(x))


def test_threads_do_not_count() -> None:
    tensors = [values(size) for size in (37_000, 1 << 16, 3_000_000)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = fingerprints(tensors)
        torch.set_num_threads(2)
        assert not any(map(is_other, fingerprints(tensors), alone))
    finally:
        torch.set_num_threads(threads)


def test_tensors_without_elements_have_fingerprints() -> None:
    assert fingerprint(torch.zeros(0)).tolist() == [0.0, 0.0]
