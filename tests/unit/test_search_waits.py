"""The larger bound of the search: never above a plan, and near to those for which stages have to wait."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from tests.chains import card, chain, layer
from tests.unit.test_search_bound import meshes_of
from whale.ir.cluster import Cluster, Link
from whale.ir.profile import ModelProfile
from whale.planner.search.bound import Duals, cases_of
from whale.planner.search.choices import Candidate, StageChoice
from whale.planner.search.devices import Mesh
from whale.planner.search.drafts import Draft
from whale.planner.search.evaluate import score
from whale.planner.search.layout import laid_out
from whale.planner.search.meshes import Meshes
from whale.planner.search.slices import Slices
from whale.planner.search.waits import Waits, least_message, raised_seconds

FAST, SLOW = card("fast"), card("slow")
ROOMY = Link(bandwidth=1e12, latency=1e-7)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Parameters of a step's time: of layers, links and rows."""

    parameters: float = 1e3
    output: float = 1e4
    ahead: float = 1 / 3
    slow: float = 0.02
    network: Link = ROOMY
    batch: int = 12
    schedule: str = "1f1b"


TERMS = {
    "work": Terms(),
    "forward": Terms(ahead=0.8),
    "backward": Terms(ahead=0.1),
    "gradients": Terms(parameters=1e7, network=Link(bandwidth=1e9, latency=1e-6)),
    "latency": Terms(parameters=1e5, network=Link(bandwidth=1e9, latency=3e-3)),
    "messages": Terms(output=1e6, network=Link(bandwidth=1e8, latency=1e-6)),
    "ragged": Terms(batch=13),
    "many rows": Terms(batch=150, slow=0.01),
    "long": Terms(batch=60, slow=0.01, output=3e5, network=Link(bandwidth=1e8, latency=1e-6)),
    "ends": Terms(parameters=1e6, network=Link(bandwidth=3e8, latency=1e-6), batch=8),
    "gpipe": Terms(schedule="gpipe", batch=13),
    "gpipe, messages": Terms(
        schedule="gpipe", batch=13, ahead=0.6, output=1e6, network=Link(bandwidth=1e8, latency=1e-6)
    ),
}


def clusters(terms: Terms) -> list[Cluster]:
    nodes = ([("a", FAST)] * 2 + [("b", SLOW)] * 2, [(str(index), FAST) for index in range(5)], [("a", FAST)] * 3)
    return [Cluster.of(own, intra=ROOMY, inter=terms.network) for own in nodes]


def model(terms: Terms, draw: Random) -> ModelProfile:
    kinds = [
        layer(
            {FAST.name: seconds, SLOW.name: terms.slow * seconds / 0.01},
            parameters=terms.parameters,
            output=terms.output,
            ahead=terms.ahead,
        )
        for seconds in (0.01, 0.002)
    ]
    return chain(kinds, [draw.randint(0, 1) for _ in range(draw.randint(2, 6))])


def plans(meshes: Meshes, terms: Terms, draw: Random, num: int) -> list[tuple[Candidate, tuple[Mesh, ...]]]:
    """Some plans that fit: chains of one-type stages, with as many micro-batches as may be."""
    found: list[tuple[Candidate, tuple[Mesh, ...]]] = []
    while len(found) < num:
        free = [len(pool.ranks) for pool in meshes.pools]
        stages = draw.randint(1, min(len(meshes.chain), sum(free)))
        chosen = []
        for left in range(stages, 0, -1):
            pool = draw.choice([index for index, count in enumerate(free) if count])
            most = max(1, min(free[pool], sum(free) - left + 1))
            count = draw.choice([most, draw.randint(1, most)])
            free[pool] -= count
            chosen.append(Mesh(tuple(count * (index == pool) for index in range(len(free))), 1))
        counts = [count for count in range(1, terms.batch + 1) if -(-terms.batch // -(-terms.batch // count)) == count]
        micro_batches = draw.choice(counts)
        if max(mesh.data for mesh in chosen) > meshes.rows(terms.batch, micro_batches):
            continue
        starts = (0, *sorted(draw.sample(range(1, len(meshes.chain)), stages - 1)))
        draft = Draft(meshes=tuple(chosen), starts=starts, micro_batches=micro_batches, schedule=terms.schedule)
        candidate = laid_out(meshes, draft, terms.batch)
        if candidate.prediction.fits:
            found.append((candidate, tuple(chosen)))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", list(TERMS))
def test_chains_that_are_done_in_time_charge_no_more_than_a_plan_that_is(name: str, seed: int) -> None:
    """By any prices; of a plan they are those of its devices. Nor is there anything by which the mean shows more."""
    draw, terms = Random(seed), TERMS[name]
    for cluster in clusters(terms):
        meshes = meshes_of(model(terms, draw), cluster)
        message, slices = 2 * least_message(meshes), Slices.of(meshes, terms.batch)
        for plan, chosen in plans(meshes, terms, draw, 8):
            step = (plan.prediction.step_seconds - plan.workload.overhead) * (1 + 1e-6)
            (case,) = cases_of(meshes, slices, terms.batch, [plan.micro_batches], (terms.schedule,), 2 * step)
            some = [draw.random() for _ in meshes.pools]
            prices = tuple(price / sum(some) for price in some)
            used = [sum(mesh.counts[index] for mesh in chosen) for index in range(len(prices))]
            shares = [num / len(pool.ranks) for num, pool in zip(used, meshes.pools, strict=True)]
            charge = sum(price * share for price, share in zip(prices, shares, strict=True))
            assert Waits(case, message, meshes.largest_node).charge(step, prices) <= charge + 1e-6
            duals = Duals(prices, draw.uniform(-1.5, 0.5), draw.random(), draw.random())
            assert case.shown(step, duals) <= 1e-6


def pipeline(num: int, batch: int, micro_batches: int, output: float, network: Link) -> tuple[float, float]:
    """The larger bound of plans for layers of which a device holds one, each on a node, and the step of a pipeline."""
    type_ = card("fast", gib=0.025)
    profile = chain([layer({type_.name: 0.01}, parameters=1e6, output=output, kept=1e3)], (0,) * num)
    cluster = Cluster.of([(str(index), type_) for index in range(num)], intra=network, inter=network)
    meshes = meshes_of(profile, cluster)
    rows = meshes.rows(batch, micro_batches)
    stages = [
        StageChoice(first=index, last=index + 1, ranks=(index,), data=1, tensor=1, rows=(rows,)) for index in range(num)
    ]
    plan = score(meshes.prices, stages, micro_batches=micro_batches, batch=batch).prediction
    assert plan.fits
    return raised_seconds(
        meshes, batch, [micro_batches], ("1f1b",), least=0.01, known=2 * plan.step_seconds
    ), plan.step_seconds


@pytest.mark.parametrize(("batch", "micro_batches"), [(8, 8), (16, 8), (20, 5), (19, 5)])
@pytest.mark.parametrize("num", [2, 4])
def test_it_is_near_to_a_pipeline_that_no_plan_can_avoid(num: int, batch: int, micro_batches: int) -> None:
    bound, step = pipeline(num, batch, micro_batches, 1e3, ROOMY)
    assert 0.9 * step < bound < step * (1 + 1e-6)


def test_messages_between_nodes_make_a_step_longer() -> None:
    quick, _ = pipeline(4, 16, 16, 1e3, ROOMY)
    bound, step = pipeline(4, 16, 16, 5e5, Link(bandwidth=1e8, latency=1e-6))
    assert 1.3 * quick < bound < step * (1 + 1e-6)
