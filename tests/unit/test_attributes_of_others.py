"""Values that a forward reads through a script's objects, classes and functions act at the next step."""

from __future__ import annotations

import dataclasses
import functools
import queue
import sys
import threading
from argparse import Namespace
from array import array
from collections import ChainMap, UserList, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakMethod, proxy, ref

import numpy
import pytest
import torch
from torch import Tensor, nn

import whale

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


class Rates(type):
    rate = 1.0


class Config(metaclass=Rates):
    scale = 1.0

    @classmethod
    def of_class(cls) -> float:
        return cls.scale

    @staticmethod
    def of_none() -> float:
        return Config.scale


class Gain:
    def __init__(self) -> None:
        self.gain, self._hidden, self.inner = 1.0, 1.0, [{"last": SimpleNamespace(factor=1.0)}]

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.gain

    @property
    def seen(self) -> float:
        return self._hidden

    def deep(self) -> float:
        return float(self.inner[0]["last"].factor)


class Slotted:
    __slots__ = "slot"

    def __init__(self) -> None:
        self.slot = 1.0


class AlsoSlotted(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.inner = 1.0


class Defaults:
    """An object whose attributes are those of its class until it gets others."""

    gain = 1.0

    def of_default(self) -> float:
        return float(getattr(self, "later", 1.0))


DEFAULTS = Defaults()
rate = 0.0


def rate_of_settings() -> float:
    return rate


SETTINGS = ModuleType("settings")
vars(SETTINGS).update(rate=1.0, of=FunctionType(rate_of_settings.__code__, vars(SETTINGS)))
sys.modules["settings"] = SETTINGS


def imported() -> float:
    import settings  # type: ignore[import-not-found]

    return float(settings.rate)


def imported_name() -> float:
    from settings import rate

    return float(rate)


class Forwards:
    def __init__(self) -> None:
        self._values = {"rate": 1.0}

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "__dict__")["_values"][name]
        except KeyError:
            raise AttributeError(name) from None


def closure() -> Any:
    values = {"weight": 1.0}

    def weighted(x: Tensor) -> Tensor:
        return x * values["weight"]

    weighted.values = values  # type: ignore[attr-defined]
    return weighted


def scaled(x: Tensor, by: Any = None) -> Tensor:
    return x * scaled.factor * (by or [1.0])[0]  # type: ignore[attr-defined]


scaled.factor = 1.0  # type: ignore[attr-defined]
GAIN = Gain()


def helper(x: Tensor) -> Tensor:
    return x


class Holder(nn.Module):
    names = ("k1",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.k1, self.config = 1.0, Config()
        self.first, self.second, self.gains = Gain(), Gain(), [Gain(), Gain()]
        self.one, self.other, self.by_name = closure(), closure(), {"last": closure()}
        self.recent, self.list, self.chain = deque([1.0], maxlen=2), UserList([1.0]), ChainMap({"a": 1.0})
        self.slots = AlsoSlotted()
        self.partial, self.forwards = functools.partial(scaled, by=[1.0]), Forwards()
        self.defaults, self.several, self.settings = Defaults(), [Defaults()], SETTINGS
        self.method, self.weak, self.weak_method = self.first.deep, ref(self.first), WeakMethod(self.first.deep)
        self.proxy, self.bytes, self.array = proxy(self.first), bytearray(b"\x01"), array("d", [1.0])
        self.long, self.deepest = [1.0] * 5000, [[[[[[[[1.0]]]]]]]]
        self.values = numpy.ones(20_000)


class Case(NamedTuple):
    """A factor of a forward, how a script changes it, and what puts it back where that is not the model's own."""

    factor: Callable[[Any], Any]
    change: Callable[[Any, float], object]
    reset: Callable[[], object] = lambda: None


def write(table: Any, key: Any, value: Any) -> None:
    table[key] = value


def deepest(x: Any) -> Any:
    return deepest(x[0]) if isinstance(x[0], list) else x


CASES = {
    "a class": Case(lambda s: Config.scale, lambda m, x: setattr(Config, "scale", x)),
    "a class by an instance": Case(lambda s: s.config.scale, lambda m, x: setattr(Config, "scale", x)),
    "a class by its method": Case(lambda s: s.config.of_class(), lambda m, x: setattr(Config, "scale", x)),
    "a class by a static method": Case(lambda s: Config.of_none(), lambda m, x: setattr(Config, "scale", x)),
    "a class of a class": Case(lambda s: Config.rate, lambda m, x: setattr(Rates, "rate", x)),
    "a computed name": Case(lambda s: getattr(s, "k" + str(1)), lambda m, x: setattr(m, "k1", x)),
    "a formatted name": Case(lambda s: getattr(s, "k%d" % 1, None), lambda m, x: setattr(m, "k1", x)),  # noqa: UP031
    "a name in a list": Case(lambda s: getattr(s, s.names[0]), lambda m, x: setattr(m, "k1", x)),
    "a path": Case(lambda s: attrgetter("first.gain")(s), lambda m, x: setattr(m.first, "gain", x)),
    "a computed key": Case(lambda s: s.__dict__["k" + str(1)], lambda m, x: setattr(m, "k1", x)),
    "one of two objects": Case(lambda s: s.second(s.first(1.0)), lambda m, x: setattr(m.first, "gain", x)),
    "the other": Case(lambda s: s.second(s.first(1.0)), lambda m, x: setattr(m.second, "gain", x)),
    "an object in a list": Case(lambda s: s.gains[1](s.gains[0](1.0)), lambda m, x: setattr(m.gains[1], "gain", x)),
    "one of two closures": Case(lambda s: s.other(s.one(1.0)), lambda m, x: write(m.one.values, "weight", x)),
    "the other closure": Case(lambda s: s.other(s.one(1.0)), lambda m, x: write(m.other.values, "weight", x)),
    "a closure in a dict": Case(
        lambda s: s.by_name["last"](1.0), lambda m, x: write(m.by_name["last"].values, "weight", x)
    ),
    "a property": Case(lambda s: s.first.seen, lambda m, x: setattr(m.first, "_hidden", x)),
    "deep": Case(lambda s: s.first.deep(), lambda m, x: setattr(m.first.inner[0]["last"], "factor", x)),
    "a slot": Case(lambda s: s.slots.slot, lambda m, x: setattr(m.slots, "slot", x)),
    "beside a slot": Case(lambda s: s.slots.inner * s.slots.slot, lambda m, x: setattr(m.slots, "inner", x)),
    "a deque": Case(lambda s: s.recent[-1], lambda m, x: m.recent.append(x)),
    "a list of a class": Case(lambda s: s.list[0], lambda m, x: write(m.list, 0, x)),
    "a chain of dicts": Case(lambda s: s.chain["a"], lambda m, x: write(m.chain, "a", x)),
    "a default of a class": Case(lambda s: s.defaults.gain, lambda m, x: setattr(m.defaults, "gain", x)),
    "one of an object in a list": Case(lambda s: s.several[0].gain, lambda m, x: setattr(m.several[0], "gain", x)),
    "a default of getattr": Case(lambda s: s.defaults.of_default(), lambda m, x: setattr(m.defaults, "later", x)),
    "whether there is one": Case(
        lambda s: s.defaults.later if hasattr(s.defaults, "later") else 1.0,
        lambda m, x: setattr(m.defaults, "later", x),
    ),
    "a default of a global object": Case(
        lambda s: DEFAULTS.gain, lambda m, x: setattr(DEFAULTS, "gain", x), lambda: vars(DEFAULTS).clear()
    ),
    "a module": Case(
        lambda s: s.settings.rate, lambda m, x: setattr(SETTINGS, "rate", x), lambda: setattr(SETTINGS, "rate", 1.0)
    ),
    "a function of a module": Case(
        lambda s: s.settings.of(), lambda m, x: setattr(SETTINGS, "rate", x), lambda: setattr(SETTINGS, "rate", 1.0)
    ),
    "a module that is imported": Case(
        lambda s: imported(), lambda m, x: setattr(SETTINGS, "rate", x), lambda: setattr(SETTINGS, "rate", 1.0)
    ),
    "a name that is imported": Case(
        lambda s: imported_name(), lambda m, x: setattr(SETTINGS, "rate", x), lambda: setattr(SETTINGS, "rate", 1.0)
    ),
    "a method": Case(lambda s: s.method(), lambda m, x: setattr(m.first.inner[0]["last"], "factor", x)),
    "a weak reference": Case(lambda s: s.weak().gain, lambda m, x: setattr(m.first, "gain", x)),
    "a weak method": Case(lambda s: s.weak_method()(), lambda m, x: setattr(m.first.inner[0]["last"], "factor", x)),
    "a proxy": Case(lambda s: s.proxy.gain, lambda m, x: setattr(m.first, "gain", x)),
    "bytes": Case(lambda s: s.bytes[0], lambda m, x: write(m.bytes, 0, int(x))),
    "an array": Case(lambda s: s.array[0], lambda m, x: write(m.array, 0, x)),
    "a long list": Case(lambda s: s.long[-1], lambda m, x: write(m.long, -1, x)),
    "deeper": Case(lambda s: s.deepest[0][0][0][0][0][0][0][0], lambda m, x: write(deepest(m.deepest), 0, x)),
    "an array of numpy": Case(lambda s: s.values.max(), lambda m, x: write(m.values, -1, x)),
    "a partial": Case(lambda s: s.partial(1.0), lambda m, x: write(m.partial.keywords["by"], 0, x)),
    "__getattr__": Case(lambda s: s.forwards.rate, lambda m, x: write(m.forwards._values, "rate", x)),
    "a function": Case(
        lambda s: scaled(1.0),  # type: ignore[arg-type]
        lambda m, x: setattr(scaled, "factor", x),
        lambda: setattr(scaled, "factor", 1.0),
    ),
    "a global object": Case(
        lambda s: GAIN(1.0),  # type: ignore[arg-type]
        lambda m, x: setattr(GAIN, "gain", x),
        lambda: setattr(GAIN, "gain", 1.0),
    ),
    "another function": Case(
        lambda s: helper(1.0),  # type: ignore[arg-type]
        lambda m, x: write(globals(), "helper", lambda y: y * x),
        lambda: write(globals(), "helper", lambda y: y),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_acts_at_the_next_step(name: str) -> None:
    case = CASES[name]

    def forward(self: Any, x: Tensor) -> Any:
        return self.layer(x).sum() * case.factor(self)

    kind: Any = type("Multiplied", (Holder,), {"forward": forward})
    try:
        model: Any = whale.parallelize(kind(), X, device="cpu")
        first = model.train_step(X).item()
        for factor in (2.0, 3.0):
            case.change(model, factor)
            assert model.train_step(X).item() == pytest.approx(factor * first)
        assert len(model._whale.engine.steps) == 3
    finally:
        case.reset()
        Config.scale = Rates.rate = 1.0


@dataclass
class Fields:
    act: str = "tanh"
    epoch: int = 0


class Named(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.fields, self.act = Fields(), "tanh"

    def forward(self, x: Tensor) -> Any:
        x = getattr(torch, self.act)(self.layer(x)) * getattr(self, "k" + str(1)) * getattr(self, self.names[0])
        return getattr(nn.functional, self.fields.act)(x).sum() * getattr(self.config, "scale", 1.0)


def test_an_attribute_that_no_name_can_be_is_the_script_s() -> None:
    model: Any = whale.parallelize(Named(), X, device="cpu")
    for epoch in range(3):
        model.epoch = model.first.epoch = model.fields.epoch = epoch
        model.train_step(X)
    assert len(model._whale.engine.steps) == 1
    first = model.train_step(X).item()
    model.fields.act = "relu"
    assert model.train_step(X).item() != pytest.approx(first)


def test_what_cannot_be_copied_is_shared(tmp_path: Path) -> None:
    held: dict[str, Any] = {
        "lock": threading.Lock(),
        "queue": queue.Queue(),
        "functional": nn.functional,
        "view": MappingProxyType({"a": 2.0}),
        "file": (tmp_path / "log").open("w"),
        "mixed": [1.5, threading.Lock()],
        "options": {"of": {"lock": threading.Lock()}},
    }

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3, dtype=torch.float64)
            self.__dict__.update(held)

        def forward(self: Any, x: Tensor) -> Any:
            with self.lock:
                return self.functional.relu(self.layer(x)).sum() * self.view["a"] * self.mixed[0]

    local = Holds()
    model: Any = whale.parallelize(local, X, device="cpu")
    assert model.train_step(X).item() == pytest.approx(local(X).item())
    assert all(getattr(model, name) is x for name, x in held.items())
    before = local(X).item()
    model.mixed[0] = 3.0
    assert model.train_step(X).item() == pytest.approx(2 * before)
    held["file"].close()


class Smooth(nn.Module):
    weight = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.others, self.scales = nn.CrossEntropyLoss(), [Gain()], nn.ModuleList([Weighted()])

    def forward(self, output: Tensor, batch: Any) -> Any:
        loss = self.inner(output, torch.arange(4) % 3) * self.weight
        return self.scales[0](self.others[0](loss))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0

    def forward(self, x: Tensor) -> Any:
        return x * self.by


OF_LOSSES: dict[str, Callable[[Smooth], object]] = {
    "a default of its class": lambda loss: setattr(loss, "weight", 2.0),
    "a layer of torch": lambda loss: setattr(loss.inner, "label_smoothing", 0.3),
    "a layer in a list": lambda loss: setattr(loss.scales[0], "by", 2.0),
    "an object": lambda loss: setattr(loss.others[0], "gain", 2.0),
}


@pytest.mark.parametrize("what", OF_LOSSES)
@pytest.mark.parametrize("given", ["a module", "its forward", "a function"])
def test_a_loss_with_modules_is_as_it_is_now(given: str, what: str) -> None:
    loss, model = Smooth(), nn.Linear(3, 3, dtype=torch.float64)
    functions: dict[str, Any] = {
        "a module": loss, "its forward": loss.forward, "a function": lambda output, batch: loss(output, batch)
    }  # fmt: skip
    made: Any = whale.parallelize(model, X, loss_fn=functions[given], device="cpu")
    for _ in range(2):
        assert made.train_step(X).item() == pytest.approx(loss(model(X), X).item(), rel=1e-12)
        OF_LOSSES[what](loss)


def teacher(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double().requires_grad_(False)


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


OF_A_TEACHER: dict[str, tuple[Callable[[list[nn.Sequential]], object], int]] = {
    "replaced": (lambda held: held.__setitem__(0, teacher(2)), 2),
    "a module replaced": (lambda held: held[0].__setitem__(0, teacher(2)[0]), 2),
    "a parameter replaced": (lambda held: setattr(held[0][2], "weight", teacher(2)[2].weight), 2),
    "a hook added": (lambda held: held[0][2].register_forward_hook(doubled), 2),
    "loaded": (lambda held: held[0].load_state_dict(teacher(2).state_dict()), 1),
    "an average": (lambda held: [p.mul_(1.1) for p in held[0].parameters()], 1),
}


@pytest.mark.parametrize("what", OF_A_TEACHER)
def test_a_module_beside_the_model_is_as_it_is_now(what: str) -> None:
    change, num_steps = OF_A_TEACHER[what]
    held = [teacher(1)]

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return (output - held[0](batch[0])).square().mean()

    torch.manual_seed(0)
    local = nn.Linear(3, 2).double()
    model: Any = whale.parallelize(local, X, device="cpu", loss_fn=loss_fn)
    assert model.train_step(X).item() == pytest.approx(loss_fn(local(X), (X,)).item(), abs=1e-12)
    change(held)
    for _ in range(2):
        assert model.train_step(X).item() == pytest.approx(loss_fn(local(X), (X,)).item(), abs=1e-12)
    assert len(model._whale.engine.steps) == num_steps  # values are read, not compiled


@pytest.mark.parametrize("given", [None, torch.ones(3, dtype=torch.float64)])
def test_a_buffer_of_a_loss_is_the_one_that_it_has_now(given: Tensor | None) -> None:
    criterion, y = nn.CrossEntropyLoss(weight=given), torch.arange(4) % 3
    torch.manual_seed(0)
    local = nn.Linear(3, 3).double()
    model: Any = whale.parallelize(local, X, device="cpu", loss_fn=lambda output, _: criterion(output, y))
    model.train_step(X)
    criterion.weight = torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64)
    for _ in range(2):
        assert model.train_step(X).item() == pytest.approx(criterion(local(X), y).item(), abs=1e-12)
    assert len(model._whale.engine.steps) == 2


def classes() -> tuple[nn.Module, Callable[[Tensor, Any], Tensor]]:
    criterion, y = nn.CrossEntropyLoss(weight=torch.ones(2, dtype=torch.float64)), torch.arange(4) % 2
    return criterion, lambda output, _: criterion(output, y)


def prototypes() -> tuple[nn.Module, Callable[[Tensor, Any], Tensor]]:
    table = nn.Embedding(3, 2, dtype=torch.float64).requires_grad_(False)
    return table, lambda output, _: (output @ (table.weight / table.weight.norm()).T).square().mean()


def normed() -> tuple[nn.Module, Callable[[Tensor, Any], Tensor]]:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2).double()).requires_grad_(False)
    return layer, lambda output, batch: (output - layer(batch[0])).square().mean()


@pytest.mark.parametrize("made", [classes, prototypes, normed])
def test_what_a_loss_computes_from_a_module_beside_the_model_alone_is_renewed(made: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    beside, loss_fn = made()
    torch.manual_seed(0)
    local = nn.Linear(3, 2).double()
    model: Any = whale.parallelize(local, X, device="cpu", loss_fn=loss_fn)
    for _ in range(3):
        assert model.train_step(X).item() == pytest.approx(loss_fn(local(X), (X,)).item(), abs=1e-12)
        with torch.no_grad():
            for number, x in enumerate([*beside.parameters(), *beside.buffers()]):
                x.flatten()[0] += 1.0 + number
    assert len(model._whale.engine.steps) == 1


held_globally: Any = None


def scaling(by: float) -> nn.Linear:
    made = nn.Linear(3, 3, bias=False).double().requires_grad_(False)
    with torch.no_grad():
        made.weight.copy_(by * torch.eye(3))
    return made


HELD_GLOBALLY: dict[str, Callable[[float], Any]] = {
    "a module": scaling,
    "modules": lambda by: nn.Sequential(scaling(by), nn.Identity()),
    "a method": lambda by: scaling(by).forward,
    "a partial": lambda by: functools.partial(torch.mul, torch.tensor(by, dtype=torch.float64)),
}


@pytest.mark.parametrize("kind", HELD_GLOBALLY)
@pytest.mark.parametrize("where", ["forward", "loss_fn"])
def test_a_global_that_has_another_module_acts_at_the_next_step(kind: str, where: str) -> None:
    class Aimed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(x)
            return loss_of(made, x) if where == "forward" else made

    def loss_of(made: Tensor, given: Any) -> Tensor:
        x = given[0] if isinstance(given, tuple) else given
        return (made - held_globally(x).detach()).square().mean()

    make, local = HELD_GLOBALLY[kind], Aimed()
    write(globals(), "held_globally", make(1.0))
    model: Any = whale.parallelize(local, X, device="cpu", loss_fn=loss_of if where == "loss_fn" else None)
    twin = Aimed()
    for by in (1.0, 2.0, 3.0):
        write(globals(), "held_globally", make(by))
        expected = twin(X) if where == "forward" else loss_of(twin(X), X)
        assert model.train_step(X).item() == pytest.approx(expected.item(), rel=1e-12)
    if isinstance(held_globally, nn.Linear):
        held_globally.weight.data.mul_(0.5)
        expected = twin(X) if where == "forward" else loss_of(twin(X), X)
        assert model.train_step(X).item() == pytest.approx(expected.item(), rel=1e-12)


class Rate:
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self) -> float:
        return self.value


def rated() -> None:
    """A function with an attribute."""


NAMESPACES: dict[str, Any] = {"SimpleNamespace": SimpleNamespace(), "argparse": Namespace(), "a function": rated}


@pytest.mark.parametrize("kind", NAMESPACES)
def test_what_is_put_into_a_namespace_is_looked_at(kind: str) -> None:
    held = NAMESPACES[kind]
    held.rate = Rate(1.0)

    class Rated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.held = nn.Linear(3, 3).double(), held

        def forward(self, x: Tensor) -> Any:
            return self.layer(x).sum() * self.held.rate()

    twin, model = Rated(), whale.parallelize(Rated(), X, device="cpu")
    for change in (lambda: None, lambda: setattr(held, "rate", Rate(2.0)), lambda: setattr(held.rate, "value", 3.0)):
        change()
        assert model.train_step(X).item() == pytest.approx(twin(X).item(), rel=1e-12)


@dataclass
class Data:
    rate: float = 1.0


class Aliased:
    """A configuration with another name for an attribute, as those of transformers."""

    def __init__(self) -> None:
        self.rate = 1.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("rate" if name == "speed" else name)


WHOLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "vars": (lambda: SimpleNamespace(rate=1.0), lambda held: max(vars(held).values())),
    "arguments": (lambda: Namespace(rate=1.0), lambda held: dict(**held.__dict__).popitem()[1]),
    "asdict": (Data, lambda held: max(asdict(held).values())),
    "fields": (Data, lambda held: max(getattr(held, field.name) for field in dataclasses.fields(held))),
    "an alias": (Aliased, lambda held: held.speed),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_an_object_that_is_read_as_a_whole_is_looked_at_as_one(kind: str) -> None:
    make, read = WHOLE[kind]
    held = make()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.held = nn.Linear(3, 3).double(), held

        def forward(self, x: Tensor) -> Any:
            return self.layer(x).sum() * read(self.held)

    twin, model = Whole(), whale.parallelize(Whole(), X, device="cpu")
    for rate in (1.0, 2.0, 3.0):
        setattr(held, "ra" + "te", rate)
        assert model.train_step(X).item() == pytest.approx(twin(X).item(), rel=1e-12)
