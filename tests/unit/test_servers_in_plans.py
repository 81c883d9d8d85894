"""Parameter servers in plans: whole parameters of the ranks that own them, and the price of the busiest link."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

import whale
from tests.unit.test_precision_in_plans import GIVEN
from whale.cli.app import app
from whale.ir.plan import Plan
from whale.ir.state import StateSharding
from whale.ir.strategy import parse_strategy

CLUSTER = """
links = {inter_node = {bandwidth = "1 Gbit/s", latency = "50 us"}}
[[nodes]]
count = 4
devices = 1
device = "cpu-part"
[device_types.cpu-part]
speed = {float32 = "50 GFLOP/s"}
memory = "8 GiB"
memory_bandwidth = "10 GB/s"
"""


def made(folder: Path, *arguments: str) -> Plan:
    cluster = folder / "cluster.toml"
    cluster.write_text(CLUSTER, encoding="utf-8")
    asked = ["plan", *GIVEN, "--batch", "8", "--stages", "1", "--cluster", str(cluster), "-q", "--json", *arguments]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    return Plan.parse(done.stdout)


def summed(plan: Plan) -> float:
    """The seconds of a plan's sums of gradients."""
    assert plan.workload is not None
    return sum(one.seconds for one in plan.workload.reductions)


def test_a_plan_has_the_servers_and_the_price_of_their_links(tmp_path: Path) -> None:
    rows = made(tmp_path, "--zero", "1")
    plan = made(tmp_path, "--reduce", "server", "--state-shares", "1,0,0,0")
    (stage,) = plan.stages
    assert stage.reduce == "server" and stage.state is not None
    assert (stage.state.level, stage.state.shares, stage.state.align) == (1, (1, 0, 0, 0), "parameter")
    assert 3.5 < summed(plan) / summed(rows) < 4.1  # three times the gradients in place of three quarters of them
    assert made(tmp_path, "--reduce", "server", "--staleness", "2").staleness == 2


def test_servers_own_whole_parameters() -> None:
    strategy = whale.replicate(reduce="server", state_shares=[2, 1]).strategy
    assert strategy.state == StateSharding(1, (2, 1), "parameter")
    assert parse_strategy(str(strategy)) == strategy
    assert whale.stage(2, reduce="server", zero=3).strategy.state == StateSharding(3, (), "row")
