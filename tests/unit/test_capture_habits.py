"""Habits inside of a forward: captured as they act, or refused with the line."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale
from whale.errors import CaptureError, UsageError

X = torch.ones(4, 4)


class Wrapped(nn.Module):
    """A linear layer, called in some way."""

    def __init__(self, call: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> object:
        return self.call(self.layer, x)


def cast(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    return y.float().sum()


def not_cast(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return layer(x).sum()


@pytest.mark.parametrize("call", [cast, not_cast])
def test_autocast_inside_of_a_forward_acts(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = whale.parallelize(Wrapped(call), X, device="cpu")
    local = Wrapped(call)
    call(local.layer, X).backward()
    assert model.train_step(X).item() == pytest.approx(call(local.layer, X).item())
    for own, parameter in zip(model.parameters(), local.parameters(), strict=True):
        assert own.grad is not None and parameter.grad is not None
        assert torch.equal(own.grad, parameter.grad)


def dropped(chance: float) -> Callable[[nn.Module, Tensor], Tensor]:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return x.sum() if torch.rand([]) < chance else layer(x).sum()

    return call


def test_a_layer_that_is_dropped_never_is_captured() -> None:
    model = whale.parallelize(Wrapped(dropped(0.0)), X, device="cpu")
    assert model.train_step(X).item() == pytest.approx(Wrapped(dropped(0.0))(X).item())
    with pytest.raises(CaptureError, match="depends on a tensor's values"):
        whale.parallelize(Wrapped(dropped(0.5)), X, device="cpu")


@pytest.mark.parametrize("length", [1, 3, 130])
@pytest.mark.parametrize("count", [torch.bincount, Tensor.bincount])
def test_counts_of_choices_are_captured_where_their_number_is_said(count: Callable[..., Tensor], length: int) -> None:
    """The loss of a router that balances its experts counts them so."""
    weights = torch.linspace(1, 2, length)

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        choice = (layer(x) * 31).abs().long().reshape(-1) % length
        return layer(x).sum() * (count(choice, minlength=length) * weights).sum()

    x = torch.linspace(-2, 2, 32).view(8, 4)
    model = whale.parallelize(Wrapped(call), x, device="cpu")
    assert model.train_step(x).item() == pytest.approx(Wrapped(call)(x).item())
    with pytest.raises(CaptureError, match="depends on a tensor's values"):
        whale.parallelize(
            Wrapped(lambda layer, x: layer(x).sum() * x.long().view(-1).bincount().sum()), x, device="cpu"
        )


class Monitored(nn.Module):
    """A head that only a metric reads, and a target that is computed without gradients."""

    def __init__(self, metric: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.metric = nn.Linear(4, 4), nn.Linear(4, 4), metric

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        with torch.inference_mode():
            target = self.body(x).round()
        return (y - target).square().mean() + 0 * self.metric(self.head(y)).sum()


@pytest.mark.parametrize(
    "metric",
    [torch.Tensor.detach, lambda y: y.argmax(-1).float(), lambda y: (y > 0).float(), torch.zeros_like],
    ids=["detach", "argmax", "comparison", "zeros"],
)
def test_what_only_a_metric_reads_has_no_gradient(metric: Callable[[Tensor], Tensor]) -> None:
    model, local = whale.parallelize(Monitored(metric), X, device="cpu"), Monitored(metric)
    local(X).backward()
    model.train_step(X)
    for own, parameter in zip(model.parameters(), local.parameters(), strict=True):
        assert (own.grad is None) == (parameter.grad is None)
        assert own.grad is None or parameter.grad is None or torch.equal(own.grad, parameter.grad)


def toggled(layer: nn.Module, x: Tensor) -> Tensor:
    layer.requires_grad_(False)
    y: Tensor = layer(x)
    layer.requires_grad_(True)
    return (y + layer(x)).sum()


def assigned(layer: nn.Module, x: Tensor) -> Tensor:
    layer.weight.requires_grad = False
    return layer(x).sum()


@pytest.mark.parametrize("call", [toggled, assigned])
def test_freezing_inside_of_a_forward_is_refused(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"test_capture_habits\.py:\d+: requires_grad of a parameter is changed"):
        whale.parallelize(Wrapped(call), X, device="cpu")


def derived(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(nn.Sequential(layer), (x,), (x,))[1].sum()


def test_a_transform_around_a_module_of_torch_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_capture_habits\.py:\d+: .*transforms of torch\.func"):
        whale.parallelize(Wrapped(derived), X, device="cpu")


def test_a_reentrant_checkpoint_of_what_needs_no_gradient_makes_none() -> None:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return (checkpoint(layer, x, use_reentrant=True) + x).sum() + layer(x).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so
        model, local = whale.parallelize(Wrapped(call), X, device="cpu"), Wrapped(call)
        local(X).backward()
    model.train_step(X)
    for own, parameter in zip(model.parameters(), local.parameters(), strict=True):
        assert own.grad is not None and parameter.grad is not None
        assert torch.equal(own.grad, parameter.grad)


def test_a_gradient_can_be_written_to_like_one_of_autograd() -> None:
    model = whale.parallelize(Wrapped(lambda layer, x: layer(x).sum()), X, device="cpu")
    model.train_step(X)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_((parameter.grad * parameter).sum())


@pytest.mark.parametrize(
    ("output", "place"),
    [
        (lambda y: (y, y.square().sum()), 1),
        (lambda y: (y.square().sum(), y), 0),
        (lambda y: (y.detach().mean(), y.square().sum()), 1),
        (lambda y: ((y > 0).sum(), y.square().sum(), y), 1),
    ],
)
def test_the_loss_of_a_tuple_is_its_scalar_with_a_gradient(
    output: Callable[[Tensor], tuple[Tensor]], place: int
) -> None:
    model = Wrapped(lambda layer, x: output(layer(x)))
    expected = model(X)[place].item()
    assert whale.parallelize(model, X, device="cpu").train_step(X).item() == pytest.approx(expected)


def test_a_tuple_of_several_losses_is_refused() -> None:
    model = Wrapped(lambda layer, x: (layer(x).mean(), layer(x).square().sum()))
    with pytest.raises(CaptureError, match=r"scalars at 0 and 1.*loss_fn=lambda output, batch: output\[0\]"):
        whale.parallelize(model, X, device="cpu")


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
def test_reduced_losses_take_arguments_by_name(reduction: str, log_target: bool) -> None:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        target = x.log_softmax(-1) if log_target else x.softmax(-1)
        return F.kl_div(layer(x).log_softmax(-1), target, reduction=reduction, log_target=log_target)

    expected = call(Wrapped(call).layer, X).item()
    assert whale.parallelize(Wrapped(call), X, device="cpu").train_step(X).item() == pytest.approx(expected)


class Queue(nn.Module):
    """It writes rows to a buffer, so that its graph is traced a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(8, 4))
        self.queue: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        with torch.no_grad():
            self.queue[: len(x)] = y
        return (y @ self.queue.t()).sum()


def test_lines_of_a_model_that_writes_to_its_buffers() -> None:
    with pytest.raises(UsageError, match=r"at .*test_capture_habits\.py:\d+ computes a row of the batch from other"):
        whale.parallelize(Queue(), X, device="cpu", micro_batches=2)


def features_of_a_hook() -> tuple[nn.Module, Callable[..., Tensor], dict[str, Tensor]]:
    """A model with a hook that collects activations, which its loss reads."""
    torch.manual_seed(0)
    model, features = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), dict[str, Tensor]()
    model[0].register_forward_hook(lambda module, given, output: features.update(first=output))

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        features["loss"] = output.square().mean()
        return features["loss"] + features["first"].square().mean()

    return model, loss, features


def test_what_a_hook_collects_is_read_in_the_step_and_refused_outside() -> None:
    (local, loss, kept), (model, loss_fn, left) = features_of_a_hook(), features_of_a_hook()
    parallel = whale.parallelize(model, X, device="cpu", loss_fn=loss_fn)
    for rows in (4, 3, 8, 2):
        x = torch.randn(rows, 4)
        assert parallel.train_step(x).item() == pytest.approx(loss(local(x), x).item())
        for name in kept:
            assert left[name].dtype == torch.float32
            for use in (float, lambda x: x.sum(), lambda x: x.detach(), repr):
                with pytest.raises(UsageError, match="return it from forward, and take it with .*outputs=True"):
                    use(left[name])


def test_synchronized_batch_norms_are_batch_norms() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    local = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(local))
    model = whale.parallelize(converted, x, device="cpu", loss_fn=lambda output, _: output.pow(3).mean())
    expected = local(x).pow(3).mean()
    expected.backward()
    assert model.train_step(x).item() == pytest.approx(expected.item())
    torch.testing.assert_close(model.state_dict(), local.state_dict())
    assert nn.SyncBatchNorm.forward is not nn.BatchNorm1d.forward


class Stem(nn.Module):
    """Modules under two names, as a Sequential of others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.stem = nn.Sequential(self.layer, self.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x)).pow(3).mean()


class ReadsStatistics(Stem):
    """A buffer that the forward writes, as a plain attribute too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = self.norm.running_mean

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x) + self.mean).pow(3).mean()


@pytest.mark.parametrize("kind", [Stem, ReadsStatistics])
def test_a_buffer_that_a_forward_writes_has_two_names(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x, local = torch.randn(4, 4), kind()
    model = whale.parallelize(copy.deepcopy(local), x, device="cpu")
    for _ in range(2):
        expected = local(x)
        expected.backward()
        assert model.train_step(x).item() == pytest.approx(expected.item())
    torch.testing.assert_close(model.full_state_dict(), local.state_dict())
    for name, parameter in local.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    assert model.eval_step(x).item() == pytest.approx(local.eval()(x).item())


Batch = Any
Loss = Callable[[Tensor, Batch], Any]


def weight_decay(model: nn.Module) -> Loss:
    return lambda output, batch: output.square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())


def consolidation(model: nn.Module) -> Loss:
    old = {name: p.detach() + 0.1 for name, p in model.named_parameters()}

    def loss_fn(output: Tensor, batch: Batch) -> Tensor:
        return output.square().mean() + sum((p - old[n]).square().sum() for n, p in model.named_parameters())

    return loss_fn


def by_a_partial(model: nn.Module) -> Loss:
    def loss_fn(output: Tensor, batch: Batch, layer: nn.Module) -> Tensor:
        return output.square().mean() + layer.get_parameter("weight").norm()

    return functools.partial(loss_fn, layer=model.get_submodule("0"))


def by_a_helper(model: nn.Module) -> Loss:
    context: dict[str, Any] = {"model": model, "factor": 0.5}  # of which it reads a number

    def penalty() -> Tensor:
        weight = model.get_parameter("0.weight")
        return (weight @ weight.T - torch.eye(4)).square().sum() * context["factor"]

    return lambda output, batch: output.square().mean() + penalty()


def by_held(hold: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Loss]:
    """A loss that has parameters of the model in a variable."""

    def made(model: nn.Module) -> Loss:
        held = hold(model)

        def loss_fn(output: Tensor, batch: Batch) -> Tensor:
            several = held.values() if isinstance(held, dict) else [held] if isinstance(held, Tensor) else held
            return output.square().mean() + 0.1 * torch.stack([one.square().sum() for one in several]).sum()

        return loss_fn

    return made


def by_default(model: nn.Module) -> Loss:
    weight = model.get_parameter("2.weight")

    def loss_fn(output: Tensor, batch: Batch, of: Any = weight) -> Tensor:
        return output.square().mean() + of.norm()

    return loss_fn


def by_pairs(model: nn.Module) -> Loss:
    pairs = [(0.1, model.get_submodule("0")), (0.2, model.get_submodule("2"))]

    def loss_fn(output: Tensor, batch: Batch) -> Tensor:
        norms = [factor * module.get_parameter("weight").norm() for factor, module in pairs]
        return output.square().mean() + torch.stack(norms).sum()

    return loss_fn


HELD = {
    "a parameter": by_held(lambda model: model.get_parameter("0.weight")),
    "a list": by_held(lambda model: list(model.parameters())),
    "a tuple": by_held(lambda model: tuple(model.parameters())),
    "a dict": by_held(lambda model: dict(model.named_parameters())),
    "a default": by_default,
    "pairs": by_pairs,
}
PENALTIES = HELD | {
    "decay": weight_decay,
    "consolidation": consolidation,
    "a partial": by_a_partial,
    "a helper": by_a_helper,
}


@pytest.mark.parametrize("kind", PENALTIES)
def test_a_loss_reads_the_parameters_of_the_model(kind: str) -> None:
    torch.manual_seed(0)
    local = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, copied = torch.randn(4, 4, dtype=torch.float64), copy.deepcopy(local)
    loss_fn = PENALTIES[kind](local)
    model = whale.parallelize(copied, x, device="cpu", loss_fn=PENALTIES[kind](copied))
    del copied  # the script gives its name to the parallel model
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (local, model)]
    for rows in (4, 4, 2):
        expected = loss_fn(local(x[:rows]), (x[:rows],))
        expected.backward()
        assert model.train_step(x[:rows]).item() == pytest.approx(expected.item(), rel=1e-12)
        for name, p in local.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, p.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def changing(kind: str, model: nn.Sequential) -> tuple[Loss, Callable[[nn.Module], None]]:
    """A loss, and what changes a variable of it that has something of the model."""
    layer, penalty = model[0], lambda: 0.1 * model[0].get_parameter("weight").norm()
    aim: nn.Module | None = layer

    def loss_fn(output: Tensor, batch: Batch) -> Tensor:
        own = aim.get_parameter("weight").norm() if aim is not None else 0.0
        return output.square().mean() + own + (penalty() if kind == "a helper" else 0.0)

    def change(parallel: nn.Module) -> None:
        nonlocal aim, penalty
        if kind == "a helper":
            penalty = lambda: 0.3 * model[0].get_parameter("weight").norm()  # noqa: E731
        else:
            aim = None if kind == "nothing" else parallel.get_submodule("0" if kind == "the same" else "2")

    return loss_fn, change


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "aim, a variable of the loss, had the module '0' in parallelize and has something else now"),
        ("another", "aim, a variable of the loss, had the module '0' in parallelize and has something else now"),
        ("a helper", "penalty, a variable of the loss, had a function that reads the model in parallelize"),
        ("the same", ""),
    ],
)
def test_a_variable_of_a_loss_has_the_same_of_the_model_in_all_steps(kind: str, message: str) -> None:
    local = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    loss_fn, change = changing(kind, local)
    model = whale.parallelize(local, X, device="cpu", loss_fn=loss_fn)
    model.train_step(X)
    change(model)
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        assert model.train_step(X).isfinite()
    assert copy.deepcopy(model).eval_step(X).isfinite()  # of what the loss was


def test_a_variable_of_a_loss_may_be_deleted() -> None:
    local = nn.Sequential(nn.Linear(4, 4))

    def loss_fn(output: Tensor, batch: Batch) -> Tensor:
        return output.square().mean() + local[0].get_parameter("weight").norm()  # noqa: F821  # it is deleted below

    expected = loss_fn(local(X), (X,)).item()
    model = whale.parallelize(local, X, device="cpu", loss_fn=loss_fn)
    del local  # the script frees it
    assert model.train_step(X).item() == pytest.approx(expected)


class Mixed(NamedTuple):
    """A container of a factor and a module: how it is made, read, and given another factor."""

    hold: Callable[[nn.Module], Any]
    read: Callable[[Any], tuple[float, nn.Module]]
    change: Callable[[Any, float], object]


MIXED = {
    "a list": Mixed(lambda module: [0.1, module], tuple, lambda held, by: held.__setitem__(0, by)),
    "a dict": Mixed(
        lambda module: {"by": 0.1, "of": module},
        lambda held: (held["by"], held["of"]),
        lambda held, by: held.update(by=by),
    ),
    "a namespace": Mixed(
        lambda module: SimpleNamespace(by=0.1, of=module),
        lambda held: (held.by, held.of),
        lambda held, by: setattr(held, "by", by),
    ),
}


@pytest.mark.parametrize("kind", MIXED)
def test_a_loss_follows_what_a_script_changes_beside_a_module(kind: str) -> None:
    local, mixed = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), MIXED[kind]
    held = mixed.hold(local[0])

    def loss_fn(output: Tensor, batch: Batch) -> Tensor:
        by, module = mixed.read(held)
        return output.mean() + by * module.get_parameter("weight").norm()

    model = whale.parallelize(local, X, device="cpu", loss_fn=loss_fn)
    for by in (0.1, 0.5, 2.0):
        mixed.change(held, by)
        assert model.train_step(X).item() == pytest.approx(loss_fn(local(X), (X,)).item())


def test_a_compiled_model_has_a_loss_fn() -> None:
    torch.manual_seed(0)
    local, y = nn.Linear(4, 4), torch.arange(4)
    compiled = torch.compile(copy.deepcopy(local), backend="eager")
    model = whale.parallelize(
        compiled, (X, y), device="cpu", loss_fn=lambda output, batch: F.cross_entropy(output, batch[1])
    )
    assert model.train_step(X, y).item() == pytest.approx(F.cross_entropy(local(X), y).item())


def with_function(kind: str, model: nn.Module) -> Callable[[nn.Module], None]:
    """Give a layer a function of which a variable has another layer; return what gives it one of a model."""
    layer, first = model.get_submodule("0"), model.get_submodule("1")
    held, named, before = [first], {"of": first}, layer.forward
    functions: dict[str, Callable[..., Any]] = {
        "a hook": lambda module, args, output: first(output),
        "a list": lambda module, args, output: held[0](output),
        "a dict": lambda module, args, output: named["of"](output),
        "a forward": lambda x: first(before(x)),
    }
    if kind == "a forward":
        layer.forward = functions[kind]
    else:
        layer.register_forward_hook(functions[kind])

    def change(other: nn.Module) -> None:
        nonlocal first
        held[0] = named["of"] = first = other

    return change


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a hook", "first, a variable of a hook of 0, had the module '1' in parallelize and has something else now"),
        ("a list", "an entry of a list, a variable of a hook of 0, had the module '1' in parallelize"),
        ("a dict", "an entry of a dict, a variable of a hook of 0, had the module '1' in parallelize"),
        ("a forward", "first, a variable of forward of 0, had the module '1' in parallelize"),
    ],
)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_variable_of_a_function_on_a_model_has_the_same_in_all_steps(kind: str, message: str, keeps: bool) -> None:
    twin = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    local = copy.deepcopy(twin)
    with_function(kind, twin)
    change = with_function(kind, local)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    model = whale.parallelize(local, x, device="cpu", loss_fn=lambda output, batch: output.square().mean())
    if not keeps:
        del local
    for layer in (model.get_submodule("1"), None):
        assert model.train_step(x).item() == pytest.approx(twin(x).square().mean().item(), rel=1e-12)
        change(layer or model.get_submodule("2"))  # the parallel model's own layer is the same one
    with pytest.raises(UsageError, match=message):
        model.train_step(x)


def appended(held: Any, model: nn.Module) -> Any:
    held.append(model.get_parameter("2.bias"))
    return held


def replaced(held: Any, model: nn.Module) -> Any:
    held[0] = model.get_parameter("2.weight")
    return held


ENTRIES: dict[str, tuple[Callable[..., Any], Callable[[Any, nn.Module], Any], str]] = {
    "an entry": (
        list,
        replaced,
        "an entry of a list, a variable of the loss, had the parameter '0.weight'",
    ),
    "one more": (list, appended, "a list, a variable of the loss, had the number of entries '4' in parallelize"),
    "a tuple": (
        tuple,
        lambda held, model: tuple(model.parameters())[1:],
        "held, a variable of the loss, had",
    ),
    "a factor": (
        lambda all_of: [(0.5, next(all_of))],
        lambda held, model: [(0.6, held[0][1])],
        "an entry of a list, a variable of the loss, had the value '0.5'",
    ),
    "the same": (tuple, lambda held, model: tuple(model.parameters()), ""),
    "the same in a list": (list, lambda held, model: held, ""),
}


def norm_of(x: Any) -> Tensor:
    return x.norm() if isinstance(x, Tensor) else x[0] * norm_of(x[1])


@pytest.mark.parametrize("kind", ENTRIES)
def test_parameters_that_a_loss_holds_are_the_same_in_all_steps(kind: str) -> None:
    local = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    hold, change, message = ENTRIES[kind]
    held = hold(local.parameters())
    model = whale.parallelize(
        local, X, device="cpu", loss_fn=lambda output, batch: output.square().mean() + sum(norm_of(x) for x in held)
    )
    assert model.train_step(X).isfinite()
    new = change(held, model)
    if kind == "a factor":
        held[:] = new
    else:
        held = new
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        assert model.train_step(X).isfinite()


def test_a_hook_holds_a_parameter() -> None:
    twin = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    local = copy.deepcopy(twin)
    for model in (twin, local):
        weight = model.get_parameter("0.weight")
        model[2].register_forward_hook(lambda module, args, output, of=weight: output * of.norm())
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    parallel = whale.parallelize(local, x, device="cpu", loss_fn=lambda output, batch: output.square().mean())
    expected = twin(x).square().mean()
    expected.backward()
    assert parallel.train_step(x).item() == pytest.approx(expected.item(), rel=1e-12)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad, p.grad)
