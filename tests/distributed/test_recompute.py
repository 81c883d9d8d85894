"""Backwards that compute values again: the same bits, the same collectives, and less that is kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import whale
from benchmarks.live_bytes import LiveBytes, living, peak_of
from tests.distributed import spatial
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import LAYOUTS, Two
from tests.small_models import Block, decoder, tokens
from whale.compile.compile import compile_traced
from whale.compile.options import Options
from whale.compile.trace import trace
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import Plan
from whale.ir.strategy import RECOMPUTES
from whale.predict.prediction import predicted_memory
from whale.runtime.launch import World
from whale.strategies.split_backward import communicates

WORDS = 32


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


class Dropping(nn.Module):
    """Blocks with dropout and a norm with statistics, some of them under torch's checkpoint."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(Block(16, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, WORDS)

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = F.dropout(layer(x), 0.25, self.training)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.checkpointed else self.block(layer, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def dropping(checkpointed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Dropping(checkpointed).double()


def step(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> tuple[float, dict[str, Tensor]]:
    made = whale.parallelize(model, batch, device="cpu", **options)
    torch.manual_seed(1)
    made.train_step(**batch)
    loss = made.train_step(**batch).item()
    return loss, {**made.full_gradients(), **dict(made.named_buffers())}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())


def calls(made: Any) -> tuple[int, int]:
    """The collectives of a rank's graphs, and how much its forwards keep."""
    collectives = kept = 0
    for one in made._whale.engine.steps._steps.values():
        for stage in one.stages:
            derivative = stage.programs[0].derivative
            for code in (derivative.forward, derivative.backward.code):
                collectives += sum(communicates(node, code.root) for node in code.graph.nodes)
            kept += len(derivative.forward.graph.output_node().args[0]) - derivative.num_results
    return collectives, kept


# --- in one process ---------------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
MIXTURE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
MODELS: dict[str, Any] = {
    "decoder": (decoder, tokens()),
    "dropping": (dropping, tokens()),
    "t5": (lambda: T5ForConditionalGeneration(T5Config(**SIZES, decoder_start_token_id=0)).double(), None),
    "mixture": (lambda: MixtralForCausalLM(MixtralConfig(**MIXTURE)).double(), None),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_same_bits_under_every_rule(name: str) -> None:
    build, batch = MODELS[name]
    drawn = tokens()["tokens"]
    batch = {"input_ids": drawn, "labels": drawn} if batch is None else batch
    torch.manual_seed(0)
    model = build().train()
    found = {rule: step(copy.deepcopy(model), batch, recompute=rule, micro_batches=1) for rule in RECOMPUTES}
    for rule in RECOMPUTES:
        assert found[rule][0] == found["none"][0]
        assert equal(found[rule][1], found["none"][1]), rule


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_torch_is_computed_again(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.on = decoder(layers=3), on

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            x = self.inner.embed(tokens)
            for layer in self.inner.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant) if self.on else layer(x)
            return F.cross_entropy(self.inner.head(x).flatten(0, 1), labels.flatten())

    plain, checkpointed = (whale.parallelize(Checkpointed(on), tokens(), device="cpu") for on in (False, True))
    assert plain.train_step(**tokens()) == checkpointed.train_step(**tokens())
    assert equal(checkpointed.full_gradients(), plain.full_gradients())
    assert calls(checkpointed)[1] < calls(plain)[1] / 3


def test_peaks_of_memory() -> None:
    """Layers with norms and dropout, as transformers have them."""
    peaks = {}
    for rule in RECOMPUTES:
        others = frozenset(living())
        sizes = {"vocab_size": 32, "n_embd": 32, "n_layer": 5, "n_head": 4}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        batch = {"input_ids": tokens(8, 32)["tokens"], "labels": tokens(8, 32)["labels"]}
        made = whale.parallelize(model, batch, device="cpu", recompute=rule)
        at_rest = sum(x.untyped_storage().nbytes() for x in made.parameters())

        def one(made: Any = made, batch: Any = batch) -> None:
            made.train_step(**batch)
            made.zero_grad()

        with LiveBytes(others) as live:
            peaks[rule] = peak_of(one, live) - at_rest
    assert peaks["selective"] < 0.7 * peaks["none"]
    assert peaks["full"] < 0.45 * peaks["none"]


# --- on two ranks -----------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "replicate": ("replicate", {}),
    "replicate, micro-batches": ("replicate", {"micro_batches": 2}),
    "split": ("split", {"micro_batches": 2}),
    "stages": ("stages", {"micro_batches": 4}),
    "zero bubble": ("stages", {"micro_batches": 4, "schedule": "zero_bubble"}),
}


def under_every_rule(world: World, name: str) -> list[tuple[float, bool, int, int]]:
    """For each rule the loss, whether gradients have the bits of those without one, the collectives, what is kept."""
    kind, options = SCHEDULES[name]
    found = []
    reference: dict[str, Tensor] = {}
    for rule in RECOMPUTES:
        model = decoder(layers=2)
        for layer in model.layers:
            layer.register_forward_hook(lambda module, args, x: F.dropout(x, 0.25, module.training))
        whale.annotate(model, LAYOUTS[kind])
        made = whale.parallelize(model, tokens(), device="cpu", recompute=rule, timeout_seconds=20, **options)
        made.train_step(**tokens())
        loss = made.train_step(**tokens()).item()
        gradients = made.full_gradients()
        reference = reference or gradients
        found.append((loss, equal(gradients, reference), *calls(made)))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_communicate_as_often_under_every_rule(ranks: Two, name: str) -> None:
    for none, selective, full in ranks.run(under_every_rule, name):
        assert none[0] == selective[0] == full[0]
        assert selective[1] and full[1]
        assert none[2] == selective[2] == full[2]
        assert (none[2] > 0) == (name == "split")
        assert none[3] > selective[3] > full[3]


class Volume(nn.Module):
    """Layers of a convolution, batch norm and an activation each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([spatial.convolution(1, 4), spatial.convolution(4, 4)])

    def forward(self, volume: Tensor) -> Tensor:
        for layer in self.layers:
            volume = layer(volume)
        return volume.square().mean()


def of_a_cut_volume(world: World) -> list[tuple[float, bool, int, int]]:
    """Results like those of `under_every_rule`, of convolutions that read rows of the other rank."""
    found = []
    reference: dict[str, Tensor] = {}
    for rule in RECOMPUTES:
        torch.manual_seed(0)
        model, batch = Volume().double(), {"volume": torch.randn(2, 1, 12, 8, 8).double()}
        whale.annotate(model, {"": whale.split(dim=2)})
        made = whale.parallelize(model, batch, device="cpu", recompute=rule, timeout_seconds=20)
        loss = made.train_step(**batch).item()
        gradients = made.full_gradients()
        reference = reference or gradients
        found.append((loss, equal(gradients, reference), *calls(made)))
    return found


def test_convolutions_of_a_cut_volume_are_computed_again_with_the_rows_of_other_ranks(ranks: Two) -> None:
    for none, selective, full in ranks.run(of_a_cut_volume):
        assert none[0] == selective[0] == full[0]
        assert selective[1] and full[1]
        assert none[2] == selective[2] == full[2]
        assert none[3] > full[3]


STAGED = """{"world_size": 4, "batch": 8, "micro_batches": 4, "schedule": "%s", "annotations": {
    "layers.0": ["stage()", "replicate()"], "layers.1": ["stage()", "split()"]}, "stages": [
    {"ranks": [0, 1], "axes": [{"name": "replicate", "size": 2, "role": "replicate"}]%s},
    {"ranks": [2, 3], "axes": [{"name": "split", "size": 2, "role": "split"}]%s}]}"""


def by_plan(world: World, schedule: str) -> list[tuple[float, bool, int, int]]:
    """Results like those of `under_every_rule`, for plans of two stages of which none, one or both have a rule."""
    found = []
    reference: dict[str, Tensor] = {}
    for rules in (("none", "none"), ("full", "none"), ("full", "selective")):
        plan = Plan.parse(STAGED % (schedule, *(f', "recompute": "{rule}"' for rule in rules)))
        made = whale.parallelize(decoder(layers=2), tokens(), device="cpu", plan=plan, timeout_seconds=20)
        made.train_step(**tokens())
        loss = made.train_step(**tokens()).item()
        gradients = made.full_gradients()
        reference = reference or gradients
        found.append((loss, equal(gradients, reference), *calls(made)))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_each_stage_of_a_plan_has_its_own_rule(schedule: str) -> None:
    with worlds_of_a_module() as worlds:
        by_rank = worlds.run(4, by_plan, schedule)
    for rank, (none, first, both) in enumerate(by_rank):
        assert none[0] == first[0] == both[0]
        assert first[1] and both[1]
        assert none[2] == first[2] == both[2]
        assert (first[3] < none[3]) == (rank < 2)
        assert (both[3] < first[3]) == (rank >= 2)


def annotated(world: World, options: dict[str, Any]) -> int:
    """How much the forward of this rank's stage keeps, of which the first has a rule by its annotation."""
    model = decoder(layers=2)
    whale.annotate(model, {"layers.0": whale.stage(recompute="full"), "layers.1": whale.stage()})
    return calls(whale.parallelize(model, tokens(), device="cpu", micro_batches=2, timeout_seconds=20, **options))[1]


def test_an_annotation_says_the_rule_of_its_stage(ranks: Two) -> None:
    by_annotation, everywhere = (ranks.run(annotated, options) for options in ({}, {"recompute": "full"}))
    assert by_annotation[0] == everywhere[0]
    assert by_annotation[1] > everywhere[1]


LOW = """{"world_size": 2, "batch": 8, "micro_batches": 2, "precision": "bf16", "annotations": {
    "layers.0": "stage()", "layers.1": "stage()"}, "stages": [
    {"ranks": [0], "axes": [], "recompute": "full"}, {"ranks": [1], "axes": [], "recompute": "none"}]}"""


class Entering(nn.Module):
    """A decoder that enters its stages in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder(layers=2).float()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with whale.stage(recompute="full"):
            x = self.inner.layers[0](self.inner.embed(tokens))
        with whale.stage(recompute="none"):
            x = self.inner.head(self.inner.layers[1](x))
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


def in_bfloat16(world: World) -> tuple[list[float], list[int], bool, float]:
    """Losses and what is kept by a plan, by arguments with annotations, and by annotations in the forward; whether
    gradients of the first two have the same bits; and the error of ``verify`` by the plan."""
    options: dict[str, Any] = {"device": "cpu", "timeout_seconds": 20}
    staged = decoder(layers=2).float()
    whale.annotate(staged, {"layers.0": whale.stage(recompute="full"), "layers.1": whale.stage()})
    low: dict[str, Any] = {"precision": "bf16", "micro_batches": 2}
    plan = Plan.parse(LOW)
    made = [
        whale.parallelize(decoder(layers=2).float(), tokens(), plan=plan, **options),
        whale.parallelize(staged, tokens(), **low, **options),
        whale.parallelize(Entering(), tokens(), **low, **options),
    ]
    losses = [one.train_step(**tokens()).item() for one in made]
    gradients = [one.full_gradients() for one in made]
    error = whale.verify(decoder(layers=2).float(), tokens(), plan=plan, **options).loss_error
    return losses, [calls(one)[1] for one in made], equal(gradients[0], gradients[1]), error


def test_a_plan_says_the_precision_and_the_rules_that_run(ranks: Two) -> None:
    for losses, kept, equal_bits, error in ranks.run(in_bfloat16):
        assert losses[0] == losses[1] == losses[2]
        assert kept[0] == kept[1] == kept[2]
        assert equal_bits
        assert error < 1e-3


def of_memory(memory_bytes: int) -> Cluster:
    card = DeviceType.of("cpu", speed={"float32": 1e10}, memory_bytes=memory_bytes, memory_bandwidth=1e9)
    return Cluster.homogeneous(2, card, intra=Link(bandwidth=1e9, latency=1e-5))


def least(world: World, spare: int) -> tuple[list[str], bool]:
    """The rules of the stages where devices lack all but *spare* bytes to keep everything, and whether the gradients
    have the bits of those without a rule."""
    batch = tokens(16, 24)

    def staged() -> nn.Module:
        model = decoder(layers=8)
        whale.annotate(model, {"layers.[0-3]": whale.stage(), "layers.[4-7]": whale.stage()})
        return model

    traced = trace(staged().to("meta"), batch, device="cpu", training=True)
    compilation = compile_traced(traced, of_memory(2**33), Options(micro_batches=4), device="cpu")
    held = {"schedule": "1f1b", "optimizer": "adamw", "device": "cpu"}
    memory = predicted_memory(compilation, of_memory(2**33), **held)  # type: ignore[arg-type]
    cluster = of_memory(max(device.total for device in memory) + spare)
    options: dict[str, Any] = {"device": "cpu", "micro_batches": 4, "timeout_seconds": 20}
    reference = whale.parallelize(staged(), batch, **options)
    made = whale.parallelize(staged(), batch, **options, cluster=cluster, recompute="auto")
    for one in (reference, made):
        one.train_step(**batch)
    builder: Any = made._whale.engine.source
    rules = [stage.recompute for stage in builder.__self__.first.stages]
    return rules, equal(made.full_gradients(), reference.full_gradients())


def test_auto_computes_again_as_little_as_memory_allows(ranks: Two) -> None:
    for rules, equal_bits in ranks.run(least, 0):
        assert rules == ["none", "none"]
        assert equal_bits
    for rules, equal_bits in ranks.run(least, -1):
        assert rules == ["selective", "none"]  # the first stage has two micro-batches in flight
        assert equal_bits


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(whale.WhaleError, match=r"recompute.*'selective'"):
        whale.parallelize(decoder(), tokens(), device="cpu", recompute="some")  # type: ignore[arg-type]
