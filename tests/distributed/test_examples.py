"""The examples run as a newcomer runs them, and end with the losses of one process; the first is parallel by three
lines."""

from __future__ import annotations

import ast
import difflib
import gzip
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
QUICKSTART = EXAMPLES / "quickstart.py"


def body(name: str) -> list[str]:
    """The lines of a function of the example, without comments."""
    tree = ast.parse(QUICKSTART.read_text())
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return [line for statement in function.body for line in ast.unparse(statement).splitlines()]


def test_the_quickstart_has_at_most_sixty_lines() -> None:
    assert len(QUICKSTART.read_text().splitlines()) <= 60


def test_parallel_training_is_three_lines_of_whale_and_six_lines_of_difference_at_most() -> None:
    difference = [
        line for line in difflib.ndiff(body("train_alone"), body("train_in_parallel")) if line.startswith(("+ ", "- "))
    ]
    added = [line for line in difference if line.startswith("+")]
    assert len(added) == 3
    assert len(difference) + 1 <= 6  # one more: import whale
    assert sum("whale." in line or "train_step" in line for line in added) == 3


def run(size: int, name: str, *arguments: str) -> str:
    """Output of an example, in one process or on ranks."""
    done = run_script(str(EXAMPLES / name), *arguments, ranks=size if size > 1 else 0)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_under_torchrun(size: int, name: str, *arguments: str, restarts: int = 0) -> str:
    """Output of an example that an agent starts, as a newcomer starts it, except that its ranks are forked."""
    launcher = ("--standalone", f"--nproc-per-node={size}", f"--max-restarts={restarts}")
    command = ("-m", "torch.distributed.run", *launcher, str(EXAMPLES / name), *arguments)
    done = run_script(*command, forks_ranks=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r": loss ([0-9.]+)", text)]


def test_scripts_keep_their_captures(tmp_path: Path) -> None:
    (tmp_path / "names.py").write_text("import whale.api\nprint(whale.api.trace.__name__)")
    assert run_script(str(tmp_path / "names.py")).stdout == "traced_once\n"


@pytest.mark.slow
def test_a_run_goes_on_after_a_rank_was_killed() -> None:
    text = run_under_torchrun(2, "resume.py", "--crash", "5", restarts=1)
    began = re.search(r"attempt 2 began at step (\d)", text)
    assert began is not None
    assert int(began[1]) in (2, 4), "the newest complete one"
    assert "curves after the load, and under another plan: equal to 1e-9" in text


def test_experts_are_whole_on_ranks_and_cut_over_them_with_the_same_losses() -> None:
    text = run(3, "whole_experts.py", "--model", "qwen3_moe", "--steps", "2")
    held = [re.search(rf"experts whole: rank {rank} of 3 has \((\d)", text) for rank in range(3)]
    assert [found and int(found[1]) for found in held] == [3, 3, 2]
    assert text.count("apart by at most") == 2
    assert len((EXAMPLES / "whole_experts.py").read_text().splitlines()) <= 60


def test_less_is_kept_with_the_same_losses() -> None:
    text = run(2, "low_memory.py")
    assert "recompute: losses equal; zero: equal to 1e-6; bfloat16: near float32" in text
    shares = [int(share) for share in re.findall(r"\( *(\d+)%\)", text)]
    kept, state = shares[::2], shares[1::2]
    assert len(kept) == 8 and kept[0] == state[0] == 100
    assert kept[2] < 30 and kept[6] < 25
    assert state[3] < 65 and state[4] < 52 and state[7] < 52


def test_the_quickstart_finds_its_losses_equal() -> None:
    assert "parity on 1 ranks: losses equal" in run(1, "quickstart.py")
    assert "parity on 2 ranks: losses equal" in run_under_torchrun(2, "quickstart.py")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("classification_100k.py", r"head.weight is \(1000, 2048\)"),
        ("moe.py", r"blocks.0.experts.up is \(2, 32, 128\)"),
    ],
)
def test_a_hybrid_has_the_losses_of_one_process_and_each_rank_its_part_of_the_weights(name: str, part: str) -> None:
    text = run(2, name)
    assert "parity on 2 ranks: losses equal" in text
    assert len(re.findall(part, text)) == 2


@pytest.mark.parametrize(
    "arguments",
    [("--layout", "hybrid"), ("--model", "gpt2", "--layout", "pp", "--micro-batches", "2")],
    ids=" ".join,
)
def test_an_architecture_of_hugging_face_has_the_losses_of_one_process(arguments: tuple[str, ...]) -> None:
    assert "parity on 2 ranks: losses equal" in run(2, "huggingface.py", "--steps", "3", *arguments)


def test_the_learning_curve_of_two_ranks_is_that_of_one() -> None:
    one, two = (losses(run(size, "mnist.py")) for size in (1, 2))
    assert len(one) == 120
    assert two == pytest.approx(one, rel=1e-9)
    for curve in (one[:60], one[60:]):  # and something was learnt
        assert sum(curve[-10:]) < sum(curve[:10]) / 2


def write_digits(folder: Path, size: int = 16, label: int = 9, labels: int = 48) -> Path:
    """Files as MNIST's: the images compressed, the labels not."""
    folder.mkdir(exist_ok=True)
    pixels = bytes(i * 7 % 256 for i in range(48 * size * size))
    with gzip.open(folder / "train-images-idx3-ubyte.gz", "wb") as images:
        images.write(struct.pack(">4i", 0x803, 48, size, size) + pixels)
    numbers = bytes(i % (label + 1) for i in range(labels))
    (folder / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, labels) + numbers)
    return folder


def test_the_digits_of_mnist_are_read_from_its_files(tmp_path: Path) -> None:
    text = run(2, "mnist.py", "--data", str(write_digits(tmp_path)), "--steps", "3")
    assert "parity on 2 ranks: losses equal" in text
    assert len(losses(text)) == 6


def refused(folder: Path) -> str:
    done = run_script(str(EXAMPLES / "mnist.py"), "--data", str(folder))
    assert done.returncode == 1
    return done.stderr


def test_other_files_than_those_of_mnist_are_refused(tmp_path: Path) -> None:
    assert "has neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz" in refused(tmp_path)
    assert "and 47 labels up to 9" in refused(write_digits(tmp_path, labels=47))
    assert "and 48 labels up to 10" in refused(write_digits(tmp_path, label=10))
    images = gzip.decompress((write_digits(tmp_path) / "train-images-idx3-ubyte.gz").read_bytes())
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images[:-1])
    assert "has 12287 bytes after its header, which says (48, 16, 16)" in refused(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\x89PNG" + images)
    assert "is no IDX file of bytes with 3 dims: it begins with 89504e47" in refused(tmp_path)


def test_a_damaged_compressed_file_is_named(tmp_path: Path) -> None:
    images = write_digits(tmp_path) / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    for damaged in (whole[:-20], whole[:-8] + bytes(8), whole[:12] + bytes(9) + whole[21:], gzip.decompress(whole)):
        images.write_bytes(damaged)
        assert f"{images} is damaged, or no gzip file: " in refused(tmp_path)


@pytest.mark.slow
def test_curves_of_several_numbers_of_ranks_are_one_and_those_of_mistakes_are_others() -> None:
    text = run(1, "mnist.py", "--curves", "2", "--steps", "4")
    assert [float(x) < 1e-12 for x in re.findall(r"largest difference from those of 2: (\S+)", text)] == [True, True]
    last = [line.split() for line in text.splitlines() if line.split()[:1] == ["3"]][-1]
    right, summed, mean = (float(x) for x in last[1:])
    assert summed > right + 0.1
    assert abs(mean - right) > 0.01


@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_with_collectives_has_the_losses_of_one_process(size: int) -> None:
    text = run(size, "collectives.py")
    assert f"parity on {size} ranks: losses equal to 1e-9; rows {[20, 12][:size] if size > 1 else [32]}" in text


def test_the_fused_optimizer_has_the_losses_of_torchs_in_one_process() -> None:
    assert "parity on 2 ranks: losses equal to 1e-9" in run(2, "fused_adamw.py")


def test_a_trillion_parameters_are_compiled_without_allocating_them() -> None:
    text = run(1, "moe.py", "--params", "1T", "--layers", "2")
    assert "83.7 billion parameters in 2 layers of 960 experts, on 480 ranks" in text
    assert "parameters       1.07 GiB" in text  # two of 960 experts in each layer, and the rest
    for direction in ("forward", "backward"):  # from a row to all experts, two places in each, and back, in each layer
        assert f"4 x all_to_all          7.500 MiB over 480 ranks  {direction}" in text
    assert "all 480 ranks meet in every collective" in text


@pytest.mark.parametrize(
    ("size", "name", "arguments"),
    [
        (2, "unet3d.py", ()),
        (2, "unet3d.py", ("--model", "cosmoflow")),
        (2, "long_context.py", ()),
        (1, "long_context.py", ("--length", "50")),
    ],
)
def test_parts_of_one_sample_train_as_the_whole_does(size: int, name: str, arguments: tuple[str, ...]) -> None:
    assert f"parity on {size} ranks: losses and " in (text := run(size, name, *arguments))
    assert " equal to 1e-9" in text


@pytest.mark.parametrize(("format", "module"), [("hdf5", "h5py"), ("zarr", "zarr")])
def test_each_rank_reads_its_slab_of_volumes_in_a_file(format: str, module: str) -> None:
    pytest.importorskip(module, reason=f"volumes in {format} files need {module}")
    assert len((EXAMPLES / "volumes.py").read_text().splitlines()) < 60
    text = run(2, "volumes.py", "--format", format)
    read = [int(voxels) for voxels in re.findall(r"rank 0 read (\d+) of 2560 voxels", text)]
    assert read == [1280] * 3 and "losses equal those of whole volumes" in text


@pytest.mark.parametrize(
    ("name", "options", "module", "install"),
    [
        ("volumes.py", ["--format", "hdf5"], "h5py", "'whale-parallel[volumes]'"),
        ("volumes.py", ["--format", "zarr"], "zarr", "'whale-parallel[volumes]'"),
        ("ray_train.py", ["--workers", "2"], "ray", "'ray[train]'"),
    ],
)
def test_an_example_says_what_it_needs(name: str, options: list[str], module: str, install: str) -> None:
    path = str(EXAMPLES / name)
    code = f"import runpy, sys; sys.modules[{module!r}] = None; sys.argv = {[path, *options]!r}; "
    code += f"sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_path({path!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"pip install {install}" + ", or --workers 0" * (module == "ray"))
    assert "Traceback" not in done.stderr


def test_a_ring_keeps_less_than_gathered_keys_and_the_same_loss() -> None:
    lines = re.findall(r"(\w+) +loss (\S+), alone (\S+): keeps (\S+) MiB", run(2, "context_parallel.py"))
    assert [way for way, *_ in lines] == ["gather", "ring", "ulysses"]
    assert all(float(loss) == pytest.approx(float(alone), rel=1e-11) for _, loss, alone, _ in lines)
    gathered, ring, heads = (float(size) for *_, size in lines)
    assert ring < 0.8 * gathered
    assert heads < 0.9 * gathered


def test_fine_tuning_is_the_same_alone_and_in_stages_and_is_resumed(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    alone = run(1, "finetune_two_gpus.py", "--out", str(tmp_path / "alone"), "--steps", "15")
    staged = run(2, "finetune_two_gpus.py", "--out", str(tmp_path / "staged"), "--steps", "15", "--stages")
    ends = [re.search(r"eval loss .*\n.*the whale swims .*", text) for text in (alone, staged)]
    assert ends[0] is not None and ends[1] is not None
    assert ends[0][0] == ends[1][0]
    resumed = run(1, "finetune_two_gpus.py", "--out", str(tmp_path / "staged"), "--steps", "16")
    assert "'epoch': '4'" in resumed  # of the sixteenth step alone, with the state of the stages


def test_adasum_learns_with_more_rows_at_the_rate_of_fewer() -> None:
    assert len((EXAMPLES / "adasum.py").read_text().splitlines()) < 60
    text = run(4, "adasum.py")
    mean, adasum = (
        [float(loss) for loss in re.findall(rf"{name} of 4 at .*: loss (\S+)", text)] for name in ("mean", "adasum")
    )
    assert len(mean) == len(adasum) == 12
    assert adasum[-1] < 0.6 * adasum[0]
    assert adasum[-1] < mean[-1]  # with eight ranks the mean diverges: benchmarks/adasum.py


def test_servers_have_the_losses_of_an_all_reduce_and_a_hook_approximates() -> None:
    assert len((EXAMPLES / "sums.py").read_text().splitlines()) < 60
    found = re.findall(r"([a-zA-Z -]+): rank \d of 2 steps (\d+) elements, last loss (.*)", run(2, "sums.py"))
    losses: dict[str, set[str]] = {}
    for way, _, loss in found:
        losses.setdefault(way, set()).add(loss)
    assert {way: len(own) for way, own in losses.items()} == dict.fromkeys(
        ("all-reduce", "servers", "late servers", "PowerSGD"), 1
    )
    assert losses["servers"] == losses["all-reduce"]
    assert {*losses["late servers"], *losses["PowerSGD"]}.isdisjoint(losses["all-reduce"])
    assert sum(int(elements) for way, elements, _ in found if way == "servers") == 6792  # each parameter on one rank
