"""Scores of partial plans are what their layouts on ranks take: else the best are never laid out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.chains import card, chain, layer
from whale.ir.cluster import Cluster, Link
from whale.ir.profile import Affine, Amount, ModelProfile, Skip
from whale.planner.cost.stage import CostModel
from whale.planner.search.layout import laid_out
from whale.planner.search.partial_plans import PartialPlan, score_partial
from whale.planner.search.problem import Candidate
from whale.planner.search.space import Chain, Mesh, pools_of
from whale.planner.search.table import CostTable
from whale.planner.simulation.recurrence import long_timing

FAST, SLOW = card("fast"), card("slow")
INTRA, INTER = Link(bandwidth=1e10, latency=1e-6), Link(bandwidth=1e8, latency=1e-6)
SECONDS = {FAST.name: 0.001, SLOW.name: 0.002}
BATCH = 12


def model(*, output: float = 1e4, update: float = 1e-4, parameters: float = 1e6, tied: bool = False) -> ModelProfile:
    """Six layers."""
    kind = layer(SECONDS, degrees=(1, 2), output=output, parameters=parameters)
    measured = tuple(one.model_copy(update={"update": (update, update)}) for one in kind.measured)
    found = chain([kind.model_copy(update={"measured": measured})], (0,) * 6)
    return found.model_copy(update={"tied": (((0, 5), 5e5),)}) if tied else found


def encoder_and_decoder(output: float) -> ModelProfile:
    """Two layers, whose output all four that follow read."""
    kinds = [layer(SECONDS, output=size, name=name) for name, size in (("a", output), ("b", output), ("c", 2 * output))]
    skip = Skip(layer=1, size=Amount(bytes=Affine(0, output)), readers=(2, 3, 4, 5))
    return chain(kinds, (0, 1, 2, 2, 2, 2)).model_copy(update={"skips": (skip,)})


def nodes(*counts: int) -> Cluster:
    """Nodes with as many fast devices each."""
    return Cluster.of(
        [(f"node{at}", FAST) for at, count in enumerate(counts) for _ in range(count)], intra=INTRA, inter=INTER
    )


def two_networks() -> Cluster:
    """Two nodes, of which the second has a hundredth of the bandwidth of the first."""
    fast = Link(bandwidth=100 * INTER.bandwidth, latency=INTER.latency)
    cluster = Cluster.of([("node0", FAST), ("node1", SLOW)], intra=INTRA, inter=fast)
    first, second = cluster.nodes
    return replace(cluster, nodes=(first, replace(second, inter=INTER)))


@dataclass(frozen=True)
class Case:
    """A partial plan of a model on a cluster."""

    model: ModelProfile
    cluster: Cluster
    meshes: tuple[Mesh, ...]
    starts: tuple[int, ...]
    micro_batches: int = 1

    def scored_and_laid_out(self) -> tuple[float, Candidate]:
        """Its seconds of a step, and its layout."""
        prices = CostModel.of(self.model, self.cluster, precision="fp32", optimizer="adamw", batch=BATCH)
        table = CostTable(prices=prices, pools=pools_of(self.cluster), chain=Chain.of((), 6, None))
        plan = PartialPlan(meshes=self.meshes, starts=self.starts, micro_batches=self.micro_batches, schedule="1f1b")
        return score_partial(table, plan, BATCH).timed.seconds, laid_out(table, plan, BATCH)


ONE, TWO, GROUP = Mesh((1,), 1), Mesh((2,), 1), Mesh((2,), 2)

CASES = {
    "messages wait for their link": Case(model(output=1e6), nodes(1, 1), (ONE, ONE), (0, 3), 6),
    "the slower of two networks": Case(
        model(output=1e5), two_networks(), (Mesh((1, 0), 1), Mesh((0, 1), 1)), (0, 3), 3
    ),
    "groups of two in nodes of three": Case(model(), nodes(3, 3), (Mesh((4,), 2),), (0,)),
    "a group beside a device of its node": Case(model(output=1e6), nodes(3, 3), (ONE, GROUP), (0, 2), 4),
    "a stage within a node": Case(model(), nodes(2, 2, 2), (ONE, TWO), (0, 2), 2),
    "tied parameters of the first stage and the last": Case(
        model(tied=True), nodes(1, 1, 1, 2), (ONE, ONE, ONE, TWO), (0, 1, 2, 3), 4
    ),
    "an encoder sends to all later stages": Case(encoder_and_decoder(5e4), nodes(2, 2), (ONE,) * 4, (0, 1, 3, 4)),
    "gradients on their way before a long update": Case(
        model(output=1e6, update=0.02), nodes(1, 1), (ONE, ONE), (0, 1)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_partial_plan_takes_what_its_layout_does(case: Case) -> None:
    scored, laid = case.scored_and_laid_out()
    assert scored == pytest.approx(laid.prediction.step_seconds, rel=0.02)


@pytest.mark.parametrize(("counts", "starts"), [((1, 1, 1), (0, 2, 4)), ((1, 2, 1), (0, 1, 3, 4))])
def test_messages_both_ways_share_the_adapter_of_a_node(counts: tuple[int, ...], starts: tuple[int, ...]) -> None:
    case = Case(model(output=5e5), nodes(*counts), (ONE,) * len(starts), starts, 6)
    scored, laid = case.scored_and_laid_out()
    assert scored == pytest.approx(long_timing(laid.workload).seconds, rel=0.01)  # the simulator shares links in time


def nodes_of(cluster: Cluster, candidate: Candidate) -> list[int]:
    """How many nodes each stage lies in."""
    return [len({cluster.node_of(rank).name for rank in stage.ranks}) for stage in candidate.stages]


def test_stages_of_a_plan_that_leaves_devices_idle_lie_within_nodes() -> None:
    case = CASES["a stage within a node"]
    assert nodes_of(case.cluster, case.scored_and_laid_out()[1]) == [1, 1]


@pytest.mark.parametrize(("output", "parameters", "apart"), [(1e6, 1e3, 2), (1e3, 1e6, 1)])
def test_replicas_lie_in_one_node_if_their_sums_take_longer_than_messages(
    output: float, parameters: float, apart: int
) -> None:
    """Half of the messages of replicas in two nodes stay within nodes."""
    cluster = nodes(2, 2)
    case = Case(model(output=output, parameters=parameters), cluster, (ONE, TWO, ONE), (0, 1, 5), 2)
    assert nodes_of(cluster, case.scored_and_laid_out()[1]) == [1, apart, 1]
