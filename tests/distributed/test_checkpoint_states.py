"""Checkpoints of what training has beside parameters: optimizers of all kinds, averages, random numbers, the loss
scale, experts and interleaved stages; and what ranks say when one cannot save."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import whale
from tests.distributed.parity import Worlds, cluster_of
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.small_models import decoder, tokens
from whale.checkpoint import folder as folders
from whale.checkpoint import save
from whale.cli.model_loader import load_model
from whale.errors import CheckpointError, UsageError
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x)))).square().mean()


BATCH = {"x": torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)}


def small(layout: dict[str, Any] | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Small().double()
    if layout:
        whale.annotate(model, layout)
    return whale.parallelize(model, BATCH, device="cpu", **options)


def trained(model: Any, optimizer: Any, steps: int = 2, batch: Any = BATCH) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(model.train_step(**batch).item())
        optimizer.step(*([lambda: model.train_step(**batch)] if isinstance(optimizer, torch.optim.LBFGS) else []))
        optimizer.zero_grad()
    return losses


def alike(one: Any, other: Any) -> bool:
    """Whether two states are the same, with all bits of their tensors."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(x, other[key]) for key, x in one.items())
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam with a rate as tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}
OF_WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
}
"""Optimizers that need whole parameters."""


def round_trips(world: World | None, folder: Path, layout: dict[str, Any], names: list[str]) -> dict[str, str]:
    """For each optimizer what differs after a load, and in the steps after it."""
    found = {}
    for name in names:
        make = {**OPTIMIZERS, **OF_WHOLE}[name]
        model, other = small(layout), small(layout)
        optimizer, its = make(model.parameters()), make(other.parameters())
        trained(model, optimizer)
        place = folder / name / f"{len(layout)}"
        whale.save_checkpoint(place, model, step=2, optimizer=optimizer, asynchronous=False)
        whale.load_checkpoint(place, other, optimizer=its)
        own = [dict(optimizer.state.get(p, {})) for p in model.parameters()]
        if not alike(own, [dict(its.state.get(p, {})) for p in other.parameters()]):
            found[name] = "states"
        expected = trained(model, optimizer)
        whale.load_checkpoint(place, other, optimizer=its)
        if trained(other, its) != expected:
            found[name] = "losses"  # with dropout: random numbers go on, too
    return found


def test_optimizers_go_on_with_their_states(worlds: Worlds, tmp_path: Path) -> None:
    assert round_trips(None, tmp_path / "one", {}, [*OPTIMIZERS, *OF_WHOLE]) == {}
    for differs in worlds.run(2, round_trips, tmp_path / "two", {"": whale.split()}, [*OPTIMIZERS]):
        assert differs == {}
    for differs in worlds.run(2, round_trips, tmp_path / "copies", {}, ["Adafactor"]):
        assert differs == {}


def refused_factors(world: World, folder: Path) -> str:
    model = small({"": whale.split()})
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    for state in optimizer.state.values():
        state["factor"] = torch.ones(3)
    with pytest.raises(whale.WhaleError) as caught:
        whale.save_checkpoint(folder, model, step=1, optimizer=optimizer)
    return str(caught.value)


def test_a_state_whose_part_is_unknown_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    for text in worlds.run(2, refused_factors, tmp_path):
        assert "optimizer.factor.up.weight is a Tensor of shape (3,), and rank" in text


def other_states(world: World | None, folder: Path) -> dict[str, bool]:
    """An average of parameters, a wrapped object, and the loss scale."""
    options: dict[str, Any] = {} if world is None else {"zero": 3, "state_shares": [3, 1], "offload": "state"}
    model, other = (small(precision="fp16", **options) for _ in range(2))
    model.loss_scaler.scale, model.loss_scaler.growth_tracker = 128.0, 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = copy.deepcopy(model)
    trained(model, optimizer)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    plateau.step(1.0)
    whale.save_checkpoint(folder, model, step=2, optimizer=optimizer, average=average, plateau=plateau)
    whale.wait_for_checkpoints()
    its, its_average = torch.optim.AdamW(other.parameters()), copy.deepcopy(model)
    its_plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(its)
    whale.load_checkpoint(folder, other, optimizer=its, average=its_average, plateau=its_plateau)
    return {
        "model": alike(model.full_state_dict(), other.full_state_dict()),
        "average": alike(average.full_state_dict(), its_average.full_state_dict()),
        "and not the model's": not alike(average.full_state_dict(), model.full_state_dict()),
        "plateau": its_plateau.state_dict() == plateau.state_dict(),
        "rate": its.param_groups[0]["lr"] == 0.1,
        "scale": other.loss_scaler.state_dict() == model.loss_scaler.state_dict(),
    }


def test_averages_schedules_and_the_loss_scale_go_on(worlds: Worlds, tmp_path: Path) -> None:
    assert all(other_states(None, tmp_path / "one").values())
    for found in worlds.run(2, other_states, tmp_path / "two"):
        assert all(found.values()), found


def mixture() -> tuple[nn.Module, Any]:
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 16, "seq": 6, "vocab": 32, "experts": 4, "batch_size": 8}
    torch.manual_seed(0)
    found = load_model("examples/models/moe.py:moe", sizes)
    return found.model.double(), found.batch


INTERLEAVED = {f"layers.{i}": whale.stage() for i in range(4)}
KINDS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], dict[str, Any], dict[str, Any]]] = {
    "experts": (mixture, {"": whale.replicate(), "layers.*.feed_forward": whale.split()}, {}),
    "interleaved stages": (
        lambda: (decoder(layers=4), tokens()),
        INTERLEAVED,
        {"micro_batches": 2, "schedule": "interleaved"},
    ),
    "zero 2 of experts": (mixture, {}, {"zero": 2}),
}


def of_kind(world: World | None, kind: str, folder: Path, saves: bool) -> tuple[dict[str, Tensor], list[float]]:
    build, layout, options = KINDS[kind]
    model, batch = build()
    if world is not None and layout:
        whale.annotate(model, layout)
    made = whale.parallelize(model, batch, device="cpu", **(options if world is not None else {}))
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    if saves:
        trained(made, optimizer, 1, batch)
        whale.save_checkpoint(folder, made, step=1, optimizer=optimizer)
        whale.wait_for_checkpoints()
    else:
        whale.load_checkpoint(folder, made, optimizer=optimizer)
    return made.full_state_dict(), trained(made, optimizer, 2, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_and_interleaved_stages_are_resharded(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    state, losses = worlds.run(2, of_kind, kind, tmp_path / "two", True)[0]
    found, its_losses = of_kind(None, kind, tmp_path / "two", False)
    assert alike(state, found)
    assert its_losses == pytest.approx(losses, rel=1e-9)
    state, losses = of_kind(None, kind, tmp_path / "one", True)
    for found, its_losses in worlds.run(2, of_kind, kind, tmp_path / "one", False):
        assert alike(state, found)
        assert its_losses == pytest.approx(losses, rel=1e-9)


WIDE = {"x": torch.linspace(-1, 1, 4 * 1024).view(4, 1024)}
READS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "dp": ({}, {}, 1.02),
    "pp": ({"0": whale.stage(), "2": whale.stage()}, {}, 1.02),
    "tp": ({"": whale.split()}, {}, 1.15),
    "tp 3:1": ({"": whale.split()}, {"cluster": cluster_of((3.0, 1.0))}, 1.4),
    "zero 3:1": ({}, {"zero": 3, "state_shares": [3, 1]}, 1.3),
}
"""Layouts, options, and what ranks may read at most as a part of what they own. A quarter of 1536 columns is in two
tiles of 256, which are a third more."""


def reads(world: World, folder: Path) -> dict[tuple[str, str], float]:
    """For each pair of layouts, as saved and as loaded, the bytes read as a part of what this rank owns."""
    found = {}
    runs = {}
    for name, (layout, options, _) in READS.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 1536), nn.ReLU(), nn.Linear(1536, 1024))
        if layout:
            whale.annotate(model, layout)
        made = whale.parallelize(
            model, (WIDE["x"],), loss_fn=lambda y, batch: y.square().mean(), device="cpu", **options
        )
        optimizer = torch.optim.AdamW(made.parameters())
        made.train_step(WIDE["x"])
        optimizer.step()
        runs[name] = made, optimizer
        whale.save_checkpoint(folder / name, made, step=1, optimizer=optimizer)
    whale.wait_for_checkpoints()
    for name, (made, optimizer) in runs.items():
        own = sum(p.numel() * 12 for p in made.parameters())
        for other in READS:
            done = whale.load_checkpoint(folder / other, made, optimizer=optimizer)
            assert done is not None
            found[other, name] = done.bytes_read / own
    return found


def test_ranks_read_little_but_their_parts(worlds: Worlds, tmp_path: Path) -> None:
    for rank, found in enumerate(worlds.run(2, reads, tmp_path)):
        for (saved, name), ratio in found.items():
            assert ratio <= max(READS[name][2], READS[saved][2]), f"rank {rank}, from {saved} to {name}"


def weights(world: World, folder: Path) -> tuple[bool, bool, str]:
    """Whether weights of files are loaded into parts; the refusal of others, which one rank alone sees."""
    expected = {name: tensor + 1 for name, tensor in Small().double().state_dict().items()}
    if world.rank == 0:
        save_file(expected, folder / "model.safetensors")
        (folder / "other").mkdir()
        save_file({**expected, "up.weight": torch.ones(8, 6)[:, :3].contiguous()}, folder / "other/model.safetensors")
    torch.distributed.barrier()
    expected = load_file(folder / "model.safetensors")
    model = small({"": whale.split()})
    whale.load_weights(folder, model)
    found = alike(model.full_state_dict(), expected)
    with pytest.raises(CheckpointError) as caught:
        whale.load_weights(folder / "other" if world.rank else folder, model)
    return found, alike(model.full_state_dict(), expected), str(caught.value)


def test_weights_of_files_are_loaded_into_parts(worlds: Worlds, tmp_path: Path) -> None:
    for loaded, kept, refusal in worlds.run(2, weights, tmp_path):
        assert loaded
        assert kept
        assert "rank 1: up.weight has shape (8, 3), but the model's is (8, 6)" in refusal


class Position:
    """A loader that is elsewhere on each rank."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        orders = dict.fromkeys(["wiki", "books"] if self.at % 2 == 0 else ["books", "wiki"], 0)
        return {"at": self.at, "rows": torch.full((2,), self.at), "orders": orders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert [*state["orders"]] == sorted(state["orders"], reverse=state["at"] % 2 == 0)
        self.at = state["at"] if state["rows"].tolist() == [state["at"]] * 2 else -1


def draws(own: random.Random) -> list[float]:
    return [own.random(), random.random(), float(np.random.rand()), torch.rand(()).item()]


def of_ranks(world: World | None, folder: Path, apart: bool, saves: bool) -> tuple[list[float], int, list[str]]:
    """The next numbers of generators, the position of a loader, and warnings: after a save, or a load."""
    seed = world.rank if world is not None and apart else 0
    seed += 0 if saves else 100
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    own, loader = random.Random(seed), Position(seed)
    model = small()
    if saves:
        whale.save_checkpoint(folder, model, step=1, own=own, loader=loader)
        whale.wait_for_checkpoints()
        return draws(own), loader.at, []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        whale.load_checkpoint(folder, model, own=own, loader=loader)
    return draws(own), loader.at, [str(one.message) for one in told]


def test_ranks_that_draw_apart_go_on_apart(worlds: Worlds, tmp_path: Path) -> None:
    saved = worlds.run(2, of_ranks, tmp_path / "apart", True, True)
    assert saved[0][0] != saved[1][0] and [at for _, at, _ in saved] == [0, 1]
    assert worlds.run(2, of_ranks, tmp_path / "apart", True, False) == saved
    found, at, told = of_ranks(None, tmp_path / "apart", True, False)
    assert (found, at) == (saved[0][0], 0)
    assert any("saved by 2 ranks, whose states of loader differ: all ranks have that of rank 0 now" in x for x in told)


def test_ranks_that_draw_alike_do_so_in_any_number(worlds: Worlds, tmp_path: Path) -> None:
    saved = worlds.run(2, of_ranks, tmp_path / "two", False, True)
    assert of_ranks(None, tmp_path / "two", False, False) == saved[0]
    alone = of_ranks(None, tmp_path / "one", False, True)
    assert worlds.run(2, of_ranks, tmp_path / "one", False, False) == [alone, alone]
    size = [path.stat().st_size for path in sorted((tmp_path / "two").glob("step-*/rank-*.json"))]
    assert size[1] < size[0] / 2, "what is rank 0's is written once"


# --- failures


def failing(world: World, folder: Path) -> tuple[str, list[int], float]:
    """The error where rank 1 cannot write; a save after it."""
    model = small({"": whale.split()})
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:

            def full(*ignored: Any) -> str:
                raise OSError(28, "No space left on device")

            patch.setattr(save, "write_rank", full)
        whale.save_checkpoint(folder, model, step=1)
        loss = model.train_step(**BATCH).item()
        try:
            whale.wait_for_checkpoints()
        except CheckpointError as error:
            text = str(error)
    steps = folders.steps(folder)
    whale.save_checkpoint(folder, model, step=2, asynchronous=False)
    return text, steps + folders.steps(folder), loss


def test_all_ranks_learn_that_one_could_not_save(worlds: Worlds, tmp_path: Path) -> None:
    results = worlds.run(2, failing, tmp_path)
    for text, steps, _ in results:
        assert "step 1" in text and "was not saved: rank 1: No space left on device" in text
        assert steps == [2]


def apart(world: World, folder: Path) -> str:
    model = small({"": whale.split()})
    try:
        whale.save_checkpoint(folder / str(world.rank), model, step=1, asynchronous=False)
    except CheckpointError as error:
        return str(error)
    return ""


def test_folders_that_hosts_do_not_share_are_named(worlds: Worlds, tmp_path: Path) -> None:
    for text in worlds.run(2, apart, tmp_path):
        assert "rank 1: it does not see" in text and "all hosts must share the directory" in text


def other_step(world: World, folder: Path) -> str:
    whale.save_checkpoint(folder, small({"": whale.split()}), step=1 + world.rank)
    try:
        whale.wait_for_checkpoints()
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_that_save_other_steps_are_named_on_all(worlds: Worlds, tmp_path: Path) -> None:
    for text in worlds.run(2, other_step, tmp_path):
        assert "was not saved: rank 1: it saves step 2, and rank 0 step-00000001: give the same on all ranks" in text
    assert folders.steps(tmp_path) == []


def no_directory(world: World, file: Path) -> str:
    try:
        whale.load_checkpoint(file, small({"": whale.split()}))
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_is_no_directory_is_named_on_all_ranks(worlds: Worlds, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for text in worlds.run(2, no_directory, file):
        assert text == f"rank 0: {file} cannot be read: Not a directory"


def damaged(world: World, folder: Path) -> tuple[int, str, float]:
    """The step and the reasons of a load where rank 1's newest file is damaged; and what ``load_weights`` takes."""
    model = small({"": whale.split()})
    for step in (1, 2):
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, step)
        whale.save_checkpoint(folder, model, step=step, asynchronous=False)
    own = folder / "step-00000002" / "rank-00001.safetensors"
    if world.rank == 1:
        content = own.read_bytes()
        own.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    torch.distributed.barrier()
    done = whale.load_checkpoint(folder, model)
    assert done is not None
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    whale.load_weights(folder, model)
    return done.step, "; ".join(done.damaged), next(iter(model.parameters())).mean().item()


def test_what_is_damaged_for_one_rank_is_so_for_all(worlds: Worlds, tmp_path: Path) -> None:
    for step, text, mean in worlds.run(2, damaged, tmp_path):
        assert step == mean == 1
        assert "rank 1: " in text and "rank-00001.safetensors is damaged in model." in text


def golden(world: World, folder: Path) -> None:
    """Make the golden checkpoint, as it was made once for all: it is of the format, and never made again."""
    model = small({"": whale.split()}, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    trained(model, optimizer, 2)
    whale.save_checkpoint(folder, model, step=2, optimizer=optimizer, scheduler=scheduler, asynchronous=False)


GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-version-1"


def test_a_checkpoint_of_version_1_goes_on() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7])
    done = whale.load_checkpoint(GOLDEN, model, optimizer=optimizer, scheduler=scheduler)
    assert done is not None
    assert done.step == 2
    assert scheduler.milestones == {1: 1}
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert model._whale.engine.clock.step == 2
    assert len(optimizer.state) == 4
