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


class Known(torch.autograd.Function):
    """A script's own function, whose gradients are tensors that the script holds, or a part of one, or saved ones."""

    constant = torch.ones(2, 4, 4, dtype=torch.float64)
    whole = constant[0].clone()

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, place: int) -> Tensor:
        result = x.new_zeros(4, 4)
        ctx.place = place
        ctx.save_for_backward(result)
        return result if place == 3 else x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        known = (Known.whole, Known.constant[1], ctx.saved_tensors[0], ctx.saved_tensors[0])[ctx.place]
        return known, grad * 1, None


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


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize("given", [(0, 1), (1,), ()], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_autograd_in_memory_of_their_own(name: str, given: tuple[int, ...], anew: bool) -> None:
    call = CALLS[name]
    operands = [torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64).t()]
    results, tape = OnTape(call, (True, True), given, anew=anew)(*operands)
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
def test_operands_may_be_given_again_in_another_layout(name: str) -> None:
    """Copies of what was interleaved in one memory, or lay in another order."""
    memory = torch.randn(4, 8, dtype=torch.float64)
    for operands in ([memory[:, ::2], memory[:, 1::2]], [memory[:, :4].t().contiguous().t(), memory[:, 4:]]):
        results, tape = OnTape(CALLS[name], (True, True), (0, 1))(*operands)
        results = results if isinstance(results, tuple) else (results,)
        seeds = [torch.randn_like(x) for x in results]
        found = from_tape(tape, seeds, [x.clone(memory_format=torch.contiguous_format) for x in operands])
        leaves = [x.clone().requires_grad_() for x in operands]
        expected = CALLS[name](leaves)
        expected = expected if isinstance(expected, tuple) else (expected,)
        known = torch.autograd.grad(expected, leaves, seeds, allow_unused=True)
        for gradient, right in zip(found, known, strict=True):
            assert gradient is not None
            assert torch.allclose(gradient, torch.zeros_like(gradient) if right is None else right, atol=0, rtol=1e-14)


@pytest.mark.parametrize("place", range(4), ids=["constant", "part of a constant", "saved", "result saved"])
def test_gradients_that_others_hold_are_copied(place: int) -> None:
    operands = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    result, tape = OnTape(lambda x: Known.apply(*x, place), (True, True), (0, 1))(*operands)
    before = [x.clone() for x in (Known.constant, Known.whole, result)]
    first, second = from_tape(tape, [torch.randn_like(result)], operands)
    assert first is not None
    assert second is not None
    first.add_(1)
    second.add_(1)
    assert all(torch.equal(x, y) for x, y in zip((Known.constant, Known.whole, result), before, strict=True))


def test_gradients_that_a_backward_makes_are_not_copied() -> None:
    operands = [torch.randn(4, 4) for _ in range(2)]
    made: list[int] = []

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x @ y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            result = grad * 2, grad * 3
            made.extend(x.data_ptr() for x in result)
            return result

    result, tape = OnTape(lambda x: Made.apply(*x), (True, True), (0, 1), anew=True)(*operands)
    found = from_tape(tape, [torch.randn_like(result)], operands)
    assert [x.data_ptr() for x in found if x is not None] == made


def test_a_script_may_disable_hooks() -> None:
    operands = [torch.randn(4, 4), torch.randn(4, 4)]
    with torch.autograd.graph.disable_saved_tensors_hooks("the script wants none"):
        with noting_saved(operands) as saved:
            CALLS["product"](operands)
        result, tape = OnTape(CALLS["product"], (True, True), tuple(saved))(*operands)
        found = from_tape(tape, [torch.ones_like(result)], [])
    assert found[0] is not None and torch.equal(found[0], torch.ones_like(result) @ operands[1].t())


@pytest.mark.parametrize("name", CALLS)
def test_a_tape_holds_no_operands_and_frees_what_it_holds(name: str) -> None:
    operands = [torch.randn(4, 4), torch.randn(4, 4)]
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
