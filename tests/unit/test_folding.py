"""A dry run without most of a stage's equal layers has the same result, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import whale
from tests.small_models import Block, decoder, tokens
from whale import replicate, split, stage
from whale.cli.model_loader import load_model
from whale.compile import exchanges
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_traced
from whale.compile.options import Options
from whale.compile.trace import trace
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.state import StateSharding
from whale.predict.peak_memory import PeakMemory, brief_peak_memory
from whale.predict.replay import Replay


def devices(count: int) -> Cluster:
    card = DeviceType.of("card", speed={"float32": 1e8}, memory_bytes=2**33, memory_bandwidth=1e8)
    return Cluster.of([("node0", card)] * count, intra=Link(bandwidth=1e9, latency=1e-5))


def compiled(model: nn.Module, batch: Any, layout: Any, count: int, device: str, **options: Any) -> Compilation:
    whale.annotate(model, layout)
    traced = trace(model, batch, device="cpu", training=True, precision=options.get("precision"))
    return compile_traced(traced, devices(count), Options(**{"micro_batches": 2, **options}), device=device)


def omitted(compilation: Compilation) -> list[int]:
    """Layers that are left out, by stage."""
    folds = compilation.of_first.folded.folds
    return [sum(fold.omitted for fold in folds.get(one.index, ())) for one in compilation.stages]


def numbers(memory: PeakMemory) -> object:
    """The result of a dry run without names of nodes."""
    calls = {
        index: [[call._replace(node="") for call in made] for made in (task.forward, task.backward)]
        for index, task in memory.calls.items()
    }
    return (*(getattr(memory, name) for name in ("parameters", "gradients", "activations", "buffers", "tasks")), calls)


def check_equal(compilation: Compilation, device: Any) -> None:
    for rank in sorted({rank for one in compilation.stages for rank in one.mesh.ranks}):
        short = numbers(brief_peak_memory(compilation, rank, schedule="1f1b", device=device))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Compilation, "folded", property(lambda self: self))
            assert short == numbers(brief_peak_memory(compilation, rank, schedule="1f1b", device=device))


@settings(max_examples=6, deadline=None)
@given(
    layers=st.integers(5, 11),
    degrees=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]),
    stages=st.integers(1, 2),
    frozen=st.booleans(),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_decoders(layers: int, degrees: tuple[int, int], stages: int, frozen: bool, device: str) -> None:
    model = decoder(layers=layers, heads=4, width=16).float().to("meta")
    if frozen:
        model.embed.requires_grad_(False)
        model.layers[: layers // 2].requires_grad_(False)
    inner = [replicate(degrees[0]), split(degrees[1])]
    layout = {"": inner} if stages == 1 else {name: [stage(), *inner] for name in ("embed", f"layers.{layers // 2}")}
    compilation = compiled(model, tokens(24, 32), layout, stages * degrees[0] * degrees[1], device)
    check_equal(compilation, device)


@pytest.mark.parametrize(
    ("options", "degrees", "device"),
    [
        ({"recompute": "full"}, (2, 1), "cuda"),
        ({"recompute": "selective"}, (1, 2), "cpu"),
        ({"precision": "bf16", "recompute": "full"}, (2, 1), "cpu"),
        ({"state": StateSharding(1)}, (2, 1), "cuda"),
        ({"state": StateSharding(2), "micro_batches": 1}, (2, 2), "cpu"),
        ({"state": StateSharding(1), "micro_batches": 1, "precision": "bf16"}, (2, 1), "cuda"),
    ],
)
def test_backwards_that_are_graphs(
    options: Any, degrees: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that compute values again, that share casts between micro-batches, and whose ranks divide their state in
    buckets of several layers or of parts of one, are folded too."""
    monkeypatch.setattr(exchanges, "bucket_bytes", lambda *args, **kwargs: 20000)
    model = decoder(layers=9, heads=4, width=16).float().to("meta")
    replicas, parts = degrees
    inner = [replicate(replicas), split(parts)]
    layout = {"embed": [stage(), *inner], "layers.2": [stage(), *inner]}
    compilation = compiled(model, tokens(24, 32), layout, 2 * replicas * parts, device, **options)
    assert omitted(compilation)[1] >= 2
    failed: list[bool] = []
    finish = Replay.finish

    def finished(self: Replay) -> None:
        finish(self)
        failed.append(self.failed)

    monkeypatch.setattr(Replay, "finish", finished)
    check_equal(compilation, device)
    assert failed
    assert not any(failed)


def test_every_run_of_a_stage_is_folded() -> None:
    sizes = {"layers": 7, "hidden": 32, "heads": 4, "seq": 16, "vocab": 64}
    loaded = load_model("examples/models/t5.py:t5", sizes, batch_size=8, device="meta")
    compilation = compiled(loaded.model, loaded.batch, {"": [replicate(2)]}, 2, "cuda")
    (fold,) = [compilation.of_first.folded.folds[0]]
    assert len(fold) == 2
    assert all(one.omitted >= 2 for one in fold)
    check_equal(compilation, "cuda")


def test_a_layer_may_be_several_blocks() -> None:
    sizes = {"layers": 12, "hidden": 32, "heads": 4, "experts": 4, "seq": 16, "vocab": 64}
    loaded = load_model("examples/models/gshard.py:gshard", sizes, batch_size=8, device="meta")
    compilation = compiled(loaded.model, loaded.batch, {"": [replicate(1)]}, 1, "cuda")
    assert omitted(compilation)[0] >= 1
    check_equal(compilation, "cuda")


class Joined(nn.Module):
    """A chain of blocks with other values read along it."""

    def __init__(self, kind: str, layers: int = 9) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        blocks = [Block(16, 4) for _ in range(layers)]
        self.layers = nn.ModuleList(blocks[:1] * layers if kind == "shared" else blocks)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(16 + (kind == "sizes") * i)) for i in range(layers))
        for i in range(layers):
            self.register_buffer(f"mask{i}", torch.ones(16))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        middle = x
        for i, layer in enumerate(self.layers):
            x = layer(x) * self.scales[i][:16]
            if self.kind == "buffers":
                x = x * (2 * getattr(self, f"mask{i}"))
            if self.kind == "from before":
                x = x + first
            if i == 4:
                middle = x
        x = self.head(x + middle if self.kind == "skip" else x)
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("kind", "folds"), [("buffers", True), ("from before", True), ("skip", False), ("shared", False), ("sizes", False)]
)
def test_what_layers_read_decides_whether_they_are_folded(kind: str, folds: bool) -> None:
    model = Joined(kind).to("meta")
    compilation = compiled(model, tokens(24, 32), {"": [replicate(2)]}, 2, "cpu")
    assert (omitted(compilation) != [0]) == folds
    check_equal(compilation, "cpu")
