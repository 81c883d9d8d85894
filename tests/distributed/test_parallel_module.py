"""The parallel model as a module, on two ranks: it is the local one, and its states say what they are."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel

import whale
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import LAYOUTS, SHARDED, Two, annotated, parallel, refusal
from tests.largest import largest
from tests.small_models import decoder, tokens
from whale.api import ParallelModule
from whale.compile import builder
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


# --- the module is the local one --------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 8}
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def words(self) -> int:
        return self.head.out_features


TIED_LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"": whale.replicate()},
    "split": {"": whale.split()},
    "stages": {"blocks.0": whale.stage(), "blocks.1": whale.stage()},
}


def tied(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Tied().double()
    whale.annotate(model, TIED_LAYOUTS[kind])
    return whale.parallelize(model, tokens(), device="cpu", timeout_seconds=20, **options)


def see_modules(world: World, kind: str) -> list[str]:
    model, local = tied(kind), Tied()
    wrong = []
    if not isinstance(model, Tied) or not isinstance(model, ParallelModule):
        wrong.append("class")
    if [type(m) for m in list(model.modules())[1:]] != [type(m) for m in list(local.modules())[1:]]:
        wrong.append("modules")
    if [n for n, _ in model.named_modules()] != [n for n, _ in local.named_modules()]:
        wrong.append("names of modules")
    if model.config != local.config or model.words() != 32 or not isinstance(model.blocks[0][1], nn.Linear):
        wrong.append("attributes")
    if model.head.weight is not model.embed.weight:
        wrong.append("ties")
    if not {n for n, _ in model.named_parameters()} <= {n for n, _ in local.named_parameters()}:
        wrong.append("names of parameters")
    if not set(model.state_dict()) <= set(local.state_dict()) or set(model.full_state_dict()) != set(
        local.state_dict()
    ):
        wrong.append("names of states")
    parameters = list(inspect.signature(model.forward).parameters)
    return wrong if parameters == ["tokens", "labels"] else [*wrong, "signature"]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_modules_are_those_of_the_local_model(ranks: Two, kind: str) -> None:
    for wrong in ranks.run(see_modules, kind):
        assert wrong == []


def see_empty(world: World) -> tuple[bool, ...]:
    """Whether each rank has a parameter without elements, that nothing reads, in its whole states."""
    model = Tied().double()
    model.spare = nn.Parameter(torch.zeros(0, 3))
    whale.annotate(model, TIED_LAYOUTS["stages"])
    made = whale.parallelize(model, tokens(), device="cpu", timeout_seconds=20)
    state = made.full_state_dict()
    return tuple(one.get("spare", torch.ones(1)).shape == (0, 3) for one in (state, made.full_gradients()))


def test_a_parameter_without_elements_is_in_the_states_of_all_stages(ranks: Two) -> None:
    assert ranks.run(see_empty) == [(True, False)] * 2


def change(model: Any, what: str) -> None:
    name, held = next((n, p) for n, p in model.named_parameters() if p.dim() == 2)
    parent = model.get_submodule(name.rpartition(".")[0])
    if what == "replaced":
        parent.weight = nn.Parameter(held.detach().clone())
    elif what == "frozen":
        held.requires_grad_(False)
    elif what == "cast":
        parent.half()
    elif what == "hook":
        parent.register_forward_hook(lambda *_: None)
    elif what == "gradient hook":
        held.register_hook(lambda gradient: gradient.clamp(-1, 1))
    elif what == "optimizer in backward":
        held.register_post_accumulate_grad_hook(lambda parameter: None)
    elif what == "module":
        parent.adapter = nn.Linear(2, 2)
    elif what == "class":
        parent.__class__ = nn.modules.linear.NonDynamicallyQuantizableLinear


CHANGES = {
    "replaced": "was replaced after parallelize",
    "frozen": "was frozen after parallelize",
    "cast": "is torch.float16 on cpu after parallelize",
    "hook": "a hook was added to",
    "gradient hook": "a hook was added to",
    "optimizer in backward": "a hook was added to",
    "module": "adapter was added after parallelize",
    "class": "and is of NonDynamicallyQuantizableLinear after parallelize",
}


def change_and_step(world: World, what: str) -> str:
    model = parallel("stages" if what == "frozen" else "split")
    model.train_step(**tokens())
    change(model, what)
    return refusal(lambda: model.train_step(**tokens()))


@pytest.mark.parametrize("what", CHANGES)
def test_changes_that_steps_do_not_see_are_refused(ranks: Two, what: str) -> None:
    for message in ranks.run(change_and_step, what):
        assert CHANGES[what] in message
        assert message.endswith("before parallelize")


def freeze_and_thaw(world: World, kind: str, is_frozen_first: bool) -> tuple[float, int, list[str]]:
    model: Any = annotated(kind, decoder(layers=2))
    model.layers[0].requires_grad_(not is_frozen_first)
    local = copy.deepcopy(model)
    made: Any = whale.parallelize(model, tokens(), device="cpu", timeout_seconds=20)
    optimizers = [torch.optim.SGD(one.parameters(), 0.05, momentum=0.9) for one in (local, made)]
    errors = []
    with patch.object(builder, "compile_traced", wraps=builder.compile_traced) as compiling:
        for trains in [None, False, True, False, True, True]:
            for one in (local, made):
                if trains is not None:
                    one.layers[0].requires_grad_(trains)
                    one.head.weight.requires_grad_(not trains)
                one.zero_grad()
            expected = local(**tokens())
            expected.backward()
            errors.append(float((made.train_step(**tokens()) - expected).detach().abs()))
            for optimizer in optimizers:
                optimizer.step()
        num_compiled = compiling.call_count
    state = made.full_state_dict()
    errors += [float((state[name] - value).abs().max()) for name, value in local.state_dict().items()]
    made.requires_grad_(False)
    without = sorted(name for name, p in local.named_parameters() if p.grad is None)
    assert without == sorted(name for name, p in made.named_parameters() if p.grad is None)
    return max(errors), num_compiled, [refusal(lambda: made.train_step(**tokens()))]


@pytest.mark.parametrize("is_frozen_first", [False, True])
@pytest.mark.parametrize("kind", ["replicate", "split"])
def test_what_every_rank_has_can_be_frozen_and_unfrozen(ranks: Two, kind: str, is_frozen_first: bool) -> None:
    for error, num_compiled, refused in ranks.run(freeze_and_thaw, kind, is_frozen_first):
        assert error < 1e-12
        assert num_compiled == (1 if is_frozen_first else 2)
        assert "depends on no parameter that requires a gradient" in refused[0]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 8)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 6)})
        self.late = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        y: torch.Tensor = self.heads["b" if task == "b" else "a"](self.body(x).relu())
        return (self.late(y) if task == "late" else y).square().sum()


def switch_heads(world: World, layout: dict[str, Any]) -> tuple[float, str]:
    model, x = Heads().double(), torch.linspace(-1, 1, 16).view(4, 4).double()
    local = copy.deepcopy(model)
    whale.annotate(model, layout)
    made = whale.parallelize(model, {"x": x, "task": "a"}, device="cpu", timeout_seconds=20)
    optimizers = [torch.optim.SGD(one.parameters(), 0.01) for one in (local, made)]
    for task in "abba":
        for optimizer in optimizers:
            optimizer.zero_grad()
        local(x, task).backward()
        made.train_step(x=x, task=task)
        for optimizer in optimizers:
            optimizer.step()
    state = made.full_state_dict()
    worst = largest(*(float((state[name] - value).abs().max()) for name, value in local.state_dict().items()))
    return worst, refusal(lambda: made.train_step(x=x, task="late"))


@pytest.mark.parametrize(
    "layout",
    [
        {"": whale.replicate()},
        {"": whale.split()},
        {"body": whale.stage(), "heads": whale.stage()},
        {"body": whale.replicate(), "heads.b": whale.split()},
    ],
    ids=["replicate", "split", "stages", "split head"],
)
def test_a_head_that_the_first_batch_does_not_read_trains(ranks: Two, layout: dict[str, Any]) -> None:
    for worst, message in ranks.run(switch_heads, layout):
        assert worst < 1e-12
        if "heads" in layout:
            assert "the batch's step needs late.weight on ranks [1], but it lies on ranks [0]" in message
            assert "an example batch that reads it" in message


class Scaled(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = annotated(kind)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, weight: float) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, labels) * (1 - weight)
        return loss


def change_a_number(world: World, kind: str) -> tuple[float, int]:
    model = Scaled(kind)
    local = copy.deepcopy(model)
    made: Any = whale.parallelize(model, {**tokens(), "weight": 0.5}, micro_batches=2, device="cpu")
    worst = 0.0
    for weight in (0.5, 0.25, 0.125, 0.1):
        local.zero_grad()
        made.zero_grad()
        local(**tokens(), weight=weight).backward()
        made.train_step(**tokens(), weight=weight)
        found = made.full_gradients()
        worst = largest(worst, *(float((found[n] - p.grad).abs().max()) for n, p in local.named_parameters()))
    return worst, len(made._whale.engine.steps)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_number_that_changes_compiles_one_more_step(ranks: Two, kind: str) -> None:
    for worst, num_steps in ranks.run(change_a_number, kind):
        assert worst < 1e-12
        assert num_steps == 2


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.temperature = decoder(layers=2), 1.0

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, labels) / self.temperature
        return loss


def set_an_attribute(world: World) -> tuple[float, float, str]:
    model = Tempered()
    whale.annotate(model, {"model": whale.split()})
    made: Any = whale.parallelize(model, tokens(), device="cpu")
    first = made.train_step(**tokens())
    made.temperature = 2.0
    second = made.train_step(**tokens())
    made.temperature = 2.0 + world.rank
    return first.item(), second.item(), refusal(lambda: made.train_step(**tokens()))


def test_attributes_act_at_the_next_step_and_are_equal_on_all_ranks(ranks: Two) -> None:
    for first, second, message in ranks.run(set_an_attribute):
        assert second == pytest.approx(first / 2, abs=1e-12)
        assert "with temperature=2.0, and rank 1" in message
        assert "with temperature=3.0" in message
        assert "set the same attributes" in message


def cast_whole(world: World) -> list[str]:
    model = parallel("split")
    model.to("cpu")
    model.double()
    model.train_step(**tokens())
    return [refusal(lambda: model.bfloat16()), refusal(lambda: model.float())]


def test_a_cast_of_the_whole_model_is_refused_at_once(ranks: Two) -> None:
    for messages in ranks.run(cast_whole):
        for message in messages:
            assert "cast or move the local model before parallelize" in message


def write_values(world: World, kind: str) -> tuple[float, float]:
    """Values written into this rank's parts act, as do those of whole tensors under the local names."""
    model, local = parallel(kind), decoder(layers=2)
    with torch.no_grad():
        for parameter in [*model.parameters(), *local.parameters()]:
            parameter.mul_(0.5)
    return model.eval_step(**tokens()).item(), local(**tokens()).item()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_values_that_are_written_act(ranks: Two, kind: str) -> None:
    for found, expected in ranks.run(write_values, kind):
        assert found == pytest.approx(expected, rel=1e-12)


def call_modules(world: World, kind: str) -> list[str]:
    model = parallel(kind)
    batch = tokens()
    return [
        refusal(lambda: model(**batch)),
        refusal(lambda: model.layers[0](torch.zeros(2, 6, 16).double())),
        refusal(lambda: model.head(torch.zeros(2, 6, 16).double())),
    ]


def test_modules_in_parts_are_not_called_alone(ranks: Two) -> None:
    for whole, *parts in ranks.run(call_modules, "split"):
        assert "loss = model.train_step(**batch)" in whole
        assert all("has a part of its parameters on this rank" in message for message in parts)
    for _, *parts in ranks.run(call_modules, "replicate"):
        assert parts == ["", ""]


class Frozen(nn.Module):
    """Its batch norm may be kept in evaluation mode while all else trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.out = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.drop(self.out(self.norm(x))).square().sum()
        return found


def keep_parts_in_evaluation(world: World) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    local = Frozen().double()
    local.norm.eval()
    local.drop.eval()
    x = torch.randn(6, 4, dtype=torch.float64)
    model: Any = whale.parallelize(copy.deepcopy(local), x, device="cpu")
    found = [(model.train_step(x).item(), local(x).item())]
    for module in (model, local):
        module.norm.train()
    found.append((model.train_step(x).item(), local(x).item()))
    variance = "norm.running_var"
    found.append((model.full_state_dict()[variance].sum().item(), local.get_buffer(variance).sum().item()))
    for module in (model, local):
        module.eval()
    found.append((model.train_step(x).item(), local(x).item()))
    return found


def test_modules_train_or_evaluate_each_as_it_is_told(ranks: Two) -> None:
    for pairs in ranks.run(keep_parts_in_evaluation):
        for found, expected in pairs:
            assert found == pytest.approx(expected, rel=1e-12)


# --- states -----------------------------------------------------------------------------------------------------------


def save_and_load_states(world: World, kind: str, folder: str) -> list[str]:
    model = parallel(kind)
    own, whole = model.state_dict(), model.full_state_dict()
    found = [refusal(lambda: torch.save(own, f"{folder}/{kind}{world.rank}.pt"))]
    found.append(refusal(lambda: save_file(own, f"{folder}/{kind}{world.rank}.safetensors")))
    found.append(refusal(lambda: [x.numpy() for x in own.values()]))
    model.train_step(**tokens())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict({name: x + 0 for name, x in whole.items()})
    found.append("" if all(torch.equal(a, whole[n]) for n, a in model.full_state_dict().items()) else "whole differ")
    other = parallel("split" if kind == "stages" else "stages").state_dict()
    found.append(refusal(lambda: model.load_state_dict(other)))
    found.append(refusal(lambda: model.load_state_dict({"nothing": torch.zeros(1)})))
    averaged = {name: x.clone() for name, x in own.items()}
    for name, x in model.state_dict().items():
        averaged[name].mul_(0.5).add_(x, alpha=0.5)
    model.load_state_dict(averaged)
    found.append("" if all(torch.equal(a, whole[n]) for n, a in model.full_state_dict().items()) else "mean differs")
    return found


@pytest.mark.parametrize("kind", SHARDED)
def test_a_state_says_which_part_it_is(ranks: Two, kind: str, tmp_path: Path) -> None:
    for saved, file, array, whole, foreign, unknown, mean in ranks.run(save_and_load_states, kind, str(tmp_path)):
        assert "torch.save would write it as if it were the model's" in saved
        assert all("this rank's part of a tensor: it has no" in text for text in (file, array))
        assert all("save model.full_state_dict()" in text for text in (saved, file, array))
        assert whole == mean == ""
        assert "but rank" in foreign or "the state does not fit" in foreign
        assert "unknown ['nothing']" in unknown


def gather_states(world: World, kind: str) -> tuple[list[str], bool]:
    model = parallel(kind)
    everywhere, alone = model.full_state_dict(), model.full_state_dict(to="rank0")
    equal = all(torch.equal(x, everywhere[name]) for name, x in alone.items())
    return list(alone), equal and list(everywhere) == list(decoder(layers=2).state_dict())


@pytest.mark.parametrize("kind", LAYOUTS)
def test_whole_states_on_rank_0_alone(ranks: Two, kind: str) -> None:
    (names, equal), (others, _) = ranks.run(gather_states, kind)
    assert (names, others, equal) == (list(decoder(layers=2).state_dict()), [], True)


def save_for_another_layout(world: World, folder: str, beside: bool) -> list[float]:
    source, target = parallel("split"), parallel("stages")
    source.train_step(**tokens())
    torch.optim.SGD(source.parameters(), lr=0.1).step()
    saved = source.full_state_dict()
    if beside:
        group = torch.distributed.new_group(backend="gloo")
        writing: Any = dcp.async_save({"model": source.state_dict()}, checkpoint_id=folder, process_group=group)
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.zero_()
        writing.result()
    else:
        dcp.save({"model": source.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": target.state_dict()}, checkpoint_id=folder)
    return [float((saved[name] - value).abs().max()) for name, value in target.full_state_dict().items()]


@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside the training"])
def test_torch_s_checkpoints_reshard(ranks: Two, beside: bool, tmp_path: Path) -> None:
    for errors in ranks.run(save_for_another_layout, str(tmp_path / "checkpoint"), beside):
        assert max(errors) == 0.0


def save_statistics_of_stages(world: World, place: int, folder: str) -> tuple[set[str], float]:
    x = torch.linspace(-1, 1, 24).view(4, 6)

    def made(layout: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)]
        layers.insert(place, nn.BatchNorm1d(6))
        model = nn.Sequential(*layers)
        whale.annotate(model, layout)
        return whale.parallelize(model, x, loss_fn=lambda y, _: y.square().mean(), device="cpu", timeout_seconds=20)

    source = made({"[0-1]": whale.stage(), "[2-3]": whale.stage()})
    source.train_step(x)
    state = source.full_state_dict()
    own = source.state_dict()
    dcp.save({"model": own}, checkpoint_id=folder)
    errors = []
    for layout in ({"": whale.replicate()}, {"[0-1]": whale.stage(), "[2-3]": whale.stage()}):
        loaded, resharded = made(layout), made(layout)
        loaded.load_full_state_dict(state)
        dcp.load({"model": resharded.state_dict()}, checkpoint_id=folder)
        source.load_state_dict(source.state_dict())
        for found in (loaded.full_state_dict(), resharded.full_state_dict(), source.full_state_dict()):
            errors += [float((found[name] - value).abs().max()) for name, value in state.items()]
    return {*own}, max(errors)


@pytest.mark.parametrize("place", [1, 2])
def test_statistics_are_saved_by_the_stage_that_updates_them(ranks: Two, place: int, tmp_path: Path) -> None:
    (first, error), (second, other) = ranks.run(save_statistics_of_stages, place, str(tmp_path / "checkpoint"))
    assert first.isdisjoint(second)
    assert len(first | second) == 11
    assert max(error, other) == 0.0


def average(world: World, kind: str) -> list[tuple[float, float]]:
    model: Any = parallel(kind)
    local: Any = decoder(layers=2)
    averaged: Any = AveragedModel(model)
    expected: Any = AveragedModel(local)
    for module, mean in ((model, averaged), (local, expected)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            if module is model:
                model.train_step(**tokens())
            else:
                local(**tokens()).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(module)
    return [
        (averaged.module.eval_step(**tokens()).item(), expected.module(**tokens()).item()),
        (model.eval_step(**tokens()).item(), local(**tokens()).item()),
    ]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_averages_of_parameters_are_models_of_their_own(ranks: Two, kind: str) -> None:
    for pairs in ranks.run(average, kind):
        for found, expected in pairs:
            assert found == pytest.approx(expected, rel=1e-12)


def pickled(world: World) -> str:
    model = parallel("replicate")
    return refusal(lambda: pickle.dumps(model))


def test_a_parallel_model_is_not_pickled(ranks: Two) -> None:
    for message in ranks.run(pickled):
        assert "save model.full_state_dict()" in message


def name_parameters_of_modules(world: World) -> tuple[list[Any], float, str]:
    """A script that names parameters by modules, of which each rank has some."""
    local: Any = decoder(layers=2)
    other = decoder(layers=2)
    whale.annotate(other, {"layers.0": whale.stage(), "layers.1": whale.stage()})
    model: Any = whale.parallelize(other, tokens(), device="cpu", timeout_seconds=20)
    shapes = [tuple(model.embed.weight.shape), model.head.weight.numel(), model.layers[1].up.bias.dtype]
    optimizers = []
    for one in (local, model):
        with torch.no_grad():
            one.head.weight.data.mul_(0.5)
            one.embed.weight.clamp_(-1.0, 1.0)
            torch.nn.init.zeros_(one.layers[1].up.bias)
        linear = [m for m in one.modules() if isinstance(m, torch.nn.Linear)]
        groups = [
            {"params": [m.weight for m in linear], "weight_decay": 0.1},
            {"params": [m.bias for m in linear if m.bias is not None], "weight_decay": 0.0},
            {"params": [one.embed.weight], "lr": 0.02},
        ]
        optimizers.append(torch.optim.AdamW(groups, lr=0.01, eps=1e-4))
    for _ in range(3):
        local(**tokens()).backward()
        model.train_step(**tokens())
        for one, optimizer in zip((local, model), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    whole = model.full_state_dict()
    error = max(float((whole[name] - x).abs().max()) for name, x in local.named_parameters())
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    assert set(get_optimizer_state_dict(model, optimizers[1])["state"]) == {n for n, _ in model.named_parameters()}
    copy.deepcopy(model)
    return shapes, error, refusal(lambda: [model.head.weight.norm().item(), model.embed.weight.norm().item()])


def test_parameters_of_other_stages_have_shapes_and_take_writes(ranks: Two) -> None:
    for rank, (shapes, error, message) in enumerate(ranks.run(name_parameters_of_modules)):
        assert shapes == [(32, 16), 512, torch.float64]
        assert error < 1e-12
        name = ("head.weight", "embed.weight")[rank]
        assert f"needs values of {name}, of which rank {1 - rank} has the values and rank {rank} none" in message
