"""Profiles of models, against numbers counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from torch import Tensor, nn

import whale
from whale.cli.model_loader import load_model
from whale.cli.profile_text import format_profile
from whale.commands.candidates import CandidateCompiler
from whale.commands.planning import make_plan
from whale.compile.options import Options
from whale.errors import UsageError
from whale.graph.capture import capture
from whale.ir.cluster import Cluster
from whale.ir.profile import Communication, LayerVariant, ModelProfile
from whale.ir.strategy import Scope
from whale.planner.catalog import device_types
from whale.planner.search.constraints import fixed_by
from whale.predict.costs import Costs
from whale.strategies import layers
from whale.strategies.profile import profile_model

HIDDEN, SEQ, HEADS, VOCAB = 64, 16, 4, 4096
GPT: dict[str, Any] = {"layers": 3, "hidden": HIDDEN, "seq": SEQ, "heads": HEADS, "vocab": VOCAB}


def profiled(name: str, *, degrees: tuple[int, ...] = (1,), **settings: Any) -> ModelProfile:
    loaded = load_model(f"examples/models/{name}.py:{name}", settings, device="meta")
    return profile_model(loaded.model, loaded.batch, tensor_degrees=degrees)


@cache
def gpt() -> ModelProfile:
    return profiled("gpt", degrees=(1, 2, 4, 8), **GPT)


def layer(profile: ModelProfile, degree: int = 1, path: str = "layers.0") -> LayerVariant:
    kind = profile.kinds[profile.layers[profile.paths.index(path)]]
    return next(variant for variant in kind.variants if variant.tensor_degree == degree)


def kept_elements(variant: LayerVariant, rows: int = 1) -> float:
    return sum(saved.size.elements(rows) for saved in variant.saved)


def masks(variant: LayerVariant) -> float:
    return sum(saved.size.bytes(1) for saved in variant.saved if saved.origin == "dropout")


# --- the chain --------------------------------------------------------------------------------------------------------


def chain(profile: ModelProfile) -> list[tuple[str, int]]:
    """Names of the kinds as they follow each other, with how many of each."""
    found: list[tuple[str, int]] = []
    for kind in profile.chain():
        count = found.pop()[1] if found and found[-1][0] == kind.name else 0
        found.append((kind.name, count + 1))
    return found


def test_equal_layers_are_of_one_kind() -> None:
    assert chain(gpt()) == [("tokens + positions", 1), ("layers.0", 3), ("norm + head", 1)]
    assert gpt().paths == ("tokens", "layers.0", "layers.1", "layers.2", "norm")
    assert gpt().tied == (((0, 4), VOCAB * HIDDEN),)
    assert gpt().row_tokens == SEQ


def test_an_encoder_decoder_is_a_chain() -> None:
    profile = profiled("t5", **{**GPT, "layers": 2})
    between = "encoder_norm + tokens + decoder_bias"
    assert [name for name, _ in chain(profile)] == [
        "tokens + encoder_bias", "encoder.0", between, "decoder.0", "decoder_norm",
    ]  # fmt: skip
    encoder, middle, decoder = (profile.kinds[i].output.elements(1) for i in (1, 2, 3))
    assert encoder == SEQ * HIDDEN + HEADS * SEQ * SEQ  # the hidden state, and the bias of positions as it comes by
    assert middle == decoder == encoder + SEQ * HIDDEN  # and what the encoder has made of its sequence


def test_blocks_of_a_resnet_are_layers_and_it_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norms couple rows, but only within a micro-batch."""
    captured = Mock(wraps=capture)
    monkeypatch.setattr(layers, "capture", captured)
    profile = profiled("resnet", layers=14, size=32, classes=10, width=0.25)
    assert profile.paths == ("stem.convolution", *(f"layers.{i}" for i in range(4)), "head")
    assert profile.row_tokens == 1
    assert captured.call_count == 1
    for kind in profile.kinds[1:-1]:
        assert {kernel.kind for kernel in kind.variants[0].forward} == {"convolution", "memory"}


def hugging_face(name: str, **settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.AutoConfig.for_model(name, **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(2, SEQ, dtype=torch.long, device="meta")
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("name", "settings", "path"),
    [
        ("gpt2", {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128}, "transformer.h.0"),
        ("mixtral", {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
                     "num_key_value_heads": 2, "vocab_size": 128, "num_local_experts": 4}, "model.layers.0"),
    ],
)  # fmt: skip
def test_models_of_hugging_face_are_chains_of_their_blocks(name: str, settings: Any, path: str) -> None:
    model, batch = hugging_face(name, **settings)
    profile = profile_model(model, batch, tensor_degrees=(1,))
    assert [count for _, count in chain(profile)] == [1, 2, 1]
    assert profile.kinds[1].name == path
    assert total_parameters(profile) == sum(p.numel() for p in model.parameters())
    attention = [kernel for kernel in layer(profile, path=path).forward if kernel.kind == "attention"]
    assert [kernel.causal for kernel in attention] == [True]
    if name == "mixtral":
        variant = layer(profile, path=path)
        assert variant.expert_parameters == 4 * 3 * 64 * 96
        assert [k.dims[0](1) for k in variant.forward if k.kind == "grouped_matmul"] == [4, 4]


class Tied(nn.Module):
    """Blocks between an embedding and a head that share their weight; the mean of all rows is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x - x.mean(0))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_tied_layers_of_a_model_whose_rows_depend_on_each_other_are_split() -> None:
    with torch.device("meta"):
        model = Tied()
        tokens = torch.zeros(4, SEQ, dtype=torch.long)
    profile = profile_model(model, {"tokens": tokens, "labels": tokens}, tensor_degrees=(1, 2))
    assert not profile.refused
    assert layer(profile, degree=2, path="embedding").parameters == 48 * 16 / 2


class Blocks(nn.Module):
    """Blocks of unlike inner widths."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, inner), nn.GELU(), nn.Linear(inner, 24)) for inner in widths
        )
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def blocks(*widths: int) -> ModelProfile:
    batch = {"x": torch.zeros(2, 24, device="meta"), "labels": torch.zeros(2, dtype=torch.long, device="meta")}
    return profile_model(Blocks(widths), batch, tensor_degrees=(1, 2))


class Plain(nn.Module):
    """Modules that follow one another, in no list; or two *towers* of them."""

    def __init__(self, towers: bool = False) -> None:
        super().__init__()
        self.towers = towers
        self.first, self.second = nn.Linear(24, 48), nn.Linear(24 if towers else 48, 48)
        self.act, self.norm, self.head = nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        once = self.act(self.first(x))
        twice = once + self.second(x) if self.towers else self.act(self.second(once))
        return nn.functional.cross_entropy(self.head(self.norm(twice)), labels)


class Wrapped(nn.Module):
    """A model with most of its parameters in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Plain(), nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.inner(self.scale(x), labels)


def some_rows() -> dict[str, Tensor]:
    return {"x": torch.zeros(4, 24), "labels": torch.zeros(4, dtype=torch.long)}


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        (Plain(), ("first", "second", "norm", "head")),
        (Wrapped(), ("scale", "inner.first", "inner.second", "inner.norm", "inner.head")),
        (Plain(towers=True), ("first",)),
    ],
)
def test_modules_that_follow_one_another_are_layers_of_a_model_without_lists(
    model: nn.Module, paths: tuple[str, ...]
) -> None:
    assert profile_model(model.to("meta"), some_rows()).paths == paths


STAGES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"head": whale.stage()}, ("blocks.0", "blocks.1", "head")),
    ({"blocks.1.1": whale.stage()}, ("blocks.0", "blocks.1", "blocks.1.1", "head")),
    ({"blocks": whale.stage()}, ("blocks.0", "blocks.1", "head")),
]


@pytest.mark.parametrize(("later", "paths"), STAGES)
def test_no_layer_reaches_over_the_beginning_of_an_annotated_stage(
    later: dict[str, Any], paths: tuple[str, ...]
) -> None:
    model = Blocks((32, 32)).to("meta")
    whale.annotate(model, {"blocks.0": whale.stage(), **later})
    assert profile_model(model, some_rows()).paths == paths


def test_an_annotated_module_that_is_no_layer_is_one() -> None:
    """Also where its annotations were taken off, as a search does, which has its stage as a constraint then."""
    loaded = load_model("examples/models/gpt.py:gpt", GPT, device="meta")
    scopes = {"head": (Scope(strategy=whale.stage().strategy, region="head"),)}
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1,), scopes=scopes)
    assert profile.paths == (*gpt().paths, "head")
    assert fixed_by(scopes, profile.paths).uncut == ((5, 6),)
    whale.annotate(loaded.model, {"head": whale.split()})
    assert profile_model(loaded.model, loaded.batch, tensor_degrees=(1,)).paths == profile.paths


def test_a_head_in_a_stage_of_its_own_takes_the_time_that_it_takes_alone() -> None:
    """With the norm before it in another stage; it took none there."""
    card = device_types()["V100-SXM2-32GB"]
    cluster = Cluster.homogeneous(2, card, intra=card.intra_node)
    times = {}
    for first, second in (("first", "head"), ("first", "second")):
        model = Plain().to("meta")
        whale.annotate(model, {first: whale.stage(), second: whale.stage()})
        costs = Costs(profile=profile_model(model, some_rows()), cluster=cluster, precision="fp32", device="cuda")
        work = make_plan(model, some_rows(), costs, Options(), rows=4, name="plain").predicted.workload
        times[second] = [sum(stage.forward) + sum(stage.backward) for stage in work.stages]
    assert all(min(own) > 0 for own in times.values())
    assert times["second"][0] < times["head"][0]
    assert sum(times["second"]) == pytest.approx(sum(times["head"]), rel=0.01)


@pytest.mark.parametrize(
    ("widths", "layers"), [((32, 32, 64, 32), (0, 1, 2, 1, 3)), ((32, 32, 64, 64, 32), (0, 1, 2, 2, 1, 3))]
)
def test_layers_that_take_turns_cost_what_each_does_where_none_comes_back(
    widths: tuple[int, ...], layers: tuple[int, ...]
) -> None:
    """In A B A the last layer and the first are equal, and of what B sends no other kind reads anything."""
    profile, once = blocks(*widths), blocks(32, 32, 64)
    assert (profile.layers, once.layers) == (layers, (0, 1, 2, 3))
    assert profile.kinds == once.kinds


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gemma2", {"head_dim": 16}), ("qwen3_moe", {"moe_intermediate_size": 32, "decoder_sparse_step": 2})],
)
def test_models_of_hugging_face_may_have_two_kinds_of_blocks_in_turns(name: str, settings: Any) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model, batch = hugging_face(name, num_hidden_layers=3, vocab_size=128, **sizes, **settings)
    profile = profile_model(model, batch, tensor_degrees=(1, 2), expert_degrees=(2,))
    assert profile.layers == (0, 1, 2, 1, 3)
    assert total_parameters(profile) == sum(p.numel() for p in model.parameters())


# --- what a layer of GPT costs ----------------------------------------------------------------------------------------


def total_parameters(profile: ModelProfile) -> float:
    shared = sum(elements * (len(layers) - 1) for layers, elements in profile.tied)
    return sum(kind.variants[0].parameters for kind in profile.chain()) - shared


def test_parameters_are_the_models() -> None:
    loaded = load_model("examples/models/gpt.py:gpt", GPT, device="meta")
    assert total_parameters(gpt()) == sum(p.numel() for p in loaded.model.parameters())


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_parameters_of_a_layer_are_divided_but_for_norms_and_biases_of_sums(degree: int) -> None:
    divided = 12 * HIDDEN**2 + 7 * HIDDEN  # matrices, and the biases of what is cut by columns
    assert layer(gpt(), degree).parameters == divided // degree + 6 * HIDDEN


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 7])
def test_operations_of_a_layer(degree: int, rows: int) -> None:
    products = 24 * SEQ * HIDDEN**2 * rows / degree
    scores = 4 * SEQ**2 * HIDDEN * rows / degree
    variant = layer(gpt(), degree)
    assert sum(kernel.flops(rows) for kernel in variant.forward) == products + scores
    assert sum(kernel.flops(rows) for kernel in variant.backward) == 2 * products + 2.5 * scores
    (attention,) = (kernel for kernel in variant.forward if kernel.kind == "attention")
    assert [size(rows) for size in attention.dims] == [rows * HEADS / degree, SEQ, SEQ, HIDDEN / HEADS]
    assert attention.causal and attention.attention and attention.split == (degree > 1)
    for kernel in (*variant.forward, *variant.backward):
        if kernel.kind == "matmul":
            batch, m, n, k = (size(rows) for size in kernel.dims)
            assert kernel.flops(rows) == 2 * batch * m * n * k
            assert kernel.split == (degree > 1)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_layer_with_fused_attention_keeps_34_bytes_a_feature_without_scores(degree: int) -> None:
    """Korthikanti et al. 2022, equation 2, without the 5 a s / h of scores: 10 + 24 / t, of which 2 are masks."""
    variant = layer(gpt(), degree)
    assert 2 * kept_elements(variant) + masks(variant) == SEQ * HIDDEN * (10 + 24 / degree)
    assert [saved.size.elements(1) for saved in variant.saved if saved.input] == [SEQ * HIDDEN]
    whole = sum(2 * s.size.elements(1) for s in variant.saved if not s.split) + masks(variant)
    assert degree == 1 or whole == 10 * SEQ * HIDDEN
    statistic = [saved.size.bytes(1) for saved in variant.saved if saved.attention]
    assert statistic == [4 * HEADS * SEQ / degree]


def spelt_out(block: Any, x: Tensor) -> Tensor:
    """GPT's attention in operators, as it was before it was fused."""
    rows, length, hidden = x.shape
    q, k, v = (part.view(rows, length, block.heads, -1).transpose(1, 2) for part in block.qkv(x).split(hidden, dim=-1))
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(future, float("-inf"))
    weights = nn.functional.dropout(scores.softmax(-1), block.dropout, block.training)
    return block.project((weights @ v).transpose(1, 2).reshape(rows, length, hidden))


def test_attention_that_is_spelt_out_keeps_its_scores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Korthikanti et al. 2022, equation 2: s h (10 + 24 / t) + 5 a s^2 / t bytes."""
    loaded = load_model("examples/models/gpt.py:gpt", {**GPT, "layers": 1}, device="meta")
    monkeypatch.setattr(type(loaded.model.layers[0]), "attention", spelt_out)  # type: ignore[index]
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2))
    for degree in (1, 2):
        check_spelt_out(layer(profile, degree), degree)


def check_spelt_out(variant: LayerVariant, degree: int) -> None:
    core = [saved for saved in variant.saved if saved.attention]
    assert sum(2 * s.size.elements(1) for s in core) == 4 * HEADS * SEQ**2 / degree
    assert sum(s.size.bytes(1) for s in core) == HEADS * SEQ**2 / degree
    rest = [saved for saved in variant.saved if not saved.attention]
    elements = sum(2 * s.size.elements(1) for s in rest)
    dropped = sum(s.size.bytes(1) for s in rest if s.origin == "dropout")
    assert elements + dropped == SEQ * HIDDEN * (10 + 24 / degree)
    marked = [kernel.name for kernel in variant.forward if kernel.attention]
    assert marked.count("aten.bmm") == 2 and "aten._softmax" in marked and "aten.native_dropout" in marked
    assert not any(kernel.attention for kernel in variant.forward if kernel.name == "aten.addmm")


def test_collectives_of_a_layer_are_megatrons() -> None:
    for degree in (2, 4):
        variant = layer(gpt(), degree)
        for found in (variant.forward_communications, variant.backward_communications):
            assert [(c.kind, c.group, c.size.total(3, 2)) for c in found] == [
                ("all_reduce", "tensor", 3 * SEQ * HIDDEN * 2)
            ] * 2
    assert layer(gpt(), 1).forward_communications == ()


def test_a_degree_that_is_not_possible_is_left_out_with_the_reason() -> None:
    assert [variant.tensor_degree for variant in gpt().kinds[1].variants] == [1, 2, 4]
    ((degree, reason),) = gpt().refused
    assert degree == 8
    assert "has 4 heads" in reason


def test_experts_are_marked_and_their_rows_exchanged() -> None:
    profile = profiled("moe", degrees=(1, 2), **{**GPT, "layers": 1}, experts=8, top_k=2, ffn=96)
    for degree in (1, 2):
        variant = layer(profile, degree)
        assert variant.expert_parameters == 8 * 3 * HIDDEN * 96 / degree
        products = [kernel for kernel in variant.forward if kernel.kind == "grouped_matmul"]
        assert sum(kernel.flops(1) for kernel in products) == 2 * 2 * SEQ * 3 * HIDDEN * 96 / degree
        assert all(kernel.expert for kernel in products)
        assert not any(kernel.expert for kernel in variant.forward if kernel.kind in ("matmul", "attention"))
        rows = Communication(kind="all_to_all", group="expert", size=variant_size(2 * SEQ * HIDDEN))
        for found in (variant.forward_communications, variant.backward_communications):
            assert [c for c in found if c.group == "expert"] == [rows, rows]


def variant_size(elements: int) -> Any:
    from whale.ir.profile import Affine, Amount

    return Amount(elements=Affine(0, elements))


# --- laws -------------------------------------------------------------------------------------------------------------


def test_the_same_model_gives_the_same_bytes() -> None:
    again = profiled("gpt", degrees=(1, 2, 4, 8), **GPT)
    assert again.model_dump_json() == gpt().model_dump_json()


class Contrast(nn.Module):
    """Compares every row with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.left(x) @ self.right(x).T, torch.arange(len(x), device=x.device))


def test_what_does_not_grow_by_the_row_is_refused() -> None:
    with pytest.raises(UsageError, match="not by the row"):
        profile_model(Contrast(), torch.zeros(4, 8))


def test_a_profile_as_text_names_its_layers() -> None:
    text = format_profile(gpt(), kernels=True)
    assert "3 x layers.0" in text
    assert "not at tensor degree 8" in text
    assert "aten.scaled_dot_product_attention" in text


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("moe", {"experts": 8, "kv_heads": 8}),  # its dispatch cuts rows
        ("moe", {"experts": 6, "kv_heads": 2, "top_k": 3}),
        ("gshard", {"experts": 4}),  # its router does
    ],
)
def test_layers_whose_rows_a_group_divides_are_costed_in_multiples_of_the_degree(
    name: str, settings: dict[str, Any]
) -> None:
    sizes = {"layers": 1, "hidden": 64, "ffn": 96, "heads": 8, "seq": 16, "vocab": 64}
    profile = profiled(name, degrees=(1, 2, 8), **sizes | settings)
    assert not [why for _, why in profile.refused if "no law" in why or "by the row" in why]
    for kind in profile.kinds:
        whole = kind.variants[0]
        for variant in kind.variants[1:]:
            for rows in (8, 24):
                parts = variant.tensor_degree * products_flops(variant, rows)
                most = 1.6  # a router, and heads of keys that there are too few of, are computed by all
                assert products_flops(whole, rows) <= parts <= most * products_flops(whole, rows)


def products_flops(variant: LayerVariant, rows: int) -> float:
    return sum(k.flops(rows) for k in (*variant.forward, *variant.backward) if k.kind != "memory")


@pytest.mark.parametrize("batch_size", [11, 12, 13, 16, 40])
def test_costs_of_split_experts_do_not_depend_on_the_rows_of_the_captured_batch(batch_size: int) -> None:
    """Four devices are traced with 8, 12 and 16 rows; of a batch of 12 one of these is the whole of it."""
    sizes = {"layers": 1, "hidden": 64, "ffn": 96, "heads": 8, "seq": 16, "vocab": 64, "experts": 8}
    loaded = load_model("examples/models/moe.py:moe", sizes, batch_size=batch_size, device="meta")
    captured = CandidateCompiler(loaded.model, loaded.batch, name="moe").captured
    profile = profile_model(loaded.model, loaded.batch, expert_degrees=(4,), name="moe", captured=captured)
    kind = next(kind for kind in profile.kinds if kind.expert_variants)
    whole = kind.variants[0]
    assert [split.experts for split in kind.expert_variants] == ["whole", "cut"]
    for split, rows in product(kind.expert_variants, (4, 16, 64)):  # and a few rows of experts that are not full
        assert products_flops(split, rows) == pytest.approx(products_flops(whole, rows), rel=0.05)


def test_rows_are_placed_alike_where_one_of_them_is_the_whole_captured_batch() -> None:
    """Else products of 8 and of 12 rows were cut along other dims: an error of Python in place of a profile."""
    sizes = {"layers": 1, "hidden": 640, "heads": 8, "seq": 64, "vocab": 64, "experts": 16, "top_k": 1, "ffn": 1280}
    loaded = load_model("examples/models/moe.py:moe", sizes, batch_size=12, device="meta")
    captured = CandidateCompiler(loaded.model, loaded.batch, name="moe").captured
    profile = profile_model(loaded.model, loaded.batch, expert_degrees=(4,), name="moe", captured=captured)
    kind = next(kind for kind in profile.kinds if kind.expert_variants)
    assert [split.experts for split in kind.expert_variants] == ["whole", "cut"]


# --- one capture for all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gpt", {}), ("llama", {"kv_heads": 2}), ("moe", {"kv_heads": 2, "experts": 4})],
)
def test_a_capture_of_the_model_serves_for_its_profile(name: str, settings: dict[str, Any]) -> None:
    loaded = load_model(
        f"examples/models/{name}.py:{name}", GPT | settings | {"layers": 1, "batch_size": 22}, device="meta"
    )
    loaded.model.to(torch.bfloat16)
    captured = CandidateCompiler(loaded.model, loaded.batch, name=name).captured
    texts = [str(node) for node in captured.graph.nodes] if captured else []
    with patch.object(layers, "capture", side_effect=AssertionError("captured again")):
        shared = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2), captured=captured)
    assert shared == profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2))
    assert captured is not None and [str(node) for node in captured.graph.nodes] == texts


def test_a_batch_of_too_few_rows_is_captured_again_in_the_models_number_type() -> None:
    loaded = load_model("examples/models/gpt.py:gpt", GPT | {"batch_size": 4}, device="meta")
    captured = CandidateCompiler(loaded.model, loaded.batch, name="gpt").captured
    found = profile_model(loaded.model, loaded.batch, tensor_degrees=(1,), captured=captured)
    assert (found.precision, found.layers) == ("float32", gpt().layers)


class Pairs(nn.Module):
    """Scores of all pairs of rows, as contrastive losses compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encode(x)
        return (y @ y.T).logsumexp(1).mean()


def test_a_model_that_grows_with_pairs_of_rows_is_refused_with_a_way_out() -> None:
    with pytest.raises(UsageError, match=r"grows with the rows .* 4, 9, 16 at 2, 3, 4 rows.*annotate it") as found:
        profile_model(Pairs().to("meta"), (torch.empty(8, 4, device="meta"),))
    assert found.type is UsageError
