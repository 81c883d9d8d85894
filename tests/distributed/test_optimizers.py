"""Optimizers, schedules and clipping on two ranks: what they do is exact, or refused with what to write instead."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import LAYOUTS, SHARDED, Two, annotated, parallel, refusal
from tests.small_models import decoder, tokens
from whale.runtime.launch import World
from whale.runtime.optimizers import SAME, _trial


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


def optimize_before(world: World, kind: str, stepped: bool) -> tuple[str, list[float], list[float]]:
    """The optimizer is made from the local model, and perhaps has trained it."""
    other = parallel(kind)  # optimizers are looked at from now on
    local, model = decoder(layers=2), annotated(kind)
    expected, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (local, model))
    for one, its in ((local, expected), (model, optimizer)) if stepped else ():
        one(**tokens()).backward()
        its.step()
        its.zero_grad()
    del other
    made = whale.parallelize(model, tokens(), device="cpu")
    found: list[float] = []
    losses: list[float] = []
    for _ in range(3):
        loss = local(**tokens())
        loss.backward()
        losses.append(loss.item())
        found.append(made.train_step(**tokens()).item())
        message = refusal(optimizer.step)
        if message:
            return message, [], []
        expected.step()
        expected.zero_grad()
        optimizer.zero_grad()
    return "", found, losses


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_optimizer_of_the_local_model_trains_or_is_refused(ranks: Two, kind: str, stepped: bool) -> None:
    for message, found, expected in ranks.run(optimize_before, kind, stepped):
        if kind == "split":
            assert "make the optimizer after parallelize" in message
        else:
            assert message == ""
            assert found == pytest.approx(expected, rel=1e-12)


class LARS(torch.optim.Optimizer):
    """It scales updates by norms of whole tensors, and its step takes no closure, as in many scripts."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trust = parameter.norm() / (parameter.grad.norm() + 1e-6)
                    parameter.sub_(parameter.grad * trust * group["lr"])


def optimize_with(world: World, kind: str, name: str, options: dict[str, Any]) -> str:
    model = parallel(kind)
    parameters = [p for p in model.parameters() if p.dim() == 2] if name == "Muon" else model.parameters()
    optimizer: Any = (LARS if name == "LARS" else getattr(torch.optim, name))(parameters, lr=1e-3, **options)
    model.train_step(**tokens())
    closure = (lambda: model.train_step(**tokens())) if name == "LBFGS" else None
    return refusal(lambda: optimizer.step(closure) if closure is not None else optimizer.step())


ELEMENTWISE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("Adagrad", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adadelta", {}),
    ("Rprop", {}),
]


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE)
def test_elementwise_optimizers_are_taken(ranks: Two, name: str, options: dict[str, Any]) -> None:
    assert ranks.run(optimize_with, "split", name, options) == ["", ""]


@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize(
    ("name", "options"),
    [("Adafactor", {}), ("Muon", {}), ("LBFGS", {}), ("LBFGS", {"line_search_fn": "strong_wolfe"}), ("LARS", {})],
)
def test_optimizers_that_need_whole_tensors_are_refused(
    ranks: Two, kind: str, name: str, options: dict[str, Any]
) -> None:
    for message in ranks.run(optimize_with, kind, name, options):
        if name == "LBFGS":
            assert message.startswith("LBFGS computes the loss at points that it finds from all parameters")
        elif kind == "stages":
            assert message == ""  # a stage has whole matrices
        else:
            assert message.startswith(f"{name} updates an element by others")


def test_optimizers_of_replicas_may_need_whole_tensors(ranks: Two) -> None:
    for name in ("Adafactor", "Muon", "LBFGS"):
        assert ranks.run(optimize_with, "replicate", name, {}) == ["", ""]


def train_by_a_schedule(world: World, kind: str) -> list[float]:
    """Errors of parameters after steps of an optimizer whose `step` a scheduler has replaced."""
    local, batch = decoder(layers=2), tokens()
    module = parallel(kind)
    made = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (local, module)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5) for optimizer in made]
    for _ in range(3):
        local(**batch).backward()
        module.train_step(**batch)
        for optimizer, schedule in zip(made, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    whole = module.full_state_dict()
    return [float((whole[n] - p.detach()).abs().max()) for n, p in local.named_parameters()]


@pytest.mark.parametrize("kind", SHARDED)
def test_schedules_of_learning_rates(ranks: Two, kind: str) -> None:
    for errors in ranks.run(train_by_a_schedule, kind):
        assert max(errors) < 1e-12


def states_of_an_optimizer(world: World, kind: str) -> tuple[list[float], list[str]]:
    """Save, load and go on, in parts, from whole tensors, and by torch.distributed.checkpoint."""
    model = annotated(kind)
    local, batch = copy.deepcopy(model), tokens()
    module = whale.parallelize(model, batch, device="cpu", timeout_seconds=20)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (local, module)]

    def step() -> float:
        local(**batch).backward()
        module.train_step(**batch)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
        whole = module.full_state_dict()
        return max(float((whole[n] - p.detach()).abs().max()) for n, p in local.named_parameters())

    step()
    messages = []
    if any(len(shard.distinct()) > 1 for shard in module._whale.engine.shards.values()):
        messages.append(refusal(lambda: torch.save(pairs[1][1].state_dict(), io.BytesIO())))
        lies = copy.deepcopy(pairs[1][1].state_dict())
        for state in lies["state"].values():
            state["exp_avg"] = getattr(state["exp_avg"], "local", state["exp_avg"])
        messages.append(refusal(lambda: torch.optim.AdamW(module.parameters()).load_state_dict(lies)))
        gathered = StateDictOptions(full_state_dict=True)
        messages.append(refusal(lambda: get_optimizer_state_dict(module, pairs[1][1], options=gathered)))
        messages.append(refusal(lambda: get_model_state_dict(module, options=gathered)))
    kept = copy.deepcopy(pairs[1][1].state_dict())
    pairs[1] = module, torch.optim.AdamW(module.parameters(), lr=1.0)
    pairs[1][1].load_state_dict(kept)
    errors = [step()]

    names = {id(p): n for n, p in module.named_parameters()}
    own = [names[id(p)] for p in pairs[1][1].param_groups[0]["params"]]
    first = {n: i for i, (n, _) in enumerate(local.named_parameters())}
    whole = copy.deepcopy(pairs[0][1].state_dict())
    theirs = {i: whole["state"][first[n]] for i, n in enumerate(own) if n in first}
    pairs[1] = module, torch.optim.AdamW(module.parameters(), lr=1.0)
    pairs[1][1].load_state_dict(
        {"state": theirs, "param_groups": [{**whole["param_groups"][0], "params": list(range(len(own)))}]}
    )
    errors.append(step())

    def by_layer(lr: float) -> torch.optim.AdamW:  # a rank has no parameter of another stage's layer
        later = [p for n, p in module.named_parameters() if n.startswith("layers.1")]
        rest = [p for n, p in module.named_parameters() if not n.startswith("layers.1")]
        return torch.optim.AdamW([{"params": rest}, {"params": later}], lr=lr)

    options = StateDictOptions(flatten_optimizer_state_dict=True)  # by name, because ranks of stages have others
    with TemporaryDirectory() as folder:
        shared = [folder]
        torch.distributed.broadcast_object_list(shared)
        dcp.save({"optimizer": get_optimizer_state_dict(module, pairs[1][1], options=options)}, checkpoint_id=shared[0])
        pairs[1] = module, by_layer(1.0)
        state = {"optimizer": get_optimizer_state_dict(module, pairs[1][1], options=options)}
        dcp.load(state, checkpoint_id=shared[0])
        set_optimizer_state_dict(module, pairs[1][1], state["optimizer"], options=options)
        torch.distributed.barrier()
        if world.rank == 0:
            dcp_to_torch_save(folder, f"{folder}/whole.pt")
            known = {n: pairs[0][1].state[p]["exp_avg"] for n, p in local.named_parameters()}
            whole = torch.load(f"{folder}/whole.pt")["optimizer"]
            errors += [float((whole[f"state.{n}.exp_avg"] - x).abs().max()) for n, x in known.items()]
    errors.append(step())
    return errors, messages


@pytest.mark.parametrize("kind", LAYOUTS)
def test_states_of_optimizers_are_saved_and_loaded(ranks: Two, kind: str) -> None:
    for errors, messages in ranks.run(states_of_an_optimizer, kind):
        assert max(errors) < 1e-10, errors  # AdamW divides by roots of gradients, some of which are tiny
        if messages:
            assert "torch.save would write it as if it were the model's" in messages[0]
            assert "which is neither whole" in messages[1] and "nor this rank's part" in messages[1]
            assert all("full_state_dict=True) does not gather the parts" in text for text in messages[2:])


def clip(world: World, kind: str, norm_type: float) -> list[tuple[float, float]]:
    model, local = parallel(kind), decoder(layers=2)
    model.train_step(**tokens())
    local(**tokens()).backward()
    totals = [
        torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None], norm_type).item()
        for module in (model, local)
    ]
    found = [(totals[0], totals[1])]
    for own, norm in ((["layers.0", "layers.1"], 1e9), ([""], 0.1), ([""], 0.05)):
        norms = [
            torch.nn.utils.clip_grad_norm_(
                [p for n, p in module.named_parameters() if n.startswith(tuple(own))], norm, norm_type
            )
            for module in (model, local)
        ]
        found.append((norms[0].item(), norms[1].item()))
    whole = model.full_gradients()
    found += [(whole[n].norm().item(), p.grad.norm().item()) for n, p in local.named_parameters() if p.grad is not None]
    return found


def clip_each(world: World, kind: str) -> tuple[float, str]:
    model, local = parallel(kind), decoder(layers=2)
    model.train_step(**tokens())
    local(**tokens()).backward()

    def clip_all(module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            torch.nn.utils.clip_grad_norm_(parameter, 0.01)

    refused = refusal(lambda: clip_all(model))
    clip_all(local)
    whole = model.full_gradients()
    return max(
        float((whole[n] - p.grad).abs().max()) for n, p in local.named_parameters() if p.grad is not None
    ), refused


@pytest.mark.parametrize("kind", LAYOUTS)
def test_clipping_each_parameter_is_exact_where_ranks_have_the_same(ranks: Two, kind: str) -> None:
    for error, refused in ranks.run(clip_each, kind):
        if kind == "stages":
            assert "and another parameter on another rank, where ranks have others" in refused
        else:
            assert refused == ""
            assert error < 1e-12


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_torch_clips_by_the_norm_of_all_ranks(ranks: Two, kind: str, norm_type: float) -> None:
    for pairs in ranks.run(clip, kind, norm_type):
        for found, expected in pairs:
            assert found == pytest.approx(expected, rel=1e-9)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def train_channels_last(world: World, kind: str, options: dict[str, Any]) -> float:
    """The error of parameters whose memory is not in the order of their dims, after steps of a fused optimizer."""
    torch.manual_seed(0)
    model: nn.Module = Images().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 4, 5, 5, dtype=torch.float64)
    local = copy.deepcopy(model)
    made: Any = whale.parallelize(annotated(kind, model), x, device="cpu", **options)
    both = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (made, local)]
    for _ in range(3):
        made.train_step(x)
        local(x).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    whole = made.full_state_dict()
    return max(float((whole[n] - p).abs().max()) for n, p in local.named_parameters())


@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}, {"zero": 1}], ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_gradients_lie_in_memory_as_their_parameters(ranks: Two, kind: str, options: dict[str, Any]) -> None:
    assert max(ranks.run(train_channels_last, kind, options)) < 1e-12


class Spectral(nn.Module):
    """A complex parameter is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.complex128))
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fft.irfft(torch.fft.rfft(x) * self.phases, n=8)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def clip_complex(world: World, kind: str) -> float:
    torch.manual_seed(0)
    model, x = Spectral(), torch.linspace(-2, 2, 32, dtype=torch.float64).view(4, 8)
    local = copy.deepcopy(model)
    made: Any = whale.parallelize(annotated(kind, model), x, device="cpu")
    made.train_step(x)
    local(x).backward()
    found, expected = (torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (made, local))
    assert found.dtype == expected.dtype
    whole = made.full_gradients()
    return max(
        float((found - expected).abs()), *(float((whole[n] - p.grad).abs().max()) for n, p in local.named_parameters())
    )


@pytest.mark.parametrize("kind", LAYOUTS)
def test_complex_gradients_are_clipped_as_by_torch(ranks: Two, kind: str) -> None:
    assert max(ranks.run(clip_complex, kind)) < 1e-12


def clip_one_of_two(world: World, kind: str) -> tuple[list[tuple[float, float]], list[str]]:
    """Norms of modules of two models that are alive, and refusals of gradients of both."""
    models, locals_ = [parallel(kind) for _ in range(2)], [decoder(layers=2) for _ in range(2)]
    for scale, model, local in zip((1.0, 3.0), models, locals_, strict=True):
        model.train_step(**tokens(), scale=scale)
        (scale * local(**tokens())).backward()
    norms = []
    for place in (1, 0, 1):
        for path in ("layers.0", "layers.1", ""):
            both = [list(each[place].get_submodule(path).parameters()) for each in (models, locals_)]
            found, expected = (torch.nn.utils.clip_grad_norm_(parameters, 0.1) for parameters in both)
            norms.append((found.item(), expected.item()))
    norms.append((torch.nn.utils.clip_grad_norm_([], 1.0).item(), 0.0))
    whole = models[1].full_gradients()
    norms += [
        (whole[n].norm().item(), p.grad.norm().item()) for n, p in locals_[1].named_parameters() if p.grad is not None
    ]
    others = models[world.rank].layers[world.rank].parameters()  # of a stage of this rank
    together = refusal(lambda: torch.nn.utils.clip_grad_norm_([p for model in models for p in model.parameters()], 1.0))
    apart = refusal(lambda: torch.nn.utils.clip_grad_norm_(others, 1.0)) if kind == "stages" else ""
    return norms, [together, apart]


def clip_nothing_after_a_pipeline(world: World) -> float:
    """Clip an empty list when a pipeline is gone that one rank has not collected yet."""
    holder: list[Any] = [parallel("stages")]
    gc.collect()
    gc.disable()
    try:
        holder.append(holder)
        del holder
        if world.rank == 1:
            gc.collect()
        return torch.nn.utils.clip_grad_norm_([], 1.0).item()
    finally:
        gc.enable()


def test_nothing_is_clipped_after_a_pipeline_that_one_rank_has_not_collected(ranks: Two) -> None:
    assert ranks.run(clip_nothing_after_a_pipeline) == [0.0, 0.0]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_one_of_two_models_is_clipped(ranks: Two, kind: str) -> None:
    for pairs, (together, apart) in ranks.run(clip_one_of_two, kind):
        for found, expected in pairs:
            assert found == pytest.approx(expected, rel=1e-9)
        if kind != "replicate":
            assert "gradients of a parallel model together with others" in together
        if kind == "stages":
            assert "of one parallel model on a rank, and of another on another rank" in apart


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounding_in_few_digits_is_not_taken_for_an_update_by_other_elements(momentum: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(6, 6, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=momentum)
    for dim in (0, 1, None):
        assert _trial(optimizer, 0, (6, 6), parameter, dim) < SAME
