"""Functions that a script puts on modules compute with the parallel model's parameters, as with the local ones."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import whale
from whale.errors import CaptureError, UsageError

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
GLOBAL: Any = None


class Pair(NamedTuple):
    a: Any
    b: Any


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def with_a_closure() -> nn.Module:
    model = layers()
    old = model[2].forward
    model[2].forward = lambda x: 2 * old(x)
    return model


def with_an_adapter() -> nn.Module:
    model = layers()
    layer = model[2].requires_grad_(False)
    layer.down, layer.up = (nn.Parameter(torch.ones(*shape, dtype=torch.float64)) for shape in ((1, 4), (2, 1)))
    old = layer.forward

    def forward(x: Tensor, scale: float = 0.5, *, layers: tuple[Any, ...] = (layer,)) -> Tensor:
        return old(x) + scale * (x @ layers[0].down.T @ layers[0].up.T)

    layer.forward = forward
    return model


def with_a_partial() -> nn.Module:
    model = layers()
    model[1].forward = functools.partial(lambda layer, x: x.tanh() + layer.bias.sum(), model[0])
    return model


def with_a_hook() -> nn.Module:
    model = layers()
    model[0].register_forward_hook(lambda module, given, output: output * model[2].weight.sum())
    return model


def helped(x: Tensor) -> Tensor:
    scale: Tensor = GLOBAL[0].bias.sum()
    return x * scale


def with_a_global() -> nn.Module:
    global GLOBAL
    GLOBAL = layers()
    old = GLOBAL[2].forward
    GLOBAL[2].forward = lambda x: helped(old(x))
    return GLOBAL


def wrapped_twice() -> nn.Module:
    model = layers()
    for _ in range(2):
        model[2].forward = (lambda old: lambda x: old(x).sin())(model[2].forward)
    return model


def decorated() -> nn.Module:
    model = layers()
    old = model[0].forward

    @functools.wraps(old)
    def wrapper(x: Tensor) -> Tensor:
        found: Tensor = old(x) * 2
        return found

    model[0].forward = wrapper
    return model


def recursive() -> nn.Module:
    model = layers()
    old = model[0].forward

    def forward(x: Tensor, times: int = 2) -> Tensor:
        return old(x) if times == 0 else other(x, times)

    def other(x: Tensor, times: int) -> Tensor:
        return forward(x, times - 1) * 0.5 + old(x)

    model[0].forward = forward
    return model


def with_a_shared_store() -> nn.Module:
    model, store, last = layers(), {"loss": torch.zeros(())}, layers()[2]
    model[2] = last
    model[0].register_forward_hook(
        lambda module, given, output: store.__setitem__("loss", output.square().mean() * last.weight.norm())
    )
    old = model[2].forward
    model[2].forward = lambda x: old(x) + store["loss"]
    return model


def with_a_namespace() -> nn.Module:
    model = layers()
    held = SimpleNamespace(first=model[0], pair=Pair(model[0], model[2]))
    model[1].register_forward_hook(lambda module, given, output: output * held.first.bias.sum() + held.pair.b.bias[0])
    return model


def with_a_cache() -> nn.Module:
    model = layers()

    @functools.lru_cache(maxsize=2)
    def layer(number: int) -> Any:
        return model[number]

    model[1].register_forward_hook(lambda module, given, output: output * layer(0).bias.sum())
    return model


@pytest.mark.parametrize(
    "build",
    [
        with_a_namespace,
        with_a_cache,
        with_a_closure,
        with_an_adapter,
        with_a_partial,
        with_a_hook,
        with_a_global,
        wrapped_twice,
        decorated,
        recursive,
        with_a_shared_store,
    ],
)
def test_functions_on_modules_compute_with_the_parallel_model_s_parameters(build: Callable[[], nn.Module]) -> None:
    local = build()
    expected = local(X).square().mean()
    expected.backward()
    gradients = {name: p.grad for name, p in local.named_parameters() if p.grad is not None}
    parallel: Any = whale.parallelize(build(), X, loss_fn=lambda output, batch: output.square().mean(), device="cpu")
    for model in (parallel, copy.deepcopy(parallel)):
        model.zero_grad()
        assert model.train_step(X).item() == expected.item()
        found = model.full_gradients()
        assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert gradients.keys() == found.keys()


def test_a_module_with_a_function_can_be_called() -> None:
    local: Any = with_a_closure()
    parallel: Any = whale.parallelize(with_a_closure(), X, loss_fn=lambda output, batch: output.sum(), device="cpu")
    assert torch.equal(parallel[2](torch.ones(1, 4).double()), local[2](torch.ones(1, 4).double()))


def test_a_forward_that_is_replaced_later_is_refused() -> None:
    parallel: Any = whale.parallelize(layers(), X, loss_fn=lambda output, batch: output.sum(), device="cpu")
    old = parallel[2].forward
    parallel[2].forward = lambda x: 2 * old(x)
    with pytest.raises(UsageError, match=r"2\.forward was replaced after parallelize, .* before parallelize"):
        parallel.train_step(X)


def test_what_functions_read_acts_at_the_next_step() -> None:
    model, factor = layers(), [1.0]
    old = model[2].forward
    model[2].forward = lambda x: factor[0] * old(x)
    model.gain = 1.0
    model[0].register_forward_hook(lambda module, given, output: output * model.gain)
    parallel: Any = whale.parallelize(model, X, loss_fn=lambda output, batch: output.sum(), device="cpu")
    first = parallel.train_step(X).item()
    factor[0] = 2.0
    assert parallel.train_step(X).item() == pytest.approx(2 * first)
    parallel.gain = 0.0
    expected = model[2](torch.zeros(4, 4).double().tanh()).sum().item()
    assert parallel.train_step(X).item() == pytest.approx(expected)


def with_a_flag() -> nn.Module:
    model = layers()

    def hook(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        if hasattr(hook, "done"):
            return output
        hook.done = True  # type: ignore[attr-defined]
        return output * 2

    model[0].register_forward_hook(hook)
    return model


def with_a_counter() -> nn.Module:
    model = layers()
    old = model[0].forward

    def forward(x: Tensor) -> Tensor:
        forward.calls += 1  # type: ignore[attr-defined]
        found: Tensor = old(x) * forward.calls  # type: ignore[attr-defined]
        return found

    forward.calls = 0  # type: ignore[attr-defined]
    model[0].forward = forward
    return model


def with_a_handle() -> nn.Module:
    model = layers()

    def hook(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        handle.remove()
        return output * 2

    handle = model[0].register_forward_hook(hook)
    return model


def with_a_mixed_store() -> nn.Module:
    model = layers()
    store = {"layer": model[2], "scale": 1.0}
    model[0].register_forward_hook(lambda module, given, output: output * store["layer"].weight.sum() * store["scale"])
    return model


def with_a_generator() -> nn.Module:
    model, numbers = layers(), (number for number in range(100))
    model[0].register_forward_hook(lambda module, given, output: output * next(numbers))
    return model


def with_a_cycle() -> nn.Module:
    model, numbers = layers(), itertools.cycle([1.0, 2.0])
    model[0].register_forward_hook(lambda module, given, output: output * next(numbers))
    return model


def with_an_iterator_of_its_own() -> nn.Module:
    class Numbers:
        last = 0

        def __iter__(self) -> Numbers:
            return self

        def __next__(self) -> int:
            self.last += 1
            return self.last

    model, numbers = layers(), Numbers()
    model[0].register_forward_hook(lambda module, given, output: output * next(numbers))
    return model


def with_an_ended_iterator() -> nn.Module:
    model, numbers = layers(), iter([2.0])
    model[0].register_forward_hook(lambda module, given, output: output * next(numbers))
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (with_a_flag, "in its first call, and computes something else then"),
        (with_a_counter, "from step to step, and computes something else then"),
        (with_a_generator, "from step to step, and computes something else then"),
        (with_a_cycle, "from step to step, and computes something else then"),
        (with_an_iterator_of_its_own, "from step to step, and computes something else then"),
        (with_an_ended_iterator, r"test_copies\.py:\d+: .* the next value of an iterator that has ended"),
        (with_a_handle, "the handle of a hook, which it could remove"),
        (with_a_mixed_store, "holds a dict with modules of the model and with other values"),
    ],
)
def test_state_of_functions_is_refused(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        whale.parallelize(build(), X, loss_fn=lambda output, batch: output.sum(), device="cpu")


class Keeps(nn.Module):
    """Holds what its last forward has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4, dtype=torch.float64)
        self.last: Any = None
        self.seen: list[Any] = []
        self.by_name: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Any:
        self.last = self.layer(x)
        self.seen, self.by_name = [self.last], {"last": {"x": self.last}}
        return self.last.tanh()


def normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(3, 4, dtype=torch.float64))


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "kept": Keeps,
    "weight norm": normed,
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 4, dtype=torch.float64)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(3, 4, dtype=torch.float64), "weight", amount=0.4),
}


@pytest.mark.parametrize("build", COMPUTED.values(), ids=COMPUTED.keys())
def test_a_model_that_has_run_before_is_as_one_that_has_not(build: Callable[[], nn.Module]) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(build(), nn.Linear(4, 2, dtype=torch.float64)))
        models[-1](X)
    local, other = models
    made = whale.parallelize(other, X, loss_fn=lambda output, _: output.square().mean(), device="cpu")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (local, made)]
    for _ in range(3):
        loss = local(X).square().mean()
        loss.backward()
        assert made.train_step(X).item() == pytest.approx(loss.item(), rel=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent, self.layer = weakref.ref(parent), nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        parent: Any = self.parent()
        return self.layer(x) * parent.scale


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.child = 1.0, Child(self)
        self.weight = weakref.ref(self.child.layer.weight)

    def forward(self, x: Tensor) -> Any:
        return self.child(x).sum()


def test_a_layer_that_refers_to_its_model_weakly_refers_to_the_copy() -> None:
    local = Parent()
    made: Any = whale.parallelize(local, X, device="cpu")
    first = made.train_step(X).item()
    made.scale = 3.0
    assert made.train_step(X).item() == pytest.approx(3 * first)
    assert local(X).item() == pytest.approx(first)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 1, dtype=torch.float64), 1.0

    def forward(self, x: Tensor) -> Any:
        return (self.layer(x) * self.scale).sum()


class CopiedByItsState(Scaled):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedByItsState:
        made = type(self)()
        made.load_state_dict(self.state_dict())
        return made


class CopiedWithTheMemo(Scaled):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedWithTheMemo:
        made = type(self)()
        made.layer, made.scale = copy.deepcopy(self.layer, memo), self.scale
        return made


def test_a_copy_of_its_own_has_copies_of_the_parameters() -> None:
    local = CopiedWithTheMemo()
    local.scale = 2.0
    assert whale.parallelize(local, X, device="cpu").train_step(X).item() == pytest.approx(local(X).item(), rel=1e-12)
    with pytest.raises(CaptureError, match=r"^__deepcopy__ of CopiedByItsState makes parameters that are no copies"):
        whale.parallelize(CopiedByItsState(), X, device="cpu")


class Shares(nn.Module):
    """A model that has an object as an attribute, and a function that has it in a variable."""

    def __init__(self, held: Any, read: Callable[[Any], float], how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.held, self.factor = nn.Linear(3, 1, dtype=torch.float64), held, lambda: 1.0
        if how == "an attribute":
            self.factor = lambda: read(held)
        elif how == "a forward":
            old = self.layer.forward
            self.layer.forward = lambda x: old(x) * read(held)  # type: ignore[method-assign, assignment]
        else:
            self.layer.register_forward_hook(lambda module, given, found: found * read(held))

    def forward(self, x: Tensor) -> Any:
        return (self.layer(x) * self.factor()).sum()


class ScaleHolder(NamedTuple):
    """A kind of object, how a function reads it, and how a script changes it."""

    make: Callable[[], Any]
    read: Callable[[Any], float]
    change: Callable[[Any, float], object]


SHARED = {
    "an object": ScaleHolder(lambda: SimpleObject(), lambda x: float(x.scale), lambda x, to: setattr(x, "scale", to)),
    "a dict": ScaleHolder(lambda: {"a": 1.0}, lambda x: float(x["a"]), lambda x, to: x.update(a=to)),
    "a list": ScaleHolder(lambda: [1.0], lambda x: float(x[0]), lambda x, to: x.__setitem__(0, to)),
}


class SimpleObject:
    scale = 1.0


@pytest.mark.parametrize("how", ["an attribute", "a forward", "a hook"])
@pytest.mark.parametrize("what", SHARED)
def test_an_object_of_a_function_and_of_the_model_stays_one(what: str, how: str) -> None:
    case = SHARED[what]
    local, other = (Shares(case.make(), case.read, how) for _ in range(2))
    made: Any = whale.parallelize(other, X, device="cpu")
    for factor in (3.0, 5.0, 3.0):
        case.change(local.held, factor)
        case.change(made.held, factor)
        assert made.train_step(X).item() == pytest.approx(local(X).item(), rel=1e-12)
    assert len(made._whale.engine.steps) == 3
    copied = copy.deepcopy(made)
    case.change(copied.held, 7.0)
    assert 3 * copied.train_step(X).item() == pytest.approx(7 * made.train_step(X).item(), rel=1e-12)
