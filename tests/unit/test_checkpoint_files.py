"""Files of checkpoints: what is damaged or made by an enemy ends in an error that names it, and executes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import whale
from whale.checkpoint import folder as folders
from whale.checkpoint.collect import ObjectState
from whale.checkpoint.format import Key, is_step_name, step_name
from whale.checkpoint.hugging_face import export
from whale.checkpoint.owners import Held, written_parts
from whale.checkpoint.reader import Reader
from whale.checkpoint.values import decoded, encoded
from whale.cli.app import app
from whale.errors import CheckpointError, UsageError, WhaleError

BATCH = {"input": torch.ones(4, 6)}


def run_of(seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    local = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    model = whale.parallelize(local, BATCH, loss_fn=lambda output, batch: output.square().mean(), device="cpu")
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(model.train_step(**BATCH).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in model.full_state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{key} of {number}": tensor.clone() for key, tensor in state.items()}
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


class Runs:
    """A directory with two checkpoints, and the tensors of each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model, self.optimizer = run_of()
        self.values = {}
        for step in (1, 2):
            trained(self.model, self.optimizer)
            whale.save_checkpoint(directory, self.model, step=step, optimizer=self.optimizer, asynchronous=False)
            self.values[step] = values(self.model, self.optimizer)

    def load(self, directory: Path) -> int:
        """The step that is loaded; the tensors are then those of it, and otherwise as they were."""
        before = values(self.model, self.optimizer)
        try:
            done = whale.load_checkpoint(directory, self.model, optimizer=self.optimizer)
        except WhaleError:
            assert same(values(self.model, self.optimizer), before)
            raise
        step = 0 if done is None else done.step
        assert same(values(self.model, self.optimizer), self.values[step] if step else before)
        return step


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copy(runs: Runs, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs.directory, tmp_path / "runs"))


def test_the_newest_is_loaded_and_an_older_one_by_its_step(runs: Runs) -> None:
    assert runs.load(runs.directory) == 2
    done = whale.load_checkpoint(runs.directory, runs.model, step=1, optimizer=runs.optimizer)
    assert done is not None and done.step == 1 and done.bytes_read > 0
    assert same(values(runs.model, runs.optimizer), runs.values[1])
    done = whale.load_checkpoint(runs.directory / step_name(1), runs.model, optimizer=runs.optimizer)
    assert done is not None and done.step == 1
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7; it has \[2, 1\]"):
        whale.load_checkpoint(runs.directory, runs.model, step=7, optimizer=runs.optimizer)


def test_without_a_checkpoint_nothing_is_loaded(runs: Runs, tmp_path: Path) -> None:
    assert runs.load(tmp_path) == 0
    assert runs.load(tmp_path / "missing") == 0


def test_a_checkpoint_that_is_named_must_be_there(runs: Runs, copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"runs has no checkpoint of step 7; it has \[2, 1\]"):
        runs.load(copy / step_name(7))
    (copy / step_name(2) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000002/manifest.json cannot be read"):
        runs.load(copy / step_name(2))


def test_as_many_stay_as_are_kept_and_the_same_step_is_replaced(tmp_path: Path) -> None:
    model, optimizer = run_of()
    for step in (1, 2, 3, 3):
        trained(model, optimizer)
        whale.save_checkpoint(tmp_path, model, step=step, keep=2, optimizer=optimizer)
    whale.wait_for_checkpoints()
    assert folders.steps(tmp_path) == [3, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", step_name(2), step_name(3)]
    assert whale.load_checkpoint(tmp_path, model, optimizer=optimizer).step == 3  # type: ignore[union-attr]


def test_a_run_that_went_back_keeps_what_it_saves_and_is_told_of_the_newest(runs: Runs, copy: Path) -> None:
    whale.save_checkpoint(copy, runs.model, step=20, keep=3, optimizer=runs.optimizer, asynchronous=False)
    said = "has a newer checkpoint than the one that is saved, that of step 20: delete it to go on from here"
    with pytest.warns(UserWarning, match=said):
        whale.save_checkpoint(copy, runs.model, step=5, keep=2, optimizer=runs.optimizer, asynchronous=False)
    assert folders.steps(copy) == [20, 5], "as many as are kept, with what was just saved"
    shutil.rmtree(copy / step_name(20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whale.save_checkpoint(copy, runs.model, step=6, keep=2, optimizer=runs.optimizer, asynchronous=False)
        whale.save_checkpoint(copy, runs.model, step=6, keep=1, optimizer=runs.optimizer, asynchronous=False)
    assert folders.steps(copy) == [6]


def test_what_is_saved_is_what_was_at_the_call(tmp_path: Path) -> None:
    model, optimizer = run_of()
    trained(model, optimizer, 2)
    whale.save_checkpoint(tmp_path, model, step=2, optimizer=optimizer)
    at_the_call = values(model, optimizer)
    curve = trained(model, optimizer, 3)
    whale.wait_for_checkpoints()
    other, its_optimizer = run_of(seed=1)
    whale.load_checkpoint(tmp_path, other, optimizer=its_optimizer)
    assert same(values(other, its_optimizer), at_the_call)
    assert trained(other, its_optimizer, 3) == curve


@pytest.mark.parametrize("seed", range(40))
def test_damage_anywhere_ends_with_the_right_bytes_or_with_an_error(runs: Runs, copy: Path, seed: int) -> None:
    draw = random.Random(seed)
    damaged = copy / step_name(2)
    file = draw.choice(sorted(damaged.iterdir()))
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content))
    match draw.choice(["flip", "cut", "missing", "swap", "longer"]):
        case "flip":
            content[place] ^= 1 << draw.randrange(8)
        case "cut":
            del content[place:]
        case "missing":
            content.clear()
        case "swap":
            content[:] = (copy / step_name(1) / file.name).read_bytes()
        case "longer":
            content += b" "
    file.write_bytes(content) if content else file.unlink()
    if (damaged / file.name).exists() and file.read_bytes() == (runs.directory / step_name(2) / file.name).read_bytes():
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = runs.load(copy)
    # What no tensor needs may be damaged. A warning is given once for a text, and so once for a folder.
    assert step == 2 or any("a newer checkpoint is damaged" in str(one.message) for one in told)


def test_a_damaged_one_is_named_and_without_a_good_one_nothing_changes(runs: Runs, copy: Path) -> None:
    for step in (1, 2):
        file = copy / step_name(step) / "rank-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no good checkpoint: .*step-00000002/rank-00000.safetensors is damaged"):
        runs.load(copy)
    with Reader(copy / step_name(2)) as reader, pytest.raises(CheckpointError, match="is damaged in .*, chunk 0 of 1"):
        reader.verify()


# --- files of an enemy


def manifest_of(copy: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((copy / step_name(2) / "manifest.json").read_text())
    return found


def forged(copy: Path, *, manifest: dict[str, Any] | None = None, index: dict[str, Any] | None = None) -> None:
    """Change files and correct their digests, as an enemy does."""
    folder = copy / step_name(2)
    shutil.rmtree(copy / step_name(1))
    outer = manifest_of(copy)
    if index is not None:
        old = json.loads((folder / "rank-00000.json").read_text())
        text = json.dumps(old | index)
        (folder / "rank-00000.json").write_text(text)
        outer["content"]["indexes"] = [sha256(text.encode()).hexdigest()]
    outer["content"] |= manifest or {}
    content = json.dumps(outer["content"], sort_keys=True, separators=(",", ":"))
    outer["sha256"] = sha256(content.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(outer))


def part(**changes: Any) -> dict[str, Any]:
    good = {"of": "model", "name": "0.bias", "dtype": "F32", "shape": [5], "at": "0-5", "offset": 64, "rows": 5}
    return {**good, "sha256": "0" * 64, **changes}


@pytest.mark.parametrize(
    "index",
    [
        {"parts": [part(at="0-6")]},
        {"parts": [part(at="3-1")]},
        {"parts": [part(at="0-5;0-5")]},
        {"parts": [part(at="0-" + "9" * 17)]},
        {"parts": [part(at="x")]},
        {"parts": [part(at=[[0, 5]])]},
        {"parts": [part(shape=[2**40, 2**40])]},
        {"parts": [part(shape=[-5])]},
        {"parts": [part(shape=[1] * 40, at=";".join(["0-1"] * 40))]},
        {"parts": [part(offset=2**49)]},
        {"parts": [part(offset=-8)]},
        {"parts": [part(rows=0)]},
        {"parts": [part(dtype="O")]},
        {"parts": [part(sha256="")]},
        {"parts": [part(sha256="zz" * 32)]},
        {"parts": [part(name="a\n" * 3)]},
        {"parts": [part(name="n" * 2000)]},
        {"parts": [part(file="../../secret")]},
        {"parts": [part(), part()]},
        {"parts": [part(), part(shape=[6], at="5-6", rows=1)]},
        {"parts": []},
        {"bytes": 2**60},
        {"extra": 1},
        {"groups": {"optimizer": [{"names": ["0.bias"], "options": {"lr": {"$eval": "1"}}}]}},
        {"groups": {"optimizer": [{"names": ["0.bias"], "options": {"lr": {"$tensor": 7}}}]}},
        {"values": {"optimizer": {"0.bias": {"step": {"$bytes": "no"}}}}},
    ],
)
def test_an_index_of_an_enemy_is_refused(runs: Runs, copy: Path, index: dict[str, Any]) -> None:
    forged(copy, index=index)
    with pytest.raises(CheckpointError, match="step-00000002"):
        runs.load(copy)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ([10], ["0-5", "0-5"]),
        ([10], ["0-5", "4-9"]),
        ([4, 4], ["0-2;0-4", "1-3;0-4"]),
        ([4, 4], ["0-4;0-2", "0-2;2-4", "0-2;2-4"]),
        ([4, 4], ["0-1,3-4;0-4", "0-2;0-4"]),
    ],
)
def test_parts_that_overlap_leave_others_out_and_are_refused(copy: Path, shape: list[int], parts: list[str]) -> None:
    """Their sizes are that of the tensor: what none of them has would be whatever was in the memory."""
    given = [part(name="x", shape=shape, at=at, rows=99, offset=64) for at in parts]
    forged(copy, index={"parts": given})
    with pytest.raises(CheckpointError, match=r"the parts of model\.x are not all of its elements, each once"):
        Reader(copy / step_name(2))


def test_states_that_are_too_deep_are_refused(runs: Runs, copy: Path) -> None:
    deep: Any = 0
    for _ in range(400):
        deep = [deep]
    forged(copy, index={"values": {"random.python": {"": {"": deep}}}})
    with pytest.raises(CheckpointError, match="step-00000002"):
        runs.load(copy)


@pytest.mark.parametrize(
    "manifest",
    [
        {"step": -1},
        {"step": 1.5},
        {"step": 10**30},
        {"indexes": []},
        {"indexes": ["../../../etc/passwd"]},
        {"indexes": ["0" * 64] * 3},
        {"names": {"model": {"0.bias": "../x"}}},
        {"names": {"model": {}}},
        {"names": {}},
        {"optimizers": {"optimizer": "SGD"}},
        {"objects": {"other": 1}},
        {"unknown": True},
    ],
)
def test_a_manifest_of_an_enemy_is_refused(runs: Runs, copy: Path, manifest: dict[str, Any]) -> None:
    forged(copy, manifest=manifest)
    with pytest.raises(CheckpointError, match="step-00000002"):
        runs.load(copy)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        '{"format": "whale-checkpoint", "version": 1}',
        '{"format": "whale-checkpoint", "version": 2}',
        '{"format": "whale-checkpoint", "version": 1, "version": 1}',
        '{"format": "other"}',
        '{"a": ' * 5000 + "1" + "}" * 5000,
        '{"a": NaN}',
        "\x80\x04cos\nsystem\n(S'touch owned'\ntR.",
    ],
)
def test_a_manifest_that_is_none_is_refused(runs: Runs, copy: Path, text: str) -> None:
    (copy / step_name(2) / "manifest.json").write_bytes(text.encode("latin-1"))
    shutil.rmtree(copy / step_name(1))
    with pytest.raises(CheckpointError, match=r"step-00000002/manifest\.json"):
        runs.load(copy)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_links_and_pipes_are_not_followed(runs: Runs, copy: Path, name: str, kind: str) -> None:
    file = copy / step_name(2) / name
    shutil.rmtree(copy / step_name(1))
    file.rename(copy / "outside")
    if kind == "link":
        file.symlink_to(copy / "outside")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises(CheckpointError, match=name):
        runs.load(copy)


def test_a_folder_that_is_a_link_is_no_checkpoint(runs: Runs, copy: Path) -> None:
    (copy / step_name(3)).symlink_to(copy / step_name(2))
    assert folders.steps(copy) == [2, 1]
    with pytest.warns(UserWarning, match="step-00000003 is a link, which is not followed"):
        assert runs.load(copy) == 2
    for place, step in ((copy / step_name(3), None), (copy, 3)):
        with pytest.raises(CheckpointError, match="step-00000003 is a link, which is not followed"):
            whale.load_checkpoint(place, runs.model, step=step, optimizer=runs.optimizer)
    for command, code, said in (
        (["show", copy], 0, "is a link, which is not followed\n"),
        (["verify", copy], 0, "is good"),
        (["verify", copy / step_name(3)], 5, "is a link, which is not followed: give the folder itself"),
    ):
        done = CliRunner().invoke(app, ["checkpoint", *map(str, command)])
        assert done.exit_code == code and said in done.output


# --- owners, values, folders


def test_every_element_has_one_owner_and_loads_are_level() -> None:
    draw = random.Random(0)
    for _ in range(50):
        tensors = {}
        for number in range(draw.randrange(1, 6)):
            rows, columns = draw.randrange(1, 60), draw.randrange(1, 1200)
            cuts = sorted({0, rows, *(draw.randrange(rows + 1) for _ in range(2))})
            dims = [((a, b),) for a, b in pairwise(cuts)]
            parts = {rank: (draw.choice([*dims, ((0, rows),)]), ((0, columns),)) for rank in range(5)}
            parts |= {5 + i: (dim, ((0, columns),)) for i, dim in enumerate(dims)}
            tensors[f"t{number}"] = Held((rows, columns), 4096, parts)
        seen = {name: np.zeros(held.shape, dtype=int) for name, held in tensors.items()}
        load: Counter[int] = Counter()
        for one in written_parts(tensors):
            held = tensors[one.name].parts[one.rank]
            for a, b in one.at[0]:
                assert any(x <= a and b <= y for x, y in held[0]), "a rank writes what it has"
                seen[one.name][a:b] += 1
                load[one.rank] += b - a
        assert all((counts == 1).all() for counts in seen.values())


def test_copies_are_written_in_equal_amounts() -> None:
    both = dict.fromkeys(range(3), (((0, 3000),), ((0, 1024),)))
    tensors = {"large": Held((3000, 1024), 4, both), "own": Held((900, 1024), 4, {0: (((0, 900),), ((0, 1024),))})}
    load: Counter[int] = Counter()
    for one in written_parts(tensors):
        load[one.rank] += sum(b - a for a, b in one.at[0])
    assert load == {0: 1300, 1: 1300, 2: 1300}


def test_parts_that_overlap_are_written_once() -> None:
    parts = {0: (((0, 6),),), 1: (((4, 10),),)}
    found = {(one.at, one.rank) for one in written_parts({"kv": Held((10,), 4, parts)})}
    assert {at for at, _ in found} == {(((0, 4),),), (((4, 6),),), (((6, 10),),)}
    assert {(((0, 4),),), (((6, 10),),)} <= {at for at, rank in found if at[0][0] != (4, 6)}


def test_values_come_back_as_they_were() -> None:
    tensors: Any = []

    def put(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Tensor):
            return None
        tensors.append(value)
        return {"$tensor": len(tensors) - 1}

    state = {
        "none": None,
        "numbers": [1, -2.5, True, 2**70, float("-inf"), 1e-300],
        "tuple": (1, ("a", b"\x00\xff")),
        3: {"deep": Counter({4: 2})},
        "tensor": torch.arange(3),
        "$name": np.float64(0.5),
    }
    back = decoded(json.loads(json.dumps(encoded(state, "state", put))), lambda which: tensors[which])
    assert torch.equal(back.pop("tensor"), state.pop("tensor"))  # type: ignore[arg-type]
    assert back == state and isinstance(back[3]["deep"], Counter) and type(back["$name"]) is float


class Odd:
    """An object of a script, with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_what_files_cannot_hold_is_named(tmp_path: Path) -> None:
    model, _ = run_of()
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for value, said in ((object(), r"odd\['x'\] is a object"), (deep, "levels"), (lambda: 0, "is a function")):
        with pytest.raises(UsageError, match=said):
            whale.save_checkpoint(tmp_path, model, step=1, odd=Odd({"x": value}))
    name = os.fsdecode(b"caf\xe9.txt")
    for state, said in (
        ({"x": [name]}, r"odd\['x'\]\[0\] is 'caf\\udce9.txt', which has half of a surrogate pair"),
        ({name: 1}, r"the key 'caf\\udce9.txt' of odd is .* surrogate pair"),
        ({1: 1, name: 1}, r"odd\['caf\\udce9.txt'\] is .* surrogate pair"),
        ({"x": torch.eye(2).to_sparse()}, r"odd\.0 is a tensor that is torch\.sparse_coo, which files of safetensors"),
        ({"x": torch.empty(2, device="meta")}, r"odd\.0 is a tensor that is on the device meta, which files"),
        ({"x": torch.empty(0, dtype=torch.complex128)}, r"odd\.0 has torch\.complex128, which files"),
        ({"x": -(10**99)}, r"odd\['x'\] is a number of more than 99 digits"),
    ):
        with pytest.raises(UsageError, match=said):
            whale.save_checkpoint(tmp_path, model, step=1, odd=Odd(state))
    calls: tuple[Any, ...] = (partial(whale.save_checkpoint, step=1), whale.load_checkpoint, whale.load_weights)
    for call in calls:
        with pytest.raises(UsageError, match=r"(directory|path) is NoneType None; it must be the path of a f"):
            call(None, model)
    with pytest.raises(UsageError, match="learning_rate is of type float; give objects with state_dict"):
        whale.save_checkpoint(tmp_path, model, step=1, learning_rate=0.1)
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))])
    with pytest.raises(UsageError, match=r"group 0 of optimizer has a parameter of shape \(3,\) that is none of the"):
        whale.save_checkpoint(tmp_path, model, step=1, optimizer=foreign)
    assert not (tmp_path / step_name(1)).exists()


def test_another_model_or_optimizer_is_refused_with_the_difference(runs: Runs) -> None:
    wide = whale.parallelize(
        nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)),
        BATCH,
        loss_fn=lambda output, batch: output.square().mean(),
        device="cpu",
    )
    with pytest.raises(CheckpointError, match=r"model\.0\.weight has shape \(5, 6\) .* \(7, 6\)"):
        whale.load_checkpoint(runs.directory, wide, optimizer=torch.optim.AdamW(wide.parameters()))
    with pytest.raises(CheckpointError, match="has the state of AdamW as optimizer, but SGD was given"):
        whale.load_checkpoint(runs.directory, runs.model, optimizer=torch.optim.SGD(runs.model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.AdamW(runs.model.parameters()), 2)
    with pytest.raises(CheckpointError, match="has the state of AdamW as optimizer, but an object was given"):
        whale.load_checkpoint(runs.directory, runs.model, optimizer=scheduler)
    with pytest.raises(CheckpointError, match="has the states of optimizer beside the model, but none were given"):
        whale.load_checkpoint(runs.directory, runs.model)
    assert whale.load_checkpoint(runs.directory, runs.model, strict=False) is not None


def test_the_state_of_another_schedule_is_refused(runs: Runs, tmp_path: Path) -> None:
    schedules = torch.optim.lr_scheduler
    steps, cosine = schedules.StepLR(runs.optimizer, 2), schedules.CosineAnnealingLR(runs.optimizer, 10)
    before = cosine.state_dict()
    whale.save_checkpoint(tmp_path, runs.model, step=1, asynchronous=False, scheduler=steps)
    with pytest.raises(CheckpointError, match=r"has no T_max, eta_min in the state of scheduler, which a CosineAnn"):
        whale.load_checkpoint(tmp_path, runs.model, scheduler=cosine)
    assert cosine.state_dict() == before
    whale.load_checkpoint(tmp_path, runs.model, scheduler=cosine, strict=False)
    assert cosine.step_size == 2  # type: ignore[attr-defined]


MAKERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "python": lambda: random.Random(3),
    "PCG64": lambda: np.random.default_rng(3),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "Philox": lambda: np.random.Generator(np.random.Philox(3)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(3)),
    "RandomState": lambda: np.random.RandomState(3),
}


def drawn(own: Mapping[str, Any]) -> list[float]:
    """A number of each generator of a script, and of those of the process."""
    draws = [torch.rand((), generator=g).item() if isinstance(g, torch.Generator) else g.random() for g in own.values()]
    return [*draws, torch.rand(()).item(), random.random(), float(np.random.rand())]


def test_generators_of_random_numbers_go_on(runs: Runs, tmp_path: Path) -> None:
    own = {name: make() for name, make in MAKERS.items()}
    drawn(own)
    whale.save_checkpoint(tmp_path, runs.model, step=1, asynchronous=False, **own)
    expected = [drawn(own) for _ in range(3)]
    other = {name: make() for name, make in MAKERS.items()}
    whale.load_checkpoint(tmp_path, runs.model, **other)
    assert [drawn(other) for _ in range(3)] == expected


def test_a_state_that_an_object_refuses_is_named(runs: Runs, tmp_path: Path) -> None:
    whale.save_checkpoint(tmp_path, runs.model, step=1, asynchronous=False, draws=np.random.default_rng(3))
    before = values(runs.model, runs.optimizer)
    with pytest.raises(CheckpointError, match=r"draws refuses its state in .*step-00000001: KeyError: 'torch'"):
        whale.load_checkpoint(tmp_path, runs.model, draws=torch.Generator())
    assert same(values(runs.model, runs.optimizer), before)


def test_a_full_disk_leaves_the_last_good_one(runs: Runs, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whale.checkpoint.writer.os.write", full)
    whale.save_checkpoint(copy, runs.model, step=3, optimizer=runs.optimizer)
    with pytest.raises(CheckpointError, match=r"step 3 in .* was not saved: rank 0: No space left on device"):
        whale.wait_for_checkpoints()
    monkeypatch.undo()
    assert runs.load(copy) == 2
    assert sorted(path.name for path in copy.iterdir()) == [".lock", step_name(1), step_name(2)]


def test_what_a_killed_save_left_is_no_checkpoint_and_is_deleted(runs: Runs, copy: Path) -> None:
    half = copy / f".{step_name(3)}.0f.part"
    shutil.copytree(copy / step_name(2), half)
    assert runs.load(copy) == 2
    whale.save_checkpoint(copy, runs.model, step=4, optimizer=runs.optimizer, asynchronous=False)
    assert not half.exists()


def test_a_rank_file_is_one_of_safetensors(runs: Runs) -> None:
    with safe_open(runs.directory / step_name(2) / "rank-00000.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    for name, tensor in runs.values[2].items():
        if " of " not in name:
            assert torch.equal(found[f"model.{name}"], tensor)


def test_parts_of_a_checkpoint_are_read_alone(runs: Runs) -> None:
    with Reader(runs.directory / step_name(2)) as reader:
        key = Key("model", "", "0.weight")
        assert reader.form(key) == ("F32", (5, 6))
        found = reader.read(key, (((1, 2), (4, 5)), ((0, 3),))).view(np.float32)
        expected = runs.values[2]["0.weight"].numpy()[[1, 4], :3]
        assert (found == expected).all()
        assert reader.verify() > 0


POINTS = ("mkdir", "write", "fsync", "rename", "ftruncate")


def saves_until(directory: Path, runs: Runs, calls: int) -> bool:
    """Whether a save in a process of its own ends, which is killed before one of its calls of the system."""
    if (child := os.fork()) == 0:
        left = calls

        def counted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        for name in POINTS:
            setattr(os, name, partial(counted, getattr(os, name)))
        whale.save_checkpoint(directory, runs.model, step=3, keep=2, optimizer=runs.optimizer, asynchronous=False)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


def test_a_kill_at_any_point_of_a_save_leaves_a_good_checkpoint(runs: Runs, copy: Path) -> None:
    whale.load_checkpoint(copy, runs.model, step=2, optimizer=runs.optimizer)
    trained(runs.model, runs.optimizer)
    runs.values[3] = values(runs.model, runs.optimizer)
    found = []
    for calls in range(100):
        if saves_until(copy, runs, calls):
            break
        found.append(runs.load(copy))
        whale.load_checkpoint(copy, runs.model, step=2, optimizer=runs.optimizer)
        trained(runs.model, runs.optimizer)
    assert len(found) > 8
    assert set(found) == {2, 3}
    assert sorted(path.name for path in copy.iterdir()) == [".lock", step_name(2), step_name(3)]


GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-version-1"
"""Saved by two ranks that divide matrices, after two steps; see `tests.distributed.test_checkpoint_states`."""


def test_a_checkpoint_of_version_1_is_read(tmp_path: Path) -> None:
    with Reader(GOLDEN / step_name(2)) as reader:
        assert reader.verify() > 0
        assert reader.manifest.step == 2
        assert len(reader.manifest.indexes) == 2
        expected = json.loads((GOLDEN / "expected.json").read_text())
        found = {
            str(key): reader.read(key).view(np.float64).reshape(-1).tolist()
            for key in reader.parts
            if reader.form(key)[0] == "F64"  # type: ignore[index]
        }
        assert found == expected


def test_a_second_job_does_not_save_to_the_directory(runs: Runs, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_LOCK_SECONDS", 0.1)
    ready, done = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        folders.begin(copy, 3)
        os.write(ready[1], b".")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(CheckpointError, match=rf"process {child} on .* saves checkpoints here"):
        whale.save_checkpoint(copy, runs.model, step=3, optimizer=runs.optimizer, asynchronous=False)
    os.write(done[1], b".")
    os.waitpid(child, 0)
    whale.save_checkpoint(copy, runs.model, step=3, optimizer=runs.optimizer, asynchronous=False)
    assert folders.steps(copy) == [3, 2]


def test_steps_that_no_name_has_are_refused(runs: Runs, copy: Path) -> None:
    for call in (whale.save_checkpoint, whale.load_checkpoint):
        with pytest.raises(UsageError, match=rf"step={10**18}: it must be at most {10**18 - 1}"):
            call(copy, runs.model, step=10**18, optimizer=runs.optimizer)
    whale.save_checkpoint(copy, runs.model, step=10**18 - 1, optimizer=runs.optimizer, asynchronous=False)
    done = whale.load_checkpoint(copy, runs.model, optimizer=runs.optimizer)
    assert done is not None and done.step == 10**18 - 1
    assert not any(map(is_step_name, ("step-000000002", "step-2", f"step-{10**18}")))


def test_what_could_not_be_loaded_again_replaces_nothing(
    runs: Runs, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whale.checkpoint.format.MAX_MANIFEST_BYTES", 10_000)
    with pytest.raises(
        CheckpointError, match=r"step 3 .* was not saved: .* bytes in manifest.json, which is read up to"
    ):
        whale.save_checkpoint(copy, runs.model, step=3, keep=1, odd=Odd("x" * 10_000), asynchronous=False)
    monkeypatch.undo()
    monkeypatch.setattr("whale.ir.json_reader.MAX_JSON_VALUES", 300)
    with pytest.raises(CheckpointError, match=r"not saved: .*it could not be loaded again: .* more than 300 values"):
        whale.save_checkpoint(copy, runs.model, step=3, keep=1, odd=Odd([0] * 300), asynchronous=False)
    assert folders.steps(copy) == [2, 1]


def test_a_checkpoint_under_the_name_of_another_step_is_refused(runs: Runs, copy: Path) -> None:
    (copy / step_name(2)).rename(copy / step_name(9))
    said = r"step-00000009 has the checkpoint of step 2: it was renamed or copied; give it the name step-00000002"
    with pytest.warns(UserWarning, match=said):
        assert runs.load(copy) == 1
    with pytest.raises(CheckpointError, match=said):
        whale.load_checkpoint(copy, runs.model, step=9, optimizer=runs.optimizer)


@pytest.mark.parametrize("place", [0, 6, 7, 8, 20, 40, "end of the header"])
def test_each_byte_of_a_header_is_verified(copy: Path, place: int | str) -> None:
    file = copy / step_name(2) / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    where = 7 + int.from_bytes(content[:8], "little") if isinstance(place, str) else place
    content[where] ^= 1
    file.write_bytes(content)
    with Reader(copy / step_name(2)) as reader, pytest.raises(CheckpointError, match="its header is not that of the"):
        reader.verify()


def test_bytes_that_are_of_no_part_are_found(copy: Path) -> None:
    index = json.loads((copy / step_name(2) / "rank-00000.json").read_text())
    file = copy / step_name(2) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    forged(copy, index={"bytes": index["bytes"] + 4})
    with (
        Reader(copy / step_name(2)) as reader,
        pytest.raises(CheckpointError, match=r"its parts end at \d+ of "),
    ):
        reader.verify()


def test_a_tensor_of_which_no_rank_has_a_part_is_missed(runs: Runs, copy: Path, tmp_path: Path) -> None:
    index = json.loads((copy / step_name(2) / "rank-00000.json").read_text())
    forged(copy, index={"parts": [one for one in index["parts"] if one["name"] != "0.bias" or one["of"] != "model"]})
    with Reader(copy / step_name(2)) as reader:
        for call in (reader.verify, lambda: export(reader, tmp_path / "out", 10**9)):
            with pytest.raises(CheckpointError, match=r"step-00000002 has no part of 0.bias of model, which manifest"):
                call()
    with pytest.raises(CheckpointError, match="has no model.0.bias"):
        runs.load(copy)


def test_tensors_without_elements_are_those_of_no_part(tmp_path: Path) -> None:
    local = nn.Linear(6, 1)
    local.register_buffer("none", torch.empty(0, 3, dtype=torch.float64))
    model = whale.parallelize(local, BATCH, loss_fn=lambda output, batch: output.square().mean(), device="cpu")
    whale.save_checkpoint(tmp_path, model, step=1, asynchronous=False)
    assert whale.load_checkpoint(tmp_path, model) is not None
    with Reader(tmp_path / step_name(1)) as reader:
        assert reader.verify() > 0
        assert export(reader, tmp_path / "out", 10**9).num_tensors == 3
    found = load_file(tmp_path / "out" / "model.safetensors")["none"]
    assert found.shape == (0, 3) and found.dtype == torch.float64
    whale.load_weights(tmp_path / "out", model)
    whale.load_weights(tmp_path, model)


def test_a_tensor_without_elements_comes_back(runs: Runs, tmp_path: Path) -> None:
    state = {"seen": [torch.empty(0, 3, dtype=torch.int32), torch.ones(2)]}
    own = Odd()
    whale.save_checkpoint(tmp_path, runs.model, step=1, odd=Odd(state), asynchronous=False)
    whale.load_checkpoint(tmp_path, runs.model, odd=own)
    assert own.state["seen"][0].shape == (0, 3) and own.state["seen"][0].dtype == torch.int32
    assert torch.equal(own.state["seen"][1], torch.ones(2))
    for wrong in (["F32"], ["F32", 2], ["O", 0], ["F32", 0, -1], ["F32", 0, True], [[], 0], 3):
        with pytest.raises(CheckpointError, match=r"a state has \$empty: .*, which this Whale does not know"):
            decoded({"$empty": wrong}, lambda which: which)


def test_dicts_keep_the_order_of_their_keys(runs: Runs, tmp_path: Path) -> None:
    weights = {"wiki": 1, "books": 2, "arxiv": 3}
    state = {"weights": weights, "counts": {("b", 1): weights, ("a", 0): 2}, "all": [weights]}
    own = Odd()
    whale.save_checkpoint(tmp_path, runs.model, step=1, odd=Odd(state), asynchronous=False)
    assert whale.load_checkpoint(tmp_path, runs.model, odd=own) is not None
    assert own.state == state
    assert repr(own.state) == repr(state)
    other = dict(sorted(weights.items()))
    assert ObjectState(weights, []).digest() != ObjectState(other, []).digest(), "ranks have orders of their own"
