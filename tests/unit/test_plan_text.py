"""Text output of a plan: above all the commands that run it."""

import shlex
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from whale.cli.plan_text import command
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan


def lines_of(*devices: int) -> list[str]:
    card = Cluster.homogeneous(1).devices[0].type
    cluster = Cluster.of([(f"node{node}", card) for node, count in enumerate(devices) for _ in range(count)])
    return command(Plan(world_size=sum(devices)), cluster, Path("plan.json")).splitlines()


@pytest.mark.parametrize(
    ("devices", "runs"),
    [((8,), [(0, 0)]), ((2, 2), [(0, 1)]), ((8, 8, 2), [(0, 1), (2, 2)]), ((4, 1, 4), [(0, 0), (1, 1), (2, 2)])],
)
def test_every_kind_of_node_has_a_command_that_is_complete(
    devices: tuple[int, ...], runs: list[tuple[int, int]]
) -> None:
    lines = lines_of(*devices)
    commands = [line.partition("#")[0] for line in lines if line.startswith("torchrun")]
    assert len(commands) == len(runs)
    for text, (first, last) in zip(commands, runs, strict=True):
        given = parse_args(shlex.split(text.replace("NODE_RANK", str(last)))[1:])
        assert given.nproc_per_node == str(devices[first])
        assert given.training_script == "train.py"
        if len(devices) > 1:
            assert (given.nnodes, given.node_rank, given.master_addr) == (str(len(devices)), last, "HOST")
    assert "plan='plan.json'" in lines[-1]
    assert ("NODE_RANK" in "".join(commands)) == any(first != last for first, last in runs)
