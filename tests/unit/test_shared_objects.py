"""Objects that a script has made for a model: the parallel model has the same, and steps see what changes in them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pydantic
import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import CaptureError, UsageError

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


class Schedule:
    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self) -> float:
        return self.factor

    def scaled(self, by: float = 1.0) -> float:
        return by * self.factor


class Pair(NamedTuple):
    name: str
    of: Any


class Slots:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Model(nn.Module):
    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.held, self.read = nn.Linear(3, 2).double(), held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum() * self.read(self.held)


class Options(dict[str, Any]):
    __getattr__ = dict.__getitem__


class OwnAttributes(dict[str, Any]):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.__dict__ = self


class Items(list[Any]):
    pass


class Config(pydantic.BaseModel):
    factor: float = 1.0


class OpenConfig(pydantic.BaseModel, extra="allow"):
    _private: float = 1.0


def factor_of(x: Any) -> float:
    return float(x.factor)


NAMESPACE, SCHEDULE, SLOTS = SimpleNamespace(factor=1.0), Schedule(), Slots()
PLACED = SimpleNamespace(factor=1.0, device=torch.device("cpu"), part=slice(1, 3), shape=torch.Size([2]))
TABLE = torch.ones(2, dtype=torch.float64)
CONFIG, OPEN = Config(), OpenConfig(**{"factor": 1.0})
DICTS, LISTED = (Options(factor=1.0), OwnAttributes(factor=1.0)), Items([1.0])
NAMED = OrderedDict[str, Any]()
HOLDING = SimpleNamespace(
    factor=1.0,
    generator=torch.Generator(),
    loss=nn.MSELoss(),
    pairs={(1, "a"), (2, "b")},
    since=datetime(2026, 1, 1),
    following=iter([1, 2]),
    weight=nn.Parameter(torch.ones(1)),
    functional=nn.functional,
)
OPTIONS, ARRAY, ITEMS = {"of": {"factor": 1.0}}, np.ones(2), deque([1.0])

KINDS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[float], Any]]] = {
    "a namespace": (NAMESPACE, factor_of, lambda value: setattr(NAMESPACE, "factor", value)),
    "a namespace with a device": (PLACED, factor_of, lambda value: setattr(PLACED, "factor", value)),
    "an object": (SCHEDULE, lambda x: x(), lambda value: setattr(SCHEDULE, "factor", value)),
    "its slot": (SLOTS, factor_of, lambda value: setattr(SLOTS, "factor", value)),
    "its method": (SCHEDULE.scaled, lambda x: x(2.0), lambda value: setattr(SCHEDULE, "factor", value)),
    "a partial": (partial(SCHEDULE.scaled, by=3.0), lambda x: x(), lambda value: setattr(SCHEDULE, "factor", value)),
    "in a tuple": (Pair("a", SCHEDULE), lambda x: x.of(), lambda value: setattr(SCHEDULE, "factor", value)),
    "a dict": (OPTIONS, lambda x: x["of"]["factor"], lambda value: OPTIONS["of"].update(factor=value)),
    "a dict with attributes": (DICTS[0], factor_of, lambda value: DICTS[0].update(factor=value)),
    "a dict that is its attributes": (DICTS[1], factor_of, lambda value: DICTS[1].update(factor=value)),
    "a kind of list": (LISTED, lambda x: x[0], lambda value: LISTED.__setitem__(0, value)),
    "an attribute of a kind of list": (LISTED, factor_of, lambda value: setattr(LISTED, "factor", value)),
    "an attribute of a kind of dict": (NAMED, factor_of, lambda value: setattr(NAMED, "factor", value)),
    "an object with others": (HOLDING, factor_of, lambda value: setattr(HOLDING, "factor", value)),
    "a pydantic model": (CONFIG, factor_of, lambda value: setattr(CONFIG, "factor", value)),
    "what a pydantic model allows": (OPEN, factor_of, lambda value: setattr(OPEN, "factor", value)),
    "what a pydantic model hides": (OPEN, lambda x: x._private, lambda value: setattr(OPEN, "_private", value)),
    "a deque": (ITEMS, lambda x: x[0], lambda value: ITEMS.__setitem__(0, value)),
    "a tensor": (TABLE, lambda x: x.sum(), lambda value: TABLE.fill_(value)),
    "a tensor in it": (SimpleNamespace(of=TABLE), lambda x: x.of.sum(), lambda value: TABLE.fill_(value)),
    "an array": (ARRAY, lambda x: float(x[1]), lambda value: ARRAY.__setitem__(1, value)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_script_changes_in_an_object_that_it_gave_acts(kind: str, keeps: bool) -> None:
    held, read, change = KINDS[kind]
    change(1.0)
    twin, local = Model(held, read), Model(held, read)
    model: Any = whale.parallelize(local, X, device="cpu")
    if not keeps:
        del local
    for value in (1.0, 0.5, 2.0):
        change(value)
        assert model.train_step(X).item() == pytest.approx(twin(X).item(), abs=1e-12)


@pytest.mark.parametrize("through", ["the script", "the model"])
def test_a_loss_and_a_model_have_one_object(through: str) -> None:
    config = SimpleNamespace(factor=1.0)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.config = nn.Linear(3, 2).double(), config

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.config.factor

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return output.square().sum() + config.factor * output.sum()

    twin = Scaled()
    model: Any = whale.parallelize(Scaled(), X, device="cpu", loss_fn=loss_fn)
    for value in (1.0, 0.5, 2.0):
        (config if through == "the script" else model.config).factor = value
        assert model.train_step(X).item() == pytest.approx(loss_fn(twin(X), X).item(), abs=1e-12)


class Scaling:
    def __init__(self, of: nn.Module | None = None) -> None:
        self.factor, self.of = 1.0, of

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.factor

    def before(self, module: nn.Module, args: Any) -> Any:
        return (args[0] * self.factor,)


@pytest.mark.parametrize("kind", ["an object", "a method", "a method before", "a partial"])
@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_script_changes_in_a_hook_acts(kind: str, keeps: bool) -> None:
    def made(scaling: Scaling) -> Model:
        model = Model(None, lambda _: 1.0)
        if kind == "a method before":
            model.linear.register_forward_pre_hook(scaling.before)
        else:
            hooks: dict[str, Any] = {"an object": scaling, "a method": scaling.__call__, "a partial": partial(scaling)}
            model.linear.register_forward_hook(hooks[kind])
        return model

    scaling = Scaling()
    twin, local = made(scaling), made(scaling)
    model: Any = whale.parallelize(local, X, device="cpu")
    if not keeps:
        del local
    for value in (1.0, 0.5, 2.0):
        scaling.factor = value
        assert model.train_step(X).item() == pytest.approx(twin(X).item(), abs=1e-12)


@pytest.mark.parametrize("through", ["the script", "the model"])
def test_a_hook_that_reaches_a_module_is_changed_with_the_scripts(through: str) -> None:
    def made() -> tuple[Model, Scaling]:
        model = Model(None, lambda _: 1.0)
        scaling = Scaling(of=model.linear)
        model.linear.register_forward_hook(scaling)
        return model, scaling

    (twin, of_twin), (local, of_local) = made(), made()
    model: Any = whale.parallelize(local, X, device="cpu")
    (hook,) = model.linear._forward_hooks.values()
    assert hook is not of_local
    for value in (1.0, 0.5, 3.0):
        (of_local if through == "the script" else hook).factor = of_twin.factor = value
        assert model.train_step(X).item() == pytest.approx(twin(X).item(), abs=1e-12)


class Callback:
    def __init__(self, trainer: Any) -> None:
        self.trainer, self.scale = trainer, 1.0


class Trainer:
    decay = 1.0

    def __init__(self, model: Any, kind: str) -> None:
        self.callbacks, self.own = [Callback(self)], {"trainer": self, "scale": 1.0}
        self.epoch, self.scales, self.inner = 0, [1.0], SimpleNamespace(scale=1.0)
        self.layers, self.active = model.layers, model.layers[0]
        if kind == "of the model":
            self.model = model
        elif kind == "of its optimizer":
            self.optimizer = torch.optim.SGD(model.parameters())
        elif kind == "of a list":
            self.held = [model.layers[0], model.layers[0].weight]


class Trained(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3).double(), nn.Linear(3, 3).double()])
        self.trainer: Any = None
        self.options: Any = None
        made = Trainer(self, kind)
        if kind == "a dict":
            self.options = {"trainer": made, "scale": 1.0}
        elif kind == "beside modules":
            object.__setattr__(self, "trainer", made)
        else:
            self.trainer = made

    def forward(self, x: Tensor) -> Tensor:
        trainer = self.trainer or self.options["trainer"]
        scale: Any = 1.0 if self.options is None else self.options["scale"]
        scale = scale * sum(trainer.scales) * trainer.inner.scale * trainer.decay * (1 + trainer.epoch)
        scale = scale * sum(callback.scale for callback in trainer.callbacks) * trainer.own["scale"]
        return (trainer.active(x) * scale).square().sum() + self.layers[1](x).square().sum()


def changes_of_trainers(trainer: Any, model: Any) -> Iterator[None]:
    yield
    trainer.epoch += 1
    trainer.scales.append(2.0)
    trainer.callbacks[0].scale = 0.5
    yield
    trainer.scales = [0.5, 0.25]
    yield
    trainer.inner.scale = 0.125
    trainer.decay = 3.0
    yield
    del trainer.decay
    trainer.inner = SimpleNamespace(scale=7.0)
    trainer.active = trainer.layers[1]
    trainer.callbacks.append(SimpleNamespace(scale=0.125))
    trainer.own["scale"] = 1.5
    yield
    trainer.active = trainer.layers[0]
    if model.options is not None:
        model.options["scale"] = 0.5
    yield


@pytest.mark.parametrize(
    "kind", ["of a layer", "of the model", "of its optimizer", "of a list", "a dict", "beside modules"]
)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.filterwarnings("ignore:5 kinds of steps")
def test_what_a_script_changes_in_a_trainer_acts(kind: str, keeps: bool) -> None:
    local, twin = Trained(kind), Trained(kind)
    options = local.options
    trainer, of_twin = (x.trainer or x.options["trainer"] for x in (local, twin))
    model: Any = whale.parallelize(local, X, device="cpu")
    if not keeps:
        del local
    held = SimpleNamespace(options=options)
    for _ in zip(changes_of_trainers(trainer, held), changes_of_trainers(of_twin, twin), strict=True):
        loss, own = model.train_step(X), twin(X)
        assert loss.item() == pytest.approx(own.item(), rel=1e-12)
        model.zero_grad()
        twin.zero_grad()
        model.train_step(X)
        own.backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            of_twin_q, of_p = (torch.zeros_like(q) if x.grad is None else x.grad for x in (q, p))
            torch.testing.assert_close(of_p, of_twin_q)


def test_a_copy_of_the_parallel_model_follows_a_trainer_too() -> None:
    local = Trained("of the model")
    trainer = local.trainer
    model: Any = whale.parallelize(local, X, device="cpu")
    average = copy.deepcopy(model)
    first = average.train_step(X).item()
    trainer.epoch += 1
    losses = [one.train_step(X).item() for one in (average, model)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] != pytest.approx(first)


@pytest.mark.parametrize("kind", ["a dict", "of the model", "of its optimizer"])
def test_a_trainer_does_not_keep_the_local_model(kind: str) -> None:
    local = Trained(kind)
    trainer = local.trainer or local.options["trainer"]
    gone = weakref.ref(local), weakref.ref(local.layers[0]), weakref.ref(trainer)
    model: Any = whale.parallelize(local, X, device="cpu")
    del local, trainer
    for _ in range(3):
        model.train_step(X)
    gc.collect()
    model.train_step(X)
    assert [x() for x in gone] == [None] * 3


def test_a_trainer_that_gets_a_list_of_the_local_model_is_refused_until_it_has_another() -> None:
    local = Trained("of the model")
    trainer = local.trainer
    model: Any = whale.parallelize(local, X, device="cpu")
    first = model.train_step(X)
    trainer.scales = [1.0, local.layers[0]]
    with pytest.raises(UsageError, match="scales of a Trainer that the local model has was changed after parallelize"):
        model.train_step(X)
    trainer.scales = [1.0]
    trainer.model = model
    torch.testing.assert_close(model.train_step(X), first)


def test_an_object_that_reaches_a_module_or_a_state_is_the_parallel_models_own() -> None:
    class Reaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2).double()
            self.inner = SimpleNamespace(of=[self.linear], factor=1.0)
            self.register_buffer("scale", torch.ones(2, dtype=torch.float64))
            self.scales = SimpleNamespace(own=self.scale, all=[torch.ones(2, dtype=torch.float64)])

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner.of[0](x) * self.scales.all[0]).sum() * self.inner.factor

    local = Reaches()
    model: Any = whale.parallelize(local, X, device="cpu")
    assert model.inner is not local.inner and model.inner.of[0] is model.linear
    assert model.scales is not local.scales
    assert model.train_step(X).item() == pytest.approx(local(X).item(), abs=1e-12)


class Taught(nn.Module):
    """A student, whose teacher is in a list so that it is no part of it."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.student, self.teacher = nn.Linear(3, 2).double(), [teacher]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            known = self.teacher[0](x)
        return (self.student(x) - known).square().sum()


def teacher(*, scale: float = 1.0) -> Any:
    torch.manual_seed(0)
    made: Any = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double().eval()
    with torch.no_grad():
        made[0].weight.mul_(scale)
    return made


OF_A_TEACHER: dict[str, Callable[[Any], object]] = {
    "written to": lambda t: t.load_state_dict(teacher(scale=2.0).state_dict()),
    "written to through data": lambda t: [x.data.mul_(0.5) for x in [*t.parameters(), t[1].running_var]],
    "other data": lambda t: t[0].weight.__setattr__("data", 0.5 * t[0].weight.data),
    "another parameter": lambda t: setattr(t[0], "weight", nn.Parameter(torch.ones(2, 3, dtype=torch.float64))),
    "another layer": lambda t: t.__setitem__(0, teacher(scale=3.0)[0]),
    "a hook": lambda t: t[0].register_forward_hook(lambda module, args, output: 2 * output),
    "another forward": lambda t: t.__setattr__("forward", lambda x: x[:, :2]),
}


@pytest.mark.parametrize("what", OF_A_TEACHER)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_teacher_in_a_list_is_as_the_script_has_it(what: str, keeps: bool) -> None:
    of_twin, of_local = teacher(), teacher()
    twin, local = Taught(of_twin), Taught(of_local)
    model: Any = whale.parallelize(local, X, device="cpu")
    if not keeps:
        del local
    assert model.teacher[0] is of_local
    for _ in range(2):
        assert model.train_step(X).item() == pytest.approx(twin(X).item(), abs=1e-12)
        for one in (of_twin, of_local):
            OF_A_TEACHER[what](one)
    assert model.train_step(X).item() == pytest.approx(twin(X).item(), abs=1e-12)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_teacher_follows_its_student_through_data(precision: str | None) -> None:
    def losses(model: Any, step: Callable[[], float], of: Any) -> list[float]:
        found = []
        for _ in range(3):
            found.append(step())
            for mean, now in zip(of[0].parameters(), model.student.parameters(), strict=True):
                mean.data.mul_(0.5).add_(now.data, alpha=0.5)
        return found

    def autocast_step(model: Taught) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
            return model(X.float()).item()

    of_twin, of_local = teacher().float(), teacher().float()
    twin, local = Taught(of_twin).float(), Taught(of_local).float()
    model: Any = whale.parallelize(local, X.float(), device="cpu", precision=precision)
    known = losses(twin, lambda: autocast_step(twin), of_twin)
    tolerance = 1e-6 if precision is None else 2e-2
    assert losses(model, lambda: model.eval_step(X.float()).item(), of_local) == pytest.approx(known, rel=tolerance)
    assert known[0] != pytest.approx(known[1], rel=0.1)


class Penalty:
    """A loss that reads parameters of a model through its attributes."""

    def __init__(self, model: Any) -> None:
        self.model, self.weight = model, 0.5
        self.means = {name: p.detach() + 0.1 for name, p in model.named_parameters()}
        self.parts = {"layer": model.linear, "weight": 0.25}

    def penalty(self) -> Any:
        named = self.model.named_parameters()
        apart = sum((p - self.means[name]).square().sum() for name, p in named)
        return self.weight * apart + self.parts["weight"] * self.parts["layer"].bias.square().sum()

    def __call__(self, output: Tensor, batch: Any) -> Any:
        return output.square().sum() + self.penalty()


class PenaltyInSlots:
    __slots__ = ("layer", "weight")

    def __init__(self, model: Any) -> None:
        self.layer, self.weight = model.linear, 0.5

    def __call__(self, output: Tensor, batch: Any) -> Any:
        return output.square().sum() + self.weight * self.layer.weight.square().sum()


class Learner:
    """A trainer whose method is the loss, and that refers to itself."""

    def __init__(self, model: Any) -> None:
        self.model, self.weight, self.loop = model, 0.5, SimpleNamespace(learner=self)

    def loss(self, output: Tensor, batch: Any) -> Any:
        return output.square().sum() + self.weight * self.loop.learner.model.linear.weight.square().sum()


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.other = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.other(x)


LOSSES: dict[str, tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any, Any], object]]] = {
    "an object": (lambda m: ((p := Penalty(m)), p), lambda p, _: setattr(p, "weight", 2.0)),
    "a dict of one": (lambda m: ((p := Penalty(m)), p), lambda p, _: p.parts.update(weight=3.0)),
    "another layer": (lambda m: ((p := Penalty(m)), p), lambda p, m: p.parts.update(layer=m.other)),
    "slots": (lambda m: ((p := PenaltyInSlots(m)), p), lambda p, _: setattr(p, "weight", 2.0)),
    "a method": (lambda m: ((t := Learner(m)).loss, t), lambda t, _: setattr(t, "weight", 2.0)),
    "a method of one that gets the parallel model": (
        lambda m: ((t := Learner(m)).loss, t),
        lambda t, m: t.__dict__.update(model=m, weight=2.0),
    ),
    "a variable": (
        lambda m: ((p := Penalty(m)), lambda output, batch: output.square().sum() + p.penalty())[::-1],
        lambda p, _: setattr(p, "weight", 2.0),
    ),
    "a partial": (
        lambda m: (partial(lambda p, output, batch: output.square().sum() + p.penalty(), p := Penalty(m)), p),
        lambda p, _: setattr(p, "weight", 2.0),
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_loss_may_read_a_model_through_objects_that_the_script_changes(kind: str, keeps: bool) -> None:
    make, change = LOSSES[kind]
    local, twin = Headed(), Headed()
    (loss_fn, held), (of_twin, held_by_twin) = make(local), make(twin)
    model: Any = whale.parallelize(local, X, device="cpu", loss_fn=loss_fn)
    if not keeps:
        del local
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, twin)]
    for step in range(4):
        if step == 2:
            change(held, model)
            change(held_by_twin, twin)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, own = model.train_step(X), of_twin(twin(X), X)
        own.backward()
        assert loss.item() == pytest.approx(own.item(), rel=1e-12)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        for optimizer in optimizers:
            optimizer.step()


def test_a_loss_that_counts_its_calls_in_an_object_with_the_model_is_refused() -> None:
    class Counts(Penalty):
        calls = 0

        def __call__(self, output: Tensor, batch: Any) -> Any:
            self.calls += 1
            return super().__call__(output, batch) * self.calls

    local = Headed()
    loss_fn = Counts(local)
    with pytest.raises(CaptureError, match="loss_fn changes what it reaches from step to step"):
        whale.parallelize(local, X, device="cpu", loss_fn=loss_fn)
    assert loss_fn.calls == 0 and loss_fn.model is local and loss_fn.parts["layer"] is local.linear


class Features:
    """An object in which a forward, or a hook, leaves something for the loss."""

    def __init__(self, model: Any = None) -> None:
        self.model, self.weight = model, 0.5
        self.last: Any = None
        self.all: dict[str, Any] = {}

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.last = output

    def save(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.all["last"] = output

    def loss(self, output: Tensor, batch: Any) -> Any:
        return output.square().sum() + sum(x.square().sum() for x in (self.last, self.all.get("last")) if x is not None)


class Leaving(Headed):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.features: Any = None
        made = Features(self if kind.endswith("with the model") else None)
        hooks: dict[str, Any] = {"a hook": made, "a method": made.save, "a partial": partial(Features.save, made)}
        if kind.startswith("an attribute"):
            self.features = made
        else:
            self.linear.register_forward_hook(hooks[kind.removesuffix(" with the model")])
            self.features = made if kind == "a hook" else None

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        if self.features is not None:
            self.features.last = h
        return self.other(h[:, :1].expand(-1, 3))


@pytest.mark.parametrize("kind", ["an attribute", "an attribute with the model", "a hook"])
def test_a_loss_reads_what_a_forward_leaves_in_an_object_of_the_model(kind: str) -> None:
    local, twin = Leaving(kind), Leaving(kind)

    def loss_of(model: Any) -> Any:
        return lambda output, batch: output.square().sum() + model.features.last.square().sum()

    model: Any = whale.parallelize(local, X, device="cpu", loss_fn=loss_of(local))
    assert model.train_step(X).item() == pytest.approx(loss_of(twin)(twin(X), X).item(), rel=1e-12)


@pytest.mark.parametrize(
    "kind",
    ["an attribute", "an attribute with the model", "a hook", "a method", "a method with the model", "a partial"],
)
def test_what_a_forward_leaves_in_an_object_that_the_loss_has_by_itself_is_refused(kind: str) -> None:
    local = Leaving(kind)
    if kind == "an attribute" or local.features is not None:
        loss_fn = local.features.loss
    else:
        (hook,) = local.linear._forward_hooks.values()
        held: Any = hook
        loss_fn = (held.args[0] if isinstance(held, partial) else held.__self__).loss
    with pytest.raises(CaptureError, match="and loss_fn has an object of it by itself, not through the model"):
        whale.parallelize(local, X, device="cpu", loss_fn=loss_fn)


def test_a_list_that_a_script_shares_with_its_model_keeps_what_reaches_the_model() -> None:
    class Groups(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(3, 2).double()
            self.groups: list[Any] = [(self.linear, 1.0)]
            self.mixed: list[Any] = [self.linear, slice(0, 2), 1.0, self.linear.weight, nn.Sequential()]

        def forward(self, x: Tensor) -> Tensor:
            scaled = [(self.linear if layer is None else layer)(x) * scale for layer, scale in self.groups]
            return torch.stack(scaled).square().sum() * self.mixed[2] + self.mixed[0](x)[self.mixed[1]].sum()

    local, twin = Groups(), Groups()
    groups, mixed = local.groups, local.mixed
    model: Any = whale.parallelize(local, X, device="cpu")
    del local
    for entry in ((None, 2.0), (None, 0.5)):
        groups.append(entry)
        twin.groups.append(entry)
        assert model.train_step(X).item() == pytest.approx(twin(X).item(), rel=1e-12)
    for groups_of, mixed_of in ((groups, mixed), (twin.groups, twin.mixed)):
        del groups_of[1:]
        mixed_of[1:3] = [slice(1, 4), 3.0]
    assert model.train_step(X).item() == pytest.approx(twin(X).item(), rel=1e-12)
