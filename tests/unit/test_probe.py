"""Measuring in one process: what is timed, how often, and what a step of layers is made of."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from whale import profiling
from whale.cli.model_loader import load_model
from whale.ir.profile import ModelProfile
from whale.profiling.layers import _positions
from whale.runtime import probe
from whale.runtime.failure import Failures
from whale.runtime.launch import World
from whale.strategies.layers import layered
from whale.strategies.profile import profile_model
from whale.strategies.runnable import runnable_layers

CPU = torch.device("cpu")
GPT = ("examples/models/gpt.py:gpt", {"layers": 3, "hidden": 32, "heads": 4, "seq": 8, "vocab": 64, "dropout": 0.0})


@pytest.fixture(scope="module")
def gpt() -> Any:
    torch.manual_seed(0)
    return load_model(*GPT, batch_size=6)


def test_a_measurement_takes_the_median_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    durations = iter([9.0, 0.15, *[0.1, 0.3] * 2, *[0.5] * 100])  # the first run is not counted
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])

    def run() -> None:
        now[0] += next(durations)

    measured = probe.measure(run, device=CPU, seconds=0.65)
    assert measured.seconds == pytest.approx(0.2)  # two windows of two runs, each of 0.1 s and of 0.3 s
    assert measured.spread == pytest.approx(0.0)


def test_ranks_repeat_as_often_as_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    now, runs = [0.0], [0]
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])

    def run() -> None:
        now[0] += 0.01
        runs[0] += 1

    probe.measure(run, device=CPU, seconds=0.65, agree=lambda estimate: 0.1)
    assert runs[0] == 2 + 3 * 2


def test_layers_with_data_compute_the_loss_and_the_gradients_of_the_model(gpt: Any) -> None:
    models = layered(gpt.model, gpt.batch, (6,))
    chain = models[6].chain
    layers = runnable_layers(
        models[6], gpt.model, gpt.batch, degree=1, rows=6, positions=range(len(chain.layers)), device=CPU
    )
    steps = probe.TimedLayers(layers, device=CPU, micro_batches=1, optimizer=_Keeping)
    times, update = steps.step()
    assert len(times) == len(layers) == 5 and update > 0
    assert all(min(layer[:2]) > 0 and layer[2] == 0 for layer in times)
    reference = load_model(*GPT, batch_size=6)
    reference.model.load_state_dict(gpt.model.state_dict())
    reference.model(**gpt.batch).backward()
    kept = {id(parameter): gradient for parameter, gradient in _Keeping.gradients}
    named: dict[str, torch.Tensor] = {}
    for layer, described in zip(layers, chain.layers, strict=True):
        assert layer.kind == described.kind
        named.update(zip(described.parameters, (kept[id(p)] for p in layer.parameters), strict=True))
    assert set(named) == {name for name, _ in reference.model.named_parameters()}
    for name, parameter in reference.model.named_parameters():
        torch.testing.assert_close(named[name], parameter.grad)


class _Keeping(torch.optim.SGD):
    """Keeps the gradients that it is given, and changes nothing."""

    gradients: ClassVar[list[tuple[nn.Parameter, torch.Tensor]]] = []

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        type(self).gradients = [(p, p.grad.clone()) for group in self.param_groups for p in group["params"]]


def test_a_layer_of_a_tensor_group_runs_alone(gpt: Any) -> None:
    models = layered(gpt.model, gpt.batch, (2, 3))
    layers = runnable_layers(models[3], gpt.model, gpt.batch, degree=2, rows=3, positions=[0, 1, 4], device=CPU)
    found = probe.layer_seconds(layers, device=CPU, seconds=0.0, micro_batches=2)
    assert [layer.kind for layer in layers] == [0, 1, 2]
    assert all(min(times.forward, times.first_backward, times.backward) > 0 for times in found)
    whole = sum(parameter.numel() for parameter in gpt.model.layers[0].parameters())
    assert sum(parameter.numel() for parameter in layers[1].parameters) < 0.6 * whole


def test_what_comes_before_the_memory_is_there_does_not_count(gpt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of the optimizer are made in memory that activations had, which the second step asks for again."""
    models = layered(gpt.model, gpt.batch, (2,))
    layers = runnable_layers(models[2], gpt.model, gpt.batch, degree=1, rows=2, positions=[0, 1], device=CPU)
    every = iter([9.0, 5.0])

    def step(chain: probe.TimedLayers) -> tuple[list[list[float]], float]:
        one = next(every, 1.0)
        return [[one, one, one] for _ in chain.layers], 0.0

    monkeypatch.setattr(probe.TimedLayers, "step", step)
    found = probe.layer_seconds(layers, device=CPU, seconds=0.0, micro_batches=2)
    assert [times.first_backward for times in found] == [1.0, 1.0]


def test_the_layers_of_a_model_are_measured_and_resumed(gpt: Any) -> None:
    world = World(rank=0, size=1, device=CPU, failures=Failures(0))
    places = (profiling.RankLocation(rank=0, device_type="cpu", node="here", memory_bytes=2**30),)
    start = profile_model(gpt.model, gpt.batch, tensor_degrees=(1, 2))
    calls = []

    def capture() -> Any:
        calls.append(1)
        return layered(gpt.model, gpt.batch, (1, 2))

    items = profiling.layer_items(world, places, start, capture, gpt.model, gpt.batch, rows=(1, 2))
    written: list[ModelProfile] = []
    made, left = profiling.measure_items(world, items, start, time_limit=100.0, most_seconds=0.01, write=written.append)
    assert left == 0 and len(written) == len(items) == 4 and len(calls) == 1
    for kind in made.kinds:
        assert [(t.device_type, t.tensor_degree, t.rows) for t in kind.measured] == [
            ("cpu", 1, (1, 2)),
            ("cpu", 2, (1, 2)),
        ]
        assert min(kind.measured[0].forward) > 0
    assert ModelProfile.parse(made.dumps()) == made
    assert written[1].kinds[0].measured[0].rows == (1, 2) and written[0].kinds[0].measured[0].rows == (1,)
    told: list[str] = []
    again, left = profiling.measure_items(world, items, made, time_limit=100.0, tell=told.append)
    assert (again, left, told) == (made, 0, [])


def _item(name: str, results: list[Any], put: list[Any]) -> profiling.Item:
    """A measurement with given results, one in each pass, which it puts into the profile's name."""

    def run(seconds: float) -> Any:
        put.append(name)
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return profiling.Item(
        name=name,
        ranks=(0,),
        known=lambda profile: False,
        run=run,
        merged=lambda profile, value: profile.model_copy(update={"name": f"{profile.name} {name}={value}"}),
    )


def test_in_several_passes_everything_is_measured_again_and_medians_count() -> None:
    world, ran, told = World(rank=0, size=1, device=CPU, failures=Failures(0)), list[str](), list[str]()
    items = [
        _item("a", [3.0, 1.0, 2.0], ran),
        _item("b", [RuntimeError("no memory")], ran),
        _item("c", [[1.0, [9.0]], [2.0, [7.0]], [6.0, [8.0]]], ran),
    ]
    start = ModelProfile(name="m", layers=(), kinds=())
    made, left = profiling.measure_items(world, items, start, time_limit=100.0, passes=3, tell=told.append)
    assert ran == ["a", "b", "c", "a", "c", "a", "c"]
    assert (made.name, left) == ("m a=2.0 c=[2.0, [8.0]]", 0)
    assert [message for message in told if "no memory" in message] == ["not measured: b: RuntimeError: no memory"]


def test_a_chain_that_is_too_large_for_the_memory_is_shortened(gpt: Any) -> None:
    start = profile_model(gpt.model, gpt.batch, tensor_degrees=(1,))
    assert _positions(start, 1, 1, 2**40) == [0, 1, 2, 3, 4]
    assert _positions(start, 1, 1, 1) == [0, 1, 4]


@pytest.mark.gpu
def test_a_device_is_measured_by_its_own_clock() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    small = probe.matmul_seconds(512, "float32", device=device, seconds=0.3).seconds
    assert probe.matmul_seconds(4096, "float32", device=device, seconds=0.3).seconds > 20 * small
