"""The experiment driver of nestings: every nesting that the repository brings compiles, and two of them are run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.distributed.scripts import run_script
from whale.ir.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "nested_hybrid"
LAB = """
[links]
inter_node = {bandwidth = "1 GB/s", latency = "100 us"}
[[nodes]]
devices = 1
device = "cpu-fast"
[[nodes]]
devices = 1
device = "cpu-slow"
[device_types]
cpu-fast = {speed = {float32 = "20 GFLOP/s"}, memory = "4 GiB", memory_bandwidth = "5 GB/s"}
cpu-slow = {speed = {float32 = "10 GFLOP/s"}, memory = "4 GiB", memory_bandwidth = "5 GB/s"}
"""
EXPERIMENT = f"""
model = "{ROOT}/examples/models/gpt.py:gpt"
batch = 6
settings = {{layers = 3, hidden = 48, heads = 6, seq = 16, vocab = 96, dropout = 0.0}}
[[nestings]]
name = "replicate, then split"
annotations = {{"" = "replicate()", "layers.2" = "split()"}}
[[nestings]]
name = "pipeline"
micro_batches = 3
annotations = {{"layers.[0-1]" = "stage()", "layers.2" = "stage()"}}
"""


def run(*arguments: str, ranks: int = 0) -> str:
    done = run_script(str(FOLDER / "run.py"), *arguments, ranks=ranks, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_nestings_are_predicted_measured_and_equal_to_the_local_step(tmp_path: Path) -> None:
    experiment, cluster, folder = tmp_path / "two_nestings.toml", tmp_path / "lab.toml", tmp_path / "out"
    experiment.write_text(EXPERIMENT)
    cluster.write_text(LAB)
    files = ("--cluster", str(cluster), "--folder", str(folder))
    text = run("measure", str(experiment), *files, "--repeats", "2", "--small", ranks=2)
    rows = {line.split(" | ")[0].lstrip("| "): line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
    assert list(rows)[1:] == ["replicate, then split", "pipeline"]
    parity = json.loads((folder / "parity.json").read_text())
    assert list(parity) == ["replicate, then split", "pipeline"]
    assert max(parity.values()) < 1e-9
    measured = json.loads((folder / "measured.json").read_text())
    for name, row in list(rows.items())[1:]:
        least, most = (float(share) for share in re.findall(r"([+-][0-9.]+)%", row[6]))
        assert -2 < least <= most < 25, "memory; messages count for much in a model this small"
        assert 0 < measured[name]["bubble"] < 1 or name != "pipeline"
        assert measured[name]["sent"] > 0
    shares = [Plan.load(path) for path in sorted(folder.glob("*.plan.json"))]
    assert [plan.micro_batches for plan in shares] == [1, 3]
    names = [text.text for text in ElementTree.parse(folder / "two_nestings.svg").iter() if text.text]
    assert {"pipeline", "predicted", "measured"} <= set(names)


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_the_nestings_that_come_along_are_at_least_ten_different_plans(name: str) -> None:
    experiment = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    plans = {
        one["name"]: Plan(
            world_size=6,
            batch=experiment["batch"],
            micro_batches=one.get("micro_batches", 1),
            schedule=one.get("schedule", "1f1b"),
            annotations=one["annotations"],
        )
        for one in experiment["nestings"]
    }
    assert len(plans) == len(experiment["nestings"]) >= 10
    assert len({plan.dumps() for plan in plans.values()}) == len(plans)
    assert (
        sum(any(text.startswith("stage") for own in p.annotations.values() for text in own) for p in plans.values())
        >= 5
    )
