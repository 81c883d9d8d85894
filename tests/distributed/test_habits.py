"""Habits of scripts for one GPU, on two ranks: what they do is exact, or refused with what to write instead."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel

import whale
from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.small_models import decoder, tokens
from whale.api import ParallelModule
from whale.planner.catalog import device_types
from whale.runtime.launch import World

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"": whale.replicate()},
    "split": {"": whale.split()},
    "stages": {"layers.0": whale.stage(), "layers.1": whale.stage()},
}
SHARDED = ["split", "stages"]


class Two:
    """Two ranks, started again after a test that failed."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.worlds.run(2, function, *arguments)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


def annotated(kind: str, model: nn.Module | None = None) -> nn.Module:
    model = decoder(layers=2) if model is None else model
    whale.annotate(model, LAYOUTS[kind])
    return model


def parallel(kind: str, **options: Any) -> Any:
    return whale.parallelize(annotated(kind), tokens(), device="cpu", timeout_seconds=20, **options)


def refusal(what: Callable[[], Any]) -> str:
    try:
        what()
    except whale.WhaleError as error:
        return str(error)
    return ""


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


# --- hosts ---


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
    return float(made.train_step(torch.ones(4, 4) * (1 + world.rank * 1e-7)))


def test_values_that_another_processor_rounds_differently_are_taken(ranks: Two) -> None:
    assert len(ranks.run(bring_rounded_values)) == 2


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


CHANGES = {
    "replaced": "was replaced after parallelize",
    "frozen": "was frozen after parallelize",
    "cast": "is torch.float16 on cpu after parallelize",
    "hook": "a hook was added to",
    "gradient hook": "a hook was added to",
    "optimizer in backward": "a hook was added to",
    "module": "adapter was added after parallelize",
}


def change_and_step(world: World, what: str) -> str:
    model = parallel("split")
    model.train_step(**tokens())
    change(model, what)
    return refusal(lambda: model.train_step(**tokens()))


@pytest.mark.parametrize("what", CHANGES)
def test_changes_that_steps_do_not_see_are_refused(ranks: Two, what: str) -> None:
    for message in ranks.run(change_and_step, what):
        assert CHANGES[what] in message
        assert message.endswith("before parallelize")


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
    worst = max(float((state[name] - value).abs().max()) for name, value in local.state_dict().items())
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
        worst = max(worst, *(float((found[n] - p.grad).abs().max()) for n, p in local.named_parameters()))
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
    return float(first), float(second), refusal(lambda: made.train_step(**tokens()))


def test_attributes_act_at_the_next_step_and_are_equal_on_all_ranks(ranks: Two) -> None:
    for first, second, message in ranks.run(set_an_attribute):
        assert second == pytest.approx(first / 2, abs=1e-12)
        assert "with temperature=" in message
        assert "set attributes on all" in message


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
    for saved, whole, foreign, unknown, mean in ranks.run(save_and_load_states, kind, str(tmp_path)):
        assert "torch.save would write it as if it were the model's" in saved
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


def save_for_another_layout(world: World, folder: str) -> list[float]:
    source, target = parallel("split"), parallel("stages")
    source.train_step(**tokens())
    torch.optim.SGD(source.parameters(), lr=0.1).step()
    dcp.save({"model": source.state_dict()}, checkpoint_id=folder)
    dcp.load({"model": target.state_dict()}, checkpoint_id=folder)
    return [
        float((a - b).abs().max())
        for a, b in zip(source.full_state_dict().values(), target.full_state_dict().values(), strict=True)
    ]


def test_torch_s_checkpoints_reshard(ranks: Two, tmp_path: Path) -> None:
    for errors in ranks.run(save_for_another_layout, str(tmp_path / "checkpoint")):
        assert max(errors) == 0.0


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


# --- optimizers and clipping ------------------------------------------------------------------------------------------


def optimize_before(world: World, kind: str) -> tuple[str, list[float], list[float]]:
    """The optimizer is made from the local model."""
    local, model = decoder(layers=2), annotated(kind)
    expected, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (local, model))
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


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_optimizer_of_the_local_model_trains_or_is_refused(ranks: Two, kind: str) -> None:
    for message, found, expected in ranks.run(optimize_before, kind):
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
@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS", "LARS"])
def test_optimizers_that_need_whole_tensors_are_refused(ranks: Two, kind: str, name: str) -> None:
    for message in ranks.run(optimize_with, kind, name, {}):
        if kind == "stages" and name != "LBFGS":
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

    options = StateDictOptions(flatten_optimizer_state_dict=True)  # by name, because ranks of stages have others
    with TemporaryDirectory() as folder:
        shared = [folder]
        torch.distributed.broadcast_object_list(shared)
        dcp.save({"optimizer": get_optimizer_state_dict(module, pairs[1][1], options=options)}, checkpoint_id=shared[0])
        pairs[1] = module, torch.optim.AdamW(module.parameters(), lr=1.0)
        state = {"optimizer": get_optimizer_state_dict(module, pairs[1][1], options=options)}
        dcp.load(state, checkpoint_id=shared[0])
        set_optimizer_state_dict(module, pairs[1][1], state["optimizer"], options=options)
        torch.distributed.barrier()
    errors.append(step())
    return errors, messages


@pytest.mark.parametrize("kind", LAYOUTS)
def test_states_of_optimizers_are_saved_and_loaded(ranks: Two, kind: str) -> None:
    for errors, messages in ranks.run(states_of_an_optimizer, kind):
        assert max(errors) < 1e-10, errors  # AdamW divides by roots of gradients, some of which are tiny
        if messages:
            assert "torch.save would write it as if it were the model's" in messages[0]
            assert "which is neither whole" in messages[1] and "nor this rank's part" in messages[1]


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


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_torch_clips_by_the_norm_of_all_ranks(ranks: Two, kind: str, norm_type: float) -> None:
    for pairs in ranks.run(clip, kind, norm_type):
        for found, expected in pairs:
            assert found == pytest.approx(expected, rel=1e-9)


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


def seeded(world: World, seed: int) -> float:
    torch.manual_seed(0)
    model = annotated_as({"": whale.split()}, Dropped())
    torch.manual_seed(seed)
    return float(whale.parallelize(model, torch.ones(4, 4), device="cpu").train_step(torch.ones(4, 4)))


def test_the_default_seed_of_dropout_is_torch_s(ranks: Two) -> None:
    one, same, other = (ranks.run(seeded, seed)[0] for seed in (1, 1, 2))
    assert one == same
    assert one != other


# --- calls ------------------------------------------------------------------------------------------------------------


def go_backward(world: World) -> list[str]:
    model = parallel("replicate")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = refusal(lambda: model.train_step(**tokens()))
    return [refusal(lambda: model.train_step(**tokens()).backward()), around]


def test_words_for_what_a_step_has_done(ranks: Two) -> None:
    for backward, around in ranks.run(go_backward):
        assert "train_step has done the backward already" in backward
        assert "torch.autocast around parallelize or a step is not supported" in around


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


# --- what modules keep and are ---


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
        errors.append(float((made[0].train_step(**batch) - loss).abs()))
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


def refuse_kinds(world: World) -> list[str]:
    x = torch.ones(4, 4)
    with pytest.warns() as _:
        traced, normed = torch.jit.trace(nn.Linear(4, 4), x), torch.nn.utils.weight_norm(nn.Linear(4, 4))
    normed(x)

    def parallelize(inner: nn.Module) -> str:
        def squares(output: torch.Tensor, batch: Any) -> torch.Tensor:
            return output.square().mean()

        return refusal(lambda: whale.parallelize(nn.Sequential(inner), x, loss_fn=squares, device="cpu"))

    return [parallelize(inner) for inner in (traced, nn.LazyLinear(4), normed)]


def test_modules_that_are_not_captured_are_refused_by_name(ranks: Two) -> None:
    for scripted, lazy, normed in ranks.run(refuse_kinds):
        assert "0 is compiled by torch.jit" in scripted
        assert "0 has no weight yet: run a batch through the model before parallelize" in lazy
        assert "0 has computed weight in a hook" in normed
