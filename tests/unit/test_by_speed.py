"""A configuration balanced on mixed devices: cuts and rows from measured layers, and the error if none fits."""

import re
from dataclasses import replace
from itertools import permutations
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale.errors import InfeasibleError
from whale.ir.cluster import Cluster, DeviceType, HostMemory, Link
from whale.ir.profile import Affine, Amount, LayerKind, MeasuredTimes, ModelProfile
from whale.planner.balance.by_speed import Pipeline, cut_problem, cuts_by_speed, pipeline_by_speed, rows_by_speed
from whale.planner.balance.cuts import price
from whale.planner.cost.configuration import Configuration, Layout
from whale.planner.cost.estimate import estimate
from whale.planner.cost.stack import WHALE
from whale.planner.cost.uniform import Stages

GIB = 2**30


def card(name: str, gib: float) -> DeviceType:
    return DeviceType.of(name, speed={"float32": 1e12}, memory_bytes=round(gib * GIB), memory_bandwidth=1e12)


def cluster(fast_gib: float = 64, slow_gib: float = 64) -> Cluster:
    fast, slow = card("fast", fast_gib), card("slow", slow_gib)
    link = Link(bandwidth=1e11, latency=1e-6)
    return Cluster.of([("a", fast)] * 2 + [("b", slow)] * 2, intra=link, inter=link)


def profile(num_layers: int = 12) -> ModelProfile:
    """Equal layers that take 10 ms a row on the fast card, 20 ms on the slow one, and keep 0.5 GiB of a row."""
    times = tuple(
        MeasuredTimes(
            device_type=name,
            tensor_degree=1,
            rows=(1, 64),
            forward=(seconds / 3, seconds / 3 * 64),
            backward=(seconds * 2 / 3, seconds * 2 / 3 * 64),
            update=(0.0, 0.0),
        )
        for name, seconds in (("fast", 0.01), ("slow", 0.02))
    )
    kind = LayerKind(
        name="layer",
        measured=times,
        parameters=1e6,
        activations=Amount(bytes=Affine(0, GIB / 2)),
        output=Amount(bytes=Affine(0, 1e3)),
    )
    return ModelProfile(name="chain", layers=(0,) * num_layers, kinds=(kind,))


def stages(configuration: Configuration, machines: Cluster) -> Stages:
    return Stages.of(profile(), Layout.of(configuration, machines))


def test_replicas_on_slower_devices_get_fewer_rows() -> None:
    found = stages(Configuration(batch=48, micro_batch=6, precision="fp32"), cluster())
    assert rows_by_speed(found, cuts_by_speed(found)) == (8, 8, 4, 4)


def test_stages_on_slower_devices_get_fewer_layers() -> None:
    found = stages(Configuration(batch=16, micro_batch=1, pipeline=4, precision="fp32"), cluster())
    assert [len(part) for part in cuts_by_speed(found)] == [4, 4, 2, 2]
    assert rows_by_speed(found, cuts_by_speed(found)) == (1,)


def test_a_device_with_little_memory_gets_what_it_holds() -> None:
    """By speed the fast cards would have 4 rows of 6 GiB each."""
    configuration = Configuration(batch=12, micro_batch=3, precision="fp32", balance="speed")
    machines = cluster(fast_gib=18)
    found = stages(configuration, machines)
    rows = rows_by_speed(found, cuts_by_speed(found))
    assert 0 < rows[0] < 4 and sum(rows) == 12
    assert estimate(profile(), machines, configuration).prediction.fits
    even = replace(configuration, micro_batch=4, batch=16, balance="even")
    assert not estimate(profile(), machines, even).prediction.fits


def test_an_early_stage_with_little_memory_gets_fewer_layers() -> None:
    configuration = Configuration(batch=32, micro_batch=1, pipeline=4, precision="fp32", balance="speed")
    machines = cluster(fast_gib=7.5)
    parts = cuts_by_speed(stages(configuration, machines))
    assert len(parts[0]) < 4 and sum(map(len, parts)) == 12
    assert estimate(profile(), machines, configuration).prediction.fits
    given = replace(configuration, layers_per_stage=(4, 4, 2, 2), balance="even")
    assert not estimate(profile(), machines, given).prediction.fits


def test_a_balanced_estimate_is_never_slower_than_an_even_one() -> None:
    for degrees in ({"data": 4}, {"pipeline": 4}, {"pipeline": 2, "data": 2}):
        even = Configuration(batch=48, micro_batch=2, precision="fp32", **degrees)  # type: ignore[arg-type]
        times = [
            estimate(profile(), cluster(), replace(even, balance=balance)).prediction.step_seconds
            for balance in ("even", "speed")
        ]
        assert times[1] < times[0]


def test_given_layers_stay_as_they_are() -> None:
    configuration = Configuration(batch=16, pipeline=2, layers_per_stage=(1, 11), balance="speed")
    assert [len(part) for part in cuts_by_speed(stages(configuration, cluster()))] == [1, 11]


def test_processors_have_no_driver_that_takes_memory() -> None:
    """A layer keeps half a GiB of a row, and a driver would take more than the 2 GiB that there are."""
    cpu = DeviceType.of("cpu-50", speed={"float32": 1e12}, memory_bytes=2 * GIB, memory_bandwidth=1e12)
    machines = Cluster.of([("a", cpu)] * 2, intra=Link(bandwidth=1e11, latency=1e-6))
    times = profile().kinds[0].measured[0].model_copy(update={"device_type": cpu.name})
    kind = profile().kinds[0].model_copy(update={"measured": (times,)})
    chain = profile(2).model_copy(update={"kinds": (kind,)})
    layout = Layout.of(Configuration(batch=1, pipeline=2, precision="fp32", balance="speed"), machines)
    assert cuts_by_speed(Stages.of(chain, layout)) == (
        range(1),
        range(1, 2),
    )


def test_what_does_not_fit_is_balanced_by_speed_alone_in_an_estimate_which_says_so() -> None:
    configuration = Configuration(batch=48, micro_batch=12, precision="fp32", balance="speed")
    small = cluster(8, 8)
    with pytest.raises(InfeasibleError) as raised:
        rows_by_speed(stages(configuration, small), (range(12),))
    assert "48 samples do not fit" in str(raised.value) and "fast:0 has 8.00 GiB" in str(raised.value)
    found = estimate(profile(), small, configuration)
    assert list(found.rows) == [16, 16, 8, 8]
    assert not found.prediction.fits
    assert "balanced by speed alone, because it does not fit: 48 samples" in found.assumptions[0]


def test_a_pipeline_that_does_not_fit_is_told_the_largest_micro_batch_that_would() -> None:
    configuration = Configuration(batch=32, micro_batch=16, pipeline=4, precision="fp32")
    with pytest.raises(InfeasibleError) as raised:
        cuts_by_speed(stages(configuration, cluster(12, 12)))
    told = re.search(r"no cut into 4 stages fits.* It would fit with --micro-batch (\d+) \(", str(raised.value))
    assert told is not None
    rows = int(told[1])
    assert sum(map(len, cuts_by_speed(stages(replace(configuration, micro_batch=rows), cluster(12, 12))))) == 12
    with pytest.raises(InfeasibleError):
        cuts_by_speed(stages(replace(configuration, micro_batch=2 * rows), cluster(12, 12)))


def test_a_stage_fits_only_if_it_fits_on_the_smallest_of_its_devices() -> None:
    """The layer is given for tensor degree 1 only; two devices share each of its parts."""
    configuration = Configuration(
        batch=8, micro_batch=4, tensor=2, precision="fp32", device_order=(0, 2, 1, 3), balance="even"
    )
    found = estimate(profile(), cluster(fast_gib=64, slow_gib=8), configuration)
    assert not found.prediction.fits
    assert {device.device for device in found.prediction.memory} == {"slow:2"}


@pytest.mark.parametrize("zero", range(4))
def test_what_is_said_to_fit_does_with_all_that_devices_hold(zero: int) -> None:
    """Buckets of gradients and of parameters, and what an optimizer's step needs, are of no single layer."""
    wide = profile().kinds[0].model_copy(update={"parameters": 3e8, "activations": Amount(bytes=Affine(0, GIB / 16))})
    chain = profile(8).model_copy(update={"kinds": (wide,)})
    configuration = Configuration(
        batch=8, micro_batch=1, pipeline=2, data=2, zero=zero, precision="fp32", balance="speed", stack="whale"
    )
    found = {}
    for gib in range(14, 40, 2):
        estimated = estimate(chain, cluster(gib, gib), configuration)
        found[gib] = estimated.prediction.fits
        assert estimated.prediction.fits != any("does not fit" in text for text in estimated.assumptions)
    assert list(found.values()) == sorted(found.values()) and not found[14] and found[38]


CARDS = {"fast": (0.01, 20.0), "slow": (0.02, 30.0), "small": (0.01, 9.0), "tiny": (0.04, 5.0)}
"""Seconds of a layer and GiB of some types of devices."""


def chain_on_cards() -> ModelProfile:
    kind = profile().kinds[0]
    times = kind.measured[0]
    measured = tuple(
        times.model_copy(
            update={
                "device_type": name,
                "forward": (seconds / 3, seconds / 3 * 64),
                "backward": (seconds * 2 / 3, seconds * 2 / 3 * 64),
            }
        )
        for name, (seconds, _) in CARDS.items()
    )
    return profile().model_copy(update={"kinds": (kind.model_copy(update={"measured": measured}),)})


def on_cards(names: list[str]) -> Cluster:
    link = Link(bandwidth=1e11, latency=1e-6)
    return Cluster.of([(f"{at}", card(name, CARDS[name][1])) for at, name in enumerate(names)], intra=link, inter=link)


def stages_in(names: list[str], order: tuple[int, ...]) -> Stages:
    """The stages of a pipeline of single devices in an order."""
    configuration = Configuration(
        batch=16, micro_batch=2, pipeline=len(names), precision="fp32", balance="speed", device_order=order
    )
    return Stages.of(chain_on_cards(), Layout.of(configuration, on_cards(names)), stack=WHALE)


def pipeline_on(names: list[str]) -> Pipeline | None:
    size: Any = {"batch": 16, "micro_batches": 8, "num_stages": len(names), "replicas": 1, "precision": "fp32"}
    try:
        return pipeline_by_speed(chain_on_cards(), on_cards(names), **size)
    except InfeasibleError:
        return None


def seconds_in(names: list[str], order: tuple[int, ...], layers: tuple[range, ...] | None = None) -> float:
    """Seconds of a step with the devices in an order; by the fastest cut if none is given, infinite if none fits."""
    found = stages_in(names, order)
    try:
        layers = layers or cuts_by_speed(found)
    except InfeasibleError:
        return inf
    return price(cut_problem(found), [part.start for part in layers]).step_seconds


@settings(max_examples=25)
@given(st.lists(st.sampled_from(list(CARDS)), min_size=2, max_size=4))
def test_stages_take_the_devices_in_the_best_order_whatever_the_order_in_the_file(names: list[str]) -> None:
    best = min(seconds_in(names, order) for order in permutations(range(len(names))))
    for given_order in {tuple(names), tuple(sorted(names)), tuple(sorted(names, reverse=True))}:
        found = pipeline_on(list(given_order))
        assert (found is None) == (best == inf)
        if found is not None:
            order = tuple(rank for (rank,) in found.ranks)
            assert seconds_in(list(given_order), order, found.layers) == pytest.approx(best)


@pytest.mark.parametrize(
    "names", [["slow", "fast", "small", "slow"] * 2, ["slow", "fast", "slow", "small", "slow"] * 2]
)
def test_where_there_are_too_many_orders_groups_are_exchanged_as_long_as_that_helps(names: list[str]) -> None:
    found = pipeline_on(names)
    assert found is not None
    order = tuple(rank for (rank,) in found.ranks)
    assert sorted(order) == list(range(len(names)))
    draw, own = Random(7), seconds_in(names, order, found.layers)
    others = [tuple(draw.sample(order, len(order))) for _ in range(40)]
    for other in (tuple(range(len(names))), tuple(reversed(range(len(names)))), *others):
        assert own <= seconds_in(names, other) * (1 + 1e-9)


@pytest.mark.parametrize(("gib", "advised"), [(4000, True), (40, False)])
def test_hosts_are_advised_only_where_they_hold_what_would_be_there(gib: int, advised: bool) -> None:
    wide = profile().kinds[0].model_copy(update={"parameters": 2e9})
    machines = cluster()
    host = HostMemory(size_bytes=gib * GIB)
    machines = replace(machines, nodes=tuple(replace(node, host_memory=host) for node in machines.nodes))
    size: Any = {"batch": 16, "micro_batches": 4, "num_stages": 4, "replicas": 1, "precision": "fp32"}
    with pytest.raises(InfeasibleError) as raised:
        pipeline_by_speed(profile().model_copy(update={"kinds": (wide,)}), machines, **size)
    assert ("--offload" in str(raised.value)) is advised


def test_with_others_that_may_be_chosen_fewer_micro_batches_are_advised() -> None:
    """Whole states of four replicas leave too little memory for as many rows as parts of them do."""
    wide = profile().kinds[0].model_copy(update={"parameters": 1.5e8})
    chain = profile().model_copy(update={"kinds": (wide,)})
    size: Any = {"batch": 64, "micro_batches": 1, "num_stages": 2, "replicas": 2, "precision": "fp32"}
    found = []
    for others in ((), ({"zero": 1},)):
        with pytest.raises(InfeasibleError) as raised:
            pipeline_by_speed(chain, cluster(24, 24), **size, others=others)
        told = re.search(r"--micro-batches (\d+)", str(raised.value))
        assert told is not None, str(raised.value)
        found.append(int(told[1]))
    assert found[1] < found[0]
