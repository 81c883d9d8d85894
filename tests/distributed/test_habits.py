"""Habits of scripts for one GPU, on two ranks: what they do is exact, or refused with what to write instead."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import LAYOUTS, Two, annotated, parallel, refusal
from tests.largest import largest
from tests.small_models import decoder, tokens
from whale.planner.catalog import device_types
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


# --- values at the start ----------------------------------------------------------------------------------------------


def start_with_another_element(world: World) -> str:
    model = annotated("replicate")
    if world.rank:
        with torch.no_grad():
            model.get_parameter("layers.1.up.weight")[3, 5] += 0.01
    return refusal(lambda: whale.parallelize(model, tokens(), device="cpu"))


def test_parameters_that_differ_in_one_element_are_refused(ranks: Two) -> None:
    for message in ranks.run(start_with_another_element):
        assert "rank 1 has other values in layers.1.up.weight than rank 0" in message
        assert "sync_module_states=True" in message


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.body(x)).square().sum()
        return found


def start_with_other_statistics(world: World) -> str:
    torch.manual_seed(0)
    model = Normed()
    model.get_buffer("norm.num_batches_tracked").fill_(10**9 + world.rank)
    return refusal(lambda: whale.parallelize(model, torch.zeros(4, 4), device="cpu"))


def test_buffers_that_differ_are_refused(ranks: Two) -> None:
    for message in ranks.run(start_with_other_statistics):
        assert "rank 1 has other values in norm.num_batches_tracked" in message


def start_from_rank_0(world: World) -> list[torch.Tensor]:
    torch.manual_seed(world.rank)
    model = annotated("split", nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    made = whale.parallelize(
        model,
        torch.zeros(4, 4),
        loss_fn=lambda output, batch: output.square().sum(),
        device="cpu",
        sync_module_states=True,
    )
    return [*made.full_state_dict().values()]


def test_all_ranks_take_the_values_of_rank_0_on_request(ranks: Two) -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).state_dict().values()
    for found in ranks.run(start_from_rank_0):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- hosts ------------------------------------------------------------------------------------------------------------


HOSTS = """
links.inter_node = {bandwidth = "10 Gbit/s", latency = "30 us"}
nodes = [
  {devices = 1, device = "V100-SXM2-32GB", hosts = ["fast"]},
  {devices = 1, device = "P100-PCIe-16GB", hosts = ["slow"]},
]
"""


def join_in_another_order(world: World, hosts: list[str], plan: bool) -> tuple[str, Any]:
    """This rank's rows of a batch of 8, or the refusal, on a host of that name."""
    cluster = whale.Cluster.parse(HOSTS, catalog=device_types())
    planned = whale.Plan.parse('{"world_size": 2, "annotations": {"": "replicate()"}}') if plan else None
    found: list[Any] = []

    def make() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("socket.gethostname", lambda: hosts[world.rank])
            model = decoder(layers=2) if plan else annotated("replicate")
            made = whale.parallelize(model, tokens(), cluster=cluster, plan=planned, device="cpu", timeout_seconds=20)
            found.append(made.batch_share(8))

    return refusal(make), found


def test_ranks_have_the_devices_of_their_hosts(ranks: Two) -> None:
    order = ranks.run(join_in_another_order, ["fast", "slow"], False)
    assert [found for _, (found,) in order] == [((0, 5),), ((5, 8),)]
    other = ranks.run(join_in_another_order, ["slow.lab", "fast.lab"], False)
    assert [found for _, (found,) in other] == [((0, 3),), ((3, 8),)]


def test_ranks_on_other_hosts_than_the_file_s_are_refused(ranks: Two) -> None:
    for message, _ in ranks.run(join_in_another_order, ["fast", "other"], False):
        assert "node1 on host slow needs 1 ranks, but 0 run there" in message
    for message, _ in ranks.run(join_in_another_order, ["slow", "fast"], True):
        assert "the plan's ranks [0] are for host fast, but host slow has them" in message


# --- batches ----------------------------------------------------------------------------------------------------------


def bring_other_rows(world: World, kind: str) -> tuple[str, str]:
    model = parallel(kind)
    batch = {name: x.roll(world.rank, 0) for name, x in tokens().items()}
    return refusal(lambda: model.train_step(**batch)), refusal(lambda: model.eval_step(**batch))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_batches_of_other_values_are_refused(ranks: Two, kind: str) -> None:
    for messages in ranks.run(bring_other_rows, kind):
        for message in messages:
            assert "with other values" in message
            assert "without a DistributedSampler, and shuffled by one seed" in message


def bring_rounded_values(world: World) -> float:
    torch.manual_seed(0)
    model = annotated("replicate", nn.Sequential(nn.Linear(4, 8)))
    made = whale.parallelize(
        model, torch.zeros(4, 4), loss_fn=lambda output, batch: output.square().sum(), device="cpu"
    )
    return made.train_step(torch.ones(4, 4) * (1 + world.rank * 1e-7)).item()


def test_values_that_another_processor_rounds_differently_are_taken(ranks: Two) -> None:
    assert len(ranks.run(bring_rounded_values)) == 2


# --- random numbers ---------------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(4, 32), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.drop(self.up(x)).square().mean()
        return found


def resume(world: World) -> tuple[list[float], list[float], str]:
    def made() -> Any:
        torch.manual_seed(0)
        model = annotated_as({"": whale.split()}, Dropped())
        torch.manual_seed(world.rank)  # as scripts do before they augment data
        return whale.parallelize(model, torch.ones(4, 4), device="cpu")

    one, other = made(), made()
    state = None
    losses = []
    for step in range(4):
        if step == 2:
            state = one.get_rng_state()
        losses.append(one.train_step(torch.ones(4, 4)).item())
    other.set_rng_state(state)
    again = [other.train_step(torch.ones(4, 4)).item() for _ in range(2)]
    return losses, again, refusal(lambda: one.set_rng_state(torch.get_rng_state()))


def annotated_as(layout: dict[str, Any], model: nn.Module) -> nn.Module:
    whale.annotate(model, layout)
    return model


def test_dropout_goes_on_from_a_checkpoint(ranks: Two) -> None:
    (losses, again, message), other = ranks.run(resume)
    assert (losses, again, message) == other
    assert len(set(losses)) == 4
    assert losses[2:] == again
    assert "the state is not what get_rng_state" in message


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU()])
def test_one_rank_goes_on_from_a_checkpoint(layer: nn.Module) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), layer)
        return whale.parallelize(model, torch.ones(4, 4), device="cpu", loss_fn=lambda output, _: output.sum())

    one = made()
    one.train_step(torch.ones(4, 4))
    state = one.get_rng_state()
    losses = [one.train_step(torch.ones(4, 4)).item() for _ in range(2)]
    other = made()
    other.set_rng_state(state)
    assert [other.train_step(torch.ones(4, 4)).item() for _ in range(2)] == losses
    assert losses[0] != losses[1]


def seeded(world: World, seed: int) -> float:
    torch.manual_seed(0)
    model = annotated_as({"": whale.split()}, Dropped())
    torch.manual_seed(seed)
    return whale.parallelize(model, torch.ones(4, 4), device="cpu").train_step(torch.ones(4, 4)).item()


def test_the_default_seed_of_dropout_is_torch_s(ranks: Two) -> None:
    one, same, other = (ranks.run(seeded, seed)[0] for seed in (1, 1, 2))
    assert one == same
    assert one != other


# --- calls ------------------------------------------------------------------------------------------------------------


def go_backward(world: World) -> list[str]:
    model = parallel("replicate")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = refusal(lambda: model.train_step(**tokens()))
    scaler = torch.amp.GradScaler("cpu")
    backward = [
        refusal(lambda: model.train_step(**tokens()).backward()),
        refusal(lambda: (model.train_step(**tokens()) / 4).backward()),
        refusal(lambda: model.train_step(**tokens()).div_(4).backward()),
        refusal(lambda: scaler.scale(model.train_step(**tokens())).backward()),
        refusal(lambda: sum(model.train_step(**tokens()) for _ in range(2)).backward()),
        refusal(lambda: torch.autograd.grad(model.train_step(**tokens()), list(model.parameters()))),
    ]
    with torch.no_grad():
        without = refusal(lambda: model.train_step(**tokens()))
    return [around, without, *backward]


def test_words_for_what_a_step_has_done(ranks: Two) -> None:
    for around, without, *backward in ranks.run(go_backward):
        assert all("train_step has done the backward already" in text for text in backward)
        assert "a step stands under torch.autocast with bfloat16, but the model was made without a precision" in around
        assert 'write parallelize(..., precision="bf16"), and leave torch.autocast out' in around
        assert "gradients, but they are off here (torch.no_grad or torch.inference_mode)" in without


def parallelize_twice(world: World, kind: str) -> float:
    model = annotated(kind)
    local = copy.deepcopy(model)
    worst = 0.0
    made = [whale.parallelize(model, tokens(), device="cpu", timeout_seconds=20) for _ in range(2)]
    for length in (6, 7, 8):
        for one in made:
            loss = one.train_step(**tokens(length=length))
            worst = largest(worst, abs(loss.item() - local(**tokens(length=length)).item()))
    local.zero_grad()
    made[0].zero_grad()
    local(**tokens()).backward()
    made[0].train_step(**tokens())
    found = made[0].full_gradients()
    for name, parameter in local.named_parameters():
        assert parameter.grad is not None
        worst = largest(worst, float((found[name] - parameter.grad).abs().max()))
    return worst


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_model_is_parallelized_again(ranks: Two, kind: str) -> None:
    assert max(ranks.run(parallelize_twice, kind)) < 1e-12


def parallelize_often(world: World, kind: str) -> list[int]:
    """Threads after each of several models in turn; ranks collect them at other times."""
    gc.disable()
    try:
        found = []
        for turn in range(5):
            model = parallel(kind)
            model.train_step(**tokens())
            del model
            if turn % 2 == world.rank or turn >= 3:
                gc.collect()
            found.append(len(os.listdir("/proc/self/task")))
        return found
    finally:
        gc.enable()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads where Linux lists them")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_groups_of_models_that_are_gone_are_destroyed(ranks: Two, kind: str) -> None:
    for threads in ranks.run(parallelize_often, kind):
        assert threads[-1] <= threads[0]


class Ruled(nn.Module):
    """Its forward has an operator without an axis rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.renorm(self.up(x), 2, 0, 1.0)).square().sum()
        return found


class Untried(torch.optim.SGD):
    """It raises an exception where it is tried on the tensors of one rank."""

    refusing = False

    def step(self, closure: Any = None) -> Any:
        if self.refusing and len(self.param_groups[0]["params"]) < 3:
            raise ValueError("no trial")
        return super().step(closure)


def hear_warnings(world: World) -> list[tuple[str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model: Any = whale.parallelize(annotated_as({"": whale.split()}, Ruled()), torch.ones(4, 4), device="cpu")
        for rows in (4, 3, 2):
            model.train_step(torch.ones(rows, 4))
        optimizer = Untried(model.parameters(), lr=0.1)
        Untried.refusing = world.rank == 1
        optimizer.step()
        Untried.refusing = False
    return [(Path(one.filename).name, str(one.message)) for one in caught]


def test_a_warning_comes_once_from_rank_0_or_from_the_rank_that_alone_has_it(ranks: Two) -> None:
    (rule, *rest), others = ranks.run(hear_warnings)
    assert rule[0] == "test_habits.py"
    assert rule[1].startswith("no axis rule for aten.renorm.default: computed whole")
    assert rest == []
    ((file, trial),) = others
    assert file == "test_habits.py"
    assert trial.startswith("rank 1: Untried could not be tried on tensors of shape")


# --- what modules keep and are ----------------------------------------------------------------------------------------


class Average(nn.Module):
    """It replaces a buffer, and counts in another; `late` changes one in the second stage that the first reads."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = late
        self.mean: torch.Tensor
        self.count: torch.Tensor
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(4 if late else 16))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = self.a(x) + (self.mean.sum() if self.late else 0)
        out = self.b(hidden if self.late else hidden + self.mean)
        seen = out if self.late else hidden
        self.mean = self.mean * 0.9 + seen.detach().mean(0) * 0.1
        return nn.functional.cross_entropy(out * self.count, y)


class Stem(nn.Module):
    """A module with buffers under two names, and one of these as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16).double()
        self.a, self.b = nn.Sequential(nn.Linear(8, 16), self.norm), nn.Linear(16, 4)
        self.mean = self.norm.running_mean

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.b(self.a(x)), y)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.b(self.a(x[:, None].expand(-1, 3, -1))[0][:, -1]), y)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex128))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.b(torch.fft.irfft(torch.fft.rfft(self.a(x)) * self.filter, n=16)), y)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "buffers": Average,
    "a late buffer": lambda: Average(late=True),
    "a stem": Stem,
    "a recurrent layer": Recurrent,
    "a complex parameter": Spectral,
}
PARTS: dict[str, dict[str, Any]] = {
    "replicate": {"": whale.replicate()},
    "split": {"": whale.split()},
    "stages": {"a": whale.stage(), "b": whale.stage()},
}


def train_a_kind(world: World, kind: str, layout: str) -> tuple[str, float, int]:
    """The refusal; else the largest error of losses, gradients, parameters and buffers in three steps by two
    optimizers, and how many steps were compiled."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randint(4, (8,))
    local: Any = KINDS[kind]()
    local.a.double()
    local.b.double()
    if isinstance(local, Average):
        local.mean = local.mean.double()
    model = copy.deepcopy(local)
    whale.annotate(model, PARTS[layout])
    made: list[Any] = []
    batch = {"x": x, "y": y}
    message = refusal(lambda: made.append(whale.parallelize(model, batch, device="cpu", timeout_seconds=20)))
    if message:
        return message, 0.0, 0
    errors = []
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for each in (local, made[0]) for part in (each.a, each.b)]
    for _ in range(3):
        loss = local(**batch)
        loss.backward()
        errors.append((made[0].train_step(**batch) - loss).abs().item())
        found = made[0].full_gradients()
        errors += [float((found[n] - p.grad).abs().max()) for n, p in local.named_parameters() if p.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
        local.zero_grad()
        made[0].zero_grad()
    whole = made[0].full_state_dict()
    errors += [float((whole[n] - x).abs().max()) for n, x in local.state_dict().items()]
    return "", max(errors), len(made[0]._whale.engine.steps)


@pytest.mark.parametrize("layout", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_modules_keep_is_kept(ranks: Two, kind: str, layout: str) -> None:
    for message, error, num_steps in ranks.run(train_a_kind, kind, layout):
        if (kind, layout) == ("a late buffer", "stages"):
            assert "stage 1 changes the buffer mean, and stage 0 reads it" in message
        else:
            assert (message, num_steps) == ("", 1)
            assert error < 1e-12


def verify_a_penalty(world: World, layout: str, options: dict[str, Any], held: bool) -> bool:
    """Whether a step equals the local one where the loss reads the model's parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(a=nn.Linear(16, 8), b=nn.Linear(8, 4))).double()
    whale.annotate(model, PARTS[layout])
    parameters = list(model.parameters()) if held else None

    def loss_fn(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean() + 0.1 * sum(p.abs().sum() for p in parameters or model.parameters())

    return whale.verify(model, torch.randn(8, 16, dtype=torch.float64), loss_fn=loss_fn, device="cpu", **options).passed


@pytest.mark.parametrize("options", [{}, {"zero": 3}, {"micro_batches": 2}], ids=str)
@pytest.mark.parametrize("layout", PARTS)
@pytest.mark.parametrize("held", [False, True], ids=["of the model", "held"])
def test_a_loss_reads_the_parameters_of_the_model(ranks: Two, layout: str, options: dict[str, Any], held: bool) -> None:
    assert all(ranks.run(verify_a_penalty, layout, options, held))


def refuse_kinds(world: World) -> list[str]:
    x = torch.ones(4, 4)
    with pytest.warns() as _:
        traced = torch.jit.trace(nn.Linear(4, 4), x)

    def parallelize(inner: nn.Module) -> str:
        def squares(output: torch.Tensor, batch: Any) -> torch.Tensor:
            return output.square().mean()

        return refusal(lambda: whale.parallelize(nn.Sequential(inner), x, loss_fn=squares, device="cpu"))

    return [parallelize(inner) for inner in (traced, nn.LazyLinear(4))]


def test_modules_that_are_not_captured_are_refused_by_name(ranks: Two) -> None:
    for scripted, lazy in ranks.run(refuse_kinds):
        assert "0 is compiled by torch.jit" in scripted
        assert "0 has no weight yet: run a batch through the model before parallelize" in lazy


# --- the local model after parallelize --------------------------------------------------------------------------------


def write_into_the_local_model(world: World, kind: str) -> dict[str, str]:
    """Refusals of a script that goes on with the local model."""
    found: dict[str, str] = {}

    def after(name: str, change: Callable[[nn.Module, Any], object], steps: int = 1, kept: str = "") -> None:
        local = annotated(kind)
        model = whale.parallelize(local, tokens(), device="cpu", timeout_seconds=20)
        part = local.get_submodule(kept)
        del local  # as where the script gives its name to another one
        for _ in range(steps):
            model.train_step(**tokens())
        change(part, model)
        found[name] = refusal(lambda: model.train_step(**tokens()))

    after("state", lambda local, model: local.load_state_dict(decoder(layers=2).state_dict()))
    after("data", lambda local, model: [p.data.mul_(2.0) for p in local.parameters()], steps=0)
    other = decoder(layers=2).layers
    after("state of a part", lambda layers, model: layers.load_state_dict(other.state_dict()), kept="layers")
    after("data of a part", lambda head, model: [p.data.mul_(2.0) for p in head.parameters()], steps=0, kept="head")
    after("freeze", lambda local, model: local.get_submodule("layers.0").requires_grad_(False))
    after("move", lambda local, model: local.to("cpu"))
    after("cast", lambda local, model: local.to(torch.bfloat16))

    def generate(local: nn.Module, model: Any) -> None:
        local.load_state_dict(model.full_state_dict())
        local.eval()

    after("generate", generate)
    return found


@pytest.mark.parametrize("kind", LAYOUTS)
def test_changes_of_the_local_model_s_tensors_act_or_are_refused(ranks: Two, kind: str) -> None:
    for found in ranks.run(write_into_the_local_model, kind):
        assert not found["move"]
        assert found["cast"]
        if kind == "replicate":  # the tensors are those of both
            assert not found["state"] + found["data"] + found["freeze"] + found["state of a part"]
            assert "eval() was called of the local model after parallelize" in found["generate"]
        else:
            assert not found["generate"]
            assert "of the local model after parallelize" in found["state"]
            assert "model.load_full_state_dict(state)" in found["state"]
            assert "of the local model after parallelize" in found["data"]
            assert "values were written into layers." in found["state of a part"]
            assert "values were written into head.weight" in found["data of a part"]
            assert "after parallelize" in found["freeze"]


# --- what one rank does alone -----------------------------------------------------------------------------------------


def act_on_rank_1(world: World, kind: str, batch: str) -> dict[str, str]:
    """Refusals of the step after something that one rank does alone."""
    found: dict[str, str] = {}
    share = {name: x[world.rank * 2 :][:2] for name, x in tokens(4).items()} if batch == "local" else tokens(4)

    def alone(name: str, act: Callable[[Any, Any], object], then: Callable[[Any], object] | None = None) -> None:
        model = whale.parallelize(annotated(kind), tokens(4), device="cpu", timeout_seconds=20, batch=batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.train_step(**share)

        def go_on() -> None:
            if world.rank:
                act(model, optimizer)
            optimizer.step()
            (then or train if world.rank else train)(model)

        found[name] = refusal(go_on)

    def train(model: Any) -> object:
        return model.train_step(**share)

    clip = torch.nn.utils.clip_grad_norm_
    if kind == "replicate":
        alone("clip", lambda model, optimizer: clip(model.parameters(), 1.0))
        alone("clip by value", lambda model, _: torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=1e-3))
        alone("rate", lambda model, optimizer: optimizer.param_groups[0].update(lr=0.05))
        alone("factor", lambda model, _: [x.data.mul_(1.01) for x in model.parameters()])
        alone("element", lambda model, _: model.head.bias.data[0].add_(0.1))
        alone("log", lambda model, _: torch.nn.utils.get_total_norm([x.grad for x in model.parameters()]))
    alone("norm", lambda model, _: model.clip_grad_norm_(1.0))
    alone("largest", lambda model, _: clip(model.parameters(), 1.0, float("inf")) and model.clip_grad_norm_(1.0))
    alone("evaluate", lambda *_: None, lambda model: model.eval_step(**share))
    alone("scale", lambda *_: None, lambda model: model.train_step(**share, scale=0.5))
    alone("attribute", lambda model, _: setattr(model.layers[0], "heads", 2))
    return found


@pytest.mark.parametrize(("kind", "batch"), [("replicate", "global"), ("replicate", "local"), ("split", "global")])
def test_what_one_rank_does_alone_is_refused_on_all(ranks: Two, kind: str, batch: str) -> None:
    for found in ranks.run(act_on_rank_1, kind, batch):
        words = {
            "evaluate": ("for train_step", "for eval_step"),
            "scale": ("for train_step", "for train_step(scale=0.5)"),
            "attribute": ("for train_step", "with layers.0.heads=2"),
            "norm": ("for train_step", "the norm of gradients, as of clip_grad_norm_"),
            "largest": ("for train_step", "the norm of gradients, as of clip_grad_norm_"),
        }
        if kind == "replicate":
            assert found["log"] == ""
            assert all(
                "parameters that all ranks have differ on rank 1" in found[name] for name in ("factor", "element")
            )
            words |= {
                "clip": ("for train_step", "after clip_grads_with_norm_(1)"),
                "clip by value": ("for train_step", "after clip_grad_value_(0.001)"),
                "rate": ("parameters that all ranks have differ on rank 1", "must be done on all ranks alike"),
            }
        for name, parts in words.items():
            assert all(part in found[name] for part in parts), (name, found[name])
            assert "rank 0" in found[name] and "rank 1" in found[name]
