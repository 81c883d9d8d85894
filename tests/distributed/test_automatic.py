"""``plan="auto"``: an unmodified model on what was started, with the local model's loss and gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import whale
from tests.distributed import zoo
from tests.distributed.parity import BOUND, UNEVEN_BOUND, Setup, Worlds, cluster_of, local_step, relative_errors
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.test_examples import run
from tests.small_models import decoder, tokens
from whale.detection import detect
from whale.ir.cluster import Cluster, Link
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def gpt2_step(world: World) -> tuple[float, int]:
    """The worst error of a step of Hugging Face's GPT-2, and how many parameters lie here."""
    torch.manual_seed(0)
    model, batch = zoo.gpt2()
    model.eval()
    loss, gradients, _ = local_step(model, batch, Setup(promote=True))
    module = whale.parallelize(model, batch, plan="auto", promote_casts=True, device="cpu")
    found = module._run(batch, True)
    errors = relative_errors(module.full_gradients(), gradients)
    return max(float((found - loss).abs() / loss), *errors.values()), sum(p.numel() for p in module.parameters())


def test_gpt2_without_an_annotation_has_the_loss_and_gradients_of_one_process(worlds: Worlds) -> None:
    for worst, held in worlds.run(2, gpt2_step):
        assert worst <= BOUND
        assert held > 0


def decoder_step(world: World, speeds: tuple[float, ...], annotated: bool, **options: Any) -> tuple[float, set[str]]:
    """The worst error of a decoder on devices of these speeds, and what lies here."""
    model, batch = decoder(layers=4), tokens()
    if annotated:
        whale.annotate(model, {"layers.[0-1]": whale.stage(), "layers.[2-3]": whale.stage()})
    loss, gradients, _ = local_step(model, batch, Setup())
    module = whale.parallelize(model, batch, plan="auto", cluster=linked(cluster_of(speeds)), device="cpu", **options)
    found = module.train_step(**batch)
    errors = relative_errors(module.full_gradients(), gradients)
    return max(float((found - loss).abs() / loss), *errors.values()), {name for name, _ in module.named_parameters()}


def linked(cluster: Cluster | None) -> Cluster | None:
    """The cluster with links that are known."""
    if cluster is None:
        return None
    link = Link(bandwidth=1e9, latency=1e-5)
    return replace(cluster, nodes=tuple(replace(node, intra=link) for node in cluster.nodes))


def test_unlike_devices_of_a_given_cluster_share_the_work(worlds: Worlds) -> None:
    for worst, _ in worlds.run(2, decoder_step, (3.0, 1.0), False):
        assert worst <= UNEVEN_BOUND


def test_annotated_stages_are_kept(worlds: Worlds) -> None:
    found = worlds.run(2, decoder_step, (), True)
    assert all(worst <= BOUND for worst, _ in found)
    held = [{name.split(".")[1] for name in names if name.startswith("layers.")} for _, names in found]
    assert sorted(map(sorted, held)) == [["0", "1"], ["2", "3"]]


def detected(world: World) -> list[tuple[str, str, int]]:
    return [(device.name, device.node, device.memory_bytes) for device in detect(world).devices]


def test_all_ranks_detect_the_same_devices(worlds: Worlds) -> None:
    one, other = worlds.run(2, detected)
    assert one == other
    assert [name for name, _, _ in one] == ["cpu:0", "cpu:1"]


def refused(world: World) -> str:
    """What each rank is told where rank 0 can find nothing."""
    model, batch = decoder(layers=1), tokens()
    tiny = Cluster.homogeneous(2)
    device = tiny.devices[0].type
    small = replace(device, memory_bytes=2**10)
    cluster = linked(replace(tiny, devices=tuple(replace(d, type=small) for d in tiny.devices)))
    with pytest.raises(whale.WhaleError) as caught:
        whale.parallelize(model, batch, plan="auto", cluster=cluster, device="cpu")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_where_nothing_fits_all_ranks_end_with_the_reason(worlds: Worlds) -> None:
    first, second = worlds.run(2, refused)
    assert first.startswith("InfeasibleError") and "GiB" in first
    assert second.startswith("WorkerError: rank 0: ") and "GiB" in second


def test_the_example_has_the_losses_of_one_process() -> None:
    alone, together = run(1, "auto_search.py", "--steps", "3"), run(2, "auto_search.py", "--steps", "3")
    losses = [[float(loss) for loss in re.findall(r"loss ([0-9.]+)", text)] for text in (alone, together)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)  # printed with four digits
