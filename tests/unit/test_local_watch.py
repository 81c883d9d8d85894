"""Changes of the local model after parallelize: refused, if they would have changed the training."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import UsageError

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.drop = nn.Dropout(0.0)
        self.config = SimpleNamespace(factor=1.0)
        self.scale, self.last, self.note = 1.0, torch.zeros(()), "a note"
        self.register_buffer("mask", torch.ones(3, dtype=torch.float64))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.second(self.first(x).tanh())) * self.scale * self.config.factor * self.mask
        self.last = x.detach()
        return x.square().sum() * getattr(self, "later", 1.0)


def made() -> tuple[Any, Any]:
    local = Model()
    return local, whale.parallelize(local, X, device="cpu")


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "an attribute": (lambda m: setattr(m, "scale", 0.5), "scale of the local model was changed"),
    "a new attribute": (lambda m: setattr(m, "later", 0.5), "later of the local model was changed"),
    "an object": (lambda m: setattr(m, "config", SimpleNamespace(factor=0.5)), "config of the local model was changed"),
    "of one of torch's modules": (lambda m: setattr(m.drop, "p", 0.5), "drop.p of the local model was changed"),
    "the mode": (lambda m: m.eval(), "eval\\(\\) was called of the local model after"),
    "a module's mode": (lambda m: m.drop.eval(), "eval\\(\\) was called of drop of the local model after"),
    "a tie": (lambda m: setattr(m.second, "weight", m.first.weight), "second.weight was replaced"),
    "a module": (lambda m: setattr(m, "second", nn.Identity()), "in the local model, second was replaced"),
    "a buffer": (lambda m: setattr(m, "mask", torch.zeros(3)), "in the local model, mask was replaced"),
    "a hook": (lambda m: m.first.register_forward_hook(lambda *_: None), "a hook was added to first"),
    "a forward": (lambda m: setattr(m.first, "forward", torch.tanh), "first.forward was replaced"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_local_model_is_refused_until_it_is_undone(what: str) -> None:
    local, model = made()
    model.train_step(X)
    change, message = CHANGES[what]
    change(local)
    with pytest.raises(UsageError, match=message):
        model.train_step(X)
    if "mode" in what:
        assert model.eval_step(X).isfinite()
        local.train()
        assert model.train_step(X).isfinite()


def test_what_is_changed_on_both_acts() -> None:
    local, model = made()
    for one in (local, model):
        one.scale = one.later = 0.5
        one.eval()
        one.first.requires_grad_(False)
    expected = local(X)
    for _ in range(2):
        assert model.train_step(X).item() == pytest.approx(expected.item(), abs=1e-12)
    model.train()
    model.scale = 2.0  # of the parallel model alone: the local one is as it was
    assert model.train_step(X).item() == pytest.approx(expected.item() * 16, abs=1e-12)


def test_what_steps_would_not_read_may_change() -> None:
    local, model = made()
    expected = model.eval_step(X).item()
    local.note, local.unread = "another", 3
    assert local(X).item() == pytest.approx(expected)  # and its forward notes the last output
    copy.deepcopy(local).eval()
    with torch.no_grad():
        local.first.weight.mul_(2.0)  # one object in both
    assert model.train_step(X).item() != pytest.approx(expected)
    assert model.train_step(X).isfinite()


def test_a_local_model_that_is_made_parallel_again_is_free() -> None:
    local, first = made()
    local.scale = 0.5
    second = whale.parallelize(local, X, device="cpu")
    assert second.train_step(X).item() == pytest.approx(first.train_step(X).item() / 4)


def test_a_compiled_model_is_taken_and_watched() -> None:
    local: Any = Model()
    local.second = torch.compile(local.second)
    compiled: Any = torch.compile(local)
    model = whale.parallelize(compiled, X, device="cpu")
    expected = Model()(X).item()
    assert model.train_step(X).item() == pytest.approx(expected, abs=1e-12)
    local.eval()
    with pytest.raises(UsageError, match="eval\\(\\) was called of"):
        model.train_step(X)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Model()
        self.tail = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.1)).double()
        self.listed = [self.tail]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.tail(x))


def made_deep(kept: Callable[[Any], Any]) -> tuple[Any, Any]:
    """A part of a local model whose name the script gave another one, and the parallel model."""
    local = Deep()
    part = kept(local)
    return part, whale.parallelize(local, X, device="cpu")


PARTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object], Callable[[Any], object], str]] = {
    "a mode": (lambda m: m.body, lambda b: b.eval(), lambda b: b.train(), "eval\\(\\) was called of body of"),
    "a mode below": (lambda m: m.body, lambda b: b.drop.eval(), lambda b: b.train(), "of body.drop of the local model"),
    "a setting": (
        lambda m: m.tail[1],
        lambda one: setattr(one, "negative_slope", 0.5),
        lambda one: setattr(one, "negative_slope", 0.1),
        "tail.1.negative_slope of the local model was changed",
    ),
    "an attribute": (
        lambda m: (m.tail, m.body),
        lambda both: setattr(both[1], "scale", 0.5),
        lambda both: setattr(both[1], "scale", 1.0),
        "body.scale of the local model was changed",
    ),
    "a class": (
        lambda m: m.tail,
        lambda t: setattr(t[1], "__class__", nn.ELU),
        lambda t: setattr(t[1], "__class__", nn.LeakyReLU),
        "tail.1 was of class LeakyReLU and is of ELU",
    ),
    "a module": (lambda m: m.tail, lambda t: t.append(nn.ReLU()), lambda t: t.pop(2), "tail.2 was added"),
    "a buffer": (
        lambda m: (m.body, m.body.mask),
        lambda both: setattr(both[0], "mask", torch.zeros(3)),
        lambda both: setattr(both[0], "mask", both[1]),
        "body.mask was replaced",
    ),
}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("what", PARTS)
def test_a_change_of_a_part_that_the_script_keeps_is_refused_until_it_is_undone(what: str, steps: int) -> None:
    kept, change, undo, message = PARTS[what]
    part, model = made_deep(kept)
    for _ in range(steps):
        model.train_step(X)
    change(part)
    for _ in range(2):
        with pytest.raises(UsageError, match=message):
            model.train_step(X)
    undo(part)
    assert model.train_step(X).isfinite()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_hook_on_a_part_that_the_script_keeps_is_refused(steps: int) -> None:
    part, model = made_deep(lambda m: m.body.first)
    for _ in range(steps):
        model.train_step(X)
    hook = part.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="a hook was added to body.first after parallelize"):
        model.train_step(X)
    hook.remove()
    assert model.train_step(X).isfinite()


def test_a_hook_that_is_removed_is_said_to_be() -> None:
    local = Deep()
    hook = local.body.first.register_forward_hook(lambda *_: None)
    part, model = local.body, whale.parallelize(local, X, device="cpu")
    hook.remove()
    with pytest.raises(UsageError, match="a hook was removed from body.first after parallelize"):
        model.train_step(X)
    del local, hook
    with pytest.raises(UsageError, match="a hook was removed from body.first after parallelize"):
        model.train_step(X)
    assert part is not model.body


def test_parts_are_watched_as_long_as_the_script_keeps_them() -> None:
    gc.disable()
    try:
        (body, tail), model = made_deep(lambda m: (m.body, m.tail))
        model.train_step(X)
        gone, weight = weakref.ref(body), weakref.ref(body.first.weight)
        del body
        assert gone() is None
        assert weight() is None or weight() is model.body.first.weight
        model.train_step(X)
        tail.eval()
        with pytest.raises(UsageError, match="eval\\(\\) was called of tail of the local model"):
            model.train_step(X)
        del tail
        assert model.train_step(X).isfinite()
    finally:
        gc.enable()


def test_what_is_changed_on_a_part_and_on_the_parallel_model_acts() -> None:
    part, model = made_deep(lambda m: m.body)
    for one in (part, model.body):
        one.scale = 0.5
        one.eval()
    for _ in range(2):
        assert model.train_step(X).isfinite()
    model.train()
    assert model.train_step(X).isfinite()


def test_a_part_that_is_made_parallel_itself_is_free() -> None:
    local = Deep()
    model = whale.parallelize(local, X, device="cpu")
    model.train_step(X)
    local.body.scale = 0.5
    alone = whale.parallelize(local.body, X, device="cpu")
    assert model.train_step(X).isfinite()
    assert alone.train_step(X).isfinite()
    local.tail.eval()
    with pytest.raises(UsageError, match="eval\\(\\) was called of tail of the local model"):
        model.train_step(X)


def test_the_local_model_is_not_kept() -> None:
    gc.disable()
    try:
        local, model = made()
        gone, weight = weakref.ref(local), weakref.ref(local.first)
        del local
        assert gone() is None
        assert weight() is None
    finally:
        gc.enable()
    model.train_step(X)


def test_the_handle_of_a_hook_removes_it_from_the_parallel_model() -> None:
    local = Deep()
    handles = [
        local.tail.register_forward_hook(lambda module, args, output: 2 * output),
        local.body.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    ]
    model: Any = whale.parallelize(local, X, device="cpu")
    del local
    gc.collect()
    model.train_step(X)
    for handle, name in zip(handles, ("tail", "body"), strict=True):
        handle.remove()
        with pytest.raises(UsageError, match=f"a hook was removed from {name} after parallelize"):
            model.train_step(X)
