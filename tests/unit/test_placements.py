"""Placements of the solver: the collectives of well-known layouts, counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import whale
from tests.distributed import zoo
from tests.solved import solve, tokens
from whale.compile.compilation import Compilation
from whale.ir.cluster import Cluster
from whale.runtime.collectives import Bridge
from whale.strategies import sharding
from whale.strategies.dry_run import TaskCalls, dry_run
from whale.strategies.states import BEAM, WAYS, Moves, undominated


def gpt2(layers: int = 2, hidden: int = 64, heads: int = 4, vocabulary: int = 4001, **settings: Any) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, **settings
    )
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config)


def llama(key_value_heads: int = 2, heads: int = 4, layers: int = 2, hidden: int = 64, **settings: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=4001,
        **settings,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


SPLIT = {"": whale.split()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_is_cut_as_megatron_does_with_two_all_reduces_a_layer_each_way(attention: str) -> None:
    solved = solve(gpt2(attn_implementation=attention), tokens(4, 8), SPLIT)
    # 2 a layer, 1 of the embedding; backward 2 a layer, 1 into the head; the loss has two small ones of its own.
    assert solved.forward == {"all_reduce": 5, "AxisSum": 1}
    assert solved.backward == {"all_reduce": 5}
    assert solved.whole_matrices == []


def test_gpt2_columns_then_rows() -> None:
    solved = solve(gpt2(), tokens(4, 8), SPLIT)
    block = "transformer.h.0."
    placed = {
        name: solved.stored(f"{block}{name}.weight")
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert placed == {"attn.c_attn": "S(1)", "attn.c_proj": "S(0)", "mlp.c_fc": "S(1)", "mlp.c_proj": "S(0)"}


def test_the_tied_vocabulary_is_cut_once_and_logits_are_never_gathered() -> None:
    solved = solve(gpt2(), tokens(4, 8), SPLIT)
    assert solved.stored("transformer.wte.weight") == "S(0)"
    assert "all_gather" not in solved.forward


def test_log_probabilities_are_never_moved() -> None:
    """A cross-entropy under autocast on a GPU is one of them, of rounded log-probabilities."""
    model, batch = zoo.log_probabilities()
    solved = solve(model, batch, SPLIT)
    assert solved.stored("head.weight") == "S(0)"
    assert solved.forward == {"all_reduce": 1, "AxisSum": 1}
    assert solved.backward == {"all_reduce": 1}


def test_a_table_is_cut_on_all_stages_as_its_last_reader_needs_it() -> None:
    """Cut as the lookup alone would have it, all of it was cut anew for the head in each micro-batch."""
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=4001
    )
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config)
    pair = [whale.stage(2), whale.split(2)]
    parts = dict.fromkeys(("bert.embeddings", "bert.encoder", "cls"), pair)
    solved = solve(model, tokens(16, 64), parts, world_size=6)
    assert solved.stored("bert.embeddings.word_embeddings.weight") == "S(0)"
    last = solved.compilation.stages[-1]
    program = solved.compilation.local_programs(last, last.mesh.ranks[0], None)[0]
    assert "all_to_all" not in [one.conversion.forward_collective for one in program.bridges if isinstance(one, Bridge)]


def _moves(placed: Sequence[int], price: float) -> Moves:
    """The moves of a value between single placements, each as far from the others."""
    return Moves.between([frozenset({one}) for one in placed], lambda _: 0.0, lambda have, want: price)


def test_a_way_to_store_a_matrix_stays_until_its_last_reader_shows_what_it_is_worth() -> None:
    cheap = {(0, place): (1.0, place) for place in range(2 * BEAM)}  # the matrix, and a value that may be anywhere
    dear = {(1, 0): (100.0, "vocabulary")}
    kept = undominated(
        ["matrix", "value"],
        cheap | dear,
        lambda value, placed: _moves(placed, 1e15 if value == "matrix" else 1.0),
        lambda value: value == "matrix",
    )
    assert len(kept) == BEAM + 1
    assert (1, 0) in kept


def test_layers_that_share_their_weights_are_cut_as_those_that_have_their_own() -> None:
    """All their matrices are live between layers, with hundreds of ways to store them together."""
    config = transformers.AlbertConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=4000
    )
    with torch.device("meta"):
        model = transformers.AlbertForMaskedLM(config)
    solved = solve(model, tokens(4, 8), SPLIT)
    block = "albert.encoder.albert_layer_groups.0.albert_layers.0."
    placed = [solved.stored(f"{block}{n}.weight") for n in ("attention.query", "attention.dense", "ffn", "ffn_output")]
    assert placed == ["S(0)", "S(1)", "S(0)", "S(1)"]
    assert solved.forward["all_reduce"] == 2 * 3 + 1 + 1  # two a layer, of the embedding, and before the head


def test_ways_to_store_matrices_are_limited() -> None:
    kept = undominated(
        ["one", "other", "third"],
        {(a, b, c): (float(a + b + c), None) for a in range(9) for b in range(9) for c in range(9)},
        lambda value, placed: _moves(placed, 1e15),
        lambda value: True,
    )
    assert len(kept) == WAYS
    assert (0, 0, 0) in kept


def test_heads_are_cut_whole_in_proportion_to_speed() -> None:
    cluster = Cluster.parse(_UNEVEN, "toml")
    solved = solve(gpt2(), tokens(4, 8), SPLIT, cluster=cluster)
    shards = solved.compilation.shards()
    fused = shards["transformer.h.0.attn.c_attn.weight"].parts
    assert fused[0][1] == ((0, 48), (64, 112), (128, 176))  # three heads of 16 of each of q, k and v
    assert fused[1][1] == ((48, 64), (112, 128), (176, 192))
    assert shards["transformer.h.0.mlp.c_fc.weight"].parts[0][1] == ((0, 192),)
    assert shards["transformer.wte.weight"].parts[0][0] == ((0, 3001),)


def test_grouped_query_heads_are_cut_by_key_value_heads() -> None:
    solved = solve(llama(), tokens(4, 8), SPLIT)
    assert solved.forward["all_reduce"] <= 6
    assert solved.backward == {"all_reduce": 5}
    assert solved.whole_matrices == []
    for name in ("q_proj", "k_proj", "v_proj"):
        assert solved.stored(f"model.layers.0.self_attn.{name}.weight") == "S(0)"


def test_the_one_head_of_multi_query_attention_may_stay_whole() -> None:
    solved = solve(llama(key_value_heads=1), tokens(4, 8), SPLIT)
    assert set(solved.whole_matrices) <= {
        f"model.layers.{i}.self_attn.{name}.weight" for i in range(2) for name in ("k_proj", "v_proj")
    }
    assert solved.stored("model.layers.0.self_attn.q_proj.weight") == "S(0)"
    assert "all_gather" not in solved.backward


def test_unequal_parts_of_a_fused_projection_are_each_cut_by_heads() -> None:
    config = transformers.Phi3Config(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=4001,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = transformers.Phi3ForCausalLM(config)
    solved = solve(model, tokens(4, 8), SPLIT)
    fused = solved.compilation.shards()["model.layers.0.self_attn.qkv_proj.weight"].parts
    assert fused[0][0] == ((0, 32), (64, 80), (96, 112))
    assert fused[1][0] == ((32, 64), (80, 96), (112, 128))


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.head = nn.Linear(256, classes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.trunk(x)), y)


def test_a_hundred_thousand_classes_gather_features_and_never_logits() -> None:
    with torch.device("meta"):
        model = Classifier(100_000)
        batch = {"x": torch.zeros(64, 256), "y": torch.zeros(64, dtype=torch.long)}
    solved = solve(model, batch, {"": whale.replicate(), "head": whale.split()}, world_size=4)
    assert solved.stored("head.weight") == "S(0)"
    assert solved.forward == {"all_gather": 1, "AxisSum": 1}
    assert solved.backward == {"reduce_scatter": 1}


def test_sequence_parallelism_is_found_where_links_are_fast_and_activations_large() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whale.compile.compile.GLOO", sharding.Prices())
        solved = solve(gpt2(layers=2, hidden=768, heads=12, vocabulary=50257), tokens(8, 1024), SPLIT, world_size=4)
    assert solved.forward["reduce_scatter"] == solved.backward["reduce_scatter"] == 5
    assert solved.forward["all_reduce"] == solved.backward["all_reduce"] == 0


@pytest.mark.parametrize(("rows", "replicas", "micro_batches"), [(2, 1, 1), (8, 4, 1), (4, 1, 2), (8, 2, 2)])
def test_sequence_parallelism_cuts_what_there_is_enough_of(rows: int, replicas: int, micro_batches: int) -> None:
    """A replica's micro-batch has fewer rows than its tensor group has ranks: not these are cut, a rank would have none
    of them, but the sequence."""
    annotations = {"": [whale.replicate(replicas), whale.split(4)]}
    model, batch = gpt2(layers=2, hidden=768, heads=12, vocabulary=50257), tokens(rows, 1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whale.compile.compile.GLOO", sharding.Prices())
        solved = solve(model, batch, annotations, world_size=4 * replicas, micro_batches=micro_batches)
    assert solved.forward["reduce_scatter"] == 5
    calls = [call for call in calls_of(solved.compilation).forward if call.op == "all_gather"]
    assert len(calls) >= 4
    assert all(len(set(call.shapes)) == 1 and 0 not in call.shapes[0] for call in calls)


def calls_of(compilation: Compilation) -> TaskCalls:
    """Calls of the first rank in its first micro-batch."""
    program = compilation.local_programs(compilation.stages[0], 0, None)[0]
    return dry_run(compilation.captured, compilation.stages[0], 0, program, 0)


def test_replicas_communicate_nothing_inside_the_graph() -> None:
    solved = solve(gpt2(), tokens(4, 8), {"": whale.replicate()})
    assert not solved.forward
    assert not solved.backward


def test_tensor_parallelism_inside_replicas_counts_as_it_does_alone() -> None:
    solved = solve(gpt2(), tokens(4, 8), {"": [whale.replicate(2), whale.split(2)]}, world_size=4)
    assert solved.forward == {"all_reduce": 5, "AxisSum": 1}
    assert solved.backward == {"all_reduce": 5}


def test_equal_layers_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved_segments = []
    original = sharding._Solver._beam

    def counted(self: Any, segment: Any, start: Any) -> Any:
        solved_segments.append(segment)
        return original(self, segment, start)

    monkeypatch.setattr(sharding._Solver, "_beam", counted)
    counts = []
    for layers in (4, 8):
        solved_segments.clear()
        solve(gpt2(layers=layers), tokens(4, 8), SPLIT)
        counts.append(len(solved_segments))
    assert counts[1] <= counts[0] + 2


_UNEVEN = """
[links]
intra_node = {bandwidth = "10 GB/s", latency = "10 us"}
inter_node = {bandwidth = "1 GB/s", latency = "50 us"}
[[nodes]]
devices = 1
device = "fast"
[[nodes]]
devices = 1
device = "slow"
[device_types.fast]
speed = {float32 = "3 TFLOP/s"}
memory = "16 GiB"
memory_bandwidth = "700 GB/s"
[device_types.slow]
speed = {float32 = "1 TFLOP/s"}
memory = "16 GiB"
memory_bandwidth = "700 GB/s"
"""
