"""Memory that lives in a dry run: operators on fake tensors give what torch's own mode gives, faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from tests.operator_samples import samples
from whale.predict import live_memory
from whale.predict.live_memory import LiveMemory

aten = torch.ops.aten


def described(result: Any, args: Any) -> list[object]:
    """Shapes of results, and for each whether it is an argument, or has the memory of one."""
    given = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
    memory = [x.untyped_storage()._cdata for x in given]
    found: list[object] = []
    for x in pytree.tree_leaves(result):
        if not isinstance(x, Tensor):
            found.append(x)
            continue
        storage = x.untyped_storage()
        own = [x is one for one in given], [storage._cdata == one for one in memory]
        found.append((x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, storage.nbytes(), *own))
    return found


def calls() -> Iterator[tuple[str, Any, Any, Any]]:
    for sample in samples():
        if isinstance(sample.target, torch._ops.OpOverload):
            yield str(sample), sample.target, sample.args, sample.kwargs
    a, b = torch.zeros(4, 6), torch.zeros(4, 6)
    yield "add_", aten.add_.Tensor, (a, b), {}
    yield "copy_", aten.copy_.default, (a, b[0]), {}
    yield "transposed", aten.mul.Tensor, (a.t(), b.t()), {}
    yield "a part", aten.mul.Tensor, (a[:, 1:], b[:, :5]), {}
    yield "split", aten.split.Tensor, (a, 3, 1), {}
    yield "half", aten._to_copy.default, (a,), {"dtype": torch.float16}
    yield "double", aten._to_copy.default, (a,), {"dtype": torch.float64}


def test_operators_return_what_fake_tensors_return() -> None:
    """Twice, as the second time the result of the first is known."""
    for name, target, args, kwargs in calls():
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake(x: Any, mode: FakeTensorMode = mode) -> Any:
            return mode.from_tensor(x.detach()) if isinstance(x, Tensor) else x

        given, named = pytree.tree_map(fake, args), pytree.tree_map(fake, kwargs)
        with torch.no_grad(), mode:
            try:
                expected = described(target(*given, **named), (given, named))
            except (DataDependentOutputException, DynamicOutputShapeException):  # it reads values
                continue
            for _ in range(2):
                with LiveMemory(fake=True):
                    found = described(target(*given, **named), (given, named))
                assert found == expected, name


def test_what_is_no_plain_tensor_of_a_processor_is_computed_by_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[Any, Any] = {}
    monkeypatch.setattr(live_memory, "_known", known)
    with FakeTensorMode(allow_non_fake_inputs=True):
        here, there = torch.empty(3), torch.empty(3, device="cuda")
        with LiveMemory(fake=True) as live:
            assert (here * 2).device.type == "cpu" and len(known) == 1
            assert (there * 2).device.type == "cuda"
            assert (here * torch.ones(3, dtype=torch.complex64)).is_complex()
            constant = torch.tensor(3.0)  # its mode knows the value
            assert (constant * 2).item() == 6.0
            assert len(known) == 1
            assert live.by_purpose["activations"] > 0


@pytest.mark.parametrize("alias", [False, True])
def test_known_results_count_as_others(alias: bool) -> None:
    """Bytes that live, and their peak, are the same with results that are known; also those of an operator that returns
    the memory that it was given, although its schema names no alias."""

    def bytes_of() -> list[int]:
        with FakeTensorMode():
            x = torch.empty(8, 16, requires_grad=True)
            weight = torch.empty(16, 16, requires_grad=True)
            with LiveMemory(fake=True) as live:
                y = torch.nn.functional.gelu(x @ weight)
                z = torch.ops.aten._unsafe_view.default(y, [128]) if alias else y
                now = [live.now]
                z.sum().backward()
                del y, z
                return [*now, live.now, live.at_peak["activations"]]

    first = bytes_of()
    assert (bytes_of(), bytes_of()) == (first, first)
