"""Ranges of a step in torch.profiler, and the trace that `whale trace` makes of those of two ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch.profiler import ProfilerActivity, profile

import whale
from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.small_models import decoder, tokens
from whale.cli.app import app
from whale.runtime.launch import World
from whale.runtime.ranges import named

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"": whale.replicate()},
    "split": {"": whale.split()},
    "stages": {"layers.0": whale.stage(), "layers.1": whale.stage()},
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def profiled(world: World, kind: str, folder: str, options: dict[str, Any]) -> Counter[str]:
    """Two profiled steps, exported as a script does; returns how often each range of Whale was there."""
    model = decoder(layers=2)
    whale.annotate(model, LAYOUTS[kind])
    parallel = whale.parallelize(model, tokens(), device="cpu", **options)
    parallel.train_step(tokens())
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        parallel.train_step(tokens())
        parallel.train_step(tokens())
    prof.export_chrome_trace(f"{folder}/rank{world.rank}.json")
    return Counter(event.name for event in prof.events() or () if event.name.startswith("whale: "))


def test_a_profile_of_stages_names_their_tasks_messages_and_waits(worlds: Worlds, tmp_path: Path) -> None:
    options = {"micro_batches": 2, "schedule": "zero_bubble"}
    first, second = worlds.run(2, profiled, "stages", str(tmp_path), options)
    for stage, found in enumerate((first, second)):
        for micro_batch in range(2):
            for task in ("forward", "input backward", "weight backward"):
                assert found[f"whale: {task} stage {stage} micro-batch {micro_batch}"] == 2
    value = next(name.split()[2] for name in first if name.startswith("whale: send "))
    assert first[f"whale: send {value} to rank 1 micro-batch 1"] == 2
    assert second[f"whale: wait for receive {value} from rank 0 micro-batch 1"] == 2
    assert second[f"whale: send gradient of {value} to rank 0 micro-batch 1"] == 2
    assert first[f"whale: wait for receive gradient of {value} from rank 1 micro-batch 1"] == 2
    for name in ("train step", "all-reduce loss", "wait for all-reduce loss"):
        assert first[f"whale: {name}"] == second[f"whale: {name}"] == 2

    traces, output = [f"{tmp_path}/rank{rank}.json" for rank in range(2)], tmp_path / "merged.json"
    result = CliRunner().invoke(app, ["trace", *traces, "-o", str(output)])
    assert result.exit_code == 0 and "clock of" not in result.stderr  # one host has one clock
    events = json.loads(output.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split(", ")[:2] for name in names] == [["rank 0 (stage 0", "cpu"], ["rank 1 (stage 1", "cpu"]]
    for rank, found in enumerate((first, second)):
        own = Counter(event["name"] for event in events if event["pid"] == 2 * rank + 1)
        assert all(own[name] == count for name, count in found.items())


def test_a_profile_names_the_collectives_of_gradients_and_inside_stages(worlds: Worlds, tmp_path: Path) -> None:
    for found in worlds.run(2, profiled, "replicate", str(tmp_path), {}):
        assert found["whale: all-reduce bucket 0"] == found["whale: wait for all-reduce bucket 0"] == 2
    for found in worlds.run(2, profiled, "split", str(tmp_path), {}):
        assert found["whale: all-reduce linear_2"] == found["whale: all-reduce gradient of gelu"] == 2


def test_a_range_is_not_named_without_a_profiler() -> None:
    class Unnamed:
        def __str__(self) -> str:
            raise AssertionError("a name is made")

    with named("send %s", Unnamed()):
        pass
    with pytest.raises(AssertionError, match="a name is made"), profile(), named("send %s", Unnamed()):
        pass
