"""Calls that autograd records: their tapes hold no operands, and what they hold is freed with them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from whale.runtime.derivative import OnTape, from_tape, noting_saved


class Product(torch.autograd.Function):
    """A script's own function, which saves its operands and its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        result = x * y
        ctx.save_for_backward(x, y, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, result = ctx.saved_tensors
        assert torch.equal(result, x * y)
        return grad * y, grad * x


CALLS: dict[str, Callable[[Sequence[Tensor]], Any]] = {
    "product": lambda x: x[0] @ x[1],
    "own function": lambda x: Product.apply(*x),
    "result saved": lambda x: (x[0] @ x[1]).exp(),
    "part of an operand": lambda x: x[0][1:] @ x[1].t()[:, ::2],
    "operand returned": lambda x: (x[0], x[0] * x[1]),
    "equal gradients": lambda x: x[0] + x[1],
    "expanded gradient": lambda x: x[0].sum() + x[1][:2].sum(),
    "unused": lambda x: x[0] * 2,
}


@pytest.mark.parametrize("given", [(0, 1), (1,), ()], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_autograd_in_memory_of_their_own(name: str, given: tuple[int, ...]) -> None:
    call = CALLS[name]
    operands = [torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64).t()]
    results, tape = OnTape(call, (True, True), given)(*operands)
    results = results if isinstance(results, tuple) else (results,)
    assert not any(x.requires_grad for x in results)
    seeds = [torch.randn_like(x) for x in results]
    again = [torch.empty_like(x).copy_(x) for x in operands]  # where they are now
    found = from_tape(tape, seeds, [again[number] for number in given])

    leaves = [x.clone().requires_grad_() for x in operands]
    expected = call(leaves)
    expected = expected if isinstance(expected, tuple) else (expected,)
    known = torch.autograd.grad(expected, leaves, seeds, allow_unused=True)
    for gradient, right, x in zip(found, known, operands, strict=True):
        assert gradient is not None
        assert gradient.stride() == x.stride()
        assert torch.equal(gradient, torch.zeros_like(x) if right is None else right)
    owners = [x.untyped_storage().data_ptr() for x in (*seeds, *again, *found) if x is not None]
    assert len(set(owners)) == len(owners)


@pytest.mark.parametrize("name", CALLS)
def test_a_tape_holds_no_operands_and_frees_what_it_holds(name: str) -> None:
    operands = [torch.randn(4, 4), torch.randn(4, 4)]
    gc.collect()
    gc.disable()  # nothing is left to it
    try:
        results, tape = OnTape(CALLS[name], (True, True), (0, 1))(*operands)
        own = [weakref.ref(x.untyped_storage()) for x in operands]
        made = [weakref.ref(x.untyped_storage()) for x in (results if isinstance(results, tuple) else (results,))]
        del operands, results
        assert not any(x() is not None for x in own)
        del tape
        assert not any(x() is not None for x in made)
    finally:
        gc.enable()


def test_it_is_known_which_operands_are_saved() -> None:
    expected = {"product": {0, 1}, "own function": {0, 1}, "result saved": {0, 1}, "part of an operand": {0, 1}}
    expected |= {"operand returned": {0, 1}, "equal gradients": set(), "expanded gradient": set(), "unused": set()}
    for name, call in CALLS.items():
        operands = [torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]
        with noting_saved(operands) as saved:
            call(operands)
        assert saved == expected[name], name
